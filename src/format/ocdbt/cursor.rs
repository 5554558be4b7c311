//! Reading the body of a block from its start to its end, and why a block is refused.

use std::fmt;

use crate::FormatError;

/// The kinds of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// A manifest.
    Manifest,
    /// A node of the B+tree of keys.
    Node,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Manifest => "ocdbt manifest",
            Self::Node => "ocdbt B+tree node",
        })
    }
}

impl Block {
    /// That a value in such a block is none that the format allows.
    pub(super) fn wrong(self, what: &str, expected: impl fmt::Display, found: impl fmt::Display) -> FormatError {
        FormatError(format!("{self}: {what}: expected {expected}, found {found}"))
    }

    /// That a number is above its limit.
    pub(super) fn beyond(self, what: &str, limit: u64, found: u64) -> FormatError {
        self.wrong(what, format_args!("at most {limit}"), found)
    }
}

/// A place in a body.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
    pub(super) block: Block,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(body: &'a [u8], block: Block) -> Self {
        Self { rest: body, block }
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], FormatError> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(|| self.truncated(what))?;
        self.rest = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FormatError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or_else(|| self.truncated(what))?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(super) fn byte(&mut self, what: &'static str) -> Result<u8, FormatError> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    /// A number in groups of seven bits, the lowest first. It has one spelling only, without zeros at its end.
    pub(super) fn varint(&mut self, what: &'static str) -> Result<u64, FormatError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let group = u64::from(byte & 0x7f);
            let fits = shift < 63 || group <= 1;
            if !fits || (byte == 0 && shift > 0) {
                break;
            }
            number |= group << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(FormatError(format!("{}: {what}: expected a number of at most 64 bits", self.block)))
    }

    /// A number of at most `limit`.
    pub(super) fn bounded(&mut self, what: &'static str, limit: u64) -> Result<u64, FormatError> {
        let found = self.varint(what)?;
        if found <= limit { Ok(found) } else { Err(self.block.beyond(what, limit, found)) }
    }

    /// The number of rows that follow, each of which takes a byte at least: no more than `limit`, and no more than there are
    /// bytes, so that room for them may be reserved.
    pub(super) fn count(&mut self, what: &'static str, limit: u64) -> Result<usize, FormatError> {
        let found = self.bounded(what, limit)?;
        let rows = usize::try_from(found).ok().filter(|rows| *rows <= self.left());
        rows.ok_or_else(|| self.truncated(what))
    }

    /// A column of `rows` numbers of at most `limit`.
    pub(super) fn column(&mut self, rows: usize, what: &'static str, limit: u64) -> Result<Vec<u64>, FormatError> {
        (0..rows).map(|_| self.bounded(what, limit)).collect()
    }

    /// Lengths that fit memory, as they are at most 65 535.
    pub(super) fn lengths(&mut self, rows: usize, what: &'static str, limit: u16) -> Result<Vec<usize>, FormatError> {
        let length = |_| self.bounded(what, limit.into()).map(ckfs_tensor::to_usize);
        (0..rows).map(length).collect()
    }

    pub(super) fn end(&self) -> Result<(), FormatError> {
        let found = self.rest.len();
        let trailing = || FormatError(format!("{}: expected to end, found {found} more bytes", self.block));
        if found == 0 { Ok(()) } else { Err(trailing()) }
    }

    /// That the body ends too early.
    pub(super) fn truncated(&self, what: &str) -> FormatError {
        FormatError(format!("{}: ends within its {what}", self.block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_spelling_of_at_most_64_bits() {
        let read = |bytes: &[u8]| {
            let mut cursor = Cursor::new(bytes, Block::Node);
            let number = cursor.varint("number")?;
            cursor.end()?;
            Ok::<u64, FormatError>(number)
        };
        let rows: [(&[u8], u64); 5] = [
            (&[0], 0),
            (&[0x7f], 127),
            (&[0x80, 1], 128),
            (&[0xff, 0xff, 0xff, 0xff, 0x0f], u64::from(u32::MAX)),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], u64::MAX),
        ];
        for (bytes, number) in rows {
            assert_eq!(read(bytes), Ok(number));
        }
        let error = |text: &str| Err(FormatError(format!("ocdbt B+tree node: {text}")));
        let varint = error("number: expected a number of at most 64 bits");
        assert_eq!(read(&[0x80, 0]), varint);
        assert_eq!(read(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]), varint);
        assert_eq!(read(&[0xff; 11]), varint);
        assert_eq!(read(&[0x80]), error("ends within its number"));
        assert_eq!(read(&[1, 1]), error("expected to end, found 1 more bytes"));
    }
}
