//! The root runnable of a cluster node: starts every part, and removes the node when it is ordered to leave.
//!
//! A machine without an order waits here. When it gets one, this runnable fails on purpose and is restarted, so that
//! all parts start from the files. An order to leave does the same; the next run finds no part running, and removes
//! what they left.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The type of [`ClusterNodeSettings::address_rule`], also for programs that use nothing else of the curator.
pub use curator::node_address::AddressRule;
use curator_client::clock::Clock;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio_util::sync::CancellationToken;

use crate::child::cgroup::CgroupMounts;
use crate::child::lifecycle::{ChildContext, stop_leftovers};
use crate::child::placement::Scopes;
use crate::cluster::authority_status::follow_authorities;
use crate::cluster::certificate_renewal::renew_certificate;
use crate::cluster::child_placement::{keep_children_placed, place_children};
use crate::cluster::control_plane::run_control_plane;
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::curator_directory::{follow_leader, refresh_curator_directory};
use crate::cluster::etcd_image::watch_programs;
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::kubernetes;
use crate::cluster::kubernetes::components::ComponentPorts;
use crate::cluster::node_address::follow_address;
use crate::cluster::node_enrolment::enroll_node;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_heartbeat::send_heartbeats;
use crate::cluster::node_order::OrderKind;
use crate::cluster::node_status::report_node_status;
use crate::cluster::roles::watch_roles;
use crate::cluster::services::run_services;
use crate::server_pool::ServerPool;
use crate::signing_store::SigningStore;

/// How often a machine that is no node checks its directory for an order.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Settings that the node's runnable is started with.
#[derive(Clone, Debug)]
pub struct ClusterNodeSettings {
    /// The state directory of the role server.
    pub state_directory: PathBuf,
    /// Path of this program, which launches children.
    pub launcher: PathBuf,
    /// Path of the program etcd.
    pub etcd: PathBuf,
    /// UUID of the running boot.
    pub boot_id: String,
    /// Clock for certificates, backoff and timestamps.
    pub clock: Clock,
    /// Cancelled before the role server ends, so that children keep running.
    pub shutdown: CancellationToken,
    /// Source of artefacts and bundles whose declaration has no URL.
    pub server_pool: ServerPool,
    /// Keys that bundles must be signed with, and declarations that give root if the machine requires that.
    pub signing: SigningStore,
    /// Listen ports of Kubernetes components.
    pub ports: ComponentPorts,
    /// Where the curator on this node takes the addresses of nodes from.
    pub address_rule: AddressRule,
}

/// Makes the runnable that runs this machine's part in a cluster.
///
/// The parts exchange values through `facts`. The caller keeps a clone to watch them.
#[must_use]
pub fn run_cluster_node(settings: &ClusterNodeSettings, facts: &NodeFacts) -> Runnable {
    let files = ClusterFiles::in_state_directory(&settings.state_directory);
    let host = ControlPlaneContext {
        files: files.clone(),
        children: Arc::new(child_context(&settings.state_directory, settings)),
        etcd: settings.etcd.clone(),
        clock: settings.clock.clone(),
        address_rule: settings.address_rule,
    };
    let (facts, clock, boot_id) = (facts.clone(), settings.clock.clone(), settings.boot_id.clone());
    let (server_pool, signing) = (settings.server_pool.clone(), settings.signing.clone());
    let of_kubernetes = kubernetes::KubernetesContext {
        files: files.clone(),
        children: host.children.clone(),
        clock: clock.clone(),
        boot_id: boot_id.clone(),
        server_pool: server_pool.clone(),
        signing: signing.clone(),
        ports: settings.ports.clone(),
    };
    Runnable::new(move |starting: Starting| {
        let parts = [
            ("placement", keep_children_placed(host.children.clone(), facts.clone())),
            (
                "enrolment",
                enroll_node(
                    files.clone(),
                    host.children.clone(),
                    facts.clone(),
                    clock.clone(),
                    server_pool.clone(),
                ),
            ),
            ("leader", follow_leader(files.clone(), facts.clone())),
            ("address", follow_address(files.clone(), facts.clone())),
            ("control_plane", run_control_plane(host.clone(), facts.clone())),
            ("roles", watch_roles(files.clone(), facts.clone())),
            ("status", report_node_status(facts.clone(), boot_id.clone())),
            ("heartbeat", send_heartbeats(facts.clone())),
            ("certificate", renew_certificate(files.clone(), facts.clone(), clock.clone())),
            ("authorities", follow_authorities(files.clone(), facts.clone(), clock.clone())),
            ("directory", refresh_curator_directory(files.clone(), facts.clone(), clock.clone())),
            (
                "services",
                run_services(
                    (files.clone(), server_pool.clone(), signing.clone()),
                    facts.clone(),
                    host.children.clone(),
                    clock.clone(),
                    boot_id.clone(),
                ),
            ),
            ("kubernetes", kubernetes::run_kubernetes(of_kubernetes.clone(), facts.clone())),
        ];
        let (files, facts, host) = (files.clone(), facts.clone(), host.clone());
        async move {
            // No part of an earlier run is running any more.
            if should_leave(&files)? {
                remove_node(&host).await?;
                facts.clear();
            }
            let mut ordered = facts.order_changed.watch();
            // Of machines that are no nodes, too: one of them may have to restore a cluster.
            starting.start("programs", watch_programs(host.etcd.clone(), facts.clone()))?;
            if !should_be_node(&files)? {
                let healthy = starting.mark_healthy();
                while !should_be_node(&files)? {
                    let look = tokio::time::timeout(POLL_INTERVAL, ordered.next());
                    // A timeout and a changed order both lead to another check.
                    let _ = healthy.scope().until_cancelled(look).await?;
                }
                return Err(RunnableError::msg("this machine was ordered to become a node of a cluster"));
            }
            // Before anything ends or restarts the role server once more. What cannot be moved now is tried again.
            place_children(&host.children, &facts).await?;
            for (name, part) in parts {
                starting.start(name, part)?;
            }
            let healthy = starting.mark_healthy();
            loop {
                healthy.scope().until_cancelled(ordered.next()).await?;
                if should_leave(&files)? {
                    return Err(RunnableError::msg(
                        "this machine was ordered to leave its cluster; it stops what it runs",
                    ));
                }
            }
        }
    })
}

/// Whether this machine is a node, or has an order to become one.
fn should_be_node(files: &ClusterFiles) -> Result<bool, ClusterFilesError> {
    let requested = files.read_order()?.is_some_and(|order| order.what != OrderKind::Leave {});
    Ok(requested || files.read_credentials()?.is_some())
}

fn should_leave(files: &ClusterFiles) -> Result<bool, ClusterFilesError> {
    Ok(files.read_order()?.is_some_and(|order| order.what == OrderKind::Leave {}))
}

/// Stops and removes everything that is left of a node. Safe to repeat after an interruption at any point.
async fn remove_node(host: &ControlPlaneContext) -> Result<(), RunnableError> {
    let (files, children) = (host.files.clone(), host.children.clone());
    let leaving = move || {
        for name in children.recorded_names() {
            stop_leftovers(&name, &children)?;
            children.remove_files(&name)?;
        }
        kubernetes::host_cleanup::clean_up_all(&files, &children)?;
        Ok::<_, RunnableError>(files.remove_all_except_order()?)
    };
    tokio::task::spawn_blocking(leaving).await?
}

fn child_context(state_directory: &Path, settings: &ClusterNodeSettings) -> ChildContext {
    ChildContext {
        directory: state_directory.join("children"),
        mounts: CgroupMounts::detect_host(),
        launcher: settings.launcher.clone(),
        shutdown: settings.shutdown.clone(),
        scopes: Scopes::detect_host(),
    }
}
