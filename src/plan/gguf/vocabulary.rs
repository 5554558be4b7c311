//! The tokens of a GGUF file: their texts, kinds, scores and merges, and which of them are special.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::LazyLock,
};

use ckfs_checkpoint::GgufVocabulary;
use ckfs_format::gguf::{GgufPairs, GgufValue, sentence_pieces};
use serde::Deserialize;
use serde_json::Value;

use super::{files::ModelTexts, hparams::Hparams};

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
struct PreTokenizers {
    pre: Vec<PreTokenizer>,
}

#[derive(Debug, Deserialize)]
struct PreTokenizer {
    name: String,
    /// Types of models, if others with the same steps have another name.
    #[serde(default)]
    model_types: Vec<String>,
    steps: Vec<String>,
}

static PRE_TOKENIZERS: LazyLock<PreTokenizers> = LazyLock::new(|| {
    toml::from_str(include_str!("pre_tokenizers.toml")).expect("the file is in the program, and a test reads it")
});

/// Texts, kinds and, of some, scores.
#[derive(Debug, Default)]
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<i32>,
    scores: Vec<f32>,
}

impl Tokens {
    fn unused(count: u64) -> Self {
        Self {
            texts: (0..count).map(|id| format!("[PAD{id}]")).collect(),
            kinds: (0..count).map(|_| UNUSED).collect(),
            scores: (0..count).map(|_| -10000.0).collect(),
        }
    }

    fn set(&mut self, id: u64, text: &str, kind: i32, score: f32) {
        let at = usize::try_from(id).unwrap_or(usize::MAX);
        if let Some(known) = self.texts.get_mut(at) {
            text.clone_into(known);
            (self.kinds[at], self.scores[at]) = (kind, score);
        }
    }
}

/// A token besides those of the model.
#[derive(Clone, Debug)]
struct Added {
    id: u64,
    text: String,
    is_special: bool,
}

fn added(id: Option<u64>, value: &Value) -> Option<Added> {
    let is_special = value.get("special").and_then(Value::as_bool).unwrap_or(false);
    Some(Added { id: id?, text: value.get("content")?.as_str()?.to_owned(), is_special })
}

/// The text of a special token, which is one or an object.
fn text_of(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Whether a token is one of control, whatever is said of it.
fn looks_special(text: &str) -> bool {
    let is_between = |first, last| text.starts_with(first) && text.ends_with(last);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<｜", "｜>")
        || is_between("<unused", ">")
}

fn array<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
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
    /// `tokenizer.json`.
    parsed: Option<Value>,
    /// `tokenizer_config.json`.
    settings: Option<Value>,
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
        Ok(Self { files, hparams, config, model_type, pre, parsed, settings })
    }

    /// Tokens of `tokenizer.json` with those that are added.
    pub(super) fn rows(&self) -> Option<u64> {
        if self.files.has("tokenizer.model") {
            return self.hparams.count("vocab_size");
        }
        let vocabulary = self.parsed.as_ref()?.pointer("/model/vocab")?.as_object()?;
        Some((vocabulary.len() + array(self.parsed.as_ref()?, "added_tokens").len()) as u64)
    }

    /// Sets all keys of tokens.
    ///
    /// # Errors
    /// What is missing, or is not as llama.cpp needs it.
    pub(super) fn set(&self, pairs: &mut GgufPairs) -> Result<(), String> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let (has_pieces, mut is_found) = (self.files.has("tokenizer.model"), false);
        for step in self.hparams.family.vocabulary() {
            let setting = |name: &str| self.settings.as_ref().and_then(|settings| settings.get(name));
            match step {
                GgufVocabulary::PrefixSpace => {
                    if let Some(value) = setting("add_prefix_space").and_then(Value::as_bool) {
                        pairs.set(key("add_space_prefix"), GgufValue::Bool(value));
                    }
                }
                GgufVocabulary::NoPrefixSpaceOfPieces if !has_pieces => {}
                GgufVocabulary::NoPrefixSpace | GgufVocabulary::NoPrefixSpaceOfPieces => {
                    pairs.set(key("add_space_prefix"), GgufValue::Bool(false));
                }
                GgufVocabulary::LlamaEnd => self.set_end_of_llama(pairs),
                _ if is_found => {}
                GgufVocabulary::Sentencepiece if has_pieces => {
                    self.set_llama(pairs, self.pieces(false)?)?;
                    is_found = true;
                }
                GgufVocabulary::SentencepieceOfPhi3 if has_pieces => {
                    self.set_llama(pairs, self.pieces(true)?)?;
                    is_found = true;
                }
                GgufVocabulary::LlamaHf => {
                    if let Some(tokens) = self.with_bytes() {
                        self.set_llama(pairs, tokens)?;
                        is_found = true;
                    }
                }
                GgufVocabulary::Gpt2IfNamed
                    if setting("tokenizer_class").and_then(Value::as_str) != Some("GPT2Tokenizer") => {}
                GgufVocabulary::Gpt2 | GgufVocabulary::Gpt2IfNamed | GgufVocabulary::Gpt2OfGlm4
                    if self.parsed.is_some() =>
                {
                    self.set_gpt2(pairs, *step == GgufVocabulary::Gpt2OfGlm4)?;
                    is_found = true;
                }
                GgufVocabulary::Sentencepiece
                | GgufVocabulary::SentencepieceOfPhi3
                | GgufVocabulary::Gpt2
                | GgufVocabulary::Gpt2IfNamed
                | GgufVocabulary::Gpt2OfGlm4 => {}
            }
        }
        let what = "expected tokenizer.model or tokenizer.json as the family's releases have them; --config-from gives \
                    those of another repository";
        if is_found { Ok(()) } else { Err(what.to_owned()) }
    }

    fn vocab_size(&self) -> Result<u64, String> {
        let count = self.hparams.count("vocab_size").filter(|count| *count <= TOKENS_MAX);
        count.ok_or_else(|| format!("config.json: vocab_size: expected a number of at most {TOKENS_MAX}"))
    }

    /// The tokens of `tokenizer.model`, and those that are added.
    fn pieces(&self, is_phi3: bool) -> Result<Tokens, String> {
        let bytes = self.files.bytes("tokenizer.model")?.unwrap_or_default();
        let pieces = sentence_pieces(&bytes).ok_or("tokenizer.model: expected a model of SentencePiece")?;
        let mut tokens = Tokens::unused(self.vocab_size()?);
        for (id, piece) in pieces.iter().enumerate() {
            // User-defined pieces are normal ones to the converter.
            let kind = if piece.kind == USER_DEFINED { NORMAL } else { piece.kind };
            tokens.set(id as u64, &piece.text, kind, piece.score);
        }
        if let Some(Value::Object(more)) = self.files.json("added_tokens.json")? {
            for (text, id) in &more {
                tokens.set(id.as_u64().unwrap_or(u64::MAX), text, USER_DEFINED, -1000.0);
            }
        }
        let decoder = self.settings.as_ref().and_then(|settings| settings.get("added_tokens_decoder")?.as_object());
        let of_settings = decoder.into_iter().flatten().filter_map(|(id, value)| added(id.parse().ok(), value));
        let of_tokenizer = if is_phi3 { self.added_of_tokenizer() } else { Vec::new() };
        for Added { id, text, is_special } in of_settings.chain(of_tokenizer) {
            let is_control = is_special || (!is_phi3 && looks_special(&text));
            let text = if is_control || is_phi3 { text } else { text.replace('▁', " ") };
            tokens.set(id, &text, if is_control { CONTROL } else { USER_DEFINED }, -1000.0);
        }
        Ok(tokens)
    }

    fn added_of_tokenizer(&self) -> Vec<Added> {
        let listed = self.parsed.as_ref().map_or(&[][..], |tokenizer| array(tokenizer, "added_tokens"));
        listed.iter().filter_map(|value| added(value.get("id").and_then(Value::as_u64), value)).collect()
    }

    /// Texts of the special tokens that `tokenizer_config.json` names.
    fn named_special(&self) -> HashSet<&str> {
        let settings = self.settings.as_ref().and_then(Value::as_object);
        let is_named = |name: &str| {
            let words = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
            name.strip_suffix("_token").is_some_and(|word| words.contains(&word))
        };
        let single = settings.into_iter().flatten().filter(move |(name, _)| is_named(name)).map(|(_, value)| value);
        let lists = ["additional_special_tokens", "extra_special_tokens"];
        let several =
            lists.iter().flat_map(|name| self.settings.as_ref().map_or(&[][..], |settings| array(settings, name)));
        single.chain(several).filter_map(text_of).collect()
    }

    /// The tokens of a `tokenizer.json` that falls back to bytes; `None` if it is none.
    fn with_bytes(&self) -> Option<Tokens> {
        let tokenizer = self.parsed.as_ref()?;
        let model = tokenizer.get("model")?;
        let falls_back = model.get("byte_fallback").and_then(Value::as_bool) == Some(true);
        let is_sequence = tokenizer.pointer("/decoder/type").and_then(Value::as_str) == Some("Sequence");
        if !falls_back || !is_sequence || model.get("type").and_then(Value::as_str) != Some("BPE") {
            return None;
        }
        let vocabulary = model.get("vocab")?.as_object()?;
        let by_id: BTreeMap<u64, &str> =
            vocabulary.iter().filter_map(|(text, id)| Some((id.as_u64()?, text.as_str()))).collect();
        let (special, mut tokens) = (self.named_special(), Tokens::default());
        let mut push = |text: &str, kind: i32| {
            tokens.texts.push(text.to_owned());
            tokens.kinds.push(kind);
            tokens.scores.push(-1000.0);
        };
        for text in by_id.values() {
            let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            let is_byte = digits.is_some_and(|of| of.len() == 2 && of.bytes().all(|digit| digit.is_ascii_hexdigit()));
            push(
                text,
                if is_byte {
                    BYTE
                } else if special.contains(text) {
                    CONTROL
                } else {
                    NORMAL
                },
            );
        }
        let mut more = self.added_of_tokenizer();
        more.retain(|added| added.id >= by_id.len() as u64);
        more.sort_by_key(|added| added.id);
        for Added { text, .. } in &more {
            push(text, if special.contains(text.as_str()) { CONTROL } else { USER_DEFINED });
        }
        Some(tokens)
    }

    fn set_llama(&self, pairs: &mut GgufPairs, tokens: Tokens) -> Result<(), String> {
        let count = tokens.texts.len() as u64;
        for (name, value) in [
            ("model", GgufValue::Text("llama".to_owned())),
            ("pre", GgufValue::Text("default".to_owned())),
            ("tokens", GgufValue::Texts(tokens.texts)),
            ("scores", GgufValue::F32s(tokens.scores)),
            ("token_type", GgufValue::I32s(tokens.kinds)),
        ] {
            pairs.set(format!("tokenizer.ggml.{name}"), value);
        }
        self.set_special(pairs, Some(count), &[])
    }

    fn set_gpt2(&self, pairs: &mut GgufPairs, is_glm4: bool) -> Result<(), String> {
        let Some(tokenizer) = &self.parsed else { return Ok(()) };
        let vocabulary = tokenizer.pointer("/model/vocab").and_then(Value::as_object);
        let vocabulary = vocabulary.ok_or("tokenizer.json: model.vocab: expected texts with their numbers")?;
        let count = self.vocab_size()?;
        let mut tokens = Tokens::unused(count);
        let more = self.added_of_tokenizer();
        let own = vocabulary.iter().map(|(text, id)| (id.as_u64().unwrap_or(u64::MAX), text.as_str(), NORMAL));
        let (special, ids) = (self.named_special(), more.iter().map(|added| added.id));
        let highest = own.clone().map(|(id, ..)| id).chain(ids).max().unwrap_or(0);
        if highest >= count {
            return Err(format!(
                "tokenizer.json: expected numbers below {count}, config.json's vocab_size, found {highest}"
            ));
        }
        let known: HashSet<&str> = more.iter().map(|added| added.text.as_str()).collect();
        if let Some(text) = special.iter().find(|text| !known.contains(**text) && !vocabulary.contains_key(**text)) {
            return Err(format!("tokenizer_config.json: the special token {text:?} is not in tokenizer.json"));
        }
        own.for_each(|(id, text, kind)| tokens.set(id, text, kind, 0.0));
        for Added { id, text, is_special } in &more {
            let is_control = *is_special || looks_special(text);
            let text = if is_control { text.clone() } else { text.replace('▁', " ") };
            tokens.set(*id, &text, if is_control { CONTROL } else { USER_DEFINED }, 0.0);
        }
        for (name, value) in [
            ("model", GgufValue::Text("gpt2".to_owned())),
            ("pre", GgufValue::Text(self.pre_tokenizer(tokenizer)?)),
            ("tokens", GgufValue::Texts(tokens.texts)),
            ("token_type", GgufValue::I32s(tokens.kinds)),
            ("merges", GgufValue::Texts(merges(tokenizer)?)),
        ] {
            pairs.set(format!("tokenizer.ggml.{name}"), value);
        }
        let id_of = |text: &str| {
            let found = more.iter().find(|added| added.text == text).map(|added| added.id);
            found.ok_or_else(|| format!("tokenizer.json: expected the added token {text}"))
        };
        if !is_glm4 {
            return self.set_special(pairs, None, &[]);
        }
        let (end, user) = (id_of("<|endoftext|>")?, id_of("<|user|>")?);
        self.set_special(pairs, None, &[("eos", end), ("eot", user), ("unk", end), ("bos", end)])
    }

    /// llama.cpp's name of the steps before merging.
    fn pre_tokenizer(&self, tokenizer: &Value) -> Result<String, String> {
        if let Some(name) = self.pre {
            return Ok(name.clone());
        }
        let steps = steps(tokenizer);
        let is_of = |row: &&PreTokenizer| {
            row.steps == steps && (row.model_types.is_empty() || row.model_types.iter().any(|of| of == self.model_type))
        };
        let found = PRE_TOKENIZERS.pre.iter().find(is_of).map(|row| row.name.clone());
        found.ok_or_else(|| {
            format!(
                "tokenizer.json: no name of llama.cpp is known for a pre-tokenizer with the steps {steps:?}: --set {PRE}=NAME \
                 gives it, as the converter names it in tokenizer.ggml.pre"
            )
        })
    }

    /// What goes by the number of tokens.
    fn set_end_of_llama(&self, pairs: &mut GgufPairs) {
        let count = self.hparams.count("vocab_size");
        if count == Some(32016) {
            // Those of Code Llama.
            for (at, name) in ["prefix", "suffix", "middle", "eot"].into_iter().enumerate() {
                let id = u32::try_from(32007 + at).unwrap_or(u32::MAX);
                pairs.set(format!("tokenizer.ggml.{name}_token_id"), GgufValue::U32(id));
            }
        }
        if count == Some(49152) {
            pairs.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(false));
        }
    }

    /// Sets which tokens are special, which of them are added, and the chat template. `more` are special tokens where nothing else
    /// says so.
    fn set_special(&self, pairs: &mut GgufPairs, count: Option<u64>, more: &[(&str, u64)]) -> Result<(), String> {
        let mut settings = self.settings.clone();
        let (mut adds, mut kinds) = (Vec::new(), SPECIAL.map(|(kind, _)| kind).to_vec());
        if let Some(tokenizer) = &self.parsed {
            adds_of(tokenizer, settings.as_mut(), &mut adds, &mut kinds);
        }
        let mut ids: Vec<(&str, u64)> = Vec::new();
        let mut set = |kind, id: Option<u64>| {
            let id = id.filter(|id| count.is_none_or(|count| *id < count));
            if let Some(id) = id.filter(|_| !ids.iter().any(|(known, _)| *known == kind)) {
                ids.push((kind, id));
            }
        };
        // Without tokenizer.json the converter finds no number of a text.
        let known: HashMap<String, u64> =
            self.added_of_tokenizer().into_iter().rev().map(|added| (added.text, added.id)).collect();
        for kind in settings.iter().flat_map(|_| &kinds) {
            let settings = settings.as_ref().unwrap_or(&Value::Null);
            let adds_it = settings.get(format!("add_{kind}_token")).and_then(Value::as_bool);
            if let Some(value) = adds_it.filter(|_| !adds.iter().any(|(known, _)| known == kind)) {
                adds.push((*kind, value));
            }
            let text = settings.get(format!("{kind}_token")).and_then(text_of);
            set(*kind, text.and_then(|text| known.get(text).copied()));
        }
        for kind in &kinds {
            let member = format!("{kind}_token_id");
            let own = self.config.get(&member).filter(|value| !value.is_null());
            let id = own.or_else(|| self.config.get("text_config")?.get(&member)).and_then(Value::as_u64);
            set(*kind, id);
        }
        for (kind, id) in more {
            set(kind, Some(*id));
        }
        for (kind, id) in ids {
            let key = SPECIAL.iter().find(|(known, _)| *known == kind).map_or(kind, |(_, key)| key);
            if !key.is_empty() {
                let id = u32::try_from(id).map_err(|_| format!("{kind}_token_id: expected a number of 32 bits"))?;
                pairs.set(format!("tokenizer.ggml.{key}_token_id"), GgufValue::U32(id));
            }
        }
        for (kind, value) in adds.into_iter().filter(|(kind, _)| ["bos", "eos", "sep"].contains(kind)) {
            pairs.set(format!("tokenizer.ggml.add_{kind}_token"), GgufValue::Bool(value));
        }
        self.set_template(pairs)?;
        let normalizer = self.parsed.as_ref().and_then(|tokenizer| tokenizer.get("normalizer"));
        if let Some(name) = normalizer.and_then(lowers) {
            return Err(format!("tokenizer.json: the normalizer {name} is of no family that is written"));
        }
        Ok(())
    }

    fn set_template(&self, pairs: &mut GgufPairs) -> Result<(), String> {
        const KEY: &str = "tokenizer.chat_template";
        let Some(settings) = &self.settings else { return Ok(()) };
        let file = match self.files.bytes("chat_template.jinja")? {
            Some(text) => String::from_utf8(text).ok().map(Value::from),
            None => self.files.json("chat_template.json")?.and_then(|value| value.get("chat_template").cloned()),
        };
        if self.files.paths().any(|path| path.starts_with("additional_chat_templates/")) {
            return Err("additional_chat_templates/: expected one chat template".to_owned());
        }
        match settings.get("chat_template").or(file.as_ref()) {
            Some(Value::String(text)) => pairs.set(KEY, GgufValue::Text(text.clone())),
            Some(Value::Array(all)) => {
                let part = |value: &Value, name| value.get(name).and_then(Value::as_str).map(str::to_owned);
                let named = all.iter().filter_map(|value| Some((part(value, "name")?, part(value, "template")?)));
                let (own, others): (Vec<_>, Vec<_>) = named.partition(|(name, _)| name == "default");
                // The converter writes the names of several in no certain order.
                if others.len() > 1 {
                    return Err(
                        "tokenizer_config.json: chat_template: expected at most one beside the default".to_owned()
                    );
                }
                for (name, text) in &others {
                    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
                    pairs.set(format!("{KEY}.{name}"), GgufValue::Text(text.clone()));
                    pairs.set(format!("{KEY}s"), GgufValue::Texts(vec![name]));
                }
                for (_, text) in own {
                    pairs.set(KEY, GgufValue::Text(text));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// What comes before merging: the patterns at which texts are split, and the kinds of other steps.
fn steps(tokenizer: &Value) -> Vec<String> {
    fn add(step: &Value, found: &mut Vec<String>) {
        let kind = step.get("type").and_then(Value::as_str).unwrap_or("none");
        let flag = |name: &str, default| step.get(name).and_then(Value::as_bool).unwrap_or(default);
        match kind {
            "Sequence" => {
                ["pretokenizers", "normalizers"]
                    .iter()
                    .flat_map(|name| array(step, name))
                    .for_each(|step| add(step, found));
            }
            "Split" => {
                let pattern = step.get("pattern").and_then(Value::as_object);
                let pattern = pattern.and_then(|pattern| pattern.values().next()?.as_str());
                found.push(pattern.unwrap_or_default().replace('\r', r"\r").replace('\n', r"\n"));
            }
            "ByteLevel" if flag("use_regex", true) => found.push("ByteLevel".to_owned()),
            "ByteLevel" | "NFC" | "none" => {}
            "Digits" if flag("individual_digits", false) => found.push("each digit".to_owned()),
            other => found.push(other.to_owned()),
        }
    }
    let mut found = Vec::new();
    for part in ["normalizer", "pre_tokenizer"] {
        add(tokenizer.get(part).unwrap_or(&Value::Null), &mut found);
    }
    found
}

/// A normalizer that changes letters.
fn lowers(normalizer: &Value) -> Option<&str> {
    let kind = normalizer.get("type").and_then(Value::as_str)?;
    let below = array(normalizer, "normalizers").iter().find_map(lowers);
    below.or_else(|| ["Lowercase", "StripAccents", "BertNormalizer"].contains(&kind).then_some(kind))
}

/// Pairs of texts that are merged, as texts with a space between.
fn merges(tokenizer: &Value) -> Result<Vec<String>, String> {
    let model = tokenizer.get("model").unwrap_or(&Value::Null);
    let merge = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(pair) => {
            let parts: Option<Vec<String>> = pair.iter().map(|part| Some(part.as_str()?.replace(' ', "Ġ"))).collect();
            parts.filter(|parts| parts.len() == 2).map(|parts| parts.join(" "))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
    };
    let found: Option<Vec<String>> = array(model, "merges").iter().map(merge).collect();
    found.ok_or_else(|| "tokenizer.json: model.merges: expected pairs of texts".to_owned())
}

/// Which special tokens the template of `tokenizer.json` adds. Gives `settings` the tokens that the template has instead of theirs.
fn adds_of(
    tokenizer: &Value,
    mut settings: Option<&mut Value>,
    adds: &mut Vec<(&'static str, bool)>,
    kinds: &mut Vec<&'static str>,
) {
    fn put(adds: &mut Vec<(&'static str, bool)>, kind: &'static str, value: bool) {
        match adds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, found)) => *found = value,
            None => adds.push((kind, value)),
        }
    }
    // The converter compares texts with what stands there, which may be an object.
    let read = |settings: &Option<&mut Value>, kind: &str| -> Option<Value> {
        let value = settings.as_ref()?.get(format!("{kind}_token"))?;
        (!value.is_null() && value.as_str() != Some("")).then(|| value.clone())
    };
    let write = |settings: &mut Option<&mut Value>, kind: &str, value: Option<&Value>| {
        if let Some(Value::Object(members)) = settings {
            members.insert(format!("{kind}_token"), value.cloned().unwrap_or_default());
        }
    };
    let [mut bos, mut cls, mut eos, sep] = ["bos", "cls", "eos", "sep"].map(|kind| read(&settings, kind));
    if bos.is_none() && cls.is_some() {
        bos.clone_from(&cls);
        write(&mut settings, "bos", bos.as_ref());
    }
    if eos.is_none() && sep.is_some() {
        eos.clone_from(&sep);
        write(&mut settings, "eos", eos.as_ref());
    }
    let Some(processor) = tokenizer.get("post_processor").filter(|value| !value.is_null()) else { return };
    let several = processor.get("processors").and_then(Value::as_array);
    for step in several.map_or(std::slice::from_ref(processor), Vec::as_slice) {
        match step.get("type").and_then(Value::as_str) {
            Some("ByteLevel") => {
                for kind in ["bos", "eos"] {
                    if !adds.iter().any(|(known, _)| *known == kind) {
                        adds.push((kind, false));
                    }
                }
            }
            Some("TemplateProcessing") => {
                let id = |value: &Value| value.pointer("/SpecialToken/id").filter(|id| id.is_string()).cloned();
                let single = array(step, "single");
                let mut ends = [None, None];
                if let [first, .., last] = single {
                    ends = [id(first), id(last)];
                    if let Some(first) = &ends[0] {
                        if settings.is_none() {
                            bos = Some(first.clone());
                        } else if bos.as_ref() != Some(first) && cls.as_ref() != Some(first) {
                            for (kind, known) in [("bos", &mut bos), ("cls", &mut cls)] {
                                if known.is_none() {
                                    *known = Some(first.clone());
                                    write(&mut settings, kind, known.as_ref());
                                }
                            }
                        }
                        put(adds, "bos", bos.as_ref() == Some(first) || cls.as_ref() == Some(first));
                    }
                    if let Some(last) = &ends[1] {
                        if settings.is_some() && eos.as_ref() != Some(last) {
                            let free = ["eot", "eom"].into_iter().find(|kind| !kinds.contains(kind));
                            if let Some(kind) = free {
                                kinds.push(kind);
                                write(&mut settings, kind, eos.as_ref());
                            }
                            write(&mut settings, "eos", Some(last));
                        }
                        eos = Some(last.clone());
                        put(adds, "eos", true);
                    }
                }
                if let Some(value) = adds_separator(array(step, "pair"), &ends, [sep.as_ref(), eos.as_ref()]) {
                    put(adds, "sep", value);
                    if value && sep.is_none() {
                        write(&mut settings, "sep", eos.as_ref());
                    }
                }
            }
            _ => {}
        }
    }
}

/// Whether a separator is added between two texts; `None` if the template of pairs has nothing there.
fn adds_separator(pair: &[Value], [first, last]: &[Option<Value>; 2], separators: [Option<&Value>; 2]) -> Option<bool> {
    let id = |value: &Value| value.pointer("/SpecialToken/id").filter(|id| id.is_string()).cloned();
    let is_end = |value: Option<&Value>, end: &Option<Value>| end.is_some() && value.and_then(id) == *end;
    let start = usize::from(is_end(pair.first(), first));
    let stop = pair.len() - usize::from(is_end(pair.last(), last) && pair.len() > start);
    let [a, middle @ .., b] = &pair[start..stop] else { return None };
    let is_text = |value: &Value, name: &str| value.pointer("/Sequence/id").and_then(Value::as_str) == Some(name);
    if middle.is_empty() || !is_text(a, "A") || !is_text(b, "B") {
        return None;
    }
    let is_separator = |value: &Value| id(value).is_some_and(|id| separators.contains(&Some(&id)));
    Some((is_separator(&middle[0]) && last.is_none()) || (middle.len() == 2 && is_separator(&middle[1])))
}
