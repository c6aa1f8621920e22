//! The curator server: takes part in the election, and serves as leader or follower.
//!
//! Its socket is bound once. While no leader is known, connections are closed at once rather than left waiting. A
//! follower only names the leader to callers. The leader serves everything, and in the background makes etcd's members
//! and the records agree, one change at a time. Each new role begins with new connections, and so does a re-election:
//! calls that an earlier leadership of the same curator received are not served by the next one.
//!
//! Nodes do not follow the curator of a node with revoked credentials. So it takes part in no election, and one
//! that leads steps down: otherwise a cluster would have a leader that nobody follows. For the same reason, a leader
//! steps down if its clock is wrong by those of most consensus members.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use curator_client::authority_ring::AuthorityRing;
use curator_client::clock::Clock;
use curator_client::cluster::{self, Cluster};
use curator_client::node::Node;
use curator_client::node_id::NodeId;
use curator_client::tls;
use etcd::client::Client;
use etcd::election::{Candidate, campaign};
use etcd::election_view::CandidateRole;
use etcd::guard::LeaderGuard;
use etcd::key_space::{LEADER, NODES};
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use etcd::retry::RETRY_BACKOFF;
use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use transport::gate::Gate;

use crate::credential::Revocation;
use crate::membership::Nodes;
use crate::node_address::AddressRule;
use crate::service::auth_router::AuthRouter;
use crate::service::authority_rotation::watch_authorities;
use crate::service::cluster_members::ClusterMembers;
use crate::service::curator_error::CuratorError;
use crate::service::error::ServiceError;
use crate::service::etcd_members;
use crate::service::gate_monitor::GateMonitor;
use crate::service::leader_context::LeaderContext;
use crate::service::leader_service::LeaderService;
use crate::service::listener::{open_gate, reject_connections, serve_connections};
use crate::service::record_cache::RecordCache;
use crate::service::statement_monitor::StatementMonitor;
use crate::service::statements::StatementCache;
use crate::service::store::Store;

/// A leader without a sign of life for this long is replaced.
pub const LEADER_TTL: Duration = Duration::from_secs(10);
/// How often members and records are compared, and whether a learner can be promoted is checked.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// How long every curator must have been ready before the first statement of a cluster of a release without statements.
/// Within this time the update can be rolled back.
pub const FIRST_STATEMENT_WAIT: Duration = Duration::from_hours(1);
/// How often the leader compares its clock with those of the other consensus members.
pub const CLOCK_INTERVAL: Duration = Duration::from_mins(1);
/// How long a curator continues after its node was revoked: the call that revoked it gets its response.
const REVOCATION_GRACE: Duration = Duration::from_millis(500);
/// How often expired records are deleted.
const CLEANUP_INTERVAL: Duration = Duration::from_mins(10);

/// The settings of a curator.
#[derive(Clone, Debug)]
pub struct CuratorSettings {
    /// Id of the curator's node.
    pub node_id: NodeId,
    /// The client of the etcd on its node.
    pub client: Client,
    /// The listen address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The certificate of its node, which may be renewed meanwhile.
    pub server_certificate: Arc<dyn ResolvesServerCert>,
    /// How long after its last sign of life this curator is replaced as leader.
    pub ttl: Duration,
    /// How often members and records are compared.
    pub sync_interval: Duration,
    /// How long every curator must have been ready before the first statement of a cluster that was founded without one.
    pub first_statement_wait: Duration,
    /// How often the leader compares its clock with those of the other consensus members.
    pub clock_interval: Duration,
    /// How long a rotated service-account key stays trusted for the tokens that it signed.
    pub token_overlap: Duration,
    /// The source of the time.
    pub clock: Clock,
    /// How many files this process may open. The limits on connections follow from it.
    pub files: u64,
    /// Receives what happens to connections.
    pub gate: GateMonitor,
    /// Receives why this curator signs no statement while it leads.
    pub statements: StatementMonitor,
    /// Where the addresses of nodes come from.
    pub address_rule: AddressRule,
}

/// A curator that listens but serves nothing yet.
#[derive(Debug)]
pub struct Curator {
    settings: CuratorSettings,
    listener: Arc<TcpListener>,
    gate: Gate,
    config: Arc<ServerConfig>,
    /// The address it listens on, with the port that was chosen.
    pub address: SocketAddr,
}

impl Curator {
    /// Binds the listen address.
    pub async fn bind(settings: CuratorSettings) -> Result<Self, CuratorError> {
        let address = settings.listen;
        let failed = |source| CuratorError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let config = tls::server_config(settings.server_certificate.clone())?;
        let gate = open_gate(settings.files, settings.gate.clone());
        Ok(Self { settings, listener: Arc::new(listener), gate, config, address })
    }

    /// Runs until cancelled. When it returns, all its connections have ended and its lease is released.
    pub async fn run(&self, cancel: &CancellationToken) -> Result<(), CuratorError> {
        let (sender, standing) = watch::channel(CandidateRole::Unknown);
        let candidate = Candidate {
            election: election_prefix(),
            name: self.settings.node_id.to_string(),
            ttl: self.settings.ttl,
        };
        // Tokens of its own: a curator that cannot lead stops standing for election, and releases its lease.
        let (stop, over) = (cancel.child_token(), cancel.child_token());
        let (cleared, is_cleared) = watch::channel(false);
        let standing_for_it = async {
            if wait_until_cleared(is_cleared, &stop).await {
                campaign(&self.settings.client, &candidate, sender, &stop).await;
            }
        };
        let serving = async {
            let mut serving = Box::pin(self.serve_until_cancelled(standing, &over));
            let ended = tokio::select! {
                ended = &mut serving => ended,
                never = self.promote_learners() => match never {},
                revoked = Box::pin(self.wait_until_revoked(&cleared)) => {
                    over.cancel();
                    serving.await.and(revoked).and(Err(CuratorError::NodeRevoked(self.settings.node_id)))
                }
            };
            stop.cancel();
            ended
        };
        let ((), ended) = tokio::join!(standing_for_it, serving);
        ended
    }

    /// Waits until the credentials of the own node are revoked. Sets `cleared` once it is known that they are not.
    async fn wait_until_revoked(&self, cleared: &watch::Sender<bool>) -> Result<(), CuratorError> {
        let key = Revocation::Node(self.settings.node_id).etcd_key()?;
        let mut record = KeyWatcher::new(&self.settings.client, KeySelector::One(key), Revocation::decode);
        loop {
            match record.next_event().await {
                // A record that this release cannot read revokes the node, too.
                Ok(KeyEvent::Put { .. }) | Err(_) => {
                    if *cleared.borrow() {
                        tracing::warn!("the credentials of this node were revoked: its curator ends");
                        tokio::time::sleep(REVOCATION_GRACE).await;
                    }
                    return Ok(());
                }
                Ok(KeyEvent::BacklogDone) => {
                    cleared.send_replace(true);
                }
                Ok(KeyEvent::Deleted { .. }) => {}
            }
        }
    }

    /// Serves in its role, whichever it is, until cancelled.
    async fn serve_until_cancelled(
        &self,
        mut standing: watch::Receiver<CandidateRole>,
        cancel: &CancellationToken,
    ) -> Result<(), CuratorError> {
        loop {
            let now = standing.borrow_and_update().clone();
            let over = CancellationToken::new();
            let serving = self.serve_in_role(&now, standing.clone(), over.clone());
            let mut serving = std::pin::pin!(serving);
            let changed = async {
                while *standing.borrow_and_update() == now {
                    if standing.changed().await.is_err() {
                        return Err(CuratorError::ElectionEnded);
                    }
                }
                Ok(())
            };
            let ended = tokio::select! {
                // Cancellation first: it ends the election as well, and may have done so already.
                biased;
                () = cancel.cancelled() => None,
                changed = changed => Some(changed),
                failed = &mut serving => {
                    failed?;
                    continue;
                }
            };
            over.cancel();
            serving.await?;
            match ended {
                None => return Ok(()),
                Some(changed) => changed?,
            }
        }
    }

    async fn serve_in_role(
        &self,
        now: &CandidateRole,
        standing: watch::Receiver<CandidateRole>,
        over: CancellationToken,
    ) -> Result<(), CuratorError> {
        match now {
            CandidateRole::Unknown => {
                over.run_until_cancelled(reject_connections(&self.listener)).await;
                Ok(())
            }
            CandidateRole::Follower(leader) => {
                tracing::info!(leader = leader.name, "this curator follows");
                let (cache, statements) = (Arc::new(RecordCache::new()), Arc::new(StatementCache::new()));
                let (ready, mut is_ready) = watch::channel(false);
                let follow = async {
                    let Some((authorities, epoch)) = self.load_cluster_info(&over).await else { return };
                    let authorities = watch::Sender::new(Arc::new(authorities));
                    let known = ClusterInfo { authorities: authorities.subscribe(), epoch };
                    // Nodes come at once, and their watches last long. Before the cache has them, their connections
                    // would count as those of strangers. And a cluster that has a statement must not seem to have none.
                    let cached = async {
                        statements.wait_until_read().await;
                        is_ready.wait_for(|ready| *ready).await.is_ok()
                    };
                    if over.run_until_cancelled(cached).await != Some(true) {
                        return;
                    }
                    let clock = self.settings.clock.clone();
                    let members = ClusterMembers::new(authorities.subscribe(), cache.clone(), clock);
                    let leader_service = self.leader_service(known, standing, &statements, over.clone());
                    let router = AuthRouter::for_follower(leader_service, members, over.clone());
                    tokio::select! {
                        () = self.serve(router, over.clone()) => {}
                        never = watch_authorities(&self.settings.client, &authorities) => match never {},
                    }
                };
                tokio::select! {
                    () = follow => {}
                    () = cache.watch_etcd(&self.settings.client, ready) => {}
                    never = statements.watch_etcd(&self.settings.client) => match never {},
                }
                Ok(())
            }
            CandidateRole::Leader(guard) => {
                tracing::info!(lock = guard.key, revision = guard.create_revision, "this curator leads");
                let (cache, statements) = (Arc::new(RecordCache::new()), Arc::new(StatementCache::new()));
                let (ready, mut is_ready) = watch::channel(false);
                let lead = async {
                    let leading = self.start_leading(guard, cache.clone(), &over).await?;
                    statements.wait_until_read().await;
                    if is_ready.wait_for(|ready| *ready).await.is_err() {
                        return Ok(());
                    }
                    let leading = Arc::new(leading);
                    let known = ClusterInfo {
                        authorities: leading.authorities.subscribe(),
                        epoch: leading.cluster.epoch,
                    };
                    let leader_service = self.leader_service(known, standing, &statements, over.clone());
                    let gate = self.settings.gate.clone();
                    let router = AuthRouter::for_leader(leader_service, leading.clone(), gate);
                    tokio::select! {
                        () = self.serve(router, over.clone()) => Ok(()),
                        never = self.run_leader_tasks(&leading) => match never {},
                        never = leading.keep_statements(
                            self.settings.sync_interval,
                            self.settings.first_statement_wait,
                            &self.settings.statements,
                        ) => match never {},
                        wrong = Box::pin(leading.wait_for_wrong_clock(self.settings.clock_interval)) => {
                            Err(CuratorError::WrongClock { own: wrong.own, others: wrong.others })
                        }
                    }
                };
                let prepared = over.clone();
                tokio::select! {
                    led = lead => led,
                    () = cache.watch_etcd(&self.settings.client, ready) => Ok(()),
                    never = statements.watch_etcd(&self.settings.client) => match never {},
                    // Serving ends by itself, within its own grace period; this ends preparations that are still under
                    // way.
                    () = async {
                        prepared.cancelled().await;
                        tokio::time::sleep(Duration::from_secs(2)).await;
                    } => Ok(()),
                }
            }
        }
    }

    async fn serve(&self, router: AuthRouter, over: CancellationToken) {
        serve_connections(self.listener.clone(), self.gate.clone(), self.config.clone(), router, over).await;
    }

    /// Begins to lead. Just after an election, etcd may be unavailable for a moment; that is retried.
    async fn start_leading(
        &self,
        guard: &LeaderGuard,
        cache: Arc<RecordCache>,
        over: &CancellationToken,
    ) -> Result<LeaderContext, CuratorError> {
        let settings = &self.settings;
        let mut failures = 0;
        loop {
            let store = Store::new(settings.client.clone(), guard.clone());
            let (clock, overlap, rule) =
                (settings.clock.clone(), settings.token_overlap, settings.address_rule);
            let (own, cache, ended) = (settings.node_id, cache.clone(), over.clone());
            match LeaderContext::load(own, store, cache, clock, ended, overlap, rule).await {
                Ok(leading) => return Ok(leading),
                Err(failure) if failure.code() == tonic::Code::Unavailable => {
                    tracing::info!(error = %failure, "this curator cannot lead yet");
                    failures += 1;
                    tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
                }
                Err(failure) => return Err(CuratorError::CannotLead(failure)),
            }
        }
    }

    /// Makes members and records agree, and reconciles Kubernetes, for as long as this curator leads.
    async fn run_leader_tasks(&self, leading: &LeaderContext) -> std::convert::Infallible {
        let mut sync = tokio::time::interval(self.settings.sync_interval);
        sync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut kubernetes = tokio::time::interval(self.settings.sync_interval);
        kubernetes.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut clear = tokio::time::interval(CLEANUP_INTERVAL);
        clear.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = sync.tick() => match leading.sync_members().await {
                    Ok(None) => {}
                    Ok(Some(change)) => {
                        tracing::info!(difference = ?change, "members of etcd and records of nodes differed");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "members of etcd and records of nodes were not compared");
                    }
                },
                _ = kubernetes.tick() => if let Err(error) = leading.reconcile_kubernetes().await {
                    tracing::warn!(%error, "the Kubernetes of the cluster could not be reconciled");
                },
                _ = clear.tick() => match leading.delete_expired().await {
                    Ok(0) => {}
                    Ok(count) => tracing::info!(deleted = count, "deleted expired records"),
                    Err(error) => tracing::warn!(%error, "expired records were not deleted"),
                },
            }
        }
    }

    /// Promotes learners if this node's etcd leads etcd; it does not matter which curator leads.
    async fn promote_learners(&self) -> std::convert::Infallible {
        let mut look = tokio::time::interval(self.settings.sync_interval);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            let promoted = async {
                let nodes = load_nodes(&self.settings.client).await?;
                etcd_members::promote_learner(&self.settings.client, &nodes).await
            };
            if let Err(error) = promoted.await {
                tracing::debug!(%error, "no member of etcd could be given a vote");
            }
        }
    }

    fn leader_service(
        &self,
        ClusterInfo { authorities, epoch }: ClusterInfo,
        role: watch::Receiver<CandidateRole>,
        statements: &Arc<StatementCache>,
        ended: CancellationToken,
    ) -> LeaderService {
        let (node_id, port, client) =
            (self.settings.node_id, self.address.port(), self.settings.client.clone());
        let (statements, clock) = (statements.clone(), self.settings.clock.clone());
        LeaderService { node_id, port, authorities, epoch, role, client, statements, clock, ended }
    }

    /// Reads authorities and epoch, as soon as etcd answers; `None` if `over` is cancelled before.
    async fn load_cluster_info(&self, over: &CancellationToken) -> Option<(AuthorityRing, u64)> {
        let mut failures = 0;
        let reading = async {
            loop {
                let read = async {
                    let key = cluster::authority_record_key()?;
                    let Some(record) = self.settings.client.get(&key).await? else { return Ok(None) };
                    let authorities = AuthorityRing::decode(&key, &record.value)?;
                    let key = cluster::cluster_record_key()?;
                    let Some(record) = self.settings.client.get(&key).await? else { return Ok(None) };
                    let epoch = Cluster::decode(&key, &record.value)?.epoch;
                    Ok::<_, ServiceError>(Some((authorities, epoch)))
                };
                match read.await {
                    Ok(Some(known)) => return known,
                    Ok(None) => tracing::debug!("this etcd holds no cluster yet"),
                    Err(error) => tracing::info!(%error, "the records of the cluster cannot be read yet"),
                }
                failures += 1;
                tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
            }
        };
        over.run_until_cancelled(reading).await
    }
}

/// What every curator reports to callers about the cluster.
struct ClusterInfo {
    authorities: watch::Receiver<Arc<AuthorityRing>>,
    epoch: u64,
}

/// Waits until the own node is known not to be revoked; `false` if `stop` is cancelled before.
async fn wait_until_cleared(mut is_cleared: watch::Receiver<bool>, stop: &CancellationToken) -> bool {
    let cleared = async { is_cleared.wait_for(|cleared| *cleared).await.is_ok() };
    stop.run_until_cancelled(cleared).await == Some(true)
}

/// The key prefix of election candidates, without the last slash, as the election needs it.
fn election_prefix() -> String {
    LEADER.range().start.trim_end_matches('/').to_owned()
}

async fn load_nodes(client: &Client) -> Result<Nodes, ServiceError> {
    let listing = client.list(&KeySelector::Prefix(NODES.range().start)).await?;
    let nodes = listing.records.iter().map(|record| {
        let node = Node::decode(&record.key, &record.value)?;
        Ok::<_, ServiceError>((node.id, node))
    });
    nodes.collect()
}

#[cfg(test)]
mod tests {
    use curator_client::leader_channel::{REVOCATION_BOUND, STATEMENT_ARRIVAL};

    use super::*;

    /// The documents promise the bound, and half a minute more if another curator has to lead first.
    #[test]
    fn statement_reaches_every_node_within_the_promised_time() {
        // A leader that has missed the revocation signs at its next tick.
        let longest = SYNC_INTERVAL + STATEMENT_ARRIVAL;
        assert!(longest <= REVOCATION_BOUND, "{longest:?}");
        let with_election = LEADER_TTL + longest;
        assert!(with_election <= REVOCATION_BOUND + Duration::from_secs(30), "{with_election:?}");
    }
}
