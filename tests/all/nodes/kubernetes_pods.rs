//! Pods on a worker, with the programs of a real bundle: one node that is both controller and worker.
//!
//! kubelet, containerd and kube-proxy change the host that they run on. So this test runs itself once more in its own
//! namespaces for mounts and the network. There the node has a device with an address, and the directories that belong
//! to these programs alone are empty.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use shepherd::proto::curator::v1::service_status::Kind;
use shepherd::reconciler::objects::node_objects::{CONTROL_PLANE_LABEL, WORKER_LABEL};
use shepherd::roleserver::cluster::kubernetes::components::ComponentPorts;
use shepherd::roleserver::cluster::kubernetes::components::containerd::bridge_name;
use shepherd::roleserver::cluster::kubernetes::pod_cgroups;

use super::kubernetes::{kinds, put, put_bundle, wait_for_kubernetes_status};
use super::node::Node;
use super::owner::Owner;
use super::services::instance;
use crate::harness::aloud::TestResult;
use crate::harness::child::{Program, guarded};
use crate::harness::etcd_servers::until;
use crate::harness::kubernetes::{bundle, has_bundle};

/// Set where this runs in its own namespaces.
const ENCLOSED: &str = "SHEPHERD_TEST_IN_NAMESPACE";
const ADDRESS: &str = "10.99.0.1";
/// Programs of this host that the test needs besides a bundle.
const PROGRAMS: [&str; 6] = ["busybox", "conntrack", "iptables", "ip", "jq", "kubectl"];
const IMAGE: &str = "localhost/web:1";

/// Prepares the namespaces for a node, and becomes the test.
const ENCLOSE: &str = r#"
set -e
for place in /var/log /var/lib/cni /var/lib/kubelet /run; do
    mkdir -p $place
    mount -t tmpfs tmpfs $place
done
ip link set lo up
ip link add m1 type veth peer name m2
ip address add 10.99.0.1/24 dev m1
ip link set m1 up
ip link set m2 up
ip route add default via 10.99.0.254
echo 1 >/proc/sys/net/ipv4/ip_forward
exec "$@"
"#;

fn is_there(program: &str) -> bool {
    let places = ["/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    places.iter().any(|place| Path::new(place).join(program).is_file())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_real_worker_outlive_it_and_go_elsewhere_before_it_ends() -> TestResult {
    if std::env::var_os(ENCLOSED).is_some() {
        return Ok(enclosed().await?);
    }
    let mut obstacles: Vec<&str> = PROGRAMS.into_iter().filter(|program| !is_there(program)).collect();
    if !rustix::process::geteuid().is_root() {
        obstacles.push("the rights of root");
    }
    if !has_bundle(&obstacles)? {
        return Ok(());
    }
    let name = std::thread::current().name().context("no name")?.to_owned();
    let log = tempfile::NamedTempFile::new()?;
    let mut command = guarded("unshare");
    command.args(["--net", "--mount", "--propagation", "private", "/bin/sh", "-c", ENCLOSE, "sh"]);
    command.arg(std::env::current_exe()?).args(["--exact", &name, "--nocapture"]);
    command.env(ENCLOSED, "1");
    let mut program = Program::spawn_logged(&mut command, log.path())?;
    let ended = loop {
        match program.ended()? {
            Some(ended) => break ended,
            None => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
        }
    };
    let text = std::fs::read_to_string(log.path())?;
    ensure_success(ended.success(), &text)?;
    Ok(())
}

fn ensure_success(success: bool, text: &str) -> Result<()> {
    ensure!(success, "in its own namespaces: {text}");
    Ok(())
}

/// A client of Kubernetes with the reconciler's credentials.
struct Kubectl(PathBuf);

impl Kubectl {
    fn new(node: &Node, directory: &Path) -> Result<Self> {
        let file = |name: &str| node.files().kubernetes_directory().join("controller").join(name);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://{ADDRESS}:6443"), "certificate-authority": file("servers.crt"),
            }}],
            "users": [{"name": "u", "user": {
                "client-certificate": file("reconciler.crt"), "client-key": file("reconciler.key"),
            }}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        });
        let path = directory.join("kubeconfig.json");
        std::fs::write(&path, config.to_string())?;
        Ok(Self(path))
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        let done = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(&self.0)
            .arg("--cache-dir")
            .arg(self.0.with_extension("cache"))
            .args(arguments)
            .output()?;
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        ensure!(done.status.success(), "kubectl {arguments:?}: {text}");
        Ok(String::from_utf8(done.stdout)?)
    }

    fn json(&self, arguments: &[&str]) -> Result<Value> {
        let words: Vec<&str> = arguments.iter().copied().chain(["-o", "json"]).collect();
        Ok(serde_json::from_str(&self.run(&words)?)?)
    }

    /// Creates the objects of a file.
    fn create(&self, objects: &Value) -> Result<()> {
        let path = self.0.with_extension("objects");
        std::fs::write(&path, objects.to_string())?;
        self.run(&["create", "-f", &path.display().to_string()]).map(drop)
    }

    /// The pods of an application that have no deletion timestamp, as names and phases.
    fn pods(&self, app: &str) -> Result<Vec<(String, String)>> {
        let list = self.json(&["get", "pods", "-l", &format!("app={app}")])?;
        let all = list["items"].as_array().into_iter().flatten();
        let there = all.filter(|pod| pod["metadata"].get("deletionTimestamp").is_none());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(there.map(|pod| (text(&pod["metadata"]["name"]), text(&pod["status"]["phase"]))).collect())
    }

    /// Waits until one pod of an application runs, and returns its name.
    async fn until_runs(&self, app: &str) -> Result<String> {
        let mut last = Ok(Vec::new());
        let waited = until("its pod runs", async || {
            last = self.pods(app);
            Ok(last.as_ref().is_ok_and(|pods| pods.len() == 1 && pods[0].1 == "Running"))
        });
        let waited = waited.await;
        waited
            .with_context(|| format!("{last:?}\n{}", self.run(&["describe", "pods"]).unwrap_or_default()))?;
        last?.pop().map(|(name, _)| name).context("no pod")
    }
}

/// An application of one pod that answers on port 80.
fn application(name: &str) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
                    "name": "web", "image": IMAGE, "imagePullPolicy": "Never", "command": ["/bin/busybox"],
                    "args": ["sh", "-c", "echo began; exec busybox httpd -f -p 80 -h /www"],
                }]},
            },
        },
    })
}

/// A node with all of Kubernetes, and its owner.
async fn start_full_node() -> Result<(Owner, Node)> {
    let (mut owner, mut node) = (Owner::new()?, Node::at(ADDRESS.parse()?)?);
    node.ports = ComponentPorts::default();
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    let path = bundle().context("no bundle")?;
    let digest = path.file_name().context("no name")?.to_string_lossy().into_owned();
    put_bundle(&node, &(digest.clone(), std::fs::read(path)?))?;
    put(&owner, &digest).await?;
    owner.wait_for_node_status(&node).await?;
    owner.roles(&node, &["kubernetes-controller", "kubernetes-worker"], &[]).await?;
    Ok((owner, node))
}

/// Imports the image of the applications.
fn import_image(node: &Node, directory: &Path) -> Result<()> {
    let page = directory.join("index.html");
    std::fs::write(&page, "hello from a pod\n")?;
    let archive = directory.join("web.tar");
    let script = "source tools/lib/oci-image.sh; oci_image \"$1\" \"$2\" /bin/busybox \
                  \"bin/busybox=$(command -v busybox)\" \"www/index.html=$3\"";
    let made = Command::new("bash")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["-c", script, "bash"])
        .arg(&archive)
        .arg(IMAGE)
        .arg(&page)
        .output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let socket = node.files().kubernetes_directory().join("kubernetes-worker_containerd/socket");
    let bundle = bundle().and_then(|path| Some(path.file_name()?.to_owned())).context("no bundle")?;
    let done = Command::new(node.files().bundles_directory().join(bundle).join("bin/ctr"))
        .arg("--address")
        .arg(socket)
        .args(["--namespace", "k8s.io", "images", "import"])
        .arg(archive)
        .output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

fn answers(address: &str) -> bool {
    use std::io::{Read as _, Write as _};
    let ask = || -> Result<String> {
        let mut stream = std::net::TcpStream::connect((address, 80))?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(10)))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains("hello from a pod"))
}

/// Whether a node is ready, and has its labels.
fn is_as_it_should_be(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let ready = conditions.into_iter().any(|one| one["type"] == "Ready" && one["status"] == "True");
    let labels = &node["metadata"]["labels"];
    let has_roles = labels.get(WORKER_LABEL).is_some() && labels.get(CONTROL_PLANE_LABEL).is_some();
    ready && has_roles && labels["shepherd/release"] == env!("CARGO_PKG_VERSION")
}

async fn enclosed() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (owner, mut node) = start_full_node().await?;
    let well = wait_for_kubernetes_status(&owner, &node, "all are well", |status| {
        status.components.len() == 6 && kinds(status).values().all(|kind| *kind == Kind::Healthy)
    })
    .await?;
    assert_eq!(well.wait_reason, "");
    let kubectl = Kubectl::new(&node, directory.path())?;
    let name = node.id()?.to_string();
    let own = || kubectl.json(&["get", "node", &name]);
    until("the node is ready and has its labels", async || {
        Ok(own().is_ok_and(|node| is_as_it_should_be(&node)))
    })
    .await
    .with_context(|| format!("{:?}\n{}", own(), node.report()))?;

    import_image(&node, directory.path())?;
    for app in ["web", "guarded"] {
        kubectl.create(&application(app))?;
    }
    kubectl.create(&json!({
        "apiVersion": "policy/v1beta1", "kind": "PodDisruptionBudget", "metadata": {"name": "guarded"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
    }))?;
    let (pod, guarded) = (kubectl.until_runs("web").await?, kubectl.until_runs("guarded").await?);
    kubectl.run(&["expose", "deployment", "web", "--port", "80"])?;
    let service = kubectl.json(&["get", "service", "web"])?;
    let service = service["spec"]["clusterIP"].as_str().context("no address")?.to_owned();
    until("it answers at the address of its service", async || Ok(answers(&service))).await?;
    until("its log is served", async || Ok(kubectl.run(&["logs", &pod]).is_ok_and(|log| log == "began\n")))
        .await?;

    // The role server is replaced, and containerd dies: the pod is not affected.
    node.stop().await?;
    assert!(answers(&service), "nothing of it is the role server's");
    node.start()?;
    owner.until_well(1, 1).await?;
    let before = instance(&node, "kubernetes-worker_containerd")?;
    before.stop(std::time::Duration::ZERO)?;
    until("containerd runs again", async || {
        Ok(instance(&node, "kubernetes-worker_containerd").is_ok_and(|now| now != before && now.is_alive()))
    })
    .await?;
    wait_for_kubernetes_status(&owner, &node, "all are well again", |status| {
        status.components.len() == 6 && kinds(status).values().all(|kind| *kind == Kind::Healthy)
    })
    .await?;
    assert!(answers(&service));
    assert_eq!(kubectl.until_runs("web").await?, pod, "it is the same");
    let of_it = kubectl.json(&["get", "pod", &pod])?;
    assert_eq!(of_it["status"]["containerStatuses"][0]["restartCount"], 0);

    // The role is removed: pods are evicted first, except for one that its budget keeps.
    owner.roles(&node, &[], &["kubernetes-worker"]).await?;
    until("the pod is evicted, and the node closed", async || {
        let pods = kubectl.pods("web")?;
        Ok(pods.iter().all(|(name, phase)| *name != pod && phase == "Pending")
            && own()?["spec"]["unschedulable"] == true)
    })
    .await
    .with_context(|| node.report())?;
    assert_eq!(kubectl.pods("guarded")?, [(guarded, "Running".to_owned())], "there would be none left");
    wait_for_kubernetes_status(&owner, &node, "what the node waits for is reported", |status| {
        status.wait_reason.contains("its pods are moved to other nodes")
    })
    .await?;
    kubectl.run(&["delete", "poddisruptionbudget", "guarded"])?;
    let kubernetes = node.files().kubernetes_directory();
    until("all of the worker is gone", async || {
        let left = node.children().into_iter().any(|child| child.starts_with("kubernetes-worker"));
        Ok(!left && !kubernetes.join("worker").exists())
    })
    .await
    .with_context(|| node.report())?;

    let family = node.places().instance_name();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    assert!(!mounts.contains("kubernetes-worker"), "{mounts}");
    assert!(!std::fs::read_to_string("/proc/self/net/dev")?.contains(&bridge_name(&family)));
    let rules = Command::new("iptables-save").output()?;
    assert!(!String::from_utf8_lossy(&rules.stdout).contains("KUBE-SVC"), "rules of services stay");
    let groups = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", &pod_cgroups::cgroup_name(&family)])
        .output()?;
    assert_eq!(String::from_utf8_lossy(&groups.stdout), "");
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let line = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        let of_this = line.contains(&*kubernetes.to_string_lossy());
        assert!(!(of_this && line.contains("containerd-shim")), "{line}");
    }

    until("its object is gone", async || Ok(kubectl.run(&["get", "nodes", "-o", "name"])?.is_empty()))
        .await
        .with_context(|| node.report())?;

    // The role is added again: the node is uncordoned, and pods run there.
    owner.roles(&node, &["kubernetes-worker"], &[]).await?;
    let open = |node: &Value| node["spec"].get("unschedulable").is_none();
    until("the node is there again, and open", async || Ok(own().is_ok_and(|node| open(&node))))
        .await
        .with_context(|| node.report())?;
    until("containerd is there", async || Ok(import_image(&node, directory.path()).is_ok())).await?;
    kubectl.until_runs("web").await?;
    // The end of the test kills everything, and leaves no mount behind: the mounts end with the namespace.
    Ok(())
}
