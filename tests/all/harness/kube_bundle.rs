//! Bundles of Kubernetes with scripts as programs, made by the tool that makes the real ones.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::harness::source;

/// A bundle for controllers of this version, in a directory of its own below `place`. Its name is its digest.
pub(crate) fn controllers(place: &Path, version: &str) -> Result<PathBuf> {
    let programs = place.join(format!("programs-{version}"));
    std::fs::create_dir_all(&programs)?;
    for name in ["kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        let path = programs.join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho Kubernetes v{version}\n"))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    }
    let dns = programs.join("dns.yaml");
    std::fs::write(
        &dns,
        "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: dns, namespace: kube-system}\n",
    )?;
    let output = Command::new("tools/kube-bundle")
        .arg("--controllers-only")
        .arg("--programs")
        .arg(&programs)
        .arg("--out")
        .arg(place.join("bundles"))
        .arg("--add-on")
        .arg(format!("dns={}", dns.display()))
        .current_dir(source::root())
        .stdin(Stdio::null())
        .output()
        .context("tools/kube-bundle")?;
    ensure!(output.status.success(), "tools/kube-bundle: {}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(printed.lines().last().context("tools/kube-bundle says no path")?))
}
