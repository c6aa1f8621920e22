//! Bundles of Kubernetes: the tool makes them, and a node stores them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use shepherd::model::artefact::{PIECE_BYTES, parse_digest};
use shepherd::model::kubernetes::archive;
use shepherd::model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};
use shepherd::model::kubernetes::version::ReleaseVersion;
use shepherd::model::role_declaration::Sha256;
use shepherd::model::signed_artefact::BUNDLE_NAME;
use shepherd::model::signed_artefact::signed_fields::ArtefactKind;
use shepherd::roleserver::cluster::kubernetes::bundle_store::{Bundle, BundleError, BundleStore};
use shepherd::roleserver::server_pool::ServerPool;
use shepherd::roleserver::signing_store::SigningStore;
use shepherd::roleserver::state_directory::StateDirectory;

use crate::harness::aloud::TestResult;
use crate::harness::kube_bundle;
use crate::harness::minisign::Signer;

fn digest_of(path: &Path) -> Result<Sha256> {
    let name = path.file_name().context("no name")?.to_string_lossy();
    parse_digest(&name).map_err(anyhow::Error::msg)
}

/// Puts a bundle on a node by hand.
fn put(bundles: &BundleStore, file: &Path) -> Result<Sha256> {
    let digest = digest_of(file)?;
    let place = bundles.archive_path(digest);
    std::fs::create_dir_all(place.parent().context("no directory")?)?;
    if place.exists() {
        std::fs::remove_file(&place)?;
    }
    std::fs::copy(file, place)?;
    Ok(digest)
}

fn read_version(bundle: &Bundle) -> Result<String> {
    let program = bundle.program_path(BundleComponent::KubeApiserver).map_err(anyhow::Error::msg)?;
    Ok(String::from_utf8(Command::new(program).arg("--version").output()?.stdout)?)
}

#[tokio::test]
async fn what_the_tool_makes_is_named_by_its_digest_and_runs_on_a_node() -> TestResult {
    let place = tempfile::tempdir()?;
    let one = kube_bundle::controllers(place.path(), "1.20.2")?;
    assert_eq!(kube_bundle::controllers(place.path(), "1.20.2")?, one, "the same files make another bundle");
    let other = kube_bundle::controllers(place.path(), "1.20.3")?;
    assert_ne!(one, other);

    // The first piece identifies a bundle: nobody has to fetch the rest for that.
    let bytes = std::fs::read(&one)?;
    let first = &bytes[..bytes.len().min(usize::try_from(PIECE_BYTES)?)];
    let manifest = archive::read_bundle_manifest(first).map_err(anyhow::Error::msg)?;
    assert_eq!(
        (manifest.name.as_str(), manifest.kubernetes),
        ("kubernetes-1.20.2-controllers", ReleaseVersion::new(1, 20, 2))
    );
    let own: ReleaseVersion = env!("CARGO_PKG_VERSION").parse()?;
    assert_eq!(manifest.check_supports(KubernetesDuty::Controller, own), Ok(()));
    assert!(manifest.check_supports(KubernetesDuty::Worker, own).is_err());

    let bundles = BundleStore::open(place.path().join("node"), ServerPool::default());
    let digest = put(&bundles, &one)?;
    let bundle = bundles.ensure_bundle(&digest).await?;
    assert_eq!(read_version(&bundle)?, "Kubernetes v1.20.2\n");
    assert_eq!(*bundle.manifest, manifest);
    let add_on = bundle.add_ons().first().context("it has no add-on")?;
    assert!(String::from_utf8(bundle.read_add_on(add_on)?)?.contains("ServiceAccount"));

    // An upgrade beside it, the way back, and a bundle that nothing goes back to any more.
    let next = put(&bundles, &other)?;
    assert_eq!(read_version(&bundles.ensure_bundle(&next).await?)?, "Kubernetes v1.20.3\n");
    bundles.remove_unneeded(&[digest, next]).await?;
    assert_eq!(read_version(&bundles.ensure_bundle(&digest).await?)?, "Kubernetes v1.20.2\n");
    bundles.remove_unneeded(&[next]).await?;
    assert!(!bundle.directory.exists());
    assert_eq!(read_version(&bundles.ensure_bundle(&next).await?)?, "Kubernetes v1.20.3\n");
    Ok(())
}

#[tokio::test]
async fn damaged_bundle_is_not_started_in_the_next_life() -> TestResult {
    let place = tempfile::tempdir()?;
    let file = kube_bundle::controllers(place.path(), "1.20.2")?;
    let directory = place.path().join("node");
    let bundles = BundleStore::open(directory.clone(), ServerPool::default());
    let digest = put(&bundles, &file)?;
    let bundle = bundles.ensure_bundle(&digest).await?;
    let program = bundle.program_path(BundleComponent::KubeApiserver).map_err(anyhow::Error::msg)?;
    // The length is the same: only the digest shows the damage.
    std::fs::write(&program, std::fs::read_to_string(&program)?.replace("1.20.2", "1.20.9"))?;

    let next_life = BundleStore::open(directory, ServerPool::default());
    let again = next_life.ensure_bundle(&digest).await;
    assert!(
        matches!(again, Err(BundleError::Unavailable { .. })),
        "a damaged program would be started: {again:?}"
    );
    assert!(!bundle.directory.exists());
    put(&next_life, &file)?;
    assert_eq!(read_version(&next_life.ensure_bundle(&digest).await?)?, "Kubernetes v1.20.2\n");
    Ok(())
}

/// A machine that has pinned a key unpacks what this key signed as this bundle, and nothing else.
#[tokio::test]
async fn only_a_bundle_that_a_pinned_key_signed_is_unpacked() -> TestResult {
    let (signer, thief) = (Signer::new()?, Signer::new()?);
    let place = tempfile::tempdir()?;
    let file = kube_bundle::controllers(place.path(), "1.20.2")?;
    let (content, directory) = (std::fs::read(&file)?, place.path().join("node"));
    let state = StateDirectory::from_path(place.path().to_owned());
    let signing = SigningStore::open(state);
    assert!(signing.accept_offer(&[signer.public_key()?], &[]), "it has to be saved");
    let bundles = BundleStore::open(directory.clone(), ServerPool::default()).with_signing(signing.clone());
    let comment = format!(
        "shepherd kind=bundle name=kubernetes-1.20.2-controllers version=1.20.2 architecture={} minimum-version=1.20.0",
        std::env::consts::ARCH
    );
    let refused = |from: &str, to: &str| signer.sign(&content, &comment.replace(from, to));
    for (what, signature, text) in [
        ("unsigned", String::new(), "it is not signed"),
        ("signed by a stranger", thief.sign(&content, &comment)?, "which is not one of the pinned keys"),
        ("another kind", refused("kind=bundle", "kind=release")?, "for kind release, and bundle is expected"),
        ("another bundle", refused("controllers", "workers")?, "for name kubernetes-1.20.2-workers, and"),
        ("another version", refused(" version=1.20.2", " version=1.20.9")?, "for version 1.20.9, and 1.20.2"),
        ("another architecture", refused(std::env::consts::ARCH, "sparc")?, "for architecture sparc, and"),
        ("another file", signer.sign(b"another file", &comment)?, "its signature is not valid"),
        ("cut off", signer.sign(&content[1..], &comment)?, "its signature is not valid"),
    ] {
        let digest = put(&bundles, &file)?;
        if !signature.is_empty() {
            std::fs::write(bundles.signature_path(digest), signature)?;
        }
        let error =
            bundles.ensure_bundle(&digest).await.err().with_context(|| format!("{what} was unpacked"))?;
        assert!(matches!(error, BundleError::Unavailable { .. }), "{what}: {error}");
        assert!(error.to_string().contains(text), "{what}: {error}");
        let left: Vec<_> = std::fs::read_dir(&directory)?.collect::<Result<_, _>>()?;
        assert_eq!(left.len(), 1, "{what}: something of it was unpacked: {left:?}");
        assert!(bundles.archive_path(digest).exists(), "{what}: what a person put there is deleted");
    }
    let digest = put(&bundles, &file)?;
    std::fs::write(bundles.signature_path(digest), signer.sign(&content, &comment)?)?;
    assert_eq!(read_version(&bundles.ensure_bundle(&digest).await?)?, "Kubernetes v1.20.2\n");
    assert!(!bundles.signature_path(digest).exists());
    // A newer bundle has proved itself. This one is the way back as long as it is here, and is not unpacked again.
    let minimum = bundles.minimum_version(digest).context("it was signed")?;
    assert_eq!(minimum, ReleaseVersion::new(1, 20, 0));
    signing.raise_minimum(ArtefactKind::Bundle, BUNDLE_NAME, ReleaseVersion::new(1, 20, 3));
    assert_eq!(read_version(&bundles.ensure_bundle(&digest).await?)?, "Kubernetes v1.20.2\n");
    bundles.remove_unneeded(&[]).await?;
    put(&bundles, &file)?;
    std::fs::write(bundles.signature_path(digest), signer.sign(&content, &comment)?)?;
    let error = bundles.ensure_bundle(&digest).await.err().context("an older bundle was unpacked")?;
    assert!(
        error.to_string().contains("its version is 1.20.2, and 1.20.3 is the lowest that is accepted"),
        "{error}"
    );
    Ok(())
}
