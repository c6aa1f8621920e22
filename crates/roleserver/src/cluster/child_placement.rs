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
use crate::child::limits::missed_limits_message;
use crate::child::migration::{MigrationReport, migrate_children};
use crate::child::scope::unprotected_message;
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
    let MigrationReport { left, missed_limits, .. } = tokio::task::spawn_blocking(move || {
        children.set_missed_limits();
        migrate_children(&children)
    })
    .await?;
    let unprotected = left.iter().map(|(name, why)| unprotected_message(name, why));
    let unlimited = missed_limits.iter().map(|(name, missed)| missed_limits_message(name, missed));
    let sentences: Vec<String> = unprotected.chain(unlimited).collect();
    if facts.unprotected.latest().as_ref() != Some(&sentences) {
        facts.unprotected.set(sentences.clone());
    }
    Ok((!sentences.is_empty()).then(|| sentences.join("; ")))
}
