//! Asking through the API: connecting to one of a context's servers, and what its errors mean here.

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

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const CALL_LIMIT: Duration = Duration::from_secs(30);

/// A connection whose calls carry the token.
pub type Authorized = InterceptedService<Channel, Token>;

/// Puts the token on every call.
#[derive(Clone)]
pub struct Token(MetadataValue<Ascii>);

impl Token {
    fn new(token: &SecretString) -> Result<Self, CliError> {
        let mut value: MetadataValue<Ascii> =
            format!("Bearer {}", token.expose_secret()).parse().map_err(|_| {
                CliError::Wrong(
                    "the token holds what no token can; is it the whole of the right file?".to_owned(),
                )
            })?;
        // Kept out of whatever prints a request.
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

/// An API that answers; cheap to clone.
#[derive(Clone)]
pub struct Remote {
    /// The context's servers, and which of them is asked.
    servers: Arc<[(String, Endpoint)]>,
    at: usize,
    channel: Channel,
    token: Token,
}

impl Remote {
    /// Connects to the first of the context's servers that answers.
    pub async fn connect(context: &Context) -> Result<Self, CliError> {
        let token = Token::new(&context.token()?)?;
        let tls = ClientTlsConfig::new().trust_anchors(roots(context)?.roots);
        let servers = context
            .servers
            .iter()
            .map(|server| Ok((server.clone(), endpoint(server, &tls)?)))
            .collect::<Result<Arc<[_]>, CliError>>()?;
        let mut failures = Vec::new();
        for (at, (server, endpoint)) in servers.iter().enumerate() {
            match endpoint.connect().await {
                Ok(channel) => return Ok(Self { servers: servers.clone(), at, channel, token }),
                Err(error) => failures.push(format!("{server}: {}", chain(&error))),
            }
        }
        Err(CliError::Failed(format!(
            "no server of this context answers ({}). Is a shepherd running there? With --direct and --bmdb_url the \
             database is asked itself",
            failures.join("; ")
        )))
    }

    /// The server that is asked.
    #[must_use]
    pub fn server(&self) -> &str {
        self.servers.get(self.at).map_or("the server", |(server, _)| server)
    }

    /// Connects anew, to the next of the context's servers; to the same where there is one.
    pub async fn go_on(&mut self) -> Result<(), Status> {
        self.at = (self.at + 1) % self.servers.len().max(1);
        if let Some((_, endpoint)) = self.servers.get(self.at) {
            self.channel = endpoint.connect().await.map_err(|error| Status::unavailable(chain(&error)))?;
        }
        Ok(())
    }

    /// What a client of a service is made with.
    #[must_use]
    pub fn service(&self) -> Authorized {
        InterceptedService::new(self.channel.clone(), self.token.clone())
    }
}

fn endpoint(server: &str, tls: &ClientTlsConfig) -> Result<Endpoint, CliError> {
    let endpoint = Endpoint::from_shared(format!("https://{server}"))
        .and_then(|endpoint| endpoint.tls_config(tls.clone()))
        .map_err(|error| CliError::Wrong(format!("{server:?} is no server: {}", chain(&error))))?;
    Ok(endpoint.connect_timeout(CONNECT_LIMIT).timeout(CALL_LIMIT))
}

/// What a context's servers are verified against: its CA, or what this host trusts where it names none.
fn roots(context: &Context) -> Result<RootCertStore, CliError> {
    let mut roots = RootCertStore::empty();
    let Some(path) = &context.ca_certificate_path else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(CliError::Wrong(
                "this context names no CA certificate, and this host's own trust store is empty; name one by \
                 ca_certificate_path, or install ca-certificates here"
                    .to_owned(),
            ));
        }
        return Ok(roots);
    };
    let refuse = |what: String| {
        CliError::Wrong(format!("the CA certificate {} of this context {what}", path.display()))
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

/// An error with what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        said = format!("{said}: {error}");
        cause = error.source();
    }
    said
}

/// What a refusal means here: whose mistake it was decides the exit code.
#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
#[must_use]
pub fn refused(status: Status) -> CliError {
    let said = status.message().to_owned();
    let info = status.get_error_details().error_info().cloned();
    if let Some(info) = info.filter(|info| info.reason == "APPROVAL_REQUIRED") {
        let key = info.metadata.get("idempotency_key").cloned().unwrap_or_default();
        return CliError::SecondPerson { said, key };
    }
    match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Unauthenticated
        | Code::PermissionDenied => CliError::Wrong(said),
        code if said.is_empty() => CliError::Failed(format!("the API failed: {code:?}")),
        _ => CliError::Failed(said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_does_not_show() {
        let token = Token::new(&SecretString::from("shepherd_secret".to_owned())).unwrap();
        assert!(!format!("{:?}", token.0).contains("secret"));
        assert!(Token::new(&SecretString::from("a\nb".to_owned())).is_err());
    }

    #[test]
    fn authority_that_could_verify_nobody_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        let context = Context {
            servers: vec!["shepherd.example:8444".into()],
            ca_certificate_path: Some(path.clone()),
            token_path: directory.path().join("token"),
        };
        let said = || roots(&context).unwrap_err().to_string();
        assert!(said().contains("cannot be read"), "{}", said());
        let odd = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for text in ["", "no certificate", odd] {
            std::fs::write(&path, text).unwrap();
            assert!(said().contains("holds no certificate; without a ca_certificate_path"), "{}", said());
        }
    }

    #[test]
    fn whose_mistake_it_was_decides_the_exit_code() {
        for (code, exit) in [(Code::NotFound, 2), (Code::PermissionDenied, 2), (Code::Unavailable, 1)] {
            assert_eq!(refused(Status::new(code, "said")).exit_code(), exit);
        }
    }
}
