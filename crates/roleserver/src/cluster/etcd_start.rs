//! Whether the etcd of this host may be started on the data of the membership.
//!
//! A member runs the etcd that is first in `PATH` at each start. An older one than the last that ran there, or one that is
//! far newer, damages the data or does not start. So the version of each etcd that has answered is recorded beside the
//! membership, and compared before the next start; [`check_etcd_start`] decides. A running etcd of any version is
//! adopted.
//!
//! The record belongs to one membership and epoch: a member that is replaced, and a cluster that is restored, begin a new
//! one. It is a hint. A damaged one counts as absent, because an etcd that is not started costs a quorum.

use std::path::{Path, PathBuf};

use model::kubernetes::version::ReleaseVersion;
use model::program_versions::etcd_start::{EtcdStartRefusal, check_etcd_start, warn_about_allowed};
use model::program_versions::version::parse_program_version;
use model::program_versions::{Program, find_faults};
use serde::{Deserialize, Serialize};

use crate::cluster::etcd_program::{Flags, ProgramError, VERSION_DEADLINE, ask_program};
use crate::cluster::files::{ClusterFiles, ClusterFilesError, EtcdMembership};

/// Variable with the names of faults that the operator allows, separated by commas.
const ALLOWED_FAULTS: &str = "ROLESERVER_ALLOWED_FAULTS";

/// The version of the etcd that last answered on the data of a membership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdVersionRecord {
    /// Name of the data directory of the membership.
    pub data: String,
    /// Epoch of the cluster when the membership began.
    pub epoch: u64,
    /// The version as etcd reported it.
    pub version: String,
}

/// Why etcd is not started.
#[derive(Debug, thiserror::Error)]
pub enum EtcdStartError {
    /// The program cannot be used.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The membership cannot be read.
    #[error(transparent)]
    Files(#[from] ClusterFilesError),
    /// The version would harm the data.
    #[error("{} cannot be used: {refusal}", program.display())]
    Refused {
        /// Path of the program etcd.
        program: PathBuf,
        /// The reason and the way out.
        refusal: EtcdStartRefusal,
    },
}

/// Checks that the program may be started on the data of the membership, and returns the flags for its version. A version
/// with a published fault is logged.
pub async fn check_program(program: &Path, files: &ClusterFiles) -> Result<Flags, EtcdStartError> {
    let (version, flags) = ask_program(program, VERSION_DEADLINE).await?;
    let Some(next) = parse_program_version(&version.to_string()) else { return Ok(flags) };
    let last = files.read_membership()?.and_then(|membership| last_version(files, &membership));
    let allowed = allowed_faults(&std::env::var(ALLOWED_FAULTS).unwrap_or_default());
    if let Some(warning) = warn_about_allowed(&allowed) {
        tracing::warn!("{warning}");
    }
    check_etcd_start(last, next, &allowed)
        .map_err(|refusal| EtcdStartError::Refused { program: program.to_owned(), refusal })?;
    for finding in find_faults(Program::Etcd, next) {
        if finding.is_certain {
            tracing::warn!(fault = finding.fault.name, "{finding}");
        } else {
            tracing::info!(fault = finding.fault.name, "{finding}");
        }
    }
    Ok(flags)
}

/// Records the version of the etcd that answers.
pub fn record_version(files: &ClusterFiles, membership: &EtcdMembership, version: &str) {
    let record = EtcdVersionRecord {
        data: membership.data.clone(),
        epoch: membership.epoch,
        version: version.to_owned(),
    };
    if files.read_etcd_version().ok().flatten().as_ref() == Some(&record) {
        return;
    }
    if let Err(error) = files.write_etcd_version(&record) {
        tracing::warn!(%error, "the version of etcd cannot be recorded");
    }
}

/// The version that last ran on the data of a membership; `None` if none is recorded.
fn last_version(files: &ClusterFiles, membership: &EtcdMembership) -> Option<ReleaseVersion> {
    let record = files.read_etcd_version().unwrap_or_else(|error| {
        tracing::warn!(%error, "the recorded version of etcd cannot be read, and is not compared");
        None
    })?;
    let is_of_it = record.data == membership.data && record.epoch == membership.epoch;
    let version = parse_program_version(&record.version)?;
    Some(version.upstream.numbers).filter(|_| is_of_it)
}

fn allowed_faults(text: &str) -> Vec<String> {
    text.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_belongs_to_one_membership_and_epoch() {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        let membership = EtcdMembership {
            member: Some(7),
            data: "member-7".to_owned(),
            address: "192.0.2.1".parse().unwrap(),
            initial_cluster: "a=https://192.0.2.1:7834".to_owned(),
            new_cluster: false,
            epoch: 1,
        };
        assert_eq!(last_version(&files, &membership), None);
        record_version(&files, &membership, "3.5.26");
        let version = Some(ReleaseVersion::new(3, 5, 26));
        assert_eq!(last_version(&files, &membership), version);
        let learnt = EtcdMembership { member: None, ..membership.clone() };
        assert_eq!(last_version(&files, &learnt), version, "its number may be unknown");
        for other in [
            EtcdMembership { data: "member-8".to_owned(), ..membership.clone() },
            EtcdMembership { epoch: 2, ..membership.clone() },
        ] {
            assert_eq!(last_version(&files, &other), None);
        }
        record_version(&files, &membership, "3.6.9");
        assert_eq!(last_version(&files, &membership), Some(ReleaseVersion::new(3, 6, 9)));
        files.remove_membership(&membership).unwrap();
        assert_eq!(files.read_etcd_version().unwrap(), None);
    }

    #[test]
    fn allowed_faults_are_names_with_commas_between() {
        assert_eq!(allowed_faults(""), [""; 0]);
        assert_eq!(allowed_faults("etcd-divergence, b,,"), ["etcd-divergence", "b"]);
    }
}
