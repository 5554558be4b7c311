//! Speed of the kernels on one core: casts, dequantization, blocked transposes beside a naive loop, and gathers of
//! transposed scan stacks. Prints a table whose every row is followed by the same as a line of JSON.
//!
//! Run with `cargo bench --bench kernels -- [part of a case's name]`. GB are 10^9 bytes. Every case repeats for a fixed
//! time and reports its fastest pass.
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

use ckfs::tensor::{BlockScale, DType, Decode, Gather, Loop, Program, Step, TensorId, convert_row, gather};

const TIME_PER_CASE: Duration = Duration::from_millis(120);

struct Report {
    filter: Option<String>,
}

impl Report {
    /// Times `pass`, which reads `input` and writes `output` bytes.
    fn case(&self, name: &str, input: usize, output: usize, mut pass: impl FnMut()) {
        if self.filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
            return;
        }
        pass();
        let (start, mut best) = (Instant::now(), Duration::MAX);
        while start.elapsed() < TIME_PER_CASE {
            let begin = Instant::now();
            pass();
            best = best.min(begin.elapsed());
        }
        let rate = |bytes: usize| bytes as f64 / best.as_secs_f64() / 1e9;
        let (read, written) = (rate(input), rate(output));
        println!("{name:<58} {read:8.2} {written:8.2}");
        println!(
            "{{\"bench\":\"kernels\",\"case\":\"{name}\",\"input_gb_per_s\":{read:.3},\"output_gb_per_s\":{written:.3}}}"
        );
    }
}

/// Bytes that look like weights to every float type: mostly normal values of moderate size.
fn weights(dtype: DType, elements: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut wide = Vec::with_capacity(elements * 4);
    for _ in 0..elements {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (f64::from(state) / f64::from(u32::MAX) - 0.5) as f32 * 0.2;
        wide.extend_from_slice(&value.to_le_bytes());
    }
    let program = Program { source: DType::F32, target: dtype, steps: Vec::new() };
    let mut bytes = vec![0; elements * width(dtype)];
    convert_row(&program, &[], &wide, 0, &mut bytes);
    bytes
}

fn width(dtype: DType) -> usize {
    usize::try_from(dtype.element_bytes().unwrap()).unwrap()
}

/// Casts of 1 MiB of elements at a time out of 64 MiB into a buffer that stays in the cache, as tiles are made.
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
        let program = Program { source, target, steps: Vec::new() };
        row_case(report, &format!("cast {source} to {target}"), &program, &bytes, &[]);
    }
    let bytes = weights(DType::BF16, 16 << 20);
    let steps = vec![Step::Multiply { factor: 0.088_388_35, flush: true }];
    let program = Program { source: DType::BF16, target: DType::BF16, steps };
    row_case(report, "multiply BF16, flushing", &program, &bytes, &[]);
    let bytes = weights(DType::F8E4M3, 16 << 20);
    for dtype in [DType::F32, DType::BF16] {
        let scale = weights(dtype, 32 * 32);
        let block = BlockScale { tensor: TensorId(0), dtype, columns: 4096, block_rows: 128, block_columns: 128 };
        let program = Program { source: DType::F8E4M3, target: DType::BF16, steps: vec![Step::Scale(block)] };
        row_case(report, &format!("dequantize F8_E4M3 by {dtype} to BF16"), &program, &bytes, &scale);
    }
}

fn row_case(report: &Report, name: &str, program: &Program, source: &[u8], scale: &[u8]) {
    let (from, to) = (width(program.source), width(program.target));
    let band = 256 << 10;
    let mut target = vec![0; band * to];
    report.case(name, source.len(), source.len() / from * to, || {
        for (index, part) in source.chunks_exact(band * from).enumerate() {
            convert_row(program, scale, part, (index * band) as u64, &mut target);
            black_box(&target);
        }
    });
}

/// Transposes of a square matrix in bands of 1 MiB.
fn transposes(report: &Report) {
    for dtype in [DType::U8, DType::BF16, DType::F32, DType::F64] {
        let unit = width(dtype);
        let side: usize = if unit == 8 { 4096 } else { 8192 };
        let source: Vec<u8> = (0..side * side * unit).map(|byte| byte as u8).collect();
        let rows = (1 << 20) / (side * unit);
        let mut target = vec![0; rows * side * unit];
        let decode = Decode::Copy;
        let name = format!("transpose {unit}-byte {side}x{side}, 1 MiB bands");
        report.case(&name, source.len(), source.len(), || {
            for band in (0..side).step_by(rows) {
                transpose(&decode, &source, unit, unit, side, side, band, rows, &mut target);
            }
        });
        if unit == 2 || unit == 4 {
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
        let steps = if source == DType::F8E4M3 {
            let (columns, block_rows, block_columns) = (side as u64, 128, 128);
            vec![Step::Scale(BlockScale { tensor: TensorId(0), dtype: DType::F32, columns, block_rows, block_columns })]
        } else {
            Vec::new()
        };
        let scale = weights(DType::F32, 64 * 64);
        let (from, to) = (width(source), width(target));
        let decode = Decode::Program(Program { source, target, steps });
        let height = side / 2;
        let rows = (1 << 20) / (height * to);
        let mut out = vec![0; rows * height * to];
        report.case(&format!("transpose and cast {source} to {target}"), bytes.len(), bytes.len() / from * to, || {
            for band in (0..side).step_by(rows) {
                let job = Gather {
                    decode: &decode,
                    source_bytes: from as u64,
                    target_bytes: to as u64,
                    loops: &[
                        Loop { extent: height as u64, target_stride: 1, source_stride: side as u64 },
                        Loop { extent: rows as u64, target_stride: height as u64, source_stride: 1 },
                    ],
                    source_offset: band as u64,
                    target_offset: 0,
                };
                gather(&job, &bytes, 0, &scale, &mut out);
                black_box(&out);
            }
        });
    }
}

/// Fills rows `band..band + rows` of the transpose of `[height, columns]` elements.
#[allow(clippy::too_many_arguments, reason = "a bench")]
fn transpose(
    decode: &Decode,
    source: &[u8],
    from: usize,
    to: usize,
    height: usize,
    columns: usize,
    band: usize,
    rows: usize,
    target: &mut [u8],
) {
    let job = Gather {
        decode,
        source_bytes: from as u64,
        target_bytes: to as u64,
        loops: &[
            Loop { extent: height as u64, target_stride: 1, source_stride: columns as u64 },
            Loop { extent: rows as u64, target_stride: height as u64, source_stride: 1 },
        ],
        source_offset: band as u64,
        target_offset: 0,
    };
    gather(&job, source, 0, &[], target);
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
                Decode::Program(Program { source, target, steps: Vec::new() })
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
                                source_bytes: from as u64,
                                target_bytes: to as u64,
                                loops: &[
                                    Loop { extent: outputs as u64, target_stride: 1, source_stride: inputs as u64 },
                                    Loop { extent: ni as u64, target_stride: pitch, source_stride: 1 },
                                ],
                                source_offset: *first as u64,
                                target_offset: (layer * outputs) as u64,
                            };
                            gather(&job, matrix, 0, &[], &mut tile);
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
    let report = Report { filter };
    println!("{:<58} {:>8} {:>8}", "one core, GB/s", "read", "written");
    casts(&report);
    transposes(&report);
    stacks(&report);
}
