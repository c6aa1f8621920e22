//! The lines of `tests/data/habits/lines.txt`, on a fleet with the machines, the cluster, the update and the context that
//! they name.
//!
//! What each line prints, and its exit code, is recorded in `tests/all/golden/api/habits.snap`, with identifiers, numbers
//! and times masked. The command that is named in place of a line is run, and succeeds. Logs are those of a machine with a
//! role server, in a fleet of its own: its heartbeats would change what the other lines print.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::model::access::AccessRole;
use shepherd::model::shell_words;
use shepherd::model::time::Span;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::time::timeout;

use crate::api::Api;
use crate::api::command_line::{Operator, interruptible};
use crate::api::logs::enrolled;
use crate::api::recorded::{mask, mask_host};
use crate::habits::{find_named_command, read_lines};
use crate::harness::aloud::TestResult;
use crate::harness::callback::{self, Listener};
use crate::harness::program::PATIENCE;
use crate::roleserver::Machine;

/// Lines that work, each with a part of what standard output has then. Those without a part have other output each time.
const WORKING: &[(&str, &str)] = &[
    ("get machines", "NAME      PHASE"),
    ("get machine", "sim-0008"),
    ("get machines -o wide", "UUID"),
    ("get machines -o json", "\"providerId\": \"sim-0007\""),
    ("get machines -o yaml", "providerId: sim-0007"),
    ("get machines -o name", "sim/sim-0007\nsim/sim-0008\n"),
    ("get machines -o jsonpath='{.machines[*].name.providerId}'", "sim-0007 sim-0008"),
    (r#"get machines -o jsonpath='{range .machines[*]}{.phase}{"\n"}{end}'"#, "New\nNew\n"),
    ("get machines -o custom-columns=NAME:.name.providerId,PHASE:.phase", "NAME      PHASE\nsim-0007  New\n"),
    ("get machines --no-headers", "sim-0007  New"),
    ("get machines --sort-by=phase", "NAME      PHASE"),
    ("get machines -l label.row=7", "sim-0009"),
    ("get machines --selector phase=Ready", "sim-0009"),
    ("get machines -l 'phase in (Ready,NeedsHuman)'", "sim-0009"),
    ("get machine sim-0007", "sim-0007"),
    ("get machine sim-0007 sim-0008", "sim-0008"),
    ("get machine sim-0007 -o yaml", "phase: New"),
    ("get machine sim-0007 -o jsonpath='{.phase}'", "New"),
    ("get clusters", "prod"),
    ("get cluster prod", "prod"),
    ("get cluster prod -o yaml", "name: prod"),
    ("get providers", "simulated"),
    ("get shepherds", "api"),
    ("get sessions", "api"),
    ("get issues", "What to do:"),
    ("get tokens -o json", "\"credentials\": ["),
    ("get policy -o yaml", "recovery_silence_timeout: 10m"),
    ("get audit", "a test"),
    ("get contexts", "prod"),
    ("describe machine sim-0007", "sim/sim-0007"),
    ("describe machines sim-0007", "sim/sim-0007"),
    ("describe cluster prod", "wanted"),
    ("describe provider sim", "simulated"),
    ("top", "Machines by phase"),
    ("label sim-0007 row=7", "sim/sim-0007 is labelled row=7"),
    ("label sim-0007 row-", "sim/sim-0007 has no label any more"),
    ("reboot sim-0007 --reason 'it hangs'", "will be rebooted"),
    ("contexts use prod", "prod is already the current context"),
    ("version", "shepherdctl "),
    ("completion bash", "complete "),
    ("explain Ready", "reports in time"),
    ("wait machine sim-0007 --for=phase=Ready --timeout=5m", "sim/sim-0007 is Ready"),
    ("wait --for=healthy machine sim-0007", "sim/sim-0007 is healthy"),
    (WATCH, "NAME      PHASE"),
    ("logs sim-0007", "roleserver"),
    (FOLLOWED_LOG, ""),
];

/// The watch of the list, which has no end. It prints a header and three machines at once.
const WATCH: &str = "get machines -w";

/// The log of the list that is followed, which has no end while its machine writes it.
const FOLLOWED_LOG: &str = "logs sim-0007 roleserver -f";

/// First words of orders that nothing undoes. A test has the dry run of these.
const IRREVERSIBLE: [&str; 1] = ["retire"];

/// Before a line that waits for it: an order after the last one may have changed the phase.
const SET_READY: &str = "UPDATE machine_due SET phase_index = 'Ready' WHERE machine_id IN
                             (SELECT machine_id FROM machine_provided WHERE provider_id = 'sim-0007')";

/// Two machines that are new and one that is Ready and has a label, a provider, a cluster and an update.
const FLEET: [&str; 8] = [
    "INSERT INTO machine SELECT ('10000000-0000-4000-8000-00000000000' || n)::UUID, clock_timestamp()
     FROM generate_series(7, 9) n",
    "INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
     SELECT machine_id, 'sim', 'sim-000' || right(machine_id::TEXT, 1), '192.0.2.1', 'Running', clock_timestamp(), FALSE
     FROM machine",
    "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
         phase_since, rules_version, policy_version, version, fence, losses)
     SELECT machine_id, lane, 'sim', 1, 0, FALSE, 'newly provided', '',
            CASE WHEN machine_id::TEXT LIKE '%9' THEN 'Ready' ELSE 'New' END, clock_timestamp(), 1, 0, 0, 0, 0
     FROM machine, (VALUES ('access'), ('observe')) l (lane)",
    "INSERT INTO machine_labels SELECT machine_id, '{\"row\": \"7\"}'::JSONB FROM machine WHERE machine_id::TEXT LIKE '%9'",
    "INSERT INTO provider_state (provider, kind, listed_at, machines) VALUES ('sim', 'simulated', clock_timestamp(), 3)",
    "INSERT INTO cluster VALUES (gen_random_uuid(), 'prod', 3, 2, 'cpus>=4', '[\"web\"]', 'manual', 1,
         clock_timestamp(), 'kim', NULL, NULL, clock_timestamp(), 'ca', '[\"10.0.0.1:7835\"]',
         clock_timestamp(), clock_timestamp(), '[\"no machine is free\"]', FALSE, 3, 2)",
    "INSERT INTO artefact VALUES (decode(repeat('ab', 32), 'hex'), 7, gen_random_uuid(), clock_timestamp(), 'one',
         clock_timestamp(), 'kim')",
    "INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at, created_by,
         reason)
     VALUES ('prod', decode(repeat('ab', 32), 'hex'), 'one', 'cpus>=4', 1, 60, clock_timestamp(), 'kim', 'a try')",
];

#[test]
fn each_line_that_should_work_has_an_expectation() -> TestResult {
    let lines = read_lines()?.into_iter().filter(|(_, works)| *works).map(|(line, _)| line);
    let known = WORKING.iter().map(|(line, _)| (*line).to_owned());
    assert_eq!(lines.collect::<BTreeSet<_>>(), known.collect::<BTreeSet<_>>());
    Ok(())
}

/// What a line prints, and the exit code that a shell sees.
struct Transcript {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Transcript {
    /// What is recorded of the line: standard error marked, and its exit code.
    fn format(&self, kim: &Operator<'_>, line: &str) -> anyhow::Result<String> {
        let stdout: String = match line {
            // Scripts of a shell are long, and have a test of their own.
            "completion bash" => self.stdout.lines().take(1).collect(),
            // The sizes of logs differ, and what a role server writes does, too.
            "logs sim-0007" => {
                let words = self.stdout.lines().filter_map(|line| line.split_whitespace().next());
                words.flat_map(|word| [word, "\n"]).collect()
            }
            FOLLOWED_LOG => "(the log)".to_owned(),
            _ => self.stdout.clone(),
        };
        let mut text = mask_fleet(kim, &stdout)?;
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        for line in mask_fleet(kim, &self.stderr)?.lines() {
            let _ = writeln!(text, "! {line}");
        }
        let _ = writeln!(text, "exit code {}", self.code);
        Ok(text)
    }
}

/// The text without what differs from run to run. The names of the machines stay distinct.
fn mask_fleet(kim: &Operator<'_>, text: &str) -> anyhow::Result<String> {
    let home = kim.home.path().to_str().context("text")?;
    let mut text = text.replace(home, "HOME").replace(env!("CARGO_BIN_EXE_shepherdctl"), "shepherdctl");
    for (name, masked) in [("sim-0007", "sim-seven"), ("sim-0008", "sim-eight"), ("sim-0009", "sim-nine")] {
        text = text.replace(name, masked);
    }
    Ok(mask(&mask_host(&text)?))
}

/// Runs a line until it ends. A line without an end gets Ctrl-C when it has printed what it begins with.
async fn run_line(kim: &Operator<'_>, line: &str) -> anyhow::Result<Transcript> {
    let words = shell_words::split(line).with_context(|| line.to_owned())?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let first_lines = match line {
        WATCH => 4,
        FOLLOWED_LOG => 1,
        _ => 0,
    };
    if first_lines == 0 {
        let output = kim.run_command(&words).await?;
        let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        return Ok(Transcript { code: exit_code(output.status), stdout, stderr });
    }
    let mut child = tokio::process::Command::from(interruptible(&kim.command(&words)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().context("its output")?);
    let mut errors = child.stderr.take().context("its errors")?;
    let (mut stdout, mut stderr) = (String::new(), String::new());
    for _ in 0..first_lines {
        let read = timeout(PATIENCE, output.read_line(&mut stdout)).await.context("it is silent")??;
        ensure!(read > 0, "{line} has ended after {stdout}");
    }
    let process = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    kill_process(process.context("it runs")?, Signal::INT)?;
    let status = timeout(PATIENCE, child.wait()).await.context("it does not end")??;
    errors.read_to_string(&mut stderr).await?;
    Ok(Transcript { code: exit_code(status), stdout, stderr })
}

/// The exit code as a shell has it.
fn exit_code(status: std::process::ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(-1)
}

/// Runs the command that is named in place of a line, or its dry run if nothing undoes it. Words in capitals are filled in.
async fn run_named_command(kim: &Operator<'_>, line: &str, answer: &Transcript) -> anyhow::Result<()> {
    ensure!(answer.code == 2 && answer.stdout.is_empty(), "{line}: {}{}", answer.stdout, answer.stderr);
    let command = find_named_command(line, &answer.stderr)?;
    let words = shell_words::split(&command).with_context(|| command.clone())?;
    let filled = words.iter().skip(1).map(|word| match word.as_str() {
        "TEXT" => "a test",
        "NAME" => "lab",
        word => word,
    });
    let mut words: Vec<&str> = filled.collect();
    if words.first().is_some_and(|first| IRREVERSIBLE.contains(first)) {
        words.push("--dry-run");
    }
    let output = kim.run_command(&words).await?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(0), "{line} is answered with {command}, which fails: {stderr}");
    // The lines after it order work on the machine.
    if words.first() == Some(&"hold") {
        kim.ask(&["release", words[1]])?;
    }
    Ok(())
}

/// A role server on the machine `sim-0007` of this fleet, and the listener that it calls.
async fn start_role_server(api: &Api) -> anyhow::Result<(Listener, Arc<Machine>)> {
    api.bmdb.change_policy("test", |policy| policy.heartbeat_interval = Span::seconds(1)).await?;
    let listener = Listener::start(&api.database, callback::settings(api.directory.path())?).await?;
    let (machine, host) = enrolled(api, &listener).await?;
    sqlx::query(
        "UPDATE machine_provided SET provider = 'sim', provider_id = 'sim-0007' WHERE machine_id = $1",
    )
    .bind(machine.0)
    .execute(&api.pool)
    .await?;
    Ok((listener, host))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_line_prints_what_is_recorded() -> TestResult {
    let (api, logs_api) = (Api::start("api_habits").await?, Api::start("api_habits_of_logs").await?);
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let (listener, host) = start_role_server(&logs_api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let log_reader = Operator { api: &logs_api, home: tempfile::tempdir()? };
    for operator in [&kim, &log_reader] {
        operator.direct(&["tokens", "bootstrap", "--save-context", "prod"])?;
    }
    api.key(AccessRole::Viewer, &[], None).await?;
    let mut recorded = String::new();
    for (line, works) in read_lines()? {
        if line.starts_with("wait ") {
            sqlx::query(SET_READY).execute(&api.pool).await?;
        }
        let operator = if line.starts_with("logs ") { &log_reader } else { &kim };
        let transcript = run_line(operator, &line).await?;
        if works {
            let part = WORKING.iter().find(|(known, _)| *known == line).map(|(_, part)| *part);
            let part = part.with_context(|| line.clone())?;
            let is_endless = [WATCH, FOLLOWED_LOG].contains(&line.as_str());
            let (code, text) = (transcript.code, format!("{}{}", transcript.stdout, transcript.stderr));
            assert_eq!(code, if is_endless { 130 } else { 0 }, "{line}: {text}");
            assert!(transcript.stdout.contains(part), "{line}: {text}");
        } else {
            run_named_command(operator, &line, &transcript).await?;
        }
        let _ = writeln!(recorded, "$ shepherdctl {line}\n{}", transcript.format(operator, &line)?);
    }
    insta::with_settings!({snapshot_path => "../golden/api", prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!("habits", recorded);
    });
    drop(host);
    listener.stop().await?;
    logs_api.stop().await?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn line_without_an_end_prints_the_table_first() -> TestResult {
    let api = Api::start("api_habit_of_watching").await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "prod"])?;
    let words: Vec<&str> = WATCH.split(' ').collect();
    let mut watch = tokio::process::Command::from(kim.command(&words))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(watch.stdout.take().context("its output")?).lines();
    let mut line = async || -> anyhow::Result<String> {
        timeout(PATIENCE, lines.next_line()).await??.context("it ended")
    };
    for expected in ["NAME      PHASE", "sim-000", "sim-000", "sim-000"] {
        let line = line().await?;
        assert!(line.starts_with(expected), "{expected}: {line}");
    }
    kim.direct(&["hold", "sim-0007", "--reason", "a disk"])?;
    let changed = line().await?;
    assert!(changed.starts_with("sim-0007") && changed.contains("held by "), "{changed}");
    watch.kill().await?;
    Ok(api.stop().await?)
}
