//! Pickles as Python and torch write them, and damaged ones.

use ckfs_host::parse_room::ParseRoom;

use super::{machine, *};
use crate::FormatError;

fn read(bytes: &[u8]) -> Result<Unpickled, FormatError> {
    machine::read(bytes, Limits::default(), &|module, _| module == "collections")
}

/// A value as Python would print it, by and large.
fn show(pickle: &Unpickled, id: Id) -> String {
    let all = |ids: &[Id]| ids.iter().map(|id| show(pickle, *id)).collect::<Vec<_>>().join(", ");
    let pairs = |items: &[(Id, Id)]| {
        items
            .iter()
            .map(|(key, value)| format!("{}: {}", show(pickle, *key), show(pickle, *value)))
            .collect::<Vec<_>>()
            .join(", ")
    };
    match pickle.value(id) {
        PickleValue::None => "None".to_owned(),
        PickleValue::Bool(value) => value.to_string(),
        PickleValue::Int(value) => value.to_string(),
        PickleValue::Float(value) => value.to_string(),
        PickleValue::Text(text) => format!("{text:?}"),
        PickleValue::Bytes(bytes) => format!("b{bytes:?}"),
        PickleValue::Tuple(elements) => format!("({})", all(elements)),
        PickleValue::List(elements) => format!("[{}]", all(elements)),
        PickleValue::Set(elements) => format!("{{{}}}", all(elements)),
        PickleValue::Dict(items) => format!("{{{}}}", pairs(items)),
        PickleValue::Global(name) => name.to_string(),
        PickleValue::Object(object) => {
            let state = object.state.map_or(String::new(), |state| format!(" state {}", show(pickle, state)));
            let (callee, args) = (show(pickle, object.callee), show(pickle, object.args));
            format!("{callee}{args}{{{}}}[{}]{state}", pairs(&object.items), all(&object.elements))
        }
        PickleValue::Persistent(id) => format!("persistent {}", show(pickle, *id)),
    }
}

fn shown(bytes: &[u8]) -> String {
    let pickle = read(bytes).unwrap();
    show(&pickle, pickle.root())
}

/// The pickle of a value that was read, or why it is not written anew.
fn copied(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let pickle = read(bytes).map_err(|error| error.to_string())?;
    let mut copy = super::super::write::Pickle::new();
    copy.copy(&pickle, pickle.root())?;
    Ok(copy.finish().0)
}

#[test]
fn values_are_written_anew_as_they_were_read() {
    let rows: [&[u8]; 5] = [
        b"\x80\x02(NJ\xff\xff\xff\xff\x8a\x05\x00\x00\x00\x00\x01\x88\x89G\x3f\xf8\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00at.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00a]q\x01(K\x01K\x02es.",
        // An object of a class without `__init__`, with a state, and one that a call gives, with items.
        b"\x80\x02ccollections\nA\n)\x81}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02ccollections\nOrderedDict\n)RX\x01\x00\x00\x00aK\x01s.",
        b"\x80\x02(X\x07\x00\x00\x00storageccollections\nS\nX\x01\x00\x00\x000X\x06\x00\x00\x00cuda:0K\x04tQ.",
    ];
    for bytes in rows {
        let copy = copied(bytes).unwrap();
        assert_eq!(shown(&copy).replace("cpu", "cuda:0"), shown(bytes));
        let made = |bytes: &[u8]| {
            read(bytes).unwrap().values().any(|value| matches!(value, PickleValue::Object(of) if of.is_new))
        };
        assert_eq!(made(&copy), made(bytes));
    }
    // One list in two places is one list again.
    let shared = copied(b"\x80\x02(]q\x00h\x00t.").unwrap();
    let lists = read(&shared).unwrap().values().filter(|value| matches!(value, PickleValue::List(_))).count();
    assert_eq!(lists, 1);
    for (bytes, message) in [
        (&b"\x80\x02]q\x00h\x00a."[..], "without end"),
        (b"\x80\x04\x8f.", "a set"),
        (b"\x80\x03C\x01a.", "bytes"),
        (b"\x80\x02ccollections\nA.B\n.", "collections.A.B"),
    ] {
        let error = copied(bytes).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn values_of_each_kind_are_read() {
    // As `pickle.dumps(value, protocol)` of CPython 3.11 writes them.
    let rows: [(&[u8], &str); 14] = [
        (b"\x80\x02N.", "None"),
        (b"\x80\x02\x88.", "true"),
        (b"\x80\x04K\x07.", "7"),
        (b"\x80\x02M\x01\x02.", "513"),
        (b"\x80\x02J\xff\xff\xff\xff.", "-1"),
        (b"\x80\x02\x8a\x05\x00\x00\x00\x00\x01.", "4294967296"),
        (b"\x80\x02\x8a\x00.", "0"),
        (b"\x80\x02G\x3f\xf8\x00\x00\x00\x00\x00\x00.", "1.5"),
        (b"\x80\x02X\x02\x00\x00\x00abq\x00.", "\"ab\""),
        (b"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00\x8c\x02ab\x94.", "\"ab\""),
        (b"\x80\x03C\x02\x01\x02q\x00.", "b[1, 2]"),
        (b"\x80\x02(K\x01K\x02K\x03K\x04tq\x00.", "(1, 2, 3, 4)"),
        (b"\x80\x02K\x01K\x02K\x03\x87q\x00.", "(1, 2, 3)"),
        (b"\x80\x04\x8f\x94(K\x01K\x02\x90.", "{1, 2}"),
    ];
    for (bytes, expected) in rows {
        assert_eq!(shown(bytes), expected);
    }
}

#[test]
fn containers_are_filled_after_they_were_stored() {
    assert_eq!(shown(b"\x80\x02]q\x00(K\x01K\x02eh\x00\x86."), "([1, 2], [1, 2])");
    assert_eq!(shown(b"\x80\x02}q\x00(K\x01K\x02K\x03K\x04u."), "{1: 2, 3: 4}");
    // A list that holds itself.
    let pickle = read(b"\x80\x02]q\x00h\x00a.").unwrap();
    assert_eq!(pickle.value(pickle.root()), &PickleValue::List(vec![pickle.root()]));
}

#[test]
fn calls_are_described_and_not_made() {
    let ordered = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01K\x01K\x02sN}b.";
    // An instruction `b` needs its state on top: `N` is popped as the state of `{}`, which is no object.
    assert!(read(ordered).unwrap_err().to_string().ends_with("found None"));
    let ordered = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aK\x02u}b.";
    assert_eq!(shown(ordered), "collections.OrderedDict(){\"a\": 2}[] state {}");
    let pickle = read(ordered).unwrap();
    let item = pickle.item(pickle.root(), "a").unwrap();
    assert_eq!(pickle.natural(item), Some(2));
    let (name, args, object) = pickle.call(pickle.root()).unwrap();
    assert_eq!((name.to_string(), args.len(), object.items.len()), ("collections.OrderedDict".to_owned(), 0, 1));
    assert_eq!(shown(b"\x80\x04\x8c\x0bcollections\x8c\x07Counter\x93)\x81."), "collections.Counter(){}[]");
    assert_eq!(shown(b"\x80\x02X\x01\x00\x00\x000Q."), "persistent \"0\"");
}

#[test]
fn names_that_are_not_listed_are_refused_by_name() {
    for bytes in
        [&b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R."[..], b"\x80\x04\x8c\x05posix\x8c\x06system\x93."]
    {
        let error = read(bytes).unwrap_err();
        assert!(error.to_string().contains(": posix.system is not on the list"), "{error}");
    }
    let error = read(b"\x80\x02ca\x1b[1m\nb\n.").unwrap_err().to_string();
    assert!(!error.contains('\x1b'), "{error}");
}

#[test]
fn what_is_wrong_is_an_error() {
    let rows: [(&[u8], &str); 16] = [
        (b"", "ends at byte 0"),
        (b"\x80\x02", "ends at byte 2"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x02.", "found an empty stack"),
        (b"\x80\x02(.", "found a mark"),
        (b"\x80\x02t.", "expected a mark, found none"),
        (b"\x80\x02h\x05.", "nothing was stored under number 5"),
        (b"\x80\x02X\xff\xff\xff\xffab.", "ends at byte 10"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "not UTF-8"),
        (b"\x80\x02\x8a\x11aaaaaaaaaaaaaaaaa.", "an integer of 17 bytes"),
        (b"\x80\x02K\x01K\x02a.", "expected a list or set below the elements, found an int"),
        (b"\x80\x02}(K\x01u.", "an odd number of both"),
        (b"\x80\x02K\x01)R.", "expected a class or function to call, found an int"),
        // A function that is given twice, as its own arguments.
        (b"\x80\x02ccollections\nOrderedDict\n2R.", "expected a tuple of arguments, found"),
        (b"\x80\x02)2R.", "expected a class or function to call, found"),
        (b"\x80\x02I1\n.", "instruction 0x49 is not supported"),
    ];
    for (bytes, expected) in rows {
        let error = read(bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
}

#[test]
fn limits_hold() {
    let few = |values_max, text_bytes_max| Limits { values_max, text_bytes_max, ..Limits::default() };
    let read = |bytes: &[u8], limits| machine::read(bytes, limits, &|_, _| true);
    assert!(read(b"\x80\x02(NNNt.", few(4, 0)).is_ok());
    let error = |bytes: &[u8], limits| read(bytes, limits).unwrap_err().to_string();
    assert!(error(b"\x80\x02(NNNt.", few(3, 0)).ends_with("more than 3 values"));
    // One value, many references to it, or marks without end.
    let many = [b"\x80\x02N".as_slice(), &[b'2'; 100]].concat();
    assert!(error(&many, few(50, 0)).ends_with("more than 50 values on the stack"));
    assert!(error(&[b'('; 100], few(50, 0)).ends_with("more than 50 marks"));
    assert!(error(b"\x80\x02X\x02\x00\x00\x00ab.", few(9, 1)).ends_with("more than 1 bytes of text"));
}

#[test]
fn values_count_against_the_memory_of_all_pickles() {
    static ROOM: ParseRoom = ParseRoom::new(8 << 20);
    let limits = Limits { room: &ROOM, ..Limits::default() };
    let read = |bytes: &[u8]| machine::read(bytes, limits, &|_, _| true);
    let pickle = |start: &[u8], many: &[u8], count| [b"\x80\x02", start, &many.repeat(count)[..], b"."].concat();
    // Empty values, numbers, one value stored under many numbers, many references, marks, texts, calls, items of a dict.
    let rows: [(&[u8], &[u8]); 12] = [
        (b"", b"}"),
        (b"", b"]"),
        (b"", b")"),
        (b"", b"N"),
        (b"", b"K\x01"),
        (b"N", b"\x94"),
        (b"N", b"2"),
        (b"", b"("),
        (b"N", b"\x85"),
        (b"", b"U\x01a"),
        (b"ca\nb\nq\x00)q\x01", b"h\x00h\x01R"),
        (b"]Nq\x000", b"h\x00a"),
    ];
    for (start, many) in rows {
        let error = read(&pickle(start, many, 3 << 20)).unwrap_err().to_string();
        assert!(error.contains("expected at most 8388608"), "{many:?}: {error}");
    }
    // Each fits alone: what the first holds, the second lacks.
    let half = pickle(b"", b"}", 100 << 10);
    let first = read(&half).unwrap();
    assert!(read(&half).unwrap_err().to_string().contains("expected at most 8388608"));
    drop(first);
    assert!(read(&half).is_ok());
}

#[test]
fn damaged_pickles_never_panic() {
    let whole = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aK\x02X\x01\x00\x00\x00b](K\x01\x85G\x3f\xf8\x00\x00\x00\x00\x00\x00eu}b.";
    assert!(read(whole).is_ok());
    for len in 0..whole.len() {
        assert!(read(&whole[..len]).is_err());
    }
    for at in 0..whole.len() {
        for byte in 0..=255 {
            let mut bytes = whole.to_vec();
            bytes[at] = byte;
            drop(read(&bytes));
        }
    }
}
