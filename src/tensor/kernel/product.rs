//! Products of rows of f32 values: sums of them, and those that are rounded to BF16 at once, as most decoders end.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use std::hint::black_box;

use super::{
    Level,
    row::{leveled, rounded_finite_bf16},
};

/// Values of a row that are summed together: their sums stay in registers.
const TOGETHER: usize = 64;

/// Sums of products of some neighbours. Each row of `rows` has `width` values, of which these begin at `at`.
#[inline(always)]
fn sums<const N: usize>(factors: &[[u8; 4]], rows: &[[u8; 4]], width: usize, at: usize, target: &mut [[u8; 4]; N]) {
    let (first, others) = factors.split_first().expect("a sum of products has a term");
    let row = |term: usize| rows[term * width + at..].first_chunk::<N>().expect("each factor has a whole row");
    let mut sums = [0_f32; N];
    let factor = f32::from_le_bytes(*first);
    for (sum, value) in sums.iter_mut().zip(row(0)) {
        *sum = factor * f32::from_le_bytes(*value);
    }
    for (term, factor) in others.iter().enumerate() {
        let factor = f32::from_le_bytes(*factor);
        for (sum, value) in sums.iter_mut().zip(row(term + 1)) {
            *sum += factor * f32::from_le_bytes(*value);
        }
    }
    for (target, sum) in target.iter_mut().zip(sums) {
        *target = sum.to_le_bytes();
    }
}

leveled! {
    /// Sets each of `target` to the sum, from the first row to the last, of the row's factor times the row's value at that place.
    /// Each product and each sum is rounded. `rows` has as many rows as there are factors, each as long as `target`. What is no
    /// number is one in the result too, yet with any of its bits.
    fn sums_of_products(factors: &[[u8; 4]], rows: &[[u8; 4]], target: &mut [[u8; 4]]) {
        let width = target.len();
        let (together, rest) = target.as_chunks_mut::<TOGETHER>();
        let whole = together.len() * TOGETHER;
        for (at, target) in together.iter_mut().enumerate() {
            sums(factors, rows, width, at * TOGETHER, target);
        }
        for (at, target) in rest.iter_mut().enumerate() {
            sums(factors, rows, width, whole + at, std::array::from_mut(target));
        }
    }
    /// Products of finite values and of as many finite operands, rounded to BF16.
    fn multiply_finite_pairs_to_bf16(values: &[u8], operands: &[u8], target: &mut [u8]) {
        let pairs = values.as_chunks::<4>().0.iter().zip(operands.as_chunks::<4>().0);
        for ((value, operand), target) in pairs.zip(target.as_chunks_mut::<2>().0) {
            let product = f32::from_le_bytes(*value) * f32::from_le_bytes(*operand);
            *target = rounded_finite_bf16(product.to_bits()).to_le_bytes();
        }
    }
    /// Products of finite values in runs and one finite operand each, rounded to BF16: the first `head` values with the first
    /// operand, then `period` with each of the others.
    fn multiply_finite_runs_to_bf16(values: &[u8], operands: &[u8], head: usize, period: usize, target: &mut [u8]) {
        let (values, operands) = (values.as_chunks::<4>().0, operands.as_chunks::<4>().0);
        let Some((first, others)) = operands.split_first() else { return };
        let (head, rest) = values.split_at(head.min(values.len()));
        let (head_target, rest_target) = target.as_chunks_mut::<2>().0.split_at_mut(head.len());
        let one = |run: &[[u8; 4]], target: &mut [[u8; 2]], operand: &[u8; 4]| {
            let operand = f32::from_le_bytes(*operand);
            for (value, target) in run.iter().zip(target) {
                *target = rounded_finite_bf16((f32::from_le_bytes(*value) * operand).to_bits()).to_le_bytes();
            }
        };
        one(head, head_target, first);
        let runs = rest.chunks(period.max(1)).zip(rest_target.chunks_mut(period.max(1)));
        for ((run, target), operand) in runs.zip(others) {
            // Otherwise compilers process one value of each of many runs at a time, which is slow.
            one(run, target, black_box(operand));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Operation,
        kernel::row::{loops, narrow_bf16},
    };

    #[test]
    fn products_that_are_rounded_at_once_are_those_of_two_loops() {
        let numbers = |seed: u32| -> Vec<u8> {
            let bits = (0..3000_u32).map(|at| at.wrapping_mul(0x9e37_79b9).rotate_left(seed));
            bits.filter(|bits| f32::from_bits(*bits).is_finite()).take(2048).flat_map(u32::to_le_bytes).collect()
        };
        let (values, operands) = (numbers(3), numbers(17));
        for level in Level::available() {
            let narrowed = |exact: &[u8]| {
                let mut narrowed = vec![0; exact.len() / 2];
                narrow_bf16(level, exact, &mut narrowed);
                narrowed
            };
            let mut made = vec![0; values.len() / 2];
            for (head, period) in [(5, 16), (32, 32), (1, 64), (7, 9), (2048, 2048)] {
                let mut exact = values.clone();
                loops(Operation::Multiply, false).0(level, &mut exact, &operands, head, period);
                multiply_finite_runs_to_bf16(level, &values, &operands, head, period, &mut made);
                assert!(narrowed(&exact) == made, "products in runs of {period}, rounded, at {level:?}");
            }
            let mut exact = values.clone();
            loops(Operation::Multiply, false).1(level, &mut exact, &operands);
            multiply_finite_pairs_to_bf16(level, &values, &operands, &mut made);
            assert!(narrowed(&exact) == made, "products, rounded, at {level:?}");
        }
    }

    #[test]
    fn products_are_added_one_after_the_other_at_each_level() {
        let number = |at: usize| {
            let bits = u32::try_from(at).unwrap().wrapping_mul(0x9e37_79b9);
            f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000) - 1.5
        };
        for (terms, width) in [(1, 1), (3, 63), (16, 64), (8, 200), (5, 1024)] {
            let factors: Vec<f32> = (0..terms).map(number).collect();
            let rows: Vec<f32> = (0..terms * width).map(|at| number(at + 999)).collect();
            let sum = |at: usize| {
                let mut sum = factors[0] * rows[at];
                for term in 1..terms {
                    let product = factors[term] * rows[term * width + at];
                    sum += product;
                }
                sum.to_le_bytes()
            };
            let expected: Vec<[u8; 4]> = (0..width).map(sum).collect();
            let bytes = |values: &[f32]| values.iter().map(|value| value.to_le_bytes()).collect::<Vec<_>>();
            for level in Level::available() {
                let mut target = vec![[0; 4]; width];
                sums_of_products(level, &bytes(&factors), &bytes(&rows), &mut target);
                assert!(target == expected, "{terms} terms, {width} values at {level:?}");
            }
        }
    }
}
