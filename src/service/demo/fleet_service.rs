//! The service of a demo, with limits short enough to watch.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::service::configuration::ConfigurationFile;
use crate::service::database::{OpenDatabase, open_database};
use crate::service::demo::reserved_port::{DemoListener, ReservedPort};
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
    let agents = ReservedPort::reserve(DemoListener::Agents, directory)?;
    let api = ReservedPort::reserve(DemoListener::Api, directory)?;
    let metrics = ReservedPort::reserve(DemoListener::Metrics, directory)?;
    let arguments: Vec<OsString> = [
        "shepherd",
        "--bmdb_max_connections=32",
        "--provider=simulated",
        "--provider_name=sim",
        // A host that stalls for some seconds loses no session. A session lost right before the end would stay open.
        "--session_interval=15s",
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
        format!("--agent_listen_address={}", agents.address).into(),
        format!("--agent_endpoint={}", agents.address).into(),
        format!("--api_listen_address={}", api.address).into(),
        format!("--metrics_listen_address={}", metrics.address).into(),
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
