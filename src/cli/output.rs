//! How commands print.

use std::{
    fmt,
    io::{self, Write},
};

use anyhow::Context;

use crate::{checkpoint::printable_lines, source::Served};

/// A usage error; exit code 2.
#[derive(Debug)]
pub(super) struct Usage(pub(super) String);

impl std::error::Error for Usage {}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The reader of standard output has closed it, as `head` does.
#[derive(Debug)]
pub(super) struct Closed;

impl std::error::Error for Closed {}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

/// The command failed, and another process reports why.
#[derive(Debug)]
pub(super) struct AlreadyReported;

impl std::error::Error for AlreadyReported {}

impl fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the starter has the error")
    }
}

/// An error with its causes, without repetitions: many messages contain their cause's message. Names in it are escaped.
pub(super) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    printable_lines(&text).into_owned()
}

fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Closed.into()),
        result => result.context("standard output"),
    }
}

/// Prints a text.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Prints a JSON document, which is generated while it is written.
pub(super) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written_all = serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from);
    written(written_all.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
}

/// Writes the bytes of a read to standard output.
pub(super) fn write_served(bytes: Served<'_>) -> anyhow::Result<()> {
    written(bytes.write_to(&io::stdout()))
}
