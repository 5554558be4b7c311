//! `ckfs sums`: digests of sources and virtual files, so that hosts can prove that they see the same.
//!
//! The list is in the format that `sha256sum` writes and checks. Lines for ckfs alone are comments, which `sha256sum
//! -c` ignores. The list holds nothing about the host: no paths of the source, no times, no counters.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use ckfs_checkpoint::{Checkpoint, FileRole, printable_lines};
use ckfs_image::OF_THE_HOST;
use ckfs_plan::ViewOptions;
use ckfs_source::{
    FileId,
    digest::{hexadecimal, is_hex},
};
use ckfs_volume::{NodeKind, Volume};
use clap::Args;
use indicatif::ProgressBar;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    flags::{LogFlags, SourceFlags},
    open, output,
    paragraph::counted,
    tree,
};

/// Bytes hashed at once.
const CHUNK_BYTES: usize = 4 << 20;

/// Hexadecimal digits of a digest.
const DIGEST_DIGITS: usize = 64;

/// Writes or checks SHA-256 digests of the source and of every virtual file.
///
/// Two hosts whose lists are equal see the same shards, byte for byte. Given a SOURCE, bytes come from the engine as a
/// mount would serve them; given a mount, from its files. The list is sorted and in the format of sha256sum, so that
/// `sha256sum -c` in a mount checks it too. Digests of source files stand in comments. Files about this host are left
/// out: .ckfs/ and Orbax's record of times.
///
/// Source files that the Hugging Face cache names by their SHA-256 must have it.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs sums /mnt/llama -o llama.sums
  ckfs sums /mnt/llama --check llama.sums              on another host
  ckfs sums org/name --mesh fsdp=8 --only dev3 --check llama.sums
  ckfs verify /mnt/llama --sums llama.sums             the same check")]
pub(super) struct Sums {
    /// A mount, or a source as for `ckfs mount`.
    #[arg(value_name = "SOURCE|MNT")]
    target: Option<String>,
    /// Writes to this file, when all is done, instead of standard output.
    #[arg(short, long, value_name = "FILE", conflicts_with = "check")]
    output: Option<PathBuf>,
    /// Compares with this list, prints the differences, and fails if there are any.
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Only files that match this pattern, or below directories that do; may be repeated. A check has the patterns of its
    /// list if it has none itself.
    #[arg(long, value_name = "GLOB")]
    only: Vec<String>,
    /// Prints JSON.
    #[arg(long, conflicts_with = "output")]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

/// Digests by path, with their origin.
#[derive(Debug, Default, PartialEq, Eq)]
struct DigestList {
    /// Commit of the source, if it is known.
    revision: Option<String>,
    /// Patterns by which files were chosen; none for all.
    only: Vec<String>,
    /// Lines that describe the views, in order.
    views: Vec<String>,
    sources: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
}

impl Sums {
    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        if let Some(file) = &self.check {
            return check(file, self.target.as_deref(), &self.only, self.json, (&self.flags, log));
        }
        let list = list(self.target.as_deref(), &self.only, &self.flags, log)?;
        match &self.output {
            None if self.json => output::print_json(&list.json()),
            None => output::print(&list.text()),
            Some(path) => output::replace(path, |new| fs::write(new, list.text())),
        }
    }
}

/// A file whose digest is not that of the list.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Difference<'a> {
    /// The file, by its path in the source or in the mount.
    path: &'a str,
    /// Whether it is a file of the source.
    source: bool,
    /// The digest in the list; `None` if the list lacks the file.
    expected: Option<&'a str>,
    /// The present digest; `None` if the file is not there.
    found: Option<&'a str>,
}

impl fmt::Display for Difference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}: ", if self.source { SOURCE } else { "" }, self.path)?;
        match (self.expected, self.found) {
            (Some(expected), Some(found)) => write!(f, "expected {expected}, found {found}"),
            (_, None) => f.write_str("is not there"),
            (None, Some(_)) => f.write_str("is not in the list"),
        }
    }
}

/// Compares the present digests of `target` with a list.
///
/// # Errors
/// The differences, which are printed too, or the reason why a file was not readable.
pub(super) fn check(
    file: &Path,
    target: Option<&str>,
    only: &[String],
    json: bool,
    (flags, log): (&SourceFlags, &LogFlags),
) -> anyhow::Result<()> {
    let context = || file.display().to_string();
    let mut wanted = DigestList::parse(&fs::read_to_string(file).with_context(context)?).with_context(context)?;
    let only = if only.is_empty() { wanted.only.clone() } else { only.to_vec() };
    let found = list(target, &only, flags, log)?;
    let patterns = tree::patterns(&only)?;
    wanted.files.retain(|path, _| tree::wanted(&patterns, path));
    let mut differences = compare(true, &wanted.sources, &found.sources);
    differences.extend(compare(false, &wanted.files, &found.files));
    let (files, sources) = (found.files.len(), found.sources.len());
    if json {
        output::print_json(&json!({ "files": files, "source_files": sources, "differences": differences }))?;
    } else if differences.is_empty() {
        return output::print(&format!("{files} files and {sources} source files, no difference\n"));
    }
    if wanted.views != found.views && !differences.is_empty() {
        tracing::warn!("views differ: expected {}, found {}", wanted.views.join("; "), found.views.join("; "));
    }
    if differences.is_empty() {
        return Ok(());
    }
    if !json {
        let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
        output::print(&(printable_lines(&lines.join("\n")).into_owned() + "\n"))?;
    }
    Err(anyhow!("{} from {}", counted(differences.len(), "difference"), file.display()))
}

fn compare<'a>(
    source: bool,
    wanted: &'a BTreeMap<String, String>,
    found: &'a BTreeMap<String, String>,
) -> Vec<Difference<'a>> {
    let paths: BTreeSet<&String> = wanted.keys().chain(found.keys()).collect();
    let rows = paths.into_iter().map(|path| {
        let digest = |digests: &'a BTreeMap<String, String>| digests.get(path).map(String::as_str);
        Difference { path, source, expected: digest(wanted), found: digest(found) }
    });
    rows.filter(|row| row.expected != row.found).collect()
}

/// The present digests of a source or mount.
fn list(target: Option<&str>, only: &[String], flags: &SourceFlags, log: &LogFlags) -> anyhow::Result<DigestList> {
    let (mount, mut config) = open::target_config(target, flags)?;
    let volume = open::volume(&mut config)?;
    let nodes = tree::select(&volume, only, "sum", &|node| {
        let of_the_host = node.path.split('/').any(|component| OF_THE_HOST.contains(&component));
        node.attr.kind == NodeKind::File && !of_the_host
    })?;
    let checkpoint = volume.engine().checkpoint();
    let read = checkpoint.files().iter().filter(|file| matches!(file.role, FileRole::Weights | FileRole::Other));
    let read: Vec<(&str, FileId)> = read.filter_map(|file| Some((file.path.as_str(), file.file?))).collect();
    let source_bytes: u64 = read.iter().map(|(_, file)| checkpoint.source().len_bytes(*file)).sum();
    let bar = output::bar(source_bytes.saturating_add(tree::total_bytes(&nodes)), log);
    let sources: BTreeMap<FileId, String> = read
        .par_iter()
        .map(|(path, file)| Ok((*file, source_digest(checkpoint, *file, &bar).with_context(|| (*path).to_owned())?)))
        .collect::<anyhow::Result<_>>()?;
    check_names(checkpoint, &read, &sources)?;
    let files = nodes
        .par_iter()
        .map(|node| {
            bar.set_message(node.path.clone());
            let digest = match volume.original(node.attr.ino).and_then(|file| sources.get(&file)) {
                // The engine would return the bytes of the source file itself.
                Some(digest) if mount.is_none() => {
                    bar.inc(node.attr.size_bytes);
                    Ok(digest.clone())
                }
                Some(_) | None => served_digest(&volume, mount, node, &bar),
            };
            Ok((node.path.clone(), digest.with_context(|| node.path.clone())?))
        })
        .collect::<anyhow::Result<_>>()?;
    ckfs_service::check_sources(&volume)?;
    bar.finish_and_clear();
    let views = config.views.iter().map(|view| {
        let options = ViewOptions::new(&view.settings)?;
        let options = options.for_checkpoint(checkpoint);
        let dtype = options.dtype.map_or("keep", ckfs_tensor::DType::name);
        let name = if view.name.is_empty() { String::new() } else { format!("{} ", view.name) };
        Ok(format!("{name}mesh={} layout={} dtype={dtype}", options.mesh, options.layout.name()))
    });
    Ok(DigestList {
        revision: checkpoint.revision().map(str::to_owned),
        only: only.to_vec(),
        views: views.collect::<anyhow::Result<_>>()?,
        sources: read.iter().map(|(path, file)| ((*path).to_owned(), sources[file].clone())).collect(),
        files,
    })
}

fn source_digest(checkpoint: &Checkpoint, file: FileId, bar: &ProgressBar) -> anyhow::Result<String> {
    let source = checkpoint.source();
    let len = source.len_bytes(file);
    let mut digest = Sha256::new();
    let mut buffer = vec![0; usize::try_from(len).unwrap_or(usize::MAX).min(CHUNK_BYTES)];
    for (at, part) in tree::parts(0, len, CHUNK_BYTES) {
        source.read_into(file, at, &mut buffer[..part])?;
        digest.update(&buffer[..part]);
        bar.inc(part as u64);
    }
    Ok(hexadecimal(&digest.finalize()))
}

fn served_digest(
    volume: &Volume,
    mount: Option<&Path>,
    node: &tree::PathNode,
    bar: &ProgressBar,
) -> anyhow::Result<String> {
    let served = tree::ServedFile::open(volume, mount, node)?;
    let size = node.attr.size_bytes;
    if let Some(found) = served.found_bytes()?.filter(|found| *found != size) {
        bail!("expected {size} bytes, found {found}");
    }
    let (mut digest, mut bytes) = (Sha256::new(), Vec::new());
    for (at, part) in tree::parts(0, size, CHUNK_BYTES) {
        served.read(at, part, &mut bytes).with_context(|| format!("bytes {at}..{}", at + part as u64))?;
        digest.update(&bytes);
        bar.inc(part as u64);
    }
    Ok(hexadecimal(&digest.finalize()))
}

/// The digest that the Hugging Face cache uses as the file's name: files in its `blobs/` that are stored in LFS.
fn digest_in_name(path: &Path) -> Option<String> {
    let blob = fs::canonicalize(path).ok()?;
    let name = blob.file_name()?.to_str()?;
    let in_blobs = blob.parent()?.file_name()? == "blobs";
    (in_blobs && is_digest(name)).then(|| name.to_owned())
}

fn is_digest(text: &str) -> bool {
    is_hex(text, DIGEST_DIGITS)
}

fn check_names(
    checkpoint: &Checkpoint,
    files: &[(&str, FileId)],
    sources: &BTreeMap<FileId, String>,
) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    let mut named = 0;
    for (path, file) in files {
        let Some(name) = digest_in_name(checkpoint.source().path(*file)) else { continue };
        named += 1;
        if sources[file] == name {
            checkpoint.source().note_right(*file);
        } else {
            wrong.push(format!("\n  source {path}: the cache names it {name}, its digest is {}", sources[file]));
        }
    }
    tracing::info!("{named} source files have the digests that the cache names them by");
    if wrong.is_empty() { Ok(()) } else { Err(anyhow!("damaged in the cache:{}", wrong.concat())) }
}

/// Words that begin the comments, after `# `.
const VERSION: &str = "ckfs ";
const REVISION: &str = "revision ";
const ONLY: &str = "only ";
const VIEW: &str = "view ";
const SOURCE: &str = "source ";

impl DigestList {
    fn json(&self) -> Value {
        let rows = |digests: &BTreeMap<String, String>| -> Vec<Value> {
            digests.iter().map(|(path, digest)| json!({ "path": path, "sha256": digest })).collect()
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "revision": self.revision,
            "views": self.views,
            "only": self.only,
            "source_files": rows(&self.sources),
            "files": rows(&self.files),
        })
    }

    fn text(&self) -> String {
        let mut text = format!("# {VERSION}{} sums\n", env!("CARGO_PKG_VERSION"));
        let mut comment = |mark: &str, rest: &str| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# {mark}{rest}");
        };
        comment(REVISION, self.revision.as_deref().unwrap_or("unknown"));
        self.views.iter().for_each(|view| comment(VIEW, view));
        self.only.iter().for_each(|pattern| comment(ONLY, pattern));
        self.sources.iter().for_each(|(path, digest)| comment(SOURCE, &line(path, digest)));
        for (path, digest) in &self.files {
            let _ = writeln!(text, "{}", line(path, digest));
        }
        text
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut list = Self::default();
        if !text.lines().next().is_some_and(|first| first.starts_with("# ckfs ")) {
            bail!("expected a list by `ckfs sums`, beginning with \"# ckfs \"");
        }
        for (number, text) in text.lines().enumerate() {
            let malformed = || anyhow!("line {}: expected a digest, two spaces and a path, found {text:?}", number + 1);
            let Some(comment) = text.strip_prefix("# ") else {
                let (path, digest) = parse_line(text).ok_or_else(malformed)?;
                list.files.insert(path, digest);
                continue;
            };
            if let Some(source) = comment.strip_prefix(SOURCE) {
                let (path, digest) = parse_line(source).ok_or_else(malformed)?;
                list.sources.insert(path, digest);
            } else if let Some(revision) = comment.strip_prefix(REVISION) {
                list.revision = (revision != "unknown").then(|| revision.to_owned());
            } else if let Some(pattern) = comment.strip_prefix(ONLY) {
                list.only.push(pattern.to_owned());
            } else if let Some(view) = comment.strip_prefix(VIEW) {
                list.views.push(view.to_owned());
            }
        }
        Ok(list)
    }
}

/// A line of sha256sum, with its escapes for names that would break lines.
fn line(path: &str, digest: &str) -> String {
    let plain = !path.contains(['\\', '\n', '\r']);
    let mark = if plain { "" } else { "\\" };
    format!("{mark}{digest}  {}", path.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r"))
}

fn parse_line(text: &str) -> Option<(String, String)> {
    let (escaped, text) = text.strip_prefix('\\').map_or((false, text), |rest| (true, rest));
    // sha256sum marks files read in binary mode with a star.
    let (digest, path) = text.split_once("  ").or_else(|| text.split_once(" *"))?;
    if !is_digest(digest) || path.is_empty() {
        return None;
    }
    if !escaped {
        return Some((path.to_owned(), digest.to_owned()));
    }
    let mut plain = String::with_capacity(path.len());
    let mut characters = path.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => match characters.next()? {
                'n' => '\n',
                'r' => '\r',
                '\\' => '\\',
                _ => return None,
            },
            other => other,
        });
    }
    Some((plain, digest.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let digest = |byte: u8| hexadecimal(&[byte; 32]);
        let list = DigestList {
            revision: Some("0123abcd".into()),
            only: vec!["dev0".into(), "hf/*".into()],
            views: vec!["train mesh=fsdp=2 layout=canonical dtype=keep".into()],
            sources: [("model.safetensors".to_owned(), digest(1))].into(),
            files: [("dev0/a b".to_owned(), digest(2)), ("dev0/odd\n\\name".to_owned(), digest(3))].into(),
        };
        let text = list.text();
        assert!(text.ends_with(&format!("\\{}  dev0/odd\\n\\\\name\n", digest(3))), "{text}");
        assert_eq!(DigestList::parse(&text).unwrap(), list);
        for (line, text) in
            [(1, ""), (1, "hello\n"), (2, "# ckfs 1 sums\nzz  path\n"), (2, "# ckfs 1 sums\n# source x\n")]
        {
            let error = DigestList::parse(text).unwrap_err().to_string();
            assert!(line == 1 || error.starts_with("line 2: "), "{error}");
        }
    }
}
