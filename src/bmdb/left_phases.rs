//! Phases that machines leave in a transaction, counted when it is committed.
//!
//! A transaction may run several times, and undo what it did; what it noted goes with it.

use std::cell::RefCell;
use std::time::Duration;

use crate::bmdb::metrics::BmdbMetrics;
use crate::model::phase::Phase;

/// Phases, and how long a machine had been in each.
pub(crate) type Left = Vec<(Phase, Duration)>;

tokio::task_local! {
    static LEFT: RefCell<Left>;
}

/// Runs a transaction, and returns with its result what it noted.
pub(crate) async fn noted<T>(transaction: impl Future<Output = T>) -> (T, Left) {
    let noted = async {
        let result = transaction.await;
        (result, LEFT.with(RefCell::take))
    };
    LEFT.scope(RefCell::default(), noted).await
}

/// Notes that a machine leaves a phase. One that only another release knows is left out.
pub(crate) fn note(phase: &str, after: Duration) {
    if let Ok(phase) = phase.parse() {
        // Nobody counts what is written outside a transaction.
        let _ = LEFT.try_with(|left| left.borrow_mut().push((phase, after)));
    }
}

/// Counts what a committed transaction noted.
pub(crate) fn count(metrics: &BmdbMetrics, left: Left) {
    for (phase, after) in left {
        metrics.left_phase(phase, after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_transaction_notes_is_its_own() {
        note("Ready", Duration::ZERO);
        let (answer, left) = noted(async {
            note("Ready", Duration::from_secs(7));
            tokio::task::yield_now().await;
            note("Napping", Duration::from_secs(1));
            note("Silent", Duration::from_secs(2));
            5
        })
        .await;
        assert_eq!(answer, 5);
        assert_eq!(left, [(Phase::Ready, Duration::from_secs(7)), (Phase::Silent, Duration::from_secs(2))]);
        assert_eq!(noted(async {}).await.1, []);
    }
}
