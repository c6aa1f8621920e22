//! Lists, and the API's description of itself.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use base64::Engine as _;
use serde_json::{Value, json};
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::connection::read_pool::ReadPool;
use shepherd::model::access::AccessRole;
use shepherd::model::time::{Timestamp, before};
use tokio_stream::StreamExt as _;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::api::command_line::Operator;
use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_give_each_machine_once_under_any_selector() -> TestResult {
    let api = Api::start("api_pages").await?;
    let operator = api.key(AccessRole::Operator, &[], None).await?;
    let mut machines = Vec::new();
    for _ in 0..11 {
        machines.push(provided(&api.pool).await?);
    }
    sqlx::query("UPDATE machine_provided SET location = 'north/7' WHERE machine_id = ANY ($1)")
        .bind(machines.iter().take(4).map(|machine| machine.0).collect::<Vec<_>>())
        .execute(&api.pool)
        .await?;
    let hold = json!({ "machine": machines[0], "order": order("r", "k") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    for (selector, expected) in [
        ("", 11),
        ("provider=rack", 11),
        ("provider=none", 0),
        ("location=north", 0),
        ("location=north*", 4),
        ("location in (south,north/7)", 4),
        ("location!=south", 4),
        ("fact=hold", 1),
        ("fact!=hold", 10),
        ("fact=hold,fact=quarantine", 0),
        ("fact in (hold,quarantine)", 1),
        ("fact=no_such_fact", 0),
        ("fact!=no_such_fact", 0),
        ("location=north*,fact=hold", 1),
        ("manufacturer=nobody", 0),
        ("cluster=*", 0),
        ("cluster!=prod", 11),
        ("memory>=0", 0),
    ] {
        let (mut found, mut token) = (Vec::new(), String::new());
        loop {
            let body = json!({ "selector": selector, "pageSize": 3, "pageToken": token });
            let page = api.call(Some(&operator.token), "Machines/List", body).await?.ok()?;
            let lines = page["machines"].as_array().context("a list")?;
            assert!(lines.len() <= 3);
            found.extend(lines.iter().map(|line| line["name"]["machine"].to_string()));
            token = page["nextPageToken"].as_str().context("a token")?.to_owned();
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(found.len(), expected, "{selector}");
        assert_eq!(found.len(), found.iter().collect::<BTreeSet<_>>().len(), "{selector} gives one twice");
    }
    sqlx::query("UPDATE machine_due SET phase_index = 'Retired' WHERE machine_id = $1")
        .bind(machines[0].0)
        .execute(&api.pool)
        .await?;
    for (body, expected) in [
        (json!({}), 11),
        (json!({ "omitRetired": true }), 10),
        (json!({ "omitRetired": true, "selector": "phase=retired" }), 1),
        (json!({ "omitRetired": true, "selector": "phase!=Ready" }), 10),
        (json!({ "omitRetired": true, "names": [machines[0]] }), 1),
    ] {
        let page = api.call(Some(&operator.token), "Machines/List", body.clone()).await?.ok()?;
        assert_eq!(page["machines"].as_array().map(Vec::len), Some(expected), "{body}");
    }
    for body in [
        json!({ "selector": "phase=Rady" }),
        json!({ "selector": "row=7" }),
        json!({ "selector": "fact=\"x; DROP TABLE audit\"" }),
        json!({ "selector": "a".repeat(64 << 10) }),
        json!({ "pageSize": 501 }),
        json!({ "pageToken": "x" }),
        json!({ "selector": "location=\u{0}" }),
    ] {
        assert_eq!(api.call(Some(&operator.token), "Machines/List", body.clone()).await?.code, 400, "{body}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn named_machines_are_listed_in_the_order_of_their_names() -> TestResult {
    let api = Api::start("api_named").await?;
    let (first, second) = (provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string());
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let elsewhere = api.key(AccessRole::Viewer, &["another"], None).await?;
    let list = async |key: &Key, names: &[&str]| {
        let page = api.call(Some(&key.token), "Machines/List", json!({ "names": names })).await?.ok()?;
        let machines = page["machines"].as_array().context("a list")?.iter();
        let machines: Vec<Value> = machines.map(|line| line["name"]["machine"].clone()).collect();
        anyhow::Ok((machines, page["unresolved"].clone()))
    };
    let unknown = "00000000-0000-4000-8000-000000000000";
    let (machines, unresolved) = list(&viewer, &[&second, unknown, &first, &second]).await?;
    assert_eq!(machines, [json!(second), json!(first)], "each once");
    assert_eq!((unresolved.as_array().map(Vec::len), &unresolved[0]["name"]), (Some(1), &json!(unknown)));
    let message = unresolved[0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("knows no machine"), "{unresolved}");
    let (machines, unresolved) = list(&elsewhere, &[&first]).await?;
    assert_eq!((machines, &unresolved[0]["name"]), (Vec::new(), &json!(first)), "it is out of scope");
    for body in [
        json!({ "names": [first, ""] }),
        json!({ "names": [first], "selector": "phase=Ready" }),
        json!({ "names": vec!["x"; 101] }),
    ] {
        assert_eq!(api.call(Some(&viewer.token), "Machines/List", body.clone()).await?.code, 400, "{body}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_gets_a_response() -> TestResult {
    let api = Api::start("api_answers").await?;
    let (admin, machine) = (api.key(AccessRole::Admin, &[], None).await?, provided(&api.pool).await?);
    sqlx::query(
        "INSERT INTO work_backoff VALUES ($1, 'AgentStart', 3, 1000, now() + INTERVAL '1 h', 'no route to host')",
    )
    .bind(machine.0)
    .execute(&api.pool)
    .await?;
    sqlx::query("UPDATE machine_due SET process = 'AgentStart', ready_at = now() WHERE machine_id = $1 AND lane = 'access'")
        .bind(machine.0)
        .execute(&api.pool)
        .await?;
    let ask = async |rpc: &str, body: Value| api.call(Some(&admin.token), rpc, body).await?.ok();
    let why = ask("Machines/Why", json!({ "machine": machine })).await?;
    assert_eq!(why["failures"][0]["cause"], "no route to host");
    assert!(why["advice"].as_array().is_some_and(|advice| !advice.is_empty()), "{why}");
    let got = ask("Machines/Get", json!({ "machine": machine })).await?;
    assert_eq!(got["facts"]["machine_provided"]["address"], "192.0.2.1");
    assert_eq!(got["backoffs"][0]["failures"], 3);
    let backoffs = ask("Backoffs/List", json!({ "pageSize": 1 })).await?;
    assert_eq!(backoffs["backoffs"][0]["name"]["machine"], machine.to_string());
    let due = ask("Schedule/List", json!({ "process": "AgentStart" })).await?;
    assert_eq!(due["due"][0]["name"]["machine"], machine.to_string());
    let sessions = ask("Sessions/List", json!({})).await?;
    assert_eq!(sessions["sessions"][0]["component"], "api");
    let shepherds = ask("Shepherds/List", json!({})).await?["shepherds"].clone();
    assert_eq!(shepherds.as_array().map(Vec::len), Some(1), "one process: {shepherds}");
    let components = json!([{ "component": "api", "sessions": "1" }]);
    assert_eq!((&shepherds[0]["components"], &shepherds[0]["workers"]), (&components, &json!("0")));
    assert_eq!(ask("Work/List", json!({})).await?["work"], json!([]));
    assert_eq!(ask("Providers/List", json!({})).await?["providers"], json!([]));
    assert_eq!(ask("Policy/Get", json!({})).await?["policy"]["recovery_silence_timeout"], "10m");
    let counts = ask("Statistics/Get", json!({})).await?;
    assert_eq!(counts["counts"][0]["machines"], "1");
    let timeline = ask("Machines/Timeline", json!({ "machine": machine })).await?;
    assert_eq!(timeline["more"], false);
    assert!(timeline["readAt"].is_string(), "{timeline}");
    // A hold that lasts longer than JSON can express leaves lists readable.
    let hold = json!({ "machine": machine, "expiresAfter": "90000000d", "order": order("for ever", "k") });
    api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    ask("Machines/List", json!({})).await?;
    ask("Machines/Get", json!({ "machine": machine })).await?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shepherd_gives_the_same_answer() -> TestResult {
    let api = Api::start("api_two").await?;
    let (other, stop) = api.another().await?;
    let (admin, machine) = (api.key(AccessRole::Admin, &[], None).await?, provided(&api.pool).await?);
    let hold = json!({ "machine": machine, "order": order("at one of them", "k") });
    let held =
        api.call_at(other.local_addr, Some(&admin.token), "Machines/Hold", hold.clone()).await?.ok()?;
    let again = api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    assert_eq!(
        (&again["replayed"], &again["auditId"]),
        (&json!(true), &held["auditId"]),
        "it was given to the other"
    );
    for (rpc, body) in [
        ("Machines/List", json!({})),
        ("Machines/Get", json!({ "machine": machine })),
        ("Machines/Why", json!({ "machine": machine })),
        ("Machines/Timeline", json!({ "machine": machine })),
        ("Work/List", json!({})),
        ("Schedule/List", json!({ "process": "AgentStart" })),
        ("Backoffs/List", json!({})),
        ("Providers/List", json!({})),
        ("Loops/List", json!({})),
        ("Approvals/List", json!({})),
        ("Budgets/List", json!({})),
        ("Clusters/List", json!({})),
        ("Clusters/Plan", json!({ "name": "fra", "controlPlane": 1 })),
        ("Policy/Get", json!({})),
        ("Statistics/Get", json!({})),
        ("Credentials/WhoAmI", json!({})),
        ("Credentials/List", json!({})),
        ("Audit/List", json!({})),
    ] {
        let mut answers = Vec::new();
        for server in [api.server.local_addr, other.local_addr] {
            let mut answer = api.call_at(server, Some(&admin.token), rpc, body.clone()).await?.ok()?;
            // The time of the request.
            let fields = answer.as_object_mut().context("an object")?;
            fields.remove("readAt");
            // They contain how long ago an event happened.
            fields.remove("notes");
            answers.push(answer);
        }
        assert_eq!(answers[0], answers[1], "{rpc}");
    }
    stop.cancel();
    other.wait_until_stopped().await;
    Ok(api.stop().await?)
}

/// Records of orders, by `ann` each minute before a moment, and one of `lee` before them.
const AUDIT: &str = "
    INSERT INTO audit (audit_id, at, actor, rpc, target, reason, request, dry_run, outcome, message)
    SELECT gen_random_uuid(), $1::TIMESTAMPTZ - n * INTERVAL '1 minute',
           CASE WHEN n = 20100 THEN 'lee@desk (token 7)' ELSE 'ann@desk' END,
           CASE WHEN n % 2 = 0 THEN 'shepherd.fleet.v1.Machines/Hold' ELSE 'shepherd.fleet.v1.Loops/Pause' END,
           'm', 'r' || n, decode('00', 'hex'), FALSE, 'changed', ''
    FROM generate_series(10, 20100) n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_is_filtered_by_actor_rpc_and_time() -> TestResult {
    let api = Api::start("api_audit_filters").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    // A moment of the database's clock, in whole seconds as the bounds are.
    let now: Timestamp =
        sqlx::query_scalar("SELECT date_trunc('second', clock_timestamp())").fetch_one(&api.pool).await?;
    sqlx::query(AUDIT).bind(now).execute(&api.pool).await?;
    let list = async |body: Value| -> anyhow::Result<(Vec<String>, String)> {
        let page = api.call(Some(&admin.token), "Audit/List", body).await?.ok()?;
        let records = page["records"].as_array().context("records")?;
        let reasons = records.iter().filter_map(|record| record["reason"].as_str().map(str::to_owned));
        Ok((reasons.collect(), page["nextPageToken"].as_str().unwrap_or_default().to_owned()))
    };
    let first = async |body: Value| -> anyhow::Result<Vec<String>> { Ok(list(body).await?.0) };
    for actor in ["ann", "ann@desk"] {
        assert_eq!(first(json!({ "pageSize": 2, "actor": actor })).await?, ["r10", "r11"], "{actor}");
    }
    assert_eq!(first(json!({ "pageSize": 2, "actor": "an" })).await?, [""; 0]);
    for rpc in ["Machines/Hold", "hold", "machines", "shepherd.fleet.v1.Machines/Hold"] {
        assert_eq!(first(json!({ "pageSize": 2, "rpc": rpc })).await?, ["r10", "r12"], "{rpc}");
    }
    assert_eq!(first(json!({ "pageSize": 2, "rpc": "Hol" })).await?, [""; 0]);
    let moment =
        |minutes: u64| before(now, Duration::from_mins(minutes)).format("%Y-%m-%dT%H:%M:%SZ").to_string();
    let bounds = json!({ "rpc": "pause", "since": moment(15), "before": moment(12) });
    assert_eq!(first(bounds).await?, ["r13", "r15"]);
    // The first moment belongs to the time, and the last one does not.
    let bounds = json!({ "rpc": "pause", "since": moment(15), "before": moment(11) });
    assert_eq!(first(bounds).await?, ["r13", "r15"]);

    // A page looks at 10,000 records. The next ones find what is older.
    let (mut found, mut token, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let (reasons, next) = list(json!({ "actor": "lee", "pageToken": token })).await?;
        found.extend(reasons);
        (token, pages) = (next, pages + 1);
        if token.is_empty() {
            break;
        }
    }
    assert_eq!((found, pages), (vec!["r20100".to_owned()], 3));
    for body in [json!({ "actor": "k\u{200b}im" }), json!({ "rpc": "x".repeat(600) })] {
        let refused = api.call(Some(&admin.token), "Audit/List", body).await?;
        assert_eq!(refused.code, 400, "{refused:?}");
    }
    let shown = kim.ask(&["audit", "--actor", "lee", "--no-headers"])?;
    assert!(shown.lines().count() == 1 && shown.contains("r20100"), "{shown}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_places_in_lists_are_refused_without_a_database_query() -> TestResult {
    let api = Api::start("api_odd_places").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let nil = uuid::Uuid::nil();
    for (rpc, list, place) in [
        ("Backoffs/List", "backoffs", format!("{nil} a\0")),
        ("Audit/List", "audit", format!("{} {nil}", i64::MIN)),
        ("Audit/List", "audit", format!("-200000000000000000 {nil}")),
        ("Credentials/List", "credentials", "x".to_owned()),
    ] {
        let token = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(format!("{list} {place}"));
        let refused = api.call(Some(&admin.token), rpc, json!({ "pageToken": token })).await?;
        assert_eq!(refused.code, 400, "{rpc} {place:?}: {refused:?}");
    }
    for machine in ["a\u{0}", "\u{fffd}/%00", &"x".repeat(301)] {
        let refused = api.call(Some(&admin.token), "Machines/Why", json!({ "machine": machine })).await?;
        assert!([400, 404].contains(&refused.code), "{machine:?}: {refused:?}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contracts_and_health_are_served_to_anybody() -> TestResult {
    let api = Api::start("api_contracts").await?;
    let channel = api.channel(None).await?;
    let health =
        HealthClient::new(channel.clone()).check(HealthCheckRequest { service: String::new() }).await?;
    assert_eq!(health.into_inner().status, 1, "serving");
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut streaming = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::once(ask))
        .await?
        .into_inner();
    let response = streaming.next().await.context("an answer")??.message_response;
    let Some(MessageResponse::ListServicesResponse(services)) = response else { panic!("{response:?}") };
    let names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    assert!(names.contains(&"shepherd.fleet.v1.Machines".to_owned()), "{names:?}");

    let document: Value = api.http.get(api.url("/openapi.json")).send().await?.json().await?;
    assert!(document["paths"].as_object().is_some_and(|paths| paths.len() > 15), "{document}");
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let plain =
        api.http.post(api.url("/api/shepherd.fleet.v1.Credentials/WhoAmI")).bearer_auth(&viewer.token);
    let plain = plain.body("{}").send().await?;
    assert_eq!(plain.status(), 400, "a body without the content type of JSON is rejected");
    let unknown = api.call(None, "Machines/Explode", json!({})).await?;
    assert_eq!(unknown.code, 404);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_anybody_may_open_end_with_the_server() -> TestResult {
    let api = Api::start("api_open_streams").await?;
    let channel = api.channel(None).await?;
    let whole = HealthCheckRequest { service: String::new() };
    let watched = HealthClient::new(channel.clone()).watch(whole).await;
    assert_eq!(watched.err().context("a refusal")?.code(), tonic::Code::Unimplemented);
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    // Sends one request, and then nothing more.
    let asking = tokio_stream::once(ask).chain(tokio_stream::pending());
    let mut streaming =
        ServerReflectionClient::new(channel).server_reflection_info(asking).await?.into_inner();
    streaming.next().await.context("an answer")??;
    api.stop.cancel();
    let end = streaming.next().await;
    assert!(end.is_none(), "it was cut off: {end:?}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_that_takes_too_long_is_retried() -> TestResult {
    let api = Api::start("api_looks").await?;
    let looks = ReadPool::connect(&api.bmdb, 1).await?;
    let tried = AtomicUsize::new(0);
    let silence: String = looks
        .read(move |tx| {
            let tried = tried.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                let statement = match tried {
                    // The database does not answer, as on a host without capacity.
                    0 => std::future::pending().await,
                    // Longer than the server permits for a statement.
                    1 => "SELECT pg_sleep(60)::TEXT",
                    _ => "SHOW idle_in_transaction_session_timeout",
                };
                let read = sqlx::query_scalar(statement).fetch_one(tx).await;
                read.map_err(|source| BmdbError::Statement { operation: "a test", source })
            })
        })
        .await?;
    assert_eq!(silence, "2500ms", "nor may a look say nothing for longer");
    looks.bmdb().close().await;
    Ok(api.stop().await?)
}
