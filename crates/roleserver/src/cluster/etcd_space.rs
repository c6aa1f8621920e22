//! Watches the database file of this node's etcd, and makes room when it is full.
//!
//! The decision is [`decide_space_step`]; this runnable reads what it needs and executes its steps. While etcd is full, it
//! needs no curator, no lease and no lock, because an etcd without space grants none. It also works for a role server that
//! starts while etcd is full: it runs before the curator does. Before etcd is full, it defragments under the lock by which
//! members restart in turn ([`peer_restart`](super::peer_restart)).
//!
//! A round compacts at most once, and the decision spaces compactions and defragmentations. What is reported changes with the
//! reason and not with measured numbers, because each change is a warning in the log and a report to the shepherd.
//!
//! While there is an alarm, the node reports it to its shepherd with the heartbeat, which does not depend on a curator.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use curator_client::node_id::NodeId;
use etcd::client::{Client, EtcdError};
use etcd::key_space::PEER_RESTART;
use etcd::lock::LockAttempt;
use etcd::maintenance::{Alarm, AlarmKind, DatabaseStatus, MAINTENANCE_DEADLINE};
use etcd::members::{Member, MemberError, MemberId};
use hardening::own_usage;
use model::cluster::etcd_space::{
    EtcdSpaceFacts, SpaceStep, count_fruitless, decide_space_step, prevention_limit,
};
use model::cluster::state::MAX_ETCD_BYTES;
use model::program_versions::version::parse_program_version;
use supervisor::context::{Runnable, Starting};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{EtcdSpaceStatus, NodeFacts};
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_restart::check_quorum;

/// How often the alarms are looked for.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The most steps of a round. A member needs three, and one for each alarm of a removed member.
const MAX_STEPS: usize = 8;
/// How long the lock lives: longer than the largest file may take.
const LOCK_TTL: Duration = MAINTENANCE_DEADLINE.saturating_add(Duration::from_mins(1));
/// How long a disk may take to report its free space.
const DISK_DEADLINE: Duration = Duration::from_secs(2);

/// What the runnable remembers between two rounds.
#[derive(Debug)]
struct SpaceWatch {
    /// Members without space, and since when they have been the same.
    full: BTreeSet<u64>,
    unchanged_since: Instant,
    /// Those of them that this member has no connection to, and since when.
    absent_since: BTreeMap<u64, Instant>,
    /// The revision of the last compaction since the alarms changed, and its end.
    compacted: Option<(i64, Instant)>,
    /// End of the last defragmentation.
    defragmented_at: Option<Instant>,
    defragmentations: u64,
    fruitless: u32,
    /// A measurement of the disk that has not ended yet.
    measuring: Option<JoinHandle<Option<u64>>>,
}

/// Makes the runnable. Errors end a round, and the next round begins with what is there then.
#[must_use]
pub(super) fn watch_space(files: ClusterFiles, own: NodeId, client: Client, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, client, facts) = (files.clone(), client.clone(), facts.clone());
        async move {
            let healthy = starting.mark_healthy();
            let mut watch = SpaceWatch::new(Instant::now());
            loop {
                let scope = healthy.scope();
                scope.until_cancelled(run_round(&mut watch, (&files, own), &client, &facts)).await?;
                scope.until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
            }
        }
    })
}

/// Looks at the alarms, and takes every step that is due.
async fn run_round(
    watch: &mut SpaceWatch,
    host: (&ClusterFiles, NodeId),
    client: &Client,
    facts: &NodeFacts,
) {
    // Another part reports an etcd that does not answer.
    let Ok(status) = client.database_status().await else {
        facts.etcd_space.set(None);
        facts.problems.set(NodePart::EtcdSpace, None);
        watch.observe(BTreeSet::new(), Instant::now());
        return;
    };
    let has_alarm = status.has_alarm;
    let problem = match make_room(watch, host, client, facts, status).await {
        Ok(problem) => problem,
        Err(error) if !has_alarm => {
            tracing::debug!(%error, "the space of etcd cannot be read");
            None
        }
        Err(error) => Some(format!("etcd has an alarm, and what to do about it cannot be decided: {error}")),
    };
    facts.problems.set(NodePart::EtcdSpace, problem);
}

/// Takes steps until none is due. Returns what a person has to know.
async fn make_room(
    watch: &mut SpaceWatch,
    (files, own): (&ClusterFiles, NodeId),
    client: &Client,
    facts: &NodeFacts,
    mut status: DatabaseStatus,
) -> Result<Option<String>, EtcdError> {
    let quota_bytes = client.database_quota().await?.unwrap_or(MAX_ETCD_BYTES);
    for _ in 0..MAX_STEPS {
        // A learner does not list them.
        let listed = status.has_alarm && !status.is_learner;
        let alarms = if listed { client.list_alarms().await? } else { BTreeSet::new() };
        watch.observe(members_with(&alarms, AlarmKind::NoSpace), Instant::now());
        let corrupt_members = members_with(&alarms, AlarmKind::Corrupt).len();
        facts.etcd_space.set(Some(watch.describe(&status, quota_bytes, corrupt_members)));
        // Without an alarm, nothing depends on the others.
        let members = if watch.full.is_empty() {
            Vec::new()
        } else {
            let members = list_members(client).await?;
            watch.observe_connections(status.member.0, &client.connected_peers().await?, Instant::now());
            members
        };
        let is_large = status.file_bytes >= prevention_limit(quota_bytes);
        let free_disk_bytes = if is_large { watch.measure_disk(&files.etcd_directory()).await } else { None };
        let state = watch.collect_facts(&status, &members, quota_bytes, free_disk_bytes, Instant::now());
        match decide_space_step(&state) {
            SpaceStep::Rest => return Ok(describe_alarms(&alarms, None)),
            SpaceStep::Wait(reason) => return Ok(describe_alarms(&alarms, Some(&reason))),
            SpaceStep::Compact => {
                client.compact_physically(status.revision).await?;
                watch.compacted = Some((status.revision, Instant::now()));
            }
            SpaceStep::Defragment => {
                // A person sees this before it is done: it can take minutes.
                let reason = "this member makes room";
                facts.problems.set(NodePart::EtcdSpace, describe_alarms(&alarms, Some(reason)));
                watch.defragment(client, &status).await?;
            }
            SpaceStep::DefragmentInTurn => {
                if let Err(why) = defragment_in_turn(watch, own, client, &status).await? {
                    tracing::debug!(why, "the file of etcd is not made smaller now");
                    return Ok(describe_alarms(&alarms, None));
                }
            }
            SpaceStep::EndAlarm(member) => {
                let member = MemberId(member);
                client.end_space_alarm(member).await?;
                tracing::info!(%member, file = status.file_bytes, "the space alarm of a member of etcd is ended");
            }
        }
        status = client.database_status().await?;
    }
    Ok(describe_alarms(&BTreeSet::new(), Some("more steps are due")))
}

/// Makes the file smaller under the lock by which members restart in turn. The inner error is why that is not done now.
async fn defragment_in_turn(
    watch: &mut SpaceWatch,
    own: NodeId,
    client: &Client,
    status: &DatabaseStatus,
) -> Result<Result<(), String>, EtcdError> {
    if let Err(why) = check_quorum(client).await {
        return Ok(Err(why));
    }
    let lock = match client.try_lock(PEER_RESTART, &own.to_string(), LOCK_TTL).await? {
        LockAttempt::Busy { holder } => return Ok(Err(format!("node {holder} has the lock"))),
        LockAttempt::Acquired(lock) => lock,
    };
    // Again, because the former holder of the lock may have failed to return.
    let done = match check_quorum(client).await {
        Ok(()) => watch.defragment(client, status).await.map(Ok),
        Err(why) => Ok(Err(why)),
    };
    lock.release(client).await;
    done
}

impl SpaceWatch {
    fn new(now: Instant) -> Self {
        Self {
            full: BTreeSet::new(),
            unchanged_since: now,
            absent_since: BTreeMap::new(),
            compacted: None,
            defragmented_at: None,
            defragmentations: 0,
            fruitless: 0,
            measuring: None,
        }
    }

    /// Makes the file smaller, and records that.
    async fn defragment(&mut self, client: &Client, status: &DatabaseStatus) -> Result<(), EtcdError> {
        let (file, used) = (status.file_bytes, status.bytes_in_use);
        tracing::info!(file, used, "etcd of this node is defragmented, because its file is near its quota");
        self.defragmentations = self.defragmentations.saturating_add(1);
        // Also if the process is cancelled meanwhile.
        self.defragmented_at = Some(Instant::now());
        let done = client.defragment().await;
        self.defragmented_at = Some(Instant::now());
        let after = match &done {
            Ok(()) => client.database_status().await.ok().map(|status| status.file_bytes),
            Err(_) => None,
        };
        self.fruitless = count_fruitless(self.fruitless, file, after);
        done
    }

    /// Records which members have no space at this moment.
    fn observe(&mut self, full: BTreeSet<u64>, now: Instant) {
        if self.full != full {
            self.full = full;
            self.unchanged_since = now;
            self.compacted = None;
            self.absent_since.retain(|member, _| self.full.contains(member));
        }
    }

    /// Records which of the members without space this one is connected to at this moment.
    fn observe_connections(&mut self, own: u64, connected: &BTreeSet<u64>, now: Instant) {
        for member in &self.full {
            if *member == own || connected.contains(member) {
                self.absent_since.remove(member);
            } else {
                self.absent_since.entry(*member).or_insert(now);
            }
        }
    }

    /// Bytes that are free for this process on the disk of a directory; `None` if they cannot be read soon. A disk that does
    /// not answer has one waiting thread, not one for each round.
    async fn measure_disk(&mut self, directory: &Path) -> Option<u64> {
        let directory = directory.to_owned();
        // The result of an earlier round is outdated.
        self.measuring.take_if(|measuring| measuring.is_finished());
        let measuring = self.measuring.get_or_insert_with(|| {
            tokio::task::spawn_blocking(move || {
                own_usage::read_file_system(&directory).ok().map(|read| read.usage.available_bytes)
            })
        });
        let measured = tokio::time::timeout(DISK_DEADLINE, measuring).await.ok()?;
        self.measuring = None;
        measured.ok().flatten()
    }

    fn collect_facts(
        &self,
        status: &DatabaseStatus,
        members: &[Member],
        quota_bytes: u64,
        free_disk_bytes: Option<u64>,
        now: Instant,
    ) -> EtcdSpaceFacts {
        let since = |at: Instant| now.saturating_duration_since(at);
        EtcdSpaceFacts {
            own: status.member.0,
            is_learner: status.is_learner,
            is_space_exhausted: status.has_space_alarm,
            members: members.iter().map(|member| member.id.0).collect(),
            learners: members.iter().filter(|member| member.learner).map(|member| member.id.0).collect(),
            absent_for: self.absent_since.iter().map(|(member, at)| (*member, since(*at))).collect(),
            full: self.full.clone(),
            unchanged_for: since(self.unchanged_since),
            file_bytes: status.file_bytes,
            bytes_in_use: status.bytes_in_use,
            quota_bytes,
            free_disk_bytes,
            version: parse_program_version(&status.version),
            is_behind: status.is_behind(),
            since_compaction: self.compacted.map(|(_, at)| since(at)),
            new_revisions: self
                .compacted
                .map_or(0, |(revision, _)| status.revision.saturating_sub(revision).try_into().unwrap_or(0)),
            since_defragmentation: self.defragmented_at.map(since),
            fruitless_defragmentations: self.fruitless,
        }
    }

    fn describe(&self, status: &DatabaseStatus, quota_bytes: u64, corrupt_members: usize) -> EtcdSpaceStatus {
        EtcdSpaceStatus {
            file_bytes: status.file_bytes,
            bytes_in_use: status.bytes_in_use,
            quota_bytes,
            full_members: self.full.len(),
            corrupt_members,
            defragmentations: self.defragmentations,
        }
    }
}

/// The sentence about the alarms. `waits` is why nothing is done at the moment about the lack of space; `None` if there is
/// space.
fn describe_alarms(alarms: &BTreeSet<Alarm>, waits: Option<&str>) -> Option<String> {
    let mut parts = Vec::new();
    if let Some(reason) = waits {
        parts.push(format!("etcd has no space left and accepts no writes; {reason}"));
    }
    let corrupt: Vec<String> =
        members_with(alarms, AlarmKind::Corrupt).iter().map(|member| format!("{member:x}")).collect();
    if !corrupt.is_empty() {
        parts.push(format!(
            "etcd reports that the data of these members differs from that of the others: {}; replace them \
             (`shepherdctl cluster scale`)",
            corrupt.join(", ")
        ));
    }
    for alarm in alarms {
        if let AlarmKind::Other(number) = alarm.kind {
            parts.push(format!("etcd reports alarm {number} of member {}", alarm.member));
        }
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn members_with(alarms: &BTreeSet<Alarm>, kind: AlarmKind) -> BTreeSet<u64> {
    alarms.iter().filter(|alarm| alarm.kind == kind).map(|alarm| alarm.member.0).collect()
}

async fn list_members(client: &Client) -> Result<Vec<Member>, EtcdError> {
    match client.list_members().await {
        Ok(members) => Ok(members),
        Err(MemberError::Etcd(error)) => Err(error),
        Err(error) => Err(EtcdError::Rejected {
            operation: "listing the members of etcd".to_owned(),
            message: error.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_that_change_settle_again() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut watch = SpaceWatch::new(begin);
        for (now, full, since) in [
            (5, &[][..], 0),
            (10, &[5], 10),
            (15, &[5], 10),
            (20, &[3, 5], 20),
            (25, &[3, 5], 20),
            (30, &[3], 30),
            (35, &[], 35),
        ] {
            watch.compacted = Some((7, begin));
            watch.observe(full.iter().copied().collect(), at(now));
            assert_eq!(watch.unchanged_since, at(since), "{full:?} at {now} s");
            assert_eq!(watch.compacted.is_none(), since == now, "{full:?} at {now} s");
        }
    }

    #[test]
    fn absence_begins_with_the_last_connection() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut watch = SpaceWatch::new(begin);
        watch.observe([3, 5].into(), begin);
        for (now, connected, since) in [
            (5, &[3][..], None),
            (10, &[], Some(10)),
            (15, &[], Some(10)),
            (20, &[3], None),
            (25, &[9], Some(25)),
        ] {
            watch.observe_connections(5, &connected.iter().copied().collect(), at(now));
            let expected: BTreeMap<u64, Instant> = since.map(|since| (3, at(since))).into_iter().collect();
            assert_eq!(watch.absent_since, expected, "at {now} s");
        }
        watch.observe([5].into(), at(30));
        assert_eq!(watch.absent_since, BTreeMap::new());
    }

    #[tokio::test]
    async fn free_bytes_of_a_missing_directory_are_unknown() {
        let directory = tempfile::tempdir().unwrap();
        let mut watch = SpaceWatch::new(Instant::now());
        assert!(watch.measure_disk(directory.path()).await.is_some());
        assert_eq!(watch.measure_disk(&directory.path().join("missing")).await, None);
        assert!(watch.measuring.is_none());
    }

    #[test]
    fn each_alarm_is_a_part_of_the_sentence() {
        let none = BTreeSet::new();
        let alarm = |kind| BTreeSet::from([Alarm { member: MemberId(31), kind }]);
        assert_eq!(describe_alarms(&none, None), None);
        let full = describe_alarms(&none, Some("member 3 makes room first"));
        let expected = "etcd has no space left and accepts no writes; member 3 makes room first";
        assert_eq!(full.as_deref(), Some(expected));
        let corrupt = describe_alarms(&alarm(AlarmKind::Corrupt), None).unwrap_or_default();
        assert!(corrupt.contains("differs from that of the others: 1f; replace them"), "{corrupt}");
        let both = describe_alarms(&alarm(AlarmKind::Corrupt), Some("why")).unwrap_or_default();
        assert!(both.starts_with("etcd has no space left") && both.ends_with(&corrupt), "{both}");
        let later = describe_alarms(&alarm(AlarmKind::Other(7)), None);
        let expected = format!("etcd reports alarm 7 of member {}", MemberId(31));
        assert_eq!(later, Some(expected), "nobody knows what to do about it");
    }
}
