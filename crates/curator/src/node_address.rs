//! A node's address: where a curator takes it from, and what it refuses.
//!
//! Everything that others use to reach a node follows from its address: the directory of curators, the peer URL of its
//! etcd member, the endpoints of API servers, and the names in its certificates. A node that could choose it would get
//! a certificate for the address of an API server, and the tokens that clients send there. So a report alone counts for
//! nothing. It must agree with what the cluster can check:
//!
//! | the node | its address |
//! | --- | --- |
//! | was assigned one by an owner, as the shepherd does from the provider's list | that one |
//! | is that of the curator that decides | what it reports: it can read the authority's key, as any consensus member |
//! | is any other one | the source of its connection to this curator, which it cannot choose |
//!
//! An address is never one of the loopback interface, and never one that another living node has, or was assigned. A node
//! has only an address that is proved for it: one that it reported to a release that believed it keeps nobody out. A former
//! node without an assigned address blocks nobody once its heartbeats ended and the leader has listened for long enough to
//! know: its machine may have been installed again and come back as another node. An assigned address is kept until the
//! node is decommissioned or deleted, or until an owner assigns it to another one, as the shepherd does.
//!
//! A report of another address is refused rather than replaced. Others would be sent to an address at which the node
//! does not listen. What is recorded stays until the node reports something else, also if it is older than this rule.
//! But a certificate is issued only for an address that is proved at that moment.
//!
//! Tests and the simulator run many nodes in one process, on addresses of the loopback interface. For them the rule is
//! a value, [`AddressRule`]. Programs use [`AddressRule::verified`] and have no switch.

use std::net::IpAddr;

use curator_client::node_id::NodeId;

/// Where a curator takes a node's address from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRule {
    /// What proves the address of a node.
    pub source: AddressSource,
    /// Whether a node may have an address of the loopback interface.
    pub allow_loopback: bool,
}

/// What proves the address of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressSource {
    /// Its connection to the curator of another node.
    Connection,
    /// Its report, for nodes of one process on loopback addresses.
    Report,
}

impl AddressRule {
    /// The rule of every program.
    #[must_use]
    pub const fn verified() -> Self {
        Self { source: AddressSource::Connection, allow_loopback: false }
    }

    /// The rule for nodes of one process, on loopback addresses: any source is 127.0.0.1 there.
    #[must_use]
    pub const fn reported_on_loopback() -> Self {
        Self { source: AddressSource::Report, allow_loopback: true }
    }
}

/// What a curator has about the address of a node that calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressEvidence {
    /// The node that calls.
    pub node: NodeId,
    /// The address that an owner assigned to it.
    pub assigned: Option<IpAddr>,
    /// The source of the connection that it calls on.
    pub connection: Option<IpAddr>,
    /// The address that it reports, or that a certificate would name.
    pub reported: IpAddr,
    /// Whether it is the node of this curator: then its connection proves nothing.
    pub is_own_node: bool,
    /// The address in its record.
    pub recorded: Option<IpAddr>,
}

/// Why a node may not have an address. Each reason has the gRPC code `FAILED_PRECONDITION`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No other machine reaches a node on the loopback interface.
    #[error(
        "the address of {node} would be {address}, at which no other machine reaches it: give its order another \
         address, or connect from another one"
    )]
    Loopback {
        /// The node that calls.
        node: NodeId,
        /// The address that it would have.
        address: IpAddr,
    },
    /// Nothing is reached at this address.
    #[error(
        "the address of {node} would be {address}, which reaches no node: give its order another address"
    )]
    Unspecified {
        /// The node that calls.
        node: NodeId,
        /// The address that it would have.
        address: IpAddr,
    },
    /// Another living node has the address.
    #[error(
        "the address of {node} would be {address}, which {holder} has: give one of the two another address, or delete \
         the one that is gone"
    )]
    Taken {
        /// The node that calls.
        node: NodeId,
        /// The address that both would have.
        address: IpAddr,
        /// The node that has it.
        holder: NodeId,
    },
    /// The node reports one address, and another one is proved.
    #[error(
        "{node} reports the address {reported}, and {proved} is proved for it: let it connect to the curators from \
         {reported}, or give its order the address {proved}"
    )]
    NotProved {
        /// The node that calls.
        node: NodeId,
        /// The address that it reports, or that its record has.
        reported: IpAddr,
        /// The address that it is entitled to.
        proved: IpAddr,
    },
    /// The node reports one address, and an owner assigned it another one.
    #[error(
        "{node} reports the address {reported}, and was assigned {assigned}: if its machine has {assigned}, give its order \
         that address, as the shepherd does; otherwise correct the address of the machine in the provider's list"
    )]
    NotAssigned {
        /// The node that calls.
        node: NodeId,
        /// The address that it reports, or that its record has.
        reported: IpAddr,
        /// The only address that it can have.
        assigned: IpAddr,
    },
    /// There is nothing that proves an address.
    #[error("the address of {0} is not proved: the source of its connection is unknown. Please report it")]
    Unknown(NodeId),
}

/// Parses the address that an owner assigns to a node; empty is none. The error is a sentence.
pub fn parse_assigned(rule: AddressRule, text: &str) -> Result<Option<IpAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let address: IpAddr = text.parse().map_err(|_| {
        let shown: String = text.chars().take(100).collect();
        format!("the address {shown:?} is not an IP address")
    })?;
    let address = address.to_canonical();
    let reaches_nobody = address.is_unspecified() || address.is_multicast();
    if reaches_nobody || (address.is_loopback() && !rule.allow_loopback) {
        return Err(format!(
            "{address} cannot be the address of a node: other machines do not reach a node there"
        ));
    }
    Ok(Some(address))
}

/// The address that the cluster can check for this node.
///
/// `holder` returns the other living node that has an address.
pub fn entitled_address(
    rule: AddressRule,
    evidence: &AddressEvidence,
    holder: impl Fn(IpAddr) -> Option<NodeId>,
) -> Result<IpAddr, AddressError> {
    let node = evidence.node;
    let proved = match (rule.source, evidence.assigned) {
        (AddressSource::Report, _) => Some(evidence.reported),
        (AddressSource::Connection, Some(assigned)) => Some(assigned),
        (AddressSource::Connection, None) if evidence.is_own_node => Some(evidence.reported),
        (AddressSource::Connection, None) => evidence.connection,
    };
    let address = proved.ok_or(AddressError::Unknown(node))?.to_canonical();
    if address.is_unspecified() || address.is_multicast() {
        return Err(AddressError::Unspecified { node, address });
    }
    // The only node of a cluster may be founded on the loopback interface, where it reaches itself.
    let is_as_founded = evidence.is_own_node && is_recorded(evidence, address);
    if address.is_loopback() && !rule.allow_loopback && !is_as_founded {
        return Err(AddressError::Loopback { node, address });
    }
    match (rule.source, holder(address)) {
        (AddressSource::Connection, Some(holder)) => Err(AddressError::Taken { node, address, holder }),
        _ => Ok(address),
    }
}

/// Checks the address that a node reports: it is the recorded one, so that nothing changes, or it is proved.
pub fn check_reported(
    rule: AddressRule,
    evidence: &AddressEvidence,
    holder: impl Fn(IpAddr) -> Option<NodeId>,
) -> Result<(), AddressError> {
    if is_recorded(evidence, evidence.reported) {
        return Ok(());
    }
    check_proved(rule, evidence, holder)
}

/// Checks that the reported address is proved at this moment; what is recorded does not count. A certificate may then name it.
pub fn check_proved(
    rule: AddressRule,
    evidence: &AddressEvidence,
    holder: impl Fn(IpAddr) -> Option<NodeId>,
) -> Result<(), AddressError> {
    let proved = entitled_address(rule, evidence, holder)?;
    let reported = evidence.reported.to_canonical();
    if proved == reported {
        return Ok(());
    }
    let node = evidence.node;
    Err(match evidence.assigned {
        Some(_) => AddressError::NotAssigned { node, reported, assigned: proved },
        None => AddressError::NotProved { node, reported, proved },
    })
}

fn is_recorded(evidence: &AddressEvidence, address: IpAddr) -> bool {
    evidence.recorded.is_some_and(|recorded| recorded.to_canonical() == address.to_canonical())
}

#[cfg(test)]
mod tests {
    use curator_client::testing::node_id;

    use super::*;

    const OWN: &str = "10.0.0.1";
    const OTHER: &str = "10.0.0.2";
    /// Node 3 is alive and has this address.
    const ADDRESS_OF_NODE_3: &str = "10.0.0.3";

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Node 1 reports its own address for the first time, and connects from it.
    fn honest() -> AddressEvidence {
        AddressEvidence {
            node: node_id(1),
            assigned: None,
            connection: Some(ip(OWN)),
            reported: ip(OWN),
            is_own_node: false,
            recorded: None,
        }
    }

    fn connects_from(source: &str) -> AddressEvidence {
        AddressEvidence { connection: Some(ip(source)), reported: ip(source), ..honest() }
    }

    fn holder(address: IpAddr) -> Option<NodeId> {
        (address == ip(ADDRESS_OF_NODE_3)).then(|| node_id(3))
    }

    fn not_proved(reported: &str, proved: &str) -> AddressError {
        AddressError::NotProved { node: node_id(1), reported: ip(reported), proved: ip(proved) }
    }

    #[test]
    fn node_gets_the_address_that_is_proved() {
        let loopback = |text: &str| AddressError::Loopback { node: node_id(1), address: ip(text) };
        let unspecified = |text: &str| AddressError::Unspecified { node: node_id(1), address: ip(text) };
        let taken =
            AddressError::Taken { node: node_id(1), address: ip(ADDRESS_OF_NODE_3), holder: node_id(3) };
        let own_node = |reported: &str| AddressEvidence {
            is_own_node: true,
            connection: Some(ip("127.0.0.1")),
            reported: ip(reported),
            ..honest()
        };
        let cases = [
            ("as it connects", honest(), Ok(OWN)),
            ("its report counts for nothing", AddressEvidence { reported: ip(OTHER), ..honest() }, Ok(OWN)),
            (
                "what is recorded counts for nothing",
                AddressEvidence { recorded: Some(ip(OTHER)), ..honest() },
                Ok(OWN),
            ),
            ("as it was assigned", AddressEvidence { assigned: Some(ip(OTHER)), ..honest() }, Ok(OTHER)),
            ("the own node as it reports", own_node(OTHER), Ok(OTHER)),
            (
                "the own node as it was assigned",
                AddressEvidence { assigned: Some(ip(OWN)), ..own_node(OTHER) },
                Ok(OWN),
            ),
            ("IPv6", connects_from("2001:db8::1"), Ok("2001:db8::1")),
            ("IPv4 in IPv6", connects_from("::ffff:10.0.0.1"), Ok(OWN)),
            ("loopback", connects_from("127.0.0.1"), Err(loopback("127.0.0.1"))),
            ("loopback in IPv6", connects_from("::1"), Err(loopback("::1"))),
            ("mapped loopback", connects_from("::ffff:127.0.0.9"), Err(loopback("127.0.0.9"))),
            (
                "loopback is recorded",
                AddressEvidence { recorded: Some(ip("127.0.0.1")), ..connects_from("127.0.0.1") },
                Err(loopback("127.0.0.1")),
            ),
            (
                "assigned loopback",
                AddressEvidence { assigned: Some(ip("127.0.0.1")), ..honest() },
                Err(loopback("127.0.0.1")),
            ),
            ("loopback of the own node", own_node("127.0.0.2"), Err(loopback("127.0.0.2"))),
            (
                "the own node was founded on loopback",
                AddressEvidence { recorded: Some(ip("127.0.0.2")), ..own_node("127.0.0.2") },
                Ok("127.0.0.2"),
            ),
            ("unspecified", own_node("0.0.0.0"), Err(unspecified("0.0.0.0"))),
            (
                "multicast",
                AddressEvidence { assigned: Some(ip("ff02::1")), ..honest() },
                Err(unspecified("ff02::1")),
            ),
            ("taken by a living node", connects_from(ADDRESS_OF_NODE_3), Err(taken.clone())),
            (
                "taken from a living node by the order",
                AddressEvidence { assigned: Some(ip(ADDRESS_OF_NODE_3)), ..honest() },
                Err(taken.clone()),
            ),
            ("taken by the own node", own_node(ADDRESS_OF_NODE_3), Err(taken)),
            (
                "no source",
                AddressEvidence { connection: None, ..honest() },
                Err(AddressError::Unknown(node_id(1))),
            ),
        ];
        for (case, evidence, expected) in cases {
            let entitled = entitled_address(AddressRule::verified(), &evidence, holder);
            assert_eq!(entitled, expected.map(ip), "{case}");
        }
        // Without its heartbeats, the former holder blocks nobody. A node does not block itself either: `holder`
        // returns others.
        let free = |_: IpAddr| None;
        assert_eq!(
            entitled_address(AddressRule::verified(), &connects_from(ADDRESS_OF_NODE_3), free),
            Ok(ip(ADDRESS_OF_NODE_3))
        );
        let on_loopback = AddressRule { source: AddressSource::Connection, allow_loopback: true };
        assert_eq!(
            entitled_address(on_loopback, &connects_from("127.0.0.2"), holder),
            Ok(ip("127.0.0.2")),
            "a test of the rule on loopback"
        );
    }

    #[test]
    fn assigned_address_is_one_that_others_reach() {
        let refused = Err("other machines do not reach a node there");
        for (text, expected) in [
            ("", Ok(None)),
            (OWN, Ok(Some(ip(OWN)))),
            ("::ffff:10.0.0.1", Ok(Some(ip(OWN)))),
            ("2001:db8::1", Ok(Some(ip("2001:db8::1")))),
            ("node-7", Err("the address \"node-7\" is not an IP address")),
            ("10.0.0.1:7835", Err("is not an IP address")),
            ("127.0.0.1", refused),
            ("::1", refused),
            ("0.0.0.0", refused),
            ("ff02::1", refused),
        ] {
            match (parse_assigned(AddressRule::verified(), text), expected) {
                (Ok(address), Ok(expected)) => assert_eq!(address, expected, "{text}"),
                (Err(error), Err(part)) => assert!(error.contains(part), "{text}: {error}"),
                (parsed, _) => panic!("{text}: {parsed:?}, and {expected:?} was expected"),
            }
        }
        let on_loopback = AddressRule { source: AddressSource::Connection, allow_loopback: true };
        assert_eq!(parse_assigned(on_loopback, "127.0.0.2"), Ok(Some(ip("127.0.0.2"))));
    }

    #[test]
    fn report_is_taken_if_it_changes_nothing_or_is_proved() {
        let claim = AddressEvidence { reported: ip(OTHER), ..honest() };
        for (case, evidence, reported, certified) in [
            ("proved", honest(), Ok(()), Ok(())),
            ("another one", claim.clone(), Err(not_proved(OTHER, OWN)), Err(not_proved(OTHER, OWN))),
            (
                "as recorded, from before the rule",
                AddressEvidence { recorded: Some(ip(OTHER)), ..claim.clone() },
                Ok(()),
                Err(not_proved(OTHER, OWN)),
            ),
            (
                "as recorded, in another form",
                AddressEvidence {
                    recorded: Some(ip(OTHER)),
                    reported: ip("::ffff:10.0.0.2"),
                    ..claim.clone()
                },
                Ok(()),
                Err(not_proved(OTHER, OWN)),
            ),
            ("moved", AddressEvidence { recorded: Some(ip(OTHER)), ..honest() }, Ok(()), Ok(())),
            ("assigned", AddressEvidence { assigned: Some(ip(OTHER)), ..claim }, Ok(()), Ok(())),
        ] {
            let rule = AddressRule::verified();
            assert_eq!(check_reported(rule, &evidence, holder), reported, "{case}");
            assert_eq!(check_proved(rule, &evidence, holder), certified, "{case}");
        }
    }

    #[test]
    fn refusal_names_both_addresses_and_the_remedy() {
        let claim = AddressEvidence { reported: ip(OTHER), ..honest() };
        let refusal = check_reported(AddressRule::verified(), &claim, holder).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            format!(
                "{} reports the address 10.0.0.2, and 10.0.0.1 is proved for it: let it connect to the curators from \
                 10.0.0.2, or give its order the address 10.0.0.1",
                node_id(1)
            )
        );
        let claim = AddressEvidence { assigned: Some(ip(OWN)), connection: Some(ip(OTHER)), ..claim };
        let refusal = check_reported(AddressRule::verified(), &claim, holder).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            format!(
                "{} reports the address 10.0.0.2, and was assigned 10.0.0.1: if its machine has 10.0.0.1, give its order \
                 that address, as the shepherd does; otherwise correct the address of the machine in the provider's list",
                node_id(1)
            )
        );
    }

    #[test]
    fn nodes_of_one_process_have_what_they_report() {
        let rule = AddressRule::reported_on_loopback();
        for reported in ["127.64.1.2", "10.0.0.7", ADDRESS_OF_NODE_3] {
            let evidence = AddressEvidence { reported: ip(reported), ..connects_from("127.0.0.1") };
            assert_eq!(check_reported(rule, &evidence, holder), Ok(()), "{reported}");
            assert_eq!(check_proved(rule, &evidence, holder), Ok(()), "{reported}");
        }
    }
}
