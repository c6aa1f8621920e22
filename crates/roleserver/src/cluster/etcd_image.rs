//! Restores an image of etcd with `etcdutl`, before the first start of an etcd.
//!
//! The program is the one beside etcd, or else the first one in `PATH`. It is of the minor version of that etcd
//! ([`restore_programs`](model::cluster::restore_programs)), and the image is restored by no other.
//!
//! etcdutl writes into a directory that this attempt alone uses. The directory gets the name of the data directory once all
//! of it is there. So an etcd starts on the whole image or not at all: an attempt that was interrupted leaves a directory
//! that the next one removes.
//!
//! The revision of the restored etcd exceeds that of the image by a thousand million, and everything before is compacted.
//! A client that holds an older revision, also one of after the image, has to list again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use curator_client::node_id::NodeId;
use hardening::file_limit::UsualFileLimit as _;
use model::cluster::restore_programs::{EtcdPrograms, check_restore_programs};
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use uuid::Uuid;

use crate::bounded_command::{last_words, output_within};
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_data::{self, EtcdDataState};
use crate::cluster::etcd_member;
use crate::cluster::etcd_program::{VERSION_DEADLINE, ask_version};
use crate::cluster::files::{ClusterFiles, EtcdMembership};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_order::EtcdImage;

/// How often the versions of the programs are read: somebody may install one.
const PROGRAMS_INTERVAL: Duration = Duration::from_mins(10);
/// Time limit of etcdutl for an image of 2 GiB on a slow disk.
const RESTORE_LIMIT: Duration = Duration::from_mins(20);
/// Begin of the name of a directory that an image is restored into.
const UNFINISHED: &str = "restoring-";
/// Held while an image is restored. Two attempts at once would remove each other's data.
static RESTORING: Mutex<()> = Mutex::new(());

/// Path of the program etcdutl: the one beside etcd, or else the first one in `PATH`; `None` if there is none.
#[must_use]
pub fn etcdutl_program(etcd: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join("etcdutl"));
    let mut found = [etcd.with_file_name("etcdutl")].into_iter().chain(found);
    found.find(|file| file.is_absolute() && file.is_file())
}

/// Reads the versions of etcd and of etcdutl. One that prints no version counts as absent.
pub async fn ask_programs(etcd: &Path) -> EtcdPrograms {
    let version = ask_version(etcd, VERSION_DEADLINE).await.ok().map(|version| version.to_string());
    let etcdutl = match etcdutl_program(etcd) {
        Some(program) => {
            tokio::task::spawn_blocking(move || ask_etcdutl_version(&program)).await.ok().flatten()
        }
        None => None,
    };
    EtcdPrograms { etcd: version, etcdutl }
}

/// Makes the runnable that keeps the versions of the programs in `facts`, for the reports of this machine.
#[must_use]
pub fn watch_programs(etcd: PathBuf, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (etcd, facts) = (etcd.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            facts.programs.set(scope.until_cancelled(ask_programs(&etcd)).await?);
            let healthy = starting.mark_healthy();
            loop {
                healthy.scope().until_cancelled(tokio::time::sleep(PROGRAMS_INTERVAL)).await?;
                facts.programs.set(healthy.scope().until_cancelled(ask_programs(&etcd)).await?);
            }
        }
    })
}

/// A command with an empty environment, as etcd is started.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().current_dir("/").stdin(Stdio::null());
    hardening::restore_core_limit(command.usual_file_limit());
    command
}

/// Runs `etcdutl version`. Blocks.
fn ask_etcdutl_version(program: &Path) -> Option<String> {
    let output = output_within(command(program).arg("version"), VERSION_DEADLINE).ok()?;
    parse_etcdutl_version(&String::from_utf8_lossy(&output.stdout)).filter(|_| output.status.success())
}

/// Parses the output of `etcdutl version`: `etcdutl version: 3.6.1` and further lines.
fn parse_etcdutl_version(printed: &str) -> Option<String> {
    let version = printed.lines().find_map(|line| line.strip_prefix("etcdutl version:"))?.trim();
    Some(version.to_owned()).filter(|version| !version.is_empty())
}

/// Makes the data of a membership from the fetched image, unless etcd has data of it already.
pub(super) async fn restore_image(
    host: &ControlPlaneContext,
    own: NodeId,
    cluster: &str,
    membership: &EtcdMembership,
    image: &EtcdImage,
) -> Result<(), RunnableError> {
    if etcd_data::inspect_data(&host.files, membership) != EtcdDataState::Empty {
        return Ok(());
    }
    let programs = ask_programs(&host.etcd).await;
    check_restore_programs(&image.etcd_version, &programs)
        .map_err(|text| RunnableError::msg(format!("the cluster is not restored: this machine {text}")))?;
    let none = || RunnableError::msg("the program etcdutl is gone: install it again, beside etcd");
    let etcdutl = etcdutl_program(&host.etcd).ok_or_else(none)?;
    let unfinished = format!("{UNFINISHED}{}", Uuid::new_v4().simple());
    // etcdutl runs in the directory of etcd.
    let path = std::path::absolute(host.files.image_path())?;
    let arguments = etcd_member::restore_arguments(&path, &unfinished, own, cluster, membership);
    let (files, membership) = (host.files.clone(), membership.clone());
    let restoring = tokio::task::spawn_blocking(move || {
        run_etcdutl(&etcdutl, &files, &arguments, (&unfinished, &membership))
    });
    restoring.await??;
    tracing::info!(version = image.etcd_version, "the image of etcd is restored");
    Ok(())
}

/// Runs etcdutl, and gives its result the name of the data directory. Blocks.
///
/// It continues when the part of the role server that began it is cancelled. The next attempt waits for it.
fn run_etcdutl(
    program: &Path,
    files: &ClusterFiles,
    arguments: &[String],
    (unfinished, membership): (&str, &EtcdMembership),
) -> Result<(), RunnableError> {
    let _alone = RESTORING.lock().unwrap_or_else(PoisonError::into_inner);
    if etcd_data::inspect_data(files, membership) != EtcdDataState::Empty {
        return Ok(());
    }
    let directory = files.etcd_directory();
    let failed = |error: std::io::Error| {
        RunnableError::msg(format!("restoring the image of etcd in {} failed: {error}", directory.display()))
    };
    remove_unfinished(&directory).map_err(failed)?;
    let output = output_within(command(program).args(arguments).current_dir(&directory), RESTORE_LIMIT);
    let output = output.map_err(failed)?;
    if !output.status.success() {
        let last =
            last_words(&output).map_or_else(|| "it printed nothing".to_owned(), |words| words.to_string());
        let (program, status) = (program.display(), output.status);
        let text = format!("{program} did not restore the image of etcd ({status}): {last}");
        return Err(RunnableError::msg(text));
    }
    if files.read_membership()?.as_ref() != Some(membership) {
        remove_unfinished(&directory).map_err(failed)?;
        return Err(RunnableError::msg("the image of etcd was restored for a membership that has ended"));
    }
    // etcd has started there at the most, and has written nothing.
    let data = directory.join(&membership.data);
    match std::fs::remove_dir_all(&data) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    std::fs::rename(directory.join(unfinished), &data).map_err(failed)?;
    // Without this the name may be gone after a power cut, and the image is restored again.
    std::fs::File::open(&directory).and_then(|opened| opened.sync_all()).map_err(failed)
}

/// Removes what attempts left that were interrupted.
fn remove_unfinished(directory: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            std::fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use curator_client::testing::node_id;

    use super::*;

    #[test]
    fn version_of_etcdutl_is_read_from_its_first_line() {
        for (printed, expected) in [
            ("etcdutl version: 3.6.1\nAPI version: 3.6\n", Some("3.6.1")),
            ("etcdutl version: \n", None),
            ("etcdctl version: 3.6.1\n", None),
            ("", None),
        ] {
            assert_eq!(parse_etcdutl_version(printed).as_deref(), expected, "{printed:?}");
        }
    }

    /// Writes a program that runs this shell script.
    fn write_script(program: &Path, text: &str) {
        std::fs::write(program, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o700)).unwrap();
    }

    /// A program etcdutl that runs this shell script, in a directory of its own.
    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("etcdutl");
        write_script(&program, text);
        (directory, program)
    }

    #[tokio::test]
    async fn programs_are_those_that_lie_beside_each_other() {
        let (directory, etcdutl) = script("test \"$1\" = version && echo 'etcdutl version: 3.6.4'");
        let etcd = directory.path().join("etcd");
        write_script(&etcd, "echo 'etcd Version: 3.6.1'");
        assert_eq!(etcdutl_program(&etcd), Some(etcdutl.clone()));
        let reported = |text: &str| Some(text.to_owned());
        let both = EtcdPrograms { etcd: reported("3.6.1"), etcdutl: reported("3.6.4") };
        assert_eq!(ask_programs(&etcd).await, both);
        write_script(&etcdutl, "exit 1");
        assert_eq!(ask_programs(&etcd).await, EtcdPrograms { etcdutl: None, ..both });
    }

    #[test]
    fn data_directory_appears_once_all_of_it_is_restored() {
        let state = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(state.path());
        let etcd = files.etcd_directory();
        // An earlier attempt was interrupted, and an etcd that started on nothing.
        std::fs::create_dir_all(etcd.join("restoring-0")).unwrap();
        std::fs::create_dir_all(etcd.join("founding/member")).unwrap();
        let (_one, fails) = script("/bin/mkdir -p restoring-1 && echo '{\"level\":\"fatal\"}' >&2 && exit 1");
        let names = || {
            let listed = std::fs::read_dir(&etcd).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<String> = listed.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        };
        let membership = etcd_member::first_membership(node_id(1), "10.0.0.1".parse().unwrap(), 1);
        files.write_membership(&membership).unwrap();
        let run = |program: &Path, unfinished: &str, membership: &EtcdMembership| {
            run_etcdutl(program, &files, &[], (unfinished, membership))
        };
        let error = run(&fails, "restoring-1", &membership).unwrap_err().to_string();
        assert!(error.contains("did not restore the image of etcd") && error.contains("fatal"), "{error}");
        assert_eq!(names(), ["founding", "restoring-1"]);
        let (_three, reports) = script("echo 'the image is cut off'; exit 1");
        let error = run(&reports, "restoring-3", &membership).unwrap_err().to_string();
        assert!(error.ends_with(": the image is cut off"), "its words are on its standard output: {error}");
        let (_two, restores) = script("/bin/mkdir -p restoring-2/member && echo here >restoring-2/member/db");
        // Another order came in the middle.
        let former = EtcdMembership { epoch: 0, ..membership.clone() };
        let error = run(&restores, "restoring-2", &former).unwrap_err().to_string();
        assert!(error.contains("a membership that has ended"), "{error}");
        assert_eq!(names(), ["founding"]);
        assert!(!etcd.join("founding/member/db").exists());
        run(&restores, "restoring-2", &membership).unwrap();
        assert_eq!(names(), ["founding"]);
        assert_eq!(std::fs::read(etcd.join("founding/member/db")).unwrap(), b"here\n");
    }
}
