//! Generates the Rust side of the .proto files. No protoc: the compiler is a crate.

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};

/// Read in this order; the digest of both is kept in what is written, so that a test can tell whether it is current.
const FILES: [&str; 2] = ["model_config.proto", "inference.proto"];

/// Messages that are, with those inside them, also read from the JSON that the HTTP routes answer with: what both say is then decided once.
const FROM_JSON: [&str; 20] = [
    "ModelConfig",
    "ModelInstanceGroup",
    "ModelInput",
    "ModelOutput",
    "ModelVersionPolicy",
    "ModelQueuePolicy",
    "ModelDynamicBatching",
    "ModelParameter",
    "ModelTransactionPolicy",
    "ModelResponseCache",
    "ModelMetadataResponse",
    "ServerMetadataResponse",
    "StatisticDuration",
    "InferStatistics",
    "InferResponseStatistics",
    "InferBatchStatistics",
    "MemoryUsage",
    "ModelStatistics",
    "ModelStatisticsResponse",
    "RepositoryIndexResponse",
];

/// Fields of enumerations, which JSON has as names.
const NAMED: [(&str, &str); 5] = [
    ("ModelInput.data_type", "DataType"),
    ("ModelOutput.data_type", "DataType"),
    ("ModelInput.format", "model_input::Format"),
    ("ModelInstanceGroup.kind", "model_instance_group::Kind"),
    ("ModelQueuePolicy.timeout_action", "model_queue_policy::TimeoutAction"),
];

fn main() -> anyhow::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/grpc/proto");
    let descriptors = protox::compile(FILES, [&folder])?;
    let mut bare = descriptors.clone();
    bare.file.iter_mut().for_each(|file| file.source_code_info = None);
    std::fs::write(folder.join("descriptors.bin"), bare.encode_to_vec())?;

    let written = std::env::temp_dir().join(format!("generate-proto-{}", std::process::id()));
    std::fs::create_dir_all(&written)?;
    let mut config = prost_build::Config::new();
    config.bytes(["."]).btree_map(["."]);
    for name in FROM_JSON {
        config.message_attribute(format!(".inference.{name}"), "#[derive(serde::Deserialize)] #[serde(default)]");
    }
    for choice in ["ModelConfig.scheduling_choice", "ModelVersionPolicy.policy_choice"] {
        let derive = "#[derive(serde::Deserialize)] #[serde(rename_all = \"snake_case\")]";
        config.enum_attribute(format!(".inference.{choice}"), derive);
        config.field_attribute(format!(".inference.{choice}"), "#[serde(flatten)]");
    }
    // Kept as it came until datatype and shape are known: see there.
    config.extern_path(".inference.InferTensorContents", "crate::grpc::contents::Contents");
    for (field, kind) in NAMED {
        let read = format!("#[serde(deserialize_with = \"crate::grpc::proto::named::<_, {kind}>\")]");
        config.field_attribute(format!(".inference.{field}"), read);
    }
    tonic_prost_build::configure()
        .build_transport(false)
        .out_dir(&written)
        .compile_fds_with_config(descriptors, config)?;

    let code = std::fs::read_to_string(written.join("inference.rs"))?;
    // The attribute of a choice reaches its variants too, where it means nothing.
    let code = code.replace("\n        #[serde(flatten)]", "");
    let code = format!("//! sources: {}\n{code}", digest(&folder)?);
    std::fs::write(folder.join("generated.rs"), code)?;
    std::fs::remove_dir_all(&written)?;
    Ok(())
}

fn digest(folder: &Path) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    for file in FILES.map(|file| -> PathBuf { folder.join(file) }) {
        hash.update(std::fs::read(file)?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
