//! The table of versions with a published fault.
//!
//! # How to add a row
//!
//! State the range by the releases themselves: the first version that has the fault, and the first that does not. Where
//! the developers name no first version, it is the first release of all. Give the page of the program's own developers as
//! the reference. A name never changes, because configurations contain it. `corrected_in_debian` needs an advisory of
//! Debian that names the package. `docs/versions.md` has the same table, and a test compares them.

use crate::program_versions::version::{DebianUpdate, UpstreamVersion};
use crate::program_versions::{
    KILLED_DEFRAGMENTATION_FAULT, Program, SNAPSHOT_DEFRAGMENTATION_FAULT, VersionFault,
};

const fn version(major: u32, minor: u32, patch: u32) -> UpstreamVersion {
    UpstreamVersion::release(major, minor, patch)
}

const fn candidate(major: u32, minor: u32, patch: u32, number: u32) -> UpstreamVersion {
    UpstreamVersion::candidate(major, minor, patch, number)
}

const fn debian(debian: u32, update: u32) -> DebianUpdate {
    DebianUpdate { debian, update }
}

/// Every fault, by program.
pub const VERSION_FAULTS: &[VersionFault] = &[
    VersionFault {
        name: "etcd-lost-delete-event",
        program: Program::Etcd,
        ranges: &[(version(3, 4, 0), version(3, 4, 36)), (version(3, 5, 0), version(3, 5, 18))],
        corrected_in_debian: &[],
        effect: "sends no event for a deletion at the very revision of a compaction; the curators bear it, and other \
                 clients may not",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/18089",
    },
    VersionFault {
        name: "etcd-divergence",
        program: Program::Etcd,
        ranges: &[(version(3, 5, 0), version(3, 5, 3))],
        corrected_in_debian: &[],
        effect: "can lose writes when it is killed, so that its members have different data",
        loses_data: true,
        reference: "https://github.com/etcd-io/etcd/issues/13766",
    },
    VersionFault {
        name: "etcd-one-member-durability",
        program: Program::Etcd,
        ranges: &[(version(3, 4, 0), version(3, 4, 21)), (version(3, 5, 0), version(3, 5, 5))],
        corrected_in_debian: &[],
        effect: "can lose the last write of a cluster with one member when that member is killed",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/14370",
    },
    VersionFault {
        name: "etcd-decreasing-revision",
        program: Program::Etcd,
        ranges: &[(version(3, 4, 0), version(3, 4, 32)), (version(3, 5, 0), version(3, 5, 14))],
        corrected_in_debian: &[],
        effect: "can return to a lower revision when it is killed during a compaction",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/17780",
    },
    VersionFault {
        name: "etcd-revoked-leases",
        program: Program::Etcd,
        ranges: &[(version(3, 4, 0), version(3, 4, 31)), (version(3, 5, 0), version(3, 5, 13))],
        corrected_in_debian: &[],
        effect: "can revoke leases that clients renew, when the disk or the processors of a leader are slow and another \
                 member becomes the leader",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/15247",
    },
    VersionFault {
        name: "etcd-lease-renewal",
        program: Program::Etcd,
        ranges: &[
            (version(3, 4, 0), version(3, 4, 38)),
            (version(3, 5, 0), version(3, 5, 23)),
            (version(3, 6, 0), version(3, 6, 5)),
        ],
        corrected_in_debian: &[],
        effect: "can confirm the renewal of a lease that it has revoked",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/pull/20615",
    },
    VersionFault {
        name: KILLED_DEFRAGMENTATION_FAULT,
        program: Program::Etcd,
        ranges: &[(version(3, 5, 0), version(3, 5, 6))],
        corrected_in_debian: &[],
        effect: "can differ from the other members after it was killed while it was defragmented, so no member of that \
                 version is defragmented",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/pull/14685",
    },
    VersionFault {
        name: SNAPSHOT_DEFRAGMENTATION_FAULT,
        program: Program::Etcd,
        ranges: &[
            (version(3, 4, 0), version(3, 4, 38)),
            (version(3, 5, 0), version(3, 5, 23)),
            (version(3, 6, 0), version(3, 6, 5)),
        ],
        corrected_in_debian: &[],
        effect: "can damage the database of a member that is defragmented while it applies a snapshot of the leader",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/20271",
    },
    VersionFault {
        name: "etcd-stale-read",
        program: Program::Etcd,
        ranges: &[
            (version(3, 4, 20), version(3, 4, 42)),
            (version(3, 5, 0), version(3, 5, 28)),
            (version(3, 6, 0), version(3, 6, 9)),
        ],
        corrected_in_debian: &[],
        effect: "can answer a linearizable read with outdated data after a member was paused",
        loses_data: false,
        reference: "https://github.com/etcd-io/etcd/issues/20418",
    },
    VersionFault {
        name: "postgresql-concurrent-index",
        program: Program::Postgres,
        ranges: &[(version(14, 0, 0), version(14, 4, 0))],
        corrected_in_debian: &[],
        effect: "breaks indexes that are built concurrently, so that they miss rows",
        loses_data: false,
        reference: "https://www.postgresql.org/docs/release/14.4/",
    },
    VersionFault {
        name: "kubernetes-subpath",
        program: Program::Kubernetes,
        ranges: &[
            (version(1, 0, 0), version(1, 19, 15)),
            (version(1, 20, 0), version(1, 20, 11)),
            (version(1, 21, 0), version(1, 21, 5)),
            (version(1, 22, 0), version(1, 22, 2)),
        ],
        corrected_in_debian: &[],
        effect: "lets a container reach files of its host by a volume's subpath (CVE-2021-25741)",
        loses_data: false,
        reference: "https://github.com/kubernetes/kubernetes/issues/104980",
    },
    VersionFault {
        name: "kubernetes-git-volume",
        program: Program::Kubernetes,
        ranges: &[
            (version(1, 0, 0), version(1, 28, 12)),
            (version(1, 29, 0), version(1, 29, 7)),
            (version(1, 30, 0), version(1, 30, 3)),
        ],
        corrected_in_debian: &[],
        effect: "lets a pod with a gitRepo volume run commands on its host (CVE-2024-10220)",
        loses_data: false,
        reference: "https://github.com/kubernetes/kubernetes/issues/128885",
    },
    VersionFault {
        name: "kubernetes-node-owner",
        program: Program::Kubernetes,
        ranges: &[
            (version(1, 0, 0), version(1, 31, 12)),
            (version(1, 32, 0), version(1, 32, 8)),
            (version(1, 33, 0), version(1, 33, 4)),
        ],
        corrected_in_debian: &[],
        effect: "lets a node delete its own node object by an owner reference, and create it again with other labels and \
                 taints (CVE-2025-5187)",
        loses_data: false,
        reference: "https://github.com/kubernetes/kubernetes/issues/133471",
    },
    VersionFault {
        name: "containerd-image-volumes",
        program: Program::Containerd,
        ranges: &[
            (version(1, 0, 0), version(1, 4, 13)),
            (version(1, 5, 0), version(1, 5, 10)),
            (version(1, 6, 0), version(1, 6, 1)),
        ],
        corrected_in_debian: &[],
        effect: "lets an image read files of its host (CVE-2022-23648)",
        loses_data: false,
        reference: "https://github.com/containerd/containerd/security/advisories/GHSA-crp2-qrr5-8pq7",
    },
    VersionFault {
        name: "containerd-image-labels",
        program: Program::Containerd,
        ranges: &[
            (version(1, 7, 0), version(1, 7, 33)),
            (version(2, 0, 0), version(2, 0, 10)),
            (version(2, 1, 0), version(2, 1, 9)),
            (version(2, 2, 0), version(2, 2, 5)),
            (version(2, 3, 0), version(2, 3, 2)),
        ],
        corrected_in_debian: &[],
        effect: "lets an image run commands on its host by a label (CVE-2026-53488)",
        loses_data: false,
        reference: "https://github.com/containerd/containerd/security/advisories/GHSA-xhf5-7wjv-pqxp",
    },
    VersionFault {
        name: "runc-working-directory",
        program: Program::Runc,
        ranges: &[(candidate(1, 0, 0, 93), version(1, 1, 12))],
        corrected_in_debian: &[(candidate(1, 0, 0, 93), debian(11, 3)), (version(1, 1, 5), debian(12, 1))],
        effect: "lets a container reach the file system of its host by its working directory (CVE-2024-21626)",
        loses_data: false,
        reference: "https://github.com/opencontainers/runc/security/advisories/GHSA-xr7r-f8xq-vfvv",
    },
    VersionFault {
        name: "runc-masked-paths",
        program: Program::Runc,
        ranges: &[
            (version(0, 0, 1), version(1, 2, 8)),
            (version(1, 3, 0), version(1, 3, 3)),
            (candidate(1, 4, 0, 1), candidate(1, 4, 0, 3)),
        ],
        corrected_in_debian: &[],
        effect: "lets a container write to files of the kernel that are masked (CVE-2025-31133)",
        loses_data: false,
        reference: "https://github.com/opencontainers/runc/security/advisories/GHSA-9493-h29p-rfm2",
    },
    VersionFault {
        name: "runc-console",
        program: Program::Runc,
        ranges: &[
            (candidate(1, 0, 0, 3), version(1, 2, 8)),
            (version(1, 3, 0), version(1, 3, 3)),
            (candidate(1, 4, 0, 1), candidate(1, 4, 0, 3)),
        ],
        corrected_in_debian: &[],
        effect: "lets a container write to files of the kernel by its console (CVE-2025-52565)",
        loses_data: false,
        reference: "https://github.com/opencontainers/runc/security/advisories/GHSA-qw9x-cqr3-wc7r",
    },
    VersionFault {
        name: "runc-security-labels",
        program: Program::Runc,
        ranges: &[
            (version(0, 0, 1), version(1, 2, 8)),
            (version(1, 3, 0), version(1, 3, 3)),
            (candidate(1, 4, 0, 1), candidate(1, 4, 0, 3)),
        ],
        corrected_in_debian: &[],
        effect: "lets a container run without its security label and redirect what runc writes (CVE-2025-52881)",
        loses_data: false,
        reference: "https://github.com/opencontainers/runc/security/advisories/GHSA-cgrx-mc8f-2prm",
    },
    VersionFault {
        name: "runc-device-directory",
        program: Program::Runc,
        ranges: &[
            (version(0, 0, 1), version(1, 3, 6)),
            (version(1, 4, 0), version(1, 4, 3)),
            (candidate(1, 5, 0, 1), candidate(1, 5, 0, 3)),
        ],
        corrected_in_debian: &[],
        effect: "lets an image remove files named ptmx and create some links in directories of its host (CVE-2026-41579)",
        loses_data: false,
        reference: "https://github.com/opencontainers/runc/security/advisories/GHSA-xjvp-4fhw-gc47",
    },
    VersionFault {
        name: "openssh-signal-race",
        program: Program::OpenSsh,
        ranges: &[(version(8, 5, 0), version(9, 8, 0))],
        // https://www.debian.org/security/2024/dsa-5724
        corrected_in_debian: &[(version(9, 2, 0), debian(12, 3))],
        effect: "lets a client that never logs in run commands as root, by a race in a signal handler (CVE-2024-6387)",
        loses_data: false,
        reference: "https://www.openssh.com/txt/release-9.8",
    },
];
