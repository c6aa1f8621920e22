//! Loops that people paused: which, whose, since when, until when and why.
//!
//! A paused loop begins nothing: it claims no machine, and a paused provisioner makes no pass. What it has
//! begun goes on. A pause is of one provider's machines or of all; both can hold at once, and then a machine
//! waits for the later end of the two. Clusters have no provider, and are paused all together. Nothing here stops the clock of anything: silence is noticed, backoffs
//! run out, and when the loop is resumed everything that came due meanwhile is due.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::model::process::{Process, UnknownName};
use crate::model::shell_words;
use crate::model::telling::{absolute, both, relative};
use crate::model::time::Timestamp;

/// A loop, as its flags, metrics and sessions call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Loop {
    /// Puts the role server on machines.
    Initializer,
    /// Brings back machines that fell silent.
    Recoverer,
    /// Asks providers what they know of machines.
    Updater,
    /// Brings providers' machines into the BMDB.
    Provisioner,
    /// Gives machines back to their providers.
    Retirer,
    /// Reboots machines and switches their power, as people order.
    Switcher,
    /// Makes machines nodes of clusters, and sees to it that those have what they are to have.
    Cluster,
}

impl Loop {
    /// All of them, in the order in which a machine meets them.
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

    /// Whether it works on machines of providers, and may be paused for one of them alone.
    #[must_use]
    pub const fn has_providers(self) -> bool {
        !matches!(self, Self::Cluster)
    }

    /// The loop that does this.
    #[must_use]
    pub const fn of(process: Process) -> Self {
        match process {
            Process::AgentStart => Self::Initializer,
            Process::Recovery => Self::Recoverer,
            Process::Update => Self::Updater,
            Process::Retirement => Self::Retirer,
            Process::Power => Self::Switcher,
        }
    }
}

impl fmt::Display for Loop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Loop {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "loop",
            name: name.to_owned(),
            known: "provisioner, initializer, recoverer, updater, cluster, retirer, switcher",
        })
    }
}

/// A pause that holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pause {
    /// Which loop.
    #[serde(rename = "loop")]
    pub of: Loop,
    /// Whose machines; `null` is everybody's.
    pub provider: Option<String>,
    /// Why.
    pub reason: String,
    /// Who paused it.
    pub by: String,
    /// Since when.
    pub since: Timestamp,
    /// When it ends by itself; `null` is when it is resumed.
    pub until: Option<Timestamp>,
}

/// A loop, over all shepherds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopState {
    /// Which.
    pub of: Loop,
    /// Open sessions of its workers.
    pub workers: i64,
    /// Pauses that hold.
    pub pauses: Vec<Pause>,
}

impl LoopState {
    /// Every loop, from the pauses that hold and the open sessions of each component.
    #[must_use]
    pub fn all(pauses: &[Pause], sessions: &[(String, i64)]) -> Vec<Self> {
        let workers = |of: Loop| sessions.iter().find(|(component, _)| component == of.as_str());
        Loop::ALL
            .into_iter()
            .map(|of| Self {
                of,
                workers: workers(of).map_or(0, |(_, count)| *count),
                pauses: pauses.iter().filter(|pause| pause.of == of).cloned().collect(),
            })
            .collect()
    }
}

/// Until when a loop begins nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Paused {
    /// Up to this moment.
    Until(Timestamp),
    /// Until somebody resumes it.
    Resumed,
}

impl Pause {
    /// Whether it holds this provider's machines at this moment. A machine of no provider is held by a pause of
    /// all.
    #[must_use]
    pub fn holds(&self, of: Loop, provider: &str, now: Timestamp) -> bool {
        self.of == of
            && self.provider.as_deref().is_none_or(|paused| paused == provider)
            && self.until.is_none_or(|until| until > now)
    }

    /// What is paused, in a sentence: "the recoverer of rack-a".
    #[must_use]
    pub fn what(&self) -> String {
        what(self.of, self.provider.as_deref())
    }

    /// The pause as a sentence.
    #[must_use]
    pub fn sentence(&self, now: Timestamp) -> String {
        let until = self.until.map_or_else(
            || "until it is resumed".to_owned(),
            |at| format!("until {} ({})", absolute(at), relative(at, now)),
        );
        format!(
            "{} was paused by {} {}, {until}: {}",
            self.what(),
            self.by,
            both(self.since, now),
            self.reason
        )
    }

    /// The command that ends it.
    #[must_use]
    pub fn resume(&self) -> String {
        resume(self.of, self.provider.as_deref())
    }
}

/// A loop and whose machines, in a sentence.
#[must_use]
pub fn what(of: Loop, provider: Option<&str>) -> String {
    match provider {
        Some(provider) => format!("the {of} of {provider}"),
        None if of.has_providers() => format!("the {of}"),
        None => format!("the loop {of}"),
    }
}

/// The command that ends a pause of a loop.
#[must_use]
pub fn resume(of: Loop, provider: Option<&str>) -> String {
    provider.map_or_else(
        || format!("shepherdctl loops resume {of}"),
        |provider| format!("shepherdctl loops resume {of} --provider {}", shell_words::word(provider)),
    )
}

/// Every pause that holds a provider's machines in a loop at this moment, that of all providers first.
pub fn holding<'a>(
    pauses: &'a [Pause],
    of: Loop,
    provider: &'a str,
    now: Timestamp,
) -> impl Iterator<Item = &'a Pause> {
    let held = move |all: bool| {
        pauses.iter().filter(move |pause| pause.provider.is_none() == all && pause.holds(of, provider, now))
    };
    held(true).chain(held(false))
}

/// Until when a loop begins nothing on a provider's machines, if it is paused at this moment.
#[must_use]
pub fn paused(pauses: &[Pause], of: Loop, provider: &str, now: Timestamp) -> Option<Paused> {
    holding(pauses, of, provider, now).map(|pause| pause.until.map_or(Paused::Resumed, Paused::Until)).max()
}

/// Those of `providers` on whose machines a loop may begin something.
#[must_use]
pub fn not_paused(pauses: &[Pause], of: Loop, providers: &[String], now: Timestamp) -> Vec<String> {
    let runs = |provider: &&String| paused(pauses, of, provider, now).is_none();
    providers.iter().filter(runs).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::{Span, after};

    fn at(minutes: u64) -> Timestamp {
        after(Timestamp::UNIX_EPOCH, Span::minutes(minutes).0)
    }

    fn pause(of: Loop, provider: Option<&str>, until: Option<u64>) -> Pause {
        Pause {
            of,
            provider: provider.map(str::to_owned),
            reason: "the switch is changed".to_owned(),
            by: "kim".to_owned(),
            since: at(0),
            until: until.map(at),
        }
    }

    #[test]
    fn every_loop_is_there_with_its_own_workers_and_pauses() {
        let pauses = [pause(Loop::Recoverer, None, None), pause(Loop::Recoverer, Some("rack"), Some(9))];
        let sessions = [("recoverer".to_owned(), 3), ("cluster".to_owned(), 2), ("retirer".to_owned(), 1)];
        let found: Vec<_> = LoopState::all(&pauses, &sessions)
            .into_iter()
            .map(|state| (state.of, state.workers, state.pauses.len()))
            .collect();
        let expected = [
            (Loop::Provisioner, 0, 0),
            (Loop::Initializer, 0, 0),
            (Loop::Recoverer, 3, 2),
            (Loop::Updater, 0, 0),
            (Loop::Cluster, 2, 0),
            (Loop::Retirer, 1, 0),
            (Loop::Switcher, 0, 0),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn pause_holds_its_loop_its_provider_and_its_time() {
        let all = pause(Loop::Recoverer, None, None);
        let (rack, timed) =
            (pause(Loop::Recoverer, Some("rack"), None), pause(Loop::Updater, None, Some(10)));
        for (pauses, of, provider, minute, expected) in [
            (vec![], Loop::Recoverer, "rack", 1, None),
            (vec![all.clone()], Loop::Recoverer, "rack", 1, Some(Paused::Resumed)),
            (vec![all.clone()], Loop::Recoverer, "", 1, Some(Paused::Resumed)),
            (vec![all.clone()], Loop::Initializer, "rack", 1, None),
            (vec![rack.clone()], Loop::Recoverer, "rack", 1, Some(Paused::Resumed)),
            (vec![rack.clone()], Loop::Recoverer, "rack2", 1, None),
            (vec![timed.clone()], Loop::Updater, "rack", 9, Some(Paused::Until(at(10)))),
            (vec![timed.clone()], Loop::Updater, "rack", 10, None),
            // The later end counts, and an end later than none there is.
            (
                vec![timed.clone(), pause(Loop::Updater, Some("rack"), Some(20))],
                Loop::Updater,
                "rack",
                1,
                Some(Paused::Until(at(20))),
            ),
            (
                vec![timed.clone(), pause(Loop::Updater, Some("rack"), None)],
                Loop::Updater,
                "rack",
                1,
                Some(Paused::Resumed),
            ),
        ] {
            assert_eq!(paused(&pauses, of, provider, at(minute)), expected, "{pauses:?} {of} {provider}");
        }
    }

    #[test]
    fn loop_goes_on_with_the_providers_that_are_left() {
        let providers = ["a".to_owned(), "b".to_owned()];
        let of = Loop::Initializer;
        let left = |pauses: &[Pause]| not_paused(pauses, of, &providers, at(1));
        assert_eq!(left(&[]), providers);
        assert_eq!(left(&[pause(of, Some("a"), None)]), ["b".to_owned()]);
        assert!(left(&[pause(of, None, None)]).is_empty());
    }

    #[test]
    fn sentence_says_who_why_and_until_when_and_how_to_end_it() {
        let rack = pause(Loop::Recoverer, Some("rack a"), Some(60));
        let said = rack.sentence(at(30));
        for part in ["the recoverer of rack a ", "by kim ", "the switch is changed", "in 30m"] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
        assert_eq!(rack.resume(), "shepherdctl loops resume recoverer --provider 'rack a'");
        let all = pause(Loop::Provisioner, None, None);
        assert!(all.sentence(at(30)).contains("until it is resumed"));
        assert_eq!(all.resume(), "shepherdctl loops resume provisioner");
        let clusters = pause(Loop::Cluster, None, None).sentence(at(30));
        assert!(clusters.starts_with("the loop cluster was paused by kim "), "{clusters}");
    }

    #[test]
    fn loop_reads_its_name_back() {
        for of in Loop::ALL {
            assert_eq!(of.as_str().parse::<Loop>().unwrap(), of);
        }
        assert!("recovery".parse::<Loop>().is_err());
    }
}
