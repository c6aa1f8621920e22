//! What the cluster is told of the built-in objects.
//!
//! One record, which whoever reconciles writes and every controller reads before it begins. It says two things of the
//! objects as they are *at any moment until it is written again*: whose needs they meet, and whose API servers they
//! break. So it must say less before objects change, and may say more only after.

use prost::Message as _;

use crate::etcd::key_space::RECONCILER_STATUS;
use crate::etcd::record::{self, RecordError};
use crate::proto::curator::v1 as wire;
use crate::reconciler::program::Program;
use crate::reconciler::release::{Release, Version};
use wire::reconciler_status_record::State as WireState;

/// What is being done. Nobody decides by it; people read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Objects are being changed, or may be.
    Working,
    /// All objects were as the version wants them.
    Done,
}

/// What stands in the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// What is being done.
    pub state: State,
    /// Objects are at least as this version wants them.
    pub version: Version,
    /// API servers of older releases than this must not run.
    pub lowest_compatible: Release,
}

impl Status {
    /// What a program says once all objects are as it wants them.
    #[must_use]
    pub fn done_by(program: &Program) -> Self {
        Self {
            state: State::Done,
            version: program.version.clone(),
            lowest_compatible: program.breaks_api_servers_below,
        }
    }

    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let state = match self.state {
            State::Working => WireState::Working,
            State::Done => WireState::Done,
        };
        let record = wire::ReconcilerStatusRecord {
            format: record::FORMAT,
            state: state.into(),
            version: self.version.to_string(),
            minimum_compatible_release: self.lowest_compatible.to_string(),
        };
        record.encode_to_vec()
    }

    /// Reads what is stored.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let key = RECONCILER_STATUS;
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::ReconcilerStatusRecord| record.format)?;
        let state = match record.state() {
            WireState::Working => State::Working,
            WireState::Done => State::Done,
            WireState::Unspecified => {
                return Err(fault(format!("its state is {}, which is none", record.state)));
            }
        };
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
    fn status_is_read_as_it_was_written() {
        for state in [State::Working, State::Done] {
            let status = Status {
                state,
                version: "1.2.3-rc.1+abc".parse().unwrap(),
                lowest_compatible: Release::new(1, 0, 7),
            };
            assert_eq!(Status::decode(&status.encode()).unwrap(), status);
        }
    }

    #[test]
    fn what_is_not_whole_is_an_error_that_names_the_key() {
        let whole = wire::ReconcilerStatusRecord {
            format: record::FORMAT,
            state: WireState::Done.into(),
            version: "1.2.3".to_owned(),
            minimum_compatible_release: "1.2.0".to_owned(),
        };
        for (record, said) in [
            (wire::ReconcilerStatusRecord { format: 0, ..whole.clone() }, "says no format"),
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
        ] {
            let error = Status::decode(&record.encode_to_vec()).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains(RECONCILER_STATUS), "{error}");
        }
        for garbage in [&b""[..], b"\xff", b"{\"state\":1}"] {
            assert!(Status::decode(garbage).is_err(), "{garbage:?}");
        }
    }
}
