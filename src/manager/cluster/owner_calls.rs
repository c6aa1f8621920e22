//! Calls to a cluster's curators about its owners: the certificates of people, and the keys of the shepherd.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::DateTime;

use crate::manager::cluster::curators::{CuratorCallError, CuratorClient, call_curator};
use crate::model::cluster::certificate_request::SignedCertificate;
use crate::model::cluster::credential::IssuedCertificate;
use crate::model::cluster::owner_key::OwnerPublicKey;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::credentials_client::CredentialsClient;

impl CuratorClient {
    /// Has a client certificate of a person signed.
    pub async fn issue_owner_certificate(
        &self,
        name: &str,
        public_key: &[u8],
        lifetime: Duration,
    ) -> Result<IssuedCertificate, CuratorCallError> {
        let request = wire::IssueOwnerRequest {
            public_key: public_key.to_vec(),
            name: name.to_owned(),
            lifetime_ms: u64::try_from(lifetime.as_millis()).unwrap_or(u64::MAX),
        };
        let mut credentials = CredentialsClient::new(self.channel());
        let response = call_curator("having a certificate signed", credentials.issue_owner(request)).await?;
        let invalid =
            || CuratorCallError::InvalidResponse("a certificate without a number or an end".to_owned());
        let credential = response.credential.ok_or_else(invalid)?;
        let expires_at = DateTime::from_timestamp_millis(credential.not_after_ms).ok_or_else(invalid)?;
        let signed = SignedCertificate { certificate: response.certificate, expires_at };
        Ok(IssuedCertificate { signed, serial: credential.serial })
    }

    /// Revokes every certificate for that key, and the one with that serial number even if the curators do not know it.
    pub async fn revoke_owner_certificates(
        &self,
        public_key: &[u8],
        serial: Option<&str>,
    ) -> Result<(), CuratorCallError> {
        use wire::revoke_credentials_request::Target;
        let mut credentials = CredentialsClient::new(self.channel());
        let listed = credentials.list(wire::ListCredentialsRequest {});
        let listed = call_curator("listing certificates", listed).await?.credentials;
        let of_the_key = listed.iter().filter(|listed| listed.public_key == public_key && !listed.revoked);
        let mut serials: BTreeSet<&str> = of_the_key.map(|listed| listed.serial.as_str()).collect();
        serials.extend(serial);
        for serial in serials {
            let request = wire::RevokeCredentialsRequest { target: Some(Target::Serial(serial.to_owned())) };
            call_curator("having a certificate refused", credentials.revoke(request)).await?;
        }
        Ok(())
    }

    /// Adds an owner key that may claim certificates from now on, beside the present ones.
    pub async fn add_owner_key(&self, key: OwnerPublicKey) -> Result<(), CuratorCallError> {
        let request = wire::AddOwnerKeyRequest { public_key: key.to_vec() };
        let mut credentials = CredentialsClient::new(self.channel());
        let added = credentials.add_owner_key(request);
        call_curator("having another key of the shepherd taken", added).await.map(drop)
    }

    /// Removes an owner key for ever, and revokes every certificate for it.
    pub async fn remove_owner_key(&self, key: OwnerPublicKey) -> Result<(), CuratorCallError> {
        let request = wire::RemoveOwnerKeyRequest { public_key: key.to_vec() };
        let mut credentials = CredentialsClient::new(self.channel());
        let removed = credentials.remove_owner_key(request);
        call_curator("having a former key of the shepherd refused", removed).await.map(drop)
    }
}
