//! What lists of a large fleet cost the client that prints them: time and memory of `shepherdctl`.
//!
//! Each command runs as a person runs it: a process of its own, with a context and a token, against the API over TLS. Its
//! output goes to a pipe that is read at once, so that no terminal is measured. Memory is the peak that the kernel counts
//! (`VmHWM`), looked at every few milliseconds until the process has ended.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use tokio::process::Command;
use tokio::time::sleep;

use crate::Plan;
use crate::agents::memory;
use crate::fleet::Fleet;
use crate::reads::{ApiFixture, mark_machines};
use crate::report::{Report, Target, progress};

/// How often memory is looked at.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);

/// The first lines of the output that name columns.
const HEADER_LINES: usize = 1;

/// What a command is expected to print.
#[derive(Clone, Copy)]
enum ExpectedLines {
    /// A line for each machine.
    All,
    /// A line for each machine with the label.
    Labelled,
    /// At least one line of its own.
    Any,
}

/// The commands, each with what it prints.
const COMMANDS: [(&str, &[&str], ExpectedLines); 6] = [
    ("the program alone (version --client)", &["version", "--client"], ExpectedLines::Any),
    ("get machines", &["get", "machines"], ExpectedLines::All),
    ("get machines -o json", &["get", "machines", "-o", "json"], ExpectedLines::Any),
    ("get machines -l label.row=7", &["get", "machines", "-l", "label.row=7"], ExpectedLines::Labelled),
    ("get machines --sort-by since", &["get", "machines", "--sort-by", "since"], ExpectedLines::All),
    ("plan", &["plan"], ExpectedLines::Any),
];

/// One run of a command.
struct CommandRun {
    seconds: f64,
    mebibytes: f64,
    lines: usize,
}

/// Measures each command in turns with the others.
pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    let machines = fleet.machines;
    report.section(
        format!("Lists of {machines} machines"),
        "Commands of `shepherdctl`, each a process of its own, against an API on the same host, over TLS and with a token. \
         The machines come from ten providers, and two hundred of them have the label. Time is from the start of the process \
         to its end, with its handshake and all pages; the API and PostgreSQL share the processors with it. Memory is the \
         most that was ever resident in the process of the command.",
    )?;
    let labelled = mark_machines(fleet).await?;
    let limits = GateLimits::for_listener(ListenerKind::Api, 1 << 20);
    let api = ApiFixture::start(fleet, limits).await?;
    let home = tempfile::tempdir()?;
    api.write_context(home.path())?;
    progress(&format!("printing lists of {machines} machines"))?;
    let mut runs: Vec<Vec<CommandRun>> = COMMANDS.iter().map(|_| Vec::new()).collect();
    for _ in 0..plan.repetitions {
        for ((name, arguments, printed), runs) in COMMANDS.iter().zip(&mut runs) {
            let run = run_command(home.path(), arguments).await.with_context(|| (*name).to_owned())?;
            let expected = match printed {
                ExpectedLines::All => Some(usize::try_from(machines)? + HEADER_LINES),
                ExpectedLines::Labelled => Some(labelled + HEADER_LINES),
                ExpectedLines::Any => None,
            };
            let is_expected = expected.map_or(run.lines > 0, |expected| run.lines == expected);
            ensure!(is_expected, "{name} has printed {} lines", run.lines);
            runs.push(run);
        }
    }
    for ((name, _, _), runs) in COMMANDS.iter().zip(&runs) {
        let seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
        let mebibytes: Vec<f64> = runs.iter().map(|run| run.mebibytes).collect();
        report.add(format!("{name}: time"), "s", &seconds, Target::None)?;
        report.add(format!("{name}: memory"), "MiB", &mebibytes, Target::None)?;
    }
    api.stop.cancel();
    api.server.wait_until_stopped().await;
    Ok(())
}

/// Runs a command to its end.
async fn run_command(home: &Path, arguments: &[&str]) -> Result<CommandRun> {
    let began = Instant::now();
    let child = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
        .args(arguments)
        .env_clear()
        .env("HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let process = Path::new("/proc").join(child.id().context("it has ended")?.to_string());
    let sampler = tokio::spawn(sample_peak(process));
    let output = child.wait_with_output().await?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count();
    Ok(CommandRun { seconds, mebibytes: sampler.await? / 1024.0, lines })
}

/// The most that was resident in a process, in KiB. A process that has ended has no memory, which ends the samples.
async fn sample_peak(process: PathBuf) -> f64 {
    let mut peak = 0.0_f64;
    while let Ok(held) = memory(&process, "VmHWM:") {
        peak = peak.max(held);
        sleep(SAMPLE_INTERVAL).await;
    }
    peak
}
