//! Ways around the two-person rule, tried with one stolen token of an admin: each is refused, and changes nothing.
//!
//! Each way calls what exists in the contracts, and is refused with the code, the reason and the sentence of the rule: a
//! call that does not exist, or that fails for another reason, is no way that was tried.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use prost_reflect::{DescriptorPool, ServiceDescriptor};
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::policy_flags::PolicyFlags;
use shepherd::proto::fleet::DESCRIPTORS;

use crate::api::approvals::why;
use crate::api::orders::{INSERT_CLUSTER, insert_cluster, signing};
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

/// A thief who has the token of the admin Kim, beside the admin Lee, who is careless.
struct Thief {
    api: Api,
    kim: String,
    lee: String,
    lees_id: Value,
    /// Kim's second token.
    second: String,
    /// A token under Kim's name with a character that nobody sees, as an earlier release stored it.
    hidden: String,
    /// A token that was revoked before the rule was on.
    revoked: String,
    keys: u32,
    refused: Vec<&'static str>,
}

impl Thief {
    async fn new() -> anyhow::Result<Self> {
        let api = Api::start_with("api_rule_bypasses", |settings| settings.signing = signing()).await?;
        let first = api.key(AccessRole::Admin, &[], None).await?;
        let (mut tokens, mut ids) = (Vec::new(), Vec::new());
        for name in ["kim", "lee", "KIM", "hidden"] {
            let body = json!({ "name": name, "role": "admin", "order": order("is new", name) });
            let made = api.call(Some(&first.token), "Credentials/Create", body).await?.ok()?;
            tokens.push(made["token"].as_str().context("a token")?.to_owned());
            ids.push(made["credential"]["credentialId"].clone());
        }
        let [kim, lee, second, hidden] = <[String; 4]>::try_from(tokens).ok().context("four tokens")?;
        sqlx::query("UPDATE access_credential SET name = $1 WHERE name = 'hidden'")
            .bind("k\u{200b}im")
            .execute(&api.pool)
            .await?;
        // What exists: a viewer, and a certificate of an admin that was revoked.
        api.key(AccessRole::Viewer, &[], None).await?;
        let made =
            api.call(Some(&kim), "Credentials/Create", laptop(&order("is new", "laptop"))).await?.ok()?;
        for id in [json!(first.id), made["credential"]["credentialId"].clone()] {
            let body =
                json!({ "credentialId": id, "order": order("was for the beginning", &format!("end {id}")) });
            api.call(Some(&kim), "Credentials/Revoke", body).await?.ok()?;
        }
        let switched = api.bmdb.enable_two_person_rule("a test").await?.context("it was off")?;
        ensure!(switched.outcome.is_changed(), "{switched:?}");
        let lees_id = ids.swap_remove(1);
        let (revoked, refused) = (first.token, Vec::new());
        Ok(Self { api, kim, lee, lees_id, second, hidden, revoked, keys: 0, refused })
    }

    /// An order with a key of its own.
    fn order(&mut self, reason: &str) -> Value {
        self.keys += 1;
        order(reason, &format!("bypass-{}", self.keys))
    }

    /// Notes that a call was refused by the rule, with this reason for programs and its sentence.
    async fn refuses(
        &mut self,
        way: &'static str,
        (token, rpc, body): (&str, &str, Value),
        reason: &str,
    ) -> anyhow::Result<Value> {
        check_call(rpc)?;
        let answer = self.api.call(Some(token), rpc, body).await?;
        ensure!(answer.code != 200, "{way} was let through: {answer:?}");
        let info = why(&answer);
        ensure!(info["reason"] == reason, "{way}: {answer:?}");
        let status = &answer.json["error"]["status"];
        ensure!((answer.code, status) == (400, &json!("FAILED_PRECONDITION")), "{way}: {answer:?}");
        let sentence = sentence(reason, rpc)?;
        ensure!(answer.message().contains(&sentence), "{way}: {sentence:?} is not in {answer:?}");
        self.refused.push(way);
        Ok(info)
    }

    /// Gives an order that waits for another admin. Returns the id of the request.
    async fn request(&mut self, way: &'static str, rpc: &str, body: Value) -> anyhow::Result<String> {
        let kim = self.kim.clone();
        let info = self.refuses(way, (kim.as_str(), rpc, body), "APPROVAL_REQUIRED").await?;
        Ok(info["metadata"]["approval"].as_str().context("an id")?.to_owned())
    }

    fn approval(&mut self, approval: &str) -> Value {
        json!({ "approvalId": approval, "order": self.order("looks right") })
    }

    async fn approve_as_lee(&mut self, approval: &str) -> anyhow::Result<()> {
        let body = self.approval(approval);
        self.api.call(Some(&self.lee), "Approvals/Approve", body).await?.ok()?;
        Ok(())
    }

    async fn credentials(&self) -> anyhow::Result<i64> {
        self.api.count("SELECT count(*) FROM access_credential").await
    }

    async fn rule_is_on(&self) -> anyhow::Result<bool> {
        self.api.bmdb.read_policy().await?;
        Ok(self.api.bmdb.policy().1.two_person_rule.required)
    }
}

/// The service of the contracts that has this name.
fn service(name: &str) -> anyhow::Result<ServiceDescriptor> {
    let contracts = DescriptorPool::decode(DESCRIPTORS)?;
    let found = contracts.get_service_by_name(&format!("shepherd.fleet.v1.{name}"));
    found.with_context(|| format!("the contracts have no service {name}"))
}

/// Checks that this call exists.
fn check_call(rpc: &str) -> anyhow::Result<()> {
    let (of, method) = rpc.split_once('/').with_context(|| rpc.to_owned())?;
    ensure!(service(of)?.methods().any(|found| found.name() == method), "the contracts have no call {rpc}");
    Ok(())
}

/// What the refusal with this reason says.
fn sentence(reason: &str, rpc: &str) -> anyhow::Result<String> {
    Ok(match (reason, rpc) {
        ("APPROVAL_REQUIRED", _) => {
            let order = match rpc {
                "Budgets/Set" => "setting a budget",
                "Credentials/Create" => "creating a credential",
                "Credentials/Revoke" => "leaving fewer than two admins",
                "ClusterCredentials/Issue" | "ClusterKubernetes/IssueUser" => {
                    "issuing a certificate for a cluster"
                }
                "Machines/AllowSigningKeys" => "replacing the signing keys of a machine",
                _ => bail!("{rpc} needs no approval"),
            };
            format!("{order} needs another admin here, and nothing was changed")
        }
        ("NOT_AS_REQUESTED", _) => {
            "this is not the order that was requested with the idempotency key".to_owned()
        }
        ("SAME_PERSON", "Approvals/Approve") => {
            "requested it, and somebody else has to approve it".to_owned()
        }
        ("NEWER_THAN_REQUEST", "Approvals/Approve") => {
            "it was requested before this credential existed".to_owned()
        }
        ("TOO_NEW", "Approvals/Approve") => "this credential is new, and approves orders from".to_owned(),
        _ => bail!("no sentence of {reason} is known for {rpc}"),
    })
}

/// A certificate of an admin, pinned.
fn laptop(order: &Value) -> Value {
    json!({ "name": "max", "role": "admin", "certificateSha256": "cd".repeat(32), "order": order })
}

/// Orders to set a budget, which need two people.
pub(super) fn budget(most: u32, order: &Value) -> Value {
    json!({ "kind": "reboot", "maxCount": most, "order": order })
}

pub(super) fn credential(name: &str, role: &str, order: &Value) -> Value {
    json!({ "name": name, "role": role, "order": order })
}

/// What the thief tries without any help. Returns the requests for a budget and for a second admin.
async fn try_alone(thief: &mut Thief, mallory: &Value) -> anyhow::Result<(String, String)> {
    let kim = thief.kim.clone();
    let given = thief.order("more reboots");
    let old = thief.request("gives an order alone", "Budgets/Set", budget(5000, &given)).await?;
    for (way, token) in [
        ("approves its own order", kim.clone()),
        ("approves with another token of the same person", thief.second.clone()),
        ("approves under a name with a hidden character", thief.hidden.clone()),
    ] {
        let body = thief.approval(&old);
        thief.refuses(way, (token.as_str(), "Approvals/Approve", body), "SAME_PERSON").await?;
    }
    let created = thief.request("creates a second admin", "Credentials/Create", mallory.clone()).await?;
    let given = thief.order("a pinned certificate");
    let mut pinned = credential("ci", "viewer", &given);
    pinned["certificateSha256"] = json!("ab".repeat(32));
    thief.request("pins a certificate", "Credentials/Create", pinned).await?;
    let body = thief.approval(&created);
    thief.refuses("approves the new admin", (kim.as_str(), "Approvals/Approve", body), "SAME_PERSON").await?;
    let given = thief.order("lee has another laptop");
    let lookalike = credential("l\u{200b}ee", "admin", &given);
    let lookalike = thief.api.call(Some(&kim), "Credentials/Create", lookalike).await?;
    ensure!(lookalike.code == 400, "{lookalike:?}");
    ensure!(lookalike.message().contains("has the hidden character U+200B"), "{lookalike:?}");
    thief.refused.push("takes a name that looks like another one");
    Ok((old, created))
}

/// A certificate for the cluster: its call, the text that the approver reads, and the request with this key.
fn certificate(kubernetes: bool, byte: &str, order: &Value) -> (&'static str, String, Value) {
    if kubernetes {
        let point = format!("04{}", byte.repeat(64));
        let key = format!("3059301306072a8648ce3d020106082a8648ce3d030107034200{point}");
        let body =
            json!({ "name": "fra", "publicKey": key, "holder": "kim", "access": "owner", "order": order });
        let rights = "a certificate for its API servers with the access owner";
        let target = format!("the cluster fra: {rights}, valid for 8h, with the key {point}, of kim");
        return ("ClusterKubernetes/IssueUser", target, body);
    }
    let key = byte.repeat(32);
    let body = json!({ "name": "fra", "publicKey": key, "holder": "kim", "order": order });
    let rights = "a certificate with all rights at its curators";
    let target = format!("the cluster fra: {rights}, valid for 8h, with the key {key}, of kim");
    ("ClusterCredentials/Issue", target, body)
}

async fn run_statements(api: &Api, statements: &[&'static str]) -> sqlx::Result<()> {
    for &statement in statements {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    Ok(())
}

/// The thief wants rights in a cluster, where this API and its audit do not count.
async fn try_certificates(thief: &mut Thief) -> anyhow::Result<()> {
    insert_cluster(&thief.api).await?;
    let stored =
        "SELECT (SELECT count(*) FROM cluster_credential) + (SELECT count(*) FROM cluster_kubernetes_user)";
    for (kubernetes, way, other) in [
        (false, "issues a certificate for a cluster", "has another key certified than was approved"),
        (true, "issues a kubeconfig", "has another key certified for API servers than was approved"),
    ] {
        let before = thief.api.count(stored).await?;
        let given = thief.order("a look");
        let (rpc, target, body) = certificate(kubernetes, "07", &given);
        let approval = thief.request(way, rpc, body.clone()).await?;
        let listed = thief.api.call(Some(&thief.lee), "Approvals/List", json!({})).await?.ok()?;
        let listed = listed["approvals"].as_array().context("a list")?;
        let line =
            listed.iter().find(|line| line["approvalId"] == approval.as_str()).context("the request")?;
        ensure!(line["target"] == target.as_str(), "{line}");
        thief.approve_as_lee(&approval).await?;
        let kim = thief.kim.clone();
        let (_, _, replaced) = certificate(kubernetes, "08", &given);
        thief.refuses(other, (kim.as_str(), rpc, replaced), "NOT_AS_REQUESTED").await?;
        if !kubernetes {
            // Another cluster has the name by then.
            let rename = "UPDATE cluster SET name = 'former' WHERE name = 'fra'";
            run_statements(&thief.api, &[rename, INSERT_CLUSTER]).await?;
            let way = "has a certificate for another cluster of the name than was approved";
            thief.refuses(way, (kim.as_str(), rpc, body.clone()), "NOT_AS_REQUESTED").await?;
            let restore = "UPDATE cluster SET name = 'fra' WHERE name = 'former'";
            run_statements(&thief.api, &["DELETE FROM cluster WHERE name = 'fra'", restore]).await?;
        }
        ensure!(thief.api.count(stored).await? == before, "{way}: something was issued");
        // What Lee approved is issued, once.
        let done = thief.api.call(Some(&kim), rpc, body.clone()).await?.ok()?;
        ensure!(done["message"].as_str().is_some_and(|text| text.ends_with("; approved by lee")), "{done}");
        let again = thief.api.call(Some(&kim), rpc, body).await?.ok()?;
        ensure!(again["replayed"] == json!(true), "{again}");
        ensure!(thief.api.count(stored).await? == before + 1, "{way}");
    }
    Ok(())
}

/// The thief changes what exists: a credential, and the rule itself.
async fn try_to_change(thief: &mut Thief) -> anyhow::Result<()> {
    let kim = thief.kim.clone();
    // A credential keeps its role: a wider one is another credential, under any name.
    let given = thief.order("the viewer has more to do");
    let wider = credential("viewer's", "admin", &given);
    thief
        .request("creates a wider credential under the name of another", "Credentials/Create", wider)
        .await?;
    // A revoked one stays revoked, also with an approval.
    let laptop = laptop(&thief.order("max is back"));
    let way = "brings a revoked certificate back";
    let approval = thief.request(way, "Credentials/Create", laptop.clone()).await?;
    thief.approve_as_lee(&approval).await?;
    let done = thief.api.call(Some(&kim), "Credentials/Create", laptop).await?.ok()?;
    let text = done["order"]["message"].as_str().context("a sentence")?;
    ensure!(done["order"]["changed"] == json!(false) && text.contains("is revoked or expired"), "{done}");
    let body = thief.approval(&approval);
    let revoked = thief.api.call(Some(&thief.revoked), "Approvals/Approve", body).await?;
    ensure!(revoked.code == 401, "{revoked:?}");
    thief.refused.push("approves with a revoked token");
    let alone = json!({ "credentialId": thief.lees_id, "order": thief.order("left") });
    let approval = thief.request("revokes the others", "Credentials/Revoke", alone).await?;
    let listed = thief.api.call(Some(&thief.lee), "Approvals/List", json!({})).await?.ok()?;
    let listed = listed["approvals"].as_array().context("a list")?;
    let line = listed.iter().find(|line| line["approvalId"] == approval.as_str()).context("the request")?;
    let target = line["target"].as_str().context("a target")?;
    ensure!(target.ends_with(", with the role admin, of lee"), "{line}");
    let off = json!({ "configuration": "require_second_admin = false" });
    thief.api.call(Some(&kim), "Plan/Get", off).await?.ok()?;
    ensure!(thief.rule_is_on().await?, "a plan changes nothing");
    thief.refused.push("ends the rule by a plan");
    let flags = PolicyFlags { require_second_admin: Some(false), ..PolicyFlags::default() };
    let warning = thief.api.bmdb.write_policy_flags("flags of a host", flags).await?.context("a warning")?;
    ensure!(warning.ends_with("the two-person rule stays on"), "{warning}");
    ensure!(thief.rule_is_on().await?, "a flag switches the rule on and never off");
    thief.refused.push("ends the rule by a flag");
    Ok(())
}

/// A call that changes who may do what needs a way in this file. These services have none besides those that are tried.
#[test]
fn no_other_call_changes_a_credential_or_the_policy() -> TestResult {
    for (name, expected) in [
        ("Credentials", &["WhoAmI", "List", "Create", "Revoke"][..]),
        ("Policy", &["Get"]),
        ("Budgets", &["List", "Set"]),
        ("Approvals", &["List", "Approve"]),
    ] {
        let service = service(name)?;
        let calls: Vec<String> = service.methods().map(|method| method.name().to_owned()).collect();
        assert_eq!(calls, expected, "{name}");
    }
    assert!(check_call("Credentials/Create").is_ok());
    for unknown in ["Credentials/Update", "Secrets/Create", "Create"] {
        assert!(check_call(unknown).is_err(), "{unknown}");
    }
    Ok(())
}

/// The thief wants machines to run what another key signed.
async fn try_signing_keys(thief: &mut Thief) -> anyhow::Result<()> {
    let (machine, other) = (provided(&thief.api.pool).await?, provided(&thief.api.pool).await?);
    let given = thief.order("both keys are lost");
    let body = |machine| json!({ "machine": machine, "order": given });
    let way = "has a machine get other signing keys";
    let approval = thief.request(way, "Machines/AllowSigningKeys", body(machine)).await?;
    thief.approve_as_lee(&approval).await?;
    let kim = thief.kim.clone();
    let way = "has another machine get other signing keys than was approved";
    let call = (kim.as_str(), "Machines/AllowSigningKeys", body(other));
    thief.refuses(way, call, "NOT_AS_REQUESTED").await?;
    let ordered = thief.api.count("SELECT count(*) FROM machine_key_replacement").await?;
    ensure!(ordered == 0, "{ordered} machines get other keys");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_around_the_two_person_rule_is_refused() -> TestResult {
    let mut thief = Thief::new().await?;
    let (kim, before) = (thief.kim.clone(), thief.credentials().await?);
    let given = thief.order("mallory is new");
    let mallory = credential("mallory", "admin", &given);
    let (old, created) = try_alone(&mut thief, &mallory).await?;
    try_to_change(&mut thief).await?;
    try_certificates(&mut thief).await?;
    try_signing_keys(&mut thief).await?;
    // Lee approves a viewer, and the thief wants an admin for it.
    let given = thief.order("for the pipeline");
    let viewer = credential("ci", "viewer", &given);
    let viewer = thief.request("creates a viewer", "Credentials/Create", viewer).await?;
    let listed = thief.api.call(Some(&thief.lee), "Approvals/List", json!({})).await?.ok()?;
    let listed = listed["approvals"].as_array().context("a list")?;
    let about = |id: &str| listed.iter().find(|line| line["approvalId"] == id).map(|line| &line["target"]);
    let (a, b) = (about(&viewer).context("a viewer")?, about(&created).context("an admin")?);
    assert_eq!(a, "credential with the role viewer, without an end, for all machines, of ci");
    assert_eq!(b, "credential with the role admin, without an end, for all machines, of mallory");
    thief.approve_as_lee(&viewer).await?;
    let wider = credential("ci", "admin", &given);
    let way = "widens what was approved";
    thief.refuses(way, (kim.as_str(), "Credentials/Create", wider), "NOT_AS_REQUESTED").await?;
    assert_eq!(thief.credentials().await?, before, "nothing was created");

    // Lee approves the new admin. It is in the audit from then on, and approves nothing for a day.
    thief.approve_as_lee(&created).await?;
    let made = thief.api.call(Some(&kim), "Credentials/Create", mallory.clone()).await?.ok()?;
    let text = made["order"]["message"].as_str().context("a sentence")?;
    assert!(text.ends_with("; approved by lee"), "{text}");
    let token = made["token"].as_str().context("a token")?.to_owned();
    let again = thief.api.call(Some(&kim), "Credentials/Create", mallory).await?.ok()?;
    assert_eq!((&again["token"], &again["order"]["replayed"]), (&json!(""), &json!(true)));
    assert_eq!(thief.credentials().await?, before + 1);
    thief.refused.push("uses an approval twice");
    let body = thief.approval(&old);
    let way = "approves an older order with a newer credential";
    thief.refuses(way, (token.as_str(), "Approvals/Approve", body), "NEWER_THAN_REQUEST").await?;
    let given = thief.order("more reboots, please");
    let newer = thief.request("gives another order alone", "Budgets/Set", budget(4000, &given)).await?;
    let body = thief.approval(&newer);
    let way = "approves a newer order with a new credential";
    thief.refuses(way, (token.as_str(), "Approvals/Approve", body), "TOO_NEW").await?;
    let alone = json!({ "credentialId": thief.lees_id, "order": thief.order("left") });
    thief.request("revokes the others while the new admin waits", "Credentials/Revoke", alone).await?;

    let ways: BTreeSet<&str> = thief.refused.iter().copied().collect();
    assert!(ways.len() >= 20, "only {}: {ways:?}", ways.len());
    let most = "SELECT (document -> 'budgets' -> 'reboot' ->> 'count')::INT8 FROM policy";
    assert_eq!(thief.api.count(most).await?, 20, "no budget was set");

    // What the rule asks for is possible: Lee approved at once, and a day later the new admin does.
    thief.api.database.advance(Duration::from_hours(25)).await?;
    let given = thief.order("for the new kernel");
    let body = budget(30, &given);
    let last = thief.request("gives an order alone, a day later", "Budgets/Set", body.clone()).await?;
    let approval = thief.approval(&last);
    thief.api.call(Some(&token), "Approvals/Approve", approval).await?.ok()?;
    thief.api.call(Some(&kim), "Budgets/Set", body).await?.ok()?;
    assert_eq!(thief.api.count(most).await?, 30);
    Ok(thief.api.stop().await?)
}
