//! Runs of a simulation, one for each seed.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, anyhow};

use crate::harness::aloud::TestResult;

/// How often each event happened over a whole run: proof that there were faults.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// Runs each seed below `runs`, two at a time.
///
/// Fails if a run fails. Fails also if something happened less often over all runs than `at_least` has it: they would
/// prove nothing.
pub(crate) fn run_seeds(
    runs: u64,
    at_least: &[(&'static str, u64)],
    run: impl Fn(u64) -> Result<Counts> + Sync,
) -> TestResult {
    let (next, failed, all) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()), Mutex::new(Counts::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= runs {
                        return;
                    }
                    match run(seed) {
                        Ok(counts) => {
                            if let Ok(mut all) = all.lock() {
                                for (what, times) in counts {
                                    *all.entry(what).or_default() += times;
                                }
                            }
                        }
                        Err(error) => {
                            if let Ok(mut failed) = failed.lock() {
                                failed.insert(seed, error.to_string());
                            }
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if let Some((_, first)) = failed.first_key_value() {
        let seeds: Vec<&u64> = failed.keys().collect();
        return Err(anyhow!("{} of {runs} runs failed ({seeds:?}); {first}", failed.len()).into());
    }
    let all = all.into_inner().unwrap_or_default();
    for (what, least) in at_least {
        let times = all.get(what).copied().unwrap_or_default();
        assert!(times >= *least, "{what}: only {times} times in all runs, of {least}; there were {all:#?}");
    }
    Ok(())
}
