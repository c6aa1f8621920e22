//! Runs power commands of a static device list on the shepherd's host.
//!
//! A command is an argument vector and never a shell's text, so nothing in a device list can be more than an argument.
//! It runs in a process group of its own, because what such scripts start (an `ipmitool`, a `curl` to a power strip)
//! must die with them: when the limit passes, or when the caller drops the call, the whole group is killed.

use std::ffi::OsString;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

use crate::model::ids::IntentId;
use crate::model::plain_text::replace_hidden;
use crate::model::provider_status::PowerState;
use crate::providers::provider::{ErrorClass, ProviderError};
use hardening::file_limit::UsualFileLimit as _;

/// How long a power command may take.
pub const COMMAND_TIMEOUT: Duration = Duration::from_mins(1);
/// How much of each output is kept. The rest is read and discarded, so that a command with much output does not stall
/// on a full pipe.
const MAX_OUTPUT_BYTES: usize = 16 << 10;
/// How much of its error output is shown, in characters.
const MAX_ERROR_CHARS: usize = 300;
/// The same for quoted output, in which each character may become ten.
const MAX_QUOTED_CHARS: usize = 100;

/// Runs `argv` with `word` appended and returns what it printed.
///
/// The environment is this process's without what belongs to the shepherd itself (`SHEPHERD_…`, `PGPASSWORD`), and with
/// `SHEPHERD_INTENT_ID` if there is an intent.
pub async fn run_power_command(
    argv: &[String],
    word: &str,
    intent: Option<IntentId>,
    limit: Duration,
) -> Result<String, ProviderError> {
    run_in_environment(argv, word, command_environment(std::env::vars_os(), intent), limit).await
}

/// The environment of a power command, from this process's `own`.
fn command_environment(
    own: impl IntoIterator<Item = (OsString, OsString)>,
    intent: Option<IntentId>,
) -> Vec<(OsString, OsString)> {
    let of_the_shepherd = |name: &str| name.starts_with("SHEPHERD_") || name == "PGPASSWORD";
    let others = own.into_iter().filter(|(name, _)| !of_the_shepherd(&name.to_string_lossy()));
    let intent =
        intent.map(|intent| (OsString::from("SHEPHERD_INTENT_ID"), OsString::from(intent.to_string())));
    others.chain(intent).collect()
}

async fn run_in_environment(
    argv: &[String],
    word: &str,
    environment: Vec<(OsString, OsString)>,
    limit: Duration,
) -> Result<String, ProviderError> {
    let Some((program, arguments)) = argv.split_first() else {
        return Err(ProviderError::new(
            ErrorClass::Configuration,
            "power command",
            "the power command is empty",
        ));
    };
    let failed = |class, what: String| {
        ProviderError::new(class, program.as_str(), format!("the power command {program} … {word} {what}"))
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .arg(word)
        .env_clear()
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    hardening::restore_core_limit(command.as_std_mut().usual_file_limit());
    let child = command
        .spawn()
        .map_err(|error| failed(ErrorClass::Configuration, format!("cannot be started: {error}")))?;
    let mut group = CommandGroup { child };
    let (stdout, stderr) = (group.child.stdout.take(), group.child.stderr.take());
    // Outside the limit: a command that hangs has often printed why.
    let (printed, complaints) = (OutputTail::default(), OutputTail::default());
    let finished = tokio::time::timeout(limit, async {
        // A grandchild that keeps the pipes open counts as the command still running. The command itself is waited for
        // last: until then its process id cannot be reused, so the whole group can be killed by it.
        tokio::join!(printed.read(stdout), complaints.read(stderr));
        group.child.wait().await
    })
    .await;
    let (stdout, stderr) = (printed.text(), complaints.text());
    let complaint = || output_tail(if stderr.trim().is_empty() { &stdout } else { &stderr }, MAX_ERROR_CHARS);
    match finished {
        Err(_) => {
            drop(group);
            let what =
                format!("did not end within {} s and was killed with all it started", limit.as_secs_f32());
            let last = complaint();
            let last = if last.is_empty() { last } else { format!("; it last printed: {last}") };
            Err(failed(ErrorClass::Transient, what + &last))
        }
        Ok(Err(error)) => Err(failed(ErrorClass::Transient, format!("cannot be waited for: {error}"))),
        Ok(Ok(status)) if status.success() => Ok(stdout),
        Ok(Ok(status)) => Err(failed(ErrorClass::Transient, format!("failed ({status}): {}", complaint()))),
    }
}

/// Parses what `status` printed: exactly `on` or `off`.
pub fn parse_power_state(printed: &str, program: &str) -> Result<PowerState, ProviderError> {
    match printed.trim() {
        "on" => Ok(PowerState::On),
        "off" => Ok(PowerState::Off),
        other => Err(ProviderError::new(
            ErrorClass::Unreadable,
            program,
            format!(
                "the power command {program} … status printed {:?}; expected on or off",
                output_tail(other, MAX_QUOTED_CHARS)
            ),
        )),
    }
}

/// A command and everything it started. If dropped while running, all of it is killed.
struct CommandGroup {
    child: Child,
}

impl Drop for CommandGroup {
    fn drop(&mut self) {
        // `id` is `None` once the command was waited for: its process id may be reused by then.
        let Some(pid) = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) else {
            return;
        };
        if let Err(error) = kill_process_group(pid, Signal::KILL) {
            tracing::warn!(%error, "cannot kill a power command");
        }
    }
}

/// The end of one output. It is the informative part.
#[derive(Default)]
struct OutputTail(Mutex<Vec<u8>>);

impl OutputTail {
    async fn read(&self, output: Option<impl AsyncRead + Unpin>) {
        let Some(mut output) = output else { return };
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = output.read(&mut buffer).await {
            let mut tail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            tail.extend_from_slice(&buffer[..read]);
            if tail.len() > 2 * MAX_OUTPUT_BYTES {
                let surplus = tail.len() - MAX_OUTPUT_BYTES;
                tail.drain(..surplus);
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}

fn output_tail(text: &str, most: usize) -> String {
    let text = text.trim();
    let skipped = text.chars().count().saturating_sub(most);
    replace_hidden(&text.chars().skip(skipped).collect::<String>(), &[])
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[tokio::test]
    async fn arguments_reach_the_program_as_they_are() {
        let printed =
            run_power_command(&argv(&["/bin/echo", "$HOME; `id`", "a  b"]), "status", None, COMMAND_TIMEOUT)
                .await
                .unwrap();
        assert_eq!(printed, "$HOME; `id` a  b status\n");
    }

    #[tokio::test]
    async fn a_failure_shows_what_the_command_complained_about() {
        let script = argv(&["/bin/sh", "-c", "echo outlet 7 is on fire >&2; exit 3"]);
        let error = run_power_command(&script, "on", None, COMMAND_TIMEOUT).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Transient);
        assert!(
            error.message.contains("exit status: 3") && error.message.contains("outlet 7 is on fire"),
            "{}",
            error.message
        );
        let error =
            run_power_command(&argv(&["/nonexistent"]), "on", None, COMMAND_TIMEOUT).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Configuration);
    }

    #[tokio::test]
    async fn the_intent_is_given_and_nothing_else_of_the_shepherd() {
        let intent = IntentId::generate();
        let own = [
            ("PATH", "/usr/bin:/bin"),
            ("PGHOST", "db"),
            ("PGPASSWORD", "hunter2"),
            ("SHEPHERD_BMDB_URL", "postgres://kim:hunter2@db/bmdb"),
            ("SHEPHERD_INTENT_ID", "of another command"),
        ];
        let own = own.map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let environment = command_environment(own, Some(intent));
        let script = argv(&["/bin/sh", "-c", "env"]);
        let printed = run_in_environment(&script, "on", environment, COMMAND_TIMEOUT).await.unwrap();
        let ours: Vec<_> = printed.lines().filter(|line| line.starts_with("SHEPHERD_")).collect();
        assert_eq!(ours, [format!("SHEPHERD_INTENT_ID={intent}")]);
        assert!(printed.lines().any(|line| line == "PGHOST=db"), "{printed}");
        assert!(!printed.contains("hunter2"), "{printed}");
    }

    #[tokio::test]
    async fn the_limit_kills_the_command_and_all_it_started() {
        // The grandchild ignores SIGTERM and keeps the pipes open. The command waits for it, or has exited itself by
        // then.
        for end in ["wait", "exit 0"] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("pids");
            let script = format!(
                "trap '' TERM; sleep 600 & echo $$ $! > {0}.new; mv {0}.new {0}; {end}",
                file.display()
            );
            let started = Instant::now();
            let words = argv(&["/bin/sh", "-c", &script]);
            let error = run_power_command(&words, "off", None, Duration::from_secs(2)).await.unwrap_err();
            assert!(error.message.contains("was killed with all it started"), "{}", error.message);
            assert!(started.elapsed() < Duration::from_secs(30));
            let pids = std::fs::read_to_string(&file).unwrap();
            for pid in pids.split_whitespace() {
                let gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
                    // A zombie is dead, but its new parent has not reaped it yet.
                    Ok(stat) => {
                        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
                    }
                    Err(_) => true,
                };
                let deadline = Instant::now() + Duration::from_secs(30);
                while !gone() {
                    assert!(Instant::now() < deadline, "process {pid} is still there ({end})");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    #[tokio::test]
    async fn words_of_a_command_that_hangs_are_quoted() {
        let script = argv(&["/bin/sh", "-c", "echo the outlet is locked >&2; exec sleep 600"]);
        let error = run_power_command(&script, "on", None, Duration::from_secs(2)).await.unwrap_err();
        assert!(error.message.ends_with("; it last printed: the outlet is locked"), "{}", error.message);
    }

    #[tokio::test]
    async fn endless_output_is_truncated_without_stalling() {
        let script = argv(&["/bin/sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo on"]);
        let printed = run_power_command(&script, "status", None, COMMAND_TIMEOUT).await.unwrap();
        assert!(printed.len() <= 2 * MAX_OUTPUT_BYTES + 4096 && printed.ends_with("\non\n"));
    }

    #[test]
    fn only_on_and_off_are_states() {
        assert_eq!(parse_power_state("on\n", "pdu").unwrap(), PowerState::On);
        assert_eq!(parse_power_state(" off ", "pdu").unwrap(), PowerState::Off);
        for other in ["", "ON", "on off", "Chassis Power is on"] {
            assert_eq!(parse_power_state(other, "pdu").unwrap_err().class, ErrorClass::Unreadable, "{other}");
        }
    }
}
