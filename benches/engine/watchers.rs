//! What a change of a node costs when a thousand nodes watch.
//!
//! One member of a control plane is a process of its own: a role server as it runs on a machine, with an etcd of its
//! own, which leads. The nodes are light clients of this process, each with a key, a certificate and a connection of
//! its own. They watch as nodes do, and send heartbeats at the interval that the curator sets. What the leader spends
//! while nothing changes is measured first, and is no part of what a change costs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::pki::TrustAnchor;
use shepherd::curator_client::tls::{certified_key, client_config};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use shepherd::proto::curator::v1::node_event::Event;
use shepherd::proto::curator::v1::nodes_client::NodesClient;
use shepherd::proto::curator::v1::registration_client::RegistrationClient;
use shepherd::proto::curator::v1::tickets_client::TicketsClient;
use shepherd::roleserver::agent::settings::AgentSettings;
use shepherd::roleserver::child::cgroup::CgroupMounts;
use shepherd::roleserver::child::launch::read_record;
use shepherd::roleserver::child::lifecycle::{ChildContext, stop_child};
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::cluster::files::ClusterFiles;
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use shepherd::roleserver::cluster::node_order::{NodeOrder, OrderKind};
use shepherd::roleserver::enrolment::Enrolment;
use shepherd::roleserver::state_directory::StateDirectory;
use tokio::process::{Child, Command};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::Plan;
use crate::report::{Plot, Report, Target, progress, quantile};

const ROLESERVER: &str = env!("CARGO_BIN_EXE_roleserver");
const PATIENCE: Duration = Duration::from_mins(2);
const AN_HOUR_MS: u64 = 3_600_000;
/// Machines that are taken in at a time.
const AT_ONCE: usize = 16;
/// The label that is changed.
const LABEL: &str = "turn";
const SPENT: Plot = Plot { title: "What a change of a node costs the leader", unit: "ms of processor time" };
const DELIVERY_TIME: Plot = Plot { title: "From a change to the last watcher that receives it", unit: "ms" };

/// Which nodes a watcher watches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Watching {
    /// Each watches its own node, as every node does: one of them receives a change.
    Own,
    /// Each watches all nodes: every one of them receives every change.
    All,
}

/// The member that leads.
struct Leader {
    program: Child,
    address: String,
    places: ChildContext,
    owner: Channel,
    anchor: TrustAnchor,
    _directory: tempfile::TempDir,
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Its etcd outlives it, as it should on a machine.
        let _ = self.program.start_kill();
        let _ = stop_child(etcd_member::NAME, &self.places, Duration::ZERO);
    }
}

impl Leader {
    async fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let files = ClusterFiles::in_state_directory(directory.path());
        // Nobody else is likely to have it: the ports of a node are the same everywhere.
        let [b, c]: [u8; 2] = rand::random();
        let address = Ipv4Addr::new(127, 63, b, c.clamp(1, 254));
        let owner = Identity::generate()?;
        let what = OrderKind::Found {
            cluster: Uuid::new_v4(),
            name: "measured".to_owned(),
            owner_keys: vec![hex::encode(owner.public_key())],
            snapshot: None,
            image: None,
            revocations: BTreeMap::new(),
            epoch: 0,
        };
        let (labels, address) = (BTreeMap::new(), Some(address.into()));
        files.write_order(&NodeOrder { generation: 0, what, machine: None, labels, address })?;
        let state = StateDirectory::open(directory.path())?;
        state.read_or_create_identity()?;
        // The shepherd that it was enrolled by is away.
        let nobody = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        state.write_enrolment(&Enrolment {
            machine_id: Uuid::new_v4().to_string().parse()?,
            bmdb_id: Uuid::new_v4(),
            fences: BTreeMap::new(),
            holders: BTreeMap::new(),
            settings: AgentSettings::new(&[nobody.to_string()], &[], 0).map_err(anyhow::Error::msg)?,
            revision: 1,
        })?;
        let places = ChildContext {
            directory: directory.path().join("children"),
            mounts: CgroupMounts::detect_host(),
            launcher: ROLESERVER.into(),
            shutdown: CancellationToken::new(),
            scopes: None,
        };
        let log = std::fs::File::create(directory.path().join("run.log"))?;
        let program = Command::new(ROLESERVER)
            .arg("run")
            .arg("--state_dir")
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let address = SocketAddr::new(address.context("an address")?, CURATOR_PORT).to_string();
        let end = Instant::now() + PATIENCE;
        let credentials = loop {
            if let Some(credentials) = files.read_credentials()? {
                break credentials;
            }
            ensure!(Instant::now() < end, "the first node founded no cluster");
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let anchor = TrustAnchor::parse(&hex::decode(credentials.ca_certificate)?)?;
        let own = certified_key(owner.certificate_der(), owner.pkcs8())?;
        let mut claiming = CredentialsClient::new(open_channel(
            &address,
            client_config(anchor.clone(), None, Some(own), Clock::system())?,
        ));
        let claimed = loop {
            match claiming.claim_owner(wire::ClaimOwnerRequest { lifetime_ms: AN_HOUR_MS }).await {
                Ok(claimed) => break claimed.into_inner(),
                Err(status) => ensure!(Instant::now() < end, "the curator does not lead: {status}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let own = certified_key(&claimed.certificate, owner.pkcs8())?;
        let owner = open_channel(&address, client_config(anchor.clone(), None, Some(own), Clock::system())?);
        Ok(Self { program, address, places, owner, anchor, _directory: directory })
    }

    /// Processor time that it and its etcd have used so far.
    fn spent(&self) -> Result<Spent> {
        let etcd = read_record(&self.places.record_path(etcd_member::NAME)).context("no etcd was started")?;
        let process = |pid: u32| processor_time(&format!("/proc/{pid}/stat"));
        let pid = u32::try_from(etcd.instance.pid)?;
        Ok(Spent { leader: process(self.program.id().context("it ended")?)?, etcd: process(pid)? })
    }

    /// Registers and approves this many nodes.
    async fn take_in(&self, count: usize) -> Result<Vec<Watcher>> {
        let ticket = wire::CreateTicketRequest {
            lifetime_ms: AN_HOUR_MS,
            max_uses: None,
            purpose: "measuring".to_owned(),
        };
        let ticket = TicketsClient::new(self.owner.clone()).create(ticket).await?.into_inner().secret;
        stream::iter(0..count)
            .map(|_| self.take_one_in(&ticket))
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
    }

    async fn take_one_in(&self, ticket: &[u8]) -> Result<Watcher> {
        let key = Identity::generate()?;
        let public = PublicKey(key.public_key());
        let itself = certified_key(key.certificate_der(), key.pkcs8())?;
        let mut registration = RegistrationClient::new(self.dial(itself)?);
        registration
            .register(wire::RegisterRequest { ticket: ticket.to_vec(), ..Default::default() })
            .await?;
        let approving = wire::ApproveRequest { public_key: public.0.to_vec(), ..Default::default() };
        ManagementClient::new(self.owner.clone()).approve(approving).await?;
        let membership = match registration.commit(wire::CommitRequest {}).await?.into_inner().result {
            Some(wire::commit_response::Result::Membership(membership)) => membership,
            other => bail!("a node was not taken in: {other:?}"),
        };
        let certified = certified_key(&membership.certificate, key.pkcs8())?;
        Ok(Watcher { id: NodeId::from_key(&public).to_string(), certified })
    }

    fn dial(&self, own: Arc<rustls::sign::CertifiedKey>) -> Result<Channel> {
        Ok(open_channel(&self.address, client_config(self.anchor.clone(), None, Some(own), Clock::system())?))
    }

    /// Changes a label of a node.
    async fn change(&self, node: &str, turn: u32) -> Result<()> {
        let request = wire::UpdateLabelsRequest {
            node_id: node.to_owned(),
            set: [(LABEL.to_owned(), turn.to_string())].into(),
            ..Default::default()
        };
        ManagementClient::new(self.owner.clone()).update_labels(request).await?;
        Ok(())
    }
}

/// Processor time of the leader and of its etcd, in milliseconds.
#[derive(Clone, Copy)]
struct Spent {
    leader: f64,
    etcd: f64,
}

/// Milliseconds that a process has run for, by its `stat` (proc(5): fields 14 and 15, hundredths of a second).
fn processor_time(path: &str) -> Result<f64> {
    let stat = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    // The second field may have blanks in it, and ends with the last parenthesis.
    let (_, rest) = stat.rsplit_once(") ").context("no stat")?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks = |field: usize| -> Result<f64> { Ok(fields.get(field).context("too short")?.parse::<f64>()?) };
    Ok((ticks(11)? + ticks(12)?) * 10.0)
}

/// A node that only watches.
#[derive(Clone)]
struct Watcher {
    id: String,
    certified: Arc<rustls::sign::CertifiedKey>,
}

/// Counts the watchers that received the newest turn.
#[derive(Default)]
struct DeliveryCounter {
    turn: AtomicU32,
    count: AtomicU32,
    changed: Notify,
}

impl DeliveryCounter {
    fn record_delivery(&self, node: &wire::Node) {
        let turn = self.turn.load(Ordering::SeqCst).to_string();
        if node.labels.get(LABEL) == Some(&turn) {
            self.count.fetch_add(1, Ordering::SeqCst);
            self.changed.notify_one();
        }
    }

    async fn by(&self, watchers: u32) -> Result<()> {
        let waiting = async {
            while self.count.load(Ordering::SeqCst) < watchers {
                self.changed.notified().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        waited.with_context(|| {
            format!("{} of {watchers} watchers received the change", self.count.load(Ordering::SeqCst))
        })
    }
}

/// Lets nodes watch and send heartbeats until they are dropped. Returns when each watch has received its initial
/// state.
async fn watch(
    leader: &Leader,
    watchers: &[Watcher],
    what: Watching,
    reports: &Arc<DeliveryCounter>,
) -> Result<JoinSet<Result<()>>> {
    let mut tasks = JoinSet::new();
    let ready = Arc::new(AtomicU32::new(0));
    for watcher in watchers {
        let channel = leader.dial(watcher.certified.clone())?;
        let (id, reports, ready) = (watcher.id.clone(), reports.clone(), ready.clone());
        tasks.spawn({
            let channel = channel.clone();
            async move {
                let mut nodes = NodesClient::new(channel);
                if what == Watching::Own {
                    let mut news = nodes.watch(wire::WatchRequest { node_id: id }).await?.into_inner();
                    let mut first = true;
                    while let Some(message) = news.message().await? {
                        if std::mem::take(&mut first) {
                            ready.fetch_add(1, Ordering::SeqCst);
                        }
                        message.event.iter().for_each(|event| record_event(&reports, event));
                    }
                } else {
                    let mut news = nodes.watch_all(wire::WatchAllRequest {}).await?.into_inner();
                    while let Some(message) = news.message().await? {
                        if message.backlog_complete {
                            ready.fetch_add(1, Ordering::SeqCst);
                        }
                        message.events.iter().for_each(|event| record_event(&reports, event));
                    }
                }
                bail!("a watch ended")
            }
        });
        tasks.spawn(async move {
            let (beats, sent) = tokio::sync::mpsc::channel(1);
            let sent = stream::unfold(sent, async |mut sent| Some((sent.recv().await?, sent)));
            beats.send(wire::HeartbeatRequest {}).await?;
            let mut answers = NodesClient::new(channel).heartbeat(Box::pin(sent)).await?.into_inner();
            while let Some(answer) = answers.message().await? {
                tokio::time::sleep(Duration::from_millis(answer.interval_ms)).await;
                beats.send(wire::HeartbeatRequest {}).await?;
            }
            bail!("heartbeats ended")
        });
    }
    let end = Instant::now() + PATIENCE;
    while usize::try_from(ready.load(Ordering::SeqCst))? < watchers.len() {
        if let Some(ended) = tasks.try_join_next() {
            ended??;
        }
        ensure!(Instant::now() < end, "{} of {} watch", ready.load(Ordering::SeqCst), watchers.len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(tasks)
}

fn record_event(reports: &DeliveryCounter, event: &wire::NodeEvent) {
    if let Some(Event::Present(node)) = &event.event {
        reports.record_delivery(node);
    }
}

/// What one number of watchers costs.
struct Cost {
    /// Of the leader, for one change, in milliseconds of processor time.
    leader: f64,
    /// The same, of its etcd.
    etcd: f64,
    /// Of this process, which is all the watchers.
    watchers: f64,
    /// Times from the order of a change until the last watcher received it, in milliseconds.
    delivery_times: Vec<f64>,
    /// Of the leader while nothing changes, in milliseconds of processor time a second.
    idle: f64,
}

async fn cost(
    plan: &Plan,
    leader: &Leader,
    watchers: &[Watcher],
    what: Watching,
    turn: &mut u32,
) -> Result<Cost> {
    let reports = Arc::new(DeliveryCounter::default());
    let mut tasks = watch(leader, watchers, what, &reports).await?;
    let who_is_notified = if what == Watching::Own { 1 } else { u32::try_from(watchers.len())? };
    let own = || processor_time("/proc/self/stat");
    // One, that nobody measures.
    change(leader, &watchers[0], &reports, turn, who_is_notified).await?;
    let (began, before, here) = (Instant::now(), leader.spent()?, own()?);
    tokio::time::sleep(plan.watchers_rest).await;
    let seconds = began.elapsed().as_secs_f64();
    let after = leader.spent()?;
    let rate = (after.leader - before.leader) / seconds;
    let (etcd_rate, here_rate) = ((after.etcd - before.etcd) / seconds, (own()? - here) / seconds);
    let (began, before, here) = (Instant::now(), leader.spent()?, own()?);
    let mut took = Vec::new();
    for change_number in 0..plan.changes {
        let watcher = &watchers[usize::try_from(change_number)? % watchers.len()];
        took.push(change(leader, watcher, &reports, turn, who_is_notified).await?);
    }
    let (seconds, after) = (began.elapsed().as_secs_f64(), leader.spent()?);
    let each = |spent: f64, rate: f64| ((spent - rate * seconds) / f64::from(plan.changes)).max(0.0);
    let cost = Cost {
        leader: each(after.leader - before.leader, rate),
        etcd: each(after.etcd - before.etcd, etcd_rate),
        watchers: each(own()? - here, here_rate),
        delivery_times: took,
        idle: rate,
    };
    if let Some(ended) = tasks.try_join_next() {
        ended??;
    }
    tasks.shutdown().await;
    Ok(cost)
}

/// Changes a node, and waits until this many watchers received the change. Returns how long that took, in
/// milliseconds.
async fn change(
    leader: &Leader,
    node: &Watcher,
    reports: &DeliveryCounter,
    turn: &mut u32,
    who_is_notified: u32,
) -> Result<f64> {
    *turn += 1;
    reports.turn.store(*turn, Ordering::SeqCst);
    reports.count.store(0, Ordering::SeqCst);
    let began = Instant::now();
    leader.change(&node.id, *turn).await?;
    reports.by(who_is_notified).await?;
    Ok(began.elapsed().as_secs_f64() * 1000.0)
}

pub(crate) async fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    report.section(
        "Nodes that watch their curator",
        "One member of a control plane, a process with an etcd of its own, leads; its nodes are light clients of another \
         process on the same host, each with a key, a certificate and a connection of its own, and send heartbeats. A label of \
         one node after the other is changed, each when every watcher has received the one before. What the leader \
         spends while nothing changes is taken off. Nodes watch themselves, so one watcher receives a change; the cost \
         if all watched all is beside it. Processor time is counted by the kernel in hundredths of a second.",
    )?;
    let leader = Leader::start().await?;
    let most = plan.watchers.iter().copied().max().context("no numbers of watchers")?;
    progress(&format!("taking {most} nodes in"))?;
    let began = Instant::now();
    let watchers = leader.take_in(most).await?;
    let rate = f64::from(u32::try_from(most)?) / began.elapsed().as_secs_f64();
    report.add(
        format!("{most} machines register, are approved and become nodes"),
        "a second",
        &[rate],
        Target::None,
    )?;
    let mut turn = 0;
    for count in plan.watchers.iter().copied() {
        let at = f64::from(u32::try_from(count)?);
        for what in [Watching::Own, Watching::All] {
            let (words, series) = match what {
                Watching::Own => (format!("{count} nodes watch themselves"), "they watch themselves"),
                Watching::All => (format!("{count} nodes watch all {most}"), "they watch all"),
            };
            progress(&words)?;
            let cost = cost(plan, &leader, &watchers[..count], what, &mut turn).await?;
            if what == Watching::Own {
                let name = format!("{count} nodes send heartbeats and nothing changes: the leader");
                report.add(name, "ms of processor time a second", &[cost.idle], Target::None)?;
            }
            report.add(
                format!("{words}: a change costs the leader"),
                "ms of processor time",
                &[cost.leader],
                Target::None,
            )?;
            report.add(
                format!("{words}: and its etcd"),
                "ms of processor time",
                &[cost.etcd],
                Target::None,
            )?;
            if what == Watching::All {
                let one = cost.leader / at * 1000.0;
                report.add(
                    format!("{words}: for each that receives it"),
                    "µs of processor time",
                    &[one],
                    Target::None,
                )?;
                let one = cost.watchers / at * 1000.0;
                report.add(
                    format!("{words}: each watcher itself"),
                    "µs of processor time",
                    &[one],
                    Target::None,
                )?;
            }
            report.add(
                format!("{words}: until the last receives it"),
                "ms",
                &cost.delivery_times,
                Target::None,
            )?;
            report.point(&SPENT, series, at, cost.leader);
            report.point(&DELIVERY_TIME, series, at, quantile(&cost.delivery_times, 0.5));
        }
    }
    Ok(())
}
