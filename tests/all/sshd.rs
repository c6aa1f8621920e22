//! A real OpenSSH server on loopback for one test, with its own home directory.
//!
//! An OpenSSH server needs a port number in its configuration. So the test binds port 0 to find a free one, and tries
//! another one if a different program took it first. Sessions have the test's directory as `HOME`, so nothing of the
//! real home is read or written.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::session::{SshSettings, SshTarget};
use tempfile::TempDir;

use crate::harness::child::{guarded, is_watcher};

/// Waits for `condition` with a long deadline: a loaded host is slow, and only a condition that never holds is a
/// failure.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_mins(5);
    while !condition() {
        ensure!(Instant::now() < deadline, "waited 5 min for {what}");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// This host and this user, at a server's port or that of a proxy in front of it.
pub(crate) fn target_at(port: u16) -> Result<SshTarget> {
    let output = Command::new("id").arg("-un").output()?;
    let user = String::from_utf8(output.stdout)?.trim().to_owned();
    Ok(SshTarget { host: "127.0.0.1".to_owned(), port, user })
}

/// How the server is set up.
pub(crate) struct Setup {
    /// The loopback address that it listens on.
    pub(crate) listen: &'static str,
    /// Kinds of host keys, as `ssh-keygen -t` names them.
    pub(crate) host_keys: &'static [&'static str],
    /// Programs that come first on the PATH of sessions: (name, script).
    pub(crate) programs: Vec<(&'static str, String)>,
    /// A wrapper script around every command, which finds it in `SSH_ORIGINAL_COMMAND`.
    pub(crate) forced_command: Option<&'static str>,
    /// Further variables of sessions: `NAME=value …`.
    pub(crate) environment: String,
    /// Further lines of its configuration.
    pub(crate) config: String,
    /// Replaces `/etc/shadow` for this server alone, in a mount namespace of its own.
    pub(crate) shadow: Option<String>,
    /// Mounts a filesystem in memory at `~/.local` with these options, in a mount namespace of its own.
    pub(crate) local: Option<&'static str>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1",
            host_keys: &["ed25519"],
            programs: vec![],
            forced_command: None,
            environment: String::new(),
            config: String::new(),
            shadow: None,
            local: None,
        }
    }
}

/// A running server; dropping it ends it and its sessions.
pub(crate) struct Sshd {
    child: Child,
    directory: TempDir,
    listen: &'static str,
    port: u16,
    key: ClientKey,
}

impl Sshd {
    pub(crate) fn start(setup: &Setup) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("shepherd-sshd-").tempdir()?;
        let root = directory.path();
        // Privilege separation requires this directory; it may exist already.
        if is_root()? {
            fs::create_dir_all("/run/sshd")?;
        }
        fs::create_dir(root.join("home"))?;
        fs::create_dir(root.join("bin"))?;
        let key = ClientKey::load_or_create(&root.join("client_key"))?;
        fs::write(root.join("authorized_keys"), key.authorized_keys_line() + "\n")?;
        for (name, script) in &setup.programs {
            write_program(&root.join("bin").join(name), script)?;
        }

        let mut config = setup.config.clone();
        for kind in setup.host_keys {
            let path = root.join(format!("host_{kind}"));
            let status =
                Command::new("ssh-keygen").args(["-q", "-N", "", "-t", kind, "-f"]).arg(&path).status()?;
            ensure!(status.success(), "ssh-keygen failed");
            write!(config, "\nHostKey {}", path.display())?;
        }
        if let Some(script) = setup.forced_command {
            let path = root.join("forced");
            write_program(&path, script)?;
            write!(config, "\nForceCommand {}", path.display())?;
        }
        write!(
            config,
            "\nListenAddress {listen}\nAuthorizedKeysFile {root}/authorized_keys\nPidFile none\nStrictModes no\n\
             PermitRootLogin yes\nUsePAM no\nKbdInteractiveAuthentication no\nPasswordAuthentication no\nUseDNS no\n\
             LogLevel VERBOSE\nMaxStartups 100\nSetEnv HOME={root}/home PATH={root}/bin:/usr/sbin:/usr/bin:/sbin:/bin {environment}\n",
            listen = setup.listen,
            root = root.display(),
            environment = setup.environment,
        )?;
        fs::write(root.join("config"), config)?;

        let mut mounts = String::new();
        if let Some(shadow) = &setup.shadow {
            let path = root.join("shadow");
            fs::write(&path, shadow)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            write!(mounts, "mount --bind {} /etc/shadow && ", path.display())?;
        }
        if let Some(options) = setup.local {
            let path = root.join("home/.local");
            fs::create_dir(&path)?;
            write!(mounts, "mount -t tmpfs -o {options} tmpfs {} && ", path.display())?;
        }
        let mut command = if mounts.is_empty() {
            Command::new("/usr/sbin/sshd")
        } else {
            let mut command = Command::new("unshare");
            // The mounts are private to this namespace and end with it.
            command.args(["--mount", "--propagation", "private", "sh", "-c"]);
            command.arg(mounts + "exec /usr/sbin/sshd \"$@\"").arg("sshd");
            command
        };
        command.args(["-D", "-e", "-f"]).arg(root.join("config"));
        let (child, port) = Self::listen(command, root, setup.listen)?;
        Ok(Self { child, directory, listen: setup.listen, port, key })
    }

    /// Another machine that accepts the same keys as this one.
    pub(crate) fn beside(&self, setup: &Setup) -> Result<Self> {
        let mut other = Self::start(setup)?;
        fs::copy(
            self.directory.path().join("authorized_keys"),
            other.directory.path().join("authorized_keys"),
        )?;
        other.key = self.key.clone();
        Ok(other)
    }

    /// Also accepts the key of that `authorized_keys` line.
    pub(crate) fn authorize(&self, line: &str) -> Result<()> {
        let path = self.directory.path().join("authorized_keys");
        let lines = fs::read_to_string(&path)?;
        Ok(fs::write(path, format!("{lines}{line}\n"))?)
    }

    fn listen(mut command: Command, root: &Path, address: &str) -> Result<(Child, u16)> {
        let log = root.join("log");
        command.arg("-p");
        for _ in 0..20 {
            let port = TcpListener::bind((address, 0))?.local_addr()?.port();
            let mut again = guarded(command.get_program());
            again.args(command.get_args()).arg(port.to_string());
            let mut child = again
                .stdout(Stdio::null())
                .stderr(File::create(&log)?)
                .spawn()
                .context("starting /usr/sbin/sshd: install openssh-server")?;
            let mut ended = None;
            wait_until("sshd to listen", || {
                ended = child.try_wait().ok().flatten();
                ended.is_some()
                    || fs::read_to_string(&log).unwrap_or_default().contains("Server listening on")
            })?;
            if ended.is_none() {
                return Ok((child, port));
            }
            let text = fs::read_to_string(&log)?;
            ensure!(text.contains("Address already in use"), "sshd ended: {text}");
        }
        bail!("no free port for sshd")
    }

    pub(crate) fn settings(&self) -> SshSettings {
        let mut settings = SshSettings::new(self.key.clone());
        // Many servers share few cores in a test run, and this limit is not under test.
        settings.connect_timeout = Duration::from_secs(20);
        settings.greeting_timeout = Duration::from_mins(1);
        settings.login_timeout = Duration::from_mins(1);
        settings
    }

    pub(crate) fn target(&self) -> Result<SshTarget> {
        Ok(SshTarget { host: self.listen.to_owned(), ..target_at(self.port)? })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Processes of sessions that live now.
    pub(crate) fn sessions(&self) -> Vec<u32> {
        descendants(self.child.id())
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let sessions = self.sessions();
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
        for pid in sessions {
            let _killed = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
        }
    }
}

fn is_root() -> Result<bool> {
    Ok(Command::new("id").arg("-u").output()?.stdout == b"0\n")
}

/// Writes a script that can be executed at once, by a process of its own.
///
/// If this process wrote it, a child that another test starts meanwhile would have the file open for writing until it
/// becomes a program itself, and until then the kernel refuses to execute the script (ETXTBSY).
pub(crate) fn write_program(path: &Path, script: &str) -> Result<()> {
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut writer = writer.spawn()?;
    if let Some(mut input) = writer.stdin.take() {
        input.write_all(script.as_bytes())?;
    }
    let status = writer.wait()?;
    anyhow::ensure!(status.success(), "{} could not be written: {status}", path.display());
    Ok(())
}

fn descendants(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut all = vec![];
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    for child in children.filter(|child| !is_watcher(*child)) {
        all.push(child);
        all.extend(descendants(child));
    }
    all
}
