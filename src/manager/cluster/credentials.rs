//! Signs and revokes client certificates of people for a cluster.
//!
//! The cluster's curators sign and revoke; operators order it. If the shepherd dies after a certificate was signed and
//! before it was recorded, the certificate is of use only to the holder of its key, and it expires by itself. The next
//! pass has another one signed for the same key. A revocation covers all certificates of that key.

use tonic::Code;

use crate::manager::cluster::curators::{CURATOR_TIMEOUT, CuratorCallError, CuratorClient};
use crate::manager::cluster::{ClusterPassError, ClusterWorker};
use crate::model::cluster::credential::{ClusterCredential, CredentialStep, due_steps};

impl ClusterWorker<'_> {
    /// Takes the steps that are due. The inner error is what prevents that for now.
    pub(super) async fn process_credentials(&self) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let Some(client) = &self.curators else { return Ok(Ok(())) };
        let (credentials, now) = self.bmdb.cluster_credentials(self.cluster).await?;
        for (credential, step) in due_steps(&credentials, now) {
            // The session is renewed soon, or it has ended. The remaining steps are due in the next pass.
            if self.session.remaining() <= CURATOR_TIMEOUT {
                return Ok(Ok(()));
            }
            let done = match step {
                CredentialStep::Issue => self.issue_credential(client, credential).await?,
                CredentialStep::Revoke => self.revoke_credential(client, credential).await?,
            };
            if let Err(error) = done {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    async fn issue_credential(
        &self,
        client: &CuratorClient,
        credential: &ClusterCredential,
    ) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let ClusterCredential { id, holder, public_key, lifetime, .. } = credential;
        match client.issue_owner_certificate(holder, *public_key, (*lifetime).into()).await {
            Ok(issued) => {
                tracing::info!(cluster = self.name, credential = %id, holder, "a person's certificate is signed");
                self.bmdb.record_cluster_credential_issued(&self.lease, *id, issued).await?;
                Ok(Ok(()))
            }
            // The curators would reject the same request again, so the rejection is final.
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::InvalidArgument => {
                self.bmdb.record_cluster_credential_rejected(&self.lease, *id, status.message()).await?;
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    async fn revoke_credential(
        &self,
        client: &CuratorClient,
        credential: &ClusterCredential,
    ) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let serial = credential.issued.as_ref().map(|issued| issued.serial.as_str());
        if let Err(error) = client.revoke_owner_certificates(credential.public_key, serial).await {
            return Ok(Err(error));
        }
        let (id, holder) = (credential.id, &credential.holder);
        tracing::info!(cluster = self.name, credential = %id, holder, "a person's certificate is refused from now on");
        self.bmdb.record_cluster_credential_revoked(&self.lease, id).await?;
        Ok(Ok(()))
    }
}
