//! Orders that two admins have to agree on, through the API and with `shepherdctl`.

use std::time::Duration;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use tokio::task::JoinHandle;

use crate::api::command_line::Operator;
use crate::api::orders::insert_cluster;
use crate::api::{Answer, Api, order};
use crate::harness::aloud::TestResult;

/// The details of a rejection that state the reason for programs.
pub(super) fn why(answer: &Answer) -> Value {
    let details = answer.json["error"]["details"].as_array().cloned().unwrap_or_default();
    let of = |detail: &Value| detail["@type"].as_str().is_some_and(|of| of.ends_with(".ErrorInfo"));
    details.into_iter().find(of).unwrap_or_default()
}

/// The idempotency key and the approval in what `shepherdctl` prints about an order that needs another admin.
fn key_and_approval(output: &str) -> anyhow::Result<(&str, &str)> {
    let again = output.lines().find(|line| line.contains("--idempotency-key")).context("the command")?;
    let key = again.rsplit(' ').next().context("the key")?;
    let approval = output.split(" approve ").nth(1).and_then(|rest| rest.split(' ').next());
    Ok((key, approval.context("the approval")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_refused_with_its_reason_until_an_admin_of_another_name_approves_it() -> TestResult {
    let api = Api::start("api_second_person").await?;
    let first = api.key(AccessRole::Admin, &[], None).await?;
    let made = async |name: &str, key: &str| {
        let body = json!({ "name": name, "role": "admin", "order": order("a test", key) });
        let made = api.call(Some(&first.token), "Credentials/Create", body).await?.ok()?;
        anyhow::Ok(made["token"].as_str().context("a token")?.to_owned())
    };
    let (kim, lee, kim_too) = (made("kim", "1").await?, made("lee", "2").await?, made("Kim", "3").await?);
    api.bmdb.enable_two_person_rule("test").await?.context("it was off")?;
    let set = |most: u32| json!({ "kind": "reboot", "maxCount": most, "order": order("the feed is repaired", "k") });
    let refused = api.call(Some(&kim), "Budgets/Set", set(3)).await?;
    assert_eq!((refused.code, &refused.json["error"]["status"]), (400, &json!("FAILED_PRECONDITION")));
    let info = why(&refused);
    assert_eq!(
        (&info["reason"], &info["metadata"]["idempotency_key"]),
        (&json!("APPROVAL_REQUIRED"), &json!("k"))
    );
    let approval = info["metadata"]["approval"].as_str().context("an id")?.to_owned();
    assert!(refused.message().contains(&approval) && refused.message().contains("key k"), "{refused:?}");

    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let listed = api.call(Some(&viewer.token), "Approvals/List", json!({})).await?.ok()?;
    let line = &listed["approvals"][0];
    let target = json!("the budget reboot: 20 in 10m -> 3 in 10m");
    assert_eq!((&line["state"], &line["target"]), (&json!("waiting"), &target));
    let approve = |key: &str| json!({ "approvalId": approval, "order": order("I looked at it", key) });
    for (token, key) in [(&kim, "a"), (&kim_too, "b")] {
        let refused = api.call(Some(token), "Approvals/Approve", approve(key)).await?;
        assert_eq!(why(&refused)["reason"], "SAME_PERSON", "{refused:?}");
    }
    api.call(Some(&lee), "Approvals/Approve", approve("c")).await?.ok()?;
    let other = api.call(Some(&kim), "Budgets/Set", set(4)).await?;
    assert_eq!(why(&other)["reason"], "NOT_AS_REQUESTED", "{other:?}");
    let done = api.call(Some(&kim), "Budgets/Set", set(3)).await?.ok()?;
    assert_eq!((&done["changed"], &done["after"]["most"]), (&json!(true), &json!(3.0)));
    assert!(done["message"].as_str().is_some_and(|text| text.ends_with("; approved by lee")), "{done}");
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE rpc LIKE '%Approvals/Approve'").await?, 3);
    Ok(api.stop().await?)
}

/// 1,200 requests, of which 120 each are of one moment.
const REQUESTS: &str = "
    INSERT INTO approval (approval_id, actor, idempotency_key, rpc, request, target, reason, requested_at, expires_at)
    SELECT gen_random_uuid(), 'kim', n::TEXT, 'shepherd.fleet.v1.Budgets/Set', decode('00', 'hex'), 'the budget reboot',
           'r' || n, now() - n % 10 * INTERVAL '1 minute', now() + INTERVAL '1 hour'
    FROM generate_series(1, 1200) n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn approvals_are_listed_to_their_end_in_pages() -> TestResult {
    let api = Api::start("api_many_approvals").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    sqlx::query(REQUESTS).execute(&api.pool).await?;
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let (mut listed, mut token, mut sizes): (Vec<(String, String)>, _, _) =
        (Vec::new(), String::new(), Vec::new());
    loop {
        let body = json!({ "pageSize": 500, "pageToken": token });
        let page = api.call(Some(&viewer.token), "Approvals/List", body).await?.ok()?;
        let approvals = page["approvals"].as_array().context("approvals")?;
        sizes.push(approvals.len());
        for approval in approvals {
            let field = |name: &str| approval[name].as_str().map(str::to_owned).context("a text");
            listed.push((field("requestedAt")?, field("approvalId")?));
        }
        page["nextPageToken"].as_str().context("a token")?.clone_into(&mut token);
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(sizes, [500, 500, 200]);
    assert!(listed.is_sorted_by(|one, next| one > next), "newest first, and each once");

    let whole = kim.json(&["get", "approvals"])?;
    let ids: Vec<&str> = listed.iter().map(|(_, id)| id.as_str()).collect();
    let approvals = whole["approvals"].as_array().context("approvals")?;
    let printed: Vec<&str> = approvals.iter().filter_map(|one| one["approvalId"].as_str()).collect();
    assert_eq!((printed, &whole["nextPageToken"]), (ids, &json!("")));
    let cut = kim.run_command(&["get", "approvals", "--limit", "600", "--no-headers"]).await?;
    assert_eq!(String::from_utf8(cut.stdout)?.lines().count(), 600);
    let note = String::from_utf8(cut.stderr)?;
    assert!(note.contains("first 600, and there are more"), "{note}");
    let refused =
        api.call(Some(&viewer.token), "Approvals/List", json!({ "pageToken": "bWFjaGluZXM" })).await?;
    assert_eq!(refused.code, 400, "{refused:?}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_line_says_what_to_type_again_through_the_api_and_directly() -> TestResult {
    let api = Api::start("api_second_person_typed").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save-context", "home"])?;
    api.bmdb.change_policy("test", |policy| policy.two_person_rule.required = true).await?;
    for (direct, kind) in [(false, "reboot"), (true, "release")] {
        let give = |arguments: &[&str]| if direct { kim.direct(arguments) } else { kim.ask(arguments) };
        let typed = ["budget", "set", kind, "--max-count", "7", "--reason", "it's due"];
        assert!(
            give(&[&typed[..], &["--dry-run"]].concat())?.contains("is 7 in 10m"),
            "a dry run needs nobody"
        );
        let output = give(&typed).err().context("it needs another admin")?.to_string();
        let again = output.lines().find(|line| line.contains("--idempotency-key")).context("the command")?;
        assert!(again.contains("budget set") && again.contains("\"it's due\""), "{again}");
        let (key, approval) = key_and_approval(&output)?;
        let own = kim.direct(&["approve", approval, "--reason", "mine"]).err().context("one's own")?;
        assert!(own.to_string().contains("somebody else has to approve it"), "{own}");
        let dialect = api.database.dialect().as_str();
        let approved = kim
            .command(&[
                "--direct",
                "--bmdb-dialect",
                dialect,
                "approve",
                approval,
                "--reason",
                "looked at it",
            ])
            .env("SHEPHERD_BMDB_URL", api.database.url())
            .env("USER", "lee")
            .output()?;
        assert!(approved.status.success(), "{approved:?}");
        let done = give(&[&typed[..], &["--idempotency-key", key]].concat())?;
        assert!(done.contains("is 7 in 10m") && done.contains("; approved by lee@"), "{done}");
    }
    assert!(kim.ask(&["get", "approvals"])?.contains("used"));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_command_creates_the_token_that_another_admin_approved() -> TestResult {
    let api = Api::start("api_second_person_token").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save-context", "home"])?;
    let lee = api.key(AccessRole::Admin, &[], None).await?;
    api.bmdb.enable_two_person_rule("test").await?.context("it was off")?;
    let typed = ["tokens", "create", "max", "--role", "viewer", "--reason", "max is new"];
    let output = kim.ask(&typed).err().context("it needs another admin")?.to_string();
    assert!(output.contains("creating a credential needs another admin"), "{output}");
    let (key, approval) = key_and_approval(&output)?;
    let body = json!({ "approvalId": approval, "order": order("max is known to me", "a") });
    api.call(Some(&lee.token), "Approvals/Approve", body).await?.ok()?;
    let token = kim.ask(&[&typed[..], &["--idempotency-key", key]].concat())?;
    assert_eq!(api.call(Some(token.trim()), "Machines/List", json!({})).await?.code, 200);
    // A person at the database is outside of the rule where it is about credentials.
    kim.direct(&["tokens", "create", "ned", "--role", "viewer", "--reason", "nobody can approve it"])?;
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name IN ('max', 'ned')").await?, 2);
    Ok(api.stop().await?)
}

/// Stands in for the curators: signs the next request of this kind.
fn sign_next(api: &Api, statement: &'static str) -> JoinHandle<sqlx::Result<()>> {
    let pool = api.pool.clone();
    tokio::spawn(async move {
        while sqlx::query(statement).execute(&pool).await?.rows_affected() == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_command_uses_the_key_of_the_request_that_was_approved() -> TestResult {
    let api = Api::start("api_second_person_key").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save-context", "home"])?;
    let lee = api.key(AccessRole::Admin, &[], None).await?;
    api.bmdb.enable_two_person_rule("test").await?.context("it was off")?;
    insert_cluster(&api).await?;
    let path = |name: &str| kim.home.path().join(name);
    let (directory, config) = (path("fra"), path("fra.yaml"));
    let (directory, config) = (directory.to_str().context("text")?, config.to_str().context("text")?);
    for (command, output, file, signed) in [
        (
            &["credentials", "issue"][..],
            ["--output-dir", directory],
            "fra/kim.key",
            "UPDATE cluster_credential SET certificate = decode('01', 'hex'), serial = repeat('0', 32),
                 expires_at = clock_timestamp() + INTERVAL '8 hours'",
        ),
        (
            &["kubeconfig"],
            ["--output-file", config],
            "fra.yaml.key",
            "UPDATE cluster_kubernetes_user SET certificate = decode('01', 'hex'), servers = '[\"02\"]',
                 api_servers = '[\"10.0.0.1:6443\"]', expires_at = clock_timestamp() + INTERVAL '8 hours'",
        ),
    ] {
        let rest = ["--holder", "kim", "--reason", "a look"];
        let typed = [&["cluster"][..], command, &["fra"], &output, &rest].concat();
        let refused = kim.ask(&typed).err().context("it needs another admin")?.to_string();
        assert!(refused.contains("issuing a certificate for a cluster needs another admin"), "{refused}");
        let (key, approval) = key_and_approval(&refused)?;
        let repeated = [&typed[..], &["--idempotency-key", key]].concat();
        let secret = std::fs::read_to_string(path(file))?;
        let waits = kim.ask(&repeated).err().context("nobody approved it yet")?.to_string();
        assert_eq!(key_and_approval(&waits)?.1, approval);
        let body = json!({ "approvalId": approval, "order": order("kim may look", key) });
        api.call(Some(&lee.token), "Approvals/Approve", body).await?.ok()?;
        let curators = sign_next(&api, signed);
        let done = kim.run_command(&repeated).await?;
        assert!(done.status.success(), "{done:?}");
        curators.await??;
        if command == ["kubeconfig"] {
            let written = std::fs::read_to_string(config)?;
            assert!(written.contains(&STANDARD.encode(&secret)), "another key is in the kubeconfig");
            assert!(!path(file).exists(), "the key was in a file until then");
        } else {
            assert_eq!(std::fs::read_to_string(path(file))?, secret);
            assert!(path("fra/kim.crt").exists());
        }
    }
    // A kubeconfig that is only printed has no file for its key.
    let printed = ["cluster", "kubeconfig", "fra", "--holder", "kim", "--reason", "a look"];
    let refused = kim.ask(&printed).err().context("it needs another admin")?.to_string();
    assert!(refused.contains("give the order with --output-file FILE instead"), "{refused}");
    assert!(!refused.contains("--idempotency-key"), "it cannot be repeated: {refused}");
    Ok(api.stop().await?)
}
