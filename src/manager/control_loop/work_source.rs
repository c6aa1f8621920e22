//! Work source of a loop: probes for due work, claims it, respects pauses.

use std::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::claim::{Claimed, Claimer, NextDue};
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::engine::work::Work;
use crate::bmdb::orders::loop_pause::{CACHE_TTL, PauseCache};
use crate::manager::limiter::Limiter;
use crate::manager::metrics::{ClaimResult, LoopMetrics};
use crate::model::pause::LoopKind;
use crate::model::process::Process;

/// The result of one search for work.
pub(super) enum SourceOutcome {
    /// Claimed work, each item under one of the sessions.
    Work(Vec<Work>),
    /// Work was due but another shepherd claimed it: search again soon.
    Contended,
    /// No work is due now; how long that holds, if known.
    Idle(NextDue),
}

/// Finds work for one loop.
pub(super) struct WorkSource {
    claimer: Claimer,
    limiter: Limiter,
    /// The process whose work is claimed.
    pub(super) process: Process,
    /// All providers whose machines the loop can handle.
    providers: Vec<String>,
    bmdb: Bmdb,
    pauses: PauseCache,
    /// Number of unpaused providers at the last check.
    unpaused: usize,
}

impl WorkSource {
    /// Finds work of a process on the machines of these providers.
    pub(super) fn new(
        sessions: &Sessions,
        process: Process,
        providers: Vec<String>,
        limiter: Limiter,
    ) -> Self {
        Self {
            claimer: Claimer::new(sessions.clone(), process, providers.clone()),
            limiter,
            process,
            unpaused: providers.len(),
            providers,
            bmdb: sessions.bmdb().clone(),
            pauses: PauseCache::default(),
        }
    }

    /// Finds work for the idle workers that own these sessions. `eager`: something was just announced or claimed.
    pub(super) async fn source_work(
        &mut self,
        idle: &[Session],
        eager: bool,
        metrics: &LoopMetrics,
    ) -> Result<SourceOutcome, BmdbError> {
        if !self.has_unpaused_providers().await? {
            // Silence is detected even while the loop is paused, so that the shown phases are right.
            if self.process == Process::Recovery {
                self.limiter.ready().await;
                self.claimer.rearm_timers().await?;
            }
            return Ok(SourceOutcome::Idle(NextDue::In(CACHE_TTL)));
        }
        if !eager {
            self.limiter.ready().await;
            match self.claimer.probe().await? {
                NextDue::Now => {}
                next => return Ok(SourceOutcome::Idle(next)),
            }
        }
        if self.process == Process::Recovery {
            self.limiter.ready().await;
            self.claimer.rearm_timers().await?;
        }
        self.limiter.ready().await;
        let requested_at = Instant::now();
        let claimed = self.claimer.claim(idle).await;
        metrics.record_claim(ClaimResult::from_claim(&claimed), requested_at.elapsed());
        match claimed? {
            Claimed::Work(work) => Ok(SourceOutcome::Work(work)),
            Claimed::Contended => Ok(SourceOutcome::Contended),
            // Work that is announced meanwhile is claimed at once.
            Claimed::FullScanDeferred(wait) => Ok(SourceOutcome::Idle(NextDue::In(wait))),
            Claimed::Empty => {
                self.limiter.ready().await;
                Ok(SourceOutcome::Idle(self.claimer.probe().await?))
            }
        }
    }

    /// Leaves out the providers whose machines are paused for this loop. Returns whether any is left. A loop without
    /// providers has nothing that could be paused.
    async fn has_unpaused_providers(&mut self) -> Result<bool, BmdbError> {
        if !self.pauses.is_fresh() {
            self.limiter.ready().await;
            let left = self
                .pauses
                .unpaused_providers(&self.bmdb, LoopKind::for_process(self.process), &self.providers)
                .await?;
            if left.len() != self.unpaused {
                let (of, providers) = (LoopKind::for_process(self.process), self.providers.len());
                tracing::info!(loop_name = %of, scopes = left.len(), providers, "pauses of the loop began or ended");
            }
            self.unpaused = left.len();
            self.claimer.set_providers(left);
        }
        Ok(self.unpaused > 0 || self.providers.is_empty())
    }
}
