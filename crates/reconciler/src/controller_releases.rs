//! The releases that a cluster's Kubernetes controllers run.
//!
//! The safe answer to "does anything older run?" is not "none that is known". A controller with an unreadable record,
//! or one that has not reported its release, may run any release. A caller that needs the answer must assume both an
//! older *and* a newer controller until an operator has resolved it. The same record is harmless to all other callers.
//!
//! A record shows what its node reported last, which may be its state before an update. Two rules make that safe: a
//! node serves nothing before its record has the release that it runs ([`gate`](crate::gate)), and a
//! decision that was made from the records is written only if none was written since
//! ([`leadership`](crate::leadership)).
//!
//! Only the needed fields of a record are read, so that a fault in another field affects nobody here.

use std::fmt;

use etcd::client::{Listing, Record};
use etcd::record;
use proto::curator::v1 as wire;

use crate::program::Program;
use crate::release::Version;
use model::kubernetes::version::ReleaseVersion;

/// What a record shows of a node that is a controller, or may be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerRelease {
    /// It runs this release, or ran it when it last reported.
    Known(ReleaseVersion),
    /// It may run any release; the reason as a sentence.
    Unknown(String),
}

/// The releases of all controllers at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerReleases {
    /// The lowest known release.
    pub lowest: ReleaseVersion,
    /// The highest known release.
    pub highest: ReleaseVersion,
    /// The reasons of the controllers that may run any release.
    pub unknown: Vec<String>,
    /// The store's revision at that moment.
    pub revision: i64,
}

/// Why a step waits until nodes have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseBlock {
    /// Nodes that may run any release, with the reasons.
    Unknown(Vec<String>),
    /// A controller is newer than this program, which leaves the objects to it.
    Newer {
        /// The highest release of a controller.
        highest: ReleaseVersion,
        /// The release of this program.
        own: ReleaseVersion,
    },
    /// A controller is so old that the objects would break its API server.
    Older {
        /// The lowest release of a controller.
        lowest: ReleaseVersion,
        /// The lowest release that the objects do not break.
        required: ReleaseVersion,
    },
}

impl fmt::Display for ReleaseBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why) => write!(
                f,
                "the release of some controllers of Kubernetes is not known: {}; repair or remove these nodes",
                why.join("; ")
            ),
            Self::Newer { highest, own } => write!(
                f,
                "a controller has release {highest}, and this one {own}: the objects are left to the newest"
            ),
            Self::Older { lowest, required: wanted } => write!(
                f,
                "a controller has release {lowest}, and the objects of this release need API servers of \
                 {wanted} or later: update it, or take its role"
            ),
        }
    }
}

/// The release in a node's record; `None` if the node is no controller.
#[must_use]
pub fn controller_release(record: &Record) -> Option<ControllerRelease> {
    let unknown = |why: String| Some(ControllerRelease::Unknown(why));
    let read = record::decode(&record.key, &record.value, |node: &wire::NodeRecord| node.format);
    let node = match read {
        Ok(wire::NodeRecord { node: Some(node), .. }) => node,
        Ok(_) => return unknown(format!("the record {} has no node", record.key)),
        Err(error) => return unknown(error.to_string()),
    };
    // A record without roles has none: that is how a node without any is written.
    if !node.roles.is_some_and(|roles| roles.kubernetes_controller) {
        return None;
    }
    match node.status {
        None => unknown(format!("the node {} has not reported which release it runs", node.node_id)),
        Some(status) => match status.version.parse::<Version>() {
            Ok(version) => Some(ControllerRelease::Known(version.release())),
            Err(error) => unknown(format!("the node {} reported an invalid version: {error}", node.node_id)),
        },
    }
}

impl ControllerReleases {
    /// The releases in these records and that of this program, which runs here whatever its record shows.
    #[must_use]
    pub fn from_listing(program: &Program, listing: &Listing) -> Self {
        let own = program.release();
        let mut releases =
            Self { lowest: own, highest: own, unknown: Vec::new(), revision: listing.revision };
        for controller in listing.records.iter().filter_map(controller_release) {
            match controller {
                ControllerRelease::Known(release) => {
                    releases.lowest = releases.lowest.min(release);
                    releases.highest = releases.highest.max(release);
                }
                ControllerRelease::Unknown(why) => releases.unknown.push(why),
            }
        }
        releases
    }

    /// Whether this program may take part in the election: no controller is newer.
    pub fn check_candidacy(&self, program: &Program) -> Result<(), ReleaseBlock> {
        let own = program.release();
        if self.highest > own {
            Err(ReleaseBlock::Newer { highest: self.highest, own })
        } else if self.unknown.is_empty() {
            Ok(())
        } else {
            Err(ReleaseBlock::Unknown(self.unknown.clone()))
        }
    }

    /// Whether this program's objects break no running API server, and none needs newer objects.
    pub fn check_exclusion(&self, program: &Program) -> Result<(), ReleaseBlock> {
        self.check_candidacy(program)?;
        let wanted = program.breaks_api_servers_below;
        if self.lowest < wanted {
            Err(ReleaseBlock::Older { lowest: self.lowest, required: wanted })
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn program(release: u32, breaks_below: u32) -> Program {
        Program {
            version: ReleaseVersion::new(release, 0, 0).into(),
            needs_objects_of: ReleaseVersion::new(1, 0, 0),
            breaks_api_servers_below: ReleaseVersion::new(breaks_below, 0, 0),
        }
    }

    fn record(key: &str, value: Vec<u8>) -> Record {
        Record { key: key.to_owned(), value, create_revision: 1, mod_revision: 1 }
    }

    fn node(controller: bool, version: Option<&str>) -> Record {
        let node = wire::Node {
            node_id: "shepherd-1".to_owned(),
            roles: Some(wire::NodeRoles { kubernetes_controller: controller, ..Default::default() }),
            status: version
                .map(|version| wire::NodeStatus { version: version.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let stored = wire::NodeRecord { format: record::FORMAT, node: Some(node), ..Default::default() };
        record("/nodes/shepherd-1", stored.encode_to_vec())
    }

    fn releases(own: &Program, records: Vec<Record>) -> ControllerReleases {
        ControllerReleases::from_listing(own, &Listing { records, revision: 9 })
    }

    #[test]
    fn only_controllers_and_the_own_release_count() {
        let own = program(2, 1);
        let alone = releases(&own, vec![]);
        assert_eq!((alone.lowest, alone.highest, alone.revision), (own.release(), own.release(), 9));
        let seen = releases(
            &own,
            vec![
                node(false, Some("9.0.0")),
                node(false, Some("no version")),
                node(false, None),
                node(true, Some("1.5.0+abc")),
                node(true, Some("3.0.1")),
                node(true, Some("2.0.0")),
            ],
        );
        assert_eq!(
            seen,
            ControllerReleases {
                lowest: ReleaseVersion::new(1, 5, 0),
                highest: ReleaseVersion::new(3, 0, 1),
                unknown: vec![],
                revision: 9,
            }
        );
    }

    #[test]
    fn unreadable_record_may_be_any_release() {
        let own = program(2, 1);
        let empty = wire::NodeRecord { format: record::FORMAT, node: None, ..Default::default() };
        let newer = wire::NodeRecord { format: record::FORMAT + 1, ..empty.clone() };
        for (unreadable, text) in [
            (record("/nodes/a", b"\xff".to_vec()), "/nodes/a"),
            (record("/nodes/a", vec![]), "not a record of ours"),
            (record("/nodes/a", empty.encode_to_vec()), "has no node"),
            (record("/nodes/a", newer.encode_to_vec()), "update the role server"),
            (node(true, None), "has not reported"),
            (node(true, Some("")), "is not a version"),
            (node(true, Some("unknown")), "is not a version"),
        ] {
            let seen = releases(&own, vec![node(true, Some("2.0.0")), unreadable]);
            let blocked = seen.check_candidacy(&own).unwrap_err();
            assert!(matches!(&blocked, ReleaseBlock::Unknown(why) if why.len() == 1), "{text}: {blocked:?}");
            assert!(blocked.to_string().contains(text), "{text}: {blocked}");
            assert_eq!(seen.check_exclusion(&own), Err(blocked));
        }
    }

    #[test]
    fn newest_release_campaigns_and_excludes_older_ones_when_gone() {
        let own = program(3, 2);
        let of = |versions: &[&str]| {
            releases(&own, versions.iter().map(|version| node(true, Some(version))).collect())
        };
        assert_eq!(of(&["3.0.0", "2.0.0"]).check_exclusion(&own), Ok(()));
        let newer = ReleaseBlock::Newer { highest: ReleaseVersion::new(3, 0, 1), own: own.release() };
        assert_eq!(of(&["3.0.0", "3.0.1", "1.0.0"]).check_candidacy(&own), Err(newer.clone()));
        assert_eq!(of(&["3.0.0", "3.0.1", "1.0.0"]).check_exclusion(&own), Err(newer));
        let old = of(&["1.9.9", "3.0.0"]);
        assert_eq!(old.check_candidacy(&own), Ok(()), "the newest controller is a candidate, and waits");
        let older = ReleaseBlock::Older {
            lowest: ReleaseVersion::new(1, 9, 9),
            required: ReleaseVersion::new(2, 0, 0),
        };
        assert_eq!(old.check_exclusion(&own), Err(older));
    }
}
