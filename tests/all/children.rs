//! Programs that a test starts end with the test process, however that ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;

use crate::harness::aloud::TestResult;
use crate::harness::child::{Detached, Program, guarded, is_watcher};
use crate::harness::program::Place;

/// The deadline of every wait.
const PATIENCE: Duration = Duration::from_mins(5);
const STAND_IN: &str = "SHEPHERD_TEST_FAKE_PROGRAM";

/// When a process began: its process id alone may belong to another process later.
fn began(pid: &str) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // A process that has ended and was not waited for counts as ended.
    (fields.first() != Some(&"Z")).then(|| fields[19].to_owned())
}

fn until(what: &str, condition: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        ensure!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn watcher_of(pid: u32) -> Option<String> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let mut children = children.split_whitespace().map(str::to_owned);
    children.find(|child| child.parse().is_ok_and(is_watcher))
}

#[test]
fn children_of_a_test_process_that_is_killed_end_with_it() -> TestResult {
    if env::var_os(STAND_IN).is_some() {
        let running = Program::spawn(guarded("sleep").arg("600"))?;
        let stopped = Program::spawn(guarded("sleep").arg("600"))?;
        stopped.signal(Signal::STOP)?;
        // A process without a parent, identified by its last argument.
        let directory = env::temp_dir().join("machine");
        let _watched = Detached::naming(&directory)?;
        let detach = "setsid tail -f /dev/null \"$1\" </dev/null >/dev/null 2>&1 & echo $!";
        let detached = Command::new("/bin/sh").args(["-c", detach, "sh"]).arg(&directory).output()?;
        let detached = String::from_utf8(detached.stdout)?;
        let place = Place::new()?;
        let state = place.path("fleet.json");
        let mut simulator = place.program(["simulator", "--state_path"]);
        let mut simulator = Program::spawn(simulator.arg(state))?;
        let mut line = String::new();
        let child_stdout = simulator.child().stdout.take().context("its output is piped")?;
        BufReader::new(child_stdout).read_line(&mut line)?;
        writeln!(
            std::io::stdout(),
            "\nstarted {} {} {} {detached}",
            running.pid(),
            stopped.pid(),
            simulator.pid()
        )?;
        // Until this process is killed. The directory stays: nothing can remove it, and it is small.
        loop {
            thread::park();
        }
    }
    let name = concat!(module_path!(), "::children_of_a_test_process_that_is_killed_end_with_it");
    let name = name.split_once("::").context("a path begins with the crate")?.1;
    let directory = tempfile::tempdir()?;
    let mut stand_in = guarded(env::current_exe()?);
    stand_in.args(["--exact", name, "--nocapture"]).env(STAND_IN, "yes").env("TMPDIR", directory.path());
    let mut stand_in = Program::spawn(stand_in.stdout(Stdio::piped()))?;
    let reader = BufReader::new(stand_in.child().stdout.take().context("its output is piped")?);
    let mut started = None;
    for line in reader.lines() {
        if let Some(pids) = line?.strip_prefix("started ") {
            started = Some(pids.to_owned());
            break;
        }
    }
    let started = started.context("the stand-in started nothing")?;
    let born: Vec<(&str, Option<String>)> = started.split_whitespace().map(|pid| (pid, began(pid))).collect();
    assert!(born.len() == 4 && born.iter().all(|(_, began)| began.is_some()), "{born:?}");

    stand_in.kill()?;
    Ok(until("all four have ended", || born.iter().all(|(pid, born)| began(pid) != *born))?)
}

#[test]
fn a_guarded_program_is_the_child_itself_and_its_watcher_goes_with_it() -> TestResult {
    let mut command = guarded("/bin/sh");
    let script = "echo $$ \"$1\"; read -r line; echo \"read $?\"; exit 7";
    let command = command.args(["-c", script, "sh", "a b"]).stdout(Stdio::piped());
    let mut program = Program::spawn(command)?;
    let output = std::io::read_to_string(program.child().stdout.take().context("its output is piped")?)?;
    assert_eq!(output, format!("{} a b\nread 1\n", program.pid()), "its own id, argument and empty input");
    assert_eq!(program.child().wait()?.code(), Some(7));

    let program = Program::spawn(guarded("sleep").arg("600"))?;
    until("it is watched", || watcher_of(program.pid()).is_some())?;
    let watcher = watcher_of(program.pid()).context("no watcher")?;
    let born = began(&watcher);
    drop(program);
    Ok(until("the watcher has ended", || began(&watcher) != born)?)
}
