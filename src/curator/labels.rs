//! Labels of nodes: those of machines ([`crate::model::label`]), by orders that must not contradict
//! themselves.
//!
//! An order that says one key twice is a mistake of whoever made it, and which of both was meant nobody
//! knows; nothing of it is carried out.

use std::collections::BTreeSet;

use tonic::Code;

use crate::model::label::{self, Labels, MOST};

/// Why labels stay as they are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A key is said twice.
    #[error("no label was changed: {0:?} would be both set and taken away")]
    SetAndRemoved(String),
    /// A key is taken away twice.
    #[error("no label was changed: {0:?} would be taken away twice")]
    RemovedTwice(String),
    /// A key or a value is none.
    #[error("no label was changed: {0}")]
    Malformed(String),
    /// There would be too many.
    #[error(
        "no label was changed: it would have {count} labels, and a node has {MOST} at the most; take some away first"
    )]
    TooMany {
        /// How many.
        count: usize,
    },
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::TooMany { .. } => Code::OutOfRange,
            _ => Code::InvalidArgument,
        }
    }
}

/// Whether these can be a node's labels; the error is a part of a sentence.
pub fn check(labels: &Labels) -> Result<(), String> {
    change(&Labels::new(), labels, &[]).map(drop).map_err(|refusal| refusal.to_string())
}

/// Labels with these set, and those of these keys taken away.
pub fn change(present: &Labels, set: &Labels, remove: &[String]) -> Result<Labels, Refusal> {
    let mut removed = BTreeSet::new();
    for key in remove {
        label::check_key(key).map_err(Refusal::Malformed)?;
        if set.contains_key(key) {
            return Err(Refusal::SetAndRemoved(key.clone()));
        }
        if !removed.insert(key) {
            return Err(Refusal::RemovedTwice(key.clone()));
        }
    }
    for (key, value) in set {
        label::check_key(key).and_then(|()| label::check_value(value)).map_err(Refusal::Malformed)?;
    }
    let mut labels = present.clone();
    labels.retain(|key, _| !removed.contains(key));
    labels.extend(set.clone());
    if labels.len() > MOST { Err(Refusal::TooMany { count: labels.len() }) } else { Ok(labels) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(said: &[&str]) -> Labels {
        said.iter().map(|text| label::read(text).unwrap()).collect()
    }

    #[test]
    fn labels_are_set_over_and_taken_away() {
        let present = labels(&["owner=kim", "row=7"]);
        let changed =
            change(&present, &labels(&["row=8", "new=1"]), &["owner".into(), "none".into()]).unwrap();
        assert_eq!(label::told(&changed), "new=1,row=8");
    }

    #[test]
    fn order_that_contradicts_itself_changes_nothing() {
        let present = labels(&["row=7"]);
        for (set, remove, code) in [
            (labels(&["row=8"]), vec!["row".to_owned()], Code::InvalidArgument),
            (Labels::new(), vec!["row".to_owned(), "row".to_owned()], Code::InvalidArgument),
            (Labels::new(), vec!["-".to_owned()], Code::InvalidArgument),
            (Labels::from([("a b".to_owned(), String::new())]), vec![], Code::InvalidArgument),
            (Labels::from([("a".to_owned(), "b c".to_owned())]), vec![], Code::InvalidArgument),
            (
                (0..MOST).map(|number| (format!("k{number}"), String::new())).collect(),
                vec![],
                Code::OutOfRange,
            ),
        ] {
            let refusal = change(&present, &set, &remove).unwrap_err();
            assert_eq!(refusal.code(), code, "{refusal}");
            assert!(refusal.to_string().starts_with("no label was changed"), "{refusal}");
        }
    }
}
