//! A reader of Python pickles that runs no code.
//!
//! A pickle is a program for a small stack machine, and one of its instructions calls any function of any module. This machine
//! knows the same instructions but calls nothing: a class or function is a name from a closed list, and what calling it would
//! give is an [`Object`] that says what would be called with which arguments. A name that is not on the list is an error with
//! that name.
//!
//! Values lie in one flat table and refer to each other by [`Id`], so that a deeply nested or a cyclic pickle costs no stack
//! here and cannot be dropped recursively. Work and memory are bounded by [`Limits`] and by the length of the input: no
//! instruction adds more values than it has bytes or operands on the stack.
//!
//! Not read, since neither torch nor its checkpoints use them: the text instructions of protocols 0 and 1, extension codes,
//! out-of-band buffers. They are errors with the instruction's number.

mod machine;
mod value;

pub use machine::{Limits, read};
pub use value::{Id, Name, Object, PickleValue, Unpickled};

#[cfg(test)]
mod tests;
