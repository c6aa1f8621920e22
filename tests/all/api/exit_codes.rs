//! Exit codes of `shepherdctl`: each command, in each way in which it can end.
//!
//! [`ROWS`] has what is done, holds already, has no effect, or does not exist. Besides, each command that calls a fleet is
//! refused, gets no answer, and is interrupted, and each order loses its answer.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, ensure};
use rcgen::{CertificateParams, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use shepherd::cli::client::contexts::{Context, Contexts};
use shepherd::cli::command::grammar;
use shepherd::model::access::AccessRole;
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::api::command_line::{Operator, interruptible};
use crate::api::exit_table::{Cell, Kind, ROWS, Row, SEVERAL};
use crate::api::orders::{key, pin_host_key, refuse, signing};
use crate::api::same_answers::populate;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

/// Orders that wait for their next attempt at the same time.
const LOST_AT_ONCE: usize = 32;
/// Bundles of Kubernetes and a release of the role server.
const ARTEFACTS: &str = "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by, kubernetes)
     VALUES (decode(repeat('1a', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'older', clock_timestamp(), 'kim',
             '1.30.1'),
            (decode(repeat('1b', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'newer', clock_timestamp(), 'kim',
             '1.31.0'),
            (decode(repeat('1c', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'release', clock_timestamp(), 'kim',
             NULL)";
/// The schema of a later release.
const LATER_SCHEMA: &str =
    "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
     VALUES (900, 'later', true, '', 0)";
const ROLE: &str = "role = \"front\"\n[[service]]\nname = \"server\"\nprogram = \"/bin/sleep\"\nuser = \"nobody\"\n\
                    arguments = [\"9\"]\n";

/// A word of the table and what takes its place.
type Word = (&'static str, String);

/// What is in the table about a machine that nobody knows.
fn unknown_words() -> Vec<Word> {
    let mut words = words_of("0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90");
    words.push(("KEY", "0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10".to_owned()));
    words.push(("FINGERPRINT", "SHA256:abc".to_owned()));
    words
}

fn words_of(machine: &str) -> Vec<Word> {
    vec![
        ("MACHINE", machine.to_owned()),
        ("CLUSTER", format!("c-{machine}")),
        ("UPDATE", format!("u-{machine}")),
        ("NEW", format!("n-{machine}")),
        ("WORDS", format!("rack/{machine} is not wiped")),
    ]
}

/// Whether a command of the table has this word.
fn mentions(row: &Row, word: &str) -> bool {
    let lines = row.cells().into_iter().flat_map(Cell::lines);
    lines.flat_map(|line| line.split(' ')).any(|found| found == word)
}

/// Whether the command takes `--reason`.
fn takes_reason(line: &str) -> bool {
    let grammar = grammar();
    let mut found = &grammar;
    for word in line.split(' ') {
        let Some(below) = found.find_subcommand(word) else { break };
        found = below;
    }
    found.get_arguments().any(|argument| argument.get_id() == "reason")
}

/// The exit code as a shell shows it.
fn exit_code(status: ExitStatus) -> Option<i32> {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal))
}

/// Which fleet a command is about.
enum Target<'a> {
    /// The one of this context.
    Context(&'a str),
    /// The one in this database.
    Database(&'a str),
}

/// A fleet with an operator, and the files that commands read.
struct Fleet<'a> {
    kim: Operator<'a>,
    /// A machine of the cluster `ams` that has reported no key.
    member: String,
    /// How many files that do not exist were named.
    files: AtomicUsize,
}

impl<'a> Fleet<'a> {
    async fn new(api: &'a Api) -> anyhow::Result<Self> {
        let member = populate(api).await?;
        sqlx::query(ARTEFACTS).execute(&api.pool).await?;
        api.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = true).await?;
        let kim = Operator { api, home: tempfile::tempdir()? };
        kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
        let certificate = CertificateParams::default().self_signed(&KeyPair::generate()?)?.pem();
        for (name, text) in [
            ("server", "#!/bin/sh\n"),
            ("other", "#!/bin/sh\nexit 1\n"),
            ("role.toml", ROLE),
            ("ci.pem", &certificate),
        ] {
            fs::write(kim.home.path().join(name), text)?;
        }
        let fleet = Self { kim, member, files: AtomicUsize::new(0) };
        fleet.add_context("spare", |_| ())?;
        Ok(fleet)
    }

    /// Saves a context that differs from the current one.
    fn add_context(&self, name: &str, change: impl FnOnce(&mut Context)) -> anyhow::Result<()> {
        let path = self.kim.contexts();
        let mut contexts = Contexts::read(&path)?;
        let mut context = contexts.contexts.get("home").context("the context")?.clone();
        change(&mut context);
        contexts.contexts.insert(name.to_owned(), context);
        Ok(contexts.write(&path)?)
    }

    /// Saves the context `revoked`, with the token of an admin that is good for nothing any more.
    async fn add_revoked_context(&self) -> anyhow::Result<()> {
        let api = self.kim.api;
        let (admin, revoked) =
            (api.key(AccessRole::Admin, &[], None).await?, api.key(AccessRole::Admin, &[], None).await?);
        let revoke = json!({ "credentialId": revoked.id, "order": order("it was lost", "revoked") });
        api.call(Some(&admin.token), "Credentials/Revoke", revoke).await?.ok()?;
        let path = self.kim.home.path().join("revoked.token");
        fs::write(&path, &revoked.token)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        self.add_context("revoked", |context| context.token_path = path)
    }

    /// Brings about what the commands of a row need.
    async fn prepare(&self, row: &Row) -> anyhow::Result<Vec<Word>> {
        let api = self.kim.api;
        let machine = provided(&api.pool).await?;
        for &statement in row.prepare {
            sqlx::query(statement).bind(machine.0).execute(&api.pool).await.context(statement)?;
        }
        let mut words = words_of(&machine.to_string());
        if mentions(row, "KEY") {
            let viewer = api.key(AccessRole::Viewer, &[], None).await?;
            words.push(("KEY", viewer.id.to_string()));
        }
        if mentions(row, "FINGERPRINT") {
            pin_host_key(api, machine, 1).await?;
            refuse(api, machine, 2).await?;
            words.push(("FINGERPRINT", key(2).fingerprint()));
        }
        Ok(words)
    }

    fn fill(&self, word: &str, words: &[Word]) -> anyhow::Result<String> {
        let home = self.kim.home.path().to_str().context("text")?;
        Ok(match words.iter().find(|(name, _)| *name == word) {
            Some((_, text)) => text.clone(),
            None if word == "MEMBER" => self.member.clone(),
            None if word == "FRESH" => format!("{home}/fresh-{}", self.files.fetch_add(1, Ordering::Relaxed)),
            None => word.replace("HOME", home),
        })
    }

    /// A command of the table. It gets this reason if it takes one.
    fn command(
        &self,
        line: &str,
        words: &[Word],
        reason: &str,
        target: Option<&Target<'_>>,
    ) -> anyhow::Result<Command> {
        let filled = line.split(' ').map(|word| self.fill(word, words));
        let mut arguments = filled.collect::<anyhow::Result<Vec<String>>>()?;
        if takes_reason(line) {
            arguments.extend(["--reason".to_owned(), reason.to_owned()]);
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut command = self.kim.command(&arguments);
        match target {
            Some(Target::Context(name)) => {
                command.args(["--context", name]);
            }
            Some(Target::Database(url)) => {
                command.args(["--direct", "--bmdb-dialect", self.kim.api.database.dialect().as_str()]);
                command.env("SHEPHERD_BMDB_URL", url);
            }
            None => {}
        }
        Ok(command)
    }

    /// Runs a command of a row about this fleet.
    async fn run(&self, row: &Row, line: &str, words: &[Word], reason: &str) -> anyhow::Result<Output> {
        let target = match row.kind {
            Kind::Order | Kind::Read => Some(Target::Context("home")),
            Kind::Database => Some(Target::Database(self.kim.api.database.url())),
            Kind::Local => None,
        };
        let command = self.command(line, words, reason, target.as_ref())?;
        Ok(tokio::process::Command::from(command).output().await?)
    }

    /// Runs commands that prepare another one.
    async fn run_before(&self, row: &Row, lines: &[&str], words: &[Word]) -> anyhow::Result<()> {
        for line in lines {
            let output = self.run(row, line, words, "it comes first").await?;
            ensure!(output.status.success(), "{line}: {output:?}");
        }
        Ok(())
    }

    /// How the audit calls what the order with this reason did.
    async fn audited(&self, reason: &str) -> anyhow::Result<String> {
        let statement = "SELECT outcome FROM audit WHERE reason = $1 AND NOT dry_run";
        let found = sqlx::query_scalar(statement).bind(reason).fetch_one(&self.kim.api.pool).await;
        found.with_context(|| reason.to_owned())
    }

    /// Runs the command of a row as it would be done, about another target.
    fn sample(&self, row: &Row, target: &Target<'_>) -> anyhow::Result<Command> {
        self.command(row.sample().1, &unknown_words(), "an exit code", Some(target))
    }
}

/// The commands that run by themselves, and whether each is an order.
fn runnable(command: &clap::Command, path: &str, found: &mut Vec<(String, bool)>) {
    if !path.is_empty() && !command.is_subcommand_required_set() {
        let is_order = command.get_arguments().any(|argument| argument.get_id() == "idempotency_key");
        found.push((path.to_owned(), is_order));
    }
    for below in command.get_subcommands() {
        runnable(below, format!("{path} {}", below.get_name()).trim(), found);
    }
}

#[test]
fn table_has_each_command_once() -> TestResult {
    let mut found = Vec::new();
    runnable(&grammar(), "", &mut found);
    assert!(found.len() > 90, "{found:?}");
    for (path, is_order) in &found {
        let rows: Vec<&Row> = ROWS.iter().filter(|row| row.path == path).collect();
        assert_eq!(rows.len(), 1, "`{path}` needs one row");
        assert_eq!(rows[0].kind == Kind::Order, *is_order, "`{path}`");
    }
    for row in ROWS {
        assert!(found.iter().any(|(path, _)| path == row.path), "there is no `{}`", row.path);
        for cell in row.cells() {
            match cell {
                Cell::Never(reason) => assert!(reason.len() > 10, "{}: {reason}", row.path),
                Cell::Elsewhere(_, file, test) => {
                    let text = fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR")))?;
                    assert!(text.contains(&format!("fn {test}(")), "{file} has no test {test}");
                }
                Cell::Run(_) => {}
            }
            if let Some(line) = cell.lines().last() {
                let is_own = *line == row.path || line.starts_with(&format!("{} ", row.path));
                assert!(is_own, "{}: {line}", row.path);
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_exits_by_what_it_did() -> TestResult {
    let api = Api::start_with("api_exit_ways", |settings| settings.signing = signing()).await?;
    let fleet = Fleet::new(&api).await?;
    for row in ROWS {
        let words = fleet.prepare(row).await?;
        for (cell, expected, outcome) in [
            (row.done, 0, Some("changed")),
            (row.already, 0, Some("unchanged")),
            (row.no_effect, 1, Some("no_effect")),
            (row.unknown, 3, None),
        ] {
            let Cell::Run(_) = cell else { continue };
            let mut lines = cell.lines();
            let line = lines.pop().context("a command")?;
            fleet.run_before(row, &lines, &words).await?;
            let reason = format!("`{}` exits {expected}: {outcome:?}", row.path);
            let output = fleet.run(row, line, &words, &reason).await?;
            assert_eq!(exit_code(output.status), Some(expected), "{line}: {output:?}");
            if let (Kind::Order, Some(outcome)) = (row.kind, outcome) {
                assert_eq!(fleet.audited(&reason).await?, outcome, "{line}: {output:?}");
            }
        }
    }
    drop(fleet);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_about_several_machines_exits_by_what_it_did() -> TestResult {
    let api = Api::start("api_exit_several").await?;
    let fleet = Fleet::new(&api).await?;
    for (statements, lines) in SEVERAL {
        let (machine, other) = (provided(&api.pool).await?, provided(&api.pool).await?);
        for &statement in *statements {
            let query = sqlx::query(statement).bind(machine.0);
            let query = if statement.contains("$2") { query.bind(other.0) } else { query };
            query.execute(&api.pool).await.context(statement)?;
        }
        let mut words = words_of(&machine.to_string());
        words.push(("OTHER", other.to_string()));
        for (line, expected) in *lines {
            let command = fleet.command(line, &words, "an exit code", Some(&Target::Context("home")))?;
            let output = tokio::process::Command::from(command).output().await?;
            assert_eq!(exit_code(output.status), Some(*expected), "{line}: {output:?}");
        }
    }
    drop(fleet);
    Ok(api.stop().await?)
}

/// Starts a command, ends it by Ctrl-C once it has connected, and returns its exit code.
async fn interrupt(command: &Command, listener: &TcpListener) -> anyhow::Result<Option<i32>> {
    let mut child = tokio::process::Command::from(interruptible(command))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let (connection, _) = timeout(PATIENCE, listener.accept()).await.context("it connects to nobody")??;
    let pid = i32::try_from(child.id().context("it has ended")?)?;
    kill_process(Pid::from_raw(pid).context("a process")?, Signal::INT)?;
    let status = timeout(PATIENCE, child.wait()).await??;
    drop(connection);
    Ok(exit_code(status))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_exits_by_who_does_not_answer_or_refuses_or_ends_it() -> TestResult {
    let api = Api::start("api_exit_silence").await?;
    let fleet = Fleet::new(&api).await?;
    fleet.add_revoked_context().await?;
    // Nobody listens on one of the ports, and nobody answers on the other.
    let closed = TcpSocket::new_v4()?;
    closed.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    let (closed_at, silent_at) = (closed.local_addr()?, silent.local_addr()?);
    for (name, address) in [("closed", closed_at), ("silent", silent_at)] {
        fleet.add_context(name, |context| context.servers = vec![address.to_string()])?;
    }
    let (closed_url, silent_url) =
        (format!("postgres://kim@{closed_at}/bmdb"), format!("postgres://kim@{silent_at}/bmdb"));
    let code = async |command: Command| -> anyhow::Result<Option<i32>> {
        Ok(exit_code(tokio::process::Command::from(command).output().await?.status))
    };
    for row in ROWS {
        let (nobody, stopped, refused) = match row.kind {
            Kind::Local => continue,
            Kind::Database => (Target::Database(&closed_url), Target::Database(&silent_url), None),
            Kind::Order | Kind::Read => {
                (Target::Context("closed"), Target::Context("silent"), Some(Target::Context("revoked")))
            }
        };
        let path = row.path;
        assert_eq!(code(fleet.sample(row, &nobody)?).await?, Some(5), "`{path}`, and nobody answers");
        assert_eq!(
            interrupt(&fleet.sample(row, &stopped)?, &silent).await?,
            Some(130),
            "`{path}` and Ctrl-C"
        );
        if let Some(refused) = refused {
            assert_eq!(code(fleet.sample(row, &refused)?).await?, Some(4), "`{path}` with a revoked token");
        }
    }
    // This fleet has a shepherd that works, and then a schema that this release does not know.
    let declare = ROWS.iter().find(|row| row.path == "declare restored").context("the row")?;
    let database = || Target::Database(api.database.url());
    assert_eq!(code(fleet.sample(declare, &database())?).await?, Some(4), "while shepherds work");
    sqlx::query(LATER_SCHEMA).execute(&api.pool).await?;
    for row in ROWS.iter().filter(|row| row.kind == Kind::Database) {
        assert_eq!(code(fleet.sample(row, &database())?).await?, Some(4), "`{}`, a later schema", row.path);
    }
    drop(closed);
    drop(fleet);
    Ok(api.stop().await?)
}

/// A proxy in front of a server. The client receives nothing more once the audit has a record with this reason, and each of
/// its connections ends.
async fn lose_answers(server: SocketAddr, pool: &PgPool, reason: &str) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (pool, reason) = (pool.clone(), reason.to_owned());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(forward_until_ordered(client, server, pool.clone(), reason.clone()));
        }
    });
    Ok(address)
}

async fn forward_until_ordered(
    client: TcpStream,
    server: SocketAddr,
    pool: PgPool,
    reason: String,
) -> anyhow::Result<()> {
    let (mut client_reads, mut client_writes) = client.into_split();
    let (mut server_reads, mut server_writes) = TcpStream::connect(server).await?.into_split();
    let up = async {
        tokio::io::copy(&mut client_reads, &mut server_writes).await?;
        anyhow::Ok(())
    };
    let down = async {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let length = server_reads.read(&mut bytes).await?;
            // The record is written before the answer.
            let recorded = "SELECT count(*) FROM audit WHERE reason = $1 AND NOT dry_run";
            let recorded: i64 = sqlx::query_scalar(recorded).bind(&reason).fetch_one(&pool).await?;
            if length == 0 || recorded > 0 {
                return anyhow::Ok(());
            }
            client_writes.write_all(&bytes[..length]).await?;
        }
    };
    tokio::select! {
        ended = up => ended,
        ended = down => ended,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_order_exits_6_when_its_answer_is_lost() -> TestResult {
    let api = Api::start_with("api_exit_lost", |settings| settings.signing = signing()).await?;
    let fleet = Fleet::new(&api).await?;
    let mut commands = Vec::new();
    for row in ROWS.iter().filter(|row| row.kind == Kind::Order) {
        let words = fleet.prepare(row).await?;
        let (before, line) = row.sample();
        fleet.run_before(row, &before, &words).await?;
        let reason = format!("the answer to `{}` is lost", row.path);
        let address = lose_answers(api.server.local_addr, &api.pool, &reason).await?;
        let context = format!("lost-{}", commands.len());
        fleet.add_context(&context, |context| context.servers = vec![address.to_string()])?;
        let command = fleet.command(line, &words, &reason, Some(&Target::Context(&context)))?;
        commands.push((row.path, command));
    }
    let (mut running, turns) = (JoinSet::new(), Arc::new(Semaphore::new(LOST_AT_ONCE)));
    for (path, command) in commands {
        let turns = Arc::clone(&turns);
        running.spawn(async move {
            let _turn = turns.acquire_owned().await?;
            let mut command = tokio::process::Command::from(command);
            anyhow::Ok((path, command.kill_on_drop(true).output().await?))
        });
    }
    while let Some(ended) = running.join_next().await {
        let (path, output) = ended??;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(exit_code(output.status), Some(6), "{path}: {text}");
        assert!(text.contains("idempotency key"), "{path}: {text}");
    }
    drop(fleet);
    Ok(api.stop().await?)
}
