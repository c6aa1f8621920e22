//! A state directory on a faulty disk, for one agent alone.
//!
//! The agent gets its own mounts, so that the faulty disk is not visible outside, and ends with the agent. The test
//! reads them by `/proc/PID/root`.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Result, ensure};

/// The file that occupies all remaining space of the disk.
const FILLER: &str = "filler";

/// No small disk is larger. A filler of another one would fill the disk of this host.
const MAX_DISK_BYTES: u64 = 8 << 20;

/// An agent on its faulty disk; ends when this is dropped.
pub(crate) struct OddDisk {
    agent: Child,
    state: PathBuf,
}

impl OddDisk {
    /// Runs an agent whose state directory and log are on a disk without a free byte.
    pub(crate) fn full(state: &Path, agent: &Command) -> Result<Self> {
        let script = "
            mount -t tmpfs -o size=256k tmpfs /mnt
            cp -a \"$state/.\" /mnt
            : >/mnt/agent.log
            cat /dev/zero >/mnt/filler 2>/dev/null || :
            mount --move /mnt \"$state\"
            exec \"$@\" >>\"$state/agent.log\" 2>&1";
        Self::start(state, agent, script)
    }

    /// Runs an agent on a disk of 8 MiB that is nearly empty. It has a rotated log, and a log that is longer than the role
    /// server permits.
    pub(crate) fn small(state: &Path, agent: &Command) -> Result<Self> {
        Self::start_small(state, agent, ":")
    }

    /// The same, with a disk that is full from the beginning.
    pub(crate) fn small_and_full(state: &Path, agent: &Command) -> Result<Self> {
        Self::start_small(state, agent, "cat /dev/zero >/mnt/filler 2>/dev/null || :")
    }

    fn start_small(state: &Path, agent: &Command, fill: &str) -> Result<Self> {
        // Without a block of its own, the long log takes no space.
        let script = format!(
            "
            mount -t tmpfs -o size=8m tmpfs /mnt
            cp -a \"$state/.\" /mnt
            rm -f /mnt/agent.log
            truncate -s 5M /mnt/agent.log
            {fill}
            mount --move /mnt \"$state\"
            exec \"$@\""
        );
        Self::start(state, agent, &script)
    }

    /// Takes space until so many per cent of the disk are free. What the agent writes meanwhile may take the last of it.
    pub(crate) fn leave_free(&self, percent: u64) -> Result<()> {
        let mut filler = File::options().create(true).append(true).open(self.path().join(FILLER))?;
        loop {
            let usage = rustix::fs::statvfs(self.path())?;
            ensure!(usage.f_blocks * usage.f_frsize <= MAX_DISK_BYTES, "it is not the small disk");
            if usage.f_bavail <= usage.f_blocks * percent / 100 {
                return Ok(());
            }
            match filler.write_all(&[b'x'; 4096]) {
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
                written => written?,
            }
        }
    }

    /// Whether the agent's process has ended.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.agent.try_wait()?.is_some())
    }

    /// Runs an agent whose state directory can only be read.
    pub(crate) fn read_only(state: &Path, agent: &Command) -> Result<Self> {
        let script = "
            mount --bind \"$state\" \"$state\"
            mount -o remount,bind,ro \"$state\"
            exec \"$@\"";
        Self::start(state, agent, script)
    }

    fn start(state: &Path, agent: &Command, script: &str) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]);
        if !rustix::process::geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["sh", "-euc", script, "sh"]).arg(agent.get_program()).args(agent.get_args());
        command.env("state", state).env("ROLESERVER_LOG", "debug").stdin(Stdio::null()).stderr(Stdio::null());
        Ok(Self { agent: command.spawn()?, state: state.to_owned() })
    }

    /// The agent's pid.
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.agent.id()).unwrap_or(i32::MAX)
    }

    /// The state directory as the agent sees it.
    pub(crate) fn path(&self) -> PathBuf {
        let inside = self.state.strip_prefix("/").unwrap_or(&self.state);
        Path::new("/proc").join(self.agent.id().to_string()).join("root").join(inside)
    }

    /// Frees space on the full disk.
    pub(crate) fn make_room(&self) -> Result<()> {
        Ok(std::fs::remove_file(self.path().join(FILLER))?)
    }
}

impl Drop for OddDisk {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}
