//! Disruption budgets and brakes: reading their use, and the order that sets a budget.
//!
//! A budget is a part of the policy. The transaction that records a disruptive step reads the policy's version together
//! with the facts, so a changed budget counts from the next step in every shepherd. Work that was postponed for lack of
//! budget before is tried again at the time chosen then.
//!
//! No flag of a shepherd writes a budget, so a budget stays until it is set again.

use std::fmt::Write as _;

use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::policy::{lock_policy, write_policy};
use crate::fleet::brake::list_brakes;
use crate::fleet::provider::list_providers;
use crate::orders::approval::{append_approver, require_second_approval};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::budget::{
    BrakeState, BudgetChange, BudgetKind, BudgetStatus, BudgetUsage, ProviderBrake, brake_states,
    budget_status,
};
use model::policy::{Budget, Policy};
use model::time::Timestamp;
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "counting a budget";

/// Every budget and every brake at one moment.
#[derive(Clone, Debug)]
pub struct BudgetsAndBrakes {
    /// All budgets, from the gentlest disruption to the harshest.
    pub budgets: Vec<BudgetStatus>,
    /// All brakes, the recovery brake first.
    pub brakes: Vec<BrakeState>,
    /// The database's clock when they were read.
    pub at: Timestamp,
}

/// Reads every budget of this policy, and every brake.
pub async fn read_budgets_and_brakes(
    tx: &mut PgConnection,
    policy: &Policy,
) -> Result<BudgetsAndBrakes, BmdbError> {
    let mut budgets = Vec::with_capacity(BudgetKind::ALL.len());
    for kind in BudgetKind::ALL {
        let budget = kind.budget_in(policy);
        budgets.push(budget_status(kind, budget, count_used(tx, kind, budget).await?));
    }
    let on = list_brakes(tx).await?;
    let providers: Vec<ProviderBrake> = list_providers(tx)
        .await?
        .into_iter()
        .map(|line| ProviderBrake { provider: line.provider, reason: line.brake, since: line.brake_since })
        .collect();
    Ok(BudgetsAndBrakes {
        budgets,
        brakes: brake_states(&on, &providers, policy),
        at: database_now(tx).await?,
    })
}

/// How much of a budget is used. Nothing is counted where the policy has no such budget.
async fn count_used(
    tx: &mut PgConnection,
    kind: BudgetKind,
    budget: Option<Budget>,
) -> Result<BudgetUsage, BmdbError> {
    let Some(budget) = budget else { return Ok(BudgetUsage::default()) };
    let window = budget.window.float_milliseconds();
    let found = sqlx::query_file!("../../sql/intent/count_budget_use.sql", kind.as_str(), window)
        .fetch_one(&mut *tx)
        .await
        .context(OPERATION)?;
    let count = u32::try_from(found.count).unwrap_or(u32::MAX);
    let frees = match budget.count.checked_sub(1) {
        Some(but) if count > but => sqlx::query_file_scalar!(
            "../../sql/intent/find_budget_release.sql",
            kind.as_str(),
            window,
            i64::from(but)
        )
        .fetch_optional(tx)
        .await
        .context(OPERATION)?,
        _ => None,
    };
    Ok(BudgetUsage { count, blocking_since: frees })
}

impl Bmdb {
    /// Sets a budget on behalf of the order's actor.
    pub async fn set_budget(
        &self,
        order: Order,
        kind: BudgetKind,
        change: BudgetChange,
    ) -> Result<OrderResult, BmdbError> {
        let carried = self
            .execute_order("setting a budget", order, None, (kind, change), |tx, order, (kind, change)| {
                Box::pin(set_budget_in_tx(tx, order, *kind, *change))
            })
            .await?;
        self.read_policy().await?;
        Ok(carried)
    }
}

async fn set_budget_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    kind: BudgetKind,
    change: BudgetChange,
) -> Result<OrderEffect, BmdbError> {
    let mut policy = lock_policy(tx).await?;
    let before = kind.budget_in(&policy);
    let budget = change.apply_to(before).map_err(|reason| order_rejected("NO_SUCH_BUDGET", reason))?;
    let (was, is) = (before.map(|budget| audit_json(kind, budget)), audit_json(kind, budget));
    if before == Some(budget) {
        let text = format!("is {} already; nothing was changed", describe_budget(budget));
        return Ok(OrderEffect::already(text, Some(is)));
    }
    let shown = Order { target: approval_target(kind, before, budget), ..order.clone() };
    // Exactly the new budget that was approved, also where the order leaves a part of it as it is.
    let about = describe_budget(budget);
    let (rule, about) = (policy.two_person_rule, about.as_bytes());
    let by = require_second_approval(tx, &shown, SensitiveOrder::SetBudget, rule, about).await?;
    kind.set_in(&mut policy, budget);
    write_policy(tx, &policy, &order.actor.name).await?;
    let used = count_used(tx, kind, Some(budget)).await?;
    let text = append_approver(change_message(before, budget, used), by.as_deref());
    Ok(OrderEffect::changed(text, was, Some(is)))
}

/// The change for the admin who approves it.
fn approval_target(kind: BudgetKind, before: Option<Budget>, budget: Budget) -> String {
    format!("{}: {} -> {}", kind.audit_target(), describe_former_budget(before), describe_budget(budget))
}

/// The message of a changed budget, and what it means for steps under way.
fn change_message(before: Option<Budget>, budget: Budget, used: BudgetUsage) -> String {
    let was = describe_former_budget(before);
    let mut text =
        format!("is {} (was {was}), from the next step on in every shepherd", describe_budget(budget));
    if used.count >= budget.count && budget.count > 0 {
        let _ = write!(text, "; {} began within it, so that none may for now", used.count);
    }
    if before.is_some_and(|before| before.count < budget.count) {
        text.push_str("; work that already waits for it tries again at its scheduled time");
    }
    text
}

fn describe_former_budget(before: Option<Budget>) -> String {
    before.map_or_else(|| "unbounded".to_owned(), describe_budget)
}

fn describe_budget(budget: Budget) -> String {
    format!("{} in {}", budget.count, budget.window)
}

/// A budget as the audit stores it.
fn audit_json(kind: BudgetKind, budget: Budget) -> Value {
    json!({ "budget": kind.as_str(), "most": budget.count, "window": budget.window })
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::policy::DisruptionKind;
    use model::time::Span;

    #[test]
    fn budget_change_message_states_current_use() {
        let budget = |count| Budget { count, window: Span::minutes(10) };
        let used = |count| BudgetUsage { count, blocking_since: None };
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
                    "is 20 in 10m (was 5 in 10m){tail}; work that already waits for it tries again at its \
                     scheduled time"
                ),
            ),
        ] {
            assert_eq!(change_message(before, after, used), expected);
        }
    }

    #[test]
    fn approver_reads_both_budgets() {
        let reboots = BudgetKind::Disrupt(DisruptionKind::Reboot);
        let budget = |count, window| Budget { count, window };
        let (few, many) = (budget(20, Span::minutes(10)), budget(5000, Span::hours(1)));
        for (before, after, expected) in [
            (Some(few), many, "the budget reboot: 20 in 10m -> 5000 in 1h"),
            (Some(many), few, "the budget reboot: 5000 in 1h -> 20 in 10m"),
            (None, few, "the budget reboot: unbounded -> 20 in 10m"),
        ] {
            assert_eq!(approval_target(reboots, before, after), expected);
        }
    }
}
