//! What is to run of Kubernetes on this node, as services are: pure.
//!
//! Whoever needs another one depends on it, and so starts after it and ends before it: the scheduler on the controller
//! manager, both on the API server. What is held up has a sentence instead of what it would be started with, which stops
//! nothing that runs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use crate::model::declaration::Restart;
use crate::model::kubernetes::bundle::Duty;
use crate::roleserver::child::spec::Limits;
use crate::roleserver::cluster::kubernetes::certificates::Materials;
use crate::roleserver::cluster::kubernetes::components::{
    Around, api_server, controller_manager, id, scheduler,
};
use crate::roleserver::cluster::kubernetes::controller::Gate;
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::ports::Ports;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::services::wanted::{Check, Id, Rendered, Wanted};

/// How long a component has to end. An API server answers what it was asked before, which takes seconds; but it also waits
/// for a minute for whoever watches, and takes nobody new meanwhile.
const STOP_TIME: Duration = Duration::from_secs(15);

/// What a component is started with.
type Render = fn(&Around<'_>) -> Result<Rendered, String>;
/// How it is seen to be well.
type Look = fn(&Around<'_>) -> Check;

/// All that it follows from.
#[derive(Clone, Copy, Debug)]
pub struct Known<'k> {
    /// Which parts run, and by what.
    pub startup: &'k Startup,
    /// Keys and certificates.
    pub materials: &'k Materials,
    /// The bundle.
    pub held: &'k Held,
    /// Whether components of a controller may begin.
    pub gate: &'k Gate,
    /// Where other nodes reach this one.
    pub address: Option<IpAddr>,
    /// Where components listen.
    pub ports: &'k Ports,
    /// The socket of this node's etcd.
    pub etcd: &'k Path,
    /// Above the directories of components.
    pub directory: &'k Path,
}

/// Everything that is to run. `number` gives the number of a generation and a bundle.
pub fn wanted(known: &Known<'_>, mut number: impl FnMut(&Around<'_>) -> u64) -> BTreeMap<Id, Wanted> {
    let mut all = BTreeMap::new();
    let part = &known.startup.controller;
    if matches!(part, Part::Off(_)) {
        return all;
    }
    let around = around(known, Duty::Controller);
    let revision = around.as_ref().map_or(0, &mut number);
    let components: [(&str, Render, Look, &[&str], bool); 3] = [
        (api_server::NAME, api_server::rendered, api_server::looked_at, &[], false),
        (
            controller_manager::NAME,
            controller_manager::rendered,
            controller_manager::looked_at,
            &[api_server::NAME],
            true,
        ),
        (
            scheduler::NAME,
            scheduler::rendered,
            scheduler::looked_at,
            &[api_server::NAME, controller_manager::NAME],
            true,
        ),
    ];
    for (name, render, look, needs, is_gated) in components {
        let rendered = match (part, &around) {
            (Part::Held(why), _) | (_, Err(why)) => Err(why.clone()),
            (_, Ok(_)) if is_gated && !known.gate.open => Err(known.gate.sentence()),
            (_, Ok(around)) => render(around),
        };
        let rendered = rendered.map(|rendered| {
            let digest = rendered.digest();
            (rendered, digest)
        });
        let id = id(Duty::Controller, name);
        let wanted = Wanted {
            id: id.clone(),
            revision,
            rendered,
            limits: Limits::default(),
            depends_on: needs.iter().map(|name| self::id(Duty::Controller, name)).collect(),
            check: around.as_ref().ok().map(look),
            restart: Restart::Always,
            stop_time: STOP_TIME,
        };
        all.insert(id, wanted);
    }
    all
}

/// What components of a role are started with; the error is the sentence of what is missing.
fn around<'k>(known: &Known<'k>, duty: Duty) -> Result<Around<'k>, String> {
    let setup = known.startup.setup.as_ref().ok_or("no curator has said yet what is to run of Kubernetes")?;
    let missing = || known.held.said.clone().unwrap_or_else(|| "its bundle is being looked for".to_owned());
    let material = known.materials.of(duty).ok_or("its keys and certificates are being asked for")?;
    Ok(Around {
        setup,
        material,
        bundle: known.held.bundle.as_ref().ok_or_else(missing)?,
        address: known.address.ok_or("it is not known where other nodes reach this one")?,
        ports: known.ports,
        etcd: known.etcd,
        directory: known.directory,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::bundle;
    use crate::roleserver::cluster::kubernetes::material::tests::material;
    use crate::roleserver::cluster::kubernetes::setup::tests::setup;

    /// The components that would be started now, and those that are there without: `-name`.
    fn said(change: fn(&mut Startup, &mut Materials, &mut Held, &mut Gate, &mut Option<IpAddr>)) -> String {
        let mut startup = Startup { controller: Part::On, worker: Part::Off(None), setup: Some(setup()) };
        let mut materials = Materials { controller: Some(material()), worker: None };
        let mut held = Held { bundle: Some(bundle()), said: None };
        let mut gate = Gate { open: true, ..Gate::default() };
        let mut address = Some("10.0.0.7".parse().unwrap());
        change(&mut startup, &mut materials, &mut held, &mut gate, &mut address);
        let known = Known {
            startup: &startup,
            materials: &materials,
            held: &held,
            gate: &gate,
            address,
            ports: &Ports::default(),
            etcd: Path::new("/e"),
            directory: Path::new("/d"),
        };
        let words = wanted(&known, |_| 7)
            .into_values()
            .map(|wanted| format!("{}{}", if wanted.rendered.is_ok() { "" } else { "-" }, wanted.id.service));
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn components_start_when_all_is_there_and_behind_the_gate_when_it_is_open() {
        let all = "kube-apiserver kube-controller-manager kube-scheduler";
        let held_up = "-kube-apiserver -kube-controller-manager -kube-scheduler";
        let gated = "kube-apiserver -kube-controller-manager -kube-scheduler";
        assert_eq!(said(|_, _, _, _, _| {}), all);
        assert_eq!(said(|_, _, _, gate, _| gate.open = false), gated);
        assert_eq!(said(|startup, _, _, _, _| startup.controller = Part::Off(None)), "");
        assert_eq!(said(|startup, _, _, _, _| startup.controller = Part::Off(Some("x".to_owned()))), "");
        assert_eq!(said(|startup, _, _, _, _| startup.controller = Part::Held("x".to_owned())), held_up);
        assert_eq!(said(|_, materials, _, _, _| materials.controller = None), held_up);
        assert_eq!(said(|_, _, held, _, _| held.bundle = None), held_up);
        assert_eq!(said(|_, _, _, _, address| *address = None), held_up);
    }
}
