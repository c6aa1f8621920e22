//! `get approvals`, `approve`: orders that need another admin.

use clap::Args;
use serde_json::json;
use uuid::Uuid;

use crate::bmdb::approval::{ApprovalLine, RPC, approvals};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::get;
use crate::cli::operate::{direct, who};
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, id, moment};
use crate::cli::source::Source;
use crate::model::second_person::Person;
use crate::model::telling::relative;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::approvals_client::ApprovalsClient;

/// An order to approve.
#[derive(Debug, Args)]
pub struct Approve {
    /// Its UUID, as `get approvals` lists it
    #[arg(value_name = "APPROVAL")]
    pub approval: Uuid,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// `get approvals`.
pub async fn list(source: &Source, format: Format) -> Result<String, CliError> {
    let (found, now) = match source {
        Source::Direct(bmdb) => bmdb.inspect(|tx| Box::pin(async move { approvals(tx).await })).await?,
        Source::Api(remote) => {
            let said = ApprovalsClient::new(remote.service()).list(v1::ListApprovalsRequest {}).await;
            let said = said.map_err(refused)?.into_inner();
            let found = said.approvals.into_iter().map(line).collect::<Result<Vec<_>, _>>()?;
            (found, at(said.at, "its moment")?)
        }
    };
    if format == Format::Json {
        return get::json(&json!({ "approvals": found }));
    }
    if found.is_empty() {
        return Ok("nothing was asked for\n".to_owned());
    }
    let rows: Vec<Vec<String>> = found
        .into_iter()
        .map(|line| {
            vec![
                line.approval.to_string(),
                line.state,
                relative(line.expires_at, now),
                line.asked_by,
                line.rpc.rsplit('.').next().unwrap_or(&line.rpc).to_owned(),
                line.target,
                line.approved_by.unwrap_or_else(|| "-".to_owned()),
                line.reason,
            ]
        })
        .collect();
    let headers = ["APPROVAL", "STATE", "ENDS", "ASKED BY", "ORDER", "ABOUT", "APPROVED BY", "REASON"];
    Ok(table(&headers, &rows, width()))
}

fn line(said: v1::Approval) -> Result<ApprovalLine, CliError> {
    Ok(ApprovalLine {
        approval: id(&said.approval, "an approval's id")?,
        state: said.state,
        asked_by: said.asked_by,
        rpc: said.rpc,
        target: said.target,
        reason: said.reason,
        asked_at: at(said.asked_at, "when it was asked for")?,
        expires_at: at(said.expires_at, "when it is over")?,
        approved_by: said.approved_by,
        approved_at: said.approved_at.and_then(moment),
        approve_reason: said.approve_reason,
        used_at: said.used_at.and_then(moment),
    })
}

/// `approve`.
pub async fn approve(source: &Source, asked: &Approve, format: Format) -> Result<String, CliError> {
    if asked.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever reads the audit will want to know".into()));
    }
    let approval = asked.approval;
    let (changed, said) = match source {
        Source::Direct(bmdb) => {
            let order = direct(RPC, format!("approval {approval}"), Some(&asked.reason));
            let by = Person { name: who(), credential: None };
            let done = bmdb.approve(order, approval, by).await?.done;
            (done.changed, done.said)
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ApproveRequest { order: Some(order), approval: approval.to_string() };
                ApprovalsClient::new(service).approve(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            (done.changed, done.said)
        }
    };
    match format {
        Format::Json => {
            let mut answer = json!({ "approval": approval, "changed": changed, "said": said });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{approval} {said}")))),
    }
}
