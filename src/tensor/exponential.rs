//! The exponential function of f32, correctly rounded: the f32 nearest to `e^x`, ties to even.
//!
//! `x = (32 k + j) ln 2 / 32 + r` with `|r|` below 0.011. Then `e^x = 2^k * 2^(j/32) * e^r`. The second factor comes from a table
//! of two f64 each, the third from a polynomial. The sum keeps its rounding error, so that its relative error stays near 2^-58.
//! It is rounded to odd before the one rounding to f32. Only additions and products of f64 occur, which are the same on all processors.
//! For each of the 2^32 arguments the result was compared with an evaluation in integers of 128 bits (the reference evaluator's).

use super::float::{F32_INFINITY, F32_QUIET, is_nan};

/// `2^(j/32)` as the sum of two f64.
const POWERS: [(u64, u64); 32] = [
    (0x3ff0_0000_0000_0000, 0x0000_0000_0000_0000),
    (0x3ff0_59b0_d315_8574, 0x3c8d_73e2_a475_b465),
    (0x3ff0_b558_6cf9_890f, 0x3c98_a62e_4adc_610b),
    (0x3ff1_1301_d012_5b51, 0xbc96_c510_3944_9b3a),
    (0x3ff1_72b8_3c7d_517b, 0xbc81_9041_b9d7_8a76),
    (0x3ff1_d487_3168_b9aa, 0x3c9e_016e_00a2_643c),
    (0x3ff2_387a_6e75_6238, 0x3c99_b07e_b6c7_0573),
    (0x3ff2_9e9d_f51f_dee1, 0x3c86_12e8_afad_1255),
    (0x3ff3_06fe_0a31_b715, 0x3c86_f46a_d231_82e4),
    (0x3ff3_71a7_373a_a9cb, 0xbc96_3aea_bf42_eae2),
    (0x3ff3_dea6_4c12_3422, 0x3c8a_da09_11f0_9ebc),
    (0x3ff4_4e08_6061_892d, 0x3c48_9b7a_04ef_80d0),
    (0x3ff4_bfda_d536_2a27, 0x3c7d_4397_afec_42e2),
    (0x3ff5_342b_569d_4f82, 0xbc80_7abe_1db1_3cad),
    (0x3ff5_ab07_dd48_5429, 0x3c96_324c_0546_47ad),
    (0x3ff6_247e_b03a_5585, 0xbc93_83c1_7e40_b497),
    (0x3ff6_a09e_667f_3bcd, 0xbc9b_dd34_13b2_6456),
    (0x3ff7_1f75_e8ec_5f74, 0xbc81_6e47_8688_7a99),
    (0x3ff7_a114_73eb_0187, 0xbc84_1577_ee04_992f),
    (0x3ff8_2589_994c_ce13, 0xbc9d_4c1d_d415_32d8),
    (0x3ff8_ace5_422a_a0db, 0x3c96_e9f1_5686_4b27),
    (0x3ff9_3737_b0cd_c5e5, 0xbc67_5fc7_81b5_7ebc),
    (0x3ff9_c491_82a3_f090, 0x3c7c_7c46_b071_f2be),
    (0x3ffa_5503_b23e_255d, 0xbc9d_2f6e_db8d_41e1),
    (0x3ffa_e89f_995a_d3ad, 0x3c97_a1cd_345d_cc81),
    (0x3ffb_7f76_f2fb_5e47, 0xbc75_584f_7e54_ac3b),
    (0x3ffc_199b_dd85_529c, 0x3c81_1065_8950_48dd),
    (0x3ffc_b720_dcef_9069, 0x3c75_03cb_d1e9_49db),
    (0x3ffd_5818_dcfb_a487, 0x3c82_ed02_d75b_3707),
    (0x3ffd_fc97_337b_9b5f, 0xbc91_a5cd_4f18_4b5c),
    (0x3ffe_a4af_a2a4_90da, 0xbc9e_9c23_179c_2893),
    (0x3fff_5076_5b6e_4540, 0x3c99_d3e1_2dd8_a18b),
];
/// `ln 2 / 32`, a number of 33 bits and the rest. Products of the first with the multiples that occur are exact.
const STEP: f64 = f64::from_bits(0x3f96_2e42_fef0_0000);
const STEP_REST: f64 = f64::from_bits(0x3d84_73de_6af2_78ed);
/// `32 / ln 2`.
const STEPS_PER_ONE: f64 = 46.166_241_308_446_83;
/// Added to a small number it leaves the nearest integer in the low bits.
const TO_INTEGER: f64 = 6_755_399_441_055_744.0;
/// From here on the result is infinite, and below the negative bound it is zero.
const ARGUMENT_MAX: f32 = 104.0;

/// F32 bits of `e^x` for the f32 `x` of these bits. A NaN becomes quiet and keeps its payload.
pub(super) fn exp(bits: u32) -> u32 {
    if is_nan(bits) {
        return bits | F32_QUIET;
    }
    let x = f32::from_bits(bits);
    if x > ARGUMENT_MAX {
        return F32_INFINITY;
    }
    if x < -ARGUMENT_MAX {
        return 0;
    }
    let x = f64::from(x);
    let shifted = x * STEPS_PER_ONE + TO_INTEGER;
    let steps = shifted - TO_INTEGER;
    // The low bits of the sum are the integer, in two's complement.
    let [low, high, ..] = shifted.to_bits().to_le_bytes();
    let number = i16::from_le_bytes([low, high]);
    let reduced = x - steps * STEP;
    let r = reduced - steps * STEP_REST;
    let r_rest = (reduced - r) - steps * STEP_REST;
    let tail = r * r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r / 5040.0)))));
    let (power, power_rest) = POWERS[usize::from(number.rem_euclid(32).unsigned_abs())];
    let (power, power_rest) = (f64::from_bits(power), f64::from_bits(power_rest));
    let small = power_rest + power * (r + (tail + r_rest));
    let sum = power + small;
    let error = small - (sum - power);
    let scale = f64::from_bits(u64::from((1023 + number.div_euclid(32)).unsigned_abs()) << 52);
    rounded(odd(sum, error) * scale)
}

/// The sum of a positive `sum` and its small `error`, rounded to odd: of the two neighbours, the one with an odd last bit.
fn odd(sum: f64, error: f64) -> f64 {
    let bits = sum.to_bits();
    if bits % 2 == 1 || error == 0.0 {
        return sum;
    }
    f64::from_bits(if error > 0.0 { bits + 1 } else { bits - 1 })
}

#[allow(clippy::cast_possible_truncation, reason = "the one rounding, to nearest with ties to even")]
fn rounded(value: f64) -> u32 {
    (value as f32).to_bits()
}

/// Replaces values by their exponentials.
pub(super) fn exp_all(values: &mut [[u8; 4]]) {
    for value in values {
        *value = exp(u32::from_le_bytes(*value)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn landmarks() {
        // Arguments and results in bits; around the greatest result, the smallest normal one, and zero.
        let rows = [
            (0, 0x3f80_0000),
            (0x8000_0000, 0x3f80_0000),
            (0x3f80_0000, 0x402d_f854),
            (0xbf80_0000, 0x3ebc_5ab2),
            (0x3f31_7218, 0x4000_0000),
            (0x42b1_7217, 0x7f7f_ff84),
            (0x42b1_7218, 0x7f80_0000),
            (0x7f80_0000, 0x7f80_0000),
            (0xff80_0000, 0),
            (0xc2ae_ac50, 0x007f_ffe6),
            (0xc2ae_ac4f, 0x0080_0026),
            (0xc2cf_f1b4, 1),
            (0xc2cf_f1b6, 0),
        ];
        for (x, expected) in rows {
            assert_eq!(exp(x), expected, "{}", f32::from_bits(x));
        }
        assert_eq!(exp(0xff80_0001), 0xffc0_0001, "a NaN becomes quiet");
    }
}
