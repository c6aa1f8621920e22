//! `shepherd demo` as a newcomer runs it: the real program, its simulator and its PostgreSQL.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::harness::aloud::aloud;
use crate::harness::port::reserve_port;
use crate::harness::program::{PATIENCE, Place};

/// A demo that runs, with its output so far. Killed when dropped.
pub(crate) struct Demo {
    pub(crate) child: Child,
    /// Waiting for a child closes the end of the pipe that the child still owns, and that would kill it.
    _hold: ChildStdin,
    lines: Receiver<String>,
    pub(crate) output_lines: Vec<String>,
}

impl Demo {
    fn start(place: &Place, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::spawn(place.program(["demo"].iter().chain(arguments)))
    }

    pub(crate) fn spawn(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command.spawn()?;
        let hold = child.stdin.take().context("no hold on it")?;
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, _hold: hold, lines, output_lines: Vec::new() })
    }

    /// Waits for a line that contains `what`.
    pub(crate) fn until(&mut self, what: &str) -> anyhow::Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.output_lines.push(line.clone());
                    if line.contains(what) {
                        return Ok(line);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    aloud(&format!(
                        "it never printed {what:?}, and last {:#?}",
                        self.output_lines.last_chunk::<5>()
                    ));
                    bail!("it never printed {what:?}: {:#?}", self.output_lines)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("it ended without {what:?}: {:#?}", self.output_lines)
                }
            }
        }
    }

    /// The machines that left Ready by its output, and have not come back.
    fn away(&self) -> BTreeSet<&str> {
        let mut away = BTreeSet::new();
        for line in &self.output_lines {
            let Some((name, change)) = line.trim_start().split_once("  ") else { continue };
            if change.starts_with("Ready → ") {
                away.insert(name);
            } else if change.contains("→ Ready, back after ") {
                away.remove(name);
            }
        }
        away
    }

    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Reads to its end.
    pub(crate) fn end(&mut self) -> anyhow::Result<(Option<i32>, String)> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.output_lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("it does not end: {:#?}", self.output_lines),
            }
        }
        let stderr = self.child.stderr.take().map(std::io::read_to_string).transpose()?;
        Ok((self.child.wait()?.code(), stderr.unwrap_or_default()))
    }

    /// A printed line that contains `what`, without its indentation.
    fn printed(&self, what: &str) -> anyhow::Result<&str> {
        let line = self.output_lines.iter().find(|line| line.contains(what));
        Ok(line.with_context(|| format!("{what:?} was not printed"))?.trim())
    }

    /// A printed command that contains `what`, as an operator would paste it: after the line that sets the context.
    pub(crate) fn pasted(&self, place: &Place, what: &str) -> anyhow::Result<String> {
        sh(place, &self.in_context(self.printed(what)?)?)
    }

    /// The command after the printed line that sets the context.
    pub(crate) fn in_context(&self, command: &str) -> anyhow::Result<String> {
        Ok(format!("{}\n{command}", self.printed("export SHEPHERD_CONTEXTS=")?))
    }
}

/// The output of a line that an operator pastes into a shell.
fn sh(place: &Place, line: &str) -> anyhow::Result<String> {
    let output = Command::new("/bin/sh")
        .args(["-c", line.trim()])
        .env("HOME", place.path("home"))
        .env_remove("SHEPHERD_BMDB_URL")
        .env_remove("SHEPHERD_CONTEXT")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    anyhow::ensure!(output.status.success(), "{line}: {output:?}");
    Ok(text)
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
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.output_lines);
    let position =
        |what: &str| demo.output_lines.iter().position(|line| line.contains(what)).context(what.to_owned());
    assert_eq!(position("8 simulated machines, a private PostgreSQL").unwrap(), 0, "the first line printed");
    let order = ["starting the simulator", "Ready 0", "all 8 machines are Ready", "stopping", COUNTS];
    let places: Vec<usize> = order.iter().map(|what| position(what).unwrap()).collect();
    assert!(places.is_sorted(), "{:#?}", demo.output_lines);
    place.must_be_clean().unwrap();
}

#[test]
fn a_demo_whose_deadline_passes_says_why_of_the_rest() {
    let place = Place::new().unwrap();
    let arguments = ["--machines", "8", "--until-ready", "--ready_timeout", "100ms"];
    let mut demo = Demo::start(&place, &arguments).unwrap();
    let (code, stderr) = demo.end().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.starts_with("shepherd: only "), "{stderr}");
    assert!(stderr.contains(" of 8 machines were Ready after 100ms\n"), "{stderr}");
    let ready: usize = stderr["shepherd: only ".len()..].split(' ').next().unwrap().parse().unwrap();
    let unseen = stderr.lines().find_map(|line| line.split_once(" more: not in the database yet"));
    let unseen = unseen.map_or(0, |(count, _)| count.parse().unwrap());
    let explained: Vec<&str> = stderr.split("\n\n").filter(|part| part.starts_with("sim/sim-")).collect();
    assert_eq!(ready + explained.len() + unseen, 8, "each machine is explained or counted: {stderr}");
    assert!(demo.output_lines.iter().any(|line| line == COUNTS), "{:#?}", demo.output_lines);
    place.must_be_clean().unwrap();
}

#[test]
fn the_rest_is_explained_as_shepherdctl_explains_it() {
    let place = Place::new().unwrap();
    // One machine gets no agent as long as its disk is full. The other two are Ready by then.
    let directory = place.path("fleet");
    let arguments = ["--machines", "3", "--state_dir", directory.to_str().unwrap()];
    let mut demo = Demo::start(&place, &arguments).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    let fault = demo.output_lines.iter().find(|line| line.contains(" kill --url ")).unwrap().clone();
    for kind in ["disk-full", "dead"] {
        demo.output_lines.push(fault.replace(" kill ", &format!(" {kind} ")));
        demo.pasted(&place, &format!(" {kind} ")).unwrap();
    }
    // On an overloaded host its output may be from before the fault: then any of them may leave and come back. So the
    // test queries the database, after the fault. A dead machine reports nothing more to it.
    let not_ready = || -> BTreeSet<String> {
        let table = demo.pasted(&place, "get machines").unwrap();
        let rows = table.lines().filter(|line| line.contains("sim-") && !line.contains(" Ready "));
        rows.filter_map(|row| Some(row[row.find("sim-")?..].split(' ').next()?.to_owned())).collect()
    };
    let end = Instant::now() + PATIENCE;
    while not_ready() != BTreeSet::from(["sim-0003".to_owned()]) {
        assert!(Instant::now() < end, "it is not the one that is away: {:?}", not_ready());
        std::thread::sleep(Duration::from_millis(200));
    }
    demo.signal(Signal::INT).unwrap();
    assert_eq!(demo.end().unwrap().0, Some(0), "{:#?}", demo.output_lines);

    let arguments = [&arguments[..], &["--until-ready", "--ready_timeout", "4s"]].concat();
    let mut demo = Demo::start(&place, &arguments).unwrap();
    let (code, stderr) = demo.end().unwrap();
    assert_eq!(code, Some(1), "{stderr}");
    let parts: Vec<&str> = stderr.split("\n\n").collect();
    assert_eq!(parts[0], "shepherd: only 2 of 3 machines were Ready after 4s");
    assert!(parts[1].starts_with("sim/sim-0003  "), "{stderr}");
    let labels: Vec<&str> = parts[2].lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(labels.contains(&"why") && labels.contains(&"decided"), "{stderr}");
    assert!(!stderr.contains("What would help"), "no command helps when the database is gone: {stderr}");
    place.must_be_clean().unwrap();
}

#[test]
fn a_directory_that_is_no_demos_is_left_alone() {
    let place = Place::new().unwrap();
    let directory = place.path("var");
    fs::create_dir(&directory).unwrap();
    // No demo has a file of this name.
    fs::write(directory.join("hosts"), "of this computer").unwrap();
    for more in [&[][..], &["--fresh"]] {
        let arguments = [&["--machines", "1", "--state_dir", directory.to_str().unwrap()][..], more].concat();
        let mut demo = Demo::start(&place, &arguments).unwrap();
        let (code, stderr) = demo.end().unwrap();
        assert_eq!(code, Some(2), "{:#?}", demo.output_lines);
        assert_eq!(
            place.masked(&stderr),
            "shepherd: --state_dir [place]/var is not a directory of a demo, and contains hosts; give an empty directory, or \
             one that does not exist\n"
        );
    }
    let left: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["hosts"]);
}

#[test]
fn a_directory_has_one_demo_at_a_time() {
    let place = Place::new().unwrap();
    let directory = place.path("fleet");
    let arguments = ["--machines", "1", "--state_dir", directory.to_str().unwrap()];
    let mut first = Demo::start(&place, &arguments).unwrap();
    first.until("Ready 0").unwrap();
    let mut second = Demo::start(&place, &[&arguments[..], &["--fresh"]].concat()).unwrap();
    let (code, stderr) = second.end().unwrap();
    assert_eq!(code, Some(2), "{:#?}", second.output_lines);
    assert!(stderr.contains("another demo runs in --state_dir "), "{stderr}");
    first.until("all 1 machines are Ready").unwrap();
    first.signal(Signal::INT).unwrap();
    assert_eq!(first.end().unwrap().0, Some(0), "{:#?}", first.output_lines);
    place.must_be_clean().unwrap();
}

#[tokio::test]
async fn a_demo_that_nobody_listens_to_any_more_ends_in_order() {
    let place = Place::new().unwrap();
    let directory = place.path("fleet");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = place.program([
        "demo",
        "--machines",
        "3",
        "--until-ready",
        "--state_dir",
        directory.to_str().unwrap(),
    ]);
    let mut child = command.stdout(writer).spawn().unwrap();
    // Waiting for a child closes the end of the pipe that it still owns, and the pipe may hold it.
    let hold = child.stdin.take();
    // The command would keep the other end open.
    drop(command);
    let mut lines = BufReader::new(reader).lines();
    while !lines.next().unwrap().unwrap().contains("Ready 0") {}
    drop(lines);
    let stderr = std::thread::spawn(move || {
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    });
    let (code, stderr) = tokio::task::spawn_blocking(|| stderr.join().unwrap()).await.unwrap();
    drop(hold);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
    place.must_be_clean().unwrap();

    let storage = ServerStorage::Persistent(directory.join("bmdb"));
    let server =
        PrivatePostgres::start(PrivatePostgresOptions { storage, max_connections: 20 }).await.unwrap();
    let options: PgConnectOptions = server.url("shepherd").parse().unwrap();
    let mut connection = options.connect().await.unwrap();
    let open: i64 = sqlx::query_scalar("SELECT count(*) FROM session WHERE closed_at IS NULL")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
    server.stop().await.unwrap();
    assert_eq!(open, 0, "sessions were left to expire");
}

#[test]
fn an_interrupted_demo_leaves_nothing_at_any_stage() {
    for stage in ["starting the simulator", "Ready 0"] {
        let place = Place::new().unwrap();
        let mut demo = Demo::start(&place, &["--machines", "8"]).unwrap();
        demo.until(stage).unwrap();
        demo.signal(Signal::INT).unwrap();
        let (code, stderr) = demo.end().unwrap();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.output_lines);
        assert!(demo.output_lines.iter().any(|line| line == COUNTS), "{stage}: {:#?}", demo.output_lines);
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
    let mut demo = Demo::start(&place, &["--machines", "12"]).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    demo.pasted(&place, "simulator fault sim-0007 kill").unwrap();
    demo.until("sim-0007  Ready → ").unwrap();
    assert!(demo.pasted(&place, "get machines").unwrap().contains("sim-0007"));
    assert!(demo.pasted(&place, "why sim-0007").unwrap().contains("sim-0007"));
    // On an overloaded host other machines may leave Ready, and come back.
    while !demo.away().is_empty() {
        demo.until("→ Ready, back after").unwrap();
    }
    let timeline = demo.pasted(&place, "timeline sim-0007").unwrap();
    assert!(timeline.contains("Recovery"), "{timeline}");
    assert!(demo.pasted(&place, "retire sim-0007").unwrap().contains("is being retired"));
    demo.until(" → Retired: retired (trying it): provider sim took it back").unwrap();
    demo.signal(Signal::INT).unwrap();
    assert_eq!(demo.end().unwrap(), (Some(0), String::new()), "{:#?}", demo.output_lines);
    assert!(
        demo.output_lines.iter().any(|line| line.contains("every machine is Ready")),
        "{:#?}",
        demo.output_lines
    );
    place.must_be_clean().unwrap();
}

#[test]
fn machines_leave_a_demo_in_each_way_that_an_operator_has() {
    let place = Place::new().unwrap();
    let mut demo = Demo::start(&place, &["--machines", "8"]).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    let printed = |what: &str| demo.output_lines.iter().find(|line| line.contains(what)).unwrap().clone();
    let (retire, fault) = (printed(" retire sim-0007 "), printed(" fault sim-0007 kill "));
    // The printed command, with another end.
    let ctl = demo.in_context(retire.split_once(" retire ").unwrap().0.trim()).unwrap();
    let asks = |words: &str| sh(&place, &format!("{ctl} {words}")).unwrap();
    let until = |words: &str, what: &str| {
        let end = Instant::now() + PATIENCE;
        while !asks(words).contains(what) {
            assert!(Instant::now() < end, "`{words}` does not say {what:?}:\n{}", asks(words));
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    let is_retired = |machine: &str| until(&format!("why {machine}"), "\nRetired for ");

    // Nothing fails, and the order is given twice.
    assert!(asks("retire sim-0001 --yes --reason 'its lease ends'").contains("is being retired"));
    assert!(asks("retire sim-0001 --yes --reason 'its lease ends'").contains("already"));
    is_retired("sim-0001");
    // Its agent is gone, with everything else on it.
    sh(&place, &fault.replace(" sim-0007 kill ", " sim-0002 dead ")).unwrap();
    asks("retire sim-0002 --yes --reason 'it is dead'");
    is_retired("sim-0002");
    // A shepherd works on it: its agent was killed, and is installed again.
    sh(&place, &fault.replace(" sim-0007 kill ", " sim-0003 hang ")).unwrap();
    until("why sim-0003", "under way");
    asks("retire sim-0003 --yes --reason 'it hangs'");
    is_retired("sim-0003");
    // It is held, waits for the end of the hold, and the retirement is cancelled before that.
    asks("hold sim-0004 --reason 'its disks are copied'");
    asks("retire sim-0004 --yes --reason 'its lease ends'");
    assert!(asks("why sim-0004").contains("its disks are copied"));
    assert!(asks("retire cancel sim-0004").contains("is cancelled"));
    asks("release sim-0004");
    until("why sim-0004", "\nReady for ");
    // Its provider is gone: the operator waives the stage in which the provider takes it back, in the words that the
    // command requires.
    sh(&place, &fault.replace(" sim-0007 kill ", " provider api-error ")).unwrap();
    asks("retire sim-0005 --yes --reason 'its lease ends'");
    until("why sim-0005", " release --confirm ");
    let waive = |words: &str| {
        let line =
            format!("{ctl} retire waive sim-0005 release --confirm '{words}' --reason 'it went bankrupt'");
        sh(&place, &line)
    };
    let refused = waive("anything").unwrap_err().to_string();
    let quoted = |c| matches!(c, '"' | '\\');
    let words = refused.split_once("with the words ").unwrap().1.trim_start_matches(quoted);
    waive(words.split(quoted).next().unwrap()).unwrap();
    is_retired("sim-0005");

    demo.signal(Signal::INT).unwrap();
    assert_eq!(demo.end().unwrap(), (Some(0), String::new()), "{:#?}", demo.output_lines);
    place.must_be_clean().unwrap();
}

#[test]
fn a_persisted_fleet_is_the_same_next_time_and_new_on_request() {
    let place = Place::new().unwrap();
    let directory = place.path("fleet");
    let directory = directory.to_str().unwrap();
    let run = |more: &[&str]| {
        let arguments = [&["--machines", "3", "--until-ready", "--state_dir", directory], more].concat();
        let mut demo = Demo::start(&place, &arguments).unwrap();
        let (code, stderr) = demo.end().unwrap();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{:#?}", demo.output_lines);
        place.must_be_clean().unwrap();
        // The key is created once for a database, and seals what is in it.
        fs::read_to_string(place.path("fleet/secrets.key")).unwrap()
    };
    let first = run(&[]);
    assert_eq!(run(&[]), first, "the database is the same");
    assert_ne!(run(&["--fresh"]), first, "the database is a new one");
}

/// The printed line has the only thing that an operator must copy. A terminal with it still works after a restart.
#[test]
fn a_context_of_a_persistent_demo_works_after_its_restart() {
    let place = Place::new().unwrap();
    let directory = place.path("fleet");
    fs::create_dir(&directory).unwrap();
    // An empty file that marks the directory of a demo. The ports of a demo that has ended could be taken by another
    // test, so these are held until the end.
    fs::write(directory.join("shepherd-demo.lock"), "").unwrap();
    let ports = ["agent_address", "api_address", "metrics_address", "provider_address"].map(|name| {
        let port = reserve_port(0).unwrap();
        fs::write(directory.join(name), port.local_addr().unwrap().to_string()).unwrap();
        port
    });
    let address = |place: usize| ports[place].local_addr().unwrap().to_string();
    let arguments = ["--machines", "2", "--state_dir", directory.to_str().unwrap()];
    let mut demo = Demo::start(&place, &arguments).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    assert_eq!(demo.output_lines.iter().filter(|line| line.contains("SHEPHERD_CONTEXTS")).count(), 1);
    assert!(!demo.output_lines.iter().any(|line| line.contains("bmdb_url")), "{:#?}", demo.output_lines);
    let saved = demo.in_context(demo.printed(" get machines").unwrap()).unwrap();
    let end = |mut demo: Demo| {
        demo.signal(Signal::INT).unwrap();
        assert_eq!(demo.end().unwrap(), (Some(0), String::new()), "{:#?}", demo.output_lines);
    };
    assert!(sh(&place, &saved).unwrap().contains("sim-0002"));
    let contexts = fs::read_to_string(directory.join("contexts.toml")).unwrap();
    assert!(contexts.contains(&format!("\"{}\"", address(1))), "{contexts}");
    let token = fs::read_to_string(directory.join("demo.token")).unwrap();
    end(demo);
    let refused = sh(&place, &saved).unwrap_err().to_string();
    assert!(refused.contains(&address(1)), "it names the server that does not answer: {refused}");

    let mut demo = Demo::start(&place, &arguments).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    assert!(sh(&place, &saved).unwrap().contains("sim-0002"));
    assert_eq!(fs::read_to_string(directory.join("demo.token")).unwrap(), token, "it is still valid");
    for (what, place) in [(" kill --url ", 3), ("/metrics", 2)] {
        let line = demo.printed(what).unwrap();
        assert!(line.contains(&format!("http://{}", address(place))), "{line}");
    }
    end(demo);
    // Another token replaces one that is valid no more.
    fs::write(directory.join("demo.token"), "shepherd_x\n").unwrap();
    let mut demo = Demo::start(&place, &arguments).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    assert!(sh(&place, &saved).unwrap().contains("sim-0002"));
    end(demo);
    place.must_be_clean().unwrap();
}
