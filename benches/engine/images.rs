//! What an image of the whole etcd of a cluster costs: memory and time, while it is taken and while it is restored.
//!
//! A shepherd is a process of its own. So is the simulator, in which the role servers of the machines run, with the curator
//! of the cluster in one of them. Each machine has an etcd of its own. What is compared is the most that a process had in
//! memory, as the kernel counts it, with what it had right before. The time of `etcdctl snapshot save` on the same etcd
//! is compared with that of the image, which is compressed, sealed and stored as well.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::json;
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::child::launch::read_record;
use shepherd::roleserver::cluster::etcd_member::{client_endpoint, client_socket};
use shepherd::roleserver::cluster::files::ClusterFiles;
use shepherd::simulator::fault_command::{FaultArgs, send_fault};
use tempfile::TempDir;
use testkit::etcd_program::etcdutl_program;
use tokio::process::Command;

use crate::Plan;
use crate::report::{Report, Target, progress};
use crate::server::Server;
use crate::site::{Program, Site, SiteOptions};

/// How much memory an image may cost a process, in MiB.
const MEMORY_LIMIT: f64 = 64.0;
/// Longest time of anything that is waited for.
const PATIENCE: Duration = Duration::from_mins(30);
/// Bytes of an object. Nothing makes them fewer.
const OBJECT_BYTES: usize = 256 << 10;
/// Objects that are written at a time.
const AT_ONCE: usize = 8;
/// One to restore the cluster, and one that is lost.
const MACHINES: u32 = 2;

#[derive(Parser)]
struct FaultLine {
    #[command(flatten)]
    fault: FaultArgs,
}

/// A site with machines that can be nodes.
struct Field {
    site: Site,
    // Dropped after the site: the role servers of the simulator would start them again.
    etcds: Etcds,
}

/// Ends the etcds of a site, which outlive its simulator.
struct Etcds {
    disks: PathBuf,
    /// It is removed after the records in it were read.
    _directory: Arc<TempDir>,
}

impl Drop for Etcds {
    fn drop(&mut self) {
        let machines = fs::read_dir(&self.disks).into_iter().flatten().flatten();
        let children =
            machines.flat_map(|machine| fs::read_dir(machine.path().join("children")).into_iter().flatten());
        for child in children.flatten() {
            if let Some(record) = read_record(&child.path().join("process.json")) {
                let _ = record.instance.stop(Duration::ZERO);
            }
        }
    }
}

impl Field {
    async fn start(server: &Server) -> Result<Self> {
        let flags =
            ["--persistent_agent_percent", "100", "--roleserver_path", env!("CARGO_BIN_EXE_roleserver")];
        let shepherd_flags = ["--heartbeat_interval=1s", "--recovery_silence_timeout=15s"];
        let options = SiteOptions {
            simulator_flags: &flags,
            shepherd_flags: &shepherd_flags,
            ..SiteOptions::new(MACHINES, 2)
        };
        let site = Site::start(server, "images", &options).await?;
        let disks = site.directory.path().join("fleet.json.disks");
        let etcds = Etcds { disks, _directory: site.directory.clone() };
        let field = Self { site, etcds };
        field.site.until_ready(MACHINES).await?;
        Ok(field)
    }

    async fn end(self) -> Result<()> {
        let Self { site, etcds } = self;
        let ended = site.end().await;
        drop(etcds);
        ended
    }

    /// Gives an order with `shepherdctl`.
    async fn ctl(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
            .arg("--direct")
            .args(arguments)
            .env("SHEPHERD_BMDB_URL", &self.site.bmdb_url)
            .stdin(Stdio::null())
            .output()
            .await?;
        ensure!(
            output.status.success(),
            "shepherdctl {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Waits until a statement returns true.
    async fn until(&self, what: &str, condition: &'static str) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !sqlx::query_scalar::<_, bool>(condition).fetch_one(&self.site.pool).await? {
            ensure!(Instant::now() < end, "waited in vain until {what}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Adds a bundle of Kubernetes without a program that runs: only a cluster with one has images.
    async fn add_bundle(&self) -> Result<()> {
        let manifest = json!({
            "format": 1, "name": "bundle", "kubernetes": "1.30.1", "needs_roleserver": "0.1.0", "add_ons": [], "images": [],
            "files": [{
                "component": "kube-apiserver", "path": "bin/kube-apiserver", "version": "1.30.1", "size": 3, "mode": "0755",
                "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            }],
        });
        let manifest = serde_json::to_vec(&manifest)?;
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (path, content) in [("manifest.json", manifest.as_slice()), ("bin/kube-apiserver", b"abc")] {
            let mut header = tar::Header::new_ustar();
            header.set_path(path)?;
            header.set_size(u64::try_from(content.len())?);
            header.set_mode(0o644);
            header.set_entry_type(tar::EntryType::Regular);
            header.set_cksum();
            archive.append(&header, content)?;
        }
        let file = self.site.directory.path().join("bundle");
        fs::write(&file, archive.into_inner()?.finish()?)?;
        self.ctl(&["artefacts", "add", file.to_str().context("a path")?, "--reason", "measuring"]).await?;
        Ok(())
    }

    /// Creates a cluster of one member. Returns the name of the member.
    async fn create_cluster(&self) -> Result<String> {
        self.add_bundle().await?;
        let create = ["cluster", "create", "ams", "--control-plane", "1", "--workers", "0"];
        let bundle = ["--kubernetes-bundle", "bundle", "--reason", "measuring"];
        self.ctl(&[&create[..], &bundle].concat()).await?;
        self.until("a cluster is founded", "SELECT count(*) = 1 FROM cluster WHERE voters_reached = 1")
            .await?;
        let member = "SELECT provider_id FROM machine_provided JOIN machine_cluster USING (machine_id)";
        Ok(sqlx::query_scalar(member).fetch_one(&self.site.pool).await?)
    }

    /// Orders the restore until it is accepted: not before the control plane was silent for a minute. Returns when the
    /// accepted order was given, and the memory right before it.
    async fn restore(&self) -> Result<(Instant, Resident)> {
        let end = Instant::now() + PATIENCE;
        loop {
            let (before, began) = (Resident::before(&self.site)?, Instant::now());
            match self.ctl(&["cluster", "restore", "ams", "--yes", "--reason", "measuring"]).await {
                Ok(answer) => {
                    ensure!(answer.contains("its Kubernetes objects come back"), "{answer}");
                    return Ok((began, before));
                }
                Err(refused) => {
                    ensure!(refused.to_string().contains("--bypass-quorum") && began < end, "{refused}");
                }
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    fn files(&self, machine: &str) -> ClusterFiles {
        ClusterFiles::in_state_directory(&self.etcds.disks.join(machine))
    }
}

/// Writes objects into the etcd of a machine.
async fn fill(files: &ClusterFiles, objects: u32) -> Result<()> {
    let client = Client::new(vec![client_endpoint(files)], Namespace::new("curator")?);
    let client = Arc::new(client.with_deadline(Duration::from_mins(1)));
    stream::iter(0..objects)
        .map(|number| {
            let client = client.clone();
            async move {
                let mut object = vec![0; OBJECT_BYTES];
                rand::fill(object.as_mut_slice());
                put(&client, &format!("/registry/secrets/{number:06}"), &object).await
            }
        })
        .buffer_unordered(AT_ONCE)
        .try_for_each(|()| async { Ok(()) })
        .await
}

/// Writes an object until etcd answers: the role server restarts its etcd when the settings change.
async fn put(client: &Client, key: &str, object: &[u8]) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match client.put_unguarded(key, object).await {
            Err(EtcdError::Unavailable { .. } | EtcdError::Deadline { .. }) if Instant::now() < end => {}
            written => return Ok(written.map(drop)?),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Memory of the two processes, in MiB.
struct Resident {
    shepherd: f64,
    machines: f64,
}

impl Resident {
    /// What they have now. Their peaks are counted from here on.
    fn before(site: &Site) -> Result<Self> {
        site.shepherd.forget_peak()?;
        site.simulator.forget_peak()?;
        Self::read(site, "VmRSS:")
    }

    fn read(site: &Site, field: &str) -> Result<Self> {
        let mebibytes = |program: &Program| Ok::<f64, anyhow::Error>(program.kibibytes(field)? / 1024.0);
        Ok(Self { shepherd: mebibytes(&site.shepherd)?, machines: mebibytes(&site.simulator)? })
    }

    /// Adds how much more they had at most since then.
    fn report_growth(&self, site: &Site, when: &str, report: &mut Report) -> Result<()> {
        let peak = Self::read(site, "VmHWM:")?;
        for (name, growth) in [
            ("the shepherd", peak.shepherd - self.shepherd),
            ("the curator and the role servers", peak.machines - self.machines),
        ] {
            let what = format!(
                "most that {name} had in memory beyond what there was before, while an image was {when}"
            );
            report.add(what, "MiB", &[growth.max(0.0)], Target::AtMost(MEMORY_LIMIT))?;
        }
        Ok(())
    }
}

/// How long `etcdctl snapshot save` takes, in seconds; `None` if there is no etcdctl.
async fn save_with_etcdctl(socket: &Path, file: &Path) -> Result<Option<f64>> {
    let began = Instant::now();
    let mut command = Command::new("etcdctl");
    command.arg(format!("--endpoints=unix://{}", socket.display())).args(["snapshot", "save"]).arg(file);
    let output = match command.env("ETCDCTL_API", "3").stdin(Stdio::null()).output().await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        output => output?,
    };
    ensure!(output.status.success(), "etcdctl: {}", String::from_utf8_lossy(&output.stderr));
    Ok(Some(began.elapsed().as_secs_f64()))
}

/// Measures one image, from the order of its snapshot to a cluster that was restored with it.
pub(crate) async fn measure(plan: &Plan, server: &Server, report: &mut Report) -> Result<()> {
    if etcdutl_program()?.is_none() {
        return progress("no image is measured: no etcdutl lies beside etcd; run `make kube-apiserver`");
    }
    report.section(
        "An image of the etcd of a cluster",
        "The etcd of a cluster of one member is filled with objects of a quarter of a MiB that cannot be compressed. A \
         snapshot with an image of it is ordered: the curator sends the image, and the shepherd compresses, seals and \
         stores it. Then the member is lost, and the cluster is restored with the image on another machine: the shepherd \
         sends it, and the role server there stores it and calls `etcdutl`. The curator and the role servers are in one \
         process, the simulator's. PostgreSQL does not wait for a disk, and both etcds do.",
    )?;
    progress("founding a cluster")?;
    let field = Field::start(server).await?;
    let member = field.create_cluster().await?;
    let (site, files) = (&field.site, field.files(&member));
    progress(&format!("filling its etcd with {} objects", plan.image_objects))?;
    fill(&files, plan.image_objects).await?;

    progress("taking an image")?;
    let before = Resident::before(site)?;
    field.ctl(&["cluster", "snapshot", "ams", "--reason", "measuring"]).await?;
    let taken = "SELECT count(*) = 1 FROM cluster_image JOIN cluster_snapshot USING (snapshot_id)
         WHERE why = 'ordered' AND completed_at IS NOT NULL";
    field.until("the image is stored", taken).await?;
    before.report_growth(site, "taken", report)?;
    let (bytes, seconds): (f64, f64) = sqlx::query_as(
        "SELECT i.bytes::FLOAT8, extract(epoch FROM i.completed_at - i.begun_at)::FLOAT8
         FROM cluster_image i JOIN cluster_snapshot s USING (snapshot_id)
         WHERE s.why = 'ordered' AND i.completed_at IS NOT NULL",
    )
    .fetch_one(&site.pool)
    .await?;
    report.add("size of the image", "MiB", &[bytes / f64::from(1 << 20)], Target::None)?;
    report.add("to take, seal and store it", "s", &[seconds], Target::None)?;
    let copy = site.directory.path().join("copy");
    match save_with_etcdctl(&client_socket(&files), &copy).await? {
        Some(took) => {
            report.add("`etcdctl snapshot save` on the same etcd", "s", &[took], Target::None)?;
            report.add("the image against that", "×", &[seconds / took], Target::None)?;
            fs::remove_file(copy)?;
        }
        None => progress("there is no etcdctl, so its time is not measured")?,
    }

    progress("losing the member")?;
    let line = FaultLine::try_parse_from(["fault", "--url", &site.simulator_url, &member, "power-fail"])?;
    send_fault(&line.fault).await?;
    let (began, before) = field.restore().await?;
    progress("restoring the cluster")?;
    let restored =
        "SELECT count(*) = 1 FROM cluster WHERE restored_at IS NOT NULL AND restoring_since IS NULL";
    field.until("the cluster is restored", restored).await?;
    let took = began.elapsed().as_secs_f64();
    before.report_growth(site, "restored", report)?;
    report.add("from the order to a restored cluster", "s", &[took], Target::None)?;
    field.end().await
}
