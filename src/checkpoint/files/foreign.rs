//! Explains why an unsupported input (GGML, msgpack, ...) is refused, and what works instead.

use std::{collections::BTreeSet, path::Path};

use ckfs_format::dcp::read::METADATA as DCP_METADATA;
use ckfs_source::{FileId, Source, SourceError};

use super::super::{
    file::FileRole,
    listing::Listed,
    ranks::{MEGATRON_FILE, RankFile, RankKind},
};

/// Bytes at the start of a file that tell what it is.
const HEAD_BYTES: u64 = 512;

/// What files begin with, what they then are, and what would work.
const MAGIC: [(&[u8], &str); 10] = [
    (b"GGML", "a GGML file of llama.cpp: use the Hugging Face repository that it was converted from"),
    (b"ggjt", "a GGML file of llama.cpp: use the Hugging Face repository that it was converted from"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write: load it there and save safetensors"),
    (b"\x93NUMPY", "an array of numpy: save it as safetensors (safetensors.numpy.save_file)"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"<!DOCTYPE html", "a web page: the download did not give the file"),
    (b"<html", "a web page: the download did not give the file"),
];

/// How pointers of git LFS begin; the second is the way of its first releases.
const LFS: [&[u8]; 2] = [b"version https://git-lfs", b"version https://hawser"];
/// Longest pointer, by its specification.
pub(crate) const LFS_BYTES_MAX: u64 = 1024;
const LFS_HERE: &str = "a pointer of git LFS, not the file itself: run git lfs pull, or download the file";
const LFS_REMOTE: &str = "a pointer of git LFS, not the file itself: it was copied from a clone that had only pointers; copy the \
                          file itself there";

/// What a file is that begins like this, if it is a pointer of git LFS: here, or at a service of the network.
pub(crate) fn lfs_pointer(head: &[u8], is_remote: bool) -> Option<&'static str> {
    let text = if is_remote { LFS_REMOTE } else { LFS_HERE };
    LFS.iter().any(|start| head.starts_with(start)).then_some(text)
}

/// How the text of a file ends that is a part of a repository.
pub(crate) const ITS_DIRECTORY: &str = "give its directory";

/// What `flax_model.msgpack` is, and files of flax's own checkpoints.
const FLAX: &str = "parameters of Flax in msgpack: flax.serialization.msgpack_restore reads them; save them flat \
                    (flax.traverse_util.flatten_dict, sep=\".\") as safetensors (safetensors.flax.save_file)";
/// What a directory is with a file as [`is_msgpack_tree`] says.
pub(crate) const OLD_ORBAX: &str = "a checkpoint of Orbax or flax as until 2023, whose tree is in msgpack in the file checkpoint: \
                                    orbax.checkpoint.PyTreeCheckpointer() restores it and saves it as it is read here";

/// Whether Orbax and flax called the file of a tree so, where no file of `TensorFlow` is beside it.
pub(crate) fn is_msgpack_tree(name: &str) -> bool {
    let number = name.strip_prefix("checkpoint_");
    name == "checkpoint" || number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// The start of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";

/// What a single file is, by how it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// A file of `torch.save`, perhaps of an old kind that is refused with advice.
    Torch,
    /// A GGUF file of llama.cpp.
    Gguf,
    /// Safetensors, or what their reader refuses.
    Safetensors,
    /// Something else, in words.
    Foreign(&'static str),
}

/// What a file of this name with these first bytes is.
pub(crate) fn of_head(name: &str, head: &[u8]) -> FileKind {
    let name = name.to_ascii_lowercase();
    let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| name.ends_with(suffix));
    // First of all: the length of a header, in 8 bytes before it, may begin with the bytes of any other kind, 0x80 of a pickle among them.
    if head.len() > 8 && head[4..8] == [0; 4] && head[8] == b'{' {
        return FileKind::Safetensors;
    }
    if let Some(text) = lfs_pointer(head, false) {
        return FileKind::Foreign(text);
    }
    if head.starts_with(b"GGUF") {
        return FileKind::Gguf;
    }
    if let Some((_, text)) = MAGIC.iter().find(|(magic, _)| head.starts_with(magic)) {
        return FileKind::Foreign(text);
    }
    if head.starts_with(ZIP) {
        return match () {
            () if ends(&[".npz"]) => {
                FileKind::Foreign("arrays of numpy: save them as safetensors (safetensors.numpy.save_file)")
            }
            () if ends(&[".keras"]) => FileKind::Foreign("a Keras archive: load it there and save safetensors"),
            () => FileKind::Torch,
        };
    }
    let is_json = ends(&[".json"]) || head.trim_ascii_start().first() == Some(&b'{');
    if is_json {
        return FileKind::Foreign(match () {
            () if ends(&[".index.json"]) => "the index of a repository, not weights: give its directory",
            () if ends(&["config.json"]) => "the configuration of a repository, not weights: give its directory",
            () if ends(&[".json"]) => "a text in JSON, not weights: if it is of a repository, give its directory",
            () => "a text in JSON, not weights: the download did not give the file",
        });
    }
    // A map of less than 16 members, or one whose number of them follows, and a text as the first key.
    let map_bytes = match head.first() {
        Some(0x81..=0x8f) => 1,
        Some(0xde) => 3,
        _ => 0,
    };
    let is_msgpack = map_bytes > 0 && matches!(head.get(map_bytes), Some(0xa1..=0xbf | 0xd9));
    if ends(&[".msgpack"]) || is_msgpack {
        return FileKind::Foreign(FLAX);
    }
    if ends(&[".onnx"]) {
        return FileKind::Foreign("an ONNX model: use the repository that it was exported from");
    }
    let is_tar = head.get(257..262) == Some(b"ustar");
    if is_tar && ends(&[".pt", ".pth", ".bin", ".ckpt", ".pth.tar"]) {
        return FileKind::Foreign(
            "a tar archive: if torch wrote it (until 2017), load it with torch.load and save it with torch.save; else unpack it",
        );
    }
    if is_tar || ends(&[".nemo"]) {
        return FileKind::Foreign("a tar archive: unpack it and open the directory");
    }
    // A pickle that is no archive: what torch wrote until 2020, also under names that end with `.tar`.
    if head.first() == Some(&0x80) || ends(&[".pt", ".pth", ".bin", ".ckpt", ".tar"]) {
        return FileKind::Torch;
    }
    FileKind::Safetensors
}

/// What a file is.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn of_file(source: &dyn Source, file: FileId, name: &str) -> Result<FileKind, SourceError> {
    let head = source.read_bytes(file, 0, source.len_bytes(file).min(HEAD_BYTES))?;
    if let Some(text) = lfs_pointer(&head, source.remote().is_some()) {
        return Ok(FileKind::Foreign(text));
    }
    Ok(of_head(name, &head))
}

/// What a weight file is that its reader has refused, in words; `None` if it may be of that kind.
pub(crate) fn refused_file(source: &dyn Source, file: FileId, name: &str) -> Option<String> {
    match of_file(source, file, name) {
        Ok(FileKind::Foreign(text)) => Some(text.to_owned()),
        Ok(FileKind::Gguf) => Some("a GGUF file of llama.cpp: expected its name to end with .gguf".to_owned()),
        Ok(FileKind::Torch | FileKind::Safetensors) | Err(_) => None,
    }
}

/// What a directory without weights is, with what would work; `None` if nothing is known of it.
pub(crate) fn of_files(files: &[Listed]) -> Option<String> {
    let top = || files.iter().map(|file| file.path.as_str()).filter(|path| !path.contains('/'));
    let any = |test: &dyn Fn(&str) -> bool| top().any(test);
    if files.is_empty() {
        return Some("the directory is empty".to_owned());
    }
    let mut inside = checkpoints_inside(files);
    // The database in an item, and the item in a step, are no choices of their own.
    let all = inside.clone();
    inside.retain(|path| {
        !Path::new(path).ancestors().skip(1).any(|above| above.to_str().is_some_and(|it| all.contains(it)))
    });
    if !inside.is_empty() {
        let more = if inside.len() > 8 { ", and more" } else { "" };
        let shown: Vec<&str> = inside.iter().rev().take(8).map(String::as_str).collect();
        return Some(format!(
            "the directory holds checkpoints in subdirectories: open one of them: {}{more}",
            shown.join(", ")
        ));
    }
    let text = if any(&|name| name.ends_with(".distcp")) {
        "files of torch.distributed.checkpoint without .metadata: the save did not finish, or the file was not copied"
    } else if any(&|name| has_extension(name, "msgpack")) {
        FLAX
    } else if any(&|name| name == "saved_model.pb" || has_extension(name, "index")) {
        "a checkpoint of TensorFlow: load it with transformers 4 (from_tf=True) and save safetensors"
    } else if any(&is_msgpack_tree) {
        OLD_ORBAX
    } else if any(&|name| has_extension(name, "h5") || has_extension(name, "keras")) {
        "weights of Keras: load them there and save safetensors"
    } else if any(&|name| has_extension(name, "onnx")) {
        "an ONNX model: use the repository that it was exported from"
    } else if any(&|name| name == "zero_to_fp32.py" || name.ends_with("_optim_states.pt")) {
        "a checkpoint of DeepSpeed, and the directory that the file latest names has no files of ranks: the save did not finish, or not all \
         of it was copied"
    } else if files.iter().any(|file| file.path.ends_with(MEGATRON_FILE)) {
        "checkpoints of Megatron, one file a rank: give the directory of a step (iter_…), or one with latest_checkpointed_iteration.txt"
    } else if any(&|name| name == "tokenizer.json" || name == "config.json") {
        "a repository without weights: the download may be incomplete (hf download fetches the rest)"
    } else {
        return None;
    };
    Some(text.to_owned())
}

/// The directories below that hold the files of a checkpoint.
fn checkpoints_inside(files: &[Listed]) -> BTreeSet<String> {
    let is_sign = |name: &str| {
        matches!(name, DCP_METADATA | "_METADATA" | "_CHECKPOINT_METADATA" | "manifest.ocdbt")
            || RankFile::of(RankKind::Fsdp, name).is_some()
            || name.ends_with("_optim_states.pt")
            || is_msgpack_tree(name)
    };
    let readable = files.iter().filter(|file| file.role != FileRole::Weights);
    let found = readable.filter_map(|file| file.path.rsplit_once('/'));
    found.filter(|(_, name)| is_sign(name)).map(|(directory, _)| directory.to_owned()).collect()
}

/// Whether a name ends with a dot and these letters, in any case.
fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_how_they_begin() {
        let foreign = |name: &str, head: &[u8]| match of_head(name, head) {
            FileKind::Foreign(text) => text.split([':', ',']).next().unwrap_or_default().to_owned(),
            kind @ (FileKind::Torch | FileKind::Safetensors | FileKind::Gguf) => format!("{kind:?}"),
        };
        assert_eq!(foreign("model-q4.gguf", b"GGUF\x03"), "Gguf");
        assert_eq!(foreign("model.safetensors", b"version https://git-lfs.github.com/spec/v1"), "a pointer of git LFS");
        assert_eq!(foreign("model.safetensors", b"version https://hawser.github.com/spec/v1"), "a pointer of git LFS");
        assert_eq!(foreign("a.npz", b"PK\x03\x04"), "arrays of numpy");
        assert_eq!(foreign("flax_model.msgpack", b"\x84"), "parameters of Flax in msgpack");
        assert_eq!(foreign("checkpoint", b"\x82\xa6params\x81"), "parameters of Flax in msgpack");
        assert_eq!(foreign("checkpoint_100", b"\xde\x00\x10\xd9\x20"), "parameters of Flax in msgpack");
        assert_eq!(foreign("model.safetensors.index.json", b"{\"weight_map\""), "the index of a repository");
        assert_eq!(foreign("config.json", b"{\n  "), "the configuration of a repository");
        assert_eq!(foreign("x", b" {\"a\": 1}"), "a text in JSON");
        assert_eq!(foreign("x", b"PK\x03\x04"), "Torch");
        assert_eq!(foreign("pytorch_model.bin", b"\x80\x02\x8a"), "Torch");
        assert_eq!(foreign("x.safetensors", b"\x40\0\0\0\0\0\0\0{"), "Safetensors");
        assert_eq!(foreign("checkpoint.pth.tar", b"\x80\x02\x8a"), "Torch");
        let tar = [&[0; 257][..], b"ustar\x0000"].concat();
        for (name, advice) in
            [("a.tar", "open the directory"), ("a.pt", "torch.load"), ("a.nemo", "open the directory")]
        {
            let FileKind::Foreign(text) = of_head(name, &tar) else { panic!("{name}") };
            assert!(text.contains(advice), "{name}: {text}");
        }
        assert_eq!(foreign("x", b""), "Safetensors");
        // Lengths of headers that begin like a pickle, a gzip archive and a zip archive.
        for length in [0x80, 0x0002_8b80, 0x8b1f, 0x0403_4b50_u64] {
            let head = [&length.to_le_bytes()[..], b"{"].concat();
            assert_eq!(foreign("x.safetensors", &head), "Safetensors", "{length:#x}");
            assert_eq!(foreign("x.bin", &head), "Safetensors", "{length:#x}");
        }
    }

    #[test]
    fn directories_are_known_by_their_files() {
        let listed = |path: &&str| Listed::new((*path).to_owned(), FileRole::Other, 1);
        let text = |paths: &[&str]| of_files(&paths.iter().map(listed).collect::<Vec<_>>()).unwrap_or_default();
        assert_eq!(text(&[]), "the directory is empty");
        assert!(text(&["model.ckpt.index", "model.ckpt.data-00000-of-00001"]).contains("TensorFlow"));
        assert!(text(&["checkpoint", "model.ckpt-7.index"]).contains("TensorFlow"));
        assert!(text(&["flax_model.msgpack", "config.json"]).contains("Flax"));
        for old in [&["checkpoint"][..], &["checkpoint", "params.w/.zarray"], &["checkpoint_100"]] {
            assert!(text(old).starts_with("a checkpoint of Orbax or flax as until 2023"), "{old:?}");
        }
        assert!(text(&["100/default/checkpoint"]).ends_with("open one of them: 100/default"));
        assert!(text(&["__0_0.distcp"]).contains("did not finish"));
        assert!(text(&["step-10/.metadata", "step-20/.metadata"]).ends_with("step-20, step-10"));
        assert!(text(&["config.json"]).contains("without weights"));
        assert_eq!(text(&["notes.txt"]), "");
    }
}
