//! What a shepherd asks of this machine about a cluster, and what it is told.
//!
//! An order comes with an answer on the agent channel, as often as it takes until the machine has reported on it. It is
//! durable here before it is reported, and newer orders replace older ones by their number. What is reported is all of it
//! each time, made from what is on the disk: a shepherd that lost its memory, or a machine that lost its disk, is told
//! apart from one where nothing happened.
//!
//! A machine that is a node is not made one of another cluster by an order alone: it is asked to leave first, which ends
//! what it runs and removes what it kept. Otherwise one wrong line in a database would take a member from a cluster that
//! works.
//!
//! An order also says how often its cluster was restored. What is lower than what this machine has heard of is refused;
//! what is higher counts from the moment that the order is taken, for a node that lives on as well: it goes on with its key,
//! its certificate and its services, and asks other curators.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use uuid::Uuid;

use crate::curator::pki::Anchor;
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::What as Wanted;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::{Files, FilesError, Heard};
use crate::roleserver::cluster::order::{Order, OrderError, What};

/// What is known of the orders before this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// The order on the disk.
    pub order: Option<Order>,
    /// The cluster that this machine is a node of.
    pub cluster: Option<Uuid>,
    /// Whether it is founding one, and has made its authority.
    pub founding: bool,
    /// The highest epoch of a cluster that it has heard of.
    pub heard: Option<Heard>,
}

/// What becomes of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is that on the disk, or older.
    PassOver,
    /// It takes the place of the one on the disk.
    Take,
    /// It stands against what this machine is, for this reason.
    Refuse(String),
}

/// Judges an order by what is on the disk.
#[must_use]
pub fn judge(present: &Present, order: &Order) -> Verdict {
    let newest = present.order.as_ref().map_or(0, |order| order.generation);
    if order.generation <= newest {
        return Verdict::PassOver;
    }
    if let Err(error) = order.check() {
        return Verdict::Refuse(format!("the order cannot be: {error}"));
    }
    let Some(asked) = cluster_of(order) else { return Verdict::Take };
    if let Some(heard) = present.heard.filter(|heard| heard.cluster == asked && order.epoch() < heard.epoch) {
        return Verdict::Refuse(format!(
            "the order is of epoch {} of cluster {asked}, which has been restored since ({})",
            order.epoch(),
            heard.epoch
        ));
    }
    // What it keeps of a cluster is of before the restoration, and would be in its way.
    if let (What::Found { snapshot: Some(_), .. }, Some(cluster)) = (&order.what, present.cluster) {
        return Verdict::Refuse(format!(
            "this machine is a node of cluster {cluster} and cannot restore one; it has to leave first"
        ));
    }
    let here = present.order.as_ref().map(|order| &order.what);
    let founding = match here {
        Some(What::Found { cluster, .. }) if present.founding => Some(*cluster),
        _ => None,
    };
    match present.cluster.or(founding) {
        Some(cluster) if asked != cluster => Verdict::Refuse(format!(
            "this machine is a node of cluster {cluster}; it has to leave that one first"
        )),
        _ => Verdict::Take,
    }
}

/// The cluster that an order is about; none where it is about whatever there is.
fn cluster_of(order: &Order) -> Option<Uuid> {
    match &order.what {
        What::Leave {} => None,
        What::Found { cluster, .. } => Some(*cluster),
        What::Join { ca_certificate, .. } => authority_of(ca_certificate),
    }
}

fn authority_of(certificate: &str) -> Option<Uuid> {
    Some(Anchor::parse(&hex::decode(certificate).ok()?).ok()?.cluster)
}

/// Reads an order. The error shows nothing of a ticket.
pub fn read(machine: MachineId, order: &wire::ClusterOrder) -> Result<Order, OrderError> {
    let address = match order.address.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| OrderError(format!("the address {text:?} is none")))?),
    };
    let what = match order.what.as_ref() {
        Some(Wanted::Found(found)) => What::Found {
            cluster: found
                .cluster_id
                .parse()
                .map_err(|_| OrderError("the id of the cluster is no UUID".to_owned()))?,
            name: found.name.clone(),
            owner_keys: found.owner_keys.iter().map(hex::encode).collect(),
            snapshot: Some(hex::encode(&found.snapshot_sha256)).filter(|text| !text.is_empty()),
            epoch: found.epoch,
        },
        Some(Wanted::Join(join)) => What::Join {
            ticket: hex::encode(&join.ticket),
            ca_certificate: hex::encode(&join.ca_certificate),
            curators: join.curators.clone(),
            epoch: join.epoch,
        },
        Some(Wanted::Leave(_)) => What::Leave {},
        None => {
            return Err(OrderError("it asks for something that this release does not know".to_owned()));
        }
    };
    let labels = order.labels.clone().into_iter().collect();
    Ok(Order { generation: order.generation, what, machine: Some(machine), labels, address })
}

/// The machine's side of the conversation about clusters. Cloning it gives another hold on the same.
#[derive(Clone, Debug)]
pub struct Asked(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    machine: MachineId,
    files: Files,
    facts: Facts,
    /// The newest order that was not taken, and why.
    refused: Mutex<Option<Refused>>,
}

#[derive(Debug)]
struct Refused {
    generation: i64,
    why: NotTaken,
}

/// Why an order was not taken.
#[derive(Debug)]
enum NotTaken {
    /// It cannot be, and is not asked again.
    Never(String),
    /// It could not be kept now, and has to be sent again.
    NotNow(String),
}

impl Asked {
    /// The side of this machine.
    #[must_use]
    pub fn new(machine: MachineId, files: Files, facts: Facts) -> Self {
        Self(Arc::new(Inner { machine, files, facts, refused: Mutex::default() }))
    }

    /// Takes an order that came with an answer.
    pub fn hear(&self, order: &wire::ClusterOrder) {
        let Inner { machine, files, facts, refused } = &*self.0;
        let never = |error: OrderError| NotTaken::Never(error.to_string());
        let taken = read(*machine, order).map_err(never).and_then(|order| {
            let cannot = |error: FilesError| NotTaken::NotNow(error.to_string());
            match judge(&present(files).map_err(cannot)?, &order) {
                Verdict::PassOver => Ok(false),
                Verdict::Refuse(why) => Err(NotTaken::Never(why)),
                Verdict::Take => {
                    follow_from_now_on(&order, files, facts).map_err(NotTaken::NotNow)?;
                    files.write_order(&order).map(|()| true).map_err(cannot)
                }
            }
        });
        let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        match taken {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(generation = order.generation, "this machine was asked about a cluster");
                *refused = None;
                // What stood in the way of the order before says nothing of this one.
                facts.trouble.forget();
                facts.ordered.set(());
            }
            Err(why) => {
                if refused.as_ref().is_none_or(|refused| refused.generation != order.generation) {
                    let (NotTaken::Never(why) | NotTaken::NotNow(why)) = &why;
                    tracing::warn!(
                        generation = order.generation,
                        why,
                        "an order about a cluster was not taken"
                    );
                }
                *refused = Some(Refused { generation: order.generation, why });
            }
        }
    }

    /// Where this machine stands. What cannot be read is an error in it, and no reason to say less.
    #[must_use]
    pub fn report(&self) -> wire::ClusterReport {
        let Inner { files, facts, refused, .. } = &*self.0;
        let mut errors = Vec::new();
        let mut said = |error: FilesError| errors.push(error.to_string());
        let order = files.order().map_err(&mut said).ok().flatten();
        let key = files.key().map_err(&mut said).ok().flatten();
        let credentials = files.credentials().map_err(&mut said).ok().flatten();
        let mut report = wire::ClusterReport {
            generation: order.as_ref().map_or(0, |order| order.generation),
            node_key: key.map(|key| key.public_key().to_vec()).unwrap_or_default(),
            ca_certificate: credentials
                .and_then(|kept| hex::decode(kept.ca_certificate).ok())
                .unwrap_or_default(),
            address: facts.address.latest().map(|address| address.to_string()).unwrap_or_default(),
            error: String::new(),
            epoch: files.heard().map_err(&mut said).ok().flatten().map_or(0, |heard| heard.epoch),
        };
        // A machine that leaves has left when nothing is kept any more.
        let leaving = order.is_some_and(|order| order.what == What::Leave {});
        if leaving && (!report.node_key.is_empty() || !report.ca_certificate.is_empty()) {
            report.generation -= 1;
        }
        errors.extend(facts.trouble.latest().flatten());
        let refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.as_ref().filter(|refused| refused.generation > report.generation) {
            Some(Refused { generation, why: NotTaken::Never(why) }) => {
                report.generation = *generation;
                errors = vec![why.clone()];
            }
            // Whoever hears no answer to the order sends it again.
            Some(Refused { why: NotTaken::NotNow(why), .. }) => errors.push(why.clone()),
            None => {}
        }
        report.error = errors.join("; ");
        report
    }
}

/// Takes the epoch of an order for one that there is, and where it says that curators are, before anything else of it
/// counts: what a node of an earlier one still has open to its leader is cut off.
pub(super) fn follow_from_now_on(order: &Order, files: &Files, facts: &Facts) -> Result<(), String> {
    let Some(cluster) = cluster_of(order) else { return Ok(()) };
    let cannot = |error: FilesError| error.to_string();
    if order.epoch() <= files.epoch(cluster).map_err(cannot)? {
        return Ok(());
    }
    let curators: Option<BTreeSet<String>> = match &order.what {
        What::Join { curators, .. } => Some(curators.iter().cloned().collect()),
        _ => None,
    };
    if let Some(curators) = &curators {
        files.write_curators(curators).map_err(cannot)?;
    }
    let connection = facts.connection.latest().filter(|connection| connection.anchor.cluster == cluster);
    let Some(connection) = connection else {
        return files.raise_epoch(cluster, order.epoch()).map_err(cannot);
    };
    connection.curators.learn(curators.clone().unwrap_or_default());
    connection.curators.raise(order.epoch())?;
    if let Some(curators) = curators {
        facts.curators.set(curators);
    }
    Ok(())
}

fn present(files: &Files) -> Result<Present, FilesError> {
    let credentials = files.credentials()?;
    Ok(Present {
        order: files.order()?,
        cluster: credentials.and_then(|kept| authority_of(&kept.ca_certificate)),
        founding: files.authority()?.is_some(),
        heard: files.heard()?,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::curator::bootstrap::new_authority;
    use crate::model::time::Timestamp;

    const HERE: Uuid = Uuid::from_u128(7);
    const ELSEWHERE: Uuid = Uuid::from_u128(8);

    fn order(generation: i64, what: What) -> Order {
        Order { generation, what, machine: None, labels: BTreeMap::new(), address: None }
    }

    fn found(cluster: Uuid) -> What {
        What::Found {
            cluster,
            name: "ams".to_owned(),
            owner_keys: vec!["07".repeat(32)],
            snapshot: None,
            epoch: 0,
        }
    }

    fn join(cluster: Uuid) -> What {
        let authority = new_authority(cluster, Timestamp::from_timestamp(1_800_000_000, 0).unwrap()).unwrap();
        What::Join {
            ticket: "05".repeat(32),
            ca_certificate: hex::encode(&authority.anchor().certificate),
            curators: vec!["10.0.0.1:7835".to_owned()],
            epoch: 0,
        }
    }

    fn of_epoch(number: u64, mut what: What) -> What {
        if let What::Found { epoch, .. } | What::Join { epoch, .. } = &mut what {
            *epoch = number;
        }
        what
    }

    fn restore(epoch: u64) -> What {
        What::Found {
            cluster: HERE,
            name: "ams".to_owned(),
            owner_keys: vec!["07".repeat(32)],
            snapshot: Some("ab".repeat(32)),
            epoch,
        }
    }

    #[test]
    fn order_is_taken_once_and_never_against_what_the_machine_is() {
        let refused = Verdict::Refuse(String::new());
        let fresh = Present::default();
        let node =
            Present { order: Some(order(3, join(HERE))), cluster: Some(HERE), founding: false, heard: None };
        let handmade = Present { order: None, cluster: Some(HERE), founding: false, heard: None };
        let founding =
            Present { order: Some(order(3, found(HERE))), cluster: None, founding: true, heard: None };
        let waiting =
            Present { order: Some(order(3, join(HERE))), cluster: None, founding: false, heard: None };
        let heard = Some(Heard { cluster: HERE, epoch: 2 });
        let later = Present { heard, ..node.clone() };
        let left =
            Present { order: Some(order(3, What::Leave {})), cluster: None, founding: false, heard: None };
        for (name, present, asked, expected) in [
            ("first", &fresh, order(1, found(HERE)), Verdict::Take),
            ("first to join", &fresh, order(1, join(HERE)), Verdict::Take),
            ("nothing to leave", &fresh, order(1, What::Leave {}), Verdict::Take),
            ("none at all", &fresh, order(0, found(HERE)), Verdict::PassOver),
            ("the same again", &node, order(3, join(HERE)), Verdict::PassOver),
            ("an older one", &node, order(2, What::Leave {}), Verdict::PassOver),
            ("another cluster", &node, order(4, join(ELSEWHERE)), refused.clone()),
            ("to found another", &node, order(4, found(ELSEWHERE)), refused.clone()),
            ("the same cluster", &node, order(4, join(HERE)), Verdict::Take),
            ("another than by hand", &handmade, order(1, join(ELSEWHERE)), refused.clone()),
            ("to leave", &node, order(4, What::Leave {}), Verdict::Take),
            ("founding one, another", &founding, order(4, found(ELSEWHERE)), refused.clone()),
            ("founding one, the same", &founding, order(4, found(HERE)), Verdict::Take),
            ("not let in yet, another ticket", &waiting, order(4, join(HERE)), Verdict::Take),
            ("not let in yet, elsewhere", &waiting, order(4, join(ELSEWHERE)), Verdict::Take),
            ("to restore, as a node", &node, order(4, restore(1)), refused.clone()),
            ("to restore, as none", &fresh, order(4, restore(1)), Verdict::Take),
            ("to restore, after it left", &left, order(4, restore(1)), Verdict::Take),
            ("to follow the restored one", &node, order(4, of_epoch(1, join(HERE))), Verdict::Take),
            ("of before", &later, order(4, of_epoch(1, join(HERE))), refused.clone()),
            ("of the same epoch", &later, order(4, of_epoch(2, join(HERE))), Verdict::Take),
            ("to leave, whatever the epoch", &later, order(4, What::Leave {}), Verdict::Take),
            (
                "another cluster's epoch is another's",
                &Present { heard, ..waiting.clone() },
                order(4, join(ELSEWHERE)),
                Verdict::Take,
            ),
            ("after it left", &left, order(4, join(ELSEWHERE)), Verdict::Take),
            (
                "a name that is none",
                &fresh,
                order(
                    1,
                    What::Found {
                        cluster: HERE,
                        name: String::new(),
                        owner_keys: Vec::new(),
                        snapshot: None,
                        epoch: 0,
                    },
                ),
                refused,
            ),
        ] {
            let verdict = match judge(present, &asked) {
                Verdict::Refuse(why) => {
                    assert!(why.len() > 20, "{name}: {why}");
                    Verdict::Refuse(String::new())
                }
                verdict => verdict,
            };
            assert_eq!(verdict, expected, "{name}");
        }
    }

    fn asked() -> (tempfile::TempDir, Asked) {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        (directory, Asked::new(MachineId::generate(), files, Facts::default()))
    }

    fn wired(generation: i64, what: Wanted) -> wire::ClusterOrder {
        wire::ClusterOrder { generation, what: Some(what), ..Default::default() }
    }

    fn founding(generation: i64, name: &str) -> wire::ClusterOrder {
        let found = wire::FoundCluster {
            cluster_id: HERE.to_string(),
            name: name.to_owned(),
            owner_keys: vec![vec![7; 32]],
            ..Default::default()
        };
        wired(generation, Wanted::Found(found))
    }

    #[test]
    fn order_is_durable_before_it_is_reported() {
        let (directory, asked) = asked();
        assert_eq!(asked.report(), wire::ClusterReport::default());
        asked.hear(&founding(2, "ams"));
        assert_eq!(asked.report().generation, 2);
        let kept = Files::of(directory.path()).order().unwrap().unwrap();
        assert_eq!((kept.generation, kept.machine), (2, Some(asked.0.machine)));
    }

    #[test]
    fn refused_order_is_reported_with_its_reason_and_changes_nothing() {
        let (directory, asked) = asked();
        asked.hear(&founding(2, "ams"));
        asked.hear(&founding(3, ""));
        let report = asked.report();
        assert_eq!(report.generation, 3);
        assert!(report.error.contains("the order cannot be"), "{}", report.error);
        assert_eq!(Files::of(directory.path()).order().unwrap().unwrap().generation, 2);
        asked.hear(&founding(4, "ams"));
        assert_eq!((asked.report().generation, asked.report().error.as_str()), (4, ""));
        asked.hear(&wire::ClusterOrder { generation: 5, ..Default::default() });
        assert!(asked.report().error.contains("does not know"), "{}", asked.report().error);
    }

    #[test]
    fn epoch_of_an_order_is_kept_and_reported_and_an_earlier_one_is_refused() {
        let (directory, asked) = asked();
        let joining = |generation, epoch| {
            let What::Join { ca_certificate, .. } = join(HERE) else { panic!() };
            let join = wire::JoinCluster {
                ticket: vec![5; 32],
                ca_certificate: hex::decode(ca_certificate).unwrap(),
                curators: vec![format!("10.0.0.{generation}:7835")],
                epoch,
            };
            wired(generation, Wanted::Join(join))
        };
        asked.hear(&joining(2, 3));
        assert_eq!((asked.report().generation, asked.report().epoch), (2, 3));
        let files = Files::of(directory.path());
        assert_eq!(files.epoch(HERE).unwrap(), 3);
        assert_eq!(files.curators(), ["10.0.0.2:7835".to_owned()].into());
        asked.hear(&joining(3, 2));
        assert!(asked.report().error.contains("has been restored since"), "{}", asked.report().error);
        assert_eq!(files.order().unwrap().unwrap().generation, 2);
        asked.hear(&joining(4, 3));
        assert_eq!((asked.report().generation, asked.report().error.as_str()), (4, ""));
    }

    #[test]
    fn machine_has_left_when_nothing_is_kept_of_the_node() {
        let (directory, asked) = asked();
        let files = Files::of(directory.path());
        asked.hear(&founding(2, "ams"));
        files.key_or_new().unwrap();
        asked.hear(&wired(3, Wanted::Leave(wire::LeaveCluster {})));
        let report = asked.report();
        assert_eq!((report.generation, report.node_key.len()), (2, 32), "it is still a node");
        files.remove_all_but_the_order().unwrap();
        assert_eq!(asked.report(), wire::ClusterReport { generation: 3, ..Default::default() });
    }

    #[test]
    fn ticket_shows_in_no_text() {
        let join = wire::JoinCluster {
            ticket: vec![0xab; 32],
            ca_certificate: vec![1],
            curators: vec!["10.0.0.1:7835".to_owned()],
            epoch: 0,
        };
        let read = read(MachineId::generate(), &wired(1, Wanted::Join(join))).unwrap();
        assert!(!format!("{read:?}").contains("abab"));
        let Verdict::Refuse(why) = judge(&Present::default(), &read) else { panic!() };
        assert!(!why.contains("abab"), "{why}");
    }
}
