//! Build script: lists the layouts, so that a new directory is all that a new layout needs, and a new file all that a family of one
//! needs.

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

fn main() -> io::Result<()> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut rows = String::new();
    for directory in entries(&here)?.iter().filter(|path| path.join(TABLE).is_file()) {
        let layout = directory.file_name().unwrap_or_default().display();
        let _ = writeln!(rows, "    ({}, &[", include(&directory.join(TABLE)));
        for path in
            entries(directory)?.iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        {
            let family = path.file_stem().unwrap_or_default().display();
            if !path.ends_with(TABLE) {
                let _ = writeln!(rows, "        (\"{layout}/{family}\", {}),", include(path));
            }
        }
        rows.push_str("    ]),\n");
    }
    let text = format!("const DIRECTORIES: &[(&str, &[(&str, &str)])] = &[\n{rows}];\n");
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("directories.rs"), text)?;
    writeln!(io::stdout(), "cargo::rerun-if-changed=.")
}
