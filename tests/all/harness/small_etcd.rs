//! The etcd of the tests with a small quota, and what fills it.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;
use shepherd::roleserver::cluster::files::ClusterFiles;

use crate::harness::etcd_program::{etcd_program, search_path};
use crate::harness::etcd_servers::until;

/// Size of the database file from which it accepts no writes, in bytes.
pub(crate) const QUOTA: u64 = 16 << 20;
/// Bytes of each value that fills it.
const VALUE_BYTES: usize = 1 << 16;
/// More values than the quota has room for.
const MAX_VALUES: usize = 3200;

/// A program `etcd` that runs that of the tests with [`QUOTA`]. It ends with this value.
pub(crate) struct SmallEtcd {
    place: tempfile::TempDir,
}

impl SmallEtcd {
    pub(crate) fn new() -> Result<Self> {
        let (place, real) = (tempfile::tempdir()?, etcd_program()?);
        let real = real.display();
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec {real} --version\nexec {real} --quota-backend-bytes {QUOTA} \"$@\"\n"
        );
        let small = Self { place };
        std::fs::write(small.path(), script)?;
        std::fs::set_permissions(small.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(small)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.place.path().join("etcd")
    }

    /// The search path of a program that looks for `etcd` itself.
    pub(crate) fn search_path(&self) -> Result<OsString> {
        let own = search_path().or_else(|| std::env::var_os("PATH")).context("no search path")?;
        let directories = [self.place.path().to_owned()].into_iter().chain(std::env::split_paths(&own));
        Ok(std::env::join_paths(directories)?)
    }
}

/// A client of the etcd of a node, in a namespace that nobody else uses.
pub(crate) fn filler_of(files: &ClusterFiles) -> Result<Client> {
    Ok(Client::new(vec![client_endpoint(files)], Namespace::new("filler")?))
}

/// Writes a value until etcd has answered; whether it had space. A member that is defragmented answers nothing meanwhile,
/// and a write that is repeated only takes more of the quota.
pub(crate) async fn write(client: &Client, key: &str, value: &[u8]) -> Result<bool> {
    let mut had_space = false;
    until("etcd answers a write", async || match client.put_unguarded(key, value).await {
        Ok(_) => {
            had_space = true;
            Ok(true)
        }
        Err(EtcdError::Deadline { .. } | EtcdError::Unavailable { .. }) => Ok(false),
        Err(error) => {
            let text = error.to_string();
            ensure!(text.contains("database space exceeded"), "{text}");
            Ok(true)
        }
    })
    .await?;
    Ok(had_space)
}

/// Writes one key until etcd accepts no writes.
pub(crate) async fn fill(client: &Client) -> Result<()> {
    let value = vec![b'v'; VALUE_BYTES];
    for _ in 0..MAX_VALUES {
        if !write(client, "/filler", &value).await? {
            return Ok(());
        }
    }
    bail!("etcd accepted 200 MiB");
}

/// Writes one key until the database file of the member has so many bytes.
pub(crate) async fn fill_to(client: &Client, bytes: u64) -> Result<()> {
    let value = vec![b'v'; VALUE_BYTES];
    for _ in 0..MAX_VALUES {
        if client.database_status().await?.file_bytes >= bytes {
            return Ok(());
        }
        ensure!(write(client, "/filler", &value).await?, "etcd is full before its file has {bytes} bytes");
    }
    bail!("the file of etcd does not grow");
}

/// Writes once so much that a member with a full file raises the alarm. Not every version is defragmented before that.
pub(crate) async fn write_to_the_quota(client: &Client) -> Result<()> {
    write(client, "/large", &vec![b'v'; 1 << 20]).await?;
    Ok(())
}

/// Waits until an etcd has no alarm and accepts a write.
pub(crate) async fn until_it_accepts_writes(client: &Client) -> Result<()> {
    until("etcd has no alarm and accepts writes", async || {
        let quiet = client.database_status().await.is_ok_and(|status| !status.has_alarm);
        Ok(quiet && client.put_unguarded("/small", b"one").await.is_ok())
    })
    .await
}
