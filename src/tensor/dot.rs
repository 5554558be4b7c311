//! Sums of products of two operands, many logical elements at a time.
//!
//! Along a line of a product of matrices one factor moves and the other stays, whether the line is a row, a column or a part of
//! either. The moving one is widened to f32, one row for each term, and kept: the next lines need the same. A line on which both
//! factors move is computed element by element.

use super::{
    Operand, Terms, Window,
    field::{Fields, read, uniform},
    float,
    kernel::{Level, product::sums_of_products, row},
    shape::to_usize,
};

/// Most f32 values of rows that are kept. A processor's cache holds about as many.
const KEPT_VALUES_MAX: usize = 512 << 10;

/// One of the factors.
#[derive(Clone, Debug)]
struct Factor<'a> {
    fields: Fields<'a>,
    terms: Terms,
}

impl<'a> Factor<'a> {
    fn new(operand: &'a Operand, window: Window<'a>) -> Self {
        let (fields, _) = Fields::new(&operand.field, operand.index.digits(), &[], window);
        Self { fields, terms: operand.index.terms() }
    }

    /// Reads all terms of the elements at `index`, `index + step`, …: a row of `count` values for each term.
    fn rows(&self, level: Level, index: u64, step: u64, count: usize, rows: &mut Vec<[u8; 4]>) {
        rows.clear();
        let terms = to_usize(self.terms.count);
        rows.resize(terms * count, [0; 4]);
        if count == 1 {
            return read(level, &self.fields.reader, self.fields.window, index, self.terms.stride, rows);
        }
        for (term, row) in (0..).zip(rows.chunks_exact_mut(count)) {
            read(level, &self.fields.reader, self.fields.window, index + term * self.terms.stride, step, row);
        }
    }

    fn one(&self, index: u64, term: u64) -> u32 {
        self.fields.reader.one(self.fields.window, index + term * self.terms.stride)
    }
}

/// Rows of the moving factor.
#[derive(Clone, Debug)]
struct KeptRows {
    /// Whether they are of the left factor, then the index of their first element, its step, and the length of a row.
    of: (bool, u64, u64, usize),
    values: Vec<[u8; 4]>,
}

/// A sum of products prepared for many elements.
#[derive(Clone, Debug)]
pub(super) struct Dot<'a> {
    left: Factor<'a>,
    right: Factor<'a>,
    kept: Vec<KeptRows>,
    /// The place of the next rows, if there is no room for more.
    next: usize,
    staying: Vec<[u8; 4]>,
}

impl<'a> Dot<'a> {
    pub(super) fn new(left: &'a Operand, of_left: Window<'a>, right: &'a Operand, of_right: Window<'a>) -> Self {
        let (left, right) = (Factor::new(left, of_left), Factor::new(right, of_right));
        Self { left, right, kept: Vec::new(), next: 0, staying: Vec::new() }
    }

    /// Computes the sums for elements `n`, `n + stride`, …
    pub(super) fn load(&mut self, level: Level, n: u64, stride: u64, values: &mut [[u8; 4]]) {
        let mut done = 0;
        while done < values.len() {
            let (at, left) = (n + stride * done as u64, values.len() - done);
            // A long sum has fewer elements on a line, so that its rows are no more than are kept.
            let terms = to_usize(self.left.terms.count);
            let left = left.min((KEPT_VALUES_MAX / terms).max(1));
            let (first, first_step, count) = uniform(self.left.fields.digits, at, stride, left);
            let (second, second_step, count) = uniform(self.right.fields.digits, at, stride, count);
            let part = &mut values[done..done + count];
            done += count;
            let one_moves = first_step == 0 || second_step == 0 || count == 1;
            if first_step == 0 {
                self.sums(level, (false, second, second_step, count), first, part);
            } else if one_moves {
                self.sums(level, (true, first, first_step, count), second, part);
            }
            // The bits of what is no number depend on the order of the operands.
            if !(one_moves && row::are_finite(level, part)) {
                for (at, target) in (0..).zip(part) {
                    *target = self.one(first + at * first_step, second + at * second_step).to_le_bytes();
                }
            }
        }
    }

    /// The sums of products of rows of one factor and the terms of the other at `index`.
    fn sums(&mut self, level: Level, of: (bool, u64, u64, usize), index: u64, target: &mut [[u8; 4]]) {
        let mut staying = std::mem::take(&mut self.staying);
        let other = if of.0 { &self.right } else { &self.left };
        other.rows(level, index, 0, 1, &mut staying);
        let rows = self.rows(level, of);
        sums_of_products(level, &staying, rows, target);
        self.staying = staying;
    }

    /// The rows of a factor, which may be kept.
    fn rows(&mut self, level: Level, of: (bool, u64, u64, usize)) -> &[[u8; 4]] {
        let found = self.kept.iter().position(|kept| kept.of == of);
        let place = found.unwrap_or_else(|| {
            let (is_left, index, step, count) = of;
            let factor = if is_left { &self.left } else { &self.right };
            let all: usize = self.kept.iter().map(|kept| kept.values.len()).sum();
            let is_full = all >= KEPT_VALUES_MAX && !self.kept.is_empty();
            let place = if is_full { self.next % self.kept.len() } else { self.kept.len() };
            if !is_full {
                self.kept.push(KeptRows { of, values: Vec::new() });
            }
            self.next = place + 1;
            let kept = &mut self.kept[place];
            kept.of = of;
            factor.rows(level, index, step, count, &mut kept.values);
            place
        });
        &self.kept[place].values
    }

    /// The sum for the elements at these indexes, as f32 bits.
    fn one(&self, first: u64, second: u64) -> u32 {
        let product = |term: u64| float::multiply(self.left.one(first, term), self.right.one(second, term));
        (1..self.left.terms.count).fold(product(0), |sum, term| float::add(sum, product(term)))
    }
}
