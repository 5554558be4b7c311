//! Build script: lists the families and the layouts in the program, so that a new file is all that a new one needs.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

/// What is said of a directory of layouts as a whole.
const TABLE: &str = "layout.toml";

/// What is in a directory, in the order of names.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    found.sort();
    Ok(found)
}

/// The expression of a file's text.
fn include(path: &Path) -> String {
    format!("include_str!(r#\"{}\"#)", path.display())
}

/// The expression of a list with a row for each TOML file of a directory: its name after `prefix`, and its text. The table
/// of a directory of layouts is no family.
fn texts(directory: &Path, prefix: &str) -> io::Result<String> {
    let mut rows = String::new();
    for path in entries(directory)? {
        let name = path.file_stem().unwrap_or_default().display();
        if path.extension().is_some_and(|extension| extension == "toml") && !path.ends_with(TABLE) {
            let _ = writeln!(rows, "    (\"{prefix}{name}\", {}),", include(&path));
        }
    }
    Ok(format!("&[\n{rows}]"))
}

fn main() -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut layouts = String::new();
    for directory in entries(&here.join("layouts"))?.iter().filter(|path| path.is_dir()) {
        let name = directory.file_name().unwrap_or_default().display();
        let files = texts(directory, &format!("{name}/"))?;
        let _ = writeln!(layouts, "    ({}, {files}),", include(&directory.join(TABLE)));
    }
    let text = format!(
        "/// The families' files, by name.\npub(crate) const FAMILIES: &[(&str, &str)] = {};\n\n\
         /// The layouts' tables, each with the files of its families by name.\n\
         pub(crate) const LAYOUTS: &[(&str, &[(&str, &str)])] = &[\n{layouts}];\n",
        texts(&here.join("families"), "")?
    );
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("embedded.rs"), text)?;
    let mut out = io::stdout().lock();
    for input in ["embed.rs", "families", "layouts"] {
        writeln!(out, "cargo::rerun-if-changed={input}")?;
    }
    Ok(())
}
