//! Server certificate: load, issue, reload and renew.
//!
//! The certificate may come from files that another party renews. They are read again every hour, and a pair that
//! cannot be used, or that agents or operators would reject (`certificate_check.rs`), leaves the old one in place with
//! a warning, and the reason is published until a check succeeds. At the start, such a pair is an error. The CA certificates for agents are read with it, and
//! `certificate_rotation.rs` defines the order in which the two change. Otherwise the certificate comes from the
//! BMDB's own authority. Then a new one is issued at half its lifetime, and when this host's clock is set back to
//! before it was issued, because until then no agent would accept it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::endpoint_registration::parse_endpoint_host;
use crate::error::ServerError;
use crate::tls::callback_ca::{CallbackCa, LeafCertificate};
use crate::tls::certificate_expiry::{find_chain_end, is_expired_at};
use crate::tls::certificate_files::CertificateFiles;
use crate::tls::certificate_rotation::{self, CertificateRotationInput};
use crate::tls::server_config::ReloadableCertificate;
use bmdb::connection::Bmdb;
use bmdb::fleet::secret::SecretsKey;

/// The callback server in log lines.
const CALLBACK_LISTENER: &str = "callback server";

/// Source of the certificate.
#[derive(Clone, Debug)]
pub enum CertificateSource {
    /// Files that another party creates and renews, PEM.
    Files {
        /// The certificate, followed by the intermediates up to the root.
        certificate: PathBuf,
        /// Path of its private key.
        key: PathBuf,
        /// CA certificates with which agents verify it, PEM or DER. `None`: the last certificate of the chain if it is
        /// self-signed, else the machines' own trust stores.
        ca_certificate: Option<PathBuf>,
    },
    /// The authority in the BMDB, sealed with this key.
    CallbackCa(Arc<SecretsKey>),
}

/// Host names and addresses of a server.
#[derive(Clone, Debug, Default)]
pub struct CertificateNames {
    /// The names that an issued certificate is for.
    pub issued: Vec<String>,
    /// The names that a certificate from files must be for.
    pub required: Vec<String>,
}

/// Host names and addresses of endpoints, without ports and brackets.
pub fn endpoint_hosts(endpoints: &[String]) -> Result<Vec<String>, ServerError> {
    endpoints.iter().map(|endpoint| parse_endpoint_host(endpoint)).collect()
}

/// Interval and clock for checking the certificate. A test replaces both.
#[derive(Clone)]
pub struct RenewalClock {
    /// Time between two checks.
    pub check_interval: Duration,
    /// Sleeps for the given time.
    pub sleep: Arc<dyn Fn(Duration) -> BoxFuture<'static, ()> + Send + Sync>,
    /// This host's clock. Peers check certificates against their own clocks.
    pub now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

impl Default for RenewalClock {
    fn default() -> Self {
        Self {
            check_interval: Duration::from_hours(1),
            sleep: Arc::new(|pause| Box::pin(tokio::time::sleep(pause))),
            now: Arc::new(SystemTime::now),
        }
    }
}

impl std::fmt::Debug for RenewalClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RenewalClock").field("look_again", &self.check_interval).finish_non_exhaustive()
    }
}

/// A certificate in use, with its renewal.
pub struct ServerCertificate {
    /// The certificate that is currently served.
    pub served: Arc<ReloadableCertificate>,
    ca_certificates: watch::Sender<Vec<Vec<u8>>>,
    refusal: watch::Sender<Option<String>>,
    renewal: CertificateRenewal,
    /// The listener in log lines.
    listener: &'static str,
}

/// Watch of the current CA certificates with which agents verify callback servers, DER. Empty: their own trust stores.
pub type CaCertificates = watch::Receiver<Vec<Vec<u8>>>;

/// Watch of the reason for which the present files of a certificate are refused, as a sentence; `None` while they are used.
pub type CertificateRefusal = watch::Receiver<Option<String>>;

enum CertificateRenewal {
    Files { files: CertificateFiles, names: Vec<String> },
    Issue { ca: Box<CallbackCa>, names: Vec<String>, issued_at: SystemTime, renew_at: SystemTime },
}

impl ServerCertificate {
    /// Loads or issues the first certificate. Fails for one from files that is not valid now for all required names.
    pub async fn load(
        source: &CertificateSource,
        bmdb: &Bmdb,
        names: CertificateNames,
        now: SystemTime,
    ) -> Result<Self, ServerError> {
        match source {
            CertificateSource::Files { certificate, key, ca_certificate } => {
                let files = CertificateFiles {
                    certificate: certificate.clone(),
                    key: key.clone(),
                    ca_certificate: ca_certificate.clone(),
                };
                Self::from_files(files, names.required, now)
            }
            CertificateSource::CallbackCa(secrets) => {
                let names = names.issued;
                let authority = CallbackCa::load_or_create(bmdb, secrets, now).await?;
                let LeafCertificate { certified, renew_at } = authority.issue_certificate(&names, now)?;
                let authorities = watch::Sender::new(vec![authority.certificate().to_vec()]);
                let renewal =
                    CertificateRenewal::Issue { ca: Box::new(authority), names, issued_at: now, renew_at };
                Ok(Self {
                    served: Arc::new(ReloadableCertificate::new(certified)),
                    ca_certificates: authorities,
                    refusal: watch::Sender::new(None),
                    renewal,
                    listener: CALLBACK_LISTENER,
                })
            }
        }
    }

    /// Loads the first certificate from files. Fails for one that is not valid now for all `names`.
    pub fn from_files(
        files: CertificateFiles,
        names: Vec<String>,
        now: SystemTime,
    ) -> Result<Self, ServerError> {
        let (first, authorities) = files.read(&names, now)?;
        let served = Arc::new(ReloadableCertificate::new(first));
        let renewal = CertificateRenewal::Files { files, names };
        let (ca_certificates, refusal) = (watch::Sender::new(authorities), watch::Sender::new(None));
        Ok(Self { served, ca_certificates, refusal, renewal, listener: CALLBACK_LISTENER })
    }

    /// Names the listener in log lines; it is the callback server otherwise.
    #[must_use]
    pub fn for_listener(mut self, listener: &'static str) -> Self {
        self.listener = listener;
        self
    }

    /// The CA certificates for agents, now and after each change.
    #[must_use]
    pub fn subscribe_ca_certificates(&self) -> CaCertificates {
        self.ca_certificates.subscribe()
    }

    /// Why the present files are refused, now and after each check.
    #[must_use]
    pub fn subscribe_refusal(&self) -> CertificateRefusal {
        self.refusal.subscribe()
    }

    /// Renews the certificate whenever it is due, until `stop`.
    pub async fn run_renewal(mut self, clock: RenewalClock, stop: CancellationToken) {
        while stop.run_until_cancelled((clock.sleep)(clock.check_interval)).await.is_some() {
            self.check((clock.now)(), clock.check_interval);
        }
    }

    /// Checks the certificate once, and publishes why its files are refused.
    fn check(&mut self, now: SystemTime, look_again: Duration) {
        let checked = self.renew_if_due(now, look_again);
        if let Err(error) = &checked {
            let listener = self.listener;
            tracing::warn!(%error, listener, "the present certificate stays, because its files are refused");
        }
        self.refusal.send_replace(checked.err().map(|error| error.to_string()));
    }

    /// Checks the certificate once. The next check comes after `check_interval`.
    fn renew_if_due(&mut self, now: SystemTime, look_again: Duration) -> Result<(), ServerError> {
        match &mut self.renewal {
            CertificateRenewal::Files { files, names } => {
                let (next, authorities) = files.read(names, now)?;
                let shown = self.served.certificate();
                let announced = self.ca_certificates.borrow().clone();
                let step = certificate_rotation::plan_rotation(&CertificateRotationInput {
                    candidate: next.cert.first().map_or(&[], |der| der.as_ref()),
                    ca_certificates: &authorities,
                    served: shown.as_ref().map_or(&[], |der| der.as_ref()),
                    announced: &announced,
                    expires_soon: is_expired_at(&self.served.chain(), &announced, now + look_again),
                })
                .ok_or_else(|| ServerError::UnannouncedCa { certificate: files.certificate.clone() })?;
                if let Some(bytes) = step.announce {
                    tracing::info!(
                        certificates = bytes.len(),
                        "agents receive other CA certificates from now on"
                    );
                    self.ca_certificates.send_replace(bytes);
                }
                if step.serve_candidate {
                    self.served.replace(next);
                    tracing::info!(listener = self.listener, "another certificate of the file is served now");
                }
            }
            CertificateRenewal::Issue { ca: authority, names, issued_at: issued, renew_at: at }
                if now >= *at || now < *issued =>
            {
                let LeafCertificate { certified, renew_at } = authority.issue_certificate(names, now)?;
                self.served.replace(certified);
                (*issued, *at) = (now, renew_at);
                tracing::info!(listener = self.listener, "the certificate was renewed");
            }
            CertificateRenewal::Issue { .. } => {}
        }
        Ok(())
    }
}

/// When clients stop to accept the served chain, RFC 3339, as published in the session.
#[must_use]
pub fn served_expiry_text(shown: &ReloadableCertificate, announced: &CaCertificates) -> Option<String> {
    let ends = find_chain_end(&shown.chain(), &announced.borrow())?;
    Some(ends.to_rfc3339_opts(chrono::SecondsFormat::Secs, true))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use super::*;
    use crate::tls::certificate_files::tests::Pair;
    use crate::tls::certificate_files::{CA_FLAG, CERTIFICATE_FLAG};

    #[test]
    fn certificate_files_are_reloaded() {
        let pair = Pair::new();
        let names = vec!["shepherd.example".to_owned()];
        let mut certificate = ServerCertificate::from_files(pair.files(), names, SystemTime::now()).unwrap();
        let authorities = certificate.ca_certificates.borrow().clone();
        let receiver = certificate.subscribe_ca_certificates();
        let look = |certificate: &mut ServerCertificate| {
            certificate
                .renew_if_due(SystemTime::now(), Duration::from_hours(1))
                .map_err(|error| error.to_string())
        };
        let before = certificate.served.certificate().unwrap();
        pair.write();
        look(&mut certificate).unwrap();
        assert_eq!(certificate.served.certificate().unwrap(), before, "no agent would believe it yet");
        assert_eq!((receiver.borrow().len(), &receiver.borrow()[1]), (2, &authorities[0]));
        look(&mut certificate).unwrap();
        let after = certificate.served.certificate().unwrap();
        assert_ne!(before, after);
        pair.write_key("half a key");
        assert!(look(&mut certificate).is_err());
        assert_eq!(certificate.served.certificate().unwrap(), after);
        pair.write_for("else.example");
        let problem = look(&mut certificate).unwrap_err();
        assert!(problem.contains("for shepherd.example: it is for else.example and not"), "{problem}");
        assert_eq!(certificate.served.certificate().unwrap(), after);
        assert_eq!(receiver.borrow().len(), 2);
    }

    #[test]
    fn files_that_others_can_change_are_neither_served_nor_announced() {
        let pair = Pair::new();
        let names = vec!["shepherd.example".to_owned()];
        let ca = pair.directory.path().join("ca.pem");
        std::fs::copy(pair.certificate(), &ca).unwrap();
        let files = CertificateFiles { ca_certificate: Some(ca.clone()), ..pair.files() };
        let load = || ServerCertificate::from_files(files.clone(), names.clone(), SystemTime::now());
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set_mode(&pair.certificate(), 0o644);
        set_mode(&ca, 0o644);
        let mut served = load().unwrap();
        let refusal = served.subscribe_refusal();
        let originals = [pair.certificate(), pair.key()].map(|path| (std::fs::read(&path).unwrap(), path));
        let before = served.served.certificate().unwrap();
        for (path, flag) in [(pair.certificate(), CERTIFICATE_FLAG), (ca.clone(), CA_FLAG)] {
            set_mode(&path, 0o646);
            pair.write();
            let expected = format!(
                "{flag} {0} cannot be trusted: {0} can be changed by other users (mode 0646); run: chmod go-w {0}",
                path.display()
            );
            assert_eq!(load().err().map(|error| error.to_string()), Some(expected.clone()));
            served.check(SystemTime::now(), Duration::from_hours(1));
            assert_eq!(*refusal.borrow(), Some(expected), "a refusal is published");
            assert_eq!(served.served.certificate().unwrap(), before);
            assert_eq!(served.subscribe_ca_certificates().borrow().len(), 1);
            set_mode(&path, 0o644);
        }
        for (content, path) in &originals {
            std::fs::write(path, content).unwrap();
        }
        served.check(SystemTime::now(), Duration::from_hours(1));
        assert_eq!(*refusal.borrow(), None, "a refusal ends with a check that succeeds");
    }
}
