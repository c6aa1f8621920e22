//! Starts the service: each part after the parts that it needs.
//!
//! Sessions come first, because everything else works under them. The listeners follow, because the loops put the CA
//! certificates of the callback servers on machines. Then the housekeeping and the loops of the plan start.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::engine::session::Sessions;
use crate::bmdb::engine::wakeup::WakeUps;
use crate::bmdb::fleet::secret::SecretsKey;
use crate::bmdb::metrics::Metrics;
use crate::manager::cluster::{self, ClusterSettings};
use crate::manager::control_loop::ControlLoop;
use crate::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use crate::manager::housekeeping;
use crate::manager::initializer::Initializer;
use crate::manager::limiter::Limiter;
use crate::manager::machine_access::MachineAccess;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::power_controller::PowerController;
use crate::manager::process_resources::{
    self, DirectoryContent, ProcessShortages, ProcessSignals, WrittenDirectory,
};
use crate::manager::provider_set::ProviderSet;
use crate::manager::provisioner::plan::ProvisionerLimits;
use crate::manager::provisioner::{self, ProvisionerSettings};
use crate::manager::recoverer::Recoverer;
use crate::manager::recovery_brakes::RecoveryBrakes;
use crate::manager::retirer::Retirer;
use crate::manager::roll_outs;
use crate::manager::sampler;
use crate::manager::updater::Updater;
use crate::model::ids::ProcessId;
use crate::model::time::Rate;
use crate::service::database::OpenDatabase;
use crate::service::failure::{ExitFailure, database_failure};
use crate::service::flags::ServiceComponent;
use crate::service::listeners;
use crate::service::os_process::hostname;
use crate::service::provider_configuration::{ProviderConfiguration, build_provider, connection_providers};
use crate::service::running_service::RunningService;
use crate::service::service_plan::{Database, ServicePlan};
use crate::service::ssh_access::build_machine_access;
use crate::service::traces::SpanCounts;

/// Starts every part of the plan on an open database.
pub async fn start_service(
    plan: &ServicePlan,
    database: &OpenDatabase,
    spans: &SpanCounts,
) -> Result<RunningService, ExitFailure> {
    let bmdb = &database.bmdb;
    let by = format!("flags of {}", hostname());
    if let Some(warning) =
        bmdb.write_policy_flags(&by, plan.flags.policy.clone()).await.map_err(database_failure)?
    {
        tracing::warn!("{warning}");
    }
    let providers = ProviderSet::new(
        plan.providers
            .iter()
            .map(|provider| build_provider(provider, &plan.flags.ssh_user))
            .collect::<Result<_, _>>()?,
    );
    let registry = Metrics::new();
    let metrics = register_service_metrics(&registry, bmdb, &providers, spans);

    let (sessions, keeper) =
        Sessions::new(bmdb.clone(), ProcessId::generate(), plan.flags.session_interval.0);
    let stop_renewal = CancellationToken::new();
    let renewal_task = tokio::spawn(keeper.run(&stop_renewal).map_err(database_failure)?);
    let grace = plan.flags.shutdown_grace.0;
    let mut running = RunningService::new(sessions, renewal_task, stop_renewal, grace);
    let started = start_components(plan, database, &mut running, providers, &metrics, registry).await;
    match started {
        Ok(()) => Ok(running),
        Err(failure) => {
            // The caller closes the database, with a deadline of its own.
            let _ = running.stop().await;
            Err(failure)
        }
    }
}

/// Registers everything that a service counts. `docs/metrics.md` is generated from this.
#[must_use]
pub fn register_service_metrics(
    registry: &Metrics,
    bmdb: &Bmdb,
    providers: &ProviderSet,
    spans: &SpanCounts,
) -> ManagerMetrics {
    bmdb.register_metrics(registry);
    let metrics = ManagerMetrics::register(registry);
    providers.register(registry);
    spans.register(registry);
    metrics
}

async fn start_components(
    plan: &ServicePlan,
    database: &OpenDatabase,
    running: &mut RunningService,
    providers: ProviderSet,
    metrics: &ManagerMetrics,
    registry: Metrics,
) -> Result<(), ExitFailure> {
    let bmdb = &database.bmdb;
    let secrets = database.key_path(plan.flags.secrets_key_path.as_deref(), "secrets.key");
    let secrets = listeners::open_secrets_key(secrets.as_deref())?;
    let listeners =
        listeners::start_listeners(plan, bmdb, &running.sessions, secrets.clone(), registry).await?;
    let authorities = listeners.authorities.clone();
    let metrics_turned_away = listeners.metrics_turned_away();
    let mut file_refusals = listeners.certificate_refusals.clone();
    file_refusals.push(bmdb.subscribe_tls_refusal());
    running.listeners = Some(listeners);

    let wake_ups = WakeUps::default();
    running.tasks.spawn(wake_ups.clone().listen(bmdb.clone(), running.drain.clone()));
    running.spawn_housekeeping(bmdb, metrics);
    let (shortages, current_shortages) = watch::channel(ProcessShortages::default());
    running.tasks.spawn(process_resources::run_process_monitor(
        written_directories(plan, database),
        metrics.process.clone(),
        shortages,
        running.drain.clone(),
    ));
    let brakes = Arc::new(RecoveryBrakes::new(bmdb.clone()));
    running.tasks.spawn(housekeeping::run_brake_recorder(brakes.clone(), running.drain.clone()));

    let has = |component| plan.components.contains(&component);
    let flags = &plan.flags;
    if has(ServiceComponent::Initializer)
        || has(ServiceComponent::Recoverer)
        || has(ServiceComponent::Switcher)
    {
        let access = Arc::new(build_machine_access(plan, database, authorities).await?);
        file_refusals.push(access.agent_file.subscribe_refusal());
        running.spawn_agent_checks(access.clone(), bmdb);
        if has(ServiceComponent::Initializer) {
            let initializer = Initializer { providers: providers.clone(), access: access.clone() };
            let rate = flags.initializer_db_query_rate;
            running.spawn_loop(initializer, flags.initializer_loop_parallelism, rate, &wake_ups, metrics);
        }
        if has(ServiceComponent::Recoverer) {
            let recoverer = Recoverer { providers: providers.clone(), access: access.clone(), brakes };
            let rate = flags.recoverer_db_query_rate;
            running.spawn_loop(recoverer, flags.recoverer_loop_parallelism, rate, &wake_ups, metrics);
        }
        if has(ServiceComponent::Switcher) {
            let switcher = PowerController { providers: providers.clone(), access };
            let rate = flags.switcher_db_query_rate;
            running.spawn_loop(switcher, flags.switcher_loop_parallelism, rate, &wake_ups, metrics);
        }
    }
    let (sessions, stop) = (running.sessions.clone(), running.drain.clone());
    let signals = ProcessSignals { shortages: current_shortages, metrics_turned_away, file_refusals };
    running.workers.spawn(sampler::run_sampler(sessions, metrics.clone(), signals, stop));
    if has(ServiceComponent::Updater) {
        let (sessions, stop) = (running.sessions.clone(), running.drain.clone());
        running.workers.spawn(roll_outs::run_roll_outs(sessions, metrics.clone(), stop));
        let updater = Updater { providers: providers.clone() };
        running.spawn_loop(
            updater,
            flags.updater_loop_parallelism,
            flags.updater_db_query_rate,
            &wake_ups,
            metrics,
        );
    }
    if has(ServiceComponent::Retirer) {
        let retirer = Retirer { providers: providers.clone() };
        let rate = flags.retirer_db_query_rate;
        running.spawn_loop(retirer, flags.retirer_loop_parallelism, rate, &wake_ups, metrics);
    }
    if has(ServiceComponent::Cluster) {
        running.spawn_cluster_loop(secrets, &plan.providers, metrics);
    }
    if has(ServiceComponent::Provisioner) {
        running.spawn_provisioners(plan, &providers, metrics);
    }
    Ok(())
}

/// The directories that this process writes to, by the flags.
fn written_directories(plan: &ServicePlan, database: &OpenDatabase) -> Vec<WrittenDirectory> {
    let mut directories = vec![(DirectoryContent::TemporaryFiles, std::env::temp_dir())];
    if let Database::Directory(path) = &plan.database {
        directories.push((DirectoryContent::Database, path.clone()));
    }
    let keys = [
        database.key_path(plan.flags.secrets_key_path.as_deref(), "secrets.key"),
        plan.flags.ssh_key_path.clone(),
    ];
    let key_directory = keys.into_iter().flatten().find_map(|path| Some(path.parent()?.to_owned()));
    directories.extend(key_directory.map(|path| (DirectoryContent::Keys, path)));
    directories
}

impl RunningService {
    /// Starts the tasks that keep the BMDB tidy: each runs until the service drains.
    fn spawn_housekeeping(&mut self, bmdb: &Bmdb, metrics: &ManagerMetrics) {
        let (bmdb, metrics, drain) =
            (|| bmdb.clone(), || metrics.housekeeping.clone(), || self.drain.clone());
        self.tasks.spawn(housekeeping::run_reaper(bmdb(), metrics(), drain()));
        self.tasks.spawn(housekeeping::run_sweeper(bmdb(), metrics(), drain()));
        self.tasks.spawn(housekeeping::run_retention(bmdb(), metrics(), drain()));
        self.tasks.spawn(housekeeping::run_storage_monitor(bmdb(), metrics(), drain()));
    }

    /// Starts the checks of the agent program, which run until the service drains.
    fn spawn_agent_checks(&mut self, access: Arc<MachineAccess>, bmdb: &Bmdb) {
        let (bmdb, drain) = (bmdb.clone(), self.drain.clone());
        self.tasks.spawn(async move { access.agent_file.run_checks(&bmdb, &drain).await });
    }

    /// Starts a provisioner for each provider of the plan, with the limits of that provider.
    fn spawn_provisioners(&mut self, plan: &ServicePlan, providers: &ProviderSet, metrics: &ManagerMetrics) {
        for (provider, breaker) in providers.iter() {
            let adoption = plan.adoption_limits(provider.name());
            let settings = ProvisionerSettings {
                limits: ProvisionerLimits {
                    max_machines: adoption.max_machines,
                    chunk: plan.flags.provisioner_reservation_chunk_size,
                },
                reconciler: Limiter::new(plan.flags.provisioner_reconciler_rate),
                creation: adoption.creation_rate.map(Limiter::new),
                breaker: breaker.clone(),
                metrics: metrics.clone(),
            };
            self.workers.spawn(provisioner::run_provisioner(
                self.sessions.clone(),
                provider.clone(),
                settings,
                self.drain.clone(),
            ));
        }
    }

    fn spawn_cluster_loop(
        &mut self,
        secrets: Option<Arc<SecretsKey>>,
        providers: &[ProviderConfiguration],
        metrics: &ManagerMetrics,
    ) {
        let Some(secrets) = secrets else {
            tracing::info!(
                "no cluster is managed: the secrets of clusters are sealed with the key of --secrets_key_path"
            );
            return;
        };
        let settings = ClusterSettings {
            secrets,
            metrics: metrics.clone(),
            connection_providers: Arc::new(connection_providers(providers)),
        };
        self.workers.spawn(cluster::run_clusters(self.sessions.clone(), settings, self.drain.clone()));
    }

    fn spawn_loop<L: ControlLoop>(
        &mut self,
        control_loop: L,
        parallelism: usize,
        rate: Rate,
        wake_ups: &WakeUps,
        metrics: &ManagerMetrics,
    ) {
        let context = LoopContext {
            sessions: self.sessions.clone(),
            wake_ups: wake_ups.clone(),
            metrics: metrics.for_loop(control_loop.name(), control_loop.process()),
            drain: self.drain.clone(),
            abort: self.abort.clone(),
        };
        let settings = LoopSettings { parallelism, limiter: Limiter::new(rate) };
        self.workers.spawn(run_loop(Arc::new(control_loop), settings, context));
    }
}
