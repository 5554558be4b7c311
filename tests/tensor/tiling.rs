//! Tilings: disjoint, covering, in bounds; cuts are restrictions; real conversions have few pieces.

#![allow(clippy::unwrap_used, reason = "tests panic")]

use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
};

use crate::common::{
    decode_by_reference, execute, for_each_unit, reference_bytes, shape, source, tensor,
    views::{Choices, any_float_view, any_view, choices},
};
use ckfs::tensor::{
    ByteRuns, DType, Decode, Element, IndexMap, Keep, Loop, Origin, Piece, Reads, Region, TensorId, Terms, Tiling,
    View, WorkSlice, needs, reads,
};
use proptest::prelude::*;

/// Where each target unit comes from: piece origin with the source unit in place of the offset.
fn units(pieces: &[Piece]) -> HashMap<u64, Origin> {
    let mut found = HashMap::new();
    for piece in pieces {
        for_each_unit(piece, &mut |at, from| {
            let origin = match piece.origin {
                Origin::Tensor { tensor, offset, decoder } => Origin::Tensor { tensor, offset: offset + from, decoder },
                other @ (Origin::Encoded { .. } | Origin::Fill { .. }) => other,
            };
            assert!(found.insert(at, origin).is_none(), "unit {at} twice");
        });
    }
    found
}

/// Asserts that `tiling` has every unit of its target once, inside the tensors of `view`, and loops in normal form.
fn check(view: &View, tiling: &Tiling) {
    let mut lengths = HashMap::new();
    view.for_each_source(&mut |tensor| {
        lengths.insert(tensor.id, tensor.shape.elements() / tensor.dtype.unit().elements);
    });
    let found = units(tiling.pieces());
    assert_eq!(found.len() as u64, tiling.len_units());
    for (at, origin) in found {
        assert!(at < tiling.len_units());
        if let Origin::Tensor { tensor, offset, decoder } = origin {
            // Of a quantized tensor this is the number of a logical element.
            let is_value = tiling.decoders()[decoder as usize].value().is_some();
            assert!(is_value || offset < lengths[&tensor], "unit {offset} of {tensor:?}");
        }
    }
    for piece in tiling.pieces() {
        let mut last = 0;
        let mut bounding_units = 0;
        for_each_unit(piece, &mut |at, from| (last, bounding_units) = (last.max(at), bounding_units.max(from + 1)));
        assert_eq!((piece.last(), piece.source_bounding_units()), (last, bounding_units), "{piece:?}");
        assert_eq!(piece.units(), units(std::slice::from_ref(piece)).len() as u64);
        let run = piece.contiguous_units();
        let mut consecutive = 0;
        for_each_unit(piece, &mut |at, from| {
            consecutive += u64::from(at == piece.start + consecutive && from == consecutive);
        });
        assert!(consecutive >= run, "{piece:?}");
        for pair in piece.loops.windows(2) {
            assert!(pair[0].target_stride > pair[1].target_stride, "{piece:?}");
            let inner = &pair[1];
            let merges = pair[0].target_stride == inner.extent * inner.target_stride
                && pair[0].source_stride == inner.extent * inner.source_stride;
            assert!(!merges, "two loops that are one: {piece:?}");
        }
    }
    assert!(tiling.pieces().windows(2).all(|pair| pair[0].start < pair[1].start));
}

/// Asserts that a cut to `low..high` has exactly the units in it, in parts that each have their bound.
fn check_cut(tiling: &Tiling, whole: &HashMap<u64, Origin>, low: u64, high: u64) {
    let mut parts = Vec::new();
    tiling.cut(low, high, &mut |part| parts.push(part));
    let found = units(&parts);
    let inside = whole.iter().filter(|(at, _)| (low..high).contains(at));
    assert_eq!(inside.clone().count(), found.len(), "{low}..{high} of {tiling:?}");
    for (at, origin) in inside {
        assert_eq!(found.get(at), Some(origin), "unit {at} in {low}..{high} of {tiling:?}");
    }
    for piece in tiling.pieces() {
        let mut count = 0;
        piece.cut(low, high, &mut |_| count += 1);
        assert!(count <= 2 * piece.loops.len() + 1, "{count} parts of {piece:?} in {low}..{high}");
    }
}

/// Asserts that the shares of `low..high` have exactly the units in it, none twice.
fn check_work_slices(tiling: &Tiling, of: u64, lines: u64, low: u64, high: u64) {
    let mut whole = Vec::new();
    tiling.cut(low, high, &mut |part| whole.push(part));
    let mut parts = Vec::new();
    for index in 0..of {
        tiling.cut_work_slice(WorkSlice { index, of, lines }, low, high, &mut |part| parts.push(part));
    }
    assert_eq!(units(&parts), units(&whole), "{of} shares of {lines} lines in {low}..{high} of {tiling:?}");
    for part in &parts {
        assert!(part.loops.iter().all(|l| l.extent > 1), "{part:?}");
    }
}

/// Runs of each tensor that tilings read.
fn runs(tilings: &[Tiling]) -> HashMap<TensorId, Vec<ByteRuns>> {
    let mut found: HashMap<TensorId, Vec<ByteRuns>> = HashMap::new();
    for tiling in tilings {
        for (tensor, runs) in tiling.pieces().iter().flat_map(|piece| ByteRuns::of(tiling, piece)) {
            found.entry(tensor).or_default().push(runs);
        }
    }
    found
}

/// Bytes that tilings need of a tensor at `place`, and its bytes in pages with such bytes, counted one by one.
fn reads_one_by_one(tilings: &[Tiling], tensor: TensorId, place: &Range<u64>, page_bytes: u64) -> Reads {
    let mut needed = BTreeSet::new();
    for tiling in tilings {
        for piece in tiling.pieces() {
            let Origin::Tensor { tensor: from, offset, decoder } = piece.origin else { continue };
            let decode = &tiling.decoders()[decoder as usize];
            let codes = decode.value().map(|value| value.load.field.bits() / 8);
            let width = codes.or(decode.source_bytes(tiling.unit_bytes())).unwrap();
            if from == tensor {
                for_each_unit(piece, &mut |_, unit| {
                    // The elements of a value have their places by its index, and a factor of products has one for each term.
                    let index = decode.value().map(|value| &value.load.index);
                    let first = index.map_or(offset + unit, |index| index.at(offset + unit));
                    let terms = index.map_or(Terms::ONE, IndexMap::terms);
                    for unit in (0..terms.count).map(|term| first + term * terms.stride) {
                        needed.extend(unit * width..(unit + 1) * width);
                    }
                });
            }
        }
    }
    let pages: BTreeSet<u64> = needed.iter().map(|byte| (place.start + byte) / page_bytes).collect();
    let paged = place.clone().filter(|byte| pages.contains(&(byte / page_bytes))).count();
    Reads { needed_bytes: needed.len() as u64, paged_bytes: paged as u64 }
}

/// Asserts that the reads of tilings are counted right, with tensors at some offsets in pages of some size.
fn check_reads(view: &View, tilings: &[Tiling], choices: &mut Choices) {
    // Codes that share bytes or repeat are counted by bytes; `tests/quantized/formulas.rs` has them. Codes that are elements have their
    // tensor's two axes.
    let mut values = tilings.iter().flat_map(Tiling::decoders).filter_map(|decode| decode.value());
    if values.any(|value| value.load.tensor.shape.rank() != 2) {
        return;
    }
    let runs = runs(tilings);
    let page_bytes = choices.of(&[16, 64, 8, 24, 2, 256, 4096]);
    view.for_each_source(&mut |tensor| {
        let start = choices.below(3 * page_bytes);
        let place = start..start + tensor.dtype.bytes_of(tensor.shape.elements()).unwrap();
        let found = reads(runs.get(&tensor.id).cloned().unwrap_or_default(), &place, page_bytes);
        assert_eq!(
            found,
            reads_one_by_one(tilings, tensor.id, &place, page_bytes),
            "{place:?} of {page_bytes}: {tilings:?}"
        );
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(1) * 16))]

    #[test]
    fn pieces_are_disjoint_covering_and_in_bounds(view in any_view()) {
        check(&view, &view.lower().unwrap());
    }

    #[test]
    fn work_slices_are_disjoint_and_cover(view in any_view(), mut choices in choices()) {
        let tiling = view.lower().unwrap();
        let low = choices.below(tiling.len_units() + 1);
        let high = low + choices.below(tiling.len_units() - low + 1);
        for (low, high) in [(low, high), (0, tiling.len_units())] {
            check_work_slices(&tiling, 1 + choices.below(9), 1 + choices.below(4), low, high);
        }
    }

    #[test]
    fn reads_are_counted_exactly_without_visiting_them(view in any_float_view(), mut choices in choices()) {
        check_reads(&view, &[view.lower().unwrap()], &mut choices);
    }

    #[test]
    fn reads_of_several_shards_are_counted_once(mut choices in choices()) {
        let extents = [choices.below(9) + 1, choices.below(9) + 1, choices.below(17) + 1];
        let dtype = choices.of(&[DType::BF16, DType::U8, DType::F32, DType::F4]);
        let last = extents[2] * dtype.unit().elements;
        let tensor = source(0, dtype, &[extents[0], extents[1], last]);
        let shards: Vec<Tiling> = (0..=choices.below(6))
            .map(|_| {
                let mut shard = tensor.clone();
                for (axis, extent) in extents.into_iter().enumerate() {
                    let group = if axis == 2 { dtype.unit().elements } else { 1 };
                    let start = choices.below(extent);
                    let stop = start + 1 + choices.below(extent - start);
                    let step = if group == 1 { choices.of(&[1, 1, 2, 3]) } else { 1 };
                    shard = shard.slice(axis, start * group, stop * group, step).unwrap();
                }
                shard.lower().unwrap()
            })
            .collect();
        check_reads(&tensor, &shards, &mut choices);
    }

    #[test]
    fn cuts_are_restrictions(view in any_view(), mut choices in choices()) {
        let tiling = view.lower().unwrap();
        let whole = units(tiling.pieces());
        let length = tiling.len_units();
        if length <= 24 {
            for low in 0..=length {
                for high in low..=length {
                    check_cut(&tiling, &whole, low, high);
                }
            }
        } else {
            for _ in 0..30 {
                let low = choices.below(length + 1);
                check_cut(&tiling, &whole, low, low + choices.below(length - low + 1));
            }
        }
    }
}

#[test]
fn cuts_of_a_permuted_tensor_are_restrictions_everywhere() {
    let heads = source(0, DType::U8, &[2, 2, 3, 4]);
    let rope = heads.transpose(&[0, 2, 1, 3]).unwrap().slice(3, 0, 4, 3).unwrap();
    let padded = rope.pad(1, 1, 0).unwrap();
    let tiling = padded.lower().unwrap();
    let whole = units(tiling.pieces());
    for low in 0..=tiling.len_units() {
        for high in low..=tiling.len_units() + 2 {
            check_cut(&tiling, &whole, low, high);
        }
    }
}

/// Lowers a view of large real shape and counts its pieces.
#[track_caller]
fn pieces(view: &View) -> usize {
    view.lower().unwrap().pieces().len()
}

/// Asserts the number of pieces of a small view and that they are right.
#[track_caller]
fn assert_right(view: &View, count: usize) {
    let tiling = view.lower().unwrap();
    check(view, &tiling);
    assert!(execute(view, &tiling, decode_by_reference) == reference_bytes(view), "{view}");
    assert_eq!(tiling.pieces().len(), count, "{view}: {tiling:?}");
}

fn stack(axis: usize, layers: u32, layer: impl FnMut(u32) -> View) -> View {
    View::stack(axis, &(0..layers).map(layer).collect::<Vec<_>>()).unwrap()
}

fn reshaped(view: &View, extents: &[u64]) -> View {
    view.reshape(&shape(extents)).unwrap()
}

/// Rows of each head from halves to pairs, `[heads * head, inner]`.
fn rope(view: &View, heads: u64, head: u64) -> View {
    let inner = view.shape().extents()[1];
    let halves = reshaped(view, &[heads, 2, head / 2, inner]);
    halves.transpose(&[0, 2, 1, 3]).unwrap().reshape(view.shape()).unwrap()
}

#[test]
fn a_whole_tensor_and_its_row_shards_are_one_run() {
    let weights = source(0, DType::BF16, &[4096, 1024]);
    let whole = weights.lower().unwrap();
    assert_eq!(whole.pieces()[0].loops.len(), 1);
    assert_eq!(whole.pieces()[0].contiguous_units(), 4096 * 1024);
    let shard = weights.slice(0, 1024, 2048, 1).unwrap().lower().unwrap();
    assert_eq!((shard.pieces().len(), shard.pieces()[0].contiguous_units()), (1, 1024 * 1024));
    assert!(shard.is_run_copy(1 << 20));
}

#[test]
fn a_column_shard_is_one_piece() {
    let weights = source(0, DType::BF16, &[4096, 14336]);
    let shard = weights.slice(1, 3584, 7168, 1).unwrap().lower().unwrap();
    assert_eq!((shard.pieces().len(), shard.pieces()[0].loops.len()), (1, 2));
    assert_eq!(shard.pieces()[0].contiguous_units(), 3584);
    assert!(shard.is_run_copy(7168));
    assert!(!shard.is_run_copy(7169));
    assert_right(&source(0, DType::BF16, &[6, 8]).slice(1, 2, 5, 1).unwrap(), 1);
}

#[test]
fn a_scan_stack_has_one_piece_per_layer() {
    let of = |rows, columns, layers| stack(0, layers, |layer| source(layer, DType::BF16, &[rows, columns]));
    assert_eq!(pieces(&of(14336, 4096, 32)), 32);
    assert_eq!(pieces(&of(14336, 4096, 32).slice(1, 3584, 7168, 1).unwrap()), 32);
    assert_eq!(pieces(&of(14336, 4096, 32).slice(0, 8, 16, 1).unwrap()), 8);
    assert_right(&of(3, 4, 5), 5);
    // In MaxText's form, [in, layers, out].
    let scanned =
        |rows, columns, layers| stack(1, layers, |layer| source(layer, DType::BF16, &[rows, columns]).reverse_axes());
    let tiling = scanned(14336, 4096, 32).lower().unwrap();
    assert_eq!(tiling.pieces().len(), 32);
    assert_eq!(tiling.transposed_stride_units(), Some(32 * 14336));
    assert_right(&scanned(3, 4, 5), 5);
}

#[test]
fn transposed_experts_have_one_piece_per_expert_and_layer() {
    // [experts, layers, inner, outer] of w1 [outer, inner] each.
    let of = |experts: u32, layers: u32, outer, inner| {
        stack(1, layers, |layer| {
            stack(0, experts, |expert| source(layer * experts + expert, DType::BF16, &[outer, inner]).reverse_axes())
        })
    };
    let view = of(8, 32, 14336, 4096);
    assert_eq!(view.shape().extents(), [8, 32, 4096, 14336]);
    assert_eq!(pieces(&view), 8 * 32);
    assert_eq!(pieces(&view.slice(0, 2, 4, 1).unwrap()), 2 * 32, "expert parallel");
    assert_right(&of(3, 2, 4, 5), 6);
    // Experts already fused, [experts, outer, inner] per layer.
    let fused = stack(1, 4, |layer| source(layer, DType::BF16, &[3, 5, 2]).transpose(&[0, 2, 1]).unwrap());
    assert_right(&fused, 4);
}

#[test]
fn a_rope_permutation_is_one_piece() {
    let view = rope(&source(0, DType::BF16, &[32 * 128, 4096]), 32, 128);
    let tiling = view.lower().unwrap();
    assert_eq!((tiling.pieces().len(), tiling.pieces()[0].loops.len()), (1, 4));
    assert_right(&rope(&source(0, DType::BF16, &[3 * 4, 5]), 3, 4), 1);
    // Column shards are one piece, and so are row shards cut at heads.
    assert_eq!(pieces(&view.slice(1, 1024, 2048, 1).unwrap()), 1);
    assert_eq!(pieces(&view.slice(0, 1024, 2048, 1).unwrap()), 1);
    // Stacked layers.
    let scanned = stack(0, 32, |layer| rope(&source(layer, DType::BF16, &[32 * 128, 4096]), 32, 128));
    assert_eq!(pieces(&scanned), 32);
}

#[test]
fn row_interleaved_gate_and_up_are_one_piece_each() {
    // gpt-oss: gate_up [experts, inner, 2 * outer], columns alternate.
    let fused = source(0, DType::BF16, &[32, 2880, 5760]);
    for which in [0, 1] {
        assert_eq!(pieces(&fused.slice(2, which, 5760, 2).unwrap()), 1);
        assert_eq!(pieces(&source(0, DType::BF16, &[5760, 2880]).slice(0, which, 5760, 2).unwrap()), 1);
        assert_right(&source(0, DType::BF16, &[2, 3, 8]).slice(2, which, 8, 2).unwrap(), 1);
        assert_right(&source(0, DType::BF16, &[8, 3]).slice(0, which, 8, 2).unwrap(), 1);
    }
    // The reverse: two pieces.
    let halves = [source(0, DType::BF16, &[4, 3]), source(1, DType::BF16, &[4, 3])];
    assert_right(&reshaped(&View::stack(1, &halves).unwrap(), &[8, 3]), 2);
}

#[test]
fn a_fused_qkv_splits_to_one_piece_each() {
    // phi3: q of 32 heads, k and v of 8, 96 wide.
    let fused = source(0, DType::BF16, &[(32 + 8 + 8) * 96, 3072]);
    for (first, end) in [(0, 3072), (3072, 3840), (3840, 4608)] {
        let tiling = fused.slice(0, first, end, 1).unwrap().lower().unwrap();
        assert_eq!((tiling.pieces().len(), tiling.pieces()[0].loops.len()), (1, 1));
    }
    // Fused inside each group of heads: [groups, q heads + 2, head, inner].
    let grouped = |groups, per, head, inner| {
        let fused = source(0, DType::BF16, &[groups * (per + 2) * head, inner]);
        let parts = reshaped(&fused, &[groups, per + 2, head, inner]);
        reshaped(&parts.slice(1, 0, per, 1).unwrap(), &[groups * per * head, inner])
    };
    assert_eq!(pieces(&grouped(8, 4, 128, 4096)), 1);
    assert_right(&grouped(3, 2, 2, 5), 1);
    assert_eq!(pieces(&rope(&grouped(8, 4, 128, 4096), 32, 128)), 1);
    assert_right(&rope(&grouped(3, 2, 4, 5), 6, 4), 1);
}

#[test]
fn a_maxtext_query_has_one_piece_per_layer() {
    // q_proj [heads * head, inner] to [inner, layers, heads, head]: transposed, permuted for RoPE, scaled, stacked.
    let query = |layers, inner, heads, head: u64| {
        stack(1, layers, |layer| {
            let kernel = source(layer, DType::BF16, &[heads * head, inner]).reverse_axes();
            let halves = reshaped(&kernel, &[inner, heads, 2, head / 2]).transpose(&[0, 1, 3, 2]).unwrap();
            reshaped(&halves, &[inner, heads, head]).multiply(0.088_388_35, true, Keep::Operand).unwrap()
        })
    };
    let view = query(32, 4096, 32, 128);
    assert_eq!(view.shape().extents(), [4096, 32, 32, 128]);
    let tiling = view.lower().unwrap();
    assert_eq!((tiling.pieces().len(), tiling.decoders().len()), (32, 1));
    assert_right(&query(3, 5, 2, 4), 3);
    let shard = view.slice(0, 1024, 2048, 1).unwrap().slice(2, 8, 16, 1).unwrap();
    assert_eq!(pieces(&shard), 32);
}

#[test]
fn a_padded_vocabulary_is_two_pieces() {
    let padded = source(0, DType::BF16, &[151_936, 1024]).pad(0, 0, 64).unwrap();
    assert_eq!(pieces(&padded), 2);
    assert_eq!(pieces(&padded.reverse_axes()), 2);
    assert_eq!(pieces(&padded.slice(0, 0, 38_000, 1).unwrap()), 1);
    assert_eq!(pieces(&padded.slice(0, 114_000, 152_000, 1).unwrap()), 2);
    assert_right(&source(0, DType::BF16, &[5, 3]).pad(0, 0, 2).unwrap().reverse_axes(), 2);
}

#[test]
fn a_convolution_permutation_is_one_piece() {
    // [out, in, time, height, width] to [time, height, width, in, out].
    let of = |extents: &[u64]| source(0, DType::BF16, extents).transpose(&[2, 3, 4, 1, 0]).unwrap();
    let tiling = of(&[1152, 3, 2, 16, 16]).lower().unwrap();
    assert_eq!((tiling.pieces().len(), tiling.pieces()[0].loops.len()), (1, 3), "time, height and width are one loop");
    assert_right(&of(&[3, 2, 2, 3, 2]), 1);
}

#[test]
fn hsdp_regions_of_a_stack_have_one_piece_per_layer() {
    // Two replicas of four shards along the first axis in the manner of torch.chunk, each cut in two by columns.
    let view = stack(0, 3, |layer| source(layer, DType::BF16, &[10, 6]));
    let shards = (0..4u64).flat_map(|row| {
        let rows = (row * 3).min(10)..((row + 1) * 3).min(10);
        [0..3, 3..6].map(|columns| (rows.clone(), columns))
    });
    let mut total = 0;
    for (rows, columns) in shards {
        let region = Region::within(view.shape(), &[0..3, rows, columns]).unwrap();
        let shard = view.region(&region).unwrap();
        assert_right(&shard, 3);
        total += shard.bytes().unwrap();
    }
    assert_eq!(total, view.bytes().unwrap());
    // More shards than rows: the last ones are empty.
    let empty = view.region(&Region::within(view.shape(), &[0..3, 10..10, 0..6]).unwrap()).unwrap();
    assert_right(&empty, 0);
}

#[test]
fn a_block_fp8_shard_is_one_piece() {
    let quantized = |rows: u64, columns: u64, block: u64| {
        let scales = tensor(1, DType::F32, &[rows.div_ceil(block), columns.div_ceil(block)]);
        View::dequantize(tensor(0, DType::F8E4M3, &[rows, columns]), scales, (block, block), DType::BF16).unwrap()
    };
    // kv_a_proj_with_mqa: 576 rows, whose last block is partial; a shard that begins inside a block.
    let shard = quantized(576, 7168, 128).slice(0, 144, 288, 1).unwrap();
    let tiling = shard.lower().unwrap();
    assert_eq!(tiling.pieces().len(), 1);
    let Origin::Tensor { offset, decoder, .. } = tiling.pieces()[0].origin else { panic!("{tiling:?}") };
    assert_eq!(offset, 144 * 7168, "the scale is found by the element's place in the tensor");
    assert!(matches!(tiling.decoders()[decoder as usize], Decode::Program(_)));
    assert_right(&quantized(9, 7, 4).slice(0, 3, 9, 1).unwrap().slice(1, 2, 7, 1).unwrap(), 1);
    assert_right(&quantized(9, 7, 4).reverse_axes(), 1);
    // Experts, each with scales of its own, stacked.
    let experts = stack(0, 3, |expert| {
        let scales = tensor(expert * 2 + 1, DType::BF16, &[2, 2]);
        View::dequantize(tensor(expert * 2, DType::F8E4M3, &[5, 6]), scales, (4, 4), DType::BF16).unwrap()
    });
    assert_right(&experts.transpose(&[0, 2, 1]).unwrap(), 3);
    assert_eq!(experts.lower().unwrap().decoders().len(), 3);
}

#[test]
fn a_shifted_concat_reshaped_across_its_borders_stays_small() {
    // 3 rows then 5 rows of 4, seen as rows of 8: borders inside the new rows. Parts of a row are not joined again.
    let both = View::concat(0, &[source(0, DType::U16, &[3, 4]), source(1, DType::U16, &[5, 4])]).unwrap();
    assert_right(&reshaped(&both, &[4, 8]), 5);
    // A transpose in between makes positions within the new rows matter, but borders fall on few loops.
    assert_right(&reshaped(&reshaped(&both, &[4, 8]).reverse_axes(), &[32]), 5);
}

#[test]
fn constants_are_one_piece_whatever_their_shape() {
    let ones = View::fill(shape(&[7, 5, 3]), Element::f32(1.0));
    let moved = ones.transpose(&[2, 0, 1]).unwrap().slice(1, 1, 6, 1).unwrap();
    let tiling = moved.lower().unwrap();
    assert_eq!((tiling.pieces().len(), tiling.pieces()[0].loops.len()), (1, 1));
    assert_right(&moved, 1);
}

#[test]
fn a_column_shard_reads_a_part_of_each_page() {
    // 256 of 4096 values of a row of 8 KiB: 512 of each 8192 bytes, or an eighth of one page in two.
    let rows = 3 << 32;
    let weights = source(0, DType::BF16, &[rows, 4096]);
    let shard = |device: u64| weights.slice(1, device * 256, (device + 1) * 256, 1).unwrap().lower().unwrap();
    let count = |tilings: &[Tiling], start: u64| {
        let runs = runs(tilings).remove(&TensorId(0)).unwrap();
        let Reads { needed_bytes, paged_bytes } = reads(runs, &(start..start + rows * 8192), 4096);
        (needed_bytes / rows, (paged_bytes + rows / 2) / rows)
    };
    assert_eq!(count(&[shard(2)], 0), (512, 4096));
    assert_eq!(count(&[shard(0), shard(1), shard(7)], 0), (3 * 512, 4096));
    let all: Vec<Tiling> = (0..16).map(shard).collect();
    assert_eq!(count(&all, 0), (8192, 8192));
    assert_eq!(count(&all[..8], 0), (4096, 4096));
    // Where the tensor does not begin with a page, some shards reach into two.
    assert_eq!(count(&[shard(7)], 8), (512, 8192));
    assert_eq!(count(&[shard(2)], 8), (512, 4096));
    assert_eq!(count(&all, 8), (8192, 8192));
    // The same columns, transposed.
    let transposed = weights.reverse_axes().slice(0, 512, 768, 1).unwrap().lower().unwrap();
    assert_eq!(count(&[transposed], 0), (512, 4096));
}

#[test]
fn spans_of_a_piece_leave_wide_gaps_out() {
    let loops = |strides: &[(u64, u64)]| {
        let step = |(extent, source_stride): &(u64, u64)| Loop {
            extent: *extent,
            target_stride: 1,
            source_stride: *source_stride,
        };
        let origin = Origin::Tensor { tensor: TensorId(0), offset: 7, decoder: 0 };
        Piece { start: 0, loops: strides.iter().map(step).collect(), origin }
    };
    let spans = |strides: &[(u64, u64)], gap| {
        let found = needs(&Decode::Copy, 1, &loops(strides));
        found[0].spans(gap).into_iter().map(|(start, end)| (start - 7, end - start)).collect::<Vec<_>>()
    };
    // Two experts of three rows of ten; four elements of each row.
    let experts = [(3, 10), (2, 1000), (4, 1)];
    assert_eq!(spans(&experts, 1000), [(0, 1024)]);
    assert_eq!(spans(&experts, 975), [(0, 24), (1000, 24)], "976 units between two spans");
    assert_eq!(spans(&experts, 976), [(0, 1024)]);
    assert_eq!(spans(&experts, 5), [0, 10, 20, 1000, 1010, 1020].map(|start| (start, 4)));
    assert_eq!(spans(&[], 1), [(0, 1)]);
    // A broadcast reads the same units again.
    assert_eq!(spans(&[(5, 0), (4, 1)], 0), [(0, 4)]);
}

/// Work slices of a stack of transposed matrices are as large as possible, and each source line belongs to one of them.
#[test]
fn source_lines_are_divided_evenly_into_work_slices() {
    let matrix = |id| View::source(tensor(id, DType::BF16, &[600, 40])).reverse_axes();
    let tiling = View::stack(1, &[matrix(0), matrix(1), matrix(2)]).unwrap().lower().unwrap();
    let (len, row) = (tiling.len_units(), tiling.transposed_stride_units().unwrap());
    assert_eq!((len, row), (40 * 3 * 600, 3 * 600));
    for (of, lines, low, high) in [(4, 128, 0, len), (6, 128, 8 * row, 24 * row), (7, 1, 0, len), (3, 1000, 0, len)] {
        check_work_slices(&tiling, of, lines, low, high);
        let mut owners = HashMap::new();
        let mut sizes = Vec::new();
        for index in 0..of {
            let mut size = 0;
            tiling.cut_work_slice(WorkSlice { index, of, lines }, low, high, &mut |part| {
                size += part.units();
                let Origin::Tensor { tensor, offset, .. } = part.origin else { panic!("{part:?}") };
                for_each_unit(&part, &mut |_, from| {
                    let owner = *owners.entry((tensor, (offset + from) / 40)).or_insert(index);
                    assert_eq!(owner, index, "line {} of {tensor:?}", (offset + from) / 40);
                });
            });
            sizes.push(size);
        }
        // Runs of the target are not split.
        for index in 0..of {
            tiling.cut_work_slice(WorkSlice { index, of, lines }, low, high, &mut |part| {
                let run = part.loops.iter().find(|l| l.target_stride == 1).map_or(1, |l| l.extent);
                assert!(run >= lines.min(600 % lines), "{run} units together in {part:?}");
            });
        }
        let columns = (high - low) / row;
        let fair = (high - low) / of;
        // A border moves by less than the lines that stay together, or than a matrix with fewer lines.
        let slack = columns * lines.min(600);
        assert!(sizes.iter().all(|size| size.abs_diff(fair) <= slack), "{sizes:?}, of {fair} each");
        assert!(sizes.iter().filter(|size| **size > 0).count() as u64 >= of.min(3), "{sizes:?}");
    }
}

/// Where a short axis is innermost in the target and outermost in the source, another one is divided.
#[test]
fn a_short_innermost_axis_is_not_divided() {
    let tiling = View::source(tensor(0, DType::BF16, &[2, 512, 64])).reverse_axes().lower().unwrap();
    let (len, mut sizes) = (tiling.len_units(), Vec::new());
    check_work_slices(&tiling, 8, 128, 0, len);
    for index in 0..8 {
        let mut size = 0;
        tiling.cut_work_slice(WorkSlice { index, of: 8, lines: 128 }, 0, len, &mut |part| {
            assert!(part.loops.iter().any(|l| (l.target_stride, l.extent) == (1, 2)), "{part:?}");
            size += part.units();
        });
        sizes.push(size);
    }
    assert_eq!(sizes, [len / 8; 8]);
}
