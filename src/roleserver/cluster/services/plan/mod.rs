//! What to do next, from what is to run and how everything is.
//!
//! Pure, and asked again after everything that happens: there is no plan that somebody would have to follow to its end,
//! so that none can be wrong by the time its second step is due.
//!
//! * A service starts when all that it depends on is well; all that may start does so at once.
//! * What is to go, because nobody wants it any more or because it is to be started otherwise, stops when nothing that
//!   depends on it and is to go as well runs any more: the opposite order.
//! * What only depends on a service that is started again goes on running. It has to live through the end of that one
//!   in any case, because that may crash; one that cannot ends by itself, and starts again when that one is well. So a
//!   change disturbs what was changed and nothing else.
//! * What ended is started again as its policy says, after a pause that grows with each quick end. What could not be
//!   started at all is tried again under every policy: it has not ended.
//! * While nobody knows what is to run, nothing is done: what runs goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::model::declaration::Sha256;
use crate::roleserver::cluster::services::state::{Doing, How, Moment, Present};
use crate::roleserver::cluster::services::wanted::{Id, Wanted};
use crate::supervisor::backoff::Backoff;

#[cfg(test)]
mod tests;

/// Pauses between the end of a service and its next start.
pub const PAUSES: Backoff = Backoff::USUAL;
/// When what could not be stopped or removed is tried again.
pub const TRY_AGAIN: Duration = Duration::from_secs(10);

/// All that is decided from.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'c> {
    /// What is to run; none while nobody knows.
    pub wanted: Option<&'c BTreeMap<Id, Wanted>>,
    /// How everything is of which there is something.
    pub present: &'c BTreeMap<Id, Present>,
    /// Artefacts that are here, whole.
    pub artefacts: &'c BTreeSet<Sha256>,
    /// Now.
    pub now: Moment,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// Start it.
    Start(Id),
    /// Let what is newly declared of it hold without starting it again.
    Adjust(Id),
    /// Stop it.
    Stop(Id),
    /// Remove what it left: nobody wants it any more.
    Forget(Id),
}

/// What to do, and when to look again even if nothing happens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do now.
    pub actions: Vec<Action>,
    /// When something is due.
    pub look_again: Option<Moment>,
}

/// Why a service that is to run does not start yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waits {
    /// What it is started with cannot be said; the sentence says why.
    Rendering(String),
    /// For an artefact.
    Artefact(Sha256),
    /// For others.
    For(Vec<Id>),
}

/// Decides what to do.
#[must_use]
pub fn plan(all: &Circumstances<'_>) -> Plan {
    let Some(wanted) = all.wanted else { return Plan::default() };
    let mut plan = Plan::default();
    stops(all, wanted, &mut plan);
    for (id, present) in all.present.iter().filter(|(id, _)| !wanted.contains_key(id)) {
        match present.doing {
            Doing::Down | Doing::Ended { .. } => plan.actions.push(Action::Forget(id.clone())),
            Doing::Starting
            | Doing::Up { .. }
            | Doing::Stopping
            | Doing::Stuck { .. }
            | Doing::Forgetting => {}
        }
    }
    for (id, service) in wanted {
        match all.present.get(id) {
            None => start(all, service, &mut plan),
            Some(present) => one(all, service, present, &mut plan),
        }
    }
    plan
}

/// What a service waits for before it can start; none when nothing stands in its way.
#[must_use]
pub fn waits(all: &Circumstances<'_>, service: &Wanted) -> Option<Waits> {
    let (rendered, _) = match &service.rendered {
        Ok(rendered) => rendered,
        Err(why) => return Some(Waits::Rendering(why.clone())),
    };
    if let Some(artefact) = rendered.artefact().filter(|artefact| !all.artefacts.contains(artefact)) {
        return Some(Waits::Artefact(artefact));
    }
    let is_well = |id: &&Id| {
        let wanted = all.wanted.and_then(|wanted| wanted.get(id));
        wanted.zip(all.present.get(id)).is_some_and(|(wanted, present)| present.is_well(wanted))
    };
    let waits_for: Vec<Id> = service.depends_on.iter().filter(|id| !is_well(id)).cloned().collect();
    (!waits_for.is_empty()).then_some(Waits::For(waits_for))
}

/// Whether what ended so stays so.
#[must_use]
pub fn stays(service: &Wanted, how: How) -> bool {
    how != How::NotStarted && !service.restart.again(how.status())
}

/// Whether what runs, or may run, is not what is to run.
fn is_to_go(wanted: &BTreeMap<Id, Wanted>, id: &Id, present: &Present) -> bool {
    present.doing.is_live()
        && wanted
            .get(id)
            .is_none_or(|service| service.digest().is_some_and(|digest| digest != present.note.digest))
}

fn stops(all: &Circumstances<'_>, wanted: &BTreeMap<Id, Wanted>, plan: &mut Plan) {
    let going: BTreeMap<&Id, &Present> =
        all.present.iter().filter(|(id, present)| is_to_go(wanted, id, present)).collect();
    let mut running: Vec<&Id> = Vec::new();
    for (id, present) in &going {
        match present.doing {
            Doing::Up { .. } => running.push(id),
            Doing::Stuck { at, .. } if all.now >= at + TRY_AGAIN => running.push(id),
            Doing::Stuck { at, .. } => look_at(plan, at + TRY_AGAIN),
            _ => {}
        }
    }
    let is_needed =
        |id: &Id| going.iter().any(|(other, present)| *other != id && present.note.depends_on.contains(id));
    let mut free: Vec<&Id> = running.iter().copied().filter(|id| !is_needed(id)).collect();
    // Declarations one after the other may have turned who depends on whom; then somebody has to be first.
    if free.is_empty() && running.len() == going.len() {
        free.extend(running.last());
    }
    plan.actions.extend(free.into_iter().map(|id| Action::Stop(id.clone())));
}

fn one(all: &Circumstances<'_>, service: &Wanted, present: &Present, plan: &mut Plan) {
    let Some(digest) = service.digest() else { return };
    let changed = digest != present.note.digest;
    match &present.doing {
        Doing::Down => start(all, service, plan),
        Doing::Ended { .. } if changed => start(all, service, plan),
        Doing::Ended { how, .. } if stays(service, *how) => {}
        Doing::Ended { at, random, .. } => {
            let due = *at + PAUSES.after(present.deaths, *random);
            if all.now >= due {
                start(all, service, plan);
            } else {
                look_at(plan, due);
            }
        }
        Doing::Up { .. } if !changed && present.note != present.note.adjusted(service) => {
            plan.actions.push(Action::Adjust(service.id.clone()));
        }
        Doing::Stuck { at, .. } if !changed => {
            // It was to go, and is wanted again as it was: whether it still runs, stopping it finds out.
            if all.now >= *at + TRY_AGAIN {
                plan.actions.push(Action::Stop(service.id.clone()));
            } else {
                look_at(plan, *at + TRY_AGAIN);
            }
        }
        Doing::Up { .. } | Doing::Stuck { .. } | Doing::Starting | Doing::Stopping | Doing::Forgetting => {}
    }
}

fn start(all: &Circumstances<'_>, service: &Wanted, plan: &mut Plan) {
    if waits(all, service).is_none() {
        plan.actions.push(Action::Start(service.id.clone()));
    }
}

fn look_at(plan: &mut Plan, moment: Moment) {
    plan.look_again = Some(plan.look_again.map_or(moment, |other| other.min(moment)));
}
