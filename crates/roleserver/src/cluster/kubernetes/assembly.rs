//! Assemble the Kubernetes parts of a node: start all runnables, and connect them through watch cells.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use model::kubernetes::bundle_manifest::KubernetesDuty;
use proto::curator::v1::ServiceStatus;
use supervisor::combine::{CombinedInputs, derive_value};
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError, SecretKeysOrder, SecretKeysStatus};
use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::bundle_store::BundleStore;
use crate::cluster::kubernetes::cgroup_driver::PodHost;
use crate::cluster::kubernetes::component_certificates::{RoleMaterials, manage_certificates};
use crate::cluster::kubernetes::component_revisions::RevisionHistory;
use crate::cluster::kubernetes::load_balancer::ApiServers;
use crate::cluster::kubernetes::pod_cgroups::PodCgroups;
use crate::cluster::kubernetes::reconciler_runner::ControllerReadiness;
use crate::cluster::kubernetes::startup::DrainState;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::kubernetes::stored_driver::StoredDriver;
use crate::cluster::kubernetes::{
    KubernetesContext, bundle_install, bundle_proof, cluster_config, component_status, components,
    curator_watch, desired, host_cleanup, load_balancer, node_object, reconciler_runner, secrets_rewrite,
    setup, startup,
};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::artefact_store::ArtefactStore;
use crate::cluster::services::desired::{DesiredService, ServiceId};
use crate::cluster::services::persisted;
use crate::cluster::services::service_manager;
use crate::cluster::services::service_runtime::{ServiceOwner, ServiceRuntime};

/// How often the file with the cgroup driver is looked at while no input changes.
const DRIVER_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Values that the parts exchange.
#[derive(Clone, Default)]
struct KubernetesValues {
    startup: WatchCell<KubernetesStartup>,
    materials: WatchCell<RoleMaterials>,
    bundle: WatchCell<InstalledBundle>,
    readiness: WatchCell<ControllerReadiness>,
    revisions: WatchCell<RevisionHistory>,
    statuses: WatchCell<Vec<ServiceStatus>>,
    drain: WatchCell<DrainState>,
    servers: WatchCell<Option<ApiServers>>,
    /// What is done with the keys of Secrets.
    secrets: WatchCell<SecretKeysStatus>,
    /// The key that every Secret was written again with.
    rewritten: WatchCell<String>,
}

/// Everything that components follow from; an unknown input has its default value.
#[derive(Clone, Debug, Default)]
struct ComponentInputs {
    startup: Option<KubernetesStartup>,
    materials: RoleMaterials,
    bundle: InstalledBundle,
    readiness: ControllerReadiness,
    address: Option<IpAddr>,
    revisions: RevisionHistory,
    statuses: Option<Vec<ServiceStatus>>,
    drain: DrainState,
    node: Option<String>,
    ordered_secrets: SecretKeysOrder,
    rewritten: String,
}

/// Makes the runnable that starts all parts. It publishes the stored setup once in each life of the process.
#[must_use]
pub fn assembly(host: KubernetesContext, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        async move {
            let parts = KubernetesValues::default();
            let files = host.files.clone();
            set_stored_values(&files, &facts, &parts)?;
            let (watched, handed) = (facts.clone(), parts.drain.clone());
            let deciding = derive_value(
                move || startup::startup_inputs(&watched, &handed),
                startup::decide_startup,
                &parts.startup,
            );
            starting.start("follow", curator_watch::watch_setup(files.clone(), facts.clone()))?;
            starting.start("decide", deciding)?;
            let certificates = manage_certificates(
                (files.clone(), host.children.clone()),
                facts.clone(),
                host.clock.clone(),
                parts.startup.clone(),
                parts.materials.clone(),
            );
            starting.start("certificates", certificates)?;
            let bundles = BundleStore::open(files.bundles_directory(), host.server_pool.clone())
                .with_signing(host.signing.clone());
            let proving =
                bundle_proof::prove_bundles(bundles.clone(), host.signing.clone(), facts.kubernetes.clone());
            starting.start("bundle_proof", proving)?;
            let holding = bundle_install::install_bundle(
                bundles,
                files.clone(),
                parts.startup.clone(),
                parts.bundle.clone(),
            );
            starting.start("bundle", holding)?;
            let config = WatchCell::new();
            let watching = cluster_config::watch_cluster_config(
                ArtefactStore(files.kubernetes_directory().join("add-ons")),
                host.server_pool.clone(),
                (parts.startup.clone(), parts.bundle.clone()),
                config.clone(),
            );
            starting.start("cluster_config", watching)?;
            let inputs = reconciler_runner::ReconcilerInputs {
                startup: parts.startup.clone(),
                materials: parts.materials.clone(),
                config,
            };
            let port = host.ports.api_server;
            let controller = reconciler_runner::run_reconciler(
                files.clone(),
                facts.clone(),
                port,
                inputs,
                parts.readiness.clone(),
            );
            starting.start("controller", controller)?;
            starting.start("secrets", rewrite_secrets(&files, &facts, port, &parts))?;
            let own = node_object::context::NodeContext {
                files: files.clone(),
                children: host.children.clone(),
                clock: host.clock.clone(),
                url: format!("https://{}", host.ports.load_balancer),
                startup: parts.startup.clone(),
                bundle: parts.bundle.clone(),
                statuses: parts.statuses.clone(),
                revisions: parts.revisions.clone(),
            };
            starting.start("own_node", node_object::manage_node_object(own, parts.drain.clone()))?;
            let finding = find_api_servers(&files, &parts);
            starting.start("api_servers", finding)?;
            let balancing = load_balancer::run_load_balancer(host.ports.load_balancer, parts.servers.clone());
            starting.start("balancer", balancing)?;
            let wanted = WatchCell::new();
            starting.start(
                "render",
                render_components(host.clone(), facts.clone(), parts.clone(), wanted.clone()),
            )?;
            let runtime = ServiceRuntime {
                owner: ServiceOwner::Kubernetes,
                hooks: host_cleanup::HOOKS,
                children: host.children.clone(),
                directory: files.kubernetes_directory(),
                store: ArtefactStore(files.kubernetes_directory().join("none")),
            };
            let inputs = service_manager::ServiceManagerInputs {
                desired: wanted,
                retained: WatchCell::new(),
                artefacts: WatchCell::new(),
            };
            let (clock, boot_id) = (host.clock.clone(), host.boot_id.clone());
            starting.start(
                "manager",
                service_manager::run_service_manager(runtime, parts.statuses.clone(), inputs, clock, boot_id),
            )?;
            starting.start("status", publish_status(files, facts, parts))?;
            Err(starting.mark_healthy().scope().cancelled().await.into())
        }
    })
}

/// Gives the values of an earlier life of the process, as far as they are stored.
fn set_stored_values(
    files: &ClusterFiles,
    facts: &NodeFacts,
    parts: &KubernetesValues,
) -> Result<(), ClusterFilesError> {
    // Status is unknown until the components have been inspected.
    facts.kubernetes.clear();
    if facts.setup.latest().is_none()
        && let Some(setup) = setup::read_current(files)
    {
        facts.setup.set(setup);
    }
    if facts.secret_keys.latest().is_none() {
        facts.secret_keys.set(files.read_secret_keys()?);
    }
    let status = files.read_secret_keys_status();
    parts.rewritten.set(status.rewritten.clone());
    parts.secrets.set(status);
    Ok(())
}

/// Makes the runnable that writes every Secret again once another key was ordered.
fn rewrite_secrets(files: &ClusterFiles, facts: &NodeFacts, port: u16, parts: &KubernetesValues) -> Runnable {
    let inputs = secrets_rewrite::RewriteInputs {
        ordered: facts.secret_keys.clone(),
        status: parts.secrets.clone(),
        readiness: parts.readiness.clone(),
    };
    secrets_rewrite::rewrite_secrets(files.clone(), facts.clone(), port, inputs, parts.rewritten.clone())
}

/// Makes the runnable that derives the desired components from all inputs.
fn render_components(
    host: KubernetesContext,
    facts: NodeFacts,
    parts: KubernetesValues,
    output: WatchCell<BTreeMap<ServiceId, DesiredService>>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts, parts, output) = (host.clone(), facts.clone(), parts.clone(), output.clone());
        async move {
            let healthy = starting.mark_healthy();
            let mut inputs = component_inputs(&parts)
                .with(&parts.drain, |known: &mut ComponentInputs, handed| known.drain = handed)
                .with(&facts.address, |known: &mut ComponentInputs, address| known.address = Some(address))
                .with(&facts.connection, |known: &mut ComponentInputs, connection| {
                    known.node = Some(connection.id.to_string());
                });
            let (family, may_raise_scores) = (host.children.instance_name(), can_raise_oom_score());
            let (etcd, directory) =
                (etcd_member::client_socket(&host.files), host.files.kubernetes_directory());
            let of_before = persisted::read_node_info(&host.files).address;
            let mut runs = RevisionHistory::read(&host.files);
            parts.revisions.set(runs.clone());
            let mut driver = StoredDriver::new(
                host.files.clone(),
                PodCgroups::detect_host(&family),
                PodHost::detect_host(),
                facts.host_findings.clone(),
            );
            loop {
                let next = tokio::time::timeout(DRIVER_CHECK_INTERVAL, inputs.next());
                let Ok(known) = healthy.scope().until_cancelled(next).await? else {
                    driver.restore_file();
                    continue;
                };
                let Some(startup) = &known.startup else { continue };
                let before = runs.clone();
                let now = host.clock.now().timestamp_millis();
                let cgroup_driver = match startup.worker {
                    RoleStartup::On => driver.choose(known.drain.is_evicted)?,
                    RoleStartup::Off(_) | RoleStartup::Paused(_) | RoleStartup::Draining(_) => {
                        driver.look_up()
                    }
                };
                let all = desired::DesiredInputs {
                    startup,
                    materials: &known.materials,
                    bundle: &known.bundle,
                    readiness: &known.readiness,
                    address: known.address.or(of_before),
                    ports: &host.ports,
                    etcd: &etcd,
                    directory: &directory,
                    drain: &known.drain,
                    node: known.node.as_deref().unwrap_or_default(),
                    instance_name: &family,
                    can_raise_oom_score: may_raise_scores,
                    cgroup_driver,
                };
                let wanted = desired::desired_components(&all, |context| {
                    let bundle = hex::encode(context.bundle.digest.0);
                    let version = context.bundle.manifest.kubernetes.to_string();
                    let (generation, secrets) = (context.material.generation, &context.material.secrets);
                    runs.revision_for(generation, &bundle, &version, secrets, now)
                });
                if runs != before {
                    // Stored before any component is started with this number.
                    runs.write(&host.files)?;
                    parts.revisions.set(runs.clone());
                }
                if output.latest().as_ref() != Some(&wanted) {
                    output.set(wanted);
                }
            }
        }
    })
}

/// Whether this process may lower the OOM score of processes: whether `/proc/self/status` shows `CAP_SYS_RESOURCE`
/// (capabilities(7)).
fn can_raise_oom_score() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.is_some_and(|effective| (effective >> CAP_SYS_RESOURCE) & 1 == 1)
}

/// Derives the API servers that a worker's components connect to; `None` if no such component exists.
fn find_api_servers(files: &ClusterFiles, parts: &KubernetesValues) -> Runnable {
    let (files, parts) = (files.clone(), parts.clone());
    let output = parts.servers.clone();
    let inputs = move || {
        CombinedInputs::new((None, Vec::new()))
            .with(&parts.startup, |known: &mut (Option<KubernetesStartup>, _), startup| {
                known.0 = Some(startup);
            })
            .with(&parts.statuses, |known: &mut (_, Vec<ServiceStatus>), statuses| known.1 = statuses)
    };
    let decide = move |(startup, statuses): &(Option<KubernetesStartup>, Vec<ServiceStatus>)| {
        let startup = startup.as_ref()?;
        let role = components::service_id(KubernetesDuty::Worker, "").role;
        let is_used =
            !matches!(startup.worker, RoleStartup::Off(_)) || statuses.iter().any(|one| one.role == role);
        // A worker that leaves needs the last known API servers.
        let setup = startup.setup.clone().or_else(|| is_used.then(|| setup::read_last(&files)).flatten());
        let servers = setup.map(|setup| load_balancer::parse_servers(setup.api_servers()));
        Some(servers.filter(|_| is_used))
    };
    derive_value(inputs, decide, &output)
}

/// Makes the runnable that publishes the Kubernetes status.
fn publish_status(files: ClusterFiles, facts: NodeFacts, parts: KubernetesValues) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, parts) = (files.clone(), facts.clone(), parts.clone());
        async move {
            let healthy = starting.mark_healthy();
            let mut inputs = component_inputs(&parts)
                .with(&parts.revisions, |known: &mut ComponentInputs, runs| known.revisions = runs)
                .with(&parts.statuses, |known: &mut ComponentInputs, statuses| {
                    known.statuses = Some(statuses);
                })
                .with(&facts.secret_keys, |known: &mut ComponentInputs, order| known.ordered_secrets = order)
                .with(&parts.rewritten, |known: &mut ComponentInputs, rewritten| known.rewritten = rewritten);
            loop {
                let known = healthy.scope().until_cancelled(inputs.next()).await?;
                let (Some(startup), Some(statuses)) = (&known.startup, &known.statuses) else { continue };
                let now = component_status::kubernetes_status(
                    startup,
                    statuses,
                    &known.revisions,
                    &known.readiness,
                    &known.bundle,
                );
                if facts.kubernetes.latest().as_ref() != Some(&now) {
                    facts.kubernetes.set(now);
                }
                publish_secrets(&files, &parts, &known, statuses)?;
            }
        }
    })
}

/// Stores and publishes what the API server does with the keys of Secrets, if that has changed.
fn publish_secrets(
    files: &ClusterFiles,
    parts: &KubernetesValues,
    known: &ComponentInputs,
    statuses: &[ServiceStatus],
) -> Result<(), ClusterFilesError> {
    // An API server is started with what is in its material, which may be older than the order.
    let ordered = known.ordered_secrets.provider_list();
    let next_start = known.materials.controller.as_ref().map_or(&ordered, |material| &material.secrets);
    let before = parts.secrets.latest().unwrap_or_default();
    let running = component_status::running_secrets(statuses, &known.revisions, next_start);
    let running = running.unwrap_or_else(|| before.running.clone());
    let now = SecretKeysStatus { running, rewritten: known.rewritten.clone() };
    if now != before {
        files.write_secret_keys_status(&now)?;
        parts.secrets.set(now);
    }
    Ok(())
}

fn component_inputs(parts: &KubernetesValues) -> CombinedInputs<ComponentInputs> {
    CombinedInputs::new(ComponentInputs::default())
        .with(&parts.startup, |known: &mut ComponentInputs, startup| known.startup = Some(startup))
        .with(&parts.materials, |known: &mut ComponentInputs, materials| known.materials = materials)
        .with(&parts.bundle, |known: &mut ComponentInputs, held| known.bundle = held)
        .with(&parts.readiness, |known: &mut ComponentInputs, gate| known.readiness = gate)
}
