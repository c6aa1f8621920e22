//! Lost signing keys: only an order that two people approved lets a takeover replace the keys that a machine has pinned.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::orders::key_replacement::allow_signing_keys;
use shepherd::bmdb::orders::order::{Actor, Order, OrderResult, request_digest};
use shepherd::model::ids::MachineId;
use shepherd::model::rpc_name::{ALLOW_SIGNING_KEYS_RPC, APPROVE_RPC};
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;
use shepherd::model::signed_artefact::signing_key::SigningKey;
use shepherd::model::time::Span;
use shepherd::model::two_person_rule::Principal;
use shepherd::roleserver::signing_store::SigningStore;
use shepherd::roleserver::state_directory::StateDirectory;

use super::oddities::{Site, enrolling};
use crate::bmdb_kit::{Kit, until};
use crate::fire::counted;
use crate::harness::aloud::TestResult;
use crate::harness::minisign::Signer;
use crate::sshd::Sshd;

fn order(actor: &str, rpc: &str, key: &str) -> Order {
    Order {
        actor: Actor { name: actor.to_owned(), credential: None },
        rpc: rpc.to_owned(),
        target: "m1".to_owned(),
        reason: "both burnt".to_owned(),
        idempotency_key: Some(key.to_owned()),
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(key.as_bytes()),
    }
}

async fn give(kit: &Kit, machine: MachineId, new: &SigningKey, key: &str) -> Result<OrderResult, BmdbError> {
    let (given, keys) = (order("kim@a", ALLOW_SIGNING_KEYS_RPC, key), vec![new.clone()]);
    let decide = move |found: &_| allow_signing_keys(found, &keys, "both burnt", "kim@a");
    kit.bmdb.try_execute_on_machine(given, machine, decide).await
}

/// Gives an order, has another admin approve it, and gives it again.
async fn give_with_approval(
    kit: &Kit,
    machine: MachineId,
    new: &SigningKey,
    key: &str,
) -> Result<OrderResult> {
    let former = kit.count("SELECT count(*) FROM history WHERE event = 'SigningKeysAllowed'").await?;
    let approval = match give(kit, machine, new, key).await {
        Err(BmdbError::ApprovalRequired(request)) => request,
        other => bail!("one person alone was enough: {other:?}"),
    };
    assert!(
        approval.message.contains("replacing the signing keys of a machine needs another admin"),
        "{approval:?}"
    );
    assert!(approval.target.contains(new.as_str()), "the approver reads the whole key: {approval:?}");
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'SigningKeysAllowed'").await?, former);
    let by = Principal { name: "lee@a".to_owned(), credential: None };
    kit.bmdb.approve_order(order("lee@a", APPROVE_RPC, &format!("{key}a")), approval.approval_id, by).await?;
    Ok(give(kit, machine, new, key).await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_replaces_lost_keys_once_by_an_order_of_two_people() -> TestResult {
    let key = |signer: &Signer| SigningKey::parse(&signer.public_key()?).map_err(anyhow::Error::msg);
    let (lost, new, other) = (Signer::new()?, Signer::new()?, Signer::new()?);
    let mut site = Site::new("lost_keys").await?;
    let change = |policy: &mut shepherd::model::policy::Policy| {
        policy.listening_gap = Span::hours(1);
        policy.two_person_rule.required = true;
    };
    site.kit.bmdb.change_policy("test", change).await?;
    sqlx::query(
        "INSERT INTO fleet_listening VALUES (3, clock_timestamp() - INTERVAL '1 day', clock_timestamp())",
    )
    .execute(&site.kit.pool)
    .await?;
    let directory = site.directory.path().join("state");
    let state = StateDirectory::open(&directory)?;
    let pinned = SigningStore::open(state.clone());
    assert!(pinned.accept_offer(&[lost.public_key()?], &[]));
    pinned.save()?;
    let former = pinned.key_ids();
    let read = || SigningStore::open(state.clone()).key_ids();

    let sshd = Sshd::start(&enrolling(&directory))?;
    site.list(&[("m1", &sshd)], &["true"])?;
    let machine = site.machine("m1", &sshd).await?;
    let signing = SigningConfiguration::parse(Some(&new.public_file()?), Vec::new());
    let signing = Arc::new(signing.map_err(anyhow::Error::msg)?.with_signed_declarations(true));
    let initializer = site.initializer_with(sshd.settings(), signing)?;
    site.run(initializer)?;
    site.until_phase(machine, "AgentStarting").await?;
    assert_eq!(read(), former, "a takeover alone replaces nothing");
    let trust = SigningStore::open(state.clone()).trust().map_err(anyhow::Error::msg)?;
    assert!(trust.requires_signed_declarations(), "it pins what its shepherd requires");

    // Another shepherd, with other keys, has taken this order.
    give_with_approval(&site.kit, machine, &key(&other)?, "other").await?;
    let waits = "SELECT count(*) FROM work_backoff WHERE process = 'AgentStart' AND cause LIKE '%other keys than those of%'";
    until("the takeover is refused", async || Ok(site.kit.count(waits).await? == 1)).await?;
    let reason: String =
        sqlx::query_scalar("SELECT reason FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&site.kit.pool)
            .await?;
    assert!(reason.contains("other keys than those of this shepherd"), "{reason}");
    assert_eq!(read(), former, "these are not the keys that the admins have seen");

    let given = give_with_approval(&site.kit, machine, &key(&new)?, "new").await?;
    assert!(given.outcome.message.ends_with("; approved by lee@a"), "{given:?}");
    let after = given.after.context("no state in the audit")?;
    assert_eq!(after["signing_keys"]["keys"][0], new.public_key()?.as_str(), "{after}");
    let replaced =
        "SELECT count(*) FROM history WHERE event = 'SigningKeysReplaced' AND detail LIKE '%kim@a ordered%'";
    until("the keys are replaced", async || Ok(site.kit.count(replaced).await? == 1)).await?;
    assert_eq!(read(), [key(&new)?.id().to_string()]);
    assert_eq!(site.kit.count("SELECT count(*) FROM machine_key_replacement").await?, 0, "it is used");
    assert!(give(&site.kit, machine, &key(&new)?, "new").await?.replayed, "it is carried out once");
    let again = give(&site.kit, machine, &key(&new)?, "again").await;
    assert!(
        matches!(again, Err(BmdbError::ApprovalRequired(_))),
        "another order needs another approval: {again:?}"
    );
    counted("lost signing keys", "replaced by the takeover that two people ordered, and by no other")?;
    Ok(site.stop().await?)
}
