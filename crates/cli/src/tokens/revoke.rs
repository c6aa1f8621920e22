//! `tokens revoke`: end a credential.

use clap::Args;
use uuid::Uuid;

use crate::client::fleet_client::FleetClient;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::retry::send_order_through;
use proto::fleet::v1;
use proto::fleet::v1::credentials_client::CredentialsClient;

pub(crate) const REVOKE_EXAMPLES: &str = "\
Example:
  shepherdctl tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10 --reason 'lee left'";

/// Arguments of `tokens revoke`: the credential to revoke.
#[derive(Debug, Args)]
pub struct RevokeToken {
    /// UUID of the credential, as `get tokens` lists it
    #[arg(value_name = "CREDENTIAL")]
    pub credential: Uuid,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs `tokens revoke`: revokes a credential.
pub async fn revoke_token(context: &CommandContext, arguments: &RevokeToken) -> Result<String, CliError> {
    let id = arguments.credential.to_string();
    let done = revoke_credential(&mut context.client.clone(), context, &id, &arguments.reason).await?;
    context.format_outcome(&done, &format!("{id} {}", done.message))
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
