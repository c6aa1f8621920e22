//! What is done with a service on this host: found, started, ended, forgotten. All of it blocks, none of it decides.
//!
//! A service is a program beside the role server ([`crate::roleserver::child`]) of the name [`Id::child`]. Beside the
//! record of its process stands `service.json`, a [`Note`] of what it was started with, written before it starts: by
//! that the next role server knows whether what runs is still what is to run. Its own directory is below
//! `cluster/services/`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::model::declaration::{Run, Sha256};
use crate::model::role::Role;
use crate::roleserver::child::keep::{KeepError, Places, end_but, end_within, find, find_or_start};
use crate::roleserver::child::launch::{LaunchError, Order, Record, launch};
use crate::roleserver::child::log;
use crate::roleserver::child::spec::{Spec, User};
use crate::roleserver::cluster::services::artefacts::Store;
use crate::roleserver::cluster::services::placing::{Placed, PlacingError, link, place};
use crate::roleserver::cluster::services::root::{self, Around, Bundle};
use crate::roleserver::cluster::services::state::Note;
use crate::roleserver::cluster::services::users::{Account, account};
use crate::roleserver::cluster::services::wanted::{Id, Rendered, Wanted};
use crate::roleserver::durable::{self, Durability};

const NOTE: &str = "service.json";
/// What a service that is an artefact has of it in its own directory.
const LINK: &str = ".program";
/// What nobody knows how long it may take to end.
const UNKNOWN_STOP: Duration = Duration::from_secs(10);

/// Whose programs a keeper looks after. There are two keepers beside each other, and neither touches what is the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Those of roles that operators declare.
    Declared,
    /// Those of Kubernetes, whose roles nobody declares.
    Kubernetes,
}

impl Whose {
    /// Whether the program of this name is one of them.
    #[must_use]
    pub fn has(self, child: &str) -> bool {
        let Some((role, _)) = child.split_once('_') else { return false };
        // The name of a declared role is cut where it is long, to more letters than these have.
        let built_in = matches!(role.parse(), Ok(Role::KubernetesController | Role::KubernetesWorker));
        built_in == (self == Self::Kubernetes)
    }
}

/// What is particular to programs that do more on the host than run.
#[derive(Clone, Copy, Debug)]
pub struct Particulars {
    /// What the names begin with of programs that one starts and that outlive it until it is forgotten.
    pub spared: fn(&Id) -> Option<&'static str>,
    /// Makes what one needs outside its directory. Blocks.
    pub prepare: fn(&Id, &Places) -> std::io::Result<()>,
    /// Undoes what one did outside its directory, and what it mounted in it. Nothing of it runs any more. Blocks.
    pub undo: fn(&Id, &Path, &Places) -> std::io::Result<()>,
}

impl Particulars {
    /// Programs that do nothing of the kind.
    pub const NONE: Self = Self { spared: |_| None, prepare: |_, _| Ok(()), undo: |_, _, _| Ok(()) };
}

/// With what it is done.
#[derive(Clone, Debug)]
pub struct Hands {
    /// Whose programs these are.
    pub whose: Whose,
    /// What is particular to them.
    pub particulars: Particulars,
    /// Where programs are kept.
    pub places: Arc<Places>,
    /// Above the directories of services.
    pub directory: PathBuf,
    /// Artefacts, on the same file system.
    pub store: Store,
}

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub enum HandsError {
    /// The program.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// What it is started by.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Its files.
    #[error(transparent)]
    Placing(#[from] PlacingError),
    /// Its user.
    #[error("{0}")]
    Account(String),
    /// What it is started with.
    #[error("{0}")]
    Rendering(String),
    /// Something on the disk.
    #[error("{doing} {path} failed: {source}", path = path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
}

/// A service that there is something of.
#[derive(Debug)]
pub struct Found {
    /// What is written down of it.
    pub note: Note,
    /// Its process, if that runs.
    pub running: Option<(Record, OwnedFd)>,
}

impl Hands {
    /// All services that there is something of on this host.
    pub fn find_all(&self) -> Result<Vec<Found>, HandsError> {
        let directory = &self.places.directory;
        let failed = |source| HandsError::Io { doing: "reading", path: directory.clone(), source };
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if !self.whose.has(&name) {
                continue;
            }
            let Some(note) = self.note(&name) else {
                // Nobody can say which service it was; where that is to run it starts anew.
                tracing::warn!(name, "a service of which nothing is written down is ended");
                end_within(&name, &self.places, UNKNOWN_STOP)?;
                remove_tree(&directory.join(&name))?;
                continue;
            };
            all.push(Found { note, running: find(&name, &self.places)? });
        }
        Ok(all)
    }

    /// What is written down of a program of this name; what its name alone says where that is damaged.
    fn note(&self, name: &str) -> Option<Note> {
        let path = self.places.directory.join(name).join(NOTE);
        let read = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
        read.filter(|note| note.id.child() == name).or_else(|| {
            tracing::warn!(path = %path.display(), "what was written down of a service is lost");
            Id::of_child(name).map(Note::lost)
        })
    }

    /// Writes down what there is to say of a service. What is only about this boot need not outlast it.
    pub fn write_note(&self, note: &Note, durability: Durability) -> Result<(), HandsError> {
        use std::os::unix::fs::DirBuilderExt as _;
        let directory = self.places.directory.join(note.id.child());
        let path = directory.join(NOTE);
        let write = || {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
            durable::replace(&path, &serde_json::to_vec(note)?, durability)
        };
        write().map_err(|source| HandsError::Io { doing: "writing", path: path.clone(), source })
    }

    /// Lets what is newly declared of a service that runs hold for it. It waits for no disk.
    pub fn adjust(&self, note: &Note) -> Result<(), HandsError> {
        self.write_note(note, Durability::UntilPowerLoss)?;
        let places = &self.places;
        places.mounts.group(&places.family(), &note.id.child(), &note.limits).map_err(KeepError::from)?;
        Ok(())
    }

    /// Starts a service of which nothing runs; `before` is what was written down of it, and `note` what is to be.
    pub fn start(
        &self,
        wanted: &Wanted,
        before: Option<&Note>,
        note: &Note,
    ) -> Result<(Record, OwnedFd), HandsError> {
        let (rendered, _) = wanted.rendered.as_ref().map_err(|why| HandsError::Rendering(why.clone()))?;
        let files = before.map(|before| before.files.clone()).unwrap_or_default();
        (self.particulars.prepare)(&wanted.id, &self.places).map_err(|source| HandsError::Io {
            doing: "preparing what is needed beside",
            path: self.directory_of(&wanted.id),
            source,
        })?;
        let spec = match &rendered.run {
            Run::Path(path) => self.spec(wanted, Path::new(path))?,
            // By way of the directory that it runs in: no other way leads there but for us.
            Run::Artefact { .. } => self.spec(wanted, &Path::new("/proc/self/cwd").join(LINK))?,
            Run::RootFilesystem { archive, program } => {
                let spec = self.rooted(wanted, (*archive, program), &files)?;
                self.write_note(note, Durability::Durable)?;
                return Ok(find_or_start(&spec, &self.places)?);
            }
        };
        if let Some(owner) = spec.user {
            place(&spec.directory, owner, &rendered.files, &files)?;
        }
        if let Run::Artefact { digest, .. } = &rendered.run {
            link(&spec.directory, LINK, &self.store.path(*digest))?;
        }
        self.write_note(note, Durability::Durable)?;
        Ok(find_or_start(&spec, &self.places)?)
    }

    fn bundle_of(&self, id: &Id) -> Bundle {
        Bundle(self.places.directory.join(id.child()).join("bundle"))
    }

    /// Puts a root filesystem and all that is to be in it in their places; what runs it is runc.
    fn rooted(
        &self,
        wanted: &Wanted,
        (archive, program): (Sha256, &str),
        before: &BTreeSet<String>,
    ) -> Result<Spec, HandsError> {
        let (rendered, digest) =
            wanted.rendered.as_ref().map_err(|why| HandsError::Rendering(why.clone()))?;
        if !rustix::process::geteuid().is_root() {
            let why = "a root filesystem is run by a role server that runs as root, and this one does not";
            return Err(HandsError::Rendering(why.to_owned()));
        }
        let runc = root::runc().map_err(HandsError::Rendering)?;
        let Account { user, .. } = account(&rendered.user).map_err(HandsError::Account)?;
        let (bundle, name, own) =
            (self.bundle_of(&wanted.id), wanted.id.child(), self.directory_of(&wanted.id));
        let failed = |doing: &'static str| {
            let path = bundle.0.clone();
            move |source| HandsError::Io { doing, path, source }
        };
        bundle.forget(&name).map_err(failed("clearing up"))?;
        bundle.prepare(&self.store.path(archive), archive).map_err(failed("unpacking the archive into"))?;
        // Those below its own directory are its own; those elsewhere are no more than shown to it.
        let (shown, owned): (Vec<Placed>, Vec<Placed>) =
            rendered.files.iter().cloned().partition(|file| file.path.starts_with('/'));
        let mounted: Vec<String> = shown.iter().map(|file| file.path.clone()).collect();
        let below = |file: Placed| Placed { path: file.path.trim_start_matches('/').to_owned(), ..file };
        let shown: Vec<Placed> = shown.into_iter().map(below).collect();
        let (gone, left): (BTreeSet<String>, BTreeSet<String>) =
            before.iter().cloned().partition(|path| path.starts_with('/'));
        let gone = gone.iter().map(|path| path.trim_start_matches('/').to_owned()).collect();
        place(&own, user, &owned, &left)?;
        place(&bundle.files(), user, &shown, &gone)?;
        let group = self.places.mounts.inner(&self.places.family(), &name);
        let around = Around {
            own: &own,
            files: &bundle.files(),
            mounted: &mounted,
            of_the_node: &root::of_the_node(&bundle.root(), &mounted),
            group: &group,
            name: &name,
        };
        bundle
            .configure(&root::config(rendered, program, user, &around))
            .map_err(failed("writing what runc is told in"))?;
        Ok(Spec {
            arguments: bundle.run(&name),
            // What it runs is told apart by this alone: its command line is that of any other.
            environment: BTreeMap::from([("SHEPHERD_SERVICE".to_owned(), digest.clone())]),
            directory: bundle.0.clone(),
            user: None,
            groups: Vec::new(),
            ..self.spec(wanted, &runc)?
        })
    }

    fn spec(&self, wanted: &Wanted, program: &Path) -> Result<Spec, HandsError> {
        let (rendered, _) = wanted.rendered.as_ref().map_err(|why| HandsError::Rendering(why.clone()))?;
        let Rendered { run, arguments, environment, user, .. } = rendered;
        let account = account(user).map_err(HandsError::Account)?;
        let rooted = matches!(run, Run::RootFilesystem { .. });
        Ok(Spec {
            name: wanted.id.child(),
            program: program.to_owned(),
            arguments: arguments.clone(),
            environment: environment.clone(),
            directory: self.directory_of(&wanted.id),
            user: Some(account.user),
            groups: account.groups,
            limits: if rooted { root::limits(wanted.limits) } else { wanted.limits },
            stale: Vec::new(),
            spared: (self.particulars.spared)(&wanted.id).map(str::to_owned),
            stop_time: wanted.stop_time,
        })
    }

    /// Starts a look at a service that runs: as its user, in its directory, within its limits.
    pub fn look(&self, wanted: &Wanted, command: &[String]) -> Result<OwnedFd, HandsError> {
        let missing = || HandsError::Rendering("the check says no program".to_owned());
        let (program, arguments) = command.split_first().ok_or_else(missing)?;
        let spec = Spec { arguments: arguments.to_vec(), ..self.spec(wanted, Path::new(program))? };
        let rooted = matches!(&wanted.rendered, Ok((Rendered { run: Run::RootFilesystem { .. }, .. }, _)));
        let spec = if rooted {
            let user = spec.user.unwrap_or(User { uid: 0, gid: 0 });
            Spec {
                program: root::runc().map_err(HandsError::Rendering)?,
                arguments: self.bundle_of(&wanted.id).exec(&spec.name, user, command),
                environment: BTreeMap::new(),
                user: None,
                groups: Vec::new(),
                ..spec
            }
        } else {
            spec
        };
        let places = &self.places;
        let group =
            places.mounts.group(&places.family(), &spec.name, &spec.limits).map_err(KeepError::from)?;
        let log = places.directory.join(&spec.name).join("check.log");
        Ok(launch(&places.launcher, &Order { spec, group, record: None, log })?)
    }

    /// Last lines of what a look at a service wrote.
    #[must_use]
    pub fn look_said(&self, id: &Id) -> String {
        log::last_lines(&self.places.directory.join(id.child()).join("check.log"), 1)
    }

    /// Last lines of what a service wrote.
    #[must_use]
    pub fn said(&self, id: &Id) -> String {
        log::last_lines(&self.places.log(&id.child()), 3)
    }

    /// Keeps what a service writes from growing for ever.
    pub fn limit_logs(&self, id: &Id) {
        let directory = self.places.directory.join(id.child());
        for path in [self.places.log(&id.child()), directory.join("check.log")] {
            if let Err(error) = log::limit(&path) {
                tracing::warn!(%error, service = %id, "what a service wrote could not be cut short");
            }
        }
    }

    /// Ends all that is left of a service whose main process had its time to end.
    pub fn end(&self, id: &Id) -> Result<(), HandsError> {
        Ok(end_but(&id.child(), &self.places, Duration::ZERO, (self.particulars.spared)(id))?)
    }

    /// Removes all that a service has left, of which nothing runs: its note last, so that what is left is found again.
    pub fn forget(&self, id: &Id) -> Result<(), HandsError> {
        let name = id.child();
        end_within(&name, &self.places, UNKNOWN_STOP)?;
        let own = self.directory_of(id);
        (self.particulars.undo)(id, &own, &self.places).map_err(|source| HandsError::Io {
            doing: "undoing what was done beside",
            path: own.clone(),
            source,
        })?;
        remove_tree(&own)?;
        let directory = self.places.directory.join(&name);
        let bundle = self.bundle_of(id);
        bundle.forget(&name).map_err(|source| HandsError::Io {
            doing: "clearing up",
            path: bundle.0,
            source,
        })?;
        for log in ["output.log", "output.log.1", "check.log", "check.log.1"] {
            match std::fs::remove_file(directory.join(log)) {
                Err(source) if source.kind() != ErrorKind::NotFound => {
                    return Err(HandsError::Io { doing: "removing", path: directory.join(log), source });
                }
                _ => {}
            }
        }
        remove_tree(&directory)
    }

    fn directory_of(&self, id: &Id) -> PathBuf {
        self.directory.join(id.child())
    }
}

fn remove_tree(path: &Path) -> Result<(), HandsError> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(HandsError::Io { doing: "removing", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}
