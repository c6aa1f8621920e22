//! Reports phase changes of a demo's machines: which leave Ready, through which phases, and which come back.
//!
//! It polls and compares. A machine that left and came back between two polls is noticed because it entered its phase
//! again. The phases in between are not seen then; `shepherdctl timeline` shows them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::bmdb::fleet::counts::MachinePhase;
use crate::model::phase::Phase;

/// Longest reason shown, in characters: a line should fit a terminal.
const MAX_REASON_CHARS: usize = 60;

/// Compares each poll with the previous one.
#[derive(Debug, Default)]
pub(super) struct PhaseChanges {
    last: BTreeMap<String, MachinePhase>,
    away: BTreeMap<String, Instant>,
    left_count: usize,
    returned_count: usize,
}

impl PhaseChanges {
    /// Takes the result of a poll, and returns a line for each machine whose phase has changed. The first poll returns
    /// none.
    pub(super) fn observe(&mut self, machines: Vec<MachinePhase>, now: Instant) -> Vec<String> {
        let ready = Phase::Ready.as_str();
        let mut lines = Vec::new();
        let mut next = BTreeMap::new();
        for machine in machines {
            let before = self.last.remove(&machine.name);
            if let Some(before) = &before
                && before.phase == machine.phase
                && before.since != machine.since
                && machine.phase == ready
            {
                self.left_count += 1;
                self.returned_count += 1;
                let away = (machine.since - before.read_at).to_std().unwrap_or_default();
                lines.push(format!("  {}  Ready → … (too short to be seen)", machine.name));
                lines.push(format!(
                    "  {}  … → Ready, back after less than {}",
                    machine.name,
                    format_seconds(away)
                ));
            }
            if let Some(before) = before.filter(|before| before.phase != machine.phase) {
                let more = if machine.phase == ready {
                    self.returned_count += 1;
                    let since = self.away.remove(&machine.name);
                    since.map_or_else(String::new, |since| {
                        format!(", back after {}", format_seconds(now - since))
                    })
                } else {
                    if before.phase == ready {
                        self.left_count += 1;
                        self.away.insert(machine.name.clone(), now);
                    }
                    // A machine that was released is not expected back.
                    if machine.phase == Phase::Retired.as_str() {
                        self.away.remove(&machine.name);
                    }
                    format!(": {}", truncate(&machine.reason))
                };
                lines.push(format!("  {}  {} → {}{more}", machine.name, before.phase, machine.phase));
            }
            next.insert(machine.name.clone(), machine);
        }
        self.last = next;
        lines
    }

    /// A summary of all changes; `None` if no machine has left Ready.
    pub(super) fn summary(&self) -> Option<String> {
        let times = |count: usize| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        (self.left_count > 0).then(|| {
            let away = match self.away.len() {
                0 => "every machine is Ready".to_owned(),
                count => format!("still away: {count}"),
            };
            format!(
                "machines left Ready {}, and came back {}; {away}",
                times(self.left_count),
                times(self.returned_count)
            )
        })
    }
}

fn format_seconds(span: Duration) -> String {
    format!("{:.1} s", span.as_secs_f64())
}

fn truncate(text: &str) -> String {
    if text.chars().count() <= MAX_REASON_CHARS {
        return text.to_owned();
    }
    let kept: String = text.chars().take(MAX_REASON_CHARS - 1).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Timestamp;

    fn observation(phases: &[(&str, &str, &str)]) -> Vec<MachinePhase> {
        let of = |&(name, phase, reason): &(&str, &str, &str)| MachinePhase {
            name: name.to_owned(),
            phase: phase.to_owned(),
            reason: reason.to_owned(),
            since: Timestamp::UNIX_EPOCH,
            read_at: Timestamp::UNIX_EPOCH,
        };
        phases.iter().map(of).collect()
    }

    #[test]
    fn leaving_and_returning_machines_are_reported() {
        let mut healing = PhaseChanges::default();
        let start = Instant::now();
        let all = [("sim-0001", "Ready", ""), ("sim-0002", "Ready", "")];
        assert!(healing.observe(observation(&all), start).is_empty());
        assert_eq!(healing.summary(), None);
        let silent = [("sim-0001", "Ready", ""), ("sim-0002", "Silent", "its agent is silent")];
        assert_eq!(
            healing.observe(observation(&silent), start),
            ["  sim-0002  Ready → Silent: its agent is silent"]
        );
        assert!(healing.observe(observation(&silent), start).is_empty(), "reported once");
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back 0 times; still away: 1"
        );
        let long = "a".repeat(100);
        let recovering = [("sim-0001", "Ready", ""), ("sim-0002", "Recovering", long.as_str())];
        let lines = healing.observe(observation(&recovering), start);
        assert!(lines[0].chars().count() <= 100, "{lines:?}");
        assert_eq!(
            healing.observe(observation(&all), start + Duration::from_millis(3500)),
            ["  sim-0002  Recovering → Ready, back after 3.5 s"]
        );
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back once; every machine is Ready"
        );
    }
    #[test]
    fn machine_back_between_observations_is_reported() {
        let mut healing = PhaseChanges::default();
        let start = Instant::now();
        let mut machines = observation(&[("sim-0001", "Ready", "")]);
        assert!(healing.observe(machines.clone(), start).is_empty());
        machines[0].since += chrono::TimeDelta::milliseconds(240);
        assert_eq!(
            healing.observe(machines.clone(), start),
            [
                "  sim-0001  Ready → … (too short to be seen)",
                "  sim-0001  … → Ready, back after less than 0.2 s"
            ]
        );
        assert!(healing.observe(machines, start).is_empty(), "reported once");
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back once; every machine is Ready"
        );
    }
}
