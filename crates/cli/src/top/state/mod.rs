//! The state of the page, and what each key does to it.
//!
//! [`next_state`][] is a pure function: it reads no keyboard and calls no server. What the page needs follows from its state
//! ([`TopState::request`]), and so does what is drawn ([`crate::top::draw`]). No key gives an order.
//!
//! The selection follows the object and not the place of its row: while the page is read again every few seconds, rows
//! come and go above it. If the object itself is gone, the row at its place is selected.

use crate::top::data::{Content, ReadRequest, SortOrder, TopData, TopList, TopRow};
use crate::top::text_page::{explanation_lines, fit_lines, help_lines};
use model::plain_text::is_hidden;
use model::selector::Selector;
use model::selector::compose::quote_value;

#[cfg(test)]
mod tests;

/// Lines of a list besides its rows: heading, an empty line, title, headers, and the keys.
pub const LIST_OVERHEAD: usize = 5;
/// Longest selector that can be typed, in bytes.
const MAX_INPUT: usize = 4096;

/// A page that Tab leads to.
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

/// The size of a screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScreenSize {
    /// Its width, in columns.
    pub columns: usize,
    /// Its height, in lines.
    pub rows: usize,
}

/// What the operator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// A character, or a key with a letter.
    Char(char),
    /// Opens what is selected, or accepts what is typed.
    Enter,
    /// Goes back, or gives up what is typed.
    Escape,
    /// Deletes the last character that was typed.
    Backspace,
    /// Goes to the next page.
    Tab,
    /// Goes to the page before.
    BackTab,
    /// Goes a line up.
    Up,
    /// Goes a line down.
    Down,
    /// Goes a screen up.
    PageUp,
    /// Goes a screen down.
    PageDown,
    /// Goes to the beginning.
    Home,
    /// Goes to the end.
    End,
    /// Ctrl-C, which ends the program at once.
    Interrupt,
    /// Ctrl-D, which quits as `q` does.
    EndOfInput,
    /// Gives the terminal another size.
    Resize(ScreenSize),
}

/// How the operator ends the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopEnd {
    /// By a key that quits.
    Quit,
    /// By Ctrl-C, with its exit code.
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
            Ok(_) => {
                state.filter_machines(text.trim().to_owned());
                return;
            }
            Err(error) => state.message = Some(error.to_string()),
        },
        Key::Char(typed) if !is_hidden(typed) && text.len() + typed.len_utf8() <= MAX_INPUT => {
            text.push(typed);
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
    state.scroll = next_place(state.scroll.min(last), key, screen, last).unwrap_or(state.scroll);
}

/// A key on a page.
fn move_in_page(state: &mut TopState, key: Key, data: &TopData) {
    match key {
        Key::Tab => state.view = state.view.next(),
        // The one before is the second after, because there are three.
        Key::BackTab => state.view = state.view.next().next(),
        Key::Char('2') => state.view = TopView::Machines,
        Key::Char('3') => state.view = TopView::Clusters,
        Key::Char('/') => state.input = Some(state.selector.clone()),
        Key::Escape if state.view == TopView::Machines && !state.selector.is_empty() => {
            state.filter_machines(String::new());
        }
        Key::Char('1') | Key::Escape => state.view = TopView::Overview,
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
            if let Some(index) = next_place(index, key, screen, rows.len().saturating_sub(1)) {
                list_state.select(index, &rows);
            }
        }
    }
}

/// Where a key leads from a place, with 0 as the first and `last` as the last; `None` for a key that does not move.
fn next_place(place: usize, key: Key, screen: usize, last: usize) -> Option<usize> {
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
