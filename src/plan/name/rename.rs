//! Renaming of tensors by the user's rules, within the limits of names and paths.

use std::borrow::Cow;

use ckfs_config::rename::RenameFault;

use super::super::{naming::component, problem::Problem};
pub use ckfs_config::{Rename, rename::NAME_BYTES_MAX};

/// Longest path component, in bytes.
const COMPONENT_BYTES_MAX: usize = 255;

/// A name after all rules.
///
/// # Errors
/// Of the first rule that makes it longer than [`NAME_BYTES_MAX`], or whose expression takes too long; rules after it are not applied.
pub fn apply(rules: &[Rename], name: &str) -> Result<String, Problem> {
    let mut shown = Cow::Borrowed(name);
    for rule in rules {
        match rule.apply(&shown) {
            Ok(None) => {}
            Ok(Some(new)) => shown = Cow::Owned(new),
            Err(RenameFault::Long(bytes)) => return Err(too_long(name, rule, "name", bytes, NAME_BYTES_MAX)),
            Err(RenameFault::Steps) => {
                let reason = format!(
                    "rename {:?} takes too many steps; write the expression without nested repetitions",
                    rule.pattern()
                );
                return Err(Problem::Tensor { name: name.to_owned(), reason });
            }
        }
    }
    Ok(shown.into_owned())
}

/// A warning for each rule of a setting that changes no name, each of those that the rules before it leave.
pub(crate) fn idle<'n, I: Iterator<Item = &'n str>>(
    setting: &str,
    rules: &[Rename],
    names: impl Fn() -> I,
) -> Vec<String> {
    let is_idle = |(at, rule): &(usize, &Rename)| {
        let mut left = names().filter_map(|name| apply(&rules[..*at], name).ok());
        left.all(|name| matches!(rule.apply(&name), Ok(None)))
    };
    let idle = rules.iter().enumerate().filter(is_idle);
    idle.map(|(_, rule)| format!("{setting}: {:?} changes no name", rule.pattern())).collect()
}

/// A name after all rules, as the name of a file. With `flat` it is one path component; otherwise each of its words is
/// one.
///
/// # Errors
/// As [`apply`]. Also if a component ends up longer than the kernel accepts; the problem names the rule that made it so.
pub(crate) fn apply_to_path(rules: &[Rename], name: &str, flat: bool) -> Result<String, Problem> {
    let longest = |name: &str| {
        let words = name.split('.').map(|word| component(word).len());
        if flat { component(name).len() } else { words.max().unwrap_or(0) }
    };
    let new = apply(rules, name)?;
    if longest(&new) <= COMPONENT_BYTES_MAX || new == name {
        return Ok(new);
    }
    // A rule may make a word longer and a later one shorter. The problem names the rule after which it stays too long.
    let is_long_after =
        |count: &usize| apply(&rules[..*count], name).is_ok_and(|name| longest(&name) > COMPONENT_BYTES_MAX);
    let to_blame = (1..=rules.len()).rev().take_while(is_long_after).last().unwrap_or(rules.len());
    Err(too_long(name, &rules[to_blame - 1], "file name", longest(&new), COMPONENT_BYTES_MAX))
}

fn too_long(name: &str, rule: &Rename, what: &'static str, bytes: usize, max: usize) -> Problem {
    let reason = format!("rename {:?} makes a {what} of {bytes} bytes, at most {max} are possible", rule.pattern());
    Problem::Tensor { name: name.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_apply_in_order_to_all_matches() {
        let rows: &[(&[&str], &str, &str)] = &[
            (&["^model\\.=>"], "model.layers.0.w", "layers.0.w"),
            (&["a=>b", "b=>c"], "aab", "ccc"),
            (&["layers\\.(\\d+)=>h.$1_x"], "layers.7.w", "h.7_x.w"),
            (&["(\\w+)\\.(\\w+)=>\\2.$1"], "a.b", "b.a"),
            (&["w=>$$"], "w", "$"),
            (&["(?<n>\\d)=>${n}${n}"], "a1", "a11"),
            (&["nothing=>x"], "a", "a"),
        ];
        for (rules, name, expected) in rows {
            let rules: Vec<Rename> = rules.iter().map(|rule| Rename::parse(rule).unwrap()).collect();
            assert_eq!(apply(&rules, name).as_deref(), Ok(*expected), "{rules:?}");
        }
        assert_eq!(apply(&[Rename::strip_prefix("m."), Rename::add_prefix("$1.")], "m.a").unwrap(), "$1.a");
        assert_eq!(apply(&[Rename::strip_prefix("m.")], "mxa").unwrap(), "mxa", "a dot is a dot");
    }

    #[test]
    fn names_that_grow_without_end_are_refused_by_the_rule() {
        let double = || Rename::parse("(.+)=>$1$1").unwrap();
        let rules: Vec<Rename> = (0..40).map(|_| double()).collect();
        let error = apply(&rules, "layers.0.w").unwrap_err().to_string();
        let expected = "layers.0.w: rename \"(.+)\" makes a name of 5120 bytes, at most 4096 are possible";
        assert_eq!(error, expected);
        // A rule with many matches stops at the first match that exceeds the limit.
        let rule = Rename::new("a", &"b".repeat(4096)).unwrap();
        let error = apply(&[rule], &"a".repeat(4000)).unwrap_err().to_string();
        assert!(error.ends_with(": rename \"a\" makes a name of 8192 bytes, at most 4096 are possible"), "{error}");
        assert!(Rename::new("a", &"b".repeat(4097)).unwrap_err().contains("at most 4096 bytes, found 4097"));
    }

    #[test]
    fn long_components_are_refused_by_the_rule_that_made_them() {
        let rules = ["x=>y", "w=>wwwwwwwwww", "w=>wwwwwwwwww", "w=>wwwwwwwwww", "0=>1"];
        let rules: Vec<Rename> = rules.iter().map(|rule| Rename::parse(rule).unwrap()).collect();
        let error = apply_to_path(&rules, "a.0.w", false).unwrap_err().to_string();
        assert_eq!(error, "a.0.w: rename \"w\" makes a file name of 1000 bytes, at most 255 are possible");
        let shorter = [rules.as_slice(), &[Rename::parse("w+=>w").unwrap()]].concat();
        assert_eq!(apply_to_path(&shorter, "a.0.w", false).as_deref(), Ok("a.1.w"));
        // Short words, but one file name in a flat layout.
        let dotted: Vec<Rename> = (0..30).map(|_| Rename::parse("^=>aaaaaaaaa.").unwrap()).collect();
        assert!(apply_to_path(&dotted, "w", false).is_ok());
        assert!(
            apply_to_path(&dotted, "w", true)
                .unwrap_err()
                .to_string()
                .contains("a file name of 301 bytes, at most 255")
        );
        // A name that no rule changes is not checked here.
        assert!(apply_to_path(&rules[..1], &"a".repeat(300), false).is_ok());
    }
}
