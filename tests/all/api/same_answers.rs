//! Consistent answers: two shepherds and the database itself return the same. Every command of `shepherdctl` is
//! classified here as an order, a read or another one, so that no reading command is left out.

use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use clap::Command;
use serde_json::{Value, json};
use shepherd::cli::command::grammar;
use shepherd::model::access::AccessRole;
use shepherd::proto::fleet::v1::plan_client::PlanClient;
use shepherd::proto::fleet::v1::{GetPlanRequest, GetPlanResponse};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::ChildStdout;
use tokio::time::{Instant, timeout};
use tonic::Request;

use crate::api::command_line::{Operator, read_stdout};
use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

/// Commands that read, each with the argument lists to run; `M` stands for a machine, `FILE` for a configuration that
/// changes something, `NOTHING` for one that changes nothing.
pub(super) const READS: &[(&str, &[&[&str]])] = &[
    (
        "get machines",
        &[
            &[],
            &["M"],
            &["--phase", "New", "--limit", "1"],
            &["--product", "nothing", "--manufacturer", "nobody"],
        ],
    ),
    ("get sessions", &[&["--limit", "700"], &["--limit", "1"]]),
    ("get work", &[&["--limit", "700"], &["--limit", "501"]]),
    ("get providers", &[&[]]),
    ("get loops", &[&[]]),
    ("get approvals", &[&[]]),
    ("get budgets", &[&[]]),
    ("get brakes", &[&[]]),
    ("cluster get", &[&[]]),
    ("get shepherds", &[&[]]),
    ("get clusters", &[&[], &["ams"]]),
    ("get issues", &[&[]]),
    ("get tokens", &[&[], &["--limit", "1"]]),
    ("get artefacts", &[&[], &["one"]]),
    ("get updates", &[&[], &["u1"]]),
    ("get policy", &[&[]]),
    ("get audit", &[&[], &["--limit", "1"], &["--machine", "M"]]),
    ("describe cluster", &[&["ams"]]),
    // No object of these kinds has a fixed name there.
    ("describe shepherd", &[]),
    ("describe session", &[]),
    ("describe work", &[]),
    ("describe provider", &[]),
    ("describe approval", &[]),
    ("describe audit", &[]),
    ("describe loop", &[&["recoverer"]]),
    ("describe budget", &[&["reboot"]]),
    ("describe brake", &[&["recovery"]]),
    ("describe issue", &[&["work-fails"]]),
    ("describe token", &[&["admin's"]]),
    ("describe artefact", &[&["one"]]),
    ("describe update", &[&["u1"]]),
    ("describe policy", &[&[]]),
    ("cluster describe", &[&["ams"]]),
    (
        "cluster plan",
        &[
            &["ams"],
            &["ams", "--control-plane", "1", "--workers", "0", "--remove-role", "web"],
            &["ams", "--delete"],
            &["fra", "--control-plane", "3", "--workers", "1", "--selector", "cpus>=4", "--add-role", "web"],
        ],
    ),
    ("cluster snapshots", &[&["ams"]]),
    ("cluster credentials get", &[&["ams"]]),
    ("describe machine", &[&["M"]]),
    ("why", &[&["M"]]),
    ("timeline", &[&["M", "--limit", "2000"], &["M", "--limit", "501"], &["M", "--all", "--limit", "501"]]),
    (
        "plan",
        &[
            &[],
            &["--all"],
            &["--all", "--process", "Update", "--limit", "1"],
            &["--machine", "M"],
            &["--machine", "M", "--process", "Recovery", "--horizon", "1m"],
            &["--diff", "FILE", "--limit", "2"],
            &["--diff", "NOTHING"],
        ],
    ),
    ("issues", &[&[]]),
    ("audit", &[&[], &["--limit", "1"], &["--rpc", "create", "--since", "2h"]]),
    ("top", &[&["--once"]]),
];
/// Commands that query only the database, that query nothing, that never end or wait, that are about the caller or the
/// server, or that collect the output of other commands.
const OTHERS: &[&str] = &[
    "declare restored",
    "policy disable-two-person-rule",
    "tokens bootstrap",
    "get contexts",
    "describe context",
    "contexts use",
    "contexts delete",
    "explain",
    "whoami",
    "version",
    "options",
    "completions",
    "manual",
    "watch",
    "wait machines",
    "wait clusters",
    "wait updates",
    "debug bundle",
];

/// Every command without subcommands, and whether it is an order.
pub(super) fn leaves(command: &Command, path: &str, found: &mut Vec<(String, bool)>) {
    if command.get_subcommands().next().is_none() {
        let orders = command.get_arguments().any(|argument| argument.get_id() == "idempotency_key");
        found.push((path.to_owned(), orders));
    }
    for below in command.get_subcommands() {
        leaves(below, format!("{path} {}", below.get_name()).trim(), found);
    }
}

#[test]
fn every_command_is_known_for_what_it_does() {
    let mut found = Vec::new();
    leaves(&grammar(), "", &mut found);
    assert!(found.len() > 15, "{found:?}");
    for (path, orders) in &found {
        let reads = READS.iter().any(|(known, _)| known == path);
        let other = OTHERS.contains(&path.as_str());
        let kinds = [*orders, reads, other].into_iter().filter(|is| *is).count();
        assert_eq!(kinds, 1, "`{path}` is to be an order, or to stand in one of the lists here");
    }
    for path in READS.iter().map(|(path, _)| path).chain(OTHERS) {
        assert!(found.iter().any(|(known, _)| known == path), "there is no `{path}`");
    }
}

/// A response without the parts that depend on the time of the request.
fn steady(text: &str) -> anyhow::Result<String> {
    // A printed command reaches the same fleet again.
    let text = &text
        .replace("shepherdctl --direct --bmdb-dialect postgres ", "shepherdctl ")
        .replace("shepherdctl --direct --bmdb-dialect cockroachdb ", "shepherdctl ");
    let Ok(mut answer) = serde_json::from_str::<Value>(text) else {
        // How long ago something happened, and when.
        let masked: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        let mut words: Vec<&str> = masked.split_whitespace().collect();
        words.dedup();
        return Ok(words.join(" "));
    };
    let fields = answer.as_object_mut().context("an object")?;
    for field in ["at", "readAt", "until", "notes"] {
        fields.remove(field);
    }
    // The responses in the document of `top`.
    for response in ["statistics", "loops", "work", "providers"] {
        if let Some(response) = fields.get_mut(response).and_then(Value::as_object_mut) {
            response.remove("readAt");
        }
    }
    if let Some(head) = fields.get_mut("head").and_then(Value::as_object_mut) {
        head.retain(|field, _| !["at", "until"].contains(&field.as_str()));
    }
    for list in ["rows", "differences"] {
        for row in fields.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let row = row.as_object_mut().context("a row")?;
            row.retain(|field, _| !["startsAt", "before", "after"].contains(&field.as_str()));
            if let Some(routine) = row.get_mut("routine").and_then(Value::as_object_mut) {
                routine.remove("lastAt");
            }
        }
    }
    Ok(answer.to_string())
}

/// A fleet with enough to list: more sessions, work and events than a page has, many of them with the same time.
pub(super) async fn populate(api: &Api) -> anyhow::Result<String> {
    let machine = provided(&api.pool).await?;
    provided(&api.pool).await?;
    for statement in [
        "INSERT INTO loop_pause VALUES ('provisioner', 'rack', 'no more for now', 'kim', clock_timestamp(), NULL)",
        "INSERT INTO session (session_id, process_id, component, runtime_info, interval_ms, started_at, deadline)
         SELECT gen_random_uuid(), gen_random_uuid(), 'updater', '{\"host\": \"rack1\", \"pid\": 7}', 1000,
                clock_timestamp(), clock_timestamp() + INTERVAL '1 d' FROM generate_series(1, 600)",
        "INSERT INTO work SELECT gen_random_uuid(), 'observe', gen_random_uuid(), 'Update', n,
                clock_timestamp() - n % 3 * INTERVAL '1 h' FROM generate_series(1, 600) n",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    for statement in [
        "INSERT INTO history (machine_id, at, event, detail)
         SELECT $1, TIMESTAMPTZ '2026-01-01' + n % 2 * INTERVAL '1 h', 'tested', n::TEXT
         FROM generate_series(1, 1300) n",
        "INSERT INTO work_backoff VALUES ($1, 'AgentStart', 3, 1000, now() + INTERVAL '1 h', 'no route to host')",
    ] {
        sqlx::query(statement).bind(machine.0).execute(&api.pool).await?;
    }
    for statement in [
        "INSERT INTO cluster VALUES (gen_random_uuid(), 'ams', 3, 2, 'cpus>=4', '[\"web\"]', 'manual', 1,
             clock_timestamp(), 'kim', NULL, NULL, clock_timestamp(), 'ca', '[\"10.0.0.1:7835\"]',
             clock_timestamp(), clock_timestamp(), '[\"no machine is free\"]', FALSE, 3, 2)",
        "INSERT INTO machine_cluster
         SELECT $1, cluster_id, 'worker', clock_timestamp(), 'it is being retired', NULL, 'it learns', 'node-7', 'up',
                '[\"web\"]', 'silent', FALSE, clock_timestamp(),
                '[{\"role\": \"web\", \"service\": \"server\", \"state\": \"backing off\", \"since\": \"2026-01-01T00:00:00Z\",
                   \"restarts\": 7, \"message\": \"it ended with 1\"}]' FROM cluster",
        "INSERT INTO artefact VALUES (decode(repeat('ab', 32), 'hex'), 600000, gen_random_uuid(), clock_timestamp(), 'one',
             clock_timestamp(), 'kim'), (decode(repeat('cd', 32), 'hex'), 7, gen_random_uuid(), clock_timestamp(), NULL, NULL, NULL)",
        "INSERT INTO roll_out VALUES ('u1', decode(repeat('ab', 32), 'hex'), 'one', 'cpus>=4', 1, 60, clock_timestamp(),
             'kim', 'a try', 'm1: no', NULL, NULL)",
        "INSERT INTO roll_out_machine VALUES ('u1', $1, 'failed', 1, 'no', clock_timestamp(), TRUE)",
        "INSERT INTO cluster_declaration SELECT cluster_id, 'web', 'x', decode(repeat('ab', 32), 'hex'), '[\"server\"]',
                clock_timestamp(), 'kim', NULL FROM cluster",
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp() - INTERVAL '1 hour', 'members', 70, 1, 12345, 5, 3,
                '[\"node-7\"]', decode(repeat('cd', 32), 'hex') FROM cluster",
        "INSERT INTO cluster_credential
         SELECT gen_random_uuid(), cluster_id, decode(repeat('ef', 32), 'hex'), 'kim', 3600, clock_timestamp(), 'lee', 'x',
                repeat('1', 32), clock_timestamp() + INTERVAL '1 hour', NULL, clock_timestamp(), 'lee', NULL FROM cluster",
        "INSERT INTO cluster_kubernetes SELECT cluster_id, decode(repeat('ab', 32), 'hex'), '1.30.1', '10.96.0.0/16',
                '10.128.0.0/12', 24, 'cluster.local', '{\"dns\": \"abc\"}', '{\"driver\": \"d\", \"class\": \"c\"}',
                clock_timestamp(), 'kim', 'lee', '[\"etcd\"]',
                '{\"told\": true, \"assigned\": {\"node-7\": \"x\"}, \"api_servers\": [\"10.0.0.1:6443\"], \"rotations\": [{
                   \"what\": \"clients\", \"stage\": \"signs\", \"since\": \"2026-01-01T00:00:00Z\", \"waits_for\": [\"node-7\"],
                   \"until\": \"2026-01-02T00:00:00Z\"}]}' FROM cluster",
        "UPDATE machine_cluster SET kubernetes =
                '{\"bundle\": \"x\", \"version\": \"1.30.1\", \"waits\": \"it drains\", \"reconciles\": true, \"components\": [{
                   \"name\": \"kubelet\", \"state\": \"starting\", \"since\": \"2026-01-01T00:00:00Z\", \"restarts\": 3,
                   \"message\": \"no answer\"}], \"clashes\": [{\"kind\": \"Role\", \"name\": \"r\", \"message\": \"m\"}]}'",
        "INSERT INTO cluster_upgrade SELECT 'up1', cluster_id, decode(repeat('ab', 32), 'hex'), '1.30.1',
                decode(repeat('cd', 32), 'hex'), '1.31.0', 'u1', 'one', FALSE, FALSE, 2, 900, clock_timestamp(), 'kim', 'a try',
                'm1: no', NULL, NULL, '{\"node-7\": {\"at\": \"2026-01-01T00:00:00Z\", \"through\": false}}' FROM cluster",
    ] {
        let query = sqlx::query(statement);
        let query = if statement.contains("$1") { query.bind(machine.0) } else { query };
        query.execute(&api.pool).await?;
    }
    let machine = machine.to_string();
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let hold = json!({ "machine": machine, "expiresAfter": "2h", "order": order("a new disk", "k") });
    api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    Ok(machine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_reading_command_prints_the_same_for_every_source() -> TestResult {
    let api = Api::start("api_same_answers").await?;
    let machine = populate(&api).await?;
    let (other, stop) = api.another().await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let file = kim.home.path().join("new.toml");
    std::fs::write(&file, "ssh_user = \"root\"\nupdate_interval_stable = \"10m\"\n")?;
    let nothing = kim.home.path().join("nothing.toml");
    std::fs::write(&nothing, "ssh_user = \"root\"\n[[provider]]\nurl = \"https://kim:secret@h\"\n")?;
    let (file, nothing) = (file.to_str().context("text")?, nothing.to_str().context("text")?);
    let servers = [api.server.local_addr, other.local_addr];
    for (path, questions) in READS {
        for (question, output) in
            questions.iter().flat_map(|question| [(question, "json"), (question, "table")])
        {
            let words = question.iter().map(|word| match *word {
                "M" => machine.as_str(),
                "FILE" => file,
                "NOTHING" => nothing,
                other => other,
            });
            let arguments: Vec<&str> = path.split(' ').chain(words).chain(["-o", output]).collect();
            same(&kim, &arguments, &servers).await?;
        }
    }
    // Equal answers prove nothing if there is nothing to list.
    let plan = kim.json(&["plan"])?;
    assert!(plan["rows"].as_array().is_some_and(|rows| !rows.is_empty()), "{plan}");
    let plan = kim.json(&["plan", "--diff", file])?;
    assert!(plan["differences"].as_array().is_some_and(|found| !found.is_empty()), "{plan}");
    let issues = kim.json(&["issues"])?;
    assert!(issues["issues"].as_array().is_some_and(|issues| !issues.is_empty()), "{issues}");
    let count = |of: Value, list: &str| of[list].as_array().map_or(0, Vec::len);
    assert!(count(kim.json(&["timeline", &machine, "--limit", "2000"])?, "events") > 1300);
    assert!(count(kim.json(&["get", "work", "--limit", "700"])?, "work") == 600);
    assert!(count(kim.json(&["get", "sessions", "--limit", "700"])?, "sessions") > 600);

    kim.reach(&[other.local_addr])?;
    stop.cancel();
    other.wait_until_stopped().await;
    let refused = kim.run_command(&["hold", &machine, "--reason", "nobody is there"]).await?;
    let text = String::from_utf8(refused.stderr)?;
    assert_eq!(refused.status.code(), Some(5), "{text}");
    assert!(text.contains("no server of this context answers") && text.contains("--direct"), "{text}");
    Ok(api.stop().await?)
}

/// Queries both servers and the database, and again when time has passed between them.
async fn same(kim: &Operator<'_>, arguments: &[&str], servers: &[SocketAddr; 2]) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut answers = vec![steady(&kim.direct(arguments)?)?];
        for server in servers {
            kim.reach(&[*server])?;
            answers.push(steady(&read_stdout(&kim.run_command(arguments).await?)?)?);
        }
        if answers.iter().all(|answer| *answer == answers[0]) {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{arguments:?} is answered differently:\n{}", answers.join("\n"));
    }
}

async fn plan(api: &Api, key: &Key, request: GetPlanRequest) -> anyhow::Result<Vec<GetPlanResponse>> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {}", key.token).parse()?);
    let mut pieces = PlanClient::new(api.channel(None).await?).get(request).await?.into_inner();
    let mut found = Vec::new();
    while let Some(piece) = timeout(PATIENCE, pieces.message()).await?? {
        found.push(piece);
    }
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_is_for_those_it_concerns_and_its_filters_are_read_as_in_direct_mode() -> TestResult {
    let api = Api::start("api_plan").await?;
    let machine = provided(&api.pool).await?.to_string();
    let (ours, theirs) = (
        api.key(AccessRole::Viewer, &["rack"], None).await?,
        api.key(AccessRole::Viewer, &["other"], None).await?,
    );
    let total = |pieces: &[GetPlanResponse]| pieces[0].head.as_ref().map(|head| head.total);
    let request = GetPlanRequest { horizon: "2h".to_owned(), limit: 1, ..Default::default() };
    let found = plan(&api, &ours, request.clone()).await?;
    assert!(total(&found) > Some(1) && found.iter().map(|piece| piece.rows.len()).sum::<usize>() == 1);
    assert_eq!(total(&plan(&api, &theirs, request).await?), Some(0), "nothing of other providers' machines");
    let refused = api.call(Some(&ours.token), "Issues/List", json!({})).await?;
    assert_eq!(refused.code, 403, "what is wrong with the fleet is the fleet's: {refused:?}");
    for (body, code, part) in [
        (json!({ "machine": machine }), 404, "no machine"),
        (json!({ "process": "Explode" }), 400, "Explode"),
        (json!({ "horizon": "soon" }), 400, "is not a duration"),
        (json!({ "limit": -1 }), 400, "limit is -1"),
        (
            json!({ "configuration": "heartbeat_interval = \"0s\"" }),
            400,
            "the configuration file: --heartbeat_interval 0s leaves no time at all",
        ),
        (json!({ "configuration": "z".repeat(20_000) }), 400, "longer than 16384 bytes"),
    ] {
        let refused = api.call(Some(&theirs.token), "Plan/Get", body).await?;
        assert_eq!(refused.code, code, "{refused:?}");
        assert!(refused.message().contains(part), "{refused:?}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_with_a_typed_key_is_carried_out_once_and_answered_again() -> TestResult {
    let api = Api::start("api_typed_keys").await?;
    let (first, second) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let hold = |machine| ["hold", machine, "--reason", "a disk", "--idempotency-key", "k1"];
    for (machine, through_api) in [(&first, true), (&second, false)] {
        let give = |arguments: &[&str]| if through_api { kim.ask(arguments) } else { kim.direct(arguments) };
        let held = give(&hold(machine))?;
        give(&["release", machine, "--idempotency-key", "k2"])?;
        assert_eq!(give(&hold(machine))?, held, "it is answered as it was");
        let holds = api.count("SELECT count(*) FROM machine_hold").await?;
        assert_eq!(holds, 0, "and not held again");
        let other = give(&["hold", machine, "--reason", "another", "--idempotency-key", "k1"]);
        let output = other.err().context("another order with that key")?.to_string();
        assert!(output.contains("k1"), "{output}");
    }
    assert_eq!(
        api.count("SELECT count(*) FROM audit WHERE rpc LIKE '%/Hold' AND outcome = 'changed'").await?,
        2
    );

    let create =
        |key| ["tokens", "create", "lee", "--role", "viewer", "--reason", "r", "--idempotency-key", key];
    for (key, through_api) in [("k3", true), ("k4", false)] {
        let give = |arguments: &[&str]| if through_api { kim.ask(arguments) } else { kim.direct(arguments) };
        give(&create(key))?;
        let again = give(&create(key)).err().context("a token is returned once")?.to_string();
        assert!(again.contains("created the token") && again.contains("tokens revoke"), "{again}");
    }
    let good = "SELECT count(*) FROM access_credential WHERE name = 'lee' AND revoked_at IS NULL";
    assert_eq!(api.count(good).await?, 2, "one for each key");
    Ok(api.stop().await?)
}

/// The next line that has all of `words`.
async fn line(lines: &mut Lines<BufReader<ChildStdout>>, words: &[&str]) -> anyhow::Result<String> {
    loop {
        let line = timeout(PATIENCE, lines.next_line()).await.context("the watch is silent")??;
        let line = line.context("the watch ended")?;
        if words.iter().all(|word| line.contains(word)) {
            return Ok(line);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_of_the_command_line_survives_the_shepherd_that_served_it() -> TestResult {
    let api = Api::start("api_watching").await?;
    let (machine, still) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (other, stop) = api.another().await?;
    kim.reach(&[other.local_addr, api.server.local_addr])?;
    let mut child =
        tokio::process::Command::from(kim.command(&["watch", "--provider", "rack", "-o", "json"]))
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("its answer")?).lines();
    let mut errors = BufReader::new(child.stderr.take().context("its errors")?).lines();
    for _ in 0..2 {
        line(&mut lines, &["{\"machine\":{"]).await?;
    }
    stop.cancel();
    other.wait_until_stopped().await;
    let text = timeout(PATIENCE, errors.next_line()).await??.context("it says so")?;
    assert!(text.contains(&format!("resuming at {}", api.server.local_addr)), "{text}");
    kim.direct(&["hold", &machine, "--reason", "while it moved"])?;
    let news = line(&mut lines, &["{\"machine\":{"]).await?;
    assert!(news.contains(&machine) && news.contains("held"), "and not {still}, which is as it was: {news}");
    child.kill().await?;
    Ok(api.stop().await?)
}
