//! Compressing and sealing cluster snapshots.
//!
//! Snapshots are compressed with gzip, because records of nodes are much alike, and sealed with the secrets key,
//! because the key of the cluster's authority is among them. A snapshot is only opened for the machine that restores
//! its cluster.

use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use ring::digest::{SHA256, digest};
use secrecy::{ExposeSecret as _, SecretSlice};

use crate::connection::error::BmdbError;
use crate::fleet::secret::{SecretError, SecretsKey};

/// Name of the sealed value in errors.
const SECRET_NAME: &str = "a snapshot of a cluster";
/// Largest size of an opened snapshot in bytes: as large as curators make them.
const MAX_ENCODED_BYTES: u64 = 64 << 20;

/// Compresses and seals a snapshot.
pub fn seal_snapshot(secrets: &SecretsKey, encoded: &SecretSlice<u8>) -> Result<Vec<u8>, SecretError> {
    let failed =
        |error: std::io::Error| SecretError::Seal { name: SECRET_NAME.to_owned(), reason: error.to_string() };
    let mut packing = GzEncoder::new(Vec::new(), Compression::default());
    packing.write_all(encoded.expose_secret()).map_err(failed)?;
    secrets.seal(SECRET_NAME, &SecretSlice::from(packing.finish().map_err(failed)?))
}

/// Opens the snapshot whose SHA-256 this is.
pub fn unseal_snapshot(
    secrets: &SecretsKey,
    sealed: &[u8],
    sha256: &[u8],
) -> Result<SecretSlice<u8>, SecretError> {
    let packed = secrets.unseal(SECRET_NAME, sealed)?;
    let mut encoded = Vec::new();
    GzDecoder::new(packed.expose_secret())
        .take(MAX_ENCODED_BYTES + 1)
        .read_to_end(&mut encoded)
        .map_err(|error| BmdbError::Corrupt(format!("{SECRET_NAME} cannot be unpacked: {error}")))?;
    if digest(&SHA256, &encoded).as_ref() != sha256 {
        return Err(BmdbError::Corrupt(format!("{SECRET_NAME} is not what was kept")).into());
    }
    Ok(SecretSlice::from(encoded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_snapshot_shows_nothing_and_opens_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let secrets = SecretsKey::open(&directory.path().join("secrets.key")).unwrap();
        let other = SecretsKey::open(&directory.path().join("other.key")).unwrap();
        let encoded = b"the key of the authority ".repeat(100_000);
        let sealed = seal_snapshot(&secrets, &SecretSlice::from(encoded.clone())).unwrap();
        assert!(sealed.len() < encoded.len() / 10, "{} bytes", sealed.len());
        assert!(!sealed.windows(9).any(|part| part == b"authority"));
        let sha256 = digest(&SHA256, &encoded);
        assert_eq!(unseal_snapshot(&secrets, &sealed, sha256.as_ref()).unwrap().expose_secret(), encoded);
        assert!(unseal_snapshot(&other, &sealed, sha256.as_ref()).is_err());
        let error = unseal_snapshot(&secrets, &sealed, &[0; 32]).unwrap_err().to_string();
        assert!(error.contains("not what was kept"), "{error}");
        assert!(unseal_snapshot(&secrets, &sealed[..sealed.len() - 1], sha256.as_ref()).is_err());
    }
}
