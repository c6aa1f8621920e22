//! Compiles the gRPC contracts of `proto/` to Rust, with `protox`: no host needs the program `protoc`.

use std::error::Error;
use std::path::PathBuf;

/// Contracts between our own programs: those of the agent and of the curator.
const INTERNAL_CONTRACTS: [&str; 11] = [
    "shepherd/agent/v1/agent.proto",
    "shepherd/curator/v1/credentials.proto",
    "shepherd/curator/v1/declarations.proto",
    "shepherd/curator/v1/kubernetes.proto",
    "shepherd/curator/v1/leader.proto",
    "shepherd/curator/v1/management.proto",
    "shepherd/curator/v1/nodes.proto",
    "shepherd/curator/v1/registration.proto",
    "shepherd/curator/v1/snapshots.proto",
    "shepherd/curator/v1/storage.proto",
    "shepherd/curator/v1/tickets.proto",
];

/// The public contracts: reflection, JSON and the OpenAPI document are generated from them.
const PUBLIC_CONTRACTS: [&str; 14] = [
    "shepherd/fleet/v1/access.proto",
    "shepherd/fleet/v1/approvals.proto",
    "shepherd/fleet/v1/artefacts.proto",
    "shepherd/fleet/v1/budgets.proto",
    "shepherd/fleet/v1/bulk_orders.proto",
    "shepherd/fleet/v1/cluster_credentials.proto",
    "shepherd/fleet/v1/cluster_kubernetes.proto",
    "shepherd/fleet/v1/clusters.proto",
    "shepherd/fleet/v1/fleet.proto",
    "shepherd/fleet/v1/logs.proto",
    "shepherd/fleet/v1/loops.proto",
    "shepherd/fleet/v1/machines.proto",
    "shepherd/fleet/v1/plan.proto",
    "shepherd/fleet/v1/updates.proto",
];

/// The folder of the contracts, in the root of the workspace.
const FOLDER: &str = "../../proto";

/// The part of etcd's contract that we use.
const ETCD_CONTRACT: &str = "etcd/etcdserverpb.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={FOLDER}");
    let contracts = INTERNAL_CONTRACTS.iter().chain(&PUBLIC_CONTRACTS);
    let descriptors = protox::compile(contracts, [FOLDER])?;
    // The codec distinguishes requests from responses by their names.
    let mut with_names = tonic_prost_build::Config::new();
    with_names.enable_type_names();
    tonic_prost_build::configure()
        .codec_path("crate::codec::BoundedCodec")
        // An order and a change in a watch are identified by their bytes, so equal messages must have equal encodings.
        .btree_map(".shepherd.fleet.v1.Machine.labels")
        .btree_map(".shepherd.fleet.v1.LabelRequest")
        .btree_map(".shepherd.fleet.v1.LabelOperation")
        .btree_map(".shepherd.fleet.v1.KubernetesPatch")
        .btree_map(".shepherd.fleet.v1.Update.counts")
        // And a record that has not changed must not be written again.
        .btree_map(".shepherd.curator.v1")
        .compile_fds_with_config(descriptors, with_names)?;
    // With the default codec, which does not limit the number of fields: etcd is trusted with all data of a cluster
    // and may answer with any number of keys.
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(protox::compile([ETCD_CONTRACT], [FOLDER])?)?;
    let mut compiler = protox::Compiler::new([FOLDER])?;
    compiler.include_imports(true).include_source_info(true).open_files(PUBLIC_CONTRACTS)?;
    let directory = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(directory.join("fleet_descriptors.bin"), compiler.encode_file_descriptor_set())?;
    Ok(())
}
