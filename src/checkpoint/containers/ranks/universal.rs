//! The files of a universal checkpoint, as `ds_to_universal` of `DeepSpeed` writes them of a checkpoint of ZeRO.
//!
//! ```text
//! zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt      ZeRO 1 and 2: {"cat_dim": 0, "param": tensor}; ZeRO 3: the flat tensor
//! zero/<parameter>/step.pt                                 ZeRO 1 and 2: the number of steps
//! zero/<name>/fp32.pt                                      ZeRO 1 and 2: what else the module has, {"param": tensor} in float32
//! zero/optimizer_state.pt                                  what is the same for all parameters
//! *_model_states.pt                                        unchanged
//! ```

use std::{collections::BTreeMap, sync::Arc};

use ckfs_format::torch::read::SavedTensor;
use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::{DType, TensorId, mosaic::row_major};

use super::{
    super::super::{
        container::{Contents, ParameterFrame, UniversalFile},
        problem::Problems,
        table::{NewRow, RowPlace, TensorTable},
    },
    job::ensure,
    zero::{ModelFile, OptimizerFile, Pickled, Zero, kept_name},
};

/// What the converter takes of the optimizer, with its names for it.
const STATES: [(&str, &str); 3] = [("", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")];

/// Most bytes of a tensor of integers, which is converted when the checkpoint is opened.
const INTEGER_BYTES_MAX: u64 = 1 << 20;

/// Stored bytes that are no tensor of the checkpoint by name: what they are called, type, shape and place.
type UnnamedTensor = (String, DType, Vec<u64>, RowPlace);

type Files = BTreeMap<String, UniversalFile>;

struct Universal<'a> {
    zero: &'a Zero<'a>,
    files: Files,
    rows: Vec<UnnamedTensor>,
    /// The number of the first of these rows.
    first: usize,
}

/// Notes the files of a training state, or why there are none.
pub(super) fn add(zero: &Zero<'_>, contents: &mut Contents, problems: &mut Problems) {
    if zero.optimizers.is_empty() {
        return;
    }
    match files(zero, &contents.table) {
        Ok((files, rows)) => {
            contents.tree.universal = files;
            let table = std::mem::take(&mut contents.table);
            let rows =
                rows.iter().map(|(name, dtype, shape, place)| NewRow { name, dtype: *dtype, shape, place: *place });
            contents.table = problems.or_too_large(table.with_hidden_rows(rows));
        }
        Err(reason) => contents.warnings.push(format!("universal/ is not shown: {reason}")),
    }
}

/// The files, and the tensors that they need after those of the table.
///
/// # Errors
/// The reason why the converter makes none, or why they are not known.
fn files(zero: &Zero<'_>, table: &TensorTable) -> Result<(Files, Vec<UnnamedTensor>), String> {
    let OptimizerFile { file, states, flat, steps, shared, .. } = zero.first();
    let first = table.stored_ids().len();
    let mut all = Universal { zero, files: Files::new(), rows: Vec::new(), first };
    for (key, _) in STATES {
        if !zero.optimizers.values().all(|of| of.flat.contains_key(key)) {
            let kept: Vec<&String> = flat.keys().filter(|key| !key.is_empty()).collect();
            return Err(format!("expected {key} of each parameter, as Adam keeps it, found {kept:?}"));
        }
    }
    let (_, model) = &zero.models[&0];
    let frame = if states.stage == 3 { ParameterFrame::Flat } else { ParameterFrame::Split };
    for (number, shaped) in
        model.states.groups.iter().enumerate().flat_map(|(n, group)| group.iter().map(move |s| (n, s)))
    {
        for (key, word) in STATES {
            let tensor = kept_name(shaped, key).0;
            all.add(&shaped.0, word, UniversalFile::Parameter { tensor, frame })?;
        }
        if let (Some(Some(step)), true) = (steps.get(number), states.stage < 3) {
            let step = all.pickled(*file, step, &format!("step of group {number}"))?;
            all.add(&shaped.0, "step", step)?;
        }
    }
    if states.stage < 3 {
        all.rest_of_module(model)?;
    }
    let shared = all.pickled(*file, shared.as_ref().map_err(Clone::clone)?, "optimizer_state.pt")?;
    all.files.insert("zero/optimizer_state.pt".to_owned(), shared);
    for (id, _) in zero.models.values() {
        let path = zero.job.path(*id);
        let name = path.rsplit('/').next().unwrap_or(path);
        all.files.insert(name.to_owned(), UniversalFile::Original(*id));
    }
    Ok((all.files, all.rows))
}

impl Universal<'_> {
    fn add(&mut self, name: &str, word: &str, file: UniversalFile) -> Result<(), String> {
        let is_odd = name.is_empty() || name.contains(['/', '\0']) || [".", "..", "optimizer_state.pt"].contains(&name);
        ensure(!is_odd, format_args!("parameter {name:?} has no name of a directory"))?;
        self.files.insert(format!("zero/{name}/{word}.pt"), file);
        Ok(())
    }

    /// The id of stored bytes, which become one more row.
    fn row(
        &mut self,
        name: String,
        dtype: DType,
        shape: Vec<u64>,
        (file, start, len): (FileId, u64, u64),
    ) -> Result<TensorId, String> {
        let id = u32::try_from(self.first + self.rows.len()).map_err(|_| "too many tensors".to_owned())?;
        let span = ByteSpan::of_len(start, len).ok_or_else(|| format!("{name}: {len} bytes at {start}"))?;
        self.rows.push((name, dtype, shape, RowPlace::Span(file, span)));
        Ok(TensorId(id))
    }

    fn pickled(
        &mut self,
        file: FileId,
        Pickled(pickle, storages): &Pickled,
        what: &str,
    ) -> Result<UniversalFile, String> {
        let mut rows = Vec::with_capacity(storages.len());
        for (key, (start, len)) in storages {
            let id = self.row(format!("{what}, storage {key}"), DType::U8, vec![*len], (file, *start, *len))?;
            rows.push((key.clone(), id));
        }
        Ok(UniversalFile::Pickled { pickle: pickle.as_slice().into(), storages: rows })
    }

    /// What the module has besides the parameters that are trained, each in float32: buffers, what is not trained, second names.
    fn rest_of_module(&mut self, model: &ModelFile) -> Result<(), String> {
        if let Some(key) = &model.states.split_by {
            return Err(format!(
                "universal_checkpoint_info has {key}, which is not followed: ds_to_universal.py follows it"
            ));
        }
        if let Some(name) = model.others.first() {
            return Err(format!("{name:?} of the module is no tensor"));
        }
        let (file, _) = self.zero.models[&0];
        for (name, saved) in &model.module {
            if self.files.contains_key(&format!("zero/{name}/fp32.pt")) {
                continue;
            }
            let tensor = &saved.tensor;
            let is_other = model.states.shared.iter().any(|(second, _)| second == name);
            let entry = if !tensor.dtype.is_float() {
                let shape = tensor.shape.clone();
                UniversalFile::Values { bytes: self.converted(file, name, saved)?, shape }
            } else if is_other {
                let is_whole = tensor.strides.as_slice() == row_major(&tensor.shape).as_slice();
                ensure(is_whole, format_args!("{name:?} of the module does not lie in one piece"))?;
                let span = saved.span();
                let place = (file, span.start, span.end - span.start);
                UniversalFile::Unnamed(self.row(name.clone(), tensor.dtype, tensor.shape.clone(), place)?)
            } else {
                UniversalFile::Parameter { tensor: name.clone(), frame: ParameterFrame::Float32 }
            };
            self.add(name, "fp32", entry)?;
        }
        Ok(())
    }

    /// Integers as numbers of float32, rounded to nearest.
    #[expect(clippy::cast_precision_loss, reason = "as torch rounds them")]
    fn converted(&self, file: FileId, name: &str, saved: &SavedTensor) -> Result<Arc<[u8]>, String> {
        const SIGNED: [DType; 4] = [DType::I8, DType::I16, DType::I32, DType::I64];
        const UNSIGNED: [DType; 5] = [DType::Bool, DType::U8, DType::U16, DType::U32, DType::U64];
        let (tensor, span) = (&saved.tensor, saved.span());
        let (is_signed, len) = (SIGNED.contains(&tensor.dtype), span.end - span.start);
        let is_whole = tensor.strides.as_slice() == row_major(&tensor.shape).as_slice();
        let is_read = len <= INTEGER_BYTES_MAX && is_whole && (is_signed || UNSIGNED.contains(&tensor.dtype));
        let what = format_args!("{name:?} of the module: {} {:?} are not converted", tensor.dtype, tensor.shape);
        ensure(is_read, what)?;
        let source = self.zero.job.files.source;
        let bytes = source.read_bytes(file, span.start, len).map_err(|error| error.to_string())?;
        let of = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..bytes.len()].copy_from_slice(bytes);
            let (number, unused) = (u64::from_le_bytes(wide), 64 - 8 * bytes.len());
            if is_signed { ((number << unused).cast_signed() >> unused) as f32 } else { number as f32 }
        };
        let width = usize::try_from(tensor.dtype.bits() / 8).expect("at most 8");
        Ok(bytes.chunks_exact(width).flat_map(|number| of(number).to_le_bytes()).collect())
    }
}
