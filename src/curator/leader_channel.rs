//! The one way to the curator that leads, for everybody on a node.
//!
//! Whoever asks a curator something asks the leader, and who that is changes. So nobody holds an address: all share one
//! channel, behind which a task asks any curator it knows who leads, follows the answer, and turns every call that
//! begins from then on to that one. A call waits while nobody is known to lead; one that was under way when a leader
//! went fails, and its caller makes it again.
//!
//! The leader proves by its certificate to be the node that was said to lead; what a curator says that does not lead is
//! worth no more than a hint. A node that runs a curator itself knows it under an address of its own (the loopback),
//! which does not change with the node's.
//!
//! Of two clusters that say to be the same one, the one that was restored later is: by its epoch, which every curator
//! says. The highest that was heard is kept before it is followed; whoever speaks of a lower one is not followed, and what
//! is open to such a leader is cut off ([`restore`](crate::curator::restore) says why that is enough).

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ClientConfig;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

use tokio_util::sync::CancellationToken;

use crate::curator::dial::{dial, dial_until};
use crate::curator::node_id::NodeId;
use crate::model::cluster::restore::EPOCHS_AHEAD;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::leader_client::LeaderClient;

/// How long a call waits for somebody to lead.
const WAIT: Duration = Duration::from_secs(30);
/// How long one curator has to say who leads.
const ANSWER: Duration = Duration::from_secs(10);
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// TLS to a curator: to this node alone, or to any of the cluster.
pub type Configure = Arc<dyn Fn(Option<NodeId>) -> Result<Arc<ClientConfig>, rustls::Error> + Send + Sync>;

/// Keeps the highest epoch that was heard, durably; the error is a sentence.
pub type KeepEpoch = Arc<dyn Fn(u64) -> Result<(), String> + Send + Sync>;

/// Who leads, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderAt {
    /// The node.
    pub node: NodeId,
    /// `host:port` of its curator.
    pub address: String,
}

/// Curators that are known, and the leader among them. Cloning it gives another hold on the same.
#[derive(Clone)]
pub struct Curators(Arc<Inner>);

struct Inner {
    known: Mutex<Known>,
    learnt: watch::Sender<u64>,
    leader: watch::Sender<Option<(LeaderAt, Channel)>>,
    configure: Configure,
    /// The highest epoch that was heard.
    epoch: watch::Sender<Epoch>,
    keep_epoch: KeepEpoch,
}

/// An epoch, and what ends with it.
#[derive(Clone)]
struct Epoch {
    number: u64,
    /// Cancelled when a higher one was heard: what goes to its leaders is cut off.
    over: CancellationToken,
}

#[derive(Default)]
struct Known {
    /// `host:port`, as the directory says.
    directory: BTreeSet<String>,
    /// Our own curator, if one runs.
    local: Option<(NodeId, String)>,
}

impl Known {
    /// Whom to ask, and in which order: our own first, the others beginning behind the one that was asked last.
    fn candidates(&self, last: Option<&str>) -> Vec<String> {
        let others: Vec<&String> = self.directory.iter().collect();
        let behind = others.partition_point(|address| last.is_some_and(|last| address.as_str() <= last));
        let local = self.local.iter().map(|(_, address)| address.clone());
        local
            .chain(others[behind..].iter().chain(&others[..behind]).map(|address| (*address).clone()))
            .collect()
    }

    /// Where a leader is, as somebody at `asked` said.
    fn place(&self, leader: NodeId, said: &wire::WatchLeaderResponse, asked: &str) -> Option<String> {
        if let Some((_, local)) = self.local.as_ref().filter(|(own, _)| *own == leader) {
            return Some(local.clone());
        }
        if said.leader_address.is_empty() {
            // It speaks of itself and does not know how we see it: as we reached it.
            return (said.this_node_id == said.leader_node_id).then(|| asked.to_owned());
        }
        let port = u16::try_from(said.leader_port).ok().filter(|port| *port > 0)?;
        let address: std::net::IpAddr = said.leader_address.parse().ok()?;
        Some(std::net::SocketAddr::new(address, port).to_string())
    }
}

/// Why a curator leads nobody to the leader.
#[derive(Debug, thiserror::Error)]
enum NoLeader {
    #[error("{0}")]
    Said(Status),
    #[error("it did not answer within {} s", ANSWER.as_secs())]
    Silent,
    #[error("it does not follow any more")]
    Ended,
    #[error("it said something that cannot be: {0}")]
    Odd(String),
    #[error("it is of epoch {said} of the cluster, which has been restored since ({heard})")]
    Before { said: u64, heard: u64 },
    #[error("that the cluster was restored could not be kept: {0}")]
    NotKept(String),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl Curators {
    /// Curators of which none is known yet. `configure` says who may answer, and who we are.
    #[must_use]
    pub fn new(configure: Configure) -> Self {
        Self::of_epoch(configure, 0, Arc::new(|_| Ok(())))
    }

    /// The same, for whoever has heard of this epoch of the cluster, and keeps higher ones.
    #[must_use]
    pub fn of_epoch(configure: Configure, epoch: u64, keep_epoch: KeepEpoch) -> Self {
        Self(Arc::new(Inner {
            epoch: watch::Sender::new(Epoch { number: epoch, over: CancellationToken::new() }),
            keep_epoch,
            known: Mutex::default(),
            learnt: watch::Sender::new(0),
            leader: watch::Sender::new(None),
            configure,
        }))
    }

    /// Takes these for the curators there are. An empty list is no news: whoever sent it knows less than we do.
    pub fn learn(&self, addresses: impl IntoIterator<Item = String>) {
        let addresses: BTreeSet<String> = addresses.into_iter().collect();
        if !addresses.is_empty() {
            self.0.known().directory = addresses;
            self.0.learnt.send_modify(|count| *count += 1);
        }
    }

    /// The highest epoch of the cluster that was heard.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.0.epoch.borrow().number
    }

    /// Takes this epoch for one that there is, once it is kept: no leader of a lower one is followed from then on.
    pub fn raise(&self, epoch: u64) -> Result<(), String> {
        if epoch <= self.epoch() {
            return Ok(());
        }
        (self.0.keep_epoch)(epoch)?;
        self.0.epoch.send_if_modified(|known| {
            // Somebody else may have heard of it as well.
            let higher = epoch > known.number;
            if higher {
                known.over.cancel();
                *known = Epoch { number: epoch, over: CancellationToken::new() };
            }
            higher
        });
        Ok(())
    }

    /// `host:port` of the curators that are known.
    #[must_use]
    pub fn known(&self) -> BTreeSet<String> {
        self.0.known().directory.clone()
    }

    /// Says where our own curator listens, or that none runs any more.
    pub fn set_local(&self, local: Option<(NodeId, String)>) {
        self.0.known().local = local;
        self.0.learnt.send_modify(|count| *count += 1);
    }

    /// The channel to whoever leads. It works as long as [`Curators::follow`] runs.
    #[must_use]
    pub fn channel(&self) -> LeaderChannel {
        LeaderChannel { leader: self.0.leader.subscribe() }
    }

    /// Who leads, as far as is known, now and from now on.
    #[must_use]
    pub fn leader(&self) -> Option<LeaderAt> {
        self.0.leader.borrow().as_ref().map(|(leader, _)| leader.clone())
    }

    /// Finds out who leads and follows that, until it is dropped.
    pub async fn follow(&self) -> Infallible {
        let mut learnt = self.0.learnt.subscribe();
        let (mut last, mut pause) = (None::<String>, SHORTEST_PAUSE);
        loop {
            let candidates = self.0.known().candidates(last.as_deref());
            for candidate in candidates {
                let mut found = false;
                let error = self.ask(&candidate, &mut found).await;
                tracing::debug!(curator = candidate, found, %error, "a curator leads nobody to the leader");
                last = Some(candidate);
                if found {
                    pause = SHORTEST_PAUSE;
                    break;
                }
            }
            let rest = tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0));
            tokio::select! {
                () = rest => {}
                changed = learnt.changed() => if changed.is_err() { std::future::pending::<()>().await },
            }
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }

    /// Asks one curator who leads, and follows what it says for as long as it says so.
    async fn ask(&self, candidate: &str, found: &mut bool) -> NoLeader {
        match self.follow_one(candidate, found).await {
            Ok(never) => match never {},
            Err(error) => {
                // A leader that nobody vouches for may be one no more; calls wait until it is known again.
                if *found {
                    self.0.leader.send_replace(None);
                }
                error
            }
        }
    }

    async fn follow_one(&self, candidate: &str, found: &mut bool) -> Result<Infallible, NoLeader> {
        let channel = dial(candidate, (self.0.configure)(None)?);
        let mut client = LeaderClient::new(channel);
        let asking = client.watch(wire::WatchLeaderRequest {});
        let answers = tokio::time::timeout(ANSWER, asking).await.map_err(|_| NoLeader::Silent)?;
        let mut answers = answers.map_err(NoLeader::Said)?.into_inner();
        let mut epochs = self.0.epoch.subscribe();
        let mut followed = None;
        loop {
            let answer = if let Some(said) = followed {
                tokio::select! {
                    answer = answers.message() => answer,
                    Ok(heard) = epochs.wait_for(|heard| heard.number > said) => {
                        return Err(NoLeader::Before { said, heard: heard.number });
                    }
                }
            } else {
                tokio::time::timeout(ANSWER, answers.message()).await.map_err(|_| NoLeader::Silent)?
            };
            let said = answer.map_err(NoLeader::Said)?.ok_or(NoLeader::Ended)?;
            if said.epoch.saturating_sub(self.epoch()) > EPOCHS_AHEAD {
                return Err(NoLeader::Odd(format!(
                    "epoch {} is no next one of {}",
                    said.epoch,
                    self.epoch()
                )));
            }
            self.raise(said.epoch).map_err(NoLeader::NotKept)?;
            let epoch = self.0.epoch.borrow().clone();
            if said.epoch < epoch.number {
                return Err(NoLeader::Before { said: said.epoch, heard: epoch.number });
            }
            followed = Some(said.epoch);
            let node: NodeId =
                said.leader_node_id.parse().map_err(|error| NoLeader::Odd(format!("{error}")))?;
            let place = self.0.known().place(node, &said, candidate);
            let address = place.ok_or_else(|| NoLeader::Odd(format!("{node} leads, and is nowhere")))?;
            let leader = LeaderAt { node, address };
            *found = true;
            if self.leader().as_ref() != Some(&leader) {
                tracing::info!(leader = %leader.node, address = leader.address, "calls go to this curator");
                // Nobody else may answer there, whatever leads us there.
                let config = (self.0.configure)(Some(node))?;
                let channel = dial_until(&leader.address, config, &epoch.over);
                self.0.leader.send_replace(Some((leader, channel)));
            }
        }
    }
}

impl Inner {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Curators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Curators").field("leader", &self.leader()).finish_non_exhaustive()
    }
}

/// A channel for generated clients, to whoever leads when a call begins.
#[derive(Clone, Debug)]
pub struct LeaderChannel {
    leader: watch::Receiver<Option<(LeaderAt, Channel)>>,
}

impl Service<http::Request<Body>> for LeaderChannel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let mut leader = self.leader.clone();
        Box::pin(async move {
            let known = async {
                let known = leader.wait_for(Option::is_some).await;
                known.ok().and_then(|known| known.as_ref().map(|(_, channel)| channel.clone()))
            };
            let channel = tokio::time::timeout(WAIT, known).await.ok().flatten().ok_or_else(|| {
                Status::unavailable(format!(
                    "no curator said within {} s who leads the cluster; most consensus members must run",
                    WAIT.as_secs()
                ))
            });
            let mut channel = channel?;
            let ready = std::future::poll_fn(|context| channel.poll_ready(context)).await;
            ready.map_err(|error| unreachable(&error))?;
            channel.call(request).await.map_err(|error| unreachable(&error))
        })
    }
}

fn unreachable(error: &tonic::transport::Error) -> Status {
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
    use crate::curator::node_id::tests::node_id;

    fn known(directory: &[&str], local: Option<u8>) -> Known {
        Known {
            directory: directory.iter().map(|address| (*address).to_owned()).collect(),
            local: local.map(|number| (node_id(number), "127.0.0.1:7835".to_owned())),
        }
    }

    #[test]
    fn our_own_curator_is_asked_first_and_the_others_in_turn() {
        let directory = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
        assert_eq!(known(&directory, None).candidates(None), directory);
        let turned = ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1"];
        assert_eq!(known(&directory, None).candidates(Some("10.0.0.2:1")), turned);
        assert_eq!(known(&directory, None).candidates(Some("10.0.0.3:1")), directory);
        let mut with_local = vec!["127.0.0.1:7835"];
        with_local.extend(turned);
        assert_eq!(known(&directory, Some(1)).candidates(Some("10.0.0.2:1")), with_local);
        assert_eq!(known(&[], None).candidates(None), Vec::<String>::new());
    }

    #[test]
    fn epoch_is_kept_before_it_counts_and_never_goes_back() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let keep: KeepEpoch = {
            let kept = kept.clone();
            Arc::new(move |epoch| {
                if epoch == 9 {
                    return Err("the disk is full".to_owned());
                }
                kept.lock().unwrap().push(epoch);
                Ok(())
            })
        };
        let configure: Configure = Arc::new(|_| Err(rustls::Error::General("nobody".to_owned())));
        let curators = Curators::of_epoch(configure, 2, keep);
        let before = curators.0.epoch.borrow().over.clone();
        for (epoch, expected, counts) in [
            (1, Ok(()), 2),
            (2, Ok(()), 2),
            (9, Err("the disk is full".to_owned()), 2),
            (4, Ok(()), 4),
            (3, Ok(()), 4),
        ] {
            assert_eq!(curators.raise(epoch), expected, "{epoch}");
            assert_eq!(curators.epoch(), counts, "{epoch}");
            assert_eq!(before.is_cancelled(), counts == 4, "what goes to leaders of before is cut off");
        }
        assert_eq!(*kept.lock().unwrap(), [4]);
        assert!(!curators.0.epoch.borrow().over.is_cancelled());
    }

    #[test]
    fn leader_is_where_it_says_or_where_it_was_reached_and_never_elsewhere() {
        let said = |leader: u8, address: &str, port, this: u8| wire::WatchLeaderResponse {
            leader_node_id: node_id(leader).to_string(),
            leader_address: address.to_owned(),
            leader_port: port,
            this_node_id: node_id(this).to_string(),
            epoch: 0,
        };
        let place = |local, said: wire::WatchLeaderResponse| {
            known(&[], local).place(said.leader_node_id.parse().unwrap(), &said, "10.0.0.9:1")
        };
        let at = |address: &str| Some(address.to_owned());
        assert_eq!(place(None, said(1, "10.0.0.1", 7835, 2)), at("10.0.0.1:7835"));
        assert_eq!(place(None, said(1, "fd00::1", 7835, 2)), at("[fd00::1]:7835"));
        assert_eq!(place(Some(1), said(1, "10.0.0.1", 7835, 2)), at("127.0.0.1:7835"), "our own");
        assert_eq!(place(Some(2), said(1, "10.0.0.1", 7835, 2)), at("10.0.0.1:7835"));
        assert_eq!(place(None, said(1, "", 7835, 1)), at("10.0.0.9:1"), "as it was reached");
        assert_eq!(place(None, said(1, "", 7835, 2)), None, "another one does not know where it is");
        assert_eq!(place(None, said(1, "10.0.0.1", 0, 2)), None);
        assert_eq!(place(None, said(1, "a host", 1, 2)), None);
    }
}
