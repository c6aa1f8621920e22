//! Plans the replacement of the cluster's authority: trust, sign, drop, without rejecting anybody.
//!
//! The stages are those of the record ([`AuthorityRing`]). Each of them ends once the nodes report that they have followed.
//! What they report are facts: which authorities they trust, and which one signed what they show.
//!
//! | stage | statement | ends once |
//! | --- | --- | --- |
//! | trusted | the old authority, then the new one | all nodes trust both, and each running etcd was started with both |
//! | signing | the new authority, then the old one | all that nodes show is signed by the new one |
//! | dropping | the new authority alone | no node and no running etcd trusts the old one |
//!
//! etcd reads the authorities only at its start, so its members restart in turn before the new authority signs, and again
//! after the old one is dropped. Two nodes are never further apart than one stage, and accept each other:
//!
//! | first node | second node | the first accepts the second, because | the second accepts the first, because |
//! | --- | --- | --- | --- |
//! | the old one alone | *trusted* | the old one signs for both | the old one is still trusted |
//! | *trusted* | *signing* | it trusts the new one already | the old one is still trusted |
//! | *signing* | *dropping* | the new one signs for both | nothing is shown any more that the old one signed |
//!
//! # Who is waited for
//!
//! Nodes that are up. A consensus member blocks the replacement however long it is silent: its etcd would be cut off. Any
//! other node that is silent for [`ABSENT_AFTER`] blocks nothing. When it returns, it follows the successions that come with
//! the statement, and gets a certificate by its key. A node of a release that reports no authorities blocks the replacement
//! until it is updated.
//!
//! # Why a removal begins one
//!
//! The authority's key is in etcd, so a former consensus member has it on its disk. Unless the disk is known to be wiped,
//! the authority is replaced when the membership ends: the new key is made after etcd has removed the member, which
//! receives nothing from then on. If a replacement is under way, the former member has the key of the next authority, too.
//! So the end of that replacement begins another one.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use curator_client::authority_ring::{AuthorityRing, ReplacementStage, ReplacementStep};
use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;
use proto::curator::v1 as wire;

/// A node that is no consensus member and is silent for this long does not block a replacement.
pub(crate) const ABSENT_AFTER: Duration = Duration::from_hours(1);

/// A node, and for how long this leader has received nothing from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeView<'a> {
    /// The node's record, with the status that it reported last.
    pub(crate) node: &'a Node,
    /// Time since its last heartbeat, or since this leader began to receive heartbeats.
    pub(crate) silence: Duration,
}

/// What a node lacks for the end of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    /// It has not reported which authorities it uses.
    Report,
    /// It does not trust the new authority.
    Trust,
    /// Its etcd was started without the new authority.
    EtcdRestart,
    /// Its newest statement is by the old authority.
    Statement,
    /// The certificate that it shows is by the old authority.
    NodeCertificate,
    /// The certificate that its curator shows is by the old authority.
    CuratorCertificate,
    /// The peer certificate of its etcd is by the old authority.
    PeerCertificate,
    /// It still trusts the old authority.
    Distrust,
    /// Its etcd still trusts the old authority.
    EtcdDistrust,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Report => "it has not reported which authorities it uses: update its role server",
            Self::Trust => "it does not trust the new authority yet",
            Self::EtcdRestart => "its etcd has not restarted with the new authority yet",
            Self::Statement => "it has no statement of the new authority yet",
            Self::NodeCertificate => "its certificate is still by the old authority",
            Self::CuratorCertificate => "its curator's certificate is still by the old authority",
            Self::PeerCertificate => "the certificate of its etcd is still by the old authority",
            Self::Distrust => "it still trusts the old authority",
            Self::EtcdDistrust => "its etcd has not restarted without the old authority yet",
        })
    }
}

/// What the leader must do about a replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReplacementPlan {
    /// The authority is not being replaced.
    Idle,
    /// Wait for these nodes. Empty: no consensus member is known.
    Wait(BTreeMap<NodeId, Lack>),
    /// End the stage by this step.
    Step(ReplacementStep),
    /// End the replacement, and begin the next one by the same write.
    EndAndBegin,
}

/// Plans the next step of the replacement in this record.
pub(crate) fn plan_replacement(ring: &AuthorityRing, nodes: &[NodeView<'_>]) -> ReplacementPlan {
    let Some(replacement) = &ring.replacement else { return ReplacementPlan::Idle };
    let waits_for: BTreeMap<NodeId, Lack> = nodes
        .iter()
        .filter(|view| is_awaited(view))
        .filter_map(|view| Some((view.node.id, find_lack(ring, &replacement.stage, view.node)?)))
        .collect();
    let has_member = nodes.iter().any(|view| view.node.state == NodeState::Up && is_member(view.node));
    if !has_member || !waits_for.is_empty() {
        return ReplacementPlan::Wait(waits_for);
    }
    ReplacementPlan::Step(match replacement.stage {
        ReplacementStage::Trusted { .. } => ReplacementStep::Sign,
        ReplacementStage::Signing { .. } => ReplacementStep::Drop,
        ReplacementStage::Dropping { .. } if replacement.again => return ReplacementPlan::EndAndBegin,
        ReplacementStage::Dropping { .. } => ReplacementStep::End,
    })
}

/// What the end of a membership does to the authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemovalEffect {
    /// Nothing: it is replaced once more already.
    None,
    /// Nothing, because there is no statement yet, and nodes could not follow.
    Impossible,
    /// Begin to replace it.
    Begin,
    /// Let the end of the replacement that is under way begin the next one.
    Repeat,
}

/// Decides what the end of a membership does to the authorities of this record.
pub(crate) fn plan_removal_effect(ring: &AuthorityRing, has_statement: bool) -> RemovalEffect {
    match &ring.replacement {
        None if has_statement => RemovalEffect::Begin,
        None => RemovalEffect::Impossible,
        Some(replacement) if replacement.again => RemovalEffect::None,
        Some(_) => RemovalEffect::Repeat,
    }
}

/// Whether this change of a node's record ends its membership. `after` is `None` if the record is deleted.
pub(crate) fn ends_membership(before: &Node, after: Option<&Node>) -> bool {
    is_member(before) && !after.is_some_and(is_member)
}

fn is_member(node: &Node) -> bool {
    node.roles.consensus_member.is_some()
}

fn is_awaited(view: &NodeView<'_>) -> bool {
    view.node.state == NodeState::Up && (is_member(view.node) || view.silence < ABSENT_AFTER)
}

/// The first thing that this node lacks for the end of the stage; `None` if it has followed.
fn find_lack(ring: &AuthorityRing, stage: &ReplacementStage, node: &Node) -> Option<Lack> {
    let Some(has) = node.status.as_ref().and_then(|status| status.authority.as_ref()) else {
        return Some(Lack::Report);
    };
    let signer = ring.signer.anchor().fingerprint();
    let followed = match stage {
        ReplacementStage::Trusted { next } => {
            let both = [signer, next.anchor().fingerprint()];
            let has_both = |list: &[Vec<u8>]| both.iter().all(|one| list.contains(one));
            vec![(has_both(&has.trusted), Lack::Trust), (has_both(&has.etcd_trusted), Lack::EtcdRestart)]
        }
        ReplacementStage::Signing { .. } => vec![
            (has.trusted.first() == Some(&signer), Lack::Statement),
            (has.node_issuer == signer, Lack::NodeCertificate),
            (has.curator_issuer == signer, Lack::CuratorCertificate),
            (has.peer_issuer == signer, Lack::PeerCertificate),
            (has.etcd_trusted.contains(&signer), Lack::EtcdRestart),
        ],
        ReplacementStage::Dropping { .. } => vec![
            (has.trusted == [signer.clone()], Lack::Distrust),
            (has.etcd_trusted == [signer], Lack::EtcdDistrust),
        ],
    };
    followed
        .into_iter()
        .filter(|(followed, _)| !followed)
        .map(|(_, lack)| lack)
        .find(|lack| is_member(node) || !concerns_members_alone(*lack))
}

const fn concerns_members_alone(lack: Lack) -> bool {
    match lack {
        Lack::EtcdRestart | Lack::CuratorCertificate | Lack::PeerCertificate | Lack::EtcdDistrust => true,
        Lack::Report | Lack::Trust | Lack::Statement | Lack::NodeCertificate | Lack::Distrust => false,
    }
}

/// The replacement as the API shows it; `None` if there is none.
pub(crate) fn describe_replacement(
    ring: &AuthorityRing,
    nodes: &[NodeView<'_>],
) -> Option<wire::AuthorityRotation> {
    let replacement = ring.replacement.as_ref()?;
    let waits_for = match plan_replacement(ring, nodes) {
        ReplacementPlan::Wait(waits_for) => waits_for,
        ReplacementPlan::Idle | ReplacementPlan::Step(_) | ReplacementPlan::EndAndBegin => BTreeMap::new(),
    };
    let waits_for = waits_for
        .into_iter()
        .map(|(node, lack)| wire::AuthorityWait { node_id: node.to_string(), reason: lack.to_string() });
    Some(wire::AuthorityRotation {
        stage: replacement.stage.to_wire().into(),
        since_ms: replacement.since.timestamp_millis(),
        waits_for: waits_for.collect(),
    })
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{at, authority, authority_of, member, node_id, up};

    use super::*;

    /// The ring in which authority 5 replaces authority 1, after these steps.
    fn ring(steps: &[ReplacementStep]) -> AuthorityRing {
        let begun = AuthorityRing::new(authority(1)).begin(authority_of(1, 5), at(0)).unwrap().unwrap();
        steps.iter().fold(begun, |ring, step| ring.apply_step(*step, at(0)).unwrap())
    }

    fn prints(authorities: &[u8]) -> Vec<Vec<u8>> {
        authorities.iter().map(|number| print(*number)).collect()
    }

    fn print(number: u8) -> Vec<u8> {
        authority_of(1, number).anchor().fingerprint()
    }

    /// What a member reports: what it trusts, what signed its certificates, and what its etcd trusts.
    fn report(trusted: &[u8], issuers: [u8; 3], etcd: &[u8]) -> wire::AuthorityStatus {
        let [node_issuer, curator_issuer, peer_issuer] = issuers.map(print);
        wire::AuthorityStatus {
            trusted: prints(trusted),
            node_issuer,
            curator_issuer,
            peer_issuer,
            etcd_trusted: prints(etcd),
        }
    }

    /// What a node without etcd reports.
    fn plain(trusted: &[u8], issuer: u8) -> wire::AuthorityStatus {
        wire::AuthorityStatus {
            trusted: prints(trusted),
            node_issuer: print(issuer),
            ..wire::AuthorityStatus::default()
        }
    }

    fn reporting(mut node: Node, report: Option<wire::AuthorityStatus>) -> Node {
        if let Some(status) = &mut node.status {
            status.authority = report;
        }
        node
    }

    fn plan(ring: &AuthorityRing, nodes: &[(&Node, Duration)]) -> ReplacementPlan {
        let views: Vec<NodeView<'_>> =
            nodes.iter().map(|(node, silence)| NodeView { node, silence: *silence }).collect();
        plan_replacement(ring, &views)
    }

    fn waits(nodes: &[(u8, Lack)]) -> ReplacementPlan {
        ReplacementPlan::Wait(nodes.iter().map(|(number, lack)| (node_id(*number), *lack)).collect())
    }

    const SIGN: ReplacementStep = ReplacementStep::Sign;
    const DROP: ReplacementStep = ReplacementStep::Drop;
    const END: ReplacementStep = ReplacementStep::End;

    #[test]
    fn each_stage_ends_once_the_member_has_followed() {
        let (trusted, signing, dropping) = (ring(&[]), ring(&[SIGN]), ring(&[SIGN, DROP]));
        let wait = |lack| waits(&[(1, lack)]);
        for (what, ring, report, expected) in [
            ("an old release", &trusted, None, wait(Lack::Report)),
            ("nothing yet", &trusted, Some(report(&[1], [1; 3], &[1])), wait(Lack::Trust)),
            ("its statement", &trusted, Some(report(&[1, 5], [1; 3], &[1])), wait(Lack::EtcdRestart)),
            ("its etcd alone", &trusted, Some(report(&[1], [1; 3], &[1, 5])), wait(Lack::Trust)),
            ("the new one alone", &trusted, Some(report(&[5], [1; 3], &[5])), wait(Lack::Trust)),
            ("both", &trusted, Some(report(&[1, 5], [1; 3], &[5, 1])), ReplacementPlan::Step(SIGN)),
            ("no statement", &signing, Some(report(&[1, 5], [1; 3], &[1, 5])), wait(Lack::Statement)),
            ("none renewed", &signing, Some(report(&[5, 1], [1; 3], &[1, 5])), wait(Lack::NodeCertificate)),
            ("one", &signing, Some(report(&[5, 1], [5, 1, 1], &[1, 5])), wait(Lack::CuratorCertificate)),
            ("two", &signing, Some(report(&[5, 1], [5, 5, 1], &[1, 5])), wait(Lack::PeerCertificate)),
            ("old etcd", &signing, Some(report(&[5, 1], [5; 3], &[1])), wait(Lack::EtcdRestart)),
            ("all", &signing, Some(report(&[5, 1], [5; 3], &[1, 5])), ReplacementPlan::Step(DROP)),
            ("trusts both", &dropping, Some(report(&[5, 1], [5; 3], &[1, 5])), wait(Lack::Distrust)),
            ("etcd too", &dropping, Some(report(&[5], [5; 3], &[5, 1])), wait(Lack::EtcdDistrust)),
            ("done", &dropping, Some(report(&[5], [5; 3], &[5])), ReplacementPlan::Step(END)),
        ] {
            let node = reporting(member(1), report);
            // However long it is silent.
            for silence in [Duration::ZERO, ABSENT_AFTER * 100] {
                assert_eq!(plan(ring, &[(&node, silence)]), expected, "{what}");
            }
        }
    }

    #[test]
    fn node_without_etcd_follows_with_its_statement_and_its_certificate() {
        let followed = |steps: &[ReplacementStep]| {
            let report = match steps {
                [] => report(&[1, 5], [1; 3], &[1, 5]),
                [_] => report(&[5, 1], [5; 3], &[1, 5]),
                _ => report(&[5], [5; 3], &[5]),
            };
            reporting(member(1), Some(report))
        };
        let cases: [(&[ReplacementStep], wire::AuthorityStatus, ReplacementPlan); 7] = [
            (&[], plain(&[1], 1), waits(&[(2, Lack::Trust)])),
            (&[], plain(&[1, 5], 1), ReplacementPlan::Step(SIGN)),
            (&[SIGN], plain(&[1, 5], 1), waits(&[(2, Lack::Statement)])),
            (&[SIGN], plain(&[5, 1], 1), waits(&[(2, Lack::NodeCertificate)])),
            (&[SIGN], plain(&[5, 1], 5), ReplacementPlan::Step(DROP)),
            (&[SIGN, DROP], plain(&[5, 1], 5), waits(&[(2, Lack::Distrust)])),
            (&[SIGN, DROP], plain(&[5], 5), ReplacementPlan::Step(END)),
        ];
        for (steps, report, expected) in cases {
            let (own, node) = (followed(steps), reporting(up(2), Some(report)));
            let planned = plan(&ring(steps), &[(&own, Duration::ZERO), (&node, Duration::ZERO)]);
            assert_eq!(planned, expected, "{steps:?}");
        }
    }

    #[test]
    fn absent_node_blocks_nothing_unless_it_is_a_member() {
        let second = Duration::from_secs(1);
        let own = reporting(member(1), Some(report(&[1, 5], [1; 3], &[1, 5])));
        let (silent, lost) = (reporting(up(2), Some(plain(&[1], 1))), reporting(member(3), None));
        let (never, out) = (Node { status: None, ..up(4) }, Node { state: NodeState::Standby, ..up(5) });
        let plan = |others: &[(&Node, Duration)]| {
            let nodes = [&[(&own, Duration::ZERO)][..], others].concat();
            plan(&ring(&[]), &nodes)
        };
        assert_eq!(plan(&[(&silent, ABSENT_AFTER.saturating_sub(second))]), waits(&[(2, Lack::Trust)]));
        assert_eq!(plan(&[(&silent, ABSENT_AFTER)]), ReplacementPlan::Step(SIGN));
        assert_eq!(plan(&[(&never, second)]), waits(&[(4, Lack::Report)]));
        assert_eq!(plan(&[(&never, ABSENT_AFTER)]), ReplacementPlan::Step(SIGN));
        assert_eq!(plan(&[(&lost, ABSENT_AFTER * 9)]), waits(&[(3, Lack::Report)]));
        assert_eq!(plan(&[(&out, second)]), ReplacementPlan::Step(SIGN), "it is not up");
        let both = plan(&[(&silent, second), (&lost, second)]);
        assert_eq!(both, waits(&[(2, Lack::Trust), (3, Lack::Report)]));
    }

    #[test]
    fn end_begins_the_next_replacement_if_a_member_was_removed_meanwhile() {
        type Stage = (&'static [ReplacementStep], &'static [u8], [u8; 3], &'static [u8]);
        let stages: [Stage; 3] = [
            (&[], &[1, 5], [1; 3], &[1, 5]),
            (&[SIGN], &[5, 1], [5; 3], &[1, 5]),
            (&[SIGN, DROP], &[5], [5; 3], &[5]),
        ];
        for (steps, trusted, issuers, etcd) in stages {
            let ring = ring(steps);
            let node = reporting(member(1), Some(report(trusted, issuers, etcd)));
            let plan = |ring: &AuthorityRing| plan(ring, &[(&node, Duration::ZERO)]);
            let repeated = ring.repeat().unwrap();
            let expected = match plan(&ring) {
                ReplacementPlan::Step(END) => ReplacementPlan::EndAndBegin,
                other => other,
            };
            assert_eq!(plan(&repeated), expected, "{steps:?}");
            for has_statement in [false, true] {
                assert_eq!(plan_removal_effect(&ring, has_statement), RemovalEffect::Repeat);
                assert_eq!(plan_removal_effect(&repeated, has_statement), RemovalEffect::None);
            }
        }
        let idle = AuthorityRing::new(authority(1));
        assert_eq!(plan_removal_effect(&idle, true), RemovalEffect::Begin);
        assert_eq!(plan_removal_effect(&idle, false), RemovalEffect::Impossible);
    }

    #[test]
    fn membership_ends_with_the_role_or_with_the_record() {
        for (what, before, after, expected) in [
            ("it stays", member(1), Some(member(1)), false),
            ("its role is taken", member(1), Some(up(1)), true),
            ("it is deleted", member(1), None, true),
            ("it becomes one", up(1), Some(member(1)), false),
            ("it was none", up(1), Some(up(1)), false),
            ("it was none, and is deleted", up(1), None, false),
        ] {
            assert_eq!(ends_membership(&before, after.as_ref()), expected, "{what}");
        }
    }

    #[test]
    fn nothing_is_done_without_a_replacement_or_a_member() {
        let node = reporting(up(2), Some(plain(&[1, 5], 1)));
        let idle = AuthorityRing::new(authority(1));
        assert_eq!(plan(&idle, &[(&node, Duration::ZERO)]), ReplacementPlan::Idle);
        assert_eq!(describe_replacement(&idle, &[]), None);
        assert_eq!(plan(&ring(&[]), &[(&node, Duration::ZERO)]), waits(&[]));
        assert_eq!(plan(&ring(&[]), &[]), waits(&[]));
    }

    #[test]
    fn description_names_what_each_node_lacks() {
        let node = reporting(member(1), None);
        let views = [NodeView { node: &node, silence: Duration::ZERO }];
        let described = describe_replacement(&ring(&[]), &views).unwrap();
        assert_eq!(described.stage(), wire::AuthorityStage::Trusted);
        assert_eq!(described.since_ms, at(0).timestamp_millis());
        let [wait] = described.waits_for.as_slice() else { panic!("{described:?}") };
        assert_eq!(wait.node_id, node_id(1).to_string());
        assert!(wait.reason.contains("update its role server"), "{}", wait.reason);
    }
}
