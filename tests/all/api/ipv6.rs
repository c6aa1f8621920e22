//! A listener of the API at an IPv6 address: JSON, gRPC and `shepherdctl` reach it and verify its certificate.

use std::net::{Ipv6Addr, SocketAddr};

use anyhow::Context as _;
use serde_json::json;
use shepherd::cli::client::contexts::Contexts;
use shepherd::model::access::AccessRole;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_reach_an_ipv6_address_in_every_way() -> TestResult {
    let loopback = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    let api = Api::start_with("api_ipv6", |settings| settings.listen_address = loopback).await?;
    let server = api.server.local_addr.to_string();
    assert!(server.starts_with("[::1]:"), "{server}");
    let machine = provided(&api.pool).await?.to_string();
    let key = api.key(AccessRole::Viewer, &[], None).await?;
    let listed = api.call(Some(&key.token), "Machines/List", json!({})).await?.ok()?;
    assert_eq!(listed["machines"].as_array().context("a list")?.len(), 1, "{listed}");
    api.channel(None).await?;

    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let contexts = Contexts::read(&kim.home.path().join(".config/shepherd/contexts.toml"))?;
    let home = contexts.contexts.get("home").context("no context")?;
    assert_eq!(home.servers, [server]);
    assert!(kim.ask(&["get", "machines", "-o", "json"])?.contains(&machine));
    Ok(api.stop().await?)
}
