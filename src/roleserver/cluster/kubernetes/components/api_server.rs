//! kube-apiserver.
//!
//! It talks to the node's own etcd through the socket that the role server uses itself, in a directory that nobody else may
//! enter. A listener of etcd's with certificates would have to be added to every member that runs already, by starting it
//! again; it would be reached by everybody on the node, and whoever holds a certificate that it takes may read all of it
//! in any case. Its keys have a prefix of their own there.
//!
//! Nobody is anonymous to it: looks at its health show the reconciler's certificate.

use crate::model::kubernetes::bundle::{Component, Duty};
use crate::roleserver::cluster::kubernetes::components::{Around, check, flags, id};
use crate::roleserver::cluster::kubernetes::material::{CLIENTS, FRONT_PROXY, SERVERS, SIGNING_KEY, TOKENS};
use crate::roleserver::cluster::services::placing::Placed;
use crate::roleserver::cluster::services::wanted::{Check, Rendered};

/// Its name.
pub const NAME: &str = "kube-apiserver";
/// What its keys in etcd begin with.
pub const ETCD_PREFIX: &str = "/kubernetes/registry";
const AUDIT_POLICY: &str = "audit-policy.yaml";
/// Where what is written through it is told, below its directory.
pub const AUDIT_LOG: &str = "audit.log";

/// Who changed what; not what was read, nor what anything says: secrets are among it.
const AUDIT: &str = "\
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

/// What it is started with.
pub fn rendered(around: &Around<'_>) -> Result<Rendered, String> {
    let files = vec![Placed { path: AUDIT_POLICY.to_owned(), contents: AUDIT.to_owned(), mode: 0o600 }];
    let read_once =
        ["apiserver-kubelet-client.crt", "apiserver-kubelet-client.key", SERVERS, TOKENS, SIGNING_KEY];
    around.rendered(Component::KubeApiserver, arguments(around), files, &read_once)
}

/// Its arguments.
#[must_use]
pub fn arguments(around: &Around<'_>) -> Vec<String> {
    let (material, settings) = (around.material, around.setup.settings());
    let own = around.own(&id(Duty::Controller, NAME));
    let file = |name: &str| own.join(name).display().to_string();
    let issuer = format!("https://kubernetes.default.svc.{}", settings.domain);
    let (address, port) = (around.address.to_string(), around.ports.api_server.to_string());
    flags([
        ("advertise-address", address.as_str()),
        ("allow-privileged", "true"),
        ("anonymous-auth", "false"),
        ("api-audiences", &issuer),
        ("audit-log-maxbackup", "3"),
        ("audit-log-maxsize", "16"),
        ("audit-log-path", &file(AUDIT_LOG)),
        ("audit-policy-file", &file(AUDIT_POLICY)),
        ("authorization-mode", "Node,RBAC"),
        ("bind-address", &address),
        ("client-ca-file", &material.path(CLIENTS)),
        ("enable-admission-plugins", "NodeRestriction"),
        // It need not reach addresses of services: a controller may be no worker.
        ("enable-aggregator-routing", "true"),
        ("etcd-prefix", ETCD_PREFIX),
        ("etcd-servers", &format!("unix://{}", around.etcd.display())),
        ("kubelet-certificate-authority", &material.path(SERVERS)),
        ("kubelet-client-certificate", &material.path("apiserver-kubelet-client.crt")),
        ("kubelet-client-key", &material.path("apiserver-kubelet-client.key")),
        ("kubelet-preferred-address-types", "InternalIP"),
        ("profiling", "false"),
        ("proxy-client-cert-file", &material.path("front-proxy-client.crt")),
        ("proxy-client-key-file", &material.path("front-proxy-client.key")),
        ("requestheader-allowed-names", "front-proxy-client"),
        ("requestheader-client-ca-file", &material.path(FRONT_PROXY)),
        ("requestheader-extra-headers-prefix", "X-Remote-Extra-"),
        ("requestheader-group-headers", "X-Remote-Group"),
        ("requestheader-username-headers", "X-Remote-User"),
        ("secure-port", &port),
        ("service-account-issuer", &issuer),
        ("service-account-key-file", &material.path(TOKENS)),
        ("service-account-signing-key-file", &material.path(SIGNING_KEY)),
        ("service-cluster-ip-range", &settings.service_range),
        ("tls-cert-file", &material.path("apiserver.crt")),
        ("tls-private-key-file", &material.path("apiserver.key")),
    ])
}

/// How it is seen to be well.
#[must_use]
pub fn looked_at(around: &Around<'_>) -> Check {
    check(around.api_server(), "/readyz", Some(around.material.pair("reconciler")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::{lines, with};

    #[test]
    fn api_server_is_started_so() {
        let arguments = with(|around| lines(&arguments(around)));
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
        with(|around| {
            assert!(
                rendered(around).unwrap().run
                    == crate::model::declaration::Run::Path("/bundle/bin/kube-apiserver".to_owned())
            );
        });
    }
}
