//! Orders: carried out once, recorded in the audit, and rejected.

use std::sync::Arc;

use anyhow::Context as _;
use prost_reflect::DescriptorPool;
use serde_json::{Value, json};
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::{FactChange, HostKeySource};
use shepherd::model::access::AccessRole;
use shepherd::model::host_key::HostKey;
use shepherd::model::ids::MachineId;
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;
use shepherd::proto::fleet::DESCRIPTORS;
use tokio::task::JoinSet;

use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_carried_out_once_and_written_down_with_before_and_after() -> TestResult {
    let api = Api::start("api_orders").await?;
    let (admin, machine) = (api.key(AccessRole::Admin, &[], None).await?, provided(&api.pool).await?);
    let hold = json!({ "machine": machine, "scope": "power", "expiresAfter": "2h", "order": order("a new disk", "k1") });
    let held = api.call(Some(&admin.token), "Machines/Hold", hold.clone()).await?.ok()?;
    assert_eq!((&held["changed"], &held["replayed"]), (&json!(true), &json!(false)));
    assert_eq!(held["before"], json!({}));
    assert_eq!(held["after"]["hold"]["scope"], "power");

    let again = api.call(Some(&admin.token), "Machines/Hold", hold).await?.ok()?;
    assert_eq!(
        (&again["replayed"], &again["auditId"], &again["message"]),
        (&json!(true), &held["auditId"], &held["message"])
    );
    assert_eq!(api.count("SELECT count(*) FROM history WHERE event = 'Held'").await?, 1);
    let other = json!({ "machine": machine, "order": order("a new disk", "k1") });
    let refused = api.call(Some(&admin.token), "Machines/Hold", other).await?;
    assert_eq!(refused.code, 409, "{refused:?}");

    let release = json!({ "machine": machine, "order": order("disk is in", "k2") });
    api.call(Some(&admin.token), "Machines/Release", release).await?.ok()?;
    let audit = api.call(Some(&admin.token), "Audit/List", json!({ "machine": machine })).await?.ok()?;
    let lines: Vec<(&Value, &Value, &Value)> = audit["records"]
        .as_array()
        .context("a list")?
        .iter()
        .map(|line| (&line["rpc"], &line["reason"], &line["outcome"]))
        .collect();
    assert_eq!(
        lines,
        [
            (&json!("shepherd.fleet.v1.Machines/Release"), &json!("disk is in"), &json!("changed")),
            (&json!("shepherd.fleet.v1.Machines/Hold"), &json!("a new disk"), &json!("refused")),
            (&json!("shepherd.fleet.v1.Machines/Hold"), &json!("a new disk"), &json!("changed")),
        ]
    );
    let actor = audit["records"][0]["actor"].as_str().context("an actor")?;
    assert!(actor.starts_with("admin's (token ") && actor.contains(&admin.id.to_string()), "{actor}");
    assert_eq!(audit["records"][0]["before"]["hold"]["reason"], "a new disk");
    assert_eq!(audit["records"][0]["after"], json!({}));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_says_what_would_be_and_changes_nothing() -> TestResult {
    let api = Api::start("api_dry_run").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let state = "SELECT coalesce(sum(version), 0)::INT8 + (SELECT count(*) FROM machine_hold)
                 + (SELECT count(*) FROM history) FROM machine_due";
    let before = api.count(state).await?;
    let hold = json!({ "machine": machine, "order": { "reason": "what if", "dryRun": true } });
    let dry = api.call(Some(&operator.token), "Machines/Hold", hold).await?.ok()?;
    assert_eq!((&dry["changed"], &dry["dryRun"]), (&json!(true), &json!(true)));
    assert_eq!(dry["after"]["hold"]["reason"], "what if");
    assert_eq!(api.count(state).await?, before, "a dry run changed something");
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE dry_run").await?, 1, "but it is in the audit");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_order_given_many_times_at_once_is_carried_out_once() -> TestResult {
    let api = std::sync::Arc::new(Api::start("api_at_once").await?);
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        let (api, token) = (api.clone(), operator.token.clone());
        calls.spawn(async move {
            let hold = json!({ "machine": machine, "order": order("all at once", "one") });
            api.call(Some(&token), "Machines/Hold", hold).await?.ok()
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = calls.join_next().await {
        answers.push(answer??);
    }
    assert_eq!(answers.iter().filter(|answer| answer["replayed"] == json!(false)).count(), 1, "{answers:#?}");
    assert!(answers.iter().all(|answer| answer["auditId"] == answers[0]["auditId"]));
    assert_eq!(api.count("SELECT count(*) FROM history WHERE event = 'Held'").await?, 1);
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?, 1);
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    for _ in 0..8 {
        let (api, token) = (api.clone(), admin.token.clone());
        calls.spawn(async move {
            let body = json!({ "name": "kim", "role": "viewer", "order": order("all at once", "two") });
            api.call(Some(&token), "Credentials/Create", body).await?.ok()
        });
    }
    let mut tokens = 0;
    while let Some(answer) = calls.join_next().await {
        tokens += usize::from(answer??["token"] != json!(""));
    }
    assert_eq!(tokens, 1, "one response holds the token");
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name = 'kim'").await?, 1);
    Ok(std::sync::Arc::into_inner(api).context("every caller has its response")?.stop().await?)
}

/// A valid request of this call.
pub(super) fn request(rpc: &str, machine: MachineId, credential: uuid::Uuid) -> anyhow::Result<Value> {
    let mut body = match rpc {
        "Machines/Hold"
        | "Machines/Release"
        | "Machines/Retry"
        | "Machines/CancelRetire"
        | "Machines/CancelPower"
        | "Machines/Reboot"
        | "Machines/Quarantine" => {
            json!({ "machine": machine })
        }
        "Machines/Power" => json!({ "machine": machine, "action": "cycle" }),
        "Machines/Label" => json!({ "machine": machine, "set": { "row": "7" } }),
        "BulkOrders/Submit" => {
            json!({ "selector": "fact=provided", "expectedMachines": 2, "release": { "quarantine": true } })
        }
        "Logs/Request" => json!({ "machine": machine, "log": "roleserver" }),
        "Machines/Retire" => json!({ "machine": machine, "wipe": true }),
        "Machines/WaiveStage" => {
            let known = format!("rack/{machine} is not wiped");
            json!({ "machine": machine, "stage": "wipe", "confirmation": known })
        }
        "Machines/AllowHostKey" => json!({ "machine": machine, "fingerprint": key(2).fingerprint() }),
        "Machines/AllowSigningKeys" => json!({ "machine": machine }),
        "Credentials/Create" => json!({ "name": "kim", "role": "viewer" }),
        "Loops/Pause" => json!({ "name": "updater", "provider": "rack", "expiresAfter": "2h" }),
        "Loops/Resume" => json!({ "name": "updater" }),
        "Machines/Prioritize" => json!({ "machine": machine, "level": "urgent", "expiresAfter": "2h" }),
        "Approvals/Approve" => json!({ "approvalId": credential }),
        "Budgets/Set" => json!({ "kind": "reboot", "maxCount": 3, "window": "5m" }),
        "Updates/Create" => json!({ "release": "release", "selector": "" }),
        "Updates/Pause" | "Updates/Resume" | "Updates/Abort" => json!({ "id": "u1" }),
        "Artefacts/Add" => json!({ "sha256": ARTEFACT, "name": "abc" }),
        "Artefacts/Delete" => json!({ "artefact": "abc" }),
        "Clusters/Create" => json!({ "name": "ams", "controlPlane": 3, "workers": 1, "selector": "cpus>=4" }),
        "Clusters/Change" => json!({ "name": "ams", "workers": 2, "addRoles": ["web"] }),
        "Clusters/DeclareRole" => {
            let run = json!({ "path": "/bin/true" });
            let service = json!({ "name": "server", "program": run, "user": "root" });
            json!({ "name": "ams", "declaration": { "role": "front", "services": [service] } })
        }
        "Clusters/UndeclareRole" => json!({ "name": "ams", "role": "front" }),
        "Clusters/ApproveMachine" => json!({ "name": "ams", "machine": machine }),
        "Clusters/Snapshot"
        | "Clusters/RotateKey"
        | "Clusters/RotateSecretsKey"
        | "Clusters/RotateAuthority"
        | "Clusters/RenewPeers"
        | "Clusters/Delete" => json!({ "name": "ams" }),
        // Its curators never answered.
        "Clusters/Restore" => json!({ "name": "ams", "bypassQuorum": true }),
        "ClusterCredentials/Issue" => json!({ "name": "fra", "publicKey": "07".repeat(32), "holder": "kim" }),
        "ClusterCredentials/Revoke" => json!({ "name": "fra", "credentialId": credential }),
        "ClusterKubernetes/Set" => json!({ "name": "fra", "patch": { "addOns": { "dns": "release" } } }),
        "ClusterKubernetes/Rotate" => json!({ "name": "fra", "keys": "clients" }),
        "ClusterKubernetes/IssueUser" => {
            let key = format!("3059301306072a8648ce3d020106082a8648ce3d03010703420004{}", "07".repeat(64));
            json!({ "name": "fra", "publicKey": key, "holder": "kim", "access": "viewer" })
        }
        "ClusterKubernetes/Upgrade" => json!({ "name": "fra", "kubernetes": "newer" }),
        "ClusterKubernetes/Remove"
        | "ClusterKubernetes/RollBack"
        | "ClusterKubernetes/PauseUpgrade"
        | "ClusterKubernetes/ResumeUpgrade"
        | "ClusterKubernetes/AbortUpgrade" => json!({ "name": "fra" }),
        "Credentials/Revoke" => json!({ "credentialId": credential }),
        other => anyhow::bail!("{other} takes an order, and this test knows no request of it"),
    };
    body["order"] = order(&format!("to try {rpc}"), rpc);
    Ok(body)
}

/// Marks the one cluster as founded, and stores a snapshot of it.
async fn found_cluster(api: &Api) -> anyhow::Result<()> {
    for statement in [
        "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = 'ca', curators = '[]'",
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 12345, 5, 3, '[]',
                decode(repeat('cd', 32), 'hex') FROM cluster",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    Ok(())
}

/// Lets the Secrets of every cluster be encrypted with a first key.
const SETTLE_SECRETS: &str = r#"
    UPDATE cluster SET secret_keys = '{"stage": "settled", "since": "2026-01-01T00:00:00Z", "current": 1,
        "keys": [{"number": 1, "fingerprint": "ab", "created_at": "2026-01-01T00:00:00Z", "dropped_at": null}],
        "may_be_plain": false, "encrypted_at": null, "restored_for": null, "rotation": null}'"#;

/// Inserts a cluster with the name `fra`.
pub(super) const INSERT_CLUSTER: &str =
    "INSERT INTO cluster VALUES (gen_random_uuid(), 'fra', 3, 2, '', '[]', 'manual', 1, clock_timestamp(), 'kim', NULL, NULL,
         clock_timestamp(), 'ca', '[]', NULL, NULL, '[]', FALSE, NULL, NULL)";

/// Inserts the founded cluster `fra`, with Kubernetes to change and to upgrade.
pub(super) async fn insert_cluster(api: &Api) -> anyhow::Result<()> {
    for statement in [
        INSERT_CLUSTER,
        "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by, kubernetes)
         VALUES (decode(repeat('1a', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'older', clock_timestamp(), 'kim',
                 '1.30.1'),
                (decode(repeat('1b', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'newer', clock_timestamp(), 'kim',
                 '1.31.0')",
        "INSERT INTO cluster_kubernetes SELECT cluster_id, decode(repeat('1a', 32), 'hex'), '1.30.1', '10.96.0.0/16',
                '10.128.0.0/12', 24, 'cluster.local', '{}', NULL, clock_timestamp(), 'kim', NULL, '[]', NULL FROM cluster",
        "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = 'ca', curators = '[]' WHERE name = 'fra'",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    Ok(())
}

/// SHA-256 of the text "abc".
const ARTEFACT: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

/// The keys of a shepherd that verifies signatures.
pub(super) fn signing() -> Arc<SigningConfiguration> {
    let key = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    Arc::new(SigningConfiguration::parse(Some(key), Vec::new()).unwrap_or_default())
}

/// A host key of this byte.
pub(super) fn key(byte: u8) -> HostKey {
    HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![byte; 51] }
}

/// The outcomes in a response: one, or one for each machine.
fn outcomes(answer: &Value) -> anyhow::Result<Vec<&str>> {
    let found: Vec<&Value> = match (answer["outcomes"].as_array(), answer["order"].is_object()) {
        (Some(many), _) => many.iter().collect(),
        (None, true) => vec![&answer["order"]],
        (None, false) => vec![answer],
    };
    let mut names = Vec::new();
    for one in found {
        let name = one["outcome"].as_str().with_context(|| format!("no outcome: {answer}"))?;
        anyhow::ensure!(["CHANGED", "ALREADY", "NO_EFFECT"].contains(&name), "{answer}");
        anyhow::ensure!(one["changed"] == json!(name == "CHANGED"), "{answer}");
        names.push(name);
    }
    names.sort_unstable();
    Ok(names)
}

/// What an order did, what it does again, and what the audit calls it.
async fn outcome_line(
    api: &Api,
    key: &Key,
    rpc: &str,
    body: &Value,
    first: &Value,
) -> anyhow::Result<String> {
    let done = outcomes(first)?;
    let replayed = api.call(Some(&key.token), rpc, body.clone()).await?.ok()?;
    assert_eq!(outcomes(&replayed)?, done, "{rpc} is answered with another outcome when it is repeated");
    if first["outcomes"].is_null() {
        let recorded: String =
            sqlx::query_scalar("SELECT outcome FROM audit WHERE rpc LIKE $1 AND NOT dry_run AND reason = $2")
                .bind(format!("%.{rpc}"))
                .bind(format!("to try {rpc}"))
                .fetch_one(&api.pool)
                .await?;
        let expected = match done[..] {
            ["CHANGED"] => "changed",
            ["ALREADY"] => "unchanged",
            _ => "no_effect",
        };
        assert_eq!(recorded, expected, "{rpc} in the audit");
    }
    // A dry run changes nothing that the next call needs.
    let mut again = body.clone();
    again["order"] = json!({ "reason": "what if", "dryRun": true });
    let again = api.call(Some(&key.token), rpc, again).await?;
    let second = match again.code {
        200 => outcomes(&again.json)?.join(" "),
        _ => again.json["error"]["status"].as_str().unwrap_or_default().to_owned(),
    };
    Ok(format!("{rpc}: {}, again {second}\n", done.join(" ")))
}

/// Brings the state about in which the request of this call is carried out.
async fn prepare_call(api: &Api, rpc: &str, machine: MachineId) -> anyhow::Result<()> {
    // The settings are changed before they are upgraded, in the order of the contract.
    if rpc == "ClusterKubernetes/Rotate" {
        sqlx::query("UPDATE cluster_kubernetes SET removing_by = NULL").execute(&api.pool).await?;
    }
    if rpc == "Clusters/Snapshot" {
        found_cluster(api).await?;
    }
    // It releases one of two machines.
    if rpc == "BulkOrders/Submit" {
        change(api, machine, FactChange::Quarantined("it is odd".to_owned())).await?;
    }
    // Its members get certificates once its curators are silent.
    if rpc == "Clusters/RenewPeers" {
        let silent = "UPDATE cluster SET polled_at = clock_timestamp(),
                          unreachable_since = clock_timestamp() - INTERVAL '1 hour'";
        sqlx::query(silent).execute(&api.pool).await?;
    }
    if rpc == "Clusters/RotateSecretsKey" {
        sqlx::query(SETTLE_SECRETS).execute(&api.pool).await?;
    }
    // A member that has reported no key.
    if rpc == "Clusters/ApproveMachine" {
        let join = "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
                    SELECT $1, cluster_id, 'worker', clock_timestamp() FROM cluster WHERE name = 'ams'";
        sqlx::query(join).bind(machine.0).execute(&api.pool).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_that_takes_an_order_is_in_the_audit() -> TestResult {
    let api = Api::start_with("api_audit", |settings| settings.signing = signing()).await?;
    let (admin, other) =
        (api.key(AccessRole::Admin, &[], None).await?, api.key(AccessRole::Viewer, &[], None).await?);
    let (machine, second) = (provided(&api.pool).await?, provided(&api.pool).await?);
    pin_host_key(&api, machine, 1).await?;
    refuse(&api, machine, 2).await?;
    // Its last heartbeat is recent, so a log can be requested of it.
    sqlx::query(
        "INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
         VALUES ($1, clock_timestamp() + INTERVAL '1 hour', 'b', 'i', 1)",
    )
    .bind(machine.0)
    .execute(&api.pool)
    .await?;
    // A request to approve, under an id that this test knows.
    sqlx::query(
        "INSERT INTO approval (approval_id, actor, idempotency_key, rpc, request, target, reason, requested_at, expires_at)
         VALUES ($1, 'lee@a', 'k', 'r', decode('00', 'hex'), 't', 'r', clock_timestamp(),
                 clock_timestamp() + INTERVAL '1 hour')",
    )
    .bind(other.id)
    .execute(&api.pool)
    .await?;
    // A release to roll out, and a roll-out that is under way.
    for statement in [
        "INSERT INTO artefact VALUES (decode(repeat('cd', 32), 'hex'), 3, gen_random_uuid(), clock_timestamp(), 'release',
             clock_timestamp(), 'kim')",
        "INSERT INTO roll_out VALUES ('u1', decode(repeat('cd', 32), 'hex'), 'release', '', 1, 60, clock_timestamp(), 'kim',
             'a try', NULL, NULL, NULL)",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    api.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = true).await?;
    insert_cluster(&api).await?;
    // A credential to revoke, under an id that this test knows.
    sqlx::query(
        "INSERT INTO cluster_credential
         SELECT $1, cluster_id, decode(repeat('ef', 32), 'hex'), 'kim', 3600, clock_timestamp(), 'lee', NULL, NULL, NULL, NULL,
                NULL, NULL, NULL FROM cluster",
    )
    .bind(other.id)
    .execute(&api.pool)
    .await?;
    // An artefact to add.
    let begin = json!({ "sha256": ARTEFACT, "size": 3 });
    api.call(Some(&admin.token), "Artefacts/BeginUpload", begin).await?.ok()?;
    let piece = json!({ "sha256": ARTEFACT, "number": 0, "piece": { "bytes": "YWJj" } });
    api.call(Some(&admin.token), "Artefacts/PutPiece", piece).await?.ok()?;
    let mut lines = Vec::new();
    for service in DescriptorPool::decode(DESCRIPTORS)?.services() {
        for method in service.methods() {
            if method.input().get_field_by_name("order").is_none() {
                continue;
            }
            let rpc = format!("{}/{}", service.name(), method.name());
            prepare_call(&api, &rpc, machine).await?;
            // A machine with an ordered reboot cannot get another power order.
            let about = if rpc == "Machines/Power" { second } else { machine };
            let body = request(&rpc, about, other.id)?;
            let first = api.call(Some(&admin.token), &rpc, body.clone()).await?.ok()?;
            let written: Option<(String, String, Option<uuid::Uuid>, bool)> = sqlx::query_as(
                "SELECT reason, actor, credential_id, before IS NOT NULL AND after IS NOT NULL FROM audit
                 WHERE rpc = $1 AND NOT dry_run ORDER BY at DESC LIMIT 1",
            )
            .bind(format!("{}/{}", service.full_name(), method.name()))
            .fetch_optional(&api.pool)
            .await?;
            let (reason, actor, credential, both) =
                written.with_context(|| format!("{rpc} is in no audit"))?;
            assert_eq!((reason, credential), (format!("to try {rpc}"), Some(admin.id)));
            assert!(both || !rpc.starts_with("Machines/"), "{rpc} is without values before and after");
            assert!(actor.starts_with("admin's (token "), "{actor}");
            lines.push(outcome_line(&api, &admin, &rpc, &body, &first).await?);
        }
    }
    assert!(lines.len() >= 11, "only {} calls take an order", lines.len());
    lines.sort_unstable();
    insta::with_settings!({snapshot_path => "../golden/api", prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!("outcomes", lines.concat());
    });
    Ok(api.stop().await?)
}

/// An admin who cancels a retirement with a wipe can order one without a wipe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wipe_that_was_ordered_is_called_off_by_an_admin_alone() -> TestResult {
    let api = Api::start("api_wipe").await?;
    let (operator, admin) =
        (api.key(AccessRole::Operator, &[], None).await?, api.key(AccessRole::Admin, &[], None).await?);
    let machine = provided(&api.pool).await?;
    let retire =
        |wipe: bool, key: &str| json!({ "machine": machine, "wipe": wipe, "order": order("sold", key) });
    let cancel = |key: &str| json!({ "machine": machine, "order": order("it stays", key) });
    api.call(Some(&admin.token), "Machines/Retire", retire(true, "1")).await?.ok()?;
    for _ in 0..2 {
        let refused = api.call(Some(&operator.token), "Machines/CancelRetire", cancel("2")).await?;
        assert!(refused.message().contains("only an admin may cancel that"), "{refused:?}");
    }
    let wiped = "SELECT count(*) FROM machine_retirement WHERE wipe";
    assert_eq!(api.count(wiped).await?, 1);
    api.call(Some(&admin.token), "Machines/CancelRetire", cancel("3")).await?.ok()?;
    assert_eq!(api.count(wiped).await?, 0);
    api.call(Some(&operator.token), "Machines/Retire", retire(false, "4")).await?.ok()?;
    let cancelled = api.call(Some(&operator.token), "Machines/CancelRetire", cancel("5")).await?.ok()?;
    assert_eq!(cancelled["changed"], true);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_for_what_was_seen_is_refused_when_it_is_another_by_now() -> TestResult {
    let api = Api::start("api_version").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let seen = api.call(Some(&operator.token), "Machines/Get", json!({ "machine": machine })).await?.ok()?;
    let hold = |version: &Value, key: &str| {
        // With a hold on power alone, a machine that waits for its agent is scheduled as before.
        json!({ "machine": machine, "scope": "power",
                "order": { "reason": "r", "idempotencyKey": key, "expectedVersion": version } })
    };
    api.call(Some(&operator.token), "Machines/Hold", hold(&seen["version"], "1")).await?.ok()?;
    let refused = api.call(Some(&operator.token), "Machines/Hold", hold(&seen["version"], "2")).await?;
    assert_eq!((refused.code, &refused.json["error"]["status"]), (409, &json!("ABORTED")));
    assert!(refused.message().contains("read it again"), "{refused:?}");
    let written: Vec<(String, Option<String>)> =
        sqlx::query_as("SELECT message, idempotency_key FROM audit WHERE outcome = 'refused'")
            .fetch_all(&api.pool)
            .await?;
    assert_eq!(written, [(refused.message().to_owned(), None)], "who was refused is in the audit, too");

    // With a correction it may be given under the same key.
    let seen = api.call(Some(&operator.token), "Machines/Get", json!({ "machine": machine })).await?.ok()?;
    let held = api.call(Some(&operator.token), "Machines/Hold", hold(&seen["version"], "2")).await?.ok()?;
    assert_eq!((&held["changed"], &held["replayed"]), (&json!(true), &json!(false)));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_believed_and_what_is_revoked_is_in_the_audit_before_and_after() -> TestResult {
    let api = Api::start("api_before_after").await?;
    let (admin, other) =
        (api.key(AccessRole::Admin, &[], None).await?, api.key(AccessRole::Viewer, &[], None).await?);
    let machine = provided(&api.pool).await?;
    pin_host_key(&api, machine, 1).await?;
    refuse(&api, machine, 2).await?;
    let allow = |byte: u8, key_of_order: &str| json!({ "machine": machine, "fingerprint": key(byte).fingerprint(), "order": order("new board", key_of_order) });
    let unknown = api.call(Some(&admin.token), "Machines/AllowHostKey", allow(3, "k")).await?;
    assert_eq!((unknown.code, &unknown.json["error"]["status"]), (400, &json!("FAILED_PRECONDITION")));
    let believed = api.call(Some(&admin.token), "Machines/AllowHostKey", allow(2, "k")).await?.ok()?;
    let keys =
        |value: &Value| (value["ssh_host_key"]["pinned"].clone(), value["ssh_host_key"]["refused"].clone());
    let fingerprint = |byte: u8| json!(key(byte).fingerprint());
    assert_eq!(keys(&believed["before"]), (fingerprint(1), fingerprint(2)));
    assert_eq!(keys(&believed["after"]), (fingerprint(2), json!(null)));
    // The response was lost, and meanwhile another key of the machine was rejected.
    refuse(&api, machine, 4).await?;
    let again = api.call(Some(&admin.token), "Machines/AllowHostKey", allow(2, "k")).await?.ok()?;
    assert_eq!((&again["replayed"], &again["auditId"]), (&json!(true), &believed["auditId"]));

    let revoke = json!({ "credentialId": other.id, "order": order("left", "r") });
    let revoked = api.call(Some(&admin.token), "Credentials/Revoke", revoke).await?.ok()?;
    assert_eq!((&revoked["before"]["active"], &revoked["after"]["active"]), (&json!(true), &json!(false)));
    let by = revoked["after"]["revoked_by"].as_str().context("by whom")?;
    assert!(by.contains(&admin.id.to_string()), "{by}");
    let gone = json!({ "credentialId": uuid::Uuid::nil(), "order": order("left", "s") });
    assert_eq!(api.call(Some(&admin.token), "Credentials/Revoke", gone).await?.code, 404);
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE outcome = 'refused'").await?, 2);
    Ok(api.stop().await?)
}

/// The machine shows this host key for the first time.
pub(super) async fn pin_host_key(api: &Api, machine: MachineId, byte: u8) -> anyhow::Result<()> {
    let key = key(byte);
    let pinned = FactChange::HostKeyPinned {
        algorithm: key.algorithm,
        public_key: key.key,
        source: HostKeySource::FirstUse,
    };
    change(api, machine, pinned).await
}

/// The machine is rejected because of this host key.
pub(super) async fn refuse(api: &Api, machine: MachineId, byte: u8) -> anyhow::Result<()> {
    let key = key(byte);
    change(api, machine, FactChange::HostKeyRefused { algorithm: key.algorithm, public_key: key.key }).await
}

async fn change(api: &Api, machine: MachineId, change: FactChange) -> anyhow::Result<()> {
    let changed = api.bmdb.change_machine(machine, move |_| Decision {
        changes: vec![change.clone()],
        events: Vec::new(),
        output: (),
    });
    Ok(changed.await.map(drop)?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_without_reason_or_key_or_sense_is_refused_with_its_field() -> TestResult {
    let api = Api::start("api_odd_orders").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    for (field, body) in [
        ("order", json!({ "machine": machine })),
        ("order.reason", json!({ "machine": machine, "order": order(" ", "k") })),
        ("order.idempotency_key", json!({ "machine": machine, "order": order("r", "") })),
        ("scope", json!({ "machine": machine, "scope": "half", "order": order("r", "k") })),
        ("expires_after", json!({ "machine": machine, "expiresAfter": "soon", "order": order("r", "k") })),
        ("machine", json!({ "order": order("r", "k") })),
        ("machine", json!({ "machine": "a\u{0}", "order": order("r", "k") })),
        ("order.reason", json!({ "machine": machine, "order": order("\u{1b}[2J", "k") })),
        ("order.idempotency_key", json!({ "machine": machine, "order": order("r", "\u{0}") })),
        ("body", json!({ "machin": machine })),
        ("body", json!([1])),
    ] {
        let refused = api.call(Some(&operator.token), "Machines/Hold", body).await?;
        assert_eq!(refused.code, 400, "{field}: {refused:?}");
        let violation = refused.json["error"]["details"].as_array().and_then(|details| {
            details.iter().find_map(|detail| detail["fieldViolations"][0]["field"].as_str())
        });
        assert_eq!(violation, Some(field), "{refused:?}");
    }
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let versioned = json!({ "name": "kim", "role": "viewer", "order": { "reason": "r", "idempotencyKey": "k", "expectedVersion": "1" } });
    assert_eq!(
        api.call(Some(&admin.token), "Credentials/Create", versioned).await?.code,
        400,
        "none has a version"
    );
    let nobody = json!({ "machine": "no-such", "order": order("r", "k") });
    assert_eq!(api.call(Some(&operator.token), "Machines/Hold", nobody).await?.code, 404);
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?, 0);
    Ok(api.stop().await?)
}
