use std::collections::BTreeSet;

use super::etcd_start::FIRST_STEPS;
use super::version::{parse_openssh_banner, parse_program_version};
use super::*;

fn parsed(text: &str) -> ProgramVersion {
    parse_program_version(text).unwrap()
}

/// The names of the faults of a version. Those that its package may have corrected have a question mark.
fn faults_of(program: Program, text: &str) -> Vec<String> {
    let found = find_faults(program, parsed(text));
    found
        .iter()
        .map(|found| format!("{}{}", found.fault.name, if found.is_certain { "" } else { "?" }))
        .collect()
}

/// For each row of the table: versions with the fault (the last ones, pre-releases, packages), and versions without it (the
/// first ones of each line).
const CASES: &[(&str, &[&str], &[&str])] = &[
    (
        "etcd-lost-delete-event",
        &["3.4.0", "3.4.35", "3.4.36-rc.0", "3.5.0-rc.1", "3.5.17", "3.5.17+k3s1"],
        &["3.3.27", "3.4.36", "3.5.18", "3.6.0"],
    ),
    ("etcd-divergence", &["3.5.0", "3.5.2", "3.5.3-rc.0"], &["3.4.40", "3.5.3", "3.6.0"]),
    (
        "etcd-one-member-durability",
        &["3.4.16", "3.4.20", "3.4.21-rc.0", "3.5.0", "3.5.4"],
        &["3.4.21", "3.5.5", "3.6.0-rc.0"],
    ),
    (
        "etcd-decreasing-revision",
        &["3.4.31", "3.5.13", "3.5.14-rc.0", "3.4.23-4+deb12u1"],
        &["3.4.32", "3.5.14", "3.6.0"],
    ),
    ("etcd-revoked-leases", &["3.4.30", "3.5.12", "3.5.13-rc.0"], &["3.4.31", "3.5.13", "3.6.0"]),
    (
        "etcd-lease-renewal",
        &["3.4.37", "3.5.22", "3.6.0-rc.5", "3.6.4", "3.6.5-rc.0"],
        &["3.4.38", "3.5.23", "3.6.5", "3.7.0"],
    ),
    ("etcd-killed-defragmentation", &["3.5.0", "3.5.5", "3.5.6-rc.0"], &["3.4.40", "3.5.6", "3.6.0"]),
    (
        "etcd-defragmentation",
        &["3.4.37", "3.5.22", "3.6.0-rc.5", "3.6.4", "3.6.5-rc.0"],
        &["3.4.38", "3.5.23", "3.6.5", "3.7.0"],
    ),
    (
        "etcd-stale-read",
        &["3.4.20", "3.4.41", "3.5.27", "3.6.8", "3.6.9-rc.0"],
        &["3.4.19", "3.4.42", "3.5.28", "3.6.9", "3.7.0"],
    ),
    (
        "postgresql-concurrent-index",
        &["14.0", "14.3", "14.3 (Debian 14.3-1.pgdg110+1)"],
        &["13.22", "14.4", "15.0"],
    ),
    (
        "kubernetes-subpath",
        &["v1.18.20", "v1.19.14", "1.20.10", "1.21.4", "v1.22.1", "v1.22.2-rc.0"],
        &["v1.19.15", "1.20.11", "1.21.5", "v1.22.2"],
    ),
    (
        "kubernetes-git-volume",
        &["1.27.9", "1.28.11", "1.29.6", "1.30.2", "1.30.3-rc.0", "v1.30.2+k3s1"],
        &["1.28.12", "1.29.7", "1.30.3", "1.31.0"],
    ),
    (
        "kubernetes-node-owner",
        &["1.31.11", "1.32.7", "1.33.3", "1.33.4-rc.0", "v1.33.3+rke2r1"],
        &["1.31.12", "1.32.8", "1.33.4", "1.34.0"],
    ),
    (
        "containerd-image-volumes",
        &["1.3.10", "1.4.12", "1.5.9", "1.6.0", "1.6.1-rc.0", "1.6.0~ds1-1"],
        &["1.4.13", "1.5.10", "1.6.1", "v1.7.0", "1.6.20~ds1-1+b1"],
    ),
    (
        "containerd-image-labels",
        &["1.7.0", "1.7.32", "2.0.9", "2.1.8", "2.2.4", "2.3.1", "v2.3.0-rc.1", "1.7.24~ds1-6"],
        &["1.6.40", "1.7.33", "2.0.10", "2.1.9", "2.2.5", "2.3.2", "v2.4.0-beta.0"],
    ),
    (
        "runc-working-directory",
        &[
            "1.0.0-rc93",
            "1.1.11",
            "1.1.12-rc.1",
            "1.1.5+ds1-1+b1",
            "1.1.5+ds1-1+deb11u9",
            "1.0.0~rc93+ds1-5+deb11u2",
        ],
        &[
            "1.0.0-rc92",
            "1.1.12",
            "1.2.0",
            "1.1.5+ds1-1+deb12u1",
            "1.1.5+ds1-1+deb12u2+b1",
            "1.0.0~rc93+ds1-5+deb11u3",
        ],
    ),
    (
        "runc-masked-paths",
        &["1.0.0-rc2", "1.2.7", "1.3.0-rc.1", "1.3.2", "1.4.0-rc.2", "1.1.5+ds1-1+deb12u1", "1.1.15+deb12u1"],
        &["1.2.8", "1.3.3", "1.4.0-rc.3", "1.4.0"],
    ),
    (
        "runc-console",
        &["1.0.0-rc3", "1.2.7", "1.3.2", "1.4.0-rc.2"],
        &["1.0.0-rc2", "1.2.8", "1.3.3", "1.4.0-rc.3", "1.4.0"],
    ),
    (
        "runc-security-labels",
        &["1.0.0-rc2", "1.2.7", "1.3.2", "1.4.0-rc.2"],
        &["1.2.8", "1.3.3", "1.4.0-rc.3"],
    ),
    (
        "runc-device-directory",
        &["1.2.9", "1.3.5", "1.4.0-rc.3", "1.4.2", "1.5.0-rc.2"],
        &["1.3.6", "1.4.3", "1.5.0-rc.3", "1.5.0"],
    ),
    (
        "openssh-signal-race",
        &["8.5p1", "9.7p1", "9.6p1 Ubuntu-3ubuntu13.3", "9.2p1 Debian-2+deb12u2", "9.2p1 Debian-2"],
        &["8.4p1 Debian-5+deb11u3", "9.8p1", "10.2", "9.2p1 Debian-2+deb12u3", "9.2p1 Debian-2+deb12u7"],
    ),
];

#[test]
fn each_fault_begins_and_ends_with_its_versions() {
    let tested: BTreeSet<&str> = CASES.iter().map(|(name, ..)| *name).collect();
    for fault in VERSION_FAULTS {
        assert!(tested.contains(fault.name), "no case for {}", fault.name);
    }
    for (name, with, without) in CASES {
        let fault = VERSION_FAULTS.iter().find(|fault| fault.name == *name).unwrap();
        for (texts, expected) in [(with, true), (without, false)] {
            for text in *texts {
                assert_eq!(fault.affects(parsed(text)), expected, "{name} {text}");
            }
        }
    }
}

#[test]
fn package_that_may_have_the_correction_is_not_certain() {
    for (program, text, expected) in [
        (Program::Runc, "1.1.5", &["runc-working-directory", "runc-masked-paths"][..]),
        (Program::Runc, "1.1.5+ds1-1+b1", &["runc-working-directory?", "runc-masked-paths?"]),
        (Program::Runc, "1.1.5+ds1-1+deb12u1", &["runc-masked-paths?", "runc-console?"]),
        (Program::Containerd, "1.6.0", &["containerd-image-volumes"]),
        (Program::Containerd, "1.6.0~ds1-1", &["containerd-image-volumes?"]),
        (Program::Containerd, "1.6.20~ds1-1+deb12u3", &[]),
        (Program::Runc, "1.0.0~rc93+ds1-5+deb11u2", &["runc-working-directory", "runc-masked-paths?"]),
        (Program::OpenSsh, "9.2p1 Debian-2+deb12u2", &["openssh-signal-race"]),
        (Program::OpenSsh, "9.6p1 Ubuntu-3ubuntu13.3", &["openssh-signal-race?"]),
        (Program::Etcd, "3.5.2", &["etcd-lost-delete-event", "etcd-divergence"]),
        (Program::Etcd, "3.5.2+k3s1", &["etcd-lost-delete-event?", "etcd-divergence?"]),
    ] {
        let found = faults_of(program, text);
        assert_eq!(found[..expected.len().min(found.len())], *expected, "{program} {text}: {found:?}");
        assert_eq!(found.is_empty(), expected.is_empty(), "{program} {text}: {found:?}");
    }
    let described = |text: &str| find_faults(Program::Containerd, parsed(text))[0].to_string();
    assert!(described("1.6.0").ends_with("GHSA-crp2-qrr5-8pq7): install 1.6.1 or later"));
    let packaged = described("1.6.0~ds1-1");
    assert!(packaged.starts_with("containerd 1.6.0 lets an image read files of its host"), "{packaged}");
    assert!(
        packaged.ends_with(
            "), unless the distribution has corrected it in this package: if not, install 1.6.1 or later"
        ),
        "{packaged}"
    );
    let candidate = find_faults(Program::Runc, parsed("1.4.0-rc.1"))[0].to_string();
    assert!(
        candidate.starts_with("runc 1.4.0-rc.1 ") && candidate.ends_with(": install 1.4.0-rc.3 or later")
    );
}

#[test]
fn line_of_an_ssh_server_never_proves_a_fault_that_a_package_may_have_corrected() {
    let found = |line: &str| {
        let version = parse_openssh_banner(line)?;
        let found = find_faults(Program::OpenSsh, version);
        Some(found.iter().map(|found| found.is_certain).collect::<Vec<_>>())
    };
    for (line, expected) in [
        ("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u2", Some(&[true][..])),
        ("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r", Some(&[])),
        ("SSH-2.0-OpenSSH_9.6p1 Ubuntu-3ubuntu13.3", Some(&[false])),
        // Red Hat corrects it, and keeps the line of its developers.
        ("SSH-2.0-OpenSSH_8.7", Some(&[false])),
        ("SSH-2.0-OpenSSH_9.8", Some(&[])),
        ("SSH-1.99-OpenSSH_8.4p1", Some(&[])),
        ("SSH-2.0-dropbear_2022.83", None),
        ("HTTP/1.1 400 Bad-OpenSSH_9.2", None),
        ("", None),
    ] {
        assert_eq!(found(line).as_deref(), expected, "{line}");
    }
    let version = parse_openssh_banner("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u2").unwrap();
    let sentence = find_faults(Program::OpenSsh, version)[0].to_string();
    assert!(sentence.starts_with("OpenSSH 9.2p1 lets a client"), "{sentence}");
    assert!(sentence.ends_with("/release-9.8): install 9.8p1 or later"), "{sentence}");
}

#[test]
fn table_is_in_the_documentation() {
    let page = include_str!("../../../../docs/versions.md");
    let mut names = BTreeSet::new();
    for fault in VERSION_FAULTS {
        assert!(names.insert(fault.name), "{} is there twice", fault.name);
        let row = page.lines().find(|line| line.starts_with(&format!("| `{}` |", fault.name)));
        let row = row.unwrap_or_else(|| panic!("docs/versions.md has no row for {}", fault.name));
        for (first, fixed) in fault.ranges {
            assert!(first < fixed, "{}", fault.name);
            let range = [first, fixed].map(|version| format_version(fault.program, *version));
            assert!(row.contains(&format!("{} until {}", range[0], range[1])), "{row}");
        }
        for (upstream, since) in fault.corrected_in_debian {
            assert!(fault.fixed_in(*upstream).is_some(), "{upstream} is in no range of {}", fault.name);
            assert!(row.contains(&format!("+deb{}u{}", since.debian, since.update)), "{row}");
        }
        assert!(row.contains(&fault.program.to_string()) && row.contains(fault.reference), "{row}");
        assert_eq!(row.contains("refused"), fault.loses_data, "{row}");
    }
    for step in FIRST_STEPS {
        let item = format!("an etcd 3.{} where an etcd before {} ran", step.minor, step.oldest);
        assert!(page.contains(&item) && page.contains(step.name), "docs/versions.md lacks {item}");
    }
}

#[test]
fn postgres_outside_the_supported_versions_is_named() {
    let version = |text| parsed(text).upstream.numbers;
    assert_eq!(format_version(Program::Postgres, postgres_version(150_004).into()), "15.4");
    assert_eq!(postgres_warnings(version("15.4")), [""; 0]);
    assert_eq!(postgres_warnings(version("18.1")), [""; 0]);
    assert_eq!(postgres_warnings(version("19.0")), ["PostgreSQL 19.0 is not supported; 15 to 18 are"]);
    let old = postgres_warnings(version("14.2"));
    assert_eq!(old.len(), 2, "{old:?}");
    assert!(old[0].ends_with("/14.4/): install 14.4 or later"), "{old:?}");
}
