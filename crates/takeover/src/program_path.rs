//! Where the role server goes on a machine, and why (pure).
//!
//! The operator may give the path. Otherwise a user that is not root keeps the program in its home, and for root the
//! first suitable directory of a short list is chosen: it belongs to root and nobody else can write to it, its file
//! system executes programs, can be written and survives a reboot. The home of root was the only choice before, and it
//! is what is left where no directory of the list is suitable. Under `SELinux` systemd may not start what lies there
//! (203/EXEC), because `/root` and `/home` have the label of homes. Directories called `bin` below `/usr` and `/opt`
//! have the label of programs in the usual policies, which is why the list has such.
//!
//! A program that an earlier release put into the home of root stays there unless `SELinux` enforces: a takeover should
//! not move what runs.
//!
//! A place at which other users can change the program is passed over, the home included. Whether they can is only known
//! after a probe of that place, so the choice is made again with each place that a probe found unsafe.

use model::remote_step::DEFAULT_AGENT_PATH;

use crate::agent_binary::AgentBinary;
use crate::steps::ProbeReport;

/// Name of the program in a directory of the list.
const PROGRAM: &str = "roleserver";
/// File systems that are empty after a reboot.
const VOLATILE: [&str; 3] = ["tmpfs", "ramfs", "rootfs"];

/// Where the operator wants the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPath {
    /// At this path; relative to the home of the SSH user.
    Given(String),
    /// At the best place of each machine.
    Chosen,
}

impl TargetPath {
    /// The path to probe first.
    #[must_use]
    pub fn first_path(&self) -> &str {
        match self {
            Self::Given(path) => path,
            Self::Chosen => DEFAULT_AGENT_PATH,
        }
    }
}

impl From<String> for TargetPath {
    fn from(path: String) -> Self {
        Self::Given(path)
    }
}

impl From<&str> for TargetPath {
    fn from(path: &str) -> Self {
        Self::Given(path.to_owned())
    }
}

/// A directory that may get the program: the nearest directory above it that exists, and that one's mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceFacts {
    /// The directory, which need not exist.
    pub directory: String,
    /// Type and permissions of the nearest one that exists, as `ls -l` prints them.
    pub mode: String,
    /// The user that it belongs to.
    pub uid: u32,
    /// Where its file system is mounted.
    pub mount_point: String,
    /// The type of the file system.
    pub file_system: String,
    /// Options of the mount, separated by commas.
    pub options: String,
}

impl PlaceFacts {
    /// Parses a line of the probe: mode, uid, mount point, type, options, directory.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let mut next = || fields.next().filter(|field| !field.is_empty()).map(str::to_owned);
        Some(Self {
            mode: next()?,
            uid: next()?.parse().ok()?,
            mount_point: next()?,
            file_system: next()?,
            options: next()?,
            directory: next()?,
        })
    }

    fn has_option(&self, name: &str) -> bool {
        self.options.split(',').any(|option| option == name)
    }

    /// How the mount prevents a program from being written or executed, as a sentence.
    #[must_use]
    pub fn mount_obstacle(&self) -> Option<String> {
        let obstacle = if self.has_option("noexec") {
            "noexec"
        } else if self.has_option("ro") {
            "read-only"
        } else {
            return None;
        };
        Some(format!("{} is mounted {obstacle}", self.mount_point))
    }

    /// Why the directory is not suitable for a program of root; `None` if it is.
    fn refusal(&self) -> Option<String> {
        // `drwxrwxrwx`: who besides the owner may write.
        let writes = |at: usize| self.mode.as_bytes().get(at) != Some(&b'-');
        if self.uid != 0 {
            Some(format!("it belongs to user {}", self.uid))
        } else if writes(5) || writes(8) {
            Some(format!("others than root may write there ({})", self.mode))
        } else if VOLATILE.contains(&self.file_system.as_str()) {
            Some(format!("{} is a {}, which a reboot empties", self.mount_point, self.file_system))
        } else {
            self.mount_obstacle()
        }
    }
}

/// The chosen path, and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramPath {
    /// The path; relative to the home of the SSH user.
    pub path: String,
    /// The reason, as the end of a sentence.
    pub reason: String,
}

impl ProgramPath {
    /// Path and reason as a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("its role server is at {}, because {}", self.path, self.reason)
    }
}

/// A path that a probe found unsafe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsafePath {
    /// The path.
    pub path: String,
    /// Why other users of the machine can change the program there.
    pub reason: String,
}

/// Chooses the path from a probe of [`TargetPath::first_path`], and passes over those that a probe found unsafe. The error
/// is the reason for which no path is left.
pub fn choose_program_path(
    target: &TargetPath,
    probe: &ProbeReport,
    agent: &AgentBinary,
    unsafe_paths: &[UnsafePath],
) -> Result<ProgramPath, String> {
    let at = |path: &str, reason: String| Ok(ProgramPath { path: path.to_owned(), reason });
    let unsafe_reason =
        |path: &str| unsafe_paths.iter().find(|other| other.path == path).map(|other| other.reason.clone());
    if let TargetPath::Given(path) = target {
        return match unsafe_reason(path) {
            None => at(path, "--agent_target_path says so".to_owned()),
            Some(reason) => Err(reason),
        };
    }
    let home_reason = unsafe_reason(DEFAULT_AGENT_PATH);
    if probe.uid.is_some_and(|uid| uid != 0) {
        return match home_reason {
            None => at(
                DEFAULT_AGENT_PATH,
                format!("{} is not root, and has its programs in its home", probe.user),
            ),
            Some(reason) => Err(reason),
        };
    }
    let is_installed = probe.digest.as_deref().is_some_and(|digest| agent.accepts_digest(digest));
    if is_installed && !probe.selinux_enforces && home_reason.is_none() {
        return at(DEFAULT_AGENT_PATH, "it was installed there before".to_owned());
    }
    // Of the home, only that it is not safe counts as a refusal: it is the last choice otherwise.
    let mut refusals: Vec<_> =
        home_reason.iter().map(|reason| format!("{DEFAULT_AGENT_PATH}: {reason}")).collect();
    for place in &probe.places {
        let path = format!("{}/{PROGRAM}", place.directory);
        if let Some(refusal) = place.refusal().or_else(|| unsafe_reason(&path)) {
            refusals.push(format!("{}: {refusal}", place.directory));
            continue;
        }
        let others = match refusals.as_slice() {
            [] => String::new(),
            refusals => format!(" (not at {})", refusals.join("; ")),
        };
        let reason = format!(
            "it belongs to root, and {} ({}) keeps and executes programs{others}",
            place.mount_point, place.file_system
        );
        return at(&path, reason);
    }
    if home_reason.is_some() {
        return Err(format!("no place is suitable ({})", refusals.join("; ")));
    }
    let mut reason = match refusals.as_slice() {
        [] => "the machine reported no other place".to_owned(),
        refusals => format!("no other place is suitable ({})", refusals.join("; ")),
    };
    if probe.selinux_enforces {
        reason.push_str("; SELinux may keep systemd from starting a program in a home (203/EXEC)");
    }
    at(DEFAULT_AGENT_PATH, reason)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::path::Path;

    use super::*;
    use crate::scripts::PROBE_SCRIPT;
    use crate::steps::parse_probe;
    use crate::steps::tests::run;
    use model::remote_step::RemoteStep;

    fn place(line: &str) -> PlaceFacts {
        PlaceFacts::parse(line).unwrap()
    }

    fn probe(uid: u32, selinux_enforces: bool, digest: Option<&str>, places: &[&str]) -> ProbeReport {
        ProbeReport {
            os: "Linux".to_owned(),
            architecture: "x86_64".to_owned(),
            user: if uid == 0 { "root" } else { "kim" }.to_owned(),
            home: "/home".to_owned(),
            has_digest_program: true,
            digest: digest.map(str::to_owned),
            uid: Some(uid),
            selinux_enforces,
            unsafe_reason: None,
            target: None,
            places: places.iter().map(|line| place(line)).collect(),
        }
    }

    #[test]
    fn first_suitable_place_is_chosen_and_explained() {
        let agent = AgentBinary::from_content(std::fs::read("/bin/sh").unwrap().into()).unwrap();
        let installed = Some(agent.sha256());
        let (usr, opt) = ("/usr/local/lib/shepherd/bin", "/opt/shepherd/bin");
        let line =
            |mode: &str, uid: u32, mount: &str, directory: &str| format!("{mode} {uid} {mount} {directory}");
        let good = |directory: &str| line("drwxr-xr-x", 0, "/ ext4 rw,relatime", directory);
        let (usr_path, opt_path) = (format!("{usr}/roleserver"), format!("{opt}/roleserver"));
        let home = DEFAULT_AGENT_PATH;
        for (name, probe, path, reason) in [
            (
                "all are good",
                probe(0, false, None, &[&good(usr), &good(opt)]),
                usr_path.as_str(),
                "it belongs to root, and / (ext4) keeps",
            ),
            ("SELinux", probe(0, true, installed, &[&good(usr)]), &usr_path, "it belongs to root"),
            (
                "installed before",
                probe(0, false, installed, &[&good(usr)]),
                home,
                "it was installed there before",
            ),
            (
                "another release in the home",
                probe(0, false, Some("ab"), &[&good(usr)]),
                &usr_path,
                "it belongs to root",
            ),
            ("not root", probe(7, true, None, &[&good(usr)]), home, "kim is not root"),
            (
                "writable by a group",
                probe(0, false, None, &[&line("drwxrwsr-x", 0, "/ ext4 rw", usr), &good(opt)]),
                &opt_path,
                "(not at /usr/local/lib/shepherd/bin: others than root may write there (drwxrwsr-x))",
            ),
            (
                "read-only",
                probe(0, false, None, &[&line("drwxr-xr-x", 0, "/usr ext4 ro,nodev", usr), &good(opt)]),
                &opt_path,
                "/usr is mounted read-only",
            ),
            (
                "noexec, volatile",
                probe(
                    0,
                    true,
                    None,
                    &[
                        &line("drwxr-xr-x", 0, "/usr/local ext4 rw,noexec", usr),
                        &line("drwxr-xr-x", 0, "/opt tmpfs rw", opt),
                    ],
                ),
                home,
                "/usr/local is mounted noexec; /opt/shepherd/bin: /opt is a tmpfs, which a reboot empties); SELinux may",
            ),
            (
                "of another user",
                probe(0, false, None, &[&line("drwxr-xr-x", 1000, "/ ext4 rw", usr)]),
                home,
                "it belongs to user 1000",
            ),
            ("a machine that reports no places", probe(0, false, None, &[]), home, "reported no other place"),
        ] {
            let chosen = choose_program_path(&TargetPath::Chosen, &probe, &agent, &[]).unwrap();
            assert_eq!(chosen.path, path, "{name}");
            assert!(chosen.reason.contains(reason), "{name}: {}", chosen.reason);
            let given = choose_program_path(&"/given".into(), &probe, &agent, &[]).unwrap();
            assert_eq!(
                (given.path.as_str(), given.reason.as_str()),
                ("/given", "--agent_target_path says so")
            );
        }
    }

    #[test]
    fn unsafe_place_is_passed_over_with_the_reason() {
        let agent = AgentBinary::from_content(std::fs::read("/bin/sh").unwrap().into()).unwrap();
        let installed = Some(agent.sha256());
        let (usr, opt) = ("/usr/local/lib/shepherd/bin/roleserver", "/opt/shepherd/bin/roleserver");
        let good = |directory: &str| format!("drwxr-xr-x 0 / ext4 rw {directory}");
        let places = [good("/usr/local/lib/shepherd/bin"), good("/opt/shepherd/bin")];
        let places = [places[0].as_str(), places[1].as_str()];
        let home = DEFAULT_AGENT_PATH;
        let chosen = TargetPath::Chosen;
        for (target, probe, unsafe_paths, expected, reason) in [
            (
                &chosen,
                probe(0, false, None, &places),
                &[home][..],
                Ok(usr),
                "(not at .local/lib/shepherd/roleserver: open)",
            ),
            // A program in an unsafe home does not count as installed.
            (
                &chosen,
                probe(0, false, installed, &places),
                &[home],
                Ok(usr),
                "(not at .local/lib/shepherd/roleserver: open)",
            ),
            (
                &chosen,
                probe(0, false, None, &places),
                &[home, usr],
                Ok(opt),
                "(not at .local/lib/shepherd/roleserver: open; /usr/local/lib/shepherd/bin: open)",
            ),
            (
                &chosen,
                probe(0, false, None, &places),
                &[usr],
                Ok(opt),
                "(not at /usr/local/lib/shepherd/bin: open)",
            ),
            (&chosen, probe(0, false, None, &places), &[usr, opt], Ok(home), "no other place is suitable ("),
            (
                &chosen,
                probe(0, false, None, &places),
                &[home, usr, opt],
                Err(()),
                "no place is suitable (.local/lib/shepherd/roleserver: open; /usr/local/lib/shepherd/bin: open; \
                 /opt/shepherd/bin: open)",
            ),
            (&chosen, probe(0, false, None, &[]), &[home], Err(()), "no place is suitable ("),
            // Another user than root cannot write to the other places.
            (&chosen, probe(7, false, None, &places), &[home], Err(()), "open"),
            (&"/given".into(), probe(0, false, None, &places), &["/given"], Err(()), "open"),
        ] {
            let unsafe_paths: Vec<_> = unsafe_paths
                .iter()
                .map(|path| UnsafePath { path: (*path).to_owned(), reason: "open".to_owned() })
                .collect();
            let outcome = choose_program_path(target, &probe, &agent, &unsafe_paths);
            let path = outcome.as_ref().map(|program| program.path.as_str()).map_err(|_| ());
            assert_eq!(path, expected, "{unsafe_paths:?}");
            let text = outcome.map_or_else(|reason| reason, |program| program.reason);
            assert!(text.contains(reason), "{unsafe_paths:?}: {text}");
        }
    }

    /// The probe of an unsafe home reports the places among which the takeover chooses.
    #[test]
    fn probe_of_an_unsafe_home_reports_the_reason_and_the_places() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().canonicalize().unwrap();
        let step = RemoteStep::Probe { path: DEFAULT_AGENT_PATH.to_owned() };
        for (mode, expected) in [
            (0o755, None),
            (0o757, Some(format!("{} can be changed by other users (drwxr-xrwx)", path.display()))),
        ] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let probe = parse_probe(&run(&step, PROBE_SCRIPT, &path, "/usr/bin", b"")).unwrap();
            assert_eq!(probe.unsafe_reason, expected);
            assert_eq!((probe.digest, probe.places.len()), (None, 2));
        }
    }

    #[test]
    fn a_probe_reports_user_and_places() {
        let home = tempfile::tempdir().unwrap();
        std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        // The two shells that are `sh` on most machines.
        let bin = home.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        std::os::unix::fs::symlink("/bin/bash", bin.join("sh")).unwrap();
        for path in ["/usr/bin", bin.to_str().unwrap()] {
            check_reported_places(home.path(), path);
        }
    }

    fn check_reported_places(home: &Path, path: &str) {
        let step = RemoteStep::Probe { path: "not/there/agent".to_owned() };
        let probe = parse_probe(&run(&step, PROBE_SCRIPT, home, path, b"")).unwrap();
        assert_eq!(probe.uid, Some(std::fs::metadata(home).unwrap().uid()));
        let target = probe.target.unwrap();
        assert_eq!(target.directory, home.join("not/there").to_str().unwrap());
        assert_eq!((target.uid, target.mode.as_str()), (probe.uid.unwrap(), "drwx------"));
        assert!(home.starts_with(&target.mount_point) && !target.file_system.is_empty(), "{target:?}");
        assert!(target.options.split(',').any(|option| option == "rw"), "{target:?}");
        let directories: Vec<&str> = probe.places.iter().map(|place| place.directory.as_str()).collect();
        assert_eq!(directories, ["/usr/local/lib/shepherd/bin", "/opt/shepherd/bin"]);
    }

    #[test]
    fn malformed_line_is_no_place() {
        for line in ["", "drwxr-xr-x 0 none /opt", "drwxr-xr-x root / ext4 rw /opt", "drwxr-xr-x 0 / ext4 rw"]
        {
            assert_eq!(PlaceFacts::parse(line), None, "{line}");
        }
        assert_eq!(place("drwxr-xr-x 0 / ext4 rw /a b").directory, "/a b");
    }
}
