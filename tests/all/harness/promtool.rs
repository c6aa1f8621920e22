//! `promtool`, which checks metrics and rules.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::harness::source;

/// Runs `promtool` with a text as input. Any output is a complaint.
pub(crate) fn promtool(arguments: &[&str], input: &str) -> Result<String> {
    let mut tool = Command::new("promtool")
        .args(arguments)
        .current_dir(source::root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("promtool is missing; install it with `tools/need promtool`")?;
    let mut writing = tool.stdin.take().context("its input is piped")?;
    let text = input.to_owned();
    let written = std::thread::spawn(move || writing.write_all(text.as_bytes()));
    let output = tool.wait_with_output()?;
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "promtool {arguments:?}: {}: {printed}", output.status);
    written.join().map_err(|_| anyhow::anyhow!("panicked"))??;
    Ok(printed)
}
