//! The tokens of a GGUF file: their texts, kinds, scores and merges, and which of them are special. The files that tell them.

use std::{
    collections::{BTreeMap, HashSet},
    sync::LazyLock,
};

use ckfs_checkpoint::{Checkpoint, FileRole, GgufTokenizer, json};
use ckfs_format::gguf::{GgufPairs, GgufValue, sentence_pieces};
use serde::Deserialize;
use serde_json::Value;

use super::{super::library::embedded_rows, hparams::Hparams};

/// Longest text.
const BYTES_MAX: u64 = 256 << 20;

/// The files of a repository, or those of the one that gives its configuration.
pub(super) struct ModelTexts<'a>(pub(super) &'a Checkpoint);

impl ModelTexts<'_> {
    /// All paths.
    fn paths(&self) -> impl Iterator<Item = &str> {
        let others = self.0.files().iter().filter(|file| file.role == FileRole::Other && self.0.companion().is_none());
        let theirs = self.0.companion().into_iter().flat_map(|companion| &companion.files);
        theirs.map(|(path, _)| path.as_str()).chain(others.map(|file| file.path.as_str()))
    }

    /// Whether there is such a file.
    fn has(&self, path: &str) -> bool {
        self.paths().any(|known| known == path)
    }

    /// The bytes of a file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read.
    fn bytes(&self, path: &str) -> Result<Option<Vec<u8>>, String> {
        if let Some(companion) = self.0.companion() {
            return Ok(companion.files.iter().find(|(known, _)| known == path).map(|(_, bytes)| bytes.to_vec()));
        }
        let own = self.0.files().iter().find(|file| file.path == path && file.role == FileRole::Other);
        let Some(file) = own.and_then(|file| file.file) else { return Ok(None) };
        self.0.source().read_whole(file, BYTES_MAX).map(Some).map_err(|reason| format!("{path}: {reason}"))
    }

    /// A text with line feeds as line ends, as Python reads it; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not in UTF-8.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>, String> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        let text = String::from_utf8(bytes).map_err(|error| format!("{path}: {error}"))?;
        Ok(Some(text.replace("\r\n", "\n").replace('\r', "\n")))
    }

    /// A JSON file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is no JSON.
    pub(super) fn json(&self, path: &str) -> Result<Option<Value>, String> {
        let Some(bytes) = self.bytes(path)? else { return Ok(None) };
        json::parse(&bytes).map(Some).map_err(|error| format!("{path}: {error}"))
    }
}

/// Kinds of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Most tokens.
const TOKENS_MAX: u64 = 1 << 24;
/// The special tokens that llama.cpp knows, and their keys.
const SPECIAL: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", ""),
    ("mask", "mask"),
];
/// The name of the parameter that gives the pre-tokenizer's name.
pub(super) const PRE: &str = "pre";

#[derive(Debug, Deserialize)]
struct PreTokenizer {
    name: String,
    /// Types of models, if others with the same steps have another name.
    #[serde(default)]
    model_types: Vec<String>,
    /// Whether a token is put before texts, if the name depends on that.
    adds_bos: Option<bool>,
    steps: Vec<String>,
}

static PRE_TOKENIZERS: LazyLock<Vec<PreTokenizer>> =
    LazyLock::new(|| embedded_rows(include_str!("pre_tokenizers.toml")));

/// Text, kind and score of each token.
type Tokens = Vec<(String, i32, f32)>;

/// A token besides those of the model.
struct Added<'a> {
    id: u64,
    text: &'a str,
    is_special: bool,
}

impl<'a> Added<'a> {
    fn new(id: Option<u64>, value: &'a Value) -> Option<Self> {
        Some(Self { id: id?, text: value["content"].as_str()?, is_special: value["special"] == true })
    }

    /// Its text and its kind, as the converter reads most of them.
    fn normalized(&self) -> (String, i32) {
        if self.is_special || looks_special(self.text) {
            return (self.text.to_owned(), CONTROL);
        }
        (self.text.replace('▁', " "), USER_DEFINED)
    }
}

/// Replaces a token, if there are that many.
fn put(tokens: &mut Tokens, id: u64, text: impl Into<String>, kind: i32, score: f32) {
    if let Some(known) = usize::try_from(id).ok().and_then(|at| tokens.get_mut(at)) {
        *known = (text.into(), kind, score);
    }
}

/// The text of a special token, which is one or an object.
fn text_of(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// The text of a special token in a template of `tokenizer.json`.
fn special_of(value: Option<&Value>) -> Option<&Value> {
    value?.pointer("/SpecialToken/id").filter(|id| id.is_string())
}

/// Whether a token is one of control, whatever is said of it.
fn looks_special(text: &str) -> bool {
    let is_between = |(first, last): (&str, &str)| text.starts_with(first) && text.ends_with(last);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || [("<|", "|>"), ("<｜", "｜>"), ("<unused", ">")].into_iter().any(is_between)
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// The tokenizer of a model.
pub(super) struct Tokenizer<'a> {
    pub(super) files: &'a ModelTexts<'a>,
    pub(super) hparams: &'a Hparams,
    /// `config.json`.
    pub(super) config: &'a Value,
    pub(super) model_type: &'a str,
    /// The user's name for the pre-tokenizer.
    pub(super) pre: Option<&'a String>,
    /// `tokenizer.json`, null if there is none.
    parsed: Value,
    /// `tokenizer_config.json`, null if there is none or nothing in it.
    settings: Value,
}

impl<'a> Tokenizer<'a> {
    pub(super) fn new(
        files: &'a ModelTexts<'a>,
        hparams: &'a Hparams,
        (config, model_type): (&'a Value, &'a str),
        pre: Option<&'a String>,
    ) -> Result<Self, String> {
        let (parsed, settings) = (files.json("tokenizer.json")?, files.json("tokenizer_config.json")?);
        let settings = settings.filter(|settings| settings.as_object().is_some_and(|members| !members.is_empty()));
        let (parsed, settings) = (parsed.unwrap_or_default(), settings.unwrap_or_default());
        Ok(Self { files, hparams, config, model_type, pre, parsed, settings })
    }

    /// Tokens of `tokenizer.json` with those that are added.
    pub(super) fn rows(&self) -> Option<u64> {
        if self.files.has("tokenizer.model") {
            return self.hparams.count("vocab_size");
        }
        let own = self.parsed["model"]["vocab"].as_object()?;
        Some((own.len() + array(&self.parsed["added_tokens"]).len()) as u64)
    }

    /// Sets all keys of tokens.
    ///
    /// # Errors
    /// What is missing, or is not as llama.cpp needs it.
    pub(super) fn set(&self, pairs: &mut GgufPairs) -> Result<(), String> {
        let (family, has_pieces) = (self.hparams.family, self.files.has("tokenizer.model"));
        let is_llama = family.architecture() == "llama";
        let prefix = self.settings["add_prefix_space"].as_bool().filter(|_| is_llama);
        if let Some(value) = prefix {
            pairs.set(key("add_space_prefix"), GgufValue::Bool(value));
        }
        let is_named = family.architecture() != "phi3" || self.settings["tokenizer_class"] == "GPT2Tokenizer";
        let is_there = |reader: &&GgufTokenizer| match reader {
            GgufTokenizer::Pieces => has_pieces,
            GgufTokenizer::Fallback => self.falls_back(),
            GgufTokenizer::Bytes => is_named && !self.parsed.is_null(),
        };
        let found = family.tokenizers().iter().find(is_there).ok_or(
            "expected tokenizer.model or tokenizer.json as the family's releases have them; --config-from gives those of \
             another repository",
        )?;
        match found {
            GgufTokenizer::Pieces => self.write(pairs, ("llama", "default"), self.pieces()?, Vec::new())?,
            GgufTokenizer::Fallback => self.write(pairs, ("llama", "default"), self.with_fallback(), Vec::new())?,
            GgufTokenizer::Bytes => {
                self.write(pairs, ("gpt2", &self.pre_tokenizer()?), self.of_bytes()?, self.merges()?)?;
            }
        }
        if has_pieces && family.architecture().starts_with("gemma") {
            pairs.set(key("add_space_prefix"), GgufValue::Bool(false));
        }
        match self.hparams.count("vocab_size").filter(|_| is_llama) {
            // Code Llama.
            Some(32016) => {
                for (id, name) in (32007..).zip(["prefix", "suffix", "middle", "eot"]) {
                    pairs.set(key(&format!("{name}_token_id")), GgufValue::U32(id));
                }
            }
            Some(49152) => pairs.set(key("add_bos_token"), GgufValue::Bool(false)),
            _ => {}
        }
        Ok(())
    }

    /// As many tokens as the model has, all unused.
    fn unused(&self) -> Result<Tokens, String> {
        let count = self.hparams.count("vocab_size").filter(|count| *count <= TOKENS_MAX);
        let count =
            count.ok_or_else(|| format!("config.json: vocab_size: expected a number of at most {TOKENS_MAX}"))?;
        Ok((0..count).map(|id| (format!("[PAD{id}]"), UNUSED, -10000.0)).collect())
    }

    /// The tokens of `tokenizer.model`, and those that are added.
    fn pieces(&self) -> Result<Tokens, String> {
        let is_phi3 = self.hparams.family.architecture() == "phi3";
        let bytes = self.files.bytes("tokenizer.model")?.unwrap_or_default();
        let pieces = sentence_pieces(&bytes).ok_or("tokenizer.model: expected a model of SentencePiece")?;
        let mut tokens = self.unused()?;
        for (token, piece) in tokens.iter_mut().zip(pieces) {
            // User-defined pieces are normal ones to the converter.
            *token = (piece.text, if piece.kind == USER_DEFINED { NORMAL } else { piece.kind }, piece.score);
        }
        let more = self.files.json("added_tokens.json")?.unwrap_or_default();
        for (text, id) in more.as_object().into_iter().flatten() {
            put(&mut tokens, id.as_u64().unwrap_or(u64::MAX), text, USER_DEFINED, -1000.0);
        }
        let decoder = self.settings["added_tokens_decoder"].as_object().into_iter().flatten();
        let of_settings = decoder.filter_map(|(id, value)| Added::new(id.parse().ok(), value));
        for added in of_settings.chain(self.added().filter(|_| is_phi3)) {
            let kind = if added.is_special { CONTROL } else { USER_DEFINED };
            let (text, kind) = if is_phi3 { (added.text.to_owned(), kind) } else { added.normalized() };
            put(&mut tokens, added.id, text, kind, -1000.0);
        }
        Ok(tokens)
    }

    /// The added tokens of `tokenizer.json`.
    fn added(&self) -> impl Iterator<Item = Added<'_>> {
        array(&self.parsed["added_tokens"]).iter().filter_map(|value| Added::new(value["id"].as_u64(), value))
    }

    fn number_of_added(&self, text: &str) -> Option<u64> {
        self.added().find(|added| added.text == text).map(|added| added.id)
    }

    /// The number of a token.
    pub(super) fn number(&self, text: &str) -> Option<u64> {
        self.number_of_added(text).or_else(|| self.parsed["model"]["vocab"][text].as_u64())
    }

    /// Texts of the special tokens that `tokenizer_config.json` names.
    fn named_special(&self) -> HashSet<&str> {
        let single = SPECIAL.iter().map(|(kind, _)| &self.settings[format!("{kind}_token")]);
        let several = ["additional_special_tokens", "extra_special_tokens"].into_iter();
        single.chain(several.flat_map(|name| array(&self.settings[name]))).filter_map(text_of).collect()
    }

    /// Whether `tokenizer.json` falls back to bytes.
    fn falls_back(&self) -> bool {
        let (model, decoder) = (&self.parsed["model"], &self.parsed["decoder"]["type"]);
        let is_of = model["byte_fallback"] == true && decoder == "Sequence" && model["type"] == "BPE";
        is_of && model["vocab"].is_object()
    }

    fn with_fallback(&self) -> Tokens {
        let own = self.parsed["model"]["vocab"].as_object().into_iter().flatten();
        let by_id: BTreeMap<u64, &str> = own.filter_map(|(text, id)| Some((id.as_u64()?, text.as_str()))).collect();
        let special = self.named_special();
        let token = |text: &str, otherwise| {
            let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).unwrap_or_default();
            let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            let kind = if special.contains(text) { CONTROL } else { otherwise };
            (text.to_owned(), if is_byte && otherwise == NORMAL { BYTE } else { kind }, -1000.0)
        };
        let mut more: Vec<Added<'_>> = self.added().filter(|added| added.id >= by_id.len() as u64).collect();
        more.sort_by_key(|added| added.id);
        let own = by_id.values().map(|text| token(text, NORMAL));
        own.chain(more.iter().map(|added| token(added.text, USER_DEFINED))).collect()
    }

    /// The tokens of a `tokenizer.json` of pairs of bytes.
    fn of_bytes(&self) -> Result<Tokens, String> {
        let own = self.parsed["model"]["vocab"].as_object();
        let own = own.ok_or("tokenizer.json: model.vocab: expected texts with their numbers")?;
        let mut tokens = self.unused()?;
        let id = |id: &Value| id.as_u64().unwrap_or(u64::MAX);
        let highest = own.values().map(id).chain(self.added().map(|added| added.id)).max().unwrap_or(0);
        if highest >= tokens.len() as u64 {
            let count = tokens.len();
            return Err(format!(
                "tokenizer.json: expected numbers below {count}, config.json's vocab_size, found {highest}"
            ));
        }
        let added: HashSet<&str> = self.added().map(|added| added.text).collect();
        let is_unknown = |text: &&str| !added.contains(text) && !own.contains_key(*text);
        if let Some(text) = self.named_special().into_iter().find(is_unknown) {
            return Err(format!("tokenizer_config.json: the special token {text:?} is not in tokenizer.json"));
        }
        own.iter().for_each(|(text, number)| put(&mut tokens, id(number), text, NORMAL, 0.0));
        for added in self.added() {
            let (text, kind) = added.normalized();
            put(&mut tokens, added.id, text, kind, 0.0);
        }
        Ok(tokens)
    }

    /// Pairs of texts that are merged, as texts with a space between.
    fn merges(&self) -> Result<Vec<String>, String> {
        let merge = |value: &Value| match (value, array(value)) {
            (Value::String(text), _) => Some(text.clone()),
            (_, [Value::String(first), Value::String(second)]) => {
                Some(format!("{} {}", first.replace(' ', "Ġ"), second.replace(' ', "Ġ")))
            }
            _ => None,
        };
        let found: Option<Vec<String>> = array(&self.parsed["model"]["merges"]).iter().map(merge).collect();
        found.ok_or_else(|| "tokenizer.json: model.merges: expected pairs of texts".to_owned())
    }

    /// llama.cpp's name of the steps before merging.
    fn pre_tokenizer(&self) -> Result<String, String> {
        if let Some(name) = self.pre {
            return Ok(name.clone());
        }
        let mut steps = Vec::new();
        add_steps(&self.parsed["normalizer"], &mut steps);
        add_steps(&self.parsed["pre_tokenizer"], &mut steps);
        let adds_bos = self.settings["add_bos_token"] == true || self.special().adds.contains(&("bos", true));
        let is_of = |row: &&PreTokenizer| {
            let is_type = row.model_types.is_empty() || row.model_types.iter().any(|of| of == self.model_type);
            row.steps == steps && is_type && row.adds_bos.is_none_or(|adds| adds == adds_bos)
        };
        let found = PRE_TOKENIZERS.iter().find(is_of).map(|row| row.name.clone());
        found.ok_or_else(|| {
            format!(
                "tokenizer.json: no name of llama.cpp is known for a pre-tokenizer with the steps {steps:?}: --set {PRE}=NAME \
                 gives it, as the converter names it in tokenizer.ggml.pre"
            )
        })
    }

    fn write(
        &self,
        pairs: &mut GgufPairs,
        (model, pre): (&str, &str),
        tokens: Tokens,
        merges: Vec<String>,
    ) -> Result<(), String> {
        let is_llama = model == "llama";
        let count = (tokens.len() as u64, is_llama);
        let (texts, kinds, scores): (Vec<_>, Vec<_>, Vec<_>) = tokens.into_iter().collect();
        for (name, value) in [
            ("model", GgufValue::Text(model.to_owned())),
            ("pre", GgufValue::Text(pre.to_owned())),
            ("tokens", GgufValue::Texts(texts)),
            ("scores", GgufValue::F32s(if is_llama { scores } else { Vec::new() })),
            ("token_type", GgufValue::I32s(kinds)),
            ("merges", GgufValue::Texts(merges)),
        ] {
            pairs.set(key(name), value);
        }
        self.set_special(pairs, count)
    }

    /// Sets which tokens are special, which of them are added, and the chat template.
    fn set_special(&self, pairs: &mut GgufPairs, (count, is_bounded): (u64, bool)) -> Result<(), String> {
        let Special { settings, mut adds, kinds } = self.special();
        let mut ids: Vec<(&str, u64)> = Vec::new();
        let mut set = |kind, id: Option<u64>| {
            let id = id.filter(|id| (!is_bounded || *id < count) && !ids.iter().any(|(known, _)| *known == kind));
            ids.extend(id.map(|id| (kind, id)));
        };
        // Without tokenizer.json the converter finds no number of a text.
        let id_of = |text: &str| self.number_of_added(text);
        for kind in kinds.iter().filter(|_| !self.settings.is_null()) {
            let adds_it = self.settings[format!("add_{kind}_token")].as_bool();
            let is_known = adds.iter().any(|(known, _)| known == kind);
            adds.extend(adds_it.filter(|_| !is_known).map(|value| (*kind, value)));
            set(*kind, text_of(&settings[format!("{kind}_token")]).and_then(id_of));
        }
        for kind in &kinds {
            let member = format!("{kind}_token_id");
            let places = [&self.config[&member], &self.config["text_config"][&member]];
            set(*kind, places.into_iter().find(|value| !value.is_null()).and_then(Value::as_u64));
        }
        for [kind, text] in &self.hparams.family.family.special {
            let id = id_of(text).ok_or_else(|| format!("tokenizer.json: expected the added token {text}"))?;
            set(kind, Some(id));
        }
        for (kind, id) in ids {
            let name = SPECIAL.iter().find(|(known, _)| *known == kind).map_or(kind, |(_, name)| name);
            if !name.is_empty() {
                let id = u32::try_from(id).map_err(|_| format!("{kind}_token_id: expected a number of 32 bits"))?;
                pairs.set(key(&format!("{name}_token_id")), GgufValue::U32(id));
            }
        }
        for (kind, value) in adds.into_iter().filter(|(kind, _)| ["bos", "eos", "sep"].contains(kind)) {
            pairs.set(key(&format!("add_{kind}_token")), GgufValue::Bool(value));
        }
        self.set_template(pairs)?;
        match lowers(&self.parsed["normalizer"]) {
            Some(name) => Err(format!("tokenizer.json: the normalizer {name} is of no family that is written")),
            None => Ok(()),
        }
    }

    /// What the template of `tokenizer.json` tells of special tokens.
    fn special(&self) -> Special {
        let (has_settings, mut settings) = (!self.settings.is_null(), self.settings.clone());
        let (mut adds, mut kinds) = (Vec::new(), SPECIAL.map(|(kind, _)| kind).to_vec());
        let processor = &self.parsed["post_processor"];
        let steps = processor["processors"].as_array().map_or(std::slice::from_ref(processor), Vec::as_slice);
        let is_empty = |value: &Value| value.is_null() || value == "";
        if !self.parsed.is_null() {
            for (kind, other) in [("bos_token", "cls_token"), ("eos_token", "sep_token")] {
                if is_empty(&settings[kind]) && !is_empty(&settings[other]) {
                    settings[kind] = settings[other].clone();
                }
            }
        }
        let separator = settings["sep_token"].clone();
        for step in steps {
            if step["type"] == "ByteLevel" {
                let is_free = |kind: &&str| !adds.iter().any(|(known, _)| known == kind);
                let free: Vec<&str> = ["bos", "eos"].into_iter().filter(is_free).collect();
                adds.extend(free.into_iter().map(|kind| (kind, false)));
            }
            if step["type"] != "TemplateProcessing" {
                continue;
            }
            // The converter compares texts with what stands there, which may be an object.
            let (mut first, mut last) = (None, None);
            if let single @ [_, .., _] = array(&step["single"]) {
                (first, last) = (special_of(single.first()), special_of(single.last()));
            }
            if let Some(first) = first {
                let is_first = |settings: &Value| settings["bos_token"] == *first || settings["cls_token"] == *first;
                if !has_settings || !is_first(&settings) {
                    for kind in ["bos_token", "cls_token"] {
                        if !has_settings || is_empty(&settings[kind]) {
                            settings[kind] = first.clone();
                        }
                    }
                }
                adds.push(("bos", is_first(&settings)));
            }
            if let Some(last) = last {
                let free = ["eot", "eom"].into_iter().find(|kind| !kinds.contains(kind));
                if let Some(kind) = free.filter(|_| has_settings && settings["eos_token"] != *last) {
                    kinds.push(kind);
                    settings[format!("{kind}_token")] = settings["eos_token"].clone();
                }
                settings["eos_token"] = last.clone();
                adds.push(("eos", true));
            }
            let mut pair = array(&step["pair"]);
            if let [start, rest @ ..] = pair
                && first.is_some()
                && special_of(Some(start)) == first
            {
                pair = rest;
            }
            if let [rest @ .., end] = pair
                && last.is_some()
                && special_of(Some(end)) == last
            {
                pair = rest;
            }
            let is_text = |value: &Value, name: &str| value.pointer("/Sequence/id").is_some_and(|id| id == name);
            if let [a, second, third @ .., b] = pair
                && is_text(a, "A")
                && is_text(b, "B")
            {
                let is_separator = |value: Option<&Value>| {
                    special_of(value).is_some_and(|id| [&separator, &settings["eos_token"]].contains(&id))
                };
                let value =
                    (is_separator(Some(second)) && last.is_none()) || (third.len() == 1 && is_separator(third.first()));
                adds.push(("sep", value));
                if value && is_empty(&separator) {
                    settings["sep_token"] = settings["eos_token"].clone();
                }
            }
        }
        Special { settings, adds, kinds }
    }

    fn set_template(&self, pairs: &mut GgufPairs) -> Result<(), String> {
        const KEY: &str = "tokenizer.chat_template";
        if self.settings.is_null() {
            return Ok(());
        }
        let file = match self.files.text("chat_template.jinja")? {
            Some(text) => Value::from(text),
            None => self.files.json("chat_template.json")?.unwrap_or_default()["chat_template"].take(),
        };
        if self.files.paths().any(|path| path.starts_with("additional_chat_templates/")) {
            return Err("additional_chat_templates/: expected one chat template".to_owned());
        }
        match self.settings.get("chat_template").unwrap_or(&file) {
            Value::String(text) => pairs.set(KEY, GgufValue::Text(text.clone())),
            Value::Array(all) => {
                let named = all.iter().filter_map(|value| Some((value["name"].as_str()?, value["template"].as_str()?)));
                let named = named.filter(|(name, _)| !name.is_empty());
                let (own, others): (Vec<_>, Vec<_>) = named.partition(|(name, _)| *name == "default");
                // The converter writes the names of several in no certain order.
                if others.len() > 1 {
                    return Err(
                        "tokenizer_config.json: chat_template: expected at most one beside the default".to_owned()
                    );
                }
                for (name, text) in others {
                    let name = name.replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
                    pairs.set(format!("{KEY}.{name}"), GgufValue::Text(text.to_owned()));
                    pairs.set(format!("{KEY}s"), GgufValue::Texts(vec![name]));
                }
                for (_, text) in own {
                    pairs.set(KEY, GgufValue::Text(text.to_owned()));
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {}
        }
        Ok(())
    }
}

/// What is known of special tokens.
struct Special {
    /// `tokenizer_config.json` with the tokens that a template has instead of its own.
    settings: Value,
    /// Which kinds are added. The last of several of a kind counts.
    adds: Vec<(&'static str, bool)>,
    kinds: Vec<&'static str>,
}

/// Adds what comes before merging: the patterns at which texts are split, and the kinds of other steps.
fn add_steps(step: &Value, found: &mut Vec<String>) {
    match step["type"].as_str().unwrap_or("none") {
        "Sequence" => {
            let inner = ["pretokenizers", "normalizers"].into_iter().flat_map(|name| array(&step[name]));
            inner.for_each(|step| add_steps(step, found));
        }
        "Split" => {
            let pattern = step["pattern"].as_object().and_then(|pattern| pattern.values().next()?.as_str());
            found.push(pattern.unwrap_or_default().replace('\r', r"\r").replace('\n', r"\n"));
        }
        "ByteLevel" if step["use_regex"] != false => found.push("ByteLevel".to_owned()),
        "ByteLevel" | "NFC" | "none" => {}
        "Digits" if step["individual_digits"] == true => found.push("each digit".to_owned()),
        other => found.push(other.to_owned()),
    }
}

/// A normalizer that changes letters.
fn lowers(normalizer: &Value) -> Option<&str> {
    let kind = normalizer["type"].as_str()?;
    let below = array(&normalizer["normalizers"]).iter().find_map(lowers);
    below.or_else(|| ["Lowercase", "StripAccents", "BertNormalizer"].contains(&kind).then_some(kind))
}
