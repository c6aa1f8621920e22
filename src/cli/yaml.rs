//! An answer as YAML: the same fields as in JSON, for those who keep it beside other YAML.
//!
//! Whatever could be read as anything but itself is quoted as JSON quotes it, which YAML reads too.

use std::fmt::Write as _;

use serde_json::Value;
use uuid::Uuid;

/// A value as a YAML document.
#[must_use]
pub fn document(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(_) | Value::Array(_) if !is_empty(value) => write(&mut text, value, 0),
        _ => {
            let _ = writeln!(text, "{}", scalar(value));
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

/// Writes what has parts, each on lines of its own.
fn write(text: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(fields) => {
            for (key, part) in fields {
                let _ = write!(text, "{:indent$}{}:", "", plain_or_quoted(key));
                part_of(text, part, indent + 2);
            }
        }
        Value::Array(items) => {
            for item in items {
                let _ = write!(text, "{:indent$}-", "");
                part_of(text, item, indent + 2);
            }
        }
        _ => {}
    }
}

/// Writes one part behind its key or dash.
fn part_of(text: &mut String, part: &Value, indent: usize) {
    if matches!(part, Value::Object(_) | Value::Array(_)) && !is_empty(part) {
        text.push('\n');
        write(text, part, indent);
    } else {
        let _ = writeln!(text, " {}", scalar(part));
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => plain_or_quoted(text),
        // Numbers, truth values, null and what is empty are written alike in both.
        other => other.to_string(),
    }
}

fn plain_or_quoted(text: &str) -> String {
    let word = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '/' | '.'));
    let means_more =
        ["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    // One UUID in three begins with a letter: they are written alike, and with their dashes none is a number.
    let id = text.len() == 36 && Uuid::try_parse(text).is_ok();
    if (word && !means_more) || id { text.to_owned() } else { Value::String(text.to_owned()).to_string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_can_be_read_as_something_else() {
        let value = json!({
            "issues": [{ "id": "brake", "about": "a: b", "of": 3 }, {}, [1, [2]], []],
            "at": null, "on": "no", "said": "- \"x\"\n#", "é": true, "empty": "",
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
\"on\": \"no\"
said: \"- \\\"x\\\"\\n#\"
\"é\": true
";
        assert_eq!(document(&value), expected);
        assert_eq!((document(&json!([])), document(&json!(7))), ("[]\n".to_owned(), "7\n".to_owned()));
    }
}
