//! Looking at everything a plan names before anything is done to it.
//!
//! A service that finds its certificate unreadable after it has upgraded the
//! database's schema leaves things half done. So both `--check` and the start
//! of the service come by here first. Nothing is changed: a key that will be
//! made is only said to be missing.

use crate::bmdb::secret::SecretsKey;
use crate::providers::provider::{ErrorClass, ProviderError};
use crate::server::certificate;
use crate::server::error::ServerError;
use crate::service::configuration::ProviderConfiguration;
use crate::service::failure::Failure;
use crate::service::plan::ServicePlan;
use crate::service::run::{self, build_provider};
use crate::takeover::agent_binary::AgentBinary;
use crate::takeover::client_key::ClientKey;

/// What a provider that cannot be asked at this moment means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// A failure: somebody wants to know whether all is well.
    Fails,
    /// A warning: it may come back, and machines must be looked after meanwhile.
    Warns,
}

/// Reads every provider's list, the agent, the certificate and the keys; returns a line for each
/// thing found.
pub async fn inspect(plan: &ServicePlan, unanswered: Unanswered) -> Result<Vec<String>, Failure> {
    let mut found = Vec::new();
    let flags = &plan.flags;
    for configuration in &plan.providers {
        let provider = build_provider(configuration, plan)?;
        match provider.list().await {
            Ok(listed) => {
                let (count, s) = (listed.len(), if listed.len() == 1 { "" } else { "s" });
                found.push(format!("{count} machine{s} at provider {}", provider.name()));
            }
            Err(error) if is_the_callers(&error, configuration) => {
                return Err(Failure::usage(format!("provider {}: {}", provider.name(), error.sentence)));
            }
            Err(error) if unanswered == Unanswered::Fails => {
                return Err(Failure::failed(format!("provider {}: {}", provider.name(), error.sentence)));
            }
            Err(error) => {
                tracing::warn!(provider = %provider.name(), error = error.sentence, "cannot list its machines yet");
            }
        }
    }
    if let Some(path) = &flags.agent_executable_path {
        let agent = AgentBinary::load(path).await.map_err(|error| Failure::usage(error.to_string()))?;
        found.push(format!(
            "an agent for {}, {} bytes, SHA-256 {}",
            agent.architecture(),
            agent.size(),
            agent.sha256()
        ));
    }
    if let (Some(certificate), Some(key)) = (&flags.agent_tls_certificate_path, &flags.agent_tls_key_path) {
        let authority = flags.agent_endpoint_ca_certificate_path.as_deref();
        certificate::inspect_files(certificate, key, authority).map_err(|error| server_failure(&error))?;
        found.push(format!("a certificate and its key for {}", plan.endpoints.join(", ")));
    } else if let Some(path) = flags.secrets_key_path.as_deref() {
        if path.exists() {
            SecretsKey::open(path).map_err(|error| Failure::usage(error.to_string()))?;
            found.push(format!("a secrets key at {}", path.display()));
        } else {
            found.push(format!("no secrets key at {}; the first start makes one", path.display()));
        }
    }
    if let Some(path) = flags.ssh_key_path.as_deref() {
        if path.exists() {
            let key = ClientKey::load(path).map_err(|error| Failure::usage(error.to_string()))?;
            found.push(format!("the SSH key {}", key.authorized_keys_line()));
        } else {
            found.push(format!("no SSH key at {}; the first start makes one", path.display()));
        }
    }
    run::ssh_password(flags.ssh_password_path.as_deref())?;
    Ok(found)
}

/// Whether a list cannot be had because of what the caller wrote. A device list is the caller's own
/// text; what a provider's API answers is not, and may be whole the next time.
fn is_the_callers(error: &ProviderError, configuration: &ProviderConfiguration) -> bool {
    match error.class {
        ErrorClass::Configuration => true,
        ErrorClass::Unreadable => matches!(configuration, ProviderConfiguration::Static { .. }),
        ErrorClass::Transient | ErrorClass::Permanent | ErrorClass::NotFound => false,
    }
}

/// A server's failure as an exit: what the caller got wrong, or what failed.
#[must_use]
pub fn server_failure(error: &ServerError) -> Failure {
    let sentence = error.to_string();
    match error {
        ServerError::Bmdb(_) => Failure::failed(sentence),
        ServerError::Listen { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
            Failure::failed(sentence)
        }
        _ => Failure::usage(sentence),
    }
}
