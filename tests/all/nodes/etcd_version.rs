//! Which etcd these tests ran on, and which of them also run on the oldest one.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use shepherd::roleserver::cluster::etcd_program::ask_version;

use crate::harness::aloud::{TestResult, aloud};
use crate::harness::etcd_program::etcd_program;
use crate::harness::etcd_servers::Cluster;
use crate::harness::source;

/// A server of the harness reports its version, and the run prints it: `-- nodes::etcd_version::…: etcd 3.7.3 serves
/// the tests …`.
#[tokio::test]
async fn server_is_the_etcd_that_was_chosen_for_the_tests() -> TestResult {
    let program = etcd_program()?;
    let etcd = Cluster::start(1).await?;
    let version = etcd.client().status().await?.version;
    let requested = ask_version(&program, Duration::from_mins(1)).await?;
    assert_eq!(version, requested.to_string(), "{}", program.display());
    aloud(&format!("etcd {version} serves the tests ({})", program.display()));
    Ok(())
}

/// A filter that matches nothing would leave out its tests silently.
#[test]
fn filters_of_the_run_on_the_oldest_etcd_fit_tests() -> TestResult {
    let list = source::read(Path::new("tests/all/on_etcd_3_4.txt"))?;
    let mut filters = list.lines().filter(|line| !line.starts_with('#')).peekable();
    assert!(filters.peek().is_some());
    for filter in filters {
        let (module, test) = filter.rsplit_once("::").with_context(|| format!("{filter} names no module"))?;
        // `etcd/members::` is in crates/etcd/tests/all, and `nodes::roles::` in tests/all.
        let (folder, module) = match module.split_once('/') {
            Some((name, module)) => (format!("crates/{name}/tests/all"), module),
            None => ("tests/all".to_owned(), module),
        };
        let tests = source::read(Path::new(&format!("{folder}/{}.rs", module.replace("::", "/"))))?;
        let fits = if test.is_empty() { "#[tokio::test".to_owned() } else { format!("fn {test}(") };
        assert!(tests.contains(&fits), "{filter}");
    }
    Ok(())
}
