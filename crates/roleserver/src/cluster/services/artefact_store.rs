//! A content-addressed store of artefacts, and the runnable that fetches them.
//!
//! The artefacts of services are in `cluster/artefacts/`. A file under its digest is complete: it was verified before
//! it got that name, and is verified again in each life of the role server before anything is started from it. A
//! download in progress is beside it as `….part`, and can be resumed. Artefacts that no service uses any more are
//! removed; a running service has its own hard link.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use backoff::ExponentialBackoff;
use model::role_declaration::{ProgramSource, Sha256};
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;

use crate::cluster::services::desired::{DesiredService, ServiceId};
use crate::http_fetch::fetch_file;
use crate::process::program_digest;
use crate::server_pool::{FetchError, ServerPool};

const PART_SUFFIX: &str = ".part";
const SIGNATURE_SUFFIX: &str = ".minisig";

/// Which artefacts are available, and why others are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArtefactStates {
    /// Artefacts that are here and verified.
    pub available: BTreeSet<Sha256>,
    /// Why others are not available, as a sentence each.
    pub messages: BTreeMap<Sha256, String>,
}

/// The directory that artefacts are stored in.
#[derive(Clone, Debug)]
pub struct ArtefactStore(pub PathBuf);

impl ArtefactStore {
    /// Path of an artefact, whether it exists or not.
    #[must_use]
    pub fn path(&self, artefact: Sha256) -> PathBuf {
        self.0.join(hex::encode(artefact.0))
    }

    /// Path of an artefact while it is fetched.
    #[must_use]
    pub fn part_path(&self, artefact: Sha256) -> PathBuf {
        self.0.join(format!("{}{PART_SUFFIX}", hex::encode(artefact.0)))
    }

    /// Path of the signature of an artefact.
    #[must_use]
    pub fn signature_path(&self, artefact: Sha256) -> PathBuf {
        self.0.join(format!("{}{SIGNATURE_SUFFIX}", hex::encode(artefact.0)))
    }

    /// Removes everything that is not in `needed`. Blocks.
    pub fn remove_unneeded(&self, needed: &BTreeSet<Sha256>) -> std::io::Result<()> {
        let names: BTreeSet<String> = needed.iter().map(|artefact| hex::encode(artefact.0)).collect();
        let entries = match std::fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let artefact = name.strip_suffix(PART_SUFFIX).or_else(|| name.strip_suffix(SIGNATURE_SUFFIX));
            if !names.contains(artefact.unwrap_or(&name)) {
                tracing::info!(name, "an unneeded artefact is removed");
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Whether an artefact is here and complete; a file with another digest is removed. Blocks.
    pub fn verify_artefact(&self, artefact: Sha256) -> std::io::Result<bool> {
        let path = self.path(artefact);
        match program_digest(&path) {
            Ok(digest) if digest == hex::encode(artefact.0) => {
                // This also applies to a file that an operator put there.
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

    /// Renames a download to its digest, or removes it if it has another digest. Returns whether it was right. Blocks.
    pub fn commit_part(&self, artefact: Sha256) -> std::io::Result<bool> {
        let part = self.part_path(artefact);
        if program_digest(&part)? != hex::encode(artefact.0) {
            std::fs::remove_file(&part)?;
            return Ok(false);
        }
        std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o555))?;
        std::fs::rename(&part, self.path(artefact))?;
        std::fs::File::open(&self.0)?.sync_all()?;
        Ok(true)
    }

    /// Fetches an artefact from its URL, or from a shepherd if it has no URL or that failed. The error is a sentence.
    pub async fn fetch_artefact(
        &self,
        artefact: Sha256,
        url: &str,
        server_pool: &ServerPool,
    ) -> Result<(), String> {
        let mut messages = Vec::new();
        if !url.is_empty() {
            match fetch_file(url, &self.part_path(artefact)).await {
                Ok(_) if self.commit_fetched(artefact).await? => return Ok(()),
                Ok(_) => messages
                    .push(format!("{url} serves another file: its digest is not that of the artefact")),
                Err(error) => messages.push(error),
            }
        }
        // A stored part may come from another file behind the URL; then the second attempt fetches all of it from a
        // shepherd.
        for _ in 0..2 {
            match server_pool.fetch_artefact(artefact, &self.part_path(artefact)).await {
                Ok(_) if self.commit_fetched(artefact).await? => return Ok(()),
                Ok(_) => {}
                Err(FetchError::Absent) if messages.is_empty() => {
                    return Err(not_found_message(&self.path(artefact)));
                }
                // The artefact was expected at the URL, so report why that failed.
                Err(FetchError::Absent) => return Err(messages.join("; ")),
                Err(FetchError::Failed(error)) => {
                    messages.push(if messages.is_empty() {
                        format!("its declaration has no URL, and {error}")
                    } else {
                        error
                    });
                    return Err(messages.join("; "));
                }
            }
        }
        messages.push("a shepherd sent another file: its digest is not that of the artefact".to_owned());
        Err(messages.join("; "))
    }

    async fn commit_fetched(&self, artefact: Sha256) -> Result<bool, String> {
        let store = self.clone();
        let taken = run_blocking(move || store.commit_part(artefact)).await;
        taken.map_err(|error| format!("storing it failed: {error}"))
    }
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}

/// All artefacts that services need, and the URL of each; empty if it has none.
fn required_artefacts(wanted: &BTreeMap<ServiceId, DesiredService>) -> BTreeMap<Sha256, String> {
    let runs = wanted.values().filter_map(|service| Some(&service.rendered.as_ref().ok()?.0.run));
    let mut needed = BTreeMap::new();
    for run in runs {
        let (digest, url) = match run {
            ProgramSource::Path(_) => continue,
            ProgramSource::Artefact { digest, url } => (digest, url.as_str()),
            // Any shepherd has the archive, or an operator put it there.
            ProgramSource::RootFilesystem { archive, .. } => (archive, ""),
        };
        let known: &mut String = needed.entry(*digest).or_default();
        if known.is_empty() {
            url.clone_into(known);
        }
    }
    needed
}

/// Makes the runnable that fetches all artefacts that services need, and publishes their states in `output`.
#[must_use]
pub fn fetch_artefacts(
    store: ArtefactStore,
    server_pool: ServerPool,
    wanted: WatchCell<BTreeMap<ServiceId, DesiredService>>,
    output: WatchCell<ArtefactStates>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (store, output, server_pool) = (store.clone(), output.clone(), server_pool.clone());
        let mut watcher = wanted.watch();
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut wanted = scope.until_cancelled(watcher.next()).await?;
            let mut now = ArtefactStates::default();
            let mut failures = 0;
            loop {
                let needed = required_artefacts(&wanted);
                let names: BTreeSet<Sha256> = needed.keys().copied().collect();
                run_blocking({
                    let (store, names) = (store.clone(), names.clone());
                    move || store.remove_unneeded(&names)
                })
                .await?;
                now.available.retain(|artefact| names.contains(artefact));
                now.messages
                    .retain(|artefact, _| names.contains(artefact) && !now.available.contains(artefact));
                for artefact in names
                    .iter()
                    .filter(|artefact| !now.available.contains(artefact))
                    .copied()
                    .collect::<Vec<_>>()
                {
                    let here = store.clone();
                    if run_blocking(move || here.verify_artefact(artefact)).await? {
                        now.available.insert(artefact);
                    }
                }
                output.set(now.clone());
                let missing: Vec<Sha256> = names.difference(&now.available).copied().collect();
                let getting = async {
                    let mut failed = false;
                    for artefact in &missing {
                        create_directory(&store.0).map_err(|error| error.to_string())?;
                        match store.fetch_artefact(*artefact, &needed[artefact], &server_pool).await {
                            Ok(()) => {
                                now.available.insert(*artefact);
                                now.messages.remove(artefact);
                            }
                            Err(why) => {
                                failed = true;
                                tracing::warn!(reason = why, "an artefact could not be fetched yet");
                                now.messages.insert(*artefact, why);
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
                    failed = getting => failures = if failed.map_err(RunnableError::msg)? { failures + 1 } else { 0 },
                }
                let pause = async {
                    if failures == 0 {
                        return std::future::pending().await;
                    }
                    tokio::time::sleep(ExponentialBackoff::DEFAULT.delay(failures, rand::random())).await;
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

fn not_found_message(path: &Path) -> String {
    format!(
        "its declaration has no URL, and no shepherd has it; add it with shepherdctl artefacts add, declare \
         a URL, or put it at {}",
        path.display()
    )
}

fn create_directory(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http_fetch::tests::serve_file;

    fn sha256(bytes: &[u8]) -> Sha256 {
        let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
        Sha256(digest.as_ref().try_into().unwrap())
    }

    #[tokio::test]
    async fn artefact_gets_its_name_only_when_it_is_complete() {
        let directory = tempfile::tempdir().unwrap();
        let store = ArtefactStore(directory.path().join("artefacts"));
        create_directory(&store.0).unwrap();
        let content = b"#!/bin/sh\necho one\n".to_vec();
        let (wanted, other) = (sha256(&content), sha256(b"other"));
        let nobody = ServerPool::default();
        let (url, _) = serve_file(content.clone(), 10).await;
        assert!(store.fetch_artefact(wanted, &url, &nobody).await.is_err(), "it breaks off");
        assert!(!store.verify_artefact(wanted).unwrap() && !store.path(wanted).exists());
        store.fetch_artefact(wanted, &url, &nobody).await.unwrap();
        assert!(store.verify_artefact(wanted).unwrap());
        assert_eq!(std::fs::read(store.path(wanted)).unwrap(), content);
        let mode = std::fs::metadata(store.path(wanted)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o555);

        let (url, _) = serve_file(content, 1000).await;
        let error = store.fetch_artefact(other, &url, &nobody).await.unwrap_err();
        assert!(error.contains("serves another file"), "{error}");
        assert_eq!(std::fs::read_dir(&store.0).unwrap().count(), 1, "nothing of it stays");

        std::fs::remove_file(store.path(wanted)).unwrap();
        std::fs::write(store.path(wanted), "damaged").unwrap();
        assert!(!store.verify_artefact(wanted).unwrap() && !store.path(wanted).exists());
    }

    #[test]
    fn unneeded_artefacts_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let store = ArtefactStore(directory.path().join("artefacts"));
        store.remove_unneeded(&BTreeSet::new()).unwrap();
        create_directory(&store.0).unwrap();
        let (one, other) = (Sha256([1; 32]), Sha256([2; 32]));
        for artefact in [one, other] {
            std::fs::write(store.path(artefact), "x").unwrap();
            std::fs::write(store.part_path(artefact), "x").unwrap();
        }
        store.remove_unneeded(&BTreeSet::from([one])).unwrap();
        assert!(store.path(one).exists() && store.part_path(one).exists());
        assert!(!store.path(other).exists() && !store.part_path(other).exists());
    }
}
