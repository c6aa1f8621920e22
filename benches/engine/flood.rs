//! What a flood of connections without a credential costs everyone else: requests without it and beside it.
//!
//! The listeners of a shepherd and one of its loops run in this process. Their limits on connections are those that a
//! shepherd derives from the files that it may open. The flood is a child of this process, so its files and its
//! processor time are not those of the listeners. The clients are in this process, with and without a flood.

use std::array;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustls::ClientConfig;
use serde::{Deserialize, Serialize};
use shepherd::bmdb::metrics::Metrics;
use shepherd::curator_client::identity::Identity;
use shepherd::proto::agent::v1::HeartbeatRequest;
use shepherd::proto::agent::v1::agent_callback_client::AgentCallbackClient;
use shepherd::roleserver::boot_clock::HostClock;
use shepherd::roleserver::connection::{client_config, connect_server};
use shepherd::roleserver::trusted_time::TrustedTime;
use shepherd::server::callback::callback_server::CallbackServer;
use shepherd::server::metrics_server::{MetricsServer, serve_metrics};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use shepherd::transport::gate::open_files::raise_limit;
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD, HALF_A_REQUEST};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::Plan;
use crate::agents::{give_keys, serve};
use crate::fleet::Fleet;
use crate::pickup::PickupLoop;
use crate::reads::ApiFixture;
use crate::report::{Report, Target, progress, quantile};
use crate::server::own_processor_seconds;

/// Connections of a flood to each listener that send nothing, and those that send the beginning of a handshake or of a
/// request.
const SILENT: usize = 1300;
const HALF_SPOKEN: usize = 1000;
/// Files that a flood of three listeners needs, and some more.
const FILES_OF_A_FLOOD: u64 = 8192;
/// Longest time until each connection of a flood was open once.
const FLOOD_PATIENCE: Duration = Duration::from_secs(40);
/// Longest time of the requests beside one flood. All of them together take less than five minutes.
const LONGEST: Duration = Duration::from_secs(45);
/// Longest time of an attempt, and attempts of a request: agents and `shepherdctl` try again, too.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
const ATTEMPTS: u32 = 3;

/// What is measured, in turns.
const REQUESTS: [&str; 6] = [
    "a heartbeat over an open connection",
    "a heartbeat over a new connection",
    "an operator's call over an open connection",
    "an operator's call over a new connection",
    "a health check over a new connection",
    "a claim of a machine from when it is due",
];

/// The flood that a child makes, as JSON.
#[derive(Serialize, Deserialize)]
struct FloodOrder {
    /// Number of addresses that it comes from. One of them is that of the clients.
    sources: usize,
    /// Listeners with TLS.
    secured: Vec<SocketAddr>,
    /// The listener without TLS.
    plain: SocketAddr,
}

/// Floods listeners until standard input ends. Prints a line as soon as each connection was open once.
pub(crate) async fn run(order: &str) -> Result<()> {
    let order: FloodOrder = serde_json::from_str(order)?;
    let plan = |target, half| FloodPlan {
        target,
        sources: order.sources,
        first_source: 0,
        silent: SILENT,
        half_spoken: HALF_SPOKEN,
        half,
    };
    let mut plans: Vec<FloodPlan> = order.secured.iter().map(|target| plan(*target, HALF_A_RECORD)).collect();
    plans.push(plan(order.plain, HALF_A_REQUEST));
    let flood = Flood::start(&plans).await?;
    writeln!(std::io::stdout(), "{}", flood.opened())?;
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    Ok(())
}

/// A child that floods until it is ended, or until this process ends.
struct Flooder(Child);

impl Flooder {
    /// Starts it, and waits until each of its connections was open once.
    async fn start(order: &FloodOrder) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--flooder").arg(serde_json::to_string(order)?).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("its output is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let line = tokio::time::timeout(FLOOD_PATIENCE, lines.next_line()).await;
        line.context("the connections of a flood were not opened in time")??.context("the flood ended")?;
        Ok(Self(child))
    }

    /// Ends it. It must have run until now.
    async fn end(mut self) -> Result<()> {
        ensure!(self.0.try_wait()?.is_none(), "the flood ended before the measurement did");
        drop(self.0.stdin.take());
        let status = self.0.wait().await?;
        ensure!(status.success(), "the flood ended with {status}");
        Ok(())
    }
}

/// An agent that sends heartbeats.
struct MeasuredAgent {
    endpoint: String,
    config: Arc<ClientConfig>,
    open: AgentCallbackClient<Channel>,
    last: HeartbeatRequest,
}

impl MeasuredAgent {
    /// Opens a connection of an agent.
    async fn connect(fleet: &Fleet, server: &CallbackServer) -> Result<Self> {
        let (machine, key) = give_keys(fleet, 1).await?.pop().context("an agent")?;
        let identity = Identity::from_pkcs8(&hex::decode(key)?)?;
        let time = Arc::new(TrustedTime::new(Arc::new(HostClock::read()?), None));
        let config = client_config(&identity, &server.current_ca_certificates(), &time)?;
        let endpoint = server.endpoints.first().context("an endpoint")?.clone();
        let open = connect_server(&endpoint, config.clone()).await?;
        let last = HeartbeatRequest {
            machine_id: machine.to_string(),
            boot_id: Uuid::new_v4().to_string(),
            incarnation: Uuid::new_v4().to_string(),
            seq: 1,
            agent_version: "bench".to_owned(),
            access_fence: 1,
            ..HeartbeatRequest::default()
        };
        Ok(Self { endpoint, config, open, last })
    }

    /// Sends a heartbeat over the connection that is open.
    async fn beat_over_open_connection(&mut self) -> Result<()> {
        self.last.seq += 1;
        self.open.heartbeat(self.last.clone()).await?;
        Ok(())
    }

    /// Sends a heartbeat over a new connection.
    async fn beat_over_new_connection(&mut self) -> Result<()> {
        self.last.seq += 1;
        let mut client = connect_server(&self.endpoint, self.config.clone()).await?;
        client.heartbeat(self.last.clone()).await?;
        Ok(())
    }
}

/// The parts of a shepherd that are measured, and their clients.
struct MeasuredShepherd<'f> {
    api: ApiFixture,
    callback: CallbackServer,
    metrics: MetricsServer,
    stop: CancellationToken,
    agent: MeasuredAgent,
    pickup: PickupLoop<'f>,
    health: reqwest::Client,
}

impl<'f> MeasuredShepherd<'f> {
    async fn start(
        plan: &Plan,
        fleet: &'f Fleet,
        limits: impl Fn(ListenerKind) -> GateLimits,
    ) -> Result<Self> {
        let stop = CancellationToken::new();
        let api = ApiFixture::start(fleet, limits(ListenerKind::Api)).await?;
        let callback = serve(fleet, api.key.clone(), limits(ListenerKind::Callback), stop.clone()).await?;
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let metrics_limits = limits(ListenerKind::Metrics);
        let metrics =
            serve_metrics(&fleet.bmdb, Metrics::new(), address, metrics_limits, stop.clone()).await?;
        let agent = MeasuredAgent::connect(fleet, &callback).await?;
        let pickup = PickupLoop::start(fleet, plan.releases).await?;
        // It opens a new connection for each request.
        let health = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build()?;
        Ok(Self { api, callback, metrics, stop, agent, pickup, health })
    }

    fn order(&self, sources: usize) -> FloodOrder {
        let secured = vec![self.callback.local_addr, self.api.server.local_addr];
        FloodOrder { sources, secured, plain: self.metrics.local_addr }
    }

    async fn check_health(&self) -> Result<()> {
        let url = format!("http://{}/healthz", self.metrics.local_addr);
        self.health.get(url).send().await?.error_for_status()?;
        Ok(())
    }

    /// Measures requests in turns, as often as planned or until the time is over.
    async fn measure(&mut self, plan: &Plan, name: &'static str) -> Result<Phase> {
        let (began, spent) = (Instant::now(), own_processor_seconds()?);
        let mut requests: [Latencies; REQUESTS.len()] = array::from_fn(|_| Latencies::default());
        let machines = self.pickup.machines.clone();
        let turns = machines.iter().cycle().zip(0..plan.polls);
        for (machine, _) in turns.take_while(|_| began.elapsed() < LONGEST) {
            let [open_beat, new_beat, open_call, new_call, health, claim] = &mut requests;
            open_beat.measure(async || self.agent.beat_over_open_connection().await).await?;
            new_beat.measure(async || self.agent.beat_over_new_connection().await).await?;
            open_call.measure(async || self.api.page_over_open_connection().await).await?;
            new_call.measure(async || self.api.page_over_new_connection().await).await?;
            health.measure(async || self.check_health().await).await?;
            claim.times.push(self.pickup.pick_up(*machine).await?.from_release);
        }
        let processor_share = (own_processor_seconds()? - spent) / began.elapsed().as_secs_f64();
        Ok(Phase { name, requests, processor_share })
    }

    async fn end(self) -> Result<()> {
        // An open connection would delay the end of its server.
        drop(self.agent);
        self.pickup.end().await?;
        self.api.stop.cancel();
        self.stop.cancel();
        self.api.server.wait_until_stopped().await;
        self.callback.wait_until_stopped().await;
        self.metrics.wait_until_stopped().await;
        Ok(())
    }
}

/// How long requests of one kind took, in milliseconds, and how many attempts failed before.
#[derive(Default)]
struct Latencies {
    times: Vec<f64>,
    failed_attempts: u32,
}

impl Latencies {
    /// Measures a request with the attempts that it needs.
    async fn measure(&mut self, mut request: impl AsyncFnMut() -> Result<()>) -> Result<()> {
        let began = Instant::now();
        let mut attempts = 1;
        loop {
            let error = match tokio::time::timeout(ATTEMPT_TIMEOUT, request()).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => error,
                Err(elapsed) => anyhow::Error::new(elapsed),
            };
            self.failed_attempts += 1;
            ensure!(attempts < ATTEMPTS, "a request failed {attempts} times, at last with: {error:#}");
            attempts += 1;
        }
        self.times.push(began.elapsed().as_secs_f64() * 1000.0);
        Ok(())
    }
}

/// What was measured beside one flood, or without one.
struct Phase {
    name: &'static str,
    /// In the order of [`REQUESTS`].
    requests: [Latencies; REQUESTS.len()],
    /// Processor seconds of this process in each second.
    processor_share: f64,
}

/// Measures heartbeats, calls, health checks and claims without a flood, and beside one from one and from many sources.
pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "Requests without a flood and beside one",
        "A callback server, an API, a metrics listener and a loop in one process, with the limits of a shepherd that may open \
         as many files. A flood is 1,300 connections to each listener that send nothing, and 1,000 that send the beginning of \
         a handshake or of a request. It is a process of its own on the same host, and opens a closed connection again after \
         a second. One of its addresses is that of the clients. Requests are sent one after the other, those of one turn \
         before those of the next. One that fails is sent again, up to three times; its time includes that. Over a new \
         connection, it also includes the handshake. The claim runs from the commit that makes a machine due to the first \
         line of the handler. The median has the shortest and the longest time beside it.",
    )?;
    let files = raise_limit();
    ensure!(
        files >= FILES_OF_A_FLOOD,
        "a flood opens up to {FILES_OF_A_FLOOD} files, and a process of this host may open {files}: raise the hard limit \
         (`ulimit -Hn`)"
    );
    let limits = |kind| GateLimits::for_listener(kind, files);
    let places = [ListenerKind::Callback, ListenerKind::Api, ListenerKind::Metrics]
        .map(|kind| format!("{} at {}", limits(kind).total, kind.as_str()));
    report.say("files that a process may open", format!("{files}; connections: {}", places.join(", ")));
    let mut shepherd = MeasuredShepherd::start(plan, fleet, limits).await?;
    let measured = measure_phases(plan, &mut shepherd).await;
    shepherd.end().await?;
    show(&measured?, report)
}

async fn measure_phases(plan: &Plan, shepherd: &mut MeasuredShepherd<'_>) -> Result<Vec<Phase>> {
    let mut phases = Vec::new();
    for (name, sources) in [("no flood", 0), ("one source", 1), ("200 sources", 200)] {
        progress(&format!("sending requests, {name}"))?;
        let flooder = match sources {
            0 => None,
            _ => Some(Flooder::start(&shepherd.order(sources)).await?),
        };
        phases.push(shepherd.measure(plan, name).await?);
        if let Some(flooder) = flooder {
            flooder.end().await?;
        }
    }
    Ok(phases)
}

fn show(phases: &[Phase], report: &mut Report) -> Result<()> {
    for (number, request) in REQUESTS.into_iter().enumerate() {
        for phase in phases {
            let Latencies { times, failed_attempts } = &phase.requests[number];
            let what = format!("{request}, {}", phase.name);
            report.add(what.as_str(), "ms", times, Target::None)?;
            let within = format!("{what}: 99 of 100 within");
            report.add(within, "ms", &[quantile(times, 0.99)], Target::None)?;
            if *failed_attempts > 0 {
                let failed = format!("{what}: failed attempts");
                report.add(failed, "", &[f64::from(*failed_attempts)], Target::None)?;
            }
        }
    }
    for phase in phases {
        let what = format!("processor time of the listeners and the clients, {}", phase.name);
        report.add(what, "s each s", &[phase.processor_share], Target::None)?;
    }
    Ok(())
}
