//! The orders of the service `Machines` that retire a machine.

use tonic::{Request, Response, Status};

use crate::bmdb::action::{Done, by};
use crate::bmdb::facts::Snapshot;
use crate::bmdb::find::id_of;
use crate::bmdb::retirement::{self, Refused};
use crate::bmdb::work::Decision;
use crate::model::machine_view::MachineName;
use crate::model::retirement::{Stage, confirmed};
use crate::proto::fleet::v1;
use crate::server::api::door::caller;
use crate::server::api::machines::who_and_why;
use crate::server::api::orders::{Said, answer};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

type Answer = Result<Response<v1::OrderResponse>, Status>;

/// `Machines.Retire`.
pub async fn retire(site: &Site, request: &Request<v1::RetireRequest>) -> Answer {
    let asked = request.get_ref();
    let said = Said { rpc: "shepherd.fleet.v1.Machines/Retire", request: asked, order: asked.order.as_ref() };
    let (who, reason) = who_and_why(request, asked.order.as_ref())?;
    let name = site.find(&caller(request)?, &asked.machine).await?;
    let wipe = asked.wipe;
    order(site, request, &name, said, move |snapshot| retirement::retire(snapshot, wipe, &reason, &who)).await
}

/// `Machines.CancelRetire`.
pub async fn cancel(site: &Site, request: &Request<v1::CancelRetireRequest>) -> Answer {
    let asked = request.get_ref();
    let rpc = "shepherd.fleet.v1.Machines/CancelRetire";
    let said = Said { rpc, request: asked, order: asked.order.as_ref() };
    let (who, reason) = who_and_why(request, asked.order.as_ref())?;
    let by = by(&who, Some(&reason));
    let caller = caller(request)?;
    let role = caller.credential().role;
    let name = site.find(&caller, &asked.machine).await?;
    order(site, request, &name, said, move |snapshot| retirement::cancel(snapshot, &by, role)).await
}

/// `Machines.Waive`.
pub async fn waive(site: &Site, request: &Request<v1::WaiveRequest>) -> Answer {
    let asked = request.get_ref();
    let said = Said { rpc: "shepherd.fleet.v1.Machines/Waive", request: asked, order: asked.order.as_ref() };
    let (who, reason) = who_and_why(request, asked.order.as_ref())?;
    let stage: Stage = asked
        .stage
        .parse()
        .map_err(|error: crate::model::process::UnknownName| wrong("stage", error.to_string()))?;
    let name = site.find(&caller(request)?, &asked.machine).await?;
    confirmed(stage, &name.short(), &asked.i_know).map_err(|said| wrong("i_know", said))?;
    let bmdb = site.bmdb.clone();
    let decide =
        move |snapshot: &Snapshot| retirement::waive(snapshot, &bmdb.policy().1, stage, &reason, &who);
    order(site, request, &name, said, decide).await
}

/// Carries out an order about a machine, which may be refused for what it finds.
pub(super) async fn order<M: prost::Message>(
    site: &Site,
    request: &Request<M>,
    name: &MachineName,
    said: Said<'_, M>,
    decide: impl Fn(&Snapshot) -> Result<Decision<Done>, Refused> + Send + Sync + 'static,
) -> Answer {
    let short = name.short();
    let order = said.read(&caller(request)?, short.clone())?;
    let dry_run = order.dry_run;
    let decide = move |snapshot: &Snapshot| {
        decide(snapshot).map_err(|(reason, said)| (reason, format!("{short} {said}")))
    };
    let carried = site.bmdb.order_machine_or_refuse(order, id_of(name), decide).await.map_err(of_bmdb)?;
    Ok(Response::new(answer(Some(name), dry_run, &carried)))
}
