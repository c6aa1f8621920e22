//! A real API server of Kubernetes, with an etcd of its own or with one that a test has started.
//!
//! [`crate::harness::kubernetes`] finds its program. A test that has none is skipped.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    PKCS_ECDSA_P256_SHA256,
};
use shepherd::reconciler::objects::api_client::{
    ApiError, ApiServerConnection, ClientIdentity, ReloadingClient,
};
use tempfile::TempDir;

use super::kit::{cluster_roles, kind, named};
use crate::harness::child::{Program, guarded};
use crate::harness::etcd_servers::{Cluster, PATIENCE};
use crate::harness::kubernetes::{ProgramSet, folder};
use crate::harness::port;

const NAME: &str = "kube-apiserver";

pub(crate) struct Real {
    /// Dropped before the rest, which it uses until it ends.
    program: Option<Program>,
    /// The etcd of its own, if it has one.
    _etcd: Option<Cluster>,
    /// The client socket of its etcd.
    socket: PathBuf,
    directory: TempDir,
    address: SocketAddr,
    assets: PathBuf,
    has_front_proxy: bool,
}

/// The certificates of an API server, in PEM, and pairs of certificate and key.
#[derive(Clone)]
pub(crate) struct Files {
    /// The authority that verifies it.
    pub(crate) servers: String,
    /// The authority by which it verifies clients.
    pub(crate) clients: String,
    /// The authority by which it verifies the front proxy, if it should.
    pub(crate) front_proxy: Option<String>,
    /// The pair that it serves with.
    pub(crate) server: (String, String),
    /// The reconciler's pair.
    pub(crate) client: (String, String),
}

fn key() -> Result<KeyPair> {
    Ok(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)
}

fn signed(
    names: Vec<String>,
    subject: &[(DnType, &str)],
    purpose: ExtendedKeyUsagePurpose,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<(Certificate, KeyPair)> {
    let key = key()?;
    let mut parameters = CertificateParams::new(names)?;
    for (kind, value) in subject {
        parameters.distinguished_name.push(kind.clone(), *value);
    }
    parameters.extended_key_usages = vec![purpose];
    let certificate = parameters.signed_by(&key, issuer)?;
    Ok((certificate, key))
}

impl Files {
    /// Creates an authority, and certificates for servers on loopback and for a client that may do everything.
    pub(crate) fn generate() -> Result<Self> {
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.distinguished_name.push(DnType::CommonName, "authority");
        let authority_key = key()?;
        let authority_certificate = authority.self_signed(&authority_key)?;
        let issuer = Issuer::new(authority, authority_key);
        let server = signed(
            vec!["127.0.0.1".to_owned()],
            &[(DnType::CommonName, "server")],
            ExtendedKeyUsagePurpose::ServerAuth,
            &issuer,
        )?;
        let subject =
            [(DnType::CommonName, "shepherd:reconciler"), (DnType::OrganizationName, "system:masters")];
        let ours = signed(Vec::new(), &subject, ExtendedKeyUsagePurpose::ClientAuth, &issuer)?;
        let pair = |(certificate, key): (Certificate, KeyPair)| (certificate.pem(), key.serialize_pem());
        Ok(Self {
            servers: authority_certificate.pem(),
            clients: authority_certificate.pem(),
            front_proxy: None,
            server: pair(server),
            client: pair(ours),
        })
    }
}

impl Real {
    /// Starts one, if its program exists.
    pub(crate) async fn start() -> Result<Option<Self>> {
        Self::start_with(Files::generate()?).await
    }

    /// Starts one with these certificates, if its program exists.
    pub(crate) async fn start_with(files: Files) -> Result<Option<Self>> {
        let Some(assets) = folder(ProgramSet::ApiServer)? else { return Ok(None) };
        let etcd = Cluster::start(1).await?;
        let socket = etcd.path("m0-client:1");
        Ok(Some(Self::start_in(assets, files, Some(etcd), socket).await?))
    }

    /// The same on the etcd that listens on this socket.
    pub(crate) async fn start_on(socket: &Path, files: Files) -> Result<Option<Self>> {
        let Some(assets) = folder(ProgramSet::ApiServer)? else { return Ok(None) };
        Ok(Some(Self::start_in(assets, files, None, socket.to_owned()).await?))
    }

    async fn start_in(assets: PathBuf, files: Files, etcd: Option<Cluster>, socket: PathBuf) -> Result<Self> {
        let mut real = Self {
            program: None,
            _etcd: etcd,
            socket,
            directory: tempfile::tempdir()?,
            address: port::reserved()?,
            assets,
            has_front_proxy: files.front_proxy.is_some(),
        };
        let accounts = key()?;
        for (name, text) in [
            ("ca.pem", files.servers),
            ("clients.pem", files.clients),
            ("front-proxy.pem", files.front_proxy.unwrap_or_default()),
            ("server.pem", files.server.0),
            ("server.key", files.server.1),
            ("client.pem", files.client.0),
            ("client.key", files.client.1),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
        ] {
            std::fs::write(real.path(name), text)?;
        }
        real.run().await?;
        Ok(real)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The address at which it serves.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn connection(&self) -> ApiServerConnection {
        ApiServerConnection {
            url: format!("https://{}", self.address),
            identity: Some(ClientIdentity {
                authority: self.path("ca.pem"),
                certificate: self.path("client.pem"),
                key: self.path("client.key"),
            }),
        }
    }

    /// Kills it as a power cut does.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.program.take().context("it does not run")?.kill()
    }

    /// Starts it, and waits until it serves everything that a pass requests.
    pub(crate) async fn run(&mut self) -> Result<()> {
        let path = |name: &str| self.path(name).display().to_string();
        let mut command = guarded(self.assets.join(NAME));
        command
            .arg(format!("--etcd-servers=unix://{}", self.socket.display()))
            .args(["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"])
            .arg(format!("--secure-port={}", self.address.port()))
            .args(["--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC"])
            .args(["--service-account-issuer=https://kubernetes.default.svc", "--cert-dir"])
            .arg(path("certificates"));
        for (flag, name) in [
            ("--client-ca-file", "clients.pem"),
            ("--tls-cert-file", "server.pem"),
            ("--tls-private-key-file", "server.key"),
            ("--service-account-key-file", "accounts.pub"),
            ("--service-account-signing-key-file", "accounts.key"),
        ] {
            command.arg(format!("{flag}={}", path(name)));
        }
        if self.has_front_proxy {
            command
                .arg("--anonymous-auth=false")
                .arg(format!("--requestheader-client-ca-file={}", path("front-proxy.pem")))
                .args(["--requestheader-allowed-names=front-proxy-client"])
                .args(["--requestheader-username-headers=X-Remote-User"])
                .args(["--requestheader-group-headers=X-Remote-Group"]);
        }
        let log = self.path("apiserver.log");
        self.program = Some(Program::spawn_logged(&mut command, &log)?);
        let kubernetes = ReloadingClient::new(self.connection());
        let end = Instant::now() + PATIENCE;
        loop {
            let api = kubernetes.client().await?;
            let serves = async || -> Result<bool, ApiError> {
                // Objects that it creates itself at its start.
                let [role, namespace] = ["cluster-admin", "default"].map(named);
                Ok(api.get(&cluster_roles(), &role).await?.is_some()
                    && api.get(&kind("", "Namespace", "namespaces", false), &namespace).await?.is_some())
            };
            match serves().await {
                Ok(true) => return Ok(()),
                other => {
                    let ended = self.program.as_mut().context("it was started")?.ended()?;
                    if ended.is_some() || Instant::now() > end {
                        let text = std::fs::read_to_string(&log)?;
                        bail!("{NAME} does not serve ({other:?}), ended: {ended:?}; it wrote: {text}");
                    }
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}
