//! Loops over packed codes: fields of 4 bits through a table of 16, bytes as integers.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use super::{
    super::{BitOrder, float},
    Level, Width,
};

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

/// Codes that [`products`] looks up together.
pub(crate) const TOGETHER: usize = 16;

/// Products of the entries for adjacent codes and one operand for each run of codes, rounded to BF16. The first run has `runs.0`
/// codes, each other one `runs.1`, all of them multiples of [`TOGETHER`]. All entries are finite. Each run has sixteen
/// different products, which are computed first.
///
/// # Panics
/// If codes, operands and `target` are not as long as these runs.
pub(crate) fn products(
    level: Level,
    (codes, order): (&[u8], BitOrder),
    table: &Table,
    operands: &[[u8; 4]],
    (head, period): (usize, usize),
    target: &mut [u8],
) {
    assert_eq!(target.len(), 4 * codes.len(), "bytes for two codes");
    let (mut codes, mut target) = (codes, target);
    for (run, operand) in operands.iter().enumerate() {
        let wanted = if run == 0 { head } else { period };
        let count = wanted.min(2 * codes.len());
        assert!(count > 0 && count.is_multiple_of(TOGETHER), "a run of {count} codes");
        let (now, others) = codes.split_at(count / 2);
        let (made, others_target) = std::mem::take(&mut target).split_at_mut(2 * count);
        let products = run_products(level, table, u32::from_le_bytes(*operand));
        look_up(level, (now, order), &products, made);
        (codes, target) = (others, others_target);
    }
    assert!(codes.is_empty(), "{} codes have no operand", 2 * codes.len());
}

/// The products of a run by code: their lower and their upper bytes.
type Products = [[u8; 16]; 2];

/// The products of all entries with one operand, in BF16.
#[inline(always)]
fn run_products(level: Level, table: &Table, operand: u32) -> Products {
    #[cfg(target_arch = "x86_64")]
    if level.has_avx2() && operand & float::F32_INFINITY != float::F32_INFINITY {
        // SAFETY: `Level` is made by detection only, so this processor has AVX2.
        return unsafe { x86::run_products(table, f32::from_bits(operand)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = level;
    run_products_portable(table, operand)
}

fn run_products_portable(table: &Table, operand: u32) -> Products {
    let mut products = [[0; 16]; 2];
    for (code, entry) in table.iter().enumerate() {
        let [low, high, ..] = float::narrow_bf16(float::multiply(*entry, operand)).to_le_bytes();
        (products[0][code], products[1][code]) = (low, high);
    }
    products
}

/// Fills `target` with the products of codes.
#[inline(always)]
fn look_up(level: Level, (codes, order): (&[u8], BitOrder), products: &Products, target: &mut [u8]) {
    match level.0 {
        Width::Portable => {
            let shifts = if order == BitOrder::LowFirst { [0, 4] } else { [4, 0] };
            for (byte, made) in codes.iter().zip(target.as_chunks_mut::<4>().0) {
                let [first, second] = shifts.map(|shift| usize::from(byte >> shift & 15));
                *made = [products[0][first], products[1][first], products[0][second], products[1][second]];
            }
        }
        // SAFETY: `Level` is made by detection only, so this processor has AVX2.
        #[cfg(target_arch = "x86_64")]
        Width::Avx2 | Width::Avx512 => unsafe {
            x86::look_up(codes.as_chunks().0, order, products, target.as_chunks_mut().0);
        },
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows their instructions to be enabled")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m256i, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_set1_epi8, _mm_shuffle_epi8,
        _mm_srli_epi16, _mm_storeu_si128, _mm_unpackhi_epi8, _mm_unpacklo_epi8, _mm256_add_epi32, _mm256_and_si256,
        _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_loadu_si256, _mm256_mul_ps,
        _mm256_packus_epi16, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_permutevar8x32_ps,
        _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_srli_epi16, _mm256_srli_epi32,
        _mm256_srlv_epi32, _mm256_storeu_si256,
    };

    use super::{super::super::BitOrder, Products, Shifts, Table, column_portable};

    /// As [`super::run_products`], for a finite operand.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn run_products(table: &Table, operand: f32) -> Products {
        let mut products = [[0; 16]; 2];
        // SAFETY: AVX2 is enabled; the products are 32 bytes.
        unsafe {
            let (low, high) = halves(table);
            // To nearest, ties to even; correct for all values except NaNs, and products of finite numbers are none.
            let product = |entries: __m256| {
                let bits = _mm256_castps_si256(_mm256_mul_ps(entries, _mm256_set1_ps(operand)));
                let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
                _mm256_srli_epi32::<16>(rounded)
            };
            // Packing works on both halves of a register by itself.
            let all = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(product(low), product(high)));
            let lower = _mm256_and_si256(all, _mm256_set1_epi16(0xff));
            let bytes = _mm256_packus_epi16(lower, _mm256_srli_epi16::<8>(all));
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
            _mm256_storeu_si256(products.as_mut_ptr().cast(), bytes);
        }
        products
    }

    /// As [`super::look_up`], for 16 codes at a time.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn look_up(codes: &[[u8; 8]], order: BitOrder, products: &Products, targets: &mut [[u8; 32]]) {
        // SAFETY: AVX2 is enabled; all pointers are to arrays of at least the bytes that are read or written.
        unsafe {
            let load = |from: &[u8; 16]| _mm_loadu_si128(from.as_ptr().cast());
            let (lower, upper) = (load(&products[0]), load(&products[1]));
            let mask = _mm_set1_epi8(15);
            for (codes, target) in codes.iter().zip(targets) {
                let both = _mm_loadl_epi64(codes.as_ptr().cast());
                let (low, high) = (_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16::<4>(both), mask));
                let codes = match order {
                    BitOrder::LowFirst => _mm_unpacklo_epi8(low, high),
                    BitOrder::HighFirst => _mm_unpacklo_epi8(high, low),
                };
                let (lower, upper) = (_mm_shuffle_epi8(lower, codes), _mm_shuffle_epi8(upper, codes));
                let to = target.as_mut_ptr();
                _mm_storeu_si128(to.cast(), _mm_unpacklo_epi8(lower, upper));
                _mm_storeu_si128(to.add(16).cast(), _mm_unpackhi_epi8(lower, upper));
            }
        }
    }

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

    /// Every code with operands of all kinds, in runs of several lengths.
    #[test]
    fn products_agree_with_single_elements() {
        let codes: Vec<u8> = (0..256_u32).map(|at| (at * 197 % 256).to_le_bytes()[0]).collect();
        let tables: [Table; 3] = [
            [0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12].map(|half: u8| (f32::from(half) / 2.0).to_bits()),
            std::array::from_fn(|code| (f32::from(u8::try_from(code).unwrap_or(0)) - 8.0).to_bits()),
            std::array::from_fn(|code| u32::try_from(code).unwrap_or(0).wrapping_mul(0x9e37_79b9) & !0x4000_0000),
        ];
        let odd =
            [0.0, -0.0, 1e-45, -1e-40, f32::MIN_POSITIVE, 3e38, -3e38, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let operands: Vec<[u8; 4]> = (0..40_u32)
            .map(|at| f32::from_bits(at.wrapping_mul(0x9e37_79b9)))
            .enumerate()
            .map(|(at, number)| odd.get(at).copied().unwrap_or(number).to_le_bytes())
            .collect();
        for table in &tables {
            for (head, period) in [(16, 16), (16, 32), (32, 32), (64, 64), (48, 128), (512, 512)] {
                let runs = 1 + (512_usize - head).div_ceil(period);
                for order in [BitOrder::LowFirst, BitOrder::HighFirst] {
                    let expected: Vec<u8> = (0..512)
                        .flat_map(|at: usize| {
                            let operand = if at < head { 0 } else { 1 + (at - head) / period };
                            let shift = if at.is_multiple_of(2) == (order == BitOrder::LowFirst) { 0 } else { 4 };
                            let entry = table[usize::from(codes[at / 2] >> shift & 15)];
                            let product = float::multiply(entry, u32::from_le_bytes(operands[operand]));
                            float::narrow_bf16(product).to_le_bytes()[..2].to_vec()
                        })
                        .collect();
                    for level in Level::available() {
                        let mut made = vec![0; expected.len()];
                        products(level, (&codes, order), table, &operands[..runs], (head, period), &mut made);
                        assert!(made == expected, "runs of {head} and {period}, {order:?}, at {level:?}");
                    }
                }
            }
        }
    }

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
