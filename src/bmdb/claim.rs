//! Claiming due machines, for all idle workers of a loop in one statement.
//!
//! # Watermarks
//!
//! A claimed row leaves the index of what is claimable, but its dead entry
//! stays in front of every later scan until vacuum may remove it, and somebody's
//! long snapshot can forbid that for hours. So a claimer remembers per class
//! how far it has come and begins its scans there. Two things keep that from
//! hiding work: rows are armed at the time of their transaction or later, and
//! the scan begins a slack before the mark that is longer than any transaction
//! may last; and what comes back with an old due time (a cancelled or lost work
//! item) is found by the scans without marks, every five seconds and before
//! "nothing is due" is ever said.
//!
//! A scan without marks passes every dead entry there is. Where that takes long,
//! a claim that finds nothing does not go on to one each time, but rests from them
//! for nine times as long, and never for more than the five seconds; until then
//! it says only that it has seen nothing ([`Claimed::NotSeen`]).
//!
//! A slack costs the entries of what was claimed within it. A claimer that has
//! claimed hundreds of machines within the long one would pass all of them with
//! every claim; it takes a short slack, which covers nearly every transaction,
//! and the long one once a second.
//!
//! # Shares
//!
//! Priority classes share by weight: each class has a *pass* that grows by
//! 1/weight with every claim, and the lowest goes first. A class that was idle
//! gets no credit for that.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::keeper::rows_of;
use crate::bmdb::session::{Session, Sessions, lock};
use crate::bmdb::work::Work;
use crate::model::ids::{MachineId, SessionId};
use crate::model::process::Process;
use crate::model::schedule::{BUCKETS, RULES_VERSION};
use crate::model::time::{Timestamp, before};

/// What a claim came back with.
#[derive(Debug)]
pub enum Claimed {
    /// At least one machine.
    Work(Vec<Work>),
    /// There was work, and somebody else was quicker: try again soon.
    Contended,
    /// Nothing is due.
    Empty,
    /// Nothing was seen where work was last, and everywhere was looked too recently for what that costs: look
    /// again after this long, or when something is announced.
    NotSeen(Duration),
}

/// What one index probe told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Something is due, or a timer is to be looked at.
    Due,
    /// Something will be due after this long.
    In(Duration),
    /// Nothing is scheduled.
    Never,
}

/// Longer than nearly every transaction lasts.
const NEAR: Duration = Duration::from_millis(500);
/// Longer than any transaction may last: `statement_timeout` plus
/// `idle_in_transaction_session_timeout`, twice over.
const FAR: Duration = Duration::from_secs(30);
/// How often a scan goes so far back at least.
const FAR_SCAN_EVERY: Duration = Duration::from_secs(1);
/// Claims within that time whose entries every scan may pass.
const PASSED: usize = 256;
/// How often watermarks are ignored.
const FULL_SCAN_EVERY: Duration = Duration::from_secs(5);
/// A scan without marks that took no longer may always be made again.
const CHEAP: Duration = Duration::from_millis(10);
/// The share of the time that dearer ones may take, as one in so many; more only where one takes longer than a ninth
/// of [`FULL_SCAN_EVERY`].
const FULL_SCAN_SHARE: u32 = 10;

/// How long after the end of a scan without marks, which took so long, a claim that finds nothing does not go on
/// to another one.
fn rest_after(took: Duration) -> Duration {
    if took <= CHEAP { Duration::ZERO } else { (took * (FULL_SCAN_SHARE - 1)).min(FULL_SCAN_EVERY) }
}

/// Where a scan begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scan {
    /// Shortly before the mark.
    Near,
    /// Before what any transaction can still bring.
    Far,
    /// At the beginning.
    Full,
}

impl Scan {
    /// Which it is time for, by how long ago the last ones were; `dense` when there is much to pass on
    /// the way from far back.
    fn due(since_far: Option<Duration>, since_full: Option<Duration>, dense: bool) -> Self {
        if since_full.is_none_or(|since| since >= FULL_SCAN_EVERY) {
            Self::Full
        } else if !dense || since_far.is_none_or(|since| since >= FAR_SCAN_EVERY) {
            Self::Far
        } else {
            Self::Near
        }
    }

    /// Where it begins in a class that has come to `mark`.
    fn floor(self, mark: Option<Timestamp>) -> Timestamp {
        let slack = match self {
            Self::Near => NEAR,
            Self::Far => FAR,
            Self::Full => return Timestamp::UNIX_EPOCH,
        };
        mark.map_or(Timestamp::UNIX_EPOCH, |mark| before(mark, slack))
    }
}

type Class = (String, i64, i64);

/// Claims for one control loop of one process.
#[derive(Debug)]
pub struct Claimer {
    sessions: Sessions,
    process: Process,
    providers: Vec<String>,
    /// The latest due time that was claimed in each class.
    marks: HashMap<Class, Timestamp>,
    /// The due times of the last claims, [`PASSED`] at the most, oldest claim first.
    recent: VecDeque<Timestamp>,
    pass: [f64; 3],
    /// When the last scan was made that went so far back at least.
    last_far_scan: Option<Instant>,
    last_full_scan: Option<Instant>,
    /// No scan without marks follows a claim that found nothing before this.
    rests_until: Option<Instant>,
}

impl Claimer {
    /// Claims `process` on machines of these providers.
    #[must_use]
    pub fn new(sessions: Sessions, process: Process, providers: Vec<String>) -> Self {
        Self {
            sessions,
            process,
            providers,
            marks: HashMap::new(),
            recent: VecDeque::with_capacity(PASSED),
            pass: [0.0; 3],
            last_far_scan: None,
            last_full_scan: None,
            rests_until: None,
        }
    }

    fn bmdb(&self) -> &Bmdb {
        &self.sessions.inner.bmdb
    }

    /// Claims on machines of these providers from now on. What is known of the others is kept for when they
    /// come back.
    pub fn only(&mut self, providers: Vec<String>) {
        self.providers = providers;
    }

    /// Asks whether anything is due that could be claimed. One index probe, whatever the size of the
    /// fleet; a second statement only when what is due first is not for this process.
    pub async fn probe(&self) -> Result<Next, BmdbError> {
        let (process, providers) = (self.process, self.providers.clone());
        let next = self
            .bmdb()
            .statement("asking what is due next", move |connection| {
                let providers = providers.clone();
                Box::pin(async move { next_of(connection, process, &providers).await })
            })
            .await?;
        Ok(match next {
            None => Next::Never,
            Some((true, _)) => Next::Due,
            Some((false, wait_ms)) => Next::In(Duration::from_millis(u64::try_from(wait_ms).unwrap_or(0))),
        })
    }

    /// Claims at most one due machine for each of these idle sessions.
    ///
    /// [`Claimed::Empty`] is said only after a scan without marks.
    pub async fn claim(&mut self, idle: &[Session]) -> Result<Claimed, BmdbError> {
        if idle.is_empty() || self.providers.is_empty() {
            return Ok(Claimed::Empty);
        }
        let since = |last: Option<Instant>| last.map(|last| last.elapsed());
        let scan = Scan::due(since(self.last_far_scan), since(self.last_full_scan), is_dense(&self.recent));
        let claimed = self.claim_once(idle, scan).await?;
        if scan == Scan::Full || !matches!(claimed, Claimed::Empty) {
            return Ok(claimed);
        }
        let rests = self.rests_until.map(|until| until.saturating_duration_since(Instant::now()));
        match rests {
            Some(rests) if !rests.is_zero() => Ok(Claimed::NotSeen(rests)),
            _ => self.claim_once(idle, Scan::Full).await,
        }
    }

    async fn claim_once(&mut self, idle: &[Session], scan: Scan) -> Result<Claimed, BmdbError> {
        let _claiming = Claiming::new(idle);
        let parameters = self.parameters(idle, scan);
        let began = Instant::now();
        if scan != Scan::Near {
            self.last_far_scan = Some(began);
        }
        if scan == Scan::Full {
            self.last_full_scan = Some(began);
        }
        let sent = send(self.bmdb(), parameters).await;
        if scan == Scan::Full {
            self.rests_until = Some(Instant::now() + rest_after(began.elapsed()));
        }
        let rows = match sent {
            Ok(rows) => rows,
            Err(error) => return self.adopt(idle, error).await,
        };
        let candidates = rows.first().map_or(0, |row| row.candidates);
        let live = rows.first().map_or(0, |row| row.sessions);
        let mut work = Vec::new();
        let mut taken = Vec::new();
        for row in rows {
            let (Some(machine), Some(session), Some(fence)) = (row.machine_id, row.session_id, row.fence)
            else {
                continue;
            };
            let Some(session) = idle.iter().find(|candidate| candidate.id() == SessionId(session)) else {
                continue;
            };
            let claimed = Work::take(&self.sessions, session, MachineId(machine), self.process, fence);
            work.push(claimed.having_waited(row.waited));
            if let (Some(provider), Some(priority), Some(bucket), Some(ready_at)) =
                (row.provider, row.priority, row.bucket, row.ready_at)
            {
                taken.push(((provider, priority, bucket), ready_at));
            }
        }
        self.advance(&taken);
        Ok(if !work.is_empty() {
            Claimed::Work(work)
        } else if candidates > 0 && live > 0 {
            Claimed::Contended
        } else {
            Claimed::Empty
        })
    }

    /// The claim may have happened although its answer was lost: what the database says these
    /// sessions hold and nobody here knows of is taken over.
    async fn adopt(&self, idle: &[Session], error: BmdbError) -> Result<Claimed, BmdbError> {
        if !matches!(error, BmdbError::UnknownOutcome(_) | BmdbError::Task { .. }) {
            return Err(error);
        }
        tracing::warn!(%error, process = %self.process, "the answer to a claim was lost; asking what it did");
        let mut work = Vec::new();
        for row in rows_of(self.bmdb(), idle).await? {
            let Some(session) = idle.iter().find(|candidate| candidate.id() == row.session) else { continue };
            let known = lock(&session.state.live).contains_key(&(row.machine, row.lane));
            if !known && row.process == self.process.as_str() {
                work.push(Work::take(&self.sessions, session, row.machine, self.process, row.fence));
            }
        }
        if work.is_empty() { Err(error) } else { Ok(Claimed::Work(work)) }
    }

    fn parameters(&self, idle: &[Session], scan: Scan) -> Parameters {
        let (_, policy) = self.bmdb().policy();
        let mut parameters = Parameters {
            process: self.process,
            sessions: idle.iter().map(|session| session.id().0).collect(),
            providers: Vec::new(),
            priorities: Vec::new(),
            buckets: Vec::new(),
            floors: Vec::new(),
            passes: Vec::new(),
            weights: Vec::new(),
            limit: i64::try_from(idle.len()).unwrap_or(i64::MAX).saturating_mul(2),
        };
        for provider in &self.providers {
            for (priority, weight) in policy.priority_weights.iter().enumerate() {
                for bucket in 0..i64::from(BUCKETS) {
                    let number = i64::try_from(priority).unwrap_or(0);
                    let mark = self.marks.get(&(provider.clone(), number, bucket)).copied();
                    parameters.providers.push(provider.clone());
                    parameters.priorities.push(number);
                    parameters.buckets.push(bucket);
                    parameters.floors.push(scan.floor(mark));
                    parameters.passes.push(self.pass[priority.min(2)]);
                    parameters.weights.push(f64::from((*weight).max(1)));
                }
            }
        }
        parameters
    }

    fn advance(&mut self, taken: &[(Class, Timestamp)]) {
        let (_, policy) = self.bmdb().policy();
        for (class, ready_at) in taken {
            let mark = self.marks.entry(class.clone()).or_insert(*ready_at);
            *mark = (*mark).max(*ready_at);
            if self.recent.len() == PASSED {
                self.recent.pop_front();
            }
            self.recent.push_back(*ready_at);
            let priority = usize::try_from(class.1).unwrap_or(0).min(2);
            self.pass[priority] += 1.0 / f64::from(policy.priority_weights[priority].max(1));
        }
        let highest = self.pass.iter().copied().fold(0.0_f64, f64::max);
        for pass in &mut self.pass {
            // No class saves up more than one round of the others' claims while it is idle.
            *pass = pass.max(highest - 1.0) - (highest - 1.0).max(0.0);
        }
    }

    /// Looks at timers that came due: moves them by the heartbeats that came since, or makes them
    /// claimable. Returns how many were moved and how many fired.
    pub async fn rearm_timers(&self) -> Result<(i64, i64), BmdbError> {
        let rules = i64::from(RULES_VERSION);
        self.bmdb()
            .statement("re-arming timers", move |pool| {
                Box::pin(async move {
                    let row = sqlx::query_file!("sql/claim/rearm_timers.sql", rules).fetch_one(pool).await?;
                    Ok((row.moved, row.fired))
                })
            })
            .await
    }
}

/// Whether as many claims as every scan may pass lie within the long slack.
fn is_dense(recent: &VecDeque<Timestamp>) -> bool {
    let (Some(first), Some(last)) = (recent.front(), recent.back()) else { return false };
    recent.len() == PASSED && *first > before(*last, FAR)
}

/// Whether anything is due, and else in how many milliseconds; `None` when nothing is scheduled.
async fn next_of(
    connection: &mut PgConnection,
    process: Process,
    providers: &[String],
) -> Result<Option<(bool, i64)>, sqlx::Error> {
    let rules = i64::from(RULES_VERSION);
    let first = sqlx::query_file!("sql/claim/probe.sql", process.as_str(), providers, rules)
        .fetch_optional(&mut *connection)
        .await?;
    match first {
        None => Ok(None),
        Some(row) if row.tells => Ok(Some((row.due, row.wait_ms))),
        Some(_) => {
            let (process, buckets) = (process.as_str(), i64::from(BUCKETS));
            let ours = sqlx::query_file!("sql/claim/probe_classes.sql", process, providers, rules, buckets)
                .fetch_optional(connection)
                .await?;
            Ok(ours.map(|row| (row.due, row.wait_ms)))
        }
    }
}

#[derive(Clone, Debug)]
struct Parameters {
    process: Process,
    sessions: Vec<Uuid>,
    providers: Vec<String>,
    priorities: Vec<i64>,
    buckets: Vec<i64>,
    floors: Vec<Timestamp>,
    passes: Vec<f64>,
    weights: Vec<f64>,
    limit: i64,
}

struct ClaimRow {
    candidates: i64,
    sessions: i64,
    machine_id: Option<Uuid>,
    #[expect(
        dead_code,
        reason = "the lane follows from the process; kept so that both statements have one row"
    )]
    lane: Option<String>,
    fence: Option<i64>,
    session_id: Option<Uuid>,
    provider: Option<String>,
    priority: Option<i64>,
    bucket: Option<i64>,
    ready_at: Option<Timestamp>,
    waited: Option<f64>,
}

async fn send(bmdb: &Bmdb, parameters: Parameters) -> Result<Vec<ClaimRow>, BmdbError> {
    bmdb.statement("claiming", move |pool| {
        let p = parameters.clone();
        Box::pin(async move {
            let rules = i64::from(RULES_VERSION);
            sqlx::query_file_as!(
                ClaimRow,
                "sql/claim/claim.sql",
                &p.sessions,
                p.process.as_str(),
                &p.providers,
                &p.priorities,
                &p.buckets,
                &p.floors,
                &p.passes,
                &p.weights,
                rules,
                p.limit
            )
            .fetch_all(pool)
            .await
        })
    })
    .await
}

/// Marks sessions as having a claim under way, so that the keeper does not cancel what it brings.
struct Claiming(Vec<Session>);

impl Claiming {
    fn new(sessions: &[Session]) -> Self {
        for session in sessions {
            *lock(&session.state.claiming) += 1;
        }
        Self(sessions.to_vec())
    }
}

impl Drop for Claiming {
    fn drop(&mut self) {
        for session in &self.0 {
            *lock(&session.state.claiming) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::after;

    #[test]
    fn scans_go_back_as_far_as_it_is_time_for() {
        let millis = |millis| Some(Duration::from_millis(millis));
        for (since_far, since_full, dense, scan) in [
            (None, None, false, Scan::Full),
            (millis(0), millis(0), false, Scan::Far),
            (millis(0), millis(0), true, Scan::Near),
            (millis(999), millis(4_999), true, Scan::Near),
            (millis(1_000), millis(1_000), true, Scan::Far),
            (None, millis(4_999), true, Scan::Far),
            (millis(0), millis(5_000), true, Scan::Full),
            (millis(0), millis(5_000), false, Scan::Full),
            (millis(0), None, true, Scan::Full),
        ] {
            assert_eq!(Scan::due(since_far, since_full, dense), scan, "{since_far:?} {since_full:?} {dense}");
        }
    }

    #[test]
    fn scans_without_marks_take_a_tenth_of_the_time_where_they_are_dear() {
        for (took, rest) in
            [(0, 0), (10, 0), (11, 99), (100, 900), (555, 4_995), (556, 5_000), (60_000, 5_000)]
        {
            assert_eq!(rest_after(Duration::from_millis(took)), Duration::from_millis(rest), "{took} ms");
        }
    }

    #[test]
    fn claims_are_dense_when_hundreds_lie_within_the_long_slack() {
        let at = |millis: u64| after(Timestamp::UNIX_EPOCH, Duration::from_millis(millis));
        let claims = |count: usize, every: u64| (1..).map(|n| at(n * every)).take(count).collect();
        for (recent, dense) in [
            (VecDeque::new(), false),
            (claims(PASSED - 1, 1), false),
            (claims(PASSED, 1), true),
            (claims(PASSED, 117), true),
            (claims(PASSED, 118), false),
        ] {
            assert_eq!(is_dense(&recent), dense, "{recent:?}");
        }
    }

    #[test]
    fn every_scan_begins_before_the_mark_and_a_class_without_one_is_read_from_its_beginning() {
        let mark = after(Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        let floor = |scan: Scan, mark| scan.floor(mark).timestamp_millis();
        assert_eq!(floor(Scan::Near, Some(mark)), 99_500);
        assert_eq!(floor(Scan::Far, Some(mark)), 70_000);
        for scan in [Scan::Near, Scan::Far, Scan::Full] {
            assert_eq!(floor(scan, None), 0);
        }
        assert_eq!(floor(Scan::Full, Some(mark)), 0);
    }
}
