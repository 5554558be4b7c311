//! A tensor of a published version: that of a base, and the differences since.

use std::{fmt::Display, io, sync::Arc};

use ckfs_format::delta::DeltaFormat;
use ckfs_source::{ByteSpan, FileId, Source, SourceError};
use ckfs_tensor::to_usize;

/// What makes a tensor of one version that of a later one.
#[derive(Clone, Debug)]
pub(crate) struct Difference {
    /// The later version.
    pub(crate) version: u64,
    /// How it is stored.
    pub(crate) format: DeltaFormat,
    /// The digest of the tensor's bytes in the later version.
    pub(crate) digest: String,
    /// The file.
    pub(crate) file: FileId,
    /// Where in that file.
    pub(crate) span: ByteSpan,
}

/// A tensor that is stored as differences.
#[derive(Clone, Debug)]
pub(crate) struct DeltaTensor {
    /// Its name.
    pub(crate) name: String,
    /// Where the base's is.
    pub(crate) base: (FileId, ByteSpan),
    /// The differences by version, at least one.
    pub(crate) differences: Vec<Difference>,
}

impl DeltaTensor {
    /// Its last difference.
    pub(crate) fn last(&self) -> &Difference {
        self.differences.last().expect("a tensor without differences is that of the base")
    }

    /// The files that it is made of.
    pub(crate) fn files(&self) -> impl Iterator<Item = FileId> {
        std::iter::once(self.base.0).chain(self.differences.iter().map(|difference| difference.file))
    }

    /// The same, where the files are others.
    pub(crate) fn of_files(&self, file: &dyn Fn(FileId) -> FileId) -> Self {
        let differences = self.differences.iter();
        let moved = |difference: &Difference| Difference { file: file(difference.file), ..difference.clone() };
        let base = (file(self.base.0), self.base.1);
        Self { base, differences: differences.map(moved).collect(), ..self.clone() }
    }

    /// Stored bytes of its largest difference.
    pub(crate) fn stored_bytes_max(&self) -> u64 {
        self.differences.iter().map(|difference| difference.span.len()).max().unwrap_or(0)
    }

    /// How it is stored, in words.
    pub(crate) fn described(&self) -> String {
        let last = self.last();
        let of = match self.differences.len() {
            1 => "1 difference".to_owned(),
            count => format!("{count} differences"),
        };
        format!("{of} from the base, the last one of version {} ({})", last.version, last.format.encoding())
    }

    /// Makes its bytes in `target`. `stored` has room for the stored bytes of each difference.
    ///
    /// # Errors
    /// That of reading, or a difference that is damaged or not of these bytes.
    pub(crate) fn decode(&self, source: &dyn Source, stored: &mut [u8], target: &mut [u8]) -> Result<(), SourceError> {
        let Err(error) = self.made(source, stored, target, &|difference| std::ptr::eq(difference, self.last())) else {
            return Ok(());
        };
        let SourceError::Io { error: cause, .. } = &error else { return Err(error) };
        if cause.kind() != io::ErrorKind::InvalidData {
            return Err(error);
        }
        // The digest of the newest version covers all: which one is wrong is found out once it is known that one is.
        self.made(source, stored, target, &|_| true)?;
        Err(error)
    }

    fn made(
        &self,
        source: &dyn Source,
        stored: &mut [u8],
        target: &mut [u8],
        compares: &dyn Fn(&Difference) -> bool,
    ) -> Result<(), SourceError> {
        read(source, self.base, target)?;
        for difference in &self.differences {
            let stored = &mut stored[..to_usize(difference.span.len())];
            read(source, (difference.file, difference.span), stored)?;
            let applied = difference.format.apply(stored, target);
            applied.map_err(|error| self.refused(source, difference, error))?;
            if compares(difference) {
                self.compare(source, difference, target)?;
            }
        }
        Ok(())
    }

    /// The same by the slow decoder, with the digest of each version compared.
    ///
    /// # Errors
    /// As of [`DeltaTensor::decode`].
    pub(crate) fn decode_by_definition(&self, source: &dyn Source) -> Result<Vec<u8>, SourceError> {
        let read = |(file, span): (FileId, ByteSpan)| {
            let bytes = source.read_bytes(file, span.start(), span.len())?;
            source.check(file).map(|()| bytes)
        };
        self.differences.iter().try_fold(read(self.base)?, |old, difference| {
            let stored = read((difference.file, difference.span))?;
            let new = difference.format.apply_by_definition(&stored, &old);
            let new = new.map_err(|error| self.refused(source, difference, error))?;
            self.compare(source, difference, &new)?;
            Ok(new)
        })
    }

    fn compare(&self, source: &dyn Source, difference: &Difference, bytes: &[u8]) -> Result<(), SourceError> {
        let found = difference.format.digest(bytes);
        if found.eq_ignore_ascii_case(&difference.digest) {
            return Ok(());
        }
        let expected = &difference.digest;
        let what = format!("expected the digest {expected}, found {found}: damaged, or not of this base");
        Err(self.refused(source, difference, what))
    }

    fn refused(&self, source: &dyn Source, difference: &Difference, error: impl Display) -> SourceError {
        let Difference { version, span, .. } = difference;
        let action = format!("make tensor {} of version {version} (bytes {span})", self.name);
        let error = io::Error::new(io::ErrorKind::InvalidData, error.to_string());
        SourceError::io(Arc::clone(&source.pin(difference.file).path), action, error)
    }
}

/// Reads a span, and checks that the file is the pinned one: what is made of its bytes is kept.
fn read(source: &dyn Source, (file, span): (FileId, ByteSpan), target: &mut [u8]) -> Result<(), SourceError> {
    source.read_into(file, span.start(), target)?;
    source.check(file)
}
