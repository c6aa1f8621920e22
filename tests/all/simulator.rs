//! The simulator with a shepherd's code: a provider, SSH hosts, and agents that send heartbeats, all over real
//! connections.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _};
use prost::Message as _;
use serde_json::Value;
use shepherd::model::ids::IntentId;
use shepherd::proto::agent::v1 as wire;
use shepherd::providers::provider::{
    CreationControl as _, PowerAction, PowerControl, Provider as _, ProviderMachine, RebootControl,
};
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use shepherd::simulator::fault_command::{self, FaultArgs};
use shepherd::simulator::service::{RunArgs, Simulator};
use shepherd::simulator::state::FleetState;
use shepherd::takeover::agent_binary::AgentBinary;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::exec::RunOutcome;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::{TakeoverError, TakeoverResult, take_over_machine};
use shepherd::takeover::session::{SshSession, SshSettings, SshTarget};
use tokio_util::sync::CancellationToken;

use crate::harness::child::{Program, guarded};
use crate::harness::port::reserve_port;
use crate::roleserver::callback::{Callback, curious};

const PATIENCE: Duration = Duration::from_mins(5);
const AGENT_PATH: &str = "/root/roleserver";

#[derive(Parser)]
struct RunLine {
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Parser)]
struct FaultLine {
    #[command(flatten)]
    fault: FaultArgs,
}

/// A simulator in this process.
pub(crate) struct Running {
    pub(crate) url: String,
    state: PathBuf,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), shepherd::simulator::service::SimulatorError>>,
}

impl Running {
    pub(crate) async fn start(directory: &Path, flags: &[&str]) -> Result<Self> {
        let state = directory.join("fleet.json");
        let state_flag = state.to_str().context("a path of text")?;
        let line = RunLine::try_parse_from(["simulator", "--state_path", state_flag].iter().chain(flags))?;
        let simulator = Simulator::start(&line.run).await?;
        let url = simulator.url();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(simulator.serve(shutdown.clone()));
        Ok(Self { url, state, shutdown, task })
    }

    pub(crate) fn provider(&self) -> Result<SimulatedProvider> {
        let caller = Some("test".to_owned());
        Ok(SimulatedProvider::new(SimulatedConfig { name: "sim".parse()?, url: self.url.clone(), caller })?)
    }

    pub(crate) async fn strike(&self, machine: &str, fault: &str) -> Result<()> {
        let line = FaultLine::try_parse_from(["fault", "--url", &self.url, machine, fault])?;
        fault_command::send_fault(&line.fault).await?;
        Ok(())
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.shutdown.cancel();
        Ok(tokio::time::timeout(PATIENCE, self.task).await???)
    }

    async fn truth(&self, id: &str) -> Result<Value> {
        let answer: Value = client()?.get(format!("{}/v1/fleet", self.url)).send().await?.json().await?;
        let machines = answer["machines"].as_array().context("a fleet has machines")?;
        machines.iter().find(|machine| machine["id"] == id).cloned().context("no such machine")
    }

    async fn until_state(&self, id: &str, states: &[&str]) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let truth = self.truth(id).await?;
            if truth["state"].as_str().is_some_and(|state| states.contains(&state)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{id} is not {states:?}: {truth}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Creates a machine and waits until it answers.
    pub(crate) async fn machine(&self) -> Result<ProviderMachine> {
        let made = self.provider()?.create(IntentId::generate(), None).await?;
        self.until_state(&made.id, &["up"]).await?;
        Ok(made)
    }

    /// Every complete line: a reader may see the first half of one.
    fn journal(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(format!("{}.calls.jsonl", self.state.display()))?;
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

fn client() -> Result<reqwest::Client> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

fn settings() -> Result<SshSettings> {
    let mut settings = SshSettings::new(ClientKey::generate()?);
    settings.greeting_timeout = Duration::from_mins(1);
    settings.login_timeout = Duration::from_mins(1);
    Ok(settings)
}

fn target(machine: &ProviderMachine) -> Result<SshTarget> {
    Ok(SshTarget {
        host: machine.address.clone().context("an address")?,
        port: machine.ssh_port.context("a port")?,
        user: machine.ssh_user.clone().context("a user")?,
    })
}

fn vouched(machine: &ProviderMachine) -> HostKeyExpectation {
    HostKeyExpectation::Pinned(machine.host_keys.clone())
}

fn far() -> tokio::time::Instant {
    tokio::time::Instant::now() + PATIENCE
}

async fn session(machine: &ProviderMachine) -> Result<SshSession> {
    Ok(SshSession::connect(&settings()?, &target(machine)?, &vouched(machine), far()).await?)
}

/// Connects, and receives not even the greeting that an SSH server begins with.
async fn says_nothing(machine: &ProviderMachine) -> Result<()> {
    let target = target(machine)?;
    let connecting = tokio::net::TcpStream::connect((target.host.as_str(), target.port));
    let mut stream = connecting.await.context("a hanging machine refuses")?;
    let mut greeting = [0];
    let read = tokio::io::AsyncReadExt::read(&mut stream, &mut greeting);
    let result = tokio::time::timeout(Duration::from_secs(1), read).await;
    ensure!(result.is_err(), "a hanging machine says something, or closes: {result:?}");
    Ok(())
}

/// A real ELF program, large enough to be streamed.
fn program() -> Result<AgentBinary> {
    let mut content = std::fs::read("/bin/sh")?;
    content.resize(3_000_000, 7);
    AgentBinary::from_content(content.into()).map_err(anyhow::Error::msg)
}

fn request(callback: &Callback, machine_id: u8, fence: i64) -> wire::EnrollRequest {
    wire::EnrollRequest {
        machine_id: format!("11111111-1111-4111-8111-1111111111{machine_id:02}"),
        endpoints: vec![callback.endpoint.clone()],
        ca_certificates: vec![callback.ca.clone()],
        lane: "access".to_owned(),
        fence,
        bmdb_id: "22222222-2222-4222-8222-222222222222".to_owned(),
        heartbeat_interval_seconds: 1,
        session_id: String::new(),
        shepherd_time_ms: 0,
    }
}

async fn take(
    machine: &ProviderMachine,
    agent: &AgentBinary,
    request: &wire::EnrollRequest,
) -> Result<Result<TakeoverResult, TakeoverError>> {
    let (settings, target) = (settings()?, target(machine)?);
    Ok(take_over_machine(
        &settings,
        &target,
        &vouched(machine),
        agent,
        AGENT_PATH,
        request,
        far(),
        |_| Ok(()),
    )
    .await)
}

/// Waits for a heartbeat that satisfies `wanted`.
async fn wait_for_heartbeat(
    callback: &Callback,
    wanted: impl Fn(&wire::HeartbeatRequest) -> bool,
) -> Result<wire::HeartbeatRequest> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = callback
            .heartbeats()
            .into_iter()
            .map(|observations| observations.request)
            .rev()
            .find(|request| wanted(request));
        if let Some(request) = found {
            return Ok(request);
        }
        ensure!(Instant::now() < deadline, "no such heartbeat among {}", callback.heartbeats().len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn a_machine_is_created_taken_over_and_heartbeats_with_its_hardware() {
    let callback = Callback::start(curious()).unwrap();
    let agent = program().unwrap();
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let running = Running::start(directory.path(), &["--machine_count", "3", "--boot_seconds", "0.1"])
            .await
            .unwrap();
        let machine = running.machine().await.unwrap();
        let body = request(&callback, 1, 7);
        let taken = take(&machine, &agent, &body).await.unwrap().unwrap();
        assert!(taken.uploaded);
        let report =
            wait_for_heartbeat(&callback, |heartbeat| heartbeat.hardware_report.is_some()).await.unwrap();
        assert_eq!((report.machine_id.as_str(), report.access_fence), (body.machine_id.as_str(), 7));
        assert_eq!(report.boot_id, taken.success.boot_id);
        let hardware = report.hardware_report.unwrap();
        assert!(!hardware.serial_number.is_empty() && !hardware.cpus.is_empty());
        assert_eq!(hardware.hostname, machine.id);
        let proved = callback.heartbeats()[0].public_key.clone();
        assert_eq!(
            proved, taken.success.public_key,
            "the key that TLS proves is the one that enrolment named"
        );

        // The same work again, as after a lost response; then a higher fence; then a lower one.
        let again = take(&machine, &agent, &body).await.unwrap().unwrap();
        assert!(!again.uploaded, "the program is there already");
        assert_eq!(again.success.public_key, taken.success.public_key);
        take(&machine, &agent, &request(&callback, 1, 9)).await.unwrap().unwrap();
        let error = take(&machine, &agent, &request(&callback, 1, 8)).await.unwrap().unwrap_err();
        assert!(matches!(error, TakeoverError::StaleFence { sent: 8, machine_fence: 9, .. }), "{error}");
        let error = take(&machine, &agent, &request(&callback, 2, 10)).await.unwrap().unwrap_err();
        assert!(matches!(error, TakeoverError::OtherMachine { .. }), "{error}");
        wait_for_heartbeat(&callback, |heartbeat| heartbeat.access_fence == 9).await.unwrap();
        running.stop().await.unwrap();
    });
}

#[test]
fn two_hundred_machines_are_taken_over_at_once() {
    let callback = Callback::start(curious()).unwrap();
    let content = std::fs::read("/bin/sh").unwrap();
    let agent = AgentBinary::from_content(content.into()).map_err(anyhow::Error::msg).unwrap();
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let flags = ["--machine_count", "200", "--boot_seconds", "0.5"];
        let running = Running::start(directory.path(), &flags).await.unwrap();
        let provider = running.provider().unwrap();
        let machines =
            futures::future::try_join_all((0..200).map(|_| provider.create(IntentId::generate(), None)))
                .await
                .unwrap();
        let ids: HashSet<_> = machines.iter().map(|machine| machine.id.clone()).collect();
        assert_eq!(ids.len(), 200, "two intents never share a machine");
        for machine in &machines {
            running.until_state(&machine.id, &["up"]).await.unwrap();
        }
        let settings = settings().unwrap();
        let works = futures::stream::iter(machines.iter().enumerate()).map(|(number, machine)| {
            let request = wire::EnrollRequest {
                machine_id: uuid::Uuid::from_u128(number as u128 + 1).to_string(),
                heartbeat_interval_seconds: 5,
                ..request(&callback, 0, 1)
            };
            let (settings, agent) = (&settings, &agent);
            async move {
                let (target, expected) = (target(machine)?, vouched(machine));
                take_over_machine(settings, &target, &expected, agent, AGENT_PATH, &request, far(), |_| {
                    Ok(())
                })
                .await?;
                anyhow::Ok(())
            }
        });
        works.buffer_unordered(20).try_collect::<Vec<_>>().await.unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let reported: HashSet<_> = callback
                .heartbeats()
                .into_iter()
                .filter(|observations| observations.request.hardware_report.is_some())
                .map(|observations| (observations.request.machine_id, observations.public_key))
                .collect();
            if reported.len() == 200 {
                break;
            }
            assert!(Instant::now() < deadline, "{} of 200 reported their hardware", reported.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        running.stop().await.unwrap();
    });
}

#[test]
fn each_fault_is_cured_by_what_it_says_and_by_nothing_less() {
    let callback = Callback::start(curious()).unwrap();
    let agent = program().unwrap();
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let flags = ["--machine_count", "1", "--boot_seconds", "0.1", "--persistent_agent_percent", "100"];
        let running = Running::start(directory.path(), &flags).await.unwrap();
        let provider = running.provider().unwrap();
        let machine = running.machine().await.unwrap();
        let id = machine.id.as_str();
        let first = take(&machine, &agent, &request(&callback, 1, 1)).await.unwrap().unwrap();
        wait_for_heartbeat(&callback, |heartbeat| heartbeat.access_fence == 1).await.unwrap();

        // Dead agent: another enrolment is enough, and the boot stays the same.
        running.strike(id, "kill").await.unwrap();
        running.until_state(id, &["up"]).await.unwrap();
        take(&machine, &agent, &request(&callback, 1, 2)).await.unwrap().unwrap();
        let alive = wait_for_heartbeat(&callback, |heartbeat| heartbeat.access_fence == 2).await.unwrap();
        assert_eq!(alive.boot_id, first.success.boot_id);

        // Hanging machine: SSH sends nothing; a reboot starts another boot.
        running.strike(id, "hang").await.unwrap();
        says_nothing(&machine).await.unwrap();
        let intent = IntentId::generate();
        RebootControl::reboot(&provider, id, intent).await.unwrap();
        running.until_state(id, &["agent-running"]).await.unwrap();
        let second = wait_for_heartbeat(&callback, |heartbeat| heartbeat.boot_id != first.success.boot_id)
            .await
            .unwrap();
        RebootControl::reboot(&provider, id, intent).await.unwrap();
        assert_eq!(running.truth(id).await.unwrap()["boots"], 2, "one intent is one reboot");

        // Dead machine: a reboot does nothing, a power cycle does.
        running.strike(id, "dead").await.unwrap();
        RebootControl::reboot(&provider, id, IntentId::generate()).await.unwrap();
        assert_eq!(running.truth(id).await.unwrap()["state"], "dead");
        assert!(session(&machine).await.is_err());
        PowerControl::set_power(&provider, id, PowerAction::Cycle, IntentId::generate()).await.unwrap();
        wait_for_heartbeat(&callback, |heartbeat| {
            heartbeat.boot_id != second.boot_id && heartbeat.boot_id != first.success.boot_id
        })
        .await
        .unwrap();

        // No power, and it cannot be switched on.
        running.strike(id, "power-fail").await.unwrap();
        assert!(
            PowerControl::set_power(&provider, id, PowerAction::Cycle, IntentId::generate()).await.is_err()
        );
        assert!(RebootControl::reboot(&provider, id, IntentId::generate()).await.is_err());
        running.strike(id, "heal").await.unwrap();
        running.until_state(id, &["agent-running"]).await.unwrap();

        // A client that pinned the first host key rejects another one; after `heal` it is the first key again.
        running.strike(id, "new-host-key").await.unwrap();
        let error = take(&machine, &agent, &request(&callback, 1, 3)).await.unwrap().unwrap_err();
        assert!(matches!(error, TakeoverError::HostKeyChanged(_)), "{error}");
        running.strike(id, "heal").await.unwrap();
        running.strike(id, "disk-full").await.unwrap();
        let error = take(&machine, &agent, &request(&callback, 1, 3)).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("no space left"), "{error}");
        running.strike(id, "heal").await.unwrap();
        take(&machine, &agent, &request(&callback, 1, 3)).await.unwrap().unwrap();

        // No SSH: the agent continues.
        running.strike(id, "ssh-refuse").await.unwrap();
        assert!(session(&machine).await.is_err());
        let before = callback.heartbeats().len();
        let deadline = Instant::now() + PATIENCE;
        while callback.heartbeats().len() == before {
            assert!(Instant::now() < deadline, "the agent fell silent with the SSH server");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        running.stop().await.unwrap();
    });
}

#[tokio::test]
async fn a_simulated_machine_runs_nothing_but_what_it_knows() {
    let directory = tempfile::tempdir().unwrap();
    let running =
        Running::start(directory.path(), &["--machine_count", "1", "--boot_seconds", "0"]).await.unwrap();
    let machine = running.machine().await.unwrap();
    let evidence = directory.path().join("evidence");
    let session = session(&machine).await.unwrap();
    for command in [
        format!("touch '{}'", evidence.display()),
        format!("sh -c 'touch {}' shepherd-probe", evidence.display()),
        "reboot; touch evidence".to_owned(),
        "$(reboot)".to_owned(),
        String::new(),
    ] {
        let output = session.exec("a test", &command, bytes::Bytes::new()).await.unwrap();
        assert_eq!(output.exit, shepherd::takeover::exec::CommandExit::Status(127), "{command}");
    }
    assert!(!evidence.exists());
    assert_eq!(running.truth(&machine.id).await.unwrap()["boots"], 1, "none of these is a reboot");

    let argv = ["sudo", "-n", "systemctl", "reboot"].map(str::to_owned);
    let outcome = session.run_argv("a reboot", &argv).await.unwrap();
    assert!(matches!(outcome, RunOutcome::Finished(_) | RunOutcome::Unknown(_)), "{outcome:?}");
    let deadline = Instant::now() + PATIENCE;
    while running.truth(&machine.id).await.unwrap()["boots"] != 2 {
        assert!(Instant::now() < deadline, "the simulated machine did not reboot");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    running.stop().await.unwrap();
}

#[test]
fn a_restarted_simulator_is_the_same_fleet() {
    let callback = Callback::start(curious()).unwrap();
    let agent = program().unwrap();
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let flags = ["--machine_count", "4", "--seed", "5", "--boot_seconds", "0.1"];
        let running = Running::start(directory.path(), &flags).await.unwrap();
        let provider = running.provider().unwrap();
        // Between its two runs a simulator has no ports, and another program could get this one.
        let port = running.truth("sim-0003").await.unwrap()["port"].as_u64().unwrap();
        let _port = reserve_port(u16::try_from(port).unwrap()).unwrap();
        let intent = IntentId::generate();
        let made = provider.create(intent, Some("slot-0003")).await.unwrap();
        assert_eq!(made.id, "sim-0003");
        running.until_state(&made.id, &["up"]).await.unwrap();
        let made = provider.find_machine(&made.id).await.unwrap().unwrap();
        let taken = take(&made, &agent, &request(&callback, 3, 4)).await.unwrap().unwrap();
        let before = wait_for_heartbeat(&callback, |heartbeat| heartbeat.access_fence == 4).await.unwrap();
        let second = Running::start(directory.path(), &flags).await;
        assert!(second.is_err_and(|error| error.to_string().contains("in use by another simulator")));
        let journal = running.journal().unwrap().len();
        running.stop().await.unwrap();

        let wrong = Running::start(directory.path(), &["--seed", "6"]).await;
        assert!(wrong.is_err_and(|error| error.to_string().contains("give --seed 5")));
        let running = Running::start(directory.path(), &flags).await.unwrap();
        let provider = running.provider().unwrap();
        assert_eq!(
            provider.create(intent, Some("slot-0003")).await.unwrap(),
            made,
            "the intent made one machine"
        );
        let heartbeat =
            wait_for_heartbeat(&callback, |heartbeat| heartbeat.incarnation != before.incarnation)
                .await
                .unwrap();
        assert_eq!((&heartbeat.machine_id, &heartbeat.boot_id), (&before.machine_id, &before.boot_id));
        assert!(heartbeat.seq > before.seq, "time within a boot goes on");
        let again = take(&made, &agent, &request(&callback, 3, 5)).await.unwrap().unwrap();
        assert!(!again.uploaded);
        assert_eq!(again.success.public_key, taken.success.public_key);
        assert_eq!(again.host_key, taken.host_key);
        let error = take(&made, &agent, &request(&callback, 3, 4)).await.unwrap().unwrap_err();
        assert!(matches!(error, TakeoverError::StaleFence { machine_fence: 5, .. }), "{error}");
        assert!(running.journal().unwrap().len() > journal, "the journal goes on");
        running.stop().await.unwrap();
    });
}

#[tokio::test]
async fn the_journal_holds_every_call_with_its_start_and_end() {
    let directory = tempfile::tempdir().unwrap();
    let running =
        Running::start(directory.path(), &["--machine_count", "2", "--boot_seconds", "0"]).await.unwrap();
    let provider = running.provider().unwrap();
    provider.list().await.unwrap();
    let machine = running.machine().await.unwrap();
    let intent = IntentId::generate();
    PowerControl::set_power(&provider, &machine.id, PowerAction::Cycle, intent).await.unwrap();
    provider.power_state(&machine.id).await.unwrap();
    running.strike(&machine.id, "slow").await.unwrap();
    running.strike(&machine.id, "heal").await.unwrap();
    running.until_state(&machine.id, &["up"]).await.unwrap();
    let ssh = session(&machine).await.unwrap();
    ssh.exec("a test", "true", bytes::Bytes::new()).await.unwrap();
    ssh.close().await;
    let state = running.state.clone();
    let journal = || -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(format!("{}.calls.jsonl", state.display()))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    running.stop().await.unwrap();

    let lines = journal().unwrap();
    let sequence: Vec<_> = lines.iter().map(|line| line["seq"].as_u64().unwrap()).collect();
    assert!(sequence.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{sequence:?}");
    let mut open = BTreeMap::new();
    let mut seen = Vec::new();
    for line in &lines {
        let call = line["call"].as_u64().unwrap();
        if line["phase"] == "start" {
            open.insert(call, line);
        } else {
            let start = open.remove(&call).expect("an end has a start, and one");
            seen.push((start["what"].as_str().unwrap(), start, line));
        }
    }
    assert!(open.is_empty(), "{open:?}");
    let what: HashSet<_> = seen.iter().map(|(what, ..)| *what).collect();
    for expected in ["list", "create", "power", "power-state", "machine", "connection", "exec"] {
        assert!(what.contains(expected), "{expected} is not in {what:?}");
    }
    let (_, start, end) = seen.iter().find(|(what, ..)| *what == "power").unwrap();
    assert_eq!(start["intent"], intent.to_string());
    assert_eq!(start["caller"], "test");
    assert_eq!(start["machine"], machine.id);
    assert_eq!(start["arguments"]["action"], "cycle");
    assert_eq!(end["outcome"], "ok");
}

#[tokio::test]
async fn wrong_requests_are_answered_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let running = Running::start(directory.path(), &["--machine_count", "2"]).await.unwrap();
    let client = client().unwrap();
    let post =
        |path: &str, body: &str| client.post(format!("{}{path}", running.url)).body(body.to_owned()).send();
    let intent = IntentId::generate();
    for (path, body, status) in [
        ("/v1/machines", "", 400),
        ("/v1/machines", "{\"intent\":\"x\"}", 400),
        ("/v1/machines", &format!("{{\"intent\":\"{intent}\",\"more\":1}}"), 400),
        ("/v1/machines", &format!("{{\"intent\":\"{intent}\",\"reservation\":\"slot-9\"}}"), 404),
        ("/v1/machines/sim-0001/power", &format!("{{\"intent\":\"{intent}\",\"action\":\"on\"}}"), 404),
        ("/v1/machines/sim-0001/power", &format!("{{\"intent\":\"{intent}\",\"action\":\"burn\"}}"), 400),
        ("/v1/machines/sim-0001/faults", "{\"fault\":\"flood\"}", 400),
        ("/v1/machines/sim-0001/faults", "{\"fault\":\"kill\"}", 409),
        ("/v1/faults", "{\"fault\":\"kill\"}", 400),
    ] {
        let answer = post(path, body).await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{path} {body}");
        let value: Value = answer.json().await.unwrap();
        assert!(value["error"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
        let lines = running.journal().unwrap();
        let [.., start, end] = lines.as_slice() else { panic!("{path} {body} is not in the journal") };
        assert_eq!(
            (&start["seq"], &end["result"]["status"]),
            (&end["call"], &status.into()),
            "{path} {body}"
        );
        assert_eq!(end["result"]["error"], value["error"]);
    }
    let state = running.state.clone();
    running.stop().await.unwrap();
    let kept = FleetState::load(&state).unwrap().unwrap();
    assert!(kept.machines.iter().all(|record| record.intent.is_none() && record.machine.boots == 0));
}

#[tokio::test]
async fn lost_answers_make_no_second_machine() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--machine_count", "40", "--fault_profile", "harsh", "--seed", "3", "--boot_seconds", "0"];
    let running = Running::start(directory.path(), &flags).await.unwrap();
    let provider = running.provider().unwrap();
    let mut lost = 0;
    let mut made = HashSet::new();
    for _ in 0..40 {
        let intent = IntentId::generate();
        let mut tries = 0;
        let machine = loop {
            tries += 1;
            assert!(tries < 100, "an API of a thousand that fails seventy");
            match provider.create(intent, None).await {
                Ok(machine) => break machine,
                Err(error) => assert!(error.message.contains("503"), "{error}"),
            }
        };
        lost += tries - 1;
        made.insert(machine.id);
    }
    assert_eq!(made.len(), 40);
    assert!(lost > 0, "nothing failed, so nothing was shown");
    running.stop().await.unwrap();
}

/// The program itself, and its address.
fn simulator(state: &Path, machines: &str) -> Result<(Program, String)> {
    let mut command = guarded(env!("CARGO_BIN_EXE_shepherd"));
    command
        .args(["simulator", "--listen_address", "127.0.0.1:0", "--machine_count", machines, "--state_path"])
        .arg(state);
    let mut program = Program::spawn(command.stdout(Stdio::piped()).stderr(Stdio::null()))?;
    let stdout = program.child().stdout.take().context("its output")?;
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)?;
    let url = line.trim().strip_prefix("listening on ").context(line.clone())?.to_owned();
    Ok((program, url))
}

#[test]
fn the_program_says_where_it_listens_and_ends_cleanly_on_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("fleet.json");
    let (mut program, url) = simulator(&state, "200").unwrap();
    let strike = |fault: &str, machine: &str| {
        Command::new(env!("CARGO_BIN_EXE_shepherd"))
            .args(["simulator", "fault", machine, fault])
            .env("SHEPHERD_SIMULATOR_URL", &url)
            // A host without certificates of authorities can still use plain HTTP.
            .env("SSL_CERT_FILE", "/nonexistent")
            .env("SSL_CERT_DIR", "/nonexistent")
            .output()
            .unwrap()
    };
    let struck = strike("slow", "sim-0200");
    assert!(struck.status.success(), "{struck:?}");
    let declined = strike("kill", "sim-0001");
    assert_eq!(declined.status.code(), Some(1));
    let text = String::from_utf8(declined.stderr).unwrap();
    assert!(
        text.ends_with("the fault was not injected into sim-0001: no agent runs on the machine\n"),
        "{text}"
    );
    assert_eq!(strike("list-empty", "sim-0001").status.code(), Some(2));
    assert_eq!(strike("flood", "sim-0001").status.code(), Some(2));
    // A request that never ends does not delay the stop.
    let mut half = std::net::TcpStream::connect(url.trim_start_matches("http://")).unwrap();
    std::io::Write::write_all(&mut half, b"GET /v1/fleet HTTP/1.1\r\n").unwrap();
    assert!(runtime().unwrap().block_on(program.terminate()).unwrap().success());
    let kept = FleetState::load(&state).unwrap().unwrap();
    assert_eq!(kept.machines.len(), 200);
    assert!(kept.machines[199].machine.slow, "what was answered is on disk");
}

#[tokio::test]
async fn wrong_flags_are_answered_in_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    let refused = async |flags: &[&str]| match Running::start(directory.path(), flags).await {
        Ok(_) => panic!("{flags:?} was taken"),
        Err(error) => error.to_string(),
    };
    assert_eq!(
        refused(&["--listen_address", "192.0.2.1:0"]).await,
        "the simulator listens on loopback addresses only, and 192.0.2.1:0 is none; give --listen_address 127.0.0.1:PORT"
    );
    assert_eq!(
        refused(&["--boot_seconds", "nan"]).await,
        "--boot_seconds NaN is not a duration; give a number from 0 to 3600"
    );
    assert_eq!(
        refused(&["--listen_address", &taken]).await,
        format!(
            "the simulator cannot listen on {taken}: Address already in use (os error 98); stop what has it, or give another --listen_address"
        )
    );
    drop(holder);
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "nothing half-done is left behind: {left:?}");
    let file = directory.path().join("fleet.json");
    std::fs::write(&file, "[]").unwrap();
    let text = refused(&[]).await;
    assert!(text.contains("holds no fleet this release can read") && text.contains("move it away"), "{text}");
}

#[test]
fn a_killed_simulator_kept_everything_it_had_answered() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("fleet.json");
    let (program, url) = simulator(&state, "10").unwrap();
    let intent = IntentId::generate();
    runtime().unwrap().block_on(async {
        let config = SimulatedConfig { name: "sim".parse().unwrap(), url, caller: None };
        SimulatedProvider::new(config).unwrap().create(intent, None).await.unwrap();
    });
    drop(program);
    let kept = FleetState::load(&state).unwrap().unwrap();
    assert_eq!(kept.machines.iter().filter(|record| record.intent == Some(intent)).count(), 1);
    let (mut again, _) = simulator(&state, "10").unwrap();
    assert!(runtime().unwrap().block_on(again.terminate()).unwrap().success());
}

#[test]
fn an_enrolment_that_is_no_message_is_refused() {
    // The decoder and the limit come before the rules; both are tested over a real connection.
    runtime().unwrap().block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let running =
            Running::start(directory.path(), &["--machine_count", "1", "--boot_seconds", "0"]).await.unwrap();
        let machine = running.machine().await.unwrap();
        let agent = program().unwrap();
        let empty = wire::EnrollRequest::default();
        let error = take(&machine, &agent, &empty).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("machine_id"), "{error}");
        let ssh = session(&machine).await.unwrap();
        let command = format!("'sh' '-c' 'x' 'shepherd-enroll' '{AGENT_PATH}'");
        for input in [b"\xff\xff\xff".to_vec(), vec![0x0a; (1 << 20) + 10]] {
            let output = ssh.exec("a test", &command, input.into()).await.unwrap();
            assert_eq!(output.exit, shepherd::takeover::exec::CommandExit::Status(2));
        }
        assert_eq!(running.truth(&machine.id).await.unwrap()["enrolments"], 0);
        assert!(!empty.encode_to_vec().iter().any(|byte| *byte != 0));
        running.stop().await.unwrap();
    });
}
