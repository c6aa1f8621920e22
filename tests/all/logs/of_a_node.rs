//! The log of a service that a real node runs for its cluster, read through a shepherd.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;
use shepherd::bmdb::engine::fact_change::NewAgent;
use shepherd::model::time::Span;
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::enrolment::Enrolment;
use shepherd::roleserver::state_directory::StateDirectory;
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, provided, record_agent, settings, until};
use crate::harness::postgres::TestDatabase;
use crate::nodes::services::{declare, founded, until_well};

/// Writes a line, and then runs on.
fn chatty() -> wire::Service {
    let source = Some(wire::program::Source::Path("/bin/sh".to_owned()));
    let program = wire::Program { source, url: String::new() };
    wire::Service {
        name: "server".to_owned(),
        run: Some(wire::service::Run::Program(program)),
        arguments: vec!["-c".to_owned(), "echo served by $NODE; while :; do sleep 1; done".to_owned()],
        environment: [
            ("PATH".to_owned(), "/usr/bin:/bin".to_owned()),
            ("NODE".to_owned(), "{{node.id}}".to_owned()),
        ]
        .into(),
        user: "root".to_owned(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_of_a_service_is_read_through_a_shepherd() -> TestResult {
    let (owner, mut node) = founded().await?;
    let revision = declare(&owner, "web", &[chatty()]).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", revision).await?;
    node.stop().await?;

    // The same machine, as a shepherd knows it.
    let database = TestDatabase::create("nodes_logs").await?;
    let directory = tempfile::tempdir()?;
    let listener = Listener::start(&database, settings(directory.path())?).await?;
    let pool = database.pool().await?;
    listener.bmdb.change_policy("test", |policy| policy.heartbeat_interval = Span::seconds(1)).await?;
    let machine = provided(&pool).await?;
    let disk = node.disk();
    let state = StateDirectory::open(disk.parent().context("a disk")?)?;
    let identity = state.read_or_create_identity()?;
    let ways = AgentSettings::new(&listener.server.endpoints, &listener.server.current_ca_certificates(), 1);
    let ways = ways.map_err(anyhow::Error::msg)?;
    state.write_enrolment(&Enrolment {
        machine_id: machine,
        bmdb_id: Uuid::new_v4(),
        fences: [].into(),
        holders: [].into(),
        settings: ways.clone(),
        revision: 1,
    })?;
    let agent = NewAgent {
        public_key: identity.public_key().to_vec(),
        boot_id: None,
        version: "1".to_owned(),
        supervision: "external".to_owned(),
        fence: 1,
    };
    record_agent(&listener.bmdb, machine, agent).await?;
    node.start_program(Path::new(env!("CARGO_BIN_EXE_roleserver")), ways)?;
    until("its first heartbeat arrives", || async {
        let received: i64 =
            sqlx::query_scalar("SELECT count(*) FROM machine_agent_heartbeat").fetch_one(&pool).await?;
        Ok(received == 1)
    })
    .await
    .with_context(|| node.report())?;

    let (name, url) = (machine.to_string(), database.url().to_owned());
    let dialect = database.dialect().as_str();
    let ask = async |arguments: &[&str]| -> Result<Value> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
        command.args(["--direct", "--bmdb-dialect", dialect, "-o", "json", "logs", &name]).args(arguments);
        command.env("SHEPHERD_BMDB_URL", &url).env_remove("SHEPHERD_CONTEXT").env("USER", "kim");
        let output = tokio::process::Command::from(command).output().await?;
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let listed = ask(&[]).await?;
    let names: Vec<_> =
        listed["availableLogs"].as_array().context("logs")?.iter().map(|log| log["log"].clone()).collect();
    assert_eq!(names, ["roleserver", "etcd", "web/server"], "{listed}");
    let service = ask(&["web/server"]).await?;
    assert_eq!(service["lines"], serde_json::json!([format!("served by {}", node.id()?)]));
    // etcd writes times; all of its lines are younger than a day.
    let etcd = ask(&["etcd", "--since", "1d", "--lines", "5"]).await?;
    assert_eq!(
        (etcd["lines"].as_array().map(Vec::len), &etcd["note"]),
        (Some(5), &Value::from("")),
        "{etcd}"
    );
    // This role server's own lines are stored only by itself.
    let own = ask(&["roleserver", "--lines", "1000"]).await?;
    let adopted = |line: &Value| {
        line.as_str().is_some_and(|line| line.contains("a service that runs already was adopted"))
    };
    assert!(own["lines"].as_array().is_some_and(|lines| lines.iter().any(adopted)), "{own}");
    node.stop().await?;
    Ok(listener.stop().await?)
}
