//! What the compiler cannot see of the structure: each layer is a crate, which uses only those that its manifest names; here the
//! files of a layer are read, without comments, strings and doc links.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

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
const UNSAFE_FILES: [&str; 21] = [
    "compare_bytes.rs",
    "fuse/mounts/mount_id.rs",
    "fuse/mounts/mounted.rs",
    "fuse/mounts/passed.rs",
    "fuse/reply_data.rs",
    "host/limits.rs",
    "host/signal.rs",
    "python/memory.rs",
    "read/materialize.rs",
    "source/kernel_bytes.rs",
    "source/local/advice.rs",
    "source/local/guard.rs",
    "source/local/map.rs",
    "tensor/kernel/dot.rs",
    "tensor/kernel/encode.rs",
    "tensor/kernel/product.rs",
    "tensor/kernel/row.rs",
    "tensor/kernel/unpack.rs",
    "tensor/transpose/lines.rs",
    "tensor/transpose/mod.rs",
    "tensor/transpose/x86.rs",
];

/// Pairs of files: the first still needs the second, and should not. The list may only become
/// shorter.
const KNOWN_BACKWARD: [(&str, &str); 0] = [];

/// Names of types that files of two layers, or of two parts of one, still have in common. The list may only become shorter.
const KNOWN_TWICE: [&str; 3] = ["Job", "Problem", "Problems"];

struct SourceFile {
    /// Relative to `src`, with `/`.
    name: String,
    text: String,
    /// The text without comments and literals.
    code: String,
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    rust_files(&root, &mut paths);
    paths.sort();
    let file = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
        let text = fs::read_to_string(&path).unwrap();
        let code = code_only(&text);
        SourceFile { name, text, code }
    };
    paths.into_iter().map(file).collect()
}

/// Replaces comments, strings and character literals by spaces; keeps lines.
fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    let ahead = |at: usize, word: &str| word.chars().enumerate().all(|(n, c)| chars.get(at + n) == Some(&c));
    while at < chars.len() {
        let end = if ahead(at, "//") {
            (at..chars.len()).find(|n| chars[*n] == '\n').unwrap_or(chars.len())
        } else if ahead(at, "/*") {
            let mut depth = 0;
            let mut n = at;
            loop {
                if n >= chars.len() {
                    break n;
                } else if ahead(n, "/*") {
                    (depth, n) = (depth + 1, n + 2);
                } else if ahead(n, "*/") {
                    (depth, n) = (depth - 1, n + 2);
                    if depth == 0 {
                        break n;
                    }
                } else {
                    n += 1;
                }
            }
        } else if let Some(hashes) = raw_string(&chars, at) {
            let close: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let body = at + hashes + 2;
            (body..chars.len()).find(|n| ahead(*n, &close)).map_or(chars.len(), |n| n + close.len())
        } else if chars[at] == '"' {
            let mut n = at + 1;
            while n < chars.len() && chars[n] != '"' {
                n += if chars[n] == '\\' { 2 } else { 1 };
            }
            n + 1
        } else if chars[at] == '\'' && chars.get(at + 1) == Some(&'\\') {
            (at + 3..chars.len()).find(|n| chars[*n] == '\'').map_or(chars.len(), |n| n + 1)
        } else if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') {
            at + 3
        } else {
            code.push(chars[at]);
            at += 1;
            continue;
        };
        let end = end.min(chars.len());
        code.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    code
}

/// Number of `#` if a raw string begins here.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    let word_before = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_') && chars[at - 1] != 'b';
    if chars[at] != 'r' || word_before {
        return None;
    }
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    (chars.get(at + 1 + hashes) == Some(&'"')).then_some(hashes)
}

/// Identifiers, `::` and other punctuation, without white space.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if first.is_alphanumeric() || first == '_' {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

/// Removes `mod tests { … }`: unit tests may print, and may test features of a processor.
fn without_tests<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at..].starts_with(&["mod", "tests", "{"]) {
            let mut depth = 0;
            while at < tokens.len() {
                match tokens[at] {
                    "{" => depth += 1,
                    "}" => depth -= 1,
                    _ => {}
                }
                at += 1;
                if depth == 0 && tokens[at - 1] == "}" {
                    break;
                }
            }
            continue;
        }
        kept.push(tokens[at]);
        at += 1;
    }
    kept
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// A manifest below the root.
fn manifest(path: &str) -> toml::Table {
    fs::read_to_string(root().join(path)).unwrap().parse().unwrap()
}

/// The directories of `src` that hold code.
fn layers() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join("src")).unwrap().map(|entry| entry.unwrap());
    let directories = entries.filter(|entry| entry.path().is_dir());
    let names = directories.map(|entry| entry.file_name().into_string().unwrap());
    // Text only.
    names.filter(|name| name != "guide").collect()
}

/// The data of a layer that a lower one needs, too, as a crate of its own inside the layer.
const DATA: [&str; 1] = ["plan/layouts"];

#[test]
fn every_directory_is_a_crate_of_the_workspace() {
    let all = manifest("Cargo.toml");
    let members = |key: &str| -> BTreeSet<String> {
        let paths = all["workspace"][key].as_array().unwrap().iter().map(|path| path.as_str().unwrap());
        paths.filter(|path| *path != ".").map(|path| path.strip_prefix("src/").unwrap().to_owned()).collect()
    };
    let crates = || layers().into_iter().chain(DATA.map(str::to_owned));
    assert_eq!(members("members"), crates().collect());
    // Otherwise `cargo test` leaves its tests out. The module for Python has none in Rust, and only Python can load it.
    let tested = crates().filter(|layer| layer != "python").collect();
    assert_eq!(members("default-members"), tested);
    let sources = sources();
    let loose: Vec<&str> = sources.iter().map(|file| file.name.as_str()).filter(|name| !name.contains('/')).collect();
    assert_eq!(loose, ["compare_bytes.rs", "lib.rs", "main.rs"]);
}

/// A type that other files may use has a name of its own. The crate may then be searched for it.
#[test]
fn a_type_name_has_one_meaning() {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in sources() {
        let tokens = tokens(&file.code);
        let tokens = without_tests(&tokens);
        for at in 1..tokens.len() {
            let is_type = ["struct", "enum", "trait", "union"].contains(&tokens[at]);
            // `pub` or `pub(…)`: what is private to a file is a local name.
            if is_type && [")", "pub"].contains(&tokens[at - 1]) {
                found.entry(tokens[at + 1].to_owned()).or_default().push(file.name.clone());
            }
        }
    }
    found.retain(|_, files| files.len() > 1);
    let twice: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(twice, KNOWN_TWICE, "types of the same name: {found:#?}");
}

/// What only its own layer uses is not public: then the compiler says when nothing uses it any more.
#[test]
fn what_is_public_is_used_by_another_layer() {
    let sources = sources();
    let layer = |file: &SourceFile| file.name.split('/').next().unwrap().to_owned();
    let mut outside = Vec::new();
    for dir in ["tests", "examples"] {
        rust_files(&root().join(dir), &mut outside);
    }
    let outside = outside.iter().map(|path| (String::new(), code_only(&fs::read_to_string(path).unwrap())));
    let all = sources.iter().map(|file| (layer(file), file.code.clone())).chain(outside);
    let mut users: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (user, code) in all {
        for word in tokens(&code) {
            users.entry(word.to_owned()).or_default().insert(user.clone());
        }
    }
    let mut unused = Vec::new();
    // The root passes the layers on, and Python calls its module.
    for file in sources.iter().filter(|file| file.name.contains('/') && !file.name.starts_with("python/")) {
        let tokens = tokens(&file.code);
        let tokens = without_tests(&tokens);
        for at in 0..tokens.len() {
            let Some(rest) = tokens[at..].strip_prefix(&["pub"]) else { continue };
            let qualifiers = rest.iter().take_while(|token| ["const", "unsafe", "async"].contains(token)).count();
            let named = match &rest[qualifiers..] {
                ["fn", name, ..] => name,
                [name, ":", ..] if qualifiers == 1 => name,
                _ => continue,
            };
            if !users[*named].iter().any(|user| *user != layer(file)) {
                unused.push(format!("{}: {named}", file.name));
            }
        }
    }
    assert!(unused.is_empty(), "public, and used by no other layer: write pub(crate)\n{}", unused.join("\n"));
}

/// One name that a `use` brings into a module: its local name, and the path as written.
struct Alias<'a> {
    /// `*` for all names of a module.
    name: &'a str,
    path: Vec<&'a str>,
    /// Whether other modules may import it from here.
    is_public: bool,
}

/// The references of one file to others, without unit tests.
#[derive(Default)]
struct Names<'a> {
    /// Modules that it declares as separate files.
    children: BTreeSet<&'a str>,
    /// Names that it imports, each with the modules in braces around it.
    aliases: Vec<(Vec<&'a str>, Alias<'a>)>,
    /// Paths in its code, each with the modules in braces around it.
    paths: Vec<(Vec<&'a str>, Vec<&'a str>)>,
    /// Words of its code outside `use`.
    words: BTreeSet<&'a str>,
}

/// Reads a `use` tree that begins at `tokens[0]`; returns its names, and its number of tokens.
fn use_tree<'a>(tokens: &[&'a str], before: &[&'a str], is_public: bool, found: &mut Vec<Alias<'a>>) -> usize {
    let mut path = before.to_vec();
    let mut at = 0;
    loop {
        match tokens[at] {
            "::" => at += 1,
            "{" => {
                at += 1;
                while tokens[at] != "}" {
                    at += use_tree(&tokens[at..], &path, is_public, found);
                    at += usize::from(tokens[at] == ",");
                }
                return at + 1;
            }
            name => {
                path.push(name);
                at += 1;
                if tokens[at] != "::" {
                    if path.len() > 1 && name == "self" {
                        path.pop();
                    }
                    let mut name = path.last().copied().unwrap_or(name);
                    if tokens[at] == "as" {
                        name = tokens[at + 1];
                        at += 2;
                    }
                    found.push(Alias { name, path, is_public });
                    return at;
                }
            }
        }
    }
}

fn names<'a>(tokens: &[&'a str]) -> Names<'a> {
    let mut names = Names::default();
    let mut inner: Vec<(&str, usize)> = Vec::new();
    let mut braces = 0;
    let mut at = 0;
    while at < tokens.len() {
        let modules = || inner.iter().map(|module| module.0).collect::<Vec<_>>();
        match tokens[at] {
            "mod" if tokens.get(at + 2) == Some(&";") => {
                names.children.insert(tokens[at + 1]);
                at += 2;
            }
            "mod" if tokens.get(at + 2) == Some(&"{") => {
                braces += 1;
                inner.push((tokens[at + 1], braces));
                at += 2;
            }
            // The path of `pub(in …)` says which files may use a name, not what this file needs.
            "pub" if tokens.get(at + 1) == Some(&"(") && tokens.get(at + 2) == Some(&"in") => {
                at += tokens[at..].iter().take_while(|token| **token != ")").count();
            }
            "{" => braces += 1,
            "}" => {
                if inner.last().is_some_and(|module| module.1 == braces) {
                    inner.pop();
                }
                braces -= 1;
            }
            // Not `+ use<…>` of a type.
            "use" if tokens.get(at + 1) != Some(&"<") => {
                let is_public = at > 0 && (tokens[at - 1] == "pub" || tokens[at - 1] == ")");
                let mut found = Vec::new();
                at += use_tree(&tokens[at + 1..], &[], is_public, &mut found);
                names.aliases.extend(found.into_iter().map(|alias| (modules(), alias)));
            }
            word if word.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                names.words.insert(word);
                if tokens.get(at + 1) == Some(&"::") && (at == 0 || tokens[at - 1] != "::") {
                    let mut path = vec![word];
                    while tokens.get(at + 1) == Some(&"::")
                        && tokens
                            .get(at + 2)
                            .is_some_and(|next| next.starts_with(|c: char| c.is_alphabetic() || c == '_'))
                    {
                        at += 2;
                        path.push(tokens[at]);
                    }
                    names.paths.push((modules(), path));
                }
            }
            _ => {}
        }
        at += 1;
    }
    names
}

/// The modules of a file, from `src`: `tensor`, `view` for `tensor/view.rs`. The first is the crate.
fn module_of(name: &str) -> Vec<&str> {
    let path = name.strip_suffix("/mod.rs").or_else(|| name.strip_suffix(".rs")).unwrap_or(name);
    if path == "lib" { Vec::new() } else { path.split('/').collect() }
}

/// The files of all crates, each with its references to others.
struct Graph<'a> {
    modules: BTreeMap<Vec<&'a str>, usize>,
    names: Vec<Names<'a>>,
}

impl<'a> Graph<'a> {
    fn new(files: &'a [(String, Vec<&'a str>)]) -> Self {
        let modules = files.iter().enumerate().filter(|(_, file)| file.0 != "main.rs");
        Self {
            modules: modules.map(|(number, file)| (module_of(&file.0), number)).collect(),
            names: files.iter().map(|file| names(&file.1)).collect(),
        }
    }

    /// A path in a module's code as one from `src`; `None` if its head is another crate or a name in scope.
    fn absolute(&self, file: &[&'a str], inner: &[&'a str], path: &[&'a str]) -> Option<Vec<&'a str>> {
        let mut base: Vec<&str> = [file, inner].concat();
        let number = self.modules[file];
        let rest = match path[0] {
            "crate" => {
                base.truncate(1);
                &path[1..]
            }
            "self" => &path[1..],
            "super" => {
                let supers = path.iter().take_while(|name| **name == "super").count();
                base.truncate(base.len() - supers);
                &path[supers..]
            }
            head if inner.is_empty() && self.names[number].children.contains(head) => path,
            _ => return None,
        };
        base.extend(rest);
        Some(base)
    }

    /// The file that defines a path from `src`, found through all re-exports on its way.
    fn home(&self, path: &[&'a str], hops: usize) -> Option<usize> {
        assert!(hops < 20, "re-exports in a circle: {path:?}");
        let depth = (0..=path.len()).rev().find(|depth| self.modules.contains_key(&path[..*depth]))?;
        let (module, rest) = path.split_at(depth);
        let here = self.modules[module];
        let Some(name) = rest.first() else { return Some(here) };
        let mut globs = Vec::new();
        for (inner, alias) in &self.names[here].aliases {
            if !inner.is_empty() || (alias.name != *name && alias.name != "*") {
                continue;
            }
            let Some(mut target) = self.absolute(module, &[], &alias.path) else {
                if alias.name == *name {
                    return None; // of another crate
                }
                continue;
            };
            if alias.name == "*" {
                target.pop();
                target.extend(rest);
                globs.push(target);
            } else {
                target.extend(&rest[1..]);
                return self.home(&target, hops + 1);
            }
        }
        // A name that this file does not define comes from a glob; the words of the file identify it well enough.
        let elsewhere = globs.iter().find_map(|target| {
            let home = self.home(target, hops + 1)?;
            (self.names[home].words.contains(name) && !self.names[here].words.contains(name)).then_some(home)
        });
        Some(elsewhere.unwrap_or(here))
    }

    /// The files that a file needs, each with the paths that lead there.
    fn needs(&self, file: &[&'a str]) -> BTreeMap<usize, BTreeSet<String>> {
        let number = self.modules[file];
        let names = &self.names[number];
        // A name that is only re-exported is not needed.
        let used = |alias: &Alias<'_>| !alias.is_public || names.words.contains(alias.name);
        let aliases = names.aliases.iter().filter(|(_, alias)| used(alias)).map(|(inner, alias)| {
            let end = alias.path.len() - usize::from(alias.name == "*");
            (inner, &alias.path[..end])
        });
        let paths = names.paths.iter().map(|(inner, path)| (inner, &path[..]));
        let absolute = aliases.chain(paths).filter_map(|(inner, path)| self.absolute(file, inner, path));
        let mut needs: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for path in absolute.filter(|path| path.first() == file.first()) {
            match self.home(&path, 0) {
                Some(home) if home != number => needs.entry(home).or_default().insert(path.join("::")),
                _ => continue,
            };
        }
        needs
    }
}

/// Files of one layer that need each other.
struct Cycle {
    /// The files in order.
    files: Vec<String>,
    /// The names that each file needs of the others, for the message.
    reasons: Vec<String>,
}

/// All cycles, by their first file. In each pair of `except`, the first file does not count as needing the second.
fn cycles(files: &[(String, Vec<&str>)], except: &[(&str, &str)]) -> Vec<Cycle> {
    let graph = Graph::new(files);
    let mut needs = vec![BTreeMap::new(); files.len()];
    for (module, number) in &graph.modules {
        needs[*number] = graph.needs(module);
        needs[*number].retain(|home, _| !except.contains(&(files[*number].0.as_str(), files[*home].0.as_str())));
    }
    let mut reached: Vec<BTreeSet<usize>> = needs.iter().map(|needs| needs.keys().copied().collect()).collect();
    loop {
        let further: Vec<BTreeSet<usize>> = reached
            .iter()
            .map(|near| near.iter().flat_map(|file| &reached[*file]).chain(near).copied().collect())
            .collect();
        if further == reached {
            break;
        }
        reached = further;
    }
    let mut found = BTreeMap::new();
    for number in 0..files.len() {
        let in_cycle = |other: &usize| reached[number].contains(other) && reached[*other].contains(&number);
        let members: BTreeSet<usize> = (0..files.len()).filter(in_cycle).collect();
        if members.len() > 1 {
            found.insert(members.iter().map(|member| files[*member].0.clone()).collect::<Vec<_>>(), members);
        }
    }
    let cycle = |(names, members): (Vec<String>, BTreeSet<usize>)| {
        let mut reasons = Vec::new();
        for member in &members {
            for (home, paths) in needs[*member].iter().filter(|need| members.contains(need.0)) {
                let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
                reasons.push(format!("{} needs of {}: {}", files[*member].0, files[*home].0, paths.join(", ")));
            }
        }
        Cycle { files: names, reasons }
    };
    found.into_iter().map(cycle).collect()
}

/// Files of one layer form no cycle, so that each can be read after the files that it needs.
///
/// A file needs another if its code names something that the other defines: by `use`, by a path in the code, and through
/// re-exports, which are followed to the definition. A file that re-exports a name (`pub use`) without naming it elsewhere
/// does not need it: a `mod.rs` that only re-exports is in no cycle. Unit tests do not count; they may use everything.
/// Method calls are not seen, as no path leads to them.
#[test]
fn files_of_a_layer_form_no_cycle() {
    let sources = sources();
    let files: Vec<(String, Vec<&str>)> =
        sources.iter().map(|file| (file.name.clone(), without_tests(&tokens(&file.code)))).collect();
    let new: Vec<_> = cycles(&files, &KNOWN_BACKWARD).into_iter().map(|cycle| cycle.reasons).collect();
    assert!(new.is_empty(), "files that need each other: {new:#?}");
    let all = cycles(&files, &[]);
    let in_cycle = |(file, needed): &&(&str, &str)| {
        let reason = format!("{file} needs of {needed}: ");
        all.iter().any(|cycle| cycle.reasons.iter().any(|found| found.starts_with(&reason)))
    };
    let gone: Vec<_> = KNOWN_BACKWARD.iter().filter(|pair| !in_cycle(pair)).collect();
    assert!(gone.is_empty(), "in no cycle any more, take them off the list: {gone:#?}");
}

#[test]
fn cycles_are_found_through_re_exports_and_paths() {
    let cycles_of = |files: &[(&str, &'static str)]| {
        let files: Vec<_> =
            files.iter().map(|(name, code)| ((*name).to_owned(), without_tests(&tokens(code)))).collect();
        cycles(&files, &[])
    };
    let root = ("lib.rs", "pub mod a;");
    let cases: [(&str, &str, &str, bool); 12] = [
        ("pub use x::X; pub use y::{Y, other};", "use super::Y; struct X;", "use crate::X; struct Y;", true),
        (
            "pub use x::X; pub use y::Y;",
            "use super::y::Y as Z; struct X;",
            "fn f() { super::x::X::new() } struct Y;",
            true,
        ),
        ("pub use x::*; pub use y::Y;", "use super::Y; struct X;", "use super::X; struct Y;", true),
        ("use {x::X, y::Y};", "use super::{Y, y::{self}}; struct X;", "use crate::{X}; struct Y;", true),
        ("", "mod inner { use super::super::y; } struct X;", "use super::x; struct Y;", true),
        ("pub use x::X; pub use y::Y;", "struct X;", "use super::X; struct Y;", false),
        (
            "pub use x::X; pub use y::Y;",
            "struct X; mod tests { use super::super::Y; }",
            "use super::X; struct Y;",
            false,
        ),
        ("pub use x::X; pub use y::Y; struct A;", "use super::A; struct X;", "use super::X; struct Y;", false),
        ("pub use x::X; pub struct A(X);", "use super::A; struct X;", "", true),
        ("use x::X; fn f() -> X {}", "use super::f; struct X;", "", true),
        ("fn f() { x::g() } struct A;", "use super::A; fn g() {}", "", true),
        ("use x::f; fn g() { f() }", "pub(crate) fn f() {}", "", false),
    ];
    for (top, x, y, is_cycle) in cases {
        let top = format!("mod x; mod y; {top}");
        let files = [root, ("a/mod.rs", Box::leak(top.into_boxed_str())), ("a/x.rs", x), ("a/y.rs", y)];
        assert_eq!(!cycles_of(&files).is_empty(), is_cycle, "{files:?}");
    }
    let three = [
        ("a/mod.rs", "mod x; mod y; mod z;"),
        ("a/x.rs", "use super::y;"),
        ("a/y.rs", "use super::z::Z;"),
        ("a/z.rs", "use crate::x::X; struct Z;"),
    ];
    let found = cycles_of(&three);
    assert_eq!(found.iter().map(|cycle| &cycle.files).collect::<Vec<_>>(), [&["a/x.rs", "a/y.rs", "a/z.rs"]]);
    assert_eq!(found[0].reasons[2], "a/z.rs needs of a/x.rs: a::x::X");
}

#[test]
fn outer_crates_stay_in_their_layer() {
    for (name, homes) in ONLY_IN {
        let uses = |layer: &String| {
            let manifest = manifest(&format!("src/{layer}/Cargo.toml"));
            manifest["dependencies"].as_table().unwrap().contains_key(name)
        };
        assert_eq!(layers().into_iter().filter(uses).collect::<Vec<_>>(), homes, "{name}");
    }
}

#[test]
fn unsafe_code_is_where_it_is_declared() {
    let sources = sources();
    let holds = |file: &SourceFile, word: &str| without_tests(&tokens(&file.code)).contains(&word);
    let declared: BTreeSet<&str> = sources
        .iter()
        .filter(|file| file.text.lines().any(|line| line.starts_with("#![allow(") && line.contains("unsafe_code")))
        .map(|file| file.name.as_str())
        .collect();
    let used: BTreeSet<&str> =
        sources.iter().filter(|file| holds(file, "unsafe")).map(|file| file.name.as_str()).collect();
    let undeclared: Vec<_> = used.difference(&declared).collect();
    assert!(undeclared.is_empty(), "unsafe without #![allow(unsafe_code)]: {undeclared:?}");
    assert_eq!(declared, UNSAFE_FILES.into_iter().collect(), "the list in this test and the files that declare it");
}

/// Kernel-only buffers become a slice in one place, beside the type's own calls.
#[test]
fn kernel_only_buffers_become_a_slice_for_fuser_only() {
    let files = sources();
    let using: Vec<&str> =
        files.iter().filter(|file| file.code.contains("for_system_call")).map(|file| file.name.as_str()).collect();
    assert_eq!(using, ["fuse/reply_data.rs", "source/kernel_bytes.rs"]);
}

/// The reference evaluator is independent only if it shares nothing with the code that it checks.
#[test]
fn the_reference_uses_only_the_expression() {
    let sources = sources();
    let reference: Vec<&str> =
        sources.iter().filter(|file| file.name.starts_with("read/reference/")).map(|file| file.code.as_str()).collect();
    assert!(!reference.is_empty(), "the files of read/reference");
    let code = reference.concat();
    let tokens = tokens(&code);
    let checked =
        ["lower", "tiling", "gather", "convert", "kernel", "transpose", "value", "span", "Tiling", "Program", "Window"];
    for name in checked {
        let is_type = name.starts_with(char::is_uppercase);
        let used = (0..tokens.len()).any(|at| tokens[at] == name && (is_type || tokens.get(at + 1) == Some(&"::")));
        assert!(!used, "the reference uses {name}");
    }
}

#[test]
fn the_token_reader_reads_code() {
    let text = r##"
        //! crate::comment
        use a::{b, c};
        /* crate::block /* nested */ */
        let s = "crate::string \" still"; let r = r#"crate::raw " "#; let c = '"'; let q = '\''; let l: &'static str = s;
    "##;
    let code = code_only(text);
    let words: Vec<_> = tokens(&code).into_iter().filter(|token| token.starts_with(char::is_alphabetic)).collect();
    assert_eq!(words.join(" "), "use a b c let s let r let c let q let l static str s");
    assert_eq!(code.lines().count(), text.lines().count());
    assert_eq!(without_tests(&tokens("a mod tests { b { c } } d")), ["a", "d"]);
}
