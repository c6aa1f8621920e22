//! `tokens revoke`: end a credential.

use clap::Args;

use crate::client::fleet_client::FleetClient;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::resolve::{NameSpace, parse_name, resolve_id, whole_id};
use crate::order::retry::send_order_through;
use crate::tokens::get::fetch_token_names;
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

pub(crate) const REVOKE_EXAMPLES: &str = "\
Examples:
  shepherdctl tokens revoke lee --reason 'lee left'
  shepherdctl tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10 --reason 'it was lost'";

/// Arguments of `tokens revoke`: the credential to revoke.
#[derive(Debug, Args)]
pub struct RevokeToken {
    /// Credential: its owner, its UUID as `get tokens` lists it, or the beginning of it
    #[arg(value_name = "CREDENTIAL", value_parser = parse_name)]
    pub credential: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs `tokens revoke`: revokes a credential.
pub async fn revoke_token(context: &CommandContext, arguments: &RevokeToken) -> Result<String, CliError> {
    let id = resolve_credential(&context.client, &arguments.credential).await?;
    let done = revoke_credential(&mut context.client.clone(), context, &id, &arguments.reason).await?;
    context.format_outcome(&done, &format!("{id} {}", done.message))
}

async fn resolve_credential(client: &FleetClient, text: &str) -> Result<String, CliError> {
    if let Some(id) = whole_id(text) {
        return Ok(id);
    }
    let space = NameSpace { noun: "token", list_command: "shepherdctl get tokens" };
    resolve_id(space, text, &fetch_token_names(client).await?)
}

pub(super) async fn revoke_credential(
    client: &mut FleetClient,
    context: &CommandContext,
    id: &str,
    reason: &str,
) -> Result<v1::OrderResponse, CliError> {
    let give = async |service, order| {
        let request = v1::RevokeCredentialRequest { order: Some(order), credential_id: id.to_owned() };
        CredentialsClient::new(service).revoke(request).await
    };
    send_order_through(client, context, reason, give).await
}
