//! Writes conditional on leadership and on record revisions (compare-and-swap).
//!
//! A curator may believe that it leads after another one has begun to: its process was stopped, its network was away,
//! or its clock ran slow. It cannot prevent that by checks of its own, because time passes between its last check and
//! the write. So etcd compares in the transaction that writes: the key that won the election must still be the one that
//! was created then. When the lease of a former leader ends, etcd deletes that key, and its create revision never comes
//! again.
//!
//! The second comparison is of the record itself. Two tasks of one leader that read a record, change it and write it
//! back would undo each other's change. The write of the task whose record is outdated fails with a conflict, and that
//! task reads again.
//!
//! If a comparison fails, the same transaction reads the keys, and what it reads shows which one failed. A second
//! request could not show that, because the keys may have changed again in between.

use proto::etcdserverpb as wire;

use crate::client::{Client, EtcdError, Record};
use crate::namespace::{KeySelector, Namespace};
use crate::transaction::{
    compare_create_revision, compare_mod_revision, compare_not_modified_since, delete_operation,
    get_operation, put_operation,
};

/// An election that was won: the key that won it, as etcd compares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderGuard {
    /// The key, in the namespace of the election; only a client of that namespace can use it.
    pub key: String,
    /// The key's create revision. Another leader, or the same one elected again, has another one.
    pub create_revision: i64,
}

/// The condition on a record for a write to it to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedRevision {
    /// No condition: it may exist or not.
    Any,
    /// The key does not exist.
    Absent,
    /// Unchanged since it was read: last written at this revision.
    At(i64),
}

/// One key's part of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyChange {
    /// The key gets this value.
    Put {
        /// The key, within the client's namespace.
        key: String,
        /// The new value of the key.
        value: Vec<u8>,
        /// The condition on the key before the write.
        expected: ExpectedRevision,
    },
    /// The key is deleted.
    Delete {
        /// The key, within the client's namespace.
        key: String,
        /// The condition on the key before the deletion.
        expected: ExpectedRevision,
    },
}

impl KeyChange {
    fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key, .. } => key,
        }
    }

    fn expected(&self) -> ExpectedRevision {
        match self {
            Self::Put { expected, .. } | Self::Delete { expected, .. } => *expected,
        }
    }
}

/// Keys that a write relies on without changing them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnchangedKeys {
    /// The keys. A key that is created among them counts as a change; etcd cannot see a deletion here.
    pub keys: KeySelector,
    /// The store's revision when they were read.
    pub revision: i64,
}

/// Why nothing was written, or that the outcome is unknown.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// Nothing was written: the holder of this guard no longer leads.
    #[error(transparent)]
    LostLeadership(#[from] LostLeadership),
    /// Nothing was written: these keys are no longer as expected.
    #[error(
        "writing {operation} changed nothing, because {} changed meanwhile; read and decide again",
        keys.join(", ")
    )]
    Conflict {
        /// The keys of the write.
        operation: String,
        /// The keys that were not as expected.
        keys: Vec<String>,
    },
    /// etcd did not do it, or the outcome is unknown.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// The guard no longer holds: another candidate leads, or none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{operation} was refused, because the caller is no longer the leader (the lock {lock} of revision \
     {create_revision} is gone); ask the new leader"
)]
pub struct LostLeadership {
    /// The operation and its object.
    pub operation: String,
    /// The key of the guard.
    pub lock: String,
    /// The create revision of that key.
    pub create_revision: i64,
}

impl Client {
    /// Makes all these changes or none, if the guard holds and every record is as expected. Returns the store's
    /// revision of the write, which is the mod revision of every key put. A key may be in one change only, or etcd
    /// rejects the write.
    pub async fn write_guarded(&self, guard: &LeaderGuard, changes: &[KeyChange]) -> Result<i64, WriteError> {
        let doing = joined_keys(changes);
        let request = guarded_write_request(self.namespace(), guard, changes)?;
        let transacted =
            self.transact(format!("writing {doing}"), request.compare, request.success, request.failure);
        let done = transacted.await?;
        if done.succeeded {
            Ok(done.revision)
        } else {
            Err(explain_failed_write(guard, changes, &done.reads))
        }
    }

    /// As [`write_guarded`](Self::write_guarded), and only if these keys are unchanged since they were read.
    pub async fn write_if_unchanged(
        &self,
        guard: &LeaderGuard,
        changes: &[KeyChange],
        unchanged: &UnchangedKeys,
    ) -> Result<i64, WriteError> {
        let doing = joined_keys(changes);
        let request = conditional_write_request(self.namespace(), guard, changes, unchanged)?;
        let transacted =
            self.transact(format!("writing {doing}"), request.compare, request.success, request.failure);
        let done = transacted.await?;
        if done.succeeded {
            Ok(done.revision)
        } else {
            Err(explain_failed_conditional_write(guard, changes, unchanged, &done.reads))
        }
    }

    /// Makes all these changes and deletes all of `cleared`, or does nothing, if every record is as expected. There is no
    /// other guard: this is for what a node writes by an order that no curator may carry out. Returns whether it did. No
    /// key may be in both.
    pub async fn replace_unguarded(
        &self,
        what: &str,
        changes: &[KeyChange],
        cleared: &KeySelector,
    ) -> Result<bool, EtcdError> {
        let (mut compare, mut success) = (Vec::new(), vec![self.delete_operation(cleared)?]);
        for change in changes {
            compare.extend(compare_expected(self.namespace(), change)?);
            success.push(change_operation(self.namespace(), change)?);
        }
        let done = self.transact(format!("writing {what}"), compare, success, vec![]).await?;
        Ok(done.succeeded)
    }

    /// Reads one key as the leader: fails if the guard no longer holds.
    ///
    /// A leader must not respond with what a former leader sees.
    pub async fn read_guarded(&self, guard: &LeaderGuard, key: &str) -> Result<Option<Record>, WriteError> {
        let request = guarded_read_request(self.namespace(), guard, key)?;
        let done = self
            .transact(format!("reading {key}"), request.compare, request.success, request.failure)
            .await?;
        if done.succeeded {
            Ok(done.reads.into_iter().next())
        } else {
            Err(lost_leadership(guard, format!("reading {key}")).into())
        }
    }
}

/// The etcd request that writes all of these changes or none of them. If it writes none, it reads what
/// [`explain_failed_write`] needs.
pub fn guarded_write_request(
    namespace: &Namespace,
    guard: &LeaderGuard,
    changes: &[KeyChange],
) -> Result<wire::TxnRequest, EtcdError> {
    let mut compare = vec![compare_guard(namespace, guard)?];
    let (mut success, mut failure) = (Vec::new(), vec![get_operation(namespace, &guard.key)?]);
    for change in changes {
        compare.extend(compare_expected(namespace, change)?);
        failure.push(get_operation(namespace, change.key())?);
        success.push(change_operation(namespace, change)?);
    }
    Ok(wire::TxnRequest { compare, success, failure })
}

/// The comparison of the key of a change with what is expected of it, if anything is.
fn compare_expected(namespace: &Namespace, change: &KeyChange) -> Result<Option<wire::Compare>, EtcdError> {
    let outside = namespace.to_etcd_key(change.key())?;
    Ok(match change.expected() {
        ExpectedRevision::Any => None,
        ExpectedRevision::Absent => Some(compare_mod_revision(outside, 0)),
        ExpectedRevision::At(revision) => Some(compare_mod_revision(outside, revision)),
    })
}

fn change_operation(namespace: &Namespace, change: &KeyChange) -> Result<wire::RequestOp, EtcdError> {
    Ok(match change {
        KeyChange::Put { key, value, .. } => put_operation(namespace, key, value, 0)?,
        KeyChange::Delete { key, .. } => delete_operation(namespace, &KeySelector::One(key.clone()))?,
    })
}

/// As [`guarded_write_request`], and only if these keys are unchanged since they were read.
pub fn conditional_write_request(
    namespace: &Namespace,
    guard: &LeaderGuard,
    changes: &[KeyChange],
    unchanged: &UnchangedKeys,
) -> Result<wire::TxnRequest, EtcdError> {
    let mut request = guarded_write_request(namespace, guard, changes)?;
    request.compare.push(compare_not_modified_since(namespace, &unchanged.keys, unchanged.revision)?);
    Ok(request)
}

/// The etcd request that reads a key only if the guard holds.
pub fn guarded_read_request(
    namespace: &Namespace,
    guard: &LeaderGuard,
    key: &str,
) -> Result<wire::TxnRequest, EtcdError> {
    Ok(wire::TxnRequest {
        compare: vec![compare_guard(namespace, guard)?],
        success: vec![get_operation(namespace, key)?],
        failure: vec![],
    })
}

fn compare_guard(namespace: &Namespace, guard: &LeaderGuard) -> Result<wire::Compare, EtcdError> {
    Ok(compare_create_revision(namespace.to_etcd_key(&guard.key)?, guard.create_revision))
}

/// The keys of the write, for messages.
fn joined_keys(changes: &[KeyChange]) -> String {
    changes.iter().map(KeyChange::key).collect::<Vec<_>>().join(", ")
}

fn lost_leadership(guard: &LeaderGuard, doing: String) -> LostLeadership {
    LostLeadership { operation: doing, lock: guard.key.clone(), create_revision: guard.create_revision }
}

/// Finds which comparison of [`guarded_write_request`] failed, from what the same transaction read. Lost leadership
/// comes first: a former leader need not know how the records are now.
#[must_use]
pub fn explain_failed_write(guard: &LeaderGuard, changes: &[KeyChange], read: &[Record]) -> WriteError {
    let doing = joined_keys(changes);
    let now = |key: &str| read.iter().find(|record| record.key == key);
    if now(&guard.key).is_none_or(|lock| lock.create_revision != guard.create_revision) {
        return lost_leadership(guard, format!("writing {doing}")).into();
    }
    let differs = |change: &&KeyChange| match (change.expected(), now(change.key())) {
        (ExpectedRevision::Any, _) | (ExpectedRevision::Absent, None) => false,
        (ExpectedRevision::At(revision), Some(record)) => record.mod_revision != revision,
        (ExpectedRevision::Absent, Some(_)) | (ExpectedRevision::At(_), None) => true,
    };
    let changed = changes.iter().filter(differs).map(|change| change.key().to_owned()).collect();
    WriteError::Conflict { operation: doing, keys: changed }
}

/// Finds which comparison of [`conditional_write_request`] failed. If it was none of those that
/// [`explain_failed_write`] knows, it was the last.
#[must_use]
pub fn explain_failed_conditional_write(
    guard: &LeaderGuard,
    changes: &[KeyChange],
    unchanged: &UnchangedKeys,
    read: &[Record],
) -> WriteError {
    match explain_failed_write(guard, changes, read) {
        WriteError::Conflict { operation: doing, keys: changed } if changed.is_empty() => {
            WriteError::Conflict { operation: doing, keys: vec![unchanged.keys.display_name().to_owned()] }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, create_revision: i64, mod_revision: i64) -> Record {
        Record { key: key.to_owned(), value: Vec::new(), create_revision, mod_revision }
    }

    fn put(key: &str, expected: ExpectedRevision) -> KeyChange {
        KeyChange::Put { key: key.to_owned(), value: Vec::new(), expected }
    }

    #[test]
    fn lost_leadership_is_distinguished_from_a_conflict() {
        let guard = LeaderGuard { key: "/leader/1".to_owned(), create_revision: 7 };
        let changes = [
            put("/a", ExpectedRevision::At(9)),
            put("/b", ExpectedRevision::Absent),
            put("/c", ExpectedRevision::Any),
        ];
        let why = |read: &[Record]| explain_failed_write(&guard, &changes, read).to_string();
        let lock = record("/leader/1", 7, 7);
        let lost = "writing /a, /b, /c was refused, because the caller is no longer the leader (the lock \
                    /leader/1 of revision 7 is gone); ask the new leader";
        assert_eq!(why(&[]), lost);
        assert_eq!(why(&[record("/leader/1", 8, 8), record("/a", 1, 9)]), lost);
        for (read, changed) in [
            (vec![lock.clone(), record("/a", 1, 10)], "/a"),
            (vec![lock.clone(), record("/b", 3, 3)], "/a, /b"),
            (vec![lock.clone(), record("/a", 1, 9), record("/b", 3, 3), record("/c", 4, 4)], "/b"),
        ] {
            let expected = format!(
                "writing /a, /b, /c changed nothing, because {changed} changed meanwhile; read and decide \
                 again"
            );
            assert_eq!(why(&read), expected);
        }
    }
}
