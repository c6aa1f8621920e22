//! Retirements, each in another way: without faults, without the provider, without the agent, in the middle of work,
//! twice at once, cancelled; and with a shepherd that dies at the step that cannot be undone. Each ends as
//! `docs/retiring.md` describes, and the simulator received each order once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::retirement::RetirementChange;
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent, NewHeartbeat};
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat};
use shepherd::bmdb::orders::retirement::ReleasePermission;
use shepherd::model::facts::{Hold, HoldScope};
use shepherd::model::policy::Budget;
use shepherd::model::process::Process;
use shepherd::model::time::Span;

use crate::bmdb_kit::{Kit, LONG, Shepherd};
use crate::checker::{Records, check};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, endpoint};
#[cfg(debug_assertions)]
use crate::harness::ordering::until_dead;
use crate::harness::ordering::{ctl, is_wrong, phase, refuses, says, stop, until_phase};
use crate::harness::port::reserved;

/// Limits that are short enough for a test, with room for a busy host. A machine that hangs occupies its worker for
/// longer than any step here takes.
const LIMITS: [&str; 6] = [
    "--heartbeat_interval=1s",
    "--recovery_silence_timeout=15s",
    "--recovery_ladder=restart-agent:10m:1",
    "--recovery_brake_fraction=1",
    "--agent_ssh_greeting_timeout=10m",
    "--agent_ssh_login_timeout=10m",
];

/// The outcome in its tombstone.
async fn outcome(fleet: &Fleet, id: &str) -> Result<String> {
    let outcome = "SELECT outcome FROM machine_retirement JOIN machine_provided USING (machine_id)
                   WHERE provider_id = $1 AND finished_at IS NOT NULL";
    Ok(sqlx::query_scalar(outcome).bind(id).fetch_one(&fleet.pool).await?)
}

/// The machines that the simulator took back, once for each order that it carried out.
fn taken_back(journal: &[Value]) -> Vec<&str> {
    let done = |call: &Value| {
        journal.iter().any(|line| line["phase"] == "end" && line["call"] == *call && line["outcome"] == "ok")
    };
    journal
        .iter()
        .filter(|line| line["phase"] == "start" && line["what"] == "release" && done(&line["call"]))
        .filter_map(|line| line["machine"].as_str())
        .collect()
}

/// How often it took that machine back.
fn releases(journal: &[Value], id: &str) -> usize {
    taken_back(journal).into_iter().filter(|machine| *machine == id).count()
}

async fn failed_heartbeats(fleet: &Fleet, id: &str) -> Result<u64> {
    let truth = fleet.truth().await?;
    let machine = truth.iter().find(|machine| machine["id"] == id).context("no such machine")?;
    machine["heartbeats"]["failed"].as_u64().context("a number")
}

const WHY: [&str; 2] = ["--reason", "its lease ends"];

fn retire(id: &str) -> Vec<&str> {
    [&["retire", id, "--yes"][..], &WHY].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_out_ends_as_it_is_documented_and_is_ordered_once() -> TestResult {
    let simulator = ["--machine_count", "7", "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("retire", &simulator).await?;
    let endpoints = [endpoint()?];
    let shepherd = fleet.shepherd("first", &endpoints, &LIMITS)?;
    fleet
        .until(
            "all seven are Ready",
            "SELECT count(*) = 7 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'",
        )
        .await?;

    as_it_should_be(&fleet).await?;
    twice_at_once(&fleet).await?;
    held_and_cancelled(&fleet).await?;
    without_agent_in_the_middle_of_work(&fleet).await?;
    stop(&fleet, shepherd).await?;
    with_the_provider_gone(&fleet, &endpoints).await?;
    with_shepherds_that_die(&fleet, &endpoints).await?;

    // The provider is back. It still has the machine that was not released, and a record shows it.
    let shepherd = fleet.shepherd("last", &endpoints, &LIMITS)?;
    until_phase(&fleet, "sim-0007", "Retired").await?;
    fleet
        .until(
            "it is seen that one is still listed",
            "SELECT count(*) = 1 FROM machine_retirement WHERE listed_since IS NOT NULL",
        )
        .await?;
    says(&fleet, &["issues"], "retired-listed").await?;
    says(&fleet, &["why", "sim-0006"], "its provider still lists it").await?;
    assert_eq!(releases(&fleet.journal()?, "sim-0006"), 0);
    fleet
        .until(
            "the machines that replace those given back are Ready, under other names",
            "SELECT count(*) = 5 FROM machine_due JOIN machine_provided USING (machine_id)
             WHERE lane = 'access' AND phase_index = 'Ready' AND provider_id LIKE 'sim-000_-2'",
        )
        .await?;
    let tombstones: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'Retired'",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(tombstones, 6, "none was adopted again");
    stop(&fleet, shepherd).await?;
    let violations = check(&Records::read(&fleet.pool, &fleet.journal()?).await?);
    assert!(violations.is_empty(), "{violations:?}\n{}", fleet.explain().await?);
    assert!(
        fleet.holds("SELECT count(*) = 0 FROM intent WHERE settled_at IS NULL").await?,
        "an intent is open"
    );
    Ok(())
}

async fn as_it_should_be(fleet: &Fleet) -> Result<()> {
    says(fleet, &retire("sim-0001"), "sim/sim-0001 is being retired: work under way on it").await?;
    until_phase(fleet, "sim-0001", "Retired").await?;
    assert_eq!(outcome(fleet, "sim-0001").await?, "provider sim took it back");
    assert_eq!(releases(&fleet.journal()?, "sim-0001"), 1);
    says(fleet, &["why", "sim-0001"], "retired (its lease ends): provider sim took it back").await?;
    says(fleet, &["why", "sim-0001"], "tombstone: done").await?;
    refuses(fleet, &["retire", "cancel", "sim-0001"], "a tombstone is never adopted again").await?;
    says(fleet, &retire("sim-0001"), "is retired already").await
}

async fn twice_at_once(fleet: &Fleet) -> Result<()> {
    let line = retire("sim-0004");
    let (one, other) = tokio::join!(ctl(fleet, &line), ctl(fleet, &line));
    let (one, other) = (one?, other?);
    ensure!(one.0 == Some(0) && other.0 == Some(0), "{one:?}, {other:?}");
    let messages = [one.1, other.1];
    assert_eq!(messages.iter().filter(|text| text.contains("work under way")).count(), 1, "{messages:?}");
    assert_eq!(messages.iter().filter(|text| text.contains("already")).count(), 1, "{messages:?}");
    until_phase(fleet, "sim-0004", "Retired").await?;
    assert_eq!(releases(&fleet.journal()?, "sim-0004"), 1);
    Ok(())
}

async fn held_and_cancelled(fleet: &Fleet) -> Result<()> {
    let id = "sim-0005";
    says(fleet, &["hold", id, "--reason", "its disks are copied", "--scope", "recovery"], "is held").await?;
    says(fleet, &retire(id), "kim@").await?;
    until_phase(fleet, id, "Retiring").await?;
    says(fleet, &["why", id], "its disks are copied").await?;
    says(fleet, &["retire", "cancel", id], "is cancelled").await?;
    until_phase(fleet, id, "Ready").await?;
    says(fleet, &["release", id], "is released").await?;

    let wiping = [&retire(id)[..], &["--wipe"]].concat();
    says(fleet, &wiping, "to be wiped first").await?;
    says(fleet, &["why", id], "is at the stage wipe: no agent and no provider").await?;
    says(fleet, &["issues"], "retirement-stuck").await?;
    refuses(fleet, &retire(id), "is being retired already, with a wipe").await?;
    let waive = |words| ["retire", "waive", id, "wipe", "--confirm", words, "--reason", "they are shredded"];
    is_wrong(fleet, &waive("yes"), "with the words \"sim/sim-0005 is not wiped\"").await?;
    says(fleet, &["retire", "cancel", id], "is cancelled").await?;
    refuses(fleet, &waive("sim/sim-0005 is not wiped"), "is not being retired").await?;
    until_phase(fleet, id, "Ready").await?;
    assert_eq!(releases(&fleet.journal()?, id), 0);
    Ok(())
}

/// One machine hangs, and a worker waits for its greeting; the other one is dead.
async fn without_agent_in_the_middle_of_work(fleet: &Fleet) -> Result<()> {
    fleet.strike("sim-0002", "dead").await?;
    fleet.strike("sim-0003", "hang").await?;
    fleet
        .until(
            "somebody tries to bring the one back that hangs",
            "SELECT count(*) = 1 FROM work JOIN machine_provided USING (machine_id)
             WHERE process = 'Recovery' AND provider_id = 'sim-0003'",
        )
        .await?;
    for id in ["sim-0002", "sim-0003"] {
        says(fleet, &retire(id), "work under way on it is ordered to stop").await?;
        until_phase(fleet, id, "Retired").await?;
        assert_eq!(releases(&fleet.journal()?, id), 1, "{id}");
    }
    let ends: Vec<String> = sqlx::query_scalar(
        "SELECT h.process || ' ' || h.event FROM history h JOIN machine_provided USING (machine_id)
         WHERE provider_id = 'sim-0003' AND h.edge = 'end' AND h.lane = 'access' ORDER BY h.fence",
    )
    .fetch_all(&fleet.pool)
    .await?;
    let last = ends.last_chunk::<2>().context("two ends")?;
    assert_eq!(last, &["Recovery Cancelled", "Retirement Finished"], "{ends:?}");
    Ok(())
}

/// Nothing answers at the provider's address: an operator waives the release.
async fn with_the_provider_gone(fleet: &Fleet, endpoints: &[String]) -> Result<()> {
    let id = "sim-0006";
    let nowhere = format!("--simulated_url=http://{}", reserved()?);
    let shepherd = fleet.shepherd("cut-off", endpoints, &[&LIMITS[..], &[&nowhere]].concat())?;
    let waive =
        |stage, words| ["retire", "waive", id, stage, "--confirm", words, "--reason", "it went bankrupt"];
    let known = "sim/sim-0006 is not known to be given back";
    says(fleet, &retire(id), "is being retired").await?;
    fleet
        .until("its release has failed", "SELECT count(*) = 1 FROM work_backoff WHERE process = 'Retirement'")
        .await?;
    assert_eq!(phase(fleet, id).await?, "Retiring");
    // Its cause is in the log of the shepherd that tried, not in the database alone.
    let log = fleet.read_log("cut-off")?;
    let is_logged = |line: &str| line.contains(" WARN ") && line.contains("failed cause=");
    ensure!(log.lines().any(is_logged), "no failure is logged with its cause:\n{log}");
    says(fleet, &["why", id], "shepherdctl retire waive sim/sim-0006 release --confirm").await?;
    refuses(fleet, &waive("wipe", "sim/sim-0006 is not wiped"), "is at the stage release").await?;
    is_wrong(fleet, &waive("release", "yes"), known).await?;
    let before = failed_heartbeats(fleet, id).await?;
    says(fleet, &waive("release", known), "is retired, and was not given back").await?;
    until_phase(fleet, id, "Retired").await?;
    let outcome = outcome(fleet, id).await?;
    assert!(outcome.starts_with("its release was waived by kim@"), "{outcome}");
    // The machine runs on, but heartbeats of its agent are no longer accepted.
    let deadline = Instant::now() + PATIENCE;
    while failed_heartbeats(fleet, id).await? < before + 2 {
        ensure!(Instant::now() < deadline, "its agent is still let in\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let audited: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM audit WHERE rpc = 'shepherd.fleet.v1.Machines/WaiveStage' AND outcome = 'changed'",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(audited, 1);
    stop(fleet, shepherd).await
}

/// Release builds have no fail points.
#[cfg(not(debug_assertions))]
async fn with_shepherds_that_die(fleet: &Fleet, _endpoints: &[String]) -> Result<()> {
    says(fleet, &retire("sim-0007"), "is being retired").await
}

/// One dies between the record of the order and the order, the next one after the order was carried out.
#[cfg(debug_assertions)]
async fn with_shepherds_that_die(fleet: &Fleet, endpoints: &[String]) -> Result<()> {
    let id = "sim-0007";
    says(fleet, &retire(id), "is being retired").await?;
    let brief = [&LIMITS[..], &["--session_interval=3s", "--outward_call_timeout=1s"]].concat();
    for (place, carried_out) in [("retirer.intended", 0), ("retirer.released", 1)] {
        let mut shepherd = fleet.shepherd_dying_at(place, place, endpoints, &brief)?;
        until_dead(fleet, place, &mut shepherd).await?;
        assert_eq!(releases(&fleet.journal()?, id), carried_out, "{place}");
        assert_eq!(phase(fleet, id).await?, "Retiring", "{place}");
        says(fleet, &["why", id], "its provider was ordered to take it back").await?;
        refuses(fleet, &["retire", "cancel", id], "cannot stay any more").await?;
    }
    assert!(
        fleet
            .holds(
                "SELECT count(*) = 1 FROM intent JOIN machine_provided USING (machine_id)
                     WHERE provider_id = 'sim-0007' AND kind = 'release'"
            )
            .await?,
        "both gave the same order"
    );
    Ok(())
}

/// Machines of the order below.
const MANY: usize = 500;
/// Each of them takes one iteration of a loop, which takes long on a busy host.
const PATIENCE_WITH_MANY: Duration = Duration::from_mins(15);
/// How many of them may be released.
const BUDGET: usize = 7;

/// The names in a command's output, one per line: the first word.
fn names(text: &str) -> BTreeSet<&str> {
    text.split_whitespace().filter(|word| word.starts_with("sim/sim-")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_about_five_hundred_stops_at_each_limit_and_a_dry_run_lists_them() -> TestResult {
    let count = MANY.to_string();
    let fleet =
        Fleet::start("retire_many", &["--machine_count", &count, "--persistent_agent_percent", "100"])
            .await?;
    let made = [
        "--components=provisioner",
        "--provisioner_max_machines=500",
        "--provisioner_reservation_chunk_size=500",
        "--provisioner_device_creation_rate=1ms,500",
        "--provisioner_reconciler_rate=1s,1",
    ];
    let shepherd = fleet.shepherd("maker", &[endpoint()?], &made)?;
    let made = "SELECT count(*) = 500 FROM machine_provided";
    fleet.until_within("all are made", made, PATIENCE_WITH_MANY).await?;
    stop(&fleet, shepherd).await?;
    // A window that does not pass while the test runs, however busy its host is.
    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        policy.release_budget = Budget { count: u32::try_from(BUDGET).unwrap_or(0), window: Span::hours(12) };
    })
    .await?;

    let all = ["retire", "--provider", "sim", "--reason", "the rack is sold"];
    let with = |flags: &[&'static str]| [&all[..], flags].concat();
    let (code, listed) = ctl(&fleet, &with(&["--dry-run", "--beyond-limits"])).await?;
    assert_eq!((code, names(&listed).len()), (Some(0), MANY), "{listed}");
    let expected = "this is about 500 machines; the order would be given Nothing undoes this order: ";
    assert!(listed.contains(expected) && listed.ends_with("--yes-count 500"), "{listed}");
    let (code, within) = ctl(&fleet, &with(&["--dry-run"])).await?;
    assert_eq!((code, names(&within)), (Some(4), names(&listed)), "it exits as the order would");
    assert!(within.contains("refused: ") && within.contains("50"), "{within}");
    refuses(&fleet, &with(&["--yes-count", "500"]), "50").await?;
    refuses(&fleet, &with(&["--yes-count", "499", "--beyond-limits"]), "500 machines").await?;
    assert!(fleet.holds("SELECT count(*) = 0 FROM machine_retirement").await?, "nothing was ordered yet");
    let (code, ordered) = ctl(&fleet, &with(&["--yes-count", "500", "--beyond-limits"])).await?;
    assert_eq!((code, names(&ordered)), (Some(0), names(&listed)), "the same list");
    assert!(ordered.ends_with("500 machines: 500 changed"), "{ordered}");
    assert!(
        fleet
            .holds("SELECT count(*) = 500 FROM audit WHERE rpc LIKE '%Machines/Retire' AND NOT dry_run")
            .await?
    );

    let flags = ["--components=retirer", "--retirer_loop_parallelism=4", "--retirer_db_query_rate=1ms,100"];
    let shepherd = fleet.shepherd("retirer", &[endpoint()?], &flags)?;
    let put_off = "SELECT count(*) = 493 FROM work_postponed
                   WHERE reason = 'the budget to give machines back is used up (7 in 12h)'";
    fleet.until_within("all others are put off by the budget", put_off, PATIENCE_WITH_MANY).await?;
    assert_eq!(taken_back(&fleet.journal()?).len(), BUDGET);
    assert!(fleet.holds("SELECT count(*) = 7 FROM machine_retirement WHERE finished_at IS NOT NULL").await?);
    let waiting: String = sqlx::query_scalar(
        "SELECT provider_id FROM machine_provided JOIN work_postponed USING (machine_id) LIMIT 1",
    )
    .fetch_one(&fleet.pool)
    .await?;
    says(&fleet, &["why", &waiting], "the budget to give machines back is used up (7 in 12h)").await?;
    Ok(stop(&fleet, shepherd).await?)
}

/// A hold, a cancellation or a second database may come between the decision and the order, so permission is checked
/// right before the order is given.
#[tokio::test]
async fn machine_is_given_back_only_as_things_are_right_before() -> TestResult {
    let kit = Kit::new("retire_permission").await?;
    let shepherd = Shepherd::start(&kit, "retirer", LONG).await?;
    let machine = kit.provided(1, "rack").await?[0];
    let requested = RetirementChange::Requested { reason: "old".into(), by: "kim".into(), wipe: false };
    kit.change(machine, vec![FactChange::Retirement(requested.clone())]).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::Retirement).await?;
    let ask = async || Ok::<_, anyhow::Error>(work.begin_release("rack").await?);
    let intents = async || kit.count("SELECT count(*) FROM intent").await;

    let hold = Hold { scope: HoldScope::Power, reason: "disks".into(), by: "lee".into(), until: None };
    kit.change(machine, vec![FactChange::HoldSet(hold)]).await?;
    assert!(
        matches!(ask().await?, ReleasePermission::Denied(refusal) if refusal.reason.contains("lee holds it"))
    );
    kit.change(machine, vec![FactChange::HoldCleared, FactChange::Retirement(RetirementChange::Cleared)])
        .await?;
    assert!(matches!(ask().await?, ReleasePermission::Denied(_)), "it was cancelled");
    assert_eq!(intents().await?, 0, "nothing was recorded");
    kit.change(machine, vec![FactChange::Retirement(requested)]).await?;
    let ReleasePermission::Granted(intent) = ask().await? else { panic!("refused") };
    let ReleasePermission::Granted(again) = ask().await? else { panic!("refused") };
    assert_eq!((intents().await?, again), (1, intent), "a second request gets the same intent");
    kit.change(machine, vec![FactChange::Retirement(RetirementChange::Cleared)]).await?;
    assert_eq!(kit.count("SELECT count(*) FROM machine_retirement").await?, 1, "what was ordered stays");
    let finished = |how: &str| FactChange::Retirement(RetirementChange::Finished(how.into()));
    work.finish(vec![finished("the provider took it back")], "done").await?;
    kit.change(machine, vec![finished("too late")]).await?;
    assert_eq!(
        kit.bmdb
            .read_machine_snapshot(machine)
            .await?
            .facts
            .retirement
            .and_then(|fact| fact.outcome)
            .as_deref(),
        Some("the provider took it back")
    );
    let open = kit.count("SELECT count(*) FROM intent WHERE settled_at IS NULL").await?;
    assert_eq!((open, kit.sweep().await?), (0, 0), "its schedule is what its facts demand");
    Ok(shepherd.stop().await?)
}

/// In a group and alone, and in any boot.
#[tokio::test]
async fn agent_of_a_retired_machine_is_refused_with_words_of_its_own_and_nothing_is_written() -> TestResult {
    let kit = Kit::new("retire_refused").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let agent = NewAgent {
        public_key: vec![7; 32],
        boot_id: None,
        version: "1".into(),
        supervision: "systemd".into(),
        fence: 1,
    };
    let beat = |boot: &str, sequence| NewHeartbeat {
        boot_id: boot.into(),
        incarnation: "one".into(),
        sequence,
        version: "1".into(),
    };
    let requested = RetirementChange::Requested { reason: "old".into(), by: "kim".into(), wipe: false };
    let changes = [
        FactChange::AgentStarted(agent),
        FactChange::Heartbeat(beat("boot", 1)),
        FactChange::Retirement(requested),
    ];
    kit.change(machine, changes.to_vec()).await?;
    let say = async |beat: NewHeartbeat, key: u8| {
        let report = std::sync::Arc::new(ReceivedHeartbeat {
            machine,
            public_key: [key; 32],
            beat,
            hardware: None,
            installation: None,
            cluster: None,
            release: None,
            access_fence: 0,
        });
        let plain = kit.bmdb.store_heartbeat_group(1, std::sync::Arc::new([report.clone()])).await?;
        match plain.into_values().next() {
            Some(plain) => anyhow::Ok(HeartbeatOutcome::Stored(plain.instructions)),
            None => Ok(kit.bmdb.store_heartbeat(report).await?),
        }
    };
    let on_its_way = say(beat("boot", 2), 7).await?;
    assert!(
        matches!(on_its_way, HeartbeatOutcome::Stored(_)),
        "its heartbeats are stored until it is retired: {on_its_way:?}"
    );
    kit.bmdb
        .change_machine(machine, |_| Decision {
            changes: vec![FactChange::Retirement(RetirementChange::Finished("gone".into()))],
            events: Vec::new(),
            output: (),
        })
        .await?;
    assert_eq!(say(beat("boot", 3), 7).await?, HeartbeatOutcome::Retired);
    assert_eq!(say(beat("another", 1), 7).await?, HeartbeatOutcome::Retired);
    assert_eq!(
        say(beat("boot", 3), 8).await?,
        HeartbeatOutcome::Unauthenticated,
        "another key does not learn that it is retired"
    );
    let heartbeat = kit.bmdb.read_machine_snapshot(machine).await?.facts.heartbeat.context("its last one")?;
    assert_eq!((heartbeat.sequence, heartbeat.boot_id.as_str()), (2, "boot"));
    Ok(())
}
