//! The worth of a stolen token of each role: it tries every call, and what it achieves equals the table in
//! `docs/security.md`, as far as a test can compare that.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use prost_reflect::DescriptorPool;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::ids::MachineId;
use shepherd::proto::fleet::DESCRIPTORS;
use shepherd::server::api::authorization::find_rule;
use sqlx::AssertSqlSafe;
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::api::approvals::why;
use crate::api::command_line::Operator;
use crate::api::orders::{insert_cluster, request};
use crate::api::worst_uses::{Effect, WorstUse, read_worst_uses, role_of};
use crate::api::{Api, Key, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::program::PATIENCE;

/// The call that reads, and deletes what its caller has received.
const READ_LOG: &str = "shepherd.fleet.v1.Logs/Read";

/// A token of each role, the least powerful first.
async fn tokens(api: &Api) -> anyhow::Result<Vec<(AccessRole, Key)>> {
    let mut tokens = Vec::new();
    for role in AccessRole::ALL {
        tokens.push((role, api.key(role, &[], None).await?));
    }
    Ok(tokens)
}

/// The code of a gRPC call with an empty message. While the server is too busy, the call is repeated.
async fn grpc_code(api: &Api, token: &str, rpc: &str) -> anyhow::Result<Code> {
    let end = Instant::now() + PATIENCE;
    loop {
        let call = api.http.post(api.url(&format!("/{rpc}"))).header("content-type", "application/grpc");
        let response = call.bearer_auth(token).body(vec![0_u8; 5]).send().await?;
        assert_eq!(response.status(), 200, "{rpc}");
        let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
        // A watch does not end.
        if !rpc.ends_with("/Watch") {
            response.bytes().await?;
        }
        if code != Code::Unavailable || Instant::now() > end {
            return Ok(code);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The sentence of a rejection.
fn rejection(rpc: &str, needed: AccessRole, role: AccessRole) -> String {
    format!(
        "{rpc} needs the role {needed}, and this credential has the role {role}; an admin creates another one with \
         `shepherdctl tokens create NAME --role {needed}`"
    )
}

/// The request is worth nothing: over gRPC it lacks what the call needs, and as JSON it is none. So a token that is
/// refused for its role was refused before the request was looked at, and one that is not refused changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_of_each_role_achieves_what_the_table_says() -> TestResult {
    let api = Api::start("api_worst_uses").await?;
    let tokens = tokens(&api).await?;
    let mut tried = 0;
    for WorstUse { rpc, role: needed, .. } in read_worst_uses()? {
        let Some(needed) = needed else { continue };
        for (role, key) in &tokens {
            let code = grpc_code(&api, &key.token, &rpc).await?;
            let answer = api.call_with_body(api.server.local_addr, Some(&key.token), &rpc, "{").await?;
            if *role < needed {
                assert_eq!(code, Code::PermissionDenied, "{rpc} as {role} over gRPC");
                let expected = rejection(&rpc, needed, *role);
                assert_eq!((answer.code, answer.message()), (403, expected.as_str()), "{rpc} as {role}");
            } else {
                let answered = [Code::Ok, Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition]
                    .contains(&code);
                assert!(answered, "{rpc} as {role} over gRPC: {code:?}");
                assert_eq!(answer.code, 400, "{rpc} as {role}: {answer:?}");
            }
            tried += 1;
        }
    }
    assert!(tried >= 4 * 80, "only {tried} were tried");
    assert_eq!(
        api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?,
        0,
        "something was ordered"
    );
    Ok(api.stop().await?)
}

/// Orders that would be carried out, from each role below the required one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn valid_order_above_a_role_changes_nothing() -> TestResult {
    let api = Api::start("api_above_the_role").await?;
    let machine = provided(&api.pool).await?;
    let tokens = tokens(&api).await?;
    let (mut tried, mut of_deployers) = (0, Vec::new());
    for service in DescriptorPool::decode(DESCRIPTORS)?.services() {
        for method in service.methods().filter(|method| method.input().get_field_by_name("order").is_some()) {
            let (full, rpc) = (service.full_name(), format!("{}/{}", service.name(), method.name()));
            let rule = find_rule(&format!("{full}/{}", method.name())).context("a rule")?;
            let needed = role_of(rule.required).with_context(|| format!("anybody may order {rpc}"))?;
            for (role, key) in tokens.iter().filter(|(role, _)| *role < needed) {
                let refused = api.call(Some(&key.token), &rpc, request(&rpc, machine, key.id)?).await?;
                let expected = rejection(rule.rpc, needed, *role);
                assert_eq!((refused.code, refused.message()), (403, expected.as_str()), "{rpc} as {role}");
                tried += 1;
            }
            if needed == AccessRole::Deployer {
                of_deployers.push(rpc);
            }
        }
    }
    assert!(tried > 80 && of_deployers.len() > 15, "{tried} orders, of deployers {of_deployers:?}");
    assert_eq!(
        api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?,
        0,
        "something was ordered"
    );
    assert_eq!(api.count("SELECT count(*) FROM cluster").await?, 0);

    // The same orders are carried out for the role that the sentence names.
    let (_, deployer) =
        tokens.iter().find(|(role, _)| *role == AccessRole::Deployer).context("a deployer")?;
    for rpc in ["Clusters/Create", "Clusters/Change"] {
        let answer = api.call(Some(&deployer.token), rpc, request(rpc, machine, deployer.id)?).await?.ok()?;
        assert_eq!(answer["changed"], true, "{rpc}: {answer}");
    }
    Ok(api.stop().await?)
}

/// A digest of all rows of each table, without those of sessions, which the server renews.
async fn digests(api: &Api) -> anyhow::Result<BTreeMap<String, String>> {
    let named =
        "SELECT tablename::TEXT FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'session'";
    let tables: Vec<String> = sqlx::query_scalar(named).fetch_all(&api.pool).await?;
    let mut digests = BTreeMap::new();
    for table in tables {
        let rows = "coalesce(md5(string_agg(r::TEXT, ',' ORDER BY r::TEXT)), '')";
        let statement = format!("SELECT {rows} FROM public.{table} r");
        let digest: String = sqlx::query_scalar(AssertSqlSafe(statement)).fetch_one(&api.pool).await?;
        digests.insert(table, digest);
    }
    Ok(digests)
}

/// A request that is answered, of a call that reads.
fn reading(rpc: &str, machine: MachineId) -> Value {
    match rpc {
        "Clusters/Plan" => json!({ "name": "new", "controlPlane": 1 }),
        "Schedule/List" => json!({ "process": "AgentStart" }),
        "Clusters/ListSnapshots" | "ClusterCredentials/List" | "ClusterKubernetes/ListUsers" => {
            json!({ "name": "fra" })
        }
        "Machines/Get" | "Machines/Describe" | "Machines/Why" | "Machines/Timeline" => {
            json!({ "machine": machine })
        }
        _ => json!({}),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_reads_changes_no_row() -> TestResult {
    let api = Api::start("api_reads").await?;
    let machine = provided(&api.pool).await?;
    insert_cluster(&api).await?;
    let tokens = tokens(&api).await?;
    let before = digests(&api).await?;
    assert!(before.len() > 30, "only {} tables were found", before.len());
    let mut tried = 0;
    for WorstUse { rpc, role, effect, .. } in read_worst_uses()? {
        let Some(needed) = role.filter(|_| effect == Effect::Reads && rpc != READ_LOG) else { continue };
        let (_, key) = tokens.iter().find(|(role, _)| *role == needed).context("a token")?;
        if rpc.ends_with("/Watch") {
            assert_eq!(grpc_code(&api, &key.token, &rpc).await?, Code::Ok, "{rpc}");
        } else {
            let short = rpc.strip_prefix("shepherd.fleet.v1.").context("a call of ours")?;
            api.call(Some(&key.token), short, reading(short, machine)).await?.ok().context(rpc.clone())?;
        }
        assert_eq!(digests(&api).await?, before, "{rpc} changed a row");
        tried += 1;
    }
    assert!(tried > 25, "only {tried} were tried");

    // The digest has what an order changes.
    let hold = json!({ "machine": machine, "order": order("it burns", "1") });
    api.call(Some(&tokens[1].1.token), "Machines/Hold", hold).await?.ok()?;
    let after = digests(&api).await?;
    let changed: Vec<&String> =
        after.keys().filter(|table| after.get(*table) != before.get(*table)).collect();
    for table in ["audit", "history", "machine_hold"] {
        assert!(changed.iter().any(|found| *found == table), "{table} is not in {changed:?}");
    }
    Ok(api.stop().await?)
}

/// The first step of a roll-out of a shell script, with `shepherdctl`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_uploads_no_program_and_learns_which_role_does() -> TestResult {
    let api = Api::start("api_role_named").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let path = |name: &str| kim.home.path().join(name);
    for role in ["operator", "deployer"] {
        let file = path(role);
        let file = file.to_str().context("text")?;
        let create =
            ["tokens", "create", "lee", "--role", role, "--output-file", file, "--reason", "lee is new"];
        kim.ask(&create)?;
    }
    let script = path("payload");
    std::fs::write(&script, "#!/bin/sh\nid >/root/was-here\n")?;
    let script = script.to_str().context("text")?;
    let add = ["artefacts", "add", script, "--reason", "the next release"];

    std::fs::copy(path("operator"), path(".config/shepherd/home.token"))?;
    let refused = kim.ask(&add).err().context("an operator uploaded a program")?.to_string();
    let expected =
        rejection("shepherd.fleet.v1.Artefacts/BeginUpload", AccessRole::Deployer, AccessRole::Operator);
    assert!(refused.contains(&expected), "{refused}");
    let update = ["update", "--selector", "", "--release", "payload", "--reason", "the next release"];
    let refused = kim.ask(&update).err().context("an operator rolled a program out")?.to_string();
    assert!(refused.contains("Updates/Create needs the role deployer"), "{refused}");
    assert_eq!(api.count("SELECT count(*) FROM artefact").await?, 0);

    std::fs::copy(path("deployer"), path(".config/shepherd/home.token"))?;
    let added = kim.ask(&add)?;
    assert!(added.starts_with("the artefact payload is added"), "{added}");
    // A deployer may roll releases out, and this is none: nobody signed it.
    let refused = kim.ask(&update).err().context("an unsigned program was rolled out")?.to_string();
    assert!(refused.contains("payload cannot be rolled out: it is not signed"), "{refused}");
    assert_eq!(api.count("SELECT count(*) FROM roll_out").await?, 0);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_changes_no_label_that_a_cluster_selects_by() -> TestResult {
    let api = Api::start("api_label_rights").await?;
    let machine = provided(&api.pool).await?;
    let (operator, deployer, admin) = (
        api.key(AccessRole::Operator, &[], None).await?,
        api.key(AccessRole::Deployer, &[], None).await?,
        api.key(AccessRole::Admin, &[], None).await?,
    );
    let label = async |token: &str, key: &str, set: Value, remove: &[&str]| {
        let body =
            json!({ "machine": machine, "set": set, "remove": remove, "order": order("it moved", key) });
        api.call(Some(token), "Machines/Label", body).await
    };
    // No cluster selects by it yet.
    label(&operator.token, "1", json!({ "rack": "6" }), &[]).await?.ok()?;
    let body =
        json!({ "name": "ams", "controlPlane": 1, "selector": "label.rack=7", "order": order("a try", "2") });
    api.call(Some(&deployer.token), "Clusters/Create", body).await?.ok()?;

    let labelled = "SELECT count(*) FROM machine_labels WHERE labels ->> 'rack' = '7'";
    let refused = label(&operator.token, "3", json!({ "rack": "7", "owner": "kim" }), &[]).await?;
    assert_eq!((refused.code, &why(&refused)["reason"]), (400, &json!("NOT_A_DEPLOYER")), "{refused:?}");
    let expected = "the cluster ams takes machines by the label rack (its selector is label.rack=7), so only a \
                    deployer may change it; ask one. Nothing was changed";
    assert!(refused.message().ends_with(expected), "{refused:?}");
    let many = json!({
        "selector": "fact=provided", "expectedMachines": 1, "label": { "set": { "rack": "7" } },
        "order": order("it moved", "4"),
    });
    let given = api.call(Some(&operator.token), "BulkOrders/Submit", many).await?.ok()?;
    assert_eq!(given["outcomes"][0]["rejected"], true, "{given}");
    assert_eq!(api.count(labelled).await?, 0);
    let audited = "SELECT count(*) FROM audit WHERE rpc LIKE '%Machines/Label' AND outcome = 'refused'";
    assert_eq!(api.count(audited).await?, 2);

    // A credential that makes no call about clusters gives them no machine either, and learns nothing about them.
    let limited = api.key(AccessRole::Deployer, &["rack"], None).await?;
    let refused = label(&limited.token, "11", json!({ "rack": "7" }), &[]).await?;
    let expected = "a cluster takes machines by the label rack, so only a deployer for the whole fleet may change \
                    it; ask one. Nothing was changed";
    assert_eq!(why(&refused)["reason"], "NOT_A_DEPLOYER", "{refused:?}");
    assert!(refused.message().ends_with(expected) && !refused.message().contains("ams"), "{refused:?}");
    assert_eq!(api.count(labelled).await?, 0);

    // Other labels are the operator's, and so is this one where nothing changes.
    label(&operator.token, "5", json!({ "owner": "kim" }), &[]).await?.ok()?;
    label(&deployer.token, "6", json!({ "rack": "7" }), &[]).await?.ok()?;
    let same = label(&operator.token, "7", json!({ "rack": "7" }), &[]).await?.ok()?;
    assert_eq!(same["changed"], false, "{same}");
    let refused = label(&operator.token, "8", json!({}), &["rack"]).await?;
    assert_eq!(why(&refused)["reason"], "NOT_A_DEPLOYER", "{refused:?}");
    assert_eq!(api.count(labelled).await?, 1);

    // A cluster that ends selects nothing any more.
    let body = json!({ "name": "ams", "order": order("the try is over", "9") });
    api.call(Some(&admin.token), "Clusters/Delete", body).await?.ok()?;
    label(&operator.token, "10", json!({}), &["rack"]).await?.ok()?;
    assert_eq!(api.count(labelled).await?, 0);
    Ok(api.stop().await?)
}
