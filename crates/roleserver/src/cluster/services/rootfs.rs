//! Services in a root filesystem of their own: unpack the archive, call runc.
//!
//! An archive is unpacked for each service that uses it, in a directory that only root can enter, and mounted
//! read-only: the service cannot change it, and an archive of another service cannot replace it while the service runs.
//! The service shares the network and the name resolution of the node. It has its own processes, mounts and host name.
//! Its own directory is `/service` in the root filesystem, and is its working directory. Files with absolute paths are
//! mounted over those of the archive.
//!
//! `runc run` represents the service: signals go through it, and its exit is the exit of the service. It creates a
//! control group inside that of the service, so that limits apply to both and no process survives a kill.
//! [`oci_config`][super::oci_config] writes its configuration.

use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hardening::file_limit::UsualFileLimit as _;
use model::role_declaration::Sha256;
use serde_json::Value;

use crate::bounded_command::last_words;
use crate::child::spec::{ResourceLimits, User};
use crate::cluster::services::archive_entry::{EntryUse, decide_use};
use crate::connection::error_chain;

/// Where a service finds its own directory.
pub(super) const SERVICE_DIRECTORY: &str = "/service";
/// Largest unpacked size in bytes. An archive is a file of 256 MiB at most, but may have holes.
const MAX_BYTES: u64 = 8 << 30;
/// Maximum number of entries of an archive.
const MAX_ENTRIES: usize = 1_000_000;
/// Extra tasks for runc itself, which is counted in the service's control group: about eight for the container, and
/// twice as many while a probe runs.
const RUNC_TASKS: u64 = 64;
/// Directories in which distributions install runc.
const RUNC_DIRECTORIES: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
/// Files for name resolution that are mounted from the node, if the archive has their directory.
const HOST_FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// Directory with the OCI bundle of a service: root filesystem, files, configuration and state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OciBundle(pub PathBuf);

impl OciBundle {
    /// Directory of the unpacked root filesystem.
    #[must_use]
    pub fn rootfs_path(&self) -> PathBuf {
        self.0.join("rootfs")
    }

    /// Directory of the files that are mounted into the container, each below its path.
    #[must_use]
    pub fn files_path(&self) -> PathBuf {
        self.0.join("files")
    }

    /// Directory in which runc stores its state.
    #[must_use]
    pub fn state_path(&self) -> PathBuf {
        self.0.join("state")
    }

    fn marker_path(&self) -> PathBuf {
        self.0.join("unpacked")
    }

    /// Makes runc delete the container of that name, with the control groups that it created. None of its processes may
    /// run. Blocks.
    ///
    /// The state of a killed container would keep the next one from starting.
    pub fn delete_container(&self, name: &str) -> Result<(), Error> {
        if self.state_path().join(name).exists()
            && let Ok(runc) = find_runc()
        {
            let arguments = self.runc_arguments(&["delete", "--force", name]);
            let mut command = Command::new(runc);
            command.args(arguments).stdin(Stdio::null());
            let done = hardening::restore_core_limit(command.usual_file_limit()).output()?;
            if !done.status.success() {
                let text =
                    last_words(&done).map_or_else(|| done.status.to_string(), |words| words.to_string());
                tracing::warn!(service = name, text, "runc could not clear up after a service");
            }
        }
        remove_directory(&self.state_path())
    }

    /// Unpacks this archive as the root filesystem, unless it is unpacked already. The service may not run. Blocks.
    pub fn unpack_rootfs(&self, archive: &Path, digest: Sha256) -> Result<(), Error> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let name = hex::encode(digest.0);
        if fs::read_to_string(self.marker_path()).is_ok_and(|unpacked| unpacked == name) {
            return Ok(());
        }
        // Without the marker the root filesystem counts as incomplete.
        match fs::remove_file(self.marker_path()) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        remove_directory(&self.rootfs_path())?;
        unpack_archive(archive, &self.rootfs_path())?;
        // Mark it as complete only when it would survive a power cut.
        rustix::fs::sync();
        fs::write(self.marker_path(), name)?;
        File::open(self.marker_path())?.sync_all()
    }

    /// Writes the OCI configuration.
    pub fn write_config(&self, config: &Value) -> Result<(), Error> {
        fs::write(self.0.join("config.json"), serde_json::to_vec_pretty(config)?)
    }

    /// Arguments of runc that run the service as a container of that name.
    #[must_use]
    pub fn run_arguments(&self, name: &str) -> Vec<String> {
        self.runc_arguments(&["run", "--bundle", &self.0.to_string_lossy(), name])
    }

    /// Arguments of runc that run a command in the container, as that user.
    #[must_use]
    pub fn exec_arguments(&self, name: &str, user: User, command: &[String]) -> Vec<String> {
        let user = format!("{}:{}", user.uid, user.gid);
        let mut arguments = self.runc_arguments(&["exec", "--user", &user, "--cwd", SERVICE_DIRECTORY, name]);
        arguments.extend(command.iter().cloned());
        arguments
    }

    fn runc_arguments(&self, words: &[&str]) -> Vec<String> {
        let state = self.state_path().to_string_lossy().into_owned();
        ["--root".to_owned(), state].into_iter().chain(words.iter().map(|&word| word.to_owned())).collect()
    }
}

fn remove_directory(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Path of runc; the error is a sentence.
pub fn find_runc() -> Result<PathBuf, String> {
    let found =
        RUNC_DIRECTORIES.iter().map(|place| Path::new(place).join("runc")).find(|path| path.is_file());
    found.ok_or_else(|| {
        format!(
            "runc, which runs root filesystems, is not installed on this node: it is in none of {}",
            RUNC_DIRECTORIES.join(", ")
        )
    })
}

/// An error with its causes in the text, because the library's own text lacks them.
fn with_cause(error: &Error) -> Error {
    Error::new(error.kind(), error_chain(error))
}

/// The limits of a service plus the tasks of runc.
#[must_use]
pub fn limits_with_runc(of_the_service: ResourceLimits) -> ResourceLimits {
    ResourceLimits {
        tasks: of_the_service.tasks.map(|tasks| tasks.saturating_add(RUNC_TASKS)),
        ..of_the_service
    }
}

/// Unpacks a tar archive into a new directory, with owners and permissions. An entry that leads out of it, and one that
/// cannot be unpacked as it was packed, is an error.
/// Blocks.
fn unpack_archive(archive: &Path, into: &Path) -> Result<(), Error> {
    let mut tar = tar::Archive::new(File::open(archive)?);
    tar.set_preserve_permissions(true);
    tar.set_preserve_ownerships(rustix::process::geteuid().is_root());
    tar.set_preserve_mtime(true);
    fs::DirBuilder::new().mode(0o755).create(into)?;
    let (mut bytes, mut entries) = (0_u64, 0_usize);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.to_string_lossy();
        let keys = list_extensions(&mut entry).map_err(|error| {
            Error::new(
                ErrorKind::InvalidData,
                format!("the extended header of {name:?} cannot be read: {error}"),
            )
        })?;
        bytes = bytes.saturating_add(entry.size());
        entries += 1;
        if bytes > MAX_BYTES || entries > MAX_ENTRIES {
            return Err(Error::other(format!(
                "the archive holds more than {} GiB or {MAX_ENTRIES} entries",
                MAX_BYTES >> 30
            )));
        }
        match decide_use(&path, entry.header().entry_type(), &keys) {
            Ok(EntryUse::Unpack) => {}
            Ok(EntryUse::LeaveOut) => continue,
            Err(reason) => return Err(Error::new(ErrorKind::InvalidData, reason)),
        }
        if !entry.unpack_in(into).map_err(|error| with_cause(&error))? {
            return Err(Error::new(ErrorKind::InvalidData, format!("{name:?} leads out of the archive")));
        }
    }
    if entries == 0 {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "it is no tar archive, or an empty one; it must not be compressed",
        ));
    }
    Ok(())
}

/// The keys of an entry's extended header.
fn list_extensions(entry: &mut tar::Entry<'_, File>) -> Result<Vec<String>, Error> {
    let mut keys = Vec::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        keys.push(String::from_utf8_lossy(extension?.key_bytes()).into_owned());
    }
    Ok(keys)
}

/// Files of the node to mount: only if the archive has their directory and no declared file has their path.
#[must_use]
pub fn find_host_files(root: &Path, declared: &[String]) -> Vec<&'static str> {
    let fits = |path: &&str| {
        root.join("etc").is_dir()
            && Path::new(path).exists()
            && !declared.iter().any(|declared| declared == path)
    };
    HOST_FILES.into_iter().filter(|path| fits(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, &str)]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut builder = tar::Builder::new(file.reopen().unwrap());
        for (path, kind, contents) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            header.set_uid(u64::from(rustix::process::getuid().as_raw()));
            header.set_gid(u64::from(rustix::process::getgid().as_raw()));
            // Set directly, because the library would not write some of these names.
            header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
            let data = if *kind == tar::EntryType::Regular {
                contents.as_bytes()
            } else {
                header.set_link_name(contents).unwrap_or_default();
                b""
            };
            header.set_size(data.len() as u64);
            header.set_cksum();
            builder.append(&header, data).unwrap();
        }
        builder.finish().unwrap();
        file
    }

    #[test]
    fn what_leads_out_of_an_archive_is_refused() {
        use tar::EntryType::{Directory, Regular, Symlink};
        let place = tempfile::tempdir().unwrap();
        let good = archive(&[("bin", Directory, ""), ("bin/x", Regular, "x"), ("lib", Symlink, "/bin")]);
        let into = place.path().join("good");
        unpack_archive(good.path(), &into).unwrap();
        assert_eq!(fs::read_to_string(into.join("bin/x")).unwrap(), "x");
        assert_eq!(fs::read_link(into.join("lib")).unwrap(), Path::new("/bin"));
        for (name, bad) in [
            ("above", archive(&[("../x", Regular, "x")])),
            ("link", archive(&[("out", Symlink, place.path().to_str().unwrap()), ("out/x", Regular, "x")])),
        ] {
            assert!(unpack_archive(bad.path(), &place.path().join(name)).is_err(), "{name}");
        }
        assert!(!place.path().join("x").exists(), "something was written outside");
        let none = tempfile::NamedTempFile::new().unwrap();
        fs::write(none.path(), "no archive").unwrap();
        assert!(unpack_archive(none.path(), &place.path().join("none")).is_err());
    }

    #[test]
    fn runc_does_not_count_against_the_limits_of_the_service() {
        let all = ResourceLimits { memory_bytes: Some(1), cpu_millis: Some(2), tasks: Some(20) };
        assert_eq!(limits_with_runc(all), ResourceLimits { tasks: Some(20 + RUNC_TASKS), ..all });
        assert_eq!(
            limits_with_runc(ResourceLimits::default()),
            ResourceLimits::default(),
            "what is not limited stays so"
        );
    }

    #[test]
    fn unpack_error_includes_its_cause() {
        let place = tempfile::tempdir().unwrap();
        let file = archive(&[("x", tar::EntryType::Regular, "x")]);
        let into = place.path().join("into");
        fs::create_dir_all(into.join("x/in-its-way")).unwrap();
        let mut tar = tar::Archive::new(file.reopen().unwrap());
        let mut entry = tar.entries().unwrap().next().unwrap().unwrap();
        let text = with_cause(&entry.unpack_in(&into).unwrap_err()).to_string();
        assert!(text.contains("failed to unpack") && text.contains("(os error"), "{text}");
    }

    #[test]
    fn archive_is_unpacked_once_and_again_when_changed_or_unfinished() {
        use tar::EntryType::Regular;
        let place = tempfile::tempdir().unwrap();
        let bundle = OciBundle(place.path().join("bundle"));
        let (one, other) = (archive(&[("one", Regular, "1")]), archive(&[("other", Regular, "2")]));
        bundle.unpack_rootfs(one.path(), Sha256([1; 32])).unwrap();
        fs::write(bundle.rootfs_path().join("mark"), "").unwrap();
        fs::create_dir_all(bundle.state_path().join("x")).unwrap();
        bundle.delete_container("another").unwrap();
        bundle.unpack_rootfs(one.path(), Sha256([1; 32])).unwrap();
        assert!(bundle.rootfs_path().join("mark").exists(), "it was unpacked again");
        assert!(!bundle.state_path().exists(), "what runc remembered stays");
        bundle.unpack_rootfs(other.path(), Sha256([2; 32])).unwrap();
        assert!(!bundle.rootfs_path().join("one").exists() && bundle.rootfs_path().join("other").exists());
        // A power cut came before it was marked as complete.
        fs::remove_file(bundle.marker_path()).unwrap();
        fs::write(bundle.rootfs_path().join("mark"), "").unwrap();
        bundle.unpack_rootfs(other.path(), Sha256([2; 32])).unwrap();
        assert!(!bundle.rootfs_path().join("mark").exists(), "what may be half of it is taken for all of it");
    }

    #[test]
    fn host_files_are_mounted_where_the_archive_has_etc() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(find_host_files(place.path(), &[]), [""; 0]);
        fs::create_dir(place.path().join("etc")).unwrap();
        let given = find_host_files(place.path(), &[]);
        assert!(given.contains(&"/etc/hosts"), "{given:?}");
        assert!(!find_host_files(place.path(), &["/etc/hosts".to_owned()]).contains(&"/etc/hosts"));
    }

    #[test]
    fn probe_runs_through_runc_as_the_user_of_the_service() {
        let bundle = OciBundle("/b".into());
        let messages = bundle.exec_arguments(
            "web_server",
            User { uid: 7, gid: 7 },
            &["/bin/check".to_owned(), "-q".to_owned()],
        );
        let expected = [
            "--root",
            "/b/state",
            "exec",
            "--user",
            "7:7",
            "--cwd",
            SERVICE_DIRECTORY,
            "web_server",
            "/bin/check",
            "-q",
        ];
        assert_eq!(messages, expected);
        assert_eq!(bundle.run_arguments("x"), ["--root", "/b/state", "run", "--bundle", "/b", "x"]);
    }
}
