//! The limits of a gate, as a pure function of the number of files that the process may open.
//!
//! Each connection is an open file. A listener that accepts more than the process may open takes the files of the
//! program's own work: the database, SSH and state files. So these get a reserve first, and listeners share the rest.

use std::time::Duration;

/// Files that a program needs at least. `shepherd` refuses to start with fewer.
pub const MIN_FILES: u64 = 512;
/// Files for the program's own work: this many at least, and a quarter of all up to [`MAX_RESERVE`].
const MIN_RESERVE: u64 = 256;
const MAX_RESERVE: u64 = 8192;
/// Most connections without a credential, and most of one source in each class. After an outage, thousands of agents
/// reconnect at once from behind one address translator.
const MAX_UNPROVEN: usize = 50_000;
const MAX_PER_SOURCE: usize = 4096;
/// Places that connections with a credential never take: a sixteenth, and these many at least and at most. Without them,
/// a newcomer at a full listener would give way to the next one before it has an answer.
const MIN_NEWCOMERS: usize = 4;
const MAX_NEWCOMERS: usize = 256;

/// What ends the time that a connection has for its first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// Any request, also one that is refused.
    Request,
    /// A request with an accepted credential.
    Credential,
}

/// Limits on connections to one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateLimits {
    /// Most connections. Connections without a credential leave the rest for those with one.
    pub total: usize,
    /// Most connections with a credential. One more is refused in words.
    pub proven: usize,
    /// Most connections without a credential: half for those that have sent nothing, half for the others.
    pub unproven: usize,
    /// Most connections of one source in each of these two classes.
    pub per_source: usize,
    /// Longest time for the TLS handshake; `None` for a listener without TLS.
    pub handshake: Option<Duration>,
    /// Longest time from the handshake to the first request.
    pub first_request: Duration,
    /// What counts as the first request.
    pub expectation: Expectation,
    /// Longest time to the next request after one with a credential that could not be checked.
    pub after_deferral: Duration,
    /// Longest time that a connection stays open after it was refused because there are too many.
    pub after_refusal: Duration,
}

/// A listener, with its share of the open files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// The callback, which receives the heartbeats of agents.
    Callback,
    /// The fleet API, for operators and programs.
    Api,
    /// Metrics and health checks, which have no credentials.
    Metrics,
    /// A curator of a cluster, for nodes and owners.
    Curator,
}

impl ListenerKind {
    /// All listeners.
    pub const ALL: [Self; 4] = [Self::Callback, Self::Api, Self::Metrics, Self::Curator];

    /// Its name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Callback => "callback",
            Self::Api => "api",
            Self::Metrics => "metrics",
            Self::Curator => "curator",
        }
    }

    /// Its percentage of the files that listeners share, and its most connections. The shares of the listeners of one
    /// program leave a tenth for connections that are being accepted or closed.
    const fn share(self) -> (u64, u64) {
        match self {
            Self::Callback => (60, 200_000),
            Self::Api => (20, 10_000),
            Self::Metrics => (10, 1000),
            // In a role server, which also connects to what it runs.
            Self::Curator => (50, 20_000),
        }
    }
}

/// Files that stay for the program's own work if it may open `files`.
#[must_use]
pub fn reserved_files(files: u64) -> u64 {
    (files / 4).clamp(MIN_RESERVE.min(files / 2), MAX_RESERVE)
}

impl GateLimits {
    /// The limits of a listener in a process that may open `files`.
    #[must_use]
    pub fn for_listener(kind: ListenerKind, files: u64) -> Self {
        let (percent, most) = kind.share();
        let shared = files.saturating_sub(reserved_files(files));
        // Divided first: `files` may be near the largest number.
        let total = (shared / 100 * percent + shared % 100 * percent / 100).min(most);
        let total = usize::try_from(total).unwrap_or(usize::MAX).max(4);
        let unproven = match kind {
            ListenerKind::Metrics => total,
            _ => (total / 2).min(MAX_UNPROVEN),
        };
        let proven = match kind {
            ListenerKind::Metrics => 0,
            _ => total - (total / 16).clamp(MIN_NEWCOMERS, MAX_NEWCOMERS).min(total / 2),
        };
        Self {
            total,
            proven,
            unproven,
            per_source: (unproven / 4).clamp(1, MAX_PER_SOURCE),
            handshake: match kind {
                ListenerKind::Callback | ListenerKind::Api => Some(Duration::from_secs(10)),
                // Nodes count as silent after seconds, so a handshake that takes long helps nobody.
                ListenerKind::Curator => Some(Duration::from_secs(5)),
                ListenerKind::Metrics => None,
            },
            first_request: match kind {
                ListenerKind::Callback | ListenerKind::Api => Duration::from_secs(30),
                ListenerKind::Metrics | ListenerKind::Curator => Duration::from_secs(10),
            },
            expectation: match kind {
                // An agent sends its heartbeat at once, and nothing else.
                ListenerKind::Callback => Expectation::Credential,
                _ => Expectation::Request,
            },
            // Longer than the longest pause of an agent.
            after_deferral: Duration::from_mins(5),
            // Long enough to read the refusal.
            after_refusal: Duration::from_secs(5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_share_what_the_reserve_leaves() {
        // The listeners that need the fewest files to reach their most connections.
        let (api, metrics) = ((10_000, 9744, 5000, 1250), (1000, 0, 1000, 250));
        let curator = (20_000, 19_744, 10_000, 2500);
        // Files; reserve; then total, proven, unproven and per source of callback, API, metrics and curator.
        for (files, reserve, limits) in [
            (1_048_576, 8192, [(200_000, 199_744, 50_000, 4096), api, metrics, curator]),
            (65_536, 8192, [(34_406, 34_150, 17_203, 4096), api, metrics, curator]),
            (
                4096,
                1024,
                [(1843, 1728, 921, 230), (614, 576, 307, 76), (307, 0, 307, 76), (1536, 1440, 768, 192)],
            ),
            (1024, 256, [(460, 432, 230, 57), (153, 144, 76, 19), (76, 0, 76, 19), (384, 360, 192, 48)]),
            (512, 256, [(153, 144, 76, 19), (51, 47, 25, 6), (25, 0, 25, 6), (128, 120, 64, 16)]),
            (256, 128, [(76, 72, 38, 9), (25, 21, 12, 3), (12, 0, 12, 3), (64, 60, 32, 8)]),
        ] {
            assert_eq!(reserved_files(files), reserve, "{files}");
            let found = ListenerKind::ALL.map(|kind| {
                let found = GateLimits::for_listener(kind, files);
                (found.total, found.proven, found.unproven, found.per_source)
            });
            assert_eq!(found, limits, "{files}");
        }
    }

    #[test]
    fn any_number_of_files_leaves_places_and_is_not_exceeded() {
        for files in (0..2000).chain([u64::MAX / 2, u64::MAX]) {
            let limits = ListenerKind::ALL.map(|kind| GateLimits::for_listener(kind, files));
            for limits in limits {
                assert!(limits.per_source >= 1 && limits.unproven >= 2, "{files}: {limits:?}");
                // One place of each class for a newcomer.
                assert!(limits.proven + 2 <= limits.total, "{files}: {limits:?}");
            }
            // The listeners of one `shepherd`, and its reserve.
            let used: u64 = limits[..3].iter().map(|limits| limits.total as u64).sum();
            assert!(files < 100 || used + reserved_files(files) <= files, "{files}: {limits:?}");
        }
    }
}
