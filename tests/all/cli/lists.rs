//! Lists: what they contain, their pages, their JSON, and their cost.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::named_lease::NamedLease;
use shepherd::model::adoption::NotAdopted;
use shepherd::model::natural_order::{compare_names, natural_key};
use shepherd::model::needs_human::Obstacle;
use shepherd::model::process::Process;

use super::{Site, golden, healthy};
use crate::harness::aloud::TestResult;

#[tokio::test]
async fn lists_show_what_is_there() -> TestResult {
    let site = Site::create("cli_lists").await?;
    golden("no_machines", &site.ask(&["get", "machines"])?);
    golden("no_sessions", &site.ask(&["get", "sessions"])?);
    golden("no_work", &site.ask(&["get", "work"])?);
    golden("no_providers", &site.ask(&["get", "providers"])?);
    site.listen().await?;
    for id in ["sim-0001", "sim-0002"] {
        site.machine("sim", id).await?;
    }
    let ready = site.machine("sim", "sim-0003").await?;
    site.change(ready, healthy()).await?;
    site.machine("rack-a", "17").await?;
    let human = site.machine("rack-a", "18").await?;
    site.change(
        human,
        vec![FactChange::NeedsHuman { obstacle: Obstacle::Unknown, reason: "its disk is on fire".into() }],
    )
    .await?;
    site.advance(Duration::from_mins(5)).await?;
    golden("machines", &site.ask(&["get", "machines"])?);
    let wide = site.ask(&["get", "machines", "-o", "wide", "--no-headers", "--phase", "Ready"])?;
    assert!(wide.starts_with("sim-0003  Ready  ") && wide.contains(&ready.to_string()), "{wide}");
    assert_eq!(wide.lines().count(), 1, "{wide}");
    golden(
        "machines_filtered",
        &site.ask(&["get", "machines", "--phase", "needshuman", "--provider=rack-a"])?,
    );
    let worker = site.sessions("initializer").await?;
    let work = worker.claim(Process::AgentStart, "sim").await?;
    golden("sessions", &site.ask_wide(&["get", "sessions"])?);
    golden(
        "work",
        &site
            .ask_wide(&["get", "work"])?
            .replace("sim-0002", "sim-000[1|2]")
            .replace("sim-0001", "sim-000[1|2]"),
    );
    work.cancel("the test is over").await?;
    worker.end().await?;
    let provisioner = site.sessions("provisioner").await?;
    let lease = async |provider: &str| -> anyhow::Result<NamedLease> {
        let lease = site.bmdb.acquire_named_lease(&provisioner.session, "provisioner", provider).await?;
        lease.context("somebody else is the provisioner")
    };
    let (sim, rack) = (lease("sim").await?, lease("rack-a").await?);
    site.bmdb.record_provider_list(&sim, "simulated", 55).await?;
    let surplus = Some(NotAdopted { machines: 5, limit: 50 });
    assert!(site.bmdb.record_not_adopted(&sim, surplus).await?, "it was recorded before");
    assert!(!site.bmdb.record_not_adopted(&sim, surplus).await?, "it has not changed");
    site.bmdb
        .record_provider_list_failure(&rack, "static", "cannot read /etc/shepherd/devices.json: it is gone")
        .await?;
    site.bmdb.set_provisioner_brake(&rack, Some("its list lost 4 of 10 machines at once")).await?;
    for lease in [sim, rack] {
        site.bmdb.release_named_lease(&lease).await?;
    }
    provisioner.end().await?;
    site.bmdb.set_recovery_brake("*", Some("brake: 40 of 50 machines in all fell silent within 10m")).await?;
    // So long that a second more or less on a busy host does not make a column wider.
    site.advance(Duration::from_hours(72)).await?;
    golden("providers", &site.ask(&["get", "providers"])?);
    Ok(())
}

#[tokio::test]
async fn list_of_machines_is_read_in_pages_without_gaps_or_repeats() -> TestResult {
    let site = Site::create("cli_pages").await?;
    let mut made = Vec::new();
    for n in 0..7 {
        let provider = if n % 2 == 0 { "sim" } else { "rack-a" };
        let machine = site.machine(provider, &format!("m-{n}")).await?;
        if n % 3 == 0 {
            site.change(machine, vec![FactChange::Quarantined("odd".into())]).await?;
        }
        made.push(machine.to_string());
    }
    let (mut seen, mut after) = (Vec::new(), None::<String>);
    loop {
        let mut arguments = vec!["get", "machines", "--limit", "2"];
        if let Some(after) = &after {
            arguments.extend(["--cursor", after]);
        }
        let page = site.json(&arguments)?;
        let machines = page["machines"].as_array().context("no list")?;
        assert!(machines.len() <= 2, "more than the limit: {page}");
        for machine in machines {
            seen.push(machine["name"]["machine"].as_str().context("no id")?.to_owned());
        }
        match page["nextPageToken"].as_str().filter(|token| !token.is_empty()) {
            Some(next) => after = Some(next.to_owned()),
            None => break,
        }
    }
    let whole = site.json(&["get", "machines"])?;
    let order: Vec<&str> = whole["machines"]
        .as_array()
        .context("no list")?
        .iter()
        .filter_map(|m| m["name"]["machine"].as_str())
        .collect();
    assert_eq!(seen, order, "pages differ from the whole");
    seen.sort();
    made.sort();
    assert_eq!(seen, made);
    let output = site.ask(&["get", "machines", "--limit", "2"])?;
    assert!(output.contains("first 2, and there are more") && output.contains("--cursor '"), "{output}");
    Ok(())
}

/// The order of the index is that of `natural_key`: of the ids that providers may have, by the server's own statement.
#[tokio::test]
async fn machines_are_listed_in_natural_order() -> TestResult {
    let site = Site::create("cli_order").await?;
    let pool = site.database.pool().await?;
    let mut ids: Vec<String> = [
        "0",
        "00",
        "7",
        "007",
        "10",
        "sim",
        "sim-",
        "sim-2",
        "sim-02",
        "sim-10",
        "sim-10a",
        "SIM-3",
        "a1b2",
        "a1b10",
        "a01b3",
        "10.0.9.1",
        "10.0.10.1",
        "é2",
        "é10",
        "٣1",
        "_x",
        "x-18446744073709551615",
        "rack 7/u2",
        "rack 7/u11",
    ]
    .map(str::to_owned)
    .to_vec();
    ids.extend((0..40).map(|number| format!("n{}-{}", number % 3, number * 7 % 40)));
    ids.push(format!("long-{}", "9".repeat(30)));
    for provider in ["rack-10", "rack-9"] {
        sqlx::query(
            "WITH made AS (INSERT INTO machine SELECT gen_random_uuid(), now() FROM unnest($1::TEXT[]) RETURNING machine_id),
                  named AS (SELECT machine_id, ($1::TEXT[])[(row_number() OVER ())::INT] AS id FROM made),
                  provided AS (
                      INSERT INTO machine_provided (machine_id, provider, provider_id, status, provided_at, unchanged)
                      SELECT machine_id, $2, id, 'Running', now(), true FROM named)
             INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
                 phase_since, rules_version, policy_version, version, fence, losses)
             SELECT machine_id, lane, $2, 1, 0, false, 'r', 'd', CASE WHEN id LIKE 'n1%' THEN 'Silent' ELSE 'Ready' END,
                    now(), 1, 1, 1, 0, 0
             FROM named, (VALUES ('access'), ('observe')) l (lane)",
        )
        .bind(&ids)
        .bind(provider)
        .execute(&pool)
        .await?;
    }
    let list = |arguments: &[&str]| -> anyhow::Result<Vec<(String, String)>> {
        let page = site.json(&[&["get", "machines"], arguments].concat())?;
        let machines = page["machines"].as_array().context("no list")?.iter();
        let field =
            |machine: &serde_json::Value, name: &str| machine["name"][name].as_str().map(str::to_owned);
        machines.map(|one| field(one, "provider").zip(field(one, "providerId")).context("no name")).collect()
    };
    let expected = |chosen: fn(&str) -> bool| -> Vec<(String, String)> {
        let mut names: Vec<(String, String)> = ["rack-9", "rack-10"]
            .iter()
            .flat_map(|provider| ids.iter().map(move |id| ((*provider).to_owned(), id.clone())))
            .filter(|(_, id)| chosen(id))
            .collect();
        names.sort_by(|one, other| {
            compare_names(&one.0, &other.0).then_with(|| compare_names(&one.1, &other.1))
        });
        names
    };
    // Ids with the same key are in the order of their UUIDs.
    let keyed = |names: Vec<(String, String)>| -> Vec<(String, String)> {
        names.into_iter().map(|(provider, id)| (provider, natural_key(&id))).collect()
    };
    assert_eq!(keyed(list(&[])?), keyed(expected(|_| true)));
    // Few machines are Silent, so they are found by their phase. Many are not, so they are found by their names.
    assert_eq!(keyed(list(&["--phase", "silent"])?), keyed(expected(|id| id.starts_with("n1"))));
    assert_eq!(keyed(list(&["--phase", "ready"])?), keyed(expected(|id| !id.starts_with("n1"))));
    let mut sorted = list(&["--sort-by", "name", "--provider", "rack-9"])?;
    assert_eq!(
        keyed(sorted.clone()),
        keyed(list(&["--provider", "rack-9"])?),
        "the client sorts as the server"
    );
    sorted.dedup();
    assert_eq!(sorted.len(), ids.len());
    Ok(())
}

const BERLIN: &str = "CET-1CEST,M3.5.0,M10.5.0/3";

#[tokio::test]
async fn times_are_in_the_zone_of_the_user() -> TestResult {
    let site = Site::create("cli_zones").await?;
    let machine = site.machine("sim", "sim-0001").await?;
    let run = |zone: &str, arguments: &[&str]| -> anyhow::Result<std::process::Output> {
        Ok(site.program(arguments)?.env("TZ", zone).output()?)
    };
    let describe = ["describe", "machine", "sim-0001"];
    // Before and after the clock is set back in Berlin.
    for (created_at, zone, expected) in [
        ("2026-10-25T00:30:00Z", BERLIN, "2026-10-25T02:30:00+02:00"),
        ("2026-10-25T01:30:00Z", BERLIN, "2026-10-25T02:30:00+01:00"),
        ("2026-10-25T00:30:00Z", "EST5EDT,M3.2.0,M11.1.0", "2026-10-24T20:30:00-04:00"),
        ("2026-10-25T00:30:00Z", "<+0545>-5:45", "2026-10-25T06:15:00+05:45"),
        ("2026-10-25T00:30:00Z", "", "2026-10-25T00:30:00+00:00"),
    ] {
        sqlx::query("UPDATE machine SET created_at = $2::TIMESTAMPTZ WHERE machine_id = $1")
            .bind(machine.0)
            .bind(created_at.parse::<chrono::DateTime<chrono::Utc>>()?)
            .execute(&site.database.pool().await?)
            .await?;
        let text = String::from_utf8(run(zone, &describe)?.stdout)?;
        assert!(text.contains(&format!("({expected})")), "{zone} {created_at}: {text}");
        let utc = String::from_utf8(run(zone, &[&describe[..], &["--utc"]].concat())?.stdout)?;
        let expected = format!("({}+00:00)", created_at.trim_end_matches('Z'));
        assert!(utc.contains(&expected), "{zone} {created_at}: {utc}");
        let json = String::from_utf8(run(zone, &[&describe[..], &["-o", "json"]].concat())?.stdout)?;
        assert!(json.contains(created_at), "{zone}: {json}");
    }

    let hold = ["hold", "sim-0001", "--reason", "a disk", "--until"];
    let held = run(BERLIN, &[&hold[..], &["2130-07-01T18:00"]].concat())?;
    let message = String::from_utf8(held.stdout)?;
    assert!(message.contains("(until 2130-07-01T18:00:00+02:00)"), "the server's words: {message}");
    let until = || -> anyhow::Result<serde_json::Value> {
        Ok(site.json(&["get", "machine", "sim-0001"])?["hold"]["until"].clone())
    };
    assert_eq!(until()?, "2130-07-01T16:00:00Z");
    run(BERLIN, &[&hold[..], &["2130-07-01T18:00", "--utc"]].concat())?;
    assert_eq!(until()?, "2130-07-01T18:00:00Z");
    for (text, event) in [
        ("2030-10-27T02:30", "occurs twice"),
        ("2030-03-31T02:30", "does not exist"),
        ("2130-07-01", "nor a time"),
    ] {
        let refused = run(BERLIN, &[&hold[..], &[text]].concat())?;
        let sentence = String::from_utf8(refused.stderr)?;
        assert_eq!((refused.status.code(), sentence.lines().count()), (Some(2), 1), "{sentence}");
        assert!(sentence.contains(event), "{sentence}");
    }
    assert_eq!(until()?, "2130-07-01T18:00:00Z", "a refused order changed it");
    Ok(())
}

#[tokio::test]
async fn json_has_documented_fields() -> TestResult {
    let site = Site::create("cli_json").await?;
    site.listen().await?;
    let machine = site.machine("sim", "sim-0001").await?;
    site.change(machine, healthy()).await?;
    let worker = site.sessions("updater").await?;
    let work = worker.claim(Process::Update, "sim").await?;
    for (name, arguments) in [
        ("json_machines", vec!["get", "machines"]),
        ("json_sessions", vec!["get", "sessions"]),
        ("json_work", vec!["get", "work"]),
        ("json_why", vec!["why", "sim-0001"]),
        ("json_timeline", vec!["timeline", "sim-0001"]),
        ("json_describe", vec!["describe", "machine", "sim-0001"]),
    ] {
        let mut shape = BTreeMap::new();
        shape_of("", &site.json(&arguments)?, &mut shape);
        let lines: Vec<String> = shape.into_iter().map(|(path, kind)| format!("{path}: {kind}")).collect();
        golden(name, &lines.join("\n"));
    }
    work.cancel("the test is over").await?;
    Ok(worker.end().await?)
}

/// Every path in a JSON document with the type of its value.
fn shape_of(path: &str, value: &serde_json::Value, shape: &mut BTreeMap<String, &'static str>) {
    use serde_json::Value;
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(items) => {
            for item in items {
                shape_of(&format!("{path}[]"), item, shape);
            }
            return;
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                shape_of(&format!("{path}.{name}"), field, shape);
            }
            return;
        }
    };
    shape.insert(path.to_owned(), kind);
}

#[tokio::test]
async fn reading_locks_no_rows() -> TestResult {
    let site = Site::create("cli_locks").await?;
    let machine = site.machine("sim", "sim-0001").await?;
    // A transaction holds every row of the machine; a query must not wait for it.
    let pool = site.database.pool().await?;
    let mut holder = pool.begin().await?;
    sqlx::query("SELECT 1 FROM machine_due d, machine_provided p WHERE d.machine_id = $1 FOR UPDATE")
        .bind(machine.0)
        .fetch_all(&mut *holder)
        .await?;
    for arguments in [
        &["get", "machines"][..],
        &["why", "sim-0001"],
        &["describe", "machine", "sim-0001"],
        &["timeline", "sim-0001"],
    ] {
        let output = site.ask(arguments)?;
        assert!(!output.contains("exit code"), "{output}");
    }
    // The other way round, a query cannot write, so it cannot block anything.
    let refused = site
        .bmdb
        .transact_read_only(move |tx| {
            Box::pin(async move {
                let done = sqlx::query("SELECT 1 FROM machine_due FOR UPDATE").fetch_all(tx).await;
                Ok(done.map(drop).map_err(|error| error.to_string()))
            })
        })
        .await?;
    let refused = refused.expect_err("a reading transaction took row locks");
    assert!(refused.contains("read-only transaction"), "{refused}");
    holder.rollback().await?;
    Ok(())
}

/// With 20,000 machines of two providers a plan that reads all of them costs more than any index, so the planner
/// chooses it only if no index fits.
#[tokio::test]
async fn no_list_or_search_reads_the_whole_fleet() -> TestResult {
    let site = Site::create("cli_plans").await?;
    let pool = site.database.pool().await?;
    sqlx::raw_sql(
        "INSERT INTO machine SELECT gen_random_uuid(), now() FROM generate_series(1, 20000);
         INSERT INTO machine_provided (machine_id, provider, provider_id, status, provided_at, unchanged)
             SELECT machine_id, CASE WHEN n % 2 = 0 THEN 'sim' ELSE 'rack-a' END, 'm-' || n, 'Running', now(), true
             FROM (SELECT machine_id, row_number() OVER () AS n FROM machine) m;
         INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at, phase_index,
                 phase_since, rules_version, policy_version, version, fence, losses)
             SELECT machine_id, lane, provider, 1, 0, false, 'r', 'd', 'Ready', now(), 1, 1, 1, 0, 0
             FROM machine_provided, (VALUES ('access'), ('observe')) l (lane);
         INSERT INTO machine_agent_heartbeat SELECT machine_id, now(), 'b', 'i', 1, 'v' FROM machine;
         INSERT INTO machine_hardware_report SELECT machine_id, now(), 'i', ''::BYTEA, 'm', 'p', 's', 1, 1 FROM machine;
         INSERT INTO machine_labels SELECT machine_id, '{\"row\": \"7\"}' FROM machine;
         INSERT INTO machine_priority SELECT machine_id, 'low', 'r', 'kim', now() FROM machine;
         INSERT INTO history (machine_id, at, event) SELECT machine_id, now(), 'Ready' FROM machine;
         INSERT INTO machine_hold SELECT machine_id, 'everything', 'r', 'kim', now() FROM machine;
         INSERT INTO cluster VALUES (gen_random_uuid(), 'prod', 3, 2, 'cpus>=4', '[\"web\"]', 'manual', 1,
             clock_timestamp(), 'kim', NULL, NULL, clock_timestamp(), 'ca', '[\"10.0.0.1:7835\"]',
             clock_timestamp(), clock_timestamp(), '[\"no machine is free\"]', FALSE, 3, 2);
         INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
             SELECT machine_id, cluster_id, 'worker', now() FROM machine, cluster;
         ANALYZE",
    )
    .execute(&pool)
    .await?;
    let some: uuid::Uuid = sqlx::query_scalar("SELECT machine_id FROM machine ORDER BY machine_id LIMIT 1")
        .fetch_one(&pool)
        .await?;
    let (some, after) =
        (format!("'{some}'::uuid"), "'00000000-0000-0000-0000-000000000000'::uuid".to_owned());
    let text = |value: &str| format!("'{value}'::text");
    for (statement, parameters) in [
        (include_str!("../../../sql/inspect/list_classes.sql"), vec![]),
        (
            include_str!("../../../sql/inspect/list_machine_names.sql"),
            vec![text("sim"), text("m-7"), after.clone(), "101".to_owned()],
        ),
        (
            include_str!("../../../sql/inspect/list_class_names.sql"),
            vec![
                text("sim"),
                "ARRAY['Ready']::text[]".to_owned(),
                after.clone(),
                "2000".to_owned(),
                text("m-7"),
                after,
                "101".to_owned(),
            ],
        ),
        (
            include_str!("../../../sql/inspect/list_by_id.sql"),
            vec![some.clone(), some.clone(), "6".to_owned()],
        ),
        (
            include_str!("../../../sql/inspect/list_by_provider_id.sql"),
            vec!["NULL::text".to_owned(), text("m-7"), "6".to_owned()],
        ),
        (
            include_str!("../../../sql/inspect/list_by_provider_ids.sql"),
            vec![format!("ARRAY[{}, {}]", text("m-7"), text("sim/m-8"))],
        ),
        (include_str!("../../../sql/inspect/suggest_ids.sql"), vec![text("m-1"), "5".to_owned()]),
        (include_str!("../../../sql/inspect/list_lanes.sql"), vec![some.clone()]),
        (
            include_str!("../../../sql/inspect/list_history.sql"),
            vec![some.clone(), "NULL::timestamptz".to_owned(), "50".to_owned(), "0".to_owned()],
        ),
        (include_str!("../../../sql/inspect/list_machines_by_id.sql"), vec![format!("ARRAY[{some}]")]),
        (
            include_str!("../../../sql/inspect/list_events.sql"),
            vec!["now() + INTERVAL '1 s'".to_owned(), "now() + INTERVAL '2 s'".to_owned(), "5000".to_owned()],
        ),
        (
            include_str!("../../../sql/inspect/list_due.sql"),
            vec![text("AgentStart"), "to_timestamp(0)".to_owned(), some.clone(), "101".to_owned()],
        ),
        (
            include_str!("../../../sql/inspect/count_class.sql"),
            vec![text("Ready"), text("sim"), "100".to_owned()],
        ),
    ] {
        let mut statement = statement.to_owned();
        for (number, value) in parameters.iter().enumerate() {
            statement = statement.replace(&format!("${}", number + 1), value);
        }
        let plan: Vec<String> =
            sqlx::query_scalar(sqlx::AssertSqlSafe(format!("EXPLAIN {statement}"))).fetch_all(&pool).await?;
        let whole: Vec<&String> = plan
            .iter()
            .filter(|line| line.contains("Seq Scan on machine") || line.contains("Seq Scan on history"))
            .collect();
        assert!(whole.is_empty(), "{statement}\n{}", plan.join("\n"));
    }
    let list = site.json(&["get", "machines", "--limit", "1500"])?;
    assert_eq!(list["machines"].as_array().map(Vec::len), Some(1500), "pages of 1,000 are joined");
    Ok(())
}
