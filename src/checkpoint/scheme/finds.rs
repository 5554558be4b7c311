//! What schemes have found: decoded tensors, checked against what is stored, companions that decoding leaves out, problems.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::{
    quantized::{QuantizedTable, Template, TemplateError, TemplateId},
    stored::Stored,
};
use crate::{
    checkpoint::problem::{Problem, Problems},
    tensor::{DType, Shape, TensorId},
};

/// How a scheme that was found is told.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// What `plan --json` calls it, such as `block_fp8`.
    pub scheme: &'static str,
    /// A few words for a reader, such as `fp8 in blocks of 128x128`.
    pub text: String,
    /// Members of its object in `plan --json`, beside its name and text.
    pub details: Vec<(&'static str, Value)>,
}

/// A way of quantizing that is recognized and not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// Its name, such as `ModelOpt NVFP4_AWQ`.
    pub method: String,
    /// Number of tensors that are stored so; 0 where the configuration names the method and no tensor shows it.
    pub tensors: u64,
    /// One of these tensors.
    pub example: Option<TensorId>,
}

/// What decoding makes of a repository.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The tensors that are stored quantized.
    pub tensors: QuantizedTable,
    /// Stored tensors that belong to quantized modules and that no decoder reads, such as scales of activations: they go
    /// when their repository is decoded. Sorted.
    pub left_out: Vec<TensorId>,
    /// The schemes, in the order of the closed list.
    pub schemes: Vec<Summary>,
    /// What stays raw because no scheme decodes it: whoever asks for decoding is refused with these names.
    pub unsupported: Vec<Unsupported>,
}

/// Where a scheme puts what it finds.
#[derive(Debug)]
pub(in crate::checkpoint) struct Finds<'a> {
    stored: &'a Stored<'a>,
    problems: &'a mut Problems,
    found: Found,
    scheme: &'static str,
    /// By stored tensor that holds codes or was left out: the number of the decoded tensor, if any.
    taken: HashMap<TensorId, Option<usize>>,
}

impl<'a> Finds<'a> {
    pub(super) fn new(stored: &'a Stored<'a>, problems: &'a mut Problems) -> Self {
        Self { stored, problems, found: Found::default(), scheme: "", taken: HashMap::new() }
    }

    pub(super) fn begin(&mut self, scheme: &'static str) {
        self.scheme = scheme;
    }

    /// Adds what tensors that are stored alike have in common. `tensor` is one of them, for the message. A scheme keeps the
    /// numbers of its templates by what distinguishes them (shape, dtypes, bits, group), so that there are few.
    pub(in crate::checkpoint) fn template(
        &mut self,
        tensor: &str,
        template: Result<Template, TemplateError>,
    ) -> Option<TemplateId> {
        match template {
            Ok(template) => {
                let id = self.found.tensors.add_template(template);
                if id.is_none() {
                    self.problems.push(Problem::TooLarge);
                }
                id
            }
            Err(error) => {
                let expected = format!("tensors that {} decodes", self.scheme);
                self.problems.push(Problem::Quantized {
                    tensor: tensor.to_owned(),
                    expected,
                    found: error.to_string(),
                });
                None
            }
        }
    }

    /// Adds a decoded tensor: its name when decoded, its operands by number, and its own dtype where the repository tells one
    /// for it. An operand that is stored with another dtype or shape than the template says is a problem, and so are codes
    /// that belong to another tensor already. Operands other than codes may be shared.
    pub(in crate::checkpoint) fn tensor(
        &mut self,
        name: &str,
        template: TemplateId,
        operands: &[TensorId],
        dtype: Option<DType>,
    ) {
        let slots = self.found.tensors.template(template).operands();
        assert_eq!(slots.len(), operands.len(), "{name}: as many operands as its template has");
        let before = self.problems.count();
        for (slot, id) in slots.iter().zip(operands) {
            let info = self.stored.tensor(*id);
            if info.dtype != slot.dtype || info.shape != slot.shape.extents() {
                let expected = format!("{} {} to decode {name:?}", slot.dtype, slot.shape);
                let found = format!("{} {}", info.dtype, shape_text(info.shape));
                self.problems.push(Problem::Quantized { tensor: info.name.to_owned(), expected, found });
            }
        }
        let number = self.found.tensors.len();
        if let Some(codes) = operands.first()
            && let Some(other) = self.taken.insert(*codes, Some(number))
        {
            let other = other.map(|other| self.found.tensors.get(other).name);
            let found = format!("codes of {:?} too", other.unwrap_or("a tensor that is left out"));
            let tensor = self.stored.tensor(*codes).name.to_owned();
            self.problems.push(Problem::Quantized { tensor, expected: format!("codes of {name:?} only"), found });
        }
        if self.problems.count() > before {
            return;
        }
        let dtype = dtype.unwrap_or_else(|| self.stored.dtype());
        if self.found.tensors.add(self.scheme, name, dtype, template, operands).is_none() {
            self.problems.push(Problem::TooLarge);
        }
    }

    /// Leaves out a companion that no decoder reads, such as the scale of activations.
    pub(in crate::checkpoint) fn leave_out(&mut self, companion: TensorId) {
        self.taken.entry(companion).or_insert(None);
        self.found.left_out.push(companion);
    }

    /// Notes a method that is recognized and not decoded, and a tensor whose codes are stored so. No other scheme gets that tensor.
    pub(in crate::checkpoint) fn unsupported(&mut self, method: &str, codes: Option<TensorId>) {
        let known = self.found.unsupported.iter().position(|other| other.method == method);
        let at = known.unwrap_or_else(|| {
            let (method, tensors, example) = (method.to_owned(), 0, None);
            self.found.unsupported.push(Unsupported { method, tensors, example });
            self.found.unsupported.len() - 1
        });
        let unsupported = &mut self.found.unsupported[at];
        if let Some(codes) = codes {
            self.taken.entry(codes).or_insert(None);
            unsupported.tensors += 1;
            unsupported.example.get_or_insert(codes);
        }
    }

    /// Whether a stored tensor is known already as the codes of a tensor, or as left out.
    pub(in crate::checkpoint) fn is_taken(&self, id: TensorId) -> bool {
        self.taken.contains_key(&id)
    }

    /// Notes that tensor `tensor` is not what configuration and names say.
    pub(in crate::checkpoint) fn refuse(
        &mut self,
        tensor: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) {
        let (expected, found) = (expected.into(), found.into());
        self.problems.push(Problem::Quantized { tensor: tensor.to_owned(), expected, found });
    }

    /// Notes any other problem.
    pub(in crate::checkpoint) fn problem(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Everything that decoders read, so far.
    pub(super) fn operands(&self) -> HashSet<TensorId> {
        self.found.tensors.iter().flat_map(|tensor| tensor.operands.iter().copied()).collect()
    }

    /// Whether any tensor is decoded, so far.
    pub(super) fn has_tensors(&self) -> bool {
        !self.found.tensors.is_empty()
    }

    /// Whether nothing is known to be quantized, so far.
    pub(super) fn is_empty(&self) -> bool {
        self.found.tensors.is_empty() && self.found.unsupported.is_empty()
    }

    pub(super) fn add_summary(&mut self, summary: Summary) {
        self.found.schemes.push(summary);
    }

    /// Everything found, if no name is taken twice.
    pub(super) fn finish(mut self) -> Found {
        self.found.left_out.sort_unstable();
        self.found.left_out.dedup();
        let mut gone = self.operands();
        gone.extend(&self.found.left_out);
        let mut names: HashMap<&str, TensorId> = HashMap::new();
        for tensor in self.found.tensors.iter() {
            let stored = self.stored.find(tensor.name).filter(|id| !gone.contains(id));
            let codes = tensor.operands[0];
            if let Some(other) = names.insert(tensor.name, codes).or(stored) {
                let (expected, found) = (self.stored.tensor(codes).name, self.stored.tensor(other).name);
                self.problems.push(Problem::Quantized {
                    tensor: tensor.name.to_owned(),
                    expected: format!("decoded from {expected:?} only"),
                    found: format!("{found:?} too"),
                });
            }
        }
        self.found
    }
}

fn shape_text(extents: &[u64]) -> String {
    Shape::try_new(extents).map_or_else(|_| format!("{extents:?}"), |shape| shape.to_string())
}
