//! The names of files of ranks.

/// What the files of ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankKind {
    Fsdp,
    Zero,
    Megatron,
}

/// A file of ranks by its name, below the directory of all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RankFile<'a> {
    /// Of FSDP: number of ranks, and of this one, from 0.
    Fsdp { world: u64, rank: u64 },
    /// Model states of `DeepSpeed`: of one rank with ZeRO 3, else of all; and the rank of tensor parallelism.
    Model(Option<u64>, u64),
    /// The optimizer's partitions of a rank, and the rank of tensor parallelism.
    Optimizer(u64, u64),
    /// A part of a model that is spread in a way that is not read: stages of a pipeline, experts.
    OtherState,
    /// The master weights of a parameter of a universal checkpoint.
    Parameter(&'a str),
    /// Of Megatron: the numbers in the name of its directory.
    Megatron(Vec<u64>),
}

/// Where the parameters of a universal checkpoint are, and the file of each.
pub(super) const UNIVERSAL: (&str, &str) = ("zero/", "/fp32.pt");

/// The file in the directory of each rank of Megatron.
pub(crate) const MEGATRON_FILE: &str = "model_optim_rng.pt";

/// A number of digits.
fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Two numbers with this between them.
fn pair(text: &str, between: &str) -> Option<(u64, u64)> {
    let (first, second) = text.split_once(between)?;
    Some((digits(first)?, digits(second)?))
}

/// The numbers of a directory of Megatron's: `mp_rank_00`, `mp_rank_01_003`.
pub(crate) fn megatron_ranks(name: &str) -> Option<Vec<u64>> {
    name.strip_prefix("mp_rank_")?.split('_').map(digits).collect()
}

/// The number of ranks that a file by its name has the parts of one of; `None` if it has all.
pub(crate) fn parts_of(name: &str) -> Option<u64> {
    RankFile::of(RankKind::Fsdp, name)?.fsdp().map(|(world, _)| world).filter(|world| *world > 1)
}

impl<'a> RankFile<'a> {
    /// What a path is as a file of this kind.
    pub(crate) fn of(kind: RankKind, path: &'a str) -> Option<Self> {
        match kind {
            RankKind::Fsdp => {
                let numbers = path.strip_prefix("model_world_size_")?.strip_suffix(".pt")?;
                let (world, rank) = pair(numbers, "_rank_")?;
                // As programs write them.
                (numbers == format!("{world}_rank_{rank}")).then_some(Self::Fsdp { world, rank })
            }
            RankKind::Megatron => {
                let (directory, file) = path.split_once('/')?;
                let ranks = megatron_ranks(directory).filter(|ranks| file == MEGATRON_FILE && ranks.len() <= 3)?;
                Some(Self::Megatron(ranks))
            }
            RankKind::Zero => Self::of_zero(path),
        }
    }

    /// Number of ranks and the rank, of FSDP.
    pub(crate) const fn fsdp(&self) -> Option<(u64, u64)> {
        if let Self::Fsdp { world, rank } = self { Some((*world, *rank)) } else { None }
    }

    fn of_zero(path: &'a str) -> Option<Self> {
        let parameter = path.strip_prefix(UNIVERSAL.0).and_then(|rest| rest.strip_suffix(UNIVERSAL.1));
        if let Some(name) = parameter.filter(|name| !name.is_empty()) {
            return Some(Self::Parameter(name));
        }
        if path.contains('/') {
            return None;
        }
        let ranks = |stem: &str| pair(stem.strip_prefix("zero_pp_rank_")?, "_mp_rank_");
        if let Some(stem) = path.strip_suffix("_model_states.pt") {
            let model = ranks(stem).map(|(rank, mp)| Self::Model(Some(rank), mp));
            let of_all = || stem.strip_prefix("mp_rank_").and_then(digits).map(|mp| Self::Model(None, mp));
            return Some(model.or_else(of_all).unwrap_or(Self::OtherState));
        }
        if let Some(stem) = path.strip_suffix("_optim_states.pt") {
            let stem = ["bf16_", "fp16_"].iter().find_map(|prefix| stem.strip_prefix(prefix)).unwrap_or(stem);
            return Some(ranks(stem).map_or(Self::OtherState, |(rank, mp)| Self::Optimizer(rank, mp)));
        }
        (path.starts_with("layer_") && path.ends_with("-model_states.pt")).then_some(Self::OtherState)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_file_is() {
        let zero = |path| RankFile::of(RankKind::Zero, path);
        assert_eq!(zero("mp_rank_00_model_states.pt"), Some(RankFile::Model(None, 0)));
        assert_eq!(zero("zero_pp_rank_3_mp_rank_00_model_states.pt"), Some(RankFile::Model(Some(3), 0)));
        assert_eq!(zero("bf16_zero_pp_rank_12_mp_rank_01_optim_states.pt"), Some(RankFile::Optimizer(12, 1)));
        assert_eq!(zero("layer_01-model_00-model_states.pt"), Some(RankFile::OtherState));
        assert_eq!(zero("layer_0_expert_3_mp_rank_00_model_states.pt"), Some(RankFile::OtherState));
        assert_eq!(zero("expp_rank_0_mp_rank_00_optim_states.pt"), Some(RankFile::OtherState));
        assert_eq!(zero("global_step3/mp_rank_00_model_states.pt"), None);
        assert_eq!(zero("zero/a.weight/fp32.pt"), Some(RankFile::Parameter("a.weight")));
        assert_eq!(zero("zero/a.weight/exp_avg.pt"), None);
        let fsdp = |path| RankFile::of(RankKind::Fsdp, path);
        assert_eq!(fsdp("model_world_size_8_rank_3.pt"), Some(RankFile::Fsdp { world: 8, rank: 3 }));
        assert_eq!(fsdp("model_world_size_08_rank_3.pt"), None);
        assert_eq!(fsdp("model_world_size_+8_rank_3.pt"), None);
        let megatron = |path| RankFile::of(RankKind::Megatron, path);
        assert_eq!(megatron("mp_rank_01_003/model_optim_rng.pt"), Some(RankFile::Megatron(vec![1, 3])));
        assert_eq!(megatron("mp_rank_00/model_optim_rng.pt"), Some(RankFile::Megatron(vec![0])));
        for other in
            ["mp_rank_00/distrib_optim.pt", "mp_rank_x/model_optim_rng.pt", "mp_rank_0_1_2_3/model_optim_rng.pt"]
        {
            assert_eq!(megatron(other), None, "{other}");
        }
    }
}
