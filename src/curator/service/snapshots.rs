//! Snapshots of the cluster, for whoever keeps them elsewhere.

use std::sync::Arc;

use tonic::{Code, Request, Response, Status};

use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Answers, Caller, Leading};
use crate::curator::snapshot::{Snapshot, SnapshotError, digest_of};
use crate::etcd::key_space::ROOT;
use crate::etcd::namespace::Keys;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::snapshots_server;

/// Bytes of one answer.
const PIECE: usize = 256 << 10;

/// The service.
#[derive(Clone, Debug)]
pub struct SnapshotsService(pub Arc<Leading>);

#[tonic::async_trait]
impl snapshots_server::Snapshots for SnapshotsService {
    type TakeStream = Answers<wire::TakeSnapshotResponse>;

    async fn take(
        &self,
        request: Request<wire::TakeSnapshotRequest>,
    ) -> Result<Response<Self::TakeStream>, Status> {
        let caller = Caller::of(&request)?;
        let client = self.0.store.client();
        let listing = client.list(&Keys::Under(ROOT.to_owned())).await.map_err(Failure::from)?;
        let snapshot = Snapshot::of(listing, self.0.clock.now()).map_err(|error| refused(&error))?;
        let encoded = snapshot.encode().map_err(|error| refused(&error))?;
        tracing::info!(
            revision = snapshot.revision, bytes = encoded.len(), by = %caller.peer, "a snapshot was taken"
        );
        let pieces = futures::stream::iter(pieces(&encoded).into_iter().map(Ok));
        Ok(Response::new(self.0.stream(&caller, pieces)))
    }
}

fn refused(error: &SnapshotError) -> Status {
    let code = match error {
        SnapshotError::TooLarge(_) => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    Failure::refused(code, error.to_string()).into()
}

fn pieces(encoded: &[u8]) -> Vec<wire::TakeSnapshotResponse> {
    let mut pieces: Vec<wire::TakeSnapshotResponse> = encoded
        .chunks(PIECE)
        .map(|piece| wire::TakeSnapshotResponse { piece: piece.to_vec(), sha256: Vec::new() })
        .collect();
    if let Some(last) = pieces.last_mut() {
        last.sha256 = digest_of(encoded).to_vec();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_piece_says_what_the_whole_is_known_by() {
        for size in [1, PIECE, PIECE + 1, 3 * PIECE] {
            let whole = vec![7; size];
            let pieces = pieces(&whole);
            let sent: Vec<u8> = pieces.iter().flat_map(|piece| piece.piece.clone()).collect();
            assert_eq!(sent, whole);
            let (last, before) = pieces.split_last().unwrap();
            assert_eq!(last.sha256, digest_of(&whole));
            assert!(before.iter().all(|piece| piece.sha256.is_empty()));
        }
    }
}
