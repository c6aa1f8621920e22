//! Bundles of an upgrade: their version, and how long they are kept.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use model::role_declaration::Sha256;
use model::signed_artefact::signing_key::SigningKey;
use model::signed_artefact::signing_trust::SigningTrust;
use shepherd_bmdb::cluster::kubernetes::desired::KubernetesPatch;
use shepherd_bmdb::cluster::upgrade::NewUpgrade;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::fleet::artefact::upload::UploadState;
use shepherd_bmdb::orders::order::OrderResult;

use super::{bundle, name, order, spec, split_order_result, to, with_bundle};
use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundle_and_add_ons_stay_for_as_long_as_a_cluster_has_them() -> TestResult {
    let kit = Kit::new("kubernetes_artefacts").await?;
    bundle(&kit, 'a', "1.30.1").await?;
    bundle(&kit, 'b', "1.31.0").await?;
    bundle(&kit, 'c', "1.0.0").await?;
    kit.bmdb.create_cluster(order("Create"), spec(1, 0), Some(with_bundle("k-1.30.1"))).await?;
    let add_on = KubernetesPatch {
        add_ons: BTreeMap::from([("dns".to_owned(), "k-1.0.0".to_owned())]),
        ..KubernetesPatch::default()
    };
    kit.bmdb.set_kubernetes(order("Set"), name(), add_on).await?;
    let removed = async |artefact: &str| {
        let removed = kit.bmdb.delete_artefact(order("Delete"), artefact.to_owned()).await;
        split_order_result(removed, |carried| carried.outcome.message)
    };
    for artefact in ["k-1.30.1", "k-1.0.0"] {
        let (why, words) =
            removed(artefact).await?.err().with_context(|| format!("{artefact} of a cluster was removed"))?;
        assert_eq!(why, "IN_USE", "{words}");
        assert!(words.contains("cluster ams"), "{words}");
    }
    // Another bundle is no setting.
    let other = kit.bmdb.set_kubernetes(order("Set"), name(), with_bundle("k-1.31.0")).await;
    let (why, words) = split_order_result(other, |carried| carried.outcome.message)?
        .err()
        .context("all nodes would change at once")?;
    assert_eq!(why, "ANOTHER_BUNDLE", "{words}");
    // Neither are the ranges, once there are any.
    let range = KubernetesPatch { pod_range: Some("10.64.0.0/12".to_owned()), ..KubernetesPatch::default() };
    let (why, _) =
        split_order_result(kit.bmdb.set_kubernetes(order("Set"), name(), range).await, |carried| {
            carried.outcome.message
        })?
        .err()
        .context("a range was changed")?;
    assert_eq!(why, "FIXED");
    removed("k-1.31.0").await?.map_err(|(_, words)| anyhow::anyhow!(words))?;
    let without =
        KubernetesPatch { remove_add_ons: BTreeSet::from(["dns".to_owned()]), ..KubernetesPatch::default() };
    kit.bmdb.set_kubernetes(order("Set"), name(), without).await?;
    removed("k-1.0.0").await?.map_err(|(_, words)| anyhow::anyhow!(words))?;
    Ok(())
}

/// Without keys, as for the other tests here, a shepherd verifies nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_gets_no_bundle_that_a_key_of_the_shepherd_has_not_signed() -> TestResult {
    let kit = Kit::new("kubernetes_unsigned").await?;
    bundle(&kit, 'a', "1.30.1").await?;
    bundle(&kit, 'b', "1.31.0").await?;
    let key = SigningKey::parse("RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c");
    let trust = SigningTrust::pinning(vec![key.map_err(anyhow::Error::msg)?]);
    let patch = || KubernetesPatch { trust: trust.clone(), ..with_bundle("k-1.30.1") };
    let reason = |ordered: Result<OrderResult, BmdbError>| {
        split_order_result(ordered, |carried| carried.outcome.message)?
            .err()
            .context("an unsigned bundle was assigned")
    };
    let created = kit.bmdb.create_cluster(order("Create"), spec(1, 0), Some(patch())).await;
    let (why, words) = reason(created)?;
    assert_eq!(why, "NOT_SIGNED", "{words}");
    assert!(words.starts_with("no cluster gets the bundle k-1.30.1: it is not signed"), "{words}");
    assert_eq!(kit.count("SELECT count(*) FROM cluster").await?, 0, "nothing is half done");
    kit.bmdb.create_cluster(order("Create"), spec(1, 0), None).await?;
    let (why, words) = reason(kit.bmdb.set_kubernetes(order("Set"), name(), patch()).await)?;
    assert_eq!(why, "NOT_SIGNED", "{words}");
    let refused =
        "SELECT count(*) FROM audit WHERE outcome = 'refused' AND message LIKE 'no cluster gets the bundle%'";
    assert_eq!(kit.count(refused).await?, 2, "both are in the audit");

    kit.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = true).await?;
    kit.bmdb.set_kubernetes(order("Set"), name(), patch()).await?;
    kit.bmdb.change_policy("test", |policy| policy.allow_unsigned_releases = false).await?;
    let founded = "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = 'ca', curators = '[]'";
    sqlx::query(founded).execute(&kit.pool).await?;
    let upgrade = NewUpgrade { trust: trust.clone(), ..to("k-1.31.0") };
    let (why, words) = reason(kit.bmdb.upgrade_cluster(order("Upgrade"), name(), upgrade).await)?;
    assert_eq!(why, "NOT_SIGNED", "{words}");
    assert!(words.starts_with("no cluster gets the bundle k-1.31.0"), "{words}");
    Ok(())
}

/// The metadata in the archive of a bundle is read when the bundle is added, by its uploader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn version_of_a_bundle_is_read_when_it_is_added() -> TestResult {
    let kit = Kit::new("kubernetes_manifest").await?;
    let manifest = serde_json::json!({
        "format": 1, "name": "test", "kubernetes": "1.20.2", "needs_roleserver": "0.1.0", "add_ons": [], "images": [],
        "files": [{
            "component": "kube-apiserver", "path": "bin/kube-apiserver", "version": "1.20.2", "size": 3, "mode": "0755",
            "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        }],
    });
    let archive = |files: &[(&str, &[u8])]| -> Result<Vec<u8>> {
        let mut builder =
            tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        for (path, content) in files {
            let mut header = tar::Header::new_ustar();
            header.set_path(path)?;
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_entry_type(tar::EntryType::Regular);
            header.set_cksum();
            builder.append(&header, *content)?;
        }
        Ok(builder.into_inner()?.finish()?)
    };
    let text = serde_json::to_vec(&manifest)?;
    let bundle = archive(&[("manifest.json", &text), ("bin/kube-apiserver", b"abc")])?;
    for (name, bytes, expected) in
        [("bundle", bundle, Some("1.20.2")), ("other", b"no archive".to_vec(), None)]
    {
        let digest = ring::digest::digest(&ring::digest::SHA256, &bytes);
        let sha256 = Sha256(digest.as_ref().try_into()?);
        let UploadState::Missing(missing) =
            kit.bmdb.begin_artefact_upload(sha256, bytes.len() as u64).await?
        else {
            panic!("it is there");
        };
        assert_eq!(missing, [0]);
        kit.bmdb.store_artefact_piece(sha256, 0, bytes).await?;
        kit.bmdb.add_artefact(order("Add"), sha256, name.to_owned()).await?;
        let known: Option<String> = sqlx::query_scalar("SELECT kubernetes FROM artefact WHERE name = $1")
            .bind(name)
            .fetch_one(&kit.pool)
            .await?;
        assert_eq!(known.as_deref(), expected, "{name}");
    }
    Ok(())
}
