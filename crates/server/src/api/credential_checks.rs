//! Checks of credentials for streams, which may outlive the credential that opened them.

use std::sync::Arc;

use tokio::time::Instant;
use tonic::Status;
use uuid::Uuid;

use crate::api::api_error::bmdb_status;
use crate::api::credential_cache::CredentialCache;
use bmdb::credential;
use bmdb::read_pool::ReadPool;

/// Looks up whether credentials are still active; cheap to clone.
#[derive(Clone)]
pub struct CredentialChecks {
    read_pool: ReadPool,
    cache: Arc<CredentialCache>,
}

impl CredentialChecks {
    /// Checks that query through `read_pool`.
    #[must_use]
    pub fn new(read_pool: ReadPool) -> Self {
        Self { read_pool, cache: Arc::default() }
    }

    /// Whether a credential is active, as of at most a second ago.
    pub async fn is_active(&self, id: Uuid) -> Result<bool, Status> {
        let answer = self.cache.get_or_look_up(id, Instant::now(), || {
            let read_pool = self.read_pool.clone();
            Box::pin(async move {
                let found =
                    read_pool.read(move |tx| Box::pin(async move { credential::find_by_id(tx, id).await }));
                Ok(found.await.map_err(bmdb_status)?.is_some_and(|found| found.active))
            })
        });
        answer.await
    }

    /// Removes results that are no longer valid.
    pub fn forget_idle(&self) {
        self.cache.forget_idle();
    }
}
