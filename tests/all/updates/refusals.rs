//! Releases that a machine refuses, each from the order to what the machine reports, to the timeline, the audit and the
//! issue.
//!
//! The machine has pinned two keys before the present one. The first one is lost, and an enrolment by the order of an admin
//! replaced it. The second one signed the list that names the third one, and is rotated out. A release has proved itself
//! that raised the lowest accepted version.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use shepherd::bmdb::fleet::artefact::upload::SignedUpload;
use shepherd::bmdb::orders::order::request_digest;
use shepherd::model::signed_artefact::signing_configuration::SigningConfiguration;
use shepherd::model::signed_artefact::signing_key::SigningKey;
use shepherd::model::signed_artefact::signing_trust::KeyRotation;
use shepherd::proto::agent::v1::EnrollRequest;
use shepherd::roleserver::signing_store::SigningStore;
use shepherd::roleserver::update::files::UpdateFiles;

use super::{Fleet, signed};
use crate::harness::aloud::TestResult;
use crate::harness::line::{Line, Quality};
use crate::harness::minisign::{Signer, release_comment};

/// The key and the comment of the signature that a release is sent with.
type Sent<'a> = Option<(&'a Signer, String)>;

/// Another file that gets the name of a release after that was verified.
struct Swap {
    files: UpdateFiles,
    sha256: String,
    other: PathBuf,
    candidate: PathBuf,
}

impl Swap {
    /// The trial is recorded after the release was verified, and before it begins.
    fn is_on_trial(&self) -> bool {
        self.files.read_trial().is_some_and(|trial| trial.sha256 == self.sha256)
    }

    fn rename(&self) -> std::io::Result<()> {
        std::fs::rename(&self.other, &self.candidate)
    }
}

/// The swap that is due; `None` as soon as it is made.
#[derive(Clone, Default)]
struct PendingSwap(Arc<Mutex<Option<Swap>>>);

impl PendingSwap {
    fn set(&self, swap: Swap) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(swap);
    }

    /// Makes the swap if its release is on trial.
    fn make(&self) {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.as_ref().is_some_and(|swap| swap.is_on_trial() && swap.rename().is_ok()) {
            *pending = None;
        }
    }

    fn is_made(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

/// A machine with the third key, on which version 1.4.0 has proved itself, and nothing below 1.3.0 is accepted.
struct Scene {
    fleet: Fleet,
    lost: Signer,
    former: Signer,
    present: Signer,
    thief: Signer,
    swap: PendingSwap,
}

impl Scene {
    async fn start() -> Result<Self> {
        let (lost, former, present, thief) = (Signer::new()?, Signer::new()?, Signer::new()?, Signer::new()?);
        let list = present.public_file()?;
        let comment =
            "shepherd kind=keys name=signing-keys version=1.0.0 architecture=any minimum-version=1.0.0";
        let rotation = KeyRotation::parse(&list, &former.sign(list.as_bytes(), comment)?);
        let signing = SigningConfiguration::parse(Some(&list), vec![rotation.map_err(anyhow::Error::msg)?]);
        let signing = signing.map_err(anyhow::Error::msg)?;
        // A release on trial has to connect before it can prove itself, so a swap is made in between.
        let swap = PendingSwap::default();
        let pending = swap.clone();
        let line = Line::watched(0, Quality::PERFECT, move || pending.make()).await?;
        let pinned = vec![lost.public_key()?];
        let fleet = Fleet::start_with("updates_refusals", 1, signing, pinned, Some(line)).await?;
        let scene = Self { fleet, lost, former, present, thief, swap };
        scene.replace_lost_key().await?;
        let key = SigningKey::parse(&scene.present.public_key()?).map_err(anyhow::Error::msg)?;
        let (state, expected) = (scene.fleet.machines[0].1.state(), [key.id().to_string()]);
        scene
            .fleet
            .until("the rotation is followed", async || {
                Ok(SigningStore::open(state.clone()).key_ids() == expected)
            })
            .await?;
        scene.prove("proven", b"2").await?;
        Ok(scene)
    }

    /// Enrols the machine again, as the takeover does that an admin ordered for a lost key.
    async fn replace_lost_key(&self) -> Result<()> {
        let host = self.fleet.machines[0].1.clone();
        let kept = host.state().read_enrolment()?.context("it is not enrolled")?;
        let request = EnrollRequest {
            machine_id: kept.machine_id.to_string(),
            endpoints: self.fleet.listener.server.endpoints.clone(),
            ca_certificates: self.fleet.listener.server.current_ca_certificates(),
            lane: "access".to_owned(),
            fence: kept.access_fence(),
            bmdb_id: kept.bmdb_id.to_string(),
            heartbeat_interval_seconds: 1,
            session_id: String::new(),
            shepherd_time_ms: 0,
            signing_keys: vec![self.former.public_key()?],
            key_rotations: Vec::new(),
            replace_signing_keys: true,
            require_signed_declarations: false,
        };
        tokio::task::spawn_blocking(move || host.enroll(&request)).await??;
        Ok(())
    }

    /// A release that runs.
    fn program(&self, more: &[u8]) -> Result<Vec<u8>> {
        Ok([&std::fs::read(&self.fleet.machines[0].1.program)?[..], more].concat())
    }

    /// Rolls out a release that the present key signed, until it has proved itself.
    async fn prove(&self, name: &str, more: &[u8]) -> Result<()> {
        let release = self.program(more)?;
        let signature = signed(&self.present, &release, &release_comment("1.4.0", "1.3.0"))?;
        self.fleet.add_signed(name, &release, Some(signature)).await?;
        let id = self.fleet.roll_out(name, 1).await?;
        self.fleet
            .until("a signed release runs", async || Ok(self.fleet.update(&id).await?.outcome.is_some()))
            .await?;
        assert_eq!(self.fleet.update(&id).await?.format_counts(), "done 1", "{name}");
        assert_eq!(self.fleet.programs()?, [hex::encode(request_digest(&release))], "{name}");
        Ok(())
    }

    /// Orders a release that is stored already, and requires that it is refused for this reason.
    async fn refuse(&self, name: &str, release: &[u8], key: Option<&Signer>, text: &str) -> Result<()> {
        let (fleet, before) = (&self.fleet, self.fleet.programs()?);
        let id = fleet.roll_out(name, 1).await?;
        fleet.until(name, async || Ok(fleet.update(&id).await?.outcome.is_some())).await?;
        let update = fleet.update(&id).await?;
        assert_eq!(update.format_counts(), "failed 1", "{name}: {update:?}");
        let message = update.machines[0].message.clone().context("no message")?;
        assert!(message.starts_with("the release was refused: "), "{name}: {message}");
        assert!(message.contains(text), "{name}: {message}");
        assert_eq!(fleet.programs()?, before, "{name}: another program is started from now on");

        let issues = fleet.refused_releases().await?;
        let expected = "it refused the release that was ordered last: ";
        assert!(issues.len() == 1 && issues[0].contains(expected), "{name}: {issues:?}");
        assert!(issues[0].contains(text), "{name}: {issues:?}");

        let machine = fleet.machines[0].0.0;
        let timeline = "SELECT event, detail FROM history WHERE machine_id = $1 AND event LIKE 'Release%'
                        ORDER BY at DESC LIMIT 1";
        let (event, detail): (String, String) =
            sqlx::query_as(timeline).bind(machine).fetch_one(&fleet.pool).await?;
        assert_eq!(event, "ReleaseFailed", "{name}: {detail}");
        assert!(detail.contains(text) && detail.contains(&id), "{name}: {detail}");

        // Who added the file, with which signature, and who ordered it.
        let sha256 = hex::encode(request_digest(release));
        let audit = "SELECT actor, reason, after->>'update', after->>'signing_key_id' FROM audit
                     WHERE outcome = 'changed' AND after->>'sha256' = $1 ORDER BY at";
        let rows: Vec<(String, String, Option<String>, Option<String>)> =
            sqlx::query_as(audit).bind(&sha256).fetch_all(&fleet.pool).await?;
        let key = key.map(|key| SigningKey::parse(&key.public_key()?).map_err(anyhow::Error::msg));
        let key = key.transpose()?.map(|key| key.id().to_string());
        let kim = || "kim".to_owned();
        let expected =
            [(kim(), "a release".to_owned(), None, key), (kim(), "a test".to_owned(), Some(id), None)];
        assert_eq!(rows, expected, "{name}");
        Ok(())
    }

    /// Gives the name of a release to another file, after the release was verified and before it can prove itself.
    fn swap(&self, sha256: String) -> Result<()> {
        let host = &self.fleet.machines[0].1;
        let (candidate, other) =
            (host.program.with_extension("candidate"), host.program.with_extension("other"));
        std::fs::write(&other, "#!/bin/sh\nexec sleep 1000\n")?;
        std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755))?;
        let files = UpdateFiles::in_state_directory(&host.path());
        self.swap.set(Swap { files, sha256, other, candidate });
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_refused_release_is_reported_audited_and_an_issue() -> TestResult {
    let scene = Scene::start().await?;
    let comment = release_comment("1.5.0", "1.3.0");
    let unknown = "which is not one of the pinned keys";
    let cases: [(&str, Sent<'_>, &str); 5] = [
        ("unsigned", None, "it is not signed"),
        ("wrong key", Some((&scene.thief, comment.clone())), unknown),
        ("lost key", Some((&scene.lost, comment.clone())), unknown),
        ("rotated-out key", Some((&scene.former, comment.clone())), unknown),
        (
            "rolled back",
            Some((&scene.present, release_comment("1.2.9", "1.0.0"))),
            "its version is 1.2.9, and 1.3.0 is the lowest that is accepted",
        ),
    ];
    // No byte of these is fetched.
    for (name, signature, text) in cases {
        let of_file = |(key, comment): &(&Signer, String)| signed(key, name.as_bytes(), comment);
        let upload: Option<SignedUpload> = signature.as_ref().map(of_file).transpose()?;
        scene.fleet.add_signed(name, name.as_bytes(), upload).await?;
        scene.refuse(name, name.as_bytes(), signature.map(|(key, _)| key), text).await?;
    }

    // The shepherd refuses a truncated release with the signature of the whole one. A thief of the database stores it.
    let (whole, half) = (b"the whole release", b"the whole");
    let signature = signed(&scene.present, whole, &comment)?;
    let stored = signature.signature.as_str().to_owned();
    let refused = scene.fleet.add_signed("truncated", half, Some(signature)).await.err().context("half")?;
    assert!(refused.to_string().contains("it was not added: its signature is not valid"), "{refused}");
    scene.fleet.add("truncated", half).await?;
    sqlx::query("UPDATE artefact SET signature = $2 WHERE sha256 = $1")
        .bind(request_digest(half).as_slice())
        .bind(stored)
        .execute(&scene.fleet.pool)
        .await?;
    scene.refuse("truncated", half, None, "its signature is not valid").await?;

    let release = scene.program(b"3")?;
    let signature = signed(&scene.present, &release, &comment)?;
    scene.fleet.add_signed("swapped", &release, Some(signature)).await?;
    scene.swap(hex::encode(request_digest(&release)))?;
    let text =
        "is not what was verified, because another file got its name, and the former release runs again";
    scene.refuse("swapped", &release, Some(&scene.present), text).await?;
    assert!(scene.swap.is_made(), "no other file got the name of the release");

    scene.prove("right", b"4").await?;
    assert!(scene.fleet.refused_releases().await?.is_empty(), "it is over");
    Ok(scene.fleet.stop().await?)
}
