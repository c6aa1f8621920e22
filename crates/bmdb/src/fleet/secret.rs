//! Shared secrets sealed in the BMDB with an age key.
//!
//! Each secret is encrypted with age to the key in `--secrets_key_path`, a file that every shepherd's host has and the
//! database does not have: a thief of a backup of the database has no secret. The key is an age X25519 identity, so
//! that a person can open a sealed value with the `age` program.
//!
//! Several shepherds may need a secret that does not exist yet at the same time. Each makes one, the first to write it
//! wins, and all read what was written.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use age::x25519::Identity;
use model::text_file::decode_text;
use secrecy::{ExposeSecret as _, SecretSlice};
use trusted_file::private_file::{PrivateFileError, read_private_file};

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};

/// Why a secret could not be read or made.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The key file cannot be read, or other users can read or write it.
    #[error(transparent)]
    File(#[from] PrivateFileError),
    /// The key file could not be made.
    #[error("cannot make the secrets key {}: {reason}; give a file that this user can read and write with --secrets_key_path", path.display())]
    MakeFile {
        /// Path of the key file.
        path: PathBuf,
        /// Error of the operating system.
        reason: String,
    },
    /// The file contains no key.
    #[error("{} holds no age key: it must have one line that begins with AGE-SECRET-KEY-1; move it away to have a new one made, or restore the key that the BMDB's secrets were sealed with", path.display())]
    NoKey {
        /// Path of the key file.
        path: PathBuf,
    },
    /// A sealed secret was sealed with another key.
    #[error("the secret {name:?} in the BMDB was sealed with another key than the one in {}; copy the key of the shepherd that made this BMDB to that path, or give its path with --secrets_key_path", path.display())]
    WrongKey {
        /// Name of the secret.
        name: String,
        /// Path of the key file.
        path: PathBuf,
    },
    /// A secret could not be sealed.
    #[error("cannot seal the secret {name:?}: {reason}")]
    Seal {
        /// Name of the secret.
        name: String,
        /// Error of the age library.
        reason: String,
    },
    /// The new secret could not be made.
    #[error("cannot make the secret {name:?}: {reason}")]
    Make {
        /// Name of the secret.
        name: String,
        /// Error of the function that makes it.
        reason: String,
    },
    /// A statement or transaction failed.
    #[error(transparent)]
    Database(#[from] BmdbError),
}

/// The key that secrets are sealed with. `Debug` shows only its path.
pub struct SecretsKey {
    identity: Identity,
    path: PathBuf,
}

impl std::fmt::Debug for SecretsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretsKey").field("path", &self.path).finish_non_exhaustive()
    }
}

impl SecretsKey {
    /// Reads the key, or makes one that only its owner can read.
    pub fn open(path: &Path) -> Result<Self, SecretError> {
        match Self::read(path) {
            Err(SecretError::File(error)) if error.is_not_found() => {
                create_key_file(path)?;
                // Read from the file, not used from memory: of two shepherds on one host, only one made it.
                Self::read(path)
            }
            read => read,
        }
    }

    fn read(path: &Path) -> Result<Self, SecretError> {
        let text = SecretSlice::from(read_private_file("the secrets key", path)?);
        let no_key = || SecretError::NoKey { path: path.to_owned() };
        let text = decode_text(text.expose_secret()).map_err(|error| PrivateFileError::Read {
            what: "the secrets key",
            path: path.to_owned(),
            source: std::io::Error::new(std::io::ErrorKind::InvalidData, error),
        })?;
        let line = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
        let identity = line.and_then(|line| line.parse().ok()).ok_or_else(no_key)?;
        Ok(Self { identity, path: path.to_owned() })
    }

    /// The opened secret of that name; `make` provides it if it does not exist.
    pub async fn get_or_create(
        &self,
        bmdb: &Bmdb,
        name: &str,
        make: impl FnOnce() -> Result<SecretSlice<u8>, String>,
    ) -> Result<SecretSlice<u8>, SecretError> {
        if let Some(secret) = self.get(bmdb, name).await? {
            return Ok(secret);
        }
        let secret = make().map_err(|reason| SecretError::Make { name: name.to_owned(), reason })?;
        let sealed = self.seal(name, &secret)?;
        let (row, what) = (name.to_owned(), "keeping a sealed secret");
        bmdb.transact_with(what, (row, sealed), move |tx, (row, sealed)| {
            Box::pin(async move {
                // The first writer wins.
                sqlx::query!(
                    "INSERT INTO sealed_secret (name, sealed, created_at) VALUES ($1, $2, clock_timestamp())
                     ON CONFLICT (name) DO NOTHING",
                    row,
                    sealed
                )
                .execute(tx)
                .await
                .context(what)?;
                Ok(())
            })
        })
        .await?;
        let corrupt = || BmdbError::Corrupt(format!("the secret {name:?} vanished after it was written"));
        self.get(bmdb, name).await?.ok_or_else(|| corrupt().into())
    }

    /// The opened secret of that name; `None` if it does not exist.
    pub async fn get(&self, bmdb: &Bmdb, name: &str) -> Result<Option<SecretSlice<u8>>, SecretError> {
        let sealed = bmdb
            .statement_with("reading a sealed secret", name.to_owned(), move |pool, row| {
                Box::pin(
                    sqlx::query_scalar!("SELECT sealed FROM sealed_secret WHERE name = $1", row)
                        .fetch_optional(pool),
                )
            })
            .await?;
        sealed.map(|sealed| self.unseal(name, &sealed)).transpose()
    }

    /// Seals a secret that is stored elsewhere; `name` describes it for people.
    pub fn seal(&self, name: &str, secret: &SecretSlice<u8>) -> Result<Vec<u8>, SecretError> {
        age::encrypt(&self.identity.to_public(), secret.expose_secret())
            .map_err(|error| SecretError::Seal { name: name.to_owned(), reason: error.to_string() })
    }

    /// Opens what [`SecretsKey::seal`] sealed.
    pub fn unseal(&self, name: &str, sealed: &[u8]) -> Result<SecretSlice<u8>, SecretError> {
        match age::decrypt(&self.identity, sealed) {
            Ok(plain) => Ok(SecretSlice::from(plain)),
            Err(age::DecryptError::NoMatchingKeys) => {
                Err(SecretError::WrongKey { name: name.to_owned(), path: self.path.clone() })
            }
            Err(error) => Err(BmdbError::Corrupt(format!("the sealed secret {name:?}: {error}")).into()),
        }
    }
}

/// Writes a new key under a name of its own and links it into place, so that a reader of the path finds a complete key
/// or none, and one of two concurrent writers wins.
fn create_key_file(path: &Path) -> Result<(), SecretError> {
    let failed =
        |error: std::io::Error| SecretError::MakeFile { path: path.to_owned(), reason: error.to_string() };
    let identity = Identity::generate();
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(format!(".{}", uuid::Uuid::new_v4().simple()));
    let unfinished = PathBuf::from(unfinished);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(failed)?;
    let written = writeln!(file, "{}", identity.to_string().expose_secret())
        .and_then(|()| file.sync_all())
        .and_then(|()| match std::fs::hard_link(&unfinished, path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
    let removed = std::fs::remove_file(&unfinished);
    written.and(removed).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn sealed_is_opened(one: &SecretsKey, other: &SecretsKey) -> Result<Vec<u8>, SecretError> {
        let sealed = one.seal("ca", &SecretSlice::from(b"very secret".to_vec()))?;
        Ok(other.unseal("ca", &sealed)?.expose_secret().to_vec())
    }

    #[test]
    fn key_is_made_for_its_owner_alone_and_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets.key");
        let made = SecretsKey::open(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let found = SecretsKey::open(&path).unwrap();
        assert_eq!(sealed_is_opened(&made, &found).unwrap(), b"very secret");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(!format!("{made:?}").contains("AGE"));
    }

    #[test]
    fn unusable_key_is_rejected_with_an_explanation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secrets.key");
        let shown = path.display().to_string();
        let refusal = || SecretsKey::open(&path).unwrap_err().to_string().replace(&shown, "KEY");
        std::fs::write(&path, "not a key").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(
            refusal(),
            "the secrets key KEY can be read by other users (mode 0640); run: chmod 600 KEY"
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(refusal().starts_with("KEY holds no age key: it must have one line"), "{}", refusal());
        for (content, problem) in
            [(&[0xff, 0xfe][..], "it is UTF-16"), (&[b'x', 0xff], "it is not UTF-8 from byte 2")]
        {
            std::fs::write(&path, content).unwrap();
            let start = format!("the secrets key KEY cannot be read: {problem}");
            assert!(refusal().starts_with(&start), "{}", refusal());
        }
        let nowhere = SecretsKey::open(Path::new("/nonexistent/secrets.key")).unwrap_err().to_string();
        assert!(nowhere.starts_with("cannot make the secrets key /nonexistent/secrets.key: "), "{nowhere}");
    }

    #[test]
    fn another_key_opens_nothing_and_says_which_file() {
        let directory = tempfile::tempdir().unwrap();
        let open = |name: &str| SecretsKey::open(&directory.path().join(name)).unwrap();
        let error = sealed_is_opened(&open("one"), &open("two")).unwrap_err().to_string();
        assert!(error.contains("\"ca\"") && error.contains("two") && !error.contains("very"), "{error}");
    }
}
