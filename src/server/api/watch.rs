//! Watching machines: first those there are, then each that changes.
//!
//! A watch is a task that looks every second where history was written since, and tells the machines that
//! look different from what it told before. History is dated when it is written and seen when that commits,
//! so each look begins some seconds before the last one ended; and because a transaction may take longer
//! still, everything is looked at again every few minutes. What a watch says is therefore true in the end
//! whatever it missed in between, and where it resumes, at this shepherd or another, is only a moment.
//!
//! It ends when nobody listens, or reads too slowly; when the server does; when its credential is revoked or
//! expires, or nobody can say whether it was; and when the database is away for longer than it takes one to
//! come back. After any end but the server's, nothing more is heard of it (see [`farewell`]): a place to
//! resume at was told with whatever was heard.
//!
//! [`farewell`]: crate::server::api::farewell

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
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::time::Instant;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::bmdb::listing::{self, Cursor, Enough, Filter, Listed, Until};
use crate::model::time::{Timestamp, before};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::watch_machines_response::What;
use crate::server::api::convert::{self, at};
use crate::server::api::door::Caller;
use crate::server::api::farewell::{Farewell, Telling, telling};
use crate::server::api::refusal::{of_bmdb, refused, wrong};
use crate::server::api::site::Site;

/// How often a watch looks.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long before the end of the last look the next one begins.
const OVERLAP: Duration = Duration::from_secs(5);
/// How often all machines are looked at again.
const ALL_AGAIN: Duration = Duration::from_mins(5);
/// How long after it ended a watch may go on.
const RESUMED_WITHIN: Duration = Duration::from_hours(1);
/// Longest silence of a stream.
const QUIET: Duration = Duration::from_secs(5);
/// For how long the database may be away, or too busy.
const AWAY: Duration = Duration::from_secs(30);
/// For how long it may be unknown whether the credential is good.
const UNSURE: Duration = Duration::from_secs(10);
/// Messages that wait for whoever reads, and how long the next one waits for room.
const ROOM: usize = 64;
const READ_WITHIN: Duration = Duration::from_mins(1);
/// Lines of history read at once.
const LINES: i64 = 5000;
/// Machines of a page, and those looked at for it.
const PAGE: usize = 500;
const LOOKED_AT: usize = 2000;
/// In the place of a digest: that the machine is gone was told.
const GONE: u64 = 0;

/// What a watch is heard as.
pub type Watched = Telling<v1::WatchMachinesResponse>;

/// Reads where a watch is to go on; `None` is at the beginning.
pub fn read_resume(text: &str) -> Result<Option<Timestamp>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let read = || {
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
        DateTime::from_timestamp_micros(text.strip_prefix("watch ")?.parse().ok()?)
    };
    read()
        .map(Some)
        .ok_or_else(|| wrong("resume", "this is no place to resume at; give what an earlier watch said"))
}

fn write_resume(until: Timestamp) -> String {
    URL_SAFE_NO_PAD.encode(format!("watch {}", until.timestamp_micros()))
}

/// Starts a watch.
pub fn start(
    site: Site,
    caller: Caller,
    filter: Filter,
    resume: Option<Timestamp>,
) -> Result<Watched, Status> {
    let credential = caller.credential().id;
    let permit = site.watches.begin(credential)?;
    let (tell, bid, watched) = telling(ROOM);
    let (stop, ending, listened) = (site.stop.clone(), site.clone(), tell.clone());
    let watch = Watch {
        site,
        caller,
        filter,
        resumed: resume.is_some(),
        told: HashMap::new(),
        tell,
        last: Instant::now(),
    };
    tokio::spawn(async move {
        let ended = stop.run_until_cancelled(async {
            tokio::select! {
                end = Box::pin(watch.run(resume)) => end,
                // Beside it, because telling may wait for whoever listens.
                end = credential_ends(&ending, credential) => end,
                () = listened.closed() => End::Gone,
            }
        });
        let ended = ended.await;
        drop(permit);
        let farewell = match ended {
            None => {
                let said = "this shepherd stops; resume at another one";
                Farewell::AfterTheRest(refused(Code::Unavailable, "UNAVAILABLE", said))
            }
            Some(End::Gone) => return,
            Some(End::Refused(status)) => Farewell::AtOnce(status),
        };
        // Whoever has gone away needs no farewell.
        drop(bid.send(farewell));
    });
    Ok(watched)
}

/// Waits until a credential is good no more, or may not be for all anybody knows.
pub(super) async fn credential_ends(site: &Site, credential: Uuid) -> End {
    // It passed the door.
    let mut good_at = Instant::now();
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        let asked_at = Instant::now();
        let answer = tokio::time::timeout_at(good_at + UNSURE, site.door.is_good(credential)).await;
        let answer = answer.unwrap_or_else(|_| {
            let said = "it could not be found out for too long whether the credential of this stream is still \
                        good; resume in a moment, or at another shepherd";
            Err(refused(Code::Unavailable, "UNAVAILABLE", said))
        });
        if matches!(answer, Ok(true)) {
            good_at = asked_at;
        }
        if let Some(status) = verdict(answer, good_at.elapsed()) {
            return End::Refused(status);
        }
    }
}

/// What ends a watch whose credential was asked about with this answer, the last good one being so old.
fn verdict(answer: Result<bool, Status>, unsure_for: Duration) -> Option<Status> {
    match answer {
        Ok(true) => None,
        Ok(false) => {
            let said = "the credential of this stream was revoked, or has expired";
            Some(refused(Code::Unauthenticated, "INVALID_CREDENTIAL", said))
        }
        Err(status) if may_pass(status.code(), unsure_for, UNSURE) => None,
        Err(status) => Some(status),
    }
}

/// Whether what failed so is tried again, having failed for so long.
fn may_pass(code: Code, lasted: Duration, patience: Duration) -> bool {
    code == Code::Unavailable && lasted < patience
}

/// Puts a message where whoever listens reads it, if there is room in time.
pub(super) async fn hand_over<T>(tell: &mpsc::Sender<T>, said: T, within: Duration) -> Result<(), End> {
    match tell.send_timeout(said, within).await {
        Ok(()) => Ok(()),
        Err(SendTimeoutError::Closed(_)) => Err(End::Gone),
        Err(SendTimeoutError::Timeout(_)) => {
            let said = format!(
                "you read too slowly: there was no room for another message for {} seconds; resume at the \
                 last place you were told, and read faster, or watch fewer machines",
                within.as_secs()
            );
            Err(End::Refused(refused(Code::ResourceExhausted, "SLOW_READER", said)))
        }
    }
}

/// Why a watch, or another stream, is over.
#[derive(Debug)]
pub(super) enum End {
    /// Nobody listens.
    Gone,
    /// This is said last.
    Refused(Status),
}

struct Watch {
    site: Site,
    caller: Caller,
    filter: Filter,
    resumed: bool,
    /// What was told of each machine, as a digest.
    told: HashMap<Uuid, u64>,
    tell: mpsc::Sender<v1::WatchMachinesResponse>,
    /// When something was told last.
    last: Instant,
}

impl Watch {
    async fn run(mut self, resume: Option<Timestamp>) -> End {
        let Err(end) = self.follow(resume).await;
        end
    }

    async fn follow(&mut self, resume: Option<Timestamp>) -> Result<std::convert::Infallible, End> {
        let mut until = match resume {
            Some(until) => self.not_too_old(until).await?,
            None => self.tell_all(String::new()).await?,
        };
        let mut all_again = Instant::now() + ALL_AGAIN;
        self.tell_quiet(until).await?;
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            until = self.tell_changes(until).await?;
            if Instant::now() >= all_again {
                self.tell_all(write_resume(until)).await?;
                all_again = Instant::now() + ALL_AGAIN;
            }
            if self.last.elapsed() >= QUIET {
                self.tell_quiet(until).await?;
            }
        }
    }

    /// Looks, and again where the database is away or too busy, which passes.
    async fn look<T, F>(&self, body: F) -> Result<T, End>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        let (body, began) = (Arc::new(body), Instant::now());
        loop {
            let body = body.clone();
            let status = match self.site.looks.look(move |tx| body(tx)).await {
                Ok(seen) => return Ok(seen),
                Err(error) => of_bmdb(error),
            };
            if !may_pass(status.code(), began.elapsed(), AWAY) {
                return Err(End::Refused(status));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// The moment to resume at, unless so much may have happened since, or be forgotten of it, that beginning
    /// anew is less.
    async fn not_too_old(&self, resume: Timestamp) -> Result<Timestamp, End> {
        let now = self.look(|tx| Box::pin(inspect::now(tx))).await?;
        if resume < before(now, RESUMED_WITHIN) {
            let said = format!(
                "this watch ended more than {} minutes ago; begin anew, without a place to resume at",
                RESUMED_WITHIN.as_secs() / 60
            );
            return Err(End::Refused(refused(Code::OutOfRange, "RESUME_TOKEN_EXPIRED", said)));
        }
        Ok(resume)
    }

    /// Tells every machine that was told otherwise before, and those that are gone. Returns the moment from
    /// which on changes are to be looked for.
    ///
    /// A watch that resumed tells each machine once here. What of them is other than the watch before it told
    /// cannot be known: not all that a machine shows leaves a line of history when it changes.
    async fn tell_all(&mut self, resume: String) -> Result<Timestamp, End> {
        let (mut after, mut began): (Option<Cursor>, Option<Timestamp>) = (None, None);
        let mut seen: HashSet<Uuid> = HashSet::new();
        loop {
            let (filter, scope, from) = (self.filter.clone(), self.caller.scope().clone(), after);
            let look = self.look(move |tx| {
                let (filter, scope, from) = (filter.clone(), scope.clone(), from.clone());
                Box::pin(async move {
                    let (now, enough) = (inspect::now(tx).await?, Enough::soon(LOOKED_AT));
                    Ok((listing::machines(tx, &filter, &scope, from.as_ref(), PAGE, enough).await?, now))
                })
            });
            let (page, now) = look.await?;
            began.get_or_insert(now);
            for listed in &page.machines {
                self.tell_machine(listed, &resume).await?;
                seen.insert(listed.line.name.machine);
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // One that changes its class while the list is read may be passed over: its change is in history,
        // which is looked at from the beginning of the list.
        let from = began.map_or(Timestamp::MIN_UTC, |began| before(began, OVERLAP));
        let missing =
            self.told.iter().filter(|(machine, digest)| **digest != GONE && !seen.contains(*machine));
        let missing: Vec<Uuid> = missing.map(|(machine, _)| *machine).collect();
        for some in missing.chunks(PAGE) {
            self.tell_again(some, &resume).await?;
        }
        Ok(from)
    }

    /// Tells what changed since `from`; returns up to when that is all.
    async fn tell_changes(&mut self, from: Timestamp) -> Result<Timestamp, End> {
        let mut begin = before(from, OVERLAP);
        loop {
            let look = self.look(move |tx| {
                Box::pin(async move {
                    let now = inspect::now(tx).await?;
                    listing::changed(tx, (begin, now), LINES).await
                })
            });
            let (machines, until) = look.await?;
            for some in machines.chunks(PAGE) {
                self.tell_again(some, &write_resume(from)).await?;
            }
            match until {
                Until::Now(now) => return Ok(now),
                Until::More(at) => begin = at,
            }
        }
    }

    /// Looks at these machines again, and tells those that are other than was told.
    async fn tell_again(&mut self, machines: &[Uuid], resume: &str) -> Result<(), End> {
        let lines = self.lines(self.filter.clone(), machines.to_vec()).await?;
        for listed in &lines {
            self.tell_machine(listed, resume).await?;
        }
        let rest: Vec<Uuid> = {
            let meant: HashSet<Uuid> = lines.iter().map(|listed| listed.line.name.machine).collect();
            machines.iter().filter(|machine| !meant.contains(machine)).copied().collect()
        };
        // What was told before a watch resumed is not known to it.
        let unknown: Vec<Uuid> =
            rest.iter().filter(|machine| self.resumed && !self.told.contains_key(machine)).copied().collect();
        let may_be_told = self.reached(unknown).await?;
        for machine in rest {
            let was_told = self.told.get(&machine).is_some_and(|digest| *digest != GONE);
            if was_told || may_be_told.contains(&machine) {
                self.told.insert(machine, GONE);
                self.say(What::Gone(machine.to_string()), resume.to_owned()).await?;
            }
        }
        Ok(())
    }

    /// Those of `machines` that the credential reaches, whether they are meant or not.
    async fn reached(&self, machines: Vec<Uuid>) -> Result<HashSet<Uuid>, End> {
        if machines.is_empty() {
            return Ok(HashSet::new());
        }
        let lines = self.lines(Filter::default(), machines).await?;
        Ok(lines.into_iter().map(|listed| listed.line.name.machine).collect())
    }

    /// Those of `machines` that the credential reaches and `filter` means.
    async fn lines(&self, filter: Filter, machines: Vec<Uuid>) -> Result<Vec<Listed>, End> {
        let scope = self.caller.scope().clone();
        let look = self.look(move |tx| {
            let (filter, scope, machines) = (filter.clone(), scope.clone(), machines.clone());
            Box::pin(async move { listing::lines(tx, &filter, &scope, &machines).await })
        });
        look.await
    }

    /// Tells a machine unless it was told just so.
    async fn tell_machine(&mut self, listed: &Listed, resume: &str) -> Result<(), End> {
        let machine = convert::machine(listed);
        let digest = digest_of(&machine, listed.timer);
        if self.told.insert(listed.line.name.machine, digest) == Some(digest) {
            return Ok(());
        }
        self.say(What::Machine(machine), resume.to_owned()).await
    }

    async fn tell_quiet(&mut self, until: Timestamp) -> Result<(), End> {
        let quiet = v1::Quiet { at: Some(at(until)) };
        self.say(What::Quiet(quiet), write_resume(until)).await
    }

    async fn say(&mut self, what: What, resume: String) -> Result<(), End> {
        self.last = Instant::now();
        let said = v1::WatchMachinesResponse { what: Some(what), resume };
        hand_over(&self.tell, said, READ_WITHIN).await
    }
}

/// What of a machine makes it another one for whoever watches: all but its heartbeat, and the moment that its
/// heartbeats put off.
fn digest_of(machine: &v1::Machine, timer: bool) -> u64 {
    let mut steady = v1::Machine { heartbeat_at: None, ..machine.clone() };
    if timer {
        steady.ready_at = None;
    }
    let mut hasher = DefaultHasher::new();
    (timer, steady.encode_to_vec()).hash(&mut hasher);
    hasher.finish().max(GONE + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_to_resume_reads_back() {
        let moment: Timestamp = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        assert_eq!(read_resume(&write_resume(moment)).unwrap(), Some(moment));
        assert_eq!(read_resume("").unwrap(), None);
        for odd in ["x", "d2F0Y2gg"] {
            assert!(read_resume(odd).is_err(), "{odd}");
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
            assert_eq!(digest_of(&machine, timer) == digest_of(other, timer), same, "{name}");
        }
        assert_ne!(digest_of(&machine, true), digest_of(&machine, false), "it is due for good");
    }

    #[test]
    fn credential_is_believed_for_a_while_when_nobody_can_say() {
        let long = UNSURE + Duration::from_millis(1);
        let away = || Err(Status::unavailable("away"));
        for (answer, unsure_for, ends) in [
            (Ok(true), Duration::ZERO, None),
            (Ok(false), Duration::ZERO, Some(Code::Unauthenticated)),
            (away(), Duration::ZERO, None),
            (away(), UNSURE.saturating_sub(Duration::from_millis(1)), None),
            (away(), UNSURE, Some(Code::Unavailable)),
            (away(), long, Some(Code::Unavailable)),
            (Err(Status::internal("corrupt")), Duration::ZERO, Some(Code::Internal)),
        ] {
            let said = format!("{answer:?} after {unsure_for:?}");
            assert_eq!(verdict(answer, unsure_for).map(|status| status.code()), ends, "{said}");
        }
    }

    #[test]
    fn only_what_passes_is_tried_again_and_not_for_ever() {
        for (code, lasted, again) in [
            (Code::Unavailable, Duration::ZERO, true),
            (Code::Unavailable, AWAY, false),
            (Code::Internal, Duration::ZERO, false),
            (Code::OutOfRange, Duration::ZERO, false),
        ] {
            assert_eq!(may_pass(code, lasted, AWAY), again, "{code:?} {lasted:?}");
        }
    }

    #[tokio::test]
    async fn whoever_reads_too_slowly_is_told_to_resume() {
        let (tell, told) = mpsc::channel(1);
        hand_over(&tell, 1, Duration::ZERO).await.unwrap();
        let end = hand_over(&tell, 2, Duration::ZERO).await.unwrap_err();
        let End::Refused(status) = end else { panic!("somebody listens: {end:?}") };
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("resume"), "{status}");
        drop(told);
        assert!(matches!(hand_over(&tell, 3, Duration::ZERO).await, Err(End::Gone)));
    }
}
