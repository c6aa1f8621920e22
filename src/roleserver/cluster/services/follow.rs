//! What this node is to run: from its disk first, and from the curator then.
//!
//! What is told is durable before anybody acts on it. A role whose declaration a curator has and cannot read, or that
//! this role server cannot, keeps the one that was told before: what runs goes on.

use std::sync::Arc;

use crate::model::declaration::Declaration;
use crate::model::role::DeclaredRole;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::declarations_client::DeclarationsClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::services::kept;
use crate::roleserver::cluster::services::wanted::Declared;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// Largest message that is taken: all declarations of a node are in one.
const LARGEST: usize = 256 << 20;

/// The runnable that follows the curator.
#[must_use]
pub fn follow(files: Files, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut declarations =
                DeclarationsClient::new(connection.curators.channel()).max_decoding_message_size(LARGEST);
            let failed = |status: tonic::Status| {
                let why = format!("following which services are to run ended: {}", status.message());
                Stop::because(why)
            };
            let asking = declarations.watch_own(wire::WatchOwnDeclarationsRequest {});
            let mut told = scope.until_cancelled(asking).await?.map_err(failed)?.into_inner();
            let _healthy = starting.healthy();
            loop {
                let message = scope.until_cancelled(told.message()).await?.map_err(failed)?;
                let message =
                    message.ok_or_else(|| Stop::because("following which services are to run ended"))?;
                let before = facts.declarations.latest().unwrap_or_default();
                let now = taken(message, &before);
                if facts.declarations.latest().as_ref() != Some(&now) {
                    let roles: Vec<String> = now.keys().map(ToString::to_string).collect();
                    tracing::info!(?roles, "which services this node is to run has changed");
                    kept::write_declarations(&files, &now)?;
                    facts.declarations.set(now);
                }
            }
        }
    })
}

/// What is to run after this was told.
fn taken(told: wire::WatchOwnDeclarationsResponse, before: &Declared) -> Declared {
    let (mut now, mut unread) = (Declared::new(), told.unreadable);
    for declared in told.declarations {
        let role = declared.role.clone();
        match Declaration::new(declared) {
            Ok(declaration) => drop(now.insert(declaration.role().clone(), Arc::new(declaration))),
            Err(error) => {
                tracing::error!(%error, "a declaration cannot be carried out; what ran by the last one goes on");
                unread.push(role);
            }
        }
    }
    for role in unread.iter().filter_map(|role| role.parse::<DeclaredRole>().ok()) {
        if let Some(declaration) = before.get(&role) {
            now.entry(role).or_insert_with(|| declaration.clone());
        }
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(role: &str, revision: u64, user: &str) -> wire::Declaration {
        let source = Some(wire::program::Source::Path("/bin/server".to_owned()));
        let service = wire::Service {
            name: "server".to_owned(),
            run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
            user: user.to_owned(),
            ..Default::default()
        };
        wire::Declaration { role: role.to_owned(), services: vec![service], revision }
    }

    fn told(declarations: Vec<wire::Declaration>, unreadable: &[&str]) -> wire::WatchOwnDeclarationsResponse {
        let unreadable = unreadable.iter().map(|&role| role.to_owned()).collect();
        wire::WatchOwnDeclarationsResponse { declarations, unreadable }
    }

    fn revisions(declared: &Declared) -> Vec<(String, u64)> {
        declared.values().map(|one| (one.role().to_string(), one.revision())).collect()
    }

    #[test]
    fn what_is_told_replaces_what_was_and_what_cannot_be_read_does_not() {
        let first =
            taken(told(vec![declared("disk", 1, "root"), declared("web", 1, "root")], &[]), &Declared::new());
        for (message, expected) in [
            (told(vec![declared("web", 2, "root")], &[]), vec![("web", 2)]),
            (told(vec![], &[]), vec![]),
            // The curator cannot read it.
            (told(vec![declared("web", 2, "root")], &["disk"]), vec![("disk", 1), ("web", 2)]),
            (told(vec![], &["disk", "never-seen", "no role"]), vec![("disk", 1)]),
            // This role server cannot carry it out.
            (told(vec![declared("disk", 2, "")], &[]), vec![("disk", 1)]),
        ] {
            let expected: Vec<(String, u64)> =
                expected.into_iter().map(|(role, revision)| (role.to_owned(), revision)).collect();
            assert_eq!(revisions(&taken(message, &first)), expected);
        }
    }
}
