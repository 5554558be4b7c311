//! Files that ranks write, one each: whether all are there.

use std::collections::BTreeSet;

use super::found::StepKind;
use crate::{
    ranks::{RankFile, RankKind, world_of},
    tree::{TreeEntry, directories, file_names},
};

/// Directories in which trainers of reinforcement learning leave the model that is trained.
pub(super) const MODEL_DIRECTORIES: [&str; 3] = ["actor", "policy", "model"];

/// The files of FSDP or of `DeepSpeed` among these: why they are not all there, or `Ok`.
pub(super) fn of_files(entries: &[TreeEntry]) -> Option<(StepKind, Result<(), String>)> {
    let shards: Vec<_> = file_names(entries).filter_map(|name| RankFile::of(RankKind::Fsdp, name)?.fsdp()).collect();
    if shards.is_empty() {
        return of_deepspeed(entries).map(|all| (StepKind::DeepSpeed, all));
    }
    Some((StepKind::RankFiles, world_of(&shards).map(drop)))
}

/// Whether files of `DeepSpeed` are among these: why they are not all there, or `Ok`.
fn of_deepspeed(entries: &[TreeEntry]) -> Option<Result<(), String>> {
    if directories(entries).any(|name| name == "zero") {
        return Some(Ok(()));
    }
    let optimizer: Vec<&str> = file_names(entries).filter(|name| name.ends_with("_optim_states.pt")).collect();
    let model: Vec<&str> = file_names(entries).filter(|name| name.ends_with("_model_states.pt")).collect();
    if optimizer.is_empty() && model.is_empty() {
        return None;
    }
    if optimizer.is_empty() || model.is_empty() {
        let missing = if model.is_empty() { "_model_states.pt" } else { "_optim_states.pt" };
        return Some(Err(format!("no file *{missing}")));
    }
    // ZeRO 3 writes as many of one kind as of the other; the others one of the model for each rank of tensor parallelism.
    let rank = |name: &&str| {
        let Some(RankFile::Optimizer(rank, _)) = RankFile::of(RankKind::Zero, name) else { return None };
        Some(rank)
    };
    let ranks: BTreeSet<u64> = optimizer.iter().filter_map(rank).collect();
    let partitioned = model.iter().filter(|name| name.contains("zero_pp_rank_")).count();
    let missing = (0..).zip(&ranks).find(|(expected, found)| expected != *found).map(|(expected, _)| expected);
    if let Some(rank) = missing {
        return Some(Err(format!("zero_pp_rank_{rank}_*_optim_states.pt is missing")));
    }
    if partitioned > 0 && partitioned != optimizer.len() {
        let (of, found) = (optimizer.len().max(partitioned), optimizer.len().min(partitioned));
        return Some(Err(format!("{found} of {of} ranks have files of both kinds")));
    }
    Some(Ok(()))
}

/// Why these ranks are no full grid; `None` if they are.
pub(super) fn lacks_of_grid(ranks: &[Vec<u64>]) -> Option<String> {
    let axes = ranks.first()?.len();
    if ranks.iter().any(|rank| rank.len() != axes) {
        return Some("directories mp_rank_* of two kinds".to_owned());
    }
    let extents = (0..axes).map(|axis| ranks.iter().map(|rank| rank[axis] + 1).max().unwrap_or(1));
    let expected = extents.fold(1_u64, u64::saturating_mul);
    (expected != ranks.len() as u64).then(|| format!("{} of {expected} directories mp_rank_* are there", ranks.len()))
}
