//! The algebra of views: lowering agrees with the reference evaluator on random views, and the operators obey their laws.
//!
//! Each law compares two expressions by their tilings and by the reference. `PROPTEST_CASES` sets the number of cases.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use crate::common::{
    decode_by_reference, execute, gathered_bytes, gathered_from, reference_bytes, shape, source, source_bytes, tensor,
    tiled_bytes,
    views::{Choices, any_float_view, any_view, choices},
};
use ckfs::tensor::{
    Bits, DType, Digit, Element, Field, IndexMap, Keep, Op, Operand, Operation, PIECES_MAX, Region, SourceTensor,
    TensorId, TilingError, Value, View, ViewError,
};
use proptest::prelude::*;
use std::{collections::HashMap, ops::Range};

/// Asserts that both views are the same tensor.
#[track_caller]
fn assert_same(left: &View, right: &View) {
    assert_eq!((left.shape(), left.dtype()), (right.shape(), right.dtype()), "{left} and {right}");
    let bytes = tiled_bytes(left);
    assert!(bytes == tiled_bytes(right), "tilings of {left} and {right}");
    assert!(bytes == reference_bytes(left), "tiling and reference of {left}");
    assert!(bytes == reference_bytes(right), "tiling and reference of {right}");
}

/// A random cut of an axis, `(start, stop)`.
fn some_range(choices: &mut Choices, extent: u64) -> (u64, u64) {
    let start = choices.below(extent + 1);
    (start, start + choices.below(extent - start + 1))
}

/// A random axis of a view that may be cut anywhere: not the last one of packed types. `None` if there is none.
fn some_axis(choices: &mut Choices, view: &View) -> Option<usize> {
    let axes = view.shape().rank() - usize::from(view.dtype().unit().elements > 1);
    (axes > 0).then(|| choices.index(axes))
}

/// A layout operator with its name; only the operand is open.
type Layout = (&'static str, Box<dyn Fn(&View) -> View>);

/// A random layout operator that fits `view` and others of its shape.
fn some_layout(choices: &mut Choices, view: &View) -> Layout {
    let Some(axis) = some_axis(choices, view) else {
        return ("stack", Box::new(|view| View::stack(0, &[view.clone(), view.clone()]).unwrap()));
    };
    let extent = view.shape().extents()[axis];
    let rank = view.shape().rank();
    let (start, stop) = some_range(choices, extent);
    let step = choices.below(3) + 1;
    match choices.below(8) {
        6 => {
            let indexes: Vec<u64> =
                if extent == 0 { vec![] } else { (0..=step).map(|_| choices.below(extent)).collect() };
            ("gather", Box::new(move |view| view.gather(axis, &indexes).unwrap()))
        }
        7 => {
            let (low, high) = (start.cast_signed() - 1, stop.cast_signed() - 1);
            ("slice down", Box::new(move |view| view.slice_down(axis, high, low, step).unwrap()))
        }
        0 => ("slice", Box::new(move |view| view.slice(axis, start, stop, step).unwrap())),
        1 => {
            let axes = choices.permutation(rank);
            ("transpose", Box::new(move |view| view.transpose(&axes).unwrap()))
        }
        2 => {
            let flat = shape(&[view.shape().elements()]);
            ("reshape", Box::new(move |view| view.reshape(&flat).unwrap()))
        }
        3 => ("stack", Box::new(move |view| View::stack(axis, &[view.clone(), view.clone()]).unwrap())),
        4 => ("concat", Box::new(move |view| View::concat(axis, &[view.clone(), view.clone()]).unwrap())),
        _ => ("pad", Box::new(move |view| view.pad(axis, start, step).unwrap())),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(1) * 40))]

    #[test]
    fn tilings_agree_with_the_reference(view in any_view()) {
        let tiling = view.lower().unwrap();
        prop_assert_eq!(tiling.len_bytes(), view.bytes().unwrap());
        let bytes = execute(&view, &tiling, decode_by_reference);
        prop_assert!(bytes == reference_bytes(&view), "{:?}: {:?}", view, tiling);
    }

    #[test]
    fn conversions_agree_with_the_reference(view in any_float_view(), stretch in 1u64..300) {
        let bytes = gathered_bytes(&view, &view.lower().unwrap(), stretch);
        prop_assert!(bytes == reference_bytes(&view), "{:?} in stretches of {}", view, stretch);
    }

    #[test]
    fn kernels_agree_with_the_reference(view in any_view(), stretch in 1u64..300) {
        let bytes = gathered_bytes(&view, &view.lower().unwrap(), stretch);
        prop_assert!(bytes == reference_bytes(&view), "{:?} in stretches of {}", view, stretch);
    }

    /// Packed types may be cut inside a byte; that is refused, never wrong.
    #[test]
    fn packed_types_are_right_or_refused(mut choices in choices()) {
        let dtype = choices.of(&[DType::F4, DType::F6E2M3, DType::F6E3M2]);
        let view = choices.any_view_of(dtype, false);
        let unit = dtype.unit();
        match view.lower() {
            Ok(tiling) => {
                prop_assert!(execute(&view, &tiling, decode_by_reference) == reference_bytes(&view), "{}", view);
            }
            Err(error) => prop_assert_eq!(
                error,
                TilingError::SplitsUnit { dtype, elements: unit.elements, bytes: unit.bytes }
            ),
        }
    }
}

proptest! {
    #[test]
    fn slice_of_slice_is_one_slice(view in any_view(), mut choices in choices()) {
        let Some(axis) = some_axis(&mut choices, &view) else { return Ok(()) };
        let (start, stop) = some_range(&mut choices, view.shape().extents()[axis]);
        let step = choices.below(3) + 1;
        let outer = view.slice(axis, start, stop, step).unwrap();
        let (from, to) = some_range(&mut choices, outer.shape().extents()[axis]);
        let again = choices.below(3) + 1;
        let twice = outer.slice(axis, from, to, again).unwrap();
        // From the first element to just after the last, if there is one.
        let (first, end) = if from < to { (start + from * step, start + (to - 1) * step + 1) } else { (stop, stop) };
        let once = view.slice(axis, first, end, step * again).unwrap();
        assert_same(&twice, &once);
    }

    #[test]
    fn steps_of_slices_interleave(view in any_view(), mut choices in choices()) {
        let Some(axis) = some_axis(&mut choices, &view) else { return Ok(()) };
        let extent = view.shape().extents()[axis];
        let step = choices.below(3) + 1;
        let count = extent / step;
        let view = view.slice(axis, 0, count * step, 1).unwrap();
        let strided: Vec<View> = (0..step).map(|from| view.slice(axis, from.min(count * step), count * step, step).unwrap()).collect();
        // Stacked after the axis, the strands come back in order.
        let stacked = View::stack(axis + 1, &strided).unwrap();
        assert_same(&stacked.reshape(view.shape()).unwrap(), &view);
    }

    #[test]
    fn transpose_and_back(view in any_view(), mut choices in choices()) {
        let rank = view.shape().rank();
        let free = rank - usize::from(view.dtype().unit().elements > 1);
        let mut axes = choices.permutation(free);
        axes.extend(free..rank);
        let mut back = vec![0; rank];
        axes.iter().enumerate().for_each(|(to, from)| back[*from] = to);
        let there = view.transpose(&axes).unwrap();
        assert_same(&there.transpose(&back).unwrap(), &view);
        let other = choices.permutation(free).into_iter().chain(free..rank).collect::<Vec<_>>();
        let composed: Vec<usize> = other.iter().map(|axis| axes[*axis]).collect();
        assert_same(&there.transpose(&other).unwrap(), &view.transpose(&composed).unwrap());
    }

    #[test]
    fn concat_of_a_partition_is_the_whole(view in any_view(), mut choices in choices()) {
        let Some(axis) = some_axis(&mut choices, &view) else { return Ok(()) };
        let extent = view.shape().extents()[axis];
        let (first, second) = some_range(&mut choices, extent);
        let cuts = [0, first, second, extent];
        let parts: Vec<View> = cuts.windows(2).map(|cut| view.slice(axis, cut[0], cut[1], 1).unwrap()).collect();
        assert_same(&View::concat(axis, &parts).unwrap(), &view);
    }

    #[test]
    fn an_operand_of_a_stack_is_its_slice(view in any_view(), mut choices in choices()) {
        // The last axis of packed types stays last.
        let axis = choices.index(view.shape().rank() + usize::from(view.dtype().unit().elements == 1));
        let other = View::fill(view.shape().clone(), Element::zero(view.dtype()));
        let which = choices.below(3);
        let mut operands = vec![other.clone(), other.clone(), other];
        operands[usize::try_from(which).unwrap()] = view.clone();
        let stacked = View::stack(axis, &operands).unwrap();
        let slice = stacked.slice(axis, which, which + 1, 1).unwrap();
        assert_same(&slice.reshape(view.shape()).unwrap(), &view);
    }

    #[test]
    fn reshape_keeps_row_major_order(view in any_view(), mut choices in choices()) {
        let bytes = tiled_bytes(&view);
        let flat = view.reshape(&shape(&[view.shape().elements()])).unwrap();
        prop_assert!(tiled_bytes(&flat) == bytes);
        let group = view.dtype().unit().elements;
        let folds = view.shape().elements() / group;
        let rows = choices.below(8) + 1;
        if folds > 0 && folds.is_multiple_of(rows) {
            let there = view.reshape(&shape(&[rows, folds / rows, group])).unwrap();
            prop_assert!(tiled_bytes(&there) == bytes);
            // A row of the new shape is a span of the flat one.
            let row = choices.below(rows);
            let length = folds / rows * group;
            let found = there.slice(0, row, row + 1, 1).unwrap().reshape(&shape(&[length])).unwrap();
            assert_same(&found, &flat.slice(0, row * length, (row + 1) * length, 1).unwrap());
        }
    }

    #[test]
    fn reshape_there_and_back(view in any_view()) {
        let there = view.reshape(&shape(&[1, view.shape().elements(), 1])).unwrap();
        assert_same(&there.reshape(view.shape()).unwrap(), &view);
        prop_assert!(view.reshape(view.shape()).unwrap().shape() == view.shape());
    }

    #[test]
    fn pad_then_slice_is_the_operand(view in any_view(), mut choices in choices()) {
        let Some(axis) = some_axis(&mut choices, &view) else { return Ok(()) };
        let extent = view.shape().extents()[axis];
        let (before, after) = (choices.below(4), choices.below(4));
        let padded = view.pad(axis, before, after).unwrap();
        assert_same(&padded.slice(axis, before, before + extent, 1).unwrap(), &view);
        let zeros = padded.slice(axis, 0, before, 1).unwrap();
        assert_same(&zeros, &View::fill(zeros.shape().clone(), Element::zero(view.dtype())));
    }

    #[test]
    fn fill_is_the_same_everywhere(mut choices in choices()) {
        let value = Element::f32(choices.of(&[0.0, -0.0, 1.5, f32::NAN]));
        let view = View::fill(shape(&choices.extents()), value);
        let (name, layout) = some_layout(&mut choices, &view);
        let moved = layout(&view);
        if name == "pad" {
            return Ok(());
        }
        assert_same(&moved, &View::fill(moved.shape().clone(), value));
    }

    #[test]
    fn element_operators_commute_with_layout(view in any_float_view(), mut choices in choices()) {
        let to = choices.of(&[DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F64]);
        let keep = choices.of(&[Keep::Operand, Keep::F32]);
        let flush = choices.below(2) == 1;
        let (name, layout) = some_layout(&mut choices, &view);
        let cast = |view: &View| view.cast(to).unwrap();
        assert_same(&layout(&cast(&view)), &cast(&layout(&view)));
        let multiply = |view: &View| view.multiply(0.088_388_35, flush, keep).unwrap();
        assert_same(&layout(&multiply(&view)), &multiply(&layout(&view)));
        if name != "pad" {
            let exp = |view: &View| view.exp().unwrap();
            assert_same(&layout(&exp(&view)), &exp(&layout(&view)));
        }
        // A sum changes the zeros of a pad.
        if name != "pad" {
            let add = |view: &View| view.add(1.0, keep).unwrap();
            assert_same(&layout(&add(&view)), &add(&layout(&view)));
        }
    }

    #[test]
    fn sums_and_products_of_two_views_commute_with_layout(mut choices in choices()) {
        let (dtype, extents) = (choices.of(&[DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F64]), choices.extents());
        let other = choices.plain_view(&extents, dtype);
        let view = choices.plain_view(&extents, dtype);
        let keep = choices.of(&[Keep::Operand, Keep::F32]);
        let (name, layout) = some_layout(&mut choices, &view);
        // A sum of pads is a pad of the sum, as 0 + 0 = 0, and likewise a product.
        let add = |view: &View, other: &View| view.add_view(other, keep).unwrap();
        assert_same(&layout(&add(&view, &other)), &add(&layout(&view), &layout(&other)));
        let multiply = |view: &View, other: &View| view.multiply_view(other, name.len() % 2 == 0, keep).unwrap();
        assert_same(&layout(&multiply(&view, &other)), &multiply(&layout(&view), &layout(&other)));
        // With a constant everywhere they are the operators with a constant.
        let two = View::fill(view.shape().clone(), Element::f32(2.5)).cast(dtype).unwrap();
        assert_same(&add(&view, &two), &view.add(2.5, keep).unwrap());
        assert_same(&multiply(&two, &view), &view.multiply(2.5, name.len() % 2 == 0, keep).unwrap());
    }

    #[test]
    fn a_gather_is_a_concat_of_slices(view in any_view(), mut choices in choices()) {
        let Some(axis) = some_axis(&mut choices, &view) else { return Ok(()) };
        let extent = view.shape().extents()[axis];
        if extent == 0 {
            return Ok(());
        }
        let count = choices.below(9) + 1;
        let indexes: Vec<u64> = (0..count).map(|_| choices.below(extent)).collect();
        let slices: Vec<View> = indexes.iter().map(|index| view.slice(axis, *index, index + 1, 1).unwrap()).collect();
        assert_same(&view.gather(axis, &indexes).unwrap(), &View::concat(axis, &slices).unwrap());
        // A gather of a gather is one gather.
        let again: Vec<u64> = (0..3).map(|_| choices.below(count)).collect();
        let both: Vec<u64> = again.iter().map(|at| indexes[usize::try_from(*at).unwrap()]).collect();
        let twice = view.gather(axis, &indexes).unwrap().gather(axis, &again).unwrap();
        assert_same(&twice, &view.gather(axis, &both).unwrap());
        // Downwards and downwards again is the view.
        let top = i64::try_from(extent).unwrap() - 1;
        let down = view.slice_down(axis, top, -1, 1).unwrap();
        assert_same(&down.slice_down(axis, top, -1, 1).unwrap(), &view);
    }

    #[test]
    fn dequantize_commutes_with_layout(
        rows in 0u64..9, columns in 0u64..9, block in (1u64..4, 1u64..4), mut choices in choices()
    ) {
        let scales = tensor(1, choices.of(&[DType::F32, DType::BF16, DType::F8E8M0]), &[rows.div_ceil(block.0), columns.div_ceil(block.1)]);
        let weights = tensor(0, DType::F8E4M3, &[rows, columns]);
        let view = View::dequantize(weights, scales, block, DType::BF16).unwrap();
        let (_, layout) = some_layout(&mut choices, &view);
        let moved = layout(&view);
        let bytes = tiled_bytes(&moved);
        prop_assert!(bytes == reference_bytes(&moved), "{}", moved);
        // The same operator on a tensor that holds the dequantized values.
        let values = reference_bytes(&view);
        let stored = View::source(SourceTensor { id: TensorId(2), dtype: DType::BF16, shape: view.shape().clone() });
        let placed = ckfs::read::reference::evaluate(&layout(&stored), 0..bytes.len() as u64, |_, span| {
            Ok(values[usize::try_from(span.start).unwrap()..usize::try_from(span.end).unwrap()].to_vec())
        });
        prop_assert!(placed.unwrap() == bytes, "{}", moved);
    }

    #[test]
    fn a_region_of_a_shard_is_a_slice_of_the_whole(view in any_view(), mut choices in choices()) {
        let free = view.shape().rank() - usize::from(view.dtype().unit().elements > 1);
        let ranges: Vec<_> = view.shape().extents().iter().enumerate().map(|(axis, extent)| {
            if axis < free { let (a, b) = some_range(&mut choices, *extent); a..b } else { 0..*extent }
        }).collect();
        let shard = view.region(&Region::within(view.shape(), &ranges).unwrap()).unwrap();
        let inner: Vec<_> = shard.shape().extents().iter().enumerate().map(|(axis, extent)| {
            if axis < free { let (a, b) = some_range(&mut choices, *extent); a..b } else { 0..*extent }
        }).collect();
        let part = shard.region(&Region::within(shard.shape(), &inner).unwrap()).unwrap();
        let global: Vec<_> = ranges.iter().zip(&inner).map(|(a, b)| a.start + b.start..a.start + b.end).collect();
        assert_same(&part, &view.region(&Region::within(view.shape(), &global).unwrap()).unwrap());
    }

    #[test]
    fn shards_of_a_partition_tile_the_tensor(view in any_view(), mut choices in choices()) {
        let Some(rows) = some_axis(&mut choices, &view) else { return Ok(()) };
        let Some(columns) = some_axis(&mut choices, &view) else { return Ok(()) };
        if rows == columns {
            return Ok(());
        }
        let (down, across) = (choices.below(4) + 1, choices.below(3) + 1);
        // torch.chunk: every shard as long as the first, the last ones shorter or empty.
        let chunk = |extent: u64, parts: u64, which: u64| {
            let length = extent.div_ceil(parts);
            (which * length).min(extent)..((which + 1) * length).min(extent)
        };
        let extents = view.shape().extents();
        let shard = |i: u64, j: u64| {
            let mut ranges: Vec<_> = extents.iter().map(|extent| 0..*extent).collect();
            ranges[rows] = chunk(extents[rows], down, i);
            ranges[columns] = chunk(extents[columns], across, j);
            view.region(&Region::within(view.shape(), &ranges).unwrap()).unwrap()
        };
        let row = |i| View::concat(columns, &(0..across).map(|j| shard(i, j)).collect::<Vec<_>>()).unwrap();
        assert_same(&View::concat(rows, &(0..down).map(row).collect::<Vec<_>>()).unwrap(), &view);
    }

    /// Large enough for the kernels' blocks and stretches.
    #[test]
    fn kernels_agree_on_larger_views(mut choices in choices(), rows in 1u64..300, columns in 1u64..300, depth in 1u64..4) {
        let dtype = choices.of(&[DType::BF16, DType::F32, DType::U8, DType::F8E4M3, DType::C64, DType::F16]);
        let view = source(0, dtype, &[rows, columns, depth]).transpose(&choices.permutation(3)).unwrap();
        let step = choices.below(2) + 1;
        let view = view.slice(1, choices.below(view.shape().extents()[1]), view.shape().extents()[1], step).unwrap();
        let view = if dtype.is_float() && choices.below(3) > 0 {
            view.cast(choices.of(&[DType::BF16, DType::F32, DType::F16, DType::F8E5M2, DType::F64])).unwrap()
        } else {
            view
        };
        let view = view.pad(0, choices.below(2), 0).unwrap();
        let bytes = gathered_bytes(&view, &view.lower().unwrap(), choices.below(1 << 16) + 1000);
        prop_assert!(bytes == reference_bytes(&view), "{}", view);
    }

    /// Halves to pairs: element `2i` of a head was `i`, element `2i + 1` was `i + d/2`.
    #[test]
    fn rope_permutation(heads in 1u64..5, pairs in 1u64..6, inner in 1u64..6) {
        let head = pairs * 2;
        let weights = source(0, DType::BF16, &[heads * head, inner]);
        let halves = weights.reshape(&shape(&[heads, 2, pairs, inner])).unwrap();
        let rotated = halves.transpose(&[0, 2, 1, 3]).unwrap().reshape(weights.shape()).unwrap();
        let rows = |view: &View, row| view.slice(0, row, row + 1, 1).unwrap();
        let expected: Vec<View> = (0..heads * head)
            .map(|row| rows(&weights, row / head * head + row % head / 2 + row % 2 * pairs))
            .collect();
        assert_same(&rotated, &View::concat(0, &expected).unwrap());
        let pairs_first = rotated.reshape(&shape(&[heads, pairs, 2, inner])).unwrap();
        assert_same(&pairs_first.transpose(&[0, 2, 1, 3]).unwrap().reshape(weights.shape()).unwrap(), &weights);
    }

    /// Gate and up as even and odd columns or rows of one tensor.
    #[test]
    fn interleaved_halves(experts in 1u64..4, inner in 1u64..6, half in 1u64..6, axis in 1usize..3) {
        let extents = if axis == 1 { [experts, 2 * half, inner] } else { [experts, inner, 2 * half] };
        let fused = source(0, DType::BF16, &extents);
        let gate = fused.slice(axis, 0, 2 * half, 2).unwrap();
        let up = fused.slice(axis, 1, 2 * half, 2).unwrap();
        let mut paired = extents.to_vec();
        paired[axis] = half;
        paired.insert(axis + 1, 2);
        let paired = fused.reshape(&shape(&paired)).unwrap();
        for (half, which) in [(&gate, 0), (&up, 1)] {
            assert_same(half, &paired.slice(axis + 1, which, which + 1, 1).unwrap().reshape(half.shape()).unwrap());
        }
        assert_same(&View::stack(axis + 1, &[gate, up]).unwrap().reshape(fused.shape()).unwrap(), &fused);
    }
}

#[test]
fn the_same_dtype_keeps_every_bit() {
    for dtype in DType::ALL {
        let view = source(3, *dtype, &[4, 12]);
        let cast = view.cast(*dtype).unwrap();
        assert!(matches!(cast.op(), Op::Source(_)), "{dtype}");
        assert_same(&cast, &view);
    }
}

#[test]
fn steps_round_one_after_another() {
    let view = source(5, DType::F32, &[64]);
    let twice = view.cast(DType::BF16).unwrap().multiply(3.3, false, Keep::Operand).unwrap();
    let twice = twice.cast(DType::F8E4M3).unwrap().cast(DType::F32).unwrap().add(1.0, Keep::F32).unwrap();
    assert!(tiled_bytes(&twice) == reference_bytes(&twice));
    assert!(gathered_bytes(&twice, &twice.lower().unwrap(), 64) == reference_bytes(&twice));
}

/// A signalling NaN of f32 becomes quiet on its way through f64, wherever it is converted.
#[test]
fn wide_types_make_nans_quiet() {
    let view = source(5, DType::F32, &[4096]).cast(DType::F64).unwrap().cast(DType::F32).unwrap();
    let tiling = view.lower().unwrap();
    let expected = reference_bytes(&view);
    assert!(execute(&view, &tiling, decode_by_reference) == expected, "reference");
    assert!(gathered_bytes(&view, &tiling, 4096) == expected, "kernels");
}

/// Values of all kinds through the two exponential functions, which share no code.
#[test]
fn exponentials_of_all_bf16_values_and_many_others() {
    let view = source(5, DType::BF16, &[1 << 16]).exp().unwrap();
    assert!(gathered_bytes(&view, &view.lower().unwrap(), 4096) == reference_bytes(&view));
    let view = source(5, DType::F32, &[1 << 14]);
    for view in [view.exp().unwrap(), view.multiply(1e-30, false, Keep::F32).unwrap().exp().unwrap()] {
        assert!(gathered_bytes(&view, &view.lower().unwrap(), 4096) == reference_bytes(&view));
    }
    let near_the_ends =
        source(6, DType::F8E4M3, &[1 << 12]).cast(DType::F32).unwrap().multiply(0.231, false, Keep::F32);
    let view = near_the_ends.unwrap().exp().unwrap();
    assert!(gathered_bytes(&view, &view.lower().unwrap(), 4096) == reference_bytes(&view));
}

/// The common cases are few pieces: a whole pair is one, a shard of it too, and interleaved rows are as many as either side has.
#[test]
fn pairs_have_few_pieces() {
    let pieces = |view: &View| view.lower().unwrap().pieces().len();
    let (a, b) = (source(0, DType::BF16, &[8, 6]), source(1, DType::BF16, &[6, 8]).reverse_axes());
    let sum = a.add_view(&b, Keep::Operand).unwrap();
    assert_eq!(pieces(&sum), 1);
    assert_eq!(pieces(&sum.slice(1, 2, 5, 1).unwrap().reverse_axes()), 1);
    let thrice = sum.multiply_view(&a, false, Keep::Operand).unwrap().add_view(&sum, Keep::Operand).unwrap();
    assert_eq!(pieces(&thrice), 1);
    assert!(tiled_bytes(&thrice) == reference_bytes(&thrice));
    let halves =
        |id: u32| source(id, DType::BF16, &[2, 4, 6]).transpose(&[1, 0, 2]).unwrap().reshape(&shape(&[8, 6])).unwrap();
    let rotated = halves(2).add_view(&a, Keep::Operand).unwrap();
    assert_eq!(pieces(&rotated), 1);
    assert_eq!(pieces(&rotated.multiply_view(&halves(3), false, Keep::Operand).unwrap()), 1);
    let even = View::concat(0, &[source(4, DType::BF16, &[4, 6]), source(5, DType::BF16, &[4, 6])]).unwrap();
    assert_eq!(pieces(&even.add_view(&rotated, Keep::Operand).unwrap()), 2);
}

#[test]
fn an_empty_view_is_a_tiling_without_pieces() {
    for view in [
        source(0, DType::BF16, &[3, 0, 2]),
        source(0, DType::BF16, &[5]).slice(0, 2, 2, 1).unwrap(),
        View::fill(shape(&[0]), Element::f32(1.0)).pad(0, 0, 0).unwrap(),
        source(0, DType::F4, &[0, 3]),
    ] {
        let tiling = view.lower().unwrap();
        assert_eq!((tiling.pieces().len(), tiling.len_bytes(), view.bytes()), (0, 0, Some(0)), "{view}");
    }
    let zeros = source(0, DType::BF16, &[0, 2]).pad(0, 1, 2).unwrap();
    assert_eq!(tiled_bytes(&zeros), [0; 12]);
    let scalar = source(0, DType::U16, &[]);
    assert_eq!(tiled_bytes(&scalar), reference_bytes(&scalar));
}

#[test]
fn invalid_views_are_refused() {
    let view = source(0, DType::BF16, &[4, 6]);
    let other = source(1, DType::BF16, &[4, 5]);
    let integers = source(2, DType::U8, &[4, 6]);
    let quantized = tensor(7, DType::F8E4M3, &[4, 6]);
    let quantized = View::dequantize(quantized, tensor(8, DType::F32, &[1, 1]), (4, 6), DType::BF16).unwrap();
    let refused: Vec<(Result<View, ViewError>, &str)> = vec![
        (view.slice(2, 0, 1, 1), "slice: axis 2, but the shape [4, 6] has 2 axes"),
        (view.pad(2, 0, 1), "pad: axis 2, but the shape [4, 6] has 2 axes"),
        (View::stack(3, std::slice::from_ref(&view)), "stack: axis 3, but the shape [4, 6] has 2 axes"),
        (View::concat(2, std::slice::from_ref(&view)), "concat: axis 2, but the shape [4, 6] has 2 axes"),
        (view.region(&shape(&[4]).whole()), "region: axis 1, but the shape [4, 6] has 2 axes"),
        (view.slice(1, 2, 7, 1), "slice: axis 1 has extent 6, asked for 2..7 in steps of 1"),
        (view.slice(1, 3, 2, 1), "slice: axis 1 has extent 6, asked for 3..2 in steps of 1"),
        (view.slice(0, 0, 4, 0), "slice: axis 0 has extent 4, asked for 0..4 in steps of 0"),
        (view.region(&shape(&[4, 7]).whole()), "slice: axis 1 has extent 6, asked for 0..7 in steps of 1"),
        (view.transpose(&[0]), "transpose: [0] is not a permutation of the axes of [4, 6]"),
        (view.transpose(&[0, 0]), "transpose: [0, 0] is not a permutation of the axes of [4, 6]"),
        (view.transpose(&[0, 2]), "transpose: [0, 2] is not a permutation of the axes of [4, 6]"),
        (view.reshape(&shape(&[5, 5])), "reshape: [4, 6] has 24 elements, [5, 5] has 25"),
        (View::stack(0, &[]), "stack: no operands"),
        (View::concat(0, &[]), "concat: no operands"),
        (View::stack(0, &[view.clone(), other.clone()]), "stack: operand 1 is BF16 [4, 5], operand 0 is BF16 [4, 6]"),
        (
            View::concat(0, &[view.clone(), view.clone(), integers.clone()]),
            "concat: operand 2 is U8 [4, 6], operand 0 is BF16 [4, 6]",
        ),
        (view.gather(2, &[0]), "gather: axis 2, but the shape [4, 6] has 2 axes"),
        (view.gather(1, &[0, 6, 9]), "gather: axis 1 has extent 6, asked for element 6"),
        (
            view.slice_down(1, 6, 0, 1),
            "slice: axis 1 has extent 6, asked for elements from 6 down to before 0 in steps of -1",
        ),
        (
            view.slice_down(1, 1, 2, 1),
            "slice: axis 1 has extent 6, asked for elements from 1 down to before 2 in steps of -1",
        ),
        (
            view.slice_down(1, 1, -2, 1),
            "slice: axis 1 has extent 6, asked for elements from 1 down to before -2 in steps of -1",
        ),
        (
            view.slice_down(1, 1, -1, 0),
            "slice: axis 1 has extent 6, asked for elements from 1 down to before -1 in steps of -0",
        ),
        (integers.exp(), "exp: U8 values are not converted, only floats of 8 bits or more are"),
        (
            integers.add_view(&integers, Keep::Operand),
            "add: U8 values are not converted, only floats of 8 bits or more are",
        ),
        (
            view.multiply_view(&view.cast(DType::F32).unwrap(), false, Keep::Operand),
            "multiply: operand 1 is F32 [4, 6], operand 0 is BF16 [4, 6]",
        ),
        (view.add_view(&other, Keep::F32), "add: operand 1 is BF16 [4, 5], operand 0 is BF16 [4, 6]"),
        (
            view.add_view(&quantized, Keep::Operand),
            "add: operand 1 is decoded from codes (tensor #7), only tensors stored element by element are combined",
        ),
        (integers.cast(DType::F32), "cast: U8 values are not converted, only floats of 8 bits or more are"),
        (view.cast(DType::F4), "cast: F4 values are not converted, only floats of 8 bits or more are"),
        (
            integers.multiply(1.0, false, Keep::F32),
            "multiply: U8 values are not converted, only floats of 8 bits or more are",
        ),
        (
            source(0, DType::C64, &[1]).add(1.0, Keep::Operand),
            "add: C64 values are not converted, only floats of 8 bits or more are",
        ),
        (view.pad(0, u64::MAX, 1), "the number of elements of [4, 6] does not fit 64 bits"),
        (View::stack(0, &[source(0, DType::U8, &[1; 8])]), "9 axes, at most 8 are supported"),
    ];
    for (found, expected) in refused {
        assert_eq!(found.unwrap_err().to_string(), expected);
    }
    assert!(View::concat(1, &[view.clone(), other]).is_ok());
}

#[test]
fn invalid_dequantizations_are_refused() {
    let weights = |dtype, extents: &[u64]| tensor(0, dtype, extents);
    let scales = |dtype, extents: &[u64]| tensor(1, dtype, extents);
    let of = |weights, scales, block, dtype| View::dequantize(weights, scales, block, dtype);
    let good = of(weights(DType::F8E4M3, &[5, 6]), scales(DType::F32, &[3, 2]), (2, 4), DType::BF16).unwrap();
    assert_eq!((good.shape().extents(), good.dtype()), ([5, 6].as_slice(), DType::BF16));
    for (weights, scales, block) in [
        (weights(DType::F8E4M3, &[5, 6]), scales(DType::F32, &[2, 2]), (2, 4)),
        (weights(DType::F8E4M3, &[5, 6]), scales(DType::F32, &[6]), (2, 4)),
        (weights(DType::F8E4M3, &[5, 6]), scales(DType::F32, &[3, 2]), (0, 4)),
        (weights(DType::F8E4M3, &[1, 5, 6]), scales(DType::F32, &[1, 3, 2]), (2, 4)),
    ] {
        let error = of(weights.clone(), scales.clone(), block, DType::BF16).unwrap_err().to_string();
        let blocks = format!("weights {} in blocks of {} by {} need scales", weights.shape, block.0, block.1);
        assert!(error.contains(&blocks) && error.ends_with(&format!("found {}", scales.shape)), "{error}");
    }
    for (from, scale, to, named) in [
        (DType::I8, DType::F32, DType::BF16, DType::I8),
        (DType::F8E4M3, DType::F32, DType::U8, DType::U8),
        (DType::F8E4M3, DType::U8, DType::BF16, DType::U8),
        (DType::F8E4M3, DType::F32, DType::F8E8M0, DType::F8E8M0),
    ] {
        let error = of(weights(from, &[2, 2]), scales(scale, &[1, 1]), (2, 2), to).unwrap_err();
        assert!(error.to_string().starts_with(&format!("dequantize: {named} values are not converted")), "{error}");
    }
    assert!(of(weights(DType::F8E4M3, &[2, 2]), scales(DType::F8E8M0, &[1, 1]), (2, 2), DType::BF16).is_ok());
}

#[test]
fn views_without_a_tiling_are_refused() {
    let packed = source(0, DType::F4, &[4, 4]);
    let split = TilingError::SplitsUnit { dtype: DType::F4, elements: 2, bytes: 1 };
    assert_eq!(split.to_string(), "F4 elements are packed 2 to 1 bytes; the view cuts or moves parts of such a group");
    for view in [
        packed.slice(1, 1, 3, 1).unwrap(),
        packed.slice(1, 0, 3, 1).unwrap(),
        packed.slice(1, 0, 4, 2).unwrap(),
        packed.reverse_axes(),
        packed.pad(1, 1, 1).unwrap(),
        source(0, DType::F4, &[2]).slice(0, 0, 1, 1).unwrap(),
    ] {
        assert_eq!(view.lower().unwrap_err(), split, "{view}");
    }
    assert!(packed.slice(1, 2, 4, 1).unwrap().lower().is_ok());
    let six = source(0, DType::F6E2M3, &[2, 8]);
    assert!(six.slice(1, 2, 6, 1).unwrap().lower().is_err());
    assert!(six.slice(1, 4, 8, 1).unwrap().lower().is_ok());
}

#[test]
fn too_many_pieces_are_refused() {
    let one = source(0, DType::U8, &[]);
    let many = View::stack(0, &vec![one; PIECES_MAX + 1]).unwrap();
    assert_eq!(many.lower().unwrap_err(), TilingError::TooManyPieces);
}

/// Bytes of a tensor; with `finite`, all of its floats are finite and less than two.
fn finite_bytes(tensor: TensorId, span: Range<u64>, finite: bool) -> Vec<u8> {
    let mask = if finite { 0xbf } else { 0xff };
    source_bytes(tensor, span).into_iter().map(|byte| byte & mask).collect()
}

/// The bytes of a view through the kernels, in stretches, from the needed bytes alone; compared with the reference.
#[track_caller]
fn merged_bytes(view: &View, stretch: u64, finite: bool) -> Vec<u8> {
    let mut tensors = HashMap::new();
    view.for_each_source(&mut |tensor| {
        let len = tensor.dtype.bytes_of(tensor.shape.elements()).unwrap();
        tensors.entry(tensor.id).or_insert_with(|| finite_bytes(tensor.id, 0..len, finite));
    });
    let bytes = gathered_from(&view.lower().unwrap(), stretch, &tensors);
    let read = |tensor, span| Ok(finite_bytes(tensor, span, finite));
    let expected = ckfs::read::reference::evaluate(view, 0..view.bytes().unwrap(), read).unwrap();
    let differs = bytes.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((differs, bytes.len()), (None, expected.len()), "{view}");
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(1)))]

    /// A product of matrices, added to another, under layout operators.
    #[test]
    fn merged_matrices_agree_with_the_reference(mut choices in choices(), stretch in 1u64..5000, finite in any::<bool>()) {
        merged_bytes(&choices.merged_view(), stretch, finite);
    }

    /// A device's shard of a merged matrix is that part of the merged whole, whichever way it is computed.
    #[test]
    fn shards_of_a_merged_matrix_are_parts_of_the_whole(mut choices in choices(), finite in any::<bool>()) {
        let extents = [choices.of(&[8, 3, 20]), choices.of(&[64, 37, 200])];
        let view = choices.merged(&extents);
        let view = if choices.below(2) == 1 { view.reverse_axes() } else { view };
        let whole = merged_bytes(&view, 777, finite);
        let extents = view.shape().extents().to_vec();
        let (rows, columns) = (some_range(&mut choices, extents[0]), some_range(&mut choices, extents[1]));
        let shard = view.slice(0, rows.0, rows.1, 1).unwrap().slice(1, columns.0, columns.1, 1).unwrap();
        let width = usize::try_from(view.dtype().element_bytes().unwrap()).unwrap();
        let place = |row: u64, column: u64| usize::try_from(row * extents[1] + column).unwrap() * width;
        let part: Vec<u8> = (rows.0..rows.1)
            .flat_map(|row| whole[place(row, columns.0)..place(row, columns.1)].to_vec())
            .collect();
        prop_assert!(merged_bytes(&shard, 100, finite) == part, "{} of {}", shard, view);
    }
}

/// Nibbles of a tensor in reverse order, in words: any layout of them, also beside words and constants that are not packed.
#[test]
fn packed_words_are_made_byte_by_byte_wherever_they_are() {
    let (rows, words) = (5u64, 6u64);
    let stored = tensor(3, DType::I32, &[rows, words]);
    let nibble = |at: u64| {
        // Byte n of a row has the nibbles 2n and 2n + 1 from its end: they are read through a table of places.
        let places = (0..words * 4).map(|byte| words * 8 - 1 - (2 * byte + at)).collect::<Vec<u64>>();
        let extents = [rows, words * 4];
        let digits = [Digit::axis(&extents, 0, words * 32), Digit::axis(&extents, 1, 4).through(places.into())];
        let (field, index) = (Field::Integer(Bits::unsigned(4)), IndexMap::new(&digits));
        Value::of(Operand { tensor: stored.clone(), field, index })
    };
    let value = nibble(0).then(Operation::Add, nibble(1).then(Operation::Multiply, 16.0));
    let packed = View::packed(shape(&[rows, words]), DType::I32, value.clone()).unwrap();
    let bytes = source_bytes(TensorId(3), 0..rows * words * 4);
    let turned = bytes.chunks(24).flat_map(|row| row.iter().rev().map(|byte| byte.rotate_left(4)).collect::<Vec<u8>>());
    assert_eq!(tiled_bytes(&packed), turned.collect::<Vec<u8>>());
    let plain = source(4, DType::I32, &[rows, words]);
    let constant = View::fill(shape(&[rows, words]), Element::from_bytes(DType::I32, &[1, 2, 3, 4]).unwrap());
    let stack = View::stack(1, &[packed.clone(), plain.clone(), constant]).unwrap();
    for view in [
        packed.clone(),
        packed.reverse_axes(),
        packed.slice(1, 1, 6, 2).unwrap().slice(0, 3, 4, 1).unwrap(),
        packed.pad(0, 1, 2).unwrap(),
        View::concat(1, &[plain, packed.clone()]).unwrap(),
        stack.reshape(&shape(&[rows * 3, words])).unwrap().gather(0, &[14, 0, 7, 3, 1]).unwrap(),
        stack.transpose(&[2, 0, 1]).unwrap(),
        View::packed(shape(&[words * 4 * rows]), DType::U8, value.clone()).unwrap(),
    ] {
        let expected = reference_bytes(&view);
        assert_eq!(tiled_bytes(&view), expected, "{view}");
        for stretch in [1, 3, 64, 4096] {
            assert_eq!(gathered_bytes(&view, &view.lower().unwrap(), stretch), expected, "{view} by {stretch}");
        }
    }
    let refused = View::packed(shape(&[1]), DType::BF16, value).unwrap_err();
    assert_eq!(refused.to_string(), "pack: expected integers of whole bytes, found BF16");
}

/// Sums so long that a line of elements is computed in parts.
#[test]
fn long_sums_agree_with_the_reference() {
    for (rows, terms, columns) in [(3, 2000, 700), (700, 2000, 3), (1, 600_000, 2)] {
        let product =
            View::matrix_product(&source(1, DType::BF16, &[rows, terms]), &source(2, DType::F32, &[terms, columns]));
        merged_bytes(&product.unwrap(), 5000, true);
    }
}

#[test]
fn a_shard_of_a_product_needs_its_rows_and_columns_alone() {
    let (left, right) = (source(1, DType::BF16, &[6, 4]), source(2, DType::F32, &[4, 10]));
    let view = View::matrix_product(&left, &right).unwrap();
    let shard = view.slice(0, 2, 4, 1).unwrap().slice(1, 3, 8, 1).unwrap();
    let tiling = shard.lower().unwrap();
    let mut found = Vec::new();
    for piece in tiling.pieces() {
        for (id, runs) in ckfs::tensor::ByteRuns::of_some(&tiling, piece, &|_| true) {
            runs.for_each_span(0, &mut |start, len| found.push((id.0, start, len)));
        }
    }
    found.sort_unstable();
    // Two rows of four terms, and five columns of each of four rows.
    let columns = (0..4).map(|term| (2, (term * 10 + 3) * 4, 5 * 4));
    assert_eq!(found, std::iter::once((1, 2 * 4 * 2, 2 * 4 * 2)).chain(columns).collect::<Vec<_>>());
}

#[test]
fn tensors_without_a_product_are_refused() {
    let of = |left: &[u64], right: &[u64]| {
        View::matrix_product(&source(1, DType::BF16, left), &source(2, DType::BF16, right))
    };
    for (left, right) in [(&[4, 3][..], &[4, 3][..]), (&[4], &[1, 4]), (&[4, 0], &[0, 4]), (&[2, 2, 2], &[2, 2])] {
        let error = of(left, right).unwrap_err().to_string();
        assert!(error.starts_with("product: expected a matrix"), "{left:?} {right:?}: {error}");
    }
    assert!(of(&[4, 3], &[3, 5]).is_ok());
    let codes = View::matrix_product(&source(1, DType::BF16, &[4, 3]), &source(2, DType::I8, &[3, 5]));
    assert!(codes.unwrap_err().to_string().starts_with("decode: tensor #2 does not fit"));
}
