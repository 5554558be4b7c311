//! `ckfs explain`: where the bytes of one virtual file come from.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write,
};

use anyhow::{Context, anyhow};
use ckfs_checkpoint::{Checkpoint, printable_lines};
use ckfs_config::Config;
use ckfs_image::Segment;
use ckfs_plan::report::reads_text;
use ckfs_source::{ByteSpan, digest::hexadecimal, page_size::page_bytes};
use ckfs_tensor::{
    ByteRuns, Decode, EncodedLeaf, EncodedMatrices, Field, Load, Op, Operation, Origin, Piece, Reads, Step, TensorId,
    Term, Tiling, Value as DecodedValue, View, reads,
};
use ckfs_volume::Volume;
use clap::Args;
use serde_json::{Value, json};

use super::{
    flags::{SourceFlags, source_help},
    open, output,
    paragraph::{filled, items},
    tree,
};

/// Pieces and operands that are listed without `--all`.
const SHOWN: usize = 8;
/// Most segments that are examined.
const TENSORS_MAX: usize = 100_000;

/// Explains one virtual file: the origin of its bytes and their conversion.
///
/// Prints size, dtype, shape and place in the whole tensor, and the expression over source tensors. Then follows its
/// normal form: disjoint pieces, each a strided copy from one source tensor through one decoder. The last item is the
/// need of source data, in bytes and in whole pages. Only headers are read.
///
/// Of a file in a mount, its path says all: source and flags are those of the mount.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs explain /data/llama dev3/layers/scanned/wq --mesh fsdp=4,tensor=2
  ckfs explain /data/llama hf/model-00001-of-00002.safetensors --dtype bf16 --all
  ckfs explain /mnt/llama/dev3/layers/scanned/wq
  ckfs explain --config llama.toml train/full/embed --json | jq '.segments[0].pieces'")]
pub(super) struct Explain {
    #[arg(value_name = "SOURCE", help = source_help())]
    first: String,
    /// The file, relative to the mount; left out if the first argument is a file in a mount.
    #[arg(value_name = "PATH")]
    second: Option<String>,
    /// Lists all pieces and operands, not the first few.
    #[arg(long)]
    all: bool,
    /// Prints JSON, with all pieces.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

impl Explain {
    /// The path of the file in its view, and the configuration of the view: that of a mount, if the file is named by its path there.
    fn target(&self) -> anyhow::Result<(String, Config)> {
        if self.second.is_none() && self.flags.settings.config.is_none() {
            let whole = std::path::absolute(&self.first).context("SOURCE")?;
            for mount in whole.ancestors() {
                if let Some((mount, config)) = open::mount_config(mount.to_str(), &self.flags)? {
                    let path = whole.strip_prefix(mount).context("SOURCE")?.display().to_string();
                    return Ok((if path.is_empty() { ".".to_owned() } else { path }, config));
                }
            }
        }
        let (source, path) = open::source_and(&self.first, self.second.as_deref(), &self.flags, "PATH")?;
        Ok((path.to_owned(), open::target_config(source, &self.flags)?.1))
    }

    pub(super) fn run(&self) -> anyhow::Result<()> {
        let (path, mut config) = self.target()?;
        let path = path.as_str();
        let volume = open::volume(&mut config)?;
        let node = tree::find_file(&volume, path)?;
        let file = explain(&volume, &node)?;
        if self.json {
            return output::print_json(&file);
        }
        output::print(&printable_lines(&text(&file, if self.all { usize::MAX } else { SHOWN })))
    }
}

fn explain(volume: &Volume, node: &tree::PathNode) -> anyhow::Result<Value> {
    let checkpoint = volume.engine().checkpoint();
    let mut file = json!({ "path": node.path, "bytes": node.attr.size_bytes });
    let mut attributes = BTreeMap::new();
    for name in ckfs_volume::Nodes::xattr_names(volume, node.attr.ino)? {
        let value = ckfs_volume::Nodes::xattr(volume, node.attr.ino, &name)?;
        attributes.insert(String::from_utf8_lossy(&name).into_owned(), String::from_utf8_lossy(&value).into_owned());
    }
    if !attributes.is_empty() {
        file["attributes"] = json!(attributes);
    }
    if let Some(original) = volume.original(node.attr.ino) {
        file["identical_to"] = json!(checkpoint.source().path(original).display().to_string());
        return Ok(file);
    }
    let Some(image) = volume.image(node.attr.ino).with_context(|| node.path.clone())? else {
        file["made"] = json!("text that ckfs makes");
        return Ok(file);
    };
    let mut segments = Vec::new();
    let mut runs: HashMap<TensorId, Vec<ByteRuns>> = HashMap::new();
    for (index, segment) in image.segments().iter().enumerate().take(TENSORS_MAX) {
        let start = image.start_of(index);
        segments.push(match segment {
            Segment::Bytes(bytes) => json!({ "start": start, "bytes": bytes.len(), "made": "header" }),
            Segment::Spaces(count) => json!({ "start": start, "bytes": count, "made": "spaces" }),
            Segment::View(view) => {
                let tiling = view.lower().map_err(|error| anyhow!("{}: {error}", node.path))?;
                for (tensor, found) in tiling.pieces().iter().flat_map(|piece| ByteRuns::of(&tiling, piece)) {
                    runs.entry(tensor).or_default().push(found);
                }
                json!({
                    "start": start,
                    "bytes": tiling.len_bytes(),
                    "dtype": view.dtype().code(),
                    "shape": view.shape().extents(),
                    "expression": expression(checkpoint, view),
                    "unit_bytes": tiling.unit_bytes(),
                    "served": if tiling.is_run_copy(4096) { "as runs of source bytes" } else { "in computed tiles" },
                    "pieces": tiling.pieces().iter().map(|piece| describe(checkpoint, &tiling, piece)).collect::<Vec<_>>(),
                })
            }
        });
    }
    let mut all = Reads::default();
    for (tensor, runs) in runs {
        let span = checkpoint.tensor(tensor).span();
        all += reads(runs, &(span.start()..span.end()), page_bytes());
    }
    file["reads"] =
        json!({"needed_bytes": all.needed_bytes, "paged_bytes": all.paged_bytes, "page_bytes": page_bytes()});
    file["segments"] = segments.into();
    Ok(file)
}

fn describe(checkpoint: &Checkpoint, tiling: &Tiling, piece: &Piece) -> Value {
    let unit = tiling.unit_bytes();
    let loops: Vec<Value> = piece
        .loops
        .iter()
        .map(|l| json!({"extent": l.extent, "target_stride": l.target_stride, "source_stride": l.source_stride}))
        .collect();
    let mut row = json!({ "start": piece.start * unit, "bytes": piece.units() * unit, "loops": loops });
    match &piece.origin {
        Origin::Fill { bytes } => {
            let len = usize::try_from(unit).unwrap_or(bytes.len()).min(bytes.len());
            row["fill"] = json!(hexadecimal(&bytes[..len]));
        }
        Origin::Encoded { leaf, offset, .. } => {
            let EncodedLeaf { encoding, part } = &tiling.encoded()[*leaf as usize];
            let bands = &encoding.bands;
            let band = |at: u64| bands.band_of(*part, at).number;
            let read = ByteRuns::of(tiling, piece);
            row["encoded"] = json!(&encoding.name);
            row["part"] = json!(part.word());
            row["encoder"] = json!(encoder_word(encoding));
            row["bands"] = json!([band(*offset), band(offset + piece.source_bounding_units() - 1) + 1]);
            row["read_bytes"] = json!(read.iter().map(|(_, runs)| runs.bytes()).sum::<u64>());
        }
        Origin::Tensor { tensor, offset, decoder } => {
            let info = checkpoint.tensor(*tensor);
            let decoder = &tiling.decoders()[*decoder as usize];
            row["tensor"] = json!(info.name);
            row["file"] = json!(checkpoint.source().path(info.file()).display().to_string());
            let (start, end) = if let Some(bytes) = decoder.source_bytes(unit) {
                (offset * bytes, (offset + piece.source_bounding_units()) * bytes)
            } else {
                let runs = ByteRuns::of(tiling, piece);
                let ends = runs.iter().map(|(_, runs)| (runs.start(), runs.end()));
                ends.fold((u64::MAX, 0), |(start, end), (first, last)| (start.min(first), end.max(last)))
            };
            row["file_start"] = json!(info.span().start() + start);
            row["file_end"] = json!(info.span().start() + end);
            if let Some(coded) = checkpoint.source().coded(info.file(), info.span().start() + start) {
                row["chunk"] = json!(coded.chunk);
                row["codec"] = json!(coded.codec);
                row["stored_start"] = json!(coded.stored.map(ByteSpan::start));
                row["stored_end"] = json!(coded.stored.map(ByteSpan::end));
            }
            row["run_bytes"] = json!(piece.contiguous_units() * unit);
            row["decoder"] = json!(decode(checkpoint, decoder));
        }
    }
    row
}

fn decode(checkpoint: &Checkpoint, decode: &Decode) -> String {
    let Decode::Program(program) = decode else { return "copy".to_owned() };
    let mut words = match &program.load {
        Load::Element(dtype) => vec![dtype.to_string(), "f32".to_owned()],
        Load::Value(value) => {
            let mut words = vec![field(&value.load.field), "f32".to_owned()];
            words.extend(value.steps.iter().map(|step| step_word(checkpoint, step)));
            words
        }
    };
    words.extend(program.steps.iter().map(|step| step_word(checkpoint, step)));
    words.push(format!("round to {}", program.target));
    words.join(" -> ")
}

fn field(field: &Field) -> String {
    match field {
        Field::Float(dtype) => dtype.to_string(),
        Field::Integer(bits) => format!("{} bits", bits.width),
        Field::Table(bits, _) => format!("{} bits through a table", bits.width),
    }
}

fn step_word(checkpoint: &Checkpoint, step: &Step) -> String {
    let (operation, term) = match step {
        Step::Compute(operation, term) => (operation, term),
        Step::Round(dtype) => return format!("round to {dtype}"),
        Step::Exp => return "exp".to_owned(),
        Step::Dot(operand) => {
            let (terms, name) = (operand.index.terms().count, checkpoint.tensor(operand.tensor.id).name);
            return format!("sum of {terms} products with {name}");
        }
    };
    let word = match operation {
        Operation::Multiply | Operation::MultiplyFlush => "times",
        Operation::Divide => "divided by",
        Operation::Add => "plus",
        Operation::Subtract => "minus",
    };
    let flushed = if *operation == Operation::MultiplyFlush { ", subnormals flushed" } else { "" };
    format!("{word} {}{flushed}", term_word(checkpoint, term))
}

fn term_word(checkpoint: &Checkpoint, term: &Term) -> String {
    match term {
        Term::Constant(constant) => format!("{:e}", f32::from_bits(*constant)),
        Term::Value(value) => {
            let mut words = value_word(checkpoint, value);
            if !value.steps.is_empty() {
                let steps: Vec<String> = value.steps.iter().map(|step| step_word(checkpoint, step)).collect();
                words = format!("({words} {})", steps.join(" "));
            }
            words
        }
    }
}

/// The tensor that a value is decoded from, and how many elements share one element of it.
fn value_word(checkpoint: &Checkpoint, value: &DecodedValue) -> String {
    let operand = &value.load;
    let groups: Vec<String> = operand.index.digits().iter().map(|digit| digit.group.to_string()).collect();
    let name = checkpoint.tensor(operand.tensor.id).name;
    // Elements of a plain tensor are not shared.
    if groups.iter().all(|group| group == "1") {
        name.to_owned()
    } else {
        format!("{name} by blocks of {}", groups.join("x"))
    }
}

/// How matrices are encoded.
fn encoder_word(encoding: &EncodedMatrices) -> String {
    let encoder = encoding.bands.encoder();
    match encoding.given.as_ref() {
        Some(_) => {
            format!("{encoder}, where the scale that is stored is no power of two; else stored codes and exponents")
        }
        None => encoder.to_string(),
    }
}

/// The expression as nested JSON: an operator with its arguments, and its operands under `of`.
fn expression(checkpoint: &Checkpoint, view: &View) -> Value {
    let of = |view: &View| expression(checkpoint, view);
    let list = |views: &[View]| views.iter().map(of).collect::<Value>();
    let (name, dtype) = (|tensor: TensorId| checkpoint.tensor(tensor).name, view.dtype().code());
    let (mut row, operands) = match view.op() {
        Op::Source(tensor) => (json!({"op": "source", "tensor": name(tensor.id)}), Value::Null),
        Op::Mosaic(mosaic) => {
            (json!({"op": "mosaic", "tensor": name(mosaic.id()), "boxes": mosaic.boxes().len()}), Value::Null)
        }
        Op::Fill(element) => (json!({"op": "fill", "dtype": element.dtype().code()}), Value::Null),
        Op::Slice { of: operand, axis, start, stop, step } => {
            (json!({"op": "slice", "axis": axis, "start": start, "stop": stop, "step": step}), of(operand))
        }
        Op::Gather { of: operand, axis, runs } => {
            let runs: Vec<Value> = runs.iter().map(|run| json!([run.first, run.step, run.count])).collect();
            (json!({"op": "gather", "axis": axis, "runs": runs}), of(operand))
        }
        Op::Transpose { of: operand, axes } => (json!({"op": "transpose", "axes": axes}), of(operand)),
        Op::Reshape { of: operand } => (json!({"op": "reshape"}), of(operand)),
        Op::Stack { of: operands, axis } => (json!({"op": "stack", "axis": axis}), list(operands)),
        Op::Concat { of: operands, axis } => (json!({"op": "concat", "axis": axis}), list(operands)),
        Op::Pad { of: operand, axis, before, after } => {
            (json!({"op": "pad", "axis": axis, "before": before, "after": after}), of(operand))
        }
        Op::Cast { of: operand } => (json!({"op": "cast", "dtype": dtype}), of(operand)),
        Op::Multiply { of: operand, factor, flush } => {
            (json!({"op": "multiply", "factor": factor, "flush": flush, "dtype": dtype}), of(operand))
        }
        Op::Add { of: operand, addend } => (json!({"op": "add", "addend": addend, "dtype": dtype}), of(operand)),
        Op::Exp { of: operand } => (json!({"op": "exp", "dtype": dtype}), of(operand)),
        Op::Sum { of: operands } => (json!({"op": "add", "dtype": dtype}), list(operands)),
        Op::Product { of: operands, flush } => {
            (json!({"op": "multiply", "flush": flush, "dtype": dtype}), list(operands))
        }
        Op::Encoded { of: encoding, part } => {
            let encoder = encoder_word(encoding);
            (json!({"op": "encode", "part": part.word(), "encoder": encoder, "dtype": dtype}), of(&encoding.input))
        }
        Op::Quantized(value) => {
            let mut tensors = Vec::new();
            value.for_each_operand(&mut |operand| tensors.push(json!(name(operand.tensor.id))));
            (json!({"op": "decode", "tensors": tensors, "dtype": dtype}), Value::Null)
        }
    };
    row["shape"] = json!(view.shape().extents());
    if !operands.is_null() {
        row["of"] = operands;
    }
    row
}

fn text(file: &Value, shown: usize) -> String {
    let mut text = filled("path          {path}\nsize          {bytes} bytes ({bytes:b})\n", file);
    for (name, value) in file["attributes"].as_object().into_iter().flatten() {
        let name = name.strip_prefix("user.ckfs.").unwrap_or(name);
        let value = value.as_str().unwrap_or_default();
        let is_long = shown != usize::MAX && value.chars().count() > 200;
        let value: String =
            if is_long { value.chars().take(200).chain("...".chars()).collect() } else { value.to_owned() };
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(text, "{name:<14}{value}");
    }
    text += &filled("[identical to  {identical_to}\n][content       {made}\n]", file);
    let reads = &file["reads"];
    if let (Some(needed_bytes), Some(paged_bytes)) = (reads["needed_bytes"].as_u64(), reads["paged_bytes"].as_u64()) {
        let _ = writeln!(text, "reads         {}", reads_text(Reads { needed_bytes, paged_bytes }));
    }
    let segments = items(&file["segments"]);
    for segment in segments.iter().take(shown) {
        segment_text(&mut text, segment, shown);
    }
    more(&mut text, segments.len(), shown, "segments", "");
    text
}

const PIECE: &str = concat!(
    "    from byte {start}, {bytes} bytes[: filled with 0x{fill}| <- {part} of {encoded}, {encoder}| <- {tensor}]",
    "[\n      {file}][ {stored_start}..{stored_end},][ chunk {chunk} ({codec}), decoded bytes][ {file_start}..{file_end}]",
    "[, runs of {run_bytes} bytes\n      {decoder}]; loops "
);

fn segment_text(text: &mut String, segment: &Value, shown: usize) {
    let end = segment["start"].as_u64().zip(segment["bytes"].as_u64()).map_or(0, |(start, bytes)| start + bytes);
    let _ = write!(text, "{}..{end}", filled("\nbytes {start}", segment));
    *text += &filled(": [{made}, made by ckfs|{dtype} {shape}, served {served}]\n", segment);
    if segment["made"].is_string() {
        return;
    }
    expression_text(text, &segment["expression"], 1, shown);
    let pieces = items(&segment["pieces"]);
    let _ = writeln!(text, "  {} pieces:", pieces.len());
    for piece in pieces.iter().take(shown) {
        let row = |row| filled("{extent} by {target_stride}<-{source_stride}", row);
        let loops = items(&piece["loops"]).iter().map(row).collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "{}{}", filled(PIECE, piece), if loops.is_empty() { "one unit" } else { &loops });
        let bands = "[      bands {bands.0}..{bands.1}, for which {read_bytes:b} of weights are read\n]";
        *text += &filled(bands, piece);
    }
    more(text, pieces.len(), shown, "pieces", "    ");
}

fn expression_text(text: &mut String, expression: &Value, depth: usize, shown: usize) {
    let arguments: Vec<String> = expression
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, _)| !["op", "of", "shape", "tensor"].contains(&key.as_str()))
        .map(|(key, value)| format!("{key} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
        .collect();
    let arguments = if arguments.is_empty() { String::new() } else { format!(" {}", arguments.join(", ")) };
    let (indent, head) = ("  ".repeat(depth), filled("{op}[ {tensor}]", expression));
    let _ = writeln!(text, "{indent}{head}{arguments} -> {}", expression["shape"]);
    match &expression["of"] {
        Value::Array(operands) => {
            for operand in operands.iter().take(shown) {
                expression_text(text, operand, depth + 1, shown);
            }
            more(text, operands.len(), shown, "operands", &"  ".repeat(depth + 1));
        }
        operand @ Value::Object(_) => expression_text(text, operand, depth + 1, shown),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn more(text: &mut String, count: usize, shown: usize, what: &str, indent: &str) {
    if count > shown {
        let _ = writeln!(text, "{indent}and {} more {what} (--all)", count - shown);
    }
}
