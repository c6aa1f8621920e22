//! Whether a service is well: a look at it from time to time.
//!
//! Looks follow each other and never overlap. One that was begun is finished or ended before its service is stopped, so
//! that nothing of it is left in the group of the service.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use crate::roleserver::child::ending::{Ending, ended};
use crate::roleserver::cluster::services::hands::Hands;
use crate::roleserver::cluster::services::state::Health;
use crate::roleserver::cluster::services::wanted::{Check, Probe, Wanted};

/// Longest that the head of an answer may be.
const LONGEST_HEAD: usize = 16 << 10;
/// Between the first looks at a service that just started: it shall not be called new for a whole interval.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// What looks come to, counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    failures: u32,
    health: Health,
}

impl Verdict {
    /// Nothing has been looked at.
    #[must_use]
    pub const fn new() -> Self {
        Self { failures: 0, health: Health::Unknown }
    }

    /// One more look; `allowed` failures in a row make it ill. Gives what it is now.
    pub fn look(&mut self, look: Result<(), String>, allowed: u32) -> Health {
        match look {
            Ok(()) => {
                self.failures = 0;
                self.health = Health::Well;
            }
            Err(why) => {
                self.failures = self.failures.saturating_add(1);
                if self.failures >= allowed {
                    self.health = Health::Ill(format!("its health check fails: {why}"));
                }
            }
        }
        self.health.clone()
    }

    /// How long until the next look. One that has never been well is looked at ever more rarely, up to the interval.
    #[must_use]
    pub fn pause(&self, interval: Duration) -> Duration {
        if self.health != Health::Unknown || self.failures == 0 {
            return interval;
        }
        FIRST_PAUSE.saturating_mul(1_u32.checked_shl(self.failures.min(20)).unwrap_or(u32::MAX)).min(interval)
    }
}

impl Default for Verdict {
    fn default() -> Self {
        Self::new()
    }
}

/// Looks at a service until it is told to end; tells whenever its health is another one.
pub async fn watch(
    hands: Hands,
    wanted: Wanted,
    check: Check,
    end: CancellationToken,
    tell: impl Fn(Health),
) {
    let (mut verdict, mut told) = (Verdict::new(), Health::Unknown);
    while !end.is_cancelled() {
        let look = look(&hands, &wanted, &check, &end).await;
        if end.is_cancelled() {
            return;
        }
        let now = verdict.look(look, check.failures);
        if now != told {
            tell(now.clone());
            told = now;
        }
        tokio::select! {
            () = end.cancelled() => return,
            () = tokio::time::sleep(verdict.pause(check.interval)) => {}
        }
    }
}

async fn look(hands: &Hands, wanted: &Wanted, check: &Check, end: &CancellationToken) -> Result<(), String> {
    if let Probe::Exec(command) = &check.probe {
        return exec(hands, wanted, command, check.timeout, end).await;
    }
    let asking = async {
        match &check.probe {
            Probe::Tcp(port) => connect(loopback(*port)).await.map(drop),
            Probe::Unix(path) => connect_unix(path).await,
            Probe::Http { port, path } => http(*port, path).await,
            Probe::Https { at, path, shown } => https(*at, path, shown.as_ref()).await,
            Probe::Exec(_) => Ok(()),
        }
    };
    tokio::select! {
        () = end.cancelled() => Err("it is to end".to_owned()),
        asked = tokio::time::timeout(check.timeout, asking) => asked.unwrap_or_else(|_| Err(late(check.timeout))),
    }
}

fn late(timeout: Duration) -> String {
    format!("it took longer than {} ms", timeout.as_millis())
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

async fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    TcpStream::connect(address).await.map_err(|error| format!("connecting to {address} failed: {error}"))
}

async fn connect_unix(path: &Path) -> Result<(), String> {
    let connected = tokio::net::UnixStream::connect(path).await;
    connected.map(drop).map_err(|error| format!("connecting to {} failed: {error}", path.display()))
}

async fn http(port: u16, path: &str) -> Result<(), String> {
    let at = loopback(port);
    answers(connect(at).await?, at, path).await
}

/// The same by TLS. It is not asked who answers: that it is the program that was started says its record, and where
/// another one sits on its port, it has none of its own and ends.
async fn https(at: SocketAddr, path: &str, shown: Option<&(PathBuf, PathBuf)>) -> Result<(), String> {
    let config = anybody(shown).map_err(|why| format!("asking {at} for {path} failed: {why}"))?;
    let stream = connect(at).await?;
    let shaken =
        TlsConnector::from(Arc::new(config)).connect(ServerName::IpAddress(at.ip().into()), stream).await;
    answers(shaken.map_err(|error| format!("{at} is no server of TLS: {error}"))?, at, path).await
}

/// TLS with whoever answers.
fn anybody(shown: Option<&(PathBuf, PathBuf)>) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(Anybody(provider.signature_verification_algorithms));
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

/// Lets everybody be who he says, if he has the key of that.
#[derive(Debug)]
struct Anybody(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// A request of HTTP/1.1 (RFC 9112), of whose answer nothing but the status is of interest.
async fn answers(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    at: SocketAddr,
    path: &str,
) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("asking {at} for {path} failed: {error}");
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {at}\r\nUser-Agent: roleserver\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    stream.flush().await.map_err(failed)?;
    let mut head = Vec::new();
    loop {
        match status(&head) {
            Ok(Some(status @ 200..=399)) => {
                tracing::trace!(status, path, "a service is well");
                return Ok(());
            }
            Ok(Some(status)) => return Err(format!("{path} was answered with status {status}")),
            Ok(None) if head.len() > LONGEST_HEAD => return Err(format!("the answer to {path} has no end")),
            Ok(None) => {}
            Err(()) => return Err(format!("{path} was answered, but not in HTTP/1")),
        }
        if stream.read_buf(&mut head).await.map_err(failed)? == 0 {
            return Err(format!("{path} was not answered to the end of the first line"));
        }
    }
}

/// The status of an answer; none before its first line is whole. What is only on the way (1xx) is passed over.
fn status(head: &[u8]) -> Result<Option<u16>, ()> {
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

async fn exec(
    hands: &Hands,
    wanted: &Wanted,
    command: &[String],
    timeout: Duration,
    end: &CancellationToken,
) -> Result<(), String> {
    let starting = {
        let (hands, wanted, command) = (hands.clone(), wanted.clone(), command.to_vec());
        tokio::task::spawn_blocking(move || hands.look(&wanted, &command))
    };
    let handle = match starting.await {
        Ok(Ok(handle)) => handle,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    let how = tokio::select! {
        how = ended(&handle) => Ok(how),
        () = end.cancelled() => Err("it is to end".to_owned()),
        () = tokio::time::sleep(timeout) => Err(late(timeout)),
    };
    match how {
        Ok(Ok(Ending::Exited(0))) => Ok(()),
        Ok(Ok(how)) => {
            let said = hands.look_said(&wanted.id);
            Err(format!(
                "of {:?}: {how}{}{said}",
                command[0],
                if said.is_empty() { "" } else { "; it last wrote: " }
            ))
        }
        Ok(Err(error)) => Err(format!("waiting for {:?} failed: {error}", command[0])),
        Err(why) => {
            kill(&handle);
            // A child of ours leaves nothing behind.
            let _ = ended(&handle).await;
            Err(format!("of {:?}: {why}", command[0]))
        }
    }
}

/// Kills a look that was not finished, with all of its session that is still its group.
fn kill(handle: &OwnedFd) {
    let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
    // It was not waited for yet, so that its number is still its own and that of its group.
    let said =
        std::fs::read_to_string(format!("/proc/self/fdinfo/{}", handle.as_raw_fd())).unwrap_or_default();
    let pid = said.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    if let Some(pid) = pid.filter(|pid| *pid > 0).and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::net::TcpListener;

    #[test]
    fn so_many_failures_in_a_row_make_it_ill_and_one_success_well() {
        let mut verdict = Verdict::new();
        let bad = || Err("no".to_owned());
        let ill = Health::Ill("its health check fails: no".to_owned());
        for (look, expected) in [
            (bad(), Health::Unknown),
            (Ok(()), Health::Well),
            (bad(), Health::Well),
            (Ok(()), Health::Well),
            (bad(), Health::Well),
            (bad(), ill.clone()),
            (bad(), ill.clone()),
            (Ok(()), Health::Well),
        ] {
            assert_eq!(verdict.look(look, 2), expected);
        }
        assert_eq!(Verdict::new().look(bad(), 1), ill);
    }

    #[test]
    fn one_that_is_new_is_looked_at_sooner_and_never_more_rarely_than_declared() {
        let interval = Duration::from_secs(5);
        let mut verdict = Verdict::new();
        let mut pauses = Vec::new();
        for _ in 0..40 {
            verdict.look(Err("no".to_owned()), 100);
            pauses.push(verdict.pause(interval));
        }
        assert_eq!(pauses[0], Duration::from_millis(200));
        assert!(pauses.is_sorted() && pauses[39] == interval);
        verdict.look(Ok(()), 100);
        assert_eq!(verdict.pause(interval), interval);
        verdict.look(Err("no".to_owned()), 100);
        assert_eq!(verdict.pause(interval), interval, "it is not new any more");
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
            assert_eq!(status(head.as_bytes()), expected, "{head:?}");
        }
    }

    async fn answering(answer: &'static str) -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1000];
                let read = stream.read(&mut request).await.unwrap_or(0);
                assert!(request[..read].starts_with(b"GET /well HTTP/1.1\r\nHost: "));
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        port
    }

    #[tokio::test]
    async fn answer_says_by_its_status_whether_all_is_well() {
        for (answer, part) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", None),
            ("HTTP/1.1 302 Found\r\n\r\n", None),
            ("HTTP/1.1 404 Not Found\r\n\r\n", Some("status 404")),
            ("HTTP/1.1 500", Some("not answered to the end")),
            ("hello\r\n", Some("not in HTTP/1")),
        ] {
            let port = answering(answer).await;
            match part {
                None => http(port, "/well").await.unwrap(),
                Some(part) => {
                    let error = http(port, "/well").await.unwrap_err();
                    assert!(error.contains(part), "{error}");
                }
            }
            connect(loopback(port)).await.unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        assert!(connect_unix(&socket).await.unwrap_err().contains("failed"));
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        connect_unix(&socket).await.unwrap();
        let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap().port();
        assert!(connect(loopback(nobody)).await.unwrap_err().contains("connecting to 127.0.0.1"));
    }
}
