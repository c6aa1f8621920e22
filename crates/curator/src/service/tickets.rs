//! gRPC service Tickets: create, list, revoke.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use curator_client::ticket_id::{InvalidTicketId, TicketId};
use etcd::key_space::TICKETS;
use proto::curator::v1 as wire;
use proto::curator::v1::tickets_server;
use tonic::{Code, Request, Response, Status};

use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext};
use crate::service::store::record_change;
use crate::tickets::{Ticket, TicketRequest, TicketSecret};

#[derive(Clone, Debug)]
pub(super) struct TicketsService(pub(super) Arc<LeaderContext>);

#[tonic::async_trait]
impl tickets_server::Tickets for TicketsService {
    async fn create(
        &self,
        request: Request<wire::CreateTicketRequest>,
    ) -> Result<Response<wire::CreateTicketResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let secret = TicketSecret::new(rand::random());
        let wanted = TicketRequest {
            created_by: caller.peer.to_string(),
            lifetime: Duration::from_millis(body.lifetime_ms),
            uses: body.max_uses,
            purpose: body.purpose,
        };
        let ticket = Ticket::new(&secret, wanted, self.0.clock.now()).map_err(ServiceError::from)?;
        let key = TICKETS.key(ticket.id()).map_err(ServiceError::from)?;
        self.0.store.write(&[record_change::<()>(key, ticket.encode(), None)]).await?;
        tracing::info!(ticket = %ticket.id(), actor = ticket.created_by, "a ticket was made");
        Ok(Response::new(wire::CreateTicketResponse {
            secret: secret.reveal().to_vec(),
            ticket: Some(ticket.to_wire()),
        }))
    }

    async fn list(
        &self,
        _: Request<wire::ListTicketsRequest>,
    ) -> Result<Response<wire::ListTicketsResponse>, Status> {
        let mut tickets = self.0.store.tickets().await?;
        tickets.sort_by_key(|ticket| (Reverse(ticket.value.created_at), ticket.value.id()));
        let tickets = tickets.iter().map(|ticket| ticket.value.to_wire()).collect();
        Ok(Response::new(wire::ListTicketsResponse { tickets }))
    }

    async fn revoke(
        &self,
        request: Request<wire::RevokeTicketRequest>,
    ) -> Result<Response<wire::RevokeTicketResponse>, Status> {
        let query = request.into_inner().ticket_id;
        let none = || ServiceError::rejected(Code::NotFound, format!("there is no ticket {query:?}"));
        let id: TicketId = query.parse().map_err(|InvalidTicketId { .. }| none())?;
        let leading = &self.0;
        let revoked = leading.store.retry_on_conflict(|| async {
            let known = leading.store.ticket(id).await?.ok_or_else(none)?;
            let revoked = known.value.clone().into_revoked(leading.clock.now());
            if revoked != known.value {
                leading
                    .store
                    .write(&[record_change(TICKETS.key(id)?, revoked.encode(), Some(&known))])
                    .await?;
                tracing::info!(ticket = %id, "a ticket was revoked");
            }
            Ok(revoked)
        });
        Ok(Response::new(wire::RevokeTicketResponse { ticket: Some(revoked.await?.to_wire()) }))
    }
}
