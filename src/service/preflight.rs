//! Preflight: checks providers, agent, certificate and keys before the start.
//!
//! A service that finds its certificate unreadable after it has upgraded the database's schema leaves things half done.
//! So both `--check` and the start of the service run this first. Nothing is changed: a key that will be created is
//! only reported as missing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use crate::bmdb::fleet::provider::RecordedMachine;
use crate::bmdb::fleet::secret::SecretsKey;
use crate::manager::provisioner::plan::{ProvisionerLimits, plan_provisioning};
use crate::model::adoption::LIMIT_REMEDY;
use crate::model::policy::Policy;
use crate::providers::provider::{ErrorClass, ProviderError, ProviderMachine, ProviderName};
use crate::server::tls::certificate_files::{self, CertificateFiles};
use crate::server::tls::server_certificate::endpoint_hosts;
use crate::service::agent_check::inspect_agent;
use crate::service::failure::{ExitFailure, server_failure};
use crate::service::flags::ServiceComponent;
use crate::service::listen_addresses::warn_about_listen_addresses;
use crate::service::provider_configuration::{ProviderConfiguration, build_provider};
use crate::service::service_plan::ServicePlan;
use crate::service::signing_keys::describe_signing_keys;
use crate::service::ssh_access::{read_ssh_passwords, warn_about_ssh_passwords};
use crate::takeover::client_key::ClientKey;

/// What it means that a provider cannot be reached at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnUnreachableProvider {
    /// A failure: the caller wants to know whether everything works.
    Fail,
    /// A warning: the provider may come back, and machines need their shepherd meanwhile.
    Warn,
}

/// The machines that the database has recorded, by the name of their provider.
pub type RecordedMachines = BTreeMap<String, Vec<RecordedMachine>>;

/// Reads every provider's list, the agent, the certificate and the keys. Returns a line for each thing found. `recorded`
/// is empty where the database was not read.
pub async fn inspect_plan(
    plan: &ServicePlan,
    on_unreachable: OnUnreachableProvider,
    recorded: &RecordedMachines,
) -> Result<Vec<String>, ExitFailure> {
    let mut found = Vec::new();
    let flags = &plan.flags;
    for configuration in &plan.providers {
        let provider = build_provider(configuration, &flags.ssh_user)?;
        match provider.list().await {
            Ok(listed) => {
                let known = recorded.get(provider.name().as_str()).map_or(&[][..], Vec::as_slice);
                let max = plan.adoption_limits(provider.name()).max_machines;
                found.extend(describe_list(provider.name(), &listed, known, max));
            }
            Err(error) if is_usage_error(&error, configuration) => {
                return Err(ExitFailure::usage(format!("provider {}: {}", provider.name(), error.message)));
            }
            Err(error) if on_unreachable == OnUnreachableProvider::Fail => {
                return Err(ExitFailure::failed(format!("provider {}: {}", provider.name(), error.message)));
            }
            Err(error) => {
                tracing::warn!(provider = %provider.name(), error = error.message, "cannot list its machines yet");
            }
        }
    }
    found.extend(inspect_agent(plan).await?);
    found.extend(inspect_certificate(plan)?);
    found.extend(describe_signing_keys(&plan.signing));
    if let Some(path) = flags.secrets_key_path.as_deref() {
        if path.exists() {
            SecretsKey::open(path).map_err(|error| ExitFailure::usage(error.to_string()))?;
            found.push(format!("a secrets key at {}", path.display()));
        } else {
            found.push(format!("no secrets key at {}; the first start makes one", path.display()));
        }
    }
    if let Some(path) = flags.ssh_key_path.as_deref() {
        if path.exists() {
            let key = ClientKey::load(path).map_err(|error| ExitFailure::usage(error.to_string()))?;
            found.push(format!("the SSH key {}", key.authorized_keys_line()));
        } else {
            found.push(format!("no SSH key at {}; the first start makes one", path.display()));
        }
    }
    read_ssh_passwords(plan)?;
    warn_about_ssh_passwords(plan);
    warn_about_listen_addresses(plan);
    Ok(found)
}

/// Describes a provider's list: how many machines it has, and how many of them its limit leaves out.
fn describe_list(
    name: &ProviderName,
    listed: &[ProviderMachine],
    recorded: &[RecordedMachine],
    max_machines: Option<usize>,
) -> Vec<String> {
    let (count, s) = (listed.len(), if listed.len() == 1 { "" } else { "s" });
    let mut lines = vec![format!("{count} machine{s} at provider {name}")];
    // The number is that of the provisioner. It depends neither on a brake nor on the size of a chunk.
    let limits = ProvisionerLimits { max_machines, chunk: 1 };
    let brake = Policy::default().provisioner_brake;
    let plan = plan_provisioning(listed, recorded, &BTreeSet::new(), &brake, limits);
    let surplus = plan.not_adopted;
    lines.extend(surplus.map(|surplus| format!("provider {name}: {}; {LIMIT_REMEDY}", surplus.describe())));
    lines
}

/// Verifies the certificate from files as agents and operators will, for every endpoint. Returns a line if there is
/// one.
fn inspect_certificate(plan: &ServicePlan) -> Result<Option<String>, ExitFailure> {
    let flags = &plan.flags;
    let (Some(certificate), Some(key)) = (&flags.agent_tls_certificate_path, &flags.agent_tls_key_path)
    else {
        return Ok(None);
    };
    let files = CertificateFiles {
        certificate: certificate.clone(),
        key: key.clone(),
        ca_certificate: flags.agent_endpoint_ca_certificate_path.clone(),
    };
    let mut endpoints = plan.endpoints.clone();
    if plan.components.contains(&ServiceComponent::Api) {
        endpoints.extend(flags.api_endpoint.iter().cloned());
    }
    endpoint_hosts(&endpoints)
        .and_then(|names| certificate_files::check_files(&files, &names, SystemTime::now()))
        .map_err(|error| server_failure(&error))?;
    Ok(Some(format!("a certificate and its key for {}", endpoints.join(", "))))
}

/// Whether a list cannot be used because of a mistake of the caller. A device list is the caller's own text. The
/// response of a provider's API is not, and may be valid the next time.
fn is_usage_error(error: &ProviderError, configuration: &ProviderConfiguration) -> bool {
    match error.class {
        ErrorClass::Configuration => true,
        ErrorClass::Unreadable => matches!(configuration, ProviderConfiguration::Static { .. }),
        ErrorClass::Transient | ErrorClass::Permanent | ErrorClass::NotFound => false,
    }
}
