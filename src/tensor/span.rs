//! The bytes of an operand's tensor that given logical elements need.
//!
//! The elements of a piece are loops over `n`. They are cut where an axis of the operand's index starts again. Then a loop
//! either moves the index by the same amount at every step, or belongs to a digit whose values follow from its start
//! and its end. All digits together are loops over the index again, and those are runs of bytes. The result holds
//! all needed bytes. It holds more only within a group whose digits share a word, and where a view takes every second
//! element of such a group.

use smallvec::{SmallVec, smallvec};

use super::{
    Decode, Digit, Operand, Origin, Piece, TensorId, Tiling,
    gather::{Loop, Loops, normalize},
    pages::ByteRuns,
    part::{for_each_nest, split_at_borders},
    shape::to_usize,
};

/// The bytes of one tensor that a piece needs.
#[derive(Clone, Debug)]
pub struct Need {
    /// The tensor.
    pub tensor: TensorId,
    /// The bytes, counted from the first of the tensor. Not empty.
    pub runs: SmallVec<[ByteRuns; 1]>,
}

impl Need {
    /// First byte.
    ///
    /// # Panics
    /// Never: there are runs.
    pub fn start(&self) -> u64 {
        self.runs.iter().map(ByteRuns::start).min().expect("what a piece needs is not empty")
    }

    /// One past the last byte.
    ///
    /// # Panics
    /// Never: there are runs.
    pub fn end(&self) -> u64 {
        self.runs.iter().map(ByteRuns::end).max().expect("what a piece needs is not empty")
    }

    /// Bytes that are needed.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(ByteRuns::bytes).sum::<u64>().min(self.end() - self.start())
    }

    /// First byte and one past the last of spans that contain all needed bytes, in order, more than `gap` bytes apart.
    pub fn spans(&self, gap: u64) -> Vec<(u64, u64)> {
        let mut spans = Vec::new();
        for runs in &self.runs {
            runs.for_each_span(gap, &mut |start, len| spans.push((start, start + len)));
        }
        spans.sort_unstable();
        spans.dedup_by(|next, last| {
            let joined = next.0 <= last.1.saturating_add(gap);
            if joined {
                last.1 = last.1.max(next.1);
            }
            joined
        });
        spans
    }
}

/// The bytes of each tensor that a piece of a stored tensor needs: of that tensor, or of each operand of the value that it is decoded
/// from, in the order of [`Value::for_each_operand`](super::Value::for_each_operand). Target units have `unit_bytes`.
pub fn needs(decode: &Decode, unit_bytes: u64, piece: &Piece) -> SmallVec<[Need; 1]> {
    needs_of(decode, unit_bytes, piece, &|_, _| true)
}

/// As [`needs`], of operands that are wanted, by their number and tensor.
fn needs_of(
    decode: &Decode,
    unit_bytes: u64,
    piece: &Piece,
    is_wanted: &dyn Fn(usize, TensorId) -> bool,
) -> SmallVec<[Need; 1]> {
    let Origin::Tensor { tensor, offset, .. } = piece.origin else { return SmallVec::new() };
    let Some(value) = decode.value() else {
        let bits = 8 * decode.source_bytes(unit_bytes).expect("what decodes no value reads elements");
        let loops = piece.loops.iter().map(|l| (l.extent, l.source_stride * bits));
        return smallvec![Need { tensor, runs: smallvec![byte_runs(offset * bits, loops, bits)] }];
    };
    let (mut needs, mut number) = (SmallVec::new(), 0);
    value.for_each_operand(&mut |operand| {
        let tensor = operand.tensor.id;
        if is_wanted(number, tensor) {
            needs.push(Need { tensor, runs: operand_runs(operand, offset, &piece.loops).into() });
        }
        number += 1;
    });
    needs
}

/// The bytes of `operand` that the elements at `offset` and these loops (their source strides) need.
fn operand_runs(operand: &Operand, offset: u64, loops: &[Loop]) -> Vec<ByteRuns> {
    let mut elements: Loops = loops.iter().map(|l| Loop { target_stride: l.source_stride, ..*l }).collect();
    elements.retain(|l| l.source_stride > 0);
    normalize(&mut elements);
    let mut borders: SmallVec<[u64; 8]> = operand.index.borders().collect();
    borders.push(1);
    let mut runs = Vec::new();
    // No part is refused.
    let _ = for_each_nest(offset, 0, &elements, &mut |start, _, nest| {
        let mut parts = Vec::new();
        let fits = split_at_borders(start, nest, &borders, &mut |first, part| {
            index_runs(operand, &borders, first, part, &mut parts);
        });
        if fits {
            runs.append(&mut parts);
        } else {
            runs.push(ByteRuns::new(0, SmallVec::new(), operand.tensor_bits().div_ceil(8)));
        }
        Ok(())
    });
    runs.sort_unstable();
    runs.dedup();
    runs
}

/// The runs of loops that each move on one axis.
fn index_runs(operand: &Operand, borders: &[u64], first: u64, loops: &[(usize, Loop)], found: &mut Vec<ByteRuns>) {
    let digits = operand.index.digits();
    let moves = |digit: &Digit, axis: usize| digit.divisor <= borders[axis] && borders[axis] < digit.period();
    // Loops that move the index evenly, and the others.
    let terms = operand.index.terms();
    let mut even: SmallVec<[(u64, u64); 8]> = smallvec![(terms.count, terms.stride)];
    let mut uneven: SmallVec<[(usize, Loop); 4]> = SmallVec::new();
    for (axis, l) in loops {
        let delta = digits.iter().filter(|digit| moves(digit, *axis)).try_fold(0, |sum, digit| {
            let step = l.target_stride / digit.divisor;
            let whole = digit.table.is_none() && step.is_multiple_of(digit.group);
            let turns = digit.turn < digit.modulus.div_ceil(digit.group);
            match step / digit.group {
                y if whole && !turns => Some(sum + y * digit.stride),
                y if whole && y.is_multiple_of(digit.turn) => Some(sum),
                _ => None,
            }
        });
        match delta {
            Some(delta) => even.push((l.extent, delta)),
            None => uneven.push((*axis, *l)),
        }
    }
    // One set of loops, or several where a table has gaps.
    let mut sets = vec![(0, even)];
    for digit in digits {
        let x = first / digit.divisor % digit.modulus;
        let along = uneven.iter().filter(|(axis, _)| moves(digit, *axis));
        let last: u64 = along.map(|(_, l)| (l.extent - 1) * l.target_stride / digit.divisor).sum();
        let ranges = digit_ranges(digit, x / digit.group, (x + last) / digit.group);
        sets = sets
            .iter()
            .flat_map(|(start, loops)| {
                ranges.iter().map(move |(value, count)| {
                    let mut loops = loops.clone();
                    loops.push((*count, digit.stride));
                    (start + value * digit.stride, loops)
                })
            })
            .collect();
    }
    let unit = operand.field.index_bits();
    for (start, loops) in sets {
        found.push(byte_runs(start * unit, loops.iter().map(|(n, stride)| (*n, stride * unit)), operand.field.bits()));
    }
}

/// Ranges of values, as start and count, of a digit that counts from `low` to `high`.
fn digit_ranges(digit: &Digit, low: u64, high: u64) -> SmallVec<[(u64, u64); 1]> {
    let count = high - low + 1;
    let (low, count) = match low % digit.turn {
        start if start.checked_add(count).is_some_and(|end| end <= digit.turn) => (start, count),
        _ => (0, digit.turn),
    };
    let Some(table) = &digit.table else { return SmallVec::from_slice(&[(low, count)]) };
    let mut values = table[to_usize(low)..to_usize(low + count)].to_vec();
    values.sort_unstable();
    values.dedup();
    let mut ranges: SmallVec<[(u64, u64); 1]> = SmallVec::new();
    for value in values {
        match ranges.last_mut() {
            Some((start, count)) if *start + *count == value => *count += 1,
            _ => ranges.push((value, 1)),
        }
    }
    ranges
}

/// Loops over fields of `width` bits as runs of bytes. By rising stride: first the loops that continue a run, then each loop
/// that continues the one inside it.
fn byte_runs(start: u64, loops: impl Iterator<Item = (u64, u64)>, width: u64) -> ByteRuns {
    let mut loops: SmallVec<[(u64, u64); 8]> = loops.filter(|(extent, stride)| *extent > 1 && *stride > 0).collect();
    loops.sort_unstable_by_key(|(_, stride)| *stride);
    let mut run = width;
    let mut nest: SmallVec<[(u64, u64); 3]> = SmallVec::new();
    for (extent, stride) in loops {
        let span_bits = nest.iter().map(|(extent, stride)| (extent - 1) * stride).sum::<u64>() + run;
        if stride < span_bits || !stride.is_multiple_of(8) {
            // The turns are not apart, or do not use the same bits of their bytes.
            nest.clear();
            run = span_bits + (extent - 1) * stride;
        } else if nest.is_empty() && stride == run {
            run *= extent;
        } else {
            match nest.last_mut() {
                Some((inner, step)) if stride == *inner * *step => *inner *= extent,
                _ => nest.push((extent, stride)),
            }
        }
    }
    nest.reverse();
    let bytes = nest.iter().map(|(extent, stride)| (*extent, stride / 8)).collect();
    ByteRuns::new(start / 8, bytes, (start % 8 + run).div_ceil(8))
}

impl ByteRuns {
    /// As [`ByteRuns::of`], but of all operands of a decoder whose tensors are wanted.
    pub fn of_some(
        tiling: &Tiling,
        piece: &Piece,
        is_wanted: &dyn Fn(TensorId) -> bool,
    ) -> SmallVec<[(TensorId, Self); 1]> {
        Self::of_operands(tiling, piece, &|_, tensor| is_wanted(tensor))
    }

    /// The runs that a piece reads, with their tensor; of what an encoder makes, those of all pieces that it is made from. None if it
    /// is filled with a constant. Of a quantized tensor only the codes, which may be several sets of runs.
    pub fn of(tiling: &Tiling, piece: &Piece) -> SmallVec<[(TensorId, Self); 1]> {
        Self::of_operands(tiling, piece, &|number, _| number == 0)
    }

    fn of_operands(
        tiling: &Tiling,
        piece: &Piece,
        is_wanted: &dyn Fn(usize, TensorId) -> bool,
    ) -> SmallVec<[(TensorId, Self); 1]> {
        let mut found = SmallVec::new();
        // A view without a tiling was refused when the plan was made.
        let _ = tiling.for_each_stored_piece(piece, &mut |tiling, piece| {
            let Origin::Tensor { decoder, .. } = piece.origin else { return };
            for need in needs_of(&tiling.decoders()[decoder as usize], tiling.unit_bytes(), piece, is_wanted) {
                found.extend(need.runs.into_iter().map(|runs| (need.tensor, runs)));
            }
        });
        found
    }
}
