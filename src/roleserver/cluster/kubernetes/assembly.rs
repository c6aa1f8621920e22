//! The parts of Kubernetes on a node, started together: what each needs of the others goes through values that the others
//! set.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::model::kubernetes::bundle::Duty;
use crate::proto::curator::v1::ServiceStatus;
use crate::roleserver::cluster::etcd;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::balancer::Servers;
use crate::roleserver::cluster::kubernetes::bundles::Bundles;
use crate::roleserver::cluster::kubernetes::certificates::{Materials, certificates_of};
use crate::roleserver::cluster::kubernetes::controller::Gate;
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::own_node::Handed;
use crate::roleserver::cluster::kubernetes::runs::Runs;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::kubernetes::{
    Host, balancer, components, controller, follow, held, leftovers, own_node, setup, startup, told, wanted,
    wishing,
};
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::cluster::services::hands::{Hands, Whose};
use crate::roleserver::cluster::services::keeper;
use crate::roleserver::cluster::services::kept;
use crate::roleserver::cluster::services::wanted::{Id, Wanted};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::reduce::{Inputs, reduce};
use crate::supervisor::value::Value;

/// What the parts tell each other.
#[derive(Clone, Default)]
struct Parts {
    startup: Value<Startup>,
    materials: Value<Materials>,
    held: Value<Held>,
    gate: Value<Gate>,
    runs: Value<Runs>,
    statuses: Value<Vec<ServiceStatus>>,
    handed: Value<Handed>,
    servers: Value<Option<Servers>>,
}

/// What is known of all of it; what is not known is as if there were none.
#[derive(Clone, Debug, Default)]
struct Known {
    startup: Option<Startup>,
    materials: Materials,
    held: Held,
    gate: Gate,
    address: Option<IpAddr>,
    runs: Runs,
    statuses: Option<Vec<ServiceStatus>>,
    handed: Handed,
    node: Option<String>,
}

/// The runnable: all of it. What is on the disk is said once in each life.
#[must_use]
pub fn assembly(host: Host, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        async move {
            let parts = Parts::default();
            let files = host.files.clone();
            // Until somebody looked, nobody knows how it does.
            facts.kubernetes.forget();
            if facts.setup.latest().is_none()
                && let Some(setup) = setup::kept(&files)
            {
                facts.setup.set(setup);
            }
            let (watched, handed) = (facts.clone(), parts.handed.clone());
            let deciding =
                reduce(move || startup::inputs(&watched, &handed), startup::decide, &parts.startup);
            starting.start("follow", follow::follow(files.clone(), facts.clone()))?;
            starting.start("decide", deciding)?;
            let certificates = certificates_of(
                (files.clone(), host.places.clone()),
                facts.clone(),
                host.clock.clone(),
                parts.startup.clone(),
                parts.materials.clone(),
            );
            starting.start("certificates", certificates)?;
            let bundles = Bundles::open(files.bundles(), host.shepherds.clone());
            let holding = held::held(bundles, files.clone(), parts.startup.clone(), parts.held.clone());
            starting.start("bundle", holding)?;
            let wishes = Value::new();
            let wishing = wishing::wishing(
                Store(files.kubernetes().join("add-ons")),
                host.shepherds.clone(),
                (parts.startup.clone(), parts.held.clone()),
                wishes.clone(),
            );
            starting.start("wishes", wishing)?;
            let inputs = controller::Inputs {
                startup: parts.startup.clone(),
                materials: parts.materials.clone(),
                wishes,
            };
            let port = host.ports.api_server;
            let controller =
                controller::controller(files.clone(), facts.clone(), port, inputs, parts.gate.clone());
            starting.start("controller", controller)?;
            let own = own_node::Around {
                files: files.clone(),
                places: host.places.clone(),
                clock: host.clock.clone(),
                url: format!("https://{}", host.ports.load_balancer),
                startup: parts.startup.clone(),
                held: parts.held.clone(),
                statuses: parts.statuses.clone(),
                runs: parts.runs.clone(),
            };
            starting.start("own_node", own_node::own_node(own, parts.handed.clone()))?;
            let finding = finding(&files, &parts);
            starting.start("api_servers", finding)?;
            let balancing = balancer::balancer(host.ports.load_balancer, parts.servers.clone());
            starting.start("balancer", balancing)?;
            let wanted = Value::new();
            starting.start("render", render(host.clone(), facts.clone(), parts.clone(), wanted.clone()))?;
            let hands = Hands {
                whose: Whose::Kubernetes,
                particulars: leftovers::PARTICULARS,
                places: host.places.clone(),
                directory: files.kubernetes(),
                store: Store(files.kubernetes().join("none")),
            };
            let inputs = keeper::Inputs { wanted, held: Value::new() };
            let (clock, boot_id) = (host.clock.clone(), host.boot_id.clone());
            starting
                .start("keeper", keeper::keeper(hands, parts.statuses.clone(), inputs, clock, boot_id))?;
            starting.start("told", tell(facts, parts))?;
            Err(starting.healthy().scope().cancelled().await.into())
        }
    })
}

/// Has what is to run follow from everything else.
fn render(host: Host, facts: Facts, parts: Parts, output: Value<BTreeMap<Id, Wanted>>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts, parts, output) = (host.clone(), facts.clone(), parts.clone(), output.clone());
        async move {
            let healthy = starting.healthy();
            let mut inputs = inputs(&parts)
                .with(&parts.handed, |known: &mut Known, handed| known.handed = handed)
                .with(&facts.address, |known: &mut Known, address| known.address = Some(address))
                .with(&facts.connection, |known: &mut Known, connection| {
                    known.node = Some(connection.id.to_string());
                });
            let (family, may_raise_scores) = (host.places.family(), may_raise_scores());
            let (etcd, directory) = (etcd::client_socket(&host.files), host.files.kubernetes());
            let of_before = kept::about(&host.files).address;
            let mut runs = Runs::read(&host.files);
            parts.runs.set(runs.clone());
            loop {
                let known = healthy.scope().until_cancelled(inputs.next()).await?;
                let Some(startup) = &known.startup else { continue };
                let before = runs.clone();
                let now = host.clock.now().timestamp_millis();
                let all = wanted::Known {
                    startup,
                    materials: &known.materials,
                    held: &known.held,
                    gate: &known.gate,
                    address: known.address.or(of_before),
                    ports: &host.ports,
                    etcd: &etcd,
                    directory: &directory,
                    handed: &known.handed,
                    node: known.node.as_deref().unwrap_or_default(),
                    family: &family,
                    may_raise_scores,
                };
                let wanted = wanted::wanted(&all, |around| {
                    let bundle = hex::encode(around.bundle.digest.0);
                    let version = around.bundle.manifest.kubernetes.to_string();
                    runs.number(around.material.generation, &bundle, &version, now)
                });
                if runs != before {
                    // Before anything is started by it.
                    runs.write(&host.files)?;
                    parts.runs.set(runs.clone());
                }
                if output.latest().as_ref() != Some(&wanted) {
                    output.set(wanted);
                }
            }
        }
    })
}

/// Whether this process may make processes less likely to be killed than they are: whether it has `CAP_SYS_RESOURCE`
/// (capabilities(7)), as `/proc/self/status` says it.
fn may_raise_scores() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.is_some_and(|effective| (effective >> CAP_SYS_RESOURCE) & 1 == 1)
}

/// Where a worker's components find API servers, for as long as there are any of these components.
fn finding(files: &Files, parts: &Parts) -> Runnable {
    let (files, parts) = (files.clone(), parts.clone());
    let output = parts.servers.clone();
    let inputs = move || {
        Inputs::new((None, Vec::new()))
            .with(&parts.startup, |known: &mut (Option<Startup>, _), startup| known.0 = Some(startup))
            .with(&parts.statuses, |known: &mut (_, Vec<ServiceStatus>), statuses| known.1 = statuses)
    };
    let decide = move |(startup, statuses): &(Option<Startup>, Vec<ServiceStatus>)| {
        let startup = startup.as_ref()?;
        let role = components::id(Duty::Worker, "").role;
        let is_used = !matches!(startup.worker, Part::Off(_)) || statuses.iter().any(|one| one.role == role);
        // Who leaves needs them as they were last.
        let setup = startup.setup.clone().or_else(|| is_used.then(|| setup::last(&files)).flatten());
        let servers = setup.map(|setup| balancer::servers(setup.api_servers()));
        Some(servers.filter(|_| is_used))
    };
    reduce(inputs, decide, &output)
}

/// Says how all of it does.
fn tell(facts: Facts, parts: Parts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (facts, parts) = (facts.clone(), parts.clone());
        async move {
            let healthy = starting.healthy();
            let mut inputs = inputs(&parts)
                .with(&parts.runs, |known: &mut Known, runs| known.runs = runs)
                .with(&parts.statuses, |known: &mut Known, statuses| known.statuses = Some(statuses));
            loop {
                let known = healthy.scope().until_cancelled(inputs.next()).await?;
                let (Some(startup), Some(statuses)) = (&known.startup, &known.statuses) else { continue };
                let now = told::told(startup, statuses, &known.runs, &known.gate, &known.held);
                if facts.kubernetes.latest().as_ref() != Some(&now) {
                    facts.kubernetes.set(now);
                }
            }
        }
    })
}

fn inputs(parts: &Parts) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&parts.startup, |known: &mut Known, startup| known.startup = Some(startup))
        .with(&parts.materials, |known: &mut Known, materials| known.materials = materials)
        .with(&parts.held, |known: &mut Known, held| known.held = held)
        .with(&parts.gate, |known: &mut Known, gate| known.gate = gate)
}
