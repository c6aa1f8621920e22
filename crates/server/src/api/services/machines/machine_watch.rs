//! Machine watch: snapshot, changes, bookmarks and resume tokens.
//!
//! A watch is a task that reads every second which machines have new history, and sends those whose state differs from
//! the one that it sent before. A line of history has the time of its writing but becomes visible when its transaction
//! commits. So each read starts some seconds before the end of the previous one. A transaction may take longer still,
//! so all machines are read again every few minutes. A watch is therefore eventually correct whatever it missed in
//! between, and a resume token, for this shepherd or another, is only a time.
//!
//! A watch ends when the client is gone or reads too slowly; when the server stops; when its credential is revoked or
//! expires, or cannot be checked for too long; and when the database is away for longer than a failover takes. After
//! any end except that of the server, no further message is sent (see [`closing_stream`]): each message that was sent
//! had its own resume token.
//!
//! [`closing_stream`]: crate::api::closing_stream

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::DateTime;
use futures::future::BoxFuture;
use prost::Message as _;
use sqlx::PgConnection;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, error_status, invalid_argument};
use crate::api::caller::Caller;
use crate::api::closing_stream::{Close, ClosingStream, closing_stream};
use crate::api::context::ApiContext;
use crate::api::convert::{self, encode_timestamp};
use crate::api::stream_end::{StreamEnd, is_transient, send_within, wait_for_credential_end};
use bmdb::connection;
use bmdb::connection::error::BmdbError;
use bmdb::fleet::listing::{self, ChangesUntil, Filter, ListedMachine, PageBudget};
use bmdb::fleet::machine_walk::MachineCursor;
use model::time::{Timestamp, before};
use proto::fleet::v1;
use proto::fleet::v1::watch_machines_response::Event;

/// Interval between two reads of the history.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long before the end of the last read the next one starts.
const OVERLAP: Duration = Duration::from_secs(5);
/// Interval between two reads of all machines.
const FULL_SCAN_INTERVAL: Duration = Duration::from_mins(5);
/// Oldest resume token that is accepted.
const MAX_RESUME_AGE: Duration = Duration::from_hours(1);
/// Longest silence of a stream; then it sends a bookmark.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(5);
/// How long the database may be away, or too busy.
const DATABASE_OUTAGE_LIMIT: Duration = Duration::from_secs(30);
/// Number of buffered messages, and the longest wait for space in the buffer.
const BUFFER_SIZE: usize = 64;
const SEND_TIMEOUT: Duration = Duration::from_mins(1);
/// Most lines of history in one read.
const MAX_HISTORY_LINES: i64 = 5000;
/// Machines of a page, and of one read by id.
const PAGE_SIZE: usize = 500;
const MAX_EXAMINED: usize = 2000;
/// Instead of a digest: the removal of the machine was sent.
const REMOVED_DIGEST: u64 = 0;

/// The response stream of a watch.
pub type MachineWatchStream = ClosingStream<v1::WatchMachinesResponse>;

/// Parses a resume token; `None` starts from the beginning.
pub fn parse_resume_token(text: &str) -> Result<Option<Timestamp>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let read = || {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        DateTime::from_timestamp_micros(text.strip_prefix("watch ")?.parse().ok()?)
    };
    read().map(Some).ok_or_else(|| {
        invalid_argument(
            "resume_token",
            "this is not a resume token; give `resume_token` of an earlier watch",
        )
    })
}

fn encode_resume_token(until: Timestamp) -> String {
    URL_SAFE_NO_PAD.encode(format!("watch {}", until.timestamp_micros()))
}

/// Starts a watch for the caller, from the beginning or at `resume`.
pub fn start_watch(
    context: ApiContext,
    caller: Caller,
    filter: Filter,
    resume: Option<Timestamp>,
) -> Result<MachineWatchStream, Status> {
    let credential = caller.credential_id();
    let permit = context.watch_limits.acquire(credential)?;
    let (sender, close, stream) = closing_stream(BUFFER_SIZE);
    let (stop, ending, probe) = (context.stop.clone(), context.clone(), sender.clone());
    let identity = caller.clone();
    let watch = MachineWatch {
        context,
        caller,
        filter,
        resumed: resume.is_some(),
        sent: HashMap::new(),
        sender,
        last_sent_at: Instant::now(),
    };
    tokio::spawn(async move {
        let ended = stop.run_until_cancelled(async {
            tokio::select! {
                end = Box::pin(watch.run(resume)) => end,
                // Checked concurrently, because sending may wait for the client.
                end = wait_for_credential_end(&ending, credential) => end,
                () = probe.closed() => StreamEnd::ClientGone,
            }
        });
        let ended = ended.await;
        drop(permit);
        let end = match ended {
            None => {
                let text = "this shepherd is stopping; resume at another one";
                Close::AfterDrain(error_status(Code::Unavailable, "UNAVAILABLE", text))
            }
            Some(StreamEnd::ClientGone) => return,
            Some(StreamEnd::Failed(status)) => Close::Now(identity.reveal_cause(status)),
        };
        // The send fails only if the client is gone.
        drop(close.send(end));
    });
    Ok(stream)
}

struct MachineWatch {
    context: ApiContext,
    caller: Caller,
    filter: Filter,
    resumed: bool,
    /// Digest of the state that was last sent of each machine.
    sent: HashMap<Uuid, u64>,
    sender: mpsc::Sender<v1::WatchMachinesResponse>,
    /// When the last message was sent.
    last_sent_at: Instant,
}

impl MachineWatch {
    async fn run(mut self, resume: Option<Timestamp>) -> StreamEnd {
        let Err(end) = self.run_until_end(resume).await;
        end
    }

    async fn run_until_end(
        &mut self,
        resume: Option<Timestamp>,
    ) -> Result<std::convert::Infallible, StreamEnd> {
        let mut until = match resume {
            Some(until) => self.check_resume_age(until).await?,
            None => self.send_all(String::new()).await?,
        };
        let mut next_full_scan = Instant::now() + FULL_SCAN_INTERVAL;
        self.send_bookmark(until).await?;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            until = self.send_changes(until).await?;
            if Instant::now() >= next_full_scan {
                self.send_all(encode_resume_token(until)).await?;
                next_full_scan = Instant::now() + FULL_SCAN_INTERVAL;
            }
            if self.last_sent_at.elapsed() >= BOOKMARK_INTERVAL {
                self.send_bookmark(until).await?;
            }
        }
    }

    /// Reads from the database, and retries while it is away or too busy.
    async fn read_with_retry<A, T, F>(&self, arguments: A, body: F) -> Result<T, StreamEnd>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        let (shared, began) = (Arc::new((arguments, body)), Instant::now());
        loop {
            let read = self.context.read_pool.read_with(shared.clone(), |tx, shared| {
                let (arguments, body) = &**shared;
                body(tx, arguments)
            });
            let status = match read.await {
                Ok(seen) => return Ok(seen),
                Err(error) => bmdb_status(error),
            };
            if !is_transient(status.code(), began.elapsed(), DATABASE_OUTAGE_LIMIT) {
                return Err(StreamEnd::Failed(status));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the time at which to resume. Rejects a token so old that starting again costs less, or that history may
    /// no longer cover.
    async fn check_resume_age(&self, resume: Timestamp) -> Result<Timestamp, StreamEnd> {
        let now = self.read_with_retry((), |tx, ()| Box::pin(connection::database_now(tx))).await?;
        if resume < before(now, MAX_RESUME_AGE) {
            let text = format!(
                "this watch ended more than {} minutes ago; start again, without a resume token",
                MAX_RESUME_AGE.as_secs() / 60
            );
            return Err(StreamEnd::Failed(error_status(Code::OutOfRange, "RESUME_TOKEN_EXPIRED", text)));
        }
        Ok(resume)
    }

    /// Sends every machine whose state differs from the one sent before, and the removals. Returns the time from which
    /// to read changes.
    ///
    /// A resumed watch sends each machine once here. It cannot know what differs from the state that the earlier watch
    /// sent: not every visible change of a machine writes a line of history.
    async fn send_all(&mut self, resume: String) -> Result<Timestamp, StreamEnd> {
        let (mut after, mut began): (Option<MachineCursor>, Option<Timestamp>) = (None, None);
        let mut seen: HashSet<Uuid> = HashSet::new();
        loop {
            let arguments = (self.filter.clone(), self.caller.scope().clone(), after);
            let read = self.read_with_retry(arguments, |tx, (filter, scope, from)| {
                Box::pin(async move {
                    let (now, enough) =
                        (connection::database_now(tx).await?, PageBudget::with_time_limit(MAX_EXAMINED));
                    Ok((
                        listing::list_machines(tx, filter, scope, from.as_ref(), PAGE_SIZE, enough).await?,
                        now,
                    ))
                })
            });
            let (page, now) = read.await?;
            began.get_or_insert(now);
            for listed in &page.machines {
                self.send_machine(listed, &resume).await?;
                seen.insert(listed.summary.name.machine);
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // A machine that begins to match while the list is read may be missing from the list. Its change is in the
        // history, which is read from the start of the list.
        let from = began.map_or(Timestamp::MIN_UTC, |began| before(began, OVERLAP));
        let missing = self
            .sent
            .iter()
            .filter(|(machine, digest)| **digest != REMOVED_DIGEST && !seen.contains(*machine));
        let missing: Vec<Uuid> = missing.map(|(machine, _)| *machine).collect();
        for chunk in missing.chunks(PAGE_SIZE) {
            self.send_differences(chunk, &resume).await?;
        }
        Ok(from)
    }

    /// Sends the changes since `from`, and returns the time up to which they are complete.
    async fn send_changes(&mut self, from: Timestamp) -> Result<Timestamp, StreamEnd> {
        let mut begin = before(from, OVERLAP);
        loop {
            let read = self.read_with_retry(begin, |tx, begin| {
                Box::pin(async move {
                    let now = connection::database_now(tx).await?;
                    listing::list_changed_machines(tx, (*begin, now), MAX_HISTORY_LINES).await
                })
            });
            let (machines, until) = read.await?;
            for chunk in machines.chunks(PAGE_SIZE) {
                self.send_differences(chunk, &encode_resume_token(from)).await?;
            }
            match until {
                ChangesUntil::Complete(now) => return Ok(now),
                ChangesUntil::Truncated(at) => begin = at,
            }
        }
    }

    /// Reads these machines again, and sends those that differ from what was sent.
    async fn send_differences(&mut self, machines: &[Uuid], resume: &str) -> Result<(), StreamEnd> {
        let lines = self.read_machines(self.filter.clone(), machines.to_vec()).await?;
        for listed in &lines {
            self.send_machine(listed, resume).await?;
        }
        let rest: Vec<Uuid> = {
            let matching: HashSet<Uuid> = lines.iter().map(|listed| listed.summary.name.machine).collect();
            machines.iter().filter(|machine| !matching.contains(machine)).copied().collect()
        };
        // A resumed watch does not know what the earlier watch sent.
        let unknown: Vec<Uuid> =
            rest.iter().filter(|machine| self.resumed && !self.sent.contains_key(machine)).copied().collect();
        let in_scope = self.machines_in_scope(unknown).await?;
        for machine in rest {
            let was_sent = self.sent.get(&machine).is_some_and(|digest| *digest != REMOVED_DIGEST);
            if was_sent || in_scope.contains(&machine) {
                self.sent.insert(machine, REMOVED_DIGEST);
                self.send(Event::RemovedMachine(machine.to_string()), resume.to_owned()).await?;
            }
        }
        Ok(())
    }

    /// Those of `machines` in the scope of the credential, whether the filter matches or not.
    async fn machines_in_scope(&self, machines: Vec<Uuid>) -> Result<HashSet<Uuid>, StreamEnd> {
        if machines.is_empty() {
            return Ok(HashSet::new());
        }
        let lines = self.read_machines(Filter::default(), machines).await?;
        Ok(lines.into_iter().map(|listed| listed.summary.name.machine).collect())
    }

    /// Those of `machines` in the scope of the credential that match `filter`.
    async fn read_machines(
        &self,
        filter: Filter,
        machines: Vec<Uuid>,
    ) -> Result<Vec<ListedMachine>, StreamEnd> {
        let arguments = (filter, self.caller.scope().clone(), machines);
        let read = self.read_with_retry(arguments, |tx, (filter, scope, machines)| {
            Box::pin(listing::list_machines_by_id(tx, filter, scope, machines))
        });
        read.await
    }

    /// Sends a machine unless the same state was sent before.
    async fn send_machine(&mut self, listed: &ListedMachine, resume: &str) -> Result<(), StreamEnd> {
        let machine = convert::encode_machine(listed);
        let digest = machine_digest(&machine, listed.timer);
        if self.sent.insert(listed.summary.name.machine, digest) == Some(digest) {
            return Ok(());
        }
        self.send(Event::Machine(machine), resume.to_owned()).await
    }

    async fn send_bookmark(&mut self, until: Timestamp) -> Result<(), StreamEnd> {
        let bookmark = v1::Bookmark { read_at: Some(encode_timestamp(until)) };
        self.send(Event::Bookmark(bookmark), encode_resume_token(until)).await
    }

    async fn send(&mut self, what: Event, resume: String) -> Result<(), StreamEnd> {
        self.last_sent_at = Instant::now();
        let response = v1::WatchMachinesResponse { event: Some(what), resume_token: resume };
        send_within(&self.sender, response, SEND_TIMEOUT).await
    }
}

/// Digest of the state whose change is sent: everything except the heartbeat, and except the time that each heartbeat
/// postpones.
fn machine_digest(machine: &v1::Machine, timer: bool) -> u64 {
    let mut compared = v1::Machine { heartbeat_at: None, ..machine.clone() };
    if timer {
        compared.ready_at = None;
    }
    let mut hasher = DefaultHasher::new();
    (timer, compared.encode_to_vec()).hash(&mut hasher);
    hasher.finish().max(REMOVED_DIGEST + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_token_round_trips() {
        let moment: Timestamp = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        assert_eq!(parse_resume_token(&encode_resume_token(moment)).unwrap(), Some(moment));
        assert_eq!(parse_resume_token("").unwrap(), None);
        for odd in ["x", "d2F0Y2gg"] {
            assert!(parse_resume_token(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn heartbeat_alone_is_no_change() {
        let moment = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let machine = v1::Machine { phase: "Ready".into(), ready_at: moment(1), ..Default::default() };
        let beaten = v1::Machine { heartbeat_at: moment(1), ..machine.clone() };
        let armed_again = v1::Machine { ready_at: moment(2), ..machine.clone() };
        let silent = v1::Machine { phase: "Silent".into(), ..machine.clone() };
        for (name, other, timer, same) in [
            ("a heartbeat", &beaten, true, true),
            ("a heartbeat where nothing waits for silence", &beaten, false, true),
            ("a timer that a heartbeat put off", &armed_again, true, true),
            ("another moment that is no timer's", &armed_again, false, false),
            ("another phase", &silent, true, false),
        ] {
            assert_eq!(machine_digest(&machine, timer) == machine_digest(other, timer), same, "{name}");
        }
        assert_ne!(machine_digest(&machine, true), machine_digest(&machine, false), "it is due for good");
    }
}
