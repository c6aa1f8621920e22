//! The table of a watch: a header and rows, then a row for each change, in the same columns.
//!
//! A watch has no end, so its columns and their widths follow from its first rows. A later value that is wider moves the
//! rest of its line. On a terminal, the last column of a line has the rest of its width.

use crate::object::list::{Column, ColumnUse, TableStyle};
use crate::output::table::TableLayout;

/// Text in the last column for an object that a watch had printed before.
pub(crate) const REMOVED: &str = "gone, or no longer selected";

/// The columns of a watch, as wide as its first rows are.
#[derive(Debug)]
pub(crate) struct WatchTable {
    /// The index in a row of each column that the table may have.
    shown: Vec<usize>,
    /// The columns of these that fit the terminal.
    layout: TableLayout,
}

impl WatchTable {
    /// The table of these first rows, and its text.
    pub(crate) fn new(
        columns: &[Column],
        rows: &[Vec<String>],
        style: TableStyle,
        terminal: Option<usize>,
    ) -> (Self, String) {
        let has_value = |index: usize| rows.iter().filter_map(|row| row.get(index)).any(|cell| cell != "-");
        let shown = columns.iter().enumerate().filter(|(index, column)| match column.shown {
            ColumnUse::Always => true,
            ColumnUse::IfAny => has_value(*index),
            ColumnUse::Wide => style.wide,
        });
        let (shown, headers): (Vec<usize>, Vec<&str>) =
            shown.map(|(index, column)| (index, column.header)).unzip();
        let picked: Vec<Vec<String>> = rows.iter().map(|row| pick_cells(&shown, row)).collect();
        let layout = TableLayout::new(&headers, style.headers, &picked, terminal);
        let mut text = String::new();
        if style.headers {
            let headers: Vec<String> = headers.into_iter().map(str::to_owned).collect();
            text.push_str(&layout.format_head(&headers));
        }
        for row in &picked {
            text.push_str(&layout.format_later_row(row, terminal));
        }
        (Self { shown, layout }, text)
    }

    /// A row as a line.
    pub(crate) fn format_row(&self, row: &[String], terminal: Option<usize>) -> String {
        self.layout.format_later_row(&pick_cells(&self.shown, row), terminal)
    }

    /// The line for an object of this name that is gone.
    pub(crate) fn format_removed(&self, name: &str, terminal: Option<usize>) -> String {
        let last = self.layout.last_column();
        let cell = |place: usize| match place {
            0 => name,
            _ if Some(place) == last => REMOVED,
            _ => "-",
        };
        let row: Vec<String> = (0..self.shown.len()).map(|place| cell(place).to_owned()).collect();
        self.layout.format_later_row(&row, terminal)
    }
}

/// The cells of a row in these columns.
fn pick_cells(columns: &[usize], row: &[String]) -> Vec<String> {
    columns.iter().map(|index| row.get(*index).cloned().unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] =
        [Column::always("NAME"), Column::if_any("LABELS"), Column::wide("ID"), Column::always("WHY")];
    const STYLE: TableStyle = TableStyle { wide: false, headers: true };

    fn row(cells: [&str; 4]) -> Vec<String> {
        cells.map(str::to_owned).to_vec()
    }

    #[test]
    fn later_rows_are_below_the_first_ones() {
        let rows = [row(["sim-0007", "-", "1", "held"]), row(["a", "row=7", "2", ""])];
        let (table, text) = WatchTable::new(&COLUMNS, &rows, STYLE, None);
        assert_eq!(text, "NAME      LABELS  WHY\nsim-0007  -       held\na         row=7\n");
        assert_eq!(table.format_row(&row(["b", "-", "3", "silent"]), None), "b         -       silent\n");
        let silent = row(["b", "-", "3", "silent for 9m"]);
        assert_eq!(table.format_row(&silent, None), "b         -       silent for 9m\n");
        assert_eq!(table.format_row(&silent, Some(27)), "b         -       silent…\n");
        assert_eq!(table.format_removed("a", None), "a         -       gone, or no longer selected\n");
    }

    #[test]
    fn later_rows_are_as_wide_as_the_terminal() {
        let rows = [row(["sim-0007", "row=7", "1", "it waits for a person"])];
        let (table, text) = WatchTable::new(&COLUMNS, &rows, STYLE, Some(30));
        assert_eq!(text, "NAME      WHY  …\nsim-0007  it waits for a…\n", "labels gave way");
        let later = row(["sim-0007-of-rack-a", "row=7", "1", "it waits"]);
        assert_eq!(table.format_row(&later, Some(30)), "sim-0007-of-rack-a  it waits\n");
        assert_eq!(table.format_removed("sim-0007", Some(30)), "sim-0007  gone, or no longer…\n");
    }

    #[test]
    fn columns_follow_from_the_first_rows_and_the_style() {
        let rows = [row(["a", "-", "1", "w"])];
        for (wide, headers, expected) in [
            (false, true, "NAME  WHY\na     w\n"),
            (false, false, "a  w\n"),
            (true, true, "NAME  ID  WHY\na     1   w\n"),
        ] {
            let (table, text) = WatchTable::new(&COLUMNS, &rows, TableStyle { wide, headers }, None);
            assert_eq!(text, expected);
            assert!(!table.format_row(&row(["a", "row=7", "1", "w"]), None).contains("row=7"), "{text}");
        }
        let (table, text) = WatchTable::new(&COLUMNS, &[], STYLE, None);
        assert_eq!((text.as_str(), table.shown.len()), ("NAME  WHY\n", 2));
    }
}
