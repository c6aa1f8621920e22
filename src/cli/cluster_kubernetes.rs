//! `cluster kubernetes set|remove|rotate`, and what is shown of Kubernetes and of upgrades.

use std::fmt::Write as _;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use crate::bmdb::action::Done;
use crate::bmdb::cluster::target;
use crate::bmdb::cluster_kubernetes::Wish;
use crate::cli::again;
use crate::cli::cluster::{given, told};
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::operate::direct;
use crate::cli::output::{Format, table, width};
use crate::cli::remote_read::{at, moment};
use crate::cli::source::Source;
use crate::model::cluster::kubernetes::{Clash, Component, Keys, OnNode, Rotation, Storage};
use crate::model::cluster::kubernetes_view::{BundleView, Known, KubernetesView, UpgradeView};
use crate::model::cluster::view::ClusterView;
use crate::model::telling::{absolute, relative, rough};
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::cluster_kubernetes_client::ClusterKubernetesClient;

/// What can be done with Kubernetes of a cluster.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Give a cluster Kubernetes, or change its add-ons and its storage
    #[command(after_help = examples::CLUSTER_KUBERNETES_SET)]
    Set(SetKubernetes),
    /// Take Kubernetes from a cluster
    #[command(after_help = examples::CLUSTER_KUBERNETES_REMOVE)]
    Remove(RemoveKubernetes),
    /// Have an authority or keys of Kubernetes replaced, in steps
    #[command(after_help = examples::CLUSTER_KUBERNETES_ROTATE)]
    Rotate(RotateKubernetes),
}

/// What Kubernetes is to be, beside its bundle.
#[derive(Debug, Default, Args)]
pub struct KubernetesFlags {
    /// From which services get their addresses [default: 10.96.0.0/16]
    #[arg(long = "service_range", alias = "service-range", value_name = "RANGE")]
    pub service_range: Option<String>,
    /// From which nodes get theirs for pods [default: 10.128.0.0/12]
    #[arg(long = "pod_range", alias = "pod-range", value_name = "RANGE")]
    pub pod_range: Option<String>,
    /// How long the prefix of one node's range is [default: 24]
    #[arg(long = "node_prefix", alias = "node-prefix", value_name = "BITS")]
    pub node_prefix: Option<u32>,
    /// In which services have names [default: cluster.local]
    #[arg(long, value_name = "DOMAIN")]
    pub domain: Option<String>,
    /// Objects of yours that are kept as an artefact says; may be given several times
    #[arg(long = "add_on", alias = "add-on", value_name = "NAME=ARTEFACT")]
    pub add_on: Vec<String>,
    /// Who makes volumes, and the class of storage that asks it
    #[arg(long = "storage", value_name = "DRIVER=CLASS")]
    pub storage: Option<String>,
}

/// Kubernetes to give or to change.
#[derive(Debug, Args)]
pub struct SetKubernetes {
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The bundle, of a cluster that has none: an artefact's digest, the beginning of it, or its name
    #[arg(long, value_name = "BUNDLE")]
    pub bundle: Option<String>,
    /// What it is to be
    #[command(flatten)]
    pub flags: KubernetesFlags,
    /// An add-on that is not kept any more; may be given several times
    #[arg(long = "remove_add_on", alias = "remove-add-on", value_name = "NAME")]
    pub remove_add_on: Vec<String>,
    /// Nobody makes volumes any more
    #[arg(long = "no_storage", alias = "no-storage", conflicts_with = "storage")]
    pub no_storage: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Kubernetes to take.
#[derive(Debug, Args)]
pub struct RemoveKubernetes {
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Keys to replace.
#[derive(Debug, Args)]
pub struct RotateKubernetes {
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What to replace
    #[arg(long, value_name = "WHAT", value_parser = PossibleValuesParser::new(Keys::ALL.map(Keys::as_str)))]
    pub what: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// What flags say.
pub(super) fn wish(bundle: Option<&str>, flags: &KubernetesFlags) -> Result<Wish, CliError> {
    let pair = |flag: &str, said: &str| {
        let pair = said.split_once('=').filter(|(one, other)| !one.is_empty() && !other.is_empty());
        pair.map(|(one, other)| (one.to_owned(), other.to_owned()))
            .ok_or_else(|| CliError::Wrong(format!("--{flag}: {said:?} has not the form NAME=…")))
    };
    let storage = flags.storage.as_deref().map(|said| pair("storage", said)).transpose()?;
    Ok(Wish {
        bundle: bundle.map(str::to_owned),
        service_range: flags.service_range.clone(),
        pod_range: flags.pod_range.clone(),
        node_prefix: flags.node_prefix,
        domain: flags.domain.clone(),
        add_ons: flags.add_on.iter().map(|said| pair("add_on", said)).collect::<Result<_, _>>()?,
        storage: storage.map(|(driver, class)| Storage { driver, class }),
        ..Wish::default()
    })
}

/// As the API is told.
pub(super) fn wire(wish: &Wish) -> v1::KubernetesWish {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    v1::KubernetesWish {
        bundle: text(&wish.bundle),
        service_range: text(&wish.service_range),
        pod_range: text(&wish.pod_range),
        node_prefix: wish.node_prefix.unwrap_or_default(),
        domain: text(&wish.domain),
        add_ons: wish.add_ons.clone().into_iter().collect(),
        remove_add_ons: wish.remove_add_ons.iter().cloned().collect(),
        storage: (wish.storage.clone())
            .map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
    }
}

/// What a command about Kubernetes answers.
pub(super) async fn kubernetes_command(
    source: &Source,
    command: &KubernetesCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        KubernetesCommand::Set(asked) => set(source, asked, format).await,
        KubernetesCommand::Remove(asked) => remove(source, asked, format).await,
        KubernetesCommand::Rotate(asked) => rotate(source, asked, format).await,
    }
}

async fn set(source: &Source, asked: &SetKubernetes, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let mut wish = wish(asked.bundle.as_deref(), &asked.flags)?;
    wish.remove_add_ons = asked.remove_add_on.iter().cloned().collect();
    if asked.no_storage {
        wish.storage = Some(Storage { driver: String::new(), class: String::new() });
    }
    let done = match source {
        Source::Direct(bmdb) => {
            let rpc = "shepherd.fleet.v1.ClusterKubernetes/Set";
            let order = direct(rpc, target(&asked.name), Some(&asked.reason));
            bmdb.set_kubernetes(order, asked.name.clone(), wish).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::SetClusterKubernetesRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    wish: Some(wire(&wish)),
                };
                ClusterKubernetesClient::new(service).set(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn remove(source: &Source, asked: &RemoveKubernetes, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let rpc = "shepherd.fleet.v1.ClusterKubernetes/Remove";
            let order = direct(rpc, target(&asked.name), Some(&asked.reason));
            bmdb.remove_kubernetes(order, asked.name.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request =
                    v1::RemoveClusterKubernetesRequest { name: asked.name.clone(), order: Some(order) };
                ClusterKubernetesClient::new(service).remove(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn rotate(source: &Source, asked: &RotateKubernetes, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let keys: Keys =
                asked.what.parse().map_err(|error| CliError::Wrong(format!("--what: {error}")))?;
            let rpc = "shepherd.fleet.v1.ClusterKubernetes/Rotate";
            let order = direct(rpc, target(&asked.name), Some(&asked.reason));
            bmdb.rotate_kubernetes(order, asked.name.clone(), keys).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RotateClusterKubernetesRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    what: asked.what.clone(),
                };
                ClusterKubernetesClient::new(service).rotate(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

/// Kubernetes of a cluster, as the API says it.
pub(super) fn kubernetes(said: v1::ClusterKubernetesState) -> Result<KubernetesView, CliError> {
    let rotation = |said: v1::ClusterRotation| Rotation {
        what: said.what,
        stage: said.stage,
        since: said.since.and_then(moment),
        waits_for: said.waits_for,
        until: said.until.and_then(moment),
        held_by: said.held_by,
        told_at: said.told_at.and_then(moment),
    };
    Ok(KubernetesView {
        bundle: said.bundle,
        version: said.version,
        service_range: said.service_range,
        pod_range: said.pod_range,
        node_prefix: said.node_prefix,
        domain: said.domain,
        add_ons: said.add_ons.into_iter().collect(),
        storage: said.storage.map(|storage| Storage { driver: storage.driver, class: storage.class }),
        asked_at: at(said.asked_at, "when Kubernetes was asked for")?,
        asked_by: said.asked_by,
        removing_by: said.removing_by,
        rotate: said.rotate,
        known: Known {
            told: said.told,
            assigned: said.assigned.into_iter().collect(),
            rotations: said.rotations.into_iter().map(rotation).collect(),
            api_servers: said.api_servers,
        },
    })
}

/// An upgrade, as the API says it.
pub(super) fn upgrade(said: v1::ClusterUpgrade) -> Result<UpgradeView, CliError> {
    let bundle = |sha256: String, version: String| {
        Some(BundleView { sha256, version }).filter(|bundle| !bundle.sha256.is_empty())
    };
    Ok(UpgradeView {
        id: said.id,
        from: bundle(said.from_sha256, said.from_version),
        to: bundle(said.to_sha256, said.to_version),
        release: said.release,
        roll_out: said.roll_out,
        released: said.released,
        back: said.back,
        parallelism: said.parallelism,
        deadline_seconds: said.deadline_seconds,
        created_at: at(said.created_at, "when an upgrade was ordered")?,
        created_by: said.created_by,
        reason: said.reason,
        paused: said.paused,
        ended_at: said.ended_at.and_then(moment),
        ended: said.ended,
        asked: said.asked,
        through: said.through,
    })
}

/// What a node runs, as the API says it.
pub(super) fn on_node(said: v1::ClusterNodeKubernetes) -> OnNode {
    let component = |said: v1::ClusterComponent| Component {
        name: said.name,
        state: said.state,
        since: said.since.and_then(moment),
        restarts: said.restarts,
        message: said.message,
    };
    let clash = |said: v1::ClusterClash| Clash { kind: said.kind, name: said.name, message: said.message };
    OnNode {
        bundle: said.bundle,
        version: said.version,
        components: said.components.into_iter().map(component).collect(),
        waits: said.waits,
        reconciles: said.reconciles,
        clashes: said.clashes.into_iter().map(clash).collect(),
    }
}

fn short(digest: &str) -> &str {
    digest.get(..16).unwrap_or(digest)
}

/// Lines about Kubernetes and the upgrade of a cluster: what each is called, and what is said.
pub(super) fn lines(cluster: &ClusterView, now: Timestamp) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(kubernetes) = &cluster.kubernetes {
        let how = match &kubernetes.removing_by {
            Some(by) => format!("; goes, as {by} ordered"),
            None if kubernetes.known.told => String::new(),
            None => "; its curators are yet to be told".to_owned(),
        };
        lines.push((
            "kubernetes",
            format!("{} (bundle {}){how}", kubernetes.version, short(&kubernetes.bundle)),
        ));
        lines.push((
            "ranges",
            format!(
                "services {}, pods {} (/{} a node), domain {}",
                kubernetes.service_range, kubernetes.pod_range, kubernetes.node_prefix, kubernetes.domain
            ),
        ));
        for (name, digest) in &kubernetes.add_ons {
            lines.push(("add-on", format!("{name} ({})", short(digest))));
        }
        if let Some(storage) = &kubernetes.storage {
            lines.push(("storage", format!("{} by {}", storage.class, storage.driver)));
        }
        if !kubernetes.known.api_servers.is_empty() {
            lines.push(("API servers", kubernetes.known.api_servers.join(", ")));
        }
        for what in &kubernetes.rotate {
            lines.push(("replaced", format!("{what}: its curators are yet to be told")));
        }
        for rotation in &kubernetes.known.rotations {
            lines.push(("replaced", replaced(rotation, now)));
        }
    }
    if let Some(upgrade) = &cluster.upgrade {
        let how = match (&upgrade.ended, upgrade.ended_at, &upgrade.paused) {
            (Some(ended), Some(at), _) => format!("; {ended} {} ago", rough(between(at, now))),
            (_, _, Some(why)) => format!("; stands still: {why}"),
            _ => format!("; {} of {} nodes that were asked are through", upgrade.through, upgrade.asked),
        };
        lines.push(("upgrade", format!("{} ({}): {}{how}", upgrade.id, upgrade.created_by, upgrade.line())));
    }
    lines
}

fn replaced(rotation: &Rotation, now: Timestamp) -> String {
    let stage = match rotation.stage.as_str() {
        "trusted" => "the new one is trusted, the old one signs",
        "signs" => "the new one signs, the old one is trusted still",
        other => other,
    };
    let mut said = format!("{}: {stage}", rotation.what);
    if let Some(since) = rotation.since {
        let _ = write!(said, ", for {}", rough(between(since, now)));
    }
    if !rotation.waits_for.is_empty() {
        let _ = write!(said, "; waits for {}", rotation.waits_for.join(", "));
        if !rotation.held_by.is_empty() && rotation.held_by != rotation.waits_for {
            let _ = write!(said, "; first for {}", rotation.held_by.join(", "));
        }
    } else if let Some(until) = rotation.until {
        let _ = write!(
            said,
            "; until {}, when what was signed before has ended ({})",
            absolute(until),
            relative(until, now)
        );
    }
    said
}

/// What the machines run of Kubernetes; nothing when they run nothing.
pub(super) fn components(cluster: &ClusterView, now: Timestamp) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut below = String::new();
    for machine in &cluster.machines {
        let Some(kubernetes) = &machine.kubernetes else { continue };
        for component in &kubernetes.components {
            rows.push(vec![
                machine.name.clone(),
                component.name.clone(),
                kubernetes.version.clone(),
                short(&kubernetes.bundle).to_owned(),
                component.state.clone(),
                component.since.map_or_else(|| "-".to_owned(), |since| rough(between(since, now))),
                component.restarts.to_string(),
                component.message.clone(),
            ]);
        }
        if !kubernetes.waits.is_empty() {
            let _ = writeln!(below, "{}: Kubernetes waits: {}", machine.name, kubernetes.waits);
        }
        for clash in &kubernetes.clashes {
            let _ = writeln!(below, "{} {} is in the way: {}", clash.kind, clash.name, clash.message);
        }
    }
    let mut text = String::new();
    if !rows.is_empty() {
        let head = ["MACHINE", "COMPONENT", "VERSION", "BUNDLE", "STATE", "FOR", "RESTARTS", "BECAUSE"];
        let _ = write!(text, "\n{}", table(&head, &rows, width()));
    }
    if !below.is_empty() {
        let _ = write!(text, "\n{below}");
    }
    text
}
