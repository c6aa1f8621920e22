//! Roles that give root on nodes, declared with the programs that people use: `shepherdctl` and `minisign`.

use std::sync::Arc;

use anyhow::Context as _;
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;

use crate::api::Api;
use crate::api::command_line::Operator;
use crate::api::orders::insert_cluster;
use crate::harness::aloud::TestResult;
use crate::harness::minisign::Signer;

const ROLE: &str = "
role = \"web\"
[[service]]
name = \"server\"
program = \"/usr/bin/perl\"
user = \"root\"
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_alone_declares_no_root_where_the_shepherd_has_keys() -> TestResult {
    let (signer, thief) = (Signer::new()?, Signer::new()?);
    let signing = SigningConfiguration::parse(Some(&signer.public_file()?), Vec::new());
    let signing = Arc::new(signing.map_err(anyhow::Error::msg)?);
    let api = Api::start_with("api_signed_roles", |settings| settings.signing = signing).await?;
    insert_cluster(&api).await?;
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    kim.direct(&["tokens", "bootstrap", "--save-context", "home"])?;
    let path =
        |name: &str| Ok::<_, anyhow::Error>(kim.home.path().join(name).to_str().context("text")?.to_owned());
    let (file, encoded, signature) = (path("web.toml")?, path("web.role")?, path("web.role.minisig")?);
    std::fs::write(&file, ROLE)?;
    let declare = |more: &[&str]| {
        kim.ask(&[&["cluster", "declare", "fra", file.as_str(), "--reason", "the front"][..], more].concat())
    };
    let refused = declare(&[]).err().context("a token alone is root")?.to_string();
    assert!(refused.contains("role web was not declared: server runs as root"), "{refused}");
    assert!(
        refused.contains("and it is not signed; write what to sign with --output-file FILE"),
        "{refused}"
    );

    let written = declare(&["--output-file", &encoded])?;
    assert!(written.contains("the role web was not declared: it is written to "), "{written}");
    let content = std::fs::read(&encoded)?;
    let comment = "shepherd kind=declaration name=web version=1.0.0 architecture=any minimum-version=1.0.0";
    for (what, signed, text) in [
        ("a thief", thief.sign(&content, comment)?, "which is not one of the pinned keys"),
        (
            "another role",
            signer.sign(&content, &comment.replace("=web", "=db"))?,
            "for name db, and web is expected",
        ),
        (
            "another kind",
            signer.sign(&content, &comment.replace("=declaration", "=bundle"))?,
            "for kind bundle, and declaration is expected",
        ),
        ("another file", signer.sign(b"another", comment)?, "its signature is not valid"),
        (
            "a comment that lacks a field",
            signer.sign(&content, &comment.replace(" version=1.0.0", ""))?,
            "lacks the field version",
        ),
    ] {
        std::fs::write(&signature, signed)?;
        let refused =
            declare(&["--signature", &signature]).err().with_context(|| format!("signed: {what}"))?;
        assert!(refused.to_string().contains(text), "{what}: {refused}");
        assert_eq!(api.count("SELECT count(*) FROM cluster_declaration").await?, 0, "{what}");
    }
    std::fs::write(&signature, signer.sign(&content, comment)?)?;
    // It is the signature of another declaration of this role.
    std::fs::write(&file, ROLE.replace("/usr/bin/perl", "/bin/sh"))?;
    let refused = declare(&["--signature", &signature]).err().context("another program")?.to_string();
    assert!(refused.contains("its signature is not valid"), "{refused}");
    std::fs::write(&file, ROLE)?;
    let declared = declare(&["--signature", &signature])?;
    assert!(declared.contains("declares web, signed with key "), "{declared}");
    let recorded =
        "SELECT count(*) FROM audit WHERE after->>'signed_comment' LIKE '%kind=declaration name=web%'";
    assert_eq!(api.count(recorded).await?, 1, "it is in the audit");
    Ok(api.stop().await?)
}
