//! The service of a demo, with limits short enough to watch.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use tokio::net::TcpSocket;

use crate::service::configuration::ConfigurationFile;
use crate::service::database::{OpenDatabase, open_database};
use crate::service::failure::ExitFailure;
use crate::service::flags;
use crate::service::running_service::RunningService;
use crate::service::service_plan::plan_service;
use crate::service::start;
use crate::service::stop_deadline::StopDeadline;
use crate::service::traces::SpanCounts;

/// Starts the service against a simulator, on a private PostgreSQL, which is persistent if the fleet is.
pub(super) async fn start_service(
    me: &Path,
    simulator: &str,
    directory: Option<&Path>,
) -> Result<(OpenDatabase, RunningService), ExitFailure> {
    // Reserved until the service listens there.
    let reserved = agent_address(directory)?;
    let listener = reserved.address;
    let arguments: Vec<OsString> = [
        "shepherd",
        "--bmdb_max_connections=32",
        "--provider=simulated",
        "--provider_name=sim",
        // A host that stalls for some seconds loses no session. A session lost right before the end would stay open.
        "--session_interval=15s",
        "--initializer_loop_parallelism=10",
        "--recoverer_loop_parallelism=10",
        "--updater_loop_parallelism=4",
        "--initializer_db_query_rate=20ms,20",
        "--recoverer_db_query_rate=20ms,20",
        "--provisioner_reconciler_rate=2s,1",
        "--provisioner_device_creation_rate=20ms,20",
        "--provisioner_max_machines=0",
        "--heartbeat_interval=2s",
        "--recovery_first_heartbeat_timeout=20s",
        "--recovery_silence_timeout=8s",
        "--recovery_ladder=restart-agent:8s:2,reboot:20s:2,power-cycle:25s:2",
        "--recovery_brake_window=20s",
        "--recovery_brake_fraction=0.3",
        "--agent_start_backoff_initial=2s",
        "--agent_start_backoff_maximum=20s",
        "--update_interval_stable=30s",
        "--update_interval_unstable=1s",
        "--updater_db_query_rate=20ms,20",
        "--retirer_loop_parallelism=4",
        "--retirer_db_query_rate=20ms,20",
        "--switcher_loop_parallelism=4",
        "--switcher_db_query_rate=20ms,20",
        "--outward_call_timeout=10s",
        "--shutdown_grace=5s",
        "--metrics_listen_address=127.0.0.1:0",
        "--api_listen_address=127.0.0.1:0",
    ]
    .iter()
    .map(OsString::from)
    .chain([
        format!("--simulated_url={simulator}").into(),
        // The machines know which BMDB they belong to, so the database is persistent if they are.
        directory.map_or_else(
            || "--bmdb_eat_my_data".into(),
            |directory| path_flag("--bmdb_dir", &directory.join("bmdb")),
        ),
        format!("--agent_listen_address={listener}").into(),
        format!("--agent_endpoint={listener}").into(),
        path_flag("--agent_executable_path", &agent_program(me)),
    ])
    .chain(directory.into_iter().flat_map(|directory| {
        [
            path_flag("--ssh_key_path", &directory.join("ssh_key")),
            path_flag("--secrets_key_path", &directory.join("secrets.key")),
        ]
    }))
    .collect();
    let parsed = flags::parse_flags_without_environment(arguments)
        .map_err(|error| ExitFailure::failed(format!("the demo's own flags: {error}")))?;
    let service = plan_service(parsed.service, ConfigurationFile::default())?;
    let database = open_database(&service).await?;
    match start::start_service(&service, &database, &SpanCounts::default()).await {
        Ok(running) => Ok((database, running)),
        Err(failure) => {
            database.close(StopDeadline::from_now()).await?;
            Err(failure)
        }
    }
}

fn path_flag(name: &str, path: &Path) -> OsString {
    let mut argument = OsString::from(format!("{name}="));
    argument.push(path);
    argument
}

/// The role server to install on the machines: the one beside this program. Simulated machines accept any program and
/// run none of it, so without one this program itself is used.
fn agent_program(me: &Path) -> PathBuf {
    find_roleserver(me).unwrap_or_else(|| me.to_path_buf())
}

/// The role server beside this program; `None` if it does not exist.
pub(super) fn find_roleserver(me: &Path) -> Option<PathBuf> {
    Some(me.with_file_name("roleserver")).filter(|beside| beside.is_file())
}

/// A port that no other process gets while this exists: bound, and never listened on. A port that was bound and closed
/// may be the local end of another connection a moment later.
struct ReservedPort {
    address: SocketAddr,
    _socket: TcpSocket,
}

impl ReservedPort {
    fn reserve(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A server that sets this too may listen on the port meanwhile, as all our servers do.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { address: socket.local_addr()?, _socket: socket })
    }
}

/// The address of the callback server: in a persistent demo the one that its agents know, if it is still free.
fn agent_address(directory: Option<&Path>) -> Result<ReservedPort, ExitFailure> {
    let failed = |error| ExitFailure::failed(format!("cannot find a free port for agents: {error}"));
    let file = directory.map(|directory| directory.join("agent_address"));
    let last = file.as_deref().and_then(|file| std::fs::read_to_string(file).ok());
    if let Some(reserved) = last.and_then(|last| ReservedPort::reserve(last.trim().parse().ok()?).ok()) {
        return Ok(reserved);
    }
    let reserved = ReservedPort::reserve(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
    if let Some(file) = file {
        std::fs::write(file, reserved.address.to_string()).map_err(failed)?;
    }
    Ok(reserved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reserved_port_is_exclusive_and_can_be_listened_on() {
        let reserved = agent_address(None).unwrap();
        assert!(std::net::TcpStream::connect(reserved.address).is_err(), "nobody listens");
        let listener = tokio::net::TcpListener::bind(reserved.address).await.unwrap();
        assert_eq!(listener.local_addr().unwrap(), reserved.address);
        assert_ne!(agent_address(None).unwrap().address, reserved.address);
    }

    #[tokio::test]
    async fn persistent_demo_reuses_its_port_if_free() {
        let directory = tempfile::tempdir().unwrap();
        let first = agent_address(Some(directory.path())).unwrap().address;
        assert_eq!(agent_address(Some(directory.path())).unwrap().address, first);
        let taken = tokio::net::TcpListener::bind(first).await.unwrap();
        let other = agent_address(Some(directory.path())).unwrap().address;
        assert_ne!(other, first, "somebody listens there");
        drop(taken);
        assert_eq!(agent_address(Some(directory.path())).unwrap().address, other);
    }
}
