//! The order of `get KIND --sort-by COLUMN`: by the cells of a column, as they are shown.
//!
//! Sizes, times, durations and numbers count by value: `900 MiB` is less than `1 GiB`, `5m ago` is before `3s ago`, and
//! `30m` is less than `2h05m`. Other cells are in natural order, after those. Rows without a value come last. Objects with
//! equal cells stay in the order of the API.

use std::cmp::Ordering;

use crate::object::list::{Column, ListedObject};
use model::byte_size::ByteSize;
use model::natural_order::compare_names;
use model::time::Timestamp;

/// The value of a cell, by which rows are sorted. The variants are in the order of the rows.
#[derive(Clone, Debug, PartialEq)]
enum CellValue<'a> {
    /// A number of bytes, of seconds, or without a unit.
    Number(f64),
    /// A text that is no number.
    Text(&'a str),
    /// A cell without a value.
    Absent,
}

impl<'a> CellValue<'a> {
    fn parse(cell: &'a str) -> Self {
        let cell = cell.trim();
        if matches!(cell, "" | "-") {
            return Self::Absent;
        }
        parse_number(cell).map_or(Self::Text(cell), Self::Number)
    }

    fn compare(&self, other: &Self) -> Ordering {
        let rank = |value: &Self| match value {
            Self::Number(_) => 0,
            Self::Text(_) => 1,
            Self::Absent => 2,
        };
        match (self, other) {
            (Self::Number(one), Self::Number(other)) => one.total_cmp(other),
            (Self::Text(one), Self::Text(other)) => compare_names(one, other),
            _ => rank(self).cmp(&rank(other)),
        }
    }
}

/// The column that `name` names, in any case, with dashes or underscores in place of spaces. The error is a sentence that
/// names all columns.
pub(super) fn find_column(columns: &[Column], name: &str) -> Result<usize, String> {
    let word = column_word(name);
    let found = columns.iter().position(|column| column_word(column.header) == word);
    found.ok_or_else(|| {
        let words: Vec<String> = columns.iter().map(|column| column_word(column.header)).collect();
        format!("there is no column {name:?} to sort by; give one of: {}", words.join(", "))
    })
}

/// A header as an argument: `SESSION ENDS` is `session-ends`.
fn column_word(header: &str) -> String {
    header.trim().to_lowercase().replace([' ', '_'], "-")
}

/// Sorts objects by the cells of their first rows in this column.
pub(super) fn sort_objects(objects: &mut [ListedObject], column: usize) {
    objects.sort_by(|one, other| cell_value(one, column).compare(&cell_value(other, column)));
}

/// Compares two cells of a column. With `is_descending`, greater values come first. Those without a value are last in both
/// directions.
#[must_use]
pub(crate) fn compare_cells(one: &str, other: &str, is_descending: bool) -> Ordering {
    let (one, other) = (CellValue::parse(one), CellValue::parse(other));
    let order = one.compare(&other);
    let is_reversed = is_descending && one != CellValue::Absent && other != CellValue::Absent;
    if is_reversed { order.reverse() } else { order }
}

fn cell_value(object: &ListedObject, column: usize) -> CellValue<'_> {
    let cell = object.rows.first().and_then(|row| row.get(column));
    cell.map_or(CellValue::Absent, |cell| CellValue::parse(cell))
}

/// The number that a whole cell shows: a moment in seconds, a duration, a size in bytes, or a plain number.
fn parse_number(cell: &str) -> Option<f64> {
    // The absolute time after a relative one adds nothing.
    let cell = cell.split_once(" (").map_or(cell, |(relative, _)| relative);
    if matches!(cell, "just now" | "at once" | "now") {
        return Some(0.0);
    }
    if let Some(ago) = cell.strip_suffix(" ago") {
        return parse_span(ago).map(|seconds| -seconds);
    }
    if let Some(span) = parse_span(cell.strip_prefix("in ").unwrap_or(cell)) {
        return Some(span);
    }
    let plain = cell.strip_suffix('%').unwrap_or(cell).trim_end();
    let is_plain = plain.starts_with(|letter: char| letter.is_ascii_digit() || letter == '-');
    plain
        .parse()
        .ok()
        .filter(|_| is_plain)
        .or_else(|| ByteSize::parse_humanized(cell))
        .or_else(|| parse_moment(cell))
}

/// Seconds of a duration as lists show it: `12s`, `2h05m`, `4d3h`.
fn parse_span(text: &str) -> Option<f64> {
    let (mut seconds, mut rest) = (0.0, text);
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit()).filter(|digits| *digits > 0)?;
        let (number, tail) = rest.split_at(digits);
        let end = tail.find(|letter: char| letter.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let size = match unit {
            "d" => 86_400.0,
            "h" => 3_600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 0.001,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * size;
        rest = tail;
    }
    Some(seconds).filter(|_| !text.is_empty())
}

/// Seconds since 1970 of an absolute time.
fn parse_moment(cell: &str) -> Option<f64> {
    let at: Timestamp = cell.parse().ok()?;
    #[expect(clippy::cast_precision_loss, reason = "285 million years in seconds are 2^53")]
    let seconds = at.timestamp() as f64;
    Some(seconds + f64::from(at.timestamp_subsec_millis()) / 1000.0)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::object::document::ObjectDocument;
    use crate::object::list::ObjectNames;

    const COLUMNS: [Column; 3] =
        [Column::always("NAME"), Column::if_any("SESSION ENDS"), Column::wide("UUID")];

    fn sorted(cells: &[&str]) -> Vec<String> {
        let mut objects: Vec<ListedObject> = cells
            .iter()
            .map(|cell| ListedObject {
                names: ObjectNames::of_name("x"),
                rows: vec![vec!["x".to_owned(), (*cell).to_owned()]],
                document: ObjectDocument::Local(Value::Null),
            })
            .collect();
        sort_objects(&mut objects, 1);
        objects.into_iter().map(|object| object.rows[0][1].clone()).collect()
    }

    #[test]
    fn cells_are_sorted_by_what_they_mean() {
        for cells in [
            &["2", "10", "10.5", "100"][..],
            &["-5", "0", "7"],
            &["9%", "12 %"],
            &["sim-2", "sim-10", "sim-10a"],
            &["900 KiB", "900 MiB", "1 GiB", "1.5 GiB", "2 TB", "2 TiB"],
            &["0s", "59s", "9m59s", "30m", "2h05m", "1d0h", "4d3h"],
            &["4d3h ago", "5m ago", "3s ago", "just now", "in 5m", "in 2h00m"],
            &["in 5m (2026-11-20T19:00:00+01:00)", "in 2h00m (2026-11-20T20:55:00+01:00)"],
            &["2026-11-20T19:00:00+01:00", "2026-11-20T18:30:00+00:00"],
            // Numbers, then texts, then rows without a value.
            &["7", "never", "-"],
            &["everything, ends in 5m", "power", "-"],
        ] {
            let backwards: Vec<&str> = cells.iter().rev().copied().collect();
            assert_eq!(sorted(&backwards), cells);
        }
    }

    #[test]
    fn objects_with_equal_cells_stay_in_their_order() {
        assert_eq!(sorted(&["07", "7", "-", "7.0", ""]), ["07", "7", "7.0", "-", ""]);
    }

    #[test]
    fn what_only_looks_like_a_number_is_a_text() {
        for cell in ["inf", "NaN", "5 apples", "1.2.3.4", "5x", "m", "in", "h5", "10.0.0.1:22", "+5"] {
            assert_eq!(CellValue::parse(cell), CellValue::Text(cell), "{cell}");
        }
    }

    #[test]
    fn cells_without_a_value_are_last_in_both_directions() {
        for (one, other, ascending, descending) in [
            ("900 MiB", "1 GiB", Ordering::Less, Ordering::Greater),
            ("-", "2h05m", Ordering::Greater, Ordering::Greater),
            ("30m", "", Ordering::Less, Ordering::Less),
            ("-", "", Ordering::Equal, Ordering::Equal),
        ] {
            assert_eq!(compare_cells(one, other, false), ascending, "{one} {other}");
            assert_eq!(compare_cells(one, other, true), descending, "{one} {other}");
        }
    }

    #[test]
    fn column_is_found_by_its_header_or_all_are_named() {
        for (name, expected) in [
            ("name", Ok(0)),
            ("NAME", Ok(0)),
            ("session-ends", Ok(1)),
            ("Session_Ends", Ok(1)),
            ("session ends", Ok(1)),
            ("uuid", Ok(2)),
        ] {
            assert_eq!(find_column(&COLUMNS, name), expected, "{name}");
        }
        for name in ["", "nam", ".metadata.name"] {
            let sentence =
                format!("there is no column {name:?} to sort by; give one of: name, session-ends, uuid");
            assert_eq!(find_column(&COLUMNS, name), Err(sentence));
        }
    }
}
