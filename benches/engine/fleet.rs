//! A healthy fleet in its own database.

use std::time::Duration;

use anyhow::{Result, ensure};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::settings::ConnectionSettings;
use shepherd::bmdb::engine::session::{Session, Sessions};
use shepherd::model::ids::ProcessId;
use shepherd::model::process::Process;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Postgres};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::server::Server;

/// How many providers the machines come from.
pub(crate) const PROVIDERS: usize = 10;
/// Connections of the common pool: one for each client, and some for the measurements.
const CONNECTIONS: u32 = 20;

/// Ready machines in ten providers and eight buckets, each with an agent that just reported, and looked
/// at by its provider within the last half hour. Nothing is due. No two were provided at the same time, so that there
/// is one order in which they are the oldest.
const FILL: &str = "
    CREATE EXTENSION pg_stat_statements;
    CREATE TABLE bench_machine AS SELECT gen_random_uuid() AS machine_id, n FROM generate_series(1, $MACHINES) n;
    CREATE UNIQUE INDEX ON bench_machine (n);
    INSERT INTO machine SELECT machine_id, now() FROM bench_machine;
    INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, looked_at, unchanged)
    SELECT machine_id, 'rack-' || n % 10, n::TEXT, '192.0.2.1', 'Running',
           now() - INTERVAL '1 day' - n * INTERVAL '1 millisecond', now(), TRUE
    FROM bench_machine;
    INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
    SELECT machine_id, now() - INTERVAL '1 day', decode(repeat('00', 32), 'hex'), 1 FROM bench_machine;
    INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
    SELECT machine_id, now(), 'b', 'i', 1 FROM bench_machine;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT machine_id, 'access', 'Recovery', 'rack-' || n % 10, 1, n / 7 % 8,
           now() + INTERVAL '2 hours' + n % 300 * INTERVAL '1 second', TRUE, 'healthy', 'here:1', 'Ready', now(),
           1, 1, 0, 0, 0
    FROM bench_machine;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT machine_id, 'observe', 'Update', 'rack-' || n % 10, 1, n / 7 % 8,
           now() + INTERVAL '2 hours' + n % 1800 * INTERVAL '1 second', FALSE, 'looked at', 'here:1', 'Ready',
           now(), 1, 1, 0, 0, 0
    FROM bench_machine;
    INSERT INTO fleet_listening VALUES (1, now() - INTERVAL '1 day', now() + INTERVAL '1 day');
    VACUUM ANALYZE";

/// The fleet, and a shepherd's sessions on it.
pub(crate) struct Fleet {
    pub(crate) machines: u32,
    pub(crate) bmdb: Bmdb,
    pub(crate) sessions: Sessions,
    stop: CancellationToken,
    keeper: JoinHandle<()>,
}

impl Fleet {
    pub(crate) async fn fill(server: &Server, machines: u32) -> Result<Self> {
        let name = format!("fleet_{machines}");
        server.create_database(&name).await?;
        let mut settings = ConnectionSettings::from_url(&server.url(&name), "shepherd bench")?;
        settings.max_connections = CONNECTIONS;
        let bmdb = Bmdb::connect(settings).await?;
        bmdb.migrate().await?;
        bmdb.read_policy().await?;
        let interval = Duration::from_mins(1);
        let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), interval);
        let stop = CancellationToken::new();
        let keeper = tokio::spawn(keeper.run(&stop)?);
        let fleet = Self { machines, bmdb, sessions, stop, keeper };
        let mut connection = fleet.patient().await?;
        let fill = FILL.replace("$MACHINES", &machines.to_string());
        for statement in fill.split(';') {
            sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut *connection).await?;
        }
        connection.close().await?;
        Ok(fleet)
    }

    pub(crate) async fn close(self) -> Result<()> {
        self.sessions.wait_until_drained().await;
        self.stop.cancel();
        self.keeper.await?;
        self.bmdb.close().await;
        Ok(())
    }

    pub(crate) async fn sessions(&self, count: usize) -> Result<Vec<Session>> {
        let mut sessions = Vec::with_capacity(count);
        for _ in 0..count {
            sessions.push(self.sessions.start("bench", serde_json::json!({})).await?);
        }
        Ok(sessions)
    }

    pub(crate) async fn end(&self, sessions: &[Session]) -> Result<()> {
        self.sessions.wait_until_drained().await;
        for session in sessions {
            self.sessions.close(session, "measured").await?;
        }
        Ok(())
    }

    /// Names of the first `count` providers.
    pub(crate) fn providers(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("rack-{number}")).collect()
    }

    /// Makes this many machines of the first provider due for an update from their provider.
    pub(crate) async fn make_due_for_update(&self, count: u32) -> Result<()> {
        self.arm(
            count,
            "WITH due AS (UPDATE machine_due SET ready_at = now() - INTERVAL '1 minute', process = 'Update'
                    WHERE lane = 'observe' AND lease_session IS NULL AND machine_id = ANY (ARRAY (
                        SELECT machine_id FROM bench_machine WHERE n % 10 = 0 ORDER BY n LIMIT $1))
                    RETURNING machine_id),
             aged_report AS (UPDATE machine_provided SET looked_at = now() - INTERVAL '1 hour'
                    WHERE machine_id IN (SELECT machine_id FROM due))
             SELECT count(*) FROM due",
        )
        .await
    }

    /// Removes the agents of this many machines of the first provider, which makes them due for an agent start.
    pub(crate) async fn make_due_for_agents(&self, count: u32) -> Result<()> {
        self.arm(
            count,
            "WITH due AS (UPDATE machine_due d SET ready_at = p.provided_at, process = 'AgentStart',
                        timer = FALSE, phase_index = 'Provided'
                    FROM machine_provided p
                    WHERE d.lane = 'access' AND d.lease_session IS NULL AND p.machine_id = d.machine_id
                      AND d.machine_id = ANY (ARRAY (
                        SELECT machine_id FROM bench_machine WHERE n % 10 = 0 ORDER BY n LIMIT $1))
                    RETURNING d.machine_id),
             beat AS (DELETE FROM machine_agent_heartbeat WHERE machine_id IN (SELECT machine_id FROM due)),
             agent AS (DELETE FROM machine_agent_started WHERE machine_id IN (SELECT machine_id FROM due))
             SELECT count(*) FROM due",
        )
        .await
    }

    /// Gives them agents again.
    pub(crate) async fn make_well(&self) -> Result<()> {
        let mut connection = self.bmdb.pool().acquire().await?;
        sqlx::raw_sql(
            "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
             SELECT machine_id, now() - INTERVAL '1 day', decode(repeat('00', 32), 'hex'), 1 FROM machine_due
             WHERE lane = 'access' AND process = 'AgentStart' ON CONFLICT DO NOTHING;
             INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
             SELECT machine_id, now(), 'b', 'i', 1 FROM machine_due
             WHERE lane = 'access' AND process = 'AgentStart' ON CONFLICT DO NOTHING;
             UPDATE machine_due SET ready_at = now() + INTERVAL '2 hours', process = 'Recovery', timer = TRUE,
                    phase_index = 'Ready'
             WHERE lane = 'access' AND process = 'AgentStart'",
        )
        .execute(&mut *connection)
        .await?;
        Ok(())
    }

    /// A connection whose statements may take longer than a shepherd's.
    pub(crate) async fn patient(&self) -> Result<PoolConnection<Postgres>> {
        let mut connection = self.bmdb.pool().acquire().await?;
        sqlx::raw_sql("SET statement_timeout = 0").execute(&mut *connection).await?;
        Ok(connection)
    }

    /// How many statements this fleet's database was sent so far, those that begin and end
    /// transactions among them.
    pub(crate) async fn statements(&self) -> Result<f64> {
        let text = "SELECT COALESCE(sum(calls), 0)::FLOAT8 FROM pg_stat_statements s
             JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = current_database()";
        Ok(sqlx::query_scalar(text).fetch_one(self.bmdb.pool()).await?)
    }

    /// What autovacuum does between two bursts of work.
    pub(crate) async fn vacuum(&self) -> Result<()> {
        let mut connection = self.patient().await?;
        sqlx::raw_sql("VACUUM machine_due").execute(&mut *connection).await?;
        sqlx::raw_sql("VACUUM work").execute(&mut *connection).await?;
        connection.close().await?;
        Ok(())
    }

    async fn arm(&self, count: u32, statement: &'static str) -> Result<()> {
        let armed: i64 =
            sqlx::query_scalar(statement).bind(i64::from(count)).fetch_one(self.bmdb.pool()).await?;
        ensure!(armed == i64::from(count), "{armed} of {count} machines were made due");
        Ok(())
    }

    /// How many machines of the first provider there are.
    pub(crate) fn of_first_provider(&self) -> u32 {
        self.machines / u32::try_from(PROVIDERS).unwrap_or(1)
    }

    /// Claims a process on machines of the first `providers` providers.
    pub(crate) fn claimer(
        &self,
        process: Process,
        providers: usize,
    ) -> shepherd::bmdb::engine::claim::Claimer {
        shepherd::bmdb::engine::claim::Claimer::new(
            self.sessions.clone(),
            process,
            Self::providers(providers),
        )
    }
}
