//! Lists and pages of objects, by the table of kinds of `shepherdctl`.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde_json::Value;

use crate::api::Api;
use crate::api::command_line::Operator;
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

/// The provider's ids of the machines in a document.
fn machines(document: &Value) -> anyhow::Result<BTreeSet<String>> {
    let machines = document["machines"].as_array().context("a list")?.iter();
    machines.map(|machine| Ok(machine["name"]["providerId"].as_str().context("a name")?.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_is_whole_unless_a_limit_cuts_it() -> TestResult {
    let api = Api::start("api_kinds").await?;
    for statement in FLEET {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save_context", "home"])?;

    let whole = kim.json(&["get", "machines", "--all"])?;
    assert_eq!((machines(&whole)?.len(), &whole["nextPageToken"]), (1200, &Value::from("")), "all pages");
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
    let one = kim.json(&["get", "machine", "sim-7"])?;
    assert_eq!((&one["phase"], &one["name"]["providerId"]), (&Value::from("New"), &Value::from("sim-7")));

    let screen = Screen::start(&kim.command(&["get", "machines", "--limit", "3"]), 40, 110)?;
    let text = screen.until(&["3 machines, 0 healthy, 1 retired (not shown)"]).await?;
    assert!(text.contains("NAME") && text.contains("sim-"), "{text}");
    let piped = kim.ask(&["get", "machines", "--limit", "3", "--no-headers"])?;
    assert_eq!(piped.lines().count(), 3, "no headers and no footer: {piped}");

    let none = kim.run_command(&["get", "clusters"]).await?;
    let note = String::from_utf8(none.stderr)?;
    assert!(none.status.success() && none.stdout.is_empty() && note.starts_with("no clusters; "), "{note}");
    Ok(api.stop().await?)
}
