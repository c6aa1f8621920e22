//! Architecture: which module may import which, where SQL may be, and sentences.
//!
//! The plan is a table of the rooms that are still modules of the root package. A room that is not in it fails the test
//! too, so its author must state here what it may know. Crates are not planned here: their dependencies are in their
//! `Cargo.toml`, and `crate_graph` requires reasons for them. Code in `#[cfg(test)]` obeys like any other. `lib.rs`,
//! which names every room, and the integration tests with their kit are exempt.

mod sentences;
mod statements;

use std::collections::BTreeSet;
use std::path::Path;

use crate::harness::aloud::TestResult;
use crate::harness::source;
use crate::workspace;

/// What each room may import besides itself, and the crates in [`OPEN`]:
/// `bin → {server, manager, cli} → {providers, takeover} → bmdb → model`.
const PLAN: &[(&str, &[&str])] = &[
    ("providers", &["bmdb", "model"]),
    // The manager calls the curators of clusters as their nodes do: through the channel that follows their leader.
    ("manager", &["providers", "takeover", "bmdb", "curator_client", "model"]),
    // The service as a whole: the one room that imports both the loops and the listeners, so that they do not import
    // each other. It starts the simulator as a process and takes its flags.
    ("service", &["server", "manager", "providers", "takeover", "bmdb", "model", "simulator", "transport"]),
    (
        "bin",
        &[
            "service",
            "server",
            "manager",
            "cli",
            "providers",
            "takeover",
            "bmdb",
            "model",
            "roleserver",
            "simulator",
        ],
    ),
];

/// Crates that every room may import.
const OPEN: &[&str] = &["backoff", "hardening", "proto", "trusted_file"];

#[test]
fn every_import_follows_the_plan() -> TestResult {
    let crates = crate_names()?;
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in source::files("src", "rs")? {
        let Some(room) = room_of(&path) else { continue };
        seen += 1;
        let text = source::read(&path)?;
        wrong.extend(
            against_the_plan(&room, &text, &crates)
                .into_iter()
                .map(|message| format!("{}: {message}", path.display())),
        );
    }
    assert!(seen > 5, "only {seen} source files were found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn an_import_against_the_plan_is_found_wherever_it_hides() -> TestResult {
    let crates = crate_names()?;
    for (room, text, expected) in [
        (
            "providers",
            "use crate::manager::runner::Runner;",
            "line 1: providers imports manager, and may import only bmdb, model",
        ),
        (
            "providers",
            "\nfn f() { crate::server::list() }",
            "line 2: providers imports server, and may import only bmdb, model",
        ),
        (
            "manager",
            "use crate::{model::ids, server::metrics};",
            "line 1: manager imports server, and may import only providers, takeover, bmdb, curator_client, model",
        ),
        (
            "manager",
            "use crate::{\n    model::{a, b},\n    cli,\n};",
            "line 1: manager imports cli, and may import only providers, takeover, bmdb, curator_client, model",
        ),
        (
            "manager",
            "pub(in crate::simulator) fn f() {}",
            "line 1: manager imports simulator, and may import only providers, takeover, bmdb, curator_client, model",
        ),
        (
            "providers",
            "#[cfg(test)]\nmod tests {\n    use crate::cli::tokens::Token;\n}",
            "line 3: providers imports cli, and may import only bmdb, model",
        ),
        (
            "providers",
            "use crate :: manager::Runner;",
            "line 1: providers imports manager, and may import only bmdb, model",
        ),
        (
            "providers",
            "use curator_client::pki;",
            "line 1: providers imports curator_client, and may import only bmdb, model",
        ),
        (
            "providers",
            "use supervisor::tree;",
            "line 1: providers imports supervisor, and may import only bmdb, model",
        ),
        (
            "bin",
            "use shepherd::kitchen::Sink;",
            "line 1: bin imports kitchen, which the plan in tests/all/architecture.rs does not know",
        ),
        (
            "kitchen",
            "",
            "the room kitchen is not in the plan in tests/all/architecture.rs: say there what it may import",
        ),
        (
            "providers",
            "use super::super::manager::Runner;",
            "line 1: `super::super` hides which room is meant; write `crate::…`",
        ),
        ("providers", "use crate::*;", "line 1: providers imports every room at once; name what is meant"),
    ] {
        assert_eq!(against_the_plan(room, text, &crates), [expected], "{room}: {text}");
    }
    Ok(())
}

#[test]
fn an_import_by_the_plan_is_no_fault() -> TestResult {
    let crates = crate_names()?;
    for (room, text) in [
        (
            "providers",
            "use crate::model::ids::MachineId; use crate::proto::agent; use crate::providers::list;",
        ),
        ("providers", "// use crate::manager\nlet text = \"crate::manager\"; pub(crate) fn f() {}"),
        ("manager", "use crate::{model::{ids, phase}, bmdb::{self, lease}, takeover};"),
        ("bin", "use shepherd::manager; use anyhow::crate_like::x;"),
        ("providers", "use super::ids; use my_crate::manager; use model::time::Timestamp;"),
        ("providers", "use backoff::ExponentialBackoff; use crate::backoff::jitter;"),
    ] {
        assert_eq!(against_the_plan(room, text, &crates), Vec::<String>::new(), "{room}: {text}");
    }
    Ok(())
}

/// `Cargo.toml` builds no tests for programs, so a test in a program would never run.
#[test]
fn programs_hold_no_tests() -> TestResult {
    let files = source::files("src/bin", "rs")?;
    assert_eq!(files.len(), 3, "{files:?}");
    for path in files {
        let text = source::read(&path)?;
        assert!(!text.contains("test]") && !text.contains("test("), "{} holds tests", path.display());
    }
    Ok(())
}

/// A verifier that accepts a certificate and forgets the signature of the handshake accepts everybody. It compiles, and
/// no test with honest peers fails.
#[test]
fn only_transport_implements_certificate_verifiers() -> TestResult {
    let mut implementors = Vec::new();
    for path in source::rust_files()? {
        let code = source::take_apart(&source::read(&path)?).code;
        if implements_verifier(&code) {
            implementors.push(path);
        }
    }
    assert_eq!(
        implementors,
        [Path::new("crates/transport/src/verifier.rs")],
        "write a check for its verifiers"
    );
    Ok(())
}

/// Whether the code implements a certificate verifier, or gives the trait a name under which it could.
fn implements_verifier(code: &str) -> bool {
    let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
    // Imported as `_`, the trait has no name, and only its methods can be called.
    let code = code.replace("CertVerifier as _", "");
    code.contains("CertVerifier for ") || code.contains("CertVerifier as ")
}

#[test]
fn verifier_is_found_however_it_is_written() {
    for (code, found) in [
        ("impl ServerCertVerifier for Any {", true),
        ("impl<T: Check>\n    ServerCertVerifier\n    for Any<T>", true),
        ("use rustls::client::danger::ServerCertVerifier as Verifier;", true),
        ("use rustls::client::danger::ServerCertVerifier as _;", false),
        ("fn verifier() -> Arc<dyn ServerCertVerifier> {", false),
        ("impl ServerCertificateCheck for Any {", false),
    ] {
        assert_eq!(implements_verifier(code), found, "{code}");
    }
}

/// `src/manager/updater.rs` and `src/manager.rs` are in `manager`, `src/lib.rs` in none.
fn room_of(path: &Path) -> Option<String> {
    let room = path.components().nth(1)?.as_os_str().to_str()?;
    let room = room.strip_suffix(".rs").unwrap_or(room);
    (room != "lib").then(|| room.to_owned())
}

/// The names of our crates, as `use` has them.
fn crate_names() -> anyhow::Result<BTreeSet<String>> {
    let packages = workspace::packages()?;
    let names = packages.iter().filter_map(|package| package.name.strip_prefix("shepherd-"));
    Ok(names.map(|name| name.replace('-', "_")).collect())
}

/// The imports of a room's code that the plan does not permit.
fn against_the_plan(room: &str, text: &str, crates: &BTreeSet<String>) -> Vec<String> {
    let Some((_, may)) = PLAN.iter().find(|(name, _)| *name == room) else {
        return vec![format!(
            "the room {room} is not in the plan in tests/all/architecture.rs: say there what it may import"
        )];
    };
    let mut wrong = Vec::new();
    let code = source::take_apart(text).code;
    let tokens = tokens(&code);
    for (at, (line, token)) in tokens.iter().enumerate() {
        let follows = |offset: usize| tokens.get(at + offset).map_or("", |(_, token)| token.as_str());
        if token == "super" && follows(1) == "::" && follows(2) == "super" {
            wrong.push(format!("line {line}: `super::super` hides which room is meant; write `crate::…`"));
        }
        let is_root = token == "crate" || (room == "bin" && token == "shepherd");
        let imports = if is_root && follows(1) == "::" {
            first_segments(&tokens[at + 2..])
        } else if token == "use" && crates.contains(follows(1)) {
            // One of our crates, by its own name.
            vec![follows(1).to_owned()]
        } else {
            continue;
        };
        for imported in imports {
            let fault = if imported == "*" {
                format!("{room} imports every room at once; name what is meant")
            } else if imported == room
                || OPEN.contains(&imported.as_str())
                || may.contains(&imported.as_str())
            {
                continue;
            } else if !PLAN.iter().any(|(name, _)| *name == imported) && !crates.contains(&imported) {
                format!(
                    "{room} imports {imported}, which the plan in tests/all/architecture.rs does not know"
                )
            } else {
                format!("{room} imports {imported}, and may import only {}", may.join(", "))
            };
            wrong.push(format!("line {line}: {fault}"));
        }
    }
    wrong
}

/// The names right after `crate::`: one name, or the first names of a group.
fn first_segments(tokens: &[(usize, String)]) -> Vec<String> {
    if tokens.first().is_none_or(|(_, token)| token != "{") {
        return tokens.first().map(|(_, token)| token.clone()).into_iter().collect();
    }
    let (mut depth, mut head, mut found) = (0_usize, false, Vec::new());
    for (_, token) in tokens {
        match token.as_str() {
            "{" => {
                depth += 1;
                head = depth == 1;
            }
            "}" => depth -= 1,
            "," => head = depth == 1,
            name if head => {
                found.push(name.to_owned());
                head = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}

/// Words, `::` and other single characters, each with its line.
fn tokens(code: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut line, mut in_word) = (1, false);
    for character in code.chars() {
        let word = character.is_alphanumeric() || character == '_';
        match found.last_mut() {
            Some((_, last)) if word && in_word => last.push(character),
            Some((_, last)) if character == ':' && last == ":" => last.push(':'),
            _ if character.is_whitespace() => line += usize::from(character == '\n'),
            _ => found.push((line, character.to_string())),
        }
        in_word = word;
    }
    found
}
