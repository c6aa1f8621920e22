//! What the statements of every minute cost on a hundred thousand machines, in buffers, by the plans
//! that the server makes for the very files that are sent.
//!
//! Buffers and not milliseconds: they are the same on a busy host.

use serde_json::Value;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Postgres};
use uuid::Uuid;

use crate::bmdb_kit::Kit;

/// A fleet in which all is well but one in a hundred: its machines wait for an agent, in ten
/// providers, three priorities, eight buckets.
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
                ELSE now() + INTERVAL '5 minutes' + n % 300 * INTERVAL '1 second' END,
           n % 100 > 0, 'healthy', 'here:1', CASE WHEN n % 100 = 0 THEN 'Provided' ELSE 'Ready' END,
           now(), 1, 1, 0, 0, 0
    FROM numbered;
    INSERT INTO machine_due (machine_id, lane, process, provider, priority, bucket, ready_at, timer, reason,
           decided_at, phase_index, phase_since, rules_version, policy_version, version, fence, losses)
    SELECT machine_id, 'observe', 'Update', 'rack-' || n % 10, 1, n / 7 % 8,
           now() + INTERVAL '5 minutes' + n % 1800 * INTERVAL '1 second', FALSE, 'looked at', 'here:1', 'Ready', now(), 1, 1, 0, 0, 0
    FROM numbered;
    INSERT INTO session SELECT gen_random_uuid(), gen_random_uuid(), 'filled', '{}', 5000, now(), now() + INTERVAL '1 hour'
    FROM generate_series(1, 1000);
    INSERT INTO session SELECT gen_random_uuid(), gen_random_uuid(), 'old', '{}', 5000, now(), now(), now(), 'over'
    FROM generate_series(1, 20000);
    INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at, settled_at)
    SELECT gen_random_uuid(), 'reboot', 'rack', gen_random_uuid(), 1, '', now() - n * INTERVAL '1 minute', now()
    FROM generate_series(1, 50000) n;
    INSERT INTO fleet_listening VALUES (1, now() - INTERVAL '1 day', now());
    ANALYZE machine, machine_provided, machine_agent_started, machine_agent_heartbeat, machine_due, session, intent";

async fn filled(name: &str, machines: usize) -> anyhow::Result<(Kit, PgConnection)> {
    let kit = Kit::new(name).await?;
    let mut connection = kit.connection().await?;
    sqlx::raw_sql("SET default_transaction_isolation = 'read committed'").execute(&mut connection).await?;
    let fill = FILL.replace("$1", &machines.to_string());
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut connection).await?;
    // Sets the hint bits and the visibility map, as autovacuum has on a fleet that has been there for
    // a while.
    sqlx::raw_sql(
        "VACUUM machine, machine_due, machine_agent_heartbeat, machine_agent_started, session, intent",
    )
    .execute(&mut connection)
    .await?;
    Ok((kit, connection))
}

/// Pages touched, and the tables read from end to end.
#[derive(Debug)]
struct Cost {
    buffers: i64,
    scanned: Vec<String>,
    plan: Value,
}

fn collect(node: &Value, scanned: &mut Vec<String>) {
    if node["Node Type"].as_str().is_some_and(|name| name.contains("Seq Scan")) {
        scanned.push(node["Relation Name"].as_str().unwrap_or("?").to_owned());
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        collect(child, scanned);
    }
}

/// Runs a statement, says what it cost, and undoes it.
async fn cost(
    connection: &mut PgConnection,
    file: &str,
    bind: impl for<'q> Fn(Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments>,
) -> anyhow::Result<Cost> {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {file}");
    let mut last = None;
    // The second run: the first one fills the session's caches and counts the catalogue's pages.
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

fn check(what: &str, cost: &Cost, most: i64) {
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

/// Claim, re-arm, free, close and renew as this mode sends them.
fn texts(skip_locked: bool) -> (&'static str, &'static str, &'static str, &'static str, &'static str) {
    if skip_locked {
        (
            include_str!("../../sql/claim/claim.sql"),
            include_str!("../../sql/claim/rearm_timers.sql"),
            include_str!("../../sql/reap/free_work.sql"),
            include_str!("../../sql/reap/close_sessions.sql"),
            include_str!("../../sql/session/renew.sql"),
        )
    } else {
        (
            include_str!("../../sql/claim/claim_waiting.sql"),
            include_str!("../../sql/claim/rearm_timers_waiting.sql"),
            include_str!("../../sql/reap/free_work_waiting.sql"),
            include_str!("../../sql/reap/close_sessions_waiting.sql"),
            include_str!("../../sql/session/renew_waiting.sql"),
        )
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_of_every_minute_stay_cheap_on_a_hundred_thousand_machines() -> anyhow::Result<()> {
    let (small_kit, mut small) = filled("explain_small", 10_000).await?;
    let (kit, mut connection) = filled("explain", 100_000).await?;
    let (claim, rearm, reap, close, renew) = texts(kit.skip_locked());

    let probe = include_str!("../../sql/claim/probe.sql");
    // Nothing of a process at all; nothing due though every machine has a row; something due. The
    // probe is one for all providers and priorities, so their number costs nothing.
    for process in ["Decommission", "Update", "Recovery", "AgentStart"] {
        let one = cost(&mut connection, probe, |query| query.bind(process)).await?;
        check(&format!("probe for {process}"), &one, 10);
    }

    let here = claim_cost(&mut connection, claim, "AgentStart").await?;
    let there = claim_cost(&mut small, claim, "AgentStart").await?;
    check("claim of one on 100,000", &here, 400);
    check("claim of one on 10,000", &there, 400);
    let ratio = f64::from(i32::try_from(here.buffers)?) / f64::from(i32::try_from(there.buffers)?);
    assert!(
        (0.8..=1.2).contains(&ratio),
        "a claim costs {ratio:.2} times as much on ten times as many machines"
    );
    let empty = claim_cost(&mut connection, claim, "Update").await?;
    check("claim of nothing", &empty, 250);

    let no_timer = cost(&mut connection, rearm, |query| query.bind(1_i64)).await?;
    check("re-arming when no timer came due", &no_timer, 20);
    // A hundred timers of healthy machines: each costs its own rows, not the fleet's.
    sqlx::raw_sql(
        "UPDATE machine_due SET ready_at = now() - INTERVAL '1 second' WHERE (machine_id, lane) IN (
             SELECT machine_id, lane FROM machine_due WHERE timer LIMIT 100); ANALYZE machine_due",
    )
    .execute(&mut connection)
    .await?;
    let timers = cost(&mut connection, rearm, |query| query.bind(1_i64)).await?;
    check("re-arming a hundred timers", &timers, 6_000);
    let machine: Uuid =
        sqlx::query_scalar("SELECT machine_id FROM machine LIMIT 1").fetch_one(&mut connection).await?;
    let lock =
        cost(&mut connection, include_str!("../../sql/schedule/lock.sql"), |query| query.bind(machine))
            .await?;
    check("locking a machine's rows", &lock, 20);
    let read =
        cost(&mut connection, include_str!("../../sql/facts/read.sql"), |query| query.bind(machine)).await?;
    check("reading a machine's facts", &read, 60);
    let page = cost(&mut connection, include_str!("../../sql/facts/page.sql"), |query| {
        query.bind(machine).bind(100_i64)
    })
    .await?;
    check("reading a hundred machines' facts", &page, 6_000);

    let sessions: Vec<Uuid> =
        sqlx::query_scalar("SELECT session_id FROM session WHERE closed_at IS NULL LIMIT 20")
            .fetch_all(&mut connection)
            .await?;
    let renewal = cost(&mut connection, renew, |query| query.bind(sessions.clone())).await?;
    check("renewing twenty sessions", &renewal, 600);
    // A thousand open ones are looked at, and none of the twenty thousand that are over.
    let closing = cost(&mut connection, close, |query| query).await?;
    check("closing expired sessions", &closing, 2_500);
    let reaping = cost(&mut connection, reap, |query| query).await?;
    assert!(
        !reaping.scanned.iter().any(|table| table != "work"),
        "the reaper reads a table from end to end: {:#}",
        reaping.plan
    );
    assert!(reaping.buffers <= 20, "{:#}", reaping.plan);
    let budget = cost(&mut connection, include_str!("../../sql/intent/used.sql"), |query| {
        query.bind("reboot").bind(600_000.0_f64)
    })
    .await?;
    check("counting a budget", &budget, 20);

    let heartbeats = if kit.skip_locked() {
        include_str!("../../sql/heartbeat/batch.sql")
    } else {
        include_str!("../../sql/heartbeat/batch_waiting.sql")
    };
    let machines: Vec<Uuid> = sqlx::query_scalar(
        "SELECT machine_id FROM machine_agent_heartbeat ORDER BY at, machine_id LIMIT 100",
    )
    .fetch_all(&mut connection)
    .await?;
    let batch = cost(&mut connection, heartbeats, |query| {
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
    drop(small_kit);
    Ok(())
}
