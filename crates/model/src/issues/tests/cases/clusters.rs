//! Clusters and their Kubernetes.

use crate::cluster::authority_rotation::ANNOUNCED_REPLACEMENTS;
use crate::cluster::kubernetes::ObjectConflict;
use crate::cluster::state::MAX_ETCD_BYTES;
use crate::issues::tests::cases::Case;
use crate::issues::tests::*;

pub(super) const CASES: &[Case] = &[
    ("a cluster that is founded soon", |e| e.unfounded_clusters.push(unfounded_cluster(NOW - 3599)), &[]),
    (
        "a cluster that nobody founds",
        |e| e.unfounded_clusters.push(unfounded_cluster(NOW - 3600)),
        &[("cluster-not-founded", "cluster ams")],
    ),
    (
        "a cluster without a snapshot",
        |e| e.clusters.push(cluster(NOW - 3 * 3600, None)),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    ("a young cluster without a snapshot", |e| e.clusters.push(cluster(NOW - 3 * 3600 + 1, None)), &[]),
    (
        "a cluster with an old snapshot",
        |e| e.clusters.push(cluster(NOW - 90_000, Some(NOW - 3 * 3600))),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    (
        "a cluster with a young snapshot",
        |e| e.clusters.push(cluster(NOW - 90_000, Some(NOW - 3 * 3600 + 1))),
        &[],
    ),
    (
        "a cluster with young snapshots that have no objects",
        |e| e.clusters.push(with_kubernetes(NOW - 3 * 3600, Some(NOW - 2), None)),
        &[("cluster-image-old", "cluster ams")],
    ),
    (
        "a cluster with an old image",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 2), Some(NOW - 3 * 3600))),
        &[("cluster-image-old", "cluster ams")],
    ),
    (
        "a cluster with a young image",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 2), Some(NOW - 3 * 3600 + 1))),
        &[],
    ),
    (
        "a cluster that has Kubernetes for a while",
        |e| e.clusters.push(with_kubernetes(NOW - 3 * 3600 + 1, Some(NOW - 2), None)),
        &[],
    ),
    (
        "a cluster with Kubernetes without young snapshots",
        |e| e.clusters.push(with_kubernetes(NOW - 90_000, Some(NOW - 3 * 3600), None)),
        &[("cluster-snapshot-old", "cluster ams")],
    ),
    (
        "a cluster that refuses every key",
        |e| {
            let refused = Some(at(NOW - 1));
            e.clusters
                .push(ClusterIssueInputs { keys_rejected_since: refused, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-key-refused", "cluster ams")],
    ),
    (
        "an etcd that is nearly full",
        |e| {
            let size = Some(ByteSize(MAX_ETCD_BYTES * 4 / 5 + 1));
            e.clusters.push(ClusterIssueInputs { etcd_bytes: size, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-etcd-large", "cluster ams")],
    ),
    (
        "an etcd that is nearly full by its own quota",
        |e| {
            let (size, quota) = (Some(ByteSize(13 << 20)), Some(ByteSize(16 << 20)));
            e.clusters.push(ClusterIssueInputs {
                etcd_bytes: size,
                etcd_quota_bytes: quota,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[("cluster-etcd-large", "cluster ams")],
    ),
    (
        "an etcd that has room by its own quota",
        |e| {
            let (size, quota) = (Some(ByteSize(MAX_ETCD_BYTES)), Some(ByteSize(2 * MAX_ETCD_BYTES)));
            e.clusters.push(ClusterIssueInputs {
                etcd_bytes: size,
                etcd_quota_bytes: quota,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[],
    ),
    (
        "an etcd that is full",
        |e| {
            let since = Some(at(NOW));
            e.clusters.push(ClusterIssueInputs { etcd_full_since: since, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[("cluster-etcd-full", "cluster ams")],
    ),
    (
        "an authority that can still be replaced often",
        |e| {
            let count = ANNOUNCED_REPLACEMENTS - 1;
            e.clusters.push(ClusterIssueInputs {
                authority_replacements: count,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[],
    ),
    (
        "an authority that was replaced too often",
        |e| {
            let count = ANNOUNCED_REPLACEMENTS;
            e.clusters.push(ClusterIssueInputs {
                authority_replacements: count,
                ..cluster(NOW - 9, Some(NOW - 2))
            });
        },
        &[("authority-replacements", "cluster ams")],
    ),
    (
        "an etcd that has room",
        |e| {
            let size = Some(ByteSize(MAX_ETCD_BYTES * 4 / 5));
            e.clusters.push(ClusterIssueInputs { etcd_bytes: size, ..cluster(NOW - 9, Some(NOW - 2)) });
        },
        &[],
    ),
    ("an authority that is replaced", |e| e.clusters.push(rotating_cluster(None)), &[]),
    (
        "an authority that is replaced while a curator is elected",
        |e| e.clusters.push(rotating_cluster(Some(NOW - 119))),
        &[],
    ),
    (
        "an authority that is not replaced any further",
        |e| e.clusters.push(rotating_cluster(Some(NOW - 120))),
        &[("authority-rotation-held", "cluster ams")],
    ),
    ("keys of Secrets that reach controllers", |e| e.clusters.push(with_secret_keys(NOW - 3599)), &[]),
    (
        "keys of Secrets that a controller holds up",
        |e| e.clusters.push(with_secret_keys(NOW - 3600)),
        &[("secrets-key-held", "cluster ams")],
    ),
    ("a first key of Secrets that is made soon", |e| e.clusters.push(without_secret_keys(NOW - 3599)), &[]),
    (
        "a first key of Secrets that no controller can get",
        |e| e.clusters.push(without_secret_keys(NOW - 3600)),
        &[("secrets-key-held", "cluster ams")],
    ),
    ("controllers that learn the order", |e| e.clusters.push(with_prepared_secrets(NOW - 7199)), &[]),
    (
        "a controller that does not learn the order",
        |e| e.clusters.push(with_prepared_secrets(NOW - 7200)),
        &[("secrets-key-held", "cluster ams")],
    ),
    ("a component that is well", |e| e.kubernetes.push(kubernetes("healthy", 0)), &[]),
    ("a component that is unwell for a while", |e| e.kubernetes.push(kubernetes("starting", NOW - 599)), &[]),
    (
        "a component that is unwell for long",
        |e| e.kubernetes.push(kubernetes("backing off", NOW - 600)),
        &[("kubernetes-component-unwell", "cluster ams")],
    ),
    ("keys that are replaced", |e| e.kubernetes.push(rotating(NOW - 899, &["node-1"])), &[]),
    ("keys that wait for their end", |e| e.kubernetes.push(rotating(NOW - 90_000, &[])), &[]),
    (
        "keys that a node holds up",
        |e| e.kubernetes.push(rotating(NOW - 900, &["node-1"])),
        &[("kubernetes-rotation-held", "cluster ams")],
    ),
    (
        "keys that reach one node after the other",
        |e| {
            let mut rotating = rotating(NOW - 9000, &["node-1", "node-2"]);
            rotating.rotations[0].notified_at = Some(at(NOW - 899));
            e.kubernetes.push(rotating);
        },
        &[],
    ),
    (
        "keys that the node notified last holds up",
        |e| {
            let mut rotating = rotating(NOW - 9000, &["node-1", "node-2"]);
            rotating.rotations[0].notified_at = Some(at(NOW - 900));
            e.kubernetes.push(rotating);
        },
        &[("kubernetes-rotation-held", "cluster ams")],
    ),
    (
        "an object of somebody else",
        |e| {
            let mut clashing = kubernetes("healthy", 0);
            clashing.nodes[0].kubernetes.conflicts = vec![ObjectConflict {
                kind: "Role".into(),
                name: "a".into(),
                message: "it has no label".into(),
            }];
            e.kubernetes.push(clashing);
        },
        &[("kubernetes-object-clash", "cluster ams")],
    ),
    (
        "a Kubernetes with a published fault",
        |e| {
            let mut cluster = kubernetes("healthy", 0);
            cluster.nodes[0].kubernetes.version = "1.22.1".into();
            e.kubernetes.push(cluster);
        },
        &[("version-fault", "cluster ams")],
    ),
];
