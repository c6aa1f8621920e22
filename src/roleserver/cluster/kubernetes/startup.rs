//! What of Kubernetes is to run on this node: it follows from roles, from what a curator said, for controllers from
//! whether etcd runs here, and for workers from whether their pods are elsewhere before they end. No I/O.
//!
//! Asked anew whenever anything of it changes, in whatever order that comes. What is not known yet holds up what does not
//! run, and stops nothing that does: a role server that starts finds its components running and knows nothing at first.

use crate::curator::node::Roles;
use crate::roleserver::cluster::facts::{ControlPlane, Facts};
use crate::roleserver::cluster::kubernetes::own_node::Handed;
use crate::roleserver::cluster::kubernetes::setup::Setup;
use crate::supervisor::reduce::Inputs;
use crate::supervisor::value::Value;

/// What is to become of the components of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// There are none: those that run are stopped. Where the node has the role all the same, the sentence says why.
    Off(Option<String>),
    /// Those that run go on, and none is started; the sentence says why.
    Held(String),
    /// Those that run go on until they have handed over what they do, and none is started; the sentence says so.
    Leaving(String),
    /// They run.
    On,
}

impl Part {
    /// Why it does not run, though the node has the role.
    #[must_use]
    pub fn waits(&self) -> Option<&str> {
        match self {
            Self::Off(why) => why.as_deref(),
            Self::Held(why) | Self::Leaving(why) => Some(why),
            Self::On => None,
        }
    }
}

/// What is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Startup {
    /// The control plane.
    pub controller: Part,
    /// Workloads.
    pub worker: Part,
    /// What it runs by; there is one where a part is on.
    pub setup: Option<Setup>,
}

/// What is known of this node.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// What it is to do.
    pub roles: Option<Roles>,
    /// Whether etcd and a curator run here.
    pub control_plane: Option<ControlPlane>,
    /// What a curator said; the outer one is none while none has.
    pub setup: Option<Option<Setup>>,
    /// Whether a worker here has no pods that go elsewhere before it ends.
    pub handed_over: Option<bool>,
}

/// Decides what is to run; nothing while nobody knows what the node is to do.
#[must_use]
pub fn decide(known: &Known) -> Option<Startup> {
    let (roles, handed_over) = (known.roles.as_ref()?, known.handed_over?);
    let said = |part: Part| match &known.setup {
        None => Part::Held("no curator has said yet what is to run of Kubernetes".to_owned()),
        Some(None) => {
            Part::Off(Some("the cluster has no Kubernetes, or nothing of it for this node".to_owned()))
        }
        Some(Some(_)) => part,
    };
    let controller = if !roles.kubernetes_controller {
        Part::Off(None)
    } else if roles.consensus_member.is_none() {
        // Without its etcd an API server has nothing to answer with.
        Part::Off(Some("a controller needs etcd beside it, and this node is no consensus member".to_owned()))
    } else if known.control_plane.is_none() {
        said(Part::Held("etcd and the curator of this node do not run yet".to_owned()))
    } else {
        said(Part::On)
    };
    let worker = if roles.kubernetes_worker { said(Part::On) } else { Part::Off(None) };
    let has_range = known.setup.iter().flatten().all(|setup| !setup.pod_range().is_empty());
    let worker = match worker {
        Part::On if !has_range => {
            Part::Held("no curator has given this node its part of the pods' addresses yet".to_owned())
        }
        Part::Off(_) if !handed_over => {
            Part::Leaving("its pods go to other nodes before it stops running any".to_owned())
        }
        part => part,
    };
    Some(Startup { controller, worker, setup: known.setup.clone().flatten() })
}

/// What it follows from, together.
#[must_use]
pub fn inputs(facts: &Facts, handed: &Value<Handed>) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&facts.roles, |known: &mut Known, roles| known.roles = Some(roles))
        .with(&facts.control_plane, |known: &mut Known, control_plane| known.control_plane = control_plane)
        .with(&facts.setup, |known: &mut Known, setup| known.setup = Some(setup))
        .with(handed, |known: &mut Known, handed| known.handed_over = Some(handed.over))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::curator::node::ConsensusMember;
    use crate::roleserver::cluster::kubernetes::setup::tests::{said, setup};

    fn roles(member: bool, controller: bool, worker: bool) -> Roles {
        let consensus_member = member.then(|| ConsensusMember { member: 7, peers: BTreeMap::new() });
        Roles {
            consensus_member,
            kubernetes_controller: controller,
            kubernetes_worker: worker,
            ..Roles::default()
        }
    }

    /// A word for each part: what is stopped, what is stopped and said why, what is held, what runs.
    fn word(part: &Part) -> &'static str {
        match part {
            Part::Off(None) => "off",
            Part::Off(Some(_)) => "off, said",
            Part::Held(_) => "held",
            Part::Leaving(_) => "leaving",
            Part::On => "on",
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_are_known() {
        let known = Known {
            setup: Some(None),
            control_plane: Some(ControlPlane { port: 1 }),
            handed_over: Some(true),
            ..Known::default()
        };
        assert_eq!(decide(&known), None);
        // Nor while nobody knows what would be lost.
        let known = Known { roles: Some(Roles::default()), handed_over: None, ..known };
        assert_eq!(decide(&known), None);
    }

    #[test]
    fn parts_run_when_all_is_there_and_what_is_unknown_stops_nothing() {
        let there = Some(ControlPlane { port: 7835 });
        let own = Some(Some(setup()));
        for (roles, control_plane, setup, controller, worker) in [
            (roles(true, false, false), there, own.clone(), "off", "off"),
            (roles(true, true, true), there, own.clone(), "on", "on"),
            (roles(true, true, false), there, own.clone(), "on", "off"),
            // Waiting for etcd is no failure, and stops nothing that another life started.
            (roles(true, true, true), None, own.clone(), "held", "on"),
            (roles(true, true, true), there, None, "held", "held"),
            (roles(true, true, true), None, None, "held", "held"),
            // That there is nothing is something else than that nobody has said.
            (roles(true, true, true), there, Some(None), "off, said", "off, said"),
            (roles(true, true, true), None, Some(None), "off, said", "off, said"),
            // Its etcd goes, or is gone.
            (roles(false, true, true), there, own.clone(), "off, said", "on"),
            (roles(false, true, false), None, own.clone(), "off, said", "off"),
            (roles(false, false, true), None, own.clone(), "off", "on"),
            (roles(false, false, false), None, None, "off", "off"),
        ] {
            let known = Known {
                roles: Some(roles.clone()),
                control_plane,
                setup: setup.clone(),
                handed_over: Some(true),
            };
            let decided = decide(&known).unwrap();
            let words = (word(&decided.controller), word(&decided.worker));
            assert_eq!(words, (controller, worker), "{roles:?} {control_plane:?} {}", setup.is_some());
        }
    }

    #[test]
    fn worker_ends_when_its_pods_are_elsewhere_and_begins_when_pods_have_addresses() {
        let decided = |worker, setup: Option<Option<Setup>>, handed_over| {
            let roles = Some(roles(false, false, worker));
            let known = Known { roles, setup, handed_over: Some(handed_over), ..Known::default() };
            word(&decide(&known).unwrap().worker)
        };
        let own = Some(Some(setup()));
        assert_eq!(decided(true, own.clone(), false), "on");
        assert_eq!(decided(false, own.clone(), false), "leaving");
        assert_eq!(decided(false, own, true), "off");
        // There is no Kubernetes any more, which is no reason for haste either.
        assert_eq!(decided(true, Some(None), false), "leaving");
        assert_eq!(decided(true, Some(None), true), "off, said");
        assert_eq!(decided(true, None, false), "held");
        let mut lacking = said();
        lacking.pod_range.clear();
        assert_eq!(decided(true, Some(Some(Setup::new(lacking).unwrap())), true), "held");
    }

    #[tokio::test]
    async fn whatever_comes_first_the_same_runs_in_the_end() {
        let steps: [fn(&Facts); 3] = [
            |facts| facts.roles.set(roles(true, true, false)),
            |facts| facts.control_plane.set(Some(ControlPlane { port: 7835 })),
            |facts| facts.setup.set(Some(setup())),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let (facts, handed) = (Facts::default(), Value::new());
            handed.set(Handed { over: true, bundle: None });
            let mut inputs = inputs(&facts, &handed);
            let mut last = None;
            for (number, step) in order.iter().enumerate() {
                steps[*step](&facts);
                last = decide(&inputs.next().await);
                let on = last.as_ref().is_some_and(|startup| startup.controller == Part::On);
                assert_eq!(on, number == 2, "{order:?} after {number}");
            }
            assert_eq!(last.unwrap().setup, Some(setup()));
            // A control plane that is replaced is noticed, and what runs goes on meanwhile.
            facts.control_plane.set(None);
            assert_eq!(word(&decide(&inputs.next().await).unwrap().controller), "held");
        }
    }
}
