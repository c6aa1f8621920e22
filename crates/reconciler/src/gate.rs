//! The gate: whether a Kubernetes controller may start with the present objects.
//!
//! The API server of a controller has to run before any objects exist, because they are created through it. Everything
//! that relies on the objects, and everything that lets others use the API server, waits here.
//!
//! There are three conditions. The proof of [`ControllerReleases::check_exclusion`][proof] relies on the first one: the
//! record of this node shows that it is a controller, and its release. Until then, a node that has just been updated or
//! rolled back is known by its former release. If it started before, a leader that reads the records could not know
//! that this node runs what the leader's objects break. The record has to be read *before* the status: a leader that
//! excludes this release after that has seen the record, and one that did so before has left the status that is read
//! then.
//!
//! Once a controller has started, it may continue: changes that would break it wait until it has stopped.
//!
//! [proof]: crate::controller_releases::ControllerReleases::check_exclusion

use std::fmt;

use crate::controller_releases::ControllerRelease;
use crate::program::Program;
use crate::status::ReconcilerStatus;
use model::kubernetes::version::ReleaseVersion;

/// What a controller waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateWait {
    /// Its record does not show yet that it runs this release.
    NotRecorded {
        /// The release of this program.
        own: ReleaseVersion,
        /// What the record shows; `None` if the node is no controller or has no record.
        recorded: Option<ControllerRelease>,
    },
    /// The status cannot be read, so nobody knows which releases may start; the reason.
    StatusUnreadable(String),
    /// No release has reconciled the objects yet.
    NeverReconciled,
    /// The objects break this release's API server.
    ReleaseTooOld {
        /// The release of this program.
        own: ReleaseVersion,
        /// The lowest release that may start.
        required: ReleaseVersion,
    },
    /// The objects are older than this release needs.
    ObjectsTooOld {
        /// The release of the present objects.
        current: ReleaseVersion,
        /// The lowest release whose objects would do.
        required: ReleaseVersion,
    },
}

impl fmt::Display for GateWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRecorded { own, recorded: None } => write!(
                f,
                "the record of this node does not say that it is a controller of Kubernetes, of release {own}"
            ),
            Self::NotRecorded { own, recorded: Some(ControllerRelease::Known(recorded)) } => {
                write!(f, "the record of this node says release {recorded}, and it runs {own}")
            }
            Self::NotRecorded { recorded: Some(ControllerRelease::Unknown(why)), .. }
            | Self::StatusUnreadable(why) => f.write_str(why),
            Self::NeverReconciled => {
                write!(f, "no release has created the built-in objects of Kubernetes yet")
            }
            Self::ReleaseTooOld { own, required: wanted } => write!(
                f,
                "the built-in objects of Kubernetes are those of a newer release: this node has {own}, and \
                 {wanted} or later is required; update it"
            ),
            Self::ObjectsTooOld { current: done, required: wanted } => write!(
                f,
                "the built-in objects of Kubernetes are those of release {done}, and those of {wanted} are needed: the \
                 newest controller makes them"
            ),
        }
    }
}

/// Decides by the node's own record and by the status, which must be read after the record. Both are `None` if missing.
pub fn check_gate(
    program: &Program,
    recorded: Option<ControllerRelease>,
    status: Result<Option<&ReconcilerStatus>, String>,
) -> Result<(), GateWait> {
    let own = program.release();
    if recorded != Some(ControllerRelease::Known(own)) {
        return Err(GateWait::NotRecorded { own, recorded });
    }
    let status = match status {
        Ok(Some(status)) => status,
        Ok(None) => return Err(GateWait::NeverReconciled),
        Err(why) => return Err(GateWait::StatusUnreadable(why)),
    };
    if own < status.lowest_compatible {
        return Err(GateWait::ReleaseTooOld { own, required: status.lowest_compatible });
    }
    let (done, wanted) = (status.version.release(), program.needs_objects_of);
    if done < wanted {
        return Err(GateWait::ObjectsTooOld { current: done, required: wanted });
    }
    // It does not matter whether objects are being changed: the status describes what holds meanwhile.
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::ReconcilerState;

    fn release(major: u32) -> ReleaseVersion {
        ReleaseVersion::new(major, 0, 0)
    }

    fn program() -> Program {
        Program {
            version: release(3).into(),
            needs_objects_of: release(2),
            breaks_api_servers_below: release(1),
        }
    }

    fn check(
        recorded: Option<ControllerRelease>,
        status: Option<(ReconcilerState, u32, u32)>,
    ) -> Result<(), GateWait> {
        let status = status.map(|(state, version, lowest_compatible)| ReconcilerStatus {
            state,
            version: release(version).into(),
            lowest_compatible: release(lowest_compatible),
        });
        check_gate(&program(), recorded, Ok(status.as_ref()))
    }

    #[test]
    fn controller_starts_when_it_and_the_objects_are_compatible() {
        let own = release(3);
        for state in [ReconcilerState::Working, ReconcilerState::Done] {
            for (version, lowest, expected) in [
                (2, 3, Ok(())),
                (2, 1, Ok(())),
                (9, 3, Ok(())),
                (1, 3, Err(GateWait::ObjectsTooOld { current: release(1), required: release(2) })),
                (9, 4, Err(GateWait::ReleaseTooOld { own, required: release(4) })),
                (1, 4, Err(GateWait::ReleaseTooOld { own, required: release(4) })),
            ] {
                let judged = check(Some(ControllerRelease::Known(own)), Some((state, version, lowest)));
                assert_eq!(judged, expected, "{state:?} {version} {lowest}");
            }
        }
    }

    #[test]
    fn controller_waits_for_a_readable_status() {
        let recorded = Some(ControllerRelease::Known(release(3)));
        assert_eq!(check(recorded.clone(), None), Err(GateWait::NeverReconciled));
        let unreadable = check_gate(&program(), recorded, Err("it is torn".to_owned()));
        assert_eq!(unreadable, Err(GateWait::StatusUnreadable("it is torn".to_owned())));
    }

    #[test]
    fn controller_waits_until_its_release_is_recorded() {
        let fits = Some((ReconcilerState::Done, 3, 3));
        for recorded in [
            None,
            Some(ControllerRelease::Known(release(2))),
            Some(ControllerRelease::Known(release(4))),
            Some(ControllerRelease::Unknown("it reported nothing".to_owned())),
        ] {
            let expected = GateWait::NotRecorded { own: release(3), recorded: recorded.clone() };
            assert_eq!(check(recorded, fits), Err(expected));
        }
    }
}
