//! Folded routine of a response: what `timeline` and `plan` print in place of many lines.

use crate::client::decode::{missing_field, require_timestamp};
use crate::error::CliError;
use model::routine::RoutineFold;
use model::time::Timestamp;
use proto::fleet::v1;

/// Decodes folded routine with its earliest time, which is that of the line.
pub fn decode_routine_fold(fold: &v1::RoutineFold, first_at: Timestamp) -> Result<RoutineFold, CliError> {
    let number = |number: i64| u64::try_from(number).map_err(|_| missing_field("the number of folded lines"));
    Ok(RoutineFold {
        first_at,
        last_at: require_timestamp(fold.last_at, "the time of the last folded line")?,
        work_items: number(fold.work_items)?,
        lines: number(fold.lines)?,
    })
}

/// The paragraph below a table: how many lines are folded in it, and how to see them. Empty if none are.
#[must_use]
pub fn folded_note(folds: impl IntoIterator<Item = RoutineFold>) -> String {
    let lines: u64 = folds.into_iter().map(|fold| fold.lines).sum();
    if lines == 0 {
        String::new()
    } else {
        format!("\n{lines} lines of routine work are folded; --all prints them\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(lines: i64, last_at: Option<prost_types::Timestamp>) -> v1::RoutineFold {
        v1::RoutineFold { work_items: 1, lines, machines: 1, last_at }
    }

    #[test]
    fn note_has_the_number_of_folded_lines() {
        let last = Some(prost_types::Timestamp { seconds: 60, nanos: 0 });
        let fold = |lines| decode_routine_fold(&message(lines, last), Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(folded_note([]), "");
        assert_eq!(
            folded_note([fold(2), fold(46)]),
            "\n48 lines of routine work are folded; --all prints them\n"
        );
    }

    #[test]
    fn malformed_fold_is_refused() {
        let last = Some(prost_types::Timestamp { seconds: 60, nanos: 0 });
        for message in [message(-1, last), message(2, None)] {
            assert!(decode_routine_fold(&message, Timestamp::UNIX_EPOCH).is_err(), "{message:?}");
        }
    }
}
