//! Real etcd servers: clusters of one or more members on this host, one per test.
//!
//! Members listen on UNIX sockets in a directory that only this user can enter, for each other and for clients. So no
//! test needs a port. (etcd requires `host:port` after `unix://` and takes all of it as the socket's name, relative to
//! its working directory.) Writes are not fsynced, because no test cuts the power.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use etcd::client::Client;
use etcd::namespace::Namespace;
use etcd::transport::Endpoint;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::aloud::assertions_aloud;
use crate::child::{Program, guarded};
use crate::etcd_program::etcd_program;

/// The deadline of every wait.
pub const PATIENCE: Duration = Duration::from_mins(5);

/// A cluster with members that end with this value.
pub struct Cluster {
    /// Dropped before the directory, so that no member writes there while it is removed.
    members: Vec<Member>,
    /// Arguments that each member gets besides those of every cluster.
    arguments: Vec<String>,
    directory: tempfile::TempDir,
    namespace: Namespace,
}

struct Member {
    name: String,
    program: Option<Program>,
}

impl Cluster {
    /// Starts a cluster and waits until it responds.
    pub async fn start(size: usize) -> Result<Self> {
        Self::start_named((0..size).map(|number| format!("m{number}")).collect()).await
    }

    /// Starts a cluster whose members have these names.
    pub async fn start_named(names: Vec<String>) -> Result<Self> {
        Self::start_members(names, &[]).await
    }

    /// Starts a cluster with members that accept no writes once their database file has this size.
    pub async fn start_with_quota(size: usize, quota_bytes: u64) -> Result<Self> {
        let names = (0..size).map(|number| format!("m{number}")).collect();
        Self::start_members(names, &["--quota-backend-bytes".to_owned(), quota_bytes.to_string()]).await
    }

    async fn start_members(names: Vec<String>, arguments: &[String]) -> Result<Self> {
        assertions_aloud();
        let size = names.len();
        let all = names.iter().map(|name| format!("{name}={}", peer_url(name))).collect::<Vec<_>>().join(",");
        // `tempdir` makes a directory that only its owner can enter.
        let mut cluster = Self {
            members: Vec::new(),
            arguments: arguments.to_vec(),
            directory: tempfile::tempdir()?,
            namespace: Namespace::new("test")?,
        };
        for name in names {
            let program =
                cluster.spawn(&name, &["--initial-cluster", &all, "--initial-cluster-state", "new"])?;
            cluster.members.push(Member { name, program: Some(program) });
        }
        for member in 0..size {
            cluster.wait_until_it_answers(member).await?;
        }
        Ok(cluster)
    }

    fn spawn(&self, name: &str, arguments: &[&str]) -> Result<Program> {
        let mut command = self.command(name)?;
        command.args(arguments);
        let log = self.path(&format!("{name}.log"));
        Program::spawn_logged(&mut command, &log).context("etcd does not start")
    }

    fn command(&self, name: &str) -> Result<Command> {
        let mut command = guarded(etcd_program()?);
        for (variable, _) in std::env::vars_os() {
            if variable.to_str().is_some_and(|variable| variable.starts_with("ETCD")) {
                command.env_remove(variable);
            }
        }
        let (client, peer) = (format!("unix://{}", socket_name(name)), peer_url(name));
        command
            .current_dir(self.directory.path())
            .args(["--name", name, "--data-dir", name, "--unsafe-no-fsync", "--logger", "zap"])
            .args(["--log-outputs", "stderr", "--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client, "--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(&self.arguments);
        Ok(command)
    }

    /// A file in the cluster's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The socket at which a member listens for clients.
    #[must_use]
    pub fn endpoint(&self, member: usize) -> Endpoint {
        Endpoint::Socket(self.path(&socket_name(&self.members[member].name)))
    }

    /// A client of one member, or of several in turn.
    #[must_use]
    pub fn client_of(&self, members: &[usize]) -> Client {
        let endpoints = members.iter().map(|member| self.endpoint(*member)).collect();
        // A host that runs hundreds of tests is slow. Tests of silence set their own deadline.
        Client::new(endpoints, self.namespace.clone()).with_deadline(Duration::from_secs(30))
    }

    /// A client of the first member.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client_of(&[0])
    }

    /// Stops a member as `SIGSTOP` does: it keeps its connections and sends nothing.
    pub fn silence(&self, member: usize) -> Result<()> {
        let program = self.program(member)?;
        program.signal(Signal::STOP)?;
        // The signal is sent when this returns, but threads on other processors continue for a moment.
        let end = Instant::now() + PATIENCE;
        while !every_thread_is_stopped(program.pid())? {
            ensure!(Instant::now() < end, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Continues a member that [`Self::silence`] stopped.
    pub fn let_speak(&self, member: usize) -> Result<()> {
        self.program(member)?.signal(Signal::CONT)
    }

    /// Kills a member as a power cut does.
    pub fn kill(&mut self, member: usize) -> Result<()> {
        self.members[member].program.take().context("it does not run")?.kill()
    }

    /// Starts a killed member again, with the data on its disk. Does not wait until it responds.
    pub fn restart(&mut self, member: usize) -> Result<()> {
        let name = &self.members[member].name;
        // A killed etcd leaves its socket behind, and etcd does not listen on an existing one.
        std::fs::remove_file(self.path(&socket_name(name)))?;
        let program = self.spawn(name, &[])?;
        self.members[member].program = Some(program);
        Ok(())
    }

    /// Starts one more member, which was added to the cluster before. `all` names each member with its peer address.
    pub fn join(&mut self, name: &str, all: &[(String, String)]) -> Result<usize> {
        let all = all.iter().map(|(name, url)| format!("{name}={url}")).collect::<Vec<_>>().join(",");
        let program =
            self.spawn(name, &["--initial-cluster", &all, "--initial-cluster-state", "existing"])?;
        self.members.push(Member { name: name.to_owned(), program: Some(program) });
        Ok(self.members.len() - 1)
    }

    /// The value of a member's metric, summed over all labels.
    pub async fn metric(&self, member: usize, name: &str) -> Result<f64> {
        let mut stream = UnixStream::connect(self.path(&socket_name(&self.members[member].name))).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let samples = answer
            .lines()
            .filter_map(|line| line.strip_prefix(name))
            .filter(|rest| rest.starts_with(['{', ' ']));
        let values: Vec<f64> = samples.filter_map(|rest| rest.rsplit(' ').next()?.parse().ok()).collect();
        ensure!(!values.is_empty(), "etcd has no metric {name}");
        Ok(values.iter().sum())
    }

    fn program(&self, member: usize) -> Result<&Program> {
        self.members[member].program.as_ref().context("it does not run")
    }

    /// Waits until a member responds to a request that needs a quorum.
    pub async fn wait_until_it_answers(&mut self, member: usize) -> Result<()> {
        let client = self.client_of(&[member]).with_deadline(Duration::from_secs(3));
        let end = Instant::now() + PATIENCE;
        loop {
            let Err(error) = client.get("/").await else { return Ok(()) };
            let ended = match &mut self.members[member].program {
                Some(program) => program.ended()?,
                None => bail!("it does not run"),
            };
            if ended.is_some() || Instant::now() > end {
                let log = std::fs::read_to_string(self.path(&format!("{}.log", self.members[member].name)))?;
                bail!("etcd does not answer ({error}), ended: {ended:?}; its log: {log}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn every_thread_is_stopped(pid: u32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended meanwhile does nothing either.
        let Ok(stat) = std::fs::read_to_string(thread?.path().join("stat")) else { continue };
        let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
        if !state.is_some_and(|state| state.starts_with('T')) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The URL at which a member listens for other members.
#[must_use]
pub fn peer_url(name: &str) -> String {
    format!("unix://{name}-peer:1")
}

fn socket_name(member: &str) -> String {
    format!("{member}-client:1")
}

/// Waits until the condition holds.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !condition().await? {
        ensure!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Waits for this work until the deadline.
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(PATIENCE, work).await.with_context(|| format!("waited in vain for {what}"))
}
