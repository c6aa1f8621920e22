//! Clean up what a worker leaves on its host: pod processes, mounts, the bridge, iptables rules.
//!
//! | what | made by | cleaned up when |
//! | --- | --- | --- |
//! | control group or slice of pods | `prepare_host` for the kubelet | kubelet or containerd is removed |
//! | shims, one for each pod | containerd | containerd is removed |
//! | mounts below the directories of both | both | the component is removed |
//! | the bridge of pods | a CNI plugin | containerd is removed |
//! | iptables rules | kube-proxy | kube-proxy is removed |
//!
//! Every step can be repeated: if a role server is killed in the middle, the next one starts over. Only what carries
//! this role server's own name or lies below its own directories is touched.
//!
//! A directory that still has something mounted in it is never removed: the mounted file system may hold somebody's
//! data.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use hardening::file_limit::UsualFileLimit as _;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use rustix::mount::{UnmountFlags, unmount};

use crate::bounded_command::wait_within;
use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::cgroup_driver::CgroupDriver;
use crate::cluster::kubernetes::components::{containerd, kube_proxy, kubelet, service_id};
use crate::cluster::kubernetes::pod_cgroups::{self, PodCgroups};
use crate::cluster::services::desired::ServiceId;
use crate::cluster::services::service_runtime::ServiceHooks;
use crate::mountinfo;

/// Time that remaining processes of pods have to exit before they are killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a clean-up command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of passes that unmount what is below a directory, because mounts may lie on mounts.
const MAX_ROUNDS: usize = 16;

/// Hooks of Kubernetes components in the service runtime.
pub const HOOKS: ServiceHooks = ServiceHooks { survivor_prefix, prepare: prepare_host, clean_up };

fn is_worker_component(id: &ServiceId, name: &str) -> bool {
    *id == self::service_id(KubernetesDuty::Worker, name)
}

fn survivor_prefix(id: &ServiceId) -> Option<&'static str> {
    is_worker_component(id, containerd::NAME).then_some(containerd::SHIM_PREFIX)
}

fn prepare_host(id: &ServiceId, children: &ChildContext) -> std::io::Result<()> {
    if !is_worker_component(id, kubelet::NAME) {
        return Ok(());
    }
    let state_directory = children.directory.parent().unwrap_or(&children.directory);
    // It was stored before the kubelet became desired. A guess could end every pod of the other driver.
    let driver = CgroupDriver::read(&ClusterFiles::in_state_directory(state_directory)).ok_or_else(|| {
        std::io::Error::other("the cgroup driver of this node cannot be read; it is read again")
    })?;
    let family = children.instance_name();
    let pods = PodCgroups::detect_host(&family);
    let had_slice = pods.has_slice();
    pods.terminate_other(driver, STOP_TIMEOUT)?;
    if driver == CgroupDriver::Cgroupfs && had_slice {
        stop_slice(&family);
    }
    pods.create(driver)
}

/// Lets systemd forget the slices of pods after their groups are gone.
fn stop_slice(family: &str) {
    let slice = pod_cgroups::slice_name(family);
    if let Err(why) = run_command(Path::new("systemctl"), &["stop", &slice]) {
        tracing::warn!(slice, reason = why, "the slice of pods could not be stopped");
    }
}

/// Ends everything in the group above all pods, and removes it.
fn end_pods(family: &str) -> std::io::Result<()> {
    let pods = PodCgroups::detect_host(family);
    let had_slice = pods.has_slice();
    pods.terminate(STOP_TIMEOUT)?;
    if had_slice {
        stop_slice(family);
    }
    Ok(())
}

fn clean_up(id: &ServiceId, directory: &Path, children: &ChildContext) -> std::io::Result<()> {
    let family = children.instance_name();
    if is_worker_component(id, kubelet::NAME) || is_worker_component(id, containerd::NAME) {
        end_pods(&family)?;
        unmount_below(directory)?;
    }
    if is_worker_component(id, containerd::NAME) {
        remove_bridge(&containerd::bridge_name(&family));
    }
    if is_worker_component(id, kube_proxy::NAME) {
        remove_rules(directory);
    }
    Ok(())
}

/// Cleans up everything that a worker may have left, when the machine stops being a node. None of its programs may run.
/// Blocks.
pub fn clean_up_all(files: &ClusterFiles, children: &ChildContext) -> std::io::Result<()> {
    for name in [kube_proxy::NAME, kubelet::NAME, containerd::NAME] {
        let id = service_id(KubernetesDuty::Worker, name);
        let directory = files.kubernetes_directory().join(id.child_name());
        if directory.exists() {
            clean_up(&id, &directory, children)?;
        }
    }
    Ok(())
}

/// Unmounts everything below this directory.
fn unmount_below(directory: &Path) -> std::io::Result<()> {
    let Ok(directory) = directory.canonicalize() else { return Ok(()) };
    for _ in 0..MAX_ROUNDS {
        let all = mounted_below(&mountinfo::read_mountinfo()?, &directory);
        if all.is_empty() {
            return Ok(());
        }
        // The last mount may lie on an earlier one, so it goes first.
        for point in all.iter().rev() {
            tracing::info!(path = %point.display(), "a mount of a worker is unmounted");
            let done = unmount(point, UnmountFlags::NOFOLLOW)
                // Processes that have files open in it keep them; no other process can reach it any more.
                .or_else(|_| unmount(point, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH));
            match done {
                // It was unmounted together with another one.
                Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
                Err(error) => {
                    let error = Error::from(error);
                    let why = format!("unmounting {} failed: {error}", point.display());
                    return Err(Error::new(error.kind(), why));
                }
            }
        }
    }
    let why = format!("something is mounted below {} again and again", directory.display());
    Err(Error::new(ErrorKind::ResourceBusy, why))
}

/// Mount points below this directory, in the order of the table: a mount comes after the one that it lies on.
fn mounted_below(mountinfo: &str, directory: &Path) -> Vec<PathBuf> {
    let points = mountinfo::parse_mounts(mountinfo).map(|mount| mount.point);
    points.filter(|point| point.starts_with(directory) && point != directory).collect()
}

/// Removes the bridge of that name, which belongs to this role server alone.
fn remove_bridge(name: &str) {
    // Network devices of this process's network namespace; `/sys` may show those of another one.
    let devices = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let is_there = devices.lines().any(|line| line.trim_start().starts_with(&format!("{name}:")));
    if is_there && let Err(why) = run_command(Path::new("ip"), &["link", "delete", "dev", name]) {
        tracing::warn!(name, reason = why, "the bridge of pods could not be removed");
    }
}

/// Runs the stored command by which kube-proxy removes its rules.
fn remove_rules(directory: &Path) {
    let read = std::fs::read(directory.join(kube_proxy::CLEAN_UP_FILE)).ok();
    let Some(words) = read.and_then(|bytes| serde_json::from_slice::<Vec<String>>(&bytes).ok()) else {
        return;
    };
    let Some((program, arguments)) = words.split_first() else { return };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let Err(why) = run_command(Path::new(program), &arguments) {
        tracing::warn!(program, reason = why, "iptables rules of kube-proxy stay until the node reboots");
    }
}

/// Runs a command to its end, and kills it at the time limit; the error is a sentence.
fn run_command(program: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = hardening::restore_core_limit(command.usual_file_limit())
        .spawn()
        .map_err(|error| format!("it could not be started: {error}"))?;
    let status = wait_within(&mut child, COMMAND_TIMEOUT).map_err(|error| error.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("it failed: {status}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_a_directory_are_found_and_no_others() {
        let mountinfo = "\
20 1 8:1 / / rw - ext4 /dev/a rw
21 20 0:5 / /s/kubelet rw - tmpfs tmpfs rw
22 20 0:6 / /s/kubelet/pods/a\\040b rw shared:1 - tmpfs tmpfs rw
23 22 0:7 / /s/kubelet/pods/a\\040b/c rw - tmpfs tmpfs rw
24 20 0:8 / /s/kubelet2/x rw - tmpfs tmpfs rw
25 20 0:9 / /s/kubelet/back\\134slash rw - tmpfs tmpfs rw
";
        let found = mounted_below(mountinfo, Path::new("/s/kubelet"));
        let expected = ["/s/kubelet/pods/a b", "/s/kubelet/pods/a b/c", "/s/kubelet/back\\slash"];
        assert_eq!(found, expected.map(PathBuf::from));
    }

    #[test]
    fn only_containerd_shims_are_spared() {
        let of = |duty, name| survivor_prefix(&service_id(duty, name));
        assert_eq!(of(KubernetesDuty::Worker, containerd::NAME), Some("containerd-shim"));
        assert_eq!(of(KubernetesDuty::Worker, kubelet::NAME), None);
        assert_eq!(of(KubernetesDuty::Controller, containerd::NAME), None);
    }

    #[test]
    fn failed_command_is_reported_with_its_reason() {
        run_command(Path::new("true"), &[]).unwrap();
        assert!(run_command(Path::new("false"), &[]).unwrap_err().contains("exit status: 1"));
        assert!(
            run_command(Path::new("/nowhere/program"), &[]).unwrap_err().contains("could not be started")
        );
    }
}
