//! Services with a root filesystem of their own, run by a real runc.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use shepherd::proto::curator::v1 as wire;

use super::node::Node;
use super::owner::Owner;
use super::services::{declare, every, founded, instance, until_nothing_is_left, until_status, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::skip;

/// Writes its observations into its own directory, leaves a process behind, and ends on SIGTERM.
const PROGRAM: &str = r#"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static volatile sig_atomic_t over;
static void end(int signal) { (void)signal; over = 1; }
/* Without a filter every user may make both calls: one changes nothing, the other turns a protection off. */
static int filtered(void) {
    int unshared = syscall(SYS_unshare, 0) < 0 && errno == EPERM;
    return unshared && syscall(SYS_personality, 0x0040000) < 0 && errno == EPERM;
}
int main(int count, char **words) {
    char text[100] = "";
    FILE *file;
    if (count > 1 && !strcmp(words[1], "check")) return access("up", F_OK) ? 1 : 0;
    signal(SIGTERM, end);
    file = fopen("/etc/app.conf", "r");
    if (!file || !fgets(text, sizeof text, file)) return 2;
    fclose(file);
    if (fork() == 0) for (;;) pause();
    file = fopen("up", "w");
    if (!file) return 3;
    fprintf(file, "pid %d, user %d, %s, %s, the root is %s, the host is %s, calls are %s\n", getpid(), getuid(), getenv("WHO"), text,
        open("/intruder", O_CREAT | O_WRONLY, 0600) < 0 && errno == EROFS ? "read-only" : "open", access("/var/lib", F_OK) ? "away" : "there",
        filtered() ? "filtered" : "open");
    fclose(file);
    while (!over) usleep(10000);
    fclose(fopen("ended", "w"));
    return 0;
}
"#;

/// An archive with that program alone, in the node's artefact store; its digest.
fn archive(node: &Node, name: &str) -> Result<String> {
    let place = tempfile::tempdir()?;
    let (source, program) = (place.path().join("program.c"), place.path().join("program"));
    std::fs::write(&source, PROGRAM)?;
    let made = Command::new("cc").arg("-static").arg("-o").arg(&program).arg(&source).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut builder = tar::Builder::new(Vec::new());
    for directory in ["bin", "etc"] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(0);
        builder.append_data(&mut header, directory, std::io::empty())?;
    }
    builder.append_path_with_name(&program, format!("bin/{name}"))?;
    let bytes = builder.into_inner()?;
    let digest = hex::encode(ring::digest::digest(&ring::digest::SHA256, &bytes));
    let artefacts = node.disk().join("artefacts");
    std::fs::create_dir_all(&artefacts)?;
    std::fs::write(artefacts.join(&digest), bytes)?;
    Ok(digest)
}

/// How many processes run the program of that name, at any path.
fn running(name: &str) -> usize {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let words = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    words.filter(|words| words.starts_with(format!("/bin/{name}\0").as_bytes())).count()
}

/// The fields of `/proc/PID/status` of the process of that name that is the service itself.
fn process_status(name: &str) -> Result<String> {
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if words.starts_with(format!("/bin/{name}\0").as_bytes()) {
            return Ok(std::fs::read_to_string(entry.path().join("status"))?);
        }
    }
    anyhow::bail!("no process runs {name}")
}

/// Control groups of services that this node's role server has created, in any hierarchy.
fn groups(node: &Node) -> Vec<PathBuf> {
    let family = node.places().instance_name();
    let (mut found, mut places) = (Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(place) = places.pop() {
        let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
        let inside = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        places.extend(inside.map(|entry| entry.path()));
        found.extend(places.iter().filter(|path| path.to_string_lossy().contains("box_server")).cloned());
    }
    found.retain(|path| path.to_string_lossy().contains(&family));
    found
}

fn service(archive: &str, name: &str, text: &str) -> wire::Service {
    let check = wire::ExecCheck { command: vec![format!("/bin/{name}"), "check".to_owned()] };
    wire::Service {
        name: "server".to_owned(),
        run: Some(wire::service::Run::RootFilesystem(wire::RootFilesystem {
            archive: archive.to_owned(),
            program: format!("/bin/{name}"),
        })),
        environment: [("WHO".to_owned(), "kim".to_owned())].into(),
        files: vec![wire::File { path: "/etc/app.conf".to_owned(), contents: text.to_owned(), mode: 0o400 }],
        user: "65533".to_owned(),
        limits: Some(wire::Limits { tasks: 20, ..Default::default() }),
        health_check: Some(every(500, wire::health_check::Probe::Exec(check))),
        ..Default::default()
    }
}

async fn wait_for_output(own: &Path, part: &str) -> Result<String> {
    let mut text = String::new();
    until("the program has written what it sees", async || {
        text = std::fs::read_to_string(own.join("up")).unwrap_or_default();
        Ok(text.contains(part))
    })
    .await
    .with_context(|| text.clone())?;
    Ok(text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_runs_in_a_root_filesystem_and_nothing_of_it_outlives_its_service() -> TestResult {
    let (owner, mut node): (Owner, Node) = founded().await?;
    // The name of the process. No other test uses it.
    let name = format!("box{}", std::process::id());
    let digest = archive(&node, &name)?;
    let first = declare(&owner, "box", &[service(&digest, &name, "one")]).await?;
    owner.roles(&node, &["box"], &[]).await?;
    if !skip::runs_as_root() {
        let waits = until_status(&owner, &node, "server", |status| status.message.contains("runs as root"));
        waits.await?;
        return Ok(());
    }
    let status = until_well(&owner, &node, "server", first).await?;
    assert_eq!(status.restarts, 0, "{}", status.message);
    let own = node.disk().join("services").join("box_server");
    let text = wait_for_output(&own, "one").await?;
    assert_eq!(
        text,
        "pid 1, user 65533, kim, one, the root is read-only, the host is away, calls are filtered\n"
    );
    let confined = process_status(&name)?;
    // 2 is a filter (proc(5)).
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"] {
        assert!(confined.contains(line), "{line} in {confined}");
    }
    let bundle = node.places().directory.join("box_server").join("bundle");
    assert_eq!(std::fs::metadata(&bundle)?.permissions().mode() & 0o777, 0o700);
    let runs = instance(&node, "box_server")?;
    assert_eq!(running(&name), 2);
    assert!(!groups(&node).is_empty());

    // Another role server adopts it.
    node.stop().await?;
    node.start()?;
    owner.until_well(1, 1).await?;
    until_well(&owner, &node, "server", first).await?;
    assert_eq!(instance(&node, "box_server")?, runs);

    // The process that represents it is killed: none of its processes is left when it starts again.
    runs.send_signal(rustix::process::Signal::KILL)?;
    let again = until_status(&owner, &node, "server", |status| {
        status.restarts > 0 && status.kind() == wire::service_status::Kind::Healthy
    });
    again.await?;
    assert_eq!(running(&name), 2, "what it left runs beside it");

    // Another file: the program receives SIGTERM, has its time to end, and starts again.
    std::fs::remove_file(own.join("ended")).ok();
    let second = declare(&owner, "box", &[service(&digest, &name, "two")]).await?;
    until_well(&owner, &node, "server", second).await?;
    wait_for_output(&own, "two").await?;
    assert!(own.join("ended").exists(), "the program of the previous declaration received no SIGTERM");
    assert_eq!(running(&name), 2);

    // An artefact that is not an archive is reported, and does not affect other services.
    let none = hex::encode(ring::digest::digest(&ring::digest::SHA256, b"no archive"));
    std::fs::write(node.disk().join("artefacts").join(&none), "no archive")?;
    let odd = wire::Service { name: "odd".to_owned(), ..service(&none, &name, "three") };
    declare(&owner, "box", &[service(&digest, &name, "two"), odd]).await?;
    until_status(&owner, &node, "odd", |status| status.message.contains("unpacking the archive")).await?;
    assert_eq!(running(&name), 2);

    owner.roles(&node, &[], &["box"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    assert_eq!((running(&name), groups(&node)), (0, Vec::new()));
    Ok(())
}
