//! A root filesystem of a service's own, and what runc is told to run in it.
//!
//! An archive is unpacked for each service that is made of it, in a directory that only root enters, and mounted
//! read-only: what runs there can change nothing of it, and nobody else's archive takes it away while it runs. The service
//! has the network and the names of the node, and of the rest its own: processes, mounts, host name. Its own directory is
//! `/service` in it, and its working directory. Files with absolute paths are mounted over what the archive has there.
//!
//! `runc run` stands for the service: signals go through it, and its end is that of the service. It makes a control
//! group of its own inside that of the service, so that limits hold for both and nothing outlives a kill. What is told to
//! runc follows the runtime specification of the Open Container Initiative, `config.md` and `config-linux.md` (1.0.2).

use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::model::declaration::Sha256;
use crate::roleserver::child::spec::{Limits, User};
use crate::roleserver::cluster::services::wanted::Rendered;
use crate::roleserver::connection::chain;

/// Where a service finds its own directory.
pub const OWN: &str = "/service";
/// What an archive may be when it is unpacked: one is a file of 256 MiB at the most, and may have holes.
const MOST_BYTES: u64 = 8 << 30;
/// Entries of an archive.
const MOST_ENTRIES: usize = 1_000_000;
/// Processes and threads of runc itself in the service's control group, in which what it starts is counted too: some
/// eight of whatever stands for the service, and twice as many while a look is taken at it.
const OWN_TASKS: u64 = 64;
/// Where distributions put it.
const PLACES: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
/// What root may do in there, of all that it may do elsewhere: what servers need that begin as root and then give it up.
const CAPABILITIES: [&str; 10] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];
/// Files of the node that say how names are found; where the archive has that directory.
const NAMES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// What a service with a root filesystem has beside its own directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle(pub PathBuf);

impl Bundle {
    /// What was unpacked.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.0.join("rootfs")
    }

    /// Files that are mounted into it, each by its path.
    #[must_use]
    pub fn files(&self) -> PathBuf {
        self.0.join("files")
    }

    /// Where runc keeps what it knows of it.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.0.join("state")
    }

    fn unpacked(&self) -> PathBuf {
        self.0.join("unpacked")
    }

    /// Has runc forget the service of that name, with the control groups that it made. Nothing of it may run. Blocks.
    ///
    /// What it remembers of one that was killed would keep the next from starting.
    pub fn forget(&self, name: &str) -> Result<(), Error> {
        if self.state().join(name).exists()
            && let Ok(runc) = runc()
        {
            let arguments = self.command(&["delete", "--force", name]);
            let done = Command::new(runc).args(arguments).stdin(Stdio::null()).output()?;
            if !done.status.success() {
                let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
                tracing::warn!(service = name, said, "runc could not clear up after a service");
            }
        }
        remove(&self.state())
    }

    /// Has what this archive holds in its place. Nothing of the service may run. Blocks.
    pub fn prepare(&self, archive: &Path, digest: Sha256) -> Result<(), Error> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let name = hex::encode(digest.0);
        if fs::read_to_string(self.unpacked()).is_ok_and(|unpacked| unpacked == name) {
            return Ok(());
        }
        // From here until it is written down again it is no archive's.
        match fs::remove_file(self.unpacked()) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        remove(&self.root())?;
        unpack(archive, &self.root())?;
        // Marked as whole only once it would be whole after a power cut as well.
        rustix::fs::sync();
        fs::write(self.unpacked(), name)?;
        File::open(self.unpacked())?.sync_all()
    }

    /// Writes down what runc is to do.
    pub fn configure(&self, config: &Value) -> Result<(), Error> {
        fs::write(self.0.join("config.json"), serde_json::to_vec_pretty(config)?)
    }

    /// What runc is started with to run it under that name.
    #[must_use]
    pub fn run(&self, name: &str) -> Vec<String> {
        self.command(&["run", "--bundle", &self.0.to_string_lossy(), name])
    }

    /// What runc is started with to run a program beside it, as that user.
    #[must_use]
    pub fn exec(&self, name: &str, user: User, command: &[String]) -> Vec<String> {
        let user = format!("{}:{}", user.uid, user.gid);
        let mut arguments = self.command(&["exec", "--user", &user, "--cwd", OWN, name]);
        arguments.extend(command.iter().cloned());
        arguments
    }

    fn command(&self, words: &[&str]) -> Vec<String> {
        let state = self.state().to_string_lossy().into_owned();
        ["--root".to_owned(), state].into_iter().chain(words.iter().map(|&word| word.to_owned())).collect()
    }
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The program; or why there is none, as a sentence.
pub fn runc() -> Result<PathBuf, String> {
    let found = PLACES.iter().map(|place| Path::new(place).join("runc")).find(|path| path.is_file());
    found.ok_or_else(|| {
        format!(
            "runc, which runs root filesystems, is not installed on this node: it is in none of {}",
            PLACES.join(", ")
        )
    })
}

/// The library says what it could not do, and has the reason behind it.
fn caused(error: &Error) -> Error {
    Error::new(error.kind(), chain(error))
}

/// The limits of a service with room for runc beside it.
#[must_use]
pub fn limits(of_the_service: Limits) -> Limits {
    Limits { tasks: of_the_service.tasks.map(|tasks| tasks.saturating_add(OWN_TASKS)), ..of_the_service }
}

/// Unpacks a tar archive into a new directory, with owners and permissions. What leads out of it is refused. Blocks.
pub fn unpack(archive: &Path, into: &Path) -> Result<(), Error> {
    let mut tar = tar::Archive::new(File::open(archive)?);
    tar.set_preserve_permissions(true);
    tar.set_preserve_ownerships(rustix::process::geteuid().is_root());
    tar.set_preserve_mtime(true);
    fs::DirBuilder::new().mode(0o755).create(into)?;
    let (mut bytes, mut entries) = (0_u64, 0_usize);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.display().to_string();
        bytes = bytes.saturating_add(entry.size());
        entries += 1;
        if bytes > MOST_BYTES || entries > MOST_ENTRIES {
            return Err(Error::other(format!(
                "the archive holds more than {} GiB or {MOST_ENTRIES} entries",
                MOST_BYTES >> 30
            )));
        }
        if !entry.unpack_in(into).map_err(|error| caused(&error))? {
            return Err(Error::new(ErrorKind::InvalidData, format!("{path:?} leads out of the archive")));
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

/// Where things are for a configuration.
#[derive(Clone, Debug)]
pub struct Around<'a> {
    /// The directory of the service.
    pub own: &'a Path,
    /// Its files with absolute paths: below [`Bundle::files`].
    pub files: &'a Path,
    /// Of these, the paths.
    pub mounted: &'a [String],
    /// Files of the node that it is to have too.
    pub of_the_node: &'a [&'static str],
    /// Its control group, as runc calls it.
    pub group: &'a str,
    /// Its name.
    pub name: &'a str,
}

/// Files of the node that a service is given: where the archive has their directory, and no declared file is there.
#[must_use]
pub fn of_the_node(root: &Path, declared: &[String]) -> Vec<&'static str> {
    let fits = |path: &&str| {
        root.join("etc").is_dir()
            && Path::new(path).exists()
            && !declared.iter().any(|declared| declared == path)
    };
    NAMES.into_iter().filter(|path| fits(path)).collect()
}

/// What runc is told (pure).
#[must_use]
pub fn config(rendered: &Rendered, program: &str, user: User, around: &Around<'_>) -> Value {
    let arguments: Vec<&str> =
        std::iter::once(program).chain(rendered.arguments.iter().map(String::as_str)).collect();
    let environment: Vec<String> =
        rendered.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let capabilities: &[&str] = if user.uid == 0 { &CAPABILITIES } else { &[] };
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({ "destination": destination, "type": kind, "source": kind, "options": options });
    let bind = |source: &Path, destination: &str, options: &[&str]| {
        let options: Vec<&str> = ["bind", "nosuid", "nodev"].iter().chain(options).copied().collect();
        json!({ "destination": destination, "type": "bind", "source": source, "options": options })
    };
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
        mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        mount("/tmp", "tmpfs", &["nosuid", "nodev", "mode=1777"]),
        mount("/run", "tmpfs", &["nosuid", "nodev", "mode=755"]),
        bind(around.own, OWN, &["rw"]),
    ];
    mounts.extend(around.of_the_node.iter().map(|path| bind(Path::new(path), path, &["ro"])));
    mounts.extend(
        around
            .mounted
            .iter()
            .map(|path| bind(&around.files.join(path.trim_start_matches('/')), path, &["ro"])),
    );
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": { "uid": user.uid, "gid": user.gid },
            "args": arguments,
            "env": environment,
            "cwd": OWN,
            "noNewPrivileges": true,
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
        },
        "root": { "path": "rootfs", "readonly": true },
        "hostname": around.name,
        "mounts": mounts,
        "linux": {
            "cgroupsPath": around.group,
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }],
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "maskedPaths": [
                "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug",
                "/proc/scsi",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeMap;

    use crate::model::declaration::Run;

    fn archive(entries: &[(&str, tar::EntryType, &str)]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut builder = tar::Builder::new(file.reopen().unwrap());
        for (path, kind, contents) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            header.set_uid(u64::from(rustix::process::getuid().as_raw()));
            header.set_gid(u64::from(rustix::process::getgid().as_raw()));
            // Also names that the library would not write.
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
        unpack(good.path(), &into).unwrap();
        assert_eq!(fs::read_to_string(into.join("bin/x")).unwrap(), "x");
        assert_eq!(fs::read_link(into.join("lib")).unwrap(), Path::new("/bin"));
        for (name, bad) in [
            ("above", archive(&[("../x", Regular, "x")])),
            ("link", archive(&[("out", Symlink, place.path().to_str().unwrap()), ("out/x", Regular, "x")])),
        ] {
            assert!(unpack(bad.path(), &place.path().join(name)).is_err(), "{name}");
        }
        assert!(!place.path().join("x").exists(), "something was written outside");
        let none = tempfile::NamedTempFile::new().unwrap();
        fs::write(none.path(), "no archive").unwrap();
        assert!(unpack(none.path(), &place.path().join("none")).is_err());
    }

    #[test]
    fn runc_is_not_counted_where_the_service_is() {
        let all = Limits { memory_bytes: Some(1), cpu_millis: Some(2), tasks: Some(20) };
        assert_eq!(limits(all), Limits { tasks: Some(20 + OWN_TASKS), ..all });
        assert_eq!(limits(Limits::default()), Limits::default(), "what is not limited stays so");
    }

    #[test]
    fn what_could_not_be_unpacked_is_said_with_its_cause() {
        let place = tempfile::tempdir().unwrap();
        let file = archive(&[("x", tar::EntryType::Regular, "x")]);
        let into = place.path().join("into");
        fs::create_dir_all(into.join("x/in-its-way")).unwrap();
        let mut tar = tar::Archive::new(file.reopen().unwrap());
        let mut entry = tar.entries().unwrap().next().unwrap().unwrap();
        let said = caused(&entry.unpack_in(&into).unwrap_err()).to_string();
        assert!(said.contains("failed to unpack") && said.contains("(os error"), "{said}");
    }

    #[test]
    fn archive_is_unpacked_once_and_anew_when_it_is_another_or_was_not_finished() {
        use tar::EntryType::Regular;
        let place = tempfile::tempdir().unwrap();
        let bundle = Bundle(place.path().join("bundle"));
        let (one, other) = (archive(&[("one", Regular, "1")]), archive(&[("other", Regular, "2")]));
        bundle.prepare(one.path(), Sha256([1; 32])).unwrap();
        fs::write(bundle.root().join("mark"), "").unwrap();
        fs::create_dir_all(bundle.state().join("x")).unwrap();
        bundle.forget("another").unwrap();
        bundle.prepare(one.path(), Sha256([1; 32])).unwrap();
        assert!(bundle.root().join("mark").exists(), "it was unpacked again");
        assert!(!bundle.state().exists(), "what runc remembered stays");
        bundle.prepare(other.path(), Sha256([2; 32])).unwrap();
        assert!(!bundle.root().join("one").exists() && bundle.root().join("other").exists());
        // Power went before it was marked as whole.
        fs::remove_file(bundle.unpacked()).unwrap();
        fs::write(bundle.root().join("mark"), "").unwrap();
        bundle.prepare(other.path(), Sha256([2; 32])).unwrap();
        assert!(!bundle.root().join("mark").exists(), "what may be half of it is taken for all of it");
    }

    #[test]
    fn what_runc_is_told() {
        let rendered = Rendered {
            run: Run::RootFilesystem { archive: Sha256([1; 32]), program: "/bin/server".to_owned() },
            arguments: vec!["--port".to_owned(), "80".to_owned()],
            environment: BTreeMap::from([("A".to_owned(), "b c".to_owned())]),
            files: Vec::new(),
            user: "1000".to_owned(),
        };
        let told = |uid| {
            let around = Around {
                own: Path::new("/own"),
                files: Path::new("/bundle/files"),
                mounted: &["/etc/app.conf".to_owned()],
                of_the_node: &["/etc/hosts"],
                group: "web_server",
                name: "web_server",
            };
            config(&rendered, "/bin/server", User { uid, gid: uid }, &around)
        };
        let plain = told(1000);
        assert_eq!(plain["process"]["args"], json!(["/bin/server", "--port", "80"]));
        assert_eq!(plain["process"]["env"], json!(["A=b c"]));
        assert_eq!(plain["process"]["user"], json!({ "uid": 1000, "gid": 1000 }));
        assert_eq!(plain["process"]["capabilities"]["bounding"], json!([]));
        assert_eq!(
            told(0)["process"]["capabilities"]["bounding"].as_array().unwrap().len(),
            CAPABILITIES.len()
        );
        assert_eq!((&plain["root"]["readonly"], &plain["process"]["cwd"]), (&json!(true), &json!(OWN)));
        let mounts = plain["mounts"].as_array().unwrap();
        let of = |destination: &str| {
            let found = mounts.iter().find(|mount| mount["destination"] == destination).unwrap();
            (found["source"].as_str().unwrap().to_owned(), found["options"].to_string())
        };
        assert_eq!(of(OWN).0, "/own");
        assert_eq!(of("/etc/app.conf").0, "/bundle/files/etc/app.conf");
        for read_only in ["/etc/app.conf", "/etc/hosts"] {
            assert!(of(read_only).1.contains("\"ro\""), "{read_only}");
        }
        let namespaces = plain["linux"]["namespaces"].to_string();
        assert!(namespaces.contains("pid") && !namespaces.contains("network"), "{namespaces}");
    }

    #[test]
    fn files_of_the_node_are_given_where_there_is_room_for_them() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(of_the_node(place.path(), &[]), [""; 0]);
        fs::create_dir(place.path().join("etc")).unwrap();
        let given = of_the_node(place.path(), &[]);
        assert!(given.contains(&"/etc/hosts"), "{given:?}");
        assert!(!of_the_node(place.path(), &["/etc/hosts".to_owned()]).contains(&"/etc/hosts"));
    }

    #[test]
    fn look_goes_through_runc_as_the_user_of_the_service() {
        let bundle = Bundle("/b".into());
        let said =
            bundle.exec("web_server", User { uid: 7, gid: 7 }, &["/bin/check".to_owned(), "-q".to_owned()]);
        let expected =
            ["--root", "/b/state", "exec", "--user", "7:7", "--cwd", OWN, "web_server", "/bin/check", "-q"];
        assert_eq!(said, expected);
        assert_eq!(bundle.run("x"), ["--root", "/b/state", "run", "--bundle", "/b", "x"]);
    }
}
