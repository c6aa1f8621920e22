//! Another certificate in time.
//!
//! It is asked for when a third of the time is left. Where that fails it is asked for again, ever more rarely, for the
//! ten days that are left then. One that is over all the same, because the node was off, or cut off, for that long, is
//! asked for with the key alone; and where this node runs etcd, it is made beside that, for all curators may be in the
//! same case, and nobody asks a curator whose own certificate is over.

use std::time::Duration;

use crate::curator::bootstrap::renew_beside_etcd;
use crate::curator::clock::Clock;
use crate::curator::identity::Identity;
use crate::curator::node_id::PublicKey;
use crate::curator::pki::{Renewal, Validity, renewal};
use crate::curator::tls::certified;
use crate::etcd::client::Client;
use crate::etcd::namespace::Namespace;
use crate::model::time::{Timestamp, between};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::proto::curator::v1::registration_client::RegistrationClient;
use crate::roleserver::cluster::control_plane::NAMESPACE;
use crate::roleserver::cluster::etcd;
use crate::roleserver::cluster::facts::{Connection, Facts, Shown, way};
use crate::roleserver::cluster::files::{Credentials, Files};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// The longest that is slept at once: the clock of the machine may be put right meanwhile.
const LONGEST_SLEEP: Duration = Duration::from_hours(1);

/// What is to be done about the end of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Nothing for so long.
    Wait(Duration),
    /// Ask the curator, as the node it says.
    Ask,
    /// Ask the curator, with the key alone.
    AskByKey,
    /// Make it beside etcd; and if that does not answer, ask with the key alone.
    BesideEtcd,
}

/// Decides what is to be done; `control_plane` is whether etcd runs here and answers.
#[must_use]
pub fn decide(validity: Validity, now: Timestamp, control_plane: bool) -> Doing {
    match renewal(validity, now) {
        Renewal::NotBefore(due) => {
            Doing::Wait(between(now, due).clamp(Duration::from_secs(1), LONGEST_SLEEP))
        }
        Renewal::Due => Doing::Ask,
        Renewal::Expired if control_plane => Doing::BesideEtcd,
        Renewal::Expired => Doing::AskByKey,
    }
}

/// The runnable.
#[must_use]
pub fn certificate(files: Files, facts: Facts, clock: Clock) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut starting = Some(starting);
            let mut healthy = None;
            loop {
                let shown = connection.shown.current();
                let validity = shown.cert.first().and_then(|certificate| Validity::read(certificate));
                let validity =
                    validity.ok_or_else(|| Stop::because("this node's certificate cannot be read"))?;
                let control_plane = facts.control_plane.latest().flatten().is_some();
                let asked = match decide(validity, clock.now(), control_plane) {
                    Doing::Wait(pause) => {
                        if let Some(starting) = starting.take() {
                            healthy = Some(starting.healthy());
                        }
                        let _ = &healthy;
                        scope.until_cancelled(tokio::time::sleep(pause)).await?;
                        continue;
                    }
                    Doing::Ask => scope.until_cancelled(ask(&connection)).await?,
                    Doing::AskByKey => scope.until_cancelled(ask_by_key(&files, &connection, &clock)).await?,
                    Doing::BesideEtcd => match scope.until_cancelled(beside_etcd(&files, &clock)).await? {
                        Ok(certificate) => Ok(certificate),
                        // It may be no member any more, and has not heard of it: nobody tells it without a certificate.
                        Err(error) => {
                            tracing::info!(%error, "this node got no other certificate from its own etcd");
                            scope.until_cancelled(ask_by_key(&files, &connection, &clock)).await?
                        }
                    },
                };
                let certificate = asked?;
                let key = key_of(&files)?;
                let next = certified(&certificate, key.pkcs8())?;
                files.write_credentials(&Credentials {
                    certificate: hex::encode(&certificate),
                    ca_certificate: hex::encode(&connection.anchor.certificate),
                })?;
                connection.shown.replace(next);
                tracing::info!("this node has another certificate");
            }
        }
    })
}

fn key_of(files: &Files) -> Result<Identity, Stop> {
    files.key()?.ok_or_else(|| Stop::because("this node has no key"))
}

fn refused(status: &tonic::Status) -> Stop {
    Stop::because(format!("this node got no other certificate: {}", status.message()))
}

async fn ask(connection: &Connection) -> Result<Vec<u8>, Stop> {
    let mut nodes = NodesClient::new(connection.curators.channel());
    let answer = nodes.renew_certificate(wire::RenewCertificateRequest {}).await;
    Ok(answer.map_err(|status| refused(&status))?.into_inner().certificate)
}

async fn ask_by_key(files: &Files, connection: &Connection, clock: &Clock) -> Result<Vec<u8>, Stop> {
    let key = key_of(files)?;
    let shown = Shown::new(certified(key.certificate_der(), key.pkcs8())?);
    let leaders = way(&connection.anchor, &shown, files, clock)?;
    leaders.learn(connection.curators.known());
    let mut registration = RegistrationClient::new(leaders.channel());
    let answer = tokio::select! {
        answer = registration.join(wire::JoinRequest {}) => answer.map_err(|status| refused(&status))?,
        never = leaders.follow() => match never {},
    };
    let membership = answer.into_inner().membership;
    let membership =
        membership.ok_or_else(|| Stop::because("the curator answered nothing to coming back"))?;
    Ok(membership.certificate)
}

async fn beside_etcd(files: &Files, clock: &Clock) -> Result<Vec<u8>, Stop> {
    let client = Client::new(vec![etcd::endpoint(files)], Namespace::new(NAMESPACE)?);
    Ok(renew_beside_etcd(&client, PublicKey(key_of(files)?.public_key()), clock.now()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::after;

    #[test]
    fn certificate_that_is_over_is_asked_for_by_the_key_or_made_beside_etcd() {
        let from = Timestamp::from_timestamp(1_900_000_000, 0).unwrap();
        let day = Duration::from_hours(24);
        let validity = Validity { from, until: after(from, day * 30) };
        for (days, control_plane, expected) in [
            (0, false, Doing::Wait(LONGEST_SLEEP)),
            (0, true, Doing::Wait(LONGEST_SLEEP)),
            (20, false, Doing::Ask),
            (30, true, Doing::Ask),
            (31, false, Doing::AskByKey),
            (31, true, Doing::BesideEtcd),
        ] {
            assert_eq!(
                decide(validity, after(from, day * days), control_plane),
                expected,
                "after {days} days"
            );
        }
        let soon = crate::model::time::before(after(from, day * 20), Duration::from_millis(5));
        assert_eq!(decide(validity, soon, false), Doing::Wait(Duration::from_secs(1)));
    }
}
