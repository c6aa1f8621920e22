//! YAML output: the same fields as in JSON, for operators who store it with other YAML.
//!
//! The library `serde-saphyr` writes it, as `kubectl` does: lists at the column of their key, and quotes around text
//! that a reader of YAML 1.1 or 1.2 could take for anything but itself. Each value is on one line, however long it is,
//! so that output can be searched line by line.

use serde_json::Value;

use crate::error::CliError;

/// Formats a value as a YAML document.
pub fn format_document(value: &Value) -> Result<String, CliError> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    Ok(serde_saphyr::to_string_with_options(value, options)?)
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
- about: \"a: b\"
  id: brake
  of: 3
- {}
- - 1
  - - 2
- []
note: \"- \\\"x\\\"\\n#\"
\"on\": \"no\"
é: true
";
        assert_eq!(format_document(&value).unwrap(), expected);
        assert_eq!(
            (format_document(&json!([])).unwrap(), format_document(&json!(7)).unwrap()),
            ("[]\n".to_owned(), "7\n".to_owned())
        );
    }

    #[test]
    fn each_value_is_on_one_line() {
        let long = ["word"; 40].join(" ");
        let value = json!({ "at": "2026-11-20T18:00:00Z", "long": long, "text": "one\ntwo\n" });
        let expected = format!("at: \"2026-11-20T18:00:00Z\"\nlong: {long}\ntext: \"one\\ntwo\\n\"\n");
        assert_eq!(format_document(&value).unwrap(), expected);
    }
}
