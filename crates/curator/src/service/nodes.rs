//! gRPC service Nodes: watches, status reports, heartbeats, certificate renewal.

use std::collections::VecDeque;
use std::sync::Arc;

use curator_client::node_id::NodeId;
use curator_client::node_status::NodeStatus;
use futures::{Stream, StreamExt as _};
use prost::Message as _;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_server;
use tonic::{Request, Response, Status, Streaming};

use crate::credential::{CertificateKind, check_certificate_count};
use crate::node_health;
use crate::node_lifecycle::{self, NodeUpdate};
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext, ResponseStream};
use crate::service::node_addresses::recorded_address;
use crate::service::node_watch_cache::NodeEvent;
use crate::service::store::node_change;

/// Approximate size of one message of a watch, in bytes; a message exceeds it by less than one node.
const MESSAGE_BYTES: usize = 2 << 20;

#[derive(Clone, Debug)]
pub(super) struct NodesService(pub(super) Arc<LeaderContext>);

impl NodesService {
    /// Checks that a node may get another certificate of this kind. The caller holds the lock of membership until the
    /// certificate is recorded: two calls at the same time would count the same certificates.
    async fn check_certificate_count(&self, node: NodeId, kind: CertificateKind) -> Result<(), ServiceError> {
        let stored = self.0.store.credentials().await?;
        let issued = stored.iter().map(|credential| &credential.value);
        Ok(check_certificate_count(issued, node, kind, self.0.clock.now())?)
    }
}

#[tonic::async_trait]
impl nodes_server::Nodes for NodesService {
    type WatchStream = ResponseStream<wire::WatchResponse>;
    type WatchAllStream = ResponseStream<wire::WatchAllResponse>;
    type HeartbeatStream = ResponseStream<wire::HeartbeatResponse>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = Caller::from_request(&request)?;
        let id = parse_node_id(&request.get_ref().node_id)?;
        let watching = watch_node(self.0.clone(), id);
        Ok(Response::new(self.0.guard_stream(&caller, watching)))
    }

    async fn watch_all(
        &self,
        request: Request<wire::WatchAllRequest>,
    ) -> Result<Response<Self::WatchAllStream>, Status> {
        let caller = Caller::from_request(&request)?;
        Ok(Response::new(self.0.guard_stream(&caller, watch_all_nodes(self.0.clone()))))
    }

    async fn update_status(
        &self,
        request: Request<wire::UpdateStatusRequest>,
    ) -> Result<Response<wire::UpdateStatusResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let id = parse_node_id(&body.node_id)?;
        caller.authorize_node(id)?;
        let leading = &self.0;
        let status = body.status.unwrap_or_default();
        let status = NodeStatus::from_report(&status, leading.clock.now()).map_err(|fault| {
            ServiceError::invalid_argument(format!("the status of {id} was not taken: {fault}"))
        })?;
        // Of two nodes that claim one address at the same time, one is first.
        let cached = leading.cache.records().nodes.get(&id).and_then(|node| recorded_address(node));
        let _alone = match cached {
            Some(recorded) if recorded == status.address => None,
            _ => Some(leading.lock_membership().await),
        };
        let written = leading.store.retry_on_conflict(|| async {
            let known = leading.store.node(&id).await?;
            let outcome =
                node_lifecycle::apply_status_report(known.as_ref().map(|known| &known.value), id, &status)?;
            if let (NodeUpdate::Changed(node), Some(known)) = (&outcome, &known) {
                leading.check_reported_address(&caller, &known.value, status.address).await?;
                leading.store.write(&[node_change(node, Some(known.revision))?]).await?;
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
        let caller = Caller::from_request(&request)?;
        let id = caller.require_node()?;
        let (leading, source) = (self.0.clone(), caller.remote.ip());
        let interval_ms = u64::try_from(node_health::HEARTBEAT_INTERVAL.as_millis()).unwrap_or(u64::MAX);
        let answers = request.into_inner().map(move |beat| {
            beat.map(|wire::HeartbeatRequest {}| {
                let mut heartbeats = leading.lock_heartbeats();
                heartbeats.record_heartbeat(id, leading.clock.monotonic());
                heartbeats.record_source(id, source);
                wire::HeartbeatResponse { interval_ms }
            })
        });
        Ok(Response::new(self.0.guard_stream(&caller, answers)))
    }

    async fn renew_certificate(
        &self,
        request: Request<wire::RenewCertificateRequest>,
    ) -> Result<Response<wire::RenewCertificateResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let id = caller.require_node()?;
        let leading = &self.0;
        let _alone = leading.lock_membership().await;
        let node = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_node_revoked(id).await?;
        let key =
            node.as_ref().ok_or(node_lifecycle::LifecycleError::Unknown(id)).map_err(ServiceError::from)?.key;
        node_lifecycle::check_join(node.as_ref(), &key, revoked).map_err(ServiceError::from)?;
        self.check_certificate_count(id, CertificateKind::Node).await?;
        let (issued, change) = leading.issue_node_certificate(&key)?;
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
        let caller = Caller::from_request(&request)?;
        let id = caller.require_node()?;
        let leading = &self.0;
        let _alone = leading.lock_membership().await;
        let node = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_node_revoked(id).await?;
        let known =
            node.as_ref().ok_or(node_lifecycle::LifecycleError::Unknown(id)).map_err(ServiceError::from)?;
        let key = known.key;
        let address =
            node_lifecycle::etcd_peer_address(node.as_ref(), &key, revoked).map_err(ServiceError::from)?;
        leading.check_certified_address(&caller, known, address).await?;
        let role = node.as_ref().and_then(|node| node.roles.consensus_member.as_ref());
        let member = role.map_or(0, |role| role.member_id);
        self.check_certificate_count(id, CertificateKind::EtcdPeer { member }).await?;
        let (issued, change) = leading.issue_etcd_peer_certificate(&key, address, member).await?;
        let revocation_list = leading.peer_revocation_list().await?;
        // Recorded before it is handed out: a serial number that nobody knows could never be revoked.
        leading.store.write(&[change]).await?;
        let certificate = issued.certificate;
        Ok(Response::new(wire::IssuePeerCertificateResponse { certificate, revocation_list }))
    }

    async fn issue_curator_certificate(
        &self,
        request: Request<wire::IssueCuratorCertificateRequest>,
    ) -> Result<Response<wire::IssueCuratorCertificateResponse>, Status> {
        let id = Caller::from_request(&request)?.require_node()?;
        let leading = &self.0;
        let _alone = leading.lock_membership().await;
        let node = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_node_revoked(id).await?;
        let key =
            node.as_ref().ok_or(node_lifecycle::LifecycleError::Unknown(id)).map_err(ServiceError::from)?.key;
        node_lifecycle::check_curator(node.as_ref(), &key, revoked).map_err(ServiceError::from)?;
        self.check_certificate_count(id, CertificateKind::Curator).await?;
        let (issued, change) = leading.issue_curator_certificate(&key)?;
        // The serial number is durable before anybody may see the certificate.
        leading.store.write(&[change]).await?;
        Ok(Response::new(wire::IssueCuratorCertificateResponse { certificate: issued.certificate }))
    }
}

/// Parses the id of a node in a request.
pub(super) fn parse_node_id(text: &str) -> Result<NodeId, ServiceError> {
    text.parse().map_err(|error: curator_client::node_id::InvalidNodeId| {
        ServiceError::invalid_argument(error.to_string())
    })
}

fn to_wire_event(news: &NodeEvent) -> wire::NodeEvent {
    let event = match news {
        NodeEvent::Present(node) => wire::node_event::Event::Present(node.to_wire()),
        NodeEvent::Deleted(id) => wire::node_event::Event::Deleted(id.to_string()),
    };
    wire::NodeEvent { event: Some(event) }
}

/// Watches one node: its state, if it exists, and every change.
fn watch_node(
    leading: Arc<LeaderContext>,
    id: NodeId,
) -> impl Stream<Item = Result<wire::WatchResponse, Status>> {
    let changes = leading.cache.subscribe_changes();
    // Every existing node has changed since change zero. The deletion of a node before the watch began is not sent.
    let start = (leading, changes, 0, true);
    futures::stream::unfold(start, move |(leading, mut changes, mut number, mut first)| async move {
        loop {
            let (news, latest) = {
                let seen = leading.cache.records();
                (seen.nodes.event_for(&id, number), seen.nodes.latest_change())
            };
            let first = std::mem::replace(&mut first, false);
            number = latest;
            match news {
                Some(NodeEvent::Deleted(_)) if first => {}
                Some(news) => {
                    let answer = wire::WatchResponse { event: Some(to_wire_event(&news)) };
                    return Some((Ok(answer), (leading, changes, number, false)));
                }
                None => {}
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    })
}

/// The state of a watch of all nodes.
struct WatchAllState {
    leading: Arc<LeaderContext>,
    changes: tokio::sync::watch::Receiver<u64>,
    pending: VecDeque<NodeEvent>,
    last_sent: u64,
    /// Whether all nodes that existed at the beginning have been sent.
    complete: bool,
}

/// Watches all nodes: first those that exist, in parts, the last of which is marked, and then every change.
fn watch_all_nodes(
    leading: Arc<LeaderContext>,
) -> impl Stream<Item = Result<wire::WatchAllResponse, Status>> {
    let changes = leading.cache.subscribe_changes();
    let (pending, number) = {
        let seen = leading.cache.records();
        (seen.nodes.nodes().cloned().map(NodeEvent::Present).collect(), seen.nodes.latest_change())
    };
    let state = WatchAllState { leading, changes, pending, last_sent: number, complete: false };
    futures::stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        while state.pending.is_empty() && state.complete {
            state.changes.changed().await.ok()?;
            let news = {
                let seen = state.leading.cache.records();
                seen.nodes.events_since(state.last_sent).map(|news| (news, seen.nodes.latest_change()))
            };
            match news {
                Ok((news, latest)) => (state.pending, state.last_sent) = (news.into(), latest),
                Err(error) => return Some((Err(Status::unavailable(error.to_string())), None)),
            }
        }
        let events = next_batch(&mut state.pending);
        let backlog_complete = !state.complete && state.pending.is_empty();
        state.complete |= backlog_complete;
        Some((Ok(wire::WatchAllResponse { events, backlog_complete }), Some(state)))
    })
}

/// As many events as fit into one message, at least one if any is pending.
fn next_batch(pending: &mut VecDeque<NodeEvent>) -> Vec<wire::NodeEvent> {
    let (mut events, mut size) = (Vec::new(), 0);
    while size < MESSAGE_BYTES
        && let Some(news) = pending.pop_front()
    {
        let event = to_wire_event(&news);
        size += event.encoded_len();
        events.push(event);
    }
    events
}
