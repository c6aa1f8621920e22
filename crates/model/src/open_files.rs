//! When a process has opened nearly as many files as it may. *Pure.*
//!
//! A process that reaches its limit accepts no connection any more, and cannot open the database or a file either.

/// The share of the limit from which on it is reported, in per cent.
const HIGH_PERCENT: u64 = 80;
/// The share at or below which it is no longer reported.
const RELEASE_PERCENT: u64 = 70;

/// Whether a process with `used` of `limit` files is to be reported; `None` as a limit means none. `before` is whether it
/// was: near the threshold, it is not reported again and again.
#[must_use]
pub const fn is_nearly_used_up(used: u64, limit: Option<u64>, before: bool) -> bool {
    let Some(limit) = limit else { return false };
    let percent = if before { RELEASE_PERCENT } else { HIGH_PERCENT };
    used.saturating_mul(100) > limit.saturating_mul(percent)
}

/// The report as a sentence. It has no measured number, so that it stays the same.
#[must_use]
pub fn describe_shortage(limit: Option<u64>) -> String {
    let limit = limit.map_or_else(String::new, |limit| format!(" {limit}"));
    format!("it has opened more than {HIGH_PERCENT} % of the{limit} files that it may open")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortage_begins_above_80_per_cent_and_ends_at_70() {
        for (used, limit, before, expected) in [
            (800, Some(1000), false, false),
            (801, Some(1000), false, true),
            (701, Some(1000), true, true),
            (700, Some(1000), true, false),
            (0, Some(0), false, false),
            (u64::MAX, Some(u64::MAX), true, false),
            (1_000_000, None, true, false),
        ] {
            assert_eq!(is_nearly_used_up(used, limit, before), expected, "{used} {limit:?} {before}");
        }
        assert_eq!(
            describe_shortage(Some(1024)),
            "it has opened more than 80 % of the 1024 files that it may open"
        );
    }
}
