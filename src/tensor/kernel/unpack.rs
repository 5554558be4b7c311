//! Loops over packed codes: fields of 4 bits through a table of 16, bytes as integers.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use super::{Level, Width};

/// A table of f32 bits for each code of 4 bits.
pub(crate) type Table = [u32; 16];

/// The lowest bit of each code of one word of 4 bytes, in the order of the output.
pub(crate) type Shifts = [u32; 8];

/// Nibbles in order, low ones first.
pub(crate) const LOW_FIRST: Shifts = [0, 4, 8, 12, 16, 20, 24, 28];
/// Nibbles in order, the high one of each byte first.
pub(crate) const HIGH_FIRST: Shifts = [4, 0, 12, 8, 20, 16, 28, 24];

/// Looks up eight codes of each word of `source`.
///
/// # Panics
/// If `values` has not eight elements for each whole word of `source`.
pub(crate) fn words(level: Level, source: &[u8], shifts: &Shifts, table: &Table, values: &mut [[u8; 4]]) {
    let (words, targets) = (source.as_chunks::<4>().0, values.as_chunks_mut::<8>().0);
    assert_eq!(words.len(), targets.len(), "words and what they become");
    match level.0 {
        Width::Portable => words_portable(words, shifts, table, targets),
        // SAFETY: `Level` is made by detection only, so this processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Width::Avx2 | Width::Avx512 => unsafe { x86::words(words, shifts, table, targets) },
    }
}

fn words_portable(words: &[[u8; 4]], shifts: &Shifts, table: &Table, targets: &mut [[[u8; 4]; 8]]) {
    for (word, target) in words.iter().zip(targets) {
        let word = u32::from_le_bytes(*word);
        for (value, shift) in target.iter_mut().zip(shifts) {
            *value = entry(table, word >> shift);
        }
    }
}

#[inline(always)]
fn entry(table: &Table, code: u32) -> [u8; 4] {
    table[usize::from(code.to_le_bytes()[0] & 15)].to_le_bytes()
}

/// Looks up the code at bit `shift` of each word.
///
/// # Panics
/// If there are not as many values as words.
pub(crate) fn column(level: Level, words: &[[u8; 4]], shift: u32, table: &Table, values: &mut [[u8; 4]]) {
    assert_eq!(words.len(), values.len(), "words and what they become");
    match level.0 {
        Width::Portable => column_portable(words, shift, table, values),
        // SAFETY: `Level` is made by detection only, so this processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Width::Avx2 | Width::Avx512 => unsafe { x86::column(words, shift, table, values) },
    }
}

fn column_portable(words: &[[u8; 4]], shift: u32, table: &Table, values: &mut [[u8; 4]]) {
    for (word, value) in words.iter().zip(values) {
        *value = entry(table, u32::from_le_bytes(*word) >> shift);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows their instructions to be enabled")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m256i, _mm256_and_si256, _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps,
        _mm256_loadu_si256, _mm256_permutevar8x32_ps, _mm256_set1_epi32, _mm256_slli_epi32, _mm256_srlv_epi32,
        _mm256_storeu_si256,
    };

    use super::{Shifts, Table, column_portable};

    /// Entries of the table for the low four bits of eight codes.
    #[inline(always)]
    unsafe fn entries(codes: __m256i, low: __m256, high: __m256) -> __m256i {
        // SAFETY: the callers have AVX2.
        unsafe {
            // The permutation takes the lowest three bits of a code, the blend its fourth as a sign.
            let (from_low, from_high) = (_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes));
            let fourth = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            _mm256_castps_si256(_mm256_blendv_ps(from_low, from_high, fourth))
        }
    }

    /// Both halves of the table.
    #[inline(always)]
    unsafe fn halves(table: &Table) -> (__m256, __m256) {
        // SAFETY: the callers have AVX2; the table has 16 entries of 4 bytes.
        unsafe {
            let at = table.as_ptr();
            let load = |from: *const u32| _mm256_castsi256_ps(_mm256_loadu_si256(from.cast()));
            (load(at), load(at.add(8)))
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn words(words: &[[u8; 4]], shifts: &Shifts, table: &Table, targets: &mut [[[u8; 4]; 8]]) {
        // SAFETY: AVX2 is enabled; the shifts and each target are 32 bytes.
        unsafe {
            let (low, high) = halves(table);
            let shifts = _mm256_loadu_si256(shifts.as_ptr().cast());
            for (word, target) in words.iter().zip(targets) {
                let word = _mm256_set1_epi32(i32::from_le_bytes(*word));
                let values = entries(_mm256_srlv_epi32(word, shifts), low, high);
                _mm256_storeu_si256(target.as_mut_ptr().cast(), values);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn column(words: &[[u8; 4]], shift: u32, table: &Table, values: &mut [[u8; 4]]) {
        let ((groups, rest), (targets, rest_targets)) = (words.as_chunks::<8>(), values.as_chunks_mut::<8>());
        // SAFETY: AVX2 is enabled; each group and each target are 32 bytes.
        unsafe {
            let (low, high) = halves(table);
            let shifts = _mm256_set1_epi32(shift.cast_signed());
            let mask = _mm256_set1_epi32(15);
            for (group, target) in groups.iter().zip(targets) {
                let codes = _mm256_srlv_epi32(_mm256_loadu_si256(group.as_ptr().cast()), shifts);
                let values = entries(_mm256_and_si256(codes, mask), low, high);
                _mm256_storeu_si256(target.as_mut_ptr().cast(), values);
            }
        }
        column_portable(rest, shift, table, rest_targets);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_agree() {
        let source: Vec<u8> = (0..4 * 37_u32).map(|at| (at * 197 % 256).to_le_bytes()[0]).collect();
        let table: Table = std::array::from_fn(|code| 0x7fa0_0000 + u32::try_from(code).unwrap_or(0) * 3);
        let interleaved = [0, 16, 4, 20, 8, 24, 12, 28];
        for shifts in [LOW_FIRST, HIGH_FIRST, interleaved] {
            let expected: Vec<[u8; 4]> = source
                .as_chunks::<4>()
                .0
                .iter()
                .flat_map(|word| shifts.map(|shift| entry(&table, u32::from_le_bytes(*word) >> shift)))
                .collect();
            for level in Level::available() {
                let mut values = vec![[0; 4]; expected.len()];
                words(level, &source, &shifts, &table, &mut values);
                assert_eq!(values, expected, "{shifts:?} at {level:?}");
            }
        }
        let source = source.as_chunks::<4>().0;
        for shift in 0..28 {
            let mut expected = vec![[0; 4]; source.len()];
            column_portable(source, shift, &table, &mut expected);
            for level in Level::available() {
                let mut values = vec![[0; 4]; expected.len()];
                column(level, source, shift, &table, &mut values);
                assert_eq!(values, expected, "{shift} at {level:?}");
            }
        }
    }
}
