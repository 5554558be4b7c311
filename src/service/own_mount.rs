//! A part of a ckfs mount as a source: shards are no checkpoint, although each file of them is a valid one.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use ckfs_checkpoint::{Checkpoint, CheckpointError, Container};
use ckfs_config::Config;

use super::error::OpenError;

/// The file beside bundles whose tensors are whole.
const INDEX: &str = "model.safetensors.index.json";

/// Longest value of an attribute that is compared.
const ATTRIBUTE_BYTES: usize = 4096;

/// The mount that holds a path.
#[derive(Debug)]
struct OwnMount {
    root: PathBuf,
    /// Its plain repository, beside or above the path.
    whole: Option<PathBuf>,
    /// Its source.
    origin: Option<String>,
}

impl OwnMount {
    /// The mount whose files have this path.
    fn of(path: &Path) -> Option<Self> {
        let root = path.ancestors().find(|root| root.join(".ckfs/config.toml").is_file())?.to_owned();
        let within = path.ancestors().take_while(|part| part.starts_with(&root));
        let whole = within.map(|part| part.join("hf")).find(|whole| whole.is_dir());
        let origin = Config::load_alone(&root.join(".ckfs/config.toml")).ok().and_then(|config| config.source);
        Some(Self { root, whole, origin })
    }

    /// What to give instead.
    fn instead(&self) -> String {
        let whole = self.whole.as_ref().map_or_else(String::new, |whole| format!("{}, or ", whole.display()));
        let origin = self.origin.as_ref().map_or_else(String::new, |origin| format!(", {origin}"));
        format!("give {whole}the source of that mount{origin}")
    }
}

/// The directory of files that bundle the tensors of a device each, if the path is one, or a file in one.
fn bundles(path: &Path) -> Option<&Path> {
    let is_bundles = |part: &&Path| part.file_name().is_some_and(|name| name == "safetensors" || name == "pt");
    path.ancestors().take(2).find(is_bundles)
}

/// The message about shards.
fn of_shards(source: &str, mount: &OwnMount) -> String {
    format!("{source}: holds the shards of the devices of the ckfs mount {}; {}", mount.root.display(), mount.instead())
}

/// What to give instead of a part of a mount that cannot be opened. `None` for other paths and other errors.
pub fn advice(source: &str, error: &CheckpointError) -> Option<String> {
    let concerns_contents = matches!(
        error,
        CheckpointError::NoWeights { .. } | CheckpointError::SeveralFiles { .. } | CheckpointError::Problems { .. }
    );
    let path = std::path::absolute(source).ok().filter(|_| concerns_contents)?;
    let mount = OwnMount::of(&path)?;
    if bundles(&path).is_some() {
        return Some(of_shards(source, &mount));
    }
    // What is wrong with a whole checkpoint says its error.
    let is_part = matches!(error, CheckpointError::NoWeights { .. });
    let what = if path == mount.root { "the root" } else { "a part" };
    is_part.then(|| format!("{source}: {what} of the ckfs mount {}; {}", mount.root.display(), mount.instead()))
}

/// Refuses a source that opens as a checkpoint and has a part of each tensor only.
///
/// # Errors
/// If the source is files of shards of a ckfs mount, or one file of a checkpoint that several processes have written.
pub(super) fn refuse_shards(source: &str, checkpoint: &Checkpoint) -> Result<(), OpenError> {
    let Ok(path) = std::path::absolute(source) else { return Ok(()) };
    let is_file = path.is_file();
    let of_mount = bundles(&path).and_then(|bundles| Some((bundles, OwnMount::of(&path)?)));
    if let Some((bundles, mount)) = of_mount {
        let names: Vec<&str> = checkpoint.tensors().map(|(_, tensor)| tensor.name).collect();
        let is_part = if is_file {
            holds_parts(bundles, &path, &names)
        } else {
            !says_parts(bundles, checkpoint) && files(bundles).any(|file| holds_parts(bundles, &file, &names))
        };
        if is_part {
            return Err(OpenError::of_view(of_shards(source, &mount)));
        }
    }
    let directory = path.parent().filter(|_| is_file && checkpoint.container() == Container::Dcp);
    if let Some(directory) = directory.filter(|directory| has_others(directory, &path)) {
        return Err(OpenError::of_view(format!(
            "{source}: one of several files that hold parts of the same tensors (DCP_SHARDING_INFO); give the directory {}",
            directory.display()
        )));
    }
    Ok(())
}

/// Whether a directory of bundles says where the parts belong, or that its tensors are whole.
fn says_parts(bundles: &Path, checkpoint: &Checkpoint) -> bool {
    checkpoint.container() == Container::Dcp || bundles.join(INDEX).is_file()
}

/// Whether the mount's own files of these tensors say that this device's file holds parts of them.
fn holds_parts(bundles: &Path, file: &Path, names: &[&str]) -> bool {
    let (Some(base), Some(device)) = (bundles.parent(), file.file_stem()) else { return false };
    let raw = base.join(device);
    names.iter().any(|name| {
        let raw = [raw.join(name.replace('.', "/")), raw.join(name)];
        let shapes = raw
            .iter()
            .find_map(|file| Some((attribute(file, "user.ckfs.shape")?, attribute(file, "user.ckfs.global_shape")?)));
        shapes.is_some_and(|(shape, whole)| shape != whole)
    })
}

fn attribute(file: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; ATTRIBUTE_BYTES];
    let len = rustix::fs::getxattr(file, name, &mut value).ok()?;
    value.truncate(len);
    Some(value)
}

/// Whether a directory has other files of parts. Where there is an index, tensors are whole.
fn has_others(directory: &Path, file: &Path) -> bool {
    if directory.join(INDEX).is_file() {
        return false;
    }
    files(directory)
        .any(|other| other != file && other.extension().is_some_and(|ending| ending == OsStr::new("safetensors")))
}

fn files(directory: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_checkpoint::Problem;

    #[test]
    fn parts_of_a_mount_that_cannot_be_opened_lead_to_its_whole_tensors() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        for new in ["mnt/.ckfs", "mnt/hf", "mnt/safetensors", "mnt/dev0", "mnt/orbax/0", "safetensors"] {
            fs::create_dir_all(at(new)).unwrap();
        }
        fs::write(at("mnt/.ckfs/config.toml"), "source = '/data/llama'\n").unwrap();
        let problems =
            || CheckpointError::Problems { label: "x".to_owned(), problems: vec![Problem::TooLarge], more: 0 };
        let empty = || CheckpointError::NoWeights { root: PathBuf::new(), subdirectories: Vec::new(), found: None };
        let (mount, instead) = (at("mnt"), format!("give {}, or the source of that mount, /data/llama", at("mnt/hf")));
        let shards = |of: &str| format!("{of}: holds the shards of the devices of the ckfs mount {mount}; {instead}");
        let rows = [
            (at("mnt/safetensors"), problems(), Some(shards(&at("mnt/safetensors")))),
            (at("mnt/safetensors/dev1.safetensors"), problems(), Some(shards(&at("mnt/safetensors/dev1.safetensors")))),
            (at("mnt"), empty(), Some(format!("{mount}: the root of the ckfs mount {mount}; {instead}"))),
            (at("mnt/dev0"), empty(), Some(format!("{}: a part of the ckfs mount {mount}; {instead}", at("mnt/dev0")))),
            (at("mnt/orbax/0"), problems(), None),
            (at("safetensors"), problems(), None),
        ];
        for (source, error, expected) in rows {
            assert_eq!(advice(&source, &error), expected, "{source}");
        }
    }
}
