//! Takes, seals and stores snapshots of clusters.
//!
//! The curators' answer is checked before it is stored: a snapshot that cannot be restored is rejected.

use secrecy::SecretSlice;
use uuid::Uuid;

use crate::bmdb::cluster::sealed_snapshot::seal_snapshot;
use crate::bmdb::cluster::snapshot::NewSnapshot;
use crate::curator_client::cluster_snapshot::snapshot_digest;
use crate::manager::cluster::curators::CuratorCallError;
use crate::manager::cluster::{ClusterPassError, ClusterWorker};
use crate::model::cluster::snapshot::{SnapshotReason, voting_nodes};
use crate::model::cluster::state::ObservedCluster;
use crate::model::time::Timestamp;

impl ClusterWorker<'_> {
    /// Takes a snapshot and stores it. The inner error is what prevents that for now.
    pub(super) async fn store_snapshot(
        &self,
        why: SnapshotReason,
        seen: &ObservedCluster,
        now: Timestamp,
    ) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let Some(client) = &self.curators else { return Ok(Ok(())) };
        let (snapshot, encoded) = match client.fetch_snapshot().await {
            Ok(taken) => taken,
            Err(error) => return Ok(Err(error)),
        };
        if snapshot.cluster != self.cluster {
            return Ok(Err(CuratorCallError::InvalidResponse("a snapshot of another cluster".to_owned())));
        }
        let (bytes, digest) = (encoded.len(), snapshot_digest(&encoded));
        let sealed = seal_snapshot(&self.settings.secrets, &SecretSlice::from(encoded))
            .map_err(CuratorCallError::from)?;
        let (_, authority) = snapshot.cluster_and_authority().map_err(CuratorCallError::from)?;
        let new = NewSnapshot {
            id: Uuid::new_v4(),
            taken_at: now,
            reason: why,
            revision: snapshot.revision,
            epoch: snapshot.epoch,
            bytes,
            nodes: snapshot.nodes().map_err(CuratorCallError::from)?.len(),
            members: snapshot.consensus_members().map_err(CuratorCallError::from)?.len(),
            voters: voting_nodes(seen),
            authority: authority.anchor().fingerprint(),
            digest,
            sealed,
        };
        let revision = new.revision;
        let forgotten = self.bmdb.store_cluster_snapshot(&self.lease, self.cluster, new).await?;
        tracing::info!(cluster = self.name, reason = %why, revision, bytes, deleted = forgotten, "a snapshot of a cluster is kept");
        Ok(Ok(()))
    }
}
