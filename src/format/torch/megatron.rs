//! What a file `model_optim_rng.pt` of Megatron says: its arguments, and the names of its tensors.
//!
//! Each rank of tensor, pipeline and expert parallelism saves one: a dictionary with the arguments of the training, the iteration and
//! the state of the model, which is several of them where a rank has several stages of a pipeline.

use serde_json::{Map, Value as Json};

use super::{
    super::pickle::read::{Id, PickleValue, Unpickled},
    state::{self as torch_state, is_listed},
    zero,
};
use crate::FormatError;

/// Whether a file of Megatron may name a class or function: tensors, numbers, and the enumerations of its arguments.
pub fn is_allowed(module: &str, name: &str) -> bool {
    const LISTED: [(&str, &str); 4] = [
        (
            "megatron.core.enums megatron.core.transformer.enums megatron.legacy.model.enums megatron.model.enums",
            "ModelType Fp8Recipe Fp4Recipe LayerType AttnType AttnMaskType AttnBackend CudaGraphScope PositionEmbeddingType",
        ),
        ("megatron.core.rerun_state_machine", "RerunDiagnostic RerunMode RerunState"),
        ("signal", "Signals"),
        ("types", "SimpleNamespace"),
    ];
    zero::is_allowed(module, name) || is_listed(&LISTED, module, name)
}

/// What the arguments of the training say of the model and its ranks. A number that they do not say is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MegatronArguments {
    /// Ranks of tensor parallelism.
    pub tensor: Option<u64>,
    /// Stages of the pipeline.
    pub pipeline: Option<u64>,
    /// Ranks of expert parallelism.
    pub expert: Option<u64>,
    /// Ranks of tensor parallelism of experts.
    pub expert_tensor: Option<u64>,
    /// Layers of the model.
    pub layers: Option<u64>,
    /// Experts of a layer.
    pub experts: Option<u64>,
    /// Groups of heads that share a key and a value.
    pub query_groups: Option<u64>,
    /// Whether `linear_fc1` holds a gate beside its other half.
    pub gated: Option<bool>,
    /// Whether embedding and output head are two.
    pub untied: Option<bool>,
}

/// What a file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MegatronFile {
    /// Of the training.
    pub arguments: MegatronArguments,
    /// All of them, as they are saved.
    pub saved: Map<String, Json>,
    /// The step.
    pub iteration: Option<u64>,
    /// Tensors by name: one list for each stage of the pipeline that the rank has.
    pub chunks: Vec<Vec<(String, Id)>>,
    /// What is no tensor, by name.
    pub others: Vec<(String, String)>,
}

/// The members of a namespace.
fn members(pickle: &Unpickled, namespace: Id) -> Id {
    pickle.call(namespace).and_then(|(_, _, object)| object.state).unwrap_or(namespace)
}

/// The arguments of a training that are numbers, words or lists of such, by name.
pub fn saved_arguments(pickle: &Unpickled, namespace: Id) -> Map<String, Json> {
    let items = pickle.items(members(pickle, namespace)).unwrap_or_default();
    items.iter().filter_map(|(key, id)| Some((pickle.text(*key)?.to_owned(), plain(pickle, *id, 0)?))).collect()
}

/// A value that JSON has, too.
fn plain(pickle: &Unpickled, id: Id, depth: usize) -> Option<Json> {
    const DEPTH_MAX: usize = 4;
    let list = |ids: &[Id]| -> Option<Json> {
        let values = ids.iter().filter(|_| depth < DEPTH_MAX).map(|id| plain(pickle, *id, depth + 1));
        values.collect::<Option<Vec<Json>>>().map(Json::Array)
    };
    match pickle.value(id) {
        PickleValue::None => Some(Json::Null),
        PickleValue::Bool(flag) => Some(Json::Bool(*flag)),
        PickleValue::Int(number) => i64::try_from(*number).ok().map(Json::from),
        PickleValue::Float(number) => Some(Json::from(*number)),
        PickleValue::Text(text) => Some(Json::from(&**text)),
        PickleValue::Tuple(ids) => list(ids),
        PickleValue::List(ids) => list(ids),
        PickleValue::Bytes(_)
        | PickleValue::Dict(_)
        | PickleValue::Set(_)
        | PickleValue::Global(_)
        | PickleValue::Object(_)
        | PickleValue::Persistent(_) => None,
    }
}

/// Reads a file.
///
/// # Errors
/// [`FormatError`]: it is not what Megatron writes.
pub fn file(pickle: &Unpickled) -> Result<MegatronFile, FormatError> {
    let root = pickle.root();
    let malformed = |expected| torch_state::malformed(torch_state::FILE, expected);
    let arguments = pickle.item(root, "args").ok_or_else(|| malformed("args, the arguments of the training"))?;
    let saved = saved_arguments(pickle, arguments);
    let arguments = members(pickle, arguments);
    let number = |key: &str| pickle.item(arguments, key).and_then(|id| pickle.natural(id));
    let flag = |key: &str| match pickle.item(arguments, key).map(|id| pickle.value(id)) {
        Some(PickleValue::Bool(flag)) => Some(*flag),
        Some(_) | None => None,
    };
    // Files of before version 3 have queries, keys and values in another order.
    if let Some(PickleValue::Float(version)) = pickle.item(root, "checkpoint_version").map(|id| pickle.value(id))
        && *version < 3.0
    {
        let found = format!("a checkpoint of version {version}, with heads in another order,");
        return Err(torch_state::unsupported("checkpoint_version", found));
    }
    let gated = match (flag("swiglu"), flag("quick_geglu")) {
        (None, None) => None,
        (swiglu, geglu) => Some(swiglu == Some(true) || geglu == Some(true)),
    };
    let arguments = MegatronArguments {
        tensor: number("tensor_model_parallel_size"),
        pipeline: number("pipeline_model_parallel_size"),
        expert: number("expert_model_parallel_size"),
        expert_tensor: number("expert_tensor_parallel_size"),
        layers: number("num_layers"),
        experts: number("num_experts"),
        query_groups: flag("group_query_attention").filter(|is| *is).and_then(|_| number("num_query_groups")),
        gated,
        untied: flag("untie_embeddings_and_output_weights"),
    };
    let iteration = pickle.item(root, "iteration").and_then(|id| pickle.natural(id));
    let mut said = MegatronFile { arguments, saved, iteration, ..MegatronFile::default() };
    let chunks: Vec<Id> = match pickle.item(root, "model") {
        Some(model) => vec![model],
        None => (0..).map_while(|number: u64| pickle.item(root, &format!("model{number}"))).collect(),
    };
    if chunks.is_empty() {
        return Err(malformed("model, the state of the model"));
    }
    for chunk in chunks {
        let leaves = torch_state::leaves(pickle, chunk)?;
        said.chunks.push(leaves.tensors);
        said.others.extend(leaves.others);
    }
    Ok(said)
}
