//! `--check`: looks at everything the plan names without changing any of it.

use std::fmt::Write as _;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::setup::known_version;
use crate::service::failure::Failure;
use crate::service::plan::{Database, ServicePlan};
use crate::service::run::{build_provider, database_failure};
use crate::takeover::agent_binary::AgentBinary;
use crate::takeover::client_key::ClientKey;

/// Reads the database's schema version, every provider's list, the agent and the SSH key; returns
/// what would run and what was found.
pub async fn check(plan: &ServicePlan) -> Result<String, Failure> {
    let mut report = plan.describe();
    let mut found = |line: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(report, "found        {line}");
    };
    if let Database::Url(settings) = &plan.database {
        let bmdb = Bmdb::connect((**settings).clone()).await.map_err(database_failure)?;
        let version = bmdb.schema_version().await.map_err(database_failure)?;
        bmdb.close().await;
        let known = known_version();
        found(match version {
            0 => "a database without a schema; the first start makes it".to_owned(),
            _ if version > known => {
                return Err(Failure::usage(format!(
                    "the database has schema version {version}, and this release knows versions up to {known}: it \
                     was upgraded by a newer shepherd; start that release instead"
                )));
            }
            _ if version < known => {
                format!("schema version {version}; the first start upgrades it to {known}")
            }
            _ => format!("schema version {version}, as this release needs it"),
        });
    }
    for configuration in &plan.providers {
        let provider = build_provider(configuration, plan)?;
        let listed = provider.list().await.map_err(|error| Failure::usage(error.sentence))?;
        found(format!("{} machines at provider {}", listed.len(), provider.name()));
    }
    if let Some(path) = &plan.flags.agent_executable_path {
        let agent = AgentBinary::load(path).await.map_err(|error| Failure::usage(error.to_string()))?;
        found(format!(
            "an agent for {}, {} bytes, SHA-256 {}",
            agent.architecture(),
            agent.size(),
            agent.sha256()
        ));
    }
    if let Some(path) = plan.flags.ssh_key_path.as_deref() {
        if path.exists() {
            let key = ClientKey::load(path).map_err(|error| Failure::usage(error.to_string()))?;
            found(format!("the SSH key {}", key.authorized_keys_line()));
        } else {
            found(format!("no SSH key at {}; the first start makes one", path.display()));
        }
    }
    report.push_str("everything is as it must be; nothing was changed");
    Ok(report)
}
