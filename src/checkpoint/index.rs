//! The index of a repository whose weights are in several files: `{"metadata": ..., "weight_map": {tensor: file}}`.

use std::{borrow::Cow, collections::HashMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

/// A parsed index; names borrow from its text where they have no escapes.
#[derive(Debug, Default)]
pub(super) struct Index<'a> {
    /// Weight files in the order of their first appearance. The caller sorts them naturally.
    pub(super) files: Vec<String>,
    /// Tensor names, each with the index of its file in `files`, in the order of the text.
    pub(super) tensors: Vec<(Cow<'a, str>, u32)>,
    pub(super) metadata: Option<serde_json::Value>,
}

impl<'a> Index<'a> {
    /// Parses the text of an index.
    pub(super) fn parse(text: &'a [u8]) -> Result<Self, serde_json::Error> {
        let raw: RawIndex<'a> = serde_json::from_slice(text)?;
        Ok(Self { metadata: raw.metadata, ..raw.weight_map })
    }
}

/// Whether a path of an index stays inside the repository: relative, of plain components only.
pub(super) fn stays_inside(path: &str) -> bool {
    !path.contains('\0') && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

#[derive(Deserialize)]
struct RawIndex<'a> {
    #[serde(default)]
    metadata: Option<serde_json::Value>,
    #[serde(borrow)]
    weight_map: Index<'a>,
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Index<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Index<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index<'de>, A::Error> {
                let mut index = Index::default();
                let mut places: HashMap<String, u32> = HashMap::new();
                let mut last = 0;
                while let Some((Text(name), Text(file))) = map.next_entry::<Text<'de>, Text<'de>>()? {
                    // Neighbours are usually in the same file.
                    if index.files.get(last as usize).map(String::as_str) != Some(&*file) {
                        let next = u32::try_from(index.files.len()).map_err(serde::de::Error::custom)?;
                        last = *places.entry(file.clone().into_owned()).or_insert(next);
                        if last == next {
                            index.files.push(file.into_owned());
                        }
                    }
                    index.tensors.push((name, last));
                }
                Ok(index)
            }
        }
        deserializer.deserialize_map(Visit)
    }
}
