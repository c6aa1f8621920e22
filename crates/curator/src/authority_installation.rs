//! Puts another authority into the records of a cluster after a theft of its key, by an order of the shepherd.
//!
//! The shepherd makes the new authority, and sends it to the consensus members over the callback connections of their
//! machines, which no authority of a cluster signs. A member writes it into its own etcd. No curator does: with the
//! stolen key, a thief is an owner, a node or a curator to every curator, so no call may do this.
//!
//! # When
//!
//! Only after the etcd of every member rejects certificates of the stolen authority. Before that, the thief reads all that
//! is in etcd, the new key included.
//!
//! # What is written
//!
//! One transaction writes everything or nothing (`plan_installation`):
//!
//! * The record of the authorities has the new one alone. No replacement is under way any more, and no succession leads to
//!   it: the thief could sign one as well.
//! * The statement is the first one of the new authority, with the number 1 and the certificates that the last one revoked.
//!   Statements of two authorities are not compared, because nodes follow the new one by an order. So the highest number
//!   that the thief has used does not matter. The epoch stays: it is how often the cluster was restored, and etcd's members
//!   are those of one epoch.
//! * The owners are those that the shepherd names. The thief may have added a key of its own.
//! * There are no tickets. The thief may have made some.
//! * The keys of Kubernetes are marked as exposed, because the thief has read them. The next leader begins to rotate them
//!   ([`exposed_keys`](crate::kubernetes::exposed_keys)).
//!
//! The curators of the members are stopped meanwhile, which ends the connections that owners and nodes have opened with
//! certificates of the stolen authority. Once they serve again, they reject these certificates, and their leader signs the
//! next statements.
//!
//! # Once
//!
//! The write depends on the revisions of the records. A member that finds the new authority, or one that has replaced it
//! since, writes nothing. So the members may all have the same order.

use std::slice;

use curator_client::authority_ring::AuthorityRing;
use curator_client::cluster::{Cluster, authority_record_key, cluster_record_key};
use curator_client::node_id::PublicKey;
use curator_client::pki::{Authority, TrustAnchor};
use curator_client::statement::{SignedStatement, Statement};
use curator_client::succession::find_path;
use etcd::client::Client;
use etcd::guard::{ExpectedRevision, KeyChange};
use etcd::key_space::TICKETS;
use etcd::namespace::KeySelector;
use model::time::Timestamp;
use proto::curator::v1 as wire;

use crate::bootstrap::BootstrapError;
use crate::kubernetes::keys::{KubernetesKeys, keys_record_key};
use crate::statement_record::{decode_statement, encode_statement, statement_record_key};

/// How often the write is tried if another one was faster.
const MAX_ATTEMPTS: usize = 5;

/// The records of the cluster that depend on its authority.
#[derive(Clone, Debug)]
struct AuthorityRecords {
    ring: AuthorityRing,
    cluster: Cluster,
    statement: wire::SignedStatement,
}

/// What has to be written.
#[derive(Debug)]
enum Installation {
    /// Nothing: the authority is there, or one that has replaced it since.
    Done,
    /// These records take the place of the present ones.
    Write(Box<AuthorityRecords>),
}

/// Puts this authority into the etcd of the node that runs here, unless it is there. Returns the epoch of the cluster,
/// and its statement if this authority or a successor signed it.
///
/// `owner_keys`: the keys of owners that stay.
pub async fn install_authority(
    client: &Client,
    next: &Authority,
    owner_keys: &[PublicKey],
    now: Timestamp,
) -> Result<(u64, wire::SignedStatement), BootstrapError> {
    let keys = [authority_record_key()?, cluster_record_key()?, statement_record_key()?];
    for _ in 0..MAX_ATTEMPTS {
        let Some((present, revisions)) = read_records(client, &keys).await? else {
            return Err(BootstrapError::AuthorityNotReplaced(
                "its etcd holds no cluster that has made a statement: update all role servers of the cluster first"
                    .to_owned(),
            ));
        };
        let next = match plan_installation(&present, next, owner_keys, now)? {
            Installation::Done => return Ok((present.cluster.epoch, present.statement)),
            Installation::Write(next) => next,
        };
        let values = [next.ring.encode(), next.cluster.encode(), encode_statement(&next.statement)];
        let mut changes: Vec<KeyChange> = keys
            .iter()
            .zip(values)
            .zip(revisions)
            .map(|((key, value), revision)| KeyChange::Put {
                key: key.clone(),
                value,
                expected: ExpectedRevision::At(revision),
            })
            .collect();
        changes.extend(mark_kubernetes_keys(client).await?);
        let tickets = KeySelector::Prefix(TICKETS.to_string());
        if client.replace_unguarded("another authority of the cluster", &changes, &tickets).await? {
            tracing::warn!(
                "the authority of the cluster was replaced after a theft, and its tickets have ended"
            );
            return Ok((next.cluster.epoch, next.statement));
        }
    }
    Err(BootstrapError::AuthorityNotReplaced(
        "its records change too often to put another authority into them; it is tried again".to_owned(),
    ))
}

/// Reads the records with these keys, and their revisions. `None`: one of them does not exist.
async fn read_records(
    client: &Client,
    [authority, cluster, statement]: &[String; 3],
) -> Result<Option<(AuthorityRecords, [i64; 3])>, BootstrapError> {
    let (Some(ring), Some(of_cluster), Some(stated)) =
        (client.get(authority).await?, client.get(cluster).await?, client.get(statement).await?)
    else {
        return Ok(None);
    };
    let records = AuthorityRecords {
        ring: AuthorityRing::decode(authority, &ring.value)?,
        cluster: Cluster::decode(cluster, &of_cluster.value)?,
        statement: decode_statement(statement, &stated.value)?,
    };
    Ok(Some((records, [ring.mod_revision, of_cluster.mod_revision, stated.mod_revision])))
}

/// The write that marks the keys of Kubernetes as exposed; `None` if there are none. A record that cannot be read is left
/// alone: the thief may have written it, and must not block the installation.
async fn mark_kubernetes_keys(client: &Client) -> Result<Option<KeyChange>, BootstrapError> {
    let key = keys_record_key()?;
    let Some(record) = client.get(&key).await? else { return Ok(None) };
    match KubernetesKeys::decode(&key, &record.value) {
        Ok(keys) => Ok(keys.mark_exposed().map(|marked| KeyChange::Put {
            key,
            value: marked.encode(),
            expected: ExpectedRevision::At(record.mod_revision),
        })),
        Err(error) => {
            tracing::error!(%error, "the keys of Kubernetes cannot be read, so they are not rotated after the theft");
            Ok(None)
        }
    }
}

/// Decides what has to be written.
fn plan_installation(
    present: &AuthorityRecords,
    next: &Authority,
    owner_keys: &[PublicKey],
    now: Timestamp,
) -> Result<Installation, BootstrapError> {
    let AuthorityRecords { ring, cluster, statement } = present;
    if next.anchor().cluster != cluster.id {
        let sentence = "the new authority is that of another cluster";
        return Err(BootstrapError::AuthorityNotReplaced(sentence.to_owned()));
    }
    let is_signer = |found: &TrustAnchor| found.key == ring.signer.anchor().key;
    if find_path(slice::from_ref(next.anchor()), &ring.successors, is_signer).is_some() {
        return Ok(Installation::Done);
    }
    if owner_keys.is_empty() {
        let sentence = "it would have no owner, so nobody could give orders";
        return Err(BootstrapError::AuthorityNotReplaced(sentence.to_owned()));
    }
    // One that nobody signed revokes nothing. The leader lists what is revoked again.
    let revoked = SignedStatement::verify(statement, &ring.signers()).map(|signed| signed.statement.revoked);
    let first = Statement {
        cluster: cluster.id,
        epoch: cluster.epoch,
        number: 1,
        issued_at: now,
        authorities: vec![next.anchor().clone()],
        revoked: revoked.unwrap_or_default(),
    };
    Ok(Installation::Write(Box::new(AuthorityRecords {
        ring: AuthorityRing::new(Authority::load(&next.anchor().certificate, next.pkcs8())?),
        cluster: Cluster { owner_keys: owner_keys.to_vec(), ..cluster.clone() },
        statement: first.sign(next)?.to_wire(),
    })))
}

#[cfg(test)]
mod tests {
    use curator_client::authority_ring::ReplacementStep;
    use curator_client::testing::{at, authority, authority_of, public, serial, statement};

    use super::*;

    /// The records of the first cluster, in which the authority signs that has this key.
    fn records(ring: AuthorityRing, signed: &SignedStatement) -> AuthorityRecords {
        let cluster = Cluster {
            id: authority(1).anchor().cluster,
            name: "ams".to_owned(),
            created_at: at(0),
            owner_keys: vec![public(7), public(8)],
            epoch: 3,
        };
        AuthorityRecords { ring, cluster, statement: signed.to_wire() }
    }

    fn plan(present: &AuthorityRecords, next: &Authority) -> Result<Installation, BootstrapError> {
        plan_installation(present, next, &[public(7)], at(9))
    }

    fn stolen() -> AuthorityRecords {
        records(AuthorityRing::new(authority(1)), &statement(3, 4_000).sign(&authority(1)).unwrap())
    }

    #[test]
    fn records_have_the_new_authority_alone_and_keep_what_is_revoked() {
        let begun = AuthorityRing::new(authority(1)).begin(authority_of(1, 6), at(0)).unwrap().unwrap();
        let signing = begun.apply_step(ReplacementStep::Sign, at(0)).unwrap();
        let by_six = Statement {
            authorities: [6, 1].map(|key| authority_of(1, key).anchor().clone()).to_vec(),
            ..statement(3, 7)
        };
        let by_six = by_six.sign(&authority_of(1, 6)).unwrap();
        let by_one = statement(3, 4_000).sign(&authority(1)).unwrap();
        let next = authority_of(1, 5);
        for (what, present) in [
            ("nothing is replaced", stolen()),
            ("a planned replacement has begun", records(begun, &by_one)),
            ("it signs already", records(signing, &by_six)),
        ] {
            let Installation::Write(written) = plan(&present, &next).unwrap() else { panic!("{what}") };
            assert_eq!(written.ring.encode(), AuthorityRing::new(authority_of(1, 5)).encode(), "{what}");
            assert_eq!(written.cluster.owner_keys, [public(7)], "{what}");
            let signed = SignedStatement::verify(&written.statement, slice::from_ref(next.anchor())).unwrap();
            assert_eq!(signed.statement.order(), (3, 1), "{what}");
            assert_eq!(signed.statement.authorities, [next.anchor().clone()], "{what}");
            assert!(signed.statement.revoked.contains_key(&serial(3)), "{what}");
            let by_thief =
                SignedStatement::verify(&written.statement, slice::from_ref(authority(1).anchor()));
            assert!(by_thief.is_err(), "{what}: the stolen one leads to it");
            // Another member with the same order.
            assert!(matches!(plan(&written, &next).unwrap(), Installation::Done), "{what}");
        }
    }

    #[test]
    fn authority_is_installed_once_also_if_it_was_replaced_since() {
        let next = authority_of(1, 5);
        let mut ring =
            AuthorityRing::new(authority_of(1, 5)).begin(authority_of(1, 6), at(0)).unwrap().unwrap();
        for step in [ReplacementStep::Sign, ReplacementStep::Drop, ReplacementStep::End] {
            ring = ring.apply_step(step, at(0)).unwrap();
        }
        let six = authority_of(1, 6);
        let signed =
            Statement { authorities: vec![six.anchor().clone()], ..statement(3, 9) }.sign(&six).unwrap();
        assert!(matches!(plan(&records(ring, &signed), &next).unwrap(), Installation::Done));
    }

    #[test]
    fn order_that_would_cut_off_the_cluster_is_refused_in_one_sentence() {
        let foreign = plan(&stolen(), &authority(2)).unwrap_err().to_string();
        let ownerless =
            plan_installation(&stolen(), &authority_of(1, 5), &[], at(9)).unwrap_err().to_string();
        assert!(ownerless.contains("no owner"), "{ownerless}");
        for text in [foreign, ownerless] {
            assert!(!text.contains(". "), "{text}");
        }
    }

    #[test]
    fn statement_that_nobody_signed_revokes_nothing() {
        let mut forged = stolen();
        forged.statement.signature[0] ^= 1;
        let Installation::Write(written) = plan(&forged, &authority_of(1, 5)).unwrap() else { panic!() };
        let signed =
            SignedStatement::verify(&written.statement, slice::from_ref(authority_of(1, 5).anchor()))
                .unwrap();
        assert!(signed.statement.revoked.is_empty());
    }
}
