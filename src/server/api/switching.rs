//! The orders of the service `Machines` about power.

use tonic::{Request, Response, Status};

use crate::bmdb::action::by;
use crate::bmdb::power_order;
use crate::model::power_order::Switch;
use crate::proto::fleet::v1;
use crate::server::api::door::caller;
use crate::server::api::machines::who_and_why;
use crate::server::api::many::switch_of;
use crate::server::api::orders::Said;
use crate::server::api::retiring::order;
use crate::server::api::site::Site;

type Answer = Result<Response<v1::OrderResponse>, Status>;

/// `Machines.Reboot`.
pub async fn reboot(site: &Site, request: &Request<v1::RebootRequest>) -> Answer {
    let asked = request.get_ref();
    let said = Said { rpc: "shepherd.fleet.v1.Machines/Reboot", request: asked, order: asked.order.as_ref() };
    switch(site, request, &asked.machine, said, Switch::Reboot).await
}

/// `Machines.Power`.
pub async fn power(site: &Site, request: &Request<v1::PowerRequest>) -> Answer {
    let asked = request.get_ref();
    let said = Said { rpc: "shepherd.fleet.v1.Machines/Power", request: asked, order: asked.order.as_ref() };
    switch(site, request, &asked.machine, said, switch_of(&asked.action)?).await
}

/// `Machines.CancelPower`.
pub async fn cancel(site: &Site, request: &Request<v1::CancelPowerRequest>) -> Answer {
    let asked = request.get_ref();
    let rpc = "shepherd.fleet.v1.Machines/CancelPower";
    let said = Said { rpc, request: asked, order: asked.order.as_ref() };
    let (who, reason) = who_and_why(request, asked.order.as_ref())?;
    let by = by(&who, Some(&reason));
    let name = site.find(&caller(request)?, &asked.machine).await?;
    order(site, request, &name, said, move |snapshot| power_order::cancel(&snapshot.facts, &by)).await
}

async fn switch<M: prost::Message>(
    site: &Site,
    request: &Request<M>,
    machine: &str,
    said: Said<'_, M>,
    switch: Switch,
) -> Answer {
    let (who, reason) = who_and_why(request, said.order)?;
    let name = site.find(&caller(request)?, machine).await?;
    let decide = move |snapshot: &_| power_order::switch(snapshot, switch, &reason, &who);
    order(site, request, &name, said, decide).await
}
