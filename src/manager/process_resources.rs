//! What this shepherd uses of its host: space on the file systems that it writes to, and open files.
//!
//! A shepherd with a full disk can make no key and no temporary file, and its private PostgreSQL stops. One that has
//! opened all its files accepts no connection. So each shepherd measures both, shows them as metrics, and publishes in its
//! session that one of them runs out. `shepherdctl issues` finds it there, through any shepherd.
//!
//! The session is that of the sampler: every shepherd has exactly one. What is published ends when the shortage does, or
//! with the session.
//!
//! It also carries which of its files the process refuses: a certificate, a key or an agent that has changed and cannot be used
//! is left alone, and nothing else shows it before the former certificate ends or a machine needs the agent.
//!
//! It also carries when the metrics listener last turned a connection away. The callback and the API publish that in
//! their own sessions, under the same name. The metrics listener publishes nothing else, and it works without the BMDB.
//! A session of its own would be one more that is started, renewed, and closed before the process may end.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::PathBuf;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::metrics::registry::{Label, MetricRegistry};
use crate::model::open_files::{describe_shortage, is_nearly_used_up};
use crate::model::storage_level::{DirectoryUsage, FileSystemUsage, MeasuredFileSystem, group_directories};
use crate::model::time::Timestamp;
use hardening::own_usage::{self, FileSystem, OpenFiles};

/// Time between two measurements.
const MEASURE_INTERVAL: Duration = Duration::from_secs(5);
/// Time between two searches for changed shortages.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(5);

/// What a shepherd writes into a directory. The names are a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryContent {
    /// The data of a private PostgreSQL (`--bmdb_dir`).
    Database,
    /// Keys that are made if they are absent.
    Keys,
    /// Files that live for a moment.
    TemporaryFiles,
}

impl DirectoryContent {
    const ALL: [Self; 3] = [Self::Database, Self::Keys, Self::TemporaryFiles];

    /// Its name in metrics.
    const fn label(self) -> &'static str {
        match self {
            Self::Database => "database",
            Self::Keys => "keys",
            Self::TemporaryFiles => "temporary-files",
        }
    }

    /// Its name for people.
    const fn description(self) -> &'static str {
        match self {
            Self::Database => "the database",
            Self::Keys => "keys",
            Self::TemporaryFiles => "temporary files",
        }
    }
}

/// A directory that this shepherd writes to.
pub type WrittenDirectory = (DirectoryContent, PathBuf);

/// What this process runs short of, as sentences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessShortages {
    /// File systems that run out of space; `None` if all have enough.
    pub storage: Option<String>,
    /// That nearly all open files are used; `None` if there are enough.
    pub open_files: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ContentLabel {
    content: &'static str,
}

/// The metrics of this file.
#[derive(Clone, Debug, Default)]
pub struct ProcessResourceMetrics {
    size: Family<ContentLabel, Gauge>,
    available: Family<ContentLabel, Gauge>,
    available_inodes: Family<ContentLabel, Gauge>,
    open_files: Gauge,
    open_files_limit: Gauge,
}

impl ProcessResourceMetrics {
    /// Registers all of them.
    pub(crate) fn register(&self, book: &mut MetricRegistry) {
        let content = || [Label::one_of("content", DirectoryContent::ALL.map(DirectoryContent::label))];
        book.add_process_metric(
            "file_system_size_bytes",
            "Size of the file system that this process writes to, by what it writes there",
            &content(),
            self.size.clone(),
        );
        book.add_process_metric(
            "file_system_available_bytes",
            "What may still be written to that file system",
            &content(),
            self.available.clone(),
        );
        book.add_process_metric(
            "file_system_available_inodes",
            "Files that may still be created on that file system; 0 where it has no limit",
            &content(),
            self.available_inodes.clone(),
        );
        book.add_process_metric(
            "open_files",
            "Files that this process has open",
            &[],
            self.open_files.clone(),
        );
        book.add_process_metric(
            "open_files_limit",
            "Files that this process may have open; 0 without a limit",
            &[],
            self.open_files_limit.clone(),
        );
    }

    fn record_directory(&self, content: DirectoryContent, usage: FileSystemUsage) {
        let label = ContentLabel { content: content.label() };
        self.size.get_or_create(&label).set(as_gauge(usage.bytes));
        self.available.get_or_create(&label).set(as_gauge(usage.available_bytes));
        self.available_inodes.get_or_create(&label).set(as_gauge(usage.available_inodes));
    }
}

fn as_gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// What one measurement has read.
struct Measurement {
    directories: Vec<(DirectoryContent, DirectoryUsage)>,
    open_files: std::io::Result<OpenFiles>,
}

/// Measures directories and open files. Blocks.
fn measure(directories: &[WrittenDirectory]) -> Measurement {
    let read = directories.iter().filter_map(|(content, path)| {
        let FileSystem { device, usage } = own_usage::read_file_system(path).ok()?;
        let path = path.clone();
        Some((*content, DirectoryUsage { path, content: content.description(), device, usage }))
    });
    Measurement { directories: read.collect(), open_files: own_usage::count_open_files() }
}

/// What the process runs short of. Open files that could not be counted end no shortage: they may be why counting failed.
/// *Pure.*
fn find_shortages(
    systems: &[MeasuredFileSystem],
    files: Option<OpenFiles>,
    before: &ProcessShortages,
) -> ProcessShortages {
    let sentences: Vec<String> = systems.iter().filter_map(MeasuredFileSystem::describe).collect();
    let is_reported = before.open_files.is_some();
    let open_files = match files {
        Some(files) => {
            is_nearly_used_up(files.used, files.limit, is_reported).then(|| describe_shortage(files.limit))
        }
        None => before.open_files.clone(),
    };
    ProcessShortages { storage: (!sentences.is_empty()).then(|| sentences.join("; ")), open_files }
}

/// Measures until `stop`, shows the numbers and sends what runs short to `shortages`.
pub async fn run_process_monitor(
    directories: Vec<WrittenDirectory>,
    metrics: ProcessResourceMetrics,
    shortages: watch::Sender<ProcessShortages>,
    stop: CancellationToken,
) {
    let mut systems = Vec::new();
    while !stop.is_cancelled() {
        let measured = directories.clone();
        // A measurement that panicked changes nothing, and one that waits for its disk delays only the next one.
        let measuring = tokio::task::spawn_blocking(move || measure(&measured));
        if let Some(Ok(Measurement { directories, open_files })) = stop.run_until_cancelled(measuring).await {
            for (content, directory) in &directories {
                metrics.record_directory(*content, directory.usage);
            }
            let files = open_files
                .inspect_err(
                    |error| tracing::debug!(%error, "the open files of this shepherd cannot be counted"),
                )
                .ok();
            if let Some(files) = files {
                metrics.open_files.set(as_gauge(files.used));
                metrics.open_files_limit.set(as_gauge(files.limit.unwrap_or(0)));
            }
            systems = group_directories(directories.into_iter().map(|(_, usage)| usage).collect(), &systems);
            let found = find_shortages(&systems, files, &shortages.borrow());
            replace_shortages(&shortages, found);
        }
        stop.run_until_cancelled(tokio::time::sleep(MEASURE_INTERVAL)).await;
    }
}

fn replace_shortages(shortages: &watch::Sender<ProcessShortages>, found: ProcessShortages) {
    shortages.send_if_modified(|known| {
        let is_changed = *known != found;
        if is_changed {
            for sentence in found.storage.iter().chain(&found.open_files) {
                tracing::warn!("this shepherd runs short: {sentence}");
            }
            *known = found;
        }
        is_changed
    });
}

/// What a process publishes of itself in the session of its sampler.
#[derive(Clone, Debug)]
pub struct ProcessSignals {
    /// What it runs short of.
    pub shortages: watch::Receiver<ProcessShortages>,
    /// When its metrics listener last turned a connection away, by the clock of this host; `None` if it never did.
    pub metrics_turned_away: watch::Receiver<Option<Timestamp>>,
    /// Why each of its files that are read again is refused, as a sentence; `None` while it is used.
    pub file_refusals: Vec<watch::Receiver<Option<String>>>,
}

/// The values of all signals at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SignalValues {
    shortages: ProcessShortages,
    turned_away_at: Option<Timestamp>,
    file_refused: Option<String>,
}

impl ProcessSignals {
    fn read_values(&self) -> SignalValues {
        let refusals = self.file_refusals.iter().filter_map(|refusal| refusal.borrow().clone());
        SignalValues {
            shortages: self.shortages.borrow().clone(),
            turned_away_at: *self.metrics_turned_away.borrow(),
            file_refused: describe_refusals(refusals),
        }
    }
}

/// The refusals of files as one sentence; `None` if there is none. Two listeners may refuse the same file. *Pure.*
fn describe_refusals(refusals: impl Iterator<Item = String>) -> Option<String> {
    let distinct: BTreeSet<String> = refusals.collect();
    let joined = distinct.into_iter().collect::<Vec<_>>().join("; ");
    (!joined.is_empty()).then(|| format!("what a file has now is not used: {joined}"))
}

/// Publishes the signals of the process in a session, for as long as it is polled.
pub(crate) async fn publish_signals(
    session: &Session,
    sessions: &Sessions,
    signals: ProcessSignals,
) -> Infallible {
    // A session begins with none.
    let mut published = SignalValues::default();
    loop {
        let current = signals.read_values();
        if current != published {
            let details = serde_json::json!({
                "storage_low": current.shortages.storage,
                "open_files_low": current.shortages.open_files,
                "turned_away_at": current.turned_away_at.map(|at| at.to_rfc3339()),
                "file_refused": current.file_refused,
            });
            match sessions.update_runtime_info(session, details).await {
                Ok(()) => published = current,
                Err(error) => tracing::debug!(%error, "cannot publish the signals of this shepherd"),
            }
        }
        tokio::time::sleep(PUBLISH_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::model::storage_level::{FileSystemLevels, StorageLevel};

    #[test]
    fn shortages_are_sentences_and_end() {
        let system = |space| MeasuredFileSystem {
            path: "/var/lib/shepherd".into(),
            contents: vec!["keys"],
            device: 1,
            usage: FileSystemUsage::default(),
            levels: FileSystemLevels { space, inodes: StorageLevel::Sufficient },
        };
        let files = |used| Some(OpenFiles { used, limit: Some(1000) });
        let none = ProcessShortages::default();
        assert_eq!(find_shortages(&[system(StorageLevel::Sufficient)], files(800), &none), none);
        let found = find_shortages(&[system(StorageLevel::Exhausted)], files(801), &none);
        let storage = found.storage.as_deref().unwrap();
        assert!(storage.starts_with("the file system of /var/lib/shepherd (keys) is full"), "{storage}");
        assert!(found.open_files.as_deref().unwrap().contains("the 1000 files"), "{found:?}");
        assert!(find_shortages(&[], files(750), &found).open_files.is_some(), "it ends with some room");
        assert_eq!(find_shortages(&[], files(700), &found), none);
        let uncounted = find_shortages(&[], None, &found);
        assert_eq!((uncounted.storage, uncounted.open_files), (None, found.open_files));
        assert_eq!(find_shortages(&[], None, &none), none);
    }

    #[test]
    fn refused_files_are_one_sentence_and_each_is_named_once() {
        let [callback, api, agent] = [(); 3].map(|()| watch::Sender::new(None));
        let signals = ProcessSignals {
            shortages: watch::channel(ProcessShortages::default()).1,
            metrics_turned_away: watch::channel(None).1,
            file_refusals: [&callback, &api, &agent].map(watch::Sender::subscribe).into(),
        };
        assert_eq!(signals.read_values(), SignalValues::default());
        for listener in [&callback, &api] {
            listener.send_replace(Some("the certificate has expired".to_owned()));
        }
        agent.send_replace(Some("the agent is half a program".to_owned()));
        let described = signals.read_values().file_refused.unwrap();
        assert_eq!(
            described,
            "what a file has now is not used: the agent is half a program; the certificate has expired"
        );
        for listener in [&callback, &api, &agent] {
            listener.send_replace(None);
        }
        assert_eq!(signals.read_values(), SignalValues::default());
    }

    #[test]
    fn directories_are_measured_and_missing_ones_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let directories = [
            (DirectoryContent::Keys, directory.path().to_owned()),
            (DirectoryContent::Database, directory.path().join("missing")),
        ];
        let measured = measure(&directories);
        assert_eq!(measured.directories.len(), 1);
        assert!(measured.directories[0].1.usage.bytes > 0);
        assert!(measured.open_files.unwrap().used > 0);
    }
}
