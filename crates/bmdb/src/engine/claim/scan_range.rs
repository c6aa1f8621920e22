//! Where a claim's scan begins: watermarks, slack, and scans without watermarks.
//!
//! A claimed row leaves the index of what is claimable, but its dead entry stays in front of every later scan until
//! vacuum may remove it, and another client's long snapshot can forbid that for hours. So a claimer remembers per class
//! how far it has come and begins its scans there. Two things keep that from hiding work. Rows are armed at the time of
//! their transaction or later, and the scan begins a slack before the mark that is longer than any transaction may
//! last. Rows that come back with an old due time (a cancelled or lost work item) are found by the scans without marks,
//! every five seconds and before [`Claimed::Empty`](super::Claimed::Empty) is returned.
//!
//! A scan without marks passes every dead entry there is. Where that takes long, a claim that finds nothing does not
//! continue with such a scan each time, but pauses them for nine times as long, and never for more than the five
//! seconds; until then it reports only that it has found nothing so far
//! ([`Claimed::FullScanDeferred`](super::Claimed::FullScanDeferred)).
//!
//! A slack costs the entries of what was claimed within it. A claimer that has claimed hundreds of machines within the
//! long one would pass all of them with every claim; it takes a short slack, which covers nearly every transaction, and
//! the long one once a second.

use std::collections::VecDeque;
use std::time::Duration;

use model::time::{Timestamp, before};

/// Longer than nearly every transaction lasts.
const SHORT_SLACK: Duration = Duration::from_millis(500);
/// Longer than any transaction may last: `statement_timeout` plus
/// `idle_in_transaction_session_timeout`, twice over.
const LONG_SLACK: Duration = Duration::from_secs(30);
/// Longest time between two scans with the long slack.
const LONG_SLACK_SCAN_EVERY: Duration = Duration::from_secs(1);
/// Claims within the long slack whose dead entries every scan may pass.
pub(super) const RECENT_CLAIMS: usize = 256;
/// Longest time between two scans that ignore watermarks.
const FULL_SCAN_EVERY: Duration = Duration::from_secs(5);
/// A full scan that took no longer may always be repeated.
const CHEAP_FULL_SCAN: Duration = Duration::from_millis(10);
/// Expensive full scans may take one part in so many of the time; more only if one takes longer than a ninth of
/// [`FULL_SCAN_EVERY`].
const FULL_SCAN_SHARE: u32 = 10;

/// How long after a full scan that took this long a claim that finds nothing does not continue with another one.
pub(super) fn full_scan_pause(took: Duration) -> Duration {
    if took <= CHEAP_FULL_SCAN { Duration::ZERO } else { (took * (FULL_SCAN_SHARE - 1)).min(FULL_SCAN_EVERY) }
}

/// Where a scan begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanRange {
    /// A short slack before the watermark.
    ShortSlack,
    /// So far before the watermark that no transaction can still commit an earlier row.
    LongSlack,
    /// At the beginning, without watermarks.
    Full,
}

impl ScanRange {
    /// The range that is due, by how long ago the last scans were. `dense` is true when a scan with the long slack
    /// would pass many dead entries.
    pub(super) fn choose(since_far: Option<Duration>, since_full: Option<Duration>, dense: bool) -> Self {
        if since_full.is_none_or(|since| since >= FULL_SCAN_EVERY) {
            Self::Full
        } else if !dense || since_far.is_none_or(|since| since >= LONG_SLACK_SCAN_EVERY) {
            Self::LongSlack
        } else {
            Self::ShortSlack
        }
    }

    /// The due time at which a scan begins in a class whose watermark is `mark`.
    pub(super) fn floor(self, mark: Option<Timestamp>) -> Timestamp {
        let slack = match self {
            Self::ShortSlack => SHORT_SLACK,
            Self::LongSlack => LONG_SLACK,
            Self::Full => return Timestamp::UNIX_EPOCH,
        };
        mark.map_or(Timestamp::UNIX_EPOCH, |mark| before(mark, slack))
    }
}

/// Whether the long slack contains as many claims as every scan may pass.
pub(super) fn is_dense(recent: &VecDeque<Timestamp>) -> bool {
    let (Some(first), Some(last)) = (recent.front(), recent.back()) else { return false };
    recent.len() == RECENT_CLAIMS && *first > before(*last, LONG_SLACK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::time::after;

    #[test]
    fn scan_range_depends_on_time_since_the_last_scans() {
        let millis = |millis| Some(Duration::from_millis(millis));
        for (since_far, since_full, dense, scan) in [
            (None, None, false, ScanRange::Full),
            (millis(0), millis(0), false, ScanRange::LongSlack),
            (millis(0), millis(0), true, ScanRange::ShortSlack),
            (millis(999), millis(4_999), true, ScanRange::ShortSlack),
            (millis(1_000), millis(1_000), true, ScanRange::LongSlack),
            (None, millis(4_999), true, ScanRange::LongSlack),
            (millis(0), millis(5_000), true, ScanRange::Full),
            (millis(0), millis(5_000), false, ScanRange::Full),
            (millis(0), None, true, ScanRange::Full),
        ] {
            assert_eq!(
                ScanRange::choose(since_far, since_full, dense),
                scan,
                "{since_far:?} {since_full:?} {dense}"
            );
        }
    }

    #[test]
    fn slow_full_scans_take_at_most_a_tenth_of_the_time() {
        for (took, rest) in
            [(0, 0), (10, 0), (11, 99), (100, 900), (555, 4_995), (556, 5_000), (60_000, 5_000)]
        {
            assert_eq!(
                full_scan_pause(Duration::from_millis(took)),
                Duration::from_millis(rest),
                "{took} ms"
            );
        }
    }

    #[test]
    fn claims_are_dense_when_hundreds_lie_within_the_long_slack() {
        let at = |millis: u64| after(Timestamp::UNIX_EPOCH, Duration::from_millis(millis));
        let claims = |count: usize, every: u64| (1..).map(|n| at(n * every)).take(count).collect();
        for (recent, dense) in [
            (VecDeque::new(), false),
            (claims(RECENT_CLAIMS - 1, 1), false),
            (claims(RECENT_CLAIMS, 1), true),
            (claims(RECENT_CLAIMS, 117), true),
            (claims(RECENT_CLAIMS, 118), false),
        ] {
            assert_eq!(is_dense(&recent), dense, "{recent:?}");
        }
    }

    #[test]
    fn scans_start_before_the_watermark_or_at_the_epoch_without_one() {
        let mark = after(Timestamp::UNIX_EPOCH, Duration::from_secs(100));
        let floor = |scan: ScanRange, mark| scan.floor(mark).timestamp_millis();
        assert_eq!(floor(ScanRange::ShortSlack, Some(mark)), 99_500);
        assert_eq!(floor(ScanRange::LongSlack, Some(mark)), 70_000);
        for scan in [ScanRange::ShortSlack, ScanRange::LongSlack, ScanRange::Full] {
            assert_eq!(floor(scan, None), 0);
        }
        assert_eq!(floor(ScanRange::Full, Some(mark)), 0);
    }
}
