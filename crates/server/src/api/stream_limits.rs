//! Concurrency limits for streams, in total and per credential.
//!
//! A watch queries the database for as long as it is open, and opening it is only one call. So the rate limits of
//! calls do not bound its cost. One credential may have a quarter of the streams of a server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::{Code, Status};
use uuid::Uuid;

use crate::api::api_error::error_status;

/// The inverse share of all streams that one credential may have: a quarter.
const CREDENTIAL_SHARE: usize = 4;

/// Counts the open streams; cheap to clone.
#[derive(Clone, Debug)]
pub struct StreamLimits {
    max_streams: usize,
    /// Under `None`: those of a login to the database.
    by_credential: Arc<Mutex<HashMap<Option<Uuid>, usize>>>,
}

/// A permit for a stream, released when it is dropped.
#[derive(Debug)]
pub struct StreamPermit {
    credential: Option<Uuid>,
    limits: StreamLimits,
}

impl StreamLimits {
    /// Allows `most` streams at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { max_streams: most, by_credential: Arc::default() }
    }

    /// Acquires a permit for a stream of this credential.
    pub fn acquire(&self, credential: Option<Uuid>) -> Result<StreamPermit, Status> {
        let mut by_credential = self.by_credential.lock().unwrap_or_else(PoisonError::into_inner);
        if by_credential.values().sum::<usize>() >= self.max_streams {
            return Err(error_status(
                Code::ResourceExhausted,
                "TOO_MANY_WATCHES",
                "this shepherd already serves as many watches as it can; end some, or watch at another one",
            ));
        }
        let most = self.max_streams.div_ceil(CREDENTIAL_SHARE);
        let open = by_credential.get(&credential).copied().unwrap_or_default();
        if open >= most {
            let text = format!(
                "this credential has {open} watches at this shepherd, and may have {most}; end some, or \
                 watch at another one"
            );
            return Err(error_status(Code::ResourceExhausted, "TOO_MANY_WATCHES", text));
        }
        by_credential.insert(credential, open + 1);
        Ok(StreamPermit { credential, limits: self.clone() })
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut by_credential = self.limits.by_credential.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = by_credential.get_mut(&self.credential) {
            *open = open.saturating_sub(1);
            if *open == 0 {
                by_credential.remove(&self.credential);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_gets_a_quarter_and_the_total_is_bounded() {
        let (watches, of) = (StreamLimits::new(8), |id| Some(Uuid::from_u128(id)));
        let mut permits: Vec<StreamPermit> = Vec::new();
        for credential in [1, 1, 2, 2, 3, 3, 4] {
            permits.push(watches.acquire(of(credential)).unwrap());
        }
        let refused = watches.acquire(of(1)).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains("this credential"), "{refused}");
        permits.push(watches.acquire(of(4)).unwrap());
        let refused = watches.acquire(of(5)).unwrap_err();
        assert!(refused.message().contains("as many watches"), "{refused}");
        permits.remove(0);
        permits.push(watches.acquire(of(1)).unwrap());
        drop(permits);
        assert!(watches.by_credential.lock().unwrap().is_empty(), "nothing is remembered of who has gone");
    }

    #[test]
    fn small_limit_allows_one_stream_per_credential() {
        let watches = StreamLimits::new(1);
        let first = watches.acquire(None).unwrap();
        assert!(watches.acquire(None).is_err());
        drop(first);
        assert!(watches.acquire(None).is_ok());
    }
}
