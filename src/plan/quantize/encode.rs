//! Views of codes and scales in the place of weights.

use std::{collections::BTreeSet, sync::Arc};

use ckfs_config::Quantize;
use ckfs_tensor::{DType, Element, EncodedMatrices, EncodedPart, Field, Op, PerAxis, Shape, View, ViewError};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{
    super::{
        draft::{Draft, PartOf},
        name_group::{NameGroup, fold},
        problem::Problem,
    },
    choice::{Chosen, ChosenSoFar, Left, WeightChoice, module},
    config::{quantization_config, quantization_file},
};

/// The module of an output head.
const HEAD: &str = "lm_head";

/// The view of a weight of this name, as it is before it is quantized.
type Find<'a> = dyn Fn(&str) -> Option<View> + 'a;

/// Makes codes and scales of weights, and notes which.
#[derive(Debug)]
pub(crate) struct Quantizer<'a> {
    choice: WeightChoice<'a>,
    /// Whether the user asks for a dtype: then what was quantized is decoded to that before it is quantized again.
    has_dtype: bool,
    /// Whether scales that are stored as floats are said to be powers of two.
    has_powers_of_two: bool,
    findings: Mutex<ChosenSoFar>,
}

/// A stored tensor of a quantized weight.
#[derive(Clone, Debug)]
pub(crate) struct EncodedView {
    /// What follows the weight's name, or that of its module if it begins with a dot.
    suffix: &'static str,
    /// Its elements.
    pub(crate) view: View,
    /// How it lies over the weight.
    pub(crate) part: Arc<PartOf>,
}

impl EncodedView {
    /// The name of the tensor, of a weight of this name.
    pub(crate) fn of_weight(&self, name: &str) -> String {
        match (self.suffix.strip_prefix('.'), name.strip_suffix(".weight")) {
            (Some(_), Some(module)) => format!("{module}{}", self.suffix),
            // A name without that word is a file's, and no directory's.
            (Some(word), None) => format!("{name}_{word}"),
            (None, _) => format!("{name}{}", self.suffix),
        }
    }
}

/// The stored tensors of a quantized weight, the codes first.
pub(crate) type Encoded = Vec<EncodedView>;

/// What a stored tensor has of the matrices of an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    Part(EncodedPart),
    /// The factor without an axis.
    Scalar,
    /// Rows and columns.
    Shape,
}

/// The stored tensors of a scheme: what follows the weight's name or its module's, and what they are.
const fn stored(scheme: Quantize) -> &'static [(&'static str, Stored)] {
    use Stored::{Part, Scalar, Shape};
    const CODES: Stored = Part(EncodedPart::Codes);
    const SCALES: Stored = Part(EncodedPart::Scales);
    const BIASES: Stored = Part(EncodedPart::Biases);
    const FACTOR: Stored = Part(EncodedPart::Factor);
    match scheme {
        Quantize::Fp8Block | Quantize::Fp8BlockUe8m0 | Quantize::Mxfp8Sglang => &[("", CODES), ("_scale_inv", SCALES)],
        Quantize::Fp8Channel | Quantize::Mxfp8 => &[("", CODES), ("_scale", SCALES)],
        Quantize::Fp8Tensor => &[("", CODES), ("_scale", FACTOR)],
        Quantize::Mxfp4 => &[("_packed", CODES), ("_scale", SCALES)],
        Quantize::Nvfp4 => &[("_packed", CODES), ("_scale", SCALES), ("_global_scale", FACTOR)],
        Quantize::Nvfp4Modelopt => &[("", CODES), ("_scale", SCALES), ("_scale_2", Scalar)],
        Quantize::Mlx(..) => &[("", CODES), (".scales", SCALES), (".biases", BIASES)],
        Quantize::MlxMxfp4 => &[("", CODES), (".scales", SCALES)],
        Quantize::Int8Channel | Quantize::Int4(_) => &[("_packed", CODES), ("_scale", SCALES), ("_shape", Shape)],
    }
}

impl<'a> Quantizer<'a> {
    pub(crate) fn new(choice: WeightChoice<'a>, has_dtype: bool, has_powers_of_two: bool) -> Self {
        Self { choice, has_dtype, has_powers_of_two, findings: Mutex::default() }
    }

    /// What was chosen so far.
    pub(crate) fn chosen(&self) -> Chosen {
        self.findings.lock().chosen(self.choice.scheme)
    }

    /// The tensors of several experts for which the scheme has no form, so far.
    pub(crate) fn stacked_experts(&self) -> Vec<NameGroup> {
        let findings = self.findings.lock();
        [Left::Stacked, Left::SwitchMlp].into_iter().flat_map(|left| findings.left_for(left)).collect()
    }

    /// The tensors of several experts that are quantized, so far: these have no word for the weight.
    pub(crate) fn fused_experts(&self) -> Vec<NameGroup> {
        let findings = self.findings.lock();
        fold(findings.quantized.keys().map(String::as_str).filter(|name| !name.ends_with(".weight")), &[])
    }

    /// The modules of matrices that are not quantized, so far. An output head that is the embedding is one of them.
    fn left_modules(&self) -> Vec<String> {
        let mut left: Vec<String> = self.findings.lock().left.keys().map(|name| module(name).to_owned()).collect();
        if !left.iter().any(|name| name == HEAD || name.ends_with(".lm_head")) {
            left.push(HEAD.to_owned());
        }
        left
    }

    /// The `quantization_config` of what was quantized.
    fn config(&self) -> Value {
        quantization_config(self.choice.scheme, &self.left_modules())
    }

    /// `config.json` with it.
    pub(crate) fn of_config(&self, mut config: Value) -> Value {
        if let Some(members) = config.as_object_mut() {
            if self.choice.is_mlx() {
                members.insert("quantization".to_owned(), self.config());
            }
            members.insert("quantization_config".to_owned(), self.config());
        }
        config
    }

    /// Whether weights are stored as `mlx_lm` does.
    pub(crate) const fn is_mlx(&self) -> bool {
        self.choice.is_mlx()
    }

    /// The metadata of files of weights: MLX's programs take names and values as they are by theirs.
    pub(crate) fn metadata(&self) -> Vec<(String, String)> {
        vec![("format".to_owned(), if self.choice.is_mlx() { "mlx" } else { "pt" }.to_owned())]
    }

    /// The content of `hf_quant_config.json`, if the scheme has that file.
    pub(crate) fn file(&self) -> Option<Value> {
        quantization_file(&json!({"quantization_config": self.config()}))
    }

    /// Whether anything was quantized so far.
    pub(crate) fn found_any(&self) -> bool {
        !self.findings.lock().quantized.is_empty()
    }

    /// Why nothing was quantized.
    pub(crate) fn why_none(&self, scheme: &str) -> String {
        let findings = self.findings.lock();
        let mut left: Vec<Left> = findings.left.values().copied().collect();
        left.sort_unstable();
        match left.into_iter().rfind(|left| *left != Left::Plain) {
            Some(Left::Columns(multiple)) => of_columns(&findings.columns, multiple, scheme),
            Some(left) => left.to_string(),
            None => "expected weights of linear layers with names as in repositories of Hugging Face".to_owned(),
        }
    }

    /// The codes of a weight, or `None` if it is not quantized. `find` finds other weights, with which it may share a factor.
    ///
    /// # Errors
    /// [`Problem::View`].
    pub(crate) fn codes(&self, name: &str, view: &View, find: &Find<'_>) -> Result<Option<View>, Problem> {
        let decided = self.choice.decide(name, view.shape().extents(), view.dtype());
        match decided {
            Ok(kind) => self.findings.lock().quantized.insert(name.to_owned(), kind),
            Err(Some(left)) => {
                let mut findings = self.findings.lock();
                findings.left.insert(name.to_owned(), left);
                if let (Left::Columns(_), Some(columns)) = (left, view.shape().extents().last()) {
                    findings.columns.insert(*columns);
                }
                return Ok(None);
            }
            Err(None) => return Ok(None),
        };
        let named = |error: ViewError| Problem::View { name: name.to_owned(), error };
        let input = self.input(view);
        let mut together = vec![(name.to_owned(), input.clone())];
        if self.choice.encoder().has_factor() {
            let others = self.choice.together(name).into_iter().filter(|other| other != name);
            together.extend(others.filter_map(|other| {
                let view = find(&other)?;
                let is_quantized = self.choice.decide(&other, view.shape().extents(), view.dtype()).is_ok();
                is_quantized.then(|| (other, self.input(&view)))
            }));
        }
        let mut encoding =
            EncodedMatrices::new(name.to_owned(), self.choice.encoder(), &input, &together).map_err(named)?;
        if self.has_exponents(&input) {
            encoding = encoding.keeping_scales().map_err(named)?;
        }
        Ok(Some(View::encoded(&Arc::new(encoding), EncodedPart::Codes)))
    }

    /// What is encoded of a view: what was quantized before is decoded to f32, unless the user asks for another dtype.
    fn input(&self, view: &View) -> View {
        if let Op::Cast { of } = view.op()
            && !self.has_dtype
            && is_decoded(of)
        {
            return of.clone();
        }
        view.clone()
    }

    /// Whether a view is that of codes whose scales are powers of two, as their type or the configuration says.
    fn has_exponents(&self, view: &View) -> bool {
        let Op::Quantized(value) = view.op() else { return false };
        value.scale_of(DType::F8E4M3).is_some_and(|scale| match scale.load.field {
            Field::Float(DType::F8E8M0) => true,
            Field::Float(_) => self.has_powers_of_two,
            Field::Integer(_) | Field::Table(..) => false,
        })
    }

    /// All stored tensors of a weight whose codes are these, possibly stacked.
    ///
    /// # Errors
    /// [`Problem::View`].
    pub(crate) fn parts(&self, name: &str, codes: &View) -> Result<Option<Encoded>, Problem> {
        let named = |error: ViewError| Problem::View { name: name.to_owned(), error };
        let Some(encoding) = encoding_of(codes) else { return Ok(None) };
        let bands = &encoding.bands;
        let (_, columns) = bands.matrix();
        let (block_rows, block_columns) = bands.encoder().block(columns);
        let mut shape = PerAxis::from_slice(codes.shape().extents());
        let rank = shape.len();
        shape[rank - 1] = columns;
        let shape = Shape::try_new(&shape).map_err(named)?;
        let is_row = block_columns >= columns;
        let mut cuts = PerAxis::from_elem(1, rank);
        cuts[rank - 2] = block_rows;
        cuts[rank - 1] = if is_row { bands.encoder().packed().0 } else { block_columns };
        let mut found = Vec::new();
        for (suffix, stored) in stored(self.choice.scheme) {
            let view = map(codes, &|encoding| part(encoding, *stored)).map_err(named)?;
            let mut units = PerAxis::from_elem(1, rank);
            let (of_rows, of_columns) = match stored {
                Stored::Part(EncodedPart::Codes) => (1, bands.encoder().packed().0),
                Stored::Part(EncodedPart::Scales | EncodedPart::Biases) => {
                    (block_rows, if is_row { 0 } else { block_columns })
                }
                Stored::Part(EncodedPart::Factor) | Stored::Scalar | Stored::Shape => (0, 0),
            };
            (units[rank - 2], units[rank - 1]) = (of_rows, of_columns);
            let part = PartOf { name: name.to_owned(), shape: shape.clone(), units, cuts: cuts.clone() };
            found.push(EncodedView { suffix, view, part: Arc::new(part) });
        }
        Ok(Some(found))
    }

    /// Puts all stored tensors of quantized weights in the place of their codes.
    pub(crate) fn expand(&self, drafts: Vec<Draft>, problems: &mut Vec<Problem>) -> Vec<Draft> {
        let mut all = Vec::with_capacity(drafts.len());
        for draft in drafts {
            match self.parts(&draft.name, &draft.view) {
                Ok(None) => all.push(draft),
                Ok(Some(parts)) => all.extend(parts.into_iter().map(|encoded| {
                    let (name, mut roles) = (encoded.of_weight(&draft.name), draft.roles.clone());
                    roles.part = Some(encoded.part);
                    Draft { name, view: encoded.view, roles, ..draft.clone() }
                })),
                Err(problem) => problems.push(problem),
            }
        }
        all
    }
}

/// Whether a view is decoded elements, possibly moved.
fn is_decoded(view: &View) -> bool {
    if let Op::Transpose { of, .. } | Op::Reshape { of } | Op::Slice { of, .. } | Op::Gather { of, .. } = view.op() {
        return is_decoded(of);
    }
    matches!(view.op(), Op::Quantized(_))
}

/// That columns are no multiple of what a scheme needs, and what they are a multiple of.
fn of_columns(columns: &BTreeSet<u64>, multiple: u64, scheme: &str) -> String {
    let words = |numbers: &mut dyn Iterator<Item = &u64>| numbers.map(u64::to_string).collect::<Vec<_>>().join(", ");
    let fit = |group: &&u64| columns.iter().all(|columns| columns.is_multiple_of(**group));
    let fits = match words(&mut [16, 32, 64, 128, 256].iter().filter(fit)) {
        groups if scheme.starts_with("int4") && !groups.is_empty() => format!("int4-gN fits with N of {groups}"),
        groups if scheme.starts_with("mlx") && !groups.is_empty() => format!("a group of {groups} fits"),
        _ => "int8-channel and fp8-channel take any".to_owned(),
    };
    let columns = words(&mut columns.iter());
    format!("the weights have {columns} columns, for {scheme} expected a multiple of {multiple}; {fits}")
}

/// The first encoding of codes, possibly stacked. `None` for any other view.
fn encoding_of(view: &View) -> Option<&Arc<EncodedMatrices>> {
    if let Op::Stack { of, .. } = view.op() {
        return encoding_of(of.first()?);
    }
    if let Op::Encoded { of, part: EncodedPart::Codes } = view.op() { Some(of) } else { None }
}

/// A view with another part in the place of the codes.
fn map(view: &View, part: &dyn Fn(&Arc<EncodedMatrices>) -> Result<View, ViewError>) -> Result<View, ViewError> {
    if let Op::Stack { of, axis } = view.op() {
        let of: Vec<View> = of.iter().map(|view| map(view, part)).collect::<Result<_, _>>()?;
        return View::stack(*axis, &of);
    }
    if let Op::Encoded { of, .. } = view.op() { part(of) } else { Ok(view.clone()) }
}

fn part(encoding: &Arc<EncodedMatrices>, stored: Stored) -> Result<View, ViewError> {
    let factor = || View::encoded(encoding, EncodedPart::Factor);
    match stored {
        Stored::Part(part) => Ok(View::encoded(encoding, part)),
        Stored::Scalar => {
            let factor = factor();
            let extents = factor.shape().extents();
            factor.reshape_to(&extents[..extents.len() - 1])
        }
        Stored::Shape => {
            let (rows, columns) = encoding.bands.matrix();
            of_numbers(&[rows, columns], factor().shape())
        }
    }
}

/// Numbers in I64 along the last axis, each of this shape.
pub(super) fn of_numbers(numbers: &[u64], shape: &Shape) -> Result<View, ViewError> {
    let number = |number: &u64| {
        let element = Element::from_bytes(DType::I64, &number.to_le_bytes());
        View::fill(shape.clone(), element.expect("eight bytes are an I64"))
    };
    View::concat(shape.rank() - 1, &numbers.iter().map(number).collect::<Vec<_>>())
}

/// Puts codes in the place of the leaves of a view that `codes` has some of, below stacks of their outer axes.
///
/// # Errors
/// Those of `codes`, and if a stack has leaves that are quantized and others that are not.
pub(crate) fn with_codes(
    name: &str,
    view: &View,
    codes: &dyn Fn(&View) -> Result<Option<View>, Problem>,
) -> Result<Option<View>, Problem> {
    let Op::Stack { of, axis } = view.op() else { return codes(view) };
    if axis + 2 >= view.shape().rank() {
        // Of vectors.
        return Ok(None);
    }
    let found = of.iter().map(|operand| with_codes(name, operand, codes)).collect::<Result<Vec<_>, _>>()?;
    let quantized = found.iter().filter(|view| view.is_some()).count();
    if quantized == 0 {
        return Ok(None);
    }
    if quantized < found.len() {
        let reason = format!(
            "{quantized} of {} layers or experts are quantized, so that they are no stack: --layout hf shows them one by one, or let \
             --quantize-ignore and --quantize-only name all of them or none",
            found.len()
        );
        return Err(Problem::Tensor { name: name.to_owned(), reason });
    }
    let found: Vec<View> = found.into_iter().flatten().collect();
    View::stack(*axis, &found).map(Some).map_err(|error| Problem::View { name: name.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_that_do_not_fit_are_told_what_fits() {
        let rows: [(&[u64], &str, &str); 3] = [
            (
                &[256, 512],
                "int4-g48",
                "have 256, 512 columns, for int4-g48 expected a multiple of 48; int4-gN fits with N of 16, 32, 64, 128, 256",
            ),
            (&[24], "int4-g48", "int8-channel and fp8-channel take any"),
            (&[256], "nvfp4", "int8-channel and fp8-channel take any"),
        ];
        for (columns, scheme, end) in rows {
            let text = of_columns(&columns.iter().copied().collect(), 48, scheme);
            assert!(text.ends_with(end), "{text}");
        }
    }
}
