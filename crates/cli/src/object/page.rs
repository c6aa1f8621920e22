//! The generic page: every field of an object, for a kind that has no page of its own.

use serde_json::{Map, Value};

use model::byte_size::ByteSize;
use model::humanize::relative_and_absolute_time;
use model::text_layout::format_labelled;
use model::time::Timestamp;

/// Every field of an object as labelled lines. `now` is the time that others are relative to.
#[must_use]
pub fn format_page(object: &Value, now: Timestamp, width: Option<usize>) -> String {
    let mut lines = Vec::new();
    if let Value::Object(fields) = object {
        add_fields("", fields, now, &mut lines);
    }
    format_labelled(0, &lines, width)
}

fn add_fields(prefix: &str, fields: &Map<String, Value>, now: Timestamp, lines: &mut Vec<(String, String)>) {
    for (name, value) in fields {
        let label = format!("{prefix}{}", label_of(name));
        match size_of(name, value) {
            Some(size) => lines.push((label.trim_end_matches(" bytes").to_owned(), size)),
            None => add_value(&label, value, now, lines),
        }
    }
}

/// The value of a field that is a number of bytes, as a size; `None` for any other field.
fn size_of(name: &str, value: &Value) -> Option<String> {
    let is_size = matches!(name, "size" | "bytes") || name.ends_with("Bytes");
    let bytes = value.as_str().filter(|_| is_size)?.parse().ok()?;
    Some(ByteSize(bytes).humanize())
}

fn add_value(label: &str, value: &Value, now: Timestamp, lines: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => add_fields(&format!("{label} "), fields, now, lines),
        Value::Array(values) if values.iter().any(Value::is_object) => {
            for (number, value) in values.iter().enumerate() {
                add_value(&format!("{label} {}", number + 1), value, now, lines);
            }
        }
        Value::Array(values) if !values.is_empty() => {
            let texts: Vec<String> = values.iter().map(|value| text_of(value, now)).collect();
            lines.push((label.to_owned(), texts.join(", ")));
        }
        other => lines.push((label.to_owned(), text_of(other, now))),
    }
}

/// A value without fields as text. A moment is relative first, and then absolute.
fn text_of(value: &Value, now: Timestamp) -> String {
    match value {
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => {
            text.parse::<Timestamp>().map_or_else(|_| text.clone(), |at| relative_and_absolute_time(at, now))
        }
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Null | Value::Object(_) | Value::Array(_) => "-".to_owned(),
        Value::Number(number) => {
            let text = number.to_string();
            text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
        }
    }
}

/// The name of a field in words: `startedAt` is `started at`.
fn label_of(name: &str) -> String {
    let mut label = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            label.push(' ');
            label.push(letter.to_ascii_lowercase());
        } else if letter == '_' {
            label.push(' ');
        } else {
            label.push(letter);
        }
    }
    label
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn page_has_every_field() {
        let object = json!({
            "name": "recoverer",
            "startedAt": "2026-11-20T18:00:00Z",
            "workers": "7",
            "share": 3.0,
            "dryRun": false,
            "error": null,
            "note": "",
            "size": "600000",
            "imageBytes": "3221225472",
            "sizes": "7",
            "servers": ["a:1", "b:1"],
            "roles": [],
            "holder": { "process": "Update", "labels": {} },
            "pauses": [{ "reason": "a switch" }, { "reason": "another" }],
        });
        let now = "2026-11-20T18:00:07Z".parse().unwrap();
        let page = format_page(&object, now, None);
        let lines: Vec<String> =
            page.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        for expected in [
            "name recoverer",
            "workers 7",
            "share 3",
            "dry run no",
            "error -",
            "note -",
            "size 585.9 KiB",
            "image 3 GiB",
            "sizes 7",
            "servers a:1, b:1",
            "roles -",
            "holder process Update",
            "holder labels -",
            "pauses 1 reason a switch",
            "pauses 2 reason another",
        ] {
            assert!(lines.iter().any(|line| line == expected), "{expected}: {page}");
        }
        let started = lines.iter().find(|line| line.starts_with("started at 7s ago"));
        assert!(started.is_some_and(|line| line.contains("2026-11-20T18:00:00+00:00")), "{page}");
        assert_eq!(lines.len(), 16, "{page}");
    }
}
