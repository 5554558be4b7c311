//! Copies that convert elements, and copies that decode logical elements of quantized tensors.

use smallvec::SmallVec;

use super::{
    super::{
        Program,
        block_decode::{self, ValueDecoder},
        convert::{BLOCK_ELEMENTS, Converter, Direct, element_bytes},
        kernel::{Level, row::copy_elements},
        transpose::{CACHE_LINE_BYTES, Fused, FusedKind, STREAMS, stream},
    },
    axes::{Axis, Position, copy_line, each},
    blocks::{Blocks, GROUP_ROWS_MAX, LineMethod, ROWS_AT_ONCE},
    job::Stores,
};

/// Bytes of the widest element that is converted.
const FLOAT_BYTES_MAX: usize = 8;

/// A gather that converts.
pub(super) struct Convert<'a> {
    converter: Converter<'a>,
    source_bytes: usize,
    target_bytes: usize,
    level: Level,
    /// The single loop that converts, if one is enough.
    direct: Option<Direct>,
    /// The same conversion in registers, if the processor has the instructions.
    fused: Option<FusedKind>,
    collected: [u8; BLOCK_ELEMENTS * FLOAT_BYTES_MAX],
    converted: [u8; BLOCK_ELEMENTS * FLOAT_BYTES_MAX],
}

impl<'a> Convert<'a> {
    pub(super) fn new(program: &'a Program, level: Level) -> Self {
        let converter = Converter::new(program, level);
        let (direct, fused) = (converter.direct(), converter.fused());
        Self {
            source_bytes: converter.source_bytes,
            converter,
            level,
            direct,
            fused: if level.has_avx2() { fused } else { None },
            target_bytes: element_bytes(program.target),
            collected: [0; BLOCK_ELEMENTS * FLOAT_BYTES_MAX],
            converted: [0; BLOCK_ELEMENTS * FLOAT_BYTES_MAX],
        }
    }

    pub(super) fn run(&mut self, axes: &[Axis], place: Position, source: &[u8], target: &mut [u8], stores: Stores) {
        let unit = self.target_bytes;
        if let Some(mut plan) = Blocks::plan(axes, self.source_bytes, unit) {
            let (level, together) = (self.level, if self.direct.is_some() { 1 } else { ROWS_AT_ONCE });
            plan.width = plan.width.min(BLOCK_ELEMENTS / together);
            if let Some((kind, direct)) = self.fused.zip(self.direct)
                && plan.columns.source == self.source_bytes
            {
                let exact = |source: &[u8], target: &mut [u8]| direct.run(level, source, target);
                let method = LineMethod::Straight(Some(Fused { kind, exact: &exact }));
                return plan.run(level, place, source, target, stores, method);
            }
            let mut read = |offsets: &[usize], stride: usize, count: usize, scratch: &mut [u8]| {
                self.lines(source, offsets, stride, count, scratch);
            };
            plan.run(level, place, source, target, stores, LineMethod::Read { together, read: &mut read, codes: None });
            return;
        }
        match axes.split_first() {
            Some((inner, outer))
                if STREAMS
                    && stores == Stores::Streamed
                    && (inner.target, inner.source) == (unit, self.source_bytes) =>
            {
                each(outer, place, &mut |place| {
                    let source = &source[place.source..][..inner.extent * inner.source];
                    self.streamed_row(source, &mut target[place.target..][..inner.extent * unit]);
                });
            }
            Some(_) | None => each_line(axes, place, unit, target, &mut |place, stride, count, target| {
                self.line(source, place, stride, count, target);
            }),
        }
    }

    /// Converts consecutive elements, past the processor's caches where whole cache lines of the target are written: memory that is
    /// not read soon would otherwise be read first, for nothing.
    fn streamed_row(&mut self, source: &[u8], target: &mut [u8]) {
        let head = target.as_ptr().align_offset(CACHE_LINE_BYTES).min(target.len());
        if !head.is_multiple_of(self.target_bytes) {
            return self.converter.row(source, target);
        }
        let (head, target) = target.split_at_mut(head);
        let (from, source) = source.split_at(head.len() / self.target_bytes * self.source_bytes);
        self.converter.row(from, head);
        let blocks = source.chunks(BLOCK_ELEMENTS * self.source_bytes);
        for (from, block) in blocks.zip(target.chunks_mut(BLOCK_ELEMENTS * self.target_bytes)) {
            let converted = &mut self.converted[..block.len()];
            self.converter.row(from, converted);
            stream(converted, block);
        }
    }

    /// Converts lines of `count` elements, `stride` source bytes apart, to consecutive lines of `target`.
    fn lines(&mut self, source: &[u8], offsets: &[usize], stride: usize, count: usize, target: &mut [u8]) {
        let (from, to) = (count * self.source_bytes, count * self.target_bytes);
        // No division here: this runs once per 64 elements or so, and a division costs as much as converting them.
        if offsets.len() > ROWS_AT_ONCE || offsets.len() * count > BLOCK_ELEMENTS || self.direct.is_some() {
            for (index, offset) in offsets.iter().enumerate() {
                let line = &mut target[index * to..][..to];
                match self.direct {
                    Some(direct) if stride == self.source_bytes => {
                        direct.run(self.level, &source[*offset..][..from], line);
                    }
                    Some(_) | None => self.line(source, Position { source: *offset, target: 0 }, stride, count, line),
                }
            }
            return;
        }
        for (index, offset) in offsets.iter().enumerate() {
            copy_line(self.source_bytes, &source[*offset..], stride, &mut self.collected[index * from..][..from]);
        }
        self.converter.convert_block(&self.collected[..offsets.len() * from], target);
    }

    /// Converts `count` elements, `stride` source bytes apart, to the contiguous `target`.
    fn line(&mut self, source: &[u8], place: Position, stride: usize, count: usize, target: &mut [u8]) {
        let width = self.source_bytes;
        if stride == width || count == 1 {
            let source = &source[place.source..place.source + count * width];
            self.converter.row(source, target);
            return;
        }
        let mut from = place.source;
        for part in target.chunks_mut(BLOCK_ELEMENTS * self.target_bytes) {
            let count = part.len() / self.target_bytes;
            let collected = &mut self.collected[..count * width];
            copy_elements(width, &source[from..], stride, collected, width, count);
            self.converter.row(collected, part);
            // The last step may lead past the source; nothing is read there.
            from = (from + count * stride).min(source.len());
        }
    }
}

/// A gather that decodes. Its source positions are logical elements, not bytes.
pub(super) fn decode(
    values: &mut ValueDecoder<'_>,
    level: Level,
    axes: &[Axis],
    place: Position,
    target: &mut [u8],
    stores: Stores,
) {
    let unit = values.target_bytes;
    if let Some(mut plan) = Blocks::plan(axes, 1, unit) {
        plan.width = block_decode::BLOCK_ELEMENTS;
        let codes = Some(values.codes());
        let mut read = |offsets: &[usize], stride: usize, count: usize, scratch: &mut [u8]| {
            let firsts: SmallVec<[u64; GROUP_ROWS_MAX]> = offsets.iter().map(|offset| *offset as u64).collect();
            values.lines(&firsts, stride as u64, count, scratch);
        };
        let method = LineMethod::Read { together: ROWS_AT_ONCE, read: &mut read, codes };
        return plan.run(level, place, &[], target, stores, method);
    }
    each_line(axes, place, unit, target, &mut |place, stride, _, target| {
        values.line(place.source as u64, stride as u64, target);
    });
}

/// Makes the elements of `axes` line by line. `line` makes so many, which are `stride` apart in the source, in a contiguous target.
#[inline]
fn each_line(
    axes: &[Axis],
    place: Position,
    unit: usize,
    target: &mut [u8],
    line: &mut impl FnMut(Position, usize, usize, &mut [u8]),
) {
    match axes.split_first() {
        Some((inner, outer)) if inner.target == unit => each(outer, place, &mut |place| {
            line(place, inner.source, inner.extent, &mut target[place.target..][..inner.extent * unit]);
        }),
        Some((inner, outer)) => each(outer, place, &mut |place| {
            let mut made = [0; BLOCK_ELEMENTS * FLOAT_BYTES_MAX];
            for start in (0..inner.extent).step_by(BLOCK_ELEMENTS) {
                let count = BLOCK_ELEMENTS.min(inner.extent - start);
                let part = place.step(*inner, start);
                line(part, inner.source, count, &mut made[..count * unit]);
                copy_elements(unit, &made, unit, &mut target[part.target..], inner.target, count);
            }
        }),
        None => line(place, 0, 1, &mut target[place.target..][..unit]),
    }
}
