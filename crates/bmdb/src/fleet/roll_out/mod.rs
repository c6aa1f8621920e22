//! Roll-outs of role server releases: order, pause, resume, abort, list.
//!
//! An order only changes the desired state; the holder of the roll-out lease sends the requests to machines
//! (`transitions`). Both lock, pause and end a roll-out with the functions of `row`.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::read_policy_in_tx;
use crate::fleet::artefact::list_artefacts;
use crate::fleet::roll_out::candidates::list_selected_machines;
use crate::fleet::roll_out::row::{abort_roll_out, lock_roll_out, set_roll_out_paused};
use crate::orders::order::{Order, OrderEffect, OrderRejection, OrderResult};
use model::artefact::{find_artefact, parse_digest};
use model::ids::MachineId;
use model::role_declaration::Sha256;
use model::roll_out::{DEADLINE_RANGE_SECONDS, MAX_MACHINES, MAX_PARALLELISM};
use model::roll_out_view::{RollOutMachineView, RollOutView, roll_out_note};
use model::selector::Selector;
use model::signed_artefact::signature::ArtefactSignature;
use model::signed_artefact::{ExpectedFields, SignatureRejection, compare_fields};
use model::time::Timestamp;

mod candidates;
pub(crate) mod row;
#[cfg(feature = "sealing")]
pub mod transitions;

const OPERATION: &str = "reading roll-outs";
const ORDERING: &str = "ordering a roll-out";
/// Ended roll-outs that are retained.
pub const MAX_ENDED_ROLL_OUTS: i64 = 50;

/// The target of orders about roll-outs, for people.
#[must_use]
pub fn order_target(id: &str) -> String {
    format!("the update {id}")
}

/// A roll-out to order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRollOut {
    /// The release: an artefact's digest, the beginning of it, or its name.
    pub release: String,
    /// Selects the machines of the roll-out.
    pub selector: Selector,
    /// How many machines at a time.
    pub parallelism: u32,
    /// How long each machine may take, in seconds.
    pub deadline_seconds: u32,
}

impl NewRollOut {
    /// Checks whether such a roll-out is possible at all; if not, explains why.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=MAX_PARALLELISM).contains(&self.parallelism) {
            return Err(format!("the parallelism must be 1 to {MAX_PARALLELISM}, not {}", self.parallelism));
        }
        if !DEADLINE_RANGE_SECONDS.contains(&self.deadline_seconds) {
            let (least, most) = (DEADLINE_RANGE_SECONDS.start(), DEADLINE_RANGE_SECONDS.end());
            return Err(format!("the deadline must be {least}s to {most}s, not {}s", self.deadline_seconds));
        }
        Ok(())
    }
}

/// A change of a roll-out under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollOutChange {
    /// Ask no more machines for now.
    Pause,
    /// Continue after a pause.
    Resume,
    /// End it where it is.
    Abort,
}

/// All roll-outs, or the one of that id with its machines, those under way first; and the database's clock when they
/// were read.
pub async fn list_roll_outs(
    tx: &mut PgConnection,
    id: Option<&str>,
) -> Result<(Vec<RollOutView>, Timestamp), BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/roll_out/list.sql", id).fetch_all(&mut *tx).await.context(OPERATION)?;
    let mut counts: BTreeMap<String, BTreeMap<String, u32>> = BTreeMap::new();
    for row in sqlx::query!(
        r#"SELECT roll_out_id, state, count(*) AS "count!" FROM roll_out_machine
           WHERE $1::TEXT IS NULL OR roll_out_id = $1
           GROUP BY roll_out_id, state"#,
        id
    )
    .fetch_all(&mut *tx)
    .await
    .context(OPERATION)?
    {
        let count = u32::try_from(row.count).unwrap_or(u32::MAX);
        counts.entry(row.roll_out_id).or_default().insert(row.state, count);
    }
    let mut found = Vec::new();
    for row in rows {
        // All machines of all roll-outs would be more than a client can use at once.
        let machines = match id {
            None => Vec::new(),
            Some(id) => sqlx::query_file!("../../sql/roll_out/list_machines.sql", id)
                .fetch_all(&mut *tx)
                .await
                .context(OPERATION)?,
        };
        let machines = machines.into_iter().map(|row| RollOutMachineView {
            machine: row.machine_id.to_string(),
            name: row.provider_id.unwrap_or_else(|| row.machine_id.to_string()),
            state: row.state,
            message: row.message,
            state_since: row.changed_at,
        });
        let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
        found.push(RollOutView {
            counts: counts.remove(&row.roll_out_id).unwrap_or_default(),
            id: row.roll_out_id,
            release: row.release,
            sha256: hex::encode(row.sha256),
            selector: row.selector,
            parallelism: count(row.parallelism),
            deadline_seconds: count(row.deadline_seconds),
            created_at: row.created_at,
            created_by: row.created_by,
            reason: row.reason,
            pause_reason: row.paused,
            ended_at: row.ended_at,
            outcome: row.ended,
            machines: machines.collect(),
        });
    }
    Ok((found, database_now(tx).await?))
}

/// A sentence about the roll-out that a machine is in; `None` if it is in none.
pub(crate) async fn read_roll_out_note(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<String>, BmdbError> {
    let row = sqlx::query!(
        "SELECT o.roll_out_id, o.release, o.paused, m.state, m.message
         FROM roll_out_machine m JOIN roll_out o ON o.roll_out_id = m.roll_out_id
         WHERE m.machine_id = $1 AND m.active",
        machine.0
    )
    .fetch_optional(tx)
    .await
    .context(OPERATION)?;
    Ok(row.map(|row| {
        roll_out_note(
            &row.roll_out_id,
            &row.release,
            &row.state,
            row.paused.as_deref(),
            row.message.as_deref(),
        )
    }))
}

impl Bmdb {
    /// Orders a new roll-out over the selected machines.
    pub async fn create_roll_out(&self, order: Order, new: NewRollOut) -> Result<OrderResult, BmdbError> {
        self.execute_order(ORDERING, order, None, new, |tx, order, new| {
            Box::pin(create_roll_out_in_tx(tx, order, new))
        })
        .await
    }

    /// Changes a roll-out that is under way.
    pub async fn change_roll_out(
        &self,
        order: Order,
        id: String,
        change: RollOutChange,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("changing a roll-out", order, None, (id, change), |tx, order, (id, change)| {
            Box::pin(change_roll_out_in_tx(tx, order, id, *change))
        })
        .await
    }
}

/// Checks that a stored signature is one of a release. A shepherd verified it when it was added. The error is a sentence.
fn check_release_signature(signature: Option<&str>) -> Result<(), String> {
    let signature = signature.ok_or_else(|| {
        format!(
            "{}: shepherdctl artefacts add FILE --signature FILE.minisig; where releases are not signed, start a shepherd \
             with --allow_unsigned_releases true",
            SignatureRejection::Unsigned
        )
    })?;
    let signature = ArtefactSignature::parse(signature).map_err(|error| error.to_string())?;
    let expected = ExpectedFields { architecture: None, ..ExpectedFields::release("") };
    compare_fields(signature.fields(), &expected).map_err(|error| error.to_string())
}

/// Resolves and locks the release that a text names: its complete digest and its name. A transaction that tries to
/// remove it waits, and then finds that it is in use.
async fn lock_release(tx: &mut PgConnection, text: &str) -> Result<(Sha256, String), BmdbError> {
    let (all, _) = list_artefacts(tx).await?;
    let release = find_artefact(&all, text).map_err(|reason| order_rejected("NO_SUCH_RELEASE", reason))?;
    let Some(name) = release.name.clone() else {
        return Err(order_rejected(
            "NO_SUCH_RELEASE",
            format!("the artefact {} is not whole yet", release.sha256),
        ));
    };
    let digest = parse_digest(&release.sha256).map_err(BmdbError::Corrupt)?;
    let there = sqlx::query_file!("../../sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(&mut *tx)
        .await
        .context(ORDERING)?;
    let Some(there) = there.filter(|there| there.added_at.is_some()) else {
        return Err(order_rejected("NO_SUCH_RELEASE", format!("the artefact {} is gone", release.sha256)));
    };
    if !read_policy_in_tx(tx).await?.allow_unsigned_releases {
        check_release_signature(there.signature.as_deref()).map_err(|reason| {
            order_rejected("NOT_SIGNED", format!("{name} cannot be rolled out: {reason}"))
        })?;
    }
    Ok((digest, name))
}

/// Rejects machines that are in a roll-out already.
pub(crate) async fn reject_machines_in_roll_outs(
    tx: &mut PgConnection,
    machines: &[(Uuid, String)],
) -> Result<(), BmdbError> {
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let busy = sqlx::query!(
        "SELECT m.machine_id, m.roll_out_id FROM roll_out_machine m
         WHERE m.active AND m.machine_id = ANY ($1)
         ORDER BY m.machine_id LIMIT 5",
        &ids
    )
    .fetch_all(tx)
    .await
    .context(ORDERING)?;
    let Some(first) = busy.first() else { return Ok(()) };
    let text = format!(
        "{} is in the update {}, which has not ended; wait for it, or: shepherdctl update abort {}",
        machine_name(machines, first.machine_id),
        first.roll_out_id,
        first.roll_out_id
    );
    Err(order_rejected("BUSY", text))
}

/// Rejects machines of a cluster that is being upgraded: a cluster has one change at a time.
async fn reject_machines_in_upgrades(
    tx: &mut PgConnection,
    machines: &[(Uuid, String)],
) -> Result<(), BmdbError> {
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let busy = sqlx::query_file!("../../sql/upgrade/list_machines_in_upgrades.sql", &ids)
        .fetch_all(tx)
        .await
        .context(ORDERING)?;
    let Some(first) = busy.first() else { return Ok(()) };
    let text = format!(
        "{} is of the cluster {}, which is being upgraded; wait for it, or: shepherdctl cluster upgrade {} --abort",
        machine_name(machines, first.machine_id),
        first.name,
        first.name
    );
    Err(order_rejected("BUSY", text))
}

fn machine_name(machines: &[(Uuid, String)], machine: Uuid) -> &str {
    let found = machines.iter().find(|(id, _)| *id == machine);
    found.map_or("a machine", |(_, name)| name.as_str())
}

/// Begins a roll-out over these machines, as a part of the order that includes it; `meant` describes them. Returns its
/// id and the release's name.
pub(crate) async fn begin_roll_out_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewRollOut,
    meant: &str,
    machines: &[(Uuid, String)],
) -> Result<(String, String), BmdbError> {
    new.check().map_err(|reason| order_rejected("WRONG_UPDATE", reason))?;
    let (digest, name) = lock_release(tx, &new.release).await?;
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    let id = insert_roll_out(tx, order, new, meant, (digest, &name), &ids).await?;
    Ok((id, name))
}

async fn insert_roll_out(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewRollOut,
    meant: &str,
    (digest, name): (Sha256, &str),
    machines: &[Uuid],
) -> Result<String, BmdbError> {
    let id: String = Uuid::new_v4().simple().to_string().chars().take(8).collect();
    sqlx::query!(
        "DELETE FROM roll_out_machine WHERE roll_out_id IN (SELECT roll_out_id FROM roll_out
             WHERE ended_at IS NOT NULL ORDER BY ended_at DESC, roll_out_id OFFSET $1)",
        MAX_ENDED_ROLL_OUTS
    )
    .execute(&mut *tx)
    .await
    .context(ORDERING)?;
    sqlx::query!(
        "DELETE FROM roll_out WHERE roll_out_id IN (SELECT roll_out_id FROM roll_out
             WHERE ended_at IS NOT NULL ORDER BY ended_at DESC, roll_out_id OFFSET $1)",
        MAX_ENDED_ROLL_OUTS
    )
    .execute(&mut *tx)
    .await
    .context(ORDERING)?;
    sqlx::query!(
        "INSERT INTO roll_out (roll_out_id, sha256, release, selector, parallelism, deadline_seconds,
             created_at, created_by, reason)
         VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp(), $7, $8)",
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
    .context(ORDERING)?;
    sqlx::query!(
        "INSERT INTO roll_out_machine (roll_out_id, machine_id, state, changed_at, active)
         SELECT $1, machine_id, 'waiting', clock_timestamp(), TRUE FROM unnest($2::UUID[]) AS n (machine_id)",
        id,
        machines
    )
    .execute(tx)
    .await
    .context(ORDERING)?;
    Ok(id)
}

/// Checks how many machines the selector of a roll-out fits; the error is why that is too few or too many.
fn check_machine_count(machines: usize) -> Result<(), OrderRejection> {
    match machines {
        0 => Err((
            "NO_MACHINES",
            "no machine fits the selector; shepherdctl get machines lists them all".to_owned(),
        )),
        many if many > MAX_MACHINES => Err((
            "TOO_MANY",
            format!("the selector means {many} machines, and one update has {MAX_MACHINES} at the most"),
        )),
        _ => Ok(()),
    }
}

async fn create_roll_out_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewRollOut,
) -> Result<OrderEffect, BmdbError> {
    new.check().map_err(|reason| order_rejected("WRONG_UPDATE", reason))?;
    let (digest, name) = lock_release(tx, &new.release).await?;
    let machines = list_selected_machines(tx, &new.selector).await?;
    check_machine_count(machines.len()).map_err(|(reason, text)| order_rejected(reason, text))?;
    let ids: Vec<Uuid> = machines.iter().map(|(machine, _)| *machine).collect();
    reject_machines_in_roll_outs(tx, &machines).await?;
    reject_machines_in_upgrades(tx, &machines).await?;
    let id = insert_roll_out(tx, order, new, &new.selector.to_string(), (digest, &name), &ids).await?;
    let names: Vec<&str> = machines.iter().map(|(_, name)| name.as_str()).collect();
    let shown = names.iter().take(20).copied().collect::<Vec<_>>().join(", ");
    let more = if names.len() > 20 { format!(" and {} more", names.len() - 20) } else { String::new() };
    let text = format!(
        "rolls {name} out to {} machines, {} at a time: {shown}{more}; watch it with: shepherdctl describe update {id}",
        names.len(),
        new.parallelism
    );
    let after = json!({
        "update": id, "release": name, "sha256": hex::encode(digest.0), "select": new.selector.to_string(),
        "parallelism": new.parallelism, "machines": names,
    });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

async fn change_roll_out_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    id: &str,
    change: RollOutChange,
) -> Result<OrderEffect, BmdbError> {
    const OPERATION: &str = "changing a roll-out";
    let Some(known) = lock_roll_out(tx, id, OPERATION).await? else {
        return Err(order_rejected(
            "NO_SUCH_UPDATE",
            format!("there is no update {id:?}; run: shepherdctl get updates"),
        ));
    };
    let reported = |paused: Option<&String>, ended: Option<&str>| -> Value {
        json!({ "update": id, "paused": paused, "ended": ended })
    };
    let before = reported(known.paused.as_ref(), known.ended.as_deref());
    if let Some(ended) = known.ended {
        let text = format!("is {ended}; nothing was changed");
        return Ok(match change {
            RollOutChange::Abort => OrderEffect::already(text, Some(before)),
            RollOutChange::Pause | RollOutChange::Resume => OrderEffect::no_effect(text, Some(before)),
        });
    }
    if change == RollOutChange::Resume && known.paused.is_none() {
        return Ok(OrderEffect::already("is not paused; nothing was changed", Some(before)));
    }
    let (text, after) = match change {
        RollOutChange::Pause => {
            let why = format!("{} paused it: {}", order.actor.name, order.reason);
            set_roll_out_paused(tx, id, Some(why.as_str()), OPERATION).await?;
            let text = "orders no more machines to update; those with an order continue";
            (text.to_owned(), reported(Some(&why), None))
        }
        RollOutChange::Resume => {
            set_roll_out_paused(tx, id, None, OPERATION).await?;
            let text =
                "continues with the machines that have no order yet; those that failed stay as they are";
            (text.to_owned(), reported(None, None))
        }
        RollOutChange::Abort => {
            abort_roll_out(tx, id, OPERATION).await?;
            let output = "has ended; machines that had an order may have begun with the release, the others stay as \
                          they are";
            (output.to_owned(), reported(known.paused.as_ref(), Some("aborted")))
        }
    };
    Ok(OrderEffect::changed(text, Some(before), Some(after)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selector_that_fits_no_machine_is_distinguished_from_one_that_too_many_fit() {
        for (machines, expected) in
            [(0, Some("NO_MACHINES")), (1, None), (MAX_MACHINES, None), (MAX_MACHINES + 1, Some("TOO_MANY"))]
        {
            let reason = check_machine_count(machines).err().map(|(reason, _)| reason);
            assert_eq!(reason, expected, "{machines}");
        }
    }
}
