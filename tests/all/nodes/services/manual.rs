//! The example of the manual, as it is there. Only what a host need not have is exchanged: the program of the cache, the
//! URL and the digest of the server, and the two ports.

use anyhow::{Context as _, Result};
use shepherd::cli::cluster::role_file::read_role_file;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::management_client::ManagementClient;

use super::programs::breaking_off;
use super::{ask, declare, founded, until_nothing_is_left, until_well};
use crate::harness::aloud::TestResult;
use crate::harness::port::reserved;
use crate::nodes::owner::patiently;

/// Listens at the address in its configuration and nowhere else, and answers there with what else the configuration has.
const SERVER: &str = r#"#!/usr/bin/perl
use IO::Socket::INET;
die "its arguments are wrong" if $ARGV[0] ne "--config";
open(my $file, "<", $ARGV[1]) or die "no configuration: $!";
my %is = map { /^(\w+) = (.*)$/ ? ($1, $2) : () } <$file>;
my $listener = IO::Socket::INET->new(LocalAddr => $is{bind}, LocalPort => PORT, Listen => 64, ReuseAddr => 1)
    or die "no port at $is{bind}: $@";
while (1) {
    my $client = $listener->accept or next;
    my $request = <$client>;
    while (defined(my $line = <$client>)) { last if $line =~ /^\r?$/ }
    my $text = "$is{location} $ENV{NODE}";
    print $client "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " . length($text) . "\r\n\r\n$text";
    close $client;
}
"#;

/// The first block of TOML of the manual.
fn example() -> Result<&'static str> {
    let (_, block) =
        include_str!("../../../../docs/nodes.md").split_once("```toml\n").context("no example")?;
    Ok(block.split_once("```").context("it has no end")?.0)
}

fn exchange(text: &str, from: &str, to: &str) -> Result<String> {
    anyhow::ensure!(text.contains(from), "the example has no {from} any more");
    Ok(text.replace(from, to))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn example_of_the_manual_is_healthy_where_its_server_listens() -> TestResult {
    let (owner, node) = founded().await?;
    let (cache, server) = (reserved()?.port().to_string(), reserved()?.port());
    let program = SERVER.replace("PORT", &server.to_string());
    let digest = hex::encode(ring::digest::digest(&ring::digest::SHA256, program.as_bytes()));
    let listens = format!(
        "use IO::Socket::INET; my $at = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => {cache}, Listen => 9, \
         ReuseAddr => 1) or die; while (1) {{ my $client = $at->accept; close $client if $client }}"
    );
    let mut text = example()?.to_owned();
    for (from, to) in [
        ("/usr/bin/memcached", "/usr/bin/perl".to_owned()),
        (r#"["-l", "127.0.0.1", "-p", "11211"]"#, format!(r#"["-e", "{listens}"]"#)),
        (r#""memcache""#, r#""nobody""#.to_owned()),
        ("{ tcp = 11211 }", format!("{{ tcp = {cache} }}")),
        ("http://10.0.0.2/server-1.4", breaking_off(program.leak().as_bytes())?),
        ("<SHA-256 of the program>", digest),
        ("port = 8080", format!("port = {server}")),
    ] {
        text = exchange(&text, from, &to)?;
    }
    let file = node.disk().join("web.toml");
    std::fs::write(&file, text)?;
    let role = read_role_file(&file).map_err(|error| anyhow::anyhow!("{error}"))?;

    let mut management = ManagementClient::new(owner.curators()?.channel());
    let set = [("location".to_owned(), "ams-1".to_owned())].into();
    let request = wire::UpdateLabelsRequest { node_id: node.id()?.to_string(), set, remove: Vec::new() };
    patiently(async || management.update_labels(request.clone()).await).await?;
    let declared = declare(&owner, "web", &role.to_wire().services).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "cache", declared).await?;
    until_well(&owner, &node, "server", declared).await?;
    assert_eq!(ask((node.address, server).into())?, format!("ams-1 {}", node.id()?));
    // Nothing answers at the address that was the only one to be tried.
    assert!(ask(([127, 0, 0, 1], server).into()).is_err());
    owner.roles(&node, &[], &["web"]).await?;
    until_nothing_is_left(&owner, &node).await?;
    Ok(())
}
