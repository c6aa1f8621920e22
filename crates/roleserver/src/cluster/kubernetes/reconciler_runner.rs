//! Run the reconciler of built-in objects beside etcd, and decide when controller components may start.
//!
//! The reconciler and the readiness check need the node's etcd, and are restarted whenever its control plane is. What
//! they knew from the former one is dropped and not reported any more. The reconciler runs beside the API server before
//! any other component starts, because the elected node makes the objects that the others wait for.

use std::path::PathBuf;
use std::time::Duration;

use etcd::client::Client;
use etcd::key_space::NODES;
use etcd::namespace::Namespace;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use proto::curator::v1 as wire;
use reconciler::gate_wait::wait_until_ready;
use reconciler::leadership::ReconcileTiming;
use reconciler::objects::api_client::{ApiServerConnection, ClientIdentity};
use reconciler::objects::cluster_config::ClusterConfig;
use reconciler::objects::problem::{Problem, ProblemSubject};
use reconciler::objects::reconcile::KubernetesObjects;
use reconciler::program::Program;
use reconciler::service::{LEADER_TTL, Reconciler, ReconcilerSettings};
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster::control_plane::CURATOR_NAMESPACE;
use crate::cluster::etcd_member;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::component_certificates::RoleMaterials;
use crate::cluster::kubernetes::key_material::{SERVER_CAS, role_directory};
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::status::truncate_message;
use crate::status_socket;

/// Time limit for releasing the lease of the leader.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of conflicting objects that are reported to a curator.
const MAX_CONFLICTS: usize = 64;

/// Controller readiness, and the state of the built-in objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControllerReadiness {
    /// Whether components that rely on the built-in objects may start.
    pub is_ready: bool,
    /// What components wait for; `None` while it is unknown.
    pub waiting_for: Option<String>,
    /// Whether this node is the elected reconciler.
    pub is_leader: bool,
    /// Objects that the reconciler cannot apply, and why.
    pub conflicts: Vec<wire::KubernetesObjectConflict>,
}

impl ControllerReadiness {
    /// What components wait for, as a sentence.
    #[must_use]
    pub fn wait_message(&self) -> String {
        self.waiting_for
            .clone()
            .unwrap_or_else(|| "it is being checked whether this controller may start".to_owned())
    }
}

/// Inputs of the reconciler's runnable.
#[derive(Clone)]
pub struct ReconcilerInputs {
    /// Which Kubernetes roles run here.
    pub startup: WatchCell<KubernetesStartup>,
    /// Key material of both roles.
    pub materials: WatchCell<RoleMaterials>,
    /// Configuration that the reconciler applies.
    pub config: WatchCell<ClusterConfig>,
}

/// Makes the runnable that publishes controller readiness in `output`.
#[must_use]
pub fn run_reconciler(
    files: ClusterFiles,
    facts: NodeFacts,
    port: u16,
    inputs: ReconcilerInputs,
    output: WatchCell<ControllerReadiness>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, inputs, output) = (files.clone(), facts.clone(), inputs.clone(), output.clone());
        async move {
            // What an earlier run published no longer holds.
            output.set(ControllerReadiness::default());
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut startups = inputs.startup.watch();
            loop {
                let on = |startup: &KubernetesStartup| startup.controller == RoleStartup::On;
                scope.until_cancelled(startups.next_matching(on)).await?;
                let mut control_planes = facts.control_plane.watch();
                // Skip the current value: only a change matters.
                let _ = control_planes.try_next();
                let over = async {
                    tokio::select! {
                        _ = startups.next_matching(|startup| !on(startup)) => {}
                        _ = control_planes.next() => {}
                    }
                };
                let end = CancellationToken::new();
                let running = Box::pin(run_session(&files, &facts, port, &inputs, &output, end.clone()));
                run_until_stopped(over, end, running, scope).await?;
                output.set(ControllerReadiness::default());
                tracing::info!("the reconciler of Kubernetes ended; it starts again when its etcd runs");
            }
        }
    })
}

/// Runs a session until `over`, and then lets it end by itself within the time limit.
async fn run_until_stopped(
    over: impl Future<Output = ()>,
    end: CancellationToken,
    running: impl Future<Output = Result<(), RunnableError>>,
    scope: &Scope,
) -> Result<(), RunnableError> {
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return ended,
        () = over => {}
        _ = scope.cancelled() => {}
    }
    end.cancel();
    // The session releases the lease, so that the next leader need not wait until it expires.
    tokio::time::timeout(RELEASE_TIMEOUT, running).await.unwrap_or(Ok(()))
}

/// Takes part in the election and waits for readiness, until `ending`.
async fn run_session(
    files: &ClusterFiles,
    facts: &NodeFacts,
    port: u16,
    inputs: &ReconcilerInputs,
    output: &WatchCell<ControllerReadiness>,
    ending: CancellationToken,
) -> Result<(), RunnableError> {
    let prepared = async {
        let connection = facts.connection.watch().next().await;
        let address = facts.address.watch().next().await;
        inputs.materials.watch().next_matching(|all: &RoleMaterials| all.controller.is_some()).await;
        (connection.id, address)
    };
    let Some((own, address)) = ending.run_until_cancelled(prepared).await else { return Ok(()) };
    let directory = files.kubernetes_directory().join(role_directory(KubernetesDuty::Controller));
    let file = |name: &str| -> PathBuf { directory.join(name) };
    let identity = ClientIdentity {
        authority: file(SERVER_CAS),
        certificate: file("reconciler.crt"),
        key: file("reconciler.key"),
    };
    let url = format!("https://{}", std::net::SocketAddr::new(address, port));
    let (wish, wishes) = watch::channel(inputs.config.latest());
    let client = Client::new(vec![etcd_member::client_endpoint(files)], Namespace::new(CURATOR_NAMESPACE)?);
    let program = Program::current();
    let settings = ReconcilerSettings {
        name: own.to_string(),
        program: program.clone(),
        client: client.clone(),
        ttl: LEADER_TTL,
        timing: ReconcileTiming::default(),
    };
    let connection = ApiServerConnection { url, identity: Some(identity) };
    let planned =
        KubernetesObjects::new(connection.clone(), wishes.clone()).with_node_records(client.clone());
    let serving = async {
        let page =
            || async { planned.describe_plan().await.map_or_else(|error| format!("{error}\n"), plan_page) };
        let result =
            status_socket::serve_page(&files.kubernetes_directory(), status_socket::PLAN_SOCKET, page).await;
        if let Err(error) = result {
            tracing::warn!(%error, "the page of the Kubernetes plan cannot be served; the reconciler continues without it");
        }
        std::future::pending::<()>().await;
    };
    let objects = KubernetesObjects::new(connection, wishes).with_node_records(client.clone());
    let mut troubles = objects.problems();
    let reconciler = Reconciler::new(settings, objects);
    let mut leads = reconciler.watch_leading();
    let record = NODES.key(own)?;
    let (sender, mut waits) = watch::channel(None);
    let waiting = async {
        wait_until_ready(&client, &program, &record, &sender).await;
    };
    let running = reconciler.run(&ending);
    tokio::pin!(waiting, running, serving);
    let mut configs = inputs.config.watch();
    let mut open = false;
    loop {
        let gate = ControllerReadiness {
            is_ready: open,
            waiting_for: waits.borrow_and_update().as_ref().map(ToString::to_string),
            is_leader: *leads.borrow_and_update(),
            conflicts: wire_conflicts(&troubles.borrow_and_update()),
        };
        if output.latest().as_ref() != Some(&gate) && !ending.is_cancelled() {
            output.set(gate);
        }
        tokio::select! {
            () = &mut running => return Ok(()),
            () = &mut waiting, if !open => open = true,
            () = &mut serving => {}
            Ok(()) = waits.changed() => {}
            Ok(()) = leads.changed() => {}
            Ok(()) = troubles.changed() => {}
            next = configs.next() => drop(wish.send_replace(Some(next))),
        }
    }
}

/// A plan as text for the person who requested it.
fn plan_page(plan: String) -> String {
    if plan.is_empty() { "no changes: all objects are as this release needs them\n".to_owned() } else { plan }
}

/// Problems with objects in the form that is sent to a curator.
fn wire_conflicts(troubles: &[Problem]) -> Vec<wire::KubernetesObjectConflict> {
    let of = |trouble: &Problem| {
        let (kind, name) = match &trouble.subject {
            ProblemSubject::BuiltIn(resource, key) | ProblemSubject::AddOnObject(_, resource, key) => {
                (resource.to_string(), key.to_string())
            }
            ProblemSubject::AddOn(name) => ("add-on".to_owned(), name.clone()),
            ProblemSubject::Kind(resource) => (resource.to_string(), "*".to_owned()),
        };
        let message = truncate_message(format!("{}; {}", trouble.reason, trouble.remedy));
        wire::KubernetesObjectConflict { kind: truncate_message(kind), name: truncate_message(name), message }
    };
    troubles.iter().take(MAX_CONFLICTS).map(of).collect()
}
