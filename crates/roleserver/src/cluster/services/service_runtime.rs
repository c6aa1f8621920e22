//! Blocking operations on services of this host: find, start, probe, stop, remove.
//!
//! They decide nothing; the planner does. A service is a child of the role server ([`crate::child`]) with
//! the name [`ServiceId::child_name`]. Its [`RunRecord`] is beside the record of its process
//! ([`record_files`]). The service's own directory is below `cluster/services/`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use model::node_role::NodeRole;
use model::role_declaration::{ProgramSource, Sha256};
use rustix::process::Pid;

use crate::child::confinement::{Confinement, check_requested, own_capabilities};
use crate::child::launch::{ChildRecord, LaunchError, LaunchOrder, launch_process};
use crate::child::lifecycle::{
    ChildContext, ChildError, adopt_or_start, find_running, stop_child, stop_child_except,
};
use crate::child::log;
use crate::child::spec::{ChildSpec, ResourceLimits, User};
use crate::cluster::services::artefact_store::ArtefactStore;
use crate::cluster::services::desired::{DesiredService, RenderedService, ServiceId};
use crate::cluster::services::oci_config::{ContainerOptions, runc_config};
use crate::cluster::services::record_files::{self, RecordError};
use crate::cluster::services::rootfs::{self, OciBundle};
use crate::cluster::services::service_state::RunRecord;
use crate::cluster::services::users::{Account, find_account};
use crate::cluster::services::workdir::{
    WorkdirError, WorkdirFile, former_workdir, link_file, prepare_workdir,
};

/// Hard link to its artefact in the directory of a service.
const PROGRAM_LINK: &str = ".program";
/// Time to stop for a service whose own stop time is not known.
const DEFAULT_STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The owner of a service manager's services. Two service managers run side by side, and neither touches services of
/// the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceOwner {
    /// Services of roles that operators declare.
    Declared,
    /// Components of Kubernetes, whose roles are built in.
    Kubernetes,
}

impl ServiceOwner {
    /// Whether the child of this name is one of the owner's services.
    fn owns(self, child: &str) -> bool {
        let Some((role, _)) = child.split_once('_') else { return false };
        // A long role name is shortened to 20 characters, which is the length of no built-in name.
        let built_in =
            matches!(role.parse(), Ok(NodeRole::KubernetesController | NodeRole::KubernetesWorker));
        built_in == (self == Self::Kubernetes)
    }
}

/// Hooks for services that change the host outside their own directory.
#[derive(Clone, Copy, Debug)]
pub struct ServiceHooks {
    /// Prefix of the program names of processes that a service starts and that survive its stop, until it is removed.
    pub survivor_prefix: fn(&ServiceId) -> Option<&'static str>,
    /// Prepares what a service needs outside its directory. Blocks.
    pub prepare: fn(&ServiceId, &ChildContext) -> std::io::Result<()>,
    /// Undoes what a service did outside its directory, and unmounts what it mounted in it. None of its processes runs.
    /// Blocks.
    pub clean_up: fn(&ServiceId, &Path, &ChildContext) -> std::io::Result<()>,
}

impl ServiceHooks {
    /// Hooks that do nothing.
    pub const NONE: Self =
        Self { survivor_prefix: |_| None, prepare: |_, _| Ok(()), clean_up: |_, _, _| Ok(()) };
}

/// What the operations need from the node.
#[derive(Clone, Debug)]
pub struct ServiceRuntime {
    /// Owner of the services.
    pub owner: ServiceOwner,
    /// Hooks of the services.
    pub hooks: ServiceHooks,
    /// Where children of the role server are recorded and started.
    pub children: Arc<ChildContext>,
    /// Parent of the directories of services.
    pub directory: PathBuf,
    /// Store of artefacts, on the same file system because services get hard links.
    pub store: ArtefactStore,
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The child could not be started or stopped.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The launcher could not start it.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The service's files could not be written.
    #[error(transparent)]
    Workdir(#[from] WorkdirError),
    /// The files of its record could not be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The user does not exist on this host.
    #[error("{0}")]
    Account(String),
    /// It cannot be rendered or run on this host.
    #[error("{0}")]
    Rendering(String),
    /// A file operation failed.
    #[error("{operation} {path} failed: {source}", path = path.display())]
    Io {
        /// What was attempted, such as "reading".
        operation: &'static str,
        /// File or directory that it was attempted on.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
}

/// A service that was found on this host.
#[derive(Debug)]
pub struct FoundService {
    /// Its run record, or an empty one if it is lost.
    pub record: RunRecord,
    /// Its process, if it runs.
    pub running: Option<(ChildRecord, OwnedFd)>,
}

impl ServiceRuntime {
    /// Finds all services of the owner on this host.
    pub fn find_services(&self) -> Result<Vec<FoundService>, RuntimeError> {
        let directory = &self.children.directory;
        let failed = |source| RuntimeError::Io { operation: "reading", path: directory.clone(), source };
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if !self.owner.owns(&name) {
                continue;
            }
            let Some(note) = record_files::read_record(directory, &name) else {
                // The service is unknown, so its process is stopped; if it is desired, it is started again.
                tracing::warn!(name, "a service without a run record is stopped");
                stop_child(&name, &self.children, DEFAULT_STOP_TIMEOUT)?;
                remove_tree(&directory.join(&name))?;
                continue;
            };
            all.push(FoundService { record: note, running: find_running(&name, &self.children)? });
        }
        Ok(all)
    }

    /// Writes a change of the run record that only matters in this boot. It does not wait for the disk.
    pub fn write_record(&self, note: &RunRecord) -> Result<(), RuntimeError> {
        Ok(record_files::write_record(&self.children.directory, note)?)
    }

    /// Applies the limits of its control group and the changed record to a running service, in this order: a record must
    /// not name limits that do not hold. It does not wait for the disk, but for systemd.
    pub fn apply_record(&self, note: &RunRecord, limits: &ResourceLimits) -> Result<(), RuntimeError> {
        let name = note.id.child_name();
        let lock = self.children.lock_of(&name);
        let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.children.apply_limits(&name, limits).map_err(ChildError::from)?;
        self.write_record(note)
    }

    /// Sets the limits of a running service again if its control group has lost one of them, and returns those that it had
    /// lost ([`ChildContext::restore_limits`]). Waits for systemd.
    pub fn restore_limits(
        &self,
        id: &ServiceId,
        limits: &ResourceLimits,
    ) -> Result<Option<ResourceLimits>, RuntimeError> {
        let name = id.child_name();
        let lock = self.children.lock_of(&name);
        let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(self.children.restore_limits(&name, limits).map_err(ChildError::from)?)
    }

    /// Starts a service that does not run. `before` is its previous run record, and `note` the new one.
    pub fn start_service(
        &self,
        wanted: &DesiredService,
        before: Option<&RunRecord>,
        note: &RunRecord,
    ) -> Result<(ChildRecord, OwnedFd), RuntimeError> {
        let (rendered, _) = wanted.rendered.as_ref().map_err(|why| RuntimeError::Rendering(why.clone()))?;
        let files = before.map(|before| before.files.clone()).unwrap_or_default();
        (self.hooks.prepare)(&wanted.id, &self.children).map_err(|source| RuntimeError::Io {
            operation: "preparing the host for",
            path: self.service_directory(&wanted.id),
            source,
        })?;
        let spec = match &rendered.run {
            ProgramSource::Path(path) => self.child_spec(wanted, Path::new(path))?,
            // Through the working directory of the process: the service's user cannot reach the file by another path.
            ProgramSource::Artefact { .. } => {
                self.child_spec(wanted, &Path::new("/proc/self/cwd").join(PROGRAM_LINK))?
            }
            ProgramSource::RootFilesystem { archive, program } => {
                let spec = self.prepare_rootfs(wanted, (*archive, program), &files)?;
                record_files::record_start(&self.children.directory, note)?;
                return Ok(adopt_or_start(&spec, &self.children)?);
            }
        };
        if let Some(owner) = spec.user {
            prepare_workdir(&spec.directory, owner, &rendered.files, &files)?;
        }
        if let ProgramSource::Artefact { digest, .. } = &rendered.run {
            link_file(&spec.directory, PROGRAM_LINK, &self.store.path(*digest))?;
        }
        record_files::record_start(&self.children.directory, note)?;
        Ok(adopt_or_start(&spec, &self.children)?)
    }

    fn oci_bundle(&self, id: &ServiceId) -> OciBundle {
        OciBundle(self.children.directory.join(id.child_name()).join("bundle"))
    }

    /// Prepares a root filesystem and the files in it; the program of the child is runc.
    fn prepare_rootfs(
        &self,
        wanted: &DesiredService,
        (archive, program): (Sha256, &str),
        before: &BTreeSet<String>,
    ) -> Result<ChildSpec, RuntimeError> {
        let (rendered, digest) =
            wanted.rendered.as_ref().map_err(|why| RuntimeError::Rendering(why.clone()))?;
        if !rustix::process::geteuid().is_root() {
            let why = "a service with a root filesystem needs a role server that runs as root, and this one does not";
            return Err(RuntimeError::Rendering(why.to_owned()));
        }
        // The error of runc would not name them.
        let has = own_capabilities().map_err(|error| {
            RuntimeError::Rendering(format!("reading the capabilities of this role server failed: {error}"))
        })?;
        check_requested(&rendered.privileges, has).map_err(RuntimeError::Rendering)?;
        let runc = rootfs::find_runc().map_err(RuntimeError::Rendering)?;
        let Account { user, .. } = find_account(&rendered.user).map_err(RuntimeError::Account)?;
        let (bundle, name, own) =
            (self.oci_bundle(&wanted.id), wanted.id.child_name(), self.service_directory(&wanted.id));
        let failed = |doing: &'static str| {
            let path = bundle.0.clone();
            move |source| RuntimeError::Io { operation: doing, path, source }
        };
        bundle.delete_container(&name).map_err(failed("clearing up"))?;
        bundle
            .unpack_rootfs(&self.store.path(archive), archive)
            .map_err(failed("unpacking the archive into"))?;
        // Files with relative paths are the service's own; those with absolute paths are mounted read-only.
        let (shown, owned): (Vec<WorkdirFile>, Vec<WorkdirFile>) =
            rendered.files.iter().cloned().partition(|file| file.path.starts_with('/'));
        let mounted: Vec<String> = shown.iter().map(|file| file.path.clone()).collect();
        let below =
            |file: WorkdirFile| WorkdirFile { path: file.path.trim_start_matches('/').to_owned(), ..file };
        let shown: Vec<WorkdirFile> = shown.into_iter().map(below).collect();
        let (gone, left): (BTreeSet<String>, BTreeSet<String>) =
            before.iter().cloned().partition(|path| path.starts_with('/'));
        let gone = gone.iter().map(|path| path.trim_start_matches('/').to_owned()).collect();
        prepare_workdir(&own, user, &owned, &left)?;
        prepare_workdir(&bundle.files_path(), user, &shown, &gone)?;
        let group = self.children.nested_cgroup(&name);
        let container = ContainerOptions {
            workdir: &own,
            files: &bundle.files_path(),
            mounted_files: &mounted,
            host_files: &rootfs::find_host_files(&bundle.rootfs_path(), &mounted),
            cgroup: &group,
            name: &name,
        };
        bundle
            .write_config(&runc_config(rendered, program, user, &container))
            .map_err(failed("writing the configuration of runc"))?;
        Ok(ChildSpec {
            arguments: bundle.run_arguments(&name),
            // Only this distinguishes what it runs: the command line of runc is always the same.
            environment: BTreeMap::from([("SHEPHERD_SERVICE".to_owned(), digest.clone())]),
            directory: bundle.0.clone(),
            user: None,
            groups: Vec::new(),
            ..self.child_spec(wanted, &runc)?
        })
    }

    fn child_spec(&self, wanted: &DesiredService, program: &Path) -> Result<ChildSpec, RuntimeError> {
        let (rendered, _) = wanted.rendered.as_ref().map_err(|why| RuntimeError::Rendering(why.clone()))?;
        let RenderedService { run, arguments, environment, user, privileges, .. } = rendered;
        let account = find_account(user).map_err(RuntimeError::Account)?;
        let rooted = matches!(run, ProgramSource::RootFilesystem { .. });
        Ok(ChildSpec {
            name: wanted.id.child_name(),
            program: program.to_owned(),
            arguments: arguments.clone(),
            environment: environment.clone(),
            directory: self.service_directory(&wanted.id),
            user: Some(account.user),
            groups: account.groups,
            // Components of Kubernetes administer the host. In a root filesystem, runc confines the service.
            confinement: (self.owner == ServiceOwner::Declared && !rooted)
                .then(|| Confinement(privileges.clone())),
            limits: wanted.group_limits(),
            stale_files: Vec::new(),
            survivor_prefix: (self.hooks.survivor_prefix)(&wanted.id).map(str::to_owned),
            stop_time: wanted.stop_time,
            declared: None,
        })
    }

    /// Starts a probe command of a running service: as its user, in its directory, within its limits.
    /// The pid is that of the probe's process group, and its own until the probe has been waited for.
    pub fn start_probe(
        &self,
        wanted: &DesiredService,
        command: &[String],
    ) -> Result<(OwnedFd, Pid), RuntimeError> {
        let missing = || RuntimeError::Rendering("the health check has no program".to_owned());
        let (program, arguments) = command.split_first().ok_or_else(missing)?;
        let spec =
            ChildSpec { arguments: arguments.to_vec(), ..self.child_spec(wanted, Path::new(program))? };
        let rooted = matches!(
            &wanted.rendered,
            Ok((RenderedService { run: ProgramSource::RootFilesystem { .. }, .. }, _))
        );
        let spec = if rooted {
            let user = spec.user.unwrap_or(User { uid: 0, gid: 0 });
            ChildSpec {
                program: rootfs::find_runc().map_err(RuntimeError::Rendering)?,
                arguments: self.oci_bundle(&wanted.id).exec_arguments(&spec.name, user, command),
                environment: BTreeMap::new(),
                user: None,
                groups: Vec::new(),
                ..spec
            }
        } else {
            spec
        };
        let children = &self.children;
        let group = children.running_group(&spec.name, &spec.limits).map_err(ChildError::from)?;
        let log = children.directory.join(&spec.name).join("check.log");
        Ok(launch_process(&children.launcher, &LaunchOrder { spec, group, waits: false, record: None, log })?)
    }

    /// Last line of a probe command's output.
    #[must_use]
    pub fn probe_output(&self, id: &ServiceId) -> String {
        log::last_lines(&self.children.directory.join(id.child_name()).join("check.log"), 1)
    }

    /// Last lines of a service's output.
    #[must_use]
    pub fn output_tail(&self, id: &ServiceId) -> String {
        log::last_lines(&self.children.log_path(&id.child_name()), 3)
    }

    /// Truncates the logs of a service when they have grown too large.
    pub fn truncate_logs(&self, id: &ServiceId) {
        let directory = self.children.directory.join(id.child_name());
        for path in [self.children.log_path(&id.child_name()), directory.join("check.log")] {
            if let Err(error) = log::truncate_if_large(&path) {
                tracing::warn!(%error, service = %id, "what a service wrote could not be cut short");
            }
        }
    }

    /// Kills the remaining processes of a service whose main process had its time to exit.
    pub fn stop_remaining(&self, id: &ServiceId) -> Result<(), RuntimeError> {
        Ok(stop_child_except(
            &id.child_name(),
            &self.children,
            Duration::ZERO,
            (self.hooks.survivor_prefix)(id),
        )?)
    }

    /// Removes everything that a stopped service left: its run record last, so that leftovers are found again.
    pub fn remove_service(&self, id: &ServiceId) -> Result<(), RuntimeError> {
        let name = id.child_name();
        stop_child(&name, &self.children, DEFAULT_STOP_TIMEOUT)?;
        let own = self.service_directory(id);
        (self.hooks.clean_up)(id, &own, &self.children).map_err(|source| RuntimeError::Io {
            operation: "cleaning up the host after",
            path: own.clone(),
            source,
        })?;
        remove_tree(&own)?;
        remove_tree(&former_workdir(&own))?;
        let directory = self.children.directory.join(&name);
        let bundle = self.oci_bundle(id);
        bundle.delete_container(&name).map_err(|source| RuntimeError::Io {
            operation: "clearing up",
            path: bundle.0,
            source,
        })?;
        for log in ["output.log", "output.log.1", "check.log", "check.log.1"] {
            match std::fs::remove_file(directory.join(log)) {
                Err(source) if source.kind() != ErrorKind::NotFound => {
                    return Err(RuntimeError::Io {
                        operation: "removing",
                        path: directory.join(log),
                        source,
                    });
                }
                _ => {}
            }
        }
        remove_tree(&directory)
    }

    fn service_directory(&self, id: &ServiceId) -> PathBuf {
        self.directory.join(id.child_name())
    }
}

fn remove_tree(path: &Path) -> Result<(), RuntimeError> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(RuntimeError::Io { operation: "removing", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::child::cgroup::CgroupMounts;

    fn runtime_in(root: &Path, mounts: CgroupMounts) -> ServiceRuntime {
        let children = ChildContext {
            directory: root.join("children"),
            mounts,
            launcher: PathBuf::from("/proc/self/exe"),
            shutdown: CancellationToken::new(),
            scopes: None,
        };
        ServiceRuntime {
            owner: ServiceOwner::Declared,
            hooks: ServiceHooks::NONE,
            children: Arc::new(children),
            directory: root.join("services"),
            store: ArtefactStore(root.join("artefacts")),
        }
    }

    /// The hierarchy is made of plain files, and its groups have no controller for processors.
    #[test]
    fn record_names_no_limit_that_cannot_be_applied() {
        let root = tempfile::tempdir().unwrap();
        let mountinfo =
            format!("30 28 0:26 / {} rw - cgroup2 cgroup2 rw\n", root.path().join("tree").display());
        let mounts = CgroupMounts::at_path(&mountinfo, "/unit");
        let runtime = runtime_in(root.path(), mounts);
        let id = ServiceId { role: "web".to_owned(), service: "server".to_owned() };
        let group =
            root.path().join("tree/unit").join(runtime.children.instance_name()).join(id.child_name());
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(group.join("cgroup.controllers"), "memory pids\n").unwrap();
        let name = id.child_name();
        let note = |revision, limits| RunRecord { revision, limits, ..RunRecord::missing(id.clone()) };
        let memory = ResourceLimits { memory_bytes: Some(1 << 20), ..ResourceLimits::default() };
        runtime.apply_record(&note(1, memory), &memory).unwrap();
        let read = || record_files::read_record(&runtime.children.directory, &name);
        assert_eq!(read(), Some(note(1, memory)));
        let processors = ResourceLimits { cpu_millis: Some(500), ..memory };
        let error = runtime.apply_record(&note(2, processors), &processors).unwrap_err().to_string();
        assert!(error.contains("no controller for the limit of processors"), "{error}");
        assert_eq!(read(), Some(note(1, memory)), "it is still the former one");
    }
}
