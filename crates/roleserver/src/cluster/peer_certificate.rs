//! Renew the certificate of this node's etcd member while etcd runs, and record the one that it uses.
//!
//! The certificate is valid for a month, and renewed when a third of that is left, ten days, or up to two and a half days
//! earlier: each node has its own place in that span. The leading curator issues another one, and its clock is then the one that counts. If no leader can be called, or if what it issues is not for this
//! member, the node issues the certificate from its own etcd. Both record the serial number before anybody may see the
//! certificate. Only the file of the certificate is replaced, atomically: the key stays, and etcd reads both for each
//! connection.
//!
//! This runs before etcd answers. A member that was off for longer than its certificate is rejected by the others until
//! the leader has issued another one. If all members were off for so long, none of them can: then the node reports that,
//! and the shepherd sends certificates by an order ([`peer_order`](super::peer_order)). Such a certificate is recorded as
//! soon as etcd has a quorum.
//!
//! It is renewed before its time if another authority of the cluster signs now, and if the member came back with another
//! address ([`member_address`](super::member_address)).
//!
//! # An update
//!
//! Releases that renewed nothing issued certificates that are valid as long as the authority. They stay until the
//! authority has made its first statement, because before that the cluster may go back to such a release, which would not
//! renew a short one. After that they are renewed like any others, at the next check.

use std::time::Duration;

use curator::bootstrap::{issue_peer_from_local_etcd, register_peer_certificate};
use curator_client::certificate::{
    CLOCK_SKEW, MAX_PAUSE, Renewal, RenewalPoint, Serial, Validity, decide_early_renewal,
};
use curator_client::node_id::NodeId;
use curator_client::pki::{PEER_LIFETIME, TrustAnchor};
use curator_client::renewal_spread::renewal_advance;
use curator_client::status_text::describe_status;
use etcd::client::Client;
use model::humanize::absolute_time;
use model::time::{Timestamp, between};
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::context::{Runnable, Starting};
use tokio::time::Instant;

use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_order::LocalPeer;
use crate::cluster::peer_revocation::is_pair_revoked;
use crate::cluster::stored_authorities::{CertificateIssuer, ChangeLimit, find_peer_issuer};

/// How often the certificate is compared with the clock, and with what is recorded.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Pause after a renewal that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(30);
/// How long the leader may take, including the time until one is known.
const LEADER_DEADLINE: Duration = Duration::from_mins(1);

/// Decides about the renewal of the certificate of this node's member; `validity` is `None` if it cannot be read.
///
/// `stated`: whether the authority has made its first statement. A certificate that is not valid yet is as useless as one
/// that has ended, and so is one that is revoked.
#[must_use]
pub fn decide_peer_renewal(
    validity: Option<Validity>,
    node: NodeId,
    revoked: bool,
    stated: bool,
    now: Timestamp,
) -> Renewal {
    match validity.filter(|validity| validity.contains(now) && !revoked) {
        None => Renewal::Expired,
        Some(validity) if !is_long(validity) => {
            decide_early_renewal(validity, RenewalPoint::ThirdLeft, renewal_advance(node, validity), now)
        }
        Some(_) if stated => Renewal::Due,
        Some(validity) => Renewal::NotBefore(validity.not_after),
    }
}

/// Whether a release that renews no certificate of a member issued this one.
fn is_long(validity: Validity) -> bool {
    between(validity.not_before, validity.not_after) > PEER_LIFETIME + 2 * CLOCK_SKEW
}

/// Makes the runnable that renews the certificate of this node's member of etcd, which `client` uses.
#[must_use]
pub(super) fn renew_peer_certificate(
    host: ControlPlaneContext,
    facts: NodeFacts,
    client: Client,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts, client) = (host.clone(), facts.clone(), client.clone());
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let (mut recorded, mut next_attempt, mut changes) =
                (None, Instant::now(), ChangeLimit::default());
            loop {
                // A node that is founding a cluster has no credentials, and its first certificate is a new one.
                if let Some(member) = LocalPeer::read(&host.files)? {
                    let (by_time, issuer) = (is_due(&host, &member)?, find_issuer(&host));
                    let due =
                        by_time || (issuer != CertificateIssuer::Signer && changes.permits(Instant::now()));
                    if due && Instant::now() >= next_attempt {
                        let renewing = renew(&host, &facts, &client, &member);
                        let renewed = scope.until_cancelled(renewing).await?;
                        next_attempt = Instant::now() + pause_after(&renewed);
                        if renewed.is_ok() {
                            changes.record(find_issuer(&host), Instant::now());
                        }
                        facts.problems.set(NodePart::PeerCertificate, renewed.err());
                    } else if !due {
                        facts.problems.set(NodePart::PeerCertificate, None);
                    }
                    let recording = record_present(&client, &host.files, &member, &mut recorded);
                    scope.until_cancelled(recording).await?;
                }
                scope.until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
            }
        }
    })
}

/// Who signed the certificate. One that cannot be read is renewed for that reason.
fn find_issuer(host: &ControlPlaneContext) -> CertificateIssuer {
    let present = etcd_member::read_peer_certificate(&host.files);
    present.map_or(CertificateIssuer::Signer, |present| find_peer_issuer(&host.files, &present))
}

/// Whether the certificate has to be renewed for another reason than its issuer.
fn is_due(host: &ControlPlaneContext, member: &LocalPeer) -> Result<bool, ClusterFilesError> {
    let present = etcd_member::read_peer_certificate(&host.files);
    let validity = present.as_ref().and_then(|present| Validity::from_der(present));
    // Only a long certificate depends on whether there is a statement.
    let stated = match validity {
        Some(validity) if is_long(validity) => has_statement(host)?,
        _ => true,
    };
    let is_misnamed = present.is_some_and(|present| !member.is_named_by(&present));
    let (node, revoked) = (NodeId::from_key(&member.key), is_pair_revoked(&host.files));
    Ok(is_misnamed || decide_peer_renewal(validity, node, revoked, stated, host.clock.now()).is_due())
}

fn has_statement(host: &ControlPlaneContext) -> Result<bool, ClusterFilesError> {
    let Some(credentials) = host.files.read_credentials()? else { return Ok(false) };
    let anchor = hex::decode(credentials.ca_certificate).ok();
    let anchor = anchor.and_then(|certificate| TrustAnchor::parse(&certificate).ok());
    match anchor.map(|anchor| host.files.read_statement(&anchor)).transpose() {
        Ok(statement) => Ok(statement.flatten().is_some()),
        // There was one.
        Err(ClusterFilesError::DamagedStatement { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Replaces the certificate. Returns whether the new one is valid by the clock of this node; the error is a sentence.
async fn renew(
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    client: &Client,
    member: &LocalPeer,
) -> Result<bool, String> {
    let present =
        etcd_member::read_peer_certificate(&host.files).and_then(|present| Validity::from_der(&present));
    let issued =
        issue(host, facts, client, member).await.map_err(|why| describe_failure(present, host, &why))?;
    let replaced = etcd_member::replace_peer_certificate(&host.files, &issued);
    replaced.map_err(|error| {
        format!("the new certificate of this node's etcd member was not written; it is tried again: {error}")
    })?;
    let serial = Serial::from_der(&issued).map(|serial| serial.to_string());
    tracing::info!(serial, "the certificate of this node's etcd member was renewed");
    Ok(member.check(&issued, host.clock.now()).is_ok())
}

/// The sentence about a certificate that was not renewed.
fn describe_failure(present: Option<Validity>, host: &ControlPlaneContext, why: &str) -> String {
    match present {
        Some(validity) if validity.has_ended(host.clock.now()) => format!(
            "the certificate of this node's etcd member has ended ({}), so the other members reject it: {why}. If those of \
             most members have ended, order others with: shepherdctl cluster renew-peers CLUSTER",
            absolute_time(validity.not_after)
        ),
        Some(validity) => format!(
            "the certificate of this node's etcd member is valid until {} and was not renewed: {why}",
            absolute_time(validity.not_after)
        ),
        None => format!(
            "this node's etcd member has no certificate that can be read, and got no other one: {why}"
        ),
    }
}

/// The time until the next attempt. To a clock that is wrong by weeks, every certificate has ended, and each further one
/// would leave a record in etcd.
const fn pause_after(renewed: &Result<bool, String>) -> Duration {
    match renewed {
        Ok(true) => CHECK_INTERVAL,
        Ok(false) => MAX_PAUSE,
        Err(_) => RETRY_PAUSE,
    }
}

/// Gets a certificate from the leader, or else from this node's etcd.
async fn issue(
    host: &ControlPlaneContext,
    facts: &NodeFacts,
    client: &Client,
    member: &LocalPeer,
) -> Result<Vec<u8>, String> {
    let requested = tokio::time::timeout(LEADER_DEADLINE, request_certificate(facts)).await;
    let refused = match requested.unwrap_or_else(|_| Err("it took too long".to_owned())) {
        Ok(issued) => match member.check_at_any_time(&issued) {
            Ok(()) => return Ok(issued),
            Err(reason) => reason,
        },
        Err(reason) => reason,
    };
    tracing::info!(reason = %refused, "the leader issued no certificate for this node's etcd member; its own etcd does");
    let issuing = issue_peer_from_local_etcd(client, member.key, member.address, host.clock.now());
    issuing.await.map_err(|error| format!("by the leader: {refused}; from the etcd of this node: {error}"))
}

/// Requests a certificate from the leader; the error is a sentence.
async fn request_certificate(facts: &NodeFacts) -> Result<Vec<u8>, String> {
    let connection = facts.connection.latest().ok_or("this node is not connected to a leader yet")?;
    let mut nodes = NodesClient::new(connection.curators.channel());
    let answer = nodes.issue_peer_certificate(wire::IssuePeerCertificateRequest {}).await;
    Ok(answer.map_err(|status| describe_status(&status))?.into_inner().certificate)
}

/// Records the present certificate, unless that is done. `recorded` is the serial number that is recorded. Without a quorum
/// the next check tries it again.
async fn record_present(
    client: &Client,
    files: &ClusterFiles,
    member: &LocalPeer,
    recorded: &mut Option<Serial>,
) {
    let Some(present) = etcd_member::read_peer_certificate(files) else { return };
    let serial = Serial::from_der(&present);
    if serial.is_none() || serial == *recorded || member.check_at_any_time(&present).is_err() {
        return;
    }
    let recording = async {
        let number = client.status().await.map_err(|error| error.to_string())?.member_id;
        let registering = register_peer_certificate(client, member.key, &present, number);
        registering.await.map_err(|error| error.to_string())
    };
    match recording.await {
        Ok(()) => *recorded = serial,
        Err(reason) => {
            tracing::debug!(reason, "the certificate of this node's etcd member is not recorded yet");
        }
    }
}

#[cfg(test)]
mod tests {
    use curator_client::node_id::PublicKey;
    use curator_client::pki::AUTHORITY_LIFETIME;
    use curator_client::testing::at;
    use model::time::after;

    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    /// A node with an id that begins with this byte, four times.
    fn node(byte: u8) -> NodeId {
        NodeId::from_key(&PublicKey([byte; 32]))
    }

    #[test]
    fn certificate_is_renewed_at_a_third_and_a_long_one_after_the_first_statement() {
        let month = Validity { not_before: at(0), not_after: after(at(0), DAY * 30) };
        let long = Validity { not_before: at(0), not_after: after(at(0), AUTHORITY_LIFETIME) };
        let third = after(at(0), DAY * 20);
        for (what, validity, revoked, stated, now, expected) in [
            ("a new one", Some(month), false, true, at(0), Renewal::NotBefore(third)),
            ("a third is left", Some(month), false, true, third, Renewal::Due),
            ("before the statement, too", Some(month), false, false, third, Renewal::Due),
            ("it has ended", Some(month), false, true, after(at(0), DAY * 31), Renewal::Expired),
            ("it has not begun", Some(month), false, true, at(-1), Renewal::Expired),
            ("it is revoked", Some(month), true, true, at(0), Renewal::Expired),
            ("it is damaged", None, false, true, at(0), Renewal::Expired),
            ("a long one", Some(long), false, false, third, Renewal::NotBefore(long.not_after)),
            ("a long one, after the statement", Some(long), false, true, at(0), Renewal::Due),
            ("a long one that is revoked", Some(long), true, false, at(0), Renewal::Expired),
        ] {
            assert_eq!(decide_peer_renewal(validity, node(0), revoked, stated, now), expected, "{what}");
        }
        // Members that were founded together renew at different times.
        for (byte, hours) in [(0, 480), (0x40, 465), (0x80, 450), (0xc0, 435)] {
            let due = |hours| {
                let now = after(at(0), Duration::from_hours(hours));
                decide_peer_renewal(Some(month), node(byte), false, true, now).is_due()
            };
            assert!(due(hours) && !due(hours - 1), "{byte}");
        }
        // What this release issues is not a long one, although it begins before it is issued.
        assert!(!is_long(Validity::starting(at(0), PEER_LIFETIME)));
    }

    #[test]
    fn failed_renewal_is_repeated_soon_and_one_by_a_wrong_clock_late() {
        for (renewed, expected) in
            [(Ok(true), CHECK_INTERVAL), (Ok(false), MAX_PAUSE), (Err("no leader".to_owned()), RETRY_PAUSE)]
        {
            assert_eq!(pause_after(&renewed), expected, "{renewed:?}");
        }
    }
}
