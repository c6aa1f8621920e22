//! `timeline`: what happened to one machine, newest first, because an operator
//! reads from the top and asks about the last thing.

use std::fmt::Write as _;

use serde::Serialize;

use crate::bmdb::find::id_of;
use crate::bmdb::inspect::{self, HistoryLine};
use crate::cli::error::CliError;
use crate::cli::get::{json, page_of};
use crate::cli::machine::find;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::machine_view::MachineName;
use crate::proto::fleet::v1::TimelineRequest;
use crate::proto::fleet::v1::machines_client::MachinesClient;

#[derive(Serialize)]
struct TimelineAnswer {
    #[serde(flatten)]
    name: MachineName,
    /// Newest first.
    events: Vec<HistoryLine>,
    more: bool,
}

/// `timeline M`.
pub async fn timeline(
    source: &Source,
    machine: &str,
    limit: u32,
    format: Format,
) -> Result<String, CliError> {
    let (name, events, more) = match source {
        Source::Direct(bmdb) => {
            let name = find(bmdb, machine).await?;
            let id = id_of(&name);
            let mut events = bmdb
                .inspect(move |tx| {
                    Box::pin(async move { inspect::history(tx, id, None, i64::from(limit) + 1).await })
                })
                .await?;
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let more = events.len() > limit;
            events.truncate(limit);
            (name, events, more)
        }
        Source::Api(remote) => ask(remote, machine, limit).await?,
    };
    if format == Format::Json {
        return json(&TimelineAnswer { name, events, more });
    }
    if events.is_empty() {
        return Ok(format!(
            "nothing has happened to {} yet, or longer ago than history is kept\n",
            name.short()
        ));
    }
    let mut text = table(&HEADERS, &rows(&events), width());
    if more {
        let _ = write!(text, "\nthe newest {}, and there are older ones: raise --limit\n", events.len());
    }
    Ok(text)
}

async fn ask(
    remote: &Remote,
    machine: &str,
    limit: u32,
) -> Result<(MachineName, Vec<HistoryLine>, bool), CliError> {
    let mut client = MachinesClient::new(remote.service());
    let (mut events, mut page_token) = (Vec::new(), String::new());
    loop {
        let machine = machine.to_owned();
        let request = TimelineRequest { machine, limit: page_of(limit, events.len()), page_token };
        let page = client.timeline(request).await.map_err(refused)?.into_inner();
        for said in page.events {
            events.push(remote_read::event(said)?);
        }
        page_token = page.next_page_token;
        if page_of(limit, events.len()) == 0 || page_token.is_empty() {
            return Ok((remote_read::name(page.name)?, events, !page_token.is_empty()));
        }
    }
}

/// Headers of a table of events.
pub const HEADERS: [&str; 5] = ["AT (UTC)", "EVENT", "WORK", "BY", "DETAIL"];

/// Events as rows under [`HEADERS`].
#[must_use]
pub fn rows(events: &[HistoryLine]) -> Vec<Vec<String>> {
    events
        .iter()
        .map(|line| {
            let work = match (&line.process, line.fence) {
                (Some(process), Some(fence)) => format!("{process} #{fence}"),
                _ => "-".to_owned(),
            };
            let by = match (&line.component, &line.host) {
                (Some(component), Some(host)) => format!("{component}@{host}"),
                (Some(component), None) => component.clone(),
                _ => "-".to_owned(),
            };
            let at = line.at.format("%Y-%m-%d %H:%M:%S%.3f").to_string();
            vec![at, line.event.clone(), work, by, line.detail.clone().unwrap_or_default()]
        })
        .collect()
}
