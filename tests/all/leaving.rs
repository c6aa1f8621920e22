//! Retiring machines that their provider does not know, that its list has lost meanwhile, or with a retirement that a
//! restored database has forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::fact_change::retirement::RetirementChange;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::orders::order::{Actor, Order, request_digest};
use shepherd::manager::control_loop::{ControlLoop as _, HandlerOutcome};
use shepherd::manager::limiter::Limiter;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_breakers::{BreakerMetrics, ProviderBreaker};
use shepherd::manager::provider_set::ProviderSet;
use shepherd::manager::provisioner::plan::ProvisionerLimits;
use shepherd::manager::provisioner::{self, ProvisionerSettings};
use shepherd::manager::retirer::Retirer;
use shepherd::model::ids::{IntentId, MachineId};
use shepherd::model::policy::{Budget, Policy};
use shepherd::model::process::Process;
use shepherd::model::provider_status::{MachineUsage, ProviderStatus};
use shepherd::providers::provider::{
    CreationControl, ErrorClass, PowerControl, Provider, ProviderError, ProviderMachine, ProviderName,
    RebootControl, ReleaseControl,
};
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, until};
use crate::harness::aloud::TestResult;

/// A provider that lists only these machines, and that releases others while its list is read. A machine with an ordered
/// release has just disappeared from its list.
struct Rack {
    name: ProviderName,
    listed: Vec<String>,
    /// Whether the provider can take machines back.
    takes_back: bool,
    given_back: Vec<MachineId>,
    bmdb: Bmdb,
    lists: AtomicUsize,
}

impl Rack {
    fn new(kit: &Kit) -> Result<Self> {
        let (listed, given_back, lists) = (Vec::new(), Vec::new(), AtomicUsize::new(0));
        Ok(Self {
            name: "rack".parse()?,
            listed,
            takes_back: true,
            given_back,
            bmdb: kit.bmdb.clone(),
            lists,
        })
    }
}

fn listed(id: &str) -> ProviderMachine {
    ProviderMachine {
        id: id.to_owned(),
        usage: MachineUsage::PossiblyUsed,
        address: None,
        ssh_port: None,
        ssh_user: None,
        location: None,
        status: ProviderStatus::Unknown,
        host_keys: Vec::new(),
        intent: None,
    }
}

/// The events of a retirement.
fn leaving(then: impl IntoIterator<Item = RetirementChange>) -> Vec<FactChange> {
    let requested = RetirementChange::Requested { reason: "old".into(), by: "kim".into(), wipe: false };
    [requested].into_iter().chain(then).map(FactChange::Retirement).collect()
}

#[async_trait]
impl Provider for Rack {
    fn name(&self) -> &ProviderName {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "scripted"
    }

    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError> {
        for machine in &self.given_back {
            let left = [
                RetirementChange::ReleaseOrdered(IntentId::generate()),
                RetirementChange::Finished("gone".into()),
            ];
            let decide =
                move |_: &_| Decision { changes: leaving(left.clone()), events: Vec::new(), output: () };
            let changed = self.bmdb.change_machine(*machine, decide).await;
            changed.map_err(|error| ProviderError::new(ErrorClass::Transient, "rack", error.to_string()))?;
        }
        self.lists.fetch_add(1, Ordering::SeqCst);
        Ok(self.listed.iter().map(|id| listed(id)).collect())
    }

    async fn find_machine(&self, id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        Ok(self.listed.iter().find(|known| *known == id).map(|id| listed(id)))
    }

    fn creation(&self) -> Option<&dyn CreationControl> {
        None
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        None
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        None
    }

    fn release(&self) -> Option<&dyn ReleaseControl> {
        self.takes_back.then_some(self as &dyn ReleaseControl)
    }
}

#[async_trait]
impl ReleaseControl for Rack {
    async fn release(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        let sentence = format!("{id} is not in the list any more");
        Err(ProviderError::new(ErrorClass::NotFound, "rack", sentence))
    }
}

/// A machine that its provider does not know has left. Its retirement ends with the same checks and the same budget as
/// any other, and while the provider's list is implausible, it is not believed.
#[tokio::test]
async fn machine_that_its_provider_does_not_know_ends_as_guarded_as_any() -> TestResult {
    // Whether the provider can take machines back, and whether only the release shows that the machine is gone.
    for (takes_back, late) in [(true, false), (false, false), (true, true)] {
        let kit = Kit::new("leaving_unknown").await?;
        let shepherd = Shepherd::start(&kit, "retirer", LONG).await?;
        let machine = kit.provided(1, "rack").await?[0];
        kit.change(machine, leaving([])).await?;
        let session = shepherd.session().await?;
        let lease =
            kit.bmdb.acquire_named_lease(&session, "provisioner", "rack").await?.context("it is free")?;
        kit.bmdb.record_provider_list(&lease, "scripted", 0).await?;
        let listed = late.then(|| machine.to_string()).into_iter().collect();
        let rack = Arc::new(Rack { listed, takes_back, ..Rack::new(&kit)? });
        let retirer = Retirer { providers: ProviderSet::new(vec![rack]) };
        let work = shepherd.claim_one(&session, Process::Retirement).await?;
        let waits = async |part: &str| {
            let handled = retirer.handle(&work).await.map_err(|error| anyhow::anyhow!(error.cause))?;
            let HandlerOutcome::Requeue { changes, reason, .. } = handled else {
                anyhow::bail!("it is over: {handled:?}")
            };
            anyhow::ensure!(changes.is_empty() && reason.contains(part), "{reason}");
            Ok(())
        };
        let intents = async || kit.count("SELECT count(*) FROM intent").await;

        kit.change(machine, vec![FactChange::Quarantined("it may be theirs".into())]).await?;
        waits("it is quarantined").await?;
        kit.change(machine, vec![FactChange::QuarantineCleared]).await?;
        let budget = |count: u32| {
            let normal = Policy::default().release_budget;
            kit.bmdb.change_policy("test", move |policy| policy.release_budget = Budget { count, ..normal })
        };
        budget(0).await?;
        waits("the budget to give machines back allows none").await?;
        budget(1).await?;
        assert_eq!(intents().await?, 0, "nothing was ordered");

        kit.bmdb.set_provisioner_brake(&lease, Some("brake: its list is empty")).await?;
        waits("is not trusted for now: its list is empty").await?;
        let ordered = kit
            .bmdb
            .read_machine_snapshot(machine)
            .await?
            .facts
            .retirement
            .context("it leaves")?
            .release
            .is_some();
        assert_eq!(ordered, late, "an order to stay may still come");
        kit.bmdb.set_provisioner_brake(&lease, None).await?;
        let handled = retirer.handle(&work).await.map_err(|error| anyhow::anyhow!(error.cause))?;
        let HandlerOutcome::Finished { changes, detail } = handled else { panic!("{handled:?}") };
        assert_eq!((changes.len(), detail.as_str()), (1, "provider rack does not know it any more"));
        let text =
            "SELECT count(*) FROM intent WHERE kind = 'release' AND outcome LIKE 'nothing was to be done: %'";
        assert_eq!((intents().await?, kit.count(text).await?), (1, 1), "it counts, once, and is settled");
        work.finish(changes, detail).await?;
        shepherd.stop().await?;
    }
    Ok(())
}

#[tokio::test]
async fn machine_that_cannot_be_released_stays_and_may_be_ordered_to() -> TestResult {
    let kit = Kit::new("leaving_known").await?;
    let shepherd = Shepherd::start(&kit, "retirer", LONG).await?;
    let machine = kit.provided(1, "rack").await?[0];
    kit.change(machine, leaving([])).await?;
    let rack = Rack { takes_back: false, listed: vec![machine.to_string()], ..Rack::new(&kit)? };
    let retirer = Retirer { providers: ProviderSet::new(vec![Arc::new(rack)]) };
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::Retirement).await?;
    let refused = retirer.handle(&work).await.err().context("it has no way back")?;
    assert!(refused.cause.contains("offers no way to give a machine back"), "{}", refused.cause);
    assert_eq!(kit.count("SELECT count(*) FROM intent").await?, 0);
    work.cancel("the test is over").await?;
    Ok(shepherd.stop().await?)
}

/// Reading a list may take long. A machine that is released meanwhile is no discrepancy.
#[tokio::test]
async fn machine_that_is_given_back_while_a_list_is_read_is_not_missed_in_it() -> TestResult {
    let kit = Kit::new("leaving_meanwhile").await?;
    let machines = kit.provided(2, "rack").await?;
    let rack =
        Rack { listed: vec![machines[1].to_string()], given_back: vec![machines[0]], ..Rack::new(&kit)? };
    let (rack, shepherd) = (Arc::new(rack), Shepherd::start(&kit, "provisioner", LONG).await?);
    let settings = ProvisionerSettings {
        limits: ProvisionerLimits { max_machines: None, chunk: 2 },
        reconciler: Limiter::new("50ms,1".parse()?),
        creation: Some(Limiter::new("1ms,50".parse()?)),
        breaker: ProviderBreaker::new("rack", BreakerMetrics::default()),
        metrics: ManagerMetrics::register(&Metrics::new()),
    };
    let stop = CancellationToken::new();
    let running = tokio::spawn(provisioner::run_provisioner(
        shepherd.sessions.clone(),
        rack.clone(),
        settings,
        stop.clone(),
    ));
    // When the third list is read, the first two passes are over.
    until("three lists were read", async || Ok(rack.lists.load(Ordering::SeqCst) >= 3)).await?;
    stop.cancel();
    ended("the provisioner", running).await?;
    assert_eq!(kit.count("SELECT count(*) FROM machine_quarantine").await?, 0, "it was missed");
    assert_eq!(kit.count("SELECT count(*) FROM provider_state WHERE listed_at IS NOT NULL").await?, 1);
    Ok(shepherd.stop().await?)
}

/// A machine that was being retired when the backup was taken may have been ordered to stay since.
#[tokio::test]
async fn restored_database_keeps_machines_whose_release_was_not_ordered() -> TestResult {
    let kit = Kit::new("retire_restored").await?;
    let machines = kit.provided(3, "rack").await?;
    let requested = RetirementChange::Requested { reason: "old".into(), by: "kim".into(), wipe: false };
    let ordered = RetirementChange::ReleaseOrdered(IntentId::generate());
    let over = RetirementChange::Finished("gone".into());
    for (machine, then) in machines.iter().zip([None, Some(ordered), Some(over)]) {
        let changes = [Some(requested.clone()), then].into_iter().flatten().map(FactChange::Retirement);
        kit.change(*machine, changes.collect()).await?;
    }
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "restored".to_owned(),
        target: "the BMDB".to_owned(),
        reason: "the disk was lost".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    };
    // A declaration that is interrupted releases no machine, and can be repeated.
    sqlx::raw_sql("ALTER TABLE audit ADD CONSTRAINT cut_off CHECK (rpc <> 'restored')")
        .execute(&kit.pool)
        .await?;
    let cut_off = kit.bmdb.declare_restored(order.clone(), "the disk was lost").await;
    assert!(cut_off.is_err(), "{cut_off:?}");
    assert_eq!(kit.bmdb.read_machine_snapshot(machines[0]).await?.facts.retirement, None);
    sqlx::raw_sql("ALTER TABLE audit DROP CONSTRAINT cut_off").execute(&kit.pool).await?;
    for _ in 0..2 {
        kit.bmdb.declare_restored(order.clone(), "the disk was lost").await?;
        let mut left = Vec::new();
        for machine in &machines {
            left.push(kit.bmdb.read_machine_snapshot(*machine).await?.facts.retirement.is_some());
        }
        assert_eq!(left, [false, true, true]);
    }
    let text = "SELECT count(*) FROM history WHERE event = 'RetirementCancelled'";
    assert_eq!((kit.count(text).await?, kit.sweep().await?), (1, 0));
    Ok(())
}
