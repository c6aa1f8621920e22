//! The newest statement of each cluster's authority, stored in the BMDB.
//!
//! From the first statement on, the shepherd follows only a curator's certificate that is not revoked. The statement is
//! stored before it counts. So a shepherd that restarts, or that takes over from another one, refuses a revoked curator
//! too, although that curator is the only one that answers and claims that there is no statement.
//!
//! A stored statement is verified again when it is read. If it is damaged, nobody is followed: without it, any node of
//! the cluster could lead. A person who has found out why may clear it.

use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;

use crate::bmdb::cluster::statement::StoredStatement;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::curator_client::clock::Clock;
use crate::curator_client::peer_authorities::find_issuer;
use crate::curator_client::pki::TrustAnchor;
use crate::curator_client::statement::SignedStatement;
use crate::curator_client::statement_trust::{PersistStatement, StatementTrust, StatementWrite};
use crate::curator_client::succession::find_path;
use crate::manager::cluster::curators::CuratorCallError;
use crate::model::cluster::state::ClusterIdentity;
use crate::proto::curator::v1 as wire;

/// Age at which a certificate is replaced because another authority signs. A younger one may be by the authority that signs
/// next, of which no statement has arrived yet; another one would be, too.
const CHANGE_AGE: Duration = Duration::from_mins(1);

/// The trust in the statements of a cluster's authority: the former one, unless it is about another authority. Otherwise
/// it begins with the stored statement.
pub async fn load_statement_trust(
    bmdb: &Bmdb,
    founded: &ClusterIdentity,
    former: Option<StatementTrust>,
    clock: Clock,
) -> Result<StatementTrust, CuratorCallError> {
    if let Some(former) = former.filter(|former| is_about(former, &founded.ca_certificate)) {
        return Ok(former);
    }
    let anchor = TrustAnchor::parse(&founded.ca_certificate)?;
    let stored = bmdb.cluster_statement(anchor.cluster).await?;
    let stored = stored.map(|stored| parse_stored_statement(&stored, &anchor)).transpose();
    let stored = stored.map_err(CuratorCallError::DamagedStatement)?;
    let persist = persist_in_bmdb(bmdb.clone(), &anchor);
    Ok(StatementTrust::new(anchor, stored, persist, clock))
}

/// Whether this is the trust in the statements of that authority, its certificate. After a theft, the cluster has another.
pub(super) fn is_about(trust: &StatementTrust, certificate: &[u8]) -> bool {
    trust.anchor().certificate == certificate
}

fn persist_in_bmdb(bmdb: Bmdb, anchor: &TrustAnchor) -> PersistStatement {
    let (cluster, anchor) = (anchor.cluster, anchor.certificate.clone());
    Arc::new(move |signed: SignedStatement| -> StatementWrite {
        let (bmdb, anchor) = (bmdb.clone(), anchor.clone());
        Box::pin(async move {
            let encoded = signed.to_wire().encode_to_vec();
            let statement = StoredStatement { encoded, order: stored_order(&signed) };
            bmdb.raise_cluster_statement(cluster, anchor, statement).await.map_err(|error| error.to_string())
        })
    })
}

/// Whether this is the certificate of the authority that the cluster was founded with, or of one that replaced it as far
/// as the stored statement proves. A cluster that is restored has the authority that signed when the snapshot was taken.
pub async fn is_own_authority(
    bmdb: &Bmdb,
    founded: &ClusterIdentity,
    certificate: &[u8],
) -> Result<bool, BmdbError> {
    if certificate == founded.ca_certificate {
        return Ok(true);
    }
    let Ok(anchor) = TrustAnchor::parse(&founded.ca_certificate) else { return Ok(false) };
    let stored = bmdb.cluster_statement(anchor.cluster).await?;
    Ok(stored.is_some_and(|stored| has_replaced(&anchor, &stored.encoded, certificate)))
}

/// Whether the successions of a statement lead from the anchor to this certificate.
fn has_replaced(anchor: &TrustAnchor, statement: &[u8], certificate: &[u8]) -> bool {
    let Ok(sent) = wire::SignedStatement::decode(statement) else { return false };
    find_path(std::slice::from_ref(anchor), &sent.successors, |found| found.certificate == certificate)
        .is_some()
}

/// Verifies a stored statement. The error is a part of a sentence.
fn parse_stored_statement(stored: &StoredStatement, anchor: &TrustAnchor) -> Result<SignedStatement, String> {
    let sent = wire::SignedStatement::decode(stored.encoded.as_slice())
        .map_err(|_| "it cannot be decoded".to_owned())?;
    let signed =
        SignedStatement::verify(&sent, std::slice::from_ref(anchor)).map_err(|error| error.to_string())?;
    if stored_order(&signed) != stored.order {
        return Err("its epoch and number are not the signed ones".to_owned());
    }
    Ok(signed)
}

/// Epoch and number as the BMDB stores them.
fn stored_order(signed: &SignedStatement) -> (i64, i64) {
    let (epoch, number) = signed.statement.order();
    let stored = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    (stored(epoch), stored(number))
}

/// Whether a certificate of this age is replaced because another one of the authorities signs now, the first.
pub(super) fn is_change_due(certificate: &[u8], authorities: &[TrustAnchor], age: Duration) -> bool {
    let issuer = find_issuer(certificate, authorities).map(|issuer| issuer.key);
    issuer != authorities.first().map(|signer| signer.key) && age >= CHANGE_AGE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator_client::succession::Succession;
    use crate::curator_client::testing::{at, authority, authority_of, public, serial, statement, validity};

    #[test]
    fn restored_cluster_has_an_authority_that_the_statement_leads_to() {
        let (first, second, third) = (authority(1), authority_of(1, 5), authority_of(1, 6));
        let successors = vec![
            Succession::sign(&first, second.anchor()).unwrap(),
            Succession::sign(&second, third.anchor()).unwrap(),
        ];
        let sent = |successors: &[Vec<u8>]| {
            wire::SignedStatement { successors: successors.to_vec(), ..Default::default() }.encode_to_vec()
        };
        for (what, statement, authority, expected) in [
            ("the first successor", sent(&successors), &second, true),
            ("the last one", sent(&successors), &third, true),
            ("a link is missing", sent(&successors[1..]), &third, false),
            ("never replaced", sent(&[]), &second, false),
            ("nobody knows it", sent(&successors), &authority_of(1, 7), false),
            ("damaged", vec![0xff; 9], &second, false),
        ] {
            let certificate = &authority.anchor().certificate;
            assert_eq!(has_replaced(first.anchor(), &statement, certificate), expected, "{what}");
        }
    }

    #[test]
    fn damaged_statement_is_refused_in_one_sentence() {
        let anchor = authority(1).anchor().clone();
        let signed = statement(0, 2).sign(&authority(1)).unwrap();
        let encoded = signed.to_wire().encode_to_vec();
        let whole = StoredStatement { encoded: encoded.clone(), order: (0, 2) };
        assert_eq!(parse_stored_statement(&whole, &anchor), Ok(signed));
        let mut changed = encoded.clone();
        changed[20] ^= 1;
        let foreign = authority(2).anchor().clone();
        for (stored, anchor, expected) in [
            (StoredStatement { encoded: vec![0xff; 9], order: (0, 2) }, &anchor, "it cannot be decoded"),
            (StoredStatement { encoded: changed, order: (0, 2) }, &anchor, "the signature"),
            (StoredStatement { encoded: encoded.clone(), order: (0, 3) }, &anchor, "not the signed ones"),
            (StoredStatement { encoded: encoded.clone(), order: (0, 0) }, &anchor, "not the signed ones"),
            (whole, &foreign, "is about cluster"),
        ] {
            let error = parse_stored_statement(&stored, anchor).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
            let error = CuratorCallError::DamagedStatement(error).to_string();
            assert!(error.contains("is damaged") && !error.contains(". "), "{error}");
        }
    }

    #[test]
    fn nothing_that_was_trusted_before_a_theft_counts_after_it() {
        let clock = Clock::new(|| at(0), || Duration::ZERO);
        let trust = StatementTrust::in_memory(authority(1).anchor().clone(), clock);
        for (key, expected) in [(1, true), (5, false)] {
            assert_eq!(is_about(&trust, &authority_of(1, key).anchor().certificate), expected, "{key}");
        }
    }

    #[test]
    fn certificate_by_another_authority_is_replaced_but_not_at_once() {
        let anchors = [1, 5].map(|key| authority_of(1, key).anchor().clone());
        for (issuer, age, due) in [
            (1, CHANGE_AGE, false),
            (5, Duration::ZERO, false),
            (5, CHANGE_AGE, true),
            // The authority was replaced while this shepherd was cut off.
            (6, Duration::ZERO, false),
            (6, CHANGE_AGE, true),
        ] {
            let issued =
                authority_of(1, issuer).issue_owner_certificate("kim", &public(7), serial(3), validity());
            let due_now = is_change_due(&issued.unwrap().certificate, &anchors, age);
            assert_eq!(due_now, due, "{issuer} {age:?}");
        }
    }
}
