//! Fail points: abort or freeze the process at a named place, for tests.
//!
//! An abort stands for a power cut, a freeze for a virtual machine that its hypervisor suspends.
//!
//! `SHEPHERD_FAILPOINT=provisioner.created` aborts the process when it reaches that place for the first time, `…@3` at
//! the third time. With `=freeze` at its end, the process stops itself there instead, and continues on SIGCONT. A test
//! sets the variable for a shepherd that it starts as a child. It then proves that the next shepherd leaves nothing
//! doubled and nothing behind, and that a frozen one that resumes late changes nothing any more. Release builds
//! (without `debug_assertions`) contain none of this.
//!
//! Each step that leaves something behind which a dying process cannot undo (in the BMDB, at a provider, on a machine)
//! is followed by a fail point.

/// What happens at the chosen fail point.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailpointAction {
    /// The process aborts, as by a power cut.
    Abort,
    /// The process stops, with all its threads, until it gets SIGCONT.
    Freeze,
}

/// The chosen fail point: `PART.POINT`, at which hit it acts, and what then happens.
#[cfg(debug_assertions)]
type FailpointSpec = (String, u32, FailpointAction);

/// Reaches the fail point `point` of `part`, at which a test may abort or freeze the process.
#[cfg(debug_assertions)]
pub(crate) fn hit(part: &str, point: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static CHOSEN: OnceLock<Option<FailpointSpec>> = OnceLock::new();
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let chosen = CHOSEN.get_or_init(|| parse_spec(&std::env::var("SHEPHERD_FAILPOINT").ok()?));
    let Some((name, turn, action)) = chosen else { return };
    let here = name.split_once('.').is_some_and(|(of, at)| of == part && at == point);
    if !here || PASSED.fetch_add(1, Ordering::Relaxed) + 1 != *turn {
        return;
    }
    match action {
        FailpointAction::Abort => {
            tracing::error!(part, point, "aborting here, as SHEPHERD_FAILPOINT requires");
            std::process::abort();
        }
        FailpointAction::Freeze => {
            tracing::error!(part, point, "freezing here, as SHEPHERD_FAILPOINT requires");
            freeze_process();
        }
    }
}

/// Stops this process. Returns at once after SIGCONT, as a frozen process resumes in the middle of its work.
#[cfg(debug_assertions)]
fn freeze_process() {
    use std::time::{Duration, Instant};

    use rustix::process::{Signal, getpid, kill_process};

    // Another thread may receive the signal some microseconds later. So this thread waits here until time has leapt.
    let (requested_at, leap) = (Instant::now(), Duration::from_millis(500));
    let _ = kill_process(getpid(), Signal::STOP);
    let mut before = Instant::now();
    while before - requested_at < leap {
        before = Instant::now();
        std::hint::spin_loop();
    }
}

/// Does nothing: release builds have no fail points.
#[cfg(not(debug_assertions))]
#[inline]
pub(crate) const fn hit(_part: &str, _point: &str) {}

/// Parses `PART.POINT` or `PART.POINT@TURN`, with or without `=freeze`.
#[cfg(debug_assertions)]
fn parse_spec(text: &str) -> Option<FailpointSpec> {
    let (text, action) = match text.split_once('=') {
        None => (text, FailpointAction::Abort),
        Some((text, "freeze")) => (text, FailpointAction::Freeze),
        Some(_) => return None,
    };
    match text.split_once('@') {
        None => Some((text.to_owned(), 1, action)),
        Some((name, turn)) => Some((name.to_owned(), turn.parse().ok()?, action)),
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn spec_parses_with_or_without_count_and_action() {
        let place = |name: &str, turn, action| Some((name.to_owned(), turn, action));
        assert_eq!(
            parse_spec("provisioner.created"),
            place("provisioner.created", 1, FailpointAction::Abort)
        );
        assert_eq!(
            parse_spec("recoverer.step-executed@3"),
            place("recoverer.step-executed", 3, FailpointAction::Abort)
        );
        assert_eq!(
            parse_spec("provisioner.intended=freeze"),
            place("provisioner.intended", 1, FailpointAction::Freeze)
        );
        assert_eq!(
            parse_spec("provisioner.intended@2=freeze"),
            place("provisioner.intended", 2, FailpointAction::Freeze)
        );
        assert_eq!(parse_spec("recoverer.step-executed@often"), None);
        assert_eq!(parse_spec("recoverer.step-executed=laugh"), None);
    }
}
