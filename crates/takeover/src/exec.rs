//! Runs one command over SSH, with limits on time and output.
//!
//! Input is streamed while output is read, because the response of a host that stops reading early (a full disk, a
//! wrong digest) would otherwise never be received. Output beyond its cap is counted and dropped: a machine must not be
//! able to fill a shepherd's memory. A command whose limit passes is sent a `TERM`, so that its own clean-up runs.
//! OpenSSH does not deliver that to root's commands; they see the end of their input and output when the session is
//! dropped, and the steps are written to end by that.

use std::time::Duration;

use bytes::Bytes;
use russh::{ChannelMsg, Sig};
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::Instrument as _;
use tracing::field::{Empty, display};

use crate::session::SshSession;
use crate::ssh_error::SshError;
use crate::time_limit::TimeLimit;
use model::excerpt::{Excerpt, with_excerpt};
use model::sanitize::sanitize_text;
use model::shell_words::{self, NulInWord};
use model::traces::TRACE_TARGET;

/// Most bytes of standard output that are stored.
pub const STDOUT_CAP: usize = 1 << 20;
/// Most bytes of standard error that are stored.
pub const STDERR_CAP: usize = 64 << 10;

/// How long output may still come after a command ended. A daemon that it left behind may hold the pipes open for ever.
const OUTPUT_GRACE: Duration = Duration::from_secs(3);

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommandExit {
    /// Exited with this status, 0 for success.
    Status(u32),
    /// Killed by this signal, named without `SIG`.
    Signal(String),
}

/// The output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// The status or the signal it ended with.
    pub exit: CommandExit,
    /// The first [`STDOUT_CAP`] bytes.
    pub stdout: Vec<u8>,
    /// The first [`STDERR_CAP`] bytes.
    pub stderr: Vec<u8>,
    /// Bytes of both outputs that were dropped.
    pub dropped_bytes: u64,
}

impl CommandOutput {
    /// Whether it exited with status 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.exit == CommandExit::Status(0)
    }

    /// How it ended and the last line of its standard error, for a message. A command without a word there may have used
    /// standard output.
    #[must_use]
    pub fn summary(&self) -> String {
        let stderr = String::from_utf8_lossy(&self.stderr);
        let words = Excerpt::last_line(&stderr).or_else(|| self.stdout_words());
        with_excerpt(self.describe_exit(), words.as_ref())
    }

    /// As [`Self::summary`], with the last line of each output: for an answer of another program than the one that was
    /// started. A forced command and a login shell that lets nobody in use standard output.
    #[must_use]
    pub fn full_summary(&self) -> String {
        let summary = self.summary();
        match self.stdout_words() {
            Some(words) if !summary.ends_with(words.as_str()) => {
                format!("{summary}; on its standard output: {words}")
            }
            _ => summary,
        }
    }

    fn describe_exit(&self) -> String {
        match &self.exit {
            CommandExit::Status(status) => format!("it ended with status {status}"),
            CommandExit::Signal(signal) => format!("signal {signal} killed it"),
        }
    }

    /// The last line of standard output that is text, and not the line before an answer.
    fn stdout_words(&self) -> Option<Excerpt> {
        let text = String::from_utf8_lossy(&self.stdout);
        let is_text = |line: &&str| {
            !line.contains(['\0', char::REPLACEMENT_CHARACTER]) && !line.trim_end().ends_with("-begin")
        };
        text.lines().rev().filter(is_text).find_map(Excerpt::from_start)
    }
}

/// The outcome of a command that may take its own connection down.
#[derive(Debug)]
pub enum RunOutcome {
    /// It ended with this output.
    Finished(CommandOutput),
    /// It was started, and then the connection ended or fell silent. A reboot looks like this, and so does a cut cable.
    /// The proof is elsewhere, in the machine's boot id.
    Unknown(SshError),
}

/// Why an argument vector was not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It cannot be written as a command line.
    #[error(transparent)]
    Unquotable(#[from] NulInWord),
    /// The command was not started.
    #[error(transparent)]
    Ssh(#[from] SshError),
}

/// A failure, and whether the host had confirmed by then that the command runs.
struct ExecFailure {
    started: bool,
    error: SshError,
}

impl SshSession {
    /// Runs `command` in the remote user's login shell, sends it `stdin`, and waits for its end.
    ///
    /// `operation` describes the purpose in errors. The limit is the smaller of the settings' exec limit and the
    /// session's deadline. Any exit status is `Ok`.
    pub async fn exec(
        &self,
        operation: &'static str,
        command: &str,
        stdin: Bytes,
    ) -> Result<CommandOutput, SshError> {
        self.run(operation, command, stdin).await.map_err(|failure| failure.error)
    }

    /// Runs an argument vector without input. A lost connection after its start is an outcome, not an error.
    pub async fn run_argv(&self, operation: &'static str, argv: &[String]) -> Result<RunOutcome, RunError> {
        let command = shell_words::join(argv)?;
        match self.run(operation, &command, Bytes::new()).await {
            Ok(output) => Ok(RunOutcome::Finished(output)),
            Err(ExecFailure { started: true, error }) => Ok(RunOutcome::Unknown(error)),
            Err(ExecFailure { started: false, error }) => Err(error.into()),
        }
    }

    async fn run(
        &self,
        operation: &'static str,
        command: &str,
        stdin: Bytes,
    ) -> Result<CommandOutput, ExecFailure> {
        // Not the command: it may contain secrets.
        let sent_bytes = i64::try_from(stdin.len()).unwrap_or(i64::MAX);
        let span =
            tracing::debug_span!(target: TRACE_TARGET, "ssh exec", operation, sent_bytes, error = Empty);
        let ran = self.run_in_channel(operation, command, stdin).instrument(span.clone()).await;
        if let Err(failure) = &ran {
            span.record("error", display(&failure.error));
        }
        ran
    }

    async fn run_in_channel(
        &self,
        operation: &'static str,
        command: &str,
        stdin: Bytes,
    ) -> Result<CommandOutput, ExecFailure> {
        let limit = TimeLimit::new(self.exec_timeout, "--agent_ssh_exec_timeout", self.deadline);
        let before_start = |error| ExecFailure { started: false, error };
        let open = async {
            let channel = self.handle.channel_open_session().await?;
            channel.exec(true, command).await?;
            Ok::<_, russh::Error>(channel)
        };
        let channel = match limit.run(open).await {
            Err(_) => return Err(before_start(limit.exceeded_error(&self.address, operation))),
            Ok(Err(russh::Error::ChannelOpenFailure(_))) => {
                return Err(before_start(self.exec_rejected(operation)));
            }
            Ok(Err(_)) => return Err(before_start(self.connection_lost(operation).await)),
            Ok(Ok(channel)) => channel,
        };
        let (mut answers, input) = channel.split();
        let writing = limit.run(async {
            input.data_bytes(stdin).await?;
            input.eof().await
        });
        tokio::pin!(writing);

        let mut collected = OutputCollector::default();
        let mut started = false;
        let mut written = false;
        let mut until = limit.expires_at;
        loop {
            tokio::select! {
                message = answers.wait() => match message {
                    None | Some(ChannelMsg::Close) => break,
                    Some(ChannelMsg::Success) => started = true,
                    Some(ChannelMsg::Failure) => return Err(before_start(self.exec_rejected(operation))),
                    Some(message) => {
                        if collected.handle_message(message) {
                            until = until.min(Instant::now() + OUTPUT_GRACE);
                        }
                    }
                },
                // A failed write shows as the end of the output, with its reason.
                _result = &mut writing, if started && !written => written = true,
                () = sleep_until(until) => {
                    if collected.exit.is_some() {
                        break;
                    }
                    // The host may be gone, so this must not wait.
                    let soon = Instant::now() + Duration::from_millis(100);
                    let _sent = timeout_at(soon, input.signal(Sig::TERM)).await;
                    return Err(ExecFailure { started, error: limit.exceeded_error(&self.address, operation) });
                }
            }
        }
        match collected.exit {
            Some(exit) => Ok(CommandOutput {
                exit,
                stdout: collected.stdout,
                stderr: collected.stderr,
                dropped_bytes: collected.dropped_bytes,
            }),
            None => Err(ExecFailure { started, error: self.connection_lost(operation).await }),
        }
    }

    fn exec_rejected(&self, operation: &'static str) -> SshError {
        SshError::ExecRejected { address: self.address.clone(), operation }
    }
}

#[derive(Default)]
struct OutputCollector {
    exit: Option<CommandExit>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    dropped_bytes: u64,
}

impl OutputCollector {
    /// Stores a message; returns whether it was the command's end.
    fn handle_message(&mut self, message: ChannelMsg) -> bool {
        match message {
            ChannelMsg::Data { data } => {
                self.dropped_bytes += append_capped(&mut self.stdout, &data, STDOUT_CAP);
            }
            ChannelMsg::ExtendedData { data, ext: 1 } => {
                self.dropped_bytes += append_capped(&mut self.stderr, &data, STDERR_CAP);
            }
            ChannelMsg::ExitStatus { exit_status } => {
                self.exit = Some(CommandExit::Status(exit_status));
                return true;
            }
            ChannelMsg::ExitSignal { signal_name, error_message, .. } => {
                let name = match signal_name {
                    Sig::Custom(name) => sanitize_text(&name),
                    known => format!("{known:?}"),
                };
                self.exit = Some(CommandExit::Signal(name));
                // The words of the server about the end, which some servers have.
                if !error_message.trim().is_empty() {
                    let line = format!("\n{error_message}\n");
                    self.dropped_bytes += append_capped(&mut self.stderr, line.as_bytes(), STDERR_CAP);
                }
                return true;
            }
            _ => {}
        }
        false
    }
}

/// Appends as much as fits; returns how many bytes did not.
fn append_capped(kept: &mut Vec<u8>, data: &[u8], cap: usize) -> u64 {
    let (fits, rest) = data.split_at(data.len().min(cap - kept.len()));
    kept.extend_from_slice(fits);
    rest.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_its_cap_is_counted_and_dropped() {
        let mut kept = vec![0; 6];
        assert_eq!(append_capped(&mut kept, &[1, 2, 3, 4, 5], 8), 3);
        assert_eq!(kept, [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(append_capped(&mut kept, &[9], 8), 1);
    }

    #[test]
    fn summary_has_the_exit_and_the_last_line() {
        let output = |exit, stderr: &str| CommandOutput {
            exit,
            stdout: vec![],
            stderr: stderr.into(),
            dropped_bytes: 0,
        };
        insta::assert_snapshot!(output(CommandExit::Status(2), "one\ntwo\n\n").summary(), @"it ended with status 2: two");
        insta::assert_snapshot!(output(CommandExit::Signal("KILL".to_owned()), "").summary(), @"signal KILL killed it");
    }

    #[test]
    fn words_of_the_server_about_a_signal_are_quoted() {
        for (message, expected) in [
            ("", "signal KILL killed it: begun"),
            ("no memory\u{1b}[2J is left", "signal KILL killed it: no memory [2J is left"),
        ] {
            let mut collected = OutputCollector::default();
            collected.handle_message(ChannelMsg::ExtendedData { data: Bytes::from_static(b"begun"), ext: 1 });
            assert!(collected.handle_message(ChannelMsg::ExitSignal {
                signal_name: Sig::KILL,
                core_dumped: false,
                error_message: message.to_owned(),
                lang_tag: String::new(),
            }));
            let output = CommandOutput {
                exit: collected.exit.unwrap(),
                stdout: collected.stdout,
                stderr: collected.stderr,
                dropped_bytes: collected.dropped_bytes,
            };
            assert_eq!(output.summary(), expected);
        }
    }

    #[test]
    fn summary_has_words_from_either_output() {
        let output = |stdout: &[u8], stderr: &str| CommandOutput {
            exit: CommandExit::Status(1),
            stdout: stdout.to_vec(),
            stderr: stderr.into(),
            dropped_bytes: 0,
        };
        let sftp = output(b"This service allows sftp connections only.\r\n", "");
        let expected = "it ended with status 1: This service allows sftp connections only.";
        assert_eq!((sftp.summary().as_str(), sftp.full_summary().as_str()), (expected, expected));
        let both = output(b"Use another user.\n\n", "setlocale failed\n");
        assert_eq!(both.summary(), "it ended with status 1: setlocale failed");
        assert_eq!(
            both.full_summary(),
            "it ended with status 1: setlocale failed; on its standard output: Use another user."
        );
        // An answer in a binary form has no words.
        let binary = output(b"shepherd-enroll-begin\n\x0a\x02\0\xff", "");
        assert_eq!(binary.full_summary(), "it ended with status 1");
    }
}
