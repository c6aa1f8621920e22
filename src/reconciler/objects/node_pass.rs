//! The part of a pass that is about the objects of nodes: one list, and one request for each that is not as it should be.
//!
//! Whatever fails is tried again in the next pass and holds nothing up: no component waits for it.

use std::fmt::Write as _;

use crate::etcd::client::Client;
use crate::etcd::key_space::NODES;
use crate::etcd::namespace::Keys;
use crate::reconciler::objects::Passed;
use crate::reconciler::objects::answers::{Refusal, refusal};
use crate::reconciler::objects::kind::Key;
use crate::reconciler::objects::kubernetes::{Api, AskError};
use crate::reconciler::objects::nodes::{Amendment, amendments};
use crate::reconciler::objects::trouble::{Subject, Trouble};
use crate::reconciler::objects::workers::nodes;

/// What is to be done; the error is why that is not known.
async fn read(api: &Api, records: &Client) -> Result<Vec<(Key, Amendment)>, String> {
    // In this order, or one that begins meanwhile would be taken for one that is gone.
    let objects = api.nodes().await.map_err(|error| format!("they cannot be listed: {error}"))?;
    let records = records.list(&Keys::Under(NODES.range().start)).await;
    let records = records.map_err(|error| format!("their records cannot be read: {error}"))?;
    Ok(amendments(&objects, &records.records))
}

/// Does it, and adds what was done and what could not be.
pub(super) async fn pass(api: &Api, records: &Client, passed: &mut Passed, troubles: &mut Vec<Trouble>) {
    let resource = nodes().resource();
    let all = match read(api, records).await {
        Ok(all) => all,
        Err(why) => return troubles.push(Trouble::passing(Subject::Kind(resource), why)),
    };
    for (key, amendment) in all {
        let (what, done) = match &amendment {
            Amendment::Delete(seen) => ("deleted", api.delete(&nodes(), &key, seen).await),
            Amendment::Change(change) => ("updated", api.amend_node(&key.name, change).await),
        };
        match (done, amendment) {
            (Ok(()), amendment) => {
                match amendment {
                    Amendment::Delete(_) => passed.deleted += 1,
                    Amendment::Change(_) => passed.updated += 1,
                }
                tracing::info!(kind = %resource, object = %key, what, "an object of Kubernetes was not as it should be");
            }
            // It is looked at again as it is now.
            (Err(AskError::Refused(status)), _)
                if matches!(refusal(&status), Refusal::Raced | Refusal::Gone) =>
            {
                tracing::debug!(kind = %resource, object = %key, "a node was changed meanwhile, and is left to the next pass");
            }
            (Err(error), _) => {
                let subject = Subject::object(None, &resource, &key);
                troubles.push(Trouble::passing(subject, error.to_string()));
            }
        }
    }
}

/// What it would do, a line for each.
pub(super) async fn plan(api: &Api, records: &Client, text: &mut String) {
    let resource = nodes().resource();
    match read(api, records).await {
        Err(why) => {
            let _ = writeln!(text, "unknown {resource}: {why}");
        }
        Ok(all) => {
            for (key, amendment) in all {
                let word = match amendment {
                    Amendment::Delete(_) => "delete",
                    Amendment::Change(_) => "update",
                };
                let _ = writeln!(text, "{word} {resource} {key}");
            }
        }
    }
}
