//! Signed releases on a machine: it runs only what a pinned key signed, for this purpose and in a version that is not too
//! old. Keys are pinned once, and rotate by lists that a pinned key signed.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::process::program_digest;
use shepherd::roleserver::update::files::UpdateFiles;

use super::callback::Callback;
use super::{Machine, request, wait_for};
use crate::harness::aloud::TestResult;
use crate::harness::minisign::{Signer, release_comment};

/// A shepherd that sends keys and rotations, and orders releases.
struct SigningShepherd {
    callback: Callback,
    answer: Arc<Mutex<wire::HeartbeatResponse>>,
}

impl SigningShepherd {
    fn start() -> Result<Self> {
        let answer = Arc::<Mutex<wire::HeartbeatResponse>>::default();
        let next = answer.clone();
        let callback = Callback::start(move |request| {
            let next = next.lock().map_or_else(|_| wire::HeartbeatResponse::default(), |next| next.clone());
            Ok(wire::HeartbeatResponse {
                hardware_report_requested: request.hardware_report.is_none(),
                ..next
            })
        })?;
        Ok(Self { callback, answer })
    }

    fn change(&self, change: impl FnOnce(&mut wire::HeartbeatResponse)) -> Result<()> {
        let mut answer = self.answer.lock().map_err(|_| anyhow!("poisoned"))?;
        change(&mut answer);
        Ok(())
    }

    fn newest_report(&self) -> Option<wire::ReleaseReport> {
        let heartbeats = self.callback.heartbeats();
        heartbeats.into_iter().rev().find_map(|observations| observations.request.release_report)
    }

    fn send_order(&self, generation: i64, sha256: &[u8], signature: &str, is_unsigned: bool) -> Result<()> {
        let order = wire::ReleaseOrder {
            generation,
            sha256: sha256.to_vec(),
            deadline_seconds: 120,
            signature: signature.to_owned(),
            is_unsigned,
        };
        self.change(|answer| answer.release_order = Some(order))
    }

    /// Orders a release, and returns the report of its end.
    fn order(
        &self,
        machine: &Machine,
        generation: i64,
        sha256: &[u8],
        signature: &str,
    ) -> Result<wire::ReleaseReport> {
        self.send_order(generation, sha256, signature, signature.is_empty())?;
        wait_for("the end of an order", || {
            Ok(self.newest_report().filter(|report| report.generation == generation))
        })
        .with_context(|| std::fs::read_to_string(machine.state().log_path()).unwrap_or_default())
    }

    /// Waits until the machine reports so many pinned keys.
    fn until_pinned(&self, count: usize) -> Result<Vec<String>> {
        wait_for("the pinned keys", || {
            let ids = self.newest_report().map(|report| report.pinned_key_ids);
            Ok(ids.filter(|ids| ids.len() == count))
        })
    }
}

fn with_more(program: &Path, more: &str) -> Result<Vec<u8>> {
    Ok([&std::fs::read(program)?[..], more.as_bytes()].concat())
}

#[test]
fn only_a_release_that_a_pinned_key_signed_for_this_purpose_runs() -> TestResult {
    let (first, spare, thief) = (Signer::new()?, Signer::new()?, Signer::new()?);
    let shepherd = SigningShepherd::start()?;
    // A thief of the database sends another key. The machine has pinned those of its enrolment.
    let keys = vec![thief.public_key()?];
    shepherd.change(|answer| answer.signing_keys = keys)?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![first.public_key()?, spare.public_key()?],
        ..request(&shepherd.callback, 1)
    })?;
    shepherd.until_pinned(2)?;
    let (former, process) = (program_digest(&machine.program)?, machine.agent()?);

    let release = with_more(&machine.program, "2")?;
    let half = release[..release.len() / 2].to_vec();
    let comment = release_comment("1.4.0", "1.3.0");
    let by_first = first.sign(&release, &comment)?;
    let (whole, other, half) = (
        shepherd.callback.serve(release.clone())?,
        shepherd.callback.serve(with_more(&machine.program, "another")?)?,
        shepherd.callback.serve(half)?,
    );
    let by_thief = thief.sign(&release, &comment)?;
    let of_kind = first.sign(&release, &comment.replace("kind=release", "kind=bundle"))?;
    let of_name = first.sign(&release, &comment.replace("name=roleserver", "name=shepherd"))?;
    let of_architecture = first.sign(&release, &comment.replace(std::env::consts::ARCH, "sparc"))?;
    let lacking = first.sign(&release, &comment.replace(" minimum-version=1.3.0", ""))?;
    let changed = by_first.replace("version=1.4.0", "version=9.4.0");
    let cases: [(&str, &[u8], &str, &str); 10] = [
        ("unsigned", &whole, "", "it is not signed"),
        ("signed by a stranger", &whole, &by_thief, "which is not one of the pinned keys"),
        ("another kind", &whole, &of_kind, "its signature is for kind bundle, and release is expected"),
        (
            "another program",
            &whole,
            &of_name,
            "its signature is for name shepherd, and roleserver is expected",
        ),
        ("another architecture", &whole, &of_architecture, "its signature is for architecture sparc"),
        ("lacks a field", &whole, &lacking, "lacks the field minimum-version"),
        ("no signature at all", &whole, "trust me", "the signature is no file that minisign -S wrote"),
        ("another comment", &whole, &changed, "its signature is not valid"),
        ("another file", &other, &by_first, "its signature is not valid"),
        ("truncated", &half, &by_first, "its signature is not valid"),
    ];
    for ((what, sha256, signature, text), generation) in cases.into_iter().zip(1..) {
        let report = shepherd.order(&machine, generation, sha256, signature)?;
        assert!(report.error.contains("the release was refused: "), "{what}: {report:?}");
        assert!(report.error.contains(text), "{what}: {report:?}");
        assert_eq!(program_digest(&machine.program)?, former, "{what}");
        assert!(!machine.program.with_extension("candidate").exists(), "{what}");
    }

    // The spare key signs as well as the first one.
    let report = shepherd.order(&machine, 11, &whole, &spare.sign(&release, &comment)?)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &whole));
    assert_eq!(machine.agent()?.instance, process.instance, "it is the same process");
    // It has proved itself, so an older release is refused, and the lowest version is not.
    let former = with_more(&machine.program, "3")?;
    let sha256 = shepherd.callback.serve(former.clone())?;
    let too_old = first.sign(&former, &release_comment("1.2.9", "1.0.0"))?;
    let report = shepherd.order(&machine, 12, &sha256, &too_old)?;
    assert!(
        report.error.contains("its version is 1.2.9, and 1.3.0 is the lowest that is accepted"),
        "an older release: {report:?}"
    );
    let lowest = first.sign(&former, &release_comment("1.3.0", "1.0.0"))?;
    let report = shepherd.order(&machine, 13, &sha256, &lowest)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));
    Ok(())
}

#[test]
fn machine_without_keys_pins_the_first_ones_and_follows_a_signed_rotation() -> TestResult {
    let (first, second) = (Signer::new()?, Signer::new()?);
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    // As a shepherd of a release before this one enrols it.
    machine.enroll(&request(&shepherd.callback, 1))?;
    shepherd.until_pinned(0)?;
    let keys = vec![first.public_key()?];
    shepherd.change(|answer| answer.signing_keys = keys)?;
    let before = shepherd.until_pinned(1)?;

    let list = second.public_file()?;
    let rotation = |signer: &Signer| -> Result<wire::KeyRotation> {
        let comment =
            "shepherd kind=keys name=signing-keys version=1.0.0 architecture=any minimum-version=1.0.0";
        Ok(wire::KeyRotation { list: list.clone(), signature: signer.sign(list.as_bytes(), comment)? })
    };
    // The new key cannot appoint itself, and a takeover with it changes nothing.
    let (own, signed) = (rotation(&second)?, rotation(&first)?);
    let keys = vec![second.public_key()?];
    shepherd.change(|answer| (answer.signing_keys, answer.key_rotations) = (keys, vec![own]))?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![second.public_key()?],
        ..request(&shepherd.callback, 2)
    })?;
    let release = with_more(&machine.program, "2")?;
    let sha256 = shepherd.callback.serve(release.clone())?;
    let by_second = second.sign(&release, &release_comment("1.0.0", "1.0.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &by_second)?;
    assert!(report.error.contains("which is not one of the pinned keys"), "{report:?}");
    assert_eq!(report.pinned_key_ids, before);

    shepherd.change(|answer| answer.key_rotations = vec![signed])?;
    wait_for("the rotation", || {
        Ok(shepherd.newest_report().filter(|report| report.pinned_key_ids != before))
    })?;
    let by_first = first.sign(&release, &release_comment("1.0.0", "1.0.0"))?;
    let report = shepherd.order(&machine, 2, &sha256, &by_first)?;
    assert!(report.error.contains("which is not one of the pinned keys"), "it is rotated out: {report:?}");
    let report = shepherd.order(&machine, 3, &sha256, &by_second)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));
    Ok(())
}

#[test]
fn required_signatures_of_declarations_stay_pinned_after_an_order_replaces_the_keys() -> TestResult {
    let signer = Signer::new()?;
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&request(&shepherd.callback, 1))?;
    shepherd.until_pinned(0)?;
    let requires = || {
        let stored = machine.state().read_signing_trust()?;
        Ok::<_, anyhow::Error>(stored.is_some_and(|trust| trust.requires_signed_declarations))
    };
    assert!(!requires()?);
    let keys = vec![signer.public_key()?];
    let offer = keys.clone();
    shepherd.change(|answer| (answer.signing_keys, answer.require_signed_declarations) = (offer, true))?;
    wait_for("the requirement", || Ok(requires()?.then_some(())))?;

    // A shepherd without the flag takes nothing back.
    shepherd.change(|answer| answer.require_signed_declarations = false)?;
    let enrolling =
        |fence| wire::EnrollRequest { signing_keys: keys.clone(), ..request(&shepherd.callback, fence) };
    machine.enroll(&enrolling(2))?;
    assert!(requires()?);
    let new = Signer::new()?.public_key()?;
    let replacing = wire::EnrollRequest { replace_signing_keys: true, ..enrolling(3) };
    machine.enroll(&wire::EnrollRequest { signing_keys: vec![new], ..replacing })?;
    assert!(requires()?, "the order for lost keys does not end it");
    Ok(())
}

#[test]
fn enrolment_pins_that_declarations_must_be_signed() -> TestResult {
    let signer = Signer::new()?;
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![signer.public_key()?],
        require_signed_declarations: true,
        ..request(&shepherd.callback, 1)
    })?;
    let stored = machine.state().read_signing_trust()?.context("no trust is stored")?;
    assert!(stored.requires_signed_declarations);
    Ok(())
}

/// The lowest version that the first key's releases have raised stays.
#[test]
fn lost_keys_are_replaced_by_an_enrolment_that_an_admin_ordered() -> TestResult {
    let (lost, new) = (Signer::new()?, Signer::new()?);
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    let enrolling = |fence, signer: &Signer| -> Result<wire::EnrollRequest> {
        Ok(wire::EnrollRequest {
            signing_keys: vec![signer.public_key()?],
            ..request(&shepherd.callback, fence)
        })
    };
    machine.enroll(&enrolling(1, &lost)?)?;
    let before = shepherd.until_pinned(1)?;
    let running = std::fs::read(&machine.program)?;
    let sha256 = hex::decode(program_digest(&machine.program)?)?;
    let own = lost.sign(&running, &release_comment("1.4.0", "1.3.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &own)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));

    // A shepherd that has only the new key, with heartbeats and with a takeover that nobody ordered for this.
    let keys = vec![new.public_key()?];
    shepherd.change(|answer| answer.signing_keys = keys)?;
    machine.enroll(&enrolling(2, &new)?)?;
    let release = with_more(&machine.program, "2")?;
    let sha256 = shepherd.callback.serve(release.clone())?;
    let by_new = new.sign(&release, &release_comment("1.4.0", "1.4.0"))?;
    let report = shepherd.order(&machine, 2, &sha256, &by_new)?;
    assert!(
        report.error.contains("which is not one of the pinned keys"),
        "the keys were replaced: {report:?}"
    );

    machine.enroll(&wire::EnrollRequest { replace_signing_keys: true, ..enrolling(3, &new)? })?;
    wait_for("the new key", || {
        Ok(shepherd
            .newest_report()
            .filter(|report| report.pinned_key_ids.len() == 1 && report.pinned_key_ids != before))
    })?;
    let by_lost = lost.sign(&release, &release_comment("1.4.0", "1.4.0"))?;
    let report = shepherd.order(&machine, 3, &sha256, &by_lost)?;
    assert!(report.error.contains("which is not one of the pinned keys"), "the lost key: {report:?}");
    let too_old = new.sign(&release, &release_comment("1.2.9", "1.0.0"))?;
    let report = shepherd.order(&machine, 4, &sha256, &too_old)?;
    assert!(report.error.contains("1.3.0 is the lowest that is accepted"), "an older release: {report:?}");
    let report = shepherd.order(&machine, 5, &sha256, &by_new)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));
    Ok(())
}

/// The release is verified as an open file, and that file is executed. What gets its name afterwards is never run, and never
/// becomes the program that is started from then on.
#[test]
fn file_that_gets_the_name_of_a_verified_release_never_runs() -> TestResult {
    let signer = Signer::new()?;
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![signer.public_key()?],
        ..request(&shepherd.callback, 1)
    })?;
    shepherd.until_pinned(1)?;
    let former = program_digest(&machine.program)?;
    let place = tempfile::tempdir()?;
    let mark = place.path().join("mark");
    let (candidate, other) =
        (machine.program.with_extension("candidate"), machine.program.with_extension("other"));
    std::fs::write(&other, format!("#!/bin/sh\necho >{}\nexec sleep 1000\n", mark.display()))?;
    std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o755))?;
    let files = UpdateFiles::in_state_directory(&machine.path());
    // The trial is recorded after the release was verified, and before it begins.
    let swap = std::thread::spawn(move || -> Result<()> {
        let end = Instant::now() + Duration::from_mins(1);
        while files.read_trial().is_none() {
            ensure!(Instant::now() < end, "no release is on trial");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(std::fs::rename(other, candidate)?)
    });

    let release = with_more(&machine.program, "2")?;
    let sha256 = shepherd.callback.serve(release.clone())?;
    let signature = signer.sign(&release, &release_comment("1.4.0", "1.3.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &signature)?;
    swap.join().map_err(|_| anyhow!("panicked"))??;
    assert!(!mark.exists(), "the other file was executed: {report:?}");
    let text = "candidate is not what was verified, because another file got its name, and the former release runs again";
    assert!(report.error.starts_with("the release was refused: "), "it is not what was verified: {report:?}");
    assert!(report.error.ends_with(text), "it has the name of what was verified: {report:?}");
    assert_eq!((hex::encode(&report.sha256), program_digest(&machine.program)?), (former.clone(), former));
    Ok(())
}

#[test]
fn machine_that_is_enrolled_after_a_rotation_applies_no_earlier_one() -> TestResult {
    let (former, newest, spare) = (Signer::new()?, Signer::new()?, Signer::new()?);
    let rotation = |first: &Signer, version: &str| -> Result<wire::KeyRotation> {
        let list = first.public_file()? + &spare.public_file()?;
        let comment = format!(
            "shepherd kind=keys name=signing-keys version={version} architecture=any minimum-version=1.0.0"
        );
        Ok(wire::KeyRotation { signature: spare.sign(list.as_bytes(), &comment)?, list })
    };
    let rotations = vec![rotation(&former, "1.0.0")?, rotation(&newest, "2.0.0")?];
    let shepherd = SigningShepherd::start()?;
    // This shepherd has only the list before the newest. The spare key signed it, and is still pinned.
    let stale = vec![rotations[0].clone()];
    shepherd.change(|answer| answer.key_rotations = stale)?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![newest.public_key()?, spare.public_key()?],
        key_rotations: rotations,
        ..request(&shepherd.callback, 1)
    })?;
    shepherd.until_pinned(2)?;
    let release = with_more(&machine.program, "2")?;
    let sha256 = shepherd.callback.serve(release.clone())?;
    let by_former = former.sign(&release, &release_comment("1.0.0", "1.0.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &by_former)?;
    assert!(report.error.contains("which is not one of the pinned keys"), "it is rotated out: {report:?}");
    Ok(())
}

#[test]
fn order_of_an_earlier_shepherd_waits_for_its_signature() -> TestResult {
    let signer = Signer::new()?;
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![signer.public_key()?],
        ..request(&shepherd.callback, 1)
    })?;
    shepherd.until_pinned(1)?;
    let release = with_more(&machine.program, "2")?;
    let sha256 = shepherd.callback.serve(release.clone())?;
    // A shepherd of a release before signed releases leaves both fields out.
    shepherd.send_order(1, &sha256, "", false)?;
    wait_for("the order", || {
        let log = std::fs::read_to_string(machine.state().log_path()).unwrap_or_default();
        let is_waiting = log.contains("came without its signature");
        let has_ended = shepherd.newest_report().is_some_and(|report| report.generation == 1);
        Ok((is_waiting || has_ended).then_some(()))
    })?;
    let signature = signer.sign(&release, &release_comment("1.4.0", "1.3.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &signature)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256), "the order had ended");
    Ok(())
}

#[test]
fn release_that_runs_already_raises_the_lowest_version_by_its_own_signature() -> TestResult {
    let signer = Signer::new()?;
    let shepherd = SigningShepherd::start()?;
    let machine = Machine::with_own_program()?;
    machine.enroll(&wire::EnrollRequest {
        signing_keys: vec![signer.public_key()?],
        ..request(&shepherd.callback, 1)
    })?;
    shepherd.until_pinned(1)?;
    let running = std::fs::read(&machine.program)?;
    let sha256 = hex::decode(program_digest(&machine.program)?)?;
    // The signature of another file is none of this program, also if it permits more.
    let of_another = signer.sign(b"another", &release_comment("9.0.0", "9.0.0"))?;
    let report = shepherd.order(&machine, 1, &sha256, &of_another)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));
    let own = signer.sign(&running, &release_comment("1.4.0", "1.3.0"))?;
    let report = shepherd.order(&machine, 2, &sha256, &own)?;
    assert_eq!((report.error.as_str(), &report.sha256), ("", &sha256));

    let former = with_more(&machine.program, "3")?;
    let sha256 = shepherd.callback.serve(former.clone())?;
    let too_old = signer.sign(&former, &release_comment("1.2.9", "1.0.0"))?;
    let report = shepherd.order(&machine, 3, &sha256, &too_old)?;
    assert!(
        report.error.contains("its version is 1.2.9, and 1.3.0 is the lowest that is accepted"),
        "an older release: {report:?}"
    );
    Ok(())
}
