//! The service's own program, run as an operator runs it, in a place that shows what it leaves behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::harness::aloud::assertions_aloud;
use crate::harness::child::guarded;

/// The deadline of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);

/// A directory with a home and a directory for temporary files, which programs started here use.
pub(crate) struct Place {
    directory: tempfile::TempDir,
}

/// Exit code and output of a program that has ended.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Place {
    pub(crate) fn new() -> anyhow::Result<Self> {
        assertions_aloud();
        let directory = tempfile::Builder::new().prefix("shepherd-place-").tempdir()?;
        // A private PostgreSQL runs as another user when this one is root.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
        for name in ["tmp", "home"] {
            fs::create_dir(directory.path().join(name))?;
        }
        fs::set_permissions(directory.path().join("tmp"), fs::Permissions::from_mode(0o777))?;
        Ok(Self { directory })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file that only we can read.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> anyhow::Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path)
    }

    /// The program, without the variables of this environment that it would read, and with a watcher: see [`guarded`].
    pub(crate) fn program<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Command {
        let mut command = guarded(env!("CARGO_BIN_EXE_shepherd"));
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            let foreign = name.to_str().is_some_and(|name| {
                name.starts_with("PG") || name.starts_with("OTEL_") || name == "RUST_LOG"
            });
            let own = name.to_str().is_some_and(|name| name.starts_with("SHEPHERD_"));
            if foreign || (own && name != "SHEPHERD_POSTGRES_BIN") {
                command.env_remove(name);
            }
        }
        command.env("HOME", self.path("home")).env("TMPDIR", self.path("tmp")).env("COLUMNS", "100");
        command
    }

    /// Runs it to its end.
    pub(crate) fn run<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
    ) -> anyhow::Result<ProgramOutput> {
        Self::finish(self.program(arguments).spawn()?)
    }

    /// Waits for a program's end. A program that does not end is killed, and that is an error.
    pub(crate) fn finish(mut child: Child) -> anyhow::Result<ProgramOutput> {
        let mut stdout = child.stdout.take().context("its output was taken")?;
        let mut stderr = child.stderr.take().context("its errors were taken")?;
        let stdout = std::thread::spawn(move || std::io::read_to_string(&mut stdout));
        let stderr = std::thread::spawn(move || std::io::read_to_string(&mut stderr));
        let end = Instant::now() + PATIENCE;
        while child.try_wait()?.is_none() {
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                let message = stderr.join().map_err(|_| anyhow::anyhow!("panicked"))??;
                anyhow::bail!("it did not end within {} s; its stderr: {message}", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let text = |thread: std::thread::JoinHandle<std::io::Result<String>>| {
            thread.join().map_err(|_| anyhow::anyhow!("panicked"))?.context("no text")
        };
        Ok(ProgramOutput { code: child.wait()?.code(), stdout: text(stdout)?, stderr: text(stderr)? })
    }

    /// Processes that were started here and still run, and temporary files that still exist.
    pub(crate) fn left_behind(&self) -> anyhow::Result<Vec<String>> {
        let mut left = Vec::new();
        for entry in fs::read_dir(self.path("tmp"))? {
            left.push(entry?.path().display().to_string());
        }
        let here = self.directory.path().display().to_string();
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            let is_process =
                path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.parse::<u32>().is_ok());
            if !is_process {
                continue;
            }
            // The files of a process that has ended read as empty.
            let read = |name: &str| {
                String::from_utf8_lossy(&fs::read(path.join(name)).unwrap_or_default()).into_owned()
            };
            let command = read("cmdline");
            if !command.is_empty() && (command.contains(&here) || read("environ").contains(&here)) {
                left.push(format!("{}: {}", path.display(), command.replace('\0', " ")));
            }
        }
        Ok(left)
    }

    /// Waits until nothing is left behind.
    pub(crate) fn must_be_clean(&self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = self.left_behind()?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < end, "left behind: {left:#?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A text with what differs from run to run masked.
    pub(crate) fn masked(&self, text: &str) -> String {
        let here: &Path = self.directory.path();
        let programs = Path::new(env!("CARGO_BIN_EXE_shepherd")).parent().unwrap_or(Path::new("/"));
        text.replace(&here.display().to_string(), "[place]")
            .replace(&programs.display().to_string(), "[programs]")
    }
}

/// Installs a role server's program that a test may replace. Debug information is left out if `strip` can do so,
/// because the program is sent over the network.
pub(crate) fn own_role_server(path: &std::path::Path) -> anyhow::Result<()> {
    let whole = env!("CARGO_BIN_EXE_roleserver");
    let stripped = std::process::Command::new("strip").arg("-o").arg(path).arg(whole).status();
    if !stripped.is_ok_and(|status| status.success()) {
        std::fs::copy(whole, path)?;
    }
    Ok(())
}
