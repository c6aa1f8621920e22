//! A URL with several hosts: the first that can be used is used, and a switch-over is followed.
//!
//! Direct URLs, and notifications, are of the dialect of PostgreSQL alone, so these tests use it in each run.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::access::Access;
use shepherd_bmdb::connection::dialect::Dialect;
use shepherd_bmdb::connection::private_postgres::PrivatePostgres;
use shepherd_bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd_bmdb::connection::private_postgres::programs::{find_programs, program_command, server_user};
use shepherd_bmdb::connection::settings::ConnectionSettings;
use shepherd_bmdb::engine::session::Session;
use shepherd_bmdb::engine::wakeup::WakeUps;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, PgConnection};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::connections::{OWN, own_server, until_notified, until_session};
use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{SOON, Shepherd, ended, until};

/// A connection of the superuser to the test's database.
async fn admin(server: &PrivatePostgres) -> anyhow::Result<PgConnection> {
    Ok(server.url(OWN).parse::<PgConnectOptions>()?.connect().await?)
}

/// A URL with these hosts, in this order, and further parameters.
fn url_of(hosts: &[&str], parameters: &str) -> String {
    format!("postgres://postgres@{}/{OWN}?sslmode=disable{parameters}", hosts.join(","))
}

/// Host and port of a proxy.
fn host_of(proxy: &Proxy) -> anyhow::Result<String> {
    let options: PgConnectOptions = proxy.url().parse()?;
    Ok(format!("{}:{}", options.get_host(), options.get_port()))
}

/// A standby of a server, with its data below a directory that the server's user can enter.
async fn standby_of(primary: &PrivatePostgres, parent: &Path) -> anyhow::Result<PrivatePostgres> {
    std::fs::set_permissions(parent, std::fs::Permissions::from_mode(0o755))?;
    let user = server_user().map_err(|_| anyhow::anyhow!("no user can run a server"))?;
    let base = parent.join("standby");
    std::fs::create_dir(&base)?;
    std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o700))?;
    if let Some(user) = &user {
        std::os::unix::fs::chown(&base, Some(user.uid), Some(user.gid))?;
    }
    let programs = find_programs().pop().context("no server programs")?;
    let copied = program_command(&programs.path("pg_basebackup"), user.as_ref())
        .current_dir(&base)
        .args(["--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"])
        .arg(format!("--dbname={}", primary.url("postgres")))
        .arg(format!("--pgdata={}", base.join("data").display()))
        .output()?;
    anyhow::ensure!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let options = PrivatePostgresOptions { storage: ServerStorage::Persistent(base), max_connections: 60 };
    Ok(PrivatePostgres::start(options).await?)
}

/// Waits until a session was renewed for longer than that on this server.
async fn until_renewed(server: &mut PgConnection, session: &Session, longer_ms: i64) -> anyhow::Result<()> {
    until("a session is renewed", async || {
        anyhow::ensure!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
        let renewed: Option<bool> = sqlx::query_scalar(
            "SELECT deadline - started_at > (interval_ms + $2) * INTERVAL '1 millisecond'
             FROM session WHERE session_id = $1",
        )
        .bind(session.id().0)
        .bind(longer_ms)
        .fetch_optional(&mut *server)
        .await?;
        Ok(renewed == Some(true))
    })
    .await
}

/// The primary falls silent, and its standby, which is listed first and was passed over, becomes the primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promoted_standby_is_followed_by_pools_renewals_and_wake_ups() -> TestResult {
    let parent: TempDir = tempfile::tempdir()?;
    let primary = own_server().await?;
    let standby = standby_of(&primary, parent.path()).await?;
    let (mut primary_admin, mut standby_admin) = (admin(&primary).await?, admin(&standby).await?);
    let (old, new) = (Proxy::to(&primary.url(OWN)).await?, Proxy::to(&standby.url(OWN)).await?);
    let (old_host, new_host) = (host_of(&old)?, host_of(&new)?);

    // No host can be used: each is named with its reason.
    let nobody = url_of(&[&new_host, "127.0.0.1:1"], "&target_session_attrs=read-write&password=secret");
    let refused = Bmdb::connect(ConnectionSettings::from_url(&nobody, "nobody")?)
        .await
        .expect_err("one is a reader, and nobody listens at the other")
        .to_string();
    let reasons =
        format!("none of its hosts can be used: {new_host}: the server is read-only; 127.0.0.1:1: ");
    assert!(refused.contains(&reasons) && refused.contains("refused"), "{refused}");
    assert!(!refused.contains("secret"), "{refused}");

    let url = url_of(&[&new_host, &old_host], "&target_session_attrs=read-write");
    let mut settings = ConnectionSettings::from_url(&url, "followed")?;
    assert_eq!(settings.access, Access::ReadWrite);
    settings.max_connections = 6;
    settings.direct = Some(Box::new(ConnectionSettings::from_url(&url, "direct")?));
    let shepherd = Shepherd::with(settings, SOON).await?;
    shepherd.bmdb.check_direct_url().await?;
    shepherd.bmdb.refuse_poolers().await?;
    let stop = CancellationToken::new();
    let wake_ups = WakeUps::default();
    let listening = tokio::spawn(wake_ups.clone().listen(shepherd.bmdb.clone(), stop.clone()));
    let first = shepherd.session().await?;
    until_renewed(&mut primary_admin, &first, 1).await?;

    old.swallow();
    sqlx::query("SELECT pg_promote()").execute(&mut standby_admin).await?;
    let second = until_session(&shepherd).await?;
    until_renewed(&mut standby_admin, &second, 1).await?;
    until_notified(&mut standby_admin, &wake_ups).await?;
    drop((first, second));
    stop.cancel();
    ended("listening", listening).await?;
    shepherd.stop().await?;
    primary_admin.close().await?;
    standby_admin.close().await?;
    primary.stop().await?;
    Ok(standby.stop().await?)
}

/// Nothing but the pool is there: no renewal finds the other host for it. A host that refuses, one that swallows what is
/// sent, and one that became a reader without ending a connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_finds_the_host_that_can_be_used_by_itself() -> TestResult {
    let (one, two) = (own_server().await?, own_server().await?);
    let (first, second) = (Proxy::to(&one.url(OWN)).await?, Proxy::to(&two.url(OWN)).await?);
    let mut two_admin = admin(&two).await?;
    let url = url_of(&[&host_of(&first)?, &host_of(&second)?], "&target_session_attrs=primary");
    let bmdb = Bmdb::connect(ConnectionSettings::from_url(&url, "following")?).await?;
    bmdb.require_schema().await?;
    let works = async |name: &str| {
        until(name, async || {
            drop(bmdb.schema_version().await);
            Ok(bmdb.schema_version().await.is_ok())
        })
        .await
    };

    first.swallow();
    works("the pool leaves a host that is silent").await?;
    first.heal();
    second.refuse();
    works("the pool leaves a host that refuses").await?;
    second.heal();
    first.refuse();
    works("the pool comes back").await?;
    first.heal();
    sqlx::query("ALTER SYSTEM SET default_transaction_read_only = on").execute(&mut two_admin).await?;
    sqlx::query("SELECT pg_reload_conf()").execute(&mut two_admin).await?;
    until("the pool leaves a reader", async || {
        drop(bmdb.schema_version().await);
        let left: i64 =
            sqlx::query_scalar("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'following'")
                .fetch_one(&mut two_admin)
                .await?;
        Ok(left == 0)
    })
    .await?;
    works("the pool is on the server that takes writes").await?;
    bmdb.close().await;
    two_admin.close().await?;
    one.stop().await?;
    Ok(two.stop().await?)
}

/// A direct connection that is lost while the pooler is away is replaced by one to the same run of the server, and by none to
/// another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_direct_connection_is_replaced_while_the_pooler_is_away() -> TestResult {
    let (server, other) = (own_server().await?, own_server().await?);
    let (pooler, direct) = (Proxy::to(&server.url(OWN)).await?, Proxy::to(&server.url(OWN)).await?);
    let mut settings = ConnectionSettings::from_url(pooler.url(), "of the pool")?;
    settings.dialect = Dialect::Postgres;
    settings.direct = Some(Box::new(ConnectionSettings::from_url(direct.url(), "direct")?));
    let shepherd = Shepherd::with(settings, Duration::from_secs(5)).await?;
    let mut admin = admin(&server).await?;
    let session = shepherd.session().await?;
    until_renewed(&mut admin, &session, 1).await?;

    // A pooler that is full takes connections, and answers nothing on them.
    pooler.swallow();
    direct.cut();
    until_renewed(&mut admin, &session, 12_000).await?;
    pooler.refuse();
    direct.cut();
    until_renewed(&mut admin, &session, 24_000).await?;

    direct.redirect(&other.url(OWN))?;
    direct.cut();
    ended("the session", tokio::spawn(session.lost().clone().cancelled_owned())).await?;
    assert_eq!(session.loss_reason(), Some("it could not be renewed in time"), "another server was used");
    drop(session);
    pooler.heal();
    direct.redirect(&server.url(OWN))?;
    shepherd.stop().await?;
    admin.close().await?;
    server.stop().await?;
    Ok(other.stop().await?)
}
