//! `get loops`, `loops pause`, `loops resume`: loops that people pause.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use crate::bmdb::action::Until;
use crate::bmdb::pause::{NewPause, loops};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::{direct, reason_or_none, until_of, who};
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, moment};
use crate::cli::source::Source;
use crate::model::pause::{Loop, LoopState, Pause, what};
use crate::model::telling::{both, relative};
use crate::model::time::Timestamp;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::loops_client::LoopsClient;

/// What can be done with loops.
#[derive(Debug, Subcommand)]
pub enum Loops {
    /// Let a loop begin nothing, in every shepherd, until it is resumed; what is under way goes on
    #[command(after_help = examples::LOOPS_PAUSE)]
    Pause(PauseLoop),
    /// Let a paused loop go on
    #[command(after_help = examples::LOOPS_RESUME)]
    Resume(ResumeLoop),
}

/// A loop to pause.
#[derive(Debug, Args)]
pub struct PauseLoop {
    /// The loop
    #[arg(value_name = "LOOP", value_parser = PossibleValuesParser::new(Loop::ALL.map(Loop::as_str)))]
    pub name: String,
    /// Only for the machines of this provider
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Why, for whoever asks `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// When it ends by itself: after a while (2h) or at a moment (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
}

/// A loop to resume.
#[derive(Debug, Args)]
pub struct ResumeLoop {
    /// The loop
    #[arg(value_name = "LOOP", value_parser = PossibleValuesParser::new(Loop::ALL.map(Loop::as_str)))]
    pub name: String,
    /// The provider that was named when it was paused
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// A loop, over all shepherds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoopLine {
    /// Which, by name.
    #[serde(rename = "loop")]
    pub of: String,
    /// Open sessions of its workers.
    pub workers: i64,
    /// Pauses that hold.
    pub pauses: Vec<PauseLine>,
}

/// A pause of a loop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PauseLine {
    /// Whose machines; `None` is everybody's.
    pub provider: Option<String>,
    /// Why.
    pub reason: String,
    /// Who paused it.
    pub by: String,
    /// Since when.
    pub since: Timestamp,
    /// When it ends by itself.
    pub until: Option<Timestamp>,
}

/// `get loops`.
pub async fn list(source: &Source, format: Format) -> Result<String, CliError> {
    let (loops, now) = match source {
        Source::Direct(bmdb) => {
            let (found, now) = bmdb.inspect(|tx| Box::pin(async move { loops(tx).await })).await?;
            (found.into_iter().map(LoopLine::from).collect::<Vec<_>>(), now)
        }
        Source::Api(remote) => {
            let said = LoopsClient::new(remote.service()).list(v1::ListLoopsRequest {}).await;
            let said = said.map_err(refused)?.into_inner();
            let loops = said.loops.into_iter().map(line).collect::<Result<Vec<_>, _>>()?;
            (loops, at(said.at, "its moment")?)
        }
    };
    if format == Format::Json {
        return get::json(&json!({ "loops": loops }));
    }
    let rows: Vec<Vec<String>> = loops.iter().flat_map(|line| rows(line, now)).collect();
    Ok(table(&["LOOP", "WORKERS", "STATE", "OF", "BY", "SINCE", "UNTIL", "REASON"], &rows, width()))
}

fn rows(line: &LoopLine, now: Timestamp) -> Vec<Vec<String>> {
    let row =
        |rest: [String; 6]| [line.of.clone(), line.workers.to_string()].into_iter().chain(rest).collect();
    if line.pauses.is_empty() {
        let dash = || "-".to_owned();
        return vec![row(["not paused".to_owned(), dash(), dash(), dash(), dash(), dash()])];
    }
    let paused = |pause: &PauseLine| {
        row([
            "paused".to_owned(),
            pause.provider.clone().unwrap_or_else(|| "all".to_owned()),
            pause.by.clone(),
            relative(pause.since, now),
            pause.until.map_or_else(|| "resumed".to_owned(), |until| both(until, now)),
            pause.reason.clone(),
        ])
    };
    line.pauses.iter().map(paused).collect()
}

/// A loop, as the API tells of it.
pub fn line(said: v1::Loop) -> Result<LoopLine, CliError> {
    let pauses = said.pauses.into_iter().map(|pause| {
        Ok(PauseLine {
            since: at(pause.since, "a pause's beginning")?,
            provider: pause.provider,
            reason: pause.reason,
            by: pause.by,
            until: pause.until.and_then(moment),
        })
    });
    Ok(LoopLine { pauses: pauses.collect::<Result<_, CliError>>()?, of: said.name, workers: said.workers })
}

impl From<LoopState> for LoopLine {
    fn from(state: LoopState) -> Self {
        let LoopState { of, workers, pauses } = state;
        Self { of: of.to_string(), workers, pauses: pauses.into_iter().map(PauseLine::from).collect() }
    }
}

impl From<Pause> for PauseLine {
    fn from(pause: Pause) -> Self {
        let Pause { provider, reason, by, since, until, .. } = pause;
        Self { provider, reason, by, since, until }
    }
}

/// The provider that was named, if one was.
fn provider_of(named: Option<&str>) -> Result<Option<String>, CliError> {
    match named {
        Some("" | "*") => Err(CliError::Wrong("leave --provider out to mean the machines of all".into())),
        named => Ok(named.map(str::to_owned)),
    }
}

/// `loops pause`.
pub async fn pause(source: &Source, asked: &PauseLoop, format: Format) -> Result<String, CliError> {
    let of: Loop = of(&asked.name)?;
    if asked.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    let until = asked.until.as_deref().map(until_of).transpose()?;
    let provider = provider_of(asked.provider.as_deref())?;
    let target = what(of, provider.as_deref());
    let (changed, said) = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Loops/Pause", target.clone(), Some(&asked.reason));
            let new = NewPause { of, provider: provider.clone(), until, by: who() };
            let done = bmdb.pause_loop(order, new).await?.done;
            (done.changed, done.said)
        }
        Source::Api(remote) => {
            let until = until.map(|until| match until {
                Until::After(span) => v1::pause_loop_request::Until::After(span.to_string()),
                Until::At(moment) => v1::pause_loop_request::Until::At(prost_types::Timestamp {
                    seconds: moment.timestamp(),
                    nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
                }),
            });
            let give = async |service, order| {
                let request = v1::PauseLoopRequest {
                    name: of.as_str().to_owned(),
                    order: Some(order),
                    provider: provider.clone().unwrap_or_default(),
                    until: until.clone(),
                };
                LoopsClient::new(service).pause(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            (done.changed, done.said)
        }
    };
    told(of, provider.as_deref(), changed, &said, format)
}

/// `loops resume`.
pub async fn resume(source: &Source, asked: &ResumeLoop, format: Format) -> Result<String, CliError> {
    let of: Loop = of(&asked.name)?;
    let reason = asked.reason.as_deref();
    let provider = provider_of(asked.provider.as_deref())?;
    let (changed, said) = match source {
        Source::Direct(bmdb) => {
            let target = what(of, provider.as_deref());
            let order = direct("shepherd.fleet.v1.Loops/Resume", target, reason);
            let done = bmdb.resume_loop(order, of, provider.clone()).await?.done;
            (done.changed, done.said)
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ResumeLoopRequest {
                    name: of.as_str().to_owned(),
                    order: Some(order),
                    provider: provider.clone().unwrap_or_default(),
                };
                LoopsClient::new(service).resume(request).await
            };
            let done = again::order(&mut remote.clone(), reason_or_none(reason), give).await?;
            (done.changed, done.said)
        }
    };
    told(of, provider.as_deref(), changed, &said, format)
}

fn of(name: &str) -> Result<Loop, CliError> {
    name.parse().map_err(|error: crate::model::process::UnknownName| CliError::Wrong(error.to_string()))
}

fn told(
    of: Loop,
    provider: Option<&str>,
    changed: bool,
    said: &str,
    format: Format,
) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({
                "loop": of.as_str(), "provider": provider, "changed": changed, "said": said,
            });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{} {said}", what(of, provider))))),
    }
}
