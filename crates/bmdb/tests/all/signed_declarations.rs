//! Declarations that give root on nodes: a key of the shepherd signed them, or another admin approves them.

use anyhow::{Result, bail};
use model::cluster::declaration::attach_signature;
use model::role_declaration::RoleDeclaration;
use model::signed_artefact::signature::ArtefactSignature;
use model::signed_artefact::signing_key::SigningKey;
use model::signed_artefact::signing_trust::SigningTrust;
use shepherd_bmdb::cluster::declaration::NewDeclaration;
use shepherd_bmdb::cluster::kubernetes::desired::KubernetesPatch;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::orders::order::{Actor, Order, OrderResult, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;
use testkit::declaration::web_role;

const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
/// A signature of a declaration with the name `web`. A shepherd verifies it before it stores anything.
const WEB: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
    "trusted comment: shepherd kind=declaration name=web version=1.4.0 architecture=any minimum-version=1.2.0\n",
    "OAoZ6EjE9UohPBZvKwZO6UUzQYcvWgZFrIM34IC/WwTisLr7JwAAG0/dS4EzbDHcb+DGT7IXb/Hl1SBQGT9/Dw==\n",
);
/// The same with the name `dns`.
const DNS: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
    "trusted comment: shepherd kind=declaration name=dns version=1.4.0 architecture=any minimum-version=1.2.0\n",
    "01qShWP6sDZ1us84XSlGW8C1D5ijihRxsoFKz4iDnFQuT8iDCKxSjhlQ8BlfkAuJxeEo2Eeh68soLCiyDuCLAA==\n",
);

fn trust() -> Result<SigningTrust> {
    Ok(SigningTrust::pinning(vec![SigningKey::parse(KEY).map_err(anyhow::Error::msg)?]))
}

fn order(key: &str) -> Order {
    Order {
        actor: Actor { name: "kim@a".to_owned(), credential: None },
        rpc: "test".to_owned(),
        target: "ams".to_owned(),
        reason: "the new front".to_owned(),
        idempotency_key: Some(key.to_owned()),
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(key.as_bytes()),
    }
}

/// What became of an order: `carried out`, `needs two`, or the reason of the rejection.
fn end_of(given: Result<OrderResult, BmdbError>) -> Result<&'static str> {
    match given {
        Ok(_) => Ok("carried out"),
        Err(BmdbError::ApprovalRequired(_)) => Ok("needs two"),
        Err(BmdbError::OrderRejected { reason, .. }) => Ok(reason),
        Err(error) => bail!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_gives_root_is_signed_or_approved() -> TestResult {
    let kit = Kit::new("signed_roles").await?;
    kit.founded_cluster(1, 0).await?;
    let declare = async |user: &str, signature: Option<&str>, trust: SigningTrust, key: &str| {
        let mut declared = web_role(&"ab".repeat(32), user);
        // Each declaration is another one.
        declared.services[0].arguments = vec![key.to_owned()];
        // Only what the shepherd verified is stored.
        let declared = attach_signature(&declared, "forged");
        let signature = signature.map(ArtefactSignature::parse).transpose()?;
        let new = NewDeclaration { declaration: RoleDeclaration::new(declared)?, signature, trust };
        end_of(kit.bmdb.declare_cluster_role(order(key), "ams".to_owned(), new).await)
    };
    assert_eq!(declare("1000", None, trust()?, "1").await?, "carried out", "it has no privileges");
    assert_eq!(declare("root", None, trust()?, "2").await?, "NOT_SIGNED");
    let arguments =
        "SELECT count(*) FROM cluster_declaration WHERE encode(declaration, 'escape') LIKE '%1000%'";
    assert_eq!(kit.count(arguments).await?, 1, "the former declaration stays");
    let forged =
        "SELECT count(*) FROM cluster_declaration WHERE encode(declaration, 'escape') LIKE '%forged%'";
    assert_eq!(kit.count(forged).await?, 0, "nobody verified it");
    let refused = "SELECT count(*) FROM audit WHERE outcome = 'refused'
                       AND message LIKE 'role web was not declared: server runs as root, %--signature FILE.minisig'";
    assert_eq!(kit.count(refused).await?, 1, "it is in the audit");
    assert_eq!(declare("root", None, SigningTrust::default(), "3").await?, "carried out", "no keys");
    assert_eq!(declare("root", Some(WEB), trust()?, "4").await?, "carried out", "it is signed");
    let signed =
        "SELECT count(*) FROM audit WHERE outcome = 'changed' AND after->>'signing_key_id' IS NOT NULL
                      AND after->>'signed_comment' LIKE '% kind=declaration name=web version=1.4.0 %'";
    assert_eq!(kit.count(signed).await?, 1, "the audit has the signature");
    let sent = "SELECT count(*) FROM cluster_declaration
                WHERE encode(declaration, 'escape') LIKE '%trusted comment: shepherd kind=declaration name=web%'";
    assert_eq!(kit.count(sent).await?, 1, "the curators receive it with the declaration");

    kit.bmdb.change_policy("test", |policy| policy.two_person_rule.required = true).await?;
    assert_eq!(declare("root", None, trust()?, "5").await?, "needs two");
    assert_eq!(declare("root", Some(WEB), trust()?, "6").await?, "carried out", "it is signed");
    kit.bmdb
        .change_policy("test", |policy| {
            policy.two_person_rule.required = false;
            policy.allow_unsigned_releases = true;
        })
        .await?;
    assert_eq!(declare("root", None, trust()?, "7").await?, "carried out", "the policy allows it");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn add_on_is_signed_or_approved() -> TestResult {
    let kit = Kit::new("signed_add_ons").await?;
    for (digit, name, signature) in
        [("a", "k", None), ("b", "unsigned", None), ("c", "dns", Some(DNS)), ("d", "web", Some(WEB))]
    {
        sqlx::query(
            "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by, kubernetes, signature)
             VALUES (decode(repeat($1, 64), 'hex'), 3, gen_random_uuid(), clock_timestamp(), $2, clock_timestamp(), 'kim',
                     CASE WHEN $2 = 'k' THEN '1.30.1' END, $3)",
        )
        .bind(digit)
        .bind(name)
        .bind(signature)
        .execute(&kit.pool)
        .await?;
    }
    kit.founded_cluster(1, 0).await?;
    let bundle = KubernetesPatch { bundle: Some("k".to_owned()), ..KubernetesPatch::default() };
    kit.bmdb.set_kubernetes(order("bundle"), "ams".to_owned(), bundle).await?;
    let set = async |add_on: &str, artefact: &str, trust: SigningTrust, key: &str| {
        let add_ons = [(add_on.to_owned(), artefact.to_owned())].into_iter().collect();
        let patch = KubernetesPatch { add_ons, trust, ..KubernetesPatch::default() };
        end_of(kit.bmdb.set_kubernetes(order(key), "ams".to_owned(), patch).await)
    };
    assert_eq!(set("dns", "unsigned", trust()?, "1").await?, "NOT_SIGNED");
    assert_eq!(set("dns", "web", trust()?, "2").await?, "NOT_SIGNED", "it is signed as another add-on");
    let text = "SELECT count(*) FROM audit WHERE outcome = 'refused' AND message LIKE '%: dns (bbbb%; sign each file%'";
    assert_eq!(kit.count(text).await?, 1, "it is in the audit");
    let add_ons = "SELECT count(*) FROM cluster_kubernetes WHERE add_ons::TEXT <> '{}'";
    assert_eq!(kit.count(add_ons).await?, 0, "nothing is half done");
    assert_eq!(set("dns", "dns", trust()?, "3").await?, "carried out", "it is signed");
    assert_eq!(set("other", "unsigned", SigningTrust::default(), "4").await?, "carried out", "no keys");

    kit.bmdb.change_policy("test", |policy| policy.two_person_rule.required = true).await?;
    assert_eq!(set("third", "unsigned", trust()?, "5").await?, "needs two");
    assert_eq!(set("web", "web", trust()?, "6").await?, "carried out", "it is signed");
    Ok(())
}
