//! `shepherdctl` through the API: with a context that it made itself, and the same answers as from the
//! database.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::api::Api;
use crate::harness::callback::provided;

struct Operator<'a> {
    api: &'a Api,
    home: tempfile::TempDir,
}

impl Operator<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
        command.args(arguments).stdin(Stdio::null());
        for name in ["SHEPHERD_BMDB_URL", "SHEPHERD_CONTEXT", "SHEPHERD_CONTEXTS", "XDG_CONFIG_HOME"] {
            command.env_remove(name);
        }
        command.env("HOME", self.home.path()).env("USER", "kim").env("COLUMNS", "2000");
        command
    }

    /// Asks the current context's API.
    fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        told(&self.command(arguments).output()?)
    }

    /// Asks the database.
    fn direct(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let dialect = self.api.database.mode().dialect().as_str();
        let mut command = self.command(&[&["--direct", "--bmdb_dialect", dialect], arguments].concat());
        told(&command.env("SHEPHERD_BMDB_URL", self.api.database.url()).output()?)
    }

    fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.ask(&[arguments, &["-o", "json"]].concat())?)?)
    }
}

fn told(output: &Output) -> anyhow::Result<String> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout.clone())?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newcomer_bootstraps_a_context_and_gets_the_answers_that_the_database_gives() -> anyhow::Result<()> {
    let api = Api::start("api_shepherdctl").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let lost = kim.command(&["get", "machines"]).output()?;
    assert_eq!(lost.status.code(), Some(2));
    assert!(String::from_utf8(lost.stderr)?.contains("tokens bootstrap --save_context"));

    let said = kim.direct(&["tokens", "bootstrap", "--save_context", "home"])?;
    let token = kim.home.path().join(".config/shepherd/home.token");
    assert_eq!(std::fs::metadata(&token)?.permissions().mode() & 0o777, 0o600);
    let secret = std::fs::read_to_string(&token)?;
    assert!(!said.contains(secret.trim()), "the token is in its file: {said}");
    let again = kim.direct(&["tokens", "bootstrap", "--save_context", "home"]);
    assert!(again.is_err(), "a token is never written over");

    let held = kim.json(&["hold", &machine, "--reason", "a new disk", "--until", "2h"])?;
    assert_eq!(held["changed"], true);
    for arguments in [
        &["get", "machines", "-o", "json"][..],
        &["get", "machines", "--phase", "New", "-o", "json"],
        &["get", "providers", "-o", "json"],
        &["get", "work"],
        &["timeline", &machine, "-o", "json"],
        &["timeline", &machine],
        &["tokens", "get", "-o", "json"],
    ] {
        assert_eq!(kim.ask(arguments)?, kim.direct(arguments)?, "{arguments:?}");
    }
    let (mut through, mut straight): (Value, Value) = (
        kim.json(&["why", &machine])?,
        serde_json::from_str(&kim.direct(&["why", &machine, "-o", "json"])?)?,
    );
    for why in [&mut through, &mut straight] {
        // The moment it was asked at, and how long before that somebody did something.
        let fields = why.as_object_mut().context("an object")?;
        fields.remove("at");
        fields.remove("notes");
    }
    assert_eq!(through, straight);
    assert!(kim.ask(&["release", &machine])?.contains("is released"));
    assert!(kim.ask(&["retry", &machine])?.contains("has no failures to forget"));
    let unknown = kim.command(&["why", "no-such"]).output()?;
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
    assert!(
        kim.command(&["describe", "machine", &machine]).output()?.status.code() == Some(2),
        "it says so plainly"
    );

    let made = kim.json(&["tokens", "create", "lee", "--role", "viewer", "--reason", "lee is new"])?;
    let lees = made["token"].as_str().context("a token")?.to_owned();
    assert_eq!(api.call(Some(&lees), "Machines/List", serde_json::json!({})).await?.code, 200);
    let id = made["credential"].as_str().context("an id")?.to_owned();
    assert!(
        kim.ask(&["tokens", "revoke", &id, "--reason", "lee left"])?.contains("is good for nothing any more")
    );
    assert_eq!(api.call(Some(&lees), "Machines/List", serde_json::json!({})).await?.code, 401);
    let orders = api.count("SELECT count(*) FROM audit WHERE actor LIKE 'kim@%(token %'").await?;
    assert_eq!(orders, 5, "hold, release, retry, create, revoke");
    api.stop().await
}
