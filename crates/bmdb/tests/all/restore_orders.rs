//! Orders to restore a cluster: accepted when its control plane is known to be lost, and replace the one before.

use anyhow::{Context as _, Result, bail};
use prost::Message as _;
use proto::curator::v1 as wire;
use shepherd_bmdb::cluster::restore::RestoreRequest;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

const FIRST: &str = "00000000-0000-0000-0000-000000000001";
const SECOND: &str = "00000000-0000-0000-0000-000000000002";

/// The message of the order; if it is rejected, the reason for programs and the text.
async fn ordered(kit: &Kit, restore: RestoreRequest) -> Result<Result<String, (&'static str, String)>> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/Restore".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "two of three burnt".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(b"restore"),
    };
    match kit.bmdb.restore_cluster(order, "ams".to_owned(), restore).await {
        Ok(carried) => Ok(Ok(carried.outcome.message)),
        Err(BmdbError::OrderRejected { reason, message: text }) => Ok(Err((reason, text))),
        Err(other) => bail!(other),
    }
}

/// Stores when the control plane was last looked at, answered and went silent, in seconds ago.
async fn record_observation(kit: &Kit, looked: i32, seen: i32, away: Option<i32>) -> Result<()> {
    sqlx::query(
        "UPDATE cluster SET voters = 3, voters_reached = 3,
             polled_at = clock_timestamp() - make_interval(secs => $1),
             observed_at = clock_timestamp() - make_interval(secs => $2),
             unreachable_since = clock_timestamp() - make_interval(secs => $3)",
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
    kit.founded_cluster(3, 1).await?;
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
    let newest = RestoreRequest::default();
    for (what, (looked, seen, away), expected) in [
        ("it answered a moment ago", (1, 1, None), "QUORUM_ANSWERS"),
        ("no shepherd checked it for an hour", (3_600, 3_600, None), "NOT_OBSERVED"),
        ("it did not answer the last check, an hour ago", (3_600, 4_000, Some(3_900)), "NOT_OBSERVED"),
        ("it is silent for a moment", (1, 90, Some(20)), "SILENCE_TOO_SHORT"),
    ] {
        record_observation(&kit, looked, seen, away).await?;
        match ordered(&kit, newest.clone()).await? {
            Err((reason, text)) => {
                assert_eq!(reason, expected, "{what}: {text}");
                assert!(text.starts_with("the cluster ams ") && text.contains("--bypass-quorum"), "{text}");
            }
            Ok(text) => return Err(anyhow::anyhow!("{what}, and it {text}").into()),
        }
        assert_eq!(restored_from(&kit).await?, None, "{what}");
    }
    record_observation(&kit, 1, 300, Some(200)).await?;
    let result = ordered(&kit, newest).await?;
    assert!(result.is_ok(), "it has not answered for minutes: {result:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(SECOND), "the newest snapshot");
    Ok(())
}

/// The newest statement is by this authority, which replaced another one.
async fn record_statement(kit: &Kit, authority: &[u8]) -> Result<()> {
    let stated = wire::Statement { authorities: vec![authority.to_vec()], ..wire::Statement::default() };
    let signed = wire::SignedStatement {
        statement: stated.encode_to_vec(),
        successors: vec![b"from another one".to_vec()],
        ..wire::SignedStatement::default()
    };
    sqlx::query("UPDATE cluster SET statement = $1, statement_epoch = 0, statement_number = 7")
        .bind(signed.encode_to_vec())
        .execute(&kit.pool)
        .await?;
    Ok(())
}

#[tokio::test]
async fn cluster_is_not_restored_with_an_authority_that_was_replaced() -> TestResult {
    let (kit, _) = world("restore_orders_authority").await?;
    record_statement(&kit, b"the next one").await?;
    let digest = ring::digest::digest(&ring::digest::SHA256, b"the next one");
    sqlx::query("UPDATE cluster_snapshot SET authority = $2 WHERE snapshot_id = $1::UUID")
        .bind(FIRST)
        .bind(digest.as_ref())
        .execute(&kit.pool)
        .await?;
    let newest = RestoreRequest { bypass_quorum: true, ..RestoreRequest::default() };
    let refused = ordered(&kit, newest.clone()).await?;
    let Err((reason, text)) = refused else { return Err(anyhow::anyhow!("{refused:?}").into()) };
    assert_eq!(reason, "FORMER_AUTHORITY", "{text}");
    assert!(text.contains("nodes refuse what it signs") && text.contains("cluster snapshots ams"), "{text}");
    assert_eq!(restored_from(&kit).await?, None);
    let later = RestoreRequest { snapshot: Some(FIRST.to_owned()), ..newest };
    assert!(ordered(&kit, later).await?.is_ok(), "that one has the authority that signs");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(FIRST));
    Ok(())
}

#[tokio::test]
async fn kubernetes_objects_are_lost_only_with_the_words_for_that() -> TestResult {
    let (kit, _) = world("restore_orders_kubernetes").await?;
    record_observation(&kit, 1, 300, Some(200)).await?;
    kit.request_kubernetes("1.30.1").await?;
    let with = |words: &str| RestoreRequest { confirmation: words.to_owned(), ..RestoreRequest::default() };
    for words in ["", "the authority of ams is compromised"] {
        let refused = ordered(&kit, with(words)).await?;
        let Err((reason, text)) = refused else { return Err(anyhow::anyhow!("{refused:?}").into()) };
        assert_eq!(reason, "CONFIRMATION_REQUIRED", "{text}");
        assert!(text.starts_with("the cluster ams is not restored: ") && text.contains("Secrets"), "{text}");
        assert_eq!(restored_from(&kit).await?, None);
    }
    let right = with("the Kubernetes objects of ams are lost");
    let restored = ordered(&kit, right).await?;
    assert!(restored.as_ref().is_ok_and(|text| text.contains("every Kubernetes object")), "{restored:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(SECOND));

    // The objects are still lost if another order takes the place of this one, but not if Kubernetes is being removed.
    let older = RestoreRequest { snapshot: Some(FIRST.to_owned()), ..RestoreRequest::default() };
    let refused = ordered(&kit, older.clone()).await?;
    assert!(refused.as_ref().is_err_and(|(reason, _)| *reason == "CONFIRMATION_REQUIRED"), "{refused:?}");
    sqlx::query("UPDATE cluster_kubernetes SET removing_by = 'kim'").execute(&kit.pool).await?;
    let restored = ordered(&kit, older).await?;
    assert!(restored.as_ref().is_ok_and(|text| !text.contains("Kubernetes")), "{restored:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(FIRST));
    Ok(())
}

/// Gives the older snapshot an image of etcd 3.6.1.
async fn add_image(kit: &Kit) -> Result<()> {
    sqlx::query(
        "INSERT INTO cluster_image
         SELECT gen_random_uuid(), cluster_id, $1::UUID, clock_timestamp(), FALSE, clock_timestamp(), 3, 9,
             decode(repeat('ef', 32), 'hex'), 7, '3.6.1' FROM cluster",
    )
    .bind(FIRST)
    .execute(&kit.pool)
    .await?;
    Ok(())
}

/// Records the programs that a machine reports.
async fn report_programs(kit: &Kit, machine: Uuid, etcd: &str, etcdutl: Option<&str>) -> Result<()> {
    sqlx::query(
        "INSERT INTO machine_cluster_report (machine_id, generation, epoch, reported_at, etcd_version, etcdutl_version)
         VALUES ($1, 0, 0, clock_timestamp(), $2, $3)
         ON CONFLICT (machine_id) DO UPDATE SET etcd_version = $2, etcdutl_version = $3",
    )
    .bind(machine)
    .bind(etcd)
    .bind(etcdutl)
    .execute(&kit.pool)
    .await?;
    Ok(())
}

#[tokio::test]
async fn kubernetes_objects_come_back_if_a_machine_can_restore_their_image() -> TestResult {
    let (kit, _) = world("restore_orders_image").await?;
    record_observation(&kit, 1, 300, Some(200)).await?;
    kit.request_kubernetes("1.30.1").await?;
    add_image(&kit).await?;
    let machine = kit.control_plane(1).await?[0].0;
    sqlx::query("UPDATE machine_due SET phase_index = 'Ready' WHERE machine_id = $1")
        .bind(machine)
        .execute(&kit.pool)
        .await?;
    for (etcd, etcdutl, expected) in [
        ("3.6.1", None, "has etcd 3.6.1 and no etcdutl"),
        ("3.6.1", Some("3.5.21"), "has etcd 3.6.1 and etcdutl 3.5.21"),
        ("3.4.30", None, "has etcd 3.4.30, for which no etcdutl restores an image"),
    ] {
        report_programs(&kit, machine, etcd, etcdutl).await?;
        let refused = ordered(&kit, RestoreRequest::default()).await?;
        let Err((reason, text)) = refused else { return Err(anyhow::anyhow!("{refused:?}").into()) };
        assert_eq!(reason, "NO_RESTORE_PROGRAM", "{text}");
        assert!(text.contains(expected) && text.contains("--without-kubernetes"), "{text}");
        assert_eq!(restored_from(&kit).await?, None, "the old control plane leaves for nothing");
    }
    // Without the objects it is restored by any machine, once their loss is confirmed.
    let without = RestoreRequest { without_kubernetes: true, ..RestoreRequest::default() };
    let refused = ordered(&kit, without).await?;
    assert!(refused.as_ref().is_err_and(|(reason, _)| *reason == "CONFIRMATION_REQUIRED"), "{refused:?}");

    report_programs(&kit, machine, "3.6.1", Some("3.6.4")).await?;
    let restored = ordered(&kit, RestoreRequest::default()).await?;
    assert!(restored.as_ref().is_ok_and(|text| text.contains("objects come back")), "{restored:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(FIRST), "the newest one with the objects");
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let image = found.cluster.restoring.and_then(|restoring| restoring.image).context("no image")?;
    assert_eq!((image.digest, image.etcd_version.as_str()), (Some([0xef; 32]), "3.6.1"));

    // Only the machine that restores the cluster gets it.
    let given = |machine| kit.bmdb.image_to_restore(machine, [0xef; 32]);
    let machine = model::ids::MachineId(machine);
    assert_eq!(given(machine).await?, None, "it has no order yet");
    sqlx::query(
        "INSERT INTO cluster_order (machine_id, generation, what, sealed, ordered_at)
         VALUES ($1, 1, 'found', 'sealed', clock_timestamp() + INTERVAL '1 second')",
    )
    .bind(machine.0)
    .execute(&kit.pool)
    .await?;
    let image = given(machine).await?.context("no image for the machine that restores it")?;
    assert_eq!((image.parts, image.bytes), (3, 9));
    assert_eq!(image.sealed_order, b"sealed");
    assert_eq!(given(model::ids::MachineId(Uuid::nil())).await?, None);
    for (cluster, is_given) in [(Uuid::nil(), false), (image.cluster, true)] {
        sqlx::query("UPDATE cluster_image SET cluster_id = $1").bind(cluster).execute(&kit.pool).await?;
        assert_eq!(given(machine).await?.is_some(), is_given, "an image of the cluster {cluster}");
    }
    sqlx::query("UPDATE cluster SET restoring_with_image = FALSE").execute(&kit.pool).await?;
    assert_eq!(given(machine).await?, None, "the objects are not to be restored");
    Ok(())
}

#[tokio::test]
async fn another_order_takes_the_place_of_the_one_that_is_being_carried_out() -> TestResult {
    let (kit, worker) = world("restore_orders_again").await?;
    record_observation(&kit, 1, 1, None).await?;
    let whatever = RestoreRequest { bypass_quorum: true, ..RestoreRequest::default() };
    assert!(ordered(&kit, whatever.clone()).await?.is_ok());
    let again = ordered(&kit, whatever).await?;
    assert!(
        again.as_ref().is_ok_and(|text| text.contains("in exactly this way, as kim ordered")),
        "{again:?}"
    );
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(SECOND));

    // That snapshot contained the mistake. While it is being restored, no proof of the loss is needed.
    let older = RestoreRequest { snapshot: Some(FIRST.to_owned()), ..RestoreRequest::default() };
    let other = ordered(&kit, older.clone()).await?;
    assert!(other.as_ref().is_ok_and(|text| !text.contains("already")), "{other:?}");
    assert_eq!(
        restored_from(&kit).await?.as_deref(),
        Some(FIRST),
        "it is restored from the snapshot of before"
    );

    // A machine that has work to do in the cluster stays, and one that nobody made well is not taken.
    let onto = |machine: Uuid| RestoreRequest { target_machine: Some(machine.to_string()), ..older.clone() };
    let spare = kit.provided(1, "rack").await?[0].0;
    for (machine, expected) in
        [(worker, "is a worker of the cluster"), (spare, "it must be Ready or Installed")]
    {
        let refused = ordered(&kit, onto(machine)).await?;
        let Err((reason, text)) = refused else {
            return Err(anyhow::anyhow!("{machine}: {refused:?}").into());
        };
        assert_eq!(reason, "MACHINE_IN_USE", "{text}");
        assert!(
            text.contains(expected) && text.ends_with("name another machine with --target-machine"),
            "{text}"
        );
    }
    let none = ordered(&kit, RestoreRequest { snapshot: Some(Uuid::nil().to_string()), ..older }).await?;
    assert!(none.is_err(), "{none:?}");
    assert_eq!(restored_from(&kit).await?.as_deref(), Some(FIRST));
    Ok(())
}
