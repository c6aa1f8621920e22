//! Places at which a test lets a shepherd die, as by a power cut, or freeze, as
//! under a hypervisor that has forgotten it.
//!
//! `SHEPHERD_FAILPOINT=provisioner.created` aborts the process the first time
//! that it passes there, `…@3` the third time. With `=freeze` at its end the
//! process stops itself there instead, and goes on when somebody continues it.
//! A test gives that to a shepherd that it starts as a child, and then shows
//! that the next one leaves nothing doubled and nothing behind, and that one
//! that wakes up late changes nothing any more. Programs built for use (without
//! `debug_assertions`) have none of this in them.
//!
//! There is one after every step that leaves something behind which a dying
//! process cannot take back: in the BMDB, at a provider, on a machine.

/// What happens at the chosen place.
#[cfg(debug_assertions)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The process is gone.
    Die,
    /// The process stops, with all its threads, until it gets SIGCONT.
    Freeze,
}

/// The place that was chosen: `PART.POINT`, which passing of it, and what then happens.
#[cfg(debug_assertions)]
type Choice = (String, u32, Fate);

/// Passes the place `point` of `part`; a test may have chosen it to be the last.
#[cfg(debug_assertions)]
pub(crate) fn pass(part: &str, point: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static CHOSEN: OnceLock<Option<Choice>> = OnceLock::new();
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let chosen = CHOSEN.get_or_init(|| read(&std::env::var("SHEPHERD_FAILPOINT").ok()?));
    let Some((name, turn, fate)) = chosen else { return };
    let here = name.split_once('.').is_some_and(|(of, at)| of == part && at == point);
    if !here || PASSED.fetch_add(1, Ordering::Relaxed) + 1 != *turn {
        return;
    }
    match fate {
        Fate::Die => {
            tracing::error!(part, point, "dying here, as was asked for");
            std::process::abort();
        }
        Fate::Freeze => {
            tracing::error!(part, point, "freezing here, as was asked for");
            freeze();
        }
    }
}

/// Stops this process; returns at once when it was continued, as what was frozen in the middle goes on.
#[cfg(debug_assertions)]
fn freeze() {
    use std::time::{Duration, Instant};

    use rustix::process::{Signal, getpid, kill_process};

    // Another thread may be the one that takes the signal, some microseconds later: nobody goes on from
    // here before time has leapt.
    let (asked, leap) = (Instant::now(), Duration::from_millis(500));
    let _ = kill_process(getpid(), Signal::STOP);
    let mut before = Instant::now();
    while before - asked < leap {
        before = Instant::now();
        std::hint::spin_loop();
    }
}

/// Nothing, in a program that is built for use.
#[cfg(not(debug_assertions))]
#[inline]
pub(crate) const fn pass(_part: &str, _point: &str) {}

/// Reads `PART.POINT` or `PART.POINT@TURN`, with or without `=freeze`.
#[cfg(debug_assertions)]
fn read(text: &str) -> Option<Choice> {
    let (text, fate) = match text.split_once('=') {
        None => (text, Fate::Die),
        Some((text, "freeze")) => (text, Fate::Freeze),
        Some(_) => return None,
    };
    match text.split_once('@') {
        None => Some((text.to_owned(), 1, fate)),
        Some((name, turn)) => Some((name.to_owned(), turn.parse().ok()?, fate)),
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_named_with_or_without_its_turn_and_fate() {
        let place = |name: &str, turn, fate| Some((name.to_owned(), turn, fate));
        assert_eq!(read("provisioner.created"), place("provisioner.created", 1, Fate::Die));
        assert_eq!(read("recoverer.acted@3"), place("recoverer.acted", 3, Fate::Die));
        assert_eq!(read("provisioner.intended=freeze"), place("provisioner.intended", 1, Fate::Freeze));
        assert_eq!(read("provisioner.intended@2=freeze"), place("provisioner.intended", 2, Fate::Freeze));
        assert_eq!(read("recoverer.acted@often"), None);
        assert_eq!(read("recoverer.acted=laugh"), None);
    }
}
