//! Which releases the controllers of a cluster have.
//!
//! The safe answer to "does anything older run?" is not "none that is known". A record that cannot be read, and a
//! controller that has not said what it runs, may be any release: for whoever asks, there is an older one *and* a newer
//! one, until somebody sees to it. The same record is harmless to all who do not ask.
//!
//! A record says what its node said last, which may be what it was before it was updated. Two rules make that safe: a
//! node serves nothing before its record says the release it is ([`gate`](crate::reconciler::gate)), and what was decided
//! by a look at the records is written only if none was written since ([`leadership`](crate::reconciler::leadership)).
//!
//! Of a record only that is read which is asked here, so that a fault in another part of it stands in nobody's way.

use std::fmt;

use crate::etcd::client::{Listing, Record};
use crate::etcd::record;
use crate::proto::curator::v1 as wire;
use crate::reconciler::program::Program;
use crate::reconciler::release::{Release, Version};

/// What a record says of a node that is a controller, or may be one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Controller {
    /// It runs this release, or ran it when it said so.
    Of(Release),
    /// It may run any release; why that is so, as a sentence.
    Unknown(String),
}

/// The releases of all controllers at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Releases {
    /// The lowest that is known.
    pub lowest: Release,
    /// The highest that is known.
    pub highest: Release,
    /// Of those that may run any, why.
    pub unknown: Vec<String>,
    /// The store's revision at that moment.
    pub revision: i64,
}

/// Why something waits until nodes have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Nodes that may run any release.
    Unknown(Vec<String>),
    /// A controller is newer than this program, which leaves the objects to it.
    Newer {
        /// The newest.
        highest: Release,
        /// That of this program.
        own: Release,
    },
    /// A controller is so old that the objects would break its API server.
    Older {
        /// The oldest.
        lowest: Release,
        /// The oldest that would do.
        wanted: Release,
    },
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why) => write!(
                f,
                "nobody knows the release of every controller of Kubernetes: {}; repair or remove these nodes",
                why.join("; ")
            ),
            Self::Newer { highest, own } => write!(
                f,
                "a controller has release {highest}, and this one {own}: the objects are left to the newest"
            ),
            Self::Older { lowest, wanted } => write!(
                f,
                "a controller has release {lowest}, and with the objects of this one API servers need {wanted} or later: \
                 update it, or take its role"
            ),
        }
    }
}

/// What a record says of its node; `None` of one that is no controller.
#[must_use]
pub fn controller(record: &Record) -> Option<Controller> {
    let unknown = |why: String| Some(Controller::Unknown(why));
    let read = record::decode(&record.key, &record.value, |node: &wire::NodeRecord| node.format);
    let node = match read {
        Ok(wire::NodeRecord { node: Some(node), .. }) => node,
        Ok(_) => return unknown(format!("the record {} has no node", record.key)),
        Err(error) => return unknown(error.to_string()),
    };
    // One that says nothing of roles has none: that is how a node without any is written.
    if !node.roles.is_some_and(|roles| roles.kubernetes_controller) {
        return None;
    }
    match node.status {
        None => unknown(format!("the node {} has not said which release it runs", node.node_id)),
        Some(status) => match status.version.parse::<Version>() {
            Ok(version) => Some(Controller::Of(version.release())),
            Err(error) => unknown(format!("the node {} said that its version is {error}", node.node_id)),
        },
    }
}

impl Releases {
    /// Those of these records, and of the program that looks: it is here, whatever is said of it.
    #[must_use]
    pub fn of(program: &Program, listing: &Listing) -> Self {
        let own = program.release();
        let mut releases =
            Self { lowest: own, highest: own, unknown: Vec::new(), revision: listing.revision };
        for controller in listing.records.iter().filter_map(controller) {
            match controller {
                Controller::Of(release) => {
                    releases.lowest = releases.lowest.min(release);
                    releases.highest = releases.highest.max(release);
                }
                Controller::Unknown(why) => releases.unknown.push(why),
            }
        }
        releases
    }

    /// Whether this program may stand for election: no controller is newer.
    pub fn may_stand(&self, program: &Program) -> Result<(), Blocked> {
        let own = program.release();
        if self.highest > own {
            Err(Blocked::Newer { highest: self.highest, own })
        } else if self.unknown.is_empty() {
            Ok(())
        } else {
            Err(Blocked::Unknown(self.unknown.clone()))
        }
    }

    /// Whether no API server runs that this program's objects would break, nor one that needs newer ones.
    pub fn may_exclude(&self, program: &Program) -> Result<(), Blocked> {
        self.may_stand(program)?;
        let wanted = program.breaks_api_servers_below;
        if self.lowest < wanted { Err(Blocked::Older { lowest: self.lowest, wanted }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn program(release: u32, breaks_below: u32) -> Program {
        Program {
            version: Release::new(release, 0, 0).into(),
            needs_objects_of: Release::new(1, 0, 0),
            breaks_api_servers_below: Release::new(breaks_below, 0, 0),
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
        let stored = wire::NodeRecord { format: record::FORMAT, node: Some(node), ticket_id: String::new() };
        record("/nodes/shepherd-1", stored.encode_to_vec())
    }

    fn releases(own: &Program, records: Vec<Record>) -> Releases {
        Releases::of(own, &Listing { records, revision: 9 })
    }

    #[test]
    fn only_controllers_count_and_the_own_release_always_does() {
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
            Releases {
                lowest: Release::new(1, 5, 0),
                highest: Release::new(3, 0, 1),
                unknown: vec![],
                revision: 9,
            }
        );
    }

    #[test]
    fn what_cannot_be_read_may_be_any_release() {
        let own = program(2, 1);
        let empty = wire::NodeRecord { format: record::FORMAT, node: None, ticket_id: String::new() };
        let newer = wire::NodeRecord { format: record::FORMAT + 1, ..empty.clone() };
        for (unreadable, said) in [
            (record("/nodes/a", b"\xff".to_vec()), "/nodes/a"),
            (record("/nodes/a", vec![]), "no record of ours"),
            (record("/nodes/a", empty.encode_to_vec()), "has no node"),
            (record("/nodes/a", newer.encode_to_vec()), "update the role server"),
            (node(true, None), "has not said"),
            (node(true, Some("")), "is no version"),
            (node(true, Some("unknown")), "is no version"),
        ] {
            let seen = releases(&own, vec![node(true, Some("2.0.0")), unreadable]);
            let blocked = seen.may_stand(&own).unwrap_err();
            assert!(matches!(&blocked, Blocked::Unknown(why) if why.len() == 1), "{said}: {blocked:?}");
            assert!(blocked.to_string().contains(said), "{said}: {blocked}");
            assert_eq!(seen.may_exclude(&own), Err(blocked));
        }
    }

    #[test]
    fn newest_stands_and_excludes_once_nothing_older_is_left() {
        let own = program(3, 2);
        let of = |versions: &[&str]| {
            releases(&own, versions.iter().map(|version| node(true, Some(version))).collect())
        };
        assert_eq!(of(&["3.0.0", "2.0.0"]).may_exclude(&own), Ok(()));
        let newer = Blocked::Newer { highest: Release::new(3, 0, 1), own: own.release() };
        assert_eq!(of(&["3.0.0", "3.0.1", "1.0.0"]).may_stand(&own), Err(newer.clone()));
        assert_eq!(of(&["3.0.0", "3.0.1", "1.0.0"]).may_exclude(&own), Err(newer));
        let old = of(&["1.9.9", "3.0.0"]);
        assert_eq!(old.may_stand(&own), Ok(()), "whoever is newest stands, and waits");
        let older = Blocked::Older { lowest: Release::new(1, 9, 9), wanted: Release::new(2, 0, 0) };
        assert_eq!(old.may_exclude(&own), Err(older));
    }
}
