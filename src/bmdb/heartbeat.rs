//! Heartbeats: what one of them means for what is known of its machine.
//!
//! Nearly every heartbeat says "I still live" and changes a time; those are
//! stored in groups, see `group_commit.rs`. This file is about the others, each
//! of which is a transaction under the machine's lock that changes facts and
//! writes the schedule anew: the first heartbeat ever, the first of a boot, one
//! of a machine that was thought silent or waits for a person, one that carries a report, and the ones
//! that are refused.
//!
//! # Which heartbeat is newer
//!
//! Within a boot, `sequence` (milliseconds since boot) says so. A heartbeat with
//! the number that is stored is the same one sent again, because its answer was
//! lost: it is answered again, and nothing is written.
//!
//! Between boots nothing says so: a boot id is a random UUID. So the boot before
//! the present one is kept. A boot ends for good when the next one begins,
//! therefore a heartbeat of the kept boot can only be late, whatever its number,
//! and is refused. Were it taken for a new boot, a recovery that waits for
//! another boot id as its proof would end with a machine that is down, and the
//! two boots would then replace each other with every heartbeat in flight. One
//! remembered boot is enough: an agent gives a call up after ten seconds, and no
//! machine boots twice in that time. Two machines cloned from one disk, key and
//! all, are told apart by the same rule: the one that was heard first is refused
//! from the moment the other is heard, instead of both being believed in turns.
//! Unless we put the agent on it since: then we spoke to that boot ourselves, and
//! it is the present one.
//!
//! # Whose it is
//!
//! The machine id must be that of a machine whose agent was started with the key
//! that the connection proved. Whichever is wrong, the answer is the same. Where both are right and the
//! machine is retired, its agent is told so: it is nobody else's business, and nobody else can ask.

use std::sync::Arc;

use sqlx::PgConnection;

use crate::bmdb::change::{FactChange, NewHardwareReport, NewHeartbeat, apply};
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::newer_fence::newer_fence;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{lock, reschedule, tell};
use crate::model::cluster::state::Report;
use crate::model::facts::MachineFacts;
use crate::model::ids::MachineId;
use crate::model::needs_human::{Healing, healing};
use crate::model::phase::{Phase, phase_of};
use crate::model::policy::Policy;
use crate::model::process::{Lane, Process};
use crate::model::release::Report as ReleaseReport;
use crate::model::time::Timestamp;

/// What an agent says, checked for form but not yet for whose it is.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    /// The machine it says it is.
    pub machine: MachineId,
    /// The Ed25519 key that the connection proved.
    pub public_key: [u8; 32],
    /// Boot, agent process, number and version.
    pub beat: NewHeartbeat,
    /// What the machine is made of, if it says.
    pub hardware: Option<NewHardwareReport>,
    /// What became of an installation, if it says.
    pub installation: Option<InstallationOutcome>,
    /// Where its machine stands with its cluster, if it says.
    pub cluster: Option<Report>,
    /// Which release its agent is, if it says.
    pub release: Option<ReleaseReport>,
    /// The highest fence of the access lane that its machine has seen; 0 when it does not say.
    pub access_fence: i64,
}

impl Heartbeat {
    /// Whether it carries something that must be durable before the answer.
    #[must_use]
    pub const fn has_report(&self) -> bool {
        self.hardware.is_some()
            || self.installation.is_some()
            || self.cluster.is_some()
            || self.release.is_some()
    }

    /// The same, saying only that the agent lives.
    #[must_use]
    pub fn without_report(&self) -> Self {
        Self { hardware: None, installation: None, cluster: None, release: None, ..self.clone() }
    }
}

/// What became of an installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallationOutcome {
    /// The request it answers.
    pub generation: i64,
    /// Why it failed; `None` when it did not.
    pub error: Option<String>,
}

/// What became of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stored, with everything it carried.
    Stored(Wants),
    /// It was stored before; nothing was written.
    Repeated(Wants),
    /// A newer one is stored; nothing was written.
    Stale,
    /// No machine of that id has an agent with that key; nothing was written.
    Unauthenticated,
    /// The machine and its key belong together, and it is retired; nothing was written.
    Retired,
}

/// What the agent should do next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Send a hardware report: none of this agent process is stored.
    pub hardware_report: bool,
    /// Install this.
    pub installation: Option<PendingInstallation>,
    /// Do this about a cluster.
    pub cluster: Option<PendingClusterOrder>,
    /// Become this release.
    pub release: Option<PendingRelease>,
    /// Somebody asks for its logs ([`Bmdb::hand_logs`]).
    pub logs: bool,
}

/// What a plain heartbeat that was stored is answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plain {
    /// What the agent should do next.
    pub wants: Wants,
    /// The highest fence of the machine's access lane that this BMDB has given.
    pub known_fence: i64,
}

/// An installation that was asked for and not reported on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingInstallation {
    /// Version of the request.
    pub generation: i64,
    /// Where the artefact is.
    pub artefact_url: String,
    /// Its SHA-256.
    pub artefact_sha256: Vec<u8>,
}

/// Another release of the role server that was asked for and not reported on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRelease {
    /// Which of the machine's orders.
    pub generation: i64,
    /// SHA-256 of the program.
    pub sha256: Vec<u8>,
    /// How long it may take, in seconds.
    pub deadline_seconds: i64,
}

impl PendingRelease {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        sha256: Option<Vec<u8>>,
        deadline_seconds: Option<i64>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, sha256: sha256?, deadline_seconds: deadline_seconds? })
    }
}

/// An order about a cluster that was given and not reported on.
#[derive(Clone, PartialEq, Eq)]
pub struct PendingClusterOrder {
    /// Which of the machine's orders.
    pub generation: i64,
    /// It, sealed.
    pub sealed: Vec<u8>,
}

impl std::fmt::Debug for PendingClusterOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingClusterOrder").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl PendingClusterOrder {
    pub(crate) fn from_columns(generation: Option<i64>, sealed: Option<Vec<u8>>) -> Option<Self> {
        Some(Self { generation: generation?, sealed: sealed? })
    }
}

impl PendingInstallation {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        artefact_url: Option<String>,
        artefact_sha256: Option<Vec<u8>>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, artefact_url: artefact_url?, artefact_sha256: artefact_sha256? })
    }
}

/// What a heartbeat is judged by besides the facts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// The boot before the one in the facts.
    pub(crate) previous_boot_id: Option<String>,
    /// The agent process whose hardware report is stored.
    pub(crate) report_incarnation: Option<String>,
    /// Where the machine stood with its cluster, as it said last.
    pub(crate) cluster: Option<Report>,
    /// Which release its agent is, as it said last.
    pub(crate) release: Option<ReleaseReport>,
}

impl Known {
    /// Whether this is another standing than the stored one. A machine that never had to do with clusters says so
    /// with each report, and that is nothing to keep.
    fn is_news(&self, said: &Report) -> bool {
        match &self.cluster {
            Some(known) => known != said,
            None => *said != Report::default(),
        }
    }
}

/// What a heartbeat is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Of another machine or key than it says.
    Unauthenticated,
    /// Of a machine that is retired.
    Retired,
    /// Older than what is stored, or another one with the same number.
    Stale,
    /// The stored one, sent again.
    Repeated,
    /// News.
    Accepted {
        /// The line it is worth in the machine's history, if it is.
        event: Option<(&'static str, String)>,
    },
}

/// What `heartbeat` is to a machine of which `facts` are known and which is in `phase`. Pure.
pub(crate) fn judge(facts: &MachineFacts, phase: Phase, known: &Known, heartbeat: &Heartbeat) -> Verdict {
    let key_is_right =
        facts.agent_started.as_ref().is_some_and(|agent| agent.public_key == heartbeat.public_key);
    if !key_is_right {
        return Verdict::Unauthenticated;
    }
    if phase == Phase::Retired {
        return Verdict::Retired;
    }
    let beat = &heartbeat.beat;
    let Some(stored) = &facts.heartbeat else {
        let detail = format!("agent {} reports from boot {}", beat.version, beat.boot_id);
        return Verdict::Accepted { event: Some(("FirstHeartbeat", detail)) };
    };
    if stored.boot_id != beat.boot_id {
        if known.previous_boot_id.as_ref() == Some(&beat.boot_id)
            && !enrolled_in(facts, &beat.boot_id, stored.at)
        {
            return Verdict::Stale;
        }
        let detail = format!("boot {}, was {}", beat.boot_id, stored.boot_id);
        return Verdict::Accepted { event: Some(("Booted", detail)) };
    }
    if beat.sequence > stored.sequence {
        let was_lost = matches!(phase, Phase::Silent | Phase::Recovering);
        let event = was_lost.then(|| ("HeardAgain", format!("from the same boot {}", beat.boot_id)));
        return Verdict::Accepted { event };
    }
    if beat.sequence == stored.sequence
        && beat.incarnation == stored.incarnation
        && reports_are_stored(facts, known, heartbeat)
    {
        return Verdict::Repeated;
    }
    Verdict::Stale
}

/// Whether the agent was enrolled in that boot after the last report, which then is of a boot before.
fn enrolled_in(facts: &MachineFacts, boot: &str, reported: Timestamp) -> bool {
    facts
        .agent_started
        .as_ref()
        .is_some_and(|agent| agent.boot_id.as_deref() == Some(boot) && agent.at > reported)
}

/// Whether everything that a repeated heartbeat carries was stored the first time. If not it is no
/// repetition: to answer it like one would call a report durable that was never written.
fn reports_are_stored(facts: &MachineFacts, known: &Known, heartbeat: &Heartbeat) -> bool {
    let hardware = heartbeat
        .hardware
        .as_ref()
        .is_none_or(|report| known.report_incarnation.as_ref() == Some(&report.incarnation));
    let installation =
        heartbeat.installation.as_ref().is_none_or(|outcome| !installation_is_news(facts, outcome));
    let cluster = heartbeat.cluster.as_ref().is_none_or(|said| !known.is_news(said));
    let release = heartbeat.release.as_ref().is_none_or(|said| known.release.as_ref() == Some(said));
    hardware && installation && cluster && release
}

/// Whether an outcome answers what is asked for, for the first time. One of an older request is late,
/// and obeyed no more: written over the report of the present request it would start that installation
/// again.
fn installation_is_news(facts: &MachineFacts, outcome: &InstallationOutcome) -> bool {
    facts.installation_request.is_some_and(|request| request.generation == outcome.generation)
        && facts.installation_report.is_none_or(|report| report.generation != outcome.generation)
}

/// The changes that an accepted heartbeat makes.
fn changes_of(facts: &MachineFacts, known: &Known, heartbeat: &Heartbeat) -> Vec<FactChange> {
    let mut changes = vec![FactChange::Heartbeat(heartbeat.beat.clone())];
    changes.extend(heartbeat.hardware.clone().map(FactChange::HardwareReport));
    let news = heartbeat.installation.as_ref().filter(|outcome| installation_is_news(facts, outcome));
    changes.extend(news.map(|outcome| FactChange::InstallationReport {
        generation: outcome.generation,
        error: outcome.error.clone(),
    }));
    let standing = heartbeat.cluster.clone().filter(|said| known.is_news(said));
    changes.extend(standing.map(FactChange::ClusterReport));
    let release = heartbeat.release.clone().filter(|said| known.release.as_ref() != Some(said));
    changes.extend(release.map(FactChange::ReleaseReport));
    changes
}

/// What an accepted heartbeat changes for a machine that waits for a person, and the line that tells it.
fn heal(
    facts: &MachineFacts,
    policy: &Policy,
    now: Timestamp,
) -> (Vec<FactChange>, Option<(&'static str, String)>) {
    let limit = policy.recovery_silence_timeout;
    match (healing(facts, policy, now), &facts.needs_human) {
        (Some(Healing::Begins), _) => {
            let detail = format!(
                "it waits for a person, and is taken back when it has reported for {limit} without a gap"
            );
            (vec![FactChange::NeedsHumanHeard], Some(("HeardAgain", detail)))
        }
        (Some(Healing::Done), Some(waited)) => {
            let mut changes =
                vec![FactChange::NeedsHumanCleared, FactChange::BackoffCleared(Process::Recovery)];
            changes.extend(facts.recovery.as_ref().map(|_| FactChange::RecoveryCleared));
            let detail = format!(
                "it has reported for {limit} without a gap; it waited for a person because {}",
                waited.reason
            );
            (changes, Some(("Healed", detail)))
        }
        _ => (Vec::new(), None),
    }
}

impl Bmdb {
    /// Judges one heartbeat under its machine's lock, and stores it with what it carries.
    pub async fn store_heartbeat(&self, heartbeat: Arc<Heartbeat>) -> Result<Outcome, BmdbError> {
        let bmdb = self.clone();
        let (machine, fence) = (heartbeat.machine, heartbeat.access_fence);
        let stored = self
            .transact("storing a heartbeat", move |tx| {
                let (bmdb, heartbeat) = (bmdb.clone(), heartbeat.clone());
                Box::pin(async move { store(&bmdb, tx, &heartbeat).await })
            })
            .await;
        match stored {
            Err(BmdbError::NoSuchMachine(_)) => Ok(Outcome::Unauthenticated),
            Err(error) => Err(error),
            Ok((outcome, newer_fence)) => {
                if newer_fence {
                    self.warn_of_newer_fence(machine, fence);
                }
                Ok(outcome)
            }
        }
    }

    /// Where agents can report: the endpoints of every callback server alive, sorted, each once.
    pub async fn live_endpoints(&self) -> Result<Vec<String>, BmdbError> {
        let found = self
            .statement("looking for callback servers", |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/session/list_callback_servers.sql").fetch_all(pool).await
                })
            })
            .await?;
        let mut endpoints: Vec<String> = found
            .iter()
            .filter_map(|info| info.get("endpoints")?.as_array())
            .flatten()
            .filter_map(|endpoint| endpoint.as_str().map(str::to_owned))
            .collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        Ok(endpoints)
    }
}

/// What became of a heartbeat, and whether it told for the first time of a fence that was never given.
async fn store(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    heartbeat: &Heartbeat,
) -> Result<(Outcome, bool), BmdbError> {
    let machine = heartbeat.machine;
    let rows = lock(tx, machine).await?;
    let snapshot = read(tx, machine).await?;
    let row = sqlx::query_file!("sql/heartbeat/read_context.sql", machine.0)
        .fetch_one(&mut *tx)
        .await
        .doing("reading what a heartbeat is judged by")?;
    let policy = policy_of_version(bmdb, tx, snapshot.policy_version).await?;
    let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
    let pending = PendingInstallation::from_columns(row.generation, row.artefact_url, row.artefact_sha256);
    let asked = PendingClusterOrder::from_columns(row.cluster_generation, row.cluster_order);
    let release =
        PendingRelease::from_columns(row.release_generation, row.release_sha256, row.release_deadline);
    let known = Known {
        previous_boot_id: row.previous_boot_id,
        report_incarnation: row.report_incarnation,
        cluster: row.reported_generation.map(|generation| Report {
            generation,
            key: row.reported_key.and_then(|key| key.try_into().ok()),
            ca_certificate: row.reported_ca,
            address: row.reported_address,
            error: row.reported_error,
            epoch: row.reported_epoch.and_then(|epoch| epoch.try_into().ok()).unwrap_or(0),
        }),
        release: row.running_generation.zip(row.running_sha256).and_then(|(generation, sha256)| {
            Some(ReleaseReport { generation, sha256: sha256.try_into().ok()?, error: row.running_error })
        }),
    };
    let pending = (pending, asked, release, row.wants_logs);
    let event = match judge(&snapshot.facts, phase, &known, heartbeat) {
        Verdict::Unauthenticated => return Ok((Outcome::Unauthenticated, false)),
        Verdict::Retired => return Ok((Outcome::Retired, false)),
        Verdict::Stale => return Ok((Outcome::Stale, false)),
        Verdict::Repeated => {
            let wants = wants(&snapshot.facts, &known, heartbeat, pending);
            return Ok((Outcome::Repeated(wants), false));
        }
        Verdict::Accepted { event } => event,
    };
    let given = rows.iter().filter(|row| row.lane == Lane::Access).map(|row| row.fence);
    let given = given.chain(snapshot.facts.agent_started.as_ref().map(|agent| agent.fence)).max();
    let newer =
        Some(heartbeat.access_fence) > given && newer_fence(tx, machine, heartbeat.access_fence).await?;
    let (healed, healing_event) = heal(&snapshot.facts, &policy, snapshot.now);
    for change in changes_of(&snapshot.facts, &known, heartbeat).iter().chain(&healed) {
        apply(tx, machine, change).await?;
    }
    let after = reschedule(bmdb, tx, machine, &rows).await?;
    for (event, detail) in event.into_iter().chain(healing_event) {
        tell(tx, machine, event, &detail).await?;
    }
    if let Some(outcome) = &heartbeat.installation
        && after.snapshot.facts.installation_report.map(|report| report.generation)
            != Some(outcome.generation)
    {
        let detail = format!("of request {}, which is not the present one", outcome.generation);
        tell(tx, machine, "LateInstallationReport", &detail).await?;
    }
    Ok((Outcome::Stored(wants(&after.snapshot.facts, &known, heartbeat, pending)), newer))
}

fn wants(
    facts: &MachineFacts,
    known: &Known,
    heartbeat: &Heartbeat,
    (asked, about_cluster, release, logs): (
        Option<PendingInstallation>,
        Option<PendingClusterOrder>,
        Option<PendingRelease>,
        bool,
    ),
) -> Wants {
    let reported = facts.installation_report.map(|report| report.generation);
    let standing = heartbeat.cluster.as_ref().or(known.cluster.as_ref());
    let running = heartbeat.release.as_ref().or(known.release.as_ref());
    Wants {
        hardware_report: heartbeat.hardware.is_none()
            && known.report_incarnation.as_ref() != Some(&heartbeat.beat.incarnation),
        installation: asked.filter(|asked| reported != Some(asked.generation)),
        cluster: about_cluster
            .filter(|asked| standing.is_none_or(|standing| standing.generation != asked.generation)),
        release: release.filter(|asked| running.is_none_or(|running| running.generation != asked.generation)),
        logs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{
        AgentStarted, Heartbeat as StoredHeartbeat, InstallationReport, InstallationRequest,
    };

    const KEY: [u8; 32] = [7; 32];

    fn heard(boot: &str, sequence: i64) -> MachineFacts {
        let at = Timestamp::UNIX_EPOCH;
        let mut facts = MachineFacts::unknown(MachineId::generate(), at);
        facts.agent_started = Some(AgentStarted { at, public_key: KEY.to_vec(), boot_id: None, fence: 1 });
        facts.heartbeat =
            Some(StoredHeartbeat { at, boot_id: boot.to_owned(), incarnation: "i".to_owned(), sequence });
        facts
    }

    fn beat(machine: MachineId, boot: &str, sequence: i64) -> Heartbeat {
        Heartbeat {
            machine,
            public_key: KEY,
            beat: NewHeartbeat {
                boot_id: boot.to_owned(),
                incarnation: "i".to_owned(),
                sequence,
                version: "1".to_owned(),
            },
            hardware: None,
            installation: None,
            cluster: None,
            release: None,
            access_fence: 1,
        }
    }

    fn event_of(verdict: &Verdict) -> &'static str {
        match verdict {
            Verdict::Unauthenticated => "unauthenticated",
            Verdict::Retired => "retired",
            Verdict::Stale => "stale",
            Verdict::Repeated => "repeated",
            Verdict::Accepted { event: None } => "plain",
            Verdict::Accepted { event: Some((event, _)) } => event,
        }
    }

    #[test]
    fn heartbeats_are_told_apart() {
        let facts = heard("b", 10);
        let machine = facts.machine;
        let mut never = facts.clone();
        never.heartbeat = None;
        let mut no_agent = facts.clone();
        no_agent.agent_started = None;
        let mut other_key = facts.clone();
        other_key.agent_started.as_mut().unwrap().public_key = vec![8; 32];
        let ready = Phase::Ready;
        for (name, facts, phase, boot, sequence, expected) in [
            ("newer", &facts, ready, "b", 11, "plain"),
            ("same", &facts, ready, "b", 10, "repeated"),
            ("older", &facts, ready, "b", 9, "stale"),
            ("first", &never, Phase::AgentStarting, "b", 1, "FirstHeartbeat"),
            ("first of a silent one", &never, Phase::Silent, "b", 1, "FirstHeartbeat"),
            ("another boot, lower number", &facts, ready, "c", 3, "Booted"),
            ("another boot while recovering", &facts, Phase::Recovering, "c", 3, "Booted"),
            ("the boot before", &facts, ready, "a", 99, "stale"),
            ("newer of a silent one", &facts, Phase::Silent, "b", 11, "HeardAgain"),
            ("newer of a recovering one", &facts, Phase::Recovering, "b", 11, "HeardAgain"),
            ("older of a silent one", &facts, Phase::Silent, "b", 9, "stale"),
            ("same of a silent one", &facts, Phase::Silent, "b", 10, "repeated"),
            ("no agent", &no_agent, ready, "b", 11, "unauthenticated"),
            ("another key", &other_key, ready, "b", 11, "unauthenticated"),
            ("retired", &facts, Phase::Retired, "b", 11, "retired"),
            ("retired, another boot", &facts, Phase::Retired, "c", 1, "retired"),
            ("retired, before its first report", &never, Phase::Retired, "b", 1, "retired"),
            ("another key of a retired one", &other_key, Phase::Retired, "b", 11, "unauthenticated"),
            ("on its way out", &facts, Phase::Retiring, "b", 11, "plain"),
            ("another key, same number", &other_key, ready, "b", 10, "unauthenticated"),
        ] {
            let known = Known { previous_boot_id: Some("a".to_owned()), ..Known::default() };
            let verdict = judge(facts, phase, &known, &beat(machine, boot, sequence));
            assert_eq!(event_of(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn boot_in_which_the_agent_was_enrolled_since_is_no_boot_before() {
        let known = Known { previous_boot_id: Some("a".to_owned()), ..Known::default() };
        for (name, enrolled, boot, expected) in [
            ("enrolled in it since", 60, Some("a"), "Booted"),
            ("enrolled in it before the last report", -60, Some("a"), "stale"),
            ("enrolled in another one", 60, Some("b"), "stale"),
            ("enrolled in one that is not known", 60, None, "stale"),
        ] {
            let mut facts = heard("b", 10);
            let agent = facts.agent_started.as_mut().unwrap();
            agent.at = Timestamp::from_timestamp(enrolled, 0).unwrap();
            agent.boot_id = boot.map(str::to_owned);
            let verdict = judge(&facts, Phase::Recovering, &known, &beat(facts.machine, "a", 99));
            assert_eq!(event_of(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn same_number_of_another_process_is_no_repetition() {
        let facts = heard("b", 10);
        let mut other = beat(facts.machine, "b", 10);
        other.beat.incarnation = "j".to_owned();
        assert_eq!(judge(&facts, Phase::Ready, &Known::default(), &other), Verdict::Stale);
    }

    #[test]
    fn repetition_that_brings_an_unstored_report_is_refused() {
        let mut facts = heard("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let mut again = beat(facts.machine, "b", 10);
        again.installation = Some(InstallationOutcome { generation: 2, error: None });
        assert_eq!(judge(&facts, Phase::Ready, &Known::default(), &again), Verdict::Stale);
        facts.installation_report = Some(InstallationReport { generation: 2, succeeded: true });
        assert_eq!(judge(&facts, Phase::Ready, &Known::default(), &again), Verdict::Repeated);
    }

    #[test]
    fn late_installation_report_changes_nothing() {
        let mut facts = heard("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let outcome = |generation| InstallationOutcome { generation, error: None };
        let mut with = |stored: Option<i64>, generation| {
            facts.installation_report =
                stored.map(|generation| InstallationReport { generation, succeeded: false });
            let mut beat = beat(facts.machine, "b", 11);
            beat.installation = Some(outcome(generation));
            changes_of(&facts, &Known::default(), &beat).len() == 2
        };
        for (stored, generation, written) in [
            (None, 2, true),
            (Some(1), 2, true),
            (Some(2), 2, false),
            (Some(2), 1, false),
            (None, 1, false),
            (None, 3, false),
        ] {
            assert_eq!(with(stored, generation), written, "{stored:?} {generation}");
        }
    }
}
