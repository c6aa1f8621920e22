//! Outcome of a recovery step: the next state of the ladder, and how the work ends.

use std::time::Duration;

use crate::bmdb::engine::fact_change::FactChange;
use crate::manager::control_loop::{HandlerError, HandlerOutcome};
use crate::manager::machine_access::AccessError;
use crate::model::backoff::BackoffPolicy;
use crate::model::facts::{Recovery, RecoveryAction};
use crate::model::policy::Rung;
use crate::model::recovery::{format_attempt, next_check_time, start_report_wait};
use crate::model::time::{Span, Timestamp, between};

/// The state of the ladder after a step, and how the work ends.
pub(super) fn step_outcome(
    outcome: Result<(Vec<FactChange>, String), AccessError>,
    recovery: Recovery,
    what: Rung,
    attempt: u32,
    now: Timestamp,
) -> Result<HandlerOutcome, HandlerError> {
    let tried = format_attempt(what, attempt);
    match outcome {
        Ok((mut changes, text)) => {
            let note = format!("{tried}: {text}; waits for its report");
            changes.push(FactChange::Recovery(start_report_wait(recovery, what, note.clone(), now)));
            Ok(HandlerOutcome::finished(changes, note))
        }
        Err(error) => {
            // An attempt that failed outright has no report to wait for: the next one comes after a pause, not after
            // the deadline.
            let note = format!("{tried}: {}", error.message);
            let deadline = recovery.last_action.as_ref().map_or(now, |acted| acted.deadline);
            let mut changes = error.fact_changes();
            let acted = recovery.last_action.clone().map(|acted| RecoveryAction { deadline: now, ..acted });
            let pause =
                Span(between(now, next_check_time(now, deadline, what.deadline)).max(Duration::from_secs(1)));
            changes.push(FactChange::Recovery(Recovery {
                last_action: acted,
                next_check_at: now,
                note: note.clone(),
                obstacle: error.obstacle,
                ..recovery
            }));
            Err(HandlerError {
                cause: note,
                backoff: Some(BackoffPolicy { initial: pause, maximum: pause, exponent: 1.0 }),
                changes,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::needs_human::Obstacle;
    use crate::model::policy::DisruptionKind;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    /// A first attempt of `reboot`, made at 0, with ten minutes to report.
    fn after_reboot(
        outcome: Result<(Vec<FactChange>, String), AccessError>,
        now: i64,
    ) -> Result<HandlerOutcome, HandlerError> {
        let what = Rung { step: DisruptionKind::Reboot, deadline: Span::minutes(10), tries: 2 };
        let acted = RecoveryAction {
            step: DisruptionKind::Reboot,
            acted_at: at(0),
            deadline: at(600),
            boot_id_before: Some("old".to_owned()),
        };
        let recovery = Recovery {
            started_at: at(0),
            rung: 1,
            last_action: Some(acted),
            attempts: 1,
            next_check_at: at(0),
            note: "about to reboot the machine".to_owned(),
            obstacle: None,
        };
        step_outcome(outcome, recovery, what, 1, at(now))
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
    fn successful_step_gets_its_full_deadline() {
        let done = after_reboot(Ok((Vec::new(), "the command succeeded".to_owned())), 5).unwrap();
        let HandlerOutcome::Finished { changes, detail } = done else { panic!("{done:?}") };
        let ladder = ladder(&changes);
        assert_eq!(
            (ladder.next_check_at, ladder.last_action.unwrap().deadline, ladder.attempts),
            (at(65), at(600), 1)
        );
        assert!(detail.ends_with("(try 1 of 2): the command succeeded; waits for its report"), "{detail}");
    }

    #[test]
    fn failed_step_waits_for_no_report() {
        for (now, pause) in [(5, 60), (595, 5), (600, 1), (700, 1)] {
            let error = after_reboot(Err(AccessError::new("no route to host")), now).unwrap_err();
            let ladder = ladder(&error.changes);
            assert_eq!((ladder.next_check_at, ladder.last_action.unwrap().deadline), (at(now), at(now)));
            let backoff = error.backoff.unwrap();
            assert_eq!((backoff.initial, backoff.maximum), (Span::seconds(pause), Span::seconds(pause)));
            assert!(error.cause.ends_with("(try 1 of 2): no route to host"), "{}", error.cause);
        }
    }

    #[test]
    fn obstacle_survives_the_step() {
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
}
