//! Sealed orders about clusters: open one, and decide by it what its machine is sent.
//!
//! A shepherd seals an order with the secrets key, which the database does not have. The columns of the database are not
//! sealed: somebody who can write to it can let the row of one machine, or of one cluster, lead to the secrets of another
//! cluster. So the statements that look for a snapshot or an image only find a candidate. Whether the machine gets it is
//! decided here, by the order: it names the machine, the cluster, and the digest of what is restored.
//!
//! # Notes for the next implementor
//!
//! Nothing here depends on a column of the database, except for the sealed order itself. It must stay like this.

use prost::Message as _;
use secrecy::ExposeSecret as _;
use uuid::Uuid;

use bmdb::connection::error::BmdbError;
use bmdb::fleet::secret::SecretsKey;
use model::ids::MachineId;
use model::role_declaration::Sha256;
use proto::agent::v1::ClusterOrder;
use proto::agent::v1::cluster_order::Operation;

/// Name of the sealed value in errors.
const SECRET_NAME: &str = "an order about a cluster";

/// What a machine fetches to restore its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RestoredFile {
    Snapshot,
    Image,
}

impl RestoredFile {
    fn noun(self) -> &'static str {
        match self {
            Self::Snapshot => "the snapshot",
            Self::Image => "the image of etcd",
        }
    }
}

/// Opens an order. The error is a sentence.
pub(super) fn open_order(secrets: &SecretsKey, sealed: &[u8]) -> Result<ClusterOrder, String> {
    let plain = secrets.unseal(SECRET_NAME, sealed).map_err(|error| error.to_string())?;
    ClusterOrder::decode(plain.expose_secret()).map_err(|error| format!("it is damaged: {error}"))
}

/// Checks that an order is for this machine. One of an earlier release names none. The error is a sentence.
pub(super) fn check_recipient(order: &ClusterOrder, machine: MachineId) -> Result<(), String> {
    if order.machine_id.is_empty() || order.machine_id == machine.to_string() {
        return Ok(());
    }
    Err(format!(
        "it was sealed for the machine {}, and the database has it for {machine}: somebody changed the database",
        order.machine_id
    ))
}

/// The cluster that this machine restores with the file of this digest, by its sealed order.
pub(super) fn restored_cluster(
    secrets: &SecretsKey,
    sealed: &[u8],
    machine: MachineId,
    (file, sha256): (RestoredFile, Sha256),
) -> Result<Uuid, BmdbError> {
    // The log has the reason, and not the answer to the machine: it names files of this host.
    let order = open_order(secrets, sealed)
        .map_err(|error| BmdbError::Corrupt(format!("the order to restore a cluster: {error}")))?;
    check_restore(&order, machine, (file, sha256)).map_err(|reason| refused(file, &reason))
}

/// Checks that what the database has is of the cluster in the order.
pub(super) fn check_cluster(file: RestoredFile, ordered: Uuid, found: Uuid) -> Result<(), BmdbError> {
    if ordered == found {
        return Ok(());
    }
    let reason = format!(
        "its machine restores the cluster {ordered}, and it is of the cluster {found}; somebody changed the database"
    );
    Err(refused(file, &reason))
}

fn refused(file: RestoredFile, reason: &str) -> BmdbError {
    let message = format!("{} is not sent: {reason}", file.noun());
    BmdbError::OrderRejected { reason: "NOT_ORDERED", message }
}

/// The cluster in an order to restore, if the order is for this machine and names this file. The error is a sentence.
fn check_restore(
    order: &ClusterOrder,
    machine: MachineId,
    (file, sha256): (RestoredFile, Sha256),
) -> Result<Uuid, String> {
    check_recipient(order, machine)?;
    if order.machine_id.is_empty() {
        return Err(format!(
            "a shepherd of an earlier release made the order, which names no machine; order it again for one machine with: \
             shepherdctl cluster restore NAME --target-machine {machine}"
        ));
    }
    let Some(Operation::Found(found)) = &order.operation else {
        return Err("the order is not one to restore a cluster".to_owned());
    };
    let named = match file {
        RestoredFile::Snapshot => found.snapshot_sha256.as_slice(),
        RestoredFile::Image => found.image.as_ref().map(|image| image.sha256.as_slice()).unwrap_or_default(),
    };
    if named != sha256.0.as_slice() {
        return Err("the order names another file".to_owned());
    }
    found.cluster_id.parse().map_err(|_| "the order names no cluster".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::agent::v1::{EtcdImage, FoundCluster, LeaveCluster};

    const SNAPSHOT: Sha256 = Sha256([1; 32]);
    const IMAGE: Sha256 = Sha256([2; 32]);

    fn restore(machine_id: &str) -> ClusterOrder {
        let found = FoundCluster {
            cluster_id: Uuid::from_u128(7).to_string(),
            snapshot_sha256: SNAPSHOT.0.to_vec(),
            image: Some(EtcdImage { sha256: IMAGE.0.to_vec(), ..Default::default() }),
            ..Default::default()
        };
        ClusterOrder {
            operation: Some(Operation::Found(found)),
            machine_id: machine_id.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn only_what_the_order_names_goes_to_the_machine_that_it_names() {
        let (one, other) = (MachineId(Uuid::from_u128(1)), MachineId(Uuid::from_u128(2)));
        let order = restore(&one.to_string());
        let leave = ClusterOrder { operation: Some(Operation::Leave(LeaveCluster {})), ..order.clone() };
        let founds = {
            let mut founds = order.clone();
            if let Some(Operation::Found(found)) = &mut founds.operation {
                (found.snapshot_sha256, found.image) = (Vec::new(), None);
            }
            founds
        };
        for (what, order, machine, requested, expected) in [
            ("snapshot", &order, one, (RestoredFile::Snapshot, SNAPSHOT), None),
            ("image", &order, one, (RestoredFile::Image, IMAGE), None),
            ("other machine", &order, other, (RestoredFile::Snapshot, SNAPSHOT), Some("was sealed for")),
            ("other file", &order, one, (RestoredFile::Snapshot, IMAGE), Some("names another file")),
            ("other image", &order, one, (RestoredFile::Image, SNAPSHOT), Some("names another file")),
            ("new cluster", &founds, one, (RestoredFile::Image, IMAGE), Some("names another file")),
            ("leaves", &leave, one, (RestoredFile::Snapshot, SNAPSHOT), Some("not one to restore")),
            ("earlier release", &restore(""), one, (RestoredFile::Image, IMAGE), Some("order it again")),
        ] {
            let decided = check_restore(order, machine, requested);
            match expected {
                None => assert_eq!(decided, Ok(Uuid::from_u128(7)), "{what}"),
                Some(text) => {
                    let refused = decided.as_ref().is_err_and(|error| error.contains(text));
                    assert!(refused, "{what}: {decided:?}");
                }
            }
        }
    }

    #[test]
    fn heartbeat_brings_no_order_of_another_machine() {
        let machine = MachineId(Uuid::from_u128(1));
        assert_eq!(check_recipient(&restore(&machine.to_string()), machine), Ok(()));
        assert_eq!(check_recipient(&restore(""), machine), Ok(()), "an earlier release made it");
        let error = check_recipient(&restore(&Uuid::from_u128(2).to_string()), machine).unwrap_err();
        assert!(error.contains("changed the database"), "{error}");
    }
}
