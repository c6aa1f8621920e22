//! etcd and the curator on this node: whether they run, and as what.
//!
//! Both run together or not at all. That they run follows from founding, or else from roles; what exactly a role says
//! may change as often as it likes without anything being started again, as long as it is about the same membership.
//! A membership that is over takes its data with it, after etcd has ended: the same node as a member once more is
//! another member, and etcd would not run on what the last one left.
//!
//! etcd is a program beside this one and outlives it; the next role server finds it running and goes on with it. The
//! curator is a part of this process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::curator::bootstrap::{bootstrap, renew_beside_etcd};
use crate::curator::clock::Clock;
use crate::curator::kubernetes::rotation::TOKEN_OVERLAP;
use crate::curator::node::{ConsensusMember, Roles};
use crate::curator::node_id::PublicKey;
use crate::curator::pki::{PEER_LIFETIME, Renewal, Serial, Validity, renewal};
use crate::curator::service::curator::{Curator, LEADER_TTL, SYNC_INTERVAL, Settings};
use crate::curator::tls::certified;
use crate::etcd::client::Client;
use crate::etcd::namespace::Namespace;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::child::keep::{Places, find, keep};
use crate::roleserver::child::spec::Spec;
use crate::roleserver::cluster::etcd::{self, Begun};
use crate::roleserver::cluster::etcd_program::{Flags, VERSION_DEADLINE, ask_flags, running_flags};
use crate::roleserver::cluster::facts::{Connection, ControlPlane, Facts, ToFound};
use crate::roleserver::cluster::files::{Credentials, Files, Membership};
use crate::roleserver::cluster::startup::{
    Inheritance, Startup, begins_anew, decide, inherit, inputs, is_as_it_should,
};
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::reduce::reduce;
use crate::supervisor::value::{Value, Watcher};

/// The port of curators.
pub const CURATOR_PORT: u16 = 7835;
/// The part of etcd that the curator has.
pub(super) const NAMESPACE: &str = "curator";
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// With what a control plane is run.
#[derive(Clone, Debug)]
pub struct Host {
    /// What is kept.
    pub files: Files,
    /// Where programs are kept.
    pub places: Arc<Places>,
    /// The program etcd.
    pub etcd: PathBuf,
    /// The time.
    pub clock: Clock,
}

/// The runnable: what follows from facts, and whoever carries it out.
#[must_use]
pub fn control_plane(host: Host, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        async move {
            let startup = Value::new();
            let watched = facts.clone();
            starting.start("decide", reduce(move || inputs(&watched), decide, &startup))?;
            starting.start("launcher", launcher(host, facts, startup))?;
            Err(starting.healthy().scope().cancelled().await.into())
        }
    })
}

fn launcher(host: Host, facts: Facts, startup: Value<Startup>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (host, facts) = (host.clone(), facts.clone());
        let mut startups = startup.watch();
        async move {
            // Whatever an earlier life said of itself is over.
            facts.control_plane.set(None);
            let scope = starting.scope().clone();
            let first = scope.until_cancelled(startups.next()).await?;
            let last = host.files.membership()?;
            let over = |last: &Membership| {
                inherit(last, etcd::begun(&host.files, last), &first) == Inheritance::Remove
            };
            if last.as_ref().is_some_and(over) {
                end_leftovers(&host).await?;
            }
            // Until its end etcd may have come to begin.
            if let Some(last) = last.filter(over) {
                tracing::info!(member = ?last.member, data = last.data, "a membership of etcd is over, or never began; its data is removed");
                host.files.remove_membership(&last)?;
            }
            let beginning = async {
                Ok::<_, Stop>(match &first {
                    Startup::Nothing => None,
                    Startup::Founding(to_found) => {
                        Some(run_founding(&starting, &scope, &host, &facts, to_found).await?)
                    }
                    Startup::Member(role, connection) => {
                        Some(run_member(&starting, &scope, &host, &facts, role, connection).await?)
                    }
                })
            };
            // A membership that is over before etcd has answered once would be waited for without an end.
            let running = tokio::select! {
                running = beginning => running,
                () = until_another(&mut startups, &first, &host.files) => return Err(another(&facts)),
            };
            // Whoever asked for it is told, and not only the log of this machine.
            if !scope.token().is_cancelled() {
                facts.trouble.set(running.as_ref().err().map(ToString::to_string));
            }
            let running = running?;
            let healthy = starting.healthy();
            loop {
                let next = healthy.scope().until_cancelled(startups.next()).await?;
                if !is_as_it_should(running, &next) {
                    return Err(another(&facts));
                }
            }
        }
    })
}

/// Waits until something else is to run than this, which is only beginning.
async fn until_another(startups: &mut Watcher<Startup>, beginning: &Startup, files: &Files) {
    let begun = || match files.membership() {
        Ok(Some(membership)) => etcd::begun(files, &membership),
        Ok(None) => Begun::NotYet,
        Err(_) => Begun::Unknown,
    };
    startups.next_where(|next| begins_anew(beginning, begun(), next)).await;
}

/// What runs is not what is to run any more.
fn another(facts: &Facts) -> Stop {
    facts.control_plane.set(None);
    if let Some(connection) = facts.connection.latest() {
        connection.curators.set_local(None);
    }
    Stop::because("what this node is to do has changed, and the control plane begins anew")
}

/// Ends an etcd that a role server before this one started and nobody wants any more.
async fn end_leftovers(host: &Host) -> Result<(), Stop> {
    let places = host.places.clone();
    let ended = tokio::task::spawn_blocking(move || {
        crate::roleserver::child::keep::end_leftovers(etcd::NAME, &places)
    });
    Ok(ended.await??)
}

async fn run_founding(
    starting: &Starting,
    scope: &Scope,
    host: &Host,
    facts: &Facts,
    to_found: &ToFound,
) -> Result<u64, Stop> {
    let key = host.files.key()?.ok_or_else(|| Stop::because("this node has no key"))?;
    let founding = &to_found.founding;
    let own = crate::curator::node_id::NodeId::of(&founding.node_key);
    let membership = if let Some(membership) = host.files.membership()? {
        membership
    } else {
        let membership = etcd::first_membership(own, to_found.address, founding.epoch());
        host.files.write_membership(&membership)?;
        membership
    };
    let anchor = founding.authority.anchor();
    if etcd::proof(&host.files).is_none() {
        let validity = Validity::starting(host.clock.now(), PEER_LIFETIME);
        let serial = Serial::new(rand::random());
        let issued =
            founding.authority.issue_peer(&founding.node_key, membership.address, serial, validity)?;
        etcd::write_proofs(&host.files, &key, &issued.certificate, &anchor.certificate)?;
    }
    let cluster = anchor.cluster.to_string();
    let client = start_etcd(starting, scope, host, facts, own, &cluster, &membership).await?;
    let founded = scope.until_cancelled(bootstrap(&client, founding, host.clock.now())).await??;
    let member = scope.until_cancelled(client.status()).await??.member;
    // In this order: a node that has a certificate has its roles, or it would wait for a curator to tell them that is
    // to run here.
    host.files.write_membership(&Membership { member: Some(member), ..membership.clone() })?;
    let role = ConsensusMember { member, peers: std::collections::BTreeMap::new() };
    let roles = Roles { consensus_member: Some(role), ..Roles::default() };
    if host.files.roles().is_none() {
        host.files.write_roles(&roles)?;
    }
    let credentials = Credentials {
        certificate: hex::encode(&founded.certificate),
        ca_certificate: hex::encode(&founded.ca_certificate),
    };
    host.files.write_credentials(&credentials)?;
    host.files.remove_authority()?;
    host.files.remove_snapshot()?;
    let connection = Connection::new(&key, &credentials, &host.files, &host.clock)?;
    tracing::info!(node = %connection.id, "cluster {} is founded", connection.anchor.cluster);
    serve(starting, scope, host, facts, &connection, client, membership.address).await?;
    // First the way, then that nothing is to be founded any more: what is to run follows from roles by then.
    facts.roles.set(roles);
    facts.connection.set(connection);
    facts.to_found.set(None);
    Ok(member)
}

async fn run_member(
    starting: &Starting,
    scope: &Scope,
    host: &Host,
    facts: &Facts,
    role: &ConsensusMember,
    connection: &Connection,
) -> Result<u64, Stop> {
    let key = host.files.key()?.ok_or_else(|| Stop::because("this node has no key"))?;
    let own = connection.id;
    let membership = if let Some(membership) = host.files.membership()? {
        // Etcd may have begun as another than it was started for.
        let of_role = Membership { member: Some(role.member), ..membership.clone() };
        if of_role != membership {
            host.files.write_membership(&of_role)?;
        }
        of_role
    } else {
        let address = scope.until_cancelled(facts.address.watch().next()).await?;
        let membership = etcd::membership_of(own, address, role, connection.curators.epoch());
        host.files.write_membership(&membership)?;
        membership
    };
    if etcd::proof(&host.files).is_none() {
        let mut nodes = NodesClient::new(connection.curators.channel());
        let asking = nodes.issue_peer_certificate(wire::IssuePeerCertificateRequest {});
        let issued = scope.until_cancelled(asking).await?.map_err(|status| {
            Stop::because(format!("asking for a certificate for etcd failed: {}", status.message()))
        })?;
        let certificate = issued.into_inner().certificate;
        etcd::write_proofs(&host.files, &key, &certificate, &connection.anchor.certificate)?;
    }
    let cluster = connection.anchor.cluster.to_string();
    let client = start_etcd(starting, scope, host, facts, own, &cluster, &membership).await?;
    renew(scope, host, connection, &client).await?;
    serve(starting, scope, host, facts, connection, client, membership.address).await?;
    Ok(role.member)
}

/// Starts etcd, and waits until it answers and votes.
async fn start_etcd(
    starting: &Starting,
    scope: &Scope,
    host: &Host,
    facts: &Facts,
    own: crate::curator::node_id::NodeId,
    cluster: &str,
    membership: &Membership,
) -> Result<Client, Stop> {
    let spec_for = {
        let (program, files) = (host.etcd.clone(), host.files.clone());
        let (cluster, membership) = (cluster.to_owned(), membership.clone());
        move |flags| etcd::spec(&program, flags, own, &cluster, &files, &membership)
    };
    starting.start(etcd::NAME, keep_etcd(host, facts, spec_for))?;
    let client = Client::new(vec![etcd::endpoint(&host.files)], Namespace::new(NAMESPACE)?);
    let answering = async {
        let mut complained = false;
        loop {
            let asked = async {
                let status = client.status().await?;
                // With a quorum: one that is cut off answers what it is, too.
                client.get("/").await?;
                Ok::<_, crate::etcd::client::EtcdError>(status.learner)
            };
            match asked.await {
                Ok(false) => return,
                Ok(true) => tracing::debug!("this node's member of etcd learns"),
                Err(error) if !complained => {
                    tracing::info!(%error, "waiting for etcd");
                    complained = true;
                }
                Err(_) => {}
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    };
    scope.until_cancelled(answering).await?;
    Ok(client)
}

/// Keeps etcd running by the flags that its program knows. While the program cannot be asked, the reason is reported.
fn keep_etcd(
    host: &Host,
    facts: &Facts,
    spec_for: impl Fn(Flags) -> Spec + Clone + Send + Sync + 'static,
) -> Runnable {
    let (program, places, trouble) = (host.etcd.clone(), host.places.clone(), facts.trouble.clone());
    let reported = Arc::new(AtomicBool::new(false));
    let decide_spec = move || {
        let (program, places, trouble) = (program.clone(), places.clone(), trouble.clone());
        let (spec_for, reported) = (spec_for.clone(), reported.clone());
        async move {
            let running = tokio::task::spawn_blocking(move || find(etcd::NAME, &places)).await??;
            let digest = |flags| spec_for(flags).digest();
            let running = running.and_then(|(record, _)| running_flags(&record.spec_sha256, digest));
            let flags = match running {
                Some(flags) => Ok(flags),
                None => ask_flags(&program, VERSION_DEADLINE).await,
            };
            // Another reason than ours stays.
            if flags.is_err() || reported.load(Ordering::Relaxed) {
                trouble.set(flags.as_ref().err().map(ToString::to_string));
                reported.store(flags.is_err(), Ordering::Relaxed);
            }
            Ok(spec_for(flags?))
        }
    };
    keep(decide_spec, host.places.clone(), |_| {})
}

/// Gives this node another certificate where its own is over: nobody else may be there to do so.
async fn renew(scope: &Scope, host: &Host, connection: &Connection, client: &Client) -> Result<(), Stop> {
    let current = connection.shown.current();
    let validity = current.cert.first().and_then(|certificate| Validity::read(certificate));
    if !validity.is_none_or(|validity| renewal(validity, host.clock.now()) == Renewal::Expired) {
        return Ok(());
    }
    let key = host.files.key()?.ok_or_else(|| Stop::because("this node has no key"))?;
    let renewing = renew_beside_etcd(client, PublicKey(key.public_key()), host.clock.now());
    let certificate = scope.until_cancelled(renewing).await??;
    host.files.write_credentials(&Credentials {
        certificate: hex::encode(&certificate),
        ca_certificate: hex::encode(&connection.anchor.certificate),
    })?;
    connection.shown.replace(certified(&certificate, key.pkcs8())?);
    tracing::info!(node = %connection.id, "this node has another certificate, from its own etcd");
    Ok(())
}

/// Starts the curator, which listens when this returns.
async fn serve(
    starting: &Starting,
    scope: &Scope,
    host: &Host,
    facts: &Facts,
    connection: &Connection,
    client: Client,
    address: std::net::IpAddr,
) -> Result<(), Stop> {
    let settings = Settings {
        own: connection.id,
        client,
        listen: SocketAddr::new(address, CURATOR_PORT),
        shown: Arc::new(connection.shown.clone()),
        ttl: LEADER_TTL,
        sync_interval: SYNC_INTERVAL,
        token_overlap: TOKEN_OVERLAP,
        clock: host.clock.clone(),
    };
    let listening = Value::new();
    let curator = {
        let listening = listening.clone();
        Runnable::new(move |starting: Starting| {
            let (settings, listening) = (settings.clone(), listening.clone());
            async move {
                let curator = Curator::bind(settings).await?;
                listening.set(curator.address);
                let healthy = starting.healthy();
                curator.run(&healthy.scope().token()).await?;
                Err(healthy.scope().cancelled().await.into())
            }
        })
    };
    starting.start("curator", curator)?;
    let at: SocketAddr = scope.until_cancelled(listening.watch().next()).await?;
    connection.curators.set_local(Some((connection.id, at.to_string())));
    facts.control_plane.set(Some(ControlPlane { port: at.port() }));
    Ok(())
}
