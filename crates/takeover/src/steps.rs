//! Probe, upload and enrol: the parsing of their output.
//!
//! `scripts.rs` has the scripts.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;

use crate::exec::{CommandExit, CommandOutput};
use crate::program_path::PlaceFacts;
use model::remote_step::{ENROLL_BEGIN, PROBE_BEGIN, UNSAFE_PATH, UPLOAD_BEGIN, probe_key, upload_status};
use model::sanitize::sanitize_text;
use proto::agent::v1::EnrollResponse;

/// Most places of an answer that are used, that of the agent's path included. The probe reports fewer. Each place may cost a
/// probe of its own, so the machine must not decide how many there are.
const MAX_PLACES: usize = 8;

/// What helps if something else than the shell answered.
const OTHER_PROGRAM: &str = "If a forced command or another login shell answers for this user, let it run commands, or \
                             give another user in the device list (User)";

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeReport {
    /// Operating system, from `uname -s`.
    pub os: String,
    /// Architecture, from `uname -m`.
    pub architecture: String,
    /// Name of the remote user.
    pub user: String,
    /// Home directory of the remote user.
    pub home: String,
    /// Whether the machine has a program for SHA-256 digests.
    pub has_digest_program: bool,
    /// SHA-256 of the executable at the agent's path in lower-case hexadecimal; `None` without one.
    pub digest: Option<String>,
    /// Number of the remote user; `None` if it was not reported.
    pub uid: Option<u32>,
    /// Whether `SELinux` enforces a policy.
    pub selinux_enforces: bool,
    /// Why other users of the machine can change the agent's path; `None` if they cannot. There is no digest then.
    pub unsafe_reason: Option<String>,
    /// The directory of the agent's path; `None` if it was not reported.
    pub target: Option<PlaceFacts>,
    /// Directories that are suitable for programs of root, the best first.
    pub places: Vec<PlaceFacts>,
}

/// An error of a step, as the part of a sentence after "the probe" or "the upload".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StepError(pub String);

/// Parses the output of a probe.
pub fn parse_probe(output: &CommandOutput) -> Result<ProbeReport, StepError> {
    let lines = text_after_marker(output, PROBE_BEGIN)?;
    let pairs = || lines.lines().filter_map(|line| line.split_once('='));
    let mut values: HashMap<&str, &str> = pairs().collect();
    let value = |key: &str| values.get(key).map_or("", |value| value.trim());
    let (uid, selinux_enforces) = (value(probe_key::UID).parse().ok(), value(probe_key::SELINUX) == "1");
    let unsafe_reason = Some(value(probe_key::UNSAFE)).filter(|reason| !reason.is_empty()).map(sanitize_text);
    let mut places = pairs()
        .filter(|(key, _)| *key == probe_key::PLACE)
        .take(MAX_PLACES)
        .map(|(_, line)| PlaceFacts::parse(&sanitize_text(line)))
        .collect::<Vec<_>>()
        .into_iter();
    let target = places.next().flatten();
    let mut take = |key: &'static str| {
        values
            .remove(key)
            .map(sanitize_text)
            .ok_or_else(|| StepError(format!("its answer lacks {key:?}; {}", output.summary())))
    };
    let digest = take(probe_key::DIGEST)?;
    Ok(ProbeReport {
        os: take(probe_key::OS)?,
        architecture: take(probe_key::ARCH)?,
        user: take(probe_key::USER)?,
        home: take(probe_key::HOME)?,
        has_digest_program: take(probe_key::SHA256)? != "none",
        digest: is_digest(&digest).then_some(digest),
        uid,
        selinux_enforces,
        unsafe_reason,
        target,
        places: places.flatten().collect(),
    })
}

/// Compares the output of an upload with what was sent.
pub fn parse_upload(output: &CommandOutput, sha256: &str) -> Result<(), StepError> {
    if let Some(words) = upload_error_text(output) {
        return Err(StepError(format!("{words} ({})", output.summary())));
    }
    let lines = text_after_marker(output, UPLOAD_BEGIN)?;
    match lines.lines().find_map(|line| line.strip_prefix("digest=")) {
        Some(digest) if digest == sha256 => Ok(()),
        Some(digest) => Err(StepError(format!("the machine stored the digest {}", sanitize_text(digest)))),
        None => Err(StepError("its answer lacks the digest".to_owned())),
    }
}

/// Parses the output of an enrolment.
pub fn parse_enroll(output: &CommandOutput) -> Result<EnrollResponse, StepError> {
    // A simulated machine has no shell that could print anything before, so it may leave the line out.
    let answer = bytes_after_line(&output.stdout, ENROLL_BEGIN).unwrap_or(&output.stdout);
    match &output.exit {
        CommandExit::Status(126) => {
            let words = "the uploaded program cannot be executed there: is its filesystem mounted noexec?";
            return Err(StepError(format!("{words} ({})", output.summary())));
        }
        CommandExit::Status(127) => {
            return Err(StepError(format!(
                "the uploaded program is not there any more ({})",
                output.summary()
            )));
        }
        _ => {}
    }
    if output.dropped_bytes > 0 {
        return Err(StepError("it answered more than an enrolment can be".to_owned()));
    }
    // An agent that rejects the request sends a response, whatever its exit status is.
    match EnrollResponse::decode(Bytes::copy_from_slice(answer)) {
        Ok(response) if response.result.is_some() => Ok(response),
        _ => Err(StepError(format!("it gave no answer that can be read; {}", output.summary()))),
    }
}

/// Why other users of the machine can change the program, if an upload or an enrolment ended for that reason.
#[must_use]
pub fn unsafe_path_reason(output: &CommandOutput) -> Option<String> {
    let printed = String::from_utf8_lossy(&output.stderr);
    // Start files of the login shell may have written lines before.
    let reason = printed.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it gave no reason");
    (output.exit == CommandExit::Status(UNSAFE_PATH)).then(|| sanitize_text(reason))
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Explains an upload's exit status and the machine's own message.
fn upload_error_text(output: &CommandOutput) -> Option<&'static str> {
    let printed = String::from_utf8_lossy(&output.stderr).to_lowercase();
    let status = match output.exit {
        CommandExit::Status(0) => return None,
        CommandExit::Status(status) => status,
        CommandExit::Signal(_) => return Some("it was killed"),
    };
    Some(if printed.contains("no space left") {
        "there is no space left on the machine's filesystem"
    } else if printed.contains("quota") {
        "the user's disk quota there is used up"
    } else if printed.contains("read-only file system") {
        "the machine's filesystem is read-only"
    } else {
        match status {
            upload_status::DIRECTORY => "its directory there cannot be made or written",
            upload_status::WRITE => "it cannot be written there",
            upload_status::SIZE => "it did not arrive whole",
            upload_status::DIGEST => "it arrived damaged",
            upload_status::NO_EXEC => "its filesystem there does not allow programs (mounted noexec)",
            upload_status::RENAME => "it cannot be put in place there",
            _ => "it failed",
        }
    })
}

fn text_after_marker(output: &CommandOutput, begin: &str) -> Result<String, StepError> {
    let answer = bytes_after_line(&output.stdout, begin).ok_or_else(|| {
        let summary = output.full_summary();
        StepError(format!("it gave no answer; {}. {OTHER_PROGRAM}", summary.trim_end_matches('.')))
    })?;
    Ok(String::from_utf8_lossy(answer).into_owned())
}

/// The bytes after the first line that is exactly `line`.
fn bytes_after_line<'a>(bytes: &'a [u8], line: &str) -> Option<&'a [u8]> {
    let mut rest = bytes;
    loop {
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let (head, tail) = (&rest[..end], &rest[end + 1..]);
        if head.strip_suffix(b"\r").unwrap_or(head) == line.as_bytes() {
            return Some(tail);
        }
        rest = tail;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::scripts::{PROBE_SCRIPT, UPLOAD_SCRIPT};
    use model::remote_step::RemoteStep;
    use proto::agent::v1::{EnrollSuccess, enroll_response};

    /// Runs a step as the remote login shell would, with `home` as its home and `path` first on its PATH.
    pub(crate) fn run(
        step: &RemoteStep,
        script: &str,
        home: &Path,
        path: &str,
        stdin: &[u8],
    ) -> CommandOutput {
        let mut child = Command::new("/bin/sh")
            .arg("-c")
            .arg(step.to_command(script).unwrap())
            .env("HOME", home)
            .env("PATH", format!("{path}:/usr/bin:/bin"))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A script that fails before it reads closes its end.
        let _fed = child.stdin.take().unwrap().write_all(stdin);
        let output = child.wait_with_output().unwrap();
        CommandOutput {
            exit: CommandExit::Status(output.status.code().unwrap().try_into().unwrap()),
            stdout: output.stdout,
            stderr: output.stderr,
            dropped_bytes: 0,
        }
    }

    fn sha256(content: &[u8]) -> String {
        hex::encode(ring::digest::digest(&ring::digest::SHA256, content))
    }

    fn upload(home: &Path, path: &str, content: &[u8], sha: &str, size: u64) -> CommandOutput {
        let step = RemoteStep::Upload { path: path.to_owned(), sha256: sha.to_owned(), size };
        run(&step, UPLOAD_SCRIPT, home, "/usr/bin", content)
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_probe_sees_an_uploaded_program_at_a_relative_and_an_absolute_path() {
        let home = tempfile::tempdir().unwrap();
        let content = b"#!/bin/sh\n".to_vec();
        let probe = |path: &str| {
            let step = RemoteStep::Probe { path: path.to_owned() };
            parse_probe(&run(&step, PROBE_SCRIPT, home.path(), "/usr/bin", b"")).unwrap()
        };
        let absolute = home.path().join("a dir/it's here").to_str().unwrap().to_owned();
        for path in ["a dir/it's here", absolute.as_str()] {
            assert_eq!(probe("a dir/it's here").digest, None);
            let output = upload(home.path(), path, &content, &sha256(&content), content.len() as u64);
            parse_upload(&output, &sha256(&content)).unwrap();
            assert_eq!(probe("a dir/it's here").digest, Some(sha256(&content)));
            assert_eq!(probe(&absolute).digest, Some(sha256(&content)));
            assert_eq!(names(&home.path().join("a dir")), ["it's here"]);
            std::fs::remove_file(&absolute).unwrap();
        }
        let found = probe("x");
        assert_eq!((found.os.as_str(), found.architecture.as_str()), ("Linux", std::env::consts::ARCH));
        assert_eq!(Path::new(&found.home), home.path());
        assert!(found.has_digest_program);
    }

    #[test]
    fn machine_does_not_decide_how_many_places_are_probed() {
        let place = |number: usize| format!("place=drwxr-xr-x 0 / ext4 rw /p{number}\n");
        let mut stdout =
            "shepherd-probe-begin\nos=Linux\narch=x86_64\nuser=root\nhome=/root\nsha256=sha256sum\n\
                          digest=none\nuid=0\nselinux=\nunsafe=\n"
                .to_owned();
        stdout.extend((0..1000).map(place));
        let exit = CommandExit::Status(0);
        let output = CommandOutput { exit, stdout: stdout.into_bytes(), stderr: vec![], dropped_bytes: 0 };
        let probe = parse_probe(&output).unwrap();
        assert_eq!(probe.target.unwrap().directory, "/p0");
        let places: Vec<_> = probe.places.into_iter().map(|place| place.directory).collect();
        assert_eq!(places, ["/p1", "/p2", "/p3", "/p4", "/p5", "/p6", "/p7"]);
    }

    #[test]
    fn upload_restores_the_label_where_labels_exist() {
        let home = tempfile::tempdir().unwrap();
        let (bin, calls) = (home.path().join("bin"), home.path().join("calls"));
        std::fs::create_dir(&bin).unwrap();
        let mut writer = Command::new("/bin/sh");
        let script = r#"printf '#!/bin/sh\necho "$@" >> %s; exit 1\n' "$1" >"$0" && chmod 755 "$0""#;
        writer.args(["-c", script]).arg(bin.join("restorecon")).arg(&calls);
        assert!(writer.status().unwrap().success());
        let step = RemoteStep::Upload { path: "p/agent".to_owned(), sha256: sha256(b"x"), size: 1 };
        let output = run(&step, UPLOAD_SCRIPT, home.path(), bin.to_str().unwrap(), b"x");
        parse_upload(&output, &sha256(b"x")).unwrap();
        let home = home.path().display();
        assert_eq!(std::fs::read_to_string(calls).unwrap(), format!("{home}/p/ {home}/p/agent\n"));
    }

    #[test]
    fn each_program_that_makes_digests_gives_the_same_one() {
        let home = tempfile::tempdir().unwrap();
        let agent = home.path().join("agent");
        std::fs::copy("/bin/sh", &agent).unwrap();
        let expected = sha256(&std::fs::read(&agent).unwrap());
        let found: Vec<&str> = [("sha256sum", "dash"), ("openssl", "dash"), ("shasum", "perl")]
            .into_iter()
            .filter_map(|(tool, _)| {
                // A PATH that contains only this program.
                let only = home.path().join(format!("only-{tool}"));
                std::fs::create_dir(&only).unwrap();
                for name in ["sh", "uname", "id", "ls", "env", "perl", tool] {
                    if let Some(program) =
                        ["/usr/bin", "/bin"].iter().map(|d| Path::new(d).join(name)).find(|p| p.exists())
                    {
                        std::os::unix::fs::symlink(program, only.join(name)).unwrap();
                    } else if name == tool {
                        return None;
                    }
                }
                let step = RemoteStep::Probe { path: agent.to_str().unwrap().to_owned() };
                let output = Command::new("/bin/sh")
                    .args(["-c", &step.to_command(PROBE_SCRIPT).unwrap()])
                    .env("PATH", &only)
                    .output()
                    .unwrap();
                let stdout = String::from_utf8(output.stdout).unwrap();
                assert!(stdout.contains(&format!("sha256={tool}\n")), "{stdout}");
                assert!(stdout.contains(&format!("digest={expected}\n")), "{tool}: {stdout}");
                Some(tool)
            })
            .collect();
        assert!(found.contains(&"sha256sum"));
    }

    #[test]
    fn an_upload_that_is_short_or_damaged_leaves_the_old_program_and_no_other_file() {
        let home = tempfile::tempdir().unwrap();
        let old = b"old".to_vec();
        parse_upload(&upload(home.path(), "agent", &old, &sha256(&old), 3), &sha256(&old)).unwrap();
        let new = b"new content".to_vec();
        let short = parse_upload(&upload(home.path(), "agent", &new[..4], &sha256(&new), 11), &sha256(&new));
        insta::assert_snapshot!(short.unwrap_err(), @"it did not arrive whole (it ended with status 43: 4 of 11 bytes arrived)");
        let damaged =
            parse_upload(&upload(home.path(), "agent", b"nEw content", &sha256(&new), 11), &sha256(&new));
        assert!(damaged.unwrap_err().0.starts_with("it arrived damaged (it ended with status 44"));
        assert_eq!(std::fs::read(home.path().join("agent")).unwrap(), old);
        assert_eq!(names(home.path()), ["agent"]);
    }

    #[test]
    fn upload_removes_leftovers_of_an_earlier_one() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("agent.upload.4711"), b"half").unwrap();
        let content = b"x".to_vec();
        parse_upload(&upload(home.path(), "agent", &content, &sha256(&content), 1), &sha256(&content))
            .unwrap();
        assert_eq!(names(home.path()), ["agent"]);
    }

    #[test]
    fn failed_upload_names_the_reason() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("agent")).unwrap();
        let fail = |path: &str| {
            let output = upload(home.path(), path, b"x", &sha256(b"x"), 1);
            parse_upload(&output, &sha256(b"x")).unwrap_err().0.replace(home.path().to_str().unwrap(), "HOME")
        };
        insta::assert_snapshot!(fail("agent"), @"it cannot be put in place there (it ended with status 46: HOME/agent is a directory)");
        std::fs::write(home.path().join("file"), b"").unwrap();
        assert!(fail("file/agent").starts_with("its directory there cannot be made or written"));
        assert!(fail("/proc/agent").contains("directory there"), "{}", fail("/proc/agent"));

        let reported = |status, words: &str| {
            let exit = CommandExit::Status(status);
            let output =
                CommandOutput { exit, stdout: vec![], stderr: words.as_bytes().to_vec(), dropped_bytes: 0 };
            parse_upload(&output, "").unwrap_err().0
        };
        assert!(
            reported(42, "cat: write error: No space left on device").starts_with("there is no space left")
        );
        assert!(
            reported(41, "mkdir: cannot create directory: Read-only file system")
                .starts_with("the machine's filesystem is read-only")
        );
    }

    #[test]
    fn full_filesystem_is_reported() {
        let home = tempfile::tempdir().unwrap();
        // `cat` as it fails on a full disk: `/dev/full` returns a real ENOSPC.
        let bin = home.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        // Another process writes this file. A child that another test starts meanwhile would inherit our descriptor,
        // and a file that is open for writing cannot be executed.
        let mut writer = Command::new("/bin/sh");
        let script = r#"printf '#!/bin/sh\nexec /bin/cat >/dev/full\n' >"$0" && chmod 755 "$0""#;
        writer.args(["-c", script]).arg(bin.join("cat"));
        assert!(writer.status().unwrap().success());
        let step = RemoteStep::Upload { path: "agent".to_owned(), sha256: sha256(b"x"), size: 1 };
        let output = run(&step, UPLOAD_SCRIPT, home.path(), bin.to_str().unwrap(), b"x");
        let failure = parse_upload(&output, &sha256(b"x")).unwrap_err();
        assert!(failure.0.starts_with("there is no space left on the machine's filesystem"), "{failure}");
        assert_eq!(names(home.path()), ["bin"]);
    }

    #[test]
    fn output_of_shell_start_files_is_ignored() {
        let response =
            EnrollResponse { result: Some(enroll_response::Result::Success(EnrollSuccess::default())) };
        for prefix in
            ["", "Welcome!\nshepherd-enroll-begin\n", "x shepherd-enroll-begin\nshepherd-enroll-begin\r\n"]
        {
            let mut stdout = prefix.as_bytes().to_vec();
            stdout.extend(response.encode_to_vec());
            let output =
                CommandOutput { exit: CommandExit::Status(0), stdout, stderr: vec![], dropped_bytes: 0 };
            assert_eq!(parse_enroll(&output).unwrap(), response, "{prefix:?}");
        }
        let output = |stdout: &str| CommandOutput {
            exit: CommandExit::Status(1),
            stdout: stdout.into(),
            stderr: b"no\n".to_vec(),
            dropped_bytes: 0,
        };
        insta::assert_snapshot!(parse_enroll(&output("Welcome!\n")).unwrap_err(), @"it gave no answer that can be read; it ended with status 1: no");
        insta::assert_snapshot!(parse_probe(&output("os=Linux\n")).unwrap_err(), @"it gave no answer; it ended with status 1: no; on its standard output: os=Linux. If a forced command or another login shell answers for this user, let it run commands, or give another user in the device list (User)");
        let lacking = parse_probe(&output("shepherd-probe-begin\nos=Linux\n")).unwrap_err();
        insta::assert_snapshot!(lacking, @r#"its answer lacks "digest"; it ended with status 1: no"#);
    }
}
