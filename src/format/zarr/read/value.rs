//! Element types and single elements as descriptions write them.

use ckfs_tensor::DType;
use half::{bf16, f16};
use serde_json::Value;

use super::codec::{self, shortened, wrong};
use crate::FormatError;
use crate::zarr::write;

/// The bytes of one element, little-endian.
pub(super) type ElementBytes = smallvec::SmallVec<[u8; 8]>;

/// Types of zarr that this crate has not, with the reason.
fn unsupported(found: &str) -> FormatError {
    let advice = match found {
        "int4" | "uint4" | "int2" | "uint2" | "float4_e2m1fn" | "float6_e2m3fn" | "float6_e3m2fn" => {
            ": it is stored one element to a byte, and no safetensors type is"
        }
        _ => ": no safetensors type is like it",
    };
    codec::unsupported("element type", format_args!("{:?}", shortened(found)), advice)
}

/// The type that version 3 calls so.
pub(super) fn dtype_v3(found: &Value) -> Result<DType, FormatError> {
    let Value::String(name) = found else { return Err(unsupported(&found.to_string())) };
    let dtype = DType::ALL.iter().copied().find(|dtype| dtype.name() == name && dtype.element_bytes().is_some());
    dtype.ok_or_else(|| unsupported(name))
}

/// The type that version 2 calls so, and whether its highest byte is the first.
pub(super) fn dtype_v2(found: &Value) -> Result<(DType, bool), FormatError> {
    let Value::String(code) = found else { return Err(unsupported(&found.to_string())) };
    let find = |code: &str| DType::ALL.iter().copied().find(|dtype| write::code(*dtype) == Some(code));
    if let Some(dtype) = find(code) {
        return Ok((dtype, false));
    }
    // Elements of one byte may name an order of bytes.
    let other = code.get(..1).zip(code.get(1..)).and_then(|(order, rest)| match order {
        ">" => find(&format!("<{rest}")).or_else(|| find(&format!("|{rest}"))).map(|dtype| (dtype, true)),
        "<" => find(&format!("|{rest}")).map(|dtype| (dtype, false)),
        _ => None,
    });
    other.ok_or_else(|| unsupported(code))
}

/// The element that fills what is not stored, little-endian. `null` is zero, as for the writers of version 2.
pub(super) fn fill(found: &Value, dtype: DType) -> Result<ElementBytes, FormatError> {
    let refused = || wrong("fill_value", format!("an element of {}", dtype.name()), found);
    let len = dtype.element_bytes().map(ckfs_tensor::to_usize).ok_or_else(refused)?;
    if found.is_null() {
        return Ok(ElementBytes::from_elem(0, len));
    }
    let element = ElementBytes::from_slice;
    let bytes = match dtype {
        DType::Bool => {
            let truth = found.as_bool().map(u8::from);
            let truth = truth.or_else(|| u8::try_from(found.as_u64()?).ok().filter(|number| *number <= 1));
            truth.map(|truth| element(&[truth]))
        }
        DType::C64 => complex(found),
        DType::F64 => float(found, len, |number| Some(element(&number.to_le_bytes()))),
        DType::F32 => single(found),
        DType::F16 => float(found, len, |number| Some(element(&f16::from_f64(number).to_le_bytes()))),
        DType::BF16 => float(found, len, |number| Some(element(&bf16::from_f64(number).to_le_bytes()))),
        DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
            integer(found, dtype, len)
        }
        DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::F8E5M2
        | DType::F8E4M3
        | DType::F8E8M0
        | DType::F8E4M3Fnuz
        | DType::F8E5M2Fnuz => {
            // Zero is all that Orbax fills floats of 8 bits with. Its bits are zero; tensorstore takes these for the type that
            // has no zero, too.
            let is_zero = |number: f64| number == 0.0 && number.is_sign_positive();
            float(found, len, |number| is_zero(number).then(|| ElementBytes::from_elem(0, len)))
        }
    };
    bytes.ok_or_else(refused)
}

fn integer(found: &Value, dtype: DType, len: usize) -> Option<ElementBytes> {
    let is_signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let number = found.as_i64().map(i128::from).or_else(|| found.as_u64().map(i128::from))?;
    let bits = dtype.bits();
    let range = if is_signed { -(1 << (bits - 1))..1 << (bits - 1) } else { 0..1 << bits };
    range.contains(&number).then(|| ElementBytes::from_slice(&number.to_le_bytes()[..len]))
}

/// A number, the word for one that JSON has not, or all bits as `0x…`. `element` makes an element of a number.
fn float(found: &Value, len: usize, element: impl FnOnce(f64) -> Option<ElementBytes>) -> Option<ElementBytes> {
    let number = match found.as_str() {
        None => found.as_f64()?,
        Some("NaN") => f64::NAN,
        Some("Infinity") => f64::INFINITY,
        Some("-Infinity") => f64::NEG_INFINITY,
        Some(word) => {
            let digits = word.strip_prefix("0x").filter(|digits| digits.len() == 2 * len)?;
            let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            let bits = u64::from_str_radix(digits, 16).ok().filter(|_| is_hex)?;
            return Some(ElementBytes::from_slice(&bits.to_le_bytes()[..len]));
        }
    };
    element(number)
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is asked for")]
fn single(found: &Value) -> Option<ElementBytes> {
    float(found, 4, |number| Some(ElementBytes::from_slice(&(number as f32).to_le_bytes())))
}

fn complex(found: &Value) -> Option<ElementBytes> {
    let [real, imaginary] = found.as_array()?.as_slice() else { return None };
    let mut bytes = single(real)?;
    bytes.extend(single(imaginary)?);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_are_named_as_each_version_names_them() {
        let rows = [
            ("<f4", DType::F32, false),
            (">f4", DType::F32, true),
            ("|b1", DType::Bool, false),
            ("<b1", DType::Bool, false),
            (">i1", DType::I8, true),
            ("bfloat16", DType::BF16, false),
            ("float8_e4m3fn", DType::F8E4M3, false),
        ];
        for (code, dtype, is_big_endian) in rows {
            assert_eq!(dtype_v2(&json!(code)), Ok((dtype, is_big_endian)), "{code}");
        }
        assert_eq!(dtype_v3(&json!("float8_e5m2")), Ok(DType::F8E5M2));
        for name in ["int4", "complex128", "float4_e2m1fn", "|S3", ">bfloat16", "", "é"] {
            assert!(dtype_v2(&json!(name)).is_err(), "{name}");
            assert!(dtype_v3(&json!(name)).is_err(), "{name}");
        }
        assert!(dtype_v2(&json!([["a", "<f4"]])).is_err());
    }

    #[test]
    fn fill_values_are_elements() {
        let rows = [
            (json!(null), DType::F32, vec![0; 4]),
            (json!(1.5), DType::F32, 1.5_f32.to_le_bytes().to_vec()),
            (json!(0.1), DType::F32, 0.1_f32.to_le_bytes().to_vec()),
            (json!(1), DType::BF16, vec![0x80, 0x3f]),
            (json!("NaN"), DType::F64, f64::NAN.to_le_bytes().to_vec()),
            (json!("-Infinity"), DType::F16, vec![0, 0xfc]),
            (json!("0x7fc1"), DType::BF16, vec![0xc1, 0x7f]),
            (json!(0.0), DType::F8E4M3, vec![0]),
            (json!("0x38"), DType::F8E4M3, vec![0x38]),
            (json!(0.0), DType::F8E8M0, vec![0]),
            (json!(-2), DType::I16, vec![0xfe, 0xff]),
            (json!(u64::MAX), DType::U64, vec![0xff; 8]),
            (json!(i64::MIN), DType::I64, vec![0, 0, 0, 0, 0, 0, 0, 0x80]),
            (json!(true), DType::Bool, vec![1]),
            (json!([0.0, "NaN"]), DType::C64, [0_f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat()),
        ];
        for (value, dtype, bytes) in rows {
            assert_eq!(fill(&value, dtype).map(|bytes| bytes.to_vec()), Ok(bytes), "{value} {dtype}");
        }
        let refused = [
            (json!(256), DType::U8),
            (json!(-1), DType::U32),
            (json!(1.5), DType::I32),
            (json!(2), DType::Bool),
            (json!(1), DType::F8E4M3),
            (json!(-0.0), DType::F8E4M3Fnuz),
            (json!("0x+1"), DType::F16),
            (json!("0x123"), DType::F16),
            (json!("nan"), DType::F32),
            (json!([1]), DType::C64),
            (json!({}), DType::F32),
        ];
        for (value, dtype) in refused {
            assert!(fill(&value, dtype).is_err(), "{value} {dtype}");
        }
    }
}
