//! The keys that releases must be signed with: pin them once, follow their rotations, store them.
//!
//! [`model::signed_artefact::signing_trust`] decides; this module stores the result in `signing.json`. The keys come with
//! the enrolment, or with the first answer to a heartbeat that has some. Without pinned keys, releases need no signature. Only
//! an enrolment can carry the order to replace pinned keys that are lost. The keys come with whether declarations must be
//! signed, which a machine pins, too.
//!
//! Two processes write the file: the enrolment and the agent. Each takes a lock, reads what the other one has written, and
//! keeps the keys that it finds. So an agent without keys pins none over those of an enrolment.
//!
//! A damaged file is not the same as no file: then nothing is accepted until a person has looked at it. Otherwise damage
//! to one file would let everybody with an order install any release.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::kubernetes::version::ReleaseVersion;
use model::signed_artefact::signature::ArtefactSignature;
use model::signed_artefact::signed_fields::ArtefactKind;
use model::signed_artefact::signing_key::{KeyId, SigningKey, collect_signing_keys};
use model::signed_artefact::signing_trust::{KeyRotation, MAX_ROTATIONS, SigningTrust};
use model::signed_artefact::{ExpectedFields, decide_acceptance};
use proto::agent::v1 as wire;
use tokio::sync::watch;

use crate::state_directory::{Lock, StateDirectory, StoredSigningTrust};
use crate::state_error::StateError;

/// Longest wait for another process that writes the file. Tests do not wait.
const LOCK_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 0 } else { 5 });

/// The pinned keys of a machine. Clones share them.
#[derive(Clone, Debug)]
pub struct SigningStore {
    state: StateDirectory,
    inner: Arc<Mutex<SigningState>>,
    /// Sent to whenever other keys or requirements are pinned.
    changes: Arc<watch::Sender<()>>,
}

/// The signature of a file, and the pinned key to verify it with.
#[derive(Clone, Debug)]
pub struct SignedBy {
    /// The signature that came with the file or its order.
    pub signature: ArtefactSignature,
    /// A pinned key with the id in the signature.
    pub key: SigningKey,
}

#[derive(Debug)]
struct SigningState {
    /// The error is a sentence.
    trust: Result<SigningTrust, String>,
    /// What the file had when this process last read or wrote it.
    stored: SigningTrust,
    is_saved: bool,
    /// The lists of new keys that are ignored, by version and signing key. They come with each heartbeat, and are logged
    /// once.
    ignored: Vec<(ReleaseVersion, KeyId)>,
}

impl SigningStore {
    /// Reads the stored keys.
    #[must_use]
    pub fn open(state: StateDirectory) -> Self {
        let trust = read_trust(&state).map_err(|error| match error {
            StateError::DamagedSigningTrust { .. } => error.to_string(),
            error => format!("{error}; repair that, then restart the role server"),
        });
        if let Err(error) = &trust {
            tracing::error!(error, "no release is accepted, because the pinned signing keys cannot be read");
        }
        let stored = trust.clone().unwrap_or_default();
        let inner = SigningState { trust, stored, is_saved: true, ignored: Vec::new() };
        Self { state, inner: Arc::new(Mutex::new(inner)), changes: Arc::default() }
    }

    /// Watches for other pinned keys and requirements, from now on. The store has to outlive the watch.
    #[must_use]
    pub fn watch_changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, SigningState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pinned keys and the lowest accepted versions. The error is a sentence.
    pub fn trust(&self) -> Result<SigningTrust, String> {
        self.lock().trust.clone()
    }

    /// Decides from the signature of a file, empty if it has none, whether the file may be fetched, and with which key it is
    /// verified then; `None` if no key is pinned. The error is a sentence.
    pub fn accept_signature(
        &self,
        text: &str,
        expected: &ExpectedFields,
    ) -> Result<Option<SignedBy>, String> {
        let trust = self.trust()?;
        if trust.keys().is_empty() {
            return Ok(None);
        }
        let signature = match text {
            "" => None,
            text => Some(ArtefactSignature::parse(text).map_err(|error| error.to_string())?),
        };
        let key = decide_acceptance(signature.as_ref(), expected, &trust);
        let key = key.map_err(|error| error.to_string())?.cloned();
        Ok(signature.zip(key).map(|(signature, key)| SignedBy { signature, key }))
    }

    /// The ids of the pinned keys.
    #[must_use]
    pub fn key_ids(&self) -> Vec<String> {
        let state = self.lock();
        let keys = state.trust.as_ref().map(SigningTrust::keys).unwrap_or_default();
        keys.iter().map(|key| key.id().to_string()).collect()
    }

    /// Takes what a shepherd sent: keys where none is pinned, and rotations that a pinned key signed. Returns whether the
    /// result has to be saved. It does not wait for the disk.
    #[must_use]
    pub fn accept_offer(&self, keys: &[String], rotations: &[wire::KeyRotation]) -> bool {
        let (keys, rotations) = (parse_keys(keys), parse_rotations(rotations));
        let mut state = self.lock();
        let Ok(trust) = &state.trust else { return false };
        let (next, ignored) = (trust.with_offer(&keys, &rotations), trust.ignored_rotations(&rotations));
        let ignored: Vec<_> =
            ignored.iter().map(|rotation| (rotation.version(), rotation.signature().key_id())).collect();
        for (version, key) in ignored.iter().filter(|list| !state.ignored.contains(list)) {
            tracing::warn!(
                %version, %key, pinned = trust.list_key_ids(),
                "a list of new signing keys is ignored, because no pinned key has signed it"
            );
        }
        if next != *trust {
            tracing::info!(
                keys = next.list_key_ids(),
                "releases must be signed with one of these keys from now on"
            );
            state.trust = Ok(next);
            state.is_saved = false;
            self.changes.send_replace(());
        }
        state.ignored = ignored;
        !state.is_saved
    }

    /// Pins that declarations that give root must be signed. Only root on the machine ends that. It does not wait for the disk.
    pub fn require_signed_declarations(&self) {
        let mut state = self.lock();
        let Ok(trust) = &state.trust else { return };
        if !trust.requires_signed_declarations() {
            tracing::info!("declarations that give root on this machine must be signed from now on");
            let next = trust.with_signed_declarations(true);
            state.trust = Ok(next);
            state.is_saved = false;
            self.changes.send_replace(());
        }
    }

    /// Replaces the pinned keys by those of an enrolment, and writes them. Declarations must be signed if the enrolment
    /// requires that, or if they had to be before: the order for lost keys does not mention it. Returns whether any has changed.
    /// The error is a sentence, and nothing has changed then: a damaged file stays for a person.
    pub fn replace_keys(
        &self,
        keys: &[String],
        rotations: &[wire::KeyRotation],
        requires_signed_declarations: bool,
    ) -> Result<bool, String> {
        let keys = collect_signing_keys(keys.iter().map(String::as_str))?;
        let rotations = parse_rotations(rotations);
        self.trust()?;
        let locked = self.state.wait_for_lock(Lock::SigningKeys, LOCK_PATIENCE);
        let _held = locked.map_err(|error| error.to_string())?;
        let stored = read_trust(&self.state).map_err(|error| error.to_string())?;
        let next = stored
            .with_replaced_keys(&keys, &rotations)
            .with_signed_declarations(requires_signed_declarations || stored.requires_signed_declarations());
        if next != stored {
            self.state.write_signing_trust(&store_trust(&next)).map_err(|error| error.to_string())?;
            tracing::warn!(
                former = stored.list_key_ids(),
                keys = next.list_key_ids(),
                "the pinned signing keys were replaced by order of an admin"
            );
        }
        let mut state = self.lock();
        (state.trust, state.is_saved) = (Ok(next.clone()), true);
        let is_changed = !next.has_keys(stored.keys())
            || next.requires_signed_declarations() != stored.requires_signed_declarations();
        state.stored = next;
        Ok(is_changed)
    }

    /// Raises the lowest accepted version, after a file with this minimum has proved itself.
    pub fn raise_minimum(&self, kind: ArtefactKind, name: &str, minimum: ReleaseVersion) {
        let mut state = self.lock();
        let Ok(trust) = &state.trust else { return };
        let next = trust.with_minimum(kind, name, minimum);
        if next != *trust {
            tracing::info!(%kind, name, %minimum, "lower versions are not accepted any more");
            state.trust = Ok(next);
            state.is_saved = false;
        }
    }

    /// Whether the file has this lowest version, or a higher one.
    #[must_use]
    pub fn has_stored_minimum(&self, kind: ArtefactKind, name: &str, minimum: ReleaseVersion) -> bool {
        self.lock().stored.minimum_version(kind, name).is_some_and(|stored| stored >= minimum)
    }

    /// Whether keys or versions are not written yet.
    #[must_use]
    pub fn is_unsaved(&self) -> bool {
        !self.lock().is_saved
    }

    /// Writes the keys and versions, if they have changed since the last time, and takes over what another process has
    /// written meanwhile. A write that failed is tried again with the next answer to a heartbeat.
    pub fn save(&self) -> Result<(), StateError> {
        if !self.is_unsaved() {
            return Ok(());
        }
        let _held = self.state.wait_for_lock(Lock::SigningKeys, LOCK_PATIENCE)?;
        let stored = read_trust(&self.state)?;
        let trust = {
            let mut state = self.lock();
            let Ok(own) = &state.trust else { return Ok(()) };
            let merged = own.merged_with(&state.stored, &stored);
            if merged != *own {
                self.changes.send_replace(());
            }
            state.trust = Ok(merged.clone());
            merged
        };
        // Without the lock of this process: heartbeats go on while the disk does not answer.
        if trust != stored {
            self.state.write_signing_trust(&store_trust(&trust))?;
        }
        let mut state = self.lock();
        state.is_saved = state.trust.as_ref() == Ok(&trust);
        state.stored = trust;
        Ok(())
    }
}

/// The keys that a shepherd sent; none if one of them is malformed.
fn parse_keys(lines: &[String]) -> Vec<SigningKey> {
    if lines.is_empty() {
        return Vec::new();
    }
    collect_signing_keys(lines.iter().map(String::as_str)).unwrap_or_else(|error| {
        tracing::warn!(error, "the shepherd sent signing keys that cannot be read");
        Vec::new()
    })
}

/// The rotations that a shepherd sent, without malformed ones.
fn parse_rotations(rotations: &[wire::KeyRotation]) -> Vec<KeyRotation> {
    let parse = |rotation: &wire::KeyRotation| {
        KeyRotation::parse(&rotation.list, &rotation.signature)
            .inspect_err(|error| {
                tracing::warn!(error, "the shepherd sent a list of keys that cannot be used");
            })
            .ok()
    };
    rotations.iter().take(MAX_ROTATIONS).filter_map(parse).collect()
}

/// The trust as its file has it.
fn store_trust(trust: &SigningTrust) -> StoredSigningTrust {
    let mut minimum_versions: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for ((kind, name), minimum) in trust.minimum_versions() {
        let of_kind = minimum_versions.entry(kind.to_string()).or_default();
        of_kind.insert(name.clone(), minimum.to_string());
    }
    StoredSigningTrust {
        keys: trust.keys().iter().map(|key| key.as_str().to_owned()).collect(),
        rotation: trust.rotation().map(|version| version.to_string()),
        minimum_versions,
        requires_signed_declarations: trust.requires_signed_declarations(),
    }
}

/// The stored trust; the default one if no file exists.
fn read_trust(state: &StateDirectory) -> Result<SigningTrust, StateError> {
    let stored = state.read_signing_trust()?.unwrap_or_default();
    parse_trust(&stored).map_err(|reason| state.damaged_signing_trust(reason))
}

/// The trust that its file has. The error is what is wrong with the file.
fn parse_trust(stored: &StoredSigningTrust) -> Result<SigningTrust, String> {
    let version = |text: &str| text.parse::<ReleaseVersion>().map_err(|error| error.to_string());
    let mut minimum_versions = BTreeMap::new();
    for (kind, of_kind) in &stored.minimum_versions {
        // A later release may know more kinds, and this one has no file of them.
        let Some(kind) = ArtefactKind::ALL.into_iter().find(|known| known.as_str() == kind) else { continue };
        for (name, minimum) in of_kind {
            minimum_versions.insert((kind, name.clone()), version(minimum)?);
        }
    }
    let rotation = stored.rotation.as_deref().map(version).transpose()?;
    let trust = SigningTrust::restore(&stored.keys, rotation, minimum_versions)?;
    Ok(trust.with_signed_declarations(stored.requires_signed_declarations))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_error::EMPTY_SIGNING_TRUST;

    const FIRST: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    const SECOND: &str = "RWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU";

    fn offered(key: &str) -> Vec<String> {
        vec![key.to_owned()]
    }

    #[test]
    fn keys_are_pinned_once_and_found_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let store = SigningStore::open(state.clone());
        assert_eq!((store.key_ids(), store.trust()), (Vec::new(), Ok(SigningTrust::default())));
        assert!(!store.accept_offer(&[], &[]), "there is nothing to save");
        assert!(!store.accept_offer(&offered("x"), &[]), "a malformed key pins nothing");
        assert!(store.accept_offer(&offered(FIRST), &[]));
        assert!(store.accept_offer(&offered(SECOND), &[]), "it is not saved yet");
        store.save().unwrap();
        assert!(!store.accept_offer(&offered(SECOND), &[]), "another key is ignored");
        store.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 2, 0));
        store.save().unwrap();

        let again = SigningStore::open(state.clone());
        assert!(!again.accept_offer(&offered(SECOND), &[]), "as a later enrolment offers it");
        assert_eq!(again.key_ids(), ["0001010101010101"]);
        let minimum = again.trust().unwrap().minimum_version(ArtefactKind::Release, "roleserver");
        assert_eq!(minimum, Some(ReleaseVersion::new(1, 2, 0)));
        assert_eq!(again.trust(), store.trust());
    }

    #[test]
    fn keys_that_an_enrolment_pinned_meanwhile_stay() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let (agent, enrolment) = (SigningStore::open(state.clone()), SigningStore::open(state.clone()));
        assert!(enrolment.accept_offer(&offered(FIRST), &[]));
        enrolment.save().unwrap();
        // The agent has read the file before that, and another shepherd answers its heartbeat.
        assert!(agent.accept_offer(&offered(SECOND), &[]));
        agent.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 2, 0));
        agent.save().unwrap();
        assert_eq!(agent.key_ids(), ["0001010101010101"]);
        let again = SigningStore::open(state.clone());
        assert_eq!(again.trust(), agent.trust());
        let minimum = again.trust().unwrap().minimum_version(ArtefactKind::Release, "roleserver");
        assert_eq!(minimum, Some(ReleaseVersion::new(1, 2, 0)));
        assert!(!agent.accept_offer(&offered(SECOND), &[]), "it is saved");
        // While another process writes, nothing is written, and the next heartbeat tries again.
        let held = state.acquire_lock(Lock::SigningKeys).unwrap();
        agent.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 3, 0));
        assert!(matches!(agent.save(), Err(StateError::Locked { .. })));
        drop(held);
        agent.save().unwrap();
        assert_eq!(SigningStore::open(state).trust(), agent.trust());
    }

    #[test]
    fn replaced_keys_are_stored_with_the_former_versions() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let agent = SigningStore::open(state.clone());
        assert!(agent.accept_offer(&offered(FIRST), &[]));
        agent.save().unwrap();
        let enrolment = SigningStore::open(state.clone());
        agent.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 2, 0));
        agent.save().unwrap();
        assert!(enrolment.replace_keys(&offered("x"), &[], false).is_err());
        assert!(enrolment.replace_keys(&[], &[], false).is_err(), "no key at all");
        assert_eq!(enrolment.replace_keys(&offered(SECOND), &[], false), Ok(true));
        assert_eq!(enrolment.replace_keys(&offered(SECOND), &[], false), Ok(false), "it is repeated");
        assert!(!enrolment.trust().unwrap().requires_signed_declarations());
        // The agent that runs writes the file once more before it ends.
        agent.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 3, 0));
        agent.save().unwrap();
        let again = SigningStore::open(state);
        assert_eq!(again.key_ids(), ["0002020202020202"]);
        let minimum = again.trust().unwrap().minimum_version(ArtefactKind::Release, "roleserver");
        assert_eq!(minimum, Some(ReleaseVersion::new(1, 3, 0)));
    }

    #[test]
    fn required_signatures_stay_required_after_an_order_replaces_the_keys() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let agent = SigningStore::open(state.clone());
        let mut changes = agent.watch_changes();
        let requires = |store: &SigningStore| store.trust().unwrap().requires_signed_declarations();
        assert!(agent.accept_offer(&offered(FIRST), &[]) && !requires(&agent));
        agent.save().unwrap();
        assert!(changes.has_changed().unwrap(), "keys were pinned");
        changes.mark_unchanged();
        agent.require_signed_declarations();
        assert!(requires(&agent) && agent.is_unsaved() && changes.has_changed().unwrap());
        agent.save().unwrap();
        changes.mark_unchanged();
        // A shepherd that does not require them sends the keys alone, with each heartbeat.
        assert!(!agent.accept_offer(&offered(FIRST), &[]));
        agent.require_signed_declarations();
        assert!(!agent.is_unsaved() && !changes.has_changed().unwrap(), "it is repeated");
        assert!(requires(&agent) && requires(&SigningStore::open(state.clone())));

        let enrolment = SigningStore::open(state.clone());
        assert_eq!(enrolment.replace_keys(&offered(FIRST), &[], true), Ok(false));
        assert_eq!(enrolment.replace_keys(&offered(SECOND), &[], false), Ok(true));
        assert!(requires(&SigningStore::open(state.clone())), "the order says nothing about it");
        // The agent that runs writes the file once more before it ends.
        agent.raise_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 3, 0));
        agent.save().unwrap();
        assert!(requires(&agent) && requires(&SigningStore::open(state)));
        assert!(changes.has_changed().unwrap(), "it follows what the enrolment has written");
    }

    #[test]
    fn damaged_file_accepts_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let stored = |text: &str| std::fs::write(directory.path().join("signing.json"), text).unwrap();
        for text in ["{", "{\"keys\":[\"x\"]}", "{\"keys\":[],\"rotation\":\"1\"}"] {
            stored(text);
            let store = SigningStore::open(state.clone());
            let error = store.trust().unwrap_err();
            let path = directory.path().join("signing.json").display().to_string();
            assert!(error.starts_with(&format!("{path} is damaged (")), "{text}: {error}");
            assert!(error.contains(&format!("write {EMPTY_SIGNING_TRUST} into it")), "{text}: {error}");
            assert!(
                store.replace_keys(&offered(FIRST), &[], false).unwrap_err().contains("is damaged"),
                "{text}"
            );
            assert!(!store.accept_offer(&offered(FIRST), &[]));
            assert_eq!(store.key_ids(), Vec::<String>::new());
            store.save().unwrap();
            assert_eq!(std::fs::read_to_string(directory.path().join("signing.json")).unwrap(), text);
        }
        stored(EMPTY_SIGNING_TRUST);
        let store = SigningStore::open(state.clone());
        assert_eq!(store.trust(), Ok(SigningTrust::default().with_signed_declarations(true)));
        assert!(store.accept_offer(&offered(FIRST), &[]), "the keys of the shepherd are pinned");
        assert!(store.trust().unwrap().requires_signed_declarations());
        stored("{\"keys\":[],\"minimum_versions\":{\"later\":{\"x\":\"soon\"}}}");
        assert_eq!(SigningStore::open(state).trust(), Ok(SigningTrust::default()), "of a later release");
    }
}
