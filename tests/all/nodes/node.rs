//! Nodes of a test.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::backoff::ExponentialBackoff;
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::pki_revocation_list::parse_peer_revocation_list;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::LEADER;
use shepherd::etcd::namespace::{KeySelector, Namespace};
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::child::cgroup::CgroupMounts;
use shepherd::roleserver::child::launch::{ChildRecord, read_record};
use shepherd::roleserver::child::lifecycle::{ChildContext, stop_child};
use shepherd::roleserver::cluster::cluster_node::{AddressRule, ClusterNodeSettings, run_cluster_node};
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::cluster::files::ClusterFiles;
use shepherd::roleserver::cluster::kubernetes::components::ComponentPorts;
use shepherd::roleserver::cluster::kubernetes::pod_cgroups::PodCgroups;
use shepherd::roleserver::cluster::node_facts::NodeFacts;
use shepherd::roleserver::cluster::node_order::{NodeOrder, OrderKind};
use shepherd::roleserver::cluster::peer_restart::StartRecord;
use shepherd::roleserver::commands::pages::render_metrics;
use shepherd::roleserver::enrolment::Enrolment;
use shepherd::roleserver::process::ProcessInstance;
use shepherd::roleserver::server_pool::ServerPool;
use shepherd::roleserver::signing_store::SigningStore;
use shepherd::roleserver::state_directory::StateDirectory;
use shepherd::supervisor::supervise::{self, Supervisor};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::harness::aloud::assertions_aloud;
use crate::harness::child::{Program, guarded};
use crate::harness::etcd_program::etcd_program;
use crate::harness::etcd_servers::{in_time, until};
use crate::harness::port::reserved;

pub(crate) const LAUNCHER: &str = env!("CARGO_BIN_EXE_roleserver");
const SOON: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(50), factor: 1.5, max: Duration::from_secs(1) };

/// An address of the loopback. It is one of sixteen million, because the ports of a node are the same everywhere.
fn some_address() -> IpAddr {
    let [a, b, c]: [u8; 3] = rand::random();
    Ipv4Addr::new(127, 64 | (a & 0x3f), b, c.clamp(1, 254)).into()
}

/// One node: its disk, its address, and the role server's part in the cluster while it runs.
pub(crate) struct Node {
    pub(crate) address: IpAddr,
    pub(crate) facts: NodeFacts,
    /// Its clock, from its next start on.
    pub(crate) clock: Clock,
    /// The ports of its Kubernetes components, from its next start on.
    pub(crate) ports: ComponentPorts,
    /// The program etcd of a role server that runs in this process, from its next start on.
    pub(crate) etcd_program: PathBuf,
    /// What its curator believes about addresses of nodes, from its next start on.
    pub(crate) address_rule: AddressRule,
    /// The signing keys that it has pinned, as a role server in this process shares them. Each start reads them again.
    pub(crate) signing: SigningStore,
    running: Option<Running>,
    directory: tempfile::TempDir,
}

/// Its role server: a part of this process, or a program of its own.
enum Running {
    Inside { tree: Supervisor, leaving: CancellationToken },
    Apart(Program),
}

impl Node {
    /// A machine without any order.
    pub(crate) fn new() -> Result<Self> {
        assertions_aloud();
        Self::at(some_address())
    }

    /// The same, at the address of a former node.
    pub(crate) fn at(address: IpAddr) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        Ok(Self {
            address,
            facts: NodeFacts::default(),
            clock: Clock::system(),
            // The loopback interface is the host's, and other nodes are on it too.
            ports: ComponentPorts {
                load_balancer: SocketAddr::new(address, 6445),
                ..ComponentPorts::default()
            },
            etcd_program: etcd_program()?,
            address_rule: AddressRule::reported_on_loopback(),
            signing: SigningStore::open(StateDirectory::from_path(directory.path().to_owned())),
            running: None,
            directory,
        })
    }

    pub(crate) fn files(&self) -> ClusterFiles {
        ClusterFiles::in_state_directory(self.directory.path())
    }

    /// Gives the machine an order.
    pub(crate) fn ask(&self, what: OrderKind) -> Result<()> {
        let order = NodeOrder {
            generation: 0,
            what,
            machine: None,
            labels: BTreeMap::new(),
            address: Some(self.address),
        };
        order.validate()?;
        Ok(self.files().write_order(&order)?)
    }

    /// Gives it another address while it is off, which its order names.
    pub(crate) fn move_elsewhere(&mut self) -> Result<()> {
        ensure!(self.running.is_none(), "it runs");
        self.address = some_address();
        self.ports.load_balancer = SocketAddr::new(self.address, 6445);
        let order = self.files().read_order()?.context("it has no order")?;
        Ok(self.files().write_order(&NodeOrder { address: Some(self.address), ..order })?)
    }

    /// Starts the cluster part of its role server.
    pub(crate) fn start(&mut self) -> Result<()> {
        ensure!(self.running.is_none(), "it runs");
        self.facts = NodeFacts::default();
        self.signing = SigningStore::open(StateDirectory::from_path(self.directory.path().to_owned()));
        let leaving = CancellationToken::new();
        let settings = ClusterNodeSettings {
            state_directory: self.directory.path().to_owned(),
            launcher: LAUNCHER.into(),
            etcd: self.etcd_program.clone(),
            boot_id: "5f0dd4bc-9d39-4c9b-8c53-5f1b4e8c7d11".to_owned(),
            clock: self.clock.clone(),
            shutdown: leaving.clone(),
            server_pool: ServerPool::default(),
            signing: self.signing.clone(),
            ports: self.ports.clone(),
            address_rule: self.address_rule,
        };
        let root = run_cluster_node(&settings, &self.facts);
        let tree =
            Supervisor::start(root, supervise::SupervisorSettings { backoff: SOON, ..Default::default() });
        self.running = Some(Running::Inside { tree, leaving });
        Ok(())
    }

    /// Starts its role server as the program that it is on a machine, enrolled with a shepherd that does not answer.
    pub(crate) fn start_apart(&mut self) -> Result<()> {
        self.start_apart_limited(|_| {})
    }

    /// The same, and `limit` limits the resources of the program.
    pub(crate) fn start_apart_limited(&mut self, limit: impl FnOnce(&mut Command)) -> Result<()> {
        let away = AgentSettings::new(&[reserved()?.to_string()], &[], 0);
        let mut command = guarded(LAUNCHER);
        limit(&mut command);
        self.start_command(command, away.map_err(anyhow::Error::msg)?)
    }

    /// The same with this program. It is enrolled unless it was before.
    pub(crate) fn start_program(&mut self, program: &Path, settings: AgentSettings) -> Result<()> {
        self.start_command(guarded(program), settings)
    }

    fn start_command(&mut self, mut command: Command, settings: AgentSettings) -> Result<()> {
        ensure!(self.running.is_none(), "it runs");
        let state = StateDirectory::open(self.directory.path())?;
        if state.read_enrolment()?.is_none() {
            state.read_or_create_identity()?;
            state.write_enrolment(&Enrolment {
                machine_id: Uuid::new_v4().to_string().parse()?,
                bmdb_id: Uuid::new_v4(),
                fences: BTreeMap::new(),
                holders: BTreeMap::new(),
                settings,
                revision: 1,
            })?;
        }
        command.arg("run").arg("--state_dir").arg(self.directory.path());
        let program = Program::spawn_logged(&mut command, &self.directory.path().join("run.log"))?;
        self.running = Some(Running::Apart(program));
        Ok(())
    }

    /// A number of the metrics of its role server, which is a program of its own. `name` has the labels, too.
    pub(crate) fn metric(&self, name: &str) -> Result<u64> {
        let page = render_metrics(self.directory.path())?;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(value.with_context(|| format!("there is no {name} in\n{page}"))?.parse()?)
    }

    /// The process of its role server, by its record.
    pub(crate) fn role_server(&self) -> Result<Option<ProcessInstance>> {
        let state = StateDirectory::from_path(self.directory.path().to_owned());
        Ok(state.read_agent_process()?.map(|process| process.instance))
    }

    /// Kills its role server and nothing else.
    pub(crate) fn kill_role_server(&mut self) -> Result<()> {
        match self.running.take() {
            Some(Running::Apart(mut program)) => program.kill(),
            _ => anyhow::bail!("it is no program of its own"),
        }
    }

    /// Ends its role server in order. Its children continue.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        match self.running.take().context("it does not run")? {
            Running::Inside { tree, leaving } => {
                leaving.cancel();
                in_time("its end", tree.stop()).await
            }
            Running::Apart(mut program) => program.terminate().await.map(drop),
        }
    }

    /// Ends everything on it, as a power cut does.
    pub(crate) async fn cut_power(&mut self) -> Result<()> {
        // First the role server, which would restart the others.
        self.stop().await?;
        for name in self.children() {
            stop_child(&name, &self.places(), Duration::ZERO)?;
        }
        Ok(())
    }

    /// Names of all children that were ever started and are still recorded.
    pub(crate) fn children(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.places().directory).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// The process that was last started by this name.
    pub(crate) fn child(&self, name: &str) -> Option<ChildRecord> {
        read_record(&self.places().record_path(name))
    }

    pub(crate) fn places(&self) -> ChildContext {
        ChildContext {
            directory: self.directory.path().join("children"),
            mounts: CgroupMounts::detect_host(),
            launcher: LAUNCHER.into(),
            shutdown: CancellationToken::new(),
            scopes: None,
        }
    }

    /// The etcd that was started last.
    pub(crate) fn etcd(&self) -> Option<ChildRecord> {
        read_record(&self.places().record_path(etcd_member::NAME))
    }

    /// A client of its etcd, for the records of its curator.
    pub(crate) fn etcd_client(&self) -> Result<Client> {
        let endpoint = etcd_member::client_endpoint(&self.files());
        Ok(Client::new(vec![endpoint], Namespace::new("curator")?))
    }

    /// Waits until another process of etcd runs than this one.
    pub(crate) async fn until_etcd_is_another(&self, former: &ProcessInstance) -> Result<()> {
        until("etcd has restarted", async || {
            Ok(self.etcd().is_some_and(|etcd| etcd.instance != *former && etcd.instance.is_alive()))
        })
        .await
        .with_context(|| format!("{:?}\n{}", self.facts.problems.describe(), self.report()))
    }

    /// Waits until its etcd runs with the present list of revoked peers, so that it restarts for none of them any more.
    pub(crate) async fn until_no_restart_is_due(&self) -> Result<()> {
        let files = self.files();
        until("etcd runs with the present list of revoked peers", async || {
            let Some(started) = files.read_etcd_file("started.json")? else { return Ok(false) };
            let started: StartRecord = serde_json::from_slice(&started)?;
            let list = files.read_etcd_file("peer.crl")?;
            let listed = list.and_then(|list| parse_peer_revocation_list(&list)).unwrap_or_default();
            let listed: BTreeSet<String> = listed.iter().map(ToString::to_string).collect();
            Ok(started.revoked == listed && self.etcd().is_some_and(|etcd| etcd.instance.is_alive()))
        })
        .await
        .with_context(|| format!("{:?}\n{}", self.facts.problems.describe(), self.report()))
    }

    /// The directory of its cluster state.
    pub(crate) fn disk(&self) -> PathBuf {
        self.directory.path().join("cluster")
    }

    pub(crate) fn key(&self) -> Result<PublicKey> {
        Ok(PublicKey(self.files().read_key()?.context("it has no key")?.public_key()))
    }

    pub(crate) fn id(&self) -> Result<NodeId> {
        Ok(NodeId::from_key(&self.key()?))
    }

    /// The tree of its runnables, for messages.
    pub(crate) fn report(&self) -> String {
        match &self.running {
            None => "it does not run".to_owned(),
            Some(Running::Inside { tree, .. }) => tree.report().to_string(),
            Some(Running::Apart(_)) => {
                std::fs::read_to_string(self.directory.path().join("run.log")).unwrap_or_default()
            }
        }
    }

    /// Waits until its curator runs, or does not run.
    pub(crate) async fn until_control_plane(&self, runs: bool) -> Result<()> {
        let there = self.facts.control_plane.clone();
        let waited = until("the control plane is as it should", async || {
            Ok(there.latest().is_some_and(|there| there.is_some() == runs))
        });
        waited.await.with_context(|| format!("{}\n{}", self.report(), self.etcd_log()))
    }

    fn etcd_log(&self) -> String {
        let log = std::fs::read_to_string(self.places().log_path(etcd_member::NAME)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Waits until it is a node.
    pub(crate) async fn until_it_is_one(&self) -> Result<()> {
        let waited = in_time("its connection", self.facts.connection.watch().next()).await;
        waited.map(drop).with_context(|| self.report())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The role server's tasks end with the test's runtime, but the programs that it started do not. It must leave
        // them alone, or both would stop them at once.
        if let Some(Running::Inside { leaving, .. }) = &self.running {
            leaving.cancel();
        }
        self.running = None;
        for name in self.children() {
            let _ = stop_child(&name, &self.places(), Duration::ZERO);
        }
        // What a worker's fakes left there, if its test failed.
        let _ = PodCgroups::detect_host(&self.places().instance_name()).terminate(Duration::ZERO);
    }
}

/// The keys of the election. Another leadership, of the same curator too, has another key.
pub(crate) async fn election_keys(client: &Client) -> Result<Vec<String>> {
    let listing = client.list(&KeySelector::Prefix(LEADER.range().start)).await?;
    Ok(listing.records.into_iter().map(|record| record.key).collect())
}
