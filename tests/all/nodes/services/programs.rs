//! Programs that a node fetches before it runs them.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use anyhow::{Context as _, Result};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::service_status::Kind;

use super::{declare, founded, instance, script, until_nothing_is_left, until_status, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// Serves a file to every client, and breaks off after half of it if the request starts at its beginning.
pub(super) fn breaking_off(content: &'static [u8]) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/program", listener.local_addr()?);
    // Ends with the test process.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that disconnects has made no request.
            let _ = serve_part(stream, content);
        }
    });
    Ok(url)
}

fn serve_part(mut stream: TcpStream, content: &[u8]) -> Result<()> {
    let mut request = [0; 4000];
    let read = stream.read(&mut request)?;
    let text = String::from_utf8_lossy(&request[..read]).to_lowercase();
    let from =
        text.split_once("range: bytes=").and_then(|(_, rest)| rest.split_once('-')).context("no range")?;
    let (from, size): (usize, usize) = (from.0.parse()?, content.len());
    let to = if from == 0 { size / 2 } else { size };
    let length = size - from;
    write!(stream, "HTTP/1.1 206 Part\r\nContent-Range: bytes {from}-{}/{size}\r\n", size - 1)?;
    write!(stream, "Content-Length: {length}\r\n\r\n")?;
    Ok(stream.write_all(&content[from..to])?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_is_fetched_to_the_end_and_run_only_if_it_is_the_right_one() -> TestResult {
    const PROGRAM: &[u8] = b"#!/bin/sh\necho it runs as $(/usr/bin/id -u)\nwhile :; do /bin/sleep 1; done\n";
    let (owner, node) = founded().await?;
    let url = breaking_off(PROGRAM)?;
    let digest = hex::encode(ring::digest::digest(&ring::digest::SHA256, PROGRAM));
    let fetched = |name: &str, digest: &str, url: &str| {
        let source = Some(wire::program::Source::Artefact(digest.to_owned()));
        let run = wire::service::Run::Program(wire::Program { source, url: url.to_owned() });
        wire::Service {
            run: Some(run),
            user: "65533".to_owned(),
            arguments: Vec::new(),
            ..script(name, "", &[])
        }
    };
    let (other, nowhere) = ("ab".repeat(32), "cd".repeat(32));
    let services =
        [fetched("right", &digest, &url), fetched("wrong", &other, &url), fetched("absent", &nowhere, "")];
    let declared = declare(&owner, "made", &services).await?;
    owner.roles(&node, &["made"], &[]).await?;
    until_well(&owner, &node, "right", declared).await?;
    let log = node.places().log_path("made_right");
    until("it has spoken", async || {
        Ok(std::fs::read_to_string(&log).is_ok_and(|text| text == "it runs as 65533\n"))
    })
    .await?;
    for (name, part) in [("wrong", "serves another file"), ("absent", "its declaration has no URL")] {
        let waits = until_status(&owner, &node, name, |status| status.message.contains(part)).await?;
        assert_eq!(waits.kind(), Kind::Waiting);
    }
    let kept = || {
        let entries = std::fs::read_dir(node.disk().join("artefacts")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let runs = instance(&node, "made_right")?;

    // The same artefact from another URL changes nothing. Artefacts that nothing uses any more are removed.
    let moved = declare(
        &owner,
        "made",
        &services[..1]
            .iter()
            .cloned()
            .map(|service| {
                let source = Some(wire::program::Source::Artefact(digest.clone()));
                let url = "http://127.0.0.1:1/elsewhere".to_owned();
                wire::Service {
                    run: Some(wire::service::Run::Program(wire::Program { source, url })),
                    ..service
                }
            })
            .collect::<Vec<_>>(),
    )
    .await?;
    until_well(&owner, &node, "right", moved).await?;
    assert_eq!(instance(&node, "made_right")?, runs);
    until("only what is needed is kept", async || Ok(kept() == [digest.clone()]))
        .await
        .with_context(|| format!("{:?}", kept()))?;
    owner.roles(&node, &[], &["made"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    until("no artefact is kept", async || Ok(kept().is_empty())).await?;
    Ok(())
}
