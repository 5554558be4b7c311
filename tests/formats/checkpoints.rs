//! Opening repositories: the accepted forms, the tensors found, and each error with its message.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    ffi::OsString,
    fs,
    os::unix::{ffi::OsStringExt, fs::symlink},
    path::{Path, PathBuf},
    time::Instant,
};

use ckfs::{
    checkpoint::{
        Accepted, Checkpoint, CheckpointError, Experts, FileRole, IgnoreReason, OpenOptions, Problem, Qkv,
        Quantization, Summary,
    },
    format::safetensors::{DATA_ALIGNMENT, tensor_bytes, write_header},
    source::{Duplicates, FileId},
    tensor::DType,
};
use serde_json::{Value, json};
use tempfile::TempDir;

type Tensor<'a> = (&'a str, DType, &'a [u64]);

const W: DType = DType::BF16;

/// Writes a weight file whose data is a hole, so that large repositories take no disk space.
fn write_weights(path: &Path, tensors: &[Tensor<'_>]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let written = write_header(tensors.iter().copied(), &[("format", "pt")], DATA_ALIGNMENT).unwrap();
    fs::write(path, &written.bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(written.bytes.len() as u64 + written.data_bytes).unwrap();
}

/// A repository in a temporary directory.
struct Repo(TempDir);

impl Repo {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn weights(self, name: &str, tensors: &[Tensor<'_>]) -> Self {
        write_weights(&self.path(name), tensors);
        self
    }

    fn text(self, name: &str, text: &str) -> Self {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
        self
    }

    fn index(self, map: &[(&str, &str)]) -> Self {
        let map: serde_json::Map<_, _> = map.iter().map(|(name, file)| ((*name).to_owned(), json!(file))).collect();
        self.text(
            "model.safetensors.index.json",
            &json!({"metadata": {"total_size": 8}, "weight_map": map}).to_string(),
        )
    }

    fn config(self, config: &Value) -> Self {
        self.text("config.json", &config.to_string())
    }

    fn try_open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(self.0.path().to_str().unwrap(), &OpenOptions::default())
    }

    fn open(&self) -> Checkpoint {
        self.try_open().unwrap_or_else(|error| panic!("{error}"))
    }

    fn problems(&self) -> Vec<String> {
        let error = self.try_open().err().unwrap();
        let CheckpointError::Problems { problems, more: 0, .. } = &error else { panic!("{error}") };
        problems.iter().map(ToString::to_string).collect()
    }
}

fn role(checkpoint: &Checkpoint, path: &str) -> FileRole {
    checkpoint.files().iter().find(|file| file.path == path).unwrap_or_else(|| panic!("{path}")).role.clone()
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().map(|(_, tensor)| tensor.name).collect()
}

#[test]
fn an_indexed_repository() {
    let repo = Repo::new()
        .weights("model-2.safetensors", &[("b", W, &[2, 3]), ("a", DType::F32, &[])])
        .weights("model-10.safetensors", &[("c", DType::F4, &[4]), ("empty", DType::I64, &[0, 3])])
        .weights("sub/x.safetensors", &[("d", W, &[1])])
        .weights("consolidated.safetensors", &[("tok_embeddings.weight", W, &[1])])
        .weights("original/model.safetensors", &[("a", W, &[1])])
        .weights("mtp.safetensors", &[("mtp.0.weight", W, &[1])])
        .text("tokenizer.json", "{}")
        .text("docs/README.md", "hello")
        .text(".git/config", "x")
        .text("mnt/.ckfs/plan.txt", "x")
        .weights("mnt/hf/model.safetensors", &[("a", W, &[1])])
        .config(&json!({"model_type": "llama"}))
        .index(&[
            ("a", "model-2.safetensors"),
            ("b", "model-2.safetensors"),
            ("c", "model-10.safetensors"),
            ("empty", "model-10.safetensors"),
            ("d", "sub/x.safetensors"),
        ]);
    symlink("nowhere", repo.path("dangling.json")).unwrap();
    symlink("docs", repo.path("linked")).unwrap();
    let checkpoint = repo.open();
    assert_eq!(names(&checkpoint), ["b", "a", "c", "empty", "d"], "by file in natural order, then by place");
    let b = checkpoint.tensor(checkpoint.find("b").unwrap());
    assert_eq!((b.dtype, b.shape, b.file()), (W, &[2, 3][..], FileId(0)));
    assert_eq!((b.span().start(), b.span().len()), (DATA_ALIGNMENT, 12));
    assert_eq!(checkpoint.tensor(checkpoint.find("c").unwrap()).span().len(), 2);
    assert_eq!(checkpoint.find("e"), None);
    assert_eq!(checkpoint.config().unwrap()["model_type"], "llama");
    assert_eq!(checkpoint.file_metadata(FileId(0)), [("format".to_owned(), "pt".to_owned())]);
    let ignored = |path, reason| assert_eq!(role(&checkpoint, path), FileRole::Ignored(reason), "{path}");
    ignored("consolidated.safetensors", IgnoreReason::SecondCopy);
    ignored("mtp.safetensors", IgnoreReason::NotInIndex);
    ignored("dangling.json", IgnoreReason::DanglingLink);
    ignored("linked", IgnoreReason::LinkedDirectory);
    ignored(".git", IgnoreReason::Bookkeeping);
    ignored("mnt", IgnoreReason::Mount);
    assert_eq!(role(&checkpoint, "docs/README.md"), FileRole::Other);
    // Another model's, which stays with the repository.
    assert_eq!(role(&checkpoint, "original/model.safetensors"), FileRole::Other);
    assert_eq!(role(&checkpoint, "sub/x.safetensors"), FileRole::Weights);
    let suspicious: Vec<_> = checkpoint.suspicious_files().map(|file| file.path.as_str()).collect();
    assert_eq!(suspicious, ["mtp.safetensors"]);
    let readme = checkpoint.files().iter().find(|file| file.path == "docs/README.md").unwrap();
    assert_eq!(readme.size_bytes, 5);
    let mut text = [0; 5];
    checkpoint.source().read_into(readme.file.unwrap(), 0, &mut text).unwrap();
    assert_eq!(&text, b"hello");
}

#[test]
fn repositories_without_an_index() {
    let weights = |checkpoint: &Checkpoint| -> Vec<String> {
        checkpoint.files().iter().filter(|file| file.role == FileRole::Weights).map(|file| file.path.clone()).collect()
    };
    let cases: [(&[&str], &[&str]); 7] = [
        (&["model.safetensors"], &["model.safetensors"]),
        (&["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], &["model.safetensors"]),
        (
            &["model-1.safetensors", "model-2.safetensors", "adapter.safetensors"],
            &["model-1.safetensors", "model-2.safetensors"],
        ),
        (
            &["layers-0.safetensors", "outside.safetensors", "consolidated.00.safetensors"],
            &["layers-0.safetensors", "outside.safetensors"],
        ),
        (
            &["consolidated-1.safetensors", "consolidated-2.safetensors"],
            &["consolidated-1.safetensors", "consolidated-2.safetensors"],
        ),
        (&["diffusion_pytorch_model.safetensors", "unet/model.safetensors"], &["diffusion_pytorch_model.safetensors"]),
        (
            &["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
            &["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ),
    ];
    for (files, expected) in cases {
        let repo = files
            .iter()
            .enumerate()
            .fold(Repo::new(), |repo, (number, file)| repo.weights(file, &[(&format!("t{number}"), W, &[1])]));
        assert_eq!(weights(&repo.open()), expected, "{files:?}");
    }
}

/// As in transformers, the single file has priority over the index.
#[test]
fn a_single_file_goes_before_an_index() {
    let shards = [("model-00001-of-00002.safetensors", "a"), ("model-00002-of-00002.safetensors", "b")];
    let repo = Repo::new()
        .weights("model.safetensors", &[("single", W, &[1])])
        .weights(shards[0].0, &[("a", W, &[2])])
        .weights(shards[1].0, &[("b", W, &[2])])
        .weights("other.safetensors", &[("c", W, &[2])])
        .index(&shards.map(|(file, tensor)| (tensor, file)));
    let checkpoint = repo.open();
    assert_eq!(names(&checkpoint), ["single"]);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(warning.contains("tensors come from model.safetensors, as in transformers"), "{warning}");
    // Both stay in the repository; files that neither names do not.
    for (file, _) in shards {
        assert_eq!(role(&checkpoint, file), FileRole::Other);
    }
    assert_eq!(role(&checkpoint, "model.safetensors.index.json"), FileRole::Other);
    assert_eq!(role(&checkpoint, "other.safetensors"), FileRole::Ignored(IgnoreReason::OtherSet));
    // Missing shards are not needed.
    fs::remove_file(repo.path(shards[0].0)).unwrap();
    assert_eq!(names(&repo.open()), ["single"]);
    // An index of the single file is equivalent to the file.
    let repo = Repo::new().weights("model.safetensors", &[("a", W, &[1])]).index(&[("a", "model.safetensors")]);
    assert_eq!((names(&repo.open()), repo.open().warnings().len()), (vec!["a"], 0));
}

#[test]
fn a_published_weight_delta_is_no_model() {
    let file = "model-00000-of-00001.safetensors";
    let rows: [Tensor<'_>; 1] = [("model.norm.weight", DType::U8, &[8])];
    let mut bytes = write_header(rows, &[("model.norm.weight", "9d3f")], DATA_ALIGNMENT).unwrap().bytes;
    bytes.extend([0; 8]);
    let repo = Repo::new();
    fs::write(repo.path(file), &bytes).unwrap();
    let said = repo.problems().join(" ");
    assert!(said.starts_with(&format!("{file}: compressed differences from another version's weights")), "{said}");
    let alone = Checkpoint::open(repo.path(file).to_str().unwrap(), &OpenOptions::default()).err().unwrap();
    assert!(alone.to_string().contains("a published weight delta"), "{alone}");
    let metadata = json!({"version": "000002", "base_version": "000001", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "blake3"});
    let index = json!({"metadata": metadata, "weight_map": {"model.norm.weight": file}});
    let said = repo.text("model.safetensors.index.json", &index.to_string()).problems().join(" ");
    let expected = "a published weight delta (delta_encoding \"xor\"): version 000002 as differences from version 000001, and no weights";
    assert!(said.contains(expected), "{said}");
    // A tensor of bytes whose file has metadata is one.
    let bytes = write_header(rows, &[("format", "pt")], DATA_ALIGNMENT).unwrap().bytes;
    let plain = Repo::new();
    fs::write(plain.path("model.safetensors"), [bytes, vec![0; 8]].concat()).unwrap();
    assert_eq!(names(&plain.open()), ["model.norm.weight"]);
}

#[test]
fn other_indexes() {
    let index = json!({"weight_map": {"a": "m.safetensors"}}).to_string();
    let repo = Repo::new().weights("m.safetensors", &[("a", W, &[1])]).text("m.safetensors.index.json", &index);
    assert_eq!(names(&repo.open()), ["a"]);
    let repo = repo.text("n.safetensors.index.json", &index);
    let error = repo.try_open().err().unwrap().to_string();
    assert!(
        error.ends_with(
            "several indexes and no model.safetensors.index.json: m.safetensors.index.json, n.safetensors.index.json"
        ),
        "{error}"
    );
    // The index of a second copy is used only if there is nothing else.
    let copy = json!({"weight_map": {"c": "consolidated-1.safetensors"}}).to_string();
    let repo = Repo::new()
        .weights("consolidated-1.safetensors", &[("c", W, &[1])])
        .text("consolidated.safetensors.index.json", &copy);
    assert_eq!(names(&repo.open()), ["c"]);
    let repo = repo.weights("model.safetensors", &[("a", W, &[1])]);
    assert_eq!(names(&repo.open()), ["a"]);
}

#[test]
fn a_single_file_and_a_link_to_one() {
    let repo = Repo::new().weights("x.safetensors", &[("a", W, &[5])]);
    symlink("x.safetensors", repo.path("link.safetensors")).unwrap();
    for name in ["x.safetensors", "link.safetensors"] {
        let checkpoint = Checkpoint::open(repo.path(name).to_str().unwrap(), &OpenOptions::default()).unwrap();
        assert_eq!(names(&checkpoint), ["a"]);
        assert_eq!(checkpoint.files()[0].path, name);
        assert!(checkpoint.config().is_none());
    }
}

#[test]
fn a_whole_set_beside_the_index_of_another_is_named() {
    let set = |repo: Repo, total: usize| {
        (1..=total).fold(repo, |repo, number| {
            repo.weights(&format!("model-{number:05}-of-{total:05}.safetensors"), &[(&format!("t{number}"), W, &[1])])
        })
    };
    let index =
        r#"{"weight_map": {"t1": "model-00001-of-00004.safetensors", "t2": "model-00002-of-00004.safetensors"}}"#;
    let problems = set(Repo::new(), 2).text("model.safetensors.index.json", index).problems();
    let [only] = &problems[..] else { panic!("{problems:?}") };
    assert!(only.contains("names 2 files") && only.contains("the whole set model-*-of-00002.safetensors is"), "{only}");
}

#[test]
fn pointers_of_git_lfs_are_called_so() {
    let pointer =
        |host: &str| format!("version https://{host}.github.com/spec/v1\noid sha256:{}\nsize 9\n", "ab".repeat(32));
    for host in ["git-lfs", "hawser"] {
        for file in ["model.safetensors", "config.json"] {
            let repo = Repo::new().weights("model.safetensors", &[("a", W, &[1])]).text(file, &pointer(host));
            let problems = repo.problems().join("\n");
            assert!(problems.contains("a pointer of git LFS") && problems.contains(file), "{problems}");
        }
        let repo = Repo::new().weights("model.safetensors", &[("a", W, &[1])]).text("tokenizer.json", &pointer(host));
        let checkpoint = repo.open();
        let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
        assert!(warning.contains("\"tokenizer.json\": left out: a pointer of git LFS"), "{warning}");
        let file = checkpoint.files().iter().find(|file| file.path == "tokenizer.json").unwrap();
        assert!(file.file.is_none(), "hf/ serves no pointer: {file:?}");
    }
}

#[test]
fn an_unfinished_download_names_the_files_and_what_brings_them() {
    let cache = tempfile::tempdir().unwrap();
    let commit = "aaaa1111bbbb2222cccc3333dddd4444eeee5555";
    let snapshot = cache.path().join("models--org--name/snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    for number in [1, 3] {
        write_weights(
            &snapshot.join(format!("model-0000{number}-of-00004.safetensors")),
            &[(&format!("t{number}"), W, &[1])],
        );
    }
    let options = OpenOptions { hub_cache: Some(cache.path().to_path_buf()), ..OpenOptions::default() };
    let expected = "the Hugging Face cache has 2 of the 4 weight files of org/name@aaaa1111bbbb (missing: \
                    model-00002-of-00004.safetensors, model-00004-of-00004.safetensors): the download is not finished; run `hf \
                    download org/name`";
    for index in [false, true] {
        if index {
            let map: Vec<String> =
                (1..=4).map(|n| format!(r#""t{n}": "model-0000{n}-of-00004.safetensors""#)).collect();
            let text = format!(r#"{{"weight_map": {{{}}}}}"#, map.join(", "));
            fs::write(snapshot.join("model.safetensors.index.json"), text).unwrap();
        }
        let error = Checkpoint::open(&format!("org/name@{commit}"), &options).err().unwrap();
        let CheckpointError::Problems { problems, .. } = &error else { panic!("{error}") };
        assert!(error.to_string().contains(expected), "{error}");
        assert!(problems.iter().all(|problem| !problem.is_of_index()), "no --allow-missing is proposed: {error}");
    }
}

#[test]
fn all_disagreements_between_index_and_headers_are_reported_at_once() {
    let repo = Repo::new()
        .weights("1.safetensors", &[("a", W, &[1]), ("moved", W, &[1]), ("unnamed", W, &[1]), ("twice", W, &[1])])
        .weights("2.safetensors", &[("b", W, &[1]), ("twice", W, &[1])])
        .text("bad.safetensors", "not a header at all")
        .text(
            "model.safetensors.index.json",
            r#"{"weight_map": {"a": "1.safetensors", "a": "1.safetensors", "moved": "2.safetensors", "b": "2.safetensors",
                "gone": "1.safetensors", "twice": "1.safetensors", "e1": "../etc/x.safetensors", "e2": "/abs.safetensors",
                "e3": "missing.safetensors", "e6": "missing.safetensors", "e4": "bad.safetensors", "e5": "a//b.safetensors"}}"#,
        );
    let problems = repo.problems();
    let expected = [
        r#"names "../etc/x.safetensors" for tensor "e1", which is not a path inside"#,
        r#"names "/abs.safetensors" for tensor "e2", which is not a path inside"#,
        r#"names "missing.safetensors" for 2 tensors, the first of them "e3", which is not there"#,
        r#"names "a//b.safetensors" for tensor "e5", which is not a path inside"#,
        "bad.safetensors: header length: expected at most 100000000 bytes",
        r#"tensor "twice": found in 1.safetensors and again in 2.safetensors"#,
        r#"names tensor "a" twice"#,
        r#"tensor "gone": expected in 1.safetensors by the index, found in no file"#,
        r#"tensor "moved": expected in 2.safetensors by the index, found in 1.safetensors"#,
        r#"tensor "unnamed": found in 1.safetensors, not named by the index"#,
    ];
    for expected in expected {
        assert!(problems.iter().any(|problem| problem.contains(expected)), "{expected}\n{problems:#?}");
    }
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    let text = repo.try_open().err().unwrap().to_string();
    assert!(text.contains("10 problems\n"), "{text}");
}

fn repo_with_index(map: &[(&str, &str)]) -> Vec<String> {
    Repo::new().weights("model.safetensors", &[("a", W, &[1])]).index(map).problems()
}

#[test]
fn configurations_as_python_writes_them() {
    let repo = Repo::new().weights("model.safetensors", &[("a", W, &[1])]);
    let repo = repo.text("config.json", r#"{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}"#);
    assert_eq!(repo.open().dialect().model_type.as_deref(), Some("mamba2"));
}

#[test]
fn refused_repositories() {
    let good = || Repo::new().weights("model.safetensors", &[("a", W, &[1])]);
    let one = |repo: &Repo| {
        let problems = repo.problems();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        problems[0].clone()
    };
    assert!(one(&good().text("config.json", "{")).starts_with("config.json: the file ends early"));
    assert!(one(&good().text("config.json", "[]")).contains("expected an object"));
    assert!(one(&good().text("model.safetensors.index.json", "{}")).contains("missing field `weight_map`"));
    assert!(
        one(&good().text("model.safetensors.index.json", r#"{"weight_map":{"a":1}}"#)).contains("expected a string")
    );
    let repo = Repo::new().weights("model-00001-of-00003.safetensors", &[("a", W, &[1])]);
    assert_eq!(
        one(&repo),
        "model*.safetensors: expected 3 files by their names (model-00001-of-00003.safetensors), found 1; missing: number 2, number 3"
    );
    let repo = Repo::new().weights("a.safetensors", &[("t", W, &[1])]).weights("b.safetensors", &[("t", W, &[1])]);
    assert_eq!(one(&repo), r#"tensor "t": found in a.safetensors and again in b.safetensors"#);
    // The parts of ranks are no copies, and one of them is not the tensor.
    let parts = || {
        let rank = |rank: u32| format!("model-00001-TP-{rank:03}.safetensors");
        (0..3).fold(Repo::new(), |repo, number| repo.weights(&rank(number), &[("t", W, &[1])]))
    };
    let of_one = parts().index(&[("t", "model-00001-TP-002.safetensors")]);
    assert!(one(&of_one).starts_with(
        "model.safetensors.index.json: names model-00001-TP-002.safetensors, and not model-00001-TP-000.safetensors, \
         model-00001-TP-001.safetensors: by their names each holds the part of one rank"
    ));
    let CheckpointError::Problems { problems, .. } = parts().try_open().err().unwrap() else { panic!("no problems") };
    assert!(problems.iter().all(|problem| problem.is_of_copies() && problem.is_of_ranks()), "{problems:?}");
    let repo = good();
    let path = repo.path("model.safetensors");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(DATA_ALIGNMENT + 1).unwrap();
    assert!(one(&repo).contains("model.safetensors: data: expected 2 bytes by the header, found 1 bytes in the file"));
    assert_eq!(repo_with_index(&[])[0], "model.safetensors.index.json: names no tensor");
    for (name, target, found) in [
        ("x.safetensors", "nowhere", "symbolic link to nothing"),
        ("config.json", "nowhere", "symbolic link to nothing"),
        ("model.safetensors.index.json", "config", "symbolic link to a directory"),
        ("x.safetensors", "/dev/null", "not a regular file"),
    ] {
        // Without the refusal, the files that exist would be mounted as if they were all.
        let repo = good().text("config/x", "");
        symlink(target, repo.path(name)).unwrap();
        assert_eq!(one(&repo), format!("{name}: cannot be read as a file: {found}"));
    }
    let repo = Repo::new();
    symlink("blob", repo.path("model.safetensors")).unwrap();
    assert_eq!(one(&repo), "model.safetensors: cannot be read as a file: symbolic link to nothing");
    let layers = json!({"model_type": "llama", "num_hidden_layers": 1_000_000_000_000_u64});
    assert_eq!(
        one(&good().config(&layers)),
        "config.json: num_hidden_layers: expected at most 65536, found 1000000000000"
    );
    let repo = good().index(&[("a", "dir")]).text("dir/x", "");
    assert!(repo.problems()[0].contains(r#"names "dir" for tensor "a", which is not there"#));
    let repo = good().index(&[("a", "l.safetensors")]);
    symlink("nowhere", repo.path("l.safetensors")).unwrap();
    assert!(repo.problems()[0].contains("which is a symbolic link to nothing"));
    let empty = Repo::new().text("unet/readme", "").weights("unet/model.safetensors", &[]);
    let error = empty.try_open().err().unwrap().to_string();
    assert!(error.contains("no *.safetensors here; open one of the subdirectories that have some: unet"), "{error}");
}

/// Tensors of an opened repository, and its warnings, by default and where links may lead out of it.
fn with_links(repo: &Repo) -> [(Checkpoint, Vec<String>); 2] {
    [false, true].map(|follow_symlinks| {
        let options = OpenOptions { follow_symlinks, ..OpenOptions::default() };
        let checkpoint = Checkpoint::open(repo.0.path().to_str().unwrap(), &options).unwrap();
        let warnings = checkpoint.warnings().to_vec();
        (checkpoint, warnings)
    })
}

#[test]
fn links_that_leave_the_repository() {
    let outside = Repo::new()
        .weights("weights", &[("a", W, &[1])])
        .weights("unused", &[("z", W, &[1])])
        .text("config", r#"{"model_type": "llama"}"#)
        .text("index", r#"{"weight_map": {"a": "one.safetensors"}}"#);
    let repo =
        Repo::new().weights("two.safetensors", &[("b", W, &[1])]).text("sub/inside.json", "{}").text("sub/deep/x", "");
    for (target, name) in [
        (outside.path("weights"), "one.safetensors"),
        (outside.path("unused"), "sub/other.safetensors"),
        (outside.path("config"), "config.json"),
        (outside.path("index"), "model.safetensors.index.json"),
        (outside.path("config"), "sub/deep/tokenizer.json"),
        (PathBuf::from("sub/inside.json"), "inside.json"),
        (repo.path("sub/inside.json"), "absolute.json"),
        (PathBuf::from("/dev/zero"), "device"),
        (outside.0.path().to_owned(), "directory"),
    ] {
        symlink(target, repo.path(name)).unwrap();
    }
    let [(checkpoint, warnings), (followed, no_warnings)] = with_links(&repo);
    // Without the index all weight files are used.
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert!(checkpoint.config().is_none());
    let left_out = IgnoreReason::LeavesRepository;
    for (path, expected) in [
        ("one.safetensors", FileRole::Weights),
        ("sub/other.safetensors", FileRole::Ignored(left_out)),
        ("config.json", FileRole::Ignored(left_out)),
        ("model.safetensors.index.json", FileRole::Ignored(left_out)),
        ("sub/deep/tokenizer.json", FileRole::Ignored(left_out)),
        ("inside.json", FileRole::Other),
        ("absolute.json", FileRole::Other),
        ("device", FileRole::Ignored(IgnoreReason::Special)),
        ("directory", FileRole::Ignored(IgnoreReason::LinkedDirectory)),
    ] {
        assert_eq!(role(&checkpoint, path), expected, "{path}");
    }
    assert_eq!(warnings.len(), 5, "{warnings:#?}");
    for (name, target, what) in [
        ("config.json", "config", "left out, as if it were not there"),
        ("model.safetensors.index.json", "index", "left out, as if it were not there"),
        ("sub/deep/tokenizer.json", "config", "left out: symbolic link to"),
        ("sub/other.safetensors", "unused", "left out: symbolic link to"),
        ("one.safetensors", "weights", "those that may read the target"),
    ] {
        let target = outside.path(target).canonicalize().unwrap();
        let reported = |text: &String| {
            text.starts_with(&format!("{name:?}: ")) && text.contains(&format!("{target:?}")) && text.contains(what)
        };
        assert!(warnings.iter().any(reported), "{name}: {warnings:#?}");
    }
    assert_eq!(no_warnings, [""; 0]);
    assert_eq!(names(&followed), ["a"]);
    assert_eq!(followed.config().unwrap()["model_type"], "llama");
    assert_eq!(role(&followed, "sub/deep/tokenizer.json"), FileRole::Other);
    assert_eq!(role(&followed, "device"), FileRole::Ignored(IgnoreReason::Special));
}

#[test]
fn links_of_adapters() {
    let outside = Repo::new()
        .text("config", r#"{"peft_type": "LORA"}"#)
        .weights("weights", &[("base_model.model.a.lora_A.weight", W, &[1])]);
    let repo = Repo::new().weights("model.safetensors", &[("a.weight", W, &[1])]);
    let adapter = Repo::new().text("adapter_config.json", r#"{"peft_type": "LORA"}"#);
    symlink(outside.path("weights"), adapter.path("adapter_model.safetensors")).unwrap();
    let open = |follow_symlinks| {
        let adapters = vec![adapter.0.path().to_owned()];
        let options = OpenOptions { adapters, follow_symlinks, ..OpenOptions::default() };
        Checkpoint::open(repo.0.path().to_str().unwrap(), &options)
    };
    let warnings = open(false).unwrap().warnings().to_vec();
    assert!(warnings.len() == 1 && warnings[0].contains("adapter_model.safetensors"), "{warnings:?}");
    assert!(open(true).unwrap().warnings().is_empty());
    fs::remove_file(adapter.path("adapter_config.json")).unwrap();
    symlink(outside.path("config"), adapter.path("adapter_config.json")).unwrap();
    let error = open(false).err().unwrap().to_string();
    assert!(error.contains("adapter_config.json: symbolic link to") && error.contains("--follow-symlinks"), "{error}");
    assert!(open(true).is_ok());
}

#[test]
fn links_of_the_hub_cache_may_only_lead_to_its_own_blobs() {
    let cache = tempfile::tempdir().unwrap();
    let commit = "aaaa1111bbbb2222cccc3333dddd4444eeee5555";
    let repo = cache.path().join("models--org--name");
    let other = cache.path().join("models--org--other");
    let snapshot = repo.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    write_weights(&repo.join("blobs/1"), &[("a", W, &[1])]);
    for (path, target) in
        [(repo.join("blobs/2"), "own"), (repo.join("refs/main"), commit), (other.join("blobs/3"), "other")]
    {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, target).unwrap();
    }
    for (target, name) in [
        ("../../blobs/1", "model.safetensors"),
        ("../../blobs/2", "README.md"),
        ("../../refs/main", "ref"),
        ("../../../models--org--other/blobs/3", "other"),
    ] {
        symlink(target, snapshot.join(name)).unwrap();
    }
    let options = OpenOptions { hub_cache: Some(cache.path().to_path_buf()), ..OpenOptions::default() };
    let by_path = OpenOptions::default();
    for (source, options) in [("org/name", &options), (snapshot.to_str().unwrap(), &by_path)] {
        let checkpoint = Checkpoint::open(source, options).unwrap();
        assert_eq!(names(&checkpoint), ["a"]);
        for (path, expected) in [
            ("model.safetensors", FileRole::Weights),
            ("README.md", FileRole::Other),
            ("ref", FileRole::Ignored(IgnoreReason::LeavesRepository)),
            ("other", FileRole::Ignored(IgnoreReason::LeavesRepository)),
        ] {
            assert_eq!(role(&checkpoint, path), expected, "{path} of {source}");
        }
        assert_eq!(checkpoint.warnings().len(), 2, "{:?}", checkpoint.warnings());
    }
    // The user did not name a revision that is elsewhere.
    let elsewhere = cache.path().join("elsewhere");
    fs::rename(&snapshot, &elsewhere).unwrap();
    symlink(&elsewhere, &snapshot).unwrap();
    let error = Checkpoint::open("org/name", &options).err().unwrap().to_string();
    assert!(error.contains("a symbolic link out of the repository's directory in the cache"), "{error}");
}

#[test]
fn missing_sources() {
    let dir = tempfile::tempdir().unwrap();
    let options = OpenOptions { hub_cache: Some(dir.path().to_path_buf()), ..OpenOptions::default() };
    let refused = |source: &str| Checkpoint::open(source, &options).err().unwrap().to_string();
    assert!(refused("ftp://bucket/key").contains("ftp:// is not known"));
    assert!(refused("hf://org/name").contains("not found\n  directory "));
    assert!(refused("./nothing/here").contains("no such file or directory, and not an org/name"));
    let error = refused("org/name");
    assert!(error.contains("not found\n  directory ") && error.contains("models--org--name"), "{error}");
}

#[test]
fn the_hub_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--org--na.me");
    let commits = ["aaaa1111bbbb2222cccc3333dddd4444eeee5555", "aaaa2222bbbb2222cccc3333dddd4444eeee5555"];
    for (number, commit) in commits.iter().enumerate() {
        write_weights(&repo.join(format!("blobs/blob{number}")), &[(&format!("t{number}"), W, &[1])]);
        fs::create_dir_all(repo.join("snapshots").join(commit)).unwrap();
        symlink(format!("../../blobs/blob{number}"), repo.join("snapshots").join(commit).join("model.safetensors"))
            .unwrap();
    }
    fs::create_dir_all(repo.join("refs/refs/pr")).unwrap();
    fs::write(repo.join("refs/main"), commits[0]).unwrap();
    fs::write(repo.join("refs/refs/pr/1"), format!("{}\n", commits[1])).unwrap();
    fs::write(repo.join("refs/evil"), "../../..").unwrap();
    let options = OpenOptions { hub_cache: Some(cache.path().to_path_buf()), ..OpenOptions::default() };
    let open = |source: &str| Checkpoint::open(source, &options);
    for (source, number) in [
        ("org/na.me", 0),
        ("org/na.me@main", 0),
        ("org/na.me@refs/pr/1", 1),
        ("org/na.me@aaaa2222", 1),
        (&format!("org/na.me@{}", commits[0]), 0),
    ] {
        let checkpoint = open(source).unwrap();
        assert_eq!(names(&checkpoint), [format!("t{number}")], "{source}");
        assert_eq!(checkpoint.revision(), Some(commits[number]));
        assert_eq!(checkpoint.label(), format!("org/na.me@{}", &commits[number][..12]));
    }
    for source in ["org/na.me@aaaa", "org/na.me@v1", "org/na.me@evil", "org/na.me@aaa"] {
        let error = open(source).err().unwrap();
        assert!(matches!(error, CheckpointError::NoRevision { .. }), "{error}");
        assert!(error.to_string().ends_with(&format!("; there are: main, {}", commits.join(", "))), "{error}");
    }
}

fn fp8_repo(scales: &[(&str, DType, &[u64])], config: &Value) -> Repo {
    let mut tensors: Vec<Tensor<'_>> = vec![
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", DType::F8E4M3, &[576, 300]),
        ("model.layers.0.norm.weight", W, &[300]),
    ];
    tensors.extend_from_slice(scales);
    Repo::new().weights("model.safetensors", &tensors).config(config)
}

const SCALE: &str = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv";

fn fp8_config() -> Value {
    json!({"model_type": "deepseek_v3", "num_hidden_layers": 1,
           "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
}

/// The only scheme by which a repository is quantized.
fn known(checkpoint: &Checkpoint) -> &Summary {
    let Quantization { schemes, unsupported, .. } = &checkpoint.dialect().quantization;
    assert_eq!((schemes.len(), unsupported.len()), (1, 0), "{}", checkpoint.dialect().quantization);
    &schemes[0]
}

#[test]
fn block_scales_are_paired_and_checked() {
    for dtype in [DType::F32, DType::BF16, DType::F8E8M0] {
        let checkpoint = fp8_repo(&[(SCALE, dtype, &[5, 3])], &fp8_config()).open();
        let found = known(&checkpoint);
        let (weight, scale) = (checkpoint.find(&SCALE[..SCALE.len() - 10]).unwrap(), checkpoint.find(SCALE).unwrap());
        let expected = format!("fp8 in blocks of 128x128, 1 weights with {dtype} scales *_scale_inv");
        assert_eq!((found.scheme, &found.text), ("block_fp8", &expected));
        let operands: Vec<_> = checkpoint.quantized().tensors.iter().map(|tensor| tensor.operands.to_vec()).collect();
        assert_eq!(operands, [[weight, scale]]);
        assert_eq!(checkpoint.dialect().qkv, Qkv::Latent);
    }
    let problems = fp8_repo(&[(SCALE, DType::F32, &[4, 3])], &fp8_config()).problems();
    assert!(
        problems[0].contains("expected shape [5, 3], a scale for 128x128 of") && problems[0].contains("[576, 300]"),
        "{problems:?}"
    );
    assert!(problems[0].contains("found [4, 3]"));
    let problems = fp8_repo(&[(SCALE, DType::I32, &[5, 3])], &fp8_config()).problems();
    assert!(problems[0].contains("expected a float as the scale of"), "{problems:?}");
    let bad = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}});
    assert!(fp8_repo(&[], &bad).problems()[0].contains("expected two positive numbers, found [128,0]"));
}

/// The schemes of a repository, and the methods that none of them decodes.
fn quantization(repo: &Repo) -> (Vec<&'static str>, Vec<String>) {
    let checkpoint = repo.open();
    let Quantization { schemes, unsupported, .. } = &checkpoint.dialect().quantization;
    let methods = unsupported.iter().map(|found| found.method.clone()).collect();
    (schemes.iter().map(|summary| summary.scheme).collect(), methods)
}

#[test]
fn a_scale_per_tensor_or_channel_is_no_block_scale() {
    let plain = json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": null}});
    let scaled = (vec!["scaled_fp8"], vec![]);
    assert_eq!(quantization(&fp8_repo(&[(SCALE, DType::F32, &[])], &plain)), scaled);
    let problems = fp8_repo(&[(SCALE, DType::F32, &[1])], &fp8_config()).problems();
    assert!(
        problems[0].contains("shape [5, 3]") && problems[0].contains("found [1]"),
        "a block is configured: {problems:?}"
    );
    let channel = &SCALE[..SCALE.len() - 4];
    let (schemes, methods) = quantization(&fp8_repo(&[(channel, DType::F32, &[576, 1])], &json!({})));
    assert!(schemes.is_empty() && methods.len() == 1, "no configuration: {schemes:?} {methods:?}");
    // The block size is never guessed without a configuration.
    let (schemes, methods) = quantization(&fp8_repo(&[(SCALE, DType::F32, &[5, 3])], &plain));
    assert!(schemes.is_empty() && methods.len() == 1, "{schemes:?} {methods:?}");
    assert_eq!(quantization(&fp8_repo(&[], &json!({}))), (vec![], vec![]));
}

#[test]
fn other_quantizations() {
    let group = |weights: Value| json!({"group_0": {"weights": weights}});
    let packed = |format: &str, bits: u64| {
        json!({"quantization_config": {"quant_method": "compressed-tensors", "format": format,
               "config_groups": group(json!({"num_bits": bits, "group_size": 32, "strategy": "group"}))}})
    };
    let cases: Vec<(Vec<Tensor<'static>>, Value, &[&str], &str)> = vec![
        (
            vec![
                ("layers.0.ffn.w1.weight", DType::F8E4M3, &[256, 128]),
                ("layers.0.ffn.w1.scale", DType::F8E8M0, &[2, 1]),
                ("layers.0.ffn.experts.0.w1.weight", DType::I8, &[4, 16]),
                ("layers.0.ffn.experts.0.w1.scale", DType::F8E8M0, &[4, 1]),
            ],
            fp8_config(),
            &["mx", "block_fp8"],
            "",
        ),
        (
            vec![
                ("model.layers.0.mlp.experts.down_proj_blocks", DType::U8, &[2, 4, 1, 16]),
                ("model.layers.0.mlp.experts.down_proj_scales", DType::U8, &[2, 4, 1]),
            ],
            json!({"quantization_config": {"quant_method": "mxfp4"}}),
            &["mxfp4"],
            "",
        ),
        (vec![("a.weight", W, &[1])], json!({"quantization_config": {"quant_method": "mxfp4"}}), &[], ""),
        (vec![("a.weight_packed", DType::I32, &[4, 4])], packed("pack-quantized", 4), &[], "compressed-tensors"),
        (vec![("a.weight_packed", DType::U8, &[4, 4])], packed("nvfp4-pack-quantized", 4), &[], "compressed-tensors"),
        (vec![("a.weight", DType::I8, &[4, 4])], packed("int-quantized", 8), &[], "compressed-tensors"),
        (vec![("a.qweight", DType::I32, &[4, 4])], json!({"quantization_config": {"quant_method": "awq"}}), &[], "awq"),
        (
            vec![
                ("a.weight", DType::U8, &[4, 8]),
                ("a.weight_scale", DType::F8E4M3, &[4, 1]),
                ("a.weight_scale_2", DType::F32, &[]),
            ],
            json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}),
            &["nvfp4"],
            "",
        ),
    ];
    for (tensors, config, expected, method) in cases {
        let (schemes, methods) = quantization(&Repo::new().weights("model.safetensors", &tensors).config(&config));
        assert_eq!(schemes, expected, "{config}");
        let reported = methods.first().map_or("", String::as_str);
        assert!(reported.contains(method) && methods.is_empty() == method.is_empty(), "{config}: {methods:?}");
    }
}

#[test]
fn dialects() {
    let repo = Repo::new()
        .weights(
            "model.safetensors",
            &[
                ("model.language_model.embed_tokens.weight", W, &[8, 4]),
                ("model.language_model.layers.0.self_attn.q_proj.weight", W, &[64, 64]),
                ("model.language_model.layers.1.mlp.experts.0.up_proj.weight", W, &[4, 4]),
                ("model.language_model.layers.1.mlp.experts.11.up_proj.weight", DType::F32, &[4, 4]),
                ("model.language_model.layers.2.eh_proj.weight", W, &[4, 4]),
                ("model.visual.blocks.0.attn.qkv.weight", W, &[4, 4]),
                ("mtp.norm.weight", W, &[4]),
            ],
        )
        .config(
            &json!({"model_type": "vlm", "architectures": ["VlmForConditionalGeneration"], "tie_word_embeddings": true,
                        "text_config": {"model_type": "vlm_text", "num_hidden_layers": 2}}),
        );
    let checkpoint = repo.open();
    let dialect = checkpoint.dialect();
    assert_eq!(dialect.prefix(), "model.language_model.");
    assert_eq!((dialect.families.len(), dialect.families[0].layers, dialect.families[0].last), (2, 3, 2));
    assert_eq!((dialect.declared_layers, &dialect.mtp_layers[..], dialect.mtp_named), (Some(2), &[2][..], true));
    assert_eq!(dialect.experts, Experts::Single { count: 12 });
    assert_eq!(dialect.qkv, Qkv::Separate);
    assert_eq!((dialect.tied_declared, dialect.has_lm_head), (Some(true), false));
    assert_eq!((dialect.model_type.as_deref(), dialect.text_model_type.as_deref()), (Some("vlm"), Some("vlm_text")));
    assert_eq!(dialect.dtypes.iter().map(|row| (row.0, row.1)).collect::<Vec<_>>(), [(W, 6), (DType::F32, 1)]);
    let line = dialect.to_string();
    assert!(line.starts_with("vlm (VlmForConditionalGeneration), 7 tensors") && !line.contains('\n'), "{line}");
    let text = dialect.describe();
    for expected in
        ["text model: vlm_text (in text_config)", "experts: 12, one tensor each", "embeddings: tied", "layers 2"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn problems_name_the_features_that_a_program_lacks() {
    let repo = Repo::new()
        .weights("a.safetensors", &[("t", W, &[1])])
        .index(&[("t", "a.safetensors"), ("u", "a.safetensors")]);
    let Err(CheckpointError::Problems { problems, .. }) = repo.try_open() else { panic!("accepted") };
    assert!(matches!(&problems[..], [Problem::NotInFile { tensor, file }] if tensor == "u" && file == "a.safetensors"));
}

/// The promised size: 150 000 tensors in 250 files, here with block scales to pair.
#[test]
fn large_repositories_open_fast() {
    let (layers, experts, files) = (60, 417, 250);
    let mut all: Vec<(String, DType, Vec<u64>)> = Vec::new();
    for layer in 0..layers {
        for expert in 0..experts {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                all.push((format!("{name}_scale_inv"), DType::F32, vec![16, 56]));
                all.push((name, DType::F8E4M3, vec![2048, 7168]));
            }
        }
    }
    let repo = Repo::new().config(&fp8_config());
    let mut map = serde_json::Map::new();
    for (number, tensors) in all.chunks(all.len().div_ceil(files)).enumerate() {
        let name = format!("model-{number:05}-of-{files:05}.safetensors");
        let entries: Vec<Tensor<'_>> =
            tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice())).collect();
        write_weights(&repo.path(&name), &entries);
        map.extend(tensors.iter().map(|tensor| (tensor.0.clone(), json!(name))));
    }
    let repo = repo.text("model.safetensors.index.json", &json!({"weight_map": map}).to_string());
    let start = Instant::now();
    let checkpoint = repo.open();
    let elapsed = start.elapsed();
    let bytes: u64 = all.iter().map(|tensor| tensor_bytes(tensor.1, &tensor.2).unwrap()).sum();
    assert_eq!(checkpoint.tensors().len(), all.len());
    assert_eq!(checkpoint.dialect().bytes(), bytes);
    let per_tensor = checkpoint.table().memory_bytes() / all.len();
    println!(
        "{} tensors in {files} files, {} GB: opened in {elapsed:?}, {per_tensor} bytes per tensor",
        all.len(),
        bytes / 1_000_000_000
    );
    assert!(per_tensor < 150, "{per_tensor} bytes per tensor");
    assert!(elapsed.as_secs() < 120, "generous, as tests run unoptimized on shared machines: {elapsed:?}");
    assert_eq!(checkpoint.quantized().tensors.len(), all.len() / 2);
}

#[test]
fn an_index_may_disagree_with_the_files_where_that_is_allowed() {
    let repo = Repo::new().weights("a.safetensors", &[("t", W, &[1]), ("unnamed", W, &[1])]).index(&[
        ("t", "a.safetensors"),
        ("gone", "a.safetensors"),
        ("lost", "b.safetensors"),
    ]);
    let open = |missing: &'static [&'static str], unmapped: &'static [&'static str]| {
        let accepted = |names: &'static [&'static str]| Accepted::new(move |name| names.contains(&name));
        let (allow_missing, allow_unmapped) = (accepted(missing), accepted(unmapped));
        let options = OpenOptions { allow_missing, allow_unmapped, ..OpenOptions::default() };
        Checkpoint::open(repo.0.path().to_str().unwrap(), &options)
    };
    let checkpoint = open(&["gone", "lost"], &["unnamed"]).unwrap();
    let mut names: Vec<&str> = checkpoint.tensors().map(|(_, info)| info.name).collect();
    names.sort_unstable();
    assert_eq!(names, ["t", "unnamed"]);
    let [missing, unmapped] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(missing.starts_with("2 tensors, the first of them") && missing.contains("found in no file"), "{missing}");
    assert!(unmapped.starts_with("tensor \"unnamed\": not named by the index"), "{unmapped}");
    for (missing, unmapped, left) in [
        (&["gone"][..], &["unnamed"][..], "b.safetensors"),
        (&["lost"], &["unnamed"], "gone"),
        (&["gone", "lost"], &[], "unnamed"),
    ] {
        let error = open(missing, unmapped).err().unwrap();
        let CheckpointError::Problems { problems, .. } = &error else { panic!("{error}") };
        assert!(problems.len() == 1 && problems[0].is_of_index() && error.to_string().contains(left), "{error}");
    }
}

/// A shard that replaces some tensors: the index gives each to one file, and the other copies are no part of the model.
#[test]
fn copies_that_the_index_does_not_name_are_no_part_of_the_model() {
    let (old, new) = ("model-00001-of-00001.safetensors", "model-overlay.safetensors");
    let repo = |named: &str| {
        Repo::new()
            .weights(old, &[("a", W, &[1]), ("b", W, &[2]), ("layers.7.junk", W, &[2])])
            .weights(new, &[("a", W, &[3]), ("c", W, &[1])])
            .index(&[("a", named), ("b", old), ("c", new)])
    };
    let open = |repo: &Repo, duplicates| {
        let options = OpenOptions { duplicates, ..OpenOptions::default() };
        Checkpoint::open(repo.0.path().to_str().unwrap(), &options)
    };
    let shape = |checkpoint: &Checkpoint| checkpoint.tensor(checkpoint.find("a").unwrap()).shape.to_vec();
    // Index and engines mean the same copy.
    let checkpoint = repo(new).open();
    assert_eq!((shape(&checkpoint), names(&checkpoint).len()), (vec![3], 3));
    let warnings = checkpoint.warnings();
    assert!(
        warnings.iter().any(|text| text.contains("\"layers.7.junk\"") && text.contains("left out")),
        "{warnings:?}"
    );
    let whole = |checkpoint: &Checkpoint, path: &str| {
        checkpoint.is_whole(checkpoint.files().iter().find(|file| file.path == path).unwrap().file.unwrap())
    };
    assert!(!whole(&checkpoint, old) && whole(&checkpoint, new));
    // They do not: the user says which.
    assert_eq!(repo(old).problems().len(), 1);
    assert_eq!(shape(&open(&repo(old), Some(Duplicates::Index)).unwrap()), [1]);
    assert_eq!(shape(&open(&repo(old), Some(Duplicates::Last)).unwrap()), [3]);
    assert!(open(&repo(new), Some(Duplicates::Refuse)).is_err());
}

#[test]
fn variants_are_chosen_by_name() {
    let (plain, half) = ("model.safetensors", "model.fp16.safetensors");
    let repo = Repo::new().weights(plain, &[("a", W, &[1])]).weights(half, &[("a", W, &[2])]);
    let open = |repo: &Repo, variant: Option<&str>| {
        let options = OpenOptions { variant: variant.map(str::to_owned), ..OpenOptions::default() };
        Checkpoint::open(repo.0.path().to_str().unwrap(), &options)
    };
    let shape = |checkpoint: Checkpoint| checkpoint.tensor(checkpoint.find("a").unwrap()).shape.to_vec();
    assert_eq!(shape(open(&repo, None).unwrap()), [1]);
    assert_eq!(shape(open(&repo, Some("fp16")).unwrap()), [2]);
    let error = open(&repo, Some("bf16")).err().unwrap().to_string();
    assert!(error.ends_with("no weights of the variant \"bf16\"; there are: fp16"), "{error}");
    // Other names than those of transformers, and one of two files of the variant.
    let part = "x-00001-of-00002.fp16.safetensors";
    let repo = Repo::new().weights("x.safetensors", &[("a", W, &[1])]).weights(part, &[("a", W, &[2])]);
    let checkpoint = open(&repo, None).unwrap();
    assert_eq!(role(&checkpoint, part), FileRole::Ignored(IgnoreReason::OtherVariant));
    assert_eq!(shape(checkpoint), [1]);
    let error = open(&repo, Some("fp16")).err().unwrap().to_string();
    assert!(error.contains("x.fp16*.safetensors: expected 2 files"), "{error}");
    // Variants without the plain set.
    let two =
        Repo::new().weights("x.fp16.safetensors", &[("a", W, &[1])]).weights("x.ema.safetensors", &[("a", W, &[2])]);
    let problem = &two.problems()[0];
    assert!(problem.contains("found in x.ema.safetensors and again in x.fp16.safetensors"), "{problem}");
    assert_eq!(shape(open(&two, Some("ema")).unwrap()), [2]);
    // The index of a variant counts where nothing else is of its name.
    let named = "x-00001-of-00001.fp16.safetensors";
    let index = json!({"weight_map": {"a": named, "b": named}}).to_string();
    for name in ["x.safetensors.index.fp16.json", "x.safetensors.fp16.index.json"] {
        let repo = Repo::new().weights(named, &[("a", W, &[1])]).text(name, &index);
        assert_eq!(repo.problems(), [format!("tensor \"b\": expected in {named} by the index, found in no file")]);
    }
}

#[test]
fn a_name_that_is_not_utf8_is_passed_over_unless_it_may_be_weights() {
    let name = |end: &str| PathBuf::from(OsString::from_vec([b"notes-\xff", end.as_bytes()].concat()));
    let repo = Repo::new().weights("a.safetensors", &[("t", W, &[1])]);
    fs::write(repo.0.path().join(name(".txt")), "x").unwrap();
    let checkpoint = repo.try_open().unwrap();
    let file = checkpoint.files().iter().find(|file| file.role == FileRole::Ignored(IgnoreReason::NotUtf8)).unwrap();
    assert_eq!(file.path, "notes-\u{fffd}.txt");
    fs::write(repo.0.path().join(name(".safetensors")), "x").unwrap();
    let error = repo.try_open().err().unwrap().to_string();
    assert!(error.contains("is not UTF-8") && error.contains("notes-"), "{error}");
}

#[test]
fn a_part_that_is_given_as_the_whole_is_refused_with_the_way() {
    // A shard of a set, by its name, and one that an index beside it names.
    let repo = Repo::new()
        .weights("model00001-of-00002.safetensors", &[("a", W, &[1])])
        .weights("x.safetensors", &[("a", W, &[1])])
        .weights("model.safetensors", &[("a", W, &[1])]);
    let open = |name: &str| Checkpoint::open(repo.path(name).to_str().unwrap(), &OpenOptions::default());
    let error = open("model00001-of-00002.safetensors").err().unwrap().to_string();
    let way = format!(
        "file 00001 of 00002 by its name, not the whole checkpoint: give the directory with the files of all of them, {}",
        repo.0.path().display()
    );
    assert!(error.contains(&way), "{error}");
    open("x.safetensors").unwrap();
    let repo = repo.index(&[("a", "x.safetensors"), ("b", "y.safetensors")]);
    let open = |name: &str| Checkpoint::open(repo.path(name).to_str().unwrap(), &OpenOptions::default());
    let error = open("x.safetensors").err().unwrap().to_string();
    assert!(error.contains("one of several files that model.safetensors.index.json beside it names"), "{error}");
    open("model.safetensors").unwrap();
    // Such a file may be what another checkpoint lacks.
    let part = repo.path("model00001-of-00002.safetensors").to_str().map(str::to_owned);
    let filled = Repo::new().weights("model.safetensors", &[("b", W, &[1])]);
    let options = OpenOptions { fill_from: part, ..OpenOptions::default() };
    assert_eq!(Checkpoint::open(filled.0.path().to_str().unwrap(), &options).unwrap().fill().count(), 1);
    // In a directory, too.
    let half = Repo::new().weights("model00001-of-00002.safetensors", &[("a", W, &[1])]);
    assert!(half.problems()[0].contains("expected 2 files by their names"), "{:?}", half.problems());

    // An adapter beside other weights is none of the model's.
    let adapter = |repo: Repo, base: &str| {
        repo.weights("adapter_model.safetensors", &[("base_model.model.q.lora_A.weight", W, &[2, 4])])
            .text("adapter_config.json", &json!({"base_model_name_or_path": base, "peft_type": "LORA"}).to_string())
    };
    let alone = adapter(Repo::new().config(&json!({"model_type": "llama"})), "org/base");
    let dir = alone.0.path().display();
    let expected = format!(
        "adapter_config.json: an adapter of org/base, not a model: give org/base as the source; --merge-lora {dir} merges the \
         adapter into it, and --lora {dir} shows it beside it"
    );
    assert_eq!(alone.problems(), [expected]);
    let both = adapter(Repo::new().weights("model.safetensors", &[("q.weight", W, &[4, 4])]), "org/base");
    assert_eq!(names(&both.open()), ["q.weight"]);
    let mlx =
        Repo::new().weights("adapters.safetensors", &[("q.lora_a", W, &[4, 2])]).text("adapter_config.json", "{}");
    assert!(mlx.problems()[0].contains("mlx_lm.fuse"), "{:?}", mlx.problems());

    // The part of one rank of tensor parallelism.
    let config = json!({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 1});
    let model = |heads: u64, inner: u64, expert: u64| {
        let shapes: [(&str, [u64; 2]); 5] = [
            ("self_attn.q_proj", [heads, 32]),
            ("self_attn.o_proj", [32, heads]),
            ("mlp.gate_proj", [inner, 32]),
            ("mlp.down_proj", [32, inner]),
            ("mlp.experts.0.down_proj", [32, expert]),
        ];
        let named = shapes.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape));
        let rows: Vec<Tensor<'_>> = named.iter().map(|(name, shape)| (name.as_str(), W, &shape[..])).collect();
        Repo::new().weights("model.safetensors", &rows).config(&config)
    };
    model(32, 64, 24).open();
    let error = model(16, 32, 12).problems().join("\n");
    let expected = "self_attn.o_proj.weight\" of BF16 [32, 16]: expected 32 columns by config.json, found 16, and all matrices that \
                    end attention or an MLP have 1/2 of theirs: these are the parts of one of 2 ranks";
    assert!(error.contains(expected), "{error}");
    assert!(model(8, 16, 6).problems()[0].contains("1/4 of theirs"));
    // A model that was pruned keeps some of its widths.
    for pruned in [model(16, 64, 24), model(32, 32, 12), model(16, 48, 12)] {
        pruned.open();
    }
}

#[test]
fn a_configuration_that_says_what_weights_mean_is_not_lost() {
    let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_weights(&dir.path().join("model.safetensors"), &[("model.layers.0.mlp.up_proj.weight", W, &[8, 4])]);
    let open = |members: &str| {
        let quantization = format!(r#""quantization_config": {{"quant_method": "compressed-tensors", {members}}}"#);
        let config = format!(r#"{{"model_type": "llama", "num_hidden_layers": 1, {quantization}}}"#);
        fs::write(other.path().join("config.json"), config).unwrap();
        let config_from = Some(other.path().display().to_string());
        let options = OpenOptions { config_from, ..OpenOptions::default() };
        Checkpoint::open(dir.path().to_str().unwrap(), &options).err().map(|error| error.to_string())
    };
    let error = open(r#""transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}"#).unwrap();
    assert!(error.contains("config.json: quantization_config has transform_config"), "{error}");
    assert_eq!(open(r#""transform_config": {}, "version": "0.14""#), None);
}
