//! Rollback of a cluster's upgrade: to what ran before, from where the upgrade is, or after it was finished.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::kubernetes::desired::resolve_bundle;
use crate::cluster::kubernetes::read_kubernetes;
use crate::cluster::lock::increment_version;
use crate::cluster::upgrade::checks::{lock_upgradable_cluster, parse_version, running_versions};
use crate::cluster::upgrade::{
    ENDING_ROLL_OUT, NewUpgrade, ORDERING, audit_json, insert_upgrade, read_upgrade,
};
use crate::connection::DbContext as _;
use crate::connection::error::{BmdbError, order_rejected};
use crate::fleet::roll_out::reject_machines_in_roll_outs;
use crate::fleet::roll_out::row::abort_roll_out;
use crate::orders::order::{Order, OrderEffect};
use model::kubernetes::skew::{NodeVersion, skew_violations};
use model::signed_artefact::signing_trust::SigningTrust;

/// Rolls back to what ran before: from where an upgrade is, or after the last one was finished.
pub(super) async fn roll_back_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderEffect, BmdbError> {
    let found = lock_upgradable_cluster(tx, name).await?;
    let id = found.cluster.id;
    let last = read_upgrade(tx, id).await?;
    let nothing = |text: &str| order_rejected("NOTHING_TO_ROLL_BACK", format!("the cluster {name} {text}"));
    let Some(line) = last else { return Err(nothing("was never upgraded; there is nothing to go back to")) };
    let Some((from, to)) = line.upgrade.bundles.clone() else {
        return Err(nothing(
            "upgraded only its role servers; to go back, roll out another release of them: shepherdctl update",
        ));
    };
    let before = audit_json(&line);
    let (text, under_way) = match &line.ended {
        None if line.upgrade.rolling_back => {
            let text = "is already being rolled back; nothing was changed";
            return Ok(OrderEffect::already(text, Some(before)));
        }
        None => ("goes back from where it is", true),
        Some((_, how)) if how == "rolled back" => {
            return Err(nothing("was rolled back after its last upgrade, and no earlier bundle is recorded"));
        }
        Some((_, how)) if how == "aborted" && line.upgrade.rolling_back => {
            return Err(nothing("had its rollback aborted; upgrade it with: shepherdctl cluster upgrade"));
        }
        Some(_) => ("goes back to what it ran before", false),
    };
    let kept = read_kubernetes(tx, id).await?.map(|line| line.desired.spec.bundle);
    if !under_way && kept.as_ref().is_none_or(|kept| *kept != to.digest && *kept != from.digest) {
        return Err(nothing("now runs another bundle than the one that its last upgrade led to"));
    }
    // Nodes that have the bundle keep it, and new ones fetch it. It was assigned before, so its signature is left to them.
    resolve_bundle(tx, &from.digest, &SigningTrust::default()).await.map_err(|_| {
        nothing(&format!(
            "cannot go back: the artefact of its former bundle ({}) was deleted; add it again",
            &from.digest[..16]
        ))
    })?;
    // Workers go back first, so the skew rules do not concern them; controllers run one or two minor versions.
    let controllers: Vec<NodeVersion> =
        running_versions(&found).into_iter().filter(|node| node.controller).collect();
    let reported_no = skew_violations(&controllers, parse_version(&from.version)?);
    if !reported_no.is_empty() {
        return Err(order_rejected(
            "SKEW",
            format!("the cluster {name} cannot go back: {}", reported_no.join("; ")),
        ));
    }
    let machines: Vec<(Uuid, String)> = (found.machines.iter())
        .filter(|line| line.member.leave_reason.is_none())
        .map(|line| (line.member.machine.0, line.member.name.clone()))
        .collect();
    if !under_way {
        reject_machines_in_roll_outs(tx, &machines).await?;
    }
    if under_way {
        if let Some(roll_out) = line.roll_out.as_ref().filter(|_| !line.roll_out_done) {
            abort_roll_out(tx, roll_out, ENDING_ROLL_OUT).await?;
        }
        sqlx::query_file!("../../sql/upgrade/start_rollback.sql", line.upgrade.id)
            .execute(&mut *tx)
            .await
            .context(ORDERING)?;
        increment_version(tx, id, ORDERING).await?;
    } else {
        let again = NewUpgrade {
            kubernetes: None,
            roleserver: None,
            parallelism: u32::try_from(line.upgrade.parallelism).unwrap_or(1),
            deadline_seconds: u32::try_from(line.upgrade.node_deadline.as_secs()).unwrap_or(u32::MAX),
            trust: SigningTrust::default(),
        };
        let bundles = (from.clone(), to.clone());
        insert_upgrade(tx, order, id, Some(&bundles), None, &again, true).await?;
    }
    let after = read_upgrade(tx, id).await?.as_ref().map(audit_json);
    let text = format!(
        "{text}: workers first, then controllers one by one, from Kubernetes {} to {}; role servers stay as they are; watch it \
         with: shepherdctl cluster describe {name}",
        to.version, from.version
    );
    Ok(OrderEffect::changed(text, Some(before), after))
}
