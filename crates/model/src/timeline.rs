//! Timeline: the history of one machine as lines, newest first, with its routine folded.
//!
//! Most of a quiet machine's history is [`crate::routine`][]: each observation that found nothing new has an entry for
//! its start and one for its end. [`fold_events`][] makes one line of such entries that follow each other. Every other
//! entry is a line of its own, and a fold ends there. So no failure and no change is ever in a fold, and the lines are in
//! the order of the entries.
//!
//! # Which entries are routine
//!
//! Only the end of a work item states what it found. The newest entry comes first, so the end comes before the start. A
//! start is therefore routine if the routine end with its fence came before it. The start of a work item that failed, or
//! that is under way, is a line of its own.
//!
//! # Folds over several pages
//!
//! A fold can be longer than what one call may read. Then it stays open: [`FoldState`][] has what was folded so far, and the
//! next call continues with it. Each fold is returned once, whole, by the call that reads its end. An open fold of a single
//! entry is not carried: the next call reads that entry again, because a fold of one entry is the entry itself.

use uuid::Uuid;

use crate::event_name::{FINISHED, STARTED};
use crate::routine::{NOTHING_CHANGED, ROUTINE_PROCESS, RoutineFold};
use crate::time::Timestamp;

/// An entry of a machine's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// When the event happened.
    pub at: Timestamp,
    /// Name of the event.
    pub event: String,
    /// Lane of the work item it is about.
    pub lane: Option<String>,
    /// Fence of that work item.
    pub fence: Option<i64>,
    /// Process of that work item.
    pub process: Option<String>,
    /// The session it was done under.
    pub session: Option<Uuid>,
    /// Component that the session was started for.
    pub component: Option<String>,
    /// Host of the process that owned the session.
    pub host: Option<String>,
    /// Details of the event.
    pub detail: Option<String>,
}

/// A line of a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimelineLine {
    /// An entry of the history, as it is.
    Event(HistoryEntry),
    /// At least two routine entries, folded.
    Routine(RoutineFold),
}

/// What is known before the next entry is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldState {
    /// The fold that the next entry may continue. It has at least two entries.
    pub open_fold: Option<RoutineFold>,
    /// Fence of the work item with a routine end that was read, and a start that was not.
    pub awaited_start: Option<i64>,
}

/// The lines of some entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoldedEvents {
    /// Lines that are complete.
    pub lines: Vec<TimelineLine>,
    /// Number of entries that these lines and the open fold are made of. The next call begins after them.
    pub consumed: usize,
    /// What the next call continues with.
    pub state: FoldState,
}

/// Folds `events`, the newest first, into at most `limit` lines. `is_last` states that no older entry exists: then no fold
/// stays open. Otherwise `events` has at least two entries. Unless `limit` is 0, at least one of them is consumed, or the open
/// fold becomes a line.
#[must_use]
pub fn fold_events(state: FoldState, events: &[HistoryEntry], limit: usize, is_last: bool) -> FoldedEvents {
    let mut lines = Vec::new();
    let mut open = state.open_fold.map(|fold| OpenFold { fold, only: None });
    let mut awaited_start = state.awaited_start;
    for (index, event) in events.iter().enumerate() {
        let part = routine_part(event, awaited_start);
        if part.is_none() {
            lines.extend(open.take().map(OpenFold::into_line));
        }
        if open.is_none() && lines.len() >= limit {
            return FoldedEvents {
                lines,
                consumed: index,
                state: FoldState { open_fold: None, awaited_start },
            };
        }
        let Some(part) = part else {
            lines.push(TimelineLine::Event(event.clone()));
            continue;
        };
        match open.as_mut() {
            Some(open) => open.add(event.at, part),
            None => open = Some(OpenFold::new(event, part, awaited_start)),
        }
        awaited_start = match part {
            RoutinePart::Start => None,
            RoutinePart::End(fence) => Some(fence),
        };
    }
    if is_last {
        lines.extend(open.take().map(OpenFold::into_line));
    }
    match open {
        Some(OpenFold { only: Some(only), .. }) => {
            let state = FoldState { open_fold: None, awaited_start: only.awaited_before };
            FoldedEvents { lines, consumed: events.len() - 1, state }
        }
        open => {
            let state = FoldState { open_fold: open.map(|open| open.fold), awaited_start };
            FoldedEvents { lines, consumed: events.len(), state }
        }
    }
}

/// Which part of a routine work item an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RoutinePart {
    Start,
    /// The end, with its fence.
    End(i64),
}

/// Which part of a routine work item this entry is; `None` for every other entry.
fn routine_part(event: &HistoryEntry, awaited_start: Option<i64>) -> Option<RoutinePart> {
    let fence = event.fence.filter(|_| event.process.as_deref() == Some(ROUTINE_PROCESS.as_str()))?;
    match (event.event.as_str(), event.detail.as_deref()) {
        (FINISHED, Some(NOTHING_CHANGED)) => Some(RoutinePart::End(fence)),
        (STARTED, None) if awaited_start == Some(fence) => Some(RoutinePart::Start),
        _ => None,
    }
}

/// A fold that the next entry may continue.
struct OpenFold<'a> {
    fold: RoutineFold,
    /// Its entry, as long as there is one.
    only: Option<OnlyEntry<'a>>,
}

struct OnlyEntry<'a> {
    event: &'a HistoryEntry,
    /// The fence of the awaited start before that entry was read.
    awaited_before: Option<i64>,
}

impl<'a> OpenFold<'a> {
    fn new(event: &'a HistoryEntry, part: RoutinePart, awaited_before: Option<i64>) -> Self {
        let work_items = u64::from(part != RoutinePart::Start);
        let fold = RoutineFold { first_at: event.at, last_at: event.at, work_items, lines: 1 };
        Self { fold, only: Some(OnlyEntry { event, awaited_before }) }
    }

    fn add(&mut self, at: Timestamp, part: RoutinePart) {
        let fold = &mut self.fold;
        fold.first_at = fold.first_at.min(at);
        fold.lines = fold.lines.saturating_add(1);
        fold.work_items = fold.work_items.saturating_add(u64::from(part != RoutinePart::Start));
        self.only = None;
    }

    fn into_line(self) -> TimelineLine {
        match self.only {
            Some(only) => TimelineLine::Event(only.event.clone()),
            None => TimelineLine::Routine(self.fold),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    /// An entry by its name: `end7` and `start7` are an observation with the fence 7 that found nothing new, `failed7` and
    /// `changed7` are other ends of one, `recovery7` is the start of other work, and anything else has no work.
    fn entry(name: &str, at: Timestamp) -> HistoryEntry {
        let word: String = name.chars().filter(|c| !c.is_ascii_digit()).collect();
        let fence = name[word.len()..].parse().ok();
        let (event, process, detail) = match word.as_str() {
            "end" => ("Finished", Some("Update"), Some("nothing changed")),
            "start" => ("Started", Some("Update"), None),
            "failed" => ("Failed", Some("Update"), Some("the provider does not answer")),
            "changed" => ("Finished", Some("Update"), Some("the provider reports a change")),
            "recovery" => ("Started", Some("Recovery"), None),
            other => (other, None, Some("by kim")),
        };
        HistoryEntry {
            at,
            event: event.to_owned(),
            lane: None,
            fence,
            process: process.map(str::to_owned),
            session: None,
            component: None,
            host: None,
            detail: detail.map(str::to_owned),
        }
    }

    /// The entries of these names, the newest first, a second apart.
    fn history(names: &[&str]) -> Vec<HistoryEntry> {
        names.iter().zip(0..).map(|(name, number)| entry(name, at(-number))).collect()
    }

    /// A line in short: the entries of a fold and those that are ends, or the event with its fence.
    fn summarize(line: &TimelineLine) -> String {
        match line {
            TimelineLine::Routine(fold) => format!("{} of {}", fold.lines, fold.work_items),
            TimelineLine::Event(event) => {
                format!("{}{}", event.event, event.fence.map_or_else(String::new, |fence| fence.to_string()))
            }
        }
    }

    /// The lines of all pages: each call reads up to `most` entries, and each page has up to `limit` lines.
    fn paged(events: &[HistoryEntry], most: usize, limit: usize) -> Vec<TimelineLine> {
        let (mut lines, mut state, mut place) = (Vec::new(), FoldState::default(), 0);
        loop {
            let end = (place + most).min(events.len());
            let folded = fold_events(state, &events[place..end], limit, end == events.len());
            assert!(folded.lines.len() <= limit);
            assert!(folded.state.open_fold.is_none_or(|fold| fold.lines >= 2), "{:?}", folded.state);
            let has_progress = folded.consumed > 0 || state.open_fold.is_some() && !folded.lines.is_empty();
            lines.extend(folded.lines);
            if end == events.len() && place + folded.consumed == end {
                return lines;
            }
            assert!(has_progress, "a call that makes no progress");
            (state, place) = (folded.state, place + folded.consumed);
        }
    }

    fn folded(names: &[&str]) -> Vec<String> {
        let events = history(names);
        let whole = fold_events(FoldState::default(), &events, usize::MAX, true);
        assert_eq!(whole.consumed, events.len());
        whole.lines.iter().map(summarize).collect()
    }

    #[test]
    fn routine_is_folded_up_to_the_next_other_entry() {
        for (names, expected) in [
            (&[][..], &[][..]),
            (&["end3", "start3", "end2", "start2"], &["4 of 2"]),
            (&["end3", "start3"], &["2 of 1"]),
            // A failure and a change split it, with both of their entries.
            (
                &["end3", "start3", "failed2", "start2", "end1", "start1"],
                &["2 of 1", "Failed2", "Started2", "2 of 1"],
            ),
            (&["changed3", "start3", "end2", "start2"], &["Finished3", "Started3", "2 of 1"]),
            (&["end2", "start2", "Held", "end1", "start1", "New"], &["2 of 1", "Held", "2 of 1", "New"]),
            // What is under way has found nothing yet.
            (&["start3", "end2", "start2"], &["Started3", "2 of 1"]),
            // Other work began between its start and its end.
            (&["end2", "recovery9", "start2", "end1", "start1"], &["Finished2", "Started9", "3 of 1"]),
            (&["end2", "Held", "start2", "Ready"], &["Finished2", "Held", "Started2", "Ready"]),
            // Its end, or its start, is older than what the policy keeps.
            (&["start2", "end1"], &["Started2", "Finished1"]),
        ] {
            assert_eq!(folded(names), expected, "{names:?}");
        }
    }

    #[test]
    fn only_the_exact_end_of_an_observation_is_routine() {
        let routine = entry("end7", at(0));
        let change = |change: fn(&mut HistoryEntry)| {
            let mut entry = routine.clone();
            change(&mut entry);
            entry
        };
        assert_eq!(routine_part(&routine, None), Some(RoutinePart::End(7)));
        for other in [
            change(|entry| entry.event = "Failed".to_owned()),
            change(|entry| entry.event = "PutOff".to_owned()),
            change(|entry| entry.event = "Cancelled".to_owned()),
            change(|entry| entry.process = Some("Recovery".to_owned())),
            change(|entry| entry.process = None),
            change(|entry| entry.fence = None),
            change(|entry| entry.detail = None),
            change(|entry| entry.detail = Some("nothing changed, but its disk is on fire".to_owned())),
        ] {
            assert_eq!(routine_part(&other, Some(7)), None, "{other:?}");
        }
        let start = entry("start7", at(0));
        assert_eq!(routine_part(&start, Some(7)), Some(RoutinePart::Start));
        assert_eq!((routine_part(&start, Some(8)), routine_part(&start, None)), (None, None));
    }

    #[test]
    fn fold_has_its_earliest_and_its_latest_time() {
        let events = history(&["end3", "start3", "end2", "start2"]);
        let expected = RoutineFold { first_at: at(-3), last_at: at(0), work_items: 2, lines: 4 };
        for most in [2, 3, 4] {
            assert_eq!(paged(&events, most, 9), [TimelineLine::Routine(expected)], "{most}");
        }
    }

    #[test]
    fn limit_counts_lines_and_not_entries() {
        let events = history(&["end3", "start3", "Held", "end2", "start2", "end1", "start1"]);
        for (limit, lines, consumed) in [
            (0, &[][..], 0),
            (1, &["2 of 1"], 2),
            (2, &["2 of 1", "Held"], 3),
            (3, &["2 of 1", "Held", "4 of 2"], 7),
        ] {
            let folded = fold_events(FoldState::default(), &events, limit, true);
            assert_eq!(folded.lines.iter().map(summarize).collect::<Vec<_>>(), lines, "{limit}");
            assert_eq!(folded.consumed, consumed, "{limit}");
        }
    }

    #[test]
    fn fold_stays_open_between_calls_and_a_single_entry_does_not() {
        let events = history(&["end3", "start3", "end2"]);
        let open = fold_events(FoldState::default(), &events[..2], 1, false);
        assert!(open.lines.is_empty() && open.consumed == 2, "{open:?}");
        assert_eq!(open.state.open_fold.map(|fold| fold.lines), Some(2));
        // The entry is read again, because it may be the only one of its line.
        let single = fold_events(FoldState::default(), &history(&["Held", "end3"]), 9, false);
        assert_eq!((single.lines.len(), single.consumed, single.state), (1, 1, FoldState::default()));
        let start = fold_events(FoldState::default(), &history(&["end3", "Held", "start3"]), 9, false);
        assert_eq!((start.consumed, start.state.awaited_start), (2, Some(3)), "its end was before the page");
    }

    /// Entries as the engine writes them: work items of both lanes that overlap, and other events between them.
    fn any_history() -> impl Strategy<Value = Vec<HistoryEntry>> {
        prop::collection::vec((0..8_u8, 1..4_i64), 0..60).prop_map(|parts| {
            let names = ["end", "end", "start", "start", "failed", "changed", "recovery", "Held"];
            let named = parts.iter().map(|(kind, fence)| match names[usize::from(*kind)] {
                "Held" => "Held".to_owned(),
                name => format!("{name}{fence}"),
            });
            named.zip(0..).map(|(name, number)| entry(&name, at(-number))).collect()
        })
    }

    proptest! {
        #[test]
        fn pages_of_any_size_have_the_same_lines(
            events in any_history(), most in 2_usize..9, limit in 1_usize..9
        ) {
            let whole = fold_events(FoldState::default(), &events, usize::MAX, true).lines;
            prop_assert_eq!(paged(&events, most, limit), whole);
        }

        #[test]
        fn folds_and_events_add_up_to_all_entries(events in any_history()) {
            let lines = fold_events(FoldState::default(), &events, usize::MAX, true).lines;
            let count = |line: &TimelineLine| match line {
                TimelineLine::Event(_) => 1,
                TimelineLine::Routine(fold) => fold.lines,
            };
            prop_assert_eq!(lines.iter().map(count).sum::<u64>(), events.len() as u64);
            // What can be no routine is there, in its order.
            let other = |event: &&HistoryEntry| routine_part(event, event.fence).is_none();
            let alone = lines.iter().filter_map(|line| match line {
                TimelineLine::Event(event) => Some(event),
                TimelineLine::Routine(_) => None,
            });
            let expected: Vec<&HistoryEntry> = events.iter().filter(other).collect();
            prop_assert_eq!(alone.filter(other).collect::<Vec<_>>(), expected);
        }
    }
}
