//! The block types of ggml: how the bytes of a block become f32 elements.
//!
//! Every element is computed as `gguf.quants.dequantize` does: the same operations in the same order, each rounded to f32. A NaN stays
//! a NaN; its other bits depend on the processor, there too. Types that `gguf` does not dequantize (`Q8_1`, `Q8_K`, `Q1_0`) are not here.

use std::sync::LazyLock;

use ckfs_tensor::DType;
use half::f16;

/// Elements of a super-block.
const SUPER: usize = 256;

/// A type of blocks.
#[derive(Debug)]
pub struct BlockType {
    code: u32,
    name: &'static str,
    elements: usize,
    bytes: usize,
    decode: fn(&[u8], &mut [f32]),
}

impl BlockType {
    /// The type of a number in a header; `None` if there is none that is decoded.
    pub(super) fn of(code: u32) -> Option<&'static Self> {
        TYPES.iter().find(|of| of.code == code)
    }

    /// The type whose blocks are single elements of a float type.
    pub fn of_elements(dtype: DType) -> Option<&'static Self> {
        TYPES.iter().find(|of| of.elements == 1 && of.name == dtype.code())
    }

    /// Its name, such as `Q4_K`.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Elements of a block.
    pub const fn elements(&self) -> u64 {
        self.elements as u64
    }

    /// Bytes of a block.
    pub const fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Decodes whole blocks into little-endian f32.
    ///
    /// # Panics
    /// If `stored` or `target` have not the bytes of equally many blocks.
    pub fn decode(&self, stored: &[u8], target: &mut [u8]) {
        assert_eq!(stored.len() / self.bytes * self.elements * 4, target.len(), "blocks of {}", self.name);
        let mut values = [0.0; SUPER];
        let values = &mut values[..self.elements];
        for (block, target) in stored.chunks_exact(self.bytes).zip(target.chunks_exact_mut(self.elements * 4)) {
            (self.decode)(block, values);
            for (value, target) in values.iter().zip(target.as_chunks_mut::<4>().0) {
                *target = value.to_le_bytes();
            }
        }
    }
}

impl PartialEq for BlockType {
    fn eq(&self, other: &Self) -> bool {
        self.code == other.code
    }
}

const fn row(code: u32, name: &'static str, elements: usize, bytes: usize, decode: fn(&[u8], &mut [f32])) -> BlockType {
    BlockType { code, name, elements, bytes, decode }
}

static TYPES: [BlockType; 26] = [
    row(0, "F32", 1, 4, |b, y| y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
    row(1, "F16", 1, 2, |b, y| y[0] = half(b, 0)),
    row(30, "BF16", 1, 2, |b, y| y[0] = f32::from_bits(u32::from(short(b, 0)) << 16)),
    row(2, "Q4_0", 32, 18, |b, y| each(y, |i| half(b, 0) * signed(nibble(&b[2..], i), 8))),
    row(3, "Q4_1", 32, 20, |b, y| each(y, |i| half(b, 0) * float(nibble(&b[4..], i)) + half(b, 2))),
    row(6, "Q5_0", 32, 22, |b, y| each(y, |i| half(b, 0) * signed(five(&b[2..], i), 16))),
    row(7, "Q5_1", 32, 24, |b, y| each(y, |i| half(b, 0) * float(five(&b[4..], i)) + half(b, 2))),
    row(8, "Q8_0", 32, 34, |b, y| each(y, |i| f32::from(b[2 + i].cast_signed()) * half(b, 0))),
    row(10, "Q2_K", SUPER, 84, q2_k),
    row(11, "Q3_K", SUPER, 110, q3_k),
    row(12, "Q4_K", SUPER, 144, |b, y| {
        let scales = minima(b);
        each(y, |i| scaled(&scales, i, nibble_of_64(&b[16..], i)));
    }),
    row(13, "Q5_K", SUPER, 176, |b, y| {
        let scales = minima(b);
        each(y, |i| scaled(&scales, i, nibble_of_64(&b[48..], i) | bit(b[16 + i % 32], i / 32) << 4));
    }),
    row(14, "Q6_K", SUPER, 210, |b, y| {
        let d: [f32; 16] = std::array::from_fn(|at| half(b, 208) * f32::from(b[192 + at].cast_signed()));
        each(y, |i| {
            let low = b[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
            d[i / 16] * signed(low | pair(&b[128..], i) << 4, 32)
        });
    }),
    row(34, "TQ1_0", SUPER, 54, tq1_0),
    row(35, "TQ2_0", SUPER, 66, |b, y| each(y, |i| half(b, 64) * signed(pair(b, i), 1))),
    row(39, "MXFP4", 32, 17, |b, y| {
        let bits = if b[0] < 2 { 0x0020_0000 << b[0] } else { u32::from(b[0] - 1) << 23 };
        each(y, |i| f32::from_bits(bits) * f32::from(DOUBLE_E2M1[usize::from(nibble(&b[1..], i))]));
    }),
    row(40, "NVFP4", 64, 36, |b, y| {
        let code = |i: usize| b[4 + i / 16 * 8 + i % 8] >> (i / 8 % 2 * 4) & 15;
        each(y, |i| half_e4m3(b[i / 16]) * f32::from(DOUBLE_E2M1[usize::from(code(i))]));
    }),
    row(16, "IQ2_XXS", SUPER, 66, |b, y| {
        let word = |i: usize| long(b, 2 + i / 32 * 8 + 4);
        each(y, |i| {
            let value = GRIDS[IQ2_XXS][usize::from(b[2 + i / 32 * 8 + i / 8 % 4]) * 8 + i % 8];
            half(b, 0) * (0.5 + above(word(i))) * 0.25 * value * sign(signs(word(i), i), i)
        });
    }),
    row(17, "IQ2_XS", SUPER, 74, |b, y| {
        each(y, |i| {
            let code = usize::from(short(b, 2 + i / 8 * 2));
            let scale = half(b, 0) * (0.5 + float(halves(&b[66..], i / 16))) * 0.25;
            scale * GRIDS[IQ2_XS][code % 512 * 8 + i % 8] * sign(even(code >> 9), i)
        });
    }),
    row(22, "IQ2_S", SUPER, 82, |b, y| {
        each(y, |i| {
            let code = usize::from(b[2 + i / 8]) | usize::from(b[66 + i / 32] >> (i / 8 % 4 * 2) & 3) << 8;
            let scale = half(b, 0) * (0.5 + float(halves(&b[74..], i / 16))) * 0.25;
            scale * GRIDS[IQ2_S][code * 8 + i % 8] * sign(b[34 + i / 8], i)
        });
    }),
    row(18, "IQ3_XXS", SUPER, 98, |b, y| {
        let word = |i: usize| long(b, 66 + i / 32 * 4);
        each(y, |i| {
            let value = GRIDS[IQ3_XXS][usize::from(b[2 + i / 4]) * 4 + i % 4];
            half(b, 0) * (0.5 + above(word(i))) * 0.5 * value * sign(signs(word(i), i), i)
        });
    }),
    row(21, "IQ3_S", SUPER, 110, |b, y| {
        each(y, |i| {
            let code = usize::from(b[2 + i / 4]) | usize::from(bit(b[66 + i / 32], i / 4 % 8)) << 8;
            let scale = half(b, 0) * float(1 + 2 * halves(&b[106..], i / 32));
            scale * GRIDS[IQ3_S][code * 4 + i % 4] * sign(b[74 + i / 8], i)
        });
    }),
    row(19, "IQ1_S", SUPER, 50, |b, y| {
        each(y, |i| {
            let high = short(b, 34 + i / 32 * 2);
            let code = usize::from(b[2 + i / 8]) | usize::from(high >> (i / 8 % 4 * 3) & 7) << 8;
            let scale = half(b, 0) * f32::from(2 * (high >> 12 & 7) + 1);
            scale * (GRIDS[IQ1_S][code * 8 + i % 8] + delta(high & 0x8000 != 0))
        });
    }),
    row(29, "IQ1_M", SUPER, 56, |b, y| {
        let d = (0..4).map(|at| (short(b, 48 + 2 * at) & 0xf000) >> (12 - 4 * at)).sum();
        each(y, |i| {
            let scale = short(b, 48 + i / 64 * 2) >> (i / 16 % 4 * 3) & 7;
            let high = halves(&b[32..], i / 8);
            let code = usize::from(b[i / 8]) | usize::from(high & 7) << 8;
            f16::from_bits(d).to_f32()
                * f32::from(2 * scale + 1)
                * (GRIDS[IQ1_S][code * 8 + i % 8] + delta(high & 8 != 0))
        });
    }),
    row(20, "IQ4_NL", 32, 18, |b, y| each(y, |i| half(b, 0) * f32::from(IQ4[usize::from(nibble(&b[2..], i))]))),
    row(23, "IQ4_XS", SUPER, 136, |b, y| {
        let high = |at: usize| (short(b, 2) >> (2 * at)).to_le_bytes()[0] & 3;
        let scales: [f32; 8] = std::array::from_fn(|at| half(b, 0) * signed(halves(&b[4..], at) | high(at) << 4, 32));
        each(y, |i| scales[i / 32] * f32::from(IQ4[usize::from(nibble(&b[8 + i / 32 * 16..], i % 32))]));
    }),
];

/// The floats `E2M1`, doubled. Negative zero is zero.
const DOUBLE_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn each(values: &mut [f32], of: impl Fn(usize) -> f32) {
    values.iter_mut().enumerate().for_each(|(i, value)| *value = of(i));
}

fn short(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn long(b: &[u8], at: usize) -> u32 {
    u32::from(short(b, at)) | u32::from(short(b, at + 2)) << 16
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_bits(short(b, at)).to_f32()
}

fn float(code: u8) -> f32 {
    f32::from(code)
}

fn signed(code: u8, zero: i8) -> f32 {
    f32::from(code.cast_signed() - zero)
}

const fn bit(byte: u8, at: usize) -> u8 {
    byte >> at & 1
}

/// Code `i` of 32: the low halves of 16 bytes, then the high ones.
const fn nibble(b: &[u8], i: usize) -> u8 {
    b[i % 16] >> (i / 16 * 4) & 15
}

/// Code `i` of 256: for each 32 bytes, their low halves and then the high ones.
const fn nibble_of_64(b: &[u8], i: usize) -> u8 {
    b[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15
}

/// Code `i` of 256, of two bits: for each 32 bytes, their lowest two bits first.
const fn pair(b: &[u8], i: usize) -> u8 {
    b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3
}

/// Half `i` of bytes, the low one of each first.
const fn halves(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (i % 2 * 4) & 15
}

/// Code `i` of 32, of five bits: the fifth ones are the first four bytes.
const fn five(b: &[u8], i: usize) -> u8 {
    let (_, low) = b.split_at(4);
    nibble(low, i) | bit(b[i / 8], i % 8) << 4
}

fn q2_k(b: &[u8], y: &mut [f32]) {
    let scales: [(f32, f32); 16] =
        std::array::from_fn(|at| (half(b, 80) * float(b[at] & 15), half(b, 82) * float(b[at] >> 4)));
    each(y, |i| scales[i / 16].0 * float(pair(&b[16..], i)) - scales[i / 16].1);
}

fn q3_k(b: &[u8], y: &mut [f32]) {
    let scales: [f32; 16] = std::array::from_fn(|at| {
        let (low, high) = (b[96 + at % 8] >> (at / 8 * 4) & 15, b[104 + at % 4] >> (at / 4 * 2) & 3);
        half(b, 108) * signed(low | high << 4, 32)
    });
    // The offset is 0 where the bit is 1.
    each(y, |i| scales[i / 16] * signed(pair(&b[32..], i) + 4 * bit(b[i % 32], i / 32), 4));
}

/// Scales and minima of the groups of 32, of six bits each.
fn minima(b: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|at| {
        let packed = |from: usize, shift: usize| {
            if at < 4 { b[from + at] & 63 } else { b[8 + at] >> shift & 15 | b[from + at - 4] >> 2 & 0x30 }
        };
        (half(b, 0) * float(packed(4, 0)), half(b, 2) * float(packed(8, 4)))
    })
}

fn scaled(scales: &[(f32, f32); 8], i: usize, code: u8) -> f32 {
    scales[i / 32].0 * float(code) - scales[i / 32].1
}

/// Digits of base 3, five or four to a byte.
fn tq1_0(b: &[u8], y: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    each(y, |i| {
        let (byte, power) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + i % 16, (i - 160) / 16),
            _ => (48 + i % 4, (i - 240) / 4),
        };
        let [_, digit] = (u16::from(b[byte].wrapping_mul(POWERS[power])) * 3).to_le_bytes();
        half(b, 52) * signed(digit, 1)
    });
}

/// Half of an unsigned `E4M3`. `0x7f` is 0.
fn half_e4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (x >> 3 & 15, float(x & 7));
    match (x, exponent) {
        (0 | 0x7f, _) => 0.0,
        (_, 0) => mantissa / 512.0 * 0.5,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 120) << 23) * 0.5,
    }
}

/// The scale in the highest four bits of a word.
fn above(word: u32) -> f32 {
    float(word.to_le_bytes()[3] >> 4)
}

/// The signs of the eight elements around `i` of 32, by the seven bits that a word has for them.
fn signs(word: u32, i: usize) -> u8 {
    even(((word >> (i / 8 % 4 * 7)) & 127) as usize)
}

/// Seven signs, and an eighth that makes the number of negative ones even.
fn even(signs: usize) -> u8 {
    let [signs, ..] = signs.to_le_bytes();
    signs | (signs.count_ones().to_le_bytes()[0] & 1) << 7
}

const fn sign(signs: u8, i: usize) -> f32 {
    if bit(signs, i % 8) == 0 { 1.0 } else { -1.0 }
}

const fn delta(is_negative: bool) -> f32 {
    if is_negative { -0.125 } else { 0.125 }
}

/// The lattices, in the order of their lines.
const IQ2_XXS: usize = 0;
const IQ2_XS: usize = 1;
const IQ2_S: usize = 2;
const IQ3_XXS: usize = 3;
const IQ3_S: usize = 4;
const IQ1_S: usize = 5;

/// Their points, one after the other. Lines of: a name, the values of codes, and the codes in hexadecimal digits, low bits first. As `gguf.quants` has them;
/// `tests/python/gguf_tables.py` writes and compares them.
static GRIDS: LazyLock<Vec<Vec<f32>>> = LazyLock::new(|| {
    let grid = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, values, digits] = words[..] else { panic!("{name}", name = words[0]) };
        let values: Vec<f32> = values.split(',').map(|value| value.parse().expect("a number")).collect();
        let width = if values.len() > 4 { 4 } else { 2 };
        let bytes = digits.as_bytes().chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).expect("ASCII");
            u8::from_str_radix(pair, 16).expect("two digits")
        });
        let code = |byte: u8, at: usize| values[usize::from(byte >> at & ((1 << width) - 1))];
        let grid = bytes.flat_map(|byte| (0..8).step_by(width).map(move |at| (byte, at)));
        grid.map(|(byte, at)| code(byte, at)).collect()
    };
    include_str!("grids.txt").lines().map(grid).collect()
});

#[cfg(test)]
mod tests;
