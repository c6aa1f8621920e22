//! A curator as a whole: it stands for election, and serves what it is.
//!
//! Its socket is bound once. While nobody is known to lead, whoever connects is turned away at once rather than kept
//! waiting; a follower says who leads; the leader does everything, and in the background makes the members of etcd and
//! the records agree, one change at a time. Each new standing begins with new connections, a re-election too: what a
//! former leadership of the same curator was asked is not answered by the next.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::curator::clock::Clock;
use crate::curator::cluster::{self, Cluster};
use crate::curator::membership::Nodes;
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::service::door::Door;
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::Leading;
use crate::curator::service::listener::{serve, turn_away};
use crate::curator::service::members;
use crate::curator::service::store::Store;
use crate::curator::service::view::View;
use crate::curator::service::who_leads::WhoLeads;
use crate::curator::tls;
use crate::etcd::client::Client;
use crate::etcd::election::{Candidate, Standing, stand};
use crate::etcd::guard::Guard;
use crate::etcd::key_space::{LEADER, NODES};
use crate::etcd::namespace::Keys;
use crate::etcd::pause;

/// How long after its last sign of life a leader is replaced.
pub const LEADER_TTL: Duration = Duration::from_secs(10);
/// How often members and records are compared, and a learner is looked at.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// How often what has ended is cleared away.
const CLEAR_INTERVAL: Duration = Duration::from_mins(10);

/// What a curator is started with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its node.
    pub own: NodeId,
    /// The etcd of its node.
    pub client: Client,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The certificate of its node, which may be renewed meanwhile.
    pub shown: Arc<dyn ResolvesServerCert>,
    /// How long after its last sign of life it is to be replaced.
    pub ttl: Duration,
    /// How often members and records are compared.
    pub sync_interval: Duration,
    /// How long tokens of service accounts are waited for that a key signed which is being replaced.
    pub token_overlap: Duration,
    /// The time.
    pub clock: Clock,
}

/// Why a curator does not run.
#[derive(Debug, thiserror::Error)]
pub enum CuratorError {
    /// Its socket.
    #[error("the curator cannot listen on {address}: {source}; is another program there?")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Its certificate.
    #[error("the curator cannot be reached by TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// What it leads.
    #[error("the curator leads and cannot: {0}")]
    Leading(Failure),
    /// A part that never ends has ended.
    #[error("the curator's election ended by itself: please report it")]
    ElectionEnded,
}

/// A curator that listens, and does nothing yet.
#[derive(Debug)]
pub struct Curator {
    settings: Settings,
    listener: Arc<TcpListener>,
    config: Arc<ServerConfig>,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Curator {
    /// Begins to listen.
    pub async fn bind(settings: Settings) -> Result<Self, CuratorError> {
        let address = settings.listen;
        let failed = |source| CuratorError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let config = tls::server_config(settings.shown.clone())?;
        Ok(Self { settings, listener: Arc::new(listener), config, address })
    }

    /// Runs until cancelled. Then all its connections have ended and its lease is given back.
    pub async fn run(&self, cancel: &CancellationToken) -> Result<(), CuratorError> {
        let (told, standing) = watch::channel(Standing::Neither);
        let candidate =
            Candidate { election: election(), name: self.settings.own.to_string(), ttl: self.settings.ttl };
        // Its own, so that what cannot lead stands no longer, and gives its lease back.
        let stop = cancel.child_token();
        let standing_for_it = stand(&self.settings.client, &candidate, told, &stop);
        let serving = async {
            let ended = tokio::select! {
                ended = Box::pin(self.serve(standing, cancel)) => ended,
                never = self.promote() => match never {},
            };
            stop.cancel();
            ended
        };
        let ((), ended) = tokio::join!(standing_for_it, serving);
        ended
    }

    /// Serves whatever it is, until cancelled.
    async fn serve(
        &self,
        mut standing: watch::Receiver<Standing>,
        cancel: &CancellationToken,
    ) -> Result<(), CuratorError> {
        loop {
            let now = standing.borrow_and_update().clone();
            let over = CancellationToken::new();
            let serving = self.serve_as(&now, standing.clone(), over.clone());
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
                // First: the election ends by this as well, and may have done so already.
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

    async fn serve_as(
        &self,
        now: &Standing,
        standing: watch::Receiver<Standing>,
        over: CancellationToken,
    ) -> Result<(), CuratorError> {
        match now {
            Standing::Neither => {
                over.run_until_cancelled(turn_away(&self.listener)).await;
                Ok(())
            }
            Standing::Follower(leader) => {
                tracing::info!(leader = leader.name, "this curator follows");
                let Some(known) = self.known(&over).await else { return Ok(()) };
                let who_leads = self.who_leads(known, standing, over.clone());
                let door = Door::of_follower(who_leads, over.clone());
                serve(self.listener.clone(), self.config.clone(), door, over).await;
                Ok(())
            }
            Standing::Leader(guard) => {
                tracing::info!(lock = guard.key, revision = guard.create_revision, "this curator leads");
                let view = Arc::new(View::new());
                let (ready, mut is_ready) = watch::channel(false);
                let lead = async {
                    let leading = self.begin(guard, view.clone(), &over).await?;
                    if is_ready.wait_for(|ready| *ready).await.is_err() {
                        return Ok(());
                    }
                    let leading = Arc::new(leading);
                    let known = Known {
                        ca_certificate: leading.authority.anchor().certificate.clone().into(),
                        epoch: leading.cluster.epoch,
                    };
                    let who_leads = self.who_leads(known, standing, over.clone());
                    let door = Door::of_leader(who_leads, leading.clone());
                    let serving = serve(self.listener.clone(), self.config.clone(), door, over.clone());
                    tokio::select! {
                        () = serving => Ok(()),
                        never = self.agree(&leading) => match never {},
                    }
                };
                let prepared = over.clone();
                tokio::select! {
                    led = lead => led,
                    () = view.follow(&self.settings.client, ready) => Ok(()),
                    // What is served ends by itself, in its own time; what only begins, here.
                    () = async {
                        prepared.cancelled().await;
                        tokio::time::sleep(Duration::from_secs(2)).await;
                    } => Ok(()),
                }
            }
        }
    }

    /// Begins to lead: etcd may be away for a moment just after an election, which changes nothing.
    async fn begin(
        &self,
        guard: &Guard,
        view: Arc<View>,
        over: &CancellationToken,
    ) -> Result<Leading, CuratorError> {
        let settings = &self.settings;
        let mut failures = 0;
        loop {
            let store = Store::new(settings.client.clone(), guard.clone());
            let (clock, overlap) = (settings.clock.clone(), settings.token_overlap);
            match Leading::begin(settings.own, store, view.clone(), clock, over.clone(), overlap).await {
                Ok(leading) => return Ok(leading),
                Err(failure) if failure.code() == tonic::Code::Unavailable => {
                    tracing::info!(error = %failure, "this curator cannot lead yet");
                    failures += 1;
                    tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
                }
                Err(failure) => return Err(CuratorError::Leading(failure)),
            }
        }
    }

    /// Makes members and records agree, and looks after Kubernetes, for as long as it leads.
    async fn agree(&self, leading: &Leading) -> std::convert::Infallible {
        let mut sync = tokio::time::interval(self.settings.sync_interval);
        sync.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut kubernetes = tokio::time::interval(self.settings.sync_interval);
        kubernetes.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut clear = tokio::time::interval(CLEAR_INTERVAL);
        clear.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = sync.tick() => match leading.sync_members().await {
                    Ok(None) => {}
                    Ok(Some(change)) => {
                        tracing::info!(?change, "members of etcd and records of nodes differed");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "members of etcd and records of nodes were not compared");
                    }
                },
                _ = kubernetes.tick() => if let Err(error) = leading.care_for_kubernetes().await {
                    tracing::warn!(%error, "Kubernetes of the cluster was not looked after");
                },
                _ = clear.tick() => match leading.clear_away().await {
                    Ok(0) => {}
                    Ok(count) => tracing::info!(count, "cleared away what had ended"),
                    Err(error) => tracing::warn!(%error, "what has ended was not cleared away"),
                },
            }
        }
    }

    /// Gives learners their votes, where this node's etcd leads the others; which curator leads does not matter.
    async fn promote(&self) -> std::convert::Infallible {
        let mut look = tokio::time::interval(self.settings.sync_interval);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            let promoted = async {
                let nodes = nodes(&self.settings.client).await?;
                members::promote(&self.settings.client, &nodes).await
            };
            if let Err(error) = promoted.await {
                tracing::debug!(%error, "no member of etcd could be given a vote");
            }
        }
    }

    fn who_leads(
        &self,
        Known { ca_certificate, epoch }: Known,
        standing: watch::Receiver<Standing>,
        ended: CancellationToken,
    ) -> WhoLeads {
        let (own, port, client) = (self.settings.own, self.address.port(), self.settings.client.clone());
        WhoLeads { own, port, ca_certificate, epoch, standing, client, ended }
    }

    /// By what the cluster is known, as soon as etcd answers; `None` when it is over before.
    async fn known(&self, over: &CancellationToken) -> Option<Known> {
        let mut failures = 0;
        let reading = async {
            loop {
                let read = async {
                    let key = cluster::authority_key()?;
                    let Some(record) = self.settings.client.get(&key).await? else { return Ok(None) };
                    let authority = cluster::decode_authority(&key, &record.value)?;
                    let key = cluster::cluster_key()?;
                    let Some(record) = self.settings.client.get(&key).await? else { return Ok(None) };
                    Ok::<_, Failure>(Some(Known {
                        ca_certificate: authority.anchor().certificate.clone().into(),
                        epoch: Cluster::decode(&key, &record.value)?.epoch,
                    }))
                };
                match read.await {
                    Ok(Some(known)) => return known,
                    Ok(None) => tracing::debug!("this etcd holds no cluster yet"),
                    Err(error) => tracing::info!(%error, "what the cluster is cannot be read yet"),
                }
                failures += 1;
                tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
            }
        };
        over.run_until_cancelled(reading).await
    }
}

/// By what the cluster is known to whoever asks.
struct Known {
    ca_certificate: Arc<[u8]>,
    epoch: u64,
}

/// What the keys of candidates begin with, as the election wants it: without the last slash.
fn election() -> String {
    LEADER.range().start.trim_end_matches('/').to_owned()
}

async fn nodes(client: &Client) -> Result<Nodes, Failure> {
    let listing = client.list(&Keys::Under(NODES.range().start)).await?;
    let nodes = listing.records.iter().map(|record| {
        let node = Node::decode(&record.key, &record.value)?;
        Ok::<_, Failure>((node.id, node))
    });
    nodes.collect()
}
