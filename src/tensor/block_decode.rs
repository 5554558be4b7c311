//! Values of quantized tensors, a block of logical elements at a time.
//!
//! A value is a tree: a load, and steps, of which some have a value as right operand. Such a value is often the same for a group
//! of elements: then it is computed once for each group, and the step runs group by group. Rows with the same groups reuse
//! these values.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{
    DType, Digit, Operand, Operation, Program, Step, Term, Value, Window,
    convert::{constant_step, element_bytes},
    decode::{over, over_up, within},
    dot::Dot,
    field::{BOUND_MAX, FieldReader, Fields, next},
    kernel::{Level, product, row, unpack},
    shape::to_usize,
    transpose::prefetch,
};

/// Elements of one block: its f32 values take 4 KiB.
pub(super) const BLOCK_ELEMENTS: usize = 1024;
/// Most bytes prefetched ahead of a line.
const AHEAD_BYTES_MAX: usize = 2048;

/// Where a value may change: at multiples of `block` from the start of its axis. The axis starts again every `around` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Change {
    block: u64,
    around: u64,
}

#[derive(Clone, Debug)]
enum NodeStep<'a> {
    Constant(&'a Step),
    /// An operation with another value, and whether the left side is finite for any stored bits.
    Value(Operation, Box<ValueNode<'a>>, bool),
}

/// A value prepared for many elements.
#[derive(Clone, Debug)]
struct ValueNode<'a> {
    fields: Fields<'a>,
    /// The loaded value, if it is a sum of products of `fields` and others.
    dot: Option<Box<Dot<'a>>>,
    steps: Vec<NodeStep<'a>>,
    /// Where it, or an operand of its steps, may change.
    changes: SmallVec<[Change; 4]>,
    /// Upper bound of its magnitudes, if they are finite for any stored bits.
    bound: Option<f32>,
    /// Its values if it is the right operand of a step, and their elements.
    scratch: Vec<[u8; 4]>,
    last: Option<KeptLine>,
}

/// A line whose values are kept, and how they repeat.
#[derive(Clone, Debug)]
struct KeptLine {
    line: ElementLine,
    equal: EqualLines,
    is_finite: bool,
    /// For each change, the start of the line on its axis, and the block that holds all of the line; empty if there is none.
    places: SmallVec<[(u64, std::ops::Range<u64>); 4]>,
    /// The distance of the line from the one before, and the changes whose position this distance leaves unchanged.
    distance: u64,
    in_step: u64,
}

/// Elements `n`, `n + stride`, …
#[derive(Clone, Copy, Debug)]
struct ElementLine {
    n: u64,
    stride: u64,
    count: usize,
}

impl ElementLine {
    /// The elements after the first `done`.
    const fn after(self, done: usize) -> Self {
        Self { n: self.n + self.stride * done as u64, stride: self.stride, count: self.count - done }
    }
}

/// Upper bound of the magnitude of a result of finite numbers.
fn bound_after(operation: Operation, left: Option<f32>, right: Option<f32>) -> Option<f32> {
    let (left, right) = (left?, right?);
    let bound = match operation {
        Operation::Multiply | Operation::MultiplyFlush => left * right,
        Operation::Add | Operation::Subtract => left + right,
        Operation::Divide => return None,
    };
    (bound <= BOUND_MAX).then_some(bound)
}

/// Consecutive runs of elements with equal values: the first has `head` elements, each other one `period`.
#[derive(Clone, Copy, Debug)]
struct EqualLines {
    valid: usize,
    head: usize,
    period: usize,
    /// Whether the line splits into runs of equal values.
    even: bool,
}

impl EqualLines {
    /// Number of runs.
    const fn runs(&self) -> usize {
        if self.head == self.period {
            self.valid.div_ceil(self.period)
        } else {
            1 + (self.valid - self.head).div_ceil(self.period)
        }
    }

    /// Number of values: one of each run, or of each element.
    const fn operands(&self) -> usize {
        if self.even { self.runs() } else { self.valid }
    }
}

/// Applies a step to the values of some lines of equal length. With `target`, for a product with another value, that is its result in
/// BF16.
fn apply(
    step: &mut NodeStep<'_>,
    level: Level,
    firsts: &[u64],
    stride: u64,
    values: &mut [[u8; 4]],
    rounded: &mut [u8],
    mut target: Option<&mut [u8]>,
) {
    match step {
        NodeStep::Constant(step) => constant_step(level, step, values, rounded),
        NodeStep::Value(operation, node, is_finite) => {
            let is_finite = *is_finite || row::are_finite(level, values);
            let count = values.len() / firsts.len();
            for (n, values) in firsts.iter().zip(values.chunks_exact_mut(count)) {
                let line = ElementLine { n: *n, stride, count };
                let target = target.as_mut().and_then(|target| target.split_off_mut(..2 * count));
                node.combine(level, line, (*operation, is_finite), values, rounded, target);
            }
        }
    }
}

impl<'a> ValueNode<'a> {
    fn new(value: &'a Value, windows: &mut impl Iterator<Item = &'a Window<'a>>) -> Self {
        let Value { load: Operand { field, index, .. }, steps } = value;
        let window = next(windows);
        let digits = index.digits();
        let (fields, mut folded) = Fields::new(field, digits, steps, window);
        let mut others: &[Digit] = &[];
        let dot = value.dot().map(|right| {
            others = right.index.digits();
            folded = 1;
            Box::new(Dot::new(&value.load, window, right, next(windows)))
        });
        let mut changes: SmallVec<[Change; 4]> = digits
            .iter()
            .chain(others)
            .filter(|digit| digit.count() > 1 && digit.stride > 0)
            .map(|digit| Change { block: digit.divisor * digit.group, around: digit.period() })
            .collect();
        let mut bound = fields.reader.bound();
        let steps: Vec<NodeStep<'a>> = steps[folded..]
            .iter()
            .map(|step| match step {
                Step::Compute(operation, Term::Value(value)) => {
                    let node = Self::new(value, windows);
                    changes.extend_from_slice(&node.changes);
                    let is_finite = bound.is_some();
                    bound = bound_after(*operation, bound, node.bound);
                    let node = Self { scratch: vec![[0; 4]; BLOCK_ELEMENTS], ..node };
                    NodeStep::Value(*operation, Box::new(node), is_finite)
                }
                Step::Compute(operation, Term::Constant(constant)) => {
                    let constant = f32::from_bits(*constant);
                    bound = bound_after(*operation, bound, constant.is_finite().then_some(constant.abs()));
                    NodeStep::Constant(step)
                }
                Step::Round(_) | Step::Exp | Step::Dot(_) => {
                    bound = None;
                    NodeStep::Constant(step)
                }
            })
            .collect();
        changes.sort_unstable_by_key(|change| (change.block, change.around));
        changes.dedup();
        Self { fields, dot, steps, changes, bound, scratch: Vec::new(), last: None }
    }

    /// The values of some lines of equal length, each with elements `n`, `n + stride`, … With `target`, the last step is a product
    /// with another value, and that is its result in BF16.
    fn values(
        &mut self,
        level: Level,
        firsts: &[u64],
        stride: u64,
        values: &mut [[u8; 4]],
        rounded: &mut [u8],
        target: Option<&mut [u8]>,
    ) {
        let count = values.len() / firsts.len();
        for (n, line) in firsts.iter().zip(values.chunks_exact_mut(count)) {
            match &mut self.dot {
                Some(dot) => dot.load(level, *n, stride, line),
                None => self.fields.load(level, *n, stride, line),
            }
        }
        if let Some((last, steps)) = self.steps.split_last_mut() {
            for step in steps {
                apply(step, level, firsts, stride, values, rounded, None);
            }
            apply(last, level, firsts, stride, values, rounded, target);
        }
    }

    /// Applies an operation between `values`, the values of `line`, and those of this node. `is_finite` tells whether all of
    /// `values` are finite. With `target` the operation is a product, and that is the result in BF16.
    fn combine(
        &mut self,
        level: Level,
        line: ElementLine,
        (operation, is_finite): (Operation, bool),
        values: &mut [[u8; 4]],
        rounded: &mut [u8],
        mut target: Option<&mut [u8]>,
    ) {
        let mut done = 0;
        while done < values.len() {
            let (equal, operands_are_finite) = self.operands(level, line.after(done), rounded);
            let EqualLines { valid, head, period, even } = equal;
            let part = values[done..done + valid].as_flattened_mut();
            let operands = self.scratch[..equal.operands()].as_flattened();
            let is_finite = is_finite && operands_are_finite;
            match (target.as_mut().and_then(|target| target.split_off_mut(..2 * valid)), even) {
                (Some(target), true) if is_finite => {
                    product::multiply_finite_runs_to_bf16(level, part, operands, head, period, target);
                }
                (Some(target), false) if is_finite => {
                    product::multiply_finite_pairs_to_bf16(level, part, operands, target);
                }
                (target, even) => {
                    let (runs, pairs) = row::loops(operation, is_finite);
                    if even {
                        runs(level, part, operands, head, period);
                    } else {
                        pairs(level, part, operands);
                    }
                    if let Some(target) = target {
                        row::narrow_bf16(level, part, target);
                    }
                }
            }
            done += valid;
        }
    }

    /// Puts the values of a line into the scratch, as far as their runs are even. Returns these runs, and whether all values are
    /// finite.
    fn operands(&mut self, level: Level, now: ElementLine, rounded: &mut [u8]) -> (EqualLines, bool) {
        if self.repeats(now)
            && let Some(last) = &self.last
        {
            return (last.equal, last.is_finite);
        }
        let equal = self.equal_runs(now);
        let mut scratch = std::mem::take(&mut self.scratch);
        self.fill(level, now, equal, &mut scratch, rounded);
        let is_finite = self.bound.is_some() || row::are_finite(level, &scratch[..equal.operands()]);
        self.scratch = scratch;
        self.last = (equal.valid == now.count).then(|| self.kept(now, equal, is_finite));
        (equal, is_finite)
    }

    /// Computes one value of each run of a line, or all of its values if there are no runs.
    fn fill(
        &mut self,
        level: Level,
        line: ElementLine,
        equal: EqualLines,
        scratch: &mut [[u8; 4]],
        rounded: &mut [u8],
    ) {
        let ElementLine { n, stride, .. } = line;
        let EqualLines { valid, head, period, even } = equal;
        if !even {
            return self.values(level, &[n], stride, &mut scratch[..valid], rounded, None);
        }
        // A first run that is shorter than the others is computed separately.
        let apart = usize::from(head < period);
        let (first, others) = scratch[..equal.runs()].split_at_mut(apart);
        if apart == 1 {
            self.values(level, &[n], stride, first, rounded, None);
        }
        if !others.is_empty() {
            let next = n + stride * (head * apart) as u64;
            self.values(level, &[next], stride * period as u64, others, rounded, None);
        }
    }

    /// The data to keep of a line.
    fn kept(&self, line: ElementLine, equal: EqualLines, is_finite: bool) -> KeptLine {
        let to_last = line.stride * line.count.saturating_sub(1) as u64;
        let place = |change: &Change| {
            let from = within(line.n, change.around);
            let start = from - within(from, change.block);
            let end = (start + change.block).min(change.around);
            (from, if from + to_last < end { start..end } else { 0..0 })
        };
        let places = self.changes.iter().map(place).collect();
        KeptLine { line, equal, is_finite, places, distance: 0, in_step: u64::MAX }
    }

    /// Whether a line has the kept values, as rows of one group do: on each axis it begins at the same position as the last
    /// one, or both lie within one block.
    fn repeats(&mut self, now: ElementLine) -> bool {
        let Some(last) = &mut self.last else { return false };
        let known = (last.line.stride, last.line.count) == (now.stride, now.count) && self.changes.len() <= 64;
        let Some(distance) = now.n.checked_sub(last.line.n).filter(|_| known) else { return false };
        if distance != last.distance {
            last.distance = distance;
            let steps = self.changes.iter().map(|change| u64::from(distance.is_multiple_of(change.around)));
            last.in_step = steps.enumerate().fold(0, |all, (at, step)| all | step << at);
        }
        let to_last = now.stride * now.count.saturating_sub(1) as u64;
        for (at, (from, block)) in last.places.iter_mut().enumerate() {
            if last.in_step >> at & 1 == 0 {
                *from += distance;
                if !(block.contains(from) && *from + to_last < block.end) {
                    self.last = None;
                    return false;
                }
            }
        }
        last.line = now;
        true
    }

    /// The runs of equal values of a line, as far as they are even.
    fn equal_runs(&self, line: ElementLine) -> EqualLines {
        let ElementLine { n, stride, count } = line;
        let mut valid = count as u64;
        let mut changes: SmallVec<[(u64, u64); 8]> = SmallVec::new();
        for change in &self.changes {
            let from = within(n, change.around);
            valid = valid.min(over_up(change.around - from, stride));
            changes.push((over_up(change.block - within(from, change.block), stride), change.block));
        }
        // Changes beyond the valid elements do not matter.
        changes.retain(|(head, _)| *head < valid);
        let few = |elements: u64| usize::try_from(elements).map_or(count, |elements| elements.min(count));
        let valid_few = few(valid);
        let Some((head, block)) = changes.first().copied() else {
            return EqualLines { valid: valid_few, head: valid_few, period: valid_few, even: true };
        };
        let period = over(block, stride).max(1);
        let even = period > 1
            && (stride == 1 || block.is_multiple_of(stride))
            && changes[1..].iter().all(|(other, longer)| {
                longer.is_multiple_of(block) && other.checked_sub(head).is_some_and(|gap| gap.is_multiple_of(period))
            });
        let period = to_usize(period);
        EqualLines { valid: valid_few, head: few(head), period, even }
    }
}

/// The position of a value's first operand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Codes<'a> {
    window: Window<'a>,
    digits: &'a [Digit],
    index_bits: u64,
}

impl Codes<'_> {
    /// Prefetches about the bytes of `count` elements from `first` on.
    pub(super) fn prefetch(&self, first: usize, count: usize) {
        let byte = |n: u64| {
            let index: u64 = self.digits.iter().map(|digit| digit.of(n) * digit.stride).sum();
            to_usize((index * self.index_bits / 8).saturating_sub(self.window.start))
        };
        let (first, count) = (first as u64, count.saturating_sub(1) as u64);
        let (start, last) = (byte(first), byte(first + count));
        prefetch(self.window.bytes, start, (last.saturating_sub(start) + 1).min(AHEAD_BYTES_MAX));
    }
}

/// A program that begins with a value, prepared for many elements.
pub(super) struct ValueDecoder<'a> {
    level: Level,
    node: ValueNode<'a>,
    narrow: row::Row,
    pub(super) target_bytes: usize,
    /// Whether the last step is a product with another value, which is rounded to BF16.
    is_product_in_bf16: bool,
    /// Whether the one step is such a product of codes of four bits, and the processor has the instructions to look up codes in
    /// tables of products.
    by_tables: bool,
    wide: Box<[[u8; 4]]>,
    rounded: Box<[u8]>,
}

impl<'a> ValueDecoder<'a> {
    pub(super) fn new(program: &'a Program, value: &'a Arc<Value>, level: Level, windows: &'a [Window<'a>]) -> Self {
        let mut node = ValueNode::new(value, &mut windows.iter());
        node.steps.extend(program.steps.iter().map(NodeStep::Constant));
        let Some(narrow) = row::narrow(program.target) else {
            panic!("a program makes floats, not {}", program.target);
        };
        let is_product = matches!(node.steps.last(), Some(NodeStep::Value(Operation::Multiply, ..)));
        let is_product_in_bf16 = is_product && program.target == DType::BF16;
        let are_finite = matches!(node.steps.as_slice(), [NodeStep::Value(_, _, true)]);
        let is_nibble = matches!(node.fields.reader, FieldReader::Nibble(..));
        Self {
            level,
            is_product_in_bf16,
            by_tables: is_product_in_bf16 && are_finite && is_nibble && level.has_avx2(),
            node,
            narrow,
            target_bytes: element_bytes(program.target),
            wide: vec![[0; 4]; BLOCK_ELEMENTS].into(),
            rounded: vec![0; 8 * BLOCK_ELEMENTS].into(),
        }
    }

    /// The position of the codes.
    pub(super) fn codes(&self) -> Codes<'a> {
        let index_bits = match &self.node.fields.reader {
            FieldReader::Float { bytes, .. } => 8 * *bytes as u64,
            FieldReader::Integer(_) | FieldReader::Table(..) | FieldReader::Nibble(..) => 1,
        };
        Codes { window: self.node.fields.window, digits: self.node.fields.digits, index_bits }
    }

    /// Decodes elements `n`, `n + stride`, … to the contiguous `target`.
    pub(super) fn line(&mut self, n: u64, stride: u64, target: &mut [u8]) {
        let mut at = n;
        if stride == 0 && target.len() > self.target_bytes {
            let (first, others) = target.split_at_mut(self.target_bytes);
            self.line(n, 1, first);
            others.chunks_exact_mut(self.target_bytes).for_each(|element| element.copy_from_slice(first));
            return;
        }
        let stride = stride.max(1);
        for part in target.chunks_mut(BLOCK_ELEMENTS * self.target_bytes) {
            self.decode_block(&[at], stride, part);
            at += stride * (part.len() / self.target_bytes) as u64;
        }
    }

    /// Decodes lines of `count` elements each, `n`, `n + stride`, …, one after the other to `target`.
    pub(super) fn lines(&mut self, firsts: &[u64], stride: u64, count: usize, target: &mut [u8]) {
        let together = BLOCK_ELEMENTS / count.max(1);
        if together <= 1 || stride == 0 {
            let lines = target.chunks_exact_mut(count * self.target_bytes);
            return firsts.iter().zip(lines).for_each(|(n, line)| self.line(*n, stride, line));
        }
        let targets = target.chunks_mut(together * count * self.target_bytes);
        for (firsts, target) in firsts.chunks(together).zip(targets) {
            self.decode_block(firsts, stride, target);
        }
    }

    /// Decodes lines of equal length that are one block together.
    fn decode_block(&mut self, firsts: &[u64], stride: u64, target: &mut [u8]) {
        let count = target.len() / self.target_bytes / firsts.len();
        if self.by_tables && stride == 1 {
            for (n, target) in firsts.iter().zip(target.chunks_exact_mut(count * self.target_bytes)) {
                if !self.line_by_tables(ElementLine { n: *n, stride, count }, target) {
                    self.lines_by_values(&[*n], stride, target);
                }
            }
            return;
        }
        self.lines_by_values(firsts, stride, target);
    }

    fn lines_by_values(&mut self, firsts: &[u64], stride: u64, target: &mut [u8]) {
        let values = &mut self.wide[..target.len() / self.target_bytes];
        if self.is_product_in_bf16 {
            return self.node.values(self.level, firsts, stride, values, &mut self.rounded, Some(target));
        }
        self.node.values(self.level, firsts, stride, values, &mut self.rounded, None);
        (self.narrow)(self.level, values.as_flattened(), target);
    }

    /// Decodes a line of adjacent codes of four bits whose scales are those of whole runs: a run has sixteen different
    /// products. Returns false, without a change, if the line is not such.
    fn line_by_tables(&mut self, line: ElementLine, target: &mut [u8]) -> bool {
        let Some(codes) = self.node.fields.adjacent(line.n, line.count) else { return false };
        let FieldReader::Nibble(bits, table) = &self.node.fields.reader else { return false };
        let [NodeStep::Value(_, node, _)] = self.node.steps.as_mut_slice() else { return false };
        let (equal, _) = node.operands(self.level, line, &mut self.rounded);
        let runs = [equal.head, equal.period, line.count];
        if !(equal.even && equal.valid == line.count && runs.iter().all(|run| run.is_multiple_of(unpack::TOGETHER))) {
            return false;
        }
        let operands = &node.scratch[..equal.runs()];
        let runs = (equal.head, equal.period);
        unpack::products(self.level, (codes, bits.order), table, operands, runs, target);
        true
    }
}
