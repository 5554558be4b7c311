//! Tensors that are stored as boxes: random covers, read by the tiling and by the reference evaluator, against an array that is
//! filled element by element.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests panic, and their numbers are small")]

use std::{collections::HashMap, sync::Arc};

use crate::common;
use ckfs::{
    read::reference::evaluate,
    tensor::{
        CoverFault, DType, Element, Keep, Mosaic, Mosaics, NewBox, PerAxis, Shape, SourceTensor, TensorId, View,
        mosaic::stored_elements,
    },
};
use proptest::prelude::*;

/// Id of the first box; the tensor itself is the one before.
const FIRST: u32 = 7;

/// A source of choices that shrinks.
struct Draw(Vec<u32>, usize);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.1 += 1;
        u64::from(self.0[(self.1 - 1) % self.0.len()]) % end
    }
}

/// Boxes that cover a region: cut in two again and again.
fn cut(draw: &mut Draw, origin: &[u64], extents: &[u64], boxes: &mut Vec<(Vec<u64>, Vec<u64>)>) {
    let axis = draw.below(extents.len().max(1) as u64) as usize;
    if extents.get(axis).is_none_or(|extent| *extent < 2) || draw.below(4) == 0 {
        boxes.push((origin.to_vec(), extents.to_vec()));
        return;
    }
    let at = 1 + draw.below(extents[axis] - 1);
    let (mut low, mut start, mut high) = (extents.to_vec(), origin.to_vec(), extents.to_vec());
    (low[axis], start[axis], high[axis]) = (at, origin[axis] + at, extents[axis] - at);
    cut(draw, origin, &low, boxes);
    cut(draw, &start, &high, boxes);
}

/// Strides of a box: its axes in some order, with gaps between rows.
fn strides(draw: &mut Draw, extents: &[u64]) -> PerAxis {
    let mut left: Vec<usize> = (0..extents.len()).collect();
    let mut strides = PerAxis::from_elem(0, extents.len());
    let mut next = 1;
    while !left.is_empty() {
        // Mostly the innermost axis first.
        let at = if draw.below(2) == 0 { left.len() - 1 } else { draw.below(left.len() as u64) as usize };
        let axis = left.remove(at);
        strides[axis] = next;
        next = next * extents[axis] + draw.below(2) * draw.below(3);
    }
    strides
}

/// All positions of a box, in row-major order.
fn positions(extents: &[u64]) -> Vec<Vec<u64>> {
    let mut all = vec![vec![]];
    for extent in extents {
        all = all.iter().flat_map(|at| (0..*extent).map(move |n| [at.as_slice(), &[n]].concat())).collect();
    }
    all
}

fn number(at: &[u64], shape: &[u64]) -> u64 {
    at.iter().zip(shape).fold(0, |number, (at, extent)| number * extent + at)
}

/// A drawn tensor: the view, the bytes of each box, the bytes of the whole.
struct Drawn {
    view: View,
    stored: HashMap<TensorId, Vec<u8>>,
    whole: Vec<u8>,
}

fn drawn(choices: Vec<u32>) -> Drawn {
    let mut draw = Draw(choices, 0);
    let shape: Vec<u64> = (0..draw.below(4)).map(|_| 1 + draw.below(6)).collect();
    let mut boxes = Vec::new();
    cut(&mut draw, &vec![0; shape.len()], &shape, &mut boxes);
    // Sometimes in another order, and sometimes with boxes that are not there.
    if draw.below(2) == 0 {
        boxes.reverse();
    }
    let filled = draw.below(3) == 0;
    if filled {
        boxes.retain(|_| draw.below(3) > 0);
    }
    let fill = 0xdead_beef_u32;
    let mut whole = vec![fill.to_le_bytes(); shape.iter().product::<u64>() as usize];
    let mut stored = HashMap::new();
    let mut listed = Vec::new();
    for (index, (origin, extents)) in boxes.iter().enumerate() {
        let strides = strides(&mut draw, extents);
        let mut bytes = vec![[0xff_u8; 4]; stored_elements(extents, &strides) as usize];
        for at in positions(extents) {
            let in_whole: Vec<u64> = at.iter().zip(origin).map(|(at, start)| at + start).collect();
            let value = (number(&in_whole, &shape) as u32 + 1).to_le_bytes();
            let place: u64 = at.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
            bytes[place as usize] = value;
            whole[number(&in_whole, &shape) as usize] = value;
        }
        stored.insert(TensorId(FIRST + index as u32), bytes.concat());
        let (origin, extents) = (PerAxis::from_slice(origin), PerAxis::from_slice(extents));
        listed.push(NewBox { origin, extents, strides });
    }
    let mut mosaics = Mosaics::default();
    let fill = filled.then(|| Element::from_bytes(DType::U32, &fill.to_le_bytes()).unwrap());
    let pushed = mosaics.push(Shape::try_new(&shape).unwrap(), DType::U32, fill, &listed).unwrap();
    let mosaics = Arc::new(mosaics.numbered_from(TensorId(FIRST)));
    let view = View::mosaic(Mosaic::new(mosaics, pushed, TensorId(FIRST - 1)));
    Drawn { view, stored, whole: whole.concat() }
}

/// The bytes of a view through its tiling, and by definition.
fn both(view: &View, stored: &HashMap<TensorId, Vec<u8>>) -> [Vec<u8>; 2] {
    let gathered = common::gathered_from(&view.lower().unwrap(), 3, stored);
    let read =
        |id: TensorId, span: std::ops::Range<u64>| Ok(stored[&id][span.start as usize..span.end as usize].to_vec());
    [gathered, evaluate(view, 0..view.bytes().unwrap(), read).unwrap()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn boxes_are_put_together(choices in proptest::collection::vec(any::<u32>(), 1..80)) {
        let Drawn { view, stored, whole } = drawn(choices);
        for found in both(&view, &stored) {
            prop_assert_eq!(&found, &whole);
        }
    }

    #[test]
    fn views_of_mosaics_are_views_of_the_whole(choices in proptest::collection::vec(any::<u32>(), 1..80)) {
        let Drawn { view, stored, whole } = drawn(choices.clone());
        let shape = view.shape().extents().to_vec();
        prop_assume!(!shape.is_empty());
        // A shard of the transposed tensor, against picking its elements one by one.
        let turned = view.reverse_axes();
        let half = turned.slice(0, turned.shape().extents()[0] / 2, turned.shape().extents()[0], 1).unwrap();
        let start = turned.shape().extents()[0] / 2;
        let mut expected = Vec::new();
        for mut at in positions(half.shape().extents()) {
            at[0] += start;
            at.reverse();
            let number = number(&at, &shape) as usize;
            expected.extend_from_slice(&whole[number * 4..number * 4 + 4]);
        }
        for found in both(&half, &stored) {
            prop_assert_eq!(&found, &expected);
        }
    }

    #[test]
    fn a_box_moved_taken_or_doubled_is_noticed(choices in proptest::collection::vec(any::<u32>(), 1..80)) {
        let mut draw = Draw(choices, 0);
        let shape: Vec<u64> = (0..=draw.below(3)).map(|_| 1 + draw.below(6)).collect();
        let mut boxes = Vec::new();
        cut(&mut draw, &vec![0; shape.len()], &shape, &mut boxes);
        let new = |(origin, extents): &(Vec<u64>, Vec<u64>)| NewBox {
            origin: PerAxis::from_slice(origin),
            extents: PerAxis::from_slice(extents),
            strides: PerAxis::from_elem(1, extents.len()),
        };
        let mut listed: Vec<NewBox> = boxes.iter().map(new).collect();
        let whole = Shape::try_new(&shape).unwrap();
        let push = |listed: &[NewBox]| Mosaics::default().push(whole.clone(), DType::U8, None, listed).err().unwrap_or_default();
        prop_assert_eq!(push(&listed), vec![]);
        let at = draw.below(listed.len() as u64) as usize;
        let taken = listed.remove(at);
        let faults = push(&listed);
        prop_assert!(faults.iter().all(|fault| matches!(fault, CoverFault::Missing(..))) && !faults.is_empty());
        listed.extend([taken.clone(), taken.clone()]);
        let faults = push(&listed);
        prop_assert!(faults.iter().all(|fault| matches!(fault, CoverFault::Overlap(..))) && !faults.is_empty());
        listed.pop();
        let last = listed.last_mut().unwrap();
        last.origin[0] += shape[0];
        let last = listed.len() - 1;
        prop_assert_eq!(push(&listed), vec![CoverFault::Outside(last)]);
    }

    /// The product of matrices that are stored as boxes is that of the whole matrices, to the last bit: ranks do not change it.
    #[test]
    fn products_of_boxes_are_products_of_the_whole(choices in proptest::collection::vec(any::<u32>(), 1..80)) {
        let mut draw = Draw(choices, 0);
        let [rows, terms, columns] = [(); 3].map(|()| 1 + draw.below(7));
        let mut stored = HashMap::new();
        let mut matrix = |shape: [u64; 2]| {
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| draw.below(1 << 20) as f32 / 7.0 - 70_000.0).collect();
            let first = stored.len() as u32;
            let extents = Shape::try_new(&shape).unwrap();
            let whole = View::source(SourceTensor { id: TensorId(first), dtype: DType::F32, shape: extents.clone() });
            stored.insert(TensorId(first), values.iter().flat_map(|value| value.to_le_bytes()).collect());
            let (mut boxes, mut listed) = (Vec::new(), Vec::new());
            cut(&mut draw, &[0, 0], &shape, &mut boxes);
            for (origin, extents) in &boxes {
                let strides = strides(&mut draw, extents);
                let mut bytes = vec![[0xff_u8; 4]; stored_elements(extents, &strides) as usize];
                for at in positions(extents) {
                    let in_whole: Vec<u64> = at.iter().zip(origin).map(|(at, start)| at + start).collect();
                    let place: u64 = at.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
                    bytes[place as usize] = values[number(&in_whole, &shape) as usize].to_le_bytes();
                }
                // After the whole matrix comes the tensor of the boxes, and then each of these.
                stored.insert(TensorId(first + 2 + listed.len() as u32), bytes.concat());
                let (origin, extents) = (PerAxis::from_slice(origin), PerAxis::from_slice(extents));
                listed.push(NewBox { origin, extents, strides });
            }
            let mut mosaics = Mosaics::default();
            let pushed = mosaics.push(extents, DType::F32, None, &listed).unwrap();
            stored.insert(TensorId(first + 1), Vec::new());
            let mosaics = Arc::new(mosaics.numbered_from(TensorId(first + 2)));
            (whole, View::mosaic(Mosaic::new(mosaics, pushed, TensorId(first + 1))))
        };
        let (left, right) = (matrix([rows, terms]), matrix([terms, columns]));
        let (whole, base) = (View::matrix_product(&left.0, &right.0).unwrap(), matrix([rows, columns]).1);
        let shown = |product: &View| {
            let sum = base.add_view(&product.multiply(0.3, false, Keep::F32).unwrap(), Keep::F32).unwrap();
            [both(product, &stored), both(&sum.reverse_axes(), &stored)].concat()
        };
        let expected = shown(&whole);
        for (left, right) in [(&left.1, &right.1), (&left.0, &right.1), (&left.1, &right.0)] {
            prop_assert_eq!(shown(&View::matrix_product(left, right).unwrap()), expected.clone());
        }
    }
}
