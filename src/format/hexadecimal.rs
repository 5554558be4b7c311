//! Bytes that fixtures write as text.

/// The bytes that pairs of hexadecimal digits stand for.
pub(super) fn bytes_of(digits: &str) -> Vec<u8> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    assert!(rest.is_empty(), "an even number of digits");
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    pairs.iter().map(byte).collect()
}
