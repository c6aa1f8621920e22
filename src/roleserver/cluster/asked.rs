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

use std::sync::{Arc, Mutex, PoisonError};

use uuid::Uuid;

use crate::curator::pki::Anchor;
use crate::model::ids::MachineId;
use crate::proto::agent::v1 as wire;
use crate::proto::agent::v1::cluster_order::What as Wanted;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::{Files, FilesError};
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
    let asked = match &order.what {
        What::Leave {} => return Verdict::Take,
        What::Found { cluster, .. } => Some(*cluster),
        What::Join { ca_certificate, .. } => authority_of(ca_certificate),
    };
    let here = present.order.as_ref().map(|order| &order.what);
    let founding = match here {
        Some(What::Found { cluster, .. }) if present.founding => Some(*cluster),
        _ => None,
    };
    match present.cluster.or(founding) {
        Some(cluster) if asked != Some(cluster) => Verdict::Refuse(format!(
            "this machine is a node of cluster {cluster}; it has to leave that one first"
        )),
        _ => Verdict::Take,
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
        },
        Some(Wanted::Join(join)) => What::Join {
            ticket: hex::encode(&join.ticket),
            ca_certificate: hex::encode(&join.ca_certificate),
            curators: join.curators.clone(),
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
    /// The newest order that was refused, and why.
    refused: Mutex<Option<(i64, String)>>,
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
        let taken = read(*machine, order).map_err(|error| error.to_string()).and_then(|order| {
            let cannot = |error: FilesError| error.to_string();
            match judge(&present(files).map_err(cannot)?, &order) {
                Verdict::PassOver => Ok(false),
                Verdict::Refuse(why) => Err(why),
                Verdict::Take => files.write_order(&order).map(|()| true).map_err(cannot),
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
                if refused.as_ref().is_none_or(|(generation, _)| *generation != order.generation) {
                    tracing::warn!(
                        generation = order.generation,
                        why,
                        "an order about a cluster was refused"
                    );
                }
                *refused = Some((order.generation, why));
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
        };
        // A machine that leaves has left when nothing is kept any more.
        let leaving = order.is_some_and(|order| order.what == What::Leave {});
        if leaving && (!report.node_key.is_empty() || !report.ca_certificate.is_empty()) {
            report.generation -= 1;
        }
        errors.extend(facts.trouble.latest().flatten());
        let refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((generation, why)) = refused.as_ref().filter(|(newest, _)| *newest > report.generation) {
            report.generation = *generation;
            errors = vec![why.clone()];
        }
        report.error = errors.join("; ");
        report
    }
}

fn present(files: &Files) -> Result<Present, FilesError> {
    let credentials = files.credentials()?;
    Ok(Present {
        order: files.order()?,
        cluster: credentials.and_then(|kept| authority_of(&kept.ca_certificate)),
        founding: files.authority()?.is_some(),
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
        What::Found { cluster, name: "ams".to_owned(), owner_keys: vec!["07".repeat(32)] }
    }

    fn join(cluster: Uuid) -> What {
        let authority = new_authority(cluster, Timestamp::from_timestamp(1_800_000_000, 0).unwrap()).unwrap();
        What::Join {
            ticket: "05".repeat(32),
            ca_certificate: hex::encode(&authority.anchor().certificate),
            curators: vec!["10.0.0.1:7835".to_owned()],
        }
    }

    #[test]
    fn order_is_taken_once_and_never_against_what_the_machine_is() {
        let refused = Verdict::Refuse(String::new());
        let fresh = Present::default();
        let node = Present { order: Some(order(3, join(HERE))), cluster: Some(HERE), founding: false };
        let handmade = Present { order: None, cluster: Some(HERE), founding: false };
        let founding = Present { order: Some(order(3, found(HERE))), cluster: None, founding: true };
        let waiting = Present { order: Some(order(3, join(HERE))), cluster: None, founding: false };
        let left = Present { order: Some(order(3, What::Leave {})), cluster: None, founding: false };
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
            ("after it left", &left, order(4, join(ELSEWHERE)), Verdict::Take),
            (
                "a name that is none",
                &fresh,
                order(1, What::Found { cluster: HERE, name: String::new(), owner_keys: Vec::new() }),
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
        };
        let read = read(MachineId::generate(), &wired(1, Wanted::Join(join))).unwrap();
        assert!(!format!("{read:?}").contains("abab"));
        let Verdict::Refuse(why) = judge(&Present::default(), &read) else { panic!() };
        assert!(!why.contains("abab"), "{why}");
    }
}
