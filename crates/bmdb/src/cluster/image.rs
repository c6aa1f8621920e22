//! Images of the whole etcd of a cluster: begin, store part by part, complete, read.
//!
//! An image belongs to a snapshot, and has what the snapshot lacks: every object of Kubernetes. It may have 2 GiB, so no
//! transaction writes all of it. It is begun under the cluster's lease, its parts are written one by one without it, and it
//! is completed under the lease again. **Only a completed image counts.** It is completed only if all its parts are stored.
//!
//! Each attempt has an id of its own. A shepherd that lost the lease in the middle cannot mix its parts with those of the
//! next holder: beginning an image abandons all unfinished ones of the cluster, and an abandoned one takes no part. What
//! is abandoned, what a dead shepherd left unfinished, and the images of snapshots that are not retained any more, are
//! deleted in small batches ([`crate::fleet::retention`]).
//!
//! Parts are sealed by the caller ([`super::sealed_image`]).

use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::named_lease::NamedLease;

const STORING: &str = "storing an image of etcd";

/// An image that is begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// Id of the image: another one for each attempt.
    pub id: Uuid,
    /// The cluster that the etcd belongs to.
    pub cluster: Uuid,
    /// The snapshot that the image belongs to.
    pub snapshot: Uuid,
}

/// What is known of an image once all of it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSummary {
    /// Number of its parts, at least one.
    pub parts: u64,
    /// Size in bytes, before sealing.
    pub bytes: u64,
    /// SHA-256 of the whole image, before sealing.
    pub digest: [u8; 32],
    /// The image has every write up to this revision of etcd, and may have more.
    pub revision: i64,
    /// Version of the etcd that sent it.
    pub etcd_version: String,
}

fn to_i64(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Bmdb {
    /// Begins an image, and abandons every unfinished one of the cluster.
    pub async fn begin_cluster_image(&self, lease: &NamedLease, new: NewImage) -> Result<(), BmdbError> {
        self.transact_under_lease(STORING, lease, new, |tx, new| {
            Box::pin(async move {
                sqlx::query!(
                    "UPDATE cluster_image SET abandoned = TRUE
                     WHERE cluster_id = $1 AND completed_at IS NULL AND NOT abandoned",
                    new.cluster
                )
                .execute(&mut *tx)
                .await
                .context(STORING)?;
                sqlx::query!(
                    "INSERT INTO cluster_image (image_id, cluster_id, snapshot_id, begun_at)
                     VALUES ($1, $2, $3, clock_timestamp())",
                    new.id,
                    new.cluster,
                    new.snapshot
                )
                .execute(&mut *tx)
                .await
                .context(STORING)?;
                Ok(())
            })
        })
        .await
    }

    /// Stores a sealed part. Returns whether the image takes parts: `false` once it is abandoned, completed or deleted.
    pub async fn store_image_part(
        &self,
        image: Uuid,
        number: u64,
        sealed: Vec<u8>,
    ) -> Result<bool, BmdbError> {
        let arguments = (image, to_i64(number), sealed);
        let stored = self
            .statement_with("storing a part of an image of etcd", arguments, |connection, arguments| {
                let (image, number, sealed) = arguments;
                Box::pin(
                    sqlx::query_file!("../../sql/cluster/store_image_part.sql", *image, *number, sealed)
                        .execute(connection),
                )
            })
            .await?;
        Ok(stored.rows_affected() == 1)
    }

    /// Completes an image. Returns `false`, and completes nothing, if a part is missing, or if the image was abandoned.
    pub async fn complete_cluster_image(
        &self,
        lease: &NamedLease,
        image: Uuid,
        summary: ImageSummary,
    ) -> Result<bool, BmdbError> {
        self.transact_under_lease(STORING, lease, summary, move |tx, summary| {
            Box::pin(async move {
                let completed = sqlx::query_file!(
                    "../../sql/cluster/complete_image.sql",
                    image,
                    to_i64(summary.parts),
                    to_i64(summary.bytes),
                    summary.digest.as_slice(),
                    summary.revision,
                    summary.etcd_version
                )
                .execute(tx)
                .await
                .context(STORING)?;
                Ok(completed.rows_affected() == 1)
            })
        })
        .await
    }

    /// Abandons an image that is not completed: its parts are deleted soon.
    pub async fn abandon_cluster_image(&self, image: Uuid) -> Result<(), BmdbError> {
        self.statement("abandoning an image of etcd", move |connection| {
            Box::pin(
                sqlx::query!(
                    "UPDATE cluster_image SET abandoned = TRUE WHERE image_id = $1 AND completed_at IS NULL",
                    image
                )
                .execute(connection),
            )
        })
        .await
        .map(drop)
    }

    /// A sealed part of an image; `None` if it does not exist.
    pub async fn read_image_part(&self, image: Uuid, number: u64) -> Result<Option<Vec<u8>>, BmdbError> {
        let number = to_i64(number);
        self.statement("reading a part of an image of etcd", move |connection| {
            Box::pin(
                sqlx::query_scalar!(
                    "SELECT sealed FROM cluster_image_part WHERE image_id = $1 AND number = $2",
                    image,
                    number
                )
                .fetch_optional(connection),
            )
        })
        .await
    }
}
