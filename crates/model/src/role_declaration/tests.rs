//! Tests: which declarations are accepted, and every fault by its field.

use super::*;

fn program() -> wire::service::Run {
    let source = Some(wire::program::Source::Path("/usr/bin/server".to_owned()));
    wire::service::Run::Program(wire::Program { source, url: String::new() })
}

/// A program in a root file system.
pub(crate) fn rootfs() -> wire::service::Run {
    wire::service::Run::RootFilesystem(wire::RootFilesystem {
        archive: "ab".repeat(32),
        program: "/bin/server".to_owned(),
    })
}

fn service(name: &str, depends_on: &[&str]) -> wire::Service {
    wire::Service {
        name: name.to_owned(),
        run: Some(program()),
        user: "daemon".to_owned(),
        depends_on: depends_on.iter().map(|name| (*name).to_owned()).collect(),
        ..Default::default()
    }
}

fn role(services: impl IntoIterator<Item = wire::Service>) -> wire::Declaration {
    let services = services.into_iter().collect();
    wire::Declaration { role: "web".to_owned(), services, ..Default::default() }
}

fn check(probe: wire::health_check::Probe) -> wire::HealthCheck {
    wire::HealthCheck { probe: Some(probe), ..Default::default() }
}

fn faults(declared: wire::Declaration) -> Vec<String> {
    RoleDeclaration::new(declared).unwrap_err().faults
}

#[test]
fn declaration_is_accepted_with_defaults_filled_in() {
    let mut declared = service("server", &[]);
    declared.arguments = vec!["--bind".to_owned(), "{{node.address}}:80".to_owned()];
    declared.environment = BTreeMap::from([("NODE".to_owned(), "{{node.id}}".to_owned())]);
    declared.files =
        vec![wire::File { path: "etc/server.conf".to_owned(), contents: "x".to_owned(), mode: 0 }];
    declared.health_check = Some(check(wire::health_check::Probe::Tcp(wire::TcpCheck { port: 80 })));
    let declaration = RoleDeclaration::new(role([declared])).unwrap();
    let service = declaration.service("server").unwrap();
    assert_eq!(service.run, ProgramSource::Path("/usr/bin/server".to_owned()));
    assert_eq!((service.arguments.len(), service.environment.len()), (2, 1));
    assert_eq!((service.files[0].mode, service.restart), (0o600, RestartPolicy::Always));
    assert_eq!((service.stop_time, service.limits), (DEFAULT_STOP_TIME, ServiceLimits::default()));
    let expected = HealthCheck {
        probe: ProbeSpec::Tcp(80),
        interval: DEFAULT_CHECK_INTERVAL,
        timeout: DEFAULT_CHECK_TIMEOUT,
        failures: 3,
    };
    assert_eq!(service.health_check, Some(expected));
}

#[test]
fn short_interval_shortens_the_default_timeout() {
    let tcp = wire::health_check::Probe::Tcp(wire::TcpCheck { port: 80 });
    let health_check = Some(wire::HealthCheck { interval_ms: 500, ..check(tcp) });
    let declaration =
        RoleDeclaration::new(role([wire::Service { health_check, ..service("a", &[]) }])).unwrap();
    let timeout = declaration.service("a").unwrap().health_check.as_ref().unwrap().timeout;
    assert_eq!(timeout, Duration::from_millis(500));
}

#[test]
fn every_fault_names_its_field() {
    use wire::health_check::Probe as P;
    let base = || service("a", &[]);
    let file = |path: &str| wire::File { path: path.to_owned(), ..Default::default() };
    let run = |run| wire::Service { run: Some(run), ..base() };
    let path = |path: &str| {
        run(wire::service::Run::Program(wire::Program {
            source: Some(wire::program::Source::Path(path.to_owned())),
            url: String::new(),
        }))
    };
    let artefact = |digest: &str| {
        run(wire::service::Run::Program(wire::Program {
            source: Some(wire::program::Source::Artefact(digest.to_owned())),
            url: String::new(),
        }))
    };
    let checked = |check| wire::Service { health_check: Some(check), ..base() };
    let tcp = |port| check(P::Tcp(wire::TcpCheck { port }));
    let http = |path: &str| check(P::Http(wire::HttpCheck { port: 1, path: path.to_owned() }));
    let environment = |name: &str| wire::Service {
        environment: BTreeMap::from([(name.to_owned(), String::new())]),
        ..base()
    };
    for (field, declared) in [
        ("name", wire::Service { name: "A".to_owned(), ..base() }),
        ("run", wire::Service { run: None, ..base() }),
        ("run", run(wire::service::Run::Program(wire::Program { source: None, url: String::new() }))),
        ("program.path", path("bin/server")),
        ("program.path", path("/bin/../server")),
        ("program.path", path("/")),
        ("program.artefact", artefact("ab")),
        ("program.artefact", artefact(&"AB".repeat(32))),
        (
            "root_filesystem.program",
            wire::Service {
                user: "0".to_owned(),
                ..run(wire::service::Run::RootFilesystem(wire::RootFilesystem {
                    archive: "ab".repeat(32),
                    program: "server".to_owned(),
                }))
            },
        ),
        ("arguments", wire::Service { arguments: vec!["{{node.name}}".to_owned()], ..base() }),
        ("arguments", wire::Service { arguments: vec!["a\0".to_owned()], ..base() }),
        ("arguments", wire::Service { arguments: vec![String::new(); 257], ..base() }),
        ("environment", environment("A=B")),
        ("environment", environment("1A")),
        ("environment", environment("")),
        ("file \"../a\"", wire::Service { files: vec![file("../a")], ..base() }),
        ("file \"/etc/passwd\"", wire::Service { files: vec![file("/etc/passwd")], ..base() }),
        ("file \"\"", wire::Service { files: vec![file("")], ..base() }),
        ("file \"a\"", wire::Service { files: vec![file("a"), file("a")], ..base() }),
        ("file \"a\"", wire::Service { files: vec![wire::File { mode: 0o4755, ..file("a") }], ..base() }),
        (
            "file \"a\"",
            wire::Service { files: vec![wire::File { contents: "{{x}}".to_owned(), ..file("a") }], ..base() },
        ),
        ("user", wire::Service { user: String::new(), ..base() }),
        ("user", wire::Service { user: "a b".to_owned(), ..base() }),
        ("user", wire::Service { user: u32::MAX.to_string(), ..base() }),
        ("user", wire::Service { run: Some(rootfs()), ..base() }),
        ("depends_on", service("a", &["b"])),
        ("health_check", checked(wire::HealthCheck::default())),
        ("health_check.exec", checked(check(P::Exec(wire::ExecCheck { command: vec![] })))),
        ("health_check.tcp.port", checked(tcp(0))),
        ("health_check.tcp.port", checked(tcp(65_536))),
        ("health_check.http.path", checked(http("health"))),
        ("health_check.http.path", checked(http("/a b"))),
        ("health_check.timeout_ms", checked(wire::HealthCheck { timeout_ms: 5001, ..tcp(1) })),
        ("health_check.interval_ms", checked(wire::HealthCheck { interval_ms: 3_600_001, ..tcp(1) })),
        ("restart", wire::Service { restart: 9, ..base() }),
        ("stop_time_ms", wire::Service { stop_time_ms: 3_600_001, ..base() }),
    ] {
        let begins = format!("service {:?}: {field}", declared.name);
        let messages = faults(role([declared]));
        assert!(messages.len() == 1 && messages[0].starts_with(&begins), "{begins}: {messages:?}");
    }
    assert_eq!(faults(role([])), ["services: it has none; a role runs at least one"]);
    assert_eq!(faults(role((0..65).map(|n| service(&format!("s{n}"), &[])))).len(), 1);
    let big = wire::File { contents: "x".repeat(MAX_BYTES), ..file("a") };
    assert!(faults(role([wire::Service { files: vec![big], ..base() }]))[0].starts_with("size"));
}

#[test]
fn more_privileges_are_requested_by_name() {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let rooted = wire::Service { run: Some(rootfs()), user: "0".to_owned(), ..service("a", &[]) };
    let requesting = wire::Service {
        capabilities: names(&["NET_ADMIN", "SYS_TIME"]),
        seccomp: "unconfined".to_owned(),
        new_privileges: true,
        ..rooted.clone()
    };
    let declared = RoleDeclaration::new(role([requesting])).unwrap();
    let privileges = &declared.service("a").unwrap().privileges;
    assert!(privileges.new_privileges && privileges.unfiltered_system_calls);
    assert_eq!(
        privileges.capabilities.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["NET_ADMIN", "SYS_TIME"]
    );
    let plain = RoleDeclaration::new(role([rooted.clone()])).unwrap();
    assert!(plain.service("a").unwrap().privileges.is_default());

    let base = || service("a", &[]);
    for (part, declared) in [
        (
            "capabilities: \"net_admin\" is not a capability",
            wire::Service { capabilities: names(&["net_admin"]), ..base() },
        ),
        (
            "capabilities: it names a capability twice",
            wire::Service { capabilities: names(&["CHOWN", "CHOWN"]), ..base() },
        ),
        (
            "seccomp: \"runtime/default\" is not a profile; write \"unconfined\"",
            wire::Service { seccomp: "runtime/default".to_owned(), ..rooted },
        ),
        (
            "seccomp: only a service in a root filesystem has a filter of system calls",
            wire::Service { seccomp: "unconfined".to_owned(), ..base() },
        ),
    ] {
        let messages = faults(role([declared]));
        assert!(messages.len() == 1 && messages[0].contains(part), "{part}: {messages:?}");
    }
}

#[test]
fn all_faults_are_reported_at_once() {
    let wrong = wire::Service { user: String::new(), run: None, ..service("a", &["c"]) };
    let declared = wire::Declaration {
        role: "kubernetes-worker".to_owned(),
        ..role([wrong, service("b", &[]), service("b", &[])])
    };
    let error = RoleDeclaration::new(declared).unwrap_err();
    let fields = [
        "role: ",
        "service \"a\": run",
        "service \"a\": user",
        "service \"b\": name",
        "service \"a\": depends_on",
    ];
    assert_eq!(error.faults.len(), fields.len(), "{error}");
    for field in fields {
        assert!(error.faults.iter().any(|fault| fault.starts_with(field)), "{field}: {error}");
    }
    assert!(error.to_string().starts_with("role \"kubernetes-worker\" was not declared: "), "{error}");
}

#[test]
fn services_start_after_their_dependencies() {
    let names = |services: Vec<wire::Service>| {
        let declaration = RoleDeclaration::new(role(services)).unwrap();
        let started: Vec<_> = declaration.in_start_order().map(|service| service.name.clone()).collect();
        let mut stopped: Vec<_> =
            declaration.in_start_order().rev().map(|service| service.name.clone()).collect();
        stopped.reverse();
        assert_eq!(stopped, started);
        started
    };
    assert_eq!(names(vec![service("c", &[]), service("a", &[]), service("b", &[])]), ["a", "b", "c"]);
    let chain = vec![service("a", &["b"]), service("b", &["c"]), service("c", &[])];
    assert_eq!(names(chain), ["c", "b", "a"]);
    let diamond = vec![
        service("web", &["cache", "database"]),
        service("cache", &["disk"]),
        service("database", &["disk"]),
        service("disk", &[]),
    ];
    assert_eq!(names(diamond), ["disk", "cache", "database", "web"]);
}

#[test]
fn dependency_cycle_is_reported_by_names() {
    let declared = role([
        service("an-entry", &["web"]),
        service("web", &["cache"]),
        service("cache", &["database"]),
        service("database", &["web"]),
        service("free", &[]),
    ]);
    let messages = faults(declared);
    assert_eq!(messages.len(), 1);
    // Names that only lead into the cycle are left out.
    assert!(messages[0].contains(" web → cache → database → web:"), "{messages:?}");
    assert!(!messages[0].contains("an-entry"), "{messages:?}");
    assert!(faults(role([service("a", &["a"])]))[0].contains(" a → a:"));
}

#[test]
fn same_declaration_keeps_the_revision_and_another_raises_it() {
    let first = RoleDeclaration::new(role([service("a", &[])])).unwrap().into_next_revision(None).unwrap();
    assert_eq!(first.revision(), 1);
    assert_eq!(
        RoleDeclaration::new(role([service("a", &[])])).unwrap().into_next_revision(Some(&first)),
        None
    );
    let claims = wire::Declaration { revision: 99, ..role([service("a", &[])]) };
    assert_eq!(
        RoleDeclaration::new(claims).unwrap().into_next_revision(Some(&first)),
        None,
        "what it claims is not looked at"
    );
    let second =
        RoleDeclaration::new(role([service("b", &[])])).unwrap().into_next_revision(Some(&first)).unwrap();
    assert_eq!(second.revision(), 2);
}

#[test]
fn artefact_has_an_http_url_or_none() {
    let with = |source: wire::program::Source, url: &str| wire::Service {
        run: Some(wire::service::Run::Program(wire::Program { source: Some(source), url: url.to_owned() })),
        ..service("a", &[])
    };
    let artefact = || wire::program::Source::Artefact("ab".repeat(32));
    for url in ["", "http://10.0.0.1/a", "http://store:8080/a/b?c=d"] {
        let declaration = RoleDeclaration::new(role([with(artefact(), url)])).unwrap();
        let expected = ProgramSource::Artefact { digest: Sha256([0xab; 32]), url: url.to_owned() };
        assert_eq!(declaration.service("a").unwrap().run, expected);
    }
    for url in [
        "https://store/a",
        "http:///a",
        "http://store",
        "http://u:p@store/a",
        "http://s/a b",
        "ftp://s/a",
        "/a",
    ] {
        assert!(faults(role([with(artefact(), url)]))[0].contains("program.url: it is http://"), "{url}");
    }
    let path = wire::program::Source::Path("/bin/server".to_owned());
    assert!(faults(role([with(path, "http://store/a")]))[0].contains("from nowhere"));
}

#[test]
fn restart_follows_the_policy() {
    for (policy, ended_well, failed, killed) in [
        (RestartPolicy::Always, true, true, true),
        (RestartPolicy::OnFailure, false, true, true),
        (RestartPolicy::Never, false, false, false),
    ] {
        let again =
            (policy.restarts_after(Some(0)), policy.restarts_after(Some(1)), policy.restarts_after(None));
        assert_eq!(again, (ended_well, failed, killed), "{policy:?}");
    }
}

#[test]
fn root_filesystem_runs_as_a_number_and_may_have_files_anywhere_in_it() {
    let file = wire::File { path: "/etc/server.conf".to_owned(), ..Default::default() };
    let rooted = wire::Service {
        run: Some(rootfs()),
        user: "1000".to_owned(),
        files: vec![file.clone()],
        ..service("a", &[])
    };
    assert!(RoleDeclaration::new(role([rooted.clone()])).is_ok());
    let relative = wire::File { path: "etc/server.conf".to_owned(), ..file.clone() };
    let twice = wire::Service { files: vec![file, relative], ..rooted };
    assert!(faults(role([twice]))[0].contains("another file has this path"));
}

#[test]
fn privileges_are_root_programs_of_the_node_and_what_goes_beyond_the_confinement() {
    let in_root =
        |user: &str| wire::Service { run: Some(rootfs()), user: user.to_owned(), ..service("web", &[]) };
    let privileges =
        |declared: wire::Service| RoleDeclaration::new(role([declared])).unwrap().list_privileges();
    assert_eq!(privileges(in_root("1000")), Vec::<String>::new());
    for user in ["root", "0", "00"] {
        assert_eq!(privileges(in_root(user)), ["web runs as root"], "{user}");
    }
    assert_eq!(privileges(service("web", &[])), ["web runs the program /usr/bin/server of the node"]);
    let more = wire::Service { new_privileges: true, ..in_root("1000") };
    assert_eq!(privileges(more), ["web requests privileges beyond the default confinement"]);
}
