//! What `top` reads, and what it has read.
//!
//! The state of the page names what it needs ([`ReadRequest`][]). The last content of each kind stays, so that a page that
//! the operator returns to is there at once. A content counts only for the request that it answers: rows of another
//! selector are never shown as those of this one.

use std::mem::discriminant;

use crate::object::list::{Column, ColumnUse, ObjectList};
use crate::object::sort::compare_cells;
use crate::target_flags::TargetFlags;
use crate::top::fleet_summary::FleetSummary;
use model::why::Explanation;

/// What to read, besides the summary of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadRequest {
    /// Nothing besides the summary.
    Overview,
    /// A page of machines.
    Machines {
        /// Selector of the machines; empty for all of them.
        selector: String,
        /// Token of the page; empty for the first one.
        page_token: String,
    },
    /// All clusters, by name.
    Clusters,
    /// Why a machine is as it is.
    Why {
        /// The machine, by a name that commands accept.
        machine: String,
    },
}

/// An object of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopRow {
    /// Its name, as commands accept it.
    pub name: String,
    /// A text for each column.
    pub cells: Vec<String>,
}

impl TopRow {
    /// The text in a column; empty if the row has none there.
    #[must_use]
    pub fn cell(&self, column: usize) -> &str {
        self.cells.get(column).map_or("", String::as_str)
    }
}

/// A list of objects, or a page of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopList {
    /// The columns of its rows.
    pub columns: &'static [Column],
    /// The objects, in the order of the API.
    pub rows: Vec<TopRow>,
    /// Token of the next page; empty on the last one.
    pub next_token: String,
}

/// The order of a list on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SortOrder {
    /// Index of the column that decides it.
    pub column: usize,
    /// Whether greater values come first.
    pub is_descending: bool,
}

impl TopList {
    /// The list that was read.
    #[must_use]
    pub fn of_objects(list: ObjectList) -> Self {
        let rows = list.objects.into_iter().map(|object| TopRow {
            name: object.names.name,
            cells: object.rows.into_iter().next().unwrap_or_default(),
        });
        Self { columns: list.columns, rows: rows.collect(), next_token: list.cursor.unwrap_or_default() }
    }

    /// Indices of the columns that are shown: as in a table of `get`.
    #[must_use]
    pub fn shown_columns(&self) -> Vec<usize> {
        let has_value = |index: usize| {
            self.rows.iter().any(|row| row.cells.get(index).is_some_and(|cell| cell.as_str() != "-"))
        };
        let columns = self.columns.iter().enumerate();
        let shown = columns.filter(|(index, column)| match column.shown {
            ColumnUse::Always => true,
            ColumnUse::IfAny => has_value(*index),
            ColumnUse::Wide => false,
        });
        shown.map(|(index, _)| index).collect()
    }

    /// The rows in this order; without one, in that of the API.
    #[must_use]
    pub fn ordered_rows(&self, sort: Option<SortOrder>) -> Vec<&TopRow> {
        let mut rows: Vec<&TopRow> = self.rows.iter().collect();
        if let Some(SortOrder { column, is_descending }) = sort {
            rows.sort_by(|one, other| compare_cells(one.cell(column), other.cell(column), is_descending));
        }
        rows
    }
}

/// What was read for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Nothing besides the summary.
    Overview,
    /// Rows of machines, or of clusters.
    List(TopList),
    /// Why a machine is as it is.
    Why(Box<Explanation>),
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct TopAnswer {
    /// The request that it answers.
    pub request: ReadRequest,
    /// The summary of the fleet.
    pub summary: FleetSummary,
    /// What was read, or why it was refused, as a sentence.
    pub content: Result<Content, String>,
}

impl TopAnswer {
    /// Adds these flags to the commands in sentences of the API. An explanation gets them where it is drawn.
    pub(super) fn qualify_commands(&mut self, target_flags: &TargetFlags) {
        self.summary.qualify_commands(target_flags);
        if let Err(reason) = &mut self.content {
            *reason = target_flags.qualify(reason);
        }
    }
}

/// Everything that was read last.
#[derive(Clone, Debug, Default)]
pub struct TopData {
    /// The flags that name the fleet, for commands on the page.
    pub target_flags: TargetFlags,
    summary: Option<FleetSummary>,
    contents: Vec<(ReadRequest, Result<Content, String>)>,
}

impl TopData {
    /// Nothing was read yet.
    #[must_use]
    pub fn new(target_flags: TargetFlags) -> Self {
        Self { target_flags, ..Self::default() }
    }

    /// Records an answer in place of the last one of its kind.
    pub fn record(&mut self, answer: TopAnswer) {
        self.summary = Some(answer.summary);
        self.contents.retain(|(request, _)| discriminant(request) != discriminant(&answer.request));
        self.contents.push((answer.request, answer.content));
    }

    /// The summary of the fleet; `None` until it was read.
    #[must_use]
    pub const fn summary(&self) -> Option<&FleetSummary> {
        self.summary.as_ref()
    }

    /// What was read for exactly this request; `None` until then.
    #[must_use]
    pub fn content(&self, request: &ReadRequest) -> Option<&Result<Content, String>> {
        self.contents.iter().find(|(known, _)| known == request).map(|(_, content)| content)
    }

    /// The list that was read for exactly this request.
    #[must_use]
    pub fn list(&self, request: &ReadRequest) -> Option<&TopList> {
        match self.content(request)? {
            Ok(Content::List(list)) => Some(list),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::time::Timestamp;

    const COLUMNS: [Column; 4] =
        [Column::always("NAME"), Column::always("SINCE"), Column::if_any("HOLD"), Column::wide("UUID")];

    fn list(rows: &[[&str; 4]]) -> TopList {
        let row = |cells: &[&str; 4]| TopRow {
            name: format!("sim/{}", cells[0]),
            cells: cells.map(str::to_owned).to_vec(),
        };
        TopList { columns: &COLUMNS, rows: rows.iter().map(row).collect(), next_token: String::new() }
    }

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

    #[test]
    fn rows_are_sorted_by_the_values_that_they_show() {
        let list = list(&[["a", "30m", "-", "1"], ["b", "2h05m", "-", "2"], ["c", "-", "-", "3"]]);
        for (sort, expected) in [
            (None, ["a", "b", "c"]),
            (Some(SortOrder { column: 1, is_descending: false }), ["a", "b", "c"]),
            (Some(SortOrder { column: 1, is_descending: true }), ["b", "a", "c"]),
            (Some(SortOrder { column: 3, is_descending: true }), ["c", "b", "a"]),
            (Some(SortOrder { column: 9, is_descending: true }), ["a", "b", "c"]),
        ] {
            let names: Vec<&str> = list.ordered_rows(sort).iter().map(|row| row.cells[0].as_str()).collect();
            assert_eq!(names, expected, "{sort:?}");
        }
    }

    #[test]
    fn columns_are_those_of_get() {
        assert_eq!(list(&[["a", "30m", "-", "1"]]).shown_columns(), [0, 1]);
        assert_eq!(list(&[["a", "30m", "power", "1"]]).shown_columns(), [0, 1, 2]);
    }

    #[test]
    fn content_counts_only_for_the_request_that_it_answers() {
        let machines = |selector: &str| ReadRequest::Machines {
            selector: selector.to_owned(),
            page_token: String::new(),
        };
        let mut data = TopData::default();
        let answer = |request, content| TopAnswer { request, summary: summary(), content };
        data.record(answer(machines(""), Ok(Content::List(list(&[["a", "30m", "-", "1"]])))));
        data.record(answer(ReadRequest::Clusters, Err("is about the fleet as a whole".to_owned())));
        assert_eq!(data.list(&machines("")).map(|list| list.rows.len()), Some(1), "it stays");
        assert!(data.content(&machines("phase=New")).is_none());
        assert!(data.content(&ReadRequest::Clusters).is_some_and(Result::is_err));
        data.record(answer(machines("phase=New"), Ok(Content::List(list(&[])))));
        assert!(data.content(&machines("")).is_none(), "its kind was read again");
        assert_eq!(data.list(&machines("phase=New")).map(|list| list.rows.len()), Some(0));
    }
}
