//! How a machine becomes a node, and comes back as one.
//!
//! Each of these is answered from records and writes them first, so that one whose answer was lost may ask again: it
//! is told the same, with another certificate for the same key.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::curator::life_cycle::{self, Outcome, Registration};
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Caller, Leading};
use crate::curator::service::store::{put, put_node};
use crate::curator::tickets::{self, Secret};
use crate::etcd::key_space::TICKETS;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::registration_server;

/// How long a node that waits for being approved waits between two questions.
const ASK_AGAIN_MS: u64 = 1000;

/// The service.
#[derive(Clone, Debug)]
pub struct RegistrationService(pub Arc<Leading>);

#[tonic::async_trait]
impl registration_server::Registration for RegistrationService {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Result<Response<wire::RegisterResponse>, Status> {
        let key = Caller::of(&request)?.key()?;
        let asked = request.into_inner();
        let secret = Secret::from_slice(&asked.ticket).map_err(Failure::invalid)?;
        let machine = match asked.machine_id.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| Failure::invalid("the machine id is no UUID"))?),
        };
        let registration = Registration { key, machine, labels: asked.labels, ticket: secret.id() };
        let (leading, id) = (&self.0, NodeId::of(&key));
        let node = leading.store.decide(|| async {
            let now = leading.clock.now();
            let ticket = leading.store.ticket(registration.ticket).await?.ok_or(tickets::Refusal::Unknown)?;
            let known = leading.store.node(&id).await?;
            let registered =
                known.as_ref().is_some_and(|known| known.value.ticket == Some(registration.ticket));
            let redeemed = ticket.value.redeem(&secret, id, registered, now)?;
            let outcome = life_cycle::register(known.as_ref().map(|known| &known.value), &registration, now)?;
            if let Outcome::Changed(node) = &outcome {
                // With the ticket as it was read, or one that was revoked meanwhile would let somebody in.
                let ticket_key = TICKETS.key(registration.ticket)?;
                let changes = [
                    put_node(node, known.as_ref().map(|known| known.revision))?,
                    put(ticket_key, redeemed.encode(), Some(&ticket)),
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
        let key = Caller::of(&request)?.key()?;
        let (leading, id) = (&self.0, NodeId::of(&key));
        let committed = leading.store.decide(|| async {
            let known = leading.store.node(&id).await?;
            let revoked = leading.store.is_revoked(id).await?;
            let now = leading.clock.now();
            let outcome = life_cycle::commit(known.as_ref().map(|known| &known.value), &key, revoked, now)?;
            let Some(outcome) = outcome else { return Ok(None) };
            let (issued, kept) = leading.issue_node(&key)?;
            let mut changes = vec![kept];
            if let Outcome::Changed(node) = &outcome {
                changes.push(put_node(node, known.as_ref().map(|known| known.revision))?);
            }
            leading.store.write(&changes).await?;
            if matches!(outcome, Outcome::Changed(_)) {
                tracing::info!(node = %id, "a node is part of the cluster");
            }
            Ok(Some((issued.certificate, outcome.node().clone())))
        });
        let answer = match committed.await? {
            None => Answer::AwaitingApproval(wire::AwaitingApproval { ask_again_after_ms: ASK_AGAIN_MS }),
            Some((certificate, node)) => Answer::Membership(membership(leading, certificate, &node)),
        };
        Ok(Response::new(wire::CommitResponse { result: Some(answer) }))
    }

    async fn join(
        &self,
        request: Request<wire::JoinRequest>,
    ) -> Result<Response<wire::JoinResponse>, Status> {
        let key = Caller::of(&request)?.key()?;
        let (leading, id) = (&self.0, NodeId::of(&key));
        let known = leading.store.node(&id).await?.map(|stored| stored.value);
        let revoked = leading.store.is_revoked(id).await?;
        let node = life_cycle::join(known.as_ref(), &key, revoked).map_err(Failure::from)?;
        let (issued, kept) = leading.issue_node(&key)?;
        leading.store.write(&[kept]).await?;
        let membership = membership(leading, issued.certificate, node);
        Ok(Response::new(wire::JoinResponse { membership: Some(membership) }))
    }
}

fn membership(leading: &Leading, certificate: Vec<u8>, node: &Node) -> wire::Membership {
    wire::Membership { certificate, node: Some(node.to_wire()), directory: Some(leading.directory()) }
}
