//! Limits of a provider: what they leave out is reported in each place, and a static provider has none by default.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::harness::aloud::TestResult;
use crate::harness::child::guarded;
use crate::harness::fleet::{Fleet, Program};
use crate::harness::program::Place;

/// The limit of a provider that is no static one, and lists that are compared often.
const LIMITED: [&str; 2] = ["--provisioner_max_machines=50", "--provisioner_reconciler_rate=500ms,1"];

/// The provisioner at work has compared several lists since it began, and since the last machine was adopted.
const COMPARED: &str = "SELECT EXISTS (
         SELECT 1 FROM provider_state, session
         WHERE component = 'provisioner' AND closed_at IS NULL
           AND listed_at > started_at + INTERVAL '2 seconds'
           AND listed_at > (SELECT max(created_at) FROM machine) + INTERVAL '2 seconds')";

/// Writes a device list with this many machines.
fn write_list(fleet: &Fleet, machines: usize) -> Result<PathBuf> {
    let mut list = String::from("[");
    for number in 1..=machines {
        let comma = if number == 1 { "" } else { "," };
        write!(list, "{comma}\n{{\"ID\": \"rack-{number:02}\", \"Addr\": \"192.0.2.{number}\"}}")?;
    }
    let path = fleet.directory().join("devices.json");
    std::fs::write(&path, list + "\n]\n")?;
    Ok(path)
}

/// A shepherd with the defaults of a static provider, which provisions and does nothing else.
fn static_shepherd(fleet: &Fleet, list: &Path, flags: &[&str]) -> Command {
    let mut command = guarded(env!("CARGO_BIN_EXE_shepherd"));
    command.env("SHEPHERD_BMDB_URL", &fleet.bmdb_url);
    command.args(["--bmdb_dialect", fleet.database.dialect().as_str(), "--components", "provisioner"]);
    // A host that stalls for some seconds loses no session.
    command.args(["--session_interval", "15s", "--provider", "static", "--provider_name", "rack"]);
    command.arg(format!("--static_device_list_url=file://{}", list.display()));
    command.arg("--secrets_key_path").arg(fleet.directory().join("secrets.key")).args(flags);
    command.stdout(Stdio::null());
    command
}

/// The report of `shepherd --check`.
fn check(fleet: &Fleet, list: &Path, flags: &[&str]) -> Result<String> {
    let mut command = static_shepherd(fleet, list, &[&["--check"], flags].concat());
    let checked = Place::finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)?;
    ensure!(checked.code == Some(0), "{checked:?}");
    Ok(checked.stdout)
}

/// The output of `shepherdctl`.
fn ctl(fleet: &Fleet, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
    command.args(arguments).env_clear().env("SHEPHERD_BMDB_URL", &fleet.bmdb_url);
    command.env("SHEPHERD_BMDB_DIALECT", fleet.database.dialect().as_str()).stdin(Stdio::null());
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The row of the provider, with single spaces, below the header in the same form.
fn provider_row(fleet: &Fleet) -> Result<String> {
    let table = ctl(fleet, &["get", "providers"])?;
    let squeezed = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let rows: Vec<String> = squeezed.collect();
    ensure!(rows[0].starts_with("NAME KIND MACHINES NOT ADOPTED "), "{table}");
    rows.into_iter().find(|row| row.starts_with("rack ")).with_context(|| table.clone())
}

/// The messages of the issues about machines that are not adopted.
fn issues(fleet: &Fleet) -> Result<Vec<String>> {
    let answer: Value = serde_json::from_str(&ctl(fleet, &["issues", "-o", "json"])?)?;
    let issues = answer["issues"].as_array().context("no list")?;
    let found = issues.iter().filter(|issue| issue["id"] == "machines-not-adopted");
    Ok(found.map(|issue| format!("{}: {}", issue["subject"], issue["message"]).replace('"', "")).collect())
}

async fn stop(fleet: &Fleet, mut shepherd: Program) -> Result<()> {
    let status = shepherd.terminate().await?;
    ensure!(status.code() == Some(0), "it ended with {status}\n{}", fleet.explain().await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_beyond_the_limit_are_reported_and_a_static_list_is_adopted_whole() -> TestResult {
    let fleet = Fleet::start("provision_beyond", &["--machine_count", "1"]).await?;
    let list = write_list(&fleet, 55)?;
    let checked = "\nfound        provider rack: 5 machines of its list are not adopted (limit 50); raise max_machines ";
    let report = check(&fleet, &list, &LIMITED)?;
    assert!(
        report.contains(checked) && report.contains("found        55 machines at provider rack\n"),
        "{report}"
    );

    for (name, warnings) in [("first", 1), ("second", 0)] {
        let log = fleet.log_of(name);
        let shepherd = Program::spawn_logged(&mut static_shepherd(&fleet, &list, &LIMITED), &log)?;
        fleet.until("lists were compared", COMPARED).await?;
        assert!(fleet.holds("SELECT count(*) = 50 FROM machine").await?, "{name}");
        let row = provider_row(&fleet)?;
        assert!(row.starts_with("rack static 55 5 (limit 50) "), "the limit is not reported: {row}");
        assert_eq!(
            issues(&fleet)?,
            ["provider rack: 5 machines of its list are not adopted (limit 50)"],
            "{name}"
        );
        stop(&fleet, shepherd).await?;
        let log = fleet.read_log(name)?;
        assert_eq!(log.matches("machines of its list are not adopted").count(), warnings, "{log}");
        assert!(check(&fleet, &list, &LIMITED)?.contains(checked), "{name}");
    }
    let listed: Value = serde_json::from_str(&ctl(&fleet, &["get", "providers", "-o", "json"])?)?;
    let mut not_adopted = listed["providers"][0]["notAdopted"].clone();
    let since = not_adopted.as_object_mut().and_then(|fields| fields.remove("since"));
    assert!(since.is_some_and(|since| since.is_string()), "{listed}");
    let reason = "at most 50 machines of this provider are adopted";
    assert_eq!(not_adopted, json!({ "machines": "5", "limit": "50", "reason": reason }));

    let log = fleet.log_of("default");
    let shepherd = Program::spawn_logged(&mut static_shepherd(&fleet, &list, &[]), &log)?;
    fleet.until("all 55 are known", "SELECT count(*) = 55 FROM machine").await?;
    let row = provider_row(&fleet)?;
    assert!(row.starts_with("rack static 55 0 "), "{row}");
    assert_eq!(issues(&fleet)?, Vec::<String>::new());
    stop(&fleet, shepherd).await?;
    assert!(!fleet.read_log("default")?.contains("machines of its list are not adopted"));
    let report = check(&fleet, &list, &[])?;
    assert!(report.contains("; any number of machines is adopted, at once\n"), "{report}");
    assert!(!report.contains("are not adopted"), "{report}");
    Ok(())
}
