//! Paused control loops: which, for which provider, until when.
//!
//! A paused loop starts nothing: it claims no machine, and a paused provisioner makes no pass. What it has started goes
//! on. A pause covers one provider's machines or all. Both kinds can be in force at once, and then a machine waits for
//! the later end of the two. Clusters have no provider, and are all paused together. A pause stops no clock: silence is
//! noticed, backoffs run out, and when the loop is resumed everything that came due meanwhile is due.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::humanize::relative_and_absolute_time;
use crate::process::{Process, UnknownName};
use crate::shell_words;
use crate::time::Timestamp;

/// A loop, by its name in flags, metrics and sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LoopKind {
    /// Enrols the role server on machines.
    Initializer,
    /// Recovers machines that fell silent.
    Recoverer,
    /// Refreshes what providers report of machines.
    Updater,
    /// Records providers' machines in the BMDB.
    Provisioner,
    /// Releases machines to their providers.
    Retirer,
    /// Carries out operators' power orders.
    Switcher,
    /// Makes machines nodes of clusters, and reconciles these clusters with their specs.
    Cluster,
}

impl LoopKind {
    /// All loops, in the order in which a machine meets them.
    pub const ALL: [Self; 7] = [
        Self::Provisioner,
        Self::Initializer,
        Self::Recoverer,
        Self::Updater,
        Self::Cluster,
        Self::Retirer,
        Self::Switcher,
    ];

    /// The name used in the database, on the command line and in flags.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Initializer => "initializer",
            Self::Recoverer => "recoverer",
            Self::Updater => "updater",
            Self::Provisioner => "provisioner",
            Self::Retirer => "retirer",
            Self::Switcher => "switcher",
            Self::Cluster => "cluster",
        }
    }

    /// Whether it works on machines of providers, and may be paused for one provider alone.
    #[must_use]
    pub const fn has_providers(self) -> bool {
        !matches!(self, Self::Cluster)
    }

    /// The loop that does this kind of work.
    #[must_use]
    pub const fn for_process(process: Process) -> Self {
        match process {
            Process::AgentStart => Self::Initializer,
            Process::Recovery => Self::Recoverer,
            Process::Update => Self::Updater,
            Process::Retirement => Self::Retirer,
            Process::Power => Self::Switcher,
        }
    }
}

impl fmt::Display for LoopKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for LoopKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "loop",
            name: name.to_owned(),
            known: "provisioner, initializer, recoverer, updater, cluster, retirer, switcher",
        })
    }
}

/// A pause that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pause {
    /// The loop that is paused.
    #[serde(rename = "loop")]
    pub loop_kind: LoopKind,
    /// Provider whose machines it covers; `null` for all.
    pub provider: Option<String>,
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who paused it.
    pub by: String,
    /// When it was paused.
    pub since: Timestamp,
    /// When it ends by itself; `null` if it lasts until it is resumed.
    pub until: Option<Timestamp>,
}

/// State of a loop, over all shepherds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopState {
    /// Name of the loop.
    pub loop_kind: LoopKind,
    /// Open sessions of its workers.
    pub workers: i64,
    /// Its pauses in force.
    pub pauses: Vec<Pause>,
}

impl LoopState {
    /// Every loop, from the pauses in force and the open sessions of each component.
    #[must_use]
    pub fn all(pauses: &[Pause], sessions: &[(String, i64)]) -> Vec<Self> {
        let workers = |of: LoopKind| sessions.iter().find(|(component, _)| component == of.as_str());
        LoopKind::ALL
            .into_iter()
            .map(|of| Self {
                loop_kind: of,
                workers: workers(of).map_or(0, |(_, count)| *count),
                pauses: pauses.iter().filter(|pause| pause.loop_kind == of).cloned().collect(),
            })
            .collect()
    }
}

/// Until when a loop starts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PauseEnd {
    /// Up to this moment.
    Until(Timestamp),
    /// Until an operator resumes it.
    WhenResumed,
}

impl Pause {
    /// Whether it covers this provider's machines at `now`. A machine without provider is covered by a pause of all.
    #[must_use]
    pub fn applies_to(&self, of: LoopKind, provider: &str, now: Timestamp) -> bool {
        self.loop_kind == of
            && self.provider.as_deref().is_none_or(|paused| paused == provider)
            && self.until.is_none_or(|until| until > now)
    }

    /// The paused loop, for a sentence: "the recoverer of rack-a".
    #[must_use]
    pub fn describe_target(&self) -> String {
        describe_target(self.loop_kind, self.provider.as_deref())
    }

    /// The pause as a sentence.
    #[must_use]
    pub fn describe(&self, now: Timestamp) -> String {
        let end = self.until.map_or_else(
            || ", until it is resumed".to_owned(),
            |at| format!(", and continues {}", relative_and_absolute_time(at, now)),
        );
        format!(
            "{} was paused by {} {}{end}: {}",
            self.describe_target(),
            self.by,
            relative_and_absolute_time(self.since, now),
            self.reason
        )
    }

    /// The command that ends the pause.
    #[must_use]
    pub fn resume_command(&self) -> String {
        resume_command(self.loop_kind, self.provider.as_deref())
    }
}

/// A loop and its provider, for a sentence.
#[must_use]
pub fn describe_target(of: LoopKind, provider: Option<&str>) -> String {
    match provider {
        Some(provider) => format!("the {of} of {provider}"),
        None if of.has_providers() => format!("the {of}"),
        None => format!("the loop {of}"),
    }
}

/// The command that ends a pause of a loop.
#[must_use]
pub fn resume_command(of: LoopKind, provider: Option<&str>) -> String {
    provider.map_or_else(
        || format!("shepherdctl loops resume {of}"),
        |provider| {
            format!("shepherdctl loops resume {of} --provider {}", shell_words::quote_if_needed(provider))
        },
    )
}

/// Every pause of a loop that covers a provider's machines at `now`, that of all providers first.
pub fn active_pauses<'a>(
    pauses: &'a [Pause],
    of: LoopKind,
    provider: &'a str,
    now: Timestamp,
) -> impl Iterator<Item = &'a Pause> {
    let held = move |all: bool| {
        pauses
            .iter()
            .filter(move |pause| pause.provider.is_none() == all && pause.applies_to(of, provider, now))
    };
    held(true).chain(held(false))
}

/// Until when a loop starts nothing on a provider's machines; `None` if it is not paused at `now`.
#[must_use]
pub fn pause_end(pauses: &[Pause], of: LoopKind, provider: &str, now: Timestamp) -> Option<PauseEnd> {
    active_pauses(pauses, of, provider, now)
        .map(|pause| pause.until.map_or(PauseEnd::WhenResumed, PauseEnd::Until))
        .max()
}

/// Those of `providers` for which the loop is not paused.
#[must_use]
pub fn unpaused_providers(
    pauses: &[Pause],
    of: LoopKind,
    providers: &[String],
    now: Timestamp,
) -> Vec<String> {
    let runs = |provider: &&String| pause_end(pauses, of, provider, now).is_none();
    providers.iter().filter(runs).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::{Span, after};

    fn at(minutes: u64) -> Timestamp {
        after(Timestamp::UNIX_EPOCH, Span::minutes(minutes).0)
    }

    fn pause(of: LoopKind, provider: Option<&str>, until: Option<u64>) -> Pause {
        Pause {
            loop_kind: of,
            provider: provider.map(str::to_owned),
            reason: "the switch is changed".to_owned(),
            by: "kim".to_owned(),
            since: at(0),
            until: until.map(at),
        }
    }

    #[test]
    fn every_loop_is_listed_with_its_workers_and_pauses() {
        let pauses =
            [pause(LoopKind::Recoverer, None, None), pause(LoopKind::Recoverer, Some("rack"), Some(9))];
        let sessions = [("recoverer".to_owned(), 3), ("cluster".to_owned(), 2), ("retirer".to_owned(), 1)];
        let found: Vec<_> = LoopState::all(&pauses, &sessions)
            .into_iter()
            .map(|state| (state.loop_kind, state.workers, state.pauses.len()))
            .collect();
        let expected = [
            (LoopKind::Provisioner, 0, 0),
            (LoopKind::Initializer, 0, 0),
            (LoopKind::Recoverer, 3, 2),
            (LoopKind::Updater, 0, 0),
            (LoopKind::Cluster, 2, 0),
            (LoopKind::Retirer, 1, 0),
            (LoopKind::Switcher, 0, 0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pause_applies_to_its_loop_provider_and_time() {
        let all = pause(LoopKind::Recoverer, None, None);
        let (rack, timed) =
            (pause(LoopKind::Recoverer, Some("rack"), None), pause(LoopKind::Updater, None, Some(10)));
        for (pauses, of, provider, minute, expected) in [
            (vec![], LoopKind::Recoverer, "rack", 1, None),
            (vec![all.clone()], LoopKind::Recoverer, "rack", 1, Some(PauseEnd::WhenResumed)),
            (vec![all.clone()], LoopKind::Recoverer, "", 1, Some(PauseEnd::WhenResumed)),
            (vec![all.clone()], LoopKind::Initializer, "rack", 1, None),
            (vec![rack.clone()], LoopKind::Recoverer, "rack", 1, Some(PauseEnd::WhenResumed)),
            (vec![rack.clone()], LoopKind::Recoverer, "rack2", 1, None),
            (vec![timed.clone()], LoopKind::Updater, "rack", 9, Some(PauseEnd::Until(at(10)))),
            (vec![timed.clone()], LoopKind::Updater, "rack", 10, None),
            // The later end counts, and no end counts as the latest.
            (
                vec![timed.clone(), pause(LoopKind::Updater, Some("rack"), Some(20))],
                LoopKind::Updater,
                "rack",
                1,
                Some(PauseEnd::Until(at(20))),
            ),
            (
                vec![timed.clone(), pause(LoopKind::Updater, Some("rack"), None)],
                LoopKind::Updater,
                "rack",
                1,
                Some(PauseEnd::WhenResumed),
            ),
        ] {
            assert_eq!(pause_end(&pauses, of, provider, at(minute)), expected, "{pauses:?} {of} {provider}");
        }
    }

    #[test]
    fn loop_continues_with_unpaused_providers() {
        let providers = ["a".to_owned(), "b".to_owned()];
        let of = LoopKind::Initializer;
        let left = |pauses: &[Pause]| unpaused_providers(pauses, of, &providers, at(1));
        assert_eq!(left(&[]), providers);
        assert_eq!(left(&[pause(of, Some("a"), None)]), ["b".to_owned()]);
        assert!(left(&[pause(of, None, None)]).is_empty());
    }

    #[test]
    fn description_says_who_why_until_when_and_how_to_resume() {
        let rack = pause(LoopKind::Recoverer, Some("rack a"), Some(60));
        let text = rack.describe(at(30));
        for part in ["the recoverer of rack a ", "by kim ", "the switch is changed", "in 30m"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert_eq!(rack.resume_command(), "shepherdctl loops resume recoverer --provider 'rack a'");
        let all = pause(LoopKind::Provisioner, None, None);
        assert!(all.describe(at(30)).contains("until it is resumed"));
        assert_eq!(all.resume_command(), "shepherdctl loops resume provisioner");
        let clusters = pause(LoopKind::Cluster, None, None).describe(at(30));
        assert!(clusters.starts_with("the loop cluster was paused by kim "), "{clusters}");
    }

    #[test]
    fn loop_reads_its_name_back() {
        for of in LoopKind::ALL {
            assert_eq!(of.as_str().parse::<LoopKind>().unwrap(), of);
        }
        assert!("recovery".parse::<LoopKind>().is_err());
    }
}
