//! Commands with a login to the database: the services run in the command's own process.

use std::collections::BTreeSet;
use std::fs;
use std::process::Stdio;

use anyhow::Context as _;
use serde_json::json;
use shepherd::model::access::AccessRole;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

use crate::api::command_line::Operator;
use crate::api::same_answers::populate;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

/// Inodes of the sockets that a process has open.
fn sockets_of(process: u32) -> anyhow::Result<BTreeSet<String>> {
    let mut inodes = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let target = fs::read_link(entry?.path())?;
        let target = target.to_string_lossy();
        inodes.extend(
            target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')).map(str::to_owned),
        );
    }
    Ok(inodes)
}

/// Inodes of the sockets in the network namespace of a process that listen (see proc(5), `/proc/pid/net`).
fn listening_sockets(process: u32) -> anyhow::Result<BTreeSet<String>> {
    let mut inodes = BTreeSet::new();
    for (table, state, listening, inode) in
        [("tcp", 3, "0A", 9), ("tcp6", 3, "0A", 9), ("unix", 3, "00010000", 6)]
    {
        for line in fs::read_to_string(format!("/proc/{process}/net/{table}"))?.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if fields.get(state) == Some(&listening) {
                inodes.insert((*fields.get(inode).context("an inode")?).to_owned());
            }
        }
    }
    Ok(inodes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_listens_on_no_socket_and_uses_one_database_connection() -> TestResult {
    let api = Api::start("api_in_process").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let dialect = api.database.dialect().as_str();
    let mut watch = kim.command(&["--direct", "--bmdb-dialect", dialect, "watch", "-o", "json"]);
    watch.env("SHEPHERD_BMDB_URL", api.database.url()).stdout(Stdio::piped());
    let mut watch = tokio::process::Command::from(watch).kill_on_drop(true).spawn()?;
    let mut lines = BufReader::new(watch.stdout.take().context("its output")?).lines();
    let line = timeout(PATIENCE, lines.next_line()).await??.context("a machine")?;
    assert!(line.contains(&machine), "{line}");

    let process = watch.id().context("it runs")?;
    let (open, listening) = (sockets_of(process)?, listening_sockets(process)?);
    assert!(!open.is_empty(), "the connection to the database is a socket");
    assert_eq!(open.intersection(&listening).count(), 0, "{open:?} {listening:?}");
    assert!(!listening.is_empty(), "the API server of this test listens");
    let connections = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND application_name LIKE 'shepherdctl%'";
    assert_eq!(api.count(connections).await?, 1, "one connection suffices");
    watch.kill().await?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_of_a_database_login_is_audited_under_the_user_without_a_credential() -> TestResult {
    let api = Api::start("api_database_login").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["hold", &machine, "--reason", "a new disk"])?;
    let (actor, credential): (String, Option<uuid::Uuid>) =
        sqlx::query_as("SELECT actor, credential_id FROM audit").fetch_one(&api.pool).await?;
    assert!(actor.starts_with("kim@"), "{actor}");
    assert_eq!(credential, None);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_login_learns_what_the_database_answered_and_a_client_does_not() -> TestResult {
    let api = Api::start("api_causes").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    sqlx::query("ALTER TABLE loop_pause RENAME TO loop_pause_moved").execute(&api.pool).await?;
    // `issues` is answered by a stream.
    for (command, rpc) in [(["get", "loops"].as_slice(), "Loops/List"), (&["issues"], "Issues/List")] {
        let direct = kim.direct(command).err().context("a table is missing")?.to_string();
        assert!(direct.contains("relation \"loop_pause\" does not exist"), "{direct}");
        let refused = api.call(Some(&admin.token), rpc, json!({})).await?;
        let refused = refused.json.to_string();
        assert!(refused.contains("its log says why") && !refused.contains("loop_pause"), "{refused}");
    }
    Ok(api.stop().await?)
}

/// A declaration within its limit of 60 KiB may be longer than that in JSON.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_with_a_file_that_json_makes_longer_can_be_declared() -> TestResult {
    let api = Api::start("api_long_role").await?;
    populate(&api).await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let file = json!({ "path": "long", "contents": "\n".repeat(55 << 10) });
    let service =
        json!({ "name": "server", "program": { "path": "/bin/true" }, "user": "root", "files": [file] });
    let body = json!({
        "name": "ams",
        "declaration": { "role": "front", "services": [service] },
        "order": order("a long file", "k"),
    });
    assert!(body.to_string().len() > 100 << 10, "it is longer than other requests may be");
    let done = api.call(Some(&admin.token), "Clusters/DeclareRole", body).await?.ok()?;
    assert_eq!(done["changed"], true, "{done}");
    Ok(api.stop().await?)
}
