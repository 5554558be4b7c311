//! Sums of products: one factor for each of several rows of f32 values, and the rows.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use super::{Level, row::leveled};

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
}

#[cfg(test)]
mod tests {
    use super::*;

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
