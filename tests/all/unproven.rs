//! Unauthenticated peers at the callback server: peers that complete the handshake with a key of their own and send no
//! heartbeat of an agent. They are real TLS clients, made as the role server makes them.

use std::time::Duration;

use anyhow::{Context as _, Result};
use rustls::pki_types::ServerName;
use shepherd::curator_client::identity::Identity;
use shepherd::roleserver::connection::client_config;
use shepherd::server::callback::callback_server::CallbackServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::Code;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, TestAgent, say, settings, until, untold};
use crate::harness::postgres::TestDatabase;

const LONG: Duration = Duration::from_hours(1);

/// The beginning of an HTTP/2 connection, without anything after it.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Completes a handshake with an unknown key.
async fn stranger(server: &CallbackServer) -> Result<TlsStream<TcpStream>> {
    let config = client_config(&Identity::generate()?, &server.current_ca_certificates(), &untold()?)?;
    let stream = TcpStream::connect(server.local_addr).await?;
    let name = ServerName::from(server.local_addr.ip());
    Ok(tokio_rustls::TlsConnector::from(config).connect(name, stream).await?)
}

/// Reads until the server ends the connection.
async fn end_of(mut stream: TlsStream<TcpStream>) -> Result<()> {
    let reading = async {
        let mut bytes = [0; 1024];
        while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
    };
    tokio::time::timeout(Duration::from_mins(5), reading).await.context("the connection never ended")
}

#[tokio::test]
async fn connections_that_say_no_agent_s_heartbeat_end_and_an_agent_s_stays() -> TestResult {
    let database = TestDatabase::create("unproven").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    // Longer than a busy host takes from the handshake of an agent to its heartbeat.
    settings.limits.first_request = Duration::from_secs(20);
    settings.limits.after_deferral = LONG;
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;

    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    say(&mut client, agent.heartbeat(1)).await?;
    until("the agent is proven", async || {
        Ok(listener.counted("shepherd_agent_connections_unauthenticated")? == 0)
    })
    .await?;

    let silent = stranger(&listener.server).await?;
    let mut begun = stranger(&listener.server).await?;
    begun.write_all(PREFACE).await?;
    begun.flush().await?;
    // A peer that sends a heartbeat of a machine with another agent.
    let impostor = TestAgent {
        machine: agent.machine,
        identity: Identity::generate()?.into(),
        boot_id: agent.boot_id.clone(),
        incarnation: agent.incarnation.clone(),
    };
    let mut impostor_client = impostor.connect(&listener.server).await?;
    let refused = say(&mut impostor_client, impostor.heartbeat(9)).await;
    assert_eq!(refused.err().context("it was let in")?.code(), Code::Unauthenticated);

    end_of(silent).await?;
    end_of(begun).await?;
    let closed = "shepherd_agent_connections_closed_total{reason=\"unauthenticated\"}";
    until("all three are counted", async || Ok(listener.counted(closed)? == 3)).await?;
    until("only the agent is left", async || Ok(listener.counted("shepherd_agent_connections")? == 1))
        .await?;
    say(&mut client, agent.heartbeat(2)).await?;
    assert_eq!(listener.counted("shepherd_agent_connections")?, 1, "no second connection was needed");
    assert_eq!(listener.counted(closed)?, 3);
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn oldest_silent_connection_of_a_source_gives_way_and_agents_get_in() -> TestResult {
    let database = TestDatabase::create("unproven_many").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    settings.limits.first_request = LONG;
    settings.limits.per_source = 3;
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let gave_way = "shepherd_agent_connections_closed_total{reason=\"evicted\"}";

    let mut strangers = Vec::new();
    for open in 1..=3 {
        strangers.push(stranger(&listener.server).await?);
        until("it is counted", async || {
            Ok(listener.counted("shepherd_agent_connections_unauthenticated")? == open)
        })
        .await?;
    }
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let connected = agent.connect(&listener.server).await;
    let mut client = connected.context("silent connections kept an agent out")?;
    say(&mut client, agent.heartbeat(1)).await?;
    end_of(strangers.remove(0)).await?;
    until("it is counted", async || Ok(listener.counted(gave_way)? == 1)).await?;

    until("the agent is proven", async || {
        Ok(listener.counted("shepherd_agent_connections_unauthenticated")? == 2)
    })
    .await?;
    for _ in 0..3 {
        strangers.push(stranger(&listener.server).await?);
    }
    until("three more had to go", async || Ok(listener.counted(gave_way)? >= 3)).await?;
    say(&mut client, agent.heartbeat(2)).await?;
    assert_eq!(
        listener.counted("shepherd_agent_connections_unauthenticated")?,
        3,
        "the agent is no stranger any more, and gives way to none"
    );
    Ok(listener.stop().await?)
}

/// The machine counts as alive, because nobody may restart it for want of a place at one listener.
#[tokio::test]
async fn agent_without_a_place_is_refused_in_words_and_its_heartbeat_is_stored() -> TestResult {
    let database = TestDatabase::create("unproven_full").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    settings.limits.proven = 2;
    settings.limits.after_refusal = Duration::from_secs(1);
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let agent = TestAgent::new(&pool, &listener.bmdb).await?;
        let mut client = agent.connect(&listener.server).await?;
        say(&mut client, agent.heartbeat(1)).await?;
        clients.push((agent, client));
    }

    let late = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = late.connect(&listener.server).await?;
    let refused = say(&mut client, late.heartbeat(1)).await.err().context("it was let in")?;
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().starts_with("all places of this listener"), "{refused}");
    assert_eq!(listener.counted("shepherd_heartbeats_total{result=\"full\"}")?, 1);
    let stored: i64 =
        sqlx::query_scalar("SELECT count(*) FROM machine_agent_heartbeat WHERE machine_id = $1")
            .bind(late.machine.0)
            .fetch_one(&pool)
            .await?;
    assert_eq!(stored, 1);
    let closed = "shepherd_agent_connections_closed_total{reason=\"full\"}";
    until("the refused connection has ended", async || Ok(listener.counted(closed)? == 1)).await?;
    for (agent, client) in &mut clients {
        say(client, agent.heartbeat(2)).await?;
    }

    clients.pop();
    until("a place is free", async || {
        let authenticated = "shepherd_listener_connections_authenticated{listener=\"callback\"}";
        Ok(listener.counted(authenticated)? == 1)
    })
    .await?;
    say(&mut late.connect(&listener.server).await?, late.heartbeat(2)).await?;
    Ok(listener.stop().await?)
}
