//! `allow`: permit what is rejected otherwise. `allow host-key` accepts another SSH host key of a machine.

use clap::{Args, Subcommand};

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::allow_signing_keys::{ALLOW_SIGNING_KEYS_EXAMPLES, AllowSigningKeys};
use crate::machine::outcome::format_response;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

const ALLOW_HOST_KEY_EXAMPLES: &str = "\
Example:
  shepherdctl allow host-key sim-0007 --fingerprint SHA256:3h5p… --reason 'it was reinstalled'";

/// Subcommands of `allow`: each permits one thing that is rejected otherwise.
#[derive(Debug, Subcommand)]
pub enum AllowCommand {
    /// Accept the SSH host key that was rejected last; check first that it is the machine's own
    #[command(after_help = ALLOW_HOST_KEY_EXAMPLES)]
    HostKey(AllowHostKey),
    /// Let the next takeover replace the signing keys that a machine has pinned, when they are lost
    #[command(after_help = ALLOW_SIGNING_KEYS_EXAMPLES)]
    SigningKeys(AllowSigningKeys),
}

/// Arguments of `allow host-key`: the machine and the fingerprint of the key to accept.
#[derive(Debug, Args)]
pub struct AllowHostKey {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Fingerprint of the key, as `why` shows it; only the key that was rejected last is accepted
    #[arg(long, value_name = "SHA256:…")]
    pub fingerprint: String,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Runs `allow host-key M`: accepts another SSH host key.
pub async fn allow_host_key(context: &CommandContext, arguments: &AllowHostKey) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::AllowHostKeyRequest {
            machine: arguments.machine.clone(),
            order: Some(order),
            fingerprint: arguments.fingerprint.clone(),
        };
        MachinesClient::new(service).allow_host_key(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(context, &send_order(context, reason, give).await?)
}
