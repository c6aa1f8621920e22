//! What nodes ask and say: watches, status, heartbeats, certificates.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};

use crate::curator::health;
use crate::curator::life_cycle::{self, Outcome};
use crate::curator::node;
use crate::curator::node_id::NodeId;
use crate::curator::service::chronicle::News;
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Answers, Caller, Leading};
use crate::curator::service::store::put_node;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_server;

/// About how large a message of a watch is; a node more or less.
const MESSAGE: usize = 2 << 20;

/// The service.
#[derive(Clone, Debug)]
pub struct NodesService(pub Arc<Leading>);

#[tonic::async_trait]
impl nodes_server::Nodes for NodesService {
    type WatchStream = Answers<wire::WatchResponse>;
    type WatchAllStream = Answers<wire::WatchAllResponse>;
    type HeartbeatStream = Answers<wire::HeartbeatResponse>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Caller::of(&request)?;
        let id = parse_node(&request.get_ref().node_id)?;
        let watching = one(self.0.clone(), id);
        Ok(Response::new(self.0.stream(&caller, watching)))
    }

    async fn watch_all(
        &self,
        request: Request<wire::WatchAllRequest>,
    ) -> Result<Response<Self::WatchAllStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(self.0.stream(&caller, all(self.0.clone()))))
    }

    async fn update_status(
        &self,
        request: Request<wire::UpdateStatusRequest>,
    ) -> Result<Response<wire::UpdateStatusResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let id = parse_node(&asked.node_id)?;
        caller.may_act_on(id)?;
        let leading = &self.0;
        let status = asked.status.unwrap_or_default();
        let status = node::Status::from_report(&status, leading.clock.now())
            .map_err(|fault| Failure::invalid(format!("the status of {id} was not taken: {fault}")))?;
        let written = leading.store.decide(|| async {
            let known = leading.store.node(&id).await?;
            let outcome = life_cycle::report(known.as_ref().map(|known| &known.value), id, &status)?;
            if let Outcome::Changed(node) = &outcome {
                let revision = known.as_ref().map(|known| known.revision);
                leading.store.write(&[put_node(node, revision)?]).await?;
            }
            Ok(())
        });
        written.await?;
        Ok(Response::new(wire::UpdateStatusResponse {}))
    }

    async fn heartbeat(
        &self,
        request: Request<Streaming<wire::HeartbeatRequest>>,
    ) -> Result<Response<Self::HeartbeatStream>, Status> {
        let caller = Caller::of(&request)?;
        let id = caller.node()?;
        let leading = self.0.clone();
        let interval_ms = u64::try_from(health::INTERVAL.as_millis()).unwrap_or(u64::MAX);
        let answers = request.into_inner().map(move |beat| {
            beat.map(|wire::HeartbeatRequest {}| {
                leading.heartbeats().hear(id, leading.clock.running());
                wire::HeartbeatResponse { interval_ms }
            })
        });
        Ok(Response::new(self.0.stream(&caller, answers)))
    }

    async fn renew_certificate(
        &self,
        request: Request<wire::RenewCertificateRequest>,
    ) -> Result<Response<wire::RenewCertificateResponse>, Status> {
        let caller = Caller::of(&request)?;
        let id = caller.node()?;
        let leading = &self.0;
        let node = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_revoked(id).await?;
        let key = node.as_ref().ok_or(life_cycle::Refusal::Unknown(id)).map_err(Failure::from)?.key;
        life_cycle::join(node.as_ref(), &key, revoked).map_err(Failure::from)?;
        let (issued, change) = leading.issue_node(&key)?;
        leading.store.write(&[change]).await?;
        Ok(Response::new(wire::RenewCertificateResponse {
            certificate: issued.certificate,
            directory: Some(leading.directory()),
        }))
    }

    async fn issue_peer_certificate(
        &self,
        request: Request<wire::IssuePeerCertificateRequest>,
    ) -> Result<Response<wire::IssuePeerCertificateResponse>, Status> {
        let id = Caller::of(&request)?.node()?;
        let leading = &self.0;
        let node = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_revoked(id).await?;
        let key = node.as_ref().ok_or(life_cycle::Refusal::Unknown(id)).map_err(Failure::from)?.key;
        let address = life_cycle::peer(node.as_ref(), &key, revoked).map_err(Failure::from)?;
        let (issued, change) = leading.issue_peer(&key, address)?;
        leading.store.write(&[change]).await?;
        Ok(Response::new(wire::IssuePeerCertificateResponse { certificate: issued.certificate }))
    }
}

/// Reads the id of a node in a request.
pub fn parse_node(text: &str) -> Result<NodeId, Failure> {
    text.parse().map_err(|error: crate::curator::node_id::NoNodeId| Failure::invalid(error.to_string()))
}

fn event(news: &News) -> wire::NodeEvent {
    let event = match news {
        News::Present(node) => wire::node_event::Event::Present(node.to_wire()),
        News::Deleted(id) => wire::node_event::Event::Deleted(id.to_string()),
    };
    wire::NodeEvent { event: Some(event) }
}

/// One node: as it is, if it is there, and whenever it changes.
fn one(leading: Arc<Leading>, id: NodeId) -> impl Stream<Item = Result<wire::WatchResponse, Status>> {
    let changes = leading.view.changes();
    // Every node that is there has changed since the zeroth change; one that was deleted before is not there.
    let start = (leading, changes, 0, true);
    futures::stream::unfold(start, move |(leading, mut changes, mut told, mut first)| async move {
        loop {
            let (news, latest) = {
                let seen = leading.view.seen();
                (seen.nodes.news_of(&id, told), seen.nodes.latest())
            };
            let first = std::mem::replace(&mut first, false);
            told = latest;
            match news {
                Some(News::Deleted(_)) if first => {}
                Some(news) => {
                    let answer = wire::WatchResponse { event: Some(event(&news)) };
                    return Some((Ok(answer), (leading, changes, told, false)));
                }
                None => {}
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// What a watch of all nodes has to tell before it asks again.
struct Telling {
    leading: Arc<Leading>,
    changes: tokio::sync::watch::Receiver<u64>,
    pending: VecDeque<News>,
    told: u64,
    /// Whether all that was there at the beginning has been told.
    complete: bool,
}

/// All nodes: those there are, in parts, the last of which says so, and then whatever changes.
fn all(leading: Arc<Leading>) -> impl Stream<Item = Result<wire::WatchAllResponse, Status>> {
    let changes = leading.view.changes();
    let (pending, told) = {
        let seen = leading.view.seen();
        (seen.nodes.present().cloned().map(News::Present).collect(), seen.nodes.latest())
    };
    let telling = Telling { leading, changes, pending, told, complete: false };
    futures::stream::unfold(Some(telling), |telling| async move {
        let mut telling = telling?;
        while telling.pending.is_empty() && telling.complete {
            telling.changes.changed().await.ok()?;
            let news = {
                let seen = telling.leading.view.seen();
                seen.nodes.since(telling.told).map(|news| (news, seen.nodes.latest()))
            };
            match news {
                Ok((news, latest)) => (telling.pending, telling.told) = (news.into(), latest),
                Err(error) => return Some((Err(Status::unavailable(error.to_string())), None)),
            }
        }
        let events = part(&mut telling.pending);
        let backlog_complete = !telling.complete && telling.pending.is_empty();
        telling.complete |= backlog_complete;
        Some((Ok(wire::WatchAllResponse { events, backlog_complete }), Some(telling)))
    })
}

/// As many as one message is to have, at least one if there is one.
fn part(pending: &mut VecDeque<News>) -> Vec<wire::NodeEvent> {
    let (mut events, mut size) = (Vec::new(), 0);
    while size < MESSAGE
        && let Some(news) = pending.pop_front()
    {
        let event = event(&news);
        size += event.encoded_len();
        events.push(event);
    }
    events
}
