//! gRPC service Leader: who leads, and where, and what the authority states; served by every curator.
//!
//! A follower reads the leader's address from the leader's own record, and sends it again whenever it changes. It ends
//! the stream when it does not know the leader or its address. Each message has the number of the newest statement, so
//! that a client knows when to request it.

use std::sync::Arc;
use std::time::Duration;

use curator_client::authority_ring::AuthorityRing;
use curator_client::clock::Clock;
use curator_client::node::Node;
use curator_client::node_id::NodeId;
use etcd::client::Client;
use etcd::election_view::CandidateRole;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use futures::{Stream, StreamExt as _};
use proto::curator::v1 as wire;
use proto::curator::v1::leader_server;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::service::leader_context::ResponseStream;
use crate::service::statements::{CachedStatement, StatementCache};

/// How often the record of the leader is listed for each client that follows the leader, on top of its watch. It is
/// rare, because there are as many of these clients as nodes. A node that misses a new address finds the old one dead,
/// and queries again.
const LISTING: Duration = Duration::from_mins(1);

/// The address of a node and the port of its curator. `None` before the node has reported a status; the port is `None`
/// while no curator runs there.
type CuratorPlace = Option<(String, Option<u16>)>;

/// What changes in the messages to a client.
enum LeaderChange {
    /// Where the leader is.
    Place(CuratorPlace),
    /// The number of the newest statement.
    Statement(u64),
}

#[derive(Clone, Debug)]
pub(super) struct LeaderService {
    pub(super) node_id: NodeId,
    /// The port that this curator listens on.
    pub(super) port: u16,
    /// The authorities of the cluster.
    pub(super) authorities: watch::Receiver<Arc<AuthorityRing>>,
    /// How often the cluster was restored.
    pub(super) epoch: u64,
    /// The role of this curator in the election.
    pub(super) role: watch::Receiver<CandidateRole>,
    /// The etcd client to read the leader's record with.
    pub(super) client: Client,
    /// The newest statement of the cluster's authority.
    pub(super) statements: Arc<StatementCache>,
    /// The clock of this curator.
    pub(super) clock: Clock,
    /// Cancelled when this curator changes its role.
    pub(super) ended: CancellationToken,
}

#[tonic::async_trait]
impl leader_server::Leader for LeaderService {
    type WatchStream = ResponseStream<wire::WatchLeaderResponse>;

    async fn watch(
        &self,
        _: Request<wire::WatchLeaderRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let standing = self.role.borrow().clone();
        let (leader, own) = match standing {
            CandidateRole::Leader(_) => (self.node_id, true),
            CandidateRole::Follower(leader) => (leader.name.parse().map_err(|_| leader_unknown())?, false),
            CandidateRole::Unknown => return Err(leader_unknown()),
        };
        let places = watch_curator_address(&self.client, leader)?;
        let (this, port, epoch) = (self.node_id, self.port, self.epoch);
        let answers = with_statement_number(places, self.statements.subscribe());
        let answers = answers.map(move |(place, statement_number)| {
            let (leader_address, leader_port) = match place {
                Some(place) if own => (place.0, port),
                Some((address, Some(port))) => (address, port),
                // The client reached this curator, which leads, and can use the same address again.
                None if own => (String::new(), port),
                Some((_, None)) | None => return Err(leader_address_unknown(leader)),
            };
            Ok(wire::WatchLeaderResponse {
                leader_node_id: leader.to_string(),
                leader_address,
                leader_port: leader_port.into(),
                responding_node_id: this.to_string(),
                epoch,
                statement_number,
            })
        });
        // End the stream after the first error, such as a leader that has withdrawn its address.
        let answers = end_after_error(answers);
        let ended = self.ended.clone();
        let end = futures::stream::once(async move {
            ended.cancelled().await;
            Err(leader_unknown())
        });
        Ok(Response::new(Box::pin(end_after_error(futures::stream::select(answers, end)))))
    }

    async fn get_ca_certificate(
        &self,
        _: Request<wire::GetCaCertificateRequest>,
    ) -> Result<Response<wire::GetCaCertificateResponse>, Status> {
        let ca_certificate = self.authorities.borrow().signer.anchor().certificate.clone();
        Ok(Response::new(wire::GetCaCertificateResponse { ca_certificate }))
    }

    async fn get_statement(
        &self,
        _: Request<wire::GetStatementRequest>,
    ) -> Result<Response<wire::GetStatementResponse>, Status> {
        let none = || Status::not_found("the authority of this cluster has made no statement yet");
        let statement = self.statements.current().ok_or_else(none)?.signed.clone();
        let time_ms = self.clock.now().timestamp_millis();
        Ok(Response::new(wire::GetStatementResponse { statement: Some(statement), time_ms }))
    }
}

fn leader_unknown() -> Status {
    Status::unavailable("this curator does not know who leads; ask another one, or ask again")
}

fn leader_address_unknown(leader: NodeId) -> Status {
    Status::unavailable(format!("{leader} leads and has not reported where its curator listens; ask again"))
}

/// The address of a node and the port of its curator, now and whenever they change.
fn watch_curator_address(
    client: &Client,
    node: NodeId,
) -> Result<impl Stream<Item = CuratorPlace> + Send + use<>, Status> {
    let key = Node::etcd_key(&node).map_err(|error| Status::internal(error.to_string()))?;
    let follower = KeyWatcher::with_listing_interval(client, KeySelector::One(key), LISTING, Node::decode);
    Ok(futures::stream::unfold(
        (follower, None, false),
        |(mut follower, mut last, mut notified)| async move {
            loop {
                let place = match follower.next_event().await {
                    Ok(KeyEvent::Put { value, .. }) => {
                        value.status.map(|status| (status.address.to_string(), status.curator_port))
                    }
                    Ok(KeyEvent::Deleted { .. }) => None,
                    Ok(KeyEvent::BacklogDone) if !notified => None,
                    Ok(KeyEvent::BacklogDone) => continue,
                    Err(error) => {
                        tracing::error!(%error, "the address of the leader cannot be read");
                        None
                    }
                };
                if !notified || place != last {
                    (notified, last) = (true, place.clone());
                    return Some((place, (follower, last, notified)));
                }
            }
        },
    ))
}

/// Adds the number of the newest statement to each place, and repeats the last place when that number changes.
fn with_statement_number(
    places: impl Stream<Item = CuratorPlace> + Send,
    mut statements: watch::Receiver<Option<Arc<CachedStatement>>>,
) -> impl Stream<Item = (CuratorPlace, u64)> + Send {
    let first = statement_number(statements.borrow_and_update().as_deref());
    let numbers = futures::stream::unfold(statements, |mut statements| async move {
        statements.changed().await.ok()?;
        let number = statement_number(statements.borrow_and_update().as_deref());
        Some((LeaderChange::Statement(number), statements))
    });
    futures::stream::select(places.map(LeaderChange::Place), numbers)
        .scan((None, first), |(place, number), change| {
            match change {
                LeaderChange::Place(new) => *place = Some(new),
                LeaderChange::Statement(new) => *number = new,
            }
            // There is nothing to send before the first place.
            std::future::ready(Some(place.clone().map(|place| (place, *number))))
        })
        .filter_map(std::future::ready)
}

fn statement_number(statement: Option<&CachedStatement>) -> u64 {
    statement.map_or(0, |statement| statement.number)
}

fn end_after_error<T: Send>(
    stream: impl Stream<Item = Result<T, Status>> + Send,
) -> impl Stream<Item = Result<T, Status>> + Send {
    stream.scan(false, |over, answer| {
        let before = std::mem::replace(over, answer.is_err());
        std::future::ready((!before).then_some(answer))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_new_statement_is_announced_with_the_last_address() {
        let (places, receiver) = tokio::sync::mpsc::unbounded_channel::<CuratorPlace>();
        let (sender, statements) = watch::channel(None);
        let statement =
            |number| Some(Arc::new(CachedStatement { number, signed: wire::SignedStatement::default() }));
        let at = |port| Some(("10.0.0.1".to_owned(), Some(port)));
        let places_received = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|place| (place, receiver))
        });
        let mut answers = Box::pin(with_statement_number(places_received, statements));
        let pending = futures::poll!(answers.next());
        assert!(pending.is_pending(), "no place is known yet");
        places.send(at(1)).unwrap();
        assert_eq!(answers.next().await, Some((at(1), 0)));
        sender.send_replace(statement(7));
        assert_eq!(answers.next().await, Some((at(1), 7)));
        places.send(at(2)).unwrap();
        assert_eq!(answers.next().await, Some((at(2), 7)));
        sender.send_replace(statement(8));
        assert_eq!(answers.next().await, Some((at(2), 8)));
        // A message for each change, and none without one.
        assert!(futures::poll!(answers.next()).is_pending());
    }
}
