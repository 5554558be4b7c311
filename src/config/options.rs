//! Options of mount(8), `-o NAME=VALUE`: flags with underscores for dashes.

use super::{
    near::did_you_mean,
    setting::{Arity, Setting},
    settings::Settings,
    table::{SETTINGS, former},
};

/// The setting that an option names, and its value as a word.
fn find<'a>(name: &str, value: Option<&'a str>) -> Result<(&'static Setting, &'a str), String> {
    let known = || SETTINGS.iter().filter(|row| row.is_option());
    let Some(row) = known().find(|row| row.option() == name) else {
        if let Some(now) = former(name) {
            return Err(format!("option {now}"));
        }
        let names: Vec<String> = known().map(Setting::option).collect();
        let near = did_you_mean("option", name, names.iter().map(String::as_str));
        return Err(near.unwrap_or_else(|| format!("unknown option {name:?}; there are: {}", names.join(", "))));
    };
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

/// The setting that an option names.
///
/// # Errors
/// The list of names, or that a value is missing or superfluous.
pub fn setting_of(name: &str, value: Option<&str>) -> Result<&'static Setting, String> {
    find(name, value).map(|(row, _)| row)
}

/// An option as a flag.
///
/// # Errors
/// As [`setting_of`].
pub fn flag_of(name: &str, value: Option<&str>) -> Result<String, String> {
    let (row, _) = find(name, value)?;
    Ok(value.map_or_else(|| format!("--{}", row.name), |value| format!("--{}={value}", row.name)))
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
