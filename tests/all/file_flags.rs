//! Every flag of the three programs and every key of a provider that names a file, and what each file must be.
//!
//! * [`FILE_FLAGS`] has the flags, [`PROVIDER_KEYS`] the keys of the tables `[[provider]]` in the configuration file, and
//!   [`URL_FILES`] the parameters of a URL of the database. `classification` compares them with the programs.
//! * The tests here try the files of flags. `provider_keys` tries those of providers, and `database_url` those of a URL.
//!
//! Each private file is tried with modes in which other users can read or write it, and each trusted one with modes in
//! which they can change it. The program must refuse it in one sentence. `crates/trusted-file` has the decisions, with tests
//! of owners, directories and links.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use rcgen::{CertificateParams, KeyPair};
use shepherd::model::program_mark::ROLE_SERVER_MARK;
use trusted_file::private_group::read_private_group;

use crate::harness::aloud::TestResult;
use crate::harness::child::guarded;
use crate::harness::program::{Place, ProgramOutput};

mod classification;
mod database_url;
mod provider_keys;

/// What a program does with the file that a flag names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileUse {
    /// A key or password: refused if other users can read or write it.
    Private,
    /// Flags and providers: refused if other users can change it, or read a password in it.
    Configuration,
    /// A device list: its commands are refused if other users can change it.
    Commands,
    /// What machines run as root or trust: refused if other users can change it.
    Trusted,
    /// The state of a machine: refused if other users can write to the directory.
    State,
    /// The state of a machine, which is printed and decides nothing.
    Diagnostic,
    /// Programs or data with content that is checked or belongs to the caller.
    Content,
    /// Written by the program.
    Output,
    /// A path on a machine: a takeover checks it there.
    OnTheMachine,
    /// An address, never a file.
    Address,
    /// A name or a digest, never a file.
    NoFile,
}

/// Program and subcommand, flag, and the use of the file.
const FILE_FLAGS: &[(&str, &str, FileUse)] = &[
    ("roleserver enroll", "state_dir", FileUse::State),
    ("roleserver authority", "state_dir", FileUse::State),
    ("roleserver follow-authority", "state_dir", FileUse::State),
    ("roleserver metrics", "state_dir", FileUse::Diagnostic),
    ("roleserver plan", "state_dir", FileUse::Diagnostic),
    ("roleserver run", "state_dir", FileUse::State),
    ("roleserver status", "state_dir", FileUse::Diagnostic),
    ("roleserver supervise", "state_dir", FileUse::State),
    ("roleserver watch-update", "state_dir", FileUse::State),
    ("shepherd", "agent_endpoint_ca_certificate_path", FileUse::Trusted),
    ("shepherd", "agent_executable_path", FileUse::Trusted),
    ("shepherd", "agent_target_path", FileUse::OnTheMachine),
    ("shepherd", "agent_tls_certificate_path", FileUse::Trusted),
    ("shepherd", "agent_tls_key_path", FileUse::Private),
    // PostgreSQL itself checks the directory of its data.
    ("shepherd", "bmdb_dir", FileUse::Content),
    ("shepherd", "bmdb_direct_url", FileUse::Address),
    ("shepherd", "bmdb_url", FileUse::Address),
    ("shepherd", "config", FileUse::Configuration),
    ("shepherd", "key_rotation_path", FileUse::Trusted),
    ("shepherd", "secrets_key_path", FileUse::Private),
    ("shepherd", "signing_keys_path", FileUse::Trusted),
    ("shepherd", "simulated_url", FileUse::Address),
    ("shepherd", "ssh_key_path", FileUse::Private),
    ("shepherd", "ssh_password_path", FileUse::Private),
    ("shepherd", "static_device_list_url", FileUse::Commands),
    ("shepherd demo", "build_shepherdctl", FileUse::Content),
    ("shepherd demo", "state_dir", FileUse::Content),
    ("shepherd simulator", "roleserver_path", FileUse::Content),
    ("shepherd simulator", "state_path", FileUse::Output),
    ("shepherdctl", "bmdb_url", FileUse::Address),
    ("shepherdctl artefacts add", "file", FileUse::Content),
    ("shepherdctl artefacts add", "signature", FileUse::Content),
    ("shepherdctl cluster credentials issue", "output_dir", FileUse::Output),
    ("shepherdctl cluster declare", "file", FileUse::Content),
    ("shepherdctl cluster declare", "output_file", FileUse::Output),
    ("shepherdctl cluster declare", "signature", FileUse::Content),
    ("shepherdctl cluster kubeconfig", "output_file", FileUse::Output),
    ("shepherdctl debug bundle", "output_file", FileUse::Output),
    ("shepherdctl manual", "directory", FileUse::Output),
    ("shepherdctl plan", "diff", FileUse::Content),
    ("shepherdctl tokens bootstrap", "output_file", FileUse::Output),
    ("shepherdctl tokens create", "certificate", FileUse::Content),
    ("shepherdctl tokens create", "output_file", FileUse::Output),
];

/// Kind of the provider, key of its table in the configuration file, and the use of the file.
const PROVIDER_KEYS: &[(&str, &str, FileUse)] = &[
    ("simulated", "device_creation_rate", FileUse::NoFile),
    ("simulated", "max_machines", FileUse::NoFile),
    ("simulated", "name", FileUse::NoFile),
    ("simulated", "url", FileUse::Address),
    ("static", "device_creation_rate", FileUse::NoFile),
    ("static", "device_list_sha256", FileUse::NoFile),
    ("static", "device_list_url", FileUse::Commands),
    ("static", "max_machines", FileUse::NoFile),
    ("static", "name", FileUse::NoFile),
    ("static", "node_address", FileUse::NoFile),
    ("static", "ssh_password_path", FileUse::Private),
];

/// Parameters of a URL of the database that name files.
const URL_FILES: &[(&str, FileUse)] =
    &[("sslcert", FileUse::Trusted), ("sslkey", FileUse::Private), ("sslrootcert", FileUse::Trusted)];

/// Modes in which other users can read or write a file.
const MODES_OF_OTHERS: [u32; 6] = [0o640, 0o620, 0o604, 0o602, 0o644, 0o666];

/// A program that is accepted for machines, as small as that of simulated ones. The directories on the way to the programs
/// of this build may be writable for others.
pub(crate) fn write_agent(place: &Place) -> anyhow::Result<PathBuf> {
    place.write("agent", [fs::read("/bin/sh")?.as_slice(), &ROLE_SERVER_MARK].concat())
}

/// Flags of `shepherd` with which a check of everything succeeds, and needs no database.
pub(crate) fn complete(place: &Place) -> anyhow::Result<Vec<(String, String)>> {
    let list = place.write("devices.json", r#"[{"ID": "a", "Addr": "192.0.2.1"}]"#)?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["127.0.0.1".to_owned()])?.self_signed(&key)?.pem();
    let path = |name: &str, content: String| -> anyhow::Result<String> {
        Ok(place.write(name, content)?.display().to_string())
    };
    Ok([
        ("provider", "static".to_owned()),
        ("static_device_list_url", format!("file://{}", list.display())),
        ("agent_executable_path", write_agent(place)?.display().to_string()),
        ("agent_endpoint", "127.0.0.1:8443".to_owned()),
        ("agent_listen_address", "127.0.0.1:0".to_owned()),
        ("ssh_key_path", place.path("ssh_key").display().to_string()),
        ("secrets_key_path", place.path("secrets.key").display().to_string()),
        ("agent_tls_certificate_path", path("certificate.pem", certificate)?),
        ("agent_tls_key_path", path("key.pem", key.serialize_pem())?),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into())
}

/// Runs `shepherd --check` with one flag replaced.
fn check_with(
    place: &Place,
    flags: &[(String, String)],
    flag: &str,
    path: &Path,
) -> anyhow::Result<ProgramOutput> {
    let others =
        flags.iter().filter(|(name, _)| name != flag).map(|(name, value)| format!("--{name}={value}"));
    let own = ["--check".to_owned(), "--bmdb_eat_my_data".to_owned(), format!("--{flag}={}", path.display())];
    place.run(others.chain(own))
}

#[test]
fn private_file_that_others_can_read_or_write_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let private = FILE_FLAGS.iter().filter(|(_, _, file_use)| *file_use == FileUse::Private);
    for (program, flag, _) in private {
        assert_eq!(*program, "shepherd", "write a case for --{flag} of another program");
        let key = place.write(flag, "of no use\n")?;
        for mode in MODES_OF_OTHERS {
            fs::set_permissions(&key, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, flag, &key)?;
            let sentence = format!("by other users (mode {mode:04o}); run: chmod 600 {}\n", key.display());
            assert!(
                reported.code == Some(2) && reported.stderr.ends_with(&sentence),
                "--{flag} with mode {mode:o}: {reported:?}"
            );
        }
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let reported = check_with(&place, &flags, flag, &key)?;
        assert!(!reported.stderr.contains("other users"), "--{flag}: {reported:?}");
    }
    Ok(())
}

#[test]
fn password_for_machines_is_warned_about() -> TestResult {
    let place = Place::new()?;
    let mut flags = complete(&place)?;
    let warnings = |flags: &[(String, String)]| -> anyhow::Result<Vec<String>> {
        let reported = check_with(&place, flags, "ssh_user", Path::new("root"))?;
        anyhow::ensure!(reported.code == Some(0), "{reported:?}");
        let lines = reported.stderr.lines().filter(|line| line.contains(" WARN "));
        Ok(lines.map(str::to_owned).collect())
    };
    assert_eq!(warnings(&flags)?, Vec::<String>::new());
    let password = place.write("password", "secret\n")?;
    flags.push(("ssh_password_path".to_owned(), password.display().to_string()));
    let with_password = warnings(&flags)?;
    assert!(
        matches!(&with_password[..], [warning]
            if warning.contains("its machines log in by a password, so anybody who controls one of them can log in to all")
                && warning.contains("provider=static")),
        "{with_password:?}"
    );
    Ok(())
}

#[test]
fn trusted_file_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let directory = place.path("trusted");
    fs::create_dir(&directory)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
    let agent = fs::read(write_agent(&place)?)?;
    let trusted = FILE_FLAGS.iter().filter(|(_, _, file_use)| *file_use == FileUse::Trusted);
    for (program, flag, _) in trusted {
        assert_eq!(*program, "shepherd", "write a case for --{flag} of another program");
        // The content of others is not looked at before.
        let content =
            if *flag == "agent_executable_path" { agent.as_slice() } else { b"of no use\n".as_slice() };
        let file = place.write(&format!("trusted/{flag}"), content)?;
        // A file that only the private group of this user may write is accepted: root has none.
        let metadata = fs::metadata(&file)?;
        let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
        for (part, safe, modes) in [
            (&file, 0o644, [(0o600, true), (0o644, true), (0o664, is_private), (0o646, false)]),
            (&directory, 0o755, [(0o700, true), (0o755, true), (0o775, is_private), (0o757, false)]),
        ] {
            for (mode, is_safe) in modes {
                fs::set_permissions(part, fs::Permissions::from_mode(mode))?;
                let reported = check_with(&place, &flags, flag, &file)?;
                let sentence = format!(
                    "shepherd: --{flag} {} cannot be trusted: {1} can be changed by other users (mode {mode:04o}); \
                     run: chmod go-w {1}\n",
                    file.display(),
                    part.display()
                );
                let is_refused = reported.code == Some(2) && reported.stderr.ends_with(&sentence);
                assert!(
                    if is_safe { !reported.stderr.contains("other users") } else { is_refused },
                    "--{flag}, {} with mode {mode:o}: {reported:?}",
                    part.display()
                );
            }
            fs::set_permissions(part, fs::Permissions::from_mode(safe))?;
        }
    }
    Ok(())
}

#[test]
fn configuration_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let config = place.write("shepherd.toml", "ssh_user = \"kim\"\n")?;
    // A file that only the private group of this user may write is accepted: root has none.
    let metadata = fs::metadata(&config)?;
    let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
    let by_group = (!is_private).then_some("0664");
    for (mode, expected) in [(0o600, None), (0o644, None), (0o664, by_group), (0o646, Some("0646"))] {
        fs::set_permissions(&config, fs::Permissions::from_mode(mode))?;
        let reported = check_with(&place, &flags, "config", &config)?;
        let path = config.display();
        let sentence = expected.map(|mode| {
            format!(
                "shepherd: the configuration file {path}: {path} can be changed by other users (mode {mode}); run: \
                 chmod go-w {path}\n"
            )
        });
        assert!(
            reported.stderr == sentence.clone().unwrap_or_default()
                && reported.code == Some(if sentence.is_some() { 2 } else { 0 }),
            "mode {mode:o}: {reported:?}"
        );
    }
    Ok(())
}

#[test]
fn commands_that_others_can_change_are_refused() -> TestResult {
    let place = Place::new()?;
    let mut flags = complete(&place)?;
    let list =
        place.write("list.json", r#"[{"ID": "a", "Addr": "192.0.2.1", "PowerCommand": ["/bin/true"]}]"#)?;
    flags.retain(|(name, _)| name != "static_device_list_url");
    flags.push(("static_device_list_url".to_owned(), format!("file://{}", list.display())));
    for (mode, is_safe) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
        fs::set_permissions(&list, fs::Permissions::from_mode(mode))?;
        let reported = check_with(&place, &flags, "ssh_user", Path::new("root"))?;
        let path = list.display();
        let sentence = format!(
            "shepherd: provider static: the device list {path}: line 1, field \"PowerCommand\": commands and host keys \
             are accepted only from a file that nobody else can change, and {path} can be changed by other users \
             (mode {mode:04o}); run: chmod go-w {path}\n"
        );
        assert!(
            (reported.code, reported.stderr.as_str())
                == if is_safe { (Some(0), "") } else { (Some(2), sentence.as_str()) },
            "mode {mode:o}: {reported:?}"
        );
    }
    Ok(())
}

/// A request of an enrolment with nothing but a field that no release knows: number 1,000, with the value 1.
const UNKNOWN_FIELD: [u8; 3] = [0xc0, 0x3e, 0x01];

#[test]
fn state_directory_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let state = place.path("state");
    fs::create_dir(&state)?;
    let path = state.display();
    let request = place.write("request", UNKNOWN_FIELD)?;
    let of_state: Vec<_> = FILE_FLAGS.iter().filter(|(_, _, file_use)| *file_use == FileUse::State).collect();
    assert!(of_state.len() > 5, "{of_state:?}");
    for (program, flag, _) in of_state {
        let subcommand = program.strip_prefix("roleserver ");
        let subcommand = subcommand.with_context(|| format!("write a case for --{flag} of {program}"))?;
        for mode in [0o775, 0o757, 0o777] {
            fs::set_permissions(&state, fs::Permissions::from_mode(mode))?;
            let program = env!("CARGO_BIN_EXE_roleserver");
            let mut arguments = vec![subcommand.to_owned(), format!("--{flag}={path}")];
            if subcommand == "follow-authority" {
                arguments.push("00".to_owned());
            }
            let (code, text) = if subcommand == "enroll" {
                // It reads a request, and its response is no text, and has the sentence.
                let input = fs::File::open(&request)?;
                let output = Command::new(program).args(arguments).stdin(input).output()?;
                (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
            } else {
                let mut command = guarded(program);
                command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
                let reported = Place::finish(command.spawn().context("roleserver")?)?;
                (reported.code, reported.stderr)
            };
            let sentence =
                format!("{path} can be changed by other users (mode {mode:04o}); run: chmod go-w {path}");
            assert!(
                code != Some(0) && text.contains(&sentence),
                "roleserver {subcommand}, mode {mode:o}: {code:?} {text}"
            );
        }
    }
    Ok(())
}
