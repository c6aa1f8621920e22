//! Fixtures of these tests: a server of either kind, objects that are reconciled in it, and another client that changes
//! them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use kube::api::{
    DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::core::{Request, Status};
use serde_json::{Value, json};
use shepherd::etcd::client::Client;
use shepherd::reconciler::objects::ObjectReconciler as _;
use shepherd::reconciler::objects::api_client::{ApiClient, ApiServerConnection, ReloadingClient};
use shepherd::reconciler::objects::cluster_config::{AddOn, ClusterConfig, StorageDriver};
use shepherd::reconciler::objects::object_kind::{
    MANAGED_BUILT_IN, MANAGED_LABEL, ObjectKey, ObjectKind, escape_path_segment,
};
use shepherd::reconciler::objects::reconcile::KubernetesObjects;
use tokio::sync::watch;

use super::real::Real;
use super::server::Simulated;
use crate::harness::etcd_servers::in_time;

/// A wait for something that must not happen: long enough for a program that does it. No test passes because of it.
pub(crate) const A_WHILE: Duration = Duration::from_millis(300);

/// A server of either kind.
pub(crate) enum Server {
    Simulated(Simulated),
    Real(Real),
}

impl Server {
    pub(crate) async fn simulated() -> Result<Self> {
        Ok(Self::Simulated(Simulated::start().await?))
    }

    pub(crate) async fn real() -> Result<Option<Self>> {
        Ok(Real::start().await?.map(Self::Real))
    }

    pub(crate) fn in_this_process(&self) -> Result<&Simulated> {
        match self {
            Self::Simulated(server) => Ok(server),
            Self::Real(_) => bail!("it is a real one"),
        }
    }

    pub(crate) fn connection(&self) -> ApiServerConnection {
        match self {
            Self::Simulated(server) => server.connection(),
            Self::Real(server) => server.connection(),
        }
    }

    /// A client with the reconciler's credentials.
    pub(crate) async fn api(&self) -> Result<ApiClient> {
        Ok(ReloadingClient::new(self.connection()).client().await?)
    }

    /// A client with other credentials.
    pub(crate) fn other(&self) -> Result<Other> {
        Other::new(&self.connection())
    }
}

/// Objects that are reconciled, and the configuration of their cluster.
pub(crate) struct ManagedObjects {
    pub(crate) objects: KubernetesObjects,
    pub(crate) wishes: watch::Sender<Option<ClusterConfig>>,
}

impl ManagedObjects {
    pub(crate) fn new(server: &Server, wishes: ClusterConfig) -> Self {
        let (wishes, receiver) = watch::channel(Some(wishes));
        Self { objects: KubernetesObjects::new(server.connection(), receiver), wishes }
    }

    /// Also reconciles the objects of nodes, from their records.
    pub(crate) fn and_nodes_of(self, curator: Client) -> Self {
        Self { objects: self.objects.with_node_records(curator), wishes: self.wishes }
    }

    /// A pass: the numbers of created, updated, replaced and deleted objects.
    pub(crate) async fn pass(&self) -> Result<[usize; 4]> {
        let passed = self.objects.reconcile().await?;
        Ok([passed.created, passed.updated, passed.replaced, passed.deleted])
    }

    /// The problems that the reconciler reports now.
    pub(crate) fn troubles(&self) -> Vec<String> {
        self.objects.problems().borrow().iter().map(ToString::to_string).collect()
    }

    pub(crate) async fn until_changed(&self) -> Result<()> {
        in_time("the report of a change", self.objects.wait_for_change()).await
    }

    /// Whether a change is reported within a while; used where none should be.
    pub(crate) async fn is_change_reported(&self) -> bool {
        tokio::time::timeout(A_WHILE, self.objects.wait_for_change()).await.is_ok()
    }

    pub(crate) fn wish(&self, add_ons: &[(&str, &str)]) {
        let add_ons = add_ons.iter().map(|(name, manifest)| add_on(name, manifest)).collect();
        self.wishes.send_modify(|wishes| wishes.get_or_insert_default().add_ons = add_ons);
    }
}

pub(crate) fn add_on(name: &str, manifest: &str) -> AddOn {
    AddOn { name: name.to_owned(), manifest: manifest.as_bytes().to_vec() }
}

/// A configuration for which every built-in object is created.
pub(crate) fn everything() -> ClusterConfig {
    ClusterConfig {
        runtime_handlers: ["runc", "runsc"].map(str::to_owned).into(),
        storage_driver: Some(StorageDriver {
            name: "disks.example".to_owned(),
            class: "disks".to_owned(),
            parameters: BTreeMap::from([("tier".to_owned(), "fast".to_owned())]),
            can_expand: true,
            needs_attach: false,
        }),
        add_ons: Vec::new(),
    }
}

/// The number of these objects.
pub(crate) const EVERYTHING: usize = 11;

pub(crate) fn kind(group: &str, kind: &str, plural: &str, namespaced: bool) -> ObjectKind {
    ObjectKind {
        group: group.to_owned(),
        version: "v1".to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
        namespaced,
    }
}

pub(crate) fn cluster_roles() -> ObjectKind {
    kind("rbac.authorization.k8s.io", "ClusterRole", "clusterroles", false)
}

pub(crate) fn bindings() -> ObjectKind {
    kind("rbac.authorization.k8s.io", "ClusterRoleBinding", "clusterrolebindings", false)
}

pub(crate) fn priorities() -> ObjectKind {
    kind("scheduling.k8s.io", "PriorityClass", "priorityclasses", false)
}

pub(crate) fn runtimes() -> ObjectKind {
    kind("node.k8s.io", "RuntimeClass", "runtimeclasses", false)
}

pub(crate) fn nodes() -> ObjectKind {
    kind("", "Node", "nodes", false)
}

pub(crate) fn config_maps() -> ObjectKind {
    kind("", "ConfigMap", "configmaps", true)
}

pub(crate) fn named(name: &str) -> ObjectKey {
    ObjectKey { namespace: None, name: name.to_owned() }
}

pub(crate) fn in_default(name: &str) -> ObjectKey {
    ObjectKey { namespace: Some("default".to_owned()), name: name.to_owned() }
}

/// A role that permits one verb, with or without the label.
pub(crate) fn role(name: &str, verb: &str, labelled: bool) -> Value {
    let labels = if labelled { json!({MANAGED_LABEL: MANAGED_BUILT_IN}) } else { json!({}) };
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name, "labels": labels},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": [verb]}]})
}

/// A node as its kubelet creates it, with these labels.
pub(crate) fn node(name: &str, labels: &[&str]) -> Value {
    let labels: BTreeMap<&str, &str> = labels.iter().map(|label| (*label, "")).collect();
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
}

/// A manifest of one config map with one value.
pub(crate) fn map(name: &str, value: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\ndata: {{key: {value}}}\n---\n"
    )
}

/// Another client, with the field manager `somebody`.
pub(crate) struct Other(kube::Client);

type Answer = std::result::Result<Value, Box<Status>>;

impl Other {
    pub(crate) fn new(connection: &ApiServerConnection) -> Result<Self> {
        let mut config = kube::Config::new(connection.url.parse()?);
        config.default_retry = false;
        if let Some(identity) = &connection.identity {
            let read = |path: &Path| std::fs::read(path).context("a file of the connection");
            let encoded = |bytes: Vec<u8>| base64::engine::general_purpose::STANDARD.encode(bytes);
            let authority = rustls::pki_types::pem::PemObject::from_pem_slice(&read(&identity.authority)?)?;
            let authority: rustls::pki_types::CertificateDer<'_> = authority;
            config.root_cert = Some(vec![authority.to_vec()]);
            config.auth_info.client_certificate_data = Some(encoded(read(&identity.certificate)?));
            config.auth_info.client_key_data = Some(encoded(read(&identity.key)?).into());
        }
        Ok(Self(kube::Client::try_from(config)?))
    }

    fn parameters() -> PostParams {
        PostParams { field_manager: Some("somebody".to_owned()), ..PostParams::default() }
    }

    fn at(kind: &ObjectKind, key: &ObjectKey) -> Request {
        Request::new(kind.path(key.namespace.as_deref()))
    }

    fn answered(answer: kube::Result<Value>) -> Result<Answer> {
        match answer {
            Ok(object) => Ok(Ok(object)),
            Err(kube::Error::Api(status)) => Ok(Err(status)),
            Err(other) => Err(other.into()),
        }
    }

    pub(crate) async fn create(&self, kind: &ObjectKind, object: &Value) -> Result<Answer> {
        let request = Self::at(kind, &ObjectKey::from_object(object))
            .create(&Self::parameters(), object.to_string().into_bytes())?;
        Self::answered(self.0.request(request).await)
    }

    pub(crate) async fn get(&self, kind: &ObjectKind, key: &ObjectKey) -> Result<Answer> {
        let request = Self::at(kind, key).get(&escape_path_segment(&key.name), &GetParams::default())?;
        Self::answered(self.0.request(request).await)
    }

    /// Lists objects of a kind in all namespaces.
    pub(crate) async fn list(&self, kind: &ObjectKind, parameters: &ListParams) -> Result<Answer> {
        let request = Request::new(kind.path(None)).list(parameters)?;
        Self::answered(self.0.request(request).await)
    }

    /// Watches a kind in all namespaces from this resource version on.
    pub(crate) async fn watch(
        &self,
        kind: &ObjectKind,
        from: &str,
    ) -> kube::Result<BoxStream<'static, kube::Result<WatchEvent<Value>>>> {
        let request = Request::new(kind.path(None)).watch(&WatchParams::default(), from);
        let request = request.map_err(kube::Error::BuildRequest)?;
        Ok(self.0.request_events(request).await?.boxed())
    }

    pub(crate) async fn replace(&self, kind: &ObjectKind, object: &Value) -> Result<Answer> {
        let key = ObjectKey::from_object(object);
        let body = object.to_string().into_bytes();
        let request =
            Self::at(kind, &key).replace(&escape_path_segment(&key.name), &Self::parameters(), body)?;
        Self::answered(self.0.request(request).await)
    }

    pub(crate) async fn apply(&self, kind: &ObjectKind, object: &Value, force: bool) -> Result<Answer> {
        let key = ObjectKey::from_object(object);
        let mut parameters = PatchParams::apply("somebody");
        parameters.force = force;
        let request = Self::at(kind, &key).patch(
            &escape_path_segment(&key.name),
            &parameters,
            &Patch::Apply(object),
        )?;
        Self::answered(self.0.request(request).await)
    }

    pub(crate) async fn delete(&self, kind: &ObjectKind, key: &ObjectKey) -> Result<Answer> {
        let request =
            Self::at(kind, key).delete(&escape_path_segment(&key.name), &DeleteParams::default())?;
        Self::answered(self.0.request(request).await)
    }

    /// Reads an object, changes it, and writes it.
    pub(crate) async fn edit(
        &self,
        kind: &ObjectKind,
        key: &ObjectKey,
        edit: impl FnOnce(&mut Value),
    ) -> Result<Value> {
        let mut object = self.get(kind, key).await??;
        edit(&mut object);
        Ok(self.replace(kind, &object).await??)
    }
}
