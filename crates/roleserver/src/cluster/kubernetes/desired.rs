//! Desired Kubernetes components as services, with their dependencies (pure).
//!
//! A component that needs another one depends on it, so it starts after it and stops before it. The scheduler depends
//! on the controller manager, and both depend on the API server. kube-proxy depends on the kubelet, which depends on
//! containerd and on the import of the pause image, a one-shot. A component that has to wait has a sentence in place of
//! what it is started with. That stops nothing that runs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::role_declaration::RestartPolicy;

use crate::child::spec::ResourceLimits;
use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::cgroup_driver::CgroupDriver;
use crate::cluster::kubernetes::component_certificates::RoleMaterials;
use crate::cluster::kubernetes::components::ComponentPorts;
use crate::cluster::kubernetes::components::{
    ComponentContext, api_server, containerd, controller_manager, kube_proxy, kubelet, scheduler, service_id,
};
use crate::cluster::kubernetes::reconciler_runner::ControllerReadiness;
use crate::cluster::kubernetes::startup::DrainState;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::services::desired::{DesiredService, RenderedHealthCheck, RenderedService, ServiceId};

/// How long a component has to stop. An API server completes pending requests in seconds, but it also waits a minute
/// for open watches and accepts no new connections meanwhile.
const STOP_TIME: Duration = Duration::from_secs(15);

/// Prefix of the name of a one-shot that imports an image.
const IMAGE_PREFIX: &str = "image-";

/// Renders what a component is started with.
type RenderFn = Box<dyn Fn(&ComponentContext<'_>) -> Result<RenderedService, String>>;
/// Renders what a former release started a component with.
type FormerFn = fn(&ComponentContext<'_>) -> Result<RenderedService, String>;
/// Makes the health check of a component.
type HealthCheckFn = fn(&ComponentContext<'_>) -> RenderedHealthCheck;

/// A component and its dependencies.
struct Component {
    name: String,
    render: RenderFn,
    /// What a release before digests of the inputs rendered; `None` if that is the same.
    render_former: Option<FormerFn>,
    /// `None` for a one-shot.
    health_check: Option<HealthCheckFn>,
    needs: Vec<String>,
    /// Whether it waits until the built-in objects exist.
    is_gated: bool,
}

/// Whether a component of this name is a one-shot, which ends when its work is done.
#[must_use]
pub fn is_one_shot(name: &str) -> bool {
    name.starts_with(IMAGE_PREFIX)
}

/// Everything that the desired components follow from.
#[derive(Clone, Copy, Debug)]
pub struct DesiredInputs<'k> {
    /// Which roles run, and with which setup.
    pub startup: &'k KubernetesStartup,
    /// Key material of both roles.
    pub materials: &'k RoleMaterials,
    /// The installed bundle, if there is one.
    pub bundle: &'k InstalledBundle,
    /// Whether components of a controller may start.
    pub readiness: &'k ControllerReadiness,
    /// Address at which other nodes connect to this one; `None` while it is unknown.
    pub address: Option<IpAddr>,
    /// Listen ports of all components.
    pub ports: &'k ComponentPorts,
    /// Path of the client socket of this node's etcd.
    pub etcd: &'k Path,
    /// Parent of the directories of components.
    pub directory: &'k Path,
    /// Whether the node is drained, and the bundle that it may run with.
    pub drain: &'k DrainState,
    /// Name of this node; empty while it has no key.
    pub node: &'k str,
    /// Name that distinguishes what belongs to this role server from what belongs to another one.
    pub instance_name: &'k str,
    /// Whether processes may get a lower OOM score (`CAP_SYS_RESOURCE`).
    pub can_raise_oom_score: bool,
    /// What makes the control groups of pods.
    pub cgroup_driver: CgroupDriver,
}

/// All desired components. `number` returns the component revision of a context's bundle and key generation.
pub fn desired_components(
    known: &DesiredInputs<'_>,
    mut number: impl FnMut(&ComponentContext<'_>) -> u64,
) -> BTreeMap<ServiceId, DesiredService> {
    let mut all = BTreeMap::new();
    let parts = [
        (KubernetesDuty::Controller, &known.startup.controller),
        (KubernetesDuty::Worker, &known.startup.worker),
    ];
    for (duty, part) in parts {
        if matches!(part, RoleStartup::Off(_)) {
            continue;
        }
        let context = component_context(known, duty);
        let revision = context.as_ref().map_or(0, &mut number);
        let components = match duty {
            KubernetesDuty::Controller => controller_components(),
            KubernetesDuty::Worker => worker_components(known.bundle),
        };
        for Component { name, render, render_former, health_check: look, needs, is_gated } in components {
            let rendered = match (part, &context) {
                (RoleStartup::Paused(why) | RoleStartup::Draining(why), _) | (_, Err(why)) => {
                    Err(why.clone())
                }
                (_, Ok(_)) if is_gated && !known.readiness.is_ready => Err(known.readiness.wait_message()),
                (_, Ok(context)) => render(context),
            };
            let rendered = rendered.map(|rendered| {
                let digest = rendered.digest();
                (rendered, digest)
            });
            let former = context.as_ref().ok().zip(render_former);
            let former = former.and_then(|(context, render)| render(context).ok());
            let declared = context.as_ref().ok().zip(rendered.as_ref().ok());
            let declared = declared.map(|(context, (rendered, _))| context.declaration_digest(rendered));
            let (id, is_task) = (service_id(duty, &name), is_one_shot(&name));
            let wanted = DesiredService {
                id: id.clone(),
                revision,
                rendered,
                declared,
                former: former.map(|rendered| rendered.digest()),
                limits: ResourceLimits::default(),
                depends_on: needs.iter().map(|name| self::service_id(duty, name)).collect(),
                check: context.as_ref().ok().and_then(|context| look.map(|look| look(context))),
                restart: if is_task { RestartPolicy::OnFailure } else { RestartPolicy::Always },
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
    render: impl Fn(&ComponentContext<'_>) -> Result<RenderedService, String> + 'static,
    look: Option<HealthCheckFn>,
    needs: &[&str],
) -> Component {
    let needs = needs.iter().map(|&name| name.to_owned()).collect();
    let (name, render) = (name.to_owned(), Box::new(render));
    Component { name, render, render_former: None, health_check: look, needs, is_gated: false }
}

fn controller_components() -> Vec<Component> {
    let (api_server, manager) = (api_server::NAME, controller_manager::NAME);
    let gated =
        |component, former: FormerFn| Component { is_gated: true, render_former: Some(former), ..component };
    vec![
        component(api_server, api_server::render_component, Some(api_server::health_check), &[]),
        gated(
            component(
                manager,
                controller_manager::render_component,
                Some(controller_manager::health_check),
                &[api_server],
            ),
            controller_manager::render_former,
        ),
        gated(
            component(
                scheduler::NAME,
                scheduler::render_component,
                Some(scheduler::health_check),
                &[api_server, manager],
            ),
            scheduler::render_former,
        ),
    ]
}

fn worker_components(held: &InstalledBundle) -> Vec<Component> {
    let pause = format!("{IMAGE_PREFIX}{}", containerd::PAUSE_IMAGE);
    let mut images = vec![containerd::PAUSE_IMAGE.to_owned()];
    let others = held.bundle.iter().flat_map(|bundle| &bundle.manifest.images);
    images.extend(others.map(|image| image.name.clone()).filter(|name| name != containerd::PAUSE_IMAGE));
    let importing = images.into_iter().map(|image| {
        let name = format!("{IMAGE_PREFIX}{image}");
        component(
            &name,
            move |context| containerd::render_image_import(context, &image),
            None,
            &[containerd::NAME],
        )
    });
    let mut all = vec![
        component(containerd::NAME, containerd::render_component, Some(containerd::health_check), &[]),
        component(
            kubelet::NAME,
            kubelet::render_component,
            Some(kubelet::health_check),
            &[containerd::NAME, &pause],
        ),
        component(
            kube_proxy::NAME,
            kube_proxy::render_component,
            Some(kube_proxy::health_check),
            &[kubelet::NAME],
        ),
    ];
    all.extend(importing);
    all
}

/// What the components of a role are rendered from; the error is a sentence that names what is missing.
fn component_context<'k>(
    known: &DesiredInputs<'k>,
    duty: KubernetesDuty,
) -> Result<ComponentContext<'k>, String> {
    let setup = known.startup.setup.as_ref().ok_or("no curator has sent this node's Kubernetes setup yet")?;
    let missing = || known.bundle.message.clone().unwrap_or_else(|| "its bundle is being checked".to_owned());
    let material = known.materials.for_duty(duty).ok_or("its keys and certificates are being requested")?;
    let bundle = known.bundle.bundle.as_ref().ok_or_else(missing)?;
    if duty == KubernetesDuty::Worker && known.node.is_empty() {
        return Err("this node has no key yet".to_owned());
    }
    if duty == KubernetesDuty::Worker && known.drain.allowed_bundle != Some(bundle.digest) {
        return Err("its pods are moved to other nodes before its bundle changes".to_owned());
    }
    let address = known.address.ok_or("the address at which other nodes reach this one is unknown")?;
    if address.is_ipv6() {
        return Err(format!(
            "the address of this node is {address}, and Kubernetes of a cluster has IPv4 addresses only"
        ));
    }
    Ok(ComponentContext {
        setup,
        material,
        bundle,
        address,
        ports: known.ports,
        etcd: known.etcd,
        directory: known.directory,
        node: known.node,
        instance_name: known.instance_name,
        can_raise_oom_score: known.can_raise_oom_score,
        // It is part of what a component is declared as, and controllers do not depend on it.
        cgroup_driver: match duty {
            KubernetesDuty::Worker => known.cgroup_driver,
            KubernetesDuty::Controller => CgroupDriver::default(),
        },
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::bundle;
    use crate::cluster::kubernetes::key_material::tests::material;
    use crate::cluster::kubernetes::setup::tests::setup;

    /// The desired components; those that would not start yet are marked `-name`.
    fn started_components(
        change: fn(
            &mut KubernetesStartup,
            &mut RoleMaterials,
            &mut InstalledBundle,
            &mut ControllerReadiness,
            &mut Option<IpAddr>,
        ),
    ) -> String {
        let startup = KubernetesStartup {
            controller: RoleStartup::On,
            worker: RoleStartup::Off(None),
            setup: Some(setup()),
        };
        desired_for(startup, Some(bundle().digest), change)
            .into_values()
            .map(|wanted| format!("{}{}", if wanted.rendered.is_ok() { "" } else { "-" }, wanted.id.service))
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn desired_for(
        mut startup: KubernetesStartup,
        handed: Option<model::role_declaration::Sha256>,
        change: fn(
            &mut KubernetesStartup,
            &mut RoleMaterials,
            &mut InstalledBundle,
            &mut ControllerReadiness,
            &mut Option<IpAddr>,
        ),
    ) -> BTreeMap<ServiceId, DesiredService> {
        let mut materials = RoleMaterials { controller: Some(material()), worker: Some(material()) };
        let mut held = InstalledBundle { bundle: Some(bundle()), message: None };
        let mut gate = ControllerReadiness { is_ready: true, ..ControllerReadiness::default() };
        let mut address = Some("10.0.0.7".parse().unwrap());
        change(&mut startup, &mut materials, &mut held, &mut gate, &mut address);
        let known = DesiredInputs {
            startup: &startup,
            materials: &materials,
            bundle: &held,
            readiness: &gate,
            address,
            ports: &ComponentPorts::default(),
            etcd: Path::new("/e"),
            directory: Path::new("/d"),
            drain: &DrainState { allowed_bundle: handed, ..DrainState::default() },
            node: "node-7",
            instance_name: "roleserver-0123456789ab",
            can_raise_oom_score: true,
            cgroup_driver: CgroupDriver::Cgroupfs,
        };
        desired_components(&known, |_| 7)
    }

    #[test]
    fn components_start_when_inputs_exist_and_the_controller_is_ready() {
        let all = "kube-apiserver kube-controller-manager kube-scheduler";
        let held_up = "-kube-apiserver -kube-controller-manager -kube-scheduler";
        let gated = "kube-apiserver -kube-controller-manager -kube-scheduler";
        assert_eq!(started_components(|_, _, _, _, _| {}), all);
        assert_eq!(started_components(|_, _, _, gate, _| gate.is_ready = false), gated);
        assert_eq!(started_components(|startup, _, _, _, _| startup.controller = RoleStartup::Off(None)), "");
        assert_eq!(
            started_components(
                |startup, _, _, _, _| startup.controller = RoleStartup::Off(Some("x".to_owned()))
            ),
            ""
        );
        assert_eq!(
            started_components(|startup, _, _, _, _| startup.controller = RoleStartup::Paused("x".to_owned())),
            held_up
        );
        assert_eq!(started_components(|_, materials, _, _, _| materials.controller = None), held_up);
        assert_eq!(started_components(|_, _, held, _, _| held.bundle = None), held_up);
        assert_eq!(started_components(|_, _, _, _, address| *address = None), held_up);
        let of_another_kind = started_components(|_, _, _, _, address| *address = "2001:db8::7".parse().ok());
        assert_eq!(of_another_kind, held_up);
    }

    fn worker() -> KubernetesStartup {
        KubernetesStartup {
            controller: RoleStartup::Off(None),
            worker: RoleStartup::On,
            setup: Some(setup()),
        }
    }

    /// Whether all components of a worker would start (`Some(true)`) or none; `None` if none is desired.
    fn worker_starts(
        handed: Option<model::role_declaration::Sha256>,
        change: fn(
            &mut KubernetesStartup,
            &mut RoleMaterials,
            &mut InstalledBundle,
            &mut ControllerReadiness,
            &mut Option<IpAddr>,
        ),
    ) -> Option<bool> {
        let all = desired_for(worker(), handed, change);
        let started = all.values().filter(|wanted| wanted.rendered.is_ok()).count();
        assert!(started == 0 || started == all.len(), "{all:?}");
        (!all.is_empty()).then_some(started > 0)
    }

    #[test]
    fn worker_needs_no_etcd_and_is_drained_before_its_bundle_changes() {
        let own = Some(bundle().digest);
        assert_eq!(worker_starts(own, |_, _, _, gate, _| gate.is_ready = false), Some(true));
        assert_eq!(worker_starts(own, |_, materials, _, _, _| materials.worker = None), Some(false));
        assert_eq!(worker_starts(own, |_, _, held, _, _| held.bundle = None), Some(false));
        assert_eq!(
            worker_starts(own, |startup, _, _, _, _| startup.worker = RoleStartup::Draining("x".to_owned())),
            Some(false)
        );
        assert_eq!(worker_starts(own, |startup, _, _, _, _| startup.worker = RoleStartup::Off(None)), None);
        assert_eq!(worker_starts(None, |_, _, _, _, _| {}), Some(false));
        assert_eq!(
            worker_starts(Some(model::role_declaration::Sha256([1; 32])), |_, _, _, _, _| {}),
            Some(false)
        );
    }

    #[test]
    fn worker_components_start_in_order_and_image_imports_end() {
        let all = desired_for(worker(), Some(bundle().digest), |_, _, _, _, _| {});
        let needs = |name: &str| {
            let wanted = &all[&service_id(KubernetesDuty::Worker, name)];
            wanted.depends_on.iter().map(|id| id.service.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(needs(containerd::NAME), "");
        assert_eq!(needs("image-pause"), "containerd");
        assert_eq!(needs(kubelet::NAME), "containerd image-pause");
        assert_eq!(needs(kube_proxy::NAME), "kubelet");
        for (id, wanted) in &all {
            let ends = is_one_shot(&id.service);
            assert_eq!(wanted.check.is_none(), ends, "{id}");
            assert_eq!(wanted.restart.restarts_after(Some(0)), !ends, "{id}");
            assert!(wanted.restart.restarts_after(Some(1)), "{id}");
        }
        assert_eq!(all.len(), 4);
    }
}
