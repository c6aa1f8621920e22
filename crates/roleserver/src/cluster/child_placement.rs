//! Keep the children of this node in scopes of their own.
//!
//! Runs once before any other part, because the children of an earlier release, or of an earlier layout, may still be
//! in the group of the unit. Then it looks again and again: a child that was started while systemd did not answer is
//! moved as soon as it does, and limits that it did not take are set. What is not in a scope is published in
//! [`NodeFacts::unprotected`], with the limits that do not hold there, and is the failure of this runnable, so that
//! `roleserver status` and the shepherd show it.

use std::sync::Arc;
use std::time::Duration;

use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::child::lifecycle::ChildContext;
use crate::child::limits::{missed_limits_message, scope_limits_message};
use crate::child::migration::{MigrationReport, migrate_children};
use crate::child::scope::{unfinished_message, unprotected_message};
use crate::cluster::node_facts::NodeFacts;

/// Pause between two looks.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Makes the runnable that moves children into their scopes, at each check.
#[must_use]
pub fn keep_children_placed(children: Arc<ChildContext>, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (children, facts) = (children.clone(), facts.clone());
        async move {
            if children.scopes.is_none() {
                return Err(starting.mark_healthy().scope().cancelled().await.into());
            }
            let scope = starting.scope().clone();
            let mut starting = Some(starting);
            let mut healthy = None;
            loop {
                let problem = place_children(&children, &facts).await?;
                if let Some(problem) = problem {
                    return Err(RunnableError::msg(problem));
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
                }
                // Keep the healthy state until this run ends.
                let _ = &healthy;
                scope.until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
            }
        }
    })
}

/// Moves children into scopes and publishes which are left; returns the same as one text, if there are any.
pub async fn place_children(
    children: &Arc<ChildContext>,
    facts: &NodeFacts,
) -> Result<Option<String>, RunnableError> {
    let children = children.clone();
    let report = tokio::task::spawn_blocking(move || {
        children.set_missed_limits();
        migrate_children(&children)
    })
    .await?;
    let sentences = list_problems(&report);
    if facts.unprotected.latest().as_ref() != Some(&sentences) {
        facts.unprotected.set(sentences.clone());
    }
    Ok((!sentences.is_empty()).then(|| sentences.join("; ")))
}

/// A sentence for each child that is not in a scope as it should be (pure).
fn list_problems(report: &MigrationReport) -> Vec<String> {
    let MigrationReport { moved: _, left, in_unit: _, unfinished, missed_limits, missed_in_scopes } = report;
    let unprotected = left.iter().map(|(name, why)| unprotected_message(name, why));
    let unfinished = unfinished.iter().map(|(name, why)| unfinished_message(name, why));
    let unlimited = missed_limits.iter().map(|(name, missed)| missed_limits_message(name, missed));
    let unlimited_in_scopes =
        missed_in_scopes.iter().map(|(name, missed)| scope_limits_message(name, missed));
    unprotected.chain(unfinished).chain(unlimited).chain(unlimited_in_scopes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::spec::ResourceLimits;

    #[test]
    fn each_problem_of_a_child_is_reported() {
        let reasons = |name: &str| [(name.to_owned(), "no answer".to_owned())].into();
        let missed = ResourceLimits { cpu_millis: Some(500), ..ResourceLimits::default() };
        let report = MigrationReport {
            moved: vec!["moved".to_owned()],
            left: reasons("left"),
            in_unit: ["left".to_owned()].into(),
            unfinished: reasons("unfinished"),
            missed_limits: [("left".to_owned(), missed)].into(),
            missed_in_scopes: [("inside".to_owned(), missed)].into(),
        };
        let sentences = list_problems(&report);
        let expected = [
            "left would end with the role server, ",
            "unfinished is in a systemd scope of its own, but its move there is not complete: no answer; ",
            "left runs without its limit of processors, because systemd hands on no controller ",
            "inside runs without its limit of processors, because systemd accepted it and did not set it ",
        ];
        assert_eq!(sentences.len(), expected.len(), "{sentences:?}");
        for (sentence, expected) in sentences.iter().zip(expected) {
            assert!(sentence.starts_with(expected), "{sentence}");
        }
    }
}
