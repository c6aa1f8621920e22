//! The files that the tables `[[provider]]` in the configuration file name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::bail;

use crate::file_flags::{FileUse, MODES_OF_OTHERS, PROVIDER_KEYS, check_with, complete};
use crate::harness::aloud::TestResult;
use crate::harness::program::Place;

/// The name of the provider in the configuration files here.
const PROVIDER: &str = "rack-a";

/// A configuration file with a provider of this kind: with the keys that it must have, and with this one.
fn write_provider(place: &Place, kind: &str, key: &str, value: &str) -> anyhow::Result<PathBuf> {
    let list = place.write("rack-a.json", r#"[{"ID": "b", "Addr": "192.0.2.2"}]"#)?;
    let mut keys = BTreeMap::from([("name", PROVIDER.to_owned()), ("kind", kind.to_owned())]);
    match kind {
        "static" => keys.insert("device_list_url", format!("file://{}", list.display())),
        "simulated" => keys.insert("url", "http://127.0.0.1:9".to_owned()),
        _ => bail!("write the keys of a provider of the kind {kind}"),
    };
    keys.insert(key, value.to_owned());
    let lines: Vec<String> = keys.iter().map(|(key, value)| format!("{key} = {value:?}\n")).collect();
    place.write("shepherd.toml", format!("[[provider]]\n{}", lines.concat()))
}

/// The flag has nothing to do with it, so a person who looks for it in the error would look in the wrong place.
#[test]
fn private_file_of_a_provider_is_refused_by_its_key_in_the_configuration() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let private = PROVIDER_KEYS.iter().filter(|(.., file_use)| *file_use == FileUse::Private);
    let mut count = 0;
    for (kind, key, _) in private {
        let file = place.write(key, "secret\n")?;
        let config = write_provider(&place, kind, key, &file.display().to_string())?;
        let path = file.display();
        for mode in MODES_OF_OTHERS {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, "config", &config)?;
            let begin =
                format!("shepherd: the configuration file: [[provider]] {PROVIDER}: {key} {path} can be ");
            let end = format!(" by other users (mode {mode:04o}); run: chmod 600 {path}\n");
            let text = &reported.stderr;
            assert!(
                reported.code == Some(2)
                    && text.starts_with(&begin)
                    && text.ends_with(&end)
                    && text.lines().count() == 1,
                "{key} of a {kind} provider with mode {mode:o}: {reported:?}"
            );
        }
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        let reported = check_with(&place, &flags, "config", &config)?;
        assert!(
            reported.code == Some(0) && !reported.stderr.contains("other users"),
            "{key} of a {kind} provider: {reported:?}"
        );
        count += 1;
    }
    assert!(count > 0, "no key of a provider names a private file");
    Ok(())
}

#[test]
fn commands_of_a_provider_of_the_configuration_that_others_can_change_are_refused() -> TestResult {
    let place = Place::new()?;
    let flags = complete(&place)?;
    let commands = PROVIDER_KEYS.iter().filter(|(.., file_use)| *file_use == FileUse::Commands);
    let mut count = 0;
    for (kind, key, _) in commands {
        let list =
            place.write(key, r#"[{"ID": "b", "Addr": "192.0.2.2", "PowerCommand": ["/bin/true"]}]"#)?;
        let config = write_provider(&place, kind, key, &format!("file://{}", list.display()))?;
        for (mode, is_safe) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&list, fs::Permissions::from_mode(mode))?;
            let reported = check_with(&place, &flags, "config", &config)?;
            let begin = format!("shepherd: provider {PROVIDER}: the device list {}: ", list.display());
            let end = format!("(mode {mode:04o}); run: chmod go-w {}\n", list.display());
            let is_refused = reported.stderr.starts_with(&begin) && reported.stderr.ends_with(&end);
            assert_eq!(
                (reported.code, is_refused),
                (Some(if is_safe { 0 } else { 2 }), !is_safe),
                "{key} of a {kind} provider with mode {mode:o}: {reported:?}"
            );
        }
        count += 1;
    }
    assert!(count > 0, "no key of a provider names a file with commands");
    Ok(())
}
