//! What schemes have found: decoded tensors, checked against what is stored, companions that decoding leaves out, problems.

use std::{fmt::Display, sync::Arc};

use ckfs_tensor::{DType, Shape, TensorId, ViewError};
use hashbrown::HashMap;
use serde_json::Value as Json;

use super::{
    quantized::{Found, Quantized, Template, Unsupported},
    stored::Stored,
};
use crate::problem::{Problem, Problems};

/// What a scheme says of what it has found: the text and the details of its [`Summary`](super::Summary). `None` if nothing is stored so.
pub(super) type Told = Option<(String, Vec<(&'static str, Json)>)>;

/// Where a scheme puts what it finds.
pub(crate) struct SchemeFindings<'a> {
    stored: &'a Stored<'a>,
    problems: &'a mut Problems,
    pub(super) found: Found,
    /// The scheme that is at work.
    pub(super) scheme: &'static str,
    /// By id of a stored tensor.
    uses: Vec<Use>,
}

/// What is known of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Open,
    /// No decoder reads it.
    LeftOut,
    /// It holds the codes of the decoded tensor of this number.
    Codes(u32),
}

impl<'a> SchemeFindings<'a> {
    pub(super) fn new(stored: &'a Stored<'a>, problems: &'a mut Problems) -> Self {
        let uses = vec![Use::Open; stored.table.id_end()];
        Self { stored, problems, found: Found::default(), scheme: "", uses }
    }

    /// What tensors that are stored alike have in common, of which one has these codes; `None` if it cannot be, which is then noted.
    pub(super) fn template(&mut self, codes: TensorId, template: Result<Template, ViewError>) -> Option<Arc<Template>> {
        let (name, expected) = (self.stored.tensor(codes).name, format_args!("tensors that {} decodes", self.scheme));
        self.problems.taken(template.map(Arc::new).map_err(|error| Problem::of_tensor(name, expected, error)))
    }

    /// Adds a decoded tensor: its name when decoded, its operands by number, and its own dtype where the repository tells one
    /// for it. An operand that is stored with another dtype or shape than the template says is a problem, and so are codes
    /// that belong to another tensor already. Operands other than codes may be shared.
    pub(super) fn tensor(
        &mut self,
        (name, operands, dtype): (&str, &[TensorId], Option<DType>),
        template: Arc<Template>,
    ) {
        let slots = template.operands();
        assert_eq!(slots.len(), operands.len(), "{name}: as many operands as its template has");
        let before = self.problems.count();
        for (slot, id) in slots.iter().zip(operands) {
            let info = self.stored.tensor(*id);
            if info.dtype != slot.dtype || info.shape != slot.shape.extents() {
                let expected = format!("{} {} to decode {name:?}", slot.dtype, slot.shape);
                let found = format!("{} {}", info.dtype, shape_text(info.shape));
                self.problems.push(Problem::of_tensor(info.name, expected, found));
            }
        }
        let codes = operands[0];
        let other = match self.uses[codes.0 as usize] {
            Use::Open => None,
            Use::LeftOut => Some("a tensor that is left out"),
            Use::Codes(other) => Some(&*self.found.tensors[other as usize].name),
        };
        if let Some(other) = other {
            let found = format!("codes of {other:?} too");
            self.refuse(self.stored.tensor(codes).name, format!("codes of {name:?} only"), found);
        }
        self.leave(codes);
        if self.problems.count() > before {
            return;
        }
        let number = u32::try_from(self.found.tensors.len()).expect("each has a stored tensor, whose ids fit 32 bits");
        self.uses[codes.0 as usize] = Use::Codes(number);
        let (name, operands, scheme) = (name.into(), operands.into(), self.scheme);
        let dtype = dtype.unwrap_or(self.stored.dtype);
        self.found.tensors.push(Quantized { name, dtype, template, operands, scheme });
    }

    /// Leaves out a companion that no decoder reads, such as the scale of activations.
    pub(crate) fn leave_out(&mut self, companion: TensorId) {
        self.leave(companion);
        self.found.left_out.push(companion);
    }

    /// Notes a method that is recognized and not decoded, and a tensor whose codes are stored so. No other scheme gets that tensor.
    pub(crate) fn unsupported(&mut self, method: &str, codes: Option<TensorId>) {
        let known = self.found.unsupported.iter().position(|other| other.method == method);
        let at = known.unwrap_or_else(|| {
            self.found.unsupported.push(Unsupported { method: method.to_owned(), codes: Vec::new() });
            self.found.unsupported.len() - 1
        });
        if let Some(codes) = codes {
            self.leave(codes);
            self.found.unsupported[at].codes.push(codes);
        }
    }

    /// Whether a stored tensor is known already as the codes of a tensor, or as left out.
    pub(crate) fn is_taken(&self, id: TensorId) -> bool {
        self.uses[id.0 as usize] != Use::Open
    }

    fn leave(&mut self, id: TensorId) {
        let known = &mut self.uses[id.0 as usize];
        if *known == Use::Open {
            *known = Use::LeftOut;
        }
    }

    /// Notes that tensor `tensor` is not what configuration and names say.
    pub(crate) fn refuse(&mut self, tensor: &str, expected: impl Display, found: impl Display) {
        self.problems.push(Problem::of_tensor(tensor, expected, found));
    }

    /// The companion that codes need, if it is there. If not, that is noted with its name.
    pub(super) fn needed(&mut self, codes: &str, companion: &str, id: Option<TensorId>) -> Option<TensorId> {
        if id.is_none() {
            self.refuse(codes, format_args!("{companion} to decode it"), "no such tensor");
        }
        id
    }

    /// What was read or compared; why it was not is a problem.
    pub(super) fn taken<T>(&mut self, read: Result<T, Problem>) -> Option<T> {
        self.problems.taken(read)
    }

    /// By id of a stored tensor: whether a decoder reads it, so far.
    pub(super) fn operands(&self) -> Vec<bool> {
        let mut are = vec![false; self.stored.table.id_end()];
        for tensor in &self.found.tensors {
            tensor.operands.iter().for_each(|id| are[id.0 as usize] = true);
        }
        are
    }

    /// Whether any tensor is decoded, so far.
    pub(super) fn has_tensors(&self) -> bool {
        !self.found.tensors.is_empty()
    }

    /// Whether nothing is known to be quantized, so far.
    pub(super) fn is_empty(&self) -> bool {
        self.found.tensors.is_empty() && self.found.unsupported.is_empty()
    }

    /// Everything found, if no name is taken twice.
    pub(super) fn finish(mut self) -> Found {
        self.found.left_out.sort_unstable();
        self.found.left_out.dedup();
        let mut gone = self.operands();
        self.found.left_out.iter().for_each(|id| gone[id.0 as usize] = true);
        let mut names: HashMap<&str, TensorId> = HashMap::with_capacity(self.found.tensors.len());
        for tensor in &self.found.tensors {
            let stored = self.stored.find(&tensor.name).filter(|id| !gone[id.0 as usize]);
            let codes = tensor.operands[0];
            if let Some(other) = names.insert(&tensor.name, codes).or(stored) {
                let (expected, found) = (self.stored.tensor(codes).name, self.stored.tensor(other).name);
                let (expected, found) = (format_args!("decoded from {expected:?} only"), format_args!("{found:?} too"));
                self.problems.push(Problem::of_tensor(&tensor.name, expected, found));
            }
        }
        drop(names);
        self.found
    }
}

fn shape_text(extents: &[u64]) -> String {
    Shape::try_new(extents).map_or_else(|_| format!("{extents:?}"), |shape| shape.to_string())
}
