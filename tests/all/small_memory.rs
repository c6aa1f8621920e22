//! The memory of a shepherd: one copy of the agent's program, however many machines it is uploaded to at once, and
//! little in total.
//!
//! The long form, with a thousand machines over five minutes, is `make bench ARGS=--memory`. Nothing here depends on a
//! clock.

use std::fs;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use futures::future::join_all;
use russh::keys::key::safe_rng;
use russh::keys::{Algorithm, PrivateKey};
use russh::server::{Auth, ChannelOpenHandle, Config, Handler, Msg, Session, VerifiedPublicKey};
use russh::{Channel, ChannelId};
use shepherd::model::remote_step::{DEFAULT_AGENT_PATH, PROBE_BEGIN, RemoteStep, probe_key, upload_status};
use shepherd::proto::agent::v1::EnrollRequest;
use shepherd::takeover::agent_binary::AgentBinary;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::take_over_machine;
use shepherd::takeover::session::{SshSettings, SshTarget};
use shepherd::takeover::takeover_error::TakeoverError;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::time::Instant;

use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};
use crate::harness::memory::{peak_of, process_memory};

/// Uploads at once.
const UPLOADS: usize = 32;
/// Bytes of the program.
const PROGRAM: usize = 8 << 20;

/// A machine that begins to receive an upload, and receives no more of it before all others have begun.
#[derive(Clone)]
struct Machine {
    begun: Arc<Barrier>,
    uploading: bool,
}

impl Handler for Machine {
    type Error = russh::Error;

    async fn auth_publickey(
        &mut self,
        _user: &str,
        _key: VerifiedPublicKey<'_>,
    ) -> Result<Auth, Self::Error> {
        Ok(Auth::Accept)
    }

    async fn channel_open_session(
        &mut self,
        _channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), Self::Error> {
        reply.accept().await;
        Ok(())
    }

    async fn exec_request(
        &mut self,
        channel: ChannelId,
        command: &[u8],
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_success(channel)?;
        match RemoteStep::parse(&String::from_utf8_lossy(command)) {
            Some(RemoteStep::Upload { .. }) => self.uploading = true,
            Some(RemoteStep::Probe { .. }) => {
                let answer = [
                    (probe_key::OS, "Linux"),
                    (probe_key::ARCH, std::env::consts::ARCH),
                    (probe_key::USER, "root"),
                    (probe_key::HOME, "/root"),
                    (probe_key::SHA256, "sha256sum"),
                    (probe_key::DIGEST, "none"),
                ];
                let lines = answer.map(|(key, value)| format!("{key}={value}\n")).concat();
                session.data(channel, format!("{PROBE_BEGIN}\n{lines}").into_bytes())?;
                end(channel, session, 0)?;
            }
            _ => end(channel, session, 127)?,
        }
        Ok(())
    }

    async fn data(
        &mut self,
        channel: ChannelId,
        _data: &[u8],
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        if self.uploading {
            self.uploading = false;
            self.begun.wait().await;
            end(channel, session, upload_status::WRITE)?;
        }
        Ok(())
    }
}

fn end(channel: ChannelId, session: &mut Session, status: u32) -> Result<(), russh::Error> {
    session.exit_status_request(channel, status)?;
    session.eof(channel)?;
    session.close(channel)
}

async fn machine(config: Arc<Config>, begun: Arc<Barrier>) -> Result<SshTarget> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        if let Ok((stream, _)) = listener.accept().await
            && let Ok(session) =
                russh::server::run_stream(config, stream, Machine { begun, uploading: false }).await
        {
            // How the other side closes the connection is not tested.
            let _ended = session.await;
        }
    });
    Ok(SshTarget { host: "127.0.0.1".to_owned(), port, user: "root".to_owned() })
}

/// Uploads a program to this many machines at once, and returns the outcome of each.
async fn uploads(agent: &AgentBinary, settings: &SshSettings) -> Result<Vec<TakeoverError>> {
    let key = PrivateKey::random(&mut safe_rng(), Algorithm::Ed25519)?;
    let config = Config { keys: vec![key], window_size: 128 << 10, ..Config::default() };
    let (config, begun) = (Arc::new(config), Arc::new(Barrier::new(UPLOADS)));
    let mut targets = Vec::new();
    for _ in 0..UPLOADS {
        targets.push(machine(config.clone(), begun.clone()).await?);
    }
    let deadline = Instant::now() + PATIENCE;
    let request = EnrollRequest::default();
    let all = targets.iter().map(|target| {
        let (expectation, request) = (HostKeyExpectation::PinOnFirstUse, &request);
        async move {
            take_over_machine(
                settings,
                target,
                &expectation,
                agent,
                DEFAULT_AGENT_PATH,
                request,
                deadline,
                |_| Ok(()),
            )
            .await
        }
    });
    let ended = join_all(all).await;
    ended.into_iter().map(|ended| ended.err().context("an upload that was refused went on")).collect()
}

#[test]
fn many_uploads_at_once_hold_one_copy_of_the_program() -> TestResult {
    // One thread for both sides, because memory is counted by thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut program = fs::read("/bin/sh")?;
    program.resize(PROGRAM, 7);
    let agent = AgentBinary::from_content(program.into()).map_err(anyhow::Error::msg)?;
    let mut settings = SshSettings::new(ClientKey::generate()?);
    (settings.connect_timeout, settings.greeting_timeout) = (PATIENCE, PATIENCE);
    (settings.login_timeout, settings.exec_timeout) = (PATIENCE, PATIENCE);
    let (ended, most) = peak_of(|| runtime.block_on(uploads(&agent, &settings)));
    for error in ended? {
        assert!(
            matches!(error, TakeoverError::StepFailed { step: "upload", .. }),
            "not at its upload: {error}"
        );
    }
    // Besides the program itself, which existed before: keys, and data that is being sent.
    let copies = UPLOADS * PROGRAM;
    assert!(most < copies / 4, "{UPLOADS} uploads held {} of {} KiB", most >> 10, copies >> 10);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shepherd_whose_machines_are_ready_holds_less_than_150_mib() -> TestResult {
    let fleet = Fleet::start("small_memory", &["--machine_count", "60", "--boot_seconds", "0.5"]).await?;
    let mut shepherd = fleet.shepherd("shepherd", &[endpoint()?], &["--initializer_loop_parallelism=20"])?;
    fleet.until("all 60 machines are Ready", ALL_READY).await?;
    let held = process_memory(shepherd.pid(), "VmRSS:")?;
    assert!(held < 150 << 10, "{held} KiB");
    let status = shepherd.terminate().await?;
    assert!(status.code() == Some(0), "the shepherd ended with {status}\n{}", fleet.explain().await?);
    Ok(())
}
