//! The heartbeat loop.
//!
//! One task per machine: make a heartbeat, send it to the endpoint that worked
//! last, and on a failure to the next one, for ever. Everything the loop needs
//! of the world comes in as a value ([`BootClock`], the hardware, the identity,
//! an observer), because the simulator runs thousands of these in one process
//! and the program on a machine runs one.
//!
//! New settings that come with an answer are used at once, and the ones that
//! carried the answer stay as a fallback until the new ones have worked: a wrong
//! certificate pushed to a fleet must not cut it off.
//!
//! A connection that works is kept. Endpoints are told anew whenever a shepherd
//! starts or stops, to the whole fleet at once, and a database that is away is
//! away for the whole fleet: did every agent shake hands anew each time, the
//! shepherds would come back to nothing but handshakes. So the way in use stays
//! in use while it is among the new ones, and an answer that says no is not
//! taken for a broken connection. The other ways are shuffled, or all agents of
//! a shepherd that stops would go to the same next one.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rustls::ClientConfig;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::curator::identity::Identity;
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::agent_callback_client::AgentCallbackClient;
use crate::proto::hardware::v1::HardwareReport;
use crate::roleserver::backoff;
use crate::roleserver::clock::BootClock;
use crate::roleserver::connection;
use crate::roleserver::conversation::{Conversation, Delivered, Speaker};
use crate::roleserver::enrolment::Settings;
use crate::roleserver::known_time::{KnownTime, Told};
use crate::roleserver::shepherds::{Shepherds, Way, Ways};

/// How long one heartbeat may take, connecting included.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a heartbeat waits for the hardware to be read; a disk that hangs
/// longer delays the report, never the heartbeat.
const HARDWARE_PATIENCE: Duration = Duration::from_secs(20);
/// So many failures in a row are borne on one connection to the only endpoint. Behind one address
/// there may be several servers, and the next connection may find another one.
const FAILURES_PER_CONNECTION: u32 = 4;
/// The second heartbeat brings the hardware report, for which nobody should wait an interval.
const BEFORE_REPORT: Duration = Duration::from_secs(2);

/// Reads what the machine is made of; may block.
pub type ReadHardware = Arc<dyn Fn() -> HardwareReport + Send + Sync>;
/// Says where the machine stands with its cluster; called in the loop, so it must be quick.
pub type ReadStanding = Arc<dyn Fn() -> wire::ClusterReport + Send + Sync>;
/// Says which release the role server is; none for one that does not replace itself. As quick.
pub type ReadRelease = Arc<dyn Fn() -> Option<wire::ReleaseReport> + Send + Sync>;
/// Hears what the loop does; called in the loop, so it must be quick.
pub type Observer = Arc<dyn Fn(&Event) + Send + Sync>;

/// One agent: everything the loop needs.
#[derive(Clone)]
pub struct Agent {
    /// Who the machine is.
    pub machine_id: MachineId,
    /// The key it proves.
    pub identity: Arc<Identity>,
    /// How to reach the shepherd.
    pub settings: Settings,
    /// Settings to fall back to while `settings` have not worked yet.
    pub fallback: Option<Settings>,
    /// Highest fence of the access lane that enrolled it.
    pub access_fence: i64,
    /// This start of the agent; a new one for each.
    pub incarnation: Uuid,
    /// What `agent_version` says.
    pub agent_version: String,
    /// The boot and the time since it.
    pub clock: Arc<dyn BootClock>,
    /// What time it is, as a shepherd said.
    pub time: Arc<KnownTime>,
    /// The hardware.
    pub hardware: ReadHardware,
    /// Where the machine stands with its cluster; [`no_cluster`] where it can have none.
    pub cluster: ReadStanding,
    /// Which release it is; [`no_release`] where that is nobody's to change.
    pub release: ReadRelease,
    /// Whether it brings logs when it is asked for them: then somebody hears [`Event::LogRequests`] who does.
    pub brings_logs: bool,
    /// Told by which ways shepherds are reached, where somebody wants to know.
    pub shepherds: Option<Shepherds>,
    /// Who hears of it; [`ignore`] when nobody does.
    pub observer: Observer,
}

/// What happened in the loop.
#[derive(Clone, Debug)]
pub enum Event {
    /// A heartbeat is durable at the shepherd.
    Delivered {
        /// Where it was delivered.
        endpoint: String,
        /// Its place in time.
        seq: u64,
        /// What it carried.
        delivered: Delivered,
    },
    /// A try failed.
    Failed {
        /// Where it failed.
        endpoint: String,
        /// One sentence.
        error: String,
        /// Failures in a row, this one included.
        failures: u32,
        /// Until the next try.
        pause: Duration,
    },
    /// An answer brought other settings, which are used from now on.
    Settings {
        /// The new ones.
        settings: Settings,
        /// The ones to fall back to until the new ones have worked; none when the way in use is
        /// one of the new ones.
        fallback: Option<Settings>,
    },
    /// The settings in use have worked; no fallback is needed any more.
    SettingsWork,
    /// An answer brought settings that cannot be used; the old ones stay.
    SettingsRefused {
        /// Which field, and why.
        reason: String,
    },
    /// An answer said what time it is, and that is worth keeping.
    Time {
        /// The time and where in the boot it was said.
        told: Told,
    },
    /// An answer asked for something about a cluster.
    ClusterOrder {
        /// What.
        order: wire::ClusterOrder,
    },
    /// An answer asked for another release of the role server.
    ReleaseOrder {
        /// Which.
        order: wire::ReleaseOrder,
    },
    /// An answer asked for logs.
    LogRequests {
        /// All that are wanted, also those that were heard of before.
        requests: Vec<wire::LogRequest>,
    },
}

/// Where a machine stands that can have no cluster.
#[must_use]
pub fn no_cluster() -> ReadStanding {
    Arc::new(wire::ClusterReport::default)
}

/// Of a role server that does not replace itself.
#[must_use]
pub fn no_release() -> ReadRelease {
    Arc::new(|| None)
}

/// An observer that hears nothing.
#[must_use]
pub fn ignore() -> Observer {
    Arc::new(|_| {})
}

impl Agent {
    /// Heartbeats until `shutdown`; never ends otherwise.
    pub async fn run(self, shutdown: CancellationToken) {
        let work = Loop::new(self);
        tokio::select! {
            () = shutdown.cancelled() => {}
            never = work.run() => match never {},
        }
    }
}

/// One way to a shepherd.
struct Target {
    endpoint: String,
    config: Option<Arc<ClientConfig>>,
    of_fallback: bool,
}

struct Loop {
    agent: Agent,
    talk: Conversation,
    targets: Vec<Target>,
    current: usize,
    client: Option<AgentCallbackClient<Channel>>,
    reading: Option<JoinHandle<HardwareReport>>,
}

enum Never {}

impl Loop {
    fn new(agent: Agent) -> Self {
        let talk = Conversation::new(Speaker {
            machine_id: agent.machine_id,
            boot_id: agent.clock.boot_id(),
            incarnation: agent.incarnation,
            agent_version: agent.agent_version.clone(),
            access_fence: agent.access_fence,
            brings_logs: agent.brings_logs,
        });
        let targets = targets(&agent.settings, agent.fallback.as_ref());
        let new = Self { agent, talk, targets, current: 0, client: None, reading: None };
        new.show_ways();
        new
    }

    /// Says by which ways shepherds are reached, the one in use first.
    fn show_ways(&self) {
        let Some(shepherds) = &self.agent.shepherds else { return };
        let (before, from_here) = self.targets.split_at(self.current.min(self.targets.len()));
        let ways = from_here.iter().chain(before).map(|target| Way {
            endpoint: target.endpoint.clone(),
            ca_certificates: match &self.agent.fallback {
                Some(fallback) if target.of_fallback => fallback.ca_certificates.clone(),
                _ => self.agent.settings.ca_certificates.clone(),
            },
        });
        shepherds.learn(Ways {
            machine_id: self.agent.machine_id,
            identity: self.agent.identity.clone(),
            time: self.agent.time.clone(),
            ways: ways.collect(),
        });
    }

    async fn run(mut self) -> Never {
        let mut failures = 0;
        loop {
            let heartbeat = self.next_heartbeat().await;
            let endpoint = self.targets[self.current].endpoint.clone();
            let outcome = self.send(&heartbeat).await;
            let random = rand::rng().random();
            let pause = match outcome {
                Ok(answer) => {
                    failures = 0;
                    let delivered = self.talk.answered(&answer);
                    (self.agent.observer)(&Event::Delivered { endpoint, seq: heartbeat.seq, delivered });
                    if let Some(told) = self.agent.time.hear(answer.shepherd_time_ms) {
                        (self.agent.observer)(&Event::Time { told });
                    }
                    if let Some(order) = &answer.cluster_order {
                        (self.agent.observer)(&Event::ClusterOrder { order: order.clone() });
                    }
                    if let Some(order) = &answer.release_order {
                        (self.agent.observer)(&Event::ReleaseOrder { order: order.clone() });
                    }
                    self.adopt(&answer);
                    self.show_ways();
                    // After the ways, by which they are brought.
                    if !answer.log_requests.is_empty() {
                        let requests = answer.log_requests.clone();
                        (self.agent.observer)(&Event::LogRequests { requests });
                    }
                    let interval = self.agent.settings.heartbeat_interval();
                    let soon = (self.talk.wants_report() && heartbeat.hardware_report.is_none())
                        || answer.cluster_order.is_some();
                    backoff::between_heartbeats(
                        if soon { interval.min(BEFORE_REPORT) } else { interval },
                        random,
                    )
                }
                Err(status) => {
                    failures += 1;
                    self.talk.refused(status.code());
                    let interval = self.agent.settings.heartbeat_interval();
                    let pause = backoff::after_failure(failures, self.targets.len(), interval, random);
                    (self.agent.observer)(&Event::Failed {
                        endpoint,
                        error: sentence(&status),
                        failures,
                        pause,
                    });
                    if turns(status.code()) {
                        if self.targets.len() > 1 || failures.is_multiple_of(FAILURES_PER_CONNECTION) {
                            self.client = None;
                        }
                        self.current = (self.current + 1) % self.targets.len();
                    }
                    pause
                }
            };
            self.rest(pause).await;
        }
    }

    /// Waits for the next heartbeat. What has changed about a cluster is said soon: somebody waits for it.
    async fn rest(&self, pause: Duration) {
        let until = tokio::time::Instant::now() + pause;
        while self.talk.in_cluster() || self.talk.is_ordered() {
            let next = tokio::time::Instant::now() + BEFORE_REPORT;
            if next >= until {
                break;
            }
            tokio::time::sleep_until(next).await;
            let release = (self.agent.release)();
            let another = release.is_some_and(|release| self.talk.is_another_release(&release));
            if another || self.talk.is_news(&(self.agent.cluster)()) {
                return;
            }
        }
        tokio::time::sleep_until(until).await;
    }

    async fn next_heartbeat(&mut self) -> wire::HeartbeatRequest {
        let interval = self.agent.settings.heartbeat_interval();
        if let Some(pending) = self.talk.pending(self.agent.clock.milliseconds(), interval) {
            return pending.clone();
        }
        let report = if self.talk.wants_report() { self.hardware().await } else { None };
        let (standing, release) = ((self.agent.cluster)(), (self.agent.release)());
        self.talk.compose(self.agent.clock.milliseconds(), report, standing, release).clone()
    }

    /// Reads the hardware beside the loop; `None` while it takes too long.
    async fn hardware(&mut self) -> Option<HardwareReport> {
        let read = self.agent.hardware.clone();
        let reading = self.reading.get_or_insert_with(|| tokio::task::spawn_blocking(move || read()));
        let patience = HARDWARE_PATIENCE.min(self.agent.settings.heartbeat_interval());
        let outcome = tokio::time::timeout(patience, reading).await.ok()?;
        self.reading = None;
        // A reader that panicked is tried again with the next heartbeat.
        outcome.inspect_err(|error| tracing::error!(%error, "reading the hardware failed")).ok()
    }

    async fn send(&mut self, heartbeat: &wire::HeartbeatRequest) -> Result<wire::HeartbeatResponse, Status> {
        let late = |_| Status::deadline_exceeded(format!("no answer within {} s", CALL_TIMEOUT.as_secs()));
        let outcome = tokio::time::timeout(CALL_TIMEOUT, self.call(heartbeat)).await.map_err(late);
        let outcome = outcome.and_then(|answer| answer);
        // What a server says has no cause that we would know; a connection that broke has.
        if outcome
            .as_ref()
            .is_err_and(|status| status.code() == Code::DeadlineExceeded || status.source().is_some())
        {
            self.client = None;
        }
        outcome
    }

    async fn call(&mut self, heartbeat: &wire::HeartbeatRequest) -> Result<wire::HeartbeatResponse, Status> {
        let client = if let Some(client) = &mut self.client {
            client
        } else {
            let unavailable = |error: connection::ConnectError| Status::unavailable(error.to_string());
            let target = &mut self.targets[self.current];
            let config = if let Some(config) = &target.config {
                config.clone()
            } else {
                let settings = match &self.agent.fallback {
                    Some(fallback) if target.of_fallback => fallback,
                    _ => &self.agent.settings,
                };
                let (identity, time) = (&self.agent.identity, &self.agent.time);
                let config = connection::client_config(identity, &settings.ca_certificates, time)
                    .map_err(unavailable)?;
                target.config.insert(config).clone()
            };
            let client = connection::connect(&target.endpoint, config).await.map_err(unavailable)?;
            self.client.insert(client)
        };
        Ok(client.heartbeat(heartbeat.clone()).await?.into_inner())
    }

    /// Takes what an answer changes, and lets the fallback go once the settings have worked.
    fn adopt(&mut self, answer: &wire::HeartbeatResponse) {
        let by_fallback = self.targets[self.current].of_fallback;
        if !by_fallback && self.agent.fallback.take().is_some() {
            self.targets.retain(|target| !target.of_fallback);
            (self.agent.observer)(&Event::SettingsWork);
        }
        let mut settings = match self.agent.settings.changed_by(answer) {
            Ok(settings) if settings == self.agent.settings => return,
            Ok(settings) => settings,
            Err(reason) => {
                (self.agent.observer)(&Event::SettingsRefused { reason });
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
            // First from now on, after a restart too.
            settings.endpoints.swap(0, again);
        } else {
            self.client = None;
        }
        self.agent.fallback = again.is_none().then_some(working);
        self.agent.settings = settings.clone();
        self.targets = targets(&self.agent.settings, self.agent.fallback.as_ref());
        self.current = 0;
        (self.agent.observer)(&Event::Settings { settings, fallback: self.agent.fallback.clone() });
    }
}

fn targets(settings: &Settings, fallback: Option<&Settings>) -> Vec<Target> {
    let of = |settings: &Settings, of_fallback| {
        let endpoints = settings.endpoints.clone();
        endpoints.into_iter().map(move |endpoint| Target { endpoint, config: None, of_fallback })
    };
    let mut targets: Vec<_> = of(settings, false).collect();
    targets.extend(fallback.into_iter().flat_map(|fallback| of(fallback, true)));
    targets
}

/// Whether another endpoint may do better. A heartbeat that is too old, or one
/// too many, is so everywhere.
const fn turns(code: Code) -> bool {
    !matches!(code, Code::FailedPrecondition | Code::ResourceExhausted | Code::InvalidArgument)
}

fn sentence(status: &Status) -> String {
    match status.code() {
        Code::Unauthenticated => {
            "the shepherd does not know this machine id with this key; it may have been \
                                  retired or enrolled anew elsewhere; trying on"
                .to_owned()
        }
        code => {
            let message = if status.message().is_empty() { code.description() } else { status.message() };
            message.chars().take(500).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::clock::HostClock;

    fn settings(endpoint: &str) -> Settings {
        Settings::new(&[endpoint.to_owned()], &[], 0).unwrap()
    }

    fn agent(events: &Arc<std::sync::Mutex<Vec<Event>>>) -> Agent {
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
            time: Arc::new(KnownTime::new(clock, None)),
            hardware: Arc::new(HardwareReport::default),
            cluster: no_cluster(),
            release: no_release(),
            brings_logs: false,
            shepherds: None,
            observer: Arc::new(move |event| events.lock().unwrap().push(event.clone())),
        }
    }

    fn moves_to(endpoint: &str) -> wire::HeartbeatResponse {
        wire::HeartbeatResponse { endpoints: vec![endpoint.to_owned()], ..Default::default() }
    }

    fn tells(endpoints: &[&str]) -> wire::HeartbeatResponse {
        let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
        wire::HeartbeatResponse { endpoints, ..Default::default() }
    }

    fn ways(work: &Loop) -> Vec<(&str, bool)> {
        work.targets.iter().map(|target| (target.endpoint.as_str(), target.of_fallback)).collect()
    }

    #[test]
    fn loop_can_be_spawned() {
        fn spawnable<T: Send + 'static>(_: T) {}
        spawnable(agent(&Arc::default()).run(CancellationToken::new()));
    }

    #[test]
    fn old_way_stays_until_the_new_one_has_worked() {
        let events = Arc::default();
        let mut work = Loop::new(agent(&events));
        work.adopt(&moves_to("new:1"));
        assert_eq!(ways(&work), [("new:1", false), ("old:1", true)]);
        // The new one fails, the old one answers and repeats its advice: nothing changes.
        work.current = 1;
        work.adopt(&moves_to("new:1"));
        assert_eq!(ways(&work), [("new:1", false), ("old:1", true)]);
        work.current = 0;
        work.adopt(&wire::HeartbeatResponse::default());
        assert_eq!(ways(&work), [("new:1", false)]);
        let events = events.lock().unwrap();
        assert!(matches!(events[..], [Event::Settings { .. }, Event::SettingsWork]), "{events:?}");
    }

    #[test]
    fn advice_that_is_taken_back_leaves_the_old_way_alone() {
        let mut work = Loop::new(agent(&Arc::default()));
        work.adopt(&moves_to("new:1"));
        work.current = 1;
        work.adopt(&moves_to("old:1"));
        assert_eq!(ways(&work), [("old:1", false)]);
        assert!(work.agent.fallback.is_none());
    }

    #[test]
    fn better_advice_replaces_bad_advice_and_keeps_what_works() {
        let mut work = Loop::new(agent(&Arc::default()));
        work.adopt(&moves_to("bad:1"));
        work.current = 1;
        work.adopt(&moves_to("good:1"));
        assert_eq!(ways(&work), [("good:1", false), ("old:1", true)]);
    }

    #[test]
    fn way_in_use_stays_first_when_others_come_and_go() {
        let events = Arc::default();
        let mut work = Loop::new(agent(&events));
        work.adopt(&tells(&["aaa:1", "old:1", "zzz:1"]));
        assert_eq!(ways(&work)[0], ("old:1", false));
        assert_eq!(ways(&work).len(), 3);
        work.current = 2;
        let second = work.targets[2].endpoint.clone();
        work.adopt(&tells(&["bbb:1", &second]));
        assert_eq!(ways(&work), [(second.as_str(), false), ("bbb:1", false)]);
        work.adopt(&tells(&["bbb:1", &second]));
        let events = events.lock().unwrap();
        let settings: Vec<_> =
            events.iter().map(|event| matches!(event, Event::Settings { fallback: None, .. })).collect();
        assert_eq!(
            settings,
            [true, true],
            "nothing has to be proven, and the same list is no news: {events:?}"
        );
    }

    #[test]
    fn agents_of_one_server_do_not_all_go_to_the_same_next_one() {
        let next = || {
            let mut work = Loop::new(agent(&Arc::default()));
            work.adopt(&tells(&["old:1", "a:1", "b:1", "c:1"]));
            work.targets[1].endpoint.clone()
        };
        let chosen: std::collections::BTreeSet<_> = (0..200).map(|_| next()).collect();
        assert_eq!(chosen.len(), 3);
    }

    #[test]
    fn other_authority_has_to_prove_itself_on_the_same_way() {
        let mut work = Loop::new(agent(&Arc::default()));
        let ca = Identity::generate().unwrap().certificate_der().to_vec();
        work.adopt(&wire::HeartbeatResponse { ca_certificates: vec![ca], ..Default::default() });
        assert_eq!(ways(&work), [("old:1", false), ("old:1", true)]);
    }

    #[test]
    fn broken_advice_is_refused_whole() {
        let events = Arc::default();
        let mut work = Loop::new(agent(&events));
        let broken = wire::HeartbeatResponse { ca_certificates: vec![vec![1]], ..moves_to("new:1") };
        work.adopt(&broken);
        assert_eq!(ways(&work), [("old:1", false)]);
        assert!(matches!(events.lock().unwrap()[..], [Event::SettingsRefused { .. }]));
    }
}
