//! The files that are materialized: selected once, at mount, from the setting, the sizes, and the budget.

use std::{fmt::Write, path::PathBuf};

use ckfs_config::Materialize;
use ckfs_plan::report::human_bytes;
use ckfs_source::page_size::allocation_page_bytes;
use serde_json::{Value, json};

/// Smaller files are not materialized: the kernel reads them with one or two requests.
pub(crate) const BYTES_MIN: u64 = 1 << 20;

/// Contents of a file, as far as materialization needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileClass {
    /// One tensor, or a part of one, whose bytes are as in its source.
    Untransformed,
    /// One tensor, or a part of one, converted or gathered.
    Tensor,
    /// All tensors of a device.
    Bundle,
    /// Several tensors, of which a reader may need only a few.
    Mixed,
}

/// When a file is materialized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// When it is opened. The open waits, so that the kernel reads the whole file directly.
    Opened,
    /// After it was closed.
    Closed,
}

/// The bundles that a mount lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BundleSizes {
    /// Number of bundles.
    pub files: u64,
    /// Memory for all of them, in bytes.
    pub bytes: u64,
}

impl BundleSizes {
    /// Adds a bundle of tensors of this many bytes.
    pub fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes =
            self.bytes.saturating_add(bytes.saturating_add(1).next_multiple_of(allocation_page_bytes() as u64));
    }
}

/// The files that are materialized, and their storage.
#[derive(Clone, Debug)]
pub struct Policy {
    wanted: Materialize,
    /// Most bytes of all files in memory together, and of one file.
    budget_bytes: u64,
    file_bytes_max: u64,
    bundles: BundleSizes,
}

impl Policy {
    /// The policy for a setting, where files together may take `budget_bytes` of memory.
    pub fn new(wanted: Materialize, budget_bytes: u64, bundles: BundleSizes) -> Self {
        // Half of the cache (the budget is three quarters of it), so that files do not evict each other in turn.
        Self { wanted, budget_bytes, file_bytes_max: budget_bytes / 3 * 2, bundles }
    }

    /// The directory of the files, if they are on a disk.
    pub fn directory(&self) -> Option<&PathBuf> {
        match &self.wanted {
            Materialize::Dir(directory) => Some(directory),
            Materialize::None | Materialize::Auto | Materialize::Memory => None,
        }
    }

    /// Whether files are materialized in memory.
    pub fn in_memory(&self) -> bool {
        matches!(self.wanted, Materialize::Auto | Materialize::Memory)
    }

    /// Whether all bundles fit the budget together.
    pub(crate) fn bundles_fit(&self) -> bool {
        self.bundles.bytes <= self.budget_bytes
    }

    /// When a file of `len_bytes` bytes is materialized; `None` for never.
    pub(crate) fn when(&self, class: FileClass, len_bytes: u64) -> Option<When> {
        let fits = (BYTES_MIN..=self.file_bytes_max).contains(&len_bytes);
        match (&self.wanted, class) {
            (Materialize::None, _) | (Materialize::Auto, FileClass::Untransformed | FileClass::Mixed) => None,
            (Materialize::Dir(_), _) => Some(When::Closed),
            (Materialize::Auto, FileClass::Bundle) => {
                (self.bundles_fit() && len_bytes >= BYTES_MIN).then_some(When::Opened)
            }
            (Materialize::Auto, FileClass::Tensor) | (Materialize::Memory, _) => fits.then_some(When::Opened),
        }
    }

    /// The policy as one line of the plan.
    pub fn text(&self) -> String {
        let (least, most, budget) =
            (human_bytes(BYTES_MIN), human_bytes(self.file_bytes_max), human_bytes(self.budget_bytes));
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = match &self.wanted {
            Materialize::None => writeln!(text, "in memory   no file is materialized (--materialize none)"),
            Materialize::Dir(directory) => writeln!(
                text,
                "on disk     as root, since Linux 6.9, every tensor file, in {} after it was closed (--materialize)",
                ckfs_checkpoint::printable(&directory.display().to_string())
            ),
            Materialize::Memory => writeln!(
                text,
                "in memory   as root, when opened, every tensor file from {least} to {most}, {budget} at a time (--materialize memory)"
            ),
            Materialize::Auto => {
                let BundleSizes { files, bytes } = self.bundles;
                let bundles = if self.bundles_fit() {
                    format!("and {files} bundles of {} together", human_bytes(bytes))
                } else {
                    // A quarter of the cache is left for tiles.
                    let needed = human_bytes(bytes.saturating_add(bytes / 3));
                    format!("but no bundle, as {files} of {} do not fit (--cache-bytes {needed})", human_bytes(bytes))
                };
                writeln!(
                    text,
                    "in memory   kept after the first open, as root: files of one converted tensor from {least} to {most}, \
                     {bundles}; {budget} at a time (--materialize, --cache-bytes); chunks after the second open; the first open of \
                     a file that is read once or untransformed goes past the page cache"
                )
            }
        };
        text
    }

    /// The same as JSON.
    pub fn to_json(&self) -> Value {
        let (where_, what) = match &self.wanted {
            Materialize::None => ("nowhere", "none"),
            Materialize::Auto => ("memory", "auto"),
            Materialize::Memory => ("memory", "memory"),
            Materialize::Dir(_) => ("disk", "all"),
        };
        let tensors = match self.when(FileClass::Tensor, BYTES_MIN) {
            Some(_) if self.in_memory() => json!({"min_bytes": BYTES_MIN, "max_bytes": self.file_bytes_max}),
            Some(_) => json!({"min_bytes": 0, "max_bytes": null}),
            None => Value::Null,
        };
        json!({
            "choice": what,
            "place": where_,
            "directory": self.directory().map(|directory| directory.display().to_string()),
            "budget_bytes": self.budget_bytes,
            "files_of_one_tensor": tensors,
            "bundles": {
                "files": self.bundles.files,
                "bytes": self.bundles.bytes,
                "fit": self.bundles_fit(),
                "materialized": self.when(FileClass::Bundle, BYTES_MIN).is_some(),
            },
            "mixed": self.when(FileClass::Mixed, BYTES_MIN).is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn policy(wanted: Materialize, bundle_bytes: &[u64]) -> Policy {
        let mut bundles = BundleSizes::default();
        for bytes in bundle_bytes {
            bundles.add(*bytes);
        }
        Policy::new(wanted, 96 * MIB, bundles)
    }

    #[test]
    fn class_size_and_budget_select_the_materialized_files() {
        use FileClass::{Bundle, Mixed, Tensor, Untransformed};
        let (few, many) = (vec![47 * MIB; 2], vec![48 * MIB; 2]);
        assert_eq!(policy(Materialize::Auto, &few).bundles, BundleSizes { files: 2, bytes: 96 * MIB });
        let rows = [
            (Materialize::Auto, &few, Tensor, MIB, Some(When::Opened)),
            (Materialize::Auto, &few, Tensor, 64 * MIB, Some(When::Opened)),
            (Materialize::Auto, &few, Tensor, MIB - 1, None),
            (Materialize::Auto, &few, Tensor, 64 * MIB + 1, None),
            (Materialize::Auto, &few, Bundle, 47 * MIB, Some(When::Opened)),
            (Materialize::Auto, &few, Bundle, MIB - 1, None),
            (Materialize::Auto, &many, Bundle, 48 * MIB, None),
            (Materialize::Auto, &many, Tensor, MIB, Some(When::Opened)),
            (Materialize::Auto, &few, Mixed, 2 * MIB, None),
            (Materialize::Auto, &few, Untransformed, 2 * MIB, None),
            (Materialize::Memory, &few, Untransformed, 2 * MIB, Some(When::Opened)),
            (Materialize::Memory, &many, Bundle, 48 * MIB, Some(When::Opened)),
            (Materialize::Memory, &many, Mixed, 2 * MIB, Some(When::Opened)),
            (Materialize::Memory, &many, Mixed, 65 * MIB, None),
            (Materialize::Memory, &few, Tensor, MIB, Some(When::Opened)),
            (Materialize::None, &few, Tensor, MIB, None),
            (Materialize::Dir("/d".into()), &many, Mixed, 1, Some(When::Closed)),
        ];
        for (wanted, bundles, class, len, expected) in rows {
            assert_eq!(policy(wanted.clone(), bundles).when(class, len), expected, "{wanted:?} {class:?} {len}");
        }
    }

    #[test]
    fn the_plan_reports_misfits_and_the_sufficient_size() {
        let text = policy(Materialize::Auto, &[48 * MIB, 48 * MIB]).text();
        assert!(text.contains("no bundle, as 2 of 100 MiB do not fit (--cache-bytes 133 MiB)"), "{text}");
        let text = policy(Materialize::Auto, &[]).text();
        assert!(
            text.contains("as root: files of one converted tensor from 1.0 MiB to 64.0 MiB, and 0 bundles of 0 B together; 96.0 MiB"),
            "{text}"
        );
        assert_eq!(policy(Materialize::None, &[]).to_json()["files_of_one_tensor"], Value::Null);
        assert_eq!(policy(Materialize::Dir("/d".into()), &[]).to_json()["place"], "disk");
    }
}
