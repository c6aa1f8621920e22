//! Rotates the shepherd's owner key of a cluster.
//!
//! [`crate::model::cluster::owner_key`] decides the next step, from the recorded keys and from the key that the
//! curators accepted. A frozen shepherd that resumes does no harm: what it requests of the curators is done already or
//! is rejected, because a removed key never comes back, and what it writes to the BMDB is rejected together with its
//! lease.

use secrecy::{ExposeSecret as _, SecretSlice};
use tonic::Code;

use crate::bmdb::cluster::owner_key::{former_secret_name, next_secret_name};
use crate::curator_client::clock::Clock;
use crate::curator_client::identity::Identity;
use crate::curator_client::statement_trust::StatementTrust;
use crate::manager::cluster::curators::{CURATOR_TIMEOUT, CuratorCallError, CuratorClient, load_owner_key};
use crate::manager::cluster::statements::load_statement_trust;
use crate::manager::cluster::{COMPONENT, ClusterPassError, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::owner_key::{
    OwnerKeySlot, OwnerKeyStep, keys_to_try, next_rotation_step, rotation_wait_reason,
};
use crate::model::cluster::state::ClusterIdentity;

/// Purpose that the next key is sealed with until it has a name of its own.
const NEXT_KEY_PURPOSE: &str = "the next key for a cluster";
/// Most steps in one pass. The rest follows in the next pass.
const MAX_STEPS_PER_PASS: usize = 8;

impl ClusterWorker<'_> {
    /// Connects to the curators with the first of the shepherd's keys that they accept.
    pub(super) async fn connect_curators(
        &mut self,
        founded: &ClusterIdentity,
        epoch: u64,
    ) -> Result<CuratorClient, CuratorCallError> {
        let gone = || CuratorCallError::InvalidResponse("the cluster is gone".to_owned());
        let (keys, _) = self.bmdb.cluster_keys(self.cluster).await?.ok_or_else(gone)?;
        let trust = self.trust_statements(founded).await?;
        let mut tried = 0;
        for which in keys_to_try(&keys) {
            // The session is renewed soon, or it has ended. The remaining keys are tried in the next pass.
            if self.session.remaining() <= CURATOR_TIMEOUT {
                return Err(CuratorCallError::OrderUnavailable(
                    "the shepherd's keys for it are tried in the next pass",
                ));
            }
            let Some(key) = self.load_key(which).await? else { continue };
            tried += 1;
            match CuratorClient::claim_certificate(founded, epoch, (which, &key), &trust).await {
                Err(CuratorCallError::Rejected { status, .. }) if status.code() == Code::PermissionDenied => {
                }
                Err(error) => return Err(error),
                Ok(client) => {
                    if keys.rejected_since.is_some() {
                        self.bmdb.record_cluster_keys_rejected(&self.lease, self.cluster, false).await?;
                    }
                    if which != OwnerKeySlot::Current {
                        tracing::warn!(
                            cluster = self.name,
                            key_slot = ?which,
                            "curators take another key than the one in force"
                        );
                    }
                    return Ok(client);
                }
            }
        }
        if keys.rejected_since.is_none() {
            self.bmdb.record_cluster_keys_rejected(&self.lease, self.cluster, true).await?;
        }
        Err(CuratorCallError::AllKeysRejected { tried })
    }

    /// The newest statement of the cluster's authority, which outlives the connections to its curators.
    async fn trust_statements(
        &mut self,
        founded: &ClusterIdentity,
    ) -> Result<StatementTrust, CuratorCallError> {
        let former = self.statements.take();
        let trust = load_statement_trust(self.bmdb, founded, former, Clock::system()).await?;
        Ok(self.statements.insert(trust).clone())
    }

    /// Loads one of the shepherd's keys. `None` if it is not sealed in this BMDB any more.
    pub(super) async fn load_key(&self, which: OwnerKeySlot) -> Result<Option<Identity>, CuratorCallError> {
        let (bmdb, secrets) = (self.bmdb, &self.settings.secrets);
        let name = match which {
            OwnerKeySlot::Current => return load_owner_key(bmdb, secrets, self.cluster).await.map(Some),
            OwnerKeySlot::Next(_) => next_secret_name(self.cluster),
            OwnerKeySlot::Former(key) => former_secret_name(self.cluster, key),
        };
        let sealed = secrets.get(bmdb, &name).await?;
        Ok(sealed.map(|sealed| Identity::from_pkcs8(sealed.expose_secret())).transpose()?)
    }

    /// Takes the due steps of the rotation. Returns what prevents a desired step for now, as text for people.
    pub(super) async fn rotate_owner_keys(
        &mut self,
        founded: &ClusterIdentity,
        epoch: u64,
    ) -> Result<Option<String>, ClusterPassError> {
        let every = self.bmdb.policy().1.cluster_key_rotation;
        let mut last_error = None;
        for _ in 0..MAX_STEPS_PER_PASS {
            let Some((keys, now)) = self.bmdb.cluster_keys(self.cluster).await? else { return Ok(None) };
            let wait_reason = rotation_wait_reason(&keys, every, now);
            let Some(by) = self.curators.as_ref().map(|client| client.key_slot) else {
                return Ok(
                    wait_reason.map(|wait_reason| format!("{wait_reason}; that waits for its curators"))
                );
            };
            if let Some(error) = last_error {
                return Ok(wait_reason.map(|wait_reason| format!("{wait_reason}: {error}")));
            }
            let Some(step) = next_rotation_step(&keys, by, every, now) else { return Ok(None) };
            if self.session.remaining() <= CURATOR_TIMEOUT {
                return Ok(wait_reason);
            }
            tracing::info!(cluster = self.name, %step, "a step of the shepherd's key for a cluster");
            match self.apply_key_step(step, (founded, epoch)).await {
                Ok(()) => {}
                Err(CuratorCallError::Bmdb(error)) => return Err(error.into()),
                Err(error) => last_error = Some(error),
            }
        }
        Ok(None)
    }

    async fn apply_key_step(
        &mut self,
        step: OwnerKeyStep,
        (founded, epoch): (&ClusterIdentity, u64),
    ) -> Result<(), CuratorCallError> {
        match step {
            OwnerKeyStep::Generate => {
                let key = Identity::generate()?;
                let plain = SecretSlice::from(key.pkcs8().to_vec());
                let sealed = self.settings.secrets.seal(NEXT_KEY_PURPOSE, &plain)?;
                self.bmdb
                    .store_next_cluster_key(&self.lease, self.cluster, (key.public_key(), sealed))
                    .await?;
                failpoint::hit(COMPONENT, "key-stored");
            }
            OwnerKeyStep::Register(which) => {
                let lost =
                    || CuratorCallError::InvalidResponse("a key that is not sealed here any more".to_owned());
                let key = self.load_key(which).await?.ok_or_else(lost)?;
                if let Some(client) = &self.curators {
                    client.add_owner_key(key.public_key()).await?;
                }
                failpoint::hit(COMPONENT, "key-added");
                if self.session.remaining() <= CURATOR_TIMEOUT {
                    return Err(CuratorCallError::OrderUnavailable("it is tried in the next pass"));
                }
                // No other key is removed before the curators have accepted this one.
                let trust = self.trust_statements(founded).await?;
                let client = CuratorClient::claim_certificate(founded, epoch, (which, &key), &trust).await?;
                failpoint::hit(COMPONENT, "key-verified");
                self.curators = Some(client);
            }
            OwnerKeyStep::Activate(next) => {
                let before =
                    load_owner_key(self.bmdb, &self.settings.secrets, self.cluster).await?.public_key();
                self.bmdb.activate_next_cluster_key(&self.lease, self.cluster, before, next).await?;
                failpoint::hit(COMPONENT, "key-activated");
                if let Some(client) = &mut self.curators {
                    client.key_slot = OwnerKeySlot::Current;
                }
            }
            OwnerKeyStep::Revoke(key) => {
                if let Some(client) = &self.curators {
                    client.remove_owner_key(key).await?;
                }
                failpoint::hit(COMPONENT, "key-revoked");
                self.bmdb.record_former_key_removed(&self.lease, self.cluster, key).await?;
                failpoint::hit(COMPONENT, "key-removal-recorded");
            }
            OwnerKeyStep::Delete(key) => self.bmdb.delete_former_key(&self.lease, self.cluster, key).await?,
        }
        Ok(())
    }
}
