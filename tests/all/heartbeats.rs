//! Heartbeats in the BMDB: a group has the same effect as single heartbeats in sequence, a malformed heartbeat does not
//! affect the others, and the records of listeners are true.

use std::sync::Arc;
use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::{FactChange, NewHardwareReport, NewHeartbeat};
use shepherd::bmdb::machine::heartbeat::group_commit::{HeartbeatError, HeartbeatQueue};
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat};
use shepherd::bmdb::metrics::Metrics;
use shepherd::model::host_finding::{HostFinding, HostFindingKind};
use shepherd::model::ids::{MachineId, ProcessId};
use shepherd::model::issues::find_issues;
use shepherd::model::roll_out::ReleaseReport;
use shepherd::model::why::explain_machine;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{TestAgent, events, phase, until};
use crate::harness::postgres::TestDatabase;

fn heartbeat(agent: &TestAgent, boot: &str, sequence: i64) -> ReceivedHeartbeat {
    ReceivedHeartbeat {
        machine: agent.machine,
        public_key: agent.identity.public_key(),
        beat: NewHeartbeat {
            boot_id: boot.to_owned(),
            incarnation: "i".to_owned(),
            sequence,
            version: "1".to_owned(),
        },
        hardware: None,
        installation: None,
        cluster: None,
        release: None,
        access_fence: 0,
    }
}

/// The stored state of a machine, without times.
async fn stored(pool: &PgPool, machine: MachineId) -> anyhow::Result<Vec<Option<String>>> {
    let text = "SELECT boot_id || incarnation || sequence || version || coalesce(previous_boot_id, '-')
                FROM machine_agent_heartbeat WHERE machine_id = $1
                UNION ALL SELECT lane || process || timer || phase_index || split_part(reason, ';', 1)
                FROM machine_due WHERE machine_id = $1
                ORDER BY 1";
    Ok(sqlx::query_scalar(text).bind(machine.0).fetch_all(pool).await?)
}

fn kind(outcome: &HeartbeatOutcome) -> &'static str {
    match outcome {
        HeartbeatOutcome::Stored(_) => "stored",
        HeartbeatOutcome::Duplicate(_) => "repeated",
        HeartbeatOutcome::Stale => "stale",
        HeartbeatOutcome::Unauthenticated => "unauthenticated",
        HeartbeatOutcome::Retired => "retired",
    }
}

struct Committing {
    heartbeats: HeartbeatQueue,
    metrics: Metrics,
    task: tokio::task::JoinHandle<()>,
}

async fn committing(database: &TestDatabase) -> anyhow::Result<Committing> {
    let metrics = Metrics::new();
    let (heartbeats, commit) =
        HeartbeatQueue::new(database.bmdb().await?, ProcessId::generate(), metrics.clone());
    let task = tokio::spawn(commit.run(CancellationToken::new()));
    Ok(Committing { heartbeats, metrics, task })
}

impl Committing {
    async fn end(self) -> anyhow::Result<()> {
        drop(self.heartbeats);
        Ok(self.task.await?)
    }
}

#[tokio::test]
async fn group_means_the_same_as_one_after_the_other() -> TestResult {
    let database = TestDatabase::create("group").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let committing = committing(&database).await?;
    let seed = rand::random();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut pairs = Vec::new();
    for _ in 0..4 {
        pairs.push((TestAgent::new(&pool, &bmdb).await?, TestAgent::new(&pool, &bmdb).await?));
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut last = [None; 4];
    for step in 0..80 {
        let number = random.random_range(0..pairs.len());
        let (grouped, single) = &pairs[number];
        // Often the same value again, mostly the same boot.
        let fresh = (["a", "a", "a", "b", "c"][random.random_range(0..5)], random.random_range(0..12));
        let (boot, sequence) =
            if random.random_range(0..3) == 0 { last[number].unwrap_or(fresh) } else { fresh };
        last[number] = Some((boot, sequence));
        let by_group = committing.heartbeats.store(heartbeat(grouped, boot, sequence)).await?;
        let alone = bmdb.store_heartbeat(Arc::new(heartbeat(single, boot, sequence))).await?;
        assert_eq!(by_group, alone, "seed {seed}, step {step}");
        seen.insert(kind(&alone));
        assert_eq!(
            stored(&pool, grouped.machine).await?,
            stored(&pool, single.machine).await?,
            "seed {seed}, step {step}"
        );
        assert_eq!(
            events(&pool, grouped.machine).await?,
            events(&pool, single.machine).await?,
            "seed {seed}, step {step}"
        );
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["repeated", "stale", "stored"], "seed {seed}");
    Ok(committing.end().await?)
}

#[tokio::test]
async fn poisoned_heartbeat_spoils_no_other() -> TestResult {
    let database = TestDatabase::create("poisoned").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let mut agents = Vec::new();
    for _ in 0..24 {
        let agent = TestAgent::new(&pool, &bmdb).await?;
        bmdb.store_heartbeat(Arc::new(heartbeat(&agent, "a", 1))).await?;
        agents.push(agent);
    }
    let committing = committing(&database).await?;
    let answers = agents.iter().enumerate().map(|(number, agent)| {
        let mut heartbeat = heartbeat(agent, "a", 2);
        if number == 13 {
            heartbeat.beat.version = "no text column takes a \u{0}".to_owned();
        }
        committing.heartbeats.store(heartbeat)
    });
    let answers = futures::future::join_all(answers).await;
    for (number, answer) in answers.iter().enumerate() {
        match answer {
            Ok(HeartbeatOutcome::Stored(_)) => assert_ne!(number, 13),
            Err(HeartbeatError::Database(_)) => assert_eq!(number, 13),
            other => panic!("{number}: {other:?}"),
        }
    }
    let newer: i64 = sqlx::query_scalar("SELECT count(*) FROM machine_agent_heartbeat WHERE sequence = 2")
        .fetch_one(&pool)
        .await?;
    assert_eq!(newer, 23);
    assert!(committing.metrics.heartbeat_batches_halved.get() > 0);
    Ok(committing.end().await?)
}

/// An agent sends its report with every heartbeat until it is stored. A report that can never be stored must not make
/// its machine look dead.
#[tokio::test]
async fn report_that_cannot_be_stored_does_not_silence_its_machine() -> TestResult {
    let database = TestDatabase::create("unstorable_report").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let committing = committing(&database).await?;
    for known in [true, false] {
        let agent = TestAgent::new(&pool, &bmdb).await?;
        if known {
            committing.heartbeats.store(heartbeat(&agent, "a", 1)).await?;
        }
        let report = NewHardwareReport {
            incarnation: "i".to_owned(),
            report: Vec::new(),
            manufacturer: Some("no text column takes a \u{0}".to_owned()),
            product: None,
            serial_number: None,
            memory_bytes: 1,
            cpu_threads: 1,
        };
        let reporting = ReceivedHeartbeat { hardware: Some(report), ..heartbeat(&agent, "a", 2) };
        let answer = committing.heartbeats.store(reporting).await;
        assert!(matches!(answer, Err(HeartbeatError::Database(_))), "{known}: {answer:?}");
        let text = "SELECT sequence FROM machine_agent_heartbeat WHERE machine_id = $1";
        let received: Option<i64> =
            sqlx::query_scalar(text).bind(agent.machine.0).fetch_optional(&pool).await?;
        assert_eq!(received, Some(2), "known before: {known}");
    }
    Ok(committing.end().await?)
}

/// What an agent finds wrong with how it runs is explained by `why`, and is an issue, until it no longer reports it.
#[tokio::test]
async fn findings_of_an_agent_are_explained_until_they_are_gone() -> TestResult {
    let database = TestDatabase::create("host_findings").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let agent = TestAgent::new(&pool, &bmdb).await?;
    let placement = "its role server is at /opt/shepherd/bin/roleserver, because it is good";
    bmdb.change_machine(agent.machine, move |_| Decision {
        changes: vec![FactChange::AgentPlaced(placement.to_owned())],
        events: Vec::new(),
        output: (),
    })
    .await?;
    let finding = HostFinding {
        kind: HostFindingKind::WorkloadsEndWithAgent,
        message: "etcd would end with the role server".to_owned(),
    };
    let reports = [vec![finding.clone()], Vec::new()];
    for (sequence, findings) in (1..).zip(reports) {
        let release =
            ReleaseReport { generation: 0, sha256: [7; 32], error: None, findings: findings.clone() };
        let sent = ReceivedHeartbeat { release: Some(release), ..heartbeat(&agent, "a", sequence) };
        bmdb.store_heartbeat(Arc::new(sent.clone())).await?;
        // It was stored: what is sent again is a repetition.
        assert_eq!(kind(&bmdb.store_heartbeat(Arc::new(sent)).await?), "repeated");
        let notes = explain_machine(&bmdb.machine_view(agent.machine).await?).notes;
        assert!(notes.iter().any(|note| note == placement), "{notes:?}");
        assert_eq!(notes.contains(&finding.message), !findings.is_empty(), "{notes:?}");
        let issues = find_issues(&bmdb.read_issue_inputs().await?);
        let found: Vec<&str> = issues
            .iter()
            .filter(|issue| issue.id == "workloads-end-with-agent")
            .map(|issue| issue.message.as_str())
            .collect();
        assert_eq!(found, findings.iter().map(|finding| finding.message.as_str()).collect::<Vec<_>>());
    }
    Ok(())
}

/// A database that was restored from a backup has issued lower fences than the machine has seen. The first heartbeat
/// that shows this is recorded in history, whether it arrives in a group or alone. Later heartbeats write what they
/// always write.
#[tokio::test]
async fn fence_that_was_never_granted_is_recorded_once_and_explained_by_why_until_it_is_declared()
-> TestResult {
    let database = TestDatabase::create("newer_fence").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let committing = committing(&database).await?;
    let notes = async |machine| -> anyhow::Result<Vec<String>> {
        Ok(explain_machine(&bmdb.machine_view(machine).await?).notes)
    };
    for way in ["group", "single"] {
        let agent = TestAgent::new(&pool, &bmdb).await?;
        let machine = agent.machine;
        let says =
            |sequence, access_fence| ReceivedHeartbeat { access_fence, ..heartbeat(&agent, "a", sequence) };
        let lines = async || -> anyhow::Result<Vec<i64>> {
            let text = "SELECT fence FROM history WHERE machine_id = $1 AND event = 'NewerFence' ORDER BY at";
            Ok(sqlx::query_scalar(text).bind(machine.0).fetch_all(&pool).await?)
        };
        // The first heartbeat of a machine is processed alone. Fence 1 is the one that it was enrolled under.
        bmdb.store_heartbeat(Arc::new(says(1, 1))).await?;
        committing.heartbeats.store(says(2, 1)).await?;
        committing.heartbeats.store(says(3, 0)).await?;
        assert_eq!(lines().await?, Vec::<i64>::new(), "{way}: nothing is wrong");
        for sequence in 4..10 {
            let outcome = match way {
                "group" => committing.heartbeats.store(says(sequence, 9)).await?,
                _ => bmdb.store_heartbeat(Arc::new(says(sequence, 9))).await?,
            };
            assert_eq!(kind(&outcome), "stored", "{way}: it is no reason to refuse a heartbeat");
        }
        until("history holds the newer fence", async || Ok(!lines().await?.is_empty())).await?;
        // Another shepherd receives it, too.
        bmdb.store_heartbeat(Arc::new(says(20, 9))).await?;
        assert_eq!(lines().await?, [9], "{way}");
        assert_eq!(phase(&pool, machine).await?, "Ready", "{way}");
        let messages = notes(machine).await?;
        assert!(
            messages
                .iter()
                .any(|note| note.contains("has seen fence 9") && note.contains("declare restored")),
            "{way}: {messages:?}"
        );
        // Rejected attempts do not resolve it, however many they are; only raising the fences does.
        sqlx::query("UPDATE machine_due SET fence = 100 WHERE machine_id = $1")
            .bind(machine.0)
            .execute(&pool)
            .await?;
        let messages = notes(machine).await?;
        assert!(messages.iter().any(|note| note.contains("has seen fence 9")), "{way}: {messages:?}");
        sqlx::query("UPDATE machine_due SET fence = 100000001 WHERE machine_id = $1")
            .bind(machine.0)
            .execute(&pool)
            .await?;
        let messages = notes(machine).await?;
        assert!(!messages.iter().any(|note| note.contains("has seen fence")), "{way}: {messages:?}");
        committing.heartbeats.store(says(21, 9)).await?;
        assert_eq!(lines().await?, [9], "{way}: declared");
    }
    // Counted by the handle that recorded it: one by the group's handle on the database, one by ours.
    assert_eq!(bmdb.metrics().unknown_fences.get(), 1);
    Ok(committing.end().await?)
}

#[tokio::test]
async fn two_heartbeats_of_one_machine_in_one_group_leave_the_newer() -> TestResult {
    let database = TestDatabase::create("two_in_one").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let agent = TestAgent::new(&pool, &bmdb).await?;
    bmdb.store_heartbeat(Arc::new(heartbeat(&agent, "a", 1))).await?;
    let committing = committing(&database).await?;
    let answers = futures::future::join_all(
        [5, 7, 6, 7].map(|sequence| committing.heartbeats.store(heartbeat(&agent, "a", sequence))),
    )
    .await;
    let kinds: Vec<_> = answers.iter().map(|answer| answer.as_ref().map_or("error", kind)).collect();
    // Whether both were in one group depends on timing. The newer one stays in either case, and the older one that
    // arrived first may have been stored first.
    assert!(["stored", "stale"].contains(&kinds[0]), "{kinds:?}");
    assert_eq!(kinds[2], "stale", "{kinds:?}");
    let mut sevens = [kinds[1], kinds[3]];
    sevens.sort_unstable();
    assert_eq!(sevens, ["repeated", "stored"]);
    let sequence: i64 =
        sqlx::query_scalar("SELECT sequence FROM machine_agent_heartbeat").fetch_one(&pool).await?;
    assert_eq!(sequence, 7);
    Ok(committing.end().await?)
}

#[tokio::test]
async fn stranger_in_the_same_group_stands_in_nobodys_way() -> TestResult {
    let database = TestDatabase::create("stranger").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let agent = TestAgent::new(&pool, &bmdb).await?;
    bmdb.store_heartbeat(Arc::new(heartbeat(&agent, "a", 1))).await?;
    let committing = committing(&database).await?;
    let stranger = |sequence| {
        let mut heartbeat = heartbeat(&agent, "a", sequence);
        heartbeat.public_key = [9; 32];
        heartbeat
    };
    let answers = futures::future::join_all(
        [stranger(50), heartbeat(&agent, "a", 2), stranger(0), stranger(2)]
            .map(|heartbeat| committing.heartbeats.store(heartbeat)),
    )
    .await;
    let kinds: Vec<_> = answers.iter().map(|answer| answer.as_ref().map_or("error", kind)).collect();
    assert_eq!(kinds, ["unauthenticated", "stored", "unauthenticated", "unauthenticated"]);
    let sequence: i64 =
        sqlx::query_scalar("SELECT sequence FROM machine_agent_heartbeat").fetch_one(&pool).await?;
    assert_eq!(sequence, 2);
    Ok(committing.end().await?)
}

#[tokio::test]
async fn row_that_somebody_holds_delays_no_other_heartbeat() -> TestResult {
    let database = TestDatabase::create("held_row").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let (held, free) = (TestAgent::new(&pool, &bmdb).await?, TestAgent::new(&pool, &bmdb).await?);
    for agent in [&held, &free] {
        bmdb.store_heartbeat(Arc::new(heartbeat(agent, "a", 1))).await?;
    }
    let committing = committing(&database).await?;
    let mut transaction = pool.begin().await?;
    sqlx::query("SELECT 1 FROM machine_agent_heartbeat WHERE machine_id = $1 FOR UPDATE")
        .bind(held.machine.0)
        .execute(&mut *transaction)
        .await?;
    let heartbeats = committing.heartbeats.clone();
    let goes_on = heartbeats.store(heartbeat(&free, "a", 2));
    let waits = {
        let heartbeats = committing.heartbeats.clone();
        let heartbeat = heartbeat(&held, "a", 2);
        async move { heartbeats.store(heartbeat).await }
    };
    tokio::pin!(waits);
    tokio::select! {
        answer = goes_on => assert_eq!(kind(&answer?), "stored"),
        answer = &mut waits => panic!("{answer:?} while the row was held"),
    }
    transaction.rollback().await?;
    assert_eq!(kind(&waits.await?), "stored");
    drop(heartbeats);
    Ok(committing.end().await?)
}

#[tokio::test]
async fn gap_in_listening_restarts_it_and_a_short_one_does_not() -> TestResult {
    let database = TestDatabase::create("listening").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let none: Arc<[Arc<ReceivedHeartbeat>]> = Arc::from([]);
    let age = || {
        sqlx::query_as::<_, (i64, f64, f64)>(
            "SELECT shard, extract(epoch FROM clock_timestamp() - since)::FLOAT8,
                    extract(epoch FROM clock_timestamp() - last_commit)::FLOAT8
             FROM fleet_listening ORDER BY shard",
        )
        .fetch_all(&pool)
    };
    let seconds = |from: f64, to: f64| move |value: f64| (from..to).contains(&value);
    bmdb.store_heartbeat_group(3, none.clone()).await?;
    database.advance(Duration::from_secs(50)).await?;
    bmdb.store_heartbeat_group(3, none.clone()).await?;
    let listening = age().await?;
    assert!(listening.len() == 1 && seconds(50.0, 80.0)(listening[0].1), "{listening:?}");
    assert!(seconds(0.0, 30.0)(listening[0].2), "{listening:?}");

    // Another listener that starts while this one exists counts as listening since this one started.
    bmdb.store_heartbeat_group(7, none.clone()).await?;
    let listening = age().await?;
    assert!(listening.len() == 2 && (listening[0].1 - listening[1].1).abs() < 1.0, "{listening:?}");

    database.advance(Duration::from_secs(61)).await?;
    bmdb.store_heartbeat_group(7, none).await?;
    let listening = age().await?;
    assert!(seconds(111.0, 140.0)(listening[0].1) && seconds(0.0, 30.0)(listening[1].1), "{listening:?}");
    Ok(())
}

#[tokio::test]
async fn idle_listener_says_at_once_that_it_listens() -> TestResult {
    let database = TestDatabase::create("idle").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let committing = committing(&database).await?;
    until("a listener that hears nothing listens", async || {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM fleet_listening").fetch_one(&pool).await?;
        Ok(count == 1)
    })
    .await?;
    Ok(committing.end().await?)
}

#[tokio::test]
async fn silent_machine_that_sends_a_heartbeat_is_ready_again() -> TestResult {
    let database = TestDatabase::create("silent").await?;
    let (bmdb, pool) = (database.bmdb().await?, database.pool().await?);
    bmdb.migrate().await?;
    let agent = TestAgent::new(&pool, &bmdb).await?;
    let committing = committing(&database).await?;
    assert_eq!(phase(&pool, agent.machine).await?, "AgentStarting");
    committing.heartbeats.store(heartbeat(&agent, "a", 1)).await?;
    assert_eq!(phase(&pool, agent.machine).await?, "Ready");
    // Eleven minutes in which a listener existed and no heartbeat arrived.
    database.advance(Duration::from_mins(11)).await?;
    sqlx::query("UPDATE fleet_listening SET last_commit = clock_timestamp()").execute(&pool).await?;
    bmdb.sweep_page(MachineId(uuid::Uuid::nil()), 100).await?;
    assert_eq!(phase(&pool, agent.machine).await?, "Silent");
    let outcome = committing.heartbeats.store(heartbeat(&agent, "a", 2)).await?;
    assert_eq!(kind(&outcome), "stored");
    assert_eq!(phase(&pool, agent.machine).await?, "Ready");
    let messages = events(&pool, agent.machine).await?;
    for event in ["FirstHeartbeat", "HeardAgain", "Ready", "Silent"] {
        assert!(messages.iter().any(|text| text == event), "{event} is missing in {messages:?}");
    }
    Ok(committing.end().await?)
}
