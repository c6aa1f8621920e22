//! Check of the agent: is the file a role server, can nobody else change it, and did a pinned key sign it?
//!
//! Machines with pinned keys accept releases with a signature alone, and a takeover puts the program there before any key is
//! pinned. So where there are signing keys, the program must have a signature like that of a release, unless the policy
//! allows unsigned ones. The policy is in the database, which the preflight does not have: it decides where the flags
//! already do, `--check` reads the stored policy, and the start decides once the database is open.
//!
//! Simulated machines take any program and run none of it. What is checked here is required for others.

use std::path::PathBuf;

use crate::manager::agent_file::{AgentFile, AgentFileError, AgentSignature, AgentTrust};
use crate::service::failure::ExitFailure;
use crate::service::provider_configuration::ProviderConfiguration;
use crate::service::service_plan::{Database, ServicePlan};

/// The agent at this path, with what the machines of the plan require of it.
pub(super) fn agent_file(plan: &ServicePlan, path: PathBuf) -> AgentFile {
    let trust = if has_only_simulated_machines(plan) {
        AgentTrust::Unchecked
    } else {
        AgentTrust::Checked(plan.signing.clone())
    };
    AgentFile::new(path, trust)
}

/// Reads the agent and its signature. Returns a line if the plan has an agent.
pub(super) async fn inspect_agent(plan: &ServicePlan) -> Result<Option<String>, ExitFailure> {
    let Some(path) = &plan.flags.agent_executable_path else { return Ok(None) };
    let file = agent_file(plan, path.clone());
    let found = file.inspect().await.map_err(|error| agent_failure(&error))?;
    let agent = &found.binary;
    let loader = agent.loader().map_or_else(String::new, |loader| {
        format!("; it is not static, and runs only on machines that have {loader} and its libraries")
    });
    let signature = match (&found.signature, known_policy(plan)) {
        (AgentSignature::NotNeeded, _) => String::new(),
        (AgentSignature::Valid(key), _) => format!(", signed with key {key}"),
        (AgentSignature::Absent(beside), Some(true)) => {
            format!(", without a signature in {}, which the policy allows", beside.display())
        }
        (AgentSignature::Absent(beside), None) => format!(
            ", without a signature in {}, so it is used only if the policy allows unsigned releases",
            beside.display()
        ),
        (AgentSignature::Absent(_), Some(false)) => {
            file.load(false).await.map_err(|error| agent_failure(&error))?;
            String::new()
        }
    };
    Ok(Some(format!(
        "an agent for {}, {} bytes, SHA-256 {}{signature}{loader}",
        agent.architecture(),
        agent.size(),
        agent.sha256()
    )))
}

/// Checks the signature of the agent by the policy that the database has: `None` if it could not be read.
pub(super) async fn check_agent_signature(
    plan: &ServicePlan,
    stored_policy: Option<bool>,
) -> Result<(), ExitFailure> {
    let (Some(path), Some(allows_unsigned)) =
        (&plan.flags.agent_executable_path, known_policy(plan).or(stored_policy))
    else {
        return Ok(());
    };
    let loaded = agent_file(plan, path.clone()).load(allows_unsigned).await;
    loaded.map(drop).map_err(|error| agent_failure(&error))
}

/// The exit failure for an agent that cannot be used: a mistake of the caller.
pub(super) fn agent_failure(error: &AgentFileError) -> ExitFailure {
    ExitFailure::usage(error.to_string())
}

/// Whether the policy will allow unsigned releases, as far as that is known without a database: by the flag, which is
/// written into the policy, or in a new database.
fn known_policy(plan: &ServicePlan) -> Option<bool> {
    let is_new = matches!(plan.database, Database::Ephemeral);
    plan.flags.policy.allow_unsigned_releases.or(is_new.then_some(false))
}

fn has_only_simulated_machines(plan: &ServicePlan) -> bool {
    plan.providers.iter().all(|provider| matches!(provider, ProviderConfiguration::Simulated { .. }))
}
