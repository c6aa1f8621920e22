//! A page on a terminal of any size.
//!
//! Each part gets rows by its importance until there are none left: first a few for each, then as many as it has. What
//! has no room is left out, and the title of a part says how many rows are not shown.

use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::cli::output::table;
use crate::cli::top::page::{Panel, Part, heading, parts};
use crate::cli::top::reader::View;

/// Who gets room first.
const IMPORTANCE: [Panel; 4] = [Panel::Attention, Panel::Phases, Panel::Loops, Panel::Work];
/// Rows that each gets before any gets more.
const FEW: usize = 3;
/// Lines of a part besides its rows: an empty one, its title and its headers.
const FRAME: usize = 3;

/// How what is drawn came about.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Who was asked.
    pub asked: String,
    /// Why the page is older than it should be.
    pub trouble: Option<String>,
    /// Whether colours are wanted.
    pub colours: bool,
}

/// Draws a page, or that there is none yet.
pub fn draw(frame: &mut Frame<'_>, view: Option<&View>, status: &Status) {
    let area = frame.area();
    let lines = lines(view, status, usize::from(area.width), usize::from(area.height));
    frame.render_widget(Paragraph::new(lines), area);
}

fn lines(view: Option<&View>, status: &Status, width: usize, height: usize) -> Vec<Line<'static>> {
    let look = Look { colours: status.colours };
    let mut lines = match view {
        Some(view) => page(view, look, width, height.saturating_sub(1)),
        None => vec![Line::from(format!("asking {}…", status.asked))],
    };
    // The last line of the terminal is that of the keys, or of what is wrong.
    lines.truncate(height.saturating_sub(1));
    lines.resize(height.saturating_sub(1), Line::default());
    lines.push(match &status.trouble {
        Some(trouble) => Line::styled(one_line(trouble), look.alarming()),
        None => Line::styled(format!("q ends   space asks at once   {}", status.asked), QUIET),
    });
    lines
}

fn page(view: &View, look: Look, width: usize, height: usize) -> Vec<Line<'static>> {
    let parts = parts(view);
    let refused = view.refused.as_ref().map(|refused| format!("not shown: {}", one_line(refused)));
    let room = height.saturating_sub(1 + refused.iter().len());
    let rows = deal(&parts, room);
    let mut lines = vec![Line::styled(heading(view), BOLD)];
    for (part, rows) in parts.into_iter().zip(rows) {
        if rows > 0 {
            lines.extend(part_lines(part, rows, look, width));
        }
    }
    lines.extend(refused.map(|refused| Line::styled(refused, QUIET)));
    lines
}

fn part_lines(part: Part, shown: usize, look: Look, width: usize) -> Vec<Line<'static>> {
    let hidden = part.rows.len() - shown;
    let more = if hidden > 0 { format!("   {hidden} more") } else { String::new() };
    let mut lines = vec![
        Line::default(),
        Line::from(vec![Span::styled(part.title, look.title()), Span::styled(more, QUIET)]),
    ];
    let alarming: Vec<bool> = part.rows.iter().take(shown).map(|row| row.alarming).collect();
    let rows: Vec<Vec<String>> = part.rows.into_iter().take(shown).map(|row| row.cells).collect();
    let text = table(&part.headers, &rows, Some(width));
    let mut told = text.lines().map(str::to_owned);
    lines.extend(told.next().map(|headers| Line::styled(headers, QUIET)));
    let styled = told.zip(alarming);
    let plain = Style::default();
    lines.extend(
        styled.map(|(row, alarming)| Line::styled(row, if alarming { look.alarming() } else { plain })),
    );
    lines
}

/// How many rows of each part are shown in so many lines.
fn deal(parts: &[Part], room: usize) -> Vec<usize> {
    let mut rows = vec![0; parts.len()];
    let mut left = room;
    for most in [FEW, usize::MAX] {
        for panel in IMPORTANCE {
            for (part, rows) in parts.iter().zip(&mut rows).filter(|(part, _)| part.panel == panel) {
                let frame = if *rows == 0 { FRAME } else { 0 };
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

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r', '\t'], " ")
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const QUIET: Style = Style::new().add_modifier(Modifier::DIM);

/// How things look, with colours or without.
#[derive(Clone, Copy)]
struct Look {
    colours: bool,
}

impl Look {
    fn title(self) -> Style {
        if self.colours { BOLD.fg(Color::Cyan) } else { BOLD }
    }

    fn alarming(self) -> Style {
        if self.colours { Style::new().fg(Color::Red) } else { BOLD }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::top::page::Row;

    fn part(panel: Panel, rows: usize) -> Part {
        let row = Row { cells: vec!["cell".to_owned()], alarming: false };
        Part { panel, title: "Title".to_owned(), headers: vec!["HEADER"], rows: vec![row; rows] }
    }

    #[test]
    fn rows_are_dealt_by_importance_and_never_more_than_there_is_room_for() {
        let parts =
            [part(Panel::Attention, 1), part(Panel::Phases, 5), part(Panel::Loops, 6), part(Panel::Work, 90)];
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
            let rows = deal(&parts, room);
            assert_eq!(rows, expected, "in {room} lines");
            let used: usize = rows.iter().filter(|rows| **rows > 0).map(|rows| rows + FRAME).sum();
            assert!(used <= room, "{used} of {room}");
        }
    }

    #[test]
    fn part_says_what_it_has_no_room_for() {
        let lines = part_lines(part(Panel::Work, 9), 2, Look { colours: false }, 80);
        let text: Vec<String> = lines.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["", "Title   7 more", "HEADER", "cell", "cell"]);
    }

    #[test]
    fn smallest_terminal_is_none_too_small() {
        let status = Status { asked: "db".to_owned(), ..Status::default() };
        for height in 0..3 {
            assert!(lines(None, &status, 1, height).len() <= height.max(1));
        }
    }
}
