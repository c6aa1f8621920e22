//! The races that queues like ours lose, each made to happen, and what stops it.
//!
//! One test a row of the table that the statements were designed by. Where a race belongs to one way
//! of using the database, the other ways are held to what takes its place there.

mod claims;
mod heartbeats;
mod sessions;

use model::process::Process;
use shepherd_bmdb::cluster::statement::StoredStatement;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::change_machine::Decision;
use shepherd_bmdb::metrics::database::ByOperation;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd, ended, hold};

const LOCK_DUE: &str = "SELECT fence FROM machine_due WHERE machine_id = $1 FOR UPDATE";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_does_not_overwrite_a_hold_that_it_waited_for() -> TestResult {
    let kit = Kit::new("hold_kept").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;

    let mut by_hand = kit.by_hand().await?;
    let mut operator = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *operator).await?;
    let finish = tokio::spawn(work.finish(Vec::new(), "done"));
    kit.until_blocked("worker", 1).await?;
    sqlx::query(
        "INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at)
         VALUES ($1, 'everything', 'disk swap', 'kim', clock_timestamp())",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    sqlx::query(
        "UPDATE machine_due SET process = NULL, ready_at = NULL, reason = 'held by kim: disk swap',
                version = version + 1 WHERE machine_id = $1 AND lane = 'access'",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    operator.commit().await?;
    ended("the finish", finish).await??;

    let (process, reason): (Option<String>, String) =
        sqlx::query_as("SELECT process, reason FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!((process, reason.as_str()), (None, "held by kim: disk swap"));
    assert_eq!(kit.sweep().await?, 0, "the schedule drifted");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_and_facts_in_one_statement_would_see_the_row_new_and_the_fact_old() -> TestResult {
    let kit = Kit::new("one_statement").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let engine = Shepherd::start(&kit, "engine", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut operator = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *operator).await?;
    let combined = {
        let mut connection = kit.connection().await?;
        tokio::spawn(async move {
            connection.execute("SET application_name = 'combined'").await?;
            sqlx::query_as::<_, (i64, Option<String>)>(
                "SELECT d.version, h.reason FROM machine_due d LEFT JOIN machine_hold h USING (machine_id)
                 WHERE d.machine_id = $1 AND d.lane = 'access' FOR UPDATE OF d",
            )
            .bind(machine.0)
            .fetch_one(&mut connection)
            .await
        })
    };
    kit.until_blocked("combined", 1).await?;
    let bmdb = engine.bmdb.clone();
    let repair = tokio::spawn(async move { bmdb.repair_schedule(machine).await });
    kit.until_blocked("engine", 1).await?;
    sqlx::query(
        "INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at)
         VALUES ($1, 'everything', 'disk swap', 'kim', clock_timestamp())",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    sqlx::query("UPDATE machine_due SET version = 1000 WHERE machine_id = $1")
        .bind(machine.0)
        .execute(&mut *operator)
        .await?;
    operator.commit().await?;

    let combined = ended("the combined statement", combined).await?;
    if kit.is_serializable() {
        let error = combined.expect_err("a serialisable statement saw two moments");
        assert_eq!(
            error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref(),
            Some("40001")
        );
    } else {
        // Whichever of the two goes first, the row is the new one and the fact is the old one.
        let (version, fact) = combined?;
        assert!(version >= 1000 && fact.is_none(), "needs no separate statements: {version}, {fact:?}");
    }
    ended("the repair", repair).await??;
    let process: Option<String> =
        sqlx::query_scalar("SELECT process FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!(process, None, "the engine computed from a fact older than the row");
    Ok(engine.stop().await?)
}

/// The commit has ended the transaction: there is nothing to roll back, and the server says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_loses_at_its_commit_is_run_again() -> TestResult {
    let kit = Kit::new("lost_commit").await?;
    let machine = kit.provided(1, "rack").await?[0];
    sqlx::raw_sql(
        "CREATE SEQUENCE public.commits;
         CREATE TABLE public.losses AS SELECT 2 AS n;
         CREATE FUNCTION public.lose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
             IF nextval(''public.commits'') <= (SELECT n FROM public.losses) THEN
                 RAISE EXCEPTION USING ERRCODE = ''serialization_failure'';
             END IF;
             RETURN NULL;
         END';
         CREATE CONSTRAINT TRIGGER lose AFTER INSERT OR UPDATE ON machine_hold DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION public.lose()",
    )
    .execute(&kit.pool)
    .await?;
    let sent = async |text: &'static str| -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "SELECT coalesce(sum(calls), 0)::INT8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = $1 AND rtrim(query, E' \\n') = $2",
        )
        .bind(kit.database.url().parse::<PgConnectOptions>()?.get_database())
        .bind(text)
        .fetch_one(&mut kit.database.server_url().parse::<PgConnectOptions>()?.connect().await?)
        .await?)
    };
    let (begun, undone) = (sent("BEGIN").await?, sent("ROLLBACK").await?);
    kit.change(machine, vec![hold("disk swap")]).await?;
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold").await?, 1);
    assert!(sent("BEGIN").await? >= begun + 3);
    if !kit.is_serializable() {
        assert_eq!(sent("ROLLBACK").await?, undone, "rolled back what was over");
    }
    let retried = ByOperation { operation: "changing facts", result: "retried" };
    assert!(kit.bmdb.metrics().transactions.get_or_create(&retried).get() >= 2);

    // As one among many does that all want the same: it has to lose long before that is an error.
    let lose = async |times: i32| {
        let times = format!("UPDATE public.losses SET n = {times}; ALTER SEQUENCE public.commits RESTART");
        sqlx::raw_sql(sqlx::AssertSqlSafe(times)).execute(&kit.pool).await
    };
    lose(20).await?;
    kit.change(machine, vec![hold("fan swap")]).await?;
    lose(i32::MAX).await?;
    let refused = kit.change(machine, vec![hold("never")]).await.expect_err("nobody loses for ever");
    let message = "the database could not serialise changing facts in 24 tries";
    assert!(refused.to_string().contains(message), "{refused:#}");
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold WHERE reason = 'fan swap'").await?, 1);
    Ok(())
}

/// Not the connection with its transaction open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_panics_leaves_nothing_behind() -> TestResult {
    let kit = Kit::new("panics").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "panicking", LONG).await?;
    for _ in 0..8 {
        let ended = shepherd.bmdb.change_machine(machine, |_| -> Decision<()> { panic!("as planned") }).await;
        assert!(matches!(ended, Err(BmdbError::TaskFailed { .. })), "{ended:?}");
    }
    kit.change(machine, vec![hold("nobody has it locked")]).await?;
    Ok(shepherd.stop().await?)
}

/// Two shepherds that verified different statements, of which the one with the lower statement may write last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_shepherds_never_lower_a_clusters_statement() -> TestResult {
    let kit = Kit::new("statement_raised").await?;
    let cluster: Uuid = sqlx::query_scalar(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled)
         VALUES (gen_random_uuid(), 'ams', 1, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE)
         RETURNING cluster_id",
    )
    .fetch_one(&kit.pool)
    .await?;
    assert_eq!(kit.bmdb.cluster_statement(cluster).await?, None);
    let of_order = |order: (i64, i64)| StoredStatement { encoded: format!("{order:?}").into_bytes(), order };
    for (order, newest) in
        [((0, 2), (0, 2)), ((0, 1), (0, 2)), ((0, 3), (0, 3)), ((1, 1), (1, 1)), ((0, 9), (1, 1))]
    {
        kit.bmdb.raise_cluster_statement(cluster, Vec::new(), of_order(order)).await?;
        assert_eq!(kit.bmdb.cluster_statement(cluster).await?, Some(of_order(newest)), "{order:?}");
    }

    for (first, second) in [((1, 2), (1, 3)), ((1, 5), (1, 4)), ((2, 1), (1, 9))] {
        let mut by_hand = kit.by_hand().await?;
        let mut lock = by_hand.begin().await?;
        sqlx::query("SELECT 1 FROM cluster FOR UPDATE").execute(&mut *lock).await?;
        let mut writers = Vec::new();
        for (waiting, order) in (1..).zip([first, second]) {
            let (bmdb, statement) = (kit.bmdb.clone(), of_order(order));
            let raising = async move { bmdb.raise_cluster_statement(cluster, Vec::new(), statement).await };
            writers.push(tokio::spawn(raising));
            kit.until_blocked("kit", waiting).await?;
        }
        lock.commit().await?;
        for writer in writers {
            ended("a writer", writer).await??;
        }
        let newest = of_order(first.max(second));
        assert_eq!(kit.bmdb.cluster_statement(cluster).await?, Some(newest), "{first:?} {second:?}");
    }
    // Verified by an authority that was replaced after a theft since then.
    sqlx::query(
        "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = '\\x05', curators = '[]', statement = NULL",
    )
    .execute(&kit.pool)
    .await?;
    kit.bmdb.raise_cluster_statement(cluster, vec![1], of_order((9, 9))).await?;
    assert_eq!(kit.bmdb.cluster_statement(cluster).await?, None);
    kit.bmdb.raise_cluster_statement(cluster, vec![5], of_order((0, 1))).await?;
    assert_eq!(kit.bmdb.cluster_statement(cluster).await?, Some(of_order((0, 1))));
    assert!(kit.bmdb.cluster_statement(Uuid::nil()).await?.is_none());
    kit.bmdb.raise_cluster_statement(Uuid::nil(), Vec::new(), of_order((0, 1))).await?;
    Ok(())
}
