//! Takes, seals and stores snapshots of clusters.
//!
//! The curators' answer is checked before it is stored: a snapshot that cannot be restored is rejected.

use std::collections::BTreeMap;

use secrecy::{ExposeSecret as _, SecretSlice};
use uuid::Uuid;

use crate::bmdb::cluster::record::ClusterDetails;
use crate::bmdb::cluster::sealed_snapshot::{seal_snapshot, unseal_snapshot};
use crate::bmdb::cluster::snapshot::NewSnapshot;
use crate::curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use crate::manager::cluster::curators::CuratorCallError;
use crate::manager::cluster::{ClusterPassError, ClusterWorker};
use crate::model::cluster::snapshot::{SnapshotReason, voting_nodes};
use crate::model::cluster::state::ObservedCluster;
use crate::model::time::Timestamp;

/// Most bytes of revocations in an order, which is sent with each heartbeat until the machine has it.
const MAX_REVOCATION_BYTES: usize = 512 << 10;

impl ClusterWorker<'_> {
    /// Revocations that the newest snapshot has and the one to restore lacks. A newest snapshot that cannot be opened is no
    /// reason to restore none.
    pub(super) async fn revocations_to_carry(
        &self,
        found: &ClusterDetails,
    ) -> Result<BTreeMap<String, Vec<u8>>, CuratorCallError> {
        let digest = found.cluster.restoring.as_ref().and_then(|restoring| restoring.digest);
        let (Some(id), Some(digest)) = (found.cluster.restoring_from, digest) else {
            return Ok(BTreeMap::new());
        };
        let newest = self.bmdb.newest_sealed_snapshot(self.cluster).await?;
        let Some((newest_digest, newest)) = newest.filter(|(newest, _)| *newest != digest) else {
            return Ok(BTreeMap::new());
        };
        let newest = match self.open_snapshot(&newest, &newest_digest) {
            Ok(newest) => newest,
            Err(error) => {
                tracing::warn!(
                    cluster = self.name, %error,
                    "the newest snapshot cannot be opened, so what was revoked since the one to restore is not carried over"
                );
                return Ok(BTreeMap::new());
            }
        };
        let sealed = self.bmdb.read_sealed_snapshot(id).await?;
        let revocations = newest.revocations_since(&self.open_snapshot(&sealed, &digest)?);
        let bytes: usize = revocations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > MAX_REVOCATION_BYTES {
            return Err(CuratorCallError::OrderUnavailable(
                "more was revoked since the snapshot than an order can carry: restore the cluster from a later one with: \
                 shepherdctl cluster restore",
            ));
        }
        Ok(revocations)
    }

    /// Checks that the snapshot to restore can be opened, and that it is of this cluster.
    pub(super) async fn check_restored_snapshot(
        &self,
        found: &ClusterDetails,
        digest: &[u8],
    ) -> Result<(), CuratorCallError> {
        let Some(id) = found.cluster.restoring_from else { return Ok(()) };
        let sealed = self.bmdb.read_sealed_snapshot(id).await?;
        self.open_snapshot(&sealed, digest).map(drop)
    }

    /// Opens the stored snapshot with this SHA-256. By its sealed content it must be of this cluster: the columns of the
    /// database are not sealed.
    pub(super) fn open_snapshot(
        &self,
        sealed: &[u8],
        sha256: &[u8],
    ) -> Result<ClusterSnapshot, CuratorCallError> {
        let encoded = unseal_snapshot(&self.settings.secrets, sealed, sha256)?;
        let snapshot = ClusterSnapshot::decode(encoded.expose_secret())?;
        require_cluster(snapshot, self.cluster)
    }

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

/// The snapshot, if it is of this cluster.
fn require_cluster(snapshot: ClusterSnapshot, cluster: Uuid) -> Result<ClusterSnapshot, CuratorCallError> {
    if snapshot.cluster == cluster {
        return Ok(snapshot);
    }
    Err(CuratorCallError::OrderUnavailable(
        "the stored snapshot is of another cluster, so somebody changed the database; restore the cluster from one of its own \
         with: shepherdctl cluster restore",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::parse_timestamp;

    #[test]
    fn snapshot_of_another_cluster_is_not_used() {
        let (own, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let snapshot = ClusterSnapshot {
            cluster: own,
            name: "ams".to_owned(),
            epoch: 0,
            revision: 7,
            taken_at: parse_timestamp("taken_at", 1).unwrap(),
            records: BTreeMap::new(),
        };
        assert_eq!(require_cluster(snapshot.clone(), own).unwrap(), snapshot);
        let error = require_cluster(snapshot, other).unwrap_err().to_string();
        assert!(error.contains("is of another cluster"), "{error}");
    }
}
