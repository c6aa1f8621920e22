//! A checker of what shepherds did. It shares no code with them.
//!
//! It reads rows of the BMDB and the simulator's journal of the calls that it received, and knows no more of the engine
//! than what its tables promise. It returns the violations. An empty list means that, as far as an outside observer can
//! tell, every machine was worked on by one worker at a time and was created once, and every lost lease was recorded.

pub(crate) mod planted;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use chrono::{DateTime, Utc};
use serde_json::Value;
use sqlx::{FromRow, PgPool};
use uuid::Uuid;

/// A row of `history` that begins or ends a work item.
#[derive(Clone, Debug, FromRow)]
pub(crate) struct Edge {
    pub(crate) machine_id: Uuid,
    pub(crate) lane: String,
    pub(crate) fence: i64,
    pub(crate) event: String,
    pub(crate) session_id: Uuid,
    pub(crate) at: DateTime<Utc>,
}

/// A row of `intent` for the creation of a machine.
#[derive(Clone, Debug, FromRow)]
pub(crate) struct Creation {
    pub(crate) intent_id: Uuid,
    pub(crate) outcome: Option<String>,
}

/// A row of `session`, with the process id recorded in it.
#[derive(Clone, Debug, FromRow)]
pub(crate) struct SessionRow {
    pub(crate) session_id: Uuid,
    pub(crate) pid: i64,
    pub(crate) closed_at: Option<DateTime<Utc>>,
}

/// A row of `machine_provided`.
#[derive(Clone, Debug, FromRow)]
pub(crate) struct Provided {
    pub(crate) machine_id: Uuid,
    pub(crate) provider_id: String,
}

/// One call that the simulator received; its place in the journal is its time.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) start: u64,
    /// `u64::MAX` for a call that never ended.
    pub(crate) end: u64,
    pub(crate) what: String,
    pub(crate) machine: Option<String>,
    pub(crate) intent: Option<String>,
    pub(crate) arguments: Value,
    pub(crate) outcome: String,
    pub(crate) result: Value,
}

impl Call {
    /// Whether it had an effect: its response may be lost, or its caller have disconnected, after the effect.
    fn was_done(&self) -> bool {
        self.outcome == "ok" || self.result["done"] == true
    }
}

/// All records that are checked.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    pub(crate) edges: Vec<Edge>,
    pub(crate) creations: Vec<Creation>,
    pub(crate) sessions: Vec<SessionRow>,
    pub(crate) provided: Vec<Provided>,
    pub(crate) live_work: i64,
    pub(crate) calls: Vec<Call>,
}

impl Records {
    /// Reads the records from a database that no process uses any more.
    pub(crate) async fn read(pool: &PgPool, journal: &[Value]) -> Result<Self> {
        Ok(Self {
            edges: sqlx::query_as(
                "SELECT machine_id, lane, fence, event, session_id, at FROM history WHERE edge IS NOT NULL",
            )
            .fetch_all(pool)
            .await?,
            creations: sqlx::query_as("SELECT intent_id, outcome FROM intent WHERE kind = 'create'")
                .fetch_all(pool)
                .await?,
            sessions: sqlx::query_as(
                "SELECT session_id, (runtime_info->>'pid')::INT8 AS pid, closed_at FROM session",
            )
            .fetch_all(pool)
            .await?,
            provided: sqlx::query_as("SELECT machine_id, provider_id FROM machine_provided")
                .fetch_all(pool)
                .await?,
            live_work: sqlx::query_scalar("SELECT count(*) FROM work").fetch_one(pool).await?,
            calls: calls(journal)?,
        })
    }
}

/// Pairs the starts and ends of a journal.
fn calls(journal: &[Value]) -> Result<Vec<Call>> {
    let mut found: BTreeMap<u64, Call> = BTreeMap::new();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    for line in journal {
        let number = line["call"].as_u64().context("a line without its call")?;
        if line["phase"] == "start" {
            let call = Call {
                start: number,
                end: u64::MAX,
                what: text(&line["what"]).context("a call that says nothing")?,
                machine: text(&line["machine"]),
                intent: text(&line["intent"]),
                arguments: line["arguments"].clone(),
                outcome: "cut off".to_owned(),
                result: Value::Null,
            };
            found.insert(number, call);
        } else {
            let call = found.get_mut(&number).context("an end without its start")?;
            call.end = line["seq"].as_u64().context("a line without its number")?;
            call.outcome = text(&line["outcome"]).context("an end without an outcome")?;
            call.result = line["result"].clone();
        }
    }
    Ok(found.into_values().collect())
}

/// A violated invariant, with the text of what was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Violation {
    /// Two work items of one machine's lane were live at once, or two calls that touch one machine overlapped.
    Overlap(String),
    /// A machine was created, recorded or adopted twice, or only one of the provider and the BMDB knows it.
    Twice(String),
    /// A lease was lost, and its end was not recorded exactly once.
    LostUntold(String),
    /// A fence has no beginning, more than one, or more than one end, or was skipped.
    Fence(String),
    /// A machine accepted an order with a lower fence than one that it had accepted, or with one that no session held.
    WentBack(String),
    /// Something happened under a session after it was closed.
    AfterClose(String),
    /// Work or sessions are left behind.
    LeftBehind(String),
}

/// Calls by which a shepherd touches a machine. Calls that only read are not among them.
pub(crate) const TOUCHES: [&str; 6] = ["probe", "upload", "enroll-command", "reboot", "power", "release"];

/// All violations in these records.
pub(crate) fn check(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    leases(records, &mut found);
    touches(records, &mut found);
    machines(records, &mut found);
    orders(records, &mut found);
    left_behind(records, &mut found);
    found.sort();
    found
}

/// Each fence of each lane begins once, ends once, and before the next one begins.
fn leases(records: &Records, found: &mut Vec<Violation>) {
    let closed: BTreeMap<Uuid, DateTime<Utc>> =
        records.sessions.iter().filter_map(|row| Some((row.session_id, row.closed_at?))).collect();
    let mut lanes: BTreeMap<(Uuid, &str), BTreeMap<i64, Vec<&Edge>>> = BTreeMap::new();
    for edge in &records.edges {
        let lane = lanes.entry((edge.machine_id, &edge.lane)).or_default();
        lane.entry(edge.fence).or_default().push(edge);
    }
    for ((machine, lane), fences) in lanes {
        let mut ended: Option<DateTime<Utc>> = None;
        for (expected, (fence, edges)) in (1..).zip(&fences) {
            let name = format!("{machine} {lane} fence {fence}");
            if expected != *fence {
                found.push(Violation::Fence(format!("{name} comes where {expected} should")));
            }
            let (starts, ends): (Vec<&Edge>, Vec<&Edge>) =
                edges.iter().copied().partition(|edge| edge.event == "Started");
            let &[start] = starts.as_slice() else {
                found.push(Violation::Fence(format!("{name} began {} times", starts.len())));
                continue;
            };
            if ended.is_some_and(|ended| start.at < ended) {
                found.push(Violation::Overlap(format!("{name} began before the one before it ended")));
            }
            let over = closed.get(&start.session_id);
            match ends.as_slice() {
                &[end] => {
                    ended = Some(end.at);
                    let expired = end.event == "Expired";
                    if expired && over.is_none_or(|over| end.at < *over) {
                        found.push(Violation::LostUntold(format!("{name} expired under a living session")));
                    }
                    if !expired && over.is_some_and(|over| *over < end.at) {
                        found.push(Violation::AfterClose(format!("{name}: {}", end.event)));
                    }
                    if end.session_id != start.session_id {
                        found.push(Violation::Fence(format!("{name} was ended by another session")));
                    }
                }
                [] => found.push(match over {
                    Some(_) => Violation::LostUntold(format!("{name} was lost and has no end")),
                    None => Violation::LeftBehind(format!("{name} has no end")),
                }),
                several if several.iter().any(|end| end.event == "Expired") => {
                    found.push(Violation::LostUntold(format!("{name} has {} ends", several.len())));
                }
                several => found.push(Violation::Fence(format!("{name} has {} ends", several.len()))),
            }
        }
    }
}

/// No two calls that touch one machine overlap, even of different callers: work on it is one step after another.
fn touches(records: &Records, found: &mut Vec<Violation>) {
    let mut by_machine: BTreeMap<&str, Vec<&Call>> = BTreeMap::new();
    for call in records.calls.iter().filter(|call| TOUCHES.contains(&call.what.as_str())) {
        by_machine.entry(call.machine.as_deref().unwrap_or_default()).or_default().push(call);
    }
    for (machine, mut calls) in by_machine {
        calls.sort_by_key(|call| call.start);
        for pair in calls.windows(2) {
            if pair[1].start < pair[0].end {
                found.push(Violation::Overlap(format!(
                    "{machine}: {} (line {}) during {} (lines {} to {})",
                    pair[1].what, pair[1].start, pair[0].what, pair[0].start, pair[0].end
                )));
            }
        }
    }
}

/// The machines that the provider created are exactly those that the BMDB knows.
fn machines(records: &Records, found: &mut Vec<Violation>) {
    let twice = |what: String| Violation::Twice(what);
    // A repeated request under the same intent returns the same machine, and is no second one. A request counts
    // if its response was lost after the effect.
    let mut made: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut intents: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for call in records.calls.iter().filter(|call| call.what == "create" && call.was_done()) {
        let id = call.result["answer"]["id"].as_str().unwrap_or_default();
        let intent = call.intent.as_deref().unwrap_or_default();
        made.entry(id).or_default().insert(intent);
        intents.entry(intent).or_default().insert(id);
    }
    let recorded: BTreeSet<String> =
        records.creations.iter().map(|creation| creation.intent_id.to_string()).collect();
    for (id, of) in &made {
        if of.len() != 1 {
            found.push(twice(format!("{id} was made under {} intents", of.len())));
        }
        if let Some(unknown) = of.iter().find(|intent| !recorded.contains(**intent)) {
            found.push(twice(format!("{id} was made under intent {unknown}, which nobody recorded")));
        }
    }
    for (intent, ids) in intents.iter().filter(|(_, ids)| ids.len() != 1) {
        found.push(twice(format!("intent {intent} made {} machines", ids.len())));
    }
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    for provided in &records.provided {
        *known.entry(&provided.provider_id).or_default() += 1;
    }
    for (id, times) in known.iter().filter(|(_, times)| **times != 1) {
        found.push(twice(format!("{id} is recorded {times} times")));
    }
    for id in made.keys().filter(|id| !known.contains_key(**id)) {
        found.push(twice(format!("{id} was made and is not recorded")));
    }
    // The caller died before the response, so the journal does not show whether the machine was made. The outcome
    // recorded under that intent shows that it was.
    let unanswered: BTreeSet<&str> = records
        .calls
        .iter()
        .filter(|call| call.what == "create" && matches!(call.outcome.as_str(), "dropped" | "cut off"))
        .filter_map(|call| call.intent.as_deref())
        .collect();
    let adopted: BTreeSet<String> = records
        .creations
        .iter()
        .filter(|creation| unanswered.contains(creation.intent_id.to_string().as_str()))
        .filter_map(|creation| creation.outcome.clone())
        .collect();
    for provided in records.provided.iter().filter(|one| !made.contains_key(one.provider_id.as_str())) {
        if !adopted.contains(&format!("machine {}", provided.machine_id)) {
            found.push(twice(format!("{} is recorded and was never made", provided.provider_id)));
        }
    }
    let mut outcomes: BTreeMap<&str, usize> = BTreeMap::new();
    for outcome in records.creations.iter().filter_map(|creation| creation.outcome.as_deref()) {
        if let Some(machine) = outcome.strip_prefix("machine ") {
            *outcomes.entry(machine).or_default() += 1;
        }
    }
    for (machine, times) in outcomes.iter().filter(|(_, times)| **times != 1) {
        found.push(twice(format!("{machine} is the outcome of {times} intents")));
    }
}

/// The fences that a machine accepted never decrease, and a session held each of them.
fn orders(records: &Records, found: &mut Vec<Violation>) {
    let held: BTreeSet<(String, i64)> = records
        .edges
        .iter()
        .filter(|edge| edge.lane == "access" && edge.event == "Started")
        .map(|edge| (edge.machine_id.to_string(), edge.fence))
        .collect();
    let names: BTreeMap<&str, String> = records
        .provided
        .iter()
        .map(|provided| (provided.provider_id.as_str(), provided.machine_id.to_string()))
        .collect();
    let mut highest: BTreeMap<&str, i64> = BTreeMap::new();
    let mut accepted: Vec<&Call> =
        records.calls.iter().filter(|call| call.what == "enroll" && call.was_done()).collect();
    accepted.sort_by_key(|call| call.end);
    for call in accepted {
        let machine = call.machine.as_deref().unwrap_or_default();
        let fence = call.arguments["fence"].as_i64().unwrap_or_default();
        let before = highest.entry(machine).or_insert(fence);
        if fence < *before {
            found.push(Violation::WentBack(format!("{machine} took fence {fence} after {before}")));
        }
        *before = fence.max(*before);
        let text = call.arguments["machine_id"].as_str().unwrap_or_default();
        if names.get(machine).map(String::as_str) != Some(text) {
            found.push(Violation::WentBack(format!("{machine} was enrolled as {text}")));
        }
        if !held.contains(&(text.to_owned(), fence)) {
            found.push(Violation::WentBack(format!("{machine} took fence {fence}, which nobody held")));
        }
    }
}

fn left_behind(records: &Records, found: &mut Vec<Violation>) {
    if records.live_work != 0 {
        found.push(Violation::LeftBehind(format!("{} work items", records.live_work)));
    }
    for session in records.sessions.iter().filter(|session| session.closed_at.is_none()) {
        found.push(Violation::LeftBehind(format!("session {} of {}", session.session_id, session.pid)));
    }
}
