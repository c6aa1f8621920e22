//! Clients that reject the certificate of the callback server.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use shepherd::model::issues::find_issues;
use tokio::net::TcpStream;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, settings, until};
use crate::harness::postgres::TestDatabase;

/// Whether a client that trusts `authority` accepts the certificate of the server for this name.
async fn is_accepted(
    listener: &Listener,
    authority: CertificateDer<'static>,
    name: ServerName<'static>,
) -> anyhow::Result<bool> {
    let mut roots = RootCertStore::empty();
    roots.add(authority)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(listener.server.local_addr).await?;
    Ok(tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.is_ok())
}

/// The messages of the issues about rejected certificates.
async fn rejections(listener: &Listener) -> anyhow::Result<Vec<String>> {
    let inputs = listener.bmdb.read_issue_inputs().await?;
    let found = find_issues(&inputs).into_iter();
    Ok(found.filter(|issue| issue.id == "certificate-rejected").map(|issue| issue.message).collect())
}

#[tokio::test]
async fn alert_that_rejects_the_certificate_is_counted_and_becomes_an_issue() -> TestResult {
    let database = TestDatabase::create("rejections").await?;
    let directory = tempfile::tempdir()?;
    let mut settings = settings(directory.path())?;
    settings.renewal.check_interval = Duration::from_millis(50);
    let listener = Listener::start(&database, settings).await?;
    let address = ServerName::from(listener.server.local_addr.ip());
    let counted = |reason: &str| {
        listener.counted(&format!("shepherd_tls_handshake_failures_total{{reason=\"{reason}\"}}"))
    };
    assert_eq!(rejections(&listener).await?, Vec::<String>::new());

    let stranger = CertificateParams::default().self_signed(&KeyPair::generate()?)?.der().clone();
    assert!(!is_accepted(&listener, stranger, address).await?);
    until("the alert is counted", async || Ok(counted("alert_unknown_ca")? == 1)).await?;
    until("the alert is an issue", async || {
        Ok(rejections(&listener).await?.iter().any(|text| text.ends_with("no CA that it trusts issued it")))
    })
    .await?;

    let own = listener.server.current_ca_certificates().remove(0);
    assert!(!is_accepted(&listener, own.into(), ServerName::try_from("else.example")?).await?);
    until("the other alert is counted", async || Ok(counted("alert_bad_certificate")? == 1)).await?;
    until("the other alert is the issue", async || {
        Ok(rejections(&listener).await?.iter().any(|text| text.contains("it is for other names")))
    })
    .await?;
    assert_eq!((counted("alert_unknown_ca")?, counted("protocol")?), (1, 0));
    Ok(listener.stop().await?)
}
