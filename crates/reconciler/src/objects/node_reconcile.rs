//! The Node part of a reconcile pass.
//!
//! It needs one list, and one request for each object that is not as it should be. A failure is retried in the next
//! pass and holds nothing up: no component waits for it.

use std::fmt::Write as _;

use etcd::client::Client;
use etcd::key_space::NODES;
use etcd::namespace::KeySelector;

use crate::objects::ReconcileSummary;
use crate::objects::api_client::{ApiClient, ApiError};
use crate::objects::api_error::{ApiErrorKind, classify_api_error};
use crate::objects::node_api::node_kind;
use crate::objects::node_objects::{NodeObjectChange, plan_node_changes};
use crate::objects::object_kind::ObjectKey;
use crate::objects::problem::{Problem, ProblemSubject};

/// Plans the changes. The error is why they are unknown.
async fn plan_changes(
    api: &ApiClient,
    records: &Client,
) -> Result<Vec<(ObjectKey, NodeObjectChange)>, String> {
    // In this order, or a node that starts meanwhile would be taken for one that is gone.
    let objects = api.list_nodes().await.map_err(|error| format!("they cannot be listed: {error}"))?;
    let records = records.list(&KeySelector::Prefix(NODES.range().start)).await;
    let records = records.map_err(|error| format!("their records cannot be read: {error}"))?;
    Ok(plan_node_changes(&objects, &records.records))
}

/// Makes the changes, and adds the results and the problems.
pub(super) async fn reconcile_nodes(
    api: &ApiClient,
    records: &Client,
    summary: &mut ReconcileSummary,
    problems: &mut Vec<Problem>,
) {
    let resource = node_kind().resource();
    let all = match plan_changes(api, records).await {
        Ok(all) => all,
        Err(why) => return problems.push(Problem::transient(ProblemSubject::Kind(resource), why)),
    };
    for (key, change) in all {
        let (what, done) = match &change {
            NodeObjectChange::Delete(seen) => ("deleted", api.delete(&node_kind(), &key, seen).await),
            NodeObjectChange::Patch(patch) => ("updated", api.patch_node(&key.name, patch).await),
        };
        match (done, change) {
            (Ok(()), change) => {
                match change {
                    NodeObjectChange::Delete(_) => summary.deleted += 1,
                    NodeObjectChange::Patch(_) => summary.updated += 1,
                }
                tracing::info!(kind = %resource, object = %key, difference = what, "an object of Kubernetes was corrected");
            }
            // The next pass reads its new state.
            (Err(ApiError::Rejected(status)), _)
                if matches!(classify_api_error(&status), ApiErrorKind::Conflict | ApiErrorKind::NotFound) =>
            {
                tracing::debug!(kind = %resource, object = %key, "a node was changed meanwhile, and is left to the next pass");
            }
            (Err(error), _) => {
                let subject = ProblemSubject::for_object(None, &resource, &key);
                problems.push(Problem::transient(subject, error.to_string()));
            }
        }
    }
}

/// Describes the planned changes, one per line.
pub(super) async fn describe_changes(api: &ApiClient, records: &Client, text: &mut String) {
    let resource = node_kind().resource();
    match plan_changes(api, records).await {
        Err(why) => {
            let _ = writeln!(text, "unknown {resource}: {why}");
        }
        Ok(all) => {
            for (key, change) in all {
                let word = match change {
                    NodeObjectChange::Delete(_) => "delete",
                    NodeObjectChange::Patch(_) => "update",
                };
                let _ = writeln!(text, "{word} {resource} {key}");
            }
        }
    }
}
