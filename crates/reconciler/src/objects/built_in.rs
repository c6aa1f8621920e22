//! The built-in Kubernetes objects of this release.
//!
//! A change of them may require a change of the two numbers of [`program`](crate::program). An object that is removed
//! here is deleted in every cluster, because it has the label and this release does not need it.
//!
//! Each object sets every field that its kind has, even to the server's default, and sets empty lists explicitly: a
//! field that is not set is not reconciled. `tests/all/objects` has the server fill in defaults and fails if there are
//! any. Our names start with `shepherd`, except names that others refer to: pods name runtime classes, and claims name
//! storage classes.
//!
//! | object | for |
//! | --- | --- |
//! | role binding `shepherd:owners` | owners of the cluster may do everything |
//! | role binding `shepherd:viewers` | viewers of the cluster may read everything but secrets |
//! | role binding `shepherd:kube-apiserver-kubelet-client` | API servers read logs and run commands through kubelets |
//! | role and binding `shepherd:storage-provisioner` | the volume provisioner, if a driver is declared |
//! | priority class `shepherd-cluster-services` | services that others depend on: DNS, the pod network |
//! | priority class `shepherd-spare-time` | pods that may run while nothing else needs the capacity |
//! | a runtime class for each handler | pods choose their runtime |
//! | a storage class, a CSI driver | if a driver is declared |

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

use crate::objects::cluster_config::{ClusterConfig, StorageDriver};
use crate::objects::object_kind::{MANAGED_BUILT_IN, MANAGED_LABEL, ObjectKind};

/// The group of a cluster's owners, in their certificates.
pub const OWNERS_GROUP: &str = "shepherd:owners";
/// The group of a cluster's viewers, in their certificates.
pub const VIEWERS_GROUP: &str = "shepherd:viewers";
/// The user as which API servers call kubelets.
const KUBELET_CLIENT_USER: &str = "shepherd:kube-apiserver-kubelet-client";
/// The group of the volume provisioner.
pub const STORAGE_PROVISIONER: &str = "shepherd:storage-provisioner";
/// The priority of services that others depend on: the highest that is not Kubernetes' own.
const CLUSTER_SERVICES_PRIORITY: &str = "shepherd-cluster-services";
/// The priority of pods that may wait.
const SPARE_TIME_PRIORITY: &str = "shepherd-spare-time";

const RBAC_GROUP: &str = "rbac.authorization.k8s.io";
/// The annotation of the storage class for claims that name none.
const DEFAULT_CLASS_ANNOTATION: &str = "storageclass.kubernetes.io/is-default-class";

/// A desired object as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltInObject {
    /// The kind of the object.
    pub kind: ObjectKind,
    /// The desired content of the object.
    pub object: Value,
}

/// The kinds that may have built-in objects, in the order of creation: what components may do comes first. All of them
/// are listed, even if no object of a kind is desired: objects of another release may remain.
#[must_use]
pub fn built_in_kinds() -> [ObjectKind; 6] {
    [
        kind_of_type::<ClusterRole>(),
        kind_of_type::<ClusterRoleBinding>(),
        kind_of_type::<PriorityClass>(),
        kind_of_type::<RuntimeClass>(),
        kind_of_type::<CSIDriver>(),
        kind_of_type::<StorageClass>(),
    ]
}

/// All built-in objects of a cluster with this configuration.
pub fn built_in_objects(wishes: &ClusterConfig) -> Result<Vec<BuiltInObject>, serde_json::Error> {
    let mut objects = vec![
        to_built_in(&cluster_role_binding("shepherd:owners", "cluster-admin", "Group", OWNERS_GROUP))?,
        to_built_in(&cluster_role_binding("shepherd:viewers", "view", "Group", VIEWERS_GROUP))?,
        to_built_in(&cluster_role_binding(
            KUBELET_CLIENT_USER,
            "system:kubelet-api-admin",
            "User",
            KUBELET_CLIENT_USER,
        ))?,
        to_built_in(&priority_class(
            CLUSTER_SERVICES_PRIORITY,
            1_000_000_000,
            "PreemptLowerPriority",
            "What others cannot do without.",
        ))?,
        to_built_in(&priority_class(
            SPARE_TIME_PRIORITY,
            -1000,
            "Never",
            "What may run while nobody needs the place.",
        ))?,
    ];
    for handler in &wishes.runtime_handlers {
        objects.push(to_built_in(&runtime_class(handler))?);
    }
    if let Some(driver) = &wishes.storage_driver {
        objects.push(to_built_in(&storage_provisioner_role())?);
        objects.push(to_built_in(&cluster_role_binding(
            STORAGE_PROVISIONER,
            STORAGE_PROVISIONER,
            "Group",
            STORAGE_PROVISIONER,
        ))?);
        objects.push(to_built_in(&csi_driver(driver))?);
        objects.push(to_built_in(&storage_class(driver))?);
    }
    Ok(objects)
}

fn kind_of_type<T: Resource<Scope = ClusterResourceScope>>() -> ObjectKind {
    ObjectKind {
        group: T::GROUP.to_owned(),
        version: T::VERSION.to_owned(),
        kind: T::KIND.to_owned(),
        plural: T::URL_PATH_SEGMENT.to_owned(),
        namespaced: false,
    }
}

fn to_built_in<T>(typed: &T) -> Result<BuiltInObject, serde_json::Error>
where
    T: Resource<Scope = ClusterResourceScope> + Serialize,
{
    Ok(BuiltInObject { kind: kind_of_type::<T>(), object: serde_json::to_value(typed)? })
}

fn object_meta(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        labels: Some(BTreeMap::from([(MANAGED_LABEL.to_owned(), MANAGED_BUILT_IN.to_owned())])),
        ..ObjectMeta::default()
    }
}

fn cluster_role_binding(
    name: &str,
    role: &str,
    subject_kind: &str,
    subject_name: &str,
) -> ClusterRoleBinding {
    ClusterRoleBinding {
        metadata: object_meta(name),
        role_ref: RoleRef {
            api_group: RBAC_GROUP.to_owned(),
            kind: "ClusterRole".to_owned(),
            name: role.to_owned(),
        },
        subjects: Some(vec![Subject {
            api_group: Some(RBAC_GROUP.to_owned()),
            kind: subject_kind.to_owned(),
            name: subject_name.to_owned(),
            namespace: None,
        }]),
    }
}

/// A rule that allows these verbs on these resources, whatever their names, and on no other URLs.
fn policy_rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        non_resource_urls: Some(Vec::new()),
        resource_names: Some(Vec::new()),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
    }
}

fn storage_provisioner_role() -> ClusterRole {
    let read = ["get", "list", "watch"];
    ClusterRole {
        metadata: object_meta(STORAGE_PROVISIONER),
        aggregation_rule: Some(AggregationRule::default()),
        rules: Some(vec![
            policy_rule("", &["events"], &["get", "list", "watch", "create", "update", "patch"]),
            policy_rule("storage.k8s.io", &["storageclasses"], &read),
            policy_rule("", &["nodes"], &read),
            policy_rule("storage.k8s.io", &["csinodes"], &read),
            policy_rule("", &["persistentvolumes"], &["get", "list", "watch", "create", "patch", "delete"]),
            policy_rule("", &["persistentvolumeclaims"], &read),
            policy_rule("", &["persistentvolumeclaims/status"], &["patch"]),
        ]),
    }
}

fn priority_class(name: &str, value: i32, preemption: &str, description: &str) -> PriorityClass {
    PriorityClass {
        metadata: object_meta(name),
        description: Some(description.to_owned()),
        global_default: Some(false),
        preemption_policy: Some(preemption.to_owned()),
        value,
    }
}

/// The class has the name of its handler, except gVisor's, which is known by another name than its program.
fn runtime_class(handler: &str) -> RuntimeClass {
    RuntimeClass {
        metadata: object_meta(if handler == "runsc" { "gvisor" } else { handler }),
        handler: handler.to_owned(),
        overhead: Some(Overhead::default()),
        scheduling: Some(Scheduling::default()),
    }
}

fn csi_driver(driver: &StorageDriver) -> CSIDriver {
    CSIDriver {
        metadata: object_meta(&driver.name),
        spec: CSIDriverSpec {
            attach_required: Some(driver.needs_attach),
            // The kubelet gives the files of a volume to a pod's group, as often as the pod requests it.
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

/// The class of claims that name none. Volumes are created where their first pod is scheduled.
fn storage_class(driver: &StorageDriver) -> StorageClass {
    let mut metadata = object_meta(&driver.class);
    metadata.annotations = Some(BTreeMap::from([(DEFAULT_CLASS_ANNOTATION.to_owned(), "true".to_owned())]));
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
    use crate::objects::object_kind::{ObjectKey, label};

    fn everything() -> ClusterConfig {
        ClusterConfig {
            runtime_handlers: ["runc", "runsc"].map(str::to_owned).into(),
            storage_driver: Some(StorageDriver {
                name: "disks.example".to_owned(),
                class: "disks".to_owned(),
                parameters: BTreeMap::from([("tier".to_owned(), "fast".to_owned())]),
                can_expand: true,
                needs_attach: false,
            }),
            add_ons: Vec::new(),
        }
    }

    #[test]
    fn built_in_names_are_unique_and_their_kinds_are_listed() {
        let mut seen = BTreeSet::new();
        for BuiltInObject { kind, object } in built_in_objects(&everything()).unwrap() {
            assert!(built_in_kinds().contains(&kind), "{kind:?} would never be found again");
            let key = ObjectKey::from_object(&object);
            assert!(!key.name.is_empty() && key.namespace.is_none(), "{object}");
            assert!(seen.insert((kind, key)), "twice: {object}");
        }
        let of_each: BTreeSet<_> = seen.iter().map(|(kind, _)| kind.clone()).collect();
        assert_eq!(of_each.len(), built_in_kinds().len(), "every kind has an object where all is wished for");
    }

    #[test]
    fn every_built_in_object_carries_the_managed_label() {
        for BuiltInObject { kind, object } in built_in_objects(&everything()).unwrap() {
            assert_eq!(label(&object, MANAGED_LABEL), Some(MANAGED_BUILT_IN), "{object}");
            assert_eq!(object["kind"], kind.kind.as_str());
            assert_eq!(object["apiVersion"], kind.api_version());
        }
    }

    #[test]
    fn unconfigured_objects_are_not_created() {
        let plain = built_in_objects(&ClusterConfig::default()).unwrap();
        let names: Vec<String> = plain.iter().map(|made| ObjectKey::from_object(&made.object).name).collect();
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
