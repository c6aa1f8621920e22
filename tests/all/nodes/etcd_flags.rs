//! Flags of etcd: which ones a node starts it with, and what it reports if it cannot determine them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::roleserver::cluster::etcd_data;
use shepherd::roleserver::cluster::etcd_program::{VERSION_DEADLINE, ask_flags, ask_version};
use shepherd::roleserver::cluster::etcd_start::record_version;

use super::node::Node;
use super::owner::Owner;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcd_program;
use crate::harness::etcd_servers::until;

/// A fake etcd: a script that prints a version, writes its arguments to a file, and does nothing else.
struct StandIn {
    place: tempfile::TempDir,
}

impl StandIn {
    fn new() -> Result<Self> {
        Ok(Self { place: tempfile::tempdir()? })
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("etcd")
    }

    /// Replaces it by another program, atomically.
    fn replace(&self, script: &str) -> Result<()> {
        let new = self.place.path().join("new");
        std::fs::write(&new, format!("#!/bin/sh\n{script}\n"))?;
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755))?;
        Ok(std::fs::rename(new, self.path())?)
    }

    fn become_version(&self, version: &str) -> Result<()> {
        let started = self.place.path().join("started");
        let started = started.display();
        self.replace(&format!(
            "[ \"$1\" = --version ] && {{ echo 'etcd Version: {version}'; exit; }}\n\
             printf '%s\\n' \"$@\" > {started}.new; mv {started}.new {started}\nexec sleep 3600"
        ))
    }

    /// The arguments that it was started with, once it was.
    async fn started_with(&self, node: &Node) -> Result<Vec<String>> {
        let file = self.place.path().join("started");
        until("it is started", async || Ok(file.exists())).await.with_context(|| node.report())?;
        let arguments = std::fs::read_to_string(&file)?.lines().map(str::to_owned).collect();
        std::fs::remove_file(file)?;
        Ok(arguments)
    }
}

fn san_flag(arguments: &[String]) -> Option<&str> {
    arguments.iter().map(String::as_str).find(|argument| argument.contains("san-verification"))
}

/// Ends the etcd of a node, as a fault of etcd itself would.
fn kill_etcd(node: &Node) -> Result<()> {
    let pid = node.etcd().context("no etcd")?.instance.pid;
    let pid = Pid::from_raw(pid).context("no process")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Waits until a node reports that it waits for this.
async fn until_reported(node: &Node, part: &str) -> Result<()> {
    let reported = async || Ok(node.facts.problems.describe().is_some_and(|why| why.contains(part)));
    until(part, reported)
        .await
        .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_started_by_the_flags_that_its_version_knows() -> TestResult {
    let owner = Owner::new()?;
    let program = StandIn::new()?;
    program.become_version("3.4.23")?;
    let mut node = Node::new()?;
    node.etcd_program = program.path();
    node.ask(owner.founding_order())?;
    node.start()?;
    let old = program.started_with(&node).await?;
    assert_eq!(san_flag(&old), Some("--experimental-peer-skip-client-san-verification"));

    // The program is replaced while it runs, and its version is queried again when it is restarted.
    for (version, flag) in [
        ("3.7.3", "--peer-skip-client-san-verification"),
        ("3.6.9", "--experimental-peer-skip-client-san-verification"),
    ] {
        program.become_version(version)?;
        kill_etcd(&node)?;
        let new = program.started_with(&node).await?;
        assert_eq!(
            san_flag(&new),
            Some(flag),
            "{version} does not know the other one, or is to be started as before"
        );
        assert_eq!(new[..new.len() - 1], old[..old.len() - 1], "nothing else changes");
    }

    // A role server that finds another program on disk adopts the running etcd.
    let running = node.etcd().context("no etcd")?.instance;
    program.become_version("3.7.3")?;
    node.stop().await?;
    node.start()?;
    until("the role server is at it", async || Ok(node.report().contains("etcd"))).await?;
    until("etcd is adopted", async || {
        let healthy = node.report().lines().any(|line| line.contains(" etcd ") && line.contains("healthy"));
        ensure!(node.etcd().is_some_and(|etcd| etcd.instance == running), "it was started again");
        Ok(healthy)
    })
    .await
    .with_context(|| node.report())?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_reports_why_etcd_cannot_be_started_until_it_can() -> TestResult {
    let owner = Owner::new()?;
    let program = StandIn::new()?;
    let mut node = Node::new()?;
    node.etcd_program = program.path();
    node.ask(owner.founding_order())?;
    node.start()?;
    until_reported(&node, "there is no program").await?;
    program.replace("echo hello")?;
    until_reported(&node, "--version printed no version of etcd (exit status: 0, \"hello\")").await?;
    program.become_version("3.4.15")?;
    until_reported(&node, "is etcd 3.4.15, which is too old: install 3.4.16 or later").await?;
    assert!(node.etcd().is_none(), "nothing was started");
    program.become_version("3.7.3")?;
    program.started_with(&node).await?;
    until("nothing is reported any more", async || Ok(node.facts.problems.describe().is_none())).await?;
    Ok(())
}

/// The version of the etcd that last answered is recorded beside the membership, and compared before the next start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_of_an_older_line_is_not_started_on_the_data_of_a_newer_one() -> TestResult {
    let owner = Owner::new()?;
    let program = StandIn::new()?;
    program.become_version("3.6.9")?;
    let mut node = Node::new()?;
    node.etcd_program = program.path();
    node.ask(owner.founding_order())?;
    node.start()?;
    program.started_with(&node).await?;
    let membership = node.files().read_membership()?.context("no membership")?;
    // As if it had answered.
    record_version(&node.files(), &membership, "3.6.9");
    program.become_version("3.4.34")?;
    kill_etcd(&node)?;
    let refusal = "etcd 3.4.34 is not started, because etcd 3.6.9 ran on the data of this member before";
    until_reported(&node, refusal).await?;
    assert!(node.etcd().is_none_or(|etcd| !etcd.instance.is_alive()), "it was started");
    // The next line is no way out either: 3.7 follows 3.6.11 or later.
    program.become_version("3.7.3")?;
    until_reported(&node, "install etcd 3.6.11 or a later 3.6 first").await?;
    program.become_version("3.6.11")?;
    program.started_with(&node).await?;
    record_version(&node.files(), &membership, "3.6.11");
    program.become_version("3.7.3")?;
    kill_etcd(&node)?;
    program.started_with(&node).await?;
    until("nothing is reported any more", async || Ok(node.facts.problems.describe().is_none())).await?;
    Ok(())
}

/// A member of which the etcd of the tests has answered has its version on disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_of_an_etcd_that_answers_is_recorded() -> TestResult {
    let version = ask_version(&etcd_program()?, VERSION_DEADLINE).await?;
    let owner = Owner::new()?;
    let mut node = Node::new()?;
    node.ask(owner.founding_order())?;
    node.start()?;
    let recorded = async || Ok(node.files().read_etcd_version()?.is_some());
    until("its version is recorded", recorded).await.with_context(|| node.report())?;
    let record = node.files().read_etcd_version()?.context("no record")?;
    assert_eq!(record.version, version.to_string());
    Ok(())
}

/// Inside this process and as a program of its own, a role server starts the etcd that the tests chose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_server_starts_the_etcd_of_the_tests_by_flags_that_it_takes() -> TestResult {
    let program = etcd_program()?;
    let flags = ask_flags(&program, VERSION_DEADLINE).await?;
    let mut owner = Owner::new()?;
    let (mut inside, mut apart) = (Node::new()?, Node::new()?);
    for node in [&inside, &apart] {
        node.ask(owner.founding_order())?;
    }
    inside.start()?;
    apart.start_apart()?;
    inside.until_it_is_one().await?;
    owner.claim(&inside).await?;
    owner.until_well(1, 1).await?;
    for node in [&inside, &apart] {
        let is_there = || node.etcd().filter(|etcd| etcd.instance.is_alive());
        until("etcd runs", async || Ok(is_there().is_some())).await.with_context(|| node.report())?;
        let pid = is_there().context("it ended")?.instance.pid;
        let executable = std::fs::read_link(format!("/proc/{pid}/exe"))?;
        assert_eq!(executable, program.canonicalize()?, "{}", node.report());
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
        let arguments: Vec<String> = line.split('\0').map(str::to_owned).collect();
        assert_eq!(san_flag(&arguments), Some(flags.skip_client_san_verification()));
    }
    let has_begun = async |node: &Node| {
        let membership = node.files().read_membership()?;
        Ok(membership.is_some_and(|membership| {
            matches!(etcd_data::inspect_data(&node.files(), &membership), etcd_data::EtcdDataState::Member(_))
        }))
    };
    until("etcd has begun beside the program", async || has_begun(&apart).await)
        .await
        .with_context(|| apart.report())?;
    Ok(())
}
