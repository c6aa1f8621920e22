//! gRPC service Logs: request and read logs of machines.

use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::encode_timestamp;
use crate::api::incoming_order::{IncomingOrder, encode_order_response};
use bmdb::machine::log_request::{LogReadResult, request_id_of};
use bmdb::machine::lookup::machine_id;
use model::log_request::{DEFAULT_LINES, LogQuery, LogRequestState};
use model::rpc_name::REQUEST_LOG_RPC;
use model::time::Span;
use proto::fleet::v1;
use proto::fleet::v1::logs_server::Logs;

/// The gRPC service `Logs`.
pub struct LogsService {
    /// Context shared by all services.
    pub context: ApiContext,
}

/// Decodes the query of a log request.
fn parse_log_query(request: &v1::RequestLogRequest) -> Result<LogQuery, Status> {
    let since = match request.since.as_str() {
        "" => None,
        text => Some(text.parse::<Span>().map_err(|_| {
            invalid_argument("since", format!("{text:?} is not a duration; write for example 10m or 2h"))
        })?),
    };
    let lines = if request.lines == 0 { DEFAULT_LINES } else { request.lines };
    let wanted = LogQuery { log: request.log.clone(), lines, since, follow: request.follow };
    wanted.validate().map_err(|(field, text)| invalid_argument(field, text))?;
    Ok(wanted)
}

#[tonic::async_trait]
impl Logs for LogsService {
    async fn request(
        &self,
        request: Request<v1::RequestLogRequest>,
    ) -> Result<Response<v1::RequestLogResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let wanted = parse_log_query(body)?;
        let name = self.context.find_machine(&caller, &body.machine).await?;
        let order = IncomingOrder { rpc: REQUEST_LOG_RPC, request: &request, order: body.order.as_ref() }
            .parse(name.short_name())?;
        if order.expected_version.is_some() {
            return Err(invalid_argument(
                "order.expected_version",
                "a request for a log does not depend on the version of the machine; omit it",
            ));
        }
        let dry_run = order.dry_run;
        let carried = self
            .context
            .bmdb
            .request_log(order, (machine_id(&name), name.short_name()), wanted)
            .await
            .map_err(bmdb_status)?;
        let id = request_id_of(&carried).filter(|_| !dry_run);
        Ok(Response::new(v1::RequestLogResponse {
            order: Some(encode_order_response(Some(&name), dry_run, &carried)),
            request_id: id.map(|id| id.to_string()).unwrap_or_default(),
        }))
    }

    async fn read(
        &self,
        request: Request<v1::ReadLogRequest>,
    ) -> Result<Response<v1::ReadLogResponse>, Status> {
        let caller = caller_of(&request)?;
        let body = request.get_ref();
        let id = Uuid::try_parse(&body.request_id).map_err(|_| {
            invalid_argument("request_id", format!("{:?} is no UUID of a request", body.request_id))
        })?;
        let taken = i64::try_from(body.parts_read).map_err(|_| {
            invalid_argument(
                "parts_read",
                "no log has so many parts; give `parts_read` of the previous answer",
            )
        })?;
        let name = self.context.find_machine(&caller, &body.machine).await?;
        let who = caller.actor().name;
        let read =
            self.context.bmdb.read_log(machine_id(&name), id, who, taken).await.map_err(bmdb_status)?;
        Ok(Response::new(encode_log_read(read)))
    }
}

fn encode_log_read(read: LogReadResult) -> v1::ReadLogResponse {
    let (state, text) = match read.state {
        LogRequestState::Waiting(text) => ("waiting", text),
        LogRequestState::Receiving => ("receiving", String::new()),
        LogRequestState::Ended(text) => ("ended", text.unwrap_or_default()),
    };
    v1::ReadLogResponse {
        state: state.to_owned(),
        message: text,
        lines: read.lines.lines().map(str::to_owned).collect(),
        parts_read: u64::try_from(read.parts_read).unwrap_or_default(),
        available_logs: read
            .available_logs
            .into_iter()
            .map(|there| v1::AvailableLog { log: there.log, bytes: there.bytes })
            .collect(),
        note: read.note.unwrap_or_default(),
        read_at: Some(encode_timestamp(read.at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_apply_and_invalid_fields_are_named() {
        let whole = v1::RequestLogRequest { log: "etcd".into(), since: "2h".into(), ..Default::default() };
        assert_eq!(parse_log_query(&whole).unwrap().lines, DEFAULT_LINES);
        for (field, odd) in [
            ("since", v1::RequestLogRequest { since: "soon".into(), ..whole.clone() }),
            ("lines", v1::RequestLogRequest { lines: 10_001, ..whole.clone() }),
            ("log", v1::RequestLogRequest { log: "../../etc/passwd\n".into(), ..whole }),
        ] {
            let status = parse_log_query(&odd).unwrap_err();
            let details = tonic_types::StatusExt::get_error_details(&status);
            assert_eq!(details.bad_request().unwrap().field_violations[0].field, field);
        }
    }
}
