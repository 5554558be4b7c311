//! `sharded_state/`: the shards of each rank of a serving engine, and the model's configuration and tokenizer files, which the
//! engine reads from the same directory.

use std::sync::Arc;

use ckfs_plan::{HfContent, HfFile, Problem, Rank};

use super::{
    bundle::Bundle,
    hf,
    input::FormatInput,
    output::{Directory, FormatFiles, OutputFormat},
    safetensors::BundleFile,
};

/// Suffixes of files that hold weights or list where weights are.
const WEIGHT_ENDINGS: [&str; 8] = [".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"];

/// See the module's documentation.
pub(super) const SHARDED_STATE: OutputFormat = OutputFormat { name: "sharded_state", unavailable: |_| None, layout };

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let plan = &input.plan;
    if !plan.sharded_state {
        return Ok(Default::default());
    }
    let is_wrong = |file: &HfFile| plan.decoded_config.is_some() && file.tells_quantization();
    let is_beside = |file: &HfFile| !file.path.contains('/') && !is_weights(file) && !is_wrong(file);
    let repository = plan.hf.iter().enumerate().filter(|(_, file)| is_beside(file));
    let repository = repository.map(|(number, file)| match &plan.decoded_config {
        Some(config) if file.path == "config.json" => Ok((file, hf::text(input, &file.path, config))),
        _ => Ok((file, hf::file(input, number)?)),
    });
    let repository: Vec<_> = repository.collect::<Result<_, Problem>>().map_err(|problem| vec![problem])?;
    let directory = Directory::with(SHARDED_STATE.name, |directory| {
        for Rank { stage, number, device } in plan.ranks() {
            let file = BundleFile {
                bundle: Arc::clone(input.bundle()),
                device,
                len_bytes: Bundle::sharded_state_len,
                lay_out: Bundle::sharded_state,
                is_bundle: false,
            };
            let name = match stage {
                None => format!("model-rank-{number}-part-0.safetensors"),
                Some(stage) => format!("model-pp-{stage}-tp-{number}-part-0.safetensors"),
            };
            directory.file(&name, file);
        }
        for (file, entry) in repository {
            directory.add(&file.path, entry);
        }
    });
    Ok((directory, None))
}

fn is_weights(file: &HfFile) -> bool {
    matches!(file.content, HfContent::Weights { .. }) || WEIGHT_ENDINGS.iter().any(|ending| file.path.ends_with(ending))
}
