//! Kubernetes and role server upgrades of a cluster: how one is stored, ordered, rolled back and carried out.
//!
//! An order only changes the desired state. A permanent obstacle rejects the order, with a reason; the holder of the
//! cluster's lease waits for a passing one (`transitions`). The roll-out of a role server's release is ordered in the
//! same transaction. It is paused with the upgrade and ends with it.
//!
//! This file reads and writes the rows of upgrades. `checks` finds out whether a cluster can be upgraded, [`orders`]
//! has the orders but the rollback, which is in `rollback`.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::lock::increment_version;
use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::orders::order::Order;
use model::artefact::parse_digest;
use model::cluster::upgrade::{
    BundleRef, ClusterUpgrade, MAX_PARALLELISM, NODE_DEADLINE_RANGE_SECONDS, NodeUpgrade, ReleaseProgress,
};
use model::signed_artefact::signing_trust::SigningTrust;
use model::time::Timestamp;

mod checks;
pub mod orders;
mod rollback;
#[cfg(feature = "sealing")]
mod transitions;

const OPERATION: &str = "reading upgrades of clusters";
const ORDERING: &str = "ordering an upgrade of a cluster";
const ENDING_ROLL_OUT: &str = "ending the roll-out of an upgrade";
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
    pub(crate) fn conflict_message(&self, name: &str) -> String {
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
    /// The keys that the bundle must be signed with, those of the shepherd that received the order. Without any, it needs no
    /// signature.
    pub trust: SigningTrust,
}

impl NewUpgrade {
    /// Checks whether such an upgrade is possible at all; if not, explains why.
    pub fn check(&self) -> Result<(), String> {
        if self.kubernetes.is_none() && self.roleserver.is_none() {
            return Err(
                "there is nothing to upgrade to; give --kubernetes-bundle BUNDLE, --roleserver-release RELEASE \
                 or both"
                    .to_owned(),
            );
        }
        if !(1..=MAX_PARALLELISM).contains(&self.parallelism) {
            return Err(format!("the parallelism must be 1 to {MAX_PARALLELISM}, not {}", self.parallelism));
        }
        if !NODE_DEADLINE_RANGE_SECONDS.contains(&self.deadline_seconds) {
            let (least, most) = (NODE_DEADLINE_RANGE_SECONDS.start(), NODE_DEADLINE_RANGE_SECONDS.end());
            return Err(format!("the deadline must be {least}s to {most}s, not {}s", self.deadline_seconds));
        }
        Ok(())
    }
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
    increment_version(tx, cluster, ORDERING).await?;
    Ok(id)
}

/// An upgrade as the audit stores it.
fn audit_json(line: &UpgradeRecord) -> Value {
    json!({
        "upgrade": line.upgrade.id, "back": line.upgrade.rolling_back, "paused": line.upgrade.pause_reason,
        "ended": line.ended.as_ref().map(|(_, how)| how),
    })
}
