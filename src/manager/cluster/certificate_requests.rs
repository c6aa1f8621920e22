//! Has certificates of people signed and revoked.
//!
//! The cluster's curators sign and revoke; operators order it. [`crate::model::cluster::certificate_request`] decides
//! which step is due for a request. If the shepherd dies after a certificate was signed and before it was recorded, the
//! certificate is of use only to the holder of its key, and it expires by itself. The next pass has another one signed
//! for the same key. A revocation covers all certificates of that key.

use tonic::Code;

use crate::curator_client::status_text::describe_status;
use crate::manager::cluster::curators::{CURATOR_TIMEOUT, CuratorCallError, CuratorClient};
use crate::manager::cluster::{ClusterPassError, ClusterWorker};
use crate::model::cluster::certificate_request::{RequestStep, due_requests};
use crate::model::cluster::credential::ClusterCredential;
use crate::model::cluster::kubernetes_user::KubernetesUser;

/// A request, with the peers that will accept its certificate.
#[derive(Clone, Copy)]
enum PersonalRequest<'r> {
    Curators(&'r ClusterCredential),
    ApiServers(&'r KubernetesUser),
}

impl ClusterWorker<'_> {
    /// Takes the steps that are due for certificates for curators. The inner error is what prevents that for now.
    pub(super) async fn process_credentials(&self) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let Some(client) = &self.curators else { return Ok(Ok(())) };
        let (credentials, now) = self.bmdb.cluster_credentials(self.cluster).await?;
        let due = due_requests(&credentials, now);
        let due = due.into_iter().map(|(request, step)| (PersonalRequest::Curators(request), step));
        self.take_request_steps(client, due.collect()).await
    }

    /// Takes the steps that are due for certificates for API servers. The inner error is what prevents that for now.
    pub(super) async fn process_kubernetes_users(
        &self,
    ) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        let Some(client) = &self.curators else { return Ok(Ok(())) };
        let (users, now) = self.bmdb.cluster_kubernetes_users(self.cluster).await?;
        let due = due_requests(&users, now);
        let due = due.into_iter().map(|(request, step)| (PersonalRequest::ApiServers(request), step));
        self.take_request_steps(client, due.collect()).await
    }

    async fn take_request_steps(
        &self,
        client: &CuratorClient,
        due: Vec<(PersonalRequest<'_>, RequestStep)>,
    ) -> Result<Result<(), CuratorCallError>, ClusterPassError> {
        for (request, step) in due {
            // The session is renewed soon, or it has ended. The remaining steps are due in the next pass.
            if self.session.remaining() <= CURATOR_TIMEOUT {
                return Ok(Ok(()));
            }
            let done = match (step, request) {
                (RequestStep::Sign, _) => self.sign_request(client, request).await,
                (RequestStep::Revoke, PersonalRequest::Curators(credential)) => {
                    self.revoke_credential(client, credential).await
                }
                // No API server could check a revocation, so none is ever requested.
                (RequestStep::Revoke, PersonalRequest::ApiServers(_)) => Ok(()),
            };
            match done {
                Ok(()) => {}
                Err(CuratorCallError::Bmdb(error)) => return Err(error.into()),
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    async fn sign_request(
        &self,
        client: &CuratorClient,
        request: PersonalRequest<'_>,
    ) -> Result<(), CuratorCallError> {
        let signed = match request {
            PersonalRequest::Curators(credential) => self.sign_credential(client, credential).await,
            PersonalRequest::ApiServers(user) => self.sign_kubernetes_user(client, user).await,
        };
        match signed {
            // The curators would reject the same request again, so the rejection is final.
            Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::InvalidArgument => {
                let (bmdb, lease, text) = (self.bmdb, &self.lease, describe_status(&status));
                match request {
                    PersonalRequest::Curators(credential) => {
                        bmdb.record_cluster_credential_rejected(lease, credential.request.id, &text).await?;
                    }
                    PersonalRequest::ApiServers(user) => {
                        bmdb.record_kubernetes_user_rejected(lease, user.request.id, &text).await?;
                    }
                }
                Ok(())
            }
            other => other,
        }
    }

    async fn sign_credential(
        &self,
        client: &CuratorClient,
        credential: &ClusterCredential,
    ) -> Result<(), CuratorCallError> {
        let (request, holder) = (&credential.request, &credential.request.holder);
        let lifetime = request.lifetime.into();
        let issued = client.issue_owner_certificate(holder, &request.public_key, lifetime).await?;
        tracing::info!(cluster = self.name, credential = %request.id, holder, "a person's certificate is signed");
        self.bmdb.record_cluster_credential_issued(&self.lease, request.id, issued).await?;
        Ok(())
    }

    async fn sign_kubernetes_user(
        &self,
        client: &CuratorClient,
        user: &KubernetesUser,
    ) -> Result<(), CuratorCallError> {
        let issued = client.issue_user_certificate(user).await?;
        let (id, holder, access) = (user.request.id, &user.request.holder, user.access.as_str());
        tracing::info!(cluster = self.name, user = %id, holder, access, "a certificate for API servers is signed");
        self.bmdb.record_kubernetes_user_issued(&self.lease, id, issued).await?;
        Ok(())
    }

    async fn revoke_credential(
        &self,
        client: &CuratorClient,
        credential: &ClusterCredential,
    ) -> Result<(), CuratorCallError> {
        let request = &credential.request;
        client.revoke_owner_certificates(&request.public_key, credential.serial.as_deref()).await?;
        let (id, holder) = (request.id, &request.holder);
        tracing::info!(cluster = self.name, credential = %id, holder, "a person's certificate is refused from now on");
        self.bmdb.record_cluster_credential_revoked(&self.lease, id).await?;
        Ok(())
    }
}
