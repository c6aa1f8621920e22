//! The runnable that keeps one program running.
//!
//! Each life looks first at what is there: the program may run already, started by an earlier life or by a role server
//! that is gone. If that is what is asked for it is adopted, with its pid and its connections; if it is something else of
//! that name it is ended first. Two of one name never run at once.
//!
//! When the program ends, the runnable fails with how it ended and what it last wrote, and starts again after its
//! back-off. When the runnable is asked to end, the program is ended too, unless the role server itself is to end: what
//! it runs goes on, and whoever comes after adopts it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ring::digest;
use tokio_util::sync::CancellationToken;

use crate::roleserver::child::cgroup::{CgroupError, Group, Mounts};
use crate::roleserver::child::ending::{Ending, ended};
use crate::roleserver::child::launch::{self, LaunchError, Order, Record};
use crate::roleserver::child::log;
use crate::roleserver::child::spec::{Limits, Spec, SpecError};
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;

const LOG_CHECK: Duration = Duration::from_mins(1);
/// How long what nobody keeps any more may take to end.
const LEFTOVERS_STOP: Duration = Duration::from_secs(20);
/// Last lines of its log that the failure of a program tells.
const TOLD_LINES: usize = 3;

/// Where a role server keeps the programs that it runs.
#[derive(Clone, Debug)]
pub struct Places {
    /// A directory for each program is below this one.
    pub directory: PathBuf,
    /// The control groups of this host.
    pub mounts: Mounts,
    /// This program, by which others are started: `/proc/self/exe`.
    pub launcher: PathBuf,
    /// Cancelled when the role server itself is to end: what runs goes on then.
    pub leaving: CancellationToken,
}

/// Why a program does not run.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// It cannot be run by anybody.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Its control group is not as it should be.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// It was not started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Something on the disk or in the kernel failed.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was tried.
        doing: String,
        /// What happened.
        source: std::io::Error,
    },
    /// It ended.
    #[error("{name}: {how}{said}")]
    Ended {
        /// Which.
        name: String,
        /// How.
        how: Ending,
        /// What it last wrote.
        said: String,
    },
}

impl Places {
    /// Where the record of a program is.
    #[must_use]
    pub fn record(&self, name: &str) -> PathBuf {
        self.directory.join(name).join("process.json")
    }

    /// Names of programs of which something is written down, in order.
    #[must_use]
    pub fn recorded(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Removes what is written down of a program that has ended, and what it wrote.
    pub fn forget(&self, name: &str) -> std::io::Result<()> {
        match std::fs::remove_dir_all(self.directory.join(name)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Where what a program writes is.
    #[must_use]
    pub fn log(&self, name: &str) -> PathBuf {
        self.directory.join(name).join("output.log")
    }

    /// What tells the groups of this role server from those of another one on this host.
    #[must_use]
    pub fn family(&self) -> String {
        let digest = digest::digest(&digest::SHA256, self.directory.as_os_str().as_encoded_bytes());
        format!("roleserver-{}", hex::encode(&digest.as_ref()[..6]))
    }
}

/// Keeps a program running. In each life `decide_spec` decides what is to run, which may take time. `told` hears which
/// process it is, each time that it is another one or adopted.
pub fn keep<F>(
    decide_spec: impl Fn() -> F + Send + Sync + 'static,
    places: Arc<Places>,
    told: impl Fn(&Record) + Send + Sync + 'static,
) -> Runnable
where
    F: Future<Output = Result<Spec, Stop>> + Send + 'static,
{
    let told = Arc::new(told);
    Runnable::new(move |starting: Starting| {
        let (deciding, places, told) = (decide_spec(), places.clone(), told.clone());
        async move {
            let spec = starting.scope().until_cancelled(deciding).await??;
            let (record, handle) = blocking({
                let (spec, places) = (spec.clone(), places.clone());
                move || find_or_start(&spec, &places)
            })
            .await?;
            told(&record);
            let healthy = starting.healthy();
            let how = watch(&record, &handle, &spec, &places, healthy.scope()).await?;
            let said = log::last_lines(&places.log(&spec.name), TOLD_LINES);
            let said = if said.is_empty() { said } else { format!("; it last wrote: {said}") };
            Err(KeepError::Ended { name: spec.name.clone(), how, said }.into())
        }
    })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KeepError> + Send + 'static,
) -> Result<T, Stop> {
    Ok(tokio::task::spawn_blocking(work).await??)
}

fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> KeepError {
    move |source| KeepError::Io { doing: doing.into(), source }
}

/// The process that is what is asked for, and what to wait for its end by. What else runs by that name is ended first.
/// Blocks.
pub fn find_or_start(spec: &Spec, places: &Places) -> Result<(Record, OwnedFd), KeepError> {
    spec.check()?;
    let (path, name) = (places.record(&spec.name), &spec.name);
    if let Some(directory) = path.parent() {
        make_private(directory).map_err(io(format!("making {}", directory.display())))?;
    }
    let group = places.mounts.group(&places.family(), name, &spec.limits)?;
    let there = launch::recorded(&path);
    let opening = || io(format!("looking for {name}"));
    let alive = match &there {
        Some(record) => record.instance.open().map_err(opening())?.map(|handle| (record, handle)),
        None => None,
    };
    if let Some((record, handle)) = alive {
        if record.spec_sha256 == spec.digest() {
            tracing::info!(name, pid = record.instance.pid, "a program that runs already was adopted");
            return Ok((record.clone(), handle));
        }
        tracing::info!(
            name,
            pid = record.instance.pid,
            "a program is to be run otherwise, and is ended first"
        );
    }
    // Also what is left of it where the program itself is gone, and what was never written down.
    launch::stop(there.as_ref(), &group, spec.stop_time, spec.spared.as_deref())
        .map_err(io(format!("ending what is left of {name}")))?;
    for stale in &spec.stale {
        match std::fs::remove_file(stale) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(io(format!("removing {}, which {name} left behind,", stale.display()))(error));
            }
            _ => {}
        }
    }
    let handle = launch::launch(
        &places.launcher,
        &Order { spec: spec.clone(), group, record: Some(path.clone()), log: places.log(name) },
    )?;
    let record = launch::recorded(&path).ok_or_else(|| {
        io(format!("reading what {name} was written down as"))(std::io::ErrorKind::NotFound.into())
    })?;
    Ok((record, handle))
}

/// The process that was started by this name, if it still runs, and what to wait for its end by.
pub fn find(name: &str, places: &Places) -> Result<Option<(Record, OwnedFd)>, KeepError> {
    let Some(record) = launch::recorded(&places.record(name)) else { return Ok(None) };
    let opened = record.instance.open().map_err(io(format!("looking for {name}")))?;
    Ok(opened.map(|handle| (record, handle)))
}

/// Ends whatever is left of a program that nobody keeps any more. Blocks.
pub fn end_leftovers(name: &str, places: &Places) -> Result<(), KeepError> {
    end_within(name, places, LEFTOVERS_STOP)
}

/// Ends whatever runs by this name, which may take so long to end when it is asked to, and forgets that it ran. Blocks.
pub fn end_within(name: &str, places: &Places, patience: Duration) -> Result<(), KeepError> {
    end_but(name, places, patience, None)
}

/// The same, but for programs in its group that are spared ([`Spec::spared`]). Blocks.
pub fn end_but(
    name: &str,
    places: &Places,
    patience: Duration,
    spared: Option<&str>,
) -> Result<(), KeepError> {
    let path = places.record(name);
    let record = launch::recorded(&path);
    let group = places.mounts.group(&places.family(), name, &Limits::default())?;
    let doing = || io(format!("ending what is left of {name}"));
    launch::stop(record.as_ref(), &group, patience, spared).map_err(doing())?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(doing()(error)),
        _ => {}
    }
    group.remove();
    Ok(())
}

fn make_private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Waits for the end of the program, or for being asked to end, which it passes on to the program.
async fn watch(
    record: &Record,
    handle: &OwnedFd,
    spec: &Spec,
    places: &Arc<Places>,
    scope: &Scope,
) -> Result<Ending, Stop> {
    let opening = || io(format!("watching {}", spec.name));
    loop {
        tokio::select! {
            biased;
            how = ended(handle) => return Ok(how.map_err(opening())?),
            cancelled = scope.cancelled() => {
                if !places.leaving.is_cancelled() {
                    end(record, spec, places).await?;
                    // A child of ours leaves nothing behind.
                    ended(handle).await.map_err(opening())?;
                }
                return Err(cancelled.into());
            }
            () = tokio::time::sleep(LOG_CHECK) => {
                if let Err(error) = log::limit(&places.log(&spec.name)) {
                    tracing::warn!(%error, name = spec.name, "what a program wrote could not be cut short");
                }
            }
        }
    }
}

async fn end(record: &Record, spec: &Spec, places: &Arc<Places>) -> Result<(), Stop> {
    let (record, spec, places) = (record.clone(), spec.clone(), places.clone());
    blocking(move || {
        let group: Group = places.mounts.group(&places.family(), &spec.name, &spec.limits)?;
        let doing = || io(format!("ending {}", spec.name));
        launch::stop(Some(&record), &group, spec.stop_time, spec.spared.as_deref()).map_err(doing())?;
        match std::fs::remove_file(places.record(&spec.name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(doing()(error)),
            _ => {}
        }
        group.remove();
        tracing::info!(name = spec.name, pid = record.instance.pid, "a program was ended");
        Ok(())
    })
    .await
}
