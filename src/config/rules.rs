//! Rules by pattern, which only a file can hold: tables with `match` and the value for the names that match.

use ckfs_tensor::DType;
use serde::{Deserialize, Deserializer, Serialize, de::Error};

use super::{
    pattern::Pattern,
    rename::{Rename, Text},
    value::{Fault, KeyForm, SettingValue, Toml, array, deserialize, read_as},
    value_types::DtypeChoice,
};

/// The dtype of the tensors that match a pattern.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CastRule {
    /// Matched against the name in the repository and the names in the mount.
    #[serde(rename = "match")]
    pub pattern: Pattern,
    /// The dtype; `None` passes the tensor through.
    #[serde(deserialize_with = "dtype")]
    pub dtype: Option<DType>,
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DType>, D::Error> {
    DtypeChoice::from_word(&String::deserialize(deserializer)?).map(|choice| choice.0).map_err(D::Error::custom)
}

/// The spec of the tensors that match a pattern.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRule {
    /// Matched against the name in the mount.
    #[serde(rename = "match")]
    pub pattern: Pattern,
    /// Per tensor axis, names of the mesh axes that split it, the first outermost. Missing axes are not split. A name
    /// that the mesh does not have is ignored, so that one set of rules serves several meshes.
    #[serde(deserialize_with = "spec")]
    pub spec: Vec<Vec<String>>,
}

/// The mesh axes for one axis of a tensor, as written.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected for each axis \"-\", a mesh axis, or a list of mesh axes")]
enum AxisWord {
    /// One mesh axis; `-` or nothing for none.
    One(String),
    /// Several, the first outermost.
    Several(Vec<String>),
}

/// The mesh axes for the axes of a tensor, as written.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list with \"-\", a mesh axis or a list of mesh axes for each axis, as in [\"fsdp\", \"-\"]"
)]
enum AxisWords {
    First(String),
    All(Vec<AxisWord>),
}

fn spec<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Vec<String>>, D::Error> {
    let names = |word| match word {
        AxisWord::One(name) if name.is_empty() || name == "-" => Vec::new(),
        AxisWord::One(name) => vec![name],
        AxisWord::Several(names) => names,
    };
    // One word is that of the first axis.
    Ok(match AxisWords::deserialize(deserializer)? {
        AxisWords::First(word) => vec![names(AxisWord::One(word))],
        AxisWords::All(words) => words.into_iter().map(names).collect(),
    })
}

/// Which mesh axes split a logical axis, the first outermost.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LogicalRule {
    /// The logical axis.
    pub logical: String,
    /// Names of mesh axes. An empty list leaves the axis whole and keeps later rules from it.
    pub mesh: Vec<String>,
}

pub(super) fn table<const N: usize>(rows: [(&str, toml::Value); N]) -> toml::Value {
    toml::Value::Table(rows.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

impl SettingValue for CastRule {
    const SEVERAL: KeyForm = KeyForm::Rules;

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(table([("match", self.pattern.text().into()), ("dtype", DtypeChoice(self.dtype).to_toml()?)]))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        deserialize(value)
    }
}

impl SettingValue for ShardRule {
    const SEVERAL: KeyForm = KeyForm::Rules;

    fn to_toml(&self) -> Result<toml::Value, String> {
        let axis = |names: &Vec<String>| match &names[..] {
            [] => Ok("-".into()),
            [name] => name.to_toml(),
            names => array(names),
        };
        let spec = self.spec.iter().map(axis).collect::<Result<_, _>>()?;
        Ok(table([("match", self.pattern.text().into()), ("spec", toml::Value::Array(spec))]))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        deserialize(value)
    }
}

impl SettingValue for LogicalRule {
    const SEVERAL: KeyForm = KeyForm::Rules;

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(table([("logical", self.logical.as_str().into()), ("mesh", array(&self.mesh)?)]))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        deserialize(value)
    }
}

impl SettingValue for Rename {
    const SEVERAL: KeyForm = KeyForm::Rules;

    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(match self.text() {
            Text::Rule(pattern, to) => table([("match", pattern.as_str().into()), ("to", to.as_str().into())]),
            Text::Mapping(text) => table([("mapping", text.as_str().into())]),
        })
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Keys {
            #[serde(rename = "match")]
            pattern: Option<String>,
            to: Option<String>,
            mapping: Option<String>,
        }
        read_as(value, |keys: Keys| match (keys.pattern, keys.to, keys.mapping) {
            (Some(pattern), Some(to), None) => Self::new(&pattern, &to),
            (None, None, Some(text)) => Self::mapping(&text),
            _ => Err("expected `match` and `to`, or `mapping`".to_owned()),
        })
    }
}
