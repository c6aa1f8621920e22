//! Check of the agent: is the file a role server, and did a pinned key sign it?
//!
//! Machines with pinned keys accept releases with a signature alone, and a takeover puts the program there before any key is
//! pinned. So where there are signing keys, a signature beside the file is verified like that of a release.
//!
//! Simulated machines take any program and run none of it. The mark of a role server is required for others.

use std::path::Path;

use crate::model::signed_artefact::signature::{ArtefactSignature, MAX_SIGNATURE_BYTES};
use crate::model::signed_artefact::{ExpectedFields, decide_acceptance};
use crate::service::failure::ExitFailure;
use crate::service::provider_configuration::ProviderConfiguration;
use crate::service::service_plan::ServicePlan;
use crate::service::signing_keys::{read_text, signature_path};
use crate::takeover::agent_binary::AgentBinary;

const FLAG: &str = "--agent_executable_path";

/// Reads the agent and its signature. Returns a line if the plan has an agent.
pub(super) async fn inspect_agent(plan: &ServicePlan) -> Result<Option<String>, ExitFailure> {
    let Some(path) = &plan.flags.agent_executable_path else { return Ok(None) };
    let agent = AgentBinary::load(path).await.map_err(|error| ExitFailure::usage(error.to_string()))?;
    let is_simulated =
        |provider: &ProviderConfiguration| matches!(provider, ProviderConfiguration::Simulated { .. });
    if !plan.providers.iter().all(is_simulated) && !agent.is_role_server() {
        return Err(ExitFailure::usage(format!(
            "{} is not an agent program: it is another program than a role server; build one with `make roleserver` and \
             name it by {FLAG}",
            path.display()
        )));
    }
    let loader = agent.loader().map_or_else(String::new, |loader| {
        format!("; it is not static, and runs only on machines that have {loader} and its libraries")
    });
    let signature = verify_signature(plan, path, &agent)?;
    Ok(Some(format!(
        "an agent for {}, {} bytes, SHA-256 {}{signature}{loader}",
        agent.architecture(),
        agent.size(),
        agent.sha256()
    )))
}

/// Verifies the signature beside the agent. Returns what it is, to follow a description of the agent; empty without signing
/// keys.
fn verify_signature(plan: &ServicePlan, path: &Path, agent: &AgentBinary) -> Result<String, ExitFailure> {
    if plan.signing.keys().is_empty() {
        return Ok(String::new());
    }
    let beside = signature_path(path);
    if !beside.exists() {
        return Ok(format!(", without a signature in {}", beside.display()));
    }
    let refuse = |error: &dyn std::fmt::Display| {
        ExitFailure::usage(format!(
            "{FLAG} {}, with the signature {}: {error}",
            path.display(),
            beside.display()
        ))
    };
    let text = read_text(FLAG, &beside, MAX_SIGNATURE_BYTES)?;
    let signature = ArtefactSignature::parse(&text).map_err(|error| refuse(&error))?;
    let expected = ExpectedFields::release(agent.architecture().uname());
    let trust = plan.signing.trust();
    let key = decide_acceptance(Some(&signature), &expected, &trust).map_err(|error| refuse(&error))?;
    if let Some(key) = key {
        signature.verify(key, &agent.content()).map_err(|error| refuse(&error))?;
    }
    Ok(format!(", signed with key {}", signature.key_id()))
}
