//! Tests of what services are rendered to.

use proto::curator::v1 as wire;

use super::*;

pub(in crate::cluster::services) fn id(service: &str) -> ServiceId {
    ServiceId { role: "web".to_owned(), service: service.to_owned() }
}

fn render_inputs() -> RenderInputs {
    RenderInputs {
        node: "node-7".to_owned(),
        cluster: "c".to_owned(),
        address: Some("10.0.0.7".parse().unwrap()),
        node_info: Some(NodeInfo {
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

fn declared(revision: u64, services: Vec<wire::Service>) -> DeclarationMap {
    let declaration = wire::Declaration { role: "web".to_owned(), services, revision, ..Default::default() };
    let declaration = RoleDeclaration::new(declaration).unwrap();
    DeclarationMap::from([(declaration.role().clone(), Arc::new(declaration))])
}

fn only(service: &wire::Service, known: &RenderInputs) -> DesiredService {
    desired_services(&declared(1, vec![service.clone()]), known).into_values().next().unwrap()
}

#[test]
fn child_names_are_short_and_distinct() {
    assert_eq!(id("server").child_name(), "web_server");
    assert_eq!(ServiceId::from_child_name("web_server"), Some(id("server")));
    let long = |end: &str| ServiceId { role: "r".repeat(63), service: format!("{}{end}", "s".repeat(62)) };
    assert_ne!(long("a").child_name(), long("b").child_name());
    assert!(long("a").child_name().len() <= MAX_CHILD_NAME);
    assert_eq!(
        ServiceId::from_child_name(&long("a").child_name()),
        None,
        "what is cut short is not read back"
    );
    for name in ["etcd", "_a", "a_", "a_b_c"] {
        assert_eq!(ServiceId::from_child_name(name), None, "{name}");
    }
}

#[test]
fn node_facts_are_rendered_into_a_service() {
    let mut server = service("server");
    server.arguments = vec!["{{node.address}}".to_owned(), "{{node.label.row}}".to_owned()];
    server.environment = [("C".to_owned(), "{{cluster.curators}}".to_owned())].into();
    server.files = vec![wire::File {
        path: "conf".to_owned(),
        contents: "{{service.name}}@{{role.revision}}".to_owned(),
        mode: 0,
    }];
    let (rendered, _) = only(&server, &render_inputs()).rendered.unwrap();
    assert_eq!(rendered.arguments, ["10.0.0.7", "7"]);
    assert_eq!(rendered.environment["C"], "10.0.0.1:1");
    assert_eq!((rendered.files[0].contents.as_str(), rendered.files[0].mode), ("server@1", 0o600));
}

#[test]
fn health_check_goes_where_the_service_may_listen() {
    let mut server = service("server");
    let tcp = wire::health_check::Probe::Tcp(wire::TcpCheck { port: 80 });
    server.health_check = Some(wire::HealthCheck { probe: Some(tcp), ..Default::default() });
    for (address, expected) in [
        (None, &["127.0.0.1:80", "[::1]:80"][..]),
        (Some("10.0.0.7"), &["127.0.0.1:80", "[::1]:80", "10.0.0.7:80"][..]),
        (Some("2001:db8::7"), &["127.0.0.1:80", "[::1]:80", "[2001:db8::7]:80"][..]),
        (Some("::1"), &["127.0.0.1:80", "[::1]:80"][..]),
    ] {
        let address = address.map(|text: &str| text.parse().unwrap());
        let check = only(&server, &RenderInputs { address, ..render_inputs() }).check.unwrap();
        let expected = expected.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(check.probe, RenderedProbe::Tcp(expected));
    }
}

#[test]
fn service_waits_for_facts_that_it_names_and_for_no_others() {
    for (text, missing) in [
        ("{{node.address}}", RenderInputs { address: None, ..render_inputs() }),
        ("{{node.url_host}}", RenderInputs { address: None, ..render_inputs() }),
        ("{{node.machine}}", RenderInputs { node_info: None, ..render_inputs() }),
        ("{{node.label.row}}", RenderInputs { node_info: None, ..render_inputs() }),
        ("{{cluster.curators}}", RenderInputs { curators: None, ..render_inputs() }),
    ] {
        let mut server = service("server");
        server.arguments = vec![text.to_owned()];
        assert!(only(&server, &render_inputs()).rendered.is_ok(), "{text}");
        let error = only(&server, &missing).rendered.unwrap_err();
        assert!(error.ends_with("is not known on this node until a curator has answered"), "{error}");
        assert!(only(&service("server"), &missing).rendered.is_ok(), "{text}");
    }
    let mut server = service("server");
    server.arguments = vec!["{{node.label.rack}}".to_owned()];
    assert!(only(&server, &render_inputs()).rendered.unwrap_err().contains("has no label \"rack\""));
    let exec = wire::ExecCheck { command: vec!["{{node.label.rack}}".to_owned()] };
    let probe = Some(wire::health_check::Probe::Exec(exec));
    let checked = wire::Service {
        health_check: Some(wire::HealthCheck { probe, ..Default::default() }),
        ..service("server")
    };
    assert!(only(&checked, &render_inputs()).rendered.is_err());
}

#[test]
fn group_has_room_for_runc_when_limits_change_too() {
    let limited = |run: Option<wire::service::Run>| {
        let limits = Some(wire::Limits { tasks: 7, ..Default::default() });
        let plain = service("server");
        only(&wire::Service { limits, run: run.or_else(|| plain.run.clone()), ..plain }, &render_inputs())
            .group_limits()
            .tasks
    };
    assert_eq!(limited(None), Some(7));
    let archive = wire::RootFilesystem { archive: "5a".repeat(32), program: "/x".to_owned() };
    assert!(limited(Some(wire::service::Run::RootFilesystem(archive))) > Some(7));
}

#[test]
fn digest_changes_only_with_what_a_service_is_started_with() {
    let digest =
        |service: &wire::Service, known: &RenderInputs| only(service, known).digest().unwrap().to_owned();
    let plain = digest(&service("server"), &render_inputs());
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
        assert_eq!(digest(&changed, &render_inputs()), plain, "{number}");
    }
    let others: [fn(&mut wire::Service); 8] = [
        |service| service.capabilities = vec!["NET_ADMIN".to_owned()],
        |service| service.new_privileges = true,
        |service| {
            let archive = wire::RootFilesystem { archive: "5a".repeat(32), program: "/x".to_owned() };
            service.run = Some(wire::service::Run::RootFilesystem(archive));
            service.seccomp = "unconfined".to_owned();
        },
        |service| service.arguments = vec!["a".to_owned()],
        |service| service.user = "daemon".to_owned(),
        |service| service.environment = [("A".to_owned(), "1".to_owned())].into(),
        |service| {
            service.files = vec![wire::File { path: "a".to_owned(), contents: "b".to_owned(), mode: 0o644 }];
        },
        |service| {
            let source = Some(wire::program::Source::Path("/bin/other".to_owned()));
            service.run = Some(wire::service::Run::Program(wire::Program { source, url: String::new() }));
        },
    ];
    for (number, change) in others.into_iter().enumerate() {
        let mut changed = service("server");
        change(&mut changed);
        assert_ne!(digest(&changed, &render_inputs()), plain, "{number}");
    }
}

/// An update that changes this value would restart each running service, also without a change of its declaration.
#[test]
fn digest_of_a_declaration_that_asks_for_nothing_is_that_of_earlier_releases() {
    let server = only(&service("server"), &render_inputs());
    let text = br#"[["path","/bin/server",""],[],{},[],"root"]"#;
    assert_eq!(server.digest().unwrap(), hex::encode(digest::digest(&digest::SHA256, text)));
}

#[test]
fn digest_changes_only_with_the_facts_a_service_names() {
    let other = RenderInputs { curators: Some(BTreeSet::from(["10.0.0.2:1".to_owned()])), ..render_inputs() };
    let mut server = service("server");
    assert_eq!(only(&server, &render_inputs()), only(&server, &other));
    server.arguments = vec!["{{cluster.curators}}".to_owned()];
    assert_ne!(only(&server, &render_inputs()).digest(), only(&server, &other).digest());
    let revision = |text: &str, revision| {
        let mut server = service("server");
        server.arguments = vec![text.to_owned()];
        let wanted = desired_services(&declared(revision, vec![server]), &render_inputs())
            .into_values()
            .next()
            .unwrap();
        wanted.digest().unwrap().to_owned()
    };
    assert_eq!(revision("x", 1), revision("x", 2), "another revision that says the same");
    assert_ne!(revision("{{role.revision}}", 1), revision("{{role.revision}}", 2));
}
