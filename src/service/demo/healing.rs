//! What a watcher of a healthy fleet is told: who leaves Ready, through what, and who comes back.
//!
//! Seen by looking again and again and comparing. A machine that left and came
//! back between two looks shows by having entered its phase anew; through what
//! it went is not seen then, and `shepherdctl timeline` has it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::bmdb::live::MachinePhase;
use crate::model::phase::Phase;

/// Longest reason shown, in characters: a line should fit a terminal.
const LONGEST_REASON: usize = 60;

/// Compares one look with the last.
#[derive(Debug, Default)]
pub(super) struct Healing {
    last: BTreeMap<String, MachinePhase>,
    away: BTreeMap<String, Instant>,
    left: usize,
    returned: usize,
}

impl Healing {
    /// Takes a look in, and returns a line for each machine whose phase changed. The first look
    /// changes nothing.
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
                self.left += 1;
                self.returned += 1;
                let away = (machine.since - before.seen).to_std().unwrap_or_default();
                lines.push(format!("  {}  Ready → … (too short to be seen)", machine.name));
                lines.push(format!("  {}  … → Ready, back after less than {}", machine.name, seconds(away)));
            }
            if let Some(before) = before.filter(|before| before.phase != machine.phase) {
                let more = if machine.phase == ready {
                    self.returned += 1;
                    let since = self.away.remove(&machine.name);
                    since.map_or_else(String::new, |since| format!(", back after {}", seconds(now - since)))
                } else {
                    if before.phase == ready {
                        self.left += 1;
                        self.away.insert(machine.name.clone(), now);
                    }
                    // Who was given back is awaited no more.
                    if machine.phase == Phase::Retired.as_str() {
                        self.away.remove(&machine.name);
                    }
                    format!(": {}", shortened(&machine.reason))
                };
                lines.push(format!("  {}  {} → {}{more}", machine.name, before.phase, machine.phase));
            }
            next.insert(machine.name.clone(), machine);
        }
        self.last = next;
        lines
    }

    /// What came of it all, once somebody left; `None` before.
    pub(super) fn summary(&self) -> Option<String> {
        let times = |count: usize| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        (self.left > 0).then(|| {
            let away = match self.away.len() {
                0 => "every machine is Ready".to_owned(),
                count => format!("still away: {count}"),
            };
            format!(
                "machines left Ready {}, and came back {}; {away}",
                times(self.left),
                times(self.returned)
            )
        })
    }
}

fn seconds(span: Duration) -> String {
    format!("{:.1} s", span.as_secs_f64())
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= LONGEST_REASON {
        return text.to_owned();
    }
    let kept: String = text.chars().take(LONGEST_REASON - 1).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Timestamp;

    fn look(phases: &[(&str, &str, &str)]) -> Vec<MachinePhase> {
        let of = |&(name, phase, reason): &(&str, &str, &str)| MachinePhase {
            name: name.to_owned(),
            phase: phase.to_owned(),
            reason: reason.to_owned(),
            since: Timestamp::UNIX_EPOCH,
            seen: Timestamp::UNIX_EPOCH,
        };
        phases.iter().map(of).collect()
    }

    #[test]
    fn who_leaves_and_who_returns_is_told() {
        let mut healing = Healing::default();
        let start = Instant::now();
        let all = [("sim-0001", "Ready", ""), ("sim-0002", "Ready", "")];
        assert!(healing.observe(look(&all), start).is_empty());
        assert_eq!(healing.summary(), None);
        let silent = [("sim-0001", "Ready", ""), ("sim-0002", "Silent", "its agent is silent")];
        assert_eq!(
            healing.observe(look(&silent), start),
            ["  sim-0002  Ready → Silent: its agent is silent"]
        );
        assert!(healing.observe(look(&silent), start).is_empty(), "told once");
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back 0 times; still away: 1"
        );
        let long = "a".repeat(100);
        let recovering = [("sim-0001", "Ready", ""), ("sim-0002", "Recovering", long.as_str())];
        let lines = healing.observe(look(&recovering), start);
        assert!(lines[0].chars().count() <= 100, "{lines:?}");
        assert_eq!(
            healing.observe(look(&all), start + Duration::from_millis(3500)),
            ["  sim-0002  Recovering → Ready, back after 3.5 s"]
        );
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back once; every machine is Ready"
        );
    }
    #[test]
    fn who_was_back_before_the_next_look_is_told_as_well() {
        let mut healing = Healing::default();
        let start = Instant::now();
        let mut machines = look(&[("sim-0001", "Ready", "")]);
        assert!(healing.observe(machines.clone(), start).is_empty());
        machines[0].since += chrono::TimeDelta::milliseconds(240);
        assert_eq!(
            healing.observe(machines.clone(), start),
            [
                "  sim-0001  Ready → … (too short to be seen)",
                "  sim-0001  … → Ready, back after less than 0.2 s"
            ]
        );
        assert!(healing.observe(machines, start).is_empty(), "told once");
        assert_eq!(
            healing.summary().unwrap(),
            "machines left Ready once, and came back once; every machine is Ready"
        );
    }
}
