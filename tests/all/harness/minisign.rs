//! `minisign`, with which people sign releases.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// A key pair without a password, in a directory of its own.
pub(crate) struct Signer(tempfile::TempDir);

impl Signer {
    pub(crate) fn new() -> Result<Self> {
        let signer = Self(tempfile::tempdir()?);
        let (public, secret) = (signer.path("key.pub"), signer.path("key"));
        minisign(&["-G", "-W", "-p"], &[&public, Path::new("-s"), &secret])?;
        Ok(signer)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// The file of the public key, as minisign wrote it.
    pub(crate) fn public_file(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.path("key.pub"))?)
    }

    /// The line of the public key.
    pub(crate) fn public_key(&self) -> Result<String> {
        Ok(self.public_file()?.lines().nth(1).context("no key")?.to_owned())
    }

    /// Signs a file with this content and trusted comment; returns the content of the signature's file.
    pub(crate) fn sign(&self, content: &[u8], comment: &str) -> Result<String> {
        let (file, signature) = (self.path("file"), self.path("file.minisig"));
        std::fs::write(&file, content)?;
        let flags = ["-S", "-H", "-t", comment, "-s"];
        let x = Path::new("-x");
        minisign(&flags, &[&self.path("key"), x, &signature, Path::new("-m"), &file])?;
        Ok(std::fs::read_to_string(signature)?)
    }
}

/// The trusted comment of a release of the role server for this machine.
pub(crate) fn release_comment(version: &str, minimum: &str) -> String {
    let architecture = std::env::consts::ARCH;
    format!(
        "shepherd kind=release name=roleserver version={version} architecture={architecture} minimum-version={minimum}"
    )
}

fn minisign(flags: &[&str], paths: &[&Path]) -> Result<()> {
    let output = Command::new("minisign")
        .args(flags)
        .args(paths)
        .stdin(Stdio::null())
        .output()
        .context("minisign is missing; install it with `tools/need minisign`")?;
    let printed = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "minisign {flags:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&printed)
    );
    Ok(())
}
