//! What a machine has seen and this database never gave holds every order to it back, however often it is
//! tried, until a restoration is declared.

use model::policy::DisruptionKind;
use model::process::Process;
use model::time::Span;
use model::why::explain_machine;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::intent::{DisruptionRequest, Permission};
use shepherd_bmdb::engine::work::Work;
use shepherd_bmdb::fleet::retention::RetainedKind;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd};

const NEWER_FENCE_EVENT_COUNT: &str = "SELECT count(*) FROM history WHERE event = 'NewerFence'";

async fn ask_to_restart_the_agent(work: &Work) -> anyhow::Result<Permission> {
    let step = DisruptionRequest {
        rung: 0,
        disruption: DisruptionKind::RestartAgent,
        attempt: 1,
        deadline: Span::minutes(1),
        facts_read_at: work.snapshot().await?.now,
        brake: None,
        provider: "rack".to_owned(),
    };
    Ok(work.begin_disruption(step).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_fence_holds_orders_back_after_any_number_of_tries_until_it_is_declared() -> TestResult {
    let kit = Kit::new("newer_fence_tries").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "restored", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    assert_eq!(work.unknown_fence().await?, None);
    // Even if the fence is its own: the machine received it from another session.
    let seen = work.fence();
    work.report_rejected_fence(seen).await?;
    work.report_rejected_fence(seen + 3).await?;
    assert_eq!(kit.count(NEWER_FENCE_EVENT_COUNT).await?, 1, "recorded once until it is declared");
    work.cancel("it was refused").await?;
    for _ in 0..8 {
        let work = shepherd.claim_one(&session, Process::AgentStart).await?;
        let newer = work.unknown_fence().await?;
        assert_eq!(newer.map(|newer| newer.fence), Some(seen), "forgotten under fence {}", work.fence());
        let permission = ask_to_restart_the_agent(&work).await?;
        let Permission::Denied(refusal) = permission else { panic!("granted under fence {}", work.fence()) };
        assert!(refusal.reason.contains("declare restored"), "{}", refusal.reason);
        work.cancel("tried again").await?;
    }
    let why = explain_machine(&kit.bmdb.machine_view(machine).await?);
    assert!(why.notes.iter().any(|note| note.contains("has seen fence")), "{:?}", why.notes);
    assert!(why.advice.iter().any(|advice| advice.command.contains("declare restored")), "{:?}", why.advice);

    // It is kept for longer than the history is.
    kit.bmdb.change_policy("test", |policy| policy.history_retention = Span::hours(24)).await?;
    sqlx::query("UPDATE history SET at = at - INTERVAL '2 days'").execute(&kit.pool).await?;
    while kit.bmdb.delete_expired(RetainedKind::History, 1_000).await? > 0 {}
    assert_eq!(
        (kit.count(NEWER_FENCE_EVENT_COUNT).await?, kit.count("SELECT count(*) FROM history").await?),
        (1, 1)
    );

    // What was under way of an update may have been ended since the backup.
    for statement in [
        "INSERT INTO roll_out VALUES ('u1', decode(repeat('ab', 32), 'hex'), 'one', '', 1, 60, clock_timestamp(), 'kim',
             'a try', NULL, NULL, NULL)",
        "INSERT INTO release_order SELECT machine_id, 1, decode(repeat('ab', 32), 'hex'), 60, clock_timestamp(), FALSE
         FROM machine",
    ] {
        sqlx::query(statement).execute(&kit.pool).await?;
    }
    let order = Order {
        actor: Actor { name: "the test".to_owned(), credential: None },
        rpc: "shepherd.direct/DeclareRestored".to_owned(),
        target: "the BMDB".to_owned(),
        reason: "the test".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    };
    kit.bmdb.declare_restored(order, "the test").await?;
    let stands =
        "SELECT count(*) FROM roll_out WHERE paused LIKE '%restored from a backup' AND ended_at IS NULL";
    assert_eq!(kit.count(stands).await?, 1);
    assert_eq!(kit.count("SELECT count(*) FROM release_order WHERE NOT withdrawn").await?, 0);
    assert_eq!(
        kit.count("SELECT count(*) FROM audit WHERE rpc = 'shepherd.direct/DeclareRestored'").await?,
        1
    );
    let after = Shepherd::start(&kit, "declared", LONG).await?;
    let session = after.session().await?;
    let work = after.claim_one(&session, Process::AgentStart).await?;
    assert_eq!(work.unknown_fence().await?, None, "declared");
    assert!(matches!(ask_to_restart_the_agent(&work).await?, Permission::Granted { .. }));
    let why = explain_machine(&kit.bmdb.machine_view(machine).await?);
    assert!(!why.notes.iter().any(|note| note.contains("has seen fence")), "{:?}", why.notes);
    kit.bmdb.delete_expired(RetainedKind::History, 1_000).await?;
    assert_eq!(kit.count(NEWER_FENCE_EVENT_COUNT).await?, 0, "it proves nothing any more, and is kept");
    work.cancel("the test is over").await?;
    after.stop().await?;
    Ok(shepherd.stop().await?)
}

/// Who was frozen for longer than his lease is refused for what somebody else was given since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lost_the_lease_takes_the_next_holder_for_no_stranger() -> TestResult {
    let kit = Kit::new("newer_fence_late").await?;
    kit.provided(1, "rack").await?;
    let (late, next) =
        (Shepherd::start(&kit, "late", LONG).await?, Shepherd::start(&kit, "next", LONG).await?);
    let session = late.session().await?;
    let lost = late.claim_one(&session, Process::AgentStart).await?;
    kit.overdue(&session).await?;
    kit.bmdb.reap().await?;
    sqlx::query("UPDATE machine_due SET not_before = NULL").execute(&kit.pool).await?;
    let session = next.session().await?;
    let work = next.claim_one(&session, Process::AgentStart).await?;
    let result = lost.report_rejected_fence(work.fence()).await;
    assert!(matches!(result, Err(BmdbError::LeaseLost | BmdbError::SessionEnded)), "{result:?}");
    assert_eq!((kit.count(NEWER_FENCE_EVENT_COUNT).await?, work.unknown_fence().await?), (0, None));
    work.finish(Vec::new(), "done").await?;
    drop(lost);
    late.stop().await?;
    Ok(next.stop().await?)
}
