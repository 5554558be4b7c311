//! Conversion of rows of stored floats: widen to f32, apply the steps of a [`Program`], round to the target. Programs here
//! begin with an element and have constant operands only; those of quantized tensors are in `block_decode.rs`.
//!
//! `float.rs` defines the result for each value. Rows are cut into blocks that stay in the first-level cache while the
//! steps pass over them one after another.

use super::exponential::exp_all;
use super::kernel::{Level, row};
use super::transpose::FusedKind;
use super::{DType, Load, Operation, Program, Step, Term};

/// Elements of one block: its f32 values take 2 KiB.
pub(super) const BLOCK_ELEMENTS: usize = 512;

/// Converts the consecutive elements in `source` to `target`. A program without steps whose types are equal copies bits.
///
/// # Panics
/// If the program's types are not floats that convert, or it decodes a quantized tensor, or `source` and `target` do not
/// hold the same number of whole elements. The caller checks all of this before any read.
pub fn convert_row(program: &Program, source: &[u8], target: &mut [u8]) {
    Converter::new(program, Level::detected()).row(source, target);
}

/// A value after steps that have constant operands.
///
/// # Panics
/// If one of them has another operand.
pub(super) fn apply_constants(steps: &[Step], value: u32) -> u32 {
    let (mut values, mut rounded) = ([value.to_le_bytes()], [0; 8]);
    for step in steps {
        constant_step(Level::PORTABLE, step, &mut values, &mut rounded);
    }
    u32::from_le_bytes(values[0])
}

fn element(program: &Program) -> DType {
    match &program.load {
        Load::Element(dtype) => *dtype,
        Load::Value(value) => panic!("{value:?} is no element of one tensor"),
    }
}

/// Bytes of one element of a float type.
pub(super) fn element_bytes(dtype: DType) -> usize {
    match dtype.element_bytes().map(usize::try_from) {
        Some(Ok(bytes)) => bytes,
        Some(Err(_)) | None => panic!("{dtype} is not a float that converts"),
    }
}

/// A single loop that runs a whole program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direct {
    Plain(row::Row),
    With(row::RowWith, u32),
}

impl Direct {
    pub(super) fn run(self, level: Level, source: &[u8], target: &mut [u8]) {
        match self {
            Self::Plain(row) => row(level, source, target),
            Self::With(row, operand) => row(level, source, target, operand),
        }
    }
}

/// A program prepared for many rows.
pub(super) struct Converter<'a> {
    program: &'a Program,
    source: DType,
    level: Level,
    widen: row::Row,
    narrow: row::Row,
    pub(super) source_bytes: usize,
    target_bytes: usize,
    values: [[u8; 4]; BLOCK_ELEMENTS],
    rounded: [u8; 8 * BLOCK_ELEMENTS],
}

impl<'a> Converter<'a> {
    pub(super) fn new(program: &'a Program, level: Level) -> Self {
        let (source, target) = (element(program), program.target);
        let (Some(widen), Some(narrow)) = (row::widen(source), row::narrow(target)) else {
            panic!("a program converts floats, not {source} to {target}");
        };
        Self {
            program,
            source,
            level,
            widen,
            narrow,
            source_bytes: element_bytes(source),
            target_bytes: element_bytes(target),
            values: [[0; 4]; BLOCK_ELEMENTS],
            rounded: [0; 8 * BLOCK_ELEMENTS],
        }
    }

    /// Converts the elements in `source` to the same number in `target`.
    pub(super) fn row(&mut self, source: &[u8], target: &mut [u8]) {
        let (count, rest) = (source.len() / self.source_bytes, source.len() % self.source_bytes);
        assert!(
            rest == 0 && target.len() == count * self.target_bytes,
            "{} bytes of {} do not fill {} bytes of {}",
            source.len(),
            self.source,
            target.len(),
            self.program.target
        );
        if let Some(direct) = self.direct() {
            direct.run(self.level, source, target);
            return;
        }
        let blocks = source
            .chunks(BLOCK_ELEMENTS * self.source_bytes)
            .zip(target.chunks_mut(BLOCK_ELEMENTS * self.target_bytes));
        for (source, target) in blocks {
            self.convert_block(source, target);
        }
    }

    /// The factor of a program that only multiplies BF16, as the scale of query weights does, how it multiplies, and whether it first
    /// rounds F32 to BF16.
    fn product(&self) -> Option<(bool, Operation, f32)> {
        let product = match (self.source, self.program.target, self.program.steps.as_slice()) {
            (DType::BF16, DType::BF16, [Step::Compute(operation, Term::Constant(factor))]) => {
                (false, *operation, f32::from_bits(*factor))
            }
            (DType::F32, DType::BF16, [Step::Round(DType::BF16), Step::Compute(operation, Term::Constant(factor))]) => {
                (true, *operation, f32::from_bits(*factor))
            }
            _ => return None,
        };
        matches!(product.1, Operation::Multiply | Operation::MultiplyFlush).then_some(product)
    }

    /// The single loop that runs the whole program, if there is one.
    pub(super) fn direct(&self) -> Option<Direct> {
        if let Some((rounds, operation, factor)) = self.product() {
            let row = match (rounds, operation == Operation::MultiplyFlush) {
                (false, false) => row::multiply_bf16 as row::RowWith,
                (false, true) => row::multiply_flush_bf16,
                (true, false) => row::round_multiply_bf16,
                (true, true) => row::round_multiply_flush_bf16,
            };
            return Some(Direct::With(row, factor.to_bits()));
        }
        let (source, target) = (self.source, self.program.target);
        match self.program.steps.as_slice() {
            [] if source == target => Some(Direct::Plain(row::copy)),
            [] if source == DType::F32 => Some(Direct::Plain(self.narrow)),
            [] if target == DType::F32 => Some(Direct::Plain(self.widen)),
            _ => None,
        }
    }

    /// The same conversion in a form that a transposing loop can fuse, if there is one: the cases of [`Converter::direct`] with
    /// ordinary factors.
    pub(super) fn fused(&self) -> Option<FusedKind> {
        if matches!((self.source, self.program.target, &self.program.steps[..]), (DType::F32, DType::BF16, [])) {
            return Some(FusedKind::Round);
        }
        let (rounds, _, factor) = self.product()?;
        let is_ordinary = factor.is_normal() && factor.abs() <= 1.0;
        is_ordinary.then_some(if rounds { FusedKind::RoundMultiply(factor) } else { FusedKind::Multiply(factor) })
    }

    /// Converts at most [`BLOCK_ELEMENTS`] elements.
    pub(super) fn convert_block(&mut self, source: &[u8], target: &mut [u8]) {
        let count = source.len() / self.source_bytes;
        let values = &mut self.values[..count];
        (self.widen)(self.level, source, values.as_flattened_mut());
        for step in &self.program.steps {
            constant_step(self.level, step, values, &mut self.rounded);
        }
        (self.narrow)(self.level, values.as_flattened(), target);
    }
}

/// Applies a step with a constant operand to values. `rounded` has room for 8 bytes of each.
///
/// # Panics
/// If the step has another operand, or rounds to a type that is not a float.
pub(super) fn constant_step(level: Level, step: &Step, values: &mut [[u8; 4]], rounded: &mut [u8]) {
    match step {
        Step::Round(DType::F32) => {}
        Step::Round(dtype) => {
            let (Some(narrow), Some(widen)) = (row::narrow(*dtype), row::widen(*dtype)) else {
                panic!("a step rounds to a float, not to {dtype}");
            };
            let rounded = &mut rounded[..values.len() * element_bytes(*dtype)];
            narrow(level, values.as_flattened(), rounded);
            widen(level, rounded, values.as_flattened_mut());
        }
        Step::Compute(operation, Term::Constant(constant)) => {
            let count = values.len();
            let (runs, _) = row::loops(*operation, false);
            runs(level, values.as_flattened_mut(), &constant.to_le_bytes(), count, count);
        }
        Step::Exp => exp_all(values),
        Step::Compute(_, Term::Value(value)) => panic!("{value:?} is not constant"),
        Step::Dot(operand) => panic!("{operand:?} is not constant"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize) -> Vec<u8> {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    fn programs() -> Vec<Program> {
        let program = |source, target, steps| Program { load: Load::Element(source), target, steps };
        let floats = DType::ALL.iter().copied().filter(|dtype| dtype.is_float());
        let mut programs: Vec<Program> = floats
            .clone()
            .flat_map(|source| floats.clone().map(move |target| program(source, target, Vec::new())))
            .collect();
        for flush in [false, true] {
            let multiply = Step::multiply(0.088_388_35, flush);
            programs.push(program(DType::BF16, DType::BF16, vec![multiply.clone()]));
            programs.push(program(DType::F32, DType::BF16, vec![Step::Round(DType::BF16), multiply]));
        }
        for steps in [
            vec![Step::Compute(Operation::Divide, 3.0.into()), Step::Round(DType::BF16)],
            vec![Step::Compute(Operation::Subtract, 1e-3.into())],
            vec![Step::Exp, Step::Round(DType::BF16), Step::multiply(-1.0, false)],
            vec![Step::Round(DType::BF16), Step::multiply(0.088_388_35, true), Step::Round(DType::F16), Step::add(1.0)],
            vec![Step::multiply(-1e-30, false), Step::Round(DType::F8E5M2Fnuz), Step::Round(DType::F64)],
        ] {
            for (source, target) in [
                (DType::F8E4M3, DType::BF16),
                (DType::F32, DType::F16),
                (DType::F64, DType::F64),
                (DType::BF16, DType::F32),
            ] {
                programs.push(program(source, target, steps.clone()));
            }
        }
        programs
    }

    #[test]
    fn rows_agree_with_rows_of_one_element() {
        let raw = noise(9000 * 8);
        for program in programs() {
            let (from, to) = (element_bytes(element(&program)), element_bytes(program.target));
            for (count, shift) in [(1, 0), (7, 1), (64, 3), (1025, 2), (130, 0), (3, 1), (0, 0)] {
                let source = &raw[shift..shift + count * from];
                let mut expected = vec![0; count * to];
                for index in 0..count {
                    let target = &mut expected[index * to..][..to];
                    Converter::new(&program, Level::PORTABLE).row(&source[index * from..][..from], target);
                }
                for level in Level::available() {
                    let mut target = vec![0xa5; count * to + shift];
                    Converter::new(&program, level).row(source, &mut target[shift..]);
                    assert!(target[shift..] == expected, "{program:?}, {count} at {level:?}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a program converts floats, not U8 to F32")]
    fn integers_are_refused() {
        let program = Program { load: Load::Element(DType::U8), target: DType::F32, steps: Vec::new() };
        convert_row(&program, &[1], &mut [0; 4]);
    }
}
