//! The float formats below 32 bits: bits to f32 bits and back, in branch-free integer code that compilers vectorize.
//!
//! One row of constants describes a format; [`Format::widen`] is exact and [`Format::narrow`] rounds once, to nearest,
//! ties to even, subnormals included. If a format cannot represent a value, the result is that of `ml_dtypes` and numpy:
//!
//! | target | overflow | NaN | negative zero |
//! | --- | --- | --- | --- |
//! | F16 | infinity | upper payload bits kept; 1 if they are all zero | kept |
//! | BF16 | infinity | `0x7fc0`, sign kept | kept |
//! | `F8_E5M2` | infinity | `0x7e`, sign kept | kept |
//! | `F8_E4M3` | NaN | `0x7f`, sign kept | kept |
//! | `F8_E4M3FNUZ`, `F8_E5M2FNUZ` | NaN | `0x80` | becomes zero |
//!
//! torch computes the same values with two exceptions, so that ckfs cannot match all of these libraries. It puts other payloads
//! or signs into NaNs. Its newer releases (2.15 was examined) let `F8_E4M3` saturate at 448 where `ml_dtypes`, jax and older
//! torch give NaN.
//!
//! Values pass as bit patterns, not as `f32`, so that no compiler or processor may change the payload of a NaN.

#![allow(clippy::inline_always, reason = "these must be compiled into the vector loops of each instruction set")]

/// Sign bit of an f32.
pub(super) const F32_SIGN: u32 = 0x8000_0000;
/// Bits of positive infinity.
pub(super) const F32_INFINITY: u32 = 0x7f80_0000;
/// Bit that makes a NaN quiet.
pub(super) const F32_QUIET: u32 = 0x0040_0000;

/// The codes of a format that are not finite values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beyond {
    /// Infinities and NaNs with payloads, as in IEEE 754. If `canonical` is not zero, it replaces every NaN.
    Ieee {
        /// The only NaN that is written, without its sign; zero keeps payloads.
        canonical: u32,
    },
    /// No infinities; all bits set is NaN.
    Finite,
    /// No infinities and no negative zero, whose pattern is NaN.
    FiniteUnsignedZero,
}

/// A float format of at most 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    width: u32,
    mantissa: u32,
    bias: u32,
    beyond: Beyond,
}

pub(super) const F16: Format = Format { width: 16, mantissa: 10, bias: 15, beyond: Beyond::Ieee { canonical: 0 } };
pub(super) const F8E5M2: Format = Format { width: 8, mantissa: 2, bias: 15, beyond: Beyond::Ieee { canonical: 0x7e } };
pub(super) const F8E4M3: Format = Format { width: 8, mantissa: 3, bias: 7, beyond: Beyond::Finite };
pub(super) const F8E4M3_FNUZ: Format = Format { width: 8, mantissa: 3, bias: 8, beyond: Beyond::FiniteUnsignedZero };
pub(super) const F8E5M2_FNUZ: Format = Format { width: 8, mantissa: 2, bias: 16, beyond: Beyond::FiniteUnsignedZero };

/// `if condition { yes } else { no }`, in a form that becomes a vector blend.
#[inline(always)]
const fn select(condition: bool, yes: u32, no: u32) -> u32 {
    if condition { yes } else { no }
}

impl Format {
    /// Bits of the f32 with the value of `bits`. Exact. NaNs of the 8-bit formats become the quiet NaN of their sign;
    /// those of F16 keep their payload, signalling ones too.
    #[inline(always)]
    pub(super) fn widen(self, bits: u32) -> u32 {
        let sign_bit = 1 << (self.width - 1);
        let shift = 23 - self.mantissa;
        let magnitude = bits & (sign_bit - 1);
        let sign = (bits & sign_bit) << (32 - self.width);
        let normal = (magnitude << shift) + ((127 - self.bias) << 23);
        // A subnormal is a small integer times a power of two: both steps are exact.
        #[allow(clippy::cast_precision_loss, reason = "at most ten bits")]
        let subnormal = (magnitude as f32 * f32::from_bits((128 - self.bias - self.mantissa) << 23)).to_bits();
        let finite = select(magnitude < 1 << self.mantissa, subnormal, normal) | sign;
        let ones = sign_bit - 1;
        match self.beyond {
            Beyond::Ieee { canonical } => {
                let infinity = ones & !((1 << self.mantissa) - 1);
                let payload = F32_INFINITY | ((magnitude - select(magnitude < infinity, magnitude, infinity)) << shift);
                let quiet = F32_INFINITY | F32_QUIET;
                let special = select(canonical != 0 && magnitude > infinity, quiet, payload) | sign;
                select(magnitude >= infinity, special, finite)
            }
            Beyond::Finite => select(magnitude == ones, sign | F32_INFINITY | F32_QUIET, finite),
            Beyond::FiniteUnsignedZero => select(bits == sign_bit, F32_SIGN | F32_INFINITY | F32_QUIET, finite),
        }
    }

    /// Bits of this format nearest to the f32 with these bits, ties to even.
    #[inline(always)]
    pub(super) fn narrow(self, bits: u32) -> u32 {
        let sign_bit = 1 << (self.width - 1);
        let ones = sign_bit - 1;
        let shift = 23 - self.mantissa;
        let sign = (bits & F32_SIGN) >> (32 - self.width);
        let magnitude = bits & !F32_SIGN;
        let even = (magnitude >> shift) & 1;
        let rounded = (magnitude + ((1 << (shift - 1)) - 1) + even) >> shift;
        let normal = rounded.wrapping_sub((127 - self.bias) << self.mantissa);
        // Adding this power of two leaves the smallest subnormal as the last bit of the f32 sum, so the addition rounds.
        let anchor = (151 - self.bias - self.mantissa) << 23;
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits().wrapping_sub(anchor);
        let smallest_normal = (128 - self.bias) << 23;
        let finite = select(magnitude < smallest_normal, subnormal, normal);
        match self.beyond {
            Beyond::Ieee { canonical } => {
                let infinity = ones & !((1 << self.mantissa) - 1);
                let payload = infinity | ((magnitude >> shift) & ((1 << self.mantissa) - 1));
                let payload = select(payload == infinity, infinity + 1, payload);
                let nan = select(canonical == 0, payload, canonical);
                let finite = select(finite > infinity, infinity, finite);
                sign | select(magnitude > F32_INFINITY, nan, finite)
            }
            // The exponent of a NaN is greater than any here, as are numbers that are too great.
            Beyond::Finite => sign | select(finite > ones, ones, finite),
            Beyond::FiniteUnsignedZero => {
                let signed = select(finite == 0, 0, sign | finite);
                select(finite > ones, sign_bit, signed)
            }
        }
    }
}

/// BF16 nearest to the f32 with these bits.
#[inline(always)]
pub(super) const fn narrow_bf16(bits: u32) -> u32 {
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) & 0x8000 | 0x7fc0;
    select(bits & !F32_SIGN > F32_INFINITY, nan, rounded)
}

/// F32 nearest to the f64 with these bits; a NaN becomes quiet and keeps the upper bits of its payload.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the rounding of f64 to f32 is what is wanted; the payload is cut")]
pub(super) const fn narrow_f64(bits: u64) -> u32 {
    let sign = (bits >> 32) as u32 & F32_SIGN;
    let nan = sign | F32_INFINITY | F32_QUIET | ((bits >> 29) as u32 & 0x007f_ffff);
    select(bits & (u64::MAX >> 1) > 0x7ff0_0000_0000_0000, nan, (f64::from_bits(bits) as f32).to_bits())
}

/// Bits of the f64 with the value of these f32 bits; a NaN becomes quiet and keeps its payload.
#[inline(always)]
pub(super) fn widen_f32(bits: u32) -> u64 {
    let wide = u64::from(bits);
    let nan = (wide & u64::from(F32_SIGN)) << 32 | 0x7ff8_0000_0000_0000 | (wide & 0x007f_ffff) << 29;
    if bits & !F32_SIGN > F32_INFINITY { nan } else { f64::from(f32::from_bits(bits)).to_bits() }
}

/// Bits of the f32 with the value of the `F8_E8M0` `exponent`: 2^(exponent - 127), 0xff being NaN.
pub(super) const fn widen_e8m0(exponent: u8) -> u32 {
    match exponent {
        0 => 0x0040_0000,
        0xff => F32_INFINITY | F32_QUIET,
        exponent => (exponent as u32) << 23,
    }
}

/// The NaN that x86 gives for an invalid operation such as `inf * 0`; numpy and torch on x86 give the same.
const F32_INDEFINITE: u32 = F32_SIGN | F32_INFINITY | F32_QUIET;

#[inline(always)]
pub(super) const fn is_nan(bits: u32) -> bool {
    bits & !F32_SIGN > F32_INFINITY
}

/// Replaces `computed`, if it is a NaN, as x86 does: by the first NaN operand made quiet, or else by the indefinite NaN.
/// Needed because Rust leaves the NaN payload of `f32` arithmetic to compiler and processor.
#[inline(always)]
const fn propagate_nan(left: u32, right: u32, computed: u32) -> u32 {
    let invalid = select(is_nan(right), right | F32_QUIET, F32_INDEFINITE);
    select(is_nan(computed), select(is_nan(left), left | F32_QUIET, invalid), computed)
}

/// Product of two f32, as bits.
#[inline(always)]
pub(super) fn multiply(left: u32, right: u32) -> u32 {
    propagate_nan(left, right, (f32::from_bits(left) * f32::from_bits(right)).to_bits())
}

/// Product of two f32 where subnormal operands and products become zeros of the same sign, as x86 computes with the
/// FTZ and DAZ bits set.
#[inline(always)]
pub(super) fn multiply_flush(left: u32, right: u32) -> u32 {
    let flush = |bits: u32| select(bits & F32_INFINITY == 0, bits & F32_SIGN, bits);
    let (left, right) = (flush(left), flush(right));
    // A product is tiny if it is below the smallest normal after rounding to 24 bits with unlimited exponents. The f64
    // product is exact, so the test is too; 2^-126 - 2^-151 is the tie that rounds up.
    let exact = f64::from(f32::from_bits(left)) * f64::from(f32::from_bits(right));
    let product = multiply(left, right);
    select(exact.abs() < f64::from_bits(0x380f_ffff_f000_0000), product & F32_SIGN, product)
}

/// Quotient of two f32, as bits.
#[inline(always)]
pub(super) fn divide(left: u32, right: u32) -> u32 {
    propagate_nan(left, right, (f32::from_bits(left) / f32::from_bits(right)).to_bits())
}

/// Difference of two f32, as bits.
#[inline(always)]
pub(super) fn subtract(left: u32, right: u32) -> u32 {
    propagate_nan(left, right, (f32::from_bits(left) - f32::from_bits(right)).to_bits())
}

/// Sum of two f32, as bits.
#[inline(always)]
pub(super) fn add(left: u32, right: u32) -> u32 {
    propagate_nan(left, right, (f32::from_bits(left) + f32::from_bits(right)).to_bits())
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "exact results are the point")]
mod tests {
    use super::*;

    #[test]
    fn every_narrow_value_survives_widening_and_narrowing() {
        for (format, count) in [(F16, 1 << 16), (F8E5M2, 256), (F8E4M3, 256), (F8E4M3_FNUZ, 256), (F8E5M2_FNUZ, 256)] {
            for bits in 0..count {
                let wide = format.widen(bits);
                if !f32::from_bits(wide).is_nan() || format == F16 {
                    assert_eq!(format.narrow(wide), bits, "{format:?} {bits:#x} through {wide:#x}");
                }
            }
        }
    }

    #[test]
    fn tie_of_the_flush_is_where_it_should_be() {
        assert_eq!(f64::from_bits(0x380f_ffff_f000_0000), 2f64.powi(-126) - 2f64.powi(-151));
    }

    /// Against the processor itself with FTZ and DAZ set.
    #[cfg(target_arch = "x86_64")]
    #[test]
    #[allow(unsafe_code)]
    fn flushing_agrees_with_the_processor() {
        fn hardware(left: u32, right: u32) -> u32 {
            let mut result = left;
            let (mut saved, mut flushing) = (0_u32, 0_u32);
            // SAFETY: the control register is saved, changed for one multiplication and restored within the block.
            unsafe {
                std::arch::asm!(
                    "stmxcsr [{saved}]",
                    "mov {word:e}, [{saved}]",
                    "or {word:e}, 0x8040",
                    "mov [{flushing}], {word:e}",
                    "ldmxcsr [{flushing}]",
                    "movd {left}, {result:e}",
                    "movd {right}, {factor:e}",
                    "mulss {left}, {right}",
                    "movd {result:e}, {left}",
                    "ldmxcsr [{saved}]",
                    saved = in(reg) &raw mut saved,
                    flushing = in(reg) &raw mut flushing,
                    word = out(reg) _,
                    factor = in(reg) right,
                    result = inout(reg) result,
                    left = out(xmm_reg) _,
                    right = out(xmm_reg) _,
                );
            }
            result
        }
        let mut state = 0x9e37_79b9_u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        for round in 0..2_000_000_u32 {
            let (left, mut right) = (next(), next());
            if round % 2 == 0 {
                // Aim the product at the border of the normal numbers.
                let exponent = 127_u32.wrapping_sub((left >> 23) & 0xff) & 0xff;
                right = (right & 0x807f_ffff) | (exponent << 23);
            }
            assert_eq!(multiply_flush(left, right), hardware(left, right), "{left:#x} * {right:#x}");
        }
        // 2^-126 less 1.5 times 2^-151: tiny, although the nearest subnormal grid point is normal.
        for (left, right) in [(0x3f7f_ffff, 0x0080_0000), (0x3fff_fffd, 0x0040_0001), (0x1f80_0001, 0x207f_fffe)] {
            assert_eq!(multiply_flush(left, right), hardware(left, right), "{left:#x} * {right:#x}");
        }
    }

    #[test]
    fn landmarks() {
        let narrow = |format: Format, value: f32| format.narrow(value.to_bits());
        assert_eq!(narrow(F16, 65504.0), 0x7bff);
        assert_eq!(narrow(F16, 65519.996), 0x7bff);
        assert_eq!(narrow(F16, 65520.0), 0x7c00);
        assert_eq!(narrow(F16, -1e-8), 0x8000);
        assert_eq!(narrow(F16, 2f32.powi(-25)), 0, "tie to even zero");
        assert_eq!(F16.narrow(0x3300_0001), 1, "just above the tie");
        assert_eq!(F16.narrow(0x7f80_0001), 0x7c01);
        assert_eq!(narrow(F8E4M3, 448.0), 0x7e);
        assert_eq!(narrow(F8E4M3, 464.0), 0x7e, "tie to even");
        assert_eq!(narrow(F8E4M3, -464.01), 0xff);
        assert_eq!(narrow(F8E4M3, f32::INFINITY), 0x7f);
        assert_eq!(narrow(F8E5M2, 57344.0), 0x7b);
        assert_eq!(narrow(F8E5M2, -61440.0), 0xfc);
        assert_eq!(narrow(F8E4M3_FNUZ, -0.0), 0);
        assert_eq!(narrow(F8E4M3_FNUZ, 240.0), 0x7f);
        assert_eq!(narrow(F8E4M3_FNUZ, -248.0), 0x80);
        assert_eq!(narrow(F8E5M2_FNUZ, f32::NAN), 0x80);
        assert_eq!(narrow_bf16(0x7f7f_8000), 0x7f80);
        assert_eq!(narrow_bf16(0xff80_0001), 0xffc0);
        assert_eq!(narrow_bf16(0x0000_8001), 0x0001, "subnormals stay");
        assert_eq!(narrow_f64(0x7ff0_0000_0000_0001), 0x7fc0_0000);
        assert_eq!(widen_f32(0x7f80_0001), 0x7ff8_0000_2000_0000);
        assert_eq!(f32::from_bits(widen_e8m0(0)), 2f32.powi(-127));
        assert_eq!(f32::from_bits(widen_e8m0(127)), 1.0);
        assert!(f32::from_bits(widen_e8m0(255)).is_nan());
    }
}
