//! The objects that every cluster of this release has.
//!
//! Whoever changes them looks at the two numbers of [`program`](crate::reconciler::program), too. An object that is taken
//! out here is deleted in every cluster: it carries the label and nobody wants it.
//!
//! Each says everything that its kind can say, also where the server would fill in the same, and says what is to be empty
//! as an empty list: what is not said is not kept. `tests/all/objects` has the server fill in the rest and demands that
//! there is none. Names of ours begin with `shepherd`, except where others have to know them: a runtime class is called by
//! pods, and a storage class by claims.
//!
//! | object | for |
//! | --- | --- |
//! | role binding `shepherd:owners` | owners of the cluster may do everything |
//! | role binding `shepherd:viewers` | its viewers may look at everything but secrets |
//! | role binding `shepherd:kube-apiserver-kubelet-client` | API servers ask kubelets for logs, and run commands through them |
//! | role and binding `shepherd:storage-provisioner` | what makes volumes, where a driver is declared |
//! | priority class `shepherd-cluster-services` | what others cannot do without: names, the pod network |
//! | priority class `shepherd-spare-time` | what may run while nobody needs the place |
//! | a runtime class for each handler | pods choose what runs them |
//! | a storage class, a CSI driver | where a driver is declared |

use std::collections::BTreeMap;

use k8s_openapi::api::node::v1::{Overhead, RuntimeClass, Scheduling};
use k8s_openapi::api::rbac::v1::{
    AggregationRule, ClusterRole, ClusterRoleBinding, PolicyRule, RoleRef, Subject,
};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIDriverSpec, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{ClusterResourceScope, Resource};
use serde::Serialize;
use serde_json::Value;

use crate::reconciler::objects::kind::{BUILT_IN, KEPT, Kind};
use crate::reconciler::objects::wishes::{StorageDriver, Wishes};

/// The group of a cluster's owners, in their certificates.
pub const OWNERS: &str = "shepherd:owners";
/// The group of those who may look.
pub const VIEWERS: &str = "shepherd:viewers";
/// As whom API servers speak to kubelets.
pub const KUBELET_CLIENT: &str = "shepherd:kube-apiserver-kubelet-client";
/// The group of what makes volumes.
pub const STORAGE_PROVISIONER: &str = "shepherd:storage-provisioner";
/// The priority of what others cannot do without: the highest that is not Kubernetes' own.
pub const CLUSTER_SERVICES: &str = "shepherd-cluster-services";
/// The priority of what may wait.
pub const SPARE_TIME: &str = "shepherd-spare-time";

const RBAC: &str = "rbac.authorization.k8s.io";
/// What marks the class of claims that name none.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

/// An object that is wanted, as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltIn {
    /// Its kind.
    pub kind: Kind,
    /// What it is to be.
    pub object: Value,
}

/// The kinds that there may be built-in objects of, in the order in which they are made: what components may do comes
/// first. They are all looked at, also where none of a kind is wanted: some may be left of another release.
#[must_use]
pub fn kinds() -> [Kind; 6] {
    [
        kind::<ClusterRole>(),
        kind::<ClusterRoleBinding>(),
        kind::<PriorityClass>(),
        kind::<RuntimeClass>(),
        kind::<CSIDriver>(),
        kind::<StorageClass>(),
    ]
}

/// All that is wanted in a cluster.
pub fn built_in(wishes: &Wishes) -> Result<Vec<BuiltIn>, serde_json::Error> {
    let mut objects = vec![
        object(&binding("shepherd:owners", "cluster-admin", "Group", OWNERS))?,
        object(&binding("shepherd:viewers", "view", "Group", VIEWERS))?,
        object(&binding(KUBELET_CLIENT, "system:kubelet-api-admin", "User", KUBELET_CLIENT))?,
        object(&priority(
            CLUSTER_SERVICES,
            1_000_000_000,
            "PreemptLowerPriority",
            "What others cannot do without.",
        ))?,
        object(&priority(SPARE_TIME, -1000, "Never", "What may run while nobody needs the place."))?,
    ];
    for handler in &wishes.runtime_handlers {
        objects.push(object(&runtime_class(handler))?);
    }
    if let Some(driver) = &wishes.storage_driver {
        objects.push(object(&storage_provisioner())?);
        objects.push(object(&binding(
            STORAGE_PROVISIONER,
            STORAGE_PROVISIONER,
            "Group",
            STORAGE_PROVISIONER,
        ))?);
        objects.push(object(&csi_driver(driver))?);
        objects.push(object(&storage_class(driver))?);
    }
    Ok(objects)
}

fn kind<T: Resource<Scope = ClusterResourceScope>>() -> Kind {
    Kind {
        group: T::GROUP.to_owned(),
        version: T::VERSION.to_owned(),
        kind: T::KIND.to_owned(),
        plural: T::URL_PATH_SEGMENT.to_owned(),
        namespaced: false,
    }
}

fn object<T>(typed: &T) -> Result<BuiltIn, serde_json::Error>
where
    T: Resource<Scope = ClusterResourceScope> + Serialize,
{
    Ok(BuiltIn { kind: kind::<T>(), object: serde_json::to_value(typed)? })
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(BTreeMap::from([(KEPT.to_owned(), BUILT_IN.to_owned())])),
        ..ObjectMeta::default()
    }
}

fn binding(name: &str, role: &str, subject: &str, whose: &str) -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: named(name),
        role_ref: RoleRef {
            api_group: RBAC.to_owned(),
            kind: "ClusterRole".to_owned(),
            name: role.to_owned(),
        },
        subjects: Some(vec![Subject {
            api_group: Some(RBAC.to_owned()),
            kind: subject.to_owned(),
            name: whose.to_owned(),
            namespace: None,
        }]),
    }
}

/// Leave to do this to those; whichever they are, and to nothing that is no object.
fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        non_resource_urls: Some(Vec::new()),
        resource_names: Some(Vec::new()),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
    }
}

fn storage_provisioner() -> ClusterRole {
    let read = ["get", "list", "watch"];
    ClusterRole {
        metadata: named(STORAGE_PROVISIONER),
        aggregation_rule: Some(AggregationRule::default()),
        rules: Some(vec![
            rule("", &["events"], &["get", "list", "watch", "create", "update", "patch"]),
            rule("storage.k8s.io", &["storageclasses"], &read),
            rule("", &["nodes"], &read),
            rule("storage.k8s.io", &["csinodes"], &read),
            rule("", &["persistentvolumes"], &["get", "list", "watch", "create", "patch", "delete"]),
            rule("", &["persistentvolumeclaims"], &read),
            rule("", &["persistentvolumeclaims/status"], &["patch"]),
        ]),
    }
}

fn priority(name: &str, value: i32, preemption: &str, description: &str) -> PriorityClass {
    PriorityClass {
        metadata: named(name),
        description: Some(description.to_owned()),
        global_default: Some(false),
        preemption_policy: Some(preemption.to_owned()),
        value,
    }
}

/// The class is called as its handler is; gVisor's is known by another name than its program.
fn runtime_class(handler: &str) -> RuntimeClass {
    RuntimeClass {
        metadata: named(if handler == "runsc" { "gvisor" } else { handler }),
        handler: handler.to_owned(),
        overhead: Some(Overhead::default()),
        scheduling: Some(Scheduling::default()),
    }
}

fn csi_driver(driver: &StorageDriver) -> CSIDriver {
    CSIDriver {
        metadata: named(&driver.name),
        spec: CSIDriverSpec {
            attach_required: Some(driver.attaches),
            // Then the kubelet hands a volume's files over to a pod's group, as often as the pod asks for.
            fs_group_policy: Some("File".to_owned()),
            node_allocatable_update_period_seconds: None,
            pod_info_on_mount: Some(false),
            requires_republish: Some(false),
            se_linux_mount: Some(false),
            storage_capacity: Some(false),
            token_requests: Some(Vec::new()),
            volume_lifecycle_modes: Some(vec!["Persistent".to_owned()]),
        },
    }
}

/// The class of claims that name none. Volumes are made where their first pod is to run.
fn storage_class(driver: &StorageDriver) -> StorageClass {
    let mut metadata = named(&driver.class);
    metadata.annotations = Some(BTreeMap::from([(DEFAULT_CLASS.to_owned(), "true".to_owned())]));
    StorageClass {
        metadata,
        allow_volume_expansion: Some(driver.can_expand),
        allowed_topologies: Some(Vec::new()),
        mount_options: Some(Vec::new()),
        parameters: Some(driver.parameters.clone()),
        provisioner: driver.name.clone(),
        reclaim_policy: Some("Delete".to_owned()),
        volume_binding_mode: Some("WaitForFirstConsumer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::reconciler::objects::kind::{Key, label};

    fn everything() -> Wishes {
        Wishes {
            runtime_handlers: ["runc", "runsc"].map(str::to_owned).into(),
            storage_driver: Some(StorageDriver {
                name: "disks.example".to_owned(),
                class: "disks".to_owned(),
                parameters: BTreeMap::from([("tier".to_owned(), "fast".to_owned())]),
                can_expand: true,
                attaches: false,
            }),
            add_ons: Vec::new(),
        }
    }

    #[test]
    fn no_two_of_a_kind_have_one_name_and_all_are_of_kinds_that_are_looked_at() {
        let mut seen = BTreeSet::new();
        for BuiltIn { kind, object } in built_in(&everything()).unwrap() {
            assert!(kinds().contains(&kind), "{kind:?} would never be found again");
            let key = Key::of(&object);
            assert!(!key.name.is_empty() && key.namespace.is_none(), "{object}");
            assert!(seen.insert((kind, key)), "twice: {object}");
        }
        let of_each: BTreeSet<_> = seen.iter().map(|(kind, _)| kind.clone()).collect();
        assert_eq!(of_each.len(), kinds().len(), "every kind has an object where all is wished for");
    }

    #[test]
    fn all_carry_the_label_by_which_they_are_found() {
        for BuiltIn { kind, object } in built_in(&everything()).unwrap() {
            assert_eq!(label(&object, KEPT), Some(BUILT_IN), "{object}");
            assert_eq!(object["kind"], kind.kind.as_str());
            assert_eq!(object["apiVersion"], kind.api_version());
        }
    }

    #[test]
    fn what_nobody_has_is_not_made() {
        let plain = built_in(&Wishes::default()).unwrap();
        let names: Vec<String> = plain.iter().map(|made| Key::of(&made.object).name).collect();
        assert_eq!(
            names,
            [
                "shepherd:owners",
                "shepherd:viewers",
                "shepherd:kube-apiserver-kubelet-client",
                "shepherd-cluster-services",
                "shepherd-spare-time"
            ]
        );
    }
}
