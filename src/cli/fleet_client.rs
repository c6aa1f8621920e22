//! gRPC client of the fleet API: TLS, bearer token, fail-over between servers.

use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use secrecy::{ExposeSecret as _, SecretString};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt as _;

use crate::cli::contexts::Context;
use crate::cli::error::CliError;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A channel that adds the token to every call.
pub type AuthorizedChannel = InterceptedService<Channel, BearerToken>;

/// Interceptor that adds the bearer token to every call.
#[derive(Clone)]
pub struct BearerToken(MetadataValue<Ascii>);

impl BearerToken {
    fn new(token: &SecretString) -> Result<Self, CliError> {
        let mut value: MetadataValue<Ascii> =
            format!("Bearer {}", token.expose_secret()).parse().map_err(|_| {
                CliError::Invalid(
                    "the token holds what no token can; is it the whole of the right file?".to_owned(),
                )
            })?;
        // Hide the token where a request is printed.
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl Interceptor for BearerToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

/// A connection to the fleet API; cheap to clone.
#[derive(Clone)]
pub struct FleetClient {
    /// The context's servers; `current` is the index of the one in use.
    servers: Arc<[(String, Endpoint)]>,
    current: usize,
    channel: Channel,
    token: BearerToken,
}

impl FleetClient {
    /// Connects to the first of the context's servers that answers.
    pub async fn connect(context: &Context) -> Result<Self, CliError> {
        let token = BearerToken::new(&context.read_token()?)?;
        let tls = ClientTlsConfig::new().trust_anchors(trust_anchors(context)?.roots);
        let servers = context
            .servers
            .iter()
            .map(|server| Ok((server.clone(), server_endpoint(server, &tls)?)))
            .collect::<Result<Arc<[_]>, CliError>>()?;
        let mut failures = Vec::new();
        for (at, (server, endpoint)) in servers.iter().enumerate() {
            match endpoint.connect().await {
                Ok(channel) => return Ok(Self { servers: servers.clone(), current: at, channel, token }),
                Err(error) => failures.push(format!("{server}: {}", error_chain(&error))),
            }
        }
        Err(CliError::Failed(format!(
            "no server of this context answers ({}). Is a shepherd running there? With --direct and \
             --bmdb_url shepherdctl uses the database itself",
            failures.join("; ")
        )))
    }

    /// The address of the server in use.
    #[must_use]
    pub fn current_server(&self) -> &str {
        self.servers.get(self.current).map_or("the server", |(server, _)| server)
    }

    /// Reconnects to the next of the context's servers, or to the same if there is only one.
    pub async fn connect_to_next(&mut self) -> Result<(), Status> {
        self.current = (self.current + 1) % self.servers.len().max(1);
        if let Some((_, endpoint)) = self.servers.get(self.current) {
            self.channel =
                endpoint.connect().await.map_err(|error| Status::unavailable(error_chain(&error)))?;
        }
        Ok(())
    }

    /// The channel for a client of a service.
    #[must_use]
    pub fn authorized_channel(&self) -> AuthorizedChannel {
        InterceptedService::new(self.channel.clone(), self.token.clone())
    }
}

fn server_endpoint(server: &str, tls: &ClientTlsConfig) -> Result<Endpoint, CliError> {
    let endpoint = Endpoint::from_shared(format!("https://{server}"))
        .and_then(|endpoint| endpoint.tls_config(tls.clone()))
        .map_err(|error| CliError::Invalid(format!("{server:?} is no server: {}", error_chain(&error))))?;
    Ok(endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(CALL_TIMEOUT))
}

/// The roots that verify a context's servers: its CA, or the trust store of this host if the context has none.
fn trust_anchors(context: &Context) -> Result<RootCertStore, CliError> {
    let mut roots = RootCertStore::empty();
    let Some(path) = &context.ca_certificate_path else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(CliError::Invalid(
                "this context names no CA certificate, and this host's own trust store is empty; name one by \
                 ca_certificate_path, or install ca-certificates here"
                    .to_owned(),
            ));
        }
        return Ok(roots);
    };
    let refuse = |what: String| {
        CliError::Invalid(format!("the CA certificate {} of this context {what}", path.display()))
    };
    let text = std::fs::read(path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    let authorities = CertificateDer::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| refuse(format!("is no PEM: {error}")))?;
    roots.add_parsable_certificates(authorities);
    if roots.is_empty() {
        return Err(refuse(
            "holds no certificate; without a ca_certificate_path, servers are verified against what this \
             host trusts"
                .to_owned(),
        ));
    }
    Ok(roots)
}

/// An error with its causes.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Converts a status into an error. Whether the caller or the fleet is at fault decides the exit code.
#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
#[must_use]
pub fn status_to_error(status: Status) -> CliError {
    let text = status.message().to_owned();
    let info = status.get_error_details().error_info().cloned();
    if let Some(info) = info.filter(|info| info.reason == "APPROVAL_REQUIRED") {
        let key = info.metadata.get("idempotency_key").cloned().unwrap_or_default();
        return CliError::ApprovalRequired { message: text, idempotency_key: key };
    }
    match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Unauthenticated
        | Code::PermissionDenied => CliError::Invalid(text),
        code if text.is_empty() => CliError::Failed(format!("the API failed: {code:?}")),
        _ => CliError::Failed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_not_shown_by_debug() {
        let token = BearerToken::new(&SecretString::from("shepherd_secret".to_owned())).unwrap();
        assert!(!format!("{:?}", token.0).contains("secret"));
        assert!(BearerToken::new(&SecretString::from("a\nb".to_owned())).is_err());
    }

    #[test]
    fn ca_file_without_certificate_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        let context = Context {
            servers: vec!["shepherd.example:8444".into()],
            ca_certificate_path: Some(path.clone()),
            token_path: directory.path().join("token"),
        };
        let reported = || trust_anchors(&context).unwrap_err().to_string();
        assert!(reported().contains("cannot be read"), "{}", reported());
        let odd = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for text in ["", "no certificate", odd] {
            std::fs::write(&path, text).unwrap();
            assert!(
                reported().contains("holds no certificate; without a ca_certificate_path"),
                "{}",
                reported()
            );
        }
    }

    #[test]
    fn status_code_decides_the_exit_code() {
        for (code, exit) in [(Code::NotFound, 2), (Code::PermissionDenied, 2), (Code::Unavailable, 1)] {
            assert_eq!(status_to_error(Status::new(code, "message")).exit_code(), exit);
        }
    }
}
