//! Orders to replace the authority of a cluster: one at a time, and one after a theft in place of a planned one.

use anyhow::{Result, bail};
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};

use model::cluster::authority_rotation::RotationKind;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

/// The message of the order; if it is rejected, the reason for programs and the text.
async fn ordered(kit: &Kit, kind: RotationKind) -> Result<Result<String, (&'static str, String)>> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/RotateAuthority".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "its key is two years old".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(b"rotate"),
    };
    match kit.bmdb.rotate_cluster_authority(order, "ams".to_owned(), kind).await {
        Ok(carried) => Ok(Ok(carried.outcome.message)),
        Err(BmdbError::OrderRejected { reason, message: text }) => Ok(Err((reason, text))),
        Err(other) => bail!(other),
    }
}

async fn execute(kit: &Kit, statement: &'static str) -> Result<()> {
    sqlx::query(statement).execute(&kit.pool).await?;
    Ok(())
}

/// The columns of the order: its kind, and whether it has a digest, a key and a step.
async fn stored(kit: &Kit) -> Result<(Option<String>, bool, bool, bool)> {
    let columns = "SELECT authority_rotation, authority_rotation_from IS NOT NULL,
             authority_rotation_key IS NOT NULL, authority_rotation_step IS NOT NULL FROM cluster";
    Ok(sqlx::query_as(columns).fetch_one(&kit.pool).await?)
}

#[tokio::test]
async fn authority_is_replaced_by_one_order_at_a_time() -> TestResult {
    let kit = Kit::new("authority_rotation_orders").await?;
    execute(
        &kit,
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled)
         VALUES (gen_random_uuid(), 'ams', 1, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE)",
    )
    .await?;
    let rejected = async |kind: RotationKind, expected: &str, part: &str| -> Result<()> {
        match ordered(&kit, kind).await? {
            Err((reason, text)) => {
                assert_eq!(reason, expected, "{text}");
                assert!(
                    text.starts_with("the authority of the cluster ams ") && text.contains(part),
                    "{text}"
                );
                Ok(())
            }
            Ok(text) => bail!("it {text}"),
        }
    };
    for kind in RotationKind::ALL {
        rejected(kind, "NOT_FOUNDED", "not founded yet").await?;
    }
    execute(
        &kit,
        "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = 'ca', curators = '[]',
             restoring_since = clock_timestamp(), restoring_by = 'lee', restoring_from = gen_random_uuid()",
    )
    .await?;
    rejected(RotationKind::Planned, "RESTORING", "as lee ordered").await?;
    execute(&kit, "UPDATE cluster SET restoring_since = NULL, restoring_by = NULL, restoring_from = NULL")
        .await?;
    assert_eq!(stored(&kit).await?, (None, false, false, false));

    // Somebody else began one, which the curators report.
    execute(
        &kit,
        r#"UPDATE cluster SET authority_rotation_progress =
             '{"stage": "signing", "since": null, "waits_for": [{"node": "node-1", "reason": "it is slow"}]}'"#,
    )
    .await?;
    rejected(RotationKind::Planned, "ROTATING", "(stage signing, waits for node-1): wait until").await?;
    execute(&kit, "UPDATE cluster SET authority_rotation_progress = NULL").await?;

    let first = ordered(&kit, RotationKind::Planned).await?;
    assert!(first.as_ref().is_ok_and(|text| text.starts_with("replaces its authority as soon")), "{first:?}");
    execute(&kit, "UPDATE cluster SET authority_rotation_from = decode(repeat('01', 32), 'hex')").await?;
    rejected(RotationKind::Planned, "ROTATING", "which kim ordered at ").await?;
    assert_eq!(stored(&kit).await?, (Some("planned".to_owned()), true, false, false));

    let theft = ordered(&kit, RotationKind::Compromised).await?;
    assert!(theft.as_ref().is_ok_and(|text| text.contains("by orders to its machines")), "{theft:?}");
    assert_eq!(stored(&kit).await?, (Some("compromised".to_owned()), false, false, false));
    for kind in RotationKind::ALL {
        rejected(kind, "ROTATING", "already has a replacement, which kim ordered at ").await?;
    }
    Ok(())
}
