//! Simulated machine as a cluster node, with a real etcd.
//!
//! Nothing of the node is simulated: it is the role server's own worker, with a real etcd beside it and a real curator
//! in this process. Only its surroundings are made up: its disk is a directory beside the simulator's state file, and
//! its address is one of the loopback network, because all nodes listen on the same ports.
//!
//! The node stops when the machine stops running programs, and starts again with its agent from the state of its disk:
//! a machine whose power was cut comes back as it would in a rack.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::ids::MachineId;
use roleserver::child::cgroup::Cgroup;
use roleserver::child::launch;
use roleserver::cluster::cluster_node::{AddressRule, ClusterNodeSettings, run_cluster_node};
use roleserver::cluster::etcd_program;
use roleserver::cluster::files::ClusterFiles;
use roleserver::cluster::kubernetes::components::ComponentPorts;
use roleserver::cluster::node_facts::NodeFacts;
use roleserver::cluster::order_inbox::OrderInbox;
use roleserver::server_pool::ServerPool;
use roleserver::signing_store::SigningStore;
use roleserver::state_directory::StateDirectory;
use supervisor::supervise::{self, Supervisor};
use tokio_util::sync::CancellationToken;

/// What nodes of a simulator need.
#[derive(Clone, Debug)]
pub(crate) struct NodeSettings {
    /// The role server's program, which starts the processes of a node.
    pub(crate) roleserver: PathBuf,
    /// The directory of the machines' disks.
    pub(crate) disks: PathBuf,
}

/// The cluster part of one machine.
#[derive(Clone, Debug)]
pub(crate) struct MachineNode {
    /// Its inbox for cluster orders, and its reports.
    pub(crate) orders: OrderInbox,
    /// The servers of shepherds that its agent knows.
    pub(crate) shepherds: ServerPool,
    facts: NodeFacts,
    disk: PathBuf,
    roleserver: PathBuf,
}

impl NodeSettings {
    /// The cluster part of the machine with this id at its provider.
    #[must_use]
    pub(crate) fn for_machine(&self, machine: MachineId, id: &str) -> MachineNode {
        let disk = self.disks.join(id);
        let facts = NodeFacts::default();
        MachineNode {
            orders: OrderInbox::new(machine, ClusterFiles::in_state_directory(&disk), facts.clone()),
            shepherds: ServerPool::default(),
            facts,
            disk,
            roleserver: self.roleserver.clone(),
        }
    }

    /// The directory of the machines' disks, beside the state file.
    #[must_use]
    pub(crate) fn disks_beside(state: &Path) -> PathBuf {
        let mut name = state.as_os_str().to_owned();
        name.push(".disks");
        PathBuf::from(name)
    }
}

impl MachineNode {
    /// The directory that is its disk.
    #[must_use]
    pub(crate) fn disk(&self) -> &Path {
        &self.disk
    }

    /// Runs the node until `over`, once the lock of its disk is free.
    pub(crate) async fn run(
        self,
        boot_id: String,
        disk: Arc<tokio::sync::Mutex<()>>,
        over: CancellationToken,
    ) {
        let _disk = disk.lock().await;
        if over.is_cancelled() {
            return;
        }
        if let Err(error) = std::fs::create_dir_all(&self.disk) {
            tracing::error!(disk = %self.disk.display(), %error, "the disk of a simulated machine cannot be created, so it cannot be a node");
            return;
        }
        let (state, disk) = (StateDirectory::from_path(self.disk.clone()), self.disk.clone());
        let settings = ClusterNodeSettings {
            state_directory: self.disk,
            launcher: self.roleserver,
            etcd: etcd_program::program(),
            boot_id,
            clock: curator_client::clock::Clock::system(),
            // Its processes end with it, as if the power of the machine were cut.
            shutdown: CancellationToken::new(),
            server_pool: self.shepherds,
            // Simulated machines pin no keys.
            signing: SigningStore::open(state),
            ports: ComponentPorts::default(),
            address_rule: AddressRule::reported_on_loopback(),
        };
        let tree = Supervisor::start(
            run_cluster_node(&settings, &self.facts),
            supervise::SupervisorSettings::default(),
        );
        over.cancelled().await;
        tree.stop().await;
        end_programs(disk).await;
    }
}

/// Ends what a node leaves running: services and the programs of Kubernetes survive a role server, and no loss of power.
async fn end_programs(disk: PathBuf) {
    let end = move || {
        for child in std::fs::read_dir(disk.join("children")).into_iter().flatten().flatten() {
            let record = launch::read_record(&child.path().join("process.json"));
            let stopped =
                launch::stop_process_group(record.as_ref(), &Cgroup::default(), Duration::ZERO, None);
            if let Err(error) = stopped {
                tracing::error!(child = %child.path().display(), %error, "a program of a simulated machine without power cannot be ended");
            }
        }
    };
    // A panic is printed by its thread.
    let _ = tokio::task::spawn_blocking(end).await;
}

/// A random address for a new node, of four million in the loopback network.
#[must_use]
pub(crate) fn random_loopback_address() -> Ipv4Addr {
    let [a, b, c]: [u8; 3] = rand::random();
    Ipv4Addr::new(127, 128 | (a & 0x3f), b, c.clamp(1, 254))
}
