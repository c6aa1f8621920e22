//! gRPC service Registration: register, commit, join.
//!
//! Each response is built from records that are written first. So a node that lost a response may repeat the call: it
//! gets the same response, with another certificate for the same key.
//!
//! The callers prove a key that anyone can make, so the calls and the certificates of one key are bounded
//! ([`key_limits`](crate::key_limits)).

use std::sync::{Arc, Mutex, PoisonError};

use curator_client::node::{Node, NodeState};
use curator_client::node_id::{NodeId, PublicKey};
use etcd::key_space::TICKETS;
use proto::curator::v1 as wire;
use proto::curator::v1::registration_server;
use tonic::{Request, Response, Status};

use crate::key_limits::{KeyLimits, check_certificates_of_a_day};
use crate::node_lifecycle::{self, NodeRegistration, NodeUpdate};
use crate::service::error::ServiceError;
use crate::service::gate_monitor::GateMonitor;
use crate::service::leader_context::{Caller, LeaderContext};
use crate::service::store::{node_change, record_change};
use crate::tickets::{self, TicketSecret};

/// How long a node waits before it calls again while it is not approved, in milliseconds.
const RETRY_AFTER_MS: u64 = 1000;

#[derive(Clone, Debug)]
pub(super) struct RegistrationService {
    leading: Arc<LeaderContext>,
    limits: Arc<Mutex<KeyLimits>>,
    gate: GateMonitor,
}

impl RegistrationService {
    /// The service of a leadership. `gate` counts the calls that are rejected because their key makes too many.
    pub(super) fn new(leading: Arc<LeaderContext>, gate: GateMonitor) -> Self {
        Self { leading, limits: Arc::default(), gate }
    }

    /// The key of the caller, unless it calls too often.
    fn admit_key<T>(&self, request: &Request<T>) -> Result<PublicKey, Status> {
        let key = Caller::from_request(request)?.require_key()?;
        let now = self.leading.clock.monotonic();
        let admitted = self.limits.lock().unwrap_or_else(PoisonError::into_inner).admit(key, now);
        if let Err(rejection) = admitted {
            self.gate.count_rejected_call();
            return Err(ServiceError::from(rejection).into());
        }
        Ok(key)
    }

    /// Checks that the key of this node may get another certificate. The caller holds the lock of membership until the
    /// certificate is recorded: two calls at the same time would count the same certificates.
    async fn check_certificates(&self, node: NodeId) -> Result<(), ServiceError> {
        let stored = self.leading.store.credentials().await?;
        let issued = stored.iter().map(|credential| &credential.value);
        Ok(check_certificates_of_a_day(issued, node, self.leading.clock.now())?)
    }
}

#[tonic::async_trait]
impl registration_server::Registration for RegistrationService {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Result<Response<wire::RegisterResponse>, Status> {
        let key = self.admit_key(&request)?;
        let body = request.into_inner();
        let secret = TicketSecret::from_slice(&body.ticket).map_err(ServiceError::invalid_argument)?;
        let machine = match body.machine_id.as_str() {
            "" => None,
            text => {
                Some(text.parse().map_err(|_| ServiceError::invalid_argument("the machine id is no UUID"))?)
            }
        };
        let registration = NodeRegistration { key, machine, labels: body.labels, ticket: secret.id() };
        let (leading, id) = (&self.leading, NodeId::from_key(&key));
        let node = leading.store.retry_on_conflict(|| async {
            let now = leading.clock.now();
            let ticket = leading.store.ticket(registration.ticket).await?.ok_or(tickets::TicketError::Unknown)?;
            let known = leading.store.node(&id).await?;
            let registered =
                known.as_ref().is_some_and(|known| known.value.ticket == Some(registration.ticket));
            let redeemed = ticket.value.redeem(&secret, id, registered, now)?;
            let outcome = node_lifecycle::register_node(known.as_ref().map(|known| &known.value), &registration, now)?;
            if let NodeUpdate::Changed(node) = &outcome {
                // Write the ticket with the revision it was read at; otherwise a ticket revoked meanwhile would admit a
                // node.
                let ticket_key = TICKETS.key(registration.ticket)?;
                let changes = [
                    node_change(node, known.as_ref().map(|known| known.revision))?,
                    record_change(ticket_key, redeemed.encode(), Some(&ticket)),
                ];
                leading.store.write(&changes).await?;
                if known.is_none() {
                    tracing::info!(node = %id, ticket = %registration.ticket, "a machine registered as a node");
                }
            }
            Ok(outcome.node().clone())
        });
        let node = node.await?;
        Ok(Response::new(wire::RegisterResponse {
            node_id: id.to_string(),
            state: node.state.to_wire().into(),
            directory: Some(leading.directory()),
        }))
    }

    async fn commit(
        &self,
        request: Request<wire::CommitRequest>,
    ) -> Result<Response<wire::CommitResponse>, Status> {
        use wire::commit_response::Result as Answer;
        let key = self.admit_key(&request)?;
        let (leading, id) = (&self.leading, NodeId::from_key(&key));
        // Many nodes may wait for their approval, and call each second. They keep nobody from changing members.
        let waits = leading.store.node(&id).await?.is_some_and(|known| known.value.state == NodeState::New);
        let _alone = if waits { None } else { Some(leading.lock_membership().await) };
        let committed = leading.store.retry_on_conflict(|| async {
            let known = leading.store.node(&id).await?;
            let revoked = leading.store.is_node_revoked(id).await?;
            let now = leading.clock.now();
            let outcome =
                node_lifecycle::commit_node(known.as_ref().map(|known| &known.value), &key, revoked, now)?;
            // One that is approved at this moment calls again.
            let Some(outcome) = outcome.filter(|_| !waits) else { return Ok(None) };
            self.check_certificates(id).await?;
            let (issued, kept) = leading.issue_node_certificate(&key)?;
            let mut changes = vec![kept];
            if let NodeUpdate::Changed(node) = &outcome {
                changes.push(node_change(node, known.as_ref().map(|known| known.revision))?);
            }
            leading.store.write(&changes).await?;
            if matches!(outcome, NodeUpdate::Changed(_)) {
                tracing::info!(node = %id, "a node is part of the cluster");
            }
            Ok(Some((issued.certificate, outcome.node().clone())))
        });
        let answer = match committed.await? {
            None => Answer::AwaitingApproval(wire::AwaitingApproval { retry_after_ms: RETRY_AFTER_MS }),
            Some((certificate, node)) => Answer::Membership(membership_response(leading, certificate, &node)),
        };
        Ok(Response::new(wire::CommitResponse { result: Some(answer) }))
    }

    async fn join(
        &self,
        request: Request<wire::JoinRequest>,
    ) -> Result<Response<wire::JoinResponse>, Status> {
        let key = self.admit_key(&request)?;
        let (leading, id) = (&self.leading, NodeId::from_key(&key));
        let _alone = leading.lock_membership().await;
        let known = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_node_revoked(id).await?;
        let node = node_lifecycle::check_join(known.as_ref(), &key, revoked).map_err(ServiceError::from)?;
        self.check_certificates(id).await?;
        let (issued, kept) = leading.issue_node_certificate(&key)?;
        leading.store.write(&[kept]).await?;
        let membership = membership_response(leading, issued.certificate, node);
        Ok(Response::new(wire::JoinResponse { membership: Some(membership) }))
    }
}

fn membership_response(leading: &LeaderContext, certificate: Vec<u8>, node: &Node) -> wire::Membership {
    wire::Membership { certificate, node: Some(node.to_wire()), directory: Some(leading.directory()) }
}
