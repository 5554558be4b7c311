//! The header of `.npy` files, version 1.
//!
//! A file is `\x93NUMPY`, the bytes 1 and 0, a `u16` length, that many bytes of a Python dictionary ended by a line feed,
//! then the elements:
//!
//! ```text
//! {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
//! ```
//!
//! numpy has no names of its own for `bfloat16` and the 8-bit floats. `descr` gives them as `np.save` writes arrays of
//! `ml_dtypes`: as opaque bytes of their width, `<V2` and `|V1`. Such a file opens everywhere, `array.view(dtype)` makes it
//! what it is, and a program that forgets to is stopped by its first arithmetic, where integers of the same width would
//! silently be taken for numbers.
//!
//! Own code, because `npyz` (0.9) writes a header only together with its elements and brings 25 crates to read a dictionary.

use ckfs_tensor::DType;

/// Bytes before the dictionary.
const PREFIX_BYTES: usize = 10;

/// Type and shape of an array as numpy sees it.
///
/// Types narrower than a byte, which numpy cannot pack, become `uint8` with the last axis counting bytes, or a single axis of
/// bytes where rows do not fill whole bytes.
///
/// # Panics
/// If the elements do not fill whole bytes.
pub fn described(dtype: DType, shape: &[u64]) -> (&'static str, Vec<u64>) {
    let unit = dtype.unit();
    let mut shape = shape.to_vec();
    if unit.elements > 1 {
        match shape.last_mut() {
            Some(last) if last.is_multiple_of(unit.elements) => *last = *last / unit.elements * unit.bytes,
            Some(_) | None => shape = vec![dtype.bytes_of(shape.iter().product()).expect("arrays are whole bytes")],
        }
    }
    (descr(dtype), shape)
}

/// The code of a type that numpy has itself.
pub(super) const fn code(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::Bool => "|b1",
        DType::U8 => "|u1",
        DType::I8 => "|i1",
        DType::I16 => "<i2",
        DType::U16 => "<u2",
        DType::F16 => "<f2",
        DType::I32 => "<i4",
        DType::U32 => "<u4",
        DType::F32 => "<f4",
        DType::C64 => "<c8",
        DType::F64 => "<f8",
        DType::I64 => "<i8",
        DType::U64 => "<u8",
        DType::F4 | DType::F6E2M3 | DType::F6E3M2 => return None,
        DType::F8E5M2 | DType::F8E4M3 | DType::F8E8M0 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz | DType::BF16 => {
            return None;
        }
    })
}

fn descr(dtype: DType) -> &'static str {
    code(dtype).unwrap_or(match dtype.element_bytes() {
        None => "|u1",
        Some(1) => "|V1",
        Some(_) => "<V2",
    })
}

/// The header of an array, padded with spaces so that the elements start at a multiple of `alignment`.
///
/// With at most 8 axes the dictionary has some 250 bytes, so any alignment up to 32 KiB fits the `u16` length; numpy by
/// default refuses dictionaries of more than 10 000 bytes.
///
/// # Panics
/// If `alignment` is 0 or more than 32 KiB, or the elements do not fill whole bytes.
pub fn header(dtype: DType, shape: &[u64], alignment: usize) -> Vec<u8> {
    assert!((1..=1 << 15).contains(&alignment), "alignment {alignment}");
    let (descr, shape) = described(dtype, shape);
    let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
    let comma = if extents.len() == 1 { "," } else { "" };
    let dictionary =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}{comma}), }}", extents.join(", "));
    let len = (PREFIX_BYTES + dictionary.len() + 1).next_multiple_of(alignment);
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(len - PREFIX_BYTES).expect("8 axes of 20 digits and 32 KiB fit").to_le_bytes());
    bytes.extend(dictionary.as_bytes());
    bytes.resize(len - 1, b' ');
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_those_of_numpy() {
        let rows: [(DType, &[u64], &str); 5] = [
            (DType::F32, &[], "{'descr': '<f4', 'fortran_order': False, 'shape': (), }"),
            (DType::BF16, &[3], "{'descr': '<V2', 'fortran_order': False, 'shape': (3,), }"),
            (DType::Bool, &[0, 5], "{'descr': '|b1', 'fortran_order': False, 'shape': (0, 5), }"),
            (DType::F4, &[3, 6], "{'descr': '|u1', 'fortran_order': False, 'shape': (3, 3), }"),
            (DType::F6E2M3, &[4, 3], "{'descr': '|u1', 'fortran_order': False, 'shape': (9,), }"),
        ];
        for (dtype, shape, dictionary) in rows {
            for alignment in [1, 64, 4096] {
                let header = header(dtype, shape, alignment);
                assert_eq!(header.len() % alignment, 0);
                assert_eq!(usize::from(u16::from_le_bytes([header[8], header[9]])), header.len() - 10);
                assert_eq!(std::str::from_utf8(&header[10..]).unwrap().trim_end(), dictionary);
                assert_eq!(header.last(), Some(&b'\n'));
            }
        }
    }

    #[test]
    fn every_descr_has_the_width_of_its_type() {
        for dtype in DType::ALL {
            let width: u64 = descr(*dtype)[2..].parse().unwrap();
            assert_eq!(dtype.element_bytes().unwrap_or(1), width, "{dtype}");
        }
    }
}
