//! Terminal layout: what the state of the page and what was read look like on a screen of some size.
//!
//! [`screen_lines`][] is a pure function, and no line of it is wider than the screen. Its last line has the keys, or the
//! problem, or the selector that is being typed. Above it is a text that is open ([`crate::top::text_page`]), a list
//! ([`crate::top::list_page`]), or the overview.
//!
//! Each section of the overview gets rows by its priority until none are left: first a few for each section, then as many
//! as it has. Rows without space are left out, and the title of the section contains their number.

use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use unicode_width::UnicodeWidthStr as _;

use crate::output::color::{Severity, SeverityColors};
use crate::output::table::{ELLIPSIS, format_table, shorten};
use crate::top::data::TopData;
use crate::top::fleet_summary::FleetSummary;
use crate::top::list_page::list_lines;
use crate::top::page::{Panel, Section, page_heading, page_sections};
use crate::top::state::{ScreenSize, TopState, TopView};
use model::text_layout::wrap_text;

/// Order in which sections get rows.
const PANEL_PRIORITY: [Panel; 4] = [Panel::Attention, Panel::Phases, Panel::Loops, Panel::Work];
/// Rows that each section gets before any section gets more.
const MIN_ROWS: usize = 3;
/// Lines of a section besides its rows: an empty one, its title and its headers.
const SECTION_OVERHEAD: usize = 3;
/// Most lines of a message.
const MAX_MESSAGE_LINES: usize = 6;
/// Spaces between two keys.
const KEY_GAP: &str = "   ";

/// How the displayed data was fetched.
#[derive(Clone, Debug, Default)]
pub struct FetchStatus {
    /// Address of the queried backend, for people.
    pub backend_name: String,
    /// Why the data is outdated; `None` if the last fetch succeeded.
    pub problem: Option<String>,
    /// Whether to draw with colours.
    pub colors: SeverityColors,
}

/// Draws the page on all of the screen.
pub fn draw_page(frame: &mut Frame<'_>, state: &TopState, data: &TopData, status: &FetchStatus) {
    let area = frame.area();
    let size = ScreenSize { columns: area.width.into(), rows: area.height.into() };
    frame.render_widget(Paragraph::new(screen_lines(state, data, status, size)), area);
}

/// The lines of a screen of this size: as many as it has, and none wider than it is.
#[must_use]
pub fn screen_lines(
    state: &TopState,
    data: &TopData,
    status: &FetchStatus,
    size: ScreenSize,
) -> Vec<Line<'static>> {
    let theme = Theme { colors: status.colors };
    let mut bottom = bottom_lines(state, status, theme, size.columns);
    // The last of them counts most.
    bottom.drain(..bottom.len().saturating_sub(size.rows));
    let rows = size.rows.saturating_sub(bottom.len());
    let mut lines: Vec<Line<'static>> = if let Some(text) = state.open_text(data, size.columns) {
        let first = state.scroll.min(text.len().saturating_sub(rows));
        text.into_iter().skip(first).map(|line| theme.severity_line(line)).collect()
    } else {
        page_lines(state, data, status, theme, ScreenSize { rows, ..size })
    };
    lines.truncate(rows);
    lines.resize(rows, Line::default());
    lines.extend(bottom);
    lines.into_iter().map(|line| fit_line(line, size.columns)).collect()
}

/// The heading of a page and what fits below it.
fn page_lines(
    state: &TopState,
    data: &TopData,
    status: &FetchStatus,
    theme: Theme,
    size: ScreenSize,
) -> Vec<Line<'static>> {
    let heading = data.summary().map_or_else(|| format!("asking {}…", status.backend_name), page_heading);
    let mut lines = vec![Line::styled(heading, BOLD)];
    match (state.view, data.summary()) {
        (TopView::Overview, Some(view)) => {
            lines.extend(overview_lines(view, theme, size.columns, size.rows));
        }
        (TopView::Overview, None) => {}
        (TopView::Machines | TopView::Clusters, _) => {
            let list_size = ScreenSize { rows: size.rows.saturating_sub(lines.len()), ..size };
            lines.extend(list_lines(state, data, theme, list_size));
        }
    }
    lines
}

/// The last lines: a message or a problem, and what is being typed; otherwise the keys.
fn bottom_lines(state: &TopState, status: &FetchStatus, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let message = state.message.as_ref().or(status.problem.as_ref());
    let wrapped = message.map(|message| wrap_text(&to_single_line(message), Some(width)));
    let mut lines: Vec<Line<'static>> = wrapped
        .into_iter()
        .flatten()
        .take(MAX_MESSAGE_LINES)
        .map(|line| Line::styled(line, theme.alert_style()))
        .collect();
    if let Some(input) = &state.input {
        lines.push(Line::from(fit_input("selector: ", input, width)));
    } else if lines.is_empty() {
        lines.push(Line::styled(fit_keys(&keys_of(state), &status.backend_name, width), DIM));
    }
    lines
}

/// The keys that do something where the operator is, the most important first.
fn keys_of(state: &TopState) -> Vec<&'static str> {
    let mut keys = vec!["q quit", "? keys"];
    keys.extend(match (state.is_help_open || state.opened.is_some(), state.view) {
        (true, _) => &["esc back"][..],
        (false, TopView::Overview) => &["space refresh", "tab machines"][..],
        (false, TopView::Machines) => &["enter why", "/ filter", "s sort", "n p page", "tab clusters"][..],
        (false, TopView::Clusters) => &["enter machines", "s sort", "tab overview"][..],
    });
    keys
}

/// As many keys as fit, and the backend if it does.
fn fit_keys(keys: &[&str], backend_name: &str, width: usize) -> String {
    let mut line = String::new();
    for part in keys.iter().chain([&backend_name]) {
        let gap = if line.is_empty() { "" } else { KEY_GAP };
        if line.width() + gap.len() + part.width() > width {
            break;
        }
        line.push_str(gap);
        line.push_str(part);
    }
    line
}

/// What is being typed: its end, if all of it does not fit.
fn fit_input(label: &str, input: &str, width: usize) -> String {
    let available = width.saturating_sub(label.width() + 1);
    let begin =
        input.char_indices().map(|(begin, _)| begin).find(|begin| input[*begin..].width() <= available);
    format!("{label}{}_", begin.map_or("", |begin| &input[begin..]))
}

/// The line within this width: whole words and an ellipsis. A word that is wider alone is cut. The spans do not change where.
fn fit_line(line: Line<'static>, width: usize) -> Line<'static> {
    if line.width() <= width {
        return line;
    }
    let text: String = line.spans.iter().map(|span| span.content.as_ref()).collect();
    let (indent, words) = text.split_at(text.len() - text.trim_start_matches(' ').len());
    let fitted = format!("{indent}{}", fit_words(words, width.saturating_sub(indent.len())));
    let (style, mut spans, mut rest) = (line.style, Vec::new(), fitted.as_str());
    for span in line.spans {
        if let Some(after) = rest.strip_prefix(span.content.as_ref()) {
            rest = after;
            spans.push(span);
        } else {
            spans.push(Span::styled(rest.to_owned(), span.style));
            break;
        }
    }
    Line::from(spans).style(style)
}

/// The whole words of a text that fit a width, with an ellipsis. If not even the first one does, a part of it.
fn fit_words(text: &str, width: usize) -> String {
    let words = shorten(text, width);
    if words.width() <= width && words != ELLIPSIS {
        return words;
    }
    let mut part = String::new();
    for character in text.chars() {
        part.push(character);
        if part.width() + ELLIPSIS.width() > width {
            part.pop();
            break;
        }
    }
    if width > 0 {
        part.push_str(ELLIPSIS);
    }
    part
}

fn overview_lines(view: &FleetSummary, theme: Theme, width: usize, height: usize) -> Vec<Line<'static>> {
    let parts = page_sections(view);
    let refused =
        view.not_permitted.as_ref().map(|refused| format!("not shown: {}", to_single_line(refused)));
    // The heading is above.
    let room = height.saturating_sub(1 + refused.iter().len());
    let rows = allocate_rows(&parts, room);
    let mut lines = Vec::new();
    for (part, rows) in parts.into_iter().zip(rows) {
        if rows > 0 {
            lines.extend(section_lines(part, rows, theme, width));
        }
    }
    lines.extend(refused.map(|refused| Line::styled(refused, DIM)));
    lines
}

fn section_lines(part: Section, shown: usize, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let hidden = part.rows.len() - shown;
    let more = if hidden > 0 { format!("   {hidden} more") } else { String::new() };
    let mut lines = vec![
        Line::default(),
        Line::from(vec![Span::styled(part.title, theme.title_style()), Span::styled(more, DIM)]),
    ];
    let alarming: Vec<bool> = part.rows.iter().take(shown).map(|row| row.is_alert).collect();
    let rows: Vec<Vec<String>> = part.rows.into_iter().take(shown).map(|row| row.cells).collect();
    let text = format_table(&part.headers, &rows, Some(width));
    let mut reports = text.lines().map(str::to_owned);
    lines.extend(reports.next().map(|headers| Line::styled(headers, DIM)));
    let styled = reports.zip(alarming);
    let plain = Style::default();
    lines.extend(
        styled.map(|(row, alarming)| Line::styled(row, if alarming { theme.alert_style() } else { plain })),
    );
    lines
}

/// Number of rows of each section that fit into `room` lines.
fn allocate_rows(parts: &[Section], room: usize) -> Vec<usize> {
    let mut rows = vec![0; parts.len()];
    let mut left = room;
    for most in [MIN_ROWS, usize::MAX] {
        for panel in PANEL_PRIORITY {
            for (part, rows) in parts.iter().zip(&mut rows).filter(|(part, _)| part.panel == panel) {
                let frame = if *rows == 0 { SECTION_OVERHEAD } else { 0 };
                let wanted = part.rows.len().min(most).saturating_sub(*rows);
                let given = wanted.min(left.saturating_sub(frame));
                if given > 0 {
                    *rows += given;
                    left -= given + frame;
                }
            }
        }
    }
    rows
}

/// A text on one line.
pub(super) fn to_single_line(text: &str) -> String {
    text.replace(['\n', '\r', '\t'], " ")
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
/// The style of what matters less.
pub(super) const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// Styles of the page, with colours or without.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theme {
    colors: SeverityColors,
}

impl Theme {
    /// The style of a title.
    pub(super) const fn title_style(self) -> Style {
        match self.colors {
            SeverityColors::On => BOLD.fg(Color::Cyan),
            SeverityColors::Off => BOLD,
        }
    }

    /// The style of what needs attention.
    pub(super) const fn alert_style(self) -> Style {
        match self.colors {
            SeverityColors::On => Style::new().fg(Color::Red),
            SeverityColors::Off => BOLD,
        }
    }

    /// The line with the colours that its severities have in other output.
    pub(super) fn severity_line(self, text: String) -> Line<'static> {
        if self.colors == SeverityColors::Off {
            return Line::from(text);
        }
        let spans = text.split_inclusive(' ').map(|piece| {
            let color = match Severity::of_word(piece.trim_end_matches(' ')) {
                Some(Severity::Critical) => Color::Red,
                Some(Severity::Warning) => Color::Yellow,
                Some(Severity::Notice) => Color::Cyan,
                None => return Span::raw(piece.to_owned()),
            };
            Span::styled(piece.to_owned(), Style::new().fg(color))
        });
        Line::from(spans.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::page::SectionRow;

    const PLAIN: Theme = Theme { colors: SeverityColors::Off };

    fn section(panel: Panel, rows: usize) -> Section {
        let row = SectionRow { cells: vec!["cell".to_owned()], is_alert: false };
        Section { panel, title: "Title".to_owned(), headers: vec!["HEADER"], rows: vec![row; rows] }
    }

    #[test]
    fn rows_are_allocated_by_priority_within_the_height() {
        let parts = [
            section(Panel::Attention, 1),
            section(Panel::Phases, 5),
            section(Panel::Loops, 6),
            section(Panel::Work, 90),
        ];
        for (room, expected) in [
            (0, [0, 0, 0, 0]),
            (3, [0, 0, 0, 0]),
            (4, [1, 0, 0, 0]),
            (9, [1, 2, 0, 0]),
            (22, [1, 3, 3, 3]),
            (25, [1, 5, 4, 3]),
            (40, [1, 5, 6, 16]),
            (200, [1, 5, 6, 90]),
        ] {
            let rows = allocate_rows(&parts, room);
            assert_eq!(rows, expected, "in {room} lines");
            let used: usize = rows.iter().filter(|rows| **rows > 0).map(|rows| rows + SECTION_OVERHEAD).sum();
            assert!(used <= room, "{used} of {room}");
        }
    }

    #[test]
    fn section_title_counts_hidden_rows() {
        let lines = section_lines(section(Panel::Work, 9), 2, PLAIN, 80);
        let text: Vec<String> = lines.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["", "Title   7 more", "HEADER", "cell", "cell"]);
    }

    #[test]
    fn smallest_terminal_does_not_panic() {
        let status = FetchStatus { backend_name: "db".to_owned(), ..FetchStatus::default() };
        for rows in 0..3 {
            for columns in 0..3 {
                let size = ScreenSize { columns, rows };
                for view in [TopView::Overview, TopView::Machines, TopView::Clusters] {
                    for is_help_open in [false, true] {
                        let input = is_help_open.then(|| "phase=New".to_owned());
                        let state = TopState { view, is_help_open, input, ..TopState::new(size) };
                        let lines = screen_lines(&state, &TopData::default(), &status, size);
                        assert_eq!(lines.len(), rows, "{size:?}");
                        assert!(lines.iter().all(|line| line.width() <= columns), "{size:?}: {lines:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn line_ends_behind_a_word_and_a_single_word_is_cut() {
        for (text, width, expected) in [
            ("two words", 9, "two words"),
            ("two words", 8, "two…"),
            ("two words", 4, "two…"),
            ("two words", 3, "tw…"),
            ("two words", 1, "…"),
            ("two words", 0, ""),
            ("東京都", 5, "東京…"),
            ("東京都", 4, "東…"),
        ] {
            let line = fit_line(Line::from(text), width).to_string();
            assert_eq!(line, expected, "{width}");
            assert!(line.width() <= width);
        }
    }

    #[test]
    fn end_of_what_is_typed_is_shown() {
        assert_eq!(fit_input("selector: ", "phase=New", 40), "selector: phase=New_");
        assert_eq!(fit_input("selector: ", "phase=New", 14), "selector: New_");
        assert_eq!(fit_input("selector: ", "location=東京", 14), "selector: 京_");
        assert_eq!(fit_input("selector: ", "phase=New", 5), "selector: _");
    }

    #[test]
    fn severities_have_colours_only_if_they_are_wanted() {
        let style = |colors, word: &str| {
            let line = Theme { colors }.severity_line(format!("sim-1 {word} 2m"));
            assert_eq!(line.to_string(), format!("sim-1 {word} 2m"));
            line.spans.iter().find_map(|span| span.style.fg)
        };
        for (word, expected) in [
            ("NeedsHuman", Some(Color::Red)),
            ("Silent", Some(Color::Yellow)),
            ("notice", Some(Color::Cyan)),
            ("Ready", None),
        ] {
            assert_eq!(style(SeverityColors::On, word), expected, "{word}");
            assert_eq!(style(SeverityColors::Off, word), None, "{word}");
        }
        assert_eq!(PLAIN.alert_style().fg.or(PLAIN.title_style().fg), None);
    }
}
