//! Child lifecycle: adopt or start, watch, stop, remove.
//!
//! Each run of the runnable first looks for a running program that an earlier run, or an earlier role server, has
//! started. If its specification is the desired one, it is adopted, with its pid and its connections. If it is another
//! one, it is stopped first. Two children of one name never run at once.
//!
//! Where systemd started the role server, a new child gets a scope ([`placement`][super::placement]). While systemd does
//! not answer it starts below the group of the role server, and is moved later ([`migration`][super::migration]).
//!
//! When the program ends, the runnable fails with the exit status and the last output, and is restarted after its
//! back-off. When the runnable is cancelled, the program is stopped too, unless the role server itself ends: then its
//! children go on, and the next role server adopts them.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ring::digest;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use tokio_util::sync::CancellationToken;

use crate::child::cgroup::{Cgroup, CgroupError, CgroupMounts};
use crate::child::exit::{ChildExit, wait_for_exit};
use crate::child::launch::{self, ChildRecord, LaunchError, LaunchOrder, Placement};
use crate::child::limits::{missed_limits_message, name_limits, scope_limits_message};
use crate::child::log;
use crate::child::placement::{CreatedGroup, PlacedChild, Scopes};
use crate::child::scope::unprotected_message;
use crate::child::spec::{ChildSpec, ChildSpecError};
use crate::disk;

const LOG_CHECK_INTERVAL: Duration = Duration::from_mins(1);
/// How long a leftover child may take to end.
const LEFTOVER_STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Last lines of the log that the error of an ended program quotes.
const ERROR_LOG_LINES: usize = 3;

/// The context in which a role server runs its children.
#[derive(Clone, Debug)]
pub struct ChildContext {
    /// The directory that has a directory for each child.
    pub directory: PathBuf,
    /// The control groups of this host.
    pub mounts: CgroupMounts,
    /// The program that launches children, which is this one: `/proc/self/exe`.
    pub launcher: PathBuf,
    /// Cancelled when the role server itself ends; children go on then.
    pub shutdown: CancellationToken,
    /// The scopes of children; `None` unless systemd started this role server.
    pub scopes: Option<Scopes>,
}

/// Why a child does not run.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The specification is invalid.
    #[error(transparent)]
    Spec(#[from] ChildSpecError),
    /// Its control group could not be set up.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The launch of the program failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// An operation on the disk or in the kernel failed.
    #[error("{operation} failed: {source}")]
    Io {
        /// The operation that failed.
        operation: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The program ended by itself or was killed.
    #[error("{name}: {exit}{output}")]
    Ended {
        /// The name of the child.
        name: String,
        /// How it ended, if that is known.
        exit: ChildExit,
        /// The last lines of its output, for the message; empty without output.
        output: String,
    },
}

impl ChildContext {
    /// The path of a child's record.
    #[must_use]
    pub fn record_path(&self, name: &str) -> PathBuf {
        self.directory.join(name).join("process.json")
    }

    /// The names of the recorded children, sorted.
    #[must_use]
    pub fn recorded_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Removes the record and the output of a child that has ended.
    pub fn remove_files(&self, name: &str) -> std::io::Result<()> {
        match std::fs::remove_dir_all(self.directory.join(name)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// The lock of a child, held while it is started, stopped or moved; `None` where no child is ever moved.
    #[must_use]
    pub fn lock_of(&self, name: &str) -> Option<Arc<Mutex<()>>> {
        self.scopes.as_ref().map(|scopes| scopes.lock_of(name))
    }

    /// The path of a child's output log.
    #[must_use]
    pub fn log_path(&self, name: &str) -> PathBuf {
        self.directory.join(name).join("output.log")
    }

    /// Distinguishes the control groups of this role server from those of another one on this host.
    #[must_use]
    pub fn instance_name(&self) -> String {
        let digest = digest::digest(&digest::SHA256, self.directory.as_os_str().as_encoded_bytes());
        format!("roleserver-{}", hex::encode(&digest.as_ref()[..6]))
    }
}

/// Keeps a child running. In each run, `decide_spec` decides on the specification, which may take time. The third
/// argument gets the record of each process that was started or adopted.
pub fn run_child<F>(
    decide_spec: impl Fn() -> F + Send + Sync + 'static,
    children: Arc<ChildContext>,
    reported: impl Fn(&ChildRecord) + Send + Sync + 'static,
) -> Runnable
where
    F: Future<Output = Result<ChildSpec, RunnableError>> + Send + 'static,
{
    let reported = Arc::new(reported);
    Runnable::new(move |starting: Starting| {
        let (deciding, children, reported) = (decide_spec(), children.clone(), reported.clone());
        async move {
            let spec = starting.scope().until_cancelled(deciding).await??;
            let (record, handle) = run_blocking({
                let (spec, children) = (spec.clone(), children.clone());
                move || adopt_or_start(&spec, &children)
            })
            .await?;
            reported(&record);
            let healthy = starting.mark_healthy();
            let how = watch_child(&record, &handle, &spec, &children, healthy.scope()).await?;
            let text = log::last_lines(&children.log_path(&spec.name), ERROR_LOG_LINES);
            let text = if text.is_empty() { text } else { format!("; it last wrote: {text}") };
            Err(ChildError::Ended { name: spec.name.clone(), exit: how, output: text }.into())
        }
    })
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ChildError> + Send + 'static,
) -> Result<T, RunnableError> {
    Ok(tokio::task::spawn_blocking(work).await??)
}

fn io_error(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> ChildError {
    move |source| ChildError::Io { operation: doing.into(), source }
}

/// Returns the record and a pidfd of the child with this specification: the running one if it matches, else a new one.
/// A running child of that name that does not match is stopped first. Blocks.
pub fn adopt_or_start(
    spec: &ChildSpec,
    children: &ChildContext,
) -> Result<(ChildRecord, OwnedFd), ChildError> {
    spec.validate()?;
    let (path, name) = (children.record_path(&spec.name), &spec.name);
    if let Some(directory) = path.parent() {
        create_private_directory(directory).map_err(io_error(format!("making {}", directory.display())))?;
    }
    let lock = children.lock_of(name);
    let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
    let there = launch::read_record(&path).or_else(|| replace_damaged_record(spec, children, &path));
    let opening = || io_error(format!("looking for {name}"));
    let alive = match &there {
        Some(record) => record.instance.open_pidfd().map_err(opening())?.map(|handle| (record, handle)),
        None => None,
    };
    if let Some((record, handle)) = alive {
        if record.satisfies(spec) {
            children.apply_limits(name, &spec.limits)?;
            tracing::info!(name, pid = record.instance.pid, "a running program was adopted");
            // It may have other limits now that its group cannot hold.
            let record = launch::read_record(&path).unwrap_or_else(|| record.clone());
            return Ok((adopt_record(&record, spec, &path), handle));
        }
        tracing::info!(
            name,
            pid = record.instance.pid,
            "a program runs with another specification and is stopped first"
        );
    }
    // This also ends what is left of a program that is gone itself, and processes that were never recorded.
    let group = children.find_group(name);
    launch::stop_process_group(there.as_ref(), &group, spec.stop_time, spec.survivor_prefix.as_deref())
        .map_err(io_error(format!("stopping leftover processes of {name}")))?;
    for stale in &spec.stale_files {
        match std::fs::remove_file(stale) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(io_error(format!("removing the stale file {} of {name}", stale.display()))(
                    error,
                ));
            }
            _ => {}
        }
    }
    let handle = start_child(spec, children, &path)?;
    let record = launch::read_record(&path).ok_or_else(|| {
        io_error(format!("reading the process record of {name}"))(std::io::ErrorKind::NotFound.into())
    })?;
    Ok((record, handle))
}

/// The record of a running child that replaces a damaged one; `None` if none is there, or if it is not certain which
/// process is the child.
fn replace_damaged_record(spec: &ChildSpec, children: &ChildContext, path: &Path) -> Option<ChildRecord> {
    let name = &spec.name;
    if std::fs::symlink_metadata(path).is_err() {
        return None;
    }
    let Some(record) = children.recover_record(spec) else {
        tracing::warn!(
            name,
            "the record of a program is damaged, and what still runs of it is stopped first"
        );
        return None;
    };
    tracing::warn!(
        name,
        pid = record.instance.pid,
        "the record of a program is damaged, and the program was found again in its scope"
    );
    if let Err(error) = record.write(path) {
        tracing::warn!(%error, name, "the record of a program that was found again could not be written");
    }
    Some(record)
}

/// The record of an adopted child. One that an earlier release wrote learns what the child was declared as.
fn adopt_record(record: &ChildRecord, spec: &ChildSpec, path: &Path) -> ChildRecord {
    let adopted = ChildRecord { declared_sha256: spec.declared.clone(), ..record.clone() };
    if adopted != *record
        && let Err(error) = adopted.write(path)
    {
        tracing::warn!(%error, name = spec.name, "the record of an adopted program could not be written");
    }
    adopted
}

/// Starts a child in a scope of its own, or in today's layout.
fn start_child(spec: &ChildSpec, children: &ChildContext, record: &Path) -> Result<OwnedFd, ChildError> {
    let order = |group: Cgroup, waits: bool| LaunchOrder {
        spec: spec.clone(),
        group,
        waits,
        record: Some(record.to_owned()),
        log: children.log_path(&spec.name),
    };
    let Some(scopes) = &children.scopes else {
        let CreatedGroup { group, missed_limits } = children.create_group(&spec.name, &spec.limits)?;
        if let Some(missed) = &missed_limits {
            let (name, limits) = (&spec.name, name_limits(missed));
            tracing::warn!(
                name,
                limits,
                "this host has no control groups for these limits, so they do not hold"
            );
        }
        return Ok(launch::launch_child(&children.launcher, &order(group, false))?);
    };
    let place = |pid| {
        let number = children.next_scope_number(&spec.name);
        match scopes.place((&children.instance_name(), &spec.name), &[pid], &spec.limits, number) {
            Ok(PlacedChild { scope, group, missed_limits }) => {
                if let Some(missed) = &missed_limits {
                    tracing::warn!("{}", scope_limits_message(&spec.name, missed));
                }
                Ok(Placement { group, scope: Some(scope), missed_limits })
            }
            Err(error) => {
                tracing::warn!("{}", unprotected_message(&spec.name, &error.why));
                let created = children.create_group(&spec.name, &spec.limits);
                if let Ok(CreatedGroup { missed_limits: Some(missed), .. }) = &created {
                    tracing::warn!("{}", missed_limits_message(&spec.name, missed));
                }
                created
                    .map(|CreatedGroup { group, missed_limits }| Placement {
                        group,
                        scope: None,
                        missed_limits,
                    })
                    .map_err(|error| error.to_string())
            }
        }
    };
    Ok(launch::launch_placed_child(&children.launcher, &order(Cgroup::default(), true), place)?)
}

/// The running process that was started by this name, and a pidfd of it; `None` if there is none.
pub fn find_running(
    name: &str,
    children: &ChildContext,
) -> Result<Option<(ChildRecord, OwnedFd)>, ChildError> {
    let Some(record) = launch::read_record(&children.record_path(name)) else { return Ok(None) };
    let opened = record.instance.open_pidfd().map_err(io_error(format!("looking for {name}")))?;
    Ok(opened.map(|handle| (record, handle)))
}

/// Stops what is left of a child that is no longer desired. Blocks.
pub fn stop_leftovers(name: &str, children: &ChildContext) -> Result<(), ChildError> {
    stop_child(name, children, LEFTOVER_STOP_TIMEOUT)
}

/// Stops whatever runs by this name with SIGTERM, kills it after `patience`, and removes its record. Blocks.
pub fn stop_child(name: &str, children: &ChildContext, patience: Duration) -> Result<(), ChildError> {
    stop_child_except(name, children, patience, None)
}

/// As [`stop_child`], except for programs in its group that survive ([`ChildSpec::survivor_prefix`]). Blocks.
pub fn stop_child_except(
    name: &str,
    children: &ChildContext,
    patience: Duration,
    spared: Option<&str>,
) -> Result<(), ChildError> {
    let lock = children.lock_of(name);
    let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
    let path = children.record_path(name);
    let record = launch::read_record(&path);
    let group = children.find_group(name);
    let doing = || io_error(format!("stopping leftover processes of {name}"));
    launch::stop_process_group(record.as_ref(), &group, patience, spared).map_err(doing())?;
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(doing()(error)),
        _ => {}
    }
    children.remove_group(name);
    Ok(())
}

fn create_private_directory(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Waits for the program's exit or for the cancellation of the runnable, which it passes on to the program.
async fn watch_child(
    record: &ChildRecord,
    handle: &OwnedFd,
    spec: &ChildSpec,
    children: &Arc<ChildContext>,
    scope: &Scope,
) -> Result<ChildExit, RunnableError> {
    let opening = || io_error(format!("watching {}", spec.name));
    loop {
        tokio::select! {
            biased;
            how = wait_for_exit(handle) => return Ok(how.map_err(opening())?),
            cancelled = scope.cancelled() => {
                if !children.shutdown.is_cancelled() {
                    stop_watched_child(record, spec, children).await?;
                    // Reaps the process if it is our child, so that no zombie stays.
                    wait_for_exit(handle).await.map_err(opening())?;
                }
                return Err(cancelled.into());
            }
            () = tokio::time::sleep(LOG_CHECK_INTERVAL) => {
                let path = children.log_path(&spec.name);
                if let Err(error) = disk::run_beside(&path, || log::truncate_if_large(&path)) {
                    tracing::warn!(%error, name = spec.name, "the output log of a program could not be truncated");
                }
            }
        }
    }
}

async fn stop_watched_child(
    record: &ChildRecord,
    spec: &ChildSpec,
    children: &Arc<ChildContext>,
) -> Result<(), RunnableError> {
    let (record, spec, children) = (record.clone(), spec.clone(), children.clone());
    run_blocking(move || {
        let lock = children.lock_of(&spec.name);
        let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        let group = children.find_group(&spec.name);
        let doing = || io_error(format!("ending {}", spec.name));
        launch::stop_process_group(Some(&record), &group, spec.stop_time, spec.survivor_prefix.as_deref())
            .map_err(doing())?;
        match std::fs::remove_file(children.record_path(&spec.name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(doing()(error)),
            _ => {}
        }
        children.remove_group(&spec.name);
        tracing::info!(name = spec.name, pid = record.instance.pid, "a program was stopped");
        Ok(())
    })
    .await
}
