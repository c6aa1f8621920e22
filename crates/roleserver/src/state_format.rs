//! The format of a state file: whether a newer release has written what this one would misread (*pure*).
//!
//! Usually a release that is rolled back reads what a later one has written: names stay, and new fields have a default. A
//! release that changes what a file means writes the number of the new format into it, as the field `format`. A file
//! without that field has the format [`FORMAT`]. A file with a higher one is damaged to this release: truth is an error, and
//! a hint counts as absent. Records of children have no format: one that is passed over could be of a program that runs.

use serde::Deserialize;

/// The format that this release reads and writes.
pub const FORMAT: u64 = 1;

/// The part of a state file that every release understands.
#[derive(Deserialize)]
struct FormatOnly {
    format: u64,
}

/// Refuses the content of a file that a newer release has written. The error is the reason, as a part of a sentence.
///
/// Content without a number, or that is no JSON object, passes: what is wrong with it is found when it is parsed.
pub fn check_format(content: &[u8]) -> Result<(), String> {
    match serde_json::from_slice(content) {
        Ok(FormatOnly { format }) if format > FORMAT => Err(format!(
            "it has format {format} of a newer release, and this release reads format {FORMAT}; install the newer one again"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_higher_number_is_of_a_newer_release() {
        for (content, is_newer) in [
            ("{}", false),
            (r#"{"format": 0}"#, false),
            (r#"{"format": 1}"#, false),
            (r#"{"format": 2}"#, true),
            (r#"{"process": {"pid": 7}, "format": 9}"#, true),
            (r#"{"format": "later"}"#, false),
            (r#"{"file": {"format": 2}}"#, false),
            (r#"["format"]"#, false),
            (r#"{"format": 2"#, false),
            ("", false),
        ] {
            let checked = check_format(content.as_bytes());
            assert_eq!(checked.is_err(), is_newer, "{content}: {checked:?}");
        }
        assert!(check_format(b"\xff").is_ok());
        let error = check_format(br#"{"format": 9}"#).unwrap_err();
        assert!(error.contains("format 9") && error.contains("install the newer one again"), "{error}");
    }
}
