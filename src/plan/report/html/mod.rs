//! The report as a page for a browser: one file that loads nothing.
//!
//! The page holds the plan as data, and a script that draws it. The data is that of `ckfs plan --json`, with a member `page` in
//! each view for what is drawn, in place of the tensors. Names come from checkpoints, which may be hostile. So the data is in an
//! element that is not a script, `<` is escaped in it, the script sets text and never markup, and a policy allows the page's own
//! script and style only, each by its digest. The size of the page is bounded: what would exceed the room of its kind is left out
//! and counted, and the page says so.

mod budget;
mod bytes;
mod cuts;
mod records;

use std::{borrow::Cow, mem};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use ckfs_checkpoint::{Checkpoint, printable};
use ckfs_tensor::Reads;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{
    super::{Amplification, RemoteBytes},
    json::{ViewReport, source_json, view_json},
    text,
};

use budget::{PageBudget, embedded, within};
use bytes::{EmbeddedFiles, numbered};
use records::records;

/// Devices that a page shows.
const DEVICES_MAX: usize = 1024;
/// Characters of the text at the end of the page.
const TEXT_BYTES_MAX: usize = 150_000;
/// Views that a page shows.
const VIEWS_MAX: usize = 32;
/// Room of the kinds of content, in bytes. Together with that of rows, the text, script and style, they are less than 5 MB.
const FILES_BYTES: usize = 250_000;
const DEVICES_BYTES: usize = 250_000;
/// The lists and objects of the source and of a view, each with an equal part of this.
const MEMBERS_BYTES: usize = 250_000;
const MEMBERS: usize = 20;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const BODY: &str = include_str!("body.html");

/// The page of these views. Where files are remote, `needs` are those of all views.
pub fn html(checkpoint: &Checkpoint, views: &[ViewReport<'_>], needs: Option<&RemoteBytes>) -> String {
    let files = numbered(checkpoint);
    let shown = &views[..views.len().min(VIEWS_MAX)];
    let shares = shown.len().max(1);
    let mut data = members(source_json(checkpoint));
    let (listed, more_files) = within(&mut PageBudget(FILES_BYTES), array(data.remove("files")));
    shorten(&mut data, MEMBERS_BYTES / MEMBERS);
    let describe = checkpoint.dialect().describe();
    let view = |view| view_data(checkpoint, view, &files, shares);
    let fetched = |name: &str| {
        let needs = needs?.devices.iter().filter(|(of, ..)| of == name);
        needs.map(|(.., bytes)| *bytes).max()
    };
    data.extend(members(json!({
        "files": listed,
        "more_files": more_files,
        "describe": describe.lines().collect::<Vec<_>>(),
        "views": shown.iter().map(view).collect::<Vec<_>>(),
        "fetched_bytes": shown.iter().map(|view| fetched(view.name)).collect::<Vec<_>>(),
        "more_views": views.len() - shown.len(),
    })));
    let mut data = Value::Object(data);
    make_printable(&mut data);
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
    let mut text = text::text(checkpoint, views.iter().map(|view| (view.name, view.plan)));
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
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
    BASE64_STANDARD.encode(Sha256::digest(text.as_bytes()))
}

fn members(value: Value) -> Map<String, Value> {
    let Value::Object(members) = value else { return Map::new() };
    members
}

fn array(value: Option<Value>) -> Vec<Value> {
    let Some(Value::Array(values)) = value else { return Vec::new() };
    values
}

/// Cuts lists where they would take too much of the page, and removes objects that do. A member `more` says by name how many
/// elements are left out.
fn shorten(of: &mut Map<String, Value>, room_bytes: usize) {
    let mut more = Map::new();
    for (name, value) in &mut *of {
        let others = match value {
            Value::Array(values) => {
                let (kept, others) = within(&mut PageBudget(room_bytes), mem::take(values));
                *values = kept;
                others
            }
            Value::Object(members) if !PageBudget(room_bytes).take(&json!(members)) => mem::take(members).len(),
            Value::Object(_) | Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
        };
        if others > 0 {
            more.insert(name.clone(), others.into());
        }
    }
    of.insert("more".to_owned(), more.into());
}

/// Escapes what a terminal or a browser would not show as it stands, in all texts.
fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Cow::Owned(shown) = printable(text) {
                *text = shown;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(make_printable),
        Value::Object(members) => members.values_mut().for_each(make_printable),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// A view as `ckfs plan --json` has it, bounded, with what the page draws in place of the tensors.
fn view_data(checkpoint: &Checkpoint, view: &ViewReport<'_>, files: &EmbeddedFiles, shares: usize) -> Value {
    let ViewReport { name, plan, more } = view;
    let room = |bytes: usize| PageBudget(bytes / shares);
    let mut data = members(view_json(checkpoint, name, plan));
    let all = array(data.remove("devices"));
    let extremes = extremes(&all, Amplification::of(checkpoint, plan));
    let listed = all.into_iter().take(DEVICES_MAX / shares);
    // Half of the room is for what the devices read.
    let (listed, _) = within(&mut room(DEVICES_BYTES / 2), listed);
    let devices = &plan.devices[..listed.len()];
    let mut amplification = members(data.remove("amplification").unwrap_or_default());
    amplification.remove("tensors");
    if let Some(Value::Array(reads)) = amplification.get_mut("devices") {
        reads.truncate(devices.len());
    }
    data.extend(more.get("unavailable").map(|formats| ("unavailable".to_owned(), formats.clone())));
    shorten(&mut data, MEMBERS_BYTES / MEMBERS / shares);
    let mut page = members(json!({
        "more_devices": plan.devices.len() - devices.len(),
        "extremes": extremes,
        "tensors": plan.bundle().count(),
        "raw_files": plan.tensors.len(),
    }));
    page.extend(members(records(checkpoint, plan, devices, files, room)));
    data.extend(members(json!({
        "devices": listed,
        "amplification": amplification,
        "page": page,
    })));
    Value::Object(data)
}

/// Of all devices of a view, those that a page does not list included: the least and most bytes held, the most to train with and to
/// read, and the reads of the device that reads the most in comparison to its needs.
fn extremes(devices: &[Value], amplification: &Amplification) -> Value {
    let column = |key: &str| devices.iter().filter_map(|device| device[key].as_u64()).collect::<Vec<_>>();
    let (held, training) = (column("bytes"), column("training_bytes"));
    let reads = &amplification.devices;
    let by_factor = |reads: &&Reads| u128::from(reads.paged_bytes) * 1_000_000 / u128::from(reads.needed_bytes.max(1));
    let worst = reads.iter().max_by_key(by_factor).copied().unwrap_or_default();
    json!({
        "least_bytes": held.iter().min(),
        "most_bytes": held.iter().max(),
        "training_bytes": training.iter().max(),
        "paged_bytes": reads.iter().map(|reads| reads.paged_bytes).max(),
        "worst": {"needed_bytes": worst.needed_bytes, "paged_bytes": worst.paged_bytes},
    })
}

#[cfg(test)]
mod tests {
    use super::{
        records::{CUTS_BYTES, PATTERNS_BYTES, ROWS_BYTES, SOURCES_BYTES},
        *,
    };

    const HTML_BYTES_MAX: usize = 5_000_000;

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
        let room = [
            FILES_BYTES,
            DEVICES_BYTES,
            MEMBERS_BYTES,
            ROWS_BYTES,
            SOURCES_BYTES,
            CUTS_BYTES,
            PATTERNS_BYTES,
            5 * TEXT_BYTES_MAX,
        ];
        assert!(room.iter().sum::<usize>() < HTML_BYTES_MAX - 300_000, "{}", room.iter().sum::<usize>());
    }
}
