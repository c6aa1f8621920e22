//! The configuration of runc for a service in a root filesystem: its processes, mounts and confinement.
//!
//! It follows the runtime specification of the Open Container Initiative, `config.md` and `config-linux.md` (1.0.2). A
//! service is confined by namespaces, a bounded set of capabilities, `no_new_privs` and a filter of system calls
//! ([`seccomp`][super::seccomp]); its declaration may request more.

use std::path::Path;

use serde_json::{Value, json};

use crate::child::spec::User;
use crate::cluster::services::desired::RenderedService;
use crate::cluster::services::rootfs::SERVICE_DIRECTORY;
use crate::cluster::services::seccomp::seccomp_filter;

/// Capabilities of root in the container: what servers need that start as root and then drop privileges.
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

/// Paths and names for an OCI configuration.
#[derive(Clone, Debug)]
pub struct ContainerOptions<'a> {
    /// Directory of the service on the host.
    pub workdir: &'a Path,
    /// Directory of its files with absolute paths: [`files_path`][super::rootfs::OciBundle::files_path].
    pub files: &'a Path,
    /// The absolute paths of these files.
    pub mounted_files: &'a [String],
    /// Files of the node that are mounted read-only.
    pub host_files: &'a [&'static str],
    /// Its control group, in the syntax of runc.
    pub cgroup: &'a str,
    /// Host name in the container, the service's child name.
    pub name: &'a str,
}

/// Builds the OCI configuration (pure).
#[must_use]
pub fn runc_config(
    rendered: &RenderedService,
    program: &str,
    user: User,
    container: &ContainerOptions<'_>,
) -> Value {
    let arguments: Vec<&str> =
        std::iter::once(program).chain(rendered.arguments.iter().map(String::as_str)).collect();
    let environment: Vec<String> =
        rendered.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let requested = rendered.privileges.capabilities.iter().map(|capability| format!("CAP_{capability}"));
    let default: &[&str] = if user.uid == 0 { &CAPABILITIES } else { &[] };
    let mut capabilities: Vec<String> =
        default.iter().map(|&name| name.to_owned()).chain(requested).collect();
    capabilities.sort_unstable();
    capabilities.dedup();
    // `execve` takes capabilities that are not ambient from a user other than root.
    let ambient: &[String] = if user.uid == 0 { &[] } else { &capabilities };
    let filter = (!rendered.privileges.unfiltered_system_calls)
        .then(|| seccomp_filter(std::env::consts::ARCH, &capabilities));
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
        bind(container.workdir, SERVICE_DIRECTORY, &["rw"]),
    ];
    mounts.extend(container.host_files.iter().map(|path| bind(Path::new(path), path, &["ro"])));
    mounts.extend(
        container
            .mounted_files
            .iter()
            .map(|path| bind(&container.files.join(path.trim_start_matches('/')), path, &["ro"])),
    );
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": { "uid": user.uid, "gid": user.gid },
            "args": arguments,
            "env": environment,
            "cwd": SERVICE_DIRECTORY,
            "noNewPrivileges": !rendered.privileges.new_privileges,
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
                "inheritable": ambient, "ambient": ambient,
            },
        },
        "root": { "path": "rootfs", "readonly": true },
        "hostname": container.name,
        "mounts": mounts,
        "linux": {
            "cgroupsPath": container.cgroup,
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }],
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "maskedPaths": [
                "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug",
                "/proc/scsi",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
            // `null` means no filter.
            "seccomp": filter,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeMap;

    use model::role_declaration::privileges::Privileges;
    use model::role_declaration::{ProgramSource, Sha256};

    #[test]
    fn runc_config_follows_the_service() {
        let rendered = RenderedService {
            run: ProgramSource::RootFilesystem {
                archive: Sha256([1; 32]),
                program: "/bin/server".to_owned(),
            },
            arguments: vec!["--port".to_owned(), "80".to_owned()],
            environment: BTreeMap::from([("A".to_owned(), "b c".to_owned())]),
            files: Vec::new(),
            user: "1000".to_owned(),
            privileges: Privileges::default(),
        };
        let reported = |uid| {
            let container = ContainerOptions {
                workdir: Path::new("/own"),
                files: Path::new("/bundle/files"),
                mounted_files: &["/etc/app.conf".to_owned()],
                host_files: &["/etc/hosts"],
                cgroup: "web_server",
                name: "web_server",
            };
            runc_config(&rendered, "/bin/server", User { uid, gid: uid }, &container)
        };
        let plain = reported(1000);
        assert_eq!(plain["process"]["args"], json!(["/bin/server", "--port", "80"]));
        assert_eq!(plain["process"]["env"], json!(["A=b c"]));
        assert_eq!(plain["process"]["user"], json!({ "uid": 1000, "gid": 1000 }));
        assert_eq!(plain["process"]["capabilities"]["bounding"], json!([]));
        assert_eq!(
            reported(0)["process"]["capabilities"]["bounding"].as_array().unwrap().len(),
            CAPABILITIES.len()
        );
        assert_eq!(
            (&plain["root"]["readonly"], &plain["process"]["cwd"]),
            (&json!(true), &json!(SERVICE_DIRECTORY))
        );
        let mounts = plain["mounts"].as_array().unwrap();
        let of = |destination: &str| {
            let found = mounts.iter().find(|mount| mount["destination"] == destination).unwrap();
            (found["source"].as_str().unwrap().to_owned(), found["options"].to_string())
        };
        assert_eq!(of(SERVICE_DIRECTORY).0, "/own");
        assert_eq!(of("/etc/app.conf").0, "/bundle/files/etc/app.conf");
        for read_only in ["/etc/app.conf", "/etc/hosts"] {
            assert!(of(read_only).1.contains("\"ro\""), "{read_only}");
        }
        let namespaces = plain["linux"]["namespaces"].to_string();
        assert!(namespaces.contains("pid") && !namespaces.contains("network"), "{namespaces}");
    }

    #[test]
    fn container_is_confined_unless_its_declaration_asks_for_more() {
        let mut rendered = RenderedService {
            run: ProgramSource::RootFilesystem { archive: Sha256([1; 32]), program: "/x".to_owned() },
            arguments: Vec::new(),
            environment: BTreeMap::new(),
            files: Vec::new(),
            user: "0".to_owned(),
            privileges: Privileges::default(),
        };
        let config = |rendered: &RenderedService, uid| {
            let container = ContainerOptions {
                workdir: Path::new("/own"),
                files: Path::new("/files"),
                mounted_files: &[],
                host_files: &[],
                cgroup: "x",
                name: "x",
            };
            runc_config(rendered, "/x", User { uid, gid: uid }, &container)
        };
        let plain = config(&rendered, 1000);
        assert_eq!(plain["process"]["noNewPrivileges"], json!(true));
        assert_eq!(plain["linux"]["seccomp"]["defaultAction"], "SCMP_ACT_ERRNO");
        assert_eq!(plain["process"]["capabilities"]["ambient"], json!([]));

        rendered.privileges = Privileges {
            capabilities: ["NET_ADMIN".parse().unwrap(), "CHOWN".parse().unwrap()].into(),
            unfiltered_system_calls: true,
            new_privileges: true,
        };
        let (user, root) = (config(&rendered, 1000), config(&rendered, 0));
        assert_eq!(user["process"]["noNewPrivileges"], json!(false));
        assert_eq!(user["linux"]["seccomp"], Value::Null);
        assert_eq!(user["process"]["capabilities"]["ambient"], json!(["CAP_CHOWN", "CAP_NET_ADMIN"]));
        assert_eq!(root["process"]["capabilities"]["ambient"], json!([]));
        let bounding = root["process"]["capabilities"]["bounding"].as_array().unwrap();
        assert_eq!(bounding.len(), CAPABILITIES.len() + 1, "{bounding:?}");
    }
}
