//! Pausing and resuming control loops, with a cache of the pauses in force.
//!
//! # How a pause is honoured
//!
//! A claim costs no more than before: nothing joins with pauses. Each loop of each shepherd knows the pauses in force,
//! at most [`CACHE_TTL`] old ([`PauseCache`]), and leaves out the providers on whose machines it may not begin
//! anything. So a pause is honoured within seconds and not at once, and a claim under way brings its machine. A loop
//! that cannot read the pauses begins nothing.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::PgConnection;
use tokio::time::Instant;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::read_policy_in_tx;
use crate::orders::approval::{append_approver, require_second_approval};
use crate::orders::order::{
    EXPIRY_PASSED, Expiry, Order, OrderEffect, OrderOutcome, OrderResult, OutcomeKind,
};
use model::humanize::{absolute_time, remaining_time};
use model::pause::{LoopKind, LoopState, Pause, active_pauses, unpaused_providers};
use model::time::Timestamp;
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "reading which loops are paused";
/// How long a loop relies on the pauses that it read.
pub const CACHE_TTL: Duration = Duration::from_secs(2);
/// How a pause for all providers is stored.
const ALL_PROVIDERS: &str = "*";

/// A pause to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPause {
    /// The loop to pause.
    pub paused_loop: LoopKind,
    /// The provider whose machines it is paused for; `None` is all.
    pub provider: Option<String>,
    /// When it ends by itself; `None` is never.
    pub until: Option<Expiry>,
    /// Name of the actor, as `why` shows it.
    pub actor: String,
}

#[derive(Debug)]
struct PauseRow {
    loop_name: String,
    provider: String,
    reason: String,
    paused_by: String,
    since: Timestamp,
    until: Option<Timestamp>,
    now: Timestamp,
}

impl PauseRow {
    /// Decodes the row; `None` for a loop that only a newer release knows: it is not ours to pause.
    fn into_pause(self) -> Option<Pause> {
        Some(Pause {
            loop_kind: self.loop_name.parse().ok()?,
            provider: Some(self.provider).filter(|provider| provider != ALL_PROVIDERS),
            reason: self.reason,
            by: self.paused_by,
            since: self.since,
            until: self.until,
        })
    }
}

/// Pauses in force at the moment of this transaction.
pub(crate) async fn list_pauses(tx: &mut PgConnection) -> Result<Vec<Pause>, BmdbError> {
    let rows = sqlx::query_file_as!(PauseRow, "../../sql/loop_pause/list.sql")
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows.into_iter().filter_map(PauseRow::into_pause).collect())
}

/// Every loop with its state, and the database's clock.
pub async fn list_loops(tx: &mut PgConnection) -> Result<(Vec<LoopState>, Timestamp), BmdbError> {
    let pauses = list_pauses(tx).await?;
    let rows = sqlx::query_file!("../../sql/loop_pause/count_sessions.sql")
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let sessions: Vec<(String, i64)> = rows.into_iter().map(|row| (row.component, row.workers)).collect();
    Ok((LoopState::all(&pauses, &sessions), database_now(tx).await?))
}

/// The pauses that a loop has read.
#[derive(Debug, Default)]
pub struct PauseCache {
    cached: Option<CachedPauses>,
}

#[derive(Debug)]
struct CachedPauses {
    fetched_at: Instant,
    as_of: Timestamp,
    pauses: Vec<Pause>,
}

impl PauseCache {
    /// Whether the next call is answered from the cache.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.cached.as_ref().is_some_and(|known| known.fetched_at.elapsed() < CACHE_TTL)
    }

    /// Those of `providers` on whose machines the loop may begin work.
    pub async fn unpaused_providers(
        &mut self,
        bmdb: &Bmdb,
        of: LoopKind,
        providers: &[String],
    ) -> Result<Vec<String>, BmdbError> {
        let known = self.refresh(bmdb).await?;
        Ok(unpaused_providers(&known.pauses, of, providers, known.as_of))
    }

    /// The pause of a loop that has no providers, and when it was read.
    pub async fn pause_of_loop(
        &mut self,
        bmdb: &Bmdb,
        of: LoopKind,
    ) -> Result<Option<(Pause, Timestamp)>, BmdbError> {
        let known = self.refresh(bmdb).await?;
        Ok(active_pauses(&known.pauses, of, "", known.as_of).next().map(|pause| (pause.clone(), known.as_of)))
    }

    async fn refresh(&mut self, bmdb: &Bmdb) -> Result<&CachedPauses, BmdbError> {
        let known = match self.cached.take().filter(|known| known.fetched_at.elapsed() < CACHE_TTL) {
            Some(known) => known,
            None => bmdb.fetch_pauses().await?,
        };
        Ok(self.cached.insert(known))
    }
}

impl Bmdb {
    /// Pauses in force now.
    pub(crate) async fn list_pauses(&self) -> Result<Vec<Pause>, BmdbError> {
        Ok(self.fetch_pauses().await?.pauses)
    }

    async fn fetch_pauses(&self) -> Result<CachedPauses, BmdbError> {
        let read = Instant::now();
        let rows = self
            .statement(OPERATION, |connection| {
                Box::pin(
                    sqlx::query_file_as!(PauseRow, "../../sql/loop_pause/list.sql").fetch_all(connection),
                )
            })
            .await?;
        // Without any pause it does not matter which moment it is.
        let at = rows.first().map_or(Timestamp::UNIX_EPOCH, |row| row.now);
        Ok(CachedPauses {
            fetched_at: read,
            as_of: at,
            pauses: rows.into_iter().filter_map(PauseRow::into_pause).collect(),
        })
    }

    /// Pauses a loop on behalf of the order's actor.
    pub async fn pause_loop(&self, order: Order, new: NewPause) -> Result<OrderResult, BmdbError> {
        self.execute_order("pausing a loop", order, None, new, |tx, order, new| {
            Box::pin(pause_loop_in_tx(tx, order, new))
        })
        .await
    }

    /// Ends a pause of a loop, for one provider or for all.
    pub async fn resume_loop(
        &self,
        order: Order,
        of: LoopKind,
        provider: Option<String>,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order("resuming a loop", order, None, (of, provider), |tx, _, (of, provider)| {
            Box::pin(resume_loop_in_tx(tx, *of, provider.as_deref()))
        })
        .await
    }
}

/// Locks the row of a pause, whether it is in force or has ended.
async fn lock_pause(
    tx: &mut PgConnection,
    of: LoopKind,
    provider: Option<&str>,
) -> Result<Option<(Pause, bool)>, BmdbError> {
    let row =
        sqlx::query_file!("../../sql/loop_pause/lock.sql", of.as_str(), provider.unwrap_or(ALL_PROVIDERS))
            .fetch_optional(tx)
            .await
            .context(OPERATION)?;
    Ok(row.map(|row| {
        let pause = Pause {
            loop_kind: of,
            provider: provider.map(str::to_owned),
            reason: row.reason,
            by: row.paused_by,
            since: row.since,
            until: row.until,
        };
        (pause, row.holds)
    }))
}

async fn pause_loop_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    new: &NewPause,
) -> Result<OrderEffect, BmdbError> {
    let (of, provider) = (new.paused_loop, new.provider.as_deref());
    if let Some(provider) = provider.filter(|_| !of.has_providers()) {
        let text = format!(
            "the loop {of} cannot be paused for {provider} alone: a cluster may have machines of several providers; \
             leave --provider out to pause it for all clusters"
        );
        return Err(order_rejected("LOOP_WITHOUT_PROVIDERS", text));
    }
    let stored = lock_pause(tx, of, provider).await?;
    let now = database_now(tx).await?;
    let until = new.until.map(|until| until.resolve(now));
    let before = stored.as_ref().filter(|(_, holds)| *holds).map(|(pause, _)| audit_json(pause));
    if let Some(over) = until.filter(|until| *until <= now) {
        let text =
            format!("the loop {of} is not paused: {} is over; nothing was changed", absolute_time(over));
        return Err(order_rejected(EXPIRY_PASSED, text));
    }
    let pause = Pause {
        loop_kind: of,
        provider: new.provider.clone(),
        reason: order.reason.clone(),
        by: new.actor.clone(),
        since: now,
        until,
    };
    let stranger = match provider {
        None => false,
        // A provider is known if it was queried once, or has a machine.
        Some(provider) => !sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM provider_state WHERE provider = $1)
                   OR EXISTS (SELECT 1 FROM machine_provided WHERE provider = $1) AS "exists!""#,
            provider
        )
        .fetch_one(&mut *tx)
        .await
        .context(OPERATION)?,
    };
    let approved = if provider.is_none() {
        let policy = read_policy_in_tx(tx).await?;
        let end = new.until.map_or_else(|| "until it is resumed".to_owned(), Expiry::describe);
        let shown = Order { target: format!("{}, {end}", order.target), ..order.clone() };
        require_second_approval(tx, &shown, SensitiveOrder::PauseForAll, policy.two_person_rule, &[]).await?
    } else {
        None
    };
    let text = pause_message(&pause, before.is_some(), stranger, now);
    store_pause(tx, &pause, stored.is_some()).await?;
    Ok(OrderEffect::changed(append_approver(text, approved.as_deref()), before, Some(audit_json(&pause))))
}

fn pause_message(pause: &Pause, replaces: bool, stranger: bool, now: Timestamp) -> String {
    let ends = pause.until.map_or_else(|| "until it is resumed".to_owned(), |at| remaining_time(at, now));
    let replaced = if replaces { ", in place of an earlier pause" } else { "" };
    let stranger =
        if stranger { "; no provider of that name is known here yet: check its spelling" } else { "" };
    format!(
        "is paused {ends}{replaced}; every shepherd follows the pause within seconds, and running work \
         continues{stranger}"
    )
}

async fn store_pause(tx: &mut PgConnection, pause: &Pause, replaces: bool) -> Result<(), BmdbError> {
    let (of, provider) = (pause.loop_kind.as_str(), pause.provider.as_deref().unwrap_or(ALL_PROVIDERS));
    let (reason, by) = (pause.reason.as_str(), pause.by.as_str());
    let what = "pausing a loop";
    if replaces {
        sqlx::query!(
            "UPDATE loop_pause SET reason = $3, paused_by = $4, since = $5, until = $6
             WHERE loop_name = $1 AND provider = $2",
            of,
            provider,
            reason,
            by,
            pause.since,
            pause.until
        )
        .execute(tx)
        .await
        .context(what)?;
        return Ok(());
    }
    sqlx::query_file!("../../sql/loop_pause/insert.sql", of, provider, reason, by, pause.since, pause.until)
        .fetch_optional(tx)
        .await
        .context(what)?
        .map(drop)
        .ok_or(BmdbError::DuplicateOrderInProgress)
}

async fn resume_loop_in_tx(
    tx: &mut PgConnection,
    of: LoopKind,
    provider: Option<&str>,
) -> Result<OrderEffect, BmdbError> {
    let before = lock_pause(tx, of, provider).await?.filter(|(_, holds)| *holds).map(|(pause, _)| pause);
    sqlx::query!(
        "DELETE FROM loop_pause WHERE loop_name = $1 AND provider = $2",
        of.as_str(),
        provider.unwrap_or(ALL_PROVIDERS)
    )
    .execute(&mut *tx)
    .await
    .context("resuming a loop")?;
    let others: Vec<Pause> =
        list_pauses(tx).await?.into_iter().filter(|pause| pause.loop_kind == of).collect();
    let still = pauses_in_force(provider, &others);
    let message = resume_message(before.as_ref(), &still);
    let outcome = OrderOutcome { kind: resume_outcome(before.is_some(), !still.is_empty()), message };
    Ok(OrderEffect { outcome, before: before.as_ref().map(audit_json), after: None })
}

/// The pauses that still stop what was resumed.
fn pauses_in_force<'a>(provider: Option<&str>, others: &'a [Pause]) -> Vec<&'a Pause> {
    others.iter().filter(|pause| provider.is_none() || pause.provider.is_none()).collect()
}

/// What an order to resume did. Where there was no such pause, the loop runs already unless another pause stops it.
const fn resume_outcome(was_paused: bool, is_still_paused: bool) -> OutcomeKind {
    match (was_paused, is_still_paused) {
        (true, _) => OutcomeKind::Changed,
        (false, false) => OutcomeKind::Already,
        (false, true) => OutcomeKind::NoEffect,
    }
}

/// What was resumed, and what is still paused by other pauses.
fn resume_message(before: Option<&Pause>, others: &[&Pause]) -> String {
    let mut text = match before {
        Some(pause) => format!("is resumed (was paused by {}: {})", pause.by, pause.reason),
        None => "has no such pause; nothing was changed".to_owned(),
    };
    let still: Vec<String> = others
        .iter()
        .map(|pause| {
            format!(
                "{} is paused by {} (`{}` ends that)",
                pause.describe_target(),
                pause.by,
                pause.resume_command()
            )
        })
        .collect();
    if !still.is_empty() {
        text.push_str("; but ");
        text.push_str(&still.join(", "));
    }
    text
}

/// A pause as the audit stores it.
fn audit_json(pause: &Pause) -> Value {
    json!({
        "loop": pause.loop_kind.as_str(),
        "provider": pause.provider,
        "reason": pause.reason,
        "by": pause.by,
        "since": pause.since,
        "until": pause.until,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_in_vain_is_distinguished_from_one_that_is_not_needed() {
        for (was_paused, is_still_paused, expected) in [
            (true, false, OutcomeKind::Changed),
            (true, true, OutcomeKind::Changed),
            (false, false, OutcomeKind::Already),
            (false, true, OutcomeKind::NoEffect),
        ] {
            assert_eq!(resume_outcome(was_paused, is_still_paused), expected);
        }
    }

    #[test]
    fn resume_message_lists_pauses_that_remain() {
        let pause = |provider: Option<&str>| Pause {
            loop_kind: LoopKind::Updater,
            provider: provider.map(str::to_owned),
            reason: "r".to_owned(),
            by: "kim".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            until: None,
        };
        let (all, rack) = (pause(None), pause(Some("rack")));
        for (before, provider, others, expected) in [
            (Some(&all), None, vec![], "is resumed (was paused by kim: r)"),
            (None, None, vec![], "has no such pause; nothing was changed"),
            (
                Some(&rack),
                Some("rack"),
                vec![all.clone()],
                "is resumed (was paused by kim: r); but the updater is paused by kim (`shepherdctl loops resume updater` \
                 ends that)",
            ),
            // Another provider's pause does not concern an operator who named this one.
            (Some(&rack), Some("rack"), vec![pause(Some("other"))], "is resumed (was paused by kim: r)"),
            (
                None,
                None,
                vec![rack.clone()],
                "has no such pause; nothing was changed; but the updater of rack is paused by kim (`shepherdctl \
                 loops resume updater --provider rack` ends that)",
            ),
        ] {
            assert_eq!(resume_message(before, &pauses_in_force(provider, &others)), expected);
        }
    }
}
