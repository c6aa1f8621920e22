//! `update`, `update get|describe|pause|resume|abort`: rolling a release of the role server out.

use std::fmt::Write as _;

use clap::{Args, Subcommand};
use serde_json::json;

use crate::bmdb::action::Done;
use crate::bmdb::roll_out::{NewRollOut, RollOutChange, roll_outs, target};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::direct;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, moment};
use crate::cli::source::Source;
use crate::model::roll_out_view::{RollOutMachineView, RollOutView};
use crate::model::telling::{absolute, rough};
use crate::model::time::{Span, Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::updates_client::UpdatesClient;

/// A release to roll out, or a roll-out to look at or to change.
#[derive(Debug, Args)]
pub struct Update {
    /// What to do with one that was ordered
    #[command(subcommand)]
    pub change: Option<UpdateCommand>,
    /// Which machines, as location=ams,memory>=64GiB,label.rack=7; '' for every machine
    #[arg(long, value_name = "TERMS", required = true)]
    pub selector: Option<String>,
    /// The release: an artefact's digest, the beginning of it, or its name
    #[arg(long, value_name = "RELEASE", required = true)]
    pub release: Option<String>,
    /// How many machines at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub parallelism: u32,
    /// How long a machine may take to fetch it, and then to be heard
    #[arg(long, value_name = "SPAN", default_value = "2m")]
    pub deadline: Span,
    /// Why, for the audit and whoever asks `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
}

/// What can be done with roll-outs.
#[derive(Debug, Subcommand)]
pub enum UpdateCommand {
    /// List updates, those under way first
    #[command(after_help = examples::UPDATE_GET)]
    Get,
    /// Show an update, its machines, and what each waits for
    #[command(after_help = examples::UPDATE_DESCRIBE)]
    Describe(OfUpdate),
    /// Ask no more machines until it is resumed
    #[command(after_help = examples::UPDATE_PAUSE)]
    Pause(ChangeUpdate),
    /// Go on with machines that were not asked yet
    #[command(after_help = examples::UPDATE_RESUME)]
    Resume(ChangeUpdate),
    /// End an update where it is
    #[command(after_help = examples::UPDATE_ABORT)]
    Abort(ChangeUpdate),
}

/// An update to show.
#[derive(Debug, Args)]
pub struct OfUpdate {
    /// Its id, as `update get` lists it
    #[arg(value_name = "UPDATE")]
    pub id: String,
}

/// An update to change.
#[derive(Debug, Args)]
pub struct ChangeUpdate {
    /// Its id, as `update get` lists it
    #[arg(value_name = "UPDATE")]
    pub id: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// What an update command answers.
pub async fn update_command(source: &Source, asked: &Update, format: Format) -> Result<String, CliError> {
    match &asked.change {
        None => create(source, asked, format).await,
        Some(UpdateCommand::Get) => list(source, format).await,
        Some(UpdateCommand::Describe(of)) => describe(source, &of.id, format).await,
        Some(UpdateCommand::Pause(of)) => change(source, of, RollOutChange::Pause, format).await,
        Some(UpdateCommand::Resume(of)) => change(source, of, RollOutChange::Resume, format).await,
        Some(UpdateCommand::Abort(of)) => change(source, of, RollOutChange::Abort, format).await,
    }
}

async fn read(source: &Source, id: Option<&str>) -> Result<(Vec<RollOutView>, Timestamp), CliError> {
    match source {
        Source::Direct(bmdb) => {
            let id = id.map(str::to_owned);
            let look = bmdb.inspect(move |tx| {
                let id = id.clone();
                Box::pin(async move { roll_outs(tx, id.as_deref()).await })
            });
            Ok(look.await?)
        }
        Source::Api(remote) => {
            let request = v1::ListUpdatesRequest { id: id.unwrap_or_default().to_owned() };
            let said = UpdatesClient::new(remote.service()).list(request).await;
            let said = said.map_err(refused)?.into_inner();
            let found = said.updates.into_iter().map(update).collect::<Result<_, _>>()?;
            Ok((found, at(said.at, "its moment")?))
        }
    }
}

fn update(said: v1::Update) -> Result<RollOutView, CliError> {
    Ok(RollOutView {
        id: said.id,
        release: said.release,
        sha256: said.sha256,
        select: said.select,
        parallelism: said.parallelism,
        deadline_seconds: said.deadline_seconds,
        created_at: at(said.created_at, "when an update was ordered")?,
        created_by: said.created_by,
        reason: said.reason,
        paused: said.paused,
        ended_at: said.ended_at.and_then(moment),
        ended: said.ended,
        counts: said.counts,
        machines: said.machines.into_iter().map(machine).collect::<Result<_, _>>()?,
    })
}

fn machine(said: v1::UpdateMachine) -> Result<RollOutMachineView, CliError> {
    Ok(RollOutMachineView {
        machine: said.machine,
        name: said.name,
        state: said.state,
        said: said.said,
        changed_at: at(said.changed_at, "since when a machine is so far")?,
    })
}

async fn list(source: &Source, format: Format) -> Result<String, CliError> {
    let (found, now) = read(source, None).await?;
    if format == Format::Json {
        return get::json(&json!({ "updates": found }));
    }
    if found.is_empty() {
        return Ok("no updates; shepherdctl update --release RELEASE orders one\n".to_owned());
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|update| {
            vec![
                update.id.clone(),
                update.stage().to_owned(),
                update.release.clone(),
                update.counts(),
                rough(between(update.created_at, now)),
                update.created_by.clone(),
            ]
        })
        .collect();
    Ok(table(&["UPDATE", "STAGE", "RELEASE", "MACHINES", "AGE", "ORDERED BY"], &rows, width()))
}

async fn describe(source: &Source, id: &str, format: Format) -> Result<String, CliError> {
    let (mut found, now) = read(source, Some(id)).await?;
    let update = found
        .pop()
        .ok_or_else(|| CliError::Wrong(format!("there is no update {id:?}; run: shepherdctl update get")))?;
    if format == Format::Json {
        return get::json(&json!({ "update": update }));
    }
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    line("update", &update.id);
    line("stage", update.stage());
    if let Some(why) = &update.paused {
        line("paused", why);
    }
    line("release", &format!("{} ({})", update.release, update.sha256));
    if !update.select.is_empty() {
        line("selector", &update.select);
    }
    line("at a time", &update.parallelism.to_string());
    line("deadline", &format!("{} s", update.deadline_seconds));
    line("ordered", &format!("{} by {}: {}", absolute(update.created_at), update.created_by, update.reason));
    line("machines", &update.counts());
    let rows: Vec<Vec<String>> = update
        .machines
        .iter()
        .map(|machine| {
            vec![
                machine.name.clone(),
                machine.state.clone(),
                rough(between(machine.changed_at, now)),
                machine.said.clone().unwrap_or_default(),
            ]
        })
        .collect();
    text.push('\n');
    text.push_str(&table(&["MACHINE", "STATE", "FOR", "BECAUSE"], &rows, width()));
    Ok(text)
}

fn given(reason: &str) -> Result<(), CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever reads the audit will want to know".into()));
    }
    Ok(())
}

fn told(id: &str, done: &Done, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "update": id, "changed": done.changed, "said": done.said });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{} {}", target(id), done.said)))),
    }
}

async fn create(source: &Source, asked: &Update, format: Format) -> Result<String, CliError> {
    let reason = asked.reason.as_deref().unwrap_or_default();
    given(reason)?;
    let deadline = std::time::Duration::from(asked.deadline).as_secs();
    let new = NewRollOut {
        release: asked.release.clone().unwrap_or_default(),
        selector: asked
            .selector
            .as_deref()
            .unwrap_or_default()
            .parse()
            .map_err(|said| CliError::Wrong(format!("--selector: {said}")))?,
        parallelism: asked.parallelism,
        deadline_seconds: u32::try_from(deadline).unwrap_or(u32::MAX),
    };
    new.check().map_err(CliError::Wrong)?;
    let release = new.release.clone();
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Updates/Create", target(&release), Some(reason));
            bmdb.roll_out(order, new).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::CreateUpdateRequest {
                    release: new.release.clone(),
                    order: Some(order),
                    select: new.selector.to_string(),
                    parallelism: new.parallelism,
                    deadline_seconds: new.deadline_seconds,
                };
                UpdatesClient::new(service).create(request).await
            };
            let done = again::order(&mut remote.clone(), reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&release, &done, format)
}

async fn change(
    source: &Source,
    asked: &ChangeUpdate,
    change: RollOutChange,
    format: Format,
) -> Result<String, CliError> {
    given(&asked.reason)?;
    let rpc = match change {
        RollOutChange::Pause => "shepherd.fleet.v1.Updates/Pause",
        RollOutChange::Resume => "shepherd.fleet.v1.Updates/Resume",
        RollOutChange::Abort => "shepherd.fleet.v1.Updates/Abort",
    };
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct(rpc, target(&asked.id), Some(&asked.reason));
            bmdb.change_roll_out(order, asked.id.clone(), change).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ChangeUpdateRequest { id: asked.id.clone(), order: Some(order) };
                let mut updates = UpdatesClient::new(service);
                match change {
                    RollOutChange::Pause => updates.pause(request).await,
                    RollOutChange::Resume => updates.resume(request).await,
                    RollOutChange::Abort => updates.abort(request).await,
                }
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.id, &done, format)
}
