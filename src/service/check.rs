//! `--check`: looks at everything the plan names without changing any of it.

use std::fmt::Write as _;

use crate::bmdb::connection::{Bmdb, ConnectionSettings};
use crate::bmdb::error::BmdbError;
use crate::bmdb::postgres_programs;
use crate::bmdb::private_postgres::PrivatePostgresError;
use crate::bmdb::setup::known_version;
use crate::service::failure::Failure;
use crate::service::plan::{Database, ServicePlan};
use crate::service::preflight::{Unanswered, inspect};
use crate::service::run::{database_failure, warn_of_password};

/// Reads the database's schema version and whatever else the plan names; returns what would run and
/// what was found.
pub async fn check(plan: &ServicePlan) -> Result<String, Failure> {
    let mut report = plan.describe();
    let mut found = Vec::new();
    found.push(match &plan.database {
        Database::Url(settings) => {
            warn_of_password(plan);
            schema((**settings).clone()).await?
        }
        Database::ThrowAway | Database::Directory(_) => server_programs()?,
    });
    found.extend(inspect(plan, Unanswered::Fails).await?);
    for line in found {
        // Writing to a String cannot fail.
        let _ = writeln!(report, "{:<12} {line}", "found");
    }
    report.push_str("everything is as it must be; nothing was changed");
    Ok(report)
}

/// Says which schema a database has, unless it is one that this release must not touch.
async fn schema(settings: ConnectionSettings) -> Result<String, Failure> {
    let bmdb = Bmdb::connect(settings).await.map_err(database_failure)?;
    let version = bmdb.schema_version().await.map_err(database_failure)?;
    bmdb.close().await;
    let known = known_version();
    Ok(match version {
        0 => "a database without a schema; the first start makes it".to_owned(),
        _ if version > known => {
            return Err(database_failure(BmdbError::NewerSchema { found: version, known }));
        }
        _ if version < known => format!("schema version {version}; the first start upgrades it to {known}"),
        _ => format!("schema version {version}, as this release needs it"),
    })
}

/// Says with which programs a private server could be run.
fn server_programs() -> Result<String, Failure> {
    let found: Vec<String> = postgres_programs::find()
        .iter()
        .map(|programs| format!("PostgreSQL {} in {}", programs.major, programs.directory.display()))
        .collect();
    if found.is_empty() {
        let looked: Vec<String> =
            postgres_programs::places_to_look().iter().map(|place| place.display().to_string()).collect();
        let error = PrivatePostgresError::NoPrograms { looked: looked.join(", ") };
        return Err(Failure::failed(error.to_string()));
    }
    Ok(found.join(", "))
}
