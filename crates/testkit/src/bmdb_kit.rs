//! The fixture of the engine's tests: a fleet in a database, shepherds without loops, and locks that make two of them
//! meet.
//!
//! A test forces a race: it holds a lock on a connection of its own, waits until the server reports that the other side
//! waits for the lock, and only then continues. No test relies on a pause. What polls, polls for a condition, and gives
//! up after a deadline far beyond the expected time.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bmdb::connection::Bmdb;
use bmdb::connection::dialect::Dialect;
use bmdb::connection::settings::ConnectionSettings;
use bmdb::engine::change_machine::Decision;
use bmdb::engine::claim::{Claimed, Claimer};
use bmdb::engine::fact_change::FactChange;
use bmdb::engine::named_lease::NamedLease;
use bmdb::engine::session::{Session, Sessions};
use bmdb::engine::work::Work;
use model::facts::{Hold, HoldScope};
use model::ids::{MachineId, ProcessId};
use model::needs_human::Obstacle;
use model::process::Process;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection, PgPool};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::postgres::TestDatabase;

/// How long a condition may take on a busy host before the test fails.
pub const PATIENCE: Duration = Duration::from_mins(5);
/// An interval of sessions that is longer than any test.
pub const LONG: Duration = Duration::from_mins(2);
/// An interval for tests that wait for a renewal or for the end of a session. A busy host can keep it.
pub const SOON: Duration = Duration::from_secs(20);

/// A database with its first rows, and a handle of the engine to inspect it.
pub struct Kit {
    /// The database, which is dropped with the kit.
    pub database: TestDatabase,
    /// A process that uses the database as shepherds do, without loops.
    pub bmdb: Bmdb,
    /// Connections for the statements of the test itself.
    pub pool: PgPool,
}

impl Kit {
    /// Creates a kit with a database of its own and all migrations.
    pub async fn new(test_name: &str) -> anyhow::Result<Self> {
        let database = TestDatabase::create(test_name).await?;
        let bmdb = Bmdb::connect(settings(&database, "kit", 4)?).await?;
        bmdb.migrate().await?;
        bmdb.read_policy().await?;
        let pool = database.pool().await?;
        Ok(Self { database, bmdb, pool })
    }

    /// Whether the transactions of this run are SERIALIZABLE.
    #[must_use]
    pub fn is_serializable(&self) -> bool {
        self.database.dialect() == Dialect::Cockroachdb
    }

    /// A connection for the test alone, outside any pool, for transactions that stay open.
    pub async fn connection(&self) -> anyhow::Result<PgConnection> {
        let options: PgConnectOptions = self.database.url().parse()?;
        Ok(options.application_name("by hand").connect().await?)
    }

    /// The same at READ COMMITTED in each mode: the locks of a test are not what is tested, and must not fail
    /// because of what the engine changes at that time.
    pub async fn by_hand(&self) -> anyhow::Result<PgConnection> {
        let options: PgConnectOptions = self.database.url().parse()?;
        let options = options.options([("default_transaction_isolation", "read committed")]);
        Ok(options.application_name("by hand").connect().await?)
    }

    /// Adds machines of a provider that no loop has worked on. The engine schedules them.
    pub async fn provided(&self, count: i64, provider: &str) -> anyhow::Result<Vec<MachineId>> {
        let ids: Vec<Uuid> = sqlx::query_scalar(
            "WITH m AS (INSERT INTO machine (machine_id, created_at)
                        SELECT gen_random_uuid(), clock_timestamp() FROM generate_series(1, $1)
                        RETURNING machine_id),
             p AS (INSERT INTO machine_provided (machine_id, provider, provider_id, address, status,
                           provided_at, unchanged)
                   SELECT machine_id, $2, machine_id::TEXT, '192.0.2.1', 'Running', clock_timestamp(), FALSE
                   FROM m),
             d AS (INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason,
                           decided_at, phase_index, phase_since, rules_version, policy_version, version,
                           fence, losses)
                   SELECT machine_id, lane, $2, 1, abs(hashtext(machine_id::TEXT)::INT8) % 8, FALSE,
                          'newly provided', '', 'New', clock_timestamp(), 1, 0, 0, 0, 0
                   FROM m, (VALUES ('access'), ('observe')) l (lane))
             SELECT machine_id FROM m ORDER BY machine_id",
        )
        .bind(count)
        .bind(provider)
        .fetch_all(&self.pool)
        .await?;
        self.sweep().await?;
        Ok(ids.into_iter().map(MachineId).collect())
    }

    /// Adds the founded cluster `ams`, without machines. It was never observed. Returns its id.
    pub async fn founded_cluster(&self, control_plane: i64, workers: i64) -> anyhow::Result<Uuid> {
        let cluster = sqlx::query_scalar(
            "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version,
                 created_at, created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
             VALUES (gen_random_uuid(), 'ams', $1, $2, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]',
                 FALSE, clock_timestamp(), 'ca', '[]')
             RETURNING cluster_id",
        )
        .bind(control_plane)
        .bind(workers)
        .fetch_one(&self.pool)
        .await?;
        Ok(cluster)
    }

    /// Gives each cluster Kubernetes of this version. Its bundle, with the digest `1a` 32 times, is not stored.
    pub async fn request_kubernetes(&self, version: &str) -> anyhow::Result<()> {
        sqlx::query(
            "INSERT INTO cluster_kubernetes
             SELECT cluster_id, decode(repeat('1a', 32), 'hex'), $1, '10.96.0.0/16', '10.128.0.0/12', 24,
                 'cluster.local', '{}', NULL, clock_timestamp(), 'kim', NULL, '[]', NULL FROM cluster",
        )
        .bind(version)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Adds machines of the control plane of the cluster `ams`. They have no orders, and have reported nothing.
    pub async fn control_plane(&self, count: i64) -> anyhow::Result<Vec<MachineId>> {
        let machines = self.provided(count, "rack").await?;
        for machine in &machines {
            sqlx::query(
                "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
                 SELECT $1, cluster_id, 'control-plane', clock_timestamp() FROM cluster WHERE name = 'ams'",
            )
            .bind(machine.0)
            .execute(&self.pool)
            .await?;
        }
        Ok(machines)
    }

    /// Gives every machine an agent with a last heartbeat eleven minutes ago, and a listener (shard 3) that existed
    /// all that time. No sweep has noticed yet: the timers are due.
    pub async fn fall_silent(&self) -> anyhow::Result<()> {
        sqlx::raw_sql(
            "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
             SELECT machine_id, clock_timestamp() - INTERVAL '1 hour', decode(repeat('00', 32), 'hex'), 1 FROM machine;
             INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
             SELECT machine_id, clock_timestamp() - INTERVAL '11 minutes', 'b', 'i', 1 FROM machine;
             INSERT INTO fleet_listening VALUES (3, clock_timestamp() - INTERVAL '1 day', clock_timestamp());
             UPDATE machine_due SET process = 'Recovery', timer = TRUE, phase_index = 'Ready',
                    ready_at = clock_timestamp() - INTERVAL '1 second' WHERE lane = 'access'",
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// As [`Kit::fall_silent`], after the silence was noticed.
    pub async fn silent(&self) -> anyhow::Result<()> {
        self.fall_silent().await?;
        self.sweep().await?;
        ensure!(self.count("SELECT count(*) FROM machine_due WHERE phase_index = 'Ready'").await? == 0);
        Ok(())
    }

    /// Sweeps the fleet. Returns how many lanes contradicted their facts.
    pub async fn sweep(&self) -> anyhow::Result<usize> {
        let (mut after, mut mismatches) = (MachineId(Uuid::nil()), 0);
        loop {
            let swept = self.bmdb.sweep_page(after, 500).await?;
            mismatches += swept.mismatches;
            match swept.continue_after {
                Some(last) => after = last,
                None => return Ok(mismatches),
            }
        }
    }

    /// Changes facts about a machine, as the engine does.
    pub async fn change(&self, machine: MachineId, changes: Vec<FactChange>) -> anyhow::Result<()> {
        self.bmdb
            .change_machine(machine, move |_| Decision {
                changes: changes.clone(),
                events: Vec::new(),
                output: (),
            })
            .await?;
        Ok(())
    }

    /// Waits until `count` statements of that application wait for a lock.
    pub async fn until_blocked(&self, application: &str, count: i64) -> anyhow::Result<()> {
        until(&format!("{count} statements of {application} wait for a lock"), async || {
            let waiting: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND application_name = $1 AND wait_event_type = 'Lock'",
            )
            .bind(application)
            .fetch_one(&self.pool)
            .await?;
            Ok(waiting >= count)
        })
        .await
    }

    /// Waits until a statement that ends with this text waits for a lock.
    pub async fn until_blocked_in(&self, ending: &str) -> anyhow::Result<()> {
        until(&format!("a statement ending with {ending} waits for a lock"), async || {
            let waiting: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND wait_event_type = 'Lock'
                   AND right(rtrim(query, E' \\n'), length($1)) = $1",
            )
            .bind(ending)
            .fetch_one(&self.pool)
            .await?;
            Ok(waiting > 0)
        })
        .await
    }

    /// Moves a session's deadline into the past.
    pub async fn overdue(&self, session: &Session) -> anyhow::Result<()> {
        sqlx::query(
            "UPDATE session SET deadline = clock_timestamp() - INTERVAL '1 second' WHERE session_id = $1",
        )
        .bind(session.id().0)
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The one number that a statement returns.
    pub async fn count(&self, statement: &'static str) -> anyhow::Result<i64> {
        sqlx::query_scalar(statement).fetch_one(&self.pool).await.context(statement)
    }

    /// The events that ended work on a machine, by fence.
    pub async fn ends(&self, machine: MachineId) -> anyhow::Result<Vec<String>> {
        Ok(sqlx::query_scalar(
            "SELECT event FROM history WHERE machine_id = $1 AND edge = 'end' ORDER BY fence",
        )
        .bind(machine.0)
        .fetch_all(&self.pool)
        .await?)
    }
}

/// Settings of one more process that uses the test's database.
pub fn settings(
    database: &TestDatabase,
    application: &str,
    connections: u32,
) -> anyhow::Result<ConnectionSettings> {
    let mut settings = ConnectionSettings::from_url(database.url(), application)?;
    settings.dialect = database.dialect();
    settings.max_connections = connections;
    Ok(settings)
}

/// A hold on everything, without an end.
#[must_use]
pub fn hold(reason: &str) -> FactChange {
    FactChange::HoldSet(Hold {
        scope: HoldScope::Everything,
        reason: reason.into(),
        by: "kim".into(),
        until: None,
    })
}

/// A call for a person. Nothing is due after it.
#[must_use]
pub fn needs_human(reason: &str) -> FactChange {
    FactChange::NeedsHuman { obstacle: Obstacle::Unknown, reason: reason.into() }
}

/// The engine as one process uses it, without any loop.
pub struct Shepherd {
    /// Its handle on the database.
    pub bmdb: Bmdb,
    /// Its sessions, which are renewed.
    pub sessions: Sessions,
    stop: CancellationToken,
    keeper: JoinHandle<()>,
}

impl Shepherd {
    /// Starts one that uses the database of a kit, with this interval of renewals.
    pub async fn start(kit: &Kit, application: &str, interval: Duration) -> anyhow::Result<Self> {
        Self::with(settings(&kit.database, application, 6)?, interval).await
    }

    /// Starts one with its own settings.
    pub async fn with(settings: ConnectionSettings, interval: Duration) -> anyhow::Result<Self> {
        let bmdb = Bmdb::connect(settings).await?;
        bmdb.read_policy().await?;
        let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), interval);
        let stop = CancellationToken::new();
        let keeper = tokio::spawn(keeper.run(&stop)?);
        Ok(Self { bmdb, sessions, stop, keeper })
    }

    /// Makes the server wait as long as the engine does, which waits longer for a response. Tests do not cover a host
    /// that stops for some seconds.
    pub async fn patient(self) -> anyhow::Result<Self> {
        // All connections that the pool may have, at once, so that each is a different one.
        let mut connections = Vec::new();
        for _ in 0..self.bmdb.settings().max_connections {
            let mut connection = self.bmdb.pool().acquire().await?;
            sqlx::raw_sql(
                "SET lock_timeout = 0; SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0",
            )
            .execute(&mut *connection)
            .await?;
            connections.push(connection);
        }
        Ok(self)
    }

    /// Opens a session of a shepherd called `test`.
    pub async fn session(&self) -> anyhow::Result<Session> {
        Ok(self.sessions.start("test", serde_json::json!({})).await?)
    }

    /// Claims work of a process at a provider.
    #[must_use]
    pub fn claimer(&self, process: Process, provider: &str) -> Claimer {
        Claimer::new(self.sessions.clone(), process, vec![provider.to_owned()])
    }

    /// Claims one machine for that session.
    pub async fn claim_one(&self, session: &Session, process: Process) -> anyhow::Result<Work> {
        let mut claimer = self.claimer(process, "rack");
        let claimed = claimer.claim(std::slice::from_ref(session)).await?;
        let Claimed::Work(mut work) = claimed else { anyhow::bail!("expected work, got {claimed:?}") };
        ensure!(work.len() == 1, "one session got {} machines", work.len());
        work.pop().context("no work")
    }

    /// Ends the renewals and closes the connections.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.keeper.await?;
        self.bmdb.close().await;
        Ok(())
    }
}

/// A shepherd with a named lease.
pub struct LeaseHolder {
    /// The shepherd with the session that has the lease.
    pub shepherd: Shepherd,
    /// The lease, which is renewed with the session.
    pub lease: NamedLease,
    _session: Session,
}

impl LeaseHolder {
    /// Starts a shepherd that acquires the lease of this kind and name.
    pub async fn start(kit: &Kit, application: &str, kind: &str, name: &str) -> anyhow::Result<Self> {
        let shepherd = Shepherd::start(kit, application, LONG).await?;
        let session = shepherd.session().await?;
        let lease = shepherd.bmdb.acquire_named_lease(&session, kind, name).await?.context("it is free")?;
        Ok(Self { shepherd, lease, _session: session })
    }

    /// Releases the lease, and ends the shepherd.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.shepherd.bmdb.release_named_lease(&self.lease).await?;
        self.shepherd.stop().await
    }
}

/// Claims until every provider was examined, and returns the result.
pub async fn surely(claimer: &mut Claimer, session: &Session) -> anyhow::Result<Claimed> {
    loop {
        match claimer.claim(std::slice::from_ref(session)).await? {
            Claimed::FullScanDeferred(rests) => tokio::time::sleep(rests).await,
            claimed => return Ok(claimed),
        }
    }
}

/// Polls until a condition holds. Fails with its name if it does not within [`PATIENCE`].
pub async fn until(
    what: &str,
    mut condition: impl AsyncFnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let began = Instant::now();
    while !condition().await? {
        ensure!(began.elapsed() < PATIENCE, "still not so after {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Waits for a task with a deadline, so that a deadlock fails the test instead of blocking it.
pub async fn ended<T>(what: &str, task: JoinHandle<T>) -> anyhow::Result<T> {
    tokio::time::timeout(PATIENCE, task)
        .await
        .with_context(|| format!("{what} did not end"))?
        .context("panicked")
}
