//! The database and its server.

use crate::database_durability::DurabilityFault;
use crate::issues::tests::cases::Case;
use crate::issues::tests::*;

pub(super) const CASES: &[Case] = &[
    (
        "a database with a published fault",
        |e| e.database_version = Some(postgres_version(140_003)),
        &[("version-fault", "the database")],
    ),
    (
        "a database that is not supported",
        |e| e.database_version = Some(postgres_version(190_000)),
        &[("version-fault", "the database")],
    ),
    ("a database that is no PostgreSQL", |e| e.database_version = None, &[]),
    (
        "a forgotten psql",
        |e| e.storage.as_mut().unwrap().oldest_snapshot = Duration::from_secs(601),
        &[("long-snapshot", "the database")],
    ),
    ("dead rows", |e| e.storage.as_mut().unwrap().rows[0].1 = 100_000, &[("dead-rows", "table session")]),
    ("a database without books", |e| e.storage = None, &[]),
    ("a database without limits", |e| e.database_limits = DatabaseLimitInputs::Absent, &[]),
    (
        "limits that cannot be read",
        |e| e.database_limits = DatabaseLimitInputs::Unreadable("permission denied".into()),
        &[("database-limits-unreadable", "the database")],
    ),
    (
        "limits that a busy server does not report",
        |e| e.database_limits = DatabaseLimitInputs::Unanswered("timed out".into()),
        &[("database-limits-unreadable", "the database")],
    ),
    (
        "WAL files that cannot be listed beside a slot that has lost WAL",
        |e| {
            (limits(e).wal, limits(e).wal_failure) = (None, Some("timed out".into()));
            limits(e).slots[0].wal = SlotWal::Lost;
        },
        &[("database-limits-unreadable", "the database"), ("replication-slot", "slot standby")],
    ),
    (
        "a server that loses commits",
        |e| limits(e).durability_fault = Some(DurabilityFault::CommitOff),
        &[("database-durability", "the database")],
    ),
    (
        "a slot that holds much WAL",
        |e| limits(e).slots[0].retained = Some(ByteSize::gibibytes(4)),
        &[("replication-slot", "slot standby")],
    ),
    (
        "a slot that has lost WAL",
        |e| limits(e).slots[0].wal = SlotWal::Lost,
        &[("replication-slot", "slot standby")],
    ),
    (
        "transaction ids that are not freed",
        |e| limits(e).transactions.age = 700_000_000,
        &[("transaction-ids", "database bmdb")],
    ),
    (
        "multixact ids that are not freed",
        |e| limits(e).multixacts.age = 700_000_000,
        &[("transaction-ids", "database bmdb")],
    ),
    ("much WAL", |e| limits(e).wal = Some(ByteSize::gibibytes(4)), &[("wal-retained", "the database")]),
    ("WAL that may not be listed", |e| limits(e).wal = None, &[]),
    (
        "WAL that is not archived",
        |e| limits(e).is_archiving_failing = true,
        &[("wal-retained", "the database")],
    ),
];
