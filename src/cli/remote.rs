//! Asking through the API: connecting to one of a context's servers, and what its errors mean here.

use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretString};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

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
    channel: Channel,
    token: Token,
}

impl Remote {
    /// Connects to the first of the context's servers that answers.
    pub async fn connect(context: &Context) -> Result<Self, CliError> {
        let token = Token::new(&context.token()?)?;
        let authority = std::fs::read(&context.ca_certificate_path).map_err(|error| {
            let path = context.ca_certificate_path.display();
            CliError::Wrong(format!("cannot read the CA certificate {path} of this context: {error}"))
        })?;
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
        let mut failures = Vec::new();
        for server in &context.servers {
            let wrong = |error: tonic::transport::Error| {
                CliError::Wrong(format!("{server:?} is no server: {}", chain(&error)))
            };
            let endpoint = Endpoint::from_shared(format!("https://{server}"))
                .and_then(|endpoint| endpoint.tls_config(tls.clone()))
                .map_err(wrong)?
                .connect_timeout(CONNECT_LIMIT)
                .timeout(CALL_LIMIT);
            match endpoint.connect().await {
                Ok(channel) => return Ok(Self { channel, token }),
                Err(error) => failures.push(format!("{server}: {}", chain(&error))),
            }
        }
        Err(CliError::Failed(format!(
            "no server of this context answers ({}). Is a shepherd running there? With --direct and --bmdb_url the \
             database is asked itself",
            failures.join("; ")
        )))
    }

    /// What a client of a service is made with.
    #[must_use]
    pub fn service(&self) -> Authorized {
        InterceptedService::new(self.channel.clone(), self.token.clone())
    }
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
    fn whose_mistake_it_was_decides_the_exit_code() {
        for (code, exit) in [(Code::NotFound, 2), (Code::PermissionDenied, 2), (Code::Unavailable, 1)] {
            assert_eq!(refused(Status::new(code, "said")).exit_code(), exit);
        }
    }
}
