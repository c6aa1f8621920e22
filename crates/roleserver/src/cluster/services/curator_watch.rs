//! Watch the declarations that the curator assigns to this node.
//!
//! Declarations are stored durably before they take effect. If the curator or this role server cannot read the
//! declaration of a role, the previous one stays in force and what runs continues. The same holds for a declaration that
//! gives root without a signature that this machine requires
//! ([`declaration_proof`][model::signed_artefact::declaration_proof]). Each of these is a finding until it is replaced. They
//! are decided on again when other keys are pinned.

use std::sync::Arc;

use curator_client::status_text::describe_status;
use model::host_finding::{HostFinding, HostFindingKind};
use model::kubernetes::version::ReleaseVersion;
use model::node_role::DeclaredRole;
use model::role_declaration::RoleDeclaration;
use model::signed_artefact::declaration_proof::decide_machine_declaration;
use model::signed_artefact::signed_fields::ArtefactKind;
use model::signed_artefact::signing_trust::SigningTrust;
use proto::curator::v1 as wire;
use proto::curator::v1::declarations_client::DeclarationsClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::desired::{DeclarationMap, REFUSED_DECLARATIONS};
use crate::cluster::services::persisted;
use crate::signing_store::SigningStore;
/// Largest message that is accepted, in bytes: one message has all declarations of a node.
const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// Makes the runnable that watches the curator, stores changed declarations and publishes them.
#[must_use]
pub fn watch_declarations(files: ClusterFiles, facts: NodeFacts, signing: SigningStore) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, signing) = (files.clone(), facts.clone(), signing.clone());
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
            let mut trust_changes = signing.watch_changes();
            let mut newest = None;
            loop {
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    message = streaming.message() => {
                        let message = message.map_err(failed)?;
                        newest = Some(message.ok_or_else(|| RunnableError::msg("the watch of declarations ended"))?);
                    }
                    // The store lives as long as this runnable.
                    _ = trust_changes.changed() => {}
                }
                if let Some(message) = &newest {
                    apply_declarations(&files, &facts, &signing, message).await?;
                }
            }
        }
    })
}

/// Stores and publishes what this machine accepts of a message, and reports what it refuses.
async fn apply_declarations(
    files: &ClusterFiles,
    facts: &NodeFacts,
    signing: &SigningStore,
    message: &wire::WatchOwnDeclarationsResponse,
) -> Result<(), RunnableError> {
    let before = facts.declarations.latest().unwrap_or_default();
    let merged = merge_declarations(message, &before, &signing.trust());
    let finding = |message: &String| HostFinding {
        kind: HostFindingKind::DeclarationRefused,
        message: message.clone(),
    };
    facts.host_findings.set(REFUSED_DECLARATIONS, merged.refusals.iter().map(finding).collect());
    // Before they take effect: what runs must never be replaced by an older one after a crash.
    for (role, version) in &merged.versions {
        signing.raise_minimum(ArtefactKind::Declaration, &role.to_string(), *version);
    }
    if !merged.versions.is_empty() {
        let signing = signing.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || signing.save()).await? {
            tracing::error!(%error, "the lowest accepted versions could not be stored; the next heartbeat tries again");
        }
    }
    let now = merged.declarations;
    if facts.declarations.latest().as_ref() != Some(&now) {
        let roles: Vec<String> = now.keys().map(ToString::to_string).collect();
        tracing::info!(?roles, "the declarations of this node have changed");
        persisted::write_declarations(files, &now)?;
        facts.declarations.set(now);
    }
    Ok(())
}

/// What a machine makes of the declarations in a message.
#[derive(Debug, Default)]
struct MergedDeclarations {
    /// The declarations that are in force from now on.
    declarations: DeclarationMap,
    /// Why others are refused, as sentences.
    refusals: Vec<String>,
    /// Versions of valid signatures, by role.
    versions: Vec<(DeclaredRole, ReleaseVersion)>,
}

/// The declarations after this message. A role without a readable declaration keeps the previous one, and so does a role
/// with a declaration that this machine refuses.
fn merge_declarations(
    response: &wire::WatchOwnDeclarationsResponse,
    before: &DeclarationMap,
    trust: &Result<SigningTrust, String>,
) -> MergedDeclarations {
    let (mut merged, mut unread) = (MergedDeclarations::default(), response.unreadable.clone());
    let trust = trust.as_ref().map_err(String::as_str);
    for declared in &response.declarations {
        let declaration = match RoleDeclaration::new(declared.clone()) {
            Ok(declaration) => declaration,
            Err(error) => {
                tracing::error!(%error, "a declaration is invalid; the previous one stays in force");
                unread.push(declared.role.clone());
                continue;
            }
        };
        let role = declaration.role().clone();
        match decide_machine_declaration(&declaration, trust) {
            Ok(version) => {
                merged.versions.extend(version.map(|version| (role.clone(), version)));
                drop(merged.declarations.insert(role, Arc::new(declaration)));
            }
            Err(refusal) => {
                merged.refusals.push(refusal);
                unread.push(declared.role.clone());
            }
        }
    }
    for role in unread.iter().filter_map(|role| role.parse::<DeclaredRole>().ok()) {
        if let Some(declaration) = before.get(&role) {
            merged.declarations.entry(role).or_insert_with(|| declaration.clone());
        }
    }
    merged
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
        wire::Declaration { role: role.to_owned(), services: vec![service], revision, ..Default::default() }
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
        let trust = Ok(SigningTrust::default());
        let merge =
            |message, before: &DeclarationMap| merge_declarations(&message, before, &trust).declarations;
        let first = merge(
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
            assert_eq!(revisions(&merge(message, &first)), expected);
        }
    }

    #[test]
    fn refused_declaration_leaves_the_previous_one_in_force() {
        let lenient = Ok(SigningTrust::default());
        let message = |roles: &[&str], revision| {
            watch_response(roles.iter().map(|role| declared(role, revision, "root")).collect(), &[])
        };
        let first = merge_declarations(&message(&["disk"], 1), &DeclarationMap::new(), &lenient).declarations;
        let strict = Ok(SigningTrust::default().with_signed_declarations(true));
        let unreadable = Err("signing.json is damaged".to_owned());
        for (trust, reason) in [(&strict, "nobody signed it"), (&unreadable, "signing.json is damaged")] {
            let merged = merge_declarations(&message(&["disk", "web"], 2), &first, trust);
            assert_eq!(revisions(&merged.declarations), [("disk".to_owned(), 1)]);
            assert_eq!(merged.refusals.len(), 2);
            for (refusal, role) in merged.refusals.iter().zip(["disk", "web"]) {
                let names = format!("role {role} was refused: server runs as root");
                assert!(refusal.starts_with(&names) && refusal.contains(reason), "{refusal}");
            }
            // What the node does not have any more goes, signed or not.
            let merged = merge_declarations(&message(&["web"], 2), &first, trust);
            assert!(merged.declarations.is_empty() && merged.versions.is_empty());
        }
        let merged = merge_declarations(&message(&["disk", "web"], 2), &first, &lenient);
        assert_eq!(merged.declarations.len(), 2);
        assert!(merged.refusals.is_empty());
    }
}
