//! Arguments and health check of kube-apiserver.
//!
//! It connects to the node's own etcd through the socket that the role server also uses, in a directory that no other
//! user can enter. An etcd listener with certificates would have to be added to every running member by a restart.
//! Every process on the node could connect to it, and a holder of an accepted certificate could read all of etcd
//! anyway. The API server's keys in etcd have their own prefix.
//!
//! Anonymous requests are disabled: health checks show the reconciler's certificate.

use model::kubernetes::bundle_manifest::{BundleComponent, KubernetesDuty};

use crate::cluster::kubernetes::components::{ComponentContext, format_flags, https_check, service_id};
use crate::cluster::kubernetes::key_material::{CLIENT_CAS, FRONT_PROXY_CAS, SIGNING_KEY, TOKEN_KEYS};
use crate::cluster::kubernetes::secrets_config::SECRETS_CONFIG;
use crate::cluster::services::desired::{RenderedHealthCheck, RenderedService};
use crate::cluster::services::workdir::WorkdirFile;

/// Service name of the API server.
pub const NAME: &str = "kube-apiserver";
/// Prefix of its keys in etcd.
const ETCD_PREFIX: &str = "/kubernetes/registry";
const AUDIT_POLICY_FILE: &str = "audit-policy.yaml";
/// Name of the audit log, below the component's directory.
const AUDIT_LOG: &str = "audit.log";

/// Logs who changed which object. Reads are not logged, and contents neither, because secrets are among them.
const AUDIT_POLICY_YAML: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages:
- RequestReceived
rules:
- level: None
  verbs: [get, list, watch]
- level: None
  resources:
  - group: coordination.k8s.io
    resources: [leases]
- level: Metadata
";

/// Program, arguments and files that it is started with.
pub fn render_component(context: &ComponentContext<'_>) -> Result<RenderedService, String> {
    let files = vec![WorkdirFile {
        path: AUDIT_POLICY_FILE.to_owned(),
        contents: AUDIT_POLICY_YAML.to_owned(),
        mode: 0o600,
    }];
    let mut read_once = vec![
        "apiserver-kubelet-client.crt",
        "apiserver-kubelet-client.key",
        context.material.kubelet_authorities(),
        TOKEN_KEYS,
        SIGNING_KEY,
    ];
    if context.material.has_secrets_config() {
        read_once.push(SECRETS_CONFIG);
    }
    context.render_component(BundleComponent::KubeApiserver, arguments(context), files, &read_once)
}

fn arguments(context: &ComponentContext<'_>) -> Vec<String> {
    let (material, settings) = (context.material, context.setup.settings());
    let own = context.component_directory(&service_id(KubernetesDuty::Controller, NAME));
    let file = |name: &str| own.join(name).display().to_string();
    let issuer = format!("https://kubernetes.default.svc.{}", settings.domain);
    let (address, port) = (context.address.to_string(), context.ports.api_server.to_string());
    let mut arguments = format_flags([
        ("advertise-address", address.as_str()),
        ("allow-privileged", "true"),
        ("anonymous-auth", "false"),
        ("api-audiences", &issuer),
        ("audit-log-maxbackup", "3"),
        ("audit-log-maxsize", "16"),
        ("audit-log-path", &file(AUDIT_LOG)),
        ("audit-policy-file", &file(AUDIT_POLICY_FILE)),
        ("authorization-mode", "Node,RBAC"),
        ("bind-address", &address),
        ("client-ca-file", &material.file_path(CLIENT_CAS)),
        ("enable-admission-plugins", "NodeRestriction"),
        // Route to endpoints instead of service addresses: a controller need not be a worker with kube-proxy.
        ("enable-aggregator-routing", "true"),
        ("etcd-prefix", ETCD_PREFIX),
        ("etcd-servers", &format!("unix://{}", context.etcd.display())),
        ("kubelet-certificate-authority", &material.file_path(material.kubelet_authorities())),
        ("kubelet-client-certificate", &material.file_path("apiserver-kubelet-client.crt")),
        ("kubelet-client-key", &material.file_path("apiserver-kubelet-client.key")),
        ("kubelet-preferred-address-types", "InternalIP"),
        ("profiling", "false"),
        ("proxy-client-cert-file", &material.file_path("front-proxy-client.crt")),
        ("proxy-client-key-file", &material.file_path("front-proxy-client.key")),
        ("requestheader-allowed-names", "front-proxy-client"),
        ("requestheader-client-ca-file", &material.file_path(FRONT_PROXY_CAS)),
        ("requestheader-extra-headers-prefix", "X-Remote-Extra-"),
        ("requestheader-group-headers", "X-Remote-Group"),
        ("requestheader-username-headers", "X-Remote-User"),
        ("secure-port", &port),
        ("service-account-issuer", &issuer),
        ("service-account-key-file", &material.file_path(TOKEN_KEYS)),
        ("service-account-signing-key-file", &material.file_path(SIGNING_KEY)),
        ("service-cluster-ip-range", &settings.service_range),
        ("tls-cert-file", &material.file_path("apiserver.crt")),
        ("tls-private-key-file", &material.file_path("apiserver.key")),
    ]);
    if material.has_secrets_config() {
        let config = material.file_path(SECRETS_CONFIG);
        arguments.extend(format_flags([("encryption-provider-config", config.as_str())]));
    }
    arguments
}

/// Health check over HTTPS on `/readyz`.
#[must_use]
pub fn health_check(context: &ComponentContext<'_>) -> RenderedHealthCheck {
    https_check(context.api_server(), "/readyz", Some(context.material.certificate_and_key("reconciler")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::{lines, with_context};
    use crate::cluster::kubernetes::key_material::tests::{material, material_with_file};
    use crate::cluster::kubernetes::key_material::{KUBELET_CAS, KeyMaterial, SERVER_CAS};

    #[test]
    fn kubelets_are_verified_by_their_own_authority_alone_once_there_is_one() {
        let authority = |material: &KeyMaterial| {
            with_context(|context| {
                let context = ComponentContext { material, ..*context };
                let all = arguments(&context);
                all.into_iter()
                    .filter(|flag| flag.starts_with("--kubelet-certificate-authority="))
                    .collect::<Vec<_>>()
            })
        };
        let expected =
            |name: &str| vec![format!("--kubelet-certificate-authority=/state/cluster/kubernetes/x/{name}")];
        assert_eq!(authority(&material_with_file(KUBELET_CAS)), expected(KUBELET_CAS));
        assert_eq!(authority(&material_with_file(SERVER_CAS)), expected(SERVER_CAS), "of a release before");
    }

    #[test]
    fn secrets_are_encrypted_once_there_is_a_configuration_and_another_one_restarts_it() {
        let rendered = |material: &KeyMaterial| {
            with_context(|context| {
                let context = ComponentContext { material, ..*context };
                let rendered = render_component(&context).unwrap();
                let declared = context.declaration_digest(&rendered);
                (rendered, declared)
            })
        };
        let flag = format!("--encryption-provider-config=/state/cluster/kubernetes/x/{SECRETS_CONFIG}");
        let (plain, of_before) = rendered(&material());
        assert!(!plain.arguments.contains(&flag), "of a release before");
        let (encrypted, declared) = rendered(&material_with_file(SECRETS_CONFIG));
        assert!(encrypted.arguments.contains(&flag), "it starts without keys: {:?}", encrypted.arguments);
        assert_ne!(declared, of_before, "it restarts with the first key");
        let (_, with_other) = rendered(&material_with_file("other"));
        assert_eq!(with_other, of_before, "no other file matters");
    }

    #[test]
    fn api_server_arguments_match() {
        let arguments = with_context(|context| lines(&arguments(context)));
        insta::assert_snapshot!(arguments, @r"
        --advertise-address=10.0.0.7
        --allow-privileged=true
        --anonymous-auth=false
        --api-audiences=https://kubernetes.default.svc.cluster.local
        --audit-log-maxbackup=3
        --audit-log-maxsize=16
        --audit-log-path=/state/cluster/kubernetes/kubernetes-controller_kube-apiserver/audit.log
        --audit-policy-file=/state/cluster/kubernetes/kubernetes-controller_kube-apiserver/audit-policy.yaml
        --authorization-mode=Node,RBAC
        --bind-address=10.0.0.7
        --client-ca-file=/state/cluster/kubernetes/x/clients.crt
        --enable-admission-plugins=NodeRestriction
        --enable-aggregator-routing=true
        --etcd-prefix=/kubernetes/registry
        --etcd-servers=unix:///state/cluster/etcd/client:1
        --kubelet-certificate-authority=/state/cluster/kubernetes/x/servers.crt
        --kubelet-client-certificate=/state/cluster/kubernetes/x/apiserver-kubelet-client.crt
        --kubelet-client-key=/state/cluster/kubernetes/x/apiserver-kubelet-client.key
        --kubelet-preferred-address-types=InternalIP
        --profiling=false
        --proxy-client-cert-file=/state/cluster/kubernetes/x/front-proxy-client.crt
        --proxy-client-key-file=/state/cluster/kubernetes/x/front-proxy-client.key
        --requestheader-allowed-names=front-proxy-client
        --requestheader-client-ca-file=/state/cluster/kubernetes/x/front-proxy-authorities.crt
        --requestheader-extra-headers-prefix=X-Remote-Extra-
        --requestheader-group-headers=X-Remote-Group
        --requestheader-username-headers=X-Remote-User
        --secure-port=6443
        --service-account-issuer=https://kubernetes.default.svc.cluster.local
        --service-account-key-file=/state/cluster/kubernetes/x/service-accounts.pub
        --service-account-signing-key-file=/state/cluster/kubernetes/x/service-accounts.key
        --service-cluster-ip-range=10.96.0.0/16
        --tls-cert-file=/state/cluster/kubernetes/x/apiserver.crt
        --tls-private-key-file=/state/cluster/kubernetes/x/apiserver.key
        ");
        with_context(|context| {
            assert!(
                render_component(context).unwrap().run
                    == model::role_declaration::ProgramSource::Path("/bundle/bin/kube-apiserver".to_owned())
            );
        });
    }
}
