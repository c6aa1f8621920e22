//! Issues of the database server: commits that it may lose, and its limits of transaction ids, WAL and replication slots.

use crate::database_durability::DurabilityFault;
use crate::database_limits::{DatabaseLimits, IdAge};
use crate::issues::inputs::{DatabaseLimitInputs, IssueInputs};
use crate::issues::{Issue, IssueKind};

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    match &evidence.database_limits {
        DatabaseLimitInputs::Absent => Vec::new(),
        DatabaseLimitInputs::Unreadable(error) => vec![unreadable(ALL_LIMITS, error, GRANT)],
        DatabaseLimitInputs::Unanswered(error) => vec![unreadable(ALL_LIMITS, error, LIST_AGAIN)],
        DatabaseLimitInputs::Known(limits) => {
            let mut found = slot_issues(limits);
            found.extend(id_issue(&limits.transactions, "transaction"));
            found.extend(id_issue(&limits.multixacts, "multixact"));
            found.extend(wal_issue(limits));
            found.extend(limits.durability_fault.map(durability_issue));
            let failure = limits.wal_failure.as_deref();
            found.extend(failure.map(|error| unreadable("the size of its WAL", error, LIST_AGAIN)));
            found
        }
    }
}

/// Everything that is read of a server's limits.
const ALL_LIMITS: &str = "its transaction ids, WAL and replication slots";
/// What to do if the server refuses an answer.
const GRANT: &str = "grant the role of the shepherd what the error names; `shepherdctl explain database-care#limits-of-the-server` shows what it reads";
/// What to do if it may answer the next time.
const LIST_AGAIN: &str = "list the issues again; if this one stays, see the log of the database server, and \
                          whether its disk and its network are slow";

/// Issue: limits cannot be compared, because the server does not answer the question.
fn unreadable(what: &str, error: &str, remedy: &str) -> Issue {
    Issue::new(
        IssueKind::DatabaseLimitsUnreadable,
        "the database".to_owned(),
        format!("{what} cannot be read: {error}"),
        None,
        remedy.to_owned(),
    )
}

fn slot_issues(limits: &DatabaseLimits) -> Vec<Issue> {
    let described = limits.slots.iter().filter_map(|slot| Some((slot, limits.describe_slot(slot)?)));
    described
        .map(|(slot, problem)| {
            Issue::new(
                IssueKind::ReplicationSlot,
                format!("slot {}", slot.name),
                format!("the replication slot {} {problem}", slot.name),
                None,
                format!(
                    "connect its reader again; if that is gone for good, drop the slot with \
                     `SELECT pg_drop_replication_slot('{}')`",
                    slot.name.replace('\'', "''")
                ),
            )
        })
        .collect()
}

/// Issue: autovacuum does not free ids, and at the limit the server accepts no write.
fn id_issue(ids: &IdAge, what: &str) -> Option<Issue> {
    ids.is_overdue().then(|| {
        Issue::new(
            IssueKind::TransactionIds,
            format!("database {}", ids.database),
            format!(
                "{} % of the {what} ids are used: autovacuum should have freed them at {} %, and near 100 % PostgreSQL \
                 accepts no more writes",
                ids.percent(),
                IdAge { age: ids.freeze_age, ..ids.clone() }.percent()
            ),
            None,
            format!(
                "end what holds them (old transactions, prepared ones, replication slots), then `VACUUM (FREEZE)` in the \
                 database {}; `shepherdctl explain database-care#limits-of-the-server` shows the queries",
                ids.database
            ),
        )
    })
}

/// Issue: a crash or a fail-over loses what shepherds have acted upon.
fn durability_issue(fault: DurabilityFault) -> Issue {
    Issue::new(
        IssueKind::DatabaseDurability,
        "the database".to_owned(),
        format!("the database {fault}"),
        None,
        "set it to on for the role of the shepherds (`ALTER ROLE`), the database (`ALTER DATABASE`) and the server \
         (`ALTER SYSTEM`)"
            .to_owned(),
    )
}

/// Issue: WAL grows until its disk is full, and then the server stops.
fn wal_issue(limits: &DatabaseLimits) -> Option<Issue> {
    let is_large = limits.wal.is_some_and(|wal| wal >= limits.wal_threshold());
    if !is_large && !limits.is_archiving_failing {
        return None;
    }
    let size = limits.wal.map(|wal| {
        format!("its WAL takes {}, and max_wal_size is {}", wal.humanize(), limits.max_wal.humanize())
    });
    let archive = limits
        .is_archiving_failing
        .then(|| "the last attempt to archive WAL failed, and it is retained until one succeeds".to_owned());
    let parts: Vec<String> = size.into_iter().chain(archive).collect();
    let remedy = if limits.is_archiving_failing {
        "see archive_command and the log of the server: WAL is removed as soon as it is archived"
    } else {
        "see what retains it: replication slots, wal_keep_size, or checkpoints that do not end"
    };
    Some(Issue::new(
        IssueKind::WalRetained,
        "the database".to_owned(),
        parts.join("; "),
        None,
        remedy.to_owned(),
    ))
}
