use super::*;

/// Written by `tests/python/gguf_tables.py` from what `gguf.quants.dequantize` makes of the same blocks.
const DIGESTS: &str = include_str!("digests.txt");

#[test]
fn blocks_decode_as_the_gguf_package_decodes_them() {
    let mut count = 0;
    for line in DIGESTS.lines() {
        let (name, numbers) = line.split_once(' ').unwrap();
        let numbers: Vec<u32> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
        let [code, elements, bytes, digest] = numbers[..] else { panic!("{line}") };
        let of = BlockType::of(code).unwrap_or_else(|| panic!("{name}"));
        assert_eq!((of.name(), of.elements(), of.bytes()), (name, elements.into(), bytes.into()));
        let mut state = u64::from(code);
        let stored: Vec<u8> = (0..64 * bytes)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56).to_le_bytes()[0]
            })
            .collect();
        let mut target = vec![0; 64 * elements as usize * 4];
        of.decode(&stored, &mut target);
        for value in target.as_chunks_mut::<4>().0 {
            if f32::from_le_bytes(*value).is_nan() {
                *value = 0x7fc0_0000u32.to_le_bytes();
            }
        }
        assert_eq!(crc32fast::hash(&target), digest, "{name}");
        count += 1;
    }
    assert_eq!(count, TYPES.len());
}
