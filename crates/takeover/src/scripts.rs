//! Shell scripts of a takeover: probe, upload and enrol.
//!
//! Each script is one line of POSIX shell without a single quote or a backslash, because the remote user's login shell
//! sees it first, and login shells disagree on quoted line feeds and backslashes. Start files of that shell may print
//! anything: the output of a step begins after its begin line.
//!
//! The upload is whole or absent. It goes into the new directory `<path>.upload.<pid>`, and is renamed over `<path>` only
//! after its size and digest are right. `mkdir` fails if anything has that name, a link included, so nothing is written
//! through a link. A trap removes the directory when the connection ends; the next upload removes it if the machine lost
//! power in between. A running agent keeps the old file until it restarts.
//!
//! # Who can change the program
//!
//! Root runs the program, and systemd runs it again at each boot. So each script first resolves the links on the way to
//! the path (`place`), and ends if another user can change a directory of the result or the file itself. The probe goes
//! on and reports this, because the takeover may choose another path. Owners must be root or the SSH user. A group may
//! write if it is the user's own group by name, as distributions with a group for each user have it, and if no access list
//! (`+` behind the mode) names others: its bits for the group are what anybody on the list may have. A sticky directory
//! (`/tmp`) is allowed above the directory of the program, never as that directory: in it, others can create the path
//! first. The scripts read owner and mode from `ls -ldn`, because a small machine has no `stat`. They go on with the
//! resolved path, in which no other user can put a link.

/// Turns `$1` into a path `$p`, and sets the locale so that messages are in English. `say STATUS TEXT` ends the script.
/// `place` resolves `$p`, and ends the script if other users can change what is there.
macro_rules! common {
    () => {
        "export LC_ALL=C; say() { echo \"$2\" >&2; exit \"$1\"; }; \
         case $1 in /*) p=$1;; *) p=${HOME:-.}/$1;; esac; u=$(id -u); g=none; \
         if [ \"$(id -gn 2>/dev/null)\" = \"$(id -un)\" ]; then g=$(id -g); fi; \
         check() { f=$1; s=$2; set -f; set -- $(ls -ldn \"$f\"); set +f; \
         [ $# -gt 4 ] || say 47 \"the owner of $f cannot be read\"; \
         case $3 in 0|\"$u\") ;; *) say 47 \"$f belongs to another user (id $3)\";; esac; \
         w=; case $1 in ????????w*|?????w*+) w=1;; ?????w*) [ \"$4\" = \"$g\" ] || w=1;; esac; \
         case $1$s in d????????[tT]*x) w=;; esac; \
         [ -z \"$w\" ] || say 47 \"$f can be changed by other users ($1)\"; }; \
         place() { q=${p%/*}; r=; \
         while [ ! -d \"$q/\" ] && [ \"$q\" != \"${q%/*}\" ]; do r=/${q##*/}$r; q=${q%/*}; done; \
         q=$(cd -P \"$q/\" && pwd -P) || say 47 \"a directory on the way to $p cannot be entered\"; \
         p=${q%/}$r/${p##*/}; x=${q%/}; z=${r:+x}; \
         while :; do check \"${x:-/}\" \"$z\"; [ -n \"$x\" ] || break; x=${x%/*}; z=x; done; \
         [ ! -L \"$p\" ] || say 47 \"$p is a symbolic link\"; \
         [ ! -e \"$p\" ] || check \"$p\" \"\"; }; "
    };
}

/// Defines `d FILE`, the digest of a file, with any of the programs that the machine may have for it.
macro_rules! digest {
    () => {
        "if command -v sha256sum >/dev/null 2>&1; then k=sha256sum; h() { sha256sum; }; \
         elif command -v openssl >/dev/null 2>&1; then k=openssl; h() { openssl dgst -sha256 -r; }; \
         elif command -v shasum >/dev/null 2>&1; then k=shasum; h() { shasum -a 256; }; \
         else k=none; h() { echo none; }; fi; \
         d() { x=$(h < \"$1\"); echo \"${x%% *}\"; }; "
    };
}

/// Prints a line for the directory of `$p` and for each that is suitable for root: mode and owner of the nearest
/// directory that exists, its mount, and the directory. It ends the script, because it replaces the arguments.
macro_rules! places {
    () => {
        "for q in \"${p%/*}\" /usr/local/lib/shepherd/bin /opt/shepherd/bin; do a=$q; \
         while [ ! -d \"$a\" ]; do a=${a%/*}; a=${a:-/}; done; a=$(cd -P \"$a\" && pwd); b=; \
         while read -r s m t o z; do m=${m%/}; case ${a%/}/ in \"$m\"/*) b=\"${m:-/} $t $o\";; esac; \
         done < /proc/self/mounts; \
         set -- $(ls -ldn \"$a\"); echo \"place=$1 $3 $b $q\"; done"
    };
}

/// The script of [`RemoteStep::Probe`](model::remote_step::RemoteStep::Probe).
pub(crate) const PROBE_SCRIPT: &str = concat!(
    common!(),
    digest!(),
    "if w=$(place 2>&1); then place; w=; else w=${w:-it gave no reason}; fi; \
     echo shepherd-probe-begin; echo \"os=$(uname -s)\"; echo \"arch=$(uname -m)\"; echo \"user=$(id -un)\"; \
     echo \"home=${HOME:-}\"; echo \"sha256=$k\"; \
     if [ -z \"$w\" ] && [ -f \"$p\" ] && [ -x \"$p\" ]; then echo \"digest=$(d \"$p\")\"; else echo digest=none; fi; \
     set -f; echo \"unsafe=$(echo $w)\"; set +f; \
     echo \"uid=$(id -u)\"; echo \"selinux=$(cat /sys/fs/selinux/enforce 2>/dev/null)\"; ",
    places!(),
);

/// The script of [`RemoteStep::Upload`](model::remote_step::RemoteStep::Upload). `upload_error_text` has the
/// meaning of its exit statuses.
pub(crate) const UPLOAD_SCRIPT: &str = concat!(
    "umask 022; ",
    common!(),
    digest!(),
    "clean() { rm -rf \"$d\"; }; trap \"exit 1\" HUP INT TERM PIPE; \
     place; mkdir -p \"${p%/*}/\" || exit 41; place; [ ! -d \"$p\" ] || say 46 \"$p is a directory\"; \
     rm -rf \"$p\".upload.*; d=$p.upload.$$; mkdir -m 0700 \"$d\" || exit 41; trap clean EXIT; t=$d/agent; \
     true > \"$t\" || exit 41; cat > \"$t\" || exit 42; \
     n=$(($(wc -c < \"$t\"))); [ \"$n\" -eq \"$3\" ] || say 43 \"$n of $3 bytes arrived\"; \
     g=$(d \"$t\"); [ \"$g\" = \"$2\" ] || say 44 \"the digest of what arrived is $g\"; \
     chmod 0755 \"$t\" || exit 45; [ -x \"$t\" ] || say 45 \"$t cannot be executed\"; \
     mv -f \"$t\" \"$p\" || exit 46; \
     if command -v restorecon >/dev/null 2>&1; then restorecon \"${p%/*}/\" \"$p\" >&2 || true; fi; \
     echo shepherd-upload-begin; echo \"digest=$g\"",
);

/// The script of [`RemoteStep::Enroll`](model::remote_step::RemoteStep::Enroll).
pub(crate) const ENROLL_SCRIPT: &str =
    concat!(common!(), "place; echo shepherd-enroll-begin; exec \"$p\" enroll");

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output, Stdio};

    use super::*;
    use model::remote_step::{
        ENROLL_BEGIN, PROBE_BEGIN, RemoteStep, UNSAFE_PATH, UPLOAD_BEGIN, upload_status,
    };

    #[test]
    fn scripts_avoid_what_login_shells_interpret_differently() {
        for script in [PROBE_SCRIPT, UPLOAD_SCRIPT, ENROLL_SCRIPT] {
            assert!(!script.contains(['\'', '\\', '\n']), "{script}");
        }
        let statuses = {
            use upload_status::{DIGEST, DIRECTORY, NO_EXEC, RENAME, SIZE, WRITE};
            [DIRECTORY, WRITE, SIZE, DIGEST, NO_EXEC, RENAME]
        };
        for status in statuses {
            assert!(UPLOAD_SCRIPT.contains(&status.to_string()), "{status}");
        }
        for script in [PROBE_SCRIPT, UPLOAD_SCRIPT, ENROLL_SCRIPT] {
            assert!(
                script.contains(&format!("say {UNSAFE_PATH} ")) && script.contains(" place; "),
                "{script}"
            );
        }
        assert!(PROBE_SCRIPT.contains(PROBE_BEGIN));
        assert!(UPLOAD_SCRIPT.contains(UPLOAD_BEGIN));
        assert!(ENROLL_SCRIPT.contains(ENROLL_BEGIN));
    }

    /// A directory below a sticky one. Its path has no links.
    fn directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        (directory, path)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn steps(path: &Path) -> [(RemoteStep, &'static str); 3] {
        let path = path.to_str().unwrap().to_owned();
        let sha256 = hex::encode(ring::digest::digest(&ring::digest::SHA256, b""));
        [
            (RemoteStep::Probe { path: path.clone() }, PROBE_SCRIPT),
            (RemoteStep::Upload { path: path.clone(), sha256, size: 0 }, UPLOAD_SCRIPT),
            (RemoteStep::Enroll { path }, ENROLL_SCRIPT),
        ]
    }

    fn run(step: &RemoteStep, script: &str) -> Output {
        let command = step.to_command(script).unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", &command]).current_dir("/").env("HOME", "/nonexistent").stdin(Stdio::null());
        shell.output().unwrap()
    }

    /// The reason for which a probe calls the path unsafe; empty if it is safe.
    fn probed_reason(path: &Path) -> String {
        let [(step, script), ..] = steps(path);
        let output = run(&step, script);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned);
        let reason = value("unsafe=").unwrap();
        // A file that others can change is not looked at. The places are reported in any case.
        assert!(reason.is_empty() || value("digest=").as_deref() == Some("none"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("place=")).count(), 3, "{text}");
        reason
    }

    /// The reason for which each step refuses the path.
    fn refusal(path: &Path) -> String {
        let reported = probed_reason(path);
        let [_, upload, enroll] = steps(path);
        for (step, script) in [upload, enroll] {
            let output = run(&step, script);
            assert_eq!(
                output.status.code(),
                Some(i32::try_from(UNSAFE_PATH).unwrap()),
                "{step:?} {output:?}"
            );
            assert!(output.stdout.is_empty(), "{output:?}");
            assert_eq!(String::from_utf8(output.stderr).unwrap().trim_end(), reported, "{step:?}");
        }
        reported
    }

    /// Runs probe and upload, which must succeed.
    fn accept(path: &Path) {
        assert_eq!(probed_reason(path), "");
        let [_, (step, script), _] = steps(path);
        let output = run(&step, script);
        assert!(output.status.success(), "{step:?} {output:?}");
    }

    #[test]
    fn each_directory_on_the_way_must_be_closed_to_others() {
        let (_directory, root) = directory();
        let (outer, inner) = (root.join("a"), root.join("a/b c"));
        let program = inner.join("roleserver");
        fs::create_dir_all(&inner).unwrap();
        set_mode(&outer, 0o755);
        set_mode(&inner, 0o755);
        accept(&program);
        assert_eq!(fs::metadata(&program).unwrap().permissions().mode() & 0o7777, 0o755);
        for (part, safe) in [(&outer, 0o755), (&inner, 0o700), (&program, 0o755)] {
            set_mode(part, 0o757);
            let expected = format!("{} can be changed by other users (", part.display());
            assert!(refusal(&program).starts_with(&expected), "{}", refusal(&program));
            set_mode(part, safe);
        }
        accept(&program);
    }

    #[test]
    fn program_is_never_directly_in_a_directory_for_everybody() {
        let (_directory, root) = directory();
        set_mode(&root, 0o1777);
        let expected = format!("{} can be changed by other users (drwxrwxrwt)", root.display());
        assert_eq!(refusal(&root.join("roleserver")), expected);
        // Below it, nobody else can rename or remove what this user makes.
        accept(&root.join("own/roleserver"));
        accept(&root.join("own/roleserver"));
    }

    #[test]
    fn links_are_resolved_before_the_check_and_never_written_through() {
        let (_directory, root) = directory();
        for name in ["open", "closed"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        set_mode(&root.join("open"), 0o777);
        set_mode(&root.join("closed"), 0o755);
        symlink(root.join("closed"), root.join("to_closed")).unwrap();
        symlink(root.join("open"), root.join("to_open")).unwrap();
        symlink(root.join("victim"), root.join("closed/link")).unwrap();
        accept(&root.join("to_closed/roleserver"));
        assert!(root.join("closed/roleserver").is_file());
        let expected = format!("{}/open can be changed by other users (drwxrwxrwx)", root.display());
        assert_eq!(refusal(&root.join("to_open/roleserver")), expected);
        let expected = format!("{}/closed/link is a symbolic link", root.display());
        assert_eq!(refusal(&root.join("to_closed/link")), expected);
        assert!(!root.join("victim").exists(), "the upload went through a link");
    }

    /// Only root can give files away.
    #[test]
    fn program_and_directories_of_another_user_are_refused() {
        if !testkit::skip::runs_as_root() {
            return;
        }
        let (_directory, root) = directory();
        let (inner, program) = (root.join("a"), root.join("a/roleserver"));
        fs::create_dir(&inner).unwrap();
        set_mode(&inner, 0o755);
        accept(&program);
        for part in [&inner, &program] {
            chown(part, Some(1234), None).unwrap();
            assert_eq!(refusal(&program), format!("{} belongs to another user (id 1234)", part.display()));
            chown(part, Some(0), None).unwrap();
        }
        // A group of other users may not write either.
        chown(&inner, None, Some(1234)).unwrap();
        set_mode(&inner, 0o775);
        let expected = format!("{} can be changed by other users (drwxrwxr-x)", inner.display());
        assert_eq!(refusal(&program), expected);
    }

    /// `ls` shows an access list as a `+`, and its mask as the bits of the group. Not every file system has such lists.
    #[test]
    fn access_list_of_others_is_no_own_group() {
        let (_directory, root) = directory();
        set_mode(&root, 0o775);
        let [_, (step, script), _] = steps(&root.join("roleserver"));
        let listed = "$(ls -ldn \"$f\" | sed s/^drwxrwxr-x/drwxrwxr-x+/)";
        let command = step.to_command(&script.replace("$(ls -ldn \"$f\")", listed)).unwrap();
        let output = Command::new("/bin/sh").args(["-c", &command]).stdin(Stdio::null()).output().unwrap();
        let expected = format!("{} can be changed by other users (drwxrwxr-x+)", root.display());
        assert_eq!(String::from_utf8(output.stderr).unwrap().trim_end(), expected);
        assert_eq!(output.status.code(), Some(i32::try_from(UNSAFE_PATH).unwrap()));
    }

    #[test]
    fn a_name_that_is_taken_stops_the_upload() {
        let (_directory, root) = directory();
        let program = root.join("roleserver");
        let [_, (step, script), _] = steps(&program);
        // `mkdir` as it fails when another process was faster with any name.
        let command = step.to_command(&script.replace("mkdir -m 0700", "false")).unwrap();
        let output = Command::new("/bin/sh").args(["-c", &command]).stdin(Stdio::null()).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(i32::try_from(upload_status::DIRECTORY).unwrap()),
            "{output:?}"
        );
        assert!(fs::read_dir(&root).unwrap().next().is_none(), "something is left behind");
    }
}
