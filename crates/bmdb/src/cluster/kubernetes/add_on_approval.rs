//! Signatures and the two-person rule for add-ons: their objects are applied with all rights in the cluster, so they give
//! root on nodes ([`model::signed_artefact::declaration_proof`]).

use std::collections::BTreeMap;

use sqlx::PgConnection;

use crate::cluster::lock::order_target;
use crate::connection::DbContext as _;
use crate::connection::error::{BmdbError, order_rejected};
use crate::engine::policy::read_policy_in_tx;
use crate::orders::approval::require_second_approval;
use crate::orders::order::Order;
use model::artefact::parse_digest;
use model::cluster::kubernetes::KubernetesSpec;
use model::signed_artefact::declaration_proof::{DeclarationProof, decide_declaration, is_signed_add_on};
use model::signed_artefact::signing_trust::SigningTrust;
use model::two_person_rule::SensitiveOrder;

/// An add-on that is new or has other objects is signed with a key in `trust`. Where the two-person rule is on, a second
/// admin approves it otherwise, who reads its digest. Returns who approved it. `cluster` is the identity of the cluster, or
/// empty for one that does not exist yet.
pub(crate) async fn approve_add_ons(
    tx: &mut PgConnection,
    order: &Order,
    (cluster, name): (&[u8], &str),
    (before, wanted): (Option<&KubernetesSpec>, &KubernetesSpec),
    trust: &SigningTrust,
) -> Result<Option<String>, BmdbError> {
    let none = BTreeMap::new();
    let changed = list_changed(before.map_or(&none, |before| &before.add_ons), &wanted.add_ons);
    let mut unsigned = Vec::new();
    for (add_on, digest) in &changed {
        if !is_signed_add_on(read_signature(tx, digest).await?.as_deref(), add_on, trust) {
            unsigned.push(format!("{add_on} ({digest})"));
        }
    }
    let unsigned = unsigned.join(", ");
    let policy = read_policy_in_tx(tx).await?;
    let rule = policy.two_person_rule;
    match decide_declaration(unsigned.is_empty(), trust, rule.required, policy.allow_unsigned_releases) {
        DeclarationProof::Signed => return Ok(None),
        DeclarationProof::TwoPersonRule => {}
        DeclarationProof::SignatureRequired => {
            let text = format!(
                "the cluster {name} gets no add-ons whose objects nobody signed as a declaration of that name: {unsigned}; \
                 sign each file with minisign, and add it again with its signature: shepherdctl artefacts add FILE"
            );
            return Err(order_rejected("NOT_SIGNED", text));
        }
    }
    let target = format!("{}: the add-ons {unsigned}", order_target(name));
    let shown = Order { target, ..order.clone() };
    // A name of an artefact may mean another file by then.
    let about = [cluster, unsigned.as_bytes()].concat();
    require_second_approval(tx, &shown, SensitiveOrder::SetAddOns, rule, &about).await
}

/// The signature of an artefact.
async fn read_signature(tx: &mut PgConnection, sha256: &str) -> Result<Option<String>, BmdbError> {
    let digest = parse_digest(sha256).map_err(BmdbError::Corrupt)?;
    let row = sqlx::query_file!("../../sql/artefact/lock.sql", digest.0.as_slice())
        .fetch_optional(tx)
        .await
        .context("reading the signature of an add-on")?;
    Ok(row.and_then(|row| row.signature))
}

/// The add-ons with other objects than before, each with the digest of its objects.
fn list_changed(
    before: &BTreeMap<String, String>,
    wanted: &BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let is_new = |(name, digest): &(&String, &String)| before.get(*name) != Some(*digest);
    wanted.iter().filter(is_new).map(|(name, digest)| (name.clone(), digest.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_and_replaced_add_ons_are_listed() {
        let add_ons = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned())).collect()
        };
        let before = add_ons(&[("dns", "aa"), ("network", "bb")]);
        for (wanted, expected) in [
            (before.clone(), vec![]),
            (add_ons(&[("dns", "aa")]), vec![]),
            (add_ons(&[("dns", "cc"), ("network", "bb"), ("web", "aa")]), vec![("dns", "cc"), ("web", "aa")]),
        ] {
            let expected: Vec<(String, String)> =
                expected.into_iter().map(|(name, digest)| (name.to_owned(), digest.to_owned())).collect();
            assert_eq!(list_changed(&before, &wanted), expected);
        }
    }
}
