//! Build script: lists the families in the program, so that a new file is all that a new one needs.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, Write as _},
    path::PathBuf,
};

fn main() -> io::Result<()> {
    let families = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("families");
    let mut found = fs::read_dir(families)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    found.sort();
    let mut rows = String::new();
    for path in found.iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml")) {
        let name = path.file_stem().unwrap_or_default().display();
        let _ = writeln!(rows, "    (\"{name}\", include_str!(r#\"{}\"#)),", path.display());
    }
    let text = format!("/// The families' files, by name.\nconst FAMILIES: &[(&str, &str)] = &[\n{rows}];\n");
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("families.rs"), text)?;
    let mut out = io::stdout().lock();
    writeln!(out, "cargo::rerun-if-changed=embed.rs")?;
    writeln!(out, "cargo::rerun-if-changed=families")
}
