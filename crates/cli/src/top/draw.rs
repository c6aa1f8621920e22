//! Terminal layout: allocate rows to sections and draw them.
//!
//! Each section gets rows by its priority until none are left: first a few for each section, then as many as it has.
//! Rows without space are left out, and the title of the section contains their number.

use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::output::table::format_table;
use crate::top::fleet_summary::FleetSummary;
use crate::top::page::{Panel, Section, page_heading, page_sections};

/// Order in which sections get rows.
const PANEL_PRIORITY: [Panel; 4] = [Panel::Attention, Panel::Phases, Panel::Loops, Panel::Work];
/// Rows that each section gets before any section gets more.
const MIN_ROWS: usize = 3;
/// Lines of a section besides its rows: an empty one, its title and its headers.
const SECTION_OVERHEAD: usize = 3;

/// How the displayed data was fetched.
#[derive(Clone, Debug, Default)]
pub struct FetchStatus {
    /// Address of the queried backend, for people.
    pub backend_name: String,
    /// Why the data is outdated; `None` if the last fetch succeeded.
    pub problem: Option<String>,
    /// Whether to draw with colours.
    pub colours: bool,
}

/// Draws a page, or a placeholder until there is one.
pub fn draw_page(frame: &mut Frame<'_>, view: Option<&FleetSummary>, status: &FetchStatus) {
    let area = frame.area();
    let lines = screen_lines(view, status, usize::from(area.width), usize::from(area.height));
    frame.render_widget(Paragraph::new(lines), area);
}

fn screen_lines(
    view: Option<&FleetSummary>,
    status: &FetchStatus,
    width: usize,
    height: usize,
) -> Vec<Line<'static>> {
    let look = Theme { colours: status.colours };
    let mut lines = match view {
        Some(view) => page_lines(view, look, width, height.saturating_sub(1)),
        None => vec![Line::from(format!("asking {}…", status.backend_name))],
    };
    // The last line of the terminal shows the keys, or the problem.
    lines.truncate(height.saturating_sub(1));
    lines.resize(height.saturating_sub(1), Line::default());
    lines.push(match &status.problem {
        Some(trouble) => Line::styled(to_single_line(trouble), look.alert_style()),
        None => Line::styled(format!("q quit   space refresh   {}", status.backend_name), DIM),
    });
    lines
}

fn page_lines(view: &FleetSummary, look: Theme, width: usize, height: usize) -> Vec<Line<'static>> {
    let parts = page_sections(view);
    let refused =
        view.not_permitted.as_ref().map(|refused| format!("not shown: {}", to_single_line(refused)));
    let room = height.saturating_sub(1 + refused.iter().len());
    let rows = allocate_rows(&parts, room);
    let mut lines = vec![Line::styled(page_heading(view), BOLD)];
    for (part, rows) in parts.into_iter().zip(rows) {
        if rows > 0 {
            lines.extend(section_lines(part, rows, look, width));
        }
    }
    lines.extend(refused.map(|refused| Line::styled(refused, DIM)));
    lines
}

fn section_lines(part: Section, shown: usize, look: Theme, width: usize) -> Vec<Line<'static>> {
    let hidden = part.rows.len() - shown;
    let more = if hidden > 0 { format!("   {hidden} more") } else { String::new() };
    let mut lines = vec![
        Line::default(),
        Line::from(vec![Span::styled(part.title, look.title_style()), Span::styled(more, DIM)]),
    ];
    let alarming: Vec<bool> = part.rows.iter().take(shown).map(|row| row.is_alert).collect();
    let rows: Vec<Vec<String>> = part.rows.into_iter().take(shown).map(|row| row.cells).collect();
    let text = format_table(&part.headers, &rows, Some(width));
    let mut reports = text.lines().map(str::to_owned);
    lines.extend(reports.next().map(|headers| Line::styled(headers, DIM)));
    let styled = reports.zip(alarming);
    let plain = Style::default();
    lines.extend(
        styled.map(|(row, alarming)| Line::styled(row, if alarming { look.alert_style() } else { plain })),
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

fn to_single_line(text: &str) -> String {
    text.replace(['\n', '\r', '\t'], " ")
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// Styles of the page, with colours or without.
#[derive(Clone, Copy)]
struct Theme {
    colours: bool,
}

impl Theme {
    fn title_style(self) -> Style {
        if self.colours { BOLD.fg(Color::Cyan) } else { BOLD }
    }

    fn alert_style(self) -> Style {
        if self.colours { Style::new().fg(Color::Red) } else { BOLD }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::page::SectionRow;

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
        let lines = section_lines(section(Panel::Work, 9), 2, Theme { colours: false }, 80);
        let text: Vec<String> = lines.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["", "Title   7 more", "HEADER", "cell", "cell"]);
    }

    #[test]
    fn smallest_terminal_does_not_panic() {
        let status = FetchStatus { backend_name: "db".to_owned(), ..FetchStatus::default() };
        for height in 0..3 {
            assert!(screen_lines(None, &status, 1, height).len() <= height.max(1));
        }
    }
}
