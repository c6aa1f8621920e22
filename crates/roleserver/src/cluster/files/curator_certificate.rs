//! The file `curator.json`: the certificate that this node's curator shows.
//!
//! It is a hint. The curator gets another certificate if the file is damaged or missing.

use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const NAME: &str = "curator.json";

#[derive(Serialize, Deserialize)]
struct StoredCertificate {
    /// DER in hexadecimal digits.
    certificate: String,
}

impl ClusterFiles {
    /// Reads the certificate of this node's curator, DER; `None` also for a damaged file.
    #[must_use]
    pub fn read_curator_certificate(&self) -> Option<Vec<u8>> {
        let stored = self.read_json::<StoredCertificate>(NAME).unwrap_or_else(|error| {
            tracing::warn!(%error, "the stored certificate of this node's curator cannot be read; it gets another one");
            None
        });
        stored.and_then(|stored| hex::decode(stored.certificate).ok())
    }

    /// Stores the certificate of this node's curator.
    pub fn write_curator_certificate(&self, certificate: &[u8]) -> Result<(), ClusterFilesError> {
        self.write_hint(NAME, &StoredCertificate { certificate: hex::encode(certificate) })
    }

    /// Removes the certificate of this node's curator, once no curator runs here any more.
    pub fn remove_curator_certificate(&self) -> Result<(), ClusterFilesError> {
        self.remove_file(NAME)
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::files::tests::files;

    #[test]
    fn damaged_certificate_of_a_curator_is_absent() {
        let (directory, files) = files();
        assert_eq!(files.read_curator_certificate(), None);
        files.write_curator_certificate(&[1, 2, 255]).unwrap();
        assert_eq!(files.read_curator_certificate(), Some(vec![1, 2, 255]));
        let path = directory.path().join("cluster/curator.json");
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(files.read_curator_certificate(), None, "{length} bytes");
        }
        std::fs::write(&path, r#"{"certificate": "no digits"}"#).unwrap();
        assert_eq!(files.read_curator_certificate(), None);
        for _ in 0..2 {
            files.remove_curator_certificate().unwrap();
            assert!(!path.exists());
        }
    }
}
