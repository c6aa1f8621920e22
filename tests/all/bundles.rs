//! Bundles of Kubernetes as the tool makes them and a node keeps them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use shepherd::model::artefact::{PIECE, read_digest};
use shepherd::model::declaration::Sha256;
use shepherd::model::kubernetes::archive;
use shepherd::model::kubernetes::bundle::{Component, Duty};
use shepherd::model::kubernetes::version::Version;
use shepherd::roleserver::cluster::kubernetes::bundles::{Bundle, BundleError, Bundles};
use shepherd::roleserver::shepherds::Shepherds;

use crate::harness::aloud::TestResult;
use crate::harness::kube_bundle;

fn digest_of(path: &Path) -> Result<Sha256> {
    let name = path.file_name().context("no name")?.to_string_lossy();
    read_digest(&name).map_err(anyhow::Error::msg)
}

/// Brings a bundle to a node by hand.
fn put(bundles: &Bundles, file: &Path) -> Result<Sha256> {
    let digest = digest_of(file)?;
    let place = bundles.place(digest);
    std::fs::create_dir_all(place.parent().context("no directory")?)?;
    std::fs::copy(file, place)?;
    Ok(digest)
}

fn said_by(bundle: &Bundle) -> Result<String> {
    let program = bundle.program(Component::KubeApiserver).map_err(anyhow::Error::msg)?;
    Ok(String::from_utf8(Command::new(program).arg("--version").output()?.stdout)?)
}

#[tokio::test]
async fn what_the_tool_makes_is_named_by_its_digest_and_runs_on_a_node() -> TestResult {
    let place = tempfile::tempdir()?;
    let one = kube_bundle::controllers(place.path(), "1.20.2")?;
    assert_eq!(kube_bundle::controllers(place.path(), "1.20.2")?, one, "the same files make another bundle");
    let other = kube_bundle::controllers(place.path(), "1.20.3")?;
    assert_ne!(one, other);

    // The first piece says what it is: nobody has to fetch the rest to know.
    let bytes = std::fs::read(&one)?;
    let first = &bytes[..bytes.len().min(usize::try_from(PIECE)?)];
    let manifest = archive::manifest(first).map_err(anyhow::Error::msg)?;
    assert_eq!(
        (manifest.name.as_str(), manifest.kubernetes),
        ("kubernetes-1.20.2-controllers", Version::new(1, 20, 2))
    );
    let own: Version = env!("CARGO_PKG_VERSION").parse()?;
    assert_eq!(manifest.check(Duty::Controller, own), Ok(()));
    assert!(manifest.check(Duty::Worker, own).is_err());

    let bundles = Bundles::open(place.path().join("node"), Shepherds::default());
    let digest = put(&bundles, &one)?;
    let bundle = bundles.have(&digest).await?;
    assert_eq!(said_by(&bundle)?, "Kubernetes v1.20.2\n");
    assert_eq!(*bundle.manifest, manifest);
    let add_on = bundle.add_ons().first().context("it has no add-on")?;
    assert!(String::from_utf8(bundle.read_add_on(add_on)?)?.contains("ServiceAccount"));

    // An upgrade beside it, the way back, and what nobody goes back to any more.
    let next = put(&bundles, &other)?;
    assert_eq!(said_by(&bundles.have(&next).await?)?, "Kubernetes v1.20.3\n");
    bundles.keep_only(&[digest, next]).await?;
    assert_eq!(said_by(&bundles.have(&digest).await?)?, "Kubernetes v1.20.2\n");
    bundles.keep_only(&[next]).await?;
    assert!(!bundle.directory.exists());
    assert_eq!(said_by(&bundles.have(&next).await?)?, "Kubernetes v1.20.3\n");
    Ok(())
}

#[tokio::test]
async fn damaged_bundle_is_not_started_in_the_next_life() -> TestResult {
    let place = tempfile::tempdir()?;
    let file = kube_bundle::controllers(place.path(), "1.20.2")?;
    let directory = place.path().join("node");
    let bundles = Bundles::open(directory.clone(), Shepherds::default());
    let digest = put(&bundles, &file)?;
    let bundle = bundles.have(&digest).await?;
    let program = bundle.program(Component::KubeApiserver).map_err(anyhow::Error::msg)?;
    // As long as it was: only its digest tells.
    std::fs::write(&program, std::fs::read_to_string(&program)?.replace("1.20.2", "1.20.9"))?;

    let next_life = Bundles::open(directory, Shepherds::default());
    let again = next_life.have(&digest).await;
    assert!(
        matches!(again, Err(BundleError::NotYet { .. })),
        "a damaged program would be started: {again:?}"
    );
    assert!(!bundle.directory.exists());
    put(&next_life, &file)?;
    assert_eq!(said_by(&next_life.have(&digest).await?)?, "Kubernetes v1.20.2\n");
    Ok(())
}
