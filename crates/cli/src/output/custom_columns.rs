//! Columns of `-o custom-columns=HEADER:PATH,…`, as kubectl has them.

use serde_json::Value;

use crate::output::json_path::{ObjectPath, split_at, value_text};
use crate::output::table::{format_rows, format_table};

/// What a cell has if there is no value.
const NO_VALUE: &str = "<none>";

/// Columns that are valid.
#[derive(Clone, Debug, PartialEq)]
pub struct CustomColumns {
    columns: Vec<(String, ObjectPath)>,
}

impl CustomColumns {
    /// Parses `HEADER:PATH,…`. The braces and the first dot of a path may be left out. The error is a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut columns, mut rest) = (Vec::new(), Some(text));
        while let Some(text) = rest {
            let (column, after) =
                split_at(text, ',').map_or((text, None), |(column, after)| (column, Some(after)));
            columns.push(parse_column(column.trim())?);
            rest = after;
        }
        Ok(Self { columns })
    }

    /// A table with a row for each object. It is not cut to the width of a terminal.
    #[must_use]
    pub fn format<'a>(&self, objects: impl IntoIterator<Item = &'a Value>, with_headers: bool) -> String {
        let row = |object: &Value| self.columns.iter().map(|(_, path)| cell(path, object)).collect();
        let rows: Vec<Vec<String>> = objects.into_iter().map(row).collect();
        let headers: Vec<&str> = self.columns.iter().map(|(header, _)| header.as_str()).collect();
        if with_headers { format_table(&headers, &rows, None) } else { format_rows(&headers, &rows, None) }
    }
}

fn parse_column(text: &str) -> Result<(String, ObjectPath), String> {
    let parts = text.split_once(':').map(|(header, path)| (header.trim(), path.trim()));
    let Some((header, path)) = parts.filter(|(header, path)| !header.is_empty() && !path.is_empty()) else {
        return Err(format!("the column {text:?} is not HEADER:PATH, for example NAME:.name.providerId"));
    };
    let path = path.strip_prefix('{').and_then(|path| path.strip_suffix('}')).unwrap_or(path);
    let path = if path.starts_with(['.', '[', '$', '@']) { path.to_owned() } else { format!(".{path}") };
    Ok((header.to_owned(), ObjectPath::parse(&path)?))
}

fn cell(path: &ObjectPath, object: &Value) -> String {
    let values = path.find(object);
    if values.is_empty() {
        return NO_VALUE.to_owned();
    }
    values.into_iter().map(value_text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_have_the_values_of_their_paths() {
        let objects = [
            json!({ "name": { "providerId": "sim-1" }, "phase": "Ready", "roles": ["a", "b"] }),
            json!({ "name": { "providerId": "sim-10" }, "phase": "New" }),
        ];
        let columns = CustomColumns::parse("NAME:.name.providerId,PHASE:phase,ROLES:{.roles[*]}").unwrap();
        let table = "NAME    PHASE  ROLES\nsim-1   Ready  a,b\nsim-10  New    <none>\n";
        assert_eq!(columns.format(&objects, true), table);
        assert_eq!(columns.format(&objects[..1], false), "sim-1  Ready  a,b\n");
        let columns = CustomColumns::parse("BOTH:.roles[0,1]").unwrap();
        assert_eq!(columns.format(&objects[..1], true), "BOTH\na,b\n");
    }

    #[test]
    fn column_without_a_path_is_refused() {
        for text in ["", "NAME", "NAME:", ":.phase", "NAME:.phase,", "NAME:.phase,X"] {
            assert!(CustomColumns::parse(text).unwrap_err().contains("is not HEADER:PATH"), "{text}");
        }
        assert!(CustomColumns::parse("NAME:.a[").unwrap_err().contains("is no path"));
    }
}
