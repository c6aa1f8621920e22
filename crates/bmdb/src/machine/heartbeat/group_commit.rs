//! Group commit of heartbeats.
//!
//! A hundred thousand machines that report every thirty seconds are 3,334 heartbeats a second. One transaction each
//! would be 3,334 commits; a group is one, with one statement that locks and one that changes one heap-only row a
//! machine.
//!
//! # How it works
//!
//! One task collects what arrives for a few milliseconds or up to a thousand entries, takes the newest of each machine,
//! sorts them and commits them. The next group begins when this one is committed: a slow database makes larger groups,
//! not more transactions at once, and two groups of one listener can never hold rows that the other wants. Groups of
//! different listeners lock rows in the same order.
//!
//! A heartbeat that the statement does not return is not plain and is handled singly (`storing`), beside the
//! groups and a few at a time. So are heartbeats that carry a report, and the older ones of a machine that occurred in
//! a group twice: by then the newer one is stored, and they are answered as stale. Before that, one statement separates
//! strangers from agents: anyone can make a key and claim a thousand machine ids, and must not fill the queue that
//! agents wait in.
//!
//! A heartbeat whose report cannot be stored is answered with an error, and is stored without its report: its agent
//! sends the report with every heartbeat until it is stored, and must not look dead because of it.
//!
//! A group that the database rejects is sent in halves until the faulty entry is alone. One that failed because the
//! database is away is not: two thousand more attempts would not bring it back.
//!
//! # Listening
//!
//! Each group also records, in the same commit, that a callback server listens, and an idle listener commits an empty
//! group every fifteen seconds: otherwise a fleet that is dead to the last machine would look like one that nobody
//! listens to, and would never be recovered.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use sqlx::PgConnection;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::machine::heartbeat::{
    AgentInstructions, HeartbeatOutcome, PendingClusterOrder, PendingInstallation, PendingRelease,
    PlainHeartbeatReply, ReceivedHeartbeat,
};
use crate::metrics::Metrics;
use model::ids::{MachineId, ProcessId};

/// Longest time the first heartbeat of a group waits for others.
const COLLECT_TIME: Duration = Duration::from_millis(12);
/// Most heartbeats in a group.
const MAX_GROUP: usize = 1000;
/// Most heartbeats that wait for their group; beyond, agents are answered that they should try again later.
const QUEUE_CAPACITY: usize = 20_000;
/// Longest time without a commit, unless the policy demands a shorter one.
const MAX_IDLE: Duration = Duration::from_secs(15);
/// Commits within the longest gap that counts as listening, when nobody reports.
const IDLE_COMMITS: u32 = 4;
/// How many heartbeats are handled singly at once. Each takes a connection of the common pool.
const MAX_SINGLES: usize = 6;
/// Listeners share this many rows, so that few of them wait for each other's commits.
const SHARDS: u128 = 16;

/// Why a heartbeat was neither stored nor rejected.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    /// The queue is full.
    #[error("too many heartbeats wait to be stored")]
    Busy,
    /// The listener is being stopped.
    #[error("the callback server is stopping")]
    Stopped,
    /// The database could not be reached, or its answer was lost.
    #[error(transparent)]
    Database(#[from] Arc<BmdbError>),
}

struct QueuedHeartbeat {
    heartbeat: Arc<ReceivedHeartbeat>,
    reply: oneshot::Sender<Result<HeartbeatOutcome, HeartbeatError>>,
}

impl QueuedHeartbeat {
    fn identity(&self) -> AgentIdentity {
        (self.heartbeat.machine, self.heartbeat.public_key)
    }

    fn respond(self, answer: Result<HeartbeatOutcome, HeartbeatError>) {
        // The receiver is gone if the agent hung up meanwhile; it sends the heartbeat again.
        drop(self.reply.send(answer));
    }
}

/// The machine id that a heartbeat claims, and the key that was proven.
type AgentIdentity = (MachineId, [u8; 32]);

/// The entrance of the group commit; cheap to clone.
#[derive(Clone, Debug)]
pub struct HeartbeatQueue {
    queue: mpsc::Sender<QueuedHeartbeat>,
}

impl std::fmt::Debug for QueuedHeartbeat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuedHeartbeat").field("machine", &self.heartbeat.machine).finish_non_exhaustive()
    }
}

/// The task's half of [`HeartbeatQueue`].
pub struct GroupCommit {
    bmdb: Bmdb,
    shard: i64,
    metrics: Metrics,
    queue: mpsc::Receiver<QueuedHeartbeat>,
    single_tasks: JoinSet<()>,
    permits: Arc<Semaphore>,
    /// The highest fence reported of each machine that this BMDB never issued, so that not every heartbeat causes
    /// another query.
    reported_fences: HashMap<MachineId, i64>,
}

impl HeartbeatQueue {
    /// Creates both halves of one listener. Nothing is stored until [`GroupCommit::run`] runs.
    #[must_use]
    pub fn new(bmdb: Bmdb, process: ProcessId, metrics: Metrics) -> (Self, GroupCommit) {
        let (sender, queue) = mpsc::channel(QUEUE_CAPACITY);
        let commit = GroupCommit {
            bmdb,
            shard: shard_of(process),
            metrics,
            queue,
            single_tasks: JoinSet::new(),
            permits: Arc::new(Semaphore::new(MAX_SINGLES)),
            reported_fences: HashMap::new(),
        };
        (Self { queue: sender }, commit)
    }

    /// Queues a heartbeat and waits until it is durable or rejected.
    pub async fn store(&self, heartbeat: ReceivedHeartbeat) -> Result<HeartbeatOutcome, HeartbeatError> {
        let (reply, answer) = oneshot::channel();
        let entry = QueuedHeartbeat { heartbeat: Arc::new(heartbeat), reply };
        self.queue.try_send(entry).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => HeartbeatError::Busy,
            mpsc::error::TrySendError::Closed(_) => HeartbeatError::Stopped,
        })?;
        answer.await.map_err(|_| HeartbeatError::Stopped)?
    }
}

impl GroupCommit {
    /// Stores queued heartbeats until `stop` or until every [`HeartbeatQueue`] is dropped, and then those that still
    /// wait. Stop it only after its clients have ended, or they are turned away.
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
                Some(_) = self.single_tasks.join_next() => continue,
                () = stop.cancelled(), if !self.queue.is_closed() => {
                    self.queue.close();
                    continue;
                }
            }
            if !group.is_empty() {
                self.collect_group(&mut group).await;
            }
            self.commit_group(group).await;
            let gap = self.bmdb.policy().1.effective_listening_gap().0;
            idle_until = Instant::now() + MAX_IDLE.min(gap / IDLE_COMMITS);
        }
        while self.single_tasks.join_next().await.is_some() {}
    }

    async fn collect_group(&mut self, group: &mut Vec<QueuedHeartbeat>) {
        let until = Instant::now() + COLLECT_TIME;
        while group.len() < MAX_GROUP {
            let room = MAX_GROUP - group.len();
            match tokio::time::timeout_at(until, self.queue.recv_many(group, room)).await {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
    }

    async fn commit_group(&mut self, group: Vec<QueuedHeartbeat>) {
        let (mut plain, mut others) = newest_per_agent(group);
        self.metrics.heartbeat_batches.inc();
        #[expect(clippy::cast_precision_loss, reason = "a group has at most a thousand entries")]
        self.metrics.heartbeat_batch_size.observe(plain.len() as f64);
        let started = Instant::now();
        // Halves that are still to be sent. An empty group is sent too: it records that we listen.
        let mut parts = vec![std::mem::take(&mut plain)];
        while let Some(mut part) = parts.pop() {
            let heartbeats: Arc<[Arc<ReceivedHeartbeat>]> =
                part.iter().map(|entry| entry.heartbeat.clone()).collect();
            match self.bmdb.store_heartbeat_group(self.shard, heartbeats).await {
                Ok(mut stored) => {
                    for entry in part {
                        match stored.remove(&entry.identity()) {
                            Some(plain) => {
                                self.report_unknown_fence(&entry.heartbeat, plain.issued_fence);
                                entry.respond(Ok(HeartbeatOutcome::Stored(plain.instructions)));
                            }
                            None => others.push(entry),
                        }
                    }
                }
                Err(error) if part.len() > 1 && is_data_error(&error) => {
                    tracing::warn!(%error, heartbeats = part.len(), "a group of heartbeats was refused; sending it in halves");
                    self.metrics.heartbeat_batches_halved.inc();
                    let second = part.split_off(part.len() / 2);
                    parts.extend([second, part]);
                }
                Err(error) => {
                    tracing::warn!(%error, heartbeats = part.len(), "heartbeats could not be stored");
                    fail_all(part, error);
                }
            }
        }
        self.metrics.heartbeat_commit_seconds.observe(started.elapsed().as_secs_f64());
        self.handle_remaining(others).await;
    }

    /// Reports an agent that knows a newer fence than this BMDB has issued, beside the heartbeats.
    fn report_unknown_fence(&mut self, heartbeat: &ReceivedHeartbeat, known: i64) {
        let (machine, fence) = (heartbeat.machine, heartbeat.access_fence);
        if fence <= known || self.reported_fences.insert(machine, fence) == Some(fence) {
            return;
        }
        let (bmdb, permits) = (self.bmdb.clone(), self.permits.clone());
        self.single_tasks.spawn(async move {
            // The semaphore is never closed.
            let Ok(_permit) = permits.acquire().await else { return };
            if let Err(error) = bmdb.report_unknown_fence(machine, fence).await {
                tracing::warn!(%machine, fence, %error, "cannot write down that a machine knows a newer fence");
            }
        });
    }

    /// Answers strangers at once and has the other heartbeats handled singly.
    async fn handle_remaining(&mut self, others: Vec<QueuedHeartbeat>) {
        if others.is_empty() {
            return;
        }
        let claims: Vec<AgentIdentity> = others.iter().map(QueuedHeartbeat::identity).collect();
        match self.bmdb.verify_agents(claims).await {
            Ok(believed) => {
                for entry in others {
                    if believed.contains(&entry.identity()) {
                        self.store_singly(entry);
                    } else {
                        entry.respond(Ok(HeartbeatOutcome::Unauthenticated));
                    }
                }
            }
            Err(error) => fail_all(others, error),
        }
    }

    fn store_singly(&mut self, entry: QueuedHeartbeat) {
        let (bmdb, permits, shard) = (self.bmdb.clone(), self.permits.clone(), self.shard);
        self.single_tasks.spawn(async move {
            // The semaphore is never closed.
            let Ok(_permit) = permits.acquire().await else { return };
            let stored = bmdb.store_heartbeat(entry.heartbeat.clone()).await;
            if let Err(error) = &stored
                && entry.heartbeat.has_report()
                && may_be_caused_by_report(error)
            {
                store_without_report(&bmdb, shard, &entry.heartbeat).await;
            }
            entry.respond(stored.map_err(|error| Arc::new(error).into()));
        });
    }
}

/// Stores that the agent is alive, without the report that could not be stored.
async fn store_without_report(bmdb: &Bmdb, shard: i64, heartbeat: &ReceivedHeartbeat) {
    let bare = Arc::new(heartbeat.without_report());
    let kept = match bmdb.store_heartbeat_group(shard, Arc::new([bare.clone()])).await {
        // Not a plain one: the first ever, the first of a boot, or one of a machine that was considered silent.
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

/// Answers entries of which none was stored, or nobody knows whether one was.
fn fail_all(entries: Vec<QueuedHeartbeat>, error: BmdbError) {
    let error = Arc::new(error);
    for entry in entries {
        entry.respond(Err(error.clone().into()));
    }
}

/// The newest plain heartbeat of each machine in the order of machines, and the rest. Separately for each key: a
/// stranger's heartbeat, however new, must not displace the machine's own.
fn newest_per_agent(group: Vec<QueuedHeartbeat>) -> (Vec<QueuedHeartbeat>, Vec<QueuedHeartbeat>) {
    let mut newest: BTreeMap<AgentIdentity, QueuedHeartbeat> = BTreeMap::new();
    let mut others = Vec::new();
    for entry in group {
        if entry.reply.is_closed() {
            // Its agent hung up and sends it again. Storing it would only make that one a duplicate.
            continue;
        }
        if entry.heartbeat.has_report() {
            others.push(entry);
            continue;
        }
        let claim = entry.identity();
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

/// Whether the database examined the data and rejected it, so that less of it may succeed. Class 22 is invalid data, 23
/// a violated constraint; the others are waits that lasted too long.
fn is_data_error(error: &BmdbError) -> bool {
    let BmdbError::Statement { source: sqlx::Error::Database(database), .. } = error else { return false };
    let code = database.code();
    let code = code.as_deref().unwrap_or_default();
    code.starts_with("22") || code.starts_with("23") || matches!(code, "55P03" | "57014")
}

/// Whether a heartbeat without its report may succeed: the database examined it, or it lost against others, as large
/// writes do. Where the database is away, nothing succeeds.
fn may_be_caused_by_report(error: &BmdbError) -> bool {
    matches!(error, BmdbError::Conflict { .. }) || is_data_error(error)
}

fn shard_of(process: ProcessId) -> i64 {
    // The low bits of a UUIDv7 are random.
    i64::try_from(process.0.as_u128() % SHARDS).unwrap_or(0)
}

impl Bmdb {
    /// Which machines have an agent with the key that was proven.
    async fn verify_agents(&self, claims: Vec<AgentIdentity>) -> Result<HashSet<AgentIdentity>, BmdbError> {
        let (machines, keys): (Vec<Uuid>, Vec<Vec<u8>>) =
            claims.iter().map(|(machine, key)| (machine.0, key.to_vec())).unzip();
        let known: HashSet<AgentIdentity> = self
            .statement_with("verifying keys of agents", (machines, keys), move |pool, (machines, keys)| {
                Box::pin(
                    sqlx::query!(
                        "SELECT a.machine_id, a.public_key FROM unnest($1::UUID[], $2::BYTEA[])
                             AS n (machine_id, public_key) JOIN machine_agent_started a
                             ON a.machine_id = n.machine_id AND a.public_key = n.public_key",
                        machines,
                        keys
                    )
                    .fetch_all(pool),
                )
            })
            .await?
            .into_iter()
            .filter_map(|row| Some((MachineId(row.machine_id), row.public_key.try_into().ok()?)))
            .collect();
        Ok(known)
    }

    /// Stores plain heartbeats, sorted by machine and one each, and records that a listener listens. A heartbeat
    /// missing from the result is not plain, and was not stored.
    pub async fn store_heartbeat_group(
        &self,
        shard: i64,
        heartbeats: Arc<[Arc<ReceivedHeartbeat>]>,
    ) -> Result<HashMap<AgentIdentity, PlainHeartbeatReply>, BmdbError> {
        self.transact_with("storing a group of heartbeats", heartbeats, move |tx, heartbeats| {
            Box::pin(async move {
                let stored = if heartbeats.is_empty() {
                    HashMap::new()
                } else {
                    store_plain_heartbeats(tx, heartbeats).await?
                };
                // Last, because listeners may share the row and this holds it until the commit.
                record_listening(tx, shard).await?;
                Ok(stored)
            })
        })
        .await
    }
}

async fn store_plain_heartbeats(
    tx: &mut PgConnection,
    heartbeats: &[Arc<ReceivedHeartbeat>],
) -> Result<HashMap<AgentIdentity, PlainHeartbeatReply>, BmdbError> {
    let what = "storing a group of heartbeats";
    let machines: Vec<Uuid> = heartbeats.iter().map(|heartbeat| heartbeat.machine.0).collect();
    // A statement of its own, so that the next one sees what the transactions that held these rows wrote about their
    // machines, and nobody finds one of them silent in between.
    let locked =
        sqlx::query_file_scalar!("../../sql/heartbeat/lock_batch.sql", &machines).fetch_all(&mut *tx).await;
    let locked: HashSet<Uuid> = locked.context(what)?.into_iter().collect();
    let ours: Vec<&ReceivedHeartbeat> = heartbeats
        .iter()
        .map(AsRef::as_ref)
        .filter(|heartbeat| locked.contains(&heartbeat.machine.0))
        .collect();
    let of = |field: fn(&ReceivedHeartbeat) -> &str| -> Vec<String> {
        ours.iter().map(|heartbeat| field(heartbeat).to_owned()).collect()
    };
    let machines: Vec<Uuid> = ours.iter().map(|heartbeat| heartbeat.machine.0).collect();
    let keys: Vec<Vec<u8>> = ours.iter().map(|heartbeat| heartbeat.public_key.to_vec()).collect();
    let boots = of(|heartbeat| &heartbeat.beat.boot_id);
    let incarnations = of(|heartbeat| &heartbeat.beat.incarnation);
    let versions = of(|heartbeat| &heartbeat.beat.version);
    let sequences: Vec<i64> = ours.iter().map(|heartbeat| heartbeat.beat.sequence).collect();
    let stored = sqlx::query_file!(
        "../../sql/heartbeat/update_batch.sql",
        &machines,
        &keys,
        &boots,
        &incarnations,
        &sequences,
        &versions
    )
    .fetch_all(tx)
    .await
    .context(what)?;
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
                PlainHeartbeatReply {
                    instructions: AgentInstructions {
                        hardware_report: row.wants_report,
                        installation,
                        cluster,
                        release,
                        logs: row.wants_logs,
                    },
                    issued_fence: row.known_fence,
                },
            ))
        })
        .collect())
}

async fn record_listening(tx: &mut PgConnection, shard: i64) -> Result<(), BmdbError> {
    let what = "recording that a callback server listens";
    let result = sqlx::query_file!("../../sql/heartbeat/record_listening.sql", shard)
        .execute(&mut *tx)
        .await
        .context(what)?;
    if result.rows_affected() == 0 {
        sqlx::query_file!("../../sql/heartbeat/restart_listening.sql", shard)
            .execute(tx)
            .await
            .context(what)?;
    }
    Ok(())
}
