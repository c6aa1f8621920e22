//! Upgrades of clusters: the orders about them, and how they are read.
//!
//! An order only changes what is wanted. What is in the way for good is refused here, in words; what may pass is waited for
//! by whoever holds the cluster's lease (`cluster_upgrade_work.rs`). The roll-out of a role server's release is ordered in
//! the same transaction, stands still with the upgrade and ends with it.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{ClusterAndMachines, clusters, locked, no_such, with_all};
use crate::bmdb::cluster_kubernetes::{bundle, kubernetes_of, refused, running};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::roll_out::{NewRollOut, begin_roll_out, busy};
use crate::model::artefact::read_digest;
use crate::model::cluster::kubernetes_view::{BundleView, UpgradeView};
use crate::model::cluster::spec::Part;
use crate::model::cluster::upgrade::{Asked, Bundle, DEADLINES, MOST_AT_A_TIME, Release, Upgrade};
use crate::model::kubernetes::skew::{Runs, beside, may_upgrade};
use crate::model::kubernetes::version::Version;
use crate::model::time::Timestamp;

const WHAT: &str = "reading upgrades of clusters";
const ORDERING: &str = "ordering an upgrade of a cluster";
/// How long a machine may take to become another release, in seconds.
const RELEASE_DEADLINE: u32 = 120;
/// Upgrades of one cluster that are remembered.
const KEPT: i64 = 10;

/// An upgrade with what people are told of it.
#[derive(Clone, Debug, PartialEq)]
pub struct UpgradeLine {
    /// What decisions need.
    pub upgrade: Upgrade,
    /// Name of the release that role servers become.
    pub release: Option<String>,
    /// The roll-out of that.
    pub roll_out: Option<String>,
    /// Whether it is through.
    pub released: bool,
    /// When it was ordered.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// Why.
    pub reason: String,
    /// When and how it ended.
    pub ended: Option<(Timestamp, String)>,
}

impl UpgradeLine {
    /// That it is in the way of something else, a sentence without its end.
    #[must_use]
    pub fn in_the_way(&self, name: &str) -> String {
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
    /// The release of role servers, likewise.
    pub roleserver: Option<String>,
    /// How many workers at a time.
    pub parallelism: u32,
    /// How long a node may take, in seconds.
    pub deadline_seconds: u32,
}

impl NewUpgrade {
    /// Whether there can be such a one; if not, a sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.kubernetes.is_none() && self.roleserver.is_none() {
            return Err(
                "nothing is to be upgraded; say --kubernetes BUNDLE, --roleserver RELEASE or both".to_owned()
            );
        }
        if !(1..=MOST_AT_A_TIME).contains(&self.parallelism) {
            return Err(format!("the parallelism is 1 to {MOST_AT_A_TIME}, and not {}", self.parallelism));
        }
        if !DEADLINES.contains(&self.deadline_seconds) {
            let (least, most) = (DEADLINES.start(), DEADLINES.end());
            return Err(format!("the deadline is {least}s to {most}s, and not {}s", self.deadline_seconds));
        }
        Ok(())
    }
}

/// What is done with an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpgradeChange {
    /// It goes back to what ran before.
    RollBack,
    /// It stands still.
    Pause,
    /// It goes on.
    Resume,
    /// It ends where it is.
    Abort,
}

/// The upgrade of a cluster that is under way, or else the newest one.
pub(crate) async fn upgrade_of(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<UpgradeLine>, BmdbError> {
    let row =
        sqlx::query_file!("sql/upgrade/read_newest.sql", cluster).fetch_optional(tx).await.doing(WHAT)?;
    let Some(row) = row else { return Ok(None) };
    let bundle = |digest: Option<Vec<u8>>, version: Option<String>| {
        Some(Bundle { digest: hex::encode(digest?), version: version? })
    };
    let asked: BTreeMap<String, Asked> = serde_json::from_value(row.asked)
        .map_err(|error| BmdbError::Corrupt(format!("the upgrade {}: {error}", row.upgrade_id)))?;
    let release = row.roll_out_id.clone().filter(|_| !row.released).map(|roll_out| Release {
        roll_out,
        paused: row.roll_out_paused,
        ended: if row.roll_out_there {
            row.roll_out_ended.map(|how| (how, u32::try_from(row.failed).unwrap_or(u32::MAX)))
        } else {
            // So long ago that it is forgotten.
            Some(("finished".to_owned(), 0))
        },
    });
    let upgrade = Upgrade {
        id: row.upgrade_id,
        bundles: bundle(row.from_bundle, row.from_version).zip(bundle(row.to_bundle, row.to_version)),
        back: row.back,
        parallelism: usize::try_from(row.parallelism).unwrap_or(1),
        deadline: std::time::Duration::from_secs(u64::try_from(row.deadline_seconds).unwrap_or(0)),
        paused: row.paused,
        release,
        elsewhere: row.elsewhere,
        asked,
    };
    Ok(Some(UpgradeLine {
        upgrade,
        release: row.release,
        roll_out: row.roll_out_id,
        released: row.released,
        created_at: row.created_at,
        created_by: row.created_by,
        reason: row.reason,
        ended: row.ended_at.zip(row.ended),
    }))
}

/// The upgrade of a cluster that is under way.
pub(crate) async fn upgrade_under_way(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Option<UpgradeLine>, BmdbError> {
    Ok(upgrade_of(tx, cluster).await?.filter(|found| found.ended.is_none()))
}

/// As people see it.
#[must_use]
pub(crate) fn view(line: &UpgradeLine) -> UpgradeView {
    let upgrade = &line.upgrade;
    let bundle =
        |bundle: &Bundle| BundleView { sha256: bundle.digest.clone(), version: bundle.version.clone() };
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    UpgradeView {
        id: upgrade.id.clone(),
        from: upgrade.bundles.as_ref().map(|(from, _)| bundle(from)),
        to: upgrade.bundles.as_ref().map(|(_, to)| bundle(to)),
        release: line.release.clone(),
        roll_out: line.roll_out.clone(),
        released: line.released,
        back: upgrade.back,
        parallelism: count(upgrade.parallelism),
        deadline_seconds: u32::try_from(upgrade.deadline.as_secs()).unwrap_or(u32::MAX),
        created_at: line.created_at,
        created_by: line.created_by.clone(),
        reason: line.reason.clone(),
        paused: upgrade.paused.clone(),
        ended_at: line.ended.as_ref().map(|(at, _)| *at),
        ended: line.ended.as_ref().map(|(_, how)| how.clone()),
        asked: count(upgrade.asked.len()),
        through: count(upgrade.asked.values().filter(|asked| asked.through).count()),
    }
}

impl Bmdb {
    /// Orders an upgrade of a cluster.
    pub async fn upgrade_cluster(
        &self,
        order: Order,
        name: String,
        new: NewUpgrade,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(ORDERING, move |tx| {
                let (order, name, new) = (order.clone(), name.clone(), new.clone());
                Box::pin(async move { create(tx, &order, &name, &new).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Changes the upgrade of a cluster that is under way, or takes back the last one.
    pub async fn change_upgrade(
        &self,
        order: Order,
        name: String,
        change: UpgradeChange,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("changing an upgrade of a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { alter(tx, &order, &name, change).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }
}

/// A cluster that can be upgraded, with all that is known of it; it is locked.
async fn upgradable(tx: &mut PgConnection, name: &str) -> Result<ClusterAndMachines, BmdbError> {
    locked(tx, name).await?;
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    let found = with_all(tx, cluster).await?;
    if found.cluster.founded.is_none() || found.cluster.restoring.is_some() {
        let said = format!("the cluster {name} is not there yet; see: shepherdctl cluster describe {name}");
        return Err(refused("NOT_FOUNDED", said));
    }
    Ok(found)
}

/// What nodes run, as they said last.
fn runs(found: &ClusterAndMachines) -> Vec<Runs> {
    let staying = found.machines.iter().filter(|line| line.member.leaving.is_none());
    let of = |line: &crate::bmdb::cluster::MachineLine| {
        let version = line.kubernetes.as_ref()?.version.parse().ok()?;
        Some(Runs {
            name: line.member.name.clone(),
            controller: line.member.part == Part::ControlPlane,
            version,
        })
    };
    staying.filter_map(of).collect()
}

fn version(said: &str) -> Result<Version, BmdbError> {
    said.parse()
        .map_err(|error| refused("NO_VERSION", format!("whether it may be upgraded cannot be said: {error}")))
}

async fn create(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    new: &NewUpgrade,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    new.check().map_err(|said| refused("WRONG_UPGRADE", said))?;
    let found = upgradable(tx, name).await?;
    let id = found.cluster.id;
    if let Some(upgrade) = upgrade_under_way(tx, id).await? {
        return Err(refused("UPGRADING", upgrade.in_the_way(name)));
    }
    let bundles = match &new.kubernetes {
        None => None,
        Some(said) => {
            let before = running(tx, id, name).await?.wanted.kubernetes;
            let (digest, to) = bundle(tx, said).await?;
            if digest == before.bundle && new.roleserver.is_none() {
                let said = format!("runs just that bundle (Kubernetes {to}) already; nothing was changed");
                return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
            }
            may_upgrade(&runs(&found), version(&before.version)?, version(&to)?).map_err(|said| {
                refused("SKEW", format!("the cluster {name} cannot be upgraded so: {}", said.join("; ")))
            })?;
            let from = Bundle { digest: before.bundle, version: before.version };
            Some((from, Bundle { digest, version: to }))
        }
    };
    let mut machines: Vec<(Uuid, String)> = (found.machines.iter())
        .filter(|line| line.member.leaving.is_none())
        .map(|line| (line.member.machine.0, line.member.name.clone()))
        .collect();
    machines.sort();
    busy(tx, &machines).await?;
    begin_attempt(tx, order).await?;
    let rolled = match &new.roleserver {
        None => None,
        Some(release) => {
            let roll_out = NewRollOut {
                release: release.clone(),
                selector: crate::model::cluster::selector::Selector::default(),
                parallelism: new.parallelism,
                deadline_seconds: RELEASE_DEADLINE,
            };
            let meant = format!("cluster {name}");
            Some(begin_roll_out(tx, order, &roll_out, &meant, &machines).await?)
        }
    };
    let upgrade = insert(tx, order, id, bundles.as_ref(), rolled.as_ref(), new, false).await?;
    end_attempt(tx, order).await?;
    let mut way = Vec::new();
    if let Some((_, release)) = &rolled {
        way.push(format!("its role servers become {release}"));
    }
    if let Some((from, to)) = &bundles {
        way.push(format!(
            "its controllers {} go from Kubernetes {} to {}, one by one",
            names(&found, Part::ControlPlane),
            from.version,
            to.version
        ));
        way.push(format!("its workers {} do, {} at a time", names(&found, Part::Worker), new.parallelism));
    }
    let said =
        format!("is upgraded: {}; watch it with: shepherdctl cluster describe {name}", way.join(", then "));
    let after = json!({
        "upgrade": upgrade,
        "from": bundles.as_ref().map(|(from, _)| &from.digest),
        "to": bundles.as_ref().map(|(_, to)| &to.digest),
        "update": rolled.map(|(roll_out, _)| roll_out),
    });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

fn names(found: &ClusterAndMachines, part: Part) -> String {
    let mut names: Vec<&str> = (found.machines.iter())
        .filter(|line| line.member.part == part && line.member.leaving.is_none())
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

async fn insert(
    tx: &mut PgConnection,
    order: &Order,
    cluster: Uuid,
    bundles: Option<&(Bundle, Bundle)>,
    rolled: Option<&(String, String)>,
    new: &NewUpgrade,
    back: bool,
) -> Result<String, BmdbError> {
    let id: String = Uuid::new_v4().simple().to_string().chars().take(8).collect();
    let digest = |bundle: &Bundle| read_digest(&bundle.digest).map(|digest| digest.0.to_vec());
    let from = bundles.map(|(from, _)| digest(from)).transpose().map_err(BmdbError::Corrupt)?;
    let to = bundles.map(|(_, to)| digest(to)).transpose().map_err(BmdbError::Corrupt)?;
    sqlx::query_file!("sql/upgrade/delete_old.sql", cluster, KEPT).execute(&mut *tx).await.doing(ORDERING)?;
    sqlx::query_file!(
        "sql/upgrade/insert.sql",
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
    .doing(ORDERING)?;
    sqlx::query_file!("sql/cluster/increment_version.sql", cluster).execute(tx).await.doing(ORDERING)?;
    Ok(id)
}

/// How it is, as the audit says it.
fn told(line: &UpgradeLine) -> Value {
    json!({
        "upgrade": line.upgrade.id, "back": line.upgrade.back, "paused": line.upgrade.paused,
        "ended": line.ended.as_ref().map(|(_, how)| how),
    })
}

async fn alter(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: UpgradeChange,
) -> Result<Carried, BmdbError> {
    const WHAT: &str = "changing an upgrade of a cluster";
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    if change == UpgradeChange::RollBack {
        return roll_back(tx, order, name).await;
    }
    let (id, _) = locked(tx, name).await?;
    let Some(line) = upgrade_under_way(tx, id).await? else {
        let said = "is not being upgraded; nothing was changed".to_owned();
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    };
    let (upgrade, before) = (&line.upgrade.id, told(&line));
    let roll_out = line.roll_out.as_ref().filter(|_| !line.released);
    let paused = line.upgrade.paused.as_ref().or_else(|| line.upgrade.release.as_ref()?.paused.as_ref());
    if change == UpgradeChange::Resume && paused.is_none() {
        let said = "does not stand still in its upgrade; nothing was changed".to_owned();
        let done = Done { changed: false, said };
        return write_down(tx, order, None, done, Some(before.clone()), Some(before)).await;
    }
    begin_attempt(tx, order).await?;
    let said = match change {
        UpgradeChange::Pause | UpgradeChange::Resume => {
            let why = (change == UpgradeChange::Pause)
                .then(|| format!("{} paused it: {}", order.actor.name, order.reason));
            let why = why.as_deref();
            sqlx::query_file!("sql/upgrade/set_paused.sql", upgrade, why)
                .execute(&mut *tx)
                .await
                .doing(WHAT)?;
            if let Some(roll_out) = roll_out {
                sqlx::query_file!("sql/roll_out/set_paused.sql", roll_out, why)
                    .execute(&mut *tx)
                    .await
                    .doing(WHAT)?;
            }
            if why.is_some() {
                "asks no more nodes; those that were asked go on".to_owned()
            } else {
                // Whoever was asked and is not through has as long again as at first.
                let asked: BTreeMap<&String, &Asked> =
                    line.upgrade.asked.iter().filter(|(_, asked)| asked.through).collect();
                sqlx::query_file!("sql/upgrade/set_requested_nodes.sql", upgrade, json!(asked))
                    .execute(&mut *tx)
                    .await
                    .doing(WHAT)?;
                "goes on with its upgrade; nodes that were not through are asked again".to_owned()
            }
        }
        UpgradeChange::Abort | UpgradeChange::RollBack => {
            if let Some(roll_out) = roll_out {
                end_roll_out(tx, roll_out).await?;
            }
            sqlx::query_file_scalar!("sql/upgrade/end.sql", upgrade, "aborted")
                .fetch_optional(&mut *tx)
                .await
                .doing(WHAT)?;
            "is upgraded no further: nodes that run the other bundle keep it, the others stay as they are; another upgrade \
             may go on from there"
                .to_owned()
        }
    };
    sqlx::query_file!("sql/cluster/increment_version.sql", id).execute(&mut *tx).await.doing(WHAT)?;
    let after = upgrade_of(tx, id).await?.as_ref().map(told);
    end_attempt(tx, order).await?;
    write_down(tx, order, None, Done { changed: true, said }, Some(before), after).await
}

/// Ends the roll-out of an upgrade where it is.
async fn end_roll_out(tx: &mut PgConnection, roll_out: &str) -> Result<(), BmdbError> {
    const WHAT: &str = "ending the roll-out of an upgrade";
    sqlx::query_file!("sql/roll_out/withdraw_orders.sql", roll_out).execute(&mut *tx).await.doing(WHAT)?;
    sqlx::query_file!("sql/roll_out/end.sql", roll_out, "aborted").execute(&mut *tx).await.doing(WHAT)?;
    sqlx::query_file!("sql/roll_out/end_machines.sql", roll_out).execute(tx).await.doing(WHAT)?;
    Ok(())
}

/// Goes back to what ran before: from where an upgrade is, or after the last one was through.
async fn roll_back(tx: &mut PgConnection, order: &Order, name: &str) -> Result<Carried, BmdbError> {
    let found = upgradable(tx, name).await?;
    let id = found.cluster.id;
    let last = upgrade_of(tx, id).await?;
    let nothing = |said: &str| refused("NOTHING_TO_ROLL_BACK", format!("the cluster {name} {said}"));
    let Some(line) = last else { return Err(nothing("was never upgraded; there is nothing to go back to")) };
    let Some((from, to)) = line.upgrade.bundles.clone() else {
        return Err(nothing(
            "was upgraded in its role servers alone; they go back with another release: shepherdctl update",
        ));
    };
    let before = told(&line);
    let (said, under_way) = match &line.ended {
        None if line.upgrade.back => {
            let said = "goes back already; nothing was changed".to_owned();
            let done = Done { changed: false, said };
            return write_down(tx, order, None, done, Some(before.clone()), Some(before)).await;
        }
        None => ("goes back from where it is", true),
        Some((_, how)) if how == "rolled back" => {
            return Err(nothing("has gone back after its last upgrade; there is nothing further back"));
        }
        Some((_, how)) if how == "aborted" && line.upgrade.back => {
            return Err(nothing("was stopped on its way back; upgrade it with: shepherdctl cluster upgrade"));
        }
        Some(_) => ("goes back to what it ran before", false),
    };
    let kept = kubernetes_of(tx, id).await?.map(|line| line.wanted.kubernetes.bundle);
    if !under_way && kept.as_ref().is_none_or(|kept| *kept != to.digest && *kept != from.digest) {
        return Err(nothing("runs another bundle by now than its last upgrade led to"));
    }
    // Nodes keep it, and those that come new fetch it.
    bundle(tx, &from.digest).await.map_err(|_| {
        nothing(&format!(
            "cannot go back: the artefact of its bundle before ({}) is gone; add it again",
            &from.digest[..16]
        ))
    })?;
    // Workers go first, so of them nothing is asked; controllers are of one minor or two.
    let controllers: Vec<Runs> = runs(&found).into_iter().filter(|node| node.controller).collect();
    let said_no = beside(&controllers, version(&from.version)?);
    if !said_no.is_empty() {
        return Err(refused("SKEW", format!("the cluster {name} cannot go back: {}", said_no.join("; "))));
    }
    let machines: Vec<(Uuid, String)> = (found.machines.iter())
        .filter(|line| line.member.leaving.is_none())
        .map(|line| (line.member.machine.0, line.member.name.clone()))
        .collect();
    if !under_way {
        busy(tx, &machines).await?;
    }
    begin_attempt(tx, order).await?;
    if under_way {
        if let Some(roll_out) = line.roll_out.as_ref().filter(|_| !line.released) {
            end_roll_out(tx, roll_out).await?;
        }
        sqlx::query_file!("sql/upgrade/start_rollback.sql", line.upgrade.id)
            .execute(&mut *tx)
            .await
            .doing(ORDERING)?;
        sqlx::query_file!("sql/cluster/increment_version.sql", id).execute(&mut *tx).await.doing(ORDERING)?;
    } else {
        let again = NewUpgrade {
            kubernetes: None,
            roleserver: None,
            parallelism: u32::try_from(line.upgrade.parallelism).unwrap_or(1),
            deadline_seconds: u32::try_from(line.upgrade.deadline.as_secs()).unwrap_or(u32::MAX),
        };
        let bundles = (from.clone(), to.clone());
        insert(tx, order, id, Some(&bundles), None, &again, true).await?;
    }
    let after = upgrade_of(tx, id).await?.as_ref().map(told);
    end_attempt(tx, order).await?;
    let said = format!(
        "{said}: workers first, then controllers one by one, from Kubernetes {} to {}; role servers stay as they are; watch it \
         with: shepherdctl cluster describe {name}",
        to.version, from.version
    );
    write_down(tx, order, None, Done { changed: true, said }, Some(before), after).await
}
