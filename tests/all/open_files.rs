//! The limit of open files: what units set, what programs start with, and a process that may open too few.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::service::flags;
use shepherd::service::stop_deadline::longest_stop;

use crate::harness::aloud::TestResult;
use crate::harness::source;

const UNIT: &str = "contrib/shepherd.service";
const FILES: &str = "LimitNOFILE=1024:1048576";

/// Files with commands that do not call `usual_file_limit`, and why.
const OTHER_COMMANDS: &[(&str, &str)] =
    &[("crates/cli/src/", "shepherdctl never raises its limit"), ("crates/testkit/src/", "tests")];

/// The value of a setting of the unit.
fn setting<'a>(unit: &'a str, name: &str) -> Result<&'a str> {
    unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).context(format!("no {name}"))
}

#[test]
fn unit_of_the_service_has_flags_that_the_program_accepts_and_waits_for_its_shutdown() -> TestResult {
    let unit = source::read(Path::new(UNIT))?;
    assert!(unit.lines().any(|line| line == FILES), "{unit}");
    let command = setting(&unit, "ExecStart")?;
    // The file that it names is read elsewhere.
    let words: Vec<OsString> = command.split_whitespace().map(OsString::from).collect();
    let parsed = flags::parse_flags(words).map_err(|error| anyhow::anyhow!("{command}: {error}"))?;
    let patience = Duration::from_secs(setting(&unit, "TimeoutStopSec")?.parse()?);
    let longest = longest_stop(parsed.service.shutdown_grace.0);
    assert!(patience > longest, "systemd kills it after {patience:?}, and a stop takes up to {longest:?}");
    assert!(source::read(Path::new("docs/deploying.md"))?.contains(UNIT));
    Ok(())
}

#[test]
fn unit_of_the_role_server_has_the_same_limit() -> TestResult {
    let text = source::read(Path::new("crates/roleserver/src/init_system/unit.rs"))?;
    assert!(text.contains(FILES));
    Ok(())
}

/// Commands that a source file starts, and those among them without the usual limit of open files. The limit is given
/// before the next command is made.
fn commands(text: &str) -> (usize, usize) {
    let code = source::take_apart(text).code;
    let code = code.split("#[cfg(test)]").next().unwrap_or_default();
    // Under another name, the commands of the file would not be found.
    let renamed = code.matches("Command as ").count();
    let started: Vec<&str> = code.split("Command::new(").skip(1).collect();
    let without = started.iter().filter(|rest| !rest.contains(".usual_file_limit()")).count();
    (started.len(), without + renamed)
}

#[test]
fn every_program_that_is_started_gets_the_usual_limit_of_files() -> TestResult {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for path in source::rust_files()? {
        let name = path.to_string_lossy().into_owned();
        let is_program = name.starts_with("src/") || (name.starts_with("crates/") && name.contains("/src/"));
        if !is_program
            || name.ends_with("/tests.rs")
            || OTHER_COMMANDS.iter().any(|(prefix, _)| name.starts_with(prefix))
        {
            continue;
        }
        let (started, without) = commands(&source::read(&path)?);
        seen += started;
        if without > 0 {
            wrong.push(format!(
                "{name} starts {started} programs, and {without} of them without usual_file_limit()"
            ));
        }
    }
    assert!(seen > 8, "only {seen} commands were found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    for (text, expected) in [
        ("Command::new(a).usual_file_limit(); Command::new(b);", (2, 1)),
        ("let c = Command::new(a); c.usual_file_limit().usual_file_limit(); Command::new(b);", (2, 1)),
        ("Command::new(a); Command::new(b).usual_file_limit();", (2, 1)),
        ("use std::process::Command as Process;", (0, 1)),
        ("Command::new(a).usual_file_limit();\n#[cfg(test)]\nmod tests { Command::new(b) }", (1, 0)),
    ] {
        assert_eq!(commands(text), expected, "{text}");
    }
    Ok(())
}

#[test]
fn service_that_may_open_too_few_files_ends_with_one_sentence() -> TestResult {
    let output = Command::new("/bin/sh")
        .args(["-c", "ulimit -n 256 && exec \"$0\" --bmdb_url postgres://127.0.0.1:1/none"])
        .arg(env!("CARGO_BIN_EXE_shepherd"))
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(
        text.trim_end(),
        "shepherd: this process may open 256 files and needs at least 512: raise its hard limit, with \
         LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`"
    );
    Ok(())
}

#[test]
fn role_server_that_may_open_too_few_files_warns_and_runs() -> TestResult {
    let directory = tempfile::tempdir()?;
    let output = Command::new("/bin/sh")
        .args(["-c", "ulimit -n 256 && exec \"$0\" run --state_dir \"$1\""])
        .arg(env!("CARGO_BIN_EXE_roleserver"))
        .arg(directory.path())
        .env_remove("ROLESERVER_LOG")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains(" WARN ")).collect();
    assert!(
        matches!(warnings[..], [warning] if warning.ends_with(
            "this process may open 256 files and needs at least 512: raise its hard limit, with \
             LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`; until then it serves few connections"
        )),
        "{text}"
    );
    // It has continued to the next obstacle.
    assert!(output.status.code() == Some(1) && text.contains("this machine is not enrolled"), "{text}");
    Ok(())
}
