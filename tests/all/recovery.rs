//! The recoverer against a simulator: silent machines are recovered by the mildest step that helps, a person is called
//! if none does, and nothing is disrupted without permission.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent, NewHeartbeat};
use shepherd::bmdb::engine::intent::{DisruptionRequest, Permission};
use shepherd::bmdb::engine::work::Work;
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat as Report};
use shepherd::model::facts::{Hold, HoldScope};
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::policy::{Budget, DisruptionKind};
use shepherd::model::process::Process;
use shepherd::model::time::Span;

use crate::bmdb_kit::{Kit, LONG, Shepherd};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Program, endpoint};
use crate::harness::ordering::says;

/// Limits that are short enough for a test, with room for a busy host.
const SHORT: [&str; 4] = [
    "--heartbeat_interval=1s",
    "--recovery_first_heartbeat_timeout=20s",
    "--recovery_silence_timeout=15s",
    "--recovery_ladder=restart-agent:15s:1,reboot:20s:1,power-cycle:20s:1",
];

pub(crate) async fn ready(test_name: &str, machines: usize, flags: &[&str]) -> Result<(Fleet, Program)> {
    let count = machines.to_string();
    let simulator = ["--machine_count", &count, "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start(test_name, &simulator).await?;
    let shepherd = fleet.shepherd("shepherd", &[endpoint()?], &[&SHORT, flags].concat())?;
    // None is missing, because the provisioner creates them all in one pass before it reads the list again.
    fleet.until("some are known", "SELECT count(*) > 0 FROM machine").await?;
    fleet.until("all are Ready", ALL_READY).await?;
    let known: i64 = sqlx::query_scalar("SELECT count(*) FROM machine").fetch_one(&fleet.pool).await?;
    ensure!(known == i64::try_from(machines)?, "{known} of {machines} are known");
    Ok((fleet, shepherd))
}

/// The steps that were taken for a machine, in their order.
async fn steps(fleet: &Fleet, provider_id: &str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar(
        "SELECT kind FROM intent JOIN machine_provided USING (machine_id)
         WHERE provider_id = $1 AND kind <> 'create' ORDER BY begun_at",
    )
    .bind(provider_id)
    .fetch_all(&fleet.pool)
    .await?)
}

async fn boots(fleet: &Fleet, id: &str) -> Result<u64> {
    let truth = fleet.truth().await?;
    let machine = truth.iter().find(|machine| machine["id"] == id).context("no such machine")?;
    machine["boots"].as_u64().context("boots")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_of_silence_is_ended_by_the_gentlest_step_that_helps() -> TestResult {
    let (fleet, _shepherd) = ready("recover_ladder", 6, &[]).await?;
    let (killed, hung, dead, lost) = ("sim-0001", "sim-0002", "sim-0003", "sim-0004");
    let boots_before = boots(&fleet, killed).await?;
    for (machine, fault) in [(killed, "kill"), (hung, "hang"), (dead, "dead"), (lost, "power-fail")] {
        fleet.strike(machine, fault).await?;
    }
    fleet
        .until(
            "all four fell silent",
            "SELECT count(DISTINCT machine_id) >= 4 FROM history WHERE process = 'Recovery'",
        )
        .await?;
    fleet
        .until(
            "a person is called for one, and the others are back",
            "SELECT count(*) FILTER (WHERE phase_index = 'NeedsHuman') = 1
                AND count(*) FILTER (WHERE phase_index = 'Ready') = 5
                AND (SELECT count(*) = 0 FROM machine_recovery)
             FROM machine_due WHERE lane = 'access'",
        )
        .await?;
    assert_eq!(steps(&fleet, killed).await?, ["restart-agent"]);
    assert_eq!(boots(&fleet, killed).await?, boots_before, "nothing was rebooted for a dead agent");
    says(&fleet, &["why", killed], " (restart-agent)").await?;
    assert_eq!(steps(&fleet, hung).await?, ["restart-agent", "reboot"]);
    assert_eq!(steps(&fleet, dead).await?, ["restart-agent", "reboot", "power-cycle"]);
    assert_eq!(steps(&fleet, lost).await?, ["restart-agent", "reboot", "power-cycle"]);
    assert!(boots(&fleet, hung).await? == 2 && boots(&fleet, dead).await? == 2);
    let rebooted: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM machine_agent_heartbeat h JOIN machine_provided p USING (machine_id)
         WHERE p.provider_id IN ('sim-0002', 'sim-0003') AND h.previous_boot_id IS NOT NULL
           AND h.boot_id <> h.previous_boot_id",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(rebooted, 2, "both report from another boot");
    let called: (String, String) = sqlx::query_as(
        "SELECT p.provider_id, n.reason FROM machine_needs_human n JOIN machine_provided p USING (machine_id)",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(called.0, lost);
    assert!(
        called.1.starts_with("tried in vain: restart-agent, reboot, power-cycle; last: "),
        "{}",
        called.1
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_most_fall_silent_at_once_recovery_is_held_and_then_released() -> TestResult {
    // A worker for each machine, because a worker that tries to reach a hung machine is busy for longer than the brake
    // lasts.
    let brake =
        ["--recovery_brake_window=30s", "--recovery_brake_fraction=0.3", "--recoverer_loop_parallelism=8"];
    let (fleet, _shepherd) = ready("recover_brake", 12, &brake).await?;
    for machine in 1..=8 {
        fleet.strike(&format!("sim-{machine:04}"), "hang").await?;
    }
    // Until the fifth machine is silent it is no mass failure, and the first ones are recovered.
    fleet
        .until(
            "recovery is held, of the provider and of all, and machines say so",
            "SELECT (SELECT count(*) = 2 FROM brake WHERE kind = 'recovery' AND scope IN ('*', 'sim'))
                AND (SELECT count(DISTINCT machine_id) <= 4 FROM intent WHERE kind <> 'create')
                AND (SELECT count(*) >= 1 FROM machine_due WHERE reason LIKE 'brake: % fell silent within 30s%')",
        )
        .await?;
    fleet.until("it is released", "SELECT count(*) = 0 FROM brake").await?;
    fleet.until("all are Ready", ALL_READY).await?;
    Ok(fleet
        .until("each was helped", "SELECT count(DISTINCT machine_id) = 8 FROM intent WHERE kind = 'reboot'")
        .await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_that_is_used_up_puts_the_others_off_and_says_why() -> TestResult {
    let (fleet, _shepherd) = ready("recover_budget", 4, &[]).await?;
    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        let budget = Budget { count: 1, window: Span::seconds(12) };
        policy.budgets.insert(DisruptionKind::RestartAgent, budget);
    })
    .await?;
    for machine in ["sim-0001", "sim-0002", "sim-0003"] {
        fleet.strike(machine, "kill").await?;
    }
    fleet
        .until(
            "one is helped and another put off",
            "SELECT (SELECT count(*) >= 1 FROM intent WHERE kind = 'restart-agent')
                AND EXISTS (SELECT 1 FROM machine_due
                            WHERE reason = 'the budget to restart the agent over SSH is used up (1 in 12s)')",
        )
        .await?;
    fleet
        .until(
            "each was helped in its turn",
            "SELECT count(DISTINCT machine_id) = 3 FROM intent WHERE kind = 'restart-agent'",
        )
        .await?;
    let closest: i64 = sqlx::query_scalar(
        "SELECT min((EXTRACT(EPOCH FROM gap) * 1000)::INT8) FROM (
             SELECT begun_at - lag(begun_at) OVER (ORDER BY begun_at) AS gap FROM intent
             WHERE kind = 'restart-agent') gaps WHERE gap IS NOT NULL",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert!(closest >= 12_000, "two within {closest} ms");
    Ok(())
}

/// A machine whose agent has been silent for long enough, and the work on it.
async fn silent(kit: &Kit, shepherd: &Shepherd) -> Result<(MachineId, Work)> {
    let machine = kit.provided(1, "rack").await?[0];
    fall_silent(kit, machine).await?;
    let session = shepherd.session().await?;
    Ok((machine, shepherd.claim_one(&session, Process::Recovery).await?))
}

/// Gives a machine an agent that has been silent for long enough, while a shepherd listened.
pub(crate) async fn fall_silent(kit: &Kit, machine: MachineId) -> Result<()> {
    let agent = NewAgent {
        public_key: vec![7; 32],
        boot_id: None,
        version: "1".to_owned(),
        supervision: "systemd".to_owned(),
        fence: 1,
    };
    kit.change(machine, vec![FactChange::AgentStarted(agent), FactChange::Heartbeat(heartbeat(1))]).await?;
    sqlx::query(
        "INSERT INTO fleet_listening (shard, since, last_commit)
         VALUES (0, clock_timestamp() - INTERVAL '1 hour', clock_timestamp())
         ON CONFLICT (shard) DO UPDATE SET since = EXCLUDED.since, last_commit = EXCLUDED.last_commit",
    )
    .execute(&kit.pool)
    .await?;
    sqlx::query("UPDATE machine_agent_heartbeat SET at = clock_timestamp() - INTERVAL '30 min'")
        .execute(&kit.pool)
        .await?;
    sqlx::query("UPDATE machine_agent_started SET started_at = clock_timestamp() - INTERVAL '1 hour'")
        .execute(&kit.pool)
        .await?;
    kit.sweep().await?;
    Ok(())
}

fn heartbeat(sequence: i64) -> NewHeartbeat {
    NewHeartbeat {
        boot_id: "boot".to_owned(),
        incarnation: "one".to_owned(),
        sequence,
        version: "1".to_owned(),
    }
}

async fn ask(work: &Work, step: DisruptionKind, brake: Option<&str>) -> Result<Permission> {
    let step = DisruptionRequest {
        rung: 0,
        disruption: step,
        attempt: 1,
        deadline: Span::minutes(2),
        facts_read_at: work.snapshot().await?.now,
        brake: brake.map(str::to_owned),
        provider: "rack".to_owned(),
    };
    Ok(work.begin_disruption(step).await?)
}

async fn report(kit: &Kit, machine: MachineId, sequence: i64) -> Result<HeartbeatOutcome> {
    let heartbeat = Report {
        machine,
        public_key: [7; 32],
        beat: heartbeat(sequence),
        hardware: None,
        installation: None,
        cluster: None,
        release: None,
        access_fence: 0,
    };
    let group: Arc<[Arc<Report>]> = Arc::new([Arc::new(heartbeat)]);
    // As a callback server does: a heartbeat that is not plain is processed alone.
    match kit.bmdb.store_heartbeat_group(1, group.clone()).await?.into_values().next() {
        Some(plain) => Ok(HeartbeatOutcome::Stored(plain.instructions)),
        None => Ok(kit.bmdb.store_heartbeat(group[0].clone()).await?),
    }
}

async fn read_history_details(kit: &Kit, machine: MachineId, event: &str) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar("SELECT detail FROM history WHERE machine_id = $1 AND event = $2 ORDER BY at")
        .bind(machine.0)
        .bind(event)
        .fetch_all(&kit.pool)
        .await?)
}

#[tokio::test]
async fn a_machine_given_up_that_reports_again_for_long_enough_needs_no_person() -> TestResult {
    let kit = Kit::new("recover_healed").await?;
    let shepherd = Shepherd::start(&kit, "recoverer", LONG).await?;
    let (machine, work) = silent(&kit, &shepherd).await?;
    let end = "tried in vain: restart-agent; last: no answer".to_owned();
    let call = FactChange::NeedsHuman { obstacle: Obstacle::LadderExhausted, reason: end.clone() };
    work.fail(vec![call], end.clone(), None).await?;
    let phase = async || {
        let phase = "SELECT phase_index FROM machine_due WHERE machine_id = $1 AND lane = 'access'";
        sqlx::query_scalar::<_, String>(phase).bind(machine.0).fetch_one(&kit.pool).await
    };
    let mut sequence = 10;
    let mut beat = async |minutes: u64| {
        kit.database.advance(std::time::Duration::from_mins(minutes)).await?;
        sequence += 1;
        let outcome = report(&kit, machine, sequence).await?;
        ensure!(matches!(outcome, HeartbeatOutcome::Stored(_)), "{outcome:?}");
        anyhow::Ok(())
    };
    // Two reports with more than the limit between them prove nothing.
    beat(60).await?;
    beat(11).await?;
    for _ in 0..3 {
        beat(3).await?;
        assert_eq!(phase().await?, "NeedsHuman");
    }
    assert_eq!(
        read_history_details(&kit, machine, "HeardAgain").await?.len(),
        2,
        "the time starts again after the gap"
    );
    let due: String =
        sqlx::query_scalar("SELECT reason FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!(due, format!("waits for a person, or for its agent to report for 10m without a gap: {end}"));
    beat(2).await?;
    assert_eq!(phase().await?, "Ready");
    assert_eq!(
        read_history_details(&kit, machine, "Healed").await?,
        [format!("it has reported for 10m without a gap; it waited for a person because {end}")]
    );
    assert_eq!(kit.count("SELECT count(*) FROM machine_needs_human").await?, 0);
    assert_eq!(kit.count("SELECT count(*) FROM work_backoff").await?, 0, "the next ladder begins afresh");
    assert_eq!(kit.sweep().await?, 0, "its schedule is what its facts demand");
    beat(1).await?;
    assert_eq!(read_history_details(&kit, machine, "Healed").await?.len(), 1);
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn what_a_lost_recoverer_began_is_settled_as_unknown_when_its_lease_is_freed() -> TestResult {
    let kit = Kit::new("recover_lost").await?;
    kit.bmdb.change_policy("test", |policy| policy.outward_limit = Span::seconds(0)).await?;
    let shepherd = Shepherd::start(&kit, "recoverer", LONG).await?;
    let (_, work) = silent(&kit, &shepherd).await?;
    let granted = ask(&work, DisruptionKind::Reboot, None).await?;
    assert!(matches!(granted, Permission::Granted { .. }), "{granted:?}");
    kit.overdue(work.session()).await?;
    kit.bmdb.reap().await?;
    let session = shepherd.session().await?;
    let next = shepherd.claim_one(&session, Process::Recovery).await?;
    let own = ask(&next, DisruptionKind::RestartAgent, None).await?;
    assert!(matches!(own, Permission::Granted { .. }), "{own:?}");
    let outcomes: Vec<(String, Option<String>)> =
        sqlx::query_as("SELECT kind, outcome FROM intent ORDER BY begun_at").fetch_all(&kit.pool).await?;
    let unknown = "unknown: the session that took the step was lost".to_owned();
    assert_eq!(
        outcomes,
        [("reboot".to_owned(), Some(unknown)), ("restart-agent".to_owned(), None)],
        "its own is still under way"
    );
    next.cancel("the test is over").await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn every_step_is_requested_right_before_it_is_taken() -> TestResult {
    let kit = Kit::new("recover_permission").await?;
    let shepherd = Shepherd::start(&kit, "recoverer", LONG).await?;
    let (machine, work) = silent(&kit, &shepherd).await?;
    let intents = async || kit.count("SELECT count(*) FROM intent").await;
    let refused = |permission: Permission| match permission {
        Permission::Denied(refusal) => Ok(refusal.reason),
        Permission::Granted { .. } => Err(anyhow::anyhow!("granted")),
    };

    let hold = |scope| {
        FactChange::HoldSet(Hold { scope, reason: "new disks".into(), by: "kim".into(), until: None })
    };
    kit.change(machine, vec![hold(HoldScope::Power)]).await?;
    assert_eq!(refused(ask(&work, DisruptionKind::Reboot, None).await?)?, "kim holds it (power): new disks");
    kit.change(machine, vec![FactChange::HoldCleared]).await?;
    assert_eq!(refused(ask(&work, DisruptionKind::Reboot, Some("brake: x")).await?)?, "brake: x");

    // The heartbeat that arrives between the decision and the step.
    let decided_on = work.snapshot().await?.now;
    kit.change(machine, vec![FactChange::Heartbeat(heartbeat(2))]).await?;
    let step = DisruptionRequest {
        rung: 1,
        disruption: DisruptionKind::PowerCycle,
        attempt: 1,
        deadline: Span::minutes(2),
        facts_read_at: decided_on,
        brake: None,
        provider: "rack".to_owned(),
    };
    assert_eq!(refused(work.begin_disruption(step).await?)?, "it reported a moment ago");
    assert_eq!(intents().await?, 0, "what was refused was not recorded");

    // The same request is granted in quiet times, and recorded before anything is done.
    let granted = ask(&work, DisruptionKind::Reboot, None).await?;
    assert!(matches!(granted, Permission::Granted { .. }), "{granted:?}");
    assert_eq!(intents().await?, 1);
    assert_eq!(kit.count("SELECT count(*) FROM machine_recovery WHERE step = 'reboot'").await?, 1);
    work.cancel("the test is over").await?;
    Ok(shepherd.stop().await?)
}
