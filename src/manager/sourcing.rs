//! Where a loop's work comes from: asking what is due, claiming it, and keeping from what people paused.

use std::time::Instant;

use crate::bmdb::claim::{Claimed, Claimer, Next};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::pause::{BELIEVED, Pauses};
use crate::bmdb::session::{Session, Sessions};
use crate::bmdb::work::Work;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::{ClaimResult, LoopMetrics};
use crate::model::pause::Loop;
use crate::model::process::Process;

/// What looking for work came to.
pub(super) enum Sourced {
    /// Work, each under one of the sessions.
    Work(Vec<Work>),
    /// There was some, and somebody else was quicker: look again soon.
    Contended,
    /// There is none now, and perhaps it is known until when.
    Nothing(Next),
}

/// Where a loop's work comes from.
pub(super) struct Sourcing {
    claimer: Claimer,
    limiter: Limiter,
    /// What is claimed.
    pub(super) process: Process,
    /// Everybody's whose machines the loop can handle.
    providers: Vec<String>,
    bmdb: Bmdb,
    pauses: Pauses,
    /// How many of the providers were left when it was last looked.
    left: usize,
}

impl Sourcing {
    /// Looks for work of a process on these providers' machines.
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
            left: providers.len(),
            providers,
            bmdb: sessions.bmdb().clone(),
            pauses: Pauses::default(),
        }
    }

    /// Looks for work for the idle workers that these sessions are of; `eager` when something was just
    /// announced or claimed.
    pub(super) async fn source(
        &mut self,
        idle: &[Session],
        eager: bool,
        metrics: &LoopMetrics,
    ) -> Result<Sourced, BmdbError> {
        if !self.may_begin().await? {
            // Silence is noticed all the same, so that phases are told as they are.
            if self.process == Process::Recovery {
                self.limiter.ready().await;
                self.claimer.rearm_timers().await?;
            }
            return Ok(Sourced::Nothing(Next::In(BELIEVED)));
        }
        if !eager {
            self.limiter.ready().await;
            match self.claimer.probe().await? {
                Next::Due => {}
                next => return Ok(Sourced::Nothing(next)),
            }
        }
        if self.process == Process::Recovery {
            self.limiter.ready().await;
            self.claimer.rearm_timers().await?;
        }
        self.limiter.ready().await;
        let asked = Instant::now();
        let claimed = self.claimer.claim(idle).await;
        metrics.looked(ClaimResult::of(&claimed), asked.elapsed());
        match claimed? {
            Claimed::Work(work) => Ok(Sourced::Work(work)),
            Claimed::Contended => Ok(Sourced::Contended),
            // What is announced meanwhile is claimed at once.
            Claimed::NotSeen(wait) => Ok(Sourced::Nothing(Next::In(wait))),
            Claimed::Empty => {
                self.limiter.ready().await;
                Ok(Sourced::Nothing(self.claimer.probe().await?))
            }
        }
    }

    /// Leaves out the providers whose machines are paused for this loop; says whether any is left. A loop
    /// without providers has nothing that could be paused.
    async fn may_begin(&mut self) -> Result<bool, BmdbError> {
        if !self.pauses.are_known() {
            self.limiter.ready().await;
            let left = self.pauses.left(&self.bmdb, Loop::of(self.process), &self.providers).await?;
            if left.len() != self.left {
                let (of, providers) = (Loop::of(self.process), self.providers.len());
                tracing::info!(loop_name = %of, left = left.len(), providers, "people paused or resumed it");
            }
            self.left = left.len();
            self.claimer.only(left);
        }
        Ok(self.left > 0 || self.providers.is_empty())
    }
}
