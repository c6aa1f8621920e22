//! `shepherd simulator fault`: injects a fault into a machine or the provider.

use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use model::excerpt::{Excerpt, with_excerpt};
use serde::Deserialize;
use serde_json::json;

use crate::faults::{Fault, ProviderFault};

/// The word that names the provider itself in place of a machine.
const PROVIDER: &str = "provider";

/// Arguments of the command.
#[derive(Clone, Debug, clap::Args)]
#[command(
    about = "Break a simulated machine, or the provider itself",
    after_help = "Examples:\n  shepherd simulator fault sim-0007 kill\n  shepherd simulator fault sim-0007 heal\n  shepherd simulator fault provider list-empty"
)]
pub struct FaultArgs {
    /// The machine's id at the provider, like `sim-0007`, or `provider` for a fault of the API itself.
    pub machine: String,
    /// Fault to inject; `heal` removes all earlier ones.
    #[arg(ignore_case = true)]
    pub fault: AnyFault,
    /// URL of the simulator's provider API, which it prints at its start.
    #[arg(long, env = "SHEPHERD_SIMULATOR_URL", value_name = "URL")]
    pub url: String,
}

/// A fault of a machine or of the provider, by its name. `heal` is both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnyFault {
    /// A fault of one machine.
    Machine(Fault),
    /// A fault of the provider's API.
    Provider(ProviderFault),
}

impl ValueEnum for AnyFault {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::Machine(Fault::Kill),
            Self::Machine(Fault::AgentHang),
            Self::Machine(Fault::Hang),
            Self::Machine(Fault::Dead),
            Self::Machine(Fault::PowerFail),
            Self::Machine(Fault::SshRefuse),
            Self::Machine(Fault::Slow),
            Self::Machine(Fault::NewHostKey),
            Self::Machine(Fault::DiskFull),
            Self::Provider(ProviderFault::ListEmpty),
            Self::Provider(ProviderFault::ListError),
            Self::Provider(ProviderFault::ListTorn),
            Self::Provider(ProviderFault::ListShort),
            Self::Provider(ProviderFault::ApiSlow),
            Self::Provider(ProviderFault::ApiError),
            Self::Machine(Fault::Heal),
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Machine(fault) => fault.to_possible_value(),
            Self::Provider(fault) => {
                let value = fault.to_possible_value()?;
                let help = value.get_help().map(|help| format!("Provider: {help}"))?;
                Some(value.help(help))
            }
        }
    }
}

/// Why a fault was not injected.
#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    /// A fault of the provider was given for a machine, or the other way round.
    #[error(
        "{fault} is a fault of {of}, not of {named:?}; `shepherd simulator fault --help` lists both kinds"
    )]
    Mismatch {
        /// The name of the fault.
        fault: String,
        /// What the fault applies to: a machine or the provider.
        of: &'static str,
        /// The machine or provider given on the command line.
        named: String,
    },
    /// The simulator could not be reached.
    #[error("cannot reach the simulator at {url}: {source}; is it running, and is --url right?")]
    Unreachable {
        /// The URL that was tried.
        url: String,
        /// The error of the HTTP client.
        source: reqwest::Error,
    },
    /// The simulator rejected the fault.
    #[error("the fault was not injected into {machine}: {message}")]
    Declined {
        /// The machine or provider that the fault was for.
        machine: String,
        /// The simulator's own message.
        message: String,
    },
}

impl FaultError {
    /// Whether the caller made a mistake.
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(self, Self::Mismatch { .. })
    }
}

#[derive(Deserialize)]
struct ErrorBody {
    error: String,
}

/// Injects the fault, and returns a sentence that confirms it.
pub async fn send_fault(args: &FaultArgs) -> Result<String, FaultError> {
    let FaultArgs { machine, fault, url } = args;
    let name = fault.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let of_provider = machine == PROVIDER;
    let heals = *fault == AnyFault::Machine(Fault::Heal);
    let mismatch = |of| FaultError::Mismatch { fault: name.clone(), of, named: machine.clone() };
    match fault {
        AnyFault::Machine(_) if of_provider && !heals => return Err(mismatch("a machine")),
        AnyFault::Provider(_) if !of_provider => return Err(mismatch("the provider")),
        _ => {}
    }
    let path = if of_provider { "faults".to_owned() } else { format!("machines/{machine}/faults") };
    let unreachable = |source| FaultError::Unreachable { url: url.clone(), source };
    // The API is plain HTTP on loopback. The system's certificates may be missing and are not needed.
    let client = reqwest::Client::builder()
        .no_proxy()
        .tls_certs_only([])
        .timeout(Duration::from_secs(10))
        .build()
        .map_err(unreachable)?;
    let response = client
        .post(format!("{}/v1/{path}", url.trim_end_matches('/')))
        .json(&json!({ "fault": name }))
        .send()
        .await
        .map_err(unreachable)?;
    let status = response.status();
    if status.is_success() {
        return Ok(format!("{name} was injected into {machine}"));
    }
    let body = response.bytes().await.unwrap_or_default();
    let sentence = match serde_json::from_slice::<ErrorBody>(&body) {
        Ok(body) => body.error,
        Err(_) => with_excerpt(format_args!("it answered {status}"), Excerpt::from_body(&body).as_ref()),
    };
    Err(FaultError::Declined { machine: machine.clone(), message: sentence })
}
