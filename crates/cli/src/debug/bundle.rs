//! `debug bundle`: support archive with the fleet's state, secrets masked.
//!
//! The archive is for people who help but have no access to the fleet. It contains the output of the commands that
//! only read, as JSON, each fetched as for an operator. A query that fails is left out, and named with the reason, so
//! that a bundle can be made while something is broken. None of these responses contains a secret by design. But people
//! write reasons, programs write errors, and either may quote a secret. So text that has the form or the name of a
//! secret is masked before it is written ([`crate::debug::mask::mask_json`]). The operator who passes the bundle on
//! must read it for the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::client::fleet_client::FleetClient;
use crate::command::{Cli, Command};
use crate::context::{CommandContext, OrderFlags};
use crate::debug::DebugBundleArgs;
use crate::debug::mask::{mask_json, mask_text};
use crate::dispatch::run_fleet_command;
use crate::error::CliError;
use crate::exit_code::{ExitCode, ExitRecord};
use crate::order::outcome::AffectedObjects;
use crate::output::color::SeverityColors;
use crate::output::{Format, Output, format_json, print_stderr};
use crate::target_flags::TargetFlags;
use model::time::Timestamp;

/// Most machines that are fully described because they have an issue.
const MAX_MACHINES: usize = 50;

/// Queries about the fleet: name of the file, command line.
const FLEET_QUERIES: &[(&str, &[&str])] = &[
    ("issues", &["issues"]),
    ("machines", &["get", "machines"]),
    ("providers", &["get", "providers"]),
    ("sessions", &["get", "sessions"]),
    ("work", &["get", "work"]),
    ("loops", &["get", "loops"]),
    ("approvals", &["get", "approvals"]),
    ("budgets", &["get", "budgets"]),
    ("brakes", &["get", "brakes"]),
    ("plan", &["plan", "--all"]),
    ("policy", &["get", "policy"]),
];

/// Queries about each selected machine: name of the file, command line.
const MACHINE_QUERIES: &[(&str, &[&str])] = &[
    ("why", &["why"]),
    ("description", &["describe", "machine"]),
    ("timeline", &["timeline", "--limit", "1000"]),
];

const README: &str = "\
State of a fleet of Shepherd, for the person who helps to find a fault.

about.json     version of shepherdctl, time, the API or database that was read, and the queries that failed
*.json         what shepherdctl answered about the fleet, with --output json
machines/*/    the same about each machine that has an issue or was named

Passwords, tokens and private keys that are written in a known form are masked as ***. One that is written otherwise is
not, nor are names of hosts, addresses and people, and the reasons that people gave: read it before you hand it to anybody.
";

/// Runs `debug bundle`: collects the files and writes the archive.
pub async fn write_debug_bundle(
    client: &FleetClient,
    args: &DebugBundleArgs,
    format: Format,
) -> Result<String, CliError> {
    let now = Timestamp::from(std::time::SystemTime::now());
    let path = args
        .output_file
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("shepherd-debug-{}.tar.gz", now.format("%Y%m%dT%H%M%SZ"))));
    let mut file = create_private_file(&path)?;
    let written = match collect_files(client, args, now).await {
        Ok(files) => write_archive(&mut file, &files, now).map(|()| files),
        Err(error) => Err(error),
    };
    let files = written.inspect_err(|_| {
        // A truncated bundle would only mislead. If it cannot be removed, the returned error still reports the
        // failure.
        let _ = std::fs::remove_file(&path);
    })?;
    let BundleFiles { contents: written, failures: failed, .. } = files;
    if format == Format::Json {
        return format_json(&json!({ "file": path, "files": written.len(), "failed": failed }));
    }
    let mut text =
        format!("{} holds {} files; read it before you hand it to anybody\n", path.display(), written.len());
    for (command, error) in &failed {
        let _ = writeln!(text, "without `{command}`: {error}");
    }
    Ok(text)
}

/// Creates a file that only its owner can read. Fails if the file exists.
fn create_private_file(path: &Path) -> Result<std::fs::File, CliError> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|error| {
        CliError::Invalid(format!(
            "cannot make {}: {error}; name another file with --output-file",
            path.display()
        ))
    })
}

/// The files of a bundle, and the queries that failed.
#[derive(Default)]
struct BundleFiles {
    contents: BTreeMap<String, Vec<u8>>,
    failures: BTreeMap<String, String>,
    /// The highest exit code of the failures.
    exit: ExitCode,
}

impl BundleFiles {
    /// Runs one query, and records its response or its error.
    async fn collect(&mut self, client: &FleetClient, name: String, words: &[&str]) -> Option<Value> {
        let command = words.join(" ");
        print_stderr(&format!("running: {command}"));
        match run_query(client, words).await {
            Ok(mut answer) => {
                mask_json(&mut answer);
                self.add_json(format!("{name}.json"), &answer);
                Some(answer)
            }
            Err(error) => {
                self.exit = self.exit.max(error.exit_code());
                self.failures.insert(command, mask_text(&error.to_string()));
                None
            }
        }
    }

    fn add_json(&mut self, path: String, value: &Value) {
        self.contents.insert(path, format!("{value:#}\n").into_bytes());
    }
}

async fn collect_files(
    client: &FleetClient,
    args: &DebugBundleArgs,
    now: Timestamp,
) -> Result<BundleFiles, CliError> {
    let mut files = BundleFiles::default();
    let mut machines: BTreeSet<String> = args.machine.iter().cloned().collect();
    for (name, words) in FLEET_QUERIES {
        let answer = files.collect(client, (*name).to_owned(), words).await;
        if let (&"issues", Some(issues)) = (name, &answer) {
            machines.extend(machines_with_issues(issues));
        }
    }
    for machine in &machines {
        for (name, words) in MACHINE_QUERIES {
            let words: Vec<&str> = words.iter().copied().chain([machine.as_str()]).collect();
            files.collect(client, format!("machines/{}/{name}", folder_name(machine)), &words).await;
        }
    }
    if files.contents.is_empty() {
        let why = files.failures.into_values().next().unwrap_or_default();
        let message = format!("every query failed, so no bundle was written: {why}");
        return Err(CliError::Ended { exit: files.exit, message });
    }
    let about = json!({
        "shepherdctl": env!("CARGO_PKG_VERSION"),
        "at": now,
        "backend": if client.is_in_process() {
            "the database".to_owned()
        } else {
            format!("the API at {}", client.current_server())
        },
        "failures": files.failures,
    });
    files.add_json("about.json".to_owned(), &about);
    files.contents.insert("README.txt".to_owned(), README.as_bytes().to_vec());
    Ok(files)
}

async fn run_query(client: &FleetClient, words: &[&str]) -> Result<Value, CliError> {
    let line = ["shepherdctl"].iter().chain(words);
    let cli = Cli::try_parse_from(line).map_err(|error| CliError::Failed(error.to_string()))?;
    let Command::Fleet(command) = cli.command else {
        return Err(CliError::Failed("it is not a command about a fleet".to_owned()));
    };
    // Queries give no orders.
    let context = CommandContext {
        client: client.clone(),
        output: Output::Json,
        format: Format::Json,
        order_flags: OrderFlags::default(),
        exit_record: ExitRecord::default(),
        order_targets: AffectedObjects::default(),
        target_flags: TargetFlags::default(),
        colors: SeverityColors::Off,
        arguments: Vec::new(),
    };
    Ok(serde_json::from_str(&Box::pin(run_fleet_command(&command, &context)).await?)?)
}

/// UUIDs of the machines that issues name, at most [`MAX_MACHINES`].
fn machines_with_issues(issues: &Value) -> BTreeSet<String> {
    let issues = issues["issues"].as_array().into_iter().flatten();
    let machines = issues.flat_map(|issue| issue["machines"].as_array().into_iter().flatten());
    machines.filter_map(|name| name["machine"].as_str()).map(str::to_owned).take(MAX_MACHINES).collect()
}

/// The name of a machine as the name of a folder.
fn folder_name(machine: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = machine.chars().map(plain).collect();
    if name.starts_with('.') { format!("_{name}") } else { name }
}

fn write_archive(file: &mut impl Write, files: &BundleFiles, now: Timestamp) -> Result<(), CliError> {
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    for (path, bytes) in &files.contents {
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
    use crate::command::FleetCommand;
    use crate::plan::PlanArgs;

    #[test]
    fn every_query_is_read_only() {
        let machine = MACHINE_QUERIES.iter().map(|(_, words)| [words, &["m"][..]].concat());
        for words in FLEET_QUERIES.iter().map(|(_, words)| words.to_vec()).chain(machine) {
            let line = ["shepherdctl"].into_iter().chain(words.iter().copied());
            let cli = Cli::try_parse_from(line);
            assert!(matches!(cli, Ok(Cli { command: Command::Fleet(_), .. })), "{words:?}: {cli:?}");
        }
    }

    #[test]
    fn plan_of_a_bundle_has_every_line() {
        let (_, words) = FLEET_QUERIES.iter().find(|(name, _)| *name == "plan").unwrap();
        let cli = Cli::try_parse_from(["shepherdctl"].iter().chain(*words)).unwrap();
        let Command::Fleet(command) = cli.command else { panic!("{words:?}") };
        assert!(matches!(*command, FleetCommand::Plan(PlanArgs { all: true, .. })), "{command:?}");
    }

    #[test]
    fn machines_named_by_issues_are_collected() {
        let named = |id: &str| json!({ "machine": id, "provider": "sim" });
        let issues = json!({ "issues": [
            { "id": "silent", "machines": [named("b"), named("a")] },
            { "id": "outage", "machines": [] },
            { "id": "again", "machines": [named("a")] },
        ] });
        assert_eq!(machines_with_issues(&issues).into_iter().collect::<Vec<_>>(), ["a", "b"]);
        assert!(machines_with_issues(&json!({})).is_empty());
        assert_eq!([folder_name("sim/../x y"), folder_name("..")], ["sim_.._x_y", "_.."]);
    }
}
