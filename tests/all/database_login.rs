//! Logging in to a database as operators configure it: over TCP, with a password, with TLS that is verified.
//!
//! The server is one of our own with `ssl = on` and a certificate from a CA made for the test.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::connection::private_postgres::programs::{self, ServerUser};
use shepherd::bmdb::connection::settings::ConnectionSettings;

use crate::harness::child::shell_arguments;
use crate::harness::port::reserved;
use crate::harness::program::{PATIENCE, Place, ProgramOutput};

const PASSWORD: &str = "open-sesame-open";

/// A server that requires a password and TLS. It ends when this is dropped.
struct TlsServer {
    child: Child,
    /// Waiting for a child closes the end of the pipe that the child still owns, and that would kill it.
    _hold: ChildStdin,
    port: u16,
}

impl TlsServer {
    fn start(place: &Place) -> anyhow::Result<Self> {
        let programs = programs::find_programs().pop().context("no PostgreSQL server is installed")?;
        let user = programs::server_user().map_err(|_| anyhow::anyhow!("no user to run it as"))?;
        let run = |program: &str| programs::program_command(&programs.path(program), user.as_ref());
        let data = place.path("data");
        fs::create_dir(&data)?;
        own(&data, user.as_ref())?;
        let password = place.path("password");
        fs::write(&password, PASSWORD)?;
        own(&password, user.as_ref())?;
        let made = run("initdb")
            .args(["--no-sync", "-A", "scram-sha-256", "-U", "kim", "--locale=C", "-E", "UTF8"])
            .arg(format!("--pwfile={}", password.display()))
            .arg("-D")
            .arg(&data)
            .output()?;
        ensure!(made.status.success(), "{made:?}");
        let (ca, certificate, key) = certificates()?;
        fs::write(place.path("ca.pem"), ca)?;
        for (name, text) in [("server.crt", certificate), ("server.key", key)] {
            let path = data.join(name);
            fs::write(&path, text)?;
            own(&path, user.as_ref())?;
        }
        // PostgreSQL cannot choose a free port itself.
        let port = reserved()?.port();
        let log = fs::File::create(place.path("server.log"))?;
        let mut child = programs::program_command(Path::new("/bin/sh"), user.as_ref())
            .args(shell_arguments(programs.path("postgres")))
            .stdin(Stdio::piped())
            .arg("-D")
            .arg(&data)
            .args(["-p", &port.to_string()])
            .args(["-c", "listen_addresses=127.0.0.1,::1", "-c", "unix_socket_directories=", "-c", "ssl=on"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let hold = child.stdin.take().context("no hold on it")?;
        let server = Self { child, _hold: hold, port };
        let end = Instant::now() + PATIENCE;
        while !fs::read_to_string(place.path("server.log"))?.contains("ready to accept connections") {
            ensure!(Instant::now() < end, "{}", fs::read_to_string(place.path("server.log"))?);
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::QUIT);
        let _ = self.child.wait();
    }
}

fn own(path: &Path, user: Option<&ServerUser>) -> anyhow::Result<()> {
    let mode = if path.is_dir() { 0o700 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    if let Some(user) = user {
        chown(path, Some(user.uid), Some(user.gid))?;
    }
    Ok(())
}

/// A CA, and a certificate of it for `localhost` with its key, PEM.
fn certificates() -> anyhow::Result<(String, String, String)> {
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_certificate = ca.self_signed(&ca_key)?;
    let key = KeyPair::generate()?;
    let server = CertificateParams::new(vec!["localhost".to_owned()])?;
    let certificate = server.signed_by(&key, &Issuer::from_params(&ca, &ca_key))?;
    Ok((ca_certificate.pem(), certificate.pem(), key.serialize_pem()))
}

struct Site {
    place: Place,
    server: TlsServer,
}

impl Site {
    fn new() -> anyhow::Result<Self> {
        let place = Place::new()?;
        let server = TlsServer::start(&place)?;
        Ok(Self { place, server })
    }

    fn url(&self, user: &str, host: &str, parameters: &str) -> String {
        format!("postgres://{user}@{host}:{}/postgres{parameters}", self.server.port)
    }

    /// Runs `--check` with that URL, as a flag or in the environment.
    fn check(&self, flag: Option<&str>, environment: &[(&str, &str)]) -> anyhow::Result<ProgramOutput> {
        let mut arguments: Vec<String> =
            ["--check", "--components=updater", "--provider=static"].map(ToOwned::to_owned).into();
        let list: PathBuf = self.place.write("devices.json", "[]")?;
        arguments.push(format!("--static_device_list_url=file://{}", list.display()));
        arguments.extend(flag.map(|url| format!("--bmdb_url={url}")));
        let mut command = self.place.program(arguments);
        command.env("RUST_LOG", "trace").envs(environment.iter().copied());
        let reported = Place::finish(command.spawn()?)?;
        ensure!(
            !reported.stdout.contains(PASSWORD) && !reported.stderr.contains(PASSWORD),
            "the password is shown"
        );
        Ok(reported)
    }
}

fn last_line(reported: &ProgramOutput, site: &Site) -> String {
    let line = reported.stderr.lines().last().unwrap_or_default();
    site.place.masked(line).replace(&site.server.port.to_string(), "[port]")
}

#[test]
fn the_password_comes_from_the_environment_or_a_file_and_is_never_shown() {
    let site = Site::new().unwrap();
    let with_password = site.url(&format!("kim:{PASSWORD}"), "127.0.0.1", "");
    let without = site.url("kim", "127.0.0.1", "");

    let by_flag = site.check(Some(&with_password), &[]).unwrap();
    assert_eq!(by_flag.code, Some(0), "{by_flag:?}");
    let warning = by_flag.stderr.lines().find(|line| line.contains(" WARN ")).unwrap();
    assert!(warning.contains("SHEPHERD_BMDB_URL") && warning.contains("~/.pgpass"), "{warning}");

    let by_environment = site.check(None, &[("SHEPHERD_BMDB_URL", &with_password)]).unwrap();
    assert_eq!(by_environment.code, Some(0), "{by_environment:?}");
    assert!(!by_environment.stderr.contains(" WARN "), "{by_environment:?}");

    let entry = format!("127.0.0.1:{}:postgres:kim:{PASSWORD}\n", site.server.port);
    site.place.write("home/.pgpass", &entry).unwrap();
    assert_eq!(site.check(Some(&without), &[]).unwrap().code, Some(0));
    let elsewhere = site.place.write("passwords", &entry).unwrap();
    fs::remove_file(site.place.path("home/.pgpass")).unwrap();
    let by_file = site.check(Some(&without), &[("PGPASSFILE", elsewhere.to_str().unwrap())]).unwrap();
    assert_eq!(by_file.code, Some(0), "{by_file:?}");

    let wrong = site.check(Some(&site.url("kim:nonsense", "127.0.0.1", "")), &[]).unwrap();
    assert_eq!(wrong.code, Some(1));
    assert_eq!(
        last_line(&wrong, &site),
        "shepherd: cannot reach the BMDB at 127.0.0.1:[port]/postgres: password authentication failed for user \
         \"kim\". Is it running, and are host, port, user and password right?"
    );
}

#[test]
fn the_password_for_an_ipv6_address_comes_from_a_file() {
    let site = Site::new().unwrap();
    let port = site.server.port;
    // Colons are escaped there. An earlier line that is malformed is not shown.
    let entries = format!("{PASSWORD}\n\\:\\:1:{port}:postgres:kim:{PASSWORD}\n");
    let file = site.place.write("passwords", entries).unwrap();
    let url = site.url("kim", "[::1]", "");
    let reported = site.check(Some(&url), &[("PGPASSFILE", file.to_str().unwrap())]).unwrap();
    assert_eq!(reported.code, Some(0), "{reported:?}");
}

#[test]
fn a_parameter_that_is_not_supported_is_named_without_its_value() {
    let site = Site::new().unwrap();
    let url = site.url(&format!("kim:{PASSWORD}"), "127.0.0.1", &format!("?sslpassword={PASSWORD}"));
    let reported = site.check(None, &[("SHEPHERD_BMDB_URL", &url)]).unwrap();
    assert_eq!(reported.code, Some(0), "{reported:?}");
    let warnings: Vec<&str> = reported.stderr.lines().filter(|line| line.contains(" WARN ")).collect();
    assert!(
        matches!(warnings[..], [warning] if warning.contains("not supported and are ignored: sslpassword; remove")),
        "{warnings:?}"
    );
}

#[test]
fn a_server_is_verified_when_that_is_requested() {
    let site = Site::new().unwrap();
    let ca = site.place.path("ca.pem");
    let (other, ..) = certificates().unwrap();
    let other = site.place.write("other-ca.pem", other).unwrap();
    let user = format!("kim:{PASSWORD}");
    let check = |host: &str, ca: &Path| {
        let parameters = format!("?sslmode=verify-full&sslrootcert={}", ca.display());
        site.check(None, &[("SHEPHERD_BMDB_URL", &site.url(&user, host, &parameters))]).unwrap()
    };
    let verified = check("localhost", &ca);
    assert_eq!(verified.code, Some(0), "{}", last_line(&verified, &site));
    for (host, ca) in [("localhost", &other), ("127.0.0.1", &ca)] {
        let refused = check(host, ca);
        assert_eq!(refused.code, Some(1), "{host}: {refused:?}");
        let sentence = last_line(&refused, &site);
        assert!(sentence.starts_with("shepherd: cannot reach the BMDB at "), "{sentence}");
        assert!(sentence.contains("TLS failed: ") && sentence.contains("sslrootcert=FILE"), "{sentence}");
    }
    let missing = check("localhost", Path::new("/nonexistent/ca.pem"));
    assert_eq!(missing.code, Some(2), "{}", last_line(&missing, &site));
}

/// A CA that is renewed counts for new connections. A user who can change the file cannot answer in place of the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ca_that_others_can_change_counts_for_no_new_connection() -> anyhow::Result<()> {
    let site = Site::new()?;
    let ca = site.place.path("ca.pem");
    let (right, (wrong, ..)) = (fs::read_to_string(&ca)?, certificates()?);
    let parameters = format!("?sslmode=verify-full&sslrootcert={}", ca.display());
    let url = site.url(&format!("kim:{PASSWORD}"), "localhost", &parameters);
    let bmdb = Bmdb::connect(ConnectionSettings::from_url(&url, "test")?).await?;
    let refusal = bmdb.subscribe_tls_refusal();
    let set_mode = |mode| fs::set_permissions(&ca, fs::Permissions::from_mode(mode));

    // Each connection is held, so that the next one is a new one.
    let first = bmdb.pool().acquire().await?;
    set_mode(0o646)?;
    fs::write(&ca, &wrong)?;
    bmdb.refresh_tls_files().await;
    let sentence = format!(
        "the file {0} of sslrootcert in the BMDB URL cannot be used: {0} can be changed by other users (mode 0646); run: chmod \
         go-w {0}",
        ca.display()
    );
    assert_eq!(*refusal.borrow(), Some(sentence), "a refusal is published");
    let second = bmdb.pool().acquire().await.context("the CA that others can change counts")?;

    set_mode(0o644)?;
    bmdb.refresh_tls_files().await;
    assert_eq!(*refusal.borrow(), None);
    let renewed = bmdb.pool().acquire().await;
    assert!(renewed.is_err(), "a CA that was replaced counts still");
    fs::write(&ca, &right)?;
    bmdb.refresh_tls_files().await;
    let third = bmdb.pool().acquire().await?;
    drop((first, second, third));
    bmdb.close().await;
    Ok(())
}
