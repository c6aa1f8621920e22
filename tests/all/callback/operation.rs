//! The server in operation: its certificate, its port, its metrics, and its stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use rustls::pki_types::{CertificateDer, ServerName};
use shepherd::roleserver::connection::client_config;
use shepherd::server::callback::callback_server::CallbackServer;
use shepherd::server::metrics_server::serve_metrics;
use shepherd::server::tls::server_certificate::RenewalClock;
use shepherd::transport::gate::limits::{GateLimits, ListenerKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::World;
use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, TestAgent, say, settings, until, untold};
use crate::harness::postgres::TestDatabase;

/// The certificate that the server now shows to a new client.
async fn fetch_server_certificate(
    server: &CallbackServer,
    agent: &TestAgent,
) -> anyhow::Result<CertificateDer<'static>> {
    let config = client_config(&agent.identity, &server.current_ca_certificates(), &untold()?)?;
    let stream = TcpStream::connect(server.local_addr).await?;
    let name = ServerName::from(server.local_addr.ip());
    let stream = tokio_rustls::TlsConnector::from(config).connect(name, stream).await?;
    let certificates = stream.get_ref().1.peer_certificates().context("no certificate was shown")?;
    Ok(certificates.first().context("an empty chain was shown")?.clone().into_owned())
}

#[tokio::test]
async fn renewed_certificate_is_shown_to_newcomers_and_nobody_is_dropped() -> TestResult {
    let database = TestDatabase::create("renewal").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    let day = Duration::from_hours(24);
    // The certificate began eight days ago; half of a certificate's life is seven days.
    let began = SystemTime::now() - 8 * day;
    let (today, time) = watch::channel(began);
    let looks = Arc::new(AtomicU64::new(0));
    let counted = looks.clone();
    settings.renewal = RenewalClock {
        check_interval: Duration::from_millis(20),
        now: Arc::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            *time.borrow()
        }),
        ..RenewalClock::default()
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    say(&mut client, agent.heartbeat(1)).await?;
    let first = fetch_server_certificate(&listener.server, &agent).await?;

    let looked_often = async |what| {
        let until_now = looks.load(Ordering::SeqCst);
        until(what, async || Ok(looks.load(Ordering::SeqCst) > until_now + 3)).await
    };
    today.send(began + 6 * day)?;
    looked_often("it was looked at before its time").await?;
    assert_eq!(
        fetch_server_certificate(&listener.server, &agent).await?,
        first,
        "it is not renewed before half its life"
    );

    today.send(began + 8 * day)?;
    until("another certificate is shown", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await? != first)
    })
    .await?;
    let second = fetch_server_certificate(&listener.server, &agent).await?;
    looked_often("the new one was looked at").await?;
    assert_eq!(
        fetch_server_certificate(&listener.server, &agent).await?,
        second,
        "it is renewed once, not with every look"
    );

    // A connected agent stays connected, on the connection that it made with the first certificate.
    say(&mut client, agent.heartbeat(2)).await?;
    until("the connections that only looked are gone", async || {
        Ok(listener.counted("shepherd_agent_connections")? == 1)
    })
    .await?;
    say(&mut client, agent.heartbeat(3)).await?;
    assert_eq!(listener.counted("shepherd_agent_connections")?, 1, "no second connection was needed");
    // A new connection verifies the new certificate with the old authority, as an agent does.
    say(&mut agent.connect(&listener.server).await?, agent.heartbeat(4)).await?;

    // The clock was a month ahead and is corrected: a certificate that was issued meanwhile is not valid yet.
    today.send(began + 38 * day)?;
    until("a certificate of the wrong month is issued", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await.is_err())
    })
    .await?;
    today.send(began + 8 * day)?;
    until("one that is believed is shown", async || {
        Ok(fetch_server_certificate(&listener.server, &agent).await.is_ok())
    })
    .await?;
    say(&mut client, agent.heartbeat(5)).await?;
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn shepherds_of_one_bmdb_share_an_authority_and_know_each_other() -> TestResult {
    let world = World::new("authority").await?;
    let second = Listener::start(&world.database, settings(world.directory.path())?).await?;
    let (first, second_server) = (&world.listener.server, &second.server);
    assert_eq!(first.current_ca_certificates(), second_server.current_ca_certificates());
    assert_eq!(first.current_ca_certificates().len(), 1);
    let (agent, _) = world.agent().await?;
    let client = agent.connect(second_server).await?;
    let mut both = [first.endpoints.clone(), second_server.endpoints.clone()].concat();
    both.sort_unstable();
    let next = AtomicU64::new(1);
    let next = || next.fetch_add(1, Ordering::Relaxed);
    until("an agent receives both endpoints", async || {
        Ok(say(&mut client.clone(), agent.heartbeat(next())).await?.endpoints == both)
    })
    .await?;
    let authority = first.current_ca_certificates();
    second.stop().await?;
    world.listener.stop().await?;
    let open: i64 = sqlx::query_scalar("SELECT count(*) FROM session WHERE closed_at IS NULL")
        .fetch_one(&world.pool)
        .await?;
    assert_eq!(open, 0);
    let again = Listener::start(&world.database, settings(world.directory.path())?).await?;
    assert_eq!(again.server.current_ca_certificates(), authority);
    say(&mut agent.connect(&again.server).await?, agent.heartbeat(next())).await?;
    again.stop().await?;

    let elsewhere = tempfile::tempdir()?;
    let wrong = Listener::start(&world.database, settings(elsewhere.path())?).await;
    let output = wrong.err().context("another key opened the secret")?.to_string();
    let text = output.replace(&elsewhere.path().display().to_string(), "DIRECTORY");
    assert_eq!(
        text,
        "the secret \"agent-callback-ca\" in the BMDB was sealed with another key than the one in \
         DIRECTORY/secrets.key; copy the key of the shepherd that made this BMDB to that path, or give its path \
         with --secrets_key_path"
    );
    Ok(())
}

#[tokio::test]
async fn port_in_use_is_reported_with_its_flag() -> TestResult {
    let world = World::new("port").await?;
    let address = world.listener.server.local_addr;
    let mut same = settings(world.directory.path())?;
    same.listen_address = address;
    let output = Listener::start(&world.database, same).await.err().context("two listen there")?.to_string();
    assert_eq!(
        output,
        format!(
            "cannot listen on {address}: another program listens there already; give another address with \
             --agent_listen_address"
        )
    );
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn stop_answers_what_is_under_way() -> TestResult {
    let world = World::new("stop").await?;
    let mut agents = Vec::new();
    for _ in 0..8 {
        agents.push(world.agent().await?);
    }
    let calls = agents.into_iter().map(|(agent, mut client)| {
        tokio::spawn(async move {
            let mut stored = 0;
            for seq in 1.. {
                match say(&mut client, agent.heartbeat(seq)).await {
                    Ok(_) => stored = seq,
                    Err(_) => break,
                }
            }
            (agent.machine, stored)
        })
    });
    let calls: Vec<_> = calls.collect();
    until("heartbeats flow", async || {
        Ok(world.listener.counted("shepherd_heartbeats_total{result=\"stored\"}")? > 40)
    })
    .await?;
    world.listener.stop().await?;
    for call in calls {
        let (machine, stored) = call.await?;
        let sequence: i64 =
            sqlx::query_scalar("SELECT sequence FROM machine_agent_heartbeat WHERE machine_id = $1")
                .bind(machine.0)
                .fetch_one(&world.pool)
                .await?;
        // The response to the last heartbeat may have been lost with the connection. Every response that arrived is
        // true.
        assert!(stored > 0 && [0, 1].contains(&(sequence - i64::try_from(stored)?)), "{sequence} {stored}");
    }
    Ok(())
}

#[tokio::test]
async fn metrics_and_health_are_shown() -> TestResult {
    let world = World::new("metrics").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(1)).await?;
    let stop = CancellationToken::new();
    let (bmdb, metrics) = (&world.listener.bmdb, world.listener.metrics.clone());
    let loopback = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let limits = GateLimits::for_listener(ListenerKind::Metrics, 1 << 20);
    let shown = serve_metrics(bmdb, metrics, loopback, limits, stop.clone()).await?;
    let address = shown.local_addr;
    let get = async |path: &str| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        let (path, more) = path.split_once(' ').unwrap_or((path, ""));
        let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{more}\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    let metrics = get("/metrics").await?;
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    assert!(metrics.contains("\nshepherd_heartbeats_total{result=\"stored\"} 1\n"), "{metrics}");
    assert!(metrics.contains("\nshepherd_sessions_started_total{component=\"callback\"} 1\n"), "{metrics}");
    assert!(metrics.contains("\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{metrics}");
    assert!(metrics.contains("\n# TYPE shepherd_heartbeats_total counter\n") && !metrics.contains("# EOF"));
    let open =
        get("/metrics Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n").await?;
    assert!(open.contains("\r\ncontent-type: application/openmetrics-text; version=1.0.0;"), "{open}");
    assert!(open.contains("\n# TYPE shepherd_heartbeats counter\n") && open.ends_with("# EOF\n"), "{open}");
    // Health is that of one moment, and on an overloaded host the database is sometimes late.
    until("the service is healthy", async || Ok(get("/healthz").await?.ends_with("\r\n\r\nok\n"))).await?;
    assert!(get("/else").await?.starts_with("HTTP/1.1 404"));
    let gauge = "\nshepherd_listener_connections_unauthenticated{listener=\"metrics\"} 1\n";
    until("only this connection is counted", async || Ok(get("/metrics").await?.contains(gauge))).await?;
    sqlx::query("ALTER TABLE policy RENAME TO policy_elsewhere").execute(&world.pool).await?;
    until("the service is not healthy", async || {
        let health = get("/healthz").await?;
        Ok(health.starts_with("HTTP/1.1 503") && health.ends_with("\r\n\r\nthe BMDB cannot be queried\n"))
    })
    .await?;
    stop.cancel();
    shown.wait_until_stopped().await;
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn health_checks_have_a_database_connection_of_their_own() -> TestResult {
    // An error means that another test has installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let world = World::new("health_pool").await?;
    let (stop, loopback) = (CancellationToken::new(), std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
    let (bmdb, metrics) = (&world.listener.bmdb, world.listener.metrics.clone());
    let limits = GateLimits::for_listener(ListenerKind::Metrics, 1 << 20);
    let shown = serve_metrics(bmdb, metrics, loopback, limits, stop.clone()).await?;
    // Heartbeats and loops use all connections, and a flood of checks waits for none of them.
    let mut used = Vec::new();
    for _ in 0..bmdb.settings().max_connections {
        used.push(bmdb.pool().acquire().await?);
    }
    let url = format!("http://{}/healthz", shown.local_addr);
    let client = reqwest::Client::builder().no_proxy().build()?;
    let mut checks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        checks.spawn(client.get(&url).send());
    }
    let mut healthy = 0;
    while let Some(answer) = checks.join_next().await {
        let answer = answer??;
        if answer.status().is_success() {
            healthy += 1;
        } else {
            assert_eq!(answer.text().await?, "too many health checks wait for the BMDB; try again\n");
        }
    }
    assert!(healthy > 0, "no health check was answered");
    drop(used);
    stop.cancel();
    shown.wait_until_stopped().await;
    Ok(world.listener.stop().await?)
}
