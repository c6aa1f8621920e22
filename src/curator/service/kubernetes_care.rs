//! What the leader does about Kubernetes by itself: the next step of a replacement of keys, which node is told of it when,
//! and parts of the pods' addresses that are missing or left over.
//!
//! Each is decided from records that were read, and is one write under the guard and as those records were. So it does not
//! matter how often it is tried, nor who led in between.

use crate::curator::kubernetes::allotment::{Allotment, Allotments, Amiss, Told, amiss};
use crate::curator::kubernetes::keys::keys_key;
use crate::curator::kubernetes::turns::{self, Standing, Turn};
use crate::curator::membership::Nodes;
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::Leading;
use crate::curator::service::store::put;
use crate::etcd::guard::{Change, Expected};

/// Records that are deleted with one write; etcd takes 128 operations.
const AT_ONCE: usize = 100;

impl Leading {
    /// Does all that can be done now.
    pub async fn care_for_kubernetes(&self) -> Result<(), Failure> {
        while self.put_allotments_right().await?
            || self.next_turn().await?
            || self.advance_replacement().await?
        {}
        Ok(())
    }

    /// All nodes, with what they may be told and whether they are heard.
    #[must_use]
    pub fn standings<'a>(&self, nodes: &'a Nodes, allotments: &Allotments) -> Vec<Standing<'a>> {
        let (heard, now) = (self.heartbeats(), self.clock.running());
        turns::standings(nodes, allotments, |node| heard.health(node, now))
    }

    /// Has the next node be told the present generation of authorities and keys; says whether there was one.
    async fn next_turn(&self) -> Result<bool, Failure> {
        let _alone = self.membership().await;
        let Some(turn) = self.take_turn(|_| true).await? else { return Ok(false) };
        tracing::debug!(?turn, "a node may be told another generation of keys of Kubernetes");
        Ok(true)
    }

    /// Has all nodes that were told of no generation be told the present one, before there is another: they would begin
    /// with that one beside whoever's turn it is. Whoever calls it keeps all others from changing members.
    pub async fn tell_whoever_is_new(&self) -> Result<(), Failure> {
        while self.take_turn(|told| told.is_none()).await?.is_some() {}
        Ok(())
    }

    /// Writes the next turn, if it is that of a node of which this holds.
    async fn take_turn(&self, is_meant: impl Fn(Option<Told>) -> bool) -> Result<Option<Turn>, Failure> {
        let Some(keys) = self.store.kubernetes_keys().await? else { return Ok(None) };
        if keys.value.rings.is_empty() {
            return Ok(None);
        }
        let nodes = self.store.nodes().await?.nodes;
        let allotments = self.store.allotments().await?;
        let mut standings = self.standings(&nodes, &allotments.all);
        standings.retain(|standing| is_meant(standing.told));
        let Some(turn) = turns::next(keys.value.generation, &standings) else { return Ok(None) };
        let (node, told) = match turn {
            Turn::Tell(node) => {
                (node, Some(Told { generation: keys.value.generation, at: self.clock.now() }))
            }
            Turn::Forget(node) => (node, None),
        };
        let has = allotments.all.get(&node).cloned().unwrap_or_default();
        self.store.write(&[allotments.put(&node, &Allotment { told, ..has })?]).await?;
        Ok(Some(turn))
    }

    /// Puts one thing right; says whether there was one.
    async fn put_allotments_right(&self) -> Result<bool, Failure> {
        // Whoever gives or takes a role, or deletes a node, does the same.
        let _alone = self.membership().await;
        let settings = self.store.kubernetes().await?.map(|stored| stored.value);
        let nodes = self.store.nodes().await?;
        let allotments = self.store.allotments().await?;
        let Some(amiss) = amiss(settings.as_ref(), &nodes.nodes, &allotments.all) else { return Ok(false) };
        let change = match &amiss {
            Amiss::Nobodys(node) => allotments.put(node, &Allotment::default())?,
            Amiss::Missing(node, wanted) => allotments.put(node, wanted)?,
        };
        self.store.write_while(&[change], &allotments.unchanged()).await?;
        tracing::info!(?amiss, "what a node has of Kubernetes was put right");
        Ok(true)
    }

    /// Makes the next step of a replacement, if one can be made; says whether it did.
    async fn advance_replacement(&self) -> Result<bool, Failure> {
        let _alone = self.membership().await;
        let Some(known) = self.store.kubernetes_keys().await? else { return Ok(false) };
        if known.value.rings.values().all(|ring| ring.replacement.is_none()) {
            return Ok(false);
        }
        let nodes = self.store.nodes().await?.nodes;
        let next = known.value.next(&nodes.values(), self.token_overlap, self.clock.now());
        let Some((which, step, after)) = next else { return Ok(false) };
        // No node is new: each of them said something since it was told.
        let after = after.keeping(self.store.allotments().await?.told());
        self.store.write(&[put(keys_key()?, after.encode(), Some(&known))]).await?;
        tracing::info!(%which, ?step, generation = after.generation, "the replacement of keys of Kubernetes goes on");
        Ok(true)
    }

    /// Removes what all nodes have, of a Kubernetes that is not there.
    pub async fn forget_allotments(&self) -> Result<(), Failure> {
        let allotments = self.store.allotments().await?;
        let gone: Vec<(&_, &i64)> = allotments.revisions.iter().collect();
        for part in gone.chunks(AT_ONCE) {
            let deletions = part.iter().map(|(node, at)| {
                Ok(Change::Delete { key: Allotment::etcd_key(node)?, expected: Expected::At(**at) })
            });
            self.store.write(&deletions.collect::<Result<Vec<_>, Failure>>()?).await?;
        }
        Ok(())
    }
}
