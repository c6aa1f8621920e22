//! Orders for new certificates of etcd's members: accepted when the control plane is known to be lost, and repeated when
//! each machine has reported.

use anyhow::{Result, bail};
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

/// The message of the order; if it is rejected, the reason for programs and the text.
async fn ordered(kit: &Kit) -> Result<Result<String, (&'static str, String)>> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/RenewPeers".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "it was dark for six weeks".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(b"renew"),
    };
    match kit.bmdb.renew_cluster_peers(order, "ams".to_owned()).await {
        Ok(carried) => Ok(Ok(carried.outcome.message)),
        Err(BmdbError::OrderRejected { reason, message: text }) => Ok(Err((reason, text))),
        Err(other) => bail!(other),
    }
}

async fn execute(kit: &Kit, statement: &'static str) -> Result<()> {
    sqlx::query(statement).execute(&kit.pool).await?;
    Ok(())
}

/// A founded cluster with one machine, which is a node of its control plane.
async fn world(name: &str) -> Result<(Kit, Uuid)> {
    let kit = Kit::new(name).await?;
    kit.founded_cluster(1, 0).await?;
    execute(&kit, "UPDATE cluster SET voters = 1, voters_reached = 1").await?;
    let machine = kit.control_plane(1).await?[0].0;
    sqlx::query(
        "INSERT INTO machine_cluster_report (machine_id, generation, node_key, ca_certificate, epoch, reported_at)
         VALUES ($1, 3, decode(repeat('07', 32), 'hex'), 'ca', 0, clock_timestamp())",
    )
    .bind(machine)
    .execute(&kit.pool)
    .await?;
    Ok((kit, machine))
}

/// Its curators were polled just now, and have been silent for so many seconds; `None`: they answer.
async fn record_silence(kit: &Kit, seconds: Option<i32>) -> Result<()> {
    sqlx::query(
        "UPDATE cluster SET polled_at = clock_timestamp(),
             observed_at = clock_timestamp() - make_interval(secs => COALESCE($1 + 70, 0)),
             unreachable_since = clock_timestamp() - make_interval(secs => $1)",
    )
    .bind(seconds.map(f64::from))
    .execute(&kit.pool)
    .await?;
    Ok(())
}

#[tokio::test]
async fn certificates_are_ordered_only_when_the_control_plane_is_known_to_be_lost() -> TestResult {
    let (kit, _) = world("peer_renewal_lost").await?;
    let rejected = async |expected: &str, part: &str| -> Result<()> {
        match ordered(&kit).await? {
            Err((reason, text)) => {
                assert_eq!(reason, expected, "{text}");
                assert!(text.contains("the cluster ams ") && text.contains(part), "{text}");
            }
            Ok(text) => bail!("it {text}"),
        }
        let none = "SELECT count(*) FROM cluster WHERE peer_renewal_requested_at IS NOT NULL";
        let pending: i64 = sqlx::query_scalar(none).fetch_one(&kit.pool).await?;
        assert_eq!(pending, 0, "{expected}");
        Ok(())
    };
    record_silence(&kit, None).await?;
    rejected("QUORUM_ANSWERS", "by themselves").await?;
    record_silence(&kit, Some(20)).await?;
    rejected("SILENCE_TOO_SHORT", "yet").await?;
    record_silence(&kit, Some(200)).await?;
    rejected("NO_SUCH_SNAPSHOT", "no snapshot").await?;
    execute(
        &kit,
        "UPDATE cluster SET restoring_since = clock_timestamp(), restoring_by = 'lee', restoring_from = gen_random_uuid()",
    )
    .await?;
    rejected("RESTORING", "as lee ordered").await?;
    Ok(())
}

#[tokio::test]
async fn order_is_repeated_once_each_machine_has_reported() -> TestResult {
    let (kit, machine) = world("peer_renewal_again").await?;
    record_silence(&kit, Some(200)).await?;
    execute(
        &kit,
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 10, 5, 3, '[]',
             decode(repeat('cd', 32), 'hex') FROM cluster",
    )
    .await?;
    let first = ordered(&kit).await?;
    assert!(first.as_ref().is_ok_and(|text| text.starts_with("sends its members")), "{first:?}");
    let unchanged = async || -> Result<()> {
        let again = ordered(&kit).await?;
        let same = again.as_ref().is_ok_and(|text| text.contains("as kim ordered; nothing was changed"));
        assert!(same, "{again:?}");
        Ok(())
    };
    unchanged().await?;

    // It was sent a certificate, and has not reported. Then it has.
    sqlx::query(
        "INSERT INTO cluster_order (machine_id, generation, what, sealed, ordered_at)
         VALUES ($1, 4, 'join', 'sealed', clock_timestamp())",
    )
    .bind(machine)
    .execute(&kit.pool)
    .await?;
    unchanged().await?;
    execute(&kit, "UPDATE machine_cluster_report SET generation = 4, error = 'its clock is wrong'").await?;
    let another = ordered(&kit).await?;
    assert!(another.as_ref().is_ok_and(|text| text.starts_with("sends its members")), "{another:?}");
    Ok(())
}
