//! Renew the node's certificate in time, or by key or from etcd once it has expired.
//!
//! Renewal is due when a third of the validity is left, or a little earlier: each node has its own place in a span of two and
//! a half days. A failed renewal is repeated with growing pauses; ten days are left for that. It is also due when another
//! authority of the cluster signs now. Curators accept the certificate of the former one meanwhile, so nodes without a control
//! plane spread these renewals over half a minute. A node that was off or cut off for
//! longer has an expired certificate, or one by an authority that was replaced meanwhile, and curators reject both. It then
//! requests a new one from the curator with its key alone. A node that runs
//! etcd issues the certificate from its own etcd instead, because all curators may have expired certificates, and no
//! client accepts a curator with an expired certificate.
//!
//! To a clock that is fast by weeks, each new certificate has expired, too. Such a one is kept for an hour, because each
//! further one would leave a record in etcd.

use std::time::Duration;

use curator::bootstrap::renew_from_local_etcd;
use curator_client::certificate::{MAX_PAUSE, Renewal, RenewalPoint, Validity, decide_early_renewal};
use curator_client::clock::Clock;
use curator_client::identity::Identity;
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::renewal_spread::{place_of, renewal_advance};
use curator_client::status_text::describe_status;
use curator_client::tls::certified_key;
use etcd::client::Client;
use etcd::namespace::Namespace;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::registration_client::RegistrationClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::time::Instant;

use crate::cluster::control_plane::CURATOR_NAMESPACE;
use crate::cluster::etcd_member;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{CuratorConnection, CurrentCertificate, NodeFacts, curator_channel};
use crate::cluster::stored_authorities::{CertificateIssuer, ChangeLimit, find_certificate_issuer};

/// How often the authority that signed the certificate is compared with the newest statement.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time over which nodes renew because another authority signs. The replacement waits for all of them, and the leader issues
/// one certificate after the other: of a thousand nodes, about thirty come per second.
const CHANGE_SPREAD: Duration = Duration::from_secs(30);

/// What to do about the expiry of the node's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalAction {
    /// Do nothing for this long, at most an hour.
    Wait(Duration),
    /// Request a certificate from the curator, authenticated by the current one.
    RequestFromCurator,
    /// Request a certificate from the curator, authenticated by the key alone.
    RequestByKey,
    /// Issue a certificate from this node's etcd; if that fails, request one with the key alone.
    IssueFromEtcd,
}

/// Decides what to do. `control_plane` is whether etcd and the curator run on this node.
#[must_use]
pub fn decide_renewal_action(
    validity: Validity,
    node: NodeId,
    now: Timestamp,
    control_plane: bool,
) -> RenewalAction {
    let advance = renewal_advance(node, validity);
    let renewal = decide_early_renewal(validity, RenewalPoint::ThirdLeft, advance, now);
    match renewal {
        Renewal::NotBefore(_) => RenewalAction::Wait(renewal.pause(now)),
        Renewal::Due => RenewalAction::RequestFromCurator,
        Renewal::Expired if control_plane => RenewalAction::IssueFromEtcd,
        Renewal::Expired => RenewalAction::RequestByKey,
    }
}

/// How long a node waits after another authority has begun to sign, until it renews the certificate for that reason. The
/// certificates of a control plane are few, and the replacement restarts its etcd next.
#[must_use]
pub fn change_delay(node: NodeId, control_plane: bool) -> Duration {
    if control_plane { Duration::ZERO } else { place_of(node, CHANGE_SPREAD) }
}

/// Adapts what to do about the expiry to the authority that signed the certificate.
///
/// `may_change`: whether another authority is a reason for a renewal at this moment.
#[must_use]
pub fn adapt_to_issuer(
    action: RenewalAction,
    issuer: CertificateIssuer,
    control_plane: bool,
    may_change: bool,
) -> RenewalAction {
    match (action, issuer) {
        (RenewalAction::Wait(_), CertificateIssuer::Other) if may_change => RenewalAction::RequestFromCurator,
        // Curators reject the certificate.
        (RenewalAction::Wait(_) | RenewalAction::RequestFromCurator, CertificateIssuer::Unknown)
            if may_change =>
        {
            if control_plane {
                RenewalAction::IssueFromEtcd
            } else {
                RenewalAction::RequestByKey
            }
        }
        (RenewalAction::RequestFromCurator, CertificateIssuer::Unknown) => {
            RenewalAction::Wait(CHECK_INTERVAL)
        }
        (RenewalAction::Wait(pause), CertificateIssuer::Other | CertificateIssuer::Unknown) => {
            RenewalAction::Wait(pause.min(CHECK_INTERVAL))
        }
        (action, _) => action,
    }
}

/// Makes the runnable that renews this node's certificate for as long as it runs.
#[must_use]
pub fn renew_certificate(files: ClusterFiles, facts: NodeFacts, clock: Clock) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut starting = Some(starting);
            let (mut healthy, mut changes) = (None, ChangeLimit::default());
            // Since when the certificate is by another authority, and accepted.
            let mut changed_at: Option<Instant> = None;
            loop {
                let shown = connection.certificate.current();
                let validity = shown.cert.first().and_then(|certificate| Validity::from_der(certificate));
                let validity =
                    validity.ok_or_else(|| RunnableError::msg("this node's certificate cannot be read"))?;
                let control_plane = facts.control_plane.latest().flatten().is_some();
                let action = decide_renewal_action(validity, connection.id, clock.now(), control_plane);
                let (issuer, now) = (find_issuer(&files, &connection), Instant::now());
                changed_at = (issuer == CertificateIssuer::Other).then(|| changed_at.unwrap_or(now));
                let delay = change_delay(connection.id, control_plane);
                let may_change =
                    changes.permits(now) && changed_at.is_none_or(|at| now.duration_since(at) >= delay);
                let result = match adapt_to_issuer(action, issuer, control_plane, may_change) {
                    RenewalAction::Wait(pause) => {
                        if let Some(starting) = starting.take() {
                            healthy = Some(starting.mark_healthy());
                        }
                        let _ = &healthy;
                        scope.until_cancelled(wait_for_change(&files, &connection, pause)).await?;
                        continue;
                    }
                    RenewalAction::RequestFromCurator => {
                        scope.until_cancelled(request_certificate(&connection)).await?
                    }
                    RenewalAction::RequestByKey => {
                        scope.until_cancelled(request_by_key(&files, &connection, &clock)).await?
                    }
                    RenewalAction::IssueFromEtcd => {
                        match scope.until_cancelled(issue_from_etcd(&files, &clock)).await? {
                            Ok(certificate) => Ok(certificate),
                            // The node may have been removed from etcd without knowing it: it learns nothing without a
                            // valid certificate.
                            Err(error) => {
                                tracing::info!(%error, "this node's certificate was not renewed from its own etcd");
                                scope.until_cancelled(request_by_key(&files, &connection, &clock)).await?
                            }
                        }
                    }
                };
                let certificate = result?;
                connection.replace_certificate(&files, &node_key(&files)?, &certificate)?;
                if issuer == CertificateIssuer::Unknown {
                    // Curators answer on the open connections, and take this node for a stranger.
                    connection.curators.reconnect();
                }
                changes.record(find_issuer(&files, &connection), Instant::now());
                tracing::info!("the certificate of this node was renewed");
                let pause = pause_after_renewal(Validity::from_der(&certificate), clock.now());
                scope.until_cancelled(tokio::time::sleep(pause)).await?;
            }
        }
    })
}

/// The time until the next check after a renewal.
fn pause_after_renewal(validity: Option<Validity>, now: Timestamp) -> Duration {
    if validity.is_some_and(|validity| validity.has_ended(now)) { MAX_PAUSE } else { Duration::ZERO }
}

/// Waits for this long, or until another authority signs than the one that signed the certificate.
async fn wait_for_change(files: &ClusterFiles, connection: &CuratorConnection, pause: Duration) {
    let end = Instant::now() + pause;
    while Instant::now() < end {
        tokio::time::sleep_until(end.min(Instant::now() + CHECK_INTERVAL)).await;
        if find_issuer(files, connection) != CertificateIssuer::Signer {
            break;
        }
    }
}

/// Who signed the certificate that this node shows.
fn find_issuer(files: &ClusterFiles, connection: &CuratorConnection) -> CertificateIssuer {
    let shown = connection.certificate.current();
    shown
        .cert
        .first()
        .map_or(CertificateIssuer::Signer, |certificate| find_certificate_issuer(files, certificate))
}

fn node_key(files: &ClusterFiles) -> Result<Identity, RunnableError> {
    files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))
}

fn status_error(status: &tonic::Status) -> RunnableError {
    RunnableError::msg(format!("the certificate of this node was not renewed: {}", describe_status(status)))
}

async fn request_certificate(connection: &CuratorConnection) -> Result<Vec<u8>, RunnableError> {
    let mut nodes = NodesClient::new(connection.curators.channel());
    let answer = nodes.renew_certificate(wire::RenewCertificateRequest {}).await;
    Ok(answer.map_err(|status| status_error(&status))?.into_inner().certificate)
}

async fn request_by_key(
    files: &ClusterFiles,
    connection: &CuratorConnection,
    clock: &Clock,
) -> Result<Vec<u8>, RunnableError> {
    let key = node_key(files)?;
    let shown = CurrentCertificate::new(certified_key(key.certificate_der(), key.pkcs8())?);
    let leaders = curator_channel(&connection.authority(), &shown, files, clock)?;
    leaders.set_directory(connection.curators.directory());
    let mut registration = RegistrationClient::new(leaders.channel());
    let answer = tokio::select! {
        answer = registration.join(wire::JoinRequest {}) => answer.map_err(|status| status_error(&status))?,
        never = leaders.track_leader() => match never {},
    };
    let membership = answer.into_inner().membership;
    let membership = membership.ok_or_else(|| {
        RunnableError::msg("the curator answered the request to rejoin without a membership")
    })?;
    Ok(membership.certificate)
}

async fn issue_from_etcd(files: &ClusterFiles, clock: &Clock) -> Result<Vec<u8>, RunnableError> {
    let client = Client::new(vec![etcd_member::client_endpoint(files)], Namespace::new(CURATOR_NAMESPACE)?);
    Ok(renew_from_local_etcd(&client, PublicKey(node_key(files)?.public_key()), clock.now()).await?)
}

#[cfg(test)]
mod tests {
    use model::time::after;

    use super::*;

    /// A node with an id that begins with this byte, four times.
    fn node(byte: u8) -> NodeId {
        NodeId::from_key(&PublicKey([byte; 32]))
    }

    #[test]
    fn nodes_renew_one_after_the_other_once_another_authority_signs() {
        for (byte, control_plane, least, most) in
            [(0, false, 0, 0), (0x80, false, 15, 16), (0xff, false, 29, 30), (0x80, true, 0, 0)]
        {
            let delay = change_delay(node(byte), control_plane);
            let expected = Duration::from_secs(least)..=Duration::from_secs(most);
            assert!(expected.contains(&delay), "{byte} {control_plane}: {delay:?}");
        }
    }

    #[test]
    fn expired_certificate_is_renewed_by_key_or_from_etcd() {
        let from = Timestamp::from_timestamp(1_900_000_000, 0).unwrap();
        let day = Duration::from_hours(24);
        let validity = Validity { not_before: from, not_after: after(from, day * 30) };
        let (first, last) = (node(0), node(0xff));
        for (days, control_plane, expected) in [
            (0, false, RenewalAction::Wait(MAX_PAUSE)),
            (0, true, RenewalAction::Wait(MAX_PAUSE)),
            (17, false, RenewalAction::Wait(MAX_PAUSE)),
            (20, false, RenewalAction::RequestFromCurator),
            (30, true, RenewalAction::RequestFromCurator),
            (31, false, RenewalAction::RequestByKey),
            (31, true, RenewalAction::IssueFromEtcd),
        ] {
            assert_eq!(
                decide_renewal_action(validity, first, after(from, day * days), control_plane),
                expected,
                "after {days} days"
            );
        }
        for (days, pause) in [(0, Duration::ZERO), (30, Duration::ZERO), (31, MAX_PAUSE)] {
            assert_eq!(
                pause_after_renewal(Some(validity), after(from, day * days)),
                pause,
                "to a clock that is {days} days ahead"
            );
        }
        let long = Duration::from_mins(30);
        let (other, unknown) = (CertificateIssuer::Other, CertificateIssuer::Unknown);
        for (action, issuer, control_plane, may_change, expected) in [
            (RenewalAction::Wait(long), CertificateIssuer::Signer, false, true, RenewalAction::Wait(long)),
            (RenewalAction::Wait(long), other, false, true, RenewalAction::RequestFromCurator),
            (RenewalAction::Wait(long), other, true, true, RenewalAction::RequestFromCurator),
            (RenewalAction::Wait(long), other, false, false, RenewalAction::Wait(CHECK_INTERVAL)),
            (RenewalAction::RequestFromCurator, other, false, false, RenewalAction::RequestFromCurator),
            // It was off while the authority was replaced.
            (RenewalAction::Wait(long), unknown, false, true, RenewalAction::RequestByKey),
            (RenewalAction::RequestFromCurator, unknown, false, true, RenewalAction::RequestByKey),
            (RenewalAction::Wait(long), unknown, true, true, RenewalAction::IssueFromEtcd),
            (RenewalAction::RequestFromCurator, unknown, false, false, RenewalAction::Wait(CHECK_INTERVAL)),
            (RenewalAction::Wait(long), unknown, true, false, RenewalAction::Wait(CHECK_INTERVAL)),
            (RenewalAction::RequestByKey, other, false, false, RenewalAction::RequestByKey),
            (RenewalAction::IssueFromEtcd, unknown, true, false, RenewalAction::IssueFromEtcd),
        ] {
            let adapted = adapt_to_issuer(action, issuer, control_plane, may_change);
            assert_eq!(adapted, expected, "{action:?} {issuer:?} {control_plane} {may_change}");
        }
        let soon = model::time::before(after(from, day * 20), Duration::from_millis(5));
        let last_second = RenewalAction::Wait(Duration::from_secs(1));
        assert_eq!(decide_renewal_action(validity, first, soon, false), last_second);
        // The last node of a cluster renews two and a half days before the first one.
        for (hours, expected) in
            [(419, RenewalAction::Wait(MAX_PAUSE)), (421, RenewalAction::RequestFromCurator)]
        {
            let now = after(from, Duration::from_hours(hours));
            assert_eq!(decide_renewal_action(validity, last, now, false), expected, "after {hours} hours");
        }
    }
}
