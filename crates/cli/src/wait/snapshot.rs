//! What is known of an object at one moment: the fields that decide whether it meets a condition, and what to print
//! of it.

use model::time::Timestamp;

/// An object at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// A machine, as lists show it.
    Machine(MachineState),
    /// A cluster with what its machines wait for.
    Cluster(ClusterState),
    /// An update with the machines that failed.
    Update(UpdateState),
    /// The object does not exist.
    Absent,
}

/// The state of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineState {
    /// Phase of its life cycle.
    pub phase: String,
    /// What it waits for, as the schedule has it.
    pub reason: String,
    /// The process that is working on it.
    pub working: Option<String>,
    /// What is known of its power order, if that is what is waited for.
    pub power: PowerState,
}

/// What is known of the power order of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PowerState {
    /// Whether the order has not ended.
    pub is_pending: bool,
    /// Why the order ended without having been carried out.
    pub abandoned: Option<String>,
    /// The boot that the machine last reported from.
    pub boot_id: Option<String>,
    /// When the machine last reported.
    pub heartbeat_at: Option<Timestamp>,
    /// The hold of the machine, if it has one.
    pub hold: Option<HoldState>,
    /// What was known when the waiting began.
    pub first: Option<FirstReport>,
}

/// A hold of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldState {
    /// When it ends by itself; `None` for a hold until its release.
    pub until: Option<Timestamp>,
}

/// What was known of a machine when the waiting for its power order began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstReport {
    /// The boot that it had last reported from.
    pub boot_id: Option<String>,
    /// The database's time of that moment.
    pub at: Timestamp,
}

/// The state of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterState {
    /// Stage, as `get clusters` shows it.
    pub stage: String,
    /// Desired machines of the control plane, and desired workers.
    pub desired: (u32, u32),
    /// Machines of the control plane, and workers, that stay.
    pub members: (u32, u32),
    /// How many machines leave.
    pub leaving: u32,
    /// What the cluster as a whole waits for.
    pub wait_reasons: Vec<String>,
    /// What each machine waits for: its name, and the reason.
    pub machine_waits: Vec<(String, String)>,
    /// The upgrade that is under way, or else the newest one.
    pub upgrade: Option<UpgradeState>,
    /// What is known of the replacement of its authority, if that is what is waited for.
    pub authority: Option<AuthorityState>,
}

/// The state of the replacement of a cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorityState {
    /// It is ordered or under way. The text is how far it is.
    Replacing(String),
    /// None is ordered or under way.
    Settled,
}

/// The state of a cluster's upgrade.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpgradeState {
    /// `finished`, `rolled back` or `aborted`; `None` while it is under way.
    pub outcome: Option<String>,
    /// Why it is paused.
    pub pause_reason: Option<String>,
    /// Nodes that have completed the change.
    pub completed: u32,
    /// Nodes that were requested to change.
    pub requested: u32,
}

/// The state of an update.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpdateState {
    /// `finished` or `aborted`; `None` while it is under way.
    pub outcome: Option<String>,
    /// Why it is paused.
    pub pause_reason: Option<String>,
    /// How many machines are in each state, as text.
    pub counts: String,
    /// Machines that failed: the name, and the reason.
    pub failures: Vec<(String, String)>,
}

/// A sentence about an object, to follow its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The sentence without the name.
    pub text: String,
    /// What makes it another step than a former one: a sentence with another count is the same step.
    pub key: String,
}

impl Step {
    /// A step that is another one whenever a character of it is.
    fn exact(text: String) -> Self {
        Self { key: text.clone(), text }
    }

    /// A step that is another one if more than numbers differ. `subject` is the part of a cluster that it is about.
    fn of_reason(subject: &str, text: String) -> Self {
        let words = text.strip_prefix(subject).unwrap_or(&text);
        let words: String = words.chars().filter(|letter| !letter.is_ascii_digit()).collect();
        Self { key: format!("{subject} {words}"), text }
    }
}

impl Snapshot {
    /// What to print of the object while it is waited for.
    #[must_use]
    pub fn describe_steps(&self) -> Vec<Step> {
        match self {
            Self::Machine(machine) => vec![machine.describe_step()],
            Self::Cluster(cluster) => cluster.describe_steps(),
            Self::Update(update) => update.describe_steps(),
            Self::Absent => Vec::new(),
        }
    }
}

impl MachineState {
    fn describe_step(&self) -> Step {
        let text = match &self.working {
            Some(process) => format!("is {}; {process} is under way", self.phase),
            None if self.reason.is_empty() => format!("is {}", self.phase),
            None => format!("is {}: {}", self.phase, self.reason),
        };
        Step::of_reason("", text)
    }
}

impl ClusterState {
    fn describe_steps(&self) -> Vec<Step> {
        match &self.authority {
            Some(AuthorityState::Replacing(progress)) => {
                return vec![Step::exact(format!("replaces its authority: {progress}"))];
            }
            Some(AuthorityState::Settled) => return Vec::new(),
            None => {}
        }
        let mut steps = vec![Step::exact(format!("is {}", self.stage))];
        if let Some(upgrade) = self.upgrade.as_ref().filter(|upgrade| upgrade.outcome.is_none()) {
            steps.push(Step::exact(upgrade.describe_upgrade()));
        }
        steps.extend(self.wait_reasons.iter().map(|reason| Step::of_reason("", format!("waits: {reason}"))));
        let waits = self.machine_waits.iter();
        steps.extend(waits.map(|(name, reason)| Step::of_reason(name, format!("{name} waits: {reason}"))));
        steps
    }
}

impl UpgradeState {
    fn describe_upgrade(&self) -> String {
        let count = format!("is being upgraded: {} of {} nodes are done", self.completed, self.requested);
        match &self.pause_reason {
            Some(reason) => format!("{count}; it is paused: {reason}"),
            None => count,
        }
    }
}

impl UpdateState {
    fn describe_steps(&self) -> Vec<Step> {
        let text = match (&self.outcome, &self.pause_reason) {
            (Some(outcome), _) => format!("is {outcome}: {}", self.counts),
            (None, Some(reason)) => format!("is paused: {reason}; {}", self.counts),
            (None, None) => format!("is rolling: {}", self.counts),
        };
        let mut steps = vec![Step::exact(text)];
        let failures = self.failures.iter();
        steps
            .extend(failures.map(|(name, reason)| Step::of_reason(name, format!("{name} failed: {reason}"))));
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_with_another_count_is_the_same_step() {
        let machine = |reason: &str| {
            Snapshot::Machine(MachineState {
                phase: "Silent".to_owned(),
                reason: reason.to_owned(),
                ..MachineState::default()
            })
        };
        let key = |reason| machine(reason).describe_steps().remove(0).key;
        assert_eq!(key("brake: 4 of 10 machines"), key("brake: 5 of 10 machines"));
        assert_ne!(key("brake: 4 of 10 machines"), key("held by kim"));
        let waits = |name: &str| {
            let machine_waits = vec![(name.to_owned(), "it learns 3 keys".to_owned())];
            Snapshot::Cluster(ClusterState { machine_waits, ..ClusterState::default() }).describe_steps()
        };
        assert_ne!(waits("sim-1")[1].key, waits("sim-2")[1].key, "of another machine");
    }

    #[test]
    fn steps_have_what_is_waited_for() {
        let upgrade = UpgradeState { completed: 1, requested: 2, ..UpgradeState::default() };
        let paused = UpgradeState { pause_reason: Some("n1: no".to_owned()), ..upgrade.clone() };
        let cluster = |upgrade| {
            Snapshot::Cluster(ClusterState {
                stage: "changing".to_owned(),
                wait_reasons: vec!["no machine is free".to_owned()],
                upgrade: Some(upgrade),
                ..ClusterState::default()
            })
        };
        let authority = |state| {
            let stage = "changing".to_owned();
            Snapshot::Cluster(ClusterState { stage, authority: Some(state), ..ClusterState::default() })
        };
        let update = UpdateState {
            counts: "done 1, failed 1".to_owned(),
            failures: vec![("m1".to_owned(), "no disk".to_owned())],
            ..UpdateState::default()
        };
        let machine = MachineState { phase: "Silent".to_owned(), ..MachineState::default() };
        let works = MachineState { working: Some("Recovery".to_owned()), ..machine.clone() };
        for (snapshot, expected) in [
            (Snapshot::Machine(machine), vec!["is Silent"]),
            (Snapshot::Machine(works), vec!["is Silent; Recovery is under way"]),
            (
                cluster(upgrade.clone()),
                vec!["is changing", "is being upgraded: 1 of 2 nodes are done", "waits: no machine is free"],
            ),
            (
                cluster(paused),
                vec![
                    "is changing",
                    "is being upgraded: 1 of 2 nodes are done; it is paused: n1: no",
                    "waits: no machine is free",
                ],
            ),
            (
                cluster(UpgradeState { outcome: Some("finished".to_owned()), ..upgrade }),
                vec!["is changing", "waits: no machine is free"],
            ),
            (
                authority(AuthorityState::Replacing("it has not begun".to_owned())),
                vec!["replaces its authority: it has not begun"],
            ),
            (authority(AuthorityState::Settled), vec![]),
            (Snapshot::Update(update), vec!["is rolling: done 1, failed 1", "m1 failed: no disk"]),
            (Snapshot::Absent, vec![]),
        ] {
            let texts: Vec<String> = snapshot.describe_steps().into_iter().map(|step| step.text).collect();
            assert_eq!(texts, expected);
        }
    }
}
