//! Change of the Kubernetes settings of a cluster: flags, and their encoding for the API.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::error::CliError;
use bmdb::cluster::kubernetes::desired::KubernetesPatch;
use model::cluster::kubernetes::VolumeDriver;
use proto::fleet::v1;

/// The desired Kubernetes settings, without the bundle.
#[derive(Debug, Default, Args)]
pub struct KubernetesFlags {
    /// Address range of services [default: 10.96.0.0/16]
    #[arg(
        long = "service-range",
        value_name = "RANGE",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub service_range: Option<String>,
    /// Address range of pods; each node gets a part of it [default: 10.128.0.0/12]
    #[arg(
        long = "pod-range",
        value_name = "RANGE",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub pod_range: Option<String>,
    /// Prefix length of a node's pod range [default: 24]
    #[arg(long = "node-prefix", value_name = "BITS")]
    pub node_prefix: Option<u32>,
    /// DNS domain of services [default: cluster.local]
    #[arg(long = "cluster-domain", value_name = "DOMAIN", value_parser = NonEmptyStringValueParser::new())]
    pub cluster_domain: Option<String>,
    /// Add-on: an artefact with Kubernetes objects to apply and keep; may be given several times
    #[arg(long = "add-on", value_name = "NAME=ARTEFACT")]
    pub add_on: Vec<String>,
    /// Storage: name of the CSI driver, and the storage class that uses it
    #[arg(long = "storage-driver", value_name = "DRIVER=CLASS")]
    pub storage_driver: Option<String>,
}

/// Parses the flags into a change of the Kubernetes settings.
pub(crate) fn parse_patch(
    bundle: Option<&str>,
    flags: &KubernetesFlags,
) -> Result<KubernetesPatch, CliError> {
    let pair = |flag: &str, text: &str| {
        let pair = text.split_once('=').filter(|(one, other)| !one.is_empty() && !other.is_empty());
        pair.map(|(one, other)| (one.to_owned(), other.to_owned()))
            .ok_or_else(|| CliError::Invalid(format!("--{flag}: {text:?} does not have the form NAME=…")))
    };
    // In a request, 0 leaves the prefix as it is.
    if flags.node_prefix == Some(0) {
        return Err(CliError::Invalid(
            "--node-prefix: 0 is not a valid prefix length; give a length such as 24".to_owned(),
        ));
    }
    let storage = flags.storage_driver.as_deref().map(|text| pair("storage-driver", text)).transpose()?;
    Ok(KubernetesPatch {
        bundle: bundle.map(str::to_owned),
        service_range: flags.service_range.clone(),
        pod_range: flags.pod_range.clone(),
        node_prefix: flags.node_prefix,
        domain: flags.cluster_domain.clone(),
        add_ons: flags.add_on.iter().map(|text| pair("add-on", text)).collect::<Result<_, _>>()?,
        storage: storage.map(|(driver, class)| VolumeDriver { driver, class }),
        ..KubernetesPatch::default()
    })
}

/// Encodes a change as a message of the API; unset fields are empty.
pub(crate) fn encode_patch(wish: &KubernetesPatch) -> v1::KubernetesPatch {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    v1::KubernetesPatch {
        bundle: text(&wish.bundle),
        service_range: text(&wish.service_range),
        pod_range: text(&wish.pod_range),
        node_prefix: wish.node_prefix.unwrap_or_default(),
        domain: text(&wish.domain),
        add_ons: wish.add_ons.clone().into_iter().collect(),
        remove_add_ons: wish.remove_add_ons.iter().cloned().collect(),
        storage: (wish.storage.clone())
            .map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
    }
}
