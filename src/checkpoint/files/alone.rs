//! A file that is given by itself and is a part of something: a shard of a numbered set, the file of one rank, an adapter.
//!
//! Its name tells, or the files beside it: those of other ranks, or an index that names it among others. A file with a name of its
//! own is a model by itself.

use std::{fs, path::Path};

use ckfs_source::{FoundFile, WaitRegistry};

use super::super::{
    adapter::{ADAPTER_CONFIG, is_adapter_file, not_a_model},
    choose::SINGLE,
    container::is_weights,
    index::Index,
    json::read_json,
    ranks::parts_of,
    sets::incomplete_sets,
    weight_name::{WeightName, is_any_index, of_any_rank},
};

/// Most files beside one that are looked at.
const BESIDE_MAX: usize = 10_000;

/// What the file at `path` is a part of, and the way out; `None` if it may be a model by itself. With `is_here` it is a file of this
/// machine, and those beside it are looked at.
pub(crate) fn part_of(path: &Path, is_here: bool, fetches: &WaitRegistry) -> Option<String> {
    let name = path.file_name()?.to_str().filter(|name| is_weights(name))?;
    let directory = path.parent().filter(|_| is_here);
    let place = directory.map_or_else(String::new, |directory| format!(", {}", directory.display()));
    let whole = |what: String| Some(format!("{what}: give the directory with the files of all of them{place}"));
    if let Some(world) = parts_of(name) {
        return whole(format!("the parts of one of {world} ranks"));
    }
    if let (Some(WeightName { number: Some((number, total)), .. }), (problems, warnings)) =
        (WeightName::of(name), incomplete_sets([name].into_iter()))
        && problems.len() + warnings.len() > 0
        && total.parse() != Ok(1)
    {
        return whole(format!("file {number} of {total} by its name, not the whole checkpoint"));
    }
    let directory = directory?;
    let _looking = fetches.begin_path(directory, "list");
    let beside: Vec<String> = fs::read_dir(directory)
        .ok()?
        .take(BESIDE_MAX)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok().filter(|other| other != name))
        .collect();
    if is_adapter_file(name) && beside.iter().any(|other| other == ADAPTER_CONFIG) {
        return Some(not_a_model(name, None, &directory.display().to_string()));
    }
    let set = of_any_rank(name);
    if let Some(other) = beside.iter().find(|other| set.is_some() && of_any_rank(other) == set) {
        return whole(format!("the parts of one rank, as {other} beside it has those of another"));
    }
    let is_named = |index: &&String| {
        let text = FoundFile::named(&directory.join(index)).ok()?.open(None).ok();
        let text = read_json(&text?, fetches).ok()?;
        let files = Index::parse(&text).ok()?.files;
        Some(files.len() > 1 && files.iter().any(|file| file == name))
    };
    let mut indexes = beside.iter().filter(|other| name != SINGLE && is_any_index(other));
    let index = indexes.find(|index| is_named(index) == Some(true))?;
    whole(format!("one of several files that {index} beside it names"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_known_by_its_name_or_by_what_is_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let part = |name: &str| part_of(&dir.path().join(name), true, &WaitRegistry::default()).unwrap_or_default();
        let expect = |name: &str, expected: &str| {
            let found = part(name);
            let place = dir.path().to_str().unwrap();
            assert!(found.starts_with(expected) && found.ends_with(place), "{name}: {found}");
        };
        write("x.safetensors.index.json", r#"{"weight_map": {"a": "first.safetensors", "b": "model.safetensors"}}"#);
        write("adapter_config.json", "{}");
        write("model_tp1.safetensors", "");
        write("consolidated.01.pth", "");
        expect("model-00001-of-00002.safetensors", "file 00001 of 00002 by its name");
        expect("model00001-of-00002.safetensors", "file 00001 of 00002 by its name");
        expect("pytorch_model_2_of_3.bin", "file 2 of 3 by its name");
        expect("model_world_size_4_rank_0.pt", "the parts of one of 4 ranks");
        expect("model_tp0.safetensors", "the parts of one rank, as model_tp1.safetensors beside it");
        expect("consolidated.00.pth", "the parts of one rank, as consolidated.01.pth beside it");
        let found = part("adapter_model.safetensors");
        let way = format!("give its base as the source; --merge-lora {} merges", dir.path().display());
        assert!(found.starts_with("an adapter, not a model") && found.contains(&way), "{found}");
        expect("first.safetensors", "one of several files that x.safetensors.index.json beside it names");
        for whole in [
            "model.safetensors",
            "diffusion_pytorch_model.fp16.safetensors",
            "model-00001-of-00001.safetensors",
            "model-00000-of-00001.safetensors",
            "my.pt",
            "model_pp0.safetensors",
            "rank0.safetensors",
            "model-v1-of-3.safetensors",
        ] {
            assert_eq!(part(whole), "", "{whole}");
        }
        let remote = |name: &str| part_of(Path::new(name), false, &WaitRegistry::default());
        assert_eq!(remote("s3://b/x/first.safetensors"), None);
        let expected =
            "file 1 of 2 by its name, not the whole checkpoint: give the directory with the files of all of them";
        assert_eq!(remote("s3://b/x/model-1-of-2.safetensors").as_deref(), Some(expected));
    }
}
