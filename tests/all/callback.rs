//! The callback server, called over real TLS on the loopback address.

mod handshakes;
mod ipv6;
mod keys;
mod operation;
mod rejections;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use shepherd::proto::agent::v1::installation_report::Result as Installed;
use shepherd::proto::agent::v1::{InstallationReport, InstallationSuccess};
use shepherd::proto::hardware::v1::{Cpu, HardwareReport, Memory};
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::agent::{Agent, ignore_events};
use shepherd::roleserver::boot_clock::HostClock;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{
    Client, Listener, TestAgent, events, phase, provided, rows, say, settings, until, untold,
};
use crate::harness::postgres::TestDatabase;

/// A listener with its database and the directory of its key.
struct World {
    database: TestDatabase,
    directory: tempfile::TempDir,
    pool: PgPool,
    listener: Listener,
}

impl World {
    async fn new(name: &str) -> anyhow::Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let listener = Listener::start(&database, settings(directory.path())?).await?;
        let pool = database.pool().await?;
        Ok(Self { database, directory, pool, listener })
    }

    /// A world with a server that permits handshakes of this duration.
    async fn patient(name: &str, handshake: Duration) -> anyhow::Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let mut settings = settings(directory.path())?;
        settings.limits.handshake = Some(handshake);
        let listener = Listener::start(&database, settings).await?;
        let pool = database.pool().await?;
        Ok(Self { database, directory, pool, listener })
    }

    async fn agent(&self) -> anyhow::Result<(TestAgent, Client)> {
        let agent = TestAgent::new(&self.pool, &self.listener.bmdb).await?;
        let client = agent.connect(&self.listener.server).await?;
        Ok((agent, client))
    }
}

fn refused(answer: Result<impl std::fmt::Debug, Status>) -> anyhow::Result<(Code, String)> {
    let status = answer.err().context("it was not refused")?;
    Ok((status.code(), status.message().to_owned()))
}

fn report() -> HardwareReport {
    HardwareReport {
        manufacturer: "ACME".to_owned(),
        product: "Server\u{0} 9".to_owned(),
        memory: Some(Memory { installed_bytes: 64 << 30, usable_ratio: 0.9 }),
        cpus: vec![Cpu { threads: 32, ..Cpu::default() }],
        ..HardwareReport::default()
    }
}

#[tokio::test]
async fn agent_and_server_have_their_whole_conversation() -> TestResult {
    let world = World::new("conversation").await?;
    let (agent, mut client) = world.agent().await?;
    let first = say(&mut client, agent.heartbeat(10)).await?;
    assert!(first.hardware_report_requested && first.installation_request.is_none());
    assert_eq!(first.endpoints, world.listener.server.endpoints);
    assert_eq!(first.ca_certificates, world.listener.server.current_ca_certificates());
    assert_eq!(first.heartbeat_interval_seconds, 30);
    assert_eq!(phase(&world.pool, agent.machine).await?, "Ready");

    let mut with_report = agent.heartbeat(20);
    with_report.hardware_report = Some(report());
    assert!(!say(&mut client, with_report).await?.hardware_report_requested);
    let stored: (String, String, i64, i64) = sqlx::query_as(
        "SELECT manufacturer, product, memory_bytes, cpu_threads FROM machine_hardware_report WHERE machine_id = $1",
    )
    .bind(agent.machine.0)
    .fetch_one(&world.pool)
    .await?;
    assert_eq!(stored, ("ACME".to_owned(), "Server 9".to_owned(), 64 << 30, 32));
    assert!(!say(&mut client, agent.heartbeat(30)).await?.hardware_report_requested);

    sqlx::query("INSERT INTO machine_os_installation_request VALUES ($1, 4, 'https://a/b', '\\x01', clock_timestamp())")
        .bind(agent.machine.0)
        .execute(&world.pool)
        .await?;
    let request = say(&mut client, agent.heartbeat(40))
        .await?
        .installation_request
        .context("no installation request")?;
    assert_eq!((request.generation, request.artefact_url.as_str()), (4, "https://a/b"));
    let mut late = agent.heartbeat(50);
    late.installation_report =
        Some(InstallationReport { generation: 3, result: Some(Installed::Success(InstallationSuccess {})) });
    assert!(say(&mut client, late.clone()).await?.installation_request.is_some());
    let mut done = late;
    done.seq = 60;
    done.installation_report =
        Some(InstallationReport { generation: 4, result: Some(Installed::Success(InstallationSuccess {})) });
    assert!(say(&mut client, done).await?.installation_request.is_none());
    assert_eq!(
        phase(&world.pool, agent.machine).await?,
        "Ready",
        "installing is not available in this release"
    );

    // Another start of the agent, then another boot.
    let agent = TestAgent { incarnation: Uuid::new_v4().to_string(), ..agent };
    assert!(say(&mut client, agent.heartbeat(70)).await?.hardware_report_requested);
    let agent = TestAgent { boot_id: Uuid::new_v4().to_string(), ..agent };
    say(&mut client, agent.heartbeat(5)).await?;
    let messages = events(&world.pool, agent.machine).await?;
    for event in ["FirstHeartbeat", "LateInstallationReport", "Booted"] {
        assert!(messages.iter().any(|text| text == event), "{event} is missing in {messages:?}");
    }
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn repetition_is_answered_the_same_and_what_is_older_changes_nothing() -> TestResult {
    let world = World::new("repetition").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(10)).await?;
    let mut heartbeat = agent.heartbeat(20);
    heartbeat.hardware_report = Some(report());
    let answer = say(&mut client, heartbeat.clone()).await?;
    let before = rows(&world.pool, agent.machine).await?;
    for again in [heartbeat, agent.heartbeat(20)] {
        let mut again = say(&mut client, again).await?;
        // Each response states when it was made.
        assert!(again.shepherd_time_ms >= answer.shepherd_time_ms);
        again.shepherd_time_ms = answer.shepherd_time_ms;
        assert_eq!(again, answer);
    }
    let stale = (Code::FailedPrecondition, "a heartbeat newer than this one is already stored".to_owned());
    assert_eq!(refused(say(&mut client, agent.heartbeat(19)).await)?, stale);
    let mut older = agent.heartbeat(19);
    older.hardware_report = Some(HardwareReport::default());
    assert_eq!(refused(say(&mut client, older).await)?, stale);
    assert_eq!(rows(&world.pool, agent.machine).await?, before);

    let last_boot = agent.boot_id.clone();
    let rebooted = TestAgent { boot_id: Uuid::new_v4().to_string(), ..agent };
    say(&mut client, rebooted.heartbeat(1)).await?;
    let before = rows(&world.pool, rebooted.machine).await?;
    let mut of_last_boot = rebooted.heartbeat(99);
    of_last_boot.boot_id = last_boot;
    assert_eq!(refused(say(&mut client, of_last_boot).await)?, stale);
    assert_eq!(rows(&world.pool, rebooted.machine).await?, before);
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn foreign_heartbeats_are_refused_in_the_same_words_at_the_same_time() -> TestResult {
    let world = World::new("foreign").await?;
    let (mine, mut client) = world.agent().await?;
    let (other, mut others_client) = world.agent().await?;
    say(&mut others_client, other.heartbeat(10)).await?;
    let bare = provided(&world.pool).await?;
    let before = rows(&world.pool, other.machine).await?;
    let nobody = Uuid::new_v4().to_string();
    let mut seen = Vec::new();
    for machine in [nobody, other.machine.to_string(), bare.to_string()] {
        for seq in [5, 10, 15] {
            let mut heartbeat = mine.heartbeat(seq);
            heartbeat.machine_id.clone_from(&machine);
            heartbeat.boot_id.clone_from(&other.boot_id);
            let called = Instant::now();
            let status = say(&mut client, heartbeat).await.err().context("it was not refused")?;
            assert!(called.elapsed() >= Duration::from_millis(240), "{:?}", called.elapsed());
            let mut headers = status.metadata().clone();
            headers.remove("date");
            seen.push(format!("{:?} {} {:?} {headers:?}", status.code(), status.message(), status.details()));
        }
    }
    seen.dedup();
    assert_eq!(seen.len(), 1, "{seen:#?}");
    assert!(seen[0].starts_with("Unauthenticated machine id and key do not belong together"), "{seen:?}");
    assert_eq!(rows(&world.pool, other.machine).await?, before);
    assert_eq!(phase(&world.pool, bare).await?, "New");
    Ok(world.listener.stop().await?)
}

/// A copy of a machine's key is worth nothing once another enrolment has given the machine a new one.
#[tokio::test]
async fn key_that_another_enrolment_replaced_reports_nothing() -> TestResult {
    let world = World::new("replaced_key").await?;
    let (former, mut opened_before) = world.agent().await?;
    say(&mut opened_before, former.heartbeat(1)).await?;
    let agent = TestAgent::enroll(former.machine, &world.listener.bmdb).await?;
    say(&mut agent.connect(&world.listener.server).await?, agent.heartbeat(1)).await?;
    let before = rows(&world.pool, agent.machine).await?;
    let expected = (Code::Unauthenticated, "machine id and key do not belong together".to_owned());
    for mut client in [opened_before, former.connect(&world.listener.server).await?] {
        assert_eq!(refused(say(&mut client, former.heartbeat(2)).await)?, expected);
    }
    assert_eq!(rows(&world.pool, agent.machine).await?, before);
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn malformed_and_oversized_heartbeats_are_refused_and_change_nothing() -> TestResult {
    let world = World::new("malformed").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(10)).await?;
    let before = rows(&world.pool, agent.machine).await?;
    let mut odd = agent.heartbeat(20);
    odd.machine_id = "machine-1".to_owned();
    let text = "machine_id is no UUID in hyphenated lower case".to_owned();
    assert_eq!(refused(say(&mut client, odd).await)?, (Code::InvalidArgument, text));
    let with_report_of = |bytes: usize| {
        let mut large = agent.heartbeat(20);
        large.hardware_report =
            Some(HardwareReport { warnings: vec!["w".repeat(bytes)], ..HardwareReport::default() });
        large
    };
    let text = "hardware_report is larger than 1 MiB".to_owned();
    let answer = say(&mut client, with_report_of(1_200_000)).await;
    assert_eq!(refused(answer)?, (Code::InvalidArgument, text));
    let (code, _) = refused(say(&mut client, with_report_of(3_000_000)).await)?;
    assert_eq!(code, Code::OutOfRange);
    // A megabyte that would expand to a hundred in memory.
    let mut many = agent.heartbeat(20);
    many.hardware_report =
        Some(HardwareReport { cpus: vec![Cpu::default(); 400_000], ..HardwareReport::default() });
    let text = "the message has more than 10000 fields".to_owned();
    assert_eq!(refused(say(&mut client, many).await)?, (Code::InvalidArgument, text));
    assert_eq!(rows(&world.pool, agent.machine).await?, before);
    say(&mut client, with_report_of(900_000)).await?;
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn agent_that_calls_too_often_is_rate_limited_and_no_other_is() -> TestResult {
    let database = TestDatabase::create("too_often").await?;
    let directory = tempfile::tempdir()?;
    let mut slow = settings(directory.path())?;
    slow.agent_rate = "1h,3".parse()?;
    let listener = Listener::start(&database, slow).await?;
    let pool = database.pool().await?;
    let agent = TestAgent::new(&pool, &listener.bmdb).await?;
    let mut client = agent.connect(&listener.server).await?;
    for seq in 1..=3 {
        say(&mut client, agent.heartbeat(seq)).await?;
    }
    let (code, _) = refused(say(&mut client, agent.heartbeat(4)).await)?;
    assert_eq!(code, Code::ResourceExhausted);
    let mut again = agent.connect(&listener.server).await?;
    assert_eq!(refused(say(&mut again, agent.heartbeat(5)).await)?.0, Code::ResourceExhausted);
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    say(&mut other.connect(&listener.server).await?, other.heartbeat(1)).await?;
    Ok(listener.stop().await?)
}

#[tokio::test]
async fn without_its_database_the_server_says_that_it_is_away() -> TestResult {
    let world = World::new("away").await?;
    let (agent, mut client) = world.agent().await?;
    say(&mut client, agent.heartbeat(1)).await?;
    world.listener.bmdb.close().await;
    let text = "the database is not available; try again".to_owned();
    assert_eq!(refused(say(&mut client, agent.heartbeat(2)).await)?, (Code::Unavailable, text));
    Ok(world.listener.stop().await?)
}

#[tokio::test]
async fn real_agent_sends_heartbeats_and_reports_its_hardware() -> TestResult {
    let world = World::new("real_agent").await?;
    let (agent, _) = world.agent().await?;
    let server = &world.listener.server;
    let real = Agent {
        machine_id: agent.machine,
        identity: agent.identity.clone(),
        settings: AgentSettings {
            endpoints: server.endpoints.clone(),
            ca_certificates: server.current_ca_certificates(),
            heartbeat_interval_seconds: 1,
        },
        fallback: None,
        access_fence: 1,
        incarnation: Uuid::new_v4(),
        agent_version: "test".to_owned(),
        clock: Arc::new(HostClock::read()?),
        time: untold()?,
        hardware: Arc::new(report),
        cluster: shepherd::roleserver::agent::no_cluster(),
        release: shepherd::roleserver::agent::no_release(),
        uploads_logs: false,
        server_pool: None,
        observer: ignore_events(),
    };
    let stop = CancellationToken::new();
    let running = tokio::spawn(real.run(stop.clone()));
    until("the agent's report is stored", async || {
        let count: i64 =
            sqlx::query_scalar("SELECT count(*) FROM machine_hardware_report").fetch_one(&world.pool).await?;
        Ok(count == 1)
    })
    .await?;
    stop.cancel();
    running.await?;
    Ok(world.listener.stop().await?)
}
