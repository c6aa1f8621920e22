//! Texts that differ by what nobody sees: rejected, or stored in one form.

use anyhow::Context as _;
use serde_json::{Value, json};
use shepherd::model::access::AccessRole;

use crate::api::{Api, order};
use crate::harness::aloud::TestResult;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_with_hidden_characters_is_refused_and_stored_nowhere() -> TestResult {
    let api = Api::start("api_hidden_text").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let create = |name: &str, order: Value| json!({ "name": name, "role": "viewer", "order": order });
    let limited = |provider: &str| {
        let order = order("kim is new", "6");
        json!({ "name": "kim", "role": "viewer", "providers": [provider], "order": order })
    };
    for (field, body) in [
        ("name", create("ad\u{200b}min", order("kim is new", "1"))),
        ("name", create("\u{202e}nimda", order("kim is new", "2"))),
        ("name", create("admin\u{e0041}", order("kim is new", "3"))),
        ("order.reason", create("kim", order("r \u{202e}gninnalp si eno on\u{202c}", "4"))),
        ("order.idempotency_key", create("kim", order("kim is new", "5\u{2060}"))),
        ("providers", limited("ra\u{ad}ck")),
    ] {
        let refused = api.call(Some(&admin.token), "Credentials/Create", body).await?;
        assert_eq!((refused.code, &refused.json["error"]["status"]), (400, &json!("INVALID_ARGUMENT")));
        assert!(refused.message().contains("has the hidden character U+"), "{field}: {refused:?}");
        assert!(refused.json.to_string().contains(&format!("\"field\":\"{field}\"")), "{field}: {refused:?}");
    }
    assert_eq!(api.count("SELECT count(*) FROM access_credential").await?, 1, "the admin's own");
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE reason LIKE '%gninnalp%'").await?, 0);

    // Full-width letters, an accent of its own, and a space that does not break.
    let body = create("\u{ff2b}im\u{a0} Lee", order("cafe\u{301}", "7"));
    let made = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!(made["credential"]["name"], "Kim Lee");
    let listed = api.call(Some(&admin.token), "Audit/List", json!({})).await?.ok()?;
    let records = listed["records"].as_array().context("records")?;
    assert!(records.iter().any(|record| record["reason"] == "caf\u{e9}"), "{listed}");
    Ok(api.stop().await?)
}
