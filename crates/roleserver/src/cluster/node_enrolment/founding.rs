//! Founding a cluster, and what is fetched before when it is restored.
//!
//! The key of the node and the authority of the cluster are stored before etcd has data, so that a node that was
//! interrupted continues with them. A restored cluster has the authority of its snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use curator::bootstrap::{BootstrapRequest, create_authority};
use curator::restore::RestoreSource;
use curator_client::cluster_snapshot::{ClusterSnapshot, snapshot_digest};
use curator_client::pki::Authority;
use etcd::snapshot_file::verify_snapshot;
use model::role_declaration::Sha256;
use supervisor::exit_reason::RunnableError;
use uuid::Uuid;

use crate::cluster::files::StoredAuthority;
use crate::cluster::node_address::node_address;
use crate::cluster::node_enrolment::NodeEnroller;
use crate::cluster::node_facts::ClusterFounding;
use crate::cluster::node_order::{NodeOrder, OrderKind, parse_key, parse_snapshot};

impl NodeEnroller {
    pub(super) async fn found_cluster(&self, order: &NodeOrder) -> Result<(), RunnableError> {
        let OrderKind::Found { cluster, name, owner_keys, snapshot, image, revocations, epoch } = &order.what
        else {
            return Ok(());
        };
        self.files.raise_epoch(*cluster, *epoch)?;
        let key = self.files.read_or_create_key()?;
        let restoring = match snapshot {
            Some(known_by) => Some(self.fetch_snapshot(*cluster, parse_snapshot(known_by)?, *epoch).await?),
            None => None,
        };
        if let Some(image) = image {
            self.fetch_image(parse_snapshot(&image.sha256)?).await?;
        }
        let mut revoked = BTreeMap::new();
        for (key, value) in revocations {
            revoked.insert(key.clone(), hex::decode(value)?);
        }
        let restoring = restoring.map(|restoring| RestoreSource {
            over_image: image.is_some(),
            revocations: revoked,
            ..restoring
        });
        let kept = if let Some(kept) = self.files.read_authority()? {
            kept
        } else {
            let made = match &restoring {
                Some(restoring) => restoring.snapshot.cluster_and_authority()?.1,
                None => create_authority(*cluster, self.clock.now())?,
            };
            let kept = StoredAuthority {
                certificate: hex::encode(&made.anchor().certificate),
                private_key: hex::encode(made.pkcs8()),
            };
            self.files.write_authority(&kept)?;
            kept
        };
        let authority = Authority::load(&hex::decode(&kept.certificate)?, &hex::decode(&kept.private_key)?)?;
        let address = self.scope.until_cancelled(node_address(Some(order), [])).await??;
        let founding = BootstrapRequest {
            authority: Arc::new(authority),
            name: name.clone(),
            owner_keys: owner_keys.iter().map(|key| parse_key(key)).collect::<Result<_, _>>()?,
            node_key: curator_client::node_id::PublicKey(key.public_key()),
            machine: order.machine,
            labels: order.labels.clone(),
            address: Some(address),
            restore: restoring,
        };
        self.facts.address.set(address);
        self.facts.founding.set(Some(ClusterFounding {
            founding: Arc::new(founding),
            address,
            image: image.clone(),
        }));
        Ok(())
    }

    /// The snapshot to restore: the stored one if its digest is right, or else fetched from a shepherd. A partial
    /// download is resumed. A file with another digest is removed and fetched again.
    async fn fetch_snapshot(
        &self,
        cluster: Uuid,
        known_by: Sha256,
        epoch: u64,
    ) -> Result<RestoreSource, RunnableError> {
        let path = self.files.snapshot_path();
        for _ in 0..2 {
            let read = tokio::fs::read(&path).await;
            if let Some(encoded) = read.ok().filter(|encoded| snapshot_digest(encoded) == known_by.0) {
                let snapshot = ClusterSnapshot::decode(&encoded)?;
                if snapshot.cluster != cluster || snapshot.epoch >= epoch {
                    return Err(RunnableError::msg(format!(
                        "the snapshot is of epoch {} of cluster {}, and cannot become epoch {epoch} of cluster {cluster}",
                        snapshot.epoch, snapshot.cluster
                    )));
                }
                return Ok(RestoreSource {
                    snapshot: Arc::new(snapshot),
                    epoch,
                    over_image: false,
                    revocations: BTreeMap::new(),
                });
            }
            let fetched =
                self.scope.until_cancelled(self.server_pool.fetch_artefact(known_by, &path)).await?;
            fetched.map_err(|error| RunnableError::msg(format!("the snapshot is not here: {error}")))?;
            let fetched = tokio::fs::read(&path).await.unwrap_or_default();
            if snapshot_digest(&fetched) != known_by.0 {
                self.files.remove_snapshot()?;
            }
        }
        Err(RunnableError::msg("shepherds send another snapshot than the one to restore from"))
    }

    /// Fetches the image of etcd to restore, unless it is here and its digest is right. A partial download is resumed. A
    /// file with another digest is removed and fetched again.
    async fn fetch_image(&self, known_by: Sha256) -> Result<(), RunnableError> {
        let path = self.files.image_path();
        let is_here = async || verify_snapshot(&path).await.is_ok_and(|image| image.sha256 == known_by.0);
        for _ in 0..2 {
            if is_here().await {
                return Ok(());
            }
            let fetched =
                self.scope.until_cancelled(self.server_pool.fetch_artefact(known_by, &path)).await?;
            fetched.map_err(|error| RunnableError::msg(format!("the image of etcd is not here: {error}")))?;
            if is_here().await {
                return Ok(());
            }
            self.files.remove_image()?;
        }
        Err(RunnableError::msg("shepherds send another image of etcd than the one to restore"))
    }
}
