//! Drawn models there and back: laid out for a trainer, written to disk as that trainer's checkpoint, cut for one mesh, and
//! shown as a repository for another. Every tensor has the bytes that it began with, or those of a formula of one line where the
//! trainer's layout multiplies or adds.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    ops::ControlFlow,
    path::Path,
    sync::Arc,
};

use crate::common::repo;
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::{Layout, Mesh, Plan, ViewOptions},
    tensor::DType,
    volume::{FileSystem, Ino, NodeKind, Volume},
};
use half::{bf16, f16};
use proptest::prelude::*;
use tempfile::TempDir;

use super::{
    models::{Arithmetic, Draw, FAMILIES, MEGATRON, Model, TORCHTITAN},
    open, read, volume,
};

const MESHES: [&str; 5] = ["", "fsdp=2", "fsdp=4,tensor=2", "fsdp=2,tensor=2", "tensor=3"];

fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let pair = |b: &[u8]| [b[0], b[1]];
    match dtype {
        DType::BF16 => bytes.chunks(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect(),
        DType::F16 => bytes.chunks(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect(),
        DType::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        other => panic!("{other}"),
    }
}

fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        other => panic!("{other}"),
    }
}

/// What comes back of a tensor.
fn expected(bytes: &[u8], arithmetic: Arithmetic, dtype: DType) -> Vec<u8> {
    let each =
        |work: &dyn Fn(f32) -> f32| encode(&decode(bytes, dtype).into_iter().map(work).collect::<Vec<_>>(), dtype);
    let round = |value: f32| decode(&encode(&[value], dtype), dtype)[0];
    match arithmetic {
        Arithmetic::None => bytes.to_vec(),
        Arithmetic::Scale(there, back) => each(&|value| round(value * there) * back),
        Arithmetic::PlusOne => each(&|value| (value + 1.0) - 1.0),
    }
}

/// Bytes of the tensors: any bits, except where there is arithmetic.
fn contents(model: &Model, dtype: DType, seed: u64) -> HashMap<String, Vec<u8>> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()[5]
    };
    let width = usize::try_from(dtype.element_bytes().unwrap()).unwrap();
    let mut made = HashMap::new();
    for tensor in &model.tensors {
        let elements = usize::try_from(tensor.shape.iter().product::<u64>()).unwrap();
        let bytes = if tensor.arithmetic == Arithmetic::None {
            (0..elements * width).map(|_| next()).collect()
        } else {
            let values: Vec<f32> = (0..elements).map(|_| (f32::from(next()) - 128.0) / 64.0).collect();
            encode(&values, dtype)
        };
        made.insert(tensor.name.clone(), bytes);
    }
    made
}

fn write_repository(directory: &Path, model: &Model, dtype: DType, contents: &HashMap<String, Vec<u8>>) {
    let code = match dtype {
        DType::BF16 => safetensors::Dtype::BF16,
        DType::F16 => safetensors::Dtype::F16,
        _ => safetensors::Dtype::F32,
    };
    let views = model.tensors.iter().map(|tensor| {
        let shape = tensor.shape.iter().map(|extent| usize::try_from(*extent).unwrap()).collect();
        let view = safetensors::tensor::TensorView::new(code, shape, &contents[&tensor.name]).unwrap();
        (tensor.name.clone(), view)
    });
    fs::create_dir(directory).unwrap();
    fs::write(directory.join("config.json"), model.config.to_string()).unwrap();
    fs::write(directory.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Writes what a volume has under `path` as files.
pub(crate) fn export(volume: &Volume, path: &str, to: &Path) {
    fn below(volume: &Volume, at: Ino, path: &str, to: &Path) {
        fs::create_dir_all(to).unwrap();
        let mut entries = Vec::new();
        let list = &mut |entry: ckfs::volume::DirEntry<'_>| {
            entries.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino, entry.kind));
            ControlFlow::Continue(())
        };
        volume.read_dir(at, 0, list).unwrap();
        for (name, ino, kind) in entries {
            let (path, to) = (format!("{path}/{name}"), to.join(&name));
            match kind {
                NodeKind::Directory => below(volume, ino, &path, &to),
                NodeKind::File => fs::write(to, read(volume, &path)).unwrap(),
                NodeKind::Symlink => panic!("{path} is a link"),
            }
        }
    }
    below(volume, volume.resolve(path).unwrap().ino, path, to);
}

/// The plan for the mesh, or for one device where the mesh does not divide the model.
fn plan(checkpoint: &Arc<Checkpoint>, options: &ViewOptions) -> Plan {
    Plan::build(checkpoint, options).unwrap_or_else(|error| {
        let error = error.to_string();
        let is_uneven = |line: &str| {
            line.contains("does not split evenly")
                || line.contains("sizes that divide all")
                || line.contains("no rule splits by it")
                || line.ends_with(" problems:")
                || line.ends_with(" more")
        };
        assert!(error.lines().all(is_uneven), "{error}");
        let alone = ViewOptions { mesh: Mesh::default(), ..options.clone() };
        Plan::build(checkpoint, &alone).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Elements of `ranges` of a whole tensor.
fn cut(whole: &[u8], shape: &[u64], ranges: &[std::ops::Range<u64>], width: u64) -> Vec<u8> {
    let mut offsets = vec![0u64];
    for (extent, range) in shape.iter().zip(ranges) {
        offsets = offsets.iter().flat_map(|at| range.clone().map(move |index| at * extent + index)).collect();
    }
    let byte = |at: u64| usize::try_from(at * width).unwrap();
    offsets.iter().flat_map(|at| whole[byte(*at)..byte(at + 1)].iter().copied()).collect()
}

/// How a drawn model is laid out and written.
#[derive(Debug)]
struct Way {
    layout: &'static str,
    /// Parameters there, and those of them that are needed back.
    set: Vec<(&'static str, String)>,
    set_back: Vec<(&'static str, String)>,
    dtype: DType,
    mesh: &'static str,
    mesh_back: &'static str,
    /// Directory of the mount that is written to disk.
    format: &'static str,
}

fn parameters(set: &[(&str, String)]) -> BTreeMap<String, String> {
    set.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

fn check(model: &Model, way: &Way, seed: u64) {
    let directory = TempDir::new().unwrap();
    let made = contents(model, way.dtype, seed);
    write_repository(&directory.path().join("hf"), model, way.dtype, &made);
    let repository = open(&directory.path().join("hf"), &OpenOptions::default());
    let options = ViewOptions {
        layout: repo::layout(way.layout),
        dtype: (way.dtype != DType::BF16).then_some(way.dtype),
        set: parameters(&way.set),
        mesh: Mesh::parse(way.mesh).unwrap(),
        ..ViewOptions::default()
    };
    let there = plan(&repository, &options);
    let saved = directory.path().join("saved");
    export(&volume(&repository, there), way.format, &saved);
    // The configuration lies alone, so that nothing else of the repository is read.
    let config = directory.path().join("config");
    fs::create_dir(&config).unwrap();
    fs::rename(directory.path().join("hf/config.json"), config.join("config.json")).unwrap();
    fs::remove_dir_all(directory.path().join("hf")).unwrap();
    let config_from = Some(config.display().to_string());
    let checkpoint = open(&saved, &OpenOptions { config_from, ..OpenOptions::default() });
    let options = ViewOptions {
        layout: Layout::Hf,
        dtype: (way.dtype == DType::F16).then_some(way.dtype),
        set: parameters(&way.set_back),
        mesh: Mesh::parse(way.mesh_back).unwrap(),
        ..ViewOptions::default()
    };
    let back = plan(&checkpoint, &options);
    let shown = volume(&checkpoint, back.clone());
    let mut names: Vec<&str> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    let mut found: Vec<&str> = back.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    found.sort_unstable();
    assert_eq!(found, names);
    let width = way.dtype.element_bytes().unwrap();
    for drawn in &model.tensors {
        let tensor = back.tensors.iter().find(|tensor| tensor.name == drawn.name).unwrap();
        let name = &drawn.name;
        assert_eq!((tensor.view.shape().extents(), tensor.view.dtype()), (drawn.shape.as_slice(), way.dtype), "{name}");
        let wanted = expected(&made[name], drawn.arithmetic, way.dtype);
        assert!(read(&shown, &format!("full/{name}")) == wanted, "{name}");
        for device in 0..back.mesh.devices() {
            let ranges: Vec<_> = back.region(tensor, device).ranges().collect();
            let part = cut(&wanted, &drawn.shape, &ranges, width);
            assert!(read(&shown, &format!("dev{device}/{name}")) == part, "dev{device} {name}");
        }
    }
}

fn padded(model: &Model, draw: &mut Draw) -> Vec<(&'static str, String)> {
    let more = draw.of(&[0, 0, 8, 5]);
    if more == 0 { Vec::new() } else { vec![("vocab_size", (model.vocab + more).to_string())] }
}

fn choices() -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(any::<u32>(), 24..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn maxtexts_layouts_of_drawn_models_come_back(choices in choices(), seed in any::<u64>()) {
        let mut draw = Draw::new(choices);
        let family = draw.of(&FAMILIES);
        let model = Model::draw(family, &mut draw);
        let layout = draw.of(&["maxtext", "maxtext-unscanned"]);
        let mut set = padded(&model, &mut draw);
        let mut set_back = Vec::new();
        if family == "llama" && draw.next().is_multiple_of(2) {
            set.push(("rope", "halves".to_owned()));
            set_back.push(("rope", "halves".to_owned()));
        }
        if layout == "maxtext" && draw.next().is_multiple_of(3) {
            set.push(("param_scan_axis", "0".to_owned()));
            set_back.push(("param_scan_axis", "0".to_owned()));
        }
        let way = Way {
            layout,
            set,
            set_back,
            dtype: draw.of(&[DType::BF16, DType::F32, DType::F16]),
            mesh: draw.of(&MESHES),
            mesh_back: draw.of(&MESHES),
            format: draw.of(&["orbax", "dcp"]),
        };
        check(&model, &way, seed);
    }

    #[test]
    fn megatrons_layouts_of_drawn_models_come_back(choices in choices(), seed in any::<u64>()) {
        let mut draw = Draw::new(choices);
        let family = draw.of(&MEGATRON);
        let mut model = Model::draw(family, &mut draw);
        // Nothing is computed: any bits come back.
        model.tensors.iter_mut().for_each(|tensor| tensor.arithmetic = Arithmetic::None);
        let mut set = padded(&model, &mut draw);
        if draw.next().is_multiple_of(2) {
            set.push(("fused_norms", "false".to_owned()));
        }
        if ["mixtral", "qwen3_moe"].contains(&family) && draw.next().is_multiple_of(2) {
            set.push(("experts_norm", "false".to_owned()));
        }
        let way = Way {
            layout: draw.of(&["megatron", "megatron-unscanned"]),
            set,
            set_back: Vec::new(),
            dtype: draw.of(&[DType::BF16, DType::F32, DType::F16]),
            mesh: draw.of(&MESHES),
            mesh_back: draw.of(&MESHES),
            format: draw.of(&["dcp", "orbax"]),
        };
        check(&model, &way, seed);
    }

    #[test]
    fn torchtitans_layout_of_drawn_models_comes_back(choices in choices(), seed in any::<u64>()) {
        let mut draw = Draw::new(choices);
        let mut model = Model::draw(draw.of(&TORCHTITAN), &mut draw);
        // Nothing is computed: any bits come back.
        model.tensors.iter_mut().for_each(|tensor| tensor.arithmetic = Arithmetic::None);
        let way = Way {
            layout: "torchtitan",
            set: Vec::new(),
            set_back: Vec::new(),
            dtype: draw.of(&[DType::BF16, DType::F32, DType::F16]),
            mesh: draw.of(&MESHES),
            mesh_back: draw.of(&MESHES),
            format: draw.of(&["dcp", "safetensors"]),
        };
        check(&model, &way, seed);
    }
}
