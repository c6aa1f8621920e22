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
//!
//! etcd checks a peer when it accepts a connection. A connection that was open before a removal stays open until one of
//! both ends restarts. So the members restart in turn after a removal ([`peer_restart`](super::peer_restart)).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use curator_client::certificate::Serial;
use curator_client::pki_revocation_list::{PeerRevocations, parse_peer_revocation_list};
use etcd::client::Client;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::etcd_member;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;

/// Makes the runnable that replaces the list of this node whenever the record in its own etcd changes.
#[must_use]
pub(super) fn watch_revocation_list(files: ClusterFiles, client: Client, facts: NodeFacts) -> Runnable {
    let reported = Arc::new(AtomicBool::new(false));
    Runnable::new(move |starting: Starting| {
        let (files, client, facts, reported) =
            (files.clone(), client.clone(), facts.clone(), reported.clone());
        async move {
            let keys = KeySelector::One(PeerRevocations::etcd_key()?);
            let mut watcher = KeyWatcher::new(&client, keys, PeerRevocations::decode);
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let mut healthy = None;
            loop {
                let stored = match scope.until_cancelled(watcher.next_event()).await? {
                    Ok(KeyEvent::Put { value, .. }) => store_list(&files, &value),
                    // Nothing deletes the record. The list that is there is better than none.
                    Ok(KeyEvent::Deleted { .. }) => continue,
                    Ok(KeyEvent::BacklogDone) => {
                        healthy = starting.take().map(Starting::mark_healthy);
                        continue;
                    }
                    Err(error) => Err(error.to_string()),
                };
                let _ = &healthy;
                // Do not overwrite a problem that another part has reported.
                if stored.is_err() || reported.load(Ordering::Relaxed) {
                    facts.problem.set(stored.as_ref().err().cloned());
                    reported.store(stored.is_err(), Ordering::Relaxed);
                }
                stored.map_err(RunnableError::msg)?;
            }
        }
    })
}

/// Writes this list unless it is there already. The error is a sentence.
fn store_list(files: &ClusterFiles, revocations: &PeerRevocations) -> Result<(), String> {
    let present = etcd_member::read_revocation_list(files).ok().flatten();
    if present.as_ref() != Some(&revocations.list) {
        etcd_member::write_revocation_list(files, &revocations.list).map_err(|error| {
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

/// Writes a list that a curator sent. Rejects one that etcd could not parse.
pub(super) fn store_received_list(files: &ClusterFiles, list: &[u8]) -> Result<(), RunnableError> {
    if parse_peer_revocation_list(list).is_none() {
        let sentence = "the curator sent a list of revoked peers that etcd cannot parse; please report it";
        return Err(RunnableError::msg(sentence));
    }
    Ok(etcd_member::write_revocation_list(files, list)?)
}

/// Whether there is a list that etcd can parse.
pub(super) fn has_usable_list(files: &ClusterFiles) -> bool {
    let usable = |list: Option<Vec<u8>>| list.map(|list| parse_peer_revocation_list(&list).is_some());
    match etcd_member::read_revocation_list(files).map(usable) {
        Ok(Some(true)) => return true,
        Ok(None) => tracing::info!("etcd starts without a list of revoked peers, because there is none yet"),
        Ok(Some(false)) => {
            tracing::warn!("the list of revoked peers is damaged, so etcd starts without it");
        }
        Err(error) => {
            tracing::warn!(%error, "the list of revoked peers cannot be read, so etcd starts without it");
        }
    }
    false
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

    use curator_client::identity::Identity;
    use curator_client::testing::{at, authority, public, serial, validity};

    use super::*;

    fn files() -> (tempfile::TempDir, ClusterFiles) {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        (directory, files)
    }

    fn revocations(numbers: &[u8], number: u64) -> PeerRevocations {
        let serials: BTreeSet<Serial> = numbers.iter().map(|number| serial(*number)).collect();
        PeerRevocations::sign(&authority(1), serials, number, at(0)).unwrap()
    }

    #[test]
    fn list_is_replaced_and_a_failed_write_is_a_sentence_that_leaves_the_former_one() {
        let (_directory, files) = files();
        assert!(!has_usable_list(&files));
        for list in [revocations(&[], 1), revocations(&[3], 2), revocations(&[3], 2)] {
            store_list(&files, &list).unwrap();
            assert_eq!(etcd_member::read_revocation_list(&files).unwrap(), Some(list.list));
            assert!(has_usable_list(&files));
        }
        // No file can be made where a directory should be.
        let (_directory, files) = self::files();
        std::fs::create_dir_all(files.etcd_directory().join("peer.crl/full")).unwrap();
        let error = store_list(&files, &revocations(&[], 1)).unwrap_err();
        assert!(error.contains("was not written") && error.contains("peer.crl"), "{error}");
        assert!(!has_usable_list(&files));
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
        assert!(has_usable_list(&files));
        for damaged in [torn, &[]] {
            etcd_member::write_revocation_list(&files, damaged).unwrap();
            assert!(!has_usable_list(&files), "every peer would be rejected");
        }
    }

    #[test]
    fn own_certificate_is_found_on_the_list() {
        let (_directory, files) = files();
        let address = "10.0.0.1".parse().unwrap();
        let issued = authority(1).issue_etcd_peer_certificate(&public(7), address, serial(3), validity());
        let (certificate, key) = (issued.unwrap().certificate, Identity::generate().unwrap());
        store_list(&files, &revocations(&[3], 1)).unwrap();
        assert!(!is_pair_revoked(&files), "it has no certificate");
        etcd_member::write_peer_certificate(&files, &key, &certificate, b"ca").unwrap();
        for (listed, revoked) in [(&[3, 4][..], true), (&[4][..], false), (&[][..], false)] {
            store_list(&files, &revocations(listed, 2)).unwrap();
            assert_eq!(is_pair_revoked(&files), revoked, "{listed:?}");
        }
    }
}
