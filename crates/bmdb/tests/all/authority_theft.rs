//! The authority that replaces a stolen one: made once, and each step begins after the one before it.

use anyhow::{Context as _, Result};
use model::cluster::authority_theft::{AuthorityStep, AuthorityTheft, TheftStage};
use model::cluster::state::MembershipOrder;
use model::ids::MachineId;
use shepherd_bmdb::cluster::statement::StoredStatement;
use shepherd_bmdb::cluster::transitions::LEASE_KIND;
use shepherd_bmdb::engine::named_lease::NamedLease;
use shepherd_bmdb::engine::session::Session;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd};

/// A founded cluster with one machine and an authority to replace after a theft.
async fn world(name: &str) -> Result<(Kit, Uuid, MachineId)> {
    let kit = Kit::new(name).await?;
    let cluster = kit.founded_cluster(1, 0).await?;
    sqlx::query(
        "UPDATE cluster SET ca_certificate = 'stolen', epoch = 900, curators = '[\"192.0.2.66:7835\"]',
             authority_rotation = 'compromised', authority_rotation_ordered_at = clock_timestamp(),
             authority_rotation_ordered_by = 'kim'",
    )
    .execute(&kit.pool)
    .await?;
    let machine = kit.control_plane(1).await?[0];
    Ok((kit, cluster, machine))
}

async fn lease_of(shepherd: &Shepherd, cluster: Uuid) -> Result<(Session, NamedLease)> {
    let session = shepherd.session().await?;
    let lease = shepherd.bmdb.acquire_named_lease(&session, LEASE_KIND, &cluster.to_string()).await?;
    Ok((session, lease.context("free")?))
}

/// The order as a shepherd reads it.
async fn theft(kit: &Kit) -> Result<AuthorityTheft> {
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    found.cluster.authority_theft.context("no order")
}

/// The step that is under way, and the authority that is made.
async fn step(kit: &Kit) -> Result<Option<(AuthorityStep, Vec<u8>)>> {
    let stage = theft(kit).await?.stage;
    Ok(stage.map(|TheftStage { certificate, step, .. }| (step, certificate)))
}

#[tokio::test]
async fn authority_is_made_once_and_no_step_is_left_out_or_repeated() -> TestResult {
    use AuthorityStep::{Accept, Close, Follow, Install, Reject, Show};
    let (kit, cluster, machine) = world("authority_theft_steps").await?;
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let (_session, lease) = lease_of(&shepherd, cluster).await?;
    let bmdb = &shepherd.bmdb;
    assert_eq!((theft(&kit).await?.ordered_by.as_str(), step(&kit).await?), ("kim", None));
    bmdb.store_next_authority(&lease, cluster, b"next", b"sealed").await?;
    // A shepherd that died before it read that back makes another one.
    bmdb.store_next_authority(&lease, cluster, b"another", b"sealed, too").await?;
    let at = |step: AuthorityStep| Some((step, b"next".to_vec()));
    assert_eq!(step(&kit).await?, at(Accept));
    assert_eq!(bmdb.sealed_next_authority(cluster).await?.as_deref(), Some(&b"sealed"[..]));

    bmdb.send_next_authority(&lease, machine, ("ams", Accept), b"an order".to_vec()).await?;
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let order = found.machines[0].member.last_order.context("no order")?;
    assert_eq!(order.order, MembershipOrder::Join);
    assert!(theft(&kit).await?.stage.is_some_and(|stage| stage.since < order.sent_at));

    for (next, reached) in
        [(Reject, Accept), (Show, Show), (Show, Show), (Reject, Reject), (Close, Close), (Install, Install)]
    {
        bmdb.begin_authority_step(&lease, cluster, next).await?;
        assert_eq!(step(&kit).await?, at(reached), "{next}");
    }
    let statement = StoredStatement { encoded: b"of the thief".to_vec(), order: (900, 7) };
    bmdb.raise_cluster_statement(cluster, b"stolen".to_vec(), statement.clone()).await?;
    bmdb.end_authority_theft(&lease, cluster).await?;
    assert_eq!(step(&kit).await?, at(Install), "it ends after the last step alone");

    let leaving = kit.control_plane(1).await?[0];
    bmdb.issue_cluster_order(&lease, leaving, (MembershipOrder::Leave, "ams"), b"to leave".to_vec()).await?;
    let sealed = "SELECT count(*) FROM cluster_order WHERE sealed IS NOT NULL";
    assert_eq!(kit.count(sealed).await?, 2);
    // It has followed by an order of before, and this one was sent again meanwhile.
    sqlx::query(
        "INSERT INTO machine_cluster_report (machine_id, generation, reported_at)
         SELECT machine_id, generation - 1, clock_timestamp() FROM cluster_order",
    )
    .execute(&kit.pool)
    .await?;
    let curators = ["10.0.0.1:7835".to_owned()];
    bmdb.begin_authority_follow(&lease, cluster, (&curators, 2)).await?;
    let by_leave = "SELECT count(*) FROM cluster_order WHERE sealed IS NOT NULL AND what = 'leave'";
    assert_eq!(kit.count(sealed).await?, 1, "an order has the key of the authority");
    assert_eq!(kit.count(by_leave).await?, 1, "a machine that has to leave gets no order");
    bmdb.begin_authority_follow(&lease, cluster, (&["10.0.0.3:7835".to_owned()], 3)).await?;
    assert_eq!(step(&kit).await?, at(Follow));
    assert_eq!(bmdb.sealed_next_authority(cluster).await?, None, "the cluster has it");
    bmdb.raise_cluster_statement(cluster, b"stolen".to_vec(), statement).await?;
    assert_eq!(bmdb.cluster_statement(cluster).await?, None, "the stolen one states nothing any more");
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let founded = found.cluster.founded.context("not founded")?;
    assert_eq!((founded.ca_certificate, found.cluster.epoch), (b"next".to_vec(), 2));
    assert_eq!(founded.curators, curators, "the others may be the thief's");
    assert!(found.cluster.snapshots.requested_at.is_some());

    bmdb.end_authority_theft(&lease, cluster).await?;
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    assert_eq!((found.cluster.authority_rotation, found.cluster.authority_theft), (None, None));
    Ok(())
}

#[tokio::test]
async fn restore_in_the_middle_begins_again_with_another_authority() -> TestResult {
    let (kit, cluster, machine) = world("authority_theft_restored").await?;
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let (_session, lease) = lease_of(&shepherd, cluster).await?;
    let bmdb = &shepherd.bmdb;
    let restored = async || -> Result<()> {
        sqlx::query("UPDATE cluster SET restoring_since = clock_timestamp(), restoring_by = 'lee'")
            .execute(&kit.pool)
            .await?;
        bmdb.record_cluster_restored(&lease, cluster, machine, &["10.0.0.1:7835".to_owned()]).await?;
        Ok(())
    };
    bmdb.store_next_authority(&lease, cluster, b"next", b"sealed").await?;
    bmdb.begin_authority_step(&lease, cluster, AuthorityStep::Show).await?;
    restored().await?;
    assert_eq!(step(&kit).await?, None);
    assert_eq!(bmdb.sealed_next_authority(cluster).await?, None);

    bmdb.store_next_authority(&lease, cluster, b"another", b"sealed").await?;
    for next in [AuthorityStep::Show, AuthorityStep::Reject, AuthorityStep::Close, AuthorityStep::Install] {
        bmdb.begin_authority_step(&lease, cluster, next).await?;
    }
    bmdb.begin_authority_follow(&lease, cluster, (&[], 0)).await?;
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let founded = found.cluster.founded.context("not founded")?;
    assert_eq!(founded.curators, ["10.0.0.1:7835"], "nothing else is known");
    restored().await?;
    let last = Some((AuthorityStep::Follow, b"another".to_vec()));
    assert_eq!(step(&kit).await?, last, "snapshots with the new authority alone are restored by then");
    Ok(())
}
