//! Labels of machines, and label filters.
//!
//! Operators set labels for themselves and for filters. Clusters and roll-outs select machines by them. A key and a
//! value are short words of safe characters, so that they need no quoting anywhere: in a shell, in a list, in a filter
//! `key=value`.

use std::collections::BTreeMap;

/// Labels of a machine, by key.
pub type Labels = BTreeMap<String, String>;

/// Most labels of a machine.
pub const MAX_LABELS: usize = 32;
/// Longest key and longest value, in characters.
const MAX_CHARS: usize = 63;

fn is_label_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/')
}

/// Checks that this can be a key. The error is a sentence.
pub fn check_label_key(key: &str) -> Result<(), String> {
    let fits = key.len() <= MAX_CHARS
        && key.chars().all(is_label_char)
        && key.starts_with(|c: char| c.is_ascii_alphanumeric());
    fits.then_some(()).ok_or_else(|| {
        format!(
            "{key:?} is not a valid key of a label: it has 1 to {MAX_CHARS} letters, digits, dots, dashes, \
             slashes and underscores, and begins with a letter or a digit"
        )
    })
}

/// Checks that this can be a value. The error is a sentence.
pub fn check_label_value(value: &str) -> Result<(), String> {
    (value.len() <= MAX_CHARS && value.chars().all(is_label_char)).then_some(()).ok_or_else(|| {
        format!(
            "{value:?} is not a valid value of a label: it has at most {MAX_CHARS} letters, digits, dots, \
             dashes, slashes and underscores"
        )
    })
}

/// Parses `key=value`. The error is a sentence.
pub fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is not a label; write it as KEY=VALUE, for example row=7"))?;
    check_label_key(key)?;
    check_label_value(value)?;
    Ok((key.to_owned(), value.to_owned()))
}

/// What a filter requires of labels: a key with this value, or with any value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelFilter {
    key: String,
    value: Option<String>,
}

impl LabelFilter {
    /// Parses `key=value`, or `key` alone for any value.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.contains('=') {
            let (key, value) = parse_label(text)?;
            return Ok(Self { key, value: Some(value) });
        }
        check_label_key(text)?;
        Ok(Self { key: text.to_owned(), value: None })
    }

    /// The key that it requires.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether these labels match the filter.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        labels.get(&self.key).is_some_and(|found| self.value.as_ref().is_none_or(|value| value == found))
    }
}

impl std::fmt::Display for LabelFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.value {
            None => f.write_str(&self.key),
            Some(value) => write!(f, "{}={value}", self.key),
        }
    }
}

/// Labels with `set` added and the keys of `remove` removed. The error is a sentence.
pub fn apply_label_changes(present: &Labels, set: &Labels, remove: &[String]) -> Result<Labels, String> {
    let mut labels = present.clone();
    for key in remove {
        labels.remove(key);
    }
    for (key, value) in set {
        check_label_key(key)?;
        check_label_value(value)?;
        labels.insert(key.clone(), value.clone());
    }
    if labels.len() > MAX_LABELS {
        return Err(format!(
            "it would have {} labels, and a machine has {MAX_LABELS} at the most; take some away first",
            labels.len()
        ));
    }
    Ok(labels)
}

/// Labels as people read them: `owner=kim,row=7`.
#[must_use]
pub fn format_labels(labels: &Labels) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(messages: &[&str]) -> Labels {
        messages.iter().map(|text| parse_label(text).unwrap()).collect()
    }

    #[test]
    fn label_is_a_key_and_a_value_of_plain_characters() {
        for (text, expected) in [
            ("row=7", Some(("row", "7"))),
            ("example.com/owner=kim_b", Some(("example.com/owner", "kim_b"))),
            ("empty=", Some(("empty", ""))),
            ("row", None),
            ("=7", None),
            ("-row=7", None),
            ("row=7=8", None),
            ("row=a b", None),
            ("row=\u{1b}[2J", None),
            ("zeile=ü", None),
            ("ro\u{200b}w=7", None),
            ("row=7\u{202e}", None),
        ] {
            let read = parse_label(text).ok();
            let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
            assert_eq!(read, expected, "{text:?}");
        }
        assert!(check_label_key(&"k".repeat(63)).is_ok() && check_label_key(&"k".repeat(64)).is_err());
        assert!(check_label_value(&"v".repeat(63)).is_ok() && check_label_value(&"v".repeat(64)).is_err());
    }

    #[test]
    fn filter_asks_for_a_value_or_for_any() {
        let present = labels(&["row=7", "empty="]);
        for (query, holds) in
            [("row=7", true), ("row", true), ("row=8", false), ("empty=", true), ("owner", false)]
        {
            assert_eq!(LabelFilter::parse(query).unwrap().matches(&present), holds, "{query}");
        }
        assert!(LabelFilter::parse("").is_err() && LabelFilter::parse("a b").is_err());
    }

    #[test]
    fn labels_are_set_and_removed_up_to_a_limit() {
        let present = labels(&["owner=kim", "row=7"]);
        let changed =
            apply_label_changes(&present, &labels(&["row=8", "new=1"]), &["owner".into(), "none".into()]);
        assert_eq!(format_labels(&changed.unwrap()), "new=1,row=8");
        // What is both taken away and set is set.
        assert_eq!(apply_label_changes(&present, &present, &["row".into()]).unwrap(), present);
        let many: Labels = (0..MAX_LABELS).map(|number| (format!("k{number}"), String::new())).collect();
        assert!(apply_label_changes(&Labels::new(), &many, &[]).is_ok());
        let text = apply_label_changes(&many, &labels(&["one=more"]), &[]).unwrap_err();
        assert!(text.contains("33 labels"), "{text}");
        assert!(
            apply_label_changes(&many, &labels(&["one=more"]), &["k0".into()]).is_ok(),
            "one goes, one comes"
        );
    }
}
