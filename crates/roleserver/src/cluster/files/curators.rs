//! The files `curators.json` and `former_curators.json`: where curators of the cluster listen.
//!
//! Both are hints. The former ones are those that the last change left out. A false leader could report a list without any
//! honest curator, and a node that restarts then would reach none. So they stay until a curator of the new list is
//! verified. They have a file of their own, because a release before it reads the list and nothing else.

use std::collections::BTreeSet;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const LISTED: &str = "curators.json";
const FORMER: &str = "former_curators.json";

impl ClusterFiles {
    /// Reads the last known addresses of curators; empty also for a damaged file.
    #[must_use]
    pub fn read_curators(&self) -> BTreeSet<String> {
        self.read_json(LISTED).ok().flatten().unwrap_or_default()
    }

    /// Stores the addresses of curators.
    pub fn write_curators(&self, curators: &BTreeSet<String>) -> Result<(), ClusterFilesError> {
        self.write_json(LISTED, curators)
    }

    /// Reads the addresses of former curators; empty also for a damaged file.
    #[must_use]
    pub fn read_former_curators(&self) -> BTreeSet<String> {
        self.read_json(FORMER).ok().flatten().unwrap_or_default()
    }

    /// Stores the addresses of former curators.
    pub fn write_former_curators(&self, former: &BTreeSet<String>) -> Result<(), ClusterFilesError> {
        self.write_json(FORMER, former)
    }

    /// Removes the addresses of former curators.
    pub fn remove_former_curators(&self) -> Result<(), ClusterFilesError> {
        self.remove_file(FORMER)
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::files::tests::files;

    #[test]
    fn damaged_list_of_curators_is_empty() {
        let (directory, files) = files();
        let (listed, former) = (["a:1".to_owned()].into(), ["b:1".to_owned()].into());
        files.write_curators(&listed).unwrap();
        files.write_former_curators(&former).unwrap();
        assert_eq!((files.read_curators(), files.read_former_curators()), (listed, former));
        for name in ["curators.json", "former_curators.json"] {
            std::fs::write(directory.path().join("cluster").join(name), "{").unwrap();
        }
        assert!(files.read_curators().is_empty() && files.read_former_curators().is_empty());
        for _ in 0..2 {
            files.remove_former_curators().unwrap();
            assert!(!directory.path().join("cluster/former_curators.json").exists());
        }
    }
}
