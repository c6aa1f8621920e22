//! What a role server finds wrong with how it runs on its machine.
//!
//! A finding does not end the heartbeats, and no loop acts on it: an operator has to. It is part of the release report,
//! is stored with it, and is a note of `why` until the role server no longer reports it. Most are an issue, too.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Most findings that are stored of one machine.
pub const MAX_FINDINGS: usize = 16;

/// What is wrong with the host. The names are stored and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostFindingKind {
    /// Programs would end with the role server, or would keep it from starting again.
    WorkloadsEndWithAgent,
    /// The unit file was edited, so that releases do not replace it.
    UnitEdited,
    /// A setting of the unit is inherited by programs that outlive it.
    UnitSetting,
    /// The stored cgroup driver is not that of the pods that run. The role server keeps theirs.
    PodCgroups,
    /// The curator of the machine had more connections than places.
    ConnectionsTurnedAway,
    /// A file system that the role server or its programs write to is nearly full.
    StorageLow,
    /// The machine has pinned no signing keys, although its shepherd sends some. The shepherd finds that.
    UnpinnedKeys,
    /// The machine refused the release in its newest order, because of its signature. The shepherd finds that.
    ReleaseRefused,
    /// The machine refused a declaration that gives root there, because no pinned key signed it.
    DeclarationRefused,
    /// One that only a newer release knows.
    #[serde(other)]
    Other,
}

impl HostFindingKind {
    /// The name in messages and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WorkloadsEndWithAgent => "workloads-end-with-agent",
            Self::UnitEdited => "unit-edited",
            Self::UnitSetting => "unit-setting",
            Self::PodCgroups => "pod-cgroups",
            Self::ConnectionsTurnedAway => "connections-turned-away",
            Self::StorageLow => "storage-low",
            Self::UnpinnedKeys => "unpinned-keys",
            Self::ReleaseRefused => "release-refused",
            Self::DeclarationRefused => "declaration-refused",
            Self::Other => "other",
        }
    }

    /// The kind of that name; [`HostFindingKind::Other`] for one that this release does not know.
    #[must_use]
    pub fn parse(name: &str) -> Self {
        let known = [
            Self::WorkloadsEndWithAgent,
            Self::UnitEdited,
            Self::UnitSetting,
            Self::PodCgroups,
            Self::ConnectionsTurnedAway,
            Self::StorageLow,
            Self::UnpinnedKeys,
            Self::ReleaseRefused,
            Self::DeclarationRefused,
        ];
        known.into_iter().find(|kind| kind.as_str() == name).unwrap_or(Self::Other)
    }
}

impl fmt::Display for HostFindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One thing that is wrong with the host of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFinding {
    /// Which kind of thing is wrong.
    pub kind: HostFindingKind,
    /// The finding as a sentence, with what to do.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_finding_of_a_newer_release_can_be_read() {
        for kind in [
            HostFindingKind::WorkloadsEndWithAgent,
            HostFindingKind::UnitEdited,
            HostFindingKind::UnitSetting,
            HostFindingKind::PodCgroups,
            HostFindingKind::ConnectionsTurnedAway,
            HostFindingKind::StorageLow,
            HostFindingKind::UnpinnedKeys,
            HostFindingKind::ReleaseRefused,
            HostFindingKind::DeclarationRefused,
        ] {
            assert_eq!(HostFindingKind::parse(kind.as_str()), kind);
            let finding = HostFinding { kind, message: "m".to_owned() };
            let text = serde_json::to_string(&finding).unwrap();
            assert_eq!(text, format!(r#"{{"kind":"{kind}","message":"m"}}"#));
            assert_eq!(serde_json::from_str::<HostFinding>(&text).unwrap(), finding);
        }
        assert_eq!(HostFindingKind::parse("later"), HostFindingKind::Other);
        let later: HostFinding = serde_json::from_str(r#"{"kind":"later","message":"m"}"#).unwrap();
        assert_eq!(later.kind, HostFindingKind::Other);
    }
}
