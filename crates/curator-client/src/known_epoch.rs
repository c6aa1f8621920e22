//! The epoch of a cluster as far as it is known here: what curators report, and what is proved.
//!
//! An epoch counts the restorations of a cluster from snapshots, and curators of a lower one are not followed. An order of
//! the shepherd proves an epoch, and so does a statement of the cluster's authority.
//!
//! Before the first statement, a report of any node of the cluster counts, too: otherwise a cluster of a release without
//! statements could not be restored. But nothing proves it. So the first statement is compared with the proved epoch
//! alone, and ends what nodes have reported. From then on only what is proved counts.
//!
//! The functions are pure. A tracker and a file apply the same changes, each to what it has.

/// A reason to believe another epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochChange {
    /// A curator reports it, and there is no statement.
    Reported(u64),
    /// An order of the shepherd names it.
    Ordered(u64),
    /// The newest statement of the cluster's authority names it.
    Stated(u64),
}

impl EpochChange {
    /// The epoch that is named.
    #[must_use]
    pub const fn epoch(self) -> u64 {
        match self {
            Self::Reported(epoch) | Self::Ordered(epoch) | Self::Stated(epoch) => epoch,
        }
    }
}

/// The epoch of a cluster as far as it is known here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KnownEpoch {
    /// The highest epoch received. No curator of a lower one is followed.
    pub highest: u64,
    /// The highest epoch that an order or a statement has named. Never more than `highest`.
    pub proved: u64,
}

impl KnownEpoch {
    /// An epoch that an order or a statement has named.
    #[must_use]
    pub const fn proved(epoch: u64) -> Self {
        Self { highest: epoch, proved: epoch }
    }

    /// What is known after this change. The proved epoch never decreases, and only a statement lowers the highest one.
    #[must_use]
    pub fn after(self, change: EpochChange) -> Self {
        let Self { highest, proved } = self;
        match change {
            EpochChange::Reported(epoch) => Self { highest: highest.max(epoch), proved },
            EpochChange::Ordered(epoch) => Self { highest: highest.max(epoch), proved: proved.max(epoch) },
            EpochChange::Stated(epoch) => Self::proved(proved.max(epoch)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_lowers_what_is_not_proved_and_nothing_else() {
        let known = |highest, proved| KnownEpoch { highest, proved };
        for (before, change, after) in [
            (known(0, 0), EpochChange::Reported(900), known(900, 0)),
            (known(900, 0), EpochChange::Reported(3), known(900, 0)),
            (known(900, 0), EpochChange::Ordered(2), known(900, 2)),
            (known(1, 0), EpochChange::Ordered(2), known(2, 2)),
            (known(2, 2), EpochChange::Ordered(1), known(2, 2)),
            (known(900, 0), EpochChange::Stated(0), known(0, 0)),
            (known(900, 2), EpochChange::Stated(1), known(2, 2)),
            (known(900, 2), EpochChange::Stated(3), known(3, 3)),
            (known(2, 2), EpochChange::Stated(1), known(2, 2)),
        ] {
            assert_eq!(before.after(change), after, "{before:?} {change:?}");
        }
    }
}
