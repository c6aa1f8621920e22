//! Who leads: the one service of every curator.
//!
//! A follower reads where the leader is to be found from the leader's own record, and says it again whenever that
//! changes. It ends the stream rather than say what it does not know.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::service::leader::Answers;
use crate::etcd::client::Client;
use crate::etcd::election::Standing;
use crate::etcd::namespace::Keys;
use crate::etcd::value::{Event, Follower};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::leader_server;

/// How often the record of the leader is listed for each node that follows the leader, on top of its watch. Rarely: there
/// are as many of these followers as nodes. A node that misses a new address finds the old one dead, and asks again.
const LISTING: Duration = Duration::from_mins(1);

/// Answers who leads.
#[derive(Clone, Debug)]
pub struct WhoLeads {
    /// The node of this curator.
    pub own: NodeId,
    /// The port it listens on.
    pub port: u16,
    /// The certificate of the cluster's authority, DER.
    pub ca_certificate: Arc<[u8]>,
    /// How often the cluster was restored.
    pub epoch: u64,
    /// What this curator is.
    pub standing: watch::Receiver<Standing>,
    /// Where the records are.
    pub client: Client,
    /// Cancelled when this curator is something else.
    pub ended: CancellationToken,
}

#[tonic::async_trait]
impl leader_server::Leader for WhoLeads {
    type WatchStream = Answers<wire::WatchLeaderResponse>;

    async fn watch(
        &self,
        _: Request<wire::WatchLeaderRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let standing = self.standing.borrow().clone();
        let (leader, own) = match standing {
            Standing::Leader(_) => (self.own, true),
            Standing::Follower(leader) => (leader.name.parse().map_err(|_| unknown())?, false),
            Standing::Neither => return Err(unknown()),
        };
        let places = places(&self.client, leader)?;
        let (this, port, epoch) = (self.own, self.port, self.epoch);
        let answers = places.filter_map(move |place| async move {
            let (leader_address, leader_port) = match place {
                Some(place) if own => (place.0, port),
                Some((address, Some(port))) => (address, port),
                // The one who asks reached us, and so the leader.
                None if own => (String::new(), port),
                Some((_, None)) | None => return Some(Err(silent(leader))),
            };
            Some(Ok(wire::WatchLeaderResponse {
                leader_node_id: leader.to_string(),
                leader_address,
                leader_port: leader_port.into(),
                this_node_id: this.to_string(),
                epoch,
            }))
        });
        // A leader that has said where it is no longer is the last that is said.
        let answers = until_failure(answers);
        let ended = self.ended.clone();
        let end = futures::stream::once(async move {
            ended.cancelled().await;
            Err(unknown())
        });
        Ok(Response::new(Box::pin(until_failure(futures::stream::select(answers, end)))))
    }

    async fn get_ca_certificate(
        &self,
        _: Request<wire::GetCaCertificateRequest>,
    ) -> Result<Response<wire::GetCaCertificateResponse>, Status> {
        Ok(Response::new(wire::GetCaCertificateResponse { ca_certificate: self.ca_certificate.to_vec() }))
    }
}

fn unknown() -> Status {
    Status::unavailable("this curator does not know who leads; ask another one, or ask again")
}

fn silent(leader: NodeId) -> Status {
    Status::unavailable(format!("{leader} leads and has not said yet where its curator listens; ask again"))
}

/// Where a node's curator is to be found, now and whenever that changes: an address, and a port once it said one. `None`
/// while it has said nothing.
fn places(
    client: &Client,
    node: NodeId,
) -> Result<impl futures::Stream<Item = Option<(String, Option<u16>)>> + Send + use<>, Status> {
    let key = Node::etcd_key(&node).map_err(|error| Status::internal(error.to_string()))?;
    let follower = Follower::with_listing_interval(client, Keys::One(key), LISTING, Node::decode);
    Ok(futures::stream::unfold((follower, None, false), |(mut follower, mut last, mut told)| async move {
        loop {
            let place = match follower.next().await {
                Ok(Event::Put { value, .. }) => {
                    value.status.map(|status| (status.address.to_string(), status.curator_port))
                }
                Ok(Event::Deleted { .. }) => None,
                Ok(Event::BacklogDone) if !told => None,
                Ok(Event::BacklogDone) => continue,
                Err(error) => {
                    tracing::error!(%error, "where the leader is to be found cannot be read");
                    None
                }
            };
            if !told || place != last {
                (told, last) = (true, place.clone());
                return Some((place, (follower, last, told)));
            }
        }
    }))
}

fn until_failure<T: Send>(
    stream: impl futures::Stream<Item = Result<T, Status>> + Send,
) -> impl futures::Stream<Item = Result<T, Status>> + Send {
    stream.scan(false, |over, answer| {
        let before = std::mem::replace(over, answer.is_err());
        std::future::ready((!before).then_some(answer))
    })
}
