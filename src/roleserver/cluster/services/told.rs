//! What is said of the services of this node.

use std::collections::BTreeMap;

use crate::model::declaration::Sha256;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::service_status::Kind;
use crate::roleserver::cluster::services::plan::{Circumstances, Waits, stays, waits};
use crate::roleserver::cluster::services::state::{Doing, Health, Present};
use crate::roleserver::cluster::services::wanted::{Id, Wanted};

/// Most services that a curator hears of.
const MOST: usize = 256;
/// Longest sentence that a curator takes, in bytes.
const LONGEST: usize = 1000;

/// How one service does: what is told of it but since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telling {
    /// In a word.
    pub kind: Kind,
    /// Why it is not running, or not well.
    pub message: String,
    /// Revision of the declaration that it runs by, or is to run by.
    pub revision: u64,
    /// How often it was started again since that took effect.
    pub restarts: u32,
}

/// How all services do that are to run, and those that are not gone yet. `fetching` says how far artefacts are.
#[must_use]
pub fn tellings(all: &Circumstances<'_>, fetching: &BTreeMap<Sha256, String>) -> BTreeMap<Id, Telling> {
    let nothing = BTreeMap::new();
    let wanted = all.wanted.unwrap_or(&nothing);
    let absent = wanted.iter().filter(|(id, _)| !all.present.contains_key(id)).map(|(id, service)| {
        let message = waiting(all, service, fetching);
        let telling = Telling { kind: Kind::Waiting, message, revision: service.revision, restarts: 0 };
        (id.clone(), telling)
    });
    let present = all.present.iter().map(|(id, present)| {
        let service = wanted.get(id);
        let (kind, message) = match service {
            Some(service) => wanted_one(all, service, present, fetching),
            // Nobody knows yet what is to run: it goes on.
            None if all.wanted.is_none() => unknown_one(present),
            None => (Kind::Stopping, leaving(present)),
        };
        let restarts = present.note.restarts;
        let revision = match (&present.doing, service) {
            (Doing::Down, Some(service)) => service.revision,
            _ => present.note.revision,
        };
        (id.clone(), Telling { kind, message: shortened(message), revision, restarts })
    });
    absent.chain(present).collect()
}

fn wanted_one(
    all: &Circumstances<'_>,
    service: &Wanted,
    present: &Present,
    fetching: &BTreeMap<Sha256, String>,
) -> (Kind, String) {
    match &present.doing {
        Doing::Down => (Kind::Waiting, waiting(all, service, fetching)),
        Doing::Starting => (Kind::Waiting, "it is being started".to_owned()),
        Doing::Up { .. } if service.check.is_none() => (Kind::Healthy, String::new()),
        Doing::Up { health: Health::Well, .. } => (Kind::Healthy, String::new()),
        Doing::Up { health: Health::Unknown, .. } => (Kind::Starting, String::new()),
        Doing::Up { health: Health::Ill(why), .. } => (Kind::Unhealthy, why.clone()),
        Doing::Ended { how, said, .. } => {
            let changed = service.digest() != Some(present.note.digest.as_str());
            if changed {
                (Kind::Waiting, waiting(all, service, fetching))
            } else if stays(service, *how) {
                (Kind::Ended, said.clone())
            } else {
                (Kind::BackingOff, said.clone())
            }
        }
        Doing::Stopping => (Kind::Stopping, "it is to be started otherwise, and is stopped first".to_owned()),
        Doing::Stuck { said, .. } => (Kind::Stopping, said.clone()),
        Doing::Forgetting => (Kind::Waiting, "what it left is being removed first".to_owned()),
    }
}

fn unknown_one(present: &Present) -> (Kind, String) {
    match &present.doing {
        Doing::Up { .. } => (Kind::Healthy, String::new()),
        Doing::Ended { said, .. } => (Kind::Ended, said.clone()),
        doing => (Kind::Waiting, format!("it {doing}, and what is to run is not known yet")),
    }
}

fn leaving(present: &Present) -> String {
    match &present.doing {
        Doing::Stuck { said, .. } => said.clone(),
        doing => format!("its role is taken from this node, or it is in it no more; it {doing}"),
    }
}

fn waiting(all: &Circumstances<'_>, service: &Wanted, fetching: &BTreeMap<Sha256, String>) -> String {
    shortened(match waits(all, service) {
        None => "it is about to start".to_owned(),
        Some(Waits::Rendering(why)) => why,
        Some(Waits::Artefact(artefact)) => {
            let shown = hex::encode(artefact.0);
            let how = fetching.get(&artefact).map_or("it is being fetched", String::as_str);
            format!("it waits for artefact {}…: {how}", &shown[..12])
        }
        Some(Waits::For(ids)) => {
            let names: Vec<&str> = ids.iter().map(|id| id.service.as_str()).collect();
            format!("it waits until {} {} well", names.join(", "), if ids.len() == 1 { "is" } else { "are" })
        }
    })
}

/// As much of a sentence as a curator takes.
#[must_use]
pub fn shortened(mut sentence: String) -> String {
    let mut end = LONGEST.min(sentence.len());
    while !sentence.is_char_boundary(end) {
        end -= 1;
    }
    sentence.truncate(end);
    sentence
}

/// Remembers since when each service does what it does.
#[derive(Debug, Default)]
pub struct Since {
    known: BTreeMap<Id, (Kind, i64)>,
}

impl Since {
    /// What is sent: in order of role and name, where there are too many those that are not well first.
    ///
    /// `began` says since when one does so that was not told of before, if that is another time than `now`; both in
    /// milliseconds since 1970.
    pub fn status(
        &mut self,
        tellings: &BTreeMap<Id, Telling>,
        began: impl Fn(&Id) -> Option<i64>,
        now: i64,
    ) -> Vec<wire::ServiceStatus> {
        self.known.retain(|id, _| tellings.contains_key(id));
        let mut all: Vec<wire::ServiceStatus> = Vec::new();
        for (id, telling) in tellings {
            let since_ms = match self.known.get(id) {
                Some((kind, since)) if *kind == telling.kind => *since,
                Some(_) => now,
                None => began(id).filter(|_| telling.kind == Kind::Healthy).unwrap_or(now),
            };
            self.known.insert(id.clone(), (telling.kind, since_ms));
            all.push(wire::ServiceStatus {
                role: id.role.clone(),
                service: id.service.clone(),
                kind: telling.kind.into(),
                since_ms,
                restarts: telling.restarts,
                message: telling.message.clone(),
                declaration_revision: telling.revision,
            });
        }
        if all.len() > MOST {
            all.sort_by_key(|status| status.kind() == Kind::Healthy);
            all.truncate(MOST);
            all.sort_by(|one, other| (&one.role, &one.service).cmp(&(&other.role, &other.service)));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeSet;
    use std::time::Duration;

    use crate::model::declaration::Restart;
    use crate::roleserver::child::spec::Limits;
    use crate::roleserver::cluster::services::state::{How, Note};
    use crate::roleserver::cluster::services::wanted::tests::id;

    fn wanted(name: &str, rendered: &str, depends_on: &[&str]) -> Wanted {
        use crate::model::declaration::Run;
        use crate::roleserver::cluster::services::wanted::Rendered;
        let made = Rendered {
            run: Run::Path("/bin/x".to_owned()),
            arguments: Vec::new(),
            environment: BTreeMap::new(),
            files: Vec::new(),
            user: "root".to_owned(),
        };
        Wanted {
            id: id(name),
            revision: 3,
            rendered: Ok((made, rendered.to_owned())),
            limits: Limits::default(),
            depends_on: depends_on.iter().map(|name| id(name)).collect(),
            check: None,
            restart: Restart::OnFailure,
            is_task: false,
            stop_time: Duration::ZERO,
        }
    }

    fn present(name: &str, doing: Doing) -> Present {
        let note = Note { digest: "d".to_owned(), revision: 2, restarts: 4, ..Note::lost(id(name)) };
        Present { note, doing, deaths: 1 }
    }

    fn ended(how: How) -> Doing {
        Doing::Ended { how, said: "it ended".to_owned(), at: Duration::ZERO, random: 0.5 }
    }

    fn up(health: Health) -> Doing {
        Doing::Up { since: Duration::ZERO, health }
    }

    fn told(service: Option<&Wanted>, doing: Doing) -> (Kind, String) {
        let wanted: BTreeMap<Id, Wanted> = service.iter().map(|&one| (one.id.clone(), one.clone())).collect();
        let present = BTreeMap::from([(id("web"), present("web", doing))]);
        let artefacts = BTreeSet::new();
        let all = Circumstances {
            wanted: Some(&wanted),
            present: &present,
            artefacts: &artefacts,
            now: Duration::ZERO,
        };
        let telling = tellings(&all, &BTreeMap::new()).remove(&id("web")).unwrap();
        assert_eq!(telling.restarts, 4);
        (telling.kind, telling.message)
    }

    #[test]
    fn each_state_has_its_word_and_its_sentence() {
        let web = wanted("web", "d", &[]);
        let mut checked = web.clone();
        checked.check = Some(crate::roleserver::cluster::services::wanted::Check {
            probe: crate::roleserver::cluster::services::wanted::Probe::Tcp(1),
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            failures: 1,
        });
        let ill = Health::Ill("no answer".to_owned());
        for (service, doing, kind, part) in [
            (&web, Doing::Down, Kind::Waiting, "about to start"),
            (&web, Doing::Starting, Kind::Waiting, "being started"),
            (&web, up(Health::Unknown), Kind::Healthy, ""),
            (&checked, up(Health::Unknown), Kind::Starting, ""),
            (&checked, up(Health::Well), Kind::Healthy, ""),
            (&checked, up(ill), Kind::Unhealthy, "no answer"),
            (&web, ended(How::Exited(0)), Kind::Ended, "it ended"),
            (&web, ended(How::Exited(1)), Kind::BackingOff, "it ended"),
            (&web, ended(How::NotStarted), Kind::BackingOff, "it ended"),
            (&wanted("web", "other", &[]), ended(How::Exited(0)), Kind::Waiting, "about to start"),
            (&wanted("web", "d", &["base", "disk"]), Doing::Down, Kind::Waiting, "until base, disk are well"),
            (&web, Doing::Stopping, Kind::Stopping, "stopped first"),
            (&web, Doing::Stuck { said: "hangs".to_owned(), at: Duration::ZERO }, Kind::Stopping, "hangs"),
        ] {
            let (said_kind, message) = told(Some(service), doing.clone());
            assert_eq!(said_kind, kind, "{doing:?}");
            assert!(message.contains(part) && message.is_empty() == part.is_empty(), "{doing:?}: {message}");
        }
        assert_eq!(told(None, up(Health::Well)).0, Kind::Stopping);
        let unsaid = Wanted { rendered: Err("no label".to_owned()), ..web };
        assert_eq!(told(Some(&unsaid), Doing::Down), (Kind::Waiting, "no label".to_owned()));
    }

    #[test]
    fn time_of_a_state_is_that_of_its_beginning() {
        let mut since = Since::default();
        let telling = |kind| Telling { kind, message: String::new(), revision: 1, restarts: 0 };
        let mut at = |kind, now| {
            let all = BTreeMap::from([(id("web"), telling(kind))]);
            since.status(&all, |_| Some(5), now)[0].since_ms
        };
        assert_eq!(at(Kind::Healthy, 10), 5, "it ran before we did");
        assert_eq!(at(Kind::Healthy, 20), 5);
        assert_eq!(at(Kind::Unhealthy, 30), 30);
        assert_eq!(at(Kind::Unhealthy, 40), 30);
        assert_eq!(at(Kind::Healthy, 50), 50);
    }

    #[test]
    fn as_many_are_told_of_as_a_curator_hears_and_those_that_are_not_well_before_others() {
        let all: BTreeMap<Id, Telling> = (0..300)
            .map(|number| {
                let kind = if number % 100 == 99 { Kind::BackingOff } else { Kind::Healthy };
                let telling = Telling { kind, message: String::new(), revision: 1, restarts: 0 };
                (id(&format!("s{number:03}")), telling)
            })
            .collect();
        let sent = Since::default().status(&all, |_| None, 1);
        assert_eq!(sent.len(), MOST);
        assert_eq!(sent.iter().filter(|status| status.kind() == Kind::BackingOff).count(), 3);
        assert!(sent.is_sorted_by(|one, other| one.service < other.service));
        assert_eq!(shortened("ü".repeat(600)).len(), 1000);
        assert_eq!(shortened("ü".repeat(600) + "x").chars().count(), 500);
    }
}
