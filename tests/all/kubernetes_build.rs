//! `tools/kubernetes` with a fake Go: what it builds, what it rejects with a message, and what it leaves behind.
//!
//! The fake `go` writes scripts that print a version in the place of programs. A real build takes minutes; `make
//! kube-apiserver` tests that.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::harness::aloud::TestResult;
use crate::harness::kubernetes::version;
use crate::harness::source;

/// How long a build may take until it compiles: so long that only one that hangs reaches it, on a busy host, too.
const PATIENCE: Duration = Duration::from_mins(10);

/// A Go that compiles nothing. `GO_MODE` selects the result of a build.
const GO: &str = r#"#!/bin/bash
case $1 in
version) echo "go version ${GO_CLAIMS:-go1.26.8} linux/amd64" ;;
env) echo "$GO_PLACE/modules" ;;
list) printf 'one\ntwo\n' ;;
build)
    while [[ $1 != -o ]]; do shift; done
    echo "$3" >>"$GO_PLACE/builds"
    echo one
    echo compiled >"$GOCACHE.part"
    case ${GO_MODE:-} in
    broken) echo "main.go:1:1: this does not compile" && exit 1 ;;
    full) echo "write $GOCACHE/x: no space left on device" && exit 1 ;;
    wrong) printf '#!/bin/sh\necho Kubernetes v1.2.3\n' >"$2" ;;
    *)
        until [[ ${GO_MODE:-} != slow || -e $GO_PLACE/go-on ]]; do sleep 0.02; done
        case $3 in
        */kube-apiserver) printf '#!/bin/sh\necho Kubernetes v%s\n' "$KUBERNETES_VERSION" >"$2" ;;
        */etcdutl/*) printf '#!/bin/sh\necho etcdutl version: %s\n' "$ETCD_VERSION" >"$2" ;;
        *) printf '#!/bin/sh\necho etcd Version: %s\necho Git SHA: x\n' "$ETCD_VERSION" >"$2" ;;
        esac
        ;;
    esac
    chmod 755 "$2"
    ;;
esac
"#;

/// A folder with all programs of this host but Go, the fake, and a cache.
struct Build {
    place: tempfile::TempDir,
}

impl Build {
    fn new() -> Result<Self> {
        let build = Self { place: tempfile::tempdir()? };
        let programs = build.path("bin");
        fs::create_dir(&programs)?;
        for folder in ["/usr/bin", "/bin"] {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                let name = path.file_name().context("no name")?;
                if name != "go" && !programs.join(name).exists() {
                    // A dangling link is listed and does not exist.
                    let _ = symlink(&path, programs.join(name));
                }
            }
        }
        build.stand_in("go", GO)?;
        Ok(build)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn stand_in(&self, name: &str, script: &str) -> Result<()> {
        let path = self.path("bin").join(name);
        let _ = fs::remove_file(&path);
        fs::write(&path, script)?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new("tools/kubernetes");
        command.args(arguments).current_dir(source::root()).env_clear();
        command.env("PATH", self.path("bin")).env("HOME", self.path("home"));
        command.env("XDG_CACHE_HOME", self.path("cache")).env("GO_PLACE", self.place.path());
        for name in ["KUBERNETES_VERSION", "ETCD_VERSION"] {
            command.env(name, version(name)?);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    fn run(&self, arguments: &[&str], settings: &[(&str, &str)]) -> Result<Output> {
        Ok(self.command(arguments)?.envs(settings.iter().copied()).output()?)
    }

    /// Runs it, and returns its output.
    fn succeed(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments, &[])?;
        ensure!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs it, and returns the last line of its error.
    fn refused(&self, arguments: &[&str], settings: &[(&str, &str)]) -> Result<String> {
        let output = self.run(arguments, settings)?;
        let error = String::from_utf8(output.stderr)?;
        ensure!(!output.status.success(), "{arguments:?} {settings:?}: {:?}", output.stdout);
        Ok(error.lines().last().context("no complaint")?.to_owned())
    }

    /// The files of the cache except its lock, as relative paths.
    fn cached(&self) -> Result<Vec<String>> {
        let cache = self.path("cache/shepherd");
        let (mut found, mut folders) = (Vec::new(), vec![cache.clone()]);
        while let Some(folder) = folders.pop() {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    found.push(path.strip_prefix(&cache)?.display().to_string());
                }
            }
        }
        found.retain(|name| name != "kubernetes.lock");
        found.sort();
        Ok(found)
    }

    /// How often Go was called to build something.
    fn builds(&self) -> usize {
        fs::read_to_string(self.path("builds")).unwrap_or_default().lines().count()
    }

    /// Starts a build that waits for a signal, and waits until it compiles.
    fn start_slow(&self) -> Result<Child> {
        let mut child = self.command(&["etcd"])?.env("GO_MODE", "slow").spawn()?;
        let end = Instant::now() + PATIENCE;
        while !self.cached()?.iter().any(|name| name.contains("/compiled.")) {
            ensure!(Instant::now() < end, "it does not begin to build");
            ensure!(child.try_wait()?.is_none(), "it ended before it built anything");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(child)
    }

    fn go_on(&self) -> Result<()> {
        Ok(fs::write(self.path("go-on"), "")?)
    }
}

fn etcd_files() -> Result<Vec<String>> {
    let folder = format!("etcd-{}", version("ETCD_VERSION")?);
    Ok(["etcd", "etcd.sha256", "etcdutl", "etcdutl.sha256"].map(|name| format!("{folder}/{name}")).to_vec())
}

fn all_files() -> Result<Vec<String>> {
    let folder = format!("kubernetes-{}", version("KUBERNETES_VERSION")?);
    let of_kubernetes = ["etcd", "etcdutl", "kube-apiserver", "kube-apiserver.sha256"];
    Ok([etcd_files()?, of_kubernetes.map(|name| format!("{folder}/{name}")).to_vec()].concat())
}

#[test]
fn programs_are_built_once_and_lie_in_one_folder() -> TestResult {
    let build = Build::new()?;
    assert!(build.succeed(&["etcd"])?.contains("building etcd "));
    assert_eq!(build.cached()?, etcd_files()?);
    let printed = build.succeed(&[])?;
    assert!(printed.contains("building kube-apiserver ") && !printed.contains("building etcd "), "{printed}");
    assert_eq!(build.cached()?, all_files()?);
    let folder = build.path("cache/shepherd").join(format!("kubernetes-{}", version("KUBERNETES_VERSION")?));
    let etcd = Command::new(folder.join("etcd")).arg("--version").output()?;
    assert!(etcd.stdout.starts_with(b"etcd Version: "), "{etcd:?}");
    let etcdutl = Command::new(folder.join("etcdutl")).arg("version").output()?;
    assert!(etcdutl.stdout.starts_with(b"etcdutl version: "), "{etcdutl:?}");
    for arguments in [&[][..], &["kube-apiserver"], &["etcd"]] {
        let printed = build.succeed(arguments)?;
        assert!(printed.ends_with("(built before)\n") && printed.lines().count() == 1, "{printed}");
    }
    assert_eq!(build.builds(), 3);
    Ok(())
}

/// Earlier checkouts built etcd without it.
#[test]
fn cache_that_has_no_etcdutl_gains_it_and_keeps_its_etcd() -> TestResult {
    let build = Build::new()?;
    build.succeed(&[])?;
    let builds = build.builds();
    let gains = |missing: &[&String]| -> Result<()> {
        for name in missing {
            fs::remove_file(build.path("cache/shepherd").join(name))?;
        }
        let printed = build.succeed(&["etcd"])?;
        ensure!(printed.contains("building etcdutl ") && !printed.contains("building etcd "), "{printed}");
        ensure!(build.cached()? == all_files()?, "{:?}", build.cached());
        Ok(())
    };
    let files = etcd_files()?;
    gains(&[&files[2], &files[3]])?;
    gains(&[&files[3]])?;
    assert_eq!(build.builds(), builds + 2);
    Ok(())
}

#[test]
fn what_it_cannot_do_is_refused_in_one_sentence_and_leaves_nothing() -> TestResult {
    let build = Build::new()?;
    let cache = build.path("cache/shepherd").display().to_string();
    let file = build.path("bin/go").display().to_string();
    let go = build.path("bin/go").display().to_string();
    for (arguments, settings, expected) in [
        (
            &["kubelet"][..],
            &[][..],
            "\"kubelet\" is not a program that can be built; use etcd or kube-apiserver".to_owned(),
        ),
        (&["etcd", "etcd"], &[], "too many arguments".to_owned()),
        (
            &[],
            &[("GO_CLAIMS", "go1.25.9")],
            format!("{go} is Go 1.25.9, which is too old. Install Go 1.26 or newer from https://go.dev/dl"),
        ),
        (&[], &[("GO_CLAIMS", "go1.26rc1")], format!("{go} is Go 1.26rc1, which is too old")),
        (&[], &[("GO_CLAIMS", "go1.9")], format!("{go} is Go 1.9, which is too old")),
        (
            &[],
            &[("XDG_CACHE_HOME", &*file)],
            format!(
                "cannot write to the cache folder {file}/shepherd; make it writable or set XDG_CACHE_HOME"
            ),
        ),
        (&[], &[("XDG_CACHE_HOME", "/proc")], "cannot write to the cache folder /proc/shepherd".to_owned()),
        (&[], &[("XDG_CACHE_HOME", ""), ("HOME", "")], "there is no cache folder".to_owned()),
        (&[], &[("GO_MODE", "full")], format!("no room is left in {cache} or in ")),
        (
            &[],
            &[("GO_MODE", "wrong")],
            "the etcd that was built does not run, or is not of version ".to_owned(),
        ),
    ] {
        let refused = build.refused(arguments, settings)?;
        assert!(refused.starts_with("tools/") && refused.contains(&expected), "{settings:?}: {refused}");
        let left: Vec<String> =
            build.cached()?.into_iter().filter(|name| name != "kubernetes-build.log").collect();
        assert_eq!(left, Vec::<String>::new(), "{settings:?}");
    }
    fs::remove_file(build.path("bin/go"))?;
    let refused = build.refused(&[], &[])?;
    assert!(
        refused.contains("there is no Go in PATH. Install Go 1.26 or newer from https://go.dev/dl"),
        "{refused}"
    );
    Ok(())
}

#[test]
fn a_build_needs_room_before_it_begins() -> TestResult {
    let build = Build::new()?;
    build.stand_in("df", "#!/bin/sh\necho Avail Mounted on\necho 100 /\n")?;
    let refused = build.refused(&[], &[])?;
    let begins = "tools/kubernetes: the build needs ";
    assert!(refused.starts_with(begins) && refused.contains(", and 100 MB are free; free some"), "{refused}");
    assert_eq!((build.builds(), build.cached()?), (0, Vec::new()));
    Ok(())
}

#[test]
fn output_of_a_build_that_fails_is_shown_and_kept() -> TestResult {
    let build = Build::new()?;
    let output = build.run(&[], &[("GO_MODE", "broken")])?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1));
    let log = build.path("cache/shepherd/kubernetes-build.log").display().to_string();
    assert!(error.contains("main.go:1:1: this does not compile\n") && error.contains(&log), "{error}");
    assert_eq!(build.cached()?, ["kubernetes-build.log"]);
    build.succeed(&[])?;
    assert_eq!(build.cached()?, all_files()?);
    Ok(())
}

#[test]
fn a_program_that_is_damaged_or_of_another_version_is_built_again() -> TestResult {
    let build = Build::new()?;
    build.succeed(&[])?;
    let damage = |program: &str, change: &dyn Fn(&Path) -> Result<()>| -> Result<()> {
        let builds = build.builds();
        let path = build.path("cache/shepherd").join(program);
        let before = fs::read(&path)?;
        change(&path)?;
        build.succeed(&[])?;
        assert_eq!((build.builds(), fs::read(&path)?), (builds + 1, before), "{program}");
        Ok(())
    };
    for program in [&etcd_files()?[0], &etcd_files()?[2], &all_files()?[6]] {
        damage(program, &|path| Ok(fs::write(path, "")?))?;
        // It still prints its version, as a program may that has lost its last bytes.
        damage(program, &|path| Ok(fs::write(path, fs::read_to_string(path)? + " ")?))?;
        damage(program, &|path| Ok(fs::write(path, "#!/bin/sh\necho 1.2.3\n")?))?;
        damage(program, &|path| Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o644))?))?;
        damage(program, &|path| Ok(fs::remove_file(path)?))?;
    }
    assert_eq!(build.cached()?, all_files()?);
    Ok(())
}

#[test]
fn what_a_killed_build_left_is_removed_by_the_next() -> TestResult {
    let build = Build::new()?;
    let mut killed = build.start_slow()?;
    killed.kill()?;
    killed.wait()?;
    assert!(build.cached()?.iter().any(|name| name.starts_with("building.")), "{:?}", build.cached()?);
    build.go_on()?;
    build.succeed(&["etcd"])?;
    assert_eq!(build.cached()?, etcd_files()?);

    // A build that is terminated removes its own files.
    let build = Build::new()?;
    let child = build.start_slow()?;
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)?;
    let output = child.wait_with_output()?;
    assert_eq!(output.status.code(), Some(143));
    let left: Vec<String> =
        build.cached()?.into_iter().filter(|name| name != "kubernetes-build.log").collect();
    assert_eq!(left, Vec::<String>::new());
    build.go_on()?;
    Ok(())
}

#[test]
fn of_two_at_once_the_second_waits_and_builds_nothing() -> TestResult {
    let build = Build::new()?;
    let first = build.start_slow()?;
    let mut second = build.command(&["etcd"])?.spawn()?;
    let printed = second.stdout.take().context("it is piped")?;
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(printed));
    let waits = lines.next().context("it says nothing")??;
    assert!(waits.starts_with("waiting for another build in "), "{waits}");
    build.go_on()?;
    let rest = lines.collect::<std::io::Result<Vec<String>>>()?;
    assert!(rest.len() == 1 && rest[0].ends_with("(built meanwhile)"), "{rest:?}");
    assert!(second.wait()?.success() && first.wait_with_output()?.status.success());
    assert_eq!((build.builds(), build.cached()?), (2, etcd_files()?));
    Ok(())
}

/// A program reports the version that the linker writes into it, and not what was compiled.
#[test]
fn pinned_modules_are_of_the_versions_that_are_built() -> TestResult {
    for (module, package, name) in [
        ("etcd", "go.etcd.io/etcd/server/v3", "ETCD_VERSION"),
        ("etcd", "go.etcd.io/etcd/etcdutl/v3", "ETCD_VERSION"),
        ("kubernetes", "k8s.io/kubernetes", "KUBERNETES_VERSION"),
    ] {
        let pinned = source::read(&Path::new("tools/go-modules").join(module).join("go.mod"))?;
        let expected = format!("{package} v{}", version(name)?);
        assert!(pinned.lines().any(|line| line.trim().starts_with(&expected)), "{expected}");
        let oldest = format!("go {}.0", version("GO_VERSION")?);
        assert!(pinned.lines().any(|line| line == oldest), "{module}: {oldest}");
    }
    Ok(())
}
