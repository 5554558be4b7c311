//! Lowering: from the expression to its tiling.
//!
//! Lowering walks the tree once, bottom up. Each node yields *parts*: like pieces, but with a separate position on each axis of
//! the node's shape, so that operators on axes are simple. A part's loop belongs to one axis; one axis may have several
//! loops (finer ones nested in coarser). Only reshape is complex: it cuts loops again at the borders of the new axes.
//! Element operators append to the parts' decoder and move nothing.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::{
    DType, Decode, Element, Load, Mosaic, MosaicBox, Program, Shape, Step, TensorId,
    convert::convert_scalar,
    gather::Loop,
    shape::{PerAxis, to_usize},
    tiling::{Loops, Origin, PIECES_MAX, Piece, Tiling, TilingError, cut, last_offset, normalize},
    view::{Op, View},
};

/// A loop on one axis; its target stride is in elements of that axis.
#[derive(Clone, Copy, Debug)]
struct AxisLoop {
    axis: usize,
    step: Loop,
}

#[derive(Clone, Copy, Debug)]
enum Base {
    Tensor { tensor: TensorId, offset: u64 },
    Fill(Element),
}

impl Base {
    fn moved(self, by: u64) -> Self {
        match self {
            Self::Tensor { tensor, offset } => Self::Tensor { tensor, offset: offset + by },
            Self::Fill(element) => Self::Fill(element),
        }
    }
}

#[derive(Clone, Debug)]
struct Part {
    origin: PerAxis,
    loops: SmallVec<[AxisLoop; 4]>,
    base: Base,
    /// Index into [`Lowering::chains`].
    chain: u32,
}

/// The decoder of a part so far: the loaded value, then `steps`, after which the value is exact in `dtype`.
#[derive(Clone, Debug, PartialEq)]
struct Chain {
    load: Load,
    steps: Vec<Step>,
    dtype: DType,
}

#[derive(Debug, Default)]
struct Lowering {
    chains: Vec<Chain>,
}

impl View {
    /// Lowers this view to its normal form.
    ///
    /// # Errors
    /// [`TilingError`] if it needs more pieces than the limit, or cuts a byte of a packed type.
    pub fn lower(&self) -> Result<Tiling, TilingError> {
        let mut lowering = Lowering::default();
        let parts = lowering.parts(self)?;
        lowering.finish(self.shape(), self.dtype(), parts)
    }
}

fn limit(parts: &[Part]) -> Result<(), TilingError> {
    if parts.len() > PIECES_MAX { Err(TilingError::TooManyPieces) } else { Ok(()) }
}

/// The part that covers the whole of `shape` from one base.
fn whole(shape: &Shape, base: Base, chain: u32) -> Vec<Part> {
    if shape.is_empty() {
        return Vec::new();
    }
    let strides = shape.strides();
    let loops = shape.extents().iter().enumerate().filter(|(_, extent)| **extent > 1);
    let loops = loops.map(|(axis, extent)| AxisLoop {
        axis,
        step: Loop { extent: *extent, target_stride: 1, source_stride: strides[axis] },
    });
    vec![Part { origin: smallvec![0; shape.rank()], loops: loops.collect(), base, chain }]
}

impl Lowering {
    fn chain(&mut self, chain: Chain) -> u32 {
        // There are few chains, unless each tensor has its own scales. Those are never equal, so that only the plain chains
        // are worth a search, and they come first.
        let found = self.chains.iter().take(32).position(|other| *other == chain);
        let index = found.unwrap_or_else(|| {
            self.chains.push(chain);
            self.chains.len() - 1
        });
        u32::try_from(index).expect("a tiling has fewer pieces, and so chains, than 2^32")
    }

    /// Appends steps to the decoder of each part.
    fn extend_chains(&mut self, parts: &mut [Part], dtype: DType, steps: &[Step]) {
        let mut known: Vec<(u32, u32)> = Vec::new();
        for part in parts {
            let old = part.chain;
            let new = known.iter().rev().take(8).find(|(from, _)| *from == old).map(|(_, to)| *to);
            part.chain = new.unwrap_or_else(|| {
                let mut chain = self.chains[old as usize].clone();
                chain.steps.extend_from_slice(steps);
                chain.dtype = dtype;
                let new = self.chain(chain);
                known.push((old, new));
                new
            });
        }
    }

    fn parts(&mut self, view: &View) -> Result<Vec<Part>, TilingError> {
        let mut parts = match view.op() {
            Op::Source(tensor) => {
                let chain =
                    self.chain(Chain { load: Load::Element(tensor.dtype), steps: Vec::new(), dtype: tensor.dtype });
                whole(&tensor.shape, Base::Tensor { tensor: tensor.id, offset: 0 }, chain)
            }
            Op::Mosaic(mosaic) => self.mosaic(mosaic)?,
            Op::Quantized(value) => {
                let load = Load::Value(Arc::clone(value));
                let chain = self.chain(Chain { load, steps: Vec::new(), dtype: view.dtype() });
                whole(view.shape(), Base::Tensor { tensor: value.load.tensor.id, offset: 0 }, chain)
            }
            Op::Fill(element) => {
                let chain = self.chain(Chain {
                    load: Load::Element(element.dtype()),
                    steps: Vec::new(),
                    dtype: element.dtype(),
                });
                whole(view.shape(), Base::Fill(*element), chain)
            }
            Op::Slice { of, axis, start, stop, step } => slice(&self.parts(of)?, *axis, *start, *stop, *step)?,
            Op::Transpose { of, axes } => self.parts(of)?.into_iter().map(|part| transpose(&part, axes)).collect(),
            Op::Reshape { of } => reshape(&self.parts(of)?, of.shape(), view.shape())?,
            Op::Stack { of, axis } => self.stack(of, *axis)?,
            Op::Concat { of, axis } => self.concat(of, *axis)?,
            Op::Pad { of, axis, before, after } => self.pad(view, of, *axis, *before, *after)?,
            Op::Cast { of } => {
                let mut parts = self.parts(of)?;
                self.extend_chains(&mut parts, view.dtype(), &[Step::Round(view.dtype())]);
                parts
            }
            Op::Multiply { of, factor, flush } => self.arithmetic(of, view.dtype(), Step::multiply(*factor, *flush))?,
            Op::Add { of, addend } => self.arithmetic(of, view.dtype(), Step::add(*addend))?,
        };
        if view.shape().is_empty() {
            parts.clear();
        }
        limit(&parts)?;
        Ok(parts)
    }

    fn arithmetic(&mut self, of: &View, dtype: DType, step: Step) -> Result<Vec<Part>, TilingError> {
        let mut parts = self.parts(of)?;
        self.extend_chains(&mut parts, dtype, &[step, Step::Round(dtype)]);
        Ok(parts)
    }

    /// A part for each box, and for each region in no box.
    fn mosaic(&mut self, mosaic: &Mosaic) -> Result<Vec<Part>, TilingError> {
        if mosaic.boxes().len() > PIECES_MAX {
            return Err(TilingError::TooManyPieces);
        }
        let dtype = mosaic.dtype();
        let chain = self.chain(Chain { load: Load::Element(dtype), steps: Vec::new(), dtype });
        let along = |(axis, extent, source_stride): (usize, u64, u64)| AxisLoop {
            axis,
            step: Loop { extent, target_stride: 1, source_stride },
        };
        let part = |part: MosaicBox<'_>| {
            let loops = part.extents.iter().zip(part.strides()).enumerate();
            let loops =
                loops.filter(|(_, (extent, _))| **extent > 1).map(|(axis, (extent, stride))| (axis, *extent, stride));
            Part {
                origin: PerAxis::from_slice(part.origin),
                loops: loops.map(along).collect(),
                base: Base::Tensor { tensor: part.tensor, offset: 0 },
                chain,
            }
        };
        let mut parts: Vec<Part> = mosaic.boxes().map(part).collect();
        for (origin, extents) in mosaic.gaps() {
            let shape = Shape::try_new(&extents).expect("a part of a tensor is smaller than the tensor");
            let fill = mosaic.fill().expect("only a tensor with a fill value has elements in no box");
            parts.extend(
                whole(&shape, Base::Fill(fill), chain).into_iter().map(|part| Part { origin: origin.clone(), ..part }),
            );
            limit(&parts)?;
        }
        Ok(parts)
    }

    fn stack(&mut self, of: &[View], axis: usize) -> Result<Vec<Part>, TilingError> {
        let mut all = Vec::new();
        for (index, view) in of.iter().enumerate() {
            all.extend(self.parts(view)?.into_iter().map(|mut part| {
                part.origin.insert(axis, index as u64);
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
            all.extend(self.parts(view)?.into_iter().map(|mut part| {
                part.origin[axis] += at;
                part
            }));
            limit(&all)?;
            at += view.shape().extents()[axis];
        }
        Ok(all)
    }

    fn pad(&mut self, view: &View, of: &View, axis: usize, before: u64, after: u64) -> Result<Vec<Part>, TilingError> {
        let mut all = self.parts(of)?;
        for part in &mut all {
            part.origin[axis] += before;
        }
        let zero = Element::zero(view.dtype());
        let chain = self.chain(Chain { load: Load::Element(view.dtype()), steps: Vec::new(), dtype: view.dtype() });
        let inner = of.shape().extents()[axis];
        for (at, extent) in [(0, before), (before + inner, after)] {
            let mut extents = PerAxis::from_slice(view.shape().extents());
            extents[axis] = extent;
            let Ok(shape) = Shape::try_new(&extents) else { continue };
            all.extend(whole(&shape, Base::Fill(zero), chain).into_iter().map(|mut part| {
                part.origin[axis] = at;
                part
            }));
        }
        Ok(all)
    }

    /// Flattens parts to pieces, in units.
    fn finish(self, shape: &Shape, dtype: DType, parts: Vec<Part>) -> Result<Tiling, TilingError> {
        let unit = dtype.unit();
        let split = || TilingError::SplitsUnit { dtype, elements: unit.elements, bytes: unit.bytes };
        if !shape.elements().is_multiple_of(unit.elements) {
            return Err(split());
        }
        // Chains that are only prefixes of others are left out.
        let mut numbers = vec![u32::MAX; self.chains.len()];
        let mut decoders: Vec<Decode> = Vec::new();
        for part in &parts {
            let number = &mut numbers[part.chain as usize];
            if *number == u32::MAX {
                *number = u32::try_from(decoders.len()).expect("a tiling has fewer pieces, and so decoders, than 2^32");
                decoders.push(decode(&self.chains[part.chain as usize]));
            }
        }
        let strides = shape.strides();
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            let (mut start, mut loops) = linear(&part, &strides);
            let mut base = part.base;
            if unit.elements > 1 {
                base = to_units(unit.elements, &mut start, &mut loops, base).ok_or_else(split)?;
            }
            let decoder = numbers[part.chain as usize];
            let origin = match base {
                Base::Tensor { tensor, offset } => Origin::Tensor { tensor, offset, decoder },
                Base::Fill(element) => Origin::Fill { bytes: fill_bytes(&decoders[decoder as usize], &element) },
            };
            pieces.push(Piece { start, loops, origin });
        }
        Ok(Tiling::new(shape.elements() / unit.elements, unit.bytes, pieces, decoders))
    }
}

/// The decoder of a finished chain. The encoding itself is the last rounding.
fn decode(chain: &Chain) -> Decode {
    if chain.steps.is_empty() && matches!(chain.load, Load::Element(_)) {
        return Decode::Copy;
    }
    let mut steps = chain.steps.clone();
    if steps.last() == Some(&Step::Round(chain.dtype)) {
        steps.pop();
    }
    // A cast through other types and back still rounds and still makes NaNs quiet: `steps` is then not empty.
    Decode::Program(Program { load: chain.load.clone(), target: chain.dtype, steps })
}

fn fill_bytes(decode: &Decode, element: &Element) -> [u8; 8] {
    let mut bytes = [0; 8];
    match decode {
        Decode::Copy => bytes[..element.unit_bytes().len()].copy_from_slice(element.unit_bytes()),
        Decode::Program(program) => {
            let width = to_usize(program.target.unit().bytes);
            convert_scalar(program, element.unit_bytes(), &mut bytes[..width]);
        }
    }
    bytes
}

/// Start and loops of a part in the row-major order of a shape with these strides.
fn linear(part: &Part, strides: &[u64]) -> (u64, Loops) {
    let start = part.origin.iter().zip(strides).map(|(origin, stride)| origin * stride).sum();
    let mut loops: Loops =
        part.loops.iter().map(|l| Loop { target_stride: l.step.target_stride * strides[l.axis], ..l.step }).collect();
    if matches!(part.base, Base::Fill(_)) {
        // A constant has no order: let its loops merge on the target side alone.
        loops.iter_mut().for_each(|l| l.source_stride = l.target_stride);
    }
    normalize(&mut loops);
    (start, loops)
}

/// Divides everything by the elements of a unit, or `None` if something does not divide.
fn to_units(elements: u64, start: &mut u64, loops: &mut Loops, base: Base) -> Option<Base> {
    let divide = |n: &mut u64| {
        let whole = n.is_multiple_of(elements);
        *n /= elements;
        whole
    };
    let (inner, outer) = loops.split_last_mut()?;
    let mut whole = inner.target_stride == 1 && inner.source_stride == 1 && divide(&mut inner.extent) && divide(start);
    for l in outer {
        whole &= divide(&mut l.target_stride) && divide(&mut l.source_stride);
    }
    let base = match base {
        Base::Tensor { tensor, mut offset } => {
            whole &= divide(&mut offset);
            Base::Tensor { tensor, offset }
        }
        Base::Fill(element) => Base::Fill(element),
    };
    normalize(loops);
    whole.then_some(base)
}

fn transpose(part: &Part, axes: &[usize]) -> Part {
    let mut inverse = vec![0; axes.len()];
    axes.iter().enumerate().for_each(|(to, from)| inverse[*from] = to);
    Part {
        origin: axes.iter().map(|axis| part.origin[*axis]).collect(),
        loops: part.loops.iter().map(|l| AxisLoop { axis: inverse[l.axis], step: l.step }).collect(),
        ..*part
    }
}

fn slice(parts: &[Part], axis: usize, start: u64, stop: u64, step: u64) -> Result<Vec<Part>, TilingError> {
    let mut sliced = Vec::new();
    for part in parts {
        let mut along: Loops = part.loops.iter().filter(|l| l.axis == axis).map(|l| l.step).collect();
        normalize(&mut along);
        let others = part.loops.iter().filter(|l| l.axis != axis);
        let mut emit = |at: u64, moved: u64, loops: &[Loop]| {
            let mut cut_part = Part {
                origin: part.origin.clone(),
                loops: others.clone().copied().collect(),
                base: part.base.moved(moved),
                chain: part.chain,
            };
            cut_part.origin[axis] = at;
            cut_part.loops.extend(loops.iter().map(|l| AxisLoop { axis, step: *l }));
            sliced.push(cut_part);
        };
        cut(part.origin[axis], 0, &along, start, stop, &mut |at, moved, loops| {
            select(at - start, moved, &loops, step, &mut Loops::new(), &mut emit);
        });
        limit(&sliced)?;
    }
    Ok(sliced)
}

/// Emits the elements at multiples of `step`, their positions divided by it.
fn select(at: u64, moved: u64, loops: &[Loop], step: u64, chosen: &mut Loops, emit: &mut dyn FnMut(u64, u64, &[Loop])) {
    let [top, rest @ ..] = loops else {
        if at.is_multiple_of(step) {
            emit(at / step, moved, chosen);
        }
        return;
    };
    // Positions modulo `step` repeat every `period` turns of this loop.
    let period = step / gcd(top.target_stride, step);
    for turn in 0..period.min(top.extent) {
        let extent = (top.extent - turn).div_ceil(period);
        let kept = chosen.len();
        if extent > 1 {
            let target_stride = top.target_stride * period / step;
            chosen.push(Loop { extent, target_stride, source_stride: top.source_stride * period });
        }
        select(at + turn * top.target_stride, moved + turn * top.source_stride, rest, step, chosen, emit);
        chosen.truncate(kept);
    }
}

pub(super) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn reshape(parts: &[Part], from: &Shape, to: &Shape) -> Result<Vec<Part>, TilingError> {
    let (from_strides, to_strides) = (from.strides(), to.strides());
    let mut reshaped = Vec::new();
    for part in parts {
        let (start, loops) = linear(part, &from_strides);
        let empty =
            Part { origin: smallvec![0; to.rank()], loops: SmallVec::new(), base: part.base, chain: part.chain };
        assign(start, &loops, &to_strides, 0, empty, &mut reshaped)?;
    }
    Ok(reshaped)
}

/// A callback for the first element and the loops of a part, each loop with its axis.
pub(super) type EachPart<'a> = &'a mut dyn FnMut(u64, &[(usize, Loop)]);

/// Cuts loops over the elements `start + i0*t0 + …` so that each moves on one axis of a mixed radix. `borders` are the
/// strides of its axes, by falling stride; the last is 1. Emits the first element and the loops with their axes. Returns
/// whether the number of parts stays within the limit of a tiling.
pub(super) fn split_at_borders(start: u64, loops: &[Loop], borders: &[u64], emit: EachPart<'_>) -> bool {
    let element = Element::zero(DType::U8);
    let origin = smallvec![0; borders.len()];
    let whole = Part { origin, loops: SmallVec::new(), base: Base::Fill(element), chain: 0 };
    let mut parts = Vec::new();
    let fits = assign(start, loops, borders, 0, whole, &mut parts).is_ok();
    for part in parts {
        let first = part.origin.iter().zip(borders).map(|(origin, border)| origin * border).sum();
        let loops: SmallVec<[(usize, Loop); 4]> = part
            .loops
            .iter()
            .map(|l| (l.axis, Loop { target_stride: l.step.target_stride * borders[l.axis], ..l.step }))
            .collect();
        emit(first, &loops);
    }
    fits
}

/// Gives each loop of a linear set to an axis, from `axis` inwards, cutting loops where they cross the border of a turn
/// of that axis.
fn assign(
    start: u64,
    loops: &[Loop],
    strides: &[u64],
    axis: usize,
    mut part: Part,
    done: &mut Vec<Part>,
) -> Result<(), TilingError> {
    let Some(&turn) = strides.get(axis) else {
        done.push(part);
        return limit(done);
    };
    if axis + 1 == strides.len() {
        part.origin[axis] += start;
        part.loops.extend(loops.iter().map(|l| AxisLoop { axis, step: *l }));
        done.push(part);
        return limit(done);
    }
    let all = last_offset(loops);
    if start / turn == (start + all) / turn {
        part.origin[axis] += start / turn;
        return assign(start % turn, loops, strides, axis + 1, part, done);
    }
    let Some((top, rest)) = loops.split_first() else { return Ok(()) };
    if top.target_stride.is_multiple_of(turn) {
        part.loops.push(AxisLoop { axis, step: Loop { target_stride: top.target_stride / turn, ..*top } });
        return assign(start, rest, strides, axis, part, done);
    }
    let with_top = |tops: &[Loop]| -> Loops { tops.iter().filter(|l| l.extent > 1).chain(rest).copied().collect() };
    // Positions within a turn repeat every `period` steps of this loop: whole periods become a separate loop.
    let period = turn / gcd(turn, top.target_stride);
    let periods = top.extent / period;
    if periods > 1 {
        let outer = Loop {
            extent: periods,
            target_stride: top.target_stride * period,
            source_stride: top.source_stride * period,
        };
        let inner = Loop { extent: period, ..*top };
        assign(start, &with_top(&[outer, inner]), strides, axis, part.clone(), done)?;
        let done_steps = periods * period;
        if done_steps < top.extent {
            part.base = part.base.moved(done_steps * top.source_stride);
            let tail = Loop { extent: top.extent - done_steps, ..*top };
            assign(start + done_steps * top.target_stride, &with_top(&[tail]), strides, axis, part, done)?;
        }
        return Ok(());
    }
    // Few steps: those that stay within one turn form a group.
    let rest_last = all - (top.extent - 1) * top.target_stride;
    let mut step = 0;
    while step < top.extent {
        let first = start + step * top.target_stride;
        let border = (first / turn + 1) * turn;
        let room = (border - first).saturating_sub(rest_last + 1);
        let fits = first / turn == (first + rest_last) / turn;
        let group = if fits { (room / top.target_stride + 1).min(top.extent - step) } else { 1 };
        let mut grouped = part.clone();
        grouped.base = grouped.base.moved(step * top.source_stride);
        assign(first, &with_top(&[Loop { extent: group, ..*top }]), strides, axis, grouped, done)?;
        step += group;
    }
    Ok(())
}
