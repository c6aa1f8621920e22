//! Watches: what they tell, and when they end.

use anyhow::Context as _;
use serde_json::json;
use shepherd::model::access::Role;
use shepherd::proto::fleet::v1::machines_client::MachinesClient;
use shepherd::proto::fleet::v1::watch_machines_response::What;
use shepherd::proto::fleet::v1::{MachineFilter, WatchMachinesRequest, WatchMachinesResponse};
use tokio_stream::StreamExt as _;
use tonic::{Code, Request, Status, Streaming};

use crate::api::{Api, Key, order};
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

async fn watch(
    api: &Api,
    key: &Key,
    request: WatchMachinesRequest,
) -> anyhow::Result<Streaming<WatchMachinesResponse>> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {}", key.token).parse()?);
    Ok(MachinesClient::new(api.channel(None).await?).watch(request).await?.into_inner())
}

async fn next(
    stream: &mut Streaming<WatchMachinesResponse>,
) -> anyhow::Result<Result<WatchMachinesResponse, Status>> {
    tokio::time::timeout(PATIENCE, stream.next())
        .await
        .context("the watch is silent")?
        .context("the watch ended")
}

/// The next machine that is told, as (id, reason); `None` for one that is gone.
async fn next_machine(
    stream: &mut Streaming<WatchMachinesResponse>,
) -> anyhow::Result<(String, Option<String>)> {
    loop {
        match next(stream).await??.what.context("something")? {
            What::Machine(machine) => {
                return Ok((machine.name.context("a name")?.machine, Some(machine.reason)));
            }
            What::Gone(machine) => return Ok((machine, None)),
            What::Quiet(_) => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_tells_what_there_is_then_what_changes_and_ends_with_its_credential() -> anyhow::Result<()> {
    let api = Api::start("api_watch").await?;
    let (admin, viewer) = (api.key(Role::Admin, &[], None).await?, api.key(Role::Viewer, &[], None).await?);
    let machine = provided(&api.pool).await?;
    let mut stream = watch(&api, &viewer, WatchMachinesRequest::default()).await?;
    let Some(What::Machine(first)) = next(&mut stream).await??.what else { anyhow::bail!("not a machine") };
    assert_eq!(first.name.context("a name")?.machine, machine.to_string());
    let quiet = next(&mut stream).await??;
    assert!(matches!(quiet.what, Some(What::Quiet(_))) && !quiet.resume.is_empty(), "{quiet:?}");

    let hold = json!({ "machine": machine, "order": order("a new disk", "k1") });
    api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    let (told, reason) = next_machine(&mut stream).await?;
    assert_eq!(told, machine.to_string());
    assert!(reason.context("a line")?.contains("held"));

    // Whoever resumes hears what changed since, and not what there is.
    let still = provided(&api.pool).await?;
    let resumed = WatchMachinesRequest { resume: quiet.resume, ..Default::default() };
    let mut second = watch(&api, &viewer, resumed).await?;
    assert_eq!(
        next_machine(&mut second).await?.0,
        machine.to_string(),
        "and not {still}, of which nothing is told"
    );

    let revoke = json!({ "credential": viewer.id, "order": order("left", "k2") });
    api.call(Some(&admin.token), "Credentials/Revoke", revoke).await?.ok()?;
    for stream in [&mut stream, &mut second] {
        let end = loop {
            if let Err(status) = next(stream).await? {
                break status;
            }
        };
        assert_eq!(end.code(), Code::Unauthenticated, "{end}");
    }
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_with_a_filter_tells_what_comes_and_goes() -> anyhow::Result<()> {
    let api = Api::start("api_watch_filter").await?;
    let (operator, machine) = (api.key(Role::Operator, &[], None).await?, provided(&api.pool).await?);
    let filter = MachineFilter { tags: vec!["hold".to_owned()], ..Default::default() };
    let mut stream =
        watch(&api, &operator, WatchMachinesRequest { filter: Some(filter), resume: String::new() }).await?;
    let first = next(&mut stream).await??;
    assert!(matches!(first.what, Some(What::Quiet(_))), "nothing is held yet: {first:?}");
    let hold = json!({ "machine": machine, "order": order("r", "1") });
    api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    assert!(next_machine(&mut stream).await?.1.is_some());
    let release = json!({ "machine": machine, "order": order("r", "2") });
    api.call(Some(&operator.token), "Machines/Release", release).await?.ok()?;
    assert_eq!(next_machine(&mut stream).await?, (machine.to_string(), None));
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_as_json_is_server_sent_events_and_the_server_ends_it_when_it_stops() -> anyhow::Result<()> {
    let api = Api::start("api_events").await?;
    let (viewer, machine) = (api.key(Role::Viewer, &[], None).await?, provided(&api.pool).await?);
    let response = api
        .http
        .post(api.url("/api/shepherd.fleet.v1.Machines/Watch"))
        .bearer_auth(&viewer.token)
        .json(&json!({}))
        .send()
        .await?;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let (mut events, mut text) = (response.bytes_stream(), String::new());
    while !text.contains("\"quiet\"") {
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
    stopping.await?
}
