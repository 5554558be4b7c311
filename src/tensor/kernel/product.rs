//! Products of rows of f32 values that are rounded to BF16 at once, as most decoders end.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use std::hint::black_box;

use super::{
    Level,
    row::{leveled, rounded_finite_bf16},
};

/// Products of runs of f32 values and one operand each, rounded to BF16: the first `head` values with the first operand,
/// then `period` with each of the others.
#[inline(always)]
fn each_run_to_bf16(values: &[u8], operands: &[u8], head: usize, period: usize, target: &mut [u8]) {
    let (values, operands) = (values.as_chunks::<4>().0, operands.as_chunks::<4>().0);
    let Some((first, others)) = operands.split_first() else { return };
    let head = head.min(values.len());
    let (head, rest) = values.split_at(head);
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

leveled! {
    /// Products of finite values and of as many finite operands, rounded to BF16.
    fn multiply_finite_pairs_to_bf16(values: &[u8], operands: &[u8], target: &mut [u8]) {
        let pairs = values.as_chunks::<4>().0.iter().zip(operands.as_chunks::<4>().0);
        for ((value, operand), target) in pairs.zip(target.as_chunks_mut::<2>().0) {
            let product = f32::from_le_bytes(*value) * f32::from_le_bytes(*operand);
            *target = rounded_finite_bf16(product.to_bits()).to_le_bytes();
        }
    }
    /// Products of finite values in runs and one finite operand each, rounded to BF16.
    fn multiply_finite_runs_to_bf16(values: &[u8], operands: &[u8], head: usize, period: usize, target: &mut [u8]) {
        each_run_to_bf16(values, operands, head, period, target);
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
}
