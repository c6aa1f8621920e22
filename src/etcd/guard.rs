//! Writes that only the leader can make.
//!
//! A curator may believe to lead after another one does: its process was stopped, its network was away, its clock ran
//! slow. No care on its own side helps, because between any last look and the write there is time. So etcd compares,
//! in the transaction that writes: the key that won the election must still be the one that was created then. When
//! the lease of a former leader ends, etcd deletes that key, and its create revision never comes again.
//!
//! The second comparison is of the record itself. Two tasks of one leader that read a record, change it and write it
//! back would undo one another's change; the one whose record is not the newest any more is told to read again.
//!
//! What failed is told apart by what etcd read in the same transaction, never by asking again: the answer to a second
//! question may be about another moment.

use crate::etcd::client::{
    Client, EtcdError, Record, created_at, delete_operation, get_operation, none_written_after,
    put_operation, written_at,
};
use crate::etcd::namespace::{Keys, Namespace};
use crate::proto::etcdserverpb as wire;

/// An election that was won: the key that won it, as etcd compares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The key, in the namespace of the election; only a client of that namespace can use it.
    pub key: String,
    /// When it came to be. Another leader, or the same one elected again, has another.
    pub create_revision: i64,
}

/// What a record must be for a write to it to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Whatever it is, or is not.
    Anything,
    /// Not there.
    Absent,
    /// As it was read: last written at this revision.
    At(i64),
}

/// One key's part of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The key gets this value.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Vec<u8>,
        /// What it must be until then.
        expected: Expected,
    },
    /// The key is deleted.
    Delete {
        /// The key.
        key: String,
        /// What it must be until then.
        expected: Expected,
    },
}

impl Change {
    fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key, .. } => key,
        }
    }

    fn expected(&self) -> Expected {
        match self {
            Self::Put { expected, .. } | Self::Delete { expected, .. } => *expected,
        }
    }
}

/// Keys that a write relies on without changing them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchanged {
    /// Which. A key that comes to be among them is a change as well; one that goes is none that etcd can see.
    pub keys: Keys,
    /// The store's revision when they were looked at.
    pub since: i64,
}

/// Why nothing was written, or whether it was is not known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// Nothing was written: whoever holds this guard leads no more.
    #[error(transparent)]
    LostLeadership(#[from] LostLeadership),
    /// Nothing was written: these are not as expected any more.
    #[error("writing {doing} changed nothing, because {} changed meanwhile; read again and decide anew", changed.join(", "))]
    Changed {
        /// The keys to be written.
        doing: String,
        /// Those that were not as expected.
        changed: Vec<String>,
    },
    /// etcd did not do it, or nobody knows whether it did.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// The guard does not hold any more: another leads, or nobody.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{doing} was refused, because whoever asked is no longer the leader (the lock {lock} of revision {create_revision} is \
     gone); ask the new leader"
)]
pub struct LostLeadership {
    /// What was being done, to what.
    pub doing: String,
    /// The key of the guard.
    pub lock: String,
    /// Its create revision.
    pub create_revision: i64,
}

impl Client {
    /// Makes all these changes or none, if the guard holds and every record is as expected. Gives the store's revision
    /// of them, which is the mod revision of every key put. A key stands in one change only, or etcd refuses.
    pub async fn write(&self, guard: &Guard, changes: &[Change]) -> Result<i64, WriteError> {
        let doing = written(changes);
        let asked = guarded_write(self.namespace(), guard, changes)?;
        let transacted =
            self.transact(format!("writing {doing}"), asked.compare, asked.success, asked.failure);
        let done = transacted.await?;
        if done.succeeded { Ok(done.revision) } else { Err(why_not(guard, changes, &done.read)) }
    }

    /// As [`write`](Self::write), and only if these are as they were when they were looked at.
    pub async fn write_while(
        &self,
        guard: &Guard,
        changes: &[Change],
        unchanged: &Unchanged,
    ) -> Result<i64, WriteError> {
        let doing = written(changes);
        let asked = guarded_write_while(self.namespace(), guard, changes, unchanged)?;
        let transacted =
            self.transact(format!("writing {doing}"), asked.compare, asked.success, asked.failure);
        let done = transacted.await?;
        if done.succeeded {
            Ok(done.revision)
        } else {
            Err(why_not_while(guard, changes, unchanged, &done.read))
        }
    }

    /// Reads one key as the leader: fails when the guard does not hold any more.
    ///
    /// What the leader answers from must not be what a former leader sees.
    pub async fn read(&self, guard: &Guard, key: &str) -> Result<Option<Record>, WriteError> {
        let asked = guarded_read(self.namespace(), guard, key)?;
        let done =
            self.transact(format!("reading {key}"), asked.compare, asked.success, asked.failure).await?;
        if done.succeeded {
            Ok(done.read.into_iter().next())
        } else {
            Err(lost(guard, format!("reading {key}")).into())
        }
    }
}

/// What etcd is asked to write all of these changes or none of them; where it writes none, it reads what [`why_not`]
/// wants to know.
pub fn guarded_write(
    namespace: &Namespace,
    guard: &Guard,
    changes: &[Change],
) -> Result<wire::TxnRequest, EtcdError> {
    let mut compare = vec![guarded(namespace, guard)?];
    let (mut success, mut failure) = (Vec::new(), vec![get_operation(namespace, &guard.key)?]);
    for change in changes {
        let outside = namespace.outside(change.key()).map_err(EtcdError::from)?;
        match change.expected() {
            Expected::Anything => {}
            Expected::Absent => compare.push(written_at(outside, 0)),
            Expected::At(revision) => compare.push(written_at(outside, revision)),
        }
        failure.push(get_operation(namespace, change.key())?);
        success.push(match change {
            Change::Put { key, value, .. } => put_operation(namespace, key, value, 0)?,
            Change::Delete { key, .. } => delete_operation(namespace, &Keys::One(key.clone()))?,
        });
    }
    Ok(wire::TxnRequest { compare, success, failure })
}

/// As [`guarded_write`], and only if these are as they were when they were looked at.
pub fn guarded_write_while(
    namespace: &Namespace,
    guard: &Guard,
    changes: &[Change],
    unchanged: &Unchanged,
) -> Result<wire::TxnRequest, EtcdError> {
    let mut asked = guarded_write(namespace, guard, changes)?;
    asked.compare.push(none_written_after(namespace, &unchanged.keys, unchanged.since)?);
    Ok(asked)
}

/// What etcd is asked to read a key for the one who leads, and for nobody else.
pub fn guarded_read(namespace: &Namespace, guard: &Guard, key: &str) -> Result<wire::TxnRequest, EtcdError> {
    Ok(wire::TxnRequest {
        compare: vec![guarded(namespace, guard)?],
        success: vec![get_operation(namespace, key)?],
        failure: vec![],
    })
}

fn guarded(namespace: &Namespace, guard: &Guard) -> Result<wire::Compare, EtcdError> {
    Ok(created_at(namespace.outside(&guard.key)?, guard.create_revision))
}

/// The keys to be written, for sentences.
fn written(changes: &[Change]) -> String {
    changes.iter().map(Change::key).collect::<Vec<_>>().join(", ")
}

fn lost(guard: &Guard, doing: String) -> LostLeadership {
    LostLeadership { doing, lock: guard.key.clone(), create_revision: guard.create_revision }
}

/// Which comparison of [`guarded_write`] failed, by what the same transaction read. Lost leadership comes first: whoever lost it has no
/// business with how the records are now.
#[must_use]
pub fn why_not(guard: &Guard, changes: &[Change], read: &[Record]) -> WriteError {
    let doing = written(changes);
    let now = |key: &str| read.iter().find(|record| record.key == key);
    if now(&guard.key).is_none_or(|lock| lock.create_revision != guard.create_revision) {
        return lost(guard, format!("writing {doing}")).into();
    }
    let differs = |change: &&Change| match (change.expected(), now(change.key())) {
        (Expected::Anything, _) | (Expected::Absent, None) => false,
        (Expected::At(revision), Some(record)) => record.mod_revision != revision,
        (Expected::Absent, Some(_)) | (Expected::At(_), None) => true,
    };
    let changed = changes.iter().filter(differs).map(|change| change.key().to_owned()).collect();
    WriteError::Changed { doing, changed }
}

/// Which comparison of [`guarded_write_while`] failed. If it was none of those that [`why_not`] knows, it was the last.
#[must_use]
pub fn why_not_while(
    guard: &Guard,
    changes: &[Change],
    unchanged: &Unchanged,
    read: &[Record],
) -> WriteError {
    match why_not(guard, changes, read) {
        WriteError::Changed { doing, changed } if changed.is_empty() => {
            WriteError::Changed { doing, changed: vec![unchanged.keys.name().to_owned()] }
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

    fn put(key: &str, expected: Expected) -> Change {
        Change::Put { key: key.to_owned(), value: Vec::new(), expected }
    }

    #[test]
    fn lost_leadership_is_told_from_a_changed_record() {
        let guard = Guard { key: "/leader/1".to_owned(), create_revision: 7 };
        let changes =
            [put("/a", Expected::At(9)), put("/b", Expected::Absent), put("/c", Expected::Anything)];
        let why = |read: &[Record]| why_not(&guard, &changes, read).to_string();
        let lock = record("/leader/1", 7, 7);
        let lost = "writing /a, /b, /c was refused, because whoever asked is no longer the leader (the lock /leader/1 of \
                    revision 7 is gone); ask the new leader";
        assert_eq!(why(&[]), lost);
        assert_eq!(why(&[record("/leader/1", 8, 8), record("/a", 1, 9)]), lost);
        for (read, changed) in [
            (vec![lock.clone(), record("/a", 1, 10)], "/a"),
            (vec![lock.clone(), record("/b", 3, 3)], "/a, /b"),
            (vec![lock.clone(), record("/a", 1, 9), record("/b", 3, 3), record("/c", 4, 4)], "/b"),
        ] {
            let expected = format!(
                "writing /a, /b, /c changed nothing, because {changed} changed meanwhile; read again and decide anew"
            );
            assert_eq!(why(&read), expected);
        }
    }
}
