//! gRPC service Machines: lists, queries and orders for one machine.

pub mod describe;
pub mod machine_watch;
pub mod power_orders;
pub mod retirement_orders;

use std::collections::HashMap;

use chrono::DateTime;
use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{self, decode_timestamp, encode_timestamp};
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use crate::api::pagination;
use crate::api::services::bulk_orders::{
    parse_expiry_after, parse_hold_scope, parse_label_order, parse_priority_expiry, parse_priority_level,
};
use crate::api::services::fleet::drop_surplus;
use bmdb::action::{self, Expiry, OrderOutcome, format_attribution};
use bmdb::audit::{self, OrderResult};
use bmdb::facts::MachineSnapshot;
use bmdb::inspect::{self, HistoryCursor};
use bmdb::listing::{self, Filter, MachineCursor, PageBudget};
use bmdb::machine_lookup::machine_id;
use bmdb::machine_order::MachineOrder;
use bmdb::tags::list_tags;
use bmdb::work::Decision;
use model::label::LabelFilter;
use model::machine_view::MachineName;
use model::phase::{Phase, phase_of};
use model::waits::{backoff_waits, postponement_waits};
use model::why::explain_machine;
use proto::fleet::v1;
use proto::fleet::v1::machines_server::Machines;

/// Machines that a page of a list examines at most, approximately. It bounds the cost of a page with any filter.
pub const MAX_EXAMINED: usize = 4000;
/// Most lines of history with the same time.
const MAX_ENTRIES_PER_INSTANT: i64 = 100_000;
/// Most values of one filter.
const MAX_FILTER_VALUES: usize = 50;

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
        let filter = parse_filter(body.filter)?;
        let size =
            usize::try_from(pagination::parse_page_size(body.page_size, 100, "page_size")?).unwrap_or(100);
        let after = match body.page_token.as_str() {
            "" => None,
            place => {
                Some(MachineCursor::parse(place).ok_or_else(|| pagination::invalid_page_token("machines"))?)
            }
        };
        let scope = caller.scope().clone();
        let (page, now) = self
            .context
            .read_pool
            .read(move |tx| {
                let (filter, scope, after) = (filter.clone(), scope.clone(), after.clone());
                Box::pin(async move {
                    let now = inspect::database_now(tx).await?;
                    let page = listing::list_machines(
                        tx,
                        &filter,
                        &scope,
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
            next_page_token: page.next.map_or_else(String::new, |next| next.encode()),
            read_at: Some(encode_timestamp(now)),
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
            .read(move |tx| {
                let bmdb = bmdb.clone();
                Box::pin(async move {
                    let view = inspect::read_machine_view(&bmdb, tx, id).await?;
                    Ok((view, audit::read_machine_version(tx, id).await?, list_tags(tx, id).await?))
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
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        let limit = pagination::parse_page_size(body.limit, 50, "limit")?;
        let after = match pagination::decode_page_token("events", &body.page_token)? {
            None => None,
            Some(place) => {
                Some(parse_history_cursor(&place).ok_or_else(|| pagination::invalid_page_token("events"))?)
            }
        };
        let name = self.context.find_machine(&caller, &body.machine).await?;
        let id = machine_id(&name);
        let mut events = self
            .context
            .read_pool
            .read(move |tx| Box::pin(async move { inspect::list_history(tx, id, after, limit + 1).await }))
            .await
            .map_err(bmdb_status)?;
        let more = drop_surplus(&mut events, limit);
        let next = HistoryCursor::after(after, &events).filter(|_| more);
        Ok(Response::new(v1::TimelineResponse {
            name: Some(convert::encode_machine_name(&name)),
            events: events.into_iter().map(convert::encode_event).collect(),
            more,
            next_page_token: next.map_or_else(String::new, |place| {
                pagination::encode_page_token("events", &encode_history_cursor(place))
            }),
        }))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchMachinesRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        let filter = parse_filter(body.filter)?;
        let resume = machine_watch::parse_resume_token(&body.resume_token)?;
        Ok(Response::new(machine_watch::start_watch(self.context.clone(), caller, filter, resume)?))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let scope = parse_hold_scope(&body.scope)?;
        let until = match &body.expiry {
            None => None,
            Some(v1::hold_request::Expiry::ExpiresAt(time)) => Some(Expiry::At(
                decode_timestamp(*time)
                    .ok_or_else(|| invalid_argument("expires_at", "expires_at is no valid time"))?,
            )),
            Some(v1::hold_request::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
        };
        let order = IncomingOrder { rpc: HOLD, request: body, order: body.order.as_ref() };
        let (who, reason) = actor_and_reason(&request, body.order.as_ref())?;
        self.execute_order(&request, &body.machine, order, move |snapshot| {
            action::hold_machine(snapshot, scope, &reason, &who, until)
        })
        .await
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let quarantine = body.quarantine;
        let order = IncomingOrder { rpc: RELEASE, request: body, order: body.order.as_ref() };
        let (who, reason) = actor_and_reason(&request, body.order.as_ref())?;
        let by = format_attribution(&who, Some(&reason));
        self.execute_order(&request, &body.machine, order, move |snapshot| {
            action::release_machine(&snapshot.facts, quarantine, &by)
        })
        .await
    }

    async fn retry(&self, request: Request<v1::RetryRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let order = IncomingOrder { rpc: RETRY, request: body, order: body.order.as_ref() };
        let (who, reason) = actor_and_reason(&request, body.order.as_ref())?;
        let by = format_attribution(&who, Some(&reason));
        self.execute_order(&request, &body.machine, order, move |snapshot| {
            action::retry_machine(&snapshot.facts, &by)
        })
        .await
    }

    async fn quarantine(
        &self,
        request: Request<v1::QuarantineRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let order = IncomingOrder { rpc: QUARANTINE, request: body, order: body.order.as_ref() };
        self.execute_machine_order(&request, &body.machine, order, MachineOrder::Quarantine).await
    }

    async fn label(&self, request: Request<v1::LabelRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let set = body.set.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let each = parse_label_order(set, body.remove.clone())?;
        let order = IncomingOrder { rpc: LABEL, request: body, order: body.order.as_ref() };
        self.execute_machine_order(&request, &body.machine, order, each).await
    }

    async fn prioritize(
        &self,
        request: Request<v1::PrioritizeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let level = parse_priority_level(&body.level)?;
        let until = match &body.expiry {
            None => None,
            Some(v1::prioritize_request::Expiry::ExpiresAt(time)) => Some(parse_priority_expiry(*time)?),
            Some(v1::prioritize_request::Expiry::ExpiresAfter(text)) => Some(parse_expiry_after(text)?),
        };
        let order = IncomingOrder { rpc: PRIORITIZE, request: body, order: body.order.as_ref() };
        self.execute_machine_order(&request, &body.machine, order, MachineOrder::Prioritize { level, until })
            .await
    }

    async fn allow_host_key(
        &self,
        request: Request<v1::AllowHostKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let incoming_order = IncomingOrder { rpc: ALLOW_HOST_KEY, request: body, order: body.order.as_ref() };
        let (who, reason) = actor_and_reason(&request, body.order.as_ref())?;
        let caller = caller_of(&request)?;
        let name = self.context.find_machine(&caller, &body.machine).await?;
        let order = incoming_order.parse(&caller, name.short_name())?;
        let dry_run = order.dry_run;
        let meant = (
            name.short_name(),
            action::trim_fingerprint(&body.fingerprint).to_owned(),
            format_attribution(&who, Some(&reason)),
        );
        let carried =
            self.context.bmdb.allow_host_key(order, machine_id(&name), meant).await.map_err(bmdb_status)?;
        Ok(Response::new(encode_order_response(Some(&name), dry_run, &carried)))
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

const HOLD: &str = "shepherd.fleet.v1.Machines/Hold";
const RELEASE: &str = "shepherd.fleet.v1.Machines/Release";
const RETRY: &str = "shepherd.fleet.v1.Machines/Retry";
const QUARANTINE: &str = "shepherd.fleet.v1.Machines/Quarantine";
const LABEL: &str = "shepherd.fleet.v1.Machines/Label";
const PRIORITIZE: &str = "shepherd.fleet.v1.Machines/Prioritize";
const ALLOW_HOST_KEY: &str = "shepherd.fleet.v1.Machines/AllowHostKey";

impl MachinesService {
    async fn read_machine_view(
        &self,
        name: &MachineName,
    ) -> Result<model::machine_view::MachineView, Status> {
        let (id, bmdb) = (machine_id(name), self.context.read_pool.bmdb().clone());
        self.context
            .read_pool
            .read(move |tx| {
                let bmdb = bmdb.clone();
                Box::pin(async move { inspect::read_machine_view(&bmdb, tx, id).await })
            })
            .await
            .map_err(bmdb_status)
    }

    /// Executes an order that also exists as a bulk order, for the machine that `text` names.
    async fn execute_machine_order<M: prost::Message>(
        &self,
        request: &Request<M>,
        text: &str,
        incoming_order: IncomingOrder<'_, M>,
        each: MachineOrder,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(request)?;
        let name = self.context.find_machine(&caller, text).await?;
        let order = incoming_order.parse(&caller, name.short_name())?;
        let (dry_run, who) = (order.dry_run, caller.name().to_owned());
        let carried = self
            .context
            .bmdb
            .execute_machine_order(order, machine_id(&name), each, who)
            .await
            .map_err(bmdb_status)?;
        Ok(Response::new(encode_order_response(Some(&name), dry_run, &carried)))
    }

    /// Executes an order for the machine that `text` names.
    async fn execute_order<M: prost::Message>(
        &self,
        request: &Request<M>,
        text: &str,
        incoming_order: IncomingOrder<'_, M>,
        decide: impl Fn(&MachineSnapshot) -> Decision<OrderOutcome> + Send + Sync + 'static,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller_of(request)?;
        let name = self.context.find_machine(&caller, text).await?;
        let order = incoming_order.parse(&caller, name.short_name())?;
        let dry_run = order.dry_run;
        let carried: OrderResult = self
            .context
            .bmdb
            .execute_on_machine(order, machine_id(&name), decide)
            .await
            .map_err(bmdb_status)?;
        Ok(Response::new(encode_order_response(Some(&name), dry_run, &carried)))
    }
}

/// The caller and the reason, as in the machine's history.
pub(crate) fn actor_and_reason<M>(
    request: &Request<M>,
    order: Option<&v1::Order>,
) -> Result<(String, String), Status> {
    let who = caller_of(request)?.name().to_owned();
    Ok((who, order.map(|order| order.reason.trim().to_owned()).unwrap_or_default()))
}

/// Encodes the cursor of a history: a time, and the number of lines with this time that were sent.
fn encode_history_cursor(place: HistoryCursor) -> String {
    format!("{} {}", place.at.timestamp_micros(), place.offset)
}

/// Parses a cursor of [`encode_history_cursor`].
fn parse_history_cursor(text: &str) -> Option<HistoryCursor> {
    let (at, message) = text.split_once(' ')?;
    // No stored line is older than 1970, and a statement skips at most the lines that one instant can have.
    let at: i64 = at.parse().ok().filter(|at| *at >= 0)?;
    let number = message.parse().ok().filter(|number| (1..=MAX_ENTRIES_PER_INSTANT).contains(number))?;
    Some(HistoryCursor { at: DateTime::from_timestamp_micros(at)?, offset: number })
}

/// Validates the filter of a request.
pub(super) fn parse_filter(machine_filter: Option<v1::MachineFilter>) -> Result<Filter, Status> {
    let machine_filter = machine_filter.unwrap_or_default();
    for phase in &machine_filter.phases {
        if !Phase::ALL.iter().any(|known| known.as_str().eq_ignore_ascii_case(phase)) {
            let known = Phase::ALL.map(Phase::as_str).join(", ");
            return Err(invalid_argument(
                "filter.phases",
                format!("{phase:?} is no phase; there are {known}"),
            ));
        }
    }
    if machine_filter.labels.len() > MAX_FILTER_VALUES {
        return Err(invalid_argument(
            "filter",
            format!("one of the filters has more than {MAX_FILTER_VALUES} values"),
        ));
    }
    let labels = machine_filter.labels.iter().map(|text| LabelFilter::parse(text)).collect::<Result<_, _>>();
    let filter = Filter {
        labels: labels.map_err(|reason| invalid_argument("filter.labels", reason))?,
        phases: machine_filter.phases,
        providers: machine_filter.providers,
        locations: machine_filter.locations,
        tags: machine_filter.tags,
        manufacturers: machine_filter.manufacturers,
        products: machine_filter.products,
    };
    let all = [
        &filter.phases,
        &filter.providers,
        &filter.locations,
        &filter.tags,
        &filter.manufacturers,
        &filter.products,
    ];
    if all.iter().any(|values| values.len() > MAX_FILTER_VALUES) {
        return Err(invalid_argument(
            "filter",
            format!("one of the filters has more than {MAX_FILTER_VALUES} values"),
        ));
    }
    if let Some(tag) = filter.tags.iter().find(|tag| !is_fact_name(tag)) {
        return Err(invalid_argument(
            "filter.tags",
            format!("{tag:?} is no name of a fact; they are as hold or agent_started"),
        ));
    }
    Ok(filter)
}

fn is_fact_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 60
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_cursor_round_trips() {
        let place = HistoryCursor { at: "2026-11-20T18:00:00.123456Z".parse().unwrap(), offset: 3 };
        assert_eq!(parse_history_cursor(&encode_history_cursor(place)), Some(place));
        for odd in ["", "1", "1 x", "1 0", "1 -1", "-1 1", "1 100001", "9223372036854775807 1"] {
            assert_eq!(parse_history_cursor(odd), None, "{odd}");
        }
    }
}
