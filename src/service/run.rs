//! Running the service: everything started in the order in which each part needs
//! the others, and stopped in the reverse.
//!
//! Stopping: no new work; what is under way may finish within the grace period;
//! what is left is cancelled in the database; sessions are closed; the keeper
//! ends last, because until then sessions must be renewed. A second signal
//! skips the grace.

use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::{Bmdb, ConnectionSettings};
use crate::bmdb::error::BmdbError;
use crate::bmdb::metrics::Metrics;
use crate::bmdb::private_postgres::{Options, PrivatePostgres, PrivatePostgresError, Storage};
use crate::bmdb::secret::SecretsKey;
use crate::bmdb::session::Sessions;
use crate::bmdb::url::password_warning;
use crate::bmdb::wakeup::WakeUps;
use crate::manager::access::{Access, AgentFile};
use crate::manager::brakes::Brakes;
use crate::manager::cluster::{self, ClusterSettings};
use crate::manager::control_loop::{self, ControlLoop, LoopContext, LoopSettings};
use crate::manager::failpoint;
use crate::manager::housekeeping;
use crate::manager::initializer::Initializer;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::provider_set::ProviderSet;
use crate::manager::provisioner::plan::Limits;
use crate::manager::provisioner::{self, ProvisionerSettings};
use crate::manager::recoverer::Recoverer;
use crate::manager::retirer::Retirer;
use crate::manager::roll_outs;
use crate::manager::sampler;
use crate::manager::switcher::Switcher;
use crate::manager::updater::Updater;
use crate::model::ids::ProcessId;
use crate::model::time::Rate;
use crate::providers::provider::Provider;
use crate::providers::simulated::{SimulatedConfig, SimulatedProvider};
use crate::providers::static_provider::{StaticConfig, StaticProvider};
use crate::server::certificate::Authorities;
use crate::service::callback::{self, Callback};
use crate::service::configuration::ProviderConfiguration;
use crate::service::counted::register_everything;
use crate::service::failure::Failure;
use crate::service::flags::Component;
use crate::service::plan::{Database, ServicePlan};
use crate::service::preflight::{Unanswered, inspect};
use crate::service::scratch::Scratch;
use crate::service::traces::{SpanCounts, Traces};
use crate::takeover::agent_binary::AgentBinary;
use crate::takeover::client_key::ClientKey;
use crate::takeover::session::SshSettings;

/// Name of the database in a private PostgreSQL.
const PRIVATE_DATABASE: &str = "shepherd";

/// A database that is open, and the server under it if that is ours.
pub struct OpenDatabase {
    /// The handle.
    pub bmdb: Bmdb,
    /// How others connect to it.
    pub url: String,
    private: Option<PrivatePostgres>,
    /// Where keys go that were not given a place; removed with the private server's data.
    keys: Option<Scratch>,
}

/// Opens the plan's database, starting a private server where one is asked for, and brings its
/// schema up to date.
pub async fn open_database(plan: &ServicePlan) -> Result<OpenDatabase, Failure> {
    let (settings, url, private, keys) = match &plan.database {
        Database::Url(settings) => {
            let url = plan.flags.bmdb_url.clone().unwrap_or_default();
            warn_of_password(plan);
            ((**settings).clone(), url, None, None)
        }
        Database::ThrowAway => {
            let (settings, url, private) = private_server(plan, Storage::ThrowAway).await?;
            (settings, url, Some(private), Some(Scratch::create("shepherd-keys")?))
        }
        Database::Directory(directory) => {
            let (settings, url, private) = private_server(plan, Storage::Staying(directory.clone())).await?;
            (settings, url, Some(private), None)
        }
    };
    let bmdb = Bmdb::connect(settings).await.map_err(database_failure)?;
    bmdb.migrate().await.map_err(database_failure)?;
    bmdb.read_policy().await.map_err(database_failure)?;
    Ok(OpenDatabase { bmdb, url, private, keys })
}

/// Whether a flag's value stood on the command line, where every process list shows it.
fn given_on_the_line() -> bool {
    std::env::args().any(|argument| argument.starts_with("--bmdb_url") || argument.starts_with("--bmdb-url"))
}

/// Says that a password stands where every list of processes shows it, if one does.
pub fn warn_of_password(plan: &ServicePlan) {
    let url = plan.flags.bmdb_url.as_deref().filter(|_| given_on_the_line());
    if let Some(warning) = url.and_then(password_warning) {
        tracing::warn!("{}", warning.trim_start_matches("warning: "));
    }
}

async fn private_server(
    plan: &ServicePlan,
    storage: Storage,
) -> Result<(ConnectionSettings, String, PrivatePostgres), Failure> {
    let server =
        PrivatePostgres::start(Options { storage, max_connections: 200 }).await.map_err(postgres_failure)?;
    let url = server.url(PRIVATE_DATABASE);
    let mut settings = ConnectionSettings::from_url(&url, "shepherd").map_err(database_failure)?;
    settings.max_connections = plan.flags.bmdb_max_connections;
    settings.dialect = plan.flags.bmdb_dialect;
    // A staying server has the database from its first run.
    let exists = Bmdb::connect(settings.clone()).await;
    match exists {
        Ok(bmdb) => bmdb.close().await,
        Err(_) => server.create_database(PRIVATE_DATABASE).await.map_err(postgres_failure)?,
    }
    Ok((settings, url, server))
}

#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
fn postgres_failure(error: PrivatePostgresError) -> Failure {
    let sentence = error.to_string();
    match error {
        PrivatePostgresError::OutOfReach { .. }
        | PrivatePostgresError::OtherVersion { .. }
        | PrivatePostgresError::InUse { .. }
        | PrivatePostgresError::Served { .. } => Failure::usage(sentence),
        _ => Failure::failed(sentence),
    }
}

/// A database's failure as an exit: what the caller got wrong, or what failed.
#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
#[must_use]
pub fn database_failure(error: BmdbError) -> Failure {
    let sentence = error.with_advice();
    match error {
        BmdbError::Url { .. } | BmdbError::NewerSchema { .. } | BmdbError::OlderSchema { .. } => {
            Failure::usage(sentence)
        }
        _ => Failure::failed(sentence),
    }
}

impl OpenDatabase {
    /// Closes the database, and ends the private server after it.
    pub async fn close(self) -> Result<(), Failure> {
        self.bmdb.close().await;
        let stopped = match self.private {
            Some(server) => server.stop().await.map_err(postgres_failure),
            None => Ok(()),
        };
        drop(self.keys);
        stopped
    }

    fn key_path(&self, given: Option<&std::path::Path>, name: &str) -> Option<std::path::PathBuf> {
        given.map(std::path::Path::to_path_buf).or_else(|| Some(self.keys.as_ref()?.path().join(name)))
    }
}

/// A service that runs.
pub struct Running {
    sessions: Sessions,
    tasks: JoinSet<()>,
    workers: JoinSet<()>,
    keeper: tokio::task::JoinHandle<()>,
    callback: Option<Callback>,
    drain: CancellationToken,
    abort: CancellationToken,
    keep: CancellationToken,
    grace: Duration,
}

/// Starts every part of the plan on an open database.
pub async fn start(
    plan: &ServicePlan,
    database: &OpenDatabase,
    spans: &SpanCounts,
) -> Result<Running, Failure> {
    let bmdb = &database.bmdb;
    let policy = plan.flags.policy.clone();
    bmdb.change_policy(&format!("flags of {}", hostname()), move |stored| policy.apply(stored))
        .await
        .map_err(database_failure)?;
    let providers = ProviderSet::new(
        plan.providers.iter().map(|provider| build_provider(provider, plan)).collect::<Result<_, _>>()?,
    );
    let counted = Metrics::new();
    let metrics = register_everything(&counted, bmdb, &providers, spans);

    let (sessions, keeper) =
        Sessions::new(bmdb.clone(), ProcessId::generate(), plan.flags.session_interval.0);
    let keep = CancellationToken::new();
    let keeper = tokio::spawn(keeper.keep(&keep).map_err(database_failure)?);
    let mut running = Running {
        sessions: sessions.clone(),
        tasks: JoinSet::new(),
        workers: JoinSet::new(),
        keeper,
        callback: None,
        drain: CancellationToken::new(),
        abort: CancellationToken::new(),
        keep,
        grace: plan.flags.shutdown_grace.0,
    };
    let started = start_parts(plan, database, &mut running, providers, &metrics, counted).await;
    match started {
        Ok(()) => Ok(running),
        Err(failure) => {
            running.stop().await;
            Err(failure)
        }
    }
}

async fn start_parts(
    plan: &ServicePlan,
    database: &OpenDatabase,
    running: &mut Running,
    providers: ProviderSet,
    metrics: &ManagerMetrics,
    counted: Metrics,
) -> Result<(), Failure> {
    let bmdb = &database.bmdb;
    let secrets = database.key_path(plan.flags.secrets_key_path.as_deref(), "secrets.key");
    let secrets = callback::secrets_key(secrets.as_deref())?;
    let callback = callback::start(plan, bmdb, &running.sessions, secrets.clone(), counted).await?;
    let authorities = callback.authorities.clone();
    running.callback = Some(callback);

    let wake_ups = WakeUps::default();
    running.tasks.spawn(wake_ups.clone().listen(bmdb.clone(), running.drain.clone()));
    running.tasks.spawn(housekeeping::reap(
        bmdb.clone(),
        metrics.housekeeping.clone(),
        running.drain.clone(),
    ));
    running.tasks.spawn(housekeeping::sweep(
        bmdb.clone(),
        metrics.housekeeping.clone(),
        running.drain.clone(),
    ));
    running.tasks.spawn(housekeeping::forget(
        bmdb.clone(),
        metrics.housekeeping.clone(),
        running.drain.clone(),
    ));
    running.tasks.spawn(housekeeping::watch_storage(
        bmdb.clone(),
        metrics.housekeeping.clone(),
        running.drain.clone(),
    ));
    running.workers.spawn(sampler::run(running.sessions.clone(), metrics.clone(), running.drain.clone()));
    let brakes = Arc::new(Brakes::new(bmdb.clone()));
    running.tasks.spawn(housekeeping::tell_brakes(brakes.clone(), running.drain.clone()));

    let has = |component| plan.components.contains(&component);
    let flags = &plan.flags;
    if has(Component::Initializer) || has(Component::Recoverer) || has(Component::Switcher) {
        let access = Arc::new(access(plan, database, authorities).await?);
        if has(Component::Initializer) {
            let initializer = Initializer { providers: providers.clone(), access: access.clone() };
            let rate = flags.initializer_db_query_rate;
            running.spawn_loop(initializer, flags.initializer_loop_parallelism, rate, &wake_ups, metrics);
        }
        if has(Component::Recoverer) {
            let recoverer = Recoverer { providers: providers.clone(), access: access.clone(), brakes };
            let rate = flags.recoverer_db_query_rate;
            running.spawn_loop(recoverer, flags.recoverer_loop_parallelism, rate, &wake_ups, metrics);
        }
        if has(Component::Switcher) {
            let switcher = Switcher { providers: providers.clone(), access };
            let rate = flags.switcher_db_query_rate;
            running.spawn_loop(switcher, flags.switcher_loop_parallelism, rate, &wake_ups, metrics);
        }
    }
    if has(Component::Updater) {
        let (sessions, stop) = (running.sessions.clone(), running.drain.clone());
        running.workers.spawn(roll_outs::run(sessions, metrics.clone(), stop));
        let updater = Updater { providers: providers.clone() };
        running.spawn_loop(
            updater,
            flags.updater_loop_parallelism,
            flags.updater_db_query_rate,
            &wake_ups,
            metrics,
        );
    }
    if has(Component::Retirer) {
        let retirer = Retirer { providers: providers.clone() };
        let rate = flags.retirer_db_query_rate;
        running.spawn_loop(retirer, flags.retirer_loop_parallelism, rate, &wake_ups, metrics);
    }
    if has(Component::Cluster) {
        running.tend_clusters(secrets, metrics);
    }
    if has(Component::Provisioner) {
        for (provider, breaker) in providers.iter() {
            let settings = ProvisionerSettings {
                limits: Limits {
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
            running.workers.spawn(provisioner::run(
                running.sessions.clone(),
                provider.clone(),
                settings,
                stop,
            ));
        }
    }
    Ok(())
}

impl Running {
    fn tend_clusters(&mut self, secrets: Option<Arc<SecretsKey>>, metrics: &ManagerMetrics) {
        let Some(secrets) = secrets else {
            tracing::info!(
                "clusters are not tended: what they need to know is sealed with --secrets_key_path"
            );
            return;
        };
        let settings = ClusterSettings { secrets, metrics: metrics.clone() };
        self.workers.spawn(cluster::run(self.sessions.clone(), settings, self.drain.clone()));
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
            metrics: metrics.of(control_loop.name(), control_loop.process()),
            drain: self.drain.clone(),
            abort: self.abort.clone(),
        };
        let settings = LoopSettings { parallelism, limiter: Limiter::new(rate) };
        self.workers.spawn(control_loop::run(Arc::new(control_loop), settings, context));
    }

    /// Where agents are heard, and metrics served, if they are.
    #[must_use]
    pub fn callback(&self) -> Option<&Callback> {
        self.callback.as_ref()
    }

    /// Lets a stop that is under way, or comes, do without its grace period.
    #[must_use]
    pub fn hurry(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Stops everything; returns when no work of ours is live and every session is closed.
    pub async fn stop(mut self) {
        self.drain.cancel();
        failpoint::pass("shutdown", "draining");
        let abort = self.abort.clone();
        let grace = self.grace;
        let deadline = tokio::spawn(async move {
            tokio::time::sleep(grace).await;
            abort.cancel();
        });
        while self.workers.join_next().await.is_some() {}
        deadline.abort();
        failpoint::pass("shutdown", "idle");
        if let Some(callback) = self.callback.take() {
            callback.stop().await;
        }
        while self.tasks.join_next().await.is_some() {}
        self.sessions.drained().await;
        failpoint::pass("shutdown", "drained");
        self.keep.cancel();
        if let Err(error) = self.keeper.await {
            tracing::error!(%error, "the session keeper ended in the middle");
        }
    }
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The provider that a configuration means.
pub fn build_provider(
    configuration: &ProviderConfiguration,
    plan: &ServicePlan,
) -> Result<Arc<dyn Provider>, Failure> {
    let wrong = |error: crate::providers::provider::ProviderError| {
        Failure::usage(format!("provider {}: {}", configuration.name(), error.sentence))
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

async fn access(
    plan: &ServicePlan,
    database: &OpenDatabase,
    authorities: Authorities,
) -> Result<Access, Failure> {
    let flags = &plan.flags;
    let key_path = database.key_path(flags.ssh_key_path.as_deref(), "ssh_key").ok_or_else(|| {
        Failure::usage("give --ssh_key_path FILE: the SSH key to reach machines with, made if absent")
    })?;
    let key = ClientKey::load_or_create(&key_path).map_err(|error| Failure::usage(error.to_string()))?;
    tracing::info!(path = %key_path.display(), public_key = key.authorized_keys_line(), "the SSH key that machines must accept");
    let agent_path = flags.agent_executable_path.clone().ok_or_else(|| {
        Failure::usage("give --agent_executable_path FILE: the role server to put on machines")
    })?;
    // Read once now, so that a wrong file is told at the start and not by every machine.
    AgentBinary::load(&agent_path).await.map_err(|error| Failure::usage(error.to_string()))?;
    let mut ssh = SshSettings::new(key);
    ssh.password = ssh_password(flags.ssh_password_path.as_deref())?;
    ssh.connect_timeout = flags.agent_ssh_connect_timeout.0;
    ssh.greeting_timeout = flags.agent_ssh_greeting_timeout.0;
    ssh.login_timeout = flags.agent_ssh_login_timeout.0;
    ssh.exec_timeout = flags.agent_ssh_exec_timeout.0;
    Ok(Access {
        ssh,
        user: flags.ssh_user.clone(),
        agent: AgentFile::new(agent_path),
        agent_path: flags.agent_target_path.clone(),
        endpoints: plan.endpoints.clone(),
        ca_certificates: Box::new(move || authorities.borrow().clone()),
        bmdb_id: database.bmdb.identity().await.map_err(database_failure)?,
    })
}

/// The password for hosts that take no key, from its file or the environment.
pub fn ssh_password(path: Option<&std::path::Path>) -> Result<Option<SecretString>, Failure> {
    let Some(path) = path else {
        return Ok(std::env::var("SHEPHERD_SSH_PASSWORD").ok().map(SecretString::from));
    };
    let text = std::fs::read_to_string(path).map_err(|error| {
        let problem = match error.kind() {
            std::io::ErrorKind::InvalidData => "holds something that is no text".to_owned(),
            _ => format!("cannot be read: {error}"),
        };
        Failure::usage(format!("--ssh_password_path {} {problem}", path.display()))
    })?;
    let password = text.trim_end_matches(['\r', '\n']);
    if password.is_empty() {
        return Err(Failure::usage(format!(
            "--ssh_password_path {} holds no password; write it there, and nothing else",
            path.display()
        )));
    }
    Ok(Some(SecretString::from(password.to_owned())))
}

/// Runs the service until a signal: the first one stops it in order, the second at once.
pub async fn serve(plan: ServicePlan, traces: Traces) -> Result<(), Failure> {
    let (mut terminate, mut interrupt) = signals()?;
    // Before the database is touched: what is wrong with the rest must not leave a schema behind.
    inspect(&plan, Unanswered::Warns).await?;
    let database = open_database(&plan).await?;
    let told = CancellationToken::new();
    let sending = traces.sending.map(|sending| tokio::spawn(sending.run(told.clone())));
    let started = start(&plan, &database, &traces.counts).await;
    let running = match started {
        Ok(running) => running,
        Err(failure) => {
            if let Err(error) = database.close().await {
                tracing::warn!(%error, "cannot close the database");
            }
            return Err(failure);
        }
    };
    tracing::info!(database = %database.bmdb.settings().place(), "running");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!(grace = ?plan.flags.shutdown_grace.0, "stopping; a second signal stops at once");
    let hurry = running.hurry();
    let hasty = tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        hurry.cancel();
    });
    running.stop().await;
    hasty.abort();
    // Once nothing is worked on any more, so that the last trace is whole.
    told.cancel();
    if let Some(sending) = sending
        && sending.await.is_err()
    {
        tracing::warn!("the last traces were not handed over");
    }
    database.close().await
}

/// The signals that stop a program.
pub fn signals() -> Result<(tokio::signal::unix::Signal, tokio::signal::unix::Signal), Failure> {
    let wrong = |error| Failure::failed(format!("cannot listen for signals: {error}"));
    Ok((signal(SignalKind::terminate()).map_err(wrong)?, signal(SignalKind::interrupt()).map_err(wrong)?))
}
