//! Why a pickle is refused.

use ckfs_host::parse_room::ParseRoomFull;

use super::value::Name;

/// Why a pickle is refused. Offsets are those of the instruction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// The input ends within an instruction, or before the last one.
    #[error("pickle: ends at byte {at} before it is complete")]
    Truncated {
        /// Length of the input.
        at: usize,
    },
    /// An instruction that is not read here.
    #[error("pickle: byte {at}: instruction {opcode:#04x} is not supported")]
    Opcode {
        /// Where.
        at: usize,
        /// Its number.
        opcode: u8,
    },
    /// A protocol newer than 5.
    #[error("pickle: protocol {found}: expected at most 5")]
    Protocol {
        /// As given.
        found: u8,
    },
    /// A class or function that is not on the list.
    #[error("pickle: byte {at}: {name} is not on the list of what a checkpoint may hold; nothing was run")]
    Forbidden {
        /// Where.
        at: usize,
        /// Its name.
        name: Name,
    },
    /// The instruction needs other operands than those on the stack.
    #[error("pickle: byte {at}: expected {expected}, found {found}")]
    Operand {
        /// Where.
        at: usize,
        /// What the instruction needs.
        expected: &'static str,
        /// What is there.
        found: &'static str,
    },
    /// A number that was never stored is requested.
    #[error("pickle: byte {at}: nothing was stored under number {number}")]
    Memo {
        /// Where.
        at: usize,
        /// The number.
        number: u32,
    },
    /// Text that is not UTF-8.
    #[error("pickle: byte {at}: text is not UTF-8")]
    Utf8 {
        /// Where.
        at: usize,
    },
    /// An integer of more than 128 bits.
    #[error("pickle: byte {at}: an integer of {bytes} bytes: expected at most 16")]
    Integer {
        /// Where.
        at: usize,
        /// Its length.
        bytes: usize,
    },
    /// The values take too much memory.
    #[error("pickle: byte {at}: {full}")]
    Memory {
        /// Where.
        at: usize,
        /// How much.
        full: ParseRoomFull,
    },
    /// A limit was reached.
    #[error("pickle: byte {at}: more than {limit} {what}")]
    Limit {
        /// Where.
        at: usize,
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}
