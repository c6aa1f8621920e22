//! `get KIND --watch`: the list, then a line for each change, also after the shepherd that served it has stopped.

use std::process::Stdio;

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::time::timeout;

use crate::api::command_line::Operator;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

/// A watch that ends with the test.
struct ListWatch {
    lines: Lines<BufReader<ChildStdout>>,
    errors: Lines<BufReader<ChildStderr>>,
    _child: Child,
}

impl ListWatch {
    fn start(kim: &Operator<'_>, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = tokio::process::Command::from(kim.command(arguments))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        let errors = BufReader::new(child.stderr.take().context("its errors")?).lines();
        Ok(Self { lines, errors, _child: child })
    }

    async fn line(&mut self) -> anyhow::Result<String> {
        timeout(PATIENCE, self.lines.next_line()).await.context("it is silent")??.context("it has ended")
    }

    async fn json(&mut self) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.line().await?)?)
    }

    async fn error(&mut self) -> anyhow::Result<String> {
        timeout(PATIENCE, self.errors.next_line()).await.context("it is silent")??.context("it has ended")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_are_a_table_and_then_a_line_for_each_change() -> TestResult {
    let api = Api::start("api_list_watch").await?;
    let (first, second) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let mut table = ListWatch::start(&kim, &["get", "machines", "-w"])?;
    let header = table.line().await?;
    assert!(header.starts_with("NAME ") && header.contains("WHY"), "{header}");
    for _ in 0..2 {
        let row = table.line().await?;
        assert!(row.contains("newly provided"), "{row}");
    }
    let mut named = ListWatch::start(&kim, &["get", "machine", &second, "-w", "-o", "json"])?;
    assert_eq!(named.json().await?["machine"]["name"]["machine"], second);
    let mut held = ListWatch::start(&kim, &["get", "machines", "--fact", "hold", "-w", "--no-headers"])?;
    assert_eq!(held.error().await?, "no machines");
    let mut removals = ListWatch::start(&kim, &["get", "machines", "--fact", "hold", "-w", "-o", "json"])?;

    for (machine, key) in [(&first, "1"), (&second, "2")] {
        let hold = json!({ "machine": machine, "order": order("a disk", key) });
        let admin = api.key(AccessRole::Admin, &[], None).await?;
        api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    }
    let mut rows = [table.line().await?, table.line().await?];
    rows.sort_by_key(|row| !row.starts_with(&first));
    for (row, machine) in rows.iter().zip([&first, &second]) {
        assert!(row.starts_with(machine) && row.contains("held by "), "{row}");
    }
    let changed = named.json().await?;
    assert_eq!(changed["machine"]["name"]["machine"], second, "and not the first");
    assert!(changed["machine"]["phaseSince"].is_string() && changed["resumeToken"].is_string(), "{changed}");
    for _ in 0..2 {
        assert!(held.line().await?.contains("held by "));
        assert!(removals.json().await?["machine"].is_object());
    }

    kim.direct(&["release", &first])?;
    assert!(table.line().await?.starts_with(&first));
    let gone = held.line().await?;
    assert!(gone.starts_with(&first) && gone.ends_with("gone, or no longer selected"), "{gone}");
    let gone = removals.json().await?;
    assert_eq!((&gone["removedMachine"], &gone["bookmark"]), (&json!(first), &Value::Null));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_kinds_are_listed_again_and_what_changed_is_printed() -> TestResult {
    let api = Api::start("api_list_watch_kinds").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let insert = "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version,
                      created_at, created_by, wait_reasons, settled)
                  SELECT md5(name)::UUID, name, 1, 0, '', '[]'::JSONB, 'automatic', 1, clock_timestamp(), 'kim',
                         '[]'::JSONB, FALSE FROM (VALUES ('ams'), ('fra')) c (name)";
    sqlx::query(insert).execute(&api.pool).await?;
    let (other, stop) = api.another().await?;
    kim.reach(&[other.local_addr, api.server.local_addr])?;
    let mut table = ListWatch::start(&kim, &["get", "clusters", "-w"])?;
    let header = table.line().await?;
    assert!(header.starts_with("NAME  STAGE"), "{header}");
    for name in ["ams", "fra"] {
        let row = table.line().await?;
        assert!(row.starts_with(name) && row.contains("waiting for machines"), "{row}");
    }
    let mut documents = ListWatch::start(&kim, &["get", "cluster", "fra", "--watch", "-o", "json"])?;
    assert_eq!(documents.json().await?["cluster"]["name"], "fra");

    stop.cancel();
    other.wait_until_stopped().await;
    let sentence = format!("continuing at {}", api.server.local_addr);
    for moved in [&mut table, &mut documents] {
        let moved = moved.error().await?;
        assert!(moved.contains(&sentence), "{moved}");
    }
    sqlx::query("UPDATE cluster SET workers = 2 WHERE name = 'fra'").execute(&api.pool).await?;
    let row = table.line().await?;
    assert!(row.starts_with("fra "), "{row}");
    assert_eq!(documents.json().await?["cluster"]["workers"], 2);
    sqlx::query("DELETE FROM cluster WHERE name = 'fra'").execute(&api.pool).await?;
    let row = table.line().await?;
    assert!(row.starts_with("fra ") && row.ends_with("gone, or no longer selected"), "{row}");
    assert_eq!(documents.json().await?, json!({ "removedCluster": "fra" }));

    for (line, expected) in [
        (&["get", "machines", "-w", "--limit", "3"][..], 2),
        (&["get", "machines", "-w", "-o", "custom-columns=P:.phase"], 2),
        (&["get", "clusters", "-w", "-o", "custom-columns=N:.name"], 2),
        (&["get", "policy", "-w"], 2),
        (&["get", "machine", "nobody", "-w"], 3),
        (&["get", "cluster", "nowhere", "-w"], 3),
    ] {
        let ended = kim.run_command(line).await?;
        assert_eq!(ended.status.code(), Some(expected), "{line:?}: {ended:?}");
    }
    Ok(api.stop().await?)
}

/// 250 records of `Hold`, the newest of which is ten minutes old.
const HOLDS: &str = "
    INSERT INTO audit (audit_id, at, actor, rpc, target, reason, request, dry_run, outcome, message)
    SELECT gen_random_uuid(), clock_timestamp() - n * INTERVAL '10 minutes', 'ann@desk',
           'shepherd.fleet.v1.Machines/Hold', 'm', 'r' || n, decode('00', 'hex'), FALSE, 'changed', ''
    FROM generate_series(1, 250) n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_of_the_audit_reads_what_is_newer_alone() -> TestResult {
    let api = Api::start("api_list_watch_audit").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    sqlx::query(HOLDS).execute(&api.pool).await?;
    let mut watch = ListWatch::start(&kim, &["get", "audit", "--rpc", "hold", "-w", "--no-headers"])?;
    for number in 1..=250 {
        let row = watch.line().await?;
        assert!(row.contains(&format!(" r{number} ")), "newest first: {row}");
    }
    // A list of all would show that one record has changed and that another one is gone.
    sqlx::query("UPDATE audit SET message = 'changed' WHERE reason = 'r9'").execute(&api.pool).await?;
    sqlx::query("DELETE FROM audit WHERE reason = 'r10'").execute(&api.pool).await?;
    for reason in ["first-disk", "second-disk", "third-disk"] {
        kim.direct(&["hold", &machine, "--reason", reason])?;
        let row = watch.line().await?;
        assert!(row.contains(reason), "{row}");
    }
    Ok(api.stop().await?)
}

/// What a command prints while it runs has the colours of what others return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_a_watch_and_objects_that_were_waited_for_are_coloured_by_severity() -> TestResult {
    let api = Api::start("api_watch_colors").await?;
    let machine = provided(&api.pool).await?;
    sqlx::query("UPDATE machine_due SET phase_index = 'NeedsHuman' WHERE lane = 'access'")
        .execute(&api.pool)
        .await?;
    sqlx::query(
        "INSERT INTO work_backoff VALUES ($1, 'AgentStart', 3, 1000, now() + INTERVAL '1 h', 'no route to host')",
    )
    .bind(machine.0)
    .execute(&api.pool)
    .await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (red, yellow) = ("\u{1b}[31mNeedsHuman\u{1b}[0m", "\u{1b}[33mwarning\u{1b}[0m");
    for (choice, is_colored) in [("always", true), ("auto", false), ("never", false)] {
        for (command, colored) in [
            (&["watch"][..], red),
            (&["get", "machines", "-w"], red),
            (&["get", "issues", "-w"], yellow),
            (&["wait", "machines", "--for", "phase=NeedsHuman", "--timeout", "0"], red),
        ] {
            let mut watch = ListWatch::start(&kim, &[command, &["--color", choice]].concat())?;
            let word = &colored[5..colored.len() - 4];
            let mut line = watch.line().await?;
            while !line.contains(word) {
                line = watch.line().await?;
            }
            assert_eq!(line.contains(colored), is_colored, "{command:?} --color {choice}: {line}");
            assert_eq!(line.contains('\u{1b}'), is_colored, "{command:?} --color {choice}: {line}");
        }
    }
    let mut json = ListWatch::start(&kim, &["watch", "-o", "json", "--color", "always"])?;
    let line = json.line().await?;
    assert!(line.contains("NeedsHuman") && !line.contains('\u{1b}'), "{line}");
    Ok(api.stop().await?)
}
