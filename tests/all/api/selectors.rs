//! Selectors: the same machines in lists, watches, `wait`, orders and updates, and one sentence for a wrong one.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::shell_words;
use shepherd::proto::fleet::v1::WatchMachinesRequest;
use shepherd::proto::fleet::v1::watch_machines_response::Event;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::time::timeout;

use crate::api::command_line::Operator;
use crate::api::watch::{next, watch};
use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::program::PATIENCE;
use crate::harness::source;

const CORPUS: &str = "tests/data/selectors/corpus.txt";

/// The fleet that the corpus describes, and an artefact.
const FLEET: [&str; 10] = [
    "INSERT INTO machine SELECT ('10000000-0000-4000-8000-00000000000' || n)::UUID, clock_timestamp()
     FROM generate_series(1, 9) n",
    "INSERT INTO machine_provided (machine_id, provider, provider_id, location, address, status, provided_at, unchanged)
     SELECT ('10000000-0000-4000-8000-00000000000' || n)::UUID, provider, id, location, '192.0.2.1', 'Running',
            clock_timestamp(), FALSE
     FROM (VALUES (1, 'rack', 'm1', 'ams-1/r1'), (2, 'rack', 'm2', 'ams-1/r10'), (3, 'rack', 'm3', 'ams-2'),
                  (4, 'rack', 'm4', 'ams-2'), (5, 'lab', 'm5', 'fra'), (6, 'lab', 'm6', 'fra'), (7, 'lab', 'm7', NULL),
                  (8, 'lab', 'm8', 'Hall A, row 7'), (9, 'rack', 'u*9', 'odd*')) v (n, provider, id, location)",
    "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
         phase_since, rules_version, policy_version, version, fence, losses)
     SELECT machine_id, lane, provider, 1, 0, FALSE, 'as it is', '',
            CASE provider_id WHEN 'm5' THEN 'Quarantined' WHEN 'm7' THEN 'New' WHEN 'm8' THEN 'Installed'
                             ELSE 'Ready' END,
            clock_timestamp(), 1, 0, 0, 0, 0
     FROM machine_provided, (VALUES ('access'), ('observe')) l (lane)",
    "INSERT INTO machine_hardware_report (machine_id, received_at, incarnation, report, manufacturer, product,
         memory_bytes, cpu_threads)
     SELECT machine_id, clock_timestamp(), 'i', ''::BYTEA, v.manufacturer, v.product, v.gib::INT8 << 30, v.cpus
     FROM machine_provided p
     JOIN (VALUES ('m1', 'Dell Inc.', 'R640', 64, 32), ('m2', 'Dell Inc.', 'R650', 128, 64),
                  ('m3', 'Acme, Inc.', 'X1 (2)', 64, 16), ('m4', 'Dell Inc.', 'R640', 64, 32),
                  ('m5', 'Dell Inc.', 'R640', 32, 8), ('m6', 'Dell Inc.', 'R640', 256, 64),
                  ('m8', 'Default string', 'Unknown', 64, 32), ('u*9', 'Dell Inc.', 'R640', 64, 32))
          v (id, manufacturer, product, gib, cpus) ON v.id = p.provider_id",
    r#"INSERT INTO machine_labels SELECT machine_id, v.labels::JSONB
       FROM machine_provided p
       JOIN (VALUES ('m1', '{"row": "1"}'), ('m2', '{"row": "10"}'), ('m3', '{"row": "1", "spare": ""}'),
                    ('m4', '{"row": "2"}'), ('m6', '{"row": "7"}'), ('m8', '{"row": "7"}'))
            v (id, labels) ON v.id = p.provider_id"#,
    "INSERT INTO machine_hold SELECT machine_id, 'everything', 'a disk', 'lee', clock_timestamp(), NULL
     FROM machine_provided WHERE provider_id = 'm4'",
    "INSERT INTO machine_quarantine SELECT machine_id, clock_timestamp(), 'by order of lee'
     FROM machine_provided WHERE provider_id = 'm5'",
    "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
         created_by, wait_reasons, settled)
     VALUES (gen_random_uuid(), 'prod', 1, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'kim', '[]', FALSE)",
    "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
     SELECT machine_id, cluster_id, 'control-plane', clock_timestamp()
     FROM machine_provided, cluster WHERE provider_id = 'm6'",
    "INSERT INTO artefact VALUES (decode(repeat('ab', 32), 'hex'), 7, gen_random_uuid(), clock_timestamp(), 'one',
         clock_timestamp(), 'kim')",
];

/// All of its machines.
const ALL: [&str; 9] =
    ["rack/m1", "rack/m2", "rack/m3", "rack/m4", "lab/m5", "lab/m6", "lab/m7", "lab/m8", "rack/u*9"];

/// Those that are Ready or Installed, in no cluster, not held and not quarantined: a cluster may take them.
const FREE: [&str; 5] = ["m1", "m2", "m3", "m8", "u*9"];

/// An API with this fleet.
async fn start(name: &str) -> anyhow::Result<Api> {
    let api = Api::start_with(name, |settings| settings.max_watches = 1000).await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    api.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = true).await?;
    Ok(api)
}

/// The selectors of the corpus, each with the names of the machines that it selects.
fn read_corpus() -> anyhow::Result<Vec<(String, BTreeSet<String>)>> {
    let text = source::read(Path::new(CORPUS))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let corpus = lines.map(|line| {
        let (typed, names) = line.split_once("  # ").with_context(|| line.to_owned())?;
        let words = shell_words::split(typed.trim()).with_context(|| line.to_owned())?;
        ensure!(words.len() == 1, "{line} is not one word of a shell");
        let names = names.split_whitespace().filter(|name| *name != "none").map(str::to_owned);
        Ok((words.concat(), names.collect()))
    });
    corpus.collect()
}

/// The names of the machines at `key` of an answer.
fn read_names(answer: &Value, key: &str) -> anyhow::Result<BTreeSet<String>> {
    let machines = answer[key].as_array().with_context(|| format!("no {key} in {answer}"))?.iter();
    machines.map(|one| Ok(one["name"]["providerId"].as_str().context("a name")?.to_owned())).collect()
}

async fn list_machines(api: &Api, key: &Key, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let (mut found, mut token) = (BTreeSet::new(), String::new());
    loop {
        let body = json!({ "selector": selector, "pageSize": 2, "pageToken": token });
        let page = api.call(Some(&key.token), "Machines/List", body).await?.ok()?;
        found.extend(read_names(&page, "machines")?);
        page["nextPageToken"].as_str().context("a token")?.clone_into(&mut token);
        if token.is_empty() {
            return Ok(found);
        }
    }
}

async fn watch_machines(api: &Api, key: &Key, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let request = WatchMachinesRequest { selector: selector.to_owned(), resume_token: String::new() };
    let (mut stream, mut found) = (watch(api, key, request).await?, BTreeSet::new());
    loop {
        match next(&mut stream).await??.event.context("an event")? {
            Event::Machine(machine) => {
                let name = machine.name.context("a name")?;
                found.insert(name.provider_id.context("a name")?);
            }
            Event::Bookmark(_) => return Ok(found),
            Event::RemovedMachine(machine) => anyhow::bail!("{machine} is removed"),
        }
    }
}

/// The machines of the first table of `get machines -w`. That is written at once, so it is whole as soon as a line of it can
/// be read, and the command need not run any longer.
async fn watch_by_command(kim: &Operator<'_>, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let line = ["get", "machines", "-l", selector, "-w", "--no-headers"];
    let mut child = tokio::process::Command::from(kim.command(&line))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().context("its output")?);
    let mut errors = BufReader::new(child.stderr.take().context("its errors")?).lines();
    let mut text = String::new();
    let note = tokio::select! {
        read = timeout(PATIENCE, output.read_line(&mut text)) => {
            read.context("it is silent")??;
            None
        }
        note = timeout(PATIENCE, errors.next_line()) => note.context("it is silent")??,
    };
    child.kill().await?;
    output.read_to_string(&mut text).await?;
    ensure!(
        note.is_none() || (note.as_deref() == Some("no machines") && text.is_empty()),
        "{note:?}: {text}"
    );
    let names = text.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.map(|name| strip_provider(name).to_owned()).collect())
}

/// The machines that `wait` waits for: those that it reports because they have met the condition, and those of which it
/// prints why they have not.
async fn wait_by_command(kim: &Operator<'_>, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let line = ["wait", "machines", "-l", selector, "--for", "phase=Quarantined", "--timeout", "0"];
    let output = kim.run_command(&line).await?;
    let (code, text) = (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat())?);
    let is_reported = |name: &&str| {
        // The UUIDs of these machines begin so.
        let beginnings = [format!("{name} is Quarantined"), format!("{name}  10000000-")];
        text.lines().any(|line| beginnings.iter().any(|beginning| line.starts_with(beginning.as_str())))
    };
    let found: Vec<&str> = ALL.into_iter().filter(is_reported).collect();
    let expected_code = match found.as_slice() {
        [] => 3,
        ["lab/m5"] => 0,
        _ => 1,
    };
    ensure!(code == Some(expected_code), "{code:?}: {text}");
    Ok(found.into_iter().map(|name| strip_provider(name).to_owned()).collect())
}

/// The name of a machine without its provider.
fn strip_provider(name: &str) -> &str {
    name.split_once('/').map_or(name, |(_, name)| name)
}

/// The machines of a dry run of an order.
async fn preview_order(api: &Api, key: &Key, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let dry_run = json!({ "reason": "what if", "dryRun": true });
    let body = json!({ "selector": selector, "retry": {}, "order": dry_run });
    read_names(&api.call(Some(&key.token), "BulkOrders/Submit", body).await?.ok()?, "outcomes")
}

/// The machines of a dry run of an update.
async fn preview_update(api: &Api, key: &Key, selector: &str) -> anyhow::Result<BTreeSet<String>> {
    let dry_run = json!({ "reason": "what if", "dryRun": true });
    let body = json!({ "selector": selector, "release": "one", "order": dry_run });
    let answer = api.call(Some(&key.token), "Updates/Create", body).await?;
    if answer.message().contains("no machine fits the selector") {
        return Ok(BTreeSet::new());
    }
    let answer = answer.ok()?;
    let machines = answer["after"]["machines"].as_array().with_context(|| answer.to_string())?.iter();
    machines.map(|name| Ok(name.as_str().context("a name")?.to_owned())).collect()
}

/// The machines that a new cluster of up to nine machines would get. `None` if its selector is refused.
async fn plan_cluster(api: &Api, key: &Key, selector: &str) -> anyhow::Result<Option<BTreeSet<String>>> {
    let body = json!({ "name": "new", "controlPlane": 1, "workers": 8, "selector": selector });
    let answer = api.call(Some(&key.token), "Clusters/Plan", body).await?;
    if answer.code == 400 && answer.message().starts_with("the selector of a cluster cannot have ") {
        return Ok(None);
    }
    let answer = answer.ok()?;
    let steps = answer["steps"].as_array().context("steps")?.iter();
    Ok(Some(steps.filter_map(|step| step["name"].as_str()).map(str::to_owned).collect()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn selector_means_the_same_machines_everywhere() -> TestResult {
    let api = start("api_selectors").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let (mut planned_count, mut refused_count) = (0, 0);
    for (selector, expected) in read_corpus()? {
        assert_eq!(list_machines(&api, &admin, &selector).await?, expected, "a list by {selector:?}");
        assert_eq!(watch_machines(&api, &admin, &selector).await?, expected, "a watch by {selector:?}");
        assert_eq!(watch_by_command(&kim, &selector).await?, expected, "get machines -w by {selector:?}");
        assert_eq!(wait_by_command(&kim, &selector).await?, expected, "wait by {selector:?}");
        assert_eq!(preview_order(&api, &admin, &selector).await?, expected, "an order by {selector:?}");
        assert_eq!(preview_update(&api, &admin, &selector).await?, expected, "an update by {selector:?}");
        let printed = ["get", "machines", "-l", &selector, "-o", "jsonpath={.machines[*].name.providerId}"];
        let printed = kim.ask(&printed)?;
        let printed: BTreeSet<String> = printed.split_whitespace().map(str::to_owned).collect();
        assert_eq!(printed, expected, "get machines -l {selector:?}");
        if let Some(chosen) = plan_cluster(&api, &admin, &selector).await? {
            let free = expected.iter().filter(|name| FREE.contains(&name.as_str())).cloned();
            assert_eq!(chosen, free.collect(), "a cluster by {selector:?}");
            planned_count += 1;
        } else {
            let keys = ["phase", "fact", "cluster"];
            assert!(keys.iter().any(|key| selector.contains(key)), "{selector} is refused");
            refused_count += 1;
        }
    }
    assert!(planned_count > 30 && refused_count > 10, "{planned_count} planned, {refused_count} refused");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flag_for_one_key_selects_what_its_term_does() -> TestResult {
    let api = start("api_selector_flags").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for (flags, expected) in [
        (&["--location", "ams-1/r1"][..], "m1"),
        (&["--location", "ams-1/r1*"], "m1 m2"),
        (&["--location", "ams-2", "--location", "Hall A, row 7"], "m3 m4 m8"),
        (&["--provider", "lab", "--phase", "ready"], "m6"),
        (&["--manufacturer", "Acme, Inc.", "-l", "label.spare"], "m3"),
        (&["--product", "R640", "--fact", "hold"], "m4"),
    ] {
        let listed = ["get", "machines", "-o", "jsonpath={.machines[*].name.providerId}"];
        let hold = ["hold", "--reason", "r", "--dry-run", "-o", "jsonpath={.outcomes[*].name.providerId}"];
        for command in [&listed[..], &hold] {
            let printed = kim.ask(&[command, flags].concat())?;
            let printed: BTreeSet<&str> = printed.split_whitespace().collect();
            assert_eq!(printed, expected.split(' ').collect(), "{command:?} {flags:?}");
        }
    }
    // A shell makes such a value of a variable that is not set.
    for flag in ["--phase", "--provider", "--location", "--manufacturer", "--product", "--fact", "--label"] {
        for command in [&["get", "machines"][..], &["hold", "--reason", "r", "--yes-count", "8"]] {
            let output = kim.run_command(&[command, &["-l", "phase=Ready", flag, ""]].concat()).await?;
            let stderr = String::from_utf8(output.stderr)?;
            assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{flag}: {stderr}");
            assert!(stderr.contains(flag), "{flag}: {stderr}");
        }
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_about_no_machine_ends_alike_in_each_output() -> TestResult {
    let api = start("api_selects_none").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let orders = "SELECT count(*) FROM audit WHERE NOT dry_run AND rpc LIKE '%BulkOrders/Submit'";
    for (flags, sent) in [
        (&["-l", "name=none"][..], 0),
        (&["--location", "ams"], 0),
        (&["-l", "name=none", "--dry-run"], 0),
        (&["-l", "name=none", "--yes-count", "0", "--dry-run"], 0),
        (&["-l", "name=none", "--yes-count", "0"], 1),
    ] {
        for output in ["table", "json"] {
            let before = api.count(orders).await?;
            let words = [&["hold", "--reason", "r", "-o", output][..], flags].concat();
            let found = kim.run_command(&words).await?;
            let stderr = String::from_utf8(found.stderr)?;
            assert_eq!((found.status.code(), found.stdout.len()), (Some(3), 0), "{words:?}: {stderr}");
            assert!(stderr.contains("no machine matches, and nothing was changed"), "{words:?}: {stderr}");
            assert_eq!(stderr.contains("\"exitCode\":3"), output == "json", "{words:?}: {stderr}");
            assert_eq!(api.count(orders).await? - before, sent, "{words:?}");
        }
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_selector_has_one_sentence_and_changes_nothing() -> TestResult {
    let api = start("api_wrong_selectors").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let changed = "SELECT count(*) FROM audit WHERE outcome = 'changed' AND NOT dry_run";
    let before = api.count(changed).await?;
    let long = format!("location={}", "a".repeat(64 << 10));
    for (selector, part) in [
        ("row=7", "-l label.row=7"),
        ("Row=7", "-l label.Row=7"),
        ("memory=64GiB", "write memory>=64GiB"),
        ("location=ams*,memory", "write the selector in quotes"),
        ("phase=Redy", "the phases are New, "),
        ("location in ()", "has no values"),
        ("location in (ams", "a parenthesis that is not closed"),
        ("product=\"R640", "a quote that is not closed"),
        ("location=a*s", "a star within a value"),
        ("location=\u{1b}[2J", "a control character"),
        (&long, "at most 16384 are allowed"),
    ] {
        for command in [
            &["get", "machines"][..],
            &["get", "machines", "-w"],
            &["watch"],
            &["wait", "machines", "--for", "healthy"],
            &["hold", "--reason", "a disk", "--yes-count", "1"],
            &["update", "--release", "one", "--reason", "next"],
            &["cluster", "create", "new", "--reason", "next"],
            &["cluster", "plan", "new", "--control-plane", "1"],
        ] {
            let output = kim.run_command(&[command, &["-l", selector]].concat()).await?;
            let stderr = String::from_utf8(output.stderr)?;
            assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{command:?}: {stderr}");
            assert!(stderr.contains(part), "{command:?} -l {selector:.100}: {stderr}");
            // A command to run is in a line of its own.
            let lines = 1 + usize::from(stderr.contains("run the line below"));
            assert!(stderr.lines().count() == lines && stderr.len() < 1000, "{command:?}: {stderr}");
        }
    }
    // What a cluster cannot select by, and all machines.
    for (line, code, part) in [
        ("cluster create new --reason r -l phase=Ready", 2, "cannot have phase"),
        ("cluster create new --reason r -l 'location=ams*,fact!=hold'", 2, "cannot have fact"),
        ("cluster plan new --control-plane 1 -l 'cluster!=prod'", 2, "cannot have cluster"),
        ("hold --reason r --yes-count 9 -l ''", 4, "the selector matches every machine"),
        ("hold --reason r --yes-count 9 -l ,", 4, "the selector matches every machine"),
        ("hold --reason r --yes-count 9 --dry-run -l ''", 4, "the selector matches every machine"),
        ("hold --reason r --yes-count 9 --beyond-limits --dry-run -l ''", 0, ""),
        ("update --release one --reason r --dry-run -l ''", 0, ""),
    ] {
        let words = shell_words::split(line).with_context(|| line.to_owned())?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = kim.run_command(&words).await?;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(text.contains(part), "{line}: {text}");
    }
    assert_eq!(api.count(changed).await?, before, "a wrong selector changed something");
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    for (rpc, body) in [
        ("Machines/List", json!({ "selector": "row=7" })),
        ("BulkOrders/Submit", json!({ "selector": "phase=Redy", "retry": {}, "order": order("r", "1") })),
        ("Updates/Create", json!({ "selector": "row=7", "release": "one", "order": order("r", "2") })),
        (
            "Clusters/Create",
            json!({ "name": "new", "controlPlane": 1, "selector": "fact=hold", "order": order("r", "3") }),
        ),
        ("Clusters/Plan", json!({ "name": "new", "controlPlane": 1, "selector": "phase=Ready" })),
    ] {
        let answer = api.call(Some(&admin.token), rpc, body).await?;
        let field = &answer.json["error"]["details"];
        assert_eq!(answer.code, 400, "{rpc}: {answer:?}");
        assert!(field.to_string().contains("\"selector\""), "{rpc}: {answer:?}");
    }
    Ok(api.stop().await?)
}
