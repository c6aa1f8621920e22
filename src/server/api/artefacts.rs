//! The service `Artefacts`.

use tonic::{Request, Response, Status};

use crate::bmdb::artefact::{Begun, artefacts, target};
use crate::model::artefact::{ArtefactView, check_name, check_size, read_digest};
use crate::model::declaration::Sha256;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::artefacts_server::Artefacts;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;
use crate::server::api::texts::line;

const ADD: &str = "shepherd.fleet.v1.Artefacts/Add";
const DELETE: &str = "shepherd.fleet.v1.Artefacts/Delete";
/// The call that brings a piece, whose requests are larger than others.
pub const PUT: &str = "shepherd.fleet.v1.Artefacts/Put";
/// Largest request of it: a piece of 256 KiB, in JSON a third more.
pub const PUT_LIMIT: usize = 384 << 10;
/// Longest name of an artefact in a request, in characters.
const LONGEST: usize = 100;

/// The service.
pub struct ArtefactsService {
    /// What it stands on.
    pub site: Site,
}

fn digest(said: &str) -> Result<Sha256, Status> {
    read_digest(said).map_err(|said| wrong("sha256", said))
}

#[tonic::async_trait]
impl Artefacts for ArtefactsService {
    async fn list(
        &self,
        _: Request<v1::ListArtefactsRequest>,
    ) -> Result<Response<v1::ListArtefactsResponse>, Status> {
        let look = self.site.looks.look(|tx| Box::pin(async move { artefacts(tx).await }));
        let (found, now) = look.await.map_err(of_bmdb)?;
        let artefacts = found.into_iter().map(artefact).collect();
        Ok(Response::new(v1::ListArtefactsResponse { artefacts, at: Some(at(now)) }))
    }

    async fn begin(
        &self,
        request: Request<v1::BeginArtefactRequest>,
    ) -> Result<Response<v1::BeginArtefactResponse>, Status> {
        let asked = request.get_ref();
        let sha256 = digest(&asked.sha256)?;
        check_size(asked.size).map_err(|said| wrong("size", said))?;
        let begun = self.site.bmdb.begin_artefact(sha256, asked.size).await.map_err(of_bmdb)?;
        Ok(Response::new(match begun {
            Begun::Whole => v1::BeginArtefactResponse { whole: true, missing: Vec::new() },
            Begun::Missing(missing) => v1::BeginArtefactResponse { whole: false, missing },
        }))
    }

    async fn put(
        &self,
        request: Request<v1::PutPieceRequest>,
    ) -> Result<Response<v1::PutPieceResponse>, Status> {
        let asked = request.into_inner();
        let sha256 = digest(&asked.sha256)?;
        let piece = asked.piece.unwrap_or_default().bytes;
        self.site.bmdb.put_piece(sha256, asked.number, piece).await.map_err(of_bmdb)?;
        Ok(Response::new(v1::PutPieceResponse {}))
    }

    async fn add(
        &self,
        request: Request<v1::AddArtefactRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let sha256 = digest(&asked.sha256)?;
        check_name(&asked.name).map_err(|said| wrong("name", said))?;
        let order = Said { rpc: ADD, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&asked.name))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried =
            self.site.bmdb.add_artefact(order, sha256, asked.name.clone()).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }

    async fn delete(
        &self,
        request: Request<v1::DeleteArtefactRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let artefact = line("artefact", &asked.artefact, LONGEST)?.to_owned();
        let order = Said { rpc: DELETE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&artefact))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.delete_artefact(order, artefact).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

fn artefact(view: ArtefactView) -> v1::Artefact {
    v1::Artefact {
        sha256: view.sha256,
        size: view.size,
        name: view.name.unwrap_or_default(),
        begun_at: Some(at(view.begun_at)),
        added_at: view.added_at.map(at),
        added_by: view.added_by.unwrap_or_default(),
        pieces: view.pieces,
        kubernetes: view.kubernetes,
    }
}
