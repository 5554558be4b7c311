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
const ONLY_IN: [(&str, &[&str]); 8] = [
    ("fuser", &["fuse"]),
    ("pyo3", &["python"]),
    ("clap", &["cli"]),
    ("anyhow", &["cli"]),
    ("tokio", &["serve", "source"]),
    ("hyper", &["serve"]),
    ("object_store", &["source"]),
    ("reqwest", &["source"]),
];

/// Every file that may hold `unsafe`, relative to `src`. A new one is a decision, not an accident.
const UNSAFE_FILES: &str = "compare_bytes.rs fuse/mounts/mounted.rs fuse/mounts/passed.rs \
    fuse/reply_data.rs host/limits.rs host/signal.rs python/memory.rs read/materialize.rs source/kernel_bytes.rs \
    source/local/advice.rs source/local/guard.rs source/local/map.rs tensor/kernel/dot.rs tensor/kernel/encode.rs \
    tensor/kernel/product.rs tensor/kernel/row.rs tensor/kernel/unpack.rs tensor/transpose/lines.rs \
    tensor/transpose/mod.rs tensor/transpose/x86.rs";

/// Names of types that files of two layers, or of two parts of one, still have in common. The list may only become shorter.
const KNOWN_TWICE: [&str; 2] = ["Job", "Problem"];

/// The data of a layer that a lower one needs, too, as a crate of its own inside the layer.
const DATA: [&str; 1] = ["plan/layouts"];

struct SourceFile {
    /// Relative to `src`.
    name: &'static str,
    text: &'static str,
    tokens: Vec<&'static str>,
}

static SOURCES: LazyLock<Vec<SourceFile>> = LazyLock::new(|| sources_of("src"));

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources_of(directory: &str) -> Vec<SourceFile> {
    fn rust_files(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => rust_files(&path, found),
                Some(extension) if extension == "rs" => found.push(path),
                _ => {}
            }
        }
    }
    let (base, mut paths) = (root().join(directory), Vec::new());
    rust_files(&base, &mut paths);
    paths.sort();
    let file = |path: &PathBuf| {
        let text: &str = fs::read_to_string(path).unwrap().leak();
        let name = path.strip_prefix(&base).unwrap().to_str().unwrap().to_owned().leak();
        SourceFile { name, text, tokens: tokens(text) }
    };
    paths.iter().map(file).collect()
}

/// Words, `::` and other signs.
fn tokens(text: &str) -> Vec<&str> {
    static TOKEN: LazyLock<Regex> = LazyLock::new(|| {
        let literals = r##"\bb?r"[^"]*"|\bb?r#".*?"#|"(?:\\.|[^"\\])*"|'\\.[^']*'|'[^\\']'"##;
        Regex::new(&format!(r"(?s)//[^\n]*|/\*.*?\*/|{literals}|\w+|::|\S")).unwrap()
    });
    let is_word = |token: &str| token.chars().all(|c| c.is_alphanumeric() || c == '_');
    let all = TOKEN.find_iter(text).map(|found| found.as_str());
    let all: Vec<&str> = all.filter(|token| token.len() == 1 || *token == "::" || is_word(token)).collect();
    let (mut kept, mut at) = (Vec::with_capacity(all.len()), 0);
    while at < all.len() {
        if all[at..].starts_with(&["mod", "tests", "{"]) {
            let mut depth = 0;
            at += 2 + all[at + 2..]
                .iter()
                .take_while(|token| {
                    depth += i32::from(**token == "{") - i32::from(**token == "}");
                    depth > 0
                })
                .count();
        } else {
            kept.push(all[at]);
        }
        at += 1;
    }
    kept
}

fn manifest(path: &str) -> toml::Table {
    fs::read_to_string(root().join(path)).unwrap().parse().unwrap()
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
    let crates = || layers().into_iter().chain(DATA);
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
    for file in SOURCES.iter() {
        for words in file.tokens.windows(3) {
            // `pub` or `pub(…)`: what is private to a file is a local name.
            if [")", "pub"].contains(&words[0]) && ["struct", "enum", "trait", "union"].contains(&words[1]) {
                found.entry(words[2]).or_default().push(file.name);
            }
        }
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
    let mut unused = Vec::new();
    // The root passes the layers on, and Python calls its module.
    for file in SOURCES.iter().filter(|file| file.name.contains('/') && !file.name.starts_with("python/")) {
        for at in 0..file.tokens.len() {
            let Some(rest) = file.tokens[at..].strip_prefix(&["pub"]) else { continue };
            let qualifiers = rest.iter().take_while(|token| ["const", "unsafe", "async"].contains(token)).count();
            let named = match &rest[qualifiers..] {
                ["fn", name, ..] => name,
                [name, ":", ..] if qualifiers == 1 => name,
                _ => continue,
            };
            if users[*named].iter().all(|user| *user == layer(file)) {
                unused.push(format!("{}: {named}", file.name));
            }
        }
    }
    assert!(unused.is_empty(), "public, and used by no other layer: write pub(crate)\n{}", unused.join("\n"));
}

type Words = Vec<&'static str>;

/// The references of one file to others.
#[derive(Default)]
struct Names {
    /// Modules that it declares as separate files.
    children: BTreeSet<&'static str>,
    /// What each `use` brings in: the local name, `*` for all of a module, its path, and whether others may import it from here.
    aliases: Vec<(&'static str, Words, bool)>,
    /// Paths in its code.
    paths: Vec<Words>,
    /// Words of its code outside `use`.
    words: BTreeSet<&'static str>,
}

/// Reads what follows `use`; returns its number of words.
fn use_tree(tokens: &[&'static str], is_public: bool, aliases: &mut Vec<(&'static str, Words, bool)>) -> usize {
    let (mut path, mut outer, mut name) = (Words::new(), Vec::new(), None);
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "::" | "as" => {}
            "{" => {
                outer.push(path.clone());
                name = None;
            }
            "," | "}" | ";" => {
                aliases.extend(name.take().map(|name| (name, path, is_public)));
                if *token == "}" {
                    outer.pop();
                }
                path = outer.last().cloned().unwrap_or_default();
                if *token == ";" {
                    return at;
                }
            }
            word if at > 0 && tokens[at - 1] == "as" => name = Some(word),
            "self" if !path.is_empty() => name = path.last().copied(),
            word => {
                path.push(word);
                name = Some(word);
            }
        }
    }
    tokens.len()
}

fn names(tokens: &[&'static str]) -> Names {
    let is_word = |token: &&str| token.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let (mut names, mut at) = (Names::default(), 0);
    while at < tokens.len() {
        match &tokens[at..] {
            ["mod", name, ";", ..] => {
                names.children.insert(name);
                at += 2;
            }
            // The path of `pub(in …)` says which files may use a name, not what this file needs.
            ["pub", "(", "in", ..] => at += tokens[at..].iter().take_while(|token| **token != ")").count(),
            // Not `+ use<…>` of a type.
            ["use", next, ..] if *next != "<" => {
                let is_public = at > 0 && ["pub", ")"].contains(&tokens[at - 1]);
                at += use_tree(&tokens[at + 1..], is_public, &mut names.aliases);
            }
            [word, rest @ ..] if is_word(word) => {
                names.words.insert(word);
                let more = rest.chunks(2).take_while(|pair| pair[0] == "::" && pair.get(1).is_some_and(is_word));
                let path: Words = [*word].into_iter().chain(more.map(|pair| pair[1])).collect();
                if path.len() > 1 && (at == 0 || tokens[at - 1] != "::") {
                    at += 2 * (path.len() - 1);
                    names.paths.push(path);
                }
            }
            _ => {}
        }
        at += 1;
    }
    names
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

    /// A path in a module's code as one from `src`; `None` if its head is another crate or a name in scope.
    fn absolute(&self, module: &[&'static str], path: &[&'static str]) -> Option<Words> {
        let supers = path.iter().take_while(|name| **name == "super").count();
        let (base, rest) = match path[0] {
            "crate" => (&module[..1], &path[1..]),
            "self" => (module, &path[1..]),
            "super" => (&module[..module.len() - supers], &path[supers..]),
            head if self.0[module].1.children.contains(head) => (module, path),
            _ => return None,
        };
        Some([base, rest].concat())
    }

    /// The module that defines a path from `src`, found through all re-exports on its way.
    fn home(&self, path: &[&'static str]) -> Option<&[&'static str]> {
        let depth = (0..=path.len()).rev().find(|depth| self.0.contains_key(&path[..*depth]))?;
        let (module, (_, names)) = self.0.get_key_value(&path[..depth])?;
        let Some(name) = path.get(depth) else { return Some(module) };
        if let Some((_, target, _)) = names.aliases.iter().find(|alias| alias.0 == *name) {
            return self.home(&[self.absolute(module, target)?, path[depth + 1..].to_vec()].concat());
        }
        // A name that this file does not define comes from a glob; the words of the file identify it well enough.
        let globs = names.aliases.iter().filter(|alias| alias.0 == "*" && !names.words.contains(name));
        let mut elsewhere = globs.filter_map(|(_, target, _)| {
            let target = self.absolute(module, &target[..target.len() - 1])?;
            self.home(&[target, path[depth..].to_vec()].concat())
        });
        elsewhere.find(|home| self.0[*home].1.words.contains(name)).or(Some(module))
    }

    /// The files of its layer that a module needs, each with the paths that lead there.
    fn needs(&self, module: &Words) -> BTreeMap<&[&'static str], BTreeSet<String>> {
        let names = &self.0[module].1;
        // A name that is only re-exported is not needed.
        let used = names.aliases.iter().filter(|(name, _, is_public)| !is_public || names.words.contains(name));
        let paths = used.map(|(_, path, _)| path).chain(&names.paths);
        let mut needs: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for path in paths.filter_map(|path| self.absolute(module, path)).filter(|path| path.first() == module.first()) {
            let path = path.strip_suffix(&["*"]).unwrap_or(&path);
            if let Some(home) = self.home(path).filter(|home| home != module) {
                needs.entry(home).or_default().insert(path.join("::"));
            }
        }
        needs
    }

    /// Each need of a file that, over others or at once, needs that file.
    fn cycles(&self) -> Vec<String> {
        let needs: BTreeMap<_, _> = self.0.keys().map(|module| (&module[..], self.needs(module))).collect();
        let leads_to = |from: &[&str], to: &[&str]| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
            while let Some(module) = left.pop() {
                left.extend(needs[module].keys().filter(|next| seen.insert(**next)));
            }
            seen.contains(to)
        };
        let edges = needs.iter().flat_map(|(from, needs)| needs.iter().map(move |(to, paths)| (*from, *to, paths)));
        let edges = edges.filter(|(from, to, _)| leads_to(to, from));
        edges.map(|(from, to, paths)| format!("{} needs of {}: {paths:?}", self.0[from].0, self.0[to].0)).collect()
    }
}

/// Files of one layer form no cycle, so that each can be read after the files that it needs.
///
/// A file needs another if its code names something that the other defines: by `use`, by a path in the code, and through
/// re-exports, which are followed to the definition. A file that re-exports a name (`pub use`) without naming it elsewhere
/// does not need it: a `mod.rs` that only re-exports is in no cycle. Unit tests do not count; they may use everything.
/// Method calls are not seen, as no path leads to them.
#[test]
fn files_of_a_layer_form_no_cycle() {
    let files = SOURCES.iter().filter(|file| file.name != "main.rs");
    let found = Graph::new(files.map(|file| (file.name, file.tokens.clone()))).cycles();
    assert!(found.is_empty(), "files that need each other: {found:#?}");
}

#[test]
fn cycles_are_found_through_re_exports_and_paths() {
    for (top, x, y, is_cycle) in [
        ("pub use x::X; pub use y::{Y, other};", "use super::Y; struct X;", "use crate::X; struct Y;", true),
        (
            "pub use x::X; pub use y::Y;",
            "use super::y::Y as Z; struct X;",
            "fn f() { super::x::X::new() } struct Y;",
            true,
        ),
        ("pub use x::*; pub use y::Y;", "use super::Y; struct X;", "use super::X; struct Y;", true),
        ("use {x::X, y::Y};", "use super::{Y, y::{self}}; struct X;", "use crate::{X}; struct Y;", true),
        ("pub use x::X; pub use y::Y;", "struct X;", "use super::X; struct Y;", false),
        (
            "pub use x::X; pub use y::Y;",
            "struct X; mod tests { use super::super::Y; }",
            "use super::X; struct Y;",
            false,
        ),
        ("pub use x::X; pub use y::Y; struct A;", "use super::A; struct X;", "use super::X; struct Y;", false),
        ("pub use x::X; pub struct A(X);", "use super::A; struct X;", "", true),
        ("fn f() { x::g() } struct A;", "use super::A; fn g() {}", "", true),
        ("use x::f; fn g() { f() }", "pub(crate) fn f() {}", "", false),
        ("", "use super::y;", "use super::y::z::Z; mod z;", true),
    ] {
        let top: &str = format!("mod x; mod y; {top}").leak();
        let files = [
            ("lib.rs", "pub mod a;"),
            ("a/mod.rs", top),
            ("a/x.rs", x),
            ("a/y.rs", y),
            ("a/y/z.rs", "use crate::x; struct Z;"),
        ];
        let found = Graph::new(files.into_iter().map(|(name, text)| (name, tokens(text)))).cycles();
        assert_eq!(!found.is_empty(), is_cycle, "{files:?} {found:?}");
    }
}

#[test]
fn outer_crates_stay_in_their_layer() {
    for (name, homes) in ONLY_IN {
        let uses = |layer: &&str| {
            let manifest = manifest(&format!("src/{layer}/Cargo.toml"));
            manifest["dependencies"].as_table().unwrap().contains_key(name)
        };
        assert_eq!(layers().into_iter().filter(uses).collect::<Vec<_>>(), homes, "{name}");
    }
}

/// The compiler refuses `unsafe` elsewhere.
#[test]
fn unsafe_code_is_where_it_is_declared() {
    let declares = |line: &str| line.starts_with("#![allow(") && line.contains("unsafe_code");
    let declared = SOURCES.iter().filter(|file| file.text.lines().any(declares)).map(|file| file.name);
    assert_eq!(declared.collect::<Vec<_>>(), UNSAFE_FILES.split(' ').collect::<Vec<_>>());
}

/// Kernel-only buffers become a slice in one place, beside the type's own calls.
#[test]
fn kernel_only_buffers_become_a_slice_for_fuser_only() {
    let using = SOURCES.iter().filter(|file| file.text.contains("for_system_call")).map(|file| file.name);
    assert_eq!(using.collect::<Vec<_>>(), ["fuse/reply_data.rs", "source/kernel_bytes.rs"]);
}

/// The reference evaluator is independent only if it shares nothing with the code that it checks.
#[test]
fn the_reference_uses_only_the_expression() {
    let files: Vec<_> = SOURCES.iter().filter(|file| file.name.starts_with("read/reference/")).collect();
    assert!(!files.is_empty(), "the files of read/reference");
    let modules = ["lower", "tiling", "gather", "convert", "kernel", "transpose", "value", "span"];
    for pair in files.iter().flat_map(|file| file.tokens.windows(2)) {
        let is_checked =
            modules.contains(&pair[0]) && pair[1] == "::" || ["Tiling", "Program", "Window"].contains(&pair[0]);
        assert!(!is_checked, "the reference uses {}", pair[0]);
    }
}

#[test]
fn the_token_reader_reads_code() {
    let text = r##"
        //! crate::comment
        use a::{b, c}; /* crate::block */
        let s = "crate::string \" still"; let r = r#"crate::raw " "#; let c = '"'; let q = '\''; let l: &'static str = s;
    "##;
    let words: Vec<_> = tokens(text).into_iter().filter(|token| token.starts_with(char::is_alphabetic)).collect();
    assert_eq!(words.join(" "), "use a b c let s let r let c let q let l static str s");
    assert_eq!(tokens("a mod tests { b { c } } d"), ["a", "d"]);
}
