//! Watches: what they deliver, and when they end.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde_json::json;
use shepherd::model::access::AccessRole;
use shepherd::model::time::Span;
use shepherd::proto::fleet::v1::machines_client::MachinesClient;
use shepherd::proto::fleet::v1::watch_machines_response::Event;
use shepherd::proto::fleet::v1::{WatchMachinesRequest, WatchMachinesResponse};
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};

use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

pub(super) async fn watch(
    api: &Api,
    key: &Key,
    request: WatchMachinesRequest,
) -> anyhow::Result<Streaming<WatchMachinesResponse>> {
    Ok(watch_on(api.channel(None).await?, key, request).await??)
}

/// Opens a watch over this connection. The error is the status with which it is rejected.
async fn watch_on(
    channel: Channel,
    key: &Key,
    request: WatchMachinesRequest,
) -> anyhow::Result<Result<Streaming<WatchMachinesResponse>, Status>> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {}", key.token).parse()?);
    Ok(MachinesClient::new(channel).watch(request).await.map(tonic::Response::into_inner))
}

pub(super) async fn next(
    stream: &mut Streaming<WatchMachinesResponse>,
) -> anyhow::Result<Result<WatchMachinesResponse, Status>> {
    tokio::time::timeout(PATIENCE, stream.next())
        .await
        .context("the watch is silent")?
        .context("the watch ended")
}

/// The next machine that the watch delivers, as (id, reason); `None` for a machine that is gone.
async fn next_machine(
    stream: &mut Streaming<WatchMachinesResponse>,
) -> anyhow::Result<(String, Option<String>)> {
    loop {
        match next(stream).await??.event.context("something")? {
            Event::Machine(machine) => {
                return Ok((machine.name.context("a name")?.machine, Some(machine.reason)));
            }
            Event::RemovedMachine(machine) => return Ok((machine, None)),
            Event::Bookmark(_) => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_tells_what_there_is_then_what_changes_and_ends_with_its_credential() -> TestResult {
    let api = Api::start("api_watch").await?;
    let (admin, viewer) =
        (api.key(AccessRole::Admin, &[], None).await?, api.key(AccessRole::Viewer, &[], None).await?);
    let machine = provided(&api.pool).await?;
    let mut stream = watch(&api, &viewer, WatchMachinesRequest::default()).await?;
    let Some(Event::Machine(first)) = next(&mut stream).await??.event else { panic!("not a machine") };
    assert_eq!(first.name.context("a name")?.machine, machine.to_string());
    let quiet = next(&mut stream).await??;
    assert!(matches!(quiet.event, Some(Event::Bookmark(_))) && !quiet.resume_token.is_empty(), "{quiet:?}");

    let hold = json!({ "machine": machine, "order": order("a new disk", "k1") });
    api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    let (text, reason) = next_machine(&mut stream).await?;
    assert_eq!(text, machine.to_string());
    assert!(reason.context("a line")?.contains("held"));

    // A client that resumes receives what changed since then, and not everything that exists.
    let still = provided(&api.pool).await?;
    let resumed = WatchMachinesRequest { resume_token: quiet.resume_token, ..Default::default() };
    let mut second = watch(&api, &viewer, resumed).await?;
    assert_eq!(
        next_machine(&mut second).await?.0,
        machine.to_string(),
        "and not {still}, which did not change"
    );

    let revoke = json!({ "credentialId": viewer.id, "order": order("left", "k2") });
    api.call(Some(&admin.token), "Credentials/Revoke", revoke).await?.ok()?;
    for stream in [&mut stream, &mut second] {
        let end = loop {
            if let Err(status) = next(stream).await? {
                break status;
            }
        };
        assert_eq!(end.code(), Code::Unauthenticated, "{end}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_ends_when_its_credential_expires_and_none_begins_after_that() -> TestResult {
    let api = Api::start("api_watch_expiry").await?;
    let short = api.key(AccessRole::Viewer, &[], Some(Span::minutes(5))).await?;
    let mut stream = watch(&api, &short, WatchMachinesRequest::default()).await?;
    assert!(matches!(next(&mut stream).await??.event, Some(Event::Bookmark(_))), "it has begun");
    api.database.advance(std::time::Duration::from_mins(6)).await?;
    let end = loop {
        if let Err(status) = next(&mut stream).await? {
            break status;
        }
    };
    assert_eq!(end.code(), Code::Unauthenticated, "{end}");
    let refused = watch_on(api.channel(None).await?, &short, WatchMachinesRequest::default()).await?;
    assert_eq!(refused.err().context("a watch began")?.code(), Code::Unauthenticated);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_with_a_selector_tells_what_comes_and_goes() -> TestResult {
    let api = Api::start("api_watch_filter").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let held = WatchMachinesRequest { selector: "fact=hold".to_owned(), resume_token: String::new() };
    let mut stream = watch(&api, &operator, held).await?;
    let first = next(&mut stream).await??;
    assert!(matches!(first.event, Some(Event::Bookmark(_))), "nothing is held yet: {first:?}");
    let hold = json!({ "machine": machine, "order": order("r", "1") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    assert!(next_machine(&mut stream).await?.1.is_some());
    let release = json!({ "machine": machine, "order": order("r", "2") });
    api.call(Some(&operator.token), "Machines/Release", release).await?.ok()?;
    assert_eq!(next_machine(&mut stream).await?, (machine.to_string(), None));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_goes_on_at_another_shepherd_when_its_own_stops() -> TestResult {
    let api = Api::start("api_watch_moves").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let still = provided(&api.pool).await?;
    let (other, stop) = api.another().await?;
    let mut stream =
        watch_on(api.channel_to(other.local_addr, None).await?, &operator, WatchMachinesRequest::default())
            .await??;
    let mut resume = String::new();
    while resume.is_empty() {
        resume = next(&mut stream).await??.resume_token;
    }
    stop.cancel();
    let end = loop {
        match next(&mut stream).await? {
            Ok(response) => resume = response.resume_token,
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    other.wait_until_stopped().await;

    let hold = json!({ "machine": machine, "order": order("while no watch was open", "k") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    let mut stream =
        watch(&api, &operator, WatchMachinesRequest { resume_token: resume, ..Default::default() }).await?;
    let (text, reason) = next_machine(&mut stream).await?;
    assert_eq!(text, machine.to_string(), "and not {still}, which did not change");
    assert!(reason.context("a line")?.contains("held"));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_resumes_tells_nothing_of_machines_that_its_credential_does_not_reach() -> TestResult {
    let api = Api::start("api_watch_scope").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let (ours, theirs) = (provided(&api.pool).await?, provided(&api.pool).await?);
    for statement in [
        "UPDATE machine_provided SET provider = 'other' WHERE machine_id = $1",
        "UPDATE machine_due SET provider = 'other' WHERE machine_id = $1",
    ] {
        sqlx::query(statement).bind(theirs.0).execute(&api.pool).await?;
    }
    let viewer = api.key(AccessRole::Viewer, &["rack"], None).await?;
    let mut stream = watch(&api, &viewer, WatchMachinesRequest::default()).await?;
    let mut resume = String::new();
    while resume.is_empty() {
        resume = next(&mut stream).await??.resume_token;
    }
    drop(stream);
    // The other provider's machine changes first, so it would be delivered first, as gone.
    for (machine, key) in [(theirs, "1"), (ours, "2")] {
        let hold = json!({ "machine": machine, "order": order("r", key) });
        api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    }
    let held = WatchMachinesRequest { selector: "fact=hold".to_owned(), resume_token: resume };
    let mut stream = watch(&api, &viewer, held.clone()).await?;
    assert!(matches!(next(&mut stream).await??.event, Some(Event::Bookmark(_))));
    assert_eq!(next_machine(&mut stream).await?.0, ours.to_string());
    assert!(matches!(next(&mut stream).await??.event, Some(Event::Bookmark(_))), "no other change arrives");
    // Our machine is released, and a watch of held machines delivers it as gone, although the watch began after the
    // release.
    let release = json!({ "machine": ours, "order": order("r", "3") });
    api.call(Some(&admin.token), "Machines/Release", release).await?.ok()?;
    let mut late = watch(&api, &viewer, held).await?;
    assert_eq!(next_machine(&mut late).await?, (ours.to_string(), None));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_have_a_bound_and_none_goes_on_after_long() -> TestResult {
    let api = Api::start_with("api_watch_bounds", |settings| settings.max_watches = 1).await?;
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let mut stream = watch(&api, &viewer, WatchMachinesRequest::default()).await?;
    let resume = next(&mut stream).await??.resume_token;
    let second = watch_on(api.channel(None).await?, &viewer, WatchMachinesRequest::default()).await?;
    assert_eq!(second.err().context("a second watch")?.code(), Code::ResourceExhausted);
    drop(stream);
    let end = std::time::Instant::now() + PATIENCE;
    let mut again = loop {
        let request = WatchMachinesRequest { resume_token: resume.clone(), ..Default::default() };
        match watch_on(api.channel(None).await?, &viewer, request).await? {
            Ok(stream) => break stream,
            Err(_) => assert!(std::time::Instant::now() < end, "the first watch never ends"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    assert!(matches!(next(&mut again).await??.event, Some(Event::Bookmark(_))));
    drop(again);
    api.database.advance(std::time::Duration::from_hours(2)).await?;
    let end = std::time::Instant::now() + PATIENCE;
    let refused = loop {
        let request = WatchMachinesRequest { resume_token: resume.clone(), ..Default::default() };
        match watch_on(api.channel(None).await?, &viewer, request).await? {
            Ok(mut stream) => break next(&mut stream).await?.err().context("it goes on")?,
            Err(_) => assert!(std::time::Instant::now() < end, "the first watch never ends"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_as_json_is_server_sent_events_and_the_server_ends_it_when_it_stops() -> TestResult {
    let api = Api::start("api_events").await?;
    let (viewer, machine) = (api.key(AccessRole::Viewer, &[], None).await?, provided(&api.pool).await?);
    let response = api
        .http
        .post(api.url("/api/shepherd.fleet.v1.Machines/Watch"))
        .bearer_auth(&viewer.token)
        .json(&json!({}))
        .send()
        .await?;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let (mut events, mut text) = (response.bytes_stream(), String::new());
    while !text.contains("\"bookmark\"") {
        let some = tokio::time::timeout(PATIENCE, events.next()).await?.context("the stream ended")??;
        text.push_str(std::str::from_utf8(&some)?);
    }
    let first =
        text.split("\n\n").next().and_then(|event| event.strip_prefix("data: ")).context("an event")?;
    let first: serde_json::Value = serde_json::from_str(first)?;
    assert_eq!(first["machine"]["name"]["machine"], machine.to_string());

    let stopping = tokio::spawn(api.stop());
    while let Some(some) = tokio::time::timeout(PATIENCE, events.next()).await? {
        text.push_str(std::str::from_utf8(&some?)?);
    }
    assert!(text.contains("event: error") && text.contains("resume at another one"), "{text}");
    Ok(stopping.await??)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_that_puts_off_a_timer_is_no_change() -> TestResult {
    let api = Api::start("api_watch_timer").await?;
    let operator = api.key(AccessRole::Operator, &[], None).await?;
    // Machines are delivered in the order of their ids: a wrong event of the first machine precedes the second one.
    let (one, two) = (provided(&api.pool).await?, provided(&api.pool).await?);
    let (beats, held) = if one.0 < two.0 { (one, two) } else { (two, one) };
    let run = async |statement: &'static str| {
        sqlx::query(statement).bind(beats.0).execute(&api.pool).await.map(drop)
    };
    run("UPDATE machine_due SET process = 'Recovery', timer = TRUE, ready_at = now() + INTERVAL '1 minute'
         WHERE machine_id = $1 AND lane = 'access'")
    .await?;
    let mut stream = watch(&api, &operator, WatchMachinesRequest::default()).await?;
    while !matches!(next(&mut stream).await??.event, Some(Event::Bookmark(_))) {}
    // The change that rearm_timers.sql makes, and a line of history, so that the watch reads the machine again.
    for statement in [
        "INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
         VALUES ($1, clock_timestamp(), 'b', 'i', 1)",
        "UPDATE machine_due SET ready_at = ready_at + INTERVAL '1 minute', version = version + 1
         WHERE machine_id = $1 AND timer",
        "INSERT INTO history (machine_id, at, event) VALUES ($1, clock_timestamp(), 'Noted')",
    ] {
        run(statement).await?;
    }
    let hold = json!({ "machine": held, "order": order("r", "k") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    assert_eq!(next_machine(&mut stream).await?.0, held.to_string(), "and not {beats}, which is healthy");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_credential_has_a_part_of_the_watches() -> TestResult {
    let api = Api::start_with("api_watch_share", |settings| settings.max_watches = 8).await?;
    let (greedy, other) =
        (api.key(AccessRole::Viewer, &[], None).await?, api.key(AccessRole::Viewer, &[], None).await?);
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(watch(&api, &greedy, WatchMachinesRequest::default()).await?);
    }
    let third = watch_on(api.channel(None).await?, &greedy, WatchMachinesRequest::default()).await?;
    let refused = third.err().context("a third watch")?;
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().contains("this credential"), "{refused}");
    streams.push(watch(&api, &other, WatchMachinesRequest::default()).await?);
    for stream in &mut streams {
        assert!(matches!(next(stream).await??.event, Some(Event::Bookmark(_))));
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_outlasts_a_database_that_is_too_busy_for_a_while() -> TestResult {
    let api = Api::start("api_watch_busy").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let mut stream = watch(&api, &operator, WatchMachinesRequest::default()).await?;
    while !matches!(next(&mut stream).await??.event, Some(Event::Bookmark(_))) {}

    let mut busy = api.pool.begin().await?;
    sqlx::raw_sql("SET LOCAL idle_in_transaction_session_timeout = 0; LOCK TABLE history")
        .execute(&mut *busy)
        .await?;
    let (mut given_up, end) = (BTreeSet::new(), std::time::Instant::now() + PATIENCE);
    // More failures than one read retries by itself, so the watch read again.
    while given_up.len() < 5 {
        assert!(std::time::Instant::now() < end, "no look is tried again: {given_up:?}");
        let waiting: Vec<String> = sqlx::query_scalar(
            "SELECT xact_start::TEXT FROM pg_stat_activity WHERE datname = current_database()
             AND application_name LIKE '% api' AND wait_event_type = 'Lock'",
        )
        .fetch_all(&api.pool)
        .await?;
        given_up.extend(waiting);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    busy.rollback().await?;

    let hold = json!({ "machine": machine, "order": order("r", "k") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    assert_eq!(next_machine(&mut stream).await?.0, machine.to_string());
    Ok(api.stop().await?)
}
