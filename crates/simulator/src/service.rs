//! The simulator as a process: arguments, start, stop.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::api;
use crate::fault_command::FaultArgs;
use crate::faults::FaultProfile;
use crate::fleet::{SimulatedFleet, host_now};
use crate::journal::Journal;
use crate::machine::FleetProfile;
use crate::node::NodeSettings;
use crate::seed::Seed;
use crate::state::{FleetState, StateError, StateLock};

/// Default share of machines that start their agent again after a boot, in per cent.
const PERSISTENT_AGENT_PERCENT: u64 = 80;
/// Most open files of one machine: three for its SSH port, some connections, its agent's.
const FILES_PER_MACHINE: u64 = 12;
const OTHER_FILES: u64 = 256;
/// How long requests may take to be answered after a shutdown was requested.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// `shepherd simulator`, with or without a verb.
#[derive(Clone, Debug, clap::Args)]
#[command(
    about = "Simulate a fleet: machines behind a provider API, SSH and real agents",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct SimulatorArgs {
    /// A verb; without one the simulator runs.
    #[command(subcommand)]
    pub command: Option<SimulatorCommand>,
    /// Flags of a simulator that runs.
    #[command(flatten)]
    pub run: Option<RunArgs>,
}

/// Subcommands of `shepherd simulator`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum SimulatorCommand {
    /// Break a machine, or the provider itself.
    Fault(FaultArgs),
}

/// How a simulator runs.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArgs {
    /// Loopback address of the provider API; port 0 lets the system choose.
    #[arg(long = "listen_address", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub listen_address: SocketAddr,
    /// File that stores the fleet; created if missing. A journal of calls is written beside it.
    #[arg(long = "state_path", value_name = "FILE")]
    pub state_path: PathBuf,
    /// Number of machines. A fleet in the state file grows to this number, and never shrinks.
    #[arg(long = "machine_count", value_name = "N", default_value_t = 50)]
    pub machine_count: u32,
    /// Seed of all random numbers. [default: that of the fleet in the state file, or 1]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
    /// Faults that occur by themselves.
    #[arg(long = "fault_profile", value_enum, ignore_case = true, value_name = "PROFILE", default_value_t = FaultProfile::None)]
    pub fault_profile: FaultProfile,
    /// Average duration of a boot in seconds; each boot takes from half to one and a half of it.
    #[arg(long = "boot_seconds", alias = "boot-seconds", value_name = "SECONDS", default_value_t = 3.0)]
    pub boot_seconds: f64,
    /// How many of a hundred machines start their agent again after a boot.
    #[arg(
        long = "persistent_agent_percent",
        value_name = "PERCENT",
        default_value_t = PERSISTENT_AGENT_PERCENT,
        value_parser = clap::value_parser!(u64).range(0..=100)
    )]
    pub persistent_agent_percent: u64,
    /// The role server's program. With it machines can be nodes of clusters, each with a real etcd.
    #[arg(long = "roleserver_path", value_name = "FILE")]
    pub roleserver_path: Option<PathBuf>,
    /// End when standard input ends: the process that holds its other end has closed it or died.
    #[arg(long = "exit_with_parent", hide = true)]
    pub exit_with_parent: bool,
}

/// Why the simulator cannot start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum SimulatorError {
    /// The address is not a loopback address, so others could reach it.
    #[error(
        "the simulator listens on loopback addresses only, and {0} is none; give --listen_address 127.0.0.1:PORT"
    )]
    NotLoopback(SocketAddr),
    /// The duration of a boot is invalid.
    #[error("--boot_seconds {0} is not a duration; give a number from 0 to 3600")]
    BootSeconds(f64),
    /// The address cannot be listened on.
    #[error(
        "the simulator cannot listen on {address}: {source}; stop what has it, or give another --listen_address"
    )]
    Listen {
        /// The address that was given.
        address: SocketAddr,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The state file cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The journal cannot be used.
    #[error("the simulator's journal of calls {path} cannot be opened: {source}")]
    Journal {
        /// The path of the journal.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The system did not provide the resources that the fleet needs.
    #[error("the simulator cannot start its machines: {0}")]
    Machines(std::io::Error),
    /// The API server stopped by itself.
    #[error("the simulator's API stopped serving: {0}")]
    Serve(std::io::Error),
    /// The reader of standard output is gone.
    #[error("the simulator cannot print its address: {0}")]
    Announce(std::io::Error),
}

impl SimulatorError {
    /// Whether the caller made a mistake (exit code 2) or something else failed (exit code 1).
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::NotLoopback(_)
                | Self::BootSeconds(_)
                | Self::State(StateError::Seed { .. } | StateError::Content { .. } | StateError::InUse(_))
        )
    }
}

/// A simulator that listens.
pub struct Simulator {
    listener: TcpListener,
    address: SocketAddr,
    fleet: Arc<SimulatedFleet>,
    _lock: StateLock,
}

impl Simulator {
    /// Locks the state file, binds the address, and starts the fleet.
    pub async fn start(args: &RunArgs) -> Result<Self, SimulatorError> {
        if !args.listen_address.ip().is_loopback() {
            return Err(SimulatorError::NotLoopback(args.listen_address));
        }
        let boot = boot_duration(args.boot_seconds)?;
        // Bound before any file is created: a start that fails at the address leaves nothing behind.
        let failed = |source| SimulatorError::Listen { address: args.listen_address, source };
        let listener = TcpListener::bind(args.listen_address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let lock = StateLock::acquire(&args.state_path)?;
        let mut state = match FleetState::load(&args.state_path)? {
            Some(state) => state,
            None => FleetState::new(Seed(args.seed.unwrap_or(1)), args.machine_count, host_now()),
        };
        if let Some(requested) = args.seed
            && requested != state.seed.0
        {
            let path = args.state_path.clone();
            return Err(StateError::Seed { path, found: state.seed.0, requested }.into());
        }
        state.grow(args.machine_count, host_now());
        let machines = state.machines.len();
        raise_file_limit(machines);
        let path = Journal::path_beside(&args.state_path);
        let journal = Journal::open(&path).map_err(|source| SimulatorError::Journal { path, source })?;
        let profile = FleetProfile {
            seed: state.seed,
            fault_profile: args.fault_profile,
            boot,
            persistent_per_mille: args.persistent_agent_percent * 10,
        };
        let nodes = args.roleserver_path.clone().map(|roleserver| {
            let absolute = std::path::absolute(&args.state_path).unwrap_or_else(|_| args.state_path.clone());
            NodeSettings { roleserver, disks: NodeSettings::disks_beside(&absolute) }
        });
        let fleet = SimulatedFleet::start(profile, state, args.state_path.clone(), journal, nodes)
            .map_err(SimulatorError::Machines)?;
        tracing::info!(%address, machines, seed = profile.seed.0, faults = ?args.fault_profile, "the simulator runs");
        Ok(Self { listener, address, fleet, _lock: lock })
    }

    /// The URL of its provider API.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Serves until `shutdown` is cancelled. Then stops every machine's servers and agents, and saves the last state.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<(), SimulatorError> {
        let Self { listener, fleet, _lock: lock, .. } = self;
        let serving = axum::serve(listener, api::routes(Arc::clone(&fleet)))
            .with_graceful_shutdown(shutdown.clone().cancelled_owned());
        // A client that never ends its request must not keep the fleet from stopping.
        let patience = async {
            shutdown.cancelled().await;
            tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
        };
        let served = tokio::select! {
            served = serving.into_future() => served.map_err(SimulatorError::Serve),
            () = patience => Ok(()),
        };
        fleet.stop().await;
        drop(lock);
        served
    }
}

/// Runs a simulator. The first line it writes to `announce` is `listening on http://ADDRESS:PORT`.
pub async fn run_simulator(
    args: RunArgs,
    mut announce: impl std::io::Write,
    shutdown: CancellationToken,
) -> Result<(), SimulatorError> {
    let simulator = Simulator::start(&args).await?;
    writeln!(announce, "listening on {}", simulator.url())
        .and_then(|()| announce.flush())
        .map_err(SimulatorError::Announce)?;
    simulator.serve(shutdown).await
}

fn boot_duration(seconds: f64) -> Result<TimeDelta, SimulatorError> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| duration.as_secs() <= 3600)
        .and_then(|duration| TimeDelta::from_std(duration).ok())
        .ok_or(SimulatorError::BootSeconds(seconds))
}

/// Raises this process's limit of open files to what the fleet needs, as far as the hard limit allows.
fn raise_file_limit(machines: usize) {
    let wanted = OTHER_FILES + FILES_PER_MACHINE * machines as u64;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        let current = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
        let raised = Rlimit { current: Some(current), maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, required = wanted, "cannot raise the limit of open files");
        } else if current < wanted {
            tracing::warn!(
                current,
                required = wanted,
                "the limit of open files is too low for so many machines"
            );
        }
    }
}
