//! Generates the gRPC contracts from `proto/` without a system `protoc`.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=migrations");
    let descriptors = protox::compile(["shepherd/agent/v1/agent.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .codec_path("crate::proto::codec::BoundedCodec")
        .compile_fds(descriptors)?;
    Ok(())
}
