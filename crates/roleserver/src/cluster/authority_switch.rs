//! Takes the steps of an order to follow another authority, after a theft of the former one's key.
//!
//! [`authority_order`](super::authority_order) has stored the new authority and the step. The steps of etcd need
//! nothing here. Nor does *close*: the control plane stops the curator of this node by the stored step, and starts it
//! again when the node trusts the new authority alone. The curator then reads it from etcd before it serves anybody. The
//! last steps do:
//!
//! * *Install*: a member of etcd puts the new authority into the records of the cluster, in its own etcd
//!   ([`curator::authority_installation`]). Then the node trusts it alone. A node without a member waits for the next step:
//!   the epoch of this order may be that of the thief.
//! * *Follow*: the node trusts it alone.
//!
//! # What a node does that trusts another authority
//!
//! First its files change, then its connection to the curators follows the files ([`follow_files`]). So a node that is
//! interrupted begins with the files, and a node without a connection, because its certificate has ended, changes, too. The
//! credentials are the first file: from then on, no certificate and no statement of the former authority is stored.
//!
//! All open connections to curators end. The node's certificate is by the former authority, and curators reject it: so
//! the node requests another one with its key, and a consensus member issues it from its own etcd
//! ([`certificate_renewal`](super::certificate_renewal)). Its curator gets another certificate, too
//! ([`curator_certificate`](super::curator_certificate)). Nothing that runs on the node is restarted.

use curator::authority_installation::install_authority;
use curator_client::clock::Clock;
use curator_client::node_id::PublicKey;
use curator_client::pki::{Authority, TrustAnchor};
use curator_client::statement::SignedStatement;
use etcd::client::Client;
use etcd::namespace::Namespace;
use model::cluster::authority_theft::AuthorityStep;

use crate::cluster::control_plane::CURATOR_NAMESPACE;
use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, ClusterFilesError, NextAuthority};
use crate::cluster::node_facts::{CuratorConnection, NodeFacts};
use crate::cluster::node_order::{parse_key, parse_statement};
use crate::cluster::stored_authorities::read_anchor;

/// Takes the step that is stored, if there is one, and lets the connection follow the files. The error is a sentence.
pub(super) async fn take_step(files: &ClusterFiles, facts: &NodeFacts, clock: &Clock) -> Result<(), String> {
    let cannot = |error: ClusterFilesError| error.to_string();
    let mut is_switched = false;
    if let Some(next) = files.read_next_authority().map_err(cannot)? {
        let anchor = next.anchor().ok_or("the authority that replaces the stolen one cannot be read")?;
        match next.step {
            AuthorityStep::Accept | AuthorityStep::Show | AuthorityStep::Reject | AuthorityStep::Close => {}
            // Without a member of etcd, the epoch is not known for certain. It follows by the next step.
            AuthorityStep::Install if files.read_membership().map_err(cannot)?.is_none() => {}
            AuthorityStep::Install => {
                let (epoch, statement) = install(files, &next, &anchor, clock).await?;
                switch_files(files, &next, &anchor, epoch, Some(&statement)).map_err(cannot)?;
                is_switched = true;
            }
            AuthorityStep::Follow => {
                let statement = next.statement.as_deref().map(|sent| parse_statement(sent, &anchor));
                let statement = statement.transpose().map_err(|error| error.to_string())?;
                switch_files(files, &next, &anchor, next.epoch, statement.as_ref()).map_err(cannot)?;
                is_switched = true;
            }
        }
    }
    follow_files(files, facts, is_switched).map_err(cannot)
}

/// Puts the new authority into the etcd of this node. Returns the epoch of the cluster, and its statement.
async fn install(
    files: &ClusterFiles,
    next: &NextAuthority,
    anchor: &TrustAnchor,
    clock: &Clock,
) -> Result<(u64, SignedStatement), String> {
    let key = next.private_key.as_deref().and_then(|key| hex::decode(key).ok());
    let key = key.ok_or("the key of the authority that replaces the stolen one is missing")?;
    let authority = Authority::load(&anchor.certificate, &key).map_err(|error| error.to_string())?;
    let owners: Result<Vec<PublicKey>, _> = next.owner_keys.iter().map(|key| parse_key(key)).collect();
    let owners = owners.map_err(|error| error.to_string())?;
    let namespace = Namespace::new(CURATOR_NAMESPACE).map_err(|error| error.to_string())?;
    let client = Client::new(vec![etcd_member::client_endpoint(files)], namespace);
    let installed = install_authority(&client, &authority, &owners, clock.now()).await;
    let (epoch, sent) = installed.map_err(|error| error.to_string())?;
    let statement = SignedStatement::verify(&sent, std::slice::from_ref(anchor));
    Ok((epoch, statement.map_err(|error| error.to_string())?))
}

/// Lets the files of this node have the new authority alone. Each write may be repeated, and the order is removed last.
fn switch_files(
    files: &ClusterFiles,
    next: &NextAuthority,
    anchor: &TrustAnchor,
    epoch: u64,
    statement: Option<&SignedStatement>,
) -> Result<(), ClusterFilesError> {
    files.replace_authority(&next.ca_certificate)?;
    files.replace_statement(anchor, statement)?;
    files.replace_epoch(anchor.cluster, epoch)?;
    if !next.curators.is_empty() {
        files.write_curators(&next.curators.iter().cloned().collect())?;
    }
    files.remove_next_authority()
}

/// Lets the connection of this node follow the authority in its files. `is_switched`: whether the files have changed
/// just now. A connection that was made between two of these changes has the new authority and the former epoch.
fn follow_files(files: &ClusterFiles, facts: &NodeFacts, is_switched: bool) -> Result<(), ClusterFilesError> {
    let Some(connection) = facts.connection.latest() else { return Ok(()) };
    let Some(anchor) = read_anchor(files)? else { return Ok(()) };
    let is_same = anchor.certificate == connection.authority().certificate;
    if anchor.cluster != connection.anchor.cluster || is_same && !is_switched {
        return Ok(());
    }
    let (statement, epoch) = (files.read_statement(&anchor)?, files.epoch_of_cluster(anchor.cluster)?);
    connection.curators.adopt_authority(anchor.clone(), statement, epoch);
    connection.curators.set_directory(files.read_curators());
    tracing::warn!(
        cluster = %anchor.cluster,
        "this node trusts another authority of its cluster, by an order after a theft"
    );
    facts.connection.set(CuratorConnection { anchor, ..connection });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use curator_client::statement::Statement;
    use curator_client::testing::{at, authority, authority_of, serial, statement, validity};
    use prost::Message as _;

    use super::*;
    use crate::cluster::authority_order::find_taken_step;
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::{files, next_authority};

    fn next(statement: Option<SignedStatement>) -> NextAuthority {
        NextAuthority {
            epoch: 2,
            curators: vec!["10.0.0.9:7835".to_owned()],
            statement: statement.map(|signed| hex::encode(signed.to_wire().encode_to_vec())),
            ..next_authority(AuthorityStep::Follow, 5)
        }
    }

    /// A node that trusts authority 1, which its thief has let believe an epoch of 900.
    fn node(files: &ClusterFiles) -> CuratorConnection {
        let key = files.read_or_create_key().unwrap();
        let own = PublicKey(key.public_key());
        let certificate =
            authority(1).issue_node_certificate(&own, serial(3), validity()).unwrap().certificate;
        let credentials = Credentials {
            certificate: hex::encode(&certificate),
            ca_certificate: hex::encode(&authority(1).anchor().certificate),
        };
        files.write_credentials(&credentials).unwrap();
        files.write_statement(&statement(900, 7).sign(&authority(1)).unwrap()).unwrap();
        files.raise_epoch(authority(1).anchor().cluster, 900).unwrap();
        let clock = Clock::new(|| at(1), || Duration::ZERO);
        CuratorConnection::new(&key, &credentials, files, &clock).unwrap()
    }

    #[tokio::test]
    async fn node_trusts_the_new_authority_alone_in_its_files_and_its_connection() {
        let heir = authority_of(1, 5);
        let by_heir = Statement { authorities: vec![heir.anchor().clone()], ..statement(2, 1) };
        let by_heir = by_heir.sign(&heir).unwrap();
        for stated in [Some(by_heir.clone()), None] {
            let (_directory, files) = files();
            let (facts, clock) = (NodeFacts::default(), Clock::new(|| at(1), || Duration::ZERO));
            facts.connection.set(node(&files));
            take_step(&files, &facts, &clock).await.unwrap();
            assert_eq!(facts.connection.latest().unwrap().anchor, *authority(1).anchor(), "no order");

            files.write_next_authority(&next(stated.clone())).unwrap();
            let before = facts.connection.latest().unwrap();
            take_step(&files, &facts, &clock).await.unwrap();
            assert_eq!(files.read_next_authority().unwrap(), None, "the order is carried out");
            assert_eq!(read_anchor(&files).unwrap().as_ref(), Some(heir.anchor()));
            assert_eq!(files.read_statement(heir.anchor()).unwrap(), stated);
            assert_eq!(files.read_curators(), ["10.0.0.9:7835".to_owned()].into());
            let connection = facts.connection.latest().unwrap();
            // Parts that have the connection of before, too.
            for one in [&before, &connection] {
                assert_eq!((one.authority(), one.curators.highest_epoch()), (heir.anchor().clone(), 2));
            }
            assert_eq!(connection.anchor, *heir.anchor());

            // A renewal that was on its way does not bring the stolen one back.
            let key = files.read_key().unwrap().unwrap();
            let own = PublicKey(key.public_key());
            for (number, stored) in [(1, false), (5, true)] {
                let issuer = authority_of(1, number);
                let renewed = issuer.issue_node_certificate(&own, serial(9), validity()).unwrap();
                let renewed = before.replace_certificate(&files, &key, &renewed.certificate);
                assert_eq!(renewed.is_ok(), stored, "{number}: {renewed:?}");
            }
            assert_eq!(read_anchor(&files).unwrap().as_ref(), Some(heir.anchor()));
        }
    }

    #[tokio::test]
    async fn connection_that_was_made_in_the_middle_follows_the_rest() {
        let (_directory, files) = files();
        let (facts, clock) = (NodeFacts::default(), Clock::new(|| at(1), || Duration::ZERO));
        node(&files);
        let order = next(None);
        files.write_next_authority(&order).unwrap();
        // The role server was interrupted after the first file, and starts again.
        files.replace_authority(&order.ca_certificate).unwrap();
        let key = files.read_key().unwrap().unwrap();
        let credentials = files.read_credentials().unwrap().unwrap();
        facts.connection.set(CuratorConnection::new(&key, &credentials, &files, &clock).unwrap());
        let connection = facts.connection.latest().unwrap();
        assert_eq!(connection.curators.highest_epoch(), 900, "that of the thief");
        take_step(&files, &facts, &clock).await.unwrap();
        assert_eq!(connection.curators.highest_epoch(), 2);
        assert_eq!(connection.authority(), *authority_of(1, 5).anchor());
        assert_eq!(files.read_next_authority().unwrap(), None);
    }

    #[tokio::test]
    async fn node_without_a_member_of_etcd_waits_for_the_last_step() {
        let (_directory, files) = files();
        let (facts, clock) = (NodeFacts::default(), Clock::new(|| at(1), || Duration::ZERO));
        facts.connection.set(node(&files));
        let order = NextAuthority { step: AuthorityStep::Install, ..next(None) };
        files.write_next_authority(&order).unwrap();
        take_step(&files, &facts, &clock).await.unwrap();
        assert_eq!(read_anchor(&files).unwrap().as_ref(), Some(authority(1).anchor()));
        let (_, taken) = find_taken_step(&files, false).unwrap().unwrap();
        assert_eq!(taken, Some(AuthorityStep::Install));
        assert_eq!(files.read_next_authority().unwrap(), Some(order));
    }

    #[tokio::test]
    async fn node_without_a_connection_changes_its_files() {
        let (_directory, files) = files();
        let (facts, clock) = (NodeFacts::default(), Clock::new(|| at(1), || Duration::ZERO));
        let connection = node(&files);
        files.write_next_authority(&next(None)).unwrap();
        take_step(&files, &facts, &clock).await.unwrap();
        assert_eq!(read_anchor(&files).unwrap().as_ref(), Some(authority_of(1, 5).anchor()));
        // It was about to be published.
        facts.connection.set(connection);
        take_step(&files, &facts, &clock).await.unwrap();
        assert_eq!(facts.connection.latest().unwrap().authority(), *authority_of(1, 5).anchor());
    }
}
