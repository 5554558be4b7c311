//! The index of a repository whose weights are in several files: `{"metadata": ..., "weight_map": {tensor: file}}`.

use std::{borrow::Cow, fmt};

use hashbrown::HashMap;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, json};

use super::super::json;

/// A parsed index; names borrow from its text where they have no escapes.
#[derive(Debug, Default)]
pub(crate) struct Index<'a> {
    /// Weight files in the order of their first appearance. The caller sorts them naturally.
    pub(crate) files: Vec<String>,
    /// Tensor names, each with the index of its file in `files`, in the order of the text.
    pub(crate) tensors: Vec<(Cow<'a, str>, u32)>,
    pub(crate) metadata: Option<serde_json::Value>,
}

impl<'a> Index<'a> {
    /// Parses the text of an index.
    pub(crate) fn parse(text: &'a [u8]) -> Result<Self, serde_json::Error> {
        let raw: RawIndex<'a> = ckfs_format::json::parse(text, ckfs_format::json::JsonForm::Tree)?;
        Ok(Self { metadata: raw.metadata, ..raw.weight_map })
    }
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

/// The text of an index with other tensors: `weight_map` tells the file of each, `total_bytes` their size together. Names that the
/// index has keep their places, and new ones follow; other members stay as they are. `None` if it is no index.
///
/// # Errors
/// The first violation of JSON's syntax.
pub fn rewritten_index(
    text: &[u8],
    weight_map: &[(&str, &str)],
    total_bytes: u64,
) -> Result<Option<Vec<u8>>, serde_json::Error> {
    let text = json::standard(text);
    if text.trim_ascii_start().first() != Some(&b'{') {
        return Ok(None);
    }
    let mut index: Value = serde_json::from_slice(&text)?;
    if let Some(metadata) = index.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("total_size".to_owned(), json!(total_bytes));
    }
    let Some(files) = index.get_mut("weight_map").and_then(Value::as_object_mut) else { return Ok(None) };
    let mut left: HashMap<&str, &str> = weight_map.iter().copied().collect();
    let mut rows: Vec<_> = files.keys().filter_map(|name| left.remove_entry(name.as_str())).collect();
    rows.extend(weight_map.iter().filter(|(name, _)| left.contains_key(name)));
    *files = rows.into_iter().map(|(name, file)| (name.to_owned(), file.into())).collect();
    Ok(Some(json::pretty(&index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rewritten_index_keeps_the_order_of_names_and_other_members() {
        let text = br#"{"note": [1e400000, NaN], "weight_map": {"b": "1", "a": "1", "gone": "2"}, "metadata": {"total_size": 1, "x": 2}}"#;
        assert!(rewritten_index(text, &[], 0).is_err(), "a number that no double holds");
        let text = br#"{"note": [NaN], "weight_map": {"b": "1", "a": "1", "gone": "2"}, "metadata": {"total_size": 1, "x": 2}}"#;
        let rows = [("new", "3"), ("a", "3"), ("b", "1")];
        let found = String::from_utf8(rewritten_index(text, &rows, 7).unwrap().unwrap()).unwrap();
        let compact: String = found.split_whitespace().collect();
        assert_eq!(
            compact,
            r#"{"note":[NaN],"weight_map":{"b":"1","a":"3","new":"3"},"metadata":{"total_size":7,"x":2}}"#
        );
        for other in [&b"[1]"[..], br#"{"weight_map": []}"#, br#"{"weights": {}}"#] {
            assert_eq!(rewritten_index(other, &rows, 7).unwrap(), None);
        }
    }
}
