//! Every decoder of external input, as a function of bytes that returns an error in words.

use std::fmt::Display;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Result;
use prost::Message as _;
use shepherd::cli::output::json_path::JsonPathTemplate;
use shepherd::model::kubernetes::archive::{self, TarHeader};
use shepherd::model::kubernetes::bundle_manifest::{BundleManifest, MAX_BUNDLE_BYTES};
use shepherd::model::label::Labels;
use shepherd::model::log_request::MAX_PART_BYTES;
use shepherd::model::selector::error::SelectorError;
use shepherd::model::selector::key::SelectorKey;
use shepherd::model::selector::traits::{Hardware, MachineTraits, NO_FACTS};
use shepherd::model::selector::{Selector, correct_label_keys};
use shepherd::model::signed_artefact::signature::ArtefactSignature;
use shepherd::model::signed_artefact::signing_key::{SigningKey, parse_signing_keys};
use shepherd::proto::agent::v1 as wire;
use shepherd::proto::codec;
use shepherd::proto::hardware::v1::{BlockDevice, HardwareReport};
use shepherd::providers::static_provider::device_list::{self, ListTrust};
use shepherd::providers::static_provider::power_command;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::commands::{enroll, status};
use shepherd::roleserver::endpoint::Endpoint;
use shepherd::roleserver::enrolment;
use shepherd::roleserver::hardware::{self, Sources, Warnings, ata, dmi, network, nvme, scsi};
use shepherd::roleserver::state_directory::StateDirectory;
use shepherd::server::callback::hardware_summary::summarise_report;
use shepherd::server::callback::heartbeat_validation::{REPORT_LIMIT, parse_heartbeat};
use shepherd::server::callback::log_validation::parse_log_part;
use shepherd::server::tls::{certificate_files, client_verifier};
use shepherd::service::configuration;
use shepherd::takeover::exec::{CommandExit, CommandOutput};
use shepherd::takeover::steps;

use super::provider_answer;

/// Decodes external bytes; the error is the text that a person would read.
pub(super) type Decode = fn(&[u8]) -> Result<(), String>;

pub(super) const DECODERS: &[(&str, Decode)] = &[
    // Input of the shepherd.
    ("certificate", |bytes| stringify_error(client_verifier::verified_agent_key(&bytes.to_vec().into()))),
    ("enrol-answer", |bytes| stringify_error(steps::parse_enroll(&answer(bytes)))),
    ("hardware-report", |bytes| stringify_error(shepherd::model::hardware_report::describe_report(bytes))),
    ("heartbeat", heartbeat),
    ("log-part", log_part),
    ("power-command-answer", |bytes| {
        stringify_error(power_command::parse_power_state(
            &String::from_utf8_lossy(bytes),
            "/usr/local/bin/pdu",
        ))
    }),
    ("provider-answer", provider_answer::decode),
    ("ssh-probe", |bytes| stringify_error(steps::parse_probe(&answer(bytes)))),
    ("ssh-upload", |bytes| stringify_error(steps::parse_upload(&answer(bytes), "00"))),
    // What operators type.
    ("jsonpath-template", |bytes| stringify_error(JsonPathTemplate::parse(&String::from_utf8_lossy(bytes)))),
    ("selector", selector),
    // Files that operators of the shepherd write.
    ("certificate-files", certificate_files),
    ("configuration", |bytes| {
        in_file(bytes, |path| {
            stringify_error(configuration::read_configuration(path, &[]).map_err(|e| e.to_string()))
        })
    }),
    ("device-list", |bytes| {
        let text = String::from_utf8_lossy(bytes);
        stringify_error(device_list::parse_device_list(&text, &ListTrust::Trusted))
    }),
    // Input of the role server, and what it reads on its machine.
    ("disk-and-port-answers", disk_and_port_answers),
    ("dmi-table", dmi_table),
    ("endpoint", endpoint),
    ("enrol-request", enrol_request),
    ("heartbeat-answer", heartbeat_answer),
    ("kubernetes-bundle", kubernetes_bundle),
    ("machine-files", machine_files),
    ("signature", signature),
    ("signing-keys", |bytes| stringify_error(parse_signing_keys(&String::from_utf8_lossy(bytes)))),
    ("state-files", state_files),
];

fn stringify_error<T>(result: Result<T, impl Display>) -> Result<(), String> {
    result.map(drop).map_err(|error| error.to_string())
}

fn in_file(bytes: &[u8], read: impl FnOnce(&Path) -> Result<(), String>) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    read(file.path())
}

/// A signature, and its verification with a key of the id that it names.
fn signature(bytes: &[u8]) -> Result<(), String> {
    const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    let signature =
        ArtefactSignature::parse(&String::from_utf8_lossy(bytes)).map_err(|error| error.to_string())?;
    stringify_error(signature.verify(&SigningKey::parse(KEY)?, b"the program\n"))
}

/// A selector, evaluated for a machine of which nothing is known. What is wrong in it is in the error.
fn selector(bytes: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let corrected = correct_label_keys(&text);
    assert!(corrected.is_none_or(|corrected| corrected.parse::<Selector>().is_ok()));
    let selector: Selector = text.parse().map_err(|error: SelectorError| error.to_string())?;
    assert_eq!(selector.to_string().parse::<Selector>().as_ref(), Ok(&selector));
    let (hardware, labels) = (Hardware::default(), Labels::new());
    let unknown = MachineTraits {
        provider: None,
        provider_id: None,
        location: None,
        hardware: &hardware,
        labels: &labels,
        phase: None,
        cluster: None,
        facts: &NO_FACTS,
        known_facts: &NO_FACTS,
    };
    let keys = [SelectorKey::Label, SelectorKey::Cluster];
    let is_about_known = selector.keys().all(|key| keys.contains(&key));
    assert!(is_about_known || !selector.matches(&unknown), "an unknown value meets a term of {selector}");
    Ok(())
}

/// The output of a command on a machine, on both streams.
fn answer(bytes: &[u8]) -> CommandOutput {
    let (stdout, stderr) = (bytes.to_vec(), bytes.to_vec());
    let exit = if bytes.len().is_multiple_of(5) {
        CommandExit::Signal("KILL".to_owned())
    } else {
        CommandExit::Status(0)
    };
    CommandOutput { exit, stdout, stderr, dropped_bytes: 0 }
}

fn heartbeat(bytes: &[u8]) -> Result<(), String> {
    let request = codec::decode::<wire::HeartbeatRequest>(bytes.to_vec().into())?;
    let heartbeat = parse_heartbeat(request, [7; 32]).map_err(|error| error.to_string())?;
    // A stored text can be shown.
    let shown =
        heartbeat.hardware.map(|report| shepherd::model::hardware_report::describe_report(&report.report));
    assert!(shown.is_none_or(|shown| shown.is_ok()));
    Ok(())
}

fn log_part(bytes: &[u8]) -> Result<(), String> {
    let request = codec::decode::<wire::UploadLogRequest>(bytes.to_vec().into())?;
    let part = parse_log_part(request)?;
    let text = part.part.lines;
    assert!(text.len() <= MAX_PART_BYTES + 1 && (text.is_empty() || text.ends_with('\n')));
    assert!(!text.chars().any(|c| c.is_control() && c != '\n' && c != '\t'), "it could drive a terminal");
    Ok(())
}

fn certificate_files(bytes: &[u8]) -> Result<(), String> {
    in_file(bytes, |path| {
        let files = certificate_files::CertificateFiles {
            certificate: path.to_owned(),
            key: path.to_owned(),
            ca_certificate: Some(path.to_owned()),
        };
        let names = ["shepherd.example".to_owned()];
        stringify_error(certificate_files::check_files(&files, &names, std::time::SystemTime::now()))
    })
}

fn enrol_request(bytes: &[u8]) -> Result<(), String> {
    let request = enroll::decode_request(bytes).map_err(|error| error.to_string())?;
    let kept = enrolment::accept_enrolment(None, &request).map_err(|error| error.to_string())?;
    assert_eq!(
        enrolment::accept_enrolment(Some(&kept), &request).as_ref(),
        Ok(&kept),
        "a repetition changes nothing"
    );
    let text = serde_json::to_vec(&kept).unwrap();
    assert_eq!(serde_json::from_slice::<enrolment::Enrolment>(&text).unwrap(), kept);
    Ok(())
}

fn heartbeat_answer(bytes: &[u8]) -> Result<(), String> {
    let answer = codec::decode::<wire::HeartbeatResponse>(bytes.to_vec().into())?;
    let settings = AgentSettings::new(&["shepherd.example:8443".to_owned()], &[], 0)?;
    let changed = settings.with_response(&answer)?;
    assert!(!changed.endpoints.is_empty());
    assert_eq!(changed.with_response(&answer)?, changed, "the same advice again is no news");
    Ok(())
}

/// A manifest, or a bundle from its beginning.
fn kubernetes_bundle(bytes: &[u8]) -> Result<(), String> {
    if let Some(block) = bytes.first_chunk()
        && let Ok(Some(header)) = TarHeader::parse(block)
    {
        assert!(header.padding() < block.len());
    }
    let manifest = if bytes.starts_with(&[0x1f, 0x8b]) {
        archive::read_bundle_manifest(bytes)?
    } else {
        BundleManifest::parse(bytes).map_err(|problems| problems.to_string())?
    };
    assert!(manifest.total_bytes() <= MAX_BUNDLE_BYTES);
    for file in manifest.files() {
        let plain = |word: &str| !word.is_empty() && !word.starts_with('.');
        assert!(file.path.split('/').all(plain), "{:?} leads elsewhere", file.path);
    }
    Ok(())
}

fn endpoint(bytes: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    let endpoint: Endpoint = text.parse().map_err(|error| format!("{error}"))?;
    assert_eq!(endpoint.to_string().parse::<Endpoint>().as_ref(), Ok(&endpoint));
    Ok(())
}

fn dmi_table(bytes: &[u8]) -> Result<(), String> {
    dmi::parse_table(bytes, &mut Warnings::default());
    Ok(())
}

fn disk_and_port_answers(bytes: &[u8]) -> Result<(), String> {
    let mut device = BlockDevice::default();
    ata::fill_identity(bytes, &mut device);
    let _ = (ata::statistic(bytes, 7, 8), ata::threshold_exceeded(bytes));
    nvme::fill_identity(bytes, &mut device);
    nvme::fill_health(bytes, &mut device);
    scsi::fill_serial(bytes, &mut device);
    scsi::fill_wwn(bytes, &mut device);
    let _ = (scsi::uncorrected_errors(bytes), scsi::log_parameter(bytes, 1));
    assert!(network::parse_permanent_address(bytes).is_none_or(|address| address.len() <= bytes.len()));
    assert!(network::parse_supported_speeds(bytes).is_sorted());
    Ok(())
}

/// A machine with the same content in all files.
fn machine_files(bytes: &[u8]) -> Result<(), String> {
    let root = tempfile::tempdir().unwrap();
    let put = |path: &str, content: &[u8]| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    };
    for path in [
        "proc/cpuinfo",
        "proc/meminfo",
        "proc/sys/kernel/hostname",
        "proc/sys/kernel/osrelease",
        "sys/block/nvme0n1/device/model",
        "sys/block/nvme0n1/size",
        "sys/block/nvme0n1/wwid",
        "sys/block/sda/device/model",
        "sys/block/sda/device/vendor",
        "sys/block/sda/device/vpd_pg80",
        "sys/block/sda/device/vpd_pg83",
        "sys/block/sda/queue/logical_block_size",
        "sys/class/dmi/id/product_serial",
        "sys/class/dmi/id/sys_vendor",
        "sys/class/net/eno1/address",
        "sys/class/net/eno1/carrier",
        "sys/class/net/eno1/speed",
        "sys/devices/system/cpu/cpu0/topology/core_cpus_list",
        "sys/devices/system/cpu/cpu0/topology/physical_package_id",
        "sys/devices/system/memory/block_size_bytes",
        "sys/devices/system/memory/memory0/state",
        "sys/firmware/dmi/tables/DMI",
    ] {
        put(path, bytes);
    }
    put("sys/class/net/eno1/type", b"1\n");
    put("sys/class/net/eno1/device/driver", b"");
    std::os::unix::fs::symlink("../../../bus/scsi", root.path().join("sys/block/sda/device/subsystem"))
        .unwrap();
    let report = hardware::read_hardware(&Sources::in_directory(root.path()));
    assert!(report.encoded_len() <= REPORT_LIMIT, "no shepherd would take it");
    assert_eq!((report.block_devices.len(), report.network_interfaces.len()), (2, 1));
    let stored = summarise_report(&report, "incarnation");
    assert_eq!(HardwareReport::decode(stored.report.as_slice()).as_ref(), Ok(&report));
    Ok(())
}

/// A state directory with the same content in all files.
fn state_files(bytes: &[u8]) -> Result<(), String> {
    let directory = tempfile::tempdir().unwrap();
    let names = [
        "agent.json",
        "enrolment.json",
        "identity.pk8",
        "last_heartbeat.json",
        "learned.json",
        "supervisor.json",
    ];
    for name in names {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        // A key that others can read is refused before it is parsed.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let (text, _) = status::render_text(directory.path()).map_err(|error| error.to_string())?;
    assert!(text.lines().count() >= 3, "{text}");
    let state = StateDirectory::from_path(directory.path().to_owned());
    let agent = state.read_agent_process().map(|process| process.is_some_and(|process| process.is_alive()));
    let learned = state.read_learned_settings(1).map(|learned| {
        assert!(learned.is_none_or(|learned| !learned.settings.endpoints.is_empty()));
        false
    });
    let enrolled = state.read_enrolment().map(|kept| {
        assert!(kept.is_none_or(|kept| !kept.settings.endpoints.is_empty()));
        false
    });
    let others = [state.read_last_heartbeat().map(|_| false), state.read_identity().map(|_| false)];
    let outcomes = [agent, learned, enrolled].into_iter().chain(others);
    // No input is valid for all of them at once.
    let mut errors: Vec<_> = outcomes.filter_map(Result::err).map(|error| error.to_string()).collect();
    if errors.len() < 5 { Ok(()) } else { Err(errors.swap_remove(bytes.len() % 5)) }
}
