//! Watch the declarations that the curator assigns to this node.
//!
//! Declarations are stored durably before they take effect. If the curator or this role server cannot read the
//! declaration of a role, the previous one stays in force and what runs continues.

use std::sync::Arc;

use curator_client::status_text::describe_status;
use model::node_role::DeclaredRole;
use model::role_declaration::RoleDeclaration;
use proto::curator::v1 as wire;
use proto::curator::v1::declarations_client::DeclarationsClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::desired::DeclarationMap;
use crate::cluster::services::persisted;

/// Largest message that is accepted, in bytes: one message has all declarations of a node.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Makes the runnable that watches the curator, stores changed declarations and publishes them.
#[must_use]
pub fn watch_declarations(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut declarations = DeclarationsClient::new(connection.curators.channel())
                .max_decoding_message_size(MAX_MESSAGE_BYTES);
            let failed = |status: tonic::Status| {
                let why = format!("the watch of declarations ended: {}", describe_status(&status));
                RunnableError::msg(why)
            };
            let opening = declarations.watch_own(wire::WatchOwnDeclarationsRequest {});
            let mut streaming = scope.until_cancelled(opening).await?.map_err(failed)?.into_inner();
            let _healthy = starting.mark_healthy();
            loop {
                let message = scope.until_cancelled(streaming.message()).await?.map_err(failed)?;
                let message = message.ok_or_else(|| RunnableError::msg("the watch of declarations ended"))?;
                let before = facts.declarations.latest().unwrap_or_default();
                let now = merge_declarations(message, &before);
                if facts.declarations.latest().as_ref() != Some(&now) {
                    let roles: Vec<String> = now.keys().map(ToString::to_string).collect();
                    tracing::info!(?roles, "the declarations of this node have changed");
                    persisted::write_declarations(&files, &now)?;
                    facts.declarations.set(now);
                }
            }
        }
    })
}

/// The declarations after this message. A role without a readable declaration keeps the previous one.
fn merge_declarations(
    response: wire::WatchOwnDeclarationsResponse,
    before: &DeclarationMap,
) -> DeclarationMap {
    let (mut now, mut unread) = (DeclarationMap::new(), response.unreadable);
    for declared in response.declarations {
        let role = declared.role.clone();
        match RoleDeclaration::new(declared) {
            Ok(declaration) => drop(now.insert(declaration.role().clone(), Arc::new(declaration))),
            Err(error) => {
                tracing::error!(%error, "a declaration is invalid; the previous one stays in force");
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

    fn watch_response(
        declarations: Vec<wire::Declaration>,
        unreadable: &[&str],
    ) -> wire::WatchOwnDeclarationsResponse {
        let unreadable = unreadable.iter().map(|&role| role.to_owned()).collect();
        wire::WatchOwnDeclarationsResponse { declarations, unreadable }
    }

    fn revisions(declared: &DeclarationMap) -> Vec<(String, u64)> {
        declared.values().map(|one| (one.role().to_string(), one.revision())).collect()
    }

    #[test]
    fn new_declarations_replace_old_ones_unless_unreadable() {
        let first = merge_declarations(
            watch_response(vec![declared("disk", 1, "root"), declared("web", 1, "root")], &[]),
            &DeclarationMap::new(),
        );
        for (message, expected) in [
            (watch_response(vec![declared("web", 2, "root")], &[]), vec![("web", 2)]),
            (watch_response(vec![], &[]), vec![]),
            // The curator cannot read it.
            (watch_response(vec![declared("web", 2, "root")], &["disk"]), vec![("disk", 1), ("web", 2)]),
            (watch_response(vec![], &["disk", "never-seen", "no role"]), vec![("disk", 1)]),
            // This role server cannot read it.
            (watch_response(vec![declared("disk", 2, "")], &[]), vec![("disk", 1)]),
        ] {
            let expected: Vec<(String, u64)> =
                expected.into_iter().map(|(role, revision)| (role.to_owned(), revision)).collect();
            assert_eq!(revisions(&merge_declarations(message, &first)), expected);
        }
    }
}
