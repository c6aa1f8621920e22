//! `prioritize`: whose turn comes first.

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::bmdb::action::Until;
use crate::bmdb::each::Each;
use crate::bmdb::find::id_of;
use crate::cli::again;
use crate::cli::error::CliError;
use crate::cli::machine::find;
use crate::cli::many::{MANY, Selection, many};
use crate::cli::operate::{carried, direct, told, until_of, who};
use crate::cli::output::Format;
use crate::cli::source::Source;
use crate::model::priority::Level;
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// A machine to put before or behind the others.
#[derive(Debug, Args)]
pub struct Prioritize {
    /// The machine
    #[arg(value_name = "M", required_unless_present_any = MANY, conflicts_with_all = MANY)]
    pub machine: Option<String>,
    /// Before the others, as the engine decides, or behind them
    #[arg(value_name = "LEVEL", value_parser = PossibleValuesParser::new(Level::ALL.map(Level::as_str)))]
    pub level: String,
    /// Why, for whoever asks `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// When it ends by itself: after a while (2h) or at a moment (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Or many.
    #[command(flatten)]
    pub selection: Selection,
}

/// `prioritize M LEVEL`.
pub async fn prioritize(source: &Source, asked: &Prioritize, format: Format) -> Result<String, CliError> {
    let level: Level =
        asked.level.parse().map_err(|error: UnknownName| CliError::Wrong(error.to_string()))?;
    if asked.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    let until = asked.until.as_deref().map(until_of).transpose()?;
    let each = Each::Prioritize { level, until };
    let Some(machine) = asked.machine.as_deref() else {
        return many(source, &asked.selection, each, Some(&asked.reason), format).await;
    };
    match source {
        Source::Direct(bmdb) => {
            let name = find(bmdb, machine).await?;
            let order = direct(each.rpc(), name.short(), Some(&asked.reason));
            told(name.clone(), bmdb.order_each(order, id_of(&name), each, who()).await?.done, format)
        }
        Source::Api(remote) => {
            let until = until.map(|until| match until {
                Until::After(span) => v1::prioritize_request::Until::After(span.to_string()),
                Until::At(moment) => v1::prioritize_request::Until::At(prost_types::Timestamp {
                    seconds: moment.timestamp(),
                    nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
                }),
            });
            let give = async |service, order| {
                let request = v1::PrioritizeRequest {
                    machine: machine.to_owned(),
                    order: Some(order),
                    level: level.as_str().to_owned(),
                    until: until.clone(),
                };
                MachinesClient::new(service).prioritize(request).await
            };
            carried(again::order(&mut remote.clone(), &asked.reason, give).await?, format)
        }
    }
}
