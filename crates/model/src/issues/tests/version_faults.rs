//! The table of versions with a published fault, row by row: how an operator learns of each.

use super::*;
use crate::issues::inputs::EtcdMemberInputs;
use crate::program_versions::etcd_start::check_etcd_start;
use crate::program_versions::version::{ProgramVersion, parse_program_version};
use crate::program_versions::{Program, VERSION_FAULTS, format_version, postgres_warnings};

/// A fleet that runs a program in a version; `None` if versions of that program are only logged.
fn fleet_with(program: Program, version: ProgramVersion) -> Option<IssueInputs> {
    let mut evidence = healthy_inputs();
    let mut bundled = |program| {
        let cluster = kubernetes("healthy", 0);
        evidence.kubernetes.push(KubernetesIssueInputs { bundled: vec![(program, version)], ..cluster });
    };
    match program {
        Program::Postgres => evidence.database_version = Some(version.upstream.numbers),
        Program::Etcd => evidence.clusters.push(with_etcd(&[("m1", &version.upstream.to_string())])),
        Program::Kubernetes => {
            let mut cluster = kubernetes("healthy", 0);
            cluster.nodes[0].kubernetes.version = version.upstream.to_string();
            evidence.kubernetes.push(cluster);
        }
        Program::Containerd | Program::Runc => bundled(program),
        Program::OpenSsh => return None,
    }
    Some(evidence)
}

/// A cluster with these machines in its control plane, and the etcd that each reports.
fn with_etcd(members: &[(&str, &str)]) -> ClusterIssueInputs {
    let members = members
        .iter()
        .map(|&(machine, version)| EtcdMemberInputs { machine: machine.into(), version: version.into() });
    ClusterIssueInputs { etcd_members: members.collect(), ..cluster(NOW - 9, Some(NOW - 2)) }
}

fn faults_found(evidence: &IssueInputs) -> Vec<Issue> {
    find_issues(evidence).into_iter().filter(|issue| issue.id == "version-fault").collect()
}

#[test]
fn each_row_of_the_table_is_an_issue_and_what_loses_data_is_refused() {
    for fault in VERSION_FAULTS {
        for (first, fixed) in fault.ranges {
            let version = ProgramVersion { upstream: *first, revision: None };
            let fixed = format!("install {} or later", format_version(fault.program, *fixed));
            if let Some(evidence) = fleet_with(fault.program, version) {
                let found = faults_found(&evidence);
                let subject = if fault.program == Program::Postgres { "the database" } else { "cluster ams" };
                assert_eq!(found.len(), 1, "{} {first}: {found:#?}", fault.name);
                assert_eq!(found[0].subject, subject, "{}", fault.name);
                // An old version has more faults than an issue lists.
                let is_listed = found[0].message.contains(fault.name);
                assert!(is_listed || found[0].message.contains(" more"), "{}: {:?}", fault.name, found[0]);
                assert!(!is_listed || found[0].message.contains(&fixed), "{}: {:?}", fault.name, found[0]);
            }
            if fault.program == Program::Postgres {
                // `--check` and each start log these.
                let warnings = postgres_warnings(first.numbers);
                assert!(warnings.iter().any(|text| text.contains(fault.name)), "{warnings:?}");
            }
            let refusal = check_etcd_start(None, version, &[]).err().map(|error| error.to_string());
            if fault.loses_data {
                assert_eq!(fault.program, Program::Etcd, "nothing refuses {}", fault.name);
                assert!(refusal.is_some_and(|text| text.contains(fault.name)), "{}", fault.name);
                assert_eq!(check_etcd_start(None, version, &[fault.name.to_owned()]), Ok(()));
            } else if fault.program == Program::Etcd {
                assert!(refusal.is_none_or(|text| !text.contains(fault.name)), "{}", fault.name);
            }
        }
    }
}

#[test]
fn etcd_with_a_fault_names_its_machines() {
    for (what, members, expected) in [
        ("none reports", &[][..], None),
        ("all are newer", &[("m1", "3.7.3"), ("m2", "3.6.14")], None),
        ("one is older", &[("m1", "3.6.14"), ("m2", "3.6.8")], Some("on m2: etcd 3.6.8 can answer")),
        ("two are older", &[("m1", "3.6.8"), ("m2", "3.6.8")], Some("on m1, m2: etcd 3.6.8 can answer")),
        ("its package may be corrected", &[("m1", "3.6.8-1")], None),
        ("no version", &[("m1", "unknown")], None),
    ] {
        let mut evidence = healthy_inputs();
        evidence.clusters.push(with_etcd(members));
        let found = faults_found(&evidence);
        assert_eq!(found.len(), usize::from(expected.is_some()), "{what}: {found:#?}");
        if let (Some(issue), Some(expected)) = (found.first(), expected) {
            assert!(issue.message.starts_with(expected), "{what}: {}", issue.message);
            assert_eq!(issue.message.matches("etcd-stale-read").count(), 1, "{what}: {}", issue.message);
        }
    }
}

#[test]
fn programs_of_a_bundle_are_judged_as_its_kubernetes() {
    for (program, version, expected) in [
        (Program::Containerd, "1.7.32", true),
        (Program::Containerd, "1.7.33", false),
        (Program::Containerd, "1.7.24~ds1-6", false),
        (Program::Runc, "1.2.7", true),
        (Program::Runc, "1.1.5+ds1-1+deb12u1", false),
    ] {
        let version = parse_program_version(version).unwrap();
        let found = faults_found(&fleet_with(program, version).unwrap());
        assert_eq!(!found.is_empty(), expected, "{program} {version:?}: {found:#?}");
    }
}
