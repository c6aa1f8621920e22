//! The provisioner with a provider that follows a script: what a real one does rarely, at a known moment.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
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
use shepherd::model::adoption::NotAdopted;
use shepherd::model::ids::{IntentId, ProcessId};
use shepherd::model::provider_status::{MachineUsage, ProviderStatus};
use shepherd::providers::provider::{
    CreationControl, ErrorClass, PowerControl, Provider, ProviderError, ProviderMachine, ProviderName,
    RebootControl,
};
use sqlx::Connection as _;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, settings as connection_settings, until};
use crate::harness::aloud::TestResult;

/// A provider that behaves as a test defines.
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
        creation: Some(Limiter::new("1ms,50".parse()?)),
        breaker: ProviderBreaker::new("rack", BreakerMetrics::default()),
        metrics: ManagerMetrics::register(&Metrics::new()),
    })
}

const HELD_LEASES: &str = "SELECT count(*) FROM named_lease WHERE lease_session IS NOT NULL";

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
    assert_eq!((kit.count(HELD_LEASES).await?, kit.count(OPEN).await?), (0, 0));
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
    assert_eq!((kit.count(HELD_LEASES).await?, kit.count(OPEN).await?), (0, 0));
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
            kit.bmdb.record_not_adopted(of, Some(NotAdopted { machines: 5, limit: 2 })).await.map(drop),
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
            "SELECT count(*) FROM provider_state
             WHERE brake IS NOT NULL AND machines = 1 AND error IS NULL AND not_adopted IS NULL"
        )
        .await?,
        1
    );
    assert_eq!(kit.count("SELECT count(*) FROM machine_quarantine").await?, 0);
    Ok(shepherd.stop().await?)
}
