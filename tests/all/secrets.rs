//! A secret that a run creates or receives appears nowhere: in no log, no response, no list of processes.
//!
//! A complete demo runs with all logging enabled. While it runs, the test reads all processes of the host repeatedly,
//! and makes every possible query. Then it searches all of this for the keys that the run created. A search that could
//! find nothing proves nothing, so each place is also searched for something that must be there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::Signal;

use crate::demo::Demo;
use crate::harness::program::Place;

#[test]
fn a_demo_shows_its_secrets_nowhere() {
    let place = Place::new().unwrap();
    let processes = Processes::watch(place.path("tmp"));
    let mut command = place.program(["demo", "--machines", "8"]);
    command.env("RUST_LOG", "trace");
    let errors = place.path("errors.log");
    command.stderr(fs::File::create(&errors).unwrap());
    let mut demo = Demo::spawn(command).unwrap();
    demo.until("Ctrl-C ends the demo").unwrap();
    let secrets = secrets(&place.path("tmp")).unwrap();

    demo.pasted(&place, "simulator fault sim-0007 kill").unwrap();
    demo.until("sim-0007  Ready → ").unwrap();
    demo.until("→ Ready, back after").unwrap();
    let mut seen = answers(&demo, &place).unwrap();
    let journal = find(&place.path("tmp"), "simulator.json.calls.jsonl").unwrap();
    seen.insert("the simulator's journal".to_owned(), (fs::read_to_string(journal).unwrap(), "upload"));
    let log = find(&place.path("tmp"), "simulator.log").unwrap();
    seen.insert("the simulator's log".to_owned(), (fs::read_to_string(log).unwrap(), ""));
    demo.signal(Signal::INT).unwrap();
    assert_eq!(demo.end().unwrap().0, Some(0), "{:#?}", demo.output_lines);

    let (lines, environments) = processes.end().unwrap();
    seen.insert("command lines".to_owned(), (lines, "--exit_with_parent"));
    seen.insert("environments".to_owned(), (environments, "RUST_LOG=trace"));
    seen.insert("the output".to_owned(), (demo.output_lines.join("\n"), "all 8 machines are Ready"));
    seen.insert("the log".to_owned(), (fs::read_to_string(errors).unwrap(), "TRACE"));
    let mut shown = Vec::new();
    for (place, (text, must)) in &seen {
        assert!(text.contains(must), "{place} was not looked at: {must:?} is not there");
        shown.extend(
            secrets
                .iter()
                .filter(|(_, secret)| text.contains(secret.as_str()))
                .map(|(what, _)| format!("{what} is in {place}")),
        );
    }
    assert_eq!(shown, Vec::<String>::new());
    place.must_be_clean().unwrap();
}

/// The secrets with their names: every line of the key files that a demo created, and the bytes of its SSH key in the
/// form in which programs print bytes.
fn secrets(below: &Path) -> anyhow::Result<BTreeSet<(&'static str, String)>> {
    let mut found = BTreeSet::new();
    let ssh = fs::read_to_string(find(below, "ssh_key")?)?;
    let encoded: Vec<&str> = ssh.lines().filter(|line| !line.starts_with('-')).collect();
    // The first lines also contain the public half, which is shown.
    found.extend(encoded.iter().skip(2).map(|line| ("the SSH key", (*line).to_owned())));
    let bytes = STANDARD.decode(encoded.concat())?;
    let public = bytes.windows(11).rposition(|window| window == b"ssh-ed25519").context("no Ed25519 key")?;
    // After the name: the public half and then the private one with the public half again, each with its length.
    let seed = bytes.get(public + 11 + 4 + 32 + 4..).and_then(|rest| rest.get(..32)).context("cut off")?;
    found.insert(("the SSH key in hexadecimal", hex::encode(seed)));
    found.insert(("the SSH key as a list", format!("{seed:?}").trim_matches(['[', ']']).to_owned()));
    let sealing = fs::read_to_string(find(below, "secrets.key")?)?;
    let line = sealing.lines().find(|line| line.starts_with("AGE-SECRET-KEY-")).context("no age key")?;
    found.insert(("the secrets key", line.to_owned()));
    let token = fs::read_to_string(find(below, "demo.token")?)?;
    let (_, secret) = token.trim().rsplit_once('_').context("no token")?;
    found.insert(("the token", secret.to_owned()));
    ensure!(found.len() >= 5, "too few secrets: {}", found.len());
    Ok(found)
}

/// A file of a name, in a directory or in one of its directories.
fn find(below: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let inner = fs::read_dir(below)?.filter_map(|entry| Some(entry.ok()?.path().join(name)));
    inner.chain([below.join(name)]).find(|path| path.is_file()).with_context(|| format!("no {name}"))
}

/// Every available response, by its source, with a word that must be in it.
fn answers(demo: &Demo, place: &Place) -> anyhow::Result<BTreeMap<String, (String, &'static str)>> {
    let mut answers = BTreeMap::new();
    let line = |what: &str| {
        demo.output_lines
            .iter()
            .find(|line| line.contains(what))
            .cloned()
            .context(format!("{what} was not printed"))
    };
    let why = line(" why sim-")?;
    let (ctl, _) = why.trim().split_once(" why ").context("no command")?;
    for (arguments, must) in [
        ("get machines", "sim-0007"),
        ("get sessions", "initializer"),
        ("get work", ""),
        ("get providers", "sim"),
        ("describe machine sim-0007", "sim-0007"),
        ("why sim-0007", "sim-0007"),
        ("timeline sim-0007 --limit 1000", "Recovery"),
    ] {
        for format in ["table", "json"] {
            let output = Command::new("/bin/sh")
                .args(["-c", &demo.in_context(&format!("{ctl} -o {format} {arguments}"))?])
                .env("HOME", place.path("home"))
                .env_remove("SHEPHERD_BMDB_URL")
                .env_remove("SHEPHERD_CONTEXT")
                .output()?;
            ensure!(output.status.success(), "{arguments}: {output:?}");
            let text = String::from_utf8(output.stdout)? + &String::from_utf8(output.stderr)?;
            answers.insert(format!("shepherdctl -o {format} {arguments}"), (text, must));
        }
    }
    let metrics = line("/metrics")?;
    let metrics =
        metrics.split("http://").nth(1).and_then(|rest| rest.split('/').next()).context("no address")?;
    let simulator = line(" --url http://")?;
    let simulator = simulator.rsplit("http://").next().context("no address")?.trim_end_matches('/');
    for (address, path, must) in [
        (metrics, "/metrics", "# TYPE"),
        (metrics, "/healthz", "ok"),
        (metrics, "/nothing", "404"),
        (simulator, "/v1/machines", "sim-0007"),
        (simulator, "/v1/machines/sim-0007", "sim-0007"),
        (simulator, "/v1/fleet", "sim-0007"),
    ] {
        answers.insert(format!("http://{address}{path}"), (get(address, path)?, must));
    }
    Ok(answers)
}

fn get(address: &str, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// All observations of process lists: command lines, and the environments of those processes that a run below a
/// directory started.
struct Processes {
    stop: Arc<AtomicBool>,
    watcher: JoinHandle<std::io::Result<(String, String)>>,
}

impl Processes {
    fn watch(below: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watcher = std::thread::spawn(move || {
            let below = below.display().to_string();
            let (mut lines, mut environments) = (BTreeSet::new(), BTreeSet::new());
            while !stopped.load(Ordering::Relaxed) {
                for entry in fs::read_dir("/proc")? {
                    let path = entry?.path();
                    // The files of a process that has ended read as empty.
                    let text = |name: &str| {
                        String::from_utf8_lossy(&fs::read(path.join(name)).unwrap_or_default())
                            .replace('\0', " ")
                    };
                    lines.insert(text("cmdline"));
                    let environment = text("environ");
                    if environment.contains(&below) {
                        environments.insert(environment);
                    }
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let joined = |texts: BTreeSet<String>| texts.into_iter().collect::<Vec<_>>().join("\n");
            Ok((joined(lines), joined(environments)))
        });
        Self { stop, watcher }
    }

    fn end(self) -> anyhow::Result<(String, String)> {
        self.stop.store(true, Ordering::Relaxed);
        Ok(self.watcher.join().map_err(|_| anyhow::anyhow!("the watcher panicked"))??)
    }
}
