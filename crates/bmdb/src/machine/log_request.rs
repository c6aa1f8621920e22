//! Log requests: delivering them to machines and relaying what machines upload.
//!
//! A request is a row, so that any shepherd may take the operator's call and any other may receive the machine's
//! heartbeats: the next one that does delivers the request, and stores what the machine uploads in parts beside it. The
//! client takes the parts from any shepherd, and they are deleted as they are taken. A request that no client comes
//! back for is deleted with the next request, or by [`delete_expired`][Bmdb::delete_expired]. Decisions are made in
//! [`model::log_request`]. The lines are in no log and no audit of ours; the audit only names who requested
//! which log of which machine.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::facts::read_snapshot;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::lock_due_rows;
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::ids::MachineId;
use model::log_request::{
    AvailableLog, Delivery, LogPart, LogQuery, LogRequestRecord, LogRequestState, MAX_REQUESTS,
    MAX_REQUESTS_PER_MACHINE, PartDecision, decide_delivery, decide_part, request_state, unreachable_reason,
};
use model::phase::{Phase, phase_of};
use model::time::{Span, Timestamp};

const REQUESTING: &str = "requesting a log of a machine";
const READING: &str = "reading a log that a machine brought";
const DELIVERING: &str = "handing on what logs are wanted";
const STORING: &str = "keeping a part of a log";

/// How long a request without a client is retained, in milliseconds: longer than a shepherd that receives the machine's
/// heartbeats needs to end it with a message.
pub(crate) const RETENTION_MS: i64 = 5 * 60_000;
/// Most expired rows that a new request deletes.
const CLEANUP_BATCH: i64 = 50;
/// Most parts that are returned at a time.
const MAX_PARTS_PER_READ: i64 = 8;

/// The result of reading a log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogReadResult {
    /// State of the request. It has ended only when every uploaded part was returned.
    pub state: LogRequestState,
    /// The next lines, each with its line end.
    pub lines: String,
    /// How many parts the reader has received, including these.
    pub parts_read: i64,
    /// The logs that exist, if the request was for that list.
    pub available_logs: Vec<AvailableLog>,
    /// A remark about the lines, if there is one.
    pub note: Option<String>,
    /// The database's clock when this was read.
    pub at: Timestamp,
}

/// A request that is delivered to a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveredLogRequest {
    /// Id of the request.
    pub id: Uuid,
    /// The log, and which lines of it.
    pub query: LogQuery,
}

struct LogRequestRow {
    request_id: Uuid,
    log: String,
    most_lines: i64,
    since_seconds: Option<i64>,
    follow: bool,
    requested_at: Timestamp,
    requested_by: String,
    read_at: Timestamp,
    delivered_at: Option<Timestamp>,
    delivered_to: Option<String>,
    last_part_at: Option<Timestamp>,
    parts: i64,
    bytes: i64,
    available_logs: Option<Value>,
    note: Option<String>,
    ended_at: Option<Timestamp>,
    failed: Option<String>,
}

impl LogRequestRow {
    fn to_request(&self) -> LogRequestRecord {
        LogRequestRecord {
            query: LogQuery {
                log: self.log.clone(),
                lines: u32::try_from(self.most_lines).unwrap_or_default(),
                since: self.since_seconds.and_then(|seconds| Some(Span::seconds(seconds.try_into().ok()?))),
                follow: self.follow,
            },
            requested_at: self.requested_at,
            requested_by: self.requested_by.clone(),
            read_at: self.read_at,
            delivered: self.delivered_at.zip(self.delivered_to.clone()),
            last_part_at: self.last_part_at,
            parts: self.parts,
            bytes: self.bytes,
            outcome: self.ended_at.map(|_| self.failed.clone()),
        }
    }
}

fn no_such_request() -> BmdbError {
    order_rejected(
        "NO_SUCH_REQUEST",
        "you have no such request for a log of this machine: it was read to its end, or was not read in time; \
         request the log again"
            .to_owned(),
    )
}

/// Id of the request that an order made, from the order's result.
#[must_use]
pub fn request_id_of(carried: &OrderResult) -> Option<Uuid> {
    let after = carried.after.as_ref()?;
    after["request"].as_str()?.parse().ok()
}

async fn lock_request(
    tx: &mut PgConnection,
    machine: MachineId,
    id: Uuid,
) -> Result<Option<LogRequestRow>, BmdbError> {
    sqlx::query_as!(
        LogRequestRow,
        "SELECT request_id, log, most_lines, since_seconds, follow, requested_at, requested_by, read_at,
             delivered_at, delivered_to, last_part_at, parts, bytes, available_logs, note, ended_at, failed
         FROM log_request WHERE request_id = $1 AND machine_id = $2 FOR UPDATE",
        id,
        machine.0
    )
    .fetch_optional(tx)
    .await
    .context(READING)
}

async fn end_request(tx: &mut PgConnection, id: Uuid, failed: Option<&str>) -> Result<(), BmdbError> {
    sqlx::query!(
        "UPDATE log_request SET ended_at = clock_timestamp(), failed = $2
         WHERE request_id = $1 AND ended_at IS NULL",
        id,
        failed
    )
    .execute(tx)
    .await
    .context(DELIVERING)?;
    Ok(())
}

impl Bmdb {
    /// Requests a log from a machine, which people call `name`.
    pub async fn request_log(
        &self,
        order: Order,
        (machine, name): (MachineId, String),
        wanted: LogQuery,
    ) -> Result<OrderResult, BmdbError> {
        let arguments = (self.clone(), machine, name, wanted);
        self.execute_order(REQUESTING, order, Some(machine), arguments, |tx, order, arguments| {
            let (bmdb, machine, name, wanted) = arguments;
            Box::pin(request_log_in_tx(bmdb, tx, order, (*machine, name), wanted))
        })
        .await
    }

    /// Reads the progress of a request of `who`, who has received `taken` parts already.
    pub async fn read_log(
        &self,
        machine: MachineId,
        id: Uuid,
        who: String,
        taken: i64,
    ) -> Result<LogReadResult, BmdbError> {
        let bmdb = self.clone();
        self.transact_with(READING, (bmdb, who), move |tx, (bmdb, who)| {
            Box::pin(read_log_in_tx(bmdb, tx, machine, id, who, taken))
        })
        .await
    }

    /// Requests to deliver with the answer to a heartbeat of that incarnation of the machine's role server. A request
    /// that is not delivered is ended with a message. `version` is the version that the role server reports, and
    /// `brings` whether it supports log requests.
    pub async fn deliver_log_requests(
        &self,
        machine: MachineId,
        incarnation: &str,
        version: &str,
        brings: bool,
    ) -> Result<Vec<DeliveredLogRequest>, BmdbError> {
        let (incarnation, version) = (incarnation.to_owned(), version.to_owned());
        self.transact_with(DELIVERING, (incarnation, version), move |tx, (incarnation, version)| {
            Box::pin(async move {
                let rows =
                    sqlx::query_file_as!(LogRequestRow, "../../sql/log/lock_open_requests.sql", machine.0)
                        .fetch_all(&mut *tx)
                        .await
                        .context(DELIVERING)?;
                let now = database_now(tx).await?;
                let mut handed = Vec::new();
                for row in rows {
                    let request = row.to_request();
                    match decide_delivery(&request, incarnation, brings, version, now) {
                        Delivery::End(text) => end_request(tx, row.request_id, Some(&text)).await?,
                        Delivery::Repeat => {
                            handed.push(DeliveredLogRequest { id: row.request_id, query: request.query });
                        }
                        Delivery::First => {
                            sqlx::query!(
                                "UPDATE log_request SET delivered_at = clock_timestamp(), delivered_to = $2
                                 WHERE request_id = $1",
                                row.request_id,
                                incarnation
                            )
                            .execute(&mut *tx)
                            .await
                            .context(DELIVERING)?;
                            handed.push(DeliveredLogRequest { id: row.request_id, query: request.query });
                        }
                    }
                }
                Ok(handed)
            })
        })
        .await
    }

    /// Stores a part that a machine uploads for a request.
    pub async fn store_log_part(
        &self,
        machine: MachineId,
        id: Uuid,
        brought: LogPart,
    ) -> Result<PartDecision, BmdbError> {
        self.transact_with(STORING, brought, move |tx, brought| {
            Box::pin(store_log_part_in_tx(tx, machine, id, brought))
        })
        .await
    }
}

async fn request_log_in_tx(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    (machine, name): (MachineId, &str),
    wanted: &LogQuery,
) -> Result<OrderEffect, BmdbError> {
    wanted.validate().map_err(|(_, text)| order_rejected("WRONG_LOG", text))?;
    lock_due_rows(tx, machine).await?;
    let snapshot = read_snapshot(tx, machine).await?;
    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
    let retired = phase_of(&snapshot.facts, &policy, snapshot.now) == Phase::Retired;
    let last_contact = snapshot.facts.heartbeat.as_ref().map(|heartbeat| heartbeat.received_at);
    if let Some(text) = unreachable_reason(last_contact, retired, policy.heartbeat_interval.0, snapshot.now) {
        return Err(order_rejected("SILENT", format!("{name} {text}")));
    }
    sqlx::query_file!("../../sql/retention/delete_log_parts.sql", RETENTION_MS, CLEANUP_BATCH)
        .execute(&mut *tx)
        .await
        .context(REQUESTING)?;
    sqlx::query_file!("../../sql/retention/delete_log_requests.sql", RETENTION_MS)
        .execute(&mut *tx)
        .await
        .context(REQUESTING)?;
    let counts = sqlx::query!(
        r#"SELECT count(*) AS "all!", count(*) FILTER (WHERE machine_id = $1) AS "of_machine!"
           FROM log_request WHERE ended_at IS NULL"#,
        machine.0
    )
    .fetch_one(&mut *tx)
    .await
    .context(REQUESTING)?;
    if counts.of_machine >= MAX_REQUESTS_PER_MACHINE {
        let text = format!(
            "{name} has {MAX_REQUESTS_PER_MACHINE} log requests at this moment, and accepts no more; try \
             again when one has ended (a request that nobody reads ends after a minute)"
        );
        return Err(order_rejected("TOO_MANY_LOGS", text));
    }
    if counts.all >= MAX_REQUESTS {
        let text = format!(
            "{MAX_REQUESTS} log requests to machines exist at this moment, which is the maximum; try again soon"
        );
        return Err(order_rejected("TOO_MANY_LOGS", text));
    }
    let id = Uuid::now_v7();
    sqlx::query!(
        "INSERT INTO log_request (request_id, machine_id, log, most_lines, since_seconds, follow,
             requested_at, requested_by, read_at, parts, bytes)
         VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7, clock_timestamp(), 0, 0)",
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
    .context(REQUESTING)?;
    let output = format!("gets the request for {} with its next heartbeat", wanted.describe());
    let after = json!({
        "request": id, "log": wanted.log, "lines": wanted.lines, "since": wanted.since, "follow": wanted.follow,
    });
    Ok(OrderEffect::changed(output, None, Some(after)))
}

async fn read_log_in_tx(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
    id: Uuid,
    who: &str,
    taken: i64,
) -> Result<LogReadResult, BmdbError> {
    let row = lock_request(tx, machine, id)
        .await?
        .filter(|row| row.requested_by == who)
        .ok_or_else(no_such_request)?;
    let request = row.to_request();
    let now = database_now(tx).await?;
    let record = sqlx::query!(
        r#"SELECT (SELECT h.at FROM machine_agent_heartbeat h
               WHERE h.machine_id = $1) AS "last_heartbeat_at?""#,
        machine.0
    )
    .fetch_one(&mut *tx)
    .await
    .context(READING)?;
    let is = request_state(&request, record.last_heartbeat_at, bmdb.policy().1.heartbeat_interval.0, now);
    if let (LogRequestState::Ended(failed), None) = (&is, &request.outcome) {
        // So that the machine learns of the end, too.
        end_request(tx, id, failed.as_deref()).await?;
    }
    let taken = taken.clamp(0, request.parts);
    sqlx::query!("DELETE FROM log_part WHERE request_id = $1 AND number < $2", id, taken)
        .execute(&mut *tx)
        .await
        .context(READING)?;
    let parts = sqlx::query!(
        "SELECT number, lines FROM log_part WHERE request_id = $1 AND number >= $2 ORDER BY number LIMIT $3",
        id,
        taken,
        MAX_PARTS_PER_READ
    )
    .fetch_all(&mut *tx)
    .await
    .context(READING)?;
    let number = parts.last().map_or(taken, |part| part.number + 1);
    if matches!(is, LogRequestState::Ended(_)) && taken >= request.parts && taken > 0 {
        // The client has confirmed that it has everything.
        sqlx::query!("DELETE FROM log_request WHERE request_id = $1", id)
            .execute(&mut *tx)
            .await
            .context(READING)?;
    } else {
        sqlx::query!("UPDATE log_request SET read_at = clock_timestamp() WHERE request_id = $1", id)
            .execute(&mut *tx)
            .await
            .context(READING)?;
    }
    let is = if number < request.parts { LogRequestState::Receiving } else { is };
    Ok(LogReadResult {
        state: is,
        lines: parts.into_iter().map(|part| part.lines).collect(),
        parts_read: number,
        available_logs: row
            .available_logs
            .and_then(|logs| serde_json::from_value(logs).ok())
            .unwrap_or_default(),
        note: row.note,
        at: now,
    })
}

async fn store_log_part_in_tx(
    tx: &mut PgConnection,
    machine: MachineId,
    id: Uuid,
    brought: &LogPart,
) -> Result<PartDecision, BmdbError> {
    let Some(row) = lock_request(tx, machine, id).await? else { return Ok(PartDecision::Discard) };
    let (request, now) = (row.to_request(), database_now(tx).await?);
    let unread = if request.query.follow {
        sqlx::query!(
            r#"SELECT COALESCE(sum(octet_length(lines)), 0)::INT8 AS "bytes!" FROM log_part
               WHERE request_id = $1"#,
            id
        )
        .fetch_one(&mut *tx)
        .await
        .context(STORING)?
        .bytes
    } else {
        0
    };
    let what = decide_part(&request, brought, unread, now);
    match &what {
        PartDecision::Store => {
            let some = !brought.lines.is_empty();
            if some {
                sqlx::query!(
                    "INSERT INTO log_part (request_id, number, lines) VALUES ($1, $2, $3)",
                    id,
                    brought.number,
                    brought.lines
                )
                .execute(&mut *tx)
                .await
                .context(STORING)?;
            }
            let there = Some(&brought.available).filter(|there| !there.is_empty());
            let there = there.and_then(|there| serde_json::to_value(there).ok());
            sqlx::query_file!(
                "../../sql/log/record_part.sql",
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
            .context(STORING)?;
        }
        PartDecision::End(text) => end_request(tx, id, Some(text)).await?,
        PartDecision::Duplicate | PartDecision::Defer | PartDecision::Discard => {}
    }
    Ok(what)
}
