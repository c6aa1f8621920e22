//! Costs of the frequent statements on a hundred thousand machines, in buffers, by the server's plans for the very
//! files that are sent.
//!
//! Buffers and not milliseconds, because they are the same on a busy host.

mod lists;
mod timeline;

use serde_json::Value;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Postgres};
use uuid::Uuid;

use self::lists::{check_approvals, check_clusters_of_machines, check_lists, check_providers};
use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;

/// A fleet in which one machine in a hundred waits for an agent, with ten providers, three priorities and eight
/// buckets.
const FILL: &str = "
    INSERT INTO machine SELECT gen_random_uuid(), now() FROM generate_series(1, $1);
    CREATE TEMPORARY TABLE numbered AS SELECT machine_id, row_number() OVER () AS n FROM machine;
    INSERT INTO machine_provided (machine_id, provider, provider_id, address, status, provided_at, unchanged)
    SELECT machine_id, 'rack-' || n % 10, n::TEXT, '192.0.2.1', 'Running', now() - INTERVAL '1 day', TRUE FROM numbered;
    INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
    SELECT machine_id, now() - INTERVAL '1 day', decode(repeat('00', 32), 'hex'), 1 FROM numbered WHERE n % 100 > 0;
    INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
    SELECT machine_id, now() - n % 600 * INTERVAL '50 milliseconds', 'b', 'i', n FROM numbered WHERE n % 100 > 0;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT machine_id, 'access', CASE WHEN n % 100 = 0 THEN 'AgentStart' ELSE 'Recovery' END,
           'rack-' || n % 10, n / 100 % 3, n / 7 % 8,
           CASE WHEN n % 100 = 0 THEN now() - n % 5000 * INTERVAL '1 second'
                ELSE now() + INTERVAL '5 hours' + n % 300 * INTERVAL '1 second' END,
           n % 100 > 0, 'healthy', 'here:1', CASE WHEN n % 100 = 0 THEN 'Provided' ELSE 'Ready' END,
           now(), 1, 1, 0, 0, 0
    FROM numbered;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT machine_id, 'observe', 'Update', 'rack-' || n % 10, 1, n / 7 % 8,
           now() + INTERVAL '5 hours' + n % 1800 * INTERVAL '1 second', FALSE, 'looked at', 'here:1', 'Ready', now(), 1, 1, 0, 0, 0
    FROM numbered;
    INSERT INTO session SELECT gen_random_uuid(), gen_random_uuid(), 'filled', '{}', 5000, now(), now() + INTERVAL '1 hour'
    FROM generate_series(1, 1000);
    INSERT INTO session SELECT gen_random_uuid(), gen_random_uuid(), 'old', '{}', 5000, now(), now(), now(), 'over'
    FROM generate_series(1, 20000);
    INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at, settled_at)
    SELECT gen_random_uuid(), 'reboot', 'rack', gen_random_uuid(), 1, '', now() - n * INTERVAL '1 minute', now()
    FROM generate_series(1, 50000) n;
    INSERT INTO fleet_listening VALUES (1, now() - INTERVAL '1 day', now());
    INSERT INTO machine_hardware_report (machine_id, received_at, incarnation, report, manufacturer, memory_bytes, cpu_threads)
    SELECT machine_id, now(), 'i', decode(repeat('00', 32), 'hex'), 'maker ' || n % 7, 1, 1 FROM numbered WHERE n % 100 > 0;
    INSERT INTO fleet_sample
    SELECT date_trunc('minute', now()) - n * INTERVAL '1 minute', now(), 7, '{}' FROM generate_series(0, 43199) n;
    ANALYZE machine, machine_provided, machine_agent_started, machine_agent_heartbeat, machine_due, session, intent,
            machine_hardware_report, fleet_sample";

async fn filled(name: &str, machines: usize) -> anyhow::Result<(Kit, PgConnection)> {
    let kit = Kit::new(name).await?;
    let mut connection = kit.connection().await?;
    fill(&mut connection, machines).await?;
    Ok((kit, connection))
}

/// Fills an empty database through a connection, which is READ COMMITTED from then on.
pub(crate) async fn fill(connection: &mut PgConnection, machines: usize) -> anyhow::Result<()> {
    sqlx::raw_sql("SET default_transaction_isolation = 'read committed'").execute(&mut *connection).await?;
    let fill = FILL.replace("$1", &machines.to_string());
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut *connection).await?;
    // Sets the hint bits and the visibility map, as autovacuum does on a fleet that has existed for a while: of every
    // table that a counted statement reads, so that no cost depends on whether autovacuum has come past already.
    sqlx::raw_sql(
        "VACUUM (ANALYZE) machine, machine_provided, machine_due, machine_agent_heartbeat, machine_agent_started,
                          machine_hardware_report, session, intent, fleet_sample",
    )
    .execute(&mut *connection)
    .await?;
    Ok(())
}

/// Pages that a claim of one machine touches.
pub(crate) async fn claimed_at(connection: &mut PgConnection) -> anyhow::Result<i64> {
    Ok(claim_cost(connection, CLAIMING, "AgentStart").await?.buffers)
}

/// Pages touched, and the tables that were read from end to end.
#[derive(Debug)]
pub(crate) struct Cost {
    buffers: i64,
    scanned: Vec<String>,
    pub(crate) plan: Value,
}

fn collect(node: &Value, scanned: &mut Vec<String>) {
    if node["Node Type"].as_str().is_some_and(|name| name.contains("Seq Scan")) {
        scanned.push(node["Relation Name"].as_str().unwrap_or("?").to_owned());
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        collect(child, scanned);
    }
}

/// Runs a statement, returns its cost, and rolls it back.
pub(crate) async fn cost(
    connection: &mut PgConnection,
    file: &str,
    bind: impl for<'q> Fn(Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments>,
) -> anyhow::Result<Cost> {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {file}");
    let mut last = None;
    // The second run counts: the first one fills the session's caches and reads the catalogue's pages.
    for _ in 0..2 {
        let mut transaction = connection.begin().await?;
        let row = bind(sqlx::query(AssertSqlSafe(explain.clone()))).fetch_one(&mut *transaction).await?;
        last = Some(sqlx::Row::try_get::<Value, _>(&row, 0)?);
        transaction.rollback().await?;
    }
    let plan = last.unwrap_or_default()[0]["Plan"].clone();
    let pages = |name: &str| plan[name].as_i64().unwrap_or(0);
    let mut scanned = Vec::new();
    collect(&plan, &mut scanned);
    scanned.retain(|table| !["policy", "fleet_listening", "named_lease"].contains(&table.as_str()));
    Ok(Cost { buffers: pages("Shared Hit Blocks") + pages("Shared Read Blocks"), scanned, plan })
}

pub(crate) fn check(what: &str, cost: &Cost, most: i64) {
    assert_eq!(cost.scanned, Vec::<String>::new(), "{what} reads a table from end to end: {}", cost.plan);
    assert!(cost.buffers <= most, "{what}: {} buffers, {most} at most: {}", cost.buffers, cost.plan);
}

struct Classes {
    providers: Vec<String>,
    priorities: Vec<i64>,
    buckets: Vec<i64>,
    floors: Vec<chrono::DateTime<chrono::Utc>>,
    numbers: Vec<f64>,
}

fn classes(providers: usize) -> Classes {
    let mut classes = Classes {
        providers: Vec::new(),
        priorities: Vec::new(),
        buckets: Vec::new(),
        floors: Vec::new(),
        numbers: Vec::new(),
    };
    for provider in 0..providers {
        for priority in 0..3 {
            for bucket in 0..8 {
                classes.providers.push(format!("rack-{provider}"));
                classes.priorities.push(priority);
                classes.buckets.push(bucket);
                classes.floors.push(chrono::DateTime::UNIX_EPOCH);
                classes.numbers.push(1.0);
            }
        }
    }
    classes
}

async fn claim_cost(
    connection: &mut PgConnection,
    file: &str,
    process: &'static str,
) -> anyhow::Result<Cost> {
    let sessions: Vec<Uuid> =
        sqlx::query_scalar("SELECT session_id FROM session WHERE component = 'filled' ORDER BY 1 LIMIT 1")
            .fetch_all(&mut *connection)
            .await?;
    let c = classes(2);
    cost(connection, file, |query| {
        query
            .bind(sessions.clone())
            .bind(process)
            .bind(c.providers.clone())
            .bind(c.priorities.clone())
            .bind(c.buckets.clone())
            .bind(c.floors.clone())
            .bind(c.numbers.clone())
            .bind(c.numbers.clone())
            .bind(1_i64)
            .bind(2_i64)
    })
    .await
}

const CLAIMING: &str = include_str!("../../sql/claim/claim.sql");

const REARMING: &str = include_str!("../../sql/claim/rearm_timers.sql");

const FREEING: &str = include_str!("../../sql/reap/free_work.sql");

const CLOSING: &str = include_str!("../../sql/reap/close_expired_sessions.sql");

const RENEWAL: &str = include_str!("../../sql/session/renew.sql");

const LOCKING_OF_HEARTBEATS: &str = include_str!("../../sql/heartbeat/lock_batch.sql");

/// As [`check`], but returns the violation.
pub(crate) fn cheap(cost: &Cost, most: i64) -> bool {
    cost.scanned.is_empty() && cost.buffers <= most
}

async fn probe_cost(
    connection: &mut PgConnection,
    process: &'static str,
    providers: &[&'static str],
) -> anyhow::Result<Cost> {
    let probe = include_str!("../../sql/claim/probe.sql");
    cost(connection, probe, |query| query.bind(process).bind(providers.to_vec()).bind(1_i64)).await
}

const RACKS: [&str; 10] =
    ["rack-0", "rack-1", "rack-2", "rack-3", "rack-4", "rack-5", "rack-6", "rack-7", "rack-8", "rack-9"];

/// Most pages that a probe may touch, and a claim of one machine.
const PROBE: i64 = 10;

const CLAIM: i64 = 400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_of_every_minute_stay_cheap_on_a_hundred_thousand_machines() -> TestResult {
    let (_small_kit, mut small) = filled("explain_small", 10_000).await?;
    let (kit, mut connection) = filled("explain", 100_000).await?;

    // A process without any row; a process with a row for every machine and nothing due; a process with due work. One
    // probe covers all providers and priorities, so their number costs nothing.
    for process in ["Decommission", "Update", "Recovery", "AgentStart"] {
        let one = probe_cost(&mut connection, process, &RACKS).await?;
        check(&format!("probe for {process}"), &one, PROBE);
    }
    // The first due row is another shepherd's: each class of ours is read once, with any backlog of the
    // others.
    let foreign = probe_cost(&mut connection, "AgentStart", &["rack-elsewhere"]).await?;
    check("probe before a thousand foreign machines", &foreign, PROBE);
    let classes = include_str!("../../sql/claim/probe_classes.sql");
    let foreign = cost(&mut connection, classes, |query| {
        query.bind("AgentStart").bind(vec!["rack-elsewhere"]).bind(1_i64).bind(8_i64)
    })
    .await;
    check("probe behind a thousand foreign machines", &foreign?, 120);

    check_frequent_statements(&mut connection, &mut small).await?;
    check_singles(&mut connection).await?;
    check_lists(&kit).await?;
    // After the lists, because these add rows to the fleet.
    check_clusters_of_machines(&mut connection).await?;
    check_providers(&mut connection).await?;
    check_approvals(&mut connection).await?;
    check_planned_once(&mut connection).await?;
    // Last, because this changes the fleet permanently.
    check_due_timers(&mut connection).await?;
    Ok(planted_faults_are_found(&mut connection).await?)
}

async fn check_frequent_statements(
    connection: &mut PgConnection,
    small: &mut PgConnection,
) -> anyhow::Result<()> {
    let here = claim_cost(connection, CLAIMING, "AgentStart").await?;
    let there = claim_cost(small, CLAIMING, "AgentStart").await?;
    check("claim of one on 100,000", &here, CLAIM);
    check("claim of one on 10,000", &there, CLAIM);
    // Ten times as many machines add one level to each index, and so one page per lookup: one lookup for each of two
    // providers' classes, sixteen candidates by key, and some for the writes.
    let more = here.buffers - there.buffers;
    assert!(
        (-50..=48 + 16 + 8).contains(&more),
        "a claim touches {} pages on 100,000 machines and {} on 10,000",
        here.buffers,
        there.buffers
    );
    let empty = claim_cost(connection, CLAIMING, "Update").await?;
    check("claim of nothing", &empty, 250);

    let no_timer = cost(connection, REARMING, |query| query.bind(1_i64)).await?;
    check("re-arming when no timer came due", &no_timer, 20);
    let sessions: Vec<Uuid> =
        sqlx::query_scalar("SELECT session_id FROM session WHERE closed_at IS NULL LIMIT 20")
            .fetch_all(&mut *connection)
            .await?;
    let renewal = cost(connection, RENEWAL, |query| query.bind(sessions.clone())).await?;
    check("renewal of twenty sessions", &renewal, 600);
    // It reads a thousand open sessions, and none of the twenty thousand closed ones.
    let closing = cost(connection, CLOSING, |query| query).await?;
    check("closing of expired sessions", &closing, 2_500);
    let reaping = cost(connection, FREEING, |query| query).await?;
    assert!(
        !reaping.scanned.iter().any(|table| table != "work"),
        "the reaper reads a table from end to end: {:#}",
        reaping.plan
    );
    assert!(reaping.buffers <= 20, "{:#}", reaping.plan);
    let machines = read_oldest_heartbeats(connection).await?;
    let locked = cost(connection, LOCKING_OF_HEARTBEATS, |query| query.bind(machines.clone())).await?;
    check("locking of a hundred heartbeats", &locked, 2_000);
    Ok(())
}

async fn read_oldest_heartbeats(connection: &mut PgConnection) -> anyhow::Result<Vec<Uuid>> {
    let text = "SELECT machine_id FROM machine_agent_heartbeat ORDER BY at, machine_id LIMIT 100";
    Ok(sqlx::query_scalar(text).fetch_all(connection).await?)
}

/// Each connection plans the statements of every poll and every work item once. Planning some of them takes ten times
/// as long as running them.
async fn check_planned_once(connection: &mut PgConnection) -> anyhow::Result<()> {
    let machine: Uuid =
        sqlx::query_scalar("SELECT machine_id FROM machine LIMIT 1").fetch_one(&mut *connection).await?;
    let files = [
        include_str!("../../sql/claim/probe.sql"),
        include_str!("../../sql/schedule/lock_due_rows_for_session.sql"),
        include_str!("../../sql/facts/read_machine.sql"),
        include_str!("../../sql/work/complete.sql"),
        CLAIMING,
    ];
    let [probe, lock, read, end, claim] = files;
    // PostgreSQL plans each of the first five runs, and then compares.
    for _ in 0..10 {
        sqlx::query(probe)
            .bind("Update")
            .bind(RACKS.to_vec())
            .bind(1_i64)
            .fetch_all(&mut *connection)
            .await?;
        sqlx::query(lock).bind(Uuid::nil()).bind(machine).fetch_all(&mut *connection).await?;
        sqlx::query(read).bind(machine).fetch_all(&mut *connection).await?;
        sqlx::query(end)
            .bind(machine)
            .bind("observe")
            .bind(Uuid::nil())
            .bind(1_i64)
            .bind("Update")
            .bind("rack-1")
            .bind(1_i64)
            .bind(chrono::DateTime::UNIX_EPOCH)
            .bind(false)
            .bind("looked at")
            .bind("here:1")
            .bind(None::<chrono::DateTime<chrono::Utc>>)
            .bind("Ready")
            .bind(1_i64)
            .bind(1_i64)
            .bind("Finished")
            .bind("Update")
            .bind("done")
            .fetch_all(&mut *connection)
            .await?;
        let c = classes(2);
        sqlx::query(claim)
            .bind(vec![Uuid::nil()])
            .bind("Update")
            .bind(c.providers)
            .bind(c.priorities)
            .bind(c.buckets)
            .bind(c.floors)
            .bind(c.numbers.clone())
            .bind(c.numbers)
            .bind(1_i64)
            .bind(2_i64)
            .fetch_all(&mut *connection)
            .await?;
    }
    for file in files {
        let planned: (i64, i64) = sqlx::query_as(
            "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement = $1",
        )
        .bind(file)
        .fetch_one(&mut *connection)
        .await?;
        assert_eq!(planned, (5, 5), "the server plans it at every execution: {file}");
    }
    Ok(())
}

/// Statements with a single form.
async fn check_singles(connection: &mut PgConnection) -> anyhow::Result<()> {
    let machine: Uuid =
        sqlx::query_scalar("SELECT machine_id FROM machine LIMIT 1").fetch_one(&mut *connection).await?;
    let lock =
        cost(connection, include_str!("../../sql/schedule/lock_due_rows.sql"), |query| query.bind(machine))
            .await?;
    check("locking a machine's rows", &lock, 20);
    let lock_under = include_str!("../../sql/schedule/lock_due_rows_for_session.sql");
    let session: Uuid = sqlx::query_scalar("SELECT session_id FROM session WHERE closed_at IS NULL LIMIT 1")
        .fetch_one(&mut *connection)
        .await?;
    let lock = cost(connection, lock_under, |query| query.bind(session).bind(machine)).await?;
    check("locking a session and a machine's rows", &lock, 30);
    let one = include_str!("../../sql/facts/read_machine.sql");
    let read = cost(connection, one, |query| query.bind(machine)).await?;
    check("reading a machine's facts", &read, 60);
    let facts = include_str!("../../sql/facts/read_page.sql");
    let page = cost(connection, facts, |query| query.bind(machine).bind(Uuid::max()).bind(100_i64)).await?;
    check("reading a hundred machines' facts", &page, 6_000);
    let sample = include_str!("../../sql/fleet_sample/list_machine_page.sql");
    let page = cost(connection, sample, |query| query.bind(machine).bind(1_000_i64)).await?;
    check("counting a thousand machines", &page, 40_000);
    let latest = include_str!("../../sql/fleet_sample/read_latest.sql");
    let latest = cost(connection, latest, |query| query.bind(None::<chrono::DateTime<chrono::Utc>>)).await?;
    check("looking for the newest count", &latest, 10);
    check_paces(connection).await?;
    check_audit(connection).await?;
    let budget = cost(connection, include_str!("../../sql/intent/count_budget_use.sql"), |query| {
        query.bind("reboot").bind(600_000.0_f64)
    })
    .await?;
    check("counting a budget", &budget, 20);
    let steps = include_str!("../../sql/intent/list_recent_steps.sql");
    let steps =
        cost(connection, steps, |query| query.bind(machine).bind(chrono::DateTime::UNIX_EPOCH).bind(5_i64));
    check("listing the recent steps of a machine", &steps.await?, 20);
    let cancel = cost(connection, include_str!("../../sql/work/cancel.sql"), |query| {
        query.bind(machine).bind(machine).bind("access").bind(1_i64).bind("not now")
    })
    .await?;
    check("cancelling", &cancel, 20);
    let reached = include_str!("../../sql/inspect/list_by_id_in_scope.sql");
    let named = cost(connection, reached, |query| {
        query.bind(vec!["rack-3", "rack-4"]).bind(Uuid::nil()).bind(Uuid::max()).bind(6_i64)
    });
    check("finding a machine of two providers by its id", &named.await?, 300);
    let machines = read_oldest_heartbeats(connection).await?;
    let batch = cost(connection, include_str!("../../sql/heartbeat/update_batch.sql"), |query| {
        query
            .bind(machines.clone())
            .bind(vec![vec![0_u8; 32]; 100])
            .bind(vec!["b"; 100])
            .bind(vec!["i"; 100])
            .bind(vec![i64::MAX; 100])
            .bind(vec!["1"; 100])
    })
    .await?;
    check("storing a hundred heartbeats", &batch, 5_000);
    Ok(())
}

/// A list of the audit looks at a bounded number of lines, also if none of them matches.
async fn check_audit(connection: &mut PgConnection) -> anyhow::Result<()> {
    const EXAMINED: i64 = 10_000;
    sqlx::raw_sql(
        "INSERT INTO audit (audit_id, at, actor, rpc, target, machine_id, reason, request, dry_run, outcome, message)
         SELECT gen_random_uuid(), now() - n * INTERVAL '1 minute', 'kim', 'shepherd.fleet.v1.Machines/Hold', 'm',
                CASE WHEN n % 2 = 0 THEN (SELECT machine_id FROM machine LIMIT 1) END, 'r', decode('00', 'hex'), FALSE,
                'changed', ''
         FROM generate_series(1, 100000) n;
         ANALYZE audit",
    )
    .execute(&mut *connection)
    .await?;
    let (now, machine): (chrono::DateTime<chrono::Utc>, Uuid) =
        sqlx::query_as("SELECT now(), machine_id FROM audit WHERE machine_id IS NOT NULL LIMIT 1")
            .fetch_one(&mut *connection)
            .await?;
    let epoch = chrono::DateTime::UNIX_EPOCH;
    let list = cost(connection, include_str!("../../sql/audit/list.sql"), |query| {
        let query = query.bind(now).bind(Uuid::max()).bind(101_i64).bind(EXAMINED).bind(epoch);
        query.bind("nobody").bind("machines")
    });
    check("listing the audit of an actor", &list.await?, 12_000);
    let list = cost(connection, include_str!("../../sql/audit/list_of_machine.sql"), |query| {
        let query = query.bind(now).bind(Uuid::max()).bind(101_i64).bind(EXAMINED).bind(epoch);
        query.bind("nobody").bind("machines").bind(machine)
    });
    check("listing the audit of a machine and an actor", &list.await?, 12_000);
    let place = cost(connection, include_str!("../../sql/audit/find_last_examined.sql"), |query| {
        query.bind(now).bind(Uuid::max()).bind(epoch).bind(EXAMINED - 1)
    });
    check("finding the last line of a page of the audit", &place.await?, 12_000);
    let place =
        cost(connection, include_str!("../../sql/audit/find_last_examined_of_machine.sql"), |query| {
            query.bind(now).bind(Uuid::max()).bind(epoch).bind(EXAMINED - 1).bind(machine)
        });
    check("finding the last line of a page of the audit of a machine", &place.await?, 12_000);
    Ok(())
}

/// However much happens in a minute, the pace is computed from the newest lines.
async fn check_paces(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "INSERT INTO history (machine_id, at, event, edge, lane, fence, process)
         SELECT machine_id, clock_timestamp() - n * INTERVAL '2 ms' + (edge = 'end')::INT * INTERVAL '1 s',
                CASE edge WHEN 'end' THEN 'Finished' ELSE 'Started' END, edge, 'access', n, 'AgentStart'
         FROM (SELECT machine_id FROM machine LIMIT 1) m, generate_series(1, 50000) n,
              (VALUES ('start'), ('end')) e (edge);
         ANALYZE history",
    )
    .execute(&mut *connection)
    .await?;
    let pace = include_str!("../../sql/inspect/measure_throughput.sql");
    for providers in [vec![], vec!["rack-3", "rack-4"]] {
        let paces =
            cost(connection, pace, |query| query.bind(60_000.0_f64).bind(2_000_i64).bind(providers.clone()));
        check("telling the pace of a busy minute", &paces.await?, 20_000);
    }
    Ok(())
}

/// A hundred timers of healthy machines: each costs its own rows, not those of the fleet.
async fn check_due_timers(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "UPDATE machine_due SET ready_at = now() - INTERVAL '1 second' WHERE (machine_id, lane) IN (
             SELECT machine_id, lane FROM machine_due WHERE timer ORDER BY ready_at LIMIT 100);
         ANALYZE machine_due",
    )
    .execute(&mut *connection)
    .await?;
    let timers = cost(connection, REARMING, |query| query.bind(1_i64)).await?;
    check("re-arming of a hundred timers", &timers, 6_000);
    Ok(())
}

/// The bounds are effective: without its index, each statement exceeds its own.
async fn planted_faults_are_found(connection: &mut PgConnection) -> anyhow::Result<()> {
    sqlx::query("DROP INDEX machine_due_next").execute(&mut *connection).await?;
    let probe = probe_cost(connection, "AgentStart", &RACKS).await?;
    assert!(!cheap(&probe, PROBE), "a probe without its index passes: {:#}", probe.plan);
    sqlx::query("DROP INDEX machine_due_claim").execute(&mut *connection).await?;
    let claim = claim_cost(connection, CLAIMING, "AgentStart").await?;
    assert!(!cheap(&claim, CLAIM), "a claim without its index passes: {:#}", claim.plan);
    sqlx::query("DROP INDEX machine_due_timer").execute(&mut *connection).await?;
    let rearm = cost(connection, REARMING, |query| query.bind(1_i64)).await?;
    assert!(!cheap(&rearm, 6_000), "re-arming without its index passes");
    sqlx::query("DROP INDEX session_open").execute(&mut *connection).await?;
    let close = cost(connection, CLOSING, |query| query).await?;
    assert!(!cheap(&close, 2_500), "closing without its index passes: {:#}", close.plan);
    Ok(())
}
