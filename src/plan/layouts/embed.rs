//! Build script: lists the layouts and the model families, so that a new directory is all that a new layout needs, and a new file
//! all that a family needs.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

/// The file with what holds for a directory of layouts as a whole.
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

/// Rows of the names, which begin so, and the texts of the files of families in a directory.
fn rows(directory: &Path, begin: &str) -> io::Result<String> {
    let mut rows = String::new();
    for path in entries(directory)?.iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
    {
        if !path.ends_with(TABLE) {
            let family = path.file_stem().unwrap_or_default().display();
            let _ = writeln!(rows, "    (\"{begin}{family}\", {}),", include(path));
        }
    }
    Ok(rows)
}

fn main() -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut layouts = String::new();
    for directory in entries(&here)?.iter().filter(|path| path.join(TABLE).is_file()) {
        let layout = directory.file_name().unwrap_or_default().display();
        let rows = rows(directory, &format!("{layout}/"))?;
        let _ = writeln!(layouts, "({}, &[\n{rows}]),", include(&directory.join(TABLE)));
    }
    let text = format!(
        "const DIRECTORIES: &[(&str, &[(&str, &str)])] = &[\n{layouts}];\n\
         /// The files of the model families, by name.\npub const FAMILIES: &[(&str, &str)] = &[\n{}];\n",
        rows(&here.join("../families"), "")?
    );
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("directories.rs"), text)?;
    writeln!(io::stdout(), "cargo::rerun-if-changed=.\ncargo::rerun-if-changed=../families")
}
