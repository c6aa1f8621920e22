//! Decide whether a cluster order is accepted, rejected or ignored (pure).
//!
//! The decision follows from the files on the disk. The rules are in [`order_inbox`][crate::cluster::order_inbox],
//! which executes it.

use uuid::Uuid;

use crate::cluster::node_order::{NodeOrder, OrderKind};

/// The stored state that a new order is compared with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InboxState {
    /// The stored order, if there is one.
    pub order: Option<NodeOrder>,
    /// The cluster that this machine is a node of.
    pub cluster: Option<Uuid>,
    /// Whether it is founding a cluster, and has created its authority.
    pub founding: bool,
    /// The highest epoch that an order or a statement has proved to this machine, and its cluster.
    pub proved_epoch: Option<(Uuid, u64)>,
}

/// What happens with an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderDecision {
    /// It is not newer than the stored one.
    Ignore,
    /// It replaces the stored one.
    Accept,
    /// It conflicts with what this machine is, for this reason.
    Reject(String),
}

/// Decides about an order from the stored state.
#[must_use]
pub fn decide_order(present: &InboxState, order: &NodeOrder) -> OrderDecision {
    let newest = present.order.as_ref().map_or(0, |order| order.generation);
    if order.generation <= newest {
        return OrderDecision::Ignore;
    }
    if let Err(error) = order.validate() {
        return OrderDecision::Reject(format!("the order is invalid: {error}"));
    }
    let Some(id) = order.cluster() else { return OrderDecision::Accept };
    // An epoch that nodes have only reported keeps no order away.
    if let Some((_, proved)) =
        present.proved_epoch.filter(|(cluster, proved)| *cluster == id && order.epoch() < *proved)
    {
        return OrderDecision::Reject(format!(
            "the order is of epoch {} of cluster {id}, which has been restored since ({proved})",
            order.epoch()
        ));
    }
    // The node's files are older than the restoration and would conflict with it.
    if let (OrderKind::Found { snapshot: Some(_), .. }, Some(cluster)) = (&order.what, present.cluster) {
        return OrderDecision::Reject(format!(
            "this machine is a node of cluster {cluster} and cannot restore one; it has to leave first"
        ));
    }
    let here = present.order.as_ref().map(|order| &order.what);
    let founding = match here {
        Some(OrderKind::Found { cluster, .. }) if present.founding => Some(*cluster),
        _ => None,
    };
    match present.cluster.or(founding) {
        Some(cluster) if id != cluster => OrderDecision::Reject(format!(
            "this machine is a node of cluster {cluster}; it has to leave that one first"
        )),
        _ => OrderDecision::Accept,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use curator::bootstrap::create_authority;
    use model::time::Timestamp;

    use super::*;

    pub(in crate::cluster) const HERE: Uuid = Uuid::from_u128(7);
    const ELSEWHERE: Uuid = Uuid::from_u128(8);

    fn order(generation: i64, what: OrderKind) -> NodeOrder {
        NodeOrder { generation, what, machine: None, labels: BTreeMap::new(), address: None }
    }

    fn founding_order(cluster: Uuid) -> OrderKind {
        OrderKind::Found {
            cluster,
            name: "ams".to_owned(),
            owner_keys: vec!["07".repeat(32)],
            snapshot: None,
            image: None,
            revocations: BTreeMap::new(),
            epoch: 0,
        }
    }

    pub(in crate::cluster) fn join(cluster: Uuid) -> OrderKind {
        let authority =
            create_authority(cluster, Timestamp::from_timestamp(1_800_000_000, 0).unwrap()).unwrap();
        OrderKind::Join {
            ticket: "05".repeat(32),
            ca_certificate: hex::encode(&authority.anchor().certificate),
            curators: vec!["10.0.0.1:7835".to_owned()],
            epoch: 0,
            statement: None,
        }
    }

    fn of_epoch(number: u64, mut what: OrderKind) -> OrderKind {
        if let OrderKind::Found { epoch, .. } | OrderKind::Join { epoch, .. } = &mut what {
            *epoch = number;
        }
        what
    }

    fn restore(epoch: u64) -> OrderKind {
        OrderKind::Found {
            cluster: HERE,
            name: "ams".to_owned(),
            owner_keys: vec!["07".repeat(32)],
            snapshot: Some("ab".repeat(32)),
            image: None,
            revocations: BTreeMap::new(),
            epoch,
        }
    }

    #[test]
    fn order_is_accepted_once_and_never_against_the_current_cluster() {
        let refused = OrderDecision::Reject(String::new());
        let fresh = InboxState::default();
        let node = InboxState {
            order: Some(order(3, join(HERE))),
            cluster: Some(HERE),
            founding: false,
            proved_epoch: None,
        };
        let handmade = InboxState { order: None, cluster: Some(HERE), founding: false, proved_epoch: None };
        let founding = InboxState {
            order: Some(order(3, founding_order(HERE))),
            cluster: None,
            founding: true,
            proved_epoch: None,
        };
        let waiting = InboxState {
            order: Some(order(3, join(HERE))),
            cluster: None,
            founding: false,
            proved_epoch: None,
        };
        let epoch = Some((HERE, 2));
        let later = InboxState { proved_epoch: epoch, ..node.clone() };
        let left = InboxState {
            order: Some(order(3, OrderKind::Leave {})),
            cluster: None,
            founding: false,
            proved_epoch: None,
        };
        for (name, present, node_order, expected) in [
            ("first", &fresh, order(1, founding_order(HERE)), OrderDecision::Accept),
            ("first to join", &fresh, order(1, join(HERE)), OrderDecision::Accept),
            ("nothing to leave", &fresh, order(1, OrderKind::Leave {}), OrderDecision::Accept),
            ("none at all", &fresh, order(0, founding_order(HERE)), OrderDecision::Ignore),
            ("the same again", &node, order(3, join(HERE)), OrderDecision::Ignore),
            ("an older one", &node, order(2, OrderKind::Leave {}), OrderDecision::Ignore),
            ("another cluster", &node, order(4, join(ELSEWHERE)), refused.clone()),
            ("to found another", &node, order(4, founding_order(ELSEWHERE)), refused.clone()),
            ("the same cluster", &node, order(4, join(HERE)), OrderDecision::Accept),
            ("another than by hand", &handmade, order(1, join(ELSEWHERE)), refused.clone()),
            ("to leave", &node, order(4, OrderKind::Leave {}), OrderDecision::Accept),
            ("founding one, another", &founding, order(4, founding_order(ELSEWHERE)), refused.clone()),
            ("founding one, the same", &founding, order(4, founding_order(HERE)), OrderDecision::Accept),
            ("not let in yet, another ticket", &waiting, order(4, join(HERE)), OrderDecision::Accept),
            ("not let in yet, elsewhere", &waiting, order(4, join(ELSEWHERE)), OrderDecision::Accept),
            ("to restore, as a node", &node, order(4, restore(1)), refused.clone()),
            ("to restore, as none", &fresh, order(4, restore(1)), OrderDecision::Accept),
            ("to restore, after it left", &left, order(4, restore(1)), OrderDecision::Accept),
            ("to follow the restored one", &node, order(4, of_epoch(1, join(HERE))), OrderDecision::Accept),
            ("of before", &later, order(4, of_epoch(1, join(HERE))), refused.clone()),
            ("of the same epoch", &later, order(4, of_epoch(2, join(HERE))), OrderDecision::Accept),
            ("to leave, whatever the epoch", &later, order(4, OrderKind::Leave {}), OrderDecision::Accept),
            (
                "another cluster's epoch is another's",
                &InboxState { proved_epoch: epoch, ..waiting.clone() },
                order(4, join(ELSEWHERE)),
                OrderDecision::Accept,
            ),
            ("after it left", &left, order(4, join(ELSEWHERE)), OrderDecision::Accept),
            (
                "a name that is none",
                &fresh,
                order(
                    1,
                    OrderKind::Found {
                        cluster: HERE,
                        name: String::new(),
                        owner_keys: Vec::new(),
                        snapshot: None,
                        image: None,
                        revocations: BTreeMap::new(),
                        epoch: 0,
                    },
                ),
                refused,
            ),
        ] {
            let verdict = match decide_order(present, &node_order) {
                OrderDecision::Reject(why) => {
                    assert!(why.len() > 20, "{name}: {why}");
                    OrderDecision::Reject(String::new())
                }
                verdict => verdict,
            };
            assert_eq!(verdict, expected, "{name}");
        }
    }
}
