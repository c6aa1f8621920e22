//! Becoming a node, or coming back as one.
//!
//! What to do follows from what is on the disk alone, so that a node which was cut off anywhere goes on from there: one
//! that has a certificate is a node, and comes back; one that was asked to found founds, from the start or from the
//! middle; one that was asked to join asks for it again. What passes is tried again in here; what does not ends this
//! runnable with a sentence, and it is tried again after its back-off, because a person may have mended it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Status};
use uuid::Uuid;

use crate::curator::bootstrap::{Founding, new_authority};
use crate::curator::clock::Clock;
use crate::curator::identity::Identity;
use crate::curator::pki::{Authority, Renewal, Validity, renewal};
use crate::curator::restore::Restoring;
use crate::curator::snapshot::{Snapshot, digest_of};
use crate::curator::tls::certified;
use crate::model::declaration::Sha256;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::commit_response::Result as Committed;
use crate::proto::curator::v1::registration_client::RegistrationClient;
use crate::roleserver::cluster::asked::follow_from_now_on;
use crate::roleserver::cluster::facts::{Connection, Facts, Shown, ToFound, id_of, way};
use crate::roleserver::cluster::files::{Credentials, Files, KeptAuthority};
use crate::roleserver::cluster::order::{Order, What, parse_anchor, parse_key, parse_snapshot, parse_ticket};
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;

/// Between two questions where a curator said no time.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing was asked.
    Wait,
    /// Found a cluster, or go on founding it.
    Found,
    /// Ask to be a node, or ask again.
    Join,
    /// It is a node: come back.
    ComeBack {
        /// Whether its certificate is over; it has to have another one before it is taken for what it is.
        expired: bool,
    },
}

/// What is on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Something was asked: to found (`true`) or to join.
    pub to_found: Option<bool>,
    /// There is a certificate, and this is to be done about its end.
    pub certificate: Option<Renewal>,
}

/// Decides what is to be done.
#[must_use]
pub fn decide(kept: &Kept) -> Step {
    match (kept.certificate, kept.to_found) {
        (Some(renewal), _) => Step::ComeBack { expired: renewal == Renewal::Expired },
        (None, Some(true)) => Step::Found,
        (None, Some(false)) => Step::Join,
        (None, None) => Step::Wait,
    }
}

/// The runnable.
#[must_use]
pub fn enrolment(files: Files, facts: Facts, clock: Clock, shepherds: Shepherds) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
        let shepherds = shepherds.clone();
        async move {
            let scope = starting.scope().clone();
            let trouble = facts.trouble.clone();
            let doing = Doing { files, facts, clock, shepherds, scope: scope.clone() };
            let done = loop {
                match Box::pin(doing.what_was_asked()).await {
                    Ok(Done::AskedAnew) => {}
                    Ok(Done::Whole) => break Ok(()),
                    Err(stop) => break Err(stop),
                }
            };
            // Whoever asked is told, and not only the log of this machine.
            if !scope.token().is_cancelled() {
                trouble.set(done.as_ref().err().map(ToString::to_string));
            }
            done?;
            // Not before: what is refused again and again is asked ever more rarely.
            let healthy = starting.healthy();
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

struct Doing {
    files: Files,
    facts: Facts,
    clock: Clock,
    shepherds: Shepherds,
    scope: Scope,
}

/// What became of it.
enum Done {
    /// It is what it was asked to be.
    Whole,
    /// Something else is asked by now: what was begun is left as it is, and that is done.
    AskedAnew,
}

impl Doing {
    async fn what_was_asked(&self) -> Result<Done, Stop> {
        let order = self.files.order()?;
        if let Some(order) = &order {
            order
                .check()
                .map_err(|error| Stop::because(format!("the order to this node cannot be: {error}")))?;
        }
        let credentials = self.files.credentials()?;
        let validity = credentials
            .as_ref()
            .and_then(|kept| Validity::read(&hex::decode(&kept.certificate).unwrap_or_default()));
        let kept = Kept {
            to_found: order.as_ref().and_then(|order| match order.what {
                What::Found { .. } => Some(true),
                What::Join { .. } => Some(false),
                What::Leave {} => None,
            }),
            certificate: validity.map(|validity| renewal(validity, self.clock.now())),
        };
        let step = decide(&kept);
        tracing::info!(?step, "this node's part in a cluster");
        match (step, order, credentials) {
            (Step::ComeBack { .. }, order, Some(credentials)) => {
                // One that was put there by hand as well.
                if let Some(order) = &order {
                    follow_from_now_on(order, &self.files, &self.facts).map_err(Stop::because)?;
                }
                self.come_back(order.as_ref(), &credentials).map(|()| Done::Whole)
            }
            (Step::Found, Some(order), _) => self.found(&order).await.map(|()| Done::Whole),
            (Step::Join, Some(order), _) => Box::pin(self.join(&order)).await,
            // Whoever asked has taken it back.
            _ => Err(Stop::because("nothing is asked of this machine any more")),
        }
    }

    async fn found(&self, order: &Order) -> Result<(), Stop> {
        let What::Found { cluster, name, owner_keys, snapshot, epoch } = &order.what else { return Ok(()) };
        self.files.raise_epoch(*cluster, *epoch)?;
        let key = self.files.key_or_new()?;
        let restoring = match snapshot {
            Some(known_by) => Some(self.restoring(*cluster, parse_snapshot(known_by)?, *epoch).await?),
            None => None,
        };
        let kept = if let Some(kept) = self.files.authority()? {
            kept
        } else {
            let made = match &restoring {
                Some(restoring) => restoring.snapshot.what_there_is_one_of()?.1,
                None => new_authority(*cluster, self.clock.now())?,
            };
            let kept = KeptAuthority {
                certificate: hex::encode(&made.anchor().certificate),
                private_key: hex::encode(made.pkcs8()),
            };
            self.files.write_authority(&kept)?;
            kept
        };
        let authority = Authority::load(&hex::decode(&kept.certificate)?, &hex::decode(&kept.private_key)?)?;
        let address = address_of(order, [])?;
        let founding = Founding {
            authority: Arc::new(authority),
            name: name.clone(),
            owner_keys: owner_keys.iter().map(|key| parse_key(key)).collect::<Result<_, _>>()?,
            node_key: crate::curator::node_id::PublicKey(key.public_key()),
            machine: order.machine,
            labels: order.labels.clone(),
            address: Some(address),
            restoring,
        };
        self.facts.address.set(address);
        self.facts.to_found.set(Some(ToFound { founding: Arc::new(founding), address }));
        Ok(())
    }

    /// What the cluster is brought back from: fetched from a shepherd, unless it is here. What is here in part, or is
    /// something else, is brought to its end, or fetched anew.
    async fn restoring(&self, cluster: Uuid, known_by: Sha256, epoch: u64) -> Result<Restoring, Stop> {
        let path = self.files.snapshot();
        for _ in 0..2 {
            let read = tokio::fs::read(&path).await;
            if let Some(encoded) = read.ok().filter(|encoded| digest_of(encoded) == known_by.0) {
                let snapshot = Snapshot::decode(&encoded)?;
                if snapshot.cluster != cluster || snapshot.epoch >= epoch {
                    return Err(Stop::because(format!(
                        "the snapshot is of epoch {} of cluster {}, and cannot become epoch {epoch} of cluster {cluster}",
                        snapshot.epoch, snapshot.cluster
                    )));
                }
                return Ok(Restoring { snapshot: Arc::new(snapshot), epoch });
            }
            let fetched = self.scope.until_cancelled(self.shepherds.fetch(known_by, &path)).await?;
            fetched.map_err(|error| Stop::because(format!("the snapshot is not here: {error}")))?;
            let fetched = tokio::fs::read(&path).await.unwrap_or_default();
            if digest_of(&fetched) != known_by.0 {
                self.files.remove_snapshot()?;
            }
        }
        Err(Stop::because(
            "what shepherds send is another snapshot than the one that the cluster is to be restored from",
        ))
    }

    async fn join(&self, order: &Order) -> Result<Done, Stop> {
        let What::Join { ticket, ca_certificate, curators, .. } = &order.what else { return Ok(Done::Whole) };
        let key = self.files.key_or_new()?;
        let anchor = parse_anchor(ca_certificate)?;
        let request = wire::RegisterRequest {
            ticket: parse_ticket(ticket)?.reveal().to_vec(),
            machine_id: order.machine.map(|machine| machine.to_string()).unwrap_or_default(),
            labels: order.labels.clone(),
        };
        let shown = Shown::new(certified(key.certificate_der(), key.pkcs8())?);
        let leaders = way(&anchor, &shown, &self.files, &self.clock)?;
        leaders.learn(curators.iter().cloned().chain(self.files.curators()));
        let registration = RegistrationClient::new(leaders.channel());
        let becoming = async {
            let registered = patiently("registering this node", || {
                let (mut registration, request) = (registration.clone(), request.clone());
                async move { registration.register(request).await }
            })
            .await?;
            if let Some(directory) = registered.directory {
                leaders.learn(directory.curators);
            }
            loop {
                let answer = patiently("becoming a node", || {
                    let mut registration = registration.clone();
                    async move { registration.commit(wire::CommitRequest {}).await }
                })
                .await?;
                match answer.result {
                    Some(Committed::Membership(membership)) => return Ok::<_, Stop>(membership),
                    Some(Committed::AwaitingApproval(waiting)) => {
                        tracing::info!(node = %id_of(&key), "this node waits to be approved");
                        tokio::time::sleep(Duration::from_millis(waiting.ask_again_after_ms).max(ASK_AGAIN))
                            .await;
                    }
                    None => return Err(Stop::because("the curator answered nothing to becoming a node")),
                }
            }
        };
        // The cluster may have been restored elsewhere meanwhile, and this machine told so.
        let becoming = async {
            tokio::select! {
                membership = becoming => membership.map(Some),
                anew = self.asked_anew(order) => anew.map(|()| None),
            }
        };
        match Box::pin(self.with(&leaders, becoming)).await?? {
            Some(membership) => self.take(order, &key, &membership).map(|()| Done::Whole),
            None => Ok(Done::AskedAnew),
        }
    }

    /// Waits until another order stands on the disk than this one.
    async fn asked_anew(&self, order: &Order) -> Result<(), Stop> {
        let mut ordered = self.facts.ordered.watch();
        while self.files.order()?.as_ref() == Some(order) {
            ordered.next().await;
        }
        Ok(())
    }

    fn come_back(&self, order: Option<&Order>, credentials: &Credentials) -> Result<(), Stop> {
        let key = self.files.key()?.ok_or_else(|| {
            Stop::because("this node has a certificate and no key: look for what removed node_key.pk8")
        })?;
        // What a founding that was cut off had left to remove.
        self.files.remove_authority()?;
        self.files.remove_snapshot()?;
        let connection = Connection::new(&key, credentials, &self.files, &self.clock)?;
        // Nothing is kept from a node whose certificate is over but what only a node may ask. Its own etcd and curator
        // run, and may be the very ones that give it another; `certificate.rs` sees to that.
        let address = address_of_node(order, &connection)?;
        self.facts.address.set(address);
        self.facts.connection.set(connection);
        Ok(())
    }

    /// Follows the leader while something is asked of it.
    async fn with<T>(
        &self,
        leaders: &crate::curator::leader_channel::Curators,
        asking: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        let asked = async {
            tokio::select! {
                answer = asking => answer,
                never = leaders.follow() => match never {},
            }
        };
        Ok(self.scope.until_cancelled(asked).await?)
    }

    /// Makes durable what a node needs to come back, and only then is one.
    fn take(&self, order: &Order, key: &Identity, membership: &wire::Membership) -> Result<(), Stop> {
        let anchor = match &order.what {
            What::Join { ca_certificate, .. } => parse_anchor(ca_certificate)?,
            What::Found { .. } | What::Leave {} => {
                return Err(Stop::because("only a node that joins is given a membership"));
            }
        };
        let credentials = self.keep(membership, &anchor.certificate)?;
        let connection = Connection::new(key, &credentials, &self.files, &self.clock)?;
        self.facts.address.set(address_of_node(Some(order), &connection)?);
        tracing::info!(node = %connection.id, "this machine is a node of cluster {}", connection.anchor.cluster);
        self.facts.connection.set(connection);
        Ok(())
    }

    fn keep(&self, membership: &wire::Membership, ca_certificate: &[u8]) -> Result<Credentials, Stop> {
        let curators = membership.directory.iter().flat_map(|directory| directory.curators.iter().cloned());
        let curators: std::collections::BTreeSet<String> = curators.chain(self.files.curators()).collect();
        self.files.write_curators(&curators)?;
        let credentials = Credentials {
            certificate: hex::encode(&membership.certificate),
            ca_certificate: hex::encode(ca_certificate),
        };
        self.files.write_credentials(&credentials)?;
        Ok(credentials)
    }
}

/// Makes a call until it is answered; ends with what does not pass by itself.
async fn patiently<T, Calling>(doing: &str, call: impl Fn() -> Calling) -> Result<T, Stop>
where
    Calling: Future<Output = Result<tonic::Response<T>, Status>>,
{
    loop {
        match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if passes(status.code()) => {
                tracing::info!(doing, said = status.message(), "the curator was not reached; trying again");
                tokio::time::sleep(ASK_AGAIN).await;
            }
            Err(status) => return Err(Stop::because(format!("{doing} was refused: {}", status.message()))),
        }
    }
}

/// Whether what ended with this may succeed without anybody doing anything about it.
const fn passes(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown | Code::Unimplemented
    )
}

/// Where other nodes reach this one: as the order says, or by the way to a curator.
fn address_of_node(order: Option<&Order>, connection: &Connection) -> Result<IpAddr, Stop> {
    let curators = connection.curators.known();
    match order {
        Some(order) => address_of(order, curators),
        None => found_out(curators),
    }
}

fn address_of(order: &Order, curators: impl IntoIterator<Item = String>) -> Result<IpAddr, Stop> {
    order.address.map_or_else(|| found_out(curators), Ok)
}

/// The address that the host would call from; no packet is sent for it.
fn found_out(curators: impl IntoIterator<Item = String>) -> Result<IpAddr, Stop> {
    use std::net::ToSocketAddrs as _;
    // An address for documentation, for the way to everywhere else: that of the default route.
    let elsewhere = SocketAddr::from(([192, 0, 2, 1], 7835));
    let towards = curators.into_iter().filter_map(|curator| curator.to_socket_addrs().ok()?.next());
    for remote in towards.chain([elsewhere]) {
        let any: SocketAddr = if remote.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let asked = std::net::UdpSocket::bind(any).and_then(|socket| {
            socket.connect(remote)?;
            socket.local_addr()
        });
        match asked {
            Ok(local) if !local.ip().is_loopback() && !local.ip().is_unspecified() => return Ok(local.ip()),
            _ => {}
        }
    }
    Err(Stop::because(
        "no address is known at which other nodes would reach this one: it has no route to a curator; say one in the order",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Timestamp;

    #[test]
    fn what_is_to_be_done_follows_from_what_is_on_the_disk() {
        let later = Renewal::NotBefore(Timestamp::MAX_UTC);
        for (to_found, certificate, expected) in [
            (None, None, Step::Wait),
            (Some(true), None, Step::Found),
            (Some(false), None, Step::Join),
            // Its certificate is durable last, so all before it was done, whatever was asked.
            (Some(true), Some(later), Step::ComeBack { expired: false }),
            (Some(false), Some(later), Step::ComeBack { expired: false }),
            (None, Some(later), Step::ComeBack { expired: false }),
            (None, Some(Renewal::Due), Step::ComeBack { expired: false }),
            (Some(true), Some(Renewal::Expired), Step::ComeBack { expired: true }),
        ] {
            assert_eq!(decide(&Kept { to_found, certificate }), expected, "{to_found:?} {certificate:?}");
        }
    }
}
