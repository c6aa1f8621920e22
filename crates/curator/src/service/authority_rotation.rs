//! Carries out the replacement of the cluster's authority, for as long as this curator leads.
//!
//! What is done next follows from the record and from what nodes report
//! ([`authority_rotation`](crate::authority_rotation)). Each step is one write of the record. The statement that belongs to
//! it is signed right after, by what signs all statements (`statements`). A leader that is lost in between leaves a record
//! with the statement of the stage before, and its successor signs the next one.

use std::convert::Infallible;
use std::sync::Arc;

use curator_client::authority_ring::{AuthorityRing, ReplacementStep};
use curator_client::cluster::authority_record_key;
use curator_client::pki::Authority;
use etcd::client::Client;
use etcd::guard::KeyChange;
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use proto::curator::v1 as wire;
use tokio::sync::watch;
use tonic::Code;

use crate::authority_rotation::{
    NodeView, RemovalEffect, ReplacementPlan, describe_replacement, plan_removal_effect, plan_replacement,
};
use crate::bootstrap::create_authority;
use crate::membership::Nodes;
use crate::service::error::ServiceError;
use crate::service::leader_context::LeaderContext;
use crate::service::store::{Versioned, record_change};

/// Follows the record of the authorities in etcd, until the future is dropped.
pub(super) async fn watch_authorities(
    client: &Client,
    authorities: &watch::Sender<Arc<AuthorityRing>>,
) -> Infallible {
    let key = match authority_record_key() {
        Ok(key) => key,
        Err(error) => {
            tracing::error!(%error, "the authorities of the cluster cannot be read");
            return std::future::pending().await;
        }
    };
    let mut record = KeyWatcher::new(client, KeySelector::One(key), AuthorityRing::decode);
    loop {
        match record.next_event().await {
            Ok(KeyEvent::Put { value, .. }) => {
                authorities.send_replace(Arc::new(value));
            }
            Ok(KeyEvent::Deleted { .. } | KeyEvent::BacklogDone) => {}
            Err(error) => {
                tracing::error!(%error, "the authorities of the cluster cannot be read; the former ones are used");
            }
        }
    }
}

impl LeaderContext {
    /// The authorities of the cluster.
    pub(super) fn authority_ring(&self) -> Arc<AuthorityRing> {
        self.authorities.borrow().clone()
    }

    /// The authority that signs.
    pub(super) fn authority(&self) -> Arc<Authority> {
        self.authorities.borrow().signer.clone()
    }

    /// Begins to replace the authority of the cluster.
    pub(super) async fn begin_replacement(&self) -> Result<(), ServiceError> {
        if self.store.statement().await?.is_none() {
            return Err(ServiceError::rejected(
                Code::FailedPrecondition,
                "the authority of the cluster is not replaced: it has made no statement yet, so nodes could not follow. \
                 Update all role servers of the cluster first",
            ));
        }
        let begun = self.store.retry_on_conflict(|| async {
            let stored = self.load_authorities().await?;
            let Some(begun) = self.begin_next(&stored.value)? else {
                return Err(ServiceError::rejected(
                    Code::AlreadyExists,
                    "the authority of the cluster is being replaced already: wait until that has ended",
                ));
            };
            self.store
                .write(&[record_change(authority_record_key()?, begun.encode(), Some(&stored))])
                .await?;
            Ok(begun)
        });
        let begun = begun.await?;
        self.authorities.send_replace(Arc::new(begun));
        Ok(())
    }

    /// The record with a replacement begun by an authority that is made now; `None` if one is under way.
    fn begin_next(&self, ring: &AuthorityRing) -> Result<Option<AuthorityRing>, ServiceError> {
        let now = self.clock.now();
        let next = create_authority(self.cluster.id, now)
            .map_err(|error| ServiceError::rejected(Code::Internal, error.to_string()))?;
        Ok(ring.begin(next, now)?)
    }

    /// Adds what the end of a membership writes into the record of the authorities and into that of the keys of
    /// Kubernetes, so that all are written or none. etcd has removed the member before, so it never receives the key that
    /// is made here.
    pub(super) async fn add_rotation_after_removal(
        &self,
        changes: &mut Vec<KeyChange>,
    ) -> Result<(), ServiceError> {
        let stored = self.load_authorities().await?;
        let has_statement = self.store.statement().await?.is_some();
        let next = match plan_removal_effect(&stored.value, has_statement) {
            RemovalEffect::None => None,
            RemovalEffect::Impossible => {
                tracing::warn!(
                    "a consensus member was removed, and the authority of the cluster is not replaced: it has made no \
                     statement yet, so nodes could not follow. Replace it once all role servers are updated"
                );
                None
            }
            RemovalEffect::Begin => self.begin_next(&stored.value)?,
            RemovalEffect::Repeat => stored.value.repeat(),
        };
        if let Some(next) = next {
            tracing::warn!("a consensus member was removed: the authority of the cluster is replaced");
            changes.push(record_change(authority_record_key()?, next.encode(), Some(&stored)));
        }
        // Its disk has the keys of Kubernetes, too.
        self.add_exposure_of_keys(changes).await
    }

    /// Makes the next step of a replacement, if one is due. What fails is logged, and tried again at the next tick.
    pub(super) async fn continue_replacement(&self) {
        match self.make_due_step().await {
            Ok(None) => {}
            Ok(Some(step)) => {
                let stage = self.authority_ring().replacement.as_ref().map(|one| one.stage.to_wire());
                tracing::warn!(?step, ?stage, "the authority of the cluster is being replaced");
            }
            Err(error) => {
                tracing::warn!(%error, "the replacement of the cluster's authority did not continue");
            }
        }
    }

    async fn make_due_step(&self) -> Result<Option<ReplacementStep>, ServiceError> {
        let stored = self.load_authorities().await?;
        if stored.value.replacement.is_none() && self.authority_ring().replacement.is_none() {
            return Ok(None);
        }
        // The response to an earlier write may have been lost.
        self.authorities.send_replace(Arc::new(stored.value.clone()));
        let nodes = self.store.nodes().await?.nodes;
        let apply = |step| stored.value.apply_step(step, self.clock.now());
        let (step, next) = match plan_replacement(&stored.value, &self.view_nodes(&nodes)) {
            ReplacementPlan::Idle | ReplacementPlan::Wait(_) => return Ok(None),
            ReplacementPlan::Step(step) => (step, apply(step)),
            ReplacementPlan::EndAndBegin => {
                let ended = apply(ReplacementStep::End);
                let next = ended.as_ref().map(|ended| self.begin_next(ended)).transpose()?;
                (ReplacementStep::End, next.flatten())
            }
        };
        let Some(next) = next else { return Ok(None) };
        self.store.write(&[record_change(authority_record_key()?, next.encode(), Some(&stored))]).await?;
        self.authorities.send_replace(Arc::new(next));
        Ok(Some(step))
    }

    /// The replacement as the API shows it; `None` if there is none.
    pub(super) async fn describe_replacement(&self) -> Result<Option<wire::AuthorityRotation>, ServiceError> {
        let ring = self.authority_ring();
        if ring.replacement.is_none() {
            return Ok(None);
        }
        let nodes = self.store.nodes().await?.nodes;
        Ok(describe_replacement(&ring, &self.view_nodes(&nodes)))
    }

    async fn load_authorities(&self) -> Result<Versioned<AuthorityRing>, ServiceError> {
        let gone = || ServiceError::rejected(Code::Internal, "the record of the cluster's authority is gone");
        self.store.authorities().await?.ok_or_else(gone)
    }

    fn view_nodes<'a>(&self, nodes: &'a Nodes) -> Vec<NodeView<'a>> {
        let (tracker, now) = (self.lock_heartbeats(), self.clock.monotonic());
        nodes.values().map(|node| NodeView { node, silence: tracker.silence(&node.id, now) }).collect()
    }
}

/// The error of an order to replace the authority. Without a quorum, etcd reads and writes nothing.
pub(super) fn explain_unavailable(error: ServiceError) -> ServiceError {
    use etcd::client::EtcdError;
    match error {
        ServiceError::Etcd(error @ (EtcdError::Deadline { .. } | EtcdError::Unavailable { .. })) => {
            ServiceError::rejected(
                Code::Unavailable,
                format!(
                    "the authority of the cluster is not replaced, as far as is known, because etcd does not answer \
                     ({error}): bring members of etcd back until most of them run, and order it again; what has begun is \
                     not begun twice"
                ),
            )
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use etcd::client::EtcdError;

    use super::*;

    #[test]
    fn order_without_a_quorum_is_answered_in_one_sentence() {
        let operation = || "reading /a".to_owned();
        let away = EtcdError::Unavailable { operation: operation(), message: "no leader".to_owned() };
        let late = EtcdError::Deadline { operation: operation(), within: Duration::from_secs(1) };
        for error in [away, late] {
            let explained = explain_unavailable(error.into());
            let text = explained.to_string();
            assert_eq!(explained.code(), Code::Unavailable, "{text}");
            assert!(
                text.starts_with("the authority of the cluster is not replaced") && !text.contains(". "),
                "{text}"
            );
            assert!(text.contains("reading /a") && text.contains("bring members of etcd back"), "{text}");
        }
        let rejected = ServiceError::rejected(Code::AlreadyExists, "it is being replaced already");
        let explained = explain_unavailable(rejected);
        assert_eq!(
            (explained.code(), explained.to_string()),
            (Code::AlreadyExists, "it is being replaced already".to_owned())
        );
    }
}
