//! What a credential for the machines of one provider reaches: every call is tried, as the contract lists them.

use std::collections::BTreeSet;

use anyhow::Context as _;
use prost_reflect::DescriptorPool;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::ids::MachineId;
use shepherd::proto::fleet::DESCRIPTORS;
use shepherd::server::api::authorization::{CallSubject, find_rule};

use crate::api::access::stands;
use crate::api::orders::request;
use crate::api::{Answer, Api, Key};
use crate::harness::aloud::TestResult;

const OURS: &str = "10000000-0000-4000-8000-000000000001";
const THEIRS: &str = "20000000-0000-4000-8000-000000000001";
const NOBODYS: &str = "40000000-0000-4000-8000-000000000001";

/// A fleet with a machine of ours and one of another provider, and a credential for ours.
async fn two_providers(name: &str) -> anyhow::Result<(Api, Key)> {
    let api = Api::start(name).await?;
    stands(&api.pool, OURS, "rack", "one").await?;
    stands(&api.pool, THEIRS, "elsewhere", "two").await?;
    let key = api.key(AccessRole::Admin, &["rack"], None).await?;
    Ok((api, key))
}

/// Calls `rpc` about a machine, with everything else that the call needs.
async fn call_about(
    api: &Api,
    key: &Key,
    rpc: &str,
    takes_order: bool,
    machine: &str,
) -> anyhow::Result<Answer> {
    let body = match rpc {
        _ if takes_order => request(rpc, MachineId(machine.parse()?), key.id)?,
        "Logs/Read" => json!({ "machine": machine, "requestId": key.id }),
        _ => json!({ "machine": machine }),
    };
    api.call(Some(&key.token), rpc, body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_reaches_a_machine_of_another_provider() -> TestResult {
    let (api, key) = two_providers("api_scope_calls").await?;
    let (mut about_one, mut about_many) = (0, BTreeSet::new());
    for service in DescriptorPool::decode(DESCRIPTORS)?.services() {
        for method in service.methods() {
            let rpc = format!("{}/{}", service.name(), method.name());
            let rule = find_rule(&format!("{}/{}", service.full_name(), method.name()));
            let subject = rule.with_context(|| format!("{rpc} has no rule"))?.subject;
            let has = |field: &str| method.input().get_field_by_name(field).is_some();
            if subject == CallSubject::Fleet {
                assert_eq!(api.call(Some(&key.token), &rpc, json!({})).await?.code, 403, "{rpc}");
            } else if subject == CallSubject::Machines && has("machine") {
                let mut answers = Vec::new();
                for machine in [THEIRS, NOBODYS] {
                    let answer = call_about(&api, &key, &rpc, has("order"), machine).await?;
                    answers.push((answer.code, answer.json.to_string().replace(machine, "NAME")));
                }
                assert_eq!(answers[0].0, 404, "{rpc}: {answers:?}");
                assert_eq!(answers[0], answers[1], "{rpc} reveals that the machine exists");
                about_one += 1;
            } else if subject == CallSubject::Machines {
                about_many.insert(rpc);
            }
        }
    }
    assert!(about_one > 18, "only {about_one} calls are about a machine");
    // Watches have tests of their own; the others are tried below.
    let expected = ["BulkOrders/Submit", "Machines/List", "Machines/Watch", "Statistics/Get"];
    assert_eq!(about_many, expected.map(str::to_owned).into());
    assert_eq!(
        api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?,
        0,
        "something was ordered"
    );
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_list_names_a_machine_of_another_provider() -> TestResult {
    let (api, key) = two_providers("api_scope_lists").await?;
    let of_both = "provider in (rack,elsewhere)";
    let dry_run = json!({ "reason": "what if", "dryRun": true });
    let bulk = json!({ "selector": of_both, "quarantine": {}, "order": dry_run });
    for (rpc, body, part) in [
        ("Machines/List", json!({}), OURS),
        ("Machines/List", json!({ "selector": of_both }), OURS),
        ("BulkOrders/Submit", bulk, OURS),
        ("Statistics/Get", json!({}), "counts"),
        ("Plan/Get", json!({}), ""),
    ] {
        let answer: Value = api.call(Some(&key.token), rpc, body).await?.ok()?;
        let text = answer.to_string();
        assert!(text.contains(part), "{rpc}: {text}");
        assert!(!text.contains(THEIRS) && !text.contains("elsewhere"), "{rpc}: {text}");
    }
    Ok(api.stop().await?)
}
