//! The over-read that a plan reports, against a count over every device, tensor and piece.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::{collections::HashMap, fs, path::Path};

use crate::common::repo;
use ckfs::{
    checkpoint::Checkpoint,
    plan::{Amplification, Mesh, Plan, PlannedTensor, ViewOptions},
    source::page_size::page_bytes,
    tensor::{ByteRuns, Reads, TensorId, reads},
};

/// Bytes that all devices together read from the sources for some tensors.
fn reads_of(checkpoint: &Checkpoint, plan: &Plan, devices: &[u64], tensors: &[&PlannedTensor]) -> Reads {
    let mut runs: HashMap<TensorId, Vec<ByteRuns>> = HashMap::new();
    for device in devices {
        for tensor in tensors {
            let tiling = tensor.view.region(&plan.region(tensor, *device)).unwrap().lower().unwrap();
            for (source, found) in tiling.pieces().iter().flat_map(|piece| ByteRuns::of(&tiling, piece)) {
                runs.entry(source).or_default().push(found);
            }
        }
    }
    let mut all = Reads::default();
    for (source, runs) in runs {
        let span = checkpoint.tensor(source).span();
        all += reads(runs, &(span.start()..span.end()), page_bytes());
    }
    all
}

/// A name with its numbers as `*`.
fn starred(name: &str) -> String {
    let words = name.split('.').map(|word| if word.bytes().all(|byte| byte.is_ascii_digit()) { "*" } else { word });
    words.collect::<Vec<_>>().join(".")
}

/// Whether the plan could be built, after a check of its over-read.
fn check(checkpoint: &Checkpoint, options: &ViewOptions, what: &str) -> bool {
    let Ok(plan) = Plan::build(checkpoint, options) else { return false };
    let found = Amplification::of(checkpoint, &plan);
    let all: Vec<&PlannedTensor> = plan.bundle().collect();
    let each: Vec<Reads> = plan.devices.iter().map(|device| reads_of(checkpoint, &plan, &[*device], &all)).collect();
    assert_eq!(found.devices, each, "{what}");
    assert_eq!(found.union, reads_of(checkpoint, &plan, &plan.devices, &all), "{what}");
    for (name, most) in &found.tensors {
        let tensors: Vec<&PlannedTensor> = plan.bundle().filter(|tensor| starred(&tensor.name) == *name).collect();
        let of_device = |device: &u64| reads_of(checkpoint, &plan, &[*device], &tensors);
        let excess = plan.devices.iter().map(|device| of_device(device).excess_bytes()).max();
        assert_eq!(Some(most.excess_bytes()), excess, "{what}, {name}");
        assert!(plan.devices.iter().any(|device| of_device(device) == *most), "{what}, {name}");
    }
    true
}

#[test]
fn plans_of_every_family_report_the_over_read_of_an_exact_count() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/maxtext");
    let mut made = 0;
    for family in fs::read_dir(fixtures).unwrap() {
        let dir = family.unwrap().path().join("hf");
        let checkpoint = repo::open(&dir);
        for layout in ["canonical", "hf", "maxtext", "maxtext-unscanned"] {
            for (mesh, devices) in [
                ("", None),
                ("fsdp=4,tensor=2", None),
                ("tensor=2,expert=2,data=2", Some(vec![1, 2, 7])),
                ("tensor=4,fsdp=2", Some(vec![0, 1, 2])),
            ] {
                let options = ViewOptions {
                    mesh: Mesh::parse(mesh).unwrap(),
                    layout: repo::layout(layout),
                    devices,
                    ..ViewOptions::default()
                };
                made += u32::from(check(&checkpoint, &options, &format!("{} {layout} {mesh}", dir.display())));
            }
        }
    }
    assert!(made > 120, "{made} plans could be made");
}
