//! Who gets in, and who may call what.

use std::time::Duration;

use anyhow::Context as _;
use futures::StreamExt as _;
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use serde_json::json;
use shepherd::model::access::Role;
use shepherd::model::time::Span;
use shepherd::proto::fleet::v1::WhoAmIRequest;
use shepherd::proto::fleet::v1::credentials_client::CredentialsClient;
use shepherd::server::api::access::{Needs, RULES};
use shepherd::server::api::transcode::REQUEST_LIMIT;
use tonic::transport::Identity;

use crate::api::{Api, key_in, order};
use crate::harness::callback::provided;
use crate::harness::postgres::TestDatabase;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_role_tries_every_call() -> anyhow::Result<()> {
    let api = Api::start("api_roles").await?;
    let keys = [
        (None, None),
        (Some(Role::Viewer), Some(api.key(Role::Viewer, &[], None).await?)),
        (Some(Role::Operator), Some(api.key(Role::Operator, &[], None).await?)),
        (Some(Role::Admin), Some(api.key(Role::Admin, &[], None).await?)),
    ];
    let mut tried = 0;
    for rule in RULES.iter().filter(|rule| rule.rpc.starts_with("shepherd.") && !rule.rpc.ends_with("/Watch"))
    {
        let Needs::Role(needed) = rule.needs else { panic!("{}", rule.rpc) };
        let rpc = rule.rpc.strip_prefix("shepherd.fleet.v1.").context("ours")?;
        for (role, key) in &keys {
            let answer = api.call(key.as_ref().map(|key| key.token.as_str()), rpc, json!({})).await?;
            let expected = match role {
                None => "no",
                Some(role) if *role < needed => "not allowed",
                Some(_) => "let in",
            };
            let found = match answer.code {
                401 => "no",
                403 => "not allowed",
                // An empty request may lack what the call needs; it was let in all the same.
                200 | 400 | 404 => "let in",
                _ => "failed",
            };
            assert_eq!(found, expected, "{rpc} as {role:?}: {answer:?}");
            tried += 1;
        }
    }
    assert!(tried >= 80, "only {tried} were tried");
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?, 0, "nothing was ordered");
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_revoked_foreign_and_odd_credentials_are_refused() -> anyhow::Result<()> {
    let api = Api::start("api_credentials").await?;
    let (admin, short) =
        (api.key(Role::Admin, &[], None).await?, api.key(Role::Viewer, &[], Some(Span::hours(1))).await?);
    let other = TestDatabase::create("api_other_fleet").await?;
    let elsewhere = other.bmdb().await?;
    elsewhere.migrate().await?;
    let foreign = key_in(&elsewhere, Role::Admin, &[], None).await?;
    let who = async |token: &str| api.call(Some(token), "Credentials/WhoAmI", json!({})).await;

    assert_eq!(who(&short.token).await?.ok()?["credential"]["role"], "viewer");
    api.database.advance(Duration::from_mins(61)).await?;
    let expired = who(&short.token).await?;
    assert_eq!(
        (expired.code, expired.message()),
        (401, "this credential has expired; ask an admin for another one")
    );

    let swapped = format!("{}{}", &admin.token[..42], &short.token[42..]);
    for (what, token) in
        [("foreign", foreign.token.as_str()), ("swapped", swapped.as_str()), ("odd", "x"), ("none", "")]
    {
        let refused = who(token).await?;
        assert_eq!(refused.code, 401, "{what}");
        assert!(!refused.json.to_string().contains("expired"), "{what}: {refused:?}");
    }

    let body = json!({ "credential": short.id, "order": order("left", "1") });
    assert_eq!(api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?["changed"], true);
    assert!(who(&short.token).await?.message().contains("revoked"));
    let body = json!({ "credential": admin.id, "order": order("left, too", "2") });
    api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?;
    assert_eq!(who(&admin.token).await?.code, 401, "a revoked credential is good for no next call");
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_said_once_and_kept_nowhere() -> anyhow::Result<()> {
    let api = Api::start("api_token_once").await?;
    let admin = api.key(Role::Admin, &[], None).await?;
    let body = json!({ "name": "kim", "role": "operator", "expiresAfter": "90d", "order": order("kim is new", "kim-1") });
    let made = api.call(Some(&admin.token), "Credentials/Create", body.clone()).await?.ok()?;
    let token = made["token"].as_str().context("a token")?.to_owned();
    assert_eq!(
        api.call(Some(&token), "Credentials/WhoAmI", json!({})).await?.ok()?["credential"]["name"],
        "kim"
    );

    let again = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!((again["token"].as_str(), &again["order"]["repeated"]), (Some(""), &json!(true)));
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name = 'kim'").await?, 1);

    let body = json!({ "name": "lee", "role": "admin", "order": { "reason": "what if", "dryRun": true } });
    let dry = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!((dry["token"].as_str(), &dry["order"]["dryRun"]), (Some(""), &json!(true)));
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name = 'lee'").await?, 0);

    let secret = token.rsplit('_').next().context("a secret")?.to_owned();
    let kept: String = sqlx::query_scalar(
        "SELECT (SELECT jsonb_agg(to_jsonb(c))::TEXT FROM access_credential c)
                || (SELECT jsonb_agg(to_jsonb(a))::TEXT FROM audit a)",
    )
    .fetch_one(&api.pool)
    .await?;
    assert!(kept.contains("kim") && !kept.contains(&secret), "the database has the secret");
    let listed = api.call(Some(&admin.token), "Credentials/List", json!({})).await?.ok()?;
    assert!(!listed.to_string().contains(&secret));
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credential_for_a_provider_reaches_its_machines_only() -> anyhow::Result<()> {
    let api = Api::start("api_scope").await?;
    let ours = provided(&api.pool).await?;
    let theirs = provided(&api.pool).await?;
    for statement in [
        "UPDATE machine_provided SET provider = 'other' WHERE machine_id = $1",
        "UPDATE machine_due SET provider = 'other' WHERE machine_id = $1",
    ] {
        sqlx::query(statement).bind(theirs.0).execute(&api.pool).await?;
    }
    let key = api.key(Role::Admin, &["rack"], None).await?;
    let listed = api.call(Some(&key.token), "Machines/List", json!({})).await?.ok()?;
    let listed = listed["machines"].as_array().context("a list")?;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0]["name"]["machine"], ours.to_string());
    for rpc in ["Machines/Get", "Machines/Why", "Machines/Timeline", "Machines/Retry"] {
        let ask = async |machine: String| {
            let mut body = json!({ "machine": machine });
            if rpc == "Machines/Retry" {
                body["order"] = order("r", rpc);
            }
            api.call(Some(&key.token), rpc, body).await
        };
        assert_eq!(ask(ours.to_string()).await?.code, 200, "{rpc}");
        let refused = ask(theirs.to_string()).await?;
        assert_eq!(refused.code, 404, "{rpc}: {refused:?}");
        assert!(!refused.json.to_string().contains("other"), "{refused:?}");
    }
    for rpc in ["Sessions/List", "Credentials/List", "Audit/List", "Policy/Get"] {
        assert_eq!(api.call(Some(&key.token), rpc, json!({})).await?.code, 403, "{rpc}");
    }
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_client_certificate_is_a_credential() -> anyhow::Result<()> {
    let api = Api::start("api_certificate").await?;
    let admin = api.key(Role::Admin, &[], None).await?;
    let key = KeyPair::generate_for(&PKCS_ED25519)?;
    let certificate = CertificateParams::default().self_signed(&key)?;
    let identity = || Identity::from_pem(certificate.pem(), key.serialize_pem());
    let mut client = CredentialsClient::new(api.channel(Some(identity())).await?);
    let refused = client.who_am_i(WhoAmIRequest {}).await.err().context("nobody knows it")?;
    assert_eq!(refused.code(), tonic::Code::Unauthenticated);

    let digest = ring::digest::digest(&ring::digest::SHA256, certificate.der());
    let body = json!({
        "name": "ci", "role": "viewer", "certificateSha256": hex::encode(digest.as_ref()), "order": order("ci", "1"),
    });
    let made = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!(made["token"], "");
    let who = client.who_am_i(WhoAmIRequest {}).await?.into_inner().credential.context("a credential")?;
    assert_eq!((who.name.as_str(), who.kind.as_str(), who.role.as_str()), ("ci", "certificate", "viewer"));

    let body = json!({ "credential": made["credential"]["credential"], "order": order("over", "2") });
    api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?;
    assert!(client.who_am_i(WhoAmIRequest {}).await.is_err(), "on the connection it was good on");
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_is_pinned_once_and_a_dry_run_knows_it() -> anyhow::Result<()> {
    let api = Api::start("api_pinned_twice").await?;
    let admin = api.key(Role::Admin, &[], None).await?;
    let create = async |order: serde_json::Value| {
        let body =
            json!({ "name": "ci", "role": "viewer", "certificateSha256": "ab".repeat(32), "order": order });
        api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()
    };
    let dry = || json!({ "reason": "what if", "dryRun": true });
    let would = create(dry()).await?;
    assert_eq!(would["order"]["changed"], true);
    assert_eq!(would["order"]["after"]["name"], "ci");
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE kind = 'certificate'").await?, 0);
    let made = create(order("ci", "1")).await?;
    let id = made["credential"]["credential"].as_str().context("an id")?;
    for again in [create(dry()).await?, create(order("ci", "2")).await?] {
        assert_eq!((&again["order"]["changed"], &again["credential"]), (&json!(false), &json!(null)));
        let said = again["order"]["said"].as_str().context("a sentence")?;
        assert!(said.contains("pinned already") && said.contains(id), "{said}");
    }
    let revoke = |order: serde_json::Value| json!({ "credential": id, "order": order });
    let would = api.call(Some(&admin.token), "Credentials/Revoke", revoke(dry())).await?.ok()?;
    assert_eq!(would["changed"], true);
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE revoked_at IS NOT NULL").await?, 0);
    api.call(Some(&admin.token), "Credentials/Revoke", revoke(order("over", "3"))).await?.ok()?;
    let would = api.call(Some(&admin.token), "Credentials/Revoke", revoke(dry())).await?.ok()?;
    assert_eq!(would["changed"], false);
    let said = create(dry()).await?["order"]["said"].as_str().context("a sentence")?.to_owned();
    assert!(said.contains("that is over"), "{said}");
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_is_not_read_of_whoever_has_no_credential() -> anyhow::Result<()> {
    let api = Api::start("api_endless").await?;
    // A body that never ends: whoever waits for it answers late, and otherwise.
    let begun = futures::stream::iter([Ok::<_, std::io::Error>("{")]);
    let endless = reqwest::Body::wrap_stream(begun.chain(futures::stream::pending()));
    let refused = api
        .http
        .post(api.url("/api/shepherd.fleet.v1.Machines/Hold"))
        .header("content-type", "application/json")
        .body(endless)
        .send()
        .await?;
    assert_eq!(refused.status(), 401);
    assert_eq!(refused.headers()["www-authenticate"], "Bearer");
    let viewer = api.key(Role::Viewer, &[], None).await?;
    let long = api
        .http
        .post(api.url("/api/shepherd.fleet.v1.Machines/List"))
        .bearer_auth(&viewer.token)
        .header("content-type", "application/json")
        .body(" ".repeat(REQUEST_LIMIT + 1))
        .send()
        .await?;
    assert_eq!(long.status(), 400);
    api.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_calls_too_often_is_told_to_wait() -> anyhow::Result<()> {
    let slow: shepherd::model::time::Rate = "1h,3".parse()?;
    let api = Api::start_with("api_rates", |settings| settings.rates.credential = slow).await?;
    let (busy, calm) = (api.key(Role::Viewer, &[], None).await?, api.key(Role::Viewer, &[], None).await?);
    let mut codes = Vec::new();
    for _ in 0..5 {
        codes.push(api.call(Some(&busy.token), "Credentials/WhoAmI", json!({})).await?.code);
    }
    assert_eq!(codes, [200, 200, 200, 429, 429]);
    assert_eq!(api.call(Some(&calm.token), "Credentials/WhoAmI", json!({})).await?.code, 200, "others may");
    api.stop().await
}
