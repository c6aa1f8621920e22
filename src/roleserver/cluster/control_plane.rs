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
use std::time::Duration;

use crate::curator::bootstrap::{bootstrap, renew_beside_etcd};
use crate::curator::clock::Clock;
use crate::curator::etcd::client::Client;
use crate::curator::etcd::namespace::Namespace;
use crate::curator::node::{ConsensusMember, Roles};
use crate::curator::node_id::PublicKey;
use crate::curator::pki::{PEER_LIFETIME, Renewal, Serial, Validity, renewal};
use crate::curator::service::curator::{Curator, LEADER_TTL, SYNC_INTERVAL, Settings};
use crate::curator::tls::certified;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::child::keep::{Places, keep};
use crate::roleserver::cluster::etcd::{self, Begun};
use crate::roleserver::cluster::facts::{Connection, ControlPlane, Facts, ToFound};
use crate::roleserver::cluster::files::{Credentials, Files, Membership};
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::reduce::{Inputs, reduce};
use crate::supervisor::value::{Value, Watcher};

/// The port of curators.
pub const CURATOR_PORT: u16 = 7835;
/// The part of etcd that the curator has.
pub(super) const NAMESPACE: &str = "curator";
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// What is to run, as far as it decides whether something is started again.
#[derive(Clone, Debug)]
pub enum Startup {
    /// Nothing.
    Nothing,
    /// The first member of a cluster that is being founded.
    Founding(ToFound),
    /// A member.
    Member(ConsensusMember, Connection),
}

/// What is known of this node.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// A cluster to be founded.
    pub to_found: Option<ToFound>,
    /// What it is to do.
    pub roles: Option<Roles>,
    /// Its way to the leader.
    pub connection: Option<Connection>,
}

/// Decides what is to run; nothing new is decided while too little is known.
#[must_use]
pub fn decide(known: &Known) -> Option<Startup> {
    if let Some(to_found) = &known.to_found {
        return Some(Startup::Founding(to_found.clone()));
    }
    let (roles, connection) = (known.roles.as_ref()?, known.connection.as_ref()?);
    Some(match &roles.consensus_member {
        None => Startup::Nothing,
        Some(role) => Startup::Member(role.clone(), connection.clone()),
    })
}

/// Whether what runs is what is to run: by its presence and the number of the membership, and by nothing else.
///
/// `running` is the number of the membership that runs; none when nothing does.
#[must_use]
pub fn is_as_it_should(running: Option<u64>, startup: &Startup) -> bool {
    match startup {
        Startup::Nothing => running.is_none(),
        // Whose founding is not over is not told its roles yet.
        Startup::Founding(_) => running.is_some(),
        Startup::Member(role, _) => running == Some(role.member),
    }
}

/// What to do with the membership that was carried out last, before this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inheritance {
    /// It is this one: go on with its data.
    GoOn,
    /// It is over: remove its data.
    Remove,
}

/// Decides about the membership that was carried out last, whose etcd has `begun` like that.
///
/// What etcd has begun as counts, and not what it was started for: a member that was removed and added again before etcd
/// had come to begin is begun as the one that etcd found under its address by then. And where etcd has not begun at all,
/// what it was to begin with may be old: nobody starts in a cluster who was told other members than there are.
#[must_use]
pub fn inherit(last: &Membership, begun: Begun, startup: &Startup) -> Inheritance {
    let member = match begun {
        Begun::As(member) => Some(member),
        Begun::Unknown => last.member,
        Begun::NotYet => None,
    };
    match startup {
        Startup::Founding(_) if last.new_cluster => Inheritance::GoOn,
        Startup::Member(role, _) if member == Some(role.member) => Inheritance::GoOn,
        Startup::Nothing | Startup::Founding(_) | Startup::Member(..) => Inheritance::Remove,
    }
}

/// Whether what is beginning is to begin anew, because `next` is to run instead: another membership, or the same where
/// etcd has not begun and others are members by now.
#[must_use]
pub fn begins_anew(beginning: &Startup, begun: Begun, next: &Startup) -> bool {
    match (beginning, next) {
        // It is over when it says so itself.
        (Startup::Founding(_), _) => false,
        (Startup::Nothing, _) => !is_as_it_should(None, next),
        (Startup::Member(role, _), Startup::Member(other, _)) if role.member == other.member => {
            begun == Begun::NotYet && role.peers != other.peers
        }
        (Startup::Member(role, _), _) => !is_as_it_should(Some(role.member), next),
    }
}

/// What it follows from, together.
#[must_use]
pub fn inputs(facts: &Facts) -> Inputs<Known> {
    Inputs::new(Known::default())
        .with(&facts.to_found, |known: &mut Known, to_found| known.to_found = to_found)
        .with(&facts.roles, |known: &mut Known, roles| known.roles = Some(roles))
        .with(&facts.connection, |known: &mut Known, connection| known.connection = Some(connection))
}

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
                running = beginning => running?,
                () = until_another(&mut startups, &first, &host.files) => return Err(another(&facts)),
            };
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
        let membership = etcd::first_membership(own, to_found.address);
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
    let client = start_etcd(starting, scope, host, own, &anchor.cluster.to_string(), &membership).await?;
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
        let membership = etcd::membership_of(own, address, role);
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
    let client = start_etcd(starting, scope, host, own, &cluster, &membership).await?;
    renew(scope, host, connection, &client).await?;
    serve(starting, scope, host, facts, connection, client, membership.address).await?;
    Ok(role.member)
}

/// Starts etcd, and waits until it answers and votes.
async fn start_etcd(
    starting: &Starting,
    scope: &Scope,
    host: &Host,
    own: crate::curator::node_id::NodeId,
    cluster: &str,
    membership: &Membership,
) -> Result<Client, Stop> {
    let spec = etcd::spec(&host.etcd, own, cluster, &host.files, membership);
    starting.start(etcd::NAME, keep(spec, host.places.clone(), |_| {}))?;
    let client = Client::new(vec![etcd::endpoint(&host.files)], Namespace::new(NAMESPACE)?);
    let answering = async {
        let mut complained = false;
        loop {
            let asked = async {
                let status = client.status().await?;
                // With a quorum: one that is cut off answers what it is, too.
                client.get("/").await?;
                Ok::<_, crate::curator::etcd::client::EtcdError>(status.learner)
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn role(member: u64) -> ConsensusMember {
        ConsensusMember { member, peers: std::collections::BTreeMap::new() }
    }

    fn last(member: Option<u64>, new_cluster: bool) -> Membership {
        Membership {
            member,
            data: "x".to_owned(),
            address: Ipv4Addr::LOCALHOST.into(),
            initial_cluster: String::new(),
            new_cluster,
        }
    }

    fn connection() -> Connection {
        use crate::roleserver::cluster::facts::Shown;
        let key = crate::roleserver::identity::Identity::generate().unwrap();
        let authority = crate::curator::pki::tests::authority(1);
        let shown = Shown::new(certified(key.certificate_der(), key.pkcs8()).unwrap());
        let clock = Clock::host();
        Connection {
            id: crate::roleserver::cluster::facts::id_of(&key),
            anchor: authority.anchor().clone(),
            curators: crate::roleserver::cluster::facts::way(authority.anchor(), &shown, &clock),
            shown,
        }
    }

    #[test]
    fn nothing_is_decided_before_roles_and_the_way_are_known() {
        let roles =
            |member: Option<u64>| Some(Roles { consensus_member: member.map(role), ..Roles::default() });
        let known = |roles, connection| Known { to_found: None, roles, connection };
        assert!(decide(&known(None, None)).is_none());
        assert!(decide(&known(roles(Some(1)), None)).is_none());
        assert!(decide(&known(None, Some(connection()))).is_none());
        assert!(matches!(decide(&known(roles(None), Some(connection()))), Some(Startup::Nothing)));
        let member = decide(&known(roles(Some(7)), Some(connection())));
        assert!(matches!(member, Some(Startup::Member(role, _)) if role.member == 7));
    }

    #[test]
    fn only_another_membership_starts_the_control_plane_again() {
        let member = |number| Startup::Member(role(number), connection());
        for (running, startup, as_it_should) in [
            (None, Startup::Nothing, true),
            (Some(7), Startup::Nothing, false),
            (None, member(7), false),
            (Some(7), member(7), true),
            (Some(7), member(8), false),
        ] {
            assert_eq!(is_as_it_should(running, &startup), as_it_should, "{running:?} {startup:?}");
        }
        let mut with_peers = role(7);
        with_peers
            .peers
            .insert(crate::curator::node_id::tests::node_id(2), "https://10.0.0.2:7834".to_owned());
        assert!(
            is_as_it_should(Some(7), &Startup::Member(with_peers, connection())),
            "that another one came is nothing"
        );
    }

    #[test]
    fn data_of_another_membership_is_never_started() {
        let member = |number| Startup::Member(role(number), connection());
        for (last, begun, startup, expected) in [
            (last(Some(7), true), Begun::As(7), member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(7), member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::Unknown, member(7), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(7), member(8), Inheritance::Remove),
            (last(Some(7), false), Begun::Unknown, member(8), Inheritance::Remove),
            (last(None, true), Begun::Unknown, member(8), Inheritance::Remove),
            (last(Some(7), true), Begun::As(7), Startup::Nothing, Inheritance::Remove),
            // Started for a membership that is over, and begun as the next one.
            (last(Some(7), false), Begun::As(8), member(8), Inheritance::GoOn),
            (last(Some(7), false), Begun::As(8), member(7), Inheritance::Remove),
            // There is nothing to lose, and what it would begin with may be old.
            (last(Some(7), false), Begun::NotYet, member(7), Inheritance::Remove),
        ] {
            assert_eq!(inherit(&last, begun, &startup), expected, "{last:?} {begun:?} {startup:?}");
        }
    }

    #[test]
    fn what_is_beginning_begins_anew_with_other_peers_and_what_has_begun_does_not() {
        let member = |number, peer: u8| {
            let peers = [(crate::curator::node_id::tests::node_id(peer), "https://10.0.0.2:7834".to_owned())];
            Startup::Member(ConsensusMember { member: number, peers: peers.into() }, connection())
        };
        for (beginning, begun, next, expected) in [
            (member(7, 2), Begun::NotYet, member(7, 2), false),
            (member(7, 2), Begun::NotYet, member(7, 3), true),
            (member(7, 2), Begun::As(7), member(7, 3), false),
            (member(7, 2), Begun::Unknown, member(7, 3), false),
            (member(7, 2), Begun::As(7), member(8, 2), true),
            (member(7, 2), Begun::As(7), Startup::Nothing, true),
            (Startup::Nothing, Begun::NotYet, member(7, 2), true),
            (Startup::Nothing, Begun::NotYet, Startup::Nothing, false),
        ] {
            assert_eq!(begins_anew(&beginning, begun, &next), expected, "{beginning:?} {begun:?} {next:?}");
        }
    }
}
