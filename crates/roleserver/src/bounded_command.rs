//! Run a program to its end within a time limit.
//!
//! A program that hangs must not hang its caller: `systemctl` waits for a manager that does not answer. At the limit the
//! program is killed. A process that it left behind may keep its output open, so the output is not waited for to its end.

use std::io::{Error, ErrorKind, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use model::excerpt::Excerpt;

/// How often a running program is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the output of a program that has ended is read.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Most bytes of each output.
const MAX_BYTES: u64 = 1 << 20;

/// Waits for a program, and kills it at the limit. Blocks.
pub fn wait_within(child: &mut Child, limit: Duration) -> std::io::Result<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            child.kill().and_then(|()| child.wait())?;
            let seconds = limit.as_secs_f32();
            return Err(Error::new(ErrorKind::TimedOut, format!("it took longer than {seconds} seconds")));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Runs a command with its output captured, and kills it at the limit. The error quotes the last line that it wrote.
/// Blocks.
pub fn output_within(command: &mut Command, limit: Duration) -> std::io::Result<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().map(read_in_background);
    let stderr = child.stderr.take().map(read_in_background);
    let ended = wait_within(&mut child, limit);
    let stdout = stdout.as_ref().map(collect_chunks).unwrap_or_default();
    let stderr = stderr.as_ref().map(collect_chunks).unwrap_or_default();
    match ended {
        Ok(status) => Ok(Output { status, stdout, stderr }),
        Err(error) => {
            let words = words_of(&stderr, &stdout);
            let last = words.map_or_else(String::new, |words| format!("; it last wrote: {words}"));
            Err(Error::new(error.kind(), format!("{error}{last}")))
        }
    }
}

/// The last words of a program that has ended: of its standard error, or else of its standard output.
#[must_use]
pub fn last_words(output: &Output) -> Option<Excerpt> {
    words_of(&output.stderr, &output.stdout)
}

fn words_of(stderr: &[u8], stdout: &[u8]) -> Option<Excerpt> {
    let last = |bytes: &[u8]| Excerpt::last_line(&String::from_utf8_lossy(bytes));
    last(stderr).or_else(|| last(stdout))
}

/// Reads a stream on a thread of its own: a program with a full pipe would never end.
fn read_in_background(stream: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut stream = stream.take(MAX_BYTES);
        let mut buffer = [0; 4096];
        while let Ok(count) = stream.read(&mut buffer) {
            // At the end of the stream, or after the last who would read it.
            if count == 0 || sender.send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

fn collect_chunks(chunks: &Receiver<Vec<u8>>) -> Vec<u8> {
    let end = Instant::now() + DRAIN_TIMEOUT;
    let mut bytes = Vec::new();
    while let Ok(chunk) = chunks.recv_timeout(end.saturating_duration_since(Instant::now())) {
        bytes.extend(chunk);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test.
    const LONG: Duration = Duration::from_mins(5);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command
    }

    #[test]
    fn output_and_status_are_returned() {
        let output = output_within(&mut shell("echo out; echo err >&2; exit 3"), LONG).unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
        let large = output_within(&mut shell("head -c 300000 /dev/zero"), LONG).unwrap();
        assert_eq!(large.stdout.len(), 300_000, "more than a pipe takes");
    }

    #[test]
    fn program_that_hangs_is_killed_at_the_limit() {
        let begin = Instant::now();
        let error = output_within(&mut shell("exec sleep 300"), Duration::from_millis(100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "it took longer than 0.1 seconds");
        let mut waiting = shell("echo waits for the bus >&2; exec sleep 300");
        let error = output_within(&mut waiting, Duration::from_secs(2)).unwrap_err();
        assert_eq!(error.to_string(), "it took longer than 2 seconds; it last wrote: waits for the bus");
        assert!(begin.elapsed() < LONG / 2, "it was waited for");
    }

    #[test]
    fn process_that_keeps_the_output_open_is_not_waited_for() {
        let begin = Instant::now();
        let output = output_within(&mut shell("sleep 300 & echo $!"), LONG).unwrap();
        let pid = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        assert!(begin.elapsed() < LONG / 2, "it was waited for");
    }
}
