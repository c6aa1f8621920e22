//! One command on a machine, within limits of time and size.
//!
//! Input is streamed while output is read, because a host that answers before
//! it has read everything (a full disk, a wrong digest) would otherwise never be
//! heard. Output beyond its cap is counted and thrown away: a machine must not
//! be able to fill a shepherd's memory. A command whose limit passes is sent a
//! `TERM`, so that its own clean-up runs; OpenSSH does not deliver that to root's
//! commands, which see the end of their input and output when the session is
//! dropped, and whose steps are written to end by that.

use std::time::Duration;

use bytes::Bytes;
use russh::{ChannelMsg, Sig};
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::Instrument as _;
use tracing::field::{Empty, display};

use crate::model::readable::readable;
use crate::model::shell_words::{self, NulInWord};
use crate::model::traces::TRACES;
use crate::takeover::error::SshError;
use crate::takeover::session::{Limit, SshSession};

/// Most bytes of standard output that are kept.
pub const STDOUT_CAP: usize = 1 << 20;
/// Most bytes of standard error that are kept.
pub const STDERR_CAP: usize = 64 << 10;

/// After a command ended, how long its output may still come. A daemon that it left behind may hold the
/// pipes open for ever.
const STRAGGLERS: Duration = Duration::from_secs(3);

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this status.
    Status(u32),
    /// Killed by this signal, named without `SIG`.
    Signal(String),
}

/// What a command said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub exit: Exit,
    /// The first [`STDOUT_CAP`] bytes.
    pub stdout: Vec<u8>,
    /// The first [`STDERR_CAP`] bytes.
    pub stderr: Vec<u8>,
    /// Bytes of either that were thrown away.
    pub dropped: u64,
}

impl Output {
    /// Whether it ended with status 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.exit == Exit::Status(0)
    }

    /// How it ended and the last line of its standard error, for a person.
    #[must_use]
    pub fn summary(&self) -> String {
        let ended = match &self.exit {
            Exit::Status(status) => format!("it ended with status {status}"),
            Exit::Signal(signal) => format!("signal {signal} killed it"),
        };
        let stderr = String::from_utf8_lossy(&self.stderr);
        match stderr.lines().rev().map(readable).find(|line| !line.is_empty()) {
            Some(line) => format!("{ended}: {line}"),
            None => ended,
        }
    }
}

/// What became of a command that may take its own connection down.
#[derive(Debug)]
pub enum RunOutcome {
    /// It ended, with this.
    Finished(Output),
    /// It was started, and then nothing more was heard: what a reboot looks like, and also what a cut cable
    /// looks like. The proof is elsewhere, in the machine's boot id.
    Unknown(SshError),
}

/// Why an argument vector could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It cannot be written as a command line.
    #[error(transparent)]
    Unquotable(#[from] NulInWord),
    /// It was not started.
    #[error(transparent)]
    Ssh(#[from] SshError),
}

/// A failure, and whether the host had said by then that the command runs.
struct ExecFailure {
    started: bool,
    error: SshError,
}

impl SshSession {
    /// Runs `command` in the remote user's login shell, feeds it `stdin`, and waits for its end.
    ///
    /// `doing` says in an error what this was for. The limit is the smaller of the settings' exec limit and the
    /// session's deadline. Any exit status is `Ok`.
    pub async fn exec(&self, doing: &'static str, command: &str, stdin: Bytes) -> Result<Output, SshError> {
        self.run(doing, command, stdin).await.map_err(|failure| failure.error)
    }

    /// Runs an argument vector without input; an end of the connection after its start is an outcome, not an error.
    pub async fn run_argv(&self, doing: &'static str, argv: &[String]) -> Result<RunOutcome, RunError> {
        let command = shell_words::join(argv)?;
        match self.run(doing, &command, Bytes::new()).await {
            Ok(output) => Ok(RunOutcome::Finished(output)),
            Err(ExecFailure { started: true, error }) => Ok(RunOutcome::Unknown(error)),
            Err(ExecFailure { started: false, error }) => Err(error.into()),
        }
    }

    async fn run(&self, doing: &'static str, command: &str, stdin: Bytes) -> Result<Output, ExecFailure> {
        // Not the command: its words may be a secret's neighbours.
        let span =
            tracing::debug_span!(target: TRACES, "ssh exec", doing, sent_bytes = stdin.len(), error = Empty);
        let ran = self.run_in_channel(doing, command, stdin).instrument(span.clone()).await;
        if let Err(failure) = &ran {
            span.record("error", display(&failure.error));
        }
        ran
    }

    async fn run_in_channel(
        &self,
        doing: &'static str,
        command: &str,
        stdin: Bytes,
    ) -> Result<Output, ExecFailure> {
        let limit = Limit::new(self.exec_timeout, "--agent_ssh_exec_timeout", self.deadline);
        let before_start = |error| ExecFailure { started: false, error };
        // Whoever was frozen until now must not begin anything: a limit alone is looked at only after
        // the first bytes are on their way.
        if Instant::now() >= limit.until {
            return Err(before_start(limit.error(&self.address, doing)));
        }
        let open = async {
            let channel = self.handle.channel_open_session().await?;
            channel.exec(true, command).await?;
            Ok::<_, russh::Error>(channel)
        };
        let channel = match timeout_at(limit.until, open).await {
            Err(_) => return Err(before_start(limit.error(&self.address, doing))),
            Ok(Err(russh::Error::ChannelOpenFailure(_))) => return Err(before_start(self.refused(doing))),
            Ok(Err(_)) => return Err(before_start(self.lost(doing))),
            Ok(Ok(channel)) => channel,
        };
        let (mut answers, input) = channel.split();
        let writing = async {
            input.data_bytes(stdin).await?;
            input.eof().await
        };
        tokio::pin!(writing);

        let mut collected = Collected::default();
        let mut started = false;
        let mut written = false;
        let mut until = limit.until;
        loop {
            tokio::select! {
                message = answers.wait() => match message {
                    None | Some(ChannelMsg::Close) => break,
                    Some(ChannelMsg::Success) => started = true,
                    Some(ChannelMsg::Failure) => return Err(before_start(self.refused(doing))),
                    Some(message) => {
                        if collected.take(message) {
                            until = until.min(Instant::now() + STRAGGLERS);
                        }
                    }
                },
                // A failure to write shows as the end of the answers, with its reason.
                _result = &mut writing, if started && !written => written = true,
                () = sleep_until(until) => {
                    if collected.exit.is_some() {
                        break;
                    }
                    // The host may be gone, so this must not wait.
                    let soon = Instant::now() + Duration::from_millis(100);
                    let _sent = timeout_at(soon, input.signal(Sig::TERM)).await;
                    return Err(ExecFailure { started, error: limit.error(&self.address, doing) });
                }
            }
        }
        match collected.exit {
            Some(exit) => Ok(Output {
                exit,
                stdout: collected.stdout,
                stderr: collected.stderr,
                dropped: collected.dropped,
            }),
            None => Err(ExecFailure { started, error: self.lost(doing) }),
        }
    }

    fn refused(&self, doing: &'static str) -> SshError {
        SshError::ExecRefused { address: self.address.clone(), doing }
    }
}

#[derive(Default)]
struct Collected {
    exit: Option<Exit>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    dropped: u64,
}

impl Collected {
    /// Whether this message was the command's end.
    fn take(&mut self, message: ChannelMsg) -> bool {
        match message {
            ChannelMsg::Data { data } => self.dropped += keep(&mut self.stdout, &data, STDOUT_CAP),
            ChannelMsg::ExtendedData { data, ext: 1 } => {
                self.dropped += keep(&mut self.stderr, &data, STDERR_CAP);
            }
            ChannelMsg::ExitStatus { exit_status } => {
                self.exit = Some(Exit::Status(exit_status));
                return true;
            }
            ChannelMsg::ExitSignal { signal_name, .. } => {
                let name = match signal_name {
                    Sig::Custom(name) => readable(&name),
                    known => format!("{known:?}"),
                };
                self.exit = Some(Exit::Signal(name));
                return true;
            }
            _ => {}
        }
        false
    }
}

/// Appends as much as fits; returns how many bytes did not.
fn keep(kept: &mut Vec<u8>, data: &[u8], cap: usize) -> u64 {
    let (fits, rest) = data.split_at(data.len().min(cap - kept.len()));
    kept.extend_from_slice(fits);
    rest.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_its_cap_is_counted_and_thrown_away() {
        let mut kept = vec![0; 6];
        assert_eq!(keep(&mut kept, &[1, 2, 3, 4, 5], 8), 3);
        assert_eq!(kept, [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(keep(&mut kept, &[9], 8), 1);
    }

    #[test]
    fn a_summary_tells_the_end_and_the_last_words() {
        let output = |exit, stderr: &str| Output { exit, stdout: vec![], stderr: stderr.into(), dropped: 0 };
        insta::assert_snapshot!(output(Exit::Status(2), "one\ntwo\n\n").summary(), @"it ended with status 2: two");
        insta::assert_snapshot!(output(Exit::Signal("KILL".to_owned()), "").summary(), @"signal KILL killed it");
    }
}
