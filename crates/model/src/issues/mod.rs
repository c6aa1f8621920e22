//! Issues: problems derived from the facts each time they are queried.
//!
//! Nothing stores an issue, so none is ever stale. [`find_issues`] is a pure function of one snapshot of the fleet
//! ([`IssueInputs`]), which includes the policy and the time. An issue disappears when its cause does.
//!
//! Each kind has a name that never changes ([`IssueKind::id`]) and a page of that name, `docs/issues/ID.md`, that says
//! what it means, how it is found and what to do. A test checks that every kind has its page.
//!
//! * [`inputs`]: the snapshot that issues are derived from.
//! * `clusters`: issues of clusters. `kubernetes`: issues of their Kubernetes.
//! * `machines`: issues of single machines.
//! * `retirement`: issues of machines that are retiring or retired.
//! * `duplicates`: values that two machines share and must not.
//! * `database`: issues of the database server and its limits.
//! * `infrastructure`: issues of providers, the database, shepherds and ourselves.
//! * `two_person_rule`: issues of the two-person rule and its admins.
//! * `version_faults`: versions of other programs with a published fault.
//!
//! # How to add a kind
//!
//! Add it to [`IssueKind`], with its page, and add a rule to the file that its cause belongs to. If many machines have
//! the same problem at once, report one issue that counts them: nobody reads a list of ten thousand lines.

use serde::Serialize;

use crate::issues::inputs::IssueInputs;
use crate::machine_view::MachineName;
use crate::time::Timestamp;

mod clusters;
mod database;
mod duplicates;
mod infrastructure;
pub mod inputs;
mod kubernetes;
mod machines;
mod retirement;
#[cfg(test)]
mod tests;
mod two_person_rule;
mod version_faults;

/// How soon an operator should look.
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
    /// Its name in the API and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

/// Kinds of issues, sorted by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "each is its name, and has a page that says what it means")]
pub enum IssueKind {
    AddressConflict,
    AgentUnit,
    ArtefactStorage,
    AuthorityReplacements,
    AuthorityRotationHeld,
    Brake,
    BudgetExhausted,
    CertificateEnds,
    CertificateRejected,
    ClockSkew,
    ClusterEtcdFull,
    ClusterEtcdLarge,
    ClusterImageOld,
    ClusterKeyRefused,
    ClusterNotFounded,
    ClusterSnapshotOld,
    ConnectionsTurnedAway,
    CrashLoop,
    DatabaseDurability,
    DatabaseLimitsUnreadable,
    DeadRows,
    DeclarationRefused,
    Drift,
    DuplicateKey,
    DuplicateMac,
    DuplicateSerial,
    FewAdmins,
    FileRefused,
    HostKeyChanged,
    KubernetesComponentUnwell,
    KubernetesObjectClash,
    KubernetesRotationHeld,
    LongSnapshot,
    LoopPaused,
    LostWorkers,
    MachinesNotAdopted,
    NeedsHuman,
    NewerFence,
    NobodyListens,
    NodeProblem,
    NoShepherd,
    OpenFiles,
    OutdatedAgent,
    ProviderDiscrepancy,
    ProviderFails,
    ReleaseRefused,
    ReplicationSlot,
    RetiredListed,
    RetirementStuck,
    SecretsKeyHeld,
    SessionFlapping,
    ShortWaitingTime,
    SilentAgent,
    StorageLow,
    TransactionIds,
    TwoPersonRuleOff,
    UnpinnedKeys,
    UnsignedReleases,
    VersionFault,
    WalRetained,
    WorkFails,
    WorkloadsEndWithAgent,
}

impl IssueKind {
    /// Every kind, by name.
    pub const ALL: [Self; 62] = [
        Self::AddressConflict,
        Self::AgentUnit,
        Self::ArtefactStorage,
        Self::AuthorityReplacements,
        Self::AuthorityRotationHeld,
        Self::Brake,
        Self::BudgetExhausted,
        Self::CertificateEnds,
        Self::CertificateRejected,
        Self::ClockSkew,
        Self::ClusterEtcdFull,
        Self::ClusterEtcdLarge,
        Self::ClusterImageOld,
        Self::ClusterKeyRefused,
        Self::ClusterNotFounded,
        Self::ClusterSnapshotOld,
        Self::ConnectionsTurnedAway,
        Self::CrashLoop,
        Self::DatabaseDurability,
        Self::DatabaseLimitsUnreadable,
        Self::DeadRows,
        Self::DeclarationRefused,
        Self::Drift,
        Self::DuplicateKey,
        Self::DuplicateMac,
        Self::DuplicateSerial,
        Self::FewAdmins,
        Self::FileRefused,
        Self::HostKeyChanged,
        Self::KubernetesComponentUnwell,
        Self::KubernetesObjectClash,
        Self::KubernetesRotationHeld,
        Self::LongSnapshot,
        Self::LoopPaused,
        Self::LostWorkers,
        Self::MachinesNotAdopted,
        Self::NeedsHuman,
        Self::NewerFence,
        Self::NobodyListens,
        Self::NodeProblem,
        Self::NoShepherd,
        Self::OpenFiles,
        Self::OutdatedAgent,
        Self::ProviderDiscrepancy,
        Self::ProviderFails,
        Self::ReleaseRefused,
        Self::ReplicationSlot,
        Self::RetiredListed,
        Self::RetirementStuck,
        Self::SecretsKeyHeld,
        Self::SessionFlapping,
        Self::ShortWaitingTime,
        Self::SilentAgent,
        Self::StorageLow,
        Self::TransactionIds,
        Self::TwoPersonRuleOff,
        Self::UnpinnedKeys,
        Self::UnsignedReleases,
        Self::VersionFault,
        Self::WalRetained,
        Self::WorkFails,
        Self::WorkloadsEndWithAgent,
    ];

    /// Its name, which is the name of its page too.
    #[must_use]
    pub const fn id(self) -> &'static str {
        match self {
            Self::AddressConflict => "address-conflict",
            Self::AgentUnit => "agent-unit",
            Self::ArtefactStorage => "artefact-storage",
            Self::AuthorityReplacements => "authority-replacements",
            Self::AuthorityRotationHeld => "authority-rotation-held",
            Self::Brake => "brake",
            Self::BudgetExhausted => "budget-exhausted",
            Self::CertificateEnds => "certificate-ends",
            Self::CertificateRejected => "certificate-rejected",
            Self::ClockSkew => "clock-skew",
            Self::ClusterEtcdFull => "cluster-etcd-full",
            Self::ClusterEtcdLarge => "cluster-etcd-large",
            Self::ClusterImageOld => "cluster-image-old",
            Self::ClusterKeyRefused => "cluster-key-refused",
            Self::ClusterNotFounded => "cluster-not-founded",
            Self::ClusterSnapshotOld => "cluster-snapshot-old",
            Self::ConnectionsTurnedAway => "connections-turned-away",
            Self::CrashLoop => "crash-loop",
            Self::DatabaseDurability => "database-durability",
            Self::DatabaseLimitsUnreadable => "database-limits-unreadable",
            Self::DeadRows => "dead-rows",
            Self::DeclarationRefused => "declaration-refused",
            Self::Drift => "drift",
            Self::DuplicateKey => "duplicate-key",
            Self::DuplicateMac => "duplicate-mac",
            Self::DuplicateSerial => "duplicate-serial",
            Self::FewAdmins => "few-admins",
            Self::FileRefused => "file-refused",
            Self::HostKeyChanged => "host-key-changed",
            Self::KubernetesComponentUnwell => "kubernetes-component-unwell",
            Self::KubernetesObjectClash => "kubernetes-object-clash",
            Self::KubernetesRotationHeld => "kubernetes-rotation-held",
            Self::LongSnapshot => "long-snapshot",
            Self::LoopPaused => "loop-paused",
            Self::LostWorkers => "lost-workers",
            Self::MachinesNotAdopted => "machines-not-adopted",
            Self::NeedsHuman => "needs-human",
            Self::NewerFence => "newer-fence",
            Self::NobodyListens => "nobody-listens",
            Self::NodeProblem => "node-problem",
            Self::NoShepherd => "no-shepherd",
            Self::OpenFiles => "open-files",
            Self::OutdatedAgent => "outdated-agent",
            Self::ProviderDiscrepancy => "provider-discrepancy",
            Self::ProviderFails => "provider-fails",
            Self::ReleaseRefused => "release-refused",
            Self::ReplicationSlot => "replication-slot",
            Self::RetiredListed => "retired-listed",
            Self::RetirementStuck => "retirement-stuck",
            Self::SecretsKeyHeld => "secrets-key-held",
            Self::SessionFlapping => "session-flapping",
            Self::ShortWaitingTime => "short-waiting-time",
            Self::SilentAgent => "silent-agent",
            Self::StorageLow => "storage-low",
            Self::TransactionIds => "transaction-ids",
            Self::TwoPersonRuleOff => "two-person-rule-off",
            Self::UnpinnedKeys => "unpinned-keys",
            Self::UnsignedReleases => "unsigned-releases",
            Self::VersionFault => "version-fault",
            Self::WalRetained => "wal-retained",
            Self::WorkFails => "work-fails",
            Self::WorkloadsEndWithAgent => "workloads-end-with-agent",
        }
    }

    /// How soon an operator should look.
    #[must_use]
    pub const fn severity(self) -> Severity {
        match self {
            Self::ClusterEtcdFull
            | Self::ClusterKeyRefused
            | Self::DuplicateKey
            | Self::HostKeyChanged
            | Self::NeedsHuman
            | Self::NewerFence
            | Self::NobodyListens
            | Self::NoShepherd => Severity::Critical,
            Self::AddressConflict
            | Self::AgentUnit
            | Self::ArtefactStorage
            | Self::AuthorityReplacements
            | Self::AuthorityRotationHeld
            | Self::Brake
            | Self::CertificateEnds
            | Self::CertificateRejected
            | Self::ClockSkew
            | Self::ClusterEtcdLarge
            | Self::ClusterImageOld
            | Self::ClusterNotFounded
            | Self::ClusterSnapshotOld
            | Self::ConnectionsTurnedAway
            | Self::CrashLoop
            | Self::DatabaseDurability
            | Self::DatabaseLimitsUnreadable
            | Self::DeclarationRefused
            | Self::Drift
            | Self::DuplicateSerial
            | Self::FewAdmins
            | Self::FileRefused
            | Self::KubernetesComponentUnwell
            | Self::KubernetesObjectClash
            | Self::KubernetesRotationHeld
            | Self::LongSnapshot
            | Self::LoopPaused
            | Self::LostWorkers
            | Self::NodeProblem
            | Self::OpenFiles
            | Self::ProviderDiscrepancy
            | Self::ProviderFails
            | Self::ReplicationSlot
            | Self::RetiredListed
            | Self::RetirementStuck
            | Self::SecretsKeyHeld
            | Self::SessionFlapping
            | Self::ShortWaitingTime
            | Self::SilentAgent
            | Self::StorageLow
            | Self::TransactionIds
            | Self::TwoPersonRuleOff
            | Self::ReleaseRefused
            | Self::UnpinnedKeys
            | Self::UnsignedReleases
            | Self::VersionFault
            | Self::WalRetained
            | Self::WorkFails
            | Self::WorkloadsEndWithAgent => Severity::Warning,
            Self::BudgetExhausted
            | Self::DeadRows
            | Self::DuplicateMac
            | Self::MachinesNotAdopted
            | Self::OutdatedAgent => Severity::Notice,
        }
    }
}

/// A problem that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Issue {
    /// Name of its kind, by [`IssueKind::id`].
    pub id: &'static str,
    /// How soon an operator should look.
    pub severity: Severity,
    /// What it concerns: a machine, several, a provider, a host, the database.
    pub subject: String,
    /// The machines concerned, at most [`MAX_NAMED_MACHINES`] of them.
    pub machines: Vec<MachineName>,
    /// What was found, as a sentence.
    pub message: String,
    /// Since when the problem exists, where that is known.
    pub since: Option<Timestamp>,
    /// What an operator should do, as a sentence.
    pub remedy: String,
    /// The documentation page of its kind.
    pub page: String,
}

/// Most machines that an issue names.
pub const MAX_NAMED_MACHINES: usize = 5;

impl Issue {
    fn new(
        kind: IssueKind,
        about: String,
        evidence: String,
        since: Option<Timestamp>,
        remedy: String,
    ) -> Self {
        Self {
            id: kind.id(),
            severity: kind.severity(),
            subject: about,
            machines: Vec::new(),
            message: evidence,
            since,
            remedy,
            page: format!("docs/issues/{}.md", kind.id()),
        }
    }

    /// An issue of one machine.
    fn for_machine(
        kind: IssueKind,
        name: &MachineName,
        evidence: String,
        since: Option<Timestamp>,
        remedy: String,
    ) -> Self {
        Self { machines: vec![name.clone()], ..Self::new(kind, name.short_name(), evidence, since, remedy) }
    }

    /// An issue of several machines, of which it names the first.
    fn for_machines(
        kind: IssueKind,
        mut names: Vec<MachineName>,
        evidence: String,
        since: Option<Timestamp>,
        remedy: String,
    ) -> Self {
        let count = names.len();
        names.truncate(MAX_NAMED_MACHINES);
        let mut about: Vec<String> = names.iter().map(MachineName::short_name).collect();
        if count > MAX_NAMED_MACHINES {
            about.push(format!("and {} more", count - MAX_NAMED_MACHINES));
        }
        Self { machines: names, ..Self::new(kind, about.join(", "), evidence, since, remedy) }
    }
}

/// The first few of a list, and how many more there are.
fn join_first(all: &[String]) -> String {
    let shown = all.iter().take(MAX_NAMED_MACHINES).cloned().collect::<Vec<_>>().join("; ");
    match all.len().saturating_sub(MAX_NAMED_MACHINES) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

/// All issues, most urgent first, then by kind and by subject.
#[must_use]
pub fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = machines::find_issues(evidence);
    found.extend(retirement::find_issues(evidence));
    found.extend(duplicates::find_issues(evidence));
    found.extend(clusters::find_issues(evidence));
    found.extend(kubernetes::find_issues(evidence));
    found.extend(infrastructure::find_issues(evidence));
    found.extend(database::find_issues(evidence));
    found.extend(two_person_rule::find_issues(evidence));
    found.extend(version_faults::find_issues(evidence));
    found.sort_by(|a, b| (a.severity, a.id, &a.subject).cmp(&(b.severity, b.id, &b.subject)));
    found
}
