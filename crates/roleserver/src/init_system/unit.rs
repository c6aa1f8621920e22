//! The unit file of the agent: its text, who wrote the one that exists, and what to do about it (pure).
//!
//! # What the text leaves out
//!
//! * `KillMode=` and `Delegate=`. What has to outlive the agent runs in scopes of its own, so the whole group of the
//!   unit may end with it. With `KillMode=process` and `Delegate=yes` instead, systemd before 254 cannot start the unit
//!   again on pure control groups of version 2: each start ends in 219/CGROUP.
//! * Settings that open a namespace or are inherited: `ProtectSystem=`, `PrivateTmp=`, `NoNewPrivileges=`, filters of
//!   system calls. Children would go on in the mounts of a unit that is gone, and keep restrictions that were meant for
//!   the agent.
//!
//! # Who wrote a file
//!
//! The text has the digest of its other lines. A file with the right digest was written by a release, this one or
//! another, and is replaced by the text of the release that starts. A text without a digest is that of the releases
//! before it, or was edited. An edited file is kept and reported: an administrator had a reason. A drop-in is the place
//! for changes, and no release touches drop-ins.
//!
//! An enrolment replaces an edited file only if it would start another program or another state directory, because
//! then no agent would run at the end. The edited text stays beside it, under a name that systemd does not read.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};

/// The start of the line that has the digest of all other lines.
const DIGEST_LINE: &str = "# sha256 of the other lines: ";
/// What every release starts the agent with, between its program and its state directory.
const ARGUMENTS: &str = " run --state_dir ";

/// What the text of a unit follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitFacts {
    /// The file of the program that the unit runs.
    pub program: PathBuf,
    /// The state directory that the agent is started with.
    pub state: PathBuf,
    /// The target that starts the unit.
    pub wanted_by: String,
}

/// What to do about the unit file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitAction {
    /// It is up to date.
    Nothing,
    /// It is missing or of another release: write this text.
    Write(String),
    /// Somebody edited it, and it stays.
    KeepEdited,
    /// Somebody edited it so that it does not start the right agent: put it aside, and write this text.
    ReplaceEdited(String),
}

/// The text of the unit, as this release writes it.
#[must_use]
pub fn render_unit(facts: &UnitFacts) -> String {
    let mut text = String::from(
        "# Written by the role server. For changes use `systemctl edit`: a drop-in is kept.\n\
         [Unit]\n\
         Description=Shepherd role server\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         # A machine that stops calling is a machine that somebody has to visit.\n\
         StartLimitIntervalSec=0\n\n\
         [Service]\n",
    );
    write_exec_start(&mut text, facts);
    text.push_str(
        "Restart=always\n\
         RestartSec=2\n\
         TimeoutStopSec=10\n\
         # The role server raises its own limit. Its children get 1024, because select(2) fails above that.\n\
         LimitNOFILE=1024:1048576\n\n\
         [Install]\n",
    );
    let _ = writeln!(text, "WantedBy={}", facts.wanted_by);
    let digest = text_digest(&text);
    let _ = writeln!(text, "{DIGEST_LINE}{digest}");
    text
}

/// The text of the releases before the digest. It never changes, so it shares no lines with [`render_unit`].
fn render_first_text(facts: &UnitFacts) -> String {
    let mut text = String::from(
        "# Written by `roleserver enroll`; changes are overwritten.\n\
         [Unit]\n\
         Description=Shepherd role server\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         # A machine that stops calling is a machine that somebody has to visit.\n\
         StartLimitIntervalSec=0\n\n\
         [Service]\n",
    );
    write_exec_start(&mut text, facts);
    text.push_str("Restart=always\nRestartSec=2\nTimeoutStopSec=10\n\n[Install]\n");
    let _ = writeln!(text, "WantedBy={}", facts.wanted_by);
    text
}

fn write_exec_start(text: &mut String, facts: &UnitFacts) {
    let _ = writeln!(text, "ExecStart={}{ARGUMENTS}{}", quote_path(&facts.program), quote_path(&facts.state));
}

/// What a role server that starts does about the file that started it. Program and state directory stay: a release on
/// trial runs from another path than the one that the unit has to start.
#[must_use]
pub fn action_at_start(text: &str) -> UnitAction {
    match released_facts(text) {
        Some(facts) => write_unless_equal(text, render_unit(&facts)),
        None => UnitAction::KeepEdited,
    }
}

/// What an enrolment does about the file, if there is one, so that the unit starts the agent of these facts.
#[must_use]
pub fn action_at_enrolment(text: Option<&str>, desired: &UnitFacts) -> UnitAction {
    let rendered = render_unit(desired);
    let Some(text) = text else { return UnitAction::Write(rendered) };
    if released_facts(text).is_some() {
        return write_unless_equal(text, rendered);
    }
    let starts_desired = parse_facts(text)
        .is_some_and(|facts| facts.program == desired.program && facts.state == desired.state);
    if starts_desired { UnitAction::KeepEdited } else { UnitAction::ReplaceEdited(rendered) }
}

fn write_unless_equal(text: &str, rendered: String) -> UnitAction {
    if text == rendered { UnitAction::Nothing } else { UnitAction::Write(rendered) }
}

/// The facts of a text that a release wrote; `None` if somebody edited it.
fn released_facts(text: &str) -> Option<UnitFacts> {
    let facts = parse_facts(text)?;
    let (others, digests): (Vec<&str>, Vec<&str>) =
        text.split_inclusive('\n').partition(|line| !line.starts_with(DIGEST_LINE));
    let is_released = match digests.as_slice() {
        [] => text == render_first_text(&facts),
        [line] => line[DIGEST_LINE.len()..].trim_end() == text_digest(&others.concat()),
        _ => false,
    };
    is_released.then_some(facts)
}

/// Program, state directory and target that a text names; `None` if it does not start an agent as releases do.
fn parse_facts(text: &str) -> Option<UnitFacts> {
    let value = |name: &str| text.lines().rev().find_map(|line| line.strip_prefix(name));
    let (program, rest) = unquote_path(value("ExecStart=")?)?;
    let (state, rest) = unquote_path(rest.strip_prefix(ARGUMENTS)?)?;
    rest.trim().is_empty().then_some(())?;
    Some(UnitFacts { program, state, wanted_by: value("WantedBy=").unwrap_or_default().to_owned() })
}

fn text_digest(text: &str) -> String {
    hex::encode(digest(&SHA256, text.as_bytes()))
}

/// Quotes a path as one word of `ExecStart=` (systemd.service(5), "Command lines").
fn quote_path(path: &Path) -> String {
    let text = path.display().to_string();
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{text}\"")
}

/// A path that [`quote_path`] quoted, and the text after it.
fn unquote_path(text: &str) -> Option<(PathBuf, &str)> {
    let text = text.strip_prefix('"')?;
    let mut path = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((PathBuf::from(path), &text[at + 1..])),
            '\\' => path.push(characters.next()?.1),
            '%' | '$' => path.push(characters.next().filter(|(_, second)| *second == character)?.1),
            _ => path.push(character),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> UnitFacts {
        UnitFacts {
            program: "/usr/local/lib/shepherd/bin/roleserver".into(),
            state: "/var/lib/roleserver".into(),
            wanted_by: "multi-user.target".to_owned(),
        }
    }

    #[test]
    fn unit_text_matches() {
        insta::assert_snapshot!(render_unit(&facts()), @r##"
        # Written by the role server. For changes use `systemctl edit`: a drop-in is kept.
        [Unit]
        Description=Shepherd role server
        Wants=network-online.target
        After=network-online.target
        # A machine that stops calling is a machine that somebody has to visit.
        StartLimitIntervalSec=0

        [Service]
        ExecStart="/usr/local/lib/shepherd/bin/roleserver" run --state_dir "/var/lib/roleserver"
        Restart=always
        RestartSec=2
        TimeoutStopSec=10
        # The role server raises its own limit. Its children get 1024, because select(2) fails above that.
        LimitNOFILE=1024:1048576

        [Install]
        WantedBy=multi-user.target
        # sha256 of the other lines: fec6d703283ffa4535306ae31d45080033822eb405ae2ea6982dea44a7b36ed8
        "##);
    }

    /// The digest of what those releases wrote. With another text, their files would count as edited.
    #[test]
    fn first_text_is_the_one_that_was_released() {
        let released = "9a0a6814f8686209f62ae6d33b1ed17bc0318a5743b3ee70cd87672df01a513a";
        assert_eq!(text_digest(&render_first_text(&facts())), released);
    }

    /// The children of the agent live longer than its unit, so nothing in it may end, bind or restrict them.
    #[test]
    fn unit_has_no_setting_that_its_children_would_inherit() {
        let text = render_unit(&facts());
        for setting in [
            "KillMode",
            "Delegate",
            "ProtectSystem",
            "ProtectHome",
            "ProtectKernel",
            "ProtectControlGroups",
            "ProtectProc",
            "PrivateTmp",
            "PrivateDevices",
            "PrivateMounts",
            "PrivateNetwork",
            "PrivateUsers",
            "NoNewPrivileges",
            "SystemCall",
            "Restrict",
            "MemoryDenyWriteExecute",
            "LockPersonality",
            "CapabilityBoundingSet",
            "ReadOnlyPaths",
            "ReadWritePaths",
            "InaccessiblePaths",
            "RootDirectory",
            "MountFlags",
            "DynamicUser",
            "TemporaryFileSystem",
            "BindPaths",
        ] {
            assert!(!text.contains(setting), "{setting}: {text}");
        }
        for line in ["Restart=always", "StartLimitIntervalSec=0", "LimitNOFILE=1024:1048576"] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn paths_are_read_as_they_were_quoted() {
        for path in ["/root/role server", "/var/lib/100%", "/a\"b\\c", "/price$", "/%$\\\""] {
            let facts = UnitFacts { program: path.into(), state: path.into(), ..facts() };
            assert_eq!(released_facts(&render_unit(&facts)), Some(facts.clone()), "{path}");
            assert_eq!(released_facts(&render_first_text(&facts)), Some(facts), "{path}");
        }
        let text = render_unit(&UnitFacts { state: "/var/lib/100%".into(), ..facts() });
        assert!(text.contains("run --state_dir \"/var/lib/100%%\"\n"), "{text}");
    }

    #[test]
    fn file_of_a_release_is_replaced_and_an_edited_one_is_kept() {
        let (desired, current) = (facts(), render_unit(&facts()));
        let moved = UnitFacts { program: "/root/roleserver".into(), ..facts() };
        let edited = |text: &str| text.replace("RestartSec=2", "RestartSec=30");
        // A later release has other lines, and the digest of them.
        let later = current.replace("RestartSec=2", "RestartSec=3");
        let later: String = later
            .lines()
            .filter(|line| !line.starts_with(DIGEST_LINE))
            .fold(String::new(), |text, line| text + line + "\n");
        let later = format!("{later}{DIGEST_LINE}{}\n", text_digest(&later));
        let write = || UnitAction::Write(current.clone());
        let replace = || UnitAction::ReplaceEdited(current.clone());
        let (keep, nothing) = (UnitAction::KeepEdited, UnitAction::Nothing);
        for (name, text, start, enrolment) in [
            ("this release's", current.clone(), nothing.clone(), nothing),
            ("the first text", render_first_text(&desired), write(), write()),
            ("a later release's", later, write(), write()),
            ("another program", render_first_text(&moved), UnitAction::Write(render_unit(&moved)), write()),
            ("edited", edited(&current), keep.clone(), keep.clone()),
            ("the first text, edited", edited(&render_first_text(&desired)), keep.clone(), keep.clone()),
            ("edited, of another program", edited(&render_unit(&moved)), keep.clone(), replace()),
            ("empty", String::new(), keep.clone(), replace()),
            ("started by a script", "[Service]\nExecStart=/start.sh\n".to_owned(), keep.clone(), replace()),
            ("two digests", format!("{current}{DIGEST_LINE}\n"), keep.clone(), keep),
        ] {
            assert_eq!(action_at_start(&text), start, "{name}");
            assert_eq!(action_at_enrolment(Some(&text), &desired), enrolment, "{name}");
        }
        assert_eq!(action_at_enrolment(None, &desired), write());
    }
}
