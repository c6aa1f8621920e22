//! What is to run on this node: declarations with the facts of this node put into them.
//!
//! Pure: what is not known here is a sentence in the service that needs it, and no other service waits for that.
//!
//! Whether something that runs is still what is to run is told by [`Rendered::digest`] alone. It is made of what a
//! service is started with, as it reads on this node: program, arguments, environment, files, user. So another revision
//! of a declaration, or another address of a curator, starts nothing again where it comes to the same. What can be
//! changed under a running service is no part of it: limits, dependencies, health check, restart policy, stop time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ring::digest;
use serde::{Deserialize, Serialize};

use crate::model::declaration::{self, Declaration, Restart, Run, Service, Sha256};
use crate::model::label::Labels;
use crate::model::role::DeclaredRole;
use crate::model::template::{self, Fact, Template};
use crate::roleserver::child::spec::Limits;
use crate::roleserver::cluster::services::placing::Placed;

/// Longest name of a program that runs beside the role server.
const LONGEST: usize = 64;

/// Declarations of the roles that this node has.
pub type Declared = BTreeMap<DeclaredRole, Arc<Declaration>>;

/// One service of one role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Id {
    /// The role.
    pub role: String,
    /// Its name in the role.
    pub service: String,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.role, self.service)
    }
}

impl Id {
    /// Its name among the programs that run beside the role server: no name of a role or a service has an underscore.
    #[must_use]
    pub fn child(&self) -> String {
        let plain = format!("{}_{}", self.role, self.service);
        if plain.len() <= LONGEST {
            return plain;
        }
        let digest = hex::encode(digest::digest(&digest::SHA256, plain.as_bytes()));
        let short = |name: &str| name.chars().take(20).collect::<String>();
        format!("{}_{}_{}", short(&self.role), short(&self.service), &digest[..16])
    }

    /// The service of this name among the programs; none where the name does not say it.
    #[must_use]
    pub fn of_child(name: &str) -> Option<Self> {
        let (role, service) = name.split_once('_')?;
        let whole = !role.is_empty() && !service.is_empty() && !service.contains('_');
        whole.then(|| Self { role: role.to_owned(), service: service.to_owned() })
    }
}

/// What people say of this node, as its record has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// UUID of its machine; empty when nobody said.
    pub machine: String,
    /// Its labels.
    pub labels: Labels,
}

/// What is known of this node; what is not known is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Its id.
    pub node: String,
    /// UUID of its cluster.
    pub cluster: String,
    /// Where other nodes reach it.
    pub address: Option<IpAddr>,
    /// What people say of it.
    pub about: Option<About>,
    /// `host:port` of every curator.
    pub curators: Option<BTreeSet<String>>,
}

/// What a service is started with on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// What is started.
    pub run: Run,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// All of its environment.
    pub environment: BTreeMap<String, String>,
    /// Files that it finds.
    pub files: Vec<Placed>,
    /// As whom it runs.
    pub user: String,
}

impl Rendered {
    /// The artefact that it is made of, if it is of one.
    #[must_use]
    pub const fn artefact(&self) -> Option<Sha256> {
        match &self.run {
            Run::Path(_) => None,
            Run::Artefact { digest, .. } | Run::RootFilesystem { archive: digest, .. } => Some(*digest),
        }
    }

    /// Tells two of them apart: what runs with one digest is not what another digest asks for.
    #[must_use]
    pub fn digest(&self) -> String {
        let run = match &self.run {
            Run::Path(path) => ("path", path.clone(), String::new()),
            // From wherever it is fetched, it is the same.
            Run::Artefact { digest, .. } => ("artefact", hex::encode(digest.0), String::new()),
            Run::RootFilesystem { archive, program } => ("root", hex::encode(archive.0), program.clone()),
        };
        let told = (run, &self.arguments, &self.environment, &self.files, &self.user);
        // Of strings and numbers alone, which JSON always has a text for.
        let bytes = serde_json::to_vec(&told).unwrap_or_else(|_| format!("{told:?}").into_bytes());
        hex::encode(digest::digest(&digest::SHA256, &bytes))
    }
}

/// What is tried to see whether it is well, as it reads on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// A program with its arguments, which must end with 0.
    Exec(Vec<String>),
    /// A connection to this port.
    Tcp(u16),
    /// A connection to this socket in the file system.
    Unix(PathBuf),
    /// A request to this port and path.
    Http {
        /// The port.
        port: u16,
        /// The path.
        path: String,
    },
    /// The same by TLS, of whoever answers at an address of this node.
    Https {
        /// The address.
        at: SocketAddr,
        /// The path.
        path: String,
        /// Files of the certificate and the key that are shown, where any are; they are read for each request.
        shown: Option<(PathBuf, PathBuf)>,
    },
}

/// How it is seen to be well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// What is tried.
    pub probe: Probe,
    /// Time from one try to the next.
    pub interval: Duration,
    /// After which a try has failed.
    pub timeout: Duration,
    /// So many failures one after the other make it unhealthy.
    pub failures: u32,
}

/// A service that is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub id: Id,
    /// Revision of its declaration.
    pub revision: u64,
    /// What it is started with, with its [`Rendered::digest`]; or why that cannot be said, as a sentence.
    pub rendered: Result<(Rendered, String), String>,
    /// What it may use.
    pub limits: Limits,
    /// Those that must be well before it starts.
    pub depends_on: BTreeSet<Id>,
    /// How it is seen to be well.
    pub check: Option<Check>,
    /// What happens when it ends.
    pub restart: Restart,
    /// Whether it has something to do and ends then: what depends on it waits for that, and not only for its start.
    pub is_task: bool,
    /// How long it has to end.
    pub stop_time: Duration,
}

impl Wanted {
    /// What tells whether what runs is this; none while that cannot be said.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        self.rendered.as_ref().ok().map(|(_, digest)| digest.as_str())
    }
}

/// All that is to run on this node.
#[must_use]
pub fn wanted(declared: &Declared, known: &Known) -> BTreeMap<Id, Wanted> {
    let services = declared.values().flat_map(|declaration| {
        declaration.in_start_order().map(|service| {
            let wanted = one(declaration, service, known);
            (wanted.id.clone(), wanted)
        })
    });
    services.collect()
}

fn one(declaration: &Declaration, service: &Service, known: &Known) -> Wanted {
    let role = declaration.role().to_string();
    let id = |service: &String| Id { role: role.clone(), service: service.clone() };
    let renderer = Renderer {
        known,
        facts: template::Facts {
            node_id: known.node.clone(),
            node_address: known.address.map(|address| address.to_string()).unwrap_or_default(),
            node_machine: known.about.as_ref().map(|about| about.machine.clone()).unwrap_or_default(),
            node_labels: known.about.as_ref().map(|about| about.labels.clone()).unwrap_or_default(),
            cluster_id: known.cluster.clone(),
            cluster_curators: known.curators.iter().flatten().cloned().collect(),
            role_name: role.clone(),
            role_revision: declaration.revision(),
            service_name: service.name.clone(),
        },
    };
    let made = service.health_check.as_ref().map(|check| renderer.check(check)).transpose();
    let (check, rendered) = match (made, renderer.service(service)) {
        (Ok(check), Ok(rendered)) => {
            let digest = rendered.digest();
            (check, Ok((rendered, digest)))
        }
        (Err(error), _) | (_, Err(error)) => (None, Err(error)),
    };
    Wanted {
        id: id(&service.name),
        revision: declaration.revision(),
        rendered,
        limits: Limits {
            memory_bytes: service.limits.memory,
            cpu_millis: service.limits.processor_milli.map(u64::from),
            tasks: service.limits.tasks.map(u64::from),
        },
        depends_on: service.depends_on.iter().map(id).collect(),
        check,
        restart: service.restart,
        is_task: false,
        stop_time: service.stop_time,
    }
}

struct Renderer<'k> {
    known: &'k Known,
    facts: template::Facts,
}

impl Renderer<'_> {
    fn text(&self, template: &Template) -> Result<String, String> {
        for fact in template.facts() {
            let known = match fact {
                Fact::NodeAddress => self.known.address.is_some(),
                Fact::ClusterCurators => self.known.curators.is_some(),
                Fact::NodeMachine | Fact::NodeLabel(_) => self.known.about.is_some(),
                Fact::NodeId | Fact::ClusterId | Fact::RoleName | Fact::RoleRevision | Fact::ServiceName => {
                    true
                }
            };
            if !known {
                return Err(format!("{fact} is not known on this node until a curator has been asked"));
            }
        }
        template.render(&self.facts).map_err(|error| error.to_string())
    }

    fn texts(&self, templates: &[Template]) -> Result<Vec<String>, String> {
        templates.iter().map(|template| self.text(template)).collect()
    }

    fn service(&self, service: &Service) -> Result<Rendered, String> {
        let environment =
            service.environment.iter().map(|(name, value)| Ok((name.clone(), self.text(value)?)));
        let files = service.files.iter().map(|file| {
            Ok(Placed { path: file.path.clone(), contents: self.text(&file.contents)?, mode: file.mode })
        });
        Ok(Rendered {
            run: service.run.clone(),
            arguments: self.texts(&service.arguments)?,
            environment: environment.collect::<Result<_, String>>()?,
            files: files.collect::<Result<_, String>>()?,
            user: service.user.clone(),
        })
    }

    fn check(&self, check: &declaration::HealthCheck) -> Result<Check, String> {
        let probe = match &check.probe {
            declaration::Probe::Exec(command) => Probe::Exec(self.texts(command)?),
            declaration::Probe::Tcp(port) => Probe::Tcp(*port),
            declaration::Probe::Http { port, path } => Probe::Http { port: *port, path: path.clone() },
        };
        Ok(Check { probe, interval: check.interval, timeout: check.timeout, failures: check.failures })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::proto::curator::v1 as wire;

    pub(in crate::roleserver::cluster::services) fn id(service: &str) -> Id {
        Id { role: "web".to_owned(), service: service.to_owned() }
    }

    fn known() -> Known {
        Known {
            node: "node-7".to_owned(),
            cluster: "c".to_owned(),
            address: Some("10.0.0.7".parse().unwrap()),
            about: Some(About {
                machine: "m".to_owned(),
                labels: Labels::from([("row".to_owned(), "7".to_owned())]),
            }),
            curators: Some(BTreeSet::from(["10.0.0.1:1".to_owned()])),
        }
    }

    fn service(name: &str) -> wire::Service {
        let source = Some(wire::program::Source::Path("/bin/server".to_owned()));
        wire::Service {
            name: name.to_owned(),
            run: Some(wire::service::Run::Program(wire::Program { source, url: String::new() })),
            user: "root".to_owned(),
            ..Default::default()
        }
    }

    fn declared(revision: u64, services: Vec<wire::Service>) -> Declared {
        let declaration = wire::Declaration { role: "web".to_owned(), services, revision };
        let declaration = Declaration::new(declaration).unwrap();
        Declared::from([(declaration.role().clone(), Arc::new(declaration))])
    }

    fn only(service: &wire::Service, known: &Known) -> Wanted {
        wanted(&declared(1, vec![service.clone()]), known).into_values().next().unwrap()
    }

    #[test]
    fn names_of_programs_are_short_and_tell_services_apart() {
        assert_eq!(id("server").child(), "web_server");
        assert_eq!(Id::of_child("web_server"), Some(id("server")));
        let long = |end: &str| Id { role: "r".repeat(63), service: format!("{}{end}", "s".repeat(62)) };
        assert_ne!(long("a").child(), long("b").child());
        assert!(long("a").child().len() <= LONGEST);
        assert_eq!(Id::of_child(&long("a").child()), None, "what is cut short is not read back");
        for name in ["etcd", "_a", "a_", "a_b_c"] {
            assert_eq!(Id::of_child(name), None, "{name}");
        }
    }

    #[test]
    fn facts_of_the_node_stand_in_what_a_service_is_started_with() {
        let mut server = service("server");
        server.arguments = vec!["{{node.address}}".to_owned(), "{{node.label.row}}".to_owned()];
        server.environment = [("C".to_owned(), "{{cluster.curators}}".to_owned())].into();
        server.files = vec![wire::File {
            path: "conf".to_owned(),
            contents: "{{service.name}}@{{role.revision}}".to_owned(),
            mode: 0,
        }];
        let (rendered, _) = only(&server, &known()).rendered.unwrap();
        assert_eq!(rendered.arguments, ["10.0.0.7", "7"]);
        assert_eq!(rendered.environment["C"], "10.0.0.1:1");
        assert_eq!((rendered.files[0].contents.as_str(), rendered.files[0].mode), ("server@1", 0o600));
    }

    #[test]
    fn service_waits_for_facts_that_it_names_and_for_no_others() {
        for (text, missing) in [
            ("{{node.address}}", Known { address: None, ..known() }),
            ("{{node.machine}}", Known { about: None, ..known() }),
            ("{{node.label.row}}", Known { about: None, ..known() }),
            ("{{cluster.curators}}", Known { curators: None, ..known() }),
        ] {
            let mut server = service("server");
            server.arguments = vec![text.to_owned()];
            assert!(only(&server, &known()).rendered.is_ok(), "{text}");
            let error = only(&server, &missing).rendered.unwrap_err();
            assert!(error.ends_with("is not known on this node until a curator has been asked"), "{error}");
            assert!(only(&service("server"), &missing).rendered.is_ok(), "{text}");
        }
        let mut server = service("server");
        server.arguments = vec!["{{node.label.rack}}".to_owned()];
        assert!(only(&server, &known()).rendered.unwrap_err().contains("has no label \"rack\""));
        let exec = wire::ExecCheck { command: vec!["{{node.label.rack}}".to_owned()] };
        let probe = Some(wire::health_check::Probe::Exec(exec));
        let checked = wire::Service {
            health_check: Some(wire::HealthCheck { probe, ..Default::default() }),
            ..service("server")
        };
        assert!(only(&checked, &known()).rendered.is_err());
    }

    #[test]
    fn only_what_a_service_is_started_with_tells_it_apart() {
        let digest =
            |service: &wire::Service, known: &Known| only(service, known).digest().unwrap().to_owned();
        let plain = digest(&service("server"), &known());
        let same: [fn(&mut wire::Service); 4] = [
            |service| service.stop_time_ms = 7,
            |service| service.limits = Some(wire::Limits { tasks: 7, ..Default::default() }),
            |service| service.restart = wire::RestartPolicy::Never.into(),
            |service| {
                let probe = Some(wire::health_check::Probe::Tcp(wire::TcpCheck { port: 7 }));
                service.health_check = Some(wire::HealthCheck { probe, ..Default::default() });
            },
        ];
        for (number, change) in same.into_iter().enumerate() {
            let mut changed = service("server");
            change(&mut changed);
            assert_eq!(digest(&changed, &known()), plain, "{number}");
        }
        let others: [fn(&mut wire::Service); 5] = [
            |service| service.arguments = vec!["a".to_owned()],
            |service| service.user = "daemon".to_owned(),
            |service| service.environment = [("A".to_owned(), "1".to_owned())].into(),
            |service| {
                service.files =
                    vec![wire::File { path: "a".to_owned(), contents: "b".to_owned(), mode: 0o644 }];
            },
            |service| {
                let source = Some(wire::program::Source::Path("/bin/other".to_owned()));
                service.run = Some(wire::service::Run::Program(wire::Program { source, url: String::new() }));
            },
        ];
        for (number, change) in others.into_iter().enumerate() {
            let mut changed = service("server");
            change(&mut changed);
            assert_ne!(digest(&changed, &known()), plain, "{number}");
        }
    }

    #[test]
    fn other_facts_make_another_service_only_where_they_are_named() {
        let other = Known { curators: Some(BTreeSet::from(["10.0.0.2:1".to_owned()])), ..known() };
        let mut server = service("server");
        assert_eq!(only(&server, &known()), only(&server, &other));
        server.arguments = vec!["{{cluster.curators}}".to_owned()];
        assert_ne!(only(&server, &known()).digest(), only(&server, &other).digest());
        let revision = |text: &str, revision| {
            let mut server = service("server");
            server.arguments = vec![text.to_owned()];
            let wanted = wanted(&declared(revision, vec![server]), &known()).into_values().next().unwrap();
            wanted.digest().unwrap().to_owned()
        };
        assert_eq!(revision("x", 1), revision("x", 2), "another revision that says the same");
        assert_ne!(revision("{{role.revision}}", 1), revision("{{role.revision}}", 2));
    }
}
