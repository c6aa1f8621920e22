//! The server that everything is measured on, and pgbench beside it.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd::bmdb::connection::private_postgres::programs;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

/// Clients of pgbench, and of our own cycles.
pub(crate) const CLIENTS: usize = 8;
/// Ticks of a processor's time in a second, as `/proc` counts them for programs (`USER_HZ`).
const TICKS: f64 = 100.0;
/// The least that could record one work item: two rows in one commit.
const FLOOR: &str = "\\set machine random(1, 1000000000)
BEGIN;
INSERT INTO floor_work VALUES (:machine, 1, now());
INSERT INTO floor_history VALUES (:machine, 1, 'Started', now());
COMMIT;
";

/// Settings of the server that the report lists.
const SETTINGS: [&str; 8] = [
    "autovacuum",
    "fsync",
    "full_page_writes",
    "max_connections",
    "shared_buffers",
    "shared_preload_libraries",
    "synchronous_commit",
    "work_mem",
];

/// A private PostgreSQL. Most is measured on one that does not wait for its disk, so that what is compared is
/// work and not a disk's patience: for the ratios this is the harder way.
pub(crate) struct Server {
    postgres: PrivatePostgres,
    pgbench: PathBuf,
    script: tempfile::NamedTempFile,
    /// Owns the directory of a persistent server, and removes it with the server.
    _kept: Option<tempfile::TempDir>,
}

impl Server {
    /// Starts a server that does not wait for its disk.
    pub(crate) async fn start() -> Result<Self> {
        Self::with(ServerStorage::Temporary, None).await
    }

    /// Starts a server whose commits are on its disk before it answers them.
    pub(crate) async fn start_durable() -> Result<Self> {
        let kept = tempfile::tempdir()?;
        Self::with(ServerStorage::Persistent(kept.path().join("postgres")), Some(kept)).await
    }

    async fn with(storage: ServerStorage, kept: Option<tempfile::TempDir>) -> Result<Self> {
        let programs = programs::find_programs().pop().context("no PostgreSQL server is installed")?;
        let pgbench = programs.path("pgbench");
        ensure!(
            pgbench.is_file(),
            "pgbench is part of PostgreSQL's package, and {} is not there",
            pgbench.display()
        );
        let options = PrivatePostgresOptions { storage, max_connections: 200 };
        let postgres = PrivatePostgres::start(options).await?;
        let script = tempfile::NamedTempFile::new()?;
        fs::write(script.path(), FLOOR)?;
        postgres.create_database("floor").await?;
        let server = Self { postgres, pgbench, script, _kept: kept };
        let options: PgConnectOptions = server.url("floor").parse()?;
        let mut connection = options.connect().await?;
        sqlx::raw_sql(
            "CREATE TABLE floor_work (machine INT8, fence INT8, at TIMESTAMPTZ);
             CREATE TABLE floor_history (machine INT8, fence INT8, event TEXT, at TIMESTAMPTZ)",
        )
        .execute(&mut connection)
        .await?;
        connection.close().await?;
        Ok(server)
    }

    pub(crate) fn url(&self, database: &str) -> String {
        self.postgres.url(database)
    }

    pub(crate) async fn create_database(&self, name: &str) -> Result<()> {
        Ok(self.postgres.create_database(name).await?)
    }

    pub(crate) async fn stop(self) -> Result<()> {
        Ok(self.postgres.stop().await?)
    }

    /// Two-insert commits a second.
    pub(crate) async fn floor(&self, lasts: Duration) -> Result<f64> {
        let output = tokio::process::Command::new(&self.pgbench)
            .args(["--no-vacuum", "--protocol=prepared", "--jobs=2"])
            .arg(format!("--client={CLIENTS}"))
            .arg(format!("--time={}", lasts.as_secs().max(1)))
            .arg("--file")
            .arg(self.script.path())
            .arg(self.url("floor"))
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let tps =
            printed.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
        tps.with_context(|| format!("pgbench printed {printed}{}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Processor seconds that the server has used, those of backends that have ended included.
    pub(crate) fn processor_seconds(&self) -> Result<f64> {
        let data = self.postgres.log().parent().context("a log has a directory")?.join("data");
        let mut seconds = 0.0;
        for entry in fs::read_dir("/proc")? {
            let process = entry?.path();
            if fs::read_link(process.join("cwd")).is_ok_and(|works_in| works_in == data) {
                // One that ends meanwhile is counted by its parent.
                seconds += processor_seconds(&process, true).unwrap_or(0.0);
            }
        }
        Ok(seconds)
    }

    /// What was measured, and with what.
    pub(crate) async fn versions(&self) -> Result<Vec<(&'static str, String)>> {
        let options: PgConnectOptions = self.url("postgres").parse()?;
        let mut connection = options.connect().await?;
        let postgres: String = sqlx::query_scalar("SELECT version()").fetch_one(&mut connection).await?;
        let day: String =
            sqlx::query_scalar("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')")
                .fetch_one(&mut connection)
                .await?;
        let set: Vec<String> = sqlx::query_scalar(
            "SELECT name || ' ' || current_setting(name) FROM pg_settings WHERE name = ANY ($1) ORDER BY name",
        )
        .bind(SETTINGS.as_slice())
        .fetch_all(&mut connection)
        .await?;
        connection.close().await?;
        let line = |file: &str, name: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let found = text.lines().find(|line| line.starts_with(name));
            found
                .and_then(|line| line.split_once(':'))
                .map_or_else(String::new, |(_, value)| value.trim().to_owned())
        };
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        let processors = std::thread::available_parallelism()?.get();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or_default().to_owned();
        Ok(vec![
            ("begun", format!("{day} UTC")),
            ("processor", format!("{processors} × {}", line("/proc/cpuinfo", "model name"))),
            ("memory", line("/proc/meminfo", "MemTotal")),
            ("kernel", kernel.trim().to_owned()),
            ("load of the host before", load),
            ("PostgreSQL", postgres.split(" on ").next().unwrap_or_default().to_owned()),
            ("its settings", format!("{}; else those of its package", set.join(", "))),
            ("shepherd", format!("{}, commit {}, {build} build", env!("CARGO_PKG_VERSION"), commit())),
        ])
    }
}

/// The commit that was measured, and whether there was more than it.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let ran =
            Command::new("git").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        ran.status.success().then(|| String::from_utf8_lossy(&ran.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".to_owned() };
    // What a run writes is no change of what is measured.
    let pages = [":(exclude)BENCHMARKS.md", ":(exclude)docs/benchmarks"];
    let changed = git(&[&["status", "--porcelain", "--", "."], pages.as_slice()].concat());
    if changed.is_none_or(|changed| !changed.is_empty()) { commit + " with changes" } else { commit }
}

/// Processor seconds of this process.
pub(crate) fn own_processor_seconds() -> Result<f64> {
    processor_seconds(std::path::Path::new("/proc/self"), false).context("/proc/self/stat")
}

/// Processor seconds that a process has used; `None` if it does not exist.
pub(crate) fn processor_seconds(process: &std::path::Path, with_children: bool) -> Option<f64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // utime, stime, cutime, cstime.
    let counted = if with_children { &fields[11..15] } else { &fields[11..13] };
    Some(counted.iter().filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS)
}
