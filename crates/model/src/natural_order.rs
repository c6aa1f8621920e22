//! Natural order of names: numbers count by value, so `sim-2` comes before `sim-10`.
//!
//! [`natural_key`][] makes a text of a name. The order of these texts, byte by byte, is the natural order of the names.
//! The database lists machines in this order by the same key: `migrations/0044_machine_order.up.sql` has the expression,
//! and a test compares both.

use std::cmp::Ordering;

/// Digits that each number in a key has at least. Numbers of more digits are compared digit by digit.
const NUMBER_WIDTH: usize = 20;

/// The text by whose bytes a name is sorted: the name, in which each number has 20 digits at least. Names that differ in
/// zeros before a number alone have the same key.
#[must_use]
pub fn natural_key(name: &str) -> String {
    let (mut key, mut rest) = (String::with_capacity(name.len() + NUMBER_WIDTH), name);
    while let Some(begin) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let (text, tail) = rest.split_at(begin);
        let end = tail.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        let number = number.trim_start_matches('0');
        key.push_str(text);
        key.extend(std::iter::repeat_n('0', NUMBER_WIDTH.saturating_sub(number.len())));
        key.push_str(number);
        rest = tail;
    }
    key.push_str(rest);
    key
}

/// The natural order of two names. Names with the same key are in the order of their bytes.
#[must_use]
pub fn compare_names(one: &str, other: &str) -> Ordering {
    natural_key(one).cmp(&natural_key(other)).then_with(|| one.cmp(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_by_value() {
        for (before, after) in [
            ("sim-2", "sim-10"),
            ("sim-0002", "sim-10"),
            ("rack2-9", "rack10-1"),
            ("rack2-9", "rack2-10"),
            ("9", "10"),
            ("", "0"),
            ("sim", "sim-1"),
            ("sim-1", "sim-1a"),
            ("sim-1a", "sim-2"),
            ("a", "b"),
            ("B", "a"),
            ("1", "a"),
            ("-1", "1"),
            ("10.0.9.1", "10.0.10.1"),
            ("é2", "é10"),
            ("sim-7", "sim-18446744073709551615"),
            // The same key: byte by byte.
            ("sim-07", "sim-7"),
            ("0", "00"),
        ] {
            assert_eq!(compare_names(before, after), Ordering::Less, "{before:?} {after:?}");
            assert_eq!(compare_names(after, before), Ordering::Greater, "{after:?} {before:?}");
            assert_eq!(compare_names(after, after), Ordering::Equal);
        }
    }

    #[test]
    fn key_has_each_number_with_its_zeros() {
        let zeros = |count: usize| "0".repeat(count);
        for (name, expected) in [
            ("", String::new()),
            ("sim", "sim".to_owned()),
            ("0", zeros(20)),
            ("sim-7", format!("sim-{}7", zeros(19))),
            ("007-a12", format!("{}7-a{}12", zeros(19), zeros(18))),
            // Digits of other scripts are no digits.
            ("٣1", format!("٣{}1", zeros(19))),
            ("000111111111111111111111", "1".repeat(21)),
        ] {
            assert_eq!(natural_key(name), expected, "{name}");
        }
    }
}
