//! Plan the next actions for services: start, adjust, stop, remove (pure).
//!
//! The plan is made again after every event. No action is planned further ahead, so none can be outdated by the time it
//! is due.
//!
//! * A service starts when all its dependencies are healthy; all services that can start do so at once.
//! * A service that is not desired any more, or has to be restarted, stops once no service runs that depends on it and
//!   has to stop as well: the reverse order.
//! * A service that only depends on a restarted one keeps running. It has to survive the end of its dependency in any
//!   case, because that may crash. If it cannot, it exits, and starts again when the dependency is healthy. So a change
//!   affects only what was changed.
//! * A service that exited is restarted by its policy, after a backoff that grows with each quick exit. A service that
//!   could not be started at all is retried under every policy, because it has not exited.
//! * While the desired services are unknown nothing is done, and what runs continues. The same holds for the services of a
//!   retained role: the node has it, and has refused its declaration or could not read it. So a lost file of declarations
//!   stops nothing, and removes no data.
//!
//! A new rule is a row in the tables of `tests.rs` first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use backoff::ExponentialBackoff;
use model::role_declaration::Sha256;

use crate::cluster::services::desired::{DesiredService, RetainedRoles, ServiceId};
use crate::cluster::services::service_state::{Moment, ObservedService, ServiceExit, ServicePhase};

#[cfg(test)]
mod tests;

/// Backoff between the exit of a service and its next start.
const RESTART_BACKOFF: ExponentialBackoff = ExponentialBackoff::DEFAULT;
/// Delay before stopping or removing is retried after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Inputs of the planner.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'c> {
    /// Desired services; `None` while they are unknown.
    pub desired: Option<&'c BTreeMap<ServiceId, DesiredService>>,
    /// Roles of which services continue although none is desired.
    pub retained: &'c RetainedRoles,
    /// Services that exist on this host in any phase.
    pub observed: &'c BTreeMap<ServiceId, ObservedService>,
    /// Artefacts that are available.
    pub artefacts: &'c BTreeSet<Sha256>,
    /// The current moment of the monotonic clock.
    pub now: Moment,
}

impl PlanInput<'_> {
    /// Whether a service that is not desired continues: its role is retained, and no service of the role is desired.
    #[must_use]
    pub fn is_retained(&self, id: &ServiceId) -> bool {
        self.retained.contains(&id.role)
            && self.desired.is_some_and(|wanted| wanted.keys().all(|other| other.role != id.role))
    }
}

/// One action on a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceAction {
    /// Start a service that does not run.
    Start(ServiceId),
    /// Apply a changed declaration to a running service without a restart.
    Adjust(ServiceId),
    /// Stop a service that may be running.
    Stop(ServiceId),
    /// Remove the files of a service that is not desired any more.
    Remove(ServiceId),
}

/// The next actions, and when to plan again if nothing happens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionPlan {
    /// Actions to execute now.
    pub actions: Vec<ServiceAction>,
    /// When the next backoff or retry is due; `None` if none is.
    pub next_check: Option<Moment>,
}

/// Why a desired service does not start yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// It cannot be rendered; the sentence gives the reason.
    Rendering(String),
    /// It needs an artefact that is not available.
    Artefact(Sha256),
    /// It depends on services that are not healthy.
    Services(Vec<ServiceId>),
}

/// Plans the next actions.
#[must_use]
pub fn plan_services(all: &PlanInput<'_>) -> ActionPlan {
    let Some(wanted) = all.desired else { return ActionPlan::default() };
    let mut plan = ActionPlan::default();
    plan_stops(all, wanted, &mut plan);
    let leaves = |id: &ServiceId| !wanted.contains_key(id) && !all.is_retained(id);
    for (id, present) in all.observed.iter().filter(|(id, _)| leaves(id)) {
        match present.phase {
            ServicePhase::Stopped | ServicePhase::Ended { .. } => {
                plan.actions.push(ServiceAction::Remove(id.clone()));
            }
            ServicePhase::Starting
            | ServicePhase::Running { .. }
            | ServicePhase::Stopping
            | ServicePhase::Stuck { .. }
            | ServicePhase::Removing => {}
        }
    }
    for (id, service) in wanted {
        match all.observed.get(id) {
            None => plan_start(all, service, &mut plan),
            Some(present) => plan_service(all, service, present, &mut plan),
        }
    }
    plan
}

/// What a service waits for before it can start; `None` if it can start.
#[must_use]
pub fn wait_reason(all: &PlanInput<'_>, service: &DesiredService) -> Option<WaitReason> {
    let (rendered, _) = match &service.rendered {
        Ok(rendered) => rendered,
        Err(why) => return Some(WaitReason::Rendering(why.clone())),
    };
    if let Some(artefact) = rendered.artefact().filter(|artefact| !all.artefacts.contains(artefact)) {
        return Some(WaitReason::Artefact(artefact));
    }
    let is_well = |id: &&ServiceId| {
        let wanted = all.desired.and_then(|wanted| wanted.get(id));
        wanted.zip(all.observed.get(id)).is_some_and(|(wanted, present)| present.is_healthy(wanted))
    };
    let waits_for: Vec<ServiceId> = service.depends_on.iter().filter(|id| !is_well(id)).cloned().collect();
    (!waits_for.is_empty()).then_some(WaitReason::Services(waits_for))
}

/// Whether a service that exited this way is not restarted.
#[must_use]
pub fn stays_ended(service: &DesiredService, how: ServiceExit) -> bool {
    how != ServiceExit::NotStarted && !service.restart.restarts_after(how.exit_code())
}

/// Whether a service that may be running has to stop.
fn must_stop(
    all: &PlanInput<'_>,
    wanted: &BTreeMap<ServiceId, DesiredService>,
    id: &ServiceId,
    present: &ObservedService,
) -> bool {
    present.phase.is_live()
        && !all.is_retained(id)
        && wanted
            .get(id)
            .is_none_or(|service| service.digest().is_some() && !present.record.satisfies(service))
}

fn plan_stops(all: &PlanInput<'_>, wanted: &BTreeMap<ServiceId, DesiredService>, plan: &mut ActionPlan) {
    let going: BTreeMap<&ServiceId, &ObservedService> =
        all.observed.iter().filter(|(id, present)| must_stop(all, wanted, id, present)).collect();
    let mut running: Vec<&ServiceId> = Vec::new();
    for (id, present) in &going {
        match present.phase {
            ServicePhase::Running { .. } => running.push(id),
            ServicePhase::Stuck { at, .. } if all.now >= at + RETRY_DELAY => running.push(id),
            ServicePhase::Stuck { at, .. } => schedule_check(plan, at + RETRY_DELAY),
            _ => {}
        }
    }
    let is_needed = |id: &ServiceId| {
        going.iter().any(|(other, present)| *other != id && present.record.depends_on.contains(id))
    };
    let mut free: Vec<&ServiceId> = running.iter().copied().filter(|id| !is_needed(id)).collect();
    // Successive declarations may have reversed dependencies into a cycle; then one service has to stop first.
    if free.is_empty() && running.len() == going.len() {
        free.extend(running.last());
    }
    plan.actions.extend(free.into_iter().map(|id| ServiceAction::Stop(id.clone())));
}

fn plan_service(
    all: &PlanInput<'_>,
    service: &DesiredService,
    present: &ObservedService,
    plan: &mut ActionPlan,
) {
    if service.digest().is_none() {
        return;
    }
    let changed = !present.record.satisfies(service);
    match &present.phase {
        ServicePhase::Stopped => plan_start(all, service, plan),
        ServicePhase::Ended { .. } if changed => plan_start(all, service, plan),
        ServicePhase::Ended { exit: how, .. } if stays_ended(service, *how) => {}
        ServicePhase::Ended { at, random, .. } => {
            let due = *at + RESTART_BACKOFF.delay(present.failures, *random);
            if all.now >= due {
                plan_start(all, service, plan);
            } else {
                schedule_check(plan, due);
            }
        }
        ServicePhase::Running { .. } if !changed && present.record != present.record.adjusted(service) => {
            plan.actions.push(ServiceAction::Adjust(service.id.clone()));
        }
        ServicePhase::Stuck { at, .. } if !changed => {
            // It had to stop, and is desired again as it was. Stopping it once more finds out whether it still runs.
            if all.now >= *at + RETRY_DELAY {
                plan.actions.push(ServiceAction::Stop(service.id.clone()));
            } else {
                schedule_check(plan, *at + RETRY_DELAY);
            }
        }
        ServicePhase::Running { .. }
        | ServicePhase::Stuck { .. }
        | ServicePhase::Starting
        | ServicePhase::Stopping
        | ServicePhase::Removing => {}
    }
}

fn plan_start(all: &PlanInput<'_>, service: &DesiredService, plan: &mut ActionPlan) {
    if wait_reason(all, service).is_none() {
        plan.actions.push(ServiceAction::Start(service.id.clone()));
    }
}

fn schedule_check(plan: &mut ActionPlan, moment: Moment) {
    plan.next_check = Some(plan.next_check.map_or(moment, |other| other.min(moment)));
}
