//! Authentication middleware: credentials, rate limits, callers.
//!
//! Every call passes through here once, over gRPC or as JSON, and then has a [`Caller`]. A token is looked up for each
//! call and never cached, so revoking one takes effect with the next call. Calls are limited by source before any
//! look-up, and by credential after it. The middleware has database connections of its own, so that a caller with many
//! lists and watches does not delay the authentication of others.
//!
//! A gRPC call must have the content type of gRPC. A foreign web page cannot make a browser send that without a CORS
//! preflight, and a browser may have a client certificate.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::api::api_error::{bmdb_status, code_name, error_status, rate_limited};
use crate::api::authorization::{RULES, RequiredAuth, authorize_call, find_rule};
use crate::api::caller::Caller;
use crate::api::credential_checks::CredentialChecks;
use crate::api::listener::operator_acceptor::ApiPeer;
use crate::api::listener::public_calls;
use crate::api::listener::source_limits::{SourceLimiter, source_key};
use crate::rate_limiter::CallRateLimiter;
use bmdb::connection::read_pool::ReadPool;
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::{ByCall, ByRpc};
use bmdb::orders::credential::{self, AccessCredential, PresentedToken};
use model::time::Rate;

/// Most calls without a credential at once; one source may have a quarter of them.
const MAX_PUBLIC_CALLS: usize = 64;

/// Rate limits of the API.
#[derive(Clone, Copy, Debug)]
pub struct ApiRates {
    /// Limit for one source address, with any credential.
    pub source: Rate,
    /// Limit for one credential, from all addresses.
    pub credential: Rate,
}

/// Authenticates calls, limits their rates and counts them.
pub struct AuthLayer {
    read_pool: ReadPool,
    by_source: CallRateLimiter,
    by_credential: CallRateLimiter,
    checks: CredentialChecks,
    public_calls: Arc<SourceLimiter>,
    metrics: Metrics,
    stop: CancellationToken,
}

impl AuthLayer {
    /// Creates the layer. It queries through `read_pool`, and ends open requests at `stop`. `checks` are those of
    /// streams.
    #[must_use]
    pub fn new(
        read_pool: ReadPool,
        checks: CredentialChecks,
        rates: ApiRates,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Self {
        for rule in RULES {
            drop(metrics.api_calls.get_or_create(&ByCall { rpc: rule.rpc, code: code_name(Code::Ok) }));
            drop(metrics.api_call_seconds.get_or_create(&ByRpc { rpc: rule.rpc }));
        }
        Self {
            read_pool,
            checks,
            public_calls: SourceLimiter::new(MAX_PUBLIC_CALLS),
            metrics,
            stop,
            by_source: CallRateLimiter::new(rates.source),
            by_credential: CallRateLimiter::new(rates.credential),
        }
    }

    /// Removes sources and credentials that have not called for long.
    pub fn forget_idle(&self) {
        self.checks.forget_idle();
        self.by_source.forget_idle();
        self.by_credential.forget_idle();
    }

    /// Rejects a source that calls too often. This is the first check of every request.
    pub fn check_source_rate(&self, peer: &ApiPeer) -> Result<(), Status> {
        // The first request has come. It counts even if it is refused.
        drop(peer.place.begin_request());
        if self.by_source.allows(source_key(peer.address.ip())) {
            return Ok(());
        }
        tracing::debug!(address = %peer.address, "a source calls too often");
        Err(rate_limited(Duration::from_secs(1)))
    }

    /// Authenticates and authorizes a call by its headers alone. Returns the caller, `None` for a public call, or the
    /// reason for a rejection.
    pub async fn admit_call(
        &self,
        rpc: &str,
        headers: &HeaderMap,
        peer: &ApiPeer,
    ) -> Result<Option<Caller>, Status> {
        let answered = peer.place.begin_request();
        let mut admitted = self.authenticate(rpc, headers, peer.certificate).await;
        if matches!(admitted, Ok(Some(_)))
            && let Err(error) = peer.place.prove()
        {
            admitted = Err(error_status(Code::Unavailable, "UNAVAILABLE", error.to_string()));
        }
        if let Err(status) = &admitted {
            tracing::debug!(rpc, address = %peer.address, code = ?status.code(), "a call was refused");
            self.record_call(rpc, status.code(), None);
        }
        drop(answered);
        admitted
    }

    /// Counts a call, with its duration if it was carried out.
    fn record_call(&self, rpc: &str, code: Code, took: Option<Duration>) {
        // A call without a rule is not counted: a client could create any label.
        let Some(rule) = find_rule(rpc) else { return };
        self.metrics.api_calls.get_or_create(&ByCall { rpc: rule.rpc, code: code_name(code) }).inc();
        if let Some(took) = took {
            self.metrics.api_call_seconds.get_or_create(&ByRpc { rpc: rule.rpc }).observe(took.as_secs_f64());
        }
    }

    async fn authenticate(
        &self,
        rpc: &str,
        headers: &HeaderMap,
        certificate: Option<[u8; 32]>,
    ) -> Result<Option<Caller>, Status> {
        let Some(rule) = find_rule(rpc) else {
            return Err(error_status(Code::Unimplemented, "UNKNOWN_RPC", format!("there is no call {rpc}")));
        };
        if rule.required == RequiredAuth::Public {
            return Ok(None);
        }
        reject_when_stopping(&self.stop)?;
        let credential = self.find_credential(headers, certificate).await?;
        let mut key = [0; 32];
        key[..16].copy_from_slice(credential.id.as_bytes());
        if !self.by_credential.allows(key) {
            return Err(rate_limited(Duration::from_secs(1)));
        }
        authorize_call(&rule, credential.role, &credential.scope)
            .map_err(|reason| error_status(Code::PermissionDenied, "PERMISSION_DENIED", reason))?;
        Ok(Some(Caller::Credential(Arc::new(credential))))
    }

    /// The credential of a call: its token, or the connection's certificate if there is no token.
    async fn find_credential(
        &self,
        headers: &HeaderMap,
        certificate: Option<[u8; 32]>,
    ) -> Result<AccessCredential, Status> {
        let found = match bearer_token(headers)? {
            Some(token) => {
                let presented =
                    PresentedToken::parse(token).ok_or_else(|| unauthenticated(UNKNOWN_CREDENTIAL))?;
                self.read_pool
                    .read_with(presented, |tx, presented| Box::pin(credential::find_by_token(tx, presented)))
                    .await
            }
            None => match certificate {
                Some(fingerprint) => {
                    self.read_pool
                        .read(move |tx| Box::pin(credential::find_by_certificate(tx, fingerprint)))
                        .await
                }
                None => {
                    return Err(unauthenticated(
                        "this call needs a credential: send `authorization: Bearer TOKEN`, or connect with a client \
                         certificate that was pinned; `shepherdctl tokens` makes either",
                    ));
                }
            },
        };
        let credential = found.map_err(bmdb_status)?.ok_or_else(|| unauthenticated(UNKNOWN_CREDENTIAL))?;
        if credential.active {
            return Ok(credential);
        }
        // The caller has proven the credential, so it may learn that it was valid once.
        Err(unauthenticated(if credential.revoked_at.is_some() {
            "this credential was revoked; ask an admin for another one"
        } else {
            "this credential has expired; ask an admin for another one"
        }))
    }
}

/// Rejects a request that arrives over an open connection while the server stops.
fn reject_when_stopping(stop: &CancellationToken) -> Result<(), Status> {
    if stop.is_cancelled() {
        let output = "this shepherd is stopping, and nothing was done; call another one";
        return Err(error_status(Code::Unavailable, "SERVER_STOPPING", output));
    }
    Ok(())
}

const UNKNOWN_CREDENTIAL: &str =
    "this credential is not known to this fleet; is it complete, and for this fleet?";

fn unauthenticated(text: &str) -> Status {
    error_status(Code::Unauthenticated, "INVALID_CREDENTIAL", text)
}

fn bearer_token(headers: &HeaderMap) -> Result<Option<&str>, Status> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    token.map(Some).ok_or_else(|| unauthenticated("the header `authorization` must be `Bearer TOKEN`"))
}

/// Admits a call and attaches its [`Caller`], or rejects it.
pub async fn auth_middleware(
    State(auth): State<Arc<AuthLayer>>,
    mut request: Request,
    next: Next,
) -> Response {
    // A JSON call was authenticated before its body was read, so it has a caller already. A client cannot forge that:
    // extensions are not sent over the network.
    if request.extensions().get::<Caller>().is_none() {
        let result =
            peer_of(request.extensions()).and_then(|peer| auth.check_source_rate(&peer).map(|()| peer));
        let peer = match result {
            Ok(peer) => peer,
            Err(status) => return status.into_http(),
        };
        if !is_grpc(request.headers()) {
            let text =
                "calls come here by gRPC, with `content-type: application/grpc`; in JSON they go to /api\n";
            return (StatusCode::UNSUPPORTED_MEDIA_TYPE, text).into_response();
        }
        if let Err(status) = admit_request(&auth, peer, &mut request).await {
            return status.into_http();
        }
    }
    // Hide the token from the services and their logs.
    request.headers_mut().remove(header::AUTHORIZATION);
    let (rpc, began) = (request.uri().path().trim_start_matches('/').to_owned(), Instant::now());
    let response = next.run(request).await;
    let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
    auth.record_call(&rpc, code, Some(began.elapsed()));
    response
}

/// Authenticates a gRPC call. A public call gets a slot and a bounded body.
async fn admit_request(auth: &Arc<AuthLayer>, peer: ApiPeer, request: &mut Request) -> Result<(), Status> {
    let rpc = request.uri().path().trim_start_matches('/').to_owned();
    if let Some(caller) = auth.admit_call(&rpc, request.headers(), &peer).await? {
        request.extensions_mut().insert(caller);
        return Ok(());
    }
    let permit = auth.public_calls.try_acquire(source_key(peer.address.ip()));
    let permit = permit.ok_or_else(|| rate_limited(Duration::from_secs(1)))?;
    let body = std::mem::take(request.body_mut());
    let layer = auth.clone();
    *request.body_mut() = public_calls::bounded_body(body, permit, auth.stop.clone(), move || {
        layer.check_source_rate(&peer).is_ok()
    });
    Ok(())
}

/// Whether a request has the content type of gRPC.
fn is_grpc(headers: &HeaderMap) -> bool {
    let bytes = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    bytes.is_some_and(|bytes| bytes.starts_with(b"application/grpc"))
}

/// The peer of the connection over which a request came.
pub fn peer_of(extensions: &Extensions) -> Result<ApiPeer, Status> {
    extensions.get::<ApiPeer>().cloned().ok_or_else(|| {
        tracing::error!("a call came in without its connection");
        error_status(Code::Internal, "INTERNAL", "this shepherd failed to answer")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopping_server_rejects_calls_with_a_message() {
        let stop = CancellationToken::new();
        reject_when_stopping(&stop).unwrap();
        stop.cancel();
        let refused = reject_when_stopping(&stop).unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "so that it is given again, elsewhere");
        assert!(refused.message().contains("call another one"), "{refused}");
    }

    #[test]
    fn only_bearer_tokens_are_accepted() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer_token(&headers).map(|token| token.map(str::to_owned)).ok()
        };
        assert_eq!(read("Bearer x"), Some(Some("x".to_owned())));
        assert_eq!(read("bearer x"), Some(Some("x".to_owned())));
        assert_eq!(read("Basic eDp5"), None);
        assert_eq!(read("x"), None);
        assert_eq!(bearer_token(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn requests_of_web_pages_are_not_grpc() {
        let says = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            is_grpc(&headers)
        };
        assert!(says("application/grpc") && says("application/grpc+proto"));
        // Content types that a browser sends without a preflight (fetch.spec.whatwg.org, CORS-safelisted
        // request-header).
        for value in ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""] {
            assert!(!says(value), "{value}");
        }
        assert!(!says("text/plain; application/grpc"));
        assert!(!is_grpc(&HeaderMap::new()));
    }
}
