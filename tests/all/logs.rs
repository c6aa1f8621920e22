//! Logs of machines, from the side of shepherds: what they request of a machine, store of its uploads, and return to
//! the client that requested it. `api/logs.rs` and `logs/of_a_node.rs` test what a real role server uploads and how
//! `shepherdctl` shows it.

mod of_a_node;

use anyhow::{Context as _, Result};
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::fleet::retention::RetainedKind;
use shepherd::bmdb::machine::log_request::{LogReadResult, request_id_of};
use shepherd::bmdb::orders::order::{Actor, Order, OrderResult, request_digest};
use shepherd::model::ids::MachineId;
use shepherd::model::log_request::{
    LogQuery, LogRequestState, MAX_ANSWER_BYTES, MAX_PART_BYTES, MAX_REQUESTS_PER_MACHINE,
};
use shepherd::proto::agent::v1::{
    HeartbeatRequest, LogLines, LogRequest, UploadLogRequest, UploadLogResponse,
};
use sqlx::PgPool;
use tonic::Code;
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Client, Listener, TestAgent, provided, say, settings};
use crate::harness::postgres::TestDatabase;

struct World {
    listener: Listener,
    pool: PgPool,
    _directory: tempfile::TempDir,
    _database: TestDatabase,
}

fn order() -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "test".to_owned(),
        target: "a log".to_owned(),
        reason: "a test".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}

fn build_log_query(log: &str, follow: bool) -> LogQuery {
    LogQuery { log: log.to_owned(), lines: 100, since: None, follow }
}

impl World {
    async fn new(name: &str) -> Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let listener = Listener::start(&database, settings(directory.path())?).await?;
        let pool = database.pool().await?;
        Ok(Self { listener, pool, _directory: directory, _database: database })
    }

    async fn order(&self, machine: MachineId, wanted: LogQuery) -> Result<OrderResult, BmdbError> {
        self.listener.bmdb.request_log(order(), (machine, "m".to_owned()), wanted).await
    }

    async fn ask(&self, machine: MachineId, wanted: LogQuery) -> Result<Uuid> {
        request_id_of(&self.order(machine, wanted).await?).context("no request")
    }

    async fn read(&self, machine: MachineId, request: Uuid, taken: i64) -> Result<LogReadResult, BmdbError> {
        self.listener.bmdb.read_log(machine, request, "kim".to_owned(), taken).await
    }

    async fn count(&self, statement: &'static str) -> Result<i64> {
        Ok(sqlx::query_scalar(statement).fetch_one(&self.pool).await?)
    }

    /// Moves the times of all log requests back by this interval.
    async fn back(&self, by: &str) -> Result<()> {
        let statement =
            "UPDATE log_request SET requested_at = requested_at - $1::INTERVAL, read_at = read_at - $1::INTERVAL,
                                delivered_at = delivered_at - $1::INTERVAL, last_part_at = last_part_at - $1::INTERVAL";
        sqlx::query(statement).bind(by).execute(&self.pool).await?;
        Ok(())
    }
}

/// A heartbeat of a role server that can upload logs.
fn knowing(agent: &TestAgent, seq: u64) -> HeartbeatRequest {
    HeartbeatRequest { supports_log_upload: true, ..agent.heartbeat(seq) }
}

/// The next start of its role server, in the same boot.
fn restart_agent(agent: &TestAgent) -> TestAgent {
    TestAgent {
        machine: agent.machine,
        identity: agent.identity.clone(),
        boot_id: agent.boot_id.clone(),
        incarnation: Uuid::new_v4().to_string(),
    }
}

fn part(agent: &TestAgent, request: Uuid, number: u64, text: &str) -> UploadLogRequest {
    UploadLogRequest {
        machine_id: agent.machine.to_string(),
        request_id: request.to_string(),
        incarnation: agent.incarnation.clone(),
        part_number: number,
        lines: Some(LogLines { text: text.to_owned() }),
        ..UploadLogRequest::default()
    }
}

async fn bring(client: &mut Client, part: UploadLogRequest) -> Result<UploadLogResponse, tonic::Status> {
    Ok(client.bring_log(part).await?.into_inner())
}

const UPLOAD_WANTED: UploadLogResponse = UploadLogResponse { continue_upload: true, retry_later: false };
const UPLOAD_ENDED: UploadLogResponse = UploadLogResponse { continue_upload: false, retry_later: false };

fn failed(read: &LogReadResult) -> Result<&str> {
    match &read.state {
        LogRequestState::Ended(Some(text)) => Ok(text),
        other => anyhow::bail!("it has not failed: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_request_is_sent_with_a_heartbeat_and_its_log_returned_once_to_the_requester() -> TestResult {
    let world = World::new("logs_handed").await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let other = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let mut client = agent.connect(&world.listener.server).await?;
    let mut stranger = other.connect(&world.listener.server).await?;
    let first = say(&mut client, knowing(&agent, 1)).await?;
    assert_eq!(first.log_requests, Vec::new());
    say(&mut stranger, knowing(&other, 1)).await?;
    let request = world.ask(agent.machine, build_log_query("web/server", false)).await?;
    let waits = world.read(agent.machine, request, 0).await?;
    assert!(
        matches!(&waits.state, LogRequestState::Waiting(text) if text.contains("next heartbeat")),
        "{waits:?}"
    );

    // A plain heartbeat, which is stored in a group. The request is repeated until the log was uploaded, and is sent to
    // this machine alone.
    let expected = LogRequest {
        request_id: request.to_string(),
        log: "web/server".to_owned(),
        lines: 100,
        since_seconds: 0,
        follow: false,
    };
    for seq in [2, 3] {
        let answer = say(&mut client, knowing(&agent, seq)).await?;
        assert_eq!(answer.log_requests, std::slice::from_ref(&expected));
    }
    assert_eq!(say(&mut stranger, knowing(&other, 2)).await?.log_requests, Vec::new());

    // No other machine can upload it with another machine's key, or under another machine's id.
    let refused =
        bring(&mut stranger, part(&agent, request, 0, "mine\n")).await.err().context("it was taken")?;
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused:?}");
    let theirs =
        UploadLogRequest { machine_id: other.machine.to_string(), ..part(&agent, request, 0, "mine\n") };
    assert_eq!(bring(&mut stranger, theirs).await?, UPLOAD_ENDED);
    for _ in 0..2 {
        // The response to the first part was lost.
        assert_eq!(bring(&mut client, part(&agent, request, 0, "one\u{1b}[2J\ntwo\n")).await?, UPLOAD_WANTED);
    }
    let last = UploadLogRequest {
        is_last: true,
        note: "that is all".to_owned(),
        ..part(&agent, request, 1, "three\n")
    };
    assert_eq!(bring(&mut client, last).await?, UPLOAD_WANTED);
    assert_eq!(bring(&mut client, part(&agent, request, 2, "four\n")).await?, UPLOAD_ENDED);
    assert_eq!(say(&mut client, knowing(&agent, 4)).await?.log_requests, Vec::new());

    let lee = world.listener.bmdb.read_log(agent.machine, request, "lee".to_owned(), 0).await;
    assert!(lee.err().context("lee read it")?.to_string().contains("you have no such request"));
    let elsewhere = world.read(other.machine, request, 0).await;
    assert!(elsewhere.is_err(), "it is not a log of that machine");
    for _ in 0..2 {
        // A client that lost the response reads again from the same position.
        let read = world.read(agent.machine, request, 0).await?;
        assert_eq!((read.lines.as_str(), read.parts_read), ("one [2J\ntwo\nthree\n", 2));
        assert_eq!((read.state, read.note.as_deref()), (LogRequestState::Ended(None), Some("that is all")));
    }
    let read = world.read(agent.machine, request, 2).await?;
    assert_eq!((read.lines.as_str(), read.state), ("", LogRequestState::Ended(None)));
    assert_eq!(
        world.count("SELECT count(*) FROM log_request").await?,
        0,
        "it was taken, and is kept no longer"
    );
    assert_eq!(world.count("SELECT count(*) FROM log_part").await?, 0);
    let audited: String = sqlx::query_scalar("SELECT message FROM audit WHERE machine_id = $1")
        .bind(agent.machine.0)
        .fetch_one(&world.pool)
        .await?;
    assert_eq!(audited, "gets the request for the log web/server with its next heartbeat");
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_machine_gets_no_log_request_and_one_that_falls_silent_is_not_waited_for() -> TestResult {
    let world = World::new("logs_silent").await?;
    let bare = provided(&world.pool).await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let mut client = agent.connect(&world.listener.server).await?;
    say(&mut client, knowing(&agent, 1)).await?;
    let never =
        world.order(bare, build_log_query("etcd", false)).await.err().context("not refused")?.to_string();
    assert!(never.contains("m has never reported"), "{never}");

    let request = world.ask(agent.machine, build_log_query("etcd", false)).await?;
    world.back("80 seconds").await?;
    assert!(matches!(world.read(agent.machine, request, 0).await?.state, LogRequestState::Waiting(_)));
    world.back("20 seconds").await?;
    sqlx::query("UPDATE machine_agent_heartbeat SET at = at - INTERVAL '110 seconds'")
        .execute(&world.pool)
        .await?;
    let read = world.read(agent.machine, request, 0).await?;
    let text = failed(&read)?;
    assert!(
        text.starts_with(
            "the machine has not reported since the request was made; it last reported 1m50s ago ("
        ),
        "{text}"
    );
    let silent = world
        .order(agent.machine, build_log_query("etcd", false))
        .await
        .err()
        .context("not refused")?
        .to_string();
    assert!(
        silent.contains("m is silent: it last reported 1m5") && silent.contains("shepherdctl why"),
        "{silent}"
    );
    let refused = world.count("SELECT count(*) FROM audit WHERE outcome = 'refused'").await?;
    assert_eq!(refused, 2, "who tried is in the audit, too");

    // Its power was cut after it received the request.
    say(&mut client, knowing(&agent, 2)).await?;
    let request = world.ask(agent.machine, build_log_query("etcd", true)).await?;
    assert_eq!(say(&mut client, knowing(&agent, 3)).await?.log_requests.len(), 1);
    assert_eq!(bring(&mut client, part(&agent, request, 0, "its last words\n")).await?, UPLOAD_WANTED);
    world.back("61 seconds").await?;
    let read = world.read(agent.machine, request, 0).await?;
    assert_eq!(
        (&read.state, read.lines.as_str()),
        (&LogRequestState::Ended(failed(&read).ok().map(str::to_owned)), "its last words\n")
    );
    assert!(
        failed(&read)?.starts_with("the request was sent to it, and it has sent nothing for 1m"),
        "{read:?}"
    );
    assert_eq!(bring(&mut client, part(&agent, request, 1, "it is back\n")).await?, UPLOAD_ENDED);
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_fails_with_a_reason_where_a_role_server_does_not_support_it_or_restarts() -> TestResult {
    let world = World::new("logs_words").await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let mut client = agent.connect(&world.listener.server).await?;
    // A role server of an earlier release: its heartbeats do not mention logs.
    say(&mut client, agent.heartbeat(1)).await?;
    let request = world.ask(agent.machine, build_log_query("", false)).await?;
    assert_eq!(say(&mut client, agent.heartbeat(2)).await?.log_requests, Vec::new());
    let read = world.read(agent.machine, request, 0).await?;
    let text = failed(&read)?;
    assert!(text.starts_with("its role server (1) cannot send logs; update it"), "{text}");

    // Restarted before it uploaded anything: its successor receives the request, and it uploads nothing more itself.
    let request = world.ask(agent.machine, build_log_query("etcd", false)).await?;
    assert_eq!(say(&mut client, knowing(&agent, 3)).await?.log_requests.len(), 1);
    let next = restart_agent(&agent);
    assert_eq!(say(&mut client, knowing(&next, 4)).await?.log_requests.len(), 1);
    assert_eq!(bring(&mut client, part(&agent, request, 0, "of before\n")).await?, UPLOAD_ENDED);
    assert_eq!(bring(&mut client, part(&next, request, 0, "one\n")).await?, UPLOAD_WANTED);
    // Restarted in the middle: the successor does not receive a request that its predecessor began, and no client waits
    // for it.
    let after = restart_agent(&agent);
    let requests = say(&mut client, knowing(&after, 5)).await?.log_requests;
    assert_eq!(requests, Vec::new(), "it receives the request that its predecessor began");
    let read = world.read(next.machine, request, 0).await?;
    assert_eq!(failed(&read)?, "its role server restarted in the middle of the log; request it again");
    assert_eq!(read.lines, "one\n", "what came is worth having");
    assert_eq!(bring(&mut client, part(&next, request, 1, "two\n")).await?, UPLOAD_ENDED);
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_what_is_brought_for_them_are_bounded() -> TestResult {
    let world = World::new("logs_bounded").await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let mut client = agent.connect(&world.listener.server).await?;
    say(&mut client, knowing(&agent, 1)).await?;
    let mut requests = Vec::new();
    for _ in 0..MAX_REQUESTS_PER_MACHINE {
        requests.push(world.ask(agent.machine, build_log_query("etcd", requests.len() == 1)).await?);
    }
    let many = world
        .order(agent.machine, build_log_query("etcd", false))
        .await
        .err()
        .context("one too many")?
        .to_string();
    assert!(many.contains("m has 4 log requests at this moment"), "{many}");
    assert_eq!(say(&mut client, knowing(&agent, 2)).await?.log_requests.len(), requests.len());

    let long = "x".repeat(MAX_PART_BYTES + 1);
    let refused =
        bring(&mut client, part(&agent, requests[0], 0, &long)).await.err().context("it was taken")?;
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "lines is larger than 64 KiB"));
    let text = format!("{}\n", "x".repeat(MAX_PART_BYTES - 1));
    let parts = u64::try_from(MAX_ANSWER_BYTES / MAX_PART_BYTES)?;
    for number in 0..parts {
        assert_eq!(
            bring(&mut client, part(&agent, requests[0], number, &text)).await?,
            UPLOAD_WANTED,
            "{number}"
        );
        assert_eq!(
            bring(&mut client, part(&agent, requests[1], number, &text)).await?,
            UPLOAD_WANTED,
            "{number}"
        );
    }
    assert_eq!(bring(&mut client, part(&agent, requests[0], parts, "y\n")).await?, UPLOAD_ENDED);
    // A followed log continues once a client has read a part of it.
    let later = UploadLogResponse { continue_upload: true, retry_later: true };
    assert_eq!(bring(&mut client, part(&agent, requests[1], parts, "y\n")).await?, later);
    let bytes = world.count("SELECT sum(octet_length(lines))::INT8 FROM log_part").await?;
    assert_eq!(usize::try_from(bytes)?, 2 * MAX_ANSWER_BYTES);
    let mut taken = 0;
    let mut read = world.read(agent.machine, requests[0], taken).await?;
    let mut reported = 0;
    while read.state == LogRequestState::Receiving {
        reported += read.lines.len();
        taken = read.parts_read;
        read = world.read(agent.machine, requests[0], taken).await?;
    }
    reported += read.lines.len();
    assert_eq!(
        (reported, failed(&read)?),
        (MAX_ANSWER_BYTES, "it sent more than 1024 KiB; request fewer lines")
    );
    let first = world.read(agent.machine, requests[1], 0).await?;
    world.read(agent.machine, requests[1], first.parts_read).await?;
    assert_eq!(bring(&mut client, part(&agent, requests[1], parts, "y\n")).await?, UPLOAD_WANTED);

    // No client reads it: it ends, its machine is notified, and after some minutes nothing of it is left.
    assert_eq!(
        world.listener.bmdb.delete_expired(RetainedKind::LogParts, 100).await?,
        0,
        "somebody may come for it"
    );
    world.back("61 seconds").await?;
    assert_eq!(bring(&mut client, part(&agent, requests[1], parts + 1, "z\n")).await?, UPLOAD_ENDED);
    assert_eq!(say(&mut client, knowing(&agent, 3)).await?.log_requests, Vec::new());
    world.back("5 minutes").await?;
    assert_eq!(
        world.listener.bmdb.delete_expired(RetainedKind::LogRequests, 100).await?,
        2,
        "those of which nothing was brought"
    );
    while world.listener.bmdb.delete_expired(RetainedKind::LogParts, 5).await? > 0 {}
    assert_eq!(world.listener.bmdb.delete_expired(RetainedKind::LogRequests, 100).await?, 2);
    world.ask(agent.machine, build_log_query("etcd", false)).await?;
    assert_eq!(world.count("SELECT count(*) FROM log_part").await?, 0);
    Ok(world.listener.stop().await?)
}
