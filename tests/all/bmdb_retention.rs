//! Old rows are deleted in bounded batches, rows that are needed stay, and no transaction waits for it.

use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres};
use tokio_util::sync::CancellationToken;

use shepherd::bmdb::fleet::retention::{BATCH, RetainedKind, TABLES};
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::housekeeping;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use shepherd::model::unknown_fence::ANSWER_MARGIN;

use crate::bmdb_explain::{cheap, check, cost};
use crate::bmdb_kit::{Kit, LONG, Shepherd, ended};
use crate::harness::aloud::TestResult;

const DAY_MS: i64 = 86_400_000;
const HISTORY: &str = include_str!("../../sql/retention/delete_history.sql");
const INTENTS: &str = include_str!("../../sql/retention/delete_intents.sql");
const SESSIONS: &str = include_str!("../../sql/retention/delete_sessions.sql");
const OLD_SAMPLES: &str = include_str!("../../sql/retention/delete_samples.sql");
/// Lines of history that are older than thirty days.
const OLD_LINES: &str = "SELECT count(*) FROM history WHERE at < now() - INTERVAL '30 days'";

async fn kept_for_thirty_days(test_name: &str) -> anyhow::Result<Kit> {
    let kit = Kit::new(test_name).await?;
    kit.provided(3, "rack").await?;
    kit.bmdb.change_policy("test", |policy| policy.history_retention = Span::hours(30 * 24)).await?;
    Ok(kit)
}

async fn run(kit: &Kit, statements: &'static str) -> anyhow::Result<()> {
    sqlx::raw_sql(statements).execute(&kit.pool).await?;
    Ok(())
}

/// Inserts 2,500 lines that are too old and 500 that are not, each with a time of its own.
async fn tell_of_the_past(kit: &Kit) -> anyhow::Result<()> {
    run(
        kit,
        "INSERT INTO history (machine_id, at, event)
         SELECT (SELECT min(machine_id::TEXT)::UUID FROM machine),
                now() - INTERVAL '31 days' - n * INTERVAL '1 minute', 'Old' FROM generate_series(1, 2500) n;
         INSERT INTO history (machine_id, at, event)
         SELECT (SELECT min(machine_id::TEXT)::UUID FROM machine),
                now() - INTERVAL '29 days' + n * INTERVAL '1 second', 'Newer' FROM generate_series(1, 500) n",
    )
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_deletes_the_oldest_and_no_more_than_it_may() -> TestResult {
    let kit = kept_for_thirty_days("retention_batch").await?;
    tell_of_the_past(&kit).await?;
    // In whole minutes, because even a busy host takes less than one.
    let oldest =
        "SELECT floor(EXTRACT(EPOCH FROM now() - INTERVAL '31 days' - min(at)) / 60)::INT8 FROM history";
    assert_eq!(kit.count(oldest).await?, 2_500);
    for (deleted, oldest_left) in [(1_000, 1_500), (1_000, 500)] {
        assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, 1_000).await?, deleted);
        assert_eq!(kit.count(oldest).await?, oldest_left, "others than the oldest went");
    }
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, 1_000).await?, 500);
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, 1_000).await?, 0);
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Newer'").await?, 500);

    // Lines of the same time are deleted together: they have no key that distinguishes them.
    run(
        &kit,
        "INSERT INTO history (machine_id, at, event)
         SELECT machine_id, now() - INTERVAL '40 days' - n / 25 * INTERVAL '1 minute', 'Together'
         FROM (SELECT machine_id FROM machine LIMIT 1) m, generate_series(0, 74) n",
    )
    .await?;
    for left in [50, 25, 0] {
        assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, 10).await?, 25);
        assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Together'").await?, left);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_still_needs_is_kept_however_old_it_is() -> TestResult {
    let kit = kept_for_thirty_days("retention_needs").await?;
    tell_of_the_past(&kit).await?;
    run(
        &kit,
        "INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at, settled_at)
         SELECT gen_random_uuid(), 'reboot', 'rack', gen_random_uuid(), 1, 'old', now() - INTERVAL '41 days',
                now() - INTERVAL '31 days' - n * INTERVAL '1 second' FROM generate_series(1, 1200) n;
         INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at, settled_at)
         SELECT gen_random_uuid(), 'create', 'rack', gen_random_uuid(), 1, 'lately', now() - INTERVAL '41 days',
                now() - INTERVAL '1 day' FROM generate_series(1, 7);
         INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at)
         SELECT gen_random_uuid(), 'create', 'rack', gen_random_uuid(), 1, 'open', now() - INTERVAL '400 days'
         FROM generate_series(1, 5);
         INSERT INTO session
         SELECT gen_random_uuid(), gen_random_uuid(), 'old', '{}', 5000, now() - INTERVAL '60 days',
                now() - INTERVAL '31 days', now() - INTERVAL '31 days' - n * INTERVAL '1 second', 'over'
         FROM generate_series(1, 1100) n;
         INSERT INTO session
         SELECT ('00000000-0000-0000-0000-00000000000' || n)::UUID, gen_random_uuid(), 'needed', '{}', 5000,
                now() - INTERVAL '60 days', now() - INTERVAL '40 days', now() - INTERVAL '40 days', 'over'
         FROM generate_series(1, 2) n;
         INSERT INTO work SELECT machine_id, 'access', '00000000-0000-0000-0000-000000000001', 'Recovery', 1,
                now() - INTERVAL '40 days' FROM machine LIMIT 1;
         INSERT INTO named_lease VALUES ('provisioner', 'rack', '00000000-0000-0000-0000-000000000002', 7, now());
         INSERT INTO session
         SELECT gen_random_uuid(), gen_random_uuid(), 'open', '{}', 5000, now() - INTERVAL '60 days',
                now() + INTERVAL '5 seconds', NULL, NULL FROM generate_series(1, 3);
         INSERT INTO session
         SELECT gen_random_uuid(), gen_random_uuid(), 'lately', '{}', 5000, now() - INTERVAL '60 days', now(),
                now() - INTERVAL '1 day', 'over' FROM generate_series(1, 4)",
    )
    .await?;
    let fences =
        "SELECT (SELECT sum(fence) FROM machine_due)::INT8 + (SELECT sum(fence) FROM named_lease)::INT8";
    let before = kit.count(fences).await?;
    let counted = Metrics::new();
    let metrics = ManagerMetrics::register(&counted).housekeeping;
    let all = housekeeping::delete_expired_once(&kit.bmdb, &metrics, &CancellationToken::new()).await?;
    assert_eq!(all, 2_500 + 1_200 + 1_100);
    let text = counted.encode()?;
    for line in [
        "shepherd_rows_deleted_total{table=\"history\"} 2500",
        "shepherd_rows_deleted_total{table=\"intent\"} 1200",
        "shepherd_rows_deleted_total{table=\"session\"} 1100",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line} is missing in\n{text}");
    }
    for (what, left) in [
        (OLD_LINES, 0),
        ("SELECT count(*) FROM history WHERE event = 'Newer'", 500),
        ("SELECT count(*) FROM intent WHERE detail = 'lately'", 7),
        ("SELECT count(*) FROM intent WHERE detail = 'open' AND settled_at IS NULL", 5),
        ("SELECT count(*) FROM session WHERE component = 'needed'", 2),
        ("SELECT count(*) FROM session WHERE component = 'open'", 3),
        ("SELECT count(*) FROM session WHERE component = 'lately'", 4),
        ("SELECT count(*) FROM session WHERE component = 'old'", 0),
        (fences, before),
    ] {
        assert_eq!(kit.count(what).await?, left, "{what}");
    }
    assert_eq!(kit.bmdb.open_creations("rack").await?.len(), 5);

    // The reaper frees the leases of the two sessions. Then they may be deleted.
    run(&kit, "DELETE FROM work").await?;
    kit.bmdb.reap().await?;
    assert_eq!(kit.count("SELECT count(lease_session) FROM named_lease").await?, 0);
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::Sessions, BATCH).await?, 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_of_the_fleet_are_kept_for_thirty_days_whatever_history_is_kept_for() -> TestResult {
    let kit = Kit::new("retention_samples").await?;
    run(
        &kit,
        "INSERT INTO fleet_sample
         SELECT date_trunc('minute', now()) - make_interval(days => day, mins => n), now(), 7, '{}'
         FROM (VALUES (1), (29), (30), (170)) AS days (day), generate_series(1, 10) n",
    )
    .await?;
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::Samples, 3).await?, 3);
    assert_eq!(
        kit.count("SELECT count(*) FROM fleet_sample WHERE minute < now() - INTERVAL '100 days'").await?,
        7
    );
    let metrics = ManagerMetrics::register(&Metrics::new()).housekeeping;
    let rest = housekeeping::delete_expired_once(&kit.bmdb, &metrics, &CancellationToken::new()).await?;
    assert_eq!(rest, 17);
    assert_eq!(kit.count("SELECT count(*) FROM fleet_sample").await?, 20);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_longer_retention_counts_for_a_process_that_has_not_read_it() -> TestResult {
    let kit = kept_for_thirty_days("retention_policy").await?;
    tell_of_the_past(&kit).await?;
    let other = kit.database.bmdb().await?;
    other.change_policy("another process", |policy| policy.history_retention = Span::hours(60 * 24)).await?;
    assert_eq!(kit.bmdb.policy().1.history_retention, Span::hours(30 * 24), "it has read the new policy");
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, BATCH).await?, 0);
    Ok(())
}

/// Binds the arguments of the statement that deletes `what`, with a retention of `days`.
fn batch_of<'q>(
    query: Query<'q, Postgres, PgArguments>,
    what: &str,
    days: i64,
) -> Query<'q, Postgres, PgArguments> {
    let query = query.bind(days * DAY_MS).bind(BATCH);
    if what == "history" { query.bind(ANSWER_MARGIN) } else { query }
}

async fn begin_a_batch(kit: &Kit) -> anyhow::Result<PgConnection> {
    let mut by_hand = kit.connection().await?;
    sqlx::raw_sql("BEGIN").execute(&mut by_hand).await?;
    let deleted = batch_of(sqlx::query(HISTORY), "history", 30).execute(&mut by_hand).await?;
    assert_eq!(deleted.rows_affected(), BATCH.unsigned_abs());
    Ok(by_hand)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_is_written_while_a_batch_is_being_deleted() -> TestResult {
    let kit = kept_for_thirty_days("retention_beside").await?;
    tell_of_the_past(&kit).await?;
    let by_hand = begin_a_batch(&kit).await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::Update).await?;
    let machine = work.machine();
    work.finish(Vec::new(), "beside it").await?;
    assert_eq!(kit.ends(machine).await?, ["Finished"]);
    // Not committed before this line: the deleting transaction was open all the time.
    assert_eq!(kit.count(OLD_LINES).await?, 2_500);
    drop(by_hand);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_that_delete_at_once_delete_everything_once() -> TestResult {
    let kit = kept_for_thirty_days("retention_twice").await?;
    tell_of_the_past(&kit).await?;
    // A deletion does not wait for ever: after its time limit it leaves a locked batch to the transaction that holds
    // the lock.
    let by_hand = begin_a_batch(&kit).await?;
    assert_eq!(kit.bmdb.delete_expired(RetainedKind::History, BATCH).await?, 0);
    drop(by_hand);

    let mut by_hand = begin_a_batch(&kit).await?;
    let bmdb = kit.bmdb.clone();
    let second = tokio::spawn(async move { bmdb.delete_expired(RetainedKind::History, BATCH).await });
    kit.until_blocked("kit", 1).await?;
    sqlx::raw_sql("COMMIT").execute(&mut by_hand).await?;
    let second = ended("the second batch", second).await??;
    let left = kit.count(OLD_LINES).await?;
    assert_eq!(1_000 + i64::try_from(second)? + left, 2_500, "the second deleted {second}");
    let metrics = ManagerMetrics::register(&Metrics::new()).housekeeping;
    let rest = housekeeping::delete_expired_once(&kit.bmdb, &metrics, &CancellationToken::new()).await?;
    assert_eq!(i64::try_from(rest)?, left);
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Newer'").await?, 500);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_table_is_in_the_list_of_what_grows() -> TestResult {
    let kit = Kit::new("retention_tables").await?;
    let mut found: Vec<String> = sqlx::query_scalar(
        "SELECT relname::TEXT FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace",
    )
    .fetch_all(&kit.pool)
    .await?;
    found.sort();
    let mut listed = TABLES.map(str::to_owned);
    listed.sort();
    assert_eq!(found, listed, "say in crates/bmdb/src/fleet/retention.rs what bounds it");
    let essay =
        include_str!("../../crates/bmdb/src/fleet/retention.rs").split("\nuse ").next().unwrap_or_default();
    for table in TABLES.iter().filter(|table| !table.starts_with("machine_") && !table.starts_with('_')) {
        assert!(essay.contains(&format!("`{table}`")), "{table} is not in the essay");
    }
    Ok(())
}

/// A hundred thousand rows of each kind, evenly over a hundred days.
const FILL: &str = "
    INSERT INTO history (machine_id, at, event, edge, lane, fence, process)
    SELECT md5((n % 1000)::TEXT)::UUID, now() - n * INTERVAL '86.4 seconds', 'Finished', 'end', 'observe', n, 'Update'
    FROM generate_series(100000, 1, -1) n;
    INSERT INTO intent (intent_id, kind, provider, session_id, fence, detail, begun_at, settled_at)
    SELECT gen_random_uuid(), 'reboot', 'rack', gen_random_uuid(), 1, '', now() - n * INTERVAL '86.4 seconds',
           now() - n * INTERVAL '86.4 seconds' FROM generate_series(100000, 1, -1) n;
    INSERT INTO session
    SELECT gen_random_uuid(), gen_random_uuid(), 'old', '{}', 5000, now() - n * INTERVAL '86.4 seconds', now(),
           now() - n * INTERVAL '86.4 seconds', 'over' FROM generate_series(100000, 1, -1) n;
    INSERT INTO fleet_sample
    SELECT now() - n * INTERVAL '86.4 seconds', now(), 7, '{}' FROM generate_series(100000, 1, -1) n;
    ANALYZE history, intent, session, fleet_sample";

/// For each row: a page to find it, two on the way to each of the two things that a session may hold, three on the way
/// down to its key, and one each to check it again and to delete it.
const BATCH_PAGES: i64 = BATCH * 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_costs_its_rows_and_not_the_table() -> TestResult {
    let kit = Kit::new("retention_explain").await?;
    let mut connection = kit.connection().await?;
    sqlx::raw_sql("SET default_transaction_isolation = 'read committed'").execute(&mut connection).await?;
    sqlx::raw_sql(FILL).execute(&mut connection).await?;
    sqlx::raw_sql("VACUUM history, intent, session, fleet_sample").execute(&mut connection).await?;
    for (name, file, index) in [
        ("history", HISTORY, "DROP INDEX history_by_age"),
        ("intents", INTENTS, "DROP INDEX intent_settled"),
        ("sessions", SESSIONS, "DROP INDEX session_closed"),
        ("samples", OLD_SAMPLES, "ALTER TABLE fleet_sample DROP CONSTRAINT fleet_sample_pkey"),
    ] {
        let batch = cost(&mut connection, file, |query| batch_of(query, name, 50)).await?;
        check(&format!("a batch of {name}"), &batch, BATCH_PAGES);
        let nothing = cost(&mut connection, file, |query| batch_of(query, name, 200)).await?;
        check(&format!("a look for old {name} where none are"), &nothing, 20);
        sqlx::query(index).execute(&mut connection).await?;
        let without = cost(&mut connection, file, |query| batch_of(query, name, 50)).await?;
        assert!(!cheap(&without, BATCH_PAGES), "{name} without its index passes: {:#}", without.plan);
    }
    Ok(())
}
