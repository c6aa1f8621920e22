//! Who is authenticated, and who may make which call.

use std::time::Duration;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt as _;
use prost::Message as _;
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use serde_json::json;
use shepherd::model::access::AccessRole;
use shepherd::model::time::Span;
use shepherd::proto::fleet::v1::credentials_client::CredentialsClient;
use shepherd::proto::fleet::v1::{self, WhoAmIRequest};
use shepherd::server::api::authorization::{RULES, RequiredAuth};
use shepherd::server::api::services::request_limit;
use sqlx::{AssertSqlSafe, PgPool};
use tonic::transport::Identity;
use uuid::Uuid;

use crate::api::{Api, key_in, order};
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;
use crate::harness::postgres::TestDatabase;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_role_tries_every_call() -> TestResult {
    let api = Api::start("api_roles").await?;
    let keys = [
        (None, None),
        (Some(AccessRole::Viewer), Some(api.key(AccessRole::Viewer, &[], None).await?)),
        (Some(AccessRole::Operator), Some(api.key(AccessRole::Operator, &[], None).await?)),
        (Some(AccessRole::Deployer), Some(api.key(AccessRole::Deployer, &[], None).await?)),
        (Some(AccessRole::Admin), Some(api.key(AccessRole::Admin, &[], None).await?)),
    ];
    let mut tried = 0;
    for rule in RULES.iter().filter(|rule| rule.rpc.starts_with("shepherd.") && !rule.rpc.ends_with("/Watch"))
    {
        let RequiredAuth::Role(needed) = rule.required else { panic!("{}", rule.rpc) };
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
                // An empty request may lack what the call needs; it was authorized nevertheless.
                200 | 400 | 404 => "let in",
                _ => "failed",
            };
            assert_eq!(found, expected, "{rpc} as {role:?}: {answer:?}");
            tried += 1;
        }
    }
    assert!(tried >= 390, "only {tried} were tried");
    let counted = api.metrics.encode()?;
    let calls = counted.lines().filter(|line| line.starts_with("shepherd_api_calls_total{"));
    let values: Result<Vec<u64>, _> =
        calls.map(|line| line.rsplit(' ').next().unwrap_or("").parse()).collect();
    assert_eq!(
        values?.into_iter().sum::<u64>(),
        tried,
        "each is counted once, however it was answered:\n{counted}"
    );
    for line in [
        "shepherd_api_calls_total{rpc=\"shepherd.fleet.v1.Machines/List\",code=\"UNAUTHENTICATED\"} 1",
        "shepherd_api_calls_total{rpc=\"shepherd.fleet.v1.Machines/List\",code=\"OK\"} 4",
        "shepherd_api_call_seconds_count{rpc=\"shepherd.fleet.v1.Machines/List\"} 4",
        "shepherd_api_calls_total{rpc=\"shepherd.fleet.v1.Credentials/Create\",code=\"PERMISSION_DENIED\"} 3",
    ] {
        assert!(counted.contains(line), "{line} is not in {counted}");
    }
    assert_eq!(api.count("SELECT count(*) FROM audit WHERE rpc <> 'test'").await?, 0, "nothing was ordered");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_revoked_foreign_and_odd_credentials_are_refused() -> TestResult {
    let api = Api::start("api_credentials").await?;
    let (admin, short) = (
        api.key(AccessRole::Admin, &[], None).await?,
        api.key(AccessRole::Viewer, &[], Some(Span::hours(1))).await?,
    );
    let other = TestDatabase::create("api_other_fleet").await?;
    let elsewhere = other.bmdb().await?;
    elsewhere.migrate().await?;
    let foreign = key_in(&elsewhere, AccessRole::Admin, &[], None).await?;
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

    let body = json!({ "credentialId": short.id, "order": order("left", "1") });
    assert_eq!(api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?["changed"], true);
    assert!(who(&short.token).await?.message().contains("revoked"));
    // The last admin would stay.
    let kim = json!({ "name": "kim", "role": "admin", "order": order("kim is new", "kim") });
    api.call(Some(&admin.token), "Credentials/Create", kim).await?.ok()?;
    let body = json!({ "credentialId": admin.id, "order": order("left, too", "2") });
    api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?;
    assert_eq!(who(&admin.token).await?.code, 401, "a revoked credential is good for no next call");
    Ok(api.stop().await?)
}

/// Every row of every table as text, with bytes in hexadecimal digits.
async fn all_rows(pool: &PgPool) -> anyhow::Result<String> {
    let tables = "SELECT format('%I.%I', table_schema, table_name) FROM information_schema.tables
                  WHERE table_schema NOT IN ('pg_catalog', 'information_schema') AND table_type = 'BASE TABLE'";
    let tables: Vec<String> = sqlx::query_scalar(tables).fetch_all(pool).await?;
    let mut text = String::new();
    for table in tables {
        let rows = format!("SELECT string_agg(to_jsonb(t)::TEXT, ' ') FROM {table} t");
        let rows: Option<String> = sqlx::query_scalar(AssertSqlSafe(rows)).fetch_one(pool).await?;
        text.push_str(&rows.unwrap_or_default());
    }
    Ok(text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_returned_once_and_stored_nowhere() -> TestResult {
    let api = Api::start("api_token_once").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let body = json!({ "name": "kim", "role": "operator", "expiresAfter": "90d", "order": order("kim is new", "kim-1") });
    let made = api.call(Some(&admin.token), "Credentials/Create", body.clone()).await?.ok()?;
    let token = made["token"].as_str().context("a token")?.to_owned();
    assert_eq!(
        api.call(Some(&token), "Credentials/WhoAmI", json!({})).await?.ok()?["credential"]["name"],
        "kim"
    );

    let again = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!((again["token"].as_str(), &again["order"]["replayed"]), (Some(""), &json!(true)));
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name = 'kim'").await?, 1);

    let body = json!({ "name": "lee", "role": "admin", "order": { "reason": "what if", "dryRun": true } });
    let dry = api.call(Some(&admin.token), "Credentials/Create", body).await?.ok()?;
    assert_eq!((dry["token"].as_str(), &dry["order"]["dryRun"]), (Some(""), &json!(true)));
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE name = 'lee'").await?, 0);

    let secret = token.rsplit('_').next().context("a secret")?.to_owned();
    let stored = all_rows(&api.pool).await?;
    assert!(stored.contains("kim is new"), "the audit was not read");
    // As text, as the bytes of that text, and as base64. As text it is also what its random bytes look like.
    for form in [secret.clone(), hex::encode(&secret), STANDARD.encode(&secret)] {
        assert!(!stored.contains(&form), "the database has the secret");
    }
    let listed = api.call(Some(&admin.token), "Credentials/List", json!({})).await?.ok()?;
    assert!(!listed.to_string().contains(&secret));
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credential_for_a_provider_reaches_its_machines_only() -> TestResult {
    let api = Api::start("api_scope").await?;
    let ours = provided(&api.pool).await?;
    let theirs = provided(&api.pool).await?;
    for statement in [
        "UPDATE machine_provided SET provider = 'other' WHERE machine_id = $1",
        "UPDATE machine_due SET provider = 'other' WHERE machine_id = $1",
    ] {
        sqlx::query(statement).bind(theirs.0).execute(&api.pool).await?;
    }
    let key = api.key(AccessRole::Admin, &["rack"], None).await?;
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
    Ok(api.stop().await?)
}

/// Adds a machine with an id and names of the test's choice.
pub(super) async fn stands(pool: &PgPool, id: &str, provider: &str, provider_id: &str) -> anyhow::Result<()> {
    let id: Uuid = id.parse()?;
    sqlx::query("INSERT INTO machine VALUES ($1, clock_timestamp())").bind(id).execute(pool).await?;
    sqlx::query(
        "INSERT INTO machine_provided (machine_id, provider, provider_id, status, provided_at, unchanged)
         VALUES ($1, $2, $3, 'Running', clock_timestamp(), FALSE)",
    )
    .bind(id)
    .bind(provider)
    .bind(provider_id)
    .execute(pool)
    .await?;
    sqlx::query(
        "INSERT INTO machine_due (machine_id, lane, provider, priority, bucket, timer, reason, decided_at,
             phase_index, phase_since, rules_version, policy_version, version, fence, losses)
         SELECT $1, lane, $2, 1, 0, FALSE, 'newly provided', '', 'New', clock_timestamp(), 1, 0, 0, 0, 0
         FROM (VALUES ('access'), ('observe')) l (lane)",
    )
    .bind(id)
    .bind(provider)
    .execute(pool)
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_of_other_providers_change_no_answer() -> TestResult {
    const OURS: &str = "10000000-0000-4000-8000-0000000000ff";
    let api = Api::start("api_scope_names").await?;
    stands(&api.pool, OURS, "rack", "one").await?;
    stands(&api.pool, "30000000-0000-4000-8000-000000000001", "rack", "three-a").await?;
    stands(&api.pool, "30000000-0000-4000-8000-000000000002", "rack", "three-b").await?;
    stands(&api.pool, "20000000-0000-4000-8000-000000000001", "other", "one").await?;
    stands(&api.pool, "20000000-0000-4000-8000-000000000002", "other", "two").await?;
    // More than are read at once, and all of them before ours.
    for n in 0..9 {
        let id = format!("10000000-0000-4000-8000-00000000000{n}");
        stands(&api.pool, &id, &format!("other-{n}"), "many").await?;
    }
    let key = api.key(AccessRole::Operator, &["rack"], None).await?;
    for rpc in ["Machines/Get", "Machines/Hold"] {
        let ask = async |machine: &str| {
            let mut body = json!({ "machine": machine });
            if rpc == "Machines/Hold" {
                body["order"] = json!({ "reason": "what if", "dryRun": true });
            }
            api.call(Some(&key.token), rpc, body).await
        };
        for text in [OURS, "10000000", "10000000-0000-4000-8000-0000000000", "one", "rack/one"] {
            let found = ask(text).await?.ok()?;
            assert_eq!(found["name"]["machine"], OURS, "{rpc} {text}: {found}");
        }
        let ambiguous = ask("3000").await?;
        assert_eq!(ambiguous.code, 404);
        for name in ["rack/three-a", "rack/three-b"] {
            assert!(ambiguous.message().contains(name), "{ambiguous:?}");
        }
        for (theirs, nobodys) in [
            ("20000000-0000-4000-8000-000000000001", "40000000-0000-4000-8000-000000000001"),
            ("20000000-0000-4000-8000-00000000000", "40000000-0000-4000-8000-00000000000"),
            ("20000000", "40000000"),
            ("two", "none"),
            ("many", "none"),
            ("other/one", "other/none"),
            ("other-1/many", "nobody/many"),
        ] {
            let refused = async |text: &str| {
                let refused = ask(text).await?;
                anyhow::Ok((refused.code, refused.json.to_string().replace(text, "NAME")))
            };
            let (refused, unknown) = (refused(theirs).await?, refused(nobodys).await?);
            assert_eq!(refused.0, 404, "{rpc} {theirs}: {refused:?}");
            assert_eq!(refused, unknown, "{rpc} {theirs} and {nobodys}");
        }
    }
    let everybodys = api.key(AccessRole::Viewer, &[], None).await?;
    let ambiguous = api.call(Some(&everybodys.token), "Machines/Get", json!({ "machine": "one" })).await?;
    assert_eq!(ambiguous.code, 404, "a client with access to both must name one: {ambiguous:?}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_page_of_somebody_else_can_send_is_no_call() -> TestResult {
    let api = Api::start("api_content_type").await?;
    let (operator, machine) = (api.key(AccessRole::Operator, &[], None).await?, provided(&api.pool).await?);
    let order = v1::Order { reason: "r".into(), idempotency_key: "k".into(), ..Default::default() };
    let hold = v1::HoldRequest { machine: machine.to_string(), order: Some(order), ..Default::default() };
    let message = hold.encode_to_vec();
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len())?.to_be_bytes());
    framed.extend(message);
    for (content_type, expected, holds) in [
        (Some("text/plain"), 415, 0),
        (Some("text/plain;charset=application/grpc"), 415, 0),
        (Some("application/x-www-form-urlencoded"), 415, 0),
        (None, 415, 0),
        (Some("application/grpc"), 200, 1),
    ] {
        let mut request = api.http.post(api.url("/shepherd.fleet.v1.Machines/Hold"));
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let answer = request.bearer_auth(&operator.token).body(framed.clone()).send().await?;
        assert_eq!(answer.status(), expected, "{content_type:?}");
        answer.bytes().await?;
        let held = api.count("SELECT count(*) FROM machine_hold").await?;
        assert_eq!(held, holds, "{content_type:?}");
    }
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_client_certificate_is_a_credential() -> TestResult {
    let api = Api::start("api_certificate").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
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

    let body = json!({ "credentialId": made["credential"]["credentialId"], "order": order("over", "2") });
    api.call(Some(&admin.token), "Credentials/Revoke", body).await?.ok()?;
    assert!(client.who_am_i(WhoAmIRequest {}).await.is_err(), "on the connection it was good on");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_is_pinned_once_and_a_dry_run_knows_it() -> TestResult {
    let api = Api::start("api_pinned_twice").await?;
    let admin = api.key(AccessRole::Admin, &[], None).await?;
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
    let id = made["credential"]["credentialId"].as_str().context("an id")?;
    for again in [create(dry()).await?, create(order("ci", "2")).await?] {
        assert_eq!((&again["order"]["changed"], &again["credential"]), (&json!(false), &json!(null)));
        let output = again["order"]["message"].as_str().context("a sentence")?;
        assert!(output.contains("pinned already") && output.contains(id), "{output}");
    }
    let revoke = |order: serde_json::Value| json!({ "credentialId": id, "order": order });
    let would = api.call(Some(&admin.token), "Credentials/Revoke", revoke(dry())).await?.ok()?;
    assert_eq!(would["changed"], true);
    assert_eq!(api.count("SELECT count(*) FROM access_credential WHERE revoked_at IS NOT NULL").await?, 0);
    api.call(Some(&admin.token), "Credentials/Revoke", revoke(order("over", "3"))).await?.ok()?;
    let would = api.call(Some(&admin.token), "Credentials/Revoke", revoke(dry())).await?.ok()?;
    assert_eq!(would["changed"], false);
    let output = create(dry()).await?["order"]["message"].as_str().context("a sentence")?.to_owned();
    assert!(output.contains("is revoked or expired"), "{output}");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn body_is_not_read_of_a_client_without_a_credential() -> TestResult {
    let api = Api::start("api_endless").await?;
    // A body that never ends: a server that waited for its end would answer late, and with another status.
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
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let long = api
        .http
        .post(api.url("/api/shepherd.fleet.v1.Machines/List"))
        .bearer_auth(&viewer.token)
        .header("content-type", "application/json")
        .body(" ".repeat(request_limit("shepherd.fleet.v1.Machines/List") + 1))
        .send()
        .await?;
    assert_eq!(long.status(), 400);
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_ends_with_a_rejection_is_announced() -> TestResult {
    let api = Api::start("api_announced").await?;
    let viewer = api.key(AccessRole::Viewer, &[], None).await?;
    let call = || {
        let url = api.url("/api/shepherd.fleet.v1.Machines/List");
        api.http.post(url).header("content-type", "application/json").body("{}")
    };
    let refused = call().send().await?;
    assert_eq!((refused.status().as_u16(), refused.version()), (401, reqwest::Version::HTTP_11));
    assert_eq!(refused.headers().get("connection").context("it announces the end")?, "close");
    let answered = call().bearer_auth(&viewer.token).send().await?;
    assert_eq!(answered.status(), 200);
    assert_eq!(answered.headers().get("connection"), None, "its body was read");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_calls_too_often_is_rate_limited() -> TestResult {
    let slow: shepherd::model::time::Rate = "1h,3".parse()?;
    let api = Api::start_with("api_rates", |settings| settings.rates.credential = slow).await?;
    let (busy, calm) =
        (api.key(AccessRole::Viewer, &[], None).await?, api.key(AccessRole::Viewer, &[], None).await?);
    let mut codes = Vec::new();
    for _ in 0..5 {
        codes.push(api.call(Some(&busy.token), "Credentials/WhoAmI", json!({})).await?.code);
    }
    assert_eq!(codes, [200, 200, 200, 429, 429]);
    assert_eq!(api.call(Some(&calm.token), "Credentials/WhoAmI", json!({})).await?.code, 200, "others may");
    Ok(api.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_comes_from_one_address_is_counted() -> TestResult {
    let slow: shepherd::model::time::Rate = "1h,4".parse()?;
    let api = Api::start_with("api_source_rates", |settings| settings.rates.source = slow).await?;
    let mut codes = Vec::new();
    codes.push(api.http.get(api.url("/openapi.json")).send().await?.status().as_u16());
    codes.push(api.call(None, "Machines/Explode", json!({})).await?.code);
    codes.push(api.http.post(api.url("/shepherd.fleet.v1.Machines/List")).send().await?.status().as_u16());
    codes.push(api.call(None, "Machines/List", json!({})).await?.code);
    assert_eq!(codes, [200, 404, 415, 401]);
    assert_eq!(api.call(None, "Machines/Explode", json!({})).await?.code, 429);
    let refused = api.http.get(api.url("/openapi.json")).send().await?;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    Ok(api.stop().await?)
}
