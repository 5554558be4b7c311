//! The module `ckfs._ckfs`: a checkpoint's tensors as bytes in memory of a Python program.
//!
//! An adapter over [`Service`](ckfs_service::Service), as the kernel's requests have one. It takes names, regions and memory from
//! Python, has the read layer fill the memory, and turns errors into exceptions. Everything that needs no speed is Python: shapes,
//! dtypes, indexes, torch and jax are in `src/python/ckfs`.
//!
//! | module | holds |
//! | --- | --- |
//! | `opened` | the class of an opened checkpoint |
//! | `loading` | regions of tensors into memory: cut into parts, made by threads, while signals are handled |
//! | `files` | the files of a mount, for `ckfs/filesystem.py` |
//! | `memory` | buffers of Python that threads write to |
//! | `keyword` | settings from Python's values |
//! | `warning` | what the opening of a checkpoint warns of |
//! | `failure` | exceptions |
//! | `process` | threads for what may wait; a child of `fork` has none of them |
//!
//! It does not decide: which tensors, which region of a device, which dtype is the plan's or the caller's.

mod failure;
mod files;
mod keyword;
mod loading;
mod memory;
mod opened;
mod process;
mod warning;

/// The module.
#[pyo3::pymodule(name = "_ckfs")]
mod module {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use super::files::{entries, entry, read};
    #[pymodule_export]
    use super::keyword::settings;
    #[pymodule_export]
    use super::opened::{OpenedCheckpoint, open};
}
