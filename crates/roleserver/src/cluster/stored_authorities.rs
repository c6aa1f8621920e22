//! The authorities of the cluster whose certificates count for this node, from its newest stored statement.
//!
//! The one that signs comes first. While an authority is replaced there are two. etcd reads them from `ca.crt`, at its start
//! alone, so a changed file leads to a restart in turn ([`peer_restart`](super::peer_restart)). The node's certificates by
//! the former authority are renewed before their time.

use curator_client::peer_authorities::find_issuer;
use curator_client::pki::TrustAnchor;

use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};

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

/// The authorities of the newest stored statement, the one that signs first. Without a statement, the one that this node
/// trusts. `None`: this machine is no node.
pub fn stored_authorities(files: &ClusterFiles) -> Result<Option<Vec<TrustAnchor>>, ClusterFilesError> {
    let anchor = files
        .read_credentials()?
        .and_then(|credentials| TrustAnchor::parse(&hex::decode(credentials.ca_certificate).ok()?).ok());
    anchor.map(|anchor| authorities_above(files, &anchor)).transpose()
}

/// The authorities of the newest stored statement, the one that signs first; without a statement, `anchor`.
pub(super) fn authorities_above(
    files: &ClusterFiles,
    anchor: &TrustAnchor,
) -> Result<Vec<TrustAnchor>, ClusterFilesError> {
    let stated = files.read_statement(anchor)?;
    Ok(stated.map_or_else(|| vec![anchor.clone()], |signed| signed.statement.authorities))
}

/// Lets `ca.crt` have all authorities whose certificates count. A node that is no member has no such file.
pub fn update_ca_file(files: &ClusterFiles) -> Result<(), ClusterFilesError> {
    let Some(present) = etcd_member::read_authority_certificate(files)? else { return Ok(()) };
    let Some(mut authorities) = stored_authorities(files)? else { return Ok(()) };
    // The order of the statement changes while the same two are trusted, and etcd would restart for nothing.
    authorities.sort_by_cached_key(TrustAnchor::fingerprint);
    let certificates = authorities.iter().map(|one| etcd_member::encode_pem("CERTIFICATE", &one.certificate));
    let bundle: String = certificates.collect();
    if present == bundle.as_bytes() {
        return Ok(());
    }
    tracing::info!(authorities = authorities.len(), "etcd of this node is to trust other authorities");
    etcd_member::replace_authorities(files, &bundle)
}

/// Brings `ca.crt` up to date before etcd starts. etcd can start with the former one, too.
pub(super) fn prepare_ca_file(files: &ClusterFiles) {
    if let Err(error) = update_ca_file(files) {
        tracing::warn!(%error, "the authorities that etcd of this node trusts were not brought up to date");
    }
}

/// Whether this certificate of the node has to be renewed before its time, because another authority signs now.
pub fn is_by_former_authority(files: &ClusterFiles, certificate: &[u8]) -> Result<bool, ClusterFilesError> {
    let authorities = stored_authorities(files)?.unwrap_or_default();
    Ok(identify_issuer(certificate, &authorities) == CertificateIssuer::Other)
}

#[cfg(test)]
pub(super) mod tests {
    use curator_client::statement::Statement;
    use curator_client::succession::Succession;
    use curator_client::testing::{authority, authority_of, public, serial, statement, validity};

    use super::*;
    use crate::cluster::etcd_member::{decode_pem_bundle, replace_authorities};
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::files;

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

        replace_authorities(&files, &etcd_member::encode_pem("CERTIFICATE", &old)).unwrap();
        update_ca_file(&files).unwrap();
        assert_eq!(in_ca_file(&files), [old.clone()]);
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
    fn certificate_of_the_former_authority_is_renewed() {
        let (_directory, files) = files();
        let by = |key| {
            let authority = authority_of(1, key);
            authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate
        };
        assert!(!is_by_former_authority(&files, &by(1)).unwrap(), "no node");
        files.write_credentials(&credentials()).unwrap();
        assert!(!is_by_former_authority(&files, &by(1)).unwrap());
        state(&files, 2, &[5, 1]);
        assert!(is_by_former_authority(&files, &by(1)).unwrap());
        assert!(!is_by_former_authority(&files, &by(5)).unwrap());
        let both = [5, 1].map(|key| authority_of(1, key).anchor().clone());
        assert_eq!(identify_issuer(&by(5), &both), CertificateIssuer::Signer);
        assert_eq!(identify_issuer(&by(1), &both), CertificateIssuer::Other);
        assert_eq!(identify_issuer(&by(6), &both), CertificateIssuer::Unknown);
        assert_eq!(identify_issuer(b"x", &both[..1]), CertificateIssuer::Unknown);
    }
}
