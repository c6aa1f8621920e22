//! The claim engine: leases due machines to idle workers, with watermarks and weighted priorities.
//!
//! One statement claims for all idle workers of a loop.
//!
//! # Watermarks
//!
//! A claimed row leaves the index of what is claimable, but its dead entry stays in front of every later scan until
//! vacuum may remove it, and another client's long snapshot can forbid that for hours. So a claimer remembers per class
//! how far it has come and begins its scans there. Two things keep that from hiding work. Rows are armed at the time of
//! their transaction or later, and the scan begins a slack before the mark that is longer than any transaction may
//! last. Rows that come back with an old due time (a cancelled or lost work item) are found by the scans without marks,
//! every five seconds and before [`Claimed::Empty`] is returned.
//!
//! A scan without marks passes every dead entry there is. Where that takes long, a claim that finds nothing does not
//! continue with such a scan each time, but pauses them for nine times as long, and never for more than the five
//! seconds; until then it reports only that it has found nothing so far ([`Claimed::FullScanDeferred`]).
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

use crate::connection::Bmdb;
use crate::error::BmdbError;
use crate::session::{Session, Sessions, lock_mutex};
use crate::session_renewer::list_session_work;
use crate::work::Work;
use model::ids::{MachineId, SessionId};
use model::process::Process;
use model::schedule::{BUCKETS, RULES_VERSION};
use model::time::{Timestamp, before};

/// The result of a claim.
#[derive(Debug)]
pub enum Claimed {
    /// At least one machine.
    Work(Vec<Work>),
    /// There was work, and another claimer was quicker: try again soon.
    Contended,
    /// Nothing is due for this claimer.
    Empty,
    /// Nothing was found behind the watermarks, and a full scan is too expensive to repeat yet: claim again after this
    /// long, or at the next wake-up.
    FullScanDeferred(Duration),
}

/// The result of one index probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextDue {
    /// Something is due, or a timer has to be checked.
    Now,
    /// Something will be due after this long.
    In(Duration),
    /// Nothing is scheduled for this claimer.
    Never,
}

/// Longer than nearly every transaction lasts.
const SHORT_SLACK: Duration = Duration::from_millis(500);
/// Longer than any transaction may last: `statement_timeout` plus
/// `idle_in_transaction_session_timeout`, twice over.
const LONG_SLACK: Duration = Duration::from_secs(30);
/// Longest time between two scans with the long slack.
const LONG_SLACK_SCAN_EVERY: Duration = Duration::from_secs(1);
/// Claims within the long slack whose dead entries every scan may pass.
const RECENT_CLAIMS: usize = 256;
/// Longest time between two scans that ignore watermarks.
const FULL_SCAN_EVERY: Duration = Duration::from_secs(5);
/// A full scan that took no longer may always be repeated.
const CHEAP_FULL_SCAN: Duration = Duration::from_millis(10);
/// Expensive full scans may take one part in so many of the time; more only if one takes longer than a ninth of
/// [`FULL_SCAN_EVERY`].
const FULL_SCAN_SHARE: u32 = 10;

/// How long after a full scan that took this long a claim that finds nothing does not continue with another one.
fn full_scan_pause(took: Duration) -> Duration {
    if took <= CHEAP_FULL_SCAN { Duration::ZERO } else { (took * (FULL_SCAN_SHARE - 1)).min(FULL_SCAN_EVERY) }
}

/// Where a scan begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanRange {
    /// A short slack before the watermark.
    ShortSlack,
    /// So far before the watermark that no transaction can still commit an earlier row.
    LongSlack,
    /// At the beginning, without watermarks.
    Full,
}

impl ScanRange {
    /// The range that is due, by how long ago the last scans were. `dense` is true when a scan with the long slack
    /// would pass many dead entries.
    fn choose(since_far: Option<Duration>, since_full: Option<Duration>, dense: bool) -> Self {
        if since_full.is_none_or(|since| since >= FULL_SCAN_EVERY) {
            Self::Full
        } else if !dense || since_far.is_none_or(|since| since >= LONG_SLACK_SCAN_EVERY) {
            Self::LongSlack
        } else {
            Self::ShortSlack
        }
    }

    /// The due time at which a scan begins in a class whose watermark is `mark`.
    fn floor(self, mark: Option<Timestamp>) -> Timestamp {
        let slack = match self {
            Self::ShortSlack => SHORT_SLACK,
            Self::LongSlack => LONG_SLACK,
            Self::Full => return Timestamp::UNIX_EPOCH,
        };
        mark.map_or(Timestamp::UNIX_EPOCH, |mark| before(mark, slack))
    }
}

type QueueClass = (String, i64, i64);

/// Claims for one control loop of one process.
#[derive(Debug)]
pub struct Claimer {
    sessions: Sessions,
    process: Process,
    providers: Vec<String>,
    /// The latest due time that was claimed in each class.
    watermarks: HashMap<QueueClass, Timestamp>,
    /// The due times of the last claims, [`RECENT_CLAIMS`] at the most, oldest claim first.
    recent: VecDeque<Timestamp>,
    pass: [f64; 3],
    /// When the last scan with the long slack, or without watermarks, was made.
    last_long_slack_scan: Option<Instant>,
    last_full_scan: Option<Instant>,
    /// No full scan follows a claim that found nothing before this moment.
    no_full_scan_before: Option<Instant>,
}

impl Claimer {
    /// Claims `process` on machines of these providers.
    #[must_use]
    pub fn new(sessions: Sessions, process: Process, providers: Vec<String>) -> Self {
        Self {
            sessions,
            process,
            providers,
            watermarks: HashMap::new(),
            recent: VecDeque::with_capacity(RECENT_CLAIMS),
            pass: [0.0; 3],
            last_long_slack_scan: None,
            last_full_scan: None,
            no_full_scan_before: None,
        }
    }

    fn bmdb(&self) -> &Bmdb {
        &self.sessions.inner.bmdb
    }

    /// Sets the providers to claim from. The watermarks of others are retained for when they come back.
    pub fn set_providers(&mut self, providers: Vec<String>) {
        self.providers = providers;
    }

    /// Probes whether anything is due that could be claimed. One index probe, whatever the size of the fleet; a second
    /// statement only when what is due first is not for this process.
    pub async fn probe(&self) -> Result<NextDue, BmdbError> {
        let (process, providers) = (self.process, self.providers.clone());
        let next = self
            .bmdb()
            .statement("asking what is due next", move |connection| {
                let providers = providers.clone();
                Box::pin(async move { probe_next_due(connection, process, &providers).await })
            })
            .await?;
        Ok(match next {
            None => NextDue::Never,
            Some((true, _)) => NextDue::Now,
            Some((false, wait_ms)) => NextDue::In(Duration::from_millis(u64::try_from(wait_ms).unwrap_or(0))),
        })
    }

    /// Claims at most one due machine for each of these idle sessions.
    ///
    /// Returns [`Claimed::Empty`] only after a scan without marks.
    pub async fn claim(&mut self, idle: &[Session]) -> Result<Claimed, BmdbError> {
        if idle.is_empty() || self.providers.is_empty() {
            return Ok(Claimed::Empty);
        }
        let since = |last: Option<Instant>| last.map(|last| last.elapsed());
        let scan = ScanRange::choose(
            since(self.last_long_slack_scan),
            since(self.last_full_scan),
            is_dense(&self.recent),
        );
        let claimed = self.claim_once(idle, scan).await?;
        if scan == ScanRange::Full || !matches!(claimed, Claimed::Empty) {
            return Ok(claimed);
        }
        let rests = self.no_full_scan_before.map(|until| until.saturating_duration_since(Instant::now()));
        match rests {
            Some(rests) if !rests.is_zero() => Ok(Claimed::FullScanDeferred(rests)),
            _ => self.claim_once(idle, ScanRange::Full).await,
        }
    }

    async fn claim_once(&mut self, idle: &[Session], scan: ScanRange) -> Result<Claimed, BmdbError> {
        let _claiming = ClaimInProgress::new(idle);
        let parameters = self.claim_parameters(idle, scan);
        let began = Instant::now();
        if scan != ScanRange::ShortSlack {
            self.last_long_slack_scan = Some(began);
        }
        if scan == ScanRange::Full {
            self.last_full_scan = Some(began);
        }
        let sent = send_claim(self.bmdb(), parameters).await;
        if scan == ScanRange::Full {
            self.no_full_scan_before = Some(Instant::now() + full_scan_pause(began.elapsed()));
        }
        let rows = match sent {
            Ok(rows) => rows,
            Err(error) => return self.adopt_lost_claim(idle, error).await,
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
            let claimed = Work::from_claim(&self.sessions, session, MachineId(machine), self.process, fence);
            work.push(claimed.with_queue_delay(row.waited));
            if let (Some(provider), Some(priority), Some(bucket), Some(ready_at)) =
                (row.provider, row.priority, row.bucket, row.ready_at)
            {
                taken.push(((provider, priority, bucket), ready_at));
            }
        }
        self.advance_watermarks(&taken);
        Ok(if !work.is_empty() {
            Claimed::Work(work)
        } else if candidates > 0 && live > 0 {
            Claimed::Contended
        } else {
            Claimed::Empty
        })
    }

    /// The claim may have happened although its answer was lost: work that the database has under these sessions and
    /// that no worker here knows of is adopted.
    async fn adopt_lost_claim(&self, idle: &[Session], error: BmdbError) -> Result<Claimed, BmdbError> {
        if !matches!(error, BmdbError::UnknownOutcome(_) | BmdbError::TaskFailed { .. }) {
            return Err(error);
        }
        tracing::warn!(%error, process = %self.process, "the answer to a claim was lost; asking what it did");
        let mut work = Vec::new();
        for row in list_session_work(self.bmdb(), idle).await? {
            let Some(session) = idle.iter().find(|candidate| candidate.id() == row.session) else { continue };
            let known = lock_mutex(&session.state.live_work).contains_key(&(row.machine, row.lane));
            if !known && row.process == self.process.as_str() {
                work.push(Work::from_claim(&self.sessions, session, row.machine, self.process, row.fence));
            }
        }
        if work.is_empty() { Err(error) } else { Ok(Claimed::Work(work)) }
    }

    fn claim_parameters(&self, idle: &[Session], scan: ScanRange) -> ClaimParameters {
        let (_, policy) = self.bmdb().policy();
        let mut parameters = ClaimParameters {
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
                    let mark = self.watermarks.get(&(provider.clone(), number, bucket)).copied();
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

    fn advance_watermarks(&mut self, taken: &[(QueueClass, Timestamp)]) {
        let (_, policy) = self.bmdb().policy();
        for (class, ready_at) in taken {
            let mark = self.watermarks.entry(class.clone()).or_insert(*ready_at);
            *mark = (*mark).max(*ready_at);
            if self.recent.len() == RECENT_CLAIMS {
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

    /// Checks timers that came due: moves them by the heartbeats that came since, or makes them claimable. Returns how
    /// many were moved and how many fired.
    pub async fn rearm_timers(&self) -> Result<(i64, i64), BmdbError> {
        let rules = i64::from(RULES_VERSION);
        self.bmdb()
            .statement("re-arming timers", move |pool| {
                Box::pin(async move {
                    let row =
                        sqlx::query_file!("../../sql/claim/rearm_timers.sql", rules).fetch_one(pool).await?;
                    Ok((row.moved, row.fired))
                })
            })
            .await
    }
}

/// Whether the long slack contains as many claims as every scan may pass.
fn is_dense(recent: &VecDeque<Timestamp>) -> bool {
    let (Some(first), Some(last)) = (recent.front(), recent.back()) else { return false };
    recent.len() == RECENT_CLAIMS && *first > before(*last, LONG_SLACK)
}

/// Milliseconds until something is due, 0 if something is due now; `None` when nothing is scheduled.
async fn probe_next_due(
    connection: &mut PgConnection,
    process: Process,
    providers: &[String],
) -> Result<Option<(bool, i64)>, sqlx::Error> {
    let rules = i64::from(RULES_VERSION);
    let first = sqlx::query_file!("../../sql/claim/probe.sql", process.as_str(), providers, rules)
        .fetch_optional(&mut *connection)
        .await?;
    match first {
        None => Ok(None),
        Some(row) if row.tells => Ok(Some((row.due, row.wait_ms))),
        Some(_) => {
            let (process, buckets) = (process.as_str(), i64::from(BUCKETS));
            let ours =
                sqlx::query_file!("../../sql/claim/probe_classes.sql", process, providers, rules, buckets)
                    .fetch_optional(connection)
                    .await?;
            Ok(ours.map(|row| (row.due, row.wait_ms)))
        }
    }
}

#[derive(Clone, Debug)]
struct ClaimParameters {
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

async fn send_claim(bmdb: &Bmdb, parameters: ClaimParameters) -> Result<Vec<ClaimRow>, BmdbError> {
    bmdb.statement("claiming", move |pool| {
        let p = parameters.clone();
        Box::pin(async move {
            let rules = i64::from(RULES_VERSION);
            sqlx::query_file_as!(
                ClaimRow,
                "../../sql/claim/claim.sql",
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

/// Marks sessions as having a claim under way, so that the session renewer does not cancel the work it brings.
struct ClaimInProgress(Vec<Session>);

impl ClaimInProgress {
    fn new(sessions: &[Session]) -> Self {
        for session in sessions {
            *lock_mutex(&session.state.claims_in_progress) += 1;
        }
        Self(sessions.to_vec())
    }
}

impl Drop for ClaimInProgress {
    fn drop(&mut self) {
        for session in &self.0 {
            *lock_mutex(&session.state.claims_in_progress) -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::time::after;

    #[test]
    fn scan_range_depends_on_time_since_the_last_scans() {
        let millis = |millis| Some(Duration::from_millis(millis));
        for (since_far, since_full, dense, scan) in [
            (None, None, false, ScanRange::Full),
            (millis(0), millis(0), false, ScanRange::LongSlack),
            (millis(0), millis(0), true, ScanRange::ShortSlack),
            (millis(999), millis(4_999), true, ScanRange::ShortSlack),
            (millis(1_000), millis(1_000), true, ScanRange::LongSlack),
            (None, millis(4_999), true, ScanRange::LongSlack),
            (millis(0), millis(5_000), true, ScanRange::Full),
            (millis(0), millis(5_000), false, ScanRange::Full),
            (millis(0), None, true, ScanRange::Full),
        ] {
            assert_eq!(
                ScanRange::choose(since_far, since_full, dense),
                scan,
                "{since_far:?} {since_full:?} {dense}"
            );
        }
    }

    #[test]
    fn slow_full_scans_take_at_most_a_tenth_of_the_time() {
        for (took, rest) in
            [(0, 0), (10, 0), (11, 99), (100, 900), (555, 4_995), (556, 5_000), (60_000, 5_000)]
        {
            assert_eq!(
                full_scan_pause(Duration::from_millis(took)),
                Duration::from_millis(rest),
                "{took} ms"
            );
        }
    }

    #[test]
    fn claims_are_dense_when_hundreds_lie_within_the_long_slack() {
        let at = |millis: u64| after(Timestamp::UNIX_EPOCH, Duration::from_millis(millis));
        let claims = |count: usize, every: u64| (1..).map(|n| at(n * every)).take(count).collect();
        for (recent, dense) in [
            (VecDeque::new(), false),
            (claims(RECENT_CLAIMS - 1, 1), false),
            (claims(RECENT_CLAIMS, 1), true),
            (claims(RECENT_CLAIMS, 117), true),
            (claims(RECENT_CLAIMS, 118), false),
        ] {
            assert_eq!(is_dense(&recent), dense, "{recent:?}");
        }
    }

    #[test]
    fn scans_start_before_the_watermark_or_at_the_epoch_without_one() {
        let mark = after(Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        let floor = |scan: ScanRange, mark| scan.floor(mark).timestamp_millis();
        assert_eq!(floor(ScanRange::ShortSlack, Some(mark)), 99_500);
        assert_eq!(floor(ScanRange::LongSlack, Some(mark)), 70_000);
        for scan in [ScanRange::ShortSlack, ScanRange::LongSlack, ScanRange::Full] {
            assert_eq!(floor(scan, None), 0);
        }
        assert_eq!(floor(ScanRange::Full, Some(mark)), 0);
    }
}
