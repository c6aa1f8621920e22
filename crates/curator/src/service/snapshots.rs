//! gRPC service Snapshots: streams a cluster snapshot.

use std::sync::Arc;

use curator_client::cluster_snapshot::{ClusterSnapshot, ClusterSnapshotError, snapshot_digest};
use etcd::key_space::ROOT;
use etcd::namespace::KeySelector;
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
