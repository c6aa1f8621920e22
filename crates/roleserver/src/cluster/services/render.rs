//! Keep the desired services up to date, with a debounced list of curators.
//!
//! The facts come from the disk first: a node that starts renders what it rendered last, before it reaches a curator.
//! The IDs of the node and its cluster come from its key and its certificate.
//!
//! A curator disappears from the list and returns a moment later whenever its role server restarts. Services whose
//! arguments contain the list would be restarted on every node, twice each time. So services get a changed list only
//! once it has been the same for `DEBOUNCE`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use curator_client::clock::Clock;
use curator_client::pki::TrustAnchor;
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::{NodeFacts, node_id_of_key};
use crate::cluster::services::desired::{
    DeclarationMap, DesiredService, NodeInfo, RenderInputs, ServiceId, desired_services,
};
use crate::cluster::services::persisted::{self, PersistedNodeInfo};
use crate::cluster::services::service_state::Moment;

/// Time that a list of curators has to be the same before services get it.
const DEBOUNCE: Duration = Duration::from_mins(1);

/// The facts from other parts of the node; `None` for an unknown one.
#[derive(Clone, Debug, Default)]
struct RenderFacts {
    declared: Option<DeclarationMap>,
    address: Option<IpAddr>,
    node_info: Option<NodeInfo>,
    curators: Option<BTreeSet<String>>,
}

/// The list of curators that services get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct DebouncedCurators {
    published: Option<BTreeSet<String>>,
    /// A different list, and since when it has been observed.
    pending: Option<(BTreeSet<String>, Moment)>,
}

impl DebouncedCurators {
    /// Starts with the list that services got last.
    const fn new(published: Option<BTreeSet<String>>) -> Self {
        Self { published, pending: None }
    }

    /// Records the list that is observed at `now`. Returns the list for services, and when to call this again.
    fn observe(
        &mut self,
        seen: Option<&BTreeSet<String>>,
        now: Moment,
    ) -> (Option<BTreeSet<String>>, Option<Moment>) {
        match seen {
            None => self.pending = None,
            Some(seen) if self.published.as_ref() == Some(seen) => self.pending = None,
            // No service has an older list that would change.
            Some(seen) if self.published.is_none() => self.published = Some(seen.clone()),
            Some(seen) => {
                let since = match &self.pending {
                    Some((next, since)) if next == seen => *since,
                    _ => now,
                };
                if now >= since + DEBOUNCE {
                    (self.published, self.pending) = (Some(seen.clone()), None);
                } else {
                    self.pending = Some((seen.clone(), since));
                }
            }
        }
        (self.published.clone(), self.pending.as_ref().map(|(_, since)| *since + DEBOUNCE))
    }
}

/// Makes the runnable that publishes the desired services in `output`.
#[must_use]
pub fn render_services(
    files: ClusterFiles,
    facts: NodeFacts,
    clock: Clock,
    output: WatchCell<BTreeMap<ServiceId, DesiredService>>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock, output) = (files.clone(), facts.clone(), clock.clone(), output.clone());
        async move {
            let scope = starting.scope().clone();
            let (node, cluster) = node_and_cluster_ids(&files, &facts, &scope).await?;
            let mut last = persisted::read_node_info(&files);
            let mut settling = DebouncedCurators::new(last.curators.clone());
            let mut inputs = CombinedInputs::new(RenderFacts::default())
                .with(&facts.declarations, |render_facts: &mut RenderFacts, declared| {
                    render_facts.declared = Some(declared);
                })
                .with(&facts.address, |render_facts: &mut RenderFacts, address| {
                    render_facts.address = Some(address);
                })
                .with(&facts.node_info, |render_facts: &mut RenderFacts, about| {
                    render_facts.node_info = Some(about);
                })
                .with(&facts.curators, |render_facts: &mut RenderFacts, curators| {
                    render_facts.curators = Some(curators);
                });
            let _healthy = starting.mark_healthy();
            let mut render_facts = RenderFacts::default();
            loop {
                let (curators, look_again) =
                    settling.observe(render_facts.curators.as_ref(), clock.monotonic());
                let known = RenderInputs {
                    node: node.clone(),
                    cluster: cluster.clone(),
                    address: render_facts.address.or(last.address),
                    node_info: render_facts.node_info.clone().or_else(|| last.about.clone()),
                    curators,
                };
                let now = PersistedNodeInfo::from(&known);
                if now != last {
                    // Stored before any service runs with them, so that a start after a reboot renders the same.
                    persisted::write_node_info(&files, &now)?;
                    last = now;
                }
                if let Some(declared) = &render_facts.declared {
                    let now = desired_services(declared, &known);
                    if output.latest().as_ref() != Some(&now) {
                        output.set(now);
                    }
                }
                let due = async {
                    match look_again {
                        Some(moment) => {
                            tokio::time::sleep(moment.saturating_sub(clock.monotonic())).await;
                        }
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = inputs.next() => render_facts = next,
                    () = due => {}
                }
            }
        }
    })
}

/// IDs of the node and of its cluster.
async fn node_and_cluster_ids(
    files: &ClusterFiles,
    facts: &NodeFacts,
    scope: &Scope,
) -> Result<(String, String), RunnableError> {
    if let (Some(key), Some(credentials)) = (files.read_key()?, files.read_credentials()?) {
        let anchor = TrustAnchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
        return Ok((node_id_of_key(&key).to_string(), anchor.cluster.to_string()));
    }
    let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
    Ok((connection.id.to_string(), connection.anchor.cluster.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curator_list_is_published_once_it_is_stable() {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<String>>();
        let (one, both) = (list(&["a"]), list(&["a", "b"]));
        let at = Duration::from_secs;
        let mut settling = DebouncedCurators::new(None);
        for (seen, now, messages, look_again) in [
            (None, 0, None, None),
            (Some(&both), 1, Some(&both), None),
            // One curator is restarting.
            (Some(&one), 10, Some(&both), Some(70)),
            (Some(&one), 30, Some(&both), Some(70)),
            (Some(&both), 40, Some(&both), None),
            // It is gone for good.
            (Some(&one), 100, Some(&both), Some(160)),
            (Some(&one), 159, Some(&both), Some(160)),
            (Some(&one), 160, Some(&one), None),
            // A third list restarts the debounce.
            (Some(&both), 200, Some(&one), Some(260)),
            (Some(&list(&["c"])), 230, Some(&one), Some(290)),
            (Some(&both), 270, Some(&one), Some(330)),
            (None, 300, Some(&one), None),
        ] {
            let expected = (messages.cloned(), look_again.map(at));
            assert_eq!(settling.observe(seen, at(now)), expected, "at {now}");
        }
        assert_eq!(
            DebouncedCurators::new(Some(one.clone())).observe(Some(&both), at(0)),
            (Some(one), Some(DEBOUNCE))
        );
    }
}
