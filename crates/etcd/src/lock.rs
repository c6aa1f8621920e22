//! A lock over an etcd lease: one holder at a time, and none for longer than its lease lives.
//!
//! A lock is a key that exists while somebody holds it. Its value is the name of the holder, for the messages of those
//! that wait. The lease is not kept alive. A holder that ends without releasing the lock blocks others until the lease
//! ends, and a holder that takes longer no longer has the lock. So what the lock protects must be safe without it, or
//! must end within the lease: a holder compares [`Lock::age`] with the time to live.

use std::time::Duration;

use crate::client::{Client, EtcdError};
use crate::election::CandidateLease;
use crate::transaction::{self, compare_create_revision};

/// A lock that this process holds until its lease ends, or until it is released.
#[derive(Debug)]
pub struct Lock {
    lease: CandidateLease,
}

/// The outcome of an attempt to take a lock.
#[derive(Debug)]
pub enum LockAttempt {
    /// This process holds it now.
    Acquired(Lock),
    /// Somebody else holds it.
    Busy {
        /// Name of the holder.
        holder: String,
    },
}

impl Client {
    /// Takes the lock with this key if nobody holds it. Does not wait. `ttl` is in whole seconds.
    pub async fn try_lock(&self, key: &str, holder: &str, ttl: Duration) -> Result<LockAttempt, EtcdError> {
        let lease = CandidateLease::grant(self, ttl).await?;
        match self.create_lock_key(key, holder, lease.id()).await {
            Ok(None) => Ok(LockAttempt::Acquired(Lock { lease })),
            Ok(Some(holder)) => {
                lease.revoke(self).await;
                Ok(LockAttempt::Busy { holder })
            }
            Err(error) => {
                // The key may have been written even so. It goes with the lease.
                lease.revoke(self).await;
                Err(error)
            }
        }
    }

    /// Creates the key with this lease if it does not exist. Returns the holder if it does.
    async fn create_lock_key(
        &self,
        key: &str,
        holder: &str,
        lease: i64,
    ) -> Result<Option<String>, EtcdError> {
        let compare = compare_create_revision(self.namespace().to_etcd_key(key)?, 0);
        let put = self.put_operation(key, holder.as_bytes(), lease)?;
        let get = transaction::get_operation(self.namespace(), key)?;
        let done =
            self.transact(format!("taking the lock {key}"), vec![compare], vec![put], vec![get]).await?;
        if done.succeeded {
            return Ok(None);
        }
        let holder = done.reads.first().map(|record| String::from_utf8_lossy(&record.value).into_owned());
        Ok(Some(holder.unwrap_or_default()))
    }
}

impl Lock {
    /// The time since the lock was requested. The lease lives at least its time to live from then on.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.lease.age()
    }

    /// Releases the lock within a second. If etcd does not answer in that time, the lock ends with its lease.
    pub async fn release(self, client: &Client) {
        self.lease.revoke(client).await;
    }
}
