//! Workers of Kubernetes: real role servers and a real curator, with fakes of the programs of a bundle.
//!
//! Fakes change the host as the real ones do: a kubelet mounts data below its directory and has a process in the
//! control groups of pods, and containerd starts a shim that outlives it. The role server is in a mount namespace of
//! its own, so that nothing of it is visible outside.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::service_status::Kind;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::cluster::kubernetes::pod_cgroups;
use shepherd::roleserver::process::ProcessInstance;

use super::kubernetes::{
    File, archive, fetch_kubernetes_status, kinds, put, put_bundle, wait_for_kubernetes_status,
};
use super::node::{LAUNCHER, Node};
use super::services::{founded, instance};
use crate::harness::aloud::TestResult;
use crate::harness::child::{Program, guarded};
use crate::harness::etcd_servers::until;
use crate::harness::port::reserved;

const CONTAINERD: &str = "kubernetes-worker_containerd";
const IMAGE: &str = "kubernetes-worker_image-pause";
const KUBELET: &str = "kubernetes-worker_kubelet";
const PROXY: &str = "kubernetes-worker_kube-proxy";

/// Each records its start, and then behaves like the program of its name.
const STAND_IN: &str = r#"#!/usr/bin/python3
import glob, http.server, json, os, re, shutil, socket, subprocess, sys, time
name = os.path.basename(sys.argv[0])
if sys.argv[1:] == ["--cleanup"]:
    top = sys.argv[0].split("/bundles/")[0]
    open(top + "/cleaned.log", "a").write("x")
    sys.exit(0)
with open("started.log", "a") as log:
    log.write(json.dumps({"at": time.time(), "arguments": sys.argv[1:], "path": os.environ.get("PATH")}) + "\n")
def serve(port):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()
        def log_message(self, *words):
            pass
    http.server.ThreadingHTTPServer.allow_reuse_address = True
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
if name == "containerd":
    path = re.search(r'address = "(.*)"', open(sys.argv[2]).read()).group(1)
    if not os.path.exists("shim.pid"):
        shim = subprocess.Popen([shutil.which("containerd-shim-runc-v2"), "100000"], start_new_session=True)
        open("shim.pid", "w").write(str(shim.pid))
    if os.path.exists(path):
        os.remove(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    while True:
        listener.accept()[0].close()
flags = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
if name == "ctr":
    socket.socket(socket.AF_UNIX).connect(sys.argv[sys.argv.index("--address") + 1])
    assert open(sys.argv[-1]).read() == "an image"
    sys.exit(0)
if name == "kubelet":
    config = json.load(open(flags["config"]))
    if not os.path.exists("pod.pid"):
        root = flags["root-dir"] + "/pods/a b/volumes"
        os.makedirs(root)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
        os.mkdir(root + "/data")
        subprocess.run(["mount", "--bind", DATA, root + "/data"], check=True)
        points = ["/sys/fs/cgroup/"]
        if not os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
            points = [point for point in glob.glob("/sys/fs/cgroup/*/") if os.path.exists(point + "cgroup.procs")]
        groups = [point.rstrip("/") + config["cgroupRoot"] for point in points]
        # As runc does it: where version 2 is mounted beside version 1, nobody else has made it.
        assert all(os.path.isdir(group) for group in groups if "/unified/" not in group)
        # It does not end on SIGTERM.
        pod = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1000; done"], start_new_session=True)
        for group in groups:
            os.makedirs(group + "/kubepods/pod1", exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                for inner in ("/kubepods", "/kubepods/pod1"):
                    if "/unified/" not in group and os.path.exists(group + "/" + file):
                        open(group + inner + "/" + file, "w").write(open(group + "/" + file).read().strip())
            open(group + "/kubepods/pod1/cgroup.procs", "w").write(str(pod.pid))
        open("pod.pid", "w").write(str(pod.pid))
    serve(config["healthzPort"])
if name == "kube-proxy":
    serve(int(flags["healthz-bind-address"].rsplit(":", 1)[1]))
"#;

/// A bundle for workers, whose kubelet mounts that directory.
fn stand_ins(version: &str, data: &Path) -> Result<(String, Vec<u8>)> {
    let text = STAND_IN.replace("DATA", &format!("{:?}", data.display().to_string()));
    let script = format!("{text}# {version}\n").into_bytes();
    // A process of that name must be a program, not a script.
    let sleep = std::fs::read("/bin/sleep")?;
    let mut files = Vec::new();
    for name in ["kubelet", "kube-proxy", "containerd", "ctr"] {
        files.push(File { component: name, path: format!("bin/{name}"), content: script.clone() });
    }
    files.push(File {
        component: "containerd-shim",
        path: "bin/containerd-shim-runc-v2".to_owned(),
        content: sleep,
    });
    for (component, path) in [("runc", "bin/runc"), ("cni-plugin", "cni/bridge")] {
        files.push(File { component, path: path.to_owned(), content: b"#!/bin/sh\nexit 1\n".to_vec() });
    }
    archive(version, &files, &[("pause", "registry.k8s.io/pause:3.2", b"an image".to_vec())])
}

/// A mount namespace. It exists as long as this value.
struct Mounts(Program);

impl Mounts {
    fn new(directory: &Path) -> Result<Self> {
        let mut command = guarded("unshare");
        command.args(["--mount", "--propagation", "private", "sleep", "100000"]);
        let program = Program::spawn_logged(&mut command, &directory.join("mounts.log"))?;
        Ok(Self(program))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/mnt", self.0.pid()))
    }

    /// A program that becomes the role server in the namespace.
    fn role_server(&self, directory: &Path) -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt as _;
        let path = directory.join("roleserver");
        let text =
            format!("#!/bin/sh\nexec nsenter --mount={} -- {LAUNCHER} \"$@\"\n", self.path().display());
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// The mounts in the namespace below a path.
    fn below(&self, path: &Path) -> Result<Vec<String>> {
        let text = std::fs::read_to_string(format!("/proc/{}/mountinfo", self.0.pid()))?;
        let path = path.display().to_string();
        Ok(text.lines().filter(|line| line.contains(&path)).map(str::to_owned).collect())
    }
}

fn start(node: &mut Node, program: &Path) -> Result<()> {
    let away = AgentSettings::new(&[reserved()?.to_string()], &[], 0);
    node.start_program(program, away.map_err(anyhow::Error::msg)?)
}

fn all_well(status: &wire::KubernetesStatus) -> bool {
    status.components.len() == 3 && kinds(status).values().all(|kind| *kind == Kind::Healthy)
}

/// The pid that a fake wrote for a process that it started.
fn pid(node: &Node, child: &str, file: &str) -> Result<u32> {
    let path = node.files().kubernetes_directory().join(child).join(file);
    Ok(std::fs::read_to_string(path)?.trim().parse()?)
}

fn runs(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

fn started(node: &Node, child: &str) -> Result<Vec<serde_json::Value>> {
    let path = node.files().kubernetes_directory().join(child).join("started.log");
    std::fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// Directories of control groups of the node's pods.
fn pod_groups(node: &Node) -> Result<Vec<PathBuf>> {
    let name = pod_cgroups::cgroup_name(&node.places().instance_name());
    let found = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", &name])
        .output()
        .context("looking for groups")?;
    Ok(String::from_utf8(found.stdout)?.lines().map(PathBuf::from).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_begin_in_order_outlive_the_process_that_started_them_and_leave_nothing() -> TestResult {
    let own = tempfile::tempdir()?;
    let data = own.path().join("data");
    std::fs::create_dir(&data)?;
    std::fs::write(data.join("precious"), "of somebody")?;
    let mounts = Mounts::new(own.path())?;
    until("it has a namespace of its own", async || {
        Ok(std::fs::read_link(mounts.path()).ok() != std::fs::read_link("/proc/self/ns/mnt").ok())
    })
    .await?;
    let program = mounts.role_server(own.path())?;
    let (owner, mut node) = founded().await?;
    node.stop().await?;
    start(&mut node, &program)?;
    owner.until_well(1, 1).await?;
    let bundle = stand_ins("1.20.2", &data)?;
    put_bundle(&node, &bundle)?;
    put(&owner, &bundle.0).await?;
    owner.wait_for_node_status(&node).await?;
    owner.roles(&node, &["kubernetes-worker"], &[]).await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", all_well).await?;
    assert_eq!(
        (well.bundle.as_str(), well.version.as_str(), well.wait_reason.as_str()),
        (&*bundle.0, "1.20.2", "")
    );
    assert!(well.generation > 0);

    let first = |child| started(&node, child)?[0]["at"].as_f64().context("no time");
    let times = [first(CONTAINERD)?, first(IMAGE)?, first(KUBELET)?, first(PROXY)?];
    assert!(times.is_sorted(), "{times:?}");
    let arguments = started(&node, KUBELET)?[0]["arguments"].to_string();
    assert!(arguments.contains(&format!("--hostname-override={}", node.id()?)), "{arguments}");
    let key = node.files().kubernetes_directory().join("worker/kubelet.key");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(key)?.permissions());
    assert_eq!(mode & 0o777, 0o600);
    let range = std::fs::read_to_string(
        node.files().kubernetes_directory().join(CONTAINERD).join("cni/90-pods.conflist"),
    )?;
    assert!(range.contains("10.128.0.0/24"), "{range}");
    let (shim, pod) = (pid(&node, CONTAINERD, "shim.pid")?, pid(&node, KUBELET, "pod.pid")?);
    assert!(runs(shim) && runs(pod) && !pod_groups(&node)?.is_empty());

    // containerd dies: the processes that it started for pods continue, and so do all other components.
    let before = instance(&node, CONTAINERD)?;
    before.stop(std::time::Duration::ZERO)?;
    until("containerd runs again", async || {
        Ok(instance(&node, CONTAINERD).is_ok_and(|now| now != before && now.is_alive()))
    })
    .await
    .with_context(|| node.report())?;
    assert!(runs(shim) && runs(pod), "pods notice nothing");
    wait_for_kubernetes_status(&owner, &node, "all are well again", all_well).await?;
    assert_eq!(pid(&node, CONTAINERD, "shim.pid")?, shim);

    // Killed, and replaced: the components are not affected.
    let running: Vec<ProcessInstance> = [CONTAINERD, KUBELET, PROXY]
        .into_iter()
        .map(|child| instance(&node, child))
        .collect::<Result<_>>()?;
    node.kill_role_server()?;
    start(&mut node, &program)?;
    owner.until_well(1, 1).await?;
    wait_for_kubernetes_status(&owner, &node, "all are well once more", all_well).await?;
    let now: Vec<ProcessInstance> = [CONTAINERD, KUBELET, PROXY]
        .into_iter()
        .map(|child| instance(&node, child))
        .collect::<Result<_>>()?;
    assert_eq!(now, running, "only its role server was started again");
    let kubernetes = node.files().kubernetes_directory();
    assert_eq!(mounts.below(&kubernetes)?.len(), 2, "{:?}", mounts.below(&kubernetes)?);

    // Another bundle: all components restart from it. No API server exists that could know of a pod to evict.
    let other = stand_ins("1.20.3", &data)?;
    put_bundle(&node, &other)?;
    put(&owner, &other.0).await?;
    let upgraded = wait_for_kubernetes_status(&owner, &node, "all run by another bundle", |status| {
        all_well(status) && status.bundle == other.0
    })
    .await?;
    assert_eq!((upgraded.version.as_str(), upgraded.wait_reason.as_str()), ("1.20.3", ""));
    assert!(running.iter().all(|instance| !instance.is_alive()));
    assert!(runs(shim) && runs(pod), "what is in pods is not the bundle's");
    let path = started(&node, CONTAINERD)?.pop().context("it never started")?["path"].to_string();
    assert!(path.contains(&other.0), "{path}");

    owner.roles(&node, &[], &["kubernetes-worker"]).await?;
    until("all of it is gone", async || {
        let left = node.children().into_iter().any(|child| child.starts_with("kubernetes-"));
        Ok(!left
            && !kubernetes.join("worker").exists()
            && fetch_kubernetes_status(&owner, &node).await?.is_none())
    })
    .await
    .with_context(|| node.report())?;
    assert!(running.iter().all(|instance| !instance.is_alive()));
    assert!(!runs(shim) && !runs(pod), "what was left of pods has ended");
    assert_eq!(mounts.below(&kubernetes)?, Vec::<String>::new());
    assert_eq!(pod_groups(&node)?, Vec::<PathBuf>::new());
    assert_eq!(std::fs::read_to_string(data.join("precious"))?, "of somebody");
    for child in [CONTAINERD, IMAGE, KUBELET, PROXY] {
        assert!(!kubernetes.join(child).exists(), "{child}");
    }
    assert!(kubernetes.join("cleaned.log").exists(), "rules of services are removed");
    Ok(())
}
