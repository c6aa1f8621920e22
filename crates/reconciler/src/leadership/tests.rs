//! Tests of the leadership: one per row of its table, and one per branch beside it.

use super::*;
use model::kubernetes::version::ReleaseVersion;

const NOW: Duration = Duration::from_secs(1000);
const QUIET: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_secs(30);

fn program(release: &str, breaks_below: u32) -> Program {
    Program {
        version: release.parse().unwrap(),
        needs_objects_of: ReleaseVersion::new(1, 0, 0),
        breaks_api_servers_below: ReleaseVersion::new(breaks_below, 0, 0),
    }
}

fn status(state: ReconcilerState, version: &str, lowest_compatible: u32) -> ReconcilerStatus {
    let lowest_compatible = ReleaseVersion::new(lowest_compatible, 0, 0);
    ReconcilerStatus { state, version: version.parse().unwrap(), lowest_compatible }
}

fn done(version: &str, lowest_compatible: u32) -> ReconcilerStatus {
    status(ReconcilerState::Done, version, lowest_compatible)
}

fn working(version: &str, lowest_compatible: u32) -> ReconcilerStatus {
    status(ReconcilerState::Working, version, lowest_compatible)
}

/// A won election, with this status at revision 7.
fn elected_leadership(program: &Program, status: Option<ReconcilerStatus>) -> Leadership {
    let mut leadership = Leadership::new(program.clone(), ReconcileTiming::default());
    assert_eq!(leadership.next_step(NOW), LeaderStep::ReadStatus);
    let stored = status.map(|status| StoredStatus { status, revision: 7 });
    leadership.on_status_read(NOW, Ok::<_, ()>(stored));
    leadership
}

fn releases(lowest: u32, highest: u32, revision: i64) -> ControllerReleases {
    let (lowest, highest) = (ReleaseVersion::new(lowest, 0, 0), ReleaseVersion::new(highest, 0, 0));
    ControllerReleases { lowest, highest, unknown: Vec::new(), revision }
}

fn write(status: ReconcilerStatus, at: i64, nodes_since: Option<i64>) -> LeaderStep {
    LeaderStep::WriteStatus(StatusWrite {
        status,
        expected: ExpectedRevision::At(at),
        nodes_unchanged_since: nodes_since,
    })
}

/// From the first pass on: waits for a predecessor, makes passes, and expects this status to be written at the end.
fn finish_first_pass(
    mut leadership: Leadership,
    from: Duration,
    revision: i64,
    last: Option<ReconcilerStatus>,
) {
    assert_eq!(leadership.next_step(from), LeaderStep::Wait(from + QUIET));
    let quiet = from + QUIET;
    assert_eq!(leadership.next_step(quiet.saturating_sub(Duration::from_millis(1))), LeaderStep::Wait(quiet));
    assert_eq!(leadership.next_step(quiet), LeaderStep::Reconcile);
    assert_eq!(leadership.on_pass_finished(quiet, true, 0.5), FailureLogLevel::Debug);
    if let Some(last) = last {
        assert_eq!(leadership.next_step(quiet), write(last.clone(), revision, None));
        leadership.on_status_written(quiet, last, revision + 1);
    }
    assert_eq!(leadership.next_step(quiet), LeaderStep::Wait(quiet + EVERY));
}

fn two() -> Program {
    program("2.0.0", 2)
}

#[test]
fn without_a_status_the_first_pass_starts_at_once() {
    let mut leadership = elected_leadership(&two(), None);
    assert_eq!(leadership.next_step(NOW), LeaderStep::Reconcile);
    leadership.on_pass_finished(NOW, true, 0.5);
    let first = StatusWrite {
        status: done("2.0.0", 2),
        expected: ExpectedRevision::Absent,
        nodes_unchanged_since: None,
    };
    assert_eq!(leadership.next_step(NOW), LeaderStep::WriteStatus(first));
    leadership.on_status_written(NOW, done("2.0.0", 2), 8);
    assert_eq!(leadership.next_step(NOW), LeaderStep::Wait(NOW + EVERY));
}

#[test]
fn own_status_is_not_rewritten() {
    finish_first_pass(elected_leadership(&two(), Some(done("2.0.0", 2))), NOW, 7, None);
}

/// Rows 3, 7 and 9: only the state becomes working, and no node is read.
#[test]
fn status_that_excludes_enough_stays_during_a_pass() {
    for (before, during) in [
        (done("1.0.0", 2), working("1.0.0", 2)),
        (done("1.0.0", 9), working("1.0.0", 9)),
        (done("2.0.0+other", 2), working("2.0.0+other", 2)),
        (done("2.0.0", 3), working("2.0.0", 3)),
    ] {
        let mut leadership = elected_leadership(&two(), Some(before));
        assert_eq!(leadership.next_step(NOW), write(during.clone(), 7, None));
        leadership.on_status_written(NOW, during, 8);
        finish_first_pass(leadership, NOW, 8, Some(done("2.0.0", 2)));
    }
}

#[test]
fn working_status_is_not_rewritten() {
    finish_first_pass(elected_leadership(&two(), Some(working("1.0.0", 2))), NOW, 7, Some(done("2.0.0", 2)));
}

/// Rows 4, 5 and 6: it waits until no controller is newer than itself or too old for its objects, and proves it.
#[test]
fn status_is_raised_once_no_node_conflicts() {
    for (before, during) in [
        (done("1.0.0", 1), working("1.0.0", 2)),
        (done("3.0.0", 2), working("2.0.0", 2)),
        (done("3.0.0", 3), working("2.0.0", 3)),
        (done("2.0.0+other", 1), working("2.0.0", 2)),
        (working("1.0.0", 1), working("1.0.0", 2)),
    ] {
        let mut leadership = elected_leadership(&two(), Some(before));
        assert_eq!(leadership.next_step(NOW), LeaderStep::ReadReleases);
        let older = releases(1, 2, 40);
        leadership.on_releases_read(NOW, &older);
        assert!(
            matches!(leadership.blocked(), Some(ReleaseBlock::Older { .. })),
            "{:?}",
            leadership.blocked()
        );
        assert_eq!(leadership.next_step(NOW), LeaderStep::Wait(NOW + RETRY_INTERVAL));
        assert_eq!(leadership.wake_source(), WakeSource::NodeChanges);
        leadership.on_nodes_changed();
        assert_eq!(leadership.next_step(NOW), LeaderStep::ReadReleases);
        leadership.on_releases_read(NOW, &releases(2, 3, 41));
        assert!(
            matches!(leadership.blocked(), Some(ReleaseBlock::Newer { .. })),
            "{:?}",
            leadership.blocked()
        );
        leadership.on_nodes_changed();
        let unknown = ControllerReleases { unknown: vec!["torn".to_owned()], ..releases(2, 2, 42) };
        leadership.on_releases_read(NOW, &unknown);
        assert_eq!(leadership.blocked(), Some(&ReleaseBlock::Unknown(vec!["torn".to_owned()])));
        assert_eq!(
            leadership.next_step(NOW + RETRY_INTERVAL),
            LeaderStep::ReadReleases,
            "without any event as well"
        );
        leadership.on_releases_read(NOW, &releases(2, 2, 43));
        assert_eq!(leadership.next_step(NOW), write(during.clone(), 7, Some(43)));
        leadership.on_status_written(NOW, during, 50);
        finish_first_pass(leadership, NOW, 50, Some(done("2.0.0", 2)));
    }
}

#[test]
fn write_conflict_restarts_the_decision() {
    let mut leadership = elected_leadership(&two(), Some(done("1.0.0", 1)));
    leadership.on_releases_read(NOW, &releases(2, 2, 43));
    leadership.on_write_conflict();
    assert_eq!(leadership.next_step(NOW), LeaderStep::ReadStatus);
    let mut announcing = elected_leadership(&two(), Some(done("1.0.0", 2)));
    announcing.on_write_conflict();
    assert_eq!(announcing.next_step(NOW), LeaderStep::ReadStatus);
    let mut finishing = elected_leadership(&two(), None);
    finishing.on_pass_finished(NOW, true, 0.5);
    finishing.on_write_conflict();
    assert_eq!(
        finishing.next_step(NOW),
        LeaderStep::ReadStatus,
        "a pass under another status counts for nothing"
    );
}

#[test]
fn unreadable_status_blocks_until_readable() {
    let mut leadership = Leadership::new(two(), ReconcileTiming::default());
    for round in 0..3 {
        let now = NOW + RETRY_INTERVAL * round;
        assert_eq!(leadership.next_step(now), LeaderStep::ReadStatus);
        leadership.on_status_read(now, Err("torn"));
        assert_eq!(leadership.next_step(now), LeaderStep::Wait(now + RETRY_INTERVAL));
        leadership.on_objects_changed();
        leadership.on_nodes_changed();
        assert_eq!(leadership.next_step(now), LeaderStep::Wait(now + RETRY_INTERVAL));
    }
    leadership.on_status_read(NOW, Ok::<_, ()>(None));
    assert_eq!(leadership.next_step(NOW), LeaderStep::Reconcile);
}

/// A leadership that is steady at `NOW`.
fn steady_leadership() -> Leadership {
    let mut leadership = elected_leadership(&two(), None);
    leadership.on_pass_finished(NOW, true, 0.5);
    leadership.on_status_written(NOW, done("2.0.0", 2), 8);
    leadership
}

#[test]
fn steady_leader_rereads_the_status_and_reconciles() {
    let mut leadership = steady_leadership();
    let own = StoredStatus { status: done("2.0.0", 2), revision: 8 };
    for round in 1..4 {
        let now = NOW + EVERY * round;
        assert_eq!(leadership.next_step(now.saturating_sub(Duration::from_millis(1))), LeaderStep::Wait(now));
        assert_eq!(leadership.next_step(now), LeaderStep::ReadStatus);
        leadership.on_status_read(now, Ok::<_, ()>(Some(own.clone())));
        assert_eq!(leadership.next_step(now), LeaderStep::Reconcile);
        assert_eq!(leadership.on_pass_finished(now, round != 2, 0.5), FailureLogLevel::Warn);
    }
}

#[test]
fn changed_objects_are_reconciled_soon_but_rate_limited() {
    let mut leadership = steady_leadership();
    let later = NOW + Duration::from_secs(12);
    leadership.on_objects_changed();
    assert_eq!(leadership.next_step(later), LeaderStep::ReadStatus);
    leadership
        .on_status_read(later, Ok::<_, ()>(Some(StoredStatus { status: done("2.0.0", 2), revision: 8 })));
    leadership.on_pass_finished(later, true, 0.5);
    assert_eq!(leadership.wake_source(), WakeSource::ObjectChanges);
    leadership.on_objects_changed();
    assert_eq!(leadership.wake_source(), WakeSource::Nothing, "the change is noted");
    assert_eq!(leadership.next_step(later), LeaderStep::Wait(later + MIN_RECONCILE_INTERVAL));
    assert_eq!(leadership.next_step(later + MIN_RECONCILE_INTERVAL), LeaderStep::ReadStatus);
}

#[test]
fn steady_leader_restarts_when_the_status_changed() {
    let later = NOW + EVERY;
    let mut deleted = steady_leadership();
    deleted.on_status_read(later, Ok::<_, ()>(None));
    assert_eq!(deleted.next_step(later), LeaderStep::Reconcile);
    deleted.on_pass_finished(later, true, 0.5);
    assert!(matches!(
        deleted.next_step(later),
        LeaderStep::WriteStatus(StatusWrite { expected: ExpectedRevision::Absent, .. })
    ));
    let mut replaced = steady_leadership();
    replaced.on_status_read(later, Ok::<_, ()>(Some(StoredStatus { status: done("3.0.0", 3), revision: 9 })));
    assert_eq!(replaced.next_step(later), LeaderStep::ReadReleases);
    let mut torn = steady_leadership();
    torn.on_status_read(later, Err(()));
    assert_eq!(torn.next_step(later), LeaderStep::Wait(later + RETRY_INTERVAL));
    let mut away = steady_leadership();
    away.on_etcd_error(later);
    assert_eq!(away.next_step(later), LeaderStep::Wait(later + RETRY_INTERVAL));
    assert_eq!(away.next_step(later + RETRY_INTERVAL), LeaderStep::ReadStatus);
}

#[test]
fn first_pass_is_retried_with_backoff_and_few_logs() {
    let mut leadership = elected_leadership(&two(), None);
    let (mut now, mut pauses, mut durations) = (NOW, Vec::new(), Vec::new());
    for _ in 0..25 {
        assert_eq!(leadership.next_step(now), LeaderStep::Reconcile);
        if leadership.on_pass_finished(now, false, 1.0) == FailureLogLevel::Warn {
            durations.push(now.abs_diff(NOW));
        }
        let LeaderStep::Wait(next) = leadership.next_step(now) else { panic!("it does not wait") };
        pauses.push(next.abs_diff(now));
        now = next;
    }
    assert_eq!(pauses[0], Duration::from_millis(100));
    assert_eq!(pauses[1], Duration::from_millis(150));
    assert_eq!(pauses[24], Duration::from_mins(1));
    assert!(pauses.is_sorted());
    assert!(durations[0] >= FAILURE_REPORT_DELAY && durations[0] < FAILURE_REPORT_DELAY * 2, "{durations:?}");
    assert!(durations.windows(2).all(|two| two[1] >= two[0] + FAILURE_REPORT_INTERVAL), "{durations:?}");
    assert_eq!(FIRST_PASS_BACKOFF.delay(1, 0.0), Duration::from_millis(50));
    assert_eq!(FIRST_PASS_BACKOFF.delay(1, 1.0), Duration::from_millis(100));
    assert_eq!(FIRST_PASS_BACKOFF.delay(u32::MAX, 1.0), Duration::from_mins(1));
}
