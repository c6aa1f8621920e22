//! The recoverer: climbs the ladder for machines that fell silent.
//!
//! What to do is decided by `model/recovery.rs`; this does it. Every step is
//! asked for and recorded in one transaction that reads the facts once more,
//! the heartbeat included ([`Work::begin_disturbance`]), right before it is
//! taken; and its outcome is written down, because whoever comes after a crash
//! must know that it may have happened.

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::change::FactChange;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::intent::{Permission, Step};
use crate::bmdb::work::Work;
use crate::manager::access::{Access, AccessError};
use crate::manager::brakes::Brakes;
use crate::manager::breakers::{Admission, Call};
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError, no_longer_due};
use crate::manager::failpoint;
use crate::manager::provider_set::ProviderSet;
use crate::model::backoff::Backoff;
use crate::model::breaker::Open;
use crate::model::facts::{Provided, Recovery};
use crate::model::ids::IntentId;
use crate::model::needs_human::Obstacle;
use crate::model::policy::{Disturbance, Rung};
use crate::model::process::Process;
use crate::model::recovery::{
    RecoveryPlan, Steps, hold_back, look_again, plan_recovery, reenrolled, taken, tried,
};
use crate::model::time::{Span, between};
use crate::providers::provider::{CALL_LIMIT, ErrorClass, PowerAction, Provider, RebootMethod, Rungs};

/// See the module.
pub struct Recoverer {
    /// The providers whose machines it serves.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<Access>,
    /// What holds new ladders.
    pub brakes: Arc<Brakes>,
}

/// What one machine's provider can do for it.
struct Means {
    provided: Provided,
    /// Whoever was asked, and may be asked further; `None` when the plan needs nothing of it.
    provider: Option<(Arc<dyn Provider>, Admission)>,
    /// What the provider said; `None` when it was not asked, or could not say.
    rungs: Option<Rungs>,
}

/// What comes next, and by what means.
struct Planned {
    plan: RecoveryPlan,
    means: Means,
    /// Why the provider could not say what it can do.
    unasked: Option<String>,
    /// Why it was not even asked.
    open: Option<Open>,
}

#[async_trait]
impl ControlLoop for Recoverer {
    fn name(&self) -> &'static str {
        "recoverer"
    }

    fn process(&self) -> Process {
        Process::Recovery
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let Planned { plan, means, unasked, open } = self.plan(work, &snapshot).await?;
        // No try of the ladder is used up for it: nothing was done.
        if let Some(open) = open {
            return Ok(Handled::left_alone(open, snapshot.now));
        }
        if let Some(why) = too_early(&plan, unasked.as_deref()) {
            return Err(HandlerError::new(why));
        }
        match hold_back(plan, work.newer_fence().await?.as_ref()) {
            RecoveryPlan::Recovered { how } => Ok(Handled::finished(vec![FactChange::RecoveryCleared], how)),
            RecoveryPlan::CallPerson { obstacle, reason } => Ok(Handled::finished(
                vec![
                    FactChange::RecoveryCleared,
                    FactChange::NeedsHuman { obstacle, reason: reason.clone() },
                ],
                reason,
            )),
            RecoveryPlan::Wait { until, reason } => Ok(match snapshot.facts.recovery {
                Some(recovery) => Handled::finished(
                    vec![FactChange::Recovery(Recovery { next_at: until, ..recovery })],
                    reason,
                ),
                None => Handled::PutOff { changes: Vec::new(), until, reason },
            }),
            RecoveryPlan::Reenroll { .. } => self.reenroll(work, &snapshot).await,
            RecoveryPlan::Act { rung, what, attempt } => {
                self.act(work, &snapshot, &means, rung, what, attempt).await
            }
        }
    }
}

/// Whether another answer of the provider could lead to another plan.
fn depends_on_provider(plan: &RecoveryPlan) -> bool {
    match plan {
        RecoveryPlan::Act { what, .. } => what.step.reboots(),
        RecoveryPlan::CallPerson { obstacle, .. } => *obstacle == Obstacle::LadderExhausted,
        RecoveryPlan::Recovered { .. } | RecoveryPlan::Wait { .. } | RecoveryPlan::Reenroll { .. } => false,
    }
}

impl Means {
    /// The steps that can be taken, as far as is known.
    fn steps(&self) -> Steps {
        Steps {
            restart_agent: self.provided.address.is_some(),
            reboot: self.rungs.as_ref().is_some_and(Rungs::can_reboot),
            power_cycle: self.rungs.as_ref().is_some_and(Rungs::can_power_cycle),
        }
    }

    /// One of the provider's capabilities, and leave to use it.
    fn control<'m, C: ?Sized>(
        &'m self,
        of: impl FnOnce(&'m dyn Provider) -> Option<&'m C>,
    ) -> Option<(&'m C, &'m Admission)> {
        let (provider, admission) = self.provider.as_ref()?;
        Some((of(&**provider)?, admission))
    }
}

impl Recoverer {
    /// Decides what comes next. The provider is asked only where its answer decides: a slow API must not
    /// hold up what needs nothing of it.
    async fn plan(&self, work: &Work, snapshot: &Snapshot) -> Result<Planned, HandlerError> {
        let (_, policy) = work.bmdb().policy();
        let decide = |steps| plan_recovery(&snapshot.facts, &policy, steps, snapshot.now);
        let provided = snapshot
            .facts
            .provided
            .clone()
            .ok_or_else(|| HandlerError::new("no provider has handed the machine over"))?;
        let mut means = Means { provided, provider: None, rungs: None };
        let plan = decide(Steps { reboot: true, power_cycle: true, ..means.steps() });
        if !depends_on_provider(&plan) {
            return Ok(Planned { plan, means, unasked: None, open: None });
        }
        match self.providers.admit(&means.provided.provider) {
            Ok(admitted) => means.provider = admitted,
            Err(open) => return Ok(Planned { plan, means, unasked: None, open: Some(open) }),
        }
        let mut unasked = None;
        if let Some((provider, admission)) = &means.provider {
            let call = admission.look_up(Call::Rungs, provider.rungs(&means.provided.provider_id));
            match work.call_out(CALL_LIMIT, call).await? {
                Ok(found) => means.rungs = Some(found),
                // The provider may be what is broken; SSH may still work.
                Err(error) => {
                    tracing::warn!(%error, "cannot ask the provider what it can do for a machine");
                    unasked = (error.class != ErrorClass::NotFound).then_some(error.sentence);
                }
            }
        }
        Ok(Planned { plan: decide(means.steps()), means, unasked, open: None })
    }

    async fn act(
        &self,
        work: &Work,
        snapshot: &Snapshot,
        means: &Means,
        rung: usize,
        what: Rung,
        attempt: u32,
    ) -> Result<Handled, HandlerError> {
        if means.provided.address.is_some() {
            self.have_agent().await?;
        }
        let step = Step {
            rung,
            step: what.step,
            attempt,
            deadline: what.deadline,
            decided_on: snapshot.now,
            brake: self.brakes.hold(&means.provided.provider).await?,
            provider: means.provided.provider.clone(),
        };
        let (intent, recovery) = match work.begin_disturbance(step).await? {
            Permission::Granted { intent, recovery } => (intent, recovery),
            Permission::Refused(refusal) => {
                return Ok(Handled::PutOff {
                    changes: Vec::new(),
                    until: refusal.ask_again,
                    reason: refusal.reason,
                });
            }
        };
        tracing::info!(step = %what.step, attempt, %intent, "disturbing a machine");
        failpoint::pass(self.name(), "intended");
        let outcome = self.take_step(work, snapshot, means, what.step, intent).await;
        failpoint::pass(self.name(), "acted");
        let told = match &outcome {
            Ok((_, told)) => format!("done: {told}"),
            Err(error) => format!("failed: {}", error.sentence),
        };
        // The intent's record is for people and budgets; the ladder below is what decides.
        if let Err(error) = work.settle_intent(intent, &told).await {
            tracing::warn!(%intent, %error, "cannot write down how an intent ended");
        }
        failpoint::pass(self.name(), "settled");
        match work.snapshot().await {
            Ok(snapshot) => after_step(outcome, recovery, what, attempt, snapshot.now),
            // What was learnt is true whatever the database says of the time: an agent that was started with
            // a key that nobody stored would be refused.
            Err(error) => Err(HandlerError::from(error).with_changes(match outcome {
                Ok((changes, _)) => changes,
                Err(error) => error.learnt(),
            })),
        }
    }

    async fn take_step(
        &self,
        work: &Work,
        snapshot: &Snapshot,
        means: &Means,
        step: Disturbance,
        intent: IntentId,
    ) -> Result<(Vec<FactChange>, String), AccessError> {
        let id = &means.provided.provider_id;
        match step {
            Disturbance::RestartAgent => {
                let changes = self.access.enroll(work, snapshot).await?;
                Ok((changes, "the agent was started anew".to_owned()))
            }
            Disturbance::Reboot => match means.rungs.as_ref().map(|rungs| &rungs.reboot) {
                Some(RebootMethod::Ssh(argv)) => {
                    Ok((Vec::new(), self.access.run(work, snapshot, argv).await?))
                }
                Some(RebootMethod::Provider) => {
                    let (control, admission) = means
                        .control(|provider| provider.reboot())
                        .ok_or_else(|| AccessError::new("the provider cannot reboot it"))?;
                    work.call_out(CALL_LIMIT, admission.ask(Call::Reboot, control.reboot(id, intent)))
                        .await?
                        .map_err(|error| AccessError::new(error.to_string()))?;
                    Ok((Vec::new(), "the provider took the order".to_owned()))
                }
                Some(RebootMethod::Refused { reason }) => Err(AccessError::new(reason.clone())),
                None => Err(AccessError::new("its provider could not be asked")),
            },
            Disturbance::PowerCycle => {
                let (control, admission) = means
                    .control(|provider| provider.power())
                    .ok_or_else(|| AccessError::new("the provider has no power over it"))?;
                work.call_out(
                    CALL_LIMIT,
                    admission.ask(Call::Power, control.power(id, PowerAction::Cycle, intent)),
                )
                .await?
                .map_err(|error| AccessError::new(error.to_string()))?;
                Ok((Vec::new(), "the provider took the order".to_owned()))
            }
        }
    }

    /// What we lack ourselves is no failure of the machine's: without this, a role server missing on our host
    /// would count as a try, and reboot every silent machine; and who was rebooted would get none again, and
    /// lose power for it.
    async fn have_agent(&self) -> Result<(), HandlerError> {
        self.access.agent.load().await.map(drop).map_err(|error| HandlerError::new(error.to_string()))
    }

    /// The machine was rebooted: it may be up, and its agent may not have survived.
    async fn reenroll(&self, work: &Work, snapshot: &Snapshot) -> Result<Handled, HandlerError> {
        let Some((recovery, acted)) =
            snapshot.facts.recovery.clone().and_then(|recovery| Some((recovery.clone(), recovery.acted?)))
        else {
            return Ok(Handled::finished(Vec::new(), "the ladder was over"));
        };
        self.have_agent().await?;
        let (mut changes, note, obstacle) = match self.access.enroll(work, snapshot).await {
            Ok(changes) => {
                (changes, "the agent was put on it after the reboot; waits for its report".to_owned(), None)
            }
            // A machine that comes up may well refuse us for a while: nobody is called before its time is over.
            Err(error) => {
                (error.learnt(), format!("waits for it to come up: {}", error.sentence), error.obstacle)
            }
        };
        let recovery = reenrolled(recovery, &acted, note.clone(), obstacle, snapshot.now);
        changes.push(FactChange::Recovery(recovery));
        Ok(Handled::finished(changes, note))
    }
}

/// Why nobody may be called yet: what the provider can do is not known, so what is left to try is not
/// either. A provider's outage would else send to a person every machine that falls silent meanwhile.
fn too_early(plan: &RecoveryPlan, unasked: Option<&str>) -> Option<String> {
    match plan {
        RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, .. } => {
            unasked.map(|why| format!("cannot ask the provider what is left to try: {why}"))
        }
        _ => None,
    }
}

/// Where the ladder stands after a step, and how the work ends.
fn after_step(
    outcome: Result<(Vec<FactChange>, String), AccessError>,
    recovery: Recovery,
    what: Rung,
    attempt: u32,
    now: crate::model::time::Timestamp,
) -> Result<Handled, HandlerError> {
    let tried = tried(what, attempt);
    match outcome {
        Ok((mut changes, told)) => {
            let note = format!("{tried}: {told}; waits for its report");
            changes.push(FactChange::Recovery(taken(recovery, what, note.clone(), now)));
            Ok(Handled::finished(changes, note))
        }
        Err(error) => {
            // A try that failed outright has no report to wait for: the next one comes after a
            // pause, not after the deadline.
            let note = format!("{tried}: {}", error.sentence);
            let deadline = recovery.acted.as_ref().map_or(now, |acted| acted.deadline);
            let mut changes = error.learnt();
            let acted =
                recovery.acted.clone().map(|acted| crate::model::facts::Acted { deadline: now, ..acted });
            let pause = Span(
                between(now, look_again(now, deadline, what.deadline)).max(std::time::Duration::from_secs(1)),
            );
            changes.push(FactChange::Recovery(Recovery {
                acted,
                next_at: now,
                note: note.clone(),
                obstacle: error.obstacle,
                ..recovery
            }));
            Err(HandlerError {
                cause: note,
                backoff: Some(Backoff { initial: pause, maximum: pause, exponent: 1.0 }),
                changes,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::Acted;
    use crate::model::time::Timestamp;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    /// A first try of `reboot`, taken at 0, with ten minutes to report.
    fn after_reboot(
        outcome: Result<(Vec<FactChange>, String), AccessError>,
        now: i64,
    ) -> Result<Handled, HandlerError> {
        let what = Rung { step: Disturbance::Reboot, deadline: Span::minutes(10), tries: 2 };
        let acted = Acted {
            step: Disturbance::Reboot,
            at: at(0),
            deadline: at(600),
            boot_id_before: Some("old".to_owned()),
        };
        let recovery = Recovery {
            started_at: at(0),
            rung: 1,
            acted: Some(acted),
            tries: 1,
            next_at: at(0),
            note: "about to reboot the machine".to_owned(),
            obstacle: None,
        };
        after_step(outcome, recovery, what, 1, at(now))
    }

    fn ladder(changes: &[FactChange]) -> Recovery {
        let mut ladders = changes.iter().filter_map(|change| match change {
            FactChange::Recovery(recovery) => Some(recovery.clone()),
            _ => None,
        });
        let only = ladders.next().unwrap();
        assert_eq!(ladders.next(), None);
        only
    }

    #[test]
    fn step_that_was_taken_has_its_whole_deadline() {
        let done = after_reboot(Ok((Vec::new(), "the command succeeded".to_owned())), 5).unwrap();
        let Handled::Finished { changes, detail } = done else { panic!("{done:?}") };
        let ladder = ladder(&changes);
        assert_eq!((ladder.next_at, ladder.acted.unwrap().deadline, ladder.tries), (at(65), at(600), 1));
        assert!(detail.ends_with("(try 1 of 2): the command succeeded; waits for its report"), "{detail}");
    }

    #[test]
    fn step_that_could_not_be_taken_waits_for_no_report() {
        for (now, pause) in [(5, 60), (595, 5), (600, 1), (700, 1)] {
            let error = after_reboot(Err(AccessError::new("no route to host")), now).unwrap_err();
            let ladder = ladder(&error.changes);
            assert_eq!((ladder.next_at, ladder.acted.unwrap().deadline), (at(now), at(now)));
            let backoff = error.backoff.unwrap();
            assert_eq!((backoff.initial, backoff.maximum), (Span::seconds(pause), Span::seconds(pause)));
            assert!(error.cause.ends_with("(try 1 of 2): no route to host"), "{}", error.cause);
        }
    }

    #[test]
    fn what_only_a_person_can_help_with_survives_the_step() {
        let met = |obstacle| {
            let refused = AccessError { obstacle: Some(obstacle), ..AccessError::new("it refused us") };
            after_reboot(Err(refused), 5).unwrap_err().changes
        };
        let changed = met(Obstacle::HostKeyChanged);
        assert_eq!(ladder(&changed).obstacle, Some(Obstacle::HostKeyChanged));
        let reason = "it refused us".to_owned();
        assert!(changed.contains(&FactChange::NeedsHuman { obstacle: Obstacle::HostKeyChanged, reason }));
        let refused = met(Obstacle::LoginRefused);
        assert_eq!(ladder(&refused).obstacle, Some(Obstacle::LoginRefused));
        assert_eq!(refused.len(), 1, "whether to try again is the plan's to say");
    }

    #[test]
    fn provider_is_asked_only_for_what_it_decides() {
        let act = |step| RecoveryPlan::Act {
            rung: 0,
            what: Rung { step, deadline: Span::minutes(1), tries: 1 },
            attempt: 1,
        };
        let call = |obstacle| RecoveryPlan::CallPerson { obstacle, reason: String::new() };
        for (plan, asked) in [
            (act(Disturbance::RestartAgent), false),
            (act(Disturbance::Reboot), true),
            (act(Disturbance::PowerCycle), true),
            (call(Obstacle::LadderExhausted), true),
            (call(Obstacle::LoginRefused), false),
            (RecoveryPlan::Reenroll { deadline: at(0) }, false),
        ] {
            assert_eq!(depends_on_provider(&plan), asked, "{plan:?}");
        }
    }

    #[test]
    fn nobody_is_called_while_the_provider_cannot_be_asked() {
        let call = |obstacle| RecoveryPlan::CallPerson { obstacle, reason: "tried in vain".to_owned() };
        let exhausted = call(Obstacle::LadderExhausted);
        let recovered = RecoveryPlan::Recovered { how: "it reported".to_owned() };
        assert!(too_early(&exhausted, Some("HTTP 503")).unwrap().ends_with(": HTTP 503"));
        assert_eq!(too_early(&exhausted, None), None);
        assert_eq!(too_early(&call(Obstacle::LoginRefused), Some("HTTP 503")), None);
        assert_eq!(too_early(&recovered, Some("HTTP 503")), None);
    }
}
