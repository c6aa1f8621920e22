//! SSH server of a simulated machine.
//!
//! Any public key may log in, as any user; the journal records which. A session may run the three commands of a
//! takeover ([`RemoteStep`]) and a reboot, recognised by their words. **Nothing is ever run on the host**: any other
//! command is answered as a shell answers a missing program, with exit status 127.
//!
//! Uploads are hashed as they stream in and discarded. Only the digest is stored on the machine's "disk".

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use model::remote_step::{ENROLL_BEGIN, PROBE_BEGIN, RemoteStep, UPLOAD_BEGIN, probe_key, upload_status};
use model::shell_words;
use prost::Message as _;
use proto::agent::v1 as wire;
use ring::digest;
use roleserver::enrolment::REQUEST_LIMIT_BYTES;
use russh::keys::PrivateKey;
use russh::keys::ssh_key::HashAlg;
use russh::server::{Auth, ChannelOpenHandle, Config, Handler, Msg, Session, VerifiedPublicKey};
use russh::{Channel, ChannelId, MethodKind, MethodSet};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agent;
use crate::fleet::SimulatedFleet;
use crate::host_key;
use crate::journal::{JournalCall, JournalOutcome, OpenCall};
use crate::machine::{MachineEvent, StepRejected};
use crate::observable::ObservableSsh;
use crate::severable_stream::SeverableStream;

/// A shell's exit status for a program that it cannot find.
const NOT_FOUND: u32 = 127;
/// The delay of a slow machine.
const SLOW_DELAY: Duration = Duration::from_secs(2);
/// How long a machine still answers after an order to reboot.
const REBOOT_DELAY: Duration = Duration::from_millis(200);
/// How long a connection may be idle.
const INACTIVITY_TIMEOUT: Duration = Duration::from_mins(2);

/// Serves until `stop` is cancelled. Connections end with it.
pub(crate) async fn serve_ssh(
    fleet: Arc<SimulatedFleet>,
    index: usize,
    listener: TcpListener,
    observable: ObservableSsh,
    stop: CancellationToken,
) {
    let (id, place) =
        fleet.read(|state| (state.machines[index].id.clone(), state.machines[index].machine.index));
    let config = match observable {
        ObservableSsh::Closed => return,
        ObservableSsh::Silent => None,
        ObservableSsh::Open { host_key: generation } => {
            match host_key::private_key(fleet.profile.seed, place, generation) {
                Ok(key) => Some(Arc::new(server_config(key))),
                Err(error) => {
                    tracing::error!(machine = %id, %error, "no host key");
                    return;
                }
            }
        }
    };
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                // `close` of the port may end `accept` before the token is polled.
                Err(_) if stop.is_cancelled() => return,
                Err(error) => {
                    tracing::warn!(machine = %id, %error, "cannot accept an SSH connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let call = fleet.journal.begin(JournalCall {
            channel: "ssh",
            action: "connection",
            machine: Some(&id),
            arguments: json!({}),
            ..JournalCall::default()
        });
        match &config {
            Some(config) => {
                let connection = SshConnection {
                    fleet: Arc::clone(&fleet),
                    index,
                    id: id.clone(),
                    user: String::new(),
                    key: String::new(),
                    running: HashMap::new(),
                };
                let stream = SeverableStream::new(stream, stop.clone());
                connections.spawn(run_connection(Arc::clone(config), stream, connection, call));
            }
            // The kernel of a hanging machine completes the TCP handshake, and nothing else happens.
            None => {
                connections.spawn(async move {
                    let _kept = (stream, call);
                    std::future::pending::<()>().await;
                });
            }
        }
    }
}

fn server_config(key: PrivateKey) -> Config {
    Config {
        methods: MethodSet::from([MethodKind::PublicKey].as_slice()),
        auth_rejection_time: Duration::from_millis(100),
        auth_rejection_time_initial: Some(Duration::ZERO),
        inactivity_timeout: Some(INACTIVITY_TIMEOUT),
        keys: vec![key],
        nodelay: true,
        ..Config::default()
    }
}

async fn run_connection(
    config: Arc<Config>,
    stream: SeverableStream,
    connection: SshConnection,
    call: OpenCall,
) {
    let outcome = match russh::server::run_stream(config, stream, connection).await {
        Ok(session) => session.await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => call.end(JournalOutcome::Ok, &json!({})),
        Err(error) => call.end(JournalOutcome::Failed, &json!({ "error": error.to_string() })),
    }
}

/// One connection to one machine.
struct SshConnection {
    fleet: Arc<SimulatedFleet>,
    index: usize,
    id: String,
    user: String,
    key: String,
    running: HashMap<ChannelId, RunningCommand>,
}

/// A command that reads its standard input.
enum RunningCommand {
    Upload {
        path: String,
        sha256: String,
        size: u64,
        received: u64,
        hash: Box<digest::Context>,
        call: OpenCall,
    },
    Enroll {
        input: Vec<u8>,
        call: OpenCall,
    },
}

/// The result of a command that has ended.
struct CommandResult {
    status: u32,
    stdout: Vec<u8>,
    stderr: Cow<'static, str>,
}

impl CommandResult {
    fn success(stdout: impl Into<Vec<u8>>) -> Self {
        Self { status: 0, stdout: stdout.into(), stderr: "".into() }
    }

    fn failure(status: u32, stderr: impl Into<Cow<'static, str>>) -> Self {
        Self { status, stdout: Vec::new(), stderr: stderr.into() }
    }
}

impl Handler for SshConnection {
    type Error = russh::Error;

    async fn auth_publickey(&mut self, user: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Self::Error> {
        user.clone_into(&mut self.user);
        self.key = key.public_key.fingerprint(HashAlg::Sha256).to_string();
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

    async fn shell_request(&mut self, channel: ChannelId, session: &mut Session) -> Result<(), Self::Error> {
        session.channel_failure(channel)
    }

    async fn exec_request(
        &mut self,
        channel: ChannelId,
        command: &[u8],
        session: &mut Session,
    ) -> Result<(), Self::Error> {
        session.channel_success(channel)?;
        let command = String::from_utf8_lossy(command).into_owned();
        if self.fleet.read(|state| state.machines[self.index].machine.slow) {
            tokio::time::sleep(SLOW_DELAY).await;
        }
        let ended = match RemoteStep::parse(&command) {
            Some(RemoteStep::Probe { path }) => self.probe(&path),
            Some(RemoteStep::Upload { path, sha256, size }) => {
                let call = self.begin_call("upload", json!({ "path": path, "sha256": sha256, "size": size }));
                let hash = Box::new(digest::Context::new(&digest::SHA256));
                let upload = RunningCommand::Upload { path, sha256, size, received: 0, hash, call };
                self.running.insert(channel, upload);
                return Ok(());
            }
            Some(RemoteStep::Enroll { path }) => {
                if self.fleet.read(|state| state.machines[self.index].uploads.contains_key(&path)) {
                    let call = self.begin_call("enroll-command", json!({ "path": path }));
                    self.running.insert(channel, RunningCommand::Enroll { input: Vec::new(), call });
                    return Ok(());
                }
                let call = self.begin_call("enroll-command", json!({ "path": path }));
                call.end(JournalOutcome::Refused, &json!({ "exit_status": NOT_FOUND }));
                CommandResult::failure(NOT_FOUND, format!("sh: 1: {path}: not found\n"))
            }
            None => self.run_other_command(&command),
        };
        send_result(channel, session, ended)
    }

    async fn data(
        &mut self,
        channel: ChannelId,
        data: &[u8],
        _session: &mut Session,
    ) -> Result<(), Self::Error> {
        match self.running.get_mut(&channel) {
            Some(RunningCommand::Upload { received, hash, .. }) => {
                *received += data.len() as u64;
                hash.update(data);
            }
            // Bytes beyond the limit are not stored: that the input is too long is enough to know.
            Some(RunningCommand::Enroll { input, .. }) if input.len() <= REQUEST_LIMIT_BYTES => {
                input.extend_from_slice(data);
            }
            Some(RunningCommand::Enroll { .. }) | None => {}
        }
        Ok(())
    }

    async fn channel_eof(&mut self, channel: ChannelId, session: &mut Session) -> Result<(), Self::Error> {
        let ended = match self.running.remove(&channel) {
            None => return Ok(()),
            Some(RunningCommand::Upload { path, sha256, size, received, hash, call }) => {
                let digest = hex::encode(hash.finish());
                self.finish_upload(path, &sha256, size, received, digest, call).await
            }
            Some(RunningCommand::Enroll { input, call }) => self.enroll(&input, call).await,
        };
        send_result(channel, session, ended)
    }

    async fn channel_close(&mut self, channel: ChannelId, _session: &mut Session) -> Result<(), Self::Error> {
        // A command whose channel was closed before its input ended counts as killed.
        self.running.remove(&channel);
        Ok(())
    }
}

impl SshConnection {
    fn begin_call(&self, what: &str, mut arguments: serde_json::Value) -> OpenCall {
        arguments["user"] = json!(self.user);
        arguments["key"] = json!(self.key);
        self.fleet.journal.begin(JournalCall {
            channel: "ssh",
            action: what,
            machine: Some(&self.id),
            arguments,
            ..JournalCall::default()
        })
    }

    fn probe(&self, path: &str) -> CommandResult {
        let call = self.begin_call("probe", json!({ "path": path }));
        let digest = self.fleet.read(|state| state.machines[self.index].uploads.get(path).cloned());
        let digest = digest.as_deref().unwrap_or("none");
        let home = if self.user == "root" { "/root".to_owned() } else { format!("/home/{}", self.user) };
        let mut text = format!("{PROBE_BEGIN}\n");
        for (key, value) in [
            (probe_key::OS, "Linux"),
            // The agent's program is checked against it, and is built for this host.
            (probe_key::ARCH, std::env::consts::ARCH),
            (probe_key::USER, &self.user),
            (probe_key::HOME, &home),
            (probe_key::SHA256, "sha256sum"),
            (probe_key::DIGEST, digest),
        ] {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{key}={value}");
        }
        call.end(JournalOutcome::Ok, &json!({ "digest": digest }));
        CommandResult::success(text)
    }

    async fn finish_upload(
        &self,
        path: String,
        announced: &str,
        size: u64,
        received: u64,
        digest: String,
        call: OpenCall,
    ) -> CommandResult {
        let refusal = if self.fleet.read(|state| state.machines[self.index].machine.disk_full) {
            Some((upload_status::WRITE, "write error: No space left on device\n".to_owned()))
        } else if received != size {
            Some((upload_status::SIZE, format!("{received} of {size} bytes arrived\n")))
        } else if digest != announced {
            Some((upload_status::DIGEST, format!("the content has digest {digest}\n")))
        } else {
            None
        };
        if let Some((status, stderr)) = refusal {
            call.end(
                JournalOutcome::Refused,
                &json!({ "exit_status": status, "digest": digest, "received": received }),
            );
            return CommandResult::failure(status, stderr);
        }
        let kept: Result<(), StepRejected> = self.fleet.change(self.index, |record| {
            record.uploads.insert(path, digest.clone());
            Ok(((), None))
        });
        // A change without an event is never rejected, but writing it to disk can fail.
        let _ = kept;
        if let Err(error) = self.fleet.wait_durable().await {
            call.end(JournalOutcome::Failed, &json!({ "error": error.to_string() }));
            return CommandResult::failure(upload_status::WRITE, format!("{error}\n"));
        }
        call.end(JournalOutcome::Ok, &json!({ "digest": digest, "received": received }));
        CommandResult::success(format!("{UPLOAD_BEGIN}\ndigest={digest}\n"))
    }

    async fn enroll(&self, input: &[u8], command: OpenCall) -> CommandResult {
        if input.len() > REQUEST_LIMIT_BYTES {
            command.end(JournalOutcome::Refused, &json!({ "error": "too large" }));
            return CommandResult::failure(2, "the enrolment request is too large\n");
        }
        let request = match wire::EnrollRequest::decode(input) {
            Ok(request) => request,
            Err(error) => {
                command.end(JournalOutcome::Refused, &json!({ "error": error.to_string() }));
                return CommandResult::failure(2, format!("the enrolment request cannot be read: {error}\n"));
            }
        };
        let mut call = self.begin_call(
            "enroll",
            json!({
                "machine_id": request.machine_id,
                "lane": request.lane,
                "fence": request.fence,
                "bmdb_id": request.bmdb_id,
                "endpoints": request.endpoints,
                "ca_certificates": request.ca_certificates.len(),
                "heartbeat_interval_seconds": request.heartbeat_interval_seconds,
            }),
        );
        let response = agent::enroll_machine(&self.fleet, self.index, request, &mut call).await;
        let refused = matches!(response.result, Some(wire::enroll_response::Result::Error(_)));
        let outcome = if refused { JournalOutcome::Refused } else { JournalOutcome::Ok };
        call.end(outcome, &agent::describe_response(&response));
        command.end(JournalOutcome::Ok, &json!({}));
        let mut stdout = format!("{ENROLL_BEGIN}\n").into_bytes();
        stdout.extend_from_slice(&response.encode_to_vec());
        CommandResult::success(stdout)
    }

    fn run_other_command(&self, command: &str) -> CommandResult {
        let words = shell_words::split(command);
        if words.as_deref().is_some_and(is_reboot) {
            let call = self.begin_call("reboot", json!({ "command": command }));
            let (fleet, index) = (Arc::clone(&self.fleet), self.index);
            self.fleet.spawn(async move {
                tokio::time::sleep(REBOOT_DELAY).await;
                match fleet.step(index, MachineEvent::Reboot) {
                    Ok(()) => call.end(JournalOutcome::Ok, &json!({})),
                    Err(refusal) => {
                        call.end(JournalOutcome::Refused, &json!({ "error": refusal.to_string() }));
                    }
                }
            });
            return CommandResult::success("");
        }
        let call = self.begin_call("exec", json!({ "command": command }));
        call.end(JournalOutcome::Refused, &json!({ "exit_status": NOT_FOUND }));
        CommandResult::failure(NOT_FOUND, "sh: 1: not found: this machine is simulated and runs nothing\n")
    }
}

/// Whether an argument vector reboots the machine that it runs on.
fn is_reboot(words: &[String]) -> bool {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let words = match words.as_slice() {
        ["sudo", "-n", rest @ ..] | ["sudo", rest @ ..] => rest,
        all => all,
    };
    matches!(
        words,
        ["systemctl", "reboot"]
            | ["systemctl", "reboot", "--force" | "-f"]
            | ["reboot" | "/sbin/reboot" | "/usr/sbin/reboot"]
            | ["shutdown", "-r", "now"]
    )
}

fn send_result(channel: ChannelId, session: &mut Session, ended: CommandResult) -> Result<(), russh::Error> {
    if !ended.stdout.is_empty() {
        session.data(channel, ended.stdout)?;
    }
    if !ended.stderr.is_empty() {
        session.extended_data(channel, 1, ended.stderr.into_owned().into_bytes())?;
    }
    session.exit_status_request(channel, ended.status)?;
    session.eof(channel)?;
    session.close(channel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reboot_commands_are_recognised_exactly() {
        for line in ["'systemctl' 'reboot'", "sudo -n systemctl reboot", "/sbin/reboot", "shutdown -r now"] {
            assert!(is_reboot(&shell_words::split(line).unwrap()), "{line}");
        }
        for line in ["systemctl rebootx", "echo reboot", "sudo -n", "shutdown now", "reboot --help"] {
            assert!(!is_reboot(&shell_words::split(line).unwrap()), "{line}");
        }
    }
}
