//! Who the members of an etcd cluster are, and changing that one member at a time.
//!
//! A new member first learns: it gets all that is kept without a vote, so that a cluster of one does not lose its
//! quorum to a second member that never comes up. When it has caught up, it is promoted. A member is removed by its id
//! and nothing else; names and addresses come back, ids do not.
//!
//! etcd refuses what would cost the quorum, as far as it can see; here its refusals are told apart, because each asks
//! for something else: to wait, to look at another member first, or not to do it at all.

use std::fmt;

use crate::etcd::client::{Client, EtcdError};
use crate::proto::etcdserverpb as wire;

/// A member's id, which etcd gave it for good. Shown as etcd's own tools show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{:x}", self.0)
    }
}

/// One member as the cluster knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub id: MemberId,
    /// The name it gave itself; empty until it has started once.
    pub name: String,
    /// Where the other members reach it.
    pub peer_urls: Vec<String>,
    /// Where clients reach it, as it says itself; none until it has started once.
    pub client_urls: Vec<String>,
    /// Whether it only learns, and does not vote.
    pub learner: bool,
    /// Whether it has started once. Not whether it runs.
    pub started: bool,
}

/// Why the members are as they were.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MemberError {
    /// There may be one learner at a time.
    #[error(
        "{doing} was refused by etcd, because too many members are learning already; promote or remove one first"
    )]
    TooManyLearners {
        /// What was being done, to what.
        doing: String,
    },
    /// The learner has not caught up; it will.
    #[error("{doing} was refused by etcd, because it has not caught up with the leader yet; try again later")]
    NotCaughtUp {
        /// What was being done, to what.
        doing: String,
    },
    /// It votes already.
    #[error("{doing} was refused by etcd, because it is no learner")]
    NotLearner {
        /// What was being done, to what.
        doing: String,
    },
    /// Some member does not answer the others.
    #[error(
        "{doing} was refused by etcd, because not every member is connected to the others; bring those back, or remove \
         one that is gone for good, then try again"
    )]
    Unhealthy {
        /// What was being done, to what.
        doing: String,
    },
    /// Those that would be left could not decide anything.
    #[error("{doing} was refused by etcd, because too few started members would be left for a quorum")]
    WouldLoseQuorum {
        /// What was being done, to what.
        doing: String,
    },
    /// There is no member of this id, or no more.
    #[error("{doing} failed, because there is no such member")]
    NotFound {
        /// What was being done, to what.
        doing: String,
    },
    /// A member with this peer address is there already.
    #[error("{doing} failed, because a member with this peer address is there already")]
    AlreadyThere {
        /// What was being done, to what.
        doing: String,
    },
    /// etcd did not do it, or nobody knows whether it did.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

impl Client {
    /// The members as the member that we are connected to knows them. etcd 3.4 answers this without a quorum, so the
    /// list may be an old one.
    pub async fn members(&self) -> Result<Vec<Member>, MemberError> {
        let mut cluster = self.cluster();
        let doing = "listing the members of etcd".to_owned();
        let listed = self
            .call(doing, wire::MemberListRequest {}, async |request| cluster.member_list(request).await)
            .await?;
        Ok(listed.members.into_iter().map(member).collect())
    }

    /// Adds a member that learns. It is to be started with the addresses of all members, and `existing` as the state
    /// of its cluster. Done twice, the second is [`MemberError::AlreadyThere`].
    pub async fn add_learner(&self, peer_urls: &[String]) -> Result<Member, MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("adding {} as a learning member", peer_urls.join(", "));
        let request = wire::MemberAddRequest { peer_ur_ls: peer_urls.to_vec(), is_learner: true };
        let added =
            self.call(doing.clone(), request, async |request| cluster.member_add(request).await).await;
        let added = added.map_err(|error| told(&doing, error))?;
        let added = added
            .member
            .ok_or_else(|| EtcdError::Refused { doing, said: "it names no member".to_owned() })?;
        Ok(member(added))
    }

    /// Gives a learner its vote.
    pub async fn promote(&self, id: MemberId) -> Result<(), MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("promoting member {id}");
        let request = wire::MemberPromoteRequest { id: id.0 };
        let done =
            self.call(doing.clone(), request, async |request| cluster.member_promote(request).await).await;
        done.map(drop).map_err(|error| told(&doing, error))
    }

    /// Removes a member for good: what it has on its disk is worth nothing from then on.
    pub async fn remove_member(&self, id: MemberId) -> Result<(), MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("removing member {id}");
        let request = wire::MemberRemoveRequest { id: id.0 };
        let done =
            self.call(doing.clone(), request, async |request| cluster.member_remove(request).await).await;
        done.map(drop).map_err(|error| told(&doing, error))
    }
}

fn member(member: wire::Member) -> Member {
    Member {
        id: MemberId(member.id),
        started: !member.name.is_empty(),
        name: member.name,
        peer_urls: member.peer_ur_ls,
        client_urls: member.client_ur_ls,
        learner: member.is_learner,
    }
}

/// etcd has one code for refusals of several kinds, so its text tells them apart (api/v3rpc/rpctypes/error.go of
/// etcd 3.4).
fn told(doing: &str, error: EtcdError) -> MemberError {
    let (EtcdError::Away { said, .. } | EtcdError::Refused { said, .. }) = &error else {
        return error.into();
    };
    let is = |text: &str| said.contains(text);
    let doing = doing.to_owned();
    if is("too many learner members") {
        MemberError::TooManyLearners { doing }
    } else if is("can only promote a learner member which is in sync") {
        MemberError::NotCaughtUp { doing }
    } else if is("can only promote a learner member") {
        MemberError::NotLearner { doing }
    } else if is("unhealthy cluster") {
        MemberError::Unhealthy { doing }
    } else if is("not enough started members") {
        MemberError::WouldLoseQuorum { doing }
    } else if is("member not found") {
        MemberError::NotFound { doing }
    } else if is("Peer URLs already exists") || is("member ID already exist") {
        MemberError::AlreadyThere { doing }
    } else {
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_apart_by_what_is_to_be_done() {
        let refused = |said: &str| EtcdError::Refused { doing: "x".to_owned(), said: said.to_owned() };
        let away = |said: &str| EtcdError::Away { doing: "x".to_owned(), said: said.to_owned() };
        for (error, told_as) in [
            (refused("etcdserver: too many learner members in cluster"), "TooManyLearners"),
            (
                refused("etcdserver: can only promote a learner member which is in sync with leader"),
                "NotCaughtUp",
            ),
            (refused("etcdserver: can only promote a learner member"), "NotLearner"),
            (away("etcdserver: unhealthy cluster"), "Unhealthy"),
            (
                refused("etcdserver: re-configuration failed due to not enough started members"),
                "WouldLoseQuorum",
            ),
            (refused("etcdserver: member not found"), "NotFound"),
            (refused("etcdserver: Peer URLs already exists"), "AlreadyThere"),
            (away("etcdserver: request timed out"), "Etcd"),
            (refused("etcdserver: permission denied"), "Etcd"),
        ] {
            let told = format!("{:?}", told("promoting member 1f", error));
            assert!(
                told.starts_with(&format!("{told_as} ")) || told.starts_with(&format!("{told_as}(")),
                "{told}"
            );
        }
        assert_eq!(MemberId(31).to_string(), "1f");
    }
}
