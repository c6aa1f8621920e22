//! Watches the database file of this node's etcd, and makes room when it is full.
//!
//! The decision is [`decide_space_step`]; this runnable reads what it needs and executes its steps. While etcd is full, it
//! needs no curator, no lease and no lock, because an etcd without space grants none. It also works for a role server that
//! starts while etcd is full: it runs before the curator does. Before etcd is full, it defragments under the lock by which
//! members restart in turn ([`peer_restart`](super::peer_restart)).
//!
//! While there is an alarm, the node reports it to its shepherd with the heartbeat, which does not depend on a curator.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use curator_client::node_id::NodeId;
use etcd::client::{Client, EtcdError};
use etcd::key_space::PEER_RESTART;
use etcd::lock::LockAttempt;
use etcd::maintenance::{Alarm, AlarmKind, DatabaseStatus};
use etcd::members::{MemberError, MemberId};
use model::cluster::etcd_space::{EtcdSpaceFacts, SpaceStep, decide_space_step};
use model::cluster::state::MAX_ETCD_BYTES;
use model::program_versions::version::parse_program_version;
use supervisor::context::{Runnable, Starting};
use tokio::time::Instant;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{EtcdSpaceStatus, NodeFacts};
use crate::cluster::node_problems::NodePart;
use crate::cluster::peer_restart::check_quorum;

/// How often the alarms are looked for.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The most steps of a round. A member needs three, and one for each alarm of a removed member.
const MAX_STEPS: usize = 8;
/// How long the lock lives: longer than the largest file takes.
const LOCK_TTL: Duration = Duration::from_mins(5);

/// What the runnable remembers between two rounds.
#[derive(Debug)]
struct SpaceWatch {
    /// Members without space, and since when they have been the same.
    full: BTreeSet<u64>,
    unchanged_since: Instant,
    defragmented_at: Option<Instant>,
    defragmentations: u64,
}

/// Makes the runnable. Errors end a round, and the next round begins with what is there then.
#[must_use]
pub(super) fn watch_space(files: ClusterFiles, own: NodeId, client: Client, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, client, facts) = (files.clone(), client.clone(), facts.clone());
        async move {
            let healthy = starting.mark_healthy();
            let mut watch = SpaceWatch {
                full: BTreeSet::new(),
                unchanged_since: Instant::now(),
                defragmented_at: None,
                defragmentations: 0,
            };
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
    let mut compacted = false;
    for _ in 0..MAX_STEPS {
        let alarms = if status.has_alarm { client.list_alarms().await? } else { BTreeSet::new() };
        watch.observe(members_with(&alarms, |kind| kind == AlarmKind::NoSpace), Instant::now());
        let other = members_with(&alarms, |kind| kind != AlarmKind::NoSpace);
        facts.etcd_space.set(Some(watch.describe(&status, quota_bytes, other.len())));
        // Without an alarm, nothing depends on the others.
        let (members, connected) = match watch.full.first() {
            None => (BTreeSet::new(), BTreeSet::new()),
            Some(_) => (list_member_ids(client).await?, client.connected_peers().await?),
        };
        let state = EtcdSpaceFacts {
            own: status.member.0,
            members,
            connected,
            full: watch.full.clone(),
            unchanged_for: watch.unchanged_since.elapsed(),
            file_bytes: status.file_bytes,
            bytes_in_use: status.bytes_in_use,
            quota_bytes,
            free_disk_bytes: free_bytes(&files.etcd_directory()),
            version: parse_program_version(&status.version),
            compacted,
            since_defragmentation: watch.defragmented_at.map(|at| at.elapsed()),
        };
        match decide_space_step(&state) {
            SpaceStep::Rest => return Ok(describe_alarms(&other, None)),
            SpaceStep::Wait(reason) => return Ok(describe_alarms(&other, Some(&reason))),
            SpaceStep::Compact => {
                // A person sees this before anything is done: the next steps can take minutes.
                let reason = "this member makes room";
                facts.problems.set(NodePart::EtcdSpace, describe_alarms(&other, Some(reason)));
                client.compact_physically(status.revision).await?;
                compacted = true;
            }
            SpaceStep::Defragment => watch.defragment(client, &status).await?,
            SpaceStep::DefragmentInTurn => {
                if let Err(why) = check_quorum(client).await {
                    tracing::debug!(why, "the file of etcd is not made smaller now");
                    return Ok(describe_alarms(&other, None));
                }
                match client.try_lock(PEER_RESTART, &own.to_string(), LOCK_TTL).await? {
                    LockAttempt::Busy { .. } => return Ok(describe_alarms(&other, None)),
                    LockAttempt::Acquired(lock) => {
                        let defragmented = watch.defragment(client, &status).await;
                        lock.release(client).await;
                        defragmented?;
                    }
                }
            }
            SpaceStep::EndAlarm(member) => {
                let member = MemberId(member);
                client.end_space_alarm(member).await?;
                tracing::info!(%member, file = status.file_bytes, "etcd has room again, and its alarm is ended");
            }
        }
        status = client.database_status().await?;
    }
    Ok(describe_alarms(&BTreeSet::new(), Some("more steps are due")))
}

impl SpaceWatch {
    /// Makes the file smaller, and records that.
    async fn defragment(&mut self, client: &Client, status: &DatabaseStatus) -> Result<(), EtcdError> {
        let (file, used) = (status.file_bytes, status.bytes_in_use);
        tracing::info!(file, used, "etcd of this node is defragmented, because its file is near its quota");
        self.defragmented_at = Some(Instant::now());
        self.defragmentations = self.defragmentations.saturating_add(1);
        client.defragment().await
    }

    /// Records which members have no space at this moment.
    fn observe(&mut self, full: BTreeSet<u64>, now: Instant) {
        if self.full != full {
            self.full = full;
            self.unchanged_since = now;
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
fn describe_alarms(other: &BTreeSet<u64>, waits: Option<&str>) -> Option<String> {
    let corrupt = (!other.is_empty()).then(|| {
        let names: Vec<String> = other.iter().map(|member| format!("{member:x}")).collect();
        format!(
            "etcd reports that the data of these members differs from that of the others: {}; replace them \
             (`shepherdctl cluster scale`)",
            names.join(", ")
        )
    });
    let full = waits.map(|reason| format!("etcd has no space left and accepts no writes; {reason}"));
    match (full, corrupt) {
        (Some(full), Some(corrupt)) => Some(format!("{full}; {corrupt}")),
        (full, corrupt) => full.or(corrupt),
    }
}

fn members_with(alarms: &BTreeSet<Alarm>, of: impl Fn(AlarmKind) -> bool) -> BTreeSet<u64> {
    alarms.iter().filter(|alarm| of(alarm.kind)).map(|alarm| alarm.member.0).collect()
}

async fn list_member_ids(client: &Client) -> Result<BTreeSet<u64>, EtcdError> {
    match client.list_members().await {
        Ok(members) => Ok(members.iter().map(|member| member.id.0).collect()),
        Err(MemberError::Etcd(error)) => Err(error),
        Err(error) => Err(EtcdError::Rejected {
            operation: "listing the members of etcd".to_owned(),
            message: error.to_string(),
        }),
    }
}

/// Bytes that are free for this process on the disk of a directory; `None` if they cannot be read.
fn free_bytes(directory: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(directory).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_that_change_settle_again() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut watch = SpaceWatch {
            full: BTreeSet::new(),
            unchanged_since: begin,
            defragmented_at: None,
            defragmentations: 0,
        };
        for (now, full, since) in [
            (5, &[][..], 0),
            (10, &[5], 10),
            (15, &[5], 10),
            (20, &[3, 5], 20),
            (25, &[3, 5], 20),
            (30, &[3], 30),
            (35, &[], 35),
        ] {
            watch.observe(full.iter().copied().collect(), at(now));
            assert_eq!(watch.unchanged_since, at(since), "{full:?} at {now} s");
        }
    }

    #[test]
    fn each_alarm_is_a_part_of_the_sentence() {
        let (none, some) = (BTreeSet::new(), BTreeSet::from([31]));
        assert_eq!(describe_alarms(&none, None), None);
        let full = describe_alarms(&none, Some("member 3 makes room first"));
        let expected = "etcd has no space left and accepts no writes; member 3 makes room first";
        assert_eq!(full.as_deref(), Some(expected));
        let corrupt = describe_alarms(&some, None).unwrap_or_default();
        assert!(corrupt.contains("differs from that of the others: 1f; replace them"), "{corrupt}");
        let both = describe_alarms(&some, Some("why")).unwrap_or_default();
        assert!(both.starts_with("etcd has no space left") && both.ends_with(&corrupt), "{both}");
    }
}
