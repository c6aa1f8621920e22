//! gRPC service Snapshots: streams a cluster snapshot, or an image of the whole etcd.
//!
//! A snapshot is small, and read as a whole before it is sent. An image may have 2 GiB: its chunks are forwarded as etcd
//! sends them, so this process has one of them in memory, and etcd waits for a slow caller.

use std::sync::Arc;

use curator_client::cluster_snapshot::{ClusterSnapshot, ClusterSnapshotError, snapshot_digest};
use etcd::key_space::ROOT;
use etcd::namespace::KeySelector;
use etcd::snapshot_file::SnapshotStream;
use futures::Stream;
use model::cluster::state::MAX_ETCD_BYTES;
use proto::curator::v1 as wire;
use proto::curator::v1::snapshots_server;
use tonic::{Code, Request, Response, Status};

use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext, ResponseStream};

/// Bytes of the snapshot in one message.
const CHUNK_BYTES: usize = 256 << 10;

#[derive(Clone, Debug)]
pub(super) struct SnapshotsService(pub(super) Arc<LeaderContext>);

#[tonic::async_trait]
impl snapshots_server::Snapshots for SnapshotsService {
    type TakeStream = ResponseStream<wire::TakeSnapshotResponse>;
    type TakeImageStream = ResponseStream<wire::TakeImageResponse>;

    async fn take(
        &self,
        request: Request<wire::TakeSnapshotRequest>,
    ) -> Result<Response<Self::TakeStream>, Status> {
        let caller = Caller::from_request(&request)?;
        let client = self.0.store.client();
        let listing = client.list(&KeySelector::Prefix(ROOT.to_owned())).await.map_err(ServiceError::from)?;
        let snapshot = ClusterSnapshot::from_listing(listing, self.0.clock.now())
            .map_err(|error| snapshot_error_status(&error))?;
        let encoded = snapshot.encode().map_err(|error| snapshot_error_status(&error))?;
        tracing::info!(
            revision = snapshot.revision, bytes = encoded.len(), actor = %caller.peer, "a snapshot was taken"
        );
        let pieces = futures::stream::iter(split_into_chunks(&encoded).into_iter().map(Ok));
        Ok(Response::new(self.0.guard_stream(&caller, pieces)))
    }

    async fn take_image(
        &self,
        request: Request<wire::TakeImageRequest>,
    ) -> Result<Response<Self::TakeImageStream>, Status> {
        let caller = Caller::from_request(&request)?;
        let client = self.0.store.client();
        // The member that answers this read has applied every write that was made before. It sends the image, too.
        client.get(ROOT).await.map_err(ServiceError::from)?;
        let status = client.status().await.map_err(ServiceError::from)?;
        check_database_size(status.database_bytes)?;
        let image = client.open_snapshot().await.map_err(ServiceError::from)?;
        tracing::info!(
            revision = image.source().revision, bytes = status.database_bytes, actor = %caller.peer,
            "an image of etcd is sent"
        );
        Ok(Response::new(self.0.guard_stream(&caller, forward_image(image))))
    }
}

fn check_database_size(bytes: u64) -> Result<(), ServiceError> {
    if bytes <= MAX_ETCD_BYTES {
        return Ok(());
    }
    let text = format!(
        "the database file of etcd has {bytes} bytes, and images are sent of {MAX_ETCD_BYTES} at most: delete what is \
         not needed, then defragment etcd"
    );
    Err(ServiceError::rejected(Code::ResourceExhausted, text))
}

/// The messages of an image.
fn forward_image(
    image: SnapshotStream,
) -> impl Stream<Item = Result<wire::TakeImageResponse, Status>> + Send + 'static {
    futures::stream::unfold(Some(image), |image| async move {
        let mut image = image?;
        match image.next_chunk().await {
            Ok(Some(chunk)) => {
                Some((Ok(wire::TakeImageResponse { chunk, ..Default::default() }), Some(image)))
            }
            Ok(None) => Some((last_message(image).map_err(Status::from), None)),
            Err(error) => Some((Err(ServiceError::from(error).into()), None)),
        }
    })
}

fn last_message(image: SnapshotStream) -> Result<wire::TakeImageResponse, ServiceError> {
    let source = image.source().clone();
    let sent = image.finish().map_err(|flaw| {
        ServiceError::rejected(Code::DataLoss, format!("the image of etcd is damaged: {flaw}; take another"))
    })?;
    Ok(wire::TakeImageResponse {
        chunk: Vec::new(),
        sha256: sent.sha256.to_vec(),
        bytes: sent.bytes,
        revision: source.revision,
        etcd_version: source.version,
    })
}

fn snapshot_error_status(error: &ClusterSnapshotError) -> Status {
    let code = match error {
        ClusterSnapshotError::TooLarge(_) => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    ServiceError::rejected(code, error.to_string()).into()
}

fn split_into_chunks(encoded: &[u8]) -> Vec<wire::TakeSnapshotResponse> {
    let mut pieces: Vec<wire::TakeSnapshotResponse> = encoded
        .chunks(CHUNK_BYTES)
        .map(|piece| wire::TakeSnapshotResponse { chunk: piece.to_vec(), sha256: Vec::new() })
        .collect();
    if let Some(last) = pieces.last_mut() {
        last.sha256 = snapshot_digest(encoded).to_vec();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_of_more_than_two_gibibytes_is_refused() {
        for (bytes, accepted) in [(0, true), (2_147_483_648, true), (2_147_483_649, false), (u64::MAX, false)]
        {
            let checked = check_database_size(bytes);
            assert_eq!(checked.is_ok(), accepted, "{bytes}");
            let Err(error) = checked else { continue };
            assert_eq!(error.code(), Code::ResourceExhausted);
            assert!(error.to_string().contains("defragment etcd"), "{error}");
        }
    }

    #[test]
    fn only_the_last_chunk_carries_the_digest() {
        for size in [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
            let whole = vec![7; size];
            let pieces = split_into_chunks(&whole);
            let sent: Vec<u8> = pieces.iter().flat_map(|piece| piece.chunk.clone()).collect();
            assert_eq!(sent, whole);
            let (last, before) = pieces.split_last().unwrap();
            assert_eq!(last.sha256, snapshot_digest(&whole));
            assert!(before.iter().all(|piece| piece.sha256.is_empty()));
        }
    }
}
