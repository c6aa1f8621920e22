//! The table of a watch: a header and rows, then a row for each change, in the same columns.
//!
//! A watch has no end, so the widths of its columns follow from its first rows. A later value that is wider moves the
//! rest of its line.

use unicode_width::UnicodeWidthStr;

use crate::object::list::{Column, ColumnUse, TableStyle};
use crate::output::table::{format_rows, pad_right};

/// Text in the last column for an object that a watch had printed before.
pub(crate) const REMOVED: &str = "gone, or no longer selected";

/// The columns of a watch, as wide as its first rows are.
#[derive(Debug)]
pub(crate) struct WatchTable {
    /// The index of each column in a row, and its width.
    columns: Vec<(usize, usize)>,
}

impl WatchTable {
    /// The table of these first rows, and its text.
    pub(crate) fn new(
        columns: &[Column],
        rows: &[Vec<String>],
        style: TableStyle,
        terminal: Option<usize>,
    ) -> (Self, String) {
        let cells = |index: usize| rows.iter().filter_map(move |row| row.get(index)).map(String::as_str);
        let shown = columns.iter().enumerate().filter(|(index, column)| match column.shown {
            ColumnUse::Always => true,
            ColumnUse::IfAny => cells(*index).any(|cell| cell != "-"),
            ColumnUse::Wide => style.wide,
        });
        let widths = shown.map(|(index, column)| {
            let header = if style.headers { column.header } else { "" };
            (index, cells(index).chain([header]).map(UnicodeWidthStr::width).max().unwrap_or_default())
        });
        let table = Self { columns: widths.collect() };
        let header: Vec<String> = columns.iter().map(|column| column.header.to_owned()).collect();
        let header = style.headers.then_some(&header);
        let text = header.into_iter().chain(rows).map(|row| table.format_row(row, terminal)).collect();
        (table, text)
    }

    /// A row as a line.
    pub(crate) fn format_row(&self, row: &[String], terminal: Option<usize>) -> String {
        let cell = |(index, width): &(usize, usize)| Some(pad_right(row.get(*index)?, *width));
        format_rows(&[self.columns.iter().filter_map(cell).collect()], terminal)
    }

    /// The line for an object of this name that is gone.
    pub(crate) fn format_removed(&self, name: &str, terminal: Option<usize>) -> String {
        let last = self.columns.len().saturating_sub(1);
        let cell = |(place, (_, width)): (usize, &(usize, usize))| {
            let text = match place {
                0 => name,
                _ if place == last => REMOVED,
                _ => "-",
            };
            pad_right(text, *width)
        };
        format_rows(&[self.columns.iter().enumerate().map(cell).collect()], terminal)
    }
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
        assert_eq!(table.format_row(&row(["b", "-", "3", "silent"]), Some(20)), "b         -       s…\n");
        assert_eq!(table.format_removed("a", None), "a         -       gone, or no longer selected\n");
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
        assert_eq!((text.as_str(), table.columns.len()), ("NAME  WHY\n", 2));
    }
}
