//! The reconciler's status record in etcd.
//!
//! The leader writes this one record, and every controller reads it before it starts. It makes two statements about the
//! objects that hold *at any moment until it is written again*: whose requirements they meet, and whose API servers
//! they break. So it must promise less before objects change, and may promise more only after.

use etcd::key_space::RECONCILER_STATUS;
use etcd::record::{self, RecordError};
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::program::Program;
use crate::release::Version;
use model::kubernetes::version::ReleaseVersion;
use wire::reconciler_status_record::State as WireState;

/// What the reconciler is doing. It is shown to people; nothing is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcilerState {
    /// Objects are being changed, or may be.
    Working,
    /// All objects were as the version wants them.
    Done,
}

/// The content of the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcilerStatus {
    /// What the reconciler is doing.
    pub state: ReconcilerState,
    /// Objects are at least as this version wants them.
    pub version: Version,
    /// API servers of older releases than this must not run.
    pub lowest_compatible: ReleaseVersion,
}

impl ReconcilerStatus {
    /// The status of a program once all objects are as it requires.
    #[must_use]
    pub fn completed_by(program: &Program) -> Self {
        Self {
            state: ReconcilerState::Done,
            version: program.version.clone(),
            lowest_compatible: program.breaks_api_servers_below,
        }
    }

    /// Encodes it for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let state = match self.state {
            ReconcilerState::Working => WireState::Working,
            ReconcilerState::Done => WireState::Done,
        };
        let record = wire::ReconcilerStatusRecord {
            format: record::FORMAT,
            state: state.into(),
            version: self.version.to_string(),
            minimum_compatible_release: self.lowest_compatible.to_string(),
        };
        record.encode_to_vec()
    }

    /// Decodes a stored record.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let key = RECONCILER_STATUS;
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::ReconcilerStatusRecord| record.format)?;
        let state = match record.state() {
            WireState::Working => ReconcilerState::Working,
            WireState::Done => ReconcilerState::Done,
            WireState::Unspecified => {
                return Err(fault(format!("its state is {}, which does not exist", record.state)));
            }
        };
        // Only programs of Kubernetes put a `v` before their version.
        if record.minimum_compatible_release.starts_with('v') {
            return Err(fault(
                "its lowest compatible release begins with a v, as only versions of Kubernetes do".to_owned(),
            ));
        }
        Ok(Self {
            state,
            version: record.version.parse().map_err(|error| fault(format!("its version {error}")))?,
            lowest_compatible: record
                .minimum_compatible_release
                .parse()
                .map_err(|error| fault(format!("its lowest compatible release {error}")))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_round_trips() {
        for state in [ReconcilerState::Working, ReconcilerState::Done] {
            let status = ReconcilerStatus {
                state,
                version: "1.2.3-rc.1+abc".parse().unwrap(),
                lowest_compatible: ReleaseVersion::new(1, 0, 7),
            };
            assert_eq!(ReconcilerStatus::decode(&status.encode()).unwrap(), status);
        }
    }

    #[test]
    fn invalid_status_error_names_its_key() {
        let whole = wire::ReconcilerStatusRecord {
            format: record::FORMAT,
            state: WireState::Done.into(),
            version: "1.2.3".to_owned(),
            minimum_compatible_release: "1.2.0".to_owned(),
        };
        for (record, text) in [
            (wire::ReconcilerStatusRecord { format: 0, ..whole.clone() }, "has no format number"),
            (
                wire::ReconcilerStatusRecord { format: record::FORMAT + 1, ..whole.clone() },
                "update the role server",
            ),
            (wire::ReconcilerStatusRecord { state: 0, ..whole.clone() }, "its state is 0"),
            (wire::ReconcilerStatusRecord { state: 9, ..whole.clone() }, "its state is 9"),
            (wire::ReconcilerStatusRecord { version: String::new(), ..whole.clone() }, "its version \"\""),
            (
                wire::ReconcilerStatusRecord { minimum_compatible_release: String::new(), ..whole.clone() },
                "its lowest compatible release \"\"",
            ),
            (
                wire::ReconcilerStatusRecord {
                    minimum_compatible_release: "v1.2.0".to_owned(),
                    ..whole.clone()
                },
                "its lowest compatible release begins with a v",
            ),
        ] {
            let error = ReconcilerStatus::decode(&record.encode_to_vec()).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(RECONCILER_STATUS), "{error}");
        }
        for garbage in [&b""[..], b"\xff", b"{\"state\":1}"] {
            assert!(ReconcilerStatus::decode(garbage).is_err(), "{garbage:?}");
        }
    }
}
