//! The service `Logs`.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::bmdb::find::id_of;
use crate::bmdb::log_request::{Reading, request_of};
use crate::model::log_request::{DEFAULT_LINES, State, Wanted};
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::logs_server::Logs;
use crate::server::api::convert::at;
use crate::server::api::door::caller;
use crate::server::api::orders::{Said, answer};
use crate::server::api::refusal::{of_bmdb, wrong};
use crate::server::api::site::Site;

const ASK: &str = "shepherd.fleet.v1.Logs/Ask";

/// The service.
pub struct LogsService {
    /// What it stands on.
    pub site: Site,
}

/// What a request wants.
fn wanted(asked: &v1::AskLogRequest) -> Result<Wanted, Status> {
    let since = match asked.since.as_str() {
        "" => None,
        said => Some(said.parse::<Span>().map_err(|_| {
            wrong("since", format!("{said:?} is no length of time; write for example 10m or 2h"))
        })?),
    };
    let lines = if asked.lines == 0 { DEFAULT_LINES } else { asked.lines };
    let wanted = Wanted { log: asked.log.clone(), lines, since, follow: asked.follow };
    wanted.check().map_err(|(field, said)| wrong(field, said))?;
    Ok(wanted)
}

#[tonic::async_trait]
impl Logs for LogsService {
    async fn ask(&self, request: Request<v1::AskLogRequest>) -> Result<Response<v1::AskLogResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let wanted = wanted(asked)?;
        let name = self.site.find(&caller, &asked.machine).await?;
        let order =
            Said { rpc: ASK, request: asked, order: asked.order.as_ref() }.read(&caller, name.short())?;
        if order.expected_version.is_some() {
            return Err(wrong(
                "order.expected_version",
                "a log is read of a machine of any version; leave it out here",
            ));
        }
        let dry_run = order.dry_run;
        let carried =
            self.site.bmdb.ask_for_log(order, (id_of(&name), name.short()), wanted).await.map_err(of_bmdb)?;
        let id = request_of(&carried).filter(|_| !dry_run);
        Ok(Response::new(v1::AskLogResponse {
            order: Some(answer(Some(&name), dry_run, &carried)),
            request: id.map(|id| id.to_string()).unwrap_or_default(),
        }))
    }

    async fn read(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<v1::ReadLogResponse>, Status> {
        let caller = caller(&request)?;
        let asked = request.get_ref();
        let id = Uuid::try_parse(&asked.request)
            .map_err(|_| wrong("request", format!("{:?} is no UUID of a request", asked.request)))?;
        let taken = i64::try_from(asked.taken)
            .map_err(|_| wrong("taken", "nobody has as many parts; it is what the answer before said"))?;
        let name = self.site.find(&caller, &asked.machine).await?;
        let who = caller.actor().name;
        let read = self.site.bmdb.read_log(id_of(&name), id, who, taken).await.map_err(of_bmdb)?;
        Ok(Response::new(told(read)))
    }
}

fn told(read: Reading) -> v1::ReadLogResponse {
    let (state, said) = match read.state {
        State::Waits(said) => ("waiting", said),
        State::Comes => ("coming", String::new()),
        State::Ended(said) => ("ended", said.unwrap_or_default()),
    };
    v1::ReadLogResponse {
        state: state.to_owned(),
        said,
        lines: read.lines.lines().map(str::to_owned).collect(),
        taken: u64::try_from(read.taken).unwrap_or_default(),
        logs: read
            .there
            .into_iter()
            .map(|there| v1::MachineLog { log: there.log, bytes: there.bytes })
            .collect(),
        note: read.note.unwrap_or_default(),
        at: Some(at(read.at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_has_a_value_and_what_is_odd_is_refused_by_its_field() {
        let whole = v1::AskLogRequest { log: "etcd".into(), since: "2h".into(), ..Default::default() };
        assert_eq!(wanted(&whole).unwrap().lines, DEFAULT_LINES);
        for (field, odd) in [
            ("since", v1::AskLogRequest { since: "soon".into(), ..whole.clone() }),
            ("lines", v1::AskLogRequest { lines: 10_001, ..whole.clone() }),
            ("log", v1::AskLogRequest { log: "../../etc/passwd\n".into(), ..whole }),
        ] {
            let status = wanted(&odd).unwrap_err();
            let details = tonic_types::StatusExt::get_error_details(&status);
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
    }
}
