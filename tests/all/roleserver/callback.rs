//! A callback server for tests that shares no code with `server/`: it accepts any client certificate with a valid handshake
//! signature, and records each heartbeat with the key that proved it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use rustls::DigitallySignedStruct;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use shepherd::proto::agent::v1 as wire;
use shepherd::proto::agent::v1::agent_callback_server::{AgentCallback, AgentCallbackServer};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// One heartbeat as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct CapturedHeartbeat {
    pub(crate) public_key: Vec<u8>,
    pub(crate) request: wire::HeartbeatRequest,
}

type Reply = dyn Fn(&wire::HeartbeatRequest) -> Result<wire::HeartbeatResponse, Status> + Send + Sync;

/// A callback server; ends when it is dropped.
pub(crate) struct Callback {
    pub(crate) endpoint: String,
    pub(crate) ca: Vec<u8>,
    heartbeats: Arc<Mutex<Vec<CapturedHeartbeat>>>,
    connections: Arc<AtomicUsize>,
    files: Files,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Callback {
    fn drop(&mut self) {
        // Also in a test that is asynchronous itself, which must not wait for the end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The files that it sends, by digest.
type Files = Arc<Mutex<HashMap<Vec<u8>, Arc<Vec<u8>>>>>;

struct Service {
    heartbeats: Arc<Mutex<Vec<CapturedHeartbeat>>>,
    reply: Arc<Reply>,
    files: Files,
}

#[tonic::async_trait]
impl AgentCallback for Service {
    type FetchArtefactStream = ReceiverStream<Result<wire::ArtefactPiece, Status>>;

    async fn fetch_artefact(
        &self,
        request: Request<wire::FetchArtefactRequest>,
    ) -> Result<Response<Self::FetchArtefactStream>, Status> {
        let body = request.into_inner();
        let files = self.files.lock().map_err(|_| Status::internal("poisoned"))?.clone();
        let file = files.get(&body.sha256).cloned().ok_or_else(|| Status::not_found("no such file"))?;
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            let offset = usize::try_from(body.offset).unwrap_or_default();
            for piece in file[offset..].chunks(64 << 10) {
                let piece = wire::ArtefactPiece {
                    part: Some(wire::FilePart { bytes: piece.to_vec() }),
                    size: file.len() as u64,
                    signature: String::new(),
                };
                if sender.send(Ok(piece)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn bring_log(
        &self,
        _: Request<wire::UploadLogRequest>,
    ) -> Result<Response<wire::UploadLogResponse>, Status> {
        Err(Status::unimplemented("it asks for no logs"))
    }

    async fn heartbeat(
        &self,
        request: Request<wire::HeartbeatRequest>,
    ) -> Result<Response<wire::HeartbeatResponse>, Status> {
        let certificates = request.peer_certs().ok_or_else(|| Status::unauthenticated("no certificate"))?;
        let (_, certificate) = x509_parser::parse_x509_certificate(&certificates[0])
            .map_err(|error| Status::unauthenticated(error.to_string()))?;
        let public_key = certificate.public_key().subject_public_key.data.to_vec();
        let request = request.into_inner();
        let answer = (self.reply)(&request);
        self.heartbeats
            .lock()
            .map_err(|_| Status::internal("poisoned"))?
            .push(CapturedHeartbeat { public_key, request });
        answer.map(Response::new)
    }
}

/// Accepts any certificate, and verifies the handshake signature.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[rustls::DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 alone".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl Callback {
    /// Listens on loopback with a certificate of its own. `reply` makes the responses.
    pub(crate) fn start(
        reply: impl Fn(&wire::HeartbeatRequest) -> Result<wire::HeartbeatResponse, Status> + Send + Sync + 'static,
    ) -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
        let ca = made.cert.der().to_vec();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(AnyKey(provider)))
            .with_single_cert(vec![made.cert.der().clone()], key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));

        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let endpoint = listener.local_addr()?.to_string();
        let observations = Arc::new(Mutex::new(Vec::new()));
        let files = Files::default();
        let service =
            Service { heartbeats: observations.clone(), reply: Arc::new(reply), files: files.clone() };
        let (sender, streams) = tokio::sync::mpsc::channel(8);
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = connections.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let _ = sender.send(Ok::<_, std::io::Error>(stream)).await;
                    }
                });
            }
        });
        runtime.spawn(
            tonic::transport::Server::builder()
                .add_service(AgentCallbackServer::new(service))
                .serve_with_incoming(ReceiverStream::new(streams)),
        );
        Ok(Self { endpoint, ca, heartbeats: observations, connections, files, runtime: Some(runtime) })
    }

    /// Sends this file from now on. Returns its digest.
    pub(crate) fn serve(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let digest = ring::digest::digest(&ring::digest::SHA256, &bytes).as_ref().to_vec();
        let mut files = self.files.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
        files.insert(digest.clone(), Arc::new(bytes));
        Ok(digest)
    }

    /// The number of connections so far.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn heartbeats(&self) -> Vec<CapturedHeartbeat> {
        self.heartbeats.lock().map(|observations| observations.clone()).unwrap_or_default()
    }
}

/// A server that requests a report until it has one of that incarnation.
pub(crate) fn curious()
-> impl Fn(&wire::HeartbeatRequest) -> Result<wire::HeartbeatResponse, Status> + Send + Sync + 'static {
    |request| {
        let wants_hardware_report = request.hardware_report.is_none();
        Ok(wire::HeartbeatResponse { hardware_report_requested: wants_hardware_report, ..Default::default() })
    }
}
