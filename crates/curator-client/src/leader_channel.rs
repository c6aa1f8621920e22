//! Leader discovery: one gRPC channel that always goes to the leading curator.
//!
//! All calls go to the leader, and the leader changes. So no caller keeps an address. All callers on a node share one
//! channel. Behind it a task queries the curators it knows for the leader, follows the answer, and directs every new
//! call to that curator. While no leader is known, a call waits, for 30 s at the most. A call that was under way when a
//! leader stopped fails, and its caller repeats it.
//!
//! The leader proves by its certificate to be the node that was named as leader; the answer of a curator that does not
//! lead is only a hint. A node that runs a curator itself knows it under a local address (the loopback), which does not
//! change with the node's address.
//!
//! Of two clusters with the same id, the valid one is the one that was restored later. It is recognised by its epoch,
//! which every curator reports. The highest epoch received is stored before it is followed. A curator that reports a
//! lower epoch is not followed, and open connections to such a leader are cut off. `restore.rs` of the crate `curator`
//! explains why that is enough. What proves an epoch is in [`known_epoch`](crate::known_epoch).
//!
//! # Statements
//!
//! The authority of a cluster states who is no curator any more ([`statement`](crate::statement)). Each curator is
//! requested for the newest statement before it is followed. All other curators are requested each minute, and soon after
//! another one is followed, at most twice a minute, also those that the leader does not report (`curator_addresses`). These
//! requests run beside the search for the leader as long as the tracker does, so a leader that ends its connections or
//! reports dead addresses does not delay or end them. A random part of 15 s spreads them over all nodes (`rounds`). An
//! address that is new in the directory is requested at once, so that its curator can prove itself before the leader
//! leaves it out. So a node that reaches one honest curator gets a new statement within two minutes
//! ([`REVOCATION_BOUND`]), however the leader behaves, and a node that reaches none follows nobody after a day.
//!
//! Before the first statement, every node of the cluster may answer as a curator, and the epoch is believed as it is
//! reported. The first statement lowers it to what is proved. From then on, only a curator's certificate that is not
//! revoked is followed, and only a statement raises the epoch: a higher one in a response is a reason to request the
//! statement. An order of the shepherd raises it, too ([`LeaderTracker::raise_epoch`]).
//!
//! After a theft of the authority's key, an order replaces the authority, the statement and the epoch at once
//! ([`LeaderTracker::adopt_authority`]).
//!
//! A statement that revokes something cuts off all open connections; they are made again, and checked by it. No connection
//! outlasts the certificate that the curator showed, because a statement lists no certificate that has ended.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use backoff::ExponentialBackoff;
use rustls::ClientConfig;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use tokio_util::sync::CancellationToken;

use crate::curator_addresses::CuratorAddresses;
use crate::curator_authentication::{CuratorAuthentication, REQUEST_LIMIT};
use crate::curator_channel::open_channel_until;
use crate::known_epoch::{EpochChange, KnownEpoch};
use crate::leader_channel::follow_error::{FollowError, outdated_error};
use crate::leader_channel::rounds::{ROUND_INTERVAL, ROUND_SPREAD, RoundSchedule};
use crate::node_id::NodeId;
use crate::statement::SignedStatement;
use crate::statement_trust::StatementTrust;

mod directory;
mod follow_error;
mod rounds;
mod statements;

/// Longest time from a revocation until a node follows the curator no more that reaches one of the others in each round.
/// The documents promise it. If another curator has to lead first, to sign the statement, half a minute passes before.
pub const REVOCATION_BOUND: Duration = Duration::from_mins(2);
/// Longest time until a client has a statement after a curator has it that answers each of its requests, however the followed
/// leader behaves.
///
/// The round before has just requested it. Then an interval with the longest random part passes. A request of addresses that
/// are new in the directory may be under way at its end, and the last request is that of the round itself.
pub const STATEMENT_ARRIVAL: Duration =
    ROUND_INTERVAL.saturating_add(ROUND_SPREAD).saturating_add(REQUEST_LIMIT).saturating_add(REQUEST_LIMIT);
/// How long a call waits until a leader is known.
const LEADER_WAIT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one curator may take to name the leader.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The delays before the curators are queried again, after rounds in which none led to the leader.
const QUERY_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(100), factor: 2.0, max: Duration::from_secs(5) };

/// TLS configuration for a curator: for this node alone, or with `None` for any curator of the cluster.
pub type TlsConfigProvider =
    Arc<dyn Fn(Option<NodeId>) -> Result<Arc<ClientConfig>, rustls::Error> + Send + Sync>;

/// Stores a change of the epoch, durably; the error is a sentence.
pub type PersistEpoch = Arc<dyn Fn(EpochChange) -> Result<(), String> + Send + Sync>;

/// The certificate that this side shows at the moment, if it has one.
pub type OwnCertificate = Arc<dyn Fn() -> Option<Arc<CertifiedKey>> + Send + Sync>;

/// The leading node and the address of its curator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderEndpoint {
    /// Id of the leading node.
    pub node: NodeId,
    /// `host:port` of its curator.
    pub address: String,
}

/// Tracks the curators of a cluster, and the leader among them. Clones share the same state.
#[derive(Clone)]
pub struct LeaderTracker(Arc<TrackerInner>);

struct TrackerInner {
    addresses: Mutex<CuratorAddresses>,
    address_changes: watch::Sender<u64>,
    leader: watch::Sender<Option<(LeaderEndpoint, Channel)>>,
    authentication: CuratorAuthentication,
    /// The epoch, and a token that cancels what belongs to it.
    epoch: watch::Sender<CurrentEpoch>,
    persist_epoch: PersistEpoch,
    /// The statement that open connections were checked by.
    enforced: Mutex<Option<Arc<SignedStatement>>>,
    refusal: watch::Sender<Option<String>>,
    /// Address of the curator that is followed.
    followed: watch::Sender<Option<String>>,
    /// How often open connections were cut off.
    cuts: watch::Sender<u64>,
    rounds: Mutex<RoundSchedule>,
    /// A random number from 0 to less than 1, which spreads rounds.
    random_part: fn() -> f64,
}

/// An epoch, and the token for connections to its leaders.
#[derive(Clone)]
struct CurrentEpoch {
    known: KnownEpoch,
    /// Cancelled when another epoch counts or a statement that revokes something is received: open connections are cut
    /// off.
    superseded: CancellationToken,
}

impl CurrentEpoch {
    fn new(known: KnownEpoch) -> Self {
        Self { known, superseded: CancellationToken::new() }
    }
}

impl LeaderTracker {
    /// A tracker that knows no curator yet. `configure` decides who may answer, and which identity this side shows.
    #[must_use]
    pub fn new(configure: TlsConfigProvider) -> Self {
        Self::with_epoch(configure, KnownEpoch::default(), Arc::new(|_| Ok(())))
    }

    /// Like [`LeaderTracker::new`], from a stored epoch. `keep_epoch` stores its changes.
    #[must_use]
    pub fn with_epoch(configure: TlsConfigProvider, epoch: KnownEpoch, keep_epoch: PersistEpoch) -> Self {
        let authentication = CuratorAuthentication::Configured(configure);
        Self::with_authentication(authentication, epoch, keep_epoch, rand::random)
    }

    /// A tracker that follows only curators which the newest statement of the cluster's authority permits. It requests
    /// statements and offers them to `trust`; before the first one it follows any node of the cluster.
    #[must_use]
    pub fn with_statements(
        trust: StatementTrust,
        own: OwnCertificate,
        epoch: KnownEpoch,
        keep_epoch: PersistEpoch,
    ) -> Self {
        let authentication = CuratorAuthentication::Statements { trust, own };
        Self::with_authentication(authentication, epoch, keep_epoch, rand::random)
    }

    fn with_authentication(
        authentication: CuratorAuthentication,
        epoch: KnownEpoch,
        persist_epoch: PersistEpoch,
        random_part: fn() -> f64,
    ) -> Self {
        let stored = authentication.trust().and_then(StatementTrust::current);
        Self(Arc::new(TrackerInner {
            addresses: Mutex::default(),
            address_changes: watch::Sender::new(0),
            leader: watch::Sender::new(None),
            authentication,
            epoch: watch::Sender::new(CurrentEpoch::new(epoch)),
            persist_epoch,
            enforced: Mutex::new(stored),
            refusal: watch::Sender::new(None),
            followed: watch::Sender::new(None),
            cuts: watch::Sender::new(0),
            rounds: Mutex::default(),
            random_part,
        }))
    }

    /// The epoch of the cluster as far as it is known.
    #[must_use]
    pub fn known_epoch(&self) -> KnownEpoch {
        self.0.epoch.borrow().known
    }

    /// The highest epoch of the cluster that was received.
    #[must_use]
    pub fn highest_epoch(&self) -> u64 {
        self.known_epoch().highest
    }

    /// Stores the epoch of an order if it is higher than what is proved, and then accepts it: no leader of a lower epoch is
    /// followed from then on.
    pub fn raise_epoch(&self, epoch: u64) -> Result<(), String> {
        self.change_epoch(EpochChange::Ordered(epoch))
    }

    /// Stores a change of the epoch, and then accepts it.
    fn change_epoch(&self, change: EpochChange) -> Result<(), String> {
        let known = self.known_epoch();
        if known.after(change) == known {
            return Ok(());
        }
        (self.0.persist_epoch)(change)?;
        self.0.epoch.send_if_modified(|current| {
            // Another task may have changed it meanwhile.
            let known = current.known.after(change);
            let is_changed = known != current.known;
            if known.highest == current.known.highest {
                current.known = known;
            } else {
                current.superseded.cancel();
                *current = CurrentEpoch::new(known);
            }
            is_changed
        });
        Ok(())
    }

    /// The channel to the leader. It works while [`LeaderTracker::track_leader`] runs.
    #[must_use]
    pub fn channel(&self) -> LeaderChannel {
        LeaderChannel { leader: self.0.leader.subscribe(), refusal: self.0.refusal.subscribe() }
    }

    /// Why no curator is followed although one answered, as a sentence: a stale statement, a missing role, a revocation or
    /// an epoch. `None` while a leader is followed.
    #[must_use]
    pub fn refusal(&self) -> watch::Receiver<Option<String>> {
        self.0.refusal.subscribe()
    }

    /// The leader, if it is known at the moment.
    #[must_use]
    pub fn leader(&self) -> Option<LeaderEndpoint> {
        self.0.leader.borrow().as_ref().map(|(leader, _)| leader.clone())
    }

    /// Finds the leader and follows changes of it and of the statement, until the future is dropped.
    pub async fn track_leader(&self) -> Infallible {
        // The former future may have been dropped while it followed a curator.
        self.set_followed(None);
        // On the heap, because every task that follows a leader contains it.
        let mut statements = Box::pin(self.watch_statements());
        tokio::select! {
            never = &mut statements => never,
            never = self.find_leaders() => never,
        }
    }

    async fn find_leaders(&self) -> Infallible {
        let mut learnt = self.0.address_changes.subscribe();
        let (mut last, mut failures, mut since) = (None::<String>, 0_u32, Instant::now());
        loop {
            failures = failures.saturating_add(1);
            let mut candidates = self.0.addresses().candidates(last.as_deref());
            let proved = self.proved_addresses();
            candidates.extend(self.0.addresses().former_candidate(failures, since.elapsed(), &proved));
            let mut refusal = None;
            for candidate in candidates {
                let mut found = false;
                let error = self.query_curator(&candidate, &mut found).await;
                tracing::debug!(curator = candidate, leader = found, %error, "a curator did not lead to the leader");
                last = Some(candidate);
                if found {
                    (failures, since) = (1, Instant::now());
                    refusal = None;
                }
                if error.is_refusal(self.has_statement()) {
                    refusal = Some(error.to_string());
                }
                if found {
                    break;
                }
            }
            if refusal.is_some() {
                self.publish_refusal(refusal);
            }
            let rest = tokio::time::sleep(QUERY_BACKOFF.delay(failures, rand::random()));
            tokio::select! {
                () = rest => {}
                changed = learnt.changed() => if changed.is_err() { std::future::pending::<()>().await },
            }
        }
    }

    /// Queries one curator for the leader, and follows its answers while the stream lasts.
    async fn query_curator(&self, candidate: &str, found: &mut bool) -> FollowError {
        let followed = self.follow_leader(candidate, found).await;
        self.set_followed(None);
        match followed {
            Ok(never) => match never {},
            Err(error) => {
                // A leader that no curator confirms may lead no more; calls wait until the leader is known again.
                if *found {
                    self.0.leader.send_replace(None);
                }
                error
            }
        }
    }

    async fn follow_leader(&self, candidate: &str, found: &mut bool) -> Result<Infallible, FollowError> {
        self.refresh_statement(candidate).await?;
        // Before the check: a cut from here on also ends what this check permits.
        let mut cuts = self.0.cuts.subscribe();
        self.check_statement()?;
        self.set_followed(Some(candidate));
        tokio::select! {
            biased;
            // This has the sender, so an error is not possible.
            _ = cuts.changed() => Err(self.check_statement().err().unwrap_or(FollowError::StatementChanged)),
            followed = self.follow_responses(candidate, found) => followed,
        }
    }

    async fn follow_responses(&self, candidate: &str, found: &mut bool) -> Result<Infallible, FollowError> {
        let (config, clock) = (self.0.authentication.tls_config(None)?, self.0.authentication.clock());
        let channel = open_channel_until(candidate, config, &CancellationToken::new(), clock);
        let mut client = LeaderClient::new(channel);
        let watching = client.watch(wire::WatchLeaderRequest {});
        let answers =
            tokio::time::timeout(RESPONSE_TIMEOUT, watching).await.map_err(|_| FollowError::TimedOut)?;
        let mut answers = answers.map_err(FollowError::from_status)?.into_inner();
        let mut followed = None::<CurrentEpoch>;
        loop {
            let answer = if let Some(epoch) = &followed {
                tokio::select! {
                    answer = answers.message() => answer,
                    () = epoch.superseded.cancelled() => return Err(self.superseded_error(epoch.known.highest)),
                }
            } else {
                tokio::time::timeout(RESPONSE_TIMEOUT, answers.message())
                    .await
                    .map_err(|_| FollowError::TimedOut)?
            };
            let response = answer.map_err(FollowError::from_status)?.ok_or(FollowError::StreamEnded)?;
            self.adopt_epoch(&response, candidate).await?;
            let epoch = self.0.epoch.borrow().clone();
            if response.epoch < epoch.known.highest {
                return Err(outdated_error(response.epoch, epoch.known));
            }
            let node: NodeId = response
                .leader_node_id
                .parse()
                .map_err(|error| FollowError::InvalidResponse(format!("{error}")))?;
            let place = self.0.addresses().leader_address(node, &response, candidate);
            let address = place.ok_or_else(|| {
                FollowError::InvalidResponse(format!("{node} leads, and its address is not known"))
            })?;
            let leader = LeaderEndpoint { node, address };
            *found = true;
            self.publish_refusal(None);
            if self.leader().as_ref() != Some(&leader) {
                tracing::info!(leader = %leader.node, address = leader.address, "calls go to this curator");
                // Nobody but that node may answer there, whichever curator named it.
                let config = self.0.authentication.tls_config(Some(node))?;
                let clock = self.0.authentication.clock();
                let channel = open_channel_until(&leader.address, config, &epoch.superseded, clock);
                self.0.leader.send_replace(Some((leader, channel)));
            }
            followed = Some(epoch);
        }
    }

    fn superseded_error(&self, received: u64) -> FollowError {
        let known = self.known_epoch();
        if known.highest > received { outdated_error(received, known) } else { FollowError::StatementChanged }
    }

    fn publish_refusal(&self, refusal: Option<String>) {
        self.0.refusal.send_if_modified(|current| {
            let changed = *current != refusal;
            *current = refusal;
            changed
        });
    }
}

impl TrackerInner {
    fn addresses(&self) -> MutexGuard<'_, CuratorAddresses> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LeaderTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaderTracker").field("leader", &self.leader()).finish_non_exhaustive()
    }
}

/// A channel for generated clients, to the curator that leads when a call begins.
#[derive(Clone, Debug)]
pub struct LeaderChannel {
    leader: watch::Receiver<Option<(LeaderEndpoint, Channel)>>,
    refusal: watch::Receiver<Option<String>>,
}

impl Service<http::Request<Body>> for LeaderChannel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (mut leader, refusal) = (self.leader.clone(), self.refusal.clone());
        Box::pin(async move {
            let known = async {
                let known = leader.wait_for(Option::is_some).await;
                known.ok().and_then(|known| known.as_ref().map(|(_, channel)| channel.clone()))
            };
            let channel = tokio::time::timeout(LEADER_WAIT_TIMEOUT, known).await.ok().flatten();
            let channel = channel.ok_or_else(|| leader_unknown(refusal.borrow().as_deref()));
            let mut channel = channel?;
            let ready = std::future::poll_fn(|context| channel.poll_ready(context)).await;
            ready.map_err(|error| unavailable_status(&error))?;
            channel.call(request).await.map_err(|error| unavailable_status(&error))
        })
    }
}

fn leader_unknown(refusal: Option<&str>) -> Status {
    let seconds = LEADER_WAIT_TIMEOUT.as_secs();
    Status::unavailable(match refusal {
        Some(refusal) => format!("no curator was followed within {seconds} s: {refusal}"),
        None => format!(
            "no curator reported within {seconds} s which node leads the cluster; most consensus members must run"
        ),
    })
}

fn unavailable_status(error: &tonic::transport::Error) -> Status {
    let mut causes = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        causes = format!("{causes}: {next}");
        cause = next.source();
    }
    Status::unavailable(format!("the curator that leads was not reached ({causes}); call again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epoch_is_persisted_before_use_and_never_decreases() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let keep: PersistEpoch = {
            let kept = kept.clone();
            Arc::new(move |change| {
                if change.epoch() == 9 {
                    return Err("the disk is full".to_owned());
                }
                kept.lock().unwrap().push(change);
                Ok(())
            })
        };
        let configure: TlsConfigProvider = Arc::new(|_| Err(rustls::Error::General("nobody".to_owned())));
        let curators = LeaderTracker::with_epoch(configure, KnownEpoch::proved(2), keep);
        let before = curators.0.epoch.borrow().superseded.clone();
        for (epoch, expected, counts) in [
            (1, Ok(()), 2),
            (2, Ok(()), 2),
            (9, Err("the disk is full".to_owned()), 2),
            (4, Ok(()), 4),
            (3, Ok(()), 4),
        ] {
            assert_eq!(curators.raise_epoch(epoch), expected, "{epoch}");
            assert_eq!(curators.highest_epoch(), counts, "{epoch}");
            assert_eq!(before.is_cancelled(), counts == 4, "what goes to leaders of before is cut off");
        }
        assert_eq!(*kept.lock().unwrap(), [EpochChange::Ordered(4)]);
        assert!(!curators.0.epoch.borrow().superseded.is_cancelled());
    }
}
