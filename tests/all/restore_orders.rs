//! An order to bring a cluster back is taken when its control plane is known to be lost, and replaces the one before it.

use anyhow::{Result, bail};
use shepherd::bmdb::audit::{Actor, Order, request_digest};
use shepherd::bmdb::cluster_restore::Restore;
use shepherd::bmdb::error::BmdbError;
use uuid::Uuid;

use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;

const FIRST: &str = "00000000-0000-0000-0000-000000000001";
const SECOND: &str = "00000000-0000-0000-0000-000000000002";

/// What is said to the order; where it is refused, why, for programs.
async fn ordered(kit: &Kit, restore: Restore) -> Result<Result<String, (&'static str, String)>> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/Restore".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "two of three burnt".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request: request_digest(b"restore"),
    };
    match kit.bmdb.restore_cluster(order, "ams".to_owned(), restore).await {
        Ok(carried) => Ok(Ok(carried.done.said)),
        Err(BmdbError::OrderRefused { reason, said }) => Ok(Err((reason, said))),
        Err(other) => bail!(other),
    }
}

/// The last that shepherds know of its control plane: how many seconds ago they looked, it answered, and fell silent.
async fn known(kit: &Kit, looked: i32, seen: i32, away: Option<i32>) -> Result<()> {
    sqlx::query(
        "UPDATE cluster SET voters = 3, voters_reached = 3,
             looked_at = clock_timestamp() - make_interval(secs => $1),
             seen_at = clock_timestamp() - make_interval(secs => $2),
             away_since = clock_timestamp() - make_interval(secs => $3)",
    )
    .bind(f64::from(looked))
    .bind(f64::from(seen))
    .bind(away.map(f64::from))
    .execute(&kit.pool)
    .await?;
    Ok(())
}

/// A cluster with two snapshots, and a machine that is a worker of it.
async fn world(name: &str) -> Result<(Kit, Uuid)> {
    let kit = Kit::new(name).await?;
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, waits, settled, founded_at, ca_certificate, curators)
         VALUES (gen_random_uuid(), 'ams', 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp(), 'ca', '[]')",
    )
    .execute(&kit.pool)
    .await?;
    for (id, hours) in [(FIRST, 2), (SECOND, 1)] {
        sqlx::query(
            "INSERT INTO cluster_snapshot
             SELECT $1::UUID, cluster_id, clock_timestamp() - make_interval(hours => $2), 'first', 7, 0, 10, 5, 3, '[]',
                 decode(repeat('cd', 32), 'hex') FROM cluster",
        )
        .bind(id)
        .bind(hours)
        .execute(&kit.pool)
        .await?;
    }
    let worker = kit.provided(1, "rack").await?[0].0;
    sqlx::query(
        "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
         SELECT $1, cluster_id, 'worker', clock_timestamp() FROM cluster",
    )
    .bind(worker)
    .execute(&kit.pool)
    .await?;
    Ok((kit, worker))
}

/// From which snapshot it is being restored; none when it is not.
async fn restored_from(kit: &Kit) -> Result<Option<String>> {
    Ok(sqlx::query_scalar("SELECT restoring_from::TEXT FROM cluster").fetch_one(&kit.pool).await?)
}

#[tokio::test]
async fn cluster_is_restored_only_when_its_control_plane_is_known_to_be_lost() -> TestResult {
    let (kit, _) = world("restore_orders_lost").await?;
    let newest = Restore::default();
    for (what, (looked, seen, away), expected) in [
        ("it answered a moment ago", (1, 1, None), "QUORUM_ANSWERS"),
        ("nobody asked it for an hour", (3_600, 3_600, None), "NOBODY_LOOKED"),
        ("it was last asked in vain, an hour ago", (3_600, 4_000, Some(3_900)), "NOBODY_LOOKED"),
        ("it is silent for a moment", (1, 90, Some(20)), "SILENT_TOO_SHORTLY"),
    ] {
        known(&kit, looked, seen, away).await?;
        match ordered(&kit, newest.clone()).await? {
            Err((reason, said)) => {
                assert_eq!(reason, expected, "{what}: {said}");
                assert!(said.starts_with("the cluster ams ") && said.contains("--bypass_quorum"), "{said}");
            }
            Ok(said) => return Err(anyhow::anyhow!("{what}, and it {said}").into()),
        }
        assert_eq!(restored_from(&kit).await?, None, "{what}");
    }
    known(&kit, 1, 300, Some(200)).await?;
    let said = ordered(&kit, newest).await?;
    assert!(said.is_ok(), "asked in vain for minutes: {said:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(SECOND), "the newest snapshot");
    Ok(())
}

#[tokio::test]
async fn another_order_takes_the_place_of_the_one_that_is_being_carried_out() -> TestResult {
    let (kit, worker) = world("restore_orders_anew").await?;
    known(&kit, 1, 1, None).await?;
    let whatever = Restore { bypass_quorum: true, ..Restore::default() };
    assert!(ordered(&kit, whatever.clone()).await?.is_ok());
    let again = ordered(&kit, whatever).await?;
    assert!(again.as_ref().is_ok_and(|said| said.contains("just so already, as kim ordered")), "{again:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(SECOND));

    // It had the mistake in it. What is being restored needs no proof any more that it is lost.
    let older = Restore { snapshot: Some(FIRST.to_owned()), ..Restore::default() };
    let other = ordered(&kit, older.clone()).await?;
    assert!(other.as_ref().is_ok_and(|said| !said.contains("already")), "{other:?}");
    assert_eq!(
        restored_from(&kit).await?.as_deref(),
        Some(FIRST),
        "it is restored from the snapshot of before"
    );

    // A machine that has work to do in the cluster stays, and one that nobody made well is not taken.
    let onto = |machine: Uuid| Restore { onto: Some(machine.to_string()), ..older.clone() };
    let spare = kit.provided(1, "rack").await?[0].0;
    for (machine, expected) in
        [(worker, "is a worker of the cluster"), (spare, "it must be Ready or Installed")]
    {
        let refused = ordered(&kit, onto(machine)).await?;
        let Err((reason, said)) = refused else {
            return Err(anyhow::anyhow!("{machine}: {refused:?}").into());
        };
        assert_eq!(reason, "MACHINE_IN_USE", "{said}");
        assert!(said.contains(expected) && said.ends_with("name another machine with --onto"), "{said}");
    }
    let none = ordered(&kit, Restore { snapshot: Some(Uuid::nil().to_string()), ..older }).await?;
    assert!(none.is_err(), "{none:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(FIRST));
    Ok(())
}
