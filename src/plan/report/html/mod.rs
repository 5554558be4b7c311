//! The report as a page for a browser: one file that loads nothing.
//!
//! The page holds the plan as data, and a script that draws it. Names come from checkpoints, which may be hostile. So the data
//! is JSON in an element that is not a script, `<` is escaped in it, the script sets text and never markup, and a policy allows
//! the page's own script and style only, each by its digest. The size of the page is bounded: what would exceed the room of its
//! kind is left out and counted, and the page says so.

mod budget;
mod bytes;
mod cuts;
mod files;
mod records;

use std::fmt::Write as _;

use ckfs_checkpoint::{Checkpoint, FileRole, printable};
use ckfs_tensor::DType;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{
    super::{Hole, NameGroup, Plan, PlannedTensor, amplification::Amplification, axis_use},
    advice::{advice, reasons},
    effects::{axis_effects, bytes_per_device},
    json::ViewReport,
    text::{rule_of_axis, source_text, view_text},
};

use budget::{PageBudget, embedded, within};
use files::EmbeddedFiles;
use records::{Budgets, HtmlRecords, records};

/// Most bytes of a page.
pub const HTML_BYTES_MAX: usize = 5_000_000;

/// Devices that a page shows.
const DEVICES_MAX: usize = 1024;
/// Characters of the text at the end of the page.
const TEXT_BYTES_MAX: usize = 150_000;
/// Views that a page shows.
const VIEWS_MAX: usize = 32;
/// Room of the kinds of content, in bytes. Together with the text, script and style, they are less than [`HTML_BYTES_MAX`].
const FILES_BYTES: usize = 250_000;
const NAMES_BYTES: usize = 250_000;
const ROWS_BYTES: usize = 800_000;
const SOURCES_BYTES: usize = 900_000;
const CUTS_BYTES: usize = 800_000;
const PATTERNS_BYTES: usize = 900_000;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const BODY: &str = include_str!("body.html");

/// The page of these views.
pub fn html(checkpoint: &Checkpoint, views: &[ViewReport<'_>]) -> String {
    let files = EmbeddedFiles::new(checkpoint);
    let shown = &views[..views.len().min(VIEWS_MAX)];
    let shares = shown.len().max(1);
    let views_json: Vec<Value> = shown.iter().map(|view| view_json(checkpoint, view, &files, shares)).collect();
    let (listed, more_files) = within(&mut PageBudget::new(FILES_BYTES), checkpoint.files().iter().map(file_json));
    let describe = checkpoint.dialect().describe();
    let data = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": printable(checkpoint.label()),
        "root": printable(&checkpoint.root().display().to_string()),
        "revision": checkpoint.revision().map(printable),
        "container": checkpoint.container().to_string(),
        "dialect": printable(&checkpoint.dialect().to_string()),
        "describe": describe.lines().map(printable).collect::<Vec<_>>(),
        "warnings": cut_list(shares, checkpoint.warnings().iter().map(|warning| json!(printable(warning)))),
        "files": listed,
        "more_files": more_files,
        "views": views_json,
        "more_views": views.len() - shown.len(),
    });
    page(checkpoint.label(), &data, &plain_text(checkpoint, views))
}

fn page(title: &str, data: &Value, text: &str) -> String {
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'; form-action 'none'",
        digest(SCRIPT),
        digest(STYLE)
    );
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{} - ckfs plan</title>\n<style>{STYLE}</style>\n</head>\n\
         <body>\n{BODY}<details class=\"plain\" id=\"plain\"><summary>The plan as text</summary><pre>{}</pre></details>\n\
         <script type=\"application/json\" id=\"data\">{}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        escaped(&printable(title)),
        escaped(text),
        embedded(data)
    )
}

/// The plan as `ckfs plan` prints it, up to a bound.
fn plain_text(checkpoint: &Checkpoint, views: &[ViewReport<'_>]) -> String {
    let mut text = source_text(checkpoint);
    for ViewReport { name, plan, .. } in views {
        let heading = if name.is_empty() { String::new() } else { format!("{:<10}  {}\n", "view", printable(name)) };
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{heading}{}", view_text(checkpoint, plan));
    }
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push_str("\n… the rest is left out of this page: see `ckfs plan` without --html\n");
    }
    text
}

/// Text as the content of an element.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// The SHA-256 of a text in base64, as a content security policy names an element.
fn digest(text: &str) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digest = Sha256::digest(text.as_bytes());
    let mut encoded = String::new();
    for bytes in digest.chunks(3) {
        let word = (0..3).fold(0_usize, |word, at| word << 8 | usize::from(bytes.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let letter = char::from(LETTERS[word >> (18 - 6 * at) & 63]);
            encoded.push(if at <= bytes.len() { letter } else { '=' });
        }
    }
    encoded
}

fn file_json(file: &ckfs_checkpoint::RepoFile) -> Value {
    let (role, reason) = match &file.role {
        FileRole::Weights => ("weights", None),
        FileRole::Other => ("other", None),
        FileRole::Ignored(reason) => ("left out", Some(reason.to_string())),
    };
    json!([printable(&file.path), file.size_bytes, role, reason.as_deref().map(printable)])
}

/// One of a view's lists, cut where it would take too much of the page: `{"listed": […], "more": number}`.
fn cut_list(views: usize, values: impl IntoIterator<Item = Value>) -> Value {
    let (listed, more) = within(&mut PageBudget::new(NAMES_BYTES / 10 / views), values);
    json!({"listed": listed, "more": more})
}

fn names(views: usize, groups: &[NameGroup]) -> Value {
    cut_list(
        views,
        groups
            .iter()
            .map(|group| json!([printable(&group.name), group.count, group.nearest.as_deref().map(printable)])),
    )
}

fn view_json(checkpoint: &Checkpoint, view: &ViewReport<'_>, files: &EmbeddedFiles, shares: usize) -> Value {
    let ViewReport { name, plan, more } = view;
    let found = Amplification::of(checkpoint, plan);
    let devices = &plan.devices[..plan.devices.len().min(DEVICES_MAX / shares)];
    let room = |bytes: usize| PageBudget::new(bytes / shares);
    let budgets = Budgets {
        rows: room(ROWS_BYTES),
        sources: room(SOURCES_BYTES),
        cuts: room(CUTS_BYTES),
        patterns: room(PATTERNS_BYTES),
    };
    let HtmlRecords { listed, cuts, device_maps, patterns, folded, without_cut, without_bytes } =
        records(checkpoint, plan, devices, files, found, budgets);
    let mut json = about(plan, shares);
    let more_of = |key: &str| more.get(key).cloned().unwrap_or_else(|| json!([]));
    let parts = [
        ("name", json!(printable(name))),
        ("devices", json!(devices)),
        ("more_devices", json!(plan.devices.len() - devices.len())),
        ("device_bytes", json!(bytes_per_device(plan)[..devices.len()])),
        (
            "device_reads",
            found.devices[..devices.len()].iter().map(|reads| json!([reads.needed_bytes, reads.paged_bytes])).collect(),
        ),
        ("union", json!([found.union.needed_bytes, found.union.paged_bytes])),
        ("rows", listed.into()),
        ("cuts", cuts.into()),
        ("device_maps", device_maps.into()),
        ("patterns", patterns.into()),
        (
            "folded",
            json!({"groups": folded.0, "tensors": folded.1, "bytes": folded.2, "without_cut": without_cut, "without_bytes": without_bytes}),
        ),
        ("over_read", over_read(checkpoint, plan, found)),
        ("unavailable", more_of("unavailable")),
    ];
    for (key, value) in parts {
        json.insert(key.to_owned(), value);
    }
    Value::Object(json)
}

fn over_read(checkpoint: &Checkpoint, plan: &Plan, found: &Amplification) -> Value {
    let reasons = reasons(checkpoint, plan, found);
    let rows: Vec<Value> = reasons
        .iter()
        .map(|reason| {
            json!({"name": printable(&reason.name), "reads": [reason.reads.needed_bytes, reason.reads.paged_bytes], "why": printable(&reason.text())})
        })
        .collect();
    let advice = advice(plan, found, &reasons);
    json!({"reasons": rows, "advice": advice.iter().map(|line| printable(line)).collect::<Vec<_>>()})
}

/// The members of a view that do not depend on its tensors one by one.
fn about(plan: &Plan, views: usize) -> Map<String, Value> {
    let total: u64 = plan.bundle().map(PlannedTensor::bytes).sum();
    let axis = |axis: super::effects::AxisEffect| {
        let rule = if plan.logical_rules.is_some() {
            "by the rules for logical axes"
        } else {
            rule_of_axis(axis_use(&axis.name))
        };
        json!({"name": printable(&axis.name), "size": axis.size, "tensors": axis.tensors, "bytes": axis.bytes, "rule": rule})
    };
    let holes = plan.holes.iter().map(|hole: &Hole| json!([printable(&hole.to_string()), 1, null]));
    let members = [
        ("layout", json!(printable(plan.layout.name()))),
        ("family", json!(plan.family.as_deref().map(printable))),
        ("dtype", json!(plan.dtype.map(DType::code))),
        ("mesh", axis_effects(plan).into_iter().map(axis).collect()),
        ("mesh_devices", json!(plan.mesh.devices())),
        ("tensors", json!(plan.bundle().count())),
        ("raw_files", json!(plan.tensors.len())),
        ("bytes", json!(total)),
        ("left_out", names(views, &plan.left_out)),
        ("missing", names(views, &plan.missing)),
        ("unexpected", names(views, &plan.unexpected)),
        ("dropped", names(views, &plan.dropped)),
        ("kept", names(views, &plan.kept)),
        ("holes", cut_list(views, holes)),
        ("warnings", cut_list(views, plan.warnings.iter().map(|warning| json!(printable(warning))))),
    ];
    members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_policy() {
        // printf '' | openssl dgst -sha256 -binary | base64
        assert_eq!(digest(""), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
        assert_eq!(digest("abc"), "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
    }

    #[test]
    fn no_text_ends_the_element_that_holds_it() {
        let hostile = "</script><script>alert(1)</script><!--\"&";
        let page = page(hostile, &json!({"source": hostile}), hostile);
        assert_eq!(page.matches("<script").count(), 2);
        assert_eq!(page.matches("</script").count(), 2);
        assert!(!page.contains("<!--") && page.contains("\\u003c/script>"), "{page}");
    }

    #[test]
    fn the_page_names_nothing_elsewhere() {
        for part in [STYLE, SCRIPT, BODY] {
            for word in ["http:", "https:", "//cdn", "@import", "url(", "innerHTML", "eval(", " style=\"", " onclick="]
            {
                assert!(!part.contains(word), "{word}");
            }
        }
        let page = page("", &json!({}), "");
        assert!(page.len() < 100_000, "{}", page.len());
        let room =
            [FILES_BYTES, NAMES_BYTES, ROWS_BYTES, SOURCES_BYTES, CUTS_BYTES, PATTERNS_BYTES, 5 * TEXT_BYTES_MAX];
        assert!(room.iter().sum::<usize>() < HTML_BYTES_MAX - 300_000, "{}", room.iter().sum::<usize>());
    }
}
