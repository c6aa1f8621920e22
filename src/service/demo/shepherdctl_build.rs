//! Builds `shepherdctl` beside the demo's program, if the demo is run from source.
//!
//! It is built once the fleet has started, so that nobody who came to see the fleet waits for it.

use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};

use hardening::file_limit::UsualFileLimit as _;

/// A process that builds `shepherdctl`. Dropping this kills it and everything that it started.
#[derive(Debug)]
pub(super) struct ShepherdctlBuild {
    child: Option<Result<Child, String>>,
}

impl ShepherdctlBuild {
    /// Starts the program, if one is configured.
    pub(super) fn start(program: Option<&Path>) -> Self {
        let child = program.map(|program| {
            let mut command = Command::new(program);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
            hardening::restore_core_limit(command.as_std_mut().usual_file_limit());
            command.spawn().map_err(|error| format!("{} does not start: {error}", program.display()))
        });
        Self { child }
    }

    /// Whether the build is still running.
    pub(super) fn is_under_way(&mut self) -> bool {
        let Some(Ok(child)) = &mut self.child else { return false };
        !matches!(child.try_wait(), Ok(Some(_)))
    }

    /// Waits for the end of the build. Returns why it failed, or `None`.
    pub(super) async fn failure(&mut self) -> Option<String> {
        let child = match self.child.as_mut()? {
            Ok(child) => child,
            Err(failure) => return Some(failure.clone()),
        };
        let mut text = String::new();
        if let Some(stderr) = child.stderr.as_mut() {
            // After a read error, the part that was read is better than nothing.
            let _ = stderr.read_to_string(&mut text).await;
        }
        let ended = child.wait().await;
        match ended {
            Ok(status) if status.success() => None,
            Ok(status) => Some(format!("{status}: {}", text.trim())),
            Err(error) => Some(error.to_string()),
        }
    }
}

impl Drop for ShepherdctlBuild {
    fn drop(&mut self) {
        if let Some(Ok(child)) = &self.child
            && let Some(group) = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?))
        {
            // An error means that it has ended already, which is just as good.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("build");
        // Another process writes it: a process that a parallel test starts would inherit an open file of ours until it becomes
        // a program itself, and until then the kernel refuses to execute the script (ETXTBSY).
        let status = std::process::Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", text])
            .arg(&path)
            .status()
            .unwrap();
        assert!(status.success());
        (directory, path)
    }

    #[tokio::test]
    async fn end_of_the_build_is_awaited_and_its_failure_reported() {
        assert_eq!(ShepherdctlBuild::start(None).failure().await, None);
        let (_directory, good) = script("exit 0");
        assert_eq!(ShepherdctlBuild::start(Some(&good)).failure().await, None);
        let (_directory, bad) = script("echo 'error: no space' >&2; exit 3");
        assert_eq!(
            ShepherdctlBuild::start(Some(&bad)).failure().await.unwrap(),
            "exit status: 3: error: no space"
        );
        let failure = ShepherdctlBuild::start(Some(Path::new("/nowhere/build"))).failure().await.unwrap();
        assert!(failure.starts_with("/nowhere/build does not start: "), "{failure}");
    }

    #[tokio::test]
    async fn build_and_what_it_started_end_with_the_demo() {
        let (directory, slow) = script("sleep 1000 & echo $! >\"$(dirname \"$0\")/started\"; wait");
        let mut build = ShepherdctlBuild::start(Some(&slow));
        let started = directory.path().join("started");
        let child = eventually(|| std::fs::read_to_string(&started).ok()?.trim().parse::<i32>().ok()).await;
        assert!(build.is_under_way());
        drop(build);
        // Its new parent may be slow to reap it.
        let stat = format!("/proc/{child}/stat");
        eventually(|| {
            let runs = std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
            (!runs).then_some(())
        })
        .await;
    }

    async fn eventually<T>(look: impl Fn() -> Option<T>) -> T {
        let looking = async {
            loop {
                match look() {
                    Some(found) => break found,
                    None => tokio::time::sleep(std::time::Duration::from_millis(2)).await,
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(1), looking).await.expect("it happens")
    }
}
