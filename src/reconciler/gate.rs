//! Whether the components of a controller may begin.
//!
//! The API server of a controller has to run before there are any objects, for these are made through it; all that would
//! rely on the objects, and all that lets others use the API server, waits here.
//!
//! Three conditions, of which the first is what the proof of [`Releases::may_exclude`][proof] relies on: the record of
//! this node says that it is a controller and of which release. A node that has just been updated, or set back, is known
//! by its former release until then; were it to begin before, a leader who reads the records could not know that it runs
//! what his objects break. The record has to be read *before* the status: a leader who excludes this release after that
//! has seen the record, and one who did so before has left the status that is read then.
//!
//! Once it may begin, it may go on: whatever would break it later waits until it is gone.
//!
//! [proof]: crate::reconciler::nodes::Releases::may_exclude

use std::fmt;

use crate::reconciler::nodes::Controller;
use crate::reconciler::program::Program;
use crate::reconciler::release::Release;
use crate::reconciler::status::Status;

/// What a controller waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Its record does not say yet that it runs this release.
    NotRecorded {
        /// What this program is.
        own: Release,
        /// What the record says; `None` of a node that is no controller, or has no record.
        recorded: Option<Controller>,
    },
    /// The status cannot be read, so nobody knows what may begin; why.
    Unreadable(String),
    /// Objects were never made as any release wants them.
    NeverDone,
    /// The objects break this release's API server.
    TooOld {
        /// What this program is.
        own: Release,
        /// The oldest that would do.
        wanted: Release,
    },
    /// The objects are not yet as this release needs them.
    ObjectsTooOld {
        /// Whose objects they are.
        done: Release,
        /// Whose objects would do.
        wanted: Release,
    },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRecorded { own, recorded: None } => write!(
                f,
                "the record of this node does not say that it is a controller of Kubernetes, of release {own}"
            ),
            Self::NotRecorded { own, recorded: Some(Controller::Of(recorded)) } => {
                write!(f, "the record of this node says release {recorded}, and it runs {own}")
            }
            Self::NotRecorded { recorded: Some(Controller::Unknown(why)), .. } | Self::Unreadable(why) => {
                f.write_str(why)
            }
            Self::NeverDone => write!(f, "the built-in objects of Kubernetes were never made"),
            Self::TooOld { own, wanted } => write!(
                f,
                "the built-in objects of Kubernetes are those of a newer release: this node has {own}, and {wanted} is \
                 wanted; update it"
            ),
            Self::ObjectsTooOld { done, wanted } => write!(
                f,
                "the built-in objects of Kubernetes are those of release {done}, and those of {wanted} are needed: the \
                 newest controller makes them"
            ),
        }
    }
}

/// Decides by what the own record said, and by the status as it was read after that; both are `None` where there is none.
pub fn may_begin(
    program: &Program,
    recorded: Option<Controller>,
    status: Result<Option<&Status>, String>,
) -> Result<(), Wait> {
    let own = program.release();
    if recorded != Some(Controller::Of(own)) {
        return Err(Wait::NotRecorded { own, recorded });
    }
    let status = match status {
        Ok(Some(status)) => status,
        Ok(None) => return Err(Wait::NeverDone),
        Err(why) => return Err(Wait::Unreadable(why)),
    };
    if own < status.lowest_compatible {
        return Err(Wait::TooOld { own, wanted: status.lowest_compatible });
    }
    let (done, wanted) = (status.version.release(), program.needs_objects_of);
    if done < wanted {
        return Err(Wait::ObjectsTooOld { done, wanted });
    }
    // Not asked: whether objects are being changed. The status says what holds meanwhile.
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reconciler::status::State;

    fn release(major: u32) -> Release {
        Release::new(major, 0, 0)
    }

    fn program() -> Program {
        Program {
            version: release(3).into(),
            needs_objects_of: release(2),
            breaks_api_servers_below: release(1),
        }
    }

    fn judged(recorded: Option<Controller>, status: Option<(State, u32, u32)>) -> Result<(), Wait> {
        let status = status.map(|(state, version, lowest_compatible)| Status {
            state,
            version: release(version).into(),
            lowest_compatible: release(lowest_compatible),
        });
        may_begin(&program(), recorded, Ok(status.as_ref()))
    }

    #[test]
    fn controller_begins_when_it_suits_the_objects_and_they_suit_it() {
        let own = release(3);
        for state in [State::Working, State::Done] {
            for (version, lowest, expected) in [
                (2, 3, Ok(())),
                (2, 1, Ok(())),
                (9, 3, Ok(())),
                (1, 3, Err(Wait::ObjectsTooOld { done: release(1), wanted: release(2) })),
                (9, 4, Err(Wait::TooOld { own, wanted: release(4) })),
                (1, 4, Err(Wait::TooOld { own, wanted: release(4) })),
            ] {
                let judged = judged(Some(Controller::Of(own)), Some((state, version, lowest)));
                assert_eq!(judged, expected, "{state:?} {version} {lowest}");
            }
        }
    }

    #[test]
    fn without_a_status_that_can_be_read_nothing_begins() {
        let recorded = Some(Controller::Of(release(3)));
        assert_eq!(judged(recorded.clone(), None), Err(Wait::NeverDone));
        let unreadable = may_begin(&program(), recorded, Err("it is torn".to_owned()));
        assert_eq!(unreadable, Err(Wait::Unreadable("it is torn".to_owned())));
    }

    #[test]
    fn nothing_begins_before_everybody_can_know_of_it() {
        let fits = Some((State::Done, 3, 3));
        for recorded in [
            None,
            Some(Controller::Of(release(2))),
            Some(Controller::Of(release(4))),
            Some(Controller::Unknown("it said nothing".to_owned())),
        ] {
            let expected = Wait::NotRecorded { own: release(3), recorded: recorded.clone() };
            assert_eq!(judged(recorded, fits), Err(expected));
        }
    }
}
