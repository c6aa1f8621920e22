//! Reads and writes, and what a caller gets while etcd does not respond.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context as _;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PKCS_ED25519};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use shepherd_etcd::client::{Client, EtcdError};
use shepherd_etcd::namespace::{KeySelector, Namespace};
use shepherd_etcd::transport::{Endpoint, client_tls_config};

use testkit::aloud::TestResult;
use testkit::child::{Program, guarded};
use testkit::etcd_program::etcd_program;
use testkit::etcd_servers::{Cluster, until};
use testkit::port::reserved;

#[tokio::test]
async fn what_is_written_is_read_in_its_own_namespace_alone() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    assert_eq!(client.get("/a").await?, None);
    let revision = client.put_unguarded("/a", b"one").await?;
    let read = client.get("/a").await?.context("it was written")?;
    assert_eq!((read.key.as_str(), &read.value[..]), ("/a", &b"one"[..]));
    assert_eq!((read.create_revision, read.mod_revision), (revision, revision));
    let again = client.put_unguarded("/a", b"two").await?;
    let read = client.get("/a").await?.context("it was written")?;
    assert_eq!((read.create_revision, read.mod_revision), (revision, again));

    let other = client.in_namespace(Namespace::new("tes")?);
    assert_eq!(other.list(&KeySelector::Prefix("/".to_owned())).await?.records, []);
    assert_eq!(other.get("/a").await?, None);
    assert!(matches!(client.get("a").await, Err(EtcdError::InvalidName(_))));

    client.delete_unguarded(&KeySelector::Prefix("/".to_owned())).await?;
    assert_eq!(client.get("/a").await?, None);
    Ok(())
}

#[tokio::test]
async fn long_list_is_read_as_it_was_at_one_moment() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    for number in 0..250 {
        client.put_unguarded(&format!("/nodes/{number:03}"), format!("{number}").as_bytes()).await?;
    }
    client.put_unguarded("/nodes", b"no node").await?;
    let last = client.put_unguarded("/nodes0", b"no node").await?;
    let list = client.list(&KeySelector::Prefix("/nodes/".to_owned())).await?;
    assert_eq!(list.revision, last);
    let keys: Vec<String> = list.records.iter().map(|record| record.key.clone()).collect();
    assert_eq!(keys, (0..250).map(|number| format!("/nodes/{number:03}")).collect::<Vec<_>>());
    assert_eq!(client.list(&KeySelector::One("/nodes".to_owned())).await?.records.len(), 1);

    // Meanwhile another task deletes and writes all of them, again and again.
    let writer = tokio::spawn(delete_and_write_over_and_over(client.clone()));
    for _ in 0..20 {
        let list = client.list(&KeySelector::Prefix("/nodes/".to_owned())).await?;
        for (number, record) in list.records.iter().enumerate() {
            // At one revision a listing has the first keys without a gap.
            assert_eq!(record.key, format!("/nodes/{number:03}"), "of {}", list.records.len());
            assert!(record.mod_revision <= list.revision);
        }
    }
    assert!(!writer.is_finished());
    writer.abort();
    Ok(())
}

async fn delete_and_write_over_and_over(client: Client) -> Result<Infallible, EtcdError> {
    loop {
        client.delete_unguarded(&KeySelector::Prefix("/nodes/".to_owned())).await?;
        for number in 0..250 {
            client.put_unguarded(&format!("/nodes/{number:03}"), b"again").await?;
        }
    }
}

#[tokio::test]
async fn call_ends_at_its_deadline_when_etcd_is_silent() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client().with_deadline(Duration::from_millis(500));
    client.put_unguarded("/a", b"one").await?;
    etcd.silence(0)?;
    let error = client.put_unguarded("/a", b"two").await.unwrap_err();
    assert!(matches!(error, EtcdError::Deadline { .. }), "{error:?}");
    assert!(error.to_string().starts_with("writing /a got no response from etcd within 500 ms"), "{error}");
    etcd.let_speak(0)?;
    Ok(until("etcd answers again", async || Ok(client.get("/a").await.is_ok())).await?)
}

#[tokio::test]
async fn etcd_that_is_not_there_is_reported_unavailable_and_comes_back() -> TestResult {
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"one").await?;
    etcd.kill(0)?;
    let error = client.get("/a").await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().starts_with("reading /a failed, because etcd cannot be reached"), "{error}");
    etcd.restart(0)?;
    until("etcd answers again", async || Ok(client.get("/a").await.is_ok())).await?;
    assert_eq!(client.get("/a").await?.context("it was written")?.value, b"one");
    Ok(())
}

#[tokio::test]
async fn without_a_quorum_nothing_is_read_and_the_member_itself_still_answers() -> TestResult {
    let mut etcd = Cluster::start(3).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"one").await?;
    etcd.kill(1)?;
    until("two of three have a quorum", async || Ok(client.get("/a").await.is_ok())).await?;
    etcd.kill(2)?;
    until("the member has no leader", async || Ok(client.status().await?.leader.is_none())).await?;
    let error = client.get("/a").await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable { .. } | EtcdError::Deadline { .. }), "{error:?}");
    etcd.restart(1)?;
    Ok(until("it is read again", async || Ok(client.get("/a").await.is_ok())).await?)
}

#[tokio::test]
async fn compacted_revision_is_distinguished_from_a_rejected_request() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    client.put_unguarded("/a", b"one").await?;
    let revision = client.put_unguarded("/a", b"two").await?;
    client.compact(revision).await?;
    let error = client.compact(revision).await.unwrap_err();
    assert!(matches!(error, EtcdError::Compacted { .. }), "{error:?}");
    let error = client.put_unguarded("/a", &vec![0; 1_700_000]).await.unwrap_err();
    assert!(matches!(error, EtcdError::Rejected { .. }), "{error:?}");
    assert!(error.to_string().contains("request is too large"), "{error}");
    Ok(())
}

#[tokio::test]
async fn over_tls_etcd_knows_us_and_we_know_etcd() -> TestResult {
    let directory = tempfile::tempdir()?;
    let authority_key = KeyPair::generate_for(&PKCS_ED25519)?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);
    let signed = |name: &str| -> anyhow::Result<_> {
        let key = KeyPair::generate_for(&PKCS_ED25519)?;
        let certificate = CertificateParams::new(vec![name.to_owned()])?.signed_by(&key, &issuer)?;
        Ok((certificate, key))
    };
    let (server, server_key) = signed("127.0.0.1")?;
    let write = |name: &str, text: String| -> anyhow::Result<_> {
        let path = directory.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    };
    let address = reserved()?;
    let mut command = guarded(etcd_program()?);
    command.current_dir(directory.path()).args([
        "--data-dir",
        "data",
        "--unsafe-no-fsync",
        "--logger",
        "zap",
    ]);
    command.args(["--log-outputs", "stderr", "--listen-peer-urls", "unix://peer:1"]);
    command.args([
        "--initial-advertise-peer-urls",
        "unix://peer:1",
        "--initial-cluster",
        "default=unix://peer:1",
    ]);
    command
        .arg("--client-cert-auth")
        .arg("--trusted-ca-file")
        .arg(write("ca.pem", authority_certificate.pem())?);
    command.arg("--cert-file").arg(write("server.pem", server.pem())?);
    command.arg("--key-file").arg(write("server.key", server_key.serialize_pem())?);
    let url = format!("https://{address}");
    command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
    let _etcd = Program::spawn_logged(&mut command, &directory.path().join("log"))?;

    let client = |trusted: &rcgen::Certificate, own: (rcgen::Certificate, KeyPair)| -> anyhow::Result<_> {
        let key = PrivateKeyDer::try_from(own.1.serialize_der()).map_err(anyhow::Error::msg)?;
        let config = client_tls_config(&[trusted.der().clone()], vec![own.0.der().clone()], key)?;
        let server_name = ServerName::from(address.ip());
        let endpoint =
            Endpoint::Tls { address: (address.ip().to_string(), address.port()), server_name, config };
        Ok(Client::new(vec![endpoint], Namespace::new("test")?))
    };
    let ours = client(&authority_certificate, signed("curator")?)?;
    until("etcd answers", async || Ok(ours.put_unguarded("/a", b"one").await.is_ok())).await?;
    assert_eq!(ours.get("/a").await?.context("it was written")?.value, b"one");

    let stranger_key = KeyPair::generate_for(&PKCS_ED25519)?;
    let stranger = CertificateParams::new(vec!["curator".to_owned()])?.self_signed(&stranger_key)?;
    let error = client(&stranger, signed("curator")?)?.get("/a").await.unwrap_err();
    assert!(
        matches!(error, EtcdError::Unavailable { .. }) && error.to_string().contains("certificate"),
        "{error}"
    );
    let error = client(&authority_certificate, (stranger, stranger_key))?.get("/a").await.unwrap_err();
    assert!(matches!(error, EtcdError::Unavailable { .. }), "{error}");
    Ok(())
}
