//! The service `Audit`.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::bmdb::audit::{self, AuditLine};
use crate::bmdb::find::id_of;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::audit_server::Audit;
use crate::server::api::convert::{at, optional_structure};
use crate::server::api::door::caller;
use crate::server::api::fleet::{drop_surplus, read_moment, write_moment};
use crate::server::api::pages;
use crate::server::api::refusal::of_bmdb;
use crate::server::api::site::Site;

/// The service.
pub struct AuditService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Audit for AuditService {
    async fn list(
        &self,
        request: Request<v1::ListAuditRequest>,
    ) -> Result<Response<v1::ListAuditResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.into_inner();
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let after = match pages::read("audit", &asked.page_token)? {
            None => None,
            Some(place) => Some(read_moment(&place).ok_or_else(|| pages::no_place("audit"))?),
        };
        let machine = match asked.machine.as_str() {
            "" => None,
            text => Some(id_of(&self.site.find(&caller, text).await?)),
        };
        let mut lines = self
            .site
            .looks
            .look(move |tx| {
                Box::pin(async move {
                    let after = match after {
                        Some(after) => after,
                        None => (crate::bmdb::inspect::now(tx).await?, Uuid::max()),
                    };
                    audit::lines(tx, machine, after, size + 1).await
                })
            })
            .await
            .map_err(of_bmdb)?;
        let more = drop_surplus(&mut lines, size);
        let next = lines.last().filter(|_| more).map(|line| write_moment(line.at, line.audit_id));
        Ok(Response::new(v1::ListAuditResponse {
            orders: lines.into_iter().map(line).collect(),
            next_page_token: next.map_or_else(String::new, |place| pages::write("audit", &place)),
        }))
    }
}

fn line(line: AuditLine) -> v1::AuditLine {
    v1::AuditLine {
        audit: line.audit_id.to_string(),
        at: Some(at(line.at)),
        actor: line.actor,
        credential: line.credential_id.map(|credential| credential.to_string()),
        rpc: line.rpc,
        target: line.target,
        reason: line.reason,
        idempotency_key: line.idempotency_key,
        dry_run: line.dry_run,
        outcome: line.outcome,
        said: line.said,
        before: optional_structure(line.before.as_ref()),
        after: optional_structure(line.after.as_ref()),
    }
}
