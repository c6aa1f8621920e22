//! What a controller does in this process: it stands for keeping the built-in objects, and asks whether components that
//! rely on these may begin.
//!
//! Both need the node's etcd, and begin anew whenever its control plane does: what they knew of the one before is over,
//! and nothing of it is said any more. The reconciler runs beside the API server before anything else of Kubernetes does,
//! for whoever is elected makes the objects that all wait for.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::etcd::client::Client;
use crate::etcd::key_space::NODES;
use crate::etcd::namespace::Namespace;
use crate::model::kubernetes::bundle::Duty;
use crate::proto::curator::v1 as wire;
use crate::reconciler::leadership::Pace;
use crate::reconciler::objects::kubernetes::{Connection, Identity};
use crate::reconciler::objects::pass::KubernetesObjects;
use crate::reconciler::objects::trouble::{Subject, Trouble};
use crate::reconciler::objects::wishes::Wishes;
use crate::reconciler::program::Program;
use crate::reconciler::service::{LEADER_TTL, Reconciler, Settings};
use crate::reconciler::waiting::until_ready;
use crate::roleserver::cluster::control_plane::NAMESPACE;
use crate::roleserver::cluster::etcd;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::certificates::Materials;
use crate::roleserver::cluster::kubernetes::material::{SERVERS, name};
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::services::told::shortened;
use crate::roleserver::told;
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::value::Value;

/// How long the lease may take to be given back.
const GIVING_BACK: Duration = Duration::from_secs(2);
/// Most objects in the way that a curator hears of.
const MOST_CLASHES: usize = 64;

/// Whether components of a controller may begin, and what is known of objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gate {
    /// Whether they may.
    pub open: bool,
    /// What they wait for, if that is known.
    pub waits: Option<String>,
    /// Whether this node keeps the built-in objects.
    pub reconciles: bool,
    /// What is in the way of objects.
    pub clashes: Vec<wire::KubernetesClash>,
}

impl Gate {
    /// What they wait for, as a sentence.
    #[must_use]
    pub fn sentence(&self) -> String {
        self.waits
            .clone()
            .unwrap_or_else(|| "it is being looked whether this controller may begin".to_owned())
    }
}

/// What it is run with.
#[derive(Clone)]
pub struct Inputs {
    /// What is to run.
    pub startup: Value<Startup>,
    /// Keys and certificates.
    pub materials: Value<Materials>,
    /// What the cluster wishes.
    pub wishes: Value<Wishes>,
}

/// The runnable; `output` is whether components may begin.
#[must_use]
pub fn controller(files: Files, facts: Facts, port: u16, inputs: Inputs, output: Value<Gate>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, inputs, output) = (files.clone(), facts.clone(), inputs.clone(), output.clone());
        async move {
            // Whatever an earlier life said is over.
            output.set(Gate::default());
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut startups = inputs.startup.watch();
            loop {
                let on = |startup: &Startup| startup.controller == Part::On;
                scope.until_cancelled(startups.next_where(on)).await?;
                let mut control_planes = facts.control_plane.watch();
                // The one that is there is no news.
                let _ = control_planes.pending();
                let over = async {
                    tokio::select! {
                        _ = startups.next_where(|startup| !on(startup)) => {}
                        _ = control_planes.next() => {}
                    }
                };
                let end = CancellationToken::new();
                let running = Box::pin(tend(&files, &facts, port, &inputs, &output, end.clone()));
                run_until(over, end, running, scope).await?;
                output.set(Gate::default());
                tracing::info!("the reconciler of Kubernetes ended, and begins anew when its etcd runs");
            }
        }
    })
}

/// Runs it until it is over, and then to its own end.
async fn run_until(
    over: impl Future<Output = ()>,
    end: CancellationToken,
    running: impl Future<Output = Result<(), Stop>>,
    scope: &Scope,
) -> Result<(), Stop> {
    tokio::pin!(running);
    tokio::select! {
        ended = &mut running => return ended,
        () = over => {}
        _ = scope.cancelled() => {}
    }
    end.cancel();
    // The lease is given back, so that the next need not wait for its end.
    tokio::time::timeout(GIVING_BACK, running).await.unwrap_or(Ok(()))
}

/// Stands for election and asks at the gate, until `ending`.
async fn tend(
    files: &Files,
    facts: &Facts,
    port: u16,
    inputs: &Inputs,
    output: &Value<Gate>,
    ending: CancellationToken,
) -> Result<(), Stop> {
    let prepared = async {
        let connection = facts.connection.watch().next().await;
        let address = facts.address.watch().next().await;
        inputs.materials.watch().next_where(|all: &Materials| all.controller.is_some()).await;
        (connection.id, address)
    };
    let Some((own, address)) = ending.run_until_cancelled(prepared).await else { return Ok(()) };
    let directory = files.kubernetes().join(name(Duty::Controller));
    let file = |name: &str| -> PathBuf { directory.join(name) };
    let identity = Identity {
        authority: file(SERVERS),
        certificate: file("reconciler.crt"),
        key: file("reconciler.key"),
    };
    let url = format!("https://{}", std::net::SocketAddr::new(address, port));
    let (wish, wishes) = watch::channel(inputs.wishes.latest());
    let client = Client::new(vec![etcd::endpoint(files)], Namespace::new(NAMESPACE)?);
    let program = Program::own();
    let settings = Settings {
        name: own.to_string(),
        program: program.clone(),
        client: client.clone(),
        ttl: LEADER_TTL,
        pace: Pace::default(),
    };
    let connection = Connection { url, identity: Some(identity) };
    let planned = KubernetesObjects::new(connection.clone(), wishes.clone()).and_nodes_of(client.clone());
    let telling = async {
        let page = || async { planned.plan().await.map_or_else(|error| format!("{error}\n"), as_a_page) };
        let told = told::telling_anew(&files.kubernetes(), told::PLAN, page).await;
        if let Err(error) = told {
            tracing::warn!(%error, "what would be changed in Kubernetes cannot be told; going on without");
        }
        std::future::pending::<()>().await;
    };
    let objects = KubernetesObjects::new(connection, wishes).and_nodes_of(client.clone());
    let mut troubles = objects.troubles();
    let reconciler = Reconciler::new(settings, objects);
    let mut leads = reconciler.leads();
    let record = NODES.key(own)?;
    let (told, mut waits) = watch::channel(None);
    let asking = async {
        until_ready(&client, &program, &record, &told).await;
    };
    let running = reconciler.run(&ending);
    tokio::pin!(asking, running, telling);
    let mut wished = inputs.wishes.watch();
    let mut open = false;
    loop {
        let gate = Gate {
            open,
            waits: waits.borrow_and_update().as_ref().map(ToString::to_string),
            reconciles: *leads.borrow_and_update(),
            clashes: clashes(&troubles.borrow_and_update()),
        };
        if output.latest().as_ref() != Some(&gate) && !ending.is_cancelled() {
            output.set(gate);
        }
        tokio::select! {
            () = &mut running => return Ok(()),
            () = &mut asking, if !open => open = true,
            () = &mut telling => {}
            Ok(()) = waits.changed() => {}
            Ok(()) = leads.changed() => {}
            Ok(()) = troubles.changed() => {}
            next = wished.next() => drop(wish.send_replace(Some(next))),
        }
    }
}

/// A plan as a person reads it, who asked for it.
fn as_a_page(plan: String) -> String {
    if plan.is_empty() { "nothing: all objects are as this release wants them\n".to_owned() } else { plan }
}

/// What is in the way of objects, as a curator hears of it.
fn clashes(troubles: &[Trouble]) -> Vec<wire::KubernetesClash> {
    let of = |trouble: &Trouble| {
        let (kind, name) = match &trouble.subject {
            Subject::BuiltIn(resource, key) | Subject::OfAddOn(_, resource, key) => {
                (resource.to_string(), key.to_string())
            }
            Subject::AddOn(name) => ("add-on".to_owned(), name.clone()),
            Subject::Kind(resource) => (resource.to_string(), "*".to_owned()),
        };
        let message = shortened(format!("{}; {}", trouble.why, trouble.remedy));
        wire::KubernetesClash { kind: shortened(kind), name: shortened(name), message }
    };
    troubles.iter().take(MOST_CLASHES).map(of).collect()
}
