//! How close the database server is to limits at which it stops, or its standbys do. *Pure.*
//!
//! PostgreSQL stops accepting writes when transaction ids run out, and when the write-ahead log (WAL) fills its disk. A
//! replication slot keeps WAL for a reader that may never come back, and a slot with a limit loses what its reader needs.
//! So does WAL that cannot be archived. None of this shows in a statement before it is too late.
//!
//! The thresholds are here, in one place. They follow the settings of the server, because a server that is configured for
//! more is healthy with more.

use crate::byte_size::ByteSize;
use crate::database_durability::DurabilityFault;
use crate::kubernetes::version::ReleaseVersion;

/// The age at which ids of transactions, and of multixacts, are used up: half of the 2^32 ids.
pub const ID_LIMIT: u64 = 1 << 31;
/// WAL beyond this multiple of `max_wal_size` is not explained by checkpoints.
const WAL_FACTOR: u64 = 4;
/// WAL that is never too much, however small `max_wal_size` is.
const LEAST_WAL: ByteSize = ByteSize::gibibytes(4);

/// The age of the oldest id that a database still needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdAge {
    /// The database that needs it.
    pub database: String,
    /// How many ids were used since.
    pub age: u64,
    /// The age at which autovacuum frees old ids, by the settings of the server.
    pub freeze_age: u64,
}

impl IdAge {
    /// Whether autovacuum does not keep up: a quarter of the ids after its age is used.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.age >= self.freeze_age + ID_LIMIT.saturating_sub(self.freeze_age) / 4
    }

    /// The share of all ids that is used, in per cent.
    #[must_use]
    pub const fn percent(&self) -> u64 {
        self.age.saturating_mul(100) / ID_LIMIT
    }
}

/// Whether a slot still has the WAL that its reader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotWal {
    /// All of it is retained.
    Reserved,
    /// The next checkpoint may remove some of it.
    Unreserved,
    /// Some of it is removed, and the slot is of no use.
    Lost,
}

impl SlotWal {
    /// The state of this name in `pg_replication_slots.wal_status`. A slot without one has reserved no WAL yet.
    #[must_use]
    pub fn parse(status: Option<&str>) -> Self {
        match status {
            Some("lost") => Self::Lost,
            Some("unreserved") => Self::Unreserved,
            _ => Self::Reserved,
        }
    }
}

/// A replication slot of the server, as it was last read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicationSlot {
    /// Its name, unique in the server.
    pub name: String,
    /// Whether a reader is connected.
    pub is_active: bool,
    /// Whether it has the WAL that its reader needs.
    pub wal: SlotWal,
    /// WAL that the server retains for it; `None` if it retains none.
    pub retained: Option<ByteSize>,
    /// How much more may be written before it is in danger; `None` without a limit.
    pub margin: Option<ByteSize>,
}

/// Everything that is read of the limits of a server at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatabaseLimits {
    /// Age of the oldest transaction id.
    pub transactions: IdAge,
    /// Age of the oldest multixact id.
    pub multixacts: IdAge,
    /// All replication slots of the server, by name.
    pub slots: Vec<ReplicationSlot>,
    /// Size of all WAL files; `None` if the role of the shepherd may not list them, or if that failed.
    pub wal: Option<ByteSize>,
    /// Why the files could not be listed; `None` if they were, or if the role may not list them.
    pub wal_failure: Option<String>,
    /// The size of WAL that causes a checkpoint (`max_wal_size`).
    pub max_wal: ByteSize,
    /// Whether the last attempt to archive WAL failed.
    pub is_archiving_failing: bool,
    /// Version of the server; `None` for one that reports none.
    pub version: Option<ReleaseVersion>,
    /// Size of the database of the fleet with its indexes. The free space of its disk cannot be read.
    pub database: ByteSize,
    /// The setting with which it may lose commits; `None` without one, and for a server that is thrown away at its end.
    pub durability_fault: Option<DurabilityFault>,
}

impl DatabaseLimits {
    /// More WAL than checkpoints explain.
    #[must_use]
    pub fn wal_threshold(&self) -> ByteSize {
        ByteSize(self.max_wal.0.saturating_mul(WAL_FACTOR)).max(LEAST_WAL)
    }

    /// What is wrong with a slot, as the end of a sentence that begins with it; `None` if nothing is.
    #[must_use]
    pub fn describe_slot(&self, slot: &ReplicationSlot) -> Option<String> {
        let reader = if slot.is_active { "its reader is connected" } else { "no reader is connected" };
        let retained = slot.retained.unwrap_or(ByteSize(0));
        match (slot.wal, slot.margin) {
            (SlotWal::Lost, _) => {
                Some(format!("has lost WAL that its reader needs, and cannot be used any more ({reader})"))
            }
            (SlotWal::Unreserved, _) => {
                Some(format!("loses WAL that its reader needs with the next checkpoint ({reader})"))
            }
            (SlotWal::Reserved, Some(margin)) if margin.0 <= retained.0 / 3 => Some(format!(
                "holds {} of WAL, and loses it when {} more are written ({reader})",
                retained.humanize(),
                margin.humanize()
            )),
            (SlotWal::Reserved, _) if retained >= self.wal_threshold() => {
                Some(format!("holds {} of WAL ({reader})", retained.humanize()))
            }
            (SlotWal::Reserved, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(age: u64, freeze_age: u64) -> IdAge {
        IdAge { database: "bmdb".to_owned(), age, freeze_age }
    }

    #[test]
    fn ids_are_overdue_a_quarter_after_autovacuum_should_have_freed_them() {
        let million = 1_000_000;
        for (age, freeze_age, overdue) in [
            (0, 200, false),
            (250, 200, false),
            (686, 200, false),
            (687, 200, true),
            (1_500, 1_500, false),
            (1_661, 1_500, false),
            (1_662, 1_500, true),
            (2_140, 2_000, true),
        ] {
            assert_eq!(ids(age * million, freeze_age * million).is_overdue(), overdue, "{age} {freeze_age}");
        }
        assert_eq!(ids(ID_LIMIT / 2, 0).percent(), 50);
    }

    #[test]
    fn slot_is_described_when_it_loses_wal_or_holds_much_of_it() {
        let gib = ByteSize::gibibytes;
        let limits = DatabaseLimits { max_wal: gib(1), ..DatabaseLimits::default() };
        let slot = |wal, retained, margin| ReplicationSlot {
            name: "standby".to_owned(),
            is_active: false,
            wal,
            retained,
            margin,
        };
        let none = None::<&str>;
        for (slot, expected) in [
            (slot(SlotWal::Reserved, None, None), none),
            (slot(SlotWal::Reserved, Some(ByteSize(gib(4).0 - 1)), None), none),
            (
                slot(SlotWal::Reserved, Some(gib(4)), None),
                Some("holds 4 GiB of WAL (no reader is connected)"),
            ),
            (slot(SlotWal::Reserved, Some(gib(3)), Some(ByteSize(gib(1).0 + 1))), none),
            (
                slot(SlotWal::Reserved, Some(gib(3)), Some(gib(1))),
                Some("holds 3 GiB of WAL, and loses it when 1 GiB more are written (no reader is connected)"),
            ),
            (
                slot(SlotWal::Unreserved, Some(gib(1)), None),
                Some("loses WAL that its reader needs with the next checkpoint (no reader is connected)"),
            ),
            (
                ReplicationSlot { is_active: true, ..slot(SlotWal::Lost, None, None) },
                Some(
                    "has lost WAL that its reader needs, and cannot be used any more (its reader is connected)",
                ),
            ),
        ] {
            assert_eq!(limits.describe_slot(&slot).as_deref(), expected, "{slot:?}");
        }
        let large = DatabaseLimits { max_wal: gib(100), ..DatabaseLimits::default() };
        assert_eq!(large.wal_threshold(), gib(400));
        assert_eq!(large.describe_slot(&slot(SlotWal::Reserved, Some(gib(300)), None)), None);
    }

    #[test]
    fn state_of_a_slot_is_that_of_the_server() {
        for (status, expected) in [
            (Some("reserved"), SlotWal::Reserved),
            (Some("extended"), SlotWal::Reserved),
            (Some("unreserved"), SlotWal::Unreserved),
            (Some("lost"), SlotWal::Lost),
            (None, SlotWal::Reserved),
        ] {
            assert_eq!(SlotWal::parse(status), expected, "{status:?}");
        }
    }
}
