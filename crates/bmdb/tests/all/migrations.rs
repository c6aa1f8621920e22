//! The schema forward and back, by several at once, and refused when it is not ours; and which statements skip
//! locked rows.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use model::selector::Selector;
use model::selector::error::SelectorError;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::connection::schema::{MIGRATIONS, supported_version};
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, PATIENCE};
use testkit::postgres::{TestDatabase, migrator};
use testkit::source;
use testkit::statement::{self, Statement};

/// An empty database in the test's own server, without shim: migrations as in earnest.
async fn empty(database: &TestDatabase) -> anyhow::Result<PgConnection> {
    let mut connection = database.url().parse::<PgConnectOptions>()?.connect().await?;
    sqlx::raw_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public").execute(&mut connection).await?;
    sqlx::raw_sql("SET search_path = public, shim, pg_catalog").execute(&mut connection).await?;
    Ok(connection)
}

fn settings(database: &TestDatabase) -> anyhow::Result<ConnectionSettings> {
    let mut settings = ConnectionSettings::from_url(database.url(), "migrating")?;
    settings.dialect = database.dialect();
    settings.search_path = Some("public,shim,pg_catalog".into());
    Ok(settings)
}

async fn tables(connection: &mut PgConnection) -> anyhow::Result<Vec<String>> {
    Ok(sqlx::query_scalar(
        "SELECT c.relname || ' ' || coalesce(a.attname, '') || ' ' || coalesce(format_type(a.atttypid, a.atttypmod), '')
         FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         WHERE c.relnamespace = 'public'::regnamespace AND c.relname <> '_sqlx_migrations'
           AND c.relname NOT LIKE '\\_sqlx%' ORDER BY 1",
    )
    .fetch_all(connection)
    .await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_migration_goes_forward_back_and_forward_again_with_and_without_rows() -> TestResult {
    let database = TestDatabase::create("migrations").await?;
    let mut connection = empty(&database).await?;
    let mut versions: Vec<i64> = vec![0];
    versions
        .extend(MIGRATIONS.iter().filter(|one| one.migration_type.is_up_migration()).map(|one| one.version));
    let mut shapes = vec![tables(&mut connection).await?];
    for version in &versions[1..] {
        migrator().run_to(*version, &mut connection).await?;
        shapes.push(tables(&mut connection).await?);
        migrator().undo(&mut connection, version - 1).await?;
        assert_eq!(
            tables(&mut connection).await?,
            shapes[shapes.len() - 2],
            "{version} back leaves another schema"
        );
        migrator().run_to(*version, &mut connection).await?;
        assert_eq!(tables(&mut connection).await?, shapes[shapes.len() - 1], "{version} forward again");
    }
    sqlx::raw_sql(
        "INSERT INTO machine VALUES ('00000000-0000-0000-0000-000000000001', now());
         INSERT INTO machine_hold VALUES ('00000000-0000-0000-0000-000000000001', 'everything', 'r', 'b', now());
         INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at,
                phase_index, phase_since, rules_version, policy_version, version, fence, losses)
         VALUES ('00000000-0000-0000-0000-000000000001', 'access', '', 1, 0, FALSE, '', '', 'New', now(), 1, 0, 0, 0, 0);
         INSERT INTO session VALUES (gen_random_uuid(), gen_random_uuid(), 'c', '{}', 1, now(), now());
         INSERT INTO history VALUES ('00000000-0000-0000-0000-000000000001', now(), 'Held');
         INSERT INTO fleet_sample VALUES (now(), now(), 7, '{}');
         INSERT INTO brake VALUES ('recovery', 'all', 'r', now(), now())",
    )
    .execute(&mut connection)
    .await?;
    for (place, version) in versions.iter().enumerate().skip(1).rev() {
        migrator().undo(&mut connection, version - 1).await?;
        assert_eq!(tables(&mut connection).await?, shapes[place - 1], "{version} back with rows");
    }
    migrator().run(&mut connection).await?;
    assert_eq!(Some(&tables(&mut connection).await?), shapes.last());
    connection.close().await?;
    Ok(())
}

/// The release before the role `deployer` does not know it, and operators make those calls there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployers_are_operators_on_the_schema_before_the_role() -> TestResult {
    const WITH_DEPLOYERS: i64 = 31;
    let database = TestDatabase::create("migrate_deployers").await?;
    let mut connection = empty(&database).await?;
    let add = |role: &str| {
        format!(
            "INSERT INTO access_credential (credential_id, kind, name, role, proof, created_at, created_by)
             VALUES (gen_random_uuid(), 'token', '{role}', '{role}', sha256('{role}'), now(), 'test')"
        )
    };
    let roles = "SELECT name || ' ' || role FROM access_credential ORDER BY name";
    migrator().run_to(WITH_DEPLOYERS - 1, &mut connection).await?;
    sqlx::raw_sql(AssertSqlSafe(add("operator"))).execute(&mut connection).await?;
    let refused = sqlx::raw_sql(AssertSqlSafe(add("deployer"))).execute(&mut connection).await;
    assert!(refused.is_err(), "the schema before has the role");
    migrator().run_to(WITH_DEPLOYERS, &mut connection).await?;
    for role in ["viewer", "deployer", "admin"] {
        sqlx::raw_sql(AssertSqlSafe(add(role))).execute(&mut connection).await?;
    }
    let refused = sqlx::raw_sql(AssertSqlSafe(add("root"))).execute(&mut connection).await;
    assert!(refused.is_err(), "any role can be stored");
    let stored: Vec<String> = sqlx::query_scalar(roles).fetch_all(&mut connection).await?;
    assert_eq!(stored, ["admin admin", "deployer deployer", "operator operator", "viewer viewer"]);
    migrator().undo(&mut connection, WITH_DEPLOYERS - 1).await?;
    let stored: Vec<String> = sqlx::query_scalar(roles).fetch_all(&mut connection).await?;
    assert_eq!(stored, ["admin admin", "deployer operator", "operator operator", "viewer viewer"]);
    let refused = sqlx::raw_sql(AssertSqlSafe(add("deployer"))).execute(&mut connection).await;
    assert!(refused.is_err(), "the schema before keeps the role");
    migrator().run_to(WITH_DEPLOYERS, &mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// A validation would scan the audit, which may be large, under an exclusive lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcomes_of_the_audit_are_checked_without_a_scan_of_it() -> TestResult {
    const WITH_NO_EFFECT: i64 = 42;
    let database = TestDatabase::create("migrate_outcomes").await?;
    let mut connection = empty(&database).await?;
    let validated = "SELECT convalidated FROM pg_catalog.pg_constraint
                     WHERE conrelid = 'audit'::regclass AND conname = $1";
    migrator().run_to(WITH_NO_EFFECT, &mut connection).await?;
    let forward: bool =
        sqlx::query_scalar(validated).bind("audit_outcome_name").fetch_one(&mut connection).await?;
    migrator().undo(&mut connection, WITH_NO_EFFECT - 1).await?;
    let back: bool =
        sqlx::query_scalar(validated).bind("audit_outcome_check").fetch_one(&mut connection).await?;
    assert_eq!((forward, back), (false, false));
    migrator().run_to(WITH_NO_EFFECT, &mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// Selectors before the prefixes, the same after them, and after the way back if that is another text.
const SELECTORS: [(&str, &str, Option<&str>); 20] = [
    ("", "", None),
    ("location=ams", "location=ams*", None),
    ("location=ams-1/r7,memory>=64GiB,label.rack=7", "location=ams-1/r7*,memory>=64GiB,label.rack=7", None),
    ("provider=rack,manufacturer=Dell Inc.", "provider=rack,manufacturer=Dell Inc.", None),
    ("location=a,location=b", "location=a*,location=b*", None),
    ("location=ams,", "location=ams*,", None),
    ("location = ams , cpus>=4", "location = ams*, cpus>=4", Some("location = ams, cpus>=4")),
    ("location=ams,\n\tcpus>=4", "location=ams*,  cpus>=4", Some("location=ams,  cpus>=4")),
    // A comma belongs to a value unless another term follows.
    (
        "location=Hall A, row 7,label.row",
        "location=Hall A\\, row 7*,label.row",
        Some("location=Hall A\\, row 7,label.row"),
    ),
    (
        "manufacturer=Acme Co., Ltd.,location=a,b,cpus>=1",
        "manufacturer=Acme Co.\\, Ltd.,location=a\\,b*,cpus>=1",
        Some("manufacturer=Acme Co.\\, Ltd.,location=a\\,b,cpus>=1"),
    ),
    ("location=\u{4e2d}, \u{540d}", "location=\u{4e2d}\\, \u{540d}*", Some("location=\u{4e2d}\\, \u{540d}")),
    ("product=A, memory", "product=A\\, memory", Some("product=A\\, memory")),
    ("product=A\\,location=b,location=c", "product=A\\,location=b,location=c*", None),
    // Quotes.
    ("location=\"Hall A, row 7\",label.row", "location=\"Hall A, row 7*\",label.row", None),
    ("product=\"A, location=x\",location=fra", "product=\"A, location=x\",location=fra*", None),
    ("location=\"a\\\"b\",provider=x", "location=\"a\\\"b*\",provider=x", None),
    // Stars and backslashes were characters like others.
    ("product=X*,location=a*b", "product=X\\*,location=a\\*b*", None),
    ("product=\\*", "product=\\\\\\*", Some("product=\\\\*")),
    ("location=a\\", "location=a\\\\*", Some("location=a\\\\")),
    ("label.location=x", "label.location=x", None),
];

/// Each location was a prefix. A comma within a value, a star and a backslash keep their meaning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_locations_stay_prefixes() -> TestResult {
    const WITH_PREFIXES: i64 = 43;
    let database = TestDatabase::create("migrate_locations").await?;
    let mut connection = empty(&database).await?;
    migrator().run_to(WITH_PREFIXES - 1, &mut connection).await?;
    for (number, (selector, ..)) in (100..).zip(SELECTORS) {
        sqlx::query(
            "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
                 created_by, wait_reasons, settled)
             VALUES (gen_random_uuid(), $1, 1, 0, $2, '[]', 'automatic', 1, now(), 'kim', '[]', FALSE)",
        )
        .bind(format!("c{number}"))
        .bind(selector)
        .execute(&mut connection)
        .await?;
        sqlx::query(
            "INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds, created_at,
                 created_by, reason)
             VALUES ($1, sha256('r'), 'r', $2, 1, 60, now(), 'kim', 'next')",
        )
        .bind(format!("r{number}"))
        .bind(selector)
        .execute(&mut connection)
        .await?;
    }
    // The roll-out of an upgrade has no selector.
    sqlx::raw_sql("UPDATE roll_out SET selector = 'cluster ams' WHERE roll_out_id = 'r100'")
        .execute(&mut connection)
        .await?;
    let clusters = "SELECT selector FROM cluster ORDER BY name";
    let roll_outs = "SELECT selector FROM roll_out WHERE roll_out_id <> 'r100' ORDER BY roll_out_id";

    migrator().run_to(WITH_PREFIXES, &mut connection).await?;
    let expected = SELECTORS.map(|(_, expected, _)| expected);
    let stored: Vec<String> = sqlx::query_scalar(clusters).fetch_all(&mut connection).await?;
    assert_eq!(stored, expected);
    let stored: Vec<String> = sqlx::query_scalar(roll_outs).fetch_all(&mut connection).await?;
    assert_eq!(stored, expected[1..]);
    for selector in expected {
        let parsed: Result<Selector, SelectorError> = selector.parse();
        assert!(parsed.is_ok(), "{selector}: {parsed:?}");
    }
    let upgrade = "SELECT selector FROM roll_out WHERE roll_out_id = 'r100'";
    assert_eq!(sqlx::query_scalar::<_, String>(upgrade).fetch_one(&mut connection).await?, "cluster ams");

    migrator().undo(&mut connection, WITH_PREFIXES - 1).await?;
    let former = SELECTORS.map(|(selector, _, back)| back.unwrap_or(selector));
    let stored: Vec<String> = sqlx::query_scalar(clusters).fetch_all(&mut connection).await?;
    assert_eq!(stored, former);
    let stored: Vec<String> = sqlx::query_scalar(roll_outs).fetch_all(&mut connection).await?;
    assert_eq!(stored, former[1..]);
    migrator().run_to(WITH_PREFIXES, &mut connection).await?;
    let stored: Vec<String> = sqlx::query_scalar(clusters).fetch_all(&mut connection).await?;
    assert_eq!(stored, expected, "forward again");
    connection.close().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_migrate_an_empty_database_at_once() -> TestResult {
    let database = TestDatabase::create("migrate_at_once").await?;
    let mut connection = empty(&database).await?;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let settings = settings(&database)?;
        all.spawn(async move {
            let bmdb = Bmdb::connect(settings).await?;
            bmdb.migrate().await?;
            bmdb.require_schema().await?;
            bmdb.read_identity().await
        });
    }
    let mut identities = Vec::new();
    while let Some(done) = all.join_next().await {
        identities.push(done??);
    }
    identities.dedup();
    assert_eq!(identities.len(), 1, "each thinks it is another database: {identities:?}");
    let (rows, locks): (i64, i64) =
        sqlx::query_as("SELECT (SELECT count(*) FROM policy), (SELECT count(*) FROM migration_lock)")
            .fetch_one(&mut connection)
            .await?;
    assert_eq!((rows, locks), (1, 0));
    Ok(())
}

/// What has been waiting for a lock on `history`, and until when the migration lock is taken.
async fn waiting(looking: &mut PgConnection) -> anyhow::Result<Option<(String, DateTime<Utc>)>> {
    Ok(sqlx::query_as(
        "SELECT l.virtualtransaction, m.until FROM pg_locks l, migration_lock m
         WHERE l.relation = 'history'::regclass AND NOT l.granted AND l.database =
               (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .fetch_optional(looking)
    .await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migration_that_waits_for_others_keeps_its_lock_and_is_run_again() -> TestResult {
    let database = TestDatabase::create("migrate_beside").await?;
    let mut older = empty(&database).await?;
    migrator().run_to(4, &mut older).await?;
    let mut looking = database.url().parse::<PgConnectOptions>()?.connect().await?;
    sqlx::raw_sql(
        "SET default_transaction_isolation = 'read committed'; SET search_path = public, shim, pg_catalog",
    )
    .execute(&mut looking)
    .await?;
    // A program of the previous release writes history for longer than the lock timeout.
    sqlx::raw_sql("BEGIN; LOCK TABLE history IN ROW EXCLUSIVE MODE").execute(&mut older).await?;
    let bmdb = Bmdb::connect(settings(&database)?).await?;
    let migrating = tokio::spawn({
        let bmdb = bmdb.clone();
        async move { bmdb.migrate().await }
    });
    let deadline = Instant::now() + PATIENCE;
    let mut seen = Vec::new();
    let (mut again, mut prolonged) = (false, false);
    while !(again && prolonged) {
        assert!(!migrating.is_finished(), "it gave up: {:?}", migrating.await);
        assert!(Instant::now() < deadline, "run again: {again}, lock prolonged: {prolonged}");
        if sqlx::query_scalar("SELECT to_regclass('migration_lock') IS NOT NULL")
            .fetch_one(&mut looking)
            .await?
            && let Some(found) = waiting(&mut looking).await?
        {
            seen.push(found);
        }
        again = seen.iter().any(|(transaction, _)| *transaction != seen[0].0);
        prolonged = seen.iter().any(|(_, until)| *until > seen[0].1);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(bmdb.schema_version().await? < supported_version(), "it did not wait");
    sqlx::raw_sql("COMMIT").execute(&mut older).await?;
    migrating.await??;
    bmdb.require_schema().await?;
    let locks: i64 = sqlx::query_scalar("SELECT count(*) FROM migration_lock").fetch_one(&mut older).await?;
    assert_eq!(locks, 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schema_that_is_not_this_releases_is_refused_with_a_sentence() -> TestResult {
    let database = TestDatabase::create("other_schema").await?;
    let mut connection = empty(&database).await?;
    let bmdb = Bmdb::connect(settings(&database)?).await?;
    let known = supported_version();
    let text = bmdb.require_schema().await.expect_err("an empty database passed").to_string();
    assert_eq!(
        text,
        format!(
            "the BMDB has schema version 0, and this release needs {known}: start the `shepherd` of this \
             release once, which upgrades it"
        )
    );
    bmdb.migrate().await?;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9999, 'of the future', TRUE, '', 0)",
    )
    .execute(&mut connection)
    .await?;
    for result in [bmdb.require_schema().await, bmdb.migrate().await] {
        let error = result.expect_err("a newer schema passed");
        assert!(matches!(error, BmdbError::NewerSchema { found: 9999, .. }));
        assert_eq!(
            error.to_string(),
            format!(
                "the BMDB has schema version 9999, and this release knows versions up to {known}: it was \
                 upgraded by a newer shepherd; start that release instead"
            )
        );
    }
    let locks: i64 =
        sqlx::query_scalar("SELECT count(*) FROM migration_lock").fetch_one(&mut connection).await?;
    assert_eq!(locks, 0, "the refusal kept the lock");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_of_a_process_that_died_migrating_is_taken_over() -> TestResult {
    let kit = Kit::new("dead_migrator").await?;
    sqlx::query(
        "INSERT INTO migration_lock VALUES (TRUE, gen_random_uuid(), pg_catalog.now() - INTERVAL '1 second')",
    )
    .execute(&kit.pool)
    .await?;
    kit.bmdb.migrate().await?;
    assert_eq!(kit.count("SELECT count(*) FROM migration_lock").await?, 0);
    Ok(())
}

/// The places of the statements that skip locked rows.
fn places_that_skip(statements: &[Statement]) -> Vec<&str> {
    let skipping = statements.iter().filter(|statement| statement.words().contains("SKIP LOCKED"));
    let mut places: Vec<&str> = skipping.map(|statement| statement.place.as_str()).collect();
    places.sort_unstable();
    places
}

/// `SKIP LOCKED` may pass over a row too many where transactions are SERIALIZABLE on a distributed database, so each
/// statement that says it is listed here with what makes that harmless.
#[test]
fn statements_that_skip_locked_rows_lose_nothing_by_it() -> TestResult {
    let harmless = [
        (
            "sql/claim/claim.sql",
            "candidates are counted without locks, so that the claim is Contended and tried again",
        ),
        ("sql/claim/rearm_timers.sql", "the timer stays due, and the next look finds it"),
        ("sql/heartbeat/lock_batch.sql", "what is not locked is stored alone"),
        ("sql/reap/close_expired_sessions.sql", "the session stays overdue, and the next pass closes it"),
        ("sql/reap/free_leases.sql", "the lease stays with a closed session, and the next pass frees it"),
        ("sql/reap/free_work.sql", "the work stays with a closed session, and the next pass frees it"),
        ("sql/session/renew.sql", "what is not renewed is renewed alone"),
    ];
    let mut statements = statement::all()?;
    assert_eq!(places_that_skip(&statements), harmless.map(|(place, _)| place));
    // A statement that is added is found.
    let planted = "fn f() { sqlx::query!(\"SELECT 1 FROM work FOR UPDATE SKIP\n LOCKED\") }";
    statements.extend(statement::in_code("crates/bmdb/src/a.rs".as_ref(), &source::take_apart(planted)));
    assert_eq!(places_that_skip(&statements).first(), Some(&"crates/bmdb/src/a.rs:1"));
    Ok(())
}
