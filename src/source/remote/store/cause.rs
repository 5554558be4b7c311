//! The causes of a client's errors, in words that hold no address: it may be signed.

/// The innermost causes of an error, without addresses: they may be signed.
pub(super) fn cause(error: &dyn std::error::Error) -> String {
    let mut all: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let text = error.to_string();
        // An outer error repeats the inner ones, after words of its own that may hold an address.
        if next.is_none() || !text.contains("://") && !text.contains('?') {
            all.push(text);
        }
    }
    let text = all.pop().unwrap_or_default();
    let without_query = |word: &str| word.split('?').next().unwrap_or_default().to_owned();
    text.split(' ').map(without_query).collect::<Vec<_>>().join(" ")
}

/// An error with its innermost cause.
pub(super) fn with_cause(error: &object_store::Error) -> String {
    let (text, cause) = (error.to_string(), cause(error));
    if text.contains(&cause) { text } else { format!("{text}: {cause}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_hold_no_signature() {
        let error = std::io::Error::other("GET https://h/k?X-Amz-Signature=secret failed");
        assert_eq!(cause(&error), "GET https://h/k failed");
    }
}
