//! Artefacts that machines fetch over the agent channel, from any shepherd. The client proves that it is a machine.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, anyhow, ensure};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::fleet::artefact::upload::UploadState;
use shepherd::bmdb::fleet::retention::RetainedKind;
use shepherd::bmdb::orders::order::{Actor, Order, request_digest};
use shepherd::model::artefact::{MAX_BYTES, PIECE_BYTES, piece_count};
use shepherd::model::byte_size::ByteSize;
use shepherd::model::issues::find_issues;
use shepherd::model::kubernetes::bundle_manifest::BundleComponent;
use shepherd::model::role_declaration::{RoleDeclaration, Sha256};
use shepherd::proto::agent::v1::FetchArtefactRequest;
use shepherd::roleserver::cluster::kubernetes::bundle_store::BundleStore;
use shepherd::roleserver::server_pool::{FetchError, ServerEndpoint, ServerEndpoints, ServerPool};
use sqlx::PgPool;
use testkit::declaration::web_role;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::{Code, Status};

use crate::bmdb_kit::until;
use crate::harness::aloud::TestResult;
use crate::harness::callback::{Client, Listener, TestAgent, provided, settings, untold};
use crate::harness::kube_bundle;
use crate::harness::postgres::TestDatabase;

struct World {
    listener: Listener,
    pool: PgPool,
    directory: tempfile::TempDir,
    _database: TestDatabase,
}

impl World {
    async fn new(name: &str) -> Result<Self> {
        let database = TestDatabase::create(name).await?;
        let directory = tempfile::tempdir()?;
        let listener = Listener::start(&database, settings(directory.path())?).await?;
        let pool = database.pool().await?;
        Ok(Self { listener, pool, directory, _database: database })
    }

    fn address(&self) -> SocketAddr {
        self.listener.server.local_addr
    }

    /// The shepherds of a machine, by these addresses.
    fn shepherds(&self, agent: &TestAgent, ways: &[SocketAddr]) -> Result<ServerPool> {
        let ca_certificates = self.listener.server.current_ca_certificates();
        let way = |way: &SocketAddr| ServerEndpoint {
            endpoint: way.to_string(),
            ca_certificates: ca_certificates.clone(),
        };
        let shepherds = ServerPool::default();
        shepherds.set_endpoints(ServerEndpoints {
            machine_id: agent.machine,
            identity: agent.identity.clone(),
            time: untold()?,
            endpoints: ways.iter().map(way).collect(),
        });
        Ok(shepherds)
    }
}

/// A content of which no two pieces are equal.
fn content(size: u64) -> Vec<u8> {
    // At the beginning of each piece, bytes that could be decoded as very many empty fields.
    let odd = |at: u64| u8::try_from((at.wrapping_mul(2_654_435_761) >> 13) & 0xff).unwrap_or_default();
    let byte = |at: u64| if at % PIECE_BYTES < 40_000 { [10, 0][usize::from(at % 2 == 1)] } else { odd(at) };
    (0..size).map(byte).collect()
}

fn sha256(bytes: &[u8]) -> Sha256 {
    Sha256(request_digest(bytes))
}

fn order() -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "test".to_owned(),
        target: "an artefact".to_owned(),
        reason: "a test".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}

/// Uploads all of it, without the order to add it.
async fn bring(bmdb: &Bmdb, sha256: Sha256, bytes: &[u8]) -> Result<()> {
    let size = u64::try_from(bytes.len())?;
    let missing: Vec<u64> = (0..piece_count(size)).collect();
    assert_eq!(bmdb.begin_artefact_upload(sha256, size).await?, UploadState::Missing(missing));
    for (number, piece) in bytes.chunks(usize::try_from(PIECE_BYTES)?).enumerate() {
        bmdb.store_artefact_piece(sha256, u64::try_from(number)?, piece.to_vec()).await?;
    }
    Ok(())
}

async fn add(bmdb: &Bmdb, bytes: &[u8]) -> Result<Sha256> {
    let sha256 = sha256(bytes);
    bring(bmdb, sha256, bytes).await?;
    bmdb.add_artefact(order(), sha256, "one".to_owned()).await?;
    Ok(sha256)
}

/// A proxy to a server that ends each connection once it has carried this many bytes from there.
async fn breaking_off(to: SocketAddr, after: u64) -> Result<(SocketAddr, Arc<AtomicU64>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let carried = Arc::<AtomicU64>::default();
    let counter = carried.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(to).await else { return };
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            let counter = counter.clone();
            let up = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let mut left = after;
            let mut buffer = [0; 8 << 10];
            while let Ok(read) = from_server.read(&mut buffer).await {
                let read = u64::try_from(read).unwrap_or_default().min(left);
                left -= read;
                counter.fetch_add(read, Ordering::SeqCst);
                let part = &buffer[..usize::try_from(read).unwrap_or_default()];
                if to_client.write_all(part).await.is_err() || left == 0 || read == 0 {
                    break;
                }
            }
            up.abort();
        }
    });
    Ok((address, carried))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn artefact_goes_on_at_another_shepherd_where_it_broke_off() -> TestResult {
    let world = World::new("artefacts_fetched").await?;
    // Wherever it breaks off, more is missing than all buffers on the way hold: the sender must notice that it broke.
    let bytes = content(64 * PIECE_BYTES + 7);
    let digest = add(&world.listener.bmdb, &bytes).await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let path = world.directory.path().join("part");

    let (bad, carried) = breaking_off(world.address(), 5 * PIECE_BYTES).await?;
    let failed = world.shepherds(&agent, &[bad])?.fetch_artefact(digest, &path).await;
    let FetchError::Failed(text) = failed.err().context("a way that breaks off brought all of it")? else {
        return Err(anyhow::anyhow!("it is there").into());
    };
    assert!(text.starts_with(&format!("fetching it from shepherd {bad} failed: ")), "{text}");
    let there = std::fs::metadata(&path)?.len();
    assert!((PIECE_BYTES..5 * PIECE_BYTES).contains(&there), "{there} bytes came");
    assert_eq!(std::fs::read(&path)?, bytes[..usize::try_from(there)?], "what came is not a part of it");

    let before = carried.load(Ordering::SeqCst);
    let (counting, rest) = breaking_off(world.address(), u64::MAX).await?;
    let length = world.shepherds(&agent, &[bad, counting])?.fetch_artefact(digest, &path).await?;
    assert_eq!((length, std::fs::read(&path)? == bytes), (u64::try_from(bytes.len())?, true));
    let again = carried.load(Ordering::SeqCst) - before + rest.load(Ordering::SeqCst);
    // With the overhead of TLS and HTTP/2, and the bytes on the way when it broke.
    assert!(
        again < length - there + 3 * PIECE_BYTES,
        "{again} bytes were sent of the {} that were missing",
        length - there
    );

    // A client that has all of it learns so, and one that has more starts from the beginning.
    let good = world.shepherds(&agent, &[world.address()])?;
    assert_eq!(good.fetch_artefact(digest, &path).await?, length);
    std::fs::write(&path, vec![0; bytes.len() + 1])?;
    assert!(good.fetch_artefact(digest, &path).await.is_err());
    assert_eq!(good.fetch_artefact(digest, &path).await?, length);
    assert_eq!(sha256(&std::fs::read(&path)?), digest);
    // The sender counts a download a moment after all of it has arrived.
    until("they are counted", async || {
        let sent = world.listener.counted("shepherd_artefact_downloads_total{result=\"sent\"}")?;
        ensure!(sent <= 3, "{sent} were sent");
        Ok(sent == 3 && world.listener.counted("shepherd_artefact_downloads_in_progress ")? == 0)
    })
    .await?;
    Ok(world.listener.stop().await?)
}

async fn fetch(client: &mut Client, machine: &str, digest: &[u8], offset: u64) -> Result<usize, Status> {
    let request = FetchArtefactRequest { machine_id: machine.to_owned(), sha256: digest.to_vec(), offset };
    let mut pieces = client.fetch_artefact(request).await?.into_inner();
    let mut bytes = 0;
    while let Some(piece) = pieces.message().await? {
        bytes += piece.part.unwrap_or_default().bytes.len();
    }
    Ok(bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_machine_with_its_own_key_is_sent_anything() -> TestResult {
    let world = World::new("artefacts_whose").await?;
    let bmdb = &world.listener.bmdb;
    let bytes = content(2 * PIECE_BYTES);
    let agent = TestAgent::new(&world.pool, bmdb).await?;
    let other = TestAgent::new(&world.pool, bmdb).await?;
    let bare = provided(&world.pool).await?;
    let mut client = agent.connect(&world.listener.server).await?;
    let me = agent.machine.to_string();

    // Nothing is sent of an upload before its digest was verified, also if it is complete.
    let digest = sha256(&bytes);
    bring(bmdb, digest, &bytes).await?;
    let absent = fetch(&mut client, &me, &digest.0, 0).await.err().context("it is not whole")?;
    assert_eq!(absent.code(), Code::NotFound, "{absent:?}");
    bmdb.add_artefact(order(), digest, "one".to_owned()).await?;
    assert_eq!(fetch(&mut client, &me, &digest.0, PIECE_BYTES).await?, usize::try_from(PIECE_BYTES)?);

    let mut messages = Vec::new();
    for machine in [other.machine.to_string(), bare.to_string(), uuid::Uuid::new_v4().to_string()] {
        let called = std::time::Instant::now();
        let refused =
            fetch(&mut client, &machine, &digest.0, 0).await.err().context("it was sent to another")?;
        assert!(called.elapsed() >= std::time::Duration::from_millis(240), "{:?}", called.elapsed());
        messages.push(format!("{:?} {}", refused.code(), refused.message()));
    }
    messages.dedup();
    assert_eq!(messages, ["Unauthenticated machine id and key do not belong together"]);
    for (machine, digest, offset, code) in [
        ("m", &digest.0[..], 0, Code::InvalidArgument),
        (&me, &digest.0[1..], 0, Code::InvalidArgument),
        (&me, &[9; 32], 0, Code::NotFound),
        (&me, &digest.0, 2 * PIECE_BYTES + 1, Code::OutOfRange),
    ] {
        let refused = fetch(&mut client, machine, digest, offset).await.err().context("it was sent")?;
        assert_eq!(refused.code(), code, "{refused:?}");
    }
    let shepherds = world.shepherds(&agent, &[world.address()])?;
    let absent = shepherds.fetch_artefact(Sha256([9; 32]), &world.directory.path().join("absent")).await;
    assert_eq!(absent, Err(FetchError::Absent));
    // A machine that has the file already fetches its signature alone.
    assert_eq!(shepherds.fetch_signature(digest, 2 * PIECE_BYTES).await, Ok(String::new()));
    sqlx::query("UPDATE artefact SET signature = 'signed'").execute(&world.pool).await?;
    assert_eq!(shepherds.fetch_signature(digest, 2 * PIECE_BYTES).await, Ok("signed".to_owned()));
    assert_eq!(shepherds.fetch_signature(Sha256([9; 32]), 1).await, Err(FetchError::Absent));

    sqlx::query("UPDATE machine_due SET phase_index = 'Retired' WHERE machine_id = $1")
        .bind(agent.machine.0)
        .execute(&world.pool)
        .await?;
    let retired =
        fetch(&mut client, &me, &digest.0, 0).await.err().context("it was sent to one that is retired")?;
    assert_eq!(retired.code(), Code::PermissionDenied, "{retired:?}");
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn artefact_counts_when_its_digest_is_right_and_is_forgotten_when_nobody_ends_it() -> TestResult {
    let world = World::new("artefacts_whole").await?;
    let bmdb = &world.listener.bmdb;
    let bytes = content(PIECE_BYTES + 5);
    let (right, size) = (sha256(&bytes), u64::try_from(bytes.len())?);
    let count = async |statement: &'static str| -> Result<i64> {
        Ok(sqlx::query_scalar(statement).fetch_one(&world.pool).await?)
    };
    // Not with a missing piece, a piece of another file or a piece of another length.
    assert_eq!(bmdb.begin_artefact_upload(right, size).await?, UploadState::Missing(vec![0, 1]));
    let refused =
        bmdb.store_artefact_piece(right, 1, bytes[..6].to_vec()).await.err().context("a piece too long")?;
    assert_eq!(refused.to_string(), "piece 1 of this artefact has 5 bytes, and not 6");
    bmdb.store_artefact_piece(right, 1, vec![0; 5]).await?;
    let refused =
        bmdb.add_artefact(order(), right, "one".to_owned()).await.err().context("not all is there")?;
    assert!(refused.to_string().contains("1 of its 2 pieces are missing"), "{refused}");
    bmdb.store_artefact_piece(right, 0, bytes[..usize::try_from(PIECE_BYTES)?].to_vec()).await?;
    let refused =
        bmdb.add_artefact(order(), right, "one".to_owned()).await.err().context("it is another file")?;
    assert!(refused.to_string().contains("the uploaded file is another one"), "{refused}");
    assert_eq!(count("SELECT count(*) FROM artefact_chunk").await?, 0, "what is wrong is not kept");
    assert_eq!(bmdb.artefact_size(right).await?, None);
    add(bmdb, &bytes).await?;
    assert_eq!(bmdb.artefact_size(right).await?, Some(size));
    assert_eq!(bmdb.begin_artefact_upload(right, size).await?, UploadState::Complete);
    // Nothing changes a complete artefact.
    bmdb.store_artefact_piece(right, 1, vec![0; 5]).await?;
    assert_eq!(
        bmdb.artefact_piece(right, 1).await?.context("a piece")?,
        bytes[usize::try_from(PIECE_BYTES)?..]
    );

    // An unfinished upload is deleted after a day, and a complete one is not.
    let other = content(3 * PIECE_BYTES);
    bring(bmdb, sha256(&other), &other).await?;
    for (what, gone) in [(RetainedKind::UnfinishedPieces, 0), (RetainedKind::UnfinishedArtefacts, 0)] {
        assert_eq!(bmdb.delete_expired(what, what.batch()).await?, gone, "{what:?} of today");
    }
    sqlx::query("UPDATE artefact SET begun_at = begun_at - INTERVAL '25 hours'").execute(&world.pool).await?;
    for (what, most, gone) in [
        (RetainedKind::UnfinishedArtefacts, 10, 0),
        (RetainedKind::UnfinishedPieces, 2, 2),
        (RetainedKind::UnfinishedPieces, 2, 1),
        (RetainedKind::UnfinishedArtefacts, 10, 1),
    ] {
        assert_eq!(bmdb.delete_expired(what, most).await?, gone, "{what:?}");
    }
    assert_eq!(count("SELECT count(*) FROM artefact").await?, 1);
    assert_eq!(count("SELECT count(*) FROM artefact_chunk").await?, 2);
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_that_begin_together_do_not_exceed_the_storage_of_the_policy() -> TestResult {
    let world = World::new("artefacts_storage").await?;
    let bmdb = &world.listener.bmdb;
    let limit = ByteSize::gibibytes(1);
    bmdb.change_policy("a test", move |policy| policy.artefact_storage_limit = limit).await?;
    let begin = async |number: u8| bmdb.begin_artefact_upload(Sha256([number; 32]), MAX_BYTES).await;
    for number in 0..3 {
        begin(number).await?;
    }
    // Two uploads want the last quarter at the same moment: both have found no row of theirs when the lock is released.
    let mut lock = world.pool.begin().await?;
    sqlx::query("SELECT 1 FROM policy FOR UPDATE").execute(&mut *lock).await?;
    let release = async {
        until("both uploads wait", async || {
            let waiting = "SELECT count(*) = 2 FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
            Ok(sqlx::query_scalar::<_, bool>(waiting).fetch_one(&world.pool).await?)
        })
        .await?;
        Ok::<_, anyhow::Error>(lock.rollback().await?)
    };
    let (one, other, released) = tokio::join!(begin(3), begin(4), release);
    released?;
    let refused = match (one, other) {
        (Ok(_), Err(refused)) | (Err(refused), Ok(_)) => refused.to_string(),
        both => return Err(anyhow!("one of them fits: {both:?}").into()),
    };
    assert!(
        refused.starts_with(
            "it was not uploaded: it has 256 MiB, and the artefacts take 1 GiB of at most 1 GiB"
        )
    );
    let stored: i64 = sqlx::query_scalar("SELECT count(*) FROM artefact").fetch_one(&world.pool).await?;
    assert_eq!(stored, 4, "nothing of what was rejected is stored");

    // An upload that was begun continues, and a larger limit makes room.
    begin(0).await?;
    let issues = find_issues(&bmdb.read_issue_inputs().await?);
    assert!(issues.iter().any(|issue| issue.id == "artefact-storage"), "{issues:?}");
    bmdb.change_policy("a test", |policy| policy.artefact_storage_limit = ByteSize::gibibytes(2)).await?;
    begin(5).await?;
    let issues = find_issues(&bmdb.read_issue_inputs().await?);
    assert!(!issues.iter().any(|issue| issue.id == "artefact-storage"), "{issues:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn artefact_that_a_role_is_declared_with_stays_until_it_is_declared_without() -> TestResult {
    let world = World::new("artefacts_declared").await?;
    let bmdb = &world.listener.bmdb;
    let archive = add(bmdb, &content(PIECE_BYTES)).await?;
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled)
         VALUES (gen_random_uuid(), 'ams', 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE)",
    )
    .execute(&world.pool)
    .await?;
    let declared = web_role(&hex::encode(archive.0), "1000");
    bmdb.declare_cluster_role(order(), "ams".to_owned(), RoleDeclaration::new(declared)?.into()).await?;
    let refused = bmdb.delete_artefact(order(), "one".to_owned()).await.err().context("it was removed")?;
    let text = refused.to_string();
    assert!(text.contains("the role web of the cluster ams is declared with it"), "{text}");
    assert!(text.ends_with("shepherdctl cluster undeclare ams web"), "{text}");
    assert!(bmdb.artefact_size(archive).await?.is_some());

    bmdb.undeclare_cluster_role(order(), "ams".to_owned(), "web".to_owned()).await?;
    bmdb.delete_artefact(order(), "one".to_owned()).await?;
    assert_eq!(bmdb.artefact_size(archive).await?, None);
    Ok(world.listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundle_of_kubernetes_comes_from_a_shepherd_and_again_when_it_is_damaged() -> TestResult {
    let world = World::new("artefacts_bundle").await?;
    let file = kube_bundle::controllers(world.directory.path(), "1.20.2")?;
    let digest = add(&world.listener.bmdb, &std::fs::read(&file)?).await?;
    let agent = TestAgent::new(&world.pool, &world.listener.bmdb).await?;
    let shepherds = world.shepherds(&agent, &[world.address()])?;
    let directory = world.directory.path().join("node");

    let other = Sha256([7; 32]);
    let bundles = BundleStore::open(directory.clone(), shepherds.clone());
    let error =
        bundles.ensure_bundle(&other).await.err().context("a bundle that nobody has is here")?.to_string();
    assert!(
        error.contains("no shepherd has it; add it with shepherdctl artefacts add, or put it at"),
        "{error}"
    );

    let bundle = bundles.ensure_bundle(&digest).await?;
    let program = bundle.program_path(BundleComponent::KubeScheduler).map_err(anyhow::Error::msg)?;
    let text = std::fs::read_to_string(&program)?;
    std::fs::write(&program, text.replace("1.20.2", "1.20.9"))?;
    let again = BundleStore::open(directory, shepherds).ensure_bundle(&digest).await?;
    assert_eq!((std::fs::read_to_string(&program)?, again.directory), (text, bundle.directory));
    Ok(world.listener.stop().await?)
}
