//! A list of objects: their names, their rows in a table, and their JSON.
//!
//! The file of a kind fetches its objects and makes an [`ObjectList`] of them. What follows is the same for all kinds and
//! needs no server: select objects by name, print a table, print JSON. A name is never guessed. One that fits several
//! objects selects none of them, and the message lists them in a form that fits one alone.

use std::collections::HashMap;

use prost::{Message, Name};
use serde_json::Value;

use crate::client::pagination::Page;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::sort::{find_column, sort_objects};
use crate::output::table::{format_rows, format_table, terminal_width};

/// Shortest beginning of an id that names an object, in characters.
pub(crate) const MIN_ID_PREFIX: usize = 8;
/// Most names in a message.
pub(crate) const MAX_CANDIDATES: usize = 5;

/// When a table has a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnUse {
    /// In every table, also if all of its cells are dashes.
    Always,
    /// If a row has something else than a dash there.
    IfAny,
    /// In the wide table alone.
    Wide,
}

/// A column of a table of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The word above it.
    pub header: &'static str,
    /// When the table has it.
    pub shown: ColumnUse,
}

impl Column {
    /// A column that every table has.
    #[must_use]
    pub const fn always(header: &'static str) -> Self {
        Self { header, shown: ColumnUse::Always }
    }

    /// A column that a table has if a row has a value for it.
    #[must_use]
    pub const fn if_any(header: &'static str) -> Self {
        Self { header, shown: ColumnUse::IfAny }
    }

    /// A column of the wide table.
    #[must_use]
    pub const fn wide(header: &'static str) -> Self {
        Self { header, shown: ColumnUse::Wide }
    }
}

/// How a table of objects is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableStyle {
    /// Whether it has the columns of the wide table.
    pub wide: bool,
    /// Whether its first line has the headers.
    pub headers: bool,
}

/// The names of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectNames {
    /// The name to show; the id, if another object of the list has the same name.
    pub name: String,
    /// Other names, each of which several objects may have.
    pub others: Vec<String>,
    /// An id that no other object has; its beginning is a name, too.
    pub id: Option<String>,
}

impl ObjectNames {
    /// An object with one name.
    #[must_use]
    pub fn of_name(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// An object that has an id and no name.
    #[must_use]
    pub fn of_id(id: impl Into<String>) -> Self {
        let id = id.into();
        Self { name: id.clone(), others: Vec::new(), id: Some(id) }
    }

    fn fits(&self, text: &str) -> bool {
        let begins = |id: &String| text.len() >= MIN_ID_PREFIX && id.starts_with(text);
        self.name == text
            || self.others.iter().any(|other| other == text)
            || self.id.as_ref().is_some_and(begins)
    }
}

/// An object of a list.
#[derive(Clone, Debug)]
pub struct ListedObject {
    /// The names that select it.
    pub names: ObjectNames,
    /// Its rows in a table: a loop has one for each pause, others have one.
    pub rows: Vec<Vec<String>>,
    /// The object as the API returned it.
    pub document: ObjectDocument,
}

/// Objects of one kind.
#[derive(Clone, Debug)]
pub struct ObjectList {
    /// The kind that all of the objects have.
    pub kind: ObjectKind,
    /// The last response of the API, without the objects.
    pub response: ObjectDocument,
    /// Columns of the rows.
    pub columns: &'static [Column],
    /// The objects, in the order of the API.
    pub objects: Vec<ListedObject>,
    /// Text for people below the table of a whole list; empty for none.
    pub appendix: String,
    /// Whether the list was cut at the limit.
    pub has_more: bool,
    /// How to continue after a list that was cut; `None` if its kind cannot.
    pub cursor: Option<String>,
    /// Sentences about requested names that the API did not resolve. `None` if the names were not sent to the API.
    pub unresolved: Option<Vec<String>>,
}

impl ObjectList {
    /// A complete list. `response` is the last response, from which the objects are taken.
    #[must_use]
    pub fn of_response<M: Message + Name>(
        kind: ObjectKind,
        response: &M,
        columns: &'static [Column],
        objects: Vec<ListedObject>,
    ) -> Self {
        Self::new(kind, ObjectDocument::of_message(response), columns, objects)
    }

    /// A complete list. `response` is what surrounds the objects in JSON.
    #[must_use]
    pub const fn new(
        kind: ObjectKind,
        response: ObjectDocument,
        columns: &'static [Column],
        objects: Vec<ListedObject>,
    ) -> Self {
        Self {
            kind,
            response,
            columns,
            objects,
            appendix: String::new(),
            has_more: false,
            cursor: None,
            unresolved: None,
        }
    }

    /// The list of these pages.
    #[must_use]
    pub(crate) fn of_pages<M: Message + Name>(
        kind: ObjectKind,
        columns: &'static [Column],
        pages: Page<ListedObject, M>,
    ) -> Self {
        let has_more = pages.has_more();
        Self { has_more, ..Self::of_response(kind, &pages.response, columns, pages.lines) }
    }

    /// Sorts the list by the column that the user names. A column that does not exist is an error.
    pub fn sort_by_column(&mut self, name: &str) -> Result<(), CliError> {
        let column = find_column(self.columns, name).map_err(CliError::Invalid)?;
        sort_objects(&mut self.objects, column);
        Ok(())
    }

    /// Cuts the list after `limit` objects.
    pub fn truncate(&mut self, limit: Option<u32>) {
        let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        if self.objects.len() > limit {
            self.objects.truncate(limit);
            self.has_more = true;
        }
    }

    /// Retains the objects that `names` select, each once and in the order of the names. Returns a sentence for each
    /// name that fits no object, or several.
    pub fn select(&mut self, names: &[String]) -> Vec<String> {
        self.make_names_unique();
        if let Some(unresolved) = self.unresolved.take() {
            return unresolved;
        }
        if names.is_empty() {
            return Vec::new();
        }
        let (mut selected, mut problems): (Vec<usize>, Vec<String>) = (Vec::new(), Vec::new());
        for name in names {
            match self.find(name) {
                Ok(index) if selected.contains(&index) => {}
                Ok(index) => selected.push(index),
                Err(problem) => problems.push(problem),
            }
        }
        self.objects = selected.into_iter().filter_map(|index| self.objects.get(index).cloned()).collect();
        problems
    }

    /// The index of the object that `text` names. The error is a sentence.
    fn find(&self, text: &str) -> Result<usize, String> {
        let of = |fits: &dyn Fn(&ObjectNames) -> bool| -> Vec<usize> {
            let objects = self.objects.iter().enumerate();
            objects.filter(|(_, object)| fits(&object.names)).map(|(index, _)| index).collect()
        };
        // The whole name counts more than a name that several objects may have.
        let exact = of(&|names| names.name == text);
        let found = if exact.len() == 1 { exact } else { of(&|names| names.fits(text)) };
        let row = self.kind.row();
        match found.as_slice() {
            [one] => Ok(*one),
            [] => Err(format!("there is no {} {text:?}; run: shepherdctl get {}", row.noun, row.plural)),
            several => {
                let candidates = several.iter().take(MAX_CANDIDATES);
                let mut names: Vec<&str> =
                    candidates.map(|index| self.objects[*index].names.name.as_str()).collect();
                if several.len() > names.len() {
                    names.push("…");
                }
                Err(format!("{text:?} fits more than one {}; give one of: {}", row.noun, names.join(", ")))
            }
        }
    }

    /// Names objects after their ids where several have one name. That stays another name of each of them.
    fn make_names_unique(&mut self) {
        let mut counts: HashMap<String, usize> = HashMap::new();
        for object in self.objects.iter().filter(|object| object.names.id.is_some()) {
            *counts.entry(object.names.name.clone()).or_default() += 1;
        }
        for object in &mut self.objects {
            let ObjectNames { name, others, id } = &mut object.names;
            let is_shared = counts.get(name.as_str()).is_some_and(|count| *count > 1);
            if let Some(id) = id.as_ref().filter(|_| is_shared) {
                others.push(std::mem::replace(name, id.clone()));
            }
        }
    }

    /// The response as JSON: that of the API, with the objects of all pages.
    pub fn to_json(&self) -> Result<Value, CliError> {
        let mut response = self.response.to_json()?;
        let objects = self.objects.iter().map(|object| object.document.to_json());
        // The policy is no list, and has no key.
        let key = self.kind.row().key;
        if let Value::Object(fields) = &mut response
            && !key.is_empty()
        {
            fields.insert(key.to_owned(), Value::Array(objects.collect::<Result<_, _>>()?));
        }
        Ok(response)
    }

    /// The objects as a table, as wide as the terminal allows.
    #[must_use]
    pub fn to_table(&self, style: TableStyle) -> String {
        let rows: Vec<&Vec<String>> = self.objects.iter().flat_map(|object| &object.rows).collect();
        let used = |index: usize| rows.iter().any(|row| row.get(index).is_some_and(|cell| cell != "-"));
        let columns = self.columns.iter().enumerate();
        let shown: Vec<(usize, &str)> = columns
            .filter(|(index, column)| match column.shown {
                ColumnUse::Always => true,
                ColumnUse::IfAny => used(*index),
                ColumnUse::Wide => style.wide,
            })
            .map(|(index, column)| (index, column.header))
            .collect();
        let headers: Vec<&str> = shown.iter().map(|(_, header)| *header).collect();
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| shown.iter().filter_map(|(index, _)| row.get(*index).cloned()).collect())
            .collect();
        if style.headers {
            format_table(&headers, &rows, terminal_width())
        } else {
            format_rows(&headers, &rows, terminal_width())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::exit_code::ExitCode;

    const COLUMNS: [Column; 4] =
        [Column::always("NAME"), Column::if_any("LABELS"), Column::always("WHY"), Column::wide("ID")];

    fn object(name: &str, other: &str, id: &str, labels: &str) -> ListedObject {
        ListedObject {
            names: ObjectNames {
                name: name.to_owned(),
                others: vec![other.to_owned()],
                id: Some(id.to_owned()),
            },
            rows: vec![[name, labels, "w", id].map(str::to_owned).to_vec()],
            document: ObjectDocument::Local(json!({ "name": name })),
        }
    }

    fn list() -> ObjectList {
        let objects = vec![
            object("a", "shared", "11111111-aa", "-"),
            object("b", "shared", "22222222-bb", "row=7"),
            object("twin", "t1", "33333333-cc", "-"),
            object("twin", "t2", "33333333-dd", "-"),
        ];
        let response = ObjectDocument::Local(json!({ "sessions": [], "readAt": "now" }));
        ObjectList::new(ObjectKind::Session, response, &COLUMNS, objects)
    }

    fn selected(names: &[&str]) -> (Vec<String>, Vec<String>) {
        let mut list = list();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let problems = list.select(&names);
        (
            list.objects.into_iter().map(|object| object.document.to_json().unwrap().to_string()).collect(),
            problems,
        )
    }

    #[test]
    fn names_select_objects_once_and_in_their_order() {
        let (found, problems) = selected(&["b", "a", "b", "11111111", "t2"]);
        let expected = [r#"{"name":"b"}"#, r#"{"name":"a"}"#, r#"{"name":"twin"}"#];
        assert_eq!(
            (found.iter().map(String::as_str).collect::<Vec<_>>(), problems),
            (expected.to_vec(), vec![])
        );
        assert_eq!(selected(&[]).0.len(), 4);
        let mut whole = list();
        assert!(whole.select(&[]).is_empty());
        let names: Vec<&str> = whole.objects.iter().map(|object| object.names.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "33333333-cc", "33333333-dd"]);
    }

    #[test]
    fn name_of_none_or_several_selects_nothing_and_is_explained() {
        for (name, expected) in [
            ("c", "there is no session \"c\"; run: shepherdctl get sessions"),
            ("1111111", "there is no session \"1111111\"; run: shepherdctl get sessions"),
            ("shared", "\"shared\" fits more than one session; give one of: a, b"),
            ("twin", "\"twin\" fits more than one session; give one of: 33333333-cc, 33333333-dd"),
            ("33333333", "\"33333333\" fits more than one session; give one of: 33333333-cc, 33333333-dd"),
        ] {
            let (found, problems) = selected(&[name, "a"]);
            assert_eq!((found.len(), problems), (1, vec![expected.to_owned()]), "{name}");
        }
    }

    #[test]
    fn names_that_the_api_resolved_are_not_looked_up_again() {
        let mut list = ObjectList { unresolved: Some(vec!["no x".to_owned()]), ..list() };
        assert_eq!(list.select(&["x".to_owned()]), ["no x"]);
        assert_eq!(list.objects.len(), 4);
    }

    #[test]
    fn list_is_sorted_by_any_of_its_columns() {
        for (column, expected) in [
            ("labels", vec!["b", "twin", "twin", "a"]),
            ("id", vec!["a", "b", "twin", "twin"]),
            ("NAME", vec!["a", "b", "twin", "twin"]),
        ] {
            let mut list = list();
            list.objects.reverse();
            list.objects.swap(2, 3);
            list.sort_by_column(column).unwrap();
            let names: Vec<&str> = list.objects.iter().map(|object| object.names.name.as_str()).collect();
            assert_eq!(names, expected, "{column}");
        }
        let error = list().sort_by_column("owner").unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no column \"owner\" to sort by; give one of: name, labels, why, id"
        );
        assert_eq!(error.exit_code(), ExitCode::WrongCommand);
    }

    #[test]
    fn list_is_cut_at_its_limit() {
        for (limit, length, more) in [(None, 4, false), (Some(4), 4, false), (Some(3), 3, true)] {
            let mut list = list();
            list.truncate(limit);
            assert_eq!((list.objects.len(), list.has_more), (length, more), "{limit:?}");
        }
    }

    #[test]
    fn json_is_the_response_with_the_objects() {
        let mut list = list();
        assert!(list.select(&["a".to_owned()]).is_empty());
        assert_eq!(list.to_json().unwrap(), json!({ "sessions": [{ "name": "a" }], "readAt": "now" }));
    }

    #[test]
    fn column_without_a_value_is_left_out() {
        let mut list = list();
        let style = TableStyle { wide: false, headers: true };
        let table = list.to_table(style);
        assert!(table.starts_with("NAME  LABELS  WHY\na     -       w\nb     row=7   w\n"), "{table}");
        list.objects.truncate(1);
        assert_eq!(list.to_table(style), "NAME  WHY\na     w\n");
        assert_eq!(
            list.to_table(TableStyle { wide: true, ..style }),
            "NAME  WHY  ID\na     w    11111111-aa\n"
        );
        assert_eq!(list.to_table(TableStyle { headers: false, ..style }), "a  w\n");
    }
}
