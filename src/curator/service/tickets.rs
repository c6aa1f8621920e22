//! Making and ending tickets.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Request, Response, Status};

use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Caller, Leading};
use crate::curator::service::store::put;
use crate::curator::tickets::{NoTicketId, Secret, Ticket, TicketId, Wanted};
use crate::etcd::key_space::TICKETS;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::tickets_server;

/// The service.
#[derive(Clone, Debug)]
pub struct TicketsService(pub Arc<Leading>);

#[tonic::async_trait]
impl tickets_server::Tickets for TicketsService {
    async fn create(
        &self,
        request: Request<wire::CreateTicketRequest>,
    ) -> Result<Response<wire::CreateTicketResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let secret = Secret::new(rand::random());
        let wanted = Wanted {
            created_by: caller.peer.to_string(),
            lifetime: Duration::from_millis(asked.lifetime_ms),
            uses: asked.uses,
            purpose: asked.purpose,
        };
        let ticket = Ticket::new(&secret, wanted, self.0.clock.now()).map_err(Failure::from)?;
        let key = TICKETS.key(ticket.id()).map_err(Failure::from)?;
        self.0.store.write(&[put::<()>(key, ticket.encode(), None)]).await?;
        tracing::info!(ticket = %ticket.id(), by = ticket.created_by, "a ticket was made");
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
        let asked = request.into_inner().ticket_id;
        let none = || Failure::refused(Code::NotFound, format!("there is no ticket {asked:?}"));
        let id: TicketId = asked.parse().map_err(|NoTicketId { .. }| none())?;
        let leading = &self.0;
        let revoked = leading.store.decide(|| async {
            let known = leading.store.ticket(id).await?.ok_or_else(none)?;
            let revoked = known.value.clone().revoked(leading.clock.now());
            if revoked != known.value {
                leading.store.write(&[put(TICKETS.key(id)?, revoked.encode(), Some(&known))]).await?;
                tracing::info!(ticket = %id, "a ticket was revoked");
            }
            Ok(revoked)
        });
        Ok(Response::new(wire::RevokeTicketResponse { ticket: Some(revoked.await?.to_wire()) }))
    }
}
