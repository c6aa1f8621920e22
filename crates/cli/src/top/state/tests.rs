//! Tables of keys: what each does to the state of the page.

use super::*;
use crate::object::list::Column;
use crate::top::data::TopAnswer;
use crate::top::fleet_summary::FleetSummary;
use model::time::Timestamp;

const COLUMNS: [Column; 3] = [Column::always("NAME"), Column::always("PHASE"), Column::always("SINCE")];
const SIZE: ScreenSize = ScreenSize { columns: 80, rows: 24 };

fn summary() -> FleetSummary {
    FleetSummary {
        at: Timestamp::UNIX_EPOCH,
        phases: Vec::new(),
        loops: Vec::new(),
        work: Vec::new(),
        more_work: false,
        brakes: Vec::new(),
        providers: Vec::new(),
        counted_at: None,
        not_permitted: None,
    }
}

fn list(names: &[&str], next_token: &str) -> Content {
    let row = |(place, name): (usize, &&str)| TopRow {
        name: (*name).to_owned(),
        cells: vec![(*name).to_owned(), "Ready".to_owned(), format!("{}m", names.len() - place)],
    };
    Content::List(TopList {
        columns: &COLUMNS,
        rows: names.iter().enumerate().map(row).collect(),
        next_token: next_token.to_owned(),
    })
}

fn machines(selector: &str, page_token: &str) -> ReadRequest {
    ReadRequest::Machines { selector: selector.to_owned(), page_token: page_token.to_owned() }
}

/// What was read: three machines and a next page, that page, and two clusters.
fn data(request: &ReadRequest) -> TopData {
    let mut data = TopData::default();
    let content = match request {
        ReadRequest::Machines { page_token, .. } if page_token.is_empty() => {
            list(&["sim/a", "sim/b", "sim/c"], "t1")
        }
        ReadRequest::Machines { .. } => list(&["sim/d", "sim/e"], ""),
        ReadRequest::Clusters => list(&["ams", "prod 2"], ""),
        ReadRequest::Overview | ReadRequest::Why { .. } => Content::Overview,
    };
    data.record(TopAnswer { request: request.clone(), summary: summary(), content: Ok(content) });
    data
}

/// The state after these keys, each with what the page needs before it.
fn after(keys: &[Key]) -> TopState {
    keys.iter().fold(TopState::new(SIZE), |state, key| {
        let data = data(&state.request());
        next_state(state, *key, &data)
    })
}

fn typed(text: &str) -> Vec<Key> {
    text.chars().map(|typed| if typed == '\n' { Key::Enter } else { Key::Char(typed) }).collect()
}

/// The name of the selected row, or of the first one if none was selected.
fn selected(state: &TopState) -> String {
    let data = data(&state.request());
    let list = data.list(&state.request()).unwrap();
    let list_state = state.list_state().unwrap();
    let rows = list.ordered_rows(list_state.sort);
    rows[list_state.selected_index(&rows)].name.clone()
}

#[test]
fn keys_lead_from_page_to_page() {
    use TopView::{Clusters, Machines, Overview};
    for (keys, view) in [
        (&[][..], Overview),
        (&[Key::Tab], Machines),
        (&[Key::Tab, Key::Tab], Clusters),
        (&[Key::Tab, Key::Tab, Key::Tab], Overview),
        (&[Key::BackTab], Clusters),
        (&[Key::Enter], Machines),
        (&[Key::Char('2')], Machines),
        (&[Key::Char('3')], Clusters),
        (&[Key::Char('3'), Key::Char('1')], Overview),
        (&[Key::Char('3'), Key::Escape], Overview),
        (&[Key::Escape], Overview),
    ] {
        assert_eq!(after(keys).view, view, "{keys:?}");
    }
}

#[test]
fn row_is_selected() {
    for (keys, expected) in [
        ("2", "sim/a"),
        ("2j", "sim/b"),
        ("2jj", "sim/c"),
        ("2jjjjj", "sim/c"),
        ("2jjk", "sim/b"),
        ("2k", "sim/a"),
        ("2G", "sim/c"),
        ("2Gg", "sim/a"),
        ("3j", "prod 2"),
        // By name, by phase, by time.
        ("2sss", "sim/c"),
        ("2S", "sim/c"),
        ("2sssS", "sim/a"),
        ("2ssss", "sim/a"),
    ] {
        assert_eq!(selected(&after(&typed(keys))), expected, "{keys}");
    }
    for (key, expected) in [(Key::PageDown, "sim/c"), (Key::End, "sim/c"), (Key::Down, "sim/b")] {
        assert_eq!(selected(&after(&[Key::Tab, key])), expected, "{key:?}");
    }
}

#[test]
fn selection_follows_the_object_and_then_its_place() {
    let state = after(&typed("2j"));
    for (rows, expected) in [
        (&["sim/0", "sim/a", "sim/b", "sim/c"][..], "sim/b"),
        (&["sim/b"], "sim/b"),
        (&["sim/a", "sim/c"], "sim/c"),
        (&["sim/a"], "sim/a"),
    ] {
        let Content::List(list) = list(rows, "") else { unreachable!("it is a list") };
        let rows = list.ordered_rows(None);
        assert_eq!(rows[state.machines.selected_index(&rows)].name, expected, "{rows:?}");
    }
    assert_eq!(state.machines.selected_index(&[]), 0);
}

#[test]
fn enter_opens_why_of_the_machine_and_the_machines_of_the_cluster() {
    let state = after(&typed("2j\n"));
    assert_eq!(state.request(), ReadRequest::Why { machine: "sim/b".to_owned() });
    let back = next_state(state, Key::Escape, &TopData::default());
    assert_eq!((back.request(), selected(&back).as_str()), (machines("", ""), "sim/b"));
    for (keys, expected) in [("3\n", "cluster=ams"), ("3j\n", "cluster=\"prod 2\"")] {
        let state = after(&typed(keys));
        assert_eq!(state.request(), machines(expected, ""), "{keys}");
        assert!(state.selector.parse::<Selector>().is_ok());
    }
    // Nothing to open.
    let state = next_state(after(&typed("2")), Key::Enter, &TopData::default());
    assert_eq!(state.opened, None);
}

#[test]
fn selector_filters_the_machines_on_the_server() {
    let state = after(&typed("2nj/phase=Ready\n"));
    assert_eq!((state.request(), state.input.as_ref()), (machines("phase=Ready", ""), None));
    // The next one begins with the present one.
    let state = typed("/").into_iter().fold(state, |state, key| next_state(state, key, &TopData::default()));
    assert_eq!(state.input.as_deref(), Some("phase=Ready"));
    let kept = next_state(state.clone(), Key::Escape, &TopData::default());
    assert_eq!((kept.input, kept.selector.as_str()), (None, "phase=Ready"));
    let shorter = next_state(state, Key::Backspace, &TopData::default());
    assert_eq!(shorter.input.as_deref(), Some("phase=Read"));
    // Keys of the page are text meanwhile, and a wrong selector is not sent.
    let state = after(&typed("/q?=\n"));
    assert_eq!((state.end, state.is_help_open, state.input.as_deref()), (None, false, Some("q?=")));
    assert!(state.message.is_some() && state.request() == ReadRequest::Overview, "{state:?}");
    let mut keys = typed("/phase=Ready\n");
    keys.push(Key::Escape);
    assert_eq!(after(&keys).request(), machines("", ""), "the filter is dropped first");
    keys.push(Key::Escape);
    assert_eq!(after(&keys).request(), ReadRequest::Overview);
}

#[test]
fn machines_are_read_a_page_at_a_time() {
    for (keys, token, message) in [
        ("2", "", false),
        ("2n", "t1", false),
        ("2nn", "t1", true),
        ("2np", "", false),
        ("2p", "", true),
        ("2pn", "t1", false),
    ] {
        let state = after(&typed(keys));
        assert_eq!((state.request(), state.message.is_some()), (machines("", token), message), "{keys}");
    }
    assert_eq!(selected(&after(&typed("2jjn"))), "sim/d", "the first row of the page");
}

#[test]
fn text_is_scrolled_within_its_lines() {
    let small = Key::Resize(ScreenSize { columns: 40, rows: 6 });
    let lines = after(&[small, Key::Char('?')]).open_text(&TopData::default(), 40).unwrap().len();
    for (keys, expected) in [
        (&[][..], 0),
        (&[Key::Down, Key::Down], 2),
        (&[Key::Down, Key::Up, Key::Up], 0),
        (&[Key::PageDown], 5),
        (&[Key::End, Key::Down], lines - 5),
        (&[Key::End, Key::PageUp], lines - 10),
        (&[Key::End, Key::Home], 0),
    ] {
        let state = after(&[&[small, Key::Char('?')][..], keys].concat());
        assert_eq!(state.scroll, expected, "{keys:?}");
    }
    for close in [Key::Char('?'), Key::Escape, Key::Enter] {
        let state = after(&[Key::Char('?'), Key::Down, close]);
        assert_eq!((state.is_help_open, state.scroll, state.view), (false, 0, TopView::Overview));
    }
}

#[test]
fn program_ends_by_keys() {
    for (keys, expected) in [
        (&[Key::Char('q')][..], Some(TopEnd::Quit)),
        (&[Key::Char('Q')], Some(TopEnd::Quit)),
        (&[Key::EndOfInput], Some(TopEnd::Quit)),
        (&[Key::Interrupt], Some(TopEnd::Interrupted)),
        (&[Key::Char('?'), Key::Char('q')], Some(TopEnd::Quit)),
        (&[Key::Char('/'), Key::Char('q')], None),
        (&[Key::Char('/'), Key::Interrupt], Some(TopEnd::Interrupted)),
        (&[Key::Escape], None),
    ] {
        assert_eq!(after(keys).end, expected, "{keys:?}");
    }
}

#[test]
fn refresh_and_size_change_nothing_else() {
    let before = after(&typed("2j"));
    let refreshed = next_state(before.clone(), Key::Char(' '), &TopData::default());
    assert_eq!(refreshed, TopState { refreshes: 1, ..before.clone() });
    let size = ScreenSize { columns: 40, rows: 10 };
    let resized = next_state(before.clone(), Key::Resize(size), &TopData::default());
    assert_eq!(resized, TopState { size, ..before });
}
