//! What is stored quantized and no scheme of the list decodes. It stays raw, and decoding is refused with its name.

use std::{cell::LazyCell, collections::HashMap};

use ckfs_tensor::{DType, TensorId};

use super::{
    comfy,
    findings::{SchemeFindings, Told},
    listed::excepted,
    parts::{is_fp8, is_wide_float, module_of},
    quantization_config::{Factor, ModuleQuantization, QuantizationConfig},
    stored::{Stored, last_word},
};
use crate::table::TensorInfo;

/// Finds the tensors of the scheme.
pub(super) fn find(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let settings = QuantizationConfig::read(stored);
    let method = method(stored);
    let used = found.operands();
    // Made when the first such tensor is met.
    let (scaled, neighbours) = (LazyCell::new(|| ScaledNames::of(stored)), LazyCell::new(|| by_module(stored)));
    let shown = |codes: &TensorInfo<'_>| may_be_scaled(codes).then(|| scaled.shown(codes)).flatten();
    let is_open = |found: &SchemeFindings<'_>, id: &TensorId| !found.is_taken(*id) && !used[id.0 as usize];
    for (id, codes) in stored.iter() {
        if !is_open(found, &id) {
            continue;
        }
        if are_codes(stored, &codes, method.is_some()) {
            found.unsupported(&told(&settings, method.as_deref(), &codes, &|| beside(&neighbours, &codes)), Some(id));
        } else if let Some(shown) = method.is_none().then(|| shown(&codes)).flatten() {
            found.unsupported(&shown, Some(id));
        }
    }
    for (id, codes) in stored.in_boxes() {
        if are_codes(stored, &codes, method.is_some()) || (method.is_none() && shown(&codes).is_some()) {
            let method = method.as_deref().unwrap_or("codes and scales");
            found.unsupported(&format!("{method}, but stored as several boxes"), Some(id));
        }
    }
    if let Some(target) = settings.homeless(stored).filter(|_| found.has_tensors()) {
        let what = format!("compressed-tensors, with a group of its own for {target:?}, which matches no module here");
        found.unsupported(&what, None);
    }
    if settings.is_known() {
        refuse_orphans(stored, &settings, found, &used);
    }
    // Names that nothing here knows: whatever holds no plain numbers is what the configuration speaks of.
    if let Some(method) = method.filter(|_| found.is_empty()) {
        for (id, codes) in stored.iter() {
            if codes.shape.len() >= 2 && !is_plain(codes.dtype) && is_open(found, &id) {
                found.unsupported(&method, Some(id));
            }
        }
    }
    None
}

/// Ends of the names of what belongs to the codes of a module.
const COMPANIONS: [&str; 6] =
    ["weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape"];
/// Those that each quantized module has, whatever its scheme.
const SCALES: [&str; 2] = ["weight_scale", "weight_scale_inv"];

/// Refuses companions whose codes are missing, and scales beside a tensor that cannot be codes although the configuration says so:
/// they would stay as tensors that no model has.
fn refuse_orphans(
    stored: &Stored<'_>,
    settings: &QuantizationConfig<'_>,
    found: &mut SchemeFindings<'_>,
    used: &[bool],
) {
    let has_tensors = found.has_tensors();
    for (id, tensor) in stored.iter() {
        let Some((module, word)) = tensor.name.rsplit_once('.') else { continue };
        if !COMPANIONS.contains(&word) || used[id.0 as usize] || found.is_taken(id) {
            continue;
        }
        let mut codes = ["weight", "weight_packed"].iter().map(|codes| format!("{module}.{codes}"));
        match codes.find_map(|codes| stored.find(&codes)) {
            None if has_tensors => found.refuse(
                tensor.name,
                format!("codes {module}.weight or {module}.weight_packed beside it"),
                "no such tensor",
            ),
            Some(codes) if SCALES.contains(&word) && settings.of(module).is_quantized() => {
                let is_open = !found.is_taken(codes) && !used[codes.0 as usize];
                let codes = stored.tensor(codes);
                // A matrix of codes is taken, or something else is wrong with it.
                if is_open && !are_codes(stored, &codes, true) {
                    let expected = format!("a matrix of codes, as {:?} and quantization_config say", tensor.name);
                    found.refuse(codes.name, expected, format!("{} {:?}", codes.dtype, codes.shape));
                }
            }
            None | Some(_) => {}
        }
    }
}

/// What the configuration calls its method.
pub(super) fn method(stored: &Stored<'_>) -> Option<String> {
    let config = stored.config.filter(|config| !config.is_null());
    let named = config.map(|config| match config.get("quant_method") {
        Some(method) => method.as_str().map_or_else(|| method.to_string(), str::to_owned),
        None => "a quantization_config without quant_method".to_owned(),
    });
    named.or_else(|| stored.modelopt.map(|_| "modelopt".to_owned()))
}

/// Why these codes are not decoded.
fn told(
    settings: &QuantizationConfig<'_>,
    method: Option<&str>,
    codes: &TensorInfo<'_>,
    beside: &dyn Fn() -> String,
) -> String {
    let Some(method) = method else {
        return "tensors of codes and scales, but no quantization_config".to_owned();
    };
    let module = codes.name.strip_suffix("_packed").unwrap_or(codes.name);
    let module = module_of(module, "weight").unwrap_or(module);
    let told = settings.of(module);
    let expected = match &told {
        ModuleQuantization::Unknown(name) => return name.clone(),
        ModuleQuantization::Plain if settings.is_known() => {
            return excepted(method);
        }
        ModuleQuantization::Plain => return method.to_owned(),
        ModuleQuantization::Packed { bits, .. } => {
            format!("weight_packed (I32, {bits} bits each) with weight_scale beside it")
        }
        ModuleQuantization::Fp8(_) => "weight (F8_E4M3) with weight_scale or weight_scale_inv beside it".to_owned(),
        ModuleQuantization::Nvfp4(Factor::Multiplies) => {
            "weight (U8, two 4-bit floats each) with weight_scale (F8_E4M3) and weight_scale_2 (F32) beside it"
                .to_owned()
        }
        ModuleQuantization::Nvfp4(Factor::Divides) => {
            "weight_packed (U8, two 4-bit floats each) with weight_scale (F8_E4M3) and \
                                         weight_global_scale (F32) beside it"
                .to_owned()
        }
        ModuleQuantization::Mxfp4 => {
            "weight_packed (U8, two 4-bit floats each) with weight_scale (U8) beside it".to_owned()
        }
        ModuleQuantization::Mxfp8 => "weight (F8_E4M3) with weight_scale (U8) beside it".to_owned(),
    };
    format!("{method}, whose configuration says {expected}, and found is {}", beside())
}

/// The last words and types of the tensors of each module.
type WordsByModule<'a> = HashMap<&'a str, Vec<(&'a str, DType)>>;

fn by_module<'a>(stored: &Stored<'a>) -> WordsByModule<'a> {
    let mut by_module = WordsByModule::new();
    for (_, info) in stored.iter() {
        let (module, word) = info.name.rsplit_once('.').unwrap_or(("", info.name));
        by_module.entry(module).or_default().push((word, info.dtype));
    }
    for words in by_module.values_mut() {
        words.sort_unstable_by_key(|(word, _)| *word);
    }
    by_module
}

/// A tensor and those beside it: of the same module, or with names that begin with its own.
fn beside(by_module: &WordsByModule<'_>, codes: &TensorInfo<'_>) -> String {
    const SHOWN: usize = 6;
    let (module, word) = codes.name.rsplit_once('.').unwrap_or(("", codes.name));
    let is_own = |other: &str| other != word && (word == "weight" || other.starts_with(word));
    let found: Vec<_> = by_module.get(module).into_iter().flatten().filter(|(other, _)| is_own(other)).collect();
    let shown = found.iter().take(SHOWN).map(|(word, dtype)| format!("{word} ({dtype})"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match found.len() {
        0 => format!("{word} ({}) alone", codes.dtype),
        count if count > SHOWN => {
            format!("{word} ({}) with {shown} and {} more beside it", codes.dtype, count - SHOWN)
        }
        _ => format!("{word} ({}) with {shown} beside it", codes.dtype),
    }
}

/// Whether a tensor's name, type and companions say that it holds codes. With `is_configured`, something is quantized by the
/// configuration: then matrices of 8-bit floats are codes whatever stands beside them, as their scales may have any name.
fn are_codes(stored: &Stored<'_>, tensor: &TensorInfo<'_>, is_configured: bool) -> bool {
    let name = tensor.name;
    let beside = |suffix: &str| stored.has(&format!("{name}{suffix}"));
    if let Some(stem) = name.strip_suffix("_blocks") {
        return tensor.dtype == DType::U8 && stored.has(&format!("{stem}_scales"));
    }
    let (module, last) = name.rsplit_once('.').unwrap_or(("", name));
    let in_module = |words: &[&str]| words.iter().any(|word| stored.has(&format!("{module}.{word}")));
    let parameter = last.strip_prefix('_').and_then(|last| last.strip_suffix("_qdata"));
    match (last, parameter) {
        ("weight_packed", _) => return !is_plain(tensor.dtype),
        ("qweight", _) => return !is_plain(tensor.dtype) && in_module(&["qzeros", "scales"]),
        ("W_q", _) => return !is_plain(tensor.dtype) && in_module(&["scale"]),
        (_, Some(parameter)) => return in_module(&[&format!("_{parameter}_scale")]),
        _ => {}
    }
    let scale = || {
        ["_scale_inv", "_scale", "_weight_scale", ".absmax"].iter().any(|suffix| beside(suffix))
            || (last == "weight" && in_module(&["scale", "scales", "SCB"]))
    };
    let is_matrix = tensor.shape.len() >= 2;
    let may_be = is_fp8(tensor.dtype) || matches!(tensor.dtype, DType::I8 | DType::U8 | DType::I32 | DType::U32);
    // NVFP4 has matrices of 8-bit scales.
    let is_bare = || is_configured && is_fp8(tensor.dtype) && !last.contains("scale");
    is_matrix && may_be && (is_bare() || scale())
}

/// What shows that tensors of 8 bits are codes where no configuration says so: a scale beside them, of whatever name, or a mark of
/// the program that wrote them.
///
/// Names to which a scale belongs: modules, and tensors whose scale has a name that begins with theirs. Each with the scale's
/// last word.
struct ScaledNames<'a> {
    by_name: HashMap<&'a str, &'a str>,
    is_marked: bool,
}

/// Parts of the words that scales have, in lower case.
const SCALE_WORDS: [&str; 2] = ["scale", "amax"];

/// The last word of a name, and where in it a word begins that scales have, if there is one.
fn scale_word(name: &str) -> Option<(&str, usize)> {
    let last = last_word(name);
    let lower = last.to_ascii_lowercase();
    SCALE_WORDS.iter().find_map(|word| Some((last, lower.find(word)?)))
}

/// Whether a tensor may be such codes, by itself.
fn may_be_scaled(tensor: &TensorInfo<'_>) -> bool {
    let is_other = scale_word(tensor.name).is_some() || tensor.name.ends_with("zero_point");
    tensor.shape.len() >= 2 && !is_other && (is_float(tensor.dtype) || tensor.dtype == DType::I8)
}

/// The scales of blocks of 4-bit floats are 8-bit floats themselves.
fn is_float(dtype: DType) -> bool {
    is_fp8(dtype) || dtype == DType::F8E8M0
}

impl<'a> ScaledNames<'a> {
    fn of(stored: &Stored<'a>) -> Self {
        let mut by_name: HashMap<&str, &str> = HashMap::new();
        // The scale of inputs is named only where there is no other.
        let mut add = |name, word: &'a str| {
            let known = by_name.entry(name).or_insert(word);
            *known = if known.contains("input") { word } else { known };
        };
        for (_, tensor) in stored.iter().chain(stored.in_boxes()) {
            let Some((word, at)) = scale_word(tensor.name) else { continue };
            // `X.weight_scale` is that of `X.weight` and of `X`, `X.weight.scale` too, `X_scale` that of `X`.
            let before = &tensor.name[..tensor.name.len() - word.len() + at];
            add(before.trim_end_matches(['.', '_']), word);
            let module = tensor.name.strip_suffix(word).and_then(|module| module.strip_suffix('.'));
            let outer = module.and_then(|module| module.rsplit_once('.')).map(|(outer, _)| outer);
            module.into_iter().chain(outer).for_each(|name| add(name, word));
        }
        Self { by_name, is_marked: comfy::is_marked(stored) }
    }

    /// Why this tensor holds codes, in a few words, if it may; `None` if nothing shows it.
    fn shown(&self, tensor: &TensorInfo<'_>) -> Option<String> {
        let (module, _) = tensor.name.rsplit_once('.').unwrap_or(("", tensor.name));
        if let Some(word) = self.by_name.get(tensor.name).or_else(|| self.by_name.get(module)) {
            return Some(format!("{} codes beside a scale {word:?}, but no quantization_config", tensor.dtype));
        }
        let is_marked = is_float(tensor.dtype) && self.is_marked;
        is_marked.then(|| format!("{} codes, as a mark of ComfyUI says, without a scale of a known name", tensor.dtype))
    }
}

/// Types that models compute with, or count with.
fn is_plain(dtype: DType) -> bool {
    is_wide_float(dtype) || matches!(dtype, DType::I64 | DType::Bool)
}
