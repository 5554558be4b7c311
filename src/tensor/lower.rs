//! Lowering: from the expression to its tiling.
//!
//! Lowering walks the tree once, bottom up. Each node yields *parts* (see [`part`](super::part)). Layout operators move parts.
//! Element operators append to the parts' decoder and move nothing. Sums and products of two views cut the parts of both
//! until each has elements of one part of either side (see [`combine`](super::combine)).

use std::{collections::HashMap, mem::take, sync::Arc};

use smallvec::SmallVec;

use super::{
    DType, Decode, Field, IndexMap, Load, Mosaic, MosaicBox, Operand, Operation, Program, Shape, SourceTensor, Step,
    TensorId, Term, Value,
    combine::{Operands, pairs},
    convert::convert_row,
    encode::EncodedPart,
    gather::{Loop, Loops, normalize},
    kernel::row,
    part::{AxisLoop, Part, gather, limit, linear, reshape, slice, transpose, whole},
    shape::{PerAxis, to_usize},
    tiling::{EncodedLeaf, Origin, PIECES_MAX, Piece, Tiling, TilingError},
    view::{Op, View},
};

/// Some of the indexes of an axis.
#[derive(Clone, Copy, Debug)]
struct Cut {
    axis: usize,
    start: u64,
    stop: u64,
    step: u64,
}

#[derive(Debug, Default)]
struct Lowering {
    /// The decoders of parts so far: the loaded value, then steps, after which the value is exact in the target type.
    chains: Vec<Program>,
    /// The tensors of the parts, for decoders that read several.
    tensors: HashMap<TensorId, SourceTensor>,
    /// What encoders make.
    encoded: Vec<EncodedLeaf>,
}

impl View {
    /// Lowers this view to its normal form.
    ///
    /// # Errors
    /// [`TilingError`] if it needs more pieces than the limit, or cuts a byte of a packed type.
    pub fn lower(&self) -> Result<Tiling, TilingError> {
        let mut lowering = Lowering::default();
        let parts = lowering.parts(self, &[])?;
        lowering.finish(self.shape(), self.dtype(), parts)
    }
}

impl Tiling {
    /// Calls `each` with the pieces that a piece is made from, each with its tiling: the piece itself, or those of the bands and the
    /// reduction that what is encoded needs. Some may be constants.
    ///
    /// # Errors
    /// [`TilingError`] of matrices that are encoded.
    pub fn for_each_stored_piece(&self, piece: &Piece, each: &mut dyn FnMut(&Self, &Piece)) -> Result<(), TilingError> {
        let Origin::Encoded { leaf, offset, .. } = piece.origin else {
            each(self, piece);
            return Ok(());
        };
        let EncodedLeaf { encoding, part } = &self.encoded()[leaf as usize];
        let bands = &encoding.bands;
        let last = offset + piece.source_bounding_units() - 1;
        let numbers = bands.band_of(*part, offset).number..=bands.band_of(*part, last).number;
        if *part != EncodedPart::Factor {
            let tiling = encoding.input.lower()?;
            let (low, _) = bands.input_of(*numbers.start());
            let (last, count) = bands.input_of(*numbers.end());
            tiling.cut(low, last + count, &mut |piece| each(&tiling, &piece));
        }
        if bands.encoder().has_factor() {
            for (_, view) in &encoding.together {
                let tiling = view.lower()?;
                tiling.pieces().iter().for_each(|piece| each(&tiling, piece));
            }
        }
        Ok(())
    }
}

impl Lowering {
    fn chain(&mut self, chain: Program) -> u32 {
        // There are few chains, unless each tensor has its own scales. Those are never equal, so that only the plain chains
        // are worth a search, and they come first.
        let found = self.chains.iter().take(32).position(|other| *other == chain);
        let index = found.unwrap_or_else(|| {
            self.chains.push(chain);
            self.chains.len() - 1
        });
        u32::try_from(index).expect("a tiling has fewer pieces, and so chains, than 2^32")
    }

    /// The decoder of elements that stay as they are.
    fn plain(&mut self, dtype: DType) -> u32 {
        self.chain(Program { load: Load::Element(dtype), steps: Vec::new(), target: dtype })
    }

    /// Appends steps to the decoder of each part of elements of one type, and applies them to constants.
    fn extend_chains(&mut self, parts: &mut [Part], from: DType, steps: &[Step], dtype: DType) {
        let mut known: Vec<(u32, u32)> = Vec::new();
        for part in parts {
            if let Origin::Fill { bytes } = &mut part.base {
                *bytes = constant(*bytes, from, steps, dtype);
            }
            let Some(decoder) = part.base.decoder_mut() else { continue };
            let old = *decoder;
            let new = known.iter().rev().take(8).find(|(from, _)| *from == old).map(|(_, to)| *to);
            *decoder = new.unwrap_or_else(|| {
                let mut chain = self.chains[old as usize].clone();
                chain.steps.extend_from_slice(steps);
                chain.target = dtype;
                let new = self.chain(chain);
                known.push((old, new));
                new
            });
        }
    }

    /// The parts of a view of which only some indexes are wanted. Stacks lower just the operands that have any: a device may hold
    /// few of very many experts.
    fn parts(&mut self, view: &View, mut cuts: &[Cut]) -> Result<Vec<Part>, TilingError> {
        let dtype = view.dtype();
        // Some operators take the cuts, to have just parts of their operands. Those left are made of the parts of the view.
        let mut parts = match view.op() {
            Op::Slice { of, axis, start, stop, step } => {
                let own = Cut { axis: *axis, start: *start, stop: *stop, step: *step };
                let cuts: SmallVec<[Cut; 4]> = std::iter::once(own).chain(take(&mut cuts).iter().copied()).collect();
                self.parts(of, &cuts)?
            }
            Op::Stack { of, axis } => self.stack(of, *axis, take(&mut cuts))?,
            Op::Transpose { of, axes } => {
                let cuts: SmallVec<[Cut; 4]> =
                    take(&mut cuts).iter().map(|cut| Cut { axis: axes[cut.axis], ..*cut }).collect();
                self.parts(of, &cuts)?.into_iter().map(|part| transpose(&part, axes)).collect()
            }
            Op::Cast { of } => self.element_wise(of, dtype, None, take(&mut cuts))?,
            Op::Multiply { of, factor, flush } => {
                self.element_wise(of, dtype, Some(Step::multiply(*factor, *flush)), take(&mut cuts))?
            }
            Op::Add { of, addend } => self.element_wise(of, dtype, Some(Step::add(*addend)), take(&mut cuts))?,
            Op::Exp { of } => self.element_wise(of, dtype, Some(Step::Exp), take(&mut cuts))?,
            Op::Source(tensor) => {
                self.tensors.entry(tensor.id).or_insert_with(|| tensor.clone());
                whole(&tensor.shape, Origin::Tensor { tensor: tensor.id, offset: 0, decoder: self.plain(dtype) })
            }
            Op::Mosaic(mosaic) => self.mosaic(mosaic)?,
            Op::Quantized(value) => {
                let load = Load::Value(Arc::clone(value));
                let target = if dtype.is_float() { dtype } else { DType::U8 };
                let decoder = self.chain(Program { load, steps: Vec::new(), target });
                whole(view.shape(), Origin::Tensor { tensor: value.load.tensor.id, offset: 0, decoder })
            }
            Op::Encoded { of, part } => {
                let leaf = u32::try_from(self.encoded.len()).expect("a view has fewer leaves than 2^32");
                self.encoded.push(EncodedLeaf { encoding: Arc::clone(of), part: *part });
                whole(view.shape(), Origin::Encoded { leaf, offset: 0, decoder: self.plain(dtype) })
            }
            Op::Fill(element) => whole(view.shape(), Origin::Fill { bytes: element.bytes }),
            Op::Gather { of, axis, runs } => gather(&self.parts(of, &[])?, *axis, runs)?,
            Op::Reshape { of } => reshape(&self.parts(of, &[])?, of.shape(), view.shape())?,
            Op::Concat { of, axis } => self.concat(of, *axis)?,
            Op::Pad { of, axis, before, after } => self.pad(view, of, *axis, *before, *after)?,
            Op::Sum { of } => self.combine(of, view, Operation::Add)?,
            Op::Product { of, flush: false } => self.combine(of, view, Operation::Multiply)?,
            Op::Product { of, flush: true } => self.combine(of, view, Operation::MultiplyFlush)?,
        };
        for cut in cuts {
            parts = slice(&parts, cut.axis, cut.start, cut.stop, cut.step)?;
        }
        if view.shape().is_empty() {
            parts.clear();
        }
        limit(&parts)?;
        Ok(parts)
    }

    /// The parts of an operation on each element, which rounds its results.
    fn element_wise(
        &mut self,
        of: &View,
        dtype: DType,
        step: Option<Step>,
        cuts: &[Cut],
    ) -> Result<Vec<Part>, TilingError> {
        let mut parts = self.parts(of, cuts)?;
        let steps: SmallVec<[Step; 2]> = step.into_iter().chain([Step::Round(dtype)]).collect();
        self.extend_chains(&mut parts, of.dtype(), &steps, dtype);
        Ok(parts)
    }

    /// The parts of an operation between two views of one shape.
    fn combine(&mut self, of: &[View; 2], view: &View, operation: Operation) -> Result<Vec<Part>, TilingError> {
        let strides = view.shape().strides();
        let [left, mut right] = [self.operands(&of[0], &strides)?, self.operands(&of[1], &strides)?];
        let mut all = Vec::new();
        for (a, b) in pairs(&left, &mut right)? {
            let chain = self.combined(&left[a], &right[b], operation, (of[0].dtype(), view.dtype()));
            for met in left[a].meet(&right[b])? {
                all.push(self.combined_part(&met, &chain, strides.len()));
                limit(&all)?;
            }
        }
        Ok(all)
    }

    /// The parts of an operand, each with the place of its tensors.
    fn operands(&mut self, of: &View, strides: &[u64]) -> Result<Vec<Operands>, TilingError> {
        let mut all = Vec::new();
        for mut part in self.parts(of, &[])? {
            match part.base.decoder_mut().map(|decoder| &self.chains[*decoder as usize].load) {
                Some(Load::Value(value)) => all.extend(Operands::of_value(&part, value, strides)?),
                Some(Load::Element(_)) | None => all.push(Operands::of_part(&part, strides.len())),
            }
        }
        Ok(all)
    }

    /// The origin and the decoder of the elements that two parts, of type `of`, have in common.
    fn combined(
        &self,
        left: &Operands,
        right: &Operands,
        operation: Operation,
        (of, dtype): (DType, DType),
    ) -> (Origin, Option<Program>) {
        let bits_of = |side: &Operands| {
            let Origin::Fill { bytes } = side.base else { return None };
            let [a, b, c, d, ..] = constant(bytes, of, &[], DType::F32);
            Some(u32::from_le_bytes([a, b, c, d]))
        };
        let rounded = |mut side: Origin, constant: u32| {
            let program = side.decoder_mut().map(|decoder| self.chains[*decoder as usize].clone());
            let steps = [Step::Compute(operation, Term::Constant(constant)), Step::Round(dtype)];
            (side, program.map(|chain| Program { steps: [&chain.steps[..], &steps].concat(), target: dtype, ..chain }))
        };
        let fill = |bits: u32| {
            let bytes = constant(u64::from(bits).to_le_bytes(), DType::F32, &[], dtype);
            (Origin::Fill { bytes }, None)
        };
        match (bits_of(left), bits_of(right)) {
            (Some(a), Some(b)) => fill(row::one(operation)(a, b)),
            // The first NaN is the result, whatever the second operand is.
            (Some(a), None) if f32::from_bits(a).is_nan() => fill(row::one(operation)(a, 0)),
            // Otherwise a sum and a product of two numbers do not depend on their order.
            (Some(a), None) => rounded(right.base, a),
            (None, Some(b)) => rounded(left.base, b),
            (None, None) => {
                let load = Load::Value(Arc::new(self.value(left).then(operation, self.value(right))));
                (left.base, Some(Program { load, steps: vec![Step::Round(dtype)], target: dtype }))
            }
        }
    }

    /// The value of a part's elements, with indexes that are still to be set.
    fn value(&self, side: &Operands) -> Value {
        let Origin::Tensor { tensor, decoder, .. } = side.base else {
            unreachable!("neither a constant nor what is encoded is an operand")
        };
        let chain = &self.chains[decoder as usize];
        match &chain.load {
            Load::Value(value) => {
                let steps = value.steps.iter().chain(&chain.steps).cloned().collect();
                Value { load: value.load.clone(), steps }
            }
            Load::Element(dtype) => {
                let tensor = self.tensors[&tensor].clone();
                let load = Operand { tensor, field: Field::Float(*dtype), index: IndexMap::new(&[]) };
                Value { load, steps: chain.steps.clone() }
            }
        }
    }

    fn combined_part(&mut self, met: &Operands, (base, chain): &(Origin, Option<Program>), rank: usize) -> Part {
        let Some(chain) = chain else { return met.plain(rank, *base) };
        let (mut part, load) = match &chain.load {
            Load::Element(_) => (met.plain(rank, *base), chain.load.clone()),
            Load::Value(value) => {
                let (part, value) = met.valued(rank, value);
                (part, Load::Value(value))
            }
        };
        let number = self.chain(Program { load, ..chain.clone() });
        if let Some(decoder) = part.base.decoder_mut() {
            *decoder = number;
        }
        part
    }

    /// A part for each box, and for each region in no box.
    fn mosaic(&mut self, mosaic: &Mosaic) -> Result<Vec<Part>, TilingError> {
        if mosaic.boxes().len() > PIECES_MAX {
            return Err(TilingError::TooManyPieces);
        }
        let dtype = mosaic.dtype();
        let decoder = self.plain(dtype);
        let along = |(axis, extent, source_stride): (usize, u64, u64)| AxisLoop {
            axis,
            step: Loop { extent, target_stride: 1, source_stride },
        };
        let mut part = |part: MosaicBox<'_>| {
            let stored = || part.stored(dtype).expect("a box is smaller than its tensor");
            self.tensors.entry(part.tensor).or_insert_with(stored);
            let loops = part.extents.iter().zip(part.strides()).enumerate();
            let loops =
                loops.filter(|(_, (extent, _))| **extent > 1).map(|(axis, (extent, stride))| (axis, *extent, stride));
            Part {
                origin: PerAxis::from_slice(part.origin),
                loops: loops.map(along).collect(),
                base: Origin::Tensor { tensor: part.tensor, offset: 0, decoder },
            }
        };
        let mut parts: Vec<Part> = mosaic.boxes().map(&mut part).collect();
        for (origin, extents) in mosaic.gaps() {
            let shape = Shape::try_new(&extents).expect("a part of a tensor is smaller than the tensor");
            let fill = mosaic.fill().expect("only a tensor with a fill value has elements in no box");
            let gap = whole(&shape, Origin::Fill { bytes: fill.bytes });
            parts.extend(gap.into_iter().map(|part| Part { origin: origin.clone(), ..part }));
            limit(&parts)?;
        }
        Ok(parts)
    }

    fn stack(&mut self, of: &[View], axis: usize, cuts: &[Cut]) -> Result<Vec<Part>, TilingError> {
        let (own, others): (Vec<Cut>, Vec<Cut>) = cuts.iter().partition(|cut| cut.axis == axis);
        let inner: Vec<Cut> =
            others.iter().map(|cut| Cut { axis: cut.axis - usize::from(cut.axis > axis), ..*cut }).collect();
        let mut operands: Vec<&View> = of.iter().collect();
        for cut in own {
            let kept = &operands[to_usize(cut.start)..to_usize(cut.stop)];
            operands = kept.iter().copied().step_by(to_usize(cut.step)).collect();
        }
        let mut all = Vec::new();
        for (index, view) in (0..).zip(operands) {
            all.extend(self.parts(view, &inner)?.into_iter().map(|mut part| {
                part.origin.insert(axis, index);
                part.loops.iter_mut().filter(|l| l.axis >= axis).for_each(|l| l.axis += 1);
                part
            }));
            limit(&all)?;
        }
        Ok(all)
    }

    fn concat(&mut self, of: &[View], axis: usize) -> Result<Vec<Part>, TilingError> {
        let mut all = Vec::new();
        let mut at = 0;
        for view in of {
            all.extend(self.parts(view, &[])?.into_iter().map(|part| part.shifted(axis, at)));
            limit(&all)?;
            at += view.shape().extents()[axis];
        }
        Ok(all)
    }

    fn pad(&mut self, view: &View, of: &View, axis: usize, before: u64, after: u64) -> Result<Vec<Part>, TilingError> {
        let mut all: Vec<Part> = self.parts(of, &[])?.into_iter().map(|part| part.shifted(axis, before)).collect();
        let inner = of.shape().extents()[axis];
        for (at, extent) in [(0, before), (before + inner, after)] {
            let mut extents = PerAxis::from_slice(view.shape().extents());
            extents[axis] = extent;
            let Ok(shape) = Shape::try_new(&extents) else { continue };
            all.extend(whole(&shape, Origin::Fill { bytes: [0; 8] }).into_iter().map(|part| part.shifted(axis, at)));
        }
        Ok(all)
    }

    /// Flattens parts to pieces, in units.
    fn finish(self, shape: &Shape, dtype: DType, mut parts: Vec<Part>) -> Result<Tiling, TilingError> {
        let unit = dtype.unit();
        let split = || TilingError::SplitsUnit { dtype, elements: unit.elements, bytes: unit.bytes };
        if !shape.elements().is_multiple_of(unit.elements) {
            return Err(split());
        }
        // Chains that are only prefixes of others are left out.
        let mut numbers = vec![u32::MAX; self.chains.len()];
        let mut decoders: Vec<Decode> = Vec::new();
        for decoder in parts.iter_mut().filter_map(|part| part.base.decoder_mut()) {
            let number = &mut numbers[*decoder as usize];
            if *number == u32::MAX {
                *number = u32::try_from(decoders.len()).expect("a tiling has fewer pieces, and so decoders, than 2^32");
                decoders.push(decode(&self.chains[*decoder as usize]));
            }
            *decoder = *number;
        }
        // Packed integers are made byte by byte, and so are those beside them.
        let is_packed = |chain: &Program| matches!(chain.load, Load::Value(_)) && !chain.target.is_float();
        let width = if self.chains.iter().any(is_packed) { unit.bytes } else { 1 };
        let strides = shape.strides();
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            let (mut start, mut loops) = linear(&part, &strides);
            let mut origin = part.base;
            if unit.elements > 1 && !to_units(unit.elements, &mut start, &mut loops, &mut origin) {
                return Err(split());
            }
            if width > 1 {
                start *= width;
                loops.iter_mut().for_each(|l| {
                    (l.target_stride, l.source_stride) = (l.target_stride * width, l.source_stride * width);
                });
                if let Origin::Fill { bytes } = origin {
                    pieces.extend((start..start + width).zip(bytes).map(|(start, byte)| {
                        let origin = Origin::Fill { bytes: [byte, 0, 0, 0, 0, 0, 0, 0] };
                        Piece { start, loops: loops.clone(), origin }
                    }));
                    continue;
                }
                if let Origin::Tensor { offset, .. } = &mut origin {
                    *offset *= width;
                }
                loops.push(Loop { extent: width, target_stride: 1, source_stride: 1 });
                normalize(&mut loops);
            }
            pieces.push(Piece { start, loops, origin });
        }
        let units = shape.elements() / unit.elements * width;
        Ok(Tiling::new((units, unit.bytes / width), pieces, decoders, self.encoded))
    }
}

/// An element of one type after some steps, as one of another type.
fn constant(bytes: [u8; 8], from: DType, steps: &[Step], target: DType) -> [u8; 8] {
    let (mut made, width) = ([0; 8], |dtype: DType| to_usize(dtype.unit().bytes));
    let program = Program { load: Load::Element(from), steps: steps.to_vec(), target };
    convert_row(&program, &bytes[..width(from)], &mut made[..width(target)]);
    made
}

/// The decoder of a finished chain. The encoding itself is the last rounding.
fn decode(chain: &Program) -> Decode {
    if chain.steps.is_empty() && matches!(chain.load, Load::Element(_)) {
        return Decode::Copy;
    }
    let mut program = chain.clone();
    // A cast through other types and back still rounds and still makes NaNs quiet: `steps` is then not empty.
    program.steps.pop_if(|step| *step == Step::Round(chain.target));
    Decode::Program(program)
}

/// Divides everything by the elements of a unit. Returns whether everything divides.
fn to_units(elements: u64, start: &mut u64, loops: &mut Loops, origin: &mut Origin) -> bool {
    let divide = |n: &mut u64| {
        let whole = n.is_multiple_of(elements);
        *n /= elements;
        whole
    };
    let Some((inner, outer)) = loops.split_last_mut() else { return false };
    let mut whole = inner.target_stride == 1 && inner.source_stride == 1 && divide(&mut inner.extent) && divide(start);
    for l in outer {
        whole &= divide(&mut l.target_stride) && divide(&mut l.source_stride);
    }
    // What encoders make has elements of whole bytes.
    if let Origin::Tensor { offset, .. } = origin {
        whole &= divide(offset);
    }
    normalize(loops);
    whole
}
