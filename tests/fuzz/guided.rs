//! One target of `targets.rs` under libFuzzer; `CKFS_FUZZ_TARGET` names it.
#![no_main]

mod targets;

use std::{fs, path::Path, sync::OnceLock};

use targets::{TARGETS, Target};

fn target() -> &'static Target {
    static CHOSEN: OnceLock<&'static Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("CKFS_FUZZ_TARGET").unwrap_or_default();
        TARGETS
            .iter()
            .find(|target| target.name == name)
            .unwrap_or_else(|| panic!("CKFS_FUZZ_TARGET={name}: no such target"))
    })
}

/// Writes where libFuzzer begins: valid input, and the corpus.
fn write_seeds() {
    let Some(directory) = std::env::var_os("CKFS_FUZZ_SEEDS") else { return };
    let inputs = targets::seeds(target()).into_iter().chain(targets::corpus(target()));
    for (number, input) in inputs.enumerate() {
        fs::write(Path::new(&directory).join(format!("{number:04}")), input).expect("a directory for seeds");
    }
}

libfuzzer_sys::fuzz_target!(init: write_seeds(), |bytes: &[u8]| {
    (target().check)(bytes);
});
