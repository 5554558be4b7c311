//! Files that ranks write, one each: whether all are there.

use super::step_tree::StepEntry;

/// Directories in which trainers of reinforcement learning leave the model that is trained.
pub(super) const MODEL_DIRECTORIES: [&str; 3] = ["actor", "policy", "model"];

/// The world size and the rank in `model_world_size_8_rank_3.pt`.
fn of_rank(name: &str) -> Option<(u64, u64)> {
    let rest = name.strip_prefix("model_world_size_")?.strip_suffix(".pt")?;
    let (size, rank) = rest.split_once("_rank_")?;
    Some((size.parse().ok()?, rank.parse().ok()?))
}

/// Whether files of ranks are among these: why they are not all there, or `Ok`.
pub(super) fn of_shards(entries: &[StepEntry]) -> Option<Result<(), String>> {
    let files = entries.iter().filter(|entry| !entry.is_directory);
    let mut found: Vec<(u64, u64)> = files.filter_map(|entry| of_rank(&entry.name)).collect();
    found.sort_unstable();
    let (size, _) = *found.last()?;
    if found.iter().any(|(other, _)| *other != size) {
        return Some(Err("files of two world sizes".to_owned()));
    }
    let missing = (0..size).find(|rank| !found.contains(&(size, *rank)));
    Some(missing.map_or(Ok(()), |rank| Err(format!("model_world_size_{size}_rank_{rank}.pt is missing"))))
}

/// The numbers after a word in a name: `1` and `0` in `bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt`, by words.
fn number_after(name: &str, word: &str) -> Option<u64> {
    let (_, rest) = name.split_once(word)?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    rest[..digits].parse().ok()
}

/// Whether files of `DeepSpeed` are among these: why they are not all there, or `Ok`.
pub(super) fn of_deepspeed(entries: &[StepEntry]) -> Option<Result<(), String>> {
    let names: Vec<&str> =
        entries.iter().filter(|entry| !entry.is_directory).map(|entry| entry.name.as_str()).collect();
    if entries.iter().any(|entry| entry.is_directory && entry.name == "zero") {
        return Some(Ok(()));
    }
    let optimizer: Vec<&&str> = names.iter().filter(|name| name.ends_with("_optim_states.pt")).collect();
    let model: Vec<&&str> = names.iter().filter(|name| name.ends_with("_model_states.pt")).collect();
    if optimizer.is_empty() && model.is_empty() {
        return None;
    }
    if optimizer.is_empty() || model.is_empty() {
        let missing = if model.is_empty() { "_model_states.pt" } else { "_optim_states.pt" };
        return Some(Err(format!("no file *{missing}")));
    }
    // ZeRO 3 writes as many of one kind as of the other; the others one of the model for each rank of tensor parallelism.
    let mut ranks: Vec<u64> = optimizer.iter().filter_map(|name| number_after(name, "zero_pp_rank_")).collect();
    ranks.sort_unstable();
    ranks.dedup();
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

/// Ranks of the directories of Megatron's classic checkpoints: `mp_rank_00`, `mp_rank_01_003`.
pub(super) fn of_megatron(name: &str) -> Option<Vec<u64>> {
    name.strip_prefix("mp_rank_")?.split('_').map(|digits| digits.parse().ok()).collect()
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
