//! Orders about an upgrade of a cluster: begin, pause, resume, abort.

use std::collections::BTreeMap;

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::kubernetes::desired::resolve_bundle;
use crate::cluster::kubernetes::require_kubernetes;
use crate::cluster::lock::{increment_version, lock_cluster};
use crate::cluster::record::ClusterDetails;
use crate::cluster::upgrade::checks::{lock_upgradable_cluster, parse_version, running_versions};
use crate::cluster::upgrade::rollback::roll_back_upgrade_in_tx;
use crate::cluster::upgrade::{
    ENDING_ROLL_OUT, NewUpgrade, ORDERING, audit_json, insert_upgrade, read_active_upgrade, read_upgrade,
};
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::fleet::roll_out::row::{abort_roll_out, set_roll_out_paused};
use crate::fleet::roll_out::{NewRollOut, begin_roll_out_in_tx, reject_machines_in_roll_outs};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::spec::ClusterPart;
use model::cluster::upgrade::{BundleRef, NodeUpgrade};
use model::kubernetes::skew::check_upgrade_path;

/// How long a machine may take to run another release, in seconds.
const RELEASE_DEADLINE: u32 = 120;

/// A change of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeChange {
    /// Go back to what ran before.
    RollBack,
    /// Ask no more nodes for now.
    Pause,
    /// Continue after a pause by an operator or by the shepherd.
    Resume,
    /// End it where it is.
    Abort,
}

impl Bmdb {
    /// Orders an upgrade of a cluster.
    pub async fn upgrade_cluster(
        &self,
        order: Order,
        name: String,
        new: NewUpgrade,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(ORDERING, order, None, (name, new), |tx, order, (name, new)| {
            Box::pin(create_upgrade_in_tx(tx, order, name, new))
        })
        .await
    }

    /// Changes the upgrade of a cluster that is under way, or rolls back the last one.
    pub async fn change_upgrade(
        &self,
        order: Order,
        name: String,
        change: UpgradeChange,
    ) -> Result<OrderResult, BmdbError> {
        let what = "changing an upgrade of a cluster";
        self.execute_order(what, order, None, (name, change), |tx, order, (name, change)| {
            Box::pin(change_upgrade_in_tx(tx, order, name, *change))
        })
        .await
    }
}

async fn create_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &NewUpgrade,
) -> Result<OrderEffect, BmdbError> {
    new.check().map_err(|reason| order_rejected("WRONG_UPGRADE", reason))?;
    let found = lock_upgradable_cluster(tx, name).await?;
    let id = found.cluster.id;
    if let Some(upgrade) = read_active_upgrade(tx, id).await? {
        return Err(order_rejected("UPGRADING", upgrade.conflict_message(name)));
    }
    let bundles = match &new.kubernetes {
        None => None,
        Some(text) => {
            let before = require_kubernetes(tx, id, name).await?.desired.spec;
            let (digest, to) = resolve_bundle(tx, text, &new.trust).await?;
            if digest == before.bundle && new.roleserver.is_none() {
                let output =
                    format!("already runs exactly that bundle (Kubernetes {to}); nothing was changed");
                return Ok(OrderEffect::already(output, None));
            }
            check_upgrade_path(
                &running_versions(&found),
                parse_version(&before.version)?,
                parse_version(&to)?,
            )
            .map_err(|messages| {
                order_rejected(
                    "SKEW",
                    format!("the cluster {name} cannot be upgraded in this way: {}", messages.join("; ")),
                )
            })?;
            let from = BundleRef { digest: before.bundle, version: before.version };
            Some((from, BundleRef { digest, version: to }))
        }
    };
    let mut machines: Vec<(Uuid, String)> = (found.machines.iter())
        .filter(|line| line.member.leave_reason.is_none())
        .map(|line| (line.member.machine.0, line.member.name.clone()))
        .collect();
    machines.sort();
    reject_machines_in_roll_outs(tx, &machines).await?;
    let rolled = match &new.roleserver {
        None => None,
        Some(release) => {
            let roll_out = NewRollOut {
                release: release.clone(),
                selector: model::selector::Selector::default(),
                parallelism: new.parallelism,
                deadline_seconds: RELEASE_DEADLINE,
            };
            let meant = format!("cluster {name}");
            Some(begin_roll_out_in_tx(tx, order, &roll_out, &meant, &machines).await?)
        }
    };
    let upgrade = insert_upgrade(tx, order, id, bundles.as_ref(), rolled.as_ref(), new, false).await?;
    let mut way = Vec::new();
    if let Some((_, release)) = &rolled {
        way.push(format!("its role servers become {release}"));
    }
    if let Some((from, to)) = &bundles {
        way.push(format!(
            "its controllers {} go from Kubernetes {} to {}, one by one",
            machine_names(&found, ClusterPart::ControlPlane),
            from.version,
            to.version
        ));
        way.push(format!(
            "its workers {} do, {} at a time",
            machine_names(&found, ClusterPart::Worker),
            new.parallelism
        ));
    }
    let text =
        format!("is upgraded: {}; watch it with: shepherdctl cluster describe {name}", way.join(", then "));
    let after = json!({
        "upgrade": upgrade,
        "from": bundles.as_ref().map(|(from, _)| &from.digest),
        "to": bundles.as_ref().map(|(_, to)| &to.digest),
        "update": rolled.map(|(roll_out, _)| roll_out),
    });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

fn machine_names(found: &ClusterDetails, part: ClusterPart) -> String {
    let mut names: Vec<&str> = (found.machines.iter())
        .filter(|line| line.member.part == part && line.member.leave_reason.is_none())
        .map(|line| line.member.name.as_str())
        .collect();
    names.sort_unstable();
    let shown = names.iter().take(20).copied().collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "(none)".to_owned(),
        many if many > 20 => format!("{shown} and {} more", many - 20),
        _ => shown,
    }
}

async fn change_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: UpgradeChange,
) -> Result<OrderEffect, BmdbError> {
    const OPERATION: &str = "changing an upgrade of a cluster";
    if change == UpgradeChange::RollBack {
        return roll_back_upgrade_in_tx(tx, order, name).await;
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let Some(line) = read_active_upgrade(tx, id).await? else {
        let text = "is not being upgraded; nothing was changed";
        return Ok(match change {
            // An upgrade that does not exist is not under way either.
            UpgradeChange::Abort => OrderEffect::already(text, None),
            UpgradeChange::Pause | UpgradeChange::Resume | UpgradeChange::RollBack => {
                OrderEffect::no_effect(text, None)
            }
        });
    };
    let (upgrade, before) = (&line.upgrade.id, audit_json(&line));
    let roll_out = line.roll_out.as_ref().filter(|_| !line.roll_out_done);
    let paused =
        line.upgrade.pause_reason.as_ref().or_else(|| line.upgrade.release.as_ref()?.pause_reason.as_ref());
    if change == UpgradeChange::Resume && paused.is_none() {
        let text = "has no paused upgrade; nothing was changed";
        return Ok(OrderEffect::already(text, Some(before)));
    }
    let text = match change {
        UpgradeChange::Pause | UpgradeChange::Resume => {
            let why = (change == UpgradeChange::Pause)
                .then(|| format!("{} paused it: {}", order.actor.name, order.reason));
            let why = why.as_deref();
            sqlx::query_file!("../../sql/upgrade/set_paused.sql", upgrade, why)
                .execute(&mut *tx)
                .await
                .context(OPERATION)?;
            if let Some(roll_out) = roll_out {
                set_roll_out_paused(tx, roll_out, why, OPERATION).await?;
            }
            if why.is_some() {
                "orders no more nodes to run the bundle; nodes that have the order continue".to_owned()
            } else {
                // Nodes with a request that are not finished get another one, with the whole deadline.
                let requests: BTreeMap<&String, &NodeUpgrade> = line
                    .upgrade
                    .requested_nodes
                    .iter()
                    .filter(|(_, node_upgrade)| node_upgrade.is_done)
                    .collect();
                sqlx::query_file!("../../sql/upgrade/set_requested_nodes.sql", upgrade, json!(requests))
                    .execute(&mut *tx)
                    .await
                    .context(OPERATION)?;
                "continues its upgrade; nodes that are not done get the order again, with the full deadline"
                    .to_owned()
            }
        }
        UpgradeChange::Abort | UpgradeChange::RollBack => {
            if let Some(roll_out) = roll_out {
                abort_roll_out(tx, roll_out, ENDING_ROLL_OUT).await?;
            }
            sqlx::query_file_scalar!("../../sql/upgrade/end.sql", upgrade, "aborted")
                .fetch_optional(&mut *tx)
                .await
                .context(OPERATION)?;
            "ends its upgrade here: nodes that run the other bundle keep it, and the others stay as they are; \
             another upgrade can continue from there"
                .to_owned()
        }
    };
    increment_version(tx, id, OPERATION).await?;
    let after = read_upgrade(tx, id).await?.as_ref().map(audit_json);
    Ok(OrderEffect::changed(text, Some(before), after))
}
