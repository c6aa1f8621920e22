//! Kubernetes and role server upgrades of a cluster: order, pause, resume, roll back, abort.
//!
//! An order only changes the desired state. A permanent obstacle rejects the order, with a reason; the holder of the
//! cluster's lease waits for a passing one (`cluster_upgrade_transitions.rs`). The roll-out of a role server's release
//! is ordered in the same transaction. It is paused with the upgrade and ends with it.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::action::OrderOutcome;
use crate::audit::{
    Order, OrderResult, begin_dry_run, find_by_idempotency_key, record_audit, roll_back_dry_run,
};
use crate::cluster::{ClusterDetails, list_clusters, lock_cluster, no_such_cluster, read_cluster_details};
use crate::cluster_kubernetes::{order_rejected, read_kubernetes, require_kubernetes, resolve_bundle};
use crate::connection::{Bmdb, DbContext as _};
use crate::error::BmdbError;
use crate::roll_out::{NewRollOut, begin_roll_out_in_tx, reject_machines_in_roll_outs};
use model::artefact::parse_digest;
use model::cluster::kubernetes_view::{BundleView, UpgradeView};
use model::cluster::spec::ClusterPart;
use model::cluster::upgrade::{
    BundleRef, ClusterUpgrade, MAX_PARALLELISM, NODE_DEADLINE_RANGE_SECONDS, NodeUpgrade, ReleaseProgress,
};
use model::kubernetes::skew::{NodeVersion, check_upgrade_path, skew_violations};
use model::kubernetes::version::ReleaseVersion;
use model::time::Timestamp;

const OPERATION: &str = "reading upgrades of clusters";
const ORDERING: &str = "ordering an upgrade of a cluster";
/// How long a machine may take to run another release, in seconds.
const RELEASE_DEADLINE: u32 = 120;
/// Ended upgrades of one cluster that are retained.
const MAX_ENDED_UPGRADES: i64 = 10;

/// An upgrade with the details that people see.
#[derive(Clone, Debug, PartialEq)]
pub struct UpgradeRecord {
    /// The upgrade as decisions need it.
    pub upgrade: ClusterUpgrade,
    /// Name of the release that role servers change to; `None` if the upgrade has none.
    pub release: Option<String>,
    /// Id of the roll-out of that release.
    pub roll_out: Option<String>,
    /// Whether that roll-out is finished.
    pub roll_out_done: bool,
    /// When it was ordered.
    pub created_at: Timestamp,
    /// Name of the operator who ordered it.
    pub created_by: String,
    /// The operator's reason for the order.
    pub reason: String,
    /// When and how it ended; `None` while it is under way.
    pub ended: Option<(Timestamp, String)>,
}

impl UpgradeRecord {
    /// A sentence without its full stop: this upgrade is in the way of something else.
    #[must_use]
    pub fn conflict_message(&self, name: &str) -> String {
        format!(
            "the cluster {name} is being upgraded, as {} ordered; wait for its end, or: shepherdctl cluster upgrade {name} \
             --abort",
            self.created_by
        )
    }
}

/// An upgrade to order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewUpgrade {
    /// The bundle: an artefact's digest, the beginning of it, or its name.
    pub kubernetes: Option<String>,
    /// The release of role servers, named likewise.
    pub roleserver: Option<String>,
    /// How many workers are upgraded at a time.
    pub parallelism: u32,
    /// How long a node may take, in seconds.
    pub deadline_seconds: u32,
}

impl NewUpgrade {
    /// Checks whether such an upgrade is possible at all; if not, explains why.
    pub fn check(&self) -> Result<(), String> {
        if self.kubernetes.is_none() && self.roleserver.is_none() {
            return Err(
                "nothing is to be upgraded; say --kubernetes_bundle BUNDLE, --roleserver_release RELEASE or \
                        both"
                    .to_owned(),
            );
        }
        if !(1..=MAX_PARALLELISM).contains(&self.parallelism) {
            return Err(format!("the parallelism is 1 to {MAX_PARALLELISM}, and not {}", self.parallelism));
        }
        if !NODE_DEADLINE_RANGE_SECONDS.contains(&self.deadline_seconds) {
            let (least, most) = (NODE_DEADLINE_RANGE_SECONDS.start(), NODE_DEADLINE_RANGE_SECONDS.end());
            return Err(format!("the deadline is {least}s to {most}s, and not {}s", self.deadline_seconds));
        }
        Ok(())
    }
}

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

/// The upgrade of a cluster that is under way, or else the newest one.
pub(crate) async fn read_upgrade(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<UpgradeRecord>, BmdbError> {
    let row = sqlx::query_file!("../../sql/upgrade/read_newest.sql", cluster)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    let Some(row) = row else { return Ok(None) };
    let bundle = |digest: Option<Vec<u8>>, version: Option<String>| {
        Some(BundleRef { digest: hex::encode(digest?), version: version? })
    };
    let requests: BTreeMap<String, NodeUpgrade> = serde_json::from_value(row.requested_nodes)
        .map_err(|error| BmdbError::Corrupt(format!("the upgrade {}: {error}", row.upgrade_id)))?;
    let release = row.roll_out_id.clone().filter(|_| !row.released).map(|roll_out| ReleaseProgress {
        roll_out,
        pause_reason: row.roll_out_paused,
        outcome: if row.roll_out_exists {
            row.roll_out_ended.map(|how| (how, u32::try_from(row.failed).unwrap_or(u32::MAX)))
        } else {
            // It ended so long ago that it was deleted.
            Some(("finished".to_owned(), 0))
        },
    });
    let upgrade = ClusterUpgrade {
        id: row.upgrade_id,
        bundles: bundle(row.from_bundle, row.from_version).zip(bundle(row.to_bundle, row.to_version)),
        rolling_back: row.back,
        parallelism: usize::try_from(row.parallelism).unwrap_or(1),
        node_deadline: std::time::Duration::from_secs(u64::try_from(row.deadline_seconds).unwrap_or(0)),
        pause_reason: row.paused,
        release,
        conflicting_roll_out: row.elsewhere,
        requested_nodes: requests,
    };
    Ok(Some(UpgradeRecord {
        upgrade,
        release: row.release,
        roll_out: row.roll_out_id,
        roll_out_done: row.released,
        created_at: row.created_at,
        created_by: row.created_by,
        reason: row.reason,
        ended: row.ended_at.zip(row.ended),
    }))
}

/// The upgrade of a cluster that is under way.
pub(crate) async fn read_active_upgrade(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<UpgradeRecord>, BmdbError> {
    Ok(read_upgrade(tx, cluster).await?.filter(|found| found.ended.is_none()))
}

/// An upgrade as people see it.
#[must_use]
pub(crate) fn upgrade_view(line: &UpgradeRecord) -> UpgradeView {
    let upgrade = &line.upgrade;
    let bundle =
        |bundle: &BundleRef| BundleView { sha256: bundle.digest.clone(), version: bundle.version.clone() };
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    UpgradeView {
        id: upgrade.id.clone(),
        from: upgrade.bundles.as_ref().map(|(from, _)| bundle(from)),
        to: upgrade.bundles.as_ref().map(|(_, to)| bundle(to)),
        release: line.release.clone(),
        roll_out: line.roll_out.clone(),
        release_done: line.roll_out_done,
        rolling_back: upgrade.rolling_back,
        parallelism: count(upgrade.parallelism),
        deadline_seconds: u32::try_from(upgrade.node_deadline.as_secs()).unwrap_or(u32::MAX),
        created_at: line.created_at,
        created_by: line.created_by.clone(),
        reason: line.reason.clone(),
        pause_reason: upgrade.pause_reason.clone(),
        ended_at: line.ended.as_ref().map(|(at, _)| *at),
        outcome: line.ended.as_ref().map(|(_, how)| how.clone()),
        requested_count: count(upgrade.requested_nodes.len()),
        completed_count: count(
            upgrade.requested_nodes.values().filter(|node_upgrade| node_upgrade.is_done).count(),
        ),
    }
}

impl Bmdb {
    /// Orders an upgrade of a cluster.
    pub async fn upgrade_cluster(
        &self,
        order: Order,
        name: String,
        new: NewUpgrade,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction(ORDERING, move |tx| {
                let (order, name, new) = (order.clone(), name.clone(), new.clone());
                Box::pin(async move { create_upgrade_in_tx(tx, &order, &name, &new).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Changes the upgrade of a cluster that is under way, or rolls back the last one.
    pub async fn change_upgrade(
        &self,
        order: Order,
        name: String,
        change: UpgradeChange,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("changing an upgrade of a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { change_upgrade_in_tx(tx, &order, &name, change).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }
}

/// Locks a cluster that can be upgraded, and reads all of it.
async fn lock_upgradable_cluster(tx: &mut PgConnection, name: &str) -> Result<ClusterDetails, BmdbError> {
    lock_cluster(tx, name).await?;
    let cluster = list_clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such_cluster(name))?;
    let found = read_cluster_details(tx, cluster).await?;
    if found.cluster.founded.is_none() || found.cluster.restoring.is_some() {
        let output = format!("the cluster {name} is not there yet; see: shepherdctl cluster describe {name}");
        return Err(order_rejected("NOT_FOUNDED", output));
    }
    Ok(found)
}

/// Versions that the nodes run, as last reported.
fn running_versions(found: &ClusterDetails) -> Vec<NodeVersion> {
    let staying = found.machines.iter().filter(|line| line.member.leave_reason.is_none());
    let of = |line: &crate::cluster::ClusterMachineRecord| {
        let version = line.kubernetes.as_ref()?.version.parse().ok()?;
        Some(NodeVersion {
            name: line.member.name.clone(),
            controller: line.member.part == ClusterPart::ControlPlane,
            version,
        })
    };
    staying.filter_map(of).collect()
}

fn parse_version(text: &str) -> Result<ReleaseVersion, BmdbError> {
    text.parse().map_err(|error| {
        order_rejected(
            "NO_VERSION",
            format!(
                "a version of Kubernetes cannot be read, so whether the upgrade is allowed is unknown: \
                 {error}"
            ),
        )
    })
}

async fn create_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &NewUpgrade,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
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
            let (digest, to) = resolve_bundle(tx, text).await?;
            if digest == before.bundle && new.roleserver.is_none() {
                let output = format!("runs just that bundle (Kubernetes {to}) already; nothing was changed");
                return record_audit(
                    tx,
                    order,
                    None,
                    OrderOutcome { changed: false, message: output },
                    None,
                    None,
                )
                .await;
            }
            check_upgrade_path(
                &running_versions(&found),
                parse_version(&before.version)?,
                parse_version(&to)?,
            )
            .map_err(|messages| {
                order_rejected(
                    "SKEW",
                    format!("the cluster {name} cannot be upgraded so: {}", messages.join("; ")),
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
    begin_dry_run(tx, order).await?;
    let rolled = match &new.roleserver {
        None => None,
        Some(release) => {
            let roll_out = NewRollOut {
                release: release.clone(),
                selector: model::cluster::selector::Selector::default(),
                parallelism: new.parallelism,
                deadline_seconds: RELEASE_DEADLINE,
            };
            let meant = format!("cluster {name}");
            Some(begin_roll_out_in_tx(tx, order, &roll_out, &meant, &machines).await?)
        }
    };
    let upgrade = insert_upgrade(tx, order, id, bundles.as_ref(), rolled.as_ref(), new, false).await?;
    roll_back_dry_run(tx, order).await?;
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
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(after)).await
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

async fn insert_upgrade(
    tx: &mut PgConnection,
    order: &Order,
    cluster: Uuid,
    bundles: Option<&(BundleRef, BundleRef)>,
    rolled: Option<&(String, String)>,
    new: &NewUpgrade,
    back: bool,
) -> Result<String, BmdbError> {
    let id: String = Uuid::new_v4().simple().to_string().chars().take(8).collect();
    let digest = |bundle: &BundleRef| parse_digest(&bundle.digest).map(|digest| digest.0.to_vec());
    let from = bundles.map(|(from, _)| digest(from)).transpose().map_err(BmdbError::Corrupt)?;
    let to = bundles.map(|(_, to)| digest(to)).transpose().map_err(BmdbError::Corrupt)?;
    sqlx::query_file!("../../sql/upgrade/delete_old.sql", cluster, MAX_ENDED_UPGRADES)
        .execute(&mut *tx)
        .await
        .context(ORDERING)?;
    sqlx::query_file!(
        "../../sql/upgrade/insert.sql",
        id,
        cluster,
        from,
        bundles.map(|(from, _)| from.version.clone()),
        to,
        bundles.map(|(_, to)| to.version.clone()),
        rolled.map(|(roll_out, _)| roll_out.clone()),
        rolled.map(|(_, release)| release.clone()),
        back,
        i64::from(new.parallelism),
        i64::from(new.deadline_seconds),
        order.actor.name,
        order.reason
    )
    .execute(&mut *tx)
    .await
    .context(ORDERING)?;
    sqlx::query_file!("../../sql/cluster/increment_version.sql", cluster)
        .execute(tx)
        .await
        .context(ORDERING)?;
    Ok(id)
}

/// An upgrade as the audit stores it.
fn audit_json(line: &UpgradeRecord) -> Value {
    json!({
        "upgrade": line.upgrade.id, "back": line.upgrade.rolling_back, "paused": line.upgrade.pause_reason,
        "ended": line.ended.as_ref().map(|(_, how)| how),
    })
}

async fn change_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: UpgradeChange,
) -> Result<OrderResult, BmdbError> {
    const OPERATION: &str = "changing an upgrade of a cluster";
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    if change == UpgradeChange::RollBack {
        return roll_back_upgrade_in_tx(tx, order, name).await;
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let Some(line) = read_active_upgrade(tx, id).await? else {
        let text = "is not being upgraded; nothing was changed".to_owned();
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    };
    let (upgrade, before) = (&line.upgrade.id, audit_json(&line));
    let roll_out = line.roll_out.as_ref().filter(|_| !line.roll_out_done);
    let paused =
        line.upgrade.pause_reason.as_ref().or_else(|| line.upgrade.release.as_ref()?.pause_reason.as_ref());
    if change == UpgradeChange::Resume && paused.is_none() {
        let text = "does not stand still in its upgrade; nothing was changed".to_owned();
        let done = OrderOutcome { changed: false, message: text };
        return record_audit(tx, order, None, done, Some(before.clone()), Some(before)).await;
    }
    begin_dry_run(tx, order).await?;
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
                sqlx::query_file!("../../sql/roll_out/set_paused.sql", roll_out, why)
                    .execute(&mut *tx)
                    .await
                    .context(OPERATION)?;
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
                abort_roll_out(tx, roll_out).await?;
            }
            sqlx::query_file_scalar!("../../sql/upgrade/end.sql", upgrade, "aborted")
                .fetch_optional(&mut *tx)
                .await
                .context(OPERATION)?;
            "is upgraded no further: nodes that run the other bundle keep it, the others stay as they are; another upgrade \
             may go on from there"
                .to_owned()
        }
    };
    sqlx::query_file!("../../sql/cluster/increment_version.sql", id)
        .execute(&mut *tx)
        .await
        .context(OPERATION)?;
    let after = read_upgrade(tx, id).await?.as_ref().map(audit_json);
    roll_back_dry_run(tx, order).await?;
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, Some(before), after).await
}

/// Ends the roll-out of an upgrade where it is.
async fn abort_roll_out(tx: &mut PgConnection, roll_out: &str) -> Result<(), BmdbError> {
    const OPERATION: &str = "ending the roll-out of an upgrade";
    sqlx::query_file!("../../sql/roll_out/withdraw_orders.sql", roll_out)
        .execute(&mut *tx)
        .await
        .context(OPERATION)?;
    sqlx::query_file!("../../sql/roll_out/end.sql", roll_out, "aborted")
        .execute(&mut *tx)
        .await
        .context(OPERATION)?;
    sqlx::query_file!("../../sql/roll_out/end_machines.sql", roll_out)
        .execute(tx)
        .await
        .context(OPERATION)?;
    Ok(())
}

/// Rolls back to what ran before: from where an upgrade is, or after the last one was finished.
async fn roll_back_upgrade_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderResult, BmdbError> {
    let found = lock_upgradable_cluster(tx, name).await?;
    let id = found.cluster.id;
    let last = read_upgrade(tx, id).await?;
    let nothing = |text: &str| order_rejected("NOTHING_TO_ROLL_BACK", format!("the cluster {name} {text}"));
    let Some(line) = last else { return Err(nothing("was never upgraded; there is nothing to go back to")) };
    let Some((from, to)) = line.upgrade.bundles.clone() else {
        return Err(nothing(
            "was upgraded in its role servers alone; they go back with another release: shepherdctl update",
        ));
    };
    let before = audit_json(&line);
    let (text, under_way) = match &line.ended {
        None if line.upgrade.rolling_back => {
            let text = "goes back already; nothing was changed".to_owned();
            let done = OrderOutcome { changed: false, message: text };
            return record_audit(tx, order, None, done, Some(before.clone()), Some(before)).await;
        }
        None => ("goes back from where it is", true),
        Some((_, how)) if how == "rolled back" => {
            return Err(nothing("has gone back after its last upgrade; there is nothing further back"));
        }
        Some((_, how)) if how == "aborted" && line.upgrade.rolling_back => {
            return Err(nothing("was stopped on its way back; upgrade it with: shepherdctl cluster upgrade"));
        }
        Some(_) => ("goes back to what it ran before", false),
    };
    let kept = read_kubernetes(tx, id).await?.map(|line| line.desired.spec.bundle);
    if !under_way && kept.as_ref().is_none_or(|kept| *kept != to.digest && *kept != from.digest) {
        return Err(nothing("runs another bundle by now than its last upgrade led to"));
    }
    // Nodes that have the bundle keep it, and new ones fetch it.
    resolve_bundle(tx, &from.digest).await.map_err(|_| {
        nothing(&format!(
            "cannot go back: the artefact of its bundle before ({}) is gone; add it again",
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
    begin_dry_run(tx, order).await?;
    if under_way {
        if let Some(roll_out) = line.roll_out.as_ref().filter(|_| !line.roll_out_done) {
            abort_roll_out(tx, roll_out).await?;
        }
        sqlx::query_file!("../../sql/upgrade/start_rollback.sql", line.upgrade.id)
            .execute(&mut *tx)
            .await
            .context(ORDERING)?;
        sqlx::query_file!("../../sql/cluster/increment_version.sql", id)
            .execute(&mut *tx)
            .await
            .context(ORDERING)?;
    } else {
        let again = NewUpgrade {
            kubernetes: None,
            roleserver: None,
            parallelism: u32::try_from(line.upgrade.parallelism).unwrap_or(1),
            deadline_seconds: u32::try_from(line.upgrade.node_deadline.as_secs()).unwrap_or(u32::MAX),
        };
        let bundles = (from.clone(), to.clone());
        insert_upgrade(tx, order, id, Some(&bundles), None, &again, true).await?;
    }
    let after = read_upgrade(tx, id).await?.as_ref().map(audit_json);
    roll_back_dry_run(tx, order).await?;
    let text = format!(
        "{text}: workers first, then controllers one by one, from Kubernetes {} to {}; role servers stay as they are; watch it \
         with: shepherdctl cluster describe {name}",
        to.version, from.version
    );
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, Some(before), after).await
}
