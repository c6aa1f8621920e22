//! A program on its own terminal, and the content of the screen.
//!
//! `script` makes the terminal and passes on the input. An emulator interprets the output, so that a test reads the
//! screen as a person does.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use shepherd::model::shell_words::quote_if_needed;

use crate::harness::program::PATIENCE;

/// A program and its terminal.
pub(crate) struct Screen {
    child: Child,
    keyboard: Option<ChildStdin>,
    terminal: Arc<Mutex<vt100::Parser>>,
    reads: Option<JoinHandle<()>>,
    pid: tempfile::NamedTempFile,
}

impl Screen {
    /// Starts a program on a terminal of this size.
    pub(crate) fn start(command: &Command, rows: u16, columns: u16) -> Result<Self> {
        let pid = tempfile::NamedTempFile::new()?;
        let text =
            |text: &std::ffi::OsStr| text.to_str().map(str::to_owned).context("a word that is no text");
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(|part| Ok(quote_if_needed(&text(part)?))).collect::<Result<Vec<_>>>()?;
        let file = quote_if_needed(path(pid.path())?);
        let line = format!("echo $$ >{file}; stty rows {rows} cols {columns}; exec {}", words.join(" "));
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        // The environment of the tests says nothing about colours; that of the command may.
        script.env_remove("NO_COLOR");
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => script.env(name, value),
                None => script.env_remove(name),
            };
        }
        script.env("SHELL", "/bin/sh").env("TERM", "xterm-256color");
        script.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = script.spawn().context("starting script, which Debian has in bsdutils")?;
        let mut written = child.stdout.take().context("what it writes")?;
        let terminal = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let emulator = Arc::clone(&terminal);
        let reads = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = written.read(&mut bytes) {
                emulator.lock().unwrap_or_else(PoisonError::into_inner).process(&bytes[..length]);
            }
        });
        let keyboard = child.stdin.take();
        Ok(Self { child, keyboard, terminal, reads: Some(reads), pid })
    }

    fn with_screen<T>(&self, look: impl FnOnce(&vt100::Screen) -> T) -> T {
        look(self.terminal.lock().unwrap_or_else(PoisonError::into_inner).screen())
    }

    /// The text on the screen, without spaces at the ends of lines.
    pub(crate) fn text(&self) -> String {
        self.with_screen(vt100::Screen::contents)
    }

    /// Whether a character on the screen has a colour.
    pub(crate) fn has_colors(&self) -> bool {
        self.with_screen(|screen| {
            let (rows, columns) = screen.size();
            let mut places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
            places.any(|(row, column)| {
                screen.cell(row, column).is_some_and(|cell| cell.fgcolor() != vt100::Color::Default)
            })
        })
    }

    /// Waits until the screen contains all of these words, and returns its text.
    pub(crate) async fn until(&self, words: &[&str]) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let text = self.text();
            if words.iter().all(|word| text.contains(word)) {
                return Ok(text);
            }
            ensure!(Instant::now() < end, "{words:?} do not stand there:\n{text}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends input.
    pub(crate) fn types(&mut self, keys: &[u8]) -> Result<()> {
        let keyboard = self.keyboard.as_mut().context("the keyboard")?;
        keyboard.write_all(keys)?;
        Ok(keyboard.flush()?)
    }

    /// The program's process.
    pub(crate) fn pid(&self) -> Result<rustix::process::Pid> {
        let pid = std::fs::read_to_string(self.pid.path())?.trim().parse()?;
        rustix::process::Pid::from_raw(pid).context("a process")
    }

    /// Waits for the program's end. Returns how it ended, the text on the screen, and whether the terminal is restored,
    /// with its former screen and cursor.
    pub(crate) async fn ended(mut self) -> Result<(ExitStatus, String, bool)> {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(Instant::now() < end, "it has not ended:\n{}", self.text());
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.reads.take().map(JoinHandle::join);
        let restored = self.with_screen(|screen| !screen.alternate_screen() && !screen.hide_cursor());
        Ok((status, self.text(), restored))
    }
}

impl Drop for Screen {
    /// Without its terminal the program ends, too.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}
