//! `artefacts delete`: remove an artefact.

use clap::Args;

use crate::artefacts::outcome::format_outcome;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use bmdb::orders::order::OrderOutcome;
use proto::fleet::v1;
use proto::fleet::v1::artefacts_client::ArtefactsClient;

pub(crate) const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl artefacts delete server-1.3 --reason 'no service uses it any more'";

/// Arguments of `artefacts delete`: the artefact to remove.
#[derive(Debug, Args)]
pub struct DeleteArtefact {
    /// Artefact: its digest, the beginning of it (8 digits or more), or its name
    #[arg(value_name = "ARTEFACT")]
    pub artefact: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(crate) async fn delete_artefact(
    context: &CommandContext,
    args: &DeleteArtefact,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let name = &args.artefact;
    let give = async |service, order| {
        let request = v1::DeleteArtefactRequest { artefact: name.clone(), order: Some(order) };
        ArtefactsClient::new(service).delete(request).await
    };
    let done = send_order(context, &args.reason, give).await?;
    let done = OrderOutcome { changed: done.changed, message: done.message };
    format_outcome(context, name, "", &done)
}
