//! The layers, held to their order by reading the code.
//!
//! `crate::<layer>` paths and `super::` paths that leave a layer are collected from `src` and compared with what each
//! layer may use. Comments, strings and doc links do not count.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Each layer with those it may use.
const MAY_USE: [(&str, &[&str]); 12] = [
    ("host", &[]),
    ("tensor", &[]),
    ("source", &[]),
    ("format", &["tensor"]),
    ("checkpoint", &["tensor", "source", "format"]),
    ("config", &["tensor", "source"]),
    // The checkpoint's table names files by the source's ids.
    ("plan", &["tensor", "source", "checkpoint", "config"]),
    ("image", &["tensor", "format"]),
    ("read", &["tensor", "source", "checkpoint", "image"]),
    ("volume", &["host", "tensor", "source", "checkpoint", "config", "plan", "image", "read"]),
    ("fuse", &["host", "volume"]),
    ("cli", &["host", "tensor", "source", "format", "checkpoint", "config", "plan", "image", "read", "volume", "fuse"]),
];

/// Crates, and the macros of standard output, with the one layer that may use them.
const ONLY_IN: [(&str, &str); 5] =
    [("fuser", "fuse"), ("clap", "cli"), ("anyhow", "cli"), ("println!", "cli"), ("print!", "cli")];

/// Every file that may hold `unsafe`, relative to `src`. A new one is a decision, not an accident.
const UNSAFE_FILES: [&str; 13] = [
    "fuse/mount.rs",
    "fuse/mount_id.rs",
    "fuse/reply_data.rs",
    "host/limits.rs",
    "host/signal.rs",
    "read/whole.rs",
    "source/kernel_bytes.rs",
    "source/local/advice.rs",
    "source/local/guard.rs",
    "source/local/map.rs",
    "tensor/kernel/row.rs",
    "tensor/kernel/unpack.rs",
    "tensor/transpose.rs",
];

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

/// Replaces comments, strings and character literals by blanks; keeps lines.
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

/// Identifiers, `::` and other punctuation, without blanks.
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

/// The first names after a path prefix that ends before `tokens`: one name, or those of a braced list.
fn first_names<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let [first, rest @ ..] = tokens else { return Vec::new() };
    if *first != "{" {
        return vec![first];
    }
    let mut names = Vec::new();
    let mut depth = 1;
    let mut begins = true;
    for token in rest {
        match *token {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => {
                begins = true;
                continue;
            }
            name if begins && depth == 1 => names.push(name),
            _ => {}
        }
        begins = false;
        if depth == 0 {
            break;
        }
    }
    names
}

/// The names that a file's code takes from the crate's root, by `crate::` or by enough `super::`. `depth` is that of the
/// file's own module; modules in braces are deeper.
fn crate_names<'a>(tokens: &[&'a str], depth: usize) -> BTreeSet<&'a str> {
    let mut names = BTreeSet::new();
    let mut inner_modules: Vec<usize> = Vec::new();
    let mut braces = 0;
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at] {
            "{" => {
                braces += 1;
                if at >= 2 && tokens[at - 2] == "mod" {
                    inner_modules.push(braces);
                }
            }
            "}" => {
                if inner_modules.last() == Some(&braces) {
                    inner_modules.pop();
                }
                braces -= 1;
            }
            "super" if tokens.get(at + 1) == Some(&"::") => {
                let mut supers = 0;
                while tokens.get(at) == Some(&"super") && tokens.get(at + 1) == Some(&"::") {
                    (supers, at) = (supers + 1, at + 2);
                }
                if supers >= depth + inner_modules.len() {
                    names.extend(first_names(&tokens[at..]));
                }
                continue;
            }
            "crate" | "ckfs" if tokens.get(at + 1) == Some(&"::") && (at == 0 || tokens[at - 1] != "::") => {
                names.extend(first_names(&tokens[at + 2..]));
            }
            _ => {}
        }
        at += 1;
    }
    names
}

/// Leaves out `mod tests { … }`: unit tests may print, and may test what a processor does.
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

/// Modules between the crate's root and the inside of a file: 1 for `tensor/mod.rs`, 2 for `tensor/view.rs`.
fn depth(name: &str) -> usize {
    let parts = name.split('/').count();
    if name.ends_with("/mod.rs") { parts - 1 } else { parts }
}

fn layer(name: &str) -> Option<&str> {
    name.split_once('/').map(|(layer, _)| layer)
}

#[test]
fn every_directory_is_a_layer() {
    let known: BTreeSet<&str> = MAY_USE.iter().map(|(layer, _)| *layer).collect();
    let sources = sources();
    let found: BTreeSet<&str> = sources.iter().filter_map(|file| layer(&file.name)).collect();
    assert_eq!(found, known);
    let loose: Vec<&str> =
        sources.iter().filter(|file| layer(&file.name).is_none()).map(|file| file.name.as_str()).collect();
    assert_eq!(loose, ["lib.rs", "main.rs"]);
}

#[test]
fn layers_use_only_those_below() {
    let may_use: BTreeMap<&str, &[&str]> = MAY_USE.into_iter().collect();
    let mut wrong = Vec::new();
    for file in sources() {
        let Some(layer) = layer(&file.name) else { continue };
        for used in crate_names(&tokens(&file.code), depth(&file.name)) {
            let is_layer = may_use.contains_key(used);
            if is_layer && used != layer && !may_use[layer].contains(&used) {
                wrong.push(format!("{}: {layer} may not use {used}", file.name));
            }
            if used == "*" {
                wrong.push(format!("{}: takes all names of the crate's root", file.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn outer_crates_stay_in_their_layer() {
    let mut wrong = Vec::new();
    for file in sources() {
        let tokens = without_tests(&tokens(&file.code));
        for (word, home) in ONLY_IN {
            let found = if let Some(name) = word.strip_suffix('!') {
                tokens.windows(2).any(|pair| pair == [name, "!"])
            } else {
                // As the head of a path, in attributes too; not as the name of something of ours.
                let before = |at: usize| at.checked_sub(1).map(|before| tokens[before]);
                let head = |at: usize| tokens[at] == word && before(at) != Some("::");
                (0..tokens.len()).any(|at| head(at) && (tokens.get(at + 1) == Some(&"::") || before(at) == Some("use")))
            };
            if found && layer(&file.name) != Some(home) {
                wrong.push(format!("{}: {word} belongs to {home}", file.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
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

/// Bytes that only the kernel may read become a slice in one place, beside the type's own calls.
#[test]
fn kernel_bytes_are_made_a_slice_for_fuser_only() {
    let files = sources();
    let using: Vec<&str> =
        files.iter().filter(|file| file.code.contains("for_system_call")).map(|file| file.name.as_str()).collect();
    assert_eq!(using, ["fuse/reply_data.rs", "source/kernel_bytes.rs"]);
}

/// The reference evaluator is a second opinion only while it shares nothing with what it checks.
#[test]
fn the_reference_uses_only_the_expression() {
    let sources = sources();
    let reference = sources.iter().find(|file| file.name == "read/reference.rs").expect("read/reference.rs");
    let tokens = tokens(&reference.code);
    let checked =
        ["lower", "tiling", "gather", "convert", "kernel", "transpose", "value", "span", "Tiling", "Program", "Window"];
    for name in checked {
        let is_type = name.starts_with(char::is_uppercase);
        let used = (0..tokens.len()).any(|at| tokens[at] == name && (is_type || tokens.get(at + 1) == Some(&"::")));
        assert!(!used, "the reference uses {name}");
    }
}

#[test]
fn the_reader_of_code_reads_code() {
    let text = r##"
        //! crate::comment
        use crate::{tensor::{DType, view::View}, read};
        /* crate::block /* nested */ */
        let s = "crate::string \" still"; let r = r#"crate::raw " "#; let c = '"'; let q = '\''; let l: &'static str = s;
        crate::plan::resolve(); super::super::volume::x(); super::sibling(); a::crate_like::b();
        use super::super::{image, format::y};
    "##;
    let code = code_only(text);
    let found = crate_names(&tokens(&code), 2);
    assert_eq!(found, BTreeSet::from(["tensor", "read", "plan", "volume", "image", "format"]));
    assert_eq!(code.lines().count(), text.lines().count());
    assert_eq!(crate_names(&tokens("use super::plan::x;"), 1), BTreeSet::from(["plan"]));
    let inner =
        "use super::plan::a; mod tests { use super::plan::b; use super::super::read; fn f() {} } use super::image;";
    assert_eq!(crate_names(&tokens(inner), 1), BTreeSet::from(["plan", "read", "image"]));
    assert_eq!(crate_names(&tokens("mod tests { use super::plan; }"), 1), BTreeSet::new());
    assert_eq!(without_tests(&tokens("a mod tests { b { c } } d")), ["a", "d"]);
    assert_eq!((depth("tensor/mod.rs"), depth("tensor/view.rs"), depth("tensor/kernel/row.rs")), (1, 2, 3));
}
