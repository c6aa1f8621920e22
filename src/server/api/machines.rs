//! The service `Machines`.

use std::collections::HashMap;

use chrono::DateTime;
use tonic::{Request, Response, Status};

use crate::bmdb::action::{self, Done, Until, by};
use crate::bmdb::audit::{self, Carried};
use crate::bmdb::each::Each;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::find::id_of;
use crate::bmdb::inspect::{self, HistoryPlace};
use crate::bmdb::listing::{self, Cursor, Enough, Filter};
use crate::bmdb::tags::tags;
use crate::bmdb::work::Decision;
use crate::model::label::Wanted;
use crate::model::machine_view::MachineName;
use crate::model::phase::{Phase, phase_of};
use crate::model::waits::{backoffs, postponements};
use crate::model::why::explain;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_server::Machines;
use crate::server::api::convert::{self, at, moment};
use crate::server::api::describe;
use crate::server::api::door::caller;
use crate::server::api::fleet::drop_surplus;
use crate::server::api::many::{after_of, labelling, level_of, priority_ends, scope_of};
use crate::server::api::orders::{Said, answer};
use crate::server::api::pages;
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::retiring;
use crate::server::api::site::Site;
use crate::server::api::switching;
use crate::server::api::watch;

/// Machines that a page of a list looks at, about: with any filter, it costs no more than that.
pub const LOOKED_AT: usize = 4000;
/// Most lines of a history that one moment can have.
const MOST_AT_ONCE: i64 = 100_000;
/// Most values of one filter.
const FILTER_VALUES: usize = 50;

/// The service.
pub struct MachinesService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Machines for MachinesService {
    type WatchStream = watch::Watched;

    async fn list(
        &self,
        request: Request<v1::ListMachinesRequest>,
    ) -> Result<Response<v1::ListMachinesResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.into_inner();
        let filter = filter_of(asked.filter)?;
        let size = usize::try_from(pages::size(asked.page_size, 100, "page_size")?).unwrap_or(100);
        // As `shepherdctl --direct` says it, so that a list goes on whoever is asked.
        let after = match asked.page_token.as_str() {
            "" => None,
            place => Some(Cursor::read(place).ok_or_else(|| pages::no_place("machines"))?),
        };
        let scope = caller.scope().clone();
        let (page, now) = self
            .site
            .looks
            .look(move |tx| {
                let (filter, scope, after) = (filter.clone(), scope.clone(), after.clone());
                Box::pin(async move {
                    let now = inspect::now(tx).await?;
                    let page =
                        listing::machines(tx, &filter, &scope, after.as_ref(), size, Enough::soon(LOOKED_AT))
                            .await?;
                    Ok((page, now))
                })
            })
            .await
            .map_err(of_bmdb)?;
        Ok(Response::new(v1::ListMachinesResponse {
            machines: page.machines.iter().map(convert::machine).collect(),
            next_page_token: page.next.map_or_else(String::new, |next| next.write()),
            at: Some(at(now)),
        }))
    }

    async fn get(
        &self,
        request: Request<v1::GetMachineRequest>,
    ) -> Result<Response<v1::GetMachineResponse>, Status> {
        let caller = caller(&request)?;
        let name = self.site.find(&caller, &request.get_ref().machine).await?;
        let (id, bmdb) = (id_of(&name), self.site.looks.bmdb().clone());
        let (view, version, tags) = self
            .site
            .looks
            .look(move |tx| {
                let bmdb = bmdb.clone();
                Box::pin(async move {
                    let view = inspect::view(&bmdb, tx, id).await?;
                    Ok((view, audit::version(tx, id).await?, tags(tx, id).await?))
                })
            })
            .await
            .map_err(of_bmdb)?;
        let (facts, now) = (&view.facts, view.at);
        Ok(Response::new(v1::GetMachineResponse {
            name: Some(convert::name(&view.name())),
            phase: phase_of(facts, &view.policy, now).as_str().to_owned(),
            created_at: Some(at(facts.created_at)),
            at: Some(at(now)),
            version,
            facts: tags
                .into_iter()
                .map(|tag| (tag.table, convert::structure(&tag.row)))
                .collect::<HashMap<_, _>>(),
            schedule: view.lanes.iter().map(convert::lane).collect(),
            backoffs: backoffs(facts, now).into_iter().map(convert::wait).collect(),
            postponements: postponements(facts, now).into_iter().map(convert::wait).collect(),
        }))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeMachineRequest>,
    ) -> Result<Response<v1::DescribeMachineResponse>, Status> {
        let caller = caller(&request)?;
        let name = self.site.find(&caller, &request.get_ref().machine).await?;
        Ok(Response::new(describe::describe(&self.site, &name).await?))
    }

    async fn why(&self, request: Request<v1::WhyRequest>) -> Result<Response<v1::WhyResponse>, Status> {
        let caller = caller(&request)?;
        let name = self.site.find(&caller, &request.get_ref().machine).await?;
        let view = self.view(&name).await?;
        Ok(Response::new(convert::why(explain(&view))))
    }

    async fn timeline(
        &self,
        request: Request<v1::TimelineRequest>,
    ) -> Result<Response<v1::TimelineResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.into_inner();
        let limit = pages::size(asked.limit, 50, "limit")?;
        let after = match pages::read("events", &asked.page_token)? {
            None => None,
            Some(place) => Some(read_place(&place).ok_or_else(|| pages::no_place("events"))?),
        };
        let name = self.site.find(&caller, &asked.machine).await?;
        let id = id_of(&name);
        let mut events = self
            .site
            .looks
            .look(move |tx| Box::pin(async move { inspect::history(tx, id, after, limit + 1).await }))
            .await
            .map_err(of_bmdb)?;
        let more = drop_surplus(&mut events, limit);
        let next = HistoryPlace::after(after, &events).filter(|_| more);
        Ok(Response::new(v1::TimelineResponse {
            name: Some(convert::name(&name)),
            events: events.into_iter().map(convert::event).collect(),
            more,
            next_page_token: next
                .map_or_else(String::new, |place| pages::write("events", &write_place(place))),
        }))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchMachinesRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let caller = caller(&request)?;
        let asked = request.into_inner();
        let filter = filter_of(asked.filter)?;
        let resume = watch::read_resume(&asked.resume)?;
        Ok(Response::new(watch::start(self.site.clone(), caller, filter, resume)?))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let scope = scope_of(&asked.scope)?;
        let until = match &asked.until {
            None => None,
            Some(v1::hold_request::Until::At(said)) => Some(Until::At(
                moment(*said).ok_or_else(|| wrong("at", "the hold is to end at a moment that is none"))?,
            )),
            Some(v1::hold_request::Until::After(said)) => Some(after_of(said)?),
        };
        let said = Said { rpc: HOLD, request: asked, order: asked.order.as_ref() };
        let (who, reason) = who_and_why(&request, asked.order.as_ref())?;
        self.order(&request, &asked.machine, said, move |snapshot| {
            action::hold(snapshot, scope, &reason, &who, until)
        })
        .await
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let quarantine = asked.quarantine;
        let said = Said { rpc: RELEASE, request: asked, order: asked.order.as_ref() };
        let (who, reason) = who_and_why(&request, asked.order.as_ref())?;
        let by = by(&who, Some(&reason));
        self.order(&request, &asked.machine, said, move |snapshot| {
            action::release(&snapshot.facts, quarantine, &by)
        })
        .await
    }

    async fn retry(&self, request: Request<v1::RetryRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let said = Said { rpc: RETRY, request: asked, order: asked.order.as_ref() };
        let (who, reason) = who_and_why(&request, asked.order.as_ref())?;
        let by = by(&who, Some(&reason));
        self.order(&request, &asked.machine, said, move |snapshot| action::retry(&snapshot.facts, &by)).await
    }

    async fn quarantine(
        &self,
        request: Request<v1::QuarantineRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let said = Said { rpc: QUARANTINE, request: asked, order: asked.order.as_ref() };
        self.order_each(&request, &asked.machine, said, Each::Quarantine).await
    }

    async fn label(&self, request: Request<v1::LabelRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let set = asked.set.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let each = labelling(set, asked.remove.clone())?;
        let said = Said { rpc: LABEL, request: asked, order: asked.order.as_ref() };
        self.order_each(&request, &asked.machine, said, each).await
    }

    async fn prioritize(
        &self,
        request: Request<v1::PrioritizeRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let level = level_of(&asked.level)?;
        let until = match &asked.until {
            None => None,
            Some(v1::prioritize_request::Until::At(said)) => Some(priority_ends(*said)?),
            Some(v1::prioritize_request::Until::After(said)) => Some(after_of(said)?),
        };
        let said = Said { rpc: PRIORITIZE, request: asked, order: asked.order.as_ref() };
        self.order_each(&request, &asked.machine, said, Each::Prioritize { level, until }).await
    }

    async fn allow_host_key(
        &self,
        request: Request<v1::AllowHostKeyRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let asked = request.get_ref();
        let said = Said { rpc: ALLOW_HOST_KEY, request: asked, order: asked.order.as_ref() };
        let (who, reason) = who_and_why(&request, asked.order.as_ref())?;
        let caller = caller(&request)?;
        let name = self.site.find(&caller, &asked.machine).await?;
        let order = said.read(&caller, name.short())?;
        let dry_run = order.dry_run;
        let meant =
            (name.short(), action::fingerprint(&asked.fingerprint).to_owned(), by(&who, Some(&reason)));
        let carried = self.site.bmdb.order_host_key(order, id_of(&name), meant).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(Some(&name), dry_run, &carried)))
    }

    async fn retire(
        &self,
        request: Request<v1::RetireRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        retiring::retire(&self.site, &request).await
    }

    async fn cancel_retire(
        &self,
        request: Request<v1::CancelRetireRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        retiring::cancel(&self.site, &request).await
    }

    async fn waive(&self, request: Request<v1::WaiveRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        retiring::waive(&self.site, &request).await
    }

    async fn reboot(
        &self,
        request: Request<v1::RebootRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        switching::reboot(&self.site, &request).await
    }

    async fn power(&self, request: Request<v1::PowerRequest>) -> Result<Response<v1::OrderResponse>, Status> {
        switching::power(&self.site, &request).await
    }

    async fn cancel_power(
        &self,
        request: Request<v1::CancelPowerRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        switching::cancel(&self.site, &request).await
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
    async fn view(&self, name: &MachineName) -> Result<crate::model::machine_view::MachineView, Status> {
        let (id, bmdb) = (id_of(name), self.site.looks.bmdb().clone());
        self.site
            .looks
            .look(move |tx| {
                let bmdb = bmdb.clone();
                Box::pin(async move { inspect::view(&bmdb, tx, id).await })
            })
            .await
            .map_err(of_bmdb)
    }

    /// Carries out an order that may be given about many machines, about the one that `text` names.
    async fn order_each<M: prost::Message>(
        &self,
        request: &Request<M>,
        text: &str,
        said: Said<'_, M>,
        each: Each,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(request)?;
        let name = self.site.find(&caller, text).await?;
        let order = said.read(&caller, name.short())?;
        let (dry_run, who) = (order.dry_run, caller.credential().name.clone());
        let carried = self.site.bmdb.order_each(order, id_of(&name), each, who).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(Some(&name), dry_run, &carried)))
    }

    /// Carries out an order about the machine that `text` names.
    async fn order<M: prost::Message>(
        &self,
        request: &Request<M>,
        text: &str,
        said: Said<'_, M>,
        decide: impl Fn(&Snapshot) -> Decision<Done> + Send + Sync + 'static,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(request)?;
        let name = self.site.find(&caller, text).await?;
        let order = said.read(&caller, name.short())?;
        let dry_run = order.dry_run;
        let carried: Carried =
            self.site.bmdb.order_machine(order, id_of(&name), decide).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(Some(&name), dry_run, &carried)))
    }
}

/// Who orders and why, as the machine's history says it.
pub(crate) fn who_and_why<M>(
    request: &Request<M>,
    order: Option<&v1::Order>,
) -> Result<(String, String), Status> {
    let who = caller(request)?.credential().name.clone();
    Ok((who, order.map(|order| order.reason.trim().to_owned()).unwrap_or_default()))
}

/// A place in a history: its moment, and how many lines of that were told.
fn write_place(place: HistoryPlace) -> String {
    format!("{} {}", place.at.timestamp_micros(), place.told)
}

/// Reads what [`write_place`] wrote.
fn read_place(text: &str) -> Option<HistoryPlace> {
    let (at, told) = text.split_once(' ')?;
    // Nothing that is kept is older, and a statement passes over no more lines than a moment can have.
    let at: i64 = at.parse().ok().filter(|at| *at >= 0)?;
    let told = told.parse().ok().filter(|told| (1..=MOST_AT_ONCE).contains(told))?;
    Some(HistoryPlace { at: DateTime::from_timestamp_micros(at)?, told })
}

/// The filter that a request means.
pub(super) fn filter_of(asked: Option<v1::MachineFilter>) -> Result<Filter, Status> {
    let asked = asked.unwrap_or_default();
    for phase in &asked.phases {
        if !Phase::ALL.iter().any(|known| known.as_str().eq_ignore_ascii_case(phase)) {
            let known = Phase::ALL.map(Phase::as_str).join(", ");
            return Err(wrong("filter.phases", format!("{phase:?} is no phase; there are {known}")));
        }
    }
    if asked.labels.len() > FILTER_VALUES {
        return Err(wrong("filter", format!("one of the filters has more than {FILTER_VALUES} values")));
    }
    let labels = asked.labels.iter().map(|text| Wanted::read(text)).collect::<Result<_, _>>();
    let filter = Filter {
        labels: labels.map_err(|said| wrong("filter.labels", said))?,
        phases: asked.phases,
        providers: asked.providers,
        locations: asked.locations,
        tags: asked.tags,
        manufacturers: asked.manufacturers,
        products: asked.products,
    };
    let all = [
        &filter.phases,
        &filter.providers,
        &filter.locations,
        &filter.tags,
        &filter.manufacturers,
        &filter.products,
    ];
    if all.iter().any(|values| values.len() > FILTER_VALUES) {
        return Err(wrong("filter", format!("one of the filters has more than {FILTER_VALUES} values")));
    }
    if let Some(tag) = filter.tags.iter().find(|tag| !is_tag(tag)) {
        return Err(wrong(
            "filter.tags",
            format!("{tag:?} is no name of a fact; they are as hold or agent_started"),
        ));
    }
    Ok(filter)
}

fn is_tag(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 60
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_in_a_history_reads_back() {
        let place = HistoryPlace { at: "2026-11-20T18:00:00.123456Z".parse().unwrap(), told: 3 };
        assert_eq!(read_place(&write_place(place)), Some(place));
        for odd in ["", "1", "1 x", "1 0", "1 -1", "-1 1", "1 100001", "9223372036854775807 1"] {
            assert_eq!(read_place(odd), None, "{odd}");
        }
    }
}
