//! Machines with wrong clocks: the real program under a clock of its own (libfaketime), and the shepherd's own
//! listener with the certificate that it issues itself.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use shepherd::bmdb::engine::fact_change::NewAgent;
use shepherd::model::ids::MachineId;
use shepherd::model::time::unix_milliseconds;
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::state_directory::LastHeartbeat;
use shepherd::roleserver::trusted_time::TimeSample;
use tokio::task::block_in_place;
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, phase, provided, record_agent, settings, until};
use crate::harness::postgres::TestDatabase;
use crate::roleserver::{Machine, signal, wait_for};

const DAY_MS: u64 = 86_400_000;

/// Where Debian's package puts the library, whatever the architecture.
fn library() -> Result<PathBuf> {
    for entry in std::fs::read_dir("/usr/lib")? {
        let path = entry?.path().join("faketime/libfaketime.so.1");
        if path.exists() {
            return Ok(path);
        }
    }
    anyhow::bail!("libfaketime is missing; run tools/need faketime")
}

/// A machine with its clock at `time`, in libfaketime's syntax. Its boot clock is the host's.
fn machine_at(time: &str) -> Result<Machine> {
    let mut machine = Machine::new()?;
    machine.environment = vec![
        ("LD_PRELOAD", library()?.display().to_string()),
        ("FAKETIME", time.to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("NO_FAKE_STAT", "1".to_owned()),
    ];
    Ok(machine)
}

/// The outcome of the newest heartbeat of an agent other than `earlier`.
fn newest(machine: &Machine, earlier: Option<Uuid>) -> Result<LastHeartbeat> {
    wait_for("a heartbeat to be tried", || {
        let last = machine.state().read_last_heartbeat()?;
        Ok(last.filter(|last| Some(last.incarnation) != earlier))
    })
}

fn delivered(machine: &Machine, earlier: Option<Uuid>) -> Result<LastHeartbeat> {
    wait_for("a heartbeat to be delivered", || {
        let last = machine.state().read_last_heartbeat()?;
        Ok(last.filter(|last| Some(last.incarnation) != earlier && last.error.is_none()))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_whose_clock_is_wrong_becomes_ready_once_it_got_the_time() -> TestResult {
    let database = TestDatabase::create("wrong_clock").await?;
    let directory = tempfile::tempdir()?;
    let listener = Listener::start(&database, settings(directory.path())?).await?;
    let pool = database.pool().await?;
    for (time, text) in
        [("-2d", "not valid yet"), ("+21d", "expired"), ("@1970-01-02 00:00:00", "not valid yet")]
    {
        let machine = machine_at(time)?;
        let id = provided(&pool).await?;
        let ask = |fence, shepherd_time_ms| wire::EnrollRequest {
            machine_id: id.to_string(),
            endpoints: listener.server.endpoints.clone(),
            ca_certificates: listener.server.current_ca_certificates(),
            lane: "access".to_owned(),
            fence,
            bmdb_id: Uuid::new_v4().to_string(),
            heartbeat_interval_seconds: 1,
            session_id: String::new(),
            shepherd_time_ms,
            signing_keys: Vec::new(),
            key_rotations: Vec::new(),
            replace_signing_keys: false,
            require_signed_declarations: false,
        };

        // As an older shepherd enrols it: no time is reported, and its heartbeats fail.
        let untold = ask(1, 0);
        let bmdb_id = untold.bmdb_id.clone();
        let success = block_in_place(|| machine.enroll(&untold))?;
        started(&listener, id, &success).await?;
        let failed = block_in_place(|| newest(&machine, None))?;
        let error = failed.error.context("the clock is not wrong enough")?;
        assert!(error.contains(text), "{time}: {error}");

        let now = unix_milliseconds(SystemTime::now());
        let request = wire::EnrollRequest { bmdb_id, ..ask(2, now) };
        block_in_place(|| machine.enroll(&request))?;
        until("the machine is Ready", async || Ok(phase(&pool, id).await? == "Ready")).await?;

        // A loss of power, a month of being off, and an empty battery: the clock is useless.
        let before = block_in_place(|| delivered(&machine, None))?;
        let kept = machine.state().read_time_sample()?.context("the time was not kept")?;
        assert!(kept.boot_id == success.boot_id && kept.unix_ms.abs_diff(u64::try_from(now)?) < DAY_MS);
        let earlier =
            TimeSample { unix_ms: kept.unix_ms - 30 * DAY_MS, boot_id: Uuid::new_v4().to_string(), ..kept };
        machine.state().write_time_sample(&earlier)?;
        signal(machine.agent()?.pid, Signal::KILL);
        block_in_place(|| delivered(&machine, Some(before.incarnation)))?;
        let relearnt = wait_for("the time to be kept again", || {
            Ok(machine.state().read_time_sample()?.filter(|sample| sample.boot_id == success.boot_id))
        })?;
        assert!(relearnt.unix_ms > kept.unix_ms);
    }
    Ok(listener.stop().await?)
}

/// Records that the agent was started, as the work that enrolled it does.
async fn started(listener: &Listener, id: MachineId, success: &wire::EnrollSuccess) -> Result<()> {
    let agent = NewAgent {
        public_key: success.public_key.clone(),
        boot_id: Some(success.boot_id.clone()),
        version: success.agent_version.clone(),
        supervision: "detached".to_owned(),
        fence: 2,
    };
    record_agent(&listener.bmdb, id, agent).await
}
