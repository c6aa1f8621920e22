//! Limits of the database server are read, and what is wrong with them is an issue until it is gone.

use anyhow::Context as _;
use model::database_limits::{DatabaseLimits, SlotWal};
use model::issues::find_issues;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::private_postgres::PrivatePostgres;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection};

use crate::connections::{OWN, own_server};
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
