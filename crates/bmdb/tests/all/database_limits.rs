//! Limits of the database server are read, and what is wrong with them is an issue until it is gone.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::Context as _;
use model::database_limits::{DatabaseLimits, SlotWal};
use model::issues::find_issues;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::private_postgres::PrivatePostgres;
use shepherd_bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection};

use crate::connections::{OWN, own_server, own_server_in};
use testkit::aloud::TestResult;
use testkit::bmdb_kit::until;
use testkit::dialect;

/// A shepherd's handle on the server, as its superuser or as another role.
async fn connect(server: &PrivatePostgres, role: Option<&str>) -> anyhow::Result<Bmdb> {
    let mut settings = ConnectionSettings::from_url(&server.url(OWN), "limits")?;
    settings.dialect = dialect::of_this_run()?;
    if let Some(role) = role {
        settings.options = settings.options.username(role);
    }
    let bmdb = Bmdb::connect(settings).await?;
    bmdb.read_policy().await?;
    Ok(bmdb)
}

async fn superuser(server: &PrivatePostgres) -> anyhow::Result<PgConnection> {
    Ok(server.url(OWN).parse::<PgConnectOptions>()?.connect().await?)
}

/// Runs statements that must each be alone, outside a transaction.
async fn run(connection: &mut PgConnection, statements: &[&'static str]) -> anyhow::Result<()> {
    for statement in statements {
        sqlx::query(*statement).execute(&mut *connection).await.context(*statement)?;
    }
    Ok(())
}

/// The messages of the issues of a kind.
async fn messages(bmdb: &Bmdb, id: &str) -> anyhow::Result<Vec<String>> {
    let issues = find_issues(&bmdb.read_issue_inputs().await?);
    Ok(issues.into_iter().filter(|issue| issue.id == id).map(|issue| issue.message).collect())
}

/// The only slot of the server.
fn slot_wal(limits: &DatabaseLimits) -> Option<SlotWal> {
    limits.slots.first().map(|slot| slot.wal)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_that_loses_wal_is_an_issue_until_it_is_dropped() -> TestResult {
    let server = own_server().await?;
    let mut admin = superuser(&server).await?;
    run(
        &mut admin,
        &[
            "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'",
            "ALTER SYSTEM SET max_wal_size = '32MB'",
            "ALTER SYSTEM SET min_wal_size = '32MB'",
            "SELECT pg_reload_conf()",
        ],
    )
    .await?;
    let bmdb = connect(&server, None).await?;
    until("the server has its settings", async || {
        Ok(bmdb.read_database_limits().await?.max_wal.0 == 32 << 20)
    })
    .await?;
    let limits = bmdb.read_database_limits().await?;
    assert!(limits.slots.is_empty(), "{limits:?}");
    assert!(limits.version.is_some() && limits.version == bmdb.server_version(), "{limits:?}");
    assert!(limits.database.0 > 1 << 20, "{limits:?}");
    assert!(limits.wal.is_some_and(|wal| wal.0 >= 16 << 20), "{limits:?}");
    assert!(!limits.transactions.database.is_empty() && !limits.transactions.is_overdue(), "{limits:?}");
    assert!(limits.transactions.freeze_age > 0 && limits.multixacts.freeze_age > 0, "{limits:?}");
    assert!(messages(&bmdb, "replication-slot").await?.is_empty());

    run(&mut admin, &["SELECT pg_create_physical_replication_slot('standby', true)"]).await?;
    let limits = bmdb.read_database_limits().await?;
    let slot = limits.slots.first().context("no slot")?;
    assert_eq!((&*slot.name, slot.is_active), ("standby", false));
    assert!(slot.retained.is_some() && slot.margin.is_some(), "{slot:?}");

    // A standby that is away while the server writes more than it retains.
    run(
        &mut admin,
        &[
            "CREATE TABLE filler AS SELECT repeat('x', 1000) AS text FROM generate_series(1, 40000)",
            "SELECT pg_switch_wal()",
        ],
    )
    .await?;
    let limits = bmdb.read_database_limits().await?;
    assert!(slot_wal(&limits).is_some_and(|wal| wal != SlotWal::Reserved), "{limits:?}");
    let found = messages(&bmdb, "replication-slot").await?;
    assert!(found.len() == 1 && found[0].starts_with("the replication slot standby "), "{found:?}");
    run(&mut admin, &["INSERT INTO filler VALUES ('y')", "CHECKPOINT"]).await?;
    until("the slot has lost WAL", async || {
        Ok(slot_wal(&bmdb.read_database_limits().await?) == Some(SlotWal::Lost))
    })
    .await?;
    let found = messages(&bmdb, "replication-slot").await?;
    assert!(
        found.len() == 1 && found[0].contains("has lost WAL"),
        "no issue of a slot that lost WAL: {found:?}"
    );

    run(&mut admin, &["SELECT pg_drop_replication_slot('standby')"]).await?;
    assert!(messages(&bmdb, "replication-slot").await?.is_empty());
    bmdb.close().await;
    Ok(server.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_without_rights_reads_all_but_the_size_of_wal_and_a_refusal_is_an_issue() -> TestResult {
    let server = own_server().await?;
    let mut admin = superuser(&server).await?;
    run(&mut admin, &["CREATE ROLE plain LOGIN", "GRANT pg_read_all_data, pg_write_all_data TO plain"])
        .await?;
    let bmdb = connect(&server, Some("plain")).await?;
    let limits = bmdb.read_database_limits().await?;
    assert_eq!(limits.wal, None);
    assert!(limits.max_wal.0 > 0 && limits.transactions.freeze_age > 0, "{limits:?}");
    assert!(messages(&bmdb, "database-limits-unreadable").await?.is_empty());

    run(&mut admin, &["GRANT pg_monitor TO plain"]).await?;
    assert!(bmdb.read_database_limits().await?.wal.is_some());

    run(
        &mut admin,
        &["REVOKE pg_monitor FROM plain", "REVOKE EXECUTE ON FUNCTION pg_current_wal_lsn() FROM PUBLIC"],
    )
    .await?;
    let found = messages(&bmdb, "database-limits-unreadable").await?;
    assert!(found.len() == 1 && found[0].contains("permission denied"), "the refusal is no issue: {found:?}");
    run(&mut admin, &["GRANT EXECUTE ON FUNCTION pg_current_wal_lsn() TO PUBLIC"]).await?;
    assert!(messages(&bmdb, "database-limits-unreadable").await?.is_empty());
    bmdb.close().await;
    Ok(server.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_list_of_wal_files_hides_no_other_limit() -> TestResult {
    let server = own_server().await?;
    let mut admin = superuser(&server).await?;
    let bmdb = connect(&server, None).await?;
    assert!(bmdb.read_database_limits().await?.wal.is_some());
    run(
        &mut admin,
        &[
            "SELECT pg_create_physical_replication_slot('standby', true)",
            // PostgreSQL always calls its own function. So this one is found before it.
            "CREATE SCHEMA failing",
            "CREATE FUNCTION failing.pg_ls_waldir(
                 OUT name TEXT, OUT size BIGINT, OUT modification TIMESTAMPTZ) RETURNS SETOF record
             LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''the disk of pg_wal is slow''; END'",
            "ALTER ROLE postgres SET search_path = public, failing, pg_catalog",
        ],
    )
    .await?;
    bmdb.close().await;
    let bmdb = connect(&server, None).await?;
    let limits = bmdb.read_database_limits().await?;
    assert_eq!(limits.wal, None);
    assert!(limits.wal_failure.as_deref().is_some_and(|text| text.contains("disk of pg_wal")), "{limits:?}");
    assert!(limits.transactions.freeze_age > 0 && limits.slots.len() == 1, "{limits:?}");
    let found = messages(&bmdb, "database-limits-unreadable").await?;
    assert!(
        found.len() == 1 && found[0].starts_with("the size of its WAL cannot be read: "),
        "the failure is no issue: {found:?}"
    );
    bmdb.close().await;
    Ok(server.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_to_archive_is_none_of_a_server_that_archives_no_more() -> TestResult {
    let parent = tempfile::tempdir()?;
    // The server may run as another user.
    std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(0o755))?;
    let storage = ServerStorage::Persistent(parent.path().join("server"));
    let restart = async |server: PrivatePostgres| {
        server.stop().await?;
        PrivatePostgres::start(PrivatePostgresOptions { storage: storage.clone(), max_connections: 60 }).await
    };
    let server = own_server_in(storage.clone()).await?;
    let mut admin = superuser(&server).await?;
    run(&mut admin, &["ALTER SYSTEM SET archive_mode = on", "ALTER SYSTEM SET archive_command = 'false'"])
        .await?;
    drop(admin);
    let server = restart(server).await?;
    let mut admin = superuser(&server).await?;
    run(&mut admin, &["CREATE TABLE filler (text TEXT)", "SELECT pg_switch_wal()"]).await?;
    let bmdb = connect(&server, None).await?;
    until("archiving fails", async || Ok(bmdb.read_database_limits().await?.is_archiving_failing)).await?;
    assert_eq!(messages(&bmdb, "wal-retained").await?.len(), 1);
    bmdb.close().await;

    run(&mut admin, &["ALTER SYSTEM SET archive_mode = off"]).await?;
    drop(admin);
    let server = restart(server).await?;
    let mut admin = superuser(&server).await?;
    let failed_at: bool = sqlx::query_scalar("SELECT last_failed_time IS NOT NULL FROM pg_stat_archiver")
        .fetch_one(&mut admin)
        .await?;
    assert!(failed_at, "the server has forgotten the failure, so this test shows nothing");
    let bmdb = connect(&server, None).await?;
    assert!(!bmdb.read_database_limits().await?.is_archiving_failing, "the failure stays for ever");
    assert!(messages(&bmdb, "wal-retained").await?.is_empty());
    bmdb.close().await;
    Ok(server.stop().await?)
}

/// A role can lose what the server keeps. A server that is thrown away has nothing to lose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_whose_commits_may_be_lost_is_an_issue_until_they_last() -> TestResult {
    let id = "database-durability";
    let temporary = own_server().await?;
    let bmdb = connect(&temporary, None).await?;
    assert_eq!(messages(&bmdb, id).await?, [""; 0]);
    bmdb.close().await;
    temporary.stop().await?;

    let parent = tempfile::tempdir()?;
    // The server may run as another user.
    std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(0o755))?;
    let server = own_server_in(ServerStorage::Persistent(parent.path().join("server"))).await?;
    let mut admin = superuser(&server).await?;
    for (statement, expected) in [
        (None, None),
        (
            Some("ALTER ROLE postgres SET synchronous_commit = off"),
            Some("the database runs with synchronous_commit = off: "),
        ),
        // Without a synchronous standby nothing more is lost by this.
        (Some("ALTER ROLE postgres SET synchronous_commit = local"), None),
        (Some("ALTER ROLE postgres RESET synchronous_commit"), None),
    ] {
        if let Some(statement) = statement {
            run(&mut admin, &[statement]).await?;
        }
        let bmdb = connect(&server, None).await?;
        let found = messages(&bmdb, id).await?;
        let text = found.first().map(String::as_str).unwrap_or_default();
        assert_eq!(found.len(), usize::from(expected.is_some()), "issues after {statement:?}: {found:?}");
        assert!(text.starts_with(expected.unwrap_or_default()), "issues after {statement:?}: {found:?}");
        bmdb.close().await;
    }
    Ok(server.stop().await?)
}
