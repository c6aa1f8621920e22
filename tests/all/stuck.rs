//! Ways in which a machine can be stuck: a real service is brought into each of them, and `shepherdctl why` must name
//! the true cause and the next step. Its outputs are in `golden/stuck/`, one file per way, and are meant to be read.
//!
//! Also the path of a newcomer who only knows the printed commands: from the problem to its cause, to a hold, to a
//! machine that is healthy again.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::model::policy::{Budget, DisruptionKind};
use shepherd::model::time::Span;

use crate::harness::aloud::TestResult;
use crate::harness::child::Program;
use crate::harness::fleet::{ALL_READY, Fleet, PATIENCE, endpoint};

/// Limits that are short enough for a test, and one attempt per machine: failed work waits long enough to be inspected.
const LIMITS: [&str; 7] = [
    "--heartbeat_interval=1s",
    "--recovery_first_heartbeat_timeout=20s",
    "--recovery_silence_timeout=8s",
    "--recovery_ladder=restart-agent:5s:1,reboot:5s:1",
    "--recovery_brake_fraction=1",
    "--agent_start_backoff_initial=10m",
    "--agent_start_backoff_maximum=1h",
];
const SIMULATOR: [&str; 4] = ["--boot_seconds", "0.5", "--persistent_agent_percent", "100"];

/// Compares a text with its golden file, with masks for what differs from run to run.
fn golden(name: &str, text: &str) {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("golden/stuck");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    for (pattern, mask) in [
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "[uuid]"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", "[moment]"),
        (r"SHA256:[A-Za-z0-9+/]+", "[fingerprint]"),
        (r"127(\.\d+){3}:\d+", "[address]"),
        (r"pid \d+", "pid [pid]"),
        (r"src/([a-z_/]+\.rs):\d+", "src/$1:[line]"),
        (r"\d+ of \d+ machines", "[some] of [all] machines"),
        (r"\b(\d+(ms|[smhd]))+\b", "[span]"),
        (r"\b(\[span\] ago|just now)", "[span] ago"),
        (r"used up \(\d+ in", "used up ([some] in"),
        // Columns are as wide as the values that were masked in them.
        (r"(\S) {2,}", "$1  "),
    ] {
        settings.add_filter(pattern, mask);
    }
    settings.add_filter(&format!("(@|on ){}", regex_of(&host)), "$1[host]");
    settings.bind(|| insta::assert_snapshot!(name, text));
}

fn regex_of(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\{c}") }).collect()
}

/// The output of a line that an operator pastes into a shell.
fn pasted(fleet: &Fleet, line: &str) -> Result<String> {
    let programs = Path::new(env!("CARGO_BIN_EXE_shepherdctl")).parent().context("a directory")?;
    let output = Command::new("/bin/sh")
        .args(["-c", line])
        .env_clear()
        .env("PATH", programs)
        .env("USER", "kim")
        .env("SHEPHERD_BMDB_URL", &fleet.bmdb_url)
        .env("SHEPHERD_BMDB_DIALECT", fleet.database.dialect().as_str())
        .stdin(Stdio::null())
        .output()?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Waits until `why` shows a machine in this phase, with these words, and with any space between them. By then no worker
/// is busy with it, unless the test waits for that, and no sweep is due that could change the answer.
async fn why(fleet: &Fleet, machine: &str, phase: &str, words: &[&str]) -> Result<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let result = pasted(fleet, &format!("shepherdctl why {machine}"));
        if let Ok(text) = &result {
            let in_phase = text.lines().nth(1).is_some_and(|line| line.starts_with(phase));
            let quiet = words.contains(&"under way") || !text.contains("\n  under way ");
            let settled = !text.contains("the next sweep");
            let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
            if in_phase && quiet && settled && words.iter().all(|word| one_line.contains(word)) {
                return Ok(text.clone());
            }
        }
        ensure!(
            Instant::now() < deadline,
            "{machine} is not {phase} with {words:?}; why says {result:#?}\n{}",
            fleet.explain().await?
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn until_ended(program: &mut Program) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while program.ended()?.is_none() {
        ensure!(Instant::now() < deadline, "it has not ended");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// The commands that an answer suggests.
fn hints(text: &str) -> Vec<String> {
    let offered = text.lines().skip_while(|line| *line != "What would help:").skip(1);
    offered
        .filter_map(|line| line.strip_prefix("  "))
        .filter(|line| !line.starts_with(' '))
        .map(str::to_owned)
        .collect()
}

fn hint(text: &str, beginning: &str) -> Result<String> {
    let found = hints(text).into_iter().find(|hint| hint.starts_with(beginning));
    found.with_context(|| format!("no hint begins with {beginning:?} in:\n{text}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_that_are_stuck_in_ten_ways_are_explained() -> TestResult {
    let fleet = Fleet::start("stuck", &[&["--machine_count", "10"], SIMULATOR.as_slice()].concat()).await?;
    // Created, and not taken over yet.
    let flags = [&LIMITS[..], &["--components=provisioner,updater"]].concat();
    let mut maker = fleet.shepherd("maker", &[endpoint()?], &flags)?;
    let made = "SELECT count(*) = 10 FROM machine_due WHERE lane = 'access' AND phase_index = 'Provided'";
    fleet.until("all are made", made).await?;
    assert!(maker.terminate().await?.success());
    fleet.strike("sim-0001", "disk-full").await?;
    fleet.strike("sim-0002", "ssh-refuse").await?;
    fleet.strike("sim-0003", "hang").await?;
    let mut shepherd = fleet.shepherd("shepherd", &[endpoint()?], &LIMITS)?;
    golden("disk_full", &why(&fleet, "sim-0001", "Provided", &["no space left"]).await?);
    golden("ssh_refused", &why(&fleet, "sim-0002", "Provided", &["refused the SSH connection"]).await?);
    golden("ssh_hangs", &why(&fleet, "sim-0003", "Provided", &["while waiting for its greeting"]).await?);
    let ready = "SELECT count(*) = 7 FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
    fleet.until("the others are Ready", ready).await?;

    // The server has another key by the time its agent has to be installed again.
    fleet.strike("sim-0004", "new-host-key").await?;
    fleet.strike("sim-0004", "kill").await?;
    fleet.strike("sim-0005", "power-fail").await?;
    pasted(&fleet, "shepherdctl hold sim-0006 --reason 'changing a disk'")?;
    fleet.strike("sim-0006", "kill").await?;
    pasted(
        &fleet,
        "shepherdctl hold sim-0007 --scope power --reason 'its neighbour hangs off the same fuse'",
    )?;
    fleet.strike("sim-0007", "dead").await?;
    golden("host_key_changed", &why(&fleet, "sim-0004", "NeedsHuman", &["host-key-changed"]).await?);
    golden("power_fails", &why(&fleet, "sim-0005", "NeedsHuman", &["ladder-exhausted"]).await?);
    golden("hold", &why(&fleet, "sim-0006", "Silent", &["why held by", "changing a disk"]).await?);
    golden(
        "held_from_power",
        &why(&fleet, "sim-0007", "Recovering", &["why kim@", "hangs off the same fuse"]).await?,
    );

    let bmdb = fleet.database.bmdb().await?;
    bmdb.change_policy("test", |policy| {
        policy.budgets.insert(DisruptionKind::RestartAgent, Budget { count: 1, window: Span::hours(1) });
    })
    .await?;
    fleet.strike("sim-0008", "kill").await?;
    let text = why(&fleet, "sim-0008", "Silent", &["why the budget"]).await?;
    golden("budget", &text);
    // No more steps begin, so the counted steps are all of them.
    let begun = "SELECT count(*) FROM intent WHERE kind = 'restart-agent'";
    let begun: i64 = sqlx::query_scalar(begun).fetch_one(&fleet.pool).await?;
    assert!(begun >= 3 && text.contains(&format!("used up ({begun} in ")), "{begun} were begun:\n{text}");
    bmdb.change_policy("test", |policy| {
        policy.recovery_brake.fraction = 0.1;
        policy.recovery_brake.at_least = 1;
    })
    .await?;
    fleet.strike("sim-0009", "kill").await?;
    golden(
        "brake",
        &why(&fleet, "sim-0009", "Silent", &["why brake: ", "brake of all machines", "brake of sim"]).await?,
    );

    assert!(shepherd.terminate().await?.success());
    pasted(&fleet, "shepherdctl retry sim-0001")?;
    golden("no_shepherd", &why(&fleet, "sim-0001", "Provided", &["no shepherd works on this BMDB"]).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn why_of_a_machine_whose_worker_was_killed_names_until_when_nobody_touches_it() -> TestResult {
    let fleet =
        Fleet::start("stuck_lost", &[&["--machine_count", "1"], SIMULATOR.as_slice()].concat()).await?;
    let flags = [&LIMITS[..], &["--outward_call_timeout=10m"]].concat();
    // The shepherd that dies takes machines over and does nothing else. An updater that ran at the same time would be
    // killed during its own work, which `why` also reports.
    let made = [&flags[..], &["--components=provisioner,updater"]].concat();
    let mut maker = fleet.shepherd("maker", &[endpoint()?], &made)?;
    let provided = "SELECT count(*) = 1 FROM machine_due WHERE lane = 'access' AND phase_index = 'Provided'";
    fleet.until("it is made", provided).await?;
    assert!(maker.terminate().await?.success());
    let doomed = [&flags[..], &["--components=initializer"]].concat();
    let mut doomed = fleet.shepherd_dying_at("initializer.claimed", "doomed", &[endpoint()?], &doomed)?;
    until_ended(&mut doomed).await?;
    fleet.database.advance(Duration::from_mins(1)).await?;
    let words = ["under way", "expired", "about to be freed"];
    golden("worker_killed", &why(&fleet, "sim-0001", "Provided", &words).await?);

    let mut next = fleet.shepherd("next", &[endpoint()?], &flags)?;
    let words = ["was lost once", "nobody claims that work again until"];
    golden("worker_lost", &why(&fleet, "sim-0001", "Provided", &words).await?);
    assert!(next.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn why_of_a_machine_that_its_provider_does_not_list_names_what_contradicts() -> TestResult {
    let fleet =
        Fleet::start("stuck_vanished", &[&["--machine_count", "2"], SIMULATOR.as_slice()].concat()).await?;
    let mut shepherd = fleet.shepherd("shepherd", &[endpoint()?], &LIMITS)?;
    fleet.until("both are Ready", ALL_READY).await?;
    fleet.strike("provider", "list-short").await?;
    fleet.until("one is quarantined", "SELECT count(*) = 1 FROM machine_quarantine").await?;
    let lost: String = sqlx::query_scalar(
        "SELECT provider_id FROM machine_quarantine JOIN machine_provided USING (machine_id)",
    )
    .fetch_one(&fleet.pool)
    .await?;
    golden("not_listed", &why(&fleet, &lost, "Quarantined", &["does not list it any more"]).await?);
    assert!(shepherd.terminate().await?.success());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomer_helps_a_machine_with_nothing_but_what_is_printed() -> TestResult {
    let fleet =
        Fleet::start("stuck_newcomer", &[&["--machine_count", "3"], SIMULATOR.as_slice()].concat()).await?;
    let mut shepherd = fleet.shepherd("shepherd", &[endpoint()?], &LIMITS)?;
    fleet.until("all are Ready", ALL_READY).await?;
    fleet.strike("sim-0001", "power-fail").await?;
    why(&fleet, "sim-0001", "NeedsHuman", &[]).await?;

    let mut script = String::new();
    let mut paste = |line: &str, filled_in: &str| -> Result<String> {
        let line = line.replace("'WHAT FOR'", filled_in);
        let text = pasted(&fleet, &line)?;
        write!(script, "$ {line}\n{text}\n")?;
        Ok(text)
    };
    let issues = paste("shepherdctl issues", "")?;
    let ask = issues.split('`').find(|part| part.starts_with("shepherdctl why "));
    let ask = ask.with_context(|| format!("no issue says how to ask why:\n{issues}"))?.to_owned();
    let message = paste(&ask, "")?;
    paste(&hint(&message, "shepherdctl hold ")?, "'replacing its power supply'")?;
    let held = paste(&ask, "")?;
    fleet.strike("sim-0001", "heal").await?;
    paste(&hint(&held, "shepherdctl release ")?, "")?;
    let released = pasted(&fleet, &ask)?;
    paste(&hint(&released, "shepherdctl retry ")?, "")?;
    why(&fleet, "sim-0001", "Ready", &[]).await?;
    golden("newcomer", &script);
    assert!(shepherd.terminate().await?.success());
    Ok(())
}
