//! What a request asks of the bucket or of an object beside its bytes: answered as S3 does for a bucket that is read-only and has
//! neither versions nor settings. A name that is not here is no such question: S3 passes over it as well.

use http::{HeaderMap, StatusCode, header::RANGE};

use super::{super::answer::Reply, signature::Parameters, xml};

/// How such a question is answered.
#[derive(Clone, Copy)]
enum SubAnswer {
    /// With this document: the name of its root, and what is in it.
    Document(&'static str, &'static str),
    /// There is none: the code, and what is missing.
    Absent(&'static str, &'static str),
    /// An object, or a bucket, cannot be asked this by GET.
    WrongMethod,
    /// S3 has an answer, and this server has not.
    Unknown,
}

use SubAnswer::{Absent, Document, Unknown, WrongMethod};

const OF_BUCKET: [(&str, SubAnswer); 24] = [
    ("accelerate", Document("AccelerateConfiguration", "")),
    ("acl", Unknown),
    ("analytics", Unknown),
    ("cors", Absent("NoSuchCORSConfiguration", "no CORS configuration")),
    ("encryption", Absent("ServerSideEncryptionConfigurationNotFoundError", "no encryption")),
    ("intelligent-tiering", Unknown),
    ("inventory", Unknown),
    ("lifecycle", Absent("NoSuchLifecycleConfiguration", "no lifecycle configuration")),
    ("location", Document("LocationConstraint", "")),
    ("logging", Document("BucketLoggingStatus", "")),
    ("metrics", Unknown),
    ("notification", Document("NotificationConfiguration", "")),
    ("object-lock", Absent("ObjectLockConfigurationNotFoundError", "no object lock")),
    ("ownershipControls", Absent("OwnershipControlsNotFoundError", "no ownership controls")),
    ("policy", Absent("NoSuchBucketPolicy", "no bucket policy")),
    ("policyStatus", Absent("NoSuchBucketPolicy", "no bucket policy")),
    ("publicAccessBlock", Absent("NoSuchPublicAccessBlockConfiguration", "no public access block")),
    ("replication", Absent("ReplicationConfigurationNotFoundError", "no replication")),
    ("requestPayment", Document("RequestPaymentConfiguration", "<Payer>BucketOwner</Payer>")),
    ("session", Unknown),
    ("tagging", Absent("NoSuchTagSet", "no tags")),
    ("uploads", Document("ListMultipartUploadsResult", "<Bucket>ckfs</Bucket><IsTruncated>false</IsTruncated>")),
    ("versioning", Document("VersioningConfiguration", "")),
    ("website", Absent("NoSuchWebsiteConfiguration", "no website")),
];

const OF_OBJECT: [(&str, SubAnswer); 9] = [
    ("acl", Unknown),
    ("legal-hold", Absent("NoSuchObjectLockConfiguration", "no legal hold")),
    ("restore", WrongMethod),
    ("retention", Absent("NoSuchObjectLockConfiguration", "no retention")),
    ("select", WrongMethod),
    ("tagging", Absent("NoSuchTagSet", "no tags")),
    ("torrent", WrongMethod),
    ("uploadId", Absent("NoSuchUpload", "no upload: the bucket is read-only")),
    ("uploads", WrongMethod),
];

impl SubAnswer {
    fn reply(self, name: &str, path: &str) -> Reply {
        match self {
            Document(root, inner) => xml::of_root(root, inner),
            Absent(code, what) => xml::error(StatusCode::NOT_FOUND, code, &format!("there is {what}"), path),
            WrongMethod => {
                let text = format!("{name} is asked by no GET");
                xml::error(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", &text, path)
            }
            Unknown => {
                xml::error(StatusCode::NOT_IMPLEMENTED, "NotImplemented", &format!("{name} is not answered"), path)
            }
        }
    }
}

fn find(table: &[(&str, SubAnswer)], query: &Parameters, path: &str) -> Option<Reply> {
    let mut asked = query.0.iter().filter_map(|(name, _)| table.iter().find(|(known, _)| known == name));
    asked.next().map(|(name, answer)| answer.reply(name, path))
}

/// The answer to what is asked of the bucket, if it is anything but a list.
pub(super) fn of_bucket(query: &Parameters, path: &str) -> Option<Reply> {
    find(&OF_BUCKET, query, path)
}

/// What is asked of an object.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ObjectQuestion {
    /// Its bytes.
    Bytes,
    /// The only part that it was uploaded in, which is all of it.
    FirstPart,
    /// These of its attributes.
    Attributes(Vec<&'static str>),
}

/// The attributes that can be asked for. An object that was uploaded in one part has no checksum and no list of parts.
const ATTRIBUTES: [&str; 5] = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"];

/// The attributes that a request names.
fn attributes(headers: &HeaderMap) -> Result<Vec<&'static str>, String> {
    let values = headers.get_all("x-amz-object-attributes").iter().filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty());
    let known = |name: &str| ATTRIBUTES.into_iter().find(|known| *known == name).ok_or(name.to_owned());
    names.map(known).collect()
}

/// What is asked of an object that is there.
///
/// # Errors
/// The answer, if it is about neither its bytes nor its attributes.
pub(super) fn of_object(query: &Parameters, headers: &HeaderMap, key: &str) -> Result<ObjectQuestion, Reply> {
    let invalid = |code: &str, text: &str| Err(xml::error(StatusCode::BAD_REQUEST, code, text, key));
    match query.value("versionId") {
        // An object of a bucket without versions has this one.
        None | Some("null") => {}
        Some("") => return invalid("InvalidArgument", "versionId: expected null: the bucket has no versions"),
        Some(_) => {
            let text = "there is no such version: the bucket has no versions";
            return Err(xml::error(StatusCode::NOT_FOUND, "NoSuchVersion", text, key));
        }
    }
    if let Some(reply) = find(&OF_OBJECT, query, key) {
        return Err(reply);
    }
    if query.value("attributes").is_some() {
        return match attributes(headers) {
            Ok(names) if !names.is_empty() => Ok(ObjectQuestion::Attributes(names)),
            Ok(_) => invalid("InvalidRequest", "expected names of attributes in x-amz-object-attributes"),
            Err(name) => {
                let text = format!("x-amz-object-attributes: expected some of {}, found {name}", ATTRIBUTES.join(", "));
                invalid("InvalidArgument", &text)
            }
        };
    }
    match query.value("partNumber").map(str::parse::<u16>) {
        None => Ok(ObjectQuestion::Bytes),
        Some(Ok(1..=10_000)) if headers.contains_key(RANGE) => {
            invalid("InvalidRequest", "expected a range or a partNumber, found both")
        }
        Some(Ok(1)) => Ok(ObjectQuestion::FirstPart),
        Some(Ok(2..=10_000)) => {
            let text = "the object was not uploaded in parts: its only one is 1";
            Err(xml::error(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidPartNumber", text, key))
        }
        Some(_) => invalid("InvalidArgument", "partNumber: expected a number from 1 to 10000"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(query: &str, headers: &[(&'static str, &str)]) -> Result<ObjectQuestion, (u16, bool)> {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        of_object(&Parameters::of(query), &headers, "key").map_err(|reply| (reply.status().as_u16(), true))
    }

    #[test]
    fn only_the_bytes_of_an_object_are_answered_with_its_bytes() {
        use ObjectQuestion::{Attributes, Bytes, FirstPart};
        for query in ["", "versionId=null", "x-id=GetObject", "response-content-type=a/b", "X-Amz-Expires=60"] {
            assert_eq!(asked(query, &[]), Ok(Bytes), "{query}");
        }
        assert_eq!(asked("partNumber=1", &[]), Ok(FirstPart));
        let both = [("x-amz-object-attributes", "ETag, ObjectSize")];
        assert_eq!(asked("attributes", &both), Ok(Attributes(vec!["ETag", "ObjectSize"])));
        for (query, status) in [
            ("acl", 501),
            ("acl&versionId=abc", 404),
            ("tagging&versionId=null", 404),
            ("versionId=abc", 404),
            ("versionId=", 400),
            ("partNumber=2", 416),
            ("partNumber=0", 400),
            ("partNumber=x", 400),
            ("partNumber=10001", 400),
            ("uploadId=x", 404),
            ("uploads", 405),
            ("torrent", 405),
            ("retention", 404),
            ("attributes", 400),
        ] {
            assert_eq!(asked(query, &[]), Err((status, true)), "{query}");
        }
        assert_eq!(asked("attributes", &[("x-amz-object-attributes", "Size")]), Err((400, true)));
        assert_eq!(asked("partNumber=1", &[("range", "bytes=0-1")]), Err((400, true)));
    }

    #[test]
    fn a_bucket_has_no_settings() {
        let status = |query: &str| of_bucket(&Parameters::of(query), "/ckfs").map(|reply| reply.status().as_u16());
        for (query, expected) in [
            ("", None),
            ("list-type=2&prefix=acl", None),
            ("location", Some(200)),
            ("versioning=", Some(200)),
            ("uploads", Some(200)),
            ("policy", Some(404)),
            ("inventory&id=x", Some(501)),
        ] {
            assert_eq!(status(query), expected, "{query}");
        }
    }
}
