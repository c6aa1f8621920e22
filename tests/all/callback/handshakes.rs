//! Handshakes that are slow, or too many, delay nobody else.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::World;
use crate::harness::aloud::TestResult;
use crate::harness::callback::{Client, Listener, TestAgent, say, settings, until};
use crate::harness::postgres::TestDatabase;

/// Sends heartbeats over old and new connections, and returns how long they took.
async fn times(
    world: &World,
    agents: &mut [(TestAgent, Client)],
    seq: &mut u64,
) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    for _ in 0..8 {
        for (agent, client) in agents.iter_mut() {
            *seq += 1;
            let called = Instant::now();
            say(client, agent.heartbeat(*seq)).await?;
            times.push(called.elapsed());
            *seq += 1;
            let called = Instant::now();
            say(&mut agent.connect(&world.listener.server).await?, agent.heartbeat(*seq)).await?;
            times.push(called.elapsed());
        }
    }
    Ok(times)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_half_open_handshakes_delay_no_heartbeat() -> TestResult {
    // A call that waited for a half-open handshake would wait for longer than this test may take, so none of the
    // heartbeats below did. Their durations show what a thousand such handshakes cost.
    Ok(tokio::time::timeout(Duration::from_mins(5), beside_half_open_handshakes()).await??)
}

async fn beside_half_open_handshakes() -> anyhow::Result<()> {
    let world = World::patient("half_open", Duration::from_mins(10)).await?;
    let mut agents = vec![world.agent().await?, world.agent().await?];
    let mut seq = 0;
    let (mut quiet, mut busy) = (Vec::new(), Vec::new());
    // In turns, because other programs may make this host busier or less busy.
    for _ in 0..3 {
        quiet.extend(times(&world, &mut agents, &mut seq).await?);
        let half_open = thousand_half_open(&world).await?;
        busy.extend(times(&world, &mut agents, &mut seq).await?);
        assert_eq!(world.listener.counted("shepherd_tls_handshakes_in_progress")?, 1000);
        for stream in &half_open {
            // Neither an end nor an alert: the server still waits for the rest.
            let error_kind = stream.try_read(&mut [0]).err().map(|error| error.kind());
            assert_eq!(error_kind, Some(std::io::ErrorKind::WouldBlock), "it ended before it mattered");
        }
        drop(half_open);
        until("none is open any more", async || {
            Ok(world.listener.counted("shepherd_tls_handshakes_in_progress")? == 0)
        })
        .await?;
    }
    quiet.extend(times(&world, &mut agents, &mut seq).await?);
    let most = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() * 9 / 10]
    };
    let (quiet, busy) = (most(quiet), most(busy));
    assert!(busy <= quiet * 10, "quiet {quiet:?}, busy {busy:?}");
    world.listener.stop().await
}

/// A thousand connections with handshakes that the server waits for.
async fn thousand_half_open(world: &World) -> anyhow::Result<Vec<TcpStream>> {
    let mut half_open = Vec::new();
    for number in 0..1000_u32 {
        let mut stream = TcpStream::connect(world.listener.server.local_addr).await?;
        if number % 2 == 0 {
            // Half of a record's header: a handshake that has begun.
            stream.write_all(&[0x16, 0x03]).await?;
        }
        half_open.push(stream);
    }
    until("the server has a thousand handshakes open", async || {
        Ok(world.listener.counted("shepherd_tls_handshakes_in_progress")? >= 1000)
    })
    .await?;
    Ok(half_open)
}

#[tokio::test]
async fn too_many_and_too_slow_handshakes_end_and_honest_ones_go_on() -> TestResult {
    let database = TestDatabase::create("slow").await?;
    let directory = tempfile::tempdir()?;
    let mut narrow = settings(directory.path())?;
    narrow.limits.per_source = 8;
    // Longer than a busy host takes to open forty connections, or for an honest handshake.
    narrow.limits.handshake = Some(Duration::from_secs(20));
    let listener = Listener::start(&database, narrow).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(listener.server.local_addr).await?);
    }
    say(&mut agent.connect(&listener.server).await?, agent.heartbeat(1)).await?;
    for mut stream in silent {
        assert_eq!(
            tokio::time::timeout(Duration::from_mins(5), stream.read(&mut [0])).await?.unwrap_or(0),
            0
        );
    }
    assert!(listener.counted("shepherd_tls_handshake_failures_total{reason=\"evicted\"}")? >= 32);
    until("the others ran out of time", async || {
        Ok(listener.counted("shepherd_tls_handshake_failures_total{reason=\"timeout\"}")? > 0
            && listener.counted("shepherd_tls_handshakes_in_progress")? == 0)
    })
    .await?;
    Ok(listener.stop().await?)
}
