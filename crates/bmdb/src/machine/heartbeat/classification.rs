//! Classifying a heartbeat: first, new boot, duplicate, stale, retired; and the facts that it changes.
//!
//! Everything here is pure. The rules are described in [`super`].

use crate::engine::fact_change::FactChange;
use crate::machine::heartbeat::{InstallationOutcome, ReceivedHeartbeat};
use model::cluster::state::MemberReport;
use model::facts::MachineFacts;
use model::healing::{HealingStep, next_healing_step};
use model::phase::Phase;
use model::policy::Policy;
use model::process::Process;
use model::roll_out::ReleaseReport;
use model::time::Timestamp;

/// The event of a lost machine that reports again, in the same boot. Its name stays as it is: the histories of machines
/// have it, and operators search for it.
const REPORTS_AGAIN: &str = "HeardAgain";

/// What a heartbeat is classified by besides the facts.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeartbeatContext {
    /// The boot before the one in the facts.
    pub(crate) previous_boot_id: Option<String>,
    /// The agent process whose hardware report is stored.
    pub(crate) report_incarnation: Option<String>,
    /// The machine's state in its cluster as last reported.
    pub(crate) cluster: Option<MemberReport>,
    /// The agent's release as last reported.
    pub(crate) release: Option<ReleaseReport>,
}

impl HeartbeatContext {
    /// Whether this state differs from the stored one. A machine that was never in a cluster repeats that with each
    /// report, and it is not worth storing.
    fn is_new_cluster_report(&self, report: &MemberReport) -> bool {
        match &self.cluster {
            Some(known) => known != report,
            None => *report != MemberReport::default(),
        }
    }
}

/// The class of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HeartbeatVerdict {
    /// Its machine and key do not belong together.
    Unauthenticated,
    /// Of a machine that is retired.
    Retired,
    /// Older than what is stored, or another one with the same number.
    Stale,
    /// The stored one, sent again.
    Duplicate,
    /// A new heartbeat of the machine's agent.
    Accepted {
        /// The event and detail to record in the machine's history, if any.
        event: Option<(&'static str, String)>,
    },
}

/// Classifies `heartbeat` of a machine with these `facts`, which is in `phase`. Pure.
pub(crate) fn classify_heartbeat(
    facts: &MachineFacts,
    phase: Phase,
    known: &HeartbeatContext,
    heartbeat: &ReceivedHeartbeat,
) -> HeartbeatVerdict {
    let key_is_right =
        facts.agent_started.as_ref().is_some_and(|agent| agent.public_key == heartbeat.public_key);
    if !key_is_right {
        return HeartbeatVerdict::Unauthenticated;
    }
    if phase == Phase::Retired {
        return HeartbeatVerdict::Retired;
    }
    let beat = &heartbeat.beat;
    let Some(stored) = &facts.heartbeat else {
        let detail = format!("agent {} reports from boot {}", beat.version, beat.boot_id);
        return HeartbeatVerdict::Accepted { event: Some(("FirstHeartbeat", detail)) };
    };
    if stored.boot_id != beat.boot_id {
        if known.previous_boot_id.as_ref() == Some(&beat.boot_id)
            && !was_enrolled_in(facts, &beat.boot_id, stored.received_at)
        {
            return HeartbeatVerdict::Stale;
        }
        let detail = format!("boot {}, was {}", beat.boot_id, stored.boot_id);
        return HeartbeatVerdict::Accepted { event: Some(("Booted", detail)) };
    }
    if beat.sequence > stored.sequence {
        let was_lost = matches!(phase, Phase::Silent | Phase::Recovering);
        let event = was_lost.then(|| (REPORTS_AGAIN, format!("from the same boot {}", beat.boot_id)));
        return HeartbeatVerdict::Accepted { event };
    }
    if beat.sequence == stored.sequence
        && beat.incarnation == stored.incarnation
        && reports_are_stored(facts, known, heartbeat)
    {
        return HeartbeatVerdict::Duplicate;
    }
    HeartbeatVerdict::Stale
}

/// Whether the agent was enrolled in that boot after the last report, which then is of a boot before.
fn was_enrolled_in(facts: &MachineFacts, boot: &str, reported: Timestamp) -> bool {
    facts
        .agent_started
        .as_ref()
        .is_some_and(|agent| agent.boot_id.as_deref() == Some(boot) && agent.started_at > reported)
}

/// Whether everything that a repeated heartbeat carries was stored the first time. If not, it is no duplicate:
/// answering it as one would call a report durable that was never written.
fn reports_are_stored(facts: &MachineFacts, known: &HeartbeatContext, heartbeat: &ReceivedHeartbeat) -> bool {
    let hardware = heartbeat
        .hardware
        .as_ref()
        .is_none_or(|report| known.report_incarnation.as_ref() == Some(&report.incarnation));
    let installation =
        heartbeat.installation.as_ref().is_none_or(|outcome| !is_new_installation_outcome(facts, outcome));
    let cluster =
        heartbeat.cluster.as_ref().is_none_or(|member_report| !known.is_new_cluster_report(member_report));
    let release = heartbeat
        .release
        .as_ref()
        .is_none_or(|release_report| known.release.as_ref() == Some(release_report));
    hardware && installation && cluster && release
}

/// Whether an outcome answers the present request for the first time. An outcome of an older request is late and
/// ignored: written over the report of the present request, it would start that installation again.
fn is_new_installation_outcome(facts: &MachineFacts, outcome: &InstallationOutcome) -> bool {
    facts.installation_request.is_some_and(|request| request.generation == outcome.generation)
        && facts.installation_report.is_none_or(|report| report.generation != outcome.generation)
}

/// The changes that an accepted heartbeat makes.
pub(super) fn heartbeat_changes(
    facts: &MachineFacts,
    known: &HeartbeatContext,
    heartbeat: &ReceivedHeartbeat,
) -> Vec<FactChange> {
    let mut changes = vec![FactChange::Heartbeat(heartbeat.beat.clone())];
    changes.extend(heartbeat.hardware.clone().map(FactChange::HardwareReport));
    let news = heartbeat.installation.as_ref().filter(|outcome| is_new_installation_outcome(facts, outcome));
    changes.extend(news.map(|outcome| FactChange::InstallationReport {
        generation: outcome.generation,
        error: outcome.error.clone(),
    }));
    let standing = heartbeat.cluster.clone().filter(|report| known.is_new_cluster_report(report));
    changes.extend(standing.map(FactChange::ClusterReport));
    let release = heartbeat.release.clone().filter(|report| known.release.as_ref() != Some(report));
    changes.extend(release.map(FactChange::ReleaseReport));
    changes
}

/// The changes that an accepted heartbeat makes to a machine that waits for a person, and their line of history.
pub(super) fn healing_changes(
    facts: &MachineFacts,
    policy: &Policy,
    now: Timestamp,
) -> (Vec<FactChange>, Option<(&'static str, String)>) {
    let limit = policy.recovery_silence_timeout;
    match (next_healing_step(facts, policy, now), &facts.needs_human) {
        (Some(HealingStep::Started), _) => {
            let detail =
                format!("it waits for a person, and returns when it has reported for {limit} without a gap");
            (vec![FactChange::NeedsHumanReporting], Some((REPORTS_AGAIN, detail)))
        }
        (Some(HealingStep::Completed), Some(waited)) => {
            let mut changes =
                vec![FactChange::NeedsHumanCleared, FactChange::BackoffCleared(Process::Recovery)];
            changes.extend(facts.recovery.as_ref().map(|_| FactChange::RecoveryCleared));
            let detail = format!(
                "it has reported for {limit} without a gap; it waited for a person because {}",
                waited.reason
            );
            (changes, Some(("Healed", detail)))
        }
        _ => (Vec::new(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fact_change::NewHeartbeat;
    use model::facts::{
        AgentStarted, HeartbeatFact as StoredHeartbeat, InstallationReport, InstallationRequest,
    };
    use model::ids::MachineId;

    const KEY: [u8; 32] = [7; 32];

    fn facts_with_heartbeat(boot: &str, sequence: i64) -> MachineFacts {
        let at = Timestamp::UNIX_EPOCH;
        let mut facts = MachineFacts::empty(MachineId::generate(), at);
        facts.agent_started =
            Some(AgentStarted { started_at: at, public_key: KEY.to_vec(), boot_id: None, fence: 1 });
        facts.heartbeat = Some(StoredHeartbeat {
            received_at: at,
            boot_id: boot.to_owned(),
            incarnation: "i".to_owned(),
            sequence,
        });
        facts
    }

    fn received_heartbeat(machine: MachineId, boot: &str, sequence: i64) -> ReceivedHeartbeat {
        ReceivedHeartbeat {
            machine,
            public_key: KEY,
            beat: NewHeartbeat {
                boot_id: boot.to_owned(),
                incarnation: "i".to_owned(),
                sequence,
                version: "1".to_owned(),
            },
            hardware: None,
            installation: None,
            cluster: None,
            release: None,
            access_fence: 1,
        }
    }

    fn verdict_label(verdict: &HeartbeatVerdict) -> &'static str {
        match verdict {
            HeartbeatVerdict::Unauthenticated => "unauthenticated",
            HeartbeatVerdict::Retired => "retired",
            HeartbeatVerdict::Stale => "stale",
            HeartbeatVerdict::Duplicate => "repeated",
            HeartbeatVerdict::Accepted { event: None } => "plain",
            HeartbeatVerdict::Accepted { event: Some((event, _)) } => event,
        }
    }

    #[test]
    fn heartbeats_are_classified() {
        let facts = facts_with_heartbeat("b", 10);
        let machine = facts.machine;
        let mut never = facts.clone();
        never.heartbeat = None;
        let mut no_agent = facts.clone();
        no_agent.agent_started = None;
        let mut other_key = facts.clone();
        other_key.agent_started.as_mut().unwrap().public_key = vec![8; 32];
        let ready = Phase::Ready;
        for (name, facts, phase, boot, sequence, expected) in [
            ("newer", &facts, ready, "b", 11, "plain"),
            ("same", &facts, ready, "b", 10, "repeated"),
            ("older", &facts, ready, "b", 9, "stale"),
            ("first", &never, Phase::AgentStarting, "b", 1, "FirstHeartbeat"),
            ("first of a silent one", &never, Phase::Silent, "b", 1, "FirstHeartbeat"),
            ("another boot, lower number", &facts, ready, "c", 3, "Booted"),
            ("another boot while recovering", &facts, Phase::Recovering, "c", 3, "Booted"),
            ("the boot before", &facts, ready, "a", 99, "stale"),
            ("newer of a silent one", &facts, Phase::Silent, "b", 11, "HeardAgain"),
            ("newer of a recovering one", &facts, Phase::Recovering, "b", 11, "HeardAgain"),
            ("older of a silent one", &facts, Phase::Silent, "b", 9, "stale"),
            ("same of a silent one", &facts, Phase::Silent, "b", 10, "repeated"),
            ("no agent", &no_agent, ready, "b", 11, "unauthenticated"),
            ("another key", &other_key, ready, "b", 11, "unauthenticated"),
            ("retired", &facts, Phase::Retired, "b", 11, "retired"),
            ("retired, another boot", &facts, Phase::Retired, "c", 1, "retired"),
            ("retired, before its first report", &never, Phase::Retired, "b", 1, "retired"),
            ("another key of a retired one", &other_key, Phase::Retired, "b", 11, "unauthenticated"),
            ("on its way out", &facts, Phase::Retiring, "b", 11, "plain"),
            ("another key, same number", &other_key, ready, "b", 10, "unauthenticated"),
        ] {
            let known =
                HeartbeatContext { previous_boot_id: Some("a".to_owned()), ..HeartbeatContext::default() };
            let verdict =
                classify_heartbeat(facts, phase, &known, &received_heartbeat(machine, boot, sequence));
            assert_eq!(verdict_label(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn boot_of_a_later_enrolment_is_not_a_previous_boot() {
        let known =
            HeartbeatContext { previous_boot_id: Some("a".to_owned()), ..HeartbeatContext::default() };
        for (name, enrolled, boot, expected) in [
            ("enrolled in it since", 60, Some("a"), "Booted"),
            ("enrolled in it before the last report", -60, Some("a"), "stale"),
            ("enrolled in another one", 60, Some("b"), "stale"),
            ("enrolled in one that is not known", 60, None, "stale"),
        ] {
            let mut facts = facts_with_heartbeat("b", 10);
            let agent = facts.agent_started.as_mut().unwrap();
            agent.started_at = Timestamp::from_timestamp(enrolled, 0).unwrap();
            agent.boot_id = boot.map(str::to_owned);
            let verdict = classify_heartbeat(
                &facts,
                Phase::Recovering,
                &known,
                &received_heartbeat(facts.machine, "a", 99),
            );
            assert_eq!(verdict_label(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn same_sequence_of_another_process_is_stale() {
        let facts = facts_with_heartbeat("b", 10);
        let mut other = received_heartbeat(facts.machine, "b", 10);
        other.beat.incarnation = "j".to_owned();
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &other),
            HeartbeatVerdict::Stale
        );
    }

    #[test]
    fn duplicate_with_an_unstored_report_is_stale() {
        let mut facts = facts_with_heartbeat("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let mut again = received_heartbeat(facts.machine, "b", 10);
        again.installation = Some(InstallationOutcome { generation: 2, error: None });
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &again),
            HeartbeatVerdict::Stale
        );
        facts.installation_report = Some(InstallationReport { generation: 2, succeeded: true });
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &again),
            HeartbeatVerdict::Duplicate
        );
    }

    #[test]
    fn late_installation_report_changes_nothing() {
        let mut facts = facts_with_heartbeat("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let outcome = |generation| InstallationOutcome { generation, error: None };
        let mut with = |stored: Option<i64>, generation| {
            facts.installation_report =
                stored.map(|generation| InstallationReport { generation, succeeded: false });
            let mut beat = received_heartbeat(facts.machine, "b", 11);
            beat.installation = Some(outcome(generation));
            heartbeat_changes(&facts, &HeartbeatContext::default(), &beat).len() == 2
        };
        for (stored, generation, written) in [
            (None, 2, true),
            (Some(1), 2, true),
            (Some(2), 2, false),
            (Some(2), 1, false),
            (None, 1, false),
            (None, 3, false),
        ] {
            assert_eq!(with(stored, generation), written, "{stored:?} {generation}");
        }
    }
}
