//! The exponential function of the reference, in integers: a sum of the series with 63 bits after the point.

use super::arithmetic::narrow;

/// `ln 2` times 2^118, rounded down.
const LN_2: i128 = 230_337_659_399_915_326_306_586_076_918_119_613;
/// Bits after the point of the series.
const PLACES: u32 = 63;

/// F32 bits of the number nearest to `e^x`, ties to even. A NaN becomes quiet and keeps its payload.
///
/// # Panics
/// Never: the bounds of each shift are checked before it.
pub fn exp(bits: u32) -> u32 {
    let x = f32::from_bits(bits);
    if x.is_nan() {
        return bits | 0x0040_0000;
    }
    if x.abs() < 2f32.powi(-26) {
        // Nearer to 1 than half of the distance to its neighbours.
        return 1f32.to_bits();
    }
    if x > 89.0 {
        return f32::INFINITY.to_bits();
    }
    if x < -104.0 {
        // Less than half of the smallest number, 2^-149.
        return 0;
    }
    // A normal number of at least 2^-26: its last bit is at least 2^-49.
    let mantissa = i128::from(bits % (1 << 23) + (1 << 23));
    let exponent = i32::try_from(bits >> 23 & 0xff).expect("eight bits") - 127 - 23;
    let magnitude = mantissa << (118 + exponent);
    let fixed = if x < 0.0 { -magnitude } else { magnitude };
    let twos = fixed.div_euclid(LN_2);
    let rest = u128::try_from(fixed.rem_euclid(LN_2)).expect("a remainder is not negative") >> (118 - PLACES);
    // 1 + r + r^2/2 + … with r below ln 2.
    let (mut sum, mut term) = (1_u128 << PLACES, 1_u128 << PLACES);
    for n in 1..40 {
        term = ((term * rest) >> PLACES) / n;
        sum += term;
    }
    // 53 bits with a mark for what is below them are exact in f64, and leave one rounding to f32.
    let (kept, cut) = (sum >> 11, sum % (1 << 11));
    let kept = u64::try_from(kept | u128::from(cut > 0)).expect("the sum is below 2");
    #[expect(clippy::cast_precision_loss, reason = "at most 53 bits")]
    let wide = kept as f64;
    let scale = i32::try_from(twos).expect("the argument is below 104") + 11 - 63;
    narrow(wide * 2f64.powi(scale)).to_bits()
}
