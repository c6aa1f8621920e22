//! Starts and stops the service in order.
//!
//! Each part starts after the parts that it needs, and stops before them. To stop: no new work is claimed; work under
//! way may finish within the grace period; the rest is cancelled in the database; sessions are closed. The renewal of
//! sessions ends last, because sessions must be renewed until then. A second signal skips the grace period.

use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::{Bmdb, ConnectionSettings};
use crate::bmdb::connection_url::password_warning;
use crate::bmdb::error::BmdbError;
use crate::bmdb::metrics::Metrics;
use crate::bmdb::private_postgres::{
    PrivatePostgres, PrivatePostgresError, PrivatePostgresOptions, ServerStorage,
};
use crate::bmdb::secret::SecretsKey;
use crate::bmdb::session::Sessions;
use crate::bmdb::wakeup::WakeUps;
use crate::manager::cluster::{self, ClusterSettings};
use crate::manager::control_loop::{self, ControlLoop, LoopContext, LoopSettings};
use crate::manager::failpoint;
use crate::manager::housekeeping;
use crate::manager::initializer::Initializer;
use crate::manager::limiter::Limiter;
use crate::manager::machine_access::{AgentFile, MachineAccess};
use crate::manager::metrics::ManagerMetrics;
use crate::manager::power_controller::PowerController;
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
use crate::providers::provider::Provider;
use crate::providers::simulated::{SimulatedConfig, SimulatedProvider};
use crate::providers::static_provider::{StaticConfig, StaticProvider};
use crate::server::server_certificate::CaCertificates;
use crate::service::configuration::ProviderConfiguration;
use crate::service::failure::ExitFailure;
use crate::service::flags::ServiceComponent;
use crate::service::listeners::{self, Listeners};
use crate::service::preflight::{OnUnreachableProvider, inspect_plan};
use crate::service::scratch::ScratchDirectory;
use crate::service::service_metrics::register_service_metrics;
use crate::service::service_plan::{Database, ServicePlan};
use crate::service::traces::{SpanCounts, Traces};
use crate::takeover::agent_binary::AgentBinary;
use crate::takeover::client_key::ClientKey;
use crate::takeover::session::SshSettings;

/// Name of the database in a private PostgreSQL.
const PRIVATE_DATABASE: &str = "shepherd";

/// An open database, and its server if that is a private one.
pub struct OpenDatabase {
    /// The handle of the open database.
    pub bmdb: Bmdb,
    /// The URL by which other programs connect to it.
    pub url: String,
    private_server: Option<PrivatePostgres>,
    /// Directory for keys without a configured path. It is removed together with the private server's data.
    key_directory: Option<ScratchDirectory>,
}

/// Opens the plan's database, starts a private server if the plan has one, and brings the schema up to date.
pub async fn open_database(plan: &ServicePlan) -> Result<OpenDatabase, ExitFailure> {
    let (settings, url, private, keys) = match &plan.database {
        Database::Url(settings) => {
            let url = plan.flags.bmdb_url.clone().unwrap_or_default();
            warn_about_password(plan);
            ((**settings).clone(), url, None, None)
        }
        Database::Ephemeral => {
            let (settings, url, private) = private_server(plan, ServerStorage::Temporary).await?;
            (settings, url, Some(private), Some(ScratchDirectory::create("shepherd-keys")?))
        }
        Database::Directory(directory) => {
            let (settings, url, private) =
                private_server(plan, ServerStorage::Persistent(directory.clone())).await?;
            (settings, url, Some(private), None)
        }
    };
    let bmdb = Bmdb::connect(settings).await.map_err(database_failure)?;
    bmdb.migrate().await.map_err(database_failure)?;
    bmdb.read_policy().await.map_err(database_failure)?;
    Ok(OpenDatabase { bmdb, url, private_server: private, key_directory: keys })
}

/// Whether the database URL is on the command line, where every process list shows it.
fn is_url_on_command_line() -> bool {
    std::env::args().any(|argument| argument.starts_with("--bmdb_url") || argument.starts_with("--bmdb-url"))
}

/// Logs a warning if a password is on the command line, where every process list shows it.
pub fn warn_about_password(plan: &ServicePlan) {
    let url = plan.flags.bmdb_url.as_deref().filter(|_| is_url_on_command_line());
    if let Some(warning) = url.and_then(password_warning) {
        tracing::warn!("{}", warning.trim_start_matches("warning: "));
    }
}

async fn private_server(
    plan: &ServicePlan,
    storage: ServerStorage,
) -> Result<(ConnectionSettings, String, PrivatePostgres), ExitFailure> {
    let server = PrivatePostgres::start(PrivatePostgresOptions { storage, max_connections: 200 })
        .await
        .map_err(postgres_failure)?;
    let url = server.url(PRIVATE_DATABASE);
    let mut settings = ConnectionSettings::from_url(&url, "shepherd").map_err(database_failure)?;
    settings.max_connections = plan.flags.bmdb_max_connections;
    settings.dialect = plan.flags.bmdb_dialect;
    // A persistent server has the database since its first run.
    let exists = Bmdb::connect(settings.clone()).await;
    match exists {
        Ok(bmdb) => bmdb.close().await,
        Err(_) => server.create_database(PRIVATE_DATABASE).await.map_err(postgres_failure)?,
    }
    Ok((settings, url, server))
}

#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
fn postgres_failure(error: PrivatePostgresError) -> ExitFailure {
    let sentence = error.to_string();
    match error {
        PrivatePostgresError::Inaccessible { .. }
        | PrivatePostgresError::OtherVersion { .. }
        | PrivatePostgresError::InUse { .. }
        | PrivatePostgresError::ServedByOther { .. } => ExitFailure::usage(sentence),
        _ => ExitFailure::failed(sentence),
    }
}

/// The exit failure for a database's error: a mistake of the caller, or another failure.
#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
#[must_use]
pub fn database_failure(error: BmdbError) -> ExitFailure {
    let sentence = error.with_advice();
    match error {
        BmdbError::InvalidUrl { .. } | BmdbError::NewerSchema { .. } | BmdbError::OlderSchema { .. } => {
            ExitFailure::usage(sentence)
        }
        _ => ExitFailure::failed(sentence),
    }
}

impl OpenDatabase {
    /// Closes the database, and then stops the private server.
    pub async fn close(self) -> Result<(), ExitFailure> {
        self.bmdb.close().await;
        let stopped = match self.private_server {
            Some(server) => server.stop().await.map_err(postgres_failure),
            None => Ok(()),
        };
        drop(self.key_directory);
        stopped
    }

    fn key_path(&self, given: Option<&std::path::Path>, name: &str) -> Option<std::path::PathBuf> {
        given
            .map(std::path::Path::to_path_buf)
            .or_else(|| Some(self.key_directory.as_ref()?.path().join(name)))
    }
}

/// A service that was started and not stopped.
pub struct RunningService {
    sessions: Sessions,
    tasks: JoinSet<()>,
    workers: JoinSet<()>,
    renewal_task: tokio::task::JoinHandle<()>,
    listeners: Option<Listeners>,
    drain: CancellationToken,
    abort: CancellationToken,
    stop_renewal: CancellationToken,
    grace: Duration,
}

/// Starts every part of the plan on an open database.
pub async fn start_service(
    plan: &ServicePlan,
    database: &OpenDatabase,
    spans: &SpanCounts,
) -> Result<RunningService, ExitFailure> {
    let bmdb = &database.bmdb;
    let policy = plan.flags.policy.clone();
    bmdb.change_policy(&format!("flags of {}", hostname()), move |stored| policy.apply(stored))
        .await
        .map_err(database_failure)?;
    let providers = ProviderSet::new(
        plan.providers.iter().map(|provider| build_provider(provider, plan)).collect::<Result<_, _>>()?,
    );
    let counted = Metrics::new();
    let metrics = register_service_metrics(&counted, bmdb, &providers, spans);

    let (sessions, keeper) =
        Sessions::new(bmdb.clone(), ProcessId::generate(), plan.flags.session_interval.0);
    let keep = CancellationToken::new();
    let keeper = tokio::spawn(keeper.run(&keep).map_err(database_failure)?);
    let mut running = RunningService {
        sessions: sessions.clone(),
        tasks: JoinSet::new(),
        workers: JoinSet::new(),
        renewal_task: keeper,
        listeners: None,
        drain: CancellationToken::new(),
        abort: CancellationToken::new(),
        stop_renewal: keep,
        grace: plan.flags.shutdown_grace.0,
    };
    let started = start_components(plan, database, &mut running, providers, &metrics, counted).await;
    match started {
        Ok(()) => Ok(running),
        Err(failure) => {
            running.stop().await;
            Err(failure)
        }
    }
}

async fn start_components(
    plan: &ServicePlan,
    database: &OpenDatabase,
    running: &mut RunningService,
    providers: ProviderSet,
    metrics: &ManagerMetrics,
    counted: Metrics,
) -> Result<(), ExitFailure> {
    let bmdb = &database.bmdb;
    let secrets = database.key_path(plan.flags.secrets_key_path.as_deref(), "secrets.key");
    let secrets = listeners::open_secrets_key(secrets.as_deref())?;
    let callback =
        listeners::start_listeners(plan, bmdb, &running.sessions, secrets.clone(), counted).await?;
    let authorities = callback.authorities.clone();
    running.listeners = Some(callback);

    let wake_ups = WakeUps::default();
    running.tasks.spawn(wake_ups.clone().listen(bmdb.clone(), running.drain.clone()));
    running.spawn_housekeeping(bmdb, metrics);
    running.workers.spawn(sampler::run_sampler(
        running.sessions.clone(),
        metrics.clone(),
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
        running.spawn_cluster_loop(secrets, metrics);
    }
    if has(ServiceComponent::Provisioner) {
        for (provider, breaker) in providers.iter() {
            let settings = ProvisionerSettings {
                limits: ProvisionerLimits {
                    max_machines: (flags.provisioner_max_machines > 0)
                        .then_some(flags.provisioner_max_machines),
                    chunk: flags.provisioner_reservation_chunk_size,
                },
                reconciler: Limiter::new(flags.provisioner_reconciler_rate),
                creation: Limiter::new(flags.provisioner_device_creation_rate),
                breaker: breaker.clone(),
                metrics: metrics.clone(),
            };
            let stop = running.drain.clone();
            running.workers.spawn(provisioner::run_provisioner(
                running.sessions.clone(),
                provider.clone(),
                settings,
                stop,
            ));
        }
    }
    Ok(())
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

    fn spawn_cluster_loop(&mut self, secrets: Option<Arc<SecretsKey>>, metrics: &ManagerMetrics) {
        let Some(secrets) = secrets else {
            tracing::info!(
                "clusters are not tended: what they need to know is sealed with --secrets_key_path"
            );
            return;
        };
        let settings = ClusterSettings { secrets, metrics: metrics.clone() };
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
        self.workers.spawn(control_loop::run_loop(Arc::new(control_loop), settings, context));
    }

    /// The listeners, if any were started.
    #[must_use]
    pub fn listeners(&self) -> Option<&Listeners> {
        self.listeners.as_ref()
    }

    /// A token that makes a present or future stop skip its grace period.
    #[must_use]
    pub fn abort_token(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Stops everything. Returns when no work of this process is live and every session is closed.
    pub async fn stop(mut self) {
        self.drain.cancel();
        failpoint::hit("shutdown", "draining");
        let abort = self.abort.clone();
        let grace = self.grace;
        let deadline = tokio::spawn(async move {
            tokio::time::sleep(grace).await;
            abort.cancel();
        });
        while self.workers.join_next().await.is_some() {}
        deadline.abort();
        failpoint::hit("shutdown", "idle");
        if let Some(callback) = self.listeners.take() {
            callback.stop().await;
        }
        while self.tasks.join_next().await.is_some() {}
        self.sessions.wait_until_drained().await;
        failpoint::hit("shutdown", "drained");
        self.stop_renewal.cancel();
        if let Err(error) = self.renewal_task.await {
            tracing::error!(%error, "the session keeper ended in the middle");
        }
    }
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Builds the provider for a configuration.
pub fn build_provider(
    configuration: &ProviderConfiguration,
    plan: &ServicePlan,
) -> Result<Arc<dyn Provider>, ExitFailure> {
    let wrong = |error: crate::providers::provider::ProviderError| {
        ExitFailure::usage(format!("provider {}: {}", configuration.name(), error.message))
    };
    Ok(match configuration {
        ProviderConfiguration::Static { name, device_list_url } => {
            let config = StaticConfig {
                name: name.clone(),
                device_list_url: device_list_url.clone(),
                default_ssh_user: plan.flags.ssh_user.clone(),
            };
            Arc::new(StaticProvider::new(config).map_err(wrong)?)
        }
        ProviderConfiguration::Simulated { name, url } => {
            let config = SimulatedConfig {
                name: name.clone(),
                url: url.clone(),
                caller: Some(format!("{}-{}", hostname(), std::process::id())),
            };
            Arc::new(SimulatedProvider::new(config).map_err(wrong)?)
        }
    })
}

async fn build_machine_access(
    plan: &ServicePlan,
    database: &OpenDatabase,
    authorities: CaCertificates,
) -> Result<MachineAccess, ExitFailure> {
    let flags = &plan.flags;
    let key_path = database.key_path(flags.ssh_key_path.as_deref(), "ssh_key").ok_or_else(|| {
        ExitFailure::usage("give --ssh_key_path FILE: the SSH key to reach machines with, made if absent")
    })?;
    let key = ClientKey::load_or_create(&key_path).map_err(|error| ExitFailure::usage(error.to_string()))?;
    tracing::info!(path = %key_path.display(), public_key = key.authorized_keys_line(), "the SSH key that machines must accept");
    let agent_path = flags.agent_executable_path.clone().ok_or_else(|| {
        ExitFailure::usage("give --agent_executable_path FILE: the role server to put on machines")
    })?;
    // Read once now, so that a wrong file is reported at the start and not for every machine.
    AgentBinary::load(&agent_path).await.map_err(|error| ExitFailure::usage(error.to_string()))?;
    let mut ssh = SshSettings::new(key);
    ssh.password = ssh_password(flags.ssh_password_path.as_deref())?;
    ssh.connect_timeout = flags.agent_ssh_connect_timeout.0;
    ssh.greeting_timeout = flags.agent_ssh_greeting_timeout.0;
    ssh.login_timeout = flags.agent_ssh_login_timeout.0;
    ssh.exec_timeout = flags.agent_ssh_exec_timeout.0;
    Ok(MachineAccess {
        ssh,
        user: flags.ssh_user.clone(),
        agent_file: AgentFile::new(agent_path),
        agent_path: flags.agent_target_path.clone(),
        endpoints: plan.endpoints.clone(),
        ca_certificates: Box::new(move || authorities.borrow().clone()),
        bmdb_id: database.bmdb.read_identity().await.map_err(database_failure)?,
    })
}

/// The password for hosts that accept no key, from its file or the environment.
pub fn ssh_password(path: Option<&std::path::Path>) -> Result<Option<SecretString>, ExitFailure> {
    let Some(path) = path else {
        return Ok(std::env::var("SHEPHERD_SSH_PASSWORD").ok().map(SecretString::from));
    };
    let text = std::fs::read_to_string(path).map_err(|error| {
        let problem = match error.kind() {
            std::io::ErrorKind::InvalidData => "holds something that is no text".to_owned(),
            _ => format!("cannot be read: {error}"),
        };
        ExitFailure::usage(format!("--ssh_password_path {} {problem}", path.display()))
    })?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() {
        return Err(ExitFailure::usage(format!(
            "--ssh_password_path {} holds no password; write it there, and nothing else",
            path.display()
        )));
    }
    Ok(Some(SecretString::from(password.to_owned())))
}

/// Runs the service until a signal: the first one stops it in order, the second one at once.
pub async fn serve_until_signal(plan: ServicePlan, traces: Traces) -> Result<(), ExitFailure> {
    let (mut terminate, mut interrupt) = stop_signals()?;
    // Checked before the database is changed: another mistake must not leave an upgraded schema behind.
    inspect_plan(&plan, OnUnreachableProvider::Warn).await?;
    let database = open_database(&plan).await?;
    let token = CancellationToken::new();
    let sending = traces.sender.map(|sending| tokio::spawn(sending.run(token.clone())));
    let started = start_service(&plan, &database, &traces.counts).await;
    let running = match started {
        Ok(running) => running,
        Err(failure) => {
            if let Err(error) = database.close().await {
                tracing::warn!(%error, "cannot close the database");
            }
            return Err(failure);
        }
    };
    tracing::info!(database = %database.bmdb.settings().address(), "running");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!(grace = ?plan.flags.shutdown_grace.0, "stopping; a second signal stops at once");
    let hurry = running.abort_token();
    let hasty = tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        hurry.cancel();
    });
    running.stop().await;
    hasty.abort();
    // Stopped once no work is left, so that the last trace is complete.
    token.cancel();
    if let Some(sending) = sending
        && sending.await.is_err()
    {
        tracing::warn!("the last traces were not handed over");
    }
    database.close().await
}

/// The signals that stop a program.
pub fn stop_signals() -> Result<(tokio::signal::unix::Signal, tokio::signal::unix::Signal), ExitFailure> {
    let wrong = |error| ExitFailure::failed(format!("cannot listen for signals: {error}"));
    Ok((signal(SignalKind::terminate()).map_err(wrong)?, signal(SignalKind::interrupt()).map_err(wrong)?))
}
