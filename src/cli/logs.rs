//! `logs M [LOG]`: a log of a machine, or which logs it has.
//!
//! A machine is asked with the answer to its next heartbeat and brings the log itself, so the answer takes a while; whoever
//! waits is told for what. The request is an order like any other: it is in the audit, and its answer may be lost and asked
//! for again. What has come is taken from whichever server of the context answers (`Reader`).

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::Code;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::id_of;
use crate::bmdb::log_request::{Reading, request_of};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::get;
use crate::cli::machine::find;
use crate::cli::operate::{direct, reason_or_none, told, who};
use crate::cli::output::{Format, Output, print_on, say, table, width};
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::cli::tokens::span;
use crate::model::log_request::{DEFAULT_LINES, MOST_LINES, State, There, Wanted};
use crate::model::machine_view::MachineName;
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::logs_client::LogsClient;

/// How often it is looked whether something has come.
const PAUSE: Duration = Duration::from_millis(500);
/// How long servers are tried that do not answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// For how long a wait needs no word.
const WORDLESS: Duration = Duration::from_secs(2);
/// How the audit knows the order.
const RPC: &str = "shepherd.fleet.v1.Logs/Ask";

/// Which log of which machine.
#[derive(Debug, Args)]
pub struct Logs {
    /// The machine
    #[arg(value_name = "M")]
    pub machine: String,
    /// Which log: roleserver, etcd, or ROLE/SERVICE [default: list those that there are]
    #[arg(value_name = "LOG")]
    pub log: Option<String>,
    /// Most lines to show: the last ones that there are
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LINES, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_LINES)))]
    pub lines: u32,
    /// No line that is older than this, by the machine's clock: 10m, 2h
    #[arg(long, value_name = "SPAN", value_parser = span)]
    pub since: Option<Span>,
    /// Go on with what is added, for an hour at the most
    #[arg(long, short, requires = "log")]
    pub follow: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

impl Logs {
    fn wanted(&self) -> Wanted {
        Wanted {
            log: self.log.clone().unwrap_or_default(),
            lines: self.lines,
            since: self.since,
            follow: self.follow,
        }
    }
}

/// What came of asking.
enum Asked {
    /// Nothing is to be read: it was a dry run.
    Said(MachineName, Done),
    /// Something is.
    Read(Box<Reader>),
}

/// Takes what comes of a request.
struct Reader {
    whom: Whom,
    name: MachineName,
    request: Uuid,
    taken: i64,
    /// When somebody answered last.
    answered: Instant,
    begun: Instant,
    told_wait: bool,
}

enum Whom {
    Direct(Bmdb),
    Api(Remote),
}

/// What has come.
struct Came {
    state: State,
    lines: Vec<String>,
    there: Vec<There>,
    note: Option<String>,
}

impl From<Reading> for Came {
    fn from(read: Reading) -> Self {
        let lines = read.lines.lines().map(str::to_owned).collect();
        Self { state: read.state, lines, there: read.there, note: read.note }
    }
}

async fn ask(source: &Source, asked: &Logs) -> Result<Asked, CliError> {
    let wanted = asked.wanted();
    wanted.check().map_err(|(_, said)| CliError::Wrong(said))?;
    let (whom, name, request, done) = match source {
        Source::Direct(bmdb) => {
            let name = find(bmdb, &asked.machine).await?;
            // How often machines call, which decides how long they are waited for.
            bmdb.read_policy().await?;
            let order = direct(RPC, name.short(), asked.reason.as_deref());
            let carried = bmdb.ask_for_log(order, (id_of(&name), name.short()), wanted).await?;
            (Whom::Direct(bmdb.clone()), name, request_of(&carried), carried.done)
        }
        Source::Api(remote) => {
            let mut remote = remote.clone();
            let give = async |service, order| {
                let request = v1::AskLogRequest {
                    machine: asked.machine.clone(),
                    order: Some(order),
                    log: wanted.log.clone(),
                    lines: wanted.lines,
                    since: wanted.since.map(|since| since.to_string()).unwrap_or_default(),
                    follow: wanted.follow,
                };
                LogsClient::new(service).ask(request).await
            };
            let said = again::order(&mut remote, reason_or_none(asked.reason.as_deref()), give).await?;
            let order = said.order.unwrap_or_default();
            let done = Done { changed: order.changed, said: order.said };
            (Whom::Api(remote), remote_read::name(order.name)?, said.request.parse().ok(), done)
        }
    };
    let now = Instant::now();
    Ok(match request.filter(|_| !dry_run::asked()) {
        None => Asked::Said(name, done),
        Some(request) => Asked::Read(Box::new(Reader {
            whom,
            name,
            request,
            taken: 0,
            answered: now,
            begun: now,
            told_wait: false,
        })),
    })
}

impl Reader {
    /// What has come since the last look, once something has or it has ended.
    async fn next(&mut self) -> Result<Came, CliError> {
        loop {
            let came = self.look().await?;
            match &came.state {
                State::Waits(said) => {
                    if !self.told_wait && self.begun.elapsed() > WORDLESS {
                        self.told_wait = true;
                        say(&format!("shepherdctl: waiting for {}: {said}", self.name.short()));
                    }
                }
                State::Comes if came.lines.is_empty() => {}
                State::Comes | State::Ended(_) => return Ok(came),
            }
            sleep(PAUSE).await;
        }
    }

    async fn look(&mut self) -> Result<Came, CliError> {
        loop {
            let looked = match &mut self.whom {
                Whom::Direct(bmdb) => {
                    let read = bmdb.read_log(id_of(&self.name), self.request, who(), self.taken).await?;
                    self.taken = read.taken;
                    return Ok(read.into());
                }
                Whom::Api(remote) => {
                    let request = v1::ReadLogRequest {
                        machine: self.name.machine.to_string(),
                        request: self.request.to_string(),
                        taken: u64::try_from(self.taken).unwrap_or_default(),
                    };
                    LogsClient::new(remote.service()).read(request).await
                }
            };
            let status = match looked {
                Ok(said) => {
                    self.answered = Instant::now();
                    return self.understood(said.into_inner());
                }
                Err(status) => status,
            };
            let broken = std::error::Error::source(&status).is_some();
            let lost = matches!(
                status.code(),
                Code::Unavailable
                    | Code::DeadlineExceeded
                    | Code::Cancelled
                    | Code::Unknown
                    | Code::ResourceExhausted
            );
            if !(broken || lost) || self.answered.elapsed() > PATIENCE {
                return Err(refused(status));
            }
            sleep(PAUSE).await;
            if let Whom::Api(remote) = &mut self.whom {
                // One that is not there either is told by the next try.
                let _ = remote.go_on().await;
            }
        }
    }

    fn understood(&mut self, said: v1::ReadLogResponse) -> Result<Came, CliError> {
        self.taken = i64::try_from(said.taken).unwrap_or(i64::MAX);
        let why = Some(said.said).filter(|said| !said.is_empty());
        let state = match said.state.as_str() {
            "waiting" => State::Waits(why.unwrap_or_default()),
            "coming" => State::Comes,
            "ended" => State::Ended(why),
            other => {
                return Err(CliError::Failed(format!(
                    "the API says that the request is {other:?}, which this shepherdctl does not know; update it"
                )));
            }
        };
        Ok(Came {
            state,
            lines: said.lines,
            there: said.logs.into_iter().map(|log| There { log: log.log, bytes: log.bytes }).collect(),
            note: Some(said.note).filter(|note| !note.is_empty()),
        })
    }

    /// Says that all of it has come, so that it is not kept any longer.
    async fn done(&mut self) {
        // What cannot be said now is forgotten by itself.
        if self.taken > 0 {
            let _ = tokio::time::timeout(PAUSE * 4, self.look()).await;
        }
    }

    fn failed(&self, said: &str) -> CliError {
        CliError::Failed(format!("{}: {said}", self.name.short()))
    }
}

/// `logs M`, to its end.
pub async fn logs(source: &Source, asked: &Logs, format: Format) -> Result<String, CliError> {
    let mut reader = match ask(source, asked).await? {
        Asked::Said(name, done) => return told(name, done, format),
        Asked::Read(reader) => reader,
    };
    let (mut lines, mut last) = (Vec::new(), None);
    while last.is_none() {
        let mut came = reader.next().await?;
        lines.append(&mut came.lines);
        if let State::Ended(failed) = came.state.clone() {
            last = Some((failed, came));
        }
    }
    reader.done().await;
    let Some((failed, came)) = last else { return Ok(String::new()) };
    if let Some(said) = failed {
        if format == Format::Table {
            // What has come is worth having.
            print_on(&text(&lines))?;
        }
        return Err(reader.failed(&said));
    }
    let named = &reader.name;
    match (&asked.log, format) {
        (None, Format::Json) => get::json(&json!({
            "machine": named.machine, "provider": named.provider, "provider_id": named.provider_id, "logs": came.there,
        })),
        (None, Format::Table) if came.there.is_empty() => Ok(format!("{} has no log yet\n", named.short())),
        (None, Format::Table) => {
            let rows: Vec<_> =
                came.there.iter().map(|there| vec![there.log.clone(), there.bytes.to_string()]).collect();
            Ok(table(&["LOG", "BYTES"], &rows, width()))
        }
        (Some(log), Format::Json) => get::json(&json!({
            "machine": named.machine, "provider": named.provider, "provider_id": named.provider_id, "log": log,
            "lines": lines, "note": came.note,
        })),
        (Some(_), Format::Table) => {
            note(came.note.as_deref());
            Ok(text(&lines))
        }
    }
}

/// `logs M LOG --follow`: prints what comes as it comes.
pub async fn follow(source: &Source, asked: &Logs, output: Output) -> Result<(), CliError> {
    if output == Output::Yaml {
        return Err(CliError::Wrong(
            "what is followed has no end, and YAML needs one; say -o json".to_owned(),
        ));
    }
    let mut reader = match ask(source, asked).await? {
        Asked::Said(name, done) => {
            print_on(&told(name, done, output.format())?)?;
            return Ok(());
        }
        Asked::Read(reader) => reader,
    };
    let mut noted = false;
    loop {
        let came = reader.next().await?;
        if !noted {
            noted = true;
            note(came.note.as_deref());
        }
        let shown = match output.format() {
            Format::Table => text(&came.lines),
            Format::Json => {
                let objects: Vec<String> =
                    came.lines.iter().map(|line| json!({ "line": line }).to_string()).collect();
                text(&objects)
            }
        };
        // A reader that has gone away wants no more.
        if !print_on(&shown)? {
            return Ok(());
        }
        match came.state {
            State::Ended(None) => return Ok(()),
            State::Ended(Some(said)) => return Err(reader.failed(&said)),
            State::Waits(_) | State::Comes => {}
        }
        sleep(PAUSE).await;
    }
}

fn text(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}

fn note(note: Option<&str>) {
    if let Some(note) = note {
        say(&format!("shepherdctl: {note}"));
    }
}
