//! Signatures of version 4, in a header or in the query, compared with the secret of the one key that there is.

use std::{
    fmt::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ckfs_source::{calendar::utc, digest::hexadecimal};
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, Method, header::AUTHORIZATION};
use percent_encoding::percent_decode_str;
use sha2::{Digest, Sha256};

use super::super::path;

/// The one bucket; also the access key.
pub(super) const BUCKET: &str = "ckfs";

/// The only algorithm.
const ALGORITHM: &str = "AWS4-HMAC-SHA256";

/// By how much clocks may differ.
const SKEW: Duration = Duration::from_mins(15);

/// Longest life of a signature in a query, as with S3.
const EXPIRES_MAX: Duration = Duration::from_hours(7 * 24);

/// Why a request counts as not signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadSignature {
    /// There is none.
    Absent,
    /// It is none of version 4.
    Malformed,
    /// It is one of version 2.
    Former,
    /// Of another key.
    Key,
    /// Too old, or of the future.
    Time,
    /// Of another secret, or of another request.
    Wrong,
}

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

/// What is signed of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct SignedRequest<'a> {
    pub(super) method: &'a Method,
    /// The path as it was sent.
    pub(super) path: &'a str,
    pub(super) query: &'a Parameters,
    pub(super) headers: &'a HeaderMap,
}

/// The parts of a signature.
#[derive(Debug)]
struct SignatureParts<'a> {
    credential: &'a str,
    signed_headers: &'a str,
    signature: &'a str,
    date: &'a str,
    /// Its life, if it is in the query.
    expires: Option<Duration>,
}

impl SignedRequest<'_> {
    /// Compares the signature with the one that the secret gives.
    ///
    /// # Errors
    /// [`BadSignature`].
    pub(super) fn check(&self, secret: &str, now: SystemTime) -> Result<(), BadSignature> {
        let parts = self.parts()?;
        let mut credential = parts.credential.split('/');
        let mut next = || credential.next().ok_or(BadSignature::Malformed);
        let (key, day, region, service, end) = (next()?, next()?, next()?, next()?, next()?);
        if (service, end) != ("s3", "aws4_request") || !parts.date.starts_with(day) || day.len() != 8 {
            return Err(BadSignature::Malformed);
        }
        if key != BUCKET {
            return Err(BadSignature::Key);
        }
        let earliest = now.checked_sub(parts.expires.unwrap_or(SKEW)).unwrap_or(UNIX_EPOCH);
        if parts.date < compact(earliest).as_str() || parts.date > compact(now + SKEW).as_str() {
            return Err(BadSignature::Time);
        }
        let scope = format!("{day}/{region}/{service}/{end}");
        let canonical = hexadecimal(&Sha256::digest(self.canonical(&parts)?.as_bytes()));
        let text = format!("{ALGORITHM}\n{}\n{scope}\n{canonical}", parts.date);
        let mut signing = keyed(format!("AWS4{secret}").as_bytes(), day);
        for part in [region, service, end] {
            signing = keyed(&signing, part);
        }
        let expected = hexadecimal(&keyed(&signing, &text));
        // Digests are compared, so that the time shows nothing of where they differ.
        let is_same = Sha256::digest(expected.as_bytes()) == Sha256::digest(parts.signature.as_bytes());
        if is_same { Ok(()) } else { Err(BadSignature::Wrong) }
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    fn parts(&self) -> Result<SignatureParts<'_>, BadSignature> {
        if let Some(value) = self.headers.get(AUTHORIZATION) {
            let text = value.to_str().map_err(|_| BadSignature::Malformed)?;
            if text.starts_with("AWS ") {
                return Err(BadSignature::Former);
            }
            let fields = text.strip_prefix(ALGORITHM).ok_or(BadSignature::Malformed)?;
            let field = |name: &str| {
                let mut all = fields.split(',').map(str::trim);
                all.find_map(|field| field.strip_prefix(name)?.strip_prefix('=')).ok_or(BadSignature::Malformed)
            };
            return Ok(SignatureParts {
                credential: field("Credential")?,
                signed_headers: field("SignedHeaders")?,
                signature: field("Signature")?,
                date: self.header("x-amz-date").ok_or(BadSignature::Malformed)?,
                expires: None,
            });
        }
        if self.query.value("X-Amz-Signature").is_none() {
            let is_former = self.query.value("AWSAccessKeyId").is_some() && self.query.value("Signature").is_some();
            return Err(if is_former { BadSignature::Former } else { BadSignature::Absent });
        }
        let needed = |name: &str| self.query.value(name).ok_or(BadSignature::Malformed);
        let seconds = needed("X-Amz-Expires")?.parse().map_err(|_| BadSignature::Malformed)?;
        let expires = Duration::from_secs(seconds);
        if needed("X-Amz-Algorithm")? != ALGORITHM || expires > EXPIRES_MAX {
            return Err(BadSignature::Malformed);
        }
        Ok(SignatureParts {
            credential: needed("X-Amz-Credential")?,
            signed_headers: needed("X-Amz-SignedHeaders")?,
            signature: needed("X-Amz-Signature")?,
            date: needed("X-Amz-Date")?,
            expires: Some(expires),
        })
    }

    /// The request in the one form that is signed.
    fn canonical(&self, parts: &SignatureParts<'_>) -> Result<String, BadSignature> {
        let names = self.path.split('/').map(|name| percent_decode_str(name).decode_utf8_lossy());
        let path = names.map(|name| encoded_whole(&name)).collect::<Vec<_>>().join("/");
        let mut query: Vec<(String, String)> = self
            .query
            .0
            .iter()
            .filter(|(name, _)| name != "X-Amz-Signature")
            .map(|(name, value)| (encoded_whole(name), encoded_whole(value)))
            .collect();
        query.sort();
        let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={value}")).collect();
        // Otherwise the signature would be as good for another server.
        if !parts.signed_headers.split(';').any(|name| name == "host") {
            return Err(BadSignature::Malformed);
        }
        let mut headers = String::new();
        for name in parts.signed_headers.split(';') {
            let values: Option<Vec<String>> = self
                .headers
                .get_all(name)
                .iter()
                .map(|value| Some(value.to_str().ok()?.split_whitespace().collect::<Vec<_>>().join(" ")))
                .collect();
            let values = values.ok_or(BadSignature::Malformed)?;
            // Writing to a text never fails.
            let _ = writeln!(headers, "{name}:{}", values.join(","));
        }
        let payload = match parts.expires {
            None => self.header("x-amz-content-sha256").ok_or(BadSignature::Malformed)?,
            Some(_) => self.query.value("X-Amz-Content-Sha256").unwrap_or("UNSIGNED-PAYLOAD"),
        };
        let (method, query, signed) = (self.method, query.join("&"), parts.signed_headers);
        Ok(format!("{method}\n{path}\n{query}\n{headers}\n{signed}\n{payload}"))
    }
}

/// A text with everything escaped that is no letter, digit, `-`, `_`, `.` or `~`.
fn encoded_whole(text: &str) -> String {
    text.split('/').map(path::encoded).collect::<Vec<_>>().join("%2F")
}

fn keyed(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

/// A time as signatures have it, `20260102T030405Z`: texts are in the order of the times.
fn compact(time: SystemTime) -> String {
    utc(time).replace(['-', ':'], "")
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

    /// The example of the documentation of S3 ("GET Object"), with its own key and secret.
    #[test]
    fn the_signature_of_a_published_example_is_made() {
        let date = "20130524T000000Z";
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let headers: HeaderMap = [
            ("host", "examplebucket.s3.amazonaws.com"),
            ("range", "bytes=0-9"),
            ("x-amz-content-sha256", empty),
            ("x-amz-date", date),
        ]
        .into_iter()
        .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
        .collect();
        let request = SignedRequest {
            method: &Method::GET,
            path: "/test.txt",
            query: &Parameters(Vec::new()),
            headers: &headers,
        };
        let parts = SignatureParts {
            credential: "",
            signed_headers: "host;range;x-amz-content-sha256;x-amz-date",
            signature: "",
            date,
            expires: None,
        };
        let canonical = request.canonical(&parts).unwrap();
        assert_eq!(
            hexadecimal(&Sha256::digest(canonical.as_bytes())),
            "7344ae5b7ee6c3e7e6b0fe0640412a37625d1fbfff95c48bbb2dc43964946972"
        );
    }

    fn signed(secret: &str, date: &str, key: &str, path: &str) -> HeaderMap {
        let day = &date[..8];
        let mut headers: HeaderMap =
            [("host", "h:1"), ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"), ("x-amz-date", date)]
                .into_iter()
                .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
                .collect();
        let names = "host;x-amz-content-sha256;x-amz-date";
        let request = SignedRequest { method: &Method::GET, path, query: &Parameters(Vec::new()), headers: &headers };
        let parts = SignatureParts { credential: "", signed_headers: names, signature: "", date, expires: None };
        let canonical = hexadecimal(&Sha256::digest(request.canonical(&parts).unwrap().as_bytes()));
        let text = format!("{ALGORITHM}\n{date}\n{day}/r/s3/aws4_request\n{canonical}");
        let signing = ["r", "s3", "aws4_request"]
            .iter()
            .fold(keyed(format!("AWS4{secret}").as_bytes(), day), |key, part| keyed(&key, part));
        let signature = hexadecimal(&keyed(&signing, &text));
        let value = format!(
            "{ALGORITHM} Credential={key}/{day}/r/s3/aws4_request, SignedHeaders={names}, Signature={signature}"
        );
        headers.insert(AUTHORIZATION, value.parse().unwrap());
        headers
    }

    #[test]
    fn only_the_right_secret_key_time_and_request_count() {
        let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let date = compact(now);
        let path = "/ckfs/a%20b/c";
        let check = |headers: &HeaderMap, path: &str, now: SystemTime| {
            SignedRequest { method: &Method::GET, path, query: &Parameters(Vec::new()), headers }.check("secret", now)
        };
        let good = signed("secret", &date, BUCKET, path);
        assert_eq!(check(&good, path, now), Ok(()));
        assert_eq!(check(&good, "/ckfs/other", now), Err(BadSignature::Wrong));
        assert_eq!(check(&signed("wrong", &date, BUCKET, path), path, now), Err(BadSignature::Wrong));
        assert_eq!(check(&signed("secret", &date, "other", path), path, now), Err(BadSignature::Key));
        let hour = Duration::from_hours(1);
        for other in [now + hour, now - hour] {
            assert_eq!(check(&good, path, other), Err(BadSignature::Time));
        }
        assert_eq!(check(&HeaderMap::new(), path, now), Err(BadSignature::Absent));
        for text in ["", "Bearer secret", "AWS4-HMAC-SHA256", "AWS4-HMAC-SHA256 Credential=ckfs"] {
            let mut headers = good.clone();
            headers.insert(AUTHORIZATION, text.parse().unwrap());
            assert_eq!(check(&headers, path, now), Err(BadSignature::Malformed), "{text}");
        }
        let mut former = good.clone();
        former.insert(AUTHORIZATION, "AWS secret:x".parse().unwrap());
        assert_eq!(check(&former, path, now), Err(BadSignature::Former));
        let query = ["AWSAccessKeyId", "Signature", "Expires"].map(|name| (name.to_owned(), "1".to_owned()));
        let query = Parameters(query.into());
        let presigned = SignedRequest { method: &Method::GET, path, query: &query, headers: &HeaderMap::new() };
        assert_eq!(presigned.check("secret", now), Err(BadSignature::Former));
        let mut changed = good.clone();
        changed.insert("host", "other:1".parse().unwrap());
        assert_eq!(check(&changed, path, now), Err(BadSignature::Wrong));
    }
}
