//! Programs of Kubernetes that tests use if they exist: where they are searched, and what happens without them.
//!
//! A test names the programs that it needs, as [`API_SERVER`]. It gets the folder that has all of them. Without one it
//! is skipped, with a line that `tools/test` counts. `REQUIRE_KUBERNETES` lists programs that must exist, for example
//! `kube-apiserver,etcd`: a test that lacks one of these fails.
//!
//! Nothing here starts or installs a program. `make kube-apiserver` builds the API server of the version that
//! `tools/lib/kubernetes-versions.sh` names, and `make kube-bundle` the older programs of a bundle.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use crate::harness::aloud::aloud;
use crate::harness::source;

const VERSIONS: &str = include_str!("../../../tools/lib/kubernetes-versions.sh");

/// The programs that `REQUIRE_KUBERNETES` may list. `tools/lib/kubernetes.sh` has the same list.
pub(crate) const PROGRAMS: [&str; 8] = [
    "kube-apiserver",
    "etcd",
    "etcdutl",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "bundle",
];

/// The programs that a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramSet {
    /// kube-apiserver and etcd: `KUBEBUILDER_ASSETS`, or those that `make kube-apiserver` has built.
    ApiServer,
    /// All programs of a controller: `KUBEBUILDER_ASSETS`, or those that `make kube-programs` has built.
    Controllers,
    /// A bundle with the programs of a worker: the one that `make kube-bundle` has made.
    Bundle,
}

impl ProgramSet {
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::ApiServer => &["kube-apiserver", "etcd"],
            Self::Controllers => &["kube-apiserver", "kube-controller-manager", "kube-scheduler"],
            Self::Bundle => &["bundle", "kubelet", "kube-proxy"],
        }
    }

    /// The line of a skipped test. `tools/lib/skips.sh` counts these lines by their first words.
    fn skipped(self) -> &'static str {
        match self {
            Self::ApiServer => {
                "skipped without kube-apiserver: run `make kube-apiserver`, or set KUBEBUILDER_ASSETS"
            }
            Self::Controllers => "skipped without a Kubernetes bundle: run `make kube-programs`",
            Self::Bundle => "skipped without a Kubernetes bundle: run `make kube-bundle`",
        }
    }
}

/// The value of a line `NAME=value` of `tools/lib/kubernetes-versions.sh`.
pub(crate) fn version(name: &str) -> Result<&'static str> {
    let mut values = VERSIONS.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    match values.next() {
        Some(value) => Ok(value),
        None => bail!("tools/lib/kubernetes-versions.sh has no {name}"),
    }
}

/// The folder with the programs, or `None` for a test that has to be skipped.
pub(crate) fn folder(wanted: ProgramSet) -> Result<Option<PathBuf>> {
    let required = required()?;
    let assets = env::var_os("KUBEBUILDER_ASSETS").filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(assets) = &assets
        && wanted == ProgramSet::ApiServer
    {
        // If a folder is named, no other one is used.
        let missing = missing_in(assets, wanted.programs());
        ensure!(
            missing.is_empty(),
            "KUBEBUILDER_ASSETS is {}, which has no {}",
            assets.display(),
            missing.join(", ")
        );
    }
    let built = cache(env::var_os("XDG_CACHE_HOME"), env::var_os("HOME"));
    let built = match built {
        Some(cache) => Some(cache.join(format!("kubernetes-{}", version("KUBERNETES_VERSION")?))),
        None => None,
    };
    let of_bundles = (wanted != ProgramSet::ApiServer).then(|| source::root().join("target/kubernetes/bin"));
    let folders: Vec<PathBuf> = [assets, built, of_bundles].into_iter().flatten().collect();
    match find(&folders, wanted.programs()) {
        Ok(folder) => Ok(Some(folder)),
        Err(missing) => {
            may_skip(wanted, &missing, &missing, &required)?;
            aloud(wanted.skipped());
            Ok(None)
        }
    }
}

/// A complete bundle, if one was made: the largest, because bundles for controllers alone are smaller.
pub(crate) fn bundle() -> Option<PathBuf> {
    let built = source::root().join("target/kubernetes/bundles");
    let beside = env::var_os("KUBEBUILDER_ASSETS").map(|folder| Path::new(&folder).join("../bundles"));
    let files = [Some(built), beside].into_iter().flatten().filter_map(|path| fs::read_dir(path).ok());
    let all =
        files.flatten().flatten().filter_map(|entry| Some((entry.metadata().ok()?.len(), entry.path())));
    all.filter(|(size, _)| *size > 100 << 20).max().map(|(_, path)| path)
}

/// Whether a test of a complete bundle can run. If not, and `REQUIRE_KUBERNETES` allows it, the test has to be skipped.
/// `obstacles` are what else is missing on this host.
pub(crate) fn has_bundle(obstacles: &[&str]) -> Result<bool> {
    let required = required()?;
    let bundle = bundle().map_or(Some("a bundle"), |_| None);
    let lacks: Vec<&str> = bundle.into_iter().chain(obstacles.iter().copied()).collect();
    if lacks.is_empty() {
        return Ok(true);
    }
    may_skip(ProgramSet::Bundle, &lacks, ProgramSet::Bundle.programs(), &required)?;
    aloud(ProgramSet::Bundle.skipped());
    Ok(false)
}

/// Whether a test may be skipped that lacks something and so cannot use these programs: not if one of them is required.
fn may_skip(wanted: ProgramSet, lacks: &[&str], unusable: &[&str], required: &[&str]) -> Result<()> {
    let refused = unusable.iter().any(|program| required.contains(program));
    ensure!(
        !refused,
        "REQUIRE_KUBERNETES lists {}, and this test lacks {}; {}",
        required.join(","),
        lacks.join(", "),
        wanted.skipped().split_once(": ").map_or("", |(_, remedy)| remedy)
    );
    Ok(())
}

fn required() -> Result<Vec<&'static str>> {
    parse_required(&env::var("REQUIRE_KUBERNETES").unwrap_or_default())
}

/// The names of a list such as `kube-apiserver,etcd`.
fn parse_required(list: &str) -> Result<Vec<&'static str>> {
    let mut required = Vec::new();
    for name in list.split(',').filter(|name| !name.is_empty()) {
        match PROGRAMS.iter().find(|known| **known == name) {
            Some(known) => required.push(*known),
            None => bail!(
                "REQUIRE_KUBERNETES is a comma-separated list of programs that must be there, and {name:?} is none of \
                 them: {}",
                PROGRAMS.join(" ")
            ),
        }
    }
    Ok(required)
}

/// The folder that `tools/kubernetes` builds into, for these values of `XDG_CACHE_HOME` and `HOME`.
fn cache(xdg_cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let given = xdg_cache_home.map(PathBuf::from);
    let of_home = || home.map(|home| Path::new(&home).join(".cache"));
    // By convention, a relative path counts as none.
    let base = given.filter(|path| path.is_absolute()).or_else(of_home)?;
    base.is_absolute().then(|| base.join("shepherd"))
}

/// The first folder that has all programs. Without one, the programs that no folder has, and all if each exists in some
/// folder.
fn find(folders: &[PathBuf], programs: &[&'static str]) -> Result<PathBuf, Vec<&'static str>> {
    if let Some(folder) = folders.iter().find(|folder| missing_in(folder, programs).is_empty()) {
        return Ok(folder.clone());
    }
    let is_nowhere = |program: &&str| folders.iter().all(|folder| !folder.join(program).is_file());
    Err(programs.iter().copied().filter(is_nowhere).collect())
}

fn missing_in<'a>(folder: &Path, programs: &[&'a str]) -> Vec<&'a str> {
    programs.iter().copied().filter(|program| !folder.join(program).is_file()).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::harness::aloud::TestResult;

    #[test]
    fn names_that_are_not_known_are_refused() -> TestResult {
        assert_eq!(parse_required("")?, Vec::<&str>::new());
        assert_eq!(parse_required("kube-apiserver,etcd,")?, ["kube-apiserver", "etcd"]);
        for wrong in ["nonsense", "1", "kube-apiserver, etcd", "etcd;bundle", "Etcd"] {
            let error = parse_required(wrong).expect_err(wrong).to_string();
            assert!(
                error.contains("is none of them: kube-apiserver etcd ") && !error.contains('\n'),
                "{error}"
            );
        }
        Ok(())
    }

    /// So a wrong list ends `tools/test` before anything is compiled.
    #[test]
    fn scripts_know_the_same_names() -> TestResult {
        let accepts = |list: &str| -> Result<bool> {
            let script = "source tools/lib/kubernetes.sh && kubernetes_requirements_check";
            let output = Command::new("bash")
                .args(["-c", script])
                .env("REQUIRE_KUBERNETES", list)
                .current_dir(source::root())
                .output()?;
            let error = String::from_utf8(output.stderr)?;
            assert_eq!(error.lines().count(), usize::from(!output.status.success()), "{error}");
            Ok(output.status.success())
        };
        for list in ["", "kube-apiserver,etcd,", &PROGRAMS.join(",")] {
            assert!(accepts(list)? && parse_required(list).is_ok(), "{list}");
        }
        for list in [
            "nonsense",
            "1",
            "kube-apiserver, etcd",
            "etcd,nonsense",
            "etcd\nnonsense",
            "kube",
            "kube-apiserver etcd",
        ] {
            assert!(!accepts(list)? && parse_required(list).is_err(), "{list}");
        }
        Ok(())
    }

    #[test]
    fn only_a_listed_program_that_is_missing_fails_a_test() -> TestResult {
        let required = ["kube-apiserver", "etcd"];
        let error = may_skip(ProgramSet::ApiServer, &["etcd"], &["etcd"], &required);
        let error = error.expect_err("it is listed").to_string();
        assert_eq!(
            error,
            "REQUIRE_KUBERNETES lists kube-apiserver,etcd, and this test lacks etcd; run `make kube-apiserver`, or set \
             KUBEBUILDER_ASSETS"
        );
        for (wanted, lacks, unusable, required) in [
            (ProgramSet::Controllers, "kube-scheduler", &["kube-scheduler"][..], &required[..]),
            (ProgramSet::Bundle, "conntrack", ProgramSet::Bundle.programs(), &required),
            (ProgramSet::ApiServer, "etcd", &["etcd"], &[]),
        ] {
            may_skip(wanted, &[lacks], unusable, required)?;
        }
        Ok(())
    }

    #[test]
    fn all_programs_come_from_one_folder() -> TestResult {
        let place = tempfile::tempdir()?;
        let [first, second] = ["first", "second"].map(|name| place.path().join(name));
        for (folder, program) in [(&first, "kube-apiserver"), (&first, "etcd"), (&second, "kube-scheduler")] {
            fs::create_dir_all(folder)?;
            fs::write(folder.join(program), "")?;
        }
        let folders = [place.path().join("none"), first.clone(), second.clone()];
        assert_eq!(find(&folders, ProgramSet::ApiServer.programs()), Ok(first));
        let missing = find(&folders, ProgramSet::Controllers.programs());
        assert_eq!(missing, Err(vec!["kube-controller-manager"]));
        fs::write(second.join("kube-controller-manager"), "")?;
        let apart = find(&folders, ProgramSet::Controllers.programs());
        assert_eq!(apart, Err(Vec::new()), "the API server is of another version");
        Ok(())
    }

    #[test]
    fn the_cache_is_the_one_of_the_scripts() -> TestResult {
        for (xdg_cache_home, home, expected) in [
            (Some("/c"), Some("/h"), Some("/c/shepherd")),
            (None, Some("/h"), Some("/h/.cache/shepherd")),
            (Some(""), Some("/h"), Some("/h/.cache/shepherd")),
            (Some("c"), Some("/h"), Some("/h/.cache/shepherd")),
            (Some("/c"), None, Some("/c/shepherd")),
            (None, Some("h"), None),
            (None, None, None),
        ] {
            let case = format!("{xdg_cache_home:?} {home:?}");
            let mut script = Command::new("bash");
            script.args(["-c", "source tools/lib/kubernetes.sh && kubernetes_cache"]);
            script.current_dir(source::root());
            for (name, value) in [("XDG_CACHE_HOME", xdg_cache_home), ("HOME", home)] {
                match value {
                    Some(value) => script.env(name, value),
                    None => script.env_remove(name),
                };
            }
            let output = script.output()?;
            let printed = String::from_utf8(output.stdout)?;
            assert_eq!(printed.lines().next(), expected, "{case}");
            assert_eq!(output.status.success(), expected.is_some(), "{case}");
            let folder = cache(xdg_cache_home.map(Into::into), home.map(Into::into));
            assert_eq!(folder.as_deref(), expected.map(Path::new), "{case}");
        }
        Ok(())
    }
}
