//! Floods of connections without a certificate on the curator of a role server that is a program of its own. It starts
//! with a soft limit of 1,024 files, as its systemd unit sets it.
//!
//! The floods of the crate `curator` have the limit as a setting. Here it is the limit of the process: of the curator,
//! of the connections to etcd, and of the programs that the role server starts meanwhile.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hardening::file_limit::UsualFileLimit as _;
use rustls::ClientConfig;
use shepherd::curator::node_health::HEARTBEAT_TIMEOUT;
use shepherd::curator::service::curator_server::LEADER_TTL;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::tls::client_config;
use shepherd::etcd::client::Client;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use testkit::flood::{Flood, FloodPlan, HALF_A_RECORD};

use super::node::{Node, election_keys};
use super::owner::{Owner, patiently};
use super::services::{declare, founded, joined, script, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::child::limit_files;
use crate::harness::etcd_servers::until;
use crate::harness::key_holder::Holder;

const SILENT: usize = 1300;
const HALF_SPOKEN: usize = 1000;
/// How long a flood lasts at least. A lease that is not renewed meanwhile has ended, and a node without a heartbeat is
/// not healthy at its end.
const DURATION: Duration = Duration::from_secs(12);
const _: () = assert!(DURATION.as_secs() > LEADER_TTL.as_secs(), "a lost lease would not be noticed");
const _: () = assert!(DURATION.as_secs() > HEARTBEAT_TIMEOUT.as_secs(), "silence would not be noticed");
/// The hard limit of a role server that may open few files.
const FEW_FILES: u64 = 1024;
const OPEN_FILES_LIMIT: &str = "roleserver_open_files_limit";

/// A person with a certificate, who connects for each call.
struct Person {
    curator: String,
    config: Arc<ClientConfig>,
}

impl Person {
    /// An owner issues the certificate.
    async fn certify(owner: &Owner, member: &Node) -> Result<Self> {
        let key = Holder::new()?;
        let request = wire::IssueOwnerRequest {
            public_key: key.key.0.to_vec(),
            name: "kim".to_owned(),
            lifetime_ms: 3_600_000,
        };
        let mut credentials = CredentialsClient::new(owner.curators()?.channel());
        let issued = patiently(async || credentials.issue_owner(request.clone()).await).await?;
        let connection = member.facts.connection.latest().context("it is no node")?;
        let own = key.with(&issued.certificate)?;
        let config = client_config(connection.anchor.clone(), None, Some(own), member.clock.clone())?;
        Ok(Self { curator: curator_of(member).to_string(), config })
    }

    /// Lists the nodes over a new connection. Comes again until it is served, as programs do: until it has shown its
    /// certificate, a connection can give way to others.
    async fn call(&self) -> Result<()> {
        let mut last = None;
        let answered = until("a person is answered", async || {
            let mut management = ManagementClient::new(open_channel(&self.curator, self.config.clone()));
            last = management.list_nodes(wire::ListNodesRequest::default()).await.err();
            Ok(last.is_none())
        });
        let answered = answered.await;
        answered.with_context(|| format!("{last:?}"))
    }
}

/// A cluster of one consensus member, the role server of which is a program, and of another node.
struct FloodedCluster {
    owner: Owner,
    person: Person,
    member: Node,
    other: Node,
    etcd: Client,
    /// The election before any flood.
    election: Vec<String>,
}

impl FloodedCluster {
    /// `limit` limits the open files of the member's role server.
    async fn start(limit: impl FnOnce(&mut Command)) -> Result<Self> {
        let (owner, mut member) = founded().await?;
        // It joins while the curator is a part of this process: that of a program accepts no new address on loopback.
        let other = joined(&owner, &member).await?;
        let person = Person::certify(&owner, &member).await?;
        // The program starts an etcd of its own.
        member.cut_power().await?;
        member.start_apart_limited(limit)?;
        owner.until_well(1, 2).await.with_context(|| member.report())?;
        let etcd = member.etcd_client()?;
        let election = election_keys(&etcd).await?;
        ensure!(election.len() == 1, "not one curator leads: {election:?}");
        Ok(Self { owner, person, member, other, etcd, election })
    }

    /// How many connections its gate has closed for this reason, or did not get.
    fn closed_connections(&self, reason: &str) -> Result<u64> {
        self.member.metric(&format!("roleserver_curator_connections_closed_total{{reason={reason:?}}}"))
    }

    /// Floods the curator from so many addresses. `check` is called beside the flood, at its beginning and at its end.
    async fn bear_flood(
        &self,
        sources: usize,
        first_source: usize,
        check: fn(&Self) -> Result<()>,
    ) -> Result<()> {
        let (target, half) = (curator_of(&self.member), HALF_A_RECORD);
        let plan =
            FloodPlan { target, sources, first_source, silent: SILENT, half_spoken: HALF_SPOKEN, half };
        let flood = Flood::start(&[plan]).await?;
        let began = Instant::now();
        check(self)?;
        // Both nodes follow the leader: they learn of a new role, and the role server has files to start its service.
        let role = format!("flood-{sources}");
        let service = script(&role, "exec sleep 1000000", &[]);
        let revision = declare(&self.owner, &role, &[service]).await?;
        for node in [&self.member, &self.other] {
            self.owner.roles(node, &[role.as_str()], &[]).await?;
            until_well(&self.owner, node, &role, revision).await?;
        }
        while began.elapsed() < DURATION {
            self.person.call().await.with_context(|| self.member.report())?;
            ensure!(
                election_keys(&self.etcd).await? == self.election,
                "the lease of the leader was lost beside a flood from {sources} addresses\n{}",
                self.member.report()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // The heartbeats of both are younger than the flood.
        self.owner.until_well(1, 2).await.with_context(|| self.member.report())?;
        check(self)?;
        drop(flood);
        Ok(())
    }
}

fn curator_of(node: &Node) -> SocketAddr {
    SocketAddr::new(node.address, CURATOR_PORT)
}

/// The limit is raised to what the host permits, which decides how many places there are for a flood.
fn limit_is_raised(cluster: &FloodedCluster) -> Result<()> {
    let files = cluster.member.metric(OPEN_FILES_LIMIT)?;
    ensure!(files > FEW_FILES, "the role server may open {files} files, as many as before it started");
    ensure!(cluster.closed_connections("accept")? == 0, "the role server had no file for a connection");
    Ok(())
}

/// With few files there is no place for most of the flood, and the gate leaves files for everything else.
fn flood_gives_way(cluster: &FloodedCluster) -> Result<()> {
    let files = cluster.member.metric(OPEN_FILES_LIMIT)?;
    ensure!(files == FEW_FILES, "the role server may open {files} files");
    ensure!(cluster.closed_connections("evicted")? > 0, "no connection gave way, so this was no flood");
    ensure!(cluster.closed_connections("accept")? == 0, "the role server had no file for a connection");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_server_raises_its_soft_limit_and_serves_its_cluster() -> TestResult {
    let cluster = FloodedCluster::start(|command| {
        command.usual_file_limit();
    })
    .await?;
    for sources in [1, 200] {
        cluster.bear_flood(sources, 0, limit_is_raised).await?;
    }
    Ok(())
}

/// Then a class of connections has 96 places, and an address 48 of them: the floods come from fewer addresses than
/// places, and not from that of everyone else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_server_that_may_open_1024_files_serves_its_cluster_beside_a_flood() -> TestResult {
    let cluster = FloodedCluster::start(|command| {
        limit_files(command, FEW_FILES);
    })
    .await?;
    for sources in [1, 80] {
        cluster.bear_flood(sources, 1, flood_gives_way).await?;
    }
    Ok(())
}
