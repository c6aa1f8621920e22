//! etcd membership: add learner, promote, change the addresses, remove.
//!
//! Members change one at a time. A new member is a learner first: it gets all data without a vote, so that a cluster of
//! one does not lose its quorum to a second member that never comes up. When it has caught up, it is promoted. A member
//! is removed by its id alone: a name or an address may be used again, an id never.
//!
//! etcd rejects a change that would cost the quorum, as far as it can see. The rejections are distinguished here,
//! because each needs another reaction: to wait, to check another member first, or to give up.

use std::fmt;
use std::time::Duration;

use proto::etcdserverpb as wire;

use crate::client::{Client, EtcdError};

/// A member's id, which etcd assigned and never changes. Displayed as etcd's own tools display it.
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
    /// The member's id in etcd.
    pub id: MemberId,
    /// The name that the member chose; empty until it has started once.
    pub name: String,
    /// The addresses for the other members.
    pub peer_urls: Vec<String>,
    /// The addresses for clients, as the member reports them; empty until it has started once.
    pub client_urls: Vec<String>,
    /// Whether it is a learner, without a vote.
    pub learner: bool,
    /// Whether it has ever started. Not whether it runs.
    pub started: bool,
}

/// Why the membership was not changed or not listed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MemberError {
    /// etcd allows one learner at a time.
    #[error(
        "{operation} was refused by etcd, because too many members are learning already; promote or remove one first"
    )]
    TooManyLearners {
        /// The operation and its object.
        operation: String,
    },
    /// The learner has not caught up yet.
    #[error(
        "{operation} was refused by etcd, because it has not caught up with the leader yet; try again later"
    )]
    NotCaughtUp {
        /// The operation and its object.
        operation: String,
    },
    /// The member has a vote already.
    #[error("{operation} was refused by etcd, because it is no learner")]
    NotLearner {
        /// The operation and its object.
        operation: String,
    },
    /// Some member does not respond to the others.
    #[error(
        "{operation} was refused by etcd, because not every member is connected to the others; bring those back, or remove \
         one that is gone for good, then try again"
    )]
    Unhealthy {
        /// The operation and its object.
        operation: String,
    },
    /// The remaining members could not form a quorum.
    #[error("{operation} was refused by etcd, because too few started members would be left for a quorum")]
    WouldLoseQuorum {
        /// The operation and its object.
        operation: String,
    },
    /// No member has this id, or it was removed.
    #[error("{operation} failed, because there is no such member")]
    NotFound {
        /// The operation and its object.
        operation: String,
    },
    /// A member with this peer address exists already.
    #[error("{operation} failed, because a member with this peer address is there already")]
    AlreadyExists {
        /// The operation and its object.
        operation: String,
    },
    /// etcd did not do it, or the outcome is unknown.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// After this time etcd gives a member with the same addresses another number.
const MEMBER_ID_STEP: Duration = Duration::from_secs(1);

impl Client {
    /// The members as the connected member knows them. etcd 3.4 responds without a quorum, so the list may be outdated.
    pub async fn list_members(&self) -> Result<Vec<Member>, MemberError> {
        let mut cluster = self.cluster();
        let doing = "listing the members of etcd".to_owned();
        let listed = self
            .call_unary(doing, wire::MemberListRequest {}, async |request| cluster.member_list(request).await)
            .await?;
        Ok(listed.members.into_iter().map(decode_member).collect())
    }

    /// Adds a learner. It must be started with the addresses of all members, and with `existing` as the state of its
    /// cluster. A second call with the same addresses is [`MemberError::AlreadyExists`].
    ///
    /// etcd derives the number of a member from its addresses and the second. So it refuses a member that was added and
    /// removed in this second, with "member not found"; then the call is made once more in the next second.
    pub async fn add_learner(&self, peer_urls: &[String]) -> Result<Member, MemberError> {
        let added = match self.add_member(peer_urls).await {
            Err(MemberError::NotFound { .. }) => {
                tokio::time::sleep(MEMBER_ID_STEP).await;
                self.add_member(peer_urls).await?
            }
            added => added?,
        };
        Ok(decode_member(added))
    }

    async fn add_member(&self, peer_urls: &[String]) -> Result<wire::Member, MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("adding {} as a learning member", peer_urls.join(", "));
        let request = wire::MemberAddRequest { peer_ur_ls: peer_urls.to_vec(), is_learner: true };
        let added =
            self.call_unary(doing.clone(), request, async |request| cluster.member_add(request).await).await;
        let added = added.map_err(|error| classify_member_error(&doing, error))?;
        let unnamed = || EtcdError::Rejected { operation: doing, message: "it names no member".to_owned() };
        Ok(added.member.ok_or_else(unnamed)?)
    }

    /// Gives a learner its vote.
    pub async fn promote_learner(&self, id: MemberId) -> Result<(), MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("promoting member {id}");
        let request = wire::MemberPromoteRequest { id: id.0 };
        let done = self
            .call_unary(doing.clone(), request, async |request| cluster.member_promote(request).await)
            .await;
        done.map(drop).map_err(|error| classify_member_error(&doing, error))
    }

    /// Replaces the addresses at which the other members connect to this one. It keeps its number, its vote and its data.
    pub async fn update_member(&self, id: MemberId, peer_urls: &[String]) -> Result<(), MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("giving member {id} the addresses {}", peer_urls.join(", "));
        let request = wire::MemberUpdateRequest { id: id.0, peer_ur_ls: peer_urls.to_vec() };
        let done = self
            .call_unary(doing.clone(), request, async |request| cluster.member_update(request).await)
            .await;
        done.map(drop).map_err(|error| classify_member_error(&doing, error))
    }

    /// Removes a member for good: the data on its disk is worthless from then on.
    pub async fn remove_member(&self, id: MemberId) -> Result<(), MemberError> {
        let mut cluster = self.cluster();
        let doing = format!("removing member {id}");
        let request = wire::MemberRemoveRequest { id: id.0 };
        let done = self
            .call_unary(doing.clone(), request, async |request| cluster.member_remove(request).await)
            .await;
        done.map(drop).map_err(|error| classify_member_error(&doing, error))
    }
}

fn decode_member(member: wire::Member) -> Member {
    Member {
        id: MemberId(member.id),
        started: !member.name.is_empty(),
        name: member.name,
        peer_urls: member.peer_ur_ls,
        client_urls: member.client_ur_ls,
        learner: member.is_learner,
    }
}

/// etcd has one code for rejections of several kinds; its text distinguishes them (api/v3rpc/rpctypes/error.go of etcd
/// 3.4).
fn classify_member_error(doing: &str, error: EtcdError) -> MemberError {
    let (EtcdError::Unavailable { message, .. } | EtcdError::Rejected { message, .. }) = &error else {
        return error.into();
    };
    let is = |text: &str| message.contains(text);
    let doing = doing.to_owned();
    if is("too many learner members") {
        MemberError::TooManyLearners { operation: doing }
    } else if is("can only promote a learner member which is in sync") {
        MemberError::NotCaughtUp { operation: doing }
    } else if is("can only promote a learner member") {
        MemberError::NotLearner { operation: doing }
    } else if is("unhealthy cluster") {
        MemberError::Unhealthy { operation: doing }
    } else if is("not enough started members") {
        MemberError::WouldLoseQuorum { operation: doing }
    } else if is("member not found") {
        MemberError::NotFound { operation: doing }
    } else if is("Peer URLs already exists") || is("member ID already exist") {
        MemberError::AlreadyExists { operation: doing }
    } else {
        error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_errors_are_classified_by_remedy() {
        let refused =
            |text: &str| EtcdError::Rejected { operation: "x".to_owned(), message: text.to_owned() };
        let away =
            |text: &str| EtcdError::Unavailable { operation: "x".to_owned(), message: text.to_owned() };
        for (error, notified_as) in [
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
            (refused("etcdserver: Peer URLs already exists"), "AlreadyExists"),
            (away("etcdserver: request timed out"), "Etcd"),
            (refused("etcdserver: permission denied"), "Etcd"),
        ] {
            let message = format!("{:?}", classify_member_error("promoting member 1f", error));
            assert!(
                message.starts_with(&format!("{notified_as} "))
                    || message.starts_with(&format!("{notified_as}(")),
                "{message}"
            );
        }
        assert_eq!(MemberId(31).to_string(), "1f");
    }
}
