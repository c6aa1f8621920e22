//! The provisioner against a simulator: the provider's capacity becomes machines, each of them once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use rustix::process::Signal;
use serde_json::Value;
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::named_lease::NamedLease;
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::limiter::Limiter;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_breakers::{BreakerMetrics, ProviderBreaker};
use shepherd::manager::provisioner::plan::ProvisionerLimits;
use shepherd::manager::provisioner::{self, ProvisionerSettings};
use shepherd::model::ids::{IntentId, ProcessId};
use shepherd::model::provider_status::{MachineUsage, ProviderStatus};
use shepherd::providers::provider::{
    CreationControl, ErrorClass, PowerControl, Provider, ProviderError, ProviderMachine, ProviderName,
    RebootControl,
};
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use sqlx::Connection as _;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, settings as connection_settings, until};
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

/// A provider whose behaviour a test defines.
struct Scripted {
    name: ProviderName,
    lists: Mutex<Vec<Instant>>,
    /// The intents of its create requests, and of its find requests.
    made: Mutex<Vec<IntentId>>,
    found: Mutex<Vec<IntentId>>,
    panics: usize,
}

fn all<T: Clone>(noted: &Mutex<Vec<T>>) -> Vec<T> {
    noted.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn note<T>(noted: &Mutex<Vec<T>>, one: T) {
    noted.lock().unwrap_or_else(PoisonError::into_inner).push(one);
}

impl Scripted {
    fn new(panics: usize) -> Result<Arc<Self>> {
        let (lists, made, found) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { name: "rack".parse()?, lists, made, found, panics }))
    }

    fn lists(&self) -> Vec<Instant> {
        all(&self.lists)
    }
}

#[expect(clippy::panic, reason = "a provider that panics is what is tested")]
fn blow_up() {
    panic!("the provider's own words")
}

#[async_trait]
impl Provider for Scripted {
    fn name(&self) -> &ProviderName {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "scripted"
    }

    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError> {
        let lists = {
            let mut lists = self.lists.lock().unwrap_or_else(PoisonError::into_inner);
            lists.push(Instant::now());
            lists.len()
        };
        if lists <= self.panics {
            blow_up();
        }
        let offer = |number: usize| ProviderMachine {
            id: format!("m{number}"),
            usage: MachineUsage::PossiblyUsed,
            address: None,
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Unknown,
            host_keys: Vec::new(),
            intent: None,
        };
        Ok((0..4).map(offer).collect())
    }

    async fn find_machine(&self, _id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        Ok(None)
    }

    fn creation(&self) -> Option<&dyn CreationControl> {
        Some(self)
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        None
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        None
    }
}

#[async_trait]
impl CreationControl for Scripted {
    async fn create(
        &self,
        intent: IntentId,
        _reservation: Option<&str>,
    ) -> Result<ProviderMachine, ProviderError> {
        note(&self.made, intent);
        Err(ProviderError::new(ErrorClass::Transient, "rack", "there is none today"))
    }

    async fn find_by_intent(&self, intent: IntentId) -> Result<Option<ProviderMachine>, ProviderError> {
        note(&self.found, intent);
        Ok(None)
    }
}

fn settings(reconciler: &str) -> Result<ProvisionerSettings> {
    Ok(ProvisionerSettings {
        limits: ProvisionerLimits { max_machines: None, chunk: 2 },
        reconciler: Limiter::new(reconciler.parse()?),
        creation: Limiter::new("1ms,50".parse()?),
        breaker: ProviderBreaker::new("rack", BreakerMetrics::default()),
        metrics: ManagerMetrics::register(&Metrics::new()),
    })
}

const HELD: &str = "SELECT count(*) FROM named_lease WHERE lease_session IS NOT NULL";
const OPEN: &str = "SELECT count(*) FROM session WHERE closed_at IS NULL";

#[tokio::test]
async fn a_lease_that_is_taken_while_the_shepherd_stops_is_given_back() -> TestResult {
    let kit = Kit::new("provision_stop").await?;
    let shepherd = Shepherd::start(&kit, "stopping", LONG).await?;
    sqlx::query("INSERT INTO named_lease (kind, name, fence) VALUES ('provisioner', 'rack', 0)")
        .execute(&kit.pool)
        .await?;
    let mut by_hand = kit.connection().await?;
    let mut holding = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM named_lease FOR UPDATE").execute(&mut *holding).await?;
    let stop = CancellationToken::new();
    let provider = Scripted::new(0)?;
    let running = tokio::spawn(provisioner::run_provisioner(
        shepherd.sessions.clone(),
        provider.clone(),
        settings("1s,1")?,
        stop.clone(),
    ));
    kit.until_blocked("stopping", 1).await?;
    stop.cancel();
    // If the shepherd stopped taking the lease at this point, it would begin to close its session now.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    holding.rollback().await?;
    ended("the provisioner", running).await?;
    assert_eq!((kit.count(HELD).await?, kit.count(OPEN).await?), (0, 0));
    Ok(shepherd.stop().await?)
}

/// Between the record of an order and the order, nothing notifies the provisioner that its session is over: the
/// notifier waits as long as it does. It has to check by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_whose_record_outlasted_the_session_is_not_sent() -> TestResult {
    let kit = Kit::new("provision_outlasted").await?;
    let bmdb = Bmdb::connect(connection_settings(&kit.database, "provisioner", 6)?).await?;
    bmdb.read_policy().await?;
    // Nothing renews its sessions, and nothing notices that they are over.
    let (sessions, _keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_secs(2));
    let stop = CancellationToken::new();
    let provider = Scripted::new(0)?;
    let mut by_hand = kit.connection().await?;
    let running = tokio::spawn(provisioner::run_provisioner(
        sessions,
        provider.clone(),
        settings("200ms,1")?,
        stop.clone(),
    ));
    let late = loop {
        let mut holding = by_hand.begin().await?;
        sqlx::raw_sql("LOCK TABLE intent IN SHARE MODE").execute(&mut *holding).await?;
        kit.until_blocked("provisioner", 1).await?;
        let alive = "SELECT count(*) FROM session WHERE closed_at IS NULL AND deadline > clock_timestamp()";
        until("its session is over", async || Ok(kit.count(alive).await? == 0)).await?;
        holding.commit().await?;
        kit.bmdb.reap().await?;
        // On a busy host the wait for the lock may have ended before, and nothing was recorded.
        let recorded: Option<Uuid> = sqlx::query_scalar(
            "SELECT i.intent_id FROM intent i JOIN session s USING (session_id) WHERE i.begun_at > s.deadline",
        )
        .fetch_optional(&kit.pool)
        .await?;
        if let Some(recorded) = recorded {
            break IntentId(recorded);
        }
    };
    until("the next pass has looked for it, and ordered others", async || {
        kit.bmdb.reap().await?;
        Ok(all(&provider.found).contains(&late) && !all(&provider.made).is_empty())
    })
    .await?;
    stop.cancel();
    ended("the provisioner", running).await?;
    assert!(!all(&provider.made).contains(&late), "an order was sent for a session that was over");
    bmdb.close().await;
    Ok(())
}

#[tokio::test]
async fn a_provider_that_makes_nothing_is_called_at_the_reconcilers_pace() -> TestResult {
    let kit = Kit::new("provision_pace").await?;
    let shepherd = Shepherd::start(&kit, "provisioner", LONG).await?;
    let stop = CancellationToken::new();
    let provider = Scripted::new(0)?;
    let running = tokio::spawn(provisioner::run_provisioner(
        shepherd.sessions.clone(),
        provider.clone(),
        settings("2s,1")?,
        stop.clone(),
    ));
    until("three passes were made", async || Ok(provider.lists().len() >= 3)).await?;
    stop.cancel();
    ended("the provisioner", running).await?;
    // The first pass needs no token. The second takes the one that exists, and may then be slow to request another: the
    // third one's token comes two seconds after it was taken.
    let lists = provider.lists();
    let between = lists[2] - lists[0];
    assert!(between >= Duration::from_millis(1900), "the third pass came {between:?} after the first");
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn a_paused_provisioner_makes_no_pass_until_it_is_resumed() -> TestResult {
    let kit = Kit::new("provision_paused").await?;
    let pause = "INSERT INTO loop_pause VALUES ('provisioner', 'rack', 'r', 'kim', clock_timestamp(), NULL)";
    sqlx::query(pause).execute(&kit.pool).await?;
    let shepherd = Shepherd::start(&kit, "provisioner", LONG).await?;
    let stop = CancellationToken::new();
    let provider = Scripted::new(0)?;
    let running = tokio::spawn(provisioner::run_provisioner(
        shepherd.sessions.clone(),
        provider.clone(),
        settings("50ms,1")?,
        stop.clone(),
    ));
    let requested = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                 AND application_name = 'provisioner' AND query LIKE '%FROM loop_pause%'";
    until("it has read whether it is paused", async || Ok(kit.count(requested).await? > 0)).await?;
    assert!(provider.lists().is_empty() && all(&provider.made).is_empty());
    sqlx::query("DELETE FROM loop_pause").execute(&kit.pool).await?;
    until("a pass was made", async || Ok(!all(&provider.made).is_empty())).await?;
    stop.cancel();
    ended("the provisioner", running).await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn a_panic_of_a_provider_spoils_one_pass_and_not_the_provisioner() -> TestResult {
    let kit = Kit::new("provision_panic").await?;
    let shepherd = Shepherd::start(&kit, "provisioner", LONG).await?;
    let stop = CancellationToken::new();
    let provider = Scripted::new(1)?;
    let running = tokio::spawn(provisioner::run_provisioner(
        shepherd.sessions.clone(),
        provider.clone(),
        settings("50ms,1")?,
        stop.clone(),
    ));
    until("the next pass is through", async || {
        Ok(kit.count("SELECT count(*) FROM provider_state WHERE machines = 4").await? == 1)
    })
    .await?;
    stop.cancel();
    ended("the provisioner", running).await?;
    assert_eq!((kit.count(HELD).await?, kit.count(OPEN).await?), (0, 0));
    Ok(shepherd.stop().await?)
}

#[tokio::test]
async fn a_provisioner_that_lost_its_lease_quarantines_nobody() -> TestResult {
    let kit = Kit::new("provision_fenced").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "provisioner", LONG).await?;
    let session = shepherd.session().await?;
    let lease = kit.bmdb.acquire_named_lease(&session, "provisioner", "rack").await?.context("it is free")?;
    let quarantine = async || {
        kit.bmdb
            .change_machine_under_lease(&lease, machine, |_| Decision {
                changes: vec![FactChange::Quarantined("not listed".to_owned())],
                events: Vec::new(),
                output: (),
            })
            .await
    };
    let intent = kit.bmdb.begin_creation(&lease, "slot-1").await?;
    kit.bmdb.record_provider_list(&lease, "static", 1).await?;
    assert!(kit.bmdb.set_provisioner_brake(&lease, Some("brake: its list is empty")).await?);
    kit.overdue(&session).await?;
    assert!(matches!(quarantine().await, Err(BmdbError::SessionEnded)));
    kit.bmdb.reap().await?;
    let next = shepherd.session().await?;
    kit.bmdb.acquire_named_lease(&next, "provisioner", "rack").await?.context("it was freed")?;
    let late = NamedLease { session: next.id(), ..lease.clone() };
    let refused = kit.bmdb.change_machine_under_lease(&late, machine, |_| Decision::<()>::default()).await;
    assert!(matches!(refused, Err(BmdbError::LeaseLost)), "an older fence: {refused:?}");
    for (of, expected) in [(&lease, "SessionEnded"), (&late, "LeaseLost")] {
        let tried = [
            kit.bmdb.resolve_creation(of, intent, "nothing was made").await.map(drop),
            kit.bmdb.set_provisioner_brake(of, None).await.map(drop),
            kit.bmdb.record_provider_list(of, "static", 7).await,
            kit.bmdb.record_provider_list_failure(of, "static", "late").await,
        ];
        for refused in tried {
            assert_eq!(refused.map_err(|error| format!("{error:?}")), Err(expected.to_owned()));
        }
    }
    let open = kit.count("SELECT count(*) FROM intent WHERE settled_at IS NULL").await?;
    assert_eq!(open, 1, "somebody else may be adopting it");
    assert_eq!(
        kit.count(
            "SELECT count(*) FROM provider_state WHERE brake IS NOT NULL AND machines = 1 AND error IS NULL"
        )
        .await?,
        1
    );
    assert_eq!(kit.count("SELECT count(*) FROM machine_quarantine").await?, 0);
    Ok(shepherd.stop().await?)
}
