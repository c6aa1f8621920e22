//! Races about heartbeats: a locked row, and a machine that is found silent while it reports.

use std::sync::Arc;

use model::ids::MachineId;
use model::process::Process;
use model::schedule::RULES_VERSION;
use shepherd_bmdb::engine::fact_change::NewHeartbeat;
use shepherd_bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat};
use sqlx::Connection as _;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd, ended};

/// The rows of a group are locked without waiting for any of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_heartbeat_is_passed_over_by_a_group() -> TestResult {
    let kit = Kit::new("heartbeat_order").await?;
    let mut machines = kit.provided(20, "rack").await?;
    machines.sort();
    sqlx::raw_sql(
        "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
         SELECT machine_id, now(), decode(repeat('00', 32), 'hex'), 1 FROM machine;
         INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
         SELECT machine_id, now(), 'b', 'i', 1 FROM machine;
         UPDATE machine_due SET phase_index = 'Ready'",
    )
    .execute(&kit.pool)
    .await?;
    let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut writer = by_hand.begin().await?;
    sqlx::query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut *writer).await?;
    let lock = "SELECT at FROM machine_agent_heartbeat WHERE machine_id = $1 FOR UPDATE NOWAIT";
    sqlx::query(lock).bind(machines[0].0).execute(&mut *writer).await?;

    let statement = include_str!("../../../../../sql/heartbeat/lock_batch.sql");
    let arrived: Vec<uuid::Uuid> = machines.iter().rev().map(|machine| machine.0).collect();
    let bmdb = listener.bmdb.clone();
    let batch =
        tokio::spawn(async move { sqlx::query(statement).bind(arrived).fetch_all(bmdb.pool()).await });
    assert_eq!(ended("the batch", batch).await??.len(), 19);
    Ok(listener.stop().await?)
}

fn second_heartbeat(machine: MachineId) -> Arc<[Arc<ReceivedHeartbeat>]> {
    let beat =
        NewHeartbeat { boot_id: "b".into(), incarnation: "i".into(), sequence: 2, version: "1".into() };
    let (hardware, installation) = (None, None);
    let heartbeat = ReceivedHeartbeat {
        machine,
        public_key: [0; 32],
        beat,
        hardware,
        installation,
        cluster: None,
        release: None,
        access_fence: 0,
    };
    Arc::from([Arc::new(heartbeat)])
}

async fn phase_and_timer(kit: &Kit) -> anyhow::Result<(String, bool)> {
    let text = "SELECT phase_index, timer FROM machine_due WHERE lane = 'access'";
    Ok(sqlx::query_as(text).fetch_one(&kit.pool).await?)
}

/// A heartbeat that is stored but not committed is not yet visible in any facts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_is_not_found_silent_past_a_heartbeat_that_is_being_stored() -> TestResult {
    for who in ["timer", "sweeper"] {
        let kit = Kit::new("heartbeat_first").await?;
        let machine = kit.provided(1, "rack").await?[0];
        kit.fall_silent().await?;
        let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
        let finder = Shepherd::start(&kit, "finder", LONG).await?.patient().await?;
        let mut by_hand = kit.connection().await?;
        let mut slow = by_hand.begin().await?;
        sqlx::query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut *slow).await?;
        // The last thing that a group touches.
        sqlx::query("SELECT 1 FROM fleet_listening FOR UPDATE").execute(&mut *slow).await?;
        let bmdb = listener.bmdb.clone();
        let group =
            tokio::spawn(async move { bmdb.store_heartbeat_group(3, second_heartbeat(machine)).await });
        kit.until_blocked("listener", 1).await?;

        let (claimer, bmdb) = (finder.claimer(Process::Recovery, "rack"), finder.bmdb.clone());
        let find = tokio::spawn(async move {
            match who {
                "timer" => claimer.rearm_timers().await.map(|(_, fired)| fired),
                _ => bmdb.sweep_page(MachineId(uuid::Uuid::nil()), 10).await.map(|_| 0),
            }
        });
        let find = if who == "timer" {
            assert_eq!(ended("the timer", find).await??, 0);
            None
        } else {
            kit.until_blocked("finder", 1).await?;
            Some(find)
        };
        slow.commit().await?;
        assert_eq!(ended("the group", group).await??.len(), 1, "{who}: no plain heartbeat");
        if let Some(find) = find {
            assert_eq!(ended("the finder", find).await??, 0, "{who}");
        }
        assert_eq!(phase_and_timer(&kit).await?, ("Ready".to_owned(), true), "{who}");
        assert_eq!(kit.sweep().await?, 0, "{who}: drift");
        finder.stop().await?;
        listener.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_that_comes_as_its_machine_is_found_silent_is_no_plain_one() -> TestResult {
    let kit = Kit::new("silence_first").await?;
    let machine = kit.provided(1, "rack").await?[0];
    kit.fall_silent().await?;
    let rearm = include_str!("../../../../../sql/claim/rearm_timers.sql");
    let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut timer = by_hand.begin().await?;
    let (_, fired): (i64, i64) =
        sqlx::query_as(rearm).bind(i64::from(RULES_VERSION)).fetch_one(&mut *timer).await?;
    assert_eq!(fired, 1);
    let bmdb = listener.bmdb.clone();
    let group = tokio::spawn(async move { bmdb.store_heartbeat_group(3, second_heartbeat(machine)).await });
    let stored = ended("the group", group).await??;
    timer.commit().await?;
    assert!(stored.is_empty(), "stored as if nothing had happened, and its machine stays silent");
    let judged = kit.bmdb.store_heartbeat(second_heartbeat(machine)[0].clone()).await?;
    assert!(matches!(judged, HeartbeatOutcome::Stored(_)), "{judged:?}");
    assert_eq!(phase_and_timer(&kit).await?, ("Ready".to_owned(), true));
    Ok(listener.stop().await?)
}
