//! Snapshots of clusters: taken from their curators, packed, sealed and kept.
//!
//! What a curator answers is looked at before it is kept: a snapshot that nothing could be restored from is none.

use secrecy::SecretSlice;
use uuid::Uuid;

use crate::bmdb::cluster_snapshot::NewSnapshot;
use crate::bmdb::sealed_snapshot::seal;
use crate::curator::snapshot::digest_of;
use crate::manager::cluster::curators::CuratorError;
use crate::manager::cluster::{PassError, Tending};
use crate::model::cluster::snapshot::{Why, voters};
use crate::model::cluster::state::Seen;
use crate::model::time::Timestamp;

impl Tending<'_> {
    /// Takes a snapshot and keeps it; the inner error is what stands in the way of that for now.
    pub(super) async fn take_snapshot(
        &self,
        why: Why,
        seen: &Seen,
        now: Timestamp,
    ) -> Result<Result<(), CuratorError>, PassError> {
        let Some(way) = &self.way else { return Ok(Ok(())) };
        let (snapshot, encoded) = match way.snapshot().await {
            Ok(taken) => taken,
            Err(error) => return Ok(Err(error)),
        };
        if snapshot.cluster != self.cluster {
            return Ok(Err(CuratorError::Odd("a snapshot of another cluster".to_owned())));
        }
        let (bytes, digest) = (encoded.len(), digest_of(&encoded));
        let sealed = seal(&self.settings.secrets, &SecretSlice::from(encoded)).map_err(CuratorError::from)?;
        let new = NewSnapshot {
            id: Uuid::new_v4(),
            taken_at: now,
            why,
            revision: snapshot.revision,
            epoch: snapshot.epoch,
            bytes,
            nodes: snapshot.nodes().map_err(CuratorError::from)?.len(),
            members: snapshot.members().map_err(CuratorError::from)?.len(),
            voters: voters(seen),
            digest,
            sealed,
        };
        let revision = new.revision;
        let forgotten = self.bmdb.keep_snapshot(&self.lease, self.cluster, new).await?;
        tracing::info!(cluster = self.name, %why, revision, bytes, forgotten, "a snapshot of a cluster is kept");
        Ok(Ok(()))
    }
}
