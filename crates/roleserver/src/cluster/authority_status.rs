//! Follows a replacement of the cluster's authority, and reports how far this node is.
//!
//! After a theft, it takes the steps that the shepherd orders, too (`authority_switch`).
//!
//! What the node trusts follows from its newest stored statement ([`stored_authorities`](super::stored_authorities)).
//! What it reports are facts: which authorities it trusts, which ones its running etcd was started with, and who signed
//! what it shows. The leader ends a stage of the replacement by them.

use std::time::Duration;

use curator_client::clock::Clock;
use curator_client::peer_authorities::find_issuer;
use curator_client::pki::TrustAnchor;
use proto::curator::v1 as wire;
use supervisor::context::{Runnable, Starting};

use crate::cluster::authority_switch::take_step;
use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_restart::read_started_authorities;
use crate::cluster::stored_authorities::{stored_authorities, update_ca_file};

/// How often the files are compared with the statement.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// What this node reports of the authorities that it uses; `None` if it is no node. `shown` is the certificate that the node
/// shows.
pub fn read_authority_status(
    files: &ClusterFiles,
    shown: Option<&[u8]>,
) -> Result<Option<wire::AuthorityStatus>, ClusterFilesError> {
    let Some(authorities) = stored_authorities(files)? else { return Ok(None) };
    let issuer = |certificate: Option<&[u8]>| {
        let issuer = certificate.and_then(|certificate| find_issuer(certificate, &authorities));
        issuer.map(TrustAnchor::fingerprint).unwrap_or_default()
    };
    let mut status = wire::AuthorityStatus {
        trusted: authorities.iter().map(TrustAnchor::fingerprint).collect(),
        node_issuer: issuer(shown),
        ..wire::AuthorityStatus::default()
    };
    if files.read_membership()?.is_some() {
        status.curator_issuer = issuer(files.read_curator_certificate().as_deref());
        status.peer_issuer = issuer(etcd_member::read_peer_certificate(files).as_deref());
        status.etcd_trusted = read_started_authorities(files)?;
    }
    Ok(Some(status))
}

/// Makes the runnable that follows the statement with `ca.crt`, and shares what the node reports.
#[must_use]
pub fn follow_authorities(files: ClusterFiles, facts: NodeFacts, clock: Clock) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        async move {
            let healthy = starting.mark_healthy();
            loop {
                let taken = healthy.scope().until_cancelled(take_step(&files, &facts, &clock)).await?;
                let problem = match follow_once(&files, &facts) {
                    _ if taken.is_err() => taken.err().map(|why| {
                        format!(
                            "this node does not trust another authority yet, as its shepherd ordered: {why}"
                        )
                    }),
                    // Why no curator is followed names the damaged statement already.
                    Ok(()) | Err(ClusterFilesError::DamagedStatement { .. }) => None,
                    Err(error) => Some(format!(
                        "this node does not follow a replacement of the cluster's authority, which waits for it: {error}"
                    )),
                };
                facts.problems.set(NodePart::Authorities, problem);
                healthy.scope().until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
            }
        }
    })
}

/// Lets `ca.crt` follow the statement, and shares what the node reports, if that has changed.
fn follow_once(files: &ClusterFiles, facts: &NodeFacts) -> Result<(), ClusterFilesError> {
    update_ca_file(files)?;
    let Some(connection) = facts.connection.latest() else { return Ok(()) };
    let shown = connection.certificate.current();
    let shown: Option<&[u8]> = shown.cert.first().map(AsRef::as_ref);
    let status = read_authority_status(files, shown)?;
    if let Some(status) = status.filter(|status| facts.authority.latest().as_ref() != Some(status)) {
        facts.authority.set(status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{authority_of, public, serial, validity};

    use super::*;
    use crate::cluster::files::tests::files;
    use crate::cluster::stored_authorities::tests::{credentials, state};

    #[test]
    fn status_has_what_the_node_trusts_and_who_signed_what_it_shows() {
        let (_directory, files) = files();
        let by = |key| {
            let authority = authority_of(1, key);
            authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate
        };
        let prints = |keys: &[u8]| -> Vec<Vec<u8>> {
            keys.iter().map(|key| authority_of(1, *key).anchor().fingerprint()).collect()
        };
        assert_eq!(read_authority_status(&files, Some(&by(1))).unwrap(), None, "no node");
        files.write_credentials(&credentials()).unwrap();
        let status = |shown: Option<&[u8]>| read_authority_status(&files, shown).unwrap().unwrap();
        let plain = status(Some(&by(1)));
        assert_eq!((plain.trusted, plain.node_issuer), (prints(&[1]), prints(&[1]).concat()));
        assert!(
            plain.curator_issuer.is_empty() && plain.peer_issuer.is_empty() && plain.etcd_trusted.is_empty()
        );
        assert!(status(None).node_issuer.is_empty());
        state(&files, 2, &[5, 1]);
        for (key, issuer) in [(1, prints(&[1])), (5, prints(&[5])), (6, vec![])] {
            let with = status(Some(&by(key)));
            assert_eq!((with.trusted, with.node_issuer), (prints(&[5, 1]), issuer.concat()), "{key}");
        }
    }
}
