//! Two-person rule for add-ons: the bundle applies their objects with all rights in the cluster, so they give root on nodes.

use std::collections::BTreeMap;

use sqlx::PgConnection;

use crate::cluster::lock::order_target;
use crate::connection::error::BmdbError;
use crate::engine::policy::read_policy_in_tx;
use crate::orders::approval::require_second_approval;
use crate::orders::order::Order;
use model::cluster::kubernetes::KubernetesSpec;
use model::two_person_rule::SensitiveOrder;

/// Where the two-person rule is on, an add-on that is new or has other objects needs a second admin, who reads its digest.
/// Returns who approved it. `cluster` is the identity of the cluster, or empty for one that does not exist yet.
pub(crate) async fn approve_add_ons(
    tx: &mut PgConnection,
    order: &Order,
    (cluster, name): (&[u8], &str),
    before: Option<&KubernetesSpec>,
    wanted: &KubernetesSpec,
) -> Result<Option<String>, BmdbError> {
    let none = BTreeMap::new();
    let changed = list_changed(before.map_or(&none, |before| &before.add_ons), &wanted.add_ons);
    if changed.is_empty() {
        return Ok(None);
    }
    let target = format!("{}: the add-ons {}", order_target(name), changed.join(", "));
    let shown = Order { target, ..order.clone() };
    let rule = read_policy_in_tx(tx).await?.two_person_rule;
    // A name of an artefact may mean another file by then.
    let about = [cluster, changed.join(", ").as_bytes()].concat();
    require_second_approval(tx, &shown, SensitiveOrder::SetAddOns, rule, &about).await
}

/// The add-ons with other objects than before, each with the digest of its objects.
fn list_changed(before: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> Vec<String> {
    let is_new = |(name, digest): &(&String, &String)| before.get(*name) != Some(*digest);
    wanted.iter().filter(is_new).map(|(name, digest)| format!("{name} ({digest})")).collect()
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
            (add_ons(&[("dns", "cc"), ("network", "bb"), ("web", "aa")]), vec!["dns (cc)", "web (aa)"]),
        ] {
            assert_eq!(list_changed(&before, &wanted), expected);
        }
    }
}
