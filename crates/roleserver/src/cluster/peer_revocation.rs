//! The list of revoked peers on this node: what etcd starts with, and its replacement while etcd runs.
//!
//! The leading curator puts the certificates of ended memberships on a list, which is a record in etcd. A member's etcd
//! reads the list from the file `peer.crl`, again for each connection that it accepts. So the file is replaced whenever
//! the record changes. Each member watches its own etcd: a member that follows no leader has the newest list, too.
//!
//! etcd rejects every peer if it was started with the list and the file is missing or cannot be parsed. Hence:
//!
//! * The file is there before etcd starts. The first member of a cluster signs an empty list. Others get the present one
//!   with their certificate. If a curator of an earlier release sends none, etcd starts without the list. The file is
//!   then written as soon as the record exists, and etcd restarts to read it once the list has certificates.
//! * A list is parsed before it is written, and replaces the file atomically. If writing fails, the former list stays,
//!   the node reports the failure, and the write is repeated.
//! * A file that was damaged or removed is replaced within seconds while etcd runs. One that is damaged before etcd starts,
//!   or missing although this node has had it, is requested from the leader first. Without a leader etcd starts with the
//!   copy of the last list, `peer.crl.copy`. Only if that is lost, too, etcd starts without a list, because the other
//!   members may need it for their quorum. The node reports either, and the file is written from the record once etcd
//!   responds.
//!
//! etcd checks a peer when it accepts a connection. A connection that was open before a removal stays open until one of
//! both ends restarts. So the members restart in turn after a removal ([`peer_restart`](super::peer_restart)).

use std::time::Duration;

use curator_client::certificate::Serial;
use curator_client::identity::Identity;
use curator_client::pki_revocation_list::{PeerRevocations, parse_peer_revocation_list};
use curator_client::status_text::describe_status;
use etcd::client::Client;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::{CuratorConnection, NodeFacts};
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_order::LocalPeer;
use crate::cluster::peer_restart::has_had_list;
use crate::cluster::stored_authorities::encode_bundle;

/// How often the file is compared with the record.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Makes the runnable that replaces the list of this node whenever it differs from the record in its own etcd.
#[must_use]
pub(super) fn watch_revocation_list(files: ClusterFiles, client: Client, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, client, facts) = (files.clone(), client.clone(), facts.clone());
        async move {
            let keys = KeySelector::One(PeerRevocations::etcd_key()?);
            let mut watcher = KeyWatcher::new(&client, keys, PeerRevocations::decode);
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let mut healthy = None;
            let mut recorded = None::<PeerRevocations>;
            loop {
                let event = tokio::time::timeout(CHECK_INTERVAL, watcher.next_event());
                let stored = match scope.until_cancelled(event).await? {
                    Ok(Ok(KeyEvent::Put { value, .. })) => store_list(&files, recorded.insert(value)),
                    // Nothing deletes the record. The list that is there is better than none.
                    Ok(Ok(KeyEvent::Deleted { .. })) => continue,
                    Ok(Ok(KeyEvent::BacklogDone)) => {
                        healthy = starting.take().map(Starting::mark_healthy);
                        // Without a record, a list that is lost stays so.
                        facts.problems.set(NodePart::RevocationList, prepare_list(&files).problem);
                        continue;
                    }
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(_) => match recorded.as_ref() {
                        None => continue,
                        Some(recorded) if is_stored(&files, recorded) => Ok(()),
                        Some(recorded) => {
                            tracing::warn!(
                                "the list of revoked peers of etcd or its copy is damaged, and is written again"
                            );
                            store_list(&files, recorded)
                        }
                    },
                };
                let _ = &healthy;
                facts.problems.set(NodePart::RevocationList, stored.as_ref().err().cloned());
                stored.map_err(RunnableError::msg)?;
            }
        }
    })
}

/// Writes this list unless it is there already. The error is a sentence.
fn store_list(files: &ClusterFiles, revocations: &PeerRevocations) -> Result<(), String> {
    if !is_stored(files, revocations) {
        etcd_member::write_revocation_list(files, &revocations.list).map_err(|error| {
            let present = etcd_member::read_revocation_list(files).ok().flatten();
            if present.as_ref() == Some(&revocations.list) {
                return format!(
                    "the copy of the list of revoked peers of etcd was not written, with which etcd would start if the \
                     list were lost; it is tried again: {error}"
                );
            }
            format!(
                "the list of revoked peers of etcd was not written, so that a removed member may still connect to this \
                 one; it is tried again: {error}"
            )
        })?;
        let (number, serials) = (revocations.number, revocations.serials.len());
        tracing::info!(number, serials, "the list of revoked peers of etcd was replaced");
    }
    if is_pair_revoked(files) {
        tracing::warn!(
            "the certificate of this node's etcd member is on the list of revoked peers; another one is requested \
             before the next start of its control plane"
        );
    }
    Ok(())
}

/// Whether the file and its copy have this list.
fn is_stored(files: &ClusterFiles, revocations: &PeerRevocations) -> bool {
    let read = [etcd_member::read_revocation_list(files), etcd_member::read_revocation_copy(files)];
    read.into_iter().all(|present| present.ok().flatten().as_ref() == Some(&revocations.list))
}

/// Requests a pair for the etcd member of this node, and the list of revoked peers. If there is a pair, a failure is only
/// logged: this member may be needed before any curator can lead.
pub(super) async fn request_peer_certificate(
    scope: &Scope,
    host: &ControlPlaneContext,
    connection: &CuratorConnection,
    key: &Identity,
) -> Result<(), RunnableError> {
    let mut nodes = NodesClient::new(connection.curators.channel());
    let issuing = nodes.issue_peer_certificate(wire::IssuePeerCertificateRequest {});
    let refused = match scope.until_cancelled(issuing).await? {
        Ok(issued) => {
            let issued = issued.into_inner();
            if issued.revocation_list.is_empty() {
                tracing::info!(
                    "the leading curator is of a release that has no list of revoked peers of etcd"
                );
            } else {
                store_received_list(&host.files, &issued.revocation_list)?;
            }
            let Some(refused) = store_pair(&host.files, key, &issued.certificate)? else { return Ok(()) };
            refused
        }
        Err(status) => describe_status(&status),
    };
    let sentence = format!("requesting a certificate for etcd failed: {refused}");
    if etcd_member::read_peer_certificate(&host.files).is_none() {
        return Err(RunnableError::msg(sentence));
    }
    tracing::warn!("{sentence}; the present one is used");
    Ok(())
}

/// Stores a certificate that a curator sent, with the key and with the authorities that etcd trusts. Returns why it is not
/// used, if the other members would reject it.
fn store_pair(
    files: &ClusterFiles,
    key: &Identity,
    certificate: &[u8],
) -> Result<Option<String>, ClusterFilesError> {
    let Some(member) = LocalPeer::read(files)? else {
        return Ok(Some("this node has no record of its membership".to_owned()));
    };
    if let Err(reason) = member.check_for_start(certificate) {
        return Ok(Some(format!("the curator sent one that is not used: {reason}")));
    }
    // All of them: etcd may start before the file is brought up to date.
    let trusted = encode_bundle(&member.authorities);
    etcd_member::write_peer_certificate(files, key, certificate, &trusted)?;
    Ok(None)
}

/// Writes a list that a curator sent. Rejects one that etcd could not parse.
fn store_received_list(files: &ClusterFiles, list: &[u8]) -> Result<(), RunnableError> {
    if parse_peer_revocation_list(list).is_none() {
        let sentence = "the curator sent a list of revoked peers that etcd cannot parse; please report it";
        return Err(RunnableError::msg(sentence));
    }
    Ok(etcd_member::write_revocation_list(files, list)?)
}

/// Whether there is a list. Fails with the reason, a part of a sentence, if this node has had one that etcd could not read
/// now.
fn find_list(files: &ClusterFiles) -> Result<bool, String> {
    let fault = match etcd_member::read_revocation_list(files) {
        Ok(None) if !has_had_list(files) => return Ok(false),
        Ok(None) => "missing",
        Ok(Some(list)) if parse_peer_revocation_list(&list).is_some() => return Ok(true),
        Ok(Some(_)) => "damaged",
        Err(error) => return Err(error.to_string()),
    };
    Err(format!("{} is {fault}", files.etcd_directory().join("peer.crl").display()))
}

/// The sentence about a list that is lost, while it is requested from the leader; `None` unless it is lost.
pub(super) fn describe_lost_list(files: &ClusterFiles) -> Option<String> {
    let reason = find_list(files).err()?;
    Some(format!("the list of revoked peers of etcd is lost, and is requested from the leader: {reason}"))
}

/// The list of revoked peers with which etcd may start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PreparedList {
    /// Whether there is one that etcd can read.
    pub(super) is_present: bool,
    /// A sentence if this node has lost its list.
    pub(super) problem: Option<String>,
}

/// Prepares the list for a start of etcd: one that is lost is replaced by its copy.
pub(super) fn prepare_list(files: &ClusterFiles) -> PreparedList {
    let lost = match find_list(files) {
        Ok(is_present) => return PreparedList { is_present, problem: None },
        Err(lost) => lost,
    };
    match restore_copy(files) {
        Ok(()) => PreparedList {
            is_present: true,
            problem: Some(format!(
                "the list of revoked peers of etcd was lost, and its copy is used until the present one is read from \
                 etcd, as soon as etcd responds: {lost}"
            )),
        },
        Err(reason) => PreparedList {
            is_present: false,
            problem: Some(format!(
                "etcd of this node has no list of revoked peers, so that a removed member may connect to this one until \
                 another list is here; it is read from etcd as soon as etcd responds: {lost}, and {reason}"
            )),
        },
    }
}

/// Replaces the list by its copy. Fails with the reason, a part of a sentence.
fn restore_copy(files: &ClusterFiles) -> Result<(), String> {
    let copy = etcd_member::read_revocation_copy(files).map_err(|error| error.to_string())?;
    let copy = copy.ok_or("there is no copy of it")?;
    if parse_peer_revocation_list(&copy).is_none() {
        return Err("its copy is damaged, too".to_owned());
    }
    etcd_member::write_revocation_list(files, &copy).map_err(|error| error.to_string())
}

/// Whether the list of this node has the certificate of its etcd member.
pub(super) fn is_pair_revoked(files: &ClusterFiles) -> bool {
    let own =
        etcd_member::read_peer_certificate(files).and_then(|certificate| Serial::from_der(&certificate));
    let list = etcd_member::read_revocation_list(files).ok().flatten();
    let listed = list.and_then(|list| parse_peer_revocation_list(&list));
    own.zip(listed).is_some_and(|(own, listed)| listed.contains(&own))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use curator_client::node_id::PublicKey;
    use curator_client::pki::Authority;
    use curator_client::testing::{at, authority, authority_of, public, serial, validity};

    use super::*;
    use crate::cluster::files::tests::{files, membership};
    use crate::cluster::peer_restart::record_start;
    use crate::cluster::stored_authorities::tests::{credentials, state};

    fn revocations(numbers: &[u8], number: u64) -> PeerRevocations {
        let serials: BTreeSet<Serial> = numbers.iter().map(|number| serial(*number)).collect();
        PeerRevocations::sign(&authority(1), serials, number, at(0)).unwrap()
    }

    #[test]
    fn list_is_replaced_and_a_failed_write_is_a_sentence_that_leaves_the_former_one() {
        let (_directory, files) = files();
        assert_eq!(find_list(&files), Ok(false));
        for list in [revocations(&[], 1), revocations(&[3], 2), revocations(&[3], 2)] {
            store_list(&files, &list).unwrap();
            assert_eq!(etcd_member::read_revocation_list(&files).unwrap(), Some(list.list));
            assert_eq!(find_list(&files), Ok(true));
        }
        // No file can be made where a directory should be.
        let (_directory, files) = self::files();
        std::fs::create_dir_all(files.etcd_directory().join("peer.crl/full")).unwrap();
        let error = store_list(&files, &revocations(&[], 1)).unwrap_err();
        assert!(error.contains("was not written") && error.contains("peer.crl"), "{error}");
        assert!(find_list(&files).unwrap_err().contains("reading"));
        let prepared = prepare_list(&files);
        assert!(!prepared.is_present && prepared.problem.unwrap().contains("there is no copy of it"));
        let (_directory, files) = self::files();
        std::fs::create_dir_all(files.etcd_directory().join("peer.crl.copy/full")).unwrap();
        let error = store_list(&files, &revocations(&[3], 1)).unwrap_err();
        assert!(error.contains("the copy of the list") && !error.contains("may still connect"), "{error}");
        assert_eq!(find_list(&files), Ok(true), "etcd reads the list");
    }

    #[test]
    fn list_that_etcd_cannot_parse_is_neither_written_nor_used() {
        let (_directory, files) = files();
        let list = revocations(&[3], 1).list;
        let torn = &list[..list.len() - 1];
        let error = store_received_list(&files, torn).unwrap_err().to_string();
        assert!(error.contains("cannot parse"), "{error}");
        assert_eq!(etcd_member::read_revocation_list(&files).unwrap(), None);
        store_received_list(&files, &list).unwrap();
        assert_eq!(find_list(&files), Ok(true));
        // With such a list, etcd would reject every peer.
        for damaged in [torn, &[]] {
            etcd_member::write_revocation_list(&files, damaged).unwrap();
            let prepared = prepare_list(&files);
            let sentence = prepared.problem.unwrap();
            assert!(
                !prepared.is_present
                    && sentence.contains("may connect")
                    && sentence.contains("peer.crl is damaged, and its copy is damaged, too"),
                "{sentence}"
            );
        }
    }

    fn remove(files: &ClusterFiles, names: &[&str]) {
        for name in names {
            std::fs::remove_file(files.etcd_directory().join(name)).unwrap();
        }
    }

    #[test]
    fn lost_list_is_replaced_by_its_copy() {
        let (_directory, files) = files();
        let never = PreparedList { is_present: false, problem: None };
        assert_eq!(
            prepare_list(&files),
            never,
            "a node that is new, or of a release without lists, has lost nothing"
        );
        assert_eq!(describe_lost_list(&files), None);
        let list = revocations(&[3], 1);
        store_list(&files, &list).unwrap();
        assert_eq!(prepare_list(&files), PreparedList { is_present: true, problem: None });
        for fault in ["missing", "damaged"] {
            files.write_etcd_file("peer.crl", b"torn").unwrap();
            if fault == "missing" {
                remove(&files, &["peer.crl"]);
            }
            let lost = describe_lost_list(&files).unwrap();
            assert!(lost.contains("requested from the leader"), "{lost}");
            let prepared = prepare_list(&files);
            let sentence = prepared.problem.unwrap();
            assert!(prepared.is_present && sentence.contains(&format!("peer.crl is {fault}")), "{sentence}");
            assert_eq!(etcd_member::read_revocation_list(&files).unwrap(), Some(list.list.clone()));
            assert_eq!(describe_lost_list(&files), None);
        }
        // A release without copies wrote the list.
        remove(&files, &["peer.crl.copy"]);
        store_list(&files, &list).unwrap();
        assert_eq!(etcd_member::read_revocation_copy(&files).unwrap(), Some(list.list));
    }

    #[test]
    fn list_that_was_there_at_an_earlier_start_is_not_forgotten() {
        for numbers in [vec![], vec![3]] {
            let (_directory, files) = files();
            record_start(&files).unwrap();
            assert_eq!(find_list(&files), Ok(false), "it never had one");
            store_list(&files, &revocations(&numbers, 1)).unwrap();
            record_start(&files).unwrap();
            remove(&files, &["peer.crl", "peer.crl.copy"]);
            // Each start without the list is recorded, too.
            for _ in 0..2 {
                let prepared = prepare_list(&files);
                let sentence = prepared.problem.unwrap();
                assert!(!prepared.is_present && sentence.contains("may connect to this one"), "{sentence}");
                assert!(sentence.contains("peer.crl is missing, and there is no copy"), "{sentence}");
                record_start(&files).unwrap();
            }
        }
    }

    #[test]
    fn requested_certificate_is_checked_and_stored_with_all_authorities() {
        let (_directory, files) = files();
        let key = files.read_or_create_key().unwrap();
        let (own, address) = (PublicKey(key.public_key()), membership().address);
        let issue = |authority: Authority, key: &PublicKey, address| {
            authority.issue_etcd_peer_certificate(key, address, serial(3), validity()).unwrap().certificate
        };
        let next = issue(authority_of(1, 5), &own, address);
        let refused = store_pair(&files, &key, &next).unwrap().unwrap();
        assert!(refused.contains("no record of its membership"), "{refused}");
        files.write_credentials(&credentials()).unwrap();
        files.write_membership(&membership()).unwrap();
        state(&files, 2, &[1, 5]);
        let elsewhere = "10.9.9.9".parse().unwrap();
        let of_node = authority(1).issue_node_certificate(&own, serial(3), validity()).unwrap().certificate;
        for (what, certificate) in [
            ("by another authority", issue(authority(2), &own, address)),
            ("for another key", issue(authority(1), &public(7), address)),
            ("that of the node", of_node),
            ("nothing", Vec::new()),
        ] {
            let refused = store_pair(&files, &key, &certificate).unwrap();
            assert!(refused.is_some_and(|reason| reason.contains("is not used")), "{what}");
            assert_eq!(etcd_member::read_peer_certificate(&files), None, "{what}");
        }
        // A member that has moved may not have reported its address yet.
        for stored in [issue(authority(1), &own, elsewhere), next] {
            assert_eq!(store_pair(&files, &key, &stored).unwrap(), None);
            assert_eq!(etcd_member::read_peer_certificate(&files), Some(stored));
        }
        let trusted = etcd_member::read_authority_certificate(&files).unwrap().unwrap();
        let trusted = etcd_member::decode_pem_bundle(&String::from_utf8(trusted).unwrap());
        assert_eq!(trusted.len(), 2, "the other members may show a certificate of either");
    }

    #[test]
    fn own_certificate_is_found_on_the_list() {
        let (_directory, files) = files();
        let address = "10.0.0.1".parse().unwrap();
        let issued = authority(1).issue_etcd_peer_certificate(&public(7), address, serial(3), validity());
        let (certificate, key) = (issued.unwrap().certificate, Identity::generate().unwrap());
        store_list(&files, &revocations(&[3], 1)).unwrap();
        assert!(!is_pair_revoked(&files), "it has no certificate");
        etcd_member::write_peer_certificate(&files, &key, &certificate, "ca").unwrap();
        for (listed, revoked) in [(&[3, 4][..], true), (&[4][..], false), (&[][..], false)] {
            store_list(&files, &revocations(listed, 2)).unwrap();
            assert_eq!(is_pair_revoked(&files), revoked, "{listed:?}");
        }
    }
}
