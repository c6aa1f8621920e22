//! gRPC service Artefacts: piecewise upload of files.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::IncomingOrder;
use crate::api::validate::single_line;
use bmdb::fleet::artefact::upload::{SignedUpload, UploadState};
use bmdb::fleet::artefact::{list_artefacts, order_target};
use model::artefact::{ArtefactView, check_name, check_size, parse_digest};
use model::role_declaration::Sha256;
use model::rpc_name::{ADD_ARTEFACT_RPC, DELETE_ARTEFACT_RPC};
use model::signed_artefact::decide_upload;
use model::signed_artefact::signature::ArtefactSignature;
use proto::fleet::v1;
use proto::fleet::v1::artefacts_server::Artefacts;

/// Largest request of the call that uploads a piece: one of 256 KiB is a third larger in JSON.
pub const PUT_LIMIT: usize = 384 << 10;
/// Longest name of an artefact in a request, in characters.
const MAX_NAME_CHARS: usize = 100;

/// The gRPC service `Artefacts`.
pub struct ArtefactsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

impl ArtefactsService {
    /// Decides from a signature alone whether its file may be added; `None` without one.
    fn accept_signature(&self, text: &str) -> Result<Option<SignedUpload>, Status> {
        if text.is_empty() {
            return Ok(None);
        }
        let refused = |reason: String| invalid_argument("signature", reason);
        let signature = ArtefactSignature::parse(text).map_err(|error| refused(error.to_string()))?;
        let trust = self.context.signing.trust();
        let key = decide_upload(&signature, &trust).map_err(|error| refused(error.to_string()))?.clone();
        Ok(Some(SignedUpload { signature, key }))
    }
}

fn parse_digest_field(text: &str) -> Result<Sha256, Status> {
    parse_digest(text).map_err(|reason| invalid_argument("sha256", reason))
}

#[tonic::async_trait]
impl Artefacts for ArtefactsService {
    async fn list(
        &self,
        _: Request<v1::ListArtefactsRequest>,
    ) -> Result<Response<v1::ListArtefactsResponse>, Status> {
        let look = self.context.read_pool.read(|tx| Box::pin(async move { list_artefacts(tx).await }));
        let (found, now) = look.await.map_err(bmdb_status)?;
        let artefacts = found.into_iter().map(encode_artefact).collect();
        Ok(Response::new(v1::ListArtefactsResponse { artefacts, read_at: Some(encode_timestamp(now)) }))
    }

    async fn begin_upload(
        &self,
        request: Request<v1::BeginUploadRequest>,
    ) -> Result<Response<v1::BeginUploadResponse>, Status> {
        let body = request.get_ref();
        let sha256 = parse_digest_field(&body.sha256)?;
        check_size(body.size).map_err(|reason| invalid_argument("size", reason))?;
        let begun = self.context.bmdb.begin_artefact_upload(sha256, body.size).await.map_err(bmdb_status)?;
        Ok(Response::new(match begun {
            UploadState::Complete => v1::BeginUploadResponse { complete: true, missing_pieces: Vec::new() },
            UploadState::Missing(missing) => {
                v1::BeginUploadResponse { complete: false, missing_pieces: missing }
            }
        }))
    }

    async fn put_piece(
        &self,
        request: Request<v1::PutPieceRequest>,
    ) -> Result<Response<v1::PutPieceResponse>, Status> {
        let body = request.into_inner();
        let sha256 = parse_digest_field(&body.sha256)?;
        let piece = body.piece.unwrap_or_default().bytes;
        self.context.bmdb.store_artefact_piece(sha256, body.number, piece).await.map_err(bmdb_status)?;
        Ok(Response::new(v1::PutPieceResponse {}))
    }

    async fn add(
        &self,
        request: Request<v1::AddArtefactRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let sha256 = parse_digest_field(&body.sha256)?;
        check_name(&body.name).map_err(|reason| invalid_argument("name", reason))?;
        let signed = self.accept_signature(&body.signature)?;
        IncomingOrder { rpc: ADD_ARTEFACT_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&body.name), |order| {
                self.context.bmdb.add_signed_artefact(order, sha256, body.name.clone(), signed)
            })
            .await
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteArtefactRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let body = request.get_ref();
        let artefact = single_line("artefact", &body.artefact, MAX_NAME_CHARS)?.to_owned();
        IncomingOrder { rpc: DELETE_ARTEFACT_RPC, request: &request, order: body.order.as_ref() }
            .execute(order_target(&artefact), |order| self.context.bmdb.delete_artefact(order, artefact))
            .await
    }
}

fn encode_artefact(view: ArtefactView) -> v1::Artefact {
    v1::Artefact {
        sha256: view.sha256,
        size: view.size,
        name: view.name.unwrap_or_default(),
        upload_started_at: Some(encode_timestamp(view.upload_started_at)),
        added_at: view.added_at.map(encode_timestamp),
        added_by: view.added_by.unwrap_or_default(),
        uploaded_pieces: view.pieces,
        kubernetes_version: view.kubernetes,
        signing_key_id: view.signing_key_id.unwrap_or_default(),
        signed_comment: view.signed_comment.unwrap_or_default(),
    }
}
