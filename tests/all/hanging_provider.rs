//! A provider that accepts calls and never answers holds a worker with each call. After some failures it is not called
//! for a while, and the workers serve the machines of other providers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use async_trait::async_trait;
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::agent_file::{AgentFile, AgentTrust};
use shepherd::manager::control_loop::ControlLoop;
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::limiter::Limiter;
use shepherd::manager::machine_access::MachineAccess;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_set::ProviderSet;
use shepherd::manager::recoverer::Recoverer;
use shepherd::manager::recovery_brakes::RecoveryBrakes;
use shepherd::model::circuit_breaker::{FAILURE_THRESHOLD, SLOW_CALL_THRESHOLD};
use shepherd::model::ids::IntentId;
use shepherd::model::policy::{DisruptionKind, Rung};
use shepherd::model::time::Span;
use shepherd::providers::provider::{
    CreationControl, ErrorClass, PowerControl, Provider, ProviderError, ProviderMachine, ProviderName,
    RebootControl, RebootMethod,
};
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::session::SshSettings;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, until};
use crate::harness::aloud::TestResult;

const WORKERS: usize = 2;

/// A provider with an API that reboots machines, or accepts the order and sends no response.
struct Api {
    name: ProviderName,
    hangs: bool,
    orders: Mutex<Vec<String>>,
}

impl Api {
    fn new(name: &str, hangs: bool) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { name: name.parse()?, hangs, orders: Mutex::default() }))
    }

    fn orders(&self) -> usize {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[async_trait]
impl Provider for Api {
    fn name(&self) -> &ProviderName {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "api"
    }

    async fn list(&self) -> Result<Vec<ProviderMachine>, ProviderError> {
        Ok(Vec::new())
    }

    async fn find_machine(&self, _id: &str) -> Result<Option<ProviderMachine>, ProviderError> {
        Ok(None)
    }

    fn creation(&self) -> Option<&dyn CreationControl> {
        None
    }

    fn power(&self) -> Option<&dyn PowerControl> {
        None
    }

    fn reboot(&self) -> Option<&dyn RebootControl> {
        Some(self)
    }
}

#[async_trait]
impl RebootControl for Api {
    async fn reboot_method(&self, _id: &str) -> Result<RebootMethod, ProviderError> {
        Ok(RebootMethod::Provider)
    }

    async fn reboot(&self, id: &str, _intent: IntentId) -> Result<(), ProviderError> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(id.to_owned());
        if !self.hangs {
            return Ok(());
        }
        // Its own limit on a call; a real one's is longer.
        tokio::time::sleep(SLOW_CALL_THRESHOLD + Duration::from_millis(200)).await;
        Err(ProviderError::new(ErrorClass::Transient, "https://api.example", "no answer in time"))
    }
}

fn access() -> Result<Arc<MachineAccess>> {
    Ok(Arc::new(MachineAccess {
        ssh: SshSettings::new(ClientKey::generate()?),
        passwords: HashMap::new(),
        user: "root".to_owned(),
        agent_file: AgentFile::new(env!("CARGO_BIN_EXE_roleserver").into(), AgentTrust::Unchecked),
        agent_path: "/opt/roleserver".into(),
        endpoints: vec!["127.0.0.1:1".to_owned()],
        ca_certificates: Box::new(Vec::new),
        signing: Arc::default(),
        bmdb_id: Uuid::from_u128(0xb),
    }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_that_hangs_is_left_alone_and_the_other_ones_machines_are_served() -> TestResult {
    let kit = Kit::new("hanging_provider").await?;
    kit.bmdb
        .change_policy("test", |policy| {
            policy.ladder =
                vec![Rung { step: DisruptionKind::Reboot, deadline: Span::minutes(10), tries: 2 }];
            policy.recovery_brake.at_least = 1_000;
            policy.listening_gap = Span::hours(1);
        })
        .await?;
    kit.provided(12, "hung").await?;
    kit.provided(4, "well").await?;
    // Only its provider can help a machine that cannot be reached.
    sqlx::query("UPDATE machine_provided SET address = NULL").execute(&kit.pool).await?;
    kit.silent().await?;

    let (hung, well) = (Api::new("hung", true)?, Api::new("well", false)?);
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let providers = ProviderSet::new(vec![hung.clone(), well.clone()]);
    let metrics = Metrics::new();
    providers.register(&metrics);
    let brakes = Arc::new(RecoveryBrakes::new(shepherd.bmdb.clone()));
    let recoverer = Recoverer { providers, access: access()?, brakes };
    let drain = CancellationToken::new();
    let context = LoopContext {
        sessions: shepherd.sessions.clone(),
        wake_ups: WakeUps::default(),
        metrics: ManagerMetrics::register(&Metrics::new()).for_loop(recoverer.name(), recoverer.process()),
        drain: drain.clone(),
        abort: CancellationToken::new(),
    };
    let settings = LoopSettings { parallelism: WORKERS, limiter: Limiter::new("5ms,50".parse()?) };
    let began = Instant::now();
    let task = tokio::spawn(run_loop(Arc::new(recoverer), settings, context));
    let looked_after =
        "SELECT count(DISTINCT machine_id) FROM history WHERE edge = 'end' AND process = 'Recovery'";
    until("every machine was looked after", async || Ok(kit.count(looked_after).await? == 16)).await?;
    // The calls that were in progress when the breaker opened, and one more whenever a pause was over.
    let tries = began.elapsed().as_secs() / 30;
    let most = FAILURE_THRESHOLD as usize - 1 + WORKERS + usize::try_from(tries)?;
    let (requested, served) = (hung.orders(), well.orders());
    assert!((FAILURE_THRESHOLD as usize..=most).contains(&requested), "{requested} requests, {most} at most");
    assert_eq!(served, 4, "the other one's machines waited");

    let left_alone = "SELECT count(*) FROM machine_due WHERE provider = 'hung' AND reason LIKE 'the provider is left alone for %'";
    assert!(kit.count(left_alone).await? >= 12 - i64::try_from(most)?, "no reason is recorded");
    let counted = metrics.encode()?;
    for line in [
        "shepherd_provider_breaker_open{provider=\"hung\"} 1",
        "shepherd_provider_calls_timed_out_total{provider=\"hung\"}",
    ] {
        assert!(counted.contains(line), "{line} is not in {counted}");
    }
    drain.cancel();
    ended("the recoverer", task).await?;
    let tried = kit.count("SELECT count(*) FROM intent WHERE kind = 'reboot' AND provider = 'hung'").await?;
    assert_eq!(usize::try_from(tried)?, hung.orders(), "a try of the ladder was used up without a request");
    Ok(shepherd.stop().await?)
}
