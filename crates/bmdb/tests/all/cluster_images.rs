//! Images of the etcd of a cluster: one counts once all its parts are stored, and nothing else stays for long.

use anyhow::{Context as _, Result};
use secrecy::ExposeSecret as _;
use shepherd_bmdb::cluster::image::{ImageSummary, NewImage};
use shepherd_bmdb::cluster::sealed_image::{PART_BYTES, PartPlace, seal_part, unseal_part};
use shepherd_bmdb::cluster::transitions::LEASE_KIND;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::fleet::retention::RetainedKind;
use shepherd_bmdb::fleet::secret::SecretsKey;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LeaseHolder};
use testkit::memory::peak_of;

/// A founded cluster with one snapshot: the cluster, and the snapshot.
async fn world(name: &str) -> Result<(Kit, Uuid, Uuid)> {
    let kit = Kit::new(name).await?;
    let cluster = kit.founded_cluster(1, 0).await?;
    let snapshot = Uuid::new_v4();
    sqlx::query(
        "INSERT INTO cluster_snapshot
         VALUES ($1, $2, clock_timestamp(), 'first', 7, 0, 10, 5, 3, '[]', decode(repeat('cd', 32), 'hex'))",
    )
    .bind(snapshot)
    .bind(cluster)
    .execute(&kit.pool)
    .await?;
    Ok((kit, cluster, snapshot))
}

fn summary(parts: u64) -> ImageSummary {
    ImageSummary { parts, bytes: 9, digest: [7; 32], revision: 12, etcd_version: "3.6.1".to_owned() }
}

/// Whether the last snapshot has an image.
async fn has_image(kit: &Kit) -> Result<bool> {
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    Ok(found.cluster.snapshots.last.context("no snapshot")?.has_image)
}

/// Deletes what is too old. Returns how many parts and images are left.
async fn collect_garbage(kit: &Kit) -> Result<(i64, i64)> {
    for kind in [RetainedKind::ImageParts, RetainedKind::Images] {
        kit.bmdb.delete_expired(kind, kind.batch()).await?;
    }
    let parts = kit.count("SELECT count(*) FROM cluster_image_part").await?;
    Ok((parts, kit.count("SELECT count(*) FROM cluster_image").await?))
}

#[tokio::test]
async fn image_counts_once_all_its_parts_are_stored_and_goes_with_its_snapshot() -> TestResult {
    let (kit, cluster, snapshot) = world("cluster_images_count").await?;
    let holder = LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    let (bmdb, lease) = (&holder.shepherd.bmdb, &holder.lease);
    let new = NewImage { id: Uuid::new_v4(), cluster, snapshot };
    bmdb.begin_cluster_image(lease, new).await?;
    for (number, sealed) in [(0, b"first"), (2, b"third")] {
        assert!(bmdb.store_image_part(new.id, number, sealed.to_vec()).await?);
    }
    let completed = bmdb.complete_cluster_image(lease, new.id, summary(3)).await?;
    assert!(!completed, "an image without its second part counts");
    assert!(!has_image(&kit).await?);
    // The answer to the first call was lost.
    for _ in 0..2 {
        assert!(bmdb.store_image_part(new.id, 1, b"second".to_vec()).await?);
    }
    assert!(bmdb.complete_cluster_image(lease, new.id, summary(3)).await?);
    assert!(has_image(&kit).await?);
    assert_eq!(collect_garbage(&kit).await?, (3, 1), "a completed image of a snapshot stays");
    assert!(!bmdb.store_image_part(new.id, 1, b"later".to_vec()).await?, "nothing changes it any more");
    assert_eq!(bmdb.read_image_part(new.id, 1).await?.as_deref(), Some(&b"second"[..]));
    assert_eq!(bmdb.read_image_part(new.id, 3).await?, None);
    bmdb.abandon_cluster_image(new.id).await?;
    assert_eq!(collect_garbage(&kit).await?, (3, 1), "a completed image was abandoned");
    sqlx::query("DELETE FROM cluster_snapshot").execute(&kit.pool).await?;
    assert_eq!(collect_garbage(&kit).await?, (0, 0), "it outlives its snapshot");
    Ok(holder.stop().await?)
}

#[tokio::test]
async fn unfinished_image_never_counts_and_is_collected() -> TestResult {
    let (kit, cluster, snapshot) = world("cluster_images_unfinished").await?;
    let holder = LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    let (bmdb, lease) = (&holder.shepherd.bmdb, &holder.lease);
    let [killed, frozen, last] = [(); 3].map(|()| NewImage { id: Uuid::new_v4(), cluster, snapshot });
    // A shepherd that dies leaves parts. They may belong to one that still works, so they stay for hours.
    bmdb.begin_cluster_image(lease, killed).await?;
    assert!(bmdb.store_image_part(killed.id, 0, b"part".to_vec()).await?);
    assert_eq!(collect_garbage(&kit).await?, (1, 1));
    let hours_ago = "UPDATE cluster_image SET begun_at = begun_at - INTERVAL '4 hours'";
    sqlx::query(hours_ago).execute(&kit.pool).await?;
    assert_eq!(collect_garbage(&kit).await?, (0, 0));
    // One that was frozen while another one began has no part of the image that counts.
    bmdb.begin_cluster_image(lease, frozen).await?;
    assert!(bmdb.store_image_part(frozen.id, 0, b"part".to_vec()).await?);
    bmdb.begin_cluster_image(lease, last).await?;
    assert!(!bmdb.store_image_part(frozen.id, 1, b"part".to_vec()).await?);
    assert!(!bmdb.complete_cluster_image(lease, frozen.id, summary(1)).await?);
    assert!(bmdb.store_image_part(last.id, 0, b"another".to_vec()).await?);
    assert_eq!(collect_garbage(&kit).await?, (1, 1));
    assert!(!has_image(&kit).await?);
    let other = shepherd_bmdb::engine::named_lease::NamedLease { fence: lease.fence - 1, ..lease.clone() };
    let late = bmdb.complete_cluster_image(&other, last.id, summary(1)).await;
    assert!(matches!(late, Err(BmdbError::LeaseLost)), "{late:?}");
    assert!(bmdb.complete_cluster_image(lease, last.id, summary(1)).await?);
    assert!(has_image(&kit).await?);
    Ok(holder.stop().await?)
}

/// Bytes that no compression makes fewer.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_be_bytes()
    };
    std::iter::repeat_with(next).flatten().take(bytes).collect()
}

/// An image of 64 MiB is sealed, stored, read and opened. The runtime has one thread, so that all of it is measured.
#[test]
fn image_is_stored_and_read_with_a_few_parts_in_memory() -> TestResult {
    const PARTS: u64 = 64;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Connections are dropped in it, too.
    let _entered = runtime.enter();
    let (kit, cluster, snapshot) = runtime.block_on(world("cluster_images_memory"))?;
    let name = cluster.to_string();
    let holder = runtime.block_on(LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &name))?;
    let (bmdb, lease) = (&holder.shepherd.bmdb, &holder.lease);
    let directory = tempfile::tempdir()?;
    let secrets = SecretsKey::open(&directory.path().join("secrets.key"))?;
    let new = NewImage { id: Uuid::new_v4(), cluster, snapshot };
    let part = noise(PART_BYTES);
    let place = |number: u64| {
        let last_of = Some(PARTS).filter(|parts| number + 1 == *parts);
        PartPlace { cluster, snapshot, image: new.id, number, last_of }
    };
    let work = async {
        bmdb.begin_cluster_image(lease, new).await?;
        for number in 0..PARTS {
            let sealed = seal_part(&secrets, &place(number), &part)?;
            assert!(bmdb.store_image_part(new.id, number, sealed).await?);
        }
        assert!(bmdb.complete_cluster_image(lease, new.id, summary(PARTS)).await?);
        for number in 0..PARTS {
            let sealed = bmdb.read_image_part(new.id, number).await?.context("a part is lost")?;
            assert!(unseal_part(&secrets, &place(number), &sealed)?.expose_secret() == part, "{number}");
        }
        anyhow::Ok(())
    };
    let (stored, peak) = peak_of(|| runtime.block_on(work));
    stored?;
    assert!(peak < 16 * PART_BYTES, "{peak} bytes were in memory");
    runtime.block_on(holder.stop())?;
    Ok(())
}
