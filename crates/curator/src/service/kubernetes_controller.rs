//! The leader's Kubernetes controller: advances key rotation and rollout, repairs allocations.
//!
//! It makes the next step of a key rotation, assigns generations to nodes, and allocates missing pod ranges or deletes
//! orphaned allocations. It also begins to give kubelets an authority of their own, where they have none, and to rotate
//! keys that somebody else has. Each decision is made from records that were read, and is one write that succeeds only
//! while this curator leads and these records are unchanged. So it does not matter how often it is tried, or which curator
//! led in between.

use curator_client::certificate::{Serial, Validity};
use curator_client::pki::AUTHORITY_LIFETIME;
use etcd::guard::{ExpectedRevision, KeyChange};
use model::cluster::kubernetes::KeyPurpose;

use crate::kubernetes::key_rollout::{self, NodeProgress, RolloutStep};
use crate::kubernetes::keys::keys_record_key;
use crate::kubernetes::node_allocation::{
    AssignedGeneration, Inconsistency, NodeAllocation, NodeAllocations, find_inconsistency,
};
use crate::kubernetes::signer::{Signer, generate_key};
use crate::membership::Nodes;
use crate::service::error::ServiceError;
use crate::service::leader_context::LeaderContext;
use crate::service::store::record_change;

/// Most records deleted in one write; etcd accepts 128 operations.
const MAX_DELETIONS_PER_WRITE: usize = 100;

impl LeaderContext {
    /// Makes all steps that are possible now.
    pub(super) async fn reconcile_kubernetes(&self) -> Result<(), ServiceError> {
        while self.repair_allocations().await?
            || self.separate_kubelets().await?
            || self.rotate_exposed_keys().await?
            || self.advance_rollout().await?
            || self.advance_rotation().await?
        {}
        Ok(())
    }

    /// The rollout progress of all nodes: assigned generation and health.
    #[must_use]
    pub(super) fn node_progress<'a>(
        &self,
        nodes: &'a Nodes,
        allotments: &NodeAllocations,
    ) -> Vec<NodeProgress<'a>> {
        let (tracker, now) = (self.lock_heartbeats(), self.clock.monotonic());
        key_rollout::node_progress(nodes, allotments, |node| tracker.node_health(node, now))
    }

    /// Assigns the current key generation to the next node, or clears an assignment; returns whether there was a step.
    async fn advance_rollout(&self) -> Result<bool, ServiceError> {
        let _alone = self.lock_membership().await;
        let Some(step) = self.write_rollout_step(|_| true).await? else { return Ok(false) };
        tracing::debug!(rollout_step = ?step, "the generation of Kubernetes keys assigned to a node was changed");
        Ok(true)
    }

    /// Assigns the current generation to all nodes that have none, before there is a newer one. Otherwise they would
    /// begin with the newer one, beside the node whose turn it is. The caller must hold the membership lock.
    pub(super) async fn assign_to_new_nodes(&self) -> Result<(), ServiceError> {
        while self.write_rollout_step(|generation| generation.is_none()).await?.is_some() {}
        Ok(())
    }

    /// Writes the next rollout step among the nodes whose assignment satisfies `is_meant`.
    async fn write_rollout_step(
        &self,
        is_meant: impl Fn(Option<AssignedGeneration>) -> bool,
    ) -> Result<Option<RolloutStep>, ServiceError> {
        let Some(keys) = self.store.kubernetes_keys().await? else { return Ok(None) };
        if keys.value.rings.is_empty() {
            return Ok(None);
        }
        let nodes = self.store.nodes().await?.nodes;
        let allotments = self.store.allocations().await?;
        let mut progress = self.node_progress(&nodes, &allotments.allocations);
        progress.retain(|node| is_meant(node.assigned));
        let Some(step) = key_rollout::next_rollout_step(keys.value.generation, &progress) else {
            return Ok(None);
        };
        let (node, generation) = match step {
            RolloutStep::Assign(node) => (
                node,
                Some(AssignedGeneration { generation: keys.value.generation, assigned_at: self.clock.now() }),
            ),
            RolloutStep::Clear(node) => (node, None),
        };
        let has = allotments.allocations.get(&node).cloned().unwrap_or_default();
        self.store
            .write(&[allotments.allocation_change(&node, &NodeAllocation { assigned: generation, ..has })?])
            .await?;
        Ok(Some(step))
    }

    /// Repairs one allocation; returns whether there was one to repair.
    async fn repair_allocations(&self) -> Result<bool, ServiceError> {
        // Orders that change roles and deletions of nodes take the same lock.
        let _alone = self.lock_membership().await;
        let settings = self.store.kubernetes().await?.map(|stored| stored.value);
        let nodes = self.store.nodes().await?;
        let allotments = self.store.allocations().await?;
        let Some(inconsistency) =
            find_inconsistency(settings.as_ref(), &nodes.nodes, &allotments.allocations)
        else {
            return Ok(false);
        };
        let change = match &inconsistency {
            Inconsistency::Orphaned(node) => {
                allotments.allocation_change(node, &NodeAllocation::default())?
            }
            Inconsistency::Missing(node, wanted) => allotments.allocation_change(node, wanted)?,
        };
        self.store.write_if_unchanged(&[change], &allotments.unchanged_keys()).await?;
        tracing::info!(?inconsistency, "a node's Kubernetes allocation was repaired");
        Ok(true)
    }

    /// A new signing key for this purpose.
    pub(super) fn create_signer(&self, which: KeyPurpose) -> Result<Signer, ServiceError> {
        let key = generate_key()?;
        if !which.is_authority() {
            return Ok(Signer::without_certificate(&key)?);
        }
        let validity = Validity::starting(self.clock.now(), AUTHORITY_LIFETIME);
        let serial = Serial::new(rand::random());
        Ok(Signer::new_authority(which.as_str(), self.cluster.id, &key, serial, validity)?)
    }

    /// Begins the rotation that gives kubelets an authority of their own; returns whether it did. The statement shows
    /// that every API server knows this authority.
    async fn separate_kubelets(&self) -> Result<bool, ServiceError> {
        let _alone = self.lock_membership().await;
        let Some(known) = self.store.kubernetes_keys().await? else { return Ok(false) };
        if !known.value.shares_authority() || self.store.statement().await?.is_none() {
            return Ok(false);
        }
        let (which, now) = (KeyPurpose::Kubelets, self.clock.now());
        let begun = known.value.begin_rotation(which, self.create_signer(which)?, now)?;
        let Some(begun) = begun else { return Ok(false) };
        self.assign_to_new_nodes().await?;
        let begun = begun.retain_bundles(self.store.allocations().await?.assigned_generations());
        self.store.write(&[record_change(keys_record_key()?, begun.encode(), Some(&known))]).await?;
        tracing::warn!(
            generation = begun.generation,
            "kubelets get an authority of their own; that of API servers signed for them"
        );
        Ok(true)
    }

    /// Adds the mark that somebody else has the keys of Kubernetes to what is written, if there are such keys.
    pub(super) async fn add_exposure_of_keys(
        &self,
        changes: &mut Vec<KeyChange>,
    ) -> Result<(), ServiceError> {
        let Some(known) = self.store.kubernetes_keys().await? else { return Ok(()) };
        if let Some(marked) = known.value.mark_exposed() {
            tracing::warn!("somebody else has the keys of Kubernetes: all of them are going to be rotated");
            changes.push(record_change(keys_record_key()?, marked.encode(), Some(&known)));
        }
        Ok(())
    }

    /// Begins the rotations of exposed keys, unless the authority of the cluster is being replaced; returns whether it did.
    async fn rotate_exposed_keys(&self) -> Result<bool, ServiceError> {
        let _alone = self.lock_membership().await;
        let Some(known) = self.store.kubernetes_keys().await? else { return Ok(false) };
        let due = known.value.due_rotations();
        if due.is_empty() {
            return Ok(false);
        }
        let authorities = self.store.authorities().await?;
        if authorities.is_none_or(|authorities| authorities.value.replacement.is_some()) {
            return Ok(false);
        }
        let signers = due.into_iter().map(|which| Ok((which, self.create_signer(which)?)));
        let signers = signers.collect::<Result<Vec<_>, ServiceError>>()?;
        let begun = known.value.begin_due_rotations(signers, self.clock.now())?;
        self.assign_to_new_nodes().await?;
        let begun = begun.retain_bundles(self.store.allocations().await?.assigned_generations());
        self.store.write(&[record_change(keys_record_key()?, begun.encode(), Some(&known))]).await?;
        tracing::warn!(
            generation = begun.generation,
            "keys of Kubernetes that somebody else has are being replaced"
        );
        Ok(true)
    }

    /// Makes all steps of key rotations that are due, by one write; returns whether there was one.
    async fn advance_rotation(&self) -> Result<bool, ServiceError> {
        let _alone = self.lock_membership().await;
        let Some(known) = self.store.kubernetes_keys().await? else { return Ok(false) };
        if known.value.rings.values().all(|ring| ring.replacement.is_none()) {
            return Ok(false);
        }
        let nodes = self.store.nodes().await?.nodes;
        // Rotations that began together go on together, so that no node restarts for each of them.
        let (now, mut after) = (self.clock.now(), known.value.clone());
        while let Some((which, step, next)) =
            after.next_rotation_step(&nodes.values(), self.token_overlap, now)
        {
            tracing::info!(keys = %which, ?step, generation = next.generation, "a rotation of Kubernetes keys takes its next step");
            after = next;
        }
        if after == known.value {
            return Ok(false);
        }
        // No node is without an assignment: each of them has reported since it was assigned one.
        let after = after.retain_bundles(self.store.allocations().await?.assigned_generations());
        self.store.write(&[record_change(keys_record_key()?, after.encode(), Some(&known))]).await?;
        Ok(true)
    }

    /// Deletes the allocations of all nodes, of a Kubernetes that does not exist.
    pub(super) async fn delete_allocations(&self) -> Result<(), ServiceError> {
        let allotments = self.store.allocations().await?;
        let gone: Vec<(&_, &i64)> = allotments.revisions.iter().collect();
        for part in gone.chunks(MAX_DELETIONS_PER_WRITE) {
            let deletions = part.iter().map(|(node, at)| {
                Ok(KeyChange::Delete {
                    key: NodeAllocation::etcd_key(node)?,
                    expected: ExpectedRevision::At(**at),
                })
            });
            self.store.write(&deletions.collect::<Result<Vec<_>, ServiceError>>()?).await?;
        }
        Ok(())
    }
}
