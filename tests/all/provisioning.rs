//! The provisioner against a simulator: the provider's capacity becomes machines, each of them once.

mod limits;
mod scripted;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::named_lease::NamedLease;
use shepherd::bmdb::engine::session::Sessions;
use shepherd::model::ids::{IntentId, ProcessId};
use shepherd::providers::provider::{CreationControl, Provider};
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::until;
use crate::checker::{Records, check};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, Program, endpoint};

/// A shepherd that provisions and does nothing else, under a session that it keeps on a host that stops for some
/// seconds.
fn provisioning(fleet: &Fleet, name: &str, flags: &[&str]) -> Result<Program> {
    let flags = [&["--components", "provisioner", "--session_interval", "15s"], flags].concat();
    fleet.shepherd(name, &[endpoint()?], &flags)
}

async fn stop(fleet: &Fleet, mut shepherd: Program) -> Result<()> {
    let status = shepherd.terminate().await?;
    ensure!(status.code() == Some(0), "it ended with {status}\n{}", fleet.explain().await?);
    Ok(())
}

/// A provisioner that will crash. The test itself executes its steps.
struct Doomed {
    bmdb: Bmdb,
    keep: CancellationToken,
    keeper: tokio::task::JoinHandle<()>,
}

async fn doomed(fleet: &Fleet) -> Result<(SimulatedProvider, NamedLease, Doomed)> {
    let bmdb = fleet.database.bmdb().await?;
    bmdb.migrate().await?;
    let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_mins(2));
    let keep = CancellationToken::new();
    let keeper = tokio::spawn(keeper.run(&keep)?);
    let session = sessions.start("provisioner", serde_json::json!({})).await?;
    let lease =
        bmdb.acquire_named_lease(&session, "provisioner", "sim").await?.context("nobody else has it")?;
    let config = SimulatedConfig { name: "sim".parse()?, url: fleet.url.clone(), caller: None };
    Ok((SimulatedProvider::new(config)?, lease, Doomed { bmdb, keep, keeper }))
}

impl Doomed {
    /// The crash: it is gone, and its session's deadline has passed.
    async fn now(self, fleet: &Fleet) -> Result<()> {
        sqlx::query("UPDATE session SET deadline = clock_timestamp() - INTERVAL '1 min'")
            .execute(&fleet.pool)
            .await?;
        self.keep.cancel();
        Ok(self.keeper.await?)
    }
}

/// The outcome of an intent; empty while it is open.
async fn outcome(fleet: &Fleet, intent: IntentId) -> Result<String> {
    Ok(sqlx::query_scalar("SELECT COALESCE(outcome, '') FROM intent WHERE intent_id = $1")
        .bind(intent.0)
        .fetch_one(&fleet.pool)
        .await?)
}

async fn machines(fleet: &Fleet) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT count(*) FROM machine").fetch_one(&fleet.pool).await?)
}

/// Waits until this many machines are known.
async fn until_known(fleet: &Fleet, wanted: i64) -> Result<()> {
    until(&format!("{wanted} machines are known"), async || Ok(machines(fleet).await? >= wanted)).await
}

/// Waits until the provider has listed its machines this many more times.
async fn lists(fleet: &Fleet, more: usize) -> Result<()> {
    let made = |journal: &[Value]| journal.iter().filter(|line| line["what"] == "list").count();
    let wanted = made(&fleet.journal()?) + more;
    let deadline = std::time::Instant::now() + crate::harness::fleet::PATIENCE;
    while made(&fleet.journal()?) < wanted {
        ensure!(std::time::Instant::now() < deadline, "no more lists\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_becomes_machines_up_to_the_limit_and_by_the_chunk() -> TestResult {
    let fleet = Fleet::start("provision_limits", &["--machine_count", "12"]).await?;
    let limits = ["--provisioner_max_machines", "5", "--provisioner_reservation_chunk_size", "2"];
    let shepherd = provisioning(&fleet, "limited", &limits)?;
    fleet.until("five machines are known", "SELECT count(*) = 5 FROM machine").await?;
    lists(&fleet, 3).await?;
    stop(&fleet, shepherd).await?;
    assert_eq!(machines(&fleet).await?, 5);
    let mut in_this_pass = 0;
    for line in fleet.journal()? {
        match line["what"].as_str() {
            Some("list") => in_this_pass = 0,
            Some("create") => in_this_pass += 1,
            _ => {}
        }
        assert!(in_this_pass <= 2, "a chunk is two machines");
    }
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_crash_left_open_is_adopted_once_or_settled() -> TestResult {
    let fleet = Fleet::start("provision_adopt", &["--machine_count", "4"]).await?;
    let (provider, lease, crash) = doomed(&fleet).await?;
    // It crashes twice: after the provider created the machine, and before the provider got the request.
    let free = provider.list().await?.first().context("capacity")?.id.clone();
    let id = crash.bmdb.begin_creation(&lease, &free).await?;
    let made = provider.create(id, Some(&free)).await?;
    let not_requested = crash.bmdb.begin_creation(&lease, "never requested").await?;
    crash.now(&fleet).await?;

    let shepherd = provisioning(&fleet, "next", &[])?;
    fleet.until("all four are known", "SELECT count(*) = 4 FROM machine").await?;
    fleet.until("nothing is open", "SELECT count(*) = 0 FROM intent WHERE settled_at IS NULL").await?;
    stop(&fleet, shepherd).await?;
    assert_eq!(outcome(&fleet, not_requested).await?, "nothing was made");
    let recorded: (String, String) = sqlx::query_as(
        "SELECT machine_id::TEXT, h.detail FROM machine_provided p JOIN history h USING (machine_id)
         WHERE p.provider_id = $1 AND h.event = 'Recorded'",
    )
    .bind(&made.id)
    .fetch_one(&fleet.pool)
    .await?;
    assert_eq!(outcome(&fleet, id).await?, format!("machine {}", recorded.0));
    assert_eq!(recorded.1, format!("adopted by its intent: {}", made.id));
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_of_a_dead_provisioner_that_arrives_late_is_still_adopted() -> TestResult {
    let fleet = Fleet::start("provision_late", &["--machine_count", "3"]).await?;
    let (provider, lease, crash) = doomed(&fleet).await?;
    let late = crash.bmdb.begin_creation(&lease, "on its way").await?;
    crash.now(&fleet).await?;
    // An order may be on its way for so long that nothing here waits for it.
    let limits = ["--provisioner_max_machines", "2", "--outward_call_timeout", "30m"];
    let shepherd = provisioning(&fleet, "next", &limits)?;
    fleet.until("two are known", "SELECT count(*) = 2 FROM machine").await?;
    // A shepherd that searches for it by now finds nothing.
    lists(&fleet, 2).await?;
    let made = provider.create(late, None).await?;
    fleet.until("it is known too", "SELECT count(*) = 3 FROM machine").await?;
    stop(&fleet, shepherd).await?;
    assert!(outcome(&fleet, late).await?.starts_with("machine "));
    assert!(fleet.holds("SELECT count(*) = 0 FROM machine_quarantine").await?, "{} is no stranger", made.id);
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_provisioners_one_works_and_the_other_takes_over_when_it_dies() -> TestResult {
    let fleet = Fleet::start("provision_two", &["--machine_count", "30"]).await?;
    let slow = ["--provisioner_device_creation_rate", "150ms,1"];
    // One is left for the second shepherd, however late it comes.
    let all_but_one = [&slow[..], &["--provisioner_max_machines", "29"]].concat();
    let mut first = provisioning(&fleet, "first", &all_but_one)?;
    fleet.until("the first has begun", "SELECT count(*) >= 2 FROM machine").await?;
    let second = provisioning(&fleet, "second", &slow)?;
    fleet
        .until(
            "both are there",
            "SELECT count(DISTINCT runtime_info->>'pid') = 2 FROM session WHERE component = 'provisioner'",
        )
        .await?;
    fleet.until("the first goes on", "SELECT count(*) >= 12 FROM machine").await?;
    first.signal(Signal::STOP)?;
    let by_second =
        "SELECT count(*) FROM intent JOIN session USING (session_id) WHERE runtime_info->>'pid' = $1";
    let by_second =
        || sqlx::query_scalar::<_, i64>(by_second).bind(second.pid().to_string()).fetch_one(&fleet.pool);
    assert_eq!(by_second().await?, 0, "the second one waits for the lease");
    first.kill()?;
    fleet.until("all 30 are known", "SELECT count(*) = 30 FROM machine").await?;
    fleet.until("nothing is open", "SELECT count(*) = 0 FROM intent WHERE settled_at IS NULL").await?;
    assert!(by_second().await? > 0);
    stop(&fleet, second).await?;
    let fence: i64 = sqlx::query_scalar("SELECT fence FROM named_lease WHERE kind = 'provisioner'")
        .fetch_one(&fleet.pool)
        .await?;
    assert_eq!(fence, 2);
    assert_eq!(check(&Records::read(&fleet.pool, &fleet.journal()?).await?), []);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_the_provider_lost_is_quarantined_until_it_is_listed_again() -> TestResult {
    let fleet = Fleet::start("provision_lost", &["--machine_count", "2"]).await?;
    let shepherd = provisioning(&fleet, "shepherd", &[])?;
    fleet.until("both are known", "SELECT count(*) = 2 FROM machine").await?;
    fleet.strike("provider", "list-short").await?;
    fleet.until("one is quarantined", "SELECT count(*) = 1 FROM machine_quarantine").await?;
    let due: (String, String) = sqlx::query_as(
        "SELECT phase_index, reason FROM machine_due WHERE phase_index = 'Quarantined' AND lane = 'access'",
    )
    .fetch_one(&fleet.pool)
    .await?;
    assert!(due.1.contains("the provider does not list it any more"), "{due:?}");
    assert!(fleet.holds("SELECT brake IS NULL FROM provider_state").await?, "one machine is no brake");
    fleet.strike("provider", "heal").await?;
    fleet.until("it is explained", "SELECT count(*) = 0 FROM machine_quarantine").await?;
    fleet
        .until("the history records it", "SELECT count(*) = 1 FROM history WHERE event = 'QuarantineCleared'")
        .await?;
    Ok(stop(&fleet, shepherd).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_cannot_be_right_stops_creation_until_it_is() -> TestResult {
    let fleet = Fleet::start("provision_brake", &["--machine_count", "10"]).await?;
    let shepherd = provisioning(&fleet, "before", &["--provisioner_max_machines", "6"])?;
    fleet.until("six are known", "SELECT count(*) = 6 FROM machine").await?;
    stop(&fleet, shepherd).await?;
    for (room, fault, says) in [
        (7, "list-empty", "brake: its list is empty, and 6 machines of it are known here"),
        (8, "list-error", "brake: its list cannot be read: "),
        (9, "list-torn", "brake: its list cannot be read: "),
        (10, "list-short", "brake: its list lost "),
    ] {
        fleet.strike("provider", fault).await?;
        let shepherd = provisioning(&fleet, fault, &["--provisioner_max_machines", &room.to_string()])?;
        fleet.until(fault, "SELECT brake IS NOT NULL FROM provider_state").await?;
        lists(&fleet, 2).await?;
        let text: Option<String> =
            sqlx::query_scalar("SELECT brake FROM provider_state").fetch_one(&fleet.pool).await?;
        let text = text.unwrap_or_default();
        assert!(text.starts_with(says), "{fault}: {text}");
        assert_eq!(machines(&fleet).await?, room - 1, "{fault}: something was created");
        assert!(fleet.holds("SELECT count(*) = 0 FROM machine_quarantine").await?, "{fault}");
        fleet.strike("provider", "heal").await?;
        fleet.until("it is released", "SELECT brake IS NULL AND error IS NULL FROM provider_state").await?;
        until_known(&fleet, room).await?;
        lists(&fleet, 2).await?;
        stop(&fleet, shepherd).await?;
        assert_eq!(machines(&fleet).await?, room, "{fault}: creation goes on");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_fails_is_skipped_and_every_machine_is_still_made_once() -> TestResult {
    // One call in fourteen fails, some of them after their effect.
    let fleet =
        Fleet::start("provision_errors", &["--machine_count", "80", "--fault_profile", "harsh"]).await?;
    let shepherd = provisioning(&fleet, "shepherd", &[])?;
    fleet.until("all 80 are known", "SELECT count(*) = 80 FROM machine").await?;
    fleet.until("nothing is open", "SELECT count(*) = 0 FROM intent WHERE settled_at IS NULL").await?;
    stop(&fleet, shepherd).await?;
    let records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    let failed =
        records.calls.iter().filter(|call| call.what == "create" && call.outcome == "failed").count();
    assert!(failed > 0, "no creation failed");
    assert_eq!(check(&records), []);
    Ok(())
}
