//! The file `epoch.json`: how often the cluster was restored, as far as this machine knows.
//!
//! It is truth: a node that forgets it could follow curators of before a restoration. The file has the highest epoch
//! received and the highest one that an order or a statement has proved ([`curator_client::known_epoch`]). While a
//! statement is stored, only the proved one counts.
//!
//! Earlier releases stored one number. Beside a stored statement, that was a proved one. Without one, any node of the
//! cluster could have reported it, so it is proved as far as the stored order names it. That is decided before the
//! first statement is stored.

use std::sync::{Mutex, PoisonError};

use curator_client::known_epoch::{EpochChange, KnownEpoch};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::disk;

const FILE_NAME: &str = "epoch.json";
/// Held while the file changes: several tasks learn epochs, and other tasks go on during a write.
static CHANGE: Mutex<()> = Mutex::new(());

/// An epoch as it is stored.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct StoredEpoch {
    /// UUID of the cluster.
    cluster: Uuid,
    /// The highest epoch received; 0 for a cluster that was never restored.
    epoch: u64,
    /// The highest proved epoch; `None` in a file of an earlier release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    proved: Option<u64>,
}

impl ClusterFiles {
    /// Reads the epoch that this machine knows, and its cluster.
    pub fn read_epoch(&self) -> Result<Option<(Uuid, KnownEpoch)>, ClusterFilesError> {
        let Some(stored) = self.read_json::<StoredEpoch>(FILE_NAME)? else { return Ok(None) };
        // A damaged order is reported where it is carried out.
        let order = self.read_order().ok().flatten();
        let order = order.filter(|order| order.cluster() == Some(stored.cluster));
        let ordered = order.map_or(0, |order| order.epoch());
        let known = known_epoch(&stored, ordered, self.has_statement(stored.cluster));
        Ok(Some((stored.cluster, known)))
    }

    /// The epoch of this cluster as far as this machine knows.
    pub fn known_epoch(&self, cluster: Uuid) -> Result<KnownEpoch, ClusterFilesError> {
        let known = self.read_epoch()?.filter(|(stored, _)| *stored == cluster);
        Ok(known.map(|(_, known)| known).unwrap_or_default())
    }

    /// The highest epoch of this cluster that this machine follows; 0 if it knows none.
    pub fn epoch_of_cluster(&self, cluster: Uuid) -> Result<u64, ClusterFilesError> {
        Ok(self.known_epoch(cluster)?.highest)
    }

    /// Stores a change of this cluster's epoch.
    pub fn change_epoch(&self, cluster: Uuid, change: EpochChange) -> Result<(), ClusterFilesError> {
        disk::run_beside(&self.path, || {
            let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
            let known = self.known_epoch(cluster)?;
            let next = known.after(change);
            if next == known {
                return Ok(());
            }
            self.write_json(
                FILE_NAME,
                &StoredEpoch { cluster, epoch: next.highest, proved: Some(next.proved) },
            )
        })
    }

    /// Stores the epoch of an order, if it is higher than what is proved.
    pub fn raise_epoch(&self, cluster: Uuid, epoch: u64) -> Result<(), ClusterFilesError> {
        self.change_epoch(cluster, EpochChange::Ordered(epoch))
    }

    /// Replaces the stored epoch by that of an order, also by a lower one: a higher one may be that of a thief.
    pub fn replace_epoch(&self, cluster: Uuid, epoch: u64) -> Result<(), ClusterFilesError> {
        disk::run_beside(&self.path, || {
            let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
            self.write_json(FILE_NAME, &StoredEpoch { cluster, epoch, proved: Some(epoch) })
        })
    }
}

/// What is known by the file, the epoch that the stored order of its cluster names, and whether a statement is stored.
fn known_epoch(stored: &StoredEpoch, ordered: u64, has_statement: bool) -> KnownEpoch {
    let proved = match stored.proved {
        Some(proved) => proved,
        None if has_statement => stored.epoch,
        None => ordered.min(stored.epoch),
    };
    if has_statement {
        KnownEpoch::proved(proved)
    } else {
        KnownEpoch { highest: stored.epoch.max(proved), proved }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use curator_client::testing::{authority, statement};

    use super::*;
    use crate::cluster::files::tests::files;
    use crate::cluster::node_order::{NodeOrder, OrderKind};

    #[test]
    fn epoch_grows_and_is_that_of_one_cluster() {
        let (directory, files) = files();
        let (here, elsewhere) = (Uuid::from_u128(7), Uuid::from_u128(8));
        assert_eq!(files.epoch_of_cluster(here).unwrap(), 0);
        for (epoch, kept) in [(0, 0), (2, 2), (1, 2), (3, 3)] {
            files.raise_epoch(here, epoch).unwrap();
            assert_eq!(files.epoch_of_cluster(here).unwrap(), kept, "{epoch}");
        }
        assert_eq!(files.epoch_of_cluster(elsewhere).unwrap(), 0);
        files.raise_epoch(elsewhere, 1).unwrap();
        assert_eq!(
            (files.epoch_of_cluster(elsewhere).unwrap(), files.epoch_of_cluster(here).unwrap()),
            (1, 0)
        );
        std::fs::write(directory.path().join("cluster/epoch.json"), "{").unwrap();
        assert!(files.epoch_of_cluster(elsewhere).is_err(), "a damaged one is no epoch that may be followed");
        files.remove_all_except_order().unwrap();
        assert_eq!(files.read_epoch().unwrap(), None);
    }

    /// An order to join the first cluster of tests, of this epoch.
    fn join(epoch: u64) -> NodeOrder {
        let what = OrderKind::Join {
            ticket: "05".repeat(32),
            ca_certificate: hex::encode(&authority(1).anchor().certificate),
            curators: Vec::new(),
            epoch,
            statement: None,
        };
        NodeOrder { generation: 1, what, machine: None, labels: BTreeMap::new(), address: None }
    }

    /// Any node could report an epoch before the first statement.
    #[test]
    fn first_statement_lowers_a_reported_epoch_also_in_a_file_of_an_earlier_release() {
        let cluster = authority(1).anchor().cluster;
        let known = |highest, proved| KnownEpoch { highest, proved };
        for (of_before, ordered, before, after) in [
            (true, None, known(900, 0), 0),
            (true, Some(0), known(900, 0), 0),
            (true, Some(3), known(900, 3), 3),
            // A person has written it, and it was not carried out yet.
            (true, Some(901), known(900, 900), 900),
            (false, None, known(900, 0), 0),
            (false, Some(2), known(900, 2), 2),
        ] {
            let (directory, files) = files();
            if of_before {
                std::fs::create_dir_all(directory.path().join("cluster")).unwrap();
                let text = format!("{{\"cluster\": \"{cluster}\", \"epoch\": 900}}");
                std::fs::write(directory.path().join("cluster/epoch.json"), text).unwrap();
                if let Some(ordered) = ordered {
                    files.write_order(&join(ordered)).unwrap();
                }
            } else {
                files.change_epoch(cluster, EpochChange::Reported(900)).unwrap();
                files.raise_epoch(cluster, ordered.unwrap_or(0)).unwrap();
            }
            assert_eq!(files.known_epoch(cluster).unwrap(), before, "{of_before} {ordered:?}");
            files.write_statement(&statement(0, 2).sign(&authority(1)).unwrap()).unwrap();
            assert_eq!(files.known_epoch(cluster).unwrap(), KnownEpoch::proved(after), "{ordered:?}");
            // Another tracker, which has no statement yet, reports it again.
            files.change_epoch(cluster, EpochChange::Reported(901)).unwrap();
            assert_eq!(files.known_epoch(cluster).unwrap(), KnownEpoch::proved(after));
        }
    }

    #[test]
    fn epoch_beside_a_statement_of_an_earlier_release_is_proved() {
        let cluster = authority(1).anchor().cluster;
        let (directory, files) = files();
        files.write_statement(&statement(2, 7).sign(&authority(1)).unwrap()).unwrap();
        let text = format!("{{\"cluster\": \"{cluster}\", \"epoch\": 3}}");
        std::fs::write(directory.path().join("cluster/epoch.json"), text).unwrap();
        assert_eq!(files.known_epoch(cluster).unwrap(), KnownEpoch::proved(3), "an order has raised it");
    }
}
