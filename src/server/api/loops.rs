//! The service `Loops`.

use tonic::{Request, Response, Status};

use crate::bmdb::action::Until;
use crate::bmdb::pause::{NewPause, loops};
use crate::model::pause::{Loop, Pause, what};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::loops_server::Loops;
use crate::server::api::convert::{at, moment};
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer, of_no_version};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;
use crate::server::api::texts::line;

const PAUSE: &str = "shepherd.fleet.v1.Loops/Pause";
const RESUME: &str = "shepherd.fleet.v1.Loops/Resume";
const LONGEST_PROVIDER: usize = 100;

/// The service.
pub struct LoopsService {
    /// What it stands on.
    pub site: Site,
}

#[tonic::async_trait]
impl Loops for LoopsService {
    async fn list(
        &self,
        _: Request<v1::ListLoopsRequest>,
    ) -> Result<Response<v1::ListLoopsResponse>, Status> {
        let (loops, now) =
            self.site.looks.look(|tx| Box::pin(async move { loops(tx).await })).await.map_err(of_bmdb)?;
        let loops = loops.iter().map(|state| v1::Loop {
            name: state.of.as_str().to_owned(),
            workers: state.workers,
            pauses: state.pauses.iter().map(told).collect(),
        });
        Ok(Response::new(v1::ListLoopsResponse { loops: loops.collect(), at: Some(at(now)) }))
    }

    async fn pause(
        &self,
        request: Request<v1::PauseLoopRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let (of, provider) = (named(&asked.name)?, provider_of(&asked.provider)?);
        let until = match &asked.until {
            None => None,
            Some(v1::pause_loop_request::Until::At(said)) => Some(Until::At(
                moment(*said).ok_or_else(|| wrong("at", "the pause is to end at a moment that is none"))?,
            )),
            Some(v1::pause_loop_request::Until::After(said)) => {
                Some(Until::After(said.parse().map_err(|_| {
                    wrong("after", format!("{said:?} is no length of time; write for example 2h, 30m or 1d"))
                })?))
            }
        };
        let order = Said { rpc: PAUSE, request: asked, order: asked.order.as_ref() }
            .read(&caller, what(of, provider.as_deref()))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let new = NewPause { of, provider, until, by: caller.credential().name.clone() };
        let carried = self.site.bmdb.pause_loop(order, new).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }

    async fn resume(
        &self,
        request: Request<v1::ResumeLoopRequest>,
    ) -> Result<Response<v1::OrderResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let (of, provider) = (named(&asked.name)?, provider_of(&asked.provider)?);
        let order = Said { rpc: RESUME, request: asked, order: asked.order.as_ref() }
            .read(&caller, what(of, provider.as_deref()))
            .and_then(of_no_version)?;
        let dry_run = order.dry_run;
        let carried = self.site.bmdb.resume_loop(order, of, provider).await.map_err(of_bmdb)?;
        Ok(Response::new(answer(None, dry_run, &carried)))
    }
}

fn named(text: &str) -> Result<Loop, Status> {
    text.parse().map_err(|error: crate::model::process::UnknownName| wrong("name", error.to_string()))
}

/// The provider that was named, if one was.
fn provider_of(text: &str) -> Result<Option<String>, Status> {
    let provider = line("provider", text, LONGEST_PROVIDER)?;
    if provider == "*" {
        return Err(wrong("provider", "leave the provider out to mean the machines of all"));
    }
    Ok(Some(provider.to_owned()).filter(|provider| !provider.is_empty()))
}

/// A pause as it is told.
pub(super) fn told(pause: &Pause) -> v1::LoopPause {
    v1::LoopPause {
        provider: pause.provider.clone(),
        reason: pause.reason.clone(),
        by: pause.by.clone(),
        since: Some(at(pause.since)),
        until: pause.until.map(at),
    }
}
