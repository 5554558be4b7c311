//! What the files of DeepSpeed ZeRO say: names and shapes of parameters, and the flat partitions that hold their master weights.
//!
//! ```text
//! mp_rank_00_model_states.pt                     names, shapes, buffers; with ZeRO 3 one file for each rank, zero_pp_rank_R_…
//! zero_pp_rank_R_mp_rank_00_optim_states.pt      the flat partitions of rank R, one for each group of parameters
//! ```
//!
//! With ZeRO 1 and 2 the partitions of a group, one after the other over the ranks, are the parameters of the group one after the
//! other. With ZeRO 3 each rank has a part of each parameter, padded to the same length on all ranks. What the optimizer keeps of each
//! number lies in vectors like those of the master weights.

use super::{
    super::pickle::{
        read::{Id, PickleValue, Unpickled},
        write::Pickle,
    },
    distributed,
    state::{FILE, Of, is_listed, malformed, unsupported},
};
use crate::FormatError;

/// Whether the files of DeepSpeed may name a class or function. Beside tensors and numbers, clients save what their schedulers and
/// data loaders keep.
pub fn is_allowed(module: &str, name: &str) -> bool {
    const LISTED: [(&str, &str); 10] = [
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScaleConfig LossScaleProfile"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("argparse", "Namespace"),
        ("numpy", "dtype ndarray"),
        ("numpy.core.multiarray numpy._core.multiarray", "scalar _reconstruct"),
        ("_codecs", "encode"),
        ("collections", "deque Counter"),
        ("pathlib", "PosixPath PurePosixPath"),
        ("datetime", "datetime timedelta"),
    ];
    distributed::is_allowed(module, name) || is_listed(&LISTED, module, name)
}

/// A parameter and its shape.
pub type Shaped = (String, Vec<u64>);

/// A tensor and its value in the pickle.
pub type Named = (String, Id);

/// What a file of model states says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelStates {
    /// The module's state: buffers, and parameters that may be placeholders.
    pub module: Vec<Named>,
    /// Names of those that are buffers.
    pub buffers: Vec<String>,
    /// Parameters that the optimizer has, by group, in their order in the partitions.
    pub groups: Vec<Vec<Shaped>>,
    /// Parameters that the optimizer has not, with the part that this rank has.
    pub frozen: Vec<(Shaped, Id)>,
    /// Whether the file says nothing of such parameters where it has a place for them: then there are none, or they were not saved.
    pub says_no_frozen: bool,
    /// The stage of ZeRO in the configuration that is saved beside.
    pub stage: Option<u64>,
    /// Names of parameters that are others too: the name, and that of the other.
    pub shared: Vec<(String, String)>,
    /// Number of steps that were taken.
    pub steps: Option<u64>,
    /// Number of ranks that share one part of the model.
    pub tensor_ranks: Option<u64>,
    /// The member of `universal_checkpoint_info` that says of some parameters how they were split, if there is one.
    pub split_by: Option<String>,
}

/// What a file of optimizer states says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizerStates {
    /// 1 to 3.
    pub stage: u64,
    /// Number of partitions of each group, or of all.
    pub partitions: Vec<u64>,
    /// This rank's partition of each group.
    pub flat: Vec<Id>,
    /// Elements behind each parameter that are none, by group, if the file says so.
    pub paddings: Option<Vec<Vec<u64>>>,
    /// By group, what the optimizer keeps: vectors as long as the partition, and numbers of steps. Empty if it is kept otherwise.
    pub kept: Vec<Vec<Named>>,
    /// What is the same for all parameters: `optimizer_state.pt` of a universal checkpoint.
    pub shared: Result<Copied, String>,
}

/// A value of a pickle as a pickle of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The pickle.
    pub pickle: Vec<u8>,
    /// The keys of the storages that it refers to.
    pub storages: Vec<String>,
}

/// A pickle of a value of another one.
///
/// # Errors
/// A text: there is a value that is not written anew.
pub fn copied(pickle: &Unpickled, id: Id) -> Result<Copied, String> {
    let mut copy = Pickle::new();
    copy.copy(pickle, id)?;
    let (pickle, storages) = copy.finish();
    Ok(Copied { pickle, storages })
}

/// Reads a file of model states.
///
/// # Errors
/// [`FormatError`]: it is not what DeepSpeed writes.
pub fn model_states(pickle: &Unpickled) -> Result<ModelStates, FormatError> {
    let (of, root) = (Of { pickle, name: FILE }, pickle.root());
    let names = of.required(root, "buffer_names")?;
    let names = pickle.sequence(names).or_else(|| set(pickle, names)).unwrap_or_default();
    let text = |id: &Id| pickle.text(*id).map(str::to_owned).ok_or_else(|| malformed("buffer_names", "a name"));
    let buffers = names.iter().map(text).collect::<Result<_, _>>()?;
    let groups = of.required(root, "param_shapes")?;
    let groups = pickle.sequence(groups).map_or_else(|| vec![groups], <[Id]>::to_vec);
    let groups = groups.iter().map(|group| of.shapes("param_shapes", *group)).collect::<Result<_, _>>()?;
    let frozen = match (of.present(root, "frozen_param_shapes"), of.present(root, "frozen_param_fragments")) {
        (Some(shapes), Some(fragments)) => {
            let shapes = of.shapes("frozen_param_shapes", shapes)?;
            let part = |shaped: Shaped| {
                let found = pickle.item(fragments, &shaped.0);
                found
                    .map(|id| (shaped.clone(), id))
                    .ok_or_else(|| malformed(&shaped.0, "its part among frozen parameters"))
            };
            shapes.into_iter().map(part).collect::<Result<_, _>>()?
        }
        (None, None) => Vec::new(),
        (Some(_), None) | (None, Some(_)) => return Err(malformed("frozen_param_shapes", "shapes and parts")),
    };
    let pairs = |key| of.present(root, key).map_or(Ok(Vec::new()), |found| of.pairs(key, found));
    let shared = pairs("shared_params")?
        .into_iter()
        .map(|(name, id)| Ok((name, text(&id)?)))
        .collect::<Result<_, FormatError>>()?;
    let module = pairs("module")?;
    let number = |key| pickle.item(root, key).and_then(|id| pickle.natural(id));
    let (steps, tensor_ranks) = (number("global_steps"), number("mp_world_size"));
    let says_no_frozen =
        pickle.item(root, "frozen_param_shapes").is_some_and(|id| *pickle.value(id) == PickleValue::None);
    let stage = ["ds_config", "zero_optimization", "stage"].iter().try_fold(root, |at, key| of.present(at, key));
    let stage = stage.and_then(|stage| pickle.natural(stage));
    let info = of.present(root, "universal_checkpoint_info").and_then(|info| pickle.items(info)).unwrap_or_default();
    let is_filled = |id: Id| {
        pickle.items(id).is_some_and(|items| !items.is_empty())
            || pickle.sequence(id).is_some_and(|elements| !elements.is_empty())
    };
    let split_by = info.iter().find(|(_, value)| is_filled(*value)).map(|(key, _)| pickle.text(*key));
    let split_by = split_by.map(|key| key.unwrap_or("?").to_owned());
    Ok(ModelStates { module, buffers, groups, frozen, says_no_frozen, stage, shared, steps, tensor_ranks, split_by })
}

/// Reads a file of optimizer states.
///
/// # Errors
/// [`FormatError`]: it is not what DeepSpeed writes with ZeRO.
pub fn optimizer_states(pickle: &Unpickled) -> Result<OptimizerStates, FormatError> {
    let of = Of { pickle, name: FILE };
    let state = of.required(pickle.root(), "optimizer_state_dict")?;
    let stage = of.required(state, "zero_stage")?;
    let stage = match pickle.call(stage) {
        Some((_, [number], _)) => *number,
        Some(_) | None => stage,
    };
    let stage = pickle.natural(stage).filter(|stage| (1..=3).contains(stage));
    let stage = stage.ok_or_else(|| malformed("zero_stage", "1, 2 or 3"))?;
    let partitions = of.required(state, "partition_count")?;
    let partitions =
        pickle.naturals(partitions).ok_or_else(|| malformed("partition_count", "numbers of partitions"))?;
    if of.present(state, "ds_zero_partition_groups").is_some() {
        let found = "a partition of experts over groups of ranks (AutoEP)";
        return Err(unsupported("ds_zero_partition_groups", found));
    }
    let key = if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" };
    let flat = of.required(state, key)?;
    let flat = pickle.sequence(flat).ok_or_else(|| malformed(key, "a list of partitions"))?.to_vec();
    let paddings = of.present(state, "param_alignment_paddings").map(|groups| {
        let groups = pickle.sequence(groups).unwrap_or_default().iter().map(|group| pickle.naturals(*group));
        groups.collect::<Option<_>>().ok_or_else(|| malformed("param_alignment_paddings", "lists of numbers"))
    });
    let base = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
    let of_group = |number: usize| {
        let groups = pickle.items(pickle.item(pickle.item(state, base)?, "state")?)?;
        let found = groups.iter().rev().find(|(key, _)| pickle.natural(*key) == Some(number as u64));
        of.pairs(base, found?.1).ok()
    };
    let kept: Option<Vec<Vec<Named>>> = (0..flat.len()).map(of_group).collect();
    let shared = of.shared(state, (base, key), stage);
    Ok(OptimizerStates {
        stage,
        partitions,
        flat,
        paddings: paddings.transpose()?,
        kept: kept.unwrap_or_default(),
        shared,
    })
}

fn set(pickle: &Unpickled, id: Id) -> Option<&[Id]> {
    if let PickleValue::Set(elements) = pickle.value(id) { Some(elements) } else { None }
}

impl Of<'_, '_> {
    fn present(&self, state: Id, key: &str) -> Option<Id> {
        self.pickle.item(state, key).filter(|id| *self.pickle.value(*id) != PickleValue::None)
    }

    fn required(&self, state: Id, key: &'static str) -> Result<Id, FormatError> {
        self.present(state, key).ok_or_else(|| self.malformed(key))
    }

    /// What `ds_to_universal` keeps of the optimizer's state as a whole: with ZeRO 3 all that the first rank has.
    fn shared(&self, state: Id, (base, flat): (&'static str, &str), stage: u64) -> Result<Copied, String> {
        let pickle = self.pickle;
        let groups = self.required(state, base).and_then(|base| self.required(base, "param_groups"));
        let groups = groups.map_err(|error| error.to_string())?;
        let mut copy = Pickle::new();
        copy.ops(b"}");
        let is_of_ranks = |key: &str| stage < 3 && [base, flat, "param_slice_mappings"].contains(&key);
        let items = pickle.items(state).unwrap_or_default();
        for (key, value) in items.iter().filter(|(key, _)| !pickle.text(*key).is_some_and(is_of_ranks)) {
            copy.copy(pickle, *key)?;
            match pickle.sequence(*value).filter(|_| stage < 3 && pickle.text(*key) == Some("group_paddings")) {
                // Parameters that are whole have none.
                Some(paddings) => {
                    copy.ops(b"]");
                    for _ in paddings {
                        copy.int(0);
                        copy.ops(b"a");
                    }
                }
                None => copy.copy(pickle, *value)?,
            }
            copy.ops(b"s");
        }
        copy.text("param_groups");
        copy.copy(pickle, groups)?;
        copy.ops(b"s");
        let (pickle, storages) = copy.finish();
        Ok(Copied { pickle, storages })
    }

    /// The items of a dictionary with text keys. A key that was set twice counts once, as it was set last.
    fn pairs(&self, what: &str, id: Id) -> Result<Vec<Named>, FormatError> {
        let items = self.pickle.items(id).ok_or_else(|| malformed(what, "a dict"))?;
        let named = |(key, value): &(Id, Id)| Some((self.pickle.text(*key)?.to_owned(), *value));
        items.iter().map(named).collect::<Option<_>>().ok_or_else(|| malformed(what, "names"))
    }

    fn shapes(&self, what: &str, id: Id) -> Result<Vec<Shaped>, FormatError> {
        let shape = |(name, id): Named| {
            let shape = self.pickle.sizes(id).ok_or_else(|| malformed(&name, "a shape"))?;
            Ok((name, shape))
        };
        self.pairs(what, id)?.into_iter().map(shape).collect()
    }
}
