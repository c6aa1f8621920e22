//! The authorities of the cluster that this node trusts, from its newest stored statement.
//!
//! The one that signs comes first. While an authority is replaced there are two. etcd reads them from `ca.crt`, at its start
//! alone, so a changed file leads to a restart in turn ([`peer_restart`](super::peer_restart)). The node's certificates by
//! another authority than the one that signs are renewed before their time.
//!
//! After a theft, etcd of a member trusts another authority before the node does (`etcd_authorities`).
//!
//! A damaged statement stops none of this node's certificates: they end, and the cluster may need this node. Then it is not
//! known who signs, and they are renewed in their time, beside the node's own etcd if it has one.

use std::time::Duration;

use curator_client::peer_authorities::find_issuer;
use curator_client::pki::TrustAnchor;
use model::cluster::authority_theft::AuthorityStep;
use model::pem_blocks::encode_pem;
use tokio::time::Instant;

use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};

/// Pause between two renewals because another authority signs. The leader may be ahead of the statement here: then what it
/// issues is by another authority than the first one of that statement, and each further certificate would be, too.
const CHANGE_INTERVAL: Duration = Duration::from_mins(1);

/// Who signed a certificate, among the authorities of the newest statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateIssuer {
    /// The authority that signs now.
    Signer,
    /// The one that signed before, or that signs next.
    Other,
    /// An authority that the statement does not list.
    Unknown,
}

/// Finds who signed a certificate. `authorities` has the one that signs first.
#[must_use]
pub fn identify_issuer(certificate: &[u8], authorities: &[TrustAnchor]) -> CertificateIssuer {
    let issuer = find_issuer(certificate, authorities);
    match (issuer, authorities.first()) {
        (Some(issuer), Some(signer)) if issuer.key == signer.key => CertificateIssuer::Signer,
        (Some(_), _) => CertificateIssuer::Other,
        (None, _) => CertificateIssuer::Unknown,
    }
}

/// Limits how often one certificate is renewed because another authority signs. It has the time of the last renewal, if the
/// new certificate was by another authority, too.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChangeLimit(Option<Instant>);

impl ChangeLimit {
    /// Whether another authority is a reason for a renewal at this moment.
    #[must_use]
    pub fn permits(self, now: Instant) -> bool {
        self.0.is_none_or(|last| now.duration_since(last) >= CHANGE_INTERVAL)
    }

    /// Records that the certificate was renewed, for any reason, and who signed the new one.
    pub fn record(&mut self, issuer: CertificateIssuer, now: Instant) {
        self.0 = (issuer != CertificateIssuer::Signer).then_some(now);
    }
}

/// The authorities of the newest stored statement, the one that signs first. Without a statement, the one that this node
/// trusts. `None`: this machine is no node.
pub fn stored_authorities(files: &ClusterFiles) -> Result<Option<Vec<TrustAnchor>>, ClusterFilesError> {
    read_anchor(files)?.map(|anchor| authorities_above(files, &anchor)).transpose()
}

/// The same. While the statement is damaged, the authority that this node trusts without one.
pub(super) fn authorities_or_anchor(
    files: &ClusterFiles,
) -> Result<Option<Vec<TrustAnchor>>, ClusterFilesError> {
    read_anchor(files)?.map(|anchor| authorities_above_or_anchor(files, &anchor)).transpose()
}

/// The authorities that the etcd of a node accepts which trusts these. After a theft, orders of the shepherd change them
/// before the node trusts another authority ([`authority_order`](super::authority_order)).
pub(super) fn etcd_authorities(
    files: &ClusterFiles,
    mut authorities: Vec<TrustAnchor>,
) -> Result<Vec<TrustAnchor>, ClusterFilesError> {
    let next = files.read_next_authority()?.and_then(|next| Some((next.anchor()?, next.step)));
    Ok(match next {
        None => authorities,
        Some((next, AuthorityStep::Accept | AuthorityStep::Show)) => {
            if !authorities.contains(&next) {
                authorities.push(next);
            }
            authorities
        }
        Some((next, _)) => vec![next],
    })
}

/// Finds who signed the certificate of this node's member of etcd. Once the shepherd has sent one of another authority,
/// that one counts as the signer: the leader issues none of it.
#[must_use]
pub(super) fn find_peer_issuer(files: &ClusterFiles, certificate: &[u8]) -> CertificateIssuer {
    match files.read_next_authority() {
        Ok(Some(next)) if next.step > AuthorityStep::Accept => CertificateIssuer::Signer,
        _ => find_certificate_issuer(files, certificate),
    }
}

/// The authority that this node trusts without a statement. `None`: this machine is no node.
pub(super) fn read_anchor(files: &ClusterFiles) -> Result<Option<TrustAnchor>, ClusterFilesError> {
    let credentials = files.read_credentials()?;
    Ok(credentials
        .and_then(|credentials| TrustAnchor::parse(&hex::decode(credentials.ca_certificate).ok()?).ok()))
}

/// The authorities of the newest stored statement, the one that signs first; without a statement, `anchor`.
pub(super) fn authorities_above(
    files: &ClusterFiles,
    anchor: &TrustAnchor,
) -> Result<Vec<TrustAnchor>, ClusterFilesError> {
    let stated = files.read_statement(anchor)?;
    Ok(stated.map_or_else(|| vec![anchor.clone()], |signed| signed.statement.authorities))
}

/// The same. While the statement is damaged, `anchor`.
pub(super) fn authorities_above_or_anchor(
    files: &ClusterFiles,
    anchor: &TrustAnchor,
) -> Result<Vec<TrustAnchor>, ClusterFilesError> {
    match authorities_above(files, anchor) {
        Err(ClusterFilesError::DamagedStatement { .. }) => Ok(vec![anchor.clone()]),
        read => read,
    }
}

/// Writes all trusted authorities into `ca.crt`. A node that is no member has no such file.
pub fn update_ca_file(files: &ClusterFiles) -> Result<(), ClusterFilesError> {
    let Some(present) = etcd_member::read_authority_certificate(files)? else { return Ok(()) };
    let Some(authorities) = stored_authorities(files)? else { return Ok(()) };
    let authorities = etcd_authorities(files, authorities)?;
    let bundle = encode_bundle(&authorities);
    if present == bundle.as_bytes() {
        return Ok(());
    }
    tracing::info!(authorities = authorities.len(), "etcd of this node is to trust other authorities");
    etcd_member::replace_authorities(files, &bundle)
}

/// The certificates of these authorities as `ca.crt` has them.
pub(super) fn encode_bundle(authorities: &[TrustAnchor]) -> String {
    // The order of the statement changes while the same two are trusted, and etcd would restart for nothing.
    let mut authorities: Vec<&TrustAnchor> = authorities.iter().collect();
    authorities.sort_by_cached_key(|authority| authority.fingerprint());
    authorities.iter().map(|one| encode_pem("CERTIFICATE", &one.certificate)).collect()
}

/// Brings `ca.crt` up to date before etcd starts. etcd can start with the former one, too.
pub(super) fn prepare_ca_file(files: &ClusterFiles) {
    if let Err(error) = update_ca_file(files) {
        tracing::warn!(%error, "the authorities that etcd of this node trusts were not brought up to date");
    }
}

/// Finds who signed this certificate of the node. While it is not known who signs now, the certificate counts as good: this
/// machine is no node, or its statement is damaged.
#[must_use]
pub fn find_certificate_issuer(files: &ClusterFiles, certificate: &[u8]) -> CertificateIssuer {
    match stored_authorities(files) {
        Ok(Some(authorities)) => identify_issuer(certificate, &authorities),
        Ok(None) => CertificateIssuer::Signer,
        Err(error) => {
            tracing::debug!(%error, "it is not known which authority of the cluster signs now");
            CertificateIssuer::Signer
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::slice;

    use curator_client::statement::Statement;
    use curator_client::succession::Succession;
    use curator_client::testing::{authority, authority_of, public, serial, statement, validity};

    use super::*;
    use crate::cluster::etcd_member::{decode_pem_bundle, replace_authorities};
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::{files, next_authority};

    /// A node of the first cluster that trusts authority 1.
    pub(in crate::cluster) fn credentials() -> Credentials {
        let ca_certificate = hex::encode(&authority(1).anchor().certificate);
        Credentials { certificate: String::new(), ca_certificate }
    }

    /// Stores a statement of these authorities, which the first one signs.
    pub(in crate::cluster) fn state(files: &ClusterFiles, number: u64, authorities: &[u8]) {
        let anchors = authorities.iter().map(|key| authority_of(1, *key).anchor().clone()).collect();
        let signed = Statement { authorities: anchors, ..statement(0, number) };
        let signed = signed.sign(&authority_of(1, authorities[0])).unwrap();
        let link = Succession::sign(&authority(1), authority_of(1, 5).anchor()).unwrap();
        files.write_statement(&signed.with_successors(vec![link])).unwrap();
    }

    fn in_ca_file(files: &ClusterFiles) -> Vec<Vec<u8>> {
        let text = etcd_member::read_authority_certificate(files).unwrap().unwrap();
        decode_pem_bundle(&String::from_utf8(text).unwrap())
    }

    #[test]
    fn ca_file_has_the_authorities_of_the_statement() {
        let (_directory, files) = files();
        let [old, new] = [1, 5].map(|key| authority_of(1, key).anchor().certificate.clone());
        update_ca_file(&files).unwrap();
        assert_eq!(etcd_member::read_authority_certificate(&files).unwrap(), None, "no node");
        files.write_credentials(&credentials()).unwrap();
        update_ca_file(&files).unwrap();
        assert_eq!(etcd_member::read_authority_certificate(&files).unwrap(), None, "no member");

        replace_authorities(&files, &encode_pem("CERTIFICATE", &old)).unwrap();
        update_ca_file(&files).unwrap();
        assert_eq!(in_ca_file(&files), slice::from_ref(&old));
        state(&files, 2, &[1, 5]);
        update_ca_file(&files).unwrap();
        let both = etcd_member::read_authority_certificate(&files).unwrap();
        let certificates = in_ca_file(&files);
        assert!(certificates.len() == 2 && certificates.contains(&old) && certificates.contains(&new));
        state(&files, 3, &[5, 1]);
        update_ca_file(&files).unwrap();
        assert_eq!(etcd_member::read_authority_certificate(&files).unwrap(), both, "etcd need not restart");
        state(&files, 4, &[5]);
        update_ca_file(&files).unwrap();
        assert_eq!(in_ca_file(&files), [new]);
    }

    #[test]
    fn etcd_accepts_both_authorities_until_it_rejects_the_stolen_one() {
        let (_directory, files) = files();
        files.write_credentials(&credentials()).unwrap();
        replace_authorities(&files, "").unwrap();
        let [old, new] = [1, 5].map(|key| authority_of(1, key).anchor().certificate.clone());
        let by = |key| {
            let authority = authority_of(1, key);
            authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate
        };
        let (signer, unknown) = (CertificateIssuer::Signer, CertificateIssuer::Unknown);
        for (step, expected, issuer) in [
            (AuthorityStep::Accept, vec![&old, &new], unknown),
            (AuthorityStep::Show, vec![&old, &new], signer),
            (AuthorityStep::Reject, vec![&new], signer),
            (AuthorityStep::Close, vec![&new], signer),
            (AuthorityStep::Install, vec![&new], signer),
        ] {
            files.write_next_authority(&next_authority(step, 5)).unwrap();
            update_ca_file(&files).unwrap();
            let present = in_ca_file(&files);
            assert_eq!(present.len(), expected.len(), "{step}");
            assert!(expected.iter().all(|one| present.contains(one)), "{step}");
            assert_eq!(find_peer_issuer(&files, &by(5)), issuer, "{step}");
        }
        files.remove_next_authority().unwrap();
        update_ca_file(&files).unwrap();
        assert_eq!(in_ca_file(&files), [old]);
        assert_eq!((find_peer_issuer(&files, &by(1)), find_peer_issuer(&files, &by(5))), (signer, unknown));
    }

    #[test]
    fn certificate_of_the_former_authority_is_renewed() {
        let (_directory, files) = files();
        let by = |key| {
            let authority = authority_of(1, key);
            authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate
        };
        let issuer = |key| find_certificate_issuer(&files, &by(key));
        assert_eq!(issuer(1), CertificateIssuer::Signer, "no node");
        files.write_credentials(&credentials()).unwrap();
        assert_eq!((issuer(1), issuer(5)), (CertificateIssuer::Signer, CertificateIssuer::Unknown));
        state(&files, 2, &[5, 1]);
        assert_eq!((issuer(1), issuer(5)), (CertificateIssuer::Other, CertificateIssuer::Signer));
        state(&files, 3, &[5]);
        assert_eq!((issuer(1), issuer(5)), (CertificateIssuer::Unknown, CertificateIssuer::Signer));
        let both = [5, 1].map(|key| authority_of(1, key).anchor().clone());
        assert_eq!(identify_issuer(&by(5), &both), CertificateIssuer::Signer);
        assert_eq!(identify_issuer(&by(1), &both), CertificateIssuer::Other);
        assert_eq!(identify_issuer(&by(6), &both), CertificateIssuer::Unknown);
        assert_eq!(identify_issuer(b"x", &both[..1]), CertificateIssuer::Unknown);
    }

    #[test]
    fn damaged_statement_is_no_reason_for_a_renewal_and_hides_no_authority() {
        let (directory, files) = files();
        files.write_credentials(&credentials()).unwrap();
        state(&files, 2, &[5, 1]);
        std::fs::write(directory.path().join("cluster/statement.json"), "{").unwrap();
        assert!(stored_authorities(&files).is_err());
        let anchor = authority(1).anchor().clone();
        assert_eq!(authorities_or_anchor(&files).unwrap(), Some(vec![anchor.clone()]));
        assert_eq!(authorities_above_or_anchor(&files, &anchor).unwrap(), [anchor]);
        for key in [1, 5, 6] {
            let certificate = authority_of(1, key).issue_node_certificate(&public(7), serial(3), validity());
            let issuer = find_certificate_issuer(&files, &certificate.unwrap().certificate);
            assert_eq!(issuer, CertificateIssuer::Signer, "{key}");
        }
    }

    #[test]
    fn renewal_that_brings_no_certificate_of_the_signer_is_repeated_after_a_minute() {
        let (mut limit, begin) = (ChangeLimit::default(), Instant::now());
        assert!(limit.permits(begin));
        limit.record(CertificateIssuer::Other, begin);
        for (seconds, permitted) in [(0, false), (5, false), (59, false), (60, true), (600, true)] {
            assert_eq!(limit.permits(begin + Duration::from_secs(seconds)), permitted, "after {seconds} s");
        }
        limit.record(CertificateIssuer::Unknown, begin + CHANGE_INTERVAL);
        assert!(!limit.permits(begin + CHANGE_INTERVAL));
        limit.record(CertificateIssuer::Signer, begin + CHANGE_INTERVAL);
        assert!(limit.permits(begin + CHANGE_INTERVAL), "the authority may be replaced again at once");
    }
}
