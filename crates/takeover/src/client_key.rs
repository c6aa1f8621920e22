//! The SSH client key: load or create.
//!
//! The shepherd logs in with it (`--ssh_key_path`). It is an Ed25519 or ECDSA key in OpenSSH's format, without a pass
//! phrase, so that `ssh -i` can use the same file. If it is absent an Ed25519 key is created, once, even when several
//! shepherds start at the same time on one disk: the new key is written beside its path and moved there by a hard link.
//! The link fails if another shepherd was faster; that one's key is then read. A key that others can read or write is
//! rejected, as OpenSSH rejects it, because its reader can be root on every machine.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::text_file::skip_mark;
use russh::keys::ssh_key::LineEnding;
use russh::keys::{Algorithm, PrivateKey};
use trusted_file::private_file::{PrivateFileError, read_private_file};

/// A loaded private key. Cheap to clone; its debug text never has the secret half.
#[derive(Clone)]
pub struct ClientKey(Arc<PrivateKey>);

/// Why the key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientKeyError {
    /// The file cannot be read, or other users can read or write it.
    #[error(transparent)]
    File(#[from] PrivateFileError),
    /// A new key cannot be saved.
    #[error("cannot save a new SSH key as {}: {source}; make its directory, or name another place by --ssh_key_path", path.display())]
    Save {
        /// The path of the new key file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The path does not end in a name.
    #[error("{} is no path of a file; name another place by --ssh_key_path", path.display())]
    NoFileName {
        /// The path of the new key file.
        path: PathBuf,
    },
    /// The file is not a private key in OpenSSH's format.
    #[error("{} is not a private key in OpenSSH's format; name an Ed25519 key, or a file that does not exist to have one made", path.display())]
    NotAKey {
        /// The path of the file.
        path: PathBuf,
    },
    /// The key is encrypted with a pass phrase.
    #[error("the SSH key {} is encrypted, and a service cannot type a pass phrase; name an unencrypted Ed25519 key of its own", path.display())]
    Encrypted {
        /// The path of the key file.
        path: PathBuf,
    },
    /// The key is of a kind that this program does not sign with.
    #[error("the SSH key {} is of kind {algorithm}; name an Ed25519 or ECDSA key", path.display())]
    UnsupportedKind {
        /// The path of the key file.
        path: PathBuf,
        /// The name of the key's algorithm.
        algorithm: String,
    },
    /// Generating a key failed.
    #[error("cannot make an SSH key: {reason}")]
    Generate {
        /// The error of the SSH library.
        reason: String,
    },
}

impl ClientKey {
    /// Reads the key at `path`, or creates one if the file does not exist.
    ///
    /// Blocks on the disk; meant for program start.
    pub fn load_or_create(path: &Path) -> Result<Self, ClientKeyError> {
        match Self::load(path) {
            Err(ClientKeyError::File(error)) if error.is_not_found() => {
                create_key_file(path)?;
                Self::load(path)
            }
            other => other,
        }
    }

    /// Reads the key at `path`.
    pub fn load(path: &Path) -> Result<Self, ClientKeyError> {
        let path_buf = || path.to_owned();
        let content = read_private_file("the SSH key", path)?;
        let text = skip_mark(&content).map_err(|error| PrivateFileError::Read {
            what: "the SSH key",
            path: path_buf(),
            source: io::Error::new(io::ErrorKind::InvalidData, error),
        })?;
        let key = PrivateKey::from_openssh(text).map_err(|_| ClientKeyError::NotAKey { path: path_buf() })?;
        if key.is_encrypted() {
            return Err(ClientKeyError::Encrypted { path: path_buf() });
        }
        match key.algorithm() {
            Algorithm::Ed25519 | Algorithm::Ecdsa { .. } => Ok(Self(Arc::new(key))),
            other => Err(ClientKeyError::UnsupportedKind { path: path_buf(), algorithm: other.to_string() }),
        }
    }

    /// Generates a key without saving it.
    pub fn generate() -> Result<Self, ClientKeyError> {
        let mut key = PrivateKey::random(&mut russh::keys::key::safe_rng(), Algorithm::Ed25519)
            .map_err(|error| ClientKeyError::Generate { reason: error.to_string() })?;
        key.set_comment("shepherd");
        Ok(Self(Arc::new(key)))
    }

    /// The public half as a line for `authorized_keys`.
    #[must_use]
    pub fn authorized_keys_line(&self) -> String {
        self.0.public_key().to_openssh().unwrap_or_default()
    }

    /// The private key, for the one place that signs with it.
    pub(super) fn private_key(&self) -> Arc<PrivateKey> {
        Arc::clone(&self.0)
    }
}

impl fmt::Debug for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientKey({})", self.0.fingerprint(russh::keys::HashAlg::Sha256))
    }
}

/// Creates a key at `path`, unless another process has created one meanwhile.
fn create_key_file(path: &Path) -> Result<(), ClientKeyError> {
    let save_error = |source| ClientKeyError::Save { path: path.to_owned(), source };
    let text = ClientKey::generate()?
        .0
        .to_openssh(LineEnding::LF)
        .map_err(|error| ClientKeyError::Generate { reason: error.to_string() })?;

    let name = path.file_name().ok_or_else(|| ClientKeyError::NoFileName { path: path.to_owned() })?;
    let mut temporary_name = name.to_owned();
    temporary_name.push(format!(".new.{}", uuid::Uuid::new_v4().simple()));
    let temporary = path.with_file_name(temporary_name);

    let written = write_private_file(&temporary, text.as_bytes()).and_then(|()| {
        match fs::hard_link(&temporary, path) {
            // Another process was faster: its key is as good, and may be in use already.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    });
    let removed = fs::remove_file(&temporary);
    written.map_err(save_error)?;
    removed.map_err(save_error)?;
    sync_directory(path).map_err(save_error)
}

fn write_private_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// A key whose public half may be in use must not be lost in a power cut.
fn sync_directory(of: &Path) -> io::Result<()> {
    let directory = match of.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn missing_key_is_created_once_with_mode_0600() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssh_key");
        let lines: Vec<String> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| ClientKey::load_or_create(&path).unwrap().authorized_keys_line()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");

        let output = Command::new("ssh-keygen").arg("-y").arg("-f").arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), lines[0]);
    }

    #[test]
    fn mark_before_a_key_is_passed_over_and_utf16_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssh_key");
        let line = ClientKey::load_or_create(&path).unwrap().authorized_keys_line();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("\u{feff}{text}")).unwrap();
        assert_eq!(ClientKey::load(&path).unwrap().authorized_keys_line(), line);
        let utf16: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        fs::write(&path, utf16).unwrap();
        let error = ClientKey::load(&path).unwrap_err().to_string();
        assert!(error.contains("cannot be read: it is UTF-16"), "{error}");
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ssh_key");
        ClientKey::load_or_create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error =
            ClientKey::load_or_create(&path).unwrap_err().to_string().replace(path.to_str().unwrap(), "KEY");
        insta::assert_snapshot!(error, @"the SSH key KEY can be read by other users (mode 0640); run: chmod 600 KEY");
    }

    #[test]
    fn unusable_key_is_rejected_with_a_reason() {
        let directory = tempfile::tempdir().unwrap();
        let refuse = |name: &str| {
            let path = directory.path().join(name);
            ClientKey::load_or_create(&path)
                .unwrap_err()
                .to_string()
                .replace(directory.path().to_str().unwrap(), "DIR")
        };
        write_private_file(&directory.path().join("text"), b"hello").unwrap();
        insta::assert_snapshot!(refuse("text"), @"DIR/text is not a private key in OpenSSH's format; name an Ed25519 key, or a file that does not exist to have one made");

        for (name, kind, phrase) in [("encrypted", "ed25519", "secret"), ("rsa", "rsa", "")] {
            let status = Command::new("ssh-keygen")
                .args(["-q", "-t", kind, "-N", phrase, "-f"])
                .arg(directory.path().join(name))
                .status()
                .unwrap();
            assert!(status.success());
        }
        insta::assert_snapshot!(refuse("encrypted"), @"the SSH key DIR/encrypted is encrypted, and a service cannot type a pass phrase; name an unencrypted Ed25519 key of its own");
        insta::assert_snapshot!(refuse("rsa"), @"the SSH key DIR/rsa is of kind ssh-rsa; name an Ed25519 or ECDSA key");
        fs::create_dir(directory.path().join("directory")).unwrap();
        insta::assert_snapshot!(refuse("directory"), @"the SSH key DIR/directory is not a regular file");
        insta::assert_snapshot!(refuse("absent/key"), @"cannot save a new SSH key as DIR/absent/key: No such file or directory (os error 2); make its directory, or name another place by --ssh_key_path");
    }

    #[test]
    fn debug_output_does_not_leak_the_private_key() {
        let key = ClientKey::generate().unwrap();
        assert!(format!("{key:?}").starts_with("ClientKey(SHA256:"));
    }
}
