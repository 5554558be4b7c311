//! Pages of listings, before the client of the store reads them: keys that name no file are taken out.
//!
//! The client gives up a listing at the first key that it cannot take for a path. Such keys are usual in buckets: consoles make
//! empty objects in place of directories, and scripts join paths with a slash too many.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use ckfs_host::{PathFlaw, RelativePath};
use futures_util::StreamExt;
use object_store::client::{HttpError, HttpErrorKind, HttpResponse, HttpResponseBody};
use parking_lot::Mutex;
use quick_xml::{
    Reader,
    escape::unescape,
    events::{BytesStart, Event},
};

use super::super::listing::PassedOver;

/// Most bytes of a page. A thousand keys of the longest kind have 7 MB.
const PAGE_BYTES_MAX: usize = 64 << 20;

/// Takes keys that name no file below a prefix out of a page. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct PageFilter {
    /// With its last slash.
    prefix: Arc<str>,
    passed: Arc<Mutex<Vec<PassedOver>>>,
}

impl PageFilter {
    /// A filter of keys below `prefix`, which ends with a slash or is empty.
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: Arc::from(prefix), passed: Arc::default() }
    }

    /// What was passed over, except for markers of directories.
    pub(super) fn take(&self) -> Vec<PassedOver> {
        std::mem::take(&mut *self.passed.lock())
    }

    /// The reply without such keys.
    ///
    /// # Errors
    /// It breaks off, or is too long.
    pub(super) async fn filter(&self, reply: HttpResponse) -> Result<HttpResponse, HttpError> {
        let (parts, body) = reply.into_parts();
        let (mut stream, mut all) = (body.bytes_stream(), BytesMut::new());
        while let Some(bytes) = stream.next().await {
            all.extend_from_slice(&bytes?);
            if all.len() > PAGE_BYTES_MAX {
                let message = format!("a page of the listing has more than {PAGE_BYTES_MAX} bytes");
                return Err(HttpError::new(HttpErrorKind::Decode, std::io::Error::other(message)));
            }
        }
        let all = all.freeze();
        let (kept, passed) = without_odd_keys(&all, &self.prefix).unwrap_or_else(|| (all, Vec::new()));
        self.passed.lock().extend(passed);
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(kept)))
    }
}

/// An object of a page, as far as it was read.
#[derive(Debug, Default)]
struct Item {
    start: usize,
    key: String,
    size: Option<u64>,
}

impl Item {
    /// Takes the text of an element of the object, if it is its key or its size.
    fn read(&mut self, reader: &mut Reader<&[u8]>, tag: &BytesStart<'_>) -> Option<()> {
        match tag.local_name().as_ref() {
            b"Key" | b"Name" => {
                let text = reader.read_text(tag.name()).ok()?.decode().ok()?;
                self.key = unescape(&text).ok()?.into_owned();
            }
            b"Size" | b"Content-Length" => {
                self.size = reader.read_text(tag.name()).ok()?.decode().ok()?.trim().parse().ok();
            }
            _ => {}
        }
        Some(())
    }
}

/// The text of a page without the objects whose keys name no file, and these. `None` if it is no such text: the client says so.
fn without_odd_keys(page: &Bytes, prefix: &str) -> Option<(Bytes, Vec<PassedOver>)> {
    let text = std::str::from_utf8(page).ok()?;
    let mut reader = Reader::from_str(text);
    let (mut kept, mut copied, mut passed) = (BytesMut::new(), 0, Vec::new());
    let mut item: Option<Item> = None;
    loop {
        let before = usize::try_from(reader.buffer_position()).ok()?;
        let event = reader.read_event().ok()?;
        if matches!(event, Event::Eof) {
            break;
        }
        if let Event::Start(tag) = &event {
            let name = tag.local_name();
            // S3 and Google name an object Contents, Azure names it Blob.
            if matches!(name.as_ref(), b"Contents" | b"Blob") {
                item = Some(Item { start: before, ..Item::default() });
            } else if let Some(item) = &mut item {
                item.read(&mut reader, tag)?;
            }
        } else if let Event::End(tag) = &event
            && matches!(tag.local_name().as_ref(), b"Contents" | b"Blob")
        {
            let Some(Item { start, key, size }) = item.take() else { continue };
            let Some(reason) = reason_of(&key, prefix) else { continue };
            kept.extend_from_slice(page.get(copied..start)?);
            copied = usize::try_from(reader.buffer_position()).ok()?;
            // Empty objects with a slash at the end stand for directories.
            if !(key.ends_with('/') && size == Some(0)) {
                passed.push(PassedOver { key, reason });
            }
        }
    }
    kept.extend_from_slice(page.get(copied..)?);
    Some((kept.freeze(), passed))
}

/// Why a key names no file below a prefix.
fn reason_of(key: &str, prefix: &str) -> Option<&'static str> {
    let Some(path) = key.strip_prefix(prefix) else { return Some("it is not below the prefix") };
    if key.ends_with('/') {
        return Some("its name ends with a slash");
    }
    if path.bytes().any(|byte| byte.is_ascii_control()) {
        return Some("it has a control character");
    }
    // Above the prefix it is as the user wrote it.
    RelativePath::parse(path).err().map(|PathFlaw(text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_name_no_file_are_taken_out() {
        let object = |key: &str, size: u64| format!("<Contents><Key>{key}</Key><Size>{size}</Size></Contents>");
        let deep = "d/".repeat(40);
        let keys = [
            ("p/", 0),
            ("p/original/", 0),
            ("p/a.json", 3),
            ("p/x//y", 1),
            ("p//z", 1),
            ("p/../up", 1),
            ("p/./here", 1),
            ("p/full/", 7),
            ("p/a &amp; b", 2),
            ("p/new&#10;line", 2),
            (&format!("p/{deep}f"), 1),
        ];
        let text: String = keys.iter().map(|(key, size)| object(key, *size)).collect();
        let page =
            Bytes::from(format!("<?xml version=\"1.0\"?><L><Name>b</Name>{text}<IsTruncated>false</IsTruncated></L>"));
        let (kept, passed) = without_odd_keys(&page, "p/").unwrap();
        let expected = format!(
            "<?xml version=\"1.0\"?><L><Name>b</Name>{}{}<IsTruncated>false</IsTruncated></L>",
            object("p/a.json", 3),
            object("p/a &amp; b", 2)
        );
        assert_eq!(std::str::from_utf8(&kept).unwrap(), expected);
        let passed: Vec<&str> = passed.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(passed, ["p/x//y", "p//z", "p/../up", "p/./here", "p/full/", "p/new\nline", &format!("p/{deep}f")]);
        let azure = Bytes::from_static(
            b"<E><Blobs><Blob><Name>d/</Name><Properties><Content-Length>0</Content-Length></Properties></Blob><Blob><Name>k</Name></Blob></Blobs></E>",
        );
        let (kept, passed) = without_odd_keys(&azure, "").unwrap();
        assert_eq!((&kept[..], passed.len()), (&b"<E><Blobs><Blob><Name>k</Name></Blob></Blobs></E>"[..], 0));
        assert_eq!(without_odd_keys(&Bytes::from_static(b"<E><a></b></E>"), ""), None);
    }
}
