//! Budgets and brakes as the BMDB has them, and the order that sets a budget.
//!
//! A budget is a part of the policy. Whoever asks whether a step may be taken reads the policy's version with the
//! facts, in the transaction that records the step, so another budget counts with the next step in every
//! shepherd. What was put off for want of it before is looked at again at the moment that was said then.
//!
//! No flag of a shepherd writes a budget, so one that was set stays until it is set again.

use std::fmt::Write as _;

use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::bmdb::action::Done;
use crate::bmdb::approval::{gate, with_approval};
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::bmdb::policy::{lock_policy, write_policy};
use crate::model::budget::{
    BrakeState, BudgetChange, BudgetKind, BudgetLine, ProviderBrake, Used, brakes, line,
};
use crate::model::policy::{Budget, Policy};
use crate::model::second_person::Grave;
use crate::model::time::Timestamp;

const WHAT: &str = "counting a budget";

/// Every budget and every brake, and when that was.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Budgets, gentlest first.
    pub budgets: Vec<BudgetLine>,
    /// Brakes, recovery's first.
    pub brakes: Vec<BrakeState>,
    /// The database's clock.
    pub at: Timestamp,
}

/// Every budget of this policy, and every brake.
pub async fn bounds(tx: &mut PgConnection, policy: &Policy) -> Result<Bounds, BmdbError> {
    let mut budgets = Vec::with_capacity(BudgetKind::ALL.len());
    for kind in BudgetKind::ALL {
        let budget = kind.of(policy);
        budgets.push(line(kind, budget, used(tx, kind, budget).await?));
    }
    let on = inspect::brakes(tx).await?;
    let providers: Vec<ProviderBrake> = inspect::providers(tx)
        .await?
        .into_iter()
        .map(|line| ProviderBrake { provider: line.provider, reason: line.brake, since: line.brake_since })
        .collect();
    Ok(Bounds { budgets, brakes: brakes(&on, &providers, policy), at: inspect::now(tx).await? })
}

/// What of a budget was used. Where the policy has none, nobody counts.
async fn used(tx: &mut PgConnection, kind: BudgetKind, budget: Option<Budget>) -> Result<Used, BmdbError> {
    let Some(budget) = budget else { return Ok(Used::default()) };
    let window = budget.window.float_milliseconds();
    let found = sqlx::query_file!("sql/intent/count_budget_use.sql", kind.as_str(), window)
        .fetch_one(&mut *tx)
        .await
        .doing(WHAT)?;
    let count = u32::try_from(found.count).unwrap_or(u32::MAX);
    let frees = match budget.count.checked_sub(1) {
        Some(but) if count > but => sqlx::query_file_scalar!(
            "sql/intent/find_budget_release.sql",
            kind.as_str(),
            window,
            i64::from(but)
        )
        .fetch_optional(tx)
        .await
        .doing(WHAT)?,
        _ => None,
    };
    Ok(Used { count, frees })
}

impl Bmdb {
    /// Sets a budget.
    pub async fn set_budget(
        &self,
        order: Order,
        kind: BudgetKind,
        change: BudgetChange,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("setting a budget", move |tx| {
                let order = order.clone();
                Box::pin(async move { set(tx, &order, kind, change).await })
            })
            .await;
        let carried = self.note_refusal(carried, &given, None).await?;
        self.read_policy().await?;
        Ok(carried)
    }
}

async fn set(
    tx: &mut PgConnection,
    order: &Order,
    kind: BudgetKind,
    change: BudgetChange,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let mut policy = lock_policy(tx).await?;
    let before = kind.of(&policy);
    let budget =
        change.of(before).map_err(|said| BmdbError::OrderRefused { reason: "NO_SUCH_BUDGET", said })?;
    let (was, is) = (before.map(|budget| told(kind, budget)), told(kind, budget));
    if before == Some(budget) {
        let said = format!("is {} already; nothing was changed", words(budget));
        return write_down(tx, order, None, Done { changed: false, said }, was, Some(is)).await;
    }
    let by = gate(tx, order, Grave::SetBudget, policy.second_person, &[]).await?;
    kind.set(&mut policy, budget);
    begin_attempt(tx, order).await?;
    write_policy(tx, &policy, &order.actor.name).await?;
    end_attempt(tx, order).await?;
    let used = used(tx, kind, Some(budget)).await?;
    let done = Done { changed: true, said: with_approval(sentence(before, budget, used), by.as_deref()) };
    write_down(tx, order, None, done, was, Some(is)).await
}

/// What became of a budget, and what that means for what is going on.
fn sentence(before: Option<Budget>, budget: Budget, used: Used) -> String {
    let was = before.map_or_else(|| "unbounded".to_owned(), words);
    let mut said = format!("is {} (was {was}), from the next step on in every shepherd", words(budget));
    if used.count >= budget.count && budget.count > 0 {
        let _ = write!(said, "; {} began within it, so that none may for now", used.count);
    }
    if before.is_some_and(|before| before.count < budget.count) {
        said.push_str("; what waits for it already looks again when it was told to");
    }
    said
}

fn words(budget: Budget) -> String {
    format!("{} in {}", budget.count, budget.window)
}

/// A budget as the audit says it.
fn told(kind: BudgetKind, budget: Budget) -> Value {
    json!({ "budget": kind.as_str(), "most": budget.count, "window": budget.window })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::Span;

    #[test]
    fn whoever_sets_a_budget_hears_what_that_means_now() {
        let budget = |count| Budget { count, window: Span::minutes(10) };
        let used = |count| Used { count, frees: None };
        let tail = ", from the next step on in every shepherd";
        for (before, after, used, expected) in [
            (Some(budget(20)), budget(5), used(1), format!("is 5 in 10m (was 20 in 10m){tail}")),
            (None, budget(5), used(0), format!("is 5 in 10m (was unbounded){tail}")),
            (
                Some(budget(20)),
                budget(5),
                used(7),
                format!("is 5 in 10m (was 20 in 10m){tail}; 7 began within it, so that none may for now"),
            ),
            (Some(budget(20)), budget(0), used(7), format!("is 0 in 10m (was 20 in 10m){tail}")),
            (
                Some(budget(5)),
                budget(20),
                used(5),
                format!(
                    "is 20 in 10m (was 5 in 10m){tail}; what waits for it already looks again when it was told to"
                ),
            ),
        ] {
            assert_eq!(sentence(before, after, used), expected);
        }
    }
}
