//! What a role server does about releases: pure.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::roleserver::running::Instance;

/// How long a release may take to be heard when nobody says.
pub const DEFAULT_PATIENCE: Duration = Duration::from_mins(2);
const SHORTEST_PATIENCE: Duration = Duration::from_secs(3);
const LONGEST_PATIENCE: Duration = Duration::from_hours(1);

/// A release on trial, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// The order.
    pub generation: i64,
    /// Digest of the candidate, lower-case hexadecimal.
    pub sha256: String,
    /// Digest of the former release.
    pub former: String,
    /// Where the proven program is, which others start.
    pub stable: PathBuf,
    /// Where the candidate is.
    pub candidate: PathBuf,
    /// The boot in which it is tried.
    pub boot_id: String,
    /// Milliseconds of that boot until which a shepherd must have answered it.
    pub until_ms: u64,
    /// How long it had in all, in milliseconds.
    pub patience_ms: u64,
    /// The process that becomes it.
    pub instance: Instance,
}

/// How the newest order ended, as it is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concluded {
    /// The order; 0: there was none.
    pub generation: i64,
    /// Why the release does not run, a sentence; none where it does.
    pub error: Option<String>,
}

/// What a role server does when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nothing is on trial.
    Plain,
    /// This is the candidate: it has to be heard.
    OnTrial,
    /// This is the candidate, and has the stable path's name already: it was heard.
    Proven,
    /// This is another program: the candidate has failed, and why.
    Back(String),
    /// This is the candidate, and its time is over: the program at the stable path has to come back.
    GiveWay,
}

/// Decides by what is on trial, the digests of this program and of the one at the stable path (none where that cannot be
/// read), and the clock of this boot.
#[must_use]
pub fn at_start(trial: Option<&Trial>, own: &str, stable: Option<&str>, boot_id: &str, now_ms: u64) -> Start {
    let Some(trial) = trial else { return Start::Plain };
    let in_time = trial.boot_id == boot_id && now_ms < trial.until_ms;
    match (own == trial.sha256, stable) {
        (true, Some(stable)) if stable == trial.sha256 => Start::Proven,
        // Where nothing could come back, what runs goes on.
        (true, None) => Start::OnTrial,
        (true, Some(_)) if in_time => Start::OnTrial,
        (true, Some(_)) => Start::GiveWay,
        (false, _) => Start::Back(failure(trial, boot_id, now_ms)),
    }
}

fn failure(trial: &Trial, boot_id: &str, now_ms: u64) -> String {
    let seconds = trial.patience_ms / 1000;
    let how = if trial.boot_id != boot_id {
        "the machine was started again before a shepherd had heard it".to_owned()
    } else if now_ms >= trial.until_ms {
        format!("no shepherd heard it within {seconds} s")
    } else {
        "it ended before a shepherd had heard it".to_owned()
    };
    format!("{how}, and the former release runs again")
}

/// What a role server does with an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It is done, or older than what was done.
    Nothing,
    /// That release runs.
    Runs,
    /// It has to be fetched and tried.
    Begin,
}

/// Decides by the order's number and digest, the digest of this program, the newest order that has ended, and whether
/// this program is itself on trial.
#[must_use]
pub fn on_order(generation: i64, sha256: &str, own: &str, concluded: i64, on_trial: bool) -> Act {
    if on_trial || generation <= concluded {
        Act::Nothing
    } else if sha256 == own {
        Act::Runs
    } else {
        Act::Begin
    }
}

/// How long a release has, as an order says in seconds.
#[must_use]
pub fn patience(seconds: u32) -> Duration {
    match seconds {
        0 => DEFAULT_PATIENCE,
        seconds => Duration::from_secs(seconds.into()).clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "01d";
    const NEW: &str = "2e3";
    const OTHER: &str = "bad";

    fn trial() -> Trial {
        Trial {
            generation: 4,
            sha256: NEW.to_owned(),
            former: OLD.to_owned(),
            stable: "/opt/roleserver".into(),
            candidate: "/opt/roleserver.candidate".into(),
            boot_id: "b".to_owned(),
            until_ms: 70_000,
            patience_ms: 60_000,
            instance: Instance { pid: 7, start_time: 8, boot_id: "b".to_owned() },
        }
    }

    #[test]
    fn start_ends_in_the_old_release_or_the_new_one() {
        let back = |how: &str| Start::Back(format!("{how}, and the former release runs again"));
        let ended = back("it ended before a shepherd had heard it");
        let late = back("no shepherd heard it within 60 s");
        let rebooted = back("the machine was started again before a shepherd had heard it");
        for (what, own, stable, boot, now, expected) in [
            ("it became the candidate", NEW, Some(OLD), "b", 20_000, Start::OnTrial),
            ("the last moment", NEW, Some(OLD), "b", 69_999, Start::OnTrial),
            ("its time is over", NEW, Some(OLD), "b", 70_000, Start::GiveWay),
            ("somebody started it after a boot", NEW, Some(OLD), "c", 1, Start::GiveWay),
            ("renamed and then killed", NEW, Some(NEW), "b", 90_000, Start::Proven),
            ("renamed and then without power", NEW, Some(NEW), "c", 1, Start::Proven),
            ("nothing is there to come back", NEW, None, "b", 90_000, Start::OnTrial),
            ("written down and killed, or it crashed", OLD, Some(OLD), "b", 20_000, ended.clone()),
            ("the watchdog ended it", OLD, Some(OLD), "b", 76_000, late),
            ("power was lost in between", OLD, Some(OLD), "c", 1, rebooted),
            ("a takeover brought another one", OTHER, Some(OTHER), "b", 20_000, ended.clone()),
            ("the former one, which cannot read itself", OLD, None, "b", 20_000, ended),
        ] {
            assert_eq!(at_start(Some(&trial()), own, stable, boot, now), expected, "{what}");
        }
        assert_eq!(at_start(None, OLD, Some(OLD), "b", 1), Start::Plain);
    }

    #[test]
    fn order_is_carried_out_once_and_only_if_it_is_newer() {
        for (what, generation, sha256, concluded, on_trial, expected) in [
            ("the first", 1, NEW, 0, false, Act::Begin),
            ("the same again", 1, NEW, 1, false, Act::Nothing),
            ("an older one", 1, OTHER, 2, false, Act::Nothing),
            ("a newer one for what failed", 3, NEW, 2, false, Act::Begin),
            ("what runs already", 3, OLD, 2, false, Act::Runs),
            ("while this is on trial", 3, NEW, 2, true, Act::Nothing),
        ] {
            assert_eq!(on_order(generation, sha256, OLD, concluded, on_trial), expected, "{what}");
        }
    }

    #[test]
    fn patience_has_bounds() {
        assert_eq!(patience(0), DEFAULT_PATIENCE);
        assert_eq!(patience(1), SHORTEST_PATIENCE);
        assert_eq!(patience(30), Duration::from_secs(30));
        assert_eq!(patience(u32::MAX), LONGEST_PATIENCE);
    }
}
