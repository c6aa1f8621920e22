//! Lists and pages of objects, by the table of kinds of `shepherdctl`.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::cli::client::contexts::Contexts;
use shepherd::model::access::AccessRole;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::api::same_answers::populate;
use crate::harness::aloud::TestResult;
use crate::harness::screen::Screen;

/// 1,200 machines of one provider: the first is retired, the second healthy, the others new.
const FLEET: [&str; 3] = [
    "INSERT INTO machine SELECT md5('m' || n)::UUID, clock_timestamp() FROM generate_series(1, 1200) n",
    "INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
     SELECT md5('m' || n)::UUID, 'sim', 'sim-' || n, '192.0.2.1', 'Running', clock_timestamp(), FALSE
     FROM generate_series(1, 1200) n",
    "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
         phase_since, rules_version, policy_version, version, fence, losses)
     SELECT md5('m' || n)::UUID, lane, 'sim', 1, 0, FALSE, 'newly provided', '',
            CASE WHEN n = 1 THEN 'Retired' WHEN n = 2 THEN 'Ready' ELSE 'New' END, clock_timestamp(), 1, 0, 0, 0, 0
     FROM generate_series(1, 1200) n, (VALUES ('access'), ('observe')) l (lane)",
];

/// The provider's ids of the machines in a document, in its order.
fn ordered_machines(document: &Value) -> anyhow::Result<Vec<String>> {
    let machines = document["machines"].as_array().context("a list")?.iter();
    machines.map(|machine| Ok(machine["name"]["providerId"].as_str().context("a name")?.to_owned())).collect()
}

/// The provider's ids of the machines in a document.
fn machines(document: &Value) -> anyhow::Result<BTreeSet<String>> {
    Ok(ordered_machines(document)?.into_iter().collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_is_whole_unless_a_limit_cuts_it() -> TestResult {
    let api = Api::start("api_kinds").await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;

    let calls = || -> anyhow::Result<u64> {
        let counted = api.metrics.encode()?;
        let listed = "shepherd_api_calls_total{rpc=\"shepherd.fleet.v1.Machines/List\",code=\"OK\"} ";
        let count = counted.lines().find_map(|line| line.strip_prefix(listed)).context("a counter")?;
        Ok(count.parse()?)
    };
    let before = calls()?;
    let whole = kim.json(&["get", "machines", "--all"])?;
    assert_eq!(calls()? - before, 3, "calls for one document of 1,200 machines");
    assert_eq!((machines(&whole)?.len(), &whole["nextPageToken"]), (1200, &Value::from("")), "all pages");
    let by_value: Vec<String> = (1..=1200).map(|number| format!("sim-{number}")).collect();
    assert_eq!(ordered_machines(&whole)?, by_value, "by the value of the numbers in names, across pages");
    let present = machines(&kim.json(&["get", "machines"])?)?;
    assert!(present.len() == 1199 && !present.contains("sim-1"), "the retired machine is listed");
    for retired in [&["get", "machines", "--phase", "retired"][..], &["get", "machines", "sim-1", "sim-1"]] {
        assert_eq!(machines(&kim.json(retired)?)?, BTreeSet::from(["sim-1".to_owned()]), "{retired:?}");
    }
    let cut = kim.run_command(&["get", "machines", "--limit", "600", "-o", "json"]).await?;
    let (document, note) = (serde_json::from_slice(&cut.stdout)?, String::from_utf8(cut.stderr)?);
    assert_eq!(machines(&document)?.len(), 600);
    assert!(
        note.contains("first 600, and there are more: raise or omit --limit, or continue with --cursor '"),
        "{note}"
    );
    let by_phase =
        kim.run_command(&["get", "machines", "--sort-by=phase", "--limit", "1198", "-o", "json"]).await?;
    let (document, note) = (serde_json::from_slice(&by_phase.stdout)?, String::from_utf8(by_phase.stderr)?);
    let expected: Vec<String> = (3..=1200).map(|number| format!("sim-{number}")).collect();
    assert_eq!(
        ordered_machines(&document)?,
        expected,
        "sorted before it is cut: sim-2, which is Ready, is last"
    );
    assert!(note.ends_with("first 1198, and there are more: raise or omit --limit\n"), "{note}");
    let unknown = kim.run_command(&["get", "machines", "--sort-by", "owner"]).await?;
    let sentence = String::from_utf8(unknown.stderr)?;
    assert_eq!(
        (unknown.status.code(), unknown.stdout.len(), sentence.lines().count()),
        (Some(2), 0, 1),
        "{sentence}"
    );
    assert!(
        sentence.contains("there is no column \"owner\" to sort by; give one of: name, phase, "),
        "{sentence}"
    );
    let one = kim.json(&["get", "machine", "sim-7"])?;
    assert_eq!((&one["phase"], &one["name"]["providerId"]), (&Value::from("New"), &Value::from("sim-7")));

    let screen = Screen::start(&kim.command(&["get", "machines", "--limit", "3"]), 40, 110)?;
    let text = screen.until(&["3 machines, 1 healthy, 1 retired (not shown)"]).await?;
    assert!(text.contains("NAME") && text.contains("sim-"), "{text}");
    let piped = kim.ask(&["get", "machines", "--limit", "3", "--no-headers"])?;
    assert_eq!(piped.lines().count(), 3, "no headers and no footer: {piped}");

    let none = kim.run_command(&["get", "clusters"]).await?;
    let note = String::from_utf8(none.stderr)?;
    assert!(none.status.success() && none.stdout.is_empty() && note.starts_with("no clusters; "), "{note}");
    Ok(api.stop().await?)
}

/// Fields that say when an answer was read.
fn without_read_time(mut document: Value) -> Value {
    if let Some(fields) = document.as_object_mut() {
        fields.remove("readAt");
    }
    document
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_output_is_made_of_the_document_of_the_api() -> TestResult {
    let api = Api::start("api_outputs").await?;
    let machine = populate(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    for (kind, rpc) in [
        ("machines", "Machines/List"),
        ("clusters", "Clusters/List"),
        ("shepherds", "Shepherds/List"),
        ("loops", "Loops/List"),
        ("budgets", "Budgets/List"),
        ("providers", "Providers/List"),
        ("artefacts", "Artefacts/List"),
        ("updates", "Updates/List"),
        ("approvals", "Approvals/List"),
        ("policy", "Policy/Get"),
    ] {
        let answer = without_read_time(api.call(Some(&admin.token), rpc, json!({})).await?.ok()?);
        assert_eq!(without_read_time(kim.json(&["get", kind])?), answer, "get {kind}");
        let direct = serde_json::from_str(&kim.direct(&["get", kind, "-o", "json"])?)?;
        assert_eq!(without_read_time(direct), answer, "get {kind} from the database");
    }

    // Each name that is printed names one object.
    for kind in
        ["machines", "clusters", "loops", "budgets", "brakes", "tokens", "artefacts", "updates", "issues"]
    {
        let names = kim.ask(&["get", kind, "-o", "name"])?;
        assert!(!names.is_empty(), "there are no {kind}");
        for name in names.lines() {
            assert_eq!(kim.ask(&["get", kind, name, "-o", "name"])?, format!("{name}\n"), "{kind}");
            kim.ask(&["describe", kind, name])?;
        }
    }
    let name = kim.ask(&["get", "machine", &machine, "-o", "name"])?;
    assert_eq!(name, format!("rack/{machine}\n"));
    for (arguments, expected) in [
        (&["why", &machine, "-o", "name"][..], name.as_str()),
        (&["timeline", &machine, "-o", "name"], name.as_str()),
        (&["describe", "machine", &machine, "-o", "name"], name.as_str()),
        (&["get", "machine", &machine, "-o", "jsonpath={.name.provider}"], "rack"),
        (&["get", "clusters", "-o", "jsonpath={range .clusters[*]}{.name}{\"\\n\"}{end}"], "ams\n"),
        (&["get", "clusters", "-o", "custom-columns=C:.name,W:.workers"], "C    W\nams  2\n"),
        (&["hold", &machine, "--reason", "a disk", "--dry-run", "-o", "jsonpath={.outcome}"], "CHANGED"),
    ] {
        assert_eq!(kim.ask(arguments)?, expected, "{arguments:?}");
    }
    for arguments in [
        &["get", "machines", "-o", "xml"][..],
        &["get", "machines", "-o", "jsonpath={.machines[}"],
        &["get", "machines", "-o", "jsonpath=.machines"],
        &["get", "machines", "-o", "custom-columns="],
        &["get", "machines", "-o", "custom-columns=NAME"],
        &["plan", "-o", "name"],
        &["hold", &machine, "--reason", "a disk", "-o", "name"],
        &["watch", "-o", "custom-columns=P:.phase"],
    ] {
        let refused = kim.run_command(arguments).await?;
        let sentence = String::from_utf8(refused.stderr)?;
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{arguments:?}: {sentence}");
        assert_eq!(sentence.lines().count(), 1, "{arguments:?}: {sentence}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caller_and_contexts_and_versions_are_shown() -> TestResult {
    let api = Api::start("api_whoami").await?;
    let (other, stop) = api.another().await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    kim.reach(&[api.server.local_addr, other.local_addr])?;

    let caller = kim.json(&["whoami"])?["credential"].clone();
    assert_eq!((&caller["role"], &caller["kind"]), (&json!("admin"), &json!("token")), "{caller}");
    let text = kim.ask(&["whoami"])?;
    assert!(text.contains("admin") && text.contains(&api.server.local_addr.to_string()), "{text}");
    let text = kim.direct(&["whoami"])?;
    assert!(text.contains("database-login") && text.contains("the database"), "{text}");

    let release = env!("CARGO_PKG_VERSION");
    let text = kim.ask(&["version"])?;
    let mut lines = vec![format!("shepherdctl {release}")];
    let schema = api.count("SELECT max(version) FROM _sqlx_migrations").await?;
    for server in [api.server.local_addr, other.local_addr] {
        lines.push(format!("shepherd {release} at {server}, schema {schema}"));
    }
    assert_eq!(text.lines().collect::<Vec<_>>(), lines);
    stop.cancel();
    let gone = other.local_addr;
    other.wait_until_stopped().await;
    let partial = kim.run_command(&["version"]).await?;
    let text = String::from_utf8(partial.stdout)?;
    assert_eq!(partial.status.code(), Some(5), "{text}");
    assert!(text.contains(&lines[1]) && text.contains(&format!("no version of {gone}: ")), "{text}");
    kim.reach(&[gone])?;
    let none = kim.run_command(&["version"]).await?;
    assert_eq!((none.status.code(), String::from_utf8(none.stdout)?), (Some(5), format!("{}\n", lines[0])));
    assert_eq!(kim.ask(&["version", "--client"])?, format!("{}\n", lines[0]), "without a call");

    let path = kim.home.path().join(".config/shepherd/contexts.toml");
    let mut contexts = Contexts::read(&path)?;
    let home = contexts.contexts.get("home").context("the context")?.clone();
    contexts.contexts.insert("lab".to_owned(), home);
    contexts.write(&path)?;
    assert_eq!(kim.ask(&["contexts", "use", "lab"])?, "lab is now the current context\n");
    assert_eq!(Contexts::read(&path)?.current.as_deref(), Some("lab"));
    assert_eq!(kim.ask(&["contexts", "-o", "name"])?, "home\nlab\n");
    assert_eq!(kim.ask(&["contexts"])?, kim.ask(&["get", "contexts"])?);
    let elsewhere = kim.command(&["contexts"]).env("SHEPHERD_CONTEXT", "home").output()?;
    let note = String::from_utf8(elsewhere.stderr)?;
    assert_eq!(note, "shepherdctl: SHEPHERD_CONTEXT=home in the environment overrides the current context\n");
    assert!(kim.ask(&["contexts", "delete", "lab"])?.starts_with("lab is deleted; its token stays in "));
    let unknown = kim.run_command(&["contexts", "use", "lab"]).await?;
    assert_eq!(unknown.status.code(), Some(3));
    assert_eq!(
        String::from_utf8(unknown.stderr)?,
        "shepherdctl: there is no context \"lab\"; the contexts are home\n"
    );
    Ok(api.stop().await?)
}
