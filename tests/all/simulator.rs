//! The simulator with a shepherd's code: a provider, SSH hosts, and agents that send heartbeats, all over real
//! connections.

mod program;
mod requests;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::Value;
use shepherd::model::ids::IntentId;
use shepherd::proto::agent::v1 as wire;
use shepherd::providers::provider::{
    CreationControl as _, PowerAction, PowerControl, Provider as _, ProviderMachine, RebootControl,
};
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use shepherd::simulator::fault_command::{self, FaultArgs};
use shepherd::simulator::service::{RunArgs, Simulator};
use shepherd::takeover::agent_binary::AgentBinary;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::exec::RunOutcome;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::{TakeoverResult, take_over_machine};
use shepherd::takeover::session::{SshSession, SshSettings, SshTarget};
use shepherd::takeover::takeover_error::TakeoverError;
use tokio_util::sync::CancellationToken;

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
        signing_keys: Vec::new(),
        key_rotations: Vec::new(),
        replace_signing_keys: false,
        require_signed_declarations: false,
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
