//! Speed of the kernels on one core: casts, dequantization, blocked transposes beside a naive loop, and gathers of
//! transposed scan stacks. Prints a table; a JSON line with the same values follows each row.
//!
//! Run with `cargo bench --bench kernels -- [--short] [part of a case's name]`. GB are 10^9 bytes. Every case repeats for a
//! fixed time and reports its fastest pass; with `--short` it has one pass, which shows that it runs.
#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    clippy::too_many_lines,
    reason = "a bench: it prints, and its sizes are its own"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use ckfs::tensor::{
    Bands, BitOrder, Bits, DType, Decode, Digit, EncodedPart, Encoder, ExponentRule, Field, Gather, IndexMap, Load,
    Loop, MatrixFactor, Operand, Operation, Program, Shape, SourceTensor, Step, Stores, TensorId, Value, Window,
    block_index, convert_row, gather,
};

const TIME_PER_CASE: Duration = Duration::from_millis(120);

struct Report {
    filter: Option<String>,
    time_per_case: Duration,
}

impl Report {
    /// Times `pass`, which reads `input` and writes `output` bytes.
    fn case(&self, name: &str, input: usize, output: usize, mut pass: impl FnMut()) {
        if self.filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
            return;
        }
        pass();
        let (start, mut best) = (Instant::now(), Duration::MAX);
        loop {
            let begin = Instant::now();
            pass();
            best = best.min(begin.elapsed());
            if start.elapsed() >= self.time_per_case {
                break;
            }
        }
        let rate = |bytes: usize| bytes as f64 / best.as_secs_f64() / 1e9;
        let (read, written) = (rate(input), rate(output));
        println!("{name:<58} {read:8.2} {written:8.2}");
        println!(
            "{{\"bench\":\"kernels\",\"case\":\"{name}\",\"input_gb_per_s\":{read:.3},\"output_gb_per_s\":{written:.3}}}"
        );
    }
}

/// Bytes that every float type reads as weights: mostly normal values of moderate size.
fn weights(dtype: DType, elements: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut wide = Vec::with_capacity(elements * 4);
    for _ in 0..elements {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (f64::from(state) / f64::from(u32::MAX) - 0.5) as f32 * 0.2;
        wide.extend_from_slice(&value.to_le_bytes());
    }
    let program = Program { load: Load::Element(DType::F32), target: dtype, steps: Vec::new() };
    let mut bytes = vec![0; elements * width(dtype)];
    convert_row(&program, &wide, &mut bytes);
    bytes
}

fn width(dtype: DType) -> usize {
    usize::try_from(dtype.element_bytes().unwrap()).unwrap()
}

/// Casts of 64 MiB in units of 1 MiB of elements into a buffer that stays in the cache, as tiles are computed.
fn casts(report: &Report) {
    let floats = [
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
        (DType::F32, DType::F8E4M3),
        (DType::F32, DType::F8E5M2),
        (DType::BF16, DType::F32),
        (DType::BF16, DType::F16),
        (DType::F16, DType::F32),
        (DType::F16, DType::BF16),
        (DType::F8E4M3, DType::BF16),
        (DType::F8E5M2, DType::F16),
        (DType::F64, DType::F32),
        (DType::F64, DType::BF16),
    ];
    for (source, target) in floats {
        let bytes = weights(source, 16 << 20);
        let program = Program { load: Load::Element(source), target, steps: Vec::new() };
        row_case(report, &format!("cast {source} to {target}"), &program, source, &bytes);
    }
    // As a load into arrays: the results are too large for any cache.
    let bytes = weights(DType::BF16, 64 << 20);
    let program = Program { load: Load::Element(DType::BF16), target: DType::F32, steps: Vec::new() };
    let mut target = vec![1; 2 * bytes.len()];
    report.case("cast BF16 to F32, into memory", bytes.len(), target.len(), || {
        for (part, made) in bytes.chunks(512 << 10).zip(target.chunks_mut(1 << 20)) {
            convert_row(&program, part, made);
        }
        black_box(&target);
    });
    let bytes = weights(DType::BF16, 16 << 20);
    let steps = vec![Step::multiply(0.088_388_35, true)];
    let program = Program { load: Load::Element(DType::BF16), target: DType::BF16, steps };
    row_case(report, "multiply BF16, flushing", &program, DType::BF16, &bytes);
}

fn row_case(report: &Report, name: &str, program: &Program, dtype: DType, source: &[u8]) {
    let (from, to) = (width(dtype), width(program.target));
    let band = 256 << 10;
    let mut target = vec![0; band * to];
    report.case(name, source.len(), source.len() / from * to, || {
        for part in source.chunks_exact(band * from) {
            convert_row(program, part, &mut target);
            black_box(&target);
        }
    });
}

/// Codes and scales of a band of a matrix in BF16.
fn encoders(report: &Report) {
    let shape = Shape::try_new(&[1024, 4096]).unwrap();
    let bytes = weights(DType::BF16, 4 << 20);
    let all = [
        Encoder::Fp8Block { power_of_two: false },
        Encoder::Fp8Channel,
        Encoder::Fp8Tensor,
        Encoder::Mxfp8(ExponentRule::Nearest),
        Encoder::Mxfp4,
        Encoder::Nvfp4(MatrixFactor::Divides),
        Encoder::Int8Channel,
        Encoder::Int4 { group: 128 },
        Encoder::Int4 { group: 32 },
    ];
    for encoder in all {
        let bands = Bands::new(encoder, DType::BF16, &shape).unwrap();
        let (_, elements) = bands.input_of(0);
        let input = &bytes[..2 * elements as usize];
        let mut codes = vec![0; bands.bytes_of(EncodedPart::Codes, elements)];
        let mut scales = vec![0; bands.bytes_of(EncodedPart::Scales, elements)];
        let factor = Some(encoder.factor(0.1));
        report.case(&format!("encode {encoder}"), input.len(), codes.len() + scales.len(), || {
            bands.encode(input, factor, None, Some(&mut codes), &mut scales).unwrap();
            black_box((&codes, &scales));
        });
    }
}

/// Rows and columns of the quantized matrices.
const QUANTIZED: [u64; 2] = [4096, 4096];

/// Pseudo-random bytes of a tensor of some elements.
fn stored(id: u32, dtype: DType, elements: u64) -> (SourceTensor, Vec<u8>) {
    let shape = Shape::try_new(&[elements]).unwrap_or_default();
    let bytes = dtype.bytes_of(elements).unwrap_or(0);
    let data: Vec<u8> = (0..bytes).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect();
    // Scales near 1, as in real models.
    let data = if dtype == DType::F8E8M0 { (0..bytes).map(|at| 110 + (at * 7 % 17) as u8).collect() } else { data };
    let data = if dtype.is_float() { weights(dtype, usize::try_from(elements).unwrap_or(0)) } else { data };
    (SourceTensor { id: TensorId(id), dtype, shape }, data)
}

/// A quantized matrix of [`QUANTIZED`] elements `[in, out]` or `[out, in]`: its value, and the bytes of its operands.
struct Scheme {
    name: &'static str,
    value: Value,
    data: Vec<Vec<u8>>,
    /// Whether the requested value is the transpose of the stored one.
    transposed: bool,
}

fn groups(scale: SourceTensor, field: Field, group: u64) -> Operand {
    Operand { tensor: scale, field, index: block_index(QUANTIZED[0], QUANTIZED[1], (1, group)) }
}

fn codes(tensor: SourceTensor, field: Field) -> Operand {
    let stride = field.bits();
    Operand { tensor, field, index: IndexMap::new(&[Digit::axis(&[QUANTIZED[0] * QUANTIZED[1]], 0, stride)]) }
}

fn by_rows() -> Vec<Scheme> {
    let [rows, columns] = QUANTIZED;
    let count = rows * columns;
    let int4 = Field::Integer(Bits::unsigned(4));
    let mut schemes = Vec::new();
    let mut add = |name, value, data: Vec<Vec<u8>>| schemes.push(Scheme { name, value, data, transposed: false });
    let (packed, packed_bytes) = stored(0, DType::U8, count / 2);
    let (fp8, fp8_bytes) = stored(0, DType::F8E4M3, count);
    let (e8m0, e8m0_bytes) = stored(1, DType::F8E8M0, count / 32);
    let (e4m3, e4m3_bytes) = stored(1, DType::F8E4M3, count / 16);
    let (global, global_bytes) = stored(2, DType::F32, 1);
    let (bf16, bf16_bytes) = stored(1, DType::BF16, count / 32);
    let (zero, zero_bytes) = stored(2, DType::BF16, count / 32);
    let (blocks, blocks_bytes) = stored(1, DType::F32, count / 128 / 128);
    let (flat, flat_bytes) = stored(1, DType::F32, count / 64);
    let e2m1 = || Value::of(codes(packed.clone(), Field::e2m1()));
    let mxfp4 = e2m1().then(Operation::Multiply, groups(e8m0, Field::Float(DType::F8E8M0), 32));
    let mxfp4_bytes = vec![packed_bytes.clone(), e8m0_bytes];
    add("MXFP4", mxfp4.clone(), mxfp4_bytes.clone());
    let global = Operand { tensor: global, field: Field::Float(DType::F32), index: IndexMap::new(&[]) };
    let scale = Value::of(groups(e4m3, Field::Float(DType::F8E4M3), 16)).then(Operation::Divide, global);
    add("NVFP4", e2m1().then(Operation::Multiply, scale), vec![packed_bytes.clone(), e4m3_bytes, global_bytes]);
    let scale = || groups(bf16.clone(), Field::Float(DType::BF16), 32);
    let int = || Value::of(codes(packed.clone(), int4.clone()));
    let int4_value = int().then(Operation::Subtract, 8.0).then(Operation::Multiply, scale());
    add("INT4", int4_value, vec![packed_bytes.clone(), bf16_bytes.clone()]);
    let bias = groups(zero, Field::Float(DType::BF16), 32);
    let mlx = int().then(Operation::Multiply, scale()).then(Operation::Add, bias);
    add("MLX 4-bit", mlx, vec![packed_bytes.clone(), bf16_bytes.clone(), zero_bytes]);
    let index = block_index(rows, columns, (128, 128));
    let blocks = Operand { tensor: blocks, field: Field::Float(DType::F32), index };
    let fp8 = Value::of(Operand::elements(fp8)).then(Operation::Multiply, blocks);
    add("F8_E4M3 by F32 blocks", fp8, vec![fp8_bytes, blocks_bytes]);
    let table = (0..16_u16).map(|code| (f32::from(code) / 7.5 - 1.0).to_bits()).collect();
    let high_first = Bits { width: 4, signed: false, order: BitOrder::HighFirst };
    let index = IndexMap::new(&[Digit::axis(&[count], 0, 1).grouped(64)]);
    let flat = Operand { tensor: flat, field: Field::Float(DType::F32), index };
    let nf4 = Value::of(codes(packed, Field::Table(high_first, table))).then(Operation::Multiply, flat);
    add("NF4", nf4, vec![packed_bytes, flat_bytes]);
    // The experts of gpt-oss.
    schemes.push(Scheme { name: "MXFP4 transposed", value: mxfp4, data: mxfp4_bytes, transposed: true });
    schemes
}

fn by_columns() -> Vec<Scheme> {
    let [rows, columns] = QUANTIZED;
    let (shape, group) = ([rows, columns], 128);
    let int4 = Field::Integer(Bits::unsigned(4));
    let (words, words_bytes) = stored(0, DType::I32, rows * columns / 8);
    let (zeros, zeros_bytes) = stored(1, DType::I32, rows / group * columns / 8);
    let (scales, scales_bytes) = stored(2, DType::F16, rows / group * columns);
    let interleaved = |row_bits: u64, group: u64| {
        let column = |stride| Digit::axis(&shape, 1, stride);
        IndexMap::new(&[
            Digit::axis(&shape, 0, row_bits).grouped(group),
            column(32).grouped(8),
            column(16).turning(2),
            column(4).grouped(2).turning(4),
        ])
    };
    let scale = || {
        let index = IndexMap::new(&[Digit::axis(&shape, 0, columns).grouped(group), Digit::axis(&shape, 1, 1)]);
        Operand { tensor: scales.clone(), field: Field::Float(DType::F16), index }
    };
    let value = |codes: IndexMap, zero: IndexMap, zero_field: Field| {
        let zero = Operand { tensor: zeros.clone(), field: zero_field, index: zero };
        Value::of(Operand { tensor: words.clone(), field: int4.clone(), index: codes })
            .then(Operation::Subtract, zero)
            .then(Operation::Multiply, scale())
    };
    let awq = value(interleaved(columns * 4, 1), interleaved(columns * 4, group), int4.clone());
    let gptq = value(
        IndexMap::new(&[
            Digit::axis(&shape, 0, columns * 32).grouped(8),
            Digit::axis(&shape, 0, 4).turning(8),
            Digit::axis(&shape, 1, 32),
        ]),
        IndexMap::new(&[Digit::axis(&shape, 0, columns * 4).grouped(group), Digit::axis(&shape, 1, 4)]),
        Field::one_more(4),
    );
    let data = vec![words_bytes, zeros_bytes, scales_bytes];
    let scheme = |name, value, transposed| Scheme { name, value, data: data.clone(), transposed };
    vec![
        scheme("AWQ", awq.clone(), false),
        scheme("GPTQ", gptq.clone(), false),
        scheme("AWQ transposed", awq, true),
        scheme("GPTQ transposed", gptq, true),
    ]
}

/// Quantized matrices to BF16, in bands of 512 KiB as casts are.
fn quantized(report: &Report) {
    let [rows, columns] = QUANTIZED;
    for Scheme { name, value, data, transposed } in by_rows().into_iter().chain(by_columns()) {
        let decode =
            Decode::Program(Program { load: Load::Value(value.into()), target: DType::BF16, steps: Vec::new() });
        let windows: Vec<Window<'_>> = data.iter().map(|bytes| Window::whole(bytes)).collect();
        // A span of a materialized file takes 1024 values from each row that it transposes.
        let band = if transposed { 1024 } else { (256 << 10) / rows };
        let mut target = vec![0; usize::try_from(2 * band * rows).unwrap_or(0)];
        let read = data.iter().map(Vec::len).sum();
        report.case(&format!("decode {name} to BF16"), read, usize::try_from(2 * rows * columns).unwrap_or(0), || {
            for first in (0..rows).step_by(usize::try_from(band).unwrap_or(1)) {
                let (loops, offset) = if transposed {
                    let inner = Loop { extent: rows, target_stride: 1, source_stride: columns };
                    ([inner, Loop { extent: band, target_stride: rows, source_stride: 1 }], first)
                } else {
                    let inner = Loop { extent: columns, target_stride: 1, source_stride: 1 };
                    ([inner, Loop { extent: band, target_stride: columns, source_stride: columns }], first * columns)
                };
                let job =
                    Gather { decode: &decode, target_bytes: 2, loops: &loops, source_offset: offset, target_offset: 0 };
                gather(Stores::Cached, &job, &windows, &mut target);
                black_box(&target);
            }
        });
    }
}

/// Transposes of a square matrix in bands of 1 MiB, and of 4 MiB: tiles take 256 elements of each row of the source.
fn transposes(report: &Report) {
    for (dtype, mib) in
        [DType::U8, DType::BF16, DType::F32, DType::F64].into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 4)])
    {
        let unit = width(dtype);
        let side: usize = if unit == 8 { 4096 } else { 8192 };
        let source: Vec<u8> = (0..side * side * unit).map(|byte| byte as u8).collect();
        let rows = (mib << 20) / (side * unit);
        let mut target = vec![0; rows * side * unit];
        let decode = Decode::Copy;
        let name = format!("transpose {unit}-byte {side}x{side}, {mib} MiB bands");
        report.case(&name, source.len(), source.len(), || {
            for band in (0..side).step_by(rows) {
                transpose(Stores::Cached, &decode, &source, unit, side, side, band, rows, &mut target);
            }
        });
        if mib == 4 && unit == 2 {
            // As a load into arrays.
            let mut whole = vec![1; source.len()];
            report.case(&format!("{name}, into memory"), source.len(), source.len(), || {
                for (band, made) in (0..side).step_by(rows).zip(whole.chunks_mut(target.len())) {
                    transpose(Stores::Streamed, &decode, &source, unit, side, side, band, rows, made);
                }
            });
        }
        if mib == 1 && (unit == 2 || unit == 4) {
            report.case(&format!("{name}, naive loop"), source.len() / 16, source.len() / 16, || {
                for band in (0..side / 16).step_by(rows) {
                    for row in 0..rows {
                        for column in 0..side {
                            let from = (column * side + band + row) * unit;
                            let to = (row * side + column) * unit;
                            target[to..to + unit].copy_from_slice(&source[from..from + unit]);
                        }
                    }
                    black_box(&target);
                }
            });
        }
    }
    for (source, target) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32), (DType::F8E4M3, DType::BF16)] {
        let side: usize = 8192;
        let bytes = weights(source, side * side / 2);
        let scale = weights(DType::F32, 64 * 64);
        let (from, to) = (width(source), width(target));
        let mut windows = vec![Window::whole(&bytes)];
        let load = if source == DType::F8E4M3 {
            windows.push(Window::whole(&scale));
            let tensor = |id, dtype, elements| stored(id, dtype, elements).0;
            let columns = side as u64;
            let index = block_index(columns / 2, columns, (128, 128));
            let scale = Operand { tensor: tensor(1, DType::F32, 64 * 32), field: Field::Float(DType::F32), index };
            let codes = Operand::elements(tensor(0, source, columns * columns / 2));
            Load::Value(Value::of(codes).then(Operation::Multiply, scale).into())
        } else {
            Load::Element(source)
        };
        let decode = Decode::Program(Program { load, target, steps: Vec::new() });
        let height = side / 2;
        let rows = (1 << 20) / (height * to);
        let mut out = vec![0; rows * height * to];
        report.case(&format!("transpose and cast {source} to {target}"), bytes.len(), bytes.len() / from * to, || {
            for band in (0..side).step_by(rows) {
                let job = Gather {
                    decode: &decode,
                    target_bytes: to as u64,
                    loops: &[
                        Loop { extent: height as u64, target_stride: 1, source_stride: side as u64 },
                        Loop { extent: rows as u64, target_stride: height as u64, source_stride: 1 },
                    ],
                    source_offset: band as u64,
                    target_offset: 0,
                };
                gather(Stores::Cached, &job, &windows, &mut out);
                black_box(&out);
            }
        });
    }
}

/// Fills rows `band..band + rows` of the transpose of `[height, columns]` elements.
#[allow(clippy::too_many_arguments, reason = "a bench")]
fn transpose(
    stores: Stores,
    decode: &Decode,
    source: &[u8],
    to: usize,
    height: usize,
    columns: usize,
    band: usize,
    rows: usize,
    target: &mut [u8],
) {
    let job = Gather {
        decode,
        target_bytes: to as u64,
        loops: &[
            Loop { extent: height as u64, target_stride: 1, source_stride: columns as u64 },
            Loop { extent: rows as u64, target_stride: height as u64, source_stride: 1 },
        ],
        source_offset: band as u64,
        target_offset: 0,
    };
    gather(stores, &job, &[Window::whole(source)], target);
    black_box(&*target);
}

/// `[I, L, O]` from `L` matrices `[O, I]`, in tiles of `ni` values of `I`.
fn stacks(report: &Report) {
    for (layers, outputs, inputs) in [(8, 4096, 4096), (2, 14336, 4096)] {
        for (source, target) in [(DType::BF16, DType::BF16), (DType::F32, DType::BF16)] {
            let elements = layers * outputs * inputs;
            let (from, to) = (width(source), width(target));
            let matrices: Vec<u8> = (0..elements * from).map(|byte| (byte >> 3) as u8).collect();
            let decode = if source == target {
                Decode::Copy
            } else {
                Decode::Program(Program { load: Load::Element(source), target, steps: Vec::new() })
            };
            for ni in [16, 32, 64] {
                let mut tile = vec![0; ni * layers * outputs * to];
                // A quarter of the tiles is enough to time.
                let tiles: Vec<usize> = (0..inputs / 4).step_by(ni).collect();
                let done = tiles.len() * ni * layers * outputs;
                let name = format!("stack {source} to {target} L={layers} O={outputs} I={inputs} ni={ni}");
                report.case(&name, done * from, done * to, || {
                    for first in &tiles {
                        for (layer, matrix) in matrices.chunks_exact(outputs * inputs * from).enumerate() {
                            let pitch = (layers * outputs) as u64;
                            let job = Gather {
                                decode: &decode,
                                target_bytes: to as u64,
                                loops: &[
                                    Loop { extent: outputs as u64, target_stride: 1, source_stride: inputs as u64 },
                                    Loop { extent: ni as u64, target_stride: pitch, source_stride: 1 },
                                ],
                                source_offset: *first as u64,
                                target_offset: (layer * outputs) as u64,
                            };
                            gather(Stores::Cached, &job, &[Window::whole(matrix)], &mut tile);
                        }
                        black_box(&tile);
                    }
                });
            }
        }
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let is_short = std::env::args().any(|argument| argument == "--short");
    let time_per_case = if is_short { Duration::ZERO } else { TIME_PER_CASE };
    let report = Report { filter, time_per_case };
    println!("{:<58} {:>8} {:>8}", "one core, GB/s", "read", "written");
    casts(&report);
    encoders(&report);
    quantized(&report);
    transposes(&report);
    stacks(&report);
}
