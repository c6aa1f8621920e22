//! Routine that the server folds: each line once over all pages, a bounded number of events per call, and never a failure.

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::bmdb::machine::timeline::MAX_EVENTS_READ;
use shepherd::model::access::AccessRole;
use shepherd::model::ids::MachineId;
use shepherd::model::time::Timestamp;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection};

use crate::api::command_line::Operator;
use crate::api::{Api, Key};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

/// Observations of one machine, half a second apart, after it was adopted. Each of those whose number `$3` divides failed.
const OBSERVATIONS: &str = "
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process, detail)
    SELECT $1, TIMESTAMPTZ '2026-03-02 00:00:00Z' + n * INTERVAL '500 ms' + (edge = 'end')::INT * INTERVAL '250 ms',
           CASE WHEN edge = 'start' THEN 'Started' WHEN n % $3 = 0 THEN 'Failed' ELSE 'Finished' END,
           edge, 'observe', n, 'Update',
           CASE WHEN edge = 'start' THEN NULL WHEN n % $3 = 0 THEN 'the provider does not answer'
                ELSE 'nothing changed' END
    FROM generate_series(1, $2) n, (VALUES ('start'), ('end')) e (edge)
    UNION ALL
    SELECT $1, TIMESTAMPTZ '2026-03-01 00:00:00Z', 'Recorded', NULL, NULL, NULL, NULL, 'rack lists it'";

/// Adds a machine with `count` observations, of which each with a number that `failing` divides failed.
async fn observed(api: &Api, count: i64, failing: i64) -> anyhow::Result<MachineId> {
    let machine = provided(&api.pool).await?;
    sqlx::query(OBSERVATIONS).bind(machine.0).bind(count).bind(failing).execute(&api.pool).await?;
    // As autovacuum does: the planner knows that the history is long.
    sqlx::query("ANALYZE history").execute(&api.pool).await?;
    Ok(machine)
}

/// Rows that the statement for events has returned in this database, by the server's own count.
async fn rows_read(api: &Api, connection: &mut PgConnection) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar(
        "SELECT COALESCE(sum(s.rows), 0)::INT8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
         WHERE d.datname = $1 AND s.query LIKE '%h.fence DESC NULLS LAST%' AND s.query NOT LIKE '%pg_stat%'",
    )
    .bind(api.database.url().parse::<PgConnectOptions>()?.get_database())
    .fetch_one(connection)
    .await?)
}

async fn page(api: &Api, key: &Key, request: Value) -> anyhow::Result<Value> {
    api.call(Some(&key.token), "Machines/Timeline", request).await?.ok()
}

/// The events of all pages, and the number of pages.
async fn all_pages(api: &Api, key: &Key, request: &Value) -> anyhow::Result<(Vec<Value>, usize)> {
    let (mut events, mut pages, mut token) = (Vec::new(), 0, String::new());
    loop {
        let mut request = request.clone();
        request["pageToken"] = json!(token);
        let mut page = page(api, key, request).await?;
        pages += 1;
        events.append(page["events"].as_array_mut().context("no events")?);
        page["nextPageToken"].as_str().context("no token")?.clone_into(&mut token);
        assert_eq!(page["more"], !token.is_empty(), "{page}");
        if token.is_empty() {
            return Ok((events, pages));
        }
    }
}

/// How many lines there would be without the fold.
fn unfolded(events: &[Value]) -> anyhow::Result<i64> {
    let mut count = 0;
    for event in events {
        count += match &event["routine"]["lines"] {
            Value::String(lines) => lines.parse::<i64>()?,
            _ => 1,
        };
    }
    Ok(count)
}

fn moment(value: &Value) -> anyhow::Result<Timestamp> {
    Ok(value.as_str().context("no time")?.parse()?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_thousand_routine_events_are_read_a_bounded_number_per_call() -> TestResult {
    let api = Api::start("api_routine_bound").await?;
    let machine = observed(&api, 50_000, i64::MAX).await?;
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let mut statistics = api.database.server_url().parse::<PgConnectOptions>()?.connect().await?;
    let bound = i64::try_from(MAX_EVENTS_READ)?;
    let (mut calls, mut token, mut lines) = (0, String::new(), Vec::new());
    loop {
        let before = rows_read(&api, &mut statistics).await?;
        let request = json!({ "machine": machine, "limit": 1, "withoutRoutine": true, "pageToken": token });
        let mut page = page(&api, &viewer, request).await?;
        let read = rows_read(&api, &mut statistics).await? - before;
        assert!((1..=bound).contains(&read), "call {calls} read {read} rows, and may read {bound}");
        calls += 1;
        lines.append(page["events"].as_array_mut().context("no events")?);
        page["nextPageToken"].as_str().context("no token")?.clone_into(&mut token);
        if token.is_empty() {
            break;
        }
        assert!(calls < 100, "it makes no progress");
    }
    assert!(calls > 100_000 / bound, "{calls} calls");
    let [fold, oldest] = lines.as_slice() else { panic!("not two lines: {lines:?}") };
    let routine = &fold["routine"];
    assert_eq!((&routine["lines"], &routine["workItems"]), (&json!("100000"), &json!("50000")));
    assert_eq!(moment(&fold["occurredAt"])?, "2026-03-02T00:00:00.500Z".parse::<Timestamp>()?);
    assert_eq!(moment(&routine["lastAt"])?, "2026-03-02T06:56:40.250Z".parse::<Timestamp>()?);
    assert_eq!((&fold["event"], &oldest["event"]), (&json!("Routine"), &json!("Recorded")));
    statistics.close().await?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folded_pages_of_any_size_are_one_list_with_each_failure() -> TestResult {
    let api = Api::start("api_routine_pages").await?;
    let machine = observed(&api, 1_300, 7).await?;
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let request = |limit: i32, without_routine: bool| json!({ "machine": machine, "limit": limit, "withoutRoutine": without_routine });
    let (all, _) = all_pages(&api, &viewer, &request(500, false)).await?;
    assert_eq!((all.len(), unfolded(&all)?), (2_601, 2_601));
    let (folded, pages) = all_pages(&api, &viewer, &request(500, true)).await?;
    assert!(pages > 1, "the list is longer than a page");
    assert_eq!(unfolded(&folded)?, 2_601);
    // What is no routine is the same in both lists, in the same order.
    let others = |event: &&Value| event["detail"] != "nothing changed" && !event["routine"].is_object();
    let alone: Vec<&Value> = folded.iter().filter(others).collect();
    let failed = |events: &[&Value]| events.iter().filter(|event| event["event"] == "Failed").count();
    assert_eq!((failed(&alone), alone.len()), (1_300 / 7, 2 * (1_300 / 7) + 1), "each with its start");
    let fences: Vec<&Value> = alone.iter().map(|event| &event["fence"]).collect();
    let failures = all.iter().filter(|event| event["event"] == "Failed").map(|event| &event["fence"]);
    for fence in failures {
        assert_eq!(fences.iter().filter(|alone| **alone == fence).count(), 2, "{fence}");
    }
    for limit in [3, 37] {
        assert_eq!(all_pages(&api, &viewer, &request(limit, true)).await?.0, folded, "{limit}");
    }

    // A token belongs to one of the two lists.
    for without_routine in [true, false] {
        let token = page(&api, &viewer, request(3, without_routine)).await?["nextPageToken"].clone();
        let mut other = request(3, !without_routine);
        other["pageToken"] = token;
        let refused = api.call(Some(&viewer.token), "Machines/Timeline", other).await?;
        assert!(refused.code == 400 && refused.message().contains("not a page token"), "{refused:?}");
    }

    // The command prints the same lines, as one document.
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let name = machine.to_string();
    let printed = kim.json(&["timeline", &name, "--limit", "5000"])?;
    assert_eq!((&printed["events"], &printed["more"]), (&json!(folded), &json!(false)));
    let printed = kim.json(&["timeline", &name, "--all", "--limit", "5000"])?;
    assert_eq!(printed["events"], json!(all));
    let printed = kim.json(&["timeline", &name, "--limit", "501"])?;
    assert_eq!((&printed["events"], &printed["more"]), (&json!(folded[..501]), &json!(true)));
    Ok(api.stop().await?)
}

/// The rows and the differences of all pieces of a plan, and the total in its first piece.
async fn plan(api: &Api, key: &Key, request: Value) -> anyhow::Result<(Vec<Value>, Vec<Value>, i64)> {
    let pieces = api.call(Some(&key.token), "Plan/Get", request).await?.ok()?;
    let pieces = pieces.as_array().context("no pieces")?;
    let list = |name: &str| -> Vec<Value> {
        let parts = pieces.iter().filter_map(|piece| piece[name].as_array());
        parts.flatten().cloned().collect()
    };
    let total = pieces.first().and_then(|piece| piece["head"]["total"].as_str()).context("no total")?;
    Ok((list("rows"), list("differences"), total.parse()?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_folds_the_routine_of_all_machines_and_no_difference() -> TestResult {
    let api = Api::start("api_routine_plan").await?;
    for _ in 0..3 {
        provided(&api.pool).await?;
    }
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let request = |without_routine: bool| json!({ "horizon": "2h", "withoutRoutine": without_routine });
    let (all, _, all_total) = plan(&api, &viewer, request(false)).await?;
    let (folded, _, total) = plan(&api, &viewer, request(true)).await?;
    assert_eq!((all_total, total), (i64::try_from(all.len())?, i64::try_from(folded.len())?));
    assert_eq!(unfolded(&folded)?, all_total);
    let routine: Vec<&Value> = folded.iter().filter(|row| row["routine"].is_object()).collect();
    assert!(routine.len() == 1 && routine[0]["name"].is_null(), "{folded:?}");
    let (fold, updates) = (&routine[0]["routine"], all.iter().filter(|row| row["process"] == "Update"));
    assert_eq!((&fold["machines"], &fold["workItems"]), (&json!("3"), &json!(updates.count().to_string())));
    assert!(folded.len() > 1, "the takeovers are there: {folded:?}");

    let mut limited = request(true);
    limited["limit"] = json!(1);
    let (rows, _, limited_total) = plan(&api, &viewer, limited).await?;
    assert_eq!((rows.len(), limited_total), (1, total), "the limit counts folded lines");

    let differences = async |without_routine: bool| {
        let mut request = request(without_routine);
        request["configuration"] = json!("update_interval_stable = \"10m\"");
        plan(&api, &viewer, request).await
    };
    let (rows, found, total) = differences(true).await?;
    assert_eq!((rows.len(), found.len()), (0, usize::try_from(total)?));
    assert!(total > 3 && differences(false).await?.2 == total, "{total}");
    Ok(api.stop().await?)
}
