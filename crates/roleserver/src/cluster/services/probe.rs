//! Health probes: exec, TCP, UNIX socket, HTTP and HTTPS.
//!
//! A service chooses the address that it listens at, so a TCP or HTTP probe tries the addresses that it may have, one
//! after the other, and succeeds at the first that answers well.
//!
//! Probes of a service follow each other and never overlap. A probe has ended, or is killed, before its service is
//! stopped, so that none of its processes is left in the service's control group.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use backoff::ExponentialBackoff;
use model::excerpt::{Excerpt, with_excerpt};
use rustix::process::{Pid, Signal};
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use transport::signature::AcceptedSignatures;
use transport::verifier::{AnyServer, ServerVerifier};

use crate::child::exit::{ChildExit, wait_for_exit};
use crate::cluster::services::desired::{DesiredService, RenderedHealthCheck, RenderedProbe};
use crate::cluster::services::service_runtime::ServiceRuntime;
use crate::cluster::services::service_state::Health;

/// Longest response head that is read, in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// How long the body of a response is waited for that reports a failure.
const BODY_TIMEOUT: Duration = Duration::from_millis(200);
/// Delay after the first failed probe of a service that just started, so that it is not reported as starting for a
/// whole interval.
const FIRST_DELAY: Duration = Duration::from_millis(200);

/// Health of a service as it follows from its probes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HealthTracker {
    failures: u32,
    health: Health,
}

impl HealthTracker {
    /// The state before the first probe.
    const fn new() -> Self {
        Self { failures: 0, health: Health::Unknown }
    }

    /// Records the result of a probe; `allowed` consecutive failures make the service unhealthy. Returns its health
    /// now.
    fn record_result(&mut self, look: Result<(), String>, allowed: u32) -> Health {
        match look {
            Ok(()) => {
                self.failures = 0;
                self.health = Health::Healthy;
            }
            Err(why) => {
                self.failures = self.failures.saturating_add(1);
                if self.failures >= allowed {
                    self.health = Health::Unhealthy(format!("its health check fails: {why}"));
                }
            }
        }
        self.health.clone()
    }

    /// Delay until the next probe. It doubles for a service that has never been healthy, up to the interval.
    fn next_delay(&self, interval: Duration) -> Duration {
        if self.health != Health::Unknown || self.failures == 0 {
            return interval;
        }
        ExponentialBackoff { initial: FIRST_DELAY, factor: 2.0, max: interval }.nominal(self.failures)
    }
}

/// Probes a service until `end`, and calls `tell` whenever its health changes.
pub async fn watch_health(
    runtime: ServiceRuntime,
    wanted: DesiredService,
    check: RenderedHealthCheck,
    end: CancellationToken,
    tell: impl Fn(Health),
) {
    let (mut verdict, mut health) = (HealthTracker::new(), Health::Unknown);
    while !end.is_cancelled() {
        let look = run_probe(&runtime, &wanted, &check, &end).await;
        if end.is_cancelled() {
            return;
        }
        let now = verdict.record_result(look, check.failures);
        if now != health {
            tell(now.clone());
            health = now;
        }
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(verdict.next_delay(check.interval)) => {}
        }
    }
}

async fn run_probe(
    runtime: &ServiceRuntime,
    wanted: &DesiredService,
    check: &RenderedHealthCheck,
    end: &CancellationToken,
) -> Result<(), String> {
    if let RenderedProbe::Exec(command) = &check.probe {
        return run_exec_probe(runtime, wanted, command, check.timeout, end).await;
    }
    let probing = async {
        match &check.probe {
            RenderedProbe::Tcp(addresses) => probe_addresses(addresses, None).await,
            RenderedProbe::Unix(path) => connect_unix(path).await,
            RenderedProbe::Http { addresses, path } => probe_addresses(addresses, Some(path.as_str())).await,
            RenderedProbe::Https { at, path, client_certificate: shown } => {
                probe_https(*at, path, shown.as_ref()).await
            }
            RenderedProbe::Exec(_) => Ok(()),
        }
    };
    tokio::select! {
        () = end.cancelled() => Err("it is being stopped".to_owned()),
        result = tokio::time::timeout(check.timeout, probing) => result.unwrap_or_else(|_| Err(timeout_message(check.timeout))),
    }
}

fn timeout_message(timeout: Duration) -> String {
    format!("it took longer than {} ms", timeout.as_millis())
}

/// Probes one address after the other until one succeeds, by an HTTP request to this path or by a connection alone. The
/// error has the failure at each address.
async fn probe_addresses(addresses: &[SocketAddr], path: Option<&str>) -> Result<(), String> {
    let mut failures = Vec::new();
    for address in addresses {
        let result = match path {
            None => connect_tcp(*address).await.map(drop),
            Some(path) => probe_http(*address, path).await,
        };
        match result {
            Ok(()) => return Ok(()),
            Err(failure) => failures.push(failure),
        }
    }
    Err(failures.join("; "))
}

async fn connect_tcp(address: SocketAddr) -> Result<TcpStream, String> {
    TcpStream::connect(address).await.map_err(|error| format!("connecting to {address} failed: {error}"))
}

async fn connect_unix(path: &Path) -> Result<(), String> {
    let connected = tokio::net::UnixStream::connect(path).await;
    connected.map(drop).map_err(|error| format!("connecting to {} failed: {error}", path.display()))
}

async fn probe_http(at: SocketAddr, path: &str) -> Result<(), String> {
    probe_http_stream(connect_tcp(at).await?, at, path).await
}

/// Probes over HTTPS without verifying the server. The run record proves that the program was started; if another
/// program had its port, it could not listen and would exit.
async fn probe_https(at: SocketAddr, path: &str, shown: Option<&(PathBuf, PathBuf)>) -> Result<(), String> {
    let config =
        insecure_tls_config(shown).map_err(|why| format!("requesting {path} of {at} failed: {why}"))?;
    let stream = connect_tcp(at).await?;
    let shaken =
        TlsConnector::from(Arc::new(config)).connect(ServerName::IpAddress(at.ip().into()), stream).await;
    probe_http_stream(shaken.map_err(|error| format!("{at} is no server of TLS: {error}"))?, at, path).await
}

/// TLS configuration that accepts any server certificate.
fn insecure_tls_config(shown: Option<&(PathBuf, PathBuf)>) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(ServerVerifier::new(AnyServer, AcceptedSignatures::Tls12));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let Some((certificate, key)) = shown else { return Ok(config.with_no_client_auth()) };
    let unread = |path: &Path| format!("{} cannot be read", path.display());
    let certificates: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(certificate).map_err(|_| unread(certificate))?.collect();
    let certificates = certificates.map_err(|_| unread(certificate))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|_| unread(key))?;
    config.with_client_auth_cert(certificates, key).map_err(|error| error.to_string())
}

/// Sends an HTTP/1.1 request (RFC 9112) and reads no more of the response than its status.
async fn probe_http_stream(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    at: SocketAddr,
    path: &str,
) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("requesting {path} of {at} failed: {error}");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {at}\r\nUser-Agent: roleserver\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    stream.flush().await.map_err(failed)?;
    let mut head = Vec::new();
    loop {
        match parse_status(&head) {
            Ok(Some(status @ 200..=399)) => {
                tracing::trace!(status, path, "a health probe succeeded");
                return Ok(());
            }
            Ok(Some(status)) => {
                // The body often has the reason. A service that does not send it soon is unhealthy without it.
                let _in_time = tokio::time::timeout(BODY_TIMEOUT, read_rest(&mut stream, &mut head)).await;
                let what = format!("{path} was answered with status {status}");
                return Err(with_excerpt(what, body_words(&head).as_ref()));
            }
            Ok(None) if head.len() > MAX_HEAD_BYTES => {
                return Err(format!("the response head of {path} is too long"));
            }
            Ok(None) => {}
            Err(()) => return Err(format!("{path} was answered, but not in HTTP/1")),
        }
        if stream.read_buf(&mut head).await.map_err(failed)? == 0 {
            return Err(format!("{path} was not answered to the end of the first line"));
        }
    }
}

/// Reads what else the service sends, up to the limit.
async fn read_rest(stream: &mut (impl AsyncRead + Unpin), head: &mut Vec<u8>) {
    while head.len() <= MAX_HEAD_BYTES && matches!(stream.read_buf(head).await, Ok(1..)) {}
}

/// The words in the body of the last response of these.
fn body_words(responses: &[u8]) -> Option<Excerpt> {
    let mut rest = responses;
    while let Some(end) = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
        rest = &rest[end + 4..];
        if !rest.starts_with(b"HTTP/1.") {
            return Excerpt::from_body(rest);
        }
    }
    None
}

/// Status of a response; `None` until its first line is complete. Interim responses (1xx) are skipped.
fn parse_status(head: &[u8]) -> Result<Option<u16>, ()> {
    let mut rest = head;
    loop {
        if !rest.starts_with(&b"HTTP/1."[..rest.len().min(7)]) {
            return Err(());
        }
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        let line = std::str::from_utf8(&rest[..end]).map_err(|_| ())?;
        let status: u16 = line.split(' ').nth(1).and_then(|word| word.trim().parse().ok()).ok_or(())?;
        if !(100..200).contains(&status) {
            return Ok(Some(status));
        }
        let Some(over) = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
        rest = &rest[over + 4..];
    }
}

async fn run_exec_probe(
    runtime: &ServiceRuntime,
    wanted: &DesiredService,
    command: &[String],
    timeout: Duration,
    end: &CancellationToken,
) -> Result<(), String> {
    let starting = {
        let (runtime, wanted, command) = (runtime.clone(), wanted.clone(), command.to_vec());
        tokio::task::spawn_blocking(move || runtime.start_probe(&wanted, &command))
    };
    let (handle, group) = match starting.await {
        Ok(Ok(started)) => started,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    let how = tokio::select! {
        how = wait_for_exit(&handle) => Ok(how),
        () = end.cancelled() => Err("it is being stopped".to_owned()),
        () = tokio::time::sleep(timeout) => Err(timeout_message(timeout)),
    };
    match how {
        Ok(Ok(ChildExit::Exited(0))) => Ok(()),
        Ok(Ok(how)) => {
            let output = runtime.probe_output(&wanted.id);
            Err(format!(
                "of {:?}: {how}{}{output}",
                command[0],
                if output.is_empty() { "" } else { "; it last wrote: " }
            ))
        }
        Ok(Err(error)) => Err(format!("waiting for {:?} failed: {error}", command[0])),
        Err(why) => {
            kill_probe(&handle, group);
            // A child of this process stays a zombie until it is waited for.
            let _ = wait_for_exit(&handle).await;
            Err(format!("of {:?}: {why}", command[0]))
        }
    }
}

/// Kills an unfinished probe, with the processes of its process group.
fn kill_probe(handle: &OwnedFd, group: Pid) {
    let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
    // It has not been waited for yet, so its number and that of its group have not been reused.
    let _ = rustix::process::kill_process_group(group, Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::net::Ipv4Addr;

    use tokio::net::TcpListener;

    #[test]
    fn failures_in_a_row_make_it_unhealthy_and_one_success_healthy() {
        let mut verdict = HealthTracker::new();
        let bad = || Err("no".to_owned());
        let ill = Health::Unhealthy("its health check fails: no".to_owned());
        for (look, expected) in [
            (bad(), Health::Unknown),
            (Ok(()), Health::Healthy),
            (bad(), Health::Healthy),
            (Ok(()), Health::Healthy),
            (bad(), Health::Healthy),
            (bad(), ill.clone()),
            (bad(), ill.clone()),
            (Ok(()), Health::Healthy),
        ] {
            assert_eq!(verdict.record_result(look, 2), expected);
        }
        assert_eq!(HealthTracker::new().record_result(bad(), 1), ill);
    }

    #[test]
    fn new_service_is_probed_sooner_and_never_later_than_declared() {
        let interval = Duration::from_secs(5);
        let mut verdict = HealthTracker::new();
        let mut pauses = Vec::new();
        for _ in 0..40 {
            verdict.record_result(Err("no".to_owned()), 100);
            pauses.push(verdict.next_delay(interval));
        }
        assert_eq!(pauses[0], Duration::from_millis(200));
        assert!(pauses.is_sorted() && pauses[39] == interval);
        verdict.record_result(Ok(()), 100);
        assert_eq!(verdict.next_delay(interval), interval);
        verdict.record_result(Err("no".to_owned()), 100);
        assert_eq!(verdict.next_delay(interval), interval, "it is not new any more");
    }

    #[test]
    fn status_is_that_of_the_last_answer() {
        for (head, expected) in [
            ("", Ok(None)),
            ("HTT", Ok(None)),
            ("HTTP/1.1 200", Ok(None)),
            ("HTTP/1.1 200 OK\r\n", Ok(Some(200))),
            ("HTTP/1.0 503\n", Ok(Some(503))),
            ("HTTP/1.1 100 Continue\r\n", Ok(None)),
            ("HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 204 No\r\n", Ok(Some(204))),
            ("HTTP/2 200\r\n", Err(())),
            ("SSH-2.0-x\r\n", Err(())),
            ("HTTP/1.1 many\r\n", Err(())),
        ] {
            assert_eq!(parse_status(head.as_bytes()), expected, "{head:?}");
        }
    }

    async fn answering(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1000];
                let read = stream.read(&mut request).await.unwrap_or(0);
                assert!(request[..read].starts_with(b"GET /well HTTP/1.1\r\nHost: "));
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        address
    }

    #[tokio::test]
    async fn http_status_decides_whether_a_service_is_healthy() {
        for (answer, part) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 302 Found\r\n\r\n", None),
            ("HTTP/1.1 404 Not Found\r\n\r\n", Some("status 404")),
            ("HTTP/1.1 503 No\r\n\r\n[-]disk\u{1b} full\n", Some("status 503: [-]disk full")),
            ("HTTP/1.1 500", Some("not answered to the end")),
            ("hello\r\n", Some("not in HTTP/1")),
        ] {
            let address = answering(answer).await;
            match part {
                None => probe_http(address, "/well").await.unwrap(),
                Some(part) => {
                    let error = probe_http(address, "/well").await.unwrap_err();
                    assert!(error.contains(part), "{error}");
                }
            }
            connect_tcp(address).await.unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        assert!(connect_unix(&socket).await.unwrap_err().contains("failed"));
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        connect_unix(&socket).await.unwrap();
        let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        assert!(connect_tcp(nobody).await.unwrap_err().contains("connecting to 127.0.0.1"));
    }

    #[tokio::test]
    async fn address_that_answers_well_decides_and_all_failures_are_named() {
        let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap();
        let bad = answering("HTTP/1.1 503 Busy\r\n\r\n").await;
        let good = answering("HTTP/1.1 200 OK\r\n\r\n").await;
        probe_addresses(&[nobody, bad, good], Some("/well")).await.unwrap();
        probe_addresses(&[nobody, good], None).await.unwrap();
        let error = probe_addresses(&[nobody, bad], Some("/well")).await.unwrap_err();
        assert!(error.contains(&format!("connecting to {nobody} failed")), "{error}");
        assert!(error.contains("; /well was answered with status 503"), "{error}");
    }
}
