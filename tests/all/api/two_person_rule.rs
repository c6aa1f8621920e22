//! When the two-person rule is on: it begins with two admins, none of them leaves alone, and it ends at the database.

use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;
use shepherd::model::policy_flags::PolicyFlags;

use crate::api::approvals::why;
use crate::api::command_line::Operator;
use crate::api::rule_bypasses::{budget, credential};
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_stays_off_until_two_people_are_admins() -> TestResult {
    let api = Api::start("api_rule_needs_two").await?;
    let first = api.key(AccessRole::Admin, &[], None).await?;
    // Another token of the same name is no second person.
    api.key(AccessRole::Admin, &[], None).await?;
    let flags = || PolicyFlags { require_second_admin: Some(true), ..PolicyFlags::default() };
    let warning = api.bmdb.write_policy_flags("flags of a host", flags()).await?.context("a warning")?;
    assert!(
        warning.starts_with("the two-person rule stays off") && warning.contains("there are 1"),
        "{warning}"
    );
    assert!(!api.bmdb.policy().1.two_person_rule.required);
    let requested = async || anyhow::Ok(api.bmdb.read_issue_inputs().await?.two_person_rule.requested_by);
    assert_eq!(requested().await?.as_deref(), Some("flags of a host"));
    api.bmdb.write_policy_flags("flags of another", PolicyFlags::default()).await?;
    assert!(requested().await?.is_some(), "the first host still has the flag");
    api.bmdb.write_policy_flags("flags of a host", PolicyFlags::default()).await?;
    assert_eq!(requested().await?, None);
    let body = credential("kim", "admin", &order("kim is new", "1"));
    let made = api.call(Some(&first.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!(api.bmdb.write_policy_flags("flags of a host", flags()).await?, None);
    assert!(api.bmdb.policy().1.two_person_rule.required);
    assert_eq!(api.bmdb.enable_two_person_rule("a test").await?, None, "it is on already");

    // Both approve at once, although their credentials are new.
    let refused =
        api.call(Some(&first.token), "Budgets/Set", budget(30, &order("for the new kernel", "2"))).await?;
    let approval = why(&refused)["metadata"]["approval"].clone();
    let body = json!({ "approvalId": approval, "order": order("looks right", "3") });
    api.call(made["token"].as_str(), "Approvals/Approve", body).await?.ok()?;
    api.call(Some(&first.token), "Budgets/Set", budget(30, &order("for the new kernel", "2"))).await?.ok()?;
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_admin_stays_and_last_but_one_leaves_with_a_second_person() -> TestResult {
    let api = Api::start("api_last_admin").await?;
    let first = api.key(AccessRole::Admin, &[], None).await?;
    let revoke = |id: &Value, key: &str| json!({ "credentialId": id, "order": order("left", key) });
    let id = json!(first.id);
    let refused = api.call(Some(&first.token), "Credentials/Revoke", revoke(&id, "1")).await?;
    assert_eq!(why(&refused)["reason"], "LAST_ADMIN", "{refused:?}");
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE revoked_at IS NOT NULL").await?, 0);

    let body = credential("kim", "admin", &order("kim is new", "2"));
    let made = api.call(Some(&first.token), "Credentials/Create", body).await?.ok()?;
    let (kim, kims_id) = (made["token"].as_str().context("a token")?, &made["credential"]["credentialId"]);
    api.bmdb.enable_two_person_rule("a test").await?.context("it was off")?;
    let refused = api.call(Some(&first.token), "Credentials/Revoke", revoke(kims_id, "3")).await?;
    let info = why(&refused);
    assert_eq!(info["reason"], "APPROVAL_REQUIRED", "{refused:?}");
    let approve = json!({ "approvalId": info["metadata"]["approval"], "order": order("I leave", "4") });
    api.call(Some(kim), "Approvals/Approve", approve).await?.ok()?;
    let done = api.call(Some(&first.token), "Credentials/Revoke", revoke(kims_id, "3")).await?.ok()?;
    assert!(done["message"].as_str().is_some_and(|text| text.ends_with("; approved by kim")), "{done}");
    assert_eq!(api.call(Some(kim), "Credentials/WhoAmI", json!({})).await?.code, 401);
    let refused = api.call(Some(&first.token), "Credentials/Revoke", revoke(&id, "5")).await?;
    assert_eq!(why(&refused)["reason"], "LAST_ADMIN", "{refused:?}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_ends_at_the_database_alone_and_is_shown_for_a_month() -> TestResult {
    let api = Api::start("api_rule_off").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--name", "kim", "--save-context", "home"])?;
    api.key(AccessRole::Admin, &[], None).await?;
    api.bmdb.enable_two_person_rule("a test").await?.context("it was off")?;
    assert!(kim.ask(&["issues"])?.contains("few-admins"), "two admins are few");
    let off = ["policy", "disable-two-person-rule", "--reason", "tokens were lost"];
    let through_api = kim.ask(&off).err().context("the API ends the rule")?.to_string();
    assert!(through_api.contains("no call of the API switches the rule off"), "{through_api}");
    let dry = kim.direct(&[&off[..], &["--dry-run"]].concat())?;
    assert!(dry.contains("is off from now on"), "{dry}");
    api.bmdb.read_policy().await?;
    assert!(api.bmdb.policy().1.two_person_rule.required, "a dry run changes nothing");

    let done = kim.direct(&off)?;
    assert!(done.starts_with("the two-person rule is off from now on"), "{done}");
    assert!(kim.direct(&off)?.contains("is off already"), "nothing is left to switch");
    api.bmdb.read_policy().await?;
    assert!(!api.bmdb.policy().1.two_person_rule.required);
    let audited = "SELECT count(*) FROM audit WHERE rpc = 'shepherd.direct/DisableTwoPersonRule'
                   AND outcome = 'changed' AND NOT dry_run AND actor LIKE 'kim@%' AND reason = 'tokens were lost'";
    assert_eq!(api.count(audited).await?, 1);
    let shown = kim.ask(&["issues"])?;
    assert!(shown.contains("two-person-rule-off") && shown.contains("tokens were lost"), "{shown}");
    assert!(!shown.contains("few-admins"), "{shown}");
    // It is shown although the rule is on again, and not for ever.
    api.bmdb.enable_two_person_rule("a test").await?.context("it was off")?;
    assert!(kim.ask(&["issues"])?.contains("two-person-rule-off"));
    api.database.advance(Duration::from_hours(31 * 24)).await?;
    assert!(!kim.direct(&["issues"])?.contains("two-person-rule-off"));
    Ok(api.stop().await?)
}
