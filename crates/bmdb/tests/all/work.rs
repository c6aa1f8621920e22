//! How work ends, what that leaves behind, and how work that must stop learns of it.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use chrono::TimeDelta;
use model::backoff::BackoffPolicy;
use model::process::Process;
use model::provider_status::ProviderStatus;
use model::time::Span;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::claim::{Claimed, NextDue};
use shepherd_bmdb::engine::fact_change::{FactChange, ProviderDetails};
use shepherd_bmdb::metrics::Metrics;
use sqlx::Connection as _;
use sqlx::postgres::PgListener;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, PATIENCE, SOON, Shepherd, ended, hold, needs_human, surely, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backoff_grows_with_each_failure_survives_a_cancel_and_ends_with_a_finish() -> TestResult {
    let kit = Kit::new("backoff").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let mut session = shepherd.session().await?;
    // The published sequence, though the rest of the row is computed again each time.
    for (failures, expected) in (1_u32..).zip([1_u64, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17]) {
        let work = shepherd.claim_one(&session, Process::AgentStart).await?;
        let backoff = BackoffPolicy { initial: Span::seconds(1), maximum: Span::minutes(5), exponent: 1.1 };
        work.fail(Vec::new(), "no route", Some(backoff)).await?;
        let snapshot = kit.bmdb.read_machine_snapshot(machine).await?;
        let fact = &snapshot.facts.backoffs[&Process::AgentStart];
        assert_eq!((fact.failures, fact.last_interval.as_secs()), (failures, expected));
        let wait = (fact.until - snapshot.now).to_std()?;
        assert!(wait <= fact.last_interval.mul_f64(1.1), "waits {wait:?}");
        let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
        if wait > Duration::from_millis(500) {
            match claimer.claim(std::slice::from_ref(&session)).await? {
                Claimed::Empty => {}
                // A slow host may be suspended past the deadline, by the database's clock.
                Claimed::Work(work) => {
                    let over: bool = sqlx::query_scalar("SELECT started_at >= $1 FROM work")
                        .bind(fact.until)
                        .fetch_one(&kit.pool)
                        .await?;
                    assert!(over, "claimed in its backoff: {work:?}");
                    drop(work);
                    shepherd.sessions.wait_until_drained().await;
                }
                other => panic!("claimed in its backoff: {other:?}"),
            }
        }
        kit.database.advance(Duration::from_secs(expected + expected / 5 + 1)).await?;
        if failures == 3 {
            let priority = kit.count("SELECT priority FROM machine_due WHERE lane = 'access'").await?;
            assert_eq!(priority, 2, "yields to others after three failures");
        }
        session = shepherd.session().await?;
        let work = shepherd.claim_one(&session, Process::AgentStart).await?;
        work.cancel("not now").await?;
        let kept =
            kit.bmdb.read_machine_snapshot(machine).await?.facts.backoffs[&Process::AgentStart].clone();
        assert_eq!(kept.failures, failures, "a cancel is no failure and no success");
    }
    shepherd.claim_one(&session, Process::AgentStart).await?.finish(Vec::new(), "done").await?;
    assert!(kit.bmdb.read_machine_snapshot(machine).await?.facts.backoffs.is_empty());
    assert_eq!(kit.sweep().await?, 0);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_fails_by_the_stored_policy_and_not_by_what_was_read_of_it_last() -> TestResult {
    let kit = Kit::new("stored_policy").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    kit.bmdb
        .change_policy("test", |policy| {
            let day = BackoffPolicy { initial: Span::hours(24), maximum: Span::hours(24), exponent: 1.0 };
            policy.backoff.insert(Process::AgentStart, day);
        })
        .await?;
    let session = shepherd.session().await?;
    shepherd.claim_one(&session, Process::AgentStart).await?.fail(Vec::new(), "no", None).await?;
    let fact = kit.bmdb.read_machine_snapshot(machine).await?.facts.backoffs[&Process::AgentStart].clone();
    assert_eq!(fact.last_interval, Duration::from_hours(24));
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_put_off_is_due_again_at_its_time_without_a_failure() -> TestResult {
    let kit = Kit::new("put_off").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    let until = kit.bmdb.read_machine_snapshot(machine).await?.now + TimeDelta::seconds(300);
    work.postpone(Vec::new(), until, "the brake is on").await?;
    let (reason, exact): (String, bool) =
        sqlx::query_as("SELECT reason, ready_at = $1 FROM machine_due WHERE lane = 'access'")
            .bind(until)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!((reason.as_str(), exact), ("the brake is on", true));
    let facts = kit.bmdb.read_machine_snapshot(machine).await?.facts;
    assert!(facts.postponements[&Process::AgentStart].decided_at.contains("tests/all/work.rs:"));
    assert!(facts.backoffs.is_empty());
    kit.database.advance(Duration::from_secs(301)).await?;
    let session = shepherd.session().await?;
    shepherd.claim_one(&session, Process::AgentStart).await?.finish(Vec::new(), "done").await?;
    assert!(kit.bmdb.read_machine_snapshot(machine).await?.facts.postponements.is_empty());
    assert_eq!(kit.ends(machine).await?, ["PutOff", "Finished"]);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_set_during_work_stops_it_with_the_reason() -> TestResult {
    let kit = Kit::new("hold_stops").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    work.outward_call_limit(Duration::ZERO)?;
    kit.change(machine, vec![hold("disk swap")]).await?;
    tokio::time::timeout(PATIENCE, work.stop().cancelled()).await?;
    assert_eq!(
        work.stop_reason(),
        Some("the machine is not due for AgentStart any more: held by kim: disk swap")
    );
    assert!(work.outward_call_limit(Duration::ZERO).is_err());
    drop(work);
    shepherd.sessions.wait_until_drained().await;
    assert_eq!(kit.ends(machine).await?, ["Cancelled"]);
    let claimed = shepherd.claimer(Process::AgentStart, "rack").claim(&[session]).await?;
    assert!(matches!(claimed, Claimed::Empty), "{claimed:?}");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_work_is_cancelled_before_drained_returns() -> TestResult {
    let kit = Kit::new("dropped").await?;
    kit.provided(20, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let mut sessions = Vec::new();
    for _ in 0..20 {
        sessions.push(shepherd.session().await?);
    }
    let claimed = shepherd.claimer(Process::AgentStart, "rack").claim(&sessions).await?;
    let Claimed::Work(work) = claimed else { panic!("{claimed:?}") };
    assert_eq!(work.len(), 20);
    drop(work);
    shepherd.sessions.wait_until_drained().await;
    assert_eq!(kit.count("SELECT count(*) FROM work").await?, 0);
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Cancelled'").await?, 20);
    for session in &sessions {
        shepherd.sessions.close(session, "done").await?;
    }
    assert_eq!(kit.count("SELECT count(*) FROM session WHERE closed_at IS NULL").await?, 0);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ending_that_the_database_refuses_is_given_up_and_the_machine_is_free() -> TestResult {
    let kit = Kit::new("refused_ending").await?;
    let machines = kit.provided(2, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    let machine = work.machine();
    // A key of the wrong length breaks a constraint, now and for ever.
    let agent = shepherd_bmdb::engine::fact_change::NewAgent {
        public_key: vec![1; 31],
        boot_id: None,
        version: "1".into(),
        supervision: "systemd".into(),
        fence: work.fence(),
    };
    let finish =
        tokio::time::timeout(PATIENCE, work.finish(vec![FactChange::AgentStarted(agent)], "done")).await?;
    assert!(matches!(finish, Err(BmdbError::Statement { .. })), "{finish:?}");
    shepherd.sessions.wait_until_drained().await;
    assert_eq!(kit.ends(machine).await?, ["Cancelled"]);

    // What a machine says may hold anything, and still must end its work with a backoff.
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    let machine = work.machine();
    assert!(machines.contains(&machine));
    tokio::time::timeout(PATIENCE, work.fail(Vec::new(), "garbage \0 from a console", None)).await??;
    assert_eq!(kit.ends(machine).await?.last().map(String::as_str), Some("Failed"));
    let cause =
        kit.bmdb.read_machine_snapshot(machine).await?.facts.backoffs[&Process::AgentStart].cause.clone();
    assert_eq!(cause, "garbage \u{fffd} from a console");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn priorities_share_by_weight_and_the_oldest_of_a_class_goes_first() -> TestResult {
    let kit = Kit::new("shares").await?;
    kit.provided(300, "rack").await?;
    sqlx::query(
        "UPDATE machine_due d SET priority = n % 3, ready_at = now() - n * INTERVAL '1 second'
         FROM (SELECT machine_id, row_number() OVER (ORDER BY machine_id) n FROM machine) m
         WHERE d.machine_id = m.machine_id AND lane = 'access'",
    )
    .execute(&kit.pool)
    .await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let mut sessions = Vec::new();
    for _ in 0..7 {
        sessions.push(shepherd.session().await?);
    }
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let mut taken = Vec::new();
    // 105 claims: five rounds of 16 + 4 + 1.
    for _ in 0..15 {
        let claimed = claimer.claim(&sessions).await?;
        let Claimed::Work(work) = claimed else { panic!("{claimed:?}") };
        assert_eq!(work.len(), 7);
        for item in work {
            taken.push(item.machine().0);
            item.postpone(
                Vec::new(),
                kit.bmdb.read_machine_snapshot(kit_machine(&taken)).await?.now + TimeDelta::hours(1),
                "later",
            )
            .await?;
        }
    }
    let mut shares = Vec::new();
    for priority in 0..3_i64 {
        let (count, oldest): (i64, bool) = sqlx::query_as(
            "WITH m AS (SELECT machine_id, row_number() OVER (ORDER BY machine_id) n FROM machine),
             c AS (SELECT machine_id, n, row_number() OVER (ORDER BY n DESC) AS place FROM m WHERE n % 3 = $1)
             SELECT count(*), coalesce(max(place), 0) = count(*) FROM c WHERE machine_id = ANY ($2)",
        )
        .bind(priority)
        .bind(&taken)
        .fetch_one(&kit.pool)
        .await?;
        assert!(oldest, "of priority {priority} not the oldest were taken");
        shares.push(count);
    }
    for (share, expected) in shares.iter().zip([80_i64, 20, 5]) {
        assert!((share - expected).abs() <= 2, "{shares:?} instead of 80, 20, 5");
    }
    until("nothing is held", async || Ok(kit.count("SELECT count(*) FROM work").await? == 0)).await?;
    Ok(shepherd.stop().await?)
}

fn kit_machine(taken: &[uuid::Uuid]) -> model::ids::MachineId {
    model::ids::MachineId(taken.last().copied().unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_tells_of_nothing_that_could_not_be_claimed() -> TestResult {
    let kit = Kit::new("probe").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let claimer = shepherd.claimer(Process::AgentStart, "rack");
    assert_eq!(claimer.probe().await?, NextDue::Never);
    kit.provided(20, "elsewhere").await?;
    assert_eq!(claimer.probe().await?, NextDue::Never, "only another shepherd's machines are due");
    let machine = kit.provided(1, "rack").await?[0];
    assert_eq!(claimer.probe().await?, NextDue::Now);
    let set = async |columns: &'static str| -> anyhow::Result<()> {
        let text = format!("UPDATE machine_due SET {columns} WHERE machine_id = $1 AND lane = 'access'");
        sqlx::query(sqlx::AssertSqlSafe(text)).bind(machine.0).execute(&kit.pool).await?;
        Ok(())
    };
    set("not_before = clock_timestamp() + INTERVAL '1 minute'").await?;
    assert_eq!(claimer.probe().await?, NextDue::Never, "it waits out the loss of a session");
    set("not_before = NULL, rules_version = 1000").await?;
    assert_eq!(claimer.probe().await?, NextDue::Never, "it is a newer release's");
    set("rules_version = 1, ready_at = clock_timestamp() + INTERVAL '1 minute'").await?;
    let next = claimer.probe().await?;
    let NextDue::In(wait) = next else { panic!("{next:?}") };
    assert!(wait > Duration::from_secs(20) && wait <= Duration::from_mins(1), "{wait:?}");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_of_work_announces_what_another_process_is_due_for_and_nothing_else() -> TestResult {
    let kit = Kit::new("announced").await?;
    if !kit.bmdb.dialect().notifies() {
        return Ok(());
    }
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let mut listener = PgListener::connect(kit.database.url()).await?;
    listener.listen("shepherd_due").await?;
    // Due again at once, for the same.
    let now = kit.bmdb.read_machine_snapshot(machine).await?.now;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    work.postpone(Vec::new(), now, "now").await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    work.finish(Vec::new(), "not done yet").await?;
    // From nothing to an agent's start, by what the provider says.
    sqlx::query("UPDATE machine_provided SET status = 'Provisioning'").execute(&kit.pool).await?;
    kit.sweep().await?;
    let work = shepherd.claim_one(&session, Process::Update).await?;
    let details = ProviderDetails {
        reservation: None,
        address: Some("192.0.2.1".into()),
        ssh_port: None,
        ssh_user: None,
        location: None,
        status: ProviderStatus::Running,
    };
    work.finish(vec![FactChange::ProviderPolled { details, unchanged: false }], "it runs").await?;
    sqlx::query("SELECT pg_notify('shepherd_due', 'the last one')").execute(&kit.pool).await?;
    let mut messages = Vec::new();
    loop {
        let text = tokio::time::timeout(PATIENCE, listener.recv()).await??.payload().to_owned();
        if text == "the last one" {
            break;
        }
        messages.push(text);
    }
    assert_eq!(messages, ["AgentStart"]);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_became_of_transactions_is_counted_by_what_they_were_for() -> TestResult {
    let kit = Kit::new("counted").await?;
    kit.provided(2, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    shepherd.claim_one(&session, Process::AgentStart).await?.finish(Vec::new(), "done").await?;
    let work = shepherd.claim_one(&session, Process::Update).await?;
    let metrics = Metrics::new();
    shepherd.bmdb.metrics().register(&metrics);
    let counted = |line: &str| -> anyhow::Result<u64> {
        let text = metrics.encode()?;
        let found = text.lines().find_map(|shown| shown.strip_prefix(line)?.trim().parse().ok());
        Ok(found.unwrap_or(0))
    };
    let of = |what: &str, result: &str| {
        counted(&format!("shepherd_bmdb_transactions_total{{operation=\"{what}\",result=\"{result}\"}}"))
    };
    assert_eq!((of("ending work", "done")?, of("ending work", "refused")?), (1, 0));
    assert!(of("claiming", "done")? >= 2);
    until("a renewal is counted", async || {
        Ok(counted("shepherd_session_renewals_total{result=\"renewed\"}")? > 0)
    })
    .await?;
    assert_eq!(counted("shepherd_sessions_lost_total")?, 0);
    // The session ended meanwhile: the end of its work rolls back, and is counted apart from failed work.
    kit.overdue(&session).await?;
    assert!(work.finish(Vec::new(), "too late").await.is_err());
    assert!(of("ending work", "refused")? > 0);
    assert_eq!((of("ending work", "done")?, of("ending work", "failed")?), (1, 0));
    assert_eq!(counted("shepherd_sessions_lost_total")?, 1);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looking_everywhere_rests_where_it_is_dear_and_still_finds_what_is_due() -> TestResult {
    let kit = Kit::new("rests").await?;
    let machines = kit.provided(2, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?.patient().await?;
    let session = shepherd.session().await?;
    let later = "UPDATE machine_due SET ready_at = now() + INTERVAL '1 hour', bucket = 0
                 WHERE machine_id = $1 AND lane = 'access'";
    sqlx::query(later).bind(machines[1].0).execute(&kit.pool).await?;
    let near = "UPDATE machine_due SET bucket = 0 WHERE machine_id = $1 AND lane = 'access'";
    sqlx::query(near).bind(machines[0].0).execute(&kit.pool).await?;

    // The first claim looks everywhere, and is made to take long.
    let mut by_hand = kit.connection().await?;
    let mut slow = by_hand.begin().await?;
    sqlx::raw_sql("LOCK TABLE machine_due IN ACCESS EXCLUSIVE MODE").execute(&mut *slow).await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let looked = Instant::now();
    let first = session.clone();
    let claim = tokio::spawn(async move {
        let claimed = claimer.claim(std::slice::from_ref(&first)).await;
        (claimer, claimed)
    });
    // After which a rest of five seconds follows, the longest.
    until("the claim has waited for longer than a ninth of that", async || {
        let long = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'worker' AND wait_event_type = 'Lock'
                      AND pg_catalog.clock_timestamp() - query_start > INTERVAL '600 ms'";
        Ok(kit.count(long).await? == 1)
    })
    .await?;
    slow.rollback().await?;
    let (mut claimer, claimed) = ended("the claim", claim).await?;
    let Claimed::Work(mut work) = claimed? else { panic!("the first machine is due") };
    let work = work.pop().context("no work")?;
    assert_eq!(work.machine(), machines[0]);
    work.finish(vec![needs_human("done")], "done").await?;

    // Due an hour before anything that was claimed: only a full scan finds it.
    let long_due = "UPDATE machine_due SET ready_at = now() - INTERVAL '1 hour' WHERE machine_id = $1 AND lane = 'access'";
    sqlx::query(long_due).bind(machines[1].0).execute(&kit.pool).await?;
    let claimed = claimer.claim(std::slice::from_ref(&session)).await?;
    let found = match claimed {
        Claimed::FullScanDeferred(rests) => {
            assert!(rests <= Duration::from_secs(5), "{rests:?}");
            surely(&mut claimer, &session).await?
        }
        // A slow host can take this long.
        found if looked.elapsed() >= Duration::from_secs(5) => found,
        other => panic!("it was looked everywhere: {other:?}"),
    };
    let Claimed::Work(work) = found else { panic!("it is never found") };
    assert_eq!(work[0].machine(), machines[1]);
    drop(work);
    shepherd.sessions.wait_until_drained().await;
    Ok(shepherd.stop().await?)
}

/// A loop whose steps take longer than the sessions of its process last has one of its own length: had the keeper
/// renewed it to theirs, it would begin nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_that_has_to_last_is_renewed_to_its_own_length() -> TestResult {
    let kit = Kit::new("lasting").await?;
    let shepherd = Shepherd::start(&kit, "lasting", SOON).await?;
    let session = shepherd.sessions.start_lasting_at_least("cluster", serde_json::json!({}), LONG).await?;
    let deadline =
        "SELECT (extract(epoch FROM deadline) * 1000)::INT8 FROM session WHERE component = 'cluster'";
    for _ in 0..2 {
        let before: i64 = sqlx::query_scalar(deadline).fetch_one(&kit.pool).await?;
        let renewed =
            async || Ok(sqlx::query_scalar::<_, i64>(deadline).fetch_one(&kit.pool).await? > before);
        until("it is renewed", renewed).await?;
        assert!(session.remaining() > LONG / 2, "{:?} of {LONG:?} are left", session.remaining());
        let left =
            "SELECT deadline > clock_timestamp() + interval_ms * INTERVAL '1 millisecond' / 2 FROM session
                    WHERE component = 'cluster' AND interval_ms = $1";
        let left: Option<bool> =
            sqlx::query_scalar(left).bind(i64::try_from(LONG.as_millis())?).fetch_optional(&kit.pool).await?;
        assert_eq!(left, Some(true), "what the database gives it");
    }
    assert!(session.loss_reason().is_none());
    Ok(shepherd.stop().await?)
}
