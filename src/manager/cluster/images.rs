//! Takes, seals and stores images of the whole etcd of clusters, beside the passes.
//!
//! An image may have 2 GiB and take minutes. So it is taken by a task of its own, which holds a part of 1 MiB at a time:
//! the curator sends no more than this task takes. The task uses the lease of the cluster twice, to begin an image and to
//! complete it. It ends with the worker. What it has stored by then never counts, and is deleted.
//!
//! If there is none, that is no reason to have no snapshot, and it keeps no cluster from being converged.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use ring::digest::{Context, SHA256};
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::task::{JoinError, JoinHandle};
use tonic::Code;
use uuid::Uuid;

use crate::bmdb::cluster::image::{ImageSummary, NewImage};
use crate::bmdb::cluster::record::ClusterDetails;
use crate::bmdb::cluster::sealed_image::{PART_BYTES, PartPlace, seal_part};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::fleet::secret::{SecretError, SecretsKey};
use crate::curator_client::leader_channel::LeaderChannel;
use crate::manager::cluster::curators::{CuratorCallError, CuratorClient, call_curator};
use crate::manager::cluster::{COMPONENT, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::image::{FailedImage, MAX_IMAGE_BYTES, image_due};
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::snapshots_client::SnapshotsClient;

/// Time limit of an image: within that of the certificate with which it is requested.
const IMAGE_TIMEOUT: Duration = Duration::from_mins(50);
/// How long the curator may take from one chunk to the next: longer than its own etcd may.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(40);
const TAKING: &str = "taking an image of etcd";

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
enum ImageError {
    #[error(transparent)]
    Curator(#[from] CuratorCallError),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error("{TAKING}: the curator sent nothing for {} s", CHUNK_TIMEOUT.as_secs())]
    Stalled,
    #[error("{TAKING}: it was not all here within {} min", IMAGE_TIMEOUT.as_secs() / 60)]
    TimedOut,
    #[error("{TAKING}: it was abandoned, because another one was begun or its snapshot was deleted")]
    Abandoned,
    #[error("{TAKING}: its task was interrupted: {0}")]
    Interrupted(#[from] JoinError),
}

/// An image that is being taken, until this is dropped.
pub(super) struct ImageTask {
    snapshot: Uuid,
    task: JoinHandle<Result<ImageSummary, ImageError>>,
}

impl Drop for ImageTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ClusterWorker<'_> {
    /// Begins an image if one is due, and records the result of the one before. Returns what prevents images, if the last
    /// attempt failed.
    pub(super) async fn follow_image(&mut self, found: &ClusterDetails, now: Timestamp) -> Option<String> {
        let (last, has_kubernetes) = (found.cluster.snapshots.last.as_ref(), found.kubernetes.is_some());
        if let Some(mut ended) = self.image.take_if(|image| image.task.is_finished()) {
            // `found` is older than this result, so the next pass decides whether another one is due.
            let result = (&mut ended.task).await.unwrap_or_else(|error| Err(error.into()));
            self.failed_image = self.record_image_result(ended.snapshot, result, now);
        } else if self.image.is_none()
            && let Some(channel) = self.curators.as_ref().map(CuratorClient::channel)
            && let Some(snapshot) = image_due(last, has_kubernetes, self.failed_image.as_ref(), now)
        {
            let image = NewImage { id: Uuid::new_v4(), cluster: self.cluster, snapshot };
            let (bmdb, secrets) = (self.bmdb.clone(), self.settings.secrets.clone());
            let task = take_image(ImageJob { bmdb, secrets, lease: self.lease.clone(), channel, image });
            self.image = Some(ImageTask { snapshot, task: tokio::spawn(task) });
        }
        let failed = self.failed_image.as_ref().filter(|_| has_kubernetes)?;
        Some(format!("its snapshot has no Kubernetes objects: {}", failed.reason))
    }

    fn record_image_result(
        &self,
        snapshot: Uuid,
        result: Result<ImageSummary, ImageError>,
        now: Timestamp,
    ) -> Option<FailedImage> {
        match result {
            Ok(ImageSummary { parts, bytes, revision, .. }) => {
                tracing::info!(
                    cluster = self.name, %snapshot, revision, bytes, parts, "an image of etcd is stored"
                );
                None
            }
            Err(error) => {
                tracing::warn!(cluster = self.name, %snapshot, %error, "no image of etcd could be taken");
                Some(FailedImage { snapshot, at: now, reason: error.to_string() })
            }
        }
    }
}

/// What an image is taken with.
struct ImageJob {
    bmdb: Bmdb,
    secrets: Arc<SecretsKey>,
    lease: NamedLease,
    channel: LeaderChannel,
    image: NewImage,
}

async fn take_image(job: ImageJob) -> Result<ImageSummary, ImageError> {
    job.bmdb.begin_cluster_image(&job.lease, job.image).await?;
    failpoint::hit(COMPONENT, "image-begun");
    let stored = tokio::time::timeout(IMAGE_TIMEOUT, store_parts(&job)).await;
    let summary = match stored.unwrap_or(Err(ImageError::TimedOut)) {
        Ok(summary) => summary,
        Err(error) => {
            // The first error is returned. If this fails, the parts are deleted some hours later.
            let _ = job.bmdb.abandon_cluster_image(job.image.id).await;
            return Err(error);
        }
    };
    if job.bmdb.complete_cluster_image(&job.lease, job.image.id, summary.clone()).await? {
        Ok(summary)
    } else {
        Err(ImageError::Abandoned)
    }
}

/// Stores every part as it arrives, and verifies the digest at the end.
async fn store_parts(job: &ImageJob) -> Result<ImageSummary, ImageError> {
    let mut snapshots = SnapshotsClient::new(job.channel.clone());
    let taken = call_curator(TAKING, snapshots.take_image(wire::TakeImageRequest {})).await;
    let mut messages = taken.map_err(explain_earlier_release)?;
    let mut splitter = PartSplitter::new();
    loop {
        let message = tokio::time::timeout(CHUNK_TIMEOUT, messages.message()).await;
        let message = message.map_err(|_| ImageError::Stalled)?;
        let message = message.map_err(|status| CuratorCallError::Rejected { operation: TAKING, status })?;
        let Some(message) = message else {
            return Err(invalid_image("an image of etcd that was cut off").into());
        };
        if !message.sha256.is_empty() {
            let (number, part, summary) = splitter.finish(message)?;
            store_part(job, (number, Some(summary.parts)), part).await?;
            return Ok(summary);
        }
        splitter.count(&message.chunk)?;
        let mut rest = message.chunk.as_slice();
        while let Some((number, part)) = splitter.split_part(&mut rest) {
            store_part(job, (number, None), part).await?;
        }
    }
}

async fn store_part(
    job: &ImageJob,
    (number, last_of): (u64, Option<u64>),
    part: Vec<u8>,
) -> Result<(), ImageError> {
    let NewImage { id, cluster, snapshot } = job.image;
    let place = PartPlace { cluster, snapshot, image: id, number, last_of };
    let (secrets, part) = (job.secrets.clone(), SecretSlice::from(part));
    let sealing = tokio::task::spawn_blocking(move || seal_part(&secrets, &place, part.expose_secret()));
    let sealed = sealing.await??;
    if !job.bmdb.store_image_part(id, number, sealed).await? {
        return Err(ImageError::Abandoned);
    }
    failpoint::hit(COMPONENT, "image-part-stored");
    Ok(())
}

fn invalid_image(what: &str) -> CuratorCallError {
    CuratorCallError::InvalidResponse(what.to_owned())
}

fn explain_earlier_release(error: CuratorCallError) -> CuratorCallError {
    match error {
        CuratorCallError::Rejected { status, .. } if status.code() == Code::Unimplemented => {
            CuratorCallError::OrderUnavailable(
                "its leading curator is of a release that sends no images of etcd: update its role servers",
            )
        }
        other => other,
    }
}

/// Cuts what a curator sends into parts, and verifies it.
struct PartSplitter {
    /// The bytes of the next part so far.
    pending: Vec<u8>,
    /// The number of the next part.
    number: u64,
    bytes: u64,
    digest: Context,
}

impl PartSplitter {
    fn new() -> Self {
        Self { pending: Vec::with_capacity(PART_BYTES), number: 0, bytes: 0, digest: Context::new(&SHA256) }
    }

    /// Counts a chunk, all of which is split next.
    fn count(&mut self, chunk: &[u8]) -> Result<(), CuratorCallError> {
        self.bytes = self.bytes.saturating_add(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
        if self.bytes > MAX_IMAGE_BYTES {
            return Err(invalid_image("an image of etcd that is larger than etcd may be"));
        }
        self.digest.update(chunk);
        Ok(())
    }

    /// Takes bytes of a chunk until a part is full and more bytes follow it: the last part of an image is split by
    /// [`Self::finish`]. Returns the number of the part, and the part.
    fn split_part(&mut self, chunk: &mut &[u8]) -> Option<(u64, Vec<u8>)> {
        while !chunk.is_empty() {
            if self.pending.len() == PART_BYTES {
                let number = self.number;
                self.number += 1;
                return Some((number, mem::replace(&mut self.pending, Vec::with_capacity(PART_BYTES))));
            }
            let (taken, rest) = chunk.split_at(chunk.len().min(PART_BYTES - self.pending.len()));
            self.pending.extend_from_slice(taken);
            *chunk = rest;
        }
        None
    }

    /// Verifies the image by the last message. Returns the number of the last part, the part, and the summary.
    fn finish(self, last: wire::TakeImageResponse) -> Result<(u64, Vec<u8>, ImageSummary), CuratorCallError> {
        let digest = self.digest.finish();
        if self.bytes == 0 || self.bytes != last.bytes || digest.as_ref() != last.sha256 {
            return Err(invalid_image("an image of etcd that was cut off or changed on its way"));
        }
        let digest =
            last.sha256.try_into().map_err(|_| invalid_image("an image of etcd without its SHA-256"))?;
        let summary = ImageSummary {
            parts: self.number + 1,
            bytes: self.bytes,
            digest,
            revision: last.revision,
            etcd_version: last.etcd_version,
        };
        Ok((self.number, self.pending, summary))
    }
}

#[cfg(test)]
mod tests {
    use ring::digest::digest;

    use super::*;

    /// The parts of an image that arrives in chunks of this size, and how the image ends.
    fn split(
        image: &[u8],
        chunk: usize,
        last: wire::TakeImageResponse,
    ) -> (Vec<Vec<u8>>, Result<ImageSummary, String>) {
        let (mut splitter, mut parts) = (PartSplitter::new(), Vec::new());
        for mut chunk in image.chunks(chunk) {
            splitter.count(chunk).unwrap();
            while let Some((number, part)) = splitter.split_part(&mut chunk) {
                assert_eq!(number, u64::try_from(parts.len()).unwrap());
                parts.push(part);
            }
        }
        match splitter.finish(last) {
            Ok((number, part, summary)) => {
                assert_eq!(number, u64::try_from(parts.len()).unwrap());
                parts.push(part);
                (parts, Ok(summary))
            }
            Err(error) => (parts, Err(error.to_string())),
        }
    }

    fn last_message(image: &[u8]) -> wire::TakeImageResponse {
        wire::TakeImageResponse {
            chunk: Vec::new(),
            sha256: digest(&SHA256, image).as_ref().to_vec(),
            bytes: u64::try_from(image.len()).unwrap(),
            revision: 7,
            etcd_version: "3.6.1".to_owned(),
        }
    }

    #[test]
    fn every_part_but_the_last_is_full() {
        for (bytes, expected) in
            [(1, 1), (PART_BYTES - 1, 1), (PART_BYTES, 1), (PART_BYTES + 1, 2), (3 * PART_BYTES, 3)]
        {
            let image = vec![7; bytes];
            for chunk in [32 << 10, 1_000_003, 4 << 20] {
                let (parts, summary) = split(&image, chunk, last_message(&image));
                let summary = summary.unwrap();
                assert_eq!((parts.len(), summary.parts), (expected, u64::try_from(expected).unwrap()));
                assert!(parts[..expected - 1].iter().all(|part| part.len() == PART_BYTES), "{bytes}");
                assert_eq!(parts.concat().len(), bytes);
                assert_eq!(summary.bytes, u64::try_from(bytes).unwrap());
            }
        }
    }

    #[test]
    fn image_that_is_larger_than_etcd_may_be_is_rejected() {
        let mut splitter = PartSplitter { bytes: MAX_IMAGE_BYTES - 1, ..PartSplitter::new() };
        assert!(splitter.count(&[7]).is_ok());
        let error = splitter.count(&[7]).unwrap_err().to_string();
        assert!(error.contains("an image of etcd that is larger than etcd may be"), "{error}");
    }

    #[test]
    fn image_that_was_changed_on_its_way_is_rejected() {
        let image = vec![7; 1_000];
        let right = last_message(&image);
        for (what, image, last) in [
            ("cut off", &image[..999], right.clone()),
            ("nothing", &image[..0], last_message(&[])),
            ("another digest", &image[..], last_message(&[8; 1_000])),
            ("another size", &image[..], wire::TakeImageResponse { bytes: 999, ..right.clone() }),
        ] {
            let (_, summary) = split(image, 100, last);
            let error = summary.err().unwrap_or_else(|| panic!("it was accepted: {what}"));
            assert!(error.contains("cut off or changed on its way"), "{what}: {error}");
        }
        assert!(split(&image, 100, right).1.is_ok());
    }
}
