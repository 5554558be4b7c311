//! Settings as keyword arguments of Python: names of flags with underscores for dashes, and values of TOML's types.

use toml::de::DeValue;

use super::{
    table::{self, Arity, Group, SETTINGS, Setting, Settings},
    value::{KeyForm, Toml},
};

/// Why a keyword is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeywordError {
    /// Whether no setting has its name; else the setting does not accept the value.
    pub is_unknown: bool,
    /// The name, and the expected and the found value.
    pub text: String,
}

/// The settings that a program gives when it opens a checkpoint in process.
pub fn all() -> impl Iterator<Item = &'static Setting> + Clone {
    // It opens one checkpoint.
    SETTINGS.iter().filter(|row| Group::READERS.contains(&row.group) && !row.name.starts_with("steps"))
}

/// The settings of keywords.
///
/// # Errors
/// Every keyword that is unknown, or whose value is refused.
pub fn parse(keywords: impl IntoIterator<Item = (String, toml::Value)>) -> Result<Settings, Vec<KeywordError>> {
    let (mut settings, mut errors) = (Settings::default(), Vec::new());
    for (name, value) in keywords {
        match all().find(|row| row.option() == name).map(|row| read(row, &mut settings, &value)) {
            None => errors.push(KeywordError { is_unknown: true, text: unknown(&name) }),
            Some(Err(reason)) => errors.push(KeywordError { is_unknown: false, text: format!("{name}: {reason}") }),
            Some(Ok(())) => {}
        }
    }
    if errors.is_empty() { Ok(settings) } else { Err(errors) }
}

fn unknown(name: &str) -> String {
    if let Some(row) = SETTINGS.iter().find(|row| row.option() == name) {
        let what = match row.group {
            Group::Place => "an argument of its own",
            Group::Serve => "of servers only",
            Group::View | Group::Reading | Group::Mount | Group::Logging => "of mounts only",
        };
        return format!("the setting `{name}` is {what}");
    }
    table::unknown("setting", name, all().map(Setting::option))
}

fn read(row: &Setting, settings: &mut Settings, value: &toml::Value) -> Result<(), String> {
    // Without a value such a flag is `true`; there is no word for its absence.
    if matches!(row.arity, Arity::Optional(..)) && row.field.form == KeyForm::Word && value.as_bool() == Some(false) {
        return Ok(());
    }
    let text = value.to_string();
    let value: Toml<'_> = DeValue::parse(&text).map_err(|error| error.message().to_owned())?;
    (row.field.read)(settings, value).map_err(|fault| fault.reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dequantize, Devices};

    fn keywords(text: &str) -> Vec<(String, toml::Value)> {
        text.parse::<toml::Table>().unwrap().into_iter().collect()
    }

    #[test]
    fn keywords_have_values_of_the_types_of_files() {
        let settings = parse(keywords(
            "mesh = 'fsdp=4'\ndevices = '0,2-3'\ninclude = ['*wq*']\nunscanned = true\nallow_missing = true\nset = {a = 1}\n\
             cache_bytes = 1024\nsource_timeout = '5s'\ncast = [{match = '*norm*', dtype = 'f32'}]\ndequantize = true",
        ))
        .unwrap();
        assert_eq!(settings.view.mesh.unwrap().to_string(), "fsdp=4");
        assert_eq!(settings.view.devices, Some(Devices(vec![0, 2, 3])));
        assert_eq!((settings.view.include.len(), settings.view.cast.len()), (1, 1));
        assert_eq!(settings.view.unscanned, Some(true));
        assert_eq!(settings.mount.cache_bytes.unwrap().0, 1024);
        assert!(settings.view.allow_missing.unwrap().accepts("any"));
        assert!(matches!(settings.view.dequantize, Some(Dequantize::Own)));
    }

    #[test]
    fn all_refused_keywords_are_told_at_once() {
        let errors =
            parse(keywords("mehs = 'fsdp=4'\ndtype = 'b16'\nmkdir = true\nwhole = 'all'\nunscanned = 3")).unwrap_err();
        let texts: Vec<String> = errors.into_iter().map(|error| error.text).collect();
        let [dtype, mehs, mkdir, unscanned, whole] = &texts[..] else { panic!("{texts:?}") };
        assert!(mehs.contains("did you mean `mesh`"), "{mehs}");
        assert!(mkdir.contains("of mounts only"), "{mkdir}");
        assert!(whole.contains("materialize"), "{whole}");
        assert!(dtype.starts_with("dtype: ") && unscanned.starts_with("unscanned: "), "{texts:?}");
    }
}
