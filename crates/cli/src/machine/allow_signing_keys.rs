//! `allow signing-keys`: let the next takeover replace the signing keys that a machine has pinned.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::outcome::format_response;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(super) const ALLOW_SIGNING_KEYS_EXAMPLES: &str = "\
Example:
  shepherdctl allow signing-keys sim-0007 --reason 'both keys burnt with the safe'";

/// Arguments of `allow signing-keys`: the machine.
#[derive(Debug, Args)]
pub struct AllowSigningKeys {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Runs `allow signing-keys M`: replaces pinned keys with the next takeover.
pub async fn allow_signing_keys(
    context: &CommandContext,
    arguments: &AllowSigningKeys,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::AllowSigningKeysRequest { machine: arguments.machine.clone(), order: Some(order) };
        MachinesClient::new(service).allow_signing_keys(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(context, &send_order(context, reason, give).await?)
}
