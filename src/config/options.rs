//! Options of mount(8), `-o NAME=VALUE`: flags with underscores for dashes. And attributes of volumes: keys of the file, all of them words.

use super::table::{Arity, Group, SETTINGS, Setting, SettingScope, Settings, former, unknown};

/// The setting that an option names, and its value as a word.
fn find<'a>(name: &str, value: Option<&'a str>) -> Result<(&'static Setting, &'a str), String> {
    let known = || SETTINGS.iter().filter(|row| row.is_option());
    let row = known().find(|row| row.option() == name);
    let row = row.ok_or_else(|| unknown("option", name, known().map(Setting::option)))?;
    match (row.arity, value) {
        (Arity::Required(_) | Arity::Optional(..), Some(value)) => Ok((row, value)),
        (Arity::Flag(word) | Arity::Optional(_, word), None) => Ok((row, word)),
        (Arity::Flag(_), Some(value)) => Err(format!("option {name}: expected no value, found {value:?}")),
        (Arity::Required(_), None) => Err(format!("option {name}: expected {name}=VALUE")),
    }
}

/// What is wrong if a value with commas was taken for several options, as `mesh=fsdp=4,tensor=2` is.
///
/// # Errors
/// The option as it must be written.
pub fn check_commas(options: &[(String, Option<String>)]) -> Result<(), String> {
    let is_known = |(name, _): &(String, Option<String>)| {
        former(name).is_some() || SETTINGS.iter().any(|row| row.is_option() && row.option() == *name)
    };
    let Some(at) = options.iter().position(|option| !is_known(option)) else { return Ok(()) };
    let Some((list, Some(first))) = options[..at].last() else { return Ok(()) };
    let pieces = || options[at..].iter().take_while(|option| !is_known(option));
    let is_axis = |(_, size): &(String, Option<String>)| size.as_ref().is_some_and(|size| size.parse::<u64>().is_ok());
    let is_number = |(name, _): &(String, Option<String>)| name.starts_with(|first: char| first.is_ascii_digit());
    let (separator, written) = match list.as_str() {
        "mesh" if pieces().all(is_axis) => (":", ", in a mesh also \":\""),
        "devices" if pieces().all(is_number) => ("\\,", ""),
        _ => return Ok(()),
    };
    let pieces: Vec<String> = pieces()
        .map(|(name, value)| value.iter().fold(name.clone(), |name, value| format!("{name}={value}")))
        .collect();
    let whole = [&[first.clone()][..], &pieces].concat().join(separator);
    Err(format!("{:?} is no option: inside a value a comma is written \\,{written}: {list}={whole}", pieces.join(",")))
}

/// An option as a flag, and the group of its setting.
///
/// # Errors
/// The list of names, or that a value is missing or superfluous.
pub fn flag_of(name: &str, value: Option<&str>) -> Result<(Group, String), String> {
    let (row, _) = find(name, value)?;
    let flag = value.map_or_else(|| format!("--{}", row.name), |value| format!("--{}={value}", row.name));
    Ok((row.group, flag))
}

/// The settings of options.
///
/// # Errors
/// The first option that is unknown, malformed, or given twice without being repeatable.
pub fn parse<'a>(options: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> Result<Settings, String> {
    let mut settings = Settings::default();
    let mut seen: Vec<&str> = Vec::new();
    for (name, value) in options {
        let (row, word) = find(name, value)?;
        if !row.repeats() && seen.contains(&row.name) {
            return Err(format!("the argument '{}' cannot be used multiple times", row.usage()));
        }
        seen.push(row.name);
        (row.field.add)(&mut settings, word.as_ref())
            .map_err(|reason| format!("invalid value '{word}' for '{}': {reason}", row.usage()))?;
    }
    Ok(settings)
}

/// What a node plugin decides for all its volumes, or must leave to nobody: `on-step` is a command.
const OF_THE_NODE: [&str; 7] = ["mountpoint", "mkdir", "on-step", "allow-other", "keeper", "cache-dir", "log-file"];

/// The settings of a volume's attributes: keys of the file, or names of flags, with values as flags have them. A flag without a value is
/// `true`; a setting that may be repeated has a line for each value. `check` may refuse a value.
///
/// # Errors
/// The first attribute that is unknown, malformed, refused, or no matter of a volume.
pub fn of_attributes<'a>(
    attributes: impl IntoIterator<Item = (&'a str, &'a str)>,
    check: impl Fn(&Setting, &str) -> Result<(), String>,
) -> Result<Settings, String> {
    let known = || {
        SETTINGS.iter().filter(|row| {
            (row.is_option() && row.scope != SettingScope::None || row.name == "source")
                && row.group != Group::Logging
                && !OF_THE_NODE.contains(&row.name)
        })
    };
    let mut settings = Settings::default();
    for (name, value) in attributes {
        let is_named = |row: &&Setting| [row.toml_key(), row.option(), row.name.to_owned()].iter().any(|of| of == name);
        let Some(row) = known().find(is_named) else {
            return Err(match SETTINGS.iter().find(is_named) {
                Some(row) if row.is_flag => format!("{name}: is no setting of a volume; the node decides it"),
                Some(_) => format!("{name}: only in a configuration file"),
                None => unknown("attribute", name, known().map(Setting::toml_key)),
            });
        };
        let words: Vec<&str> = match (row.arity, value) {
            (Arity::Flag(word) | Arity::Optional(_, word), "true") => vec![word],
            (Arity::Flag(_) | Arity::Optional(..), "false") => vec![],
            (Arity::Flag(_), _) => return Err(format!("{name}: expected true or false, found {value:?}")),
            (Arity::Required(_) | Arity::Optional(..), _) if row.repeats() => {
                value.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
            }
            (Arity::Required(_) | Arity::Optional(..), _) => vec![value],
        };
        for word in words {
            check(row, word)
                .and_then(|()| (row.field.add)(&mut settings, word.as_ref()))
                .map_err(|reason| format!("invalid value {word:?} of attribute {name}: {reason}"))?;
        }
    }
    Ok(settings)
}

/// Whether the value of a setting may name a file or a directory.
pub fn names_paths(setting: &Setting) -> bool {
    let form = match setting.arity {
        Arity::Flag(_) => "",
        Arity::Required(form) | Arity::Optional(form, _) => form,
    };
    ["source", "average"].contains(&setting.name)
        || ["FILE", "DIR", "SOURCE", "MODEL"].iter().any(|of| form.contains(of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_keys_with_words() {
        let of = |pairs: &[(&'static str, &'static str)]| of_attributes(pairs.iter().copied(), |_, _| Ok(()));
        let found = of(&[
            ("source", "org/name"),
            ("mesh", "fsdp=2"),
            ("even", "true"),
            ("unscanned", "false"),
            ("grace_seconds", "5"),
            ("include", "a*\n b*\n"),
            ("allow_missing", "true"),
        ])
        .unwrap();
        let given: Vec<_> = found.given().map(|row| row.name).collect();
        assert_eq!(found.source.as_deref(), Some("org/name"));
        assert_eq!(found.view.include.len(), 2);
        for name in ["mesh", "even", "grace", "include", "allow-missing"] {
            assert!(given.contains(&name), "{name}: {given:?}");
        }
        assert!(!given.contains(&"unscanned"));
        for (name, value, reason) in [
            ("dtpye", "bf16", "did you mean `dtype`"),
            ("even", "yes", "expected true or false"),
            ("dtype", "f17", "invalid value"),
            ("on_step", "sh", "the node decides it"),
            ("allow_other", "true", "the node decides it"),
            ("shard_rules", "x", "only in a configuration file"),
            ("listen", "1", "the node decides it"),
        ] {
            let error = of(&[(name, value)]).unwrap_err();
            assert!(error.contains(reason), "{name}: {error}");
        }
        let refused = of_attributes([("source", "/etc")], |row, _| Err(format!("{}", names_paths(row)))).unwrap_err();
        assert!(refused.ends_with("attribute source: true"), "{refused}");
        let paths: Vec<_> = SETTINGS.iter().filter(|row| names_paths(row)).map(|row| row.name).collect();
        for name in
            ["layout", "shard", "lora", "merge-lora", "config-from", "fill-from", "base", "materialize", "average"]
        {
            assert!(paths.contains(&name), "{name}: {paths:?}");
        }
    }
}
