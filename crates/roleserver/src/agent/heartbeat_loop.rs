//! The heartbeat loop: failover between servers, and settings that fall back.
//!
//! A heartbeat goes to the endpoint that worked last. After a failure the next endpoint is tried, for ever, unless any
//! server would reject this heartbeat.
//!
//! New settings that come with a response are used at once. The settings that carried the response stay as a fallback
//! until the new ones have worked: a wrong certificate that is pushed to a fleet must not cut it off.
//!
//! A connection that works stays open. Whenever a shepherd starts or stops, the whole fleet gets new endpoints at once,
//! and a database outage affects the whole fleet too. If every agent made a new TLS handshake each time, the shepherds
//! could do nothing but handshakes. So the endpoint in use stays in use while it is among the new ones, and an error
//! response of the only endpoint breaks the connection only every fourth time in a row. With several endpoints, an
//! error response moves the agent to the next one. The other endpoints are shuffled. Otherwise all agents of a shepherd
//! that stops would go to the same next one.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use curator_client::status_text::describe_status;
use proto::agent::v1 as wire;
use proto::agent::v1::agent_callback_client::AgentCallbackClient;
use proto::hardware::v1::HardwareReport;
use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rustls::ClientConfig;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::agent::heartbeat_backoff;
use crate::agent::heartbeat_session::{HeartbeatHeader, HeartbeatSession};
use crate::agent::settings::AgentSettings;
use crate::agent::{Agent, AgentEvent};
use crate::connection;
use crate::server_pool::{ServerEndpoint, ServerEndpoints};

/// How long one heartbeat may take, connecting included.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a heartbeat waits for the hardware to be read. A disk that hangs longer delays the report, never the
/// heartbeat.
const HARDWARE_TIMEOUT: Duration = Duration::from_secs(20);
/// Failures in a row that are tolerated on one connection to the only endpoint. Several servers may be behind one
/// address, and the next connection may reach another one.
const FAILURES_PER_CONNECTION: u32 = 4;
/// The second heartbeat brings the hardware report, which should not be delayed by an interval.
const REPORT_DELAY: Duration = Duration::from_secs(2);

/// One endpoint of a shepherd, with its TLS configuration.
struct ServerTarget {
    endpoint: String,
    config: Option<Arc<ClientConfig>>,
    is_fallback: bool,
}

/// The state of the loop.
pub(super) struct HeartbeatLoop {
    agent: Agent,
    session: HeartbeatSession,
    targets: Vec<ServerTarget>,
    current: usize,
    client: Option<AgentCallbackClient<Channel>>,
    hardware_read: Option<JoinHandle<HardwareReport>>,
}

/// A value that cannot exist: the loop does not end.
pub(super) enum Never {}

impl HeartbeatLoop {
    /// Begins with the settings of the agent.
    pub(super) fn new(agent: Agent) -> Self {
        let session = HeartbeatSession::new(HeartbeatHeader {
            machine_id: agent.machine_id,
            boot_id: agent.clock.boot_id(),
            incarnation: agent.incarnation,
            agent_version: agent.agent_version.clone(),
            access_fence: agent.access_fence,
            uploads_logs: agent.uploads_logs,
        });
        let targets = build_targets(&agent.settings, agent.fallback.as_ref());
        let new = Self { agent, session, targets, current: 0, client: None, hardware_read: None };
        new.publish_endpoints();
        new
    }

    /// Publishes the endpoints of the shepherds, the one in use first.
    fn publish_endpoints(&self) {
        let Some(server_pool) = &self.agent.server_pool else { return };
        let (before, from_here) = self.targets.split_at(self.current.min(self.targets.len()));
        let ways = from_here.iter().chain(before).map(|target| ServerEndpoint {
            endpoint: target.endpoint.clone(),
            ca_certificates: match &self.agent.fallback {
                Some(fallback) if target.is_fallback => fallback.ca_certificates.clone(),
                _ => self.agent.settings.ca_certificates.clone(),
            },
        });
        server_pool.set_endpoints(ServerEndpoints {
            machine_id: self.agent.machine_id,
            identity: self.agent.identity.clone(),
            time: self.agent.time.clone(),
            endpoints: ways.collect(),
        });
    }

    /// Sends heartbeats for ever.
    pub(super) async fn run(mut self) -> Never {
        let mut failures = 0;
        loop {
            let heartbeat = self.next_heartbeat().await;
            let endpoint = self.targets[self.current].endpoint.clone();
            let outcome = self.send_heartbeat(&heartbeat).await;
            let random = rand::rng().random();
            let pause = match outcome {
                Ok(answer) => {
                    failures = 0;
                    let delivered = self.session.record_ack(&answer);
                    (self.agent.observer)(&AgentEvent::Delivered {
                        endpoint,
                        seq: heartbeat.seq,
                        ack: delivered,
                    });
                    if let Some(sample) = self.agent.time.observe(answer.shepherd_time_ms) {
                        (self.agent.observer)(&AgentEvent::TimeSampled { sample });
                    }
                    if let Some(order) = &answer.cluster_order {
                        (self.agent.observer)(&AgentEvent::ClusterOrder { order: order.clone() });
                    }
                    if !(answer.signing_keys.is_empty() && answer.key_rotations.is_empty()) {
                        (self.agent.observer)(&AgentEvent::SigningKeys {
                            keys: answer.signing_keys.clone(),
                            rotations: answer.key_rotations.clone(),
                            requires_signed_declarations: answer.require_signed_declarations,
                        });
                    }
                    if let Some(order) = &answer.release_order {
                        (self.agent.observer)(&AgentEvent::ReleaseOrder { order: order.clone() });
                    }
                    self.apply_settings(&answer);
                    self.publish_endpoints();
                    // After the endpoints, which the uploads use.
                    if !answer.log_requests.is_empty() {
                        let requests = answer.log_requests.clone();
                        (self.agent.observer)(&AgentEvent::LogRequests { requests });
                    }
                    let interval = self.agent.settings.heartbeat_interval();
                    let soon = (self.session.should_send_report() && heartbeat.hardware_report.is_none())
                        || answer.cluster_order.is_some();
                    heartbeat_backoff::jittered_interval(
                        if soon { interval.min(REPORT_DELAY) } else { interval },
                        random,
                    )
                }
                Err(status) => {
                    failures += 1;
                    self.session.record_failure(status.code());
                    let interval = self.agent.settings.heartbeat_interval();
                    let pause =
                        heartbeat_backoff::retry_delay(failures, self.targets.len(), interval, random);
                    (self.agent.observer)(&AgentEvent::Failed {
                        endpoint,
                        error: error_message(&status),
                        failures,
                        pause,
                    });
                    if should_try_next(status.code()) {
                        if self.targets.len() > 1 || failures.is_multiple_of(FAILURES_PER_CONNECTION) {
                            self.client = None;
                        }
                        self.current = (self.current + 1) % self.targets.len();
                    }
                    pause
                }
            };
            self.wait_for_next(pause).await;
        }
    }

    /// Waits for the next heartbeat. In a cluster, or with an ordered release, a change of the cluster or release
    /// report ends the wait early, because an operator waits for it.
    async fn wait_for_next(&self, pause: Duration) {
        let until = tokio::time::Instant::now() + pause;
        while self.session.is_in_cluster() || self.session.is_release_ordered() {
            let next = tokio::time::Instant::now() + REPORT_DELAY;
            if next >= until {
                break;
            }
            tokio::time::sleep_until(next).await;
            let release = (self.agent.release)();
            let another = release.is_some_and(|release| self.session.is_release_changed(&release));
            if another || self.session.is_cluster_changed(&(self.agent.cluster)()) {
                return;
            }
        }
        tokio::time::sleep_until(until).await;
    }

    async fn next_heartbeat(&mut self) -> wire::HeartbeatRequest {
        let interval = self.agent.settings.heartbeat_interval();
        if let Some(pending) = self.session.pending(self.agent.clock.milliseconds(), interval) {
            return pending.clone();
        }
        let report = if self.session.should_send_report() { self.read_hardware().await } else { None };
        let (standing, release) = ((self.agent.cluster)(), (self.agent.release)());
        self.session.build_heartbeat(self.agent.clock.milliseconds(), report, standing, release).clone()
    }

    /// Reads the hardware beside the loop; `None` while it takes too long.
    async fn read_hardware(&mut self) -> Option<HardwareReport> {
        let read = self.agent.hardware.clone();
        let reading = self.hardware_read.get_or_insert_with(|| tokio::task::spawn_blocking(move || read()));
        let patience = HARDWARE_TIMEOUT.min(self.agent.settings.heartbeat_interval());
        let outcome = tokio::time::timeout(patience, reading).await.ok()?;
        self.hardware_read = None;
        // A reader that panicked is tried again with the next heartbeat.
        outcome.inspect_err(|error| tracing::error!(%error, "reading the hardware failed")).ok()
    }

    async fn send_heartbeat(
        &mut self,
        heartbeat: &wire::HeartbeatRequest,
    ) -> Result<wire::HeartbeatResponse, Status> {
        let late = |_| Status::deadline_exceeded(format!("no answer within {} s", CALL_TIMEOUT.as_secs()));
        let outcome = tokio::time::timeout(CALL_TIMEOUT, self.call_server(heartbeat)).await.map_err(late);
        let outcome = outcome.and_then(|answer| answer);
        // An error of a server has no source error; that of a broken connection has one.
        if outcome
            .as_ref()
            .is_err_and(|status| status.code() == Code::DeadlineExceeded || status.source().is_some())
        {
            self.client = None;
        }
        outcome
    }

    async fn call_server(
        &mut self,
        heartbeat: &wire::HeartbeatRequest,
    ) -> Result<wire::HeartbeatResponse, Status> {
        let client = if let Some(client) = &mut self.client {
            client
        } else {
            let unavailable = |error: connection::ConnectError| Status::unavailable(error.to_string());
            let target = &mut self.targets[self.current];
            let config = if let Some(config) = &target.config {
                config.clone()
            } else {
                let settings = match &self.agent.fallback {
                    Some(fallback) if target.is_fallback => fallback,
                    _ => &self.agent.settings,
                };
                let (identity, time) = (&self.agent.identity, &self.agent.time);
                let config = connection::client_config(identity, &settings.ca_certificates, time)
                    .map_err(unavailable)?;
                target.config.insert(config).clone()
            };
            let client = connection::connect_server(&target.endpoint, config).await.map_err(unavailable)?;
            self.client.insert(client)
        };
        Ok(client.heartbeat(heartbeat.clone()).await?.into_inner())
    }

    /// Applies the settings in a response, and drops the fallback once the settings have worked.
    fn apply_settings(&mut self, answer: &wire::HeartbeatResponse) {
        let by_fallback = self.targets[self.current].is_fallback;
        if !by_fallback && self.agent.fallback.take().is_some() {
            self.targets.retain(|target| !target.is_fallback);
            (self.agent.observer)(&AgentEvent::SettingsConfirmed);
        }
        let mut settings = match self.agent.settings.with_response(answer) {
            Ok(settings) if settings == self.agent.settings => return,
            Ok(settings) => settings,
            Err(reason) => {
                (self.agent.observer)(&AgentEvent::SettingsRejected { reason });
                return;
            }
        };
        let working = match &self.agent.fallback {
            Some(fallback) if by_fallback => fallback.clone(),
            _ => self.agent.settings.clone(),
        };
        settings.endpoints.shuffle(&mut rand::rng());
        let here = &self.targets[self.current].endpoint;
        let again = settings.endpoints.iter().position(|endpoint| endpoint == here);
        let again = again.filter(|_| settings.ca_certificates == working.ca_certificates);
        if let Some(again) = again {
            // It is the first from now on, also after a restart.
            settings.endpoints.swap(0, again);
        } else {
            self.client = None;
        }
        self.agent.fallback = again.is_none().then_some(working);
        self.agent.settings = settings.clone();
        self.targets = build_targets(&self.agent.settings, self.agent.fallback.as_ref());
        self.current = 0;
        (self.agent.observer)(&AgentEvent::SettingsChanged {
            settings,
            fallback: self.agent.fallback.clone(),
        });
    }
}

fn build_targets(settings: &AgentSettings, fallback: Option<&AgentSettings>) -> Vec<ServerTarget> {
    let of = |settings: &AgentSettings, of_fallback| {
        let endpoints = settings.endpoints.clone();
        endpoints.into_iter().map(move |endpoint| ServerTarget {
            endpoint,
            config: None,
            is_fallback: of_fallback,
        })
    };
    let mut targets: Vec<_> = of(settings, false).collect();
    targets.extend(fallback.into_iter().flat_map(|fallback| of(fallback, true)));
    targets
}

/// Whether another endpoint may do better. A heartbeat that is too old, or one too many, is rejected everywhere.
const fn should_try_next(code: Code) -> bool {
    !matches!(code, Code::FailedPrecondition | Code::ResourceExhausted | Code::InvalidArgument)
}

fn error_message(status: &Status) -> String {
    if status.code() == Code::Unauthenticated {
        return "the shepherd does not know this machine id with this key; it may have been retired or enrolled again \
                elsewhere; retrying"
            .to_owned();
    }
    describe_status(status)
}

#[cfg(test)]
mod tests {
    use curator_client::identity::Identity;
    use model::ids::MachineId;
    use tokio_util::sync::CancellationToken;
    use uuid::Uuid;

    use super::*;
    use crate::agent::{no_cluster, no_release};
    use crate::boot_clock::HostClock;
    use crate::trusted_time::TrustedTime;

    fn settings(endpoint: &str) -> AgentSettings {
        AgentSettings::new(&[endpoint.to_owned()], &[], 0).unwrap()
    }

    fn agent(events: &Arc<std::sync::Mutex<Vec<AgentEvent>>>) -> Agent {
        let events = events.clone();
        let clock = Arc::new(HostClock::read().unwrap());
        Agent {
            machine_id: MachineId::generate(),
            identity: Arc::new(Identity::generate().unwrap()),
            settings: settings("old:1"),
            fallback: None,
            access_fence: 1,
            incarnation: Uuid::new_v4(),
            agent_version: "1".to_owned(),
            clock: clock.clone(),
            time: Arc::new(TrustedTime::new(clock, None)),
            hardware: Arc::new(HardwareReport::default),
            cluster: no_cluster(),
            release: no_release(),
            uploads_logs: false,
            server_pool: None,
            observer: Arc::new(move |event| events.lock().unwrap().push(event.clone())),
        }
    }

    fn response_with_endpoint(endpoint: &str) -> wire::HeartbeatResponse {
        wire::HeartbeatResponse { endpoints: vec![endpoint.to_owned()], ..Default::default() }
    }

    fn response_with_endpoints(endpoints: &[&str]) -> wire::HeartbeatResponse {
        let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
        wire::HeartbeatResponse { endpoints, ..Default::default() }
    }

    fn target_list(work: &HeartbeatLoop) -> Vec<(&str, bool)> {
        work.targets.iter().map(|target| (target.endpoint.as_str(), target.is_fallback)).collect()
    }

    #[test]
    fn loop_can_be_spawned() {
        fn spawnable<T: Send + 'static>(_: T) {}
        spawnable(agent(&Arc::default()).run(CancellationToken::new()));
    }

    #[test]
    fn old_endpoint_stays_until_the_new_one_works() {
        let events = Arc::default();
        let mut work = HeartbeatLoop::new(agent(&events));
        work.apply_settings(&response_with_endpoint("new:1"));
        assert_eq!(target_list(&work), [("new:1", false), ("old:1", true)]);
        // The new one fails, the old one responds and repeats its settings: nothing changes.
        work.current = 1;
        work.apply_settings(&response_with_endpoint("new:1"));
        assert_eq!(target_list(&work), [("new:1", false), ("old:1", true)]);
        work.current = 0;
        work.apply_settings(&wire::HeartbeatResponse::default());
        assert_eq!(target_list(&work), [("new:1", false)]);
        let events = events.lock().unwrap();
        assert!(
            matches!(events[..], [AgentEvent::SettingsChanged { .. }, AgentEvent::SettingsConfirmed]),
            "{events:?}"
        );
    }

    #[test]
    fn withdrawn_settings_leave_the_old_endpoint_alone() {
        let mut work = HeartbeatLoop::new(agent(&Arc::default()));
        work.apply_settings(&response_with_endpoint("new:1"));
        work.current = 1;
        work.apply_settings(&response_with_endpoint("old:1"));
        assert_eq!(target_list(&work), [("old:1", false)]);
        assert!(work.agent.fallback.is_none());
    }

    #[test]
    fn newer_settings_replace_bad_ones_and_keep_the_fallback() {
        let mut work = HeartbeatLoop::new(agent(&Arc::default()));
        work.apply_settings(&response_with_endpoint("bad:1"));
        work.current = 1;
        work.apply_settings(&response_with_endpoint("good:1"));
        assert_eq!(target_list(&work), [("good:1", false), ("old:1", true)]);
    }

    #[test]
    fn endpoint_in_use_stays_first_when_others_change() {
        let events = Arc::default();
        let mut work = HeartbeatLoop::new(agent(&events));
        work.apply_settings(&response_with_endpoints(&["aaa:1", "old:1", "zzz:1"]));
        assert_eq!(target_list(&work)[0], ("old:1", false));
        assert_eq!(target_list(&work).len(), 3);
        work.current = 2;
        let second = work.targets[2].endpoint.clone();
        work.apply_settings(&response_with_endpoints(&["bbb:1", &second]));
        assert_eq!(target_list(&work), [(second.as_str(), false), ("bbb:1", false)]);
        work.apply_settings(&response_with_endpoints(&["bbb:1", &second]));
        let events = events.lock().unwrap();
        let settings: Vec<_> = events
            .iter()
            .map(|event| matches!(event, AgentEvent::SettingsChanged { fallback: None, .. }))
            .collect();
        assert_eq!(
            settings,
            [true, true],
            "nothing has to be proven, and the same list is no news: {events:?}"
        );
    }

    #[test]
    fn agents_of_one_server_do_not_all_go_to_the_same_next_one() {
        let next = || {
            let mut work = HeartbeatLoop::new(agent(&Arc::default()));
            work.apply_settings(&response_with_endpoints(&["old:1", "a:1", "b:1", "c:1"]));
            work.targets[1].endpoint.clone()
        };
        let chosen: std::collections::BTreeSet<_> = (0..200).map(|_| next()).collect();
        assert_eq!(chosen.len(), 3);
    }

    #[test]
    fn new_ca_has_to_work_before_the_old_one_is_dropped() {
        let mut work = HeartbeatLoop::new(agent(&Arc::default()));
        let ca = Identity::generate().unwrap().certificate_der().to_vec();
        work.apply_settings(&wire::HeartbeatResponse { ca_certificates: vec![ca], ..Default::default() });
        assert_eq!(target_list(&work), [("old:1", false), ("old:1", true)]);
    }

    #[test]
    fn invalid_settings_are_rejected_as_a_whole() {
        let events = Arc::default();
        let mut work = HeartbeatLoop::new(agent(&events));
        let broken =
            wire::HeartbeatResponse { ca_certificates: vec![vec![1]], ..response_with_endpoint("new:1") };
        work.apply_settings(&broken);
        assert_eq!(target_list(&work), [("old:1", false)]);
        assert!(matches!(events.lock().unwrap()[..], [AgentEvent::SettingsRejected { .. }]));
    }
}
