//! Commands that would help a machine, ready to be pasted.

use crate::machine_view::MachineView;
use crate::needs_human::Obstacle;
use crate::retirement::{check_waiver, retirement_state};
use crate::schedule::DueWork;
use crate::time::Timestamp;
use crate::why::notes::{brake_applies, relevant_pauses};
use crate::why::{Advice, current_obstacle};

/// Commands that would help; `word` is the machine's name, quoted for a shell.
pub(super) fn collect_advice(view: &MachineView, due: &DueWork, word: &str, now: Timestamp) -> Vec<Advice> {
    let facts = &view.facts;
    let mut advice = retirement_advice(view, word, now);
    let mut add = |command: String, when: &str| advice.push(Advice { command, when: when.to_owned() });
    for pause in relevant_pauses(view, due, now) {
        add(
            pause.resume_command(),
            "when the pause has served its purpose: work that became due in the meantime then begins",
        );
    }
    // A retiring machine does not wait for recovery.
    let stays = facts.retirement.is_none();
    let needs_human = stays && facts.needs_human.is_some();
    let refused = view.host_keys.as_ref().and_then(|keys| keys.rejected.as_ref()).filter(|_| stays);
    if let Some((offered, _)) = refused {
        add(
            format!("shepherdctl allow host-key {word} --fingerprint {}", offered.fingerprint()),
            "once you know that this key is the machine's own (on its console: ssh-keygen -lf \
             /etc/ssh/ssh_host_ed25519_key.pub)",
        );
        if needs_human {
            add(format!("shepherdctl retry {word}"), "when it shows the pinned key again");
        }
    }
    let held = facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now));
    if needs_human && !held {
        add(
            format!("shepherdctl hold {word} --reason 'WHAT FOR'"),
            "before you work on it, so that it receives no orders meanwhile",
        );
    }
    if held {
        add(format!("shepherdctl release {word}"), "when the hold has served its purpose");
    }
    if facts.quarantine.is_some() {
        add(format!("shepherdctl release {word} --quarantine"), "when provider and BMDB agree again");
    }
    if needs_human && refused.is_none() {
        add(format!("shepherdctl timeline {word}"), "to see what was tried");
        let when = match current_obstacle(facts) {
            Some(Obstacle::LoginRefused) => "when it lets Shepherd log in: all work on it begins again",
            _ => "when you have removed the cause: all work on it begins again",
        };
        add(format!("shepherdctl retry {word}"), when);
    } else if facts.backoffs.iter().any(|(_, fact)| fact.until > now) && refused.is_none() {
        add(format!("shepherdctl retry {word}"), "when the cause is gone: tries again at once");
    }
    if view.unknown_fence.is_some() {
        add(
            "shepherdctl declare restored --reason 'WHICH BACKUP, AND WHY'".to_owned(),
            "when this database was restored from that backup, is the one that counts, and every shepherd is stopped",
        );
    }
    if view.brakes.iter().any(|brake| brake_applies(brake, facts)) {
        add("shepherdctl get providers".to_owned(), "to see every brake that is on; they release themselves");
    }
    advice
}

/// Commands that would help a retiring machine.
fn retirement_advice(view: &MachineView, word: &str, now: Timestamp) -> Vec<Advice> {
    let (facts, policy) = (&view.facts, &view.policy);
    let Some(retirement) = facts.retirement.as_ref().filter(|fact| fact.finished_at.is_none()) else {
        return Vec::new();
    };
    let mut advice = Vec::new();
    let stage = retirement_state(retirement, policy).stage;
    let cluster = view.cluster.as_ref().map(|cluster| cluster.name.as_str());
    if check_waiver(facts, policy, cluster, stage, now).is_ok() {
        advice.push(Advice {
            command: format!(
                "shepherdctl retire waive {word} {stage} --confirm 'WHAT REMAINS UNDONE' --reason 'WHY'"
            ),
            when: "when this stage cannot be done and is not needed; the command prints what to type"
                .to_owned(),
        });
    }
    if retirement.release.is_none() {
        advice.push(Advice {
            command: format!("shepherdctl retire cancel {word}"),
            when: "to keep the machine; possible until its provider is ordered to take it back".to_owned(),
        });
    }
    advice
}

#[cfg(test)]
mod tests {
    use crate::facts::{MachineFacts, NeedsHuman, Retirement};
    use crate::ids::MachineId;
    use crate::needs_human::Obstacle;
    use crate::sample_machine::{agent_started, at, heartbeat, machine_view};
    use crate::why::explain_machine;

    #[test]
    fn retiring_machine_gets_no_recovery_advice() {
        let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
        facts.agent_started = Some(agent_started(0));
        facts.heartbeat = Some(heartbeat(95));
        facts.needs_human = Some(NeedsHuman {
            since: at(1),
            reason: "tried in vain".into(),
            obstacle: Obstacle::LadderExhausted,
            reporting_since: Some(at(90)),
        });
        let why = |facts: &MachineFacts| explain_machine(&machine_view(facts.clone(), 100));
        let stays = why(&facts);
        assert_eq!(stays.obstacle.as_deref(), Some("ladder-exhausted"));
        assert!(
            stays.deadline.is_some_and(|deadline| deadline.consequence.contains("returns without a person"))
        );
        assert_eq!(stays.advice.len(), 3, "{:?}", stays.advice);

        let mut retirement = Retirement::new("old".into(), "kim".into(), at(50));
        facts.retirement = Some(retirement.clone());
        let leaves = why(&facts);
        assert_eq!(leaves.obstacle, None);
        assert!(leaves.deadline.is_some_and(|deadline| deadline.consequence.contains("overdue")));
        let commands: Vec<&str> = leaves.advice.iter().map(|advice| advice.command.as_str()).collect();
        assert!(
            matches!(commands[..], [one] if one.starts_with("shepherdctl retire cancel ")),
            "{commands:?}"
        );

        retirement.finished_at = Some(at(60));
        facts.retirement = Some(retirement);
        let out = why(&facts);
        assert_eq!((out.obstacle, out.deadline, out.advice), (None, None, Vec::new()));
    }
}
