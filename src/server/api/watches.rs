//! How many watches there may be: so many at this server, and of those a quarter with one credential.
//!
//! A watch costs looks at the database for as long as it lasts, however seldom it was asked for, so the rates
//! of calls do not bound it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::{Code, Status};
use uuid::Uuid;

use crate::server::api::refusal::refused;

/// Of how many watches one may be of the same credential.
const SHARE: usize = 4;

/// The watches there are; cheap to clone.
#[derive(Clone, Debug)]
pub struct Watches {
    most: usize,
    by_credential: Arc<Mutex<HashMap<Uuid, usize>>>,
}

/// A place for a watch, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    credential: Uuid,
    watches: Watches,
}

impl Watches {
    /// For `most` watches at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, by_credential: Arc::default() }
    }

    /// A place for a watch of this credential.
    pub fn begin(&self, credential: Uuid) -> Result<Permit, Status> {
        let mut by_credential = self.by_credential.lock().unwrap_or_else(PoisonError::into_inner);
        if by_credential.values().sum::<usize>() >= self.most {
            return Err(refused(
                Code::ResourceExhausted,
                "TOO_MANY_WATCHES",
                "there are as many watches of this shepherd as it bears; end some, or watch at another one",
            ));
        }
        let most = self.most.div_ceil(SHARE);
        let open = by_credential.get(&credential).copied().unwrap_or_default();
        if open >= most {
            let said = format!(
                "this credential has {open} watches at this shepherd, and may have {most}; end some, or \
                 watch at another one"
            );
            return Err(refused(Code::ResourceExhausted, "TOO_MANY_WATCHES", said));
        }
        by_credential.insert(credential, open + 1);
        Ok(Permit { credential, watches: self.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut by_credential = self.watches.by_credential.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn one_credential_has_a_quarter_and_all_have_no_more_than_there_are() {
        let (watches, of) = (Watches::new(8), Uuid::from_u128);
        let mut permits: Vec<Permit> = Vec::new();
        for credential in [1, 1, 2, 2, 3, 3, 4] {
            permits.push(watches.begin(of(credential)).unwrap());
        }
        let refused = watches.begin(of(1)).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains("this credential"), "{refused}");
        permits.push(watches.begin(of(4)).unwrap());
        let refused = watches.begin(of(5)).unwrap_err();
        assert!(refused.message().contains("as many watches"), "{refused}");
        permits.remove(0);
        permits.push(watches.begin(of(1)).unwrap());
        drop(permits);
        assert!(watches.by_credential.lock().unwrap().is_empty(), "nothing is remembered of who has gone");
    }

    #[test]
    fn few_watches_are_one_for_anybody() {
        let watches = Watches::new(1);
        let first = watches.begin(Uuid::nil()).unwrap();
        assert!(watches.begin(Uuid::nil()).is_err());
        drop(first);
        assert!(watches.begin(Uuid::nil()).is_ok());
    }
}
