//! Lines of `tests/data/habits/lines.txt` that work as they are typed, on a fleet with the machines, the cluster and the
//! context that they name.

use std::collections::BTreeSet;

use anyhow::Context as _;
use shepherd::model::access::AccessRole;
use shepherd::model::shell_words;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::habits::read_lines;
use crate::harness::aloud::TestResult;

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
];

/// Lines that need a machine with a role server. Tests of logs run them.
const WITH_AGENT: [&str; 2] = ["logs sim-0007", "logs sim-0007 roleserver -f"];

/// Lines that need what does not exist yet: selectors, sorting, watches of lists, `wait`, `explain`.
const NOT_YET: [&str; 8] = [
    "get machines --sort-by=phase",
    "get machines -l label.row=7",
    "get machines --selector phase=Ready",
    "get machines -l 'phase in (Ready,NeedsHuman)'",
    "get machines -w",
    "explain Ready",
    "wait machine sim-0007 --for=phase=Ready --timeout=5m",
    "wait --for=healthy machine sim-0007",
];

/// Two machines, a provider and a cluster.
const FLEET: [&str; 5] = [
    "INSERT INTO machine SELECT ('10000000-0000-4000-8000-00000000000' || n)::UUID, clock_timestamp()
     FROM generate_series(7, 8) n",
    "INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
     SELECT machine_id, 'sim', 'sim-000' || right(machine_id::TEXT, 1), '192.0.2.1', 'Running', clock_timestamp(), FALSE
     FROM machine",
    "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
         phase_since, rules_version, policy_version, version, fence, losses)
     SELECT machine_id, lane, 'sim', 1, 0, FALSE, 'newly provided', '', 'New', clock_timestamp(), 1, 0, 0, 0, 0
     FROM machine, (VALUES ('access'), ('observe')) l (lane)",
    "INSERT INTO provider_state (provider, kind, listed_at, machines) VALUES ('sim', 'simulated', clock_timestamp(), 2)",
    "INSERT INTO cluster VALUES (gen_random_uuid(), 'prod', 3, 2, 'cpus>=4', '[\"web\"]', 'manual', 1,
         clock_timestamp(), 'kim', NULL, NULL, clock_timestamp(), 'ca', '[\"10.0.0.1:7835\"]',
         clock_timestamp(), clock_timestamp(), '[\"no machine is free\"]', FALSE, 3, 2)",
];

#[test]
fn each_line_that_should_work_is_tried_or_has_its_reason() -> TestResult {
    let lines = read_lines()?.into_iter().filter(|(_, works)| *works).map(|(line, _)| line);
    let known = WORKING.iter().map(|(line, _)| *line).chain(WITH_AGENT).chain(NOT_YET).map(str::to_owned);
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
    for (line, expected) in WORKING {
        let words = shell_words::split(line).with_context(|| (*line).to_owned())?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = kim.run_command(&words).await?;
        let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        assert_eq!(output.status.code(), Some(0), "{line}: {stderr}");
        assert!(stdout.contains(expected), "{line}: {stdout}{stderr}");
    }
    Ok(api.stop().await?)
}
