//! Lines of `tests/data/habits/lines.txt` that work as they are typed, on a fleet with the machines, the cluster and the
//! context that they name.

use std::collections::BTreeSet;
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use shepherd::model::access::AccessRole;
use shepherd::model::shell_words;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::habits::read_lines;
use crate::harness::aloud::TestResult;
use crate::harness::program::PATIENCE;

/// Lines that work, each with a part of what standard output has then.
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
];

/// Lines that work when a machine is ready. Each ends by itself.
const WITH_READY_MACHINE: &[(&str, &str)] = &[
    ("wait machine sim-0007 --for=phase=Ready --timeout=5m", "sim/sim-0007 is Ready"),
    ("wait --for=healthy machine sim-0007", "sim/sim-0007 is healthy"),
];

/// The line that has no end. `line_without_an_end_prints_the_table_first` runs it.
const WATCH: &str = "get machines -w";

/// Lines that need a machine with a role server. Tests of logs run them.
const WITH_AGENT: [&str; 2] = ["logs sim-0007", "logs sim-0007 roleserver -f"];

/// Two machines that are new and one that is Ready and has a label, a provider and a cluster.
const FLEET: [&str; 6] = [
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
];

#[test]
fn each_line_that_should_work_is_tried_or_has_its_reason() -> TestResult {
    let lines = read_lines()?.into_iter().filter(|(_, works)| *works).map(|(line, _)| line);
    let known = WORKING.iter().chain(WITH_READY_MACHINE).map(|(line, _)| *line);
    let known = known.chain([WATCH]).chain(WITH_AGENT).map(str::to_owned);
    assert_eq!(lines.collect::<BTreeSet<_>>(), known.collect::<BTreeSet<_>>());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn line_does_what_is_expected() -> TestResult {
    let api = Api::start("api_habits").await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save_context", "prod"])?;
    api.key(AccessRole::Viewer, &[], None).await?;
    run_lines(&kim, WORKING).await?;
    let ready = "UPDATE machine_due SET phase_index = 'Ready' WHERE machine_id IN
                     (SELECT machine_id FROM machine_provided WHERE provider_id = 'sim-0007')";
    sqlx::query(ready).execute(&api.pool).await?;
    run_lines(&kim, WITH_READY_MACHINE).await?;
    Ok(api.stop().await?)
}

async fn run_lines(kim: &Operator<'_>, lines: &[(&str, &str)]) -> anyhow::Result<()> {
    for (line, expected) in lines {
        let words = shell_words::split(line).with_context(|| (*line).to_owned())?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = kim.run_command(&words).await?;
        let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.code() == Some(0), "{line}: {stderr}");
        ensure!(stdout.contains(expected), "{line}: {stdout}{stderr}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn line_without_an_end_prints_the_table_first() -> TestResult {
    let api = Api::start("api_habit_of_watching").await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save_context", "prod"])?;
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
