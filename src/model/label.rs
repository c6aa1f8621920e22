//! Labels: what people say of a machine, for themselves and for filters. No loop decides anything by them.
//!
//! A key and a value are short words of a few characters, so that they need no quoting anywhere: in a shell, in
//! a list, in a filter `key=value`.

use std::collections::BTreeMap;

/// Labels of a machine, by key.
pub type Labels = BTreeMap<String, String>;

/// Most labels of a machine.
pub const MOST: usize = 32;
/// Longest key and longest value, in characters.
const LONGEST: usize = 63;

fn is_inner(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/')
}

/// Whether this can be a key; if not, a sentence.
pub fn check_key(key: &str) -> Result<(), String> {
    let fits = key.len() <= LONGEST
        && key.chars().all(is_inner)
        && key.starts_with(|c: char| c.is_ascii_alphanumeric());
    fits.then_some(()).ok_or_else(|| {
        format!(
            "{key:?} is no key of a label: it has 1 to {LONGEST} letters, digits, dots, dashes, slashes and \
             underscores, and begins with a letter or a digit"
        )
    })
}

/// Whether this can be a value; if not, a sentence.
pub fn check_value(value: &str) -> Result<(), String> {
    (value.len() <= LONGEST && value.chars().all(is_inner)).then_some(()).ok_or_else(|| {
        format!(
            "{value:?} is no value of a label: it has at most {LONGEST} letters, digits, dots, dashes, slashes and \
             underscores"
        )
    })
}

/// Reads `key=value`.
pub fn read(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("{text:?} is no label; write it as KEY=VALUE, for example row=7"))?;
    check_key(key)?;
    check_value(value)?;
    Ok((key.to_owned(), value.to_owned()))
}

/// What a filter asks of labels: a key with this value, or with any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    key: String,
    value: Option<String>,
}

impl Wanted {
    /// Reads `key=value`, or `key` alone for any value.
    pub fn read(text: &str) -> Result<Self, String> {
        if text.contains('=') {
            let (key, value) = read(text)?;
            return Ok(Self { key, value: Some(value) });
        }
        check_key(text)?;
        Ok(Self { key: text.to_owned(), value: None })
    }

    /// Whether these labels are meant.
    #[must_use]
    pub fn holds(&self, labels: &Labels) -> bool {
        labels.get(&self.key).is_some_and(|found| self.value.as_ref().is_none_or(|value| value == found))
    }
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.value {
            None => f.write_str(&self.key),
            Some(value) => write!(f, "{}={value}", self.key),
        }
    }
}

/// Labels with these set, and those of these keys taken away; a sentence when that cannot be.
pub fn relabelled(present: &Labels, set: &Labels, remove: &[String]) -> Result<Labels, String> {
    let mut labels = present.clone();
    for key in remove {
        labels.remove(key);
    }
    for (key, value) in set {
        check_key(key)?;
        check_value(value)?;
        labels.insert(key.clone(), value.clone());
    }
    if labels.len() > MOST {
        return Err(format!(
            "it would have {} labels, and a machine has {MOST} at the most; take some away first",
            labels.len()
        ));
    }
    Ok(labels)
}

/// Labels as people read them: `owner=kim,row=7`.
#[must_use]
pub fn told(labels: &Labels) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(said: &[&str]) -> Labels {
        said.iter().map(|text| read(text).unwrap()).collect()
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
        ] {
            let read = read(text).ok();
            let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
            assert_eq!(read, expected, "{text:?}");
        }
        assert!(check_key(&"k".repeat(63)).is_ok() && check_key(&"k".repeat(64)).is_err());
        assert!(check_value(&"v".repeat(63)).is_ok() && check_value(&"v".repeat(64)).is_err());
    }

    #[test]
    fn filter_asks_for_a_value_or_for_any() {
        let present = labels(&["row=7", "empty="]);
        for (asked, holds) in
            [("row=7", true), ("row", true), ("row=8", false), ("empty=", true), ("owner", false)]
        {
            assert_eq!(Wanted::read(asked).unwrap().holds(&present), holds, "{asked}");
        }
        assert!(Wanted::read("").is_err() && Wanted::read("a b").is_err());
    }

    #[test]
    fn labels_are_set_over_and_taken_away_up_to_a_bound() {
        let present = labels(&["owner=kim", "row=7"]);
        let changed = relabelled(&present, &labels(&["row=8", "new=1"]), &["owner".into(), "none".into()]);
        assert_eq!(told(&changed.unwrap()), "new=1,row=8");
        // What is both taken away and set is set.
        assert_eq!(relabelled(&present, &present, &["row".into()]).unwrap(), present);
        let many: Labels = (0..MOST).map(|number| (format!("k{number}"), String::new())).collect();
        assert!(relabelled(&Labels::new(), &many, &[]).is_ok());
        let said = relabelled(&many, &labels(&["one=more"]), &[]).unwrap_err();
        assert!(said.contains("33 labels"), "{said}");
        assert!(relabelled(&many, &labels(&["one=more"]), &["k0".into()]).is_ok(), "one goes, one comes");
    }
}
