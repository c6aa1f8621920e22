//! A listener at an IPv6 address, which agents reach by that address and by names.

use std::net::{Ipv6Addr, SocketAddr};

use anyhow::Context as _;
use rustls::pki_types::ServerName;
use shepherd::curator_client::identity::Identity;
use shepherd::roleserver::connection::client_config;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, TestAgent, phase, say, settings, untold};
use crate::harness::postgres::TestDatabase;

/// A listener at `[::1]` with these endpoints.
async fn listener(
    database: &TestDatabase,
    directory: &tempfile::TempDir,
    endpoints: &[&str],
) -> anyhow::Result<Listener> {
    let mut settings = settings(directory.path())?;
    settings.listen_address = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    settings.endpoints = endpoints.iter().map(|&endpoint| endpoint.to_owned()).collect();
    Listener::start(database, settings).await
}

#[tokio::test]
async fn agent_reports_to_an_ipv6_address() -> TestResult {
    let (database, directory) = (TestDatabase::create("callback_ipv6").await?, tempfile::tempdir()?);
    let listener = listener(&database, &directory, &[]).await?;
    let endpoint = listener.server.endpoints.first().context("no endpoint")?;
    assert!(endpoint.starts_with("[::1]:"), "{endpoint}");
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    let response = say(&mut client, agent.heartbeat(10)).await?;
    assert_eq!(response.endpoints, listener.server.endpoints);
    assert_eq!(phase(&pool, agent.machine).await?, "Ready");
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn certificate_is_valid_for_the_host_of_each_endpoint() -> TestResult {
    let (database, directory) = (TestDatabase::create("callback_names").await?, tempfile::tempdir()?);
    let endpoints = ["shepherd.example:8443", "[2001:db8::7]:8443", "192.0.2.7:8443", "[::1]:8443"];
    let listener = listener(&database, &directory, &endpoints).await?;
    let own = Identity::generate()?;
    let config = client_config(&own, &listener.server.current_ca_certificates(), &untold()?)?;
    for (name, expected) in [
        ("shepherd.example", true),
        ("2001:db8::7", true),
        ("2001:db8:0:0::7", true),
        ("192.0.2.7", true),
        ("::1", true),
        ("other.example", false),
        ("2001:db8::8", false),
        ("127.0.0.1", false),
    ] {
        let stream = TcpStream::connect(listener.server.local_addr).await?;
        let verified = ServerName::try_from(name.to_owned())?;
        let done = TlsConnector::from(config.clone()).connect(verified, stream).await;
        assert_eq!(done.is_ok(), expected, "{name}: {:?}", done.err());
    }
    Ok(listener.stop().await?)
}
