//! Tests: each kind of issue, just within its limit and just beyond.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::backoff::BackoffFact;
use crate::byte_size::ByteSize;
use crate::cluster::authority_rotation::AuthorityProgress;
use crate::cluster::kubernetes::{ComponentStatus, KubernetesKeyRotation, NodeKubernetes};
use crate::cluster::secret_keys::{SecretKeys, SecretsStep};
use crate::database_limits::{DatabaseLimits, IdAge, ReplicationSlot, SlotWal};
use crate::facts::{
    AgentStarted, MachineFacts, NeedsHuman, Postponement, ProviderRecord, Recovery, Retirement,
};
use crate::ids::MachineId;
use crate::issues::inputs::{
    ClusterIssueInputs, DatabaseLimitInputs, ExpiredSessions, MachineIssueInputs, ProviderIssueInputs,
    RecentHistory, RuleSwitchedOff, SessionIssueInputs, StorageIssueInputs, TwoPersonRuleInputs,
    UnfoundedClusterInputs,
};
use crate::issues::inputs::{KubernetesIssueInputs, NodeIssueInputs};
use crate::issues::tests::cases::CASES;
use crate::needs_human::Obstacle;
use crate::pause::{LoopKind, Pause};
use crate::plan::RecordedDisruption;
use crate::policy::{Budget, DisruptionKind, Policy};
use crate::process::Process;
use crate::program_versions::postgres_version;
use crate::sample_machine::{agent_started, at, heartbeat, provider_record};
use crate::time::Span;

mod cases;
mod version_faults;

const NOW: i64 = 1_000_000;

/// The healthy machine number `number`, which reported five seconds ago.
fn machine(number: u8) -> MachineIssueInputs {
    let mut facts = MachineFacts::empty(MachineId(uuid::Uuid::from_u128(u128::from(number))), at(0));
    facts.listening_since = Some(at(0));
    facts.provider_record = Some(ProviderRecord {
        provider_id: number.to_string(),
        address: Some(format!("192.0.2.{number}")),
        polled_at: Some(at(NOW - 60)),
        unchanged: true,
        ..provider_record()
    });
    facts.agent_started = Some(AgentStarted { public_key: vec![number; 32], ..agent_started(10) });
    facts.heartbeat = Some(heartbeat(NOW - 5));
    MachineIssueInputs {
        facts,
        phase_since: at(100),
        lost_sessions: 2,
        schedule_mismatch: None,
        agent_version: Some("1.2.0+special".into()),
        serial_number: Some(format!("S{number}00")),
        macs: vec![format!("00:00:5e:00:53:{number:02x}")],
        host_key_rejected_at: None,
        node_problem: None,
        unknown_fence: None,
        findings: Vec::new(),
        recent: RecentHistory { unordered_boots: 2, ..RecentHistory::default() },
    }
}

fn session(host: &str) -> SessionIssueInputs {
    SessionIssueInputs {
        component: "callback".into(),
        host: host.into(),
        version: Some("1.2.0".into()),
        started_at: at(500),
        host_clock: Some(at(529)),
        certificate_expires_at: Some(at(NOW + 6 * 86_400 + 1)),
        turned_away_at: Some(at(NOW - 901)),
        certificate_rejected_at: Some(at(NOW - 901)),
        certificate_rejection: Some("alert_unknown_ca".into()),
        storage_low: None,
        open_files_low: None,
        file_refused: None,
    }
}

/// A server that is just within every limit.
fn database_limits() -> DatabaseLimits {
    let ids = |age| IdAge { database: "bmdb".into(), age, freeze_age: 200_000_000 };
    DatabaseLimits {
        version: Some(postgres_version(150_014)),
        database: ByteSize::gibibytes(1),
        transactions: ids(686_000_000),
        multixacts: ids(686_000_000),
        slots: vec![ReplicationSlot {
            name: "standby".into(),
            is_active: true,
            wal: SlotWal::Reserved,
            retained: Some(ByteSize(ByteSize::gibibytes(4).0 - 1)),
            margin: None,
        }],
        wal: Some(ByteSize(ByteSize::gibibytes(4).0 - 1)),
        wal_failure: None,
        max_wal: ByteSize::gibibytes(1),
        is_archiving_failing: false,
        durability_fault: None,
    }
}

/// The limits among the inputs, to change them.
fn limits(evidence: &mut IssueInputs) -> &mut DatabaseLimits {
    match &mut evidence.database_limits {
        DatabaseLimitInputs::Known(limits) => limits,
        other => panic!("{other:?}"),
    }
}

/// Two healthy machines, one shepherd, and values just within every limit.
fn healthy_inputs() -> IssueInputs {
    IssueInputs {
        at: at(NOW),
        policy: Arc::new(Policy::default()),
        machines: vec![machine(1), machine(2)],
        recent_disruptions: Vec::new(),
        providers: vec![ProviderIssueInputs {
            provider: "rack-a".into(),
            listed_at: Some(at(NOW - 60)),
            error: None,
            error_at: None,
            brake: None,
            brake_since: None,
            not_adopted: None,
            not_adopted_since: None,
        }],
        brakes: Vec::new(),
        pauses: Vec::new(),
        sessions: vec![session("a")],
        expired_sessions: vec![ExpiredSessions {
            component: "updater".into(),
            host: "a".into(),
            count: 4,
            first_at: at(NOW - 100),
        }],
        listening_since: Some(at(0)),
        clusters: Vec::new(),
        unfounded_clusters: Vec::new(),
        kubernetes: Vec::new(),
        artefacts: ByteSize::gibibytes(15),
        two_person_rule: TwoPersonRuleInputs { admins: 2, ..TwoPersonRuleInputs::default() },
        database_version: Some(postgres_version(150_014)),
        database_limits: DatabaseLimitInputs::Known(database_limits()),
        storage: Some(StorageIssueInputs {
            rows: vec![("session".into(), 99_999, 5), ("history".into(), 200_000, 200_000)],
            oldest_snapshot: Duration::from_mins(10),
        }),
    }
}

fn cluster(founded: i64, snapshot: Option<i64>) -> ClusterIssueInputs {
    ClusterIssueInputs {
        name: "ams".into(),
        founded_at: at(founded),
        snapshot_at: snapshot.map(at),
        image_at: None,
        kubernetes_since: None,
        keys_rejected_since: None,
        etcd_bytes: None,
        etcd_quota_bytes: None,
        etcd_members: Vec::new(),
        etcd_full_since: None,
        authority_replacements: 0,
        secret_keys: None,
        unreachable_since: None,
        authority_rotation: None,
        authority_progress: None,
    }
}

/// A cluster that was created then, and has no machine.
fn unfounded_cluster(created: i64) -> UnfoundedClusterInputs {
    UnfoundedClusterInputs {
        name: "ams".into(),
        created_at: at(created),
        wait_reasons: vec!["1 more member of the control plane is wanted, and no machine is free".into()],
    }
}

/// A cluster that has Kubernetes since then, with its last snapshot and the last one that has an image of etcd.
fn with_kubernetes(since: i64, snapshot: Option<i64>, image: Option<i64>) -> ClusterIssueInputs {
    ClusterIssueInputs {
        image_at: image.map(at),
        kubernetes_since: Some(at(since)),
        ..cluster(NOW - 90_000, snapshot)
    }
}

/// A cluster with an authority that is being replaced. Its curators have not answered since then.
fn rotating_cluster(unreachable_since: Option<i64>) -> ClusterIssueInputs {
    let waits_for = Vec::new();
    ClusterIssueInputs {
        unreachable_since: unreachable_since.map(at),
        authority_progress: Some(AuthorityProgress { stage: "trusted".into(), since: None, waits_for }),
        ..cluster(NOW - 90_000, Some(NOW - 60))
    }
}

/// A cluster with Kubernetes whose second key of Secrets has been in its first stage since then.
fn with_secret_keys(since: i64) -> ClusterIssueInputs {
    let state = SecretKeys::new(at(since)).advance(SecretsStep::Generate, "a", None, at(since));
    let state = state.advance(SecretsStep::Generate, "b", None, at(since));
    ClusterIssueInputs {
        secret_keys: Some(state),
        ..with_kubernetes(NOW - 90_000, Some(NOW - 2), Some(NOW - 2))
    }
}

/// A cluster with Kubernetes since then, and no key of Secrets yet.
fn without_secret_keys(since: i64) -> ClusterIssueInputs {
    ClusterIssueInputs {
        secret_keys: Some(SecretKeys::new(at(0))),
        ..with_kubernetes(since, Some(NOW - 2), Some(NOW - 2))
    }
}

/// A cluster that has waited since then until its controllers know the order. One of them does not yet.
fn with_prepared_secrets(since: i64) -> ClusterIssueInputs {
    let state = SecretKeys::new(at(0)).advance(SecretsStep::Prepare, "", None, at(since));
    let state = state.advance(SecretsStep::Prepare, "", None, at(NOW - 60));
    ClusterIssueInputs { secret_keys: Some(state), ..without_secret_keys(NOW - 90_000) }
}

/// Kubernetes of a cluster with one node, whose component has been in this state since `since`.
fn kubernetes(state: &str, since: i64) -> KubernetesIssueInputs {
    let component = ComponentStatus {
        name: "kubelet".into(),
        state: state.into(),
        since: Some(at(since)),
        restarts: 0,
        message: String::new(),
    };
    let runs =
        NodeKubernetes { bundle: "a".into(), components: vec![component], ..NodeKubernetes::default() };
    let node = NodeIssueInputs { machine: "m1".into(), node: Some("node-1".into()), kubernetes: runs };
    KubernetesIssueInputs {
        name: "ams".into(),
        rotations: Vec::new(),
        nodes: vec![node],
        bundled: Vec::new(),
    }
}

/// The same, with a key rotation under way since `since`.
fn rotating(since: i64, waits_for: &[&str]) -> KubernetesIssueInputs {
    let rotation = KubernetesKeyRotation {
        keys: "clients".into(),
        stage: "trusted".into(),
        since: Some(at(since)),
        waits_for: waits_for.iter().map(|&node| node.into()).collect(),
        until: None,
        blocked_by: Vec::new(),
        notified_at: None,
    };
    KubernetesIssueInputs { rotations: vec![rotation], ..kubernetes("healthy", 0) }
}

fn needs_human(obstacle: Obstacle) -> NeedsHuman {
    NeedsHuman { since: at(900), reason: "nothing helped".into(), obstacle, reporting_since: None }
}

fn retiring(since: i64) -> Retirement {
    Retirement::new("old".into(), "kim".into(), at(since))
}

fn paused(since: i64) -> Pause {
    let (provider, reason, by) = (Some("rack-a".into()), "its switch is changed".into(), "kim".into());
    Pause { loop_kind: LoopKind::Recoverer, provider, reason, by, since: at(since), until: None }
}

/// The two-person rule is on, and so many people are admins.
fn require_two(evidence: &mut IssueInputs, admins: usize) {
    let mut policy = Policy::default();
    policy.two_person_rule.required = true;
    evidence.policy = Arc::new(policy);
    evidence.two_person_rule.admins = admins;
}

/// The two-person rule is on or off, with three admins, and new ones wait for this long.
fn wait_before_approval(evidence: &mut IssueInputs, required: bool, time: Span) {
    let mut policy = Policy { approver_waiting_time: time, ..Policy::default() };
    policy.two_person_rule.required = required;
    evidence.policy = Arc::new(policy);
    evidence.two_person_rule.admins = 3;
}

/// Somebody switched the two-person rule off so many seconds ago.
fn rule_off(evidence: &mut IssueInputs, ago: i64) {
    let (by, reason) = ("kim@a".into(), "all tokens were lost".into());
    evidence.two_person_rule.last_off = Some(RuleSwitchedOff { at: at(NOW - ago), by, reason });
}

fn fail(evidence: &mut IssueInputs, failures: u32) {
    let cause = "no route to host".to_owned();
    let fact = BackoffFact { failures, last_interval: Duration::from_mins(5), until: at(NOW + 60), cause };
    evidence.machines[0].facts.backoffs.insert(Process::Recovery, fact);
}

/// The budget allows two reboots in ten minutes. `count` started so many seconds ago, and one machine waits.
fn disturb(evidence: &mut IssueInputs, count: usize, ago: i64) {
    let mut policy = Policy::default();
    policy.budgets.insert(DisruptionKind::Reboot, Budget { count: 2, window: Span::minutes(10) });
    evidence.policy = Arc::new(policy);
    let done = RecordedDisruption {
        step: DisruptionKind::Reboot,
        machine: evidence.machines[0].facts.machine,
        provider: "rack-a".into(),
        at: at(NOW - ago),
    };
    evidence.recent_disruptions = vec![done; count];
    let reason = "the budget to reboot the machine is used up (2 in 10m)".to_owned();
    let wait = Postponement { until: at(NOW + 1), reason, decided_at: String::new() };
    evidence.machines[1].facts.postponements.insert(Process::Recovery, wait);
}

#[test]
fn each_case_finds_exactly_its_issues() {
    for (name, change, expected) in CASES.into_iter().flatten() {
        let mut evidence = healthy_inputs();
        change(&mut evidence);
        let found = find_issues(&evidence);
        let reported: Vec<(&str, &str)> =
            found.iter().map(|issue| (issue.id, issue.subject.as_str())).collect();
        assert_eq!(reported, *expected, "{name}: {found:#?}");
        for issue in &found {
            assert!(!issue.message.is_empty() && !issue.remedy.is_empty(), "{name}: {issue:#?}");
            assert_eq!(issue.page, format!("docs/issues/{}.md", issue.id), "{name}");
        }
    }
}

#[test]
fn stuck_retirement_names_its_obstacle() {
    let put_off = |reason: &str| Postponement {
        until: at(NOW + 1),
        reason: reason.to_owned(),
        decided_at: String::new(),
    };
    let reported = |change: &dyn Fn(&mut IssueInputs)| {
        let mut evidence = healthy_inputs();
        evidence.machines[0].facts.retirement = Some(retiring(NOW - 3600));
        change(&mut evidence);
        let found = find_issues(&evidence);
        let stuck = found.iter().find(|issue| issue.id == "retirement-stuck");
        stuck.map(|issue| issue.message.clone()).unwrap_or_default()
    };
    let works = |e: &mut IssueInputs| {
        e.sessions.push(SessionIssueInputs { component: "retirer".into(), ..session("b") });
    };
    let postponed = |e: &mut IssueInputs| {
        works(e);
        let wait = put_off("the budget to give machines back is used up (100 in 10m)");
        e.machines[0].facts.postponements.insert(Process::Retirement, wait);
    };
    for (name, expected, text) in [
        ("nobody", "no shepherd runs a retirer", reported(&|_| {})),
        ("not come to yet", "its provider is to take it back", reported(&works)),
        ("put off", "the budget to give machines back is used up", reported(&postponed)),
        (
            "paused",
            "the retirer of rack-a was paused by kim",
            reported(&|e| {
                postponed(e);
                e.pauses = vec![Pause { loop_kind: LoopKind::Retirer, ..paused(NOW) }];
            }),
        ),
        (
            "failed",
            "no route to host",
            reported(&|e| {
                fail(e, 1);
                let failed = e.machines[0].facts.backoffs.remove(&Process::Recovery).unwrap();
                e.machines[0].facts.backoffs.insert(Process::Retirement, failed);
            }),
        ),
    ] {
        assert!(text.contains(expected), "{name}: {text}");
    }
}

#[test]
fn turned_away_connection_names_the_listener_and_its_flag() {
    for (component, listener, flag) in [
        ("callback", "its callback server had", "--agent_listen_address"),
        ("api", "its API had", "--api_listen_address"),
        ("sampler", "its metrics listener had", "--metrics_listen_address"),
    ] {
        let mut evidence = healthy_inputs();
        evidence.sessions[0].component = component.into();
        evidence.sessions[0].turned_away_at = Some(at(NOW - 900));
        let found = find_issues(&evidence);
        let issue = found.iter().find(|issue| issue.id == "connections-turned-away").unwrap();
        assert!(issue.message.starts_with(listener) && issue.remedy.contains(flag), "{issue:#?}");
    }
}

#[test]
fn cluster_that_is_not_founded_names_what_it_waits_for() {
    let message = |cluster: UnfoundedClusterInputs| {
        let mut evidence = healthy_inputs();
        evidence.unfounded_clusters.push(cluster);
        let found = find_issues(&evidence);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].since, Some(at(NOW - 3600)), "{found:#?}");
        found[0].message.clone()
    };
    let cluster = unfounded_cluster(NOW - 7200);
    assert_eq!(
        message(cluster.clone()),
        "it was created 2h00m ago, and no machine has founded it: 1 more member of the control plane is wanted, and no \
         machine is free"
    );
    // Its machines are chosen, and the first of them does not report.
    assert_eq!(
        message(UnfoundedClusterInputs { wait_reasons: Vec::new(), ..cluster }),
        "it was created 2h00m ago, and no machine has founded it"
    );
}

#[test]
fn every_kind_is_found_in_some_case() {
    let expected: BTreeSet<&str> =
        CASES.into_iter().flatten().flat_map(|(_, _, expected)| expected.iter().map(|(id, _)| *id)).collect();
    let all: BTreeSet<&str> = IssueKind::ALL.into_iter().map(IssueKind::id).collect();
    assert_eq!(expected, all);
}

#[test]
fn similar_issues_are_counted_in_one() {
    let mut evidence = healthy_inputs();
    evidence.machines = (1..=12).map(machine).collect();
    for machine in &mut evidence.machines {
        machine.agent_version = Some("1.1.0".into());
    }
    let found = find_issues(&evidence);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].machines.len(), MAX_NAMED_MACHINES);
    assert_eq!(found[0].subject, "rack-a/1, rack-a/2, rack-a/3, rack-a/4, rack-a/5, and 7 more");
    assert!(found[0].message.starts_with("12 agents"), "{}", found[0].message);
}

#[test]
fn issues_are_sorted_by_severity() {
    let mut evidence = healthy_inputs();
    fail(&mut evidence, 3);
    evidence.machines[1].facts.needs_human = Some(needs_human(Obstacle::LoginRefused));
    evidence.storage.as_mut().unwrap().rows[0].1 = 100_000;
    let messages: Vec<&str> = find_issues(&evidence).iter().map(|issue| issue.id).collect();
    assert_eq!(messages, ["needs-human", "work-fails", "dead-rows"]);
}
