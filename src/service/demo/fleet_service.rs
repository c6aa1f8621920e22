//! The service of a demo: the real one, with limits that are short enough to be watched.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use crate::service::configuration::ConfigurationFile;
use crate::service::failure::Failure;
use crate::service::flags;
use crate::service::plan::plan;
use crate::service::run::{self, OpenDatabase, Running, open_database};

/// Starts it against a simulator, on a private PostgreSQL: one that stays if the fleet does.
pub(super) async fn start(
    me: &Path,
    simulator: &str,
    kept: Option<&Path>,
) -> Result<(OpenDatabase, Running), Failure> {
    let listener = agent_address(kept)?;
    let arguments: Vec<OsString> = [
        "shepherd",
        "--bmdb_max_connections=32",
        "--provider=simulated",
        "--provider_name=sim",
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
        "--outward_limit=10s",
        "--shutdown_grace=5s",
        "--metrics_listen_address=127.0.0.1:0",
        "--api_listen_address=127.0.0.1:0",
    ]
    .iter()
    .map(OsString::from)
    .chain([
        format!("--simulated_url={simulator}").into(),
        // The machines remember whom they belong to, so the database stays where they do.
        kept.map_or_else(|| "--bmdb_eat_my_data".into(), |kept| flag("--bmdb_dir", &kept.join("bmdb"))),
        format!("--agent_listen_address={listener}").into(),
        format!("--agent_endpoint={listener}").into(),
        flag("--agent_executable_path", &agent_program(me)),
    ])
    .chain(kept.into_iter().flat_map(|kept| {
        [flag("--ssh_key_path", &kept.join("ssh_key")), flag("--secrets_key_path", &kept.join("secrets.key"))]
    }))
    .collect();
    let parsed = flags::parse_exactly(arguments)
        .map_err(|error| Failure::failed(format!("the demo's own flags: {error}")))?;
    let service = plan(parsed.service, ConfigurationFile::default())?;
    let database = open_database(&service).await?;
    match run::start(&service, &database).await {
        Ok(running) => Ok((database, running)),
        Err(failure) => {
            database.close().await?;
            Err(failure)
        }
    }
}

fn flag(name: &str, path: &Path) -> OsString {
    let mut argument = OsString::from(format!("{name}="));
    argument.push(path);
    argument
}

/// The role server to put on the machines: the one beside this program. Simulated machines take
/// any program and run none of it, so without one this program itself serves.
fn agent_program(me: &Path) -> PathBuf {
    let beside = me.with_file_name("roleserver");
    if beside.is_file() { beside } else { me.to_path_buf() }
}

/// Where agents call: in a kept demo the address that its agents know, if it is still to be had.
fn agent_address(kept: Option<&Path>) -> Result<SocketAddr, Failure> {
    let failed = |error| Failure::failed(format!("cannot find a free port for agents: {error}"));
    let bound = |address: SocketAddr| TcpListener::bind(address).and_then(|listener| listener.local_addr());
    let file = kept.map(|kept| kept.join("agent_address"));
    let known = file.as_deref().and_then(|file| std::fs::read_to_string(file).ok());
    if let Some(address) = known.and_then(|known| bound(known.trim().parse().ok()?).ok()) {
        return Ok(address);
    }
    let address = bound(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
    if let Some(file) = file {
        std::fs::write(file, address.to_string()).map_err(failed)?;
    }
    Ok(address)
}
