//! Clients that reject the certificate of the API.

use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use shepherd::model::issues::find_issues;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use super::Api;
use crate::harness::aloud::TestResult;
use crate::harness::callback::until;

#[tokio::test]
async fn rejected_certificate_of_the_api_is_an_issue() -> TestResult {
    let check_often = |settings: &mut super::ApiSettings| {
        settings.renewal.check_interval = Duration::from_millis(50);
    };
    let api = Api::start_with("api_rejections", check_often).await?;
    let messages = async || -> anyhow::Result<Vec<String>> {
        let found = find_issues(&api.bmdb.read_issue_inputs().await?).into_iter();
        Ok(found.filter(|issue| issue.id == "certificate-rejected").map(|issue| issue.message).collect())
    };
    assert_eq!(messages().await?, Vec::<String>::new());
    let stranger = CertificateParams::default().self_signed(&KeyPair::generate()?)?.pem();
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(stranger));
    let endpoint = Endpoint::from_shared(format!("https://{}", api.server.local_addr))?.tls_config(tls)?;
    assert!(endpoint.connect().await.is_err(), "it trusts another CA");
    until("the alert is an issue", async || {
        Ok(messages().await?.iter().any(|text| {
            text.contains("the certificate of its API") && text.ends_with("no CA that it trusts issued it")
        }))
    })
    .await?;
    Ok(api.stop().await?)
}
