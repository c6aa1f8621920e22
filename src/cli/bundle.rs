//! `debug bundle`: one archive with what explains a fleet's state, for whoever helps and cannot ask it.
//!
//! It holds the answers of the commands that read, as JSON, each asked as an operator would: through the API or
//! straight in the BMDB. What cannot be had is left out and named, with the reason, so that a bundle can be made
//! while something is broken. None of these answers holds a secret by itself; but people write reasons, programs
//! write errors, and either may quote one. So what is known for a secret by its looks or by its name is masked
//! before it is written ([`crate::cli::mask`]), and the rest is for whoever hands the bundle on to read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, Parser as _, Subcommand};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::cli::command::{Cli, Command};
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::mask::{mask, masked};
use crate::cli::output::{Format, say};
use crate::cli::run::ask;
use crate::cli::source::Source;
use crate::model::time::Timestamp;

/// What helps to find a fault.
#[derive(Debug, Subcommand)]
pub enum Debug {
    /// Write one archive that explains the fleet's state, for whoever helps; known forms of secrets are masked
    #[command(after_help = examples::DEBUG_BUNDLE)]
    Bundle(Bundle),
}

/// A bundle.
#[derive(Debug, Args)]
pub struct Bundle {
    /// Where it is written; there must be no such file yet. [default: shepherd-debug-MOMENT.tar.gz, here]
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A machine to tell everything of, besides those with an issue; may be given several times
    #[arg(long, value_name = "M")]
    pub machine: Vec<String>,
}

/// Most machines that everything is told of because they have an issue.
const MACHINES: usize = 50;

/// What is asked about the fleet, by the name of its file.
const FLEET: &[(&str, &[&str])] = &[
    ("issues", &["issues"]),
    ("machines", &["get", "machines", "--limit", "100000"]),
    ("providers", &["get", "providers"]),
    ("sessions", &["get", "sessions", "--limit", "100000"]),
    ("work", &["get", "work", "--limit", "100000"]),
    ("loops", &["get", "loops"]),
    ("approvals", &["get", "approvals"]),
    ("budgets", &["get", "budgets"]),
    ("brakes", &["get", "brakes"]),
    ("plan", &["plan", "--limit", "100000"]),
    ("policy", &["policy", "get"]),
];

/// And about a machine.
const MACHINE: &[(&str, &[&str])] = &[
    ("why", &["why"]),
    ("described", &["describe", "machine"]),
    ("timeline", &["timeline", "--limit", "1000"]),
];

const README: &str = "\
What a fleet of Shepherd looked like, for whoever helps to find a fault.

about.json     who wrote this, when, whom it asked, and what could not be had
*.json         what shepherdctl answered about the fleet, with --output json
machines/*/    the same about each machine that has an issue or was named

Passwords, tokens and private keys that are written in a known form are masked as ***. One that is written otherwise is
not, nor are names of hosts, addresses and people, and the reasons that people gave: read it before you hand it to anybody.
";

/// The files of a bundle.
#[derive(Default)]
struct Files {
    written: BTreeMap<String, Vec<u8>>,
    failed: BTreeMap<String, String>,
}

impl Files {
    /// Asks one thing, and keeps the answer or why there is none.
    async fn ask(&mut self, source: &Source, name: String, words: &[&str]) -> Option<Value> {
        let command = words.join(" ");
        say(&format!("asking: {command}"));
        match answer(source, words).await {
            Ok(mut answer) => {
                mask(&mut answer);
                self.keep(format!("{name}.json"), &answer);
                Some(answer)
            }
            Err(error) => {
                self.failed.insert(command, masked(&error.to_string()));
                None
            }
        }
    }

    fn keep(&mut self, path: String, value: &Value) {
        self.written.insert(path, format!("{value:#}\n").into_bytes());
    }
}

async fn answer(source: &Source, words: &[&str]) -> Result<Value, CliError> {
    let line = ["shepherdctl"].iter().chain(words);
    let cli = Cli::try_parse_from(line).map_err(|error| CliError::Failed(error.to_string()))?;
    let Command::Fleet(command) = cli.command else {
        return Err(CliError::Failed("it is no question about a fleet".to_owned()));
    };
    Ok(serde_json::from_str(&Box::pin(ask(&command, Format::Json, source)).await?)?)
}

/// The machines that issues name, by id.
fn in_trouble(issues: &Value) -> BTreeSet<String> {
    let issues = issues["issues"].as_array().into_iter().flatten();
    let machines = issues.flat_map(|issue| issue["machines"].as_array().into_iter().flatten());
    machines.filter_map(|name| name["machine"].as_str()).map(str::to_owned).take(MACHINES).collect()
}

/// A machine's name as that of a folder.
fn folder(machine: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = machine.chars().map(plain).collect();
    if name.starts_with('.') { format!("_{name}") } else { name }
}

/// `debug bundle`.
pub async fn bundle(source: &Source, asked: &Bundle, format: Format) -> Result<String, CliError> {
    let now = Timestamp::from(std::time::SystemTime::now());
    let path = asked
        .file
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("shepherd-debug-{}.tar.gz", now.format("%Y%m%dT%H%M%SZ"))));
    let mut file = new_file(&path)?;
    let written = match gather(source, asked, now).await {
        Ok(files) => write(&mut file, &files, now).map(|()| files),
        Err(error) => Err(error),
    };
    let files = written.inspect_err(|_| {
        // Half a bundle would only mislead; that it is there still is said by the error anyhow.
        let _ = std::fs::remove_file(&path);
    })?;
    let Files { written, failed } = files;
    if format == Format::Json {
        return get::json(&json!({ "file": path, "files": written.len(), "failed": failed }));
    }
    let mut text =
        format!("{} holds {} files; read it before you hand it to anybody\n", path.display(), written.len());
    for (command, error) in &failed {
        let _ = writeln!(text, "without `{command}`: {error}");
    }
    Ok(text)
}

/// A file that only its owner reads, and that was not there before.
fn new_file(path: &Path) -> Result<std::fs::File, CliError> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|error| {
        CliError::Wrong(format!("cannot make {}: {error}; name another file with --file", path.display()))
    })
}

async fn gather(source: &Source, asked: &Bundle, now: Timestamp) -> Result<Files, CliError> {
    let mut files = Files::default();
    let mut machines: BTreeSet<String> = asked.machine.iter().cloned().collect();
    for (name, words) in FLEET {
        let answer = files.ask(source, (*name).to_owned(), words).await;
        if let (&"issues", Some(issues)) = (name, &answer) {
            machines.extend(in_trouble(issues));
        }
    }
    for machine in &machines {
        for (name, words) in MACHINE {
            let words: Vec<&str> = words.iter().copied().chain([machine.as_str()]).collect();
            files.ask(source, format!("machines/{}/{name}", folder(machine)), &words).await;
        }
    }
    if files.written.is_empty() {
        let why = files.failed.into_values().next().unwrap_or_default();
        return Err(CliError::Failed(format!("nothing could be asked, so no bundle was written: {why}")));
    }
    let about = json!({
        "shepherdctl": env!("CARGO_PKG_VERSION"),
        "at": now,
        "asked": match source {
            Source::Direct(_) => "the database".to_owned(),
            Source::Api(remote) => format!("the API at {}", remote.server()),
        },
        "failed": files.failed,
    });
    files.keep("about.json".to_owned(), &about);
    files.written.insert("README.txt".to_owned(), README.as_bytes().to_vec());
    Ok(files)
}

fn write(file: &mut impl Write, files: &Files, now: Timestamp) -> Result<(), CliError> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    for (path, bytes) in &files.written {
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        header.set_mode(0o600);
        header.set_mtime(u64::try_from(now.timestamp()).unwrap_or_default());
        archive.append_data(&mut header, Path::new("shepherd-debug").join(path), bytes.as_slice())?;
    }
    archive.into_inner()?.finish()?.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_question_is_one_that_reads() {
        let machine = MACHINE.iter().map(|(_, words)| [words, &["m"][..]].concat());
        for words in FLEET.iter().map(|(_, words)| words.to_vec()).chain(machine) {
            let line = ["shepherdctl"].into_iter().chain(words.iter().copied());
            let cli = Cli::try_parse_from(line);
            assert!(matches!(cli, Ok(Cli { command: Command::Fleet(_), .. })), "{words:?}: {cli:?}");
        }
    }

    #[test]
    fn machines_in_trouble_are_those_that_issues_name() {
        let named = |id: &str| json!({ "machine": id, "provider": "sim" });
        let issues = json!({ "issues": [
            { "id": "silent", "machines": [named("b"), named("a")] },
            { "id": "outage", "machines": [] },
            { "id": "again", "machines": [named("a")] },
        ] });
        assert_eq!(in_trouble(&issues).into_iter().collect::<Vec<_>>(), ["a", "b"]);
        assert!(in_trouble(&json!({})).is_empty());
        assert_eq!([folder("sim/../x y"), folder("..")], ["sim_.._x_y", "_.."]);
    }
}
