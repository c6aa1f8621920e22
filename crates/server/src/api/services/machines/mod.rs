//! gRPC service Machines: lists, queries and orders for one machine.

pub mod describe;
pub mod machine_watch;
mod named_list;
mod order_execution;
pub mod power_orders;
pub mod retirement_orders;
pub mod signing_key_orders;
mod timeline;

use std::collections::HashMap;

use tonic::{Request, Response, Status};

use crate::api::api_error::bmdb_status;
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{self, encode_timestamp};
use crate::api::incoming_order::IncomingOrder;
use crate::api::pagination;
use crate::api::services::machine_filter::parse_filter;
use crate::api::services::order_fields::{
    parse_expiry_after, parse_expiry_at, parse_hold_scope, parse_label_order, parse_priority_level,
};
use bmdb::connection;
use bmdb::engine::schedule;
use bmdb::fleet::listing::{self, Filter, PageBudget};
use bmdb::fleet::machine_walk::MachineCursor;
use bmdb::machine::lookup::machine_id;
use bmdb::machine::tags::list_tags;
use bmdb::machine::view;
use bmdb::orders::machine_decision;
use bmdb::orders::machine_order::MachineOrder;
use model::machine_view::{MachineName, MachineView};
use model::phase::phase_of;
use model::rpc_name::{
    ALLOW_HOST_KEY_RPC, HOLD_RPC, LABEL_RPC, PRIORITIZE_RPC, QUARANTINE_RPC, RELEASE_RPC, RETRY_RPC,
};
use model::waits::{backoff_waits, postponement_waits};
use model::why::explain_machine;
use proto::fleet::v1;
use proto::fleet::v1::machines_server::Machines;

use order_execution::{
    Attribution, execute_for_machine, execute_machine_order, execute_order, try_execute_order,
};

/// Machines that a page of a list examines at most, approximately. It bounds the cost of a page with any filter.
pub const MAX_EXAMINED: usize = 4000;

/// The gRPC service `Machines`.
pub struct MachinesService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Machines for MachinesService {
    type WatchStream = machine_watch::MachineWatchStream;

    async fn list(
        &self,
        request: Request<v1::ListMachinesRequest>,
    ) -> Result<Response<v1::ListMachinesResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        if !body.names.is_empty() {
            return named_list::list_named_machines(&self.context, &caller, &body).await.map(Response::new);
        }
        let filter = Filter { omit_retired: body.omit_retired, ..parse_filter(&body.selector)? };
        let size =
            usize::try_from(pagination::parse_page_size(body.page_size, 100, "page_size")?).unwrap_or(100);
        let after = match pagination::decode_page_token("machines", &body.page_token)? {
            None => None,
            Some(place) => {
                Some(MachineCursor::parse(&place).ok_or_else(|| pagination::invalid_page_token("machines"))?)
            }
        };
        let scope = caller.scope().clone();
        let (page, now) = self
            .context
            .read_pool
            .read_with((filter, scope, after), move |tx, (filter, scope, after)| {
                Box::pin(async move {
                    let now = connection::database_now(tx).await?;
                    let page = listing::list_machines(
                        tx,
                        filter,
                        scope,
                        after.as_ref(),
                        size,
                        PageBudget::with_time_limit(MAX_EXAMINED),
                    )
                    .await?;
                    Ok((page, now))
                })
            })
            .await
            .map_err(bmdb_status)?;
        Ok(Response::new(v1::ListMachinesResponse {
            machines: page.machines.iter().map(convert::encode_machine).collect(),
            next_page_token: page
                .next
                .map_or_else(String::new, |next| pagination::encode_page_token("machines", &next.encode())),
            read_at: Some(encode_timestamp(now)),
            unresolved: Vec::new(),
        }))
    }

    async fn get(
        &self,
        request: Request<v1::GetMachineRequest>,
    ) -> Result<Response<v1::GetMachineResponse>, Status> {
        let caller = caller_of(&request)?;
        let name = self.context.find_machine(&caller, &request.get_ref().machine).await?;
        let (id, bmdb) = (machine_id(&name), self.context.read_pool.bmdb().clone());
        let (view, version, tags) = self
            .context
            .read_pool
            .read_with(bmdb, move |tx, bmdb| {
                Box::pin(async move {
                    let view = view::read_machine_view(bmdb, tx, id).await?;
                    Ok((view, schedule::read_machine_version(tx, id).await?, list_tags(tx, id).await?))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let (facts, now) = (&view.facts, view.at);
        Ok(Response::new(v1::GetMachineResponse {
            name: Some(convert::encode_machine_name(&view.name())),
            phase: phase_of(facts, &view.policy, now).as_str().to_owned(),
            created_at: Some(encode_timestamp(facts.created_at)),
            read_at: Some(encode_timestamp(now)),
            version,
            facts: tags
                .into_iter()
                .map(|tag| (tag.table, convert::encode_struct(&tag.row)))
                .collect::<HashMap<_, _>>(),
            schedule: view.lanes.iter().map(convert::encode_lane).collect(),
            backoffs: backoff_waits(facts, now).into_iter().map(convert::encode_wait).collect(),
            postponements: postponement_waits(facts, now).into_iter().map(convert::encode_wait).collect(),
        }))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeMachineRequest>,
    ) -> Result<Response<v1::DescribeMachineResponse>, Status> {
        let caller = caller_of(&request)?;
        let name = self.context.find_machine(&caller, &request.get_ref().machine).await?;
        Ok(Response::new(describe::describe_machine(&self.context, &name).await?))
    }

    async fn why(&self, request: Request<v1::WhyRequest>) -> Result<Response<v1::WhyResponse>, Status> {
        let caller = caller_of(&request)?;
        let name = self.context.find_machine(&caller, &request.get_ref().machine).await?;
        let view = self.read_machine_view(&name).await?;
        Ok(Response::new(convert::encode_explanation(explain_machine(&view))))
    }

    async fn timeline(
        &self,
        request: Request<v1::TimelineRequest>,
    ) -> Result<Response<v1::TimelineResponse>, Status> {
        Ok(Response::new(timeline::list_timeline(&self.context, &request).await?))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchMachinesRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        let filter = parse_filter(&body.selector)?;
        let resume = machine_watch::parse_resume_token(&body.resume_token)?;
        Ok(Response::new(machine_watch::start_watch(self.context.clone(), caller, filter, resume)?))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let scope = parse_hold_scope(&body.scope)?;
        let until = match &body.expiry {
            None => None,
            Some(v1::hold_request::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
            Some(v1::hold_request::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
        };
        let order = IncomingOrder { rpc: HOLD_RPC, request: &request, order: body.order.as_ref() };
        let name = self.context.find_machine(&caller_of(&request)?, &body.machine).await?;
        try_execute_order(&self.context, &name, order, move |snapshot, by| {
            machine_decision::hold_machine(snapshot, scope, &by.reason, &by.who, until)
        })
        .await
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let quarantine = body.quarantine;
        let order = IncomingOrder { rpc: RELEASE_RPC, request: &request, order: body.order.as_ref() };
        execute_order(&self.context, &body.machine, order, move |snapshot, by| {
            machine_decision::release_machine(&snapshot.facts, quarantine, &by.line())
        })
        .await
    }

    async fn retry(&self, request: Request<v1::RetryRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let order = IncomingOrder { rpc: RETRY_RPC, request: &request, order: body.order.as_ref() };
        execute_machine_order(&self.context, &body.machine, order, MachineOrder::Retry).await
    }

    async fn quarantine(
        &self,
        request: Request<v1::QuarantineRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let order = IncomingOrder { rpc: QUARANTINE_RPC, request: &request, order: body.order.as_ref() };
        execute_machine_order(&self.context, &body.machine, order, MachineOrder::Quarantine).await
    }

    async fn label(&self, request: Request<v1::LabelRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let set = body.set.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let each = parse_label_order(set, body.remove.clone())?;
        let order = IncomingOrder { rpc: LABEL_RPC, request: &request, order: body.order.as_ref() };
        execute_machine_order(&self.context, &body.machine, order, each).await
    }

    async fn prioritize(
        &self,
        request: Request<v1::PrioritizeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let level = parse_priority_level(&body.level)?;
        let until = match &body.expiry {
            None => None,
            Some(v1::prioritize_request::Expiry::ExpiresAt(time)) => Some(parse_expiry_at(*time)?),
            Some(v1::prioritize_request::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
        };
        let order = IncomingOrder { rpc: PRIORITIZE_RPC, request: &request, order: body.order.as_ref() };
        execute_machine_order(&self.context, &body.machine, order, MachineOrder::Prioritize { level, until })
            .await
    }

    async fn allow_host_key(
        &self,
        request: Request<v1::AllowHostKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let order = IncomingOrder { rpc: ALLOW_HOST_KEY_RPC, request: &request, order: body.order.as_ref() };
        let name = self.context.find_machine(&caller_of(&request)?, &body.machine).await?;
        let meant = (
            name.short_name(),
            machine_decision::trim_fingerprint(&body.fingerprint).to_owned(),
            Attribution::of(&order)?.line(),
        );
        execute_for_machine(&name, order, |order| {
            self.context.bmdb.allow_host_key(order, machine_id(&name), meant)
        })
        .await
    }

    async fn allow_signing_keys(
        &self,
        request: Request<v1::AllowSigningKeysRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        signing_key_orders::allow_signing_keys(&self.context, &request).await
    }

    async fn retire(
        &self,
        request: Request<v1::RetireRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        retirement_orders::retire_machine(&self.context, &request).await
    }

    async fn cancel_retire(
        &self,
        request: Request<v1::CancelRetireRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        retirement_orders::cancel_retirement(&self.context, &request).await
    }

    async fn waive_stage(
        &self,
        request: Request<v1::WaiveStageRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        retirement_orders::waive_stage(&self.context, &request).await
    }

    async fn reboot(
        &self,
        request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        power_orders::reboot_machine(&self.context, &request).await
    }

    async fn power(&self, request: Request<v1::PowerRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        power_orders::switch_power(&self.context, &request).await
    }

    async fn cancel_power(
        &self,
        request: Request<v1::CancelPowerRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        power_orders::cancel_power_order(&self.context, &request).await
    }
}

impl MachinesService {
    async fn read_machine_view(&self, name: &MachineName) -> Result<MachineView, Status> {
        let (id, bmdb) = (machine_id(name), self.context.read_pool.bmdb().clone());
        self.context
            .read_pool
            .read_with(bmdb, move |tx, bmdb| Box::pin(view::read_machine_view(bmdb, tx, id)))
            .await
            .map_err(bmdb_status)
    }
}
