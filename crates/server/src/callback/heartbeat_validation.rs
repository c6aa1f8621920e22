//! Heartbeat validation: checks each field of a request and parses it. The code is pure, and does not check who sent
//! the heartbeat.

use prost::Message as _;
use uuid::Uuid;

use crate::callback::hardware_summary::summarise_report;
use bmdb::engine::fact_change::NewHeartbeat;
use bmdb::machine::heartbeat::{InstallationOutcome, ReceivedHeartbeat};
use model::cluster::authority_theft::AuthorityStep;
use model::cluster::restore_programs::EtcdPrograms;
use model::cluster::secret_keys::SecretsReport;
use model::cluster::state::MemberReport;
use model::host_finding::{HostFinding, HostFindingKind, MAX_FINDINGS};
use model::ids::MachineId;
use model::plain_text::{is_hidden, replace_hidden};
use model::roll_out::ReleaseReport as Release;
use model::signed_artefact::RELEASE_REFUSED;
use model::signed_artefact::signing_key::{MAX_KEYS, SigningKey};
use proto::agent::v1::installation_report::Result as Installed;
use proto::agent::v1::{
    ClusterReport, HeartbeatRequest, InstallationReport, ReleaseReport, SecretsReport as WireSecretsReport,
};

/// Largest encoded hardware report. One of a server with a thousand disks has about 100 KiB.
pub const REPORT_LIMIT: usize = 1 << 20;
/// Largest message that is read; a larger one is rejected before it is decoded.
pub const MESSAGE_LIMIT: usize = 2 << 20;

const VERSION_LIMIT: usize = 100;
const ERROR_LIMIT: usize = 4000;
/// Characters of the id of a key.
const KEY_ID_LIMIT: usize = 16;
const CERTIFICATE_LIMIT: usize = 8 << 10;
/// Characters of the name of a provider of Secrets.
const PROVIDER_NAME_LIMIT: usize = 100;
/// Most providers of Secrets that are read.
const MAX_PROVIDERS: usize = 64;
/// Upper bound of a restore epoch: no cluster is restored this often.
const MAX_EPOCH: u64 = 1 << 32;

/// A malformed field, and what is wrong with it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct MalformedField {
    field: &'static str,
    problem: &'static str,
}

/// Parses the heartbeat of a request over a connection with `public_key`.
pub fn parse_heartbeat(
    request: HeartbeatRequest,
    public_key: [u8; 32],
) -> Result<ReceivedHeartbeat, MalformedField> {
    let machine = MachineId(parse_uuid("machine_id", &request.machine_id)?);
    parse_uuid("boot_id", &request.boot_id)?;
    parse_uuid("incarnation", &request.incarnation)?;
    let sequence = i64::try_from(request.seq)
        .map_err(|_| MalformedField { field: "seq", problem: "is no time since a boot" })?;
    if request.access_fence < 0 {
        return Err(MalformedField { field: "access_fence", problem: "is negative" });
    }
    if request.agent_version.chars().count() > VERSION_LIMIT || request.agent_version.chars().any(is_hidden) {
        return Err(MalformedField {
            field: "agent_version",
            problem: "is longer than 100 characters or holds one that is not printable",
        });
    }
    let hardware = match &request.hardware_report {
        Some(report) if report.encoded_len() > REPORT_LIMIT => {
            return Err(MalformedField { field: "hardware_report", problem: "is larger than 1 MiB" });
        }
        report => report.as_ref().map(|report| summarise_report(report, &request.incarnation)),
    };
    let installation = request.installation_report.map(parse_installation_report).transpose()?;
    let beat = NewHeartbeat {
        boot_id: request.boot_id,
        incarnation: request.incarnation,
        sequence,
        version: request.agent_version,
    };
    let cluster = request.cluster_report.map(parse_cluster_report).transpose()?;
    let release = request.release_report.map(parse_release_report).transpose()?;
    let access_fence = request.access_fence;
    Ok(ReceivedHeartbeat {
        machine,
        public_key,
        beat,
        hardware,
        installation,
        cluster,
        release,
        access_fence,
    })
}

/// Parses the UUID in a field.
pub(crate) fn parse_uuid(field: &'static str, text: &str) -> Result<Uuid, MalformedField> {
    // The library accepts other forms too, in which one id would have several names.
    Uuid::parse_str(text)
        .ok()
        .filter(|id| id.hyphenated().to_string() == text)
        .ok_or(MalformedField { field, problem: "is no UUID in hyphenated lower case" })
}

fn parse_cluster_report(report: ClusterReport) -> Result<MemberReport, MalformedField> {
    let malformed = |field, problem| Err(MalformedField { field, problem });
    if report.generation < 0 {
        return malformed("cluster_report.generation", "is negative");
    }
    let key = match report.node_key.len() {
        0 => None,
        _ => match report.node_key.try_into() {
            Ok(key) => Some(key),
            Err(_) => return malformed("cluster_report.node_key", "does not have 32 bytes"),
        },
    };
    if report.ca_certificate.len() > CERTIFICATE_LIMIT {
        return malformed("cluster_report.ca_certificate", "is larger than 8 KiB");
    }
    if report.next_authority.len() > CERTIFICATE_LIMIT {
        return malformed("cluster_report.next_authority", "is larger than 8 KiB");
    }
    if report.epoch > MAX_EPOCH {
        return malformed("cluster_report.epoch", "is larger than it can be");
    }
    if !report.address.is_empty() && report.address.parse::<std::net::IpAddr>().is_err() {
        return malformed("cluster_report.address", "is no IP address");
    }
    let error = shown_text(&report.error, &[]);
    Ok(MemberReport {
        generation: report.generation,
        key,
        ca_certificate: Some(report.ca_certificate).filter(|bytes| !bytes.is_empty()),
        address: Some(report.address).filter(|text| !text.is_empty()),
        error: Some(error).filter(|text| !text.is_empty()),
        epoch: report.epoch,
        next_authority: Some(report.next_authority).filter(|bytes| !bytes.is_empty()),
        next_authority_step: AuthorityStep::from_wire(report.next_authority_step),
        programs: EtcdPrograms {
            etcd: parse_program_version(&report.etcd_version),
            etcdutl: parse_program_version(&report.etcdutl_version),
        },
        secrets: report.secrets.map(parse_secrets_report),
    })
}

/// What a machine reports of the encryption of Secrets. A name that no key has is dropped, so the list is another one.
fn parse_secrets_report(report: WireSecretsReport) -> SecretsReport {
    let is_name = |name: &String| {
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !name.is_empty() && name.len() <= PROVIDER_NAME_LIMIT && name.chars().all(is_part)
    };
    let list = |names: Vec<String>| {
        names.into_iter().take(MAX_PROVIDERS).filter(is_name).collect::<Vec<_>>().join(" ")
    };
    SecretsReport {
        ordered: list(report.ordered),
        rewrite: report.rewrite,
        running: list(report.running),
        rewritten: list(vec![report.rewritten]),
    }
}

/// A text of a machine as it is stored and shown: bounded, and without hidden characters except those in `kept`. A text
/// column does not accept NUL, a terminal must not get control characters, and a text must not look like another one.
fn shown_text(text: &str, kept: &[char]) -> String {
    let start: String = text.chars().take(ERROR_LIMIT).collect();
    replace_hidden(&start, kept)
}

/// A version as a program printed it; `None` if it is not one.
fn parse_program_version(text: &str) -> Option<String> {
    let is_version = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '+'].contains(&c);
    (!text.is_empty() && text.len() <= VERSION_LIMIT && text.chars().all(is_version)).then(|| text.to_owned())
}

fn parse_release_report(report: ReleaseReport) -> Result<Release, MalformedField> {
    if report.generation < 0 {
        return Err(MalformedField { field: "release_report.generation", problem: "is negative" });
    }
    let sha256 = report.sha256.try_into();
    let sha256 = sha256
        .map_err(|_| MalformedField { field: "release_report.sha256", problem: "does not have 32 bytes" })?;
    let error = shown_text(&report.error, &[]);
    let error = Some(error).filter(|text| !text.is_empty());
    let findings = report.findings.into_iter().take(MAX_FINDINGS).map(|finding| HostFinding {
        kind: HostFindingKind::parse(&finding.kind),
        message: shown_text(&finding.message, &[]),
    });
    Ok(Release { generation: report.generation, sha256, error, findings: findings.collect() })
}

/// The finding that a machine has not pinned exactly the keys of this shepherd; `None` if it has, or if there are no keys.
/// Keys that it cannot read are a finding in any case, because it accepts no release then.
#[must_use]
pub fn find_pinning_flaw(report: &ReleaseReport, keys: &[SigningKey]) -> Option<HostFinding> {
    if !report.signing_error.is_empty() {
        let message = shown_text(&format!("it accepts no release: {}", report.signing_error), &[]);
        return Some(HostFinding { kind: HostFindingKind::UnpinnedKeys, message });
    }
    let (pinned, keys) = (sort_ids(report.pinned_key_ids.iter()), sort_ids(keys.iter().map(SigningKey::id)));
    if keys.is_empty() || pinned == keys {
        return None;
    }
    let message = if pinned.is_empty() {
        "it has pinned no signing keys, so it runs releases that nobody signed".to_owned()
    } else {
        format!(
            "it has pinned the signing keys {}, and its shepherd has {}: give shepherds the lists of new keys that a pinned \
             key signed (--key_rotation_path)",
            pinned.join(", "),
            keys.join(", ")
        )
    };
    Some(HostFinding { kind: HostFindingKind::UnpinnedKeys, message })
}

/// The finding that a machine refused the release in its newest order, because of its signature.
#[must_use]
pub fn find_refused_release(report: &ReleaseReport) -> Option<HostFinding> {
    let reason = report.error.strip_prefix(RELEASE_REFUSED)?;
    let shown = |c: char| if is_hidden(c) { ' ' } else { c };
    let text = format!("it refused the release that was ordered last: {reason}");
    let message = text.chars().map(shown).take(ERROR_LIMIT).collect();
    Some(HostFinding { kind: HostFindingKind::ReleaseRefused, message })
}

fn sort_ids(ids: impl Iterator<Item = impl ToString>) -> Vec<String> {
    let shown = |c: char| if c.is_ascii_hexdigit() { c } else { '?' };
    let mut ids: Vec<String> =
        ids.take(MAX_KEYS).map(|id| id.to_string().chars().map(shown).take(KEY_ID_LIMIT).collect()).collect();
    ids.sort_unstable();
    ids
}

/// The heartbeat with what this shepherd finds wrong beside what the machine reports.
#[must_use]
pub fn add_findings(mut heartbeat: ReceivedHeartbeat, findings: Vec<HostFinding>) -> ReceivedHeartbeat {
    if let Some(release) = &mut heartbeat.release {
        // The list is bounded, and the machine's own findings leave a place for these.
        release.findings.truncate(MAX_FINDINGS.saturating_sub(findings.len()));
        release.findings.extend(findings);
    }
    heartbeat
}

fn parse_installation_report(report: InstallationReport) -> Result<InstallationOutcome, MalformedField> {
    let error = match report.result {
        Some(Installed::Success(_)) => None,
        Some(Installed::Failure(failure)) => Some(shown_text(&failure.error, &['\n'])),
        None => {
            return Err(MalformedField {
                field: "installation_report.result",
                problem: "is neither success nor failure",
            });
        }
    };
    if report.generation < 1 {
        return Err(MalformedField { field: "installation_report.generation", problem: "is not positive" });
    }
    Ok(InstallationOutcome { generation: report.generation, error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::agent::v1::{HostFinding as WireFinding, InstallationFailure, InstallationSuccess};
    use proto::hardware::v1::HardwareReport;

    fn request() -> HeartbeatRequest {
        HeartbeatRequest {
            machine_id: "0b1c9a52-7d3a-4a35-9f0a-0242ac120002".to_owned(),
            boot_id: "11111111-2222-4333-8444-555555555555".to_owned(),
            incarnation: "66666666-7777-4888-8999-aaaaaaaaaaaa".to_owned(),
            seq: 5,
            agent_version: "1.2.3".to_owned(),
            ..HeartbeatRequest::default()
        }
    }

    #[test]
    fn no_text_of_a_machine_keeps_a_hidden_character() {
        let odd = || "disk\u{202e}0\u{200b}\u{1b}[2J\0".to_owned();
        let release = || ReleaseReport {
            sha256: vec![1; 32],
            error: odd(),
            findings: vec![WireFinding { kind: odd(), message: odd() }],
            signing_error: odd(),
            ..ReleaseReport::default()
        };
        let stored = parse_release_report(release()).unwrap();
        let pinned = find_pinning_flaw(&release(), &[]).unwrap();
        let member =
            parse_cluster_report(ClusterReport { error: odd(), ..ClusterReport::default() }).unwrap();
        let failure = InstallationFailure { error: odd() };
        let installed = InstallationReport { generation: 1, result: Some(Installed::Failure(failure)) };
        let installed = parse_installation_report(installed).unwrap();
        for text in [
            stored.error.unwrap(),
            stored.findings[0].message.clone(),
            pinned.message,
            member.error.unwrap(),
            installed.error.unwrap(),
        ] {
            assert!(text.contains("disk 0") && !text.contains(is_hidden), "{text:?}");
        }
        assert!(
            rejection(|request| request.agent_version = "1.2\u{200b}.3".to_owned()).contains("agent_version")
        );
    }

    fn rejection(change: impl FnOnce(&mut HeartbeatRequest)) -> String {
        let mut request = request();
        change(&mut request);
        parse_heartbeat(request, [0; 32]).unwrap_err().to_string()
    }

    #[test]
    fn valid_heartbeat_is_parsed() {
        let mut request = request();
        request.installation_report = Some(InstallationReport {
            generation: 3,
            result: Some(Installed::Failure(InstallationFailure { error: "no\u{0}disk\n".to_owned() })),
        });
        request.hardware_report = Some(HardwareReport { product: "p".to_owned(), ..Default::default() });
        let read = parse_heartbeat(request, [9; 32]).unwrap();
        assert_eq!((read.beat.sequence, read.public_key), (5, [9; 32]));
        assert_eq!(read.installation.unwrap().error.as_deref(), Some("no disk\n"));
        assert_eq!(read.hardware.unwrap().incarnation, read.beat.incarnation);
    }

    #[test]
    fn malformed_field_is_named() {
        let no_uuid = |field: &str| format!("{field} is no UUID in hyphenated lower case");
        for odd in ["", "x", "0B1C9A52-7D3A-4A35-9F0A-0242AC120002", "0b1c9a527d3a4a359f0a0242ac120002"] {
            assert_eq!(rejection(|request| request.machine_id = odd.to_owned()), no_uuid("machine_id"));
            assert_eq!(rejection(|request| request.boot_id = odd.to_owned()), no_uuid("boot_id"));
            assert_eq!(rejection(|request| request.incarnation = odd.to_owned()), no_uuid("incarnation"));
        }
        assert_eq!(rejection(|request| request.seq = u64::MAX), "seq is no time since a boot");
        assert_eq!(rejection(|request| request.access_fence = -1), "access_fence is negative");
        for odd in ["x".repeat(101), "a\u{0}".to_owned()] {
            assert!(rejection(|request| request.agent_version = odd).starts_with("agent_version is longer"));
        }
        let warnings = vec!["w".repeat(REPORT_LIMIT)];
        let report = HardwareReport { warnings, ..HardwareReport::default() };
        assert_eq!(
            rejection(|request| request.hardware_report = Some(report)),
            "hardware_report is larger than 1 MiB"
        );
        let report = |generation, result| Some(InstallationReport { generation, result });
        assert_eq!(
            rejection(|request| request.installation_report = report(1, None)),
            "installation_report.result is neither success nor failure"
        );
        let success = Some(Installed::Success(InstallationSuccess {}));
        assert_eq!(
            rejection(|request| request.installation_report = report(0, success)),
            "installation_report.generation is not positive"
        );
    }

    #[test]
    fn machine_that_has_not_pinned_the_keys_is_found() {
        const FIRST: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
        const SECOND: &str = "RWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU";
        let keys = [FIRST, SECOND].map(|line| SigningKey::parse(line).unwrap());
        let flaw = |ids: &[&str], keys: &[SigningKey]| {
            let pinned_key_ids = ids.iter().map(|id| (*id).to_owned()).collect();
            let report = ReleaseReport { pinned_key_ids, ..Default::default() };
            find_pinning_flaw(&report, keys).map(|finding| (finding.kind, finding.message))
        };
        let kind = HostFindingKind::UnpinnedKeys;
        assert_eq!(flaw(&[], &[]), None, "nothing is signed");
        assert_eq!(flaw(&["0002020202020202", "0001010101010101"], &keys), None);
        let none = "it has pinned no signing keys, so it runs releases that nobody signed".to_owned();
        assert_eq!(flaw(&[], &keys), Some((kind, none)));
        for keys in [&keys[..], &[]] {
            let signing_error = "/var/lib/roleserver/signing.json is damaged\n".to_owned();
            let report = ReleaseReport { signing_error, ..Default::default() };
            let finding = find_pinning_flaw(&report, keys).unwrap();
            let damaged = "it accepts no release: /var/lib/roleserver/signing.json is damaged ";
            assert_eq!((finding.kind, finding.message.as_str()), (kind, damaged));
        }
        let (_, other) = flaw(&["0001010101010101\u{1b}"], &keys).unwrap();
        assert!(
            other.starts_with("it has pinned the signing keys 0001010101010101, and its shepherd has 000"),
            "{other}"
        );

        let request = HeartbeatRequest {
            release_report: Some(ReleaseReport { sha256: vec![7; 32], ..Default::default() }),
            ..request()
        };
        let heartbeat = parse_heartbeat(request, [7; 32]).unwrap();
        let finding = HostFinding { kind, message: "m".to_owned() };
        let with = add_findings(heartbeat.clone(), vec![finding.clone()]);
        assert_eq!(with.release.unwrap().findings, [finding]);
        assert!(add_findings(heartbeat, Vec::new()).release.unwrap().findings.is_empty());
    }

    #[test]
    fn machine_that_refused_a_release_is_found() {
        let found = |error: &str| {
            let report = ReleaseReport { error: error.to_owned(), ..Default::default() };
            find_refused_release(&report).map(|finding| (finding.kind, finding.message))
        };
        assert_eq!(found(""), None);
        assert_eq!(found("it did not answer in time"), None, "no signature is concerned");
        let message = "it refused the release that was ordered last: it is not\u{20}signed".to_owned();
        let expected = Some((HostFindingKind::ReleaseRefused, message));
        assert_eq!(found(&format!("{RELEASE_REFUSED}it is not\nsigned")), expected);
    }

    #[test]
    fn findings_of_a_release_report_are_bounded_and_printable() {
        let finding =
            |kind: &str, message: &str| WireFinding { kind: kind.to_owned(), message: message.to_owned() };
        let mut request = request();
        let mut findings =
            vec![finding("unit-edited", "a\nb"), finding("later", &"x".repeat(ERROR_LIMIT + 1))];
        findings.resize(MAX_FINDINGS + 5, finding("unit-setting", "c"));
        request.release_report = Some(ReleaseReport { sha256: vec![7; 32], findings, ..Default::default() });
        let read = parse_heartbeat(request, [7; 32]).unwrap().release.unwrap().findings;
        assert_eq!(read.len(), MAX_FINDINGS);
        assert_eq!((read[0].kind, read[0].message.as_str()), (HostFindingKind::UnitEdited, "a b"));
        assert_eq!((read[1].kind, read[1].message.len()), (HostFindingKind::Other, ERROR_LIMIT));
    }

    #[test]
    fn valid_cluster_report_is_parsed() {
        let report = ClusterReport {
            generation: 3,
            node_key: vec![7; 32],
            ca_certificate: vec![1, 2],
            address: "10.0.0.1".to_owned(),
            error: "no\nroute".to_owned(),
            epoch: 2,
            next_authority: vec![5],
            next_authority_step: 3,
            etcd_version: "3.6.1".to_owned(),
            etcdutl_version: "3.6.1; rm".to_owned(),
            secrets: Some(WireSecretsReport {
                ordered: vec!["key1-0a".to_owned(), "a b".to_owned(), "identity".to_owned()],
                rewrite: true,
                running: vec!["x".repeat(PROVIDER_NAME_LIMIT + 1)],
                rewritten: "key1-0a".to_owned(),
            }),
        };
        let mut request = request();
        request.cluster_report = Some(report.clone());
        let read = parse_heartbeat(request, [7; 32]).unwrap().cluster.unwrap();
        assert_eq!((read.generation, read.key, read.ca_certificate), (3, Some([7; 32]), Some(vec![1, 2])));
        let next = (read.next_authority.as_deref(), read.next_authority_step);
        assert_eq!(next, (Some(&[5][..]), Some(AuthorityStep::Reject)));
        assert_eq!((read.address.as_deref(), read.error.as_deref()), (Some("10.0.0.1"), Some("no route")));
        assert_eq!(read.programs, EtcdPrograms { etcd: Some("3.6.1".to_owned()), etcdutl: None });
        let secrets = SecretsReport {
            ordered: "key1-0a identity".to_owned(),
            rewrite: true,
            running: String::new(),
            rewritten: "key1-0a".to_owned(),
        };
        assert_eq!(read.secrets, Some(secrets));
        for (wrong, field) in [
            (ClusterReport { generation: -1, ..report.clone() }, "cluster_report.generation is negative"),
            (
                ClusterReport { node_key: vec![7; 31], ..report.clone() },
                "cluster_report.node_key does not have 32 bytes",
            ),
            (
                ClusterReport { address: "ams".to_owned(), ..report.clone() },
                "cluster_report.address is no IP",
            ),
            (ClusterReport { epoch: u64::MAX, ..report.clone() }, "cluster_report.epoch is larger"),
            (
                ClusterReport { ca_certificate: vec![0; 9000], ..report.clone() },
                "cluster_report.ca_certificate is larger",
            ),
            (
                ClusterReport { next_authority: vec![0; 9000], ..report },
                "cluster_report.next_authority is larger",
            ),
        ] {
            let text = rejection(|request| request.cluster_report = Some(wrong));
            assert!(text.starts_with(field), "{text}");
        }
    }
}
