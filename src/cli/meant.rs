//! What is meant by flags and commands that do not exist: those of other programs, and those that are one word off.

use std::{ffi::OsString, path::Path};

use ckfs_config::{Arity, SETTINGS, Settings, nearest};
use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

/// Flags of other programs, each with what is written here; `VALUE` stands for the word after it.
const FLAGS: [(&[&str], &str); 14] = [
    (&["--revision", "--rev", "--branch"], "the revision is part of the name: org/name@VALUE"),
    (
        &["--tp", "--tp-size", "--tensor", "--tensor-parallel-size", "--tensor-parallel"],
        "the mesh has it: --mesh tensor=VALUE",
    ),
    (&["--fsdp", "--dp", "--fsdp-size"], "the mesh has it: --mesh fsdp=VALUE"),
    (&["--ep", "--expert", "--expert-parallel-size"], "the mesh has it: --mesh expert=VALUE"),
    (
        &["--format", "--output-format"],
        "a mount has every format, each as a directory: safetensors/, npy/, orbax/, dcp/, pt/, hf/; `ckfs export` takes some by \
         --only 'npy/*'",
    ),
    (&["-m"], "it is --mesh VALUE, such as --mesh fsdp=4"),
    (&["--rank", "--local-rank", "--device", "-r"], "it is --devices VALUE"),
    (&["--cast", "--torch-dtype", "--precision", "-d"], "it is --dtype VALUE"),
    (&["--quantization", "--quant"], "it is --quantize VALUE"),
    (&["-l"], "it is --layout VALUE"),
    (&["-c"], "it is --config VALUE"),
    (&["--token", "--hf-token"], "a token is read from a file, --token-file FILE; that of the Hub also from HF_TOKEN"),
    (
        &["--output", "--output-dir", "--out", "--outdir", "--target", "-o"],
        "the directory is a word of its own: ckfs export SOURCE VALUE",
    ),
    (&["--read-only", "--readonly", "--ro"], "every mount is read-only: leave it out"),
];

/// Flags of `ckfs serve` alone.
const SERVE_FLAGS: [(&[&str], &str); 2] = [
    (&["--port", "-p"], "it is --listen ADDRESS:PORT: --listen 127.0.0.1:VALUE"),
    (&["--host", "--bind", "--address"], "it is --listen ADDRESS:PORT: --listen VALUE:8421"),
];

/// Commands of other programs, each with what is typed here.
const COMMANDS: [(&[&str], &str); 8] = [
    (&["version"], "ckfs --version"),
    (&["ls", "list", "mounts", "ps"], "ckfs status"),
    (&["info", "show", "inspect"], "ckfs plan SOURCE"),
    (&["convert", "save", "write", "copy"], "ckfs export SOURCE DIR"),
    (&["download", "pull", "get"], "ckfs fetch SOURCE"),
    (&["check", "validate"], "ckfs verify SOURCE"),
    (&["stop", "eject"], "ckfs umount MNT"),
    (&["clean", "clear", "purge", "rm", "gc"], "ckfs cache prune"),
];

fn found(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(found)) => Some(found),
        _ => None,
    }
}

fn row<'a>(table: &[(&[&str], &'a str)], word: &str) -> Option<&'a str> {
    table.iter().find(|(words, _)| words.contains(&word)).map(|(_, text)| *text)
}

/// What to type in place of what the arguments, those of `command`, have.
pub(super) fn instead(error: &clap::Error, args: &[OsString], command: &Command) -> Option<String> {
    // What follows is another program's.
    let words: Vec<&str> =
        args.iter().skip(1).map_while(|word| word.to_str()).take_while(|word| *word != "--").collect();
    if error.kind() == ErrorKind::UnknownArgument {
        return flag(error, &words, command);
    }
    if error.kind() == ErrorKind::InvalidSubcommand { subcommand(error, &words, command) } else { None }
}

fn subcommand(error: &clap::Error, words: &[&str], command: &Command) -> Option<String> {
    let word = found(error, ContextKind::InvalidSubcommand)?;
    let mut parent = command;
    for name in words.iter().skip_while(|name| **name == "help") {
        parent = parent.find_subcommand(name).unwrap_or(parent);
    }
    let names = parent.get_subcommands().filter(|part| !part.is_hide_set()).map(Command::get_name);
    let names: Vec<&str> = names.chain(["help"]).collect();
    // Several that are similar are clap's to list.
    let has_similar = error.get(ContextKind::SuggestedSubcommand).is_some();
    let near = || nearest(word, names.iter().copied()).filter(|_| !has_similar);
    let line = || near().map(|near| format!("ckfs {}", words.join(" ").replace(word, near)));
    match row(&COMMANDS, word).map(str::to_owned).or_else(line) {
        Some(meant) => Some(format!("there is no command {word:?}: it is `{meant}`")),
        None if has_similar => None,
        None => Some(format!("there is no command {word:?}; there are: {}", names.join(", "))),
    }
}

fn flag(error: &clap::Error, words: &[&str], command: &Command) -> Option<String> {
    let flag = found(error, ContextKind::InvalidArg)?.split('=').next()?;
    if !flag.starts_with('-') {
        return value_apart(words).map(|meant| format!("unexpected argument '{flag}': {meant}"));
    }
    let is_short = !flag.starts_with("--");
    let is_it = |word: &str| {
        word.split('=').next() == Some(flag) || (is_short && !word.starts_with("--") && word.starts_with(flag))
    };
    let at = words.iter().position(|word| is_it(word));
    let typed = at.map_or(flag, |at| words[at]);
    let (name, value) = typed.split_once('=').map_or((typed, None), |(name, value)| (name, Some(value)));
    let mut longs = command.get_subcommands().flat_map(Command::get_arguments).filter_map(clap::Arg::get_long);
    if is_short && name.len() > 2 && longs.any(|long| long == &name[1..]) {
        return Some(format!("unexpected argument '{name}': it is -{typed}, with two dashes"));
    }
    let serves = words.first() == Some(&"serve");
    let text = row(&SERVE_FLAGS, flag).filter(|_| serves).or_else(|| row(&FLAGS, flag))?;
    let next = || at.and_then(|at| words.get(at + 1)).copied().filter(|word| !word.starts_with('-'));
    let value = value.or_else(|| Some(&typed[flag.len()..]).filter(|rest| !rest.is_empty())).or_else(next);
    Some(format!("unexpected argument '{flag}': {}", text.replace("VALUE", value.unwrap_or("VALUE"))))
}

/// A value as a word of its own after a flag that takes it only behind `=`.
fn value_apart(words: &[&str]) -> Option<String> {
    words.windows(2).find_map(|pair| {
        let name = pair[0].strip_prefix("--")?;
        let setting = SETTINGS.iter().find(|row| row.name == name && matches!(row.arity, Arity::Optional(..)))?;
        (setting.field.add)(&mut Settings::default(), pair[1].as_ref()).ok()?;
        Some(format!("the value of --{name} stands after =: --{name}={}", pair[1]))
    })
}

/// The error without proposals of clap that lead astray: a flag although another word was meant, with the usage of that flag, and
/// how to give a word with a dash as a value.
pub(super) fn without_far(mut error: clap::Error) -> clap::Error {
    let Some(flag) = found(&error, ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)
    else {
        return error;
    };
    let proposed = found(&error, ContextKind::SuggestedArg);
    let name = flag.split('=').next().unwrap_or(flag).trim_start_matches('-');
    let is_far =
        proposed.is_some_and(|proposed| nearest(name, std::iter::once(proposed.trim_start_matches('-'))).is_none());
    let is_flag = flag.starts_with('-') && !Path::new(flag).exists();
    if is_far {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
    }
    let is_value = |text: &ContextValue| matches!(text, ContextValue::StyledStrs(tips) if tips.iter().any(|tip| tip.to_string().contains("as a value")));
    if is_flag && error.get(ContextKind::Suggested).is_some_and(is_value) {
        error.remove(ContextKind::Suggested);
    }
    error
}
