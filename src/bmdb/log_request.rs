//! Requests for logs of machines, and what was brought for them.
//!
//! A request is a row, so that any shepherd may take the call and any other hear the machine: the one that hears it next
//! hands it on, and keeps what the machine brings in parts beside it. Whoever asked takes the parts, from whichever shepherd,
//! and they are deleted as they are taken. What nobody comes for is deleted with the next request, or by
//! [`forget`][Bmdb::forget]. What is decided is decided by [`crate::model::log_request`]; the lines stand in no log and no
//! audit of ours, which says who asked for which log of which machine.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::inspect;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::lock;
use crate::model::ids::MachineId;
use crate::model::log_request::{
    Brought, Hand, Keep, MOST, MOST_OF_A_MACHINE, Request, State, There, Wanted, hand, keep, state,
    unreachable,
};
use crate::model::phase::{Phase, phase_of};
use crate::model::time::{Span, Timestamp};

const ASKING: &str = "asking a machine for a log";
const READING: &str = "reading a log that a machine brought";
const HANDING: &str = "handing on what logs are wanted";
const BRINGING: &str = "keeping a part of a log";

/// How long a request is kept that nobody comes for, in milliseconds: longer than whoever hears the machine needs to end
/// it in words.
pub(crate) const KEPT_MS: i64 = 5 * 60_000;
/// Most rows that a new request clears away.
const CLEARED: i64 = 50;
/// Most parts that are told at a time.
const PARTS: i64 = 8;

/// What a reader is told.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Where the request stands. It has ended only when all that was brought was told.
    pub state: State,
    /// The next lines, each with its end.
    pub lines: String,
    /// How many parts the reader has with them.
    pub taken: i64,
    /// Which logs there are, where that was asked.
    pub there: Vec<There>,
    /// Something to know of the lines.
    pub note: Option<String>,
    /// When that was read.
    pub at: Timestamp,
}

/// A request that a machine is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handed {
    /// Its id.
    pub id: Uuid,
    /// What is wanted.
    pub wanted: Wanted,
}

struct Row {
    request_id: Uuid,
    log: String,
    most_lines: i64,
    since_seconds: Option<i64>,
    follow: bool,
    asked_at: Timestamp,
    asked_by: String,
    read_at: Timestamp,
    handed_at: Option<Timestamp>,
    handed_to: Option<String>,
    brought_at: Option<Timestamp>,
    parts: i64,
    bytes: i64,
    there: Option<Value>,
    note: Option<String>,
    ended_at: Option<Timestamp>,
    failed: Option<String>,
}

impl Row {
    fn request(&self) -> Request {
        Request {
            wanted: Wanted {
                log: self.log.clone(),
                lines: u32::try_from(self.most_lines).unwrap_or_default(),
                since: self.since_seconds.and_then(|seconds| Some(Span::seconds(seconds.try_into().ok()?))),
                follow: self.follow,
            },
            asked_at: self.asked_at,
            asked_by: self.asked_by.clone(),
            read_at: self.read_at,
            handed: self.handed_at.zip(self.handed_to.clone()),
            brought_at: self.brought_at,
            parts: self.parts,
            bytes: self.bytes,
            ended: self.ended_at.map(|_| self.failed.clone()),
        }
    }
}

fn refused(reason: &'static str, said: String) -> BmdbError {
    BmdbError::OrderRefused { reason, said }
}

fn gone() -> BmdbError {
    refused(
        "NO_SUCH_REQUEST",
        "there is no such request of yours for a log of this machine: it was read to its end, or nobody came for it; ask \
         again"
            .to_owned(),
    )
}

/// The request that an order made, as its answer says it.
#[must_use]
pub fn request_of(carried: &Carried) -> Option<Uuid> {
    let after = carried.after.as_ref()?;
    after["request"].as_str()?.parse().ok()
}

async fn locked(tx: &mut PgConnection, machine: MachineId, id: Uuid) -> Result<Option<Row>, BmdbError> {
    sqlx::query_file_as!(Row, "sql/log/lock_request.sql", id, machine.0)
        .fetch_optional(tx)
        .await
        .doing(READING)
}

async fn end(tx: &mut PgConnection, id: Uuid, failed: Option<&str>) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/log/end_request.sql", id, failed).execute(tx).await.doing(HANDING)?;
    Ok(())
}

impl Bmdb {
    /// Asks a machine, which people call `name`, for a log.
    pub async fn ask_for_log(
        &self,
        order: Order,
        (machine, name): (MachineId, String),
        wanted: Wanted,
    ) -> Result<Carried, BmdbError> {
        let (bmdb, given) = (self.clone(), order.clone());
        let carried = self
            .ordered(ASKING, move |tx| {
                let (bmdb, order, name, wanted) = (bmdb.clone(), order.clone(), name.clone(), wanted.clone());
                Box::pin(async move { ask(&bmdb, tx, &order, (machine, &name), &wanted).await })
            })
            .await;
        self.note_refusal(carried, &given, Some(machine)).await
    }

    /// Tells what has come of a request of `who`, who has so many parts already.
    pub async fn read_log(
        &self,
        machine: MachineId,
        id: Uuid,
        who: String,
        taken: i64,
    ) -> Result<Reading, BmdbError> {
        let bmdb = self.clone();
        self.transact(READING, move |tx| {
            let (bmdb, who) = (bmdb.clone(), who.clone());
            Box::pin(async move { read_on(&bmdb, tx, machine, id, &who, taken).await })
        })
        .await
    }

    /// What a machine is to be told with the answer to a heartbeat of that start of its role server; what it is not told is
    /// ended, in words. `version` is what its role server says it is, and `brings` whether it knows how to bring logs.
    pub async fn hand_logs(
        &self,
        machine: MachineId,
        incarnation: &str,
        version: &str,
        brings: bool,
    ) -> Result<Vec<Handed>, BmdbError> {
        let (incarnation, version) = (incarnation.to_owned(), version.to_owned());
        self.transact(HANDING, move |tx| {
            let (incarnation, version) = (incarnation.clone(), version.clone());
            Box::pin(async move {
                let rows = sqlx::query_file_as!(Row, "sql/log/lock_open_requests.sql", machine.0)
                    .fetch_all(&mut *tx)
                    .await
                    .doing(HANDING)?;
                let now = inspect::now(tx).await?;
                let mut handed = Vec::new();
                for row in rows {
                    let request = row.request();
                    match hand(&request, &incarnation, brings, &version, now) {
                        Hand::End(said) => end(tx, row.request_id, Some(&said)).await?,
                        Hand::Again => handed.push(Handed { id: row.request_id, wanted: request.wanted }),
                        Hand::New => {
                            sqlx::query_file!("sql/log/mark_delivered.sql", row.request_id, incarnation)
                                .execute(&mut *tx)
                                .await
                                .doing(HANDING)?;
                            handed.push(Handed { id: row.request_id, wanted: request.wanted });
                        }
                    }
                }
                Ok(handed)
            })
        })
        .await
    }

    /// Keeps what a machine brings for a request.
    pub async fn keep_log(&self, machine: MachineId, id: Uuid, brought: Brought) -> Result<Keep, BmdbError> {
        self.transact(BRINGING, move |tx| {
            let brought = brought.clone();
            Box::pin(async move { kept(tx, machine, id, &brought).await })
        })
        .await
    }
}

async fn ask(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    (machine, name): (MachineId, &str),
    wanted: &Wanted,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    wanted.check().map_err(|(_, said)| refused("WRONG_LOG", said))?;
    lock(tx, machine).await?;
    let snapshot = read(tx, machine).await?;
    let policy = policy_of_version(bmdb, tx, snapshot.policy_version).await?;
    let retired = phase_of(&snapshot.facts, &policy, snapshot.now) == Phase::Retired;
    let heard = snapshot.facts.heartbeat.as_ref().map(|heartbeat| heartbeat.at);
    if let Some(said) = unreachable(heard, retired, policy.heartbeat_interval.0, snapshot.now) {
        return Err(refused("SILENT", format!("{name} {said}")));
    }
    sqlx::query_file!("sql/retention/delete_log_parts.sql", KEPT_MS, CLEARED)
        .execute(&mut *tx)
        .await
        .doing(ASKING)?;
    sqlx::query_file!("sql/retention/delete_log_requests.sql", KEPT_MS)
        .execute(&mut *tx)
        .await
        .doing(ASKING)?;
    let counts = sqlx::query_file!("sql/log/count_open_requests.sql", machine.0)
        .fetch_one(&mut *tx)
        .await
        .doing(ASKING)?;
    if counts.of_machine >= MOST_OF_A_MACHINE {
        let said = format!(
            "{name} is asked for {MOST_OF_A_MACHINE} logs at this moment, and brings no more at a time; try again when one \
             of them has ended, a minute after nobody reads it any more"
        );
        return Err(refused("TOO_MANY_LOGS", said));
    }
    if counts.all >= MOST {
        let said = format!(
            "{MOST} logs of machines are asked for at this moment, and there can be no more; try again soon"
        );
        return Err(refused("TOO_MANY_LOGS", said));
    }
    begin_attempt(tx, order).await?;
    let id = Uuid::now_v7();
    sqlx::query_file!(
        "sql/log/insert_request.sql",
        id,
        machine.0,
        wanted.log,
        i64::from(wanted.lines),
        wanted.since.map(|since| i64::try_from(since.0.as_secs()).unwrap_or(i64::MAX)),
        wanted.follow,
        order.actor.name
    )
    .execute(&mut *tx)
    .await
    .doing(ASKING)?;
    end_attempt(tx, order).await?;
    let said = format!("is asked for {} with its next heartbeat", wanted.named());
    let after = json!({
        "request": id, "log": wanted.log, "lines": wanted.lines, "since": wanted.since, "follow": wanted.follow,
    });
    write_down(tx, order, Some(machine), Done { changed: true, said }, None, Some(after)).await
}

async fn read_on(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
    id: Uuid,
    who: &str,
    taken: i64,
) -> Result<Reading, BmdbError> {
    let row = locked(tx, machine, id).await?.filter(|row| row.asked_by == who).ok_or_else(gone)?;
    let request = row.request();
    let now = inspect::now(tx).await?;
    let heard = sqlx::query_file!("sql/log/read_last_heartbeat.sql", machine.0)
        .fetch_one(&mut *tx)
        .await
        .doing(READING)?;
    let is = state(&request, heard.heard_at, bmdb.policy().1.heartbeat_interval.0, now);
    if let (State::Ended(failed), None) = (&is, &request.ended) {
        // So that the machine hears it, too.
        end(tx, id, failed.as_deref()).await?;
    }
    let taken = taken.clamp(0, request.parts);
    sqlx::query_file!("sql/log/delete_read_parts.sql", id, taken).execute(&mut *tx).await.doing(READING)?;
    let parts = sqlx::query_file!("sql/log/list_parts.sql", id, taken, PARTS)
        .fetch_all(&mut *tx)
        .await
        .doing(READING)?;
    let told = parts.last().map_or(taken, |part| part.number + 1);
    if matches!(is, State::Ended(_)) && taken >= request.parts && taken > 0 {
        // They have said that they have all of it.
        sqlx::query_file!("sql/log/delete_request.sql", id).execute(&mut *tx).await.doing(READING)?;
    } else {
        sqlx::query_file!("sql/log/touch_request.sql", id).execute(&mut *tx).await.doing(READING)?;
    }
    let is = if told < request.parts { State::Comes } else { is };
    Ok(Reading {
        state: is,
        lines: parts.into_iter().map(|part| part.lines).collect(),
        taken: told,
        there: row.there.and_then(|there| serde_json::from_value(there).ok()).unwrap_or_default(),
        note: row.note,
        at: now,
    })
}

async fn kept(
    tx: &mut PgConnection,
    machine: MachineId,
    id: Uuid,
    brought: &Brought,
) -> Result<Keep, BmdbError> {
    let Some(row) = locked(tx, machine, id).await? else { return Ok(Keep::Over) };
    let (request, now) = (row.request(), inspect::now(tx).await?);
    let unread = if request.wanted.follow {
        sqlx::query_file!("sql/log/count_unread_bytes.sql", id)
            .fetch_one(&mut *tx)
            .await
            .doing(BRINGING)?
            .bytes
    } else {
        0
    };
    let what = keep(&request, brought, unread, now);
    match &what {
        Keep::Take => {
            let some = !brought.lines.is_empty();
            if some {
                sqlx::query_file!("sql/log/insert_part.sql", id, brought.number, brought.lines)
                    .execute(&mut *tx)
                    .await
                    .doing(BRINGING)?;
            }
            let there = Some(&brought.there).filter(|there| !there.is_empty());
            let there = there.and_then(|there| serde_json::to_value(there).ok());
            sqlx::query_file!(
                "sql/log/record_part.sql",
                id,
                request.parts + i64::from(some),
                i64::try_from(brought.lines.len()).unwrap_or(i64::MAX),
                there,
                brought.note.as_deref(),
                brought.last || brought.error.is_some(),
                brought.error.as_deref()
            )
            .execute(tx)
            .await
            .doing(BRINGING)?;
        }
        Keep::End(said) => end(tx, id, Some(said)).await?,
        Keep::Known | Keep::Later | Keep::Over => {}
    }
    Ok(what)
}
