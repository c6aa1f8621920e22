//! Controllers of Kubernetes: real role servers and a real curator, with fakes of the programs of a bundle, and once
//! with real ones.
//!
//! A fake serves its health checks on the port of its flags, and writes its arguments to a file.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use ring::digest;
use serde_json::json;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::RECONCILER_STATUS;
use shepherd::etcd::namespace::Namespace;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd::proto::curator::v1::service_status::Kind;
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::ReconcilerStatus;
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::process::ProcessInstance;
use shepherd::roleserver::status_socket as status_page;

use super::node::Node;
use super::owner::{Owner, patiently};
use super::services::{founded, instance};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::kubernetes::{ProgramSet, folder};

const MINUTE: Duration = Duration::from_mins(1);
pub(super) const API_SERVER: &str = "kubernetes-controller_kube-apiserver";
pub(super) const CONTROLLER_MANAGER: &str = "kubernetes-controller_kube-controller-manager";
pub(super) const SCHEDULER: &str = "kubernetes-controller_kube-scheduler";
const PROGRAMS: [&str; 3] = ["kube-apiserver", "kube-controller-manager", "kube-scheduler"];

/// Serves TLS, with the certificate and key of its arguments or of its kubeconfig.
pub(crate) const STAND_IN: &str = r#"#!/usr/bin/python3
import http.server, json, os, ssl, sys, time
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
with open("started.log", "a") as log:
    log.write(json.dumps({"at": time.time(), "pid": os.getpid(), "flags": flags}) + "\n")
if "tls-cert-file" in flags:
    pair = flags["tls-cert-file"], flags["tls-private-key-file"]
else:
    user = json.load(open(flags["kubeconfig"]))["users"][0]["user"]
    pair = user["client-certificate"], user["client-key"]
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/readyz", "/healthz") else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(*pair)
server = http.server.ThreadingHTTPServer((flags["bind-address"], int(flags["secure-port"])), Answer)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"#;

/// A file of a bundle.
pub(crate) struct File {
    /// The component that it belongs to.
    pub(crate) component: &'static str,
    pub(crate) path: String,
    pub(crate) content: Vec<u8>,
}

/// A bundle of these programs, all of one version: its digest, and its archive.
fn bundle(version: &str, programs: &[(&'static str, Vec<u8>)]) -> Result<(String, Vec<u8>)> {
    let file = |(component, content): &(&'static str, Vec<u8>)| File {
        component,
        path: format!("bin/{component}"),
        content: content.clone(),
    };
    archive(version, &programs.iter().map(file).collect::<Vec<_>>(), &[])
}

/// A bundle of these files and images, each with a name, a reference and a content: its digest, and its archive.
pub(crate) fn archive(
    version: &str,
    files: &[File],
    images: &[(&str, &str, Vec<u8>)],
) -> Result<(String, Vec<u8>)> {
    let sha256 = |bytes: &[u8]| hex::encode(digest::digest(&digest::SHA256, bytes));
    let programs: Vec<serde_json::Value> = files
        .iter()
        .map(|File { component, path, content }| {
            json!({
                "component": component, "path": path, "version": version,
                "sha256": sha256(content), "size": content.len(), "mode": "0755",
            })
        })
        .collect();
    let listed: Vec<serde_json::Value> = images
        .iter()
        .map(|(name, reference, content)| {
            json!({
                "name": name, "reference": reference, "path": format!("images/{name}.tar"),
                "sha256": sha256(content), "size": content.len(),
            })
        })
        .collect();
    let manifest = json!({
        "format": 1, "name": format!("test-{version}"), "kubernetes": version, "needs_roleserver": "0.1.0",
        "files": programs, "images": listed,
    });
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::none()));
    let manifest = ("manifest.json".to_owned(), serde_json::to_vec(&manifest)?, 0o644);
    let entries = files.iter().map(|file| (file.path.clone(), file.content.clone(), 0o755));
    let images =
        images.iter().map(|(name, _, content)| (format!("images/{name}.tar"), content.clone(), 0o644));
    for (path, content, mode) in std::iter::once(manifest).chain(entries).chain(images) {
        let mut header = tar::Header::new_ustar();
        header.set_path(&path)?;
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(mode);
        header.set_size(content.len() as u64);
        header.set_cksum();
        tar.append(&header, content.as_slice())?;
    }
    let archive = tar.into_inner()?.finish()?;
    Ok((sha256(&archive), archive))
}

/// A bundle of fakes. With `broken`, API servers end at once.
pub(super) fn stand_ins(version: &str, broken: bool) -> Result<(String, Vec<u8>)> {
    let text = format!("{STAND_IN}# {version}\n").into_bytes();
    let ends = b"#!/bin/sh\necho it is broken >&2\nexit 1\n".to_vec();
    let programs = PROGRAMS
        .map(|name| (name, if broken && name == "kube-apiserver" { ends.clone() } else { text.clone() }));
    bundle(version, &programs)
}

/// Puts a bundle where a node finds it.
pub(super) fn put_bundle(node: &Node, (digest, archive): &(String, Vec<u8>)) -> Result<()> {
    let archives = node.files().bundles_directory().join("archives");
    std::fs::create_dir_all(&archives)?;
    Ok(std::fs::write(archives.join(digest), archive)?)
}

/// Sets the Kubernetes settings of the cluster.
pub(super) async fn put(owner: &Owner, bundle: &str) -> Result<()> {
    let mut kubernetes = KubernetesClient::new(owner.curators()?.channel());
    let settings = wire::KubernetesSettings {
        bundle: bundle.to_owned(),
        service_range: "10.96.0.0/16".to_owned(),
        pod_range: "10.128.0.0/12".to_owned(),
        node_prefix: 24,
        domain: "cluster.local".to_owned(),
        ..Default::default()
    };
    let request = wire::PutKubernetesRequest { settings: Some(settings), expected_revision: None };
    patiently(async || kubernetes.put(request.clone()).await).await.map(drop)
}

/// The last Kubernetes status of a node that the curator received.
pub(super) async fn fetch_kubernetes_status(
    owner: &Owner,
    node: &Node,
) -> Result<Option<wire::KubernetesStatus>> {
    let id = node.id()?.to_string();
    let listed = owner.nodes().await?.into_iter().filter_map(|listed| listed.node);
    Ok(listed.filter(|node| node.node_id == id).find_map(|node| node.status?.kubernetes))
}

/// Waits until the curator has received such a status.
pub(super) async fn wait_for_kubernetes_status(
    owner: &Owner,
    node: &Node,
    what: &str,
    holds: impl Fn(&wire::KubernetesStatus) -> bool,
) -> Result<wire::KubernetesStatus> {
    let mut last = None;
    let waited = until(what, async || {
        last = fetch_kubernetes_status(owner, node).await?;
        Ok(last.as_ref().is_some_and(&holds))
    });
    let waited = waited.await;
    waited.with_context(|| {
        let log = |child| std::fs::read_to_string(node.places().log_path(child)).unwrap_or_default();
        let tail =
            |text: String| text.lines().rev().take(15).map(str::to_owned).collect::<Vec<_>>().join("\n");
        format!("{last:?}\n{}\n{}\n{}", node.report(), tail(log(API_SERVER)), tail(log(CONTROLLER_MANAGER)))
    })?;
    last.context("the node reported no Kubernetes status")
}

pub(super) fn kinds(status: &wire::KubernetesStatus) -> BTreeMap<&str, Kind> {
    status.components.iter().map(|component| (component.name.as_str(), component.kind())).collect()
}

pub(super) fn all_well(status: &wire::KubernetesStatus) -> bool {
    status.components.len() == 3 && kinds(status).values().all(|kind| *kind == Kind::Healthy)
}

/// Opens the gate, as a reconciler does that has created all objects.
pub(super) async fn open_gate(node: &Node) -> Result<()> {
    let client = Client::new(vec![etcd_member::client_endpoint(&node.files())], Namespace::new("curator")?);
    let status = ReconcilerStatus::completed_by(&Program::current());
    client.put_unguarded(RECONCILER_STATUS, &status.encode()).await?;
    Ok(())
}

/// Every start of a component, in order: its time and its flags.
pub(super) fn starts(node: &Node, child: &str) -> Result<Vec<serde_json::Value>> {
    let path = node.files().kubernetes_directory().join(child).join("started.log");
    std::fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn instances(node: &Node) -> Result<Vec<ProcessInstance>> {
    [API_SERVER, CONTROLLER_MANAGER, SCHEDULER].into_iter().map(|child| instance(node, child)).collect()
}

/// A cluster of one node that is a controller with fakes, all of them healthy.
pub(super) async fn controlled() -> Result<(Owner, Node, String)> {
    let (owner, node) = founded().await?;
    let bundle = stand_ins("1.20.2", false)?;
    put_bundle(&node, &bundle)?;
    put(&owner, &bundle.0).await?;
    owner.wait_for_node_status(&node).await?;
    owner.roles(&node, &["kubernetes-controller"], &[]).await?;
    Ok((owner, node, bundle.0))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn controllers_start_behind_the_gate_outlive_their_role_server_and_go_with_their_role() -> TestResult {
    let (owner, mut node, bundle) = controlled().await?;
    let before = wait_for_kubernetes_status(&owner, &node, "the API server is ready", |status| {
        kinds(status).get("kube-apiserver") == Some(&Kind::Healthy)
            && status.wait_reason.contains("no release has created")
    })
    .await?;
    assert_eq!(kinds(&before)["kube-scheduler"], Kind::Waiting, "{before:?}");
    assert!(node.child(CONTROLLER_MANAGER).is_none(), "it waits behind the gate");
    assert_eq!(before.generation, 0, "not all act on it yet");

    open_gate(&node).await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;
    assert_eq!(
        (well.bundle.as_str(), well.version.as_str(), well.wait_reason.as_str()),
        (&*bundle, "1.20.2", "")
    );
    assert!(well.generation > 0);
    let at = |child| starts(&node, child)?[0]["at"].as_f64().context("no time");
    assert!(at(API_SERVER)? < at(CONTROLLER_MANAGER)? && at(CONTROLLER_MANAGER)? < at(SCHEDULER)?);
    let flags = &starts(&node, API_SERVER)?[0]["flags"];
    assert_eq!(flags["bind-address"], node.address.to_string());
    let key = flags["tls-private-key-file"].as_str().context("no key")?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(key)?.permissions());
    assert_eq!(mode & 0o777, 0o600);

    // Killed, and replaced: the components are not affected.
    let running = instances(&node)?;
    node.stop().await?;
    node.start_apart()?;
    owner.until_well(1, 1).await?;
    node.kill_role_server()?;
    assert!(running.iter().all(ProcessInstance::is_alive));
    node.start_apart()?;
    owner.until_well(1, 1).await?;
    wait_for_kubernetes_status(&owner, &node, "all are well again", all_well).await?;
    assert_eq!(instances(&node)?, running, "only its role server was started again");

    owner.roles(&node, &[], &["kubernetes-controller"]).await?;
    let directory = node.files().kubernetes_directory();
    until("all of it is gone", async || {
        let left = node.children().into_iter().any(|child| child.starts_with("kubernetes-"));
        Ok(!left
            && !directory.join("controller").exists()
            && fetch_kubernetes_status(&owner, &node).await?.is_none())
    })
    .await
    .with_context(|| node.report())?;
    assert!(running.iter().all(|instance| !instance.is_alive()));
    assert!(!directory.join(API_SERVER).exists());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_keys_start_all_components_again_before_the_node_says_that_it_acts_on_them() -> TestResult {
    let (owner, node, _) = controlled().await?;
    wait_for_kubernetes_status(&owner, &node, "the gate", |status| {
        status.wait_reason.contains("no release has created")
    })
    .await?;
    open_gate(&node).await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;
    let of_first = instances(&node)?;

    let mut kubernetes = KubernetesClient::new(owner.curators()?.channel());
    let rotate = wire::RotateKubernetesRequest { keys: wire::KubernetesKeys::Servers.into() };
    patiently(async || kubernetes.rotate(rotate).await).await?;
    wait_for_kubernetes_status(&owner, &node, "all act on other keys", |status| {
        all_well(status) && status.generation > well.generation
    })
    .await?;
    assert!(instances(&node)?.iter().zip(&of_first).all(|(now, before)| now != before));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundle_that_does_not_run_is_taken_back_and_another_one_is_run() -> TestResult {
    let (owner, node, first) = controlled().await?;
    wait_for_kubernetes_status(&owner, &node, "the gate", |status| {
        status.wait_reason.contains("no release has created")
    })
    .await?;
    open_gate(&node).await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;

    let mut kubernetes = KubernetesClient::new(owner.curators()?.channel());
    let broken = stand_ins("1.20.3", true)?;
    put_bundle(&node, &broken)?;
    let id = node.id()?.to_string();
    let assign = |digest: &str| wire::AssignBundleRequest {
        node_id: id.clone(),
        bundle: digest.to_owned(),
        url: String::new(),
    };
    patiently(async || kubernetes.assign_bundle(assign(&broken.0)).await).await?;
    let kubernetes_status =
        wait_for_kubernetes_status(&owner, &node, "the bundle is reported as not ready", |status| {
            status.wait_reason.contains("does not become ready")
        })
        .await?;
    assert!(
        kubernetes_status.wait_reason.contains(&broken.0[..12]) && kubernetes_status.generation == 0,
        "{kubernetes_status:?}"
    );
    patiently(async || kubernetes.assign_bundle(assign(&first)).await).await?;
    let back = wait_for_kubernetes_status(&owner, &node, "the one before runs", |status| {
        all_well(status) && status.bundle == first
    })
    .await?;
    assert_eq!(back.generation, well.generation);

    let next = stand_ins("1.20.4", false)?;
    put_bundle(&node, &next)?;
    patiently(async || kubernetes.assign_bundle(assign(&next.0)).await).await?;
    wait_for_kubernetes_status(&owner, &node, "the next runs", |status| {
        all_well(status) && status.bundle == next.0
    })
    .await?;
    assert!(node.files().bundles_directory().join(&first).is_dir(), "it is kept for going back");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_controllers_make_their_objects_and_begin() -> TestResult {
    let Some(directory) = folder(ProgramSet::Controllers)? else { return Ok(()) };
    let version = std::process::Command::new(directory.join("kube-apiserver")).arg("--version").output()?;
    let version = String::from_utf8(version.stdout)?;
    let version =
        version.trim().trim_start_matches("Kubernetes v").split(['-', '+']).next().unwrap_or_default();
    let mut programs = Vec::new();
    for name in PROGRAMS {
        programs.push((name, std::fs::read(directory.join(name))?));
    }
    let bundle = bundle(version, &programs)?;
    let (owner, node) = founded().await?;
    put_bundle(&node, &bundle)?;
    put(&owner, &bundle.0).await?;
    owner.wait_for_node_status(&node).await?;
    owner.roles(&node, &["kubernetes-controller"], &[]).await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;
    assert!(well.is_reconciler && well.conflicts.is_empty(), "{well:?}");
    let directory = node.files().kubernetes_directory();
    let plan = tokio::task::spawn_blocking(move || {
        status_page::read_page_within(MINUTE, &directory, status_page::PLAN_SOCKET)
    });
    assert_eq!(plan.await??, "no changes: all objects are as this release needs them\n");
    assert_eq!((well.bundle, well.version.as_str()), (bundle.0, version));
    Ok(())
}
