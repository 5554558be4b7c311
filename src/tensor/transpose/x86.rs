//! Transposes in registers of x86-64.
//!
//! Each function processes all whole blocks of lines that fill its registers, and returns the numbers of lines and of their
//! elements. Its caller guarantees that [`Lines::check`] has passed, and that the processor has its instructions.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "registers must stay registers")]
#![allow(unused_unsafe, reason = "these intrinsics are safe where the compiler knows their instructions to be enabled")]

use std::arch::x86_64::{
    __m256i, _CMP_UNORD_Q, _mm_storeu_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_adds_epu16, _mm256_and_si256,
    _mm256_blend_epi16, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_max_epu16, _mm256_min_epu16, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_si256, _mm256_slli_epi32, _mm256_srli_epi32,
    _mm256_sub_epi16, _mm256_subs_epu16, _mm256_testz_si256, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16,
    _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
    _mm256_unpacklo_epi64,
};
use std::array::from_fn;

use super::lines::{BAND_LINES, CACHE_LINE_BYTES, Lines, prefetch_line};

/// Prefetch distance in each line.
const LOOK_AHEAD_BYTES: usize = 2 * CACHE_LINE_BYTES;

impl Lines<'_> {
    /// Prefetches bytes soon after byte `at` of some lines, or the start of the lines that follow them.
    #[inline(always)]
    fn look_ahead<const LINES: usize>(&self, first: usize, at: usize) {
        let line = self.columns * self.source_unit();
        let next = at + LOOK_AHEAD_BYTES.min(line);
        let (lines, skip) = if next < line { (self.offsets, next) } else { (self.ahead, next - line) };
        if let Some(starts) = lines.get(first..).and_then(|lines| lines.first_chunk::<LINES>()) {
            for start in starts {
                prefetch_line(self.source, start + skip);
            }
        }
    }
}

/// Stores two target lines, `$apart` bytes apart.
macro_rules! store_32 {
    ($line:expr, $to:expr, $apart:expr) => {
        _mm_storeu_si128($to.cast(), _mm256_castsi256_si128($line));
        _mm_storeu_si128($to.add($apart).cast(), _mm256_extracti128_si256::<1>($line));
    };
}

/// Defines a function for blocks of `$side` lines by twice as many elements.
///
/// A round is a perfect shuffle of the lines: line `i` is interleaved with line `i + N / 2`, giving lines `2 i` and
/// `2 i + 1`. As many of these as a line has bits of index transpose a square. The halves of a wider register are
/// squares of their own.
macro_rules! define {
    ($(fn $name:ident($side:literal, $rounds:literal, $low:ident, $high:ident);)*) => {$(
        #[target_feature(enable = "avx2")]
        pub(super) unsafe fn $name(
            lines: Lines<'_>,
            target: &mut [u8],
            pitch: usize,
        ) -> (usize, usize) {
            let (groups, rest) = lines.offsets.as_chunks::<$side>();
            let (ahead, _) = lines.ahead.as_chunks::<$side>();
            let width = $side * 2;
            let columns = lines.columns / width * width;
            for (index, offsets) in groups.iter().enumerate() {
                let row = index * $side;
                for column in (0..columns).step_by(width) {
                    let at = column * lines.unit;
                    if at.is_multiple_of(CACHE_LINE_BYTES)
                        && let Some(ahead) = ahead.get(index)
                    {
                        for next in ahead {
                            prefetch_line(lines.source, next + at);
                        }
                    }
                    let from = lines.source.as_ptr();
                    let to = target.as_mut_ptr();
                    // SAFETY: the block touches `width` elements of `$side` lines and of their target: `column + width` is at
                    // most `columns`, and `row + $side` at most the number of lines. They lie in the slices, and the
                    // processor has the instructions, both by the contract of the module.
                    unsafe {
                        let mut block: [_; $side] = from_fn(|line| _mm256_loadu_si256(from.add(offsets[line] + at).cast()));
                        for _ in 0..$rounds {
                            let now = block;
                            for line in 0..$side / 2 {
                                block[2 * line] = $low(now[line], now[line + $side / 2]);
                                block[2 * line + 1] = $high(now[line], now[line + $side / 2]);
                            }
                        }
                        for (line, made) in block.into_iter().enumerate() {
                            let to = to.add((column + line) * pitch + row * lines.unit);
                            store_32!(made, to, $side * pitch);
                        }
                    }
                }
            }
            (lines.offsets.len() - rest.len(), columns)
        }
    )*};
}

define! {
    fn wide_1(16, 4, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8);
    fn wide_4(4, 2, _mm256_unpacklo_epi32, _mm256_unpackhi_epi32);
    fn wide_8(2, 1, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64);
}

/// As the functions above, with 16 elements of 8 lines at a time, from elements of `SOURCE` bytes to elements of two. Wider
/// elements are rounded to BF16. With `MULTIPLY` they are then multiplied by `factor` and rounded again. `exact` converts
/// blocks with values that are not ordinary.
///
/// One cache line of all lines of a band is processed before the next, so that whole cache lines of the target are written.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn two_bytes<const SOURCE: usize, const MULTIPLY: bool>(
    lines: Lines<'_>,
    exact: &dyn Fn(&[u8], &mut [u8]),
    factor: f32,
    target: &mut [u8],
    pitch: usize,
) -> (usize, usize) {
    let (groups, rest) = lines.offsets.as_chunks::<8>();
    let columns = lines.columns / 16 * 16;
    let step = CACHE_LINE_BYTES / SOURCE;
    for (band, groups) in groups.chunks(BAND_LINES / 8).enumerate() {
        for first in (0..columns).step_by(step) {
            for (index, offsets) in groups.iter().enumerate() {
                let row = band * BAND_LINES + index * 8;
                lines.look_ahead::<8>(row, first * SOURCE);
                for column in (first..columns.min(first + step)).step_by(16) {
                    let at = column * SOURCE;
                    let from = lines.source.as_ptr();
                    let to = target.as_mut_ptr();
                    // SAFETY: as in `define`, with 16 elements of 8 lines.
                    unsafe {
                        let (mut block, mut seen) = ([_mm256_setzero_si256(); 8], Seen::nothing());
                        for (made, offset) in block.iter_mut().zip(offsets) {
                            *made = bf16::<SOURCE, MULTIPLY>(from.add(offset + at), factor, &mut seen);
                        }
                        if (SOURCE == 4 || MULTIPLY) && seen.any_odd() {
                            for (made, offset) in block.iter_mut().zip(offsets) {
                                let mut converted = [0; 32];
                                exact(&lines.source[offset + at..][..16 * SOURCE], &mut converted);
                                if SOURCE == 4 {
                                    let elements = converted.as_chunks::<2>().0;
                                    let placed: [_; 16] = from_fn(|place| elements[place % 2 * 8 + place / 2]);
                                    converted.copy_from_slice(placed.as_flattened());
                                }
                                *made = _mm256_loadu_si256(converted.as_ptr().cast());
                            }
                        }
                        for _ in 0..3 {
                            let now = block;
                            for line in 0..4 {
                                block[2 * line] = _mm256_unpacklo_epi16(now[line], now[line + 4]);
                                block[2 * line + 1] = _mm256_unpackhi_epi16(now[line], now[line + 4]);
                            }
                        }
                        for (place, made) in block.into_iter().enumerate() {
                            // The place in the first half of a line, and the distance to the same place in the second half.
                            let (line, apart) = if SOURCE == 4 { (place % 2 * 8 + place / 2, 4) } else { (place, 8) };
                            let to = to.add((column + line) * pitch + row * 2);
                            store_32!(made, to, apart * pitch);
                        }
                    }
                }
            }
        }
    }
    (lines.offsets.len() - rest.len(), columns)
}

/// Tells whether any element is a NaN, or any product is not ordinary: neither zero, nor finite and far from subnormal.
struct Seen {
    /// NaNs set bits here.
    nan: __m256i,
    /// The greatest magnitudes of products, as integers.
    greatest: __m256i,
    /// The least magnitudes minus one, so that zero is above all others.
    least: __m256i,
}

impl Seen {
    #[target_feature(enable = "avx2")]
    #[inline]
    fn nothing() -> Self {
        let zero = _mm256_setzero_si256();
        Self { nan: zero, greatest: zero, least: _mm256_set1_epi16(-1) }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn multiplied(&mut self, products: __m256i) {
        let magnitude = _mm256_and_si256(products, _mm256_set1_epi16(0x7fff));
        self.greatest = _mm256_max_epu16(self.greatest, magnitude);
        self.least = _mm256_min_epu16(self.least, _mm256_sub_epi16(magnitude, _mm256_set1_epi16(1)));
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn any_odd(&self) -> bool {
        // Exponents from 2 to 254 are at least 2^-125 and finite.
        let (finite, normal) = (_mm256_set1_epi16((255 << 7) - 1), _mm256_set1_epi16((2 << 7) - 1));
        let large = _mm256_subs_epu16(self.greatest, finite);
        let small = _mm256_subs_epu16(normal, self.least);
        let odd = _mm256_or_si256(self.nan, _mm256_or_si256(large, small));
        _mm256_testz_si256(odd, odd) == 0
    }
}

/// Converts the 16 elements at `from`, and notes their magnitudes. For elements of 4 bytes, the second eight lie between the
/// first, which saves instructions: element `8 i + j` is at place `2 j + i`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn bf16<const SOURCE: usize, const MULTIPLY: bool>(from: *const u8, factor: f32, seen: &mut Seen) -> __m256i {
    let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    // To nearest, ties to even, in the upper half; correct for all values except NaNs.
    let round = |bits: __m256i| {
        let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even)
    };
    let multiply =
        |bits: __m256i| round(_mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(factor))));
    // SAFETY: the caller guarantees that 16 elements of `SOURCE` bytes at `from` may be read.
    let eight = |index: usize| unsafe { _mm256_loadu_si256(from.add(32 * index).cast()) };
    let mut made = eight(0);
    if SOURCE == 4 {
        let (first, second) = (made, eight(1));
        let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(_mm256_castsi256_ps(first), _mm256_castsi256_ps(second));
        seen.nan = _mm256_or_si256(seen.nan, _mm256_castps_si256(nan));
        let (one, half) = (_mm256_set1_epi16(1), _mm256_set1_epi16(i16::MIN));
        let high = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(first), second);
        let low = _mm256_blend_epi16::<0b1010_1010>(first, _mm256_slli_epi32::<16>(second));
        // Adds one where the lower half is more than a half, or exactly a half with an odd upper half.
        let above = _mm256_subs_epu16(_mm256_adds_epu16(low, _mm256_and_si256(high, one)), half);
        made = _mm256_add_epi16(high, _mm256_min_epu16(above, one));
    }
    if MULTIPLY {
        // Every other element is the upper half of four bytes already.
        let (even, odd) = (multiply(_mm256_slli_epi32::<16>(made)), multiply(_mm256_and_si256(made, upper)));
        made = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
    }
    if MULTIPLY {
        seen.multiplied(made);
    }
    made
}
