//! Rolling out a release: which machine is next, which one is done, and when to stand still.
//!
//! A few machines at a time are asked to become it. The next one is asked when those before have reported the release
//! and are well: their agents are heard, and where they are nodes of a cluster their curators call them healthy. Of a
//! cluster's control plane one machine at a time is asked, and only while every member is reached. One failure stops it:
//! what is bad on one machine is likely to be bad on all of them, and a person decides how it goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::process::UnknownName;
use crate::model::release::Report;
use crate::model::time::{Timestamp, after, between};

/// Most machines of one roll-out.
pub const MOST: usize = 10_000;
/// Most machines that are asked at a time.
pub const MOST_AT_A_TIME: u32 = 50;
/// How long a release may take to be heard, in seconds.
pub const DEADLINES: std::ops::RangeInclusive<u32> = 5..=3_600;
/// How long a machine that runs the release may take to be well.
const WELL_WITHIN: Duration = Duration::from_mins(5);
/// How long after the machine's own limits a report may come.
const REPORT: Duration = Duration::from_mins(2);
/// A curator that has not said anything for so long says nothing about now.
const FRESH: Duration = Duration::from_mins(1);
/// How long a node is looked at before it counts as healthy: longer than its curator bears silence.
const SETTLED: Duration = Duration::from_secs(15);

/// How far a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It was not asked yet.
    Waiting,
    /// It was asked.
    Ordered,
    /// It runs the release and is well.
    Done,
    /// It does not.
    Failed,
    /// It is not asked any more.
    Skipped,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Waiting, Self::Ordered, Self::Done, Self::Failed, Self::Skipped];

    /// Its name in the database and for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Ordered => "ordered",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for State {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|state| state.as_str() == name).ok_or_else(|| UnknownName {
            what: "state of a machine in a roll-out",
            name: name.to_owned(),
            known: "waiting, ordered, done, failed, skipped",
        })
    }
}

/// A roll-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOut {
    /// The release.
    pub sha256: [u8; 32],
    /// How many machines at a time.
    pub parallelism: usize,
    /// How long each may take to fetch it, and then to be heard.
    pub deadline: Duration,
    /// Why it stands still.
    pub paused: Option<String>,
}

/// A machine as a node of its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The cluster's name.
    pub cluster: String,
    /// Whether it is of the control plane.
    pub control_plane: bool,
    /// Whether its curator called it healthy.
    pub healthy: bool,
    /// When the curators answered last.
    pub seen_at: Option<Timestamp>,
    /// Whether every member of etcd that votes was reached.
    pub all_reached: bool,
}

/// A machine of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// It.
    pub machine: MachineId,
    /// Its name.
    pub name: String,
    /// How far it is.
    pub state: State,
    /// The order that it was given.
    pub generation: Option<i64>,
    /// Since when it is so far.
    pub changed_at: Timestamp,
    /// What its agent said last, and since when that is so.
    pub report: Option<(Report, Timestamp)>,
    /// Where it is in its life.
    pub phase: Phase,
    /// Why nobody may disturb it, a sentence.
    pub stop: Option<String>,
    /// Whether it leaves the fleet.
    pub leaves: bool,
    /// What it is in a cluster.
    pub node: Option<Node>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask a machine to become it.
    Order(MachineId),
    /// A machine is through, and how, a sentence.
    Conclude(MachineId, State, String),
    /// Stand still, and why.
    Pause(String),
    /// All machines are through.
    Finish,
}

/// What follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<Step>,
    /// What machines wait for.
    pub waits: BTreeMap<MachineId, String>,
}

/// Clusters of which these machines, being asked, are of the control plane.
pub fn disturbed(members: &[Member]) -> impl Iterator<Item = &str> {
    members.iter().filter(|member| member.state == State::Ordered).filter_map(control_plane_of)
}

/// Decides; `elsewhere` are the clusters whose control planes other roll-outs disturb, and `may_begin` is how many more
/// machines the fleet's budget allows now.
///
/// Standing still comes before what it is for: whoever dies in between finds the machine as it was, judges it again, and
/// has asked nobody else.
#[must_use]
pub fn plan(
    roll_out: &RollOut,
    members: &[Member],
    elsewhere: &BTreeSet<String>,
    may_begin: usize,
    now: Timestamp,
) -> Plan {
    let mut plan = Plan::default();
    let mut failed = Vec::new();
    let (mut in_flight, mut open) = (0_usize, 0_usize);
    let mut disturbed: BTreeSet<&str> = elsewhere.iter().map(String::as_str).collect();
    for member in members.iter().filter(|member| member.state == State::Ordered) {
        if member.leaves {
            plan.steps.push(leaves(member));
            continue;
        }
        match judge(roll_out, member, now) {
            Ok(Some(wait)) => {
                in_flight += 1;
                open += 1;
                disturbed.extend(control_plane_of(member));
                plan.waits.insert(member.machine, wait);
            }
            Ok(None) => {
                plan.steps.push(Step::Conclude(
                    member.machine,
                    State::Done,
                    "it runs the release".to_owned(),
                ));
            }
            Err(why) => {
                failed.push(format!("{}: {why}", member.name));
                plan.steps.push(Step::Conclude(member.machine, State::Failed, why));
            }
        }
    }
    let stands = roll_out.paused.is_some() || !failed.is_empty();
    let mut left = may_begin;
    for member in members.iter().filter(|member| member.state == State::Waiting) {
        if member.leaves {
            plan.steps.push(leaves(member));
            continue;
        }
        if member.report.as_ref().is_some_and(|(report, _)| report.sha256 == roll_out.sha256) {
            let said = "it ran the release already".to_owned();
            plan.steps.push(Step::Conclude(member.machine, State::Done, said));
            continue;
        }
        open += 1;
        if stands {
            continue;
        }
        if in_flight >= roll_out.parallelism {
            plan.waits.insert(member.machine, format!("{in_flight} before it are not through yet"));
            continue;
        }
        match objection(member, &disturbed, now) {
            Some(wait) => drop(plan.waits.insert(member.machine, wait)),
            None if left == 0 => {
                let wait =
                    "as many machines as may be were disturbed (shepherdctl get budgets: restart-agent)";
                plan.waits.insert(member.machine, wait.to_owned());
            }
            None => {
                (in_flight, left) = (in_flight + 1, left - 1);
                disturbed.extend(control_plane_of(member));
                plan.steps.push(Step::Order(member.machine));
            }
        }
    }
    if open == 0 {
        plan.steps.push(Step::Finish);
    } else if !failed.is_empty() {
        plan.steps.insert(0, Step::Pause(failed.join("; ")));
    }
    plan
}

fn leaves(member: &Member) -> Step {
    Step::Conclude(member.machine, State::Skipped, "it leaves the fleet".to_owned())
}

/// The cluster of whose control plane a machine is, if it is of one.
#[must_use]
pub fn control_plane_of(member: &Member) -> Option<&str> {
    member.node.as_ref().filter(|node| node.control_plane).map(|node| node.cluster.as_str())
}

/// What a machine that was asked is waited for; none when it is through. The error is why it has failed.
fn judge(roll_out: &RollOut, member: &Member, now: Timestamp) -> Result<Option<String>, String> {
    let asked = member.generation.unwrap_or_default();
    let Some((report, since)) = member.report.as_ref().filter(|(report, _)| report.generation >= asked)
    else {
        let patience = roll_out.deadline.saturating_mul(2).saturating_add(REPORT);
        if after(member.changed_at, patience) < now {
            return Err("it has not said what became of the release".to_owned());
        }
        return Ok(Some("it fetches the release and tries it".to_owned()));
    };
    if let Some(error) = &report.error {
        return Err(error.clone());
    }
    if report.sha256 != roll_out.sha256 {
        return Err(format!("it runs another release: {}", hex::encode(&report.sha256[..8])));
    }
    match unwell(member, Some(*since), now) {
        None => Ok(None),
        Some(why) if after(*since, WELL_WITHIN) < now => {
            Err(format!("it runs the release and is not well: {why}"))
        }
        Some(why) => Ok(Some(format!("it runs the release; {why}"))),
    }
}

/// Why a machine is not well; as a node, since a moment.
fn unwell(member: &Member, since: Option<Timestamp>, now: Timestamp) -> Option<String> {
    if !matches!(member.phase, Phase::Ready | Phase::Installed) {
        return Some(format!("it is {}", member.phase));
    }
    let node = member.node.as_ref()?;
    let settled = since.map(|since| after(since, SETTLED));
    let Some(seen) = node.seen_at.filter(|seen| between(*seen, now) <= FRESH) else {
        return Some(format!("none of the curators of cluster {} answers", node.cluster));
    };
    if !node.healthy {
        return Some(format!("its curator (cluster {}) does not call it healthy", node.cluster));
    }
    if node.control_plane && !node.all_reached {
        return Some(format!("not all members of cluster {} are reached", node.cluster));
    }
    settled
        .filter(|settled| seen < *settled)
        .map(|_| format!("its curator (cluster {}) has yet to say that it is healthy", node.cluster))
}

/// Why a machine is not asked now.
fn objection(member: &Member, disturbed: &BTreeSet<&str>, now: Timestamp) -> Option<String> {
    if let Some(stop) = &member.stop {
        return Some(stop.clone());
    }
    if let Some(why) = unwell(member, None, now) {
        return Some(why);
    }
    if member.report.is_none() {
        let said =
            "its role server is of a release that does not replace itself; a takeover brings it another one";
        return Some(said.to_owned());
    }
    control_plane_of(member).filter(|cluster| disturbed.contains(cluster)).map(|cluster| {
        format!("another machine of the control plane of cluster {cluster} is not through yet")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: [u8; 32] = [2; 32];
    const OLD: [u8; 32] = [1; 32];

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn roll_out(parallelism: usize) -> RollOut {
        RollOut { sha256: NEW, parallelism, deadline: Duration::from_mins(2), paused: None }
    }

    #[expect(clippy::unnecessary_wraps, reason = "as a member has it")]
    fn report(generation: i64, sha256: [u8; 32], error: Option<&str>) -> Option<(Report, Timestamp)> {
        Some((Report { generation, sha256, error: error.map(str::to_owned) }, at(0)))
    }

    fn member(number: u128) -> Member {
        Member {
            machine: MachineId(uuid::Uuid::from_u128(number)),
            name: format!("m{number}"),
            state: State::Waiting,
            generation: None,
            changed_at: at(0),
            report: report(0, OLD, None),
            phase: Phase::Ready,
            stop: None,
            leaves: false,
            node: None,
        }
    }

    fn ordered(number: u128) -> Member {
        Member { state: State::Ordered, generation: Some(1), ..member(number) }
    }

    #[expect(clippy::unnecessary_wraps, reason = "as a member has it")]
    fn node(cluster: &str, control_plane: bool) -> Option<Node> {
        let cluster = cluster.to_owned();
        Some(Node { cluster, control_plane, healthy: true, seen_at: Some(at(30)), all_reached: true })
    }

    fn none() -> BTreeSet<String> {
        BTreeSet::new()
    }

    fn orders(plan: &Plan) -> Vec<u128> {
        let of = |step: &Step| match step {
            Step::Order(machine) => Some(machine.0.as_u128()),
            _ => None,
        };
        plan.steps.iter().filter_map(of).collect()
    }

    #[test]
    fn next_machine_is_asked_when_those_before_are_through() {
        let through = Member { report: report(1, NEW, None), ..ordered(1) };
        for (what, first, expected) in [
            ("nobody was asked", member(1), vec![1]),
            ("it was asked", ordered(1), vec![]),
            ("it is through", through.clone(), vec![2]),
            ("it runs it and is silent", Member { phase: Phase::Silent, ..through.clone() }, vec![]),
            (
                "it runs it, as a node that is well",
                Member { node: node("a", false), ..through.clone() },
                vec![2],
            ),
            (
                "its curator has not looked since",
                Member {
                    node: Some(Node { seen_at: Some(at(10)), ..node("a", false).unwrap() }),
                    ..through.clone()
                },
                vec![],
            ),
            (
                "its curator does not call it healthy",
                Member {
                    node: Some(Node { healthy: false, ..node("a", false).unwrap() }),
                    ..through.clone()
                },
                vec![],
            ),
            (
                "another member of its control plane is not reached",
                Member {
                    node: Some(Node { all_reached: false, ..node("a", true).unwrap() }),
                    ..through.clone()
                },
                vec![],
            ),
            ("it ran it before", Member { report: report(0, NEW, None), ..member(1) }, vec![2]),
            ("it leaves", Member { leaves: true, ..member(1) }, vec![2]),
            ("somebody holds it", Member { stop: Some("held".to_owned()), ..member(1) }, vec![2]),
            ("it is not well", Member { phase: Phase::Recovering, ..member(1) }, vec![2]),
            ("it has no such role server", Member { report: None, ..member(1) }, vec![2]),
        ] {
            let plan = plan(&roll_out(1), &[first, member(2), member(3)], &none(), 9, at(40));
            assert_eq!(orders(&plan), expected, "{what}: {plan:?}");
            assert!(plan.waits.contains_key(&member(3).machine), "{what}: {plan:?}");
        }
    }

    #[test]
    fn failure_stops_it_and_says_which_machine_and_why() {
        let late = at(40 + 2 * 120 + 120);
        let runs = Member { report: report(1, NEW, None), ..ordered(1) };
        for (what, first, now, expected) in [
            ("it gave it up", Member { report: report(1, OLD, Some("no")), ..ordered(1) }, at(40), "m1: no"),
            (
                "it runs another one",
                Member { report: report(1, OLD, None), ..ordered(1) },
                at(40),
                "m1: it runs another",
            ),
            ("it says nothing", ordered(1), late, "m1: it has not said"),
            (
                "it gets not well",
                Member { phase: Phase::Silent, ..runs },
                at(301),
                "m1: it runs the release and is not",
            ),
        ] {
            let plan = plan(&roll_out(2), &[first, member(2)], &none(), 9, now);
            assert_eq!(orders(&plan), [0; 0], "{what}");
            // It stands still first: else whoever comes next finds no failure, and asks the next machine.
            let Some(Step::Pause(why)) = plan.steps.first() else { panic!("{what}: {plan:?}") };
            assert!(why.starts_with(expected), "{what}: {why}");
            assert!(matches!(plan.steps[1], Step::Conclude(_, State::Failed, _)), "{what}");
        }
        let paused = RollOut { paused: Some("kim".to_owned()), ..roll_out(2) };
        assert_eq!(plan(&paused, &[member(1)], &none(), 9, at(40)).steps, []);
        // One that is through while it stands still is.
        let through = Member { report: report(1, NEW, None), ..ordered(1) };
        let steps = plan(&paused, &[through, member(2)], &none(), 9, at(40)).steps;
        assert!(matches!(steps[..], [Step::Conclude(_, State::Done, _)]), "{steps:?}");
    }

    #[test]
    fn few_at_a_time_and_of_a_control_plane_one() {
        let many: Vec<Member> = (1..=5).map(member).collect();
        assert_eq!(orders(&plan(&roll_out(3), &many, &none(), 9, at(40))), [1, 2, 3]);
        assert_eq!(
            orders(&plan(&roll_out(3), &many, &none(), 2, at(40))),
            [1, 2],
            "no more than the budget allows"
        );
        let of = |number, cluster, part| Member { node: node(cluster, part), ..member(number) };
        let all = [of(1, "a", true), of(2, "a", true), of(3, "b", true), of(4, "a", false), of(5, "a", true)];
        assert_eq!(orders(&plan(&roll_out(9), &all, &none(), 9, at(40))), [1, 3, 4]);
        let first = Member { state: State::Ordered, generation: Some(1), ..of(1, "a", true) };
        assert_eq!(orders(&plan(&roll_out(9), &[first, of(2, "a", true)], &none(), 9, at(40))), [0; 0]);
    }

    #[test]
    fn what_another_roll_out_disturbs_is_left_alone() {
        let of = |number, cluster, part| Member { node: node(cluster, part), ..member(number) };
        let asked = Member { state: State::Ordered, generation: Some(1), ..of(7, "a", true) };
        let elsewhere: BTreeSet<String> =
            disturbed(&[asked, of(8, "b", true), ordered(9)]).map(str::to_owned).collect();
        assert_eq!(elsewhere, BTreeSet::from(["a".to_owned()]));
        let all = [of(1, "a", true), of(2, "a", false), of(3, "b", true)];
        assert_eq!(orders(&plan(&roll_out(9), &all, &elsewhere, 9, at(40))), [2, 3]);
    }

    #[test]
    fn machine_that_leaves_is_no_failure() {
        let leaving = Member { leaves: true, phase: Phase::Retiring, ..ordered(1) };
        for now in [at(40), at(100_000)] {
            let steps = plan(&roll_out(1), &[leaving.clone(), member(2)], &none(), 9, now).steps;
            assert!(matches!(steps[0], Step::Conclude(_, State::Skipped, _)), "{steps:?}");
            assert!(!steps.iter().any(|step| matches!(step, Step::Pause(_))), "{steps:?}");
        }
    }

    #[test]
    fn it_ends_when_every_machine_is_through() {
        let through = Member { report: report(1, NEW, None), ..ordered(1) };
        let failed = Member { state: State::Failed, ..member(2) };
        let steps = plan(&roll_out(1), &[through, failed.clone()], &none(), 9, at(40)).steps;
        assert_eq!(steps.last(), Some(&Step::Finish));
        assert_eq!(plan(&roll_out(1), &[failed, ordered(3)], &none(), 9, at(40)).steps, []);
        // Also when the last one has failed: nothing is left to stand still for.
        let last = Member { report: report(1, OLD, Some("no")), ..ordered(1) };
        assert_eq!(plan(&roll_out(1), &[last], &none(), 9, at(40)).steps.last(), Some(&Step::Finish));
    }

    #[test]
    fn states_have_names() {
        for state in State::ALL {
            assert_eq!(state.as_str().parse::<State>().unwrap(), state);
        }
        assert!("odd".parse::<State>().is_err());
    }
}
