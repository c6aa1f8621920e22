//! `shepherdctl artefacts`: a file is uploaded through the API and directly into the database, and is stored once.

use anyhow::Context as _;
use serde_json::json;
use shepherd::model::access::AccessRole;
use shepherd::model::artefact::PIECE_BYTES;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::harness::aloud::TestResult;

fn digest(bytes: &[u8]) -> String {
    hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_is_brought_whole_and_goes_on_where_it_was_cut_off() -> TestResult {
    let api = Api::start("api_artefacts").await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let piece = usize::try_from(PIECE_BYTES)?;
    // Bytes that could be decoded as very many empty fields are not decoded as such.
    let empty = [10_u8, 0].into_iter().cycle().take(2 * piece);
    let bytes: Vec<u8> = empty.chain((0..=250).cycle().take(piece + 11)).collect();
    let (file, sha256) = (kim.home.path().join("server-1.4"), digest(&bytes));
    std::fs::write(&file, &bytes)?;
    let file = file.to_str().context("text")?;
    let add = ["artefacts", "add", file, "--reason", "the new front"];

    let dry = kim.ask(&[&add[..], &["--dry-run"]].concat())?;
    assert!(dry.contains("without --dry-run: the artefact server-1.4 is added once it is uploaded"), "{dry}");
    assert_eq!(api.count("SELECT count(*) FROM artefact").await?, 0, "a dry run brings nothing");

    // An earlier upload was begun and interrupted.
    let deployer = api.key(AccessRole::Deployer, &[], None).await?;
    let begin = json!({ "sha256": sha256, "size": bytes.len() });
    let begun = api.call(Some(&deployer.token), "Artefacts/BeginUpload", begin.clone()).await?.ok()?;
    assert_eq!(begun["missingPieces"].as_array().map(Vec::len), Some(4), "{begun}");
    let encoded =
        base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &bytes[piece..2 * piece]);
    let put = json!({ "sha256": sha256, "number": 1, "piece": { "bytes": encoded } });
    api.call(Some(&deployer.token), "Artefacts/PutPiece", put).await?.ok()?;
    let begun = api.call(Some(&deployer.token), "Artefacts/BeginUpload", begin).await?.ok()?;
    assert_eq!(begun["missingPieces"], json!(["0", "2", "3"]));
    let listed = kim.ask(&["get", "artefacts"])?;
    assert!(listed.contains("1 of 4 pieces"), "{listed}");

    let output = kim.ask(&add)?;
    assert!(
        output.starts_with(&format!("the artefact server-1.4 is added, {} bytes", bytes.len())),
        "{output}"
    );
    assert_eq!(output.lines().nth(1), Some(sha256.as_str()));
    let kept: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT bytes FROM artefact_chunk ORDER BY number").fetch_all(&api.pool).await?;
    assert_eq!(digest(&kept.concat()), sha256);

    // The same file again changes nothing; another name renames it; another file of that name is another artefact.
    let again = kim.direct(&add)?;
    assert!(again.contains("exists already; nothing was changed"), "{again}");
    let renamed = kim.direct(&[&add[..], &["--name", "front"]].concat())?;
    assert!(renamed.contains("gets this name in place of server-1.4"), "{renamed}");
    std::fs::write(file, "another")?;
    kim.direct(&[&add[..], &["--name", "front"]].concat())?;
    let refused = kim.ask(&["artefacts", "delete", "front", "--reason", "which?"]);
    let refused = refused.err().context("one of two was removed")?.to_string();
    assert!(refused.contains("is 2 artefacts"), "{refused}");
    kim.ask(&["artefacts", "delete", &sha256[..12], "--reason", "it is old"])?;
    let listed = kim.json(&["get", "artefacts"])?;
    assert_eq!(listed["artefacts"][0]["sha256"], digest(b"another"));
    assert_eq!(listed["artefacts"].as_array().map(Vec::len), Some(1));
    assert_eq!(api.count("SELECT count(*) FROM artefact_chunk").await?, 1);
    assert_eq!(
        api.count("SELECT count(*) FROM audit WHERE rpc LIKE '%Artefacts/Add' AND outcome = 'changed'")
            .await?,
        4,
        "the dry run, and what was changed"
    );

    for (arguments, part) in [
        (vec!["artefacts", "add", "/nowhere", "--reason", "r"], "cannot read /nowhere"),
        (vec!["artefacts", "add", "/", "--name", "n", "--reason", "r"], "/ is not a regular file"),
        (vec!["artefacts", "add", "/dev/null", "--reason", "r"], "is not a regular file"),
        (vec!["artefacts", "delete", "nobody", "--reason", "r"], "get artefacts lists them"),
    ] {
        let refused = kim.ask(&arguments).err().with_context(|| format!("{arguments:?}"))?.to_string();
        assert!(refused.contains(part), "{refused}");
    }
    let operator = api.key(AccessRole::Operator, &[], None).await?;
    let begin = json!({ "sha256": sha256, "size": 1 });
    let refused = api.call(Some(&operator.token), "Artefacts/BeginUpload", begin).await?;
    assert_eq!(refused.code, 403, "{refused:?}");
    Ok(api.stop().await?)
}
