//! `shepherdctl` through the API: with a context that it created itself, and with the same answers as from the
//! database. What it orders while responses are lost is carried out once.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use shepherd::cli::client::contexts::Contexts;
use shepherd::model::access::AccessRole;
use shepherd::model::time::Timestamp;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::api::{Api, pem};
use crate::harness::aloud::TestResult;
use crate::harness::callback::{provided, until};

pub(super) struct Operator<'a> {
    pub(super) api: &'a Api,
    pub(super) home: tempfile::TempDir,
}

impl Operator<'_> {
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
        command.args(arguments).stdin(Stdio::null());
        for name in ["SHEPHERD_BMDB_URL", "SHEPHERD_CONTEXT", "SHEPHERD_CONTEXTS", "XDG_CONFIG_HOME"] {
            command.env_remove(name);
        }
        command.env("HOME", self.home.path()).env("USER", "kim").env("COLUMNS", "2000");
        command
    }

    /// Calls the current context's API.
    pub(super) fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        read_stdout(&self.command(arguments).output()?)
    }

    /// Calls the current context's API without blocking the runtime.
    pub(super) async fn run_command(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        Ok(tokio::process::Command::from(self.command(arguments)).output().await?)
    }

    /// Runs the command against the database itself.
    pub(super) fn direct(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let dialect = self.api.database.dialect().as_str();
        let mut command = self.command(&[&["--direct", "--bmdb-dialect", dialect], arguments].concat());
        read_stdout(&command.env("SHEPHERD_BMDB_URL", self.api.database.url()).output()?)
    }

    /// The file of the contexts.
    pub(super) fn contexts(&self) -> PathBuf {
        self.home.path().join(".config/shepherd/contexts.toml")
    }

    /// Sets the servers of the context `home`.
    pub(super) fn reach(&self, servers: &[SocketAddr]) -> anyhow::Result<()> {
        let mut contexts = Contexts::read(&self.contexts())?;
        let home = contexts.contexts.get_mut("home").context("the context")?;
        home.servers = servers.iter().map(ToString::to_string).collect();
        Ok(contexts.write(&self.contexts())?)
    }

    /// Gives an order over a connection that loses its response: the connection is cut once `carried_out` counts
    /// `lines`.
    async fn order_and_lose_the_answer(
        &self,
        line: Lossy,
        arguments: &[&str],
        (carried_out, lines): (&'static str, i64),
    ) -> anyhow::Result<Output> {
        let child = tokio::process::Command::from(self.command(arguments))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        until("the order was carried out", || async { Ok(self.api.count(carried_out).await? == lines) })
            .await?;
        line.cut.send(()).map_err(|()| anyhow::anyhow!("the line ended by itself"))?;
        Ok(child.wait_with_output().await?)
    }

    pub(super) fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.ask(&[arguments, &["-o", "json"]].concat())?)?)
    }
}

/// An answer without the line that says when it was read.
fn without_read_time(answer: &str) -> Vec<String> {
    answer.lines().filter(|line| !line.contains("\"readAt\": ")).map(str::to_owned).collect()
}

/// The table without its first column.
fn without_first_column(table: &str) -> Vec<String> {
    let rest =
        |line: &str| line.split_once(' ').map_or_else(String::new, |(_, rest)| rest.trim_start().into());
    table.lines().map(rest).collect()
}

/// A proxy in front of a server. Over its first connection the server receives everything, but the client receives
/// nothing more once it has sent application data under TLS. Later connections work.
struct Lossy {
    address: SocketAddr,
    /// Ends the first connection.
    cut: oneshot::Sender<()>,
}

impl Lossy {
    async fn to(server: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (cut, is_cut) = oneshot::channel();
        tokio::spawn(lose_the_first(listener, server, is_cut));
        Ok(Self { address, cut })
    }
}

async fn lose_the_first(
    listener: TcpListener,
    server: SocketAddr,
    is_cut: oneshot::Receiver<()>,
) -> std::io::Result<()> {
    let (client, _) = listener.accept().await?;
    tokio::select! {
        _ = forward_without_answers(client, server) => {}
        _ = is_cut => {}
    }
    loop {
        let (mut client, _) = listener.accept().await?;
        tokio::spawn(async move {
            let mut upstream = TcpStream::connect(server).await?;
            tokio::io::copy_bidirectional(&mut client, &mut upstream).await
        });
    }
}

async fn forward_without_answers(client: TcpStream, server: SocketAddr) -> std::io::Result<()> {
    let (mut client_reads, mut client_writes) = client.into_split();
    let (mut server_reads, mut server_writes) = TcpStream::connect(server).await?.into_split();
    let deaf = AtomicBool::new(false);
    let up = async {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let length = client_reads.read(&mut bytes).await?;
            if speaks(&bytes[..length]) {
                deaf.store(true, Ordering::SeqCst);
            }
            if length == 0 {
                // A client that disconnects first gets no response either.
                return std::future::pending::<std::io::Result<()>>().await;
            }
            server_writes.write_all(&bytes[..length]).await?;
        }
    };
    let down = async {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let length = server_reads.read(&mut bytes).await?;
            if length == 0 {
                return std::future::pending::<std::io::Result<()>>().await;
            }
            if !deaf.load(Ordering::SeqCst) {
                client_writes.write_all(&bytes[..length]).await?;
            }
        }
    };
    tokio::try_join!(up, down).map(|((), ())| ())
}

/// Whether one of these records of TLS is encrypted. The first encrypted record of a client shows that it trusts the
/// server.
fn speaks(mut records: &[u8]) -> bool {
    while let [kind, _, _, high, low, rest @ ..] = records {
        if *kind == 23 {
            return true;
        }
        records = rest.get(usize::from(u16::from_be_bytes([*high, *low]))..).unwrap_or_default();
    }
    false
}

/// The command, which Ctrl-C ends: a test may have been started where the signal is ignored.
pub(super) fn interruptible(command: &Command) -> Command {
    let mut interruptible = Command::new("env");
    interruptible.arg("--default-signal=INT").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => interruptible.env(name, value),
            None => interruptible.env_remove(name),
        };
    }
    interruptible
}

pub(super) fn read_stdout(output: &Output) -> anyhow::Result<String> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout.clone())?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn newcomer_bootstraps_a_context_and_gets_the_answers_that_the_database_gives() -> TestResult {
    let api = Api::start("api_shepherdctl").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let lost = kim.command(&["get", "machines"]).output()?;
    assert_eq!(lost.status.code(), Some(2));
    assert!(String::from_utf8(lost.stderr)?.contains("tokens bootstrap --save-context"));

    let output = kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let token = kim.home.path().join(".config/shepherd/home.token");
    assert_eq!(std::fs::metadata(&token)?.permissions().mode() & 0o777, 0o600);
    let secret = std::fs::read_to_string(&token)?;
    assert!(!output.contains(secret.trim()), "the token is in its file: {output}");
    let again = kim.direct(&["tokens", "bootstrap", "--save-context", "home"]);
    assert!(again.is_err(), "a token is never written over");

    let paused = kim.ask(&["loops", "pause", "updater", "--reason", "a new list", "--until", "2h"])?;
    assert!(paused.starts_with("the updater is paused for 2h00m (until "), "{paused}");
    assert!(kim.ask(&["get", "loops"])?.contains("a new list"));
    assert!(kim.ask(&["label", &machine, "row=7"])?.contains("is labelled row=7"));
    assert!(kim.ask(&["get", "machines", "--label", "row=7"])?.contains("row=7"));
    let unsure = kim.command(&["quarantine", "--label", "row=7", "--reason", "a fan"]).output()?;
    let text = String::from_utf8(unsure.stderr)?;
    assert!(unsure.status.code() == Some(2) && text.contains("give --yes-count 1"), "{text}");
    let wrong =
        kim.command(&["quarantine", "--label", "row", "--reason", "a fan", "--yes-count", "2"]).output()?;
    assert!(String::from_utf8(wrong.stderr)?.contains("the selector matches 1 machine, and 2 were expected"));
    let done = kim.ask(&["quarantine", "--label", "row", "--reason", "a fan", "--yes-count", "1"])?;
    assert!(done.contains("is quarantined until") && done.contains("1 machine: 1 changed"), "{done}");
    let done = kim.direct(&["release", "--fact", "quarantine", "--quarantine", "--yes-count", "1"])?;
    assert!(done.contains("is not quarantined any more"), "{done}");
    assert!(kim.ask(&["label", &machine, "row-"])?.contains("has no label any more"));
    let held = kim.json(&["hold", &machine, "--reason", "a new disk", "--until", "2h"])?;
    assert_eq!(held["changed"], true);
    for arguments in [
        &["get", "machines", "-o", "json"][..],
        &["get", "machines", "--phase", "New", "-o", "json"],
        &["get", "providers", "-o", "json"],
        &["get", "work"],
        &["get", "loops", "-o", "json"],
        &["timeline", &machine, "-o", "json"],
        &["get", "tokens", "-o", "json"],
    ] {
        let (through, straight) =
            (without_read_time(&kim.ask(arguments)?), without_read_time(&kim.direct(arguments)?));
        assert_eq!(through, straight, "{arguments:?}");
    }
    // The first column is the age at the time of reading.
    let timeline = ["timeline", machine.as_str()];
    let (through, straight) = (kim.ask(&timeline)?, kim.direct(&timeline)?);
    assert!(through.starts_with("AGE "), "{through}");
    assert_eq!(without_first_column(&through), without_first_column(&straight));
    let (mut through, mut straight): (Value, Value) = (
        kim.json(&["why", &machine])?,
        serde_json::from_str(&kim.direct(&["why", &machine, "-o", "json"])?)?,
    );
    for why in [&mut through, &mut straight] {
        // The time of the request, and how long before it an event happened.
        let fields = why.as_object_mut().context("an object")?;
        fields.remove("readAt");
        fields.remove("notes");
    }
    assert_eq!(through, straight);
    assert!(kim.ask(&["release", &machine])?.contains("is released"));
    assert!(
        kim.ask(&["loops", "resume", "updater"])?.starts_with("the updater is resumed (was paused by kim@")
    );
    let in_vain = kim.command(&["retry", &machine]).output()?;
    assert_eq!(in_vain.status.code(), Some(1), "it waits for something else: {in_vain:?}");
    assert!(String::from_utf8(in_vain.stdout)?.contains("has no failures to clear"));
    let unknown = kim.command(&["why", "no-such"]).output()?;
    assert_eq!(unknown.status.code(), Some(3), "{unknown:?}");
    let alone = kim.command(&["declare", "restored", "--reason", "r"]).output()?;
    assert_eq!(alone.status.code(), Some(2), "it says so plainly: {alone:?}");

    let made = kim.json(&["tokens", "create", "lee", "--role", "viewer", "--reason", "lee is new"])?;
    let lees = made["token"].as_str().context("a token")?.to_owned();
    assert_eq!(api.call(Some(&lees), "Machines/List", serde_json::json!({})).await?.code, 200);
    assert!(
        kim.ask(&["tokens", "revoke", "lee", "--reason", "lee left"])?
            .contains("is good for nothing any more")
    );
    assert_eq!(api.call(Some(&lees), "Machines/List", serde_json::json!({})).await?.code, 401);
    let orders = api.count("SELECT count(*) FROM audit WHERE actor LIKE 'kim@%(token %'").await?;
    // Pause and resume; two changes of labels; of the quarantine a dry run with the machine, a rejection, its head row and
    // the machine; hold, release, retry, create, revoke.
    assert_eq!(orders, 14);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_revoked_by_what_the_list_prints() -> TestResult {
    let api = Api::start("api_token_names").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save-context", "home"])?;
    let create = |name: &'static str| ["tokens", "create", name, "--role", "viewer", "--reason", "is new"];
    let id = kim.json(&create("lee"))?["credential"]["credentialId"].as_str().context("an id")?.to_owned();
    let unknown = kim.command(&["tokens", "revoke", "lea", "--reason", "lee left"]).output()?;
    assert_eq!(unknown.status.code(), Some(3), "{unknown:?}");
    let sentence = String::from_utf8(unknown.stderr)?;
    assert!(sentence.contains("there is no token \"lea\""), "{sentence}");
    let printed = kim.ask(&["get", "tokens", "lee", "-o", "name"])?;
    assert_eq!(printed.trim(), id);
    for name in [printed.trim(), "lee", &id[..23]] {
        let revoked = kim.ask(&["tokens", "revoke", name, "--reason", "lee left"])?;
        assert!(revoked.starts_with(&id), "{name}: {revoked}");
    }
    // Two tokens of one name that are valid are ambiguous, and none of them is revoked.
    for _ in 0..2 {
        kim.ask(&create("max"))?;
    }
    let ambiguous = kim.command(&["tokens", "revoke", "max", "--reason", "max left"]).output()?;
    assert_eq!(ambiguous.status.code(), Some(3), "{ambiguous:?}");
    let sentence = String::from_utf8(ambiguous.stderr)?;
    assert!(sentence.contains("\"max\" fits more than one token; give one of: "), "{sentence}");
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE revoked_at IS NOT NULL").await?, 1);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_expires_at_the_time_or_after_the_duration_of_until() -> TestResult {
    let api = Api::start("api_token_until").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--until", "90d", "--save-context", "home"])?;
    let create =
        |name, until| ["tokens", "create", name, "--role", "viewer", "--reason", "is new", "--until", until];
    let moment = Timestamp::from(std::time::SystemTime::now() + std::time::Duration::from_hours(48));
    let moment = moment.format("%Y-%m-%dT%H:%M:%SZ").to_string();
    kim.ask(&create("lee", &moment))?;
    kim.ask(&create("max", "2h"))?;
    let expires_at = |name: &str| -> anyhow::Result<Timestamp> {
        let found = kim.json(&["get", "token", name])?;
        Ok(found["expiresAt"].as_str().context("an end")?.parse()?)
    };
    let expected: Timestamp = moment.parse()?;
    let late = expected - expires_at("lee")?;
    assert!(late.num_seconds().abs() <= 60, "{late}");
    assert!(expires_at("max")? < expected && expires_at("kim")? > expected);
    for (until, part) in [
        ("2020-01-01T00:00:00Z", "is over; nothing was changed"),
        ("2999-01-01T00:00:00Z", "longer than ten years"),
        ("9999d", "longer than ten years"),
        ("soon", "--until \"soon\" is neither a duration"),
    ] {
        let refused = kim.command(&create("ned", until)).output()?;
        assert_eq!(refused.status.code(), Some(2), "{until}: {refused:?}");
        let sentence = String::from_utf8(refused.stderr)?;
        assert!(sentence.contains(part), "{until}: {sentence}");
    }
    assert_eq!(api.count("SELECT count(*) FROM access_credential").await?, 3);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_code_follows_from_the_outcome_through_the_api_and_directly() -> TestResult {
    let api = Api::start("api_exit_codes").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let dialect = api.database.dialect().as_str();
    for source in [&[][..], &["--direct", "--bmdb-dialect", dialect]] {
        for (line, expected) in [
            ("quarantine M --reason fan", 0),
            ("quarantine M --reason fan", 0),
            ("release M", 1),
            ("release M --dry-run", 1),
            ("release --provider rack --dry-run", 1),
            ("release --provider rack --yes-count 1", 1),
            ("release --provider rack --yes-count 2", 4),
            ("release --provider rack --yes-count 2 --dry-run", 4),
            ("release --provider nobody --yes-count 0", 3),
            ("release --provider nobody", 3),
            ("release --provider nobody --dry-run", 3),
            // The last word is empty, as of a variable that is not set.
            ("release --yes-count 1 --provider ", 2),
            ("release --yes-count 1", 2),
            ("release M --quarantine", 0),
            ("release M --quarantine", 0),
            ("hold M --reason disk --until 2020-01-01T00:00:00Z", 2),
            ("hold --provider rack --yes-count 1 --reason disk --until 2020-01-01T00:00:00Z", 2),
            ("hold --provider rack --dry-run --reason disk --until 2020-01-01T00:00:00Z", 2),
            ("hold M", 2),
            ("hold no-such --reason disk", 3),
            ("cluster delete nowhere --reason over", 3),
            ("update abort nothing --reason over", 3),
            ("allow host-key M --fingerprint SHA256:abc --reason new", 3),
            ("get machine M", 0),
            ("get machine M nobody", 3),
            ("get machine nobody", 3),
            ("describe machine nobody", 3),
            ("describe cluster nowhere", 3),
            ("get token nobody", 3),
            ("get artefact nothing", 3),
            ("get update nothing", 3),
            ("describe update nothing", 3),
            ("describe context nowhere", 3),
            ("describe context home", 0),
            ("contexts use nowhere", 3),
            ("contexts delete nowhere", 3),
            ("contexts use ", 2),
            ("contexts delete ", 2),
            ("get machines --context ", 2),
            ("whoami", 0),
            ("version", 0),
            ("get nodes", 2),
            ("get machine M --phase New", 2),
            ("get machines --context nowhere", if source.is_empty() { 3 } else { 2 }),
            ("issues", 0),
        ] {
            let words = line.split(' ').map(|word| if word == "M" { machine.as_str() } else { word });
            let mut command = kim.command(&[source, &words.collect::<Vec<_>>()[..]].concat());
            if !source.is_empty() {
                command.env("SHEPHERD_BMDB_URL", api.database.url());
            }
            let output = command.output()?;
            assert_eq!(output.status.code(), Some(expected), "{source:?} {line}: {output:?}");
        }
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_of_json_output_is_one_object() -> TestResult {
    let api = Api::start("api_json_errors").await?;
    let machine = provided(&api.pool).await?.to_string();
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    for (line, code, status, exit) in [
        ("why nobody", 404, "NOT_FOUND", 3),
        ("get machine nobody", 404, "NOT_FOUND", 3),
        ("get machine M nobody", 404, "NOT_FOUND", 3),
        ("get machines nobody nowhere -w", 404, "NOT_FOUND", 3),
        ("get clusters nobody nowhere -w", 404, "NOT_FOUND", 3),
        ("wait machines nobody nowhere --for healthy", 404, "NOT_FOUND", 3),
        ("wait updates nobody nowhere --for finished", 404, "NOT_FOUND", 3),
        ("wait machines M --for ready", 400, "INVALID_ARGUMENT", 2),
        ("get machines -l row=7", 400, "INVALID_ARGUMENT", 2),
        ("update abort nothing --reason over", 400, "FAILED_PRECONDITION", 3),
        ("contexts use nowhere", 404, "NOT_FOUND", 3),
        ("explain nowhere", 404, "NOT_FOUND", 3),
        ("get nodes", 400, "INVALID_ARGUMENT", 2),
        ("hold M", 400, "INVALID_ARGUMENT", 2),
    ] {
        let words = line.split(' ').map(|word| if word == "M" { machine.as_str() } else { word });
        let words: Vec<&str> = words.chain(["-o", "json"]).collect();
        let output = kim.run_command(&words).await?;
        let stderr = String::from_utf8(output.stderr)?;
        let found: Value = serde_json::from_str(&stderr).with_context(|| format!("{line}: {stderr}"))?;
        let error = &found["error"];
        assert_eq!((&error["code"], &error["status"]), (&code.into(), &status.into()), "{line}: {found}");
        assert!(error["message"].is_string() && error["details"].is_array(), "{line}: {found}");
        assert_eq!(output.status.code(), Some(exit), "{line}: {found}");
        assert_eq!(found["exitCode"], exit, "{line}");
    }
    // It is the error of the API.
    let output = kim.run_command(&["why", "nobody", "-o", "json"]).await?;
    let shown: Value = serde_json::from_slice(&output.stderr)?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let answer =
        api.call(Some(&admin.token), "Machines/Why", serde_json::json!({ "machine": "nobody" })).await?;
    assert_eq!(shown["error"], answer.json["error"]);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_whose_answer_was_lost_is_carried_out_once_and_answered() -> TestResult {
    let api = Api::start("api_lost_answers").await?;
    let machine = provided(&api.pool).await?.to_string();
    let (another, stop_another) = api.another().await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;

    // The first shepherd's response is lost, and the second one knows the order.
    let holds = "SELECT count(*) FROM audit WHERE rpc LIKE '%Machines/Hold'";
    let line = Lossy::to(api.server.local_addr).await?;
    let address = line.address;
    kim.reach(&[address, another.local_addr])?;
    let held =
        kim.order_and_lose_the_answer(line, &["hold", &machine, "--reason", "a disk"], (holds, 1)).await?;
    let (text, progress) = (read_stdout(&held)?, String::from_utf8(held.stderr)?);
    assert!(text.contains("held"), "{text}");
    let begun = format!("shepherdctl: no response from {address} (");
    assert!(progress.starts_with(&begun) && progress.contains("repeating the order"), "{progress}");
    assert_eq!(api.count(holds).await?, 1);

    // A token in a lost response belongs to nobody: it is revoked, and another one is created.
    let made = "SELECT count(*) FROM access_credential WHERE name = 'lee'";
    let line = Lossy::to(api.server.local_addr).await?;
    kim.reach(&[line.address])?;
    let create = ["tokens", "create", "lee", "--role", "viewer", "--reason", "lee is new"];
    let created = kim.order_and_lose_the_answer(line, &create, (made, 1)).await?;
    let token = read_stdout(&created)?;
    let progress = String::from_utf8(created.stderr)?;
    assert!(progress.contains(" was lost; the token is revoked, and another one is created"), "{progress}");
    assert_eq!(api.call(Some(token.trim()), "Machines/List", serde_json::json!({})).await?.code, 200);
    assert_eq!(api.count(made).await?, 2);
    let good = "SELECT count(*) FROM access_credential WHERE name = 'lee' AND revoked_at IS NULL";
    assert_eq!(api.count(good).await?, 1);

    stop_another.cancel();
    another.wait_until_stopped().await;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_is_made_to_be_used_anywhere_or_not_at_all() -> TestResult {
    let api = Api::start("api_contexts").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let bootstrap = |name: &'static str| {
        let dialect = api.database.dialect().as_str();
        let mut command = kim.command(&[
            "--direct",
            "--bmdb-dialect",
            dialect,
            "tokens",
            "bootstrap",
            "--save-context",
            name,
        ]);
        command.env("SHEPHERD_BMDB_URL", api.database.url());
        command
    };
    let tokens = "SELECT count(*) FROM access_credential";

    // A path that cannot be written is an error before a token exists.
    std::fs::create_dir_all(kim.contexts().parent().context("a directory")?)?;
    std::fs::write(kim.contexts(), "no contexts")?;
    let refused = bootstrap("home").output()?;
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(api.count(tokens).await?, 0);
    std::fs::remove_file(kim.contexts())?;

    let elsewhere = tempfile::tempdir()?;
    let made = bootstrap("home").args(["--output-file", "a.token"]).current_dir(elsewhere.path()).output()?;
    read_stdout(&made)?;
    let home = Contexts::read(&kim.contexts())?.contexts["home"].clone();
    assert!(home.token_path.is_absolute() && home.token_path.ends_with("a.token"), "{home:?}");
    kim.ask(&["get", "machines"])?;

    // The environment names a context for every command. `--direct` is given for this one command.
    let direct = |arguments: &[&str]| {
        let mut command = kim.command(&["--direct", "get", "machines"]);
        command.args(arguments).args(["--bmdb-dialect", api.database.dialect().as_str()]);
        command.env("SHEPHERD_BMDB_URL", api.database.url()).env("SHEPHERD_CONTEXT", "home").output()
    };
    read_stdout(&direct(&[])?)?;
    let both = direct(&["--context", "home"])?;
    assert_eq!(both.status.code(), Some(2));
    assert!(String::from_utf8(both.stderr)?.contains("give only one of them"));

    // Servers that publish no authority are verified against the trust store of this host.
    let publish_none = "UPDATE session SET runtime_info = runtime_info || '{\"ca_certificates\": []}'::JSONB \
                        WHERE component = 'api'";
    assert_eq!(sqlx::query(publish_none).execute(&api.pool).await?.rows_affected(), 1);
    read_stdout(&bootstrap("bare").output()?)?;
    assert_eq!(Contexts::read(&kim.contexts())?.contexts["bare"].ca_certificate_path, None);
    assert!(!kim.home.path().join(".config/shepherd/bare.ca.pem").exists());
    let trusted = kim.home.path().join("trusted.pem");
    std::fs::write(&trusted, pem(api.server.ca_certificates.first().context("a CA")?))?;
    let ask = |trusted: &std::path::Path| {
        let mut command = kim.command(&["get", "machines", "--context", "bare"]);
        command.env_remove("SSL_CERT_DIR").env("SSL_CERT_FILE", trusted).output()
    };
    read_stdout(&ask(&trusted)?)?;
    std::fs::write(&trusted, "")?;
    let untrusted = ask(&trusted)?;
    assert_eq!(untrusted.status.code(), Some(2), "{untrusted:?}");
    assert!(String::from_utf8(untrusted.stderr)?.contains("this host's own trust store is empty"));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_listed_to_their_end_however_much_each_says() -> TestResult {
    let api = Api::start("api_many_credentials").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let providers: Vec<String> = (0..100).map(|number| format!("rack-{number}")).collect();
    let providers: Vec<&str> = providers.iter().map(String::as_str).collect();
    // More than a client decodes at once.
    for _ in 0..120 {
        api.key(AccessRole::Viewer, &providers, None).await?;
    }
    let listed = kim.json(&["get", "tokens"])?;
    assert_eq!(listed["credentials"].as_array().context("a list")?.len(), 121);
    assert_eq!(listed["nextPageToken"], "");
    assert_eq!(kim.ask(&["get", "tokens"])?, kim.direct(&["get", "tokens"])?);
    Ok(api.stop().await?)
}
