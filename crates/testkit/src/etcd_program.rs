//! Finds the etcd program that tests use.
//!
//! In this order: the program that `SHEPHERD_TEST_ETCD` names; the version of `tools/lib/kubernetes-versions.sh` in the
//! cache of this user; `etcd` in the search path. Every test that starts an etcd uses this module. A role server of a
//! test looks for `etcd` itself, so each child of a test gets a search path that leads to the same program.
//!
//! `etcdutl` is the one beside that etcd, so that both have one version. `make kube-apiserver` builds both.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::aloud::aloud;
use crate::source;

/// The variable that names the program.
pub const VARIABLE: &str = "SHEPHERD_TEST_ETCD";

static CHOSEN: LazyLock<Result<PathBuf, String>> =
    LazyLock::new(|| Candidates::of_this_host().and_then(choose).map_err(|error| format!("{error:#}")));

/// The program etcd that the tests use.
pub fn etcd_program() -> Result<PathBuf> {
    CHOSEN.clone().map_err(|error| anyhow!(error))
}

/// The program etcdutl beside [`etcd_program`]; `None` for a test that has to be skipped, which is reported.
pub fn etcdutl_program() -> Result<Option<PathBuf>> {
    let beside = etcd_program()?.with_file_name("etcdutl");
    if beside.is_file() {
        return Ok(Some(beside));
    }
    let required = std::env::var("REQUIRE_KUBERNETES").unwrap_or_default();
    aloud(skip_reason(std::env::var_os(VARIABLE).is_some(), &required)?);
    Ok(None)
}

/// Why a test without etcdutl is skipped; an error if it must not be.
fn skip_reason(etcd_is_named: bool, required: &str) -> Result<&'static str> {
    if etcd_is_named {
        // The name selects a version, and etcd 3.4 has no etcdutl.
        return Ok("not run on this etcd, because no etcdutl lies beside it");
    }
    ensure!(
        !required.split(',').any(|name| name == "etcdutl"),
        "REQUIRE_KUBERNETES lists {required}, and this test lacks etcdutl; run `make kube-apiserver`"
    );
    Ok("skipped without etcdutl: run `make kube-apiserver`")
}

/// The search path by which a child finds the same etcd; `None` if it finds that one anyway, or if none exists.
///
/// # Panics
///
/// Panics if a program was named and does not exist: another one must not be used in its place.
#[must_use]
pub fn search_path() -> Option<OsString> {
    let own = std::env::var_os("PATH").unwrap_or_default();
    match etcd_program() {
        Ok(program) => search_path_for(&program, &own),
        Err(error) => {
            assert!(std::env::var_os(VARIABLE).is_none(), "{error}");
            None
        }
    }
}

/// The version that the tests are made for: `ETCD_VERSION` of `tools/lib/kubernetes-versions.sh`.
pub fn pinned_version() -> Result<String> {
    let text = source::read(Path::new("tools/lib/kubernetes-versions.sh"))?;
    let version = text.lines().find_map(|line| line.strip_prefix("ETCD_VERSION="));
    Ok(version.context("tools/lib/kubernetes-versions.sh has no line ETCD_VERSION=…")?.trim().to_owned())
}

/// The places where an etcd may be.
#[derive(Clone, Debug, Default)]
struct Candidates {
    /// The program that the variable names.
    named: Option<PathBuf>,
    /// The program in the cache of this user, if there is one.
    cached: Option<PathBuf>,
    /// The directories of the search path.
    path: OsString,
}

impl Candidates {
    fn of_this_host() -> Result<Self> {
        let directory = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty());
        // By convention a relative path is ignored, as tools/lib/kubernetes.sh does.
        let cache = directory("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = cache.or_else(|| Some(Path::new(&directory("HOME")?).join(".cache")));
        let version = pinned_version()?;
        Ok(Self {
            named: std::env::var_os(VARIABLE).map(PathBuf::from),
            cached: cache.map(|cache| cache.join(format!("shepherd/etcd-{version}/etcd"))),
            path: std::env::var_os("PATH").unwrap_or_default(),
        })
    }
}

fn choose(candidates: Candidates) -> Result<PathBuf> {
    if let Some(named) = candidates.named {
        ensure!(
            named.is_absolute() && named.is_file() && named.file_name() == Some(OsStr::new("etcd")),
            "{VARIABLE} is {}, which is no program etcd: give the absolute path of a file of that name",
            named.display()
        );
        return Ok(named);
    }
    if let Some(cached) = candidates.cached.filter(|cached| cached.is_file()) {
        return Ok(cached);
    }
    found_on(&candidates.path).context("there is no program etcd: tools/need etcd")
}

fn found_on(path: &OsStr) -> Option<PathBuf> {
    let mut files = std::env::split_paths(path).map(|directory| directory.join("etcd"));
    files.find(|file| file.is_absolute() && file.is_file())
}

fn search_path_for(program: &Path, own: &OsStr) -> Option<OsString> {
    if found_on(own).is_some_and(|found| found == program) {
        return None;
    }
    let directories = program.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(own));
    std::env::join_paths(directories).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::aloud::TestResult;

    #[test]
    fn test_without_etcdutl_is_skipped_unless_the_list_has_it() -> TestResult {
        let skipped = "skipped without etcdutl: run `make kube-apiserver`";
        for required in ["", "kube-apiserver,etcd"] {
            assert_eq!(skip_reason(false, required)?, skipped);
        }
        let error = skip_reason(false, "kube-apiserver,etcd,etcdutl").unwrap_err().to_string();
        assert!(error.ends_with("lacks etcdutl; run `make kube-apiserver`"), "{error}");
        // No run counts as incomplete because of an etcd that somebody named.
        assert!(skip_reason(true, "etcdutl")?.starts_with("not run on this etcd"));
        Ok(())
    }

    #[test]
    fn etcd_is_the_named_one_or_the_cached_one_or_that_of_the_search_path() -> TestResult {
        let place = tempfile::tempdir()?;
        let file = |name: &str| -> Result<PathBuf> {
            let path = place.path().join(name).join("etcd");
            std::fs::create_dir_all(path.parent().context("a parent")?)?;
            std::fs::write(&path, "")?;
            Ok(path)
        };
        let (named, cached, on_path) = (file("named")?, file("cached")?, file("bin")?);
        let path = std::env::join_paths([place.path().join("empty"), place.path().join("bin")])?;
        let all = Candidates { named: Some(named.clone()), cached: Some(cached.clone()), path: path.clone() };
        assert_eq!(choose(all.clone())?, named);
        assert_eq!(choose(Candidates { named: None, ..all.clone() })?, cached);
        for cached in [None, Some(place.path().join("nowhere/etcd"))] {
            assert_eq!(choose(Candidates { named: None, cached, path: path.clone() })?, on_path);
        }
        let nowhere = choose(Candidates::default()).unwrap_err().to_string();
        assert_eq!(nowhere, "there is no program etcd: tools/need etcd");
        for wrong in [place.path().join("nowhere/etcd"), place.path().join("named"), "etcd".into()] {
            let error = choose(Candidates { named: Some(wrong), ..all.clone() }).unwrap_err().to_string();
            assert!(error.starts_with("SHEPHERD_TEST_ETCD is ") && !error.contains('\n'), "{error}");
        }

        assert_eq!(search_path_for(&on_path, &path), None, "a child finds it anyway");
        let changed = search_path_for(&named, &path).context("it must be put in front")?;
        assert_eq!(found_on(&changed), Some(named));
        assert!(std::env::split_paths(&changed).skip(1).eq(std::env::split_paths(&path)));
        Ok(())
    }
}
