//! `shepherd demo` as a newcomer drives it: the real program, its simulator and its PostgreSQL.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::program::{PATIENCE, Place};

/// A demo that runs, with what it has said. Killed when dropped.
struct Demo {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Demo {
    fn start(place: &Place, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::spawn(place.program(["demo"].iter().chain(arguments)))
    }

    fn spawn(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command.spawn()?;
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines, said: Vec::new() })
    }

    /// Waits for a line that holds `what`.
    fn until(&mut self, what: &str) -> anyhow::Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.said.push(line.clone());
                    if line.contains(what) {
                        return Ok(line);
                    }
                }
                Err(RecvTimeoutError::Timeout) => bail!("it never said {what:?}: {:#?}", self.said),
                Err(RecvTimeoutError::Disconnected) => bail!("it ended without {what:?}: {:#?}", self.said),
            }
        }
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Reads to its end.
    fn end(&mut self) -> anyhow::Result<(Option<i32>, String)> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("it does not end: {:#?}", self.said),
            }
        }
        let stderr = std::io::read_to_string(self.child.stderr.take().context("no errors")?)?;
        Ok((self.child.wait()?.code(), stderr))
    }

    /// A command that was printed and holds `what`, as a person would paste it.
    fn pasted(&self, place: &Place, what: &str) -> anyhow::Result<String> {
        let line = self.said.iter().find(|line| line.contains(what)).context("not printed")?;
        let output = Command::new("/bin/sh")
            .args(["-c", line.trim()])
            .env("HOME", place.path("home"))
            .stdin(Stdio::null())
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        anyhow::ensure!(output.status.success(), "{line}: {output:?}");
        Ok(text)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const COUNTS: &str = "live work: 0, open sessions: 0";

#[test]
fn a_demo_until_ready_ends_well_and_leaves_nothing() {
    let place = Place::new().unwrap();
    let mut demo = Demo::start(&place, &["--machines", "8", "--until-ready", "--fresh"]).unwrap();
    let (code, stderr) = demo.end().unwrap();
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.said);
    let position =
        |what: &str| demo.said.iter().position(|line| line.contains(what)).context(what.to_owned());
    assert_eq!(position("8 simulated machines, a private PostgreSQL").unwrap(), 0, "the first thing said");
    let order = ["starting the simulator", "Ready 0", "all 8 machines are Ready", "stopping", COUNTS];
    let places: Vec<usize> = order.iter().map(|what| position(what).unwrap()).collect();
    assert!(places.is_sorted(), "{:#?}", demo.said);
    place.must_be_clean().unwrap();
}

#[test]
fn a_demo_whose_deadline_passes_says_why_of_the_rest() {
    let place = Place::new().unwrap();
    let arguments = ["--machines", "8", "--until-ready", "--deadline", "100ms"];
    let mut demo = Demo::start(&place, &arguments).unwrap();
    let (code, stderr) = demo.end().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.starts_with("shepherd: only "), "{stderr}");
    assert!(stderr.contains(" of 8 machines were Ready after 100ms\n"), "{stderr}");
    let why = stderr.lines().filter(|line| line.starts_with("  sim-")).count();
    let unseen = stderr.lines().find_map(|line| line.trim().split_once(" more: not in the database yet"));
    let unseen = unseen.map_or(0, |(count, _)| count.parse().unwrap());
    assert_eq!(why + unseen, 8, "each machine is explained or counted: {stderr}");
    assert!(demo.said.iter().any(|line| line == COUNTS), "{:#?}", demo.said);
    place.must_be_clean().unwrap();
}

#[test]
fn an_interrupted_demo_leaves_nothing_at_any_stage() {
    for stage in ["starting the simulator", "Ready 0"] {
        let place = Place::new().unwrap();
        let mut demo = Demo::start(&place, &["--machines", "8"]).unwrap();
        demo.until(stage).unwrap();
        demo.signal(Signal::INT).unwrap();
        let (code, stderr) = demo.end().unwrap();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.said);
        assert!(demo.said.iter().any(|line| line == COUNTS), "{stage}: {:#?}", demo.said);
        assert_eq!(place.left_behind().unwrap(), Vec::<String>::new(), "{stage}");
    }
}

#[test]
fn a_killed_demo_takes_everything_with_it() {
    for stage in ["starting the simulator", "Ready 0"] {
        let place = Place::new().unwrap();
        let mut demo = Demo::start(&place, &["--machines", "8"]).unwrap();
        demo.until(stage).unwrap();
        demo.child.kill().unwrap();
        demo.child.wait().unwrap();
        place.must_be_clean().unwrap();
    }
}

#[test]
fn a_machine_that_is_broken_as_printed_leaves_ready_and_comes_back() {
    let place = Place::new().unwrap();
    let mut command = place.program(["demo", "--machines", "12"]);
    // Everything it could say, to see that no secret is among it.
    command.env("RUST_LOG", "debug");
    let errors = place.path("errors.log");
    command.stderr(fs::File::create(&errors).unwrap());
    let mut demo = Demo::spawn(command).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    let secrets = secrets(&place.path("tmp")).unwrap();
    assert!(secrets.len() >= 2, "an SSH key and a secrets key");

    demo.pasted(&place, "simulator fault sim-0007 kill").unwrap();
    demo.until("sim-0007  Ready → ").unwrap();
    let processes = command_lines().unwrap();
    assert!(demo.pasted(&place, "get machines").unwrap().contains("sim-0007"));
    assert!(demo.pasted(&place, "why sim-0007").unwrap().contains("sim-0007"));
    demo.until("→ Ready, back after").unwrap();
    let timeline = demo.pasted(&place, "timeline sim-0007").unwrap();
    assert!(timeline.contains("Recovery"), "{timeline}");

    demo.signal(Signal::INT).unwrap();
    demo.lines.iter().for_each(|line| demo.said.push(line));
    assert_eq!(demo.child.wait().unwrap().code(), Some(0), "{:#?}", demo.said);
    assert!(demo.said.iter().any(|line| line.contains("every machine is Ready")), "{:#?}", demo.said);
    place.must_be_clean().unwrap();

    let logged = fs::read_to_string(errors).unwrap();
    assert!(logged.contains("DEBUG"), "nothing was logged, so that nothing was proved");
    for secret in secrets {
        let everywhere = [logged.as_str(), processes.as_str(), timeline.as_str(), &demo.said.join("\n")];
        for text in everywhere {
            assert!(!text.contains(&secret), "a secret was shown");
        }
    }
}

#[test]
fn a_kept_fleet_is_the_same_next_time_and_new_when_asked() {
    let place = Place::new().unwrap();
    let directory = place.path("fleet");
    let directory = directory.to_str().unwrap();
    let run = |more: &[&str]| {
        let arguments = [&["--machines", "3", "--until-ready", "--dir", directory], more].concat();
        let mut demo = Demo::start(&place, &arguments).unwrap();
        let (code, stderr) = demo.end().unwrap();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.said);
        place.must_be_clean().unwrap();
        // Made once for a database, and sealing what is in it.
        fs::read_to_string(place.path("fleet/secrets.key")).unwrap()
    };
    let first = run(&[]);
    assert_eq!(run(&[]), first, "the database is the same");
    assert_ne!(run(&["--fresh"]), first, "the database is a new one");
}

/// What must never be seen: the lines of the key files that a demo made.
fn secrets(below: &Path) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(below)? {
        let path = entry?.path();
        let is_keys =
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("shepherd-keys-"));
        if !is_keys {
            continue;
        }
        for key in fs::read_dir(&path)? {
            let text = fs::read_to_string(key?.path())?;
            let secret = |line: &&str| !line.starts_with(['#', '-']) && line.len() > 16;
            found.extend(text.lines().filter(secret).map(ToOwned::to_owned));
        }
    }
    Ok(found)
}

fn command_lines() -> anyhow::Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir("/proc")? {
        let line = fs::read(entry?.path().join("cmdline")).unwrap_or_default();
        text.push_str(&String::from_utf8_lossy(&line));
        text.push('\n');
    }
    Ok(text)
}
