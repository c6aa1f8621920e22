//! From what is declared and what is known of this node to what is to run.
//!
//! Facts come from the disk first: a node that starts renders what it rendered last, before anybody could tell it
//! anything. Who the node is stands in its key and its certificate.
//!
//! Curators come and go whenever one of their role servers starts again, and are back in a moment; services that are told
//! where curators are would start again on every node, twice each time. So another list of curators holds for services
//! once it has been the same for [`SETTLED`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::curator::clock::Clock;
use crate::curator::pki::Anchor;
use crate::roleserver::cluster::facts::{Facts, id_of};
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::services::kept::{self, KeptAbout};
use crate::roleserver::cluster::services::state::Moment;
use crate::roleserver::cluster::services::wanted::{About, Declared, Id, Known, Wanted, wanted};
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::reduce::Inputs;
use crate::supervisor::value::Value;

/// How long a list of curators is the same before services are told it.
pub const SETTLED: Duration = Duration::from_mins(1);

/// What others say; what nobody has said is none.
#[derive(Clone, Debug, Default)]
struct Said {
    declared: Option<Declared>,
    address: Option<IpAddr>,
    about: Option<About>,
    curators: Option<BTreeSet<String>>,
}

/// The curators that services are told of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settling {
    told: Option<BTreeSet<String>>,
    /// Another list, and since when it is that.
    next: Option<(BTreeSet<String>, Moment)>,
}

impl Settling {
    /// Begins with what services were told last.
    #[must_use]
    pub const fn new(told: Option<BTreeSet<String>>) -> Self {
        Self { told, next: None }
    }

    /// Curators are these at `now`. Gives what services are told, and when to look again.
    pub fn look(
        &mut self,
        seen: Option<&BTreeSet<String>>,
        now: Moment,
    ) -> (Option<BTreeSet<String>>, Option<Moment>) {
        match seen {
            None => self.next = None,
            Some(seen) if self.told.as_ref() == Some(seen) => self.next = None,
            // Nothing was told that could be wrong.
            Some(seen) if self.told.is_none() => self.told = Some(seen.clone()),
            Some(seen) => {
                let since = match &self.next {
                    Some((next, since)) if next == seen => *since,
                    _ => now,
                };
                if now >= since + SETTLED {
                    (self.told, self.next) = (Some(seen.clone()), None);
                } else {
                    self.next = Some((seen.clone(), since));
                }
            }
        }
        (self.told.clone(), self.next.as_ref().map(|(_, since)| *since + SETTLED))
    }
}

/// The runnable; `output` is what is to run.
#[must_use]
pub fn render(files: Files, facts: Facts, clock: Clock, output: Value<BTreeMap<Id, Wanted>>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock, output) = (files.clone(), facts.clone(), clock.clone(), output.clone());
        async move {
            let scope = starting.scope().clone();
            let (node, cluster) = who(&files, &facts, &scope).await?;
            let mut last = kept::about(&files);
            let mut settling = Settling::new(last.curators.clone());
            let mut inputs = Inputs::new(Said::default())
                .with(&facts.declarations, |said: &mut Said, declared| said.declared = Some(declared))
                .with(&facts.address, |said: &mut Said, address| said.address = Some(address))
                .with(&facts.about, |said: &mut Said, about| said.about = Some(about))
                .with(&facts.curators, |said: &mut Said, curators| said.curators = Some(curators));
            let _healthy = starting.healthy();
            let mut said = Said::default();
            loop {
                let (curators, look_again) = settling.look(said.curators.as_ref(), clock.running());
                let known = Known {
                    node: node.clone(),
                    cluster: cluster.clone(),
                    address: said.address.or(last.address),
                    about: said.about.clone().or_else(|| last.about.clone()),
                    curators,
                };
                let now = KeptAbout::from(&known);
                if now != last {
                    // Before anything runs by it: what starts after a reboot starts by the same.
                    kept::write_about(&files, &now)?;
                    last = now;
                }
                if let Some(declared) = &said.declared {
                    let now = wanted(declared, &known);
                    if output.latest().as_ref() != Some(&now) {
                        output.set(now);
                    }
                }
                let due = async {
                    match look_again {
                        Some(moment) => {
                            tokio::time::sleep(moment.saturating_sub(clock.running())).await;
                        }
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = inputs.next() => said = next,
                    () = due => {}
                }
            }
        }
    })
}

/// Ids of the node and of its cluster.
async fn who(files: &Files, facts: &Facts, scope: &Scope) -> Result<(String, String), Stop> {
    if let (Some(key), Some(credentials)) = (files.key()?, files.credentials()?) {
        let anchor = Anchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
        return Ok((id_of(&key).to_string(), anchor.cluster.to_string()));
    }
    let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
    Ok((connection.id.to_string(), connection.anchor.cluster.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_list_of_curators_holds_once_it_has_been_the_same_for_a_while() {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<String>>();
        let (one, both) = (list(&["a"]), list(&["a", "b"]));
        let at = Duration::from_secs;
        let mut settling = Settling::new(None);
        for (seen, now, told, look_again) in [
            (None, 0, None, None),
            (Some(&both), 1, Some(&both), None),
            // One of them starts again.
            (Some(&one), 10, Some(&both), Some(70)),
            (Some(&one), 30, Some(&both), Some(70)),
            (Some(&both), 40, Some(&both), None),
            // It is gone for good.
            (Some(&one), 100, Some(&both), Some(160)),
            (Some(&one), 159, Some(&both), Some(160)),
            (Some(&one), 160, Some(&one), None),
            // A third state begins its time anew.
            (Some(&both), 200, Some(&one), Some(260)),
            (Some(&list(&["c"])), 230, Some(&one), Some(290)),
            (Some(&both), 270, Some(&one), Some(330)),
            (None, 300, Some(&one), None),
        ] {
            let expected = (told.cloned(), look_again.map(at));
            assert_eq!(settling.look(seen, at(now)), expected, "at {now}");
        }
        assert_eq!(Settling::new(Some(one.clone())).look(Some(&both), at(0)), (Some(one), Some(SETTLED)));
    }
}
