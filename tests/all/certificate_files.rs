//! Variants of certificate, key and CA file: `--check`, the start and a reload come to the same result.
//!
//! The endpoints are a host name and an address, and a certificate must be for both. A rejected start ends before the
//! database is opened. An accepted one gets as far as a database that does not answer.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow};
use futures::future::BoxFuture;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer,
    KeyPair, NameConstraints, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
};
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::metrics::Metrics;
use shepherd::model::ids::ProcessId;
use shepherd::server::tls::certificate_files::CertificateFiles;
use shepherd::server::tls::server_certificate::{RenewalClock, ServerCertificate};
use shepherd::service::configuration::ConfigurationFile;
use shepherd::service::failure::ExitFailure;
use shepherd::service::flags::parse_flags_without_environment;
use shepherd::service::listeners::start_listeners;
use shepherd::service::service_plan::plan_service;
use tokio_util::sync::CancellationToken;

use crate::file_flags::complete;
use crate::harness::aloud::TestResult;
use crate::harness::postgres::TestDatabase;
use crate::harness::program::{Place, ProgramOutput};

const NAMES: [&str; 2] = ["shepherd.example", "192.0.2.2"];
const DAY: Duration = Duration::from_hours(24);
/// Checks of a reload: one announces the CA, the next one serves the certificate.
const CHECKS: usize = 3;

type ParamsChange<'a> = &'a dyn Fn(&mut CertificateParams);

/// A certificate with its key.
struct Issued {
    key: KeyPair,
    params: CertificateParams,
    pem: String,
    der: Vec<u8>,
}

impl Issued {
    fn issuer(&self) -> Issuer<'_, &KeyPair> {
        Issuer::from_params(&self.params, &self.key)
    }

    fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }
}

fn params(common: &str, names: &[&str]) -> Result<CertificateParams> {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common);
    Ok(params)
}

/// Issues a certificate for a new key; without an issuer it is self-signed.
fn issue(params: CertificateParams, issuer: Option<&Issued>, key: KeyPair) -> Result<Issued> {
    let certificate = match issuer {
        Some(issuer) => params.signed_by(&key, &issuer.issuer())?,
        None => params.self_signed(&key)?,
    };
    Ok(Issued { pem: certificate.pem(), der: certificate.der().to_vec(), key, params })
}

fn authority(common: &str, issuer: Option<&Issued>) -> Result<Issued> {
    let mut params = params(common, &[])?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    issue(params, issuer, KeyPair::generate()?)
}

fn leaf(issuer: Option<&Issued>, change: impl FnOnce(&mut CertificateParams)) -> Result<Issued> {
    let mut params = params("callback", &NAMES)?;
    change(&mut params);
    issue(params, issuer, KeyPair::generate()?)
}

/// The three files, and a part of the reason for which they are rejected; `None` if they are accepted.
struct Variant {
    name: &'static str,
    certificate: Vec<u8>,
    key: Vec<u8>,
    ca: Option<Vec<u8>>,
    rejection: Option<&'static str>,
}

fn variant(
    name: &'static str,
    certificate: impl Into<Vec<u8>>,
    key: impl Into<Vec<u8>>,
    ca: Option<&[u8]>,
    rejection: Option<&'static str>,
) -> Variant {
    Variant { name, certificate: certificate.into(), key: key.into(), ca: ca.map(<[u8]>::to_vec), rejection }
}

fn accepted_variants(root: &Issued, middle: &Issued, stranger: &Issued) -> Result<Vec<Variant>> {
    let own = leaf(Some(middle), |_| ())?;
    let direct = leaf(Some(root), |_| ())?;
    let (r, m, key) = (&root.pem, &middle.pem, own.key_pem());
    let ca = Some(r.as_bytes());
    let alone = leaf(None, |_| ())?;
    let with = |algorithm| -> Result<Issued> {
        issue(params("algorithm", &NAMES)?, Some(middle), KeyPair::generate_for(algorithm)?)
    };
    let (p256, p384, ed25519) =
        (with(&PKCS_ECDSA_P256_SHA256)?, with(&PKCS_ECDSA_P384_SHA384)?, with(&PKCS_ED25519)?);
    let chain = format!("{}{m}{r}", own.pem);
    let both = format!("{}{r}", stranger.pem);
    Ok(vec![
        variant("chain with its root", chain.as_str(), key.as_str(), None, None),
        variant("chain and the root apart", format!("{}{m}", own.pem), key.as_str(), ca, None),
        variant("one of two CAs", format!("{}{m}", own.pem), key.as_str(), Some(both.as_bytes()), None),
        variant("mixed chain with the root apart", format!("{}{r}{m}", own.pem), key.as_str(), ca, None),
        variant("of the root itself", direct.pem.as_str(), direct.key_pem(), ca, None),
        variant("self-signed", alone.pem.as_str(), alone.key_pem(), None, None),
        variant("self-signed in DER", alone.der.clone(), alone.key_pem(), None, None),
        variant("CA in DER", direct.pem.as_str(), direct.key_pem(), Some(&root.der), None),
        variant("text around it", format!("issued for us\n{chain}\nthe end\n"), key.as_str(), None, None),
        variant("CRLF", chain.replace('\n', "\r\n"), key.replace('\n', "\r\n"), None, None),
        variant("certificate before the key", chain.as_str(), format!("{}{key}", own.pem), None, None),
        variant("P-256", format!("{}{m}", p256.pem), p256.key_pem(), ca, None),
        variant("P-384", format!("{}{m}", p384.pem), p384.key_pem(), ca, None),
        variant("Ed25519", format!("{}{m}", ed25519.pem), ed25519.key_pem(), ca, None),
    ])
}

/// Chains that no client accepts.
fn rejected_chains(root: &Issued, middle: &Issued, stranger: &Issued) -> Result<Vec<Variant>> {
    let now = SystemTime::now();
    let own = leaf(Some(middle), |_| ())?;
    let (r, m, key) = (&root.pem, &middle.pem, own.key_pem());
    let (ca, other_ca) = (Some(r.as_bytes()), Some(stranger.pem.as_bytes()));
    let as_ca = leaf(None, |params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained))?;
    let mut found = vec![
        variant("a CA as end entity", as_ca.pem.as_str(), as_ca.key_pem(), None, Some("is that of a CA")),
        variant("the root itself", r.as_str(), root.key_pem(), ca, Some("is that of a CA")),
        variant("mixed", format!("{}{r}{m}", own.pem), key.as_str(), None, Some("issued by certificate 3")),
        variant("reversed", format!("{r}{m}{}", own.pem), key.as_str(), None, Some("number 3 of the file")),
        variant(
            "other CA",
            format!("{}{m}", own.pem),
            key.as_str(),
            other_ca,
            Some("no CA certificate that"),
        ),
        variant("no intermediate", own.pem.as_str(), key.as_str(), ca, Some("one of \"CN=Intermediate\"")),
        variant(
            "in no trust store",
            format!("{}{m}", own.pem),
            key.as_str(),
            None,
            Some("trust store of this"),
        ),
    ];
    let mut add =
        |name, issuer: Option<&Issued>, part, change: &dyn Fn(&mut CertificateParams)| -> Result<()> {
            let made = leaf(issuer, change)?;
            let chain = issuer.map_or_else(String::new, |issuer| issuer.pem.clone());
            found.push(variant(name, made.pem.clone() + &chain, made.key_pem(), ca, Some(part)));
            Ok(())
        };
    let of = Some(middle);
    add("expired", of, "certificate 1 of its chain expired on", &|params| {
        params.not_after = (now - DAY).into();
    })?;
    add("not yet valid", of, "certificate 1 of its chain is not valid before", &|params| {
        params.not_before = (now + DAY).into();
    })?;
    let names = |names: &'static [&'static str]| {
        move |own: &mut CertificateParams| {
            if let Ok(other) = params("callback", names) {
                own.subject_alt_names = other.subject_alt_names;
            }
        }
    };
    add("other name", of, "it is for else.example and not for", &names(&["else.example"]))?;
    add("no address", of, "it is for shepherd.example and not for 192.0.2.2", &names(&["shepherd.example"]))?;
    add("no host name", of, "it is for 192.0.2.2 and not for shepherd.example", &names(&["192.0.2.2"]))?;
    add("common name alone", of, "no subject alternative name", &names(&[]))?;
    add("for clients", of, "issue it with serverAuth", &|params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    })?;

    let old = |params: &mut CertificateParams| params.not_after = (now - DAY).into();
    let young = |params: &mut CertificateParams| params.not_before = (now + DAY).into();
    let bounded = |params: &mut CertificateParams| {
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName("else.example".to_owned())],
            excluded_subtrees: Vec::new(),
        });
    };
    let no_ca = |params: &mut CertificateParams| params.is_ca = IsCa::ExplicitNoCa;
    let changes: [(&str, &str, ParamsChange<'_>); 4] = [
        ("expired intermediate", "certificate 2 of its chain expired on", &old),
        ("intermediate not yet valid", "certificate 2 of its chain is not valid before", &young),
        ("intermediate for other names", "", &bounded),
        ("intermediate that is no CA", "", &no_ca),
    ];
    for (name, part, change) in changes {
        let mut issuer = params("Changed", &[])?;
        issuer.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut issuer);
        let issuer = issue(issuer, Some(root), KeyPair::generate()?)?;
        add(name, Some(&issuer), part, &|_| ())?;
    }
    let namesake = authority("Root", None)?;
    add("a CA of the same name", Some(&namesake), "", &|_| ())?;
    Ok(found)
}

/// Files that have not what they must have.
fn rejected_files(root: &Issued, middle: &Issued) -> Result<Vec<Variant>> {
    let own = leaf(Some(middle), |_| ())?;
    let chain = format!("{}{}", own.pem, middle.pem);
    let (good, key, ca) = (chain.as_str(), own.key_pem(), Some(root.pem.as_bytes()));
    let half = |text: &str| text[..text.len() / 2].to_owned();
    let another = KeyPair::generate()?.serialize_pem();
    let block = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
    Ok(vec![
        variant("another key", good, another, ca, Some("the key belongs to another certificate")),
        variant("key of the intermediate", good, middle.key_pem(), ca, Some("number 2 of the file")),
        variant("certificate for the key", good, good, ca, Some("holds no private key")),
        variant("no key", good, "", ca, Some("holds no private key")),
        variant("half a key", good, half(&key), ca, Some("holds no private key")),
        variant("key for the certificate", key.as_str(), key.as_str(), ca, Some("holds no certificate")),
        variant("no certificate", "", key.as_str(), ca, Some("holds no certificate")),
        variant("text", "hello\n", key.as_str(), ca, Some("holds no certificate")),
        variant(
            "half a certificate",
            half(&own.pem),
            key.as_str(),
            ca,
            Some("its block 1 is no certificate"),
        ),
        variant("block of something else", block, key.as_str(), ca, Some("its block 1 is no certificate")),
        variant("CA without content", good, key.as_str(), Some(b""), Some("holds no certificate")),
        variant("CA that is text", good, key.as_str(), Some(b"hello\n"), Some("holds no certificate")),
        variant("key for a CA", good, key.as_str(), Some(key.as_bytes()), Some("holds no certificate")),
    ])
}

const MARK: &str = "\u{feff}";

/// What editors and other programs write around what is meant, and what must not change its meaning.
fn accepted_forms(root: &Issued, middle: &Issued) -> Result<Vec<Variant>> {
    let own = leaf(Some(middle), |_| ())?;
    let (chain, key, r) = (format!("{}{}", own.pem, middle.pem), own.key_pem(), &root.pem);
    let (good, ca) = (chain.as_str(), Some(r.as_bytes()));
    let marked_ca = format!("{MARK}{r}");
    let parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
    Ok(vec![
        variant("mark before the chain", format!("{MARK}{chain}"), key.as_str(), ca, None),
        variant("mark before the key", good, format!("{MARK}{key}"), ca, None),
        variant("mark before the CA", good, key.as_str(), Some(marked_ca.as_bytes()), None),
        variant("parameters before the key", good, format!("{parameters}{key}"), ca, None),
        variant("key before the chain", format!("{key}{chain}"), key.as_str(), ca, None),
    ])
}

/// Blocks and encodings that parsers of PEM pass over.
fn rejected_forms(root: &Issued, middle: &Issued) -> Result<Vec<Variant>> {
    let own = leaf(Some(middle), |_| ())?;
    let (m, r, key) = (&middle.pem, &root.pem, own.key_pem());
    let (chain, ca) = (format!("{}{m}", own.pem), Some(r.as_bytes()));
    let good = chain.as_str();
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let trusted = |pem: &str| pem.replace("CERTIFICATE", "TRUSTED CERTIFICATE");
    let another = KeyPair::generate()?.serialize_pem();
    let former = key.replace("-----\nM", "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nM");
    let trusted_too = format!("{r}{}", trusted(r));
    let damaged = format!("{r}{}", r.replacen("\nM", "\n!", 1));
    let list = format!("{r}-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n");
    let indented =
        format!("{}{}", own.pem, m.replace('\n', "\n  ").replacen("-----BEGIN", "  -----BEGIN", 1));
    let encrypted = key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
    Ok(vec![
        variant("chain in UTF-16", utf16(good), key.as_str(), ca, Some("it is UTF-16")),
        variant("key in UTF-16", good, utf16(&key), ca, Some("it is UTF-16")),
        variant("CA in UTF-16", good, key.as_str(), Some(&utf16(r)), Some("it is UTF-16")),
        variant("encrypted key", good, encrypted, ca, Some("its private key is encrypted")),
        variant("encrypted key of before", good, former, ca, Some("its private key is encrypted")),
        variant("two keys", good, format!("{key}{another}"), ca, Some("it has 2 private keys")),
        variant("the key twice", good, format!("{key}{key}"), ca, Some("it has 2 private keys")),
        variant(
            "trusted intermediate",
            own.pem.clone() + &trusted(m),
            key.as_str(),
            ca,
            Some("its block 2 is a"),
        ),
        variant(
            "trusted CA",
            good,
            key.as_str(),
            Some(trusted(r).as_bytes()),
            Some("its block 1 is a TRUSTED"),
        ),
        variant(
            "trusted CA beside one",
            good,
            key.as_str(),
            Some(trusted_too.as_bytes()),
            Some("its block 2 is a TRUSTED"),
        ),
        variant(
            "damaged CA beside one",
            good,
            key.as_str(),
            Some(damaged.as_bytes()),
            Some("its block 2 is no certificate"),
        ),
        variant("revocations", good, key.as_str(), Some(list.as_bytes()), Some("its block 2 is a X509 CRL")),
        variant("indented block", indented, key.as_str(), ca, Some("its block 2 is no certificate")),
    ])
}

fn write_files(directory: &Path, variant: &Variant) -> Result<CertificateFiles> {
    let write = |name: &str, content: &[u8]| -> Result<_> {
        let path = directory.join(name);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path)
    };
    Ok(CertificateFiles {
        certificate: write("certificate", &variant.certificate)?,
        key: write("key", &variant.key)?,
        ca_certificate: variant.ca.as_deref().map(|ca| write("ca", ca)).transpose()?,
    })
}

/// What the program prints as an error, `--check` first and then the start; empty if the files are accepted.
fn run_program(place: &Place, files: &CertificateFiles) -> Result<[String; 2]> {
    let list = place.write("devices.json", "[]")?;
    let mut flags = vec![
        "--provider=static".to_owned(),
        format!("--static_device_list_url=file://{}", list.display()),
        "--components=callback".to_owned(),
        "--agent_listen_address=127.0.0.1:0".to_owned(),
        format!("--agent_endpoint={}:8443,{}:8443", NAMES[0], NAMES[1]),
        format!("--agent_tls_certificate_path={}", files.certificate.display()),
        format!("--agent_tls_key_path={}", files.key.display()),
    ];
    if let Some(ca) = &files.ca_certificate {
        flags.push(format!("--agent_endpoint_ca_certificate_path={}", ca.display()));
    }
    let run = |own: &[&str]| place.run(flags.iter().map(String::as_str).chain(own.iter().copied()));
    let check = run(&["--check", "--bmdb_eat_my_data"])?;
    let start = run(&["--bmdb_url=postgres://user@127.0.0.1:1/bmdb"])?;
    // Log lines come before the error.
    let error = |output: ProgramOutput| {
        let last = output.stderr.lines().last().unwrap_or_default().to_owned();
        if output.code == Some(2) { last } else { String::new() }
    };
    Ok([error(check), error(start)])
}

/// Whether a server with a good certificate serves that of the files after some checks.
async fn is_served_after_reload(directory: &Path, good: &Variant, next: &Variant) -> Result<bool> {
    let files = write_files(directory, good)?;
    let names: Vec<String> = NAMES.map(str::to_owned).into();
    let server = ServerCertificate::from_files(files, names, SystemTime::now())?;
    let served = server.served.clone();
    let before = served.certificate().context("no certificate")?;
    write_files(directory, next)?;
    let stop = CancellationToken::new();
    let (checks, stopped) = (AtomicUsize::new(0), stop.clone());
    let sleep = move |_| -> BoxFuture<'static, ()> {
        if checks.fetch_add(1, Ordering::SeqCst) < CHECKS {
            return Box::pin(std::future::ready(()));
        }
        stopped.cancel();
        Box::pin(std::future::pending())
    };
    let clock = RenewalClock {
        check_interval: Duration::from_hours(1),
        sleep: Arc::new(sleep),
        now: Arc::new(SystemTime::now),
    };
    server.run_renewal(clock, stop).await;
    Ok(served.certificate().context("no certificate")? != before)
}

#[tokio::test]
async fn check_start_and_reload_agree_about_every_variant() -> TestResult {
    let place = Place::new()?;
    let root = authority("Root", None)?;
    let middle = authority("Intermediate", Some(&root))?;
    let stranger = authority("Stranger", None)?;
    let mut variants = accepted_variants(&root, &middle, &stranger)?;
    variants.extend(rejected_chains(&root, &middle, &stranger)?);
    variants.extend(rejected_files(&root, &middle)?);
    variants.extend(accepted_forms(&root, &middle)?);
    variants.extend(rejected_forms(&root, &middle)?);
    assert!(variants.len() >= 60, "{}", variants.len());
    let first = leaf(Some(&root), |_| ())?;
    for variant in &variants {
        let name = variant.name;
        let files = write_files(&place.path(""), variant)?;
        let [check, start] = run_program(&place, &files)?;
        assert_eq!(check, start, "{name}: the check and the start do not agree");
        match variant.rejection {
            None => assert_eq!(check, "", "{name}"),
            Some(part) => {
                assert!(check.contains(part) && !check.is_empty(), "{name} is not rejected: {check:?}");
            }
        }
        let good = Variant {
            name: "good",
            certificate: format!("{}{}", first.pem, root.pem).into(),
            key: first.key_pem().into(),
            ca: variant.ca.as_ref().map(|_| root.pem.clone().into()),
            rejection: None,
        };
        let is_served = is_served_after_reload(&place.path(""), &good, variant).await?;
        assert_eq!(is_served, variant.rejection.is_none(), "{name}: the reload does not agree");
    }
    Ok(())
}

/// A process without a callback server has an entry for the CA that it gives to agents.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_listener_publishes_why_its_certificate_is_refused() -> TestResult {
    let place = Place::new()?;
    let database = TestDatabase::create("certificate_refusals").await?;
    let bmdb = database.bmdb().await?;
    bmdb.migrate().await?;
    let (sessions, keeper) = Sessions::new(bmdb.clone(), ProcessId::generate(), Duration::from_secs(30));
    let keep = CancellationToken::new();
    let keeper = tokio::spawn(keeper.run(&keep)?);
    let flags = complete(&place)?;
    let failed = |failure: ExitFailure| anyhow!(failure.message);
    for (components, expected) in [("callback", 1), ("callback,api", 2), ("updater", 1), ("updater,api", 2)] {
        let mut arguments: Vec<OsString> = vec!["shepherd".into()];
        arguments.extend(flags.iter().map(|(name, value)| OsString::from(format!("--{name}={value}"))));
        arguments.push(format!("--components={components}").into());
        arguments.extend(["--bmdb_eat_my_data", "--api_listen_address=127.0.0.1:0"].map(OsString::from));
        let flags = parse_flags_without_environment(arguments)?.service;
        let plan = plan_service(flags, ConfigurationFile::default()).map_err(failed)?;
        let started = start_listeners(&plan, &bmdb, &sessions, None, Metrics::new()).await;
        let listeners = started.map_err(failed)?;
        let entries = listeners.certificate_refusals.len();
        listeners.stop().await;
        assert_eq!(entries, expected, "entries of {components}");
    }
    keep.cancel();
    keeper.await?;
    Ok(())
}
