//! Replaces this program by another release, or by the former one, with `execve`.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use hardening::file_limit::UsualFileLimit as _;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::boot_clock::BootClock as _;
use crate::process::ProcessInstance;
use crate::update::decision::Trial;
use crate::update::self_updater::{Handover, SelfUpdater, StagedRelease};
use crate::update::watchdog;

impl SelfUpdater {
    /// Replaces this program by another one, with the same pid and arguments; nothing of this one runs any more. It
    /// returns only if even this program could not be restarted.
    #[must_use]
    pub fn exec_release(&self, handover: &Handover) -> std::io::Error {
        let tried = match handover {
            Handover::Update(staged) => self.exec_candidate(staged),
            Handover::RollBack(stable) => {
                tracing::info!(program = %stable.display(), "the former release comes back");
                exec_program(stable, stable)
            }
        };
        tracing::error!(error = %tried, "the handover failed; this release is started again");
        let own = Path::new("/proc/self/exe");
        exec_program(own, own)
    }

    fn exec_candidate(&self, staged: &StagedRelease) -> std::io::Error {
        let begin = || -> std::io::Result<()> {
            let patience_ms = u64::try_from(staged.trial_timeout.as_millis()).unwrap_or(u64::MAX);
            self.files.write_trial(&Trial {
                generation: staged.generation,
                sha256: staged.sha256.clone(),
                former: self.own_digest.clone(),
                stable: staged.stable.clone(),
                candidate: staged.candidate.clone(),
                boot_id: self.clock.boot_id(),
                until_ms: self.clock.milliseconds().saturating_add(patience_ms),
                patience_ms,
                instance: ProcessInstance::current()?,
                minimum_version: staged.minimum_version.map(|version| version.to_string()),
                failure: None,
            })?;
            watchdog::start_watchdog(&staged.stable, &self.directory)
        };
        let error = match begin() {
            Ok(()) => exec_open_program(&staged.program, &staged.candidate),
            Err(error) => error,
        };
        self.files.remove_candidate(&staged.stable);
        self.finish_order(staged.generation, Some(format!("this machine could not become it: {error}")));
        error
    }
}

/// Replaces this program by an open one that was verified. Another file may have its `name` meanwhile.
fn exec_open_program(program: &File, name: &Path) -> std::io::Error {
    let mut start = [0; 2];
    // The interpreter of a script opens the file again, after `execve` has closed the files of this program.
    if program.read_exact_at(&mut start, 0).is_ok()
        && start == *b"#!"
        && let Err(error) = fcntl_setfd(program, FdFlags::empty())
    {
        return error.into();
    }
    exec_program(Path::new(&format!("/proc/self/fd/{}", program.as_raw_fd())), name)
}

/// Replaces this program by `program`, which is called `name`, with the arguments of this one. The next program protects
/// its process again.
fn exec_program(program: &Path, name: &Path) -> std::io::Error {
    if let Err(error) = hardening::restore_own_core_limit() {
        tracing::warn!(%error, "what the next release starts writes no core files");
    }
    Command::new(program).arg0(name).args(std::env::args_os().skip(1)).usual_file_limit().exec()
}
