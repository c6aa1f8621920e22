//! Connections to servers that are not as they should be.

use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};

use testkit::aloud::TestResult;
use testkit::postgres::TestDatabase;

/// A connection of the superuser to the test's database.
async fn admin(database: &TestDatabase) -> anyhow::Result<PgConnection> {
    Ok(database.url().parse::<PgConnectOptions>()?.connect().await?)
}

/// A name of a role that no other test has.
fn role_name() -> String {
    format!("role_{}", uuid::Uuid::new_v4().simple())
}

/// Runs statements of the test itself.
async fn run(connection: &mut PgConnection, statements: String) -> anyhow::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(connection).await?;
    Ok(())
}

/// Since PostgreSQL 15 a role that does not own the database cannot create tables in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_may_not_create_tables_is_given_the_grant_it_lacks() -> TestResult {
    let database = TestDatabase::create("no_create").await?;
    let (mut server, role) = (admin(&database).await?, role_name());
    let statements = format!(
        "CREATE ROLE {role} LOGIN; DROP SCHEMA public CASCADE; CREATE SCHEMA public; \
         GRANT USAGE ON SCHEMA public TO {role}"
    );
    run(&mut server, statements).await?;
    let mut settings = ConnectionSettings::from_url(database.url(), "without rights")?;
    settings.options = settings.options.username(&role);
    settings.dialect = database.dialect();
    settings.search_path = Some("public".to_owned());
    let bmdb = Bmdb::connect(settings).await?;
    let refused = bmdb.migrate().await.expect_err("it may not create tables").to_string();
    assert_eq!(
        refused,
        "creating the migration lock failed: the database refused it: permission denied for schema public; make the \
         user of the URL the owner of the database, or run `GRANT USAGE, CREATE ON SCHEMA public TO USER` in it"
    );
    bmdb.close().await;
    run(&mut server, format!("DROP OWNED BY {role}; DROP ROLE {role}")).await?;
    Ok(server.close().await?)
}
