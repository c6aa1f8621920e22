//! Has all keys and certificates here that the components of this node need, and renews them in time.
//!
//! What is on the disk is told first, so that after a reboot components start without a curator. What is missing, or is of
//! another generation than the curator's, or over by half, is asked for; that fails and is tried again without anything
//! that runs being touched. When a role is gone and nothing of it runs any more, its keys are removed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::curator::clock::Clock;
use crate::curator::pki::Validity;
use crate::model::kubernetes::bundle::Duty;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::kubernetes_client::KubernetesClient;
use crate::roleserver::child::keep::Places;
use crate::roleserver::cluster::etcd::pem;
use crate::roleserver::cluster::facts::{Connection, Facts};
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::components::id;
use crate::roleserver::cluster::kubernetes::material::{
    CLIENTS, FRONT_PROXY, Material, Need, Note, SERVERS, SIGNING_KEY, TOKENS, certificates, name, needs,
    pause,
};
use crate::roleserver::cluster::kubernetes::setup::Setup;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::roleserver::durable::{self, Durability};
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::value::Value;

/// How often it is looked whether what a role left runs no more.
const LOOK: Duration = Duration::from_secs(2);

/// What there is for each role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Materials {
    /// For the control plane.
    pub controller: Option<Material>,
    /// For workloads.
    pub worker: Option<Material>,
}

impl Materials {
    /// What there is for this role.
    #[must_use]
    pub const fn of(&self, duty: Duty) -> Option<&Material> {
        match duty {
            Duty::Controller => self.controller.as_ref(),
            Duty::Worker => self.worker.as_ref(),
        }
    }

    const fn of_mut(&mut self, duty: Duty) -> &mut Option<Material> {
        match duty {
            Duty::Controller => &mut self.controller,
            Duty::Worker => &mut self.worker,
        }
    }
}

/// The runnable; `output` is what there is.
#[must_use]
pub fn certificates_of(
    (files, places): (Files, Arc<Places>),
    facts: Facts,
    clock: Clock,
    startup: Value<Startup>,
    output: Value<Materials>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock, places) = (files.clone(), facts.clone(), clock.clone(), places.clone());
        let (mut startups, output) = (startup.watch(), output.clone());
        async move {
            let scope = starting.scope().clone();
            let mut now = scope.until_cancelled(startups.next()).await?;
            let mut starting = Some(starting);
            let mut healthy = None;
            let mut all = Materials::default();
            loop {
                let mut sleep = None;
                for duty in [Duty::Controller, Duty::Worker] {
                    let directory = files.kubernetes().join(name(duty));
                    let part = match duty {
                        Duty::Controller => &now.controller,
                        Duty::Worker => &now.worker,
                    };
                    *all.of_mut(duty) = read(&directory).await?;
                    if *part == Part::Off(None) {
                        if directory.exists() && removed(&directory, duty, &places).await? {
                            *all.of_mut(duty) = None;
                        } else if directory.exists() {
                            sleep = Some(LOOK);
                        }
                    }
                }
                tell(&output, &all);
                if let Some(setup) = &now.setup {
                    let parts = [(Duty::Controller, &now.controller), (Duty::Worker, &now.worker)];
                    for (duty, _) in
                        parts.into_iter().filter(|(_, part)| matches!(part, Part::On | Part::Held(_)))
                    {
                        let directory = files.kubernetes().join(name(duty));
                        let doing = Doing { duty, directory: &directory, setup, clock: &clock };
                        doing.bring(&facts, &scope).await?;
                        *all.of_mut(duty) = read(&directory).await?;
                        let validities =
                            certificates(duty).iter().filter_map(|(name, _)| valid(&directory, name));
                        let next = pause(validities, clock.now());
                        sleep = Some(sleep.map_or(next, |other: Duration| other.min(next)));
                    }
                    tell(&output, &all);
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.healthy());
                }
                let _ = &healthy;
                let due = async {
                    match sleep {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = startups.next() => now = next,
                    () = due => {}
                }
            }
        }
    })
}

fn tell(output: &Value<Materials>, all: &Materials) {
    if output.latest().as_ref() != Some(all) {
        output.set(all.clone());
    }
}

async fn read(directory: &Path) -> Result<Option<Material>, Stop> {
    let directory = directory.to_owned();
    Ok(tokio::task::spawn_blocking(move || Material::read(&directory)).await?)
}

/// Removes what a role left, once nothing of it runs; gives whether it did.
async fn removed(directory: &Path, duty: Duty, places: &Arc<Places>) -> Result<bool, Stop> {
    let (directory, places) = (directory.to_owned(), places.clone());
    let removing = move || {
        let role = format!("{}_", id(duty, "").role);
        if places.recorded().iter().any(|child| child.starts_with(&role)) {
            return Ok(false);
        }
        std::fs::remove_dir_all(&directory)?;
        tracing::info!(path = %directory.display(), "keys and certificates of a role that is gone are removed");
        Ok::<_, std::io::Error>(true)
    };
    Ok(tokio::task::spawn_blocking(removing).await??)
}

/// The validity of a certificate that is there and fits its key.
fn valid(directory: &Path, name: &str) -> Option<Validity> {
    use rustls::pki_types::pem::PemObject as _;
    let certificate =
        rustls::pki_types::CertificateDer::from_pem_file(directory.join(format!("{name}.crt"))).ok()?;
    let key = key(directory, name).ok()??;
    let (_, read) = X509Certificate::from_der(&certificate).ok()?;
    (read.public_key().raw == key.subject_public_key_info()).then(|| Validity::read(&certificate))?
}

/// A key that is there.
fn key(directory: &Path, name: &str) -> std::io::Result<Option<KeyPair>> {
    match std::fs::read_to_string(directory.join(format!("{name}.key"))) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => Ok(KeyPair::from_pem(&read?).ok()),
    }
}

/// What is being brought here, for one role.
struct Doing<'d> {
    duty: Duty,
    directory: &'d Path,
    setup: &'d Setup,
    clock: &'d Clock,
}

impl Doing<'_> {
    /// Has all of it here, whole and of the generation that was said.
    async fn bring(&self, facts: &Facts, scope: &Scope) -> Result<(), Stop> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(self.directory)?;
        let mut note = Note::read(self.directory).unwrap_or_default();
        let generation = self.setup.generation();
        let needs = needs(self.duty, generation, &note, |name| valid(self.directory, name), self.clock.now());
        if needs.is_empty() && note.generation == generation {
            return Ok(());
        }
        self.write_authorities()?;
        if !needs.is_empty() {
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            for need in needs {
                scope.until_cancelled(self.ask(&connection, need, &mut note)).await??;
                note.write(self.directory)?;
            }
        }
        note.generation = generation;
        note.write(self.directory)?;
        tracing::info!(
            role = name(self.duty),
            generation,
            "keys and certificates of Kubernetes are as they should be"
        );
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        let path = self.directory.join(name);
        // What is the same is not written again: who watches it would look in vain.
        if std::fs::read_to_string(&path).is_ok_and(|there| there == text) {
            return Ok(());
        }
        durable::replace(&path, text.as_bytes(), Durability::Durable)
    }

    fn write_authorities(&self) -> std::io::Result<()> {
        let all = |label: &str, ders: &[Vec<u8>]| ders.iter().map(|der| pem(label, der)).collect::<String>();
        let trusted = |which| all("CERTIFICATE", self.setup.trusted(which));
        self.write(SERVERS, &trusted(wire::KubernetesKeys::Servers))?;
        self.write(CLIENTS, &trusted(wire::KubernetesKeys::Clients))?;
        if self.duty == Duty::Controller {
            self.write(FRONT_PROXY, &trusted(wire::KubernetesKeys::FrontProxy))?;
            self.write(TOKENS, &all("PUBLIC KEY", self.setup.service_account_keys()))?;
        }
        Ok(())
    }

    async fn ask(&self, connection: &Connection, need: Need, note: &mut Note) -> Result<(), Stop> {
        let mut kubernetes = KubernetesClient::new(connection.curators.channel());
        let generation = self.setup.generation();
        let of_before = |what: &str, of: u64| {
            Stop::because(format!("{what} was answered of generation {of}, and {generation} is in force"))
        };
        match need {
            Need::SigningKey => {
                let asked = kubernetes.get_signing_key(wire::GetSigningKeyRequest {}).await;
                let answer =
                    asked.map_err(|status| refused("the key that signs tokens", &status))?.into_inner();
                if answer.generation < generation {
                    return Err(of_before("the key that signs tokens", answer.generation));
                }
                self.write(SIGNING_KEY, &pem("PRIVATE KEY", &answer.private_key))?;
                note.signing_key = answer.generation;
            }
            Need::Certificate(name, component) => {
                let what = format!("the certificate {name}");
                let key = if let Some(key) = key(self.directory, name)? {
                    key
                } else {
                    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
                    self.write(&format!("{name}.key"), &pem("PRIVATE KEY", &key.serialize_der()))?;
                    key
                };
                let request = wire::IssueKubernetesCertificateRequest {
                    component: component.into(),
                    public_key: key.subject_public_key_info(),
                };
                let asked = kubernetes.issue_certificate(request).await;
                let answer = asked.map_err(|status| refused(&what, &status))?.into_inner();
                if answer.generation < generation {
                    return Err(of_before(&what, answer.generation));
                }
                self.write(&format!("{name}.crt"), &pem("CERTIFICATE", &answer.certificate))?;
                note.certificates.insert(name.to_owned(), answer.generation);
            }
        }
        Ok(())
    }
}

fn refused(what: &str, status: &tonic::Status) -> Stop {
    Stop::because(format!("this node did not get {what} of Kubernetes: {}", status.message()))
}
