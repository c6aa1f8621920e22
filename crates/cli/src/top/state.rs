//! The state of the page, and what each key does to it.
//!
//! [`next_state`][] is a pure function: it reads no keyboard and calls no server. What the page needs follows from its state
//! ([`TopState::request`]), and so does what is drawn ([`crate::top::draw`]). No key gives an order.
//!
//! The selection follows the object and not the place of its row: while the page is read again every few seconds, rows
//! come and go above it. If the object itself is gone, the row at its place is selected.

use crate::top::data::{Content, ReadRequest, SortOrder, TopData, TopList, TopRow};
use crate::top::text_page::{explanation_lines, fit_lines, help_lines};
use model::selector::Selector;
use model::selector::compose::quote_value;

/// Lines of a list besides its rows: heading, an empty line, title, headers, and the keys.
pub const LIST_OVERHEAD: usize = 5;
/// Longest selector that can be typed, in bytes.
const MAX_INPUT: usize = 4096;

/// A page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopView {
    /// The fleet in numbers.
    #[default]
    Overview,
    /// A list of machines.
    Machines,
    /// A list of clusters.
    Clusters,
}

impl TopView {
    const fn next(self) -> Self {
        match self {
            Self::Overview => Self::Machines,
            Self::Machines => Self::Clusters,
            Self::Clusters => Self::Overview,
        }
    }
}

/// The size of a screen, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScreenSize {
    /// Width.
    pub columns: usize,
    /// Height.
    pub rows: usize,
}

/// What the operator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Types a character.
    Char(char),
    /// Return.
    Enter,
    /// Escape.
    Escape,
    /// Deletes the last character.
    Backspace,
    /// Tab.
    Tab,
    /// Shift and Tab.
    BackTab,
    /// Arrow up.
    Up,
    /// Arrow down.
    Down,
    /// A screen up.
    PageUp,
    /// A screen down.
    PageDown,
    /// To the beginning.
    Home,
    /// To the end.
    End,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D.
    EndOfInput,
    /// Gives the terminal another size.
    Resize(ScreenSize),
}

/// How the operator ends the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopEnd {
    /// By a key that quits.
    Quit,
    /// By Ctrl-C.
    Interrupted,
}

/// What is selected in a list, and its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListState {
    /// Name of the selected object; `None` until the operator selects one.
    pub selected: Option<String>,
    /// Place of its row when it was selected.
    pub index: usize,
    /// The order; `None` for that of the API.
    pub sort: Option<SortOrder>,
}

impl ListState {
    /// The place of the selected row among these.
    #[must_use]
    pub fn selected_index(&self, rows: &[&TopRow]) -> usize {
        let found = rows.iter().position(|row| Some(&row.name) == self.selected.as_ref());
        found.unwrap_or_else(|| self.index.min(rows.len().saturating_sub(1)))
    }

    fn select(&mut self, index: usize, rows: &[&TopRow]) {
        let index = index.min(rows.len().saturating_sub(1));
        (self.selected, self.index) = (rows.get(index).map(|row| row.name.clone()), index);
    }

    fn select_first(&mut self) {
        (self.selected, self.index) = (None, 0);
    }
}

/// The state of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopState {
    /// The size of the screen.
    pub size: ScreenSize,
    /// The page below what is open.
    pub view: TopView,
    /// The list of machines.
    pub machines: ListState,
    /// The list of clusters.
    pub clusters: ListState,
    /// Selector of the machines; empty for all.
    pub selector: String,
    /// Tokens of the pages of machines up to the present one; empty on the first.
    pub page_tokens: Vec<String>,
    /// The machine of which it is shown why it is as it is.
    pub opened: Option<String>,
    /// Whether the keys are shown.
    pub is_help_open: bool,
    /// First line of the text that is shown.
    pub scroll: usize,
    /// The selector that is being typed.
    pub input: Option<String>,
    /// What the last key led to, as a sentence.
    pub message: Option<String>,
    /// How often the operator wanted everything to be read again.
    pub refreshes: u64,
    /// How the program ends; `None` while it runs.
    pub end: Option<TopEnd>,
}

impl TopState {
    /// The state at the beginning.
    #[must_use]
    pub fn new(size: ScreenSize) -> Self {
        Self {
            size,
            view: TopView::default(),
            machines: ListState::default(),
            clusters: ListState::default(),
            selector: String::new(),
            page_tokens: Vec::new(),
            opened: None,
            is_help_open: false,
            scroll: 0,
            input: None,
            message: None,
            refreshes: 0,
            end: None,
        }
    }

    /// What the page needs, besides the summary of the fleet.
    #[must_use]
    pub fn request(&self) -> ReadRequest {
        match (&self.opened, self.view) {
            (Some(machine), _) => ReadRequest::Why { machine: machine.clone() },
            (None, TopView::Overview) => ReadRequest::Overview,
            (None, TopView::Machines) => ReadRequest::Machines {
                selector: self.selector.clone(),
                page_token: self.page_tokens.last().cloned().unwrap_or_default(),
            },
            (None, TopView::Clusters) => ReadRequest::Clusters,
        }
    }

    /// The text that covers the page, in lines of this width; `None` if none is open.
    #[must_use]
    pub fn open_text(&self, data: &TopData, width: usize) -> Option<Vec<String>> {
        if self.is_help_open {
            return Some(help_lines(width));
        }
        let machine = self.opened.as_ref()?;
        Some(match data.content(&self.request()) {
            Some(Ok(Content::Why(why))) => explanation_lines(why, &data.target_flags, width),
            Some(Err(problem)) => fit_lines(problem, width),
            _ => fit_lines(&format!("reading why {machine} is as it is…"), width),
        })
    }

    /// What is selected in the list that is shown; `None` on a page without one.
    #[must_use]
    pub const fn list_state(&self) -> Option<&ListState> {
        match self.view {
            TopView::Overview => None,
            TopView::Machines => Some(&self.machines),
            TopView::Clusters => Some(&self.clusters),
        }
    }

    const fn list_state_mut(&mut self) -> Option<&mut ListState> {
        match self.view {
            TopView::Overview => None,
            TopView::Machines => Some(&mut self.machines),
            TopView::Clusters => Some(&mut self.clusters),
        }
    }

    /// Shows the machines that a selector chooses, from the first page.
    fn filter_machines(&mut self, selector: String) {
        self.selector = selector;
        self.view = TopView::Machines;
        self.show_page(Vec::clear);
    }

    /// Goes to another page of machines.
    fn show_page(&mut self, change: impl FnOnce(&mut Vec<String>)) {
        change(&mut self.page_tokens);
        self.machines.select_first();
    }
}

/// The state after a key. `data` is what was read when the key was pressed.
#[must_use]
pub fn next_state(mut state: TopState, key: Key, data: &TopData) -> TopState {
    if let Key::Resize(size) = key {
        state.size = size;
        return state;
    }
    state.message = None;
    match key {
        Key::Interrupt => state.end = Some(TopEnd::Interrupted),
        Key::EndOfInput => state.end = Some(TopEnd::Quit),
        _ if state.input.is_some() => edit_selector(&mut state, key),
        Key::Char('q' | 'Q') => state.end = Some(TopEnd::Quit),
        Key::Char(' ' | 'r') => state.refreshes = state.refreshes.wrapping_add(1),
        Key::Char('?') => (state.is_help_open, state.scroll) = (!state.is_help_open, 0),
        _ if state.is_help_open || state.opened.is_some() => move_in_text(&mut state, key, data),
        _ => move_in_page(&mut state, key, data),
    }
    state
}

/// A key while a selector is typed.
fn edit_selector(state: &mut TopState, key: Key) {
    let Some(mut text) = state.input.take() else { return };
    match key {
        Key::Escape => return,
        Key::Enter => match text.parse::<Selector>() {
            Ok(_) => return state.filter_machines(text.trim().to_owned()),
            Err(error) => state.message = Some(error.to_string()),
        },
        Key::Char(typed) if !typed.is_control() && text.len() + typed.len_utf8() <= MAX_INPUT => {
            text.push(typed)
        }
        Key::Backspace => {
            text.pop();
        }
        _ => {}
    }
    state.input = Some(text);
}

/// A key while a text covers the page.
fn move_in_text(state: &mut TopState, key: Key, data: &TopData) {
    if matches!(key, Key::Escape | Key::Enter) {
        state.scroll = 0;
        if state.is_help_open {
            state.is_help_open = false;
        } else {
            state.opened = None;
        }
        return;
    }
    let lines = state.open_text(data, state.size.columns).map_or(0, |lines| lines.len());
    let screen = state.size.rows.saturating_sub(1);
    let last = lines.saturating_sub(screen);
    state.scroll = moved(state.scroll.min(last), key, screen, last).unwrap_or(state.scroll);
}

/// A key on a page.
fn move_in_page(state: &mut TopState, key: Key, data: &TopData) {
    match key {
        Key::Tab => state.view = state.view.next(),
        // The one before is the second after, because there are three.
        Key::BackTab => state.view = state.view.next().next(),
        Key::Char('1') => state.view = TopView::Overview,
        Key::Char('2') => state.view = TopView::Machines,
        Key::Char('3') => state.view = TopView::Clusters,
        Key::Char('/') => state.input = Some(state.selector.clone()),
        Key::Escape if state.view == TopView::Machines && !state.selector.is_empty() => {
            state.filter_machines(String::new());
        }
        Key::Escape => state.view = TopView::Overview,
        Key::Enter if state.view == TopView::Overview => state.view = TopView::Machines,
        _ => {
            if let Some(list) = data.list(&state.request()) {
                move_in_list(state, key, list);
            }
        }
    }
}

/// A key on a list.
fn move_in_list(state: &mut TopState, key: Key, list: &TopList) {
    let screen = state.size.rows.saturating_sub(LIST_OVERHEAD);
    let (view, is_first_page) = (state.view, state.page_tokens.is_empty());
    let Some(list_state) = state.list_state_mut() else { return };
    let rows = list.ordered_rows(list_state.sort);
    let index = list_state.selected_index(&rows);
    match (key, view) {
        (Key::Char('s'), _) => list_state.sort = next_sort(list_state.sort, &list.shown_columns()),
        (Key::Char('S'), _) => {
            let sort = list_state.sort.unwrap_or(SortOrder { column: 0, is_descending: false });
            list_state.sort = Some(SortOrder { is_descending: !sort.is_descending, ..sort });
        }
        (Key::Enter, TopView::Machines) => {
            state.opened = rows.get(index).map(|row| row.name.clone());
            state.scroll = 0;
        }
        (Key::Enter, _) => {
            if let Some(row) = rows.get(index) {
                state.filter_machines(format!("cluster={}", quote_value(&row.name)));
            }
        }
        (Key::Char('n'), TopView::Machines) if list.next_token.is_empty() => {
            state.message = Some("this is the last page of machines".to_owned());
        }
        (Key::Char('n'), TopView::Machines) => state.show_page(|tokens| tokens.push(list.next_token.clone())),
        (Key::Char('p'), TopView::Machines) if is_first_page => {
            state.message = Some("this is the first page of machines".to_owned());
        }
        (Key::Char('p'), TopView::Machines) => state.show_page(|tokens| drop(tokens.pop())),
        _ => {
            if let Some(index) = moved(index, key, screen, rows.len().saturating_sub(1)) {
                list_state.select(index, &rows);
            }
        }
    }
}

/// Where a key leads from a place, with 0 as the first and `last` as the last; `None` for a key that does not move.
fn moved(place: usize, key: Key, screen: usize, last: usize) -> Option<usize> {
    let screen = screen.max(1);
    let place = match key {
        Key::Up | Key::Char('k') => place.saturating_sub(1),
        Key::Down | Key::Char('j') => place.saturating_add(1),
        Key::PageUp => place.saturating_sub(screen),
        Key::PageDown => place.saturating_add(screen),
        Key::Home | Key::Char('g') => 0,
        Key::End | Key::Char('G') => last,
        _ => return None,
    };
    Some(place.min(last))
}

/// The order by the column after the present one, and after the last column that of the API.
fn next_sort(sort: Option<SortOrder>, columns: &[usize]) -> Option<SortOrder> {
    let next = match sort {
        None => columns.first(),
        Some(sort) => columns.iter().find(|column| **column > sort.column),
    };
    next.map(|column| SortOrder { column: *column, is_descending: false })
}

#[cfg(test)]
mod tests {
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
        let state =
            typed("/").into_iter().fold(state, |state, key| next_state(state, key, &TopData::default()));
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
}
