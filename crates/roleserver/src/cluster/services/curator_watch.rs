//! Watch the declarations that the curator assigns to this node.
//!
//! Declarations are stored durably before they take effect. If the curator or this role server cannot read the
//! declaration of a role, the previous one stays in force and what runs continues. The same holds for a declaration that
//! gives root without a signature that this machine requires
//! ([`declaration_proof`][model::signed_artefact::declaration_proof]). Each of these is a finding until it is replaced. They
//! are decided on again when other keys are pinned.
//!
//! If there is no previous declaration, because the file was lost, the role is *retained*: what runs of it continues, and its
//! files stay.

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
use crate::cluster::services::desired::{DeclarationMap, REFUSED_DECLARATIONS, RetainedRoles};
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
                // The store lives as long as this runnable.
                let event = next_event(streaming.message(), trust_changes.changed());
                if let Some(message) = scope.until_cancelled(event).await? {
                    let message = message.map_err(failed)?;
                    newest =
                        Some(message.ok_or_else(|| RunnableError::msg("the watch of declarations ended"))?);
                }
                if let Some(message) = &newest {
                    apply_declarations(&files, &facts, &signing, message).await?;
                }
            }
        }
    })
}

/// Waits for the next message; `None` if the pinned keys have changed and no message has arrived. A message comes first: it
/// may delete a role, and the one before it must not be decided on again with the new keys, which may permit that role.
async fn next_event<T>(message: impl Future<Output = T>, trust_change: impl Future) -> Option<T> {
    tokio::select! {
        biased;
        message = message => Some(message),
        _ = trust_change => None,
    }
}

/// Stores and publishes what this machine accepts of a message, and reports what it refuses.
async fn apply_declarations(
    files: &ClusterFiles,
    facts: &NodeFacts,
    signing: &SigningStore,
    message: &wire::WatchOwnDeclarationsResponse,
) -> Result<(), RunnableError> {
    let before = facts.declarations.latest().unwrap_or_default();
    let retained_before = facts.retained_roles.latest().unwrap_or_default();
    let merged = merge_declarations(message, (&before, &retained_before), &signing.trust());
    let finding = |message: &String| HostFinding {
        kind: HostFindingKind::DeclarationRefused,
        message: message.clone(),
    };
    facts.host_findings.set(REFUSED_DECLARATIONS, merged.refusals.iter().map(finding).collect());
    // Before they take effect: what runs must never be replaced by an older one after a crash.
    store_versions(signing, &merged.versions).await?;
    let MergedDeclarations { declarations: now, retained, .. } = merged;
    let has_changed = facts.declarations.latest().as_ref() != Some(&now);
    if has_changed || retained != retained_before {
        persisted::write_declarations(files, &now, &retained)?;
        // Before the declarations: services of a retained role must not be stopped between the two.
        facts.retained_roles.set(retained);
    }
    if has_changed {
        let roles: Vec<String> = now.keys().map(ToString::to_string).collect();
        tracing::info!(?roles, "the declarations of this node have changed");
        facts.declarations.set(now);
    }
    Ok(())
}

/// Raises the lowest accepted versions, and stores them. After an error this runnable starts again, and with it the attempt.
async fn store_versions(
    signing: &SigningStore,
    versions: &[(DeclaredRole, ReleaseVersion)],
) -> Result<(), RunnableError> {
    if versions.is_empty() {
        return Ok(());
    }
    for (role, version) in versions {
        signing.raise_minimum(ArtefactKind::Declaration, &role.to_string(), *version);
    }
    let signing = signing.clone();
    let stored = tokio::task::spawn_blocking(move || signing.save()).await?;
    stored.map_err(|error| {
        RunnableError::msg(format!(
            "declarations do not take effect, because their versions could not be stored as the lowest ones: {error}"
        ))
    })
}

/// What a machine makes of the declarations in a message.
#[derive(Debug, Default)]
struct MergedDeclarations {
    /// The declarations that are in force from now on.
    declarations: DeclarationMap,
    /// Why others are refused, as sentences.
    refusals: Vec<String>,
    /// Roles without a declaration in force, of which what runs continues.
    retained: RetainedRoles,
    /// Versions of valid signatures, by role.
    versions: Vec<(DeclaredRole, ReleaseVersion)>,
}

/// The declarations after this message. A role without a readable declaration keeps the previous one, and so does a role
/// with a declaration that this machine refuses. It is retained if there is no previous one.
fn merge_declarations(
    response: &wire::WatchOwnDeclarationsResponse,
    (before, retained): (&DeclarationMap, &RetainedRoles),
    trust: &Result<SigningTrust, String>,
) -> MergedDeclarations {
    let (mut merged, mut unread) = (MergedDeclarations::default(), response.unreadable.clone());
    // Each version counts at once: a stolen curator could send an older declaration of a role behind a newer one.
    let mut trust = trust.clone();
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
        let decided = decide_machine_declaration(&declaration, trust.as_ref().map_err(String::as_str));
        match decided {
            Ok(version) => {
                if let (Ok(known), Some(version)) = (&mut trust, version) {
                    *known = known.with_minimum(ArtefactKind::Declaration, &role.to_string(), version);
                }
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
        if merged.declarations.contains_key(&role) {
            continue;
        }
        if let Some(declaration) = before.get(&role) {
            merged.declarations.insert(role, declaration.clone());
        } else {
            merged.retained.insert(role.to_string());
        }
    }
    // A role that is accepted now stays retained until the node loses it: its services are rendered a moment later, and the
    // planner looks at retained roles only while none of their services is desired.
    let declared = merged.declarations.keys().map(ToString::to_string);
    merged.retained.extend(declared.filter(|role| retained.contains(role)));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_directory::{Lock, StateDirectory};
    use model::signed_artefact::signing_key::collect_signing_keys;
    use testkit::declaration::web_role;

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
        let (trust, none) = (Ok(SigningTrust::default()), RetainedRoles::new());
        let merge = |message, before: &DeclarationMap| {
            merge_declarations(&message, (before, &none), &trust).declarations
        };
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
        let (lenient, none) = (Ok(SigningTrust::default()), RetainedRoles::new());
        let message = |roles: &[&str], revision| {
            watch_response(roles.iter().map(|role| declared(role, revision, "root")).collect(), &[])
        };
        let nothing = (&DeclarationMap::new(), &none);
        let first = merge_declarations(&message(&["disk"], 1), nothing, &lenient).declarations;
        let strict = Ok(SigningTrust::default().with_signed_declarations(true));
        let unreadable = Err("signing.json is damaged".to_owned());
        for (trust, reason) in [(&strict, "nobody signed it"), (&unreadable, "signing.json is damaged")] {
            let merged = merge_declarations(&message(&["disk", "web"], 2), (&first, &none), trust);
            assert_eq!(revisions(&merged.declarations), [("disk".to_owned(), 1)]);
            assert_eq!(merged.refusals.len(), 2);
            for (refusal, role) in merged.refusals.iter().zip(["disk", "web"]) {
                let names = format!("role {role} was refused: server runs as root");
                assert!(refusal.starts_with(&names) && refusal.contains(reason), "{refusal}");
            }
            // What the node does not have any more goes, signed or not.
            let merged = merge_declarations(&message(&["web"], 2), (&first, &none), trust);
            assert!(merged.declarations.is_empty() && merged.versions.is_empty());
        }
        let merged = merge_declarations(&message(&["disk", "web"], 2), (&first, &none), &lenient);
        assert_eq!(merged.declarations.len(), 2);
        assert!(merged.refusals.is_empty() && merged.retained.is_empty());
    }

    const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    /// The signature of [`declared_rootfs`] for the user `root`, with the version 1.4.0.
    const OF_ROOT: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBALACN7DK57YKqtVeI7AfVMkelM48VNZAE5U9+W4YvfWwWGkvQoL9KpI73QWR2YIIneddUlp3o++TnlvokplpMAI=\n",
        "trusted comment: shepherd kind=declaration name=web version=1.4.0 architecture=any minimum-version=1.2.0\n",
        "567PDagns1iWuZOfprb+qoGnSYoUezjhxhSwweu0owrzF+l6tXZ2ieGptqJMUdlju/v+hQaMc9xsQpfm/r26Dg==\n",
    );

    fn declared_rootfs(revision: u64, user: &str, signature: &str) -> wire::Declaration {
        let signature = signature.to_owned();
        wire::Declaration { revision, signature, ..web_role(&"ab".repeat(32), user) }
    }

    /// A stolen curator sends both.
    #[test]
    fn declaration_is_judged_by_the_one_before_it_in_the_same_message() {
        let keys = collect_signing_keys([KEY]).unwrap();
        let trust = Ok(SigningTrust::pinning(keys).with_signed_declarations(true));
        let (signed, unsigned) = (declared_rootfs(2, "root", OF_ROOT), declared_rootfs(1, "1000", ""));
        let message = watch_response(vec![signed, unsigned], &[]);
        let nothing = (&DeclarationMap::new(), &RetainedRoles::new());
        let merged = merge_declarations(&message, nothing, &trust);
        assert_eq!(revisions(&merged.declarations), [("web".to_owned(), 2)], "the unsigned one counts");
        let [refusal] = &merged.refusals[..] else { panic!("{:?}", merged.refusals) };
        assert!(refusal.contains("this machine has accepted its signed version 1.4.0"), "{refusal}");
        assert_eq!((merged.versions.len(), merged.retained.len()), (1, 0));
    }

    #[test]
    fn role_without_a_declaration_in_force_is_retained_until_the_node_loses_it() {
        let strict = Ok(SigningTrust::default().with_signed_declarations(true));
        let lenient = Ok(SigningTrust::default());
        let (none, nothing) = (RetainedRoles::new(), DeclarationMap::new());
        let web = RetainedRoles::from(["web".to_owned()]);
        let refused = || watch_response(vec![declared("web", 1, "root")], &[]);
        let merged = merge_declarations(&refused(), (&nothing, &none), &strict);
        assert_eq!((merged.declarations.len(), &merged.retained), (0, &web), "its declaration was lost");
        for message in [watch_response(vec![], &["web"]), watch_response(vec![declared("web", 1, "")], &[])] {
            let merged = merge_declarations(&message, (&nothing, &none), &strict);
            assert_eq!(merged.retained, web, "it cannot be read: {message:?}");
        }
        let accepted = merge_declarations(&refused(), (&nothing, &web), &lenient);
        assert_eq!((accepted.declarations.len(), &accepted.retained), (1, &web));
        let gone = merge_declarations(&watch_response(vec![], &[]), (&accepted.declarations, &web), &strict);
        assert_eq!(gone.retained, none, "the node has lost it");
    }

    /// The curator has deleted a role, and other keys were pinned, before this runnable is polled again.
    #[tokio::test]
    async fn message_that_has_arrived_counts_before_other_keys() {
        for _ in 0..50 {
            let next = next_event(std::future::ready("deletion"), std::future::ready(())).await;
            assert_eq!(next, Some("deletion"), "the message before it is decided on again");
        }
        assert_eq!(next_event(std::future::pending::<()>(), std::future::ready(())).await, None);
    }

    #[tokio::test]
    async fn declaration_takes_no_effect_before_its_version_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let signing = SigningStore::open(state.clone());
        let versions = [("web".parse::<DeclaredRole>().unwrap(), ReleaseVersion::new(1, 4, 0))];
        // While another process writes the file.
        let held = state.acquire_lock(Lock::SigningKeys).unwrap();
        let error = store_versions(&signing, &versions).await.unwrap_err().to_string();
        assert!(error.contains("declarations do not take effect"), "{error}");
        drop(held);
        store_versions(&signing, &versions).await.unwrap();
        let stored = SigningStore::open(state).trust().unwrap();
        let minimum = stored.minimum_version(ArtefactKind::Declaration, "web");
        assert_eq!(minimum, Some(ReleaseVersion::new(1, 4, 0)));
    }
}
