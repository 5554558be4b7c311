//! The size of a page, kept below its bound.

use ckfs_checkpoint::printable;
use serde_json::Value;

/// Bytes that are left for one kind of content.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageBudget(pub(super) usize);

impl PageBudget {
    /// Takes what a value occupies in the page. `false`, and nothing taken, if that is more than is left.
    pub(super) fn take(&mut self, value: &Value) -> bool {
        let cost = printable(&embedded(value)).len() + 1;
        let left = self.0.checked_sub(cost);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }

    pub(super) const fn is_spent(self) -> bool {
        self.0 < 64
    }
}

/// A value as JSON inside a script element, which no text of it can end.
pub(super) fn embedded(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// As many of these values as the budget has room for, and the number of the others.
pub(super) fn within(budget: &mut PageBudget, values: impl IntoIterator<Item = Value>) -> (Vec<Value>, usize) {
    let (mut kept, mut others) = (Vec::new(), 0);
    for value in values {
        if others == 0 && budget.take(&value) {
            kept.push(value);
        } else {
            others += 1;
        }
    }
    (kept, others)
}
