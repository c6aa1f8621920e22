//! Self-update decisions: trial, roll back, or carry out an order (pure).

use std::path::PathBuf;
use std::time::Duration;

use model::kubernetes::version::ReleaseVersion;
use proto::agent::v1 as wire;
use serde::{Deserialize, Serialize};

use crate::process::ProcessInstance;

/// The trial time of a release if the order has none.
const DEFAULT_TRIAL_TIMEOUT: Duration = Duration::from_mins(2);
const MIN_TRIAL_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_TRIAL_TIMEOUT: Duration = Duration::from_hours(1);

/// A release on trial, as the state directory has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// The generation of the order.
    pub generation: i64,
    /// Digest of the candidate, lower-case hexadecimal.
    pub sha256: String,
    /// Digest of the former release, lower-case hexadecimal.
    pub former: String,
    /// Path of the proven program, which the init system or the supervisor starts.
    pub stable: PathBuf,
    /// Path of the candidate, beside the stable program.
    pub candidate: PathBuf,
    /// The boot in which the trial takes place.
    pub boot_id: String,
    /// Milliseconds of that boot until which a shepherd must have acknowledged a heartbeat.
    pub until_ms: u64,
    /// The whole trial time in milliseconds.
    pub patience_ms: u64,
    /// The process that becomes the candidate.
    pub instance: ProcessInstance,
    /// The lowest version that is accepted once the candidate has proved itself; `None` if it is not signed.
    #[serde(default)]
    pub minimum_version: Option<String>,
    /// Why the candidate does not stay although a shepherd acknowledged its heartbeat, as the first part of a sentence;
    /// `None` until it has failed in this way.
    #[serde(default)]
    pub failure: Option<String>,
}

/// The outcome of the newest order, as the state directory has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateResult {
    /// The generation of the order; 0 if there was none.
    pub generation: i64,
    /// Why the release does not run, as a sentence; `None` if it runs.
    pub error: Option<String>,
    /// The lowest version that a proven release permits, until the file of the pinned keys has it.
    #[serde(default)]
    pub minimum_version: Option<String>,
}

impl UpdateResult {
    /// The lowest version that is not stored yet.
    #[must_use]
    pub fn minimum(&self) -> Option<ReleaseVersion> {
        self.minimum_version.as_deref().and_then(|version| version.parse().ok())
    }

    /// Keeps the higher one of two lowest versions.
    pub fn raise_minimum(&mut self, minimum: Option<ReleaseVersion>) {
        self.minimum_version = self.minimum().max(minimum).map(|version| version.to_string());
    }
}

/// What a role server does, at each start and with each heartbeat, with the lowest version that a proven release permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MinimumAction {
    /// No version has to be stored.
    Nothing,
    /// Lower versions are not accepted any more, and that has to be stored.
    Raise(ReleaseVersion),
    /// It is stored beside the pinned keys, and nowhere else any more. So root lowers it by removing that file.
    Forget,
}

/// Decides from the lowest version of the last outcome, and whether the file of the pinned keys has it.
#[must_use]
pub fn decide_minimum(minimum: Option<ReleaseVersion>, is_stored: bool) -> MinimumAction {
    match minimum {
        None => MinimumAction::Nothing,
        Some(_) if is_stored => MinimumAction::Forget,
        Some(minimum) => MinimumAction::Raise(minimum),
    }
}

/// What a role server does when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartDecision {
    /// No release is on trial.
    Normal,
    /// This program is the candidate, and needs an acknowledged heartbeat.
    OnTrial,
    /// This program is the candidate, and has the stable path's name already: its heartbeat was acknowledged.
    Proven,
    /// This is another program: the candidate has failed, for the given reason.
    RolledBack(String),
    /// This program is the candidate, and its time is over: the program at the stable path must come back.
    RollBack,
}

/// Decides from the trial, the digests of this program and of the one at the stable path (`None` if it cannot be read),
/// and the clock of this boot.
#[must_use]
pub fn decide_trial_or_rollback(
    trial: Option<&Trial>,
    own: &str,
    stable: Option<&str>,
    boot_id: &str,
    now_ms: u64,
) -> StartDecision {
    let Some(trial) = trial else { return StartDecision::Normal };
    let in_time = trial.boot_id == boot_id && now_ms < trial.until_ms;
    match (own == trial.sha256, stable) {
        (true, Some(stable)) if stable == trial.sha256 => StartDecision::Proven,
        // Without a program to come back to, the candidate goes on.
        (true, None) => StartDecision::OnTrial,
        (true, Some(_)) if in_time => StartDecision::OnTrial,
        (true, Some(_)) => StartDecision::RollBack,
        (false, _) => StartDecision::RolledBack(rollback_reason(trial, boot_id, now_ms)),
    }
}

fn rollback_reason(trial: &Trial, boot_id: &str, now_ms: u64) -> String {
    let seconds = trial.patience_ms / 1000;
    let how = if let Some(failure) = &trial.failure {
        failure.clone()
    } else if trial.boot_id != boot_id {
        "the machine was started again before a shepherd acknowledged its heartbeat".to_owned()
    } else if now_ms >= trial.until_ms {
        format!("no shepherd acknowledged its heartbeat within {seconds} s")
    } else {
        "it ended before a shepherd acknowledged its heartbeat".to_owned()
    };
    format!("{how}, and the former release runs again")
}

/// What a role server does with an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderAction {
    /// The order is done, or older than one that is done.
    Nothing,
    /// The ordered release runs already; only the result is recorded.
    AlreadyRunning,
    /// The order has to come again with the signature of its release.
    AwaitSignature,
    /// The release must be fetched and tried.
    Install,
}

/// Decides from the order's generation and digest, the digest of this program, the newest order that has ended,
/// whether this program is itself on trial, and whether the order lacks a signature that this machine needs.
#[must_use]
pub fn decide_order(
    generation: i64,
    sha256: &str,
    own: &str,
    concluded: i64,
    on_trial: bool,
    needs_signature: bool,
) -> OrderAction {
    if on_trial || generation <= concluded {
        OrderAction::Nothing
    } else if sha256 == own {
        OrderAction::AlreadyRunning
    } else if needs_signature {
        OrderAction::AwaitSignature
    } else {
        OrderAction::Install
    }
}

/// Whether nothing is known of the signature of an ordered release: a shepherd of an earlier release sent the order.
#[must_use]
pub const fn lacks_signature(order: &wire::ReleaseOrder) -> bool {
    order.signature.is_empty() && !order.is_unsigned
}

/// Whether an order takes the place of the last one. Shepherds of two releases may send the same order in turn: one
/// without its signature does not end what the other one began.
#[must_use]
pub fn replaces_order(last: Option<&wire::ReleaseOrder>, order: &wire::ReleaseOrder) -> bool {
    let Some(last) = last else { return true };
    let is_same = last.generation == order.generation && last.sha256 == order.sha256;
    last != order && !(is_same && lacks_signature(order) && !lacks_signature(last))
}

/// The trial time for an order's field in seconds; 0 means `DEFAULT_TRIAL_TIMEOUT`.
#[must_use]
pub fn trial_timeout(seconds: u32) -> Duration {
    match seconds {
        0 => DEFAULT_TRIAL_TIMEOUT,
        seconds => Duration::from_secs(seconds.into()).clamp(MIN_TRIAL_TIMEOUT, MAX_TRIAL_TIMEOUT),
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
            instance: ProcessInstance { pid: 7, start_time: 8, boot_id: "b".to_owned() },
            minimum_version: None,
            failure: None,
        }
    }

    #[test]
    fn every_start_runs_the_old_or_the_new_release() {
        let back = |how: &str| StartDecision::RolledBack(format!("{how}, and the former release runs again"));
        let ended = back("it ended before a shepherd acknowledged its heartbeat");
        let late = back("no shepherd acknowledged its heartbeat within 60 s");
        let rebooted = back("the machine was started again before a shepherd acknowledged its heartbeat");
        for (what, own, stable, boot, now, expected) in [
            ("it became the candidate", NEW, Some(OLD), "b", 20_000, StartDecision::OnTrial),
            ("the last moment", NEW, Some(OLD), "b", 69_999, StartDecision::OnTrial),
            ("its time is over", NEW, Some(OLD), "b", 70_000, StartDecision::RollBack),
            ("somebody started it after a boot", NEW, Some(OLD), "c", 1, StartDecision::RollBack),
            ("renamed and then killed", NEW, Some(NEW), "b", 90_000, StartDecision::Proven),
            ("renamed and then without power", NEW, Some(NEW), "c", 1, StartDecision::Proven),
            ("nothing is there to come back", NEW, None, "b", 90_000, StartDecision::OnTrial),
            ("written down and killed, or it crashed", OLD, Some(OLD), "b", 20_000, ended.clone()),
            ("the watchdog ended it", OLD, Some(OLD), "b", 76_000, late),
            ("power was lost in between", OLD, Some(OLD), "c", 1, rebooted),
            ("a takeover brought another one", OTHER, Some(OTHER), "b", 20_000, ended.clone()),
            ("the former one, which cannot read itself", OLD, None, "b", 20_000, ended),
        ] {
            assert_eq!(decide_trial_or_rollback(Some(&trial()), own, stable, boot, now), expected, "{what}");
        }
        assert_eq!(decide_trial_or_rollback(None, OLD, Some(OLD), "b", 1), StartDecision::Normal);
        // The candidate wrote down why it does not stay, and that counts more than how it ended.
        let failed = Trial { failure: Some("it was swapped".to_owned()), ..trial() };
        for (boot, now) in [("b", 20_000), ("b", 90_000), ("c", 1)] {
            let decided = decide_trial_or_rollback(Some(&failed), OLD, Some(OLD), boot, now);
            assert_eq!(decided, back("it was swapped"), "{boot} {now}");
        }
        // It is started again if the former program could not be, and has another attempt.
        let again = decide_trial_or_rollback(Some(&failed), NEW, Some(OLD), "b", 20_000);
        assert_eq!(again, StartDecision::OnTrial);
        // A candidate of an earlier release writes no reason.
        let mut stored = serde_json::to_value(trial()).unwrap();
        stored.as_object_mut().unwrap().remove("failure");
        assert_eq!(serde_json::from_value::<Trial>(stored).unwrap(), trial());
    }

    #[test]
    fn order_is_carried_out_once_and_only_if_it_is_newer() {
        for (what, generation, sha256, concluded, on_trial, unsigned, expected) in [
            ("the first", 1, NEW, 0, false, false, OrderAction::Install),
            ("the same again", 1, NEW, 1, false, false, OrderAction::Nothing),
            ("an older one", 1, OTHER, 2, false, false, OrderAction::Nothing),
            ("a newer one for what failed", 3, NEW, 2, false, false, OrderAction::Install),
            ("what runs already", 3, OLD, 2, false, true, OrderAction::AlreadyRunning),
            ("while this is on trial", 3, NEW, 2, true, true, OrderAction::Nothing),
            ("of an earlier shepherd", 3, NEW, 2, false, true, OrderAction::AwaitSignature),
            ("an older one of it", 2, NEW, 2, false, true, OrderAction::Nothing),
        ] {
            let decided = decide_order(generation, sha256, OLD, concluded, on_trial, unsigned);
            assert_eq!(decided, expected, "{what}");
        }
    }

    #[test]
    fn order_without_its_signature_ends_no_other_one() {
        let order = |generation, signature: &str, is_unsigned| wire::ReleaseOrder {
            generation,
            sha256: vec![1; 32],
            signature: signature.to_owned(),
            is_unsigned,
            ..Default::default()
        };
        let (signed, unknown, unsigned) = (order(1, "x", false), order(1, "", false), order(1, "", true));
        let newer = order(2, "", false);
        for (what, last, next, expected) in [
            ("the first", None, &unknown, true),
            ("the same again", Some(&signed), &signed, false),
            ("the signature comes", Some(&unknown), &signed, true),
            ("an earlier shepherd sends it again", Some(&signed), &unknown, false),
            ("the same of a release without a signature", Some(&unsigned), &unknown, false),
            ("it is signed later", Some(&unsigned), &signed, true),
            ("it is unsigned", Some(&unknown), &unsigned, true),
            ("a newer one", Some(&signed), &newer, true),
        ] {
            assert_eq!(replaces_order(last, next), expected, "{what}");
        }
        assert_eq!([&signed, &unknown, &unsigned].map(lacks_signature), [false, true, false]);
    }

    #[test]
    fn lowest_version_is_raised_until_it_is_stored() {
        let (lower, higher) = (ReleaseVersion::new(1, 9, 0), ReleaseVersion::new(1, 10, 0));
        for (minimum, is_stored, expected) in [
            (None, false, MinimumAction::Nothing),
            (None, true, MinimumAction::Nothing),
            (Some(lower), false, MinimumAction::Raise(lower)),
            (Some(lower), true, MinimumAction::Forget),
        ] {
            assert_eq!(decide_minimum(minimum, is_stored), expected, "{minimum:?} {is_stored}");
        }
        let mut result = UpdateResult::default();
        for (minimum, expected) in
            [(None, None), (Some(lower), Some(lower)), (None, Some(lower)), (Some(higher), Some(higher))]
        {
            result.raise_minimum(minimum);
            assert_eq!(result.minimum(), expected);
        }
        result.raise_minimum(Some(lower));
        assert_eq!(result.minimum_version.as_deref(), Some("1.10.0"));
        // An earlier release wrote it.
        let stored = serde_json::from_str::<UpdateResult>("{\"generation\":4,\"error\":null}").unwrap();
        assert_eq!((stored.generation, stored.minimum()), (4, None));
    }

    #[test]
    fn trial_timeout_has_bounds() {
        assert_eq!(trial_timeout(0), DEFAULT_TRIAL_TIMEOUT);
        assert_eq!(trial_timeout(1), MIN_TRIAL_TIMEOUT);
        assert_eq!(trial_timeout(30), Duration::from_secs(30));
        assert_eq!(trial_timeout(u32::MAX), MAX_TRIAL_TIMEOUT);
    }
}
