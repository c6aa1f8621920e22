//! Logs that operators read: `shepherdctl` calls one shepherd, and a real role server calls another one.

use std::io::Write as _;
use std::process::{Output, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::ids::MachineId;
use shepherd::model::time::Span;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::api::command_line::Operator;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::{self, Listener, until};
use crate::harness::program::PATIENCE;
use crate::roleserver::Machine;

/// A role server on a machine of the fleet, whose heartbeats this shepherd receives.
pub(super) async fn enrolled(api: &Api, listener: &Listener) -> Result<(MachineId, Arc<Machine>)> {
    let (machine, host) = callback::enrolled(listener, &api.pool, Machine::new).await?;
    let message = "SELECT count(*) FROM machine_agent_heartbeat";
    until("its first heartbeat arrives", || async { Ok(api.count(message).await? == 1) }).await?;
    Ok((machine, host))
}

fn format_output(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn json_of(output: &Output) -> Result<Value> {
    ensure!(output.status.success(), "{}", format_output(output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(
    clippy::too_many_lines,
    reason = "one machine and two shepherds, which get one request after the other"
)]
async fn log_of_a_machine_reaches_a_client_of_another_shepherd_than_its_agent_calls() -> TestResult {
    let api = Api::start("api_logs").await?;
    api.bmdb.change_policy("test", |policy| policy.heartbeat_interval = Span::seconds(1)).await?;
    let listener = Listener::start(&api.database, callback::settings(api.directory.path())?).await?;
    let (machine, host) = enrolled(&api, &listener).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let name = machine.to_string();

    let own = json_of(&kim.run_command(&["logs", &name, "roleserver", "-o", "json"]).await?)?;
    let lines: Vec<&str> =
        own["lines"].as_array().context("lines")?.iter().filter_map(Value::as_str).collect();
    assert!(lines.iter().any(|line| line.contains("heartbeat delivered")), "{lines:#?}");
    assert_eq!((&own["state"], &own["note"]), (&json!("ended"), &json!("")), "the last response of the API");

    // The output of a service, without control sequences; the last lines, and those of the last hour.
    let service = host.path().join("children/web_server");
    std::fs::create_dir_all(&service)?;
    let text = "2020-01-01T00:00:00Z old\n  its second line\n2999-01-01T00:00:00Z \u{1b}[31mred\u{1b}[0m\u{7}\nlast\n";
    std::fs::write(service.join("output.log"), text)?;
    let listed = kim.run_command(&["logs", &name]).await?;
    let listed = (format_output(&listed), listed.status.success());
    assert!(listed.1 && listed.0.contains("LOG"), "{listed:?}");
    let sizes: Vec<Vec<&str>> = listed.0.lines().map(|line| line.split_whitespace().collect()).collect();
    let size = text.len().to_string();
    assert!(sizes.iter().any(|line| line == &["web/server", &size, "B"]), "{sizes:?}");
    assert!(sizes.iter().any(|line| line[0] == "roleserver"), "{sizes:?}");
    for (arguments, expected) in [
        (&["--lines", "1"][..], "last\n"),
        (&["--since", "1h"], "2999-01-01T00:00:00Z red \nlast\n"),
        (&[], "2020-01-01T00:00:00Z old\n  its second line\n2999-01-01T00:00:00Z red \nlast\n"),
    ] {
        let output = kim.run_command(&[&["logs", &name, "web/server"], arguments].concat()).await?;
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", format_output(&output));
    }
    let direct = kim.direct(&["logs", &name, "web/server", "--lines", "1"])?;
    assert_eq!(direct, "last\n", "a request through the database reads the same log");

    // The error for an unknown log lists the known ones.
    for odd in ["web/other", "../../identity.pk8"] {
        let unknown = kim.run_command(&["logs", &name, odd]).await?;
        assert_eq!(unknown.status.code(), Some(3), "{}", format_output(&unknown));
        let expected = format!("this machine has no log {odd:?}; there are: roleserver, web/server");
        assert!(format_output(&unknown).contains(&expected), "{}", format_output(&unknown));
    }

    // Who may request logs, and what the audit records of it.
    let (viewer, operator) =
        (api.key(AccessRole::Viewer, &[], None).await?, api.key(AccessRole::Operator, &[], None).await?);
    let elsewhere = api.key(AccessRole::Operator, &["another"], None).await?;
    let asking = |key: &str| json!({ "machine": name, "log": "web/server", "order": order("a look", key) });
    assert_eq!(api.call(Some(&viewer.token), "Logs/Request", asking("1")).await?.code, 403);
    assert_eq!(api.call(Some(&elsewhere.token), "Logs/Request", asking("1")).await?.code, 404);
    let value = api.call(Some(&operator.token), "Logs/Request", asking("1")).await?.ok()?;
    let again = api.call(Some(&operator.token), "Logs/Request", asking("1")).await?.ok()?;
    assert_eq!((&again["requestId"], &again["order"]["replayed"]), (&value["requestId"], &json!(true)));
    let reading = json!({ "machine": name, "requestId": value["requestId"] });
    for (key, code) in [(&viewer, 403), (&elsewhere, 404)] {
        assert_eq!(api.call(Some(&key.token), "Logs/Read", reading.clone()).await?.code, code);
    }
    let foreign = kim.run_command(&["tokens", "create", "lee", "--role", "admin", "--reason", "r"]).await?;
    let lee = String::from_utf8(foreign.stdout)?;
    let refused = api.call(Some(lee.trim()), "Logs/Read", reading.clone()).await?;
    assert!(refused.message().contains("you have no such request"), "{refused:?}");
    until("it has come", || async {
        Ok(api.call(Some(&operator.token), "Logs/Read", reading.clone()).await?.ok()?["state"] == "ended")
    })
    .await?;
    // A reader that does not acknowledge the lines receives them again.
    let read = api.call(Some(&operator.token), "Logs/Read", reading.clone()).await?.ok()?;
    assert_eq!(read["lines"][3], "last", "{read}");
    let audited: (String, String) = sqlx::query_as(
        "SELECT reason, after->>'log' FROM audit WHERE credential_id = $1 AND rpc = 'shepherd.fleet.v1.Logs/Request'",
    )
    .bind(operator.id)
    .fetch_one(&api.pool)
    .await?;
    assert_eq!(audited, ("a look".to_owned(), "web/server".to_owned()));
    let dry = kim.run_command(&["logs", &name, "etcd", "--dry-run"]).await?;
    assert!(
        format_output(&dry).contains("without --dry-run:")
            && format_output(&dry).contains("gets the request for the log etcd"),
        "{}",
        format_output(&dry)
    );

    // Added lines arrive as they are written.
    let mut following = tokio::process::Command::from(kim.command(&[
        "logs",
        &name,
        "web/server",
        "--lines",
        "1",
        "--follow",
        "-o",
        "json",
    ]))
    .stdout(Stdio::piped())
    .kill_on_drop(true)
    .spawn()?;
    let mut shown = BufReader::new(following.stdout.take().context("no output")?).lines();
    for (number, expected) in ["last", "added", "and more"].into_iter().enumerate() {
        if number > 0 {
            let mut log = std::fs::OpenOptions::new().append(true).open(service.join("output.log"))?;
            writeln!(log, "{expected}")?;
        }
        let line = tokio::time::timeout(PATIENCE, shown.next_line()).await?;
        let line: Value = serde_json::from_str(&line?.context("it ended")?)?;
        assert_eq!(line["lines"], json!([expected]), "a response of the API");
    }
    // The role server is killed: the reader receives the reason as text.
    let agent = host.agent()?;
    agent.instance.send_signal(rustix::process::Signal::KILL)?;
    let ended = tokio::time::timeout(PATIENCE, following.wait()).await??;
    assert_eq!(ended.code(), Some(1), "its role server restarted");
    listener.stop().await?;
    Ok(api.stop().await?)
}
