//! YAML output: the same fields as in JSON, for operators who store it with other YAML.
//!
//! Text that YAML could read as anything but itself is quoted as in JSON, which YAML reads too.

use std::fmt::Write as _;

use serde_json::Value;
use uuid::Uuid;

/// Formats a value as a YAML document.
#[must_use]
pub fn format_document(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(_) | Value::Array(_) if !is_empty(value) => write_value(&mut text, value, 0),
        _ => {
            let _ = writeln!(text, "{}", format_scalar(value));
        }
    }
    text
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

/// Writes an object or a list, each part on lines of its own.
fn write_value(text: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(fields) => {
            for (key, part) in fields {
                let _ = write!(text, "{:indent$}{}:", "", plain_or_quoted(key));
                write_part(text, part, indent + 2);
            }
        }
        Value::Array(items) => {
            for item in items {
                let _ = write!(text, "{:indent$}-", "");
                write_part(text, item, indent + 2);
            }
        }
        _ => {}
    }
}

/// Writes one part after its key or dash.
fn write_part(text: &mut String, part: &Value, indent: usize) {
    if matches!(part, Value::Object(_) | Value::Array(_)) && !is_empty(part) {
        text.push('\n');
        write_value(text, part, indent);
    } else {
        let _ = writeln!(text, " {}", format_scalar(part));
    }
}

fn format_scalar(value: &Value) -> String {
    match value {
        Value::String(text) => plain_or_quoted(text),
        // Numbers, booleans, null and empty values have the same form in JSON and YAML.
        other => other.to_string(),
    }
}

fn plain_or_quoted(text: &str) -> String {
    let word = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '/' | '.'));
    let means_more =
        ["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    // Of all UUIDs, a third begin with a letter. All are written without quotes, because their dashes prevent a
    // number.
    let id = text.len() == 36 && Uuid::try_parse(text).is_ok();
    if (word && !means_more) || id { text.to_owned() } else { Value::String(text.to_owned()).to_string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ambiguous_scalars_are_quoted() {
        let value = json!({
            "issues": [{ "id": "brake", "about": "a: b", "of": 3 }, {}, [1, [2]], []],
            "at": null, "on": "no", "note": "- \"x\"\n#", "é": true, "empty": "",
            "ids": ["0199f3a2-0000-7000-8000-000000000001", "00000000000000000000000000000001", "12e5"],
        });
        let expected = "\
at: null
empty: \"\"
ids:
  - 0199f3a2-0000-7000-8000-000000000001
  - \"00000000000000000000000000000001\"
  - \"12e5\"
issues:
  -
    about: \"a: b\"
    id: brake
    of: 3
  - {}
  -
    - 1
    -
      - 2
  - []
note: \"- \\\"x\\\"\\n#\"
\"on\": \"no\"
\"é\": true
";
        assert_eq!(format_document(&value), expected);
        assert_eq!(
            (format_document(&json!([])), format_document(&json!(7))),
            ("[]\n".to_owned(), "7\n".to_owned())
        );
    }
}
