//! A simulated machine as a node of a cluster.
//!
//! Nothing of the node is simulated: it is the role server's own worker, with a real etcd beside it and a real curator in
//! this process. Made up is only where it lives: a directory beside the simulator's state file for a disk, and an
//! address of the loopback network for its own, because all nodes listen on the same ports.
//!
//! What runs as a node ends when the machine does not run programs any more, and begins again with its agent from what is
//! on its disk: a machine whose power was cut comes back as it would in a rack.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::model::ids::MachineId;
use crate::roleserver::cluster::asked::Asked;
use crate::roleserver::cluster::etcd_program;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::ports::Ports;
use crate::roleserver::cluster::worker::{Settings, worker};
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::supervise::{self, Supervisor};

/// What nodes of a simulator need.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// The role server's program, which starts what runs beside a node.
    pub roleserver: PathBuf,
    /// Where the disks of machines are.
    pub disks: PathBuf,
}

/// One machine's part in clusters.
#[derive(Clone, Debug)]
pub struct NodeOfMachine {
    /// Its side of the conversation about clusters.
    pub asked: Asked,
    /// By which ways it reaches shepherds, as its agent says.
    pub shepherds: Shepherds,
    facts: Facts,
    disk: PathBuf,
    roleserver: PathBuf,
}

impl Nodes {
    /// The part of the machine whose provider calls it `id`.
    #[must_use]
    pub fn of(&self, machine: MachineId, id: &str) -> NodeOfMachine {
        let disk = self.disks.join(id);
        let facts = Facts::default();
        NodeOfMachine {
            asked: Asked::new(machine, Files::of(&disk), facts.clone()),
            shepherds: Shepherds::default(),
            facts,
            disk,
            roleserver: self.roleserver.clone(),
        }
    }

    /// Where the disks of a fleet's machines are.
    #[must_use]
    pub fn disks_beside(state: &Path) -> PathBuf {
        let mut name = state.as_os_str().to_owned();
        name.push(".disks");
        PathBuf::from(name)
    }
}

impl NodeOfMachine {
    /// Where its disk is.
    #[must_use]
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// Runs it until `over`, once `disk` is nobody else's.
    pub async fn run(self, boot_id: String, disk: Arc<tokio::sync::Mutex<()>>, over: CancellationToken) {
        let _disk = disk.lock().await;
        if over.is_cancelled() {
            return;
        }
        if let Err(error) = std::fs::create_dir_all(&self.disk) {
            tracing::error!(disk = %self.disk.display(), %error, "a simulated machine has no disk, and can be no node");
            return;
        }
        let settings = Settings {
            state_directory: self.disk,
            launcher: self.roleserver,
            etcd: etcd_program::program(),
            boot_id,
            clock: crate::curator::clock::Clock::host(),
            // What runs beside it ends with it, as with the power of a machine.
            leaving: CancellationToken::new(),
            shepherds: self.shepherds,
            ports: Ports::default(),
        };
        let tree = Supervisor::start(worker(&settings, &self.facts), supervise::Settings::default());
        over.cancelled().await;
        tree.stop().await;
    }
}

/// An address for a new node: one of four million of the loopback network.
#[must_use]
pub fn draw_address() -> Ipv4Addr {
    let [a, b, c]: [u8; 3] = rand::random();
    Ipv4Addr::new(127, 128 | (a & 0x3f), b, c.clamp(1, 254))
}
