//! The claim engine: leases due machines to idle workers, with weighted priorities.
//!
//! One statement claims for all idle workers of a loop, and the probe reads one index entry to find out whether
//! anything is due. It sends a second statement only when what is due first is not for this claimer. Where a scan
//! begins is decided in `scan_range`: behind the watermark of each class, or without watermarks.
//!
//! # Shares
//!
//! Priority classes share by weight: each class has a *pass* that grows by 1/weight with every claim, and the lowest
//! goes first. A class that was idle gets no credit for that.
//!
//! # Lost answers
//!
//! The answer to a claim can be lost although the claim was committed. The claimer then adopts the work that the
//! database has under the sessions and that no worker here knows of. If it cannot, the session renewer cancels that
//! work later. While a claim is under way its sessions are marked, so that the session renewer does not cancel the work
//! it brings.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::Instant;
use uuid::Uuid;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::engine::claim::scan_range::{RECENT_CLAIMS, ScanRange, full_scan_pause, is_dense};
use crate::engine::session::{Session, Sessions, lock_mutex};
use crate::engine::session_renewer::list_session_work;
use crate::engine::work::Work;
use model::ids::{MachineId, SessionId};
use model::process::Process;
use model::schedule::{BUCKETS, RULES_VERSION};
use model::time::Timestamp;

mod scan_range;

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
            .statement_with("reading what is due next", providers, move |connection, providers| {
                Box::pin(probe_next_due(connection, process, providers))
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
        tracing::warn!(%error, process = %self.process, "the answer to a claim was lost; reading what it did");
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
    bmdb.statement_with("claiming", parameters, move |pool, p| {
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
