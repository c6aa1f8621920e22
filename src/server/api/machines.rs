//! The service `Machines`.

use std::collections::HashMap;

use tonic::{Request, Response, Status};

use crate::bmdb::action::{self, Done, Until, by};
use crate::bmdb::audit::{self, Carried};
use crate::bmdb::facts::Snapshot;
use crate::bmdb::find::id_of;
use crate::bmdb::inspect;
use crate::bmdb::listing::{self, Cursor, Enough, Filter};
use crate::bmdb::tags::tags;
use crate::bmdb::work::Decision;
use crate::model::facts::{HoldScope, MachineFacts};
use crate::model::machine_view::MachineName;
use crate::model::phase::{Phase, phase_of};
use crate::model::time::Timestamp;
use crate::model::why::explain;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_server::Machines;
use crate::server::api::convert::{self, at, moment};
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer};
use crate::server::api::pages;
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::retiring;
use crate::server::api::site::Site;
use crate::server::api::watch;

/// Machines that a page of a list looks at, about: with any filter, it costs no more than that.
pub const LOOKED_AT: usize = 4000;
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
            backoffs: backoffs(facts, now),
            postponements: postponements(facts, now),
        }))
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
        let name = self.site.find(&caller, &asked.machine).await?;
        let id = id_of(&name);
        let mut events = self
            .site
            .looks
            .look(move |tx| Box::pin(async move { inspect::history(tx, id, limit + 1).await }))
            .await
            .map_err(of_bmdb)?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let more = events.len() > limit;
        events.truncate(limit);
        Ok(Response::new(v1::TimelineResponse {
            name: Some(convert::name(&name)),
            events: events.into_iter().map(convert::event).collect(),
            more,
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
        let scope = match asked.scope.as_str() {
            "" => HoldScope::Everything,
            said => HoldScope::ALL.into_iter().find(|scope| scope.as_str() == said).ok_or_else(|| {
                wrong("scope", format!("{said:?} is no scope of a hold; write everything, power or recovery"))
            })?,
        };
        let until = match &asked.until {
            None => None,
            Some(v1::hold_request::Until::At(said)) => Some(Until::At(
                moment(*said).ok_or_else(|| wrong("at", "the hold is to end at a moment that is none"))?,
            )),
            Some(v1::hold_request::Until::After(said)) => Some(Until::After(said.parse().map_err(|_| {
                wrong("after", format!("{said:?} is no length of time; write for example 2h, 30m or 1d"))
            })?)),
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
}

const HOLD: &str = "shepherd.fleet.v1.Machines/Hold";
const RELEASE: &str = "shepherd.fleet.v1.Machines/Release";
const RETRY: &str = "shepherd.fleet.v1.Machines/Retry";
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

/// The filter that a request means.
fn filter_of(asked: Option<v1::MachineFilter>) -> Result<Filter, Status> {
    let asked = asked.unwrap_or_default();
    for phase in &asked.phases {
        if !Phase::ALL.iter().any(|known| known.as_str().eq_ignore_ascii_case(phase)) {
            let known = Phase::ALL.map(Phase::as_str).join(", ");
            return Err(wrong("filter.phases", format!("{phase:?} is no phase; there are {known}")));
        }
    }
    let filter = Filter {
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

fn backoffs(facts: &MachineFacts, now: Timestamp) -> Vec<v1::Wait> {
    let wait =
        |(process, fact): (&crate::model::process::Process, &crate::model::backoff::BackoffFact)| v1::Wait {
            process: process.as_str().to_owned(),
            active: fact.until > now,
            until: Some(at(fact.until)),
            failures: Some(fact.failures),
            reason: fact.cause.clone(),
        };
    facts.backoffs.iter().map(wait).collect()
}

fn postponements(facts: &MachineFacts, now: Timestamp) -> Vec<v1::Wait> {
    let wait =
        |(process, fact): (&crate::model::process::Process, &crate::model::facts::Postponement)| v1::Wait {
            process: process.as_str().to_owned(),
            active: fact.until > now,
            until: Some(at(fact.until)),
            failures: None,
            reason: format!("{} ({})", fact.reason, fact.decided_at),
        };
    facts.postponements.iter().map(wait).collect()
}
