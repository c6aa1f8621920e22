//! Issue, store and renew the certificate that this node's curator shows.
//!
//! A curator's certificate is for consensus members alone, and valid for a day. It is renewed when a third of that is
//! left, eight hours; a failed renewal is repeated with growing pauses. The leader issues it, and then its clock
//! counts. If no leader can be called, or the leader is of a release without this call, the node issues the
//! certificate from its own etcd. It does the same at its start, because no other curator may be running.
//!
//! It is also renewed as soon as its serial number is revoked. A curator of a trusted node may go on, and clients
//! would refuse it for the rest of the day otherwise. If the credentials of the node itself are revoked, no certificate is
//! issued.
//!
//! The node's own certificate stays what the node shows as a client ([`certificate_renewal`][]).
//!
//! The clock of this node may be set while it runs, so the certificate is compared with it every few seconds. A new one
//! that is not valid by this clock is kept for an hour nevertheless: to a clock that is wrong by days, every certificate of
//! the leader has ended, and each further one would leave a record in etcd.
//!
//! [`certificate_renewal`]: crate::cluster::certificate_renewal

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use curator::bootstrap::issue_curator_from_local_etcd;
use curator_client::certificate::{MAX_PAUSE, Renewal, RenewalPoint, Serial, Validity, decide_renewal};
use curator_client::clock::Clock;
use curator_client::curator_role::identify_curator;
use curator_client::identity::Identity;
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::peer_identity::Revocations;
use curator_client::pki::TrustAnchor;
use curator_client::status_text::describe_status;
use curator_client::tls::certified_key;
use etcd::client::Client;
use etcd::key_space::{KeyError, REVOKED_CERTIFICATES};
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::time::Instant;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{CurrentCertificate, NodeFacts, node_id_of_key};
use crate::cluster::stored_authorities::{
    CertificateIssuer, ChangeLimit, authorities_or_anchor, find_certificate_issuer, stored_authorities,
};

/// How often the certificate is compared with the clock.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How often the record of a revocation is looked for, beside the watch.
const REVOCATION_LISTING: Duration = Duration::from_mins(1);

/// Decides about the renewal of a curator's certificate; `validity` is `None` if it cannot be read.
///
/// A certificate that is not valid yet is as useless as one that has ended: it was issued by a clock that was wrong.
#[must_use]
pub fn decide_curator_renewal(validity: Option<Validity>, now: Timestamp) -> Renewal {
    match validity {
        Some(validity) if validity.contains(now) => decide_renewal(validity, RenewalPoint::ThirdLeft, now),
        _ => Renewal::Expired,
    }
}

/// The certificate for the curator to start with: the stored one while it is good, or else one from this node's etcd.
pub async fn prepare_curator_certificate(
    files: &ClusterFiles,
    client: &Client,
    clock: &Clock,
) -> Result<CurrentCertificate, RunnableError> {
    let key = read_key(files)?;
    let credentials = files.read_credentials()?;
    let credentials = credentials.ok_or_else(|| RunnableError::msg("this node has no certificate"))?;
    // The error of a certificate that cannot be read.
    TrustAnchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
    let authorities = authorities_or_anchor(files)?.unwrap_or_default();
    let (own, now) = (node_id_of_key(&key), clock.now());
    let stored = files.read_curator_certificate().filter(|stored| is_good(stored, own, &authorities, now));
    if let Some(stored) = stored {
        return Ok(CurrentCertificate::new(certified_key(&stored, key.pkcs8())?));
    }
    let issued = issue_curator_from_local_etcd(client, PublicKey(key.public_key()), now).await?;
    let shown = CurrentCertificate::new(certified_key(&issued, key.pkcs8())?);
    store_certificate(files, &issued);
    Ok(shown)
}

/// Makes the runnable that renews the certificate in `shown`, which this node's curator shows.
#[must_use]
pub fn renew_curator_certificate(
    files: ClusterFiles,
    facts: NodeFacts,
    clock: Clock,
    client: Client,
    shown: CurrentCertificate,
) -> Runnable {
    // Outlives a failed run. The next run then fails before it is healthy, so that the pauses between runs grow.
    let is_revoked = Arc::new(AtomicBool::new(false));
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        let (client, shown, is_revoked) = (client.clone(), shown.clone(), is_revoked.clone());
        async move {
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let (mut healthy, mut changes) = (None, ChangeLimit::default());
            loop {
                let mut pause = CHECK_INTERVAL;
                let revoked = is_revoked.load(Ordering::Relaxed);
                if revoked || is_renewal_due(&files, &shown, &clock, changes) {
                    let key = read_key(&files)?;
                    let issuer = find_issuer(&files, &shown);
                    let issuing = issue_certificate(&files, &facts, &client, (&key, issuer), &clock);
                    let issued = scope.until_cancelled(issuing).await??;
                    shown.replace(certified_key(&issued, key.pkcs8())?);
                    is_revoked.store(false, Ordering::Relaxed);
                    store_certificate(&files, &issued);
                    changes.record(find_issuer(&files, &shown), Instant::now());
                    tracing::info!("the certificate of this node's curator was renewed");
                    pause = pause_after_renewal(validity_of(&shown), clock.now());
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
                }
                let _ = &healthy;
                let current = shown.current();
                let serial = current.cert.first().and_then(|shown| Serial::from_der(shown));
                let mut revocation = std::pin::pin!(wait_until_revoked(&client, serial));
                loop {
                    let waiting = tokio::time::timeout(pause, &mut revocation);
                    if let Ok(ended) = scope.until_cancelled(waiting).await? {
                        ended?;
                        tracing::warn!(
                            "the certificate of this node's curator was revoked, so it gets another one"
                        );
                        is_revoked.store(true, Ordering::Relaxed);
                        break;
                    }
                    if is_renewal_due(&files, &shown, &clock, changes) {
                        break;
                    }
                    pause = CHECK_INTERVAL;
                }
            }
        }
    })
}

/// Whether the certificate ends soon, or another authority signs now. `changes` limits the latter.
fn is_renewal_due(
    files: &ClusterFiles,
    shown: &CurrentCertificate,
    clock: &Clock,
    changes: ChangeLimit,
) -> bool {
    if decide_curator_renewal(validity_of(shown), clock.now()).is_due() {
        return true;
    }
    changes.permits(Instant::now()) && find_issuer(files, shown) != CertificateIssuer::Signer
}

/// Who signed the certificate that the curator shows.
fn find_issuer(files: &ClusterFiles, shown: &CurrentCertificate) -> CertificateIssuer {
    let current = shown.current();
    current
        .cert
        .first()
        .map_or(CertificateIssuer::Signer, |certificate| find_certificate_issuer(files, certificate))
}

/// The time until the next check after a renewal.
fn pause_after_renewal(validity: Option<Validity>, now: Timestamp) -> Duration {
    if validity.is_some_and(|validity| validity.contains(now)) { CHECK_INTERVAL } else { MAX_PAUSE }
}

fn validity_of(shown: &CurrentCertificate) -> Option<Validity> {
    shown.current().cert.first().and_then(|shown| Validity::from_der(shown))
}

/// Whether the stored certificate is that of this node's curator, and valid at `now`.
fn is_good(certificate: &[u8], own: NodeId, anchors: &[TrustAnchor], now: Timestamp) -> bool {
    identify_curator(&[certificate], anchors, &Revocations::default(), now) == Ok(own)
}

/// Waits until this node's etcd has the revocation of this serial number; for ever without a number.
async fn wait_until_revoked(client: &Client, serial: Option<Serial>) -> Result<(), KeyError> {
    let Some(serial) = serial else { return std::future::pending().await };
    let keys = KeySelector::One(REVOKED_CERTIFICATES.key(serial)?);
    // The record revokes it by existing; its content does not matter.
    let decode = |_: &str, _: &[u8]| Ok::<(), Infallible>(());
    let mut watcher = KeyWatcher::with_listing_interval(client, keys, REVOCATION_LISTING, decode);
    loop {
        if let Ok(KeyEvent::Put { .. }) = watcher.next_event().await {
            return Ok(());
        }
    }
}

fn read_key(files: &ClusterFiles) -> Result<Identity, RunnableError> {
    files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))
}

/// Stores the certificate. Without the file the curator gets another one at its next start, so a failure is logged.
fn store_certificate(files: &ClusterFiles, certificate: &[u8]) {
    if let Err(error) = files.write_curator_certificate(certificate) {
        tracing::warn!(%error, "the certificate of this node's curator was not stored");
    }
}

/// Gets a certificate from the leader, or else from this node's etcd.
async fn issue_certificate(
    files: &ClusterFiles,
    facts: &NodeFacts,
    client: &Client,
    (key, issuer): (&Identity, CertificateIssuer),
    clock: &Clock,
) -> Result<Vec<u8>, RunnableError> {
    // After a theft, no curator is followed until one of them shows a certificate of the new authority.
    if issuer == CertificateIssuer::Unknown {
        let issued = issue_curator_from_local_etcd(client, PublicKey(key.public_key()), clock.now()).await;
        let authorities = stored_authorities(files)?.unwrap_or_default();
        match issued {
            Ok(issued) if check_issued(&issued, node_id_of_key(key), &authorities).is_ok() => {
                return Ok(issued);
            }
            Ok(_) => tracing::info!("the etcd of this node has another authority than this node trusts"),
            Err(error) => {
                tracing::info!(%error, "the etcd of this node issued no certificate for its curator");
            }
        }
    }
    let refused = match request_certificate(files, facts).await {
        Ok(issued) => return Ok(issued),
        Err(reason) => reason,
    };
    tracing::info!(reason = %refused, "the leader issued no certificate for this node's curator; its own etcd does");
    let issued = issue_curator_from_local_etcd(client, PublicKey(key.public_key()), clock.now()).await;
    issued.map_err(|error| {
        RunnableError::msg(format!(
            "the certificate of this node's curator was not renewed, by the leader: {refused}; nor from this node's \
             etcd: {error}"
        ))
    })
}

/// Requests a certificate from the leader; the error is a sentence.
async fn request_certificate(files: &ClusterFiles, facts: &NodeFacts) -> Result<Vec<u8>, String> {
    let connection = facts.connection.latest().ok_or("this node is not connected to a leader yet")?;
    let mut nodes = NodesClient::new(connection.curators.channel());
    let answer = nodes.issue_curator_certificate(wire::IssueCuratorCertificateRequest {}).await;
    let certificate = answer.map_err(|status| describe_status(&status))?.into_inner().certificate;
    let authorities = stored_authorities(files).map_err(|error| error.to_string())?.unwrap_or_default();
    check_issued(&certificate, connection.id, &authorities)?;
    Ok(certificate)
}

/// Checks a certificate that the leader sent, before the curator shows it: clients would refuse another one until it
/// ends. The clock of this node may be wrong, so the certificate is checked at the time of its beginning.
fn check_issued(certificate: &[u8], own: NodeId, anchors: &[TrustAnchor]) -> Result<(), String> {
    let wrong =
        |why: String| format!("the leader sent a certificate that is none of this node's curator: {why}");
    let validity = Validity::from_der(certificate).ok_or_else(|| wrong("it cannot be read".to_owned()))?;
    match identify_curator(&[certificate], anchors, &Revocations::default(), validity.not_before) {
        Ok(id) if id == own => Ok(()),
        Ok(id) => Err(wrong(format!("it is that of node {id}"))),
        Err(error) => Err(wrong(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{at, authority, public, serial};
    use model::time::after;

    use super::*;

    #[test]
    fn certificate_is_renewed_at_a_third_and_issued_again_if_damaged() {
        let hour = Duration::from_hours(1);
        let validity = Validity { not_before: at(0), not_after: after(at(0), hour * 24) };
        for (validity, now, expected) in [
            (Some(validity), at(0), Renewal::NotBefore(after(at(0), hour * 16))),
            (Some(validity), after(at(0), hour * 15), Renewal::NotBefore(after(at(0), hour * 16))),
            (Some(validity), after(at(0), hour * 16), Renewal::Due),
            (Some(validity), after(at(0), hour * 24), Renewal::Due),
            (Some(validity), after(at(0), hour * 25), Renewal::Expired),
            // The clock that issued it was fast, or this one was set back.
            (Some(validity), at(-1), Renewal::Expired),
            (None, at(0), Renewal::Expired),
        ] {
            assert_eq!(decide_curator_renewal(validity, now), expected, "{now}");
        }
        for (now, expected) in [
            (at(0), CHECK_INTERVAL),
            (after(at(0), hour * 23), CHECK_INTERVAL),
            (after(at(0), hour * 25), MAX_PAUSE),
            (at(-1), MAX_PAUSE),
        ] {
            assert_eq!(pause_after_renewal(Some(validity), now), expected, "{now}");
        }
        assert_eq!(pause_after_renewal(None, at(0)), MAX_PAUSE);

        let (cluster, other) = (authority(1), authority(2));
        let own = NodeId::from_key(&public(7));
        let issue = |authority: &curator_client::pki::Authority, key| {
            authority.issue_curator_certificate(&public(key), serial(3), validity).unwrap().certificate
        };
        let mut damaged = issue(&cluster, 7);
        *damaged.last_mut().unwrap() ^= 1;
        let of_node = cluster.issue_node_certificate(&public(7), serial(3), validity).unwrap().certificate;
        let anchors = [cluster.anchor().clone()];
        for (what, certificate, second, expected) in [
            ("its own", issue(&cluster, 7), 0, true),
            ("its own, at its end", issue(&cluster, 7), 24 * 3600, true),
            ("one that has ended", issue(&cluster, 7), 24 * 3600 + 1, false),
            ("one of tomorrow", issue(&cluster, 7), -1, false),
            ("that of another curator", issue(&cluster, 8), 0, false),
            ("one of another cluster", issue(&other, 7), 0, false),
            ("that of the node", of_node, 0, false),
            ("a damaged one", damaged, 0, false),
            ("nothing", Vec::new(), 0, false),
        ] {
            assert_eq!(is_good(&certificate, own, &anchors, at(second)), expected, "{what}");
        }
    }

    #[test]
    fn certificate_of_the_leader_is_checked_before_it_is_shown() {
        let (cluster, other) = (authority(1), authority(2));
        let own = NodeId::from_key(&public(7));
        let validity = Validity { not_before: at(0), not_after: after(at(0), Duration::from_hours(24)) };
        let issue = |authority: &curator_client::pki::Authority, key| {
            authority.issue_curator_certificate(&public(key), serial(3), validity).unwrap().certificate
        };
        let anchors = [cluster.anchor().clone()];
        assert_eq!(check_issued(&issue(&cluster, 7), own, &anchors), Ok(()));
        let of_node = cluster.issue_node_certificate(&public(7), serial(3), validity).unwrap().certificate;
        for (what, certificate) in [
            ("that of the node", of_node),
            ("that of another curator", issue(&cluster, 8)),
            ("one of another cluster", issue(&other, 7)),
            ("nothing", Vec::new()),
        ] {
            let error = check_issued(&certificate, own, &anchors).unwrap_err();
            assert!(error.contains("is none of this node's curator"), "{what}: {error}");
        }
    }
}
