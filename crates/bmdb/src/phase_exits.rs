//! Phases that machines leave in a transaction, observed in a histogram after the commit.
//!
//! A transaction may run several times, and roll back what it did; the exits it recorded are dropped with it.

use std::cell::RefCell;
use std::time::Duration;

use crate::metrics::BmdbMetrics;
use model::phase::Phase;

/// Phases, and how long a machine had been in each.
pub(crate) type PhaseExits = Vec<(Phase, Duration)>;

tokio::task_local! {
    static PHASE_EXITS: RefCell<PhaseExits>;
}

/// Runs a transaction, and returns its result with the exits it recorded.
pub(crate) async fn collect_exits<T>(transaction: impl Future<Output = T>) -> (T, PhaseExits) {
    let noted = async {
        let result = transaction.await;
        (result, PHASE_EXITS.with(RefCell::take))
    };
    PHASE_EXITS.scope(RefCell::default(), noted).await
}

/// Records that a machine leaves a phase. A phase that only another release knows is ignored.
pub(crate) fn record_exit(phase: &str, after: Duration) {
    if let Ok(phase) = phase.parse() {
        // Outside a transaction nothing is counted.
        let _ = PHASE_EXITS.try_with(|left| left.borrow_mut().push((phase, after)));
    }
}

/// Observes the exits of a committed transaction.
pub(crate) fn count_exits(metrics: &BmdbMetrics, left: PhaseExits) {
    for (phase, after) in left {
        metrics.observe_phase_exit(phase, after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn phase_exits_belong_to_their_transaction() {
        record_exit("Ready", Duration::ZERO);
        let (answer, left) = collect_exits(async {
            record_exit("Ready", Duration::from_secs(7));
            tokio::task::yield_now().await;
            record_exit("Napping", Duration::from_secs(1));
            record_exit("Silent", Duration::from_secs(2));
            5
        })
        .await;
        assert_eq!(answer, 5);
        assert_eq!(left, [(Phase::Ready, Duration::from_secs(7)), (Phase::Silent, Duration::from_secs(2))]);
        assert_eq!(collect_exits(async {}).await.1, []);
    }
}
