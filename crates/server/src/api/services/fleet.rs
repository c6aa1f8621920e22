//! gRPC services for fleet-wide lists: shepherds, sessions, work, schedule, backoffs, providers, policy, statistics; and
//! for the server itself.

use chrono::{DateTime, Utc};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::api_error::{bmdb_status, internal_status, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert::{self, encode_timestamp};
use crate::api::pagination;
use bmdb::connection;
use bmdb::connection::schema::supported_version;
use bmdb::fleet::sessions::{self, WorkCursor};
use bmdb::fleet::statistics::read_statistics;
use bmdb::fleet::{brake, provider, queues, shepherds};
use model::process::Process;
use proto::fleet::v1;
use proto::fleet::v1::about_server::About;
use proto::fleet::v1::backoffs_server::Backoffs;
use proto::fleet::v1::policy_server::Policy;
use proto::fleet::v1::providers_server::Providers;
use proto::fleet::v1::schedule_server::Schedule;
use proto::fleet::v1::sessions_server::Sessions;
use proto::fleet::v1::shepherds_server::Shepherds;
use proto::fleet::v1::statistics_server::Statistics;
use proto::fleet::v1::work_server::Work;

/// Implements all of these services.
#[derive(Clone)]
pub struct FleetService {
    /// Context shared by all services.
    pub context: ApiContext,
}

#[tonic::async_trait]
impl Sessions for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let after = match pagination::decode_page_token("sessions", &body.page_token)? {
            None => Uuid::nil(),
            Some(place) => Uuid::try_parse(&place).map_err(|_| pagination::invalid_page_token("sessions"))?,
        };
        let look = self.context.read_pool.read(move |tx| {
            Box::pin(async move {
                Ok((sessions::list_sessions(tx, after, size + 1).await?, connection::database_now(tx).await?))
            })
        });
        let (mut sessions, now) = look.await.map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut sessions, size);
        let next = sessions.last().filter(|_| more).map(|line| line.session.to_string());
        Ok(Response::new(v1::ListSessionsResponse {
            sessions: sessions.into_iter().map(convert::encode_session).collect(),
            more,
            read_at: Some(encode_timestamp(now)),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("sessions", &place)),
        }))
    }
}

#[tonic::async_trait]
impl Shepherds for FleetService {
    async fn list(
        &self,
        _: Request<v1::ListShepherdsRequest>,
    ) -> Result<Response<v1::ListShepherdsResponse>, Status> {
        let (shepherds, now) = self
            .context
            .read_pool
            .read(|tx| {
                Box::pin(async move {
                    Ok((shepherds::list_shepherds(tx).await?, connection::database_now(tx).await?))
                })
            })
            .await
            .map_err(bmdb_status)?;
        Ok(Response::new(v1::ListShepherdsResponse {
            shepherds: shepherds.into_iter().map(convert::encode_shepherd).collect(),
            read_at: Some(encode_timestamp(now)),
        }))
    }
}

#[tonic::async_trait]
impl Work for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListWorkRequest>,
    ) -> Result<Response<v1::ListWorkResponse>, Status> {
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let after = match pagination::decode_page_token("work", &body.page_token)? {
            None => None,
            Some(place) => {
                Some(parse_work_cursor(&place).ok_or_else(|| pagination::invalid_page_token("work"))?)
            }
        };
        let look = self.context.read_pool.read_with(after, move |tx, after| {
            Box::pin(async move {
                Ok((
                    sessions::list_work(tx, after.as_ref(), size + 1).await?,
                    connection::database_now(tx).await?,
                ))
            })
        });
        let (mut work, now) = look.await.map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut work, size);
        let next = work.last().filter(|_| more).map(|line| encode_work_cursor(&WorkCursor::of(line)));
        Ok(Response::new(v1::ListWorkResponse {
            work: work.iter().map(convert::encode_work).collect(),
            more,
            read_at: Some(encode_timestamp(now)),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("work", &place)),
        }))
    }
}

#[tonic::async_trait]
impl Schedule for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListScheduleRequest>,
    ) -> Result<Response<v1::ListScheduleResponse>, Status> {
        let body = request.into_inner();
        let process: Process = body
            .process
            .parse()
            .map_err(|error: model::process::UnknownName| invalid_argument("process", error.to_string()))?;
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let after = match pagination::decode_page_token("schedule", &body.page_token)? {
            None => (DateTime::<Utc>::UNIX_EPOCH, Uuid::nil()),
            Some(place) => pagination::parse_time_cursor(&place)
                .ok_or_else(|| pagination::invalid_page_token("schedule"))?,
        };
        let (mut due, now) = self
            .context
            .read_pool
            .read(move |tx| {
                Box::pin(async move {
                    Ok((
                        queues::list_due(tx, process.as_str(), after, size + 1).await?,
                        connection::database_now(tx).await?,
                    ))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut due, size);
        let next = due
            .last()
            .filter(|_| more)
            .map(|line| pagination::encode_time_cursor(line.ready_at, line.name.machine));
        Ok(Response::new(v1::ListScheduleResponse {
            due: due
                .iter()
                .map(|line| v1::DueItem {
                    name: Some(convert::encode_machine_name(&line.name)),
                    lane: line.lane.clone(),
                    process: line.process.clone(),
                    ready_at: Some(encode_timestamp(line.ready_at)),
                    not_before: line.not_before.map(encode_timestamp),
                    timer: line.timer,
                    priority: line.priority,
                    reason: line.reason.clone(),
                    decided_at: line.decided_at.clone(),
                })
                .collect(),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("schedule", &place)),
            read_at: Some(encode_timestamp(now)),
        }))
    }
}

#[tonic::async_trait]
impl Backoffs for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListBackoffsRequest>,
    ) -> Result<Response<v1::ListBackoffsResponse>, Status> {
        let body = request.into_inner();
        let size = pagination::parse_page_size(body.page_size, 100, "page_size")?;
        let (machine, process) = match pagination::decode_page_token("backoffs", &body.page_token)? {
            None => (Uuid::nil(), String::new()),
            Some(place) => place
                .split_once(' ')
                .filter(|(_, process)| !process.chars().any(char::is_control))
                .and_then(|(machine, process)| Some((Uuid::try_parse(machine).ok()?, process.to_owned())))
                .ok_or_else(|| pagination::invalid_page_token("backoffs"))?,
        };
        let (mut lines, now) = self
            .context
            .read_pool
            .read_with(process, move |tx, process| {
                Box::pin(async move {
                    Ok((
                        queues::list_backoffs(tx, (machine, process), size + 1).await?,
                        connection::database_now(tx).await?,
                    ))
                })
            })
            .await
            .map_err(bmdb_status)?;
        let more = pagination::drop_surplus(&mut lines, size);
        let next =
            lines.last().filter(|_| more).map(|line| format!("{} {}", line.name.machine, line.process));
        Ok(Response::new(v1::ListBackoffsResponse {
            backoffs: lines
                .iter()
                .map(|line| v1::Backoff {
                    name: Some(convert::encode_machine_name(&line.name)),
                    process: line.process.clone(),
                    failures: line.failures,
                    until: Some(encode_timestamp(line.until)),
                    cause: line.cause.clone(),
                })
                .collect(),
            next_page_token: next
                .map_or_else(String::new, |place| pagination::encode_page_token("backoffs", &place)),
            read_at: Some(encode_timestamp(now)),
        }))
    }
}

#[tonic::async_trait]
impl Providers for FleetService {
    async fn list(
        &self,
        _: Request<v1::ListProvidersRequest>,
    ) -> Result<Response<v1::ListProvidersResponse>, Status> {
        let (providers, brakes, now) = self
            .context
            .read_pool
            .read(|tx| {
                Box::pin(async move {
                    Ok((
                        provider::list_providers(tx).await?,
                        brake::list_brakes(tx).await?,
                        connection::database_now(tx).await?,
                    ))
                })
            })
            .await
            .map_err(bmdb_status)?;
        Ok(Response::new(v1::ListProvidersResponse {
            providers: providers.into_iter().map(convert::encode_provider).collect(),
            brakes: brakes.into_iter().map(convert::encode_brake).collect(),
            read_at: Some(encode_timestamp(now)),
        }))
    }
}

#[tonic::async_trait]
impl Policy for FleetService {
    async fn get(&self, _: Request<v1::GetPolicyRequest>) -> Result<Response<v1::GetPolicyResponse>, Status> {
        let bmdb = self.context.read_pool.bmdb();
        bmdb.read_policy().await.map_err(bmdb_status)?;
        let (version, policy) = bmdb.policy();
        let policy = serde_json::to_value(&*policy)
            .map_err(|error| internal_status("the policy is no JSON", &error))?;
        Ok(Response::new(v1::GetPolicyResponse {
            version,
            policy: convert::encode_optional_struct(Some(&policy)),
        }))
    }
}

#[tonic::async_trait]
impl About for FleetService {
    async fn get(&self, _: Request<v1::GetAboutRequest>) -> Result<Response<v1::GetAboutResponse>, Status> {
        let schema_version = self.context.read_pool.bmdb().schema_version().await.map_err(bmdb_status)?;
        Ok(Response::new(v1::GetAboutResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            schema_version,
            supported_schema_version: supported_version(),
        }))
    }
}

#[tonic::async_trait]
impl Statistics for FleetService {
    async fn get(
        &self,
        request: Request<v1::GetStatisticsRequest>,
    ) -> Result<Response<v1::GetStatisticsResponse>, Status> {
        let look = self.context.read_pool.read_with(caller_of(&request)?.scope().clone(), |tx, scope| {
            Box::pin(read_statistics(tx, scope))
        });
        Ok(Response::new(convert::encode_statistics(look.await.map_err(bmdb_status)?)))
    }
}

/// Encodes the cursor of the list of live work.
fn encode_work_cursor(place: &WorkCursor) -> String {
    format!("{} {}", pagination::encode_time_cursor(place.since, place.machine), place.lane)
}

/// Parses a cursor of [`encode_work_cursor`].
fn parse_work_cursor(text: &str) -> Option<WorkCursor> {
    let (moment, lane) = text.rsplit_once(' ')?;
    let (since, machine) = pagination::parse_time_cursor(moment)?;
    let lane = Some(lane).filter(|lane| !lane.chars().any(char::is_control))?;
    Some(WorkCursor { since, machine, lane: lane.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_cursor_round_trips() {
        let since = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        let place = WorkCursor { since, machine: Uuid::from_u128(7), lane: "access".to_owned() };
        assert_eq!(parse_work_cursor(&encode_work_cursor(&place)), Some(place));
        for odd in ["", "access", "1 access", "1 00000000-0000-0000-0000-000000000007 a\0"] {
            assert_eq!(parse_work_cursor(odd), None, "{odd}");
        }
    }
}
