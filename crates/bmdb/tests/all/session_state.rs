//! Connections with a schema or encoding that is not as it must be. Isolation levels are in `dialects`.

use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::connections::{OWN, own_server, run};
use testkit::aloud::TestResult;
use testkit::dialect;

/// A search path that begins with another schema would divide the tables between two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_path_that_leads_to_another_schema_is_refused() -> TestResult {
    let server = own_server().await?;
    let mut admin = server.url(OWN).parse::<PgConnectOptions>()?.connect().await?;
    let mut settings = ConnectionSettings::from_url(&server.url(OWN), "searching")?;
    settings.dialect = dialect::of_this_run()?;
    let first = Bmdb::connect(settings.clone()).await?;
    run(&mut admin, format!("CREATE SCHEMA app; ALTER DATABASE {OWN} SET search_path = app, public")).await?;
    let refused = Bmdb::connect(settings.clone()).await.expect_err("new tables would be in another schema");
    assert!(matches!(refused, BmdbError::UnusableSession { .. }), "{refused}");
    let sentence = "creates tables in the schema \"app\", and those of Shepherd are in \"public\": ";
    assert!(refused.to_string().contains(sentence), "{refused}");
    // The pool of this one has no connection yet. It would find no tables, and a migration would create all of them.
    run(&mut admin, format!("ALTER DATABASE {OWN} SET search_path = app")).await?;
    let refused = first.schema_version().await.expect_err("it has another schema than the first connection");
    assert!(refused.to_string().contains(sentence), "{refused}");
    first.close().await;

    run(&mut admin, format!("ALTER DATABASE {OWN} SET search_path = missing")).await?;
    let refused = Bmdb::connect(settings).await.expect_err("there is no schema for tables").to_string();
    assert!(
        refused.contains("has no schema for tables: its search_path names none that exists"),
        "{refused}"
    );
    admin.close().await?;
    Ok(server.stop().await?)
}

/// Another encoding refuses names, or stores them without checking them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_with_another_encoding_than_utf8_is_refused() -> TestResult {
    let server = own_server().await?;
    let mut admin = server.url(OWN).parse::<PgConnectOptions>()?.connect().await?;
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let name = format!("in_{}", encoding.to_lowercase());
        run(
            &mut admin,
            format!("CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"),
        )
        .await?;
        let mut settings = ConnectionSettings::from_url(&server.url(&name), "encoding")?;
        settings.dialect = dialect::of_this_run()?;
        let refused = Bmdb::connect(settings).await.expect_err("it has another encoding").to_string();
        let sentence =
            format!("stores text as {encoding}, and Shepherd needs UTF8; create its database with");
        assert!(refused.contains(&sentence), "{refused}");
    }
    admin.close().await?;
    Ok(server.stop().await?)
}
