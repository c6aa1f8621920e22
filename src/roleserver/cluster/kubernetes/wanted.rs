//! What is to run of Kubernetes on this node, as services are: pure.
//!
//! Whoever needs another one depends on it, and so starts after it and ends before it: the scheduler on the controller
//! manager, both on the API server; kube-proxy on the kubelet, that on containerd and on the image that no pod begins
//! without, which is imported by what ends when it has done so. What is held up has a sentence instead of what it would be
//! started with, which stops nothing that runs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use crate::model::declaration::Restart;
use crate::model::kubernetes::bundle::Duty;
use crate::roleserver::child::spec::Limits;
use crate::roleserver::cluster::kubernetes::certificates::Materials;
use crate::roleserver::cluster::kubernetes::components::{
    Around, api_server, containerd, controller_manager, id, kube_proxy, kubelet, scheduler,
};
use crate::roleserver::cluster::kubernetes::controller::Gate;
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::own_node::Handed;
use crate::roleserver::cluster::kubernetes::ports::Ports;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::cluster::services::wanted::{Check, Id, Rendered, Wanted};

/// How long a component has to end. An API server answers what it was asked before, which takes seconds; but it also waits
/// for a minute for whoever watches, and takes nobody new meanwhile.
const STOP_TIME: Duration = Duration::from_secs(15);

/// What stands before the name of an image in the name of what imports it.
const IMAGE: &str = "image-";

/// What a component is started with.
type Render = Box<dyn Fn(&Around<'_>) -> Result<Rendered, String>>;
/// How it is seen to be well.
type Look = fn(&Around<'_>) -> Check;

/// A component as it stands among the others.
struct Component {
    name: String,
    render: Render,
    /// What ends when it has done its work is not looked at.
    look: Option<Look>,
    needs: Vec<String>,
    /// Whether it waits for the built-in objects.
    is_gated: bool,
}

/// Whether a component of this name ends by itself when it has done its work.
#[must_use]
pub fn ends_by_itself(name: &str) -> bool {
    name.starts_with(IMAGE)
}

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
    /// What pods of before have been handed over for.
    pub handed: &'k Handed,
    /// The name of this node; empty while it has no key.
    pub node: &'k str,
    /// What tells things of this role server from those of another one.
    pub family: &'k str,
    /// Whether it may be said of processes that they are less likely to be killed.
    pub may_raise_scores: bool,
}

/// Everything that is to run. `number` gives the number of a generation and a bundle.
pub fn wanted(known: &Known<'_>, mut number: impl FnMut(&Around<'_>) -> u64) -> BTreeMap<Id, Wanted> {
    let mut all = BTreeMap::new();
    let parts = [(Duty::Controller, &known.startup.controller), (Duty::Worker, &known.startup.worker)];
    for (duty, part) in parts {
        if matches!(part, Part::Off(_)) {
            continue;
        }
        let around = around(known, duty);
        let revision = around.as_ref().map_or(0, &mut number);
        let components = match duty {
            Duty::Controller => controllers(),
            Duty::Worker => workers(known.held),
        };
        for Component { name, render, look, needs, is_gated } in components {
            let rendered = match (part, &around) {
                (Part::Held(why) | Part::Leaving(why), _) | (_, Err(why)) => Err(why.clone()),
                (_, Ok(_)) if is_gated && !known.gate.open => Err(known.gate.sentence()),
                (_, Ok(around)) => render(around),
            };
            let rendered = rendered.map(|rendered| {
                let digest = rendered.digest();
                (rendered, digest)
            });
            let (id, is_task) = (id(duty, &name), ends_by_itself(&name));
            let wanted = Wanted {
                id: id.clone(),
                revision,
                rendered,
                limits: Limits::default(),
                depends_on: needs.iter().map(|name| self::id(duty, name)).collect(),
                check: around.as_ref().ok().and_then(|around| look.map(|look| look(around))),
                restart: if is_task { Restart::OnFailure } else { Restart::Always },
                is_task,
                stop_time: STOP_TIME,
            };
            all.insert(id, wanted);
        }
    }
    all
}

fn component(
    name: &str,
    render: impl Fn(&Around<'_>) -> Result<Rendered, String> + 'static,
    look: Option<Look>,
    needs: &[&str],
) -> Component {
    let needs = needs.iter().map(|&name| name.to_owned()).collect();
    Component { name: name.to_owned(), render: Box::new(render), look, needs, is_gated: false }
}

fn controllers() -> Vec<Component> {
    let (api_server, manager) = (api_server::NAME, controller_manager::NAME);
    let gated = |component| Component { is_gated: true, ..component };
    vec![
        component(api_server, api_server::rendered, Some(api_server::looked_at), &[]),
        gated(component(
            manager,
            controller_manager::rendered,
            Some(controller_manager::looked_at),
            &[api_server],
        )),
        gated(component(
            scheduler::NAME,
            scheduler::rendered,
            Some(scheduler::looked_at),
            &[api_server, manager],
        )),
    ]
}

fn workers(held: &Held) -> Vec<Component> {
    let pause = format!("{IMAGE}{}", containerd::PAUSE);
    let mut images = vec![containerd::PAUSE.to_owned()];
    let others = held.bundle.iter().flat_map(|bundle| &bundle.manifest.images);
    images.extend(others.map(|image| image.name.clone()).filter(|name| name != containerd::PAUSE));
    let importing = images.into_iter().map(|image| {
        let name = format!("{IMAGE}{image}");
        component(&name, move |around| containerd::import(around, &image), None, &[containerd::NAME])
    });
    let mut all = vec![
        component(containerd::NAME, containerd::rendered, Some(containerd::looked_at), &[]),
        component(kubelet::NAME, kubelet::rendered, Some(kubelet::looked_at), &[containerd::NAME, &pause]),
        component(kube_proxy::NAME, kube_proxy::rendered, Some(kube_proxy::looked_at), &[kubelet::NAME]),
    ];
    all.extend(importing);
    all
}

/// What components of a role are started with; the error is the sentence of what is missing.
fn around<'k>(known: &Known<'k>, duty: Duty) -> Result<Around<'k>, String> {
    let setup = known.startup.setup.as_ref().ok_or("no curator has said yet what is to run of Kubernetes")?;
    let missing = || known.held.said.clone().unwrap_or_else(|| "its bundle is being looked for".to_owned());
    let material = known.materials.of(duty).ok_or("its keys and certificates are being asked for")?;
    let bundle = known.held.bundle.as_ref().ok_or_else(missing)?;
    if duty == Duty::Worker && known.node.is_empty() {
        return Err("this node has no key yet".to_owned());
    }
    if duty == Duty::Worker && known.handed.bundle != Some(bundle.digest) {
        return Err("its pods go to other nodes before its bundle is another one".to_owned());
    }
    Ok(Around {
        setup,
        material,
        bundle,
        address: known.address.ok_or("it is not known where other nodes reach this one")?,
        ports: known.ports,
        etcd: known.etcd,
        directory: known.directory,
        node: known.node,
        family: known.family,
        may_raise_scores: known.may_raise_scores,
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
        let startup = Startup { controller: Part::On, worker: Part::Off(None), setup: Some(setup()) };
        of(startup, Some(bundle().digest), change)
            .into_values()
            .map(|wanted| format!("{}{}", if wanted.rendered.is_ok() { "" } else { "-" }, wanted.id.service))
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn of(
        mut startup: Startup,
        handed: Option<crate::model::declaration::Sha256>,
        change: fn(&mut Startup, &mut Materials, &mut Held, &mut Gate, &mut Option<IpAddr>),
    ) -> BTreeMap<Id, Wanted> {
        let mut materials = Materials { controller: Some(material()), worker: Some(material()) };
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
            handed: &Handed { over: false, bundle: handed },
            node: "node-7",
            family: "roleserver-0123456789ab",
            may_raise_scores: true,
        };
        wanted(&known, |_| 7)
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

    fn worker() -> Startup {
        Startup { controller: Part::Off(None), worker: Part::On, setup: Some(setup()) }
    }

    /// Whether all components of a worker would be started, or none.
    fn worker_starts(
        handed: Option<crate::model::declaration::Sha256>,
        change: fn(&mut Startup, &mut Materials, &mut Held, &mut Gate, &mut Option<IpAddr>),
    ) -> Option<bool> {
        let all = of(worker(), handed, change);
        let started = all.values().filter(|wanted| wanted.rendered.is_ok()).count();
        assert!(started == 0 || started == all.len(), "{all:?}");
        (!all.is_empty()).then_some(started > 0)
    }

    #[test]
    fn worker_needs_no_etcd_and_no_gate_and_its_pods_elsewhere_before_another_bundle() {
        let own = Some(bundle().digest);
        assert_eq!(worker_starts(own, |_, _, _, gate, _| gate.open = false), Some(true));
        assert_eq!(worker_starts(own, |_, materials, _, _, _| materials.worker = None), Some(false));
        assert_eq!(worker_starts(own, |_, _, held, _, _| held.bundle = None), Some(false));
        assert_eq!(
            worker_starts(own, |startup, _, _, _, _| startup.worker = Part::Leaving("x".to_owned())),
            Some(false)
        );
        assert_eq!(worker_starts(own, |startup, _, _, _, _| startup.worker = Part::Off(None)), None);
        assert_eq!(worker_starts(None, |_, _, _, _, _| {}), Some(false));
        assert_eq!(
            worker_starts(Some(crate::model::declaration::Sha256([1; 32])), |_, _, _, _, _| {}),
            Some(false)
        );
    }

    #[test]
    fn components_of_a_worker_start_one_after_the_other_and_images_end_when_they_are_there() {
        let all = of(worker(), Some(bundle().digest), |_, _, _, _, _| {});
        let needs = |name: &str| {
            let wanted = &all[&id(Duty::Worker, name)];
            wanted.depends_on.iter().map(|id| id.service.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(needs(containerd::NAME), "");
        assert_eq!(needs("image-pause"), "containerd");
        assert_eq!(needs(kubelet::NAME), "containerd image-pause");
        assert_eq!(needs(kube_proxy::NAME), "kubelet");
        for (id, wanted) in &all {
            let ends = ends_by_itself(&id.service);
            assert_eq!(wanted.check.is_none(), ends, "{id}");
            assert_eq!(wanted.restart.again(Some(0)), !ends, "{id}");
            assert!(wanted.restart.again(Some(1)), "{id}");
        }
        assert_eq!(all.len(), 4);
    }
}
