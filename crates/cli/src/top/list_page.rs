//! A list on the screen: machines or clusters, with the selected row marked.
//!
//! A list longer than the screen is scrolled so that the selected row is in the middle. A mark before it says the same as
//! its inverted colours, so that it is found without them.

use ratatui::style::{Modifier, Style};
use ratatui::text::Line;

use crate::output::table::format_table;
use crate::top::data::{Content, SortOrder, TopData, TopList};
use crate::top::draw::{DIM, Theme, to_single_line};
use crate::top::state::{ScreenSize, TopState, TopView};
use model::text_layout::wrap_text;

/// Before the selected row, and as wide as what is before the others.
const MARK: &str = "> ";
const NO_MARK: &str = "  ";

/// The lines below the heading.
pub(super) fn list_lines(
    state: &TopState,
    data: &TopData,
    theme: Theme,
    size: ScreenSize,
) -> Vec<Line<'static>> {
    let content = data.content(&state.request());
    let list = match content {
        Some(Ok(Content::List(list))) => Some(list),
        _ => None,
    };
    let title = Line::styled(list_title(state, list), theme.title_style());
    let mut lines = vec![Line::default(), title];
    match (list, content) {
        (Some(list), _) if list.rows.is_empty() => lines.push(Line::styled(empty_note(state, list), DIM)),
        (Some(list), _) => {
            let rows = size.rows.saturating_sub(lines.len() + 1);
            lines.extend(table_lines(state, list, theme, size.columns, rows));
        }
        (None, Some(Err(problem))) => {
            let problem = wrap_text(&to_single_line(problem), Some(size.columns));
            lines.extend(problem.into_iter().map(|line| Line::styled(line, theme.alert_style())));
        }
        (None, _) => lines.push(Line::styled("reading…", DIM)),
    }
    lines
}

/// What the list has, which part of it, and in which order.
fn list_title(state: &TopState, list: Option<&TopList>) -> String {
    let mut parts = Vec::new();
    if state.view == TopView::Clusters {
        parts.push("Clusters".to_owned());
    } else {
        parts.push(match state.selector.as_str() {
            "" => "Machines".to_owned(),
            selector => format!("Machines with {}", to_single_line(selector)),
        });
        let has_more = list.is_some_and(|list| !list.next_token.is_empty());
        match (state.page_tokens.len() + 1, has_more) {
            (1, false) => {}
            (page, false) => parts.push(format!("page {page}, the last")),
            (page, true) => parts.push(format!("page {page}, more with n")),
        }
    }
    let sort = state.list_state().and_then(|list_state| list_state.sort);
    parts.extend(sort.zip(list).and_then(|(sort, list)| sort_note(state.view, sort, list)));
    parts.join("; ")
}

fn sort_note(view: TopView, sort: SortOrder, list: &TopList) -> Option<String> {
    let header = list.columns.get(sort.column)?.header;
    let direction = if sort.is_descending { ", greatest first" } else { "" };
    // The server has one order. Other pages are read when they are shown.
    let part = if view == TopView::Machines { " on this page" } else { "" };
    Some(format!("sorted{part} by {header}{direction}"))
}

/// What is shown in place of rows.
fn empty_note(state: &TopState, list: &TopList) -> String {
    let note = match (state.view, list.next_token.is_empty()) {
        (TopView::Clusters, _) => "no clusters",
        (_, false) => "no machine of this part of the fleet; n reads the next part",
        (_, true) if state.selector.is_empty() && state.page_tokens.is_empty() => "no machines",
        (_, true) if state.page_tokens.is_empty() => "no machine matches; esc drops the filter",
        (_, true) => "no more machines; p goes back",
    };
    note.to_owned()
}

/// The headers, and the rows around the selected one.
fn table_lines(
    state: &TopState,
    list: &TopList,
    theme: Theme,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let Some(list_state) = state.list_state() else { return Vec::new() };
    let rows = list.ordered_rows(list_state.sort);
    let selected = list_state.selected_index(&rows);
    let columns = list.shown_columns();
    let headers: Vec<&str> =
        columns.iter().filter_map(|index| list.columns.get(*index)).map(|column| column.header).collect();
    let cells: Vec<Vec<String>> =
        rows.iter().map(|row| columns.iter().map(|index| row.cell(*index).to_owned()).collect()).collect();
    let text = format_table(&headers, &cells, Some(width.saturating_sub(MARK.len())));
    let mut table = text.lines();
    let mut lines: Vec<Line<'static>> =
        table.next().map(|headers| Line::styled(format!("{NO_MARK}{headers}"), DIM)).into_iter().collect();
    let first = selected.saturating_sub(height / 2).min(rows.len().saturating_sub(height));
    for (index, row) in table.enumerate().skip(first).take(height) {
        let is_selected = index == selected;
        let mark = if is_selected { MARK } else { NO_MARK };
        let line = theme.severity_line(format!("{mark}{row}"));
        let style = if is_selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        lines.push(line.style(style));
    }
    lines
}
