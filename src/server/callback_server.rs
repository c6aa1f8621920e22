//! The callback server as a whole: what it is made of, and ending it in order.
//!
//! It listens first and only then makes itself known: its session in the BMDB
//! carries the endpoints it is reached at, and every callback server tells
//! agents the endpoints of all sessions alive. One that stopped or died is
//! forgotten with its session.
//!
//! The end, in this order: no more connections are taken; calls under way are
//! answered; what still waits is stored; the session is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::group_commit::{GroupCommit, Heartbeats};
use crate::bmdb::metrics::Metrics;
use crate::bmdb::secret::SecretsKey;
use crate::bmdb::session::{Session, Sessions};
use crate::model::time::Rate;
use crate::proto::agent::v1::agent_callback_server::AgentCallbackServer;
use crate::server::accept::{AgentStream, ConnectionLimits, accept};
use crate::server::callback_service::{CallRates, CallbackService};
use crate::server::certificate::{Authorities, Certificate, CertificateSource, RenewalClock, ends_of};
use crate::server::error::ServerError;
use crate::server::fetching::{Artefacts, Fetching, Source};
use crate::server::heartbeat_form::MESSAGE_LIMIT;
use crate::server::presence::Presence;
use crate::server::tls::server_config;

/// Component of the session that a callback server holds.
pub const COMPONENT: &str = "callback";

const LISTEN_FLAG: &str = "--agent_listen_address";
const ENDPOINTS_LAST: Duration = Duration::from_secs(5);
const FORGET_KEYS: Duration = Duration::from_mins(1);
const CALL_LIMIT: Duration = Duration::from_secs(15);
const GRACE: Duration = Duration::from_secs(10);
const KEEPALIVE: Duration = Duration::from_mins(1);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(20);
/// An agent has one call under way; some more for its retries.
const CALLS_PER_CONNECTION: u32 = 4;
const HEADER_LIMIT: u32 = 16 << 10;

/// What a callback server is started with.
#[derive(Clone, Debug)]
pub struct CallbackSettings {
    /// Where to listen; port 0 takes a free one.
    pub listen_address: SocketAddr,
    /// `HOST:PORT` under which agents reach this server. Empty: the address listened on.
    pub endpoints: Vec<String>,
    /// Its certificate.
    pub certificate: CertificateSource,
    /// What opens orders that hold secrets; without it no machine is told of any.
    pub secrets: Option<Arc<SecretsKey>>,
    /// When it is looked at again.
    pub renewal: RenewalClock,
    /// How often one agent may call.
    pub agent_rate: Rate,
    /// Limits on connections.
    pub limits: ConnectionLimits,
}

/// A callback server that runs.
#[derive(Debug)]
pub struct CallbackServer {
    /// Where it listens.
    pub local_addr: SocketAddr,
    /// Where agents reach it.
    pub endpoints: Vec<String>,
    /// What agents verify it against.
    pub authorities: Authorities,
    ended: JoinHandle<()>,
}

impl CallbackServer {
    /// Waits until it has ended, which it does after its token was cancelled.
    pub async fn ended(self) {
        if let Err(error) = self.ended.await {
            tracing::error!(%error, "the callback server did not end in order");
        }
    }

    /// What agents verify it against at this moment, DER. Empty: their own trust stores.
    #[must_use]
    pub fn ca_certificates(&self) -> Vec<Vec<u8>> {
        self.authorities.borrow().clone()
    }
}

/// Starts a callback server that runs until `stop`.
pub async fn serve_agents(
    bmdb: Bmdb,
    sessions: Sessions,
    settings: CallbackSettings,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<CallbackServer, ServerError> {
    let address = settings.listen_address;
    let listening = |source| ServerError::Listen { address, flag: LISTEN_FLAG, source };
    let listener = TcpListener::bind(address).await.map_err(listening)?;
    let local_addr = listener.local_addr().map_err(listening)?;
    let mut endpoints = settings.endpoints.clone();
    if endpoints.is_empty() {
        endpoints.push(local_addr.to_string());
    }
    let names = endpoints.iter().map(|endpoint| host_of(endpoint)).collect::<Result<Vec<_>, _>>()?;
    let certificate = Certificate::get(&settings.certificate, &bmdb, names, (settings.renewal.now)()).await?;
    let config = server_config(certificate.shown.clone())?;
    bmdb.read_policy().await?;
    let known = {
        let (endpoints, shown) = (endpoints.clone(), certificate.shown.clone());
        move || serde_json::json!({ "endpoints": endpoints, "certificate_ends": ends_of(&shown) })
    };
    let presence = Presence::new(sessions.clone(), COMPONENT, known, metrics.clone());
    let session = presence.start().await?;

    let look_again = settings.renewal.look_again;
    let authorities = certificate.authorities();
    let (told, endpoints_alive) = watch::channel(endpoints.clone());
    let rates = Arc::new(CallRates::new(settings.agent_rate));
    let (heartbeats, group_commit) = Heartbeats::new(bmdb.clone(), sessions.process(), metrics.clone());
    let service = CallbackService {
        heartbeats,
        bmdb: bmdb.clone(),
        endpoints: endpoints_alive,
        authorities: authorities.clone(),
        rates: rates.clone(),
        secrets: settings.secrets,
        fetching: Fetching::new(sources(&bmdb), metrics.clone(), stop.clone()),
        metrics: metrics.clone(),
    };
    let (accepted, connections) = mpsc::channel(256);
    let accepting = accept(listener, config, settings.limits, metrics.clone(), accepted, stop.clone());
    let ended = tokio::spawn(run(Parts {
        accepting: tokio::spawn(accepting),
        freshening: tokio::spawn(certificate.keep_fresh(settings.renewal, stop.clone())),
        forgetting: tokio::spawn(forget_keys(rates, stop.clone())),
        telling: tokio::spawn(tell_endpoints(bmdb, endpoints.clone(), told, stop.clone())),
        presence: tokio::spawn(presence.stay(session, look_again, stop.clone())),
        connections,
        service,
        group_commit,
        sessions,
        stop,
    }));
    tracing::info!(%local_addr, ?endpoints, "listening for agents");
    Ok(CallbackServer { local_addr, endpoints, authorities, ended })
}

/// Where files that machines fetch come from.
fn sources(bmdb: &Bmdb) -> Vec<Arc<dyn Source>> {
    vec![Arc::new(Artefacts(bmdb.clone()))]
}

struct Parts {
    accepting: JoinHandle<()>,
    freshening: JoinHandle<()>,
    forgetting: JoinHandle<()>,
    telling: JoinHandle<()>,
    presence: JoinHandle<Option<Session>>,
    connections: mpsc::Receiver<AgentStream>,
    service: CallbackService,
    group_commit: GroupCommit,
    sessions: Sessions,
    stop: CancellationToken,
}

async fn run(parts: Parts) {
    let flush = CancellationToken::new();
    let committing = tokio::spawn(parts.group_commit.run(flush.clone()));
    serve(parts.service, parts.connections, parts.stop).await;
    flush.cancel();
    for (name, task) in [
        ("accepting", parts.accepting),
        ("freshening", parts.freshening),
        ("forgetting", parts.forgetting),
        ("telling", parts.telling),
        ("committing", committing),
    ] {
        if let Err(error) = task.await {
            tracing::error!(%error, name, "a part of the callback server ended early");
        }
    }
    if let Ok(Some(session)) = parts.presence.await
        && let Err(error) = parts.sessions.close(&session, "the callback server stopped").await
    {
        tracing::warn!(%error, "the callback server's session will be closed by the reaper");
    }
}

/// Answers calls until `stop`, and then those under way, for a grace period.
async fn serve(service: CallbackService, connections: mpsc::Receiver<AgentStream>, stop: CancellationToken) {
    let service = AgentCallbackServer::new(service).max_decoding_message_size(MESSAGE_LIMIT);
    let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
    let serving = Server::builder()
        .timeout(CALL_LIMIT)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_max_header_list_size(HEADER_LIMIT)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE_ANSWER))
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let late = async {
        stop.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        ended = serving => {
            if let Err(error) = ended {
                tracing::error!(%error, "the callback server ended");
            }
        }
        () = late => tracing::warn!("calls of agents were cut off after the grace period"),
    }
}

/// Looks every few seconds where agents can report; while the database is away, nothing changes.
async fn tell_endpoints(
    bmdb: Bmdb,
    own: Vec<String>,
    told: watch::Sender<Vec<String>>,
    stop: CancellationToken,
) {
    loop {
        match bmdb.live_endpoints().await {
            Ok(mut alive) => {
                alive.extend(own.iter().cloned());
                alive.sort_unstable();
                alive.dedup();
                told.send_if_modified(|known| {
                    let changed = *known != alive;
                    *known = alive;
                    changed
                });
            }
            Err(error) => tracing::debug!(%error, "cannot look for other callback servers"),
        }
        if stop.run_until_cancelled(tokio::time::sleep(ENDPOINTS_LAST)).await.is_none() {
            return;
        }
    }
}

async fn forget_keys(rates: Arc<CallRates>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(FORGET_KEYS)).await.is_some() {
        rates.forget_idle();
    }
}

/// Host name or address of an endpoint, without brackets.
pub(crate) fn host_of(endpoint: &str) -> Result<String, ServerError> {
    let odd = || ServerError::Endpoint(endpoint.to_owned());
    let (host, port) = endpoint.rsplit_once(':').ok_or_else(odd)?;
    let port: u16 = port.parse().map_err(|_| odd())?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let name = bare.unwrap_or(host);
    // What TLS could not verify, no agent could use.
    let usable = port != 0 && bare.is_some() == name.contains(':');
    match rustls::pki_types::ServerName::try_from(name) {
        Ok(_) if usable => Ok(name.to_owned()),
        _ => Err(odd()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_gives_the_name_for_the_certificate() {
        for (endpoint, host) in [
            ("shepherd.example:8443", "shepherd.example"),
            ("192.0.2.1:1", "192.0.2.1"),
            ("[2001:db8::1]:8443", "2001:db8::1"),
        ] {
            assert_eq!(host_of(endpoint).unwrap(), host);
        }
        for odd in
            ["", "host", "host:", "host:0", "host:65536", "::1:80", "[::1:80", ":80", "a b:80", "[host]:80"]
        {
            let said = host_of(odd).unwrap_err().to_string();
            assert!(said.contains("is no endpoint that agents could reach"), "{odd}");
        }
    }
}
