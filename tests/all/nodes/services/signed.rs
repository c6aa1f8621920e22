//! Declarations that give root on a machine that requires signatures. An owner of the cluster gives them to its curators,
//! behind the back of every shepherd. A person who writes to the bare metal database gets as far.

use anyhow::{Context as _, Result, ensure};
use shepherd::model::cluster::declaration::{attach_signature, encode_signed_content};
use shepherd::model::host_finding::HostFindingKind;
use shepherd::proto::curator::v1 as wire;

use super::{founded, founded_on, instance, put, script, statuses, until_nothing_is_left, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::minisign::Signer;
use crate::nodes::node::Node;
use crate::nodes::owner::Owner;

/// The role `web`, which runs as root.
fn role(word: &str) -> wire::Declaration {
    role_of("web", "server", word)
}

fn role_of(role: &str, service: &str, word: &str) -> wire::Declaration {
    let service = script(service, &format!(": {word}; while :; do sleep 0.1; done"), &[]);
    wire::Declaration { role: role.to_owned(), services: vec![service], ..Default::default() }
}

fn signed(signer: &Signer, declaration: &wire::Declaration, version: &str) -> Result<wire::Declaration> {
    let role = &declaration.role;
    let comment = format!(
        "shepherd kind=declaration name={role} version={version} architecture=any minimum-version=0.1.0"
    );
    Ok(attach_signature(declaration, &signer.sign(&encode_signed_content(declaration), &comment)?))
}

/// Why the node refuses declarations at the moment.
fn refusals(node: &Node) -> Vec<String> {
    let findings = node.facts.host_findings.collect().into_iter();
    let refused = findings.filter(|finding| finding.kind == HostFindingKind::DeclarationRefused);
    refused.map(|finding| finding.message).collect()
}

/// Waits until the node has refused the declaration of this revision for this reason.
async fn until_refused(owner: &Owner, node: &Node, revision: u64, reason: &str) -> Result<()> {
    until("a declaration is refused", async || {
        let runs = statuses(owner, node).await?.remove("server").map(|status| status.declaration_revision);
        ensure!(runs != Some(revision), "the machine runs a role that it has to refuse: {reason}");
        Ok(refusals(node).iter().any(|refusal| refusal.contains(reason)))
    })
    .await
    .with_context(|| format!("{:?}\n{}", refusals(node), node.report()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_gives_root_runs_only_if_a_pinned_key_signed_it_and_no_older_one_returns() -> TestResult {
    let (signer, thief, node) = (Signer::new()?, Signer::new()?, Node::new()?);
    node.signing.require_signed_declarations();
    assert!(node.signing.accept_offer(&[signer.public_key()?], &[]), "it has to be saved");
    node.signing.save()?;
    let (owner, mut node) = founded_on(node).await?;

    let first = put(&owner, signed(&signer, &role("one"), "1.0.0")?).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", first).await?;
    let runs = instance(&node, "web_server")?;
    let of_another = signed(&signer, &role("one"), "1.0.0")?.signature;
    for (reason, declaration) in [
        ("nobody signed it", role("two")),
        ("which is not one of the pinned keys", signed(&thief, &role("two"), "2.0.0")?),
        ("its signature is not valid", attach_signature(&role("two"), &of_another)),
        (
            "its version is 0.9.0, and 1.0.0 is the lowest that is accepted",
            signed(&signer, &role("two"), "0.9.0")?,
        ),
    ] {
        let revision = put(&owner, declaration).await?;
        until_refused(&owner, &node, revision, reason).await?;
        let names = "role web was refused: server runs as root";
        assert!(refusals(&node)[0].starts_with(names), "{:?}", refusals(&node));
        assert_eq!(instance(&node, "web_server")?, runs, "{reason}");
        assert!(runs.is_alive(), "{reason}");
    }

    // Its role server starts again, with the declaration that it stored.
    node.stop().await?;
    node.start()?;
    owner.until_well(1, 1).await?;
    until("the last declaration is refused again", async || Ok(!refusals(&node).is_empty())).await?;
    until_well(&owner, &node, "server", first).await?;
    assert_eq!(instance(&node, "web_server")?, runs);

    let last = put(&owner, signed(&signer, &role("two"), "1.1.0")?).await?;
    until_well(&owner, &node, "server", last).await?;
    assert!(instance(&node, "web_server")? != runs && !runs.is_alive());
    assert_eq!(refusals(&node), Vec::<String>::new(), "it is over");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_ran_before_signatures_were_required_stays_and_is_not_given_again() -> TestResult {
    let signer = Signer::new()?;
    let (owner, node) = founded().await?;
    let first = put(&owner, role("one")).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", first).await?;
    let runs = instance(&node, "web_server")?;
    assert_eq!(refusals(&node), Vec::<String>::new(), "no signature is required");

    // As with the answer to a heartbeat. The curator sends nothing because of it.
    node.signing.require_signed_declarations();
    assert!(node.signing.accept_offer(&[signer.public_key()?], &[]), "it has to be saved");
    until("it is reported", async || Ok(refusals(&node).len() == 1)).await?;
    assert!(refusals(&node)[0].contains("nobody signed it"), "{:?}", refusals(&node));
    assert_eq!(instance(&node, "web_server")?, runs);
    assert!(runs.is_alive());

    owner.roles(&node, &[], &["web"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    assert_eq!(refusals(&node), Vec::<String>::new(), "the node does not have the role");
    owner.roles(&node, &["web"], &[]).await?;
    until("it is refused", async || Ok(refusals(&node).len() == 1)).await?;
    assert!(node.child("web_server").is_none(), "nothing is left that could continue");
    let last = put(&owner, signed(&signer, &role("one"), "1.0.0")?).await?;
    until_well(&owner, &node, "server", last).await?;
    assert_eq!(refusals(&node), Vec::<String>::new());
    Ok(())
}

/// The role is refused, and its former declaration is lost. Another role shows that the machine acts on what it accepts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_role_continues_to_run_after_its_former_declaration_was_lost() -> TestResult {
    let signer = Signer::new()?;
    let (owner, mut node) = founded().await?;
    let first = put(&owner, role("one")).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", first).await?;
    let runs = instance(&node, "web_server")?;
    node.signing.require_signed_declarations();
    assert!(node.signing.accept_offer(&[signer.public_key()?], &[]), "it has to be saved");
    node.signing.save()?;
    until("it is reported", async || Ok(refusals(&node).len() == 1)).await?;

    node.stop().await?;
    std::fs::remove_file(node.disk().join("declarations.json"))?;
    node.start()?;
    owner.until_well(1, 1).await?;
    let job = put(&owner, signed(&signer, &role_of("job", "job", "one"), "1.0.0")?).await?;
    owner.roles(&node, &["job"], &[]).await?;
    until_well(&owner, &node, "job", job).await?;
    assert_eq!(instance(&node, "web_server")?, runs);
    assert!(runs.is_alive() && node.disk().join("services/web_server").exists());

    // What it stored has the role, too.
    node.stop().await?;
    node.start()?;
    owner.until_well(1, 1).await?;
    let job = put(&owner, signed(&signer, &role_of("job", "job", "two"), "1.1.0")?).await?;
    until_well(&owner, &node, "job", job).await?;
    assert_eq!(instance(&node, "web_server")?, runs);
    assert!(runs.is_alive());

    let last = put(&owner, signed(&signer, &role("two"), "1.0.0")?).await?;
    until_well(&owner, &node, "server", last).await?;
    assert!(!runs.is_alive());
    owner.roles(&node, &[], &["web", "job"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    Ok(())
}
