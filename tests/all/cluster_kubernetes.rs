//! Kubernetes of a cluster with real curators: they receive the desired setup, nodes get its roles, people get
//! certificates, keys are replaced, and each step happens in its order.
//!
//! No component runs here. Other tests check what nodes do with a bundle.

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use serde_json::Value;

use crate::clusters::{Field, machines};
use crate::harness::aloud::TestResult;

/// Adds a bundle with that version in its manifest, and one program.
pub(crate) fn add_bundle(field: &Field, name: &str, version: &str) -> Result<()> {
    let manifest = serde_json::json!({
        "format": 1, "name": name, "kubernetes": version, "needs_roleserver": "0.1.0", "add_ons": [], "images": [],
        "files": [{
            "component": "kube-apiserver", "path": "bin/kube-apiserver", "version": version, "size": 3, "mode": "0755",
            "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        }],
    });
    let text = serde_json::to_vec(&manifest)?;
    let mut builder =
        tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
    for (path, content) in [("manifest.json", text.as_slice()), ("bin/kube-apiserver", b"abc")] {
        let mut header = tar::Header::new_ustar();
        header.set_path(path)?;
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        header.set_cksum();
        builder.append(&header, content)?;
    }
    let file = field.fleet.directory().join(name);
    std::fs::write(&file, builder.into_inner()?.finish()?)?;
    let output =
        field.ctl(&["artefacts", "add", file.to_str().context("a path")?, "--reason", "a bundle"])?;
    assert!(output.contains(&format!("is added as a bundle of Kubernetes {version}")), "{output}");
    Ok(())
}

fn have(cluster: &Value, part: &str, role: &str) -> bool {
    let of = machines(cluster, part);
    !of.is_empty() && of.iter().all(|machine| machine["roles"].to_string().contains(role))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curators_get_the_settings_of_kubernetes_and_forget_them_when_no_node_runs_it() -> TestResult {
    let field = Field::start("cluster_kubernetes", 2).await?;
    add_bundle(&field, "k-1.30", "1.30.1")?;
    let output = field.ctl(&[
        "cluster",
        "create",
        "ams",
        "--control-plane",
        "1",
        "--workers",
        "1",
        "--kubernetes-bundle",
        "k-1.30",
        "--reason",
        "a hall",
    ])?;
    assert!(output.contains("with Kubernetes 1.30.1"), "{output}");
    let given = |cluster: &Value| {
        cluster["kubernetes"]["inSync"] == true
            && have(cluster, "control-plane", "kubernetes-controller")
            && have(cluster, "worker", "kubernetes-worker")
    };
    let cluster = field.until("its nodes have the roles", "ams", given).await?;
    assert_eq!(cluster["kubernetes"]["version"], "1.30.1", "{cluster:#}");
    let refused = field.ctl(&["artefacts", "delete", "k-1.30", "--reason", "old"]);
    let refused = refused.expect_err("the bundle of a cluster was removed").to_string();
    assert!(refused.contains("is the bundle of Kubernetes of the cluster ams"), "{refused}");

    let file = field.fleet.directory().join("ams.yaml");
    let path = file.to_str().context("a path")?;
    let kubeconfig =
        ["cluster", "kubeconfig", "ams", "--access", "viewer", "--holder", "kim", "--output-file", path];
    let output = field.ctl(&[&kubeconfig[..], &["--reason", "a look"]].concat())?;
    assert!(output.starts_with("kim reaches the API servers of the cluster ams as viewer"), "{output}");
    let text = std::fs::read_to_string(&file)?;
    let of = |key: &str| -> Result<Vec<u8>> {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(key)).context(key.to_owned())?;
        Ok(STANDARD.decode(line.trim())?)
    };
    assert!(text.contains("current-context: ams\n") && text.contains(":6443\n"), "{text}");
    CertificateDer::from_pem_slice(&of("client-certificate-data:")?)?;
    CertificateDer::from_pem_slice(&of("certificate-authority-data:")?)?;
    let key = of("client-key-data:")?;
    let key = PrivatePkcs8KeyDer::from_pem_slice(&key)?;
    let key = key.secret_pkcs8_der();
    // What is stored contains no key.
    let kept: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT public_key || certificate || convert_to(servers::TEXT || holder, 'UTF8') FROM cluster_kubernetes_user",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    assert_eq!(kept.len(), 1);
    let secret = &key[36..68];
    assert!(kept.iter().all(|row| !row.windows(32).any(|part| part == secret)), "the key went somewhere");

    // Keys are replaced, and the output states what the rotation waits for until it is complete.
    let rotate =
        ["cluster", "kubernetes", "rotate", "ams", "--keys", "clients", "--reason", "a laptop was stolen"];
    field.ctl(&rotate)?;
    let under_way = |cluster: &Value| {
        cluster["kubernetes"]["rotations"].to_string().contains("clients")
            && cluster["kubernetes"]["pendingRotations"].as_array().is_some_and(Vec::is_empty)
    };
    field.until("it is under way", "ams", under_way).await?;
    let described = field.ctl(&["cluster", "describe", "ams"])?;
    assert!(
        described.lines().any(|line| line.starts_with("replaced ") && line.contains("clients: ")),
        "{described}"
    );
    let again = field.ctl(&rotate)?;
    assert!(again.contains("already replaces the Kubernetes keys clients"), "{again}");

    // Kubernetes is removed: first the roles, then the curators' records.
    field.ctl(&["cluster", "kubernetes", "remove", "ams", "--yes", "--reason", "the trial is over"])?;
    let gone = |cluster: &Value| {
        let left = |machine: &Value| machine["roles"].to_string().contains("kubernetes");
        cluster["kubernetes"].is_null()
            && !cluster["machines"].as_array().is_none_or(|machines| machines.iter().any(left))
    };
    field.until("nothing of it is left", "ams", gone).await?;
    field.ctl(&["artefacts", "delete", "k-1.30", "--reason", "old"])?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_kubernetes").await?);
    field.ctl(&["cluster", "delete", "ams", "--yes", "--reason", "the trial is over"])?;
    field.fleet.until("it is gone", "SELECT count(*) = 0 FROM cluster").await?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_kubernetes_user").await?);
    Ok(())
}
