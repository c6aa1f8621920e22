//! The program of the simulator: its flags, its stop, and what it keeps after a kill.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use shepherd::model::ids::IntentId;
use shepherd::providers::provider::CreationControl as _;
use shepherd::providers::simulated::{SimulatedConfig, SimulatedProvider};
use shepherd::simulator::state::FleetState;

use super::{Running, runtime};
use crate::harness::child::{Program, guarded};

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
