//! Services in a root filesystem that cannot be started, and archives that cannot be unpacked as they were packed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use model::role_declaration::privileges::{Capability, Privileges};
use model::role_declaration::{ProgramSource, RestartPolicy, Sha256};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use shepherd_roleserver::child::spec::ResourceLimits;
use shepherd_roleserver::cluster::services::artefact_store::ArtefactStore;
use shepherd_roleserver::cluster::services::desired::{DesiredService, RenderedService, ServiceId};
use shepherd_roleserver::cluster::services::rootfs::OciBundle;
use shepherd_roleserver::cluster::services::service_runtime::{ServiceHooks, ServiceOwner, ServiceRuntime};
use shepherd_roleserver::cluster::services::service_state::RunRecord;

use crate::host::Host;

fn service_with_capabilities(names: &[&str]) -> Result<DesiredService> {
    let requested: Result<BTreeSet<Capability>, _> = names.iter().map(|name| name.parse()).collect();
    let rendered = RenderedService {
        run: ProgramSource::RootFilesystem { archive: Sha256([1; 32]), program: "/bin/server".to_owned() },
        arguments: Vec::new(),
        environment: BTreeMap::new(),
        files: Vec::new(),
        user: "1000".to_owned(),
        privileges: Privileges { capabilities: requested?, ..Privileges::default() },
    };
    let digest = rendered.digest();
    Ok(DesiredService {
        id: ServiceId { role: "web".to_owned(), service: "server".to_owned() },
        revision: 1,
        rendered: Ok((rendered, digest)),
        declared: None,
        former: None,
        limits: ResourceLimits::default(),
        depends_on: BTreeSet::new(),
        check: None,
        restart: RestartPolicy::Always,
        is_task: false,
        stop_time: Duration::from_secs(10),
    })
}

/// Only a role server of root starts such services. Capabilities are those of a thread, so the test has one for itself.
#[test]
fn capability_that_the_role_server_lacks_is_named() -> Result<()> {
    if !testkit::skip::runs_as_root() {
        return Ok(());
    }
    let host = Host::new()?;
    let runtime = ServiceRuntime {
        owner: ServiceOwner::Declared,
        hooks: ServiceHooks::NONE,
        children: Arc::new(host.children.clone()),
        directory: host.path("services"),
        store: ArtefactStore(host.path("artefacts")),
    };
    let wanted = service_with_capabilities(&["CHOWN", "SYS_TIME"])?;
    let started = std::thread::spawn(move || -> Result<String> {
        let CapabilitySets { effective, permitted, inheritable } = capabilities(None)?;
        let left = !CapabilitySet::SYS_TIME;
        let lacking =
            CapabilitySets { effective: effective & left, permitted: permitted & left, inheritable };
        set_capabilities(None, lacking)?;
        let error = runtime.start_service(&wanted, None, &RunRecord::missing(wanted.id.clone())).err();
        Ok(error.context("it was started")?.to_string())
    });
    let error = started.join().map_err(|_| anyhow::anyhow!("the thread panicked"))??;
    assert!(error.starts_with("its declaration requests the capabilities SYS_TIME, which"), "{error}");
    Ok(())
}

/// `tar --format=posix --sparse` writes such entries: the name of the file is in a record, and its data begins with a
/// map of the holes.
#[test]
fn sparse_file_of_an_extended_header_is_refused_by_name() -> Result<()> {
    let place = tempfile::tempdir()?;
    let path = place.path().join("archive.tar");
    let mut builder = tar::Builder::new(fs::File::create(&path)?);
    builder.append_pax_extensions([
        ("GNU.sparse.major", &b"1"[..]),
        ("GNU.sparse.minor", &b"0"[..]),
        ("GNU.sparse.name", &b"etc/sparse.bin"[..]),
        ("GNU.sparse.realsize", &b"3145728"[..]),
    ])?;
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_uid(u64::from(rustix::process::getuid().as_raw()));
    header.set_gid(u64::from(rustix::process::getgid().as_raw()));
    header.set_size(4);
    builder.append_data(&mut header, "etc/GNUSparseFile.1/sparse.bin", &b"0\n0\n"[..])?;
    builder.finish()?;
    let bundle = OciBundle(place.path().join("bundle"));
    let unpacked = bundle.unpack_rootfs(&path, Sha256([3; 32]));
    let error = unpacked.err().context("it was unpacked as something else")?.to_string();
    assert!(error.contains("etc/GNUSparseFile.1/sparse.bin") && error.contains("GNU.sparse."), "{error}");
    assert!(!bundle.rootfs_path().join("etc").exists(), "a part of it was unpacked");
    Ok(())
}
