//! `--check` names a database server of a version with a published fault. The answer of such a server is recorded: a proxy
//! in front of the real one exchanges the version in what it reports when a client connects.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use shepherd::bmdb::connection::dialect::Dialect;
use sqlx::postgres::PgConnectOptions;

use crate::harness::aloud::TestResult;
use crate::harness::postgres::TestDatabase;
use crate::harness::program::Place;

/// Exchanges the numbers of the version in the first message that has them. Their length stays, because a message states
/// its own.
fn exchange_version(message: &mut [u8], version: &str) {
    const NAME: &[u8] = b"server_version\0";
    let Some(at) = message.windows(NAME.len()).position(|part| part == NAME) else { return };
    let numbers = &mut message[at + NAME.len()..];
    let length = numbers.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
    for (index, byte) in numbers[..length].iter_mut().enumerate() {
        *byte = version.as_bytes().get(index).copied().unwrap_or(b' ');
    }
}

/// Copies until one side ends.
fn copy(mut from: impl Read, mut to: impl Write, mut change: impl FnMut(&mut [u8])) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count) = from.read(&mut buffer) {
        change(&mut buffer[..count]);
        if count == 0 || to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
}

/// A URL by which the server of `database` reports another version. The threads end with the test process.
fn reporting(database: &TestDatabase, version: &'static str) -> Result<String> {
    let options: PgConnectOptions = database.url().parse()?;
    let socket: PathBuf = options.get_socket().context("no socket")?.join(".s.PGSQL.5432");
    let name = options.get_database().context("no database in the address")?;
    let (_, query) = database.url().split_once('?').context("no query in the address")?;
    let kept: Vec<&str> =
        query.split('&').filter(|part| !part.starts_with("host=") && !part.starts_with("port=")).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("postgres://{}/{name}?{}", listener.local_addr()?, kept.join("&"));
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&socket) else { continue };
            let (Ok(to_client), Ok(from_server)) = (client.try_clone(), server.try_clone()) else { continue };
            std::thread::spawn(move || forward(&client, &to_client, &server, &from_server, version));
        }
    });
    Ok(url)
}

fn forward(
    client: &TcpStream,
    to_client: &TcpStream,
    server: &UnixStream,
    from_server: &UnixStream,
    version: &str,
) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            copy(from_server, to_client, |message| exchange_version(message, version));
            // The other direction may wait for the client. A socket that has ended already is no failure.
            let _ = to_client.shutdown(Shutdown::Both);
        });
        copy(client, server, |_| {});
        let _ = server.shutdown(Shutdown::Both);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_with_a_published_fault_is_named_by_check() -> TestResult {
    let database = TestDatabase::create("version_check").await?;
    if database.dialect() != Dialect::Postgres {
        // The version that CockroachDB reports is that of a PostgreSQL that it resembles, and is not judged.
        return Ok(());
    }
    let place = Place::new()?;
    let list = place.write("devices.json", "[]")?;
    for (version, faults) in [
        ("14.2", &["postgresql-concurrent-index", "PostgreSQL 14.2 is not supported"][..]),
        ("14.9", &["PostgreSQL 14.9 is not supported"]),
        ("15.0", &[]),
        ("19.0", &["PostgreSQL 19.0 is not supported"]),
    ] {
        let url = reporting(&database, version)?;
        let reported = place.run([
            "--check".to_owned(),
            format!("--bmdb_url={url}"),
            "--components=updater".to_owned(),
            "--provider=static".to_owned(),
            format!("--static_device_list_url=file://{}", list.display()),
        ])?;
        assert_eq!(reported.code, Some(0), "{version}: {reported:?}");
        assert!(reported.stdout.contains(&format!("found        PostgreSQL {version}\n")), "{reported:?}");
        for part in ["postgresql-concurrent-index", "is not supported"] {
            let expected = faults.iter().any(|fault| fault.contains(part));
            assert_eq!(reported.stderr.contains(part), expected, "{version}: {part}: {}", reported.stderr);
        }
        assert!(faults.iter().all(|fault| reported.stderr.contains(fault)), "{version}: {}", reported.stderr);
    }
    Ok(())
}
