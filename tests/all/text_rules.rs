//! The rules for text of others, each in one place: what people write in files and selectors, what firmware reports, and
//! what the other side of a connection answers.

use shepherd::model::excerpt::Excerpt;
use shepherd::model::firmware_text::{is_placeholder, meaningful_mac};
use shepherd::model::plain_text::is_hidden;
use shepherd::model::sanitize::sanitize_text;
use shepherd::model::selector::Selector;
use shepherd::model::selector::error::SelectorError;
use shepherd::model::text_file::decode_text;

use crate::harness::source;

#[test]
fn mark_in_front_of_a_text_is_passed_over() {
    assert_eq!(decode_text(b"\xef\xbb\xbf[]\r\n"), Ok("[]\r\n"), "an editor wrote a byte order mark");
}

#[test]
fn digits_that_count_are_no_serial_number() {
    for text in ["1234567890", "0123456789ABCDEF", "SYS-1234567890"] {
        assert!(is_placeholder(text), "{text} counts, and identifies no machine");
    }
    assert!(!is_placeholder("S123456"));
    assert_eq!(meaningful_mac("00:11:22:33:44:55"), None);
}

#[test]
fn comma_in_a_name_ends_no_term() {
    for text in ["manufacturer=Acme, Inc.", r#"location="hall 3, row 4",label.rack=7"#] {
        let parsed: Result<Selector, SelectorError> = text.parse();
        assert!(parsed.is_ok(), "a comma split the value of {text}: {parsed:?}");
    }
}

#[test]
fn words_of_others_have_no_hidden_characters() {
    let text = "disk\u{1b}[2J\u{202e}0\u{200b} is\nfull";
    let quoted = Excerpt::from_start(text).map(|words| words.to_string());
    assert_eq!(quoted.as_deref(), Some("disk [2J 0 is full"), "an excerpt drives the terminal");
    assert!(!sanitize_text(text).contains(is_hidden));
}

/// A second rule would let pass what the first one removes.
#[test]
fn hidden_characters_have_one_rule() {
    /// Files that reject control characters in what people write, beside [`is_hidden`] for what is shown.
    const PERMITTED: [&str; 7] = [
        "crates/model/src/plain_text.rs",
        "crates/model/src/selector/mod.rs",
        "crates/model/src/kubernetes/archive.rs",
        "crates/curator-client/src/cluster.rs",
        "crates/server/src/api/services/fleet.rs",
        "src/providers/simulated/responses.rs",
        "src/providers/static_provider/device_list.rs",
    ];
    let root = source::root();
    let mut found = Vec::new();
    let mut folders = vec![root.join("src"), root.join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() && !["tests", "target", "testkit"].iter().any(|name| path.ends_with(name)) {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let name = path.strip_prefix(root).unwrap().display().to_string();
                let is_rule = ["is_control()", "char::is_control"].iter().any(|call| text.contains(call));
                if is_rule && !PERMITTED.contains(&name.as_str()) {
                    found.push(name);
                }
            }
        }
    }
    assert_eq!(found, [""; 0], "use model::plain_text::is_hidden or replace_hidden");
}
