//! Support bundles: through the API and straight from the database, from a database that contains a secret where an
//! operator should not have written one.

use std::collections::BTreeMap;
use std::fs::{File, metadata};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use flate2::read::GzDecoder;
use serde_json::Value;
use shepherd::model::ids::MachineId;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::harness::aloud::TestResult;
use crate::harness::callback::provided;

/// The files of an archive.
fn unpacked(path: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(GzDecoder::new(File::open(path)?)).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.strip_prefix("shepherd-debug")?.to_string_lossy().into_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text)?;
        files.insert(path, text);
    }
    Ok(files)
}

fn parsed(files: &BTreeMap<String, String>, path: &str) -> Result<Value> {
    let text = files.get(path).with_context(|| format!("no {path} in {:?}", files.keys()))?;
    Ok(serde_json::from_str(text)?)
}

/// Texts as people and programs write them, with secrets in them.
const WRITTEN: [&str; 16] = [
    "its BMC refuses password=hunter2",
    "PGPASSWORD=hunter2",
    "BMC_PASSWORD=hunter2",
    "client_secret=hunter2",
    "access_token=hunter2",
    "secret_key=hunter2",
    "password='hunter2'",
    "password: \"hunter2\"",
    "{\"password\":\"hunter2\"}",
    "tool --password hunter2",
    "ipmitool -P hunter2",
    "curl -u kim:hunter2",
    "postgres://kim:at@slash/hunter2@db/bmdb",
    "https://hunter2@git.example",
    "https://s3/x?X-Amz-Signature=hunter2",
    "Authorization: Bearer hunter2hunter2",
];

/// One machine waits for a person, another one is healthy.
async fn fleet(api: &Api) -> Result<[MachineId; 2]> {
    let machines = [provided(&api.pool).await?, provided(&api.pool).await?];
    let given_up = "INSERT INTO machine_needs_human (machine_id, since, reason)
                    VALUES ($1, clock_timestamp(), $2)";
    sqlx::query(given_up).bind(machines[0].0).bind(WRITTEN.join(" - ")).execute(&api.pool).await?;
    Ok(machines)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundle_has_everything_but_secrets_whichever_source_builds_it() -> TestResult {
    let api = Api::start("api_bundle").await?;
    let [troubled, well] = fleet(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let id = well.to_string();
    let reason = "for shepherd_0199f3a2_c2VjcmV0c2VjcmV0, see postgres://kim:hunter2@db/bmdb";
    kim.ask(&["hold", &id, "--reason", reason])?;
    kim.ask(&["label", &id, "bmc_password=hunter2", "row=7"])?;

    let (reported, direct) = (kim.home.path().join("reported.tar.gz"), kim.home.path().join("direct.tar.gz"));
    let output = kim.ask(&[
        "debug",
        "bundle",
        "--machine",
        &id,
        "--output-file",
        reported.to_str().context("a path")?,
    ])?;
    assert!(output.contains("holds 19 files"), "{output}");
    kim.direct(&["debug", "bundle", "--machine", &id, "--output-file", direct.to_str().context("a path")?])?;
    assert_eq!(metadata(&reported)?.permissions().mode() & 0o777, 0o600);
    let (reports, direct) = (unpacked(&reported)?, unpacked(&direct)?);
    assert_eq!(reports.keys().collect::<Vec<_>>(), direct.keys().collect::<Vec<_>>());
    for (path, text) in reports.iter().chain(&direct) {
        assert!(!text.contains("hunter2") && !text.contains("c2VjcmV0"), "{path}: {text}");
        assert!(path == "README.txt" || serde_json::from_str::<Value>(text).is_ok(), "{path}: {text}");
    }
    // The purpose of a bundle: nothing is missing that is no secret.
    for machine in [troubled, well] {
        let why = parsed(&reports, &format!("machines/{machine}/why.json"))?;
        assert_eq!(why["name"]["machine"], machine.to_string());
    }
    let why = parsed(&reports, &format!("machines/{well}/why.json"))?.to_string();
    assert!(why.contains("for shepherd_***, see postgres://kim:***@db/bmdb"), "{why}");
    assert_eq!(parsed(&reports, "machines.json")?["machines"].as_array().context("a list")?.len(), 2);
    assert!(parsed(&reports, "about.json")?["failures"].as_object().context("an object")?.is_empty());
    assert!(
        parsed(&reports, "about.json")?["backend"].as_str().context("a text")?.starts_with("the API at ")
    );
    assert_eq!(parsed(&direct, "about.json")?["backend"], "the database");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundle_overwrites_nothing_and_names_what_it_could_not_have() -> TestResult {
    let api = Api::start("api_bundle_in_part").await?;
    fleet(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let path = kim.home.path().join("bundle.tar.gz");
    let file = path.to_str().context("a path")?;
    let output = kim.direct(&["debug", "bundle", "--machine", "nobody", "--output-file", file])?;
    assert!(output.contains("without `why nobody`: "), "{output}");
    let about = parsed(&unpacked(&path)?, "about.json")?;
    let failed = about["failures"].as_object().context("an object")?;
    assert_eq!(failed.len(), 3, "{failed:?}");

    let before = std::fs::read(&path)?;
    let refused =
        kim.direct(&["debug", "bundle", "--output-file", file]).expect_err("it is there already").to_string();
    assert!(refused.contains("name another file with --output-file"), "{refused}");
    assert_eq!(std::fs::read(&path)?, before);
    Ok(())
}
