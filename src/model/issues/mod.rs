//! What is wrong: issues, derived from the facts each time that somebody asks.
//!
//! Nothing stores an issue, so none is ever stale: [`issues`] is a pure function of one look at the fleet
//! ([`Evidence`]), the policy that it holds and its moment. An issue goes when its cause does.
//!
//! Each kind has a name that never changes ([`Kind::id`]) and a page of that name, `docs/issues/ID.md`,
//! that says what it means, how it is found and what to do; a test holds pages and kinds together.
//!
//! * [`evidence`]: what is looked at.
//! * `clusters`: what is wrong with a cluster. `kubernetes`: with its Kubernetes.
//! * `machines`: what is wrong with one machine.
//! * `leaving`: what is wrong with one on its way out, or out.
//! * `pairs`: what two machines have in common and must not.
//! * `surroundings`: what is wrong with providers, the database, shepherds and ourselves.
//!
//! # For the next kind
//!
//! Add it to [`Kind`], with its page; give it a rule in the file that its cause belongs to. What is the
//! same for many machines at once is one issue that counts them: a list of ten thousand lines tells
//! nobody anything.

use serde::Serialize;

use crate::model::issues::evidence::Evidence;
use crate::model::machine_view::MachineName;
use crate::model::time::Timestamp;

mod clusters;
pub mod evidence;
mod kubernetes;
mod leaving;
mod machines;
mod pairs;
mod surroundings;
#[cfg(test)]
mod tests;

/// How soon somebody should look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Now: something cannot work before a person acts.
    Critical,
    /// Today: something works worse, or will stop.
    Warning,
    /// When there is time.
    Notice,
}

impl Severity {
    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "each is its name, and has a page that says what it means")]
pub enum Kind {
    AddressConflict,
    Brake,
    BudgetExhausted,
    CertificateEnds,
    ClockSkew,
    ClusterKeyRefused,
    ClusterSnapshotOld,
    CrashLoop,
    DeadRows,
    Drift,
    DuplicateKey,
    DuplicateMac,
    DuplicateSerial,
    HostKeyChanged,
    KubernetesComponentUnwell,
    KubernetesObjectClash,
    KubernetesRotationHeld,
    LongSnapshot,
    LoopPaused,
    LostWorkers,
    NeedsHuman,
    NewerFence,
    NobodyListens,
    NoShepherd,
    OutdatedAgent,
    ProviderDiscrepancy,
    ProviderFails,
    RetiredListed,
    RetirementStuck,
    SessionFlapping,
    SilentAgent,
    WorkFails,
}

impl Kind {
    /// Every kind, by name.
    pub const ALL: [Self; 32] = [
        Self::AddressConflict,
        Self::Brake,
        Self::BudgetExhausted,
        Self::CertificateEnds,
        Self::ClockSkew,
        Self::ClusterKeyRefused,
        Self::ClusterSnapshotOld,
        Self::CrashLoop,
        Self::DeadRows,
        Self::Drift,
        Self::DuplicateKey,
        Self::DuplicateMac,
        Self::DuplicateSerial,
        Self::HostKeyChanged,
        Self::KubernetesComponentUnwell,
        Self::KubernetesObjectClash,
        Self::KubernetesRotationHeld,
        Self::LongSnapshot,
        Self::LoopPaused,
        Self::LostWorkers,
        Self::NeedsHuman,
        Self::NewerFence,
        Self::NobodyListens,
        Self::NoShepherd,
        Self::OutdatedAgent,
        Self::ProviderDiscrepancy,
        Self::ProviderFails,
        Self::RetiredListed,
        Self::RetirementStuck,
        Self::SessionFlapping,
        Self::SilentAgent,
        Self::WorkFails,
    ];

    /// Its name, which is that of its page too.
    #[must_use]
    pub const fn id(self) -> &'static str {
        match self {
            Self::AddressConflict => "address-conflict",
            Self::Brake => "brake",
            Self::BudgetExhausted => "budget-exhausted",
            Self::CertificateEnds => "certificate-ends",
            Self::ClockSkew => "clock-skew",
            Self::ClusterKeyRefused => "cluster-key-refused",
            Self::ClusterSnapshotOld => "cluster-snapshot-old",
            Self::CrashLoop => "crash-loop",
            Self::DeadRows => "dead-rows",
            Self::Drift => "drift",
            Self::DuplicateKey => "duplicate-key",
            Self::DuplicateMac => "duplicate-mac",
            Self::DuplicateSerial => "duplicate-serial",
            Self::HostKeyChanged => "host-key-changed",
            Self::KubernetesComponentUnwell => "kubernetes-component-unwell",
            Self::KubernetesObjectClash => "kubernetes-object-clash",
            Self::KubernetesRotationHeld => "kubernetes-rotation-held",
            Self::LongSnapshot => "long-snapshot",
            Self::LoopPaused => "loop-paused",
            Self::LostWorkers => "lost-workers",
            Self::NeedsHuman => "needs-human",
            Self::NewerFence => "newer-fence",
            Self::NobodyListens => "nobody-listens",
            Self::NoShepherd => "no-shepherd",
            Self::OutdatedAgent => "outdated-agent",
            Self::ProviderDiscrepancy => "provider-discrepancy",
            Self::ProviderFails => "provider-fails",
            Self::RetiredListed => "retired-listed",
            Self::RetirementStuck => "retirement-stuck",
            Self::SessionFlapping => "session-flapping",
            Self::SilentAgent => "silent-agent",
            Self::WorkFails => "work-fails",
        }
    }

    /// How soon somebody should look.
    #[must_use]
    pub const fn severity(self) -> Severity {
        match self {
            Self::ClusterKeyRefused
            | Self::DuplicateKey
            | Self::HostKeyChanged
            | Self::NeedsHuman
            | Self::NewerFence
            | Self::NobodyListens
            | Self::NoShepherd => Severity::Critical,
            Self::AddressConflict
            | Self::Brake
            | Self::CertificateEnds
            | Self::ClockSkew
            | Self::ClusterSnapshotOld
            | Self::CrashLoop
            | Self::Drift
            | Self::DuplicateSerial
            | Self::KubernetesComponentUnwell
            | Self::KubernetesObjectClash
            | Self::KubernetesRotationHeld
            | Self::LongSnapshot
            | Self::LoopPaused
            | Self::LostWorkers
            | Self::ProviderDiscrepancy
            | Self::ProviderFails
            | Self::RetiredListed
            | Self::RetirementStuck
            | Self::SessionFlapping
            | Self::SilentAgent
            | Self::WorkFails => Severity::Warning,
            Self::BudgetExhausted | Self::DeadRows | Self::DuplicateMac | Self::OutdatedAgent => {
                Severity::Notice
            }
        }
    }
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Issue {
    /// Its kind's name.
    pub id: &'static str,
    /// How soon somebody should look.
    pub severity: Severity,
    /// What it is about: a machine, several, a provider, a host, the database.
    pub about: String,
    /// The machines, at most [`NAMED`] of them.
    pub machines: Vec<MachineName>,
    /// What was found, as a sentence.
    pub evidence: String,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
    /// What to do.
    pub remedy: String,
    /// The page that says more.
    pub page: String,
}

/// Machines that an issue names at most.
pub const NAMED: usize = 5;

impl Issue {
    fn new(kind: Kind, about: String, evidence: String, since: Option<Timestamp>, remedy: String) -> Self {
        Self {
            id: kind.id(),
            severity: kind.severity(),
            about,
            machines: Vec::new(),
            evidence,
            since,
            remedy,
            page: format!("docs/issues/{}.md", kind.id()),
        }
    }

    /// About one machine.
    fn of(
        kind: Kind,
        name: &MachineName,
        evidence: String,
        since: Option<Timestamp>,
        remedy: String,
    ) -> Self {
        Self { machines: vec![name.clone()], ..Self::new(kind, name.short(), evidence, since, remedy) }
    }

    /// About several machines, of which it names the first.
    fn of_several(
        kind: Kind,
        mut names: Vec<MachineName>,
        evidence: String,
        since: Option<Timestamp>,
        remedy: String,
    ) -> Self {
        let count = names.len();
        names.truncate(NAMED);
        let mut about: Vec<String> = names.iter().map(MachineName::short).collect();
        if count > NAMED {
            about.push(format!("and {} more", count - NAMED));
        }
        Self { machines: names, ..Self::new(kind, about.join(", "), evidence, since, remedy) }
    }
}

/// Everything that is wrong, most urgent first, then by kind and by what it is about.
#[must_use]
pub fn issues(evidence: &Evidence) -> Vec<Issue> {
    let mut found = machines::found(evidence);
    found.extend(leaving::found(evidence));
    found.extend(pairs::found(evidence));
    found.extend(clusters::found(evidence));
    found.extend(kubernetes::found(evidence));
    found.extend(surroundings::found(evidence));
    found.sort_by(|a, b| (a.severity, a.id, &a.about).cmp(&(b.severity, b.id, &b.about)));
    found
}
