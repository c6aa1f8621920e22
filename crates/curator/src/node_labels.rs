//! Changes of node labels.
//!
//! The rules for keys and values are those of machine labels ([`model::label`]). A request that has one key
//! twice is a mistake of its author, and the intended change is unknown. So nothing of such a request is applied.

use std::collections::BTreeSet;

use model::label::{self, Labels, MAX_LABELS};
use tonic::Code;

/// Why labels are not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// A key is both set and removed.
    #[error("no label was changed: {0:?} would be both set and removed")]
    SetAndRemoved(String),
    /// A key is removed twice.
    #[error("no label was changed: {0:?} would be removed twice")]
    RemovedTwice(String),
    /// A key or a value is malformed.
    #[error("no label was changed: {0}")]
    Malformed(String),
    /// The node would have more than [`MAX_LABELS`] labels.
    #[error(
        "no label was changed: it would have {count} labels, and a node has {MAX_LABELS} at the most; take some away first"
    )]
    TooMany {
        /// How many labels the node would have.
        count: usize,
    },
}

impl LabelError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::TooMany { .. } => Code::OutOfRange,
            _ => Code::InvalidArgument,
        }
    }
}

/// Checks that these can be a node's labels; the error is part of a sentence.
pub fn validate_labels(labels: &Labels) -> Result<(), String> {
    apply_label_changes(&Labels::new(), labels, &[]).map(drop).map_err(|refusal| refusal.to_string())
}

/// The labels with those in `set` set and the keys in `remove` removed.
pub fn apply_label_changes(present: &Labels, set: &Labels, remove: &[String]) -> Result<Labels, LabelError> {
    let mut removed = BTreeSet::new();
    for key in remove {
        label::check_label_key(key).map_err(LabelError::Malformed)?;
        if set.contains_key(key) {
            return Err(LabelError::SetAndRemoved(key.clone()));
        }
        if !removed.insert(key) {
            return Err(LabelError::RemovedTwice(key.clone()));
        }
    }
    for (key, value) in set {
        label::check_label_key(key)
            .and_then(|()| label::check_label_value(value))
            .map_err(LabelError::Malformed)?;
    }
    let mut labels = present.clone();
    labels.retain(|key, _| !removed.contains(key));
    labels.extend(set.clone());
    if labels.len() > MAX_LABELS { Err(LabelError::TooMany { count: labels.len() }) } else { Ok(labels) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(messages: &[&str]) -> Labels {
        messages.iter().map(|text| label::parse_label(text).unwrap()).collect()
    }

    #[test]
    fn labels_are_overwritten_and_removed() {
        let present = labels(&["owner=kim", "row=7"]);
        let changed =
            apply_label_changes(&present, &labels(&["row=8", "new=1"]), &["owner".into(), "none".into()])
                .unwrap();
        assert_eq!(label::format_labels(&changed), "new=1,row=8");
    }

    #[test]
    fn contradictory_order_changes_nothing() {
        let present = labels(&["row=7"]);
        for (set, remove, code) in [
            (labels(&["row=8"]), vec!["row".to_owned()], Code::InvalidArgument),
            (Labels::new(), vec!["row".to_owned(), "row".to_owned()], Code::InvalidArgument),
            (Labels::new(), vec!["-".to_owned()], Code::InvalidArgument),
            (Labels::from([("a b".to_owned(), String::new())]), vec![], Code::InvalidArgument),
            (Labels::from([("a".to_owned(), "b c".to_owned())]), vec![], Code::InvalidArgument),
            (
                (0..MAX_LABELS).map(|number| (format!("k{number}"), String::new())).collect(),
                vec![],
                Code::OutOfRange,
            ),
        ] {
            let refusal = apply_label_changes(&present, &set, &remove).unwrap_err();
            assert_eq!(refusal.code(), code, "{refusal}");
            assert!(refusal.to_string().starts_with("no label was changed"), "{refusal}");
        }
    }
}
