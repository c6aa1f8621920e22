//! Whose call it is, and whether they may make it.
//!
//! Every call passes here once, whichever way it came in, and is then known by its [`Caller`]. A token is
//! looked up each time: nothing is remembered of it, so revoking one counts with the next call. Calls are
//! limited by source before anything is looked up, and by credential after it. The door looks through
//! connections of its own: whoever lists and watches much makes nobody wait to be let in.
//!
//! A call by gRPC must say that it is one: a page of somebody else's cannot make a browser send that
//! without asking first, and a browser may have a client certificate.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::bmdb::audit::Actor;
use crate::bmdb::credential::{self, Credential, Presented};
use crate::bmdb::look::Looks;
use crate::bmdb::metrics::{ByCall, ByRpc, Metrics};
use crate::model::access::{Role, Scope};
use crate::model::time::Rate;
use crate::server::api::access::{Needs, RULES, may, rule_of};
use crate::server::api::door::good::Good;
use crate::server::api::listener::{ApiPeer, Places};
use crate::server::api::refusal::{code_name, of_bmdb, refused, too_often};
use crate::server::callback_service::CallRates;

mod good;
mod public;

/// Most calls at once that need no credential; a quarter of them of one source.
const PUBLIC_CALLS: usize = 64;

/// How often somebody may call.
#[derive(Clone, Copy, Debug)]
pub struct ApiRates {
    /// From one address, whoever it is.
    pub source: Rate,
    /// With one credential.
    pub credential: Rate,
}

/// Whoever calls.
#[derive(Clone, Debug)]
pub struct Caller {
    credential: Arc<Credential>,
}

impl Caller {
    /// The credential they call with.
    #[must_use]
    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    /// With whose machines it is good.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.credential.scope
    }

    /// As the audit knows them: names are not unique, credentials are.
    #[must_use]
    pub fn actor(&self) -> Actor {
        let Credential { id, kind, name, .. } = &*self.credential;
        Actor { name: format!("{name} ({kind} {id})"), credential: Some(*id) }
    }
}

/// What checks calls.
pub struct Door {
    looks: Looks,
    by_source: CallRates,
    by_credential: CallRates,
    good: Good,
    public: Arc<Places>,
    metrics: Metrics,
    stop: CancellationToken,
}

impl Door {
    /// A door of a fleet's API until `stop`, which looks through `looks`.
    #[must_use]
    pub fn new(looks: Looks, rates: ApiRates, metrics: Metrics, stop: CancellationToken) -> Self {
        for rule in RULES {
            drop(metrics.api_calls.get_or_create(&ByCall { rpc: rule.rpc, code: code_name(Code::Ok) }));
            drop(metrics.api_call_seconds.get_or_create(&ByRpc { rpc: rule.rpc }));
        }
        Self {
            looks,
            good: Good::default(),
            public: Places::new(PUBLIC_CALLS),
            metrics,
            stop,
            by_source: CallRates::new(rates.source),
            by_credential: CallRates::new(rates.credential),
        }
    }

    /// Forgets whoever has not called for long.
    pub fn forget_idle(&self) {
        self.good.forget_idle();
        self.by_source.forget_idle();
        self.by_credential.forget_idle();
    }

    /// Whether a credential is good, or was a second ago, for streams that were opened with it.
    pub async fn is_good(&self, id: Uuid) -> Result<bool, Status> {
        let answer = self.good.ask(id, Instant::now(), || {
            let looks = self.looks.clone();
            Box::pin(async move {
                let look = looks.look(move |tx| Box::pin(async move { credential::by_id(tx, id).await }));
                Ok(look.await.map_err(of_bmdb)?.is_some_and(|found| found.active))
            })
        });
        answer.await
    }

    /// Refuses a source that calls too often; the first thing that is asked of whatever comes in.
    pub fn hears(&self, peer: &ApiPeer) -> Result<(), Status> {
        if self.by_source.allows(key_of_address(peer.address.ip())) {
            return Ok(());
        }
        tracing::debug!(address = %peer.address, "a source calls too often");
        Err(too_often(Duration::from_secs(1)))
    }

    /// Whose call it is that was heard, `None` where that does not matter; or why it is refused. Nothing of
    /// the call is looked at but its headers.
    pub async fn admit(
        &self,
        rpc: &str,
        headers: &HeaderMap,
        peer: &ApiPeer,
    ) -> Result<Option<Caller>, Status> {
        let admitted = self.judge(rpc, headers, peer.certificate).await;
        if let Err(status) = &admitted {
            tracing::debug!(rpc, address = %peer.address, code = ?status.code(), "a call was refused");
            self.answered(rpc, status.code(), None);
        }
        admitted
    }

    /// Counts an answer, with how long it took when anything was done for it.
    fn answered(&self, rpc: &str, code: Code, took: Option<Duration>) {
        // Whatever else somebody calls would be a name of their choice.
        let Some(rule) = rule_of(rpc) else { return };
        self.metrics.api_calls.get_or_create(&ByCall { rpc: rule.rpc, code: code_name(code) }).inc();
        if let Some(took) = took {
            self.metrics.api_call_seconds.get_or_create(&ByRpc { rpc: rule.rpc }).observe(took.as_secs_f64());
        }
    }

    async fn judge(
        &self,
        rpc: &str,
        headers: &HeaderMap,
        certificate: Option<[u8; 32]>,
    ) -> Result<Option<Caller>, Status> {
        let Some(rule) = rule_of(rpc) else {
            return Err(refused(Code::Unimplemented, "UNKNOWN_RPC", format!("there is no call {rpc}")));
        };
        if rule.needs == Needs::Nobody {
            return Ok(None);
        }
        going_on(&self.stop)?;
        let credential = self.credential_of(headers, certificate).await?;
        let mut key = [0; 32];
        key[..16].copy_from_slice(credential.id.as_bytes());
        if !self.by_credential.allows(key) {
            return Err(too_often(Duration::from_secs(1)));
        }
        may(&rule, credential.role, &credential.scope)
            .map_err(|said| refused(Code::PermissionDenied, "PERMISSION_DENIED", said))?;
        Ok(Some(Caller { credential: Arc::new(credential) }))
    }

    /// The credential of a call: its token, or the connection's certificate where it has none.
    async fn credential_of(
        &self,
        headers: &HeaderMap,
        certificate: Option<[u8; 32]>,
    ) -> Result<Credential, Status> {
        let found = match bearer(headers)? {
            Some(token) => {
                let presented = Presented::read(token).ok_or_else(|| unauthenticated(NOT_KNOWN))?;
                let presented = Arc::new(presented);
                self.looks
                    .look(move |tx| {
                        let presented = presented.clone();
                        Box::pin(async move { credential::of_token(tx, &presented).await })
                    })
                    .await
            }
            None => match certificate {
                Some(fingerprint) => {
                    self.looks
                        .look(move |tx| {
                            Box::pin(async move { credential::of_certificate(tx, fingerprint).await })
                        })
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
        let credential = found.map_err(of_bmdb)?.ok_or_else(|| unauthenticated(NOT_KNOWN))?;
        if credential.active {
            return Ok(credential);
        }
        // Whoever proved it may know that it was good once.
        Err(unauthenticated(if credential.revoked_at.is_some() {
            "this credential was revoked; ask an admin for another one"
        } else {
            "this credential has expired; ask an admin for another one"
        }))
    }
}

/// Refuses what still comes in over a connection that is open while the server stops.
fn going_on(stop: &CancellationToken) -> Result<(), Status> {
    if stop.is_cancelled() {
        let said = "this shepherd stops, and nothing was done; ask another one";
        return Err(refused(Code::Unavailable, "SERVER_STOPPING", said));
    }
    Ok(())
}

const NOT_KNOWN: &str = "this credential is not known to this fleet; is it whole, and for this fleet?";

fn unauthenticated(said: &str) -> Status {
    refused(Code::Unauthenticated, "INVALID_CREDENTIAL", said)
}

fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Status> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    token.map(Some).ok_or_else(|| unauthenticated("the header `authorization` must be `Bearer TOKEN`"))
}

/// What an address is counted by.
pub(super) fn key_of_address(address: IpAddr) -> [u8; 32] {
    let mut key = [0; 32];
    match address.to_canonical() {
        IpAddr::V4(address) => key[..4].copy_from_slice(&address.octets()),
        // Whoever has one address of such a network has all of them.
        IpAddr::V6(address) => key[4..12].copy_from_slice(&address.octets()[..8]),
    }
    key
}

/// Lets a call in, known by its [`Caller`], or refuses it.
pub async fn guard(State(door): State<Arc<Door>>, mut request: Request, next: Next) -> Response {
    // A call in JSON was let in before its body was read, and its caller is known. Nobody can send that:
    // extensions do not come over the network.
    if request.extensions().get::<Caller>().is_none() {
        let heard = peer(request.extensions()).and_then(|peer| door.hears(&peer).map(|()| peer));
        let peer = match heard {
            Ok(peer) => peer,
            Err(status) => return status.into_http(),
        };
        if !says_grpc(request.headers()) {
            let said =
                "calls come here by gRPC, with `content-type: application/grpc`; in JSON they go to /api\n";
            return (StatusCode::UNSUPPORTED_MEDIA_TYPE, said).into_response();
        }
        if let Err(status) = let_in(&door, peer, &mut request).await {
            return status.into_http();
        }
    }
    // Not for the services' eyes, nor for what they may log.
    request.headers_mut().remove(header::AUTHORIZATION);
    let (rpc, began) = (request.uri().path().trim_start_matches('/').to_owned(), Instant::now());
    let response = next.run(request).await;
    let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
    door.answered(&rpc, code, Some(began.elapsed()));
    response
}

/// Lets a call in that was heard.
async fn let_in(door: &Arc<Door>, peer: ApiPeer, request: &mut Request) -> Result<(), Status> {
    let rpc = request.uri().path().trim_start_matches('/').to_owned();
    if let Some(caller) = door.admit(&rpc, request.headers(), &peer).await? {
        request.extensions_mut().insert(caller);
        return Ok(());
    }
    let place = door.public.take(key_of_address(peer.address.ip()));
    let place = place.ok_or_else(|| too_often(Duration::from_secs(1)))?;
    let body = std::mem::take(request.body_mut());
    let hearing = door.clone();
    *request.body_mut() =
        public::bounded(body, place, door.stop.clone(), move || hearing.hears(&peer).is_ok());
    Ok(())
}

/// Whether a request says that it is a call by gRPC.
fn says_grpc(headers: &HeaderMap) -> bool {
    let said = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    said.is_some_and(|said| said.starts_with(b"application/grpc"))
}

/// The connection that a request came by.
pub fn peer(extensions: &Extensions) -> Result<ApiPeer, Status> {
    extensions.get::<ApiPeer>().cloned().ok_or_else(|| {
        tracing::error!("a call came in without its connection");
        refused(Code::Internal, "INTERNAL", "this shepherd failed to answer")
    })
}

/// The caller of a request that passed the door.
pub fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, Status> {
    request.extensions().get::<Caller>().cloned().ok_or_else(|| {
        tracing::error!("a call came to a service without passing the door");
        refused(Code::Internal, "INTERNAL", "this shepherd failed to answer")
    })
}

/// A role's name as somebody said it.
pub fn role(said: &str) -> Result<Role, Status> {
    said.parse().map_err(|error: crate::model::process::UnknownName| {
        crate::server::api::refusal::wrong("role", error.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_to_a_server_that_stops_is_refused_in_words() {
        let stop = CancellationToken::new();
        going_on(&stop).unwrap();
        stop.cancel();
        let refused = going_on(&stop).unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "so that it is given again, elsewhere");
        assert!(refused.message().contains("ask another one"), "{refused}");
    }

    #[test]
    fn only_a_bearer_token_is_one() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer(&headers).map(|token| token.map(str::to_owned)).ok()
        };
        assert_eq!(read("Bearer x"), Some(Some("x".to_owned())));
        assert_eq!(read("bearer x"), Some(Some("x".to_owned())));
        assert_eq!(read("Basic eDp5"), None);
        assert_eq!(read("x"), None);
        assert_eq!(bearer(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn what_any_page_can_send_is_no_call_by_grpc() {
        let says = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            says_grpc(&headers)
        };
        assert!(says("application/grpc") && says("application/grpc+proto"));
        // What a browser sends without asking (fetch.spec.whatwg.org, CORS-safelisted request-header).
        for value in ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", ""] {
            assert!(!says(value), "{value}");
        }
        assert!(!says("text/plain; application/grpc"));
        assert!(!says_grpc(&HeaderMap::new()));
    }

    #[test]
    fn a_network_is_one_source() {
        let key = |text: &str| key_of_address(text.parse().unwrap());
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::9"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
    }
}
