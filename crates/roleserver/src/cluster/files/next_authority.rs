//! The file `next_authority.json`: the authority that replaces the stolen one of this node's cluster, until the node
//! trusts it alone.
//!
//! It is written before any step is taken, and removed after the last. So a node that is interrupted takes the step
//! again. It belongs to the membership of its cluster: another order about the cluster removes it, and so does leaving.
//!
//! The other files that change with the authority are written here, too. Credentials come first: from then on, no
//! certificate and no statement of the former authority is stored.

use std::fmt;
use std::slice;
use std::sync::{Mutex, PoisonError};

use curator_client::pki::TrustAnchor;
use curator_client::statement::SignedStatement;
use model::cluster::authority_theft::AuthorityStep;
use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError, Credentials};

const FILE_NAME: &str = "next_authority.json";
/// Held while credentials change: a certificate of the former authority must not bring that one back.
static CREDENTIALS: Mutex<()> = Mutex::new(());

/// The authority that replaces a stolen one, and the step that this node takes. `Debug` shows no key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextAuthority {
    /// The step that this node has to take.
    pub step: AuthorityStep,
    /// Certificate of the new authority, DER, in hexadecimal digits.
    pub ca_certificate: String,
    /// Key of the new authority, PKCS #8, in hexadecimal digits. Only the step that installs it has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_key: Option<String>,
    /// Public keys of the owners that stay, in hexadecimal digits. Only that step has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub owner_keys: Vec<String>,
    /// Epoch of the cluster.
    #[serde(default)]
    pub epoch: u64,
    /// Addresses of curators, `host:port` each. Empty: those that the node knows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curators: Vec<String>,
    /// A statement of the new authority, as curators send it, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statement: Option<String>,
}

impl fmt::Debug for NextAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NextAuthority")
            .field("step", &self.step)
            .field("ca_certificate", &self.ca_certificate)
            .finish_non_exhaustive()
    }
}

impl NextAuthority {
    /// The new authority; `None` if its certificate cannot be parsed.
    #[must_use]
    pub fn anchor(&self) -> Option<TrustAnchor> {
        TrustAnchor::parse(&hex::decode(&self.ca_certificate).ok()?).ok()
    }
}

impl ClusterFiles {
    /// Reads the authority that replaces a stolen one; `None` if none does.
    pub fn read_next_authority(&self) -> Result<Option<NextAuthority>, ClusterFilesError> {
        self.read_json(FILE_NAME)
    }

    /// Stores the authority that replaces a stolen one, and the step.
    pub fn write_next_authority(&self, next: &NextAuthority) -> Result<(), ClusterFilesError> {
        self.write_json(FILE_NAME, next)
    }

    /// Removes it, after the last step, or because another order about the cluster takes its place.
    pub fn remove_next_authority(&self) -> Result<(), ClusterFilesError> {
        self.remove_file(FILE_NAME)
    }

    /// Stores a certificate of the node by the authority that the credentials name. Returns whether it did: another
    /// authority may have taken its place meanwhile.
    pub fn renew_credentials(&self, credentials: &Credentials) -> Result<bool, ClusterFilesError> {
        let _change = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = self.read_credentials()?;
        if stored.is_some_and(|stored| stored.ca_certificate != credentials.ca_certificate) {
            return Ok(false);
        }
        self.write_credentials(credentials).map(|()| true)
    }

    /// Lets the node trust another authority, its certificate in hexadecimal digits. Its own certificate stays until it is
    /// renewed. A machine that is no node is none after this either.
    pub fn replace_authority(&self, ca_certificate: &str) -> Result<(), ClusterFilesError> {
        let _change = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stored) = self.read_credentials()? else { return Ok(()) };
        let ca_certificate = ca_certificate.to_owned();
        self.write_credentials(&Credentials { ca_certificate, ..stored })
    }

    /// Replaces the stored statement by this one of another authority, also by a lower one, or removes it. One that
    /// this authority has signed since stays.
    pub fn replace_statement(
        &self,
        anchor: &TrustAnchor,
        signed: Option<&SignedStatement>,
    ) -> Result<(), ClusterFilesError> {
        let is_newer = |stored: SignedStatement| {
            signed.is_none_or(|signed| stored.statement.order() >= signed.statement.order())
        };
        if self.read_statement(anchor).ok().flatten().is_some_and(is_newer) {
            return Ok(());
        }
        self.remove_statement()?;
        signed.map_or(Ok(()), |signed| self.write_statement(signed))
    }

    /// Whether the authority that this node trusts, or a successor, has signed this statement. A machine that is no node yet
    /// trusts the cluster that it is ordered to join.
    pub(super) fn is_own_statement(&self, signed: &SignedStatement) -> Result<bool, ClusterFilesError> {
        let Some(credentials) = self.read_credentials()? else { return Ok(true) };
        let anchor = hex::decode(credentials.ca_certificate).ok();
        let anchor = anchor.and_then(|certificate| TrustAnchor::parse(&certificate).ok());
        Ok(anchor.is_none_or(|anchor| {
            anchor.cluster != signed.statement.cluster
                || SignedStatement::verify(&signed.to_wire(), slice::from_ref(&anchor)).is_ok()
        }))
    }
}

#[cfg(test)]
mod tests {
    use curator_client::statement::Statement;
    use curator_client::testing::{authority, authority_of, statement};

    use super::*;
    use crate::cluster::files::tests::{files, next_authority};

    fn credentials(key: u8) -> Credentials {
        let ca_certificate = hex::encode(&authority_of(1, key).anchor().certificate);
        Credentials { certificate: "aa".to_owned(), ca_certificate }
    }

    fn signed(number: u64, key: u8) -> SignedStatement {
        let authority = authority_of(1, key);
        let authorities = vec![authority.anchor().clone()];
        Statement { authorities, ..statement(0, number) }.sign(&authority).unwrap()
    }

    #[test]
    fn stolen_authority_stores_nothing_once_it_is_replaced() {
        let (_directory, files) = files();
        files.write_credentials(&credentials(1)).unwrap();
        files.write_statement(&signed(900, 1)).unwrap();
        let next = authority_of(1, 5).anchor().clone();
        files.replace_authority(&credentials(5).ca_certificate).unwrap();
        files.replace_statement(&next, Some(&signed(1, 5))).unwrap();
        assert_eq!(files.read_credentials().unwrap(), Some(credentials(5)));
        assert_eq!(files.read_statement(&next).unwrap(), Some(signed(1, 5)));
        // What was on its way meanwhile.
        assert!(!files.renew_credentials(&credentials(1)).unwrap());
        files.write_statement(&signed(901, 1)).unwrap();
        assert_eq!(files.read_statement(&next).unwrap(), Some(signed(1, 5)));
        assert_eq!(files.read_credentials().unwrap(), Some(credentials(5)));

        assert!(files.renew_credentials(&credentials(5)).unwrap());
        files.write_statement(&signed(2, 5)).unwrap();
        for repeated in [Some(signed(1, 5)), None] {
            files.replace_statement(&next, repeated.as_ref()).unwrap();
            assert_eq!(files.read_statement(&next).unwrap(), Some(signed(2, 5)), "it is not set back");
        }
        files.replace_statement(authority_of(1, 6).anchor(), None).unwrap();
        assert_eq!(files.read_statement(&next).unwrap(), None, "that of a former one is removed");
    }

    #[test]
    fn epoch_of_the_thief_is_lowered() {
        let (_directory, files) = files();
        let cluster = authority(1).anchor().cluster;
        files.raise_epoch(cluster, 900).unwrap();
        files.replace_epoch(cluster, 2).unwrap();
        assert_eq!(files.epoch_of_cluster(cluster).unwrap(), 2);
    }

    #[test]
    fn next_authority_is_stored_until_it_is_removed_and_shows_no_key() {
        let (_directory, files) = files();
        assert_eq!(files.read_next_authority().unwrap(), None);
        let next = NextAuthority {
            private_key: Some("c0ffee".to_owned()),
            owner_keys: vec!["07".repeat(32)],
            epoch: 2,
            ..next_authority(AuthorityStep::Install, 5)
        };
        files.write_next_authority(&next).unwrap();
        assert_eq!(files.read_next_authority().unwrap(), Some(next.clone()));
        assert_eq!(next.anchor().as_ref(), Some(authority_of(1, 5).anchor()));
        assert!(!format!("{next:?}").contains("c0ffee"));
        files.remove_next_authority().unwrap();
        files.remove_next_authority().unwrap();
        assert_eq!(files.read_next_authority().unwrap(), None);
        files.write_next_authority(&next).unwrap();
        files.remove_all_except_order().unwrap();
        assert_eq!(files.read_next_authority().unwrap(), None, "it goes with the node");
    }
}
