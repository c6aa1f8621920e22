//! Watching machines: first those there are, then each that changes.
//!
//! A watch is a task that looks every second where history was written since, and tells the machines that
//! look different from what it told before. History is dated when it is written and seen when that commits,
//! so each look begins some seconds before the last one ended; and because a transaction may take longer
//! still, everything is looked at again every few minutes. What a watch says is therefore true in the end
//! whatever it missed in between, and where it resumes, at this shepherd or another, is only a moment.
//!
//! It ends when nobody listens, when the server does, and when its credential is revoked or expires.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::DateTime;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::inspect;
use crate::bmdb::listing::{self, Cursor, Filter, Until};
use crate::model::time::{Timestamp, before};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::watch_machines_response::What;
use crate::server::api::convert::{self, at};
use crate::server::api::door::Caller;
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
/// Lines of history read at once.
const LINES: i64 = 5000;
/// Machines of a page, and those looked at for it.
const PAGE: usize = 500;
const LOOKED_AT: usize = 2000;
/// In the place of a digest: that the machine is gone was told.
const GONE: u64 = 0;

type Told = Result<v1::WatchMachinesResponse, Status>;

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
) -> Result<ReceiverStream<Told>, Status> {
    // Each costs looks at the database for as long as it lasts, however seldom it was asked for.
    let permit = site.watches.clone().try_acquire_owned().map_err(|_| {
        let said =
            "there are as many watches of this shepherd as it bears; end some, or watch at another one";
        refused(Code::ResourceExhausted, "TOO_MANY_WATCHES", said)
    })?;
    let (tell, told) = mpsc::channel(64);
    let stop = site.stop.clone();
    let (ending, credential) = (site.clone(), caller.credential().id);
    let watch = Watch {
        site,
        caller,
        filter,
        resumed: resume.is_some(),
        told: HashMap::new(),
        tell: tell.clone(),
        last: Instant::now(),
    };
    tokio::spawn(async move {
        let ended = stop.run_until_cancelled(async {
            tokio::select! {
                end = Box::pin(watch.run(resume)) => end,
                // Beside it, because telling may wait for whoever listens.
                end = credential_ends(&ending, credential) => end,
            }
        });
        let ended = ended.await;
        drop(permit);
        let status = match ended {
            None => refused(Code::Unavailable, "TRY_AGAIN", "this shepherd stops; resume at another one"),
            Some(End::Gone) => return,
            Some(End::Refused(status)) => status,
        };
        // Whoever has gone away needs no farewell.
        drop(tell.send_timeout(Err(status), QUIET).await);
    });
    Ok(ReceiverStream::new(told))
}

/// Waits until a credential is good no more.
async fn credential_ends(site: &Site, credential: Uuid) -> End {
    loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        match site.door.is_good(credential).await {
            Ok(true) => {}
            Ok(false) => {
                let said = "the credential of this watch was revoked, or has expired";
                return End::Refused(refused(Code::Unauthenticated, "NO_CREDENTIAL", said));
            }
            Err(status) => return End::Refused(status),
        }
    }
}

/// Why a watch is over.
enum End {
    /// Nobody listens.
    Gone,
    /// This is said last.
    Refused(Status),
}

impl From<Status> for End {
    fn from(status: Status) -> Self {
        Self::Refused(status)
    }
}

struct Watch {
    site: Site,
    caller: Caller,
    filter: Filter,
    resumed: bool,
    /// What was told of each machine, as a digest.
    told: HashMap<Uuid, u64>,
    tell: mpsc::Sender<Told>,
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
            None => self.tell_all().await?,
        };
        let mut all_again = Instant::now() + ALL_AGAIN;
        self.tell_quiet(until).await?;
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_AGAIN) => {}
                () = self.tell.closed() => return Err(End::Gone),
            }
            until = self.tell_changes(until).await?;
            if Instant::now() >= all_again {
                self.tell_all().await?;
                all_again = Instant::now() + ALL_AGAIN;
            }
            if self.last.elapsed() >= QUIET {
                self.tell_quiet(until).await?;
            }
        }
    }

    /// The moment to resume at, unless so much may have happened since, or be forgotten of it, that beginning
    /// anew is less.
    async fn not_too_old(&self, resume: Timestamp) -> Result<Timestamp, End> {
        let look = self.site.looks.look(|tx| Box::pin(async move { inspect::now(tx).await }));
        if resume < before(look.await.map_err(of_bmdb)?, RESUMED_WITHIN) {
            let said = format!(
                "this watch ended more than {} minutes ago; begin anew, without a place to resume at",
                RESUMED_WITHIN.as_secs() / 60
            );
            return Err(End::Refused(refused(Code::OutOfRange, "TOO_LONG_AGO", said)));
        }
        Ok(resume)
    }

    /// Tells every machine that was told otherwise before, and those that are gone. Returns the moment from
    /// which on changes are to be looked for.
    async fn tell_all(&mut self) -> Result<Timestamp, End> {
        let (mut after, mut began): (Option<Cursor>, Option<Timestamp>) = (None, None);
        let mut seen: HashMap<Uuid, u64> = HashMap::new();
        loop {
            let (filter, scope, from) = (self.filter.clone(), self.caller.scope().clone(), after.clone());
            let (page, now) = self
                .site
                .looks
                .look(move |tx| {
                    let (filter, scope, from) = (filter.clone(), scope.clone(), from.clone());
                    Box::pin(async move {
                        let now = inspect::now(tx).await?;
                        let page =
                            listing::machines(tx, &filter, &scope, from.as_ref(), PAGE, LOOKED_AT).await?;
                        Ok((page, now))
                    })
                })
                .await
                .map_err(of_bmdb)?;
            began.get_or_insert(now);
            for listed in &page.machines {
                let digest =
                    self.tell_machine(convert::machine(listed), listed.line.name.machine, "").await?;
                seen.insert(listed.line.name.machine, digest);
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // One that changes its class while the list is read may be passed over: its change is in history,
        // which is looked at from the beginning of the list.
        let from = began.map_or(Timestamp::MIN_UTC, |began| before(began, OVERLAP));
        let missing: Vec<Uuid> =
            self.told.keys().filter(|machine| !seen.contains_key(machine)).copied().collect();
        if !missing.is_empty() {
            self.tell_again(&missing, String::new()).await?;
        }
        Ok(from)
    }

    /// Tells what changed since `from`; returns up to when that is all.
    async fn tell_changes(&mut self, from: Timestamp) -> Result<Timestamp, End> {
        let mut begin = before(from, OVERLAP);
        loop {
            let (machines, until) = self
                .site
                .looks
                .look(move |tx| {
                    Box::pin(async move {
                        let now = inspect::now(tx).await?;
                        listing::changed(tx, (begin, now), LINES).await
                    })
                })
                .await
                .map_err(of_bmdb)?;
            for some in machines.chunks(PAGE) {
                self.tell_again(some, write_resume(from)).await?;
            }
            match until {
                Until::Now(now) => return Ok(now),
                Until::More(at) => begin = at,
            }
        }
    }

    /// Looks at these machines again, and tells those that are other than was told.
    async fn tell_again(&mut self, machines: &[Uuid], resume: String) -> Result<(), End> {
        let (filter, scope, wanted) = (self.filter.clone(), self.caller.scope().clone(), machines.to_vec());
        let lines = self
            .site
            .looks
            .look(move |tx| {
                let (filter, scope, wanted) = (filter.clone(), scope.clone(), wanted.clone());
                Box::pin(async move { listing::lines(tx, &filter, &scope, &wanted).await })
            })
            .await
            .map_err(of_bmdb)?;
        for listed in &lines {
            self.tell_machine(convert::machine(listed), listed.line.name.machine, &resume).await?;
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
                self.say(What::Gone(machine.to_string()), resume.clone()).await?;
            }
        }
        Ok(())
    }

    /// Those of `machines` that the credential reaches, whether they are meant or not.
    async fn reached(&self, machines: Vec<Uuid>) -> Result<HashSet<Uuid>, End> {
        if machines.is_empty() {
            return Ok(HashSet::new());
        }
        let scope = self.caller.scope().clone();
        let lines = self
            .site
            .looks
            .look(move |tx| {
                let (scope, machines) = (scope.clone(), machines.clone());
                Box::pin(async move { listing::lines(tx, &Filter::default(), &scope, &machines).await })
            })
            .await
            .map_err(of_bmdb)?;
        Ok(lines.into_iter().map(|listed| listed.line.name.machine).collect())
    }

    /// Tells a machine unless it was told just so; returns the digest of what was told.
    async fn tell_machine(&mut self, machine: v1::Machine, id: Uuid, resume: &str) -> Result<u64, End> {
        let digest = digest_of(&machine);
        if self.told.insert(id, digest) != Some(digest) {
            self.say(What::Machine(machine), resume.to_owned()).await?;
        }
        Ok(digest)
    }

    async fn tell_quiet(&mut self, until: Timestamp) -> Result<(), End> {
        let quiet = v1::Quiet { at: Some(at(until)) };
        self.say(What::Quiet(quiet), write_resume(until)).await
    }

    async fn say(&mut self, what: What, resume: String) -> Result<(), End> {
        self.last = Instant::now();
        let said = v1::WatchMachinesResponse { what: Some(what), resume };
        self.tell.send(Ok(said)).await.map_err(|_| End::Gone)
    }
}

/// What of a machine makes it another one for whoever watches: all but its heartbeat.
fn digest_of(machine: &v1::Machine) -> u64 {
    let mut hasher = DefaultHasher::new();
    v1::Machine { heartbeat_at: None, ..machine.clone() }.encode_to_vec().hash(&mut hasher);
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
        let machine = v1::Machine { phase: "Ready".into(), ..Default::default() };
        let beaten = v1::Machine { heartbeat_at: Some(prost_types::Timestamp::default()), ..machine.clone() };
        assert_eq!(digest_of(&machine), digest_of(&beaten));
        assert_ne!(digest_of(&machine), digest_of(&v1::Machine { phase: "Silent".into(), ..machine }));
    }
}
