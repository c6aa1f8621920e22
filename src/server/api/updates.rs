//! The service `Updates`.

use tonic::{Request, Response, Status};

use crate::bmdb::roll_out::{NewRollOut, RollOutChange, roll_outs, target};
use crate::model::roll_out_view::{RollOutMachineView, RollOutView};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::updates_server::Updates;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;
use crate::server::api::texts::line;

const CREATE: &str = "shepherd.fleet.v1.Updates/Create";
const PAUSE: &str = "shepherd.fleet.v1.Updates/Pause";
const RESUME: &str = "shepherd.fleet.v1.Updates/Resume";
const ABORT: &str = "shepherd.fleet.v1.Updates/Abort";
/// Longest name of a release in a request, in characters.
const LONGEST: usize = 100;
/// How long a machine may take when nobody says, in seconds.
const DEADLINE: u32 = 120;

/// The service.
pub struct UpdatesService {
    /// What it stands on.
    pub site: Site,
}

impl UpdatesService {
    async fn change(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
        (rpc, change): (&'static str, RollOutChange),
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let id = line("id", &asked.id, LONGEST)?.to_owned();
        let order = Said { rpc, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&id))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.change_roll_out(order, id, change).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

#[tonic::async_trait]
impl Updates for UpdatesService {
    async fn list(
        &self,
        request: Request<v1::ListUpdatesRequest>,
    ) -> Result<Response<v1::ListUpdatesResponse>, Status> {
        let id = Some(request.into_inner().id).filter(|id| !id.is_empty());
        let look = self.site.looks.look(move |tx| {
            let id = id.clone();
            Box::pin(async move { roll_outs(tx, id.as_deref()).await })
        });
        let (found, now) = look.await.map_err(of_bmdb)?;
        let updates = found.into_iter().map(update).collect();
        Ok(Response::new(v1::ListUpdatesResponse { updates, at: Some(at(now)) }))
    }

    async fn create(
        &self,
        request: Request<v1::CreateUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let new = NewRollOut {
            release: line("release", &asked.release, LONGEST)?.to_owned(),
            selector: asked.select.parse().map_err(|said: String| wrong("select", said))?,
            parallelism: asked.parallelism.max(1),
            deadline_seconds: if asked.deadline_seconds == 0 { DEADLINE } else { asked.deadline_seconds },
        };
        let order = Said { rpc: CREATE, request: asked, order: asked.order.as_ref() }
            .read(&caller, target(&new.release))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.roll_out(order, new).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }

    async fn pause(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (PAUSE, RollOutChange::Pause)).await
    }

    async fn resume(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (RESUME, RollOutChange::Resume)).await
    }

    async fn abort(
        &self,
        request: Request<v1::ChangeUpdateRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        self.change(request, (ABORT, RollOutChange::Abort)).await
    }
}

fn update(view: RollOutView) -> v1::Update {
    v1::Update {
        id: view.id,
        release: view.release,
        sha256: view.sha256,
        select: view.select,
        parallelism: view.parallelism,
        deadline_seconds: view.deadline_seconds,
        created_at: Some(at(view.created_at)),
        created_by: view.created_by,
        reason: view.reason,
        paused: view.paused,
        ended_at: view.ended_at.map(at),
        ended: view.ended,
        counts: view.counts,
        machines: view.machines.into_iter().map(machine).collect(),
    }
}

fn machine(view: RollOutMachineView) -> v1::UpdateMachine {
    v1::UpdateMachine {
        machine: view.machine,
        name: view.name,
        state: view.state,
        said: view.said,
        changed_at: Some(at(view.changed_at)),
    }
}
