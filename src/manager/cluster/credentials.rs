//! Certificates of people for clusters: signed and refused by their curators, as operators ordered.
//!
//! A certificate that was signed and not written down is good for nobody but whoever has its key, and ends by itself; the
//! next pass has another one signed for the same key, and who revokes it revokes all of that key.

use tonic::Code;

use crate::manager::cluster::curators::{ANSWER, CuratorError, Way};
use crate::manager::cluster::{PassError, Tending};
use crate::model::cluster::credential::{Credential, Step, due};

impl Tending<'_> {
    /// Does what is due; the inner error is what stands in the way of that for now.
    pub(super) async fn tend_credentials(&self) -> Result<Result<(), CuratorError>, PassError> {
        let Some(way) = &self.way else { return Ok(Ok(())) };
        let (credentials, now) = self.bmdb.cluster_credentials(self.cluster).await?;
        for (credential, step) in due(&credentials, now) {
            // It is renewed soon, or it is over; what is left is due in the next pass.
            if self.session.remaining() <= ANSWER {
                return Ok(Ok(()));
            }
            let done = match step {
                Step::Issue => self.issue(way, credential).await?,
                Step::Revoke => self.revoke(way, credential).await?,
            };
            if let Err(error) = done {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    async fn issue(&self, way: &Way, credential: &Credential) -> Result<Result<(), CuratorError>, PassError> {
        let Credential { id, holder, public_key, lifetime, .. } = credential;
        match way.issue_owner(holder, *public_key, (*lifetime).into()).await {
            Ok(issued) => {
                tracing::info!(cluster = self.name, credential = %id, holder, "a person's certificate is signed");
                self.bmdb.credential_issued(&self.lease, *id, issued).await?;
                Ok(Ok(()))
            }
            // Asked again, they would say so again.
            Err(CuratorError::Said { status, .. }) if status.code() == Code::InvalidArgument => {
                self.bmdb.credential_refused(&self.lease, *id, status.message()).await?;
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    async fn revoke(
        &self,
        way: &Way,
        credential: &Credential,
    ) -> Result<Result<(), CuratorError>, PassError> {
        let serial = credential.issued.as_ref().map(|issued| issued.serial.as_str());
        if let Err(error) = way.revoke_owner(credential.public_key, serial).await {
            return Ok(Err(error));
        }
        let (id, holder) = (credential.id, &credential.holder);
        tracing::info!(cluster = self.name, credential = %id, holder, "a person's certificate is refused from now on");
        self.bmdb.credential_revoked(&self.lease, id).await?;
        Ok(Ok(()))
    }
}
