//! Issues of the versions of other programs: the database server, the etcd of clusters, and what bundles contain.
//!
//! [`crate::program_versions`] has the table. A fault that a package may have corrected is no issue.

use std::collections::BTreeMap;

use crate::issues::inputs::{ClusterIssueInputs, IssueInputs, KubernetesIssueInputs};
use crate::issues::{Issue, IssueKind, MAX_NAMED_MACHINES, join_first};
use crate::program_versions::version::{ProgramVersion, UpstreamVersion, parse_program_version};
use crate::program_versions::{Program, find_faults, postgres_warnings};

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found: Vec<Issue> = database_version(evidence).into_iter().collect();
    found.extend(evidence.clusters.iter().filter_map(etcd_version));
    found.extend(evidence.kubernetes.iter().filter_map(bundle_versions));
    found
}

/// Issue: the database runs on a version with a published fault, or on one that is not supported.
fn database_version(evidence: &IssueInputs) -> Option<Issue> {
    let warnings = postgres_warnings(evidence.database_version?);
    (!warnings.is_empty()).then(|| {
        Issue::new(
            IssueKind::VersionFault,
            "the database".to_owned(),
            warnings.join("; "),
            None,
            "update PostgreSQL to a supported version without the fault (`shepherdctl explain versions#versions-with-a-published-fault`)".to_owned(),
        )
    })
}

/// Issue: the etcd that is installed on a control plane has a published fault.
fn etcd_version(cluster: &ClusterIssueInputs) -> Option<Issue> {
    let versions = cluster.etcd_members.iter().filter_map(|member| parse_program_version(&member.version));
    let faults = describe_certain_faults(versions.map(|version| (Program::Etcd, version)))?;
    let affected: Vec<&str> = cluster
        .etcd_members
        .iter()
        .filter(|member| {
            parse_program_version(&member.version).is_some_and(|version| {
                find_faults(Program::Etcd, version).iter().any(|fault| fault.is_certain)
            })
        })
        .map(|member| member.machine.as_str())
        .collect();
    let more = match affected.len().saturating_sub(MAX_NAMED_MACHINES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let names = affected[..affected.len().min(MAX_NAMED_MACHINES)].join(", ");
    Some(Issue::new(
        IssueKind::VersionFault,
        format!("cluster {}", cluster.name),
        format!("on {names}{more}: {faults}"),
        None,
        "install a later etcd on one member after the other, in the steps of `shepherdctl explain versions#replacing-etcd`; if the package \
         of your distribution has the corrections, do nothing"
            .to_owned(),
    ))
}

/// Issue: nodes run a bundle in which a program has a published fault.
fn bundle_versions(cluster: &KubernetesIssueInputs) -> Option<Issue> {
    let reported = cluster.nodes.iter().filter_map(|node| parse_program_version(&node.kubernetes.version));
    let reported = reported.map(|version| (Program::Kubernetes, version));
    let faults = describe_certain_faults(reported.chain(cluster.bundled.iter().copied()))?;
    let name = &cluster.name;
    Some(Issue::new(
        IssueKind::VersionFault,
        format!("cluster {name}"),
        faults,
        None,
        format!("upgrade it to a bundle without the fault: `shepherdctl cluster upgrade {name} …`"),
    ))
}

/// The published faults of some programs, each one once; `None` if there is none that no package may have corrected.
fn describe_certain_faults(versions: impl Iterator<Item = (Program, ProgramVersion)>) -> Option<String> {
    let findings = versions.flat_map(|(program, version)| find_faults(program, version));
    let certain: BTreeMap<(UpstreamVersion, &str), String> = findings
        .filter(|finding| finding.is_certain)
        .map(|finding| ((finding.version.upstream, finding.fault.name), finding.to_string()))
        .collect();
    let sentences: Vec<String> = certain.into_values().collect();
    (!sentences.is_empty()).then(|| join_first(&sentences))
}
