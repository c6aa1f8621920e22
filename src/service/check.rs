//! `--check`: validates the plan without changing anything.

use std::fmt::Write as _;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::connection::private_postgres::options::PrivatePostgresError;
use crate::bmdb::connection::private_postgres::programs;
use crate::bmdb::connection::schema::supported_version;
use crate::bmdb::connection::settings::ConnectionSettings;
use crate::model::policy::Policy;
use crate::model::program_versions::{Program, format_version};
use crate::service::agent_check::check_agent_signature;
use crate::service::database::{warn_about_durability, warn_about_url, warn_about_version};
use crate::service::failure::{ExitFailure, database_failure};
use crate::service::preflight::{OnUnreachableProvider, RecordedMachines, inspect_plan};
use crate::service::provider_configuration::ProviderConfiguration;
use crate::service::service_plan::{Database, ServicePlan};

/// Reads the database's schema version and everything else that the plan names. Returns what would run and what was
/// found.
pub async fn check_plan(plan: &ServicePlan) -> Result<String, ExitFailure> {
    let mut report = plan.describe();
    let mut found = Vec::new();
    let content = match &plan.database {
        Database::Url(settings) => {
            warn_about_url(plan);
            check_database(plan, (**settings).clone(), &mut found).await?
        }
        Database::Ephemeral | Database::Directory(_) => {
            found.push(describe_server_programs()?);
            DatabaseContent::default()
        }
    };
    found.extend(inspect_plan(plan, OnUnreachableProvider::Fail, &content.recorded).await?);
    check_agent_signature(plan, content.allows_unsigned).await?;
    for line in found {
        // Writing to a String cannot fail.
        let _ = writeln!(report, "{:<12} {line}", "found");
    }
    report.push_str("everything is valid; nothing was changed");
    Ok(report)
}

/// What is read from the database of the plan, if its schema is that of this release.
#[derive(Default)]
struct DatabaseContent {
    /// Whether its policy allows unsigned releases; `None` if that is not known.
    allows_unsigned: Option<bool>,
    /// The machines of the plan's providers.
    recorded: RecordedMachines,
}

/// Adds to `found` the version of a database's server, the schema, and the limit that leaves fewer connections than are
/// wanted, if any does. Returns what was read. Fails for a schema that this release must not touch, and for a server that
/// it cannot work with.
async fn check_database(
    plan: &ServicePlan,
    settings: ConnectionSettings,
    found: &mut Vec<String>,
) -> Result<DatabaseContent, ExitFailure> {
    let bmdb = Bmdb::connect(settings).await.map_err(database_failure)?;
    bmdb.refuse_poolers().await.map_err(database_failure)?;
    bmdb.check_direct_url().await.map_err(database_failure)?;
    if bmdb.settings().direct.is_some() {
        found.push("the direct URL leads to the same server and database".to_owned());
    }
    warn_about_version(&bmdb);
    if let Some(version) = bmdb.server_version() {
        found.push(format!("PostgreSQL {}", format_version(Program::Postgres, version.into())));
    }
    let beside = plan.connections_beside_pool();
    let budget = bmdb.plan_connections(beside).await.map_err(database_failure)?;
    let version = bmdb.schema_version().await.map_err(database_failure)?;
    let known = supported_version();
    let mut content = DatabaseContent::default();
    match version {
        // The first start makes it, with the policy that a new database has.
        0 => content.allows_unsigned = Some(Policy::default().allow_unsigned_releases),
        _ if version == known => {
            bmdb.read_policy().await.map_err(database_failure)?;
            content.allows_unsigned = Some(bmdb.policy().1.allow_unsigned_releases);
            for name in plan.providers.iter().map(ProviderConfiguration::name) {
                let machines = bmdb.list_recorded_machines(name.as_str()).await.map_err(database_failure)?;
                content.recorded.insert(name.to_string(), machines);
            }
        }
        _ => {}
    }
    bmdb.close().await;
    found.push(match version {
        0 => "a database without a schema; the first start makes it".to_owned(),
        _ if version > known => {
            return Err(database_failure(BmdbError::NewerSchema { found: version, supported: known }));
        }
        _ if version < known => format!("schema version {version}; the first start upgrades it to {known}"),
        _ => format!("schema version {version}, as this release needs it"),
    });
    if let Some(shortage) = budget.shortage {
        found.push(format!("too few connections, so that the pool does with {}: {shortage}", budget.pool));
    }
    warn_about_durability(&bmdb).await;
    Ok(content)
}

/// Describes the PostgreSQL programs that a private server could use.
fn describe_server_programs() -> Result<String, ExitFailure> {
    let found: Vec<String> = programs::find_programs()
        .iter()
        .map(|programs| format!("PostgreSQL {} in {}", programs.major, programs.directory.display()))
        .collect();
    if found.is_empty() {
        let directories: Vec<String> =
            programs::search_directories().iter().map(|place| place.display().to_string()).collect();
        let error = PrivatePostgresError::NoPrograms { searched: directories.join(", ") };
        return Err(ExitFailure::failed(error.to_string()));
    }
    Ok(found.join(", "))
}
