//! Carries out the steps of the keys of a cluster's Kubernetes Secrets.
//!
//! [`crate::model::cluster::plan::secret_keys`] plans them. The shepherd makes a key and seals it in the BMDB before any
//! controller gets it. Controllers get keys as orders over their agent channel; no call to a curator has a part in it, so
//! that no key reaches etcd.
//!
//! # A crash between any two steps
//!
//! * A key that was made but not stored is lost, and the next holder of the lease makes another one.
//! * An order that was built but not stored is built again.
//! * A step is stored once: the write depends on the state before it.
//!
//! # Whom a sealed key belongs to
//!
//! The columns of the database are not sealed: somebody who can write to it could let one cluster have the key of another.
//! So the cluster is sealed together with the key, and an order is not built with the key of another one.

use prost::Message as _;
use ring::digest;
use ring::rand::{SecureRandom as _, SystemRandom};
use secrecy::{ExposeSecret as _, SecretSlice};

use crate::bmdb::cluster::secret_keys::secret_key_name;
use crate::bmdb::fleet::secret::SecretError;
use crate::manager::cluster::curators::CuratorCallError;
use crate::manager::cluster::steps::ORDER_SEAL_PURPOSE;
use crate::manager::cluster::{COMPONENT, ClusterWorker};
use crate::manager::failpoint;
use crate::model::cluster::secret_keys::{
    KEY_BYTES, PLAIN_PROVIDER, SecretKey, SecretKeys, SecretsStage, SecretsStep,
};
use crate::model::cluster::state::Cluster;
use crate::model::ids::MachineId;
use crate::model::time::Timestamp;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::Operation;

/// Purpose that a key is sealed with.
const SEAL_PURPOSE: &str = "a key of Kubernetes Secrets";
/// Digits of the fingerprint of a key.
const FINGERPRINT_DIGITS: usize = 16;

/// The fingerprint of a key: the first digits of its SHA-256.
fn fingerprint(key: &[u8]) -> String {
    let mut digits = hex::encode(digest::digest(&digest::SHA256, key));
    digits.truncate(FINGERPRINT_DIGITS);
    digits
}

impl ClusterWorker<'_> {
    /// Takes a step, at this time of the database. A key that it needs is made and sealed first.
    pub(super) async fn advance_secret_keys(
        &self,
        cluster: &Cluster,
        step: SecretsStep,
        now: Timestamp,
    ) -> Result<(), CuratorCallError> {
        let before = cluster.secret_keys.as_ref();
        let (mut print, mut sealed) = (String::new(), None);
        if step == SecretsStep::Generate {
            let key = self.generate_secret_key()?;
            print = fingerprint(key.expose_secret());
            // The name of the cluster comes first.
            let bound = [self.cluster.as_bytes().as_slice(), key.expose_secret()].concat();
            sealed = Some(self.settings.secrets.seal(SEAL_PURPOSE, &SecretSlice::from(bound))?);
        }
        let next = before.cloned().unwrap_or_else(|| SecretKeys::new(now));
        let next = next.advance(step, &print, cluster.oldest_snapshot, now);
        if self.bmdb.store_secret_keys(&self.lease, self.cluster, (before, &next), sealed).await? {
            tracing::info!(cluster = self.name, stage = %next.stage, "the keys of Kubernetes Secrets take a step");
        }
        failpoint::hit(COMPONENT, "secret-keys-stored");
        Ok(())
    }

    fn generate_secret_key(&self) -> Result<SecretSlice<u8>, CuratorCallError> {
        let mut key = vec![0; KEY_BYTES];
        let name = || secret_key_name(self.cluster, "next");
        SystemRandom::new().fill(&mut key).map_err(|_| SecretError::Make {
            name: name(),
            reason: "the host has no random bytes".to_owned(),
        })?;
        Ok(SecretSlice::from(key))
    }

    /// Sends this machine the present list of providers with their keys.
    pub(super) async fn send_secret_keys(
        &self,
        cluster: &Cluster,
        machine: MachineId,
    ) -> Result<(), CuratorCallError> {
        let state = cluster.secret_keys.as_ref().filter(|state| state.stage.has_keys());
        let Some(state) = state else {
            return Err(CuratorCallError::OrderUnavailable("the cluster has no keys of Kubernetes Secrets"));
        };
        let mut providers = Vec::new();
        for provider in state.providers() {
            providers.push(match provider {
                None => wire::SecretsProvider { name: PLAIN_PROVIDER.to_owned(), key: Vec::new() },
                Some(key) => {
                    let bytes = self.open_secret_key(key).await?;
                    wire::SecretsProvider { name: key.name(), key: bytes.expose_secret().to_vec() }
                }
            });
        }
        let rewrite = state.stage == SecretsStage::Rewriting;
        let operation = Some(Operation::EncryptSecrets(wire::EncryptSecrets { providers, rewrite }));
        let order = wire::ClusterOrder { operation, machine_id: machine.to_string(), ..Default::default() };
        let plain = SecretSlice::from(order.encode_to_vec());
        let sealed = self.settings.secrets.seal(ORDER_SEAL_PURPOSE, &plain)?;
        let list = state.provider_list();
        self.bmdb.send_secret_keys(&self.lease, machine, (self.name, &list), sealed).await?;
        tracing::info!(cluster = self.name, %machine, %list, "a machine is sent keys of Kubernetes Secrets");
        failpoint::hit(COMPONENT, "secret-keys-sent");
        Ok(())
    }

    /// The bytes of a key.
    async fn open_secret_key(&self, key: &SecretKey) -> Result<SecretSlice<u8>, CuratorCallError> {
        let name = secret_key_name(self.cluster, &key.name());
        let bound = self.settings.secrets.get(self.bmdb, &name).await?;
        let gone = CuratorCallError::OrderUnavailable(
            "a key of its Kubernetes Secrets is not sealed in this BMDB; if the database was restored from a backup, restore a \
             later backup",
        );
        let bound = bound.ok_or(gone)?;
        let bytes = bound.expose_secret().strip_prefix(self.cluster.as_bytes().as_slice());
        let bytes = bytes.filter(|bytes| bytes.len() == KEY_BYTES && fingerprint(bytes) == key.fingerprint);
        let changed = CuratorCallError::OrderUnavailable(
            "the sealed key of its Kubernetes Secrets is that of another cluster: somebody changed the database",
        );
        bytes.map(|bytes| SecretSlice::from(bytes.to_vec())).ok_or(changed)
    }
}
