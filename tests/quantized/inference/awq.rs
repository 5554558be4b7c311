//! AWQ.

use ckfs::tensor::DType;
use serde_json::{Value, json};

use crate::repository::{Repository, f16_at, field_at};

fn config(size: i64) -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": true, "version": "gemm",
           "modules_to_not_convert": ["lm_head", "visual"]})
}

fn matrix(repository: Repository, module: &str, (inner, out): (u64, u64), groups: u64) -> Repository {
    repository
        .noise(&format!("{module}.qweight"), DType::I32, &[inner, out / 8])
        .noise(&format!("{module}.qzeros"), DType::I32, &[groups, out / 8])
        .noise(&format!("{module}.scales"), DType::F16, &[groups, out])
}

/// Nibble k of a word is this column of its eight.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn check(repository: &Repository, module: &str, (inner, out): (usize, usize), group: usize) {
    let opened = repository.open();
    let part = |word: &str| opened.stored(&format!("{module}.{word}"));
    let (codes, zeros, scales) = (part("qweight"), part("qzeros"), part("scales"));
    opened.check(&format!("{module}.weight"), "awq", &[out as u64, inner as u64], |n| {
        let (o, i) = (n / inner, n % inner);
        let place = ORDER.iter().position(|column| *column == o % 8).unwrap();
        let q = field_at(&codes, i * (out / 8) + o / 8, place, 4);
        let z = field_at(&zeros, i / group * (out / 8) + o / 8, place, 4);
        (q - z) as f32 * f16_at(&scales, i / group * out + o)
    });
}

#[test]
fn matrices_are_turned_and_their_words_put_in_order() {
    let repository = matrix(Repository::new(config(4)), "a", (12, 40), 3);
    let repository = matrix(repository, "model.b", (4, 8), 1).noise("a.bias", DType::F16, &[40]);
    let repository = repository.noise("lm_head.weight", DType::F16, &[8, 12]);
    check(&repository, "a", (12, 40), 4);
    check(&repository, "model.b", (4, 8), 4);
    let opened = repository.open();
    assert_eq!(opened.decoded(), ["a.weight", "model.b.weight"]);
    assert!(opened.left_out().is_empty());
    let found = opened.checkpoint.quantized();
    assert_eq!(found.schemes[0].text, "awq gemm: 2 weights of 4-bit integers, a scale for 4");
    // A group of -1 is a whole column.
    check(&matrix(Repository::new(config(-1)), "a", (12, 40), 1), "a", (12, 40), 12);
}

#[test]
fn all_that_does_not_agree_is_refused_at_once() {
    let mut repository = Repository::new(config(4));
    for module in ["a", "b", "c", "d", "e", "f"] {
        repository = matrix(repository, module, (12, 16), 3);
    }
    let repository = matrix(repository, "g", (10, 16), 2)
        .without("a.scales")
        .without("b.qzeros")
        .without("f.qweight")
        .instead("c.scales", DType::I32, &[3, 16])
        .instead("d.qzeros", DType::I32, &[4, 2])
        .instead("e.qweight", DType::U32, &[12, 2]);
    repository.is_refused(&[
        "tensor \"a.qweight\": expected a.scales to decode it, found no such tensor",
        "tensor \"b.qweight\": expected b.qzeros to decode it, found no such tensor",
        "tensor \"c.scales\": expected a float as the scale of \"c.qweight\", found I32",
        "tensor \"d.qzeros\": expected I32 [3, 2] to decode \"d.weight\", found I32 [4, 2]",
        "tensor \"e.qweight\": expected I32 [12, 2] to decode \"e.weight\", found U32 [12, 2]",
        "tensor \"f.qzeros\": expected codes f.qweight beside it, found no such tensor",
        "tensor \"g.qweight\": expected shape [in, out/8] with groups of 4, found [10, 2]",
    ]);
    // Groups that are configured otherwise than stored.
    matrix(Repository::new(config(6)), "a", (12, 16), 3)
        .is_refused(&["tensor \"a.qzeros\": expected I32 [2, 2] to decode \"a.weight\", found I32 [3, 2]"]);
}

#[test]
fn other_kernels_and_other_bits_stay_raw_by_name() {
    for (key, value, name) in [
        ("version", json!("gemv"), "awq gemv"),
        ("version", json!("MARLIN"), "awq marlin"),
        ("version", json!("exllama"), "awq exllama"),
        ("bits", json!(3), "awq of 3 bits"),
        ("zero_point", json!(false), "awq without zero points"),
        ("group_size", json!(0), "awq with a group_size of 0"),
        ("group_size", Value::Null, "awq with no group_size"),
        ("modules_to_not_convert", json!(["mlp.a"]), "awq, but its configuration leaves this tensor unquantized"),
    ] {
        let mut config = config(4);
        config[key] = value;
        matrix(Repository::new(config), "model.mlp.a", (12, 16), 3).stays_raw(name, 1);
    }
}
