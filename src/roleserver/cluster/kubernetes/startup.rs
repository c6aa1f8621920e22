//! What of Kubernetes is to run on this node: it follows from roles, from what a curator said, and for controllers from
//! whether etcd runs here. No I/O.
//!
//! Asked anew whenever anything of it changes, in whatever order that comes. What is not known yet holds up what does not
//! run, and stops nothing that does: a role server that starts finds its components running and knows nothing at first.

use crate::curator::node::Roles;
use crate::roleserver::cluster::facts::{ControlPlane, Facts};
use crate::roleserver::cluster::kubernetes::setup::Setup;
use crate::supervisor::reduce::Inputs;

/// What is to become of the components of one role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// There are none: those that run are stopped. Where the node has the role all the same, the sentence says why.
    Off(Option<String>),
    /// Those that run go on, and none is started; the sentence says why.
    Held(String),
    /// They run.
    On,
}

impl Part {
    /// Why it does not run, though the node has the role.
    #[must_use]
    pub fn waits(&self) -> Option<&str> {
        match self {
            Self::Off(why) => why.as_deref(),
            Self::Held(why) => Some(why),
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
}

/// Decides what is to run; nothing while nobody knows what the node is to do.
#[must_use]
pub fn decide(known: &Known) -> Option<Startup> {
    let roles = known.roles.as_ref()?;
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
    let worker = if roles.kubernetes_worker {
        // A node that said nothing would be waited for.
        Part::Off(Some("this release of the role server runs no workloads of Kubernetes yet".to_owned()))
    } else {
        Part::Off(None)
    };
    Some(Startup { controller, worker, setup: known.setup.clone().flatten() })
}

/// What it follows from, together.
#[must_use]
pub fn inputs(facts: &Facts) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&facts.roles, |known: &mut Known, roles| known.roles = Some(roles))
        .with(&facts.control_plane, |known: &mut Known, control_plane| known.control_plane = control_plane)
        .with(&facts.setup, |known: &mut Known, setup| known.setup = Some(setup))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::curator::node::ConsensusMember;
    use crate::roleserver::cluster::kubernetes::setup::tests::setup;

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
            Part::On => "on",
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_are_known() {
        let known =
            Known { setup: Some(None), control_plane: Some(ControlPlane { port: 1 }), ..Known::default() };
        assert_eq!(decide(&known), None);
    }

    #[test]
    fn parts_run_when_all_is_there_and_what_is_unknown_stops_nothing() {
        let there = Some(ControlPlane { port: 7835 });
        let own = Some(Some(setup()));
        for (roles, control_plane, setup, controller, worker) in [
            (roles(true, false, false), there, own.clone(), "off", "off"),
            (roles(true, true, true), there, own.clone(), "on", "off, said"),
            (roles(true, true, false), there, own.clone(), "on", "off"),
            // Waiting for etcd is no failure, and stops nothing that another life started.
            (roles(true, true, true), None, own.clone(), "held", "off, said"),
            (roles(true, true, true), there, None, "held", "off, said"),
            (roles(true, true, true), None, None, "held", "off, said"),
            // That there is nothing is something else than that nobody has said.
            (roles(true, true, true), there, Some(None), "off, said", "off, said"),
            (roles(true, true, true), None, Some(None), "off, said", "off, said"),
            // Its etcd goes, or is gone.
            (roles(false, true, true), there, own.clone(), "off, said", "off, said"),
            (roles(false, true, false), None, own.clone(), "off, said", "off"),
            (roles(false, false, true), None, own.clone(), "off", "off, said"),
            (roles(false, false, false), None, None, "off", "off"),
        ] {
            let known = Known { roles: Some(roles.clone()), control_plane, setup: setup.clone() };
            let decided = decide(&known).unwrap();
            let words = (word(&decided.controller), word(&decided.worker));
            assert_eq!(words, (controller, worker), "{roles:?} {control_plane:?} {}", setup.is_some());
        }
    }

    #[tokio::test]
    async fn whatever_comes_first_the_same_runs_in_the_end() {
        let steps: [fn(&Facts); 3] = [
            |facts| facts.roles.set(roles(true, true, false)),
            |facts| facts.control_plane.set(Some(ControlPlane { port: 7835 })),
            |facts| facts.setup.set(Some(setup())),
        ];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let facts = Facts::default();
            let mut inputs = inputs(&facts);
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
