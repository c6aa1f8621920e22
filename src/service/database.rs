//! Opens the database of the plan, and a private PostgreSQL if the plan has one.

use std::path::{Path, PathBuf};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::private_postgres::PrivatePostgres;
use crate::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use crate::bmdb::connection::settings::ConnectionSettings;
use crate::bmdb::connection::url::password_warning;
use crate::model::program_versions::postgres_warnings;
use crate::service::failure::{ExitFailure, database_failure, postgres_failure};
use crate::service::scratch::ScratchDirectory;
use crate::service::service_plan::{Database, ServicePlan};
use crate::service::stop_deadline::{StopDeadline, StopStep};

/// Name of the database in a private PostgreSQL.
const PRIVATE_DATABASE: &str = "shepherd";

/// An open database, and its server if that is a private one.
pub struct OpenDatabase {
    /// The handle of the open database.
    pub bmdb: Bmdb,
    private_server: Option<PrivatePostgres>,
    /// Directory for keys without a configured path. It is removed together with the private server's data.
    key_directory: Option<ScratchDirectory>,
}

/// Opens the plan's database, starts a private server if the plan has one, and brings the schema up to date.
pub async fn open_database(plan: &ServicePlan) -> Result<OpenDatabase, ExitFailure> {
    let (settings, private, keys) = match &plan.database {
        Database::Url(settings) => {
            warn_about_url(plan);
            ((**settings).clone(), None, None)
        }
        Database::Ephemeral => {
            let (settings, private) = private_server(plan, ServerStorage::Temporary).await?;
            (settings, Some(private), Some(ScratchDirectory::create("shepherd-keys")?))
        }
        Database::Directory(directory) => {
            let (settings, private) =
                private_server(plan, ServerStorage::Persistent(directory.clone())).await?;
            (settings, Some(private), None)
        }
    };
    let mut bmdb = Bmdb::connect(settings.clone()).await.map_err(database_failure)?;
    warn_about_version(&bmdb);
    if private.is_none() {
        bmdb.refuse_poolers().await.map_err(database_failure)?;
        bmdb.check_direct_url().await.map_err(database_failure)?;
        let budget = bmdb.plan_connections(plan.connections_beside_pool()).await.map_err(database_failure)?;
        if let Some(shortage) = budget.shortage {
            tracing::warn!("the pool does with {} connections: {shortage}", budget.pool);
            bmdb.close().await;
            let settings = ConnectionSettings { max_connections: budget.pool, ..settings };
            bmdb = Bmdb::connect(settings).await.map_err(database_failure)?;
        }
    }
    bmdb.migrate().await.map_err(database_failure)?;
    bmdb.read_policy().await.map_err(database_failure)?;
    if private.is_none() {
        warn_about_durability(&bmdb).await;
    }
    Ok(OpenDatabase { bmdb, private_server: private, key_directory: keys })
}

impl OpenDatabase {
    /// Closes the database within the deadline of the stop, and then stops the private server.
    pub async fn close(self, deadline: StopDeadline) -> Result<(), ExitFailure> {
        // Connections that are left belong to a database that does not answer; they end with the process.
        let _ = deadline.limit(StopStep::Database, self.bmdb.close()).await;
        let stopped = match self.private_server {
            Some(server) => server.stop().await.map_err(postgres_failure),
            None => Ok(()),
        };
        drop(self.key_directory);
        stopped
    }

    /// The path of a key: the configured one, or one in the directory that is removed with the data. `None` if the data
    /// is persistent and no path is configured.
    pub(super) fn key_path(&self, configured: Option<&Path>, name: &str) -> Option<PathBuf> {
        configured.map(Path::to_path_buf).or_else(|| Some(self.key_directory.as_ref()?.path().join(name)))
    }
}

/// Whether a URL of the database is on the command line, where every process list shows it.
fn is_on_command_line(flag: &str) -> bool {
    std::env::args().any(|argument| {
        argument.strip_prefix("--").is_some_and(|argument| argument.replace('-', "_").starts_with(flag))
    })
}

/// Logs a warning for each URL of the database if its password is on the command line, where every process list shows it,
/// if its server is not verified, and if it has parameters that are not supported.
pub fn warn_about_url(plan: &ServicePlan) {
    let flags = &plan.flags;
    for (flag, url) in [("bmdb_url", &flags.bmdb_url), ("bmdb_direct_url", &flags.bmdb_direct_url)] {
        let url = url.as_deref().filter(|_| is_on_command_line(flag));
        if let Some(warning) = url.and_then(|url| password_warning(flag, url)) {
            tracing::warn!("{}", warning.trim_start_matches("warning: "));
        }
    }
    let Database::Url(pool) = &plan.database else { return };
    for settings in std::iter::once(pool).chain(&pool.direct) {
        for warning in [settings.tls_warning(), settings.parameter_warning()].into_iter().flatten() {
            tracing::warn!("{warning}");
        }
    }
}

/// Logs a warning for each published fault of the server's version, and for a version that is not supported.
pub fn warn_about_version(bmdb: &Bmdb) {
    for warning in bmdb.server_version().map(postgres_warnings).unwrap_or_default() {
        tracing::warn!("{warning}");
    }
}

/// Logs a warning if the server may lose commits that it answered, or if that cannot be read. A private server sets that
/// itself.
pub async fn warn_about_durability(bmdb: &Bmdb) {
    match bmdb.durability_warning().await {
        Ok(Some(warning)) => tracing::warn!("{warning}"),
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, "cannot read whether the BMDB loses commits that it answered"),
    }
}

async fn private_server(
    plan: &ServicePlan,
    storage: ServerStorage,
) -> Result<(ConnectionSettings, PrivatePostgres), ExitFailure> {
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
    Ok((settings, server))
}
