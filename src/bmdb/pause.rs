//! Loops that people paused, and the orders that pause and resume them.
//!
//! # How a pause is honoured
//!
//! A claim is as cheap as it was: nothing joins with pauses. Each loop of each shepherd knows which pauses
//! hold, as of [`BELIEVED`] ago at the most ([`Pauses`]), and leaves the providers out whose machines it may
//! not begin anything on. So a pause is honoured within seconds and not at once, and a claim that was on its
//! way brings its machine. A loop that cannot find out which pauses hold begins nothing.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::PgConnection;
use tokio::time::Instant;

use crate::bmdb::action::{Done, Until};
use crate::bmdb::approval::{gate, with_approval};
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::now;
use crate::bmdb::policy::policy_in;
use crate::model::pause::{Loop, LoopState, Pause, holding, not_paused};
use crate::model::second_person::Grave;
use crate::model::telling::{absolute, relative};
use crate::model::time::{Timestamp, after};

const WHAT: &str = "reading which loops are paused";
/// For how long a loop believes what it read.
pub const BELIEVED: Duration = Duration::from_secs(2);
/// How a pause of everybody's machines is stored.
const ALL: &str = "*";

/// A pause to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewPause {
    /// Of which loop.
    pub of: Loop,
    /// Of whose machines; `None` is everybody's.
    pub provider: Option<String>,
    /// When it ends by itself.
    pub until: Option<Until>,
    /// Who asks, as `why` will say it.
    pub by: String,
}

#[derive(Debug)]
struct Row {
    loop_name: String,
    provider: String,
    reason: String,
    paused_by: String,
    since: Timestamp,
    until: Option<Timestamp>,
    now: Timestamp,
}

impl Row {
    /// `None` for a loop that only a newer release knows: it is not ours to pause.
    fn understood(self) -> Option<Pause> {
        Some(Pause {
            of: self.loop_name.parse().ok()?,
            provider: Some(self.provider).filter(|provider| provider != ALL),
            reason: self.reason,
            by: self.paused_by,
            since: self.since,
            until: self.until,
        })
    }
}

/// Pauses that hold at the moment of this transaction.
pub async fn pauses(tx: &mut PgConnection) -> Result<Vec<Pause>, BmdbError> {
    let rows = sqlx::query_file_as!(Row, "sql/loop_pause/list.sql").fetch_all(tx).await.doing(WHAT)?;
    Ok(rows.into_iter().filter_map(Row::understood).collect())
}

/// Every loop as it is, and when that was.
pub async fn loops(tx: &mut PgConnection) -> Result<(Vec<LoopState>, Timestamp), BmdbError> {
    let pauses = pauses(tx).await?;
    let rows =
        sqlx::query_file!("sql/loop_pause/count_sessions.sql").fetch_all(&mut *tx).await.doing(WHAT)?;
    let sessions: Vec<(String, i64)> = rows.into_iter().map(|row| (row.component, row.workers)).collect();
    Ok((LoopState::all(&pauses, &sessions), now(tx).await?))
}

/// What a loop knows of pauses.
#[derive(Debug, Default)]
pub struct Pauses {
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    read: Instant,
    at: Timestamp,
    pauses: Vec<Pause>,
}

impl Pauses {
    /// Whether the next question is answered without asking the database.
    #[must_use]
    pub fn are_known(&self) -> bool {
        self.known.as_ref().is_some_and(|known| known.read.elapsed() < BELIEVED)
    }

    /// Those of `providers` on whose machines the loop may begin something.
    pub async fn left(
        &mut self,
        bmdb: &Bmdb,
        of: Loop,
        providers: &[String],
    ) -> Result<Vec<String>, BmdbError> {
        let known = self.known(bmdb).await?;
        Ok(not_paused(&known.pauses, of, providers, known.at))
    }

    /// The pause of a loop that has no providers, and when that was read.
    pub async fn of_all(&mut self, bmdb: &Bmdb, of: Loop) -> Result<Option<(Pause, Timestamp)>, BmdbError> {
        let known = self.known(bmdb).await?;
        Ok(holding(&known.pauses, of, "", known.at).next().map(|pause| (pause.clone(), known.at)))
    }

    async fn known(&mut self, bmdb: &Bmdb) -> Result<&Known, BmdbError> {
        let known = match self.known.take().filter(|known| known.read.elapsed() < BELIEVED) {
            Some(known) => known,
            None => bmdb.known_pauses().await?,
        };
        Ok(self.known.insert(known))
    }
}

impl Bmdb {
    /// Pauses that hold now.
    pub async fn pauses(&self) -> Result<Vec<Pause>, BmdbError> {
        Ok(self.known_pauses().await?.pauses)
    }

    async fn known_pauses(&self) -> Result<Known, BmdbError> {
        let read = Instant::now();
        let rows = self
            .statement(WHAT, |connection| {
                Box::pin(async move {
                    sqlx::query_file_as!(Row, "sql/loop_pause/list.sql").fetch_all(connection).await
                })
            })
            .await?;
        // Without any it makes no difference which moment it is.
        let at = rows.first().map_or(Timestamp::UNIX_EPOCH, |row| row.now);
        Ok(Known { read, at, pauses: rows.into_iter().filter_map(Row::understood).collect() })
    }

    /// Pauses a loop.
    pub async fn pause_loop(&self, order: Order, new: NewPause) -> Result<Carried, BmdbError> {
        let (given, new) = (order.clone(), Arc::new(new));
        let carried = self
            .ordered("pausing a loop", move |tx| {
                let (order, new) = (order.clone(), new.clone());
                Box::pin(async move { pause(tx, &order, &new).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Ends a pause.
    pub async fn resume_loop(
        &self,
        order: Order,
        of: Loop,
        provider: Option<String>,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("resuming a loop", move |tx| {
                let (order, provider) = (order.clone(), provider.clone());
                Box::pin(async move { resume(tx, &order, of, provider.as_deref()).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }
}

/// The row of a pause, over or not.
async fn found(
    tx: &mut PgConnection,
    of: Loop,
    provider: Option<&str>,
) -> Result<Option<(Pause, bool)>, BmdbError> {
    let row = sqlx::query_file!("sql/loop_pause/lock.sql", of.as_str(), provider.unwrap_or(ALL))
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    Ok(row.map(|row| {
        let pause = Pause {
            of,
            provider: provider.map(str::to_owned),
            reason: row.reason,
            by: row.paused_by,
            since: row.since,
            until: row.until,
        };
        (pause, row.holds)
    }))
}

async fn pause(tx: &mut PgConnection, order: &Order, new: &NewPause) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (of, provider) = (new.of, new.provider.as_deref());
    if let Some(provider) = provider.filter(|_| !of.has_providers()) {
        let said = format!(
            "the loop {of} cannot be paused for {provider} alone: a cluster may have machines of several providers; \
             leave --provider out to pause it for all clusters"
        );
        return Err(BmdbError::OrderRefused { reason: "LOOP_WITHOUT_PROVIDERS", said });
    }
    let stored = found(tx, of, provider).await?;
    let now = now(tx).await?;
    let until = new.until.map(|until| match until {
        Until::After(span) => after(now, span.0),
        Until::At(moment) => moment,
    });
    let before = stored.as_ref().filter(|(_, holds)| *holds).map(|(pause, _)| told(pause));
    if let Some(over) = until.filter(|until| *until <= now) {
        let said = format!("is not paused: {} is over; nothing was changed", absolute(over));
        return write_down(tx, order, None, Done { changed: false, said }, before.clone(), before).await;
    }
    let pause = Pause {
        of,
        provider: new.provider.clone(),
        reason: order.reason.clone(),
        by: new.by.clone(),
        since: now,
        until,
    };
    let stranger = match provider {
        None => false,
        Some(provider) => !sqlx::query_file_scalar!("sql/loop_pause/provider_exists.sql", provider)
            .fetch_one(&mut *tx)
            .await
            .doing(WHAT)?,
    };
    let approved = if provider.is_none() {
        let policy = policy_in(tx).await?;
        gate(tx, order, Grave::PauseForAll, policy.second_person, &[]).await?
    } else {
        None
    };
    let said = paused_sentence(&pause, before.is_some(), stranger, now);
    let done = Done { changed: true, said: with_approval(said, approved.as_deref()) };
    begin_attempt(tx, order).await?;
    keep(tx, &pause, stored.is_some()).await?;
    end_attempt(tx, order).await?;
    write_down(tx, order, None, done, before, Some(told(&pause))).await
}

fn paused_sentence(pause: &Pause, replaces: bool, stranger: bool, now: Timestamp) -> String {
    let ends = pause.until.map_or_else(
        || "until it is resumed".to_owned(),
        |at| format!("until {} ({})", absolute(at), relative(at, now)),
    );
    let replaced = if replaces { ", in place of an earlier pause" } else { "" };
    let stranger =
        if stranger { "; no provider of that name is known here yet: see that it is spelt so" } else { "" };
    format!(
        "is paused {ends}{replaced}; every shepherd heeds that within seconds, and what is under way goes \
         on{stranger}"
    )
}

async fn keep(tx: &mut PgConnection, pause: &Pause, replaces: bool) -> Result<(), BmdbError> {
    let (of, provider) = (pause.of.as_str(), pause.provider.as_deref().unwrap_or(ALL));
    let (reason, by) = (pause.reason.as_str(), pause.by.as_str());
    let what = "pausing a loop";
    if replaces {
        sqlx::query_file!("sql/loop_pause/update.sql", of, provider, reason, by, pause.since, pause.until)
            .execute(tx)
            .await
            .doing(what)?;
        return Ok(());
    }
    sqlx::query_file!("sql/loop_pause/insert.sql", of, provider, reason, by, pause.since, pause.until)
        .fetch_optional(tx)
        .await
        .doing(what)?
        .map(drop)
        .ok_or(BmdbError::OrderedAtOnce)
}

async fn resume(
    tx: &mut PgConnection,
    order: &Order,
    of: Loop,
    provider: Option<&str>,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let before = found(tx, of, provider).await?.filter(|(_, holds)| *holds).map(|(pause, _)| pause);
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/loop_pause/delete.sql", of.as_str(), provider.unwrap_or(ALL))
        .execute(&mut *tx)
        .await
        .doing("resuming a loop")?;
    let others: Vec<Pause> = pauses(tx).await?.into_iter().filter(|pause| pause.of == of).collect();
    end_attempt(tx, order).await?;
    let done = Done { changed: before.is_some(), said: resumed_sentence(before.as_ref(), provider, &others) };
    write_down(tx, order, None, done, before.as_ref().map(told), None).await
}

/// What was resumed, and what is paused all the same.
fn resumed_sentence(before: Option<&Pause>, provider: Option<&str>, others: &[Pause]) -> String {
    let mut said = match before {
        Some(pause) => format!("is resumed (was paused by {}: {})", pause.by, pause.reason),
        None => "is not paused so; nothing was changed".to_owned(),
    };
    let still: Vec<String> = others
        .iter()
        .filter(|pause| provider.is_none() || pause.provider.is_none())
        .map(|pause| format!("{} is paused by {} (`{}` ends that)", pause.what(), pause.by, pause.resume()))
        .collect();
    if !still.is_empty() {
        said.push_str("; but ");
        said.push_str(&still.join(", "));
    }
    said
}

/// A pause as the audit says it.
fn told(pause: &Pause) -> Value {
    json!({
        "loop": pause.of.as_str(),
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
    fn whoever_resumes_hears_what_is_paused_all_the_same() {
        let pause = |provider: Option<&str>| Pause {
            of: Loop::Updater,
            provider: provider.map(str::to_owned),
            reason: "r".to_owned(),
            by: "kim".to_owned(),
            since: Timestamp::UNIX_EPOCH,
            until: None,
        };
        let (all, rack) = (pause(None), pause(Some("rack")));
        for (before, provider, others, expected) in [
            (Some(&all), None, vec![], "is resumed (was paused by kim: r)"),
            (None, None, vec![], "is not paused so; nothing was changed"),
            (
                Some(&rack),
                Some("rack"),
                vec![all.clone()],
                "is resumed (was paused by kim: r); but the updater is paused by kim (`shepherdctl loops resume updater` \
                 ends that)",
            ),
            // Another provider's is nothing to whoever named this one.
            (Some(&rack), Some("rack"), vec![pause(Some("other"))], "is resumed (was paused by kim: r)"),
            (
                None,
                None,
                vec![rack.clone()],
                "is not paused so; nothing was changed; but the updater of rack is paused by kim (`shepherdctl loops \
                 resume updater --provider rack` ends that)",
            ),
        ] {
            assert_eq!(resumed_sentence(before, provider, &others), expected);
        }
    }
}
