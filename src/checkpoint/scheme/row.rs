//! Regular schemes as data: a [`SchemeRow`] says by which names, types and shapes codes and what decodes them are stored, and how a
//! value is computed from them.
//!
//! # To add a scheme of a known kind
//! Write one [`SchemeRow`], and a test. Where the configuration says of each module how it is quantized
//! ([`QuantizationConfig`](super::quantization_config::QuantizationConfig)), the row names those words in [`SchemeRow::says`], and goes to
//! `by_module`. Otherwise it belongs to a scheme of its own, whose [`ModuleConfig`] reads the configuration.
//!
//! What a row cannot say: companions that are read when the repository is opened (`g_idx`, `weight_shape`, texts that describe
//! a tensor), and shapes that do not follow from those of the codes. Such schemes are code.

use ckfs_tensor::{DType, Digit, Field, IndexMap, Operand, Operation, SourceTensor, TensorId, Value, ViewError};
use serde_json::{Value as Json, json};

use super::{
    findings::{SchemeFindings, Told},
    parts::{Kinds, blocks, floats, grid, packed, rows_and_columns, slot, unsigned},
    quantization_config::{Library, ModuleQuantization, Sharing},
    quantized::Template,
    stored::{Stored, last_word},
};
use crate::table::TensorInfo;

/// One way in which tensors are stored quantized.
#[derive(Debug)]
pub(super) struct SchemeRow {
    /// How the summary counts such tensors. `{count}` and `{sharing}` are filled in, and of the first of them `{scale}`, the type of
    /// its scale, and `{suffix}`, what the scale's name adds.
    pub(super) label: &'static str,
    /// The libraries that store tensors so; empty if the scheme's configuration decides it.
    pub(super) libraries: &'static [Library],
    /// What the configuration says of such a module; `None` where the scheme's own [`ModuleConfig`] decides.
    pub(super) says: Option<&'static ModuleQuantization>,
    pub(super) codes: CodesSpec,
    /// What decodes the codes, in the order of their operands.
    pub(super) parts: &'static [PartSpec],
    /// Computed in f32 with each element, in order.
    pub(super) value: &'static [ValueStep],
    /// A companion with which codes are stored in another way, and that way's name.
    pub(super) unless: Option<(&'static str, &'static str)>,
    /// The end of the name of a companion that codes stored so do not have, and what it would mean, in words.
    pub(super) absent: Option<(&'static str, &'static str)>,
    /// Ends of the names of companions that no decoder reads.
    pub(super) left_out: &'static [&'static str],
}

/// How the codes are stored.
#[derive(Debug)]
pub(super) struct CodesSpec {
    /// How their name ends; in its place the decoded tensor's name has `decoded`. Empty for names that do not end in `.weight`.
    pub(super) suffix: &'static str,
    pub(super) decoded: &'static str,
    /// Their types. Where there are several, codes keep theirs.
    pub(super) dtypes: &'static [DType],
    /// These types, in words.
    pub(super) types: &'static str,
    pub(super) shown: ShownBy,
    pub(super) element: CodeForm,
    pub(super) axes: CodeAxes,
    /// Their shape, in words.
    pub(super) shape: &'static str,
    /// Neighbours that share a scale, unless the configuration says it.
    pub(super) group: Option<u64>,
    /// Whether neighbours that share a scale lie in a column, and not in a row.
    pub(super) by_column: bool,
    /// Whether the last block of an axis may be smaller.
    pub(super) may_be_partial: bool,
    /// The order of axes in which the model has the value, where it is another.
    pub(super) transposed: &'static [usize],
}

/// What shows that a tensor of such a name holds codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShownBy {
    /// Its name.
    Name,
    /// Its type.
    Type,
    /// Its type, or this part beside it.
    TypeOr(usize),
    /// Its type, and this part beside it.
    TypeAnd(usize),
}

/// How the elements are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeForm {
    /// One by one, in the tensor's own type.
    Own,
    /// Floats of this type side by side, in words of another type.
    Float(DType),
    /// 4-bit floats side by side along the last axis, low bits first.
    E2m1,
    /// Integers of so many bits, likewise.
    Unsigned(u32),
    /// Integers of 4 bits, of eight the even ones first, then the odd ones.
    EvenThenOdd,
}

/// Which axes codes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeAxes {
    /// Any number, with one scale for all elements.
    Any,
    /// Two or more. Tensors of one axis hold no codes.
    Matrices,
    /// Two or more. Tensors of one axis are an error.
    Rows,
    /// Two.
    Two,
    /// Four, the last of so many elements: one group.
    Groups(u64),
}

/// A companion that decodes codes.
#[derive(Debug)]
pub(super) struct PartSpec {
    /// How its name ends, after what stands before the suffix of the codes. The first that is there counts.
    pub(super) suffixes: &'static [&'static str],
    pub(super) dtype: PartType,
    /// How its elements are coded.
    pub(super) element: CodeForm,
    pub(super) extents: PartExtents,
}

/// The type of a companion.
#[derive(Clone, Copy, Debug)]
pub(super) enum PartType {
    One(DType),
    /// Any float for which this is true.
    Float(fn(DType) -> bool),
    /// That of an earlier part.
    Like(usize),
}

/// The shape of a companion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartExtents {
    /// One number for each group or block.
    Grid,
    /// One number, `[1]` or `[]`.
    Single,
    /// As the configuration says. One number for a matrix may be `[]`, `[1]` or `[1, 1]`, those for columns may lie along
    /// either axis.
    Shared,
    /// One number, of any shape.
    AnySingle,
}

/// A part as most rows have it: a number for each group or block.
pub(super) const PART: PartSpec =
    PartSpec { suffixes: &[], dtype: PartType::One(DType::U8), element: CodeForm::Own, extents: PartExtents::Grid };

/// A step of a value: what is computed with a part, on which steps of its own may come first.
#[derive(Debug)]
pub(super) struct ValueStep {
    pub(super) operation: Operation,
    pub(super) part: usize,
    pub(super) first: &'static [(Operation, usize)],
}

/// Codes as they are in most rows: matrices whose elements are stored one by one.
pub(super) const CODES: CodesSpec = CodesSpec {
    suffix: ".weight",
    decoded: ".weight",
    dtypes: &[],
    types: "",
    shown: ShownBy::Type,
    element: CodeForm::Own,
    axes: CodeAxes::Matrices,
    shape: "[out, in]",
    group: None,
    by_column: false,
    may_be_partial: false,
    transposed: &[],
};

/// A row whose codes are multiplied with their scales.
pub(super) const ROW: SchemeRow = SchemeRow {
    label: "{count} weights",
    libraries: &[],
    says: None,
    codes: CODES,
    parts: &[],
    value: SCALED,
    unless: None,
    absent: None,
    left_out: &[],
};

/// The product of codes and scales.
pub(super) const SCALED: &[ValueStep] = &[step(Operation::Multiply, 0)];

/// A step with a part as it is.
pub(super) const fn step(operation: Operation, part: usize) -> ValueStep {
    ValueStep { operation, part, first: &[] }
}

impl CodeForm {
    const fn bits(self) -> Option<u64> {
        match self {
            Self::Own => None,
            Self::Float(_) => Some(8),
            Self::E2m1 | Self::EvenThenOdd => Some(4),
            Self::Unsigned(width) => Some(width as u64),
        }
    }

    /// Codes of a value of this shape.
    fn codes(self, tensor: SourceTensor, extents: &[u64]) -> Operand {
        match self {
            Self::Own => Operand::elements(tensor),
            Self::Float(dtype) => {
                let index = IndexMap::new(&[Digit::axis(&[extents.iter().product()], 0, 1)]);
                Operand { tensor, field: Field::Float(dtype), index }
            }
            Self::E2m1 => packed(tensor, extents, Field::e2m1()),
            Self::Unsigned(width) => packed(tensor, extents, unsigned(width)),
            Self::EvenThenOdd => even_then_odd(tensor, extents, 1),
        }
    }

    /// What a part holds for each block of a value of this shape.
    fn part(self, tensor: SourceTensor, extents: &[u64], block: (u64, u64), is_one: bool) -> Operand {
        let index = if is_one { IndexMap::new(&[]) } else { blocks(extents, block) };
        match self {
            Self::Float(dtype) => Operand { tensor, field: Field::Float(dtype), index },
            Self::EvenThenOdd => even_then_odd(tensor, extents, block.0),
            Self::Own | Self::E2m1 | Self::Unsigned(_) => floats(tensor, index),
        }
    }
}

/// Integers of 4 bits of which `rows` neighbouring rows have the same. Even columns of a word of eight come first, then the odd ones.
fn even_then_odd(tensor: SourceTensor, extents: &[u64], rows: u64) -> Operand {
    let (height, width) = rows_and_columns(extents);
    let flat = [height, width];
    let column = |stride| Digit::axis(&flat, 1, stride);
    let index = IndexMap::new(&[
        Digit::axis(&flat, 0, width * 4).grouped(rows),
        column(32).grouped(8),
        column(16).turning(2),
        column(4).grouped(2).turning(4),
    ]);
    Operand { tensor, field: unsigned(4), index }
}

/// All that distinguishes kinds of tensors of a scheme.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RowKind {
    /// Number of the row.
    row: usize,
    codes: DType,
    stored: Vec<u64>,
    extents: Vec<u64>,
    block: (u64, u64),
    /// What must be stored of each part.
    parts: Vec<(DType, Vec<u64>)>,
}

impl SchemeRow {
    /// What stands before the suffix of the codes in this name, if it is one of codes.
    fn stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        let stem = name.strip_suffix(self.codes.suffix)?;
        (!self.codes.suffix.is_empty() || !name.ends_with(".weight")).then_some(stem)
    }

    /// Part `number` of the codes of this stem, under the first of its names that is there.
    pub(super) fn part(&self, stored: &Stored<'_>, stem: &str, number: usize) -> Option<TensorId> {
        self.parts[number].suffixes.iter().find_map(|suffix| stored.beside(stem, suffix))
    }

    /// Whether codes of this stem are stored with all that decodes them, each of its type.
    pub(super) fn is_complete(&self, stored: &Stored<'_>, stem: &str) -> bool {
        let dtype = |id: TensorId| stored.tensor(id).dtype;
        let has_type =
            |(number, part): (usize, &PartSpec)| match (self.part(stored, stem, number).map(dtype), part.dtype) {
                (None, _) => false,
                (Some(found), PartType::One(dtype)) => found == dtype,
                (Some(found), PartType::Float(is_possible)) => is_possible(found),
                (Some(_), PartType::Like(_)) => true,
            };
        stored.beside(stem, self.codes.suffix).map(dtype).is_some_and(|codes| self.codes.dtypes.contains(&codes))
            && self.parts.iter().enumerate().all(has_type)
    }

    /// Whether a tensor of such a name holds codes.
    fn is_shown(&self, stored: &Stored<'_>, stem: &str, codes: &TensorInfo<'_>) -> bool {
        let is_type = self.codes.dtypes.contains(&codes.dtype);
        let is_code = match self.codes.shown {
            ShownBy::Name => true,
            ShownBy::Type => is_type,
            ShownBy::TypeOr(part) => is_type || self.part(stored, stem, part).is_some(),
            ShownBy::TypeAnd(part) => is_type && self.part(stored, stem, part).is_some(),
        };
        is_code && (codes.shape.len() >= 2 || self.codes.axes != CodeAxes::Matrices)
    }

    /// The shape of the value, and the block that shares a scale. Codes of another shape are refused.
    fn extents(
        &self,
        found: &mut SchemeFindings<'_>,
        codes: &TensorInfo<'_>,
        sharing: Sharing,
    ) -> Option<(Vec<u64>, (u64, u64))> {
        let fits = match self.codes.axes {
            CodeAxes::Any => return Some((codes.shape.to_vec(), (1, 1))),
            CodeAxes::Matrices | CodeAxes::Rows => codes.shape.len() >= 2,
            CodeAxes::Two => codes.shape.len() == 2,
            CodeAxes::Groups(size) => codes.shape.len() == 4 && codes.shape[3] == size,
        };
        let of_shape = |groups: &str| format!("shape {}{groups}", self.codes.shape);
        if !fits {
            found.refuse(codes.name, of_shape(""), format!("{:?}", codes.shape));
            return None;
        }
        let mut extents = codes.shape.to_vec();
        if matches!(self.codes.axes, CodeAxes::Groups(_)) {
            let inner = extents.drain(2..).fold(1, u64::saturating_mul);
            extents.push(inner);
        }
        let (row, column) = (extents.len() - 2, extents.len() - 1);
        if let Some(bits) = self.codes.element.bits() {
            extents[column] = extents[column].saturating_mul(self.codes.dtypes[0].bits()) / bits;
        }
        let (rows, columns) = (extents[row], extents[column]);
        let block = if self.codes.by_column {
            let (columns, rows) = sharing.block((columns, rows));
            (rows, columns)
        } else {
            sharing.block((rows, columns))
        };
        let divides = rows.is_multiple_of(block.0) && columns.is_multiple_of(block.1);
        if !divides && !self.codes.may_be_partial {
            let groups = format!(" with groups of {}", block.0.max(block.1));
            found.refuse(codes.name, of_shape(&groups), format!("{:?}", codes.shape));
            return None;
        }
        Some((extents, block))
    }

    /// What codes of this row tell the reader of a summary, if their first part is there.
    fn first(&self, stored: &Stored<'_>, stem: &str, codes: &TensorInfo<'_>) -> Option<FirstTensor> {
        let part = stored.tensor(self.part(stored, stem, 0)?);
        let suffix = part.name.strip_prefix(codes.name).or(part.name.strip_prefix(stem)).unwrap_or(part.name);
        Some(FirstTensor { scale: part.dtype, suffix: suffix.to_owned() })
    }

    /// Whether a library stores tensors so, where that matters.
    pub(super) fn is_of(&self, library: Option<Library>) -> bool {
        self.libraries.is_empty() || library.is_some_and(|library| self.libraries.contains(&library))
    }

    /// Adds a tensor that is stored so: codes of this stem, of which the configuration says what shares a scale. Whatever is
    /// missing or is not of the type or shape that it must have is refused by name.
    fn add(
        &self,
        stored: &Stored<'_>,
        found: &mut SchemeFindings<'_>,
        kinds: &mut Kinds<RowKind>,
        (number, id, stem): (usize, TensorId, &str),
        sharing: Sharing,
    ) {
        let codes = stored.tensor(id);
        let mut operands = vec![id];
        for (number, part) in self.parts.iter().enumerate() {
            match self.part(stored, stem, number) {
                Some(part) => operands.push(part),
                None => found.refuse(codes.name, format!("{stem}{} to decode it", part.suffixes[0]), "no such tensor"),
            }
        }
        let extents = self.extents(found, &codes, sharing);
        if operands.len() <= self.parts.len() {
            return;
        }
        if let Some((end, what)) = self.absent
            && let Some(other) = stored.beside(stem, end)
        {
            found.refuse(stored.tensor(other).name, format!("no {what}"), "this tensor");
            return;
        }
        let Some((extents, block)) = extents else { return };
        let Some(parts) = self.parts_of(stored, found, (&operands, &extents), sharing, block) else { return };
        for end in self.left_out {
            stored.beside(stem, end).into_iter().for_each(|id| found.leave_out(id));
        }
        let dtype = if self.codes.dtypes.len() > 1 { codes.dtype } else { self.codes.dtypes[0] };
        let kind = RowKind { row: number, codes: dtype, stored: codes.shape.to_vec(), extents, block, parts };
        let name = format!("{stem}{}", self.codes.decoded);
        kinds.add(found, kind, |kind| self.template(kind), (&name, &operands, None));
    }

    /// The type and the shape that each part must have. Types that are not possible are refused.
    fn parts_of(
        &self,
        stored: &Stored<'_>,
        found: &mut SchemeFindings<'_>,
        (operands, extents): (&[TensorId], &[u64]),
        sharing: Sharing,
        block: (u64, u64),
    ) -> Option<Vec<(DType, Vec<u64>)>> {
        let codes = stored.tensor(operands[0]);
        if self.codes.dtypes.len() > 1 && !self.codes.dtypes.contains(&codes.dtype) {
            let expected = format!("{}, scaled by {:?}", self.codes.types, stored.tensor(operands[1]).name);
            found.refuse(codes.name, expected, codes.dtype.to_string());
            return None;
        }
        let mut parts: Vec<(DType, Vec<u64>)> = Vec::with_capacity(self.parts.len());
        for (part, id) in self.parts.iter().zip(&operands[1..]) {
            let info = stored.tensor(*id);
            let dtype = match part.dtype {
                PartType::One(dtype) => dtype,
                PartType::Like(number) => parts[number].0,
                PartType::Float(is_possible) if is_possible(info.dtype) => info.dtype,
                PartType::Float(_) => {
                    let expected = format!("a float as the scale of {:?}", codes.name);
                    found.refuse(info.name, expected, info.dtype.to_string());
                    return None;
                }
            };
            let must = part.extents(extents, info.shape, (sharing, block), self.codes.by_column);
            if matches!(sharing, Sharing::Block(..)) && info.shape != must {
                let expected = format!("shape {must:?}, {sharing} of {:?} {extents:?}", codes.name);
                found.refuse(info.name, expected, format!("{:?}", info.shape));
                return None;
            }
            parts.push((dtype, must));
        }
        Some(parts)
    }

    fn template(&self, kind: &RowKind) -> Result<Template, ViewError> {
        let extents = kind.extents.as_slice();
        let part = |number: usize| -> Result<Operand, ViewError> {
            let (dtype, stored) = &kind.parts[number];
            let slot = slot(u32::try_from(number + 1).expect("a few parts"), *dtype, stored)?;
            let part = &self.parts[number];
            let is_one = match part.extents {
                PartExtents::Grid => false,
                PartExtents::Single | PartExtents::AnySingle => true,
                PartExtents::Shared => slot.shape.elements() == 1,
            };
            Ok(part.element.part(slot, extents, kind.block, is_one))
        };
        let codes = slot(0, kind.codes, &kind.stored)?;
        let shape = slot(0, DType::F32, extents)?.shape;
        let mut value = Value::of(self.codes.element.codes(codes, extents));
        for step in self.value {
            let mut by = Value::of(part(step.part)?);
            for (operation, number) in step.first {
                by = by.then(*operation, part(*number)?);
            }
            value = value.then(step.operation, by);
        }
        let template = Template::try_new(shape, value)?;
        if self.codes.transposed.is_empty() { Ok(template) } else { template.transposed(self.codes.transposed) }
    }
}

impl PartSpec {
    /// The shape that this part of a value must have, where it has shape `found`.
    fn extents(
        &self,
        value: &[u64],
        found: &[u64],
        (sharing, block): (Sharing, (u64, u64)),
        by_column: bool,
    ) -> Vec<u64> {
        let mut grid = grid(value, block);
        if let (CodeForm::EvenThenOdd, Some(columns)) = (self.element, grid.last_mut()) {
            *columns /= 8;
        }
        let is_turned = || {
            by_column && found.len() == grid.len() && {
                let (row, column) = (grid.len() - 2, grid.len() - 1);
                found[..row] == grid[..row] && (found[row], found[column]) == (grid[column], grid[row])
            }
        };
        match (self.extents, found) {
            (PartExtents::AnySingle, _) | (PartExtents::Single, []) => found.to_vec(),
            (PartExtents::Single, _) => vec![1],
            (PartExtents::Shared, [] | [1]) if sharing == Sharing::Tensor => found.to_vec(),
            (PartExtents::Shared, _) if sharing == Sharing::Tensor && value.len() == 2 && found != [1, 1] => vec![1],
            (PartExtents::Shared, _) if is_turned() => found.to_vec(),
            (PartExtents::Shared | PartExtents::Grid, _) => grid,
        }
    }
}

/// What the configuration says of codes: the row that they are stored as, and what shares a scale; `None` if they are not of the
/// row that was asked for. The error is the name of a way that is not decoded.
pub(super) type ModuleAnswer = Result<Option<(usize, Sharing)>, String>;

/// What the first tensor of a scheme tells its reader.
struct FirstTensor {
    /// The type of its first part.
    scale: DType,
    /// What follows the name of the codes in that of the part, or else the name of the module.
    suffix: String,
}

/// The configuration of a scheme, about each module.
pub(super) struct ModuleConfig<'a> {
    /// What it says of codes that may be stored as the row of this number says, by what stands before the suffix of their name: a
    /// module, or a name.
    pub(super) of: Answers<'a>,
    /// The rows that some module may be stored as.
    pub(super) rows: Vec<usize>,
    /// What a summary begins with, and what stands between its rows.
    pub(super) words: (String, &'static str),
    /// More members of the summary.
    pub(super) details: Vec<(&'static str, Json)>,
    /// Whether the summary has the type of the first scale, and the end of its name.
    pub(super) tells_scale: bool,
    /// The last word of names of tensors that are left out once codes were found.
    pub(super) mark: Option<&'static str>,
}

impl<'a> ModuleConfig<'a> {
    pub(super) fn new(rows: &[SchemeRow], of: impl Fn(&Stored<'_>, usize, &str) -> ModuleAnswer + 'a) -> Self {
        let (rows, words) = ((0..rows.len()).collect(), (String::new(), "; "));
        Self { of: Box::new(of), rows, words, details: Vec::new(), tells_scale: false, mark: None }
    }
}

type Answers<'a> = Box<dyn Fn(&Stored<'_>, usize, &str) -> ModuleAnswer + 'a>;

/// The rows of a scheme.
pub(super) type Rows = &'static [SchemeRow];

/// What the configuration of a scheme says; `None` if it is not about this scheme.
pub(super) type Configured<'a> = Option<ModuleConfig<'a>>;

/// Reads the configuration of a scheme.
pub(super) type Read = for<'a> fn(Rows, &Stored<'a>, &mut SchemeFindings<'_>) -> Configured<'a>;

/// Finds the tensors of a scheme that consists of rows.
pub(super) fn find(rows: Rows, read: Read, stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let modules = read(rows, stored, found)?;
    let mut kinds = Kinds::new();
    let mut counts: Vec<((&str, Sharing), u64)> = Vec::new();
    let mut first: Option<FirstTensor> = None;
    for (id, codes) in stored.iter().filter(|_| !modules.rows.is_empty()) {
        for number in &modules.rows {
            let row = &rows[*number];
            let Some(stem) = row.stem(codes.name).filter(|_| !found.is_taken(id)) else { continue };
            if !row.is_shown(stored, stem, &codes) {
                continue;
            }
            let (number, sharing) = match (modules.of)(stored, *number, stem) {
                Ok(Some(answer)) => answer,
                Ok(None) => continue,
                Err(method) => {
                    found.unsupported(&method, Some(id));
                    break;
                }
            };
            let row = &rows[number];
            if let Some((_, method)) = row.unless.filter(|(end, _)| stored.beside(stem, end).is_some()) {
                found.unsupported(method, Some(id));
                break;
            }
            let key = (row.label, sharing);
            match counts.iter_mut().find(|(other, _)| *other == key) {
                Some((_, count)) => *count += 1,
                None => counts.push((key, 1)),
            }
            if first.is_none() {
                first = row.first(stored, stem, &codes);
            }
            row.add(stored, found, &mut kinds, (number, id, stem), sharing);
            break;
        }
    }
    let first = first?;
    let count: u64 = counts.iter().map(|(_, count)| count).sum();
    let texts: Vec<String> = counts.iter().map(|(of, count)| text(*of, *count, &first)).collect();
    let mut details = vec![("weights", json!(count))];
    details.extend(modules.details);
    if modules.tells_scale {
        details.extend([("scale_suffix", json!(first.suffix)), ("scale_dtype", json!(first.scale.code()))]);
    }
    if let Some(mark) = modules.mark {
        let marks = stored.iter().filter(|(_, tensor)| last_word(tensor.name) == mark);
        marks.for_each(|(id, _)| found.leave_out(id));
    }
    let (before, between) = modules.words;
    Some((before + &texts.join(between), details))
}

/// The tensors of a row that share scales so, for the summary.
fn text((label, sharing): (&str, Sharing), count: u64, first: &FirstTensor) -> String {
    let label = label.replace("{count}", &count.to_string()).replace("{sharing}", &sharing.to_string());
    label.replace("{scale}", &first.scale.to_string()).replace("{suffix}", &first.suffix)
}
