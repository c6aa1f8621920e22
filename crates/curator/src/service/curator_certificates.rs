//! The certificates of curators, passed on from one task of the leader to another.
//!
//! Two tasks of the leader need the issued certificates at each tick: the list of revoked peers, and the statement of the
//! cluster's authority. A large cluster has thousands of them, so the first task passes on what it has read.
//!
//! The statement never uses an older reading than before: a certificate that was listed as revoked, and that the older
//! reading does not have yet, would be trusted again.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::credential::{CertificateKind, Credential};

/// The newest reading that was passed on, and the newest that was used.
#[derive(Debug, Default)]
pub(super) struct CuratorCertificates(Mutex<Readings>);

#[derive(Debug, Default)]
struct Readings {
    /// etcd's revision at the reading, and the certificates of curators in it.
    passed: Option<(i64, Vec<Credential>)>,
    /// etcd's revision at the newest reading that was used.
    used: i64,
}

impl CuratorCertificates {
    fn lock(&self) -> MutexGuard<'_, Readings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes on all certificates as they were at this revision of etcd.
    pub(super) fn pass_on(&self, revision: i64, credentials: &[Credential]) {
        let of_curators = credentials.iter().filter(|one| one.kind == CertificateKind::Curator);
        self.lock().passed = Some((revision, of_curators.cloned().collect()));
    }

    /// Takes what was passed on since the last call; `None` if that is nothing, or older than what was used.
    pub(super) fn take(&self) -> Option<Vec<Credential>> {
        let mut readings = self.lock();
        let (revision, credentials) = readings.passed.take()?;
        if revision < readings.used {
            return None;
        }
        readings.used = revision;
        Some(credentials)
    }

    /// Records that certificates were read at this revision of etcd, and are used.
    pub(super) fn record_use(&self, revision: i64) {
        let mut readings = self.lock();
        readings.used = readings.used.max(revision);
    }
}

#[cfg(test)]
mod tests {
    use curator_client::certificate::{Serial, Validity};
    use curator_client::testing::{at, key, node_id};

    use super::*;
    use crate::credential::CredentialHolder;

    fn credential(serial: u8, kind: CertificateKind) -> Credential {
        Credential {
            serial: Serial::new([serial; 16]),
            holder: CredentialHolder::Node(node_id(1)),
            key: key(1),
            validity: Validity { not_before: at(1), not_after: at(100) },
            kind,
        }
    }

    #[test]
    fn reading_is_used_once_and_never_after_a_newer_one() {
        let (certificates, of_curator) =
            (CuratorCertificates::default(), credential(1, CertificateKind::Curator));
        assert_eq!(certificates.take(), None, "nothing was passed on");
        certificates.pass_on(7, &[credential(2, CertificateKind::Node), of_curator.clone()]);
        assert_eq!(certificates.take(), Some(vec![of_curator.clone()]));
        assert_eq!(certificates.take(), None, "it was taken");
        // The list of peers began to read before a certificate was issued and revoked, and passes that on afterwards.
        certificates.record_use(9);
        certificates.pass_on(8, std::slice::from_ref(&of_curator));
        assert_eq!(certificates.take(), None, "the certificate would be trusted again");
        certificates.pass_on(9, std::slice::from_ref(&of_curator));
        assert_eq!(certificates.take(), Some(vec![of_curator]), "nothing changed in between");
    }
}
