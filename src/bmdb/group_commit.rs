//! Storing heartbeats in groups.
//!
//! A hundred thousand machines that report every thirty seconds are 3,334
//! heartbeats a second. One transaction each would be 3,334 commits; a group is
//! one, with one statement that locks and one that changes one heap-only row a machine.
//!
//! # How it works
//!
//! One task collects what arrives for a few milliseconds or up to a thousand
//! entries, takes the newest of each machine, sorts them and commits them. The
//! next group begins when this one is committed: a slow database makes larger
//! groups, not more transactions at once, and two groups of one listener can
//! never hold rows that the other wants. Groups of different listeners lock rows
//! in the same order.
//!
//! What the statement does not return is no plain heartbeat and is judged singly
//! (`heartbeat.rs`), beside the groups and a few at a time. So are heartbeats
//! that carry a report, and the older ones of a machine that stood in a group
//! twice: by then the newer one is stored and they are told so. Before that, one
//! statement tells strangers from agents: anyone can make a key and say a
//! thousand machine ids, and must not fill the queue that agents wait in.
//!
//! A heartbeat whose report cannot be stored is answered with that, and is stored without its report:
//! its agent sends the report with every heartbeat until it is, and must not look dead for it.
//!
//! A group that the database refuses is sent in halves until the entry that is
//! to blame stands alone. One that failed because the database is away is not:
//! two thousand more attempts would not bring it back.
//!
//! # Listening
//!
//! Each group also says that somebody listens, in the same commit, and an idle
//! listener commits an empty group every fifteen seconds: otherwise a fleet that
//! is dead to the last machine would look like one that nobody listens to, and
//! would never be recovered.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgConnection;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::heartbeat::{
    Heartbeat, Outcome, PendingClusterOrder, PendingInstallation, PendingRelease, Plain, Wants,
};
use crate::bmdb::metrics::Metrics;
use crate::model::ids::{MachineId, ProcessId};

/// Longest time the first heartbeat of a group waits for others.
const COLLECT: Duration = Duration::from_millis(12);
/// Most heartbeats in a group.
const GROUP: usize = 1000;
/// Most heartbeats that wait for their group; beyond, agents are told to come again.
const QUEUE: usize = 20_000;
/// Longest time without a commit, where the policy asks for no shorter one.
const IDLE: Duration = Duration::from_secs(15);
/// Commits within the longest gap that counts as listening, when nobody reports.
const IDLE_COMMITS: u32 = 4;
/// How many heartbeats are judged singly at once. Each takes a connection of the common pool.
const SINGLES: usize = 6;
/// Listeners share this many rows, so that few of them wait for each other's commits.
const SHARDS: u128 = 16;

/// Why a heartbeat was neither stored nor refused.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    /// Too many wait already.
    #[error("too many heartbeats wait to be stored")]
    Busy,
    /// The listener is being stopped.
    #[error("the callback server is stopping")]
    Stopped,
    /// The database could not be asked, or its answer was lost.
    #[error(transparent)]
    Database(#[from] Arc<BmdbError>),
}

struct Entry {
    heartbeat: Arc<Heartbeat>,
    reply: oneshot::Sender<Result<Outcome, HeartbeatError>>,
}

impl Entry {
    fn claim(&self) -> Claim {
        (self.heartbeat.machine, self.heartbeat.public_key)
    }

    fn answer(self, answer: Result<Outcome, HeartbeatError>) {
        // Nobody listens when the agent hung up meanwhile; it sends the heartbeat again.
        drop(self.reply.send(answer));
    }
}

/// Whose a heartbeat says it is, and the key that was proven.
type Claim = (MachineId, [u8; 32]);

/// Where heartbeats are handed in; cheap to clone.
#[derive(Clone, Debug)]
pub struct Heartbeats {
    queue: mpsc::Sender<Entry>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("machine", &self.heartbeat.machine).finish_non_exhaustive()
    }
}

/// The task's half of [`Heartbeats`].
pub struct GroupCommit {
    bmdb: Bmdb,
    shard: i64,
    metrics: Metrics,
    queue: mpsc::Receiver<Entry>,
    singles: JoinSet<()>,
    permits: Arc<Semaphore>,
    /// What was told of fences that we never gave, so that each heartbeat is not another question.
    newer_fences: HashMap<MachineId, i64>,
}

impl Heartbeats {
    /// Both halves of one listener. Nothing is stored until [`GroupCommit::run`] runs.
    #[must_use]
    pub fn new(bmdb: Bmdb, process: ProcessId, metrics: Metrics) -> (Self, GroupCommit) {
        let (sender, queue) = mpsc::channel(QUEUE);
        let commit = GroupCommit {
            bmdb,
            shard: shard_of(process),
            metrics,
            queue,
            singles: JoinSet::new(),
            permits: Arc::new(Semaphore::new(SINGLES)),
            newer_fences: HashMap::new(),
        };
        (Self { queue: sender }, commit)
    }

    /// Hands a heartbeat in and waits until it is durable or refused.
    pub async fn store(&self, heartbeat: Heartbeat) -> Result<Outcome, HeartbeatError> {
        let (reply, answer) = oneshot::channel();
        let entry = Entry { heartbeat: Arc::new(heartbeat), reply };
        self.queue.try_send(entry).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => HeartbeatError::Busy,
            mpsc::error::TrySendError::Closed(_) => HeartbeatError::Stopped,
        })?;
        answer.await.map_err(|_| HeartbeatError::Stopped)?
    }
}

impl GroupCommit {
    /// Stores what is handed in until `stop` or until every [`Heartbeats`] is dropped, and then what
    /// still waits. Stop it only after whatever hands in has ended, or that is turned away.
    pub async fn run(mut self, stop: CancellationToken) {
        // At once, so that listening begins with the listener and not with its first heartbeat.
        let mut idle_until = Instant::now();
        loop {
            let mut group = Vec::new();
            tokio::select! {
                entry = self.queue.recv() => match entry {
                    Some(entry) => group.push(entry),
                    None => break,
                },
                () = tokio::time::sleep_until(idle_until) => {}
                Some(_) = self.singles.join_next() => continue,
                () = stop.cancelled(), if !self.queue.is_closed() => {
                    self.queue.close();
                    continue;
                }
            }
            if !group.is_empty() {
                self.collect(&mut group).await;
            }
            self.commit(group).await;
            let gap = self.bmdb.policy().1.effective_listening_gap().0;
            idle_until = Instant::now() + IDLE.min(gap / IDLE_COMMITS);
        }
        while self.singles.join_next().await.is_some() {}
    }

    async fn collect(&mut self, group: &mut Vec<Entry>) {
        let until = Instant::now() + COLLECT;
        while group.len() < GROUP {
            let room = GROUP - group.len();
            match tokio::time::timeout_at(until, self.queue.recv_many(group, room)).await {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
    }

    async fn commit(&mut self, group: Vec<Entry>) {
        let (mut plain, mut others) = newest_of_each(group);
        self.metrics.heartbeat_batches.inc();
        #[expect(clippy::cast_precision_loss, reason = "a group has at most a thousand entries")]
        self.metrics.heartbeat_batch_size.observe(plain.len() as f64);
        let started = Instant::now();
        // Halves that are still to be sent. An empty group is sent too: it says that we listen.
        let mut parts = vec![std::mem::take(&mut plain)];
        while let Some(mut part) = parts.pop() {
            let heartbeats: Arc<[Arc<Heartbeat>]> =
                part.iter().map(|entry| entry.heartbeat.clone()).collect();
            match self.bmdb.store_group(self.shard, heartbeats).await {
                Ok(mut stored) => {
                    for entry in part {
                        match stored.remove(&entry.claim()) {
                            Some(plain) => {
                                self.compare_fences(&entry.heartbeat, plain.known_fence);
                                entry.answer(Ok(Outcome::Stored(plain.wants)));
                            }
                            None => others.push(entry),
                        }
                    }
                }
                Err(error) if part.len() > 1 && is_about_the_content(&error) => {
                    tracing::warn!(%error, heartbeats = part.len(), "a group of heartbeats was refused; sending it in halves");
                    self.metrics.heartbeat_batches_halved.inc();
                    let second = part.split_off(part.len() / 2);
                    parts.extend([second, part]);
                }
                Err(error) => {
                    tracing::warn!(%error, heartbeats = part.len(), "heartbeats could not be stored");
                    refuse(part, error);
                }
            }
        }
        self.metrics.heartbeat_commit_seconds.observe(started.elapsed().as_secs_f64());
        self.sort_out(others).await;
    }

    /// Tells of an agent that knows a newer fence than we have given, beside the heartbeats.
    fn compare_fences(&mut self, heartbeat: &Heartbeat, known: i64) {
        let (machine, fence) = (heartbeat.machine, heartbeat.access_fence);
        if fence <= known || self.newer_fences.insert(machine, fence) == Some(fence) {
            return;
        }
        let (bmdb, permits) = (self.bmdb.clone(), self.permits.clone());
        self.singles.spawn(async move {
            // Never closed.
            let Ok(_permit) = permits.acquire().await else { return };
            if let Err(error) = bmdb.tell_newer_fence(machine, fence).await {
                tracing::warn!(%machine, fence, %error, "cannot write down that a machine knows a newer fence");
            }
        });
    }

    /// Answers strangers at once and has the others judged singly.
    async fn sort_out(&mut self, others: Vec<Entry>) {
        if others.is_empty() {
            return;
        }
        let claims: Vec<Claim> = others.iter().map(Entry::claim).collect();
        match self.bmdb.believed(claims).await {
            Ok(believed) => {
                for entry in others {
                    if believed.contains(&entry.claim()) {
                        self.judge_singly(entry);
                    } else {
                        entry.answer(Ok(Outcome::Unauthenticated));
                    }
                }
            }
            Err(error) => refuse(others, error),
        }
    }

    fn judge_singly(&mut self, entry: Entry) {
        let (bmdb, permits, shard) = (self.bmdb.clone(), self.permits.clone(), self.shard);
        self.singles.spawn(async move {
            // Never closed.
            let Ok(_permit) = permits.acquire().await else { return };
            let stored = bmdb.store_heartbeat(entry.heartbeat.clone()).await;
            if let Err(error) = &stored
                && entry.heartbeat.has_report()
                && may_be_the_report(error)
            {
                keep_alive(&bmdb, shard, &entry.heartbeat).await;
            }
            entry.answer(stored.map_err(|error| Arc::new(error).into()));
        });
    }
}

/// Stores of a heartbeat that its agent is alive, without the report that could not be stored.
async fn keep_alive(bmdb: &Bmdb, shard: i64, heartbeat: &Heartbeat) {
    let bare = Arc::new(heartbeat.without_report());
    let kept = match bmdb.store_group(shard, Arc::new([bare.clone()])).await {
        // Not a plain one: the first ever, of a boot, or of a machine that was thought silent.
        Ok(stored) if stored.is_empty() => bmdb.store_heartbeat(bare).await.map(|_| ()),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    match kept {
        Ok(()) => tracing::warn!(machine = %heartbeat.machine, "a heartbeat was stored without its report"),
        Err(error) => {
            tracing::warn!(machine = %heartbeat.machine, %error, "nor could a heartbeat be stored without its report");
        }
    }
}

/// None of them was stored, or nobody knows.
fn refuse(entries: Vec<Entry>, error: BmdbError) {
    let error = Arc::new(error);
    for entry in entries {
        entry.answer(Err(error.clone().into()));
    }
}

/// The newest plain heartbeat of each machine in the order of machines, and the rest. Of each key apart:
/// a stranger's, however new, must not stand in the way of the machine's own.
fn newest_of_each(group: Vec<Entry>) -> (Vec<Entry>, Vec<Entry>) {
    let mut newest: BTreeMap<Claim, Entry> = BTreeMap::new();
    let mut others = Vec::new();
    for entry in group {
        if entry.reply.is_closed() {
            // Its agent hung up and sends it again. Storing it would only make that one a repetition.
            continue;
        }
        if entry.heartbeat.has_report() {
            others.push(entry);
            continue;
        }
        let claim = entry.claim();
        let older = match newest.remove(&claim) {
            Some(other) if other.heartbeat.beat.sequence > entry.heartbeat.beat.sequence => {
                newest.insert(claim, other);
                Some(entry)
            }
            other => {
                newest.insert(claim, entry);
                other
            }
        };
        others.extend(older);
    }
    (newest.into_values().collect(), others)
}

/// Whether the database looked at what was sent and refused it, so that less of it may pass. Class 22
/// is data that cannot be, 23 a broken constraint; the others are waits that lasted too long.
fn is_about_the_content(error: &BmdbError) -> bool {
    let BmdbError::Statement { source: sqlx::Error::Database(database), .. } = error else { return false };
    let code = database.code();
    let code = code.as_deref().unwrap_or_default();
    code.starts_with("22") || code.starts_with("23") || matches!(code, "55P03" | "57014")
}

/// Whether less of a heartbeat may pass: the database looked at it, or it lost against others as what writes much
/// does. Where the database is away, nothing passes.
fn may_be_the_report(error: &BmdbError) -> bool {
    matches!(error, BmdbError::Conflict { .. }) || is_about_the_content(error)
}

fn shard_of(process: ProcessId) -> i64 {
    // The low bits of a UUIDv7 are random.
    i64::try_from(process.0.as_u128() % SHARDS).unwrap_or(0)
}

impl Bmdb {
    /// Which machines have an agent with the key that was proven.
    async fn believed(&self, claims: Vec<Claim>) -> Result<HashSet<Claim>, BmdbError> {
        let (machines, keys): (Vec<Uuid>, Vec<Vec<u8>>) =
            claims.iter().map(|(machine, key)| (machine.0, key.to_vec())).unzip();
        let known: HashSet<Claim> = self
            .statement("asking whose heartbeats are", move |pool| {
                let (machines, keys) = (machines.clone(), keys.clone());
                Box::pin(async move {
                    sqlx::query_file!("sql/heartbeat/verify_agents.sql", &machines, &keys)
                        .fetch_all(pool)
                        .await
                })
            })
            .await?
            .into_iter()
            .filter_map(|row| Some((MachineId(row.machine_id), row.public_key.try_into().ok()?)))
            .collect();
        Ok(known)
    }

    /// Stores plain heartbeats, sorted by machine and one each, and says that a listener listens.
    /// What is not in the answer is no plain heartbeat, and was not stored.
    pub async fn store_group(
        &self,
        shard: i64,
        heartbeats: Arc<[Arc<Heartbeat>]>,
    ) -> Result<HashMap<Claim, Plain>, BmdbError> {
        self.transact("storing a group of heartbeats", move |tx| {
            let heartbeats = heartbeats.clone();
            Box::pin(async move {
                let stored =
                    if heartbeats.is_empty() { HashMap::new() } else { store_plain(tx, &heartbeats).await? };
                // Last, because listeners may share the row and this holds it until the commit.
                listen(tx, shard).await?;
                Ok(stored)
            })
        })
        .await
    }
}

async fn store_plain(
    tx: &mut PgConnection,
    heartbeats: &[Arc<Heartbeat>],
) -> Result<HashMap<Claim, Plain>, BmdbError> {
    let what = "storing a group of heartbeats";
    let machines: Vec<Uuid> = heartbeats.iter().map(|heartbeat| heartbeat.machine.0).collect();
    // A statement of its own: the next one sees what whoever held these rows has written of their
    // machines, and nobody finds one of them silent in between.
    let locked =
        sqlx::query_file_scalar!("sql/heartbeat/lock_batch.sql", &machines).fetch_all(&mut *tx).await;
    let locked: HashSet<Uuid> = locked.doing(what)?.into_iter().collect();
    let ours: Vec<&Heartbeat> = heartbeats
        .iter()
        .map(AsRef::as_ref)
        .filter(|heartbeat| locked.contains(&heartbeat.machine.0))
        .collect();
    let of = |field: fn(&Heartbeat) -> &str| -> Vec<String> {
        ours.iter().map(|heartbeat| field(heartbeat).to_owned()).collect()
    };
    let machines: Vec<Uuid> = ours.iter().map(|heartbeat| heartbeat.machine.0).collect();
    let keys: Vec<Vec<u8>> = ours.iter().map(|heartbeat| heartbeat.public_key.to_vec()).collect();
    let boots = of(|heartbeat| &heartbeat.beat.boot_id);
    let incarnations = of(|heartbeat| &heartbeat.beat.incarnation);
    let versions = of(|heartbeat| &heartbeat.beat.version);
    let sequences: Vec<i64> = ours.iter().map(|heartbeat| heartbeat.beat.sequence).collect();
    let stored = sqlx::query_file!(
        "sql/heartbeat/update_batch.sql",
        &machines,
        &keys,
        &boots,
        &incarnations,
        &sequences,
        &versions
    )
    .fetch_all(tx)
    .await
    .doing(what)?;
    Ok(stored
        .into_iter()
        .filter_map(|row| {
            let installation =
                PendingInstallation::from_columns(row.generation, row.artefact_url, row.artefact_sha256);
            let cluster = PendingClusterOrder::from_columns(row.cluster_generation, row.cluster_order);
            let release = PendingRelease::from_columns(
                row.release_generation,
                row.release_sha256,
                row.release_deadline,
            );
            let key = row.public_key.try_into().ok()?;
            Some((
                (MachineId(row.machine_id), key),
                Plain {
                    wants: Wants {
                        hardware_report: row.wants_report,
                        installation,
                        cluster,
                        release,
                        logs: row.wants_logs,
                    },
                    known_fence: row.known_fence,
                },
            ))
        })
        .collect())
}

async fn listen(tx: &mut PgConnection, shard: i64) -> Result<(), BmdbError> {
    let what = "telling that heartbeats are listened for";
    let told =
        sqlx::query_file!("sql/heartbeat/record_listening.sql", shard).execute(&mut *tx).await.doing(what)?;
    if told.rows_affected() == 0 {
        sqlx::query_file!("sql/heartbeat/restart_listening.sql", shard).execute(tx).await.doing(what)?;
    }
    Ok(())
}
