//! Artefacts that services are made of, each under its digest in `cluster/artefacts/`.
//!
//! What is there under its digest is whole: it was verified before it got that name, and is verified again in each life of
//! the role server before anything is started of it. What is being fetched stands beside it as `….part`, and goes on
//! from there. What no service is made of any more is removed; a service that runs has a link of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::model::declaration::{Run, Sha256};
use crate::roleserver::cluster::services::fetch::fetch;
use crate::roleserver::cluster::services::wanted::{Id, Wanted};
use crate::roleserver::running::program_digest;
use crate::roleserver::shepherds::{FetchError, Shepherds};
use crate::supervisor::backoff::Backoff;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::value::Value;

const PART: &str = ".part";

/// How artefacts are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Artefacts {
    /// Those that are here, whole.
    pub whole: BTreeSet<Sha256>,
    /// What is to be said of others.
    pub said: BTreeMap<Sha256, String>,
}

/// Where they are.
#[derive(Clone, Debug)]
pub struct Store(pub PathBuf);

impl Store {
    /// Where one is, or is to be.
    #[must_use]
    pub fn path(&self, artefact: Sha256) -> PathBuf {
        self.0.join(hex::encode(artefact.0))
    }

    /// Where one is while it is fetched.
    #[must_use]
    pub fn part(&self, artefact: Sha256) -> PathBuf {
        self.0.join(format!("{}{PART}", hex::encode(artefact.0)))
    }

    /// Removes what is none of `needed`. Blocks.
    pub fn keep_only(&self, needed: &BTreeSet<Sha256>) -> std::io::Result<()> {
        let names: BTreeSet<String> = needed.iter().map(|artefact| hex::encode(artefact.0)).collect();
        let entries = match std::fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !names.contains(name.strip_suffix(PART).unwrap_or(&name)) {
                tracing::info!(name, "an artefact that nothing is made of any more is removed");
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Whether it is here, whole; what is not whole is removed. Blocks.
    pub fn is_whole(&self, artefact: Sha256) -> std::io::Result<bool> {
        let path = self.path(artefact);
        match program_digest(&path) {
            Ok(digest) if digest == hex::encode(artefact.0) => {
                // Also one that somebody else has put there.
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o555))?;
                Ok(true)
            }
            Ok(_) => {
                tracing::error!(path = %path.display(), "an artefact is not what its name says, and is removed");
                std::fs::remove_file(&path)?;
                Ok(false)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives what was fetched its name, if it is what was wanted; otherwise it is removed. Blocks.
    pub fn take(&self, artefact: Sha256) -> std::io::Result<bool> {
        let part = self.part(artefact);
        if program_digest(&part)? != hex::encode(artefact.0) {
            std::fs::remove_file(&part)?;
            return Ok(false);
        }
        std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o555))?;
        std::fs::rename(&part, self.path(artefact))?;
        std::fs::File::open(&self.0)?.sync_all()?;
        Ok(true)
    }

    /// Fetches one, from its URL if it has one, and from a shepherd if that fails or it has none. The error is a sentence.
    pub async fn get(&self, artefact: Sha256, url: &str, shepherds: &Shepherds) -> Result<(), String> {
        let mut said = Vec::new();
        if !url.is_empty() {
            match fetch(url, &self.part(artefact)).await {
                Ok(_) if self.taken(artefact).await? => return Ok(()),
                Ok(_) => said.push(format!(
                    "what {url} answers is another file: its digest is not that of the artefact"
                )),
                Err(error) => said.push(error),
            }
        }
        // What came from a URL until it broke off may be no part of it; then all of it comes from a shepherd.
        for _ in 0..2 {
            match shepherds.fetch(artefact, &self.part(artefact)).await {
                Ok(_) if self.taken(artefact).await? => return Ok(()),
                Ok(_) => {}
                Err(FetchError::Absent) if said.is_empty() => return Err(nowhere(&self.path(artefact))),
                // Only the URL was ever said to have it.
                Err(FetchError::Absent) => return Err(said.join("; ")),
                Err(FetchError::Failed(error)) => {
                    said.push(if said.is_empty() {
                        format!("its declaration says no URL to fetch it from, and {error}")
                    } else {
                        error
                    });
                    return Err(said.join("; "));
                }
            }
        }
        said.push("what a shepherd sends is another file: its digest is not that of the artefact".to_owned());
        Err(said.join("; "))
    }

    async fn taken(&self, artefact: Sha256) -> Result<bool, String> {
        let store = self.clone();
        let taken = blocking(move || store.take(artefact)).await;
        taken.map_err(|error| format!("keeping it failed: {error}"))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}

/// What all of these are made of, and where each is to be had; empty where nobody says.
#[must_use]
pub fn needed(wanted: &BTreeMap<Id, Wanted>) -> BTreeMap<Sha256, String> {
    let runs = wanted.values().filter_map(|service| Some(&service.rendered.as_ref().ok()?.0.run));
    let mut needed = BTreeMap::new();
    for run in runs {
        let (digest, url) = match run {
            Run::Path(_) => continue,
            Run::Artefact { digest, url } => (digest, url.as_str()),
            // Any shepherd has it, or somebody put it there.
            Run::RootFilesystem { archive, .. } => (archive, ""),
        };
        let known: &mut String = needed.entry(*digest).or_default();
        if known.is_empty() {
            url.clone_into(known);
        }
    }
    needed
}

/// The runnable, which has everything here that services are made of; `output` says how it is.
#[must_use]
pub fn artefacts(
    store: Store,
    shepherds: Shepherds,
    wanted: Value<BTreeMap<Id, Wanted>>,
    output: Value<Artefacts>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (store, output, shepherds) = (store.clone(), output.clone(), shepherds.clone());
        let mut watcher = wanted.watch();
        async move {
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut wanted = scope.until_cancelled(watcher.next()).await?;
            let mut now = Artefacts::default();
            let mut failures = 0;
            loop {
                let needed = needed(&wanted);
                let names: BTreeSet<Sha256> = needed.keys().copied().collect();
                blocking({
                    let (store, names) = (store.clone(), names.clone());
                    move || store.keep_only(&names)
                })
                .await?;
                now.whole.retain(|artefact| names.contains(artefact));
                now.said.retain(|artefact, _| names.contains(artefact) && !now.whole.contains(artefact));
                for artefact in
                    names.iter().filter(|artefact| !now.whole.contains(artefact)).copied().collect::<Vec<_>>()
                {
                    let here = store.clone();
                    if blocking(move || here.is_whole(artefact)).await? {
                        now.whole.insert(artefact);
                    }
                }
                output.set(now.clone());
                let missing: Vec<Sha256> = names.difference(&now.whole).copied().collect();
                let getting = async {
                    let mut failed = false;
                    for artefact in &missing {
                        make(&store.0).map_err(|error| error.to_string())?;
                        match store.get(*artefact, &needed[artefact], &shepherds).await {
                            Ok(()) => {
                                now.whole.insert(*artefact);
                                now.said.remove(artefact);
                            }
                            Err(why) => {
                                failed = true;
                                tracing::warn!(why, "an artefact is not here yet");
                                now.said.insert(*artefact, why);
                            }
                        }
                        output.set(now.clone());
                    }
                    Ok::<_, String>(failed)
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = watcher.next() => {
                        (wanted, failures) = (next, 0);
                        continue;
                    }
                    failed = getting => failures = if failed.map_err(Stop::because)? { failures + 1 } else { 0 },
                }
                let pause = async {
                    if failures == 0 {
                        return std::future::pending().await;
                    }
                    tokio::time::sleep(Backoff::USUAL.after(failures, rand::random())).await;
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = watcher.next() => (wanted, failures) = (next, 0),
                    () = pause => {}
                }
            }
        }
    })
}

fn nowhere(path: &Path) -> String {
    format!(
        "its declaration says no URL to fetch it from, and no shepherd has it; add it with shepherdctl artefacts add, say \
         a URL, or put it at {}",
        path.display()
    )
}

fn make(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::services::fetch::tests::serving;

    fn sha256(bytes: &[u8]) -> Sha256 {
        let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
        Sha256(digest.as_ref().try_into().unwrap())
    }

    #[tokio::test]
    async fn artefact_has_its_name_only_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store(directory.path().join("artefacts"));
        make(&store.0).unwrap();
        let content = b"#!/bin/sh\necho one\n".to_vec();
        let (wanted, other) = (sha256(&content), sha256(b"other"));
        let nobody = Shepherds::default();
        let (url, _) = serving(content.clone(), 10).await;
        assert!(store.get(wanted, &url, &nobody).await.is_err(), "it breaks off");
        assert!(!store.is_whole(wanted).unwrap() && !store.path(wanted).exists());
        store.get(wanted, &url, &nobody).await.unwrap();
        assert!(store.is_whole(wanted).unwrap());
        assert_eq!(std::fs::read(store.path(wanted)).unwrap(), content);
        let mode = std::fs::metadata(store.path(wanted)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o555);

        let (url, _) = serving(content, 1000).await;
        let error = store.get(other, &url, &nobody).await.unwrap_err();
        assert!(error.contains("is another file"), "{error}");
        assert_eq!(std::fs::read_dir(&store.0).unwrap().count(), 1, "nothing of it stays");

        std::fs::remove_file(store.path(wanted)).unwrap();
        std::fs::write(store.path(wanted), "damaged").unwrap();
        assert!(!store.is_whole(wanted).unwrap() && !store.path(wanted).exists());
    }

    #[test]
    fn only_what_is_needed_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store(directory.path().join("artefacts"));
        store.keep_only(&BTreeSet::new()).unwrap();
        make(&store.0).unwrap();
        let (one, other) = (Sha256([1; 32]), Sha256([2; 32]));
        for artefact in [one, other] {
            std::fs::write(store.path(artefact), "x").unwrap();
            std::fs::write(store.part(artefact), "x").unwrap();
        }
        store.keep_only(&BTreeSet::from([one])).unwrap();
        assert!(store.path(one).exists() && store.part(one).exists());
        assert!(!store.path(other).exists() && !store.part(other).exists());
    }
}
