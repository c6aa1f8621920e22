//! `watch`: the machines there are, and then a line for each that changes.
//!
//! A shepherd tells it ([`MachinesClient::watch`]), with a place to resume at. When that shepherd stops, or its
//! host dies, the watch goes on at the next server of the context, for as long as [`next`] has patience.
//! Whoever resumes is told each machine once more within some minutes; what looks as it did is not said again.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::inspect::MachineLine;
use crate::cli::error::CliError;
use crate::cli::filter::Filters;
use crate::cli::output::{Output, print_on, say};
use crate::cli::remote::{Remote, refused};
use crate::cli::source::Source;
use crate::cli::{remote_read, yaml};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;
use crate::proto::fleet::v1::watch_machines_response::What;

/// Longest silence of a shepherd that tells a watch: it says `quiet` every few seconds.
const SILENCE: Duration = Duration::from_secs(30);
/// How long servers are tried that do not answer.
const PATIENCE: Duration = Duration::from_mins(5);
/// The first wait before the next server is tried; each of the others is twice the one before it, up to the last.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Which machines are watched.
#[derive(Debug, Args)]
pub struct Watch {
    /// Which.
    #[command(flatten)]
    pub filters: Filters,
}

/// What follows the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It was refused: that is the answer.
    Heed,
    /// Begin anew, without a place to resume at.
    Anew,
    /// Resume at the next server after this wait.
    GoOn(Duration),
    /// Nobody has answered for too long.
    GiveUp,
}

/// Decides what follows the end of a stream with that code. `broken` is whether this side made the status,
/// because the connection ended; `failures` counts servers in a row that told nothing, and `unheard` is how
/// long ago something was told last.
#[must_use]
pub fn next(code: Code, broken: bool, failures: u32, unheard: Duration) -> Next {
    let passes = matches!(
        code,
        Code::Ok
            | Code::Unavailable
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            // Too many watches there, or we read too slowly.
            | Code::ResourceExhausted
    );
    match code {
        Code::OutOfRange => Next::Anew,
        _ if !passes && !broken => Next::Heed,
        _ if unheard >= PATIENCE => Next::GiveUp,
        _ => Next::GoOn(FIRST_WAIT.saturating_mul(1 << failures.min(10)).min(LAST_WAIT)),
    }
}

/// What was said of each machine, and what the present stream has told.
#[derive(Default)]
struct Seen {
    machines: HashMap<Uuid, MachineLine>,
    told_here: HashSet<Uuid>,
}

impl Seen {
    /// Another stream begins.
    fn begin(&mut self) {
        self.told_here.clear();
    }

    /// Whether this is news: it is what the stream that said the last of it tells; another one may repeat it.
    fn is_news(&mut self, line: &MachineLine) -> bool {
        let machine = line.name.machine;
        let steady = MachineLine { heartbeat_at: None, ready_at: None, ..line.clone() };
        let again = self.told_here.insert(machine);
        let same = self.machines.get(&machine) == Some(&steady);
        self.machines.insert(machine, steady);
        !(again && same)
    }

    /// Whether it was said to be there.
    fn forget(&mut self, machine: Uuid) -> bool {
        self.told_here.remove(&machine);
        self.machines.remove(&machine).is_some()
    }

    /// Machines of which a stream that began anew told nothing, once it told all.
    fn missing(&self) -> Vec<Uuid> {
        self.machines.keys().filter(|machine| !self.told_here.contains(machine)).copied().collect()
    }
}

/// A line for programs.
#[derive(Serialize)]
struct Line<'a> {
    /// `machine` or `gone`.
    event: &'static str,
    #[serde(flatten)]
    there: Option<&'a MachineLine>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "machine")]
    gone: Option<Uuid>,
}

/// Why a stream is over.
enum End {
    /// Nobody reads what is printed.
    ReaderGone,
    Status(Status),
    Error(CliError),
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<CliError> for End {
    fn from(error: CliError) -> Self {
        Self::Error(error)
    }
}

/// `watch`: prints until nobody reads it any more.
pub async fn watch(source: &Source, filters: &Watch, output: Output) -> Result<(), CliError> {
    let Source::Api(remote) = source else {
        return Err(CliError::Wrong(
            "`watch` is told by a shepherd: give a context (--context NAME) instead of a database; `shepherdctl \
             tokens bootstrap --save_context` makes one"
                .to_owned(),
        ));
    };
    let mut watching = Watching {
        remote: remote.clone(),
        filter: filters.filters.message(),
        output,
        seen: Seen::default(),
        resume: String::new(),
        heard: Instant::now(),
        failures: 0,
    };
    loop {
        let status = match watching.follow().await {
            Err(End::ReaderGone) => return Ok(()),
            Err(End::Error(error)) => return Err(error),
            Err(End::Status(status)) => status,
            Ok(()) => Status::unavailable("it ended without a word"),
        };
        watching.after(status).await?;
    }
}

struct Watching {
    remote: Remote,
    filter: v1::MachineFilter,
    output: Output,
    seen: Seen,
    /// Where to go on; empty at the beginning.
    resume: String,
    heard: Instant,
    failures: u32,
}

impl Watching {
    /// Prints what one stream tells.
    async fn follow(&mut self) -> Result<(), End> {
        let (filter, resume) = (Some(self.filter.clone()), self.resume.clone());
        let mut complete = !resume.is_empty();
        self.seen.begin();
        let request = v1::WatchMachinesRequest { filter, resume };
        let mut stream = MachinesClient::new(self.remote.service()).watch(request).await?.into_inner();
        loop {
            let said = timeout(SILENCE, stream.message()).await;
            let said = said.unwrap_or_else(|_| Err(Status::deadline_exceeded("it fell silent")))?;
            let Some(said) = said else { return Ok(()) };
            (self.heard, self.failures) = (Instant::now(), 0);
            match said.what {
                Some(What::Machine(machine)) => {
                    let line = remote_read::machine(machine)?;
                    if self.seen.is_news(&line) {
                        self.tell(&line)?;
                    }
                }
                Some(What::Gone(machine)) => {
                    let machine = remote_read::id(&machine, "a machine's id")?;
                    self.tell_gone(machine)?;
                }
                Some(What::Quiet(_)) if !complete => {
                    complete = true;
                    for machine in self.seen.missing() {
                        self.tell_gone(machine)?;
                    }
                }
                Some(What::Quiet(_)) | None => {}
            }
            if !said.resume.is_empty() {
                self.resume = said.resume;
            }
        }
    }

    fn tell(&self, line: &MachineLine) -> Result<(), End> {
        let text = match self.output {
            Output::Table => row(line),
            Output::Json | Output::Yaml => {
                self.document(&Line { event: "machine", there: Some(line), gone: None })?
            }
        };
        put(&text)
    }

    fn tell_gone(&mut self, machine: Uuid) -> Result<(), End> {
        if !self.seen.forget(machine) {
            return Ok(());
        }
        let text = match self.output {
            Output::Table => format!("{:.8}  {:<24}  gone, or no longer meant\n", machine.to_string(), "-"),
            Output::Json | Output::Yaml => {
                self.document(&Line { event: "gone", there: None, gone: Some(machine) })?
            }
        };
        put(&text)
    }

    fn document(&self, line: &Line<'_>) -> Result<String, CliError> {
        Ok(match self.output {
            Output::Yaml => format!("---\n{}", yaml::document(&serde_json::to_value(line)?)),
            Output::Table | Output::Json => format!("{}\n", serde_json::to_string(line)?),
        })
    }

    /// Makes ready for the next stream, or says why there is none.
    async fn after(&mut self, status: Status) -> Result<(), CliError> {
        let broken = std::error::Error::source(&status).is_some();
        match next(status.code(), broken, self.failures, self.heard.elapsed()) {
            Next::Heed => return Err(refused(status)),
            Next::GiveUp => {
                return Err(CliError::Failed(format!(
                    "no server of this context has told anything for {} minutes (the last one: {}); watch again when \
                     one answers",
                    PATIENCE.as_secs() / 60,
                    status.message()
                )));
            }
            Next::Anew => self.resume.clear(),
            Next::GoOn(wait) => {
                self.failures += 1;
                let was = self.remote.server().to_owned();
                sleep(wait).await;
                // Where that fails so does the next stream, which says so.
                let went_on = self.remote.go_on().await;
                let why =
                    went_on.err().map_or_else(|| status.message().to_owned(), |error| error.to_string());
                say(&format!(
                    "shepherdctl: the watch at {was} ended ({why}); going on at {}",
                    self.remote.server()
                ));
            }
        }
        Ok(())
    }
}

/// A machine as a line of a log.
fn row(line: &MachineLine) -> String {
    let why = match &line.working {
        Some(process) => format!("{process} is under way"),
        None => line.reason.clone(),
    };
    let name = if line.name.provider_id.is_some() { line.name.short() } else { "-".to_owned() };
    let since = line.phase_since.format("%Y-%m-%d %H:%M:%S");
    let why = why.replace(['\n', '\r', '\t'], " ");
    format!("{:.8}  {name:<24}  {:<16}  since {since}  {why}\n", line.name.machine.to_string(), line.phase)
}

fn put(text: &str) -> Result<(), End> {
    match print_on(text) {
        Ok(true) => Ok(()),
        Ok(false) => Err(End::ReaderGone),
        Err(error) => Err(End::Error(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::machine_view::MachineName;
    use crate::model::time::Timestamp;

    #[test]
    fn what_passes_is_gone_on_with_for_a_while() {
        let (millis, long) = (Duration::from_millis, PATIENCE);
        for (code, broken, failures, unheard, expected) in [
            (Code::Unavailable, false, 0, millis(0), Next::GoOn(millis(200))),
            (Code::Ok, false, 0, millis(0), Next::GoOn(millis(200))),
            (Code::Unknown, true, 2, millis(0), Next::GoOn(millis(800))),
            (Code::DeadlineExceeded, false, 99, millis(0), Next::GoOn(LAST_WAIT)),
            (Code::ResourceExhausted, false, 1, millis(0), Next::GoOn(millis(400))),
            (Code::Internal, true, 0, millis(0), Next::GoOn(millis(200))),
            (Code::Internal, false, 0, millis(0), Next::Heed),
            (Code::Unauthenticated, false, 0, millis(0), Next::Heed),
            (Code::InvalidArgument, false, 0, long, Next::Heed),
            (Code::OutOfRange, false, 0, long, Next::Anew),
            (Code::Unavailable, false, 3, long, Next::GiveUp),
        ] {
            assert_eq!(next(code, broken, failures, unheard), expected, "{code:?} {broken} {failures}");
        }
    }

    fn line(number: u128, phase: &str) -> MachineLine {
        let name = MachineName { machine: Uuid::from_u128(number), provider: None, provider_id: None };
        MachineLine {
            name,
            phase: phase.to_owned(),
            phase_since: Timestamp::UNIX_EPOCH,
            address: None,
            location: None,
            heartbeat_at: None,
            working: None,
            process: None,
            ready_at: None,
            reason: "because\nof that".to_owned(),
            labels: crate::model::label::Labels::new(),
            priority: None,
        }
    }

    #[test]
    fn another_stream_says_again_only_what_looks_otherwise() {
        let mut seen = Seen::default();
        assert!(seen.is_news(&line(1, "Ready")) && seen.is_news(&line(2, "Ready")));
        assert!(seen.is_news(&line(1, "Silent")));
        seen.begin();
        let heard = MachineLine { heartbeat_at: Some(Timestamp::UNIX_EPOCH), ..line(1, "Silent") };
        assert!(!seen.is_news(&heard), "nothing but a heartbeat is other");
        assert!(seen.is_news(&heard), "the same stream tells what it knows to be other");
        assert_eq!(seen.missing(), [Uuid::from_u128(2)]);
        assert!(seen.forget(Uuid::from_u128(2)) && !seen.forget(Uuid::from_u128(2)));
        assert!(seen.is_news(&line(2, "New")), "it is back");
    }

    #[test]
    fn line_is_one_line() {
        let text = row(&line(1, "Ready"));
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.ends_with("because of that\n"), "{text}");
    }
}
