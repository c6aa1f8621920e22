//! A test per row of the table of what is written when, and per branch beside it.

use super::*;
use crate::reconciler::release::Release;

const NOW: Duration = Duration::from_secs(1000);
const QUIET: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_secs(30);

fn program(release: &str, breaks_below: u32) -> Program {
    Program {
        version: release.parse().unwrap(),
        needs_objects_of: Release::new(1, 0, 0),
        breaks_api_servers_below: Release::new(breaks_below, 0, 0),
    }
}

fn status(state: State, version: &str, lowest_compatible: u32) -> Status {
    let lowest_compatible = Release::new(lowest_compatible, 0, 0);
    Status { state, version: version.parse().unwrap(), lowest_compatible }
}

fn done(version: &str, lowest_compatible: u32) -> Status {
    status(State::Done, version, lowest_compatible)
}

fn working(version: &str, lowest_compatible: u32) -> Status {
    status(State::Working, version, lowest_compatible)
}

/// An election that was won, with this status at revision 7.
fn elected(program: &Program, status: Option<Status>) -> Leadership {
    let mut leadership = Leadership::begin(program.clone(), Pace::default());
    assert_eq!(leadership.next(NOW), Step::Read);
    let stored = status.map(|status| Stored { status, revision: 7 });
    leadership.read(NOW, Ok::<_, ()>(stored));
    leadership
}

fn releases(lowest: u32, highest: u32, revision: i64) -> Releases {
    let (lowest, highest) = (Release::new(lowest, 0, 0), Release::new(highest, 0, 0));
    Releases { lowest, highest, unknown: Vec::new(), revision }
}

fn write(status: Status, at: i64, nodes_since: Option<i64>) -> Step {
    Step::Write(Write { status, expected: Expected::At(at), nodes_since })
}

/// From the first pass on: waits for a predecessor, passes, and writes at last what is expected.
fn finishes(mut leadership: Leadership, from: Duration, revision: i64, last: Option<Status>) {
    assert_eq!(leadership.next(from), Step::Wait(from + QUIET));
    let quiet = from + QUIET;
    assert_eq!(leadership.next(quiet.saturating_sub(Duration::from_millis(1))), Step::Wait(quiet));
    assert_eq!(leadership.next(quiet), Step::Pass);
    assert_eq!(leadership.passed(quiet, true, 0.5), Loudness::Quiet);
    if let Some(last) = last {
        assert_eq!(leadership.next(quiet), write(last.clone(), revision, None));
        leadership.written(quiet, last, revision + 1);
    }
    assert_eq!(leadership.next(quiet), Step::Wait(quiet + EVERY));
}

fn two() -> Program {
    program("2.0.0", 2)
}

#[test]
fn without_a_status_nothing_is_awaited_and_nothing_is_written_before_a_pass() {
    let mut leadership = elected(&two(), None);
    assert_eq!(leadership.next(NOW), Step::Pass);
    leadership.passed(NOW, true, 0.5);
    let first = Write { status: done("2.0.0", 2), expected: Expected::Absent, nodes_since: None };
    assert_eq!(leadership.next(NOW), Step::Write(first));
    leadership.written(NOW, done("2.0.0", 2), 8);
    assert_eq!(leadership.next(NOW), Step::Wait(NOW + EVERY));
}

#[test]
fn status_that_is_its_own_is_left_as_it_is() {
    finishes(elected(&two(), Some(done("2.0.0", 2))), NOW, 7, None);
}

/// Rows 3, 7 and 9: only that it works is said, and no node is asked.
#[test]
fn status_that_excludes_enough_is_kept_while_objects_change() {
    for (before, during) in [
        (done("1.0.0", 2), working("1.0.0", 2)),
        (done("1.0.0", 9), working("1.0.0", 9)),
        (done("2.0.0+other", 2), working("2.0.0+other", 2)),
        (done("2.0.0", 3), working("2.0.0", 3)),
    ] {
        let mut leadership = elected(&two(), Some(before));
        assert_eq!(leadership.next(NOW), write(during.clone(), 7, None));
        leadership.written(NOW, during, 8);
        finishes(leadership, NOW, 8, Some(done("2.0.0", 2)));
    }
}

#[test]
fn status_that_says_already_that_objects_change_is_not_written_again() {
    finishes(elected(&two(), Some(working("1.0.0", 2))), NOW, 7, Some(done("2.0.0", 2)));
}

/// Rows 4, 5 and 6: it waits until no controller is newer than itself or too old for its objects, and proves it.
#[test]
fn status_that_excludes_too_little_is_replaced_once_nodes_allow_it() {
    for (before, during) in [
        (done("1.0.0", 1), working("1.0.0", 2)),
        (done("3.0.0", 2), working("2.0.0", 2)),
        (done("3.0.0", 3), working("2.0.0", 3)),
        (done("2.0.0+other", 1), working("2.0.0", 2)),
        (working("1.0.0", 1), working("1.0.0", 2)),
    ] {
        let mut leadership = elected(&two(), Some(before));
        assert_eq!(leadership.next(NOW), Step::Look);
        let older = releases(1, 2, 40);
        leadership.looked(NOW, &older);
        assert!(matches!(leadership.blocked(), Some(Blocked::Older { .. })), "{:?}", leadership.blocked());
        assert_eq!(leadership.next(NOW), Step::Wait(NOW + AGAIN));
        assert_eq!(leadership.listens(), Listens::ToNodes);
        leadership.nodes_changed();
        assert_eq!(leadership.next(NOW), Step::Look);
        leadership.looked(NOW, &releases(2, 3, 41));
        assert!(matches!(leadership.blocked(), Some(Blocked::Newer { .. })), "{:?}", leadership.blocked());
        leadership.nodes_changed();
        let unknown = Releases { unknown: vec!["torn".to_owned()], ..releases(2, 2, 42) };
        leadership.looked(NOW, &unknown);
        assert_eq!(leadership.blocked(), Some(&Blocked::Unknown(vec!["torn".to_owned()])));
        assert_eq!(leadership.next(NOW + AGAIN), Step::Look, "without any event as well");
        leadership.looked(NOW, &releases(2, 2, 43));
        assert_eq!(leadership.next(NOW), write(during.clone(), 7, Some(43)));
        leadership.written(NOW, during, 50);
        finishes(leadership, NOW, 50, Some(done("2.0.0", 2)));
    }
}

#[test]
fn whoever_finds_another_status_or_other_nodes_at_the_write_decides_anew() {
    let mut leadership = elected(&two(), Some(done("1.0.0", 1)));
    leadership.looked(NOW, &releases(2, 2, 43));
    leadership.not_written();
    assert_eq!(leadership.next(NOW), Step::Read);
    let mut announcing = elected(&two(), Some(done("1.0.0", 2)));
    announcing.not_written();
    assert_eq!(announcing.next(NOW), Step::Read);
    let mut finishing = elected(&two(), None);
    finishing.passed(NOW, true, 0.5);
    finishing.not_written();
    assert_eq!(finishing.next(NOW), Step::Read, "a pass under another status counts for nothing");
}

#[test]
fn unreadable_status_holds_everything_up_until_it_can_be_read() {
    let mut leadership = Leadership::begin(two(), Pace::default());
    for round in 0..3 {
        let now = NOW + AGAIN * round;
        assert_eq!(leadership.next(now), Step::Read);
        leadership.read(now, Err("torn"));
        assert_eq!(leadership.next(now), Step::Wait(now + AGAIN));
        leadership.objects_changed();
        leadership.nodes_changed();
        assert_eq!(leadership.next(now), Step::Wait(now + AGAIN));
    }
    leadership.read(NOW, Ok::<_, ()>(None));
    assert_eq!(leadership.next(NOW), Step::Pass);
}

/// A leadership that has settled at `NOW`.
fn settled() -> Leadership {
    let mut leadership = elected(&two(), None);
    leadership.passed(NOW, true, 0.5);
    leadership.written(NOW, done("2.0.0", 2), 8);
    leadership
}

#[test]
fn settled_leader_reads_the_status_and_passes_again_and_again() {
    let mut leadership = settled();
    let own = Stored { status: done("2.0.0", 2), revision: 8 };
    for round in 1..4 {
        let now = NOW + EVERY * round;
        assert_eq!(leadership.next(now.saturating_sub(Duration::from_millis(1))), Step::Wait(now));
        assert_eq!(leadership.next(now), Step::Read);
        leadership.read(now, Ok::<_, ()>(Some(own.clone())));
        assert_eq!(leadership.next(now), Step::Pass);
        assert_eq!(leadership.passed(now, round != 2, 0.5), Loudness::Aloud);
    }
}

#[test]
fn objects_that_others_changed_are_looked_at_at_once_but_not_all_the_time() {
    let mut leadership = settled();
    let later = NOW + Duration::from_secs(12);
    leadership.objects_changed();
    assert_eq!(leadership.next(later), Step::Read);
    leadership.read(later, Ok::<_, ()>(Some(Stored { status: done("2.0.0", 2), revision: 8 })));
    leadership.passed(later, true, 0.5);
    assert_eq!(leadership.listens(), Listens::ToObjects);
    leadership.objects_changed();
    assert_eq!(leadership.listens(), Listens::ToNothing, "it has heard it");
    assert_eq!(leadership.next(later), Step::Wait(later + BETWEEN_PASSES));
    assert_eq!(leadership.next(later + BETWEEN_PASSES), Step::Read);
}

#[test]
fn settled_leader_begins_anew_when_the_status_is_not_its_own_any_more() {
    let later = NOW + EVERY;
    let mut deleted = settled();
    deleted.read(later, Ok::<_, ()>(None));
    assert_eq!(deleted.next(later), Step::Pass);
    deleted.passed(later, true, 0.5);
    assert!(matches!(deleted.next(later), Step::Write(Write { expected: Expected::Absent, .. })));
    let mut replaced = settled();
    replaced.read(later, Ok::<_, ()>(Some(Stored { status: done("3.0.0", 3), revision: 9 })));
    assert_eq!(replaced.next(later), Step::Look);
    let mut torn = settled();
    torn.read(later, Err(()));
    assert_eq!(torn.next(later), Step::Wait(later + AGAIN));
    let mut away = settled();
    away.unanswered(later);
    assert_eq!(away.next(later), Step::Wait(later + AGAIN));
    assert_eq!(away.next(later + AGAIN), Step::Read);
}

#[test]
fn first_pass_is_tried_again_with_growing_pauses_and_little_noise() {
    let mut leadership = elected(&two(), None);
    let (mut now, mut pauses, mut told) = (NOW, Vec::new(), Vec::new());
    for _ in 0..25 {
        assert_eq!(leadership.next(now), Step::Pass);
        if leadership.passed(now, false, 0.5) == Loudness::Aloud {
            told.push(now.abs_diff(NOW));
        }
        let Step::Wait(next) = leadership.next(now) else { panic!("it does not wait") };
        pauses.push(next.abs_diff(now));
        now = next;
    }
    assert_eq!(pauses[0], Duration::from_millis(100));
    assert_eq!(pauses[1], Duration::from_millis(150));
    assert_eq!(pauses[24], LONGEST_PAUSE);
    assert!(pauses.is_sorted());
    assert!(told[0] >= TOLD_AFTER && told[0] < TOLD_AFTER * 2, "{told:?}");
    assert!(told.windows(2).all(|two| two[1] >= two[0] + TOLD_EVERY), "{told:?}");
    assert_eq!(pause_after(0, 0.0), Duration::from_millis(50));
    assert_eq!(pause_after(0, 1.0), Duration::from_millis(150));
    assert_eq!(pause_after(u32::MAX, 1.0), LONGEST_PAUSE.mul_f64(1.5));
}
