//! Client of the fleet API: over the network with TLS, a bearer token and fail-over between servers, or in this process
//! over a connection to the database.
//!
//! A command does not know which of the two it uses. `tokens bootstrap`, `declare restored` and `policy
//! disable-two-person-rule` are the exceptions: they need the database ([`FleetClient::require_bmdb`]).

use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use secrecy::{ExposeSecret as _, SecretString};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, StdError, http};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt as _;

use crate::client::contexts::Context;
use crate::error::CliError;
use crate::exit_code::{CommandEnd, ExitCode, exit_code};
use bmdb::connection::Bmdb;
use model::pem_blocks::{PemError, certificate_blocks};
use model::text_file::skip_mark;
use server::api::api_error::error_status;
use server::api::in_process::InProcessChannel;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A channel over the network that adds the token to every call, or one within this process.
#[derive(Clone)]
pub enum ApiChannel {
    /// To a server of the context.
    Network(InterceptedService<Channel, BearerToken>),
    /// To the services in this process.
    InProcess(Box<InProcessChannel>),
}

impl Service<http::Request<Body>> for ApiChannel {
    type Response = http::Response<Body>;
    type Error = StdError;
    type Future = BoxFuture<Self::Response, StdError>;

    fn poll_ready(&mut self, context: &mut TaskContext<'_>) -> Poll<Result<(), StdError>> {
        match self {
            Self::Network(channel) => channel.poll_ready(context).map_err(Into::into),
            Self::InProcess(channel) => channel.poll_ready(context).map_err(Into::into),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Network(channel) => {
                let answered = channel.call(request);
                Box::pin(async move { Ok(answered.await?.map(Body::new)) })
            }
            Self::InProcess(channel) => {
                let answered = channel.call(request);
                Box::pin(async move { Ok(answered.await?) })
            }
        }
    }
}

/// Interceptor that adds the bearer token to every call.
#[derive(Clone)]
pub struct BearerToken(MetadataValue<Ascii>);

impl BearerToken {
    fn new(token: &SecretString) -> Result<Self, CliError> {
        let mut value: MetadataValue<Ascii> =
            format!("Bearer {}", token.expose_secret()).parse().map_err(|_| {
                CliError::Invalid(
                    "the token contains characters that no token has; is this the right file, and is it complete?"
                        .to_owned(),
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
    access: Access,
}

#[derive(Clone)]
enum Access {
    Network(ServerConnection),
    Database { bmdb: Bmdb, channel: Box<InProcessChannel> },
}

/// A connection to one of the context's servers.
#[derive(Clone)]
struct ServerConnection {
    /// Name of the context.
    context: String,
    /// The context's servers; `current` is the index of the one in use.
    servers: Arc<[(String, Endpoint)]>,
    current: usize,
    channel: Channel,
    token: BearerToken,
}

impl FleetClient {
    /// Connects to the first server that answers of the context with this name.
    pub async fn connect(name: &str, context: &Context) -> Result<Self, CliError> {
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
                Ok(channel) => {
                    let context = name.to_owned();
                    let connection = ServerConnection { context, servers, current: at, channel, token };
                    return Ok(Self { access: Access::Network(connection) });
                }
                Err(error) => failures.push(format!("{server}: {}", error_chain(&error))),
            }
        }
        let message = format!(
            "no server of this context answers ({}). Is a shepherd running there? With --direct and \
             --bmdb-url shepherdctl uses the database itself",
            failures.join("; ")
        );
        Err(CliError::Ended { exit: ExitCode::Unreachable, message })
    }

    /// The services in this process, over a connection to the database. Orders are given in the name of `user`.
    pub async fn in_process(bmdb: Bmdb, user: &str) -> Result<Self, CliError> {
        let channel = Box::new(InProcessChannel::connect(&bmdb, user).await?);
        Ok(Self { access: Access::Database { bmdb, channel } })
    }

    /// Whether the services run in this process.
    #[must_use]
    pub fn is_in_process(&self) -> bool {
        matches!(self.access, Access::Database { .. })
    }

    /// The database, for a command that works without any API; `what` names the command in the error, and `why` the reason.
    pub fn require_bmdb(&self, what: &str, why: &str) -> Result<&Bmdb, CliError> {
        match &self.access {
            Access::Database { bmdb, .. } => Ok(bmdb),
            Access::Network(_) => Err(CliError::Invalid(format!(
                "{what} needs the database, because {why}: use --direct and --bmdb-url \
                 postgres://USER@HOST:5432/DATABASE"
            ))),
        }
    }

    /// What the client is connected to, for prompts and dry runs: the context with its server, or the database.
    #[must_use]
    pub fn describe_fleet(&self) -> String {
        match &self.access {
            Access::Network(connection) => {
                format!("context {} ({})", connection.context, self.current_server())
            }
            Access::Database { bmdb, .. } => format!("the database {}", bmdb.settings().address()),
        }
    }

    /// The address of the server in use.
    #[must_use]
    pub fn current_server(&self) -> &str {
        match &self.access {
            Access::Network(connection) => {
                connection.servers.get(connection.current).map_or("the server", |(server, _)| server)
            }
            Access::Database { .. } => "the database",
        }
    }

    /// The number of servers that [`FleetClient::connect_to_next`] goes through. The database is one.
    #[must_use]
    pub fn server_count(&self) -> usize {
        match &self.access {
            Access::Network(connection) => connection.servers.len(),
            Access::Database { .. } => 1,
        }
    }

    /// Reconnects to the next of the context's servers, or to the same if there is only one. The connection to the
    /// database is replaced by its pool when it is used again.
    pub async fn connect_to_next(&mut self) -> Result<(), Status> {
        let Access::Network(connection) = &mut self.access else { return Ok(()) };
        connection.current = (connection.current + 1) % connection.servers.len().max(1);
        if let Some((_, endpoint)) = connection.servers.get(connection.current) {
            connection.channel = endpoint
                .connect()
                .await
                .map_err(|error| error_status(Code::Unavailable, "UNREACHABLE", error_chain(&error)))?;
        }
        Ok(())
    }

    /// The channel for a client of a service.
    #[must_use]
    pub fn channel(&self) -> ApiChannel {
        match &self.access {
            Access::Network(connection) => ApiChannel::Network(InterceptedService::new(
                connection.channel.clone(),
                connection.token.clone(),
            )),
            Access::Database { channel, .. } => ApiChannel::InProcess(channel.clone()),
        }
    }

    /// Closes the connection to the database, if there is one.
    pub async fn close(&self) {
        if let Access::Database { bmdb, .. } = &self.access {
            bmdb.close().await;
        }
    }
}

fn server_endpoint(server: &str, tls: &ClientTlsConfig) -> Result<Endpoint, CliError> {
    let endpoint = Endpoint::from_shared(format!("https://{server}"))
        .and_then(|endpoint| endpoint.tls_config(tls.clone()))
        .map_err(|error| {
            let reason = error_chain(&error);
            CliError::Invalid(format!("{server:?} is not the address of a server (HOST:PORT): {reason}"))
        })?;
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
    let content = std::fs::read(path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    let text = skip_mark(&content).map_err(|error| refuse(format!("cannot be used: {error}")))?;
    let unusable = |error: PemError| refuse(format!("cannot be used: {error}"));
    for block in certificate_blocks(text).map_err(unusable)? {
        let added = CertificateDer::from_pem_slice(block.text).is_ok_and(|der| roots.add(der).is_ok());
        if !added {
            return Err(unusable(PemError::Unreadable { number: block.number }));
        }
    }
    if roots.is_empty() {
        return Err(refuse(
            "contains no certificate; without a ca_certificate_path, servers are verified by the trust store of \
             this host"
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

/// Converts a status into an error. Its code and its reason decide the exit code.
#[must_use]
pub fn status_to_error(status: Status) -> CliError {
    let message = match status.message() {
        "" => format!("the API failed: {:?}", status.code()),
        text => text.to_owned(),
    };
    let info = status.get_error_details().error_info().cloned();
    if let Some(info) = info.as_ref().filter(|info| info.reason == "APPROVAL_REQUIRED") {
        let key = info.metadata.get("idempotency_key").cloned().unwrap_or_default();
        return CliError::ApprovalRequired { message, idempotency_key: key, status: Box::new(status) };
    }
    let exit = exit_code(CommandEnd::Error {
        code: status.code(),
        reason: info.as_ref().map_or("", |info| info.reason.as_str()),
        is_broken: std::error::Error::source(&status).is_some(),
    });
    CliError::Api { exit, message, status: Box::new(status) }
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
        let block = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
        let none = "contains no certificate; without a ca_certificate_path";
        for (text, part) in [
            (String::new(), none),
            ("no certificate".to_owned(), none),
            (block("CERTIFICATE"), "cannot be used: its block 1 is no certificate that can be read"),
            (block("TRUSTED CERTIFICATE"), "cannot be used: its block 1 is a TRUSTED CERTIFICATE"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(reported().contains(part), "{}", reported());
        }
    }

    #[test]
    fn status_decides_the_exit_code() {
        for (status, exit) in [
            (Status::not_found("message"), ExitCode::NotFound),
            (Status::permission_denied("message"), ExitCode::Refused),
            (Status::unavailable("message"), ExitCode::Unreachable),
            (error_status(Code::FailedPrecondition, "NO_SUCH_CLUSTER", "message"), ExitCode::NotFound),
            (error_status(Code::FailedPrecondition, "APPROVAL_REQUIRED", "message"), ExitCode::Refused),
            (error_status(Code::Unavailable, "OUTCOME_UNKNOWN", "message"), ExitCode::OutcomeUnknown),
        ] {
            assert_eq!(status_to_error(status.clone()).exit_code(), exit, "{status:?}");
        }
    }
}
