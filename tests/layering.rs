//! What the compiler cannot see of the structure: each layer is a crate, which uses only those that its manifest names; here the
//! files of a layer are read, as words without comments, literals and unit tests.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use regex::Regex;

/// Outer crates, with the layers that may use them.
const ONLY_IN: &str = "fuser fuse, pyo3 python, clap cli, anyhow cli, tokio csi serve source, hyper serve, object_store source, \
    reqwest source, tonic csi";

/// Every file that may hold `unsafe`, relative to `src`. A new one is a decision, not an accident.
const UNSAFE_FILES: &str = "compare_bytes.rs fuse/connection.rs fuse/mounts/mounted.rs fuse/mounts/passed.rs \
    fuse/reply_data.rs host/limits.rs host/signal.rs python/memory.rs read/materialize.rs source/kernel_bytes.rs \
    source/local/advice.rs source/local/guard.rs source/local/map.rs tensor/kernel/encode.rs \
    tensor/kernel/product.rs tensor/kernel/row.rs tensor/kernel/unpack.rs tensor/transpose/lines.rs \
    tensor/transpose/mod.rs tensor/transpose/x86.rs";

/// Names of types that files of two layers, or of two parts of one, still have in common. The list may only become shorter.
const KNOWN_TWICE: [&str; 2] = ["Job", "Problem"];

struct SourceFile {
    /// Relative to `src`.
    name: &'static str,
    text: &'static str,
    tokens: Vec<&'static str>,
    /// The tokens with spaces between.
    code: String,
}

static SOURCES: LazyLock<Vec<SourceFile>> = LazyLock::new(|| sources_of("src"));

fn sources_of(directory: &str) -> Vec<SourceFile> {
    fn files(directory: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let mut paths = files(&base);
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    paths.sort();
    let file = |path: &PathBuf| {
        let text: &str = fs::read_to_string(path).unwrap().leak();
        let name = path.strip_prefix(&base).unwrap().to_str().unwrap().to_owned().leak();
        let tokens = tokens(text);
        SourceFile { name, text, code: tokens.join(" "), tokens }
    };
    paths.iter().map(file).collect()
}

/// Words, `::` and other signs before the unit tests, which end a file.
fn tokens(text: &str) -> Vec<&str> {
    static TOKEN: LazyLock<Regex> = LazyLock::new(|| {
        let literals = r##"\bb?r"[^"]*"|\bb?r#".*?"#|"(?:\\.|[^"\\])*"|'\\.[^']*'|'[^\\']'"##;
        Regex::new(&format!(r"(?s)//[^\n]*|/\*.*?\*/|{literals}|(\w+|::|\S)")).unwrap()
    });
    let code = text.split("mod tests {").next().unwrap();
    TOKEN.captures_iter(code).filter_map(|found| Some(found.get(1)?.as_str())).collect()
}

fn manifest(path: &str) -> toml::Table {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap().parse().unwrap()
}

/// The directories of `src` that hold code.
fn layers() -> BTreeSet<&'static str> {
    let layers = SOURCES.iter().filter_map(|file| Some(file.name.split_once('/')?.0));
    layers.filter(|name| *name != "guide").collect()
}

#[test]
fn every_directory_is_a_crate_of_the_workspace() {
    let all = manifest("Cargo.toml");
    let members = |key: &str| -> BTreeSet<&str> {
        let paths = all["workspace"][key].as_array().unwrap().iter().map(|path| path.as_str().unwrap());
        paths.filter(|path| *path != ".").map(|path| path.strip_prefix("src/").unwrap()).collect()
    };
    // The data of a layer that a lower one needs, too, is a crate of its own inside the layer.
    let crates = || layers().into_iter().chain(["plan/layouts"]);
    assert_eq!(members("members"), crates().collect());
    // Otherwise `cargo test` leaves its tests out. The module for Python has none in Rust, and only Python can load it.
    assert_eq!(members("default-members"), crates().filter(|layer| *layer != "python").collect());
    let loose: Vec<&str> = SOURCES.iter().map(|file| file.name).filter(|name| !name.contains('/')).collect();
    assert_eq!(loose, ["compare_bytes.rs", "lib.rs", "main.rs"]);
}

/// A type that other files may use has a name of its own. The crate may then be searched for it.
#[test]
fn a_type_name_has_one_meaning() {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    // `pub` or `pub(...)`: what is private to a file is a local name.
    let public = Regex::new(r"(?:\bpub|\)) (?:struct|enum|trait|union) (\w+)").unwrap();
    for (file, code) in SOURCES.iter().map(|file| (file.name, &file.code)) {
        public.captures_iter(code).for_each(|name| found.entry(name.extract::<1>().1[0]).or_default().push(file));
    }
    found.retain(|_, files| files.len() > 1);
    assert!(found.keys().eq(&KNOWN_TWICE), "types of the same name: {found:#?}");
}

/// What only its own layer uses is not public: then the compiler says when nothing uses it any more.
#[test]
fn what_is_public_is_used_by_another_layer() {
    let outside: Vec<_> = ["tests", "examples"].into_iter().flat_map(sources_of).collect();
    let layer = |file: &SourceFile| file.name.split('/').next().unwrap();
    let mut users: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (user, file) in SOURCES.iter().map(|file| (layer(file), file)).chain(outside.iter().map(|file| ("", file))) {
        for word in &file.tokens {
            users.entry(word).or_default().insert(user);
        }
    }
    let item = Regex::new(r"\bpub (?:(?:const |unsafe |async )*fn|const) (\w+)").unwrap();
    let mut unused = Vec::new();
    // The root passes the layers on, and Python calls its module.
    for file in SOURCES.iter().filter(|file| file.name.contains('/') && !file.name.starts_with("python/")) {
        for [name] in item.captures_iter(&file.code).map(|found| found.extract().1) {
            if users[name].iter().all(|user| *user == layer(file)) {
                unused.push(format!("{}: {name}", file.name));
            }
        }
    }
    assert!(unused.is_empty(), "public, and used by no other layer: write pub(crate)\n{}", unused.join("\n"));
}

type Words = Vec<&'static str>;

/// What one file names and defines.
struct Names {
    /// Paths of its `use` and of its code, without what it only re-exports.
    paths: Vec<Words>,
    /// Types, and other items at its top.
    items: BTreeSet<&'static str>,
}

fn names(tokens: &[&'static str]) -> Names {
    let (mut words, mut paths, mut items) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
    let (mut path, mut groups, mut depth, mut is_public) = (Words::new(), vec![], 0, None);
    for at in 0..tokens.len() {
        let before = |count: usize| &tokens[at.saturating_sub(count)..at];
        let is_path = before(1) == ["::"];
        match tokens[at] {
            // Not `+ use<...>` of a type.
            "use" if tokens.get(at + 1) != Some(&"<") => {
                is_public = Some([["pub"], [")"]].iter().any(|of| before(1) == of));
            }
            ";" => is_public = None,
            "{" if is_path => groups.push(std::mem::take(&mut path)),
            "{" => depth += 1,
            "}" if groups.pop().is_none() => depth -= 1,
            word if word.starts_with(|c: char| c.is_alphabetic() || c == '_') && before(1) != ["as"] => {
                if is_public.is_none() && before(1) != ["mod"] {
                    words.insert(word);
                }
                let is = |kinds: [&str; 4]| before(1).iter().any(|kind| kinds.contains(kind) && before(2)[0] != "'");
                if is(["struct", "enum", "trait", "union"]) || depth == 0 && is(["fn", "type", "const", "static"]) {
                    items.insert(word);
                }
                if !is_path {
                    path = groups.last().cloned().unwrap_or_default();
                }
                // The path of `pub(in ...)` says which files may use a name, not what this file needs.
                path.push(if before(3) == ["pub", "(", "in"] { "in" } else { word });
                if path.len() > 1 && tokens.get(at + 1) != Some(&"::") {
                    paths.push((path.clone(), is_public == Some(true)));
                }
            }
            _ => {}
        }
    }
    paths.retain(|(path, is_public)| !is_public || words.contains(path.last().unwrap()));
    Names { paths: paths.into_iter().map(|(path, _)| path).collect(), items }
}

/// The files of all crates by their modules from `src`, as `tensor`, `view` for `tensor/view.rs`, the first of which is the crate.
struct Graph(BTreeMap<Words, (&'static str, Names)>);

impl Graph {
    fn new(files: impl Iterator<Item = (&'static str, Words)>) -> Self {
        let module = |name: &'static str| {
            let path = name.strip_suffix("/mod.rs").or_else(|| name.strip_suffix(".rs")).unwrap();
            if path == "lib" { Words::new() } else { path.split('/').collect() }
        };
        Self(files.map(|(name, tokens)| (module(name), (name, names(&tokens)))).collect())
    }

    /// The file that defines what a path in a module's code leads to; `None` if it begins in another crate or with a name in scope.
    ///
    /// The path is followed as far as it names files. An item that comes after (its first type, else its last word) is in that file or
    /// in one that the path names, or else is a file or in a file that one of these re-exports.
    fn home(&self, module: &Words, path: &[&'static str]) -> Option<&Words> {
        let supers = path.iter().take_while(|word| **word == "super").count();
        let (base, skipped) = match path[0] {
            "crate" => (&module[..1], 1),
            "super" => (&module[..module.len() - supers], supers),
            "self" => (&module[..], 1),
            child if self.0.contains_key(&[module, &[child][..]].concat()) => (&module[..], 0),
            _ => return None,
        };
        let path = [base, path[skipped..].strip_suffix(&["self"]).unwrap_or(&path[skipped..])].concat();
        let depth = (0..=path.len()).rev().find(|depth| self.0.contains_key(&path[..*depth]))?;
        let (last, rest) = (self.0.get_key_value(&path[..depth])?.0, &path[depth..]);
        let is_type = |word: &&&str| word.starts_with(char::is_uppercase);
        let Some(item) = rest.iter().find(is_type).or(rest.last()) else { return Some(last) };
        let files = || self.0.iter().filter(|(other, _)| other.first() == module.first());
        let homes = files().filter(|(_, (_, names))| names.items.contains(item));
        let homes: Vec<&Words> = homes.map(|(home, _)| home).collect();
        let is_near = |home: &&&Words| **home == last || home.last().is_some_and(|name| rest.contains(name));
        let file = files().map(|(other, _)| other).find(|other| other.last() == Some(item));
        let only = homes.first().filter(|_| homes.len() == 1).copied();
        // A macro of the file may define it.
        let last = Some(last).filter(|last| depth > base.len() && !self.0[*last].0.ends_with("mod.rs"));
        homes.iter().find(is_near).copied().or(file).or(only).or(last)
    }

    /// Each need of a file that, over others or at once, needs that file.
    fn cycles(&self) -> Vec<String> {
        let mut needs: BTreeMap<&Words, BTreeMap<&Words, &Words>> = BTreeMap::new();
        for (module, (_, names)) in &self.0 {
            let homes = names.paths.iter().filter_map(|path| Some((self.home(module, path)?, path)));
            needs.insert(module, homes.filter(|(home, _)| *home != module).collect());
        }
        let leads_to = |from: &Words, to: &Words| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
            while let Some(module) = left.pop() {
                left.extend(needs[module].keys().filter(|next| seen.insert(**next)));
            }
            seen.contains(to)
        };
        let edges = needs.iter().flat_map(|(from, needs)| needs.iter().map(move |(to, path)| (*from, *to, path)));
        let edges = edges.filter(|(from, to, _)| leads_to(to, from));
        edges.map(|(from, to, path)| format!("{} needs of {}: {path:?}", self.0[from].0, self.0[to].0)).collect()
    }
}

/// Files of one layer form no cycle, so that each can be read after the files that it needs.
///
/// A file needs another if its code names something that the other defines: by `use` or by a path in the code, through whatever
/// re-exports it. A file that re-exports a name (`pub use`) without naming it elsewhere does not need it: a `mod.rs` that only
/// re-exports is in no cycle. Unit tests do not count; they may use everything. Method calls are not seen, as no path leads to them.
#[test]
fn files_of_a_layer_form_no_cycle() {
    let files = SOURCES.iter().filter(|file| file.name != "main.rs");
    let found = Graph::new(files.map(|file| (file.name, file.tokens.clone()))).cycles();
    assert!(found.is_empty(), "files that need each other: {found:#?}");
}

#[test]
fn cycles_are_found_through_re_exports_and_paths() {
    let reexports = "pub use x::X; pub use y::{Y, other};";
    for (top, x, y, is_cycle) in [
        (reexports, "use super::Y; struct X;", "use crate::X; struct Y;", true),
        (reexports, "use super::y::Y as Z; struct X;", "fn f() { super::x::X::new() } struct Y;", true),
        ("pub use x::*; pub use y::Y;", "use super::Y; struct X;", "use super::X; struct Y;", true),
        ("use {x::X, y::Y};", "use super::{Y, y::{self}}; struct X;", "use crate::{X}; struct Y;", true),
        (reexports, "struct X;", "use super::X; struct Y;", false),
        (reexports, "struct X; mod tests { use super::super::Y; }", "use super::X; struct Y;", false),
        ("pub use x::X; struct A;", "use super::A; struct X;", "use super::X; struct Y;", false),
        ("pub use x::X; pub struct A(X);", "use super::A; struct X;", "", true),
        ("fn f() { x::g() } struct A;", "use super::A; fn g() {}", "", true),
        ("use x::f; fn g() { f() }", "pub(crate) fn f() {} pub(in crate::a) fn h() {}", "", false),
        ("", "use super::y::f; fn g() {}", "fn f() {} fn g() { super::x::g() }", true),
        ("", "use super::y;", "use super::y::z::Z; mod z;", true),
        ("", "// super::y;\nfn f() { r#\"super::y\"#; '\"'; \"super::y \\\" \" }", "use super::x;", false),
    ] {
        let top: &str = format!("mod x; mod y; {top}").leak();
        let texts = ["pub mod a;", top, x, y, "use crate::x; struct Z;"].map(tokens);
        let found = Graph::new(["lib.rs", "a/mod.rs", "a/x.rs", "a/y.rs", "a/y/z.rs"].into_iter().zip(texts)).cycles();
        assert_eq!(!found.is_empty(), is_cycle, "{top}\n{x}\n{y}\n{found:?}");
    }
}

#[test]
fn outer_crates_stay_in_their_layer() {
    for (name, homes) in ONLY_IN.split(", ").map(|row| row.split_once(' ').unwrap()) {
        let uses = |layer: &&str| {
            let manifest = manifest(&format!("src/{layer}/Cargo.toml"));
            manifest["dependencies"].as_table().unwrap().contains_key(name)
        };
        assert!(layers().into_iter().filter(uses).eq(homes.split(' ')), "other layers than {homes} use {name}");
    }
}

/// The compiler refuses `unsafe` where a file does not allow it. Kernel-only buffers become a slice for fuser only, beside the type's
/// own calls.
#[test]
fn what_must_be_in_few_files_is_there_only() {
    let kernel_buffers = ("for_system_call", "fuse/reply_data.rs source/kernel_bytes.rs");
    for (what, places) in [(r"(?m)^#!\[allow\(.*\bunsafe_code\b", UNSAFE_FILES), kernel_buffers] {
        let what = Regex::new(what).unwrap();
        let found = SOURCES.iter().filter(|file| what.is_match(file.text)).map(|file| file.name);
        assert_eq!(found.collect::<Vec<_>>().join(" "), places, "{what}");
    }
}

/// The reference evaluator is independent only if it shares nothing with the code that it checks.
#[test]
fn the_reference_uses_only_the_expression() {
    const CHECKED: [&str; 6] = ["Tiling", "Program", "Window", "gather", "convert_row", "greatest_magnitude"];
    let files = SOURCES.iter().filter(|file| file.name.starts_with("read/reference/"));
    let words: BTreeSet<&str> = files.flat_map(|file| file.tokens.iter().copied()).collect();
    assert!(words.contains("View"), "the files of read/reference");
    assert!(!CHECKED.iter().any(|checked| words.contains(checked)), "the reference uses what it checks");
}
