//! The service `Orders`: the same order about every machine that a filter means.

use tonic::{Request, Response, Status};

use crate::bmdb::action::Until;
use crate::bmdb::each::Each;
use crate::bmdb::selection::{Outcome, RPC, Selection};
use crate::model::access::Role;
use crate::model::facts::HoldScope;
use crate::model::label::{Labels, check_key, check_value};
use crate::model::power_order::Switch;
use crate::model::priority::Level;
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::give_orders_request::What;
use crate::proto::fleet::v1::hold_each;
use crate::proto::fleet::v1::orders_server::Orders;
use crate::proto::fleet::v1::prioritize_each;
use crate::server::api::convert::{moment, name};
use crate::server::api::door::caller;
use crate::server::api::machines::filter_of;
use crate::server::api::orders::{Said, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

/// Most labels that one request names.
const LABELS: usize = 64;

/// The service.
pub struct OrdersService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Orders for OrdersService {
    async fn give(
        &self,
        request: Request<v1::GiveOrdersRequest>,
    ) -> Result<Response<v1::GiveOrdersResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let each = each_of(asked.what.as_ref())?;
        let expected = match asked.machines {
            None => None,
            Some(count) => {
                Some(usize::try_from(count).map_err(|_| wrong("machines", "machines is less than nothing"))?)
            }
        };
        let selection = Selection {
            filter: filter_of(asked.filter.clone())?,
            scope: caller.scope().clone(),
            expected,
            beyond_limits: asked.beyond_limits,
            admin: caller.credential().role >= Role::Admin,
        };
        let order = Said { rpc: RPC, request: asked, order: asked.order.as_ref() }
            .read(&caller, "the machines of a filter".to_owned())
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let who = caller.credential().name.clone();
        let given = self.site.bmdb.order_many(order, selection, each, who).await.map_err(of_bmdb)?;
        Ok(Response::new(v1::GiveOrdersResponse {
            outcomes: given.outcomes.iter().map(told).collect(),
            dry_run,
            repeated: given.repeated,
            audit: given.audit.to_string(),
            refusal: given.refusal,
        }))
    }
}

fn told(outcome: &Outcome) -> v1::OrderOutcome {
    v1::OrderOutcome {
        name: Some(name(&outcome.name)),
        changed: outcome.done.changed,
        said: outcome.done.said.clone(),
        refused: outcome.refused,
    }
}

fn each_of(what: Option<&What>) -> Result<Each, Status> {
    Ok(match what {
        None => return Err(wrong("what", "the request does not say what is ordered; give hold, release, …")),
        Some(What::Hold(hold)) => Each::Hold {
            scope: scope_of(&hold.scope)?,
            until: match &hold.until {
                None => None,
                Some(hold_each::Until::At(said)) => Some(Until::At(
                    moment(*said)
                        .ok_or_else(|| wrong("at", "the hold is to end at a moment that is none"))?,
                )),
                Some(hold_each::Until::After(said)) => Some(after_of(said)?),
            },
        },
        Some(What::Release(release)) => Each::Release { quarantine: release.quarantine },
        Some(What::Retry(_)) => Each::Retry,
        Some(What::Quarantine(_)) => Each::Quarantine,
        Some(What::Retire(retire)) => Each::Retire { wipe: retire.wipe },
        Some(What::Reboot(_)) => Each::Power(Switch::Reboot),
        Some(What::Power(power)) => Each::Power(switch_of(&power.action)?),
        Some(What::Prioritize(said)) => Each::Prioritize {
            level: level_of(&said.level)?,
            until: match &said.until {
                None => None,
                Some(prioritize_each::Until::At(said)) => Some(priority_ends(*said)?),
                Some(prioritize_each::Until::After(said)) => Some(after_of(said)?),
            },
        },
        Some(What::Label(label)) => {
            let set = label.set.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
            labelling(set, label.remove.clone())?
        }
    })
}

/// The scope of a hold.
pub(super) fn scope_of(said: &str) -> Result<HoldScope, Status> {
    match said {
        "" => Ok(HoldScope::Everything),
        said => HoldScope::ALL.into_iter().find(|scope| scope.as_str() == said).ok_or_else(|| {
            wrong("scope", format!("{said:?} is no scope of a hold; write everything, power or recovery"))
        }),
    }
}

/// What is ordered of power: everything but a reboot, which is an order of its own.
pub(super) fn switch_of(said: &str) -> Result<Switch, Status> {
    said.parse().ok().filter(|switch| *switch != Switch::Reboot).ok_or_else(|| {
        wrong("action", format!("{said:?} is nothing that can be done to power; write on, off or cycle"))
    })
}

/// A place among the others.
pub(super) fn level_of(said: &str) -> Result<Level, Status> {
    said.parse().map_err(|error: UnknownName| wrong("level", error.to_string()))
}

/// The moment at which a priority ends.
pub(super) fn priority_ends(said: prost_types::Timestamp) -> Result<Until, Status> {
    let ends = moment(said).ok_or_else(|| wrong("at", "the priority is to end at a moment that is none"))?;
    Ok(Until::At(ends))
}

/// A while after which a hold ends.
pub(super) fn after_of(said: &str) -> Result<Until, Status> {
    let span = said.parse().map_err(|_| {
        wrong("after", format!("{said:?} is no length of time; write for example 2h, 30m or 1d"))
    })?;
    Ok(Until::After(span))
}

/// Other labels, if such may be.
pub(super) fn labelling(set: Labels, remove: Vec<String>) -> Result<Each, Status> {
    if set.is_empty() && remove.is_empty() {
        return Err(wrong("set", "the request names no label to set, and none to remove"));
    }
    if set.len() > LABELS || remove.len() > LABELS {
        return Err(wrong("set", format!("the request names more than {LABELS} labels")));
    }
    for (key, value) in &set {
        check_key(key).and_then(|()| check_value(value)).map_err(|said| wrong("set", said))?;
    }
    for key in &remove {
        check_key(key).map_err(|said| wrong("remove", said))?;
    }
    Ok(Each::Label { set, remove })
}
