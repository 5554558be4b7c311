//! The bytes of operands, and the stored elements in them, read many at a time.
//!
//! A line of logical elements is cut where the operand's index stops advancing evenly. One loop reads each part:
//! adjacent codes, a column of words, or the same element again and again.

use super::{
    BitOrder, Bits, DType, Digit, Field, Step, Term,
    convert::{apply_constants, element_bytes},
    decode::{over, over_up, within},
    kernel::{Level, row, unpack},
    shape::to_usize,
};

/// Width of codes that are looked up in a table. The table includes the steps that depend on the code alone.
const TABLE_BITS: u32 = 4;
/// Codes of one word.
const WORD_CODES: usize = 8;
/// Elements that are collected before they are widened.
const COLLECTED: usize = 64;
/// Greatest magnitude up to which bounds of sums and products of codes are tracked.
pub(super) const BOUND_MAX: f32 = 1e30;

/// Bytes of an operand's tensor.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Number of the first, counted from the tensor's first.
    pub start: u64,
}

impl<'a> Window<'a> {
    /// All bytes of a tensor.
    pub const fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes, start: 0 }
    }

    /// The bytes from byte `at` of the tensor on.
    ///
    /// # Panics
    /// If the window ends before that byte. The needed bytes of a piece are determined before any read, which excludes this.
    pub(super) fn from(&self, at: u64) -> &'a [u8] {
        let found = at.checked_sub(self.start).and_then(|at| self.bytes.get(usize::try_from(at).ok()?..));
        let Some(found) = found else {
            panic!("byte {at} lies outside the window of {} bytes at {}", self.bytes.len(), self.start);
        };
        found
    }
}

pub(super) fn next<'a>(windows: &mut impl Iterator<Item = &'a Window<'a>>) -> Window<'a> {
    let Some(window) = windows.next() else { panic!("fewer windows than operands") };
    *window
}

/// The field at bit `at`, as an unsigned number.
fn code(bits: Bits, window: Window<'_>, at: u64) -> u32 {
    let bytes = window.from(at / 8);
    let (first, mask) = ((at % 8).to_le_bytes()[0], (1 << bits.width) - 1);
    if bits.order == BitOrder::HighFirst {
        return (u32::from(bytes[0]) >> (8 - bits.width - u32::from(first))) & mask;
    }
    let last = (u32::from(first) + bits.width - 1) / 8;
    let word = (0..=last as usize).fold(0, |word, at| word | u32::from(bytes[at]) << (8 * at));
    (word >> first) & mask
}

/// F32 bits of an integer code.
#[allow(clippy::cast_precision_loss, reason = "at most 16 bits")]
fn integer(bits: Bits, code: u32) -> u32 {
    let sign = 32 - bits.width;
    let value = if bits.signed { ((code << sign).cast_signed() >> sign) as f32 } else { code as f32 };
    value.to_bits()
}

/// How a stored element is read.
#[derive(Clone, Debug)]
pub(super) enum FieldReader<'a> {
    Float {
        bytes: usize,
        widen: row::Row,
    },
    Integer(Bits),
    Table(Bits, &'a [u32]),
    /// Codes of four bits, with a table that includes the steps that depend on the code alone.
    Nibble(Bits, Box<unpack::Table>),
}

impl FieldReader<'_> {
    /// The greatest magnitude of the values, if they are finite for any stored bits.
    pub(super) fn bound(&self) -> Option<f32> {
        let greatest = |table: &[u32]| {
            let magnitudes = table.iter().map(|bits| f32::from_bits(*bits).abs());
            let greatest = magnitudes.fold(0.0, |most: f32, one| if one <= most { most } else { one });
            let all_known = table.iter().all(|bits| f32::from_bits(*bits).is_finite());
            (all_known && greatest <= BOUND_MAX).then_some(greatest)
        };
        match self {
            Self::Float { .. } => None,
            Self::Integer(_) => Some(65536.0),
            Self::Table(_, table) => greatest(table),
            Self::Nibble(_, table) => greatest(table.as_slice()),
        }
    }

    pub(super) fn one(&self, window: Window<'_>, index: u64) -> u32 {
        match self {
            Self::Float { bytes, widen } => {
                let mut value = [0; 4];
                widen(Level::PORTABLE, &window.from(index * *bytes as u64)[..*bytes], &mut value);
                u32::from_le_bytes(value)
            }
            Self::Integer(bits) => integer(*bits, code(*bits, window, index)),
            Self::Table(bits, table) => table[code(*bits, window, index) as usize],
            Self::Nibble(bits, table) => table[code(*bits, window, index) as usize],
        }
    }
}

/// Digits for codes packed eight to a word in some order, as in AWQ.
#[derive(Clone, Debug)]
struct PackedWords {
    shifts: unpack::Shifts,
    /// The digits that find the word, in bits.
    word: Vec<Digit>,
}

/// An operand prepared for many elements.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    pub(super) reader: FieldReader<'a>,
    pub(super) window: Window<'a>,
    pub(super) digits: &'a [Digit],
    words: Option<PackedWords>,
}

impl<'a> Fields<'a> {
    /// A reader of the elements of a field and an index, and the number of following steps that its table includes.
    pub(super) fn new(field: &'a Field, digits: &'a [Digit], steps: &[Step], window: Window<'a>) -> (Self, usize) {
        let (reader, folded) = reader(field, steps);
        let words = if let FieldReader::Nibble(bits, _) = &reader { words(*bits, digits) } else { None };
        (Self { reader, window, digits, words }, folded)
    }

    /// Loads the stored elements for elements `n`, `n + stride`, …
    pub(super) fn load(&self, level: Level, n: u64, stride: u64, values: &mut [[u8; 4]]) {
        let mut done = 0;
        while done < values.len() {
            let (at, left) = (n + stride * done as u64, values.len() - done);
            if stride == 1
                && let Some(words) = &self.words
            {
                let place = usize::from((at % WORD_CODES as u64).to_le_bytes()[0]);
                let to_word = (WORD_CODES - place) % WORD_CODES;
                if to_word == 0 && left >= WORD_CODES {
                    done += self.load_words(level, words, at, &mut values[done..]);
                } else {
                    let count = if to_word == 0 { left } else { to_word.min(left) };
                    for (value, at) in values[done..done + count].iter_mut().zip(at..) {
                        let index = self.digits.iter().map(|digit| digit.summand(digit.of(at))).sum();
                        *value = self.reader.one(self.window, index).to_le_bytes();
                    }
                    done += count;
                }
                continue;
            }
            let (index, step, count) = uniform(self.digits, at, stride, left);
            read(level, &self.reader, self.window, index, step, &mut values[done..done + count]);
            done += count;
        }
    }

    /// The bytes of `count` codes of four bits from element `n` on, if these are adjacent and begin with a byte.
    pub(super) fn adjacent(&self, n: u64, count: usize) -> Option<&'a [u8]> {
        let (index, step, valid) = uniform(self.digits, n, 1, count);
        let is_adjacent = step == 4 && valid == count && index.is_multiple_of(8) && self.words.is_none();
        is_adjacent.then(|| &self.window.from(index / 8)[..count.div_ceil(2)])
    }

    /// Loads whole words of codes. Returns the number of codes.
    fn load_words(&self, level: Level, words: &PackedWords, n: u64, values: &mut [[u8; 4]]) -> usize {
        let FieldReader::Nibble(_, table) = &self.reader else { return 0 };
        let (index, step, count) = uniform(&words.word, n, WORD_CODES as u64, values.len() / WORD_CODES);
        let count = if step == 32 { count } else { 1 };
        let bytes = &self.window.from(index / 8)[..4 * count];
        unpack::words(level, bytes, &words.shifts, table, &mut values[..WORD_CODES * count]);
        WORD_CODES * count
    }
}

/// How stored elements are read, and the number of following steps that this includes.
fn reader<'a>(field: &'a Field, steps: &[Step]) -> (FieldReader<'a>, usize) {
    match field {
        Field::Float(dtype) => {
            let Some(widen) = row::widen(*dtype).or((*dtype == DType::F8E8M0).then_some(row::widen_f8e8m0)) else {
                panic!("{dtype} values are not converted");
            };
            (FieldReader::Float { bytes: element_bytes(*dtype), widen }, 0)
        }
        Field::Integer(bits) | Field::Table(bits, _) if bits.width == TABLE_BITS => {
            let constant = |step: &&Step| !matches!(step, Step::Compute(_, Term::Value(_)) | Step::Dot(_));
            let folded = steps.iter().take_while(constant).count();
            let table = std::array::from_fn(|code| {
                let value = match field {
                    Field::Table(_, table) => table[code],
                    Field::Integer(_) | Field::Float(_) => integer(*bits, u32::from(code.to_le_bytes()[0])),
                };
                apply_constants(&steps[..folded], value)
            });
            (FieldReader::Nibble(*bits, Box::new(table)), folded)
        }
        Field::Integer(bits) => (FieldReader::Integer(*bits), 0),
        Field::Table(bits, table) => (FieldReader::Table(*bits, table), 0),
    }
}

/// The order of codes in words, if eight neighbours always lie in one word and are not simply side by side.
fn words(bits: Bits, digits: &[Digit]) -> Option<PackedWords> {
    let codes = WORD_CODES as u64;
    let (within, word): (Vec<Digit>, Vec<Digit>) = digits
        .iter()
        .cloned()
        .partition(|digit| digit.divisor == 1 && digit.turn < codes && (digit.group * digit.turn) <= codes);
    let aligned = |digit: &Digit| digit.period().is_multiple_of(codes);
    let cycles = |digit: &Digit| codes.is_multiple_of(digit.group * digit.turn) && digit.table.is_none();
    let steady = |digit: &Digit| (digit.divisor * digit.group).is_multiple_of(codes);
    let fits = !within.is_empty()
        && bits.order == BitOrder::LowFirst
        && within.iter().all(|digit| cycles(digit) && aligned(digit))
        && word.iter().all(|digit| steady(digit) && aligned(digit) && digit.stride.is_multiple_of(32));
    if !fits {
        return None;
    }
    let shift = |code: usize| within.iter().map(|digit| digit.summand(digit.of(code as u64))).sum::<u64>();
    let shifts: Option<Vec<u32>> =
        (0..WORD_CODES).map(|code| u32::try_from(shift(code)).ok().filter(|shift| *shift <= 28)).collect();
    Some(PackedWords { shifts: shifts?.try_into().ok()?, word })
}

/// The index of element `n`, the step of the index over the next elements `stride` apart, and their number, at most `count`.
pub(super) fn uniform(digits: &[Digit], n: u64, stride: u64, count: usize) -> (u64, u64, usize) {
    let (mut index, mut step, mut valid) = (0, 0, count as u64);
    for digit in digits {
        let from = within(n, digit.period());
        let x = over(from, digit.divisor);
        let block = digit.divisor * digit.group;
        let y = within(over(x, digit.group), digit.turn);
        index += digit.summand(y);
        if digit.count() <= 1 || digit.stride == 0 {
            continue;
        }
        valid = valid.min(over_up(digit.period() - from, stride));
        if stride < block || !(block == 1 || stride.is_multiple_of(block)) {
            valid = valid.min(over_up(block - within(from, block), stride));
        } else {
            let turns = over(stride, block);
            let most = if digit.table.is_some() { 1 } else { over_up(digit.turn - y, turns) };
            valid = valid.min(most);
            step += turns * digit.stride;
        }
    }
    (index, step, to_usize(valid))
}

/// Reads stored elements at `index`, `index + step`, …
pub(super) fn read(
    level: Level,
    reader: &FieldReader<'_>,
    window: Window<'_>,
    index: u64,
    step: u64,
    values: &mut [[u8; 4]],
) {
    if step == 0 || values.len() == 1 {
        values.fill(reader.one(window, index).to_le_bytes());
        return;
    }
    let of_bytes = |bytes: usize, widen: row::Row, source: &[u8], apart: usize, values: &mut [[u8; 4]]| {
        if apart == bytes {
            return widen(level, &source[..values.len() * bytes], values.as_flattened_mut());
        }
        let mut collected = [0; 8 * COLLECTED];
        for (part, values) in values.chunks_mut(COLLECTED).enumerate() {
            let collected = &mut collected[..values.len() * bytes];
            let source = &source[part * COLLECTED * apart..];
            row::copy_elements(bytes, source, apart, collected, bytes, values.len());
            widen(level, collected, values.as_flattened_mut());
        }
    };
    match reader {
        FieldReader::Float { bytes, widen } => {
            of_bytes(*bytes, *widen, window.from(index * *bytes as u64), to_usize(step) * bytes, values);
        }
        FieldReader::Integer(bits) if bits.width == 8 && index.is_multiple_of(8) && step.is_multiple_of(8) => {
            let widen = if bits.signed { row::widen_i8 } else { row::widen_u8 };
            of_bytes(1, widen, window.from(index / 8), to_usize(step / 8), values);
        }
        FieldReader::Nibble(bits, table) if step == 4 => nibbles(level, *bits, table, window, index, values),
        FieldReader::Nibble(bits, table) if step == 32 && bits.order == BitOrder::LowFirst => {
            // The last word may end beyond the window: only the byte with its code is certainly there.
            let (last, others) = values.split_last_mut().map_or((None, [].as_mut_slice()), |(a, b)| (Some(a), b));
            let words = window.from(index / 8).as_chunks::<4>().0;
            let shift = u32::from((index % 8).to_le_bytes()[0]);
            unpack::column(level, &words[..others.len()], shift, table, others);
            if let Some(last) = last {
                *last = reader.one(window, index + step * others.len() as u64).to_le_bytes();
            }
        }
        FieldReader::Integer(_) | FieldReader::Table(..) | FieldReader::Nibble(..) => {
            let mut at = index;
            for value in values {
                *value = reader.one(window, at).to_le_bytes();
                at += step;
            }
        }
    }
}

/// Reads codes of four bits that lie side by side.
fn nibbles(level: Level, bits: Bits, table: &unpack::Table, window: Window<'_>, index: u64, values: &mut [[u8; 4]]) {
    let one = |at: usize| table[code(bits, window, index + 4 * at as u64) as usize].to_le_bytes();
    let head = usize::from(!index.is_multiple_of(8));
    let whole = (values.len() - head) / WORD_CODES * WORD_CODES;
    if head == 1 {
        values[0] = one(0);
    }
    if whole > 0 {
        let shifts = if bits.order == BitOrder::LowFirst { unpack::LOW_FIRST } else { unpack::HIGH_FIRST };
        let bytes = &window.from(index.div_ceil(8))[..whole / 2];
        unpack::words(level, bytes, &shifts, table, &mut values[head..head + whole]);
    }
    for (at, value) in values.iter_mut().enumerate().skip(head + whole) {
        *value = one(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_eight_bits_begin_at_any_bit() {
        let bytes: Vec<u8> = (0..=255).map(|byte: u8| byte.wrapping_mul(37)).collect();
        let window = Window::whole(&bytes);
        for (signed, index, step) in [(false, 4, 8), (true, 3, 16), (false, 8, 8), (true, 16, 24), (true, 8, 12)] {
            let reader = FieldReader::Integer(Bits { signed, ..Bits::unsigned(8) });
            let mut values = [[0; 4]; 80];
            read(Level::detected(), &reader, window, index, step, &mut values);
            for (at, value) in (0..).zip(values) {
                let expected = reader.one(window, index + at * step).to_le_bytes();
                assert_eq!(value, expected, "field {at} from bit {index} on, {step} bits apart");
            }
        }
    }
}
