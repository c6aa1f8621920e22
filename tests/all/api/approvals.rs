//! Orders that two admins have to agree on, through the API and with `shepherdctl`.

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;

use crate::api::command_line::Operator;
use crate::api::{Answer, Api, order};
use crate::harness::aloud::TestResult;

/// The details of a rejection that state the reason for programs.
pub(super) fn why(answer: &Answer) -> Value {
    let details = answer.json["error"]["details"].as_array().cloned().unwrap_or_default();
    let of = |detail: &Value| detail["@type"].as_str().is_some_and(|of| of.ends_with(".ErrorInfo"));
    details.into_iter().find(of).unwrap_or_default()
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
    assert_eq!((&line["state"], &line["target"]), (&json!("waiting"), &json!("the budget reboot")));
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_line_says_what_to_type_again_through_the_api_and_directly() -> TestResult {
    let api = Api::start("api_second_person_typed").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save_context", "home"])?;
    api.bmdb.change_policy("test", |policy| policy.two_person_rule.required = true).await?;
    for (direct, kind) in [(false, "reboot"), (true, "release")] {
        let give = |arguments: &[&str]| if direct { kim.direct(arguments) } else { kim.ask(arguments) };
        let typed = ["budget", "set", kind, "--max_count", "7", "--reason", "it's due"];
        assert!(
            give(&[&typed[..], &["--dry_run"]].concat())?.contains("is 7 in 10m"),
            "a dry run needs nobody"
        );
        let output = give(&typed).err().context("it needs another admin")?.to_string();
        let again = output.lines().find(|line| line.contains("--idempotency_key")).context("the command")?;
        assert!(again.contains("budget set") && again.contains("\"it's due\""), "{again}");
        let key = again.rsplit(' ').next().context("the key")?;
        let approval = output.split("shepherdctl approve ").nth(1).and_then(|rest| rest.split(' ').next());
        let approval = approval.context("the approval")?;
        let own = kim.direct(&["approve", approval, "--reason", "mine"]).err().context("one's own")?;
        assert!(own.to_string().contains("somebody else has to approve it"), "{own}");
        let dialect = api.database.dialect().as_str();
        let approved = kim
            .command(&[
                "--direct",
                "--bmdb_dialect",
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
        let done = give(&[&typed[..], &["--idempotency_key", key]].concat())?;
        assert!(done.contains("is 7 in 10m") && done.contains("; approved by lee@"), "{done}");
    }
    assert!(kim.ask(&["get", "approvals"])?.contains("used"));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_command_creates_the_token_that_another_admin_approved() -> TestResult {
    let api = Api::start("api_second_person_token").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save_context", "home"])?;
    let lee = api.key(AccessRole::Admin, &[], None).await?;
    api.bmdb.enable_two_person_rule("test").await?.context("it was off")?;
    let typed = ["tokens", "create", "max", "--role", "viewer", "--reason", "max is new"];
    let output = kim.ask(&typed).err().context("it needs another admin")?.to_string();
    assert!(output.contains("creating a credential needs another admin"), "{output}");
    let again = output.lines().find(|line| line.contains("--idempotency_key")).context("the command")?;
    let key = again.rsplit(' ').next().context("the key")?;
    let approval = output.split("shepherdctl approve ").nth(1).and_then(|rest| rest.split(' ').next());
    let body = json!({ "approvalId": approval, "order": order("max is known to me", "a") });
    api.call(Some(&lee.token), "Approvals/Approve", body).await?.ok()?;
    let token = kim.ask(&[&typed[..], &["--idempotency_key", key]].concat())?;
    assert_eq!(api.call(Some(token.trim()), "Machines/List", json!({})).await?.code, 200);
    // A person at the database is outside of the rule where it is about credentials.
    kim.direct(&["tokens", "create", "ned", "--role", "viewer", "--reason", "nobody can approve it"])?;
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name IN ('max', 'ned')").await?, 2);
    Ok(api.stop().await?)
}
