//! The query of a request.

use percent_encoding::percent_decode_str;

/// Parameters of a query, decoded once; `+` is itself, as clients of S3 write it.
#[derive(Debug)]
pub(super) struct Parameters(pub(super) Vec<(String, String)>);

impl Parameters {
    pub(super) fn of(query: &str) -> Self {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(value))
        };
        Self(pairs.map(pair).collect())
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_once() {
        let Parameters(found) = Parameters::of("list-type=2&prefix=a%2Fb+c%2520&location&=x&&y=");
        let expected = [("list-type", "2"), ("prefix", "a/b+c%20"), ("location", ""), ("", "x"), ("y", "")];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
