//! The settings that responses to heartbeats bring: store them, and find the newest ones.
//!
//! The [`StateWriter`] stores them when the disk lets it, so the file can be older than what this process has learned.
//! A heartbeat loop that starts again meanwhile would call servers that are gone. So the newest settings are kept in
//! memory too, and the file counts only until this process has learned any: no other process writes it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::agent::settings::AgentSettings;
use crate::enrolment::Enrolment;
use crate::state_directory::{LearnedSettings, StateDirectory};
use crate::state_writer::StateWriter;

/// The settings of one enrolment. Clones share them.
#[derive(Clone, Debug)]
pub struct SettingsStore {
    state: StateDirectory,
    writer: StateWriter,
    /// Revision of the enrolment; a later one overrules what was learned.
    revision: u64,
    /// Settings of the enrolment.
    enrolled: AgentSettings,
    /// What this process has learned last.
    newest: Arc<Mutex<Option<LearnedSettings>>>,
}

impl SettingsStore {
    /// The settings of this enrolment, which `writer` stores.
    #[must_use]
    pub fn new(state: StateDirectory, writer: StateWriter, enrolment: &Enrolment) -> Self {
        let (revision, enrolled) = (enrolment.revision, enrolment.settings.clone());
        Self { state, writer, revision, enrolled, newest: Arc::default() }
    }

    /// The settings learned last, written or not, and those to fall back to.
    #[must_use]
    pub fn load(&self) -> (AgentSettings, Option<AgentSettings>) {
        let newest = self.newest().clone();
        newest.or_else(|| self.read_file()).map_or_else(
            || (self.enrolled.clone(), None),
            |LearnedSettings { settings, fallback, .. }| (settings, fallback),
        )
    }

    /// Remembers learned settings, and queues them for writing.
    pub fn save(&self, settings: &AgentSettings, fallback: Option<AgentSettings>) {
        let learned = LearnedSettings { revision: self.revision, settings: settings.clone(), fallback };
        *self.newest() = Some(learned.clone());
        let state = self.state.clone();
        self.writer.enqueue("settings", move || {
            if let Err(error) = state.write_learned_settings(&learned) {
                tracing::warn!(%error, "the learned settings could not be written; the agent continues");
            }
        });
    }

    fn newest(&self) -> MutexGuard<'_, Option<LearnedSettings>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_file(&self) -> Option<LearnedSettings> {
        self.state.read_learned_settings(self.revision).unwrap_or_else(|error| {
            tracing::warn!(%error, "the learned settings cannot be read; using those of the enrolment");
            None
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use model::ids::MachineId;
    use uuid::Uuid;

    use super::*;

    pub(crate) fn settings(endpoint: &str) -> AgentSettings {
        AgentSettings::new(&[endpoint.to_owned()], &[], 0).unwrap()
    }

    /// A store for an enrolment with the revision 1 and this endpoint.
    pub(crate) fn store(state: &StateDirectory, writer: &StateWriter, endpoint: &str) -> SettingsStore {
        let enrolment = Enrolment {
            machine_id: MachineId(Uuid::new_v4()),
            bmdb_id: Uuid::new_v4(),
            fences: BTreeMap::new(),
            holders: BTreeMap::new(),
            settings: settings(endpoint),
            revision: 1,
        };
        SettingsStore::new(state.clone(), writer.clone(), &enrolment)
    }

    /// The queue is blocked by a write that waits, as it is by a slow disk.
    #[test]
    fn queued_settings_are_found_before_they_are_written() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let writer = StateWriter::default();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let own = store(&state, &writer, "127.0.0.1:1");
        assert_eq!(own.load(), (settings("127.0.0.1:1"), None), "those of the enrolment");
        writer.enqueue("slow", move || {
            let _ = released.recv();
        });
        own.save(&settings("127.0.0.1:2"), Some(settings("127.0.0.1:1")));
        assert_eq!(state.read_learned_settings(1).unwrap(), None, "the file has nothing yet");
        let queued = own.clone().load();
        assert_eq!(queued, (settings("127.0.0.1:2"), Some(settings("127.0.0.1:1"))));
        own.save(&settings("127.0.0.1:2"), None);
        assert_eq!(own.load(), (settings("127.0.0.1:2"), None), "they have worked");

        drop(release);
        assert!(writer.flush(Duration::from_mins(1)));
        let next_process = store(&state, &writer, "127.0.0.1:1");
        assert_eq!(next_process.load(), (settings("127.0.0.1:2"), None), "the newest were written");
    }
}
