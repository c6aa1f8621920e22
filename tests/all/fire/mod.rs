//! Fault injection: the service and its database are unavailable, the service dies, freezes, is restarted and upgraded,
//! all in the middle of work, and machines behave as real machines do.
//!
//! Nearly every test runs real `shepherd` processes against a simulator, and `checker.rs` checks most of them. Each has
//! a short form, which is part of the suite, and a long one with more machines and repetitions, which `make fire` runs
//! (`SHEPHERD_FAULT_SUITE=long`). Both print a line with counts, which `tools/fire` puts under a heading with the name
//! of the module.
//!
//! `tools/faults`, which breaks the engine on purpose, proves that these tests can fail.

mod backup;
mod bloat;
mod bloat_cost;
mod clock;
#[cfg(debug_assertions)]
mod crash;
mod flood;
pub(crate) mod frozen;
mod frozen_order;
mod lost_keys;
mod odd_machines;
mod oddities;
mod outage;
mod plan;
mod restart;
#[cfg(debug_assertions)]
mod shutdown;
mod silent_database;
mod slow_line;
mod upgrade;

use std::fmt::Display;
use std::io::Write as _;

use anyhow::Result;

use crate::harness::fleet::{Fleet, Program};

/// The form of a test.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As part of the suite.
    Short,
    /// Alone, by `make fire`.
    Long,
}

impl Form {
    /// The form of this run.
    fn of_this_run() -> Self {
        if std::env::var("SHEPHERD_FAULT_SUITE").is_ok_and(|form| form == "long") {
            Self::Long
        } else {
            Self::Short
        }
    }

    /// The value for this form.
    fn pick<T>(self, short: T, long: T) -> T {
        match self {
            Self::Short => short,
            Self::Long => long,
        }
    }
}

/// Prints counts as a line of the file that `make fire` reads.
fn counted(what: &str, figures: impl Display) -> Result<()> {
    let Some(file) = std::env::var_os("SHEPHERD_FIRE_COUNTED") else { return Ok(()) };
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(file)?;
    Ok(writeln!(file, "{what}: {figures}")?)
}

/// A number that a statement counts.
async fn count(fleet: &Fleet, statement: &'static str) -> Result<i64> {
    Ok(sqlx::query_scalar(statement).fetch_one(&fleet.pool).await?)
}

/// Ends a shepherd, and requires that it exits with success.
async fn end(fleet: &Fleet, mut shepherd: Program) -> Result<()> {
    let status = shepherd.terminate().await?;
    anyhow::ensure!(status.code() == Some(0), "it ended with {status}\n{}", fleet.explain().await?);
    Ok(())
}

/// Every known machine is Ready, and no intent of a provider is open.
const ALL_KNOWN_READY: &str = "SELECT count(*) > 0 AND count(*) = (SELECT count(*) FROM machine)
        AND NOT EXISTS (SELECT 1 FROM intent WHERE settled_at IS NULL)
     FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
/// Machines for which a recovery was ever claimed.
const RECOVERED: &str = "SELECT count(DISTINCT machine_id) FROM history WHERE process = 'Recovery'";
/// Disruptive steps, begun at any time.
const DISTURBED: &str = "SELECT count(*) FROM intent WHERE kind <> 'create'";
/// Brakes that are engaged.
const BRAKES: &str = "SELECT (SELECT count(*) FROM brake)
        + (SELECT count(*) FROM provider_state WHERE brake IS NOT NULL)";
