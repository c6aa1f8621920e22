//! The files `curators.json`, `former_curators.json` and `proved_curators.json`: where curators of the cluster listen.
//!
//! All are hints. The former ones are those that the last change left out. A false leader could report a list without any
//! honest curator, and a node that restarts then would reach none. So they stay until a curator of the new list is
//! verified. They have a file of their own, because a release before it reads the list and nothing else.
//!
//! The proved ones have shown a curator's certificate at their addresses. They stay also after that, because a curator of
//! the new list may be stolen and not revoked yet.

use std::collections::{BTreeMap, BTreeSet};

use curator_client::proved_curators::ProvedAddresses;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const LISTED: &str = "curators.json";
const FORMER: &str = "former_curators.json";
const PROVED: &str = "proved_curators.json";

impl ClusterFiles {
    /// Reads the last known addresses of curators; empty also for a damaged file.
    #[must_use]
    pub fn read_curators(&self) -> BTreeSet<String> {
        self.read_json(LISTED).ok().flatten().unwrap_or_default()
    }

    /// Stores the addresses of curators.
    pub fn write_curators(&self, curators: &BTreeSet<String>) -> Result<(), ClusterFilesError> {
        self.write_hint(LISTED, curators)
    }

    /// Reads the addresses of former curators; empty also for a damaged file.
    #[must_use]
    pub fn read_former_curators(&self) -> BTreeSet<String> {
        self.read_json(FORMER).ok().flatten().unwrap_or_default()
    }

    /// Stores the addresses of former curators.
    pub fn write_former_curators(&self, former: &BTreeSet<String>) -> Result<(), ClusterFilesError> {
        self.write_hint(FORMER, former)
    }

    /// Reads the addresses at which curators have proved themselves; empty also for a damaged file.
    #[must_use]
    pub fn read_proved_curators(&self) -> ProvedAddresses {
        let stored: BTreeMap<String, String> = self.read_json(PROVED).ok().flatten().unwrap_or_default();
        stored.into_iter().filter_map(|(address, node)| Some((address, node.parse().ok()?))).collect()
    }

    /// Stores the addresses at which curators have proved themselves.
    pub fn write_proved_curators(&self, proved: &ProvedAddresses) -> Result<(), ClusterFilesError> {
        let stored: BTreeMap<&str, String> =
            proved.iter().map(|(address, node)| (address.as_str(), node.to_string())).collect();
        self.write_hint(PROVED, &stored)
    }

    /// Removes the addresses of former curators.
    pub fn remove_former_curators(&self) -> Result<(), ClusterFilesError> {
        self.remove_file(FORMER)
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::node_id;

    use super::*;
    use crate::cluster::files::tests::files;

    #[test]
    fn damaged_list_of_curators_is_empty() {
        let (directory, files) = files();
        let (listed, former) = (["a:1".to_owned()].into(), ["b:1".to_owned()].into());
        files.write_curators(&listed).unwrap();
        files.write_former_curators(&former).unwrap();
        assert_eq!((files.read_curators(), files.read_former_curators()), (listed, former));
        let proved = ProvedAddresses::from([("a:1".to_owned(), node_id(1))]);
        files.write_proved_curators(&proved).unwrap();
        assert_eq!(files.read_proved_curators(), proved);
        for name in ["curators.json", "former_curators.json", "proved_curators.json"] {
            std::fs::write(directory.path().join("cluster").join(name), "{").unwrap();
        }
        assert!(files.read_curators().is_empty() && files.read_former_curators().is_empty());
        assert!(files.read_proved_curators().is_empty());
        for _ in 0..2 {
            files.remove_former_curators().unwrap();
            assert!(!directory.path().join("cluster/former_curators.json").exists());
        }
    }
}
