//! The files that a URL of the database names, or the variables that stand in for its parameters.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::Context as _;
use rcgen::{CertificateParams, KeyPair};
use shepherd::bmdb::connection::tls_files::file_parameters;
use trusted_file::private_group::read_private_group;

use crate::file_flags::{FileUse, MODES_OF_OTHERS, URL_FILES};
use crate::harness::aloud::TestResult;
use crate::harness::program::{Place, ProgramOutput};

/// Checks the service with a URL of the database that names this file, or with the variable that stands in for it.
fn check_with_url(
    place: &Place,
    parameter: &str,
    file: &Path,
    in_url: bool,
) -> anyhow::Result<ProgramOutput> {
    let variables: BTreeMap<_, _> = file_parameters().collect();
    let variable = variables.get(parameter).context("no variable")?;
    let list = place.write("devices.json", "[]")?;
    // Nothing listens there.
    let url = "--bmdb_url=postgres://kim@127.0.0.1:1/bmdb?sslmode=verify-full".to_owned();
    let url = if in_url { format!("{url}&{parameter}={}", file.display()) } else { url };
    let list = format!("--static_device_list_url=file://{}", list.display());
    let arguments = ["--check", "--components=updater", "--provider=static", &list, &url];
    let mut command = place.program(arguments);
    if !in_url {
        command.env(variable, file);
    }
    Place::finish(command.spawn()?)
}

/// Requires that a file of the URL was refused in a sentence with these words.
fn require_refusal(reported: &ProgramOutput, parameter: &str, file: &Path, words: &str, mode: u32) {
    let shown = file.display();
    let begin = format!("shepherd: the file {shown} of {parameter} in the BMDB URL cannot be used: ");
    let last = reported.stderr.lines().last().unwrap_or_default();
    assert!(
        reported.code == Some(2) && last.starts_with(&begin) && last.contains(words),
        "{parameter} with mode {mode:o}: {reported:?}"
    );
}

/// Requires that the files of the URL were accepted, and that the connection failed.
fn require_connection(reported: &ProgramOutput, parameter: &str, mode: u32) {
    assert!(
        reported.code == Some(1) && reported.stderr.contains("cannot reach the BMDB"),
        "{parameter} with mode {mode:o}: {reported:?}"
    );
}

/// libpq refuses such a key. The library that is used here would read it.
#[test]
fn private_file_of_the_database_url_that_others_can_read_or_write_is_refused() -> TestResult {
    let place = Place::new()?;
    let key = place.write("database.key", KeyPair::generate()?.serialize_pem())?;
    let private = URL_FILES.iter().filter(|(_, file_use)| *file_use == FileUse::Private);
    for (parameter, _) in private {
        for in_url in [true, false] {
            for mode in MODES_OF_OTHERS {
                fs::set_permissions(&key, fs::Permissions::from_mode(mode))?;
                let reported = check_with_url(&place, parameter, &key, in_url)?;
                let words = format!("by other users (mode {mode:04o}); run: chmod 600 {}", key.display());
                require_refusal(&reported, parameter, &key, &words, mode);
            }
            fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
            require_connection(&check_with_url(&place, parameter, &key, in_url)?, parameter, 0o600);
        }
    }
    Ok(())
}

/// A user who can change the CA file can answer in place of the database.
#[test]
fn trusted_file_of_the_database_url_that_others_can_change_is_refused() -> TestResult {
    let place = Place::new()?;
    let directory = place.path("trusted");
    fs::create_dir(&directory)?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
    let certificate = CertificateParams::new(["localhost".to_owned()])?.self_signed(&KeyPair::generate()?)?;
    let file = place.write("trusted/database.pem", certificate.pem())?;
    // A file that only the private group of this user may write is accepted: root has none.
    let metadata = fs::metadata(&file)?;
    let is_private = read_private_group(metadata.uid()) == Some(metadata.gid());
    let trusted = URL_FILES.iter().filter(|(_, file_use)| *file_use == FileUse::Trusted);
    for (parameter, _) in trusted {
        for (part, safe, modes) in [
            (&file, 0o644, [(0o600, true), (0o644, true), (0o664, is_private), (0o646, false)]),
            (&directory, 0o755, [(0o700, true), (0o755, true), (0o775, is_private), (0o757, false)]),
        ] {
            for (mode, is_safe) in modes {
                fs::set_permissions(part, fs::Permissions::from_mode(mode))?;
                for in_url in [true, false] {
                    let reported = check_with_url(&place, parameter, &file, in_url)?;
                    if is_safe {
                        require_connection(&reported, parameter, mode);
                    } else {
                        let part = part.display();
                        let words = format!(
                            "{part} can be changed by other users (mode {mode:04o}); run: chmod go-w {part}"
                        );
                        require_refusal(&reported, parameter, &file, &words, mode);
                    }
                }
            }
            fs::set_permissions(part, fs::Permissions::from_mode(safe))?;
        }
    }
    Ok(())
}
