//! Tests of the bundle store.

use super::*;

use std::os::unix::fs::PermissionsExt as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use model::kubernetes::bundle_manifest::MANIFEST;
use serde_json::{Value, json};

use crate::cluster::kubernetes::bundle_store::unpack::{MANIFEST_DIGEST, RESERVE};

/// A bundle for tests: any manifest, and any entries after it.
struct BundleBuilder {
    manifest: Value,
    entries: Vec<(String, tar::EntryType, Vec<u8>)>,
}

impl BundleBuilder {
    /// A bundle that is accepted.
    fn valid(version: &str) -> Self {
        let files = [
            ("kube-apiserver", "bin/kube-apiserver", format!("#!/bin/sh\necho {version}\n")),
            ("cni-plugin", "cni/bridge", "plugin".repeat(200)),
        ];
        let entries: Vec<(String, tar::EntryType, Vec<u8>)> = files
            .iter()
            .map(|(_, path, content)| {
                ((*path).to_owned(), tar::EntryType::Regular, content.clone().into_bytes())
            })
            .chain([("add-ons/dns.yaml".to_owned(), tar::EntryType::Regular, b"kind: List\n".to_vec())])
            .collect();
        let digest = |place: usize| hex::encode(sha256(&entries[place].2).0);
        let programs: Vec<Value> = files
            .iter()
            .enumerate()
            .map(|(place, (component, path, content))| {
                json!({
                    "component": component, "path": path, "version": version, "sha256": digest(place),
                    "size": content.len(), "mode": "0755",
                })
            })
            .collect();
        let manifest = json!({
            "format": 1, "name": format!("test-{version}"), "kubernetes": version, "needs_roleserver": "0.1.0",
            "files": programs,
            "add_ons": [{ "name": "dns", "path": "add-ons/dns.yaml", "sha256": digest(2), "size": 11 }],
        });
        Self { manifest, entries }
    }

    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let text = serde_json::to_vec(&self.manifest).unwrap();
        let manifest = (MANIFEST.to_owned(), tar::EntryType::Regular, text);
        for (path, kind, content) in std::iter::once(&manifest).chain(&self.entries) {
            let mut header = tar::Header::new_ustar();
            // Set directly, because the library would not write some of these names.
            header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(*kind);
            header.set_mode(0o4777);
            let links = matches!(kind, tar::EntryType::Symlink | tar::EntryType::Link);
            if links {
                header.set_link_name(String::from_utf8_lossy(content).as_ref()).unwrap();
            }
            header.set_size(if links { 0 } else { content.len() as u64 });
            header.set_cksum();
            tar.append(&header, if links { &[][..] } else { content }).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }
}

/// A change to an unpacked bundle on the disk.
type Damage = fn(&Path);

/// A node without shepherds: archives are put there by hand.
struct Node {
    directory: tempfile::TempDir,
    bundles: BundleStore,
}

impl Node {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let bundles = BundleStore::open(directory.path().join("bundles"), ServerPool::default());
        Self { directory, bundles }
    }

    /// Starts the next life of the role server.
    fn restart(&mut self) {
        self.bundles = BundleStore::open(self.bundles.directory.clone(), ServerPool::default());
    }

    fn put_archive(&self, archive: &[u8]) -> Sha256 {
        let digest = sha256(archive);
        create_directory(&self.bundles.directory.join(ARCHIVES), 0o700).unwrap();
        fs::write(self.bundles.archive_path(digest), archive).unwrap();
        digest
    }

    /// All files below the directory, with their content.
    fn list_files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fn walk(directory: &Path, top: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if fs::symlink_metadata(&path).unwrap().is_dir() {
                    walk(&path, top, found);
                } else {
                    found.insert(
                        path.strip_prefix(top).unwrap().to_owned(),
                        fs::read(&path).unwrap_or_default(),
                    );
                }
            }
        }
        let mut found = BTreeMap::new();
        walk(self.directory.path(), self.directory.path(), &mut found);
        found
    }

    async fn rejection_message(&self, archive: &[u8]) -> String {
        let digest = self.put_archive(archive);
        let error = self.bundles.ensure_bundle(&digest).await.unwrap_err();
        assert!(matches!(error, BundleError::Rejected { .. }), "{error}");
        assert_eq!(self.bundles.ensure_bundle(&digest).await.unwrap_err(), error, "it is not tried again");
        assert_eq!(self.list_files(), BTreeMap::new(), "something of it stays: {error}");
        error.to_string()
    }
}

#[tokio::test]
async fn bundle_is_unpacked_once_and_verified_in_each_life() {
    let mut node = Node::new();
    let digest = node.put_archive(&BundleBuilder::valid("1.20.2").bytes());
    let bundle = node.bundles.ensure_bundle(&digest).await.unwrap();
    let program = bundle.program_path(BundleComponent::KubeApiserver).unwrap();
    assert_eq!(fs::read_to_string(&program).unwrap(), "#!/bin/sh\necho 1.20.2\n");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&program), 0o755, "the archive's own modes count for nothing");
    assert_eq!(mode(&bundle.cni_directory().join("bridge")), 0o755);
    assert_eq!(
        bundle.program_path(BundleComponent::Kubelet).unwrap_err(),
        "bundle test-1.20.2 holds no kubelet"
    );
    let [dns] = bundle.add_ons() else { panic!("{:?}", bundle.add_ons()) };
    assert_eq!(bundle.read_add_on(dns).unwrap(), b"kind: List\n");
    assert_eq!(mode(&bundle.directory.join(&dns.file.path)), 0o644);
    assert!(!node.bundles.archive_path(digest).exists(), "the archive takes room that nobody needs");
    let before = node.list_files();
    assert_eq!(node.bundles.ensure_bundle(&digest).await.unwrap(), bundle);
    node.restart();
    assert_eq!(node.bundles.ensure_bundle(&digest).await.unwrap(), bundle);
    assert_eq!(node.list_files(), before);
}

#[tokio::test]
async fn invalid_archive_is_rejected_and_nothing_of_it_stays() {
    let node = Node::new();
    let outside = node.directory.path().join("outside");
    let link = |entries: &mut Vec<(String, tar::EntryType, Vec<u8>)>, kind| {
        entries[0] = ("bin/kube-apiserver".to_owned(), kind, outside.to_str().unwrap().as_bytes().to_vec());
    };
    for (change, expected) in [
        (
            &(|making: &mut BundleBuilder| making.entries[0].0 = "../outside".to_owned())
                as &dyn Fn(&mut BundleBuilder),
            "in its place is \"../outside\"",
        ),
        (&|making| making.entries[0].0 = outside.to_str().unwrap().to_owned(), "in its place is \"/"),
        (&|making| making.manifest["files"][0]["path"] = json!("../outside"), "lies at bin/kube-apiserver"),
        (&|making| link(&mut making.entries, tar::EntryType::Symlink), "is no plain file"),
        (&|making| link(&mut making.entries, tar::EntryType::Link), "is no plain file"),
        (
            &|making| making.entries.insert(0, ("bin".to_owned(), tar::EntryType::Directory, Vec::new())),
            "\"bin\" of the archive is no plain file",
        ),
        (
            &|making| making.entries[0] = ("bin/kube-apiserver".to_owned(), tar::EntryType::Char, Vec::new()),
            "is no plain file",
        ),
        (&|making| making.entries.swap(0, 1), "in its place is \"cni/bridge\""),
        (&|making| drop(making.entries.pop()), "it ends before \"add-ons/dns.yaml\""),
        (
            &|making| making.entries.push(("bin/ctr".to_owned(), tar::EntryType::Regular, b"x".to_vec())),
            "it holds \"bin/ctr\", which its manifest does not name",
        ),
        (
            &|making| making.entries[0].2.push(b'x'),
            "of 22 bytes, and in its place is \"bin/kube-apiserver\" of 23",
        ),
        (&|making| making.entries[0].2[0] = b'x', "its digest is not that of the manifest"),
        (&|making| making.manifest["files"][0]["mode"] = json!("4755"), "is 0755, and not \"4755\""),
    ] {
        let text = node
            .rejection_message(&BundleBuilder::valid("1.20.2").with(|making| change(making)).bytes())
            .await;
        assert!(text.contains(expected), "{text}");
    }
    let good = BundleBuilder::valid("1.20.2").bytes();
    assert!(node.rejection_message(&good[..good.len() / 2]).await.contains("only a part of one"));
    assert!(node.rejection_message(b"#!/bin/sh\n").await.contains("gzip"));
    assert!(!outside.exists(), "something was written outside");
}

#[test]
fn archive_larger_than_declared_is_cut_at_the_declared_size() {
    let place = tempfile::tempdir().unwrap();
    // A thousand times the declared length: gzip compresses zeros well.
    let making = BundleBuilder::valid("1.20.2").with(|making| making.entries[1].2 = vec![0; 1_200_000]);
    let file = place.path().join("archive");
    fs::write(&file, making.bytes()).unwrap();
    let into = place.path().join("into");
    let Err(UnpackError::Invalid(reason)) = unpack_archive(&file, &into, None, free_bytes) else {
        panic!("it was unpacked")
    };
    assert!(reason.contains("\"cni/bridge\" of 1200 bytes, and in its place"), "{reason}");
    assert!(!into.join("cni/bridge").exists(), "it was written nevertheless");
}

#[test]
fn nothing_is_written_where_the_disk_has_no_room_for_all_of_it() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("archive");
    let making = BundleBuilder::valid("1.20.2");
    fs::write(&file, making.bytes()).unwrap();
    let size = making.entries.iter().map(|entry| entry.2.len() as u64).sum::<u64>();
    let into = place.path().join("into");
    let Err(UnpackError::Failed(text)) = unpack_archive(&file, &into, None, |_| Ok(RESERVE + size - 1))
    else {
        panic!("it was unpacked")
    };
    assert!(text.contains("has 256 MiB left, and 256 MiB must stay free: make room"), "{text}");
    assert_eq!(fs::read_dir(&into).unwrap().count(), 0);
    fs::remove_dir(&into).unwrap();
    unpack_archive(&file, &into, None, |_| Ok(RESERVE + size)).unwrap();
}

#[tokio::test]
async fn crash_leaves_a_whole_bundle_or_none() {
    let archive = BundleBuilder::valid("1.20.2").bytes();
    let digest = sha256(&archive);
    let name = hex::encode(digest.0);
    let reference = Node::new();
    reference.put_archive(&archive);
    reference.bundles.ensure_bundle(&digest).await.unwrap();
    let whole = reference.list_files();
    let copy = |node: &Node, name: &str| {
        for (path, content) in &whole {
            let inside = path.strip_prefix(format!("bundles/{}", hex::encode(digest.0))).unwrap();
            let path = node.bundles.directory.join(name).join(inside);
            create_directory(path.parent().unwrap(), 0o755).unwrap();
            fs::write(&path, content).unwrap();
            let mode = if inside.starts_with("bin") || inside.starts_with("cni") { 0o755 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
    };

    // Interrupted while unpacking, after each file and before the rename.
    for files in 0..=whole.len() {
        let mut node = Node::new();
        node.put_archive(&archive);
        copy(&node, &format!("{name}{NEW_SUFFIX}"));
        let held: Vec<PathBuf> = whole.keys().skip(files).cloned().collect();
        for path in held {
            let inside = path.strip_prefix(format!("bundles/{name}")).unwrap().to_owned();
            fs::write(node.bundles.directory.join(format!("{name}{NEW_SUFFIX}")).join(inside), "half")
                .unwrap();
        }
        node.restart();
        node.bundles.ensure_bundle(&digest).await.unwrap();
        assert_eq!(node.list_files(), whole, "{files}");
    }
    // Interrupted after the rename, before the archive was removed.
    let node = Node::new();
    node.put_archive(&archive);
    copy(&node, &name);
    node.bundles.ensure_bundle(&digest).await.unwrap();
    assert_eq!(node.list_files(), whole);
    // Interrupted while it is removed, after the rename.
    let node = Node::new();
    copy(&node, &name);
    node.bundles.ensure_bundle(&digest).await.unwrap();
    fs::rename(
        node.bundles.directory.join(&name),
        node.bundles.directory.join(format!("{name}{REMOVED_SUFFIX}")),
    )
    .unwrap();
    fs::remove_file(node.bundles.directory.join(format!("{name}{REMOVED_SUFFIX}/bin/kube-apiserver")))
        .unwrap();
    node.bundles.remove_unneeded(&[digest]).await.unwrap();
    assert_eq!(node.list_files(), BTreeMap::new());
}

#[tokio::test]
async fn damaged_bundle_is_removed_and_fetched_again() {
    let archive = BundleBuilder::valid("1.20.2").bytes();
    let digest = sha256(&archive);
    let damages: [Damage; 6] = [
        |directory| fs::write(directory.join("bin/kube-apiserver"), "#!/bin/sh\necho 1.20.3\n").unwrap(),
        |directory| fs::write(directory.join("cni/bridge"), "").unwrap(),
        |directory| fs::remove_file(directory.join("add-ons/dns.yaml")).unwrap(),
        |directory| fs::write(directory.join(MANIFEST), "{}").unwrap(),
        |directory| fs::remove_file(directory.join(MANIFEST_DIGEST)).unwrap(),
        |directory| {
            let program = directory.join("bin/kube-apiserver");
            fs::rename(&program, directory.join("x")).unwrap();
            std::os::unix::fs::symlink("../x", &program).unwrap();
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let mut node = Node::new();
        node.put_archive(&archive);
        let bundle = node.bundles.ensure_bundle(&digest).await.unwrap();
        let whole = node.list_files();
        damage(&bundle.directory);
        node.restart();
        let error = node.bundles.ensure_bundle(&digest).await.unwrap_err();
        assert!(matches!(error, BundleError::Unavailable { .. }), "{number}: {error}");
        assert!(error.to_string().contains("knows no shepherd"), "{number}: {error}");
        assert_eq!(node.list_files(), BTreeMap::new(), "{number}");
        node.put_archive(&archive);
        node.bundles.ensure_bundle(&digest).await.unwrap();
        assert_eq!(node.list_files(), whole, "{number}");
    }
}

#[tokio::test]
async fn unnamed_bundles_are_removed() {
    let node = Node::new();
    node.bundles.remove_unneeded(&[]).await.unwrap();
    let mut digests = Vec::new();
    for version in ["1.20.1", "1.20.2", "1.20.3"] {
        let digest = node.put_archive(&BundleBuilder::valid(version).bytes());
        digests.push((digest, node.bundles.ensure_bundle(&digest).await.unwrap()));
    }
    let part = node.bundles.archive_store().part_path(digests[0].0);
    fs::write(&part, "half").unwrap();
    let running = File::open(digests[0].1.program_path(BundleComponent::KubeApiserver).unwrap()).unwrap();
    node.bundles.remove_unneeded(&[digests[1].0, digests[2].0]).await.unwrap();
    assert!(!digests[0].1.directory.exists() && !part.exists());
    assert_eq!(std::io::read_to_string(running).unwrap(), "#!/bin/sh\necho 1.20.1\n");
    assert!(node.bundles.ensure_bundle(&digests[0].0).await.is_err(), "it is remembered as if it were here");
    for (digest, bundle) in &digests[1..] {
        assert_eq!(node.bundles.ensure_bundle(digest).await.as_ref(), Ok(bundle), "current and previous");
        assert!(bundle.program_path(BundleComponent::KubeApiserver).unwrap().exists());
    }
}

#[tokio::test]
async fn concurrent_requests_get_the_same_bundle() {
    let node = Node::new();
    let digest = node.put_archive(&BundleBuilder::valid("1.20.2").bytes());
    let (one, other) = (node.bundles.clone(), node.bundles.clone());
    let (one, other) = tokio::join!(one.ensure_bundle(&digest), other.ensure_bundle(&digest));
    assert_eq!(one.unwrap(), other.unwrap());
}
