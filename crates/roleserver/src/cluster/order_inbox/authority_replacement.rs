//! The orders of the inbox that replace the authority of the cluster after a theft, and what is reported of them.
//!
//! What an order demands is decided and stored by [`authority_order`][crate::cluster::authority_order]. The order of
//! before it stays the stored one, and gets its number.

use curator_client::clock::Clock;
use proto::agent::v1 as wire;

use crate::cluster::authority_order::{AuthorityOrderDecision, carry_out_authority_order, find_taken_step};
use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::order_inbox::{Acceptance, Rejection};

/// Accepts the order to follow another authority of the cluster.
pub(super) fn follow_authority(
    files: &ClusterFiles,
    generation: i64,
    order: &wire::ReplaceAuthority,
) -> Result<Acceptance, Rejection> {
    // As for a certificate of etcd.
    let decided = carry_out_authority_order(files, generation, order, Clock::system().now());
    match decided.map_err(|error| Rejection::Temporary(error.to_string()))? {
        AuthorityOrderDecision::Ignore => Ok(Acceptance::Ignored),
        AuthorityOrderDecision::Reject(why) => Err(Rejection::Permanent(why)),
        AuthorityOrderDecision::Done | AuthorityOrderDecision::Accept(_) => Ok(Acceptance::Authority),
    }
}

/// What is reported of an authority that replaces a stolen one here: its certificate, and the last step that was taken.
/// Both are empty if there is none.
pub(super) fn report_replacement(
    files: &ClusterFiles,
    facts: &NodeFacts,
) -> Result<(Vec<u8>, i32), ClusterFilesError> {
    let closed = facts.curator_closed.latest().unwrap_or(false);
    let found = find_taken_step(files, closed)?;
    let reported = found.map(|(next, taken)| (next, taken.map_or(0, |taken| taken.to_wire().into())));
    Ok(reported.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use curator::bootstrap::create_authority;
    use proto::agent::v1::cluster_order::Operation as OrderedOperation;

    use super::*;
    use crate::cluster::files::Credentials;
    use crate::cluster::node_order::NodeOrder;
    use crate::cluster::order_decision::tests::HERE;
    use crate::cluster::order_inbox::tests::{founding, inbox, wire_order};

    #[test]
    fn another_authority_is_stored_and_reported_until_another_order_takes_its_place() {
        let (_directory, order_inbox) = inbox();
        let files = &order_inbox.0.files;
        let [old, new] =
            [HERE, HERE].map(|cluster| create_authority(cluster, Clock::system().now()).unwrap());
        let follow = |generation, step: wire::AuthorityStep| {
            let replace = wire::ReplaceAuthority {
                step: step.into(),
                ca_certificate: new.anchor().certificate.clone(),
                ..Default::default()
            };
            wire_order(generation, OrderedOperation::ReplaceAuthority(replace))
        };
        order_inbox.accept(&founding(2, "ams"));
        order_inbox.accept(&follow(3, wire::AuthorityStep::Follow));
        assert!(order_inbox.report().error.contains("is no node"), "{}", order_inbox.report().error);
        files.read_or_create_key().unwrap();
        let ca_certificate = hex::encode(&old.anchor().certificate);
        files.write_credentials(&Credentials { certificate: String::new(), ca_certificate }).unwrap();

        let order = files.read_order().unwrap().unwrap();
        order_inbox.accept(&follow(4, wire::AuthorityStep::Reject));
        let report = order_inbox.report();
        assert_eq!((report.generation, report.error.as_str()), (4, ""));
        assert_eq!(report.next_authority, new.anchor().certificate);
        assert_eq!(report.next_authority_step(), wire::AuthorityStep::Reject, "it has no member of etcd");
        assert_eq!(files.read_order().unwrap(), Some(NodeOrder { generation: 4, ..order }));
        order_inbox.accept(&follow(4, wire::AuthorityStep::Follow));
        let stored = files.read_next_authority().unwrap().unwrap();
        assert_eq!(stored.step.to_wire(), wire::AuthorityStep::Reject, "it had that order");

        // The cluster was restored meanwhile, with the authority of its snapshot.
        order_inbox.accept(&founding(5, "ams"));
        assert_eq!(files.read_next_authority().unwrap(), None);
        assert_eq!(order_inbox.report().next_authority, Vec::<u8>::new());
    }

    #[test]
    fn replacement_is_reported_until_all_files_are_changed() {
        let (_directory, order_inbox) = inbox();
        let files = &order_inbox.0.files;
        let [old, new] =
            [HERE, HERE].map(|cluster| create_authority(cluster, Clock::system().now()).unwrap());
        order_inbox.accept(&founding(2, "ams"));
        files.read_or_create_key().unwrap();
        let ca_certificate = hex::encode(&old.anchor().certificate);
        files.write_credentials(&Credentials { certificate: String::new(), ca_certificate }).unwrap();
        let replace = wire::ReplaceAuthority {
            step: wire::AuthorityStep::Follow.into(),
            ca_certificate: new.anchor().certificate.clone(),
            ..Default::default()
        };
        order_inbox.accept(&wire_order(3, OrderedOperation::ReplaceAuthority(replace.clone())));
        // The role server was interrupted after the first file.
        files.replace_authority(&hex::encode(&new.anchor().certificate)).unwrap();
        // The shepherd repeats the order.
        order_inbox.accept(&wire_order(4, OrderedOperation::ReplaceAuthority(replace)));
        let report = order_inbox.report();
        assert_eq!((report.generation, report.error.as_str()), (4, ""));
        assert_eq!(report.ca_certificate, new.anchor().certificate);
        assert_eq!(report.next_authority, new.anchor().certificate, "its epoch may be that of the thief");
        files.remove_next_authority().unwrap();
        assert_eq!(order_inbox.report().next_authority, Vec::<u8>::new());
    }
}
