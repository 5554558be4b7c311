//! Arithmetic of the reference, on the bits of elements.
//!
//! Values that a type cannot represent become the same as in `ml_dtypes` and numpy:
//!
//! | target | too large | NaN | negative zero |
//! | --- | --- | --- | --- |
//! | F64, F32 | infinity | quiet, payload kept as far as it fits | kept |
//! | F16 | infinity | upper payload bits kept; 1 if they are all zero | kept |
//! | BF16 | infinity | `0x7fc0` and the sign | kept |
//! | `F8_E5M2` | infinity | `0x7e` and the sign | kept |
//! | `F8_E4M3` | NaN | `0x7f` and the sign | kept |
//! | `F8_E4M3FNUZ`, `F8_E5M2FNUZ` | NaN | `0x80` | zero |
//!
//! NaNs of the 8-bit types widen to the quiet f32 NaN of their sign; those of F16 and BF16 keep their payload.

use std::cmp::Ordering;

use ckfs_tensor::DType;
use half::{bf16, f16};

/// Sign of an f32.
const SIGN: u32 = 1 << 31;
/// Positive infinity.
const INFINITY: u32 = 0x7f80_0000;
/// The bit that makes an f32 NaN quiet.
const QUIET: u32 = 0x0040_0000;

const fn is_nan(bits: u32) -> bool {
    bits & !SIGN > INFINITY
}

/// A float of eight bits: a sign, then an exponent, then `mantissa` bits.
#[derive(Clone, Copy, Debug)]
struct Octet {
    mantissa: i32,
    bias: i32,
    /// The last code, without its sign, that is a number.
    last: u8,
    /// The code of positive infinity.
    infinity: Option<u8>,
    /// The code of NaN, without its sign; `0x80` if NaN has the code of negative zero.
    nan: u8,
}

const OCTETS: [(DType, Octet); 4] = [
    (DType::F8E4M3, Octet { mantissa: 3, bias: 7, last: 0x7e, infinity: None, nan: 0x7f }),
    (DType::F8E5M2, Octet { mantissa: 2, bias: 15, last: 0x7b, infinity: Some(0x7c), nan: 0x7e }),
    (DType::F8E4M3Fnuz, Octet { mantissa: 3, bias: 8, last: 0x7f, infinity: None, nan: 0x80 }),
    (DType::F8E5M2Fnuz, Octet { mantissa: 2, bias: 16, last: 0x7f, infinity: None, nan: 0x80 }),
];

fn octet(dtype: DType) -> Option<Octet> {
    OCTETS.iter().find(|(of, _)| *of == dtype).map(|(_, octet)| *octet)
}

impl Octet {
    /// The value of a code without its sign, if all codes were numbers.
    fn magnitude(self, code: u8) -> f64 {
        let steps = 1 << self.mantissa;
        let (exponent, fraction) = (i32::from(code / steps), f64::from(code % steps) / f64::from(steps));
        if exponent == 0 {
            fraction * 2f64.powi(1 - self.bias)
        } else {
            (1.0 + fraction) * 2f64.powi(exponent - self.bias)
        }
    }

    fn widen(self, code: u8) -> u32 {
        let sign = if code >= 0x80 { SIGN } else { 0 };
        let unsigned = code % 0x80;
        if code == self.nan {
            sign | INFINITY | QUIET
        } else if unsigned <= self.last {
            sign | narrow(self.magnitude(unsigned)).to_bits()
        } else if Some(unsigned) == self.infinity {
            sign | INFINITY
        } else {
            sign | INFINITY | QUIET
        }
    }

    fn round(self, bits: u32) -> u8 {
        if is_nan(bits) {
            return self.nan | if bits >= SIGN { 0x80 } else { 0 };
        }
        let value = f64::from(f32::from_bits(bits).abs());
        // Bisects for the last number that is not above the value. The one after it may be the first beyond all numbers.
        let (mut below, mut above) = (0, self.last + 1);
        while above - below > 1 {
            let middle = below + (above - below) / 2;
            if self.magnitude(middle) <= value { below = middle } else { above = middle }
        }
        let tie = f64::midpoint(self.magnitude(below), self.magnitude(below + 1));
        let nearest = match value.total_cmp(&tie) {
            Ordering::Less => below,
            Ordering::Equal => below + below % 2,
            Ordering::Greater => below + 1,
        };
        let unsigned = if nearest > self.last { self.infinity.unwrap_or(self.nan) } else { nearest };
        if bits >= SIGN && !(unsigned == 0 && self.nan == 0x80) { unsigned | 0x80 } else { unsigned }
    }
}

/// The f32 nearest to a value that is not NaN.
#[expect(clippy::cast_possible_truncation, reason = "rounds to nearest, ties to even")]
pub(super) const fn narrow(value: f64) -> f32 {
    value as f32
}

/// F32 bits of the value of an element; exact, except that F64 is rounded.
///
/// # Panics
/// If the type is not a float that ckfs converts, nor the scale type `F8_E8M0`: views exclude it.
pub fn widen(dtype: DType, bits: u64) -> u32 {
    let [code, upper, ..] = bits.to_le_bytes();
    let word = u16::from_le_bytes([code, upper]);
    if let Some(octet) = octet(dtype) {
        octet.widen(code)
    } else if dtype == DType::F64 {
        let value = f64::from_bits(bits);
        let payload = u32::try_from(bits >> 29 & 0x003f_ffff).expect("22 bits");
        let sign = if value.is_sign_negative() { SIGN } else { 0 };
        if value.is_nan() { sign | INFINITY | QUIET | payload } else { narrow(value).to_bits() }
    } else if dtype == DType::F32 {
        u32::try_from(bits).expect("an F32 has 32 bits")
    } else if dtype == DType::BF16 {
        u32::from(word) * 0x1_0000
    } else if dtype == DType::F16 && f16::from_bits(word).is_nan() {
        (if word >= 0x8000 { SIGN } else { 0 }) + INFINITY + u32::from(word % 0x400) * 0x2000
    } else if dtype == DType::F16 {
        f16::from_bits(word).to_f32().to_bits()
    } else {
        assert!(dtype == DType::F8E8M0, "{dtype} has no value in f32");
        if code == 0xff { INFINITY | QUIET } else { narrow(2f64.powi(i32::from(code) - 127)).to_bits() }
    }
}

/// The element of `dtype` nearest to the f32 of these bits, ties to even.
///
/// # Panics
/// If the type is not a float that ckfs converts, and not U8 of a whole number: views exclude it.
pub fn round(dtype: DType, bits: u32) -> u64 {
    let value = f32::from_bits(bits);
    let negative = bits >= SIGN;
    if let Some(octet) = octet(dtype) {
        u64::from(octet.round(bits))
    } else if dtype == DType::F64 && is_nan(bits) {
        let payload = u64::from(bits % QUIET) * (1 << 29);
        (if negative { 1 << 63 } else { 0 }) + 0x7ff8_0000_0000_0000 + payload
    } else if dtype == DType::F64 {
        f64::from(value).to_bits()
    } else if dtype == DType::F32 {
        u64::from(bits)
    } else if dtype == DType::BF16 && is_nan(bits) {
        (if negative { 0x8000 } else { 0 }) + 0x7fc0
    } else if dtype == DType::BF16 {
        u64::from(bf16::from_f32(value).to_bits())
    } else if dtype == DType::F16 && is_nan(bits) {
        let payload = u64::from(bits % 0x0080_0000 / 0x2000).max(1);
        (if negative { 0x8000 } else { 0 }) + 0x7c00 + payload
    } else if dtype == DType::F16 {
        u64::from(f16::from_f32(value).to_bits())
    } else {
        assert!(dtype == DType::U8, "nothing is rounded to {dtype}");
        let byte = (0..=u8::MAX).find(|byte| f32::from(*byte).to_bits() == bits);
        u64::from(byte.expect("bytes of packed codes are whole numbers below 256"))
    }
}

/// The operation on two f32 of these bits. A NaN operand, the first if both are, becomes quiet and keeps its payload. If
/// numbers give NaN, the result is the negative quiet NaN, as on x86 processors.
fn arithmetic(left: u32, right: u32, operation: impl Fn(f32, f32) -> f32) -> u32 {
    if is_nan(left) {
        return left | QUIET;
    }
    if is_nan(right) {
        return right | QUIET;
    }
    let result = operation(f32::from_bits(left), f32::from_bits(right)).to_bits();
    if is_nan(result) { SIGN | INFINITY | QUIET } else { result }
}

/// Zero of the same sign for subnormals; everything else unchanged.
fn flushed(bits: u32) -> u32 {
    if f32::from_bits(bits).is_subnormal() { bits & SIGN } else { bits }
}

/// F32 bits of a product. With `flush`, subnormal operands count as zero. Products that are subnormal when rounded with
/// unlimited exponents become zero, as on processors in that mode.
pub fn multiply(left: u32, right: u32, flush: bool) -> u32 {
    if !flush {
        return arithmetic(left, right, |a, b| a * b);
    }
    arithmetic(flushed(left), flushed(right), |a, b| {
        // 2^64 times the product, which is exact in f64: far from the subnormals, so that rounding is ordinary.
        let scaled = narrow(f64::from(a) * f64::from(b) * 2f64.powi(64));
        if scaled.abs() < 2f32.powi(64 - 126) { 0f32.copysign(scaled) } else { a * b }
    })
}

/// F32 bits of a quotient.
pub fn divide(left: u32, right: u32) -> u32 {
    arithmetic(left, right, |a, b| a / b)
}

/// F32 bits of a difference.
pub fn subtract(left: u32, right: u32) -> u32 {
    arithmetic(left, right, |a, b| a - b)
}

/// F32 bits of a sum.
pub fn add(left: u32, right: u32) -> u32 {
    arithmetic(left, right, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc32(bytes: impl IntoIterator<Item = u8>) -> u32 {
        !bytes.into_iter().fold(!0, |crc: u32, byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (0xedb8_8320 * (crc & 1)))
        })
    }

    /// CRC-32 of the bytes of `arange(2**bits).view(dtype).astype(float32)` in numpy 2.4.6 and `ml_dtypes` 0.6.0.
    #[test]
    fn all_patterns_widen_as_in_numpy_and_ml_dtypes() {
        for (dtype, expected) in [
            (DType::F16, 0xe0c0_69f3),
            (DType::BF16, 0x093b_1249),
            (DType::F8E4M3, 0xc266_6a8c),
            (DType::F8E5M2, 0x0788_ceec),
            (DType::F8E4M3Fnuz, 0x7ca1_0122),
            (DType::F8E5M2Fnuz, 0x87b9_aaf4),
            (DType::F8E8M0, 0x7199_79ba),
        ] {
            let all = (0..1 << dtype.bits()).flat_map(|bits| widen(dtype, bits).to_le_bytes());
            assert_eq!(crc32(all), expected, "{dtype}");
        }
    }

    /// The result of the same libraries' `.astype(dtype)` of f32: all upper halves with nine lower halves around ties.
    #[test]
    fn f32_rounds_as_in_numpy_and_ml_dtypes() {
        for (dtype, expected) in [
            (DType::F16, 0x6ec0_f9a6),
            (DType::BF16, 0xec61_c631),
            (DType::F8E4M3, 0x5356_982f),
            (DType::F8E5M2, 0xbecd_5606),
            (DType::F8E4M3Fnuz, 0xa54a_6ebc),
            (DType::F8E5M2Fnuz, 0xeeae_8a62),
            (DType::F64, 0xdba5_8e9f),
        ] {
            let width = usize::try_from(dtype.bits() / 8).unwrap();
            let lower = [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
            let all = (0..=0xffff).flat_map(|upper: u32| lower.map(|lower| upper << 16 | lower));
            let rounded = all.flat_map(|bits| round(dtype, bits).to_le_bytes().into_iter().take(width));
            assert_eq!(crc32(rounded), expected, "{dtype}");
        }
    }

    #[test]
    fn f64_rounds_to_f32_as_in_numpy() {
        let all = [0, 0x1000_0000, 0x1000_0001, 0x3000_0000];
        let all = all.into_iter().flat_map(|lower| (0..=0xffff).map(move |upper: u64| upper << 48 | lower));
        assert_eq!(crc32(all.flat_map(|bits| widen(DType::F64, bits).to_le_bytes())), 0xed2e_9112);
    }

    #[test]
    fn arithmetic_landmarks() {
        let tiny = f32::MIN_POSITIVE.to_bits();
        let product = |a: f32, b: f32, flush| f32::from_bits(multiply(a.to_bits(), b.to_bits(), flush)).to_bits();
        assert_eq!(product(3.0, -2.0, false), (-6f32).to_bits());
        assert_eq!(product(f32::MIN_POSITIVE, -0.5, false), SIGN | 0x0040_0000);
        assert_eq!(product(f32::MIN_POSITIVE, -0.5, true), SIGN, "a subnormal product");
        assert_eq!(multiply(0x8000_0001, 0x7f00_0000, true), SIGN, "a subnormal operand");
        assert_eq!(multiply(0x7f00_0000, 1, true), 0, "a subnormal constant");
        assert_eq!(multiply(0x00ff_ffff, 0.5f32.to_bits(), false), tiny, "rounds up to a normal number");
        assert_eq!(multiply(0x00ff_ffff, 0.5f32.to_bits(), true), 0, "which it is not with unlimited exponents");
        assert_eq!(multiply(0x7f80_0001, 0x7fc0_0002, false), 0x7fc0_0001, "the first NaN, made quiet");
        assert_eq!(multiply(INFINITY, 0, false), 0xffc0_0000);
        assert_eq!(add(INFINITY, SIGN | INFINITY), 0xffc0_0000);
        assert_eq!(add(1f32.to_bits(), 1e-8f32.to_bits()), 1f32.to_bits());
    }
}
