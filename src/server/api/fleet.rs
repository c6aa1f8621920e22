//! The services about the fleet as a whole: sessions, work, schedule, backoffs, providers, policy, counts.

use chrono::{DateTime, Utc};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::bmdb::inspect::WorkPlace;
use crate::bmdb::statistics::statistics;
use crate::bmdb::{inspect, waiting};
use crate::model::process::Process;
use crate::model::time::Timestamp;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::backoffs_server::Backoffs;
use crate::proto::fleet::v1::policy_server::Policy;
use crate::proto::fleet::v1::providers_server::Providers;
use crate::proto::fleet::v1::schedule_server::Schedule;
use crate::proto::fleet::v1::sessions_server::Sessions;
use crate::proto::fleet::v1::statistics_server::Statistics;
use crate::proto::fleet::v1::work_server::Work;
use crate::server::api::convert::{self, at};
use crate::server::api::door::caller;
use crate::server::api::pages;
use crate::server::api::refusal::{of_bmdb, refused, wrong};
use crate::server::api::site::Site;

/// All of these services.
#[derive(Clone)]
pub struct FleetService {
    /// What they stand on.
    pub site: Site,
}

#[tonic::async_trait]
impl Sessions for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListSessionsRequest>,
    ) -> Result<Response<v1::ListSessionsResponse>, Status> {
        let asked = request.into_inner();
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let after = match pages::read("sessions", &asked.page_token)? {
            None => Uuid::nil(),
            Some(place) => Uuid::try_parse(&place).map_err(|_| pages::no_place("sessions"))?,
        };
        let look = self.site.looks.look(move |tx| {
            Box::pin(
                async move { Ok((inspect::sessions(tx, after, size + 1).await?, inspect::now(tx).await?)) },
            )
        });
        let (mut sessions, now) = look.await.map_err(of_bmdb)?;
        let more = drop_surplus(&mut sessions, size);
        let next = sessions.last().filter(|_| more).map(|line| line.session.to_string());
        Ok(Response::new(v1::ListSessionsResponse {
            sessions: sessions.into_iter().map(convert::session).collect(),
            more,
            at: Some(at(now)),
            next_page_token: next.map_or_else(String::new, |place| pages::write("sessions", &place)),
        }))
    }
}

#[tonic::async_trait]
impl Work for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListWorkRequest>,
    ) -> Result<Response<v1::ListWorkResponse>, Status> {
        let asked = request.into_inner();
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let after = match pages::read("work", &asked.page_token)? {
            None => None,
            Some(place) => Some(read_item(&place).ok_or_else(|| pages::no_place("work"))?),
        };
        let look = self.site.looks.look(move |tx| {
            let after = after.clone();
            Box::pin(async move {
                Ok((inspect::work(tx, after.as_ref(), size + 1).await?, inspect::now(tx).await?))
            })
        });
        let (mut work, now) = look.await.map_err(of_bmdb)?;
        let more = drop_surplus(&mut work, size);
        let next = work.last().filter(|_| more).map(|line| write_item(&WorkPlace::of(line)));
        Ok(Response::new(v1::ListWorkResponse {
            work: work.iter().map(convert::work).collect(),
            more,
            at: Some(at(now)),
            next_page_token: next.map_or_else(String::new, |place| pages::write("work", &place)),
        }))
    }
}

#[tonic::async_trait]
impl Schedule for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListScheduleRequest>,
    ) -> Result<Response<v1::ListScheduleResponse>, Status> {
        let asked = request.into_inner();
        let process: Process = asked
            .process
            .parse()
            .map_err(|error: crate::model::process::UnknownName| wrong("process", error.to_string()))?;
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let after = match pages::read("schedule", &asked.page_token)? {
            None => (DateTime::<Utc>::UNIX_EPOCH, Uuid::nil()),
            Some(place) => read_moment(&place).ok_or_else(|| pages::no_place("schedule"))?,
        };
        let (mut due, now) = self
            .site
            .looks
            .look(move |tx| {
                Box::pin(async move {
                    Ok((waiting::due(tx, process.as_str(), after, size + 1).await?, inspect::now(tx).await?))
                })
            })
            .await
            .map_err(of_bmdb)?;
        let more = drop_surplus(&mut due, size);
        let next = due.last().filter(|_| more).map(|line| write_moment(line.ready_at, line.name.machine));
        Ok(Response::new(v1::ListScheduleResponse {
            due: due
                .iter()
                .map(|line| v1::DueItem {
                    name: Some(convert::name(&line.name)),
                    lane: line.lane.clone(),
                    process: line.process.clone(),
                    ready_at: Some(at(line.ready_at)),
                    not_before: line.not_before.map(at),
                    timer: line.timer,
                    priority: line.priority,
                    reason: line.reason.clone(),
                    decided_at: line.decided_at.clone(),
                })
                .collect(),
            next_page_token: next.map_or_else(String::new, |place| pages::write("schedule", &place)),
            at: Some(at(now)),
        }))
    }
}

#[tonic::async_trait]
impl Backoffs for FleetService {
    async fn list(
        &self,
        request: Request<v1::ListBackoffsRequest>,
    ) -> Result<Response<v1::ListBackoffsResponse>, Status> {
        let asked = request.into_inner();
        let size = pages::size(asked.page_size, 100, "page_size")?;
        let (machine, process) = match pages::read("backoffs", &asked.page_token)? {
            None => (Uuid::nil(), String::new()),
            Some(place) => place
                .split_once(' ')
                .filter(|(_, process)| !process.chars().any(char::is_control))
                .and_then(|(machine, process)| Some((Uuid::try_parse(machine).ok()?, process.to_owned())))
                .ok_or_else(|| pages::no_place("backoffs"))?,
        };
        let (mut lines, now) = self
            .site
            .looks
            .look(move |tx| {
                let process = process.clone();
                Box::pin(async move {
                    Ok((waiting::backoffs(tx, (machine, &process), size + 1).await?, inspect::now(tx).await?))
                })
            })
            .await
            .map_err(of_bmdb)?;
        let more = drop_surplus(&mut lines, size);
        let next =
            lines.last().filter(|_| more).map(|line| format!("{} {}", line.name.machine, line.process));
        Ok(Response::new(v1::ListBackoffsResponse {
            backoffs: lines
                .iter()
                .map(|line| v1::Backoff {
                    name: Some(convert::name(&line.name)),
                    process: line.process.clone(),
                    failures: line.failures,
                    until: Some(at(line.until)),
                    cause: line.cause.clone(),
                })
                .collect(),
            next_page_token: next.map_or_else(String::new, |place| pages::write("backoffs", &place)),
            at: Some(at(now)),
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
            .site
            .looks
            .look(|tx| {
                Box::pin(async move {
                    Ok((inspect::providers(tx).await?, inspect::brakes(tx).await?, inspect::now(tx).await?))
                })
            })
            .await
            .map_err(of_bmdb)?;
        Ok(Response::new(v1::ListProvidersResponse {
            providers: providers.into_iter().map(convert::provider).collect(),
            brakes: brakes.into_iter().map(convert::brake).collect(),
            at: Some(at(now)),
        }))
    }
}

#[tonic::async_trait]
impl Policy for FleetService {
    async fn get(&self, _: Request<v1::GetPolicyRequest>) -> Result<Response<v1::GetPolicyResponse>, Status> {
        let bmdb = self.site.looks.bmdb();
        bmdb.read_policy().await.map_err(of_bmdb)?;
        let (version, policy) = bmdb.policy();
        let policy = serde_json::to_value(&*policy).map_err(|error| {
            tracing::error!(%error, "the policy is no JSON");
            refused(tonic::Code::Internal, "INTERNAL", "this shepherd failed to answer; its log says why")
        })?;
        Ok(Response::new(v1::GetPolicyResponse {
            version,
            policy: convert::optional_structure(Some(&policy)),
        }))
    }
}

#[tonic::async_trait]
impl Statistics for FleetService {
    async fn get(
        &self,
        request: Request<v1::GetStatisticsRequest>,
    ) -> Result<Response<v1::GetStatisticsResponse>, Status> {
        let scope = caller(&request)?.scope().clone();
        let look = self.site.looks.look(move |tx| {
            let scope = scope.clone();
            Box::pin(async move { statistics(tx, &scope).await })
        });
        Ok(Response::new(convert::statistics(look.await.map_err(of_bmdb)?)))
    }
}

/// Cuts the line that was read too many, and says whether there was one.
pub(super) fn drop_surplus<T>(lines: &mut Vec<T>, size: i64) -> bool {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let more = lines.len() > size;
    lines.truncate(size);
    more
}

/// A place in a list that goes by time and then by id.
pub(super) fn write_moment(at: Timestamp, id: Uuid) -> String {
    format!("{} {id}", at.timestamp_micros())
}

/// Reads what [`write_moment`] wrote.
pub(super) fn read_moment(place: &str) -> Option<(Timestamp, Uuid)> {
    let (at, id) = place.split_once(' ')?;
    // Nothing that is listed is older, and the database knows no moment that is much older.
    let at: i64 = at.parse().ok().filter(|at| *at >= 0)?;
    Some((DateTime::from_timestamp_micros(at)?, Uuid::try_parse(id).ok()?))
}

/// A place in the list of live work.
fn write_item(place: &WorkPlace) -> String {
    format!("{} {}", write_moment(place.since, place.machine), place.lane)
}

/// Reads what [`write_item`] wrote.
fn read_item(text: &str) -> Option<WorkPlace> {
    let (moment, lane) = text.rsplit_once(' ')?;
    let (since, machine) = read_moment(moment)?;
    let lane = Some(lane).filter(|lane| !lane.chars().any(char::is_control))?;
    Some(WorkPlace { since, machine, lane: lane.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_in_the_work_reads_back() {
        let since = "2026-11-20T18:00:00.123456Z".parse().unwrap();
        let place = WorkPlace { since, machine: Uuid::from_u128(7), lane: "access".to_owned() };
        assert_eq!(read_item(&write_item(&place)), Some(place));
        for odd in ["", "access", "1 access", "1 00000000-0000-0000-0000-000000000007 a\0"] {
            assert_eq!(read_item(odd), None, "{odd}");
        }
    }

    #[test]
    fn place_by_time_reads_back() {
        let place = ("2026-11-20T18:00:00.123456Z".parse().unwrap(), Uuid::from_u128(7));
        assert_eq!(read_moment(&write_moment(place.0, place.1)), Some(place));
        for odd in [
            "",
            "1",
            "x y",
            "-1 00000000-0000-0000-0000-000000000007",
            "9223372036854775807 00000000-0000-0000-0000-000000000007",
        ] {
            assert_eq!(read_moment(odd), None, "{odd}");
        }
    }
}
