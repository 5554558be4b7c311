//! Conversion of rows of elements: widen to f32, apply the steps of a [`Program`], round to the target.
//!
//! What a value becomes is said in `float.rs`. Rows are cut into stretches that stay in the first-level cache while the
//! steps pass over them one after another. [`convert_scalar`] does the same one element at a time and is the reference
//! for everything faster.

use super::kernel::{Level, row};
use super::shape::to_usize;
use super::transpose::FusedKind;
use super::{BlockScale, DType, Program, Step, float};

/// Elements of one stretch: its f32 values take 2 KiB.
pub(super) const STRETCH: usize = 512;

/// Converts the consecutive elements in `source`, the first of which is element `first` of its tensor, to `target`.
///
/// `scale` is the whole scale tensor of a program that dequantizes, else empty. A program without steps whose types are
/// equal copies bits.
///
/// # Panics
/// If the program's types are not floats that convert, or `source` and `target` do not hold the same number of whole
/// elements, or `scale` ends before a block that is needed: the caller has checked all three before anything is read.
pub fn convert_row(program: &Program, scale: &[u8], source: &[u8], first: u64, target: &mut [u8]) {
    Converter::new(program, Level::detected()).row(scale, source, first, 1, target);
}

/// Converts the one element in `source`, which is element `element` of its tensor, to `target`.
///
/// # Panics
/// As [`convert_row`].
pub fn convert_scalar(program: &Program, scale: &[u8], source: &[u8], element: u64, target: &mut [u8]) {
    if program.source == program.target && program.steps.is_empty() {
        target.copy_from_slice(source);
        return;
    }
    let mut value = float::widen_one(program.source, source);
    for step in &program.steps {
        value = match step {
            Step::Round(dtype) => {
                let mut rounded = [0; 8];
                let rounded = &mut rounded[..element_bytes(*dtype)];
                float::narrow_one(*dtype, value, rounded);
                float::widen_one(*dtype, rounded)
            }
            Step::Multiply { factor, flush: false } => float::multiply(value, factor.to_bits()),
            Step::Multiply { factor, flush: true } => float::multiply_flush(value, factor.to_bits()),
            Step::Add(summand) => float::add(value, summand.to_bits()),
            Step::Scale(block) => float::multiply(value, scale_at(block, scale, block.scale_of(element))),
        };
    }
    float::narrow_one(program.target, value, target);
}

/// Bytes of one element of a float type.
pub(super) fn element_bytes(dtype: DType) -> usize {
    match dtype.element_bytes().map(usize::try_from) {
        Some(Ok(bytes)) => bytes,
        Some(Err(_)) | None => panic!("{dtype} is not a float that converts"),
    }
}

/// Element `index` of the scale tensor, as f32 bits.
fn scale_at(block: &BlockScale, scale: &[u8], index: u64) -> u32 {
    let bytes = element_bytes(block.dtype);
    let start = usize::try_from(index).ok().and_then(|index| index.checked_mul(bytes));
    let found = start.and_then(|start| scale.get(start..)?.get(..bytes));
    let Some(found) = found else {
        panic!("scale {index}, of type {}, is beyond the {} bytes of its tensor", block.dtype, scale.len());
    };
    float::widen_one(block.dtype, found)
}

/// A loop that does all of a program.
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

/// A program made ready for many rows.
pub(super) struct Converter<'a> {
    program: &'a Program,
    level: Level,
    widen: row::Row,
    narrow: row::Row,
    source_bytes: usize,
    target_bytes: usize,
    values: [[u8; 4]; STRETCH],
    rounded: [u8; 8 * STRETCH],
}

impl<'a> Converter<'a> {
    pub(super) fn new(program: &'a Program, level: Level) -> Self {
        let (source, target) = (program.source, program.target);
        let (Some(widen), Some(narrow)) = (row::widen(source), row::narrow(target)) else {
            panic!("a program converts floats, not {source} to {target}");
        };
        Self {
            program,
            level,
            widen,
            narrow,
            source_bytes: element_bytes(source),
            target_bytes: element_bytes(target),
            values: [[0; 4]; STRETCH],
            rounded: [0; 8 * STRETCH],
        }
    }

    /// Converts the elements in `source`, which are elements `first`, `first + stride`, ... of the tensor.
    pub(super) fn row(&mut self, scale: &[u8], source: &[u8], first: u64, stride: u64, target: &mut [u8]) {
        let (count, rest) = (source.len() / self.source_bytes, source.len() % self.source_bytes);
        assert!(
            rest == 0 && target.len() == count * self.target_bytes,
            "{} bytes of {} do not fill {} bytes of {}",
            source.len(),
            self.program.source,
            target.len(),
            self.program.target
        );
        if let Some(direct) = self.direct() {
            direct.run(self.level, source, target);
            return;
        }
        let mut element = first;
        let stretches = source.chunks(STRETCH * self.source_bytes).zip(target.chunks_mut(STRETCH * self.target_bytes));
        for (source, target) in stretches {
            self.lines(scale, source, &[element], stride, target);
            let count = (source.len() / self.source_bytes) as u64;
            element = element.wrapping_add(stride.wrapping_mul(count));
        }
    }

    /// The one loop that does it all, if there is one.
    pub(super) fn direct(&self) -> Option<Direct> {
        let (source, target) = (self.program.source, self.program.target);
        match self.program.steps.as_slice() {
            [] if source == target => Some(Direct::Plain(row::copy)),
            [] if source == DType::F32 => Some(Direct::Plain(self.narrow)),
            [] if target == DType::F32 => Some(Direct::Plain(self.widen)),
            // The scale of query weights.
            [Step::Multiply { factor, flush }] if (source, target) == (DType::BF16, DType::BF16) => {
                let row = if *flush { row::multiply_flush_bf16 } else { row::multiply_bf16 };
                Some(Direct::With(row, factor.to_bits()))
            }
            [Step::Round(DType::BF16), Step::Multiply { factor, flush }]
                if (source, target) == (DType::F32, DType::BF16) =>
            {
                let row = if *flush { row::round_multiply_flush_bf16 } else { row::round_multiply_bf16 };
                Some(Direct::With(row, factor.to_bits()))
            }
            _ => None,
        }
    }

    /// The same as a loop that transposes can be given, if there is one: of what [`Converter::direct`] does, for ordinary
    /// factors.
    pub(super) fn fused(&self) -> Option<FusedKind> {
        let (source, target) = (self.program.source, self.program.target);
        let ordinary = |factor: f32| factor.is_normal() && factor.abs() <= 1.0;
        match (source, target, self.program.steps.as_slice()) {
            (DType::F32, DType::BF16, []) => Some(FusedKind::Round),
            (DType::BF16, DType::BF16, [Step::Multiply { factor, .. }]) if ordinary(*factor) => {
                Some(FusedKind::Multiply(*factor))
            }
            (DType::F32, DType::BF16, [Step::Round(DType::BF16), Step::Multiply { factor, .. }])
                if ordinary(*factor) =>
            {
                Some(FusedKind::RoundMultiply(*factor))
            }
            _ => None,
        }
    }

    /// Converts several lines of equal length, [`STRETCH`] elements together at most, that follow each other in
    /// `source` and `target`. Line `i` holds elements `firsts[i]`, `firsts[i] + stride`, ... of the tensor.
    pub(super) fn lines(&mut self, scale: &[u8], source: &[u8], firsts: &[u64], stride: u64, target: &mut [u8]) {
        let count = source.len() / self.source_bytes;
        let values = &mut self.values[..count];
        (self.widen)(self.level, source, values.as_flattened_mut());
        for step in &self.program.steps {
            match step {
                Step::Round(DType::F32) => {}
                Step::Round(dtype) => {
                    let (Some(narrow), Some(widen)) = (row::narrow(*dtype), row::widen(*dtype)) else {
                        panic!("a step rounds to a float, not to {dtype}");
                    };
                    let rounded = &mut self.rounded[..count * element_bytes(*dtype)];
                    narrow(self.level, values.as_flattened(), rounded);
                    widen(self.level, rounded, values.as_flattened_mut());
                }
                Step::Multiply { factor, flush: false } => {
                    row::multiply(self.level, values.as_flattened_mut(), factor.to_bits());
                }
                Step::Multiply { factor, flush: true } => {
                    row::multiply_flush(self.level, values.as_flattened_mut(), factor.to_bits());
                }
                Step::Add(summand) => row::add(self.level, values.as_flattened_mut(), summand.to_bits()),
                Step::Scale(block) => {
                    let length = (count / firsts.len()).max(1);
                    for (line, first) in values.chunks_exact_mut(length).zip(firsts) {
                        scale_line(self.level, block, scale, line, *first, stride);
                    }
                }
            }
        }
        (self.narrow)(self.level, values.as_flattened(), target);
    }
}

/// Multiplies each value by its scale; neighbours that share one are multiplied together.
fn scale_line(level: Level, block: &BlockScale, scale: &[u8], line: &mut [[u8; 4]], first: u64, stride: u64) {
    let (mut line, mut element) = (line, first);
    let scale_columns = block.scale_columns();
    while !line.is_empty() {
        // As `BlockScale::scale_of`, with three divisions in all.
        let (row, column) = (element / block.columns, element % block.columns);
        let (block_column, within) = (column / block.block_columns, column % block.block_columns);
        let ahead = (block.block_columns - within).min(block.columns - column);
        let index = row / block.block_rows * scale_columns + block_column;
        let alike = if stride == 1 { ahead } else { ahead.div_ceil(stride.max(1)) };
        let alike = to_usize(alike).min(line.len());
        let (now, later) = line.split_at_mut(alike);
        row::multiply(level, now.as_flattened_mut(), scale_at(block, scale, index));
        element = element.wrapping_add(stride.wrapping_mul(alike as u64));
        line = later;
    }
}

#[cfg(test)]
mod tests {
    use super::super::TensorId;
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
        let block = |dtype, columns, block_rows, block_columns| {
            Step::Scale(BlockScale { tensor: TensorId(1), dtype, columns, block_rows, block_columns })
        };
        let floats = DType::ALL.iter().copied().filter(|dtype| dtype.is_float());
        let mut programs: Vec<Program> = floats
            .clone()
            .flat_map(|source| floats.clone().map(move |target| Program { source, target, steps: Vec::new() }))
            .collect();
        for flush in [false, true] {
            let multiply = Step::Multiply { factor: 0.088_388_35, flush };
            let (source, target) = (DType::BF16, DType::BF16);
            programs.push(Program { source, target, steps: vec![multiply.clone()] });
            let steps = vec![Step::Round(DType::BF16), multiply];
            programs.push(Program { source: DType::F32, target, steps });
        }
        for steps in [
            vec![block(DType::F32, 37, 5, 8)],
            vec![block(DType::BF16, 640, 2, 128), Step::Round(DType::BF16)],
            vec![block(DType::F8E8M0, 7, 3, 64)],
            vec![block(DType::F16, 1, 1, 1)],
            vec![
                Step::Round(DType::BF16),
                Step::Multiply { factor: 0.088_388_35, flush: true },
                Step::Round(DType::F16),
                Step::Add(1.0),
            ],
            vec![
                Step::Multiply { factor: -1e-30, flush: false },
                Step::Round(DType::F8E5M2Fnuz),
                Step::Round(DType::F64),
            ],
        ] {
            for (source, target) in [
                (DType::F8E4M3, DType::BF16),
                (DType::F32, DType::F16),
                (DType::F64, DType::F64),
                (DType::BF16, DType::F32),
            ] {
                programs.push(Program { source, target, steps: steps.clone() });
            }
        }
        programs
    }

    #[test]
    fn rows_agree_with_the_scalar_reference() {
        let (raw, scale) = (noise(9000 * 8), noise(40_000));
        for program in programs() {
            let (from, to) = (element_bytes(program.source), element_bytes(program.target));
            for (count, first, stride, shift) in [
                (1, 0, 1, 0),
                (7, 3, 1, 1),
                (64, 500, 1, 3),
                (1025, 77, 1, 2),
                (130, 13, 9, 0),
                (3, 999, 40, 1),
                (0, 5, 1, 0),
            ] {
                let source = &raw[shift..shift + count * from];
                let mut expected = vec![0; count * to];
                for index in 0..count {
                    let element = first + stride * index as u64;
                    let target = &mut expected[index * to..][..to];
                    convert_scalar(&program, &scale, &source[index * from..][..from], element, target);
                }
                for level in Level::available() {
                    let mut target = vec![0xa5; count * to + shift];
                    Converter::new(&program, level).row(&scale, source, first, stride, &mut target[shift..]);
                    assert!(target[shift..] == expected, "{program:?}, {count} from {first} by {stride} at {level:?}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a program converts floats, not U8 to F32")]
    fn integers_are_refused() {
        convert_row(&Program { source: DType::U8, target: DType::F32, steps: Vec::new() }, &[], &[1], 0, &mut [0; 4]);
    }

    #[test]
    #[should_panic(expected = "scale 1, of type F32, is beyond the 4 bytes of its tensor")]
    fn short_scales_are_refused() {
        let block = BlockScale { tensor: TensorId(0), dtype: DType::F32, columns: 16, block_rows: 8, block_columns: 8 };
        let program = Program { source: DType::F8E4M3, target: DType::F32, steps: vec![Step::Scale(block)] };
        convert_scalar(&program, &[0; 4], &[1], 9, &mut [0; 4]);
    }
}
