//! What a worker does to its host beside running programs, and how that is undone.
//!
//! | what | by whom | until when |
//! | --- | --- | --- |
//! | the control group of pods, and all that runs in it | prepared for the kubelet | the kubelet or containerd is forgotten |
//! | shims, one for each pod | containerd | containerd is forgotten |
//! | mounts below the directories of both | both | theirs is forgotten |
//! | the bridge of pods | a plugin for networks | containerd is forgotten |
//! | rules of iptables | kube-proxy | it is forgotten |
//!
//! All of it can be done again at any point: a role server that was killed in the middle is followed by one that begins
//! anew. Nothing is touched but what carries this role server's own name, or lies below its own directories.
//!
//! A directory in which something is still mounted is never removed: what is mounted there may be somebody's data.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};

use crate::model::kubernetes::bundle::Duty;
use crate::roleserver::child::keep::Places;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::components::{containerd, id, kube_proxy, kubelet};
use crate::roleserver::cluster::kubernetes::groups::Pods;
use crate::roleserver::cluster::services::hands::Particulars;
use crate::roleserver::cluster::services::wanted::Id;
use crate::roleserver::mountinfo;

/// How long what is left of pods has to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a command that clears up may take.
const LONGEST: Duration = Duration::from_secs(30);
/// Mounts on mounts are taken off one after the other; more than so many times nobody mounts.
const ROUNDS: usize = 16;

/// What is particular to the components.
pub const PARTICULARS: Particulars = Particulars { spared, prepare, undo };

fn is(id: &Id, name: &str) -> bool {
    *id == self::id(Duty::Worker, name)
}

fn spared(id: &Id) -> Option<&'static str> {
    is(id, containerd::NAME).then_some(containerd::SHIM)
}

fn prepare(id: &Id, places: &Places) -> std::io::Result<()> {
    if is(id, kubelet::NAME) { Pods::of_this_host(&places.family()).make() } else { Ok(()) }
}

fn undo(id: &Id, directory: &Path, places: &Places) -> std::io::Result<()> {
    let family = places.family();
    if is(id, kubelet::NAME) || is(id, containerd::NAME) {
        Pods::of_this_host(&family).end(PATIENCE)?;
        unmount_below(directory)?;
    }
    if is(id, containerd::NAME) {
        remove_bridge(&containerd::bridge(&family));
    }
    if is(id, kube_proxy::NAME) {
        remove_rules(directory);
    }
    Ok(())
}

/// Undoes all that a worker may have left, where the machine stops being a node. None of its programs runs. Blocks.
pub fn undo_all(files: &Files, places: &Places) -> std::io::Result<()> {
    for name in [kube_proxy::NAME, kubelet::NAME, containerd::NAME] {
        let id = id(Duty::Worker, name);
        let directory = files.kubernetes().join(id.child());
        if directory.exists() {
            undo(&id, &directory, places)?;
        }
    }
    Ok(())
}

/// Has nothing mounted below this directory any more.
fn unmount_below(directory: &Path) -> std::io::Result<()> {
    let Ok(directory) = directory.canonicalize() else { return Ok(()) };
    for _ in 0..ROUNDS {
        let all = mounted_below(&mountinfo::read()?, &directory);
        if all.is_empty() {
            return Ok(());
        }
        // What came last lies on what came before.
        for point in all.iter().rev() {
            tracing::info!(path = %point.display(), "what a worker mounted is unmounted");
            let done = unmount(point, UnmountFlags::NOFOLLOW)
                // Whoever still has it open keeps it, and nobody else finds it any more.
                .or_else(|_| unmount(point, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH));
            match done {
                // It went with another one.
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

/// Where something is mounted below this directory, the lowest first.
fn mounted_below(mountinfo: &str, directory: &Path) -> Vec<PathBuf> {
    let points = mountinfo::mounts(mountinfo).map(|mount| mount.point);
    points.filter(|point| point.starts_with(directory) && point != directory).collect()
}

/// The name of the bridge is this role server's own: nobody else's is meant.
fn remove_bridge(name: &str) {
    // Of the network that this process is in, which /sys need not be about.
    let devices = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let is_there = devices.lines().any(|line| line.trim_start().starts_with(&format!("{name}:")));
    if is_there && let Err(why) = run(Path::new("ip"), &["link", "delete", "dev", name]) {
        tracing::warn!(name, why, "the bridge of pods stays");
    }
}

/// Has kube-proxy remove its rules, with the program that it was run with.
fn remove_rules(directory: &Path) {
    let read = std::fs::read(directory.join(kube_proxy::CLEAN_UP)).ok();
    let Some(words) = read.and_then(|bytes| serde_json::from_slice::<Vec<String>>(&bytes).ok()) else {
        return;
    };
    let Some((program, arguments)) = words.split_first() else { return };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let Err(why) = run(Path::new(program), &arguments) {
        tracing::warn!(
            program,
            why,
            "rules of iptables that kube-proxy made stay until the node starts again"
        );
    }
}

/// Runs a command to its end; the error is a sentence.
fn run(program: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("it could not be started: {error}"))?;
    let end = Instant::now() + LONGEST;
    loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("it failed: {status}")),
            None if Instant::now() >= end => {
                child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
                return Err(format!("it took longer than {} seconds", LONGEST.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
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
    fn only_shims_of_containerd_are_spared() {
        let of = |duty, name| spared(&id(duty, name));
        assert_eq!(of(Duty::Worker, containerd::NAME), Some("containerd-shim"));
        assert_eq!(of(Duty::Worker, kubelet::NAME), None);
        assert_eq!(of(Duty::Controller, containerd::NAME), None);
    }

    #[test]
    fn command_that_fails_is_told_with_its_reason() {
        run(Path::new("true"), &[]).unwrap();
        assert!(run(Path::new("false"), &[]).unwrap_err().contains("exit status: 1"));
        assert!(run(Path::new("/nowhere/program"), &[]).unwrap_err().contains("could not be started"));
    }
}
