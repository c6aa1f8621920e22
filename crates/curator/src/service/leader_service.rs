//! gRPC service Leader: who leads, and where; served by every curator.
//!
//! A follower reads the leader's address from the leader's own record, and sends it again whenever it changes. It ends
//! the stream when it does not know the leader or its address.

use std::sync::Arc;
use std::time::Duration;

use curator_client::node::Node;
use curator_client::node_id::NodeId;
use etcd::client::Client;
use etcd::election_view::CandidateRole;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use futures::StreamExt as _;
use proto::curator::v1 as wire;
use proto::curator::v1::leader_server;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::service::leader_context::ResponseStream;

/// How often the record of the leader is listed for each client that follows the leader, on top of its watch. It is
/// rare, because there are as many of these clients as nodes. A node that misses a new address finds the old one dead,
/// and queries again.
const LISTING: Duration = Duration::from_mins(1);

#[derive(Clone, Debug)]
pub(super) struct LeaderService {
    pub(super) node_id: NodeId,
    /// The port that this curator listens on.
    pub(super) port: u16,
    /// The certificate of the cluster's authority, DER.
    pub(super) ca_certificate: Arc<[u8]>,
    /// How often the cluster was restored.
    pub(super) epoch: u64,
    /// The role of this curator in the election.
    pub(super) role: watch::Receiver<CandidateRole>,
    /// The etcd client to read the leader's record with.
    pub(super) client: Client,
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
        let answers = places.filter_map(move |place| async move {
            let (leader_address, leader_port) = match place {
                Some(place) if own => (place.0, port),
                Some((address, Some(port))) => (address, port),
                // The client reached this curator, which leads, and can use the same address again.
                None if own => (String::new(), port),
                Some((_, None)) | None => return Some(Err(leader_address_unknown(leader))),
            };
            Some(Ok(wire::WatchLeaderResponse {
                leader_node_id: leader.to_string(),
                leader_address,
                leader_port: leader_port.into(),
                responding_node_id: this.to_string(),
                epoch,
                statement_number: 0,
            }))
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
        Ok(Response::new(wire::GetCaCertificateResponse { ca_certificate: self.ca_certificate.to_vec() }))
    }

    async fn get_statement(
        &self,
        _: Request<wire::GetStatementRequest>,
    ) -> Result<Response<wire::GetStatementResponse>, Status> {
        Err(Status::not_found("the authority of this cluster has made no statement yet"))
    }
}

fn leader_unknown() -> Status {
    Status::unavailable("this curator does not know who leads; ask another one, or ask again")
}

fn leader_address_unknown(leader: NodeId) -> Status {
    Status::unavailable(format!("{leader} leads and has not reported where its curator listens; ask again"))
}

/// The address of a node and the port of its curator, now and whenever they change. `None` before the node has reported
/// a status; the port is `None` while no curator runs there.
fn watch_curator_address(
    client: &Client,
    node: NodeId,
) -> Result<impl futures::Stream<Item = Option<(String, Option<u16>)>> + Send + use<>, Status> {
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

fn end_after_error<T: Send>(
    stream: impl futures::Stream<Item = Result<T, Status>> + Send,
) -> impl futures::Stream<Item = Result<T, Status>> + Send {
    stream.scan(false, |over, answer| {
        let before = std::mem::replace(over, answer.is_err());
        std::future::ready((!before).then_some(answer))
    })
}
