//! Roll-outs of releases: the orders about them, and how they are read.
//!
//! An order only changes what is wanted; machines are asked by whoever holds the lease of roll-outs (`roll_out_work`).

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::artefact::artefacts;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster_candidates::hardware;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::model::artefact::{find, read_digest};
use crate::model::cluster::selector::{Selector, Traits};
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::model::roll_out::{DEADLINES, MOST, MOST_AT_A_TIME};
use crate::model::roll_out_view::{RollOutMachineView, RollOutView, note};
use crate::model::time::Timestamp;

const WHAT: &str = "reading roll-outs";
const ORDERING: &str = "ordering a roll-out";
/// Machines that one statement reads.
const PAGE: i64 = 1_000;
/// Roll-outs that have ended and are kept.
const KEPT: i64 = 50;

/// What orders about roll-outs are about, for people.
#[must_use]
pub fn target(id: &str) -> String {
    format!("the update {id}")
}

/// A roll-out to order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRollOut {
    /// The release: an artefact's digest, the beginning of it, or its name.
    pub release: String,
    /// Which machines.
    pub selector: Selector,
    /// How many at a time.
    pub parallelism: u32,
    /// How long each may take, in seconds.
    pub deadline_seconds: u32,
}

impl NewRollOut {
    /// Whether there can be such a one; if not, a sentence.
    pub fn check(&self) -> Result<(), String> {
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

/// What is done with a roll-out that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollOutChange {
    /// It stands still.
    Pause,
    /// It goes on.
    Resume,
    /// It ends where it is.
    Abort,
}

fn refused(reason: &'static str, said: impl Into<String>) -> BmdbError {
    BmdbError::OrderRefused { reason, said: said.into() }
}

/// All of them, or the one of that id with its machines, those under way first; and the database's clock then.
pub async fn roll_outs(
    tx: &mut PgConnection,
    id: Option<&str>,
) -> Result<(Vec<RollOutView>, Timestamp), BmdbError> {
    let rows = sqlx::query_file!("sql/roll_out/list.sql", id).fetch_all(&mut *tx).await.doing(WHAT)?;
    let mut counts: BTreeMap<String, BTreeMap<String, u32>> = BTreeMap::new();
    for row in sqlx::query_file!("sql/roll_out/count_machine_states.sql", id)
        .fetch_all(&mut *tx)
        .await
        .doing(WHAT)?
    {
        let count = u32::try_from(row.count).unwrap_or(u32::MAX);
        counts.entry(row.roll_out_id).or_default().insert(row.state, count);
    }
    let mut found = Vec::new();
    for row in rows {
        // All machines of all roll-outs would be more than anybody takes at once.
        let machines = match id {
            None => Vec::new(),
            Some(id) => sqlx::query_file!("sql/roll_out/list_machines.sql", id)
                .fetch_all(&mut *tx)
                .await
                .doing(WHAT)?,
        };
        let machines = machines.into_iter().map(|row| RollOutMachineView {
            machine: row.machine_id.to_string(),
            name: row.provider_id.unwrap_or_else(|| row.machine_id.to_string()),
            state: row.state,
            said: row.said,
            changed_at: row.changed_at,
        });
        let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
        found.push(RollOutView {
            counts: counts.remove(&row.roll_out_id).unwrap_or_default(),
            id: row.roll_out_id,
            release: row.release,
            sha256: hex::encode(row.sha256),
            select: row.selector,
            parallelism: count(row.parallelism),
            deadline_seconds: count(row.deadline_seconds),
            created_at: row.created_at,
            created_by: row.created_by,
            reason: row.reason,
            paused: row.paused,
            ended_at: row.ended_at,
            ended: row.ended,
            machines: machines.collect(),
        });
    }
    Ok((found, inspect::now(tx).await?))
}

/// The sentence about the roll-out that a machine is in, if it is in one.
pub(crate) async fn note_of(tx: &mut PgConnection, machine: MachineId) -> Result<Option<String>, BmdbError> {
    let row = sqlx::query_file!("sql/roll_out/find_by_machine.sql", machine.0)
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    Ok(row.map(|row| {
        note(&row.roll_out_id, &row.release, &row.state, row.paused.as_deref(), row.said.as_deref())
    }))
}

impl Bmdb {
    /// Orders a roll-out.
    pub async fn roll_out(&self, order: Order, new: NewRollOut) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(ORDERING, move |tx| {
                let (order, new) = (order.clone(), new.clone());
                Box::pin(async move { create(tx, &order, &new).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Changes a roll-out that is under way.
    pub async fn change_roll_out(
        &self,
        order: Order,
        id: String,
        change: RollOutChange,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("changing a roll-out", move |tx| {
                let (order, id) = (order.clone(), id.clone());
                Box::pin(async move { alter(tx, &order, &id, change).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }
}

/// Machines that a selector means, by their ids, with their names.
async fn meant(tx: &mut PgConnection, selector: &Selector) -> Result<Vec<(Uuid, String)>, BmdbError> {
    let (mut found, mut after) = (Vec::new(), Uuid::nil());
    loop {
        let rows = sqlx::query_file!("sql/roll_out/list_candidates.sql", after, PAGE)
            .fetch_all(&mut *tx)
            .await
            .doing(ORDERING)?;
        let last = rows.last().map(|row| row.machine_id);
        let whole = i64::try_from(rows.len()).unwrap_or(PAGE) == PAGE;
        found.extend(rows.into_iter().filter_map(|row| {
            let labels = row.labels.and_then(|labels| serde_json::from_value(labels).ok());
            let traits = Traits {
                provider: row.provider,
                location: row.location,
                hardware: hardware(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads),
                labels: labels.unwrap_or_default(),
            };
            selector.holds(&traits).then_some((row.machine_id, row.provider_id))
        }));
        match last.filter(|_| whole) {
            Some(last) => after = last,
            None => return Ok(found),
        }
    }
}

/// The release that somebody means, whole: its digest and its name. Nobody removes it from here on: whoever tries waits, and
/// finds that it is used.
async fn release(tx: &mut PgConnection, said: &str) -> Result<(Sha256, String), BmdbError> {
    let (all, _) = artefacts(tx).await?;
    let release = find(&all, said).map_err(|said| refused("NO_SUCH_RELEASE", said))?;
    let Some(name) = release.name.clone() else {
        return Err(refused("NO_SUCH_RELEASE", format!("the artefact {} is not whole yet", release.sha256)));
    };
    let digest = read_digest(&release.sha256).map_err(BmdbError::Corrupt)?;
    let there = sqlx::query_file!("sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(tx)
        .await
        .doing(ORDERING)?;
    if there.is_none_or(|there| there.added_at.is_none()) {
        return Err(refused("NO_SUCH_RELEASE", format!("the artefact {} is gone", release.sha256)));
    }
    Ok((digest, name))
}

/// Refuses machines that are in a roll-out already.
pub(crate) async fn busy(tx: &mut PgConnection, machines: &[(Uuid, String)]) -> Result<(), BmdbError> {
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let busy = sqlx::query_file!("sql/roll_out/list_machines_in_other_roll_outs.sql", &ids)
        .fetch_all(tx)
        .await
        .doing(ORDERING)?;
    let Some(first) = busy.first() else { return Ok(()) };
    let said = format!(
        "{} is in the update {}, which has not ended; wait for it, or: shepherdctl update abort {}",
        name_of(machines, first.machine_id),
        first.roll_out_id,
        first.roll_out_id
    );
    Err(refused("BUSY", said))
}

/// Refuses machines of a cluster that is being upgraded: of one cluster one thing is done at a time.
async fn being_upgraded(tx: &mut PgConnection, machines: &[(Uuid, String)]) -> Result<(), BmdbError> {
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let busy = sqlx::query_file!("sql/upgrade/list_machines_in_upgrades.sql", &ids)
        .fetch_all(tx)
        .await
        .doing(ORDERING)?;
    let Some(first) = busy.first() else { return Ok(()) };
    let said = format!(
        "{} is of the cluster {}, which is being upgraded; wait for it, or: shepherdctl cluster upgrade {} --abort",
        name_of(machines, first.machine_id),
        first.name,
        first.name
    );
    Err(refused("BUSY", said))
}

fn name_of(machines: &[(Uuid, String)], machine: Uuid) -> &str {
    let found = machines.iter().find(|(id, _)| *id == machine);
    found.map_or("a machine", |(_, name)| name.as_str())
}

/// Begins a roll-out over these machines, as a part of something that orders it; `meant` says which they are. Answers with
/// its id and the release's name.
pub(crate) async fn begin_roll_out(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewRollOut,
    meant: &str,
    machines: &[(Uuid, String)],
) -> Result<(String, String), BmdbError> {
    new.check().map_err(|said| refused("WRONG_UPDATE", said))?;
    let (digest, name) = release(tx, &new.release).await?;
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let id = insert(tx, order, new, meant, (digest, &name), &ids).await?;
    Ok((id, name))
}

async fn insert(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewRollOut,
    meant: &str,
    (digest, name): (Sha256, &str),
    machines: &[Uuid],
) -> Result<String, BmdbError> {
    let id: String = Uuid::new_v4().simple().to_string().chars().take(8).collect();
    sqlx::query_file!("sql/roll_out/delete_old_machines.sql", KEPT)
        .execute(&mut *tx)
        .await
        .doing(ORDERING)?;
    sqlx::query_file!("sql/roll_out/delete_old.sql", KEPT).execute(&mut *tx).await.doing(ORDERING)?;
    sqlx::query_file!(
        "sql/roll_out/insert.sql",
        id,
        digest.0.as_slice(),
        name,
        meant,
        i64::from(new.parallelism),
        i64::from(new.deadline_seconds),
        order.actor.name,
        order.reason
    )
    .execute(&mut *tx)
    .await
    .doing(ORDERING)?;
    sqlx::query_file!("sql/roll_out/insert_machines.sql", id, machines).execute(tx).await.doing(ORDERING)?;
    Ok(id)
}

async fn create(tx: &mut PgConnection, order: &Order, new: &NewRollOut) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    new.check().map_err(|said| refused("WRONG_UPDATE", said))?;
    let (digest, name) = release(tx, &new.release).await?;
    let machines = meant(tx, &new.selector).await?;
    if machines.is_empty() || machines.len() > MOST {
        let said = match machines.len() {
            0 => "no machine fits the selector; shepherdctl get machines lists them all".to_owned(),
            many => format!("the selector means {many} machines, and one update has {MOST} at the most"),
        };
        return Err(refused("NO_MACHINES", said));
    }
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    busy(tx, &machines).await?;
    being_upgraded(tx, &machines).await?;
    begin_attempt(tx, order).await?;
    let id = insert(tx, order, new, &new.selector.to_string(), (digest, &name), &ids).await?;
    end_attempt(tx, order).await?;
    let names: Vec<&str> = machines.iter().map(|(_, name)| name.as_str()).collect();
    let shown = names.iter().take(20).copied().collect::<Vec<_>>().join(", ");
    let more = if names.len() > 20 { format!(" and {} more", names.len() - 20) } else { String::new() };
    let said = format!(
        "rolls {name} out to {} machines, {} at a time: {shown}{more}; watch it with: shepherdctl update describe {id}",
        names.len(),
        new.parallelism
    );
    let after = json!({
        "update": id, "release": name, "sha256": hex::encode(digest.0), "select": new.selector.to_string(),
        "parallelism": new.parallelism, "machines": names,
    });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

async fn alter(
    tx: &mut PgConnection,
    order: &Order,
    id: &str,
    change: RollOutChange,
) -> Result<Carried, BmdbError> {
    const WHAT: &str = "changing a roll-out";
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let known = sqlx::query_file!("sql/roll_out/lock.sql", id).fetch_optional(&mut *tx).await.doing(WHAT)?;
    let Some(known) = known else {
        return Err(refused(
            "NO_SUCH_UPDATE",
            format!("there is no update {id:?}; run: shepherdctl update get"),
        ));
    };
    let told = |paused: Option<&String>, ended: Option<&str>| -> Value {
        json!({ "update": id, "paused": paused, "ended": ended })
    };
    let before = told(known.paused.as_ref(), known.ended.as_deref());
    if let Some(ended) = known.ended {
        let said = format!("is {ended}; nothing was changed");
        let done = Done { changed: false, said };
        return write_down(tx, order, None, done, Some(before.clone()), Some(before)).await;
    }
    begin_attempt(tx, order).await?;
    let (said, after) = match change {
        RollOutChange::Pause => {
            let why = format!("{} paused it: {}", order.actor.name, order.reason);
            sqlx::query_file!("sql/roll_out/set_paused.sql", id, Some(why.as_str()) as Option<&str>)
                .execute(&mut *tx)
                .await
                .doing(WHAT)?;
            ("asks no more machines; those that were asked go on".to_owned(), told(Some(&why), None))
        }
        RollOutChange::Resume => {
            sqlx::query_file!("sql/roll_out/set_paused.sql", id, None as Option<&str>)
                .execute(&mut *tx)
                .await
                .doing(WHAT)?;
            let said =
                "goes on with the machines that were not asked yet; those that failed stay as they are";
            (said.to_owned(), told(None, None))
        }
        RollOutChange::Abort => {
            sqlx::query_file!("sql/roll_out/withdraw_orders.sql", id).execute(&mut *tx).await.doing(WHAT)?;
            sqlx::query_file!("sql/roll_out/end.sql", id, "aborted").execute(&mut *tx).await.doing(WHAT)?;
            sqlx::query_file!("sql/roll_out/end_machines.sql", id).execute(&mut *tx).await.doing(WHAT)?;
            let said = "has ended; machines that were asked may have begun with the release, the others stay as they are";
            (said.to_owned(), told(known.paused.as_ref(), Some("aborted")))
        }
    };
    end_attempt(tx, order).await?;
    write_down(tx, order, None, Done { changed: true, said }, Some(before), Some(after)).await
}
