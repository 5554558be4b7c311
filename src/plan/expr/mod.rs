//! The expressions of layout files: numbers from `config.json`, and views over named tensors.
//!
//! One small language without assignment, loops or side effects:
//!
//! ```text
//! if A then B else C      A ?? B (B where A is absent)      ||  &&  !
//! == != < <= > >=         + - * / // %                      12  1.5  true  'text {template}'
//! config.NAME             member of config.json, of the text model's part if it has the name; absent if no plain value
//! mesh.NAME               size of a mesh axis; absent if the mesh has none of that name
//! name                    a parameter, a variable, a loop's variable, or a source tensor of the rule
//! f(a, b)                 a function of the table below
//! [3, 0..4]               a list of whole numbers, ranges without their end
//! ```
//!
//! `/` of whole numbers gives a whole number if it divides evenly, and a fraction otherwise. `//` rounds down. A
//! fraction where a whole number is needed is an error. Functions of numbers are `min max sqrt ceil floor f32 bf16`;
//! the last two round to that type. `exists('name')`, `shape('name', axis)` and `count('a.*.b')` ask about the
//! repository's tensors. `count` is one more than the highest number in the place of the star. `given('name')` tells
//! whether the user has set a parameter.
//!
//! | function of views | result |
//! | --- | --- |
//! | `transpose(x)` | all axes reversed |
//! | `permute(x, 1, 0)` | axis `i` is the operand's axis number `i` of the list |
//! | `swap(x, -1, -2)` | two axes exchanged |
//! | `reshape(x, 4, -1)` | the same elements in row-major order; one extent may be `-1` |
//! | `slice(x, axis, start, stop[, step])` | a part of an axis; with a negative step downwards, as Python's `range` |
//! | `part(x, axis, n, e, …)` | part `n` of parts of these extents, which must be all of the axis |
//! | `halves(x, axis, n)` | in each of `n` groups of an axis the first elements of all pairs, then the second ones |
//! | `gather(x, axis, i, …)` | the elements of an axis at these indexes, each a number or a list such as `[3, 0..2]` |
//! | `concat(axis, x, …)`, `stack(axis, x, …)` | end to end, or side by side along a new axis |
//! | `pad(x, axis, before, after)` | zeros around |
//! | `cut_or_pad(x, axis, n)` | the first `n` elements of an axis, with zeros after if there are fewer |
//! | `repeat(x, axis, n)` | each element of an axis `n` times in a row, as `np.repeat` |
//! | `fill(value, 'f32', extent, …)` | a constant |
//! | `cast(x, 'f32')` | values rounded to another type |
//! | `mul(x, c[, i])`, `add(x, c)` | arithmetic in f32, rounded to the operand's type; a product with `i` undoes that with `c` |
//! | `mul_flush(x, c[, i])` | as `mul`, with subnormal operands and products made zero of the same sign |
//! | `mul_f32(x, c[, i])`, `add_f32(x, c)` | as `mul` and `add`, the result left in f32 |
//! | `add(x, y)`, `mul(x, y)`, … | the same with another view of that shape and dtype |
//! | `exp(x)` | `e` to the power of each value: the nearest f32, rounded to the operand's type |
//! | `extent(x, axis)`, `rank(x)` | numbers |
//!
//! Axes may be counted from the end as `-1`, `-2`. Constants of arithmetic must be exact values of f32: write `f32(…)`.

mod expression;
mod function;
mod parse;
mod value;

/// Names of all functions.
pub(super) fn function_names() -> impl Iterator<Item = &'static str> + Clone {
    function::FUNCTIONS.iter().map(|(name, ..)| *name)
}

pub use expression::{Expr, TextTemplate};
pub use value::{Absent, EvalError, ExprValue, NameScope, SyntaxError};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{function::FUNCTIONS, *};
    use ckfs_tensor::View;
    use ckfs_tensor::{DType, Shape, SourceTensor, TensorId};

    /// A repository of one tensor `t` of shape 6 by 4, experts 0 to 2 and 9, and a small configuration.
    struct Fixed;

    fn tensor() -> View {
        let shape = Shape::try_new(&[6, 4]).unwrap();
        View::source(SourceTensor { id: TensorId(0), dtype: DType::BF16, shape })
    }

    impl NameScope for Fixed {
        fn name(&self, name: &str) -> Result<ExprValue, EvalError> {
            match name {
                "x" => Ok(ExprValue::View(tensor())),
                "n" => Ok(ExprValue::Int(12)),
                "pi" => Ok(ExprValue::Float(3.25)),
                _ => Err(EvalError::no_name(name)),
            }
        }

        fn config(&self, path: &[String]) -> Option<ExprValue> {
            match path.join(".").as_str() {
                "hidden_size" => Some(ExprValue::Int(48)),
                "rope.theta" => Some(ExprValue::Float(1e6)),
                "kind" => Some(ExprValue::Text("moe".into())),
                _ => None,
            }
        }

        fn mesh(&self, axis: &str) -> Option<u64> {
            (axis == "tensor").then_some(4)
        }

        fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
            (tensor == "t.12").then(|| vec![6, 4])
        }

        fn count(&self, pattern: &str) -> u64 {
            if pattern == "e.*.w" { 10 } else { 0 }
        }
    }

    fn eval(text: &str) -> Result<ExprValue, String> {
        let expr = Expr::parse(text).map_err(|error| error.to_string())?;
        expr.eval(&Fixed).map_err(|error| error.to_string())
    }

    #[test]
    fn expressions_have_their_values() {
        let rows = [
            ("1 + 2 * 3", "7"),
            ("(1 + 2) * 3", "9"),
            ("7 / 2", "3.5"),
            ("8 / 2", "4"),
            ("7 // 2", "3"),
            ("-7 // 2", "-4"),
            ("7 // -2", "-4"),
            ("-7 // -2", "3"),
            ("-7 % 4", "1"),
            ("1_000 - 1", "999"),
            ("2.5e1", "25"),
            ("n // 5 * 5 + n % 5", "12"),
            ("config.hidden_size / 6", "8"),
            ("config.rope.theta", "1000000"),
            ("mesh.tensor * (mesh.tp ?? 1)", "4"),
            ("config.no_such ?? config.nor_this ?? 5", "5"),
            ("config.hidden_size ?? 5", "48"),
            ("config.kind == 'moe' && !(n < 12)", "true"),
            ("false && nonsense", "false"),
            ("true || nonsense", "true"),
            ("if n == 12 then 'a{n}b' else nonsense", "a12b"),
            ("if n > 12 then 1 else if n >= 12 then 2 else 3", "2"),
            ("1 == 1.0", "true"),
            ("1 != 'a'", "true"),
            ("absent == config.nothing", "true"),
            ("sqrt(48)", "6.928203230275509"),
            ("f32(sqrt(48))", "6.928203105926514"),
            ("bf16(sqrt(48))", "6.9375"),
            ("f32(1 / sqrt(8))", "0.3535533845424652"),
            ("min(3, n, 2.5)", "2.5"),
            ("max(3, n, 2.5)", "12"),
            ("ceil(n / 5) + floor(pi)", "6"),
            ("exists('t.{n}')", "true"),
            ("exists('t.13')", "false"),
            ("given('vocab_size')", "false"),
            ("shape('t.{n}', -1)", "4"),
            ("shape('t.13', 0) ?? 7", "7"),
            ("count('e.*.w')", "10"),
            ("transpose(x)", "a view BF16 [4, 6]"),
            ("permute(x, 1, 0)", "a view BF16 [4, 6]"),
            ("swap(x, -1, -2)", "a view BF16 [4, 6]"),
            ("part(x, 0, 1, 1, 3 + 2)", "a view BF16 [5, 4]"),
            ("halves(x, -2, 3)", "a view BF16 [6, 4]"),
            ("reshape(x, 2, -1, 4)", "a view BF16 [2, 3, 4]"),
            ("slice(x, 0, 1, 6, 2)", "a view BF16 [3, 4]"),
            ("slice(x, -1, 0, extent(x, -1) / 2)", "a view BF16 [6, 2]"),
            ("slice(x, 0, 5, -1, -2)", "a view BF16 [3, 4]"),
            ("slice(x, -1, 3, 0, -1)", "a view BF16 [6, 3]"),
            ("slice(x, 0, 2, 2, -1)", "a view BF16 [0, 4]"),
            ("gather(x, 0, 5, 0, 0)", "a view BF16 [3, 4]"),
            ("gather(x, -1, [3, 0..3], 1)", "a view BF16 [6, 5]"),
            ("gather(x, 0, [])", "a view BF16 [0, 4]"),
            ("[n, 0..4]", "a list of 5 numbers"),
            ("add(x, x)", "a view BF16 [6, 4]"),
            ("mul_f32(x, swap(transpose(x), 0, 1))", "a view F32 [6, 4]"),
            ("exp(x)", "a view BF16 [6, 4]"),
            ("concat(0, x, x)", "a view BF16 [12, 4]"),
            ("stack(-1, x, x)", "a view BF16 [6, 4, 2]"),
            ("pad(x, 0, 1, 2)", "a view BF16 [9, 4]"),
            ("cut_or_pad(x, 0, 8)", "a view BF16 [8, 4]"),
            ("cut_or_pad(x, 0, 2)", "a view BF16 [2, 4]"),
            ("repeat(x, 0, 1)", "a view BF16 [6, 4]"),
            ("repeat(x, -1, 3)", "a view BF16 [6, 12]"),
            ("fill(1, 'f32')", "a view F32 []"),
            ("fill(1.5, 'f32', 2, 3)", "a view F32 [2, 3]"),
            ("fill(0, 'i32', 2)", "a view I32 [2]"),
            ("cast(x, 'f32')", "a view F32 [6, 4]"),
            ("mul(x, 0.5)", "a view BF16 [6, 4]"),
            ("mul_flush(x, f32(0.1))", "a view BF16 [6, 4]"),
            ("add_f32(x, 1)", "a view F32 [6, 4]"),
            ("rank(stack(0, x)) + extent(x, 0)", "9"),
        ];
        for (text, expected) in rows {
            assert_eq!(eval(text).map(|value| value.to_string()), Ok(expected.to_owned()), "{text}");
        }
    }

    #[test]
    fn expressions_without_a_value_are_refused_by_name() {
        let rows = [
            ("", "at \"the end\": expected a value"),
            ("1 +", "at \"the end\": expected a value"),
            ("1 2", "at \"2\": expected an operator or the end"),
            ("(1", "at \"the end\": expected a closing parenthesis"),
            ("'a", "at \"a\": expected a closing quote"),
            ("'a{1'", "at \"the end\": expected a closing brace"),
            ("'a}'", "at \"}\": expected no closing brace"),
            ("config", "at \"the end\": expected a dot and a member's name"),
            ("config.", "at \"the end\": expected a member's name"),
            ("nosuch(1)", "there is no function \"nosuch\""),
            ("sqrt(1, 2)", "sqrt takes 1 operands, found 2"),
            ("slice(x, 1)", "slice takes 4 to 5 operands, found 2"),
            ("if 1 then 2", "at \"the end\": expected else"),
            ("99999999999999999999", "at \"99999999999999999999\": expected a number of at most 64 bits"),
            ("nothing", "nothing is called \"nothing\""),
            ("config.none + 1", "config.json has no member \"none\""),
            ("shape('t.9', 0) + 1", "there is no tensor \"t.9\""),
            ("'a' + 1", "+: expected a number, found a"),
            ("9223372036854775807 + 1", "+: no such number"),
            ("1 / 0", "/: no such number"),
            ("1 // 0", "//: no such number"),
            ("1.5 / 0", "/: no such number"),
            ("sqrt(-1)", "sqrt: no such number"),
            ("1 && true", "&&: expected true or false, found 1"),
            ("reshape(x, 7 / 2)", "reshape: expected a whole number, found 3.5"),
            ("reshape(x, -2)", "reshape: expected a number that is not negative, found -2"),
            ("reshape(x, 5, 5)", "reshape: [6, 4] has 24 elements, [5, 5] has 25"),
            ("reshape(x, 5, -1)", "reshape: [6, 4] has 24 elements, [5, 4] has 20"),
            ("slice(x, 0, 0, 7)", "slice: axis 0 has extent 6, asked for 0..7 in steps of 1"),
            (
                "slice(x, 0, 6, -1, -1)",
                "slice: axis 0 has extent 6, asked for elements from 6 down to before -1 in steps of -1",
            ),
            ("gather(x, 0, [4..7])", "gather: axis 0 has extent 6, asked for element 6"),
            ("gather(x, 0, [-1])", "gather: expected a number that is not negative, found -1"),
            ("[0..9223372036854775807]", "list: no such number"),
            ("[1, 2", "at \"the end\": expected a comma or a closing bracket"),
            ("[1] + 1", "+: expected a number, found a list of 1 numbers"),
            ("add(x, transpose(x))", "add: operand 1 is BF16 [4, 6], operand 0 is BF16 [6, 4]"),
            ("mul(x, cast(x, 'f32'))", "multiply: operand 1 is F32 [6, 4], operand 0 is BF16 [6, 4]"),
            ("mul(x, x, 2)", "mul: expected no third operand after two views, found 2"),
            ("permute(x, 0, 0)", "transpose: [0, 0] is not a permutation of the axes of [6, 4]"),
            ("swap(x, 0, 2)", "swap: axis 2, but the shape [6, 4] has 2 axes"),
            ("swap(x, 0, -3)", "swap: expected an axis, found -3"),
            ("part(x, 0, 1, 1, 3)", "part: expected part 1 of [1, 3] of axis 0, found [6, 4]"),
            ("part(x, 0, 2, 1, 5)", "part: expected part 2 of [1, 5] of axis 0, found [6, 4]"),
            ("halves(x, 0, 2)", "halves: expected pairs in each of 2 groups of axis 0, found [6, 4]"),
            ("halves(x, 2, 1)", "halves: expected pairs in each of 1 groups of axis 2, found [6, 4]"),
            ("halves(x, 0, 0)", "halves: expected pairs in each of 0 groups of axis 0, found [6, 4]"),
            ("mul(x, 0.1)", "0.1 is no value of f32: round it with f32(…)"),
            ("mul(x, 1 / 3)", "0.3333333333333333 is no value of f32: round it with f32(…)"),
            ("cast(x, 'f17')", "there is no dtype \"f17\"; did you mean `f16`?"),
            ("transpose(3)", "transpose: expected a view, found 3"),
            ("'{x}'", "template: expected a number or a text, found a view BF16 [6, 4]"),
        ];
        for (text, expected) in rows {
            assert_eq!(eval(text).map(|value| value.to_string()), Err(expected.to_owned()), "{text}");
        }
        let deep = format!("{}1{}", "(".repeat(100), ")".repeat(100));
        assert_eq!(eval(&deep).unwrap_err(), SyntaxError::Depth.to_string());
        assert_eq!(eval(&"-".repeat(1000)).unwrap_err(), SyntaxError::Depth.to_string());
    }

    #[test]
    fn ranges_and_templates() {
        let (start, stop) = Expr::parse_range("n // 5..config.hidden_size").unwrap();
        assert_eq!(start.eval(&Fixed).unwrap().to_string(), "2");
        assert_eq!(stop.eval(&Fixed).unwrap().to_string(), "48");
        assert_eq!(Expr::parse_range("0..6").unwrap().1.eval(&Fixed).unwrap().to_string(), "6");
        assert!(Expr::parse_range("6").is_err());
        let template = TextTemplate::parse("a.{n - 2}.{if n == 12 then 'x' else 'y'}.{{}}.é").unwrap();
        assert_eq!(template.eval(&Fixed).unwrap(), "a.10.x.{}.é");
        assert_eq!(template.names, ["n", "n"].map(Into::into));
        assert_eq!(Expr::parse("f32(a) + max(b, 't.{c}') * [d..e] ?? !a").unwrap().names.concat(), "abcdea");
    }

    #[test]
    fn values_set_by_users() {
        let rows =
            [("12", "12"), ("256_128", "256128"), ("true", "true"), ("0.5", "0.5"), (" a b ", "a b"), ("inf", "inf")];
        for (text, expected) in rows {
            assert_eq!(ExprValue::of_text(text).to_string(), expected);
        }
        assert!(matches!(ExprValue::of_text("0.2.5"), ExprValue::Text(_)));
        assert!(matches!(ExprValue::of_text("nan"), ExprValue::Text(_)));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = Expr::parse(&text);
            let _ = Expr::parse_range(&text);
            let _ = TextTemplate::parse(&text);
        }

        /// Texts of the language's own words pass further into parser and evaluation than random texts.
        #[test]
        fn no_expression_makes_evaluation_panic(words in prop::collection::vec(prop::sample::select(vec![
            "x", "n", "pi", "1", "0", "-1", "2", "9223372036854775807", "1.5", "1e300", "(", ")", ",", "+", "-", "*", "/",
            "//", "%", "==", "<", "??", "&&", "!", "if ", " then ", " else ", "'t.{n}'", "'f32'", "true", "config.a",
            "transpose(", "permute(", "reshape(", "slice(", "concat(", "stack(", "pad(", "cut_or_pad(", "fill(", "cast(",
            "mul(", "add_f32(", "extent(", "rank(", "gather(", "exp(", "[", "]", "..", "min(", "sqrt(", "floor(", "shape(", "count(", "exists(", "swap(",
        ]), 0..14)) {
            let text = words.concat();
            if let Ok(expr) = Expr::parse(&text) {
                let _ = expr.eval(&Fixed);
            }
        }

        /// Calls with operands of every kind: far more of them are well-formed.
        #[test]
        fn no_call_panics(
            function in prop::sample::select(&FUNCTIONS[..]),
            operands in prop::collection::vec(prop::sample::select(vec![
                "x", "x", "[0, 2..4]", "n", "pi", "1", "0", "-1", "-9", "3", "9223372036854775807", "1e300", "'f32'", "'t.12'", "true", "config.a",
            ]), 0..6),
        ) {
            if let Ok(expr) = Expr::parse(&format!("{}({})", function.0, operands.join(", "))) {
                let _ = expr.eval(&Fixed);
            }
        }

        /// Whole numbers against the same arithmetic in 128 bits.
        #[test]
        fn arithmetic_of_whole_numbers(a in any::<i64>(), b in any::<i64>()) {
            let (wide_a, wide_b) = (i128::from(a), i128::from(b));
            let floor = |a: i128, b: i128| if a % b != 0 && (a < 0) != (b < 0) { a / b - 1 } else { a / b };
            let rows = [
                ("+", Some(wide_a + wide_b)),
                ("-", Some(wide_a - wide_b)),
                ("*", Some(wide_a * wide_b)),
                ("//", (b != 0).then(|| floor(wide_a, wide_b))),
            ];
            for (sign, exact) in rows {
                let names = Pair(a, b);
                let value = Expr::parse(&format!("a {sign} b")).unwrap().eval(&names).ok().map(|value| value.to_string());
                let exact = exact.and_then(|exact| i64::try_from(exact).ok()).map(|exact| exact.to_string());
                prop_assert_eq!(value, exact, "{} {} {}", a, sign, b);
            }
        }
    }

    struct Pair(i64, i64);

    impl NameScope for Pair {
        fn name(&self, name: &str) -> Result<ExprValue, EvalError> {
            Ok(ExprValue::Int(if name == "a" { self.0 } else { self.1 }))
        }

        fn config(&self, _: &[String]) -> Option<ExprValue> {
            None
        }

        fn mesh(&self, _: &str) -> Option<u64> {
            None
        }

        fn shape(&self, _: &str) -> Option<Vec<u64>> {
            None
        }

        fn count(&self, _: &str) -> u64 {
            0
        }
    }
}
