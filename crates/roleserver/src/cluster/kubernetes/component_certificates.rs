//! Issue and renew the keys and certificates of this node's components.
//!
//! What is on the disk is published first, so that components start without a curator after a reboot. Material that is
//! missing, of another generation than the curator's, or past half of its validity is requested. A failed request is
//! retried and does not affect running components. When the node has lost a role and none of its components is left,
//! the role's keys are removed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use curator_client::certificate::Validity;
use curator_client::clock::Clock;
use curator_client::status_text::describe_status;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::pem_blocks::encode_pem;
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::atomic_file::{self, Durability};
use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::components::service_id;
use crate::cluster::kubernetes::key_material::{
    CLIENT_CAS, FRONT_PROXY_CAS, KUBELET_CAS, KeyMaterial, MaterialRecord, MaterialRequest, SERVER_CAS,
    SIGNING_KEY, TOKEN_KEYS, certificate_names, missing_material, role_directory, time_until_renewal,
};
use crate::cluster::kubernetes::secrets_config::write_config;
use crate::cluster::kubernetes::setup::NodeSetup;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};
use crate::cluster::node_facts::{CuratorConnection, NodeFacts};

/// How often a role that the node has lost is checked for remaining components.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Key material of each role, as far as it is on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoleMaterials {
    /// Material of the controller role; `None` while it is incomplete.
    pub controller: Option<KeyMaterial>,
    /// Material of the worker role; `None` while it is incomplete.
    pub worker: Option<KeyMaterial>,
}

impl RoleMaterials {
    /// The material of this role.
    #[must_use]
    pub const fn for_duty(&self, duty: KubernetesDuty) -> Option<&KeyMaterial> {
        match duty {
            KubernetesDuty::Controller => self.controller.as_ref(),
            KubernetesDuty::Worker => self.worker.as_ref(),
        }
    }

    const fn for_duty_mut(&mut self, duty: KubernetesDuty) -> &mut Option<KeyMaterial> {
        match duty {
            KubernetesDuty::Controller => &mut self.controller,
            KubernetesDuty::Worker => &mut self.worker,
        }
    }
}

/// Makes the runnable that manages key material, and publishes it in `output`.
#[must_use]
pub fn manage_certificates(
    (files, children): (ClusterFiles, Arc<ChildContext>),
    facts: NodeFacts,
    clock: Clock,
    startup: WatchCell<KubernetesStartup>,
    output: WatchCell<RoleMaterials>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock, children) = (files.clone(), facts.clone(), clock.clone(), children.clone());
        let (mut startups, output) = (startup.watch(), output.clone());
        async move {
            let scope = starting.scope().clone();
            let mut now = scope.until_cancelled(startups.next()).await?;
            let mut keys = facts.secret_keys.watch();
            let mut starting = Some(starting);
            let mut healthy = None;
            let mut all = RoleMaterials::default();
            loop {
                let mut sleep = None;
                for duty in [KubernetesDuty::Controller, KubernetesDuty::Worker] {
                    let directory = files.kubernetes_directory().join(role_directory(duty));
                    let part = match duty {
                        KubernetesDuty::Controller => &now.controller,
                        KubernetesDuty::Worker => &now.worker,
                    };
                    if duty == KubernetesDuty::Controller && !matches!(part, RoleStartup::Off(_)) {
                        // Before the API server starts, and before it is restarted for another list.
                        write_secrets_config(&directory, &facts).await?;
                    }
                    *all.for_duty_mut(duty) = read_material(&directory).await?;
                    if *part == RoleStartup::Off(None) {
                        if directory.exists() && remove_unused(&directory, duty, &children).await? {
                            *all.for_duty_mut(duty) = None;
                        } else if directory.exists() {
                            sleep = Some(POLL_INTERVAL);
                        }
                    }
                }
                publish(&output, &all);
                if let Some(setup) = &now.setup {
                    let parts = [
                        (KubernetesDuty::Controller, &now.controller),
                        (KubernetesDuty::Worker, &now.worker),
                    ];
                    for (duty, _) in parts
                        .into_iter()
                        .filter(|(_, part)| matches!(part, RoleStartup::On | RoleStartup::Paused(_)))
                    {
                        let directory = files.kubernetes_directory().join(role_directory(duty));
                        let doing = CertificateIssuer { duty, directory: &directory, setup, clock: &clock };
                        doing.issue_missing(&facts, &scope).await?;
                        *all.for_duty_mut(duty) = read_material(&directory).await?;
                        let validities = certificate_names(duty)
                            .iter()
                            .filter_map(|(name, _)| read_validity(&directory, name));
                        let next = time_until_renewal(validities, clock.now());
                        sleep = Some(sleep.map_or(next, |other: Duration| other.min(next)));
                    }
                    publish(&output, &all);
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
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
                    _ = keys.next() => {}
                    () = due => {}
                }
            }
        }
    })
}

fn publish(output: &WatchCell<RoleMaterials>, all: &RoleMaterials) {
    if output.latest().as_ref() != Some(all) {
        output.set(all.clone());
    }
}

/// Writes the configuration by which the API server encrypts Secrets, if there are keys.
async fn write_secrets_config(directory: &Path, facts: &NodeFacts) -> Result<(), RunnableError> {
    let Some(order) = facts.secret_keys.latest() else { return Ok(()) };
    let directory = directory.to_owned();
    Ok(tokio::task::spawn_blocking(move || write_config(&directory, &order)).await??)
}

async fn read_material(directory: &Path) -> Result<Option<KeyMaterial>, RunnableError> {
    let directory = directory.to_owned();
    Ok(tokio::task::spawn_blocking(move || KeyMaterial::read(&directory)).await?)
}

/// Removes the material of a role unless one of its components is still recorded. Returns whether it did.
async fn remove_unused(
    directory: &Path,
    duty: KubernetesDuty,
    children: &Arc<ChildContext>,
) -> Result<bool, RunnableError> {
    let (directory, children) = (directory.to_owned(), children.clone());
    let removing = move || {
        let role = format!("{}_", service_id(duty, "").role);
        if children.recorded_names().iter().any(|child| child.starts_with(&role)) {
            return Ok(false);
        }
        std::fs::remove_dir_all(&directory)?;
        tracing::info!(path = %directory.display(), "the keys and certificates of a former role are removed");
        Ok::<_, std::io::Error>(true)
    };
    Ok(tokio::task::spawn_blocking(removing).await??)
}

/// The validity of a certificate; `None` if it is missing or does not match its key.
fn read_validity(directory: &Path, name: &str) -> Option<Validity> {
    use rustls::pki_types::pem::PemObject as _;
    let certificate =
        rustls::pki_types::CertificateDer::from_pem_file(directory.join(format!("{name}.crt"))).ok()?;
    let key = read_key(directory, name).ok()??;
    let (_, read) = X509Certificate::from_der(&certificate).ok()?;
    (read.public_key().raw == key.subject_public_key_info()).then(|| Validity::from_der(&certificate))?
}

/// The stored key of that name; `None` if it is missing or cannot be read as a key.
fn read_key(directory: &Path, name: &str) -> std::io::Result<Option<KeyPair>> {
    match std::fs::read_to_string(directory.join(format!("{name}.key"))) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => Ok(KeyPair::from_pem(&read?).ok()),
    }
}

/// Issues the material of one role.
struct CertificateIssuer<'d> {
    duty: KubernetesDuty,
    directory: &'d Path,
    setup: &'d NodeSetup,
    clock: &'d Clock,
}

impl CertificateIssuer<'_> {
    /// Issues everything that is missing, until all of it is of the generation in the setup.
    async fn issue_missing(&self, facts: &NodeFacts, scope: &Scope) -> Result<(), RunnableError> {
        use std::os::unix::fs::DirBuilderExt as _;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(self.directory)?;
        let mut note = MaterialRecord::read(self.directory).unwrap_or_default();
        let generation = self.setup.generation();
        let needs = missing_material(
            self.duty,
            generation,
            &note,
            |name| read_validity(self.directory, name),
            self.clock.now(),
        );
        if needs.is_empty() && note.generation == generation {
            return Ok(());
        }
        self.write_authorities()?;
        if !needs.is_empty() {
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            for need in needs {
                scope.until_cancelled(self.request_item(&connection, need, &mut note)).await??;
                note.write(self.directory)?;
            }
        }
        note.generation = generation;
        note.write(self.directory)?;
        tracing::info!(
            role = role_directory(self.duty),
            generation,
            "the keys and certificates of Kubernetes are up to date"
        );
        Ok(())
    }

    fn write_file(&self, name: &str, text: &str) -> std::io::Result<()> {
        let path = self.directory.join(name);
        // An unchanged file is not written again, so that components which watch it do not reload it.
        if std::fs::read_to_string(&path).is_ok_and(|there| there == text) {
            return Ok(());
        }
        atomic_file::replace_file(&path, text.as_bytes(), Durability::Durable)
    }

    fn remove_file(&self, name: &str) -> std::io::Result<()> {
        match std::fs::remove_file(self.directory.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn write_authorities(&self) -> std::io::Result<()> {
        let all =
            |label: &str, ders: &[Vec<u8>]| ders.iter().map(|der| encode_pem(label, der)).collect::<String>();
        let trusted = |which| all("CERTIFICATE", self.setup.trusted_certificates(which));
        self.write_file(SERVER_CAS, &trusted(wire::KubernetesKeys::Servers))?;
        self.write_file(CLIENT_CAS, &trusted(wire::KubernetesKeys::Clients))?;
        if self.duty == KubernetesDuty::Controller {
            let kubelets = trusted(wire::KubernetesKeys::Kubelets);
            if kubelets.is_empty() {
                self.remove_file(KUBELET_CAS)?;
            } else {
                self.write_file(KUBELET_CAS, &kubelets)?;
            }
            self.write_file(FRONT_PROXY_CAS, &trusted(wire::KubernetesKeys::FrontProxy))?;
            self.write_file(TOKEN_KEYS, &all("PUBLIC KEY", self.setup.service_account_keys()))?;
        }
        Ok(())
    }

    async fn request_item(
        &self,
        connection: &CuratorConnection,
        need: MaterialRequest,
        note: &mut MaterialRecord,
    ) -> Result<(), RunnableError> {
        let mut kubernetes = KubernetesClient::new(connection.curators.channel());
        let generation = self.setup.generation();
        let of_before = |what: &str, of: u64| {
            RunnableError::msg(format!(
                "{what} is of generation {of}, but generation {generation} is current"
            ))
        };
        match need {
            MaterialRequest::SigningKey => {
                let result = kubernetes.get_signing_key(wire::GetSigningKeyRequest {}).await;
                let answer =
                    result.map_err(|status| status_error("the key that signs tokens", &status))?.into_inner();
                if answer.generation < generation {
                    return Err(of_before("the key that signs tokens", answer.generation));
                }
                self.write_file(SIGNING_KEY, &encode_pem("PRIVATE KEY", &answer.private_key))?;
                note.signing_key = answer.generation;
            }
            MaterialRequest::Certificate(name, component) => {
                let what = format!("the certificate {name}");
                let key = if let Some(key) = read_key(self.directory, name)? {
                    key
                } else {
                    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
                    self.write_file(
                        &format!("{name}.key"),
                        &encode_pem("PRIVATE KEY", &key.serialize_der()),
                    )?;
                    key
                };
                let request = wire::IssueKubernetesCertificateRequest {
                    component: component.into(),
                    public_key: key.subject_public_key_info(),
                };
                let result = kubernetes.issue_certificate(request).await;
                let answer = result.map_err(|status| status_error(&what, &status))?.into_inner();
                if answer.generation < generation {
                    return Err(of_before(&what, answer.generation));
                }
                self.write_file(&format!("{name}.crt"), &encode_pem("CERTIFICATE", &answer.certificate))?;
                note.certificates.insert(name.to_owned(), answer.generation);
            }
        }
        Ok(())
    }
}

fn status_error(what: &str, status: &tonic::Status) -> RunnableError {
    RunnableError::msg(format!("this node did not get {what} of Kubernetes: {}", describe_status(status)))
}
