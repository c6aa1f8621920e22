//! Orders about machines that the request names, and what a person types before an order that nothing undoes.

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::order_rules::{ORDER_RULES, may_need_confirmation};

use crate::api::orders::insert_cluster;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

/// An order as JSON that only shows what it would do.
fn dry_run() -> Value {
    json!({ "reason": "what if", "dryRun": true })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn named_machines_get_an_order_together_or_none_does() -> TestResult {
    let api = Api::start("api_named").await?;
    let operator = api.key(AccessRole::Operator, &[], None).await?;
    let (one, two) = (provided(&api.pool).await?, provided(&api.pool).await?);
    let hold =
        |names: &[String], key: &str| json!({ "names": names, "hold": {}, "order": order("a fuse", key) });
    let give = async |body: Value| api.call(Some(&operator.token), "BulkOrders/Submit", body).await;
    let (first, second) = (one.to_string(), format!("rack/{two}"));
    let holds = "SELECT count(*) FROM machine_hold";

    for (names, code) in [
        (vec![first.clone(), "no-such".to_owned()], 404),
        (vec![first.clone(), String::new()], 400),
        (vec![first.clone(); 1001], 400),
    ] {
        let refused = give(hold(&names, "1")).await?;
        assert_eq!((refused.code, api.count(holds).await?), (code, 0), "{refused:?}");
    }
    let mut both = hold(std::slice::from_ref(&first), "1");
    both["selector"] = json!("provider=rack");
    assert_eq!(give(both).await?.code, 400, "names and a selector");

    // Without a number of machines. One of them is named in each way: by its UUID, as its provider does, and by the
    // beginning of its UUID.
    let names = [second.clone(), first.clone(), format!("rack/{one}"), first[..18].to_owned()];
    let held = give(hold(&names, "1")).await?.ok()?;
    let outcomes = held["outcomes"].as_array().context("outcomes")?;
    let named: Vec<&Value> = outcomes.iter().map(|outcome| &outcome["name"]["machine"]).collect();
    assert_eq!(named, [&json!(two), &json!(one)], "each once, in the order of the names");
    assert_eq!(api.count(holds).await?, 2);
    let again = give(hold(&names, "1")).await?.ok()?;
    assert_eq!((&again["replayed"], &again["auditId"]), (&json!(true), &held["auditId"]));
    let limits = json!({ "names": names, "hold": {}, "expectedMachines": 3, "order": order("a fuse", "2") });
    let refused = give(limits).await?;
    assert!(refused.message().starts_with("the order names 2 machines, and 3 were expected"), "{refused:?}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_bind_orders_about_named_machines() -> TestResult {
    let api = Api::start("api_named_limits").await?;
    let operator = api.key(AccessRole::Operator, &[], None).await?;
    let names = [provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string()];
    api.bmdb.change_policy("test", |policy| policy.order_limits.machines = 1).await?;
    let body = json!({ "names": names, "quarantine": {}, "order": order("a fan", "1") });
    let refused = api.call(Some(&operator.token), "BulkOrders/Submit", body).await?;
    assert!(refused.message().contains("order_limits permit 1 in one order"), "{refused:?}");
    assert_eq!(api.count("SELECT count(*) FROM machine_quarantine").await?, 0);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retirements_and_power_orders_of_many_are_cancelled_together() -> TestResult {
    let api = Api::start("api_named_cancel").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let names = [provided(&api.pool).await?.to_string(), provided(&api.pool).await?.to_string()];
    let call = async |rpc: &str, body: Value| api.call(Some(&admin.token), rpc, body).await?.ok();
    let outcomes = |answer: &Value| -> Vec<(String, bool)> {
        let found = answer["outcomes"].as_array().into_iter().flatten();
        let found = found.map(|one| {
            (one["outcome"].as_str().unwrap_or_default().to_owned(), one["rejected"] == json!(true))
        });
        found.collect()
    };
    for (name, wipe, key) in [(&names[0], false, "1"), (&names[1], true, "2")] {
        call("Machines/Retire", json!({ "machine": name, "wipe": wipe, "order": order("sold", key) }))
            .await?;
    }
    let cancel = json!({ "names": names, "cancelRetire": {}, "order": order("it stays", "3") });
    let cancelled = call("BulkOrders/Submit", cancel).await?;
    let expected = [("CHANGED".to_owned(), false), ("NO_EFFECT".to_owned(), true)];
    assert_eq!(outcomes(&cancelled), expected, "an order about many cancels no wipe: {cancelled}");
    let one = json!({ "machine": names[1], "order": order("it stays", "4") });
    call("Machines/CancelRetire", one).await?;

    for (name, key) in names.iter().zip(["5", "6"]) {
        call("Machines/Reboot", json!({ "machine": name, "order": order("a kernel", key) })).await?;
    }
    let cancel = json!({ "names": names, "cancelPower": {}, "order": order("not now", "7") });
    let cancelled = call("BulkOrders/Submit", cancel).await?;
    assert_eq!(outcomes(&cancelled), vec![("CHANGED".to_owned(), false); 2], "{cancelled}");
    assert_eq!(api.count("SELECT count(*) FROM machine_power_order").await?, 0);
    Ok(api.stop().await?)
}

/// A cluster to restore, to delete and to take Kubernetes from, and a machine with a node that votes in it.
async fn populate(api: &Api) -> anyhow::Result<[String; 2]> {
    let (voter, other) = (provided(&api.pool).await?, provided(&api.pool).await?);
    insert_cluster(api).await?;
    for statement in [
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 12345, 5, 3, '[]',
                decode(repeat('cd', 32), 'hex') FROM cluster",
        "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at, voter)
         SELECT $1, cluster_id, 'control-plane', clock_timestamp(), TRUE FROM cluster",
    ] {
        let query = sqlx::query(statement);
        let query = if statement.contains("$1") { query.bind(voter.0) } else { query };
        query.execute(&api.pool).await?;
    }
    Ok([voter.to_string(), other.to_string()])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_of_an_order_that_nothing_undoes_says_what_to_type() -> TestResult {
    let api = Api::start("api_confirmations").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let [voter, other] = populate(&api).await?;
    let retiring = provided(&api.pool).await?.to_string();
    let retire = json!({ "machine": retiring, "wipe": true, "order": order("sold", "1") });
    api.call(Some(&admin.token), "Machines/Retire", retire).await?.ok()?;
    let ask = async |rpc: &str, mut body: Value| -> anyhow::Result<Option<(String, String)>> {
        body["order"] = dry_run();
        let answer = api.call(Some(&admin.token), rpc, body).await?.ok()?;
        let text = |field: &str| answer["confirmation"][field].as_str().map(str::to_owned);
        let reason = text("reason").unwrap_or_default();
        assert!(answer["confirmation"].is_null() || reason.len() > 10, "{answer}");
        Ok(text("kind").zip(text("text")))
    };
    let fields = |kind: &str, text: &str| Some((kind.to_owned(), text.to_owned()));
    let lost = "the Kubernetes objects of fra are lost";
    let mut confirmed = std::collections::BTreeSet::new();
    for (rpc, body, expected) in [
        ("Machines/Retire", json!({ "machine": voter }), fields("NAME", &format!("rack/{voter}"))),
        ("Machines/Retire", json!({ "machine": retiring, "wipe": true }), None),
        (
            "Machines/WaiveStage",
            json!({ "machine": retiring, "stage": "wipe" }),
            fields("WORDS", &format!("rack/{retiring} is not wiped")),
        ),
        (
            "Machines/Power",
            json!({ "machine": voter, "action": "off" }),
            fields("NAME", &format!("rack/{voter}")),
        ),
        ("Machines/Power", json!({ "machine": voter, "action": "cycle" }), None),
        ("Machines/Power", json!({ "machine": other, "action": "off" }), None),
        ("Machines/Reboot", json!({ "machine": voter }), None),
        (
            "Clusters/Restore",
            json!({ "name": "fra", "bypassQuorum": true, "confirmation": lost }),
            fields("NAME", "fra"),
        ),
        ("Clusters/Delete", json!({ "name": "fra" }), fields("NAME", "fra")),
        ("ClusterKubernetes/Remove", json!({ "name": "fra" }), fields("NAME", "fra")),
        ("BulkOrders/Submit", json!({ "names": [voter, other], "retire": {} }), fields("COUNT", "2")),
        (
            "BulkOrders/Submit",
            json!({ "names": [voter, other], "power": { "action": "off" } }),
            fields("COUNT", "2"),
        ),
        ("BulkOrders/Submit", json!({ "names": [other], "power": { "action": "off" } }), None),
        ("BulkOrders/Submit", json!({ "names": [voter, other], "hold": {} }), None),
    ] {
        let found = ask(rpc, body.clone()).await?;
        assert_eq!(found, expected, "{rpc} {body}");
        if found.is_some() {
            confirmed.insert(format!("shepherd.fleet.v1.{rpc}"));
        }
    }
    let rules = ORDER_RULES.iter().map(|rule| rule.rpc).filter(|rpc| may_need_confirmation(rpc));
    for rpc in rules.filter(|rpc| !rpc.starts_with("shepherd.direct/")) {
        assert!(confirmed.contains(rpc), "no dry run of {rpc} has a confirmation");
    }

    // A program that names machines has looked at them: it gives their number.
    let retire = json!({ "names": [voter, other], "retire": {}, "order": order("sold", "2") });
    let refused = api.call(Some(&admin.token), "BulkOrders/Submit", retire).await?;
    assert!(
        refused.message().contains("give the number that you expect, because nothing undoes it"),
        "{refused:?}"
    );
    assert_eq!(api.count("SELECT count(*) FROM machine_retirement").await?, 1);
    Ok(api.stop().await?)
}
